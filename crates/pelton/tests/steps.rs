//! A process is killed at every step (the feature `failpoints`: before and after each store to shared memory, after each
//! change to a directory, between the packets of a hand-shake): nothing committed is lost, nothing is torn, nobody hangs,
//! nothing is left behind. Then it is stopped instead, at a sample of the steps: nobody takes it for dead.
//!
//! A program of its own, because it forks; it has one thread. For each scenario a forked child, the victim, counts its steps
//! from a place that it names, and ends itself at the n-th, with n from 1 on until it gets through. What it has done by
//! then it notes in a page that it shares with the parent, which is the survivor, and mostly the successor too.

#[path = "steps/calls.rs"]
mod calls;
mod support;

use pelton::{
    Error, Kind, LaneId, Listener, Options, Receiver, RecordFileOptions, RecordReader, Sender, Sent, inspect,
};
use std::any::Any;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd as _, FromRawFd as _, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};
use support::{DEADLINE, Sizes, check, deadline, descriptors, payload, readable};

/// Long enough for whoever wrongly believes in a death to say so, short enough to wait for at each step.
const MOMENT: Duration = Duration::from_millis(4);

/// Of the steps at which a victim is stopped: every so manieth.
const SAMPLE: u64 = 7;

type Scenario = (&'static str, bool, fn(&Run));

/// Name, whether it is for stopping too, and what is done for each step.
const SCENARIOS: &[Scenario] = &[
    ("create, by a sender", true, |run| create(run, true)),
    ("create, by a receiver", true, |run| create(run, false)),
    ("create, over what a dead maker left", true, create_over_leftovers),
    ("sender attaches to a fresh lane", true, |run| sender_attaches(run, 0, 0)),
    ("sender attaches to a lane with messages", true, |run| sender_attaches(run, 5, 2)),
    ("sender attaches to a lane that has been read", true, |run| sender_attaches(run, 5, 5)),
    ("sender attaches behind a jump", false, sender_attaches_behind_a_jump),
    ("sender adds a lane", true, |run| sender_adds_a_lane(run, false)),
    ("sender adds a lane over what a dead one left", false, |run| sender_adds_a_lane(run, true)),
    ("sender adds a lane, and another at the same time", true, two_senders_add_a_lane),
    ("sender commits: empty lane", true, |run| sender_commits(run, At::Empty, false)),
    ("sender commits: nobody receives", true, |run| sender_commits(run, At::Alone, false)),
    ("sender commits: nearly full", true, |run| sender_commits(run, At::NearlyFull, false)),
    ("sender commits: full, and waits", true, |run| sender_commits(run, At::Full, false)),
    ("sender commits: at an early wrap", true, |run| sender_commits(run, At::EarlyWrap, false)),
    ("sender commits: at a jump", true, |run| sender_commits(run, At::Jump, false)),
    ("sender commits: at the wrap after a jump", true, |run| sender_commits(run, At::AfterJump, false)),
    ("sender commits: in the middle of the payload", true, |run| sender_commits(run, At::Payload, false)),
    ("sender commits: a batch", true, |run| sender_commits(run, At::Batch, false)),
    ("sender commits: a batch at an early wrap", true, |run| sender_commits(run, At::BatchAtWrap, false)),
    ("sender commits: a successor's first message", true, |run| sender_commits(run, At::Successor, false)),
    ("sender commits: a successor's first message, at a wrap", true, |run| {
        sender_commits(run, At::SuccessorAtWrap, false)
    }),
    ("sender commits: the receiver asleep", true, |run| sender_commits(run, At::Asleep, false)),
    ("sender commits: the receiver asleep in a wait", false, |run| sender_commits(run, At::Waited, false)),
    ("sender commits: nearly full, read late", false, |run| sender_commits(run, At::NearlyFull, true)),
    ("sender commits: at an early wrap, read late", false, |run| sender_commits(run, At::EarlyWrap, true)),
    ("sender commits: at a jump, read late", false, |run| sender_commits(run, At::Jump, true)),
    ("sender commits: at the wrap after a jump, read late", false, |run| sender_commits(run, At::AfterJump, true)),
    ("sender commits: a batch at an early wrap, read late", false, |run| sender_commits(run, At::BatchAtWrap, true)),
    ("sender commits: a successor's first message, at a wrap, read late", false, |run| {
        sender_commits(run, At::SuccessorAtWrap, true)
    }),
    ("sender syncs", true, |run| sender_commits(run, At::Sync, false)),
    ("sender closes", true, sender_closes),
    ("receiver attaches: empty lane", true, |run| receiver_attaches(run, 0)),
    ("receiver attaches: messages wait", true, |run| receiver_attaches(run, 5)),
    ("receiver waits in an event loop", true, receiver_arms),
    ("receiver releases: one by one", true, |run| receiver_releases(run, Take::One)),
    ("receiver releases: copied", true, |run| receiver_releases(run, Take::Copy)),
    ("receiver releases: a batch", true, |run| receiver_releases(run, Take::Batch)),
    ("receiver releases: held, out of order", true, |run| receiver_releases(run, Take::Held)),
    ("receiver releases: wakes a full sender", true, |run| receiver_releases(run, Take::Wake)),
    ("receiver releases: nobody sends", true, receiver_releases_alone),
    ("receiver flushes to a file", true, |run| receiver_flushes(run, &RecordFileOptions::new())),
    ("receiver flushes to files by turns", true, |run| {
        receiver_flushes(run, &RecordFileOptions::new().rotate_bytes(700))
    }),
    ("receiver resumes", true, receiver_resumes),
    ("sender resumes", true, sender_resumes),
    ("sender commits, and its successor dies as well", false, successors_die),
    ("receiver closes", true, receiver_closes),
    ("recover", true, recover),
    ("remove", true, remove),
    ("connect: sender commits", true, |run| connected_sender_commits(run, false)),
    ("connect: sender commits, with descriptors", true, |run| connected_sender_commits(run, true)),
    ("connect: receiver releases", true, |run| connected_receiver_releases(run, false)),
    ("connect: receiver releases, with descriptors", true, |run| connected_receiver_releases(run, true)),
    ("gather: sender comes, commits and closes", true, gathered_sender),
    ("gather: receiver takes senders in and releases", false, gathering_receiver),
    ("call: client connects, calls and closes: empty lanes", true, |run| calls::client_calls(run, calls::Lanes::Empty)),
    ("call: client connects, calls and closes: full lanes", false, |run| calls::client_calls(run, calls::Lanes::Full)),
    ("call: client connects, calls and closes: in pieces", false, |run| calls::client_calls(run, calls::Lanes::Pieces)),
    ("call: service answers and closes: empty lanes", true, |run| calls::service_answers(run, calls::Lanes::Empty)),
    ("call: service answers and closes: full lanes", false, |run| calls::service_answers(run, calls::Lanes::Full)),
    ("call: service answers and closes: in pieces", false, |run| calls::service_answers(run, calls::Lanes::Pieces)),
    ("call: service drains: empty lanes", true, |run| calls::service_drains(run, calls::Lanes::Empty)),
    ("call: service drains: full lanes", false, |run| calls::service_drains(run, calls::Lanes::Full)),
    ("call: service drains: in pieces", false, |run| calls::service_drains(run, calls::Lanes::Pieces)),
    ("hand-shake: sender connects", true, |run| hand_shake(run, true, false, Before::Fresh)),
    ("hand-shake: sender listens", true, |run| hand_shake(run, true, true, Before::Fresh)),
    ("hand-shake: sender connects to a survivor", true, |run| hand_shake(run, true, false, Before::Survives)),
    ("hand-shake: sender listens for a survivor", true, |run| hand_shake(run, true, true, Before::Survives)),
    ("hand-shake: sender connects to the survivor of a jump", true, |run| hand_shake(run, true, false, Before::Jumped)),
    ("hand-shake: sender listens for the survivor of a jump", true, |run| hand_shake(run, true, true, Before::Jumped)),
    ("hand-shake: receiver connects", true, |run| hand_shake(run, false, false, Before::Fresh)),
    ("hand-shake: receiver listens", true, |run| hand_shake(run, false, true, Before::Fresh)),
    ("hand-shake: receiver connects to a survivor", true, |run| hand_shake(run, false, false, Before::Survives)),
    ("hand-shake: receiver listens for a survivor", true, |run| hand_shake(run, false, true, Before::Survives)),
    ("hand-shake by a short name: sender connects", true, |run| by_short_name(run, true, false, Before::Fresh)),
    ("hand-shake by a short name: sender listens", true, |run| by_short_name(run, true, true, Before::Fresh)),
    ("hand-shake by a short name: sender listens for a survivor", true, |run| {
        by_short_name(run, true, true, Before::Survives)
    }),
    ("hand-shake by a short name: receiver connects to a survivor", true, |run| {
        by_short_name(run, false, false, Before::Survives)
    }),
];

fn main() {
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    let (mut passed, mut failed) = (0, 0);
    shared();
    for stops in [false, true] {
        for (name, stoppable, scenario) in SCENARIOS {
            let full = format!("{} at every step: {name}", if stops { "stopped" } else { "killed" });
            if !full.contains(&filter) || (stops && !stoppable) {
                continue;
            }
            match every_step(*scenario, stops) {
                Ok(steps) => {
                    passed += 1;
                    println!("test {full} ... ok, {steps} steps");
                }
                Err(step) => {
                    failed += 1;
                    println!("test {full} ... FAILED at step {step}");
                }
            }
        }
    }
    println!("\ntest result: {}. {passed} passed; {failed} failed", if failed == 0 { "ok" } else { "FAILED" });
    std::process::exit((failed != 0).into());
}

/// Runs the scenario with n from 1 on; answers how many steps the victim has, or at which it failed.
fn every_step(scenario: fn(&Run), stops: bool) -> Result<u64, String> {
    // In memory, if that is to be had: thousands of channels are made.
    let base = if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" };
    let root = tempfile::Builder::new().prefix("pt").tempdir_in(base).unwrap();
    // Early enough that a victim of few steps is stopped too.
    let mut n = if stops { 2 } else { 1 };
    loop {
        let run = Run { stops, root: root.path().join(n.to_string()), has_short_name: false };
        std::fs::create_dir(&run.root).unwrap();
        shared().begin(n, stops);
        let open = descriptors();
        let well = catch_unwind(AssertUnwindSafe(|| {
            scenario(&run);
            assert_eq!(descriptors(), open, "descriptors were left open");
            assert_eq!(run.mappings(), Vec::<String>::new(), "mappings were left");
        }));
        let steps = shared().steps.load(SeqCst);
        if well.is_err() {
            return Err(format!("{n} ({})", if steps < n { "got through" } else { shared().step() }));
        }
        if steps < n {
            return Ok(steps);
        }
        std::fs::remove_dir_all(&run.root).unwrap();
        n += if stops { SAMPLE } else { 1 };
    }
}

/// One pass of a scenario.
struct Run {
    stops: bool,
    /// Empty at first, and of this pass alone.
    root: PathBuf,
    /// Which is then below the root.
    has_short_name: bool,
}

impl Run {
    fn path(&self) -> PathBuf {
        self.root.join("channel")
    }

    fn name(&self) -> String {
        match self.has_short_name {
            true => "short".to_owned(),
            false => format!("unix:{}", self.root.join("s").display()),
        }
    }

    /// What there is in the root.
    fn left(&self) -> Vec<String> {
        names(&self.root)
    }

    /// Whether just the channel is left, with the files of so many lanes and no others.
    #[track_caller]
    fn only_the_channel_is_left(&self, lanes: u32) {
        assert_eq!(self.left(), ["channel"]);
        let mut wanted: Vec<String> =
            ["channel", "receiver", "receiver.bell", "receiver.life"].map(str::to_owned).to_vec();
        for lane in 0..lanes {
            wanted.extend(["bell", "consumer", "data", "life", "producer"].map(|kind| format!("{lane}.{kind}")));
        }
        wanted.sort();
        assert_eq!(names(&self.path()), wanted);
    }

    /// Of a lane, in this process.
    fn mappings(&self) -> Vec<String> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let ours = |line: &&str| line.contains(self.root.to_str().unwrap()) || line.contains("memfd:pelton");
        maps.lines().filter(ours).map(str::to_owned).collect()
    }

    /// Waits for the victim's end, whatever it does until then. Stopped, `look` is called before it goes on.
    fn finish(&self, victim: Child, mut look: impl FnMut()) {
        victim.watch(false, &mut look);
        victim.wait();
        assert_eq!(shared().panicked.load(SeqCst), 0, "the victim panicked");
    }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

// The victim.

/// What children write and the parent reads, also after their death.
#[derive(Default)]
struct Shared {
    /// Taken by the victim since it began to count, and at which it is to end.
    steps: AtomicU64,
    target: AtomicU64,
    stops: AtomicBool,
    /// The name of the last step; a literal is at the same address in every process forked.
    name: AtomicPtr<u8>,
    name_bytes: AtomicUsize,
    /// Whether it has come to have a role.
    claimed: AtomicBool,
    panicked: AtomicU64,
    /// Messages before this number are sent, because `send` has returned.
    committed: AtomicU64,
    /// Messages before this number have been seen by the victim, and before that one released.
    seen: AtomicU64,
    released: AtomicU64,
    /// By the successor, where that is a process of its own: the first and the one after the last that it received.
    first: AtomicU64,
    next: AtomicU64,
}

fn shared() -> &'static Shared {
    static SHARED: std::sync::OnceLock<&'static Shared> = std::sync::OnceLock::new();
    SHARED.get_or_init(|| {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping, aligned and large enough, zero as every field may be, never unmapped.
        unsafe {
            let page = mmap_anonymous(std::ptr::null_mut(), 4096, protection, MapFlags::SHARED).unwrap();
            &*page.cast::<Shared>()
        }
    })
}

