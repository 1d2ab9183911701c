//! The lanes in memfds: which processes have their descriptors, and what belongs together. The name of a memfd is a
//! hint of the process that made it; a page that is not what its name says is not listed as a channel.

use super::process::{self, Process};
use super::{Activity, Channel, Files, Found, Kind, Lane, ReaderOf, Side, Unreadable, made, page};
use pelton_lane::{MAGIC_CONSUMER, MAGIC_PRODUCER, MAGIC_RECEIVER};
use pelton_os::{Credentials, open_memfds, own_uid};
use rustix::fs::{Mode, OFlags, readlinkat};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CString, OsStr};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// How the links of pelton's memfds begin.
const MEMFD: &[u8] = b"/memfd:pelton-";
/// How long a file may take to open. A memfd opens in microseconds.
const TIMEOUT: Duration = Duration::from_millis(500);

/// What the name of a memfd says.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Label {
    Producer { data: u64 },
    Consumer { data: u64, receiver: u64 },
    Receiver { kind: Kind },
    Data { replaced: u64 },
}

impl Label {
    /// The label and the channel's name in a link of /proc/PID/fd.
    fn parse(link: &[u8]) -> Option<(Label, String)> {
        let text = link.strip_prefix(MEMFD)?;
        let text = String::from_utf8_lossy(text.strip_suffix(b" (deleted)").unwrap_or(text)).into_owned();
        let mut words = text.splitn(4, ' ');
        let role = words.next()?;
        let mut number = || words.next()?.parse().ok();
        let label = match role {
            "producer" => Label::Producer { data: number()? },
            "data" => Label::Data { replaced: number()? },
            "consumer" => Label::Consumer { data: number()?, receiver: number()? },
            "receiver" => Label::Receiver { kind: kind(words.next()?)? },
            _ => return None,
        };
        // The rest, which may have spaces.
        let before = if role == "consumer" { 3 } else { 2 };
        let name = text.splitn(before + 1, ' ').nth(before).unwrap_or_default().to_owned();
        Some((label, name))
    }

    fn magic(&self) -> Option<u64> {
        match self {
            Label::Producer { .. } => Some(MAGIC_PRODUCER),
            Label::Consumer { .. } => Some(MAGIC_CONSUMER),
            Label::Receiver { .. } => Some(MAGIC_RECEIVER),
            Label::Data { .. } => None,
        }
    }
}

fn kind(word: &str) -> Option<Kind> {
    [Kind::Connect, Kind::Gather, Kind::Service, Kind::Replies, Kind::Threads]
        .into_iter()
        .find(|kind| kind.word() == word)
}

/// A memfd that is open here.
#[derive(Debug)]
struct Memfd {
    label: Label,
    name: String,
    file: Arc<File>,
    made: Option<SystemTime>,
}

/// The memfds found so far, by inode.
#[derive(Debug, Default)]
pub(super) struct Memfds {
    open: BTreeMap<u64, Memfd>,
    /// Those that were refused, so that each is opened once.
    refused: BTreeMap<u64, String>,
    directories: BTreeSet<PathBuf>,
    /// What the last look found of the descriptors that count, by process and number.
    seen: BTreeMap<(u32, u32), Seen>,
    processes: BTreeMap<u32, Process>,
    looks: u32,
}

/// A descriptor: its link, and the inode behind it, if it is for writing.
#[derive(Debug)]
struct Seen {
    link: Vec<u8>,
    inode: Option<u64>,
}

/// After this number of looks, each descriptor is read anew, whatever its link: another file may have the same.
const LOOKS_MAX: u32 = 16;

/// A link of /proc/PID/fd that says that it is a memfd of pelton's.
struct Link {
    pid: u32,
    path: String,
    inode: u64,
    label: Label,
    name: String,
}

/// The processes that have memfds open.
#[derive(Default)]
struct Holders {
    processes: BTreeMap<u32, Process>,
    by_inode: BTreeMap<u64, BTreeSet<u32>>,
    /// Processes whose descriptors this one may not see.
    hidden: BTreeSet<u32>,
}

impl Memfds {
    /// The directories of path channels that processes have open.
    pub(super) fn directories(&self) -> impl Iterator<Item = &PathBuf> {
        self.directories.iter()
    }

    /// Adds the channels in memfds, and the listeners.
    pub(super) fn find(&mut self, found: &mut Found) {
        let (holders, links) = self.look();
        self.open_new(&holders, links, found);
        self.open.retain(|inode, _| holders.by_inode.contains_key(inode));
        self.refused.retain(|inode, _| holders.by_inode.contains_key(inode));
        self.add_channels(&holders, found);
        add_listeners(&holders, found);
    }

