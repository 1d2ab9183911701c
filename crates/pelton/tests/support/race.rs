//! Publishing against going to sleep, with delays that make the two meet; and who tells a hang.
#![allow(dead_code, reason = "each test file uses its part of it")]

use super::*;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

static ROUND: AtomicU64 = AtomicU64::new(0);
static FIGURES: Mutex<String> = Mutex::new(String::new());

/// No round takes so long, whatever the machine is doing.
const STILL: Duration = Duration::from_secs(20);

/// Has a thread end this process, with the role (the seed is in it) and the counters, when the rounds stop.
fn tell_a_hang(role: &Role) {
    let role = role.text();
    std::thread::spawn(move || {
        let mut seen = u64::MAX;
        loop {
            std::thread::sleep(STILL);
            let round = ROUND.load(Relaxed);
            if round == seen {
                let text = format!("HANG in round {round} of {role}: {}", FIGURES.lock().unwrap());
                eprintln!("{text}");
                say(text);
                std::process::abort();
            }
            seen = round;
        }
    });
}

fn note(round: u64, sender: Option<&Sender>, receiver: Option<&Receiver>) {
    ROUND.store(round, Relaxed);
    // A figure from before the wait is what tells who owed whom a wake.
    if round.is_multiple_of(16) {
        let text = format!("{:?} {:?}", sender.map(Sender::counters), receiver.map(Receiver::counters));
        *FIGURES.lock().unwrap() = text;
    }
}

/// Keeps the processor for up to so many nanoseconds, as often as not for none.
fn delay(random: &mut Random, most_ns: u64) {
    let for_ns = match random.below(4) {
        0 => 0,
        1 => random.below(500),
        _ => random.below(most_ns),
    };
    let until = Instant::now() + Duration::from_nanos(for_ns);
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}

fn receive_one(receiver: &mut Receiver, how: How, turns: &Loop) -> u64 {
    loop {
        if how == How::Block {
            return u64::from_le_bytes(receiver.receive().unwrap()[..8].try_into().unwrap());
        }
        if let Some(message) = receiver.try_receive().unwrap() {
            return u64::from_le_bytes(message[..8].try_into().unwrap());
        }
        if receiver.arm().unwrap() {
            turns.turn(receiver.as_fd());
        }
    }
}

/// Each side has a processor of its own, where there are two: two sides on one never meet.
fn pin(role: &Role) {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let allowed = sched_getaffinity(None).unwrap();
    let all: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
    let mut one = CpuSet::new();
    one.set(all[usize::from(role.get("listen") == "yes") % all.len()]);
    sched_setaffinity(None, &one).unwrap();
}

/// A message there, a message back; the role says who begins.
pub fn ping_pong(role: &Role, between: impl FnOnce()) {
    let how = How::parse(role.get("how"));
    let (there, back) = (role.get("name").to_owned(), format!("{}b", role.get("name")));
    let options = Options::new().capacity(65536).connect_deadline(deadline());
    let listens = role.get("listen") == "yes";
    let (mut sender, mut receiver) = if there.starts_with("path:") {
        if listens {
            say("listening");
        }
        // Both are open before either waits for the other.
        let [mine, others] = if listens { [&there, &back] } else { [&back, &there] };
        let options = Options::new().capacity(65536);
        let sender = options.create_sender(&mine[5..]).unwrap();
        (sender, options.create_receiver(&others[5..]).unwrap())
    } else if listens {
        let (first, second) = (options.listen(&there).unwrap(), options.listen(&back).unwrap());
        say("listening");
        let sender = first.accept_sender_until(deadline()).unwrap().unwrap();
        (sender, second.accept_receiver_until(deadline()).unwrap().unwrap())
    } else {
        let receiver = options.connect_receiver(&there).unwrap();
        (options.connect_sender(&back).unwrap(), receiver)
    };
    tell_a_hang(role);
    pin(role);
    between();
    let mut random = Random::new(role.number("seed").unwrap() + u64::from(role.get("listen") == "yes"));
    let turns = Loop::new(how, receiver.as_fd());
    for round in 0..role.number("rounds").unwrap() {
        note(round, Some(&sender), Some(&receiver));
        if role.get("listen") == "yes" {
            delay(&mut random, 25_000);
            sender.send(&round.to_le_bytes()).unwrap();
            assert_eq!(receive_one(&mut receiver, how, &turns), round);
        } else {
            assert_eq!(receive_one(&mut receiver, how, &turns), round);
            delay(&mut random, 25_000);
            sender.send(&round.to_le_bytes()).unwrap();
        }
    }
    say(format!("sleeps {} wakes {}", receiver.counters().sleeps, sender.counters().wakes_sent));
    // A side that closes now does not disturb the other: it has all it waits for.
    hear();
}

/// A lane that holds one or two messages, so that now the one side sleeps and now the other, and often only one release
/// is left to wake the sender.
pub fn narrow(role: &Role) {
    let how = How::parse(role.get("how"));
    let (rounds, seed) = (role.number("rounds").unwrap(), role.number("seed").unwrap());
    let mut random = Random::new(seed);
    let sleeps = if role.get("side") == "send" {
        let mut sender = sender(role);
        tell_a_hang(role);
        pin(role);
        let turns = Loop::new(how, sender.as_fd());
        for round in 0..rounds {
            note(round, Some(&sender), None);
            let mut message = [0; 32_700];
            message[..8].copy_from_slice(&round.to_le_bytes());
            send_one(&mut sender, &message, how, &turns).unwrap();
            delay(&mut random, 2_000);
        }
        assert!(sender.drain_until(deadline()).unwrap());
        sender.counters().sleeps
    } else {
        let mut receiver = receiver(role);
        tell_a_hang(role);
        pin(role);
        let turns = Loop::new(how, receiver.as_fd());
        for round in 0..rounds {
            note(round, None, Some(&receiver));
            assert_eq!(receive_one(&mut receiver, how, &turns), round);
            delay(&mut random, 25_000);
        }
        receiver.counters().sleeps
    };
    say(format!("sleeps {sleeps}"));
    hear();
}

/// Runs both sides of a role to their end; answers what they say then.
#[track_caller]
pub fn run(first: Role, second: Role) -> [String; 2] {
    // One pair at a time: two sides that wait for a processor do not race.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let first = Child::start(first.with("listen", "yes"));
    first.expect("listening");
    let second = Child::start(second);
    // Rounds may be many: the children tell a hang themselves.
    let lines = [&first, &second].map(|child| child.lines.recv().expect("the child ended"));
    for line in &lines {
        assert!(line.starts_with("sleeps"), "{lines:?}");
    }
    lines
}

/// The number after a word.
pub fn figure(line: &str, word: &str) -> u64 {
    let mut words = line.split(' ').skip_while(|found| *found != word);
    words.nth(1).unwrap().parse().unwrap()
}