impl Shared {
    fn begin(&self, target: u64, stops: bool) {
        let zero = [&self.steps, &self.panicked, &self.committed, &self.seen, &self.released, &self.first, &self.next];
        zero.iter().for_each(|word| word.store(0, SeqCst));
        self.claimed.store(false, SeqCst);
        self.target.store(target, SeqCst);
        self.stops.store(stops, SeqCst);
    }

    /// The name of the last step.
    fn step(&self) -> &'static str {
        let (name, bytes) = (self.name.load(SeqCst), self.name_bytes.load(SeqCst));
        if name.is_null() {
            return "none";
        }
        // SAFETY: a literal's, in the victim and so here.
        unsafe { std::str::from_utf8_unchecked(std::slice::from_raw_parts(name, bytes)) }
    }
}

fn take_step(name: &'static str) {
    let shared = shared();
    let steps = shared.steps.fetch_add(1, SeqCst) + 1;
    shared.name.store(name.as_ptr().cast_mut(), SeqCst);
    shared.name_bytes.store(name.len(), SeqCst);
    if ["sender: claimed", "receiver: claimed"].contains(&name) {
        shared.claimed.store(true, SeqCst);
    }
    if steps == shared.target.load(SeqCst) {
        end_oneself(if shared.stops.load(SeqCst) { libc::SIGSTOP } else { libc::SIGKILL });
    }
}

/// So that nothing runs after it.
fn end_oneself(signal: libc::c_int) {
    // SAFETY: no pointers.
    unsafe { libc::kill(libc::getpid(), signal) };
}

/// A child's way to its parent.
struct Inside {
    says: OwnedFd,
    hears: OwnedFd,
}

impl Inside {
    /// Waits for the parent to come to the same place.
    fn meet(&self) {
        rustix::io::write(&self.says, b"x").unwrap();
        if rustix::io::read(&self.hears, &mut [0]) != Ok(1) {
            std::process::exit(3);
        }
    }

    /// From here on the steps count.
    fn count(&self) {
        pelton::failpoints::set(take_step);
    }

    fn count_if(&self, yes: bool) {
        if yes {
            self.count();
        }
    }
}

struct Child {
    pid: libc::pid_t,
    says: OwnedFd,
    hears: OwnedFd,
}

/// How a child ends that has done everything.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Last {
    /// As at any step: killed, with what it has still in use.
    Killed,
    /// Well.
    Exit,
}

fn fork<R>(last: Last, body: impl FnOnce(&Inside) -> R) -> Child {
    let flags = rustix::pipe::PipeFlags::CLOEXEC;
    let ((hears, says), (of_child, to_parent)) =
        (rustix::pipe::pipe_with(flags).unwrap(), rustix::pipe::pipe_with(flags).unwrap());
    // What is printed is not to be printed twice.
    std::io::Write::flush(&mut std::io::stdout()).unwrap();
    // SAFETY: this program has one thread, so the child may do everything.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid != 0 {
        drop((hears, to_parent));
        return Child { pid, says, hears: of_child };
    }
    drop((says, of_child));
    // SAFETY: no pointers. A child does not outlive the parent, nor a hang.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::alarm(DEADLINE.as_secs() as u32);
    }
    let done = catch_unwind(AssertUnwindSafe(|| {
        let kept = body(&Inside { says: to_parent, hears });
        if last == Last::Killed {
            end_oneself(libc::SIGKILL);
        }
        drop(kept);
    }));
    if done.is_err() {
        shared().panicked.store(1, SeqCst);
    }
    // SAFETY: ends this process at once, with none of the parent's clean-up.
    unsafe { libc::_exit(done.is_err().into()) }
}

impl Child {
    /// Waits until the child meets here.
    #[track_caller]
    fn met(&self) {
        readable(self.hears.as_fd());
        assert_eq!(rustix::io::read(&self.hears, &mut [0]), Ok(1), "the child ended before it met");
    }

    /// Lets it go on.
    fn go(&self) {
        rustix::io::write(&self.says, b"x").unwrap();
    }

    fn state(&self) -> char {
        state_of(self.pid)
    }

    /// Until it has ended, or `asleep`; `look`s at a stopped one before it goes on.
    fn watch(&self, asleep: bool, look: &mut dyn FnMut()) {
        let until = deadline();
        loop {
            match self.state() {
                'Z' => return,
                'S' if asleep => return,
                'T' => {
                    look();
                    // SAFETY: no pointers.
                    unsafe { libc::kill(self.pid, libc::SIGCONT) };
                    while self.state() == 'T' {}
                }
                _ => std::thread::sleep(Duration::from_micros(50)),
            }
            assert!(Instant::now() < until, "the child hangs");
        }
    }

