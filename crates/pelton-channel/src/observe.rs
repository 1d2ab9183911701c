//! A running system from outside, without its cooperation: all channels, their processes, and what waits in them. It
//! works while both sides of a channel are stopped, and changes nothing: it takes no lock and no role, rings no
//! doorbell, and writes no page. [`Observer::channels`] finds the channels; [`Lane::read`] reads a lane again.
//!
//! Path channels are found by their directories. The others are found by /proc/PID/fd: the memfds of a lane have names
//! that say to what they belong (spec/protocol.md, "Names of memfds"), and each side keeps the descriptors. A child
//! with a deadline opens them, and accepts sealed memfds only. Pages are read by `pread`, never by a mapping.
//!
//! ```
//! # fn main() -> pelton::Result<()> {
//! let (mut sender, _receiver) = pelton::Options::new().capacity(1 << 20).threads()?;
//! sender.send(b"waits")?;
//! let found = pelton::observe::Observer::new().channels();
//! let own = |channel: &&pelton::observe::Channel| channel.receiver.pid == std::process::id();
//! let channel = found.channels.iter().find(own).expect("a channel of this process");
//! assert_eq!(channel.waiting_messages(), 1);
//! # Ok(())
//! # }
//! ```

mod memfd;
mod mounts;
mod page;
mod process;
mod tap;

use crate::directory::{Unmapped, UnmappedLane, UnmappedSides};
use crate::settings::Policy;
use mounts::Mounts;
pub use page::{Place, Reading};
use pelton_lane::CursorTable;
use pelton_os::lock;
use process::Process;
pub use process::{Activity, Side};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags, statat, statx};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tap::Reader;
pub use tap::{FileIds, Tap, Tapped};

/// Finds channels. It keeps the files that it has opened, so that it opens each once; see the [module](self).
#[derive(Debug, Default)]
pub struct Observer {
    directories: BTreeSet<PathBuf>,
    roots: BTreeSet<PathBuf>,
    memfds: memfd::Memfds,
}

/// What an [`Observer`] has found.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Found {
    /// The channels, by name.
    pub channels: Vec<Channel>,
    /// What it could not read, with the reasons.
    pub unreadable: Vec<Unreadable>,
}

/// A file, process or directory that an [`Observer`] cannot read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub struct Unreadable {
    /// Which one.
    pub what: String,
    /// Why.
    pub reason: String,
}

/// How the two sides of a channel find each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Kind {
    /// By a name: one sender and one receiver.
    Connect,
    /// By a name: one receiver of many senders.
    Gather,
    /// By a name: a service, and its clients' requests.
    Service,
    /// The replies to a client of a service.
    Replies,
    /// By a directory.
    Path,
    /// A publisher and one of its subscribers: by a name, by a directory, or in one process. In a directory also a
    /// durable subscription that no process uses, and a publisher without subscribers.
    Broadcast,
    /// In one process.
    Threads,
    /// A listener under a name, to which no process is connected.
    Listener,
}

impl Kind {
    /// One lower-case word.
    pub fn word(self) -> &'static str {
        match self {
            Kind::Connect => "connect",
            Kind::Gather => "gather",
            Kind::Service => "service",
            Kind::Replies => "replies",
            Kind::Path => "path",
            Kind::Broadcast => "broadcast",
            Kind::Threads => "threads",
            Kind::Listener => "listener",
        }
    }
}

/// The state of a channel, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// Messages pass, or could.
    Ok,
    /// A sender waits for free space.
    Full,
    /// The receiver is stopped by a signal.
    ReceiverStopped,
    /// A sender is stopped by a signal.
    SenderStopped,
    /// The receiver ended without closing, and has no successor.
    ReceiverDied,
    /// A sender ended without closing, and has no successor.
    SenderDied,
    /// Messages wait, and there is no receiver.
    NobodyReads,
    /// Nothing waits, and a side is missing.
    Idle,
}

impl State {
    /// All of them.
    pub const ALL: [State; 8] = [
        State::Ok,
        State::Full,
        State::ReceiverStopped,
        State::SenderStopped,
        State::ReceiverDied,
        State::SenderDied,
        State::NobodyReads,
        State::Idle,
    ];

