//! Races of one side that goes to sleep with the other, which publishes or releases at the same time, and a count of
//! lost wake-ups.
//!
//! In each race one of two threads, the **sleeper**, reports that it is about to sleep. It announces the sleep
//! (`arm`), rechecks, and sleeps if there is nothing. The other, the **waker**, waits for that report, lets a moment
//! pass, and sends a message, or releases the messages in the lane. The moment is steered: shorter after the waker
//! found the sleeper announced, longer otherwise. So it converges to where the outcome is open, and some randomness
//! varies it.
//!
//! Three of the four outcomes are right: both saw each other; only the waker saw the sleeper (the doorbell wakes it);
//! only the sleeper saw the event (it does not sleep). In the fourth, a **lost wake-up**, neither saw the other. The
//! proof does not depend on time: the waker reports that its call has returned, and a sleeper not woken by then will
//! never be. Such a sleeper takes the event itself (the rescue), counts it, and continues; the count must be 0.

use crate::race::child;
use crate::support::*;
use pelton::{Options, Receiver, Sender, Sent};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// State that the two sides share besides the channel under test. It is in memory that both map, and each word has
/// one writer.
#[repr(C, align(4096))]
struct Shared {
    /// The sleeper: it is about to sleep until the waker has finished its part of this race.
    going: Word,
    /// The waker: its calls for this race have returned.
    done: Word,
}

/// Alone in its cache lines.
#[repr(C, align(128))]
struct Word(AtomicU64);

/// In place of a race number: there are no more races.
const OVER: u64 = u64::MAX;

impl Shared {
    /// In a file that the other process opens too.
    fn at(path: &Path) -> &'static Shared {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let file = std::fs::File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap();
        file.set_len(size_of::<Shared>() as u64).unwrap();
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: the mapping is new, whole, aligned to a page and never unmapped; zeros are a valid Meeting.
        unsafe { &*mmap(std::ptr::null_mut(), size_of::<Shared>(), protection, flags, &file, 0).unwrap().cast() }
    }

    /// Waits until the sleeper starts a race after `last`.
    fn next(&self, last: u64) -> u64 {
        wait_until(|| self.going.0.load(Ordering::Acquire) > last);
        self.going.0.load(Ordering::Acquire)
    }

    fn is_done(&self, race: u64) -> bool {
        self.done.0.load(Ordering::Acquire) >= race
    }
}

fn wait_until(condition: impl Fn() -> bool) {
    let mut polls = 0u32;
    while !condition() {
        polls += 1;
        // Both sides may share one processor.
        if polls.is_multiple_of(1 << 14) { std::thread::yield_now() } else { std::hint::spin_loop() }
    }
}

/// How the sleeper sleeps. Usually it polls its descriptor repeatedly: for the protocol that equals sleeping, and
/// many races fit in a second.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Manner {
    Ask,
    Poll,
    /// In the call that waits, which spins first.
    Block,
}

impl Manner {
    fn of(race: u64) -> Manner {
        match race % 64 {
            0 => Manner::Block,
            16 | 32 | 48 => Manner::Poll,
            _ => Manner::Ask,
        }
    }
}

/// Only a lost wake-up takes that long, in a call that waits.
const RESCUE: Duration = Duration::from_secs(10);
/// That many lost wake-ups are enough evidence.
const ENOUGH: u64 = 100;
/// No race takes that long, however busy the machine is.
const STILL: Duration = Duration::from_secs(60);

/// One side's results of the races.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub races: u64,
    /// Counted by the sleeper: it slept.
    pub slept: u64,
    /// By the waker: it found a sleeper and rang.
    pub rang: u64,
    pub lost: u64,
}

impl Tally {
    fn parse(text: &str) -> Tally {
        let words: Vec<u64> = text.split(' ').filter_map(|word| word.parse().ok()).collect();
        let &[races, slept, rang, lost] = &words[..] else { panic!("a child said: {text}") };
        Tally { races, slept, rang, lost }
    }

