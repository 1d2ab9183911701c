//! Races of one side that goes to sleep with the other that publishes, or releases, just then; and a count of wake-ups lost.
//!
//! In each race one of two threads, the **sleeper**, says that it is about to sleep, announces it (`arm`), looks again, and
//! sleeps if there is nothing; the other, the **waker**, waits for the first to say so, lets a moment pass, and sends a
//! message, or releases what is in the lane. The moment is steered: shorter when the waker found the sleeper announced,
//! longer when it did not. So it comes to lie where the outcome is open, about which a little chance is added.
//!
//! Of the four outcomes three are right: both saw each other, the waker alone saw the sleeper (the bell wakes it), the sleeper
//! alone saw what it waits for (it does not sleep). The fourth, that neither did, is a **lost wake-up**. It is proved, not
//! guessed from time: the waker says when its call has returned, and who is not to be woken then will never be. A sleeper that
//! finds so takes what is there, which is the rescue, counts it, and goes on; the count must be 0.

use crate::race::child;
use crate::support::*;
use pelton::{Options, Receiver, Sender, Sent};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What the two sides say to each other besides what they race about. In memory that both see, each word with one writer.
#[repr(C, align(4096))]
struct Meeting {
    /// The sleeper: it is about to sleep until the waker has done its part of this race.
    going: Word,
    /// The waker: its calls for this race have returned.
    done: Word,
}

/// Alone in its cache lines.
#[repr(C, align(128))]
struct Word(AtomicU64);

/// Instead of a race: there are no more.
const OVER: u64 = u64::MAX;

impl Meeting {
    /// In a file that the other process opens too.
    fn at(path: &Path) -> &'static Meeting {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let file = std::fs::File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap();
        file.set_len(size_of::<Meeting>() as u64).unwrap();
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping, whole, aligned to a page, never unmapped; zeros are a Meeting.
        unsafe { &*mmap(std::ptr::null_mut(), size_of::<Meeting>(), protection, flags, &file, 0).unwrap().cast() }
    }

    /// Waits until the sleeper is on its way to something after `last`.
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
        // The two may be on one processor.
        if polls.is_multiple_of(1 << 14) { std::thread::yield_now() } else { std::hint::spin_loop() }
    }
}

/// How the sleeper sleeps. Most often it asks its descriptor again and again: for the protocol that is as good as sleeping, and
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

/// Only a lost wake-up takes so long, in a call that waits.
const RESCUE: Duration = Duration::from_secs(10);
/// So many lost are enough to tell.
const ENOUGH: u64 = 100;
/// No race takes so long, whatever the machine is doing.
const STILL: Duration = Duration::from_secs(60);

/// What came of the races, as one side knows it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub races: u64,
    /// Of these, by the sleeper: it did sleep.
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

    /// Both saw each other; the waker alone saw the sleeper, who slept and was woken; the sleeper alone saw what it waited for.
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

/// So many messages that no race is about come before that of this number. A waker that rings for nearly each message fences, and
/// one that does not stops: by turns, of `span` numbers, both.
fn between(number: u64, span: u64) -> u64 {
    if (number / span).is_multiple_of(2) { 0 } else { 40 + number * 37 % 40 }
}

/// Of a receiver's races: instead of the one of this number.
fn instead(race: u64) -> u64 {
    if race.is_multiple_of(2) { 0 } else { between(race, 64) }
}

/// A moment before the waker's part, steered to where the outcome is open.
struct Moment {
    /// In turns of an empty loop.
    most: [f64; 3],
    random: Random,
}