    /// Its end; how, by the system's word.
    fn wait(mut self) -> libc::c_int {
        self.watch(false, &mut || ());
        let mut status = 0;
        // SAFETY: the kernel writes one integer.
        assert_eq!(unsafe { libc::waitpid(self.pid, &mut status, 0) }, self.pid);
        self.pid = 0;
        status
    }

    #[track_caller]
    fn wait_well(self) {
        assert_eq!(self.wait(), 0, "a child did not end well");
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if self.pid != 0 {
            // SAFETY: a child of ours that has not been waited for; nothing is asked about it.
            unsafe {
                libc::kill(self.pid, libc::SIGKILL);
                libc::waitpid(self.pid, std::ptr::null_mut(), 0);
            }
        }
    }
}

/// By the system's word: 'R' runs, 'S' sleeps, 'T' is stopped, 'Z' has ended.
fn state_of(pid: libc::pid_t) -> char {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit(") ").next().unwrap().chars().next().unwrap()
}

// What both sides do.

const SMALL: u64 = 64 << 10;
/// Larger than the window, so that a lane wraps early and stretches.
const LARGE: u64 = 512 << 10;

fn with_capacity(capacity: u64) -> Options {
    Options::new().capacity(capacity)
}

fn opened() -> Options {
    Options::new()
}

/// A receiver, and the number that the next message of each lane must have.
struct Receiving {
    receiver: Receiver,
    next: [u64; 3],
    bytes: u64,
    /// An end that was told, and is still to be asked for.
    told: Option<Error>,
}

impl Receiving {
    fn new(receiver: Receiver, bytes: u64) -> Receiving {
        Receiving { receiver, next: [0; 3], bytes, told: None }
    }

    /// One message: whole, in order, and doubled only if it says so. `None`: the deadline.
    fn one(&mut self, deadline: Instant) -> pelton::Result<Option<u64>> {
        let Some(mut message) = self.receiver.receive_until(deadline)? else { return Ok(None) };
        take_descriptors(&mut message);
        let number = u64::from_le_bytes(message[..8].try_into().unwrap());
        check(number, Sizes::Fixed(self.bytes), &message, &mut Vec::new());
        let next = &mut self.next[message.lane() as usize];
        if number < *next {
            assert!(message.is_redelivered(), "message {number} came twice");
        } else {
            assert_eq!(number, *next, "a message was lost");
            *next += 1;
        }
        Ok(Some(number))
    }

    #[track_caller]
    fn read(&mut self, count: u64) {
        for _ in 0..count {
            self.one(deadline()).unwrap().expect("a message was sent");
        }
    }

    /// Everything up to this number, whatever ends are told between.
    #[track_caller]
    fn read_to(&mut self, number: u64) {
        while self.next[0] < number {
            match self.one(deadline()) {
                Ok(read) => assert!(read.is_some(), "message {} did not come", self.next[0]),
                Err(error) => assert!(is_end(&error), "{error}"),
            }
        }
    }

    /// Until the senders' end is told.
    #[track_caller]
    fn until_end(&mut self) -> Error {
        if let Some(end) = self.told.take() {
            return end;
        }
        loop {
            match self.one(deadline()) {
                Ok(read) => assert!(read.is_some(), "neither a message nor an end came"),
                Err(error) => return error,
            }
        }
    }

    /// What is there for a moment, and whatever end is told.
    #[track_caller]
    fn for_a_moment(&mut self) {
        let until = Instant::now() + MOMENT;
        loop {
            match self.one(until) {
                Ok(None) => return,
                Ok(Some(_)) => {}
                Err(error) => assert!(is_end(&error), "{error}"),
            }
        }
    }

    /// For a moment nobody is told dead.
    #[track_caller]
    fn nobody_is_dead(&mut self) {
        let until = Instant::now() + MOMENT;
        loop {
            match self.one(until) {
                Ok(None) => return,
                Ok(Some(_)) => {}
                Err(error) => assert!(error.is_closed(), "{error}"),
            }
        }
    }
}

/// Two come with each message, or none.
fn take_descriptors(message: &mut pelton::Message<'_>) {
    if message.descriptors() != 0 {
        assert_eq!(message.take_descriptors().unwrap().len(), 2);
    }
}

fn is_end(error: &Error) -> bool {
    error.is_closed() || error.is_peer_died()
}

/// A sender, and the number of its next message.
struct Sending {
    sender: Sender,
    next: u64,
    bytes: u64,
    /// Ends of receivers that it was told of.
    ends: Vec<Error>,
}

impl Sending {
    /// Goes on behind what is in the lane.
    fn new(sender: Sender, bytes: u64) -> Sending {
        let next = u64::from(sender.next_seq()) - 1;
        Sending { sender, next, bytes, ends: Vec::new() }
    }

    #[track_caller]
    fn send(&mut self, count: u64) {
        let mut message = Vec::new();
        for _ in 0..count {
            payload(self.next, self.bytes as usize, &mut message);
            loop {
                match self.sender.send_until(&message, deadline()) {
                    Ok(sent) => break assert_eq!(sent, Sent::Sent),
                    Err(error) => {
                        assert!(is_end(&error), "{error}");
                        self.ends.push(error);
                    }
                }
            }
            self.next += 1;
        }
    }

    fn try_send(&mut self) -> bool {
        let mut message = Vec::new();
        payload(self.next, self.bytes as usize, &mut message);
        let sent = self.sender.try_send(&message).unwrap() == Sent::Sent;
        self.next += u64::from(sent);
        if sent {
            shared().committed.store(self.next, SeqCst);
        }
        sent
    }

    /// As a victim: says what has been sent as soon as it is.
    fn commit(&mut self, count: u64) {
        for _ in 0..count {
            self.send(1);
            shared().committed.store(self.next, SeqCst);
        }
    }

    /// The payload by halves, with a step between.
    fn commit_by_halves(&mut self, count: u64) {
        let mut message = Vec::new();
        for _ in 0..count {
            payload(self.next, self.bytes as usize, &mut message);
            let mut room = self.sender.reserve(message.len()).unwrap();
            let half = message.len() / 2;
            room[..half].copy_from_slice(&message[..half]);
            take_step("payload: half");
            room[half..].copy_from_slice(&message[half..]);
            take_step("payload: whole");
            room.commit().unwrap();
            self.next += 1;
            shared().committed.store(self.next, SeqCst);
        }
    }

    fn commit_with_descriptors(&mut self, count: u64) {
        let null = std::fs::File::open("/dev/null").unwrap();
        let mut message = Vec::new();
        for _ in 0..count {
            payload(self.next, self.bytes as usize, &mut message);
            self.sender.send_with_descriptors(&message, &[null.as_fd(); 2]).unwrap();
            self.next += 1;
            shared().committed.store(self.next, SeqCst);
        }
    }

    fn commit_batch(&mut self, count: u64) {
        let mut message = Vec::new();
        let lens = std::iter::repeat_n(self.bytes as usize, count as usize);
        let mut batch = self.sender.try_reserve_batch(lens).unwrap().expect("there is room");
        for number in self.next..self.next + count {
            payload(number, self.bytes as usize, &mut message);
            assert!(batch.push(&message));
        }
        batch.commit().unwrap();
        self.next += count;
        shared().committed.store(self.next, SeqCst);
    }

    /// Waits until all is released, whatever ends are told meanwhile.
    #[track_caller]
    fn drained(&mut self) {
        loop {
            match self.sender.drain_until(deadline()) {
                Ok(drained) => return assert!(drained, "not drained"),
                Err(error) => {
                    assert!(is_end(&error), "{error}");
                    self.ends.push(error);
                }
            }
        }
    }

    /// Until the receiver's end is told; `None` if all is released.
    #[track_caller]
    fn until_end(&mut self) -> Option<Error> {
        if let Some(end) = self.ends.pop() {
            return Some(end);
        }
        match self.sender.drain_until(deadline()) {
            Ok(drained) => {
                assert!(drained, "neither room nor an end came");
                None
            }
            Err(error) => Some(error),
        }
    }

    #[track_caller]
    fn nobody_is_dead(&mut self) {
        match self.sender.drain_until(Instant::now() + MOMENT) {
            Ok(_) => {}
            Err(error) => assert!(error.is_closed(), "{error}"),
        }
        assert!(self.ends.iter().all(Error::is_closed));
    }
}

#[track_caller]
fn is_taken<T: std::fmt::Debug>(role: pelton::Result<T>) {
    assert!(matches!(role, Err(Error::RoleTaken { .. })), "{role:?}");
}

/// What a victim that sends has sent, by what has come: everything that it said, and nothing but whole messages behind.
#[track_caller]
fn all_committed_came(next: u64, in_flight: u64) {
    let committed = shared().committed.load(SeqCst);
    assert!(next >= committed, "{committed} were committed, {next} came");
    assert!(next <= committed + in_flight, "{committed} were committed, {in_flight} were on their way, {next} came");
}

