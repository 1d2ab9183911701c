//! `./run bench observers [PAIRS]`: what `pelton top` and `pelton tail` cost a saturated stream of 256 bytes.
//!
//! The stream never pauses; the tool goes on and is stopped (SIGCONT, SIGSTOP) by turns, in random order. Half a second
//! with it and the next half without it are a pair, whose ratio is free of what slows both down. The first row is a
//! program that does nothing.

use anyhow::{Context, Result, ensure};
use pelton::{Listener, Sender};
use rustix::{
    process::{Pid, Signal, kill_process},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
};
use std::{
    fs::{File, read_to_string},
    hash::{BuildHasher, RandomState},
    io::Read,
    process::{Child, Command, Stdio, exit},
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread::{sleep, spawn},
    time::{Duration, Instant},
};

const TOOL: &str = env!("CARGO_BIN_EXE_pelton");
const WINDOW: Duration = Duration::from_millis(500);
static RECEIVED: AtomicU64 = AtomicU64::new(0);
static IS_DONE: AtomicBool = AtomicBool::new(false);

fn main() -> Result<()> {
    // cargo adds `--bench`.
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let name = format!("observed-{}", std::process::id());
    match (arguments.next(), arguments.next()) {
        (Some(send), Some(to)) if send == "send" => endless(&to),
        (pairs, _) => {
            let pairs = pairs.map_or(Ok(100), |pairs| pairs.parse()).context("PAIRS: wanted a number")?;
            ensure!(pairs >= 10, "PAIRS: found {pairs}, wanted 10 or more");
            measure(&name, pairs)
        }
    }
}

/// Sends until the receiver ends.
fn endless(name: &str) -> Result<()> {
    let mut sender = Sender::connect(name)?;
    while sender.send(&[7; 256]).is_ok() {}
    Ok(())
}

fn measure(name: &str, pairs: usize) -> Result<()> {
    let listener = Listener::bind(name)?;
    let mut sender = Command::new(std::env::current_exe()?).args(["send", name]).spawn()?;
    let mut receiver = listener.accept_receiver()?;
    let receiving = spawn(move || {
        let mut received = 0;
        while let Ok(message) = receiver.receive() {
            received += u64::from(message[0] == 7);
            // Not with each message: the counter's cache line is another processor's.
            if received % 1024 == 0 {
                RECEIVED.store(received, Relaxed);
            }
        }
        if !IS_DONE.load(Relaxed) {
            eprintln!("observers: the stream has ended");
            exit(1);
        }
    });
    println!("{:8} {:>24} {:>12} {:>12}", "", "rate with it (95 %)", "messages/s", "its CPU");
    let rows = [("nothing", vec!["sleep", "1000"]), ("top", vec![TOOL, "top"]), ("tail", vec![TOOL, "tail", name])];
    for (row, command) in rows {
        let mut tool = on_terminal(&command)?;
        let ratios = paired(&tool, pairs);
        tool.kill()?;
        tool.wait()?;
        let (mut ratios, rate, cpu) = ratios?;
        ratios.sort_by(f64::total_cmp);
        // The interval of a median, by the ranks.
        let (middle, spread) = (pairs / 2, (0.98 * (pairs as f64).sqrt()).ceil() as usize);
        let (low, high) = (ratios[middle - spread], ratios[(middle + spread).min(pairs - 1)]);
        let ratio = format!("{:.3} ({low:.3} to {high:.3})", ratios[middle]);
        println!("{row:8} {ratio:>24} {rate:12.3e} {:>12}", format!("{:.2} %", 100.0 * cpu));
    }
    IS_DONE.store(true, Relaxed);
    sender.kill()?;
    sender.wait()?;
    // It has a part of the listener, whose name goes with the last one.
    let _ = receiving.join();
    Ok(())
}

/// The ratios; messages per second without the tool, on average; and its part of a processor.
fn paired(tool: &Child, pairs: usize) -> Result<(Vec<f64>, f64, f64)> {
    let pid = Pid::from_child(tool);
    // It finds the stream first.
    sleep(2 * WINDOW);
    let before = processor_seconds(tool.id())?;
    let mut rates = [Vec::new(), Vec::new()];
    for _ in 0..pairs {
        let first = (RandomState::new().hash_one(0) % 2) as usize;
        for which in [first, 1 - first] {
            kill_process(pid, if which == 0 { Signal::STOP } else { Signal::CONT })?;
            let (began, received) = (Instant::now(), RECEIVED.load(Relaxed));
            sleep(WINDOW);
            rates[which].push((RECEIVED.load(Relaxed) - received) as f64 / began.elapsed().as_secs_f64());
        }
    }
    let cpu = (processor_seconds(tool.id())? - before) / (pairs as f64 * WINDOW.as_secs_f64());
    let ratios = rates[1].iter().zip(&rates[0]).map(|(with, without)| with / without).collect();
    Ok((ratios, rates[0].iter().sum::<f64>() / pairs as f64, cpu))
}

fn processor_seconds(pid: u32) -> Result<f64> {
    let stat = read_to_string(format!("/proc/{pid}/stat"))?;
    let behind_name = stat.rsplit(')').next().context("a line without a name")?;
    let ticks: Vec<f64> = behind_name.split(' ').skip(12).take(2).map(str::parse).collect::<Result<_, _>>()?;
    Ok(ticks.iter().sum::<f64>() / rustix::param::clock_ticks_per_second() as f64)
}

/// Starts a program on a terminal that somebody reads.
fn on_terminal(command: &[&str]) -> Result<Child> {
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
    grantpt(&terminal)?;
    unlockpt(&terminal)?;
    let program_side = File::options().read(true).write(true).open(ptsname(&terminal, Vec::new())?.to_str()?)?;
    let child = Command::new(command[0])
        .args(&command[1..])
        .stdin(program_side.try_clone()?)
        .stdout(program_side)
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("{}: it does not start", command[0]))?;
    let mut screen = File::from(terminal);
    // Ends with the program.
    spawn(move || while screen.read(&mut [0; 1 << 16]).is_ok_and(|read| read > 0) {});
    Ok(child)
}