impl Moment {
    fn pass(&mut self, manner: Manner) {
        let mut iterations = self.random.below(1024) as f64 / 512.0 * self.most[manner as usize];
        // Now and then so late that the sleeper has most likely looked again.
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

/// The number of the race in progress: for who tells a hang, and is otherwise of no use.
static RACE: AtomicU64 = AtomicU64::new(0);

/// Has a thread end this process, with the role (the seed is in it), when the races stop.
fn tell_a_hang(role: &Role) {
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

/// Each side has a processor of its own, where there are two: two sides on one hardly meet.
fn pin(second: bool) {
    kernel::pin(usize::from(second));
}

/// Three of these fit in the smallest lane, so that there is a threshold to be reached.
const LARGE: usize = 1200;
const CAPACITY: u64 = 4096;

/// The side that sleeps, whatever it waits for.
trait Sleepy {
    /// Announces a sleep; false: it is there.
    fn arm(&mut self) -> bool;
    fn fd(&self) -> BorrowedFd<'_>;
    /// Takes what it waited for, if it is there.
    fn take(&mut self, race: u64) -> bool;
    /// Waits in a call, and takes it; false at the deadline.
    fn wait(&mut self, race: u64, deadline: Instant) -> bool;
    /// How often it has slept in a call.
    fn sleeps(&self) -> u64;
    /// Goes to where it will wait; the number of the race is one that the waker understands.
    fn begin(&mut self, last: u64, meeting: &Meeting) -> u64;
}

/// A receiver that waits for a message with the number of the race.
impl Sleepy for Receiver {
    fn arm(&mut self) -> bool {
        Receiver::arm(self).unwrap()
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
    fn begin(&mut self, last: u64, meeting: &Meeting) -> u64 {
        let race = last + 1;
        let others = instead(race);
        if others == 0 {
            return race;
        }
        meeting.going.0.store(race, Ordering::Release);
        wait_until(|| meeting.is_done(race));
        for _ in 0..others {
            drop(self.try_receive().unwrap().expect("it has been sent"));
        }
        race + 1
    }
}

/// A sender that waits for room. Its races are called by the number of messages that it has sent before.
impl Sleepy for Sender {
    fn arm(&mut self) -> bool {
        Sender::arm(self, LARGE).unwrap()
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
    fn begin(&mut self, last: u64, _meeting: &Meeting) -> u64 {
        let mut sent = last;
        for _ in 0..between(last, 1024) {
            self.try_reserve(8).unwrap().expect("the lane is empty").commit().unwrap();
            sent += 1;
        }
        while let Some(room) = self.try_reserve(LARGE).unwrap() {
            // Nobody reads what is in it.
            room.commit().unwrap();
            sent += 1;
        }
        sent
    }
}

/// The sleeper's part of so many races.
fn sleep_again_and_again(side: &mut impl Sleepy, meeting: &Meeting, races: u64) -> Tally {
    let mut tally = Tally::default();
    let (mut race, mut blocks) = (0, true);
    while tally.races < races && tally.lost < ENOUGH {
        race = side.begin(race, meeting);
        RACE.store(race, Ordering::Relaxed);
        tally.races += 1;
        let manner = Manner::of(race);
        let slept_before = if manner == Manner::Block { side.sleeps() } else { 0 };
        meeting.going.0.store(race, Ordering::Release);
        if manner == Manner::Block && blocks {
            let rescue = Instant::now() + RESCUE;
            let there = side.wait(race, rescue);
            tally.slept += u64::from(side.sleeps() > slept_before);
            if !there || (Instant::now() >= rescue && meeting.is_done(race)) {
                tally.lost += 1;
                // The others prove it faster.
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
            if !is_rung(side.fd(), meeting, race, manner) {
                tally.slept += 1;
                tally.lost += 1;
                assert!(side.take(race), "race {race}: not even there");
                break;
            }
            if side.take(race) {
                tally.slept += 1;
                break;
            }
            // A nap, because the other side is not known yet to fence, or a ring of before.
        }
    }
    meeting.going.0.store(OVER, Ordering::Release);
    tally
}

/// Sleeps until the descriptor is readable. False: it is not, and nobody is going to make it so.
fn is_rung(fd: BorrowedFd<'_>, meeting: &Meeting, race: u64, manner: Manner) -> bool {
    loop {
        // Before the descriptor: if this says done, so what rings has rung.
        let done = meeting.is_done(race);
        let timeout = if done || manner == Manner::Ask { Duration::ZERO } else { Duration::from_millis(100) };
        if readable_until(fd, Instant::now() + timeout) {
            return true;
        }
        if done {
            return false;
        }
    }
}

/// The waker's part: `act` does it, for the race of that number, and answers how often it has rung so far; `None` if that was no
/// race.
fn wake_again_and_again(meeting: &Meeting, seed: u64, mut act: impl FnMut(u64, &mut Random) -> Option<u64>) -> Tally {
    let mut moment = Moment { most: [500.0, 2000.0, 10_000.0], random: Random::new(seed) };
    let mut tally = Tally::default();
    let mut race = 0;
    loop {
        race = meeting.next(race);
        if race == OVER {
            return tally;
        }
        RACE.store(race, Ordering::Relaxed);
        let manner = Manner::of(race);
        moment.pass(manner);
        let rung = act(race, &mut moment.random);
        // Relaxed would do on this processor and not on others: what the calls did comes first.
        meeting.done.0.store(race, Ordering::Release);
        if let Some(rung) = rung {
            moment.steer(manner, rung > tally.rang);
            tally.rang = rung;
        }
    }
}

/// The part of one end. A message is what the receiver waits for; room, the sender.
fn play(end: Endpoint, meeting: &'static Meeting, role: &Role) -> Tally {
    let (races, seed) = (role.number("races").unwrap(), role.number("seed").unwrap());
    match (role.get("wanted"), end) {
        ("message", Endpoint::Receiver(mut receiver)) => sleep_again_and_again(&mut receiver, meeting, races),
        ("room", Endpoint::Sender(mut sender)) => sleep_again_and_again(&mut sender, meeting, races),
        ("message", Endpoint::Sender(mut sender)) => {
            let mut bytes = [0; LARGE];
            wake_again_and_again(meeting, seed, |race, random| {
                let others = instead(race);
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
            wake_again_and_again(meeting, seed, |race, random| {
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

/// What a child does that has one end, or both in threads.
pub fn race(role: &Role) {
    // A long run is longer than a child usually lives; it tells a hang itself.
    // SAFETY: no pointers.
    unsafe { libc::alarm(0) };
    tell_a_hang(role);
    let meeting = Meeting::at(Path::new(role.get("meeting")));
    if role.get("refuse") == "before" {
        refuse_membarrier();
    }
    let side = |second: bool, end: Endpoint| {
        pin(second);
        if role.get("refuse") == "after" {
            refuse_membarrier();
        }
        play(end, meeting, role)
    };
    let tally = match role.get("side") {
        "send" => side(false, Endpoint::Sender(sender(role))),
        "receive" => side(true, Endpoint::Receiver(receiver(role))),
        _ => {
            // Without a deadline for connecting, of which there is nothing between threads: a sender need not wait for anybody.
            let options = Options::new().capacity(CAPACITY);
            let (sender, receiver) = match role.get("name").strip_prefix("path:") {
                Some(path) => (options.create_sender(path).unwrap(), options.create_receiver(path).unwrap()),
                None => options.threads().unwrap(),
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
    // A side that closes now does not disturb the other.
    read_line_from_parent();
}

/// Who race, and about what.
#[derive(Clone, Debug)]
pub struct Race {
    /// Two processes, or two threads of one.
    pub processes: bool,
    /// Through a directory, with FIFOs for bells, or not, with eventfds.
    pub path: bool,
    /// A "message" or "room".
    pub wanted: &'static str,
    /// Of the sender and of the receiver: whether membarrier is refused "before" it attaches, "after", or not.
    pub refused: [&'static str; 2],
}

impl Race {
    /// Runs so many; the whole count, and in words which.
    pub fn run(&self, races: u64) -> Tally {
        // One pair at a time: two sides that wait for a processor do not race.
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
        // Races may be many: the children tell a hang themselves.
        for child in &children {
            tally.add(Tally::parse(&child.line_within(Duration::MAX)));
        }
        println!("{self}, seed {seed}: {tally}");
        tally
    }

    /// Runs so many and demands that no wake-up is lost, and that they did race.
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

/// Has the kernel refuse membarrier to this thread, and those that it makes, from now on.
pub fn refuse_membarrier() {
    seccomp::refuse(libc::SYS_membarrier, libc::EPERM);
    // SAFETY: no pointers.
    assert_eq!(unsafe { libc::syscall(libc::SYS_membarrier, 0, 0, 0) }, -1, "it is refused now");
}