/// A sender's successor and this receiver go on, through a lap of the lane.
#[track_caller]
fn go_on(sender: Sender, receiving: &mut Receiving) {
    let mut sending = Sending::new(sender, receiving.bytes);
    assert_eq!(sending.next, receiving.next[0], "the successor begins behind the last message");
    let lap = receiving.receiver.capacity().min(256 << 10) / receiving.bytes;
    for _ in 0..lap + 3 {
        sending.send(1);
        receiving.read_to(sending.next);
    }
    sending.drained();
}

// Creation.

fn create(run: &Run, sends: bool) {
    let path = run.path();
    let victim = fork(Last::Killed, |inside| -> Box<dyn Any> {
        inside.count();
        if sends {
            let mut sending = Sending::new(with_capacity(SMALL).create_sender(&path).unwrap(), 100);
            sending.commit(1);
            Box::new(sending)
        } else {
            Box::new(with_capacity(SMALL).create_receiver(&path).unwrap())
        }
    });
    // Another need not wait for a maker that is stopped, nor make what it has made.
    run.finish(victim, || match with_capacity(SMALL).create_receiver(run.path()) {
        Ok(_) => {}
        // It has the role that it came for.
        Err(Error::RoleTaken { .. }) if !sends => {}
        role => panic!("{role:?}"),
    });
    made_by_another(run);
}

/// Whatever stands there after a creator died, the next one makes or opens, and it works; nothing else is left.
fn made_by_another(run: &Run) {
    let mut receiving = Receiving::new(with_capacity(SMALL).create_receiver(run.path()).unwrap(), 100);
    run.only_the_channel_is_left(1);
    let sender = with_capacity(SMALL).create_sender(run.path()).unwrap();
    let sent = u64::from(sender.next_seq()) - 1;
    receiving.read_to(sent);
    all_committed_came(sent, 1);
    go_on(sender, &mut receiving);
    drop(receiving);
    run.only_the_channel_is_left(1);
}

fn create_over_leftovers(run: &Run) {
    // Of two makers that died: one had just begun, the other had got further.
    std::fs::create_dir(run.root.join(".channel.pelton-1-0")).unwrap();
    let aside = run.root.join(".channel.pelton-2-7");
    std::fs::create_dir(&aside).unwrap();
    for name in ["channel", "receiver", "0.data"] {
        std::fs::write(aside.join(name), "").unwrap();
    }
    create(run, true);
}

// Senders.

fn sender_attaches(run: &Run, before: u64, read: u64) {
    let mut receiving = Receiving::new(with_capacity(SMALL).create_receiver(run.path()).unwrap(), 100);
    if before > 0 {
        Sending::new(opened().open_sender(run.path()).unwrap(), 100).send(before);
        receiving.read(read);
    }
    shared().committed.store(before, SeqCst);
    let path = run.path();
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 100);
        sending.commit(2);
        sending
    });
    run.finish(victim, || {
        // The predecessor closed, and that may be told; of the one that is coming nothing is.
        receiving.nobody_is_dead();
        if shared().claimed.load(SeqCst) {
            is_taken(opened().open_sender(run.path()));
        }
    });
    receiving.for_a_moment();
    all_committed_came(receiving.next[0], 1);
    go_on(opened().open_sender(run.path()).unwrap(), &mut receiving);
    drop(receiving);
    run.only_the_channel_is_left(1);
}

/// What a floor protects, the successor of whoever dies attaching must not write over.
fn sender_attaches_behind_a_jump(run: &Run) {
    let path = run.path();
    let mut receiving = Receiving::new(with_capacity(LARGE).create_receiver(&path).unwrap(), 8000);
    {
        let mut first = Sending::new(opened().open_sender(&path).unwrap(), 8000);
        first.send(32);
        receiving.read(12);
        first.send(12);
    }
    shared().committed.store(44, SeqCst);
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 8000);
        sending.commit(2);
        sending
    });
    run.finish(victim, || ());
    let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 8000);
    all_committed_came(sending.next, 1);
    while sending.try_send() {}
    receiving.read_to(sending.next);
    go_on(sending.sender, &mut receiving);
    drop(receiving);
    run.only_the_channel_is_left(1);
}

fn sender_adds_a_lane(run: &Run, leftovers: bool) {
    let path = run.path();
    let mut receiving = Receiving::new(with_capacity(SMALL).lanes(2).create_receiver(&path).unwrap(), 100);
    let mut other = Sending::new(opened().open_sender(&path).unwrap(), 100);
    if leftovers {
        ["1.producer", "1.data", "1.life"].iter().for_each(|name| std::fs::write(path.join(name), "").unwrap());
    }
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 100);
        sending.commit(2);
        sending
    });
    run.finish(victim, || {
        other.send(1);
        receiving.nobody_is_dead();
        assert_eq!(receiving.next[0], other.next);
        if shared().claimed.load(SeqCst) {
            is_taken(opened().open_sender(run.path()));
        }
    });
    // The other lane is not disturbed.
    other.send(1);
    while receiving.next[0] < other.next {
        receiving.read(1);
    }
    receiving.for_a_moment();
    all_committed_came(receiving.next[1], 1);
    let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 100);
    assert_eq!(sending.next, receiving.next[1]);
    for _ in 0..3 {
        sending.send(1);
        other.send(1);
        receiving.read(2);
    }
    assert_eq!(receiving.next, [other.next, sending.next, 0]);
    is_taken(opened().open_sender(&path));
    drop((sending, other, receiving));
    run.only_the_channel_is_left(2);
}

/// Who dies, or is stopped, in the middle of adding a lane keeps another from it no longer than that.
fn two_senders_add_a_lane(run: &Run) {
    let path = run.path();
    let mut receiving = Receiving::new(with_capacity(SMALL).lanes(3).create_receiver(&path).unwrap(), 100);
    let mut other = Sending::new(opened().open_sender(&path).unwrap(), 100);
    let rival = fork(Last::Exit, |inside| {
        inside.meet();
        let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 100);
        sending.send(2);
        inside.meet();
        sending
    });
    rival.met();
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 100);
        // By count: the number that it begins with may be the other's.
        sending.send(1);
        shared().committed.store(1, SeqCst);
        sending.send(1);
        shared().committed.store(2, SeqCst);
        sending
    });
    rival.go();
    run.finish(victim, || {
        other.send(1);
        receiving.nobody_is_dead();
        assert_eq!(receiving.next[0], other.next);
    });
    rival.met();
    receiving.for_a_moment();
    // The rival's two, and the victim's.
    all_committed_came(receiving.next[1] + receiving.next[2] - 2, 1);
    let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 100);
    is_taken(if inspect::info(&path).unwrap().lanes.len() == 3 {
        opened().open_sender(&path)
    } else {
        opened().open_receiver(&path).map(|_| unreachable!())
    });
    let before: u64 = receiving.next.iter().sum();
    sending.send(3);
    other.send(1);
    receiving.read(4);
    assert_eq!(receiving.next.iter().sum::<u64>(), before + 4);
    rival.go();
    rival.wait_well();
    let lanes = inspect::info(&path).unwrap().lanes.len() as u32;
    drop((sending, other, receiving));
    run.only_the_channel_is_left(lanes);
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum At {
    Empty,
    Alone,
    NearlyFull,
    Full,
    EarlyWrap,
    Jump,
    AfterJump,
    Payload,
    Batch,
    BatchAtWrap,
    Successor,
    SuccessorAtWrap,
    Asleep,
    Waited,
    Sync,
}

