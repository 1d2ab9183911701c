//! `./run bench broadcast [--receivers N] [--bytes B] [--lag] [--rounds R]`: what a publisher sends to N subscribers,
//! beside a sender to one receiver.
//!
//! Each receiver is a process. A round measures the plain channel and then each broadcast, for a second each, so that
//! what slows the machine slows all. The rate is that of the sender, which waits for the slowest: each receiver has it.
//! Without `--receivers`, 1, 2, 8 and 32; without `--bytes`, 256 and 65536. With `--lag`, the subscribers lag.

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

/// Messages per second of `send` in [`TIME`].
fn rate(mut send: impl FnMut() -> Result<()>) -> Result<f64> {
    let (began, mut messages) = (Instant::now(), 0);
    while began.elapsed() < TIME {
        (0..UNIT).try_for_each(|_| send())?;
        messages += UNIT;
    }
    Ok(messages as f64 / began.elapsed().as_secs_f64())
}

fn plain(name: &str, payload: &[u8]) -> Result<f64> {
    let listener = Listener::bind(name)?;
    // Dropped after the sender.
    let _receiver = start(&["receive", name]);
    let mut sender = listener.accept_sender()?;
    rate(|| sender.send(payload))
}

fn broadcast(name: &str, payload: &[u8], receivers: usize, policy: &str) -> Result<(f64, u64)> {
    // Dropped after the publisher.
    let mut subscribers = Vec::new();
    let mut publisher = Options::new().publish_at(name)?;
    subscribers.extend((0..receivers).map(|_| start(&["subscribe", name, policy])));
    publisher.wait_subscribers_until(receivers, Deadline::Never)?;
    let rate = rate(|| publisher.send(payload))?;
    Ok((rate, publisher.counters().wakes_sent))
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
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
        let (mut plains, mut found) = (Vec::new(), vec![(Vec::new(), Vec::new(), 0); receivers.len()]);
        for _ in 0..rounds {
            let plain = plain(&name, &payload)?;
            plains.push(plain / 1e3);
            for (receivers, (rates, ratios, wakes)) in receivers.iter().zip(&mut found) {
                let (rate, woken) = broadcast(&name, &payload, *receivers, policy)?;
                rates.push(rate / 1e3);
                ratios.push(rate / plain);
                *wakes += woken;
            }
        }
        let shown =
            |values: &mut Vec<f64>| format!("{:.0} ({:.0}, {:.0})", median(values), values[0], values[rounds - 1]);
        println!("{bytes} B, plain, 1 receiver: {}", shown(&mut plains));
        for (receivers, (rates, ratios, wakes)) in receivers.iter().zip(&mut found) {
            let ratio = median(ratios);
            println!(
                "{bytes} B, broadcast, {receivers} receivers: {}, {ratio:.2} ({:.2}, {:.2}) of plain, {:.0} delivered, {} wakes a second",
                shown(rates),
                ratios[0],
                ratios[rounds - 1],
                median(rates) * *receivers as f64,
                *wakes / rounds as u64
            );
        }
    }
    Ok(())
}