    /// The state in words.
    pub fn words(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Full => "full",
            State::ReceiverStopped => "receiver stopped",
            State::SenderStopped => "sender stopped",
            State::ReceiverDied => "receiver died",
            State::SenderDied => "sender died",
            State::NobodyReads => "nobody reads",
            State::Idle => "idle",
        }
    }
}

/// A channel.
#[derive(Debug)]
#[non_exhaustive]
pub struct Channel {
    /// Its name: a short name, `unix:PATH` or `path:DIR`. Processes chose it: escape it before a terminal.
    pub name: String,
    /// Its kind.
    pub kind: Kind,
    /// Its receiver, or service.
    pub receiver: Side,
    /// Its lanes, one for each sender.
    pub lanes: Vec<Lane>,
    /// When it was made, where the kernel reports that.
    pub made: Option<SystemTime>,
    /// What is known about it beside the numbers, in a sentence: for instance, that it needs a recovery.
    pub note: Option<String>,
    /// The name of a durable subscription to a broadcast in a directory.
    pub durable: Option<String>,
}

impl Channel {
    /// Messages that wait, in all lanes.
    pub fn waiting_messages(&self) -> u64 {
        self.sum(|reading| reading.waiting_messages)
    }

    /// Bytes that they occupy.
    pub fn waiting_bytes(&self) -> u64 {
        self.sum(|reading| reading.waiting_bytes)
    }

    /// Bytes of data of its lanes together.
    pub fn capacity(&self) -> u64 {
        self.sum(|reading| reading.capacity)
    }

    /// Messages sent so far.
    pub fn messages(&self) -> u64 {
        self.sum(|reading| reading.sent.messages)
    }

    /// Bytes of their payloads.
    pub fn bytes(&self) -> u64 {
        self.sum(|reading| reading.sent.bytes)
    }

    /// A sum over its lanes.
    pub fn sum(&self, of: impl Fn(&Reading) -> u64) -> u64 {
        self.lanes.iter().fold(0, |sum, lane| sum.saturating_add(of(&lane.reading)))
    }

    /// Its state.
    pub fn state(&self) -> State {
        let senders = |activity| self.lanes.iter().any(|lane| lane.sender.activity == activity);
        match self.receiver.activity {
            Activity::Stopped => State::ReceiverStopped,
            Activity::Died => State::ReceiverDied,
            Activity::Closed | Activity::Absent if self.waiting_messages() > 0 => State::NobodyReads,
            _ if senders(Activity::Died) => State::SenderDied,
            _ if senders(Activity::Stopped) => State::SenderStopped,
            Activity::Closed | Activity::Absent => State::Idle,
            _ if self.lanes.iter().any(|lane| lane.is_full()) => State::Full,
            _ if !senders(Activity::Alive) && !senders(Activity::Unknown) => State::Idle,
            _ => State::Ok,
        }
    }
}

/// A lane: the part of a channel that one sender writes.
#[derive(Debug)]
#[non_exhaustive]
pub struct Lane {
    /// Its number in the channel, from 0.
    pub number: u32,
    /// Its sender.
    pub sender: Side,
    /// Its pages, as last read.
    pub reading: Reading,
    /// When it was made, where the kernel reports that.
    pub made: Option<SystemTime>,
    files: Arc<Files>,
}

/// The files of a lane, open for reading.
#[derive(Debug)]
struct Files {
    producer: Arc<File>,
    consumer: Arc<File>,
    data: Option<Arc<File>>,
    reader: ReaderOf,
}

/// Whose a lane's consumer page is.
#[derive(Clone, Copy, Debug)]
enum ReaderOf {
    /// The role's: successors use it in place.
    Role,
    /// That of this process, if it lives and can be seen.
    Process(Option<u32>),
    /// A subscriber's: a cursor page, which begins there in the file. `None`: the publisher has no subscriber.
    Subscriber { cursor_at: Option<u64> },
}

impl Files {
    fn read(&self) -> std::io::Result<Reading> {
        match self.reader {
            ReaderOf::Subscriber { cursor_at } => page::read_broadcast(&self.producer, &self.consumer, cursor_at),
            ReaderOf::Role | ReaderOf::Process(_) => page::read(&self.producer, &self.consumer),
        }
    }
}