    /// Reads /proc. Opens no file of a process.
    fn look(&mut self) -> (Holders, Vec<Link>) {
        let mut holders = Holders::default();
        let mut links = Vec::new();
        self.directories.clear();
        self.looks += 1;
        if self.looks.is_multiple_of(LOOKS_MAX) {
            self.seen.clear();
            self.processes.clear();
        }
        let mut seen = BTreeMap::new();
        for pid in process::all() {
            let fds = match descriptors(pid) {
                Ok(fds) => fds,
                Err(error) => {
                    if matches!(error, Errno::ACCESS | Errno::PERM) {
                        holders.hidden.insert(pid);
                    }
                    continue;
                }
            };
            let mut uses_pelton = false;
            for (number, link) in fds {
                let before = self.seen.remove(&(pid, number)).filter(|before| before.link == link);
                let inode = before.map_or_else(|| inode(pid, number), |before| before.inode);
                if let (Some((label, name)), Some(inode)) = (Label::parse(&link), inode) {
                    holders.by_inode.entry(inode).or_default().insert(pid);
                    links.push(Link { pid, path: format!("/proc/{pid}/fd/{number}"), inode, label, name });
                    uses_pelton = true;
                } else if !link.starts_with(MEMFD) && inode.is_some() {
                    let directory = Path::new(OsStr::from_bytes(&link)).parent();
                    self.directories.extend(directory.map(Path::to_owned));
                }
                seen.insert((pid, number), Seen { link, inode });
            }
            if uses_pelton {
                let process = self.processes.remove(&pid).map_or_else(|| Process::of(pid), |before| before.again());
                holders.processes.extend(process.map(|process| (pid, process)));
            }
        }
        self.seen = seen;
        self.processes = holders.processes.clone();
        (holders, links)
    }

    fn open_new(&mut self, holders: &Holders, links: Vec<Link>, found: &mut Found) {
        let mut new: BTreeMap<Option<Credentials>, Vec<Link>> = BTreeMap::new();
        let mut seen = BTreeSet::new();
        for link in links {
            if let Some(reason) = self.refused.get(&link.inode) {
                found.unreadable.push(unreadable(&link, holders, reason.clone()));
            } else if !self.open.contains_key(&link.inode) && seen.insert(link.inode) {
                let process = holders.processes.get(&link.pid);
                // Only root may take the rights of others.
                let other = process.filter(|process| own_uid() == 0 && process.uid != 0);
                let credentials = other.map(|process| Credentials { uid: process.uid, gid: process.gid });
                new.entry(credentials).or_default().push(link);
            }
        }
        for (credentials, links) in new {
            let paths: Vec<CString> =
                links.iter().map(|link| CString::new(link.path.clone()).expect("digits and slashes")).collect();
            for (link, file) in links.into_iter().zip(open_memfds(&paths, credentials, TIMEOUT)) {
                let checked = file.and_then(|file| {
                    if let Some(magic) = link.label.magic() {
                        page::check(&file, magic).map_err(|error| format!("it {error}"))?;
                    }
                    Ok(file)
                });
                match checked {
                    Ok(file) => {
                        let made = made(&file);
                        let Link { inode, label, name, .. } = link;
                        self.open.insert(inode, Memfd { label, name, file: file.into(), made });
                    }
                    Err(reason) => {
                        found.unreadable.push(unreadable(&link, holders, reason.clone()));
                        self.refused.insert(link.inode, reason);
                    }
                }
            }
        }
    }

    /// The inode of a lane's first data, which all its pages and later data name, directly or by the data between.
    fn first_data(&self, mut inode: u64) -> u64 {
        // A loop of names ends too.
        for _ in 0..64 {
            match self.open.get(&inode) {
                Some(Memfd { label: Label::Data { replaced }, .. }) if *replaced != 0 => inode = *replaced,
                _ => break,
            }
        }
        inode
    }