/// The receiver reads what the victim left before its successor comes, or, `late`, after that has filled the lane.
fn sender_commits(run: &Run, at: At, late: bool) {
    // What the victim sends, and then is received, before its steps count. 32 messages of 8000 bytes use up the window.
    let (capacity, bytes, before): (u64, u64, &[(u64, u64)]) = match at {
        At::NearlyFull => (SMALL, 3000, &[(20, 0)]),
        At::Full => (SMALL, 3000, &[(21, 0)]),
        At::EarlyWrap | At::BatchAtWrap => (LARGE, 8000, &[(32, 32)]),
        At::Jump => (LARGE, 8000, &[(32, 12), (11, 0)]),
        At::AfterJump => (LARGE, 8000, &[(32, 12), (12, 32)]),
        At::SuccessorAtWrap => (LARGE, 8000, &[]),
        _ => (SMALL, 100, &[]),
    };
    let path = run.path();
    let receiver = (at != At::Alone).then(|| with_capacity(capacity).create_receiver(&path).unwrap());
    let mut receiving = receiver.map(|receiver| Receiving::new(receiver, bytes));
    let sent = match at {
        At::Successor => 2,
        At::SuccessorAtWrap => 32,
        _ => 0,
    };
    if sent > 0 {
        Sending::new(opened().open_sender(&path).unwrap(), bytes).send(sent);
        assert!(receiving.as_mut().unwrap().until_end().is_closed());
    }
    let parent = std::process::id() as libc::pid_t;
    let victim = fork(Last::Killed, |inside| {
        let mut sending = Sending::new(with_capacity(capacity).create_sender(&path).unwrap(), bytes);
        shared().committed.store(sending.next, SeqCst);
        for (send, _) in before {
            sending.commit(*send);
            inside.meet();
        }
        inside.meet();
        while at == At::Waited && state_of(parent) != 'S' {}
        inside.count();
        match at {
            At::Batch | At::BatchAtWrap => sending.commit_batch(3),
            At::Payload => sending.commit_by_halves(2),
            At::NearlyFull => sending.commit(1),
            _ => sending.commit(2),
        }
        match at {
            // Full, unless the parent has received meanwhile.
            At::NearlyFull => _ = sending.try_send(),
            At::Full => {}
            At::Sync => sending.sender.sync().unwrap(),
            _ => sending.commit(1),
        }
        sending
    });
    for (_, read) in before {
        victim.met();
        receiving.as_mut().unwrap().read(*read);
        victim.go();
    }
    victim.met();
    if at == At::Asleep {
        assert!(receiving.as_mut().unwrap().receiver.arm().unwrap());
    }
    victim.go();
    if at == At::Waited {
        receiving.as_mut().unwrap().for_long();
    }
    let is_there = |receiving: &mut Option<Receiving>| {
        is_taken(opened().open_sender(run.path()));
        if let Some(receiving) = receiving {
            receiving.nobody_is_dead();
        }
    };
    if at == At::Full {
        // It waits for room, unless it ends before.
        victim.watch(true, &mut || {
            is_taken(opened().open_sender(run.path()));
            assert!(!receiving.as_mut().unwrap().receiver.arm().unwrap(), "the lane is full");
        });
        receiving.as_mut().unwrap().read(12);
    }
    run.finish(victim, || is_there(&mut receiving));
    if at == At::Asleep {
        readable(receiving.as_ref().unwrap().receiver.as_fd());
    }
    let in_flight = if matches!(at, At::Batch | At::BatchAtWrap) { 3 } else { 1 };
    let sender = match &mut receiving {
        Some(receiving) if late => {
            let mut sending = Sending::new(opened().open_sender(run.path()).unwrap(), bytes);
            all_committed_came(sending.next, in_flight);
            while sending.try_send() {}
            receiving.read_to(sending.next);
            sending.sender
        }
        Some(receiving) => {
            let end = receiving.until_end();
            assert!(end.is_peer_died(), "{end}");
            opened().open_sender(run.path()).unwrap()
        }
        None => {
            let sender = opened().open_sender(run.path()).unwrap();
            let mut late = Receiving::new(opened().open_receiver(run.path()).unwrap(), bytes);
            late.read(u64::from(sender.next_seq()) - 1);
            receiving = Some(late);
            sender
        }
    };
    let mut receiving = receiving.unwrap();
    if !late {
        all_committed_came(receiving.next[0], in_flight);
    }
    go_on(sender, &mut receiving);
    assert!(receiving.until_end().is_closed());
    drop(receiving);
    run.only_the_channel_is_left(1);
}

impl Receiving {
    /// One message, or one end, in a wait.
    fn for_long(&mut self) {
        match self.one(deadline()) {
            Ok(read) => assert!(read.is_some(), "neither a message nor an end came"),
            // It was the only one to be told of.
            Err(error) => self.told = Some(error),
        }
    }
}

fn sender_closes(run: &Run) {
    let path = run.path();
    let mut receiving = Receiving::new(with_capacity(SMALL).create_receiver(&path).unwrap(), 100);
    let victim = fork(Last::Killed, |inside| {
        let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 100);
        sending.commit(3);
        inside.meet();
        inside.count();
        sending.sender.close().unwrap();
    });
    victim.met();
    victim.go();
    let given_back = || shared().step() == "lock: given back";
    run.finish(victim, || {
        receiving.nobody_is_dead();
        if !given_back() {
            is_taken(opened().open_sender(run.path()));
        }
    });
    if receiving.next[0] < 3 || !run.stops {
        let end = receiving.until_end();
        let closed = given_back() || run.stops;
        assert!(if closed { end.is_closed() } else { is_end(&end) }, "{end}");
    }
    receiving.for_a_moment();
    all_committed_came(receiving.next[0], 0);
    go_on(opened().open_sender(&path).unwrap(), &mut receiving);
    drop(receiving);
    run.only_the_channel_is_left(1);
}

// Receivers.

/// A receiver's successor begins with the oldest message that was not released, and both go on.
#[track_caller]
fn received_by_another(run: &Run, sending: &mut Sending, released: u64) {
    let seen = shared().seen.load(SeqCst);
    let mut receiving = Receiving::new(opened().open_receiver(run.path()).unwrap(), sending.bytes);
    // Something is there, then.
    if sending.sender.unreleased() == 0 {
        sending.send(1);
    }
    receiving.begins(released, seen, sending.next);
    for _ in 0..3 {
        sending.send(1);
        receiving.read(1);
    }
    sending.drained();
    drop(receiving);
    run.only_the_channel_is_left(1);
}

impl Receiving {
    /// Everything to `end`, from a message on that was not released.
    #[track_caller]
    fn begins(&mut self, released: u64, seen: u64, end: u64) -> u64 {
        let mut first = None;
        loop {
            let mut message = self.receiver.receive_until(deadline()).unwrap().expect("a message was sent");
            take_descriptors(&mut message);
            let number = u64::from_le_bytes(message[..8].try_into().unwrap());
            check(number, Sizes::Fixed(self.bytes), &message, &mut Vec::new());
            let from = *first.get_or_insert_with(|| {
                assert!((released..=seen.max(released)).contains(&number), "{released}, {seen}: begins at {number}");
                self.next[0] = number;
                number
            });
            assert_eq!(number, self.next[0], "a message was lost");
            assert!(number >= seen || message.is_redelivered(), "message {number} came twice");
            self.next[0] += 1;
            if self.next[0] == end {
                return from;
            }
        }
    }
}

fn receiver_attaches(run: &Run, before: u64) {
    let path = run.path();
    let mut sending = Sending::new(with_capacity(SMALL).create_sender(&path).unwrap(), 100);
    sending.send(before);
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        opened().open_receiver(&path).unwrap()
    });
    run.finish(victim, || {
        sending.nobody_is_dead();
        if shared().claimed.load(SeqCst) {
            is_taken(opened().open_receiver(run.path()));
        }
    });
    sending.send(1);
    received_by_another(run, &mut sending, 0);
    assert!(sending.ends.len() <= 1, "told once: {:?}", sending.ends);
}

/// One that arms, is woken by a message, takes it, and arms again.
fn receiver_arms(run: &Run) {
    let path = run.path();
    let mut sending = Sending::new(with_capacity(SMALL).create_sender(&path).unwrap(), 100);
    let victim = fork(Last::Killed, |inside| {
        let mut receiver = opened().open_receiver(&path).unwrap();
        inside.meet();
        inside.count();
        while !receiver.arm().unwrap() {}
        readable(receiver.as_fd());
        take(&mut receiver);
        let _ = receiver.arm().unwrap();
        // As a wait does it.
        take(&mut receiver);
        receiver
    });
    victim.met();
    victim.go();
    for _ in 0..2 {
        victim.watch(true, &mut || {
            sending.nobody_is_dead();
            is_taken(opened().open_receiver(run.path()));
        });
        sending.send(1);
    }
    run.finish(victim, || {
        sending.nobody_is_dead();
        is_taken(opened().open_receiver(run.path()));
    });
    received_by_another(run, &mut sending, shared().released.load(SeqCst));
}