impl Lane {
    /// Reads its pages again: two system calls, of about a microsecond each.
    ///
    /// # Errors
    /// `InvalidData`: the pages say what cannot be.
    pub fn read(&self) -> std::io::Result<Reading> {
        self.files.read()
    }

    /// Its data, for reading by `pread`: the records from [`Reading::head`] to [`Reading::tail`], which the sender
    /// overwrites once the receiver has released them. `None`: no process keeps its descriptor.
    pub fn data(&self) -> Option<&Arc<File>> {
        self.files.data.as_ref()
    }

    /// A tap of its messages: it begins with the next one, or, `since_start`, with the oldest one that is not released.
    ///
    /// # Errors
    /// `NotFound`: no process keeps the descriptor of its data. `InvalidData`: the pages say what cannot be.
    pub fn tap(&self, since_start: bool) -> std::io::Result<Tap> {
        let none = || std::io::Error::new(ErrorKind::NotFound, "no process keeps the descriptor of its data");
        let Files { producer, consumer, data, reader } = &*self.files;
        let reader = match *reader {
            ReaderOf::Role => Reader::Role,
            ReaderOf::Process(pid) => Reader::of(pid),
            ReaderOf::Subscriber { .. } => {
                let why = "this is a broadcast: subscribe to it, as `pelton sub` does";
                return Err(std::io::Error::new(ErrorKind::Unsupported, why));
            }
        };
        Tap::new(producer.clone(), consumer.clone(), data.clone().ok_or_else(none)?, reader, since_start)
    }

    /// Identifies its files, of which a successor replaces some.
    ///
    /// # Errors
    /// Those of the system.
    pub fn file_ids(&self) -> std::io::Result<FileIds> {
        let Files { producer, consumer, data, reader } = &*self.files;
        let cursor_at = if let ReaderOf::Subscriber { cursor_at } = reader { *cursor_at } else { None };
        FileIds::of(producer, consumer, data.as_deref(), cursor_at)
    }

    /// Whether the sender waits for free space, or could not send its largest message. Of a publisher: because of this
    /// subscriber. It never waits for one that lags.
    pub fn is_full(&self) -> bool {
        let Reading { capacity, waiting_bytes, is_sender_waiting, policy, .. } = self.reading;
        let gates = policy.is_none_or(|policy| policy == Policy::Gate);
        is_sender_waiting || (gates && waiting_bytes > capacity / 16 * 15)
    }
}

impl Observer {
    /// An observer of this user's processes; as root, of all. Opens nothing yet.
    pub fn new() -> Observer {
        Observer::default()
    }

    /// Adds the directory of a path channel.
    pub fn add_directory(&mut self, directory: impl Into<PathBuf>) {
        self.directories.insert(directory.into());
    }

    /// Adds a directory. The observer searches it for path channels, and its subdirectories down to the eighth level.
    pub fn add_root(&mut self, root: impl Into<PathBuf>) {
        self.roots.insert(root.into());
    }

    /// Finds and reads all channels. Takes some milliseconds, most of them for /proc. Never fails: the result says what
    /// cannot be read.
    pub fn channels(&mut self) -> Found {
        let mut found = Found::default();
        let mounts = Mounts::read();
        self.memfds.find(&mounts, &mut found);
        let mut directories: BTreeMap<PathBuf, By> =
            self.directories.iter().map(|directory| (directory.clone(), By::Caller)).collect();
        for root in &self.roots {
            // An absolute path, so that a channel found twice is listed once.
            let root = fs::canonicalize(root).unwrap_or_else(|_| root.to_owned());
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            match rustix::fs::open(&root, flags, Mode::empty()) {
                Ok(opened) => {
                    add_channels_below(&root, &opened, 8, &mounts, &mut directories, &mut found.unreadable);
                }
                Err(error) => {
                    let (what, reason) = (root.display().to_string(), error.to_string());
                    found.unreadable.push(Unreadable { what, reason });
                }
            }
        }
        for directory in self.memfds.directories() {
            directories.entry(directory.clone()).or_insert(By::Process);
        }
        for (directory, by) in directories {
            let mut refuse = |reason| {
                found.unreadable.push(Unreadable { what: directory.display().to_string(), reason });
            };
            let files = match by {
                By::Caller => Unmapped::open(&directory),
                // Others chose it.
                By::Root | By::Process => match mounts.open(&directory) {
                    Ok(opened) => Unmapped::open_at(&directory, opened),
                    Err(reason) => {
                        reason.into_iter().for_each(refuse);
                        continue;
                    }
                },
            };
            match files.and_then(read_directory) {
                Ok(channels) => found.channels.extend(channels),
                // A name in /proc that is no channel's, or in another namespace of mounts.
                Err(_) if by == By::Process => {}
                Err(error) => refuse(reason(&directory, &error)),
            }
        }
        found.channels.sort_by(|one, other| {
            let key = |channel: &Channel| (channel.kind, channel.receiver.pid, channel.durable.clone());
            one.name.cmp(&other.name).then_with(|| key(one).cmp(&key(other)))
        });
        found.unreadable.sort();
        found.unreadable.dedup();
        found
    }
}