    pub fn add(&mut self, other: Tally) {
        self.races += other.races;
        self.slept += other.slept;
        self.rang += other.rang;
        self.lost += other.lost;
    }

    /// Both saw each other; only the waker saw the sleeper, which slept and woke; only the sleeper saw the event.
    pub fn outcomes(&self) -> [u64; 3] {
        let woken = self.slept - self.lost;
        [self.rang.saturating_sub(woken), woken, (self.races - self.lost).saturating_sub(self.rang)]
    }
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [both, woken, looked] = self.outcomes().map(|count| 100.0 * count as f64 / self.races.max(1) as f64);
        write!(f, "{} races: {both:.1} % saw each other, {woken:.1} % woken by the doorbell, ", self.races)?;
        write!(f, "{looked:.1} % found it on rechecking; {} wake-ups lost", self.lost)
    }
}

/// That many messages outside any race precede the one of this number. A waker that rings for nearly each message
/// uses fences, and one that does not stops that: the races alternate between both, every `span` numbers.
fn between(number: u64, span: u64) -> u64 {
    if (number / span).is_multiple_of(2) { 0 } else { 40 + number * 37 % 40 }
}

/// For a receiver's races: in place of the one of this number.
fn setup_number(race: u64) -> u64 {
    if race.is_multiple_of(2) { 0 } else { between(race, 64) }
}

/// The moment before the waker's action, steered to where the outcome is open.
struct Moment {
    /// In iterations of an empty loop.
    most: [f64; 3],
    random: Random,
}

impl Moment {
    fn pass(&mut self, manner: Manner) {
        let mut iterations = self.random.below(1024) as f64 / 512.0 * self.most[manner as usize];
        // Occasionally so late that the sleeper has most likely rechecked.
        if self.random.below(8) == 0 {
            iterations *= 8.0;
        }
        for iteration in 0..iterations as u64 {
            std::hint::black_box(iteration);
        }
    }

    fn steer(&mut self, manner: Manner, rang: bool) {
        let most = &mut self.most[manner as usize];
        *most = (if rang { *most / 1.02 } else { *most * 1.02 }).clamp(16.0, 1e6);
    }
}

/// The number of the race in progress, for the detection of hangs only.
static RACE: AtomicU64 = AtomicU64::new(0);

/// Has a thread end this process, and print the role (with the seed), when the races stop.
fn end_on_hang(role: &Role) {
    let role = role.text();
    std::thread::spawn(move || {
        let mut seen = u64::MAX;
        loop {
            std::thread::sleep(STILL);
            let race = RACE.load(Ordering::Relaxed);
            if race == seen {
                let text = format!("HANG in race {race} of {role}");
                eprintln!("{text}");
                report(text);
                std::process::abort();
            }
            seen = race;
        }
    });
}

/// Each side has its own processor, if there are two: on one processor the sides hardly race.
fn pin(second: bool) {
    kernel::pin(usize::from(second));
}

/// Three of these fit in the smallest lane, so that there is a threshold to reach.
const LARGE: usize = 1200;
const CAPACITY: u64 = 4096;

/// The sleeping side, independent of what it waits for.
trait Sleepy {
    /// Announces a sleep; returns false if the event is already there.
    fn arm(&mut self) -> bool;
    fn fd(&self) -> BorrowedFd<'_>;
    /// Takes the expected event, if it is there.
    fn take(&mut self, race: u64) -> bool;
    /// Waits in a call, and takes it; returns false at the deadline.
    fn wait(&mut self, race: u64, deadline: Instant) -> bool;
    /// The number of its sleeps in a call.
    fn sleeps(&self) -> u64;
    /// Moves to where it will wait; the waker understands the race number.
    fn begin(&mut self, last: u64, shared: &Shared) -> u64;
}

