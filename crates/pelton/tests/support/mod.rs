//! Children of a test, what they say and hear, and payloads that tell damage, loss and disorder.
#![allow(dead_code, reason = "each test file uses its part of it")]

pub mod race;
pub mod raw;

use pelton::{Error, Options, Receiver, Sender, Sent, Wait};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Far above what anything takes on a loaded machine; only a hang reaches it.
pub const DEADLINE: Duration = Duration::from_secs(60);

pub fn deadline() -> Instant {
    Instant::now() + DEADLINE
}

/// Ends the whole process, with the claim, when a test hangs in a call that has no deadline.
pub struct Watchdog(Option<mpsc::Sender<()>>);

impl Watchdog {
    pub fn new(claim: &'static str) -> Watchdog {
        let (alive, dropped) = mpsc::channel::<()>();
        std::thread::spawn(move || {
            if dropped.recv_timeout(2 * DEADLINE) == Err(mpsc::RecvTimeoutError::Timeout) {
                eprintln!("HANG: {claim}");
                std::process::abort();
            }
        });
        Watchdog(Some(alive))
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.0 = None;
    }
}

/// A directory of a test's own, removed at its end however that comes about.
pub struct Place {
    root: tempfile::TempDir,
    _hang: Option<Watchdog>,
}

impl Place {
    pub fn new(claim: &'static str) -> Place {
        // A Unix socket's path is short, so the directory stands in /tmp.
        Place { _hang: Some(Watchdog::new(claim)), ..Place::unwatched() }
    }

    /// For a test whose children tell a hang themselves.
    pub fn unwatched() -> Place {
        Place { root: tempfile::Builder::new().prefix("pt").tempdir_in("/tmp").unwrap(), _hang: None }
    }

    pub fn path(&self) -> &Path {
        self.root.path()
    }

    pub fn socket(&self) -> PathBuf {
        self.path().join("s")
    }

    pub fn name(&self) -> String {
        format!("unix:{}", self.socket().display())
    }

    /// A channel in a directory.
    pub fn path_name(&self) -> String {
        format!("path:{}", self.path().join("c").display())
    }

    /// Everything below it.
    pub fn left(&self) -> Vec<PathBuf> {
        std::fs::read_dir(self.path()).unwrap().map(|entry| entry.unwrap().path()).collect()
    }
}

/// What a child is told to do: words by name.
#[derive(Clone, Debug, Default)]
pub struct Role(BTreeMap<String, String>);

impl Role {
    pub fn new(role: &str) -> Role {
        Role::default().with("role", role)
    }

    pub fn with(mut self, key: &str, value: impl ToString) -> Role {
        self.0.insert(key.to_owned(), value.to_string());
        self
    }

    /// The role of this process, if it is a child.
    pub fn of_this_process() -> Option<Role> {
        let text = std::env::var("PELTON_CHILD").ok()?;
        // SAFETY: neither call takes a pointer. A child does not outlive the thread that made it, nor a hang.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            libc::alarm(2 * DEADLINE.as_secs() as u32);
        }
        Some(Role(text.split('\t').filter_map(|w| w.split_once('=')).map(|(k, v)| (k.into(), v.into())).collect()))
    }

    pub fn get(&self, key: &str) -> &str {
        self.0.get(key).map_or("", String::as_str)
    }

    pub fn number(&self, key: &str) -> Option<u64> {
        self.0.get(key).map(|text| text.parse().unwrap())
    }

    fn text(&self) -> String {
        self.0.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join("\t")
    }
}

/// Says a line to the parent.
pub fn say(text: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    write!(out, "\n>{text}\n").unwrap();
    out.flush().unwrap();
}

/// The parent's next line; ends the child when the parent is gone.
pub fn hear() -> String {
    let mut line = String::new();
    if std::io::stdin().lock().read_line(&mut line).unwrap() == 0 {
        std::process::exit(3);
    }
    line.trim_end().to_owned()
}

/// This test binary again, as a child with a role; killed when dropped.
pub struct Child {
    child: std::process::Child,
    stdin: Option<ChildStdin>,
    lines: mpsc::Receiver<String>,
    role: String,
}

impl Child {
    pub fn start(role: Role) -> Child {
        Child::start_as(role, |_| {})
    }