/// How a directory was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// The caller named it.
    Caller,
    /// Below a root.
    Root,
    /// A process has its files open.
    Process,
}

/// Adds the path channels below `directory`, which is open: the directories with the files `channel` and `receiver`, or
/// `publisher`.
fn add_channels_below(
    directory: &Path,
    opened: &OwnedFd,
    levels: u32,
    mounts: &Mounts,
    channels: &mut BTreeMap<PathBuf, By>,
    unreadable: &mut Vec<Unreadable>,
) {
    let has = |name| {
        let found = statat(opened, name, AtFlags::SYMLINK_NOFOLLOW);
        found.is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::RegularFile)
    };
    if has("channel") && (has("receiver") || has("publisher")) {
        channels.entry(directory.to_owned()).or_insert(By::Root);
        return;
    }
    if levels == 0 {
        return;
    }
    for (name, kind) in memfd::entries(opened) {
        if !matches!(kind, FileType::Directory | FileType::Unknown) {
            continue;
        }
        let path = directory.join(name);
        match mounts.open(&path) {
            Ok(opened) => add_channels_below(&path, &opened, levels - 1, mounts, channels, unreadable),
            Err(reason) => {
                unreadable.extend(reason.map(|reason| Unreadable { what: path.display().to_string(), reason }))
            }
        }
    }
}

/// Why a directory cannot be read, for an operator: the texts of the errors advise programs that open the channel.
fn reason(directory: &Path, error: &crate::Error) -> String {
    use crate::Error;
    match error {
        Error::NoChannel { .. } => "there is no such directory".to_owned(),
        // Anything else than a channel lacks both.
        Error::NotAChannel { .. } if !directory.join("channel").exists() && !directory.join("receiver").exists() => {
            "it is no channel: its files `channel` and `receiver` are missing".to_owned()
        }
        error => error.to_string(),
    }
}

/// The channel in a directory; of a broadcast, one for each subscription.
fn read_directory(directory: Unmapped) -> crate::Result<Vec<Channel>> {
    let (name, made) = (format!("path:{}", directory.path.display()), made(&directory.channel));
    let after_reboot = |advice: &str| {
        let note = format!("it was made before the last reboot: {advice}");
        (!directory.is_from_this_boot).then_some(note)
    };
    let read = match directory.sides {
        UnmappedSides::Channel { receiver, lanes } => read_lanes(receiver, lanes).map(|(receiver, lanes)| {
            let note = after_reboot("`pelton recover` checks it");
            vec![Channel { name, kind: Kind::Path, receiver, lanes, made, note, durable: None }]
        }),
        UnmappedSides::Broadcast { publisher, table } => read_subscriptions(publisher, table).map(|found| {
            let note = after_reboot("it can only be removed");
            let channel = |(durable, receiver, lane)| {
                let (name, note, lanes) = (name.clone(), note.clone(), vec![lane]);
                Channel { name, kind: Kind::Broadcast, receiver, lanes, made, note, durable }
            };
            found.into_iter().map(channel).collect()
        }),
    };
    read.map_err(crate::Error::system(format!("reading {}", directory.path.display())))
}