/// A receiver that waits for a message with the number of the race.
impl Sleepy for Receiver {
    fn arm(&mut self) -> bool {
        Receiver::arm(self).unwrap().is_waiting()
    }
    fn fd(&self) -> BorrowedFd<'_> {
        self.as_fd()
    }
    fn take(&mut self, race: u64) -> bool {
        let Some(message) = self.try_receive().unwrap() else { return false };
        assert_eq!(message[..8], race.to_le_bytes());
        true
    }
    fn wait(&mut self, race: u64, deadline: Instant) -> bool {
        let Some(message) = self.receive_until(deadline).unwrap() else { return false };
        assert_eq!(message[..8], race.to_le_bytes());
        true
    }
    fn sleeps(&self) -> u64 {
        self.counters().sleeps
    }
    fn begin(&mut self, last: u64, shared: &Shared) -> u64 {
        let race = last + 1;
        let others = setup_number(race);
        if others == 0 {
            return race;
        }
        shared.going.0.store(race, Ordering::Release);
        wait_until(|| shared.is_done(race));
        for _ in 0..others {
            drop(self.try_receive().unwrap().expect("it has been sent"));
        }
        race + 1
    }
}

/// A sender that waits for free space. Its race number is the number of messages that it has sent.
impl Sleepy for Sender {
    fn arm(&mut self) -> bool {
        Sender::arm(self, LARGE).unwrap().is_waiting()
    }
    fn fd(&self) -> BorrowedFd<'_> {
        self.as_fd()
    }
    fn take(&mut self, _race: u64) -> bool {
        self.try_reserve(LARGE).unwrap().is_some()
    }
    fn wait(&mut self, _race: u64, deadline: Instant) -> bool {
        self.reserve_until(LARGE, deadline).unwrap().is_some()
    }
    fn sleeps(&self) -> u64 {
        self.counters().sleeps
    }
    fn begin(&mut self, last: u64, _meeting: &Shared) -> u64 {
        let mut sent = last;
        for _ in 0..between(last, 1024) {
            self.try_reserve(8).unwrap().expect("the lane is empty").commit().unwrap();
            sent += 1;
        }
        while let Some(reservation) = self.try_reserve(LARGE).unwrap() {
            // The receiver does not read the content.
            reservation.commit().unwrap();
            sent += 1;
        }
        sent
    }
}

/// The sleeper's part of that many races.
fn sleep_repeatedly(side: &mut impl Sleepy, shared: &Shared, races: u64) -> Tally {
    let mut tally = Tally::default();
    let (mut race, mut blocks) = (0, true);
    while tally.races < races && tally.lost < ENOUGH {
        race = side.begin(race, shared);
        RACE.store(race, Ordering::Relaxed);
        tally.races += 1;
        let manner = Manner::of(race);
        let slept_before = if manner == Manner::Block { side.sleeps() } else { 0 };
        shared.going.0.store(race, Ordering::Release);
        if manner == Manner::Block && blocks {
            let rescue = Instant::now() + RESCUE;
            let there = side.wait(race, rescue);
            tally.slept += u64::from(side.sleeps() > slept_before);
            if !there || (Instant::now() >= rescue && shared.is_done(race)) {
                tally.lost += 1;
                // The other manners prove a loss faster.
                blocks = false;
            }
            assert!(there || side.take(race), "race {race}: not even there");
            continue;
        }
        loop {
            if !side.arm() {
                assert!(side.take(race), "race {race}: `arm` reports it");
                break;
            }
            if !is_rung(side.fd(), shared, race, manner) {
                tally.slept += 1;
                tally.lost += 1;
                assert!(side.take(race), "race {race}: not even there");
                break;
            }
            if side.take(race) {
                tally.slept += 1;
                break;
            }
            // A timed wait, because the peer is not known to use fences yet, or a ring from before.
        }
    }
    shared.going.0.store(OVER, Ordering::Release);
    tally
}