    pub fn start_as(role: Role, adjust: impl FnOnce(&mut Command)) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "child", "--nocapture", "--test-threads=1"]).env("PELTON_CHILD", role.text());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        adjust(&mut command);
        let mut child = command.spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (to, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if let Some(said) = line.strip_prefix('>')
                    && to.send(said.to_owned()).is_err()
                {
                    break;
                }
            }
        });
        Child { stdin: child.stdin.take(), child, lines, role: role.text() }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next line that the child says.
    #[track_caller]
    pub fn line(&self) -> String {
        match self.lines.recv_timeout(DEADLINE) {
            Ok(line) => line,
            Err(error) => panic!("{error}: child {} of role {}", self.pid(), self.role),
        }
    }

    #[track_caller]
    pub fn expect(&self, wanted: &str) {
        assert_eq!(self.line(), wanted, "from the child of role {}", self.role);
    }

    pub fn tell(&mut self, text: &str) {
        writeln!(self.stdin.as_mut().unwrap(), "{text}").unwrap();
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// SIGKILL; returns when it is dead.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits for its end.
    #[track_caller]
    pub fn wait(mut self) -> ExitStatus {
        // The end of its output comes before it ends, and has a deadline.
        let until = deadline();
        loop {
            match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(_) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => return self.child.wait().unwrap(),
                Err(mpsc::RecvTimeoutError::Timeout) => panic!("child of role {} did not end", self.role),
            }
        }
    }

    #[track_caller]
    pub fn wait_well(self) {
        let role = self.role.clone();
        let status = self.wait();
        assert!(status.success(), "child of role {role}: {status}");
    }

    /// Waits until the system says that it is in this state ('T' stopped, 'S' asleep). There is no event for that.
    pub fn wait_for_state(&self, state: char) {
        let until = deadline();
        loop {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap();
            if stat.rsplit(") ").next().unwrap().starts_with(state) {
                return;
            }
            assert!(Instant::now() < until, "the child is not in state {state}: {stat}");
            std::thread::yield_now();
        }
    }

    /// Waits until every thread of the child but its main one, which waits for the test, is asleep in `poll`.
    pub fn wait_until_it_polls(&self) {
        let until = deadline();
        loop {
            for task in std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap() {
                let path = task.unwrap().path();
                let call = std::fs::read_to_string(path.join("syscall")).unwrap_or_default();
                let number: i64 = call.split(' ').next().unwrap().parse().unwrap_or(-1);
                if [libc::SYS_poll, libc::SYS_ppoll, libc::SYS_epoll_wait, libc::SYS_epoll_pwait].contains(&number) {
                    return;
                }
            }
            assert!(Instant::now() < until, "the child does not poll");
            std::thread::yield_now();
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A small generator, good enough for sizes and delays, and the same everywhere for a seed.
#[derive(Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// How large message `number` is.
#[derive(Clone, Copy, Debug)]
pub enum Sizes {
    /// Each from 0 on, up to below the bound, then from 0 again.
    Every(u64),
    /// Below the bound, from the seed.
    Random(u64, u64),
    Fixed(u64),
}

impl Sizes {
    pub fn of(self, number: u64) -> usize {
        (match self {
            Sizes::Every(bound) => number % bound,
            Sizes::Random(seed, bound) => {
                let mut random = Random::new(seed ^ (number + 1));
                random.next();
                random.next();
                random.below(bound)
            }
            Sizes::Fixed(bytes) => bytes,
        }) as usize
    }

    pub fn parse(text: &str) -> Sizes {
        let words: Vec<&str> = text.split(':').collect();
        match words[..] {
            ["every", bound] => Sizes::Every(bound.parse().unwrap()),
            ["random", seed, bound] => Sizes::Random(seed.parse().unwrap(), bound.parse().unwrap()),
            ["fixed", bytes] => Sizes::Fixed(bytes.parse().unwrap()),
            _ => panic!("{text}"),
        }
    }
}

impl std::fmt::Display for Sizes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Sizes::Every(bound) => write!(f, "every:{bound}"),
            Sizes::Random(seed, bound) => write!(f, "random:{seed}:{bound}"),
            Sizes::Fixed(bytes) => write!(f, "fixed:{bytes}"),
        }
    }
}