/// The receiver and the lanes of a path channel.
fn read_lanes(receiver: File, files: Vec<UnmappedLane>) -> std::io::Result<(Side, Vec<Lane>)> {
    let is_receiver_alive = lock::is_locked(receiver.as_fd()).unwrap_or(false);
    let mut receiver = Side::without_process(Activity::Absent, 0);
    let mut lanes = Vec::new();
    let mut generation = 0;
    for (number, lane) in (0..).zip(files) {
        let is_sender_alive = lock::is_locked(lane.producer.as_fd()).unwrap_or(false);
        let made = made(&lane.data);
        let files = Files {
            producer: lane.producer.into(),
            consumer: lane.consumer.into(),
            data: Some(lane.data.into()),
            reader: ReaderOf::Role,
        };
        let reading = files.read()?;
        if reading.receiver_generation > generation || number == 0 {
            generation = reading.receiver_generation;
            receiver = of_role(is_receiver_alive, generation, reading.is_receiver_closed, reading.receiver_pid);
        }
        let sender = of_role(is_sender_alive, reading.sender_generation, reading.is_sender_closed, reading.sender_pid);
        lanes.push(Lane { number, sender, reading, made, files: Arc::new(files) });
    }
    Ok((receiver, lanes))
}

/// The subscriptions of a broadcast in a directory: the name of a durable one, its subscriber, and its lane. Without
/// any, the publisher alone.
fn read_subscriptions(publisher: File, table: File) -> std::io::Result<Vec<(Option<String>, Side, Lane)>> {
    let is_publisher_alive = lock::is_locked(publisher.as_fd()).unwrap_or(false);
    let made = made(&publisher);
    let (producer, consumer) = (Arc::new(publisher), Arc::new(table));
    let lane = |cursor_at| {
        let reader = ReaderOf::Subscriber { cursor_at };
        let files = Files { producer: producer.clone(), consumer: consumer.clone(), data: None, reader };
        let reading = files.read()?;
        let (generation, is_closed, pid) = (reading.sender_generation, reading.is_sender_closed, reading.sender_pid);
        let sender = of_role(is_publisher_alive, generation, is_closed, pid);
        Ok::<_, std::io::Error>(Lane { number: 0, sender, reading, made, files: Arc::new(files) })
    };
    let mut found = Vec::new();
    for (slot, words) in (0..).zip(page::slots(&consumer)?) {
        let durable = words.durable().map(str::to_owned);
        if !words.is_counted && durable.is_none() {
            continue;
        }
        let is_alive = lock::is_byte_locked(consumer.as_fd(), slot).unwrap_or(false);
        // A process without a durable name that has died is no subscriber any more.
        if !is_alive && durable.is_none() {
            continue;
        }
        let lane = lane(Some((CursorTable::CURSORS_AT + slot as usize * CursorTable::CURSOR_BYTES) as u64))?;
        let receiver = match is_alive {
            true => of_role(true, 1, false, lane.reading.receiver_pid),
            false => Side::without_process(Activity::Absent, 0),
        };
        found.push((durable, receiver, lane));
    }
    if found.is_empty() {
        found.push((None, Side::without_process(Activity::Absent, 0), lane(None)?));
    }
    Ok(found)
}

/// The holder of a role of a path channel, which its lock proves.
fn of_role(is_alive: bool, generation: u64, is_closed: bool, pid: u32) -> Side {
    match (is_alive, generation, is_closed) {
        // The page may say the number of another namespace, or the process may not have stored it yet.
        (true, ..) => Process::of(pid).map_or(Side::without_process(Activity::Unknown, pid), |process| process.side()),
        (false, 0, _) => Side::without_process(Activity::Absent, 0),
        (false, _, true) => Side::without_process(Activity::Closed, pid),
        (false, _, false) => Side::without_process(Activity::Died, pid),
    }
}

/// When a file was made. Not by `Metadata::created`, which is not known in a static program with musl.
fn made(file: &File) -> Option<SystemTime> {
    let found = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BTIME).ok()?;
    let is_known = found.stx_mask & StatxFlags::BTIME.bits() != 0;
    let since = Duration::new(u64::try_from(found.stx_btime.tv_sec).ok()?, found.stx_btime.tv_nsec);
    SystemTime::UNIX_EPOCH.checked_add(since).filter(|_| is_known)
}

/// The time since `made`.
pub fn age(made: Option<SystemTime>) -> Option<Duration> {
    made.and_then(|made| made.elapsed().ok())
}