/// Sleeps until the descriptor is readable. Returns false if it is not, and no call will make it so.
fn is_rung(fd: BorrowedFd<'_>, shared: &Shared, race: u64, manner: Manner) -> bool {
    loop {
        // Read before the descriptor: if this reports completion, any ring has already happened.
        let done = shared.is_done(race);
        let timeout = if done || manner == Manner::Ask { Duration::ZERO } else { Duration::from_millis(100) };
        if readable_until(fd, Instant::now() + timeout) {
            return true;
        }
        if done {
            return false;
        }
    }
}

/// The waker's part. `act` performs it for the race of that number, and returns the number of rings so far; `None`
/// means that it was no race.
fn wake_repeatedly(shared: &Shared, seed: u64, mut act: impl FnMut(u64, &mut Random) -> Option<u64>) -> Tally {
    let mut moment = Moment { most: [500.0, 2000.0, 10_000.0], random: Random::new(seed) };
    let mut tally = Tally::default();
    let mut race = 0;
    loop {
        race = shared.next(race);
        if race == OVER {
            return tally;
        }
        RACE.store(race, Ordering::Relaxed);
        let manner = Manner::of(race);
        moment.pass(manner);
        let rung = act(race, &mut moment.random);
        // Relaxed would suffice on this processor but not on others: the effects of the calls come first.
        shared.done.0.store(race, Ordering::Release);
        if let Some(rung) = rung {
            moment.steer(manner, rung > tally.rang);
            tally.rang = rung;
        }
    }
}

/// The part of one endpoint. A receiver waits for a message; a sender waits for free space ("room").
fn run_side(end: Endpoint, shared: &'static Shared, role: &Role) -> Tally {
    let (races, seed) = (role.number("races").unwrap(), role.number("seed").unwrap());
    match (role.get("wanted"), end) {
        ("message", Endpoint::Receiver(mut receiver)) => sleep_repeatedly(&mut receiver, shared, races),
        ("room", Endpoint::Sender(mut sender)) => sleep_repeatedly(&mut sender, shared, races),
        ("message", Endpoint::Sender(mut sender)) => {
            let mut bytes = [0; LARGE];
            wake_repeatedly(shared, seed, |race, random| {
                let others = setup_number(race);
                if others > 0 {
                    (0..others).for_each(|_| assert_eq!(sender.try_send(&[0; 8]).unwrap(), Sent::Sent));
                    return None;
                }
                bytes[..8].copy_from_slice(&race.to_le_bytes());
                let sent = sender.try_send(&bytes[..[8, 100, LARGE][random.below(3) as usize]]).unwrap();
                assert_eq!(sent, Sent::Sent, "race {race}");
                Some(sender.counters().wakes_sent)
            })
        }
        ("room", Endpoint::Receiver(mut receiver)) => {
            let mut released = 0;
            wake_repeatedly(shared, seed, |race, random| {
                while released < race {
                    drop(receiver.try_receive().unwrap().expect("it has been sent"));
                    released += 1;
                    for iteration in 0..random.below(100) {
                        std::hint::black_box(iteration);
                    }
                }
                Some(receiver.counters().wakes_sent)
            })
        }
        (wanted, _) => panic!("nobody waits for a {wanted}"),
    }
}

#[expect(clippy::large_enum_variant, reason = "there is one of them")]
enum Endpoint {
    Sender(Sender),
    Receiver(Receiver),
}