/// The bytes of message `number`: its number, where there is room for it, and a pattern that depends on it.
pub fn payload(number: u64, bytes: usize, into: &mut Vec<u8>) {
    into.clear();
    let mut word = number;
    while into.len() < bytes {
        let left = bytes - into.len();
        into.extend_from_slice(&word.to_le_bytes()[..left.min(8)]);
        word = word.wrapping_add(number ^ 0x9e37_79b9_7f4a_7c15).rotate_left(7);
    }
}

#[track_caller]
pub fn check(number: u64, sizes: Sizes, found: &[u8], wanted: &mut Vec<u8>) {
    payload(number, sizes.of(number), wanted);
    assert!(
        found == &wanted[..],
        "message {number}: {} bytes beginning {:02x?}, wanted {} beginning {:02x?}",
        found.len(),
        &found[..found.len().min(16)],
        wanted.len(),
        &wanted[..wanted.len().min(16)],
    );
}

/// How a side waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    Block,
    Spin,
    Poll,
    Epoll,
    /// Asks again and again by the `try_` methods.
    Try,
}

impl How {
    pub fn parse(text: &str) -> How {
        match text {
            "" | "Block" => How::Block,
            "Spin" => How::Spin,
            "Poll" => How::Poll,
            "Epoll" => How::Epoll,
            "Try" => How::Try,
            _ => panic!("{text}"),
        }
    }

    pub fn wait(self) -> Wait {
        if self == How::Spin { Wait::Spin } else { Wait::Block }
    }
}

/// Waits until the descriptor is readable.
pub fn readable(fd: BorrowedFd<'_>) {
    assert!(readable_until(fd, deadline()), "the descriptor did not become readable");
}

pub fn readable_until(fd: BorrowedFd<'_>, deadline: Instant) -> bool {
    loop {
        let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now())).unwrap();
        match poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&left)) {
            Ok(count) => return count > 0,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("poll: {error}"),
        }
    }
}

pub fn is_readable(fd: BorrowedFd<'_>) -> bool {
    readable_until(fd, Instant::now())
}

/// An event loop with one descriptor in it.
pub struct Loop {
    how: How,
    epoll: OwnedFd,
}

impl Loop {
    pub fn new(how: How, fd: BorrowedFd<'_>) -> Loop {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        epoll::add(&epoll, fd, EventData::new_u64(0), EventFlags::IN).unwrap();
        Loop { how, epoll }
    }

    pub fn turn(&self, fd: BorrowedFd<'_>) {
        match self.how {
            How::Try => std::thread::yield_now(),
            How::Epoll => readable(self.epoll.as_fd()),
            _ => readable(fd),
        }
    }
}

/// Sends one message.
pub fn send_one(sender: &mut Sender, bytes: &[u8], how: How, turns: &Loop) -> pelton::Result<()> {
    if matches!(how, How::Block | How::Spin) {
        return sender.send(bytes);
    }
    loop {
        match sender.try_send(bytes)? {
            Sent::Sent => return Ok(()),
            Sent::Full if how == How::Try => turns.turn(sender.as_fd()),
            Sent::Full => {
                if sender.arm(bytes.len())? {
                    turns.turn(sender.as_fd());
                    sender.disarm();
                }
            }
            Sent::TimedOut => panic!("try_send waited"),
        }
    }
}

/// Sends messages `numbers`.
pub fn send_all(
    sender: &mut Sender,
    numbers: std::ops::Range<u64>,
    sizes: Sizes,
    how: How,
) -> Result<(), (u64, Error)> {
    let turns = Loop::new(how, sender.as_fd());
    let mut bytes = Vec::new();
    for number in numbers {
        payload(number, sizes.of(number), &mut bytes);
        send_one(sender, &bytes, how, &turns).map_err(|error| (number, error))?;
    }
    Ok(())
}

/// Receives messages from number `from` on, at most `count`, checking each; answers the number after the last and why
/// it ended, if not by the count.
pub fn receive_all(receiver: &mut Receiver, from: u64, count: u64, sizes: Sizes, how: How) -> (u64, Option<Error>) {
    let turns = Loop::new(how, receiver.as_fd());
    let mut wanted = Vec::new();
    let mut number = from;
    while number < from + count {
        let polled = matches!(how, How::Poll | How::Epoll | How::Try);
        match if polled { receiver.try_receive() } else { receiver.receive().map(Some) } {
            Ok(Some(message)) => {
                check(number, sizes, &message, &mut wanted);
                number += 1;
                continue;
            }
            Ok(None) => {}
            Err(error) => return (number, Some(error)),
        };
        if how == How::Try {
            std::thread::yield_now();
            continue;
        }
        match receiver.arm() {
            Ok(true) => turns.turn(receiver.as_fd()),
            Ok(false) => {}
            Err(error) => return (number, Some(error)),
        }
    }
    (number, None)
}