    fn add_channels(&self, holders: &Holders, found: &mut Found) {
        #[derive(Default)]
        struct Parts<'a> {
            producer: Option<(u64, &'a Memfd)>,
            consumer: Option<(u64, &'a Memfd, u64)>,
            data: Option<&'a Memfd>,
        }
        let mut lanes: BTreeMap<u64, Parts<'_>> = BTreeMap::new();
        let mut channels: BTreeMap<u64, Channel> = BTreeMap::new();
        for (inode, memfd) in &self.open {
            // The page of a predecessor may be open a moment longer: the last one made counts.
            let is_later = |other: Option<&Memfd>| other.is_none_or(|other| other.made <= memfd.made);
            match memfd.label {
                Label::Producer { data } => {
                    let parts = lanes.entry(self.first_data(data)).or_default();
                    if is_later(parts.producer.map(|(_, memfd)| memfd)) {
                        parts.producer = Some((*inode, memfd));
                    }
                }
                Label::Consumer { data, receiver } => {
                    let parts = lanes.entry(self.first_data(data)).or_default();
                    if is_later(parts.consumer.map(|(_, memfd, _)| memfd)) {
                        parts.consumer = Some((*inode, memfd, receiver));
                    }
                }
                Label::Data { .. } => {
                    let parts = lanes.entry(self.first_data(*inode)).or_default();
                    if is_later(parts.data) {
                        parts.data = Some(memfd);
                    }
                }
                Label::Receiver { kind } => {
                    // Until a lane says more: a receiver without senders has its page alone.
                    let holder = holders.of(*inode).next().cloned();
                    let receiver = holder.map_or(Side::without_process(Activity::Died, 0), |process| process.side());
                    let name = memfd.name.clone();
                    let channel = Channel { name, kind, receiver, lanes: Vec::new(), made: memfd.made, note: None };
                    channels.insert(*inode, channel);
                }
            }
        }
        for parts in lanes.into_values() {
            let (Some((producer_inode, producer)), Some((consumer_inode, consumer, receiver))) =
                (parts.producer, parts.consumer)
            else {
                continue;
            };
            let reading = match page::read(&producer.file, &consumer.file) {
                Ok(reading) => reading,
                Err(error) => {
                    let what =
                        format!("a lane of {}", if producer.name.is_empty() { "threads" } else { &producer.name });
                    found.unreadable.push(Unreadable { what, reason: error.to_string() });
                    continue;
                }
            };
            let sender = holders.side([producer_inode, producer_inode], reading.sender_pid, reading.is_sender_closed);
            let reader = holders.side([receiver, consumer_inode], reading.receiver_pid, reading.is_receiver_closed);
            let lives = matches!(reader.activity, Activity::Alive | Activity::Stopped);
            let files = Files {
                producer: producer.file.clone(),
                consumer: consumer.file.clone(),
                data: parts.data.map(|data| data.file.clone()),
                reader: ReaderOf::Process(lives.then_some(reader.pid)),
            };
            let channel = channels.entry(receiver).or_insert_with(|| Channel {
                name: producer.name.clone(),
                kind: Kind::Connect,
                receiver: reader.clone(),
                lanes: Vec::new(),
                made: producer.made,
                note: None,
            });
            channel.receiver = reader;
            let number = channel.lanes.len() as u32;
            channel.lanes.push(Lane { number, sender, reading, made: producer.made, files: Arc::new(files) });
        }
        found.channels.extend(channels.into_values());
    }
}

impl Holders {
    fn of(&self, inode: u64) -> impl Iterator<Item = &Process> {
        let pids = self.by_inode.get(&inode).into_iter().flatten();
        pids.filter_map(|pid| self.processes.get(pid))
    }

    /// The process that a page names, among those that have one of these memfds open.
    fn side(&self, inodes: [u64; 2], pid: u32, is_closed: bool) -> Side {
        let holders = || inodes.iter().flat_map(|inode| self.of(*inode));
        let process = holders().find(|process| process.own_pid == pid);
        if is_closed {
            let command = process.map_or(String::new(), |process| process.command.clone());
            let pid = process.map_or(pid, |process| process.pid);
            return Side { command, ..Side::without_process(Activity::Closed, pid) };
        }
        if let Some(process) = process {
            return process.side();
        }
        // A process of another namespace may have that number there.
        let is_elsewhere = holders().any(|process| process.own_pid != process.pid);
        match Process::of(pid).filter(|_| self.hidden.contains(&pid)) {
            Some(process) => Side { activity: Activity::Unknown, ..process.side() },
            None if is_elsewhere => Side::without_process(Activity::Unknown, pid),
            None => Side::without_process(Activity::Died, pid),
        }
    }
}

fn unreadable(link: &Link, holders: &Holders, reason: String) -> Unreadable {
    let command = holders.processes.get(&link.pid).map_or("", |process| &process.command);
    Unreadable { what: format!("{} of {command}", link.path), reason }
}

/// The descriptors of a process whose links may be pelton's, by number.
fn descriptors(pid: u32) -> Result<Vec<(u32, Vec<u8>)>, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(format!("/proc/{pid}/fd"), flags, Mode::empty())?;
    let mut found = Vec::new();
    let mut buffer = Vec::new();
    for entry in rustix::fs::Dir::read_from(&directory)? {
        let entry = entry?;
        let Some(number) = entry.file_name().to_str().ok().and_then(|name| name.parse().ok()) else { continue };
        // It may have been closed meanwhile.
        let Ok(link) = readlinkat(&directory, entry.file_name(), std::mem::take(&mut buffer)) else { continue };
        let text = link.as_bytes();
        if text.starts_with(MEMFD) || text.ends_with(b"/receiver") || text.ends_with(b".producer") {
            found.push((number, text.to_owned()));
        }
        buffer = link.into_bytes();
    }
    Ok(found)
}