/// Takes one message, as a victim.
fn take(receiver: &mut Receiver) {
    let message = receiver.receive().unwrap();
    let number = u64::from_le_bytes(message[..8].try_into().unwrap());
    shared().seen.store(number + 1, SeqCst);
    drop(message);
    shared().released.store(number + 1, SeqCst);
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Take {
    One,
    Copy,
    Batch,
    Held,
    Wake,
}

fn take_as(how: Take, receiver: &mut Receiver) {
    let (seen, released) = (&shared().seen, &shared().released);
    match how {
        Take::One => (0..3).for_each(|_| take(receiver)),
        Take::Wake => (0..15).for_each(|_| take(receiver)),
        Take::Copy => {
            let mut buffer = Vec::new();
            for number in 1..=3 {
                // Released and seen at once, by who copies: a double may come of one that it has not said yet.
                seen.store(number, SeqCst);
                receiver.receive_into(&mut buffer).unwrap();
                check(number - 1, Sizes::Fixed(buffer.len() as u64), &buffer, &mut Vec::new());
                released.store(number, SeqCst);
            }
        }
        Take::Batch => {
            let mut batch = receiver.receive_batch().unwrap();
            for number in 1..=4 {
                batch.next().unwrap().unwrap();
                seen.store(number, SeqCst);
            }
            drop(batch);
            released.store(4, SeqCst);
        }
        Take::Held => {
            let mut held: Vec<_> = Vec::new();
            for number in 1..=3 {
                held.push(receiver.receive().unwrap().hold());
                seen.store(number, SeqCst);
            }
            // Each receive takes back what was dropped before; what it releases itself waits behind what is held.
            let receive = |receiver: &mut Receiver, number| {
                let message = receiver.receive().unwrap();
                seen.store(number, SeqCst);
                drop(message);
            };
            drop(held.remove(1));
            receive(receiver, 4);
            drop(held.remove(0));
            receive(receiver, 5);
            // The first two, and no more: the third is held.
            released.store(2, SeqCst);
            drop(held);
            receive(receiver, 6);
            released.store(6, SeqCst);
        }
    }
}

fn receiver_releases(run: &Run, how: Take) {
    let bytes = if how == Take::Wake { 3000 } else { 100 };
    let path = run.path();
    let mut sending = Sending::new(with_capacity(SMALL).create_sender(&path).unwrap(), bytes);
    if how == Take::Wake {
        while sending.try_send() {}
    } else {
        sending.send(6);
    }
    let victim = fork(Last::Killed, |inside| {
        let mut receiver = opened().open_receiver(&path).unwrap();
        inside.meet();
        inside.count();
        take_as(how, &mut receiver);
        receiver
    });
    victim.met();
    assert!(sending.sender.resume_until(deadline()).unwrap());
    if how == Take::Wake {
        assert!(sending.sender.arm(bytes as usize).unwrap());
    }
    victim.go();
    run.finish(victim, || {
        is_taken(opened().open_receiver(run.path()));
        if how != Take::Wake {
            sending.nobody_is_dead();
        }
    });
    if how == Take::Wake {
        // Room, or the end: whichever it is, it is told.
        readable(sending.sender.as_fd());
    }
    let (released, sent) = (shared().released.load(SeqCst), sending.next);
    let end = sending.until_end();
    let left = match end {
        Some(Error::PeerDied { unreleased }) => unreleased,
        None => 0,
        Some(end) => panic!("{end}"),
    };
    // Nothing has been released that the victim has not seen.
    let seen = shared().seen.load(SeqCst);
    assert!((sent - seen..=sent - released).contains(&left), "{left} of {sent} are left: {released}, {seen}");
    received_by_another(run, &mut sending, sent - left);
}

fn receiver_releases_alone(run: &Run) {
    let path = run.path();
    Sending::new(with_capacity(SMALL).create_sender(&path).unwrap(), 100).send(6);
    let victim = fork(Last::Killed, |inside| {
        let mut receiver = opened().open_receiver(&path).unwrap();
        inside.count();
        take_as(Take::Held, &mut receiver);
        // The one that sent them has closed, which is told after them.
        match receiver.try_receive() {
            Ok(message) => assert!(message.is_none()),
            Err(error) => assert!(error.is_closed(), "{error}"),
        }
        receiver
    });
    run.finish(victim, || {
        is_taken(opened().open_receiver(run.path()));
        // Nobody is told of the other who is not there.
        let mut sending = Sending::new(opened().open_sender(run.path()).unwrap(), 100);
        sending.nobody_is_dead();
        sending.sender.close().unwrap();
    });
    let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 100);
    assert_eq!(sending.next, 6);
    received_by_another(run, &mut sending, shared().released.load(SeqCst));
}

/// Two lanes, whose messages a receiver takes to a file a few at a time.
fn receiver_flushes(run: &Run, options: &RecordFileOptions) {
    let path = run.path();
    let file = run.root.join("file");
    let mut sending = [0, 1].map(|lane| {
        let lanes = with_capacity(SMALL).lanes(2);
        let sender = if lane == 0 { lanes.create_sender(&path) } else { lanes.open_sender(&path) };
        let mut sending = Sending::new(sender.unwrap(), 100);
        sending.send(5);
        sending
    });
    let flush = || -> pelton::Result<()> {
        let receiver = opened().open_receiver(&path)?;
        let sink = options.open(&file)?;
        let mut flush = Options::new().flush_bytes(300).flush_interval(None).flush(receiver, sink)?;
        flush.now()
    };
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        flush().unwrap();
    });
    run.finish(victim, || is_taken(flush()));
    // Its successor, and then one more that finds nothing to do but this.
    flush().unwrap();
    sending.iter_mut().for_each(|sending| sending.send(1));
    flush().unwrap();
    assert_eq!(sending.each_mut().map(|sending| sending.sender.unreleased()), [0, 0]);
    let mut names: Vec<_> = names(&run.root).into_iter().filter(|name| name.starts_with("file")).collect();
    // The one without a number is the last.
    names.sort_by_key(|name| (!name.contains('.'), name.clone()));
    let mut next: BTreeMap<LaneId, u64> = BTreeMap::new();
    for name in names {
        let mut reader = RecordReader::open(run.root.join(name)).unwrap();
        while let Some(chunk) = reader.next_chunk().unwrap() {
            let next = next.entry(chunk.lane()).or_default();
            for record in chunk.records() {
                check(*next, Sizes::Fixed(100), record.payload(), &mut Vec::new());
                assert_eq!(u64::from(record.seq()), *next + 1);
                *next += 1;
            }
        }
    }
    assert_eq!(next.into_values().collect::<Vec<_>>(), [6, 6], "each message once");
}

/// A receiver that waits for a sender to come.
fn receiver_resumes(run: &Run) {
    let path = run.path();
    let victim = fork(Last::Killed, |inside| {
        let mut receiver = with_capacity(SMALL).create_receiver(&path).unwrap();
        inside.meet();
        inside.count();
        assert!(receiver.resume_until(deadline()).unwrap());
        take(&mut receiver);
        receiver
    });
    victim.met();
    victim.go();
    victim.watch(true, &mut || is_taken(opened().open_receiver(run.path())));
    let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 100);
    sending.send(1);
    run.finish(victim, || {
        sending.nobody_is_dead();
        is_taken(opened().open_receiver(run.path()));
    });
    received_by_another(run, &mut sending, shared().released.load(SeqCst));
}

/// A sender that waits for a receiver to come.
fn sender_resumes(run: &Run) {
    let path = run.path();
    let victim = fork(Last::Killed, |inside| {
        let mut sending = Sending::new(with_capacity(SMALL).create_sender(&path).unwrap(), 100);
        sending.commit(1);
        inside.meet();
        inside.count();
        assert!(sending.sender.resume_until(deadline()).unwrap());
        sending.commit(1);
        sending
    });
    victim.met();
    victim.go();
    victim.watch(true, &mut || is_taken(opened().open_sender(run.path())));
    let mut receiving = Receiving::new(opened().open_receiver(&path).unwrap(), 100);
    run.finish(victim, || {
        receiving.nobody_is_dead();
        is_taken(opened().open_sender(run.path()));
    });
    receiving.for_a_moment();
    all_committed_came(receiving.next[0], 1);
    go_on(opened().open_sender(&path).unwrap(), &mut receiving);
    drop(receiving);
    run.only_the_channel_is_left(1);
}

/// One after the other, each at another step, while a lane stretches, jumps and wraps; the receiver stops and goes on.
fn successors_die(run: &Run) {
    let path = run.path();
    let mut receiving = Receiving::new(with_capacity(LARGE).create_receiver(&path).unwrap(), 8000);
    let target = shared().target.load(SeqCst);
    for turn in 0..12 {
        let before = u64::from(turn == 0) * 30;
        // Of the last of them the steps count; those before die somewhere, at each n elsewhere.
        let last = turn == 11;
        let this = if last { target } else { 1 + (target * 17 + turn * 29) % 60 };
        shared().steps.store(0, SeqCst);
        shared().target.store(this, SeqCst);
        let victim = fork(Last::Killed, |inside| {
            inside.count_if(before == 0);
            let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 8000);
            shared().committed.fetch_max(sending.next, SeqCst);
            sending.commit(before);
            inside.count_if(true);
            sending.commit(2);
            sending.commit_batch(3);
            sending
        });
        run.finish(victim, || ());
        let committed = shared().committed.load(SeqCst);
        // Now and then everything, else some, so that the lane does not fill up, and jumps.
        match turn % 4 {
            3 => receiving.read_to(committed),
            _ => receiving.read_to(receiving.next[0] + (committed - receiving.next[0]) * 2 / 5),
        }
    }
    shared().target.store(target, SeqCst);
    receiving.for_a_moment();
    all_committed_came(receiving.next[0], 3);
    go_on(opened().open_sender(&path).unwrap(), &mut receiving);
    drop(receiving);
    run.only_the_channel_is_left(1);
}

fn receiver_closes(run: &Run) {
    let path = run.path();
    let mut sending = Sending::new(with_capacity(SMALL).create_sender(&path).unwrap(), 100);
    sending.send(6);
    let victim = fork(Last::Killed, |inside| {
        let mut receiver = opened().open_receiver(&path).unwrap();
        (0..2).for_each(|_| take(&mut receiver));
        inside.meet();
        inside.count();
        receiver.close().unwrap();
    });
    victim.met();
    assert!(sending.sender.resume_until(deadline()).unwrap());
    victim.go();
    let given_back = || shared().step() == "lock: given back";
    let mut told = None;
    run.finish(victim, || {
        match sending.sender.drain_until(Instant::now() + MOMENT) {
            Ok(drained) => assert!(!drained),
            Err(error) => told = Some(error),
        }
        if !given_back() {
            is_taken(opened().open_receiver(run.path()));
        }
    });
    let end = told.or_else(|| sending.until_end()).expect("four are not released");
    match end {
        Error::Closed { unreleased: 4 } => {}
        Error::PeerDied { unreleased: 4 } if !run.stops && !given_back() => {}
        end => panic!("{end}"),
    }
    received_by_another(run, &mut sending, 2);
}

// The whole channel.