pub fn options(role: &Role) -> Options {
    let mut options = Options::new().wait(How::parse(role.get("how")).wait());
    if let Some(capacity) = role.number("capacity") {
        options = options.capacity(capacity);
    }
    if let Some(uid) = role.number("allow") {
        options = options.allow_uids(&[uid as u32]);
    }
    options.connect_deadline(deadline())
}

/// A sender under the role's name, listening or connecting as it says, or in a directory; a listener says "listening" first.
pub fn sender(role: &Role) -> Sender {
    sender_at(&options(role), role.get("name"), role.get("listen") == "yes")
}

pub fn receiver(role: &Role) -> Receiver {
    receiver_at(&options(role), role.get("name"), role.get("listen") == "yes")
}

fn sender_at(options: &Options, name: &str, listens: bool) -> Sender {
    if let Some(directory) = name.strip_prefix("path:") {
        if listens {
            say("listening");
        }
        return options.create_sender(directory).unwrap();
    }
    if listens {
        let listener = options.listen(name).unwrap();
        say("listening");
        return listener.accept_sender_until(deadline()).unwrap().expect("nobody came");
    }
    options.connect_sender(name).unwrap()
}

fn receiver_at(options: &Options, name: &str, listens: bool) -> Receiver {
    if let Some(directory) = name.strip_prefix("path:") {
        if listens {
            say("listening");
        }
        return options.create_receiver(directory).unwrap();
    }
    if listens {
        let listener = options.listen(name).unwrap();
        say("listening");
        return listener.accept_receiver_until(deadline()).unwrap().expect("nobody came");
    }
    options.connect_receiver(name).unwrap()
}

/// How an error is called in what a child says.
pub fn word(error: &Error) -> String {
    match error {
        Error::Closed { unreleased } => format!("Closed {unreleased}"),
        Error::PeerDied { unreleased } => format!("PeerDied {unreleased}"),
        Error::Refused(why) => format!("Refused {why}"),
        error => format!("{error:?}"),
    }
}

/// Open descriptors of this process, but for the one that reads the directory.
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count() - 1
}

pub fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// Waits until a thread of this process is asleep in `poll`, or in epoll.
pub fn wait_until_thread_polls(thread: i32) {
    let until = deadline();
    loop {
        let call = std::fs::read_to_string(format!("/proc/self/task/{thread}/syscall")).unwrap();
        let number: i64 = call.split(' ').next().unwrap().trim().parse().unwrap_or(-1);
        if [libc::SYS_poll, libc::SYS_ppoll, libc::SYS_epoll_wait, libc::SYS_epoll_pwait].contains(&number) {
            return;
        }
        assert!(Instant::now() < until, "the thread does not poll: {call}");
        std::thread::yield_now();
    }
}

pub fn this_thread() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A file system of a test's own, gone with it.
pub struct Mounted(pub PathBuf);

impl Mounted {
    /// A tmpfs at a place, which is made. Nothing where that is not allowed, which is said.
    pub fn tmpfs(point: &Path, options: &str) -> Option<Mounted> {
        std::fs::create_dir_all(point).unwrap();
        let mounted = Mounted::by(point, &["-t", "tmpfs", "-o", options, "tmpfs"]);
        if mounted.is_none() {
            eprintln!("SKIPPED: no permission to mount a tmpfs with {options}");
        }
        mounted
    }

    /// What `mount` makes of these arguments.
    pub fn by(point: &Path, arguments: &[&str]) -> Option<Mounted> {
        (is_root() && mount(arguments, point)).then(|| Mounted(point.to_owned()))
    }

    pub fn resize(&self, bytes: &str) {
        assert!(mount(&["-o", &format!("remount,size={bytes}")], &self.0));
    }
}

fn mount(arguments: &[&str], point: &Path) -> bool {
    let done = Command::new("mount").args(arguments).arg(point).stderr(Stdio::null()).status();
    done.is_ok_and(|status| status.success())
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Lazily: a mapping that a failed test leaves must not leave the mount.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