/// The number of the file behind a descriptor, without a request to its file system. `None` for a descriptor for
/// reading only, as observers have: a side's own are for writing too.
fn inode(pid: u32, fd: u32) -> Option<u64> {
    let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).ok()?;
    let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let flags = u32::from_str_radix(field("flags:")?, 8).ok()?;
    if flags & libc::O_ACCMODE as u32 == libc::O_RDONLY as u32 {
        return None;
    }
    field("ino:")?.parse().ok()
}

/// The directories of short names: of this user; as root, of all.
fn bases() -> Vec<PathBuf> {
    if own_uid() != 0 {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
        let temporary = std::env::temp_dir().join(format!("pelton-{}", own_uid()));
        return runtime.map(|path| path.join("pelton")).into_iter().chain([temporary]).collect();
    }
    let below = |directory: &Path| fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let runtimes = below(Path::new("/run/user")).chain(runtime).map(|path| path.join("pelton"));
    let temporary = std::env::temp_dir();
    let named = below(&temporary).filter(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.strip_prefix("pelton-").is_some_and(|uid| uid.parse::<u32>().is_ok())
    });
    let named: Vec<PathBuf> = named.collect();
    runtimes.chain(named).collect::<BTreeSet<_>>().into_iter().collect()
}

/// Adds the listeners that no channel shows yet: by the names of their sockets, which have the pid, and by the
/// kernel's list of sockets. Connects to none.
fn add_listeners(holders: &Holders, found: &mut Found) {
    let sockets = fs::read(Path::new("/proc/net/unix")).unwrap_or_default();
    let sockets = String::from_utf8_lossy(&sockets);
    // Flags 00010000: it accepts connections.
    let listening: BTreeSet<&str> = (sockets.lines())
        .filter(|line| line.split_whitespace().nth(3) == Some("00010000"))
        .filter_map(|line| line.find('/').map(|at| &line[at..]))
        .collect();
    for base in bases() {
        let names = match fs::read_dir(&base) {
            Ok(names) => names,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => {
                found.unreadable.push(Unreadable { what: base.display().to_string(), reason: error.to_string() });
                continue;
            }
        };
        for directory in names.flatten() {
            let name = directory.file_name().to_string_lossy().into_owned();
            for socket in fs::read_dir(directory.path()).into_iter().flatten().flatten() {
                let file = socket.file_name().to_string_lossy().into_owned();
                let Some(pid) = file.split_once('.').and_then(|(pid, _)| pid.parse::<u32>().ok()) else { continue };
                if !listening.contains(socket.path().to_string_lossy().as_ref()) {
                    continue;
                }
                let is_listed = found.channels.iter().filter(|channel| channel.name == name).any(|channel| {
                    channel.receiver.pid == pid || channel.lanes.iter().any(|lane| lane.sender.pid == pid)
                });
                if is_listed {
                    continue;
                }
                let mut receiver =
                    Process::of(pid).map_or(Side::without_process(Activity::Unknown, pid), |process| process.side());
                let is_hidden = holders.hidden.contains(&pid);
                if is_hidden {
                    receiver.activity = Activity::Unknown;
                    let what = format!("process {pid} ({}), which listens at {name}", receiver.command);
                    found.unreadable.push(Unreadable { what, reason: hidden_reason(pid) });
                }
                let made = socket.metadata().ok().and_then(|found| found.modified().ok());
                let (lanes, note) = (Vec::new(), is_hidden.then(|| hidden_reason(pid)));
                found.channels.push(Channel { name: name.clone(), kind: Kind::Listener, receiver, lanes, made, note });
            }
        }
    }
    // Peers of readable processes that are not readable themselves.
    let mut peers = BTreeSet::new();
    for channel in &found.channels {
        for side in channel.lanes.iter().map(|lane| &lane.sender).chain([&channel.receiver]) {
            if side.activity == Activity::Unknown && holders.hidden.contains(&side.pid) {
                peers
                    .insert((side.pid, format!("process {} ({}), a side of {}", side.pid, side.command, channel.name)));
            }
        }
    }
    found.unreadable.extend(peers.into_iter().map(|(pid, what)| Unreadable { what, reason: hidden_reason(pid) }));
}

/// Why this process may not see another one's descriptors.
fn hidden_reason(pid: u32) -> String {
    match Process::of(pid) {
        Some(process) if process.uid != own_uid() => {
            format!("it is of uid {}, this tool of uid {}: run it as that user or as root", process.uid, own_uid())
        }
        Some(_) => "it may not be traced (it changed its user, or is not dumpable): run the tool as root".to_owned(),
        None => "it has ended".to_owned(),
    }
}