/// Rewrites words of a file behind everybody's back.
fn poke(path: &Path, offset: u64, bytes: &[u8]) {
    use std::os::unix::fs::FileExt as _;
    std::fs::OpenOptions::new().write(true).open(path).unwrap().write_all_at(bytes, offset).unwrap();
}

fn recover(run: &Run) {
    let path = run.path();
    {
        let lanes = with_capacity(SMALL).lanes(2);
        let mut both = [lanes.create_sender(&path).unwrap(), lanes.create_sender(&path).unwrap()]
            .map(|sender| Sending::new(sender, 100));
        for sending in &mut both {
            sending.send(5);
            sending.sender.sync().unwrap();
            sending.send(3);
        }
    }
    // As if made in another boot.
    let mut header = std::fs::read(path.join("channel")).unwrap();
    header[96..112].fill(7);
    let checksum = pelton_lane::fnv1a(&header[..112]);
    header[112..120].copy_from_slice(&checksum.to_le_bytes());
    poke(&path.join("channel"), 0, &header[..120]);
    ["0.producer", "1.producer"].iter().for_each(|name| poke(&path.join(name), 96, &[7; 16]));
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        inspect::recover(&path, false).unwrap()
    });
    run.finish(victim, || match opened().open_sender(&path) {
        Err(Error::Rebooted { .. } | Error::RoleTaken { .. }) => {}
        // It has given its roles back, and ends.
        sender => assert_eq!(shared().step(), "lock: given back", "{sender:?}"),
    });
    let done = inspect::recover(&path, false).unwrap();
    assert!(done.iter().all(|lane| lane.kept == 5), "{done:?}");
    assert!(inspect::check(&path, false).unwrap().iter().all(inspect::RecoveredLane::is_whole));
    let mut receiving = Receiving::new(opened().open_receiver(&path).unwrap(), 100);
    receiving.read(10);
    assert_eq!(receiving.next, [5, 5, 0]);
    go_on(opened().open_sender(&path).unwrap(), &mut receiving);
    drop(receiving);
    run.only_the_channel_is_left(2);
}

fn remove(run: &Run) {
    let path = run.path();
    Sending::new(with_capacity(SMALL).create_sender(&path).unwrap(), 100).send(3);
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        inspect::remove(&path).unwrap();
    });
    run.finish(victim, || ());
    // It is there with everything, or not at all; then the next maker clears away what is left of it.
    if path.exists() {
        shared().committed.store(3, SeqCst);
    }
    made_by_another(run);
    inspect::remove(&path).unwrap();
    assert_eq!(run.left(), Vec::<String>::new());
}

// Over a socket.

fn listening(run: &Run) -> Listener {
    with_capacity(LARGE).listen(&run.name()).unwrap()
}

/// Ends, for whoever reads the other end, when the process does that keeps it.
fn life() -> (OwnedFd, OwnedFd) {
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap()
}

/// Begins when the victim has ended. `life` is the victim's, and only its.
fn successor<R>(gone: OwnedFd, life: &OwnedFd, body: impl FnOnce() -> R) -> Child {
    fork(Last::Exit, |_| {
        // SAFETY: this process's copy, which nothing uses any more: the child ends without dropping it.
        drop(unsafe { OwnedFd::from_raw_fd(life.as_raw_fd()) });
        assert_eq!(rustix::io::read(&gone, &mut [0]), Ok(0));
        body()
    })
}

fn connecting() -> Options {
    with_capacity(LARGE).connect_deadline(deadline())
}

/// Fills the lane, as a successor, and closes when everything has been received.
fn fill(sender: Sender, bytes: u64) {
    let mut sending = Sending::new(sender, bytes);
    shared().first.store(sending.next, SeqCst);
    while sending.try_send() {}
    shared().next.store(sending.next, SeqCst);
    assert!(sending.sender.drain_until(deadline()).unwrap());
}

/// Receives until the sender closes, as a successor.
fn receive_to_close(receiver: Receiver) {
    let (seen, released) = (shared().seen.load(SeqCst), shared().released.load(SeqCst));
    let mut receiving = Receiving::new(receiver, 100);
    let first = receiving.begins(released, seen, released.max(seen) + 1);
    shared().first.store(first, SeqCst);
    let end = receiving.until_end();
    assert!(end.is_closed(), "{end}");
    shared().next.store(receiving.next[0], SeqCst);
}

fn connected_sender_commits(run: &Run, with_descriptors: bool) {
    let (name, listener) = (run.name(), listening(run));
    let (gone, life) = life();
    let successor = successor(gone, &life, || fill(connecting().connect_sender(&name).unwrap(), 100));
    let victim = fork(Last::Killed, move |inside| {
        let mut sending = Sending::new(connecting().connect_sender(&name).unwrap(), 100);
        sending.commit(2);
        inside.meet();
        inside.count();
        match with_descriptors {
            false => sending.commit(2),
            true => sending.commit_with_descriptors(2),
        }
        sending.commit_batch(3);
        (sending, life)
    });
    let mut receiving = Receiving::new(listener.accept_receiver_until(deadline()).unwrap().unwrap(), 100);
    victim.met();
    receiving.read(2);
    assert!(receiving.receiver.arm().unwrap());
    victim.go();
    run.finish(victim, || receiving.nobody_is_dead());
    readable(receiving.receiver.as_fd());
    let end = receiving.until_end();
    assert!(end.is_peer_died(), "{end}");
    all_committed_came(receiving.next[0], 3);
    assert!(receiving.receiver.resume_until(deadline()).unwrap());
    let end = receiving.until_end();
    assert!(end.is_closed(), "{end}");
    successor.wait_well();
    assert_eq!(receiving.next[0], shared().next.load(SeqCst));
    drop((receiving, listener));
    assert_eq!(run.left(), Vec::<String>::new());
}

/// One of two senders of a receiver that gathers; the other is a thread's, and notices nothing.
fn gathered_sender(run: &Run) {
    let name = run.name();
    let mut receiver = connecting().announce(true).gather_at(&name).unwrap();
    let mut other = receiver.senders().unwrap().sender().unwrap();
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        let mut sending = Sending::new(connecting().connect_sender(&name).unwrap(), 100);
        sending.commit(3);
        sending.commit_batch(3);
        let sender = sending.sender;
        sender.close().unwrap();
    });
    let (mut next, mut others, mut told) = (0, 0, Vec::new());
    let mut look = |receiver: &mut Receiver| {
        while let Some(message) = receiver.try_receive().unwrap() {
            match message.kind() {
                Kind::Message if message.len() == 100 => {
                    check(next, Sizes::Fixed(100), &message, &mut Vec::new());
                    next += 1;
                }
                Kind::Message => others += 1,
                kind => told.push((kind, message.peer().unwrap().pid)),
            }
        }
        (next, others, told.clone())
    };
    loop {
        match victim.state() {
            'Z' => break,
            'T' => {
                std::thread::sleep(MOMENT);
                let (.., told) = look(&mut receiver);
                assert!(told.iter().all(|(kind, _)| *kind != Kind::PeerDied), "{told:?}");
                // SAFETY: no pointers.
                unsafe { libc::kill(victim.pid, libc::SIGCONT) };
                while victim.state() == 'T' {}
            }
            _ => _ = look(&mut receiver),
        }
    }
    let pid = victim.pid as u32;
    victim.wait();
    other.send(b"other").unwrap();
    let until = deadline();
    let (next, _, told) = loop {
        let seen = look(&mut receiver);
        let of_victim: Vec<Kind> = seen.2.iter().filter(|(_, of)| *of == pid).map(|(kind, _)| *kind).collect();
        // Who has come also goes.
        if seen.1 == 1 && of_victim.len() != 1 {
            break (seen.0, seen.1, of_victim);
        }
        assert!(Instant::now() < until, "{seen:?}");
    };
    assert!(matches!(told[..], [] | [Kind::Joined, Kind::PeerDied | Kind::Closed]), "{told:?}");
    all_committed_came(next, 3);
    assert_eq!(receiver.counters().messages, next + 1);
    drop((other, receiver));
    assert_eq!(run.left(), Vec::<String>::new());
}

/// A receiver of two senders, which are both told of its death.
fn gathering_receiver(run: &Run) {
    let name = run.name();
    let victim = fork(Last::Killed, |inside| {
        let mut receiver = connecting().gather_at(&name).unwrap();
        inside.meet();
        inside.count();
        for _ in 0..8 {
            drop(receiver.receive().unwrap());
            shared().released.fetch_add(1, SeqCst);
        }
        receiver
    });
    victim.met();
    victim.go();
    // Without a deadline: nobody comes after the victim.
    let senders = (0..2).map_while(|_| with_capacity(LARGE).connect_sender(&name).ok());
    let mut sending: Vec<_> = senders.map(|sender| Sending::new(sender, 100)).collect();
    let mut message = Vec::new();
    for number in 0..4 {
        for sending in &mut sending {
            payload(number, 100, &mut message);
            // The victim may be dead by now.
            sending.next += u64::from(sending.sender.try_send(&message).is_ok_and(|sent| sent == Sent::Sent));
        }
    }
    run.finish(victim, || {});
    let mut left = 0;
    for one in &mut sending {
        match one.until_end() {
            Some(Error::PeerDied { unreleased }) => left += unreleased,
            None => {}
            Some(end) => panic!("{end}"),
        }
    }
    let (released, sent) = (shared().released.load(SeqCst), sending.iter().map(|sending| sending.next).sum::<u64>());
    // One may be released and not yet counted.
    assert!((released..=released + 1).contains(&(sent - left)), "{left} of {sent} are left, {released} were released");
    drop(sending);
    let stale = run.left();
    assert!(stale.len() <= 1, "the socket alone is left, for the next one to remove: {stale:?}");
    drop(connecting().gather_at(&name).unwrap());
    assert_eq!(run.left(), Vec::<String>::new());
}