/// The body of a child with one endpoint, or with both in threads.
pub fn race(role: &Role) {
    // A long run exceeds the usual life of a child; it detects a hang itself. SAFETY: no pointers.
    unsafe { libc::alarm(0) };
    end_on_hang(role);
    let shared = Shared::at(Path::new(role.get("meeting")));
    if role.get("refuse") == "before" {
        refuse_membarrier();
    }
    let side = |second: bool, end: Endpoint| {
        pin(second);
        if role.get("refuse") == "after" {
            refuse_membarrier();
        }
        run_side(end, shared, role)
    };
    let tally = match role.get("side") {
        "send" => side(false, Endpoint::Sender(sender(role))),
        "receive" => side(true, Endpoint::Receiver(receiver(role))),
        _ => {
            // Without a deadline for connecting, which does not exist between threads: a sender need not wait for a
            // receiver.
            let options = Options::new().capacity(CAPACITY);
            let (sender, receiver) = match role.get("name").strip_prefix("path:") {
                Some(path) => (options.create_sender(path).unwrap(), options.cast().create_receiver(path).unwrap()),
                None => options.cast().threads().unwrap(),
            };
            std::thread::scope(|scope| {
                let other = scope.spawn(|| side(true, Endpoint::Receiver(receiver)));
                let mut tally = side(false, Endpoint::Sender(sender));
                tally.add(other.join().unwrap());
                tally
            })
        }
    };
    report(format!("races {} slept {} rang {} lost {}", tally.races, tally.slept, tally.rang, tally.lost));
    // A side that closes now does not affect the other.
    read_line_from_parent();
}

/// The two racing sides, and the kind of race.
#[derive(Clone, Debug)]
pub struct Race {
    /// Two processes, or two threads of one.
    pub processes: bool,
    /// Through a directory, with FIFOs as doorbells; otherwise with eventfds.
    pub path: bool,
    /// "message" or "room" (free space).
    pub wanted: &'static str,
    /// For the sender and the receiver: whether membarrier is refused "before" attaching, "after" it, or never.
    pub refused: [&'static str; 2],
}

impl Race {
    /// Runs that many races; returns the total count, and a description.
    pub fn run(&self, races: u64) -> Tally {
        // One pair at a time: sides that wait for a processor do not race.
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let dir = TestDir::unwatched();
        let seed: u64 = std::env::var("PELTON_SEED").map_or(std::process::id().into(), |text| text.parse().unwrap());
        let role = Role::new(child, "race")
            .with("name", if self.path { dir.path_name() } else { dir.name() })
            .with("meeting", dir.path().join("meeting").display())
            .with("capacity", CAPACITY)
            .with("wanted", self.wanted)
            .with("races", races)
            .with("seed", seed);
        let children = if self.processes {
            let first =
                Child::start(role.clone().with("side", "send").with("listen", "yes").with("refuse", self.refused[0]));
            first.expect("listening");
            vec![first, Child::start(role.with("side", "receive").with("refuse", self.refused[1]))]
        } else {
            assert_eq!(self.refused[0], self.refused[1], "threads share it");
            vec![Child::start(role.with("side", "both").with("refuse", self.refused[0]))]
        };
        let mut tally = Tally::default();
        // There may be many races: the children detect a hang themselves.
        for child in &children {
            tally.add(Tally::parse(&child.line_within(Duration::MAX)));
        }
        println!("{self}, seed {seed}: {tally}");
        tally
    }

    /// Runs that many races and requires that no wake-up is lost, and that the sides did race.
    #[track_caller]
    pub fn must_not_lose(&self, races: u64) {
        let tally = self.run(races);
        assert_eq!(tally.lost, 0, "{self}: {tally}");
        let [_, woken, looked] = tally.outcomes();
        assert!(woken > races / 1000 && looked > races / 1000, "they hardly met: {self}: {tally}");
    }
}

impl std::fmt::Display for Race {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let racers = if self.processes { "processes" } else { "threads" };
        let doorbell = if self.path { "FIFO" } else { "eventfd" };
        let barrier = match self.refused {
            ["", ""] => "membarrier".to_owned(),
            [sender, receiver] => format!("membarrier refused to the sender {sender:?}, to the receiver {receiver:?}"),
        };
        write!(f, "{racers}, {doorbell}, a sleeper for {}, {barrier}", self.wanted)
    }
}

/// Has the kernel refuse membarrier to this thread, and to the threads it creates, from now on.
pub fn refuse_membarrier() {
    seccomp::refuse(libc::SYS_membarrier, libc::EPERM);
    // SAFETY: no pointers.
    assert_eq!(unsafe { libc::syscall(libc::SYS_membarrier, 0, 0, 0) }, -1, "it is refused now");
}
