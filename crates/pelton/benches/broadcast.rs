//! `./run bench broadcast [--receivers N] [--bytes B] [--lag] [--rounds R]`: what a publisher sends to N subscribers,
//! beside a sender to one receiver, and beside N channels into each of which a sender copies each message.
//!
//! Each receiver is a process. A round measures the plain channel and then, for each N, the broadcast and the copies,
//! for a second each, so that what slows the machine slows all. The rate is that of the sender, which waits for the
//! slowest: each receiver has it. Beside it stands the processor time of the sending thread for each message. Without
//! `--receivers`, 1, 2, 8 and 32; without `--bytes`, 256 and 65536. With `--lag`, the subscribers lag.

use pelton::{Deadline, Listener, Options, Policy, Receiver, Result};
use std::hint::black_box;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const TIME: Duration = Duration::from_secs(1);
/// Messages between two readings of the clock.
const UNIT: u64 = 64;

fn main() -> Result<()> {
    // cargo adds `--bench`.
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["receive", name] => receive(name),
        ["subscribe", name, policy] => subscribe(name, policy),
        _ => measure(&arguments),
    }
}

/// The receiver of the plain channel.
fn receive(name: &str) -> Result<()> {
    let mut receiver: Receiver = Options::new().connect_deadline(Duration::from_secs(10)).connect_receiver(name)?;
    while let Ok(message) = receiver.receive() {
        black_box(message.first());
    }
    Ok(())
}

fn subscribe(name: &str, policy: &str) -> Result<()> {
    let policy = if policy == "lag" { Policy::Lag } else { Policy::Gate };
    let options = Options::new().policy(policy).connect_deadline(Duration::from_secs(10));
    let mut subscriber = options.connect_subscriber(name)?;
    while let Ok(message) = subscriber.receive() {
        black_box(message.first());
    }
    Ok(())
}

/// A receiver, in a process that ends after its sender.
struct Peer(Child);

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.wait();
    }
}

fn start(arguments: &[&str]) -> Peer {
    let program = std::env::current_exe().expect("the path of this program");
    Peer(Command::new(program).args(arguments).spawn().expect("this program starts"))
}

/// What a sender did in [`TIME`].
#[derive(Clone, Copy)]
struct Sending {
    /// Messages per second, in thousands.
    rate: f64,
    /// Nanoseconds of its processor for each message.
    cpu_ns: f64,
    wakes: u64,
}

fn sending(mut send: impl FnMut() -> Result<()>) -> Result<Sending> {
    let used = || {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
    };
    let (began, used_before, mut messages) = (Instant::now(), used(), 0);
    while began.elapsed() < TIME {
        (0..UNIT).try_for_each(|_| send())?;
        messages += UNIT;
    }
    let messages = messages as f64;
    let (rate, cpu_ns) = (messages / began.elapsed().as_secs_f64() / 1e3, (used() - used_before) / messages);
    Ok(Sending { rate, cpu_ns, wakes: 0 })
}

fn copies(name: &str, payload: &[u8], receivers: usize) -> Result<Sending> {
    let listener = Listener::bind(name)?;
    // Dropped after the senders.
    let _receivers: Vec<Peer> = (0..receivers).map(|_| start(&["receive", name])).collect();
    let mut senders = (0..receivers).map(|_| listener.accept_sender()).collect::<Result<Vec<_>>>()?;
    sending(|| senders.iter_mut().try_for_each(|sender| sender.send(payload)))
}

fn broadcast(name: &str, payload: &[u8], receivers: usize, policy: &str) -> Result<Sending> {
    // Dropped after the publisher.
    let mut subscribers = Vec::new();
    let mut publisher = Options::new().publish_at(name)?;
    subscribers.extend((0..receivers).map(|_| start(&["subscribe", name, policy])));
    publisher.wait_subscribers_until(receivers, Deadline::Never)?;
    let sending = sending(|| publisher.send(payload))?;
    Ok(Sending { wakes: publisher.counters().wakes_sent, ..sending })
}

/// The median, the lowest and the highest of the values.
fn spread(values: impl Iterator<Item = f64>) -> [f64; 3] {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    [values[values.len() / 2], values[0], values[values.len() - 1]]
}

fn measure(arguments: &[String]) -> Result<()> {
    let value = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        Some(arguments.get(at + 1).and_then(|text| text.parse::<usize>().ok()).expect("a number after the option"))
    };
    let receivers = value("--receivers").map_or(vec![1, 2, 8, 32], |receivers| vec![receivers]);
    let sizes = value("--bytes").map_or(vec![256, 65_536], |bytes| vec![bytes]);
    let rounds = value("--rounds").unwrap_or(5);
    let policy = if arguments.iter().any(|argument| argument == "--lag") { "lag" } else { "gate" };
    let name = format!("unix:{}/pelton-bench-{}", std::env::temp_dir().display(), std::process::id());
    println!("policy {policy}, median of {rounds} rounds (lowest, highest), thousand messages/s of the sender");
    for bytes in sizes {
        let payload = vec![7; bytes];
        let (mut plains, mut found) = (Vec::new(), vec![(Vec::new(), Vec::new()); receivers.len()]);
        for _ in 0..rounds {
            plains.push(copies(&name, &payload, 1)?);
            for (receivers, (broadcasts, copied)) in receivers.iter().zip(&mut found) {
                broadcasts.push(broadcast(&name, &payload, *receivers, policy)?);
                copied.push(copies(&name, &payload, *receivers)?);
            }
        }
        let show = |values: &[Sending]| {
            let [rate, least, most] = spread(values.iter().map(|sending| sending.rate));
            let [cpu_ns, ..] = spread(values.iter().map(|sending| sending.cpu_ns));
            format!("{rate:.0} ({least:.0}, {most:.0}), {cpu_ns:.0} ns of processor time each")
        };
        let ratio = |of: &[Sending], to: &[Sending]| {
            let [ratio, least, most] = spread(of.iter().zip(to).map(|(of, to)| of.rate / to.rate));
            format!("{ratio:.2} ({least:.2}, {most:.2})")
        };
        println!("{bytes} B, plain, 1 receiver: {}", show(&plains));
        for (receivers, (broadcasts, copied)) in receivers.iter().zip(&found) {
            let [wakes, ..] = spread(broadcasts.iter().map(|sending| sending.wakes as f64));
            println!("{bytes} B, broadcast, {receivers} receivers: {}", show(broadcasts));
            println!(
                "    {} of plain, {} of {receivers} copies, {wakes:.0} wakes a second",
                ratio(broadcasts, &plains),
                ratio(broadcasts, copied)
            );
        }
    }
    Ok(())
}