fn connected_receiver_releases(run: &Run, with_descriptors: bool) {
    let (name, listener) = (run.name(), listening(run));
    let (gone, life) = life();
    let successor = successor(gone, &life, || receive_to_close(connecting().connect_receiver(&name).unwrap()));
    let victim = fork(Last::Killed, move |inside| {
        let mut receiver = connecting().connect_receiver(&name).unwrap();
        inside.meet();
        inside.count();
        take_as(Take::Held, &mut receiver);
        take(&mut receiver);
        (receiver, life)
    });
    let mut sending = Sending::new(listener.accept_sender_until(deadline()).unwrap().unwrap(), 100);
    match with_descriptors {
        false => sending.send(8),
        true => sending.commit_with_descriptors(8),
    }
    victim.met();
    victim.go();
    run.finish(victim, || sending.nobody_is_dead());
    let left = match sending.until_end() {
        Some(Error::PeerDied { unreleased }) => unreleased,
        end => panic!("{end:?}"),
    };
    let (seen, released) = (shared().seen.load(SeqCst), shared().released.load(SeqCst));
    assert!((8 - seen..=8 - released).contains(&left), "{left} are left: {released}, {seen}");
    assert!(sending.sender.resume_until(deadline()).unwrap());
    sending.send(3);
    drop(sending);
    successor.wait_well();
    assert_eq!((shared().first.load(SeqCst), shared().next.load(SeqCst)), (8 - left, 11));
    drop(listener);
    assert_eq!(run.left(), Vec::<String>::new());
}

/// What there was before a hand-shake.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    Fresh,
    /// A lane whose other side died.
    Survives,
    /// The same, with a floor, which the next sender must be told.
    Jumped,
}

fn by_short_name(run: &Run, sends: bool, listens: bool, before: Before) {
    // SAFETY: this program has one thread.
    unsafe { std::env::set_var("XDG_RUNTIME_DIR", &run.root) };
    hand_shake(&Run { root: run.root.clone(), has_short_name: true, ..*run }, sends, listens, before);
}

/// Has a process go on that was stopped, after a moment, again and again until it ends: whoever waits for it cannot.
fn go_on_when_stopped(victim: &Child) -> Child {
    let pid = victim.pid;
    fork(Last::Exit, |_| {
        while let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            match stat.rsplit(") ").next().unwrap().chars().next().unwrap() {
                'Z' => return,
                'T' => {
                    std::thread::sleep(MOMENT);
                    // SAFETY: no pointers. It has not been waited for: its parent is stopped in nothing but its hand-shake.
                    unsafe { libc::kill(pid, libc::SIGCONT) };
                }
                _ => std::thread::sleep(Duration::from_micros(50)),
            }
        }
    })
}

/// The victim, `sends` or receives, and `listens` or connects, while the parent does the other; with a lane that survived
/// another peer, or a fresh one. The successor of one that sends fills the lane before anything is received.
fn hand_shake(run: &Run, sends: bool, listens: bool, before: Before) {
    let name = run.name();
    let survives = before != Before::Fresh;
    let bytes = if before == Before::Jumped { 8000 } else { 100 };
    let as_sender = |name: &str| match listens {
        false => connecting().connect_sender(name).unwrap(),
        true => connecting().listen(name).unwrap().accept_sender_until(deadline()).unwrap().expect("somebody connects"),
    };
    let as_receiver = |name: &str| match listens {
        false => connecting().connect_receiver(name).unwrap(),
        true => {
            connecting().listen(name).unwrap().accept_receiver_until(deadline()).unwrap().expect("somebody connects")
        }
    };
    let listener = (!listens).then(|| listening(run));
    let (gone, life) = life();
    let successor = successor(gone, &life, || match sends {
        true => fill(as_sender(&name), bytes),
        false => receive_to_close(as_receiver(&name)),
    });
    let (sent, read): (&[u64], u64) = match before {
        Before::Fresh => (&[], 0),
        Before::Survives => (&[3, 2], 1),
        // As in `sender_commits`.
        Before::Jumped => (&[32, 12], 12),
    };
    // The first peer, where the lane is to have lost one.
    let first = survives.then(|| {
        // SAFETY: as in `successor`.
        let close = || drop(unsafe { OwnedFd::from_raw_fd(life.as_raw_fd()) });
        fork(Last::Killed, |inside| -> Box<dyn Any> {
            close();
            if sends {
                let mut sending = Sending::new(as_sender(&name), bytes);
                for count in sent {
                    sending.send(*count);
                    inside.meet();
                }
                Box::new(sending)
            } else {
                let mut receiver = as_receiver(&name);
                inside.meet();
                (0..2).for_each(|_| take(&mut receiver));
                inside.meet();
                Box::new(receiver)
            }
        })
    });
    if sends {
        shared().committed.store(sent.iter().sum(), SeqCst);
    }
    let names = name.clone();
    let start = move || {
        fork(Last::Killed, move |inside| -> Box<dyn Any> {
            inside.count();
            if sends {
                let mut sending = Sending::new(as_sender(&names), bytes);
                sending.commit(1);
                Box::new((sending, life))
            } else {
                Box::new((as_receiver(&names), life))
            }
        })
    };
    let waker;
    if sends {
        let receiver = || match &listener {
            Some(listener) => listener.accept_receiver_until(deadline()).unwrap().expect("somebody connects"),
            None => connecting().connect_receiver(&name).unwrap(),
        };
        let (mut receiving, victim) = match first {
            None => {
                let victim = start();
                waker = run.stops.then(|| go_on_when_stopped(&victim));
                (Receiving::new(receiver(), bytes), victim)
            }
            Some(first) => {
                let mut receiving = Receiving::new(receiver(), bytes);
                first.met();
                receiving.read(read);
                first.go();
                first.met();
                first.go();
                first.wait();
                let victim = start();
                waker = run.stops.then(|| go_on_when_stopped(&victim));
                // Without having read the rest: the successor must find its end.
                assert!(receiving.receiver.resume_until(deadline()).unwrap());
                (receiving, victim)
            }
        };
        run.finish(victim, || ());
        // The successor comes next, unless it is already there.
        let _ = receiving.receiver.resume_until(deadline());
        let until = deadline();
        while shared().next.load(SeqCst) == 0 {
            assert!(Instant::now() < until, "the successor hangs");
            std::thread::sleep(Duration::from_micros(50));
        }
        let end = receiving.until_end();
        assert!(end.is_closed(), "{end}");
        successor.wait_well();
        assert_eq!(receiving.next[0], shared().next.load(SeqCst));
        // Of the victim and the one before; the successor's own begin there.
        let first = shared().first.load(SeqCst);
        let sent: u64 = sent.iter().sum();
        assert!((sent..=sent + 1).contains(&first), "the successor begins at {first}");
    } else {
        let sender = || match &listener {
            Some(listener) => listener.accept_sender_until(deadline()).unwrap().expect("somebody connects"),
            None => connecting().connect_sender(&name).unwrap(),
        };
        let (mut sending, victim) = match first {
            None => {
                let victim = start();
                waker = run.stops.then(|| go_on_when_stopped(&victim));
                (Sending::new(sender(), 100), victim)
            }
            Some(first) => {
                let mut sending = Sending::new(sender(), 100);
                first.met();
                sending.send(6);
                first.go();
                first.met();
                first.go();
                first.wait();
                let victim = start();
                waker = run.stops.then(|| go_on_when_stopped(&victim));
                assert!(sending.sender.resume_until(deadline()).unwrap());
                (sending, victim)
            }
        };
        let mut message = Vec::new();
        while sending.next < 9 {
            payload(sending.next, 100, &mut message);
            match sending.sender.send_until(&message, deadline()) {
                Ok(sent) => {
                    assert_eq!(sent, Sent::Sent);
                    sending.next += 1;
                }
                Err(error) => {
                    assert!(error.is_peer_died(), "{error}");
                    assert!(sending.sender.resume_until(deadline()).unwrap());
                }
            }
        }
        // The victim takes nothing, so it is told dead if it got so far.
        while let Err(error) = sending.sender.drain_until(deadline()) {
            assert!(error.is_peer_died(), "{error}");
            assert!(sending.sender.resume_until(deadline()).unwrap());
        }
        drop(sending);
        run.finish(victim, || ());
        successor.wait_well();
        assert_eq!((shared().first.load(SeqCst), shared().next.load(SeqCst)), (if survives { 2 } else { 0 }, 9));
    }
    if let Some(waker) = waker {
        waker.wait_well();
    }
    drop(listener);
    assert_eq!(run.left(), Vec::<String>::new());
}
