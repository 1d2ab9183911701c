//! The lanes in memfds: which processes have their descriptors, and what belongs together. The name of a memfd is a
//! hint of the process that made it; a page that is not what its name says is not listed as a channel.

use super::mounts::Mounts;
use super::process::{self, Process};
use super::{Activity, Channel, Files, Found, Kind, Lane, ReaderOf, Side, Unreadable, made, page};
use pelton_lane::{
    MAGIC_BROADCAST, MAGIC_CONSUMER, MAGIC_CURSOR, MAGIC_PRODUCER, MAGIC_RECEIVER, Preamble, broadcast_preamble,
};
use pelton_os::{Credentials, NotOpened, open_memfds, own_uid};
use rustix::fs::{
    AtFlags, FileType, MemfdFlags, Mode, OFlags, ResolveFlags, memfd_create, openat, openat2, readlinkat, statat,
};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CString, OsStr, OsString};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// How the links of pelton's memfds begin.
const MEMFD: &[u8] = b"/memfd:pelton-";
/// How long a file may take to open. A memfd opens in microseconds.
const TIMEOUT: Duration = Duration::from_millis(500);
/// How long the files of one user may take to open, in one search.
const USER_TIME_MAX: Duration = Duration::from_secs(1);
/// How long all files may take to open, in one search.
const TIME_MAX: Duration = Duration::from_secs(5);
/// The most files of one user that are open here. Root keeps them of all users: one of them must not use up the
/// descriptors that the others' need.
const USER_FILES_MAX: usize = 4096;

/// What the name of a memfd says.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Label {
    Producer { data: u64 },
    Consumer { data: u64, receiver: u64 },
    Receiver { kind: Kind },
    Data { replaced: u64 },
    Broadcast { data: u64 },
    Cursor { data: u64 },
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
            "broadcast" => Label::Broadcast { data: number()? },
            "cursor" => Label::Cursor { data: number()? },
            "consumer" => Label::Consumer { data: number()?, receiver: number()? },
            "receiver" => Label::Receiver { kind: kind(words.next()?)? },
            _ => return None,
        };
        // The rest, which may have spaces.
        let before = if role == "consumer" { 3 } else { 2 };
        let name = text.splitn(before + 1, ' ').nth(before).unwrap_or_default().to_owned();
        Some((label, name))
    }

    fn preamble(&self) -> Option<Preamble> {
        match self {
            Label::Producer { .. } => Some(Preamble::new(MAGIC_PRODUCER)),
            Label::Consumer { .. } => Some(Preamble::new(MAGIC_CONSUMER)),
            Label::Receiver { .. } => Some(Preamble::new(MAGIC_RECEIVER)),
            Label::Broadcast { .. } => Some(broadcast_preamble(MAGIC_BROADCAST)),
            Label::Cursor { .. } => Some(broadcast_preamble(MAGIC_CURSOR)),
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
    /// Whose it is: the user of the process that made it.
    owner: u32,
    /// With whose rights it was opened.
    uid: u32,
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

/// A descriptor: its link, and what is behind it, if it is for writing.
#[derive(Debug)]
struct Seen {
    link: Vec<u8>,
    file: Option<Behind>,
}

/// What the kernel says of the file behind a descriptor.
#[derive(Clone, Copy, Debug)]
struct Behind {
    /// All memfds are of one mount, which no user can make.
    mount: Option<u64>,
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

impl Link {
    /// With whose rights to open it; `None`: with the own ones. Only root may take those of others. They are read
    /// anew: the process may have changed its user, or be another one.
    fn credentials(&self, holders: &Holders) -> Result<Option<Credentials>, String> {
        if own_uid() != 0 {
            return Ok(None);
        }
        let process = Process::of(self.pid)
            .filter(|now| holders.processes.get(&self.pid).is_some_and(|before| before.is_same(now)));
        let Process { uid, gid, .. } = process.ok_or("its process has ended")?;
        Ok((uid != 0).then_some(Credentials { uid, gid }))
    }

    /// The file, if it is the one that was found, and begins as its name says.
    fn checked(&self, file: File) -> Result<File, NotOpened> {
        let failed = |error: std::io::Error| NotOpened {
            reason: format!("it {error}"),
            is_of_file: error.kind() == ErrorKind::InvalidData || error.kind() == ErrorKind::UnexpectedEof,
        };
        if file.metadata().map_err(failed)?.ino() != self.inode {
            let reason = "its process has opened another file meanwhile".to_owned();
            return Err(NotOpened { reason, is_of_file: false });
        }
        if let Some(preamble) = self.label.preamble() {
            page::check(&file, preamble).map_err(failed)?;
        }
        Ok(file)
    }
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
    pub(super) fn find(&mut self, mounts: &Mounts, found: &mut Found) {
        let (holders, links) = self.look(found);
        self.open.retain(|inode, _| holders.by_inode.contains_key(inode));
        self.open_new(&holders, links, found);
        self.refused.retain(|inode, _| holders.by_inode.contains_key(inode));
        self.add_channels(&holders, found);
        self.add_broadcasts(&holders, found);
        add_listeners(&holders, mounts, found);
    }

    /// Reads /proc. Opens no file of a process.
    fn look(&mut self, found: &mut Found) -> (Holders, Vec<Link>) {
        let mut holders = Holders::default();
        let mut links = Vec::new();
        self.directories.clear();
        self.looks += 1;
        if self.looks.is_multiple_of(LOOKS_MAX) {
            self.seen.clear();
            self.processes.clear();
            // They may have been in the making.
            self.refused.clear();
        }
        let memfds = mount_of_memfds();
        if let Err(reason) = &memfds {
            found.unreadable.push(Unreadable { what: "all lanes in memfds".to_owned(), reason: reason.clone() });
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
                let file = before.map_or_else(|| behind(pid, number), |before| before.file);
                let path = || format!("/proc/{pid}/fd/{number}");
                match (Label::parse(&link), file, &memfds) {
                    (Some(_), Some(Behind { mount, .. }), Ok(memfds)) if mount != Some(*memfds) => {
                        let reason = "it is on another file system than memfds".to_owned();
                        found.unreadable.push(Unreadable { what: path(), reason });
                    }
                    (Some((label, name)), Some(Behind { inode: Some(inode), .. }), Ok(_)) => {
                        holders.by_inode.entry(inode).or_default().insert(pid);
                        links.push(Link { pid, path: path(), inode, label, name });
                        uses_pelton = true;
                    }
                    (_, Some(_), _) if !link.starts_with(MEMFD) => {
                        let directory = Path::new(OsStr::from_bytes(&link)).parent();
                        self.directories.extend(directory.map(Path::to_owned));
                    }
                    _ => {}
                }
                seen.insert((pid, number), Seen { link, file });
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
        let deadline = Instant::now() + TIME_MAX;
        let mut opened: BTreeMap<u32, usize> = BTreeMap::new();
        self.open.values().for_each(|memfd| *opened.entry(memfd.uid).or_default() += 1);
        let mut tries: BTreeMap<u64, Vec<Link>> = BTreeMap::new();
        for link in links {
            if let Some(reason) = self.refused.get(&link.inode) {
                found.unreadable.push(unreadable(&link, holders, reason.clone()));
            } else if !self.open.contains_key(&link.inode) {
                let links = tries.entry(link.inode).or_default();
                if links.iter().all(|before| before.pid != link.pid) {
                    links.push(link);
                }
            }
        }
        while !tries.is_empty() {
            // By the user with whose rights to open it.
            let mut users: BTreeMap<Option<Credentials>, Vec<Link>> = BTreeMap::new();
            tries.retain(|_, links| {
                let link = links.pop().expect("one more");
                match link.credentials(holders) {
                    Ok(credentials) => users.entry(credentials).or_default().push(link),
                    Err(reason) if links.is_empty() => found.unreadable.push(unreadable(&link, holders, reason)),
                    Err(_) => {}
                }
                !links.is_empty()
            });
            // A user with many files delays no other.
            let mut users: Vec<_> = users.into_iter().collect();
            users.sort_by_key(|(_, links)| links.len());
            for (credentials, mut links) in users {
                let uid = credentials.map_or(own_uid(), |user| user.uid);
                let opened = opened.entry(uid).or_default();
                let left_out = links.split_off(links.len().min(USER_FILES_MAX.saturating_sub(*opened)));
                *opened += links.len();
                if let Some(link) = left_out.first() {
                    let reason = format!(
                        "and {} more of this user were left out: the most is {USER_FILES_MAX}",
                        left_out.len() - 1
                    );
                    found.unreadable.push(unreadable(link, holders, reason));
                }
                let deadline = deadline.min(Instant::now() + USER_TIME_MAX);
                let paths: Vec<CString> =
                    links.iter().map(|link| CString::new(link.path.clone()).expect("digits and slashes")).collect();
                for (link, file) in links.into_iter().zip(open_memfds(&paths, credentials, TIMEOUT, deadline)) {
                    match file.and_then(|file| link.checked(file)) {
                        Ok(file) => {
                            let (made, owner) = (made(&file), file.metadata().map_or(u32::MAX, |found| found.uid()));
                            let Link { inode, label, name, .. } = link;
                            tries.remove(&inode);
                            self.open.insert(inode, Memfd { label, name, file: file.into(), made, owner, uid });
                        }
                        Err(NotOpened { reason, is_of_file: true }) => {
                            tries.remove(&link.inode);
                            found.unreadable.push(unreadable(&link, holders, reason.clone()));
                            self.refused.insert(link.inode, reason);
                        }
                        // Otherwise another process that has it comes next.
                        // Not if its process has closed it, or has ended, meanwhile.
                        Err(NotOpened { reason, .. })
                            if !tries.contains_key(&link.inode) && std::fs::symlink_metadata(&link.path).is_ok() =>
                        {
                            found.unreadable.push(unreadable(&link, holders, reason));
                        }
                        Err(_) => {}
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

    /// Joins the pages that belong together. Their names say which, but any user may choose a name: pages and data
    /// are joined only if one process has all of them open for writing, as a sender has.
    fn add_channels(&self, holders: &Holders, found: &mut Found) {
        let mut channels: BTreeMap<u64, Channel> = BTreeMap::new();
        // By the inode of the first data, and the process.
        let mut parts: BTreeMap<(u64, u32), Parts<'_>> = BTreeMap::new();
        for (inode, memfd) in &self.open {
            let data = match memfd.label {
                Label::Producer { data } | Label::Consumer { data, .. } => self.first_data(data),
                Label::Data { .. } => self.first_data(*inode),
                Label::Broadcast { .. } | Label::Cursor { .. } => continue,
                Label::Receiver { kind } => {
                    // Until a lane says more: a receiver without senders has its page alone.
                    let holder = holders.of(*inode).next().cloned();
                    let receiver = holder.map_or(Side::without_process(Activity::Died, 0), |process| process.side());
                    let name = memfd.name.clone();
                    let (lanes, made) = (Vec::new(), memfd.made);
                    let channel = Channel { name, kind, receiver, lanes, made, note: None, durable: None };
                    channels.insert(*inode, channel);
                    continue;
                }
            };
            for pid in holders.by_inode.get(inode).into_iter().flatten() {
                parts.entry((data, *pid)).or_default().add(*inode, memfd);
            }
        }
        for lane in lanes(&self.open, parts, holders) {
            let (producer, consumer) = (lane.producer, lane.consumer);
            let reading = match page::read(&producer.file, &consumer.file) {
                Ok(reading) => reading,
                Err(error) => {
                    let what =
                        format!("a lane of {}", if producer.name.is_empty() { "threads" } else { &producer.name });
                    found.unreadable.push(Unreadable { what, reason: error.to_string() });
                    continue;
                }
            };
            let [of_producer, of_consumer] = lane.inodes;
            let sender =
                holders.side([of_producer, of_producer], reading.sender_pid, reading.is_sender_closed, producer.made);
            let reader = holders.side(
                [lane.receiver, of_consumer],
                reading.receiver_pid,
                reading.is_receiver_closed,
                producer.made,
            );
            let lives = matches!(reader.activity, Activity::Alive | Activity::Stopped);
            let files = Files {
                producer: producer.file.clone(),
                consumer: consumer.file.clone(),
                data: lane.data.map(|data| data.file.clone()),
                reader: ReaderOf::Process(lives.then_some(reader.pid)),
            };
            let channel = channels.entry(lane.receiver).or_insert_with(|| Channel {
                name: producer.name.clone(),
                kind: Kind::Connect,
                receiver: reader.clone(),
                lanes: Vec::new(),
                made: producer.made,
                note: None,
                durable: None,
            });
            channel.receiver = reader;
            let number = channel.lanes.len() as u32;
            channel.lanes.push(Lane { number, sender, reading, made: producer.made, files: Arc::new(files) });
        }
        found.channels.extend(channels.into_values());
    }

    /// Adds a channel for each subscriber of a broadcast: the publisher has its page, and those of all cursors, open.
    fn add_broadcasts(&self, holders: &Holders, found: &mut Found) {
        let publishers = self.open.iter().filter_map(|(inode, memfd)| match memfd.label {
            Label::Broadcast { data } => Some((data, (*inode, memfd))),
            _ => None,
        });
        let publishers: BTreeMap<u64, (u64, &Memfd)> = publishers.collect();
        for (of_cursor, cursor) in &self.open {
            let Label::Cursor { data } = cursor.label else { continue };
            let Some((of_publisher, publisher)) = publishers.get(&data) else { continue };
            let pids = |inode| holders.by_inode.get(inode).into_iter().flatten();
            // Any user may choose a name: a process must have both.
            if !pids(of_cursor).any(|pid| pids(of_publisher).any(|other| other == pid)) {
                continue;
            }
            let files = Files {
                producer: publisher.file.clone(),
                consumer: cursor.file.clone(),
                data: None,
                reader: ReaderOf::Subscriber { cursor_at: Some(0) },
            };
            let reading = match files.read() {
                Ok(reading) => reading,
                Err(error) => {
                    let what = format!("a subscriber of {}", publisher.name);
                    found.unreadable.push(Unreadable { what, reason: error.to_string() });
                    continue;
                }
            };
            let side = |inode: u64, pid, is_closed, made| holders.side([inode, inode], pid, is_closed, made);
            let sender = side(*of_publisher, reading.sender_pid, reading.is_sender_closed, publisher.made);
            let receiver = side(*of_cursor, reading.receiver_pid, reading.is_receiver_closed, cursor.made);
            let lane = Lane { number: 0, sender, reading, made: cursor.made, files: Arc::new(files) };
            found.channels.push(Channel {
                name: publisher.name.clone(),
                kind: Kind::Broadcast,
                receiver,
                lanes: vec![lane],
                made: cursor.made,
                note: None,
                durable: None,
            });
        }
    }
}

/// What one process has of a lane. The page of a predecessor may be open a moment longer: the last one made counts.
#[derive(Default)]
struct Parts<'a> {
    producer: Option<(u64, &'a Memfd)>,
    consumer: Option<(u64, &'a Memfd)>,
    data: Option<(u64, &'a Memfd)>,
}

impl<'a> Parts<'a> {
    fn add(&mut self, inode: u64, memfd: &'a Memfd) {
        let part = match memfd.label {
            Label::Producer { .. } => &mut self.producer,
            Label::Consumer { .. } => &mut self.consumer,
            Label::Data { .. } => &mut self.data,
            Label::Receiver { .. } | Label::Broadcast { .. } | Label::Cursor { .. } => return,
        };
        if part.is_none_or(|(_, other)| other.made <= memfd.made) {
            *part = Some((inode, memfd));
        }
    }
}

/// The memfds of a lane.
struct Joined<'a> {
    /// Those of the producer and the consumer page.
    inodes: [u64; 2],
    producer: &'a Memfd,
    consumer: &'a Memfd,
    data: Option<&'a Memfd>,
    /// The inode of the receiver's page; if no holder of the lane has that one, the inode of the producer page.
    receiver: u64,
}

/// The lanes of which a process has both pages. Two processes with a page in common have the same lane: the last one
/// made counts. A receiver makes the consumer page of each of its lanes: no sender of another user adds a lane to it.
fn lanes<'a>(
    open: &BTreeMap<u64, Memfd>,
    parts: BTreeMap<(u64, u32), Parts<'a>>,
    holders: &Holders,
) -> Vec<Joined<'a>> {
    let is_held = |inode: u64, pid: u32| holders.by_inode.get(&inode).is_some_and(|pids| pids.contains(&pid));
    let owner = |inode: u64| open.get(&inode).map(|page| page.owner);
    let mut lanes = Vec::new();
    for ((_, pid), Parts { producer, consumer, data }) in parts {
        let (Some((of_producer, producer)), Some((of_consumer, consumer))) = (producer, consumer) else { continue };
        let Label::Consumer { receiver, .. } = consumer.label else { continue };
        let is_joined = is_held(receiver, pid) && owner(receiver) == Some(consumer.owner);
        let receiver = if is_joined { receiver } else { of_producer };
        let data = data.map(|(_, data)| data);
        let lane = Joined { inodes: [of_producer, of_consumer], producer, consumer, data, receiver };
        lanes.push(((producer.made, consumer.made, is_joined, data.is_some()), lane));
    }
    lanes.sort_by(|(one, _), (other, _)| other.cmp(one));
    let mut used = BTreeSet::new();
    lanes.retain(|(_, lane)| {
        let is_new = lane.inodes.iter().all(|inode| !used.contains(inode));
        used.extend(lane.inodes);
        is_new
    });
    // In the order of their pages: an order that stays.
    lanes.sort_by_key(|(_, lane)| lane.inodes);
    lanes.into_iter().map(|(_, lane)| lane).collect()
}

impl Holders {
    fn of(&self, inode: u64) -> impl Iterator<Item = &Process> {
        let pids = self.by_inode.get(&inode).into_iter().flatten();
        pids.filter_map(|pid| self.processes.get(pid))
    }

    /// The process that a page names, among those that have one of these memfds open. A service keeps no descriptor of
    /// the lanes of its replies: it is the process of that number if that is older than the lane, made at `made`.
    fn side(&self, inodes: [u64; 2], pid: u32, is_closed: bool, made: Option<SystemTime>) -> Side {
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
        match Process::of(pid) {
            Some(process) if self.hidden.contains(&pid) => Side { activity: Activity::Unknown, ..process.side() },
            _ if is_elsewhere => Side::without_process(Activity::Unknown, pid),
            Some(process) if made.is_some_and(|made| process.is_older_than(made)) => {
                let is_same_user = holders().any(|holder| holder.uid == process.uid);
                let activity = if is_same_user { process.side().activity } else { Activity::Unknown };
                Side { activity, ..process.side() }
            }
            _ => Side::without_process(Activity::Died, pid),
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
        let of_directories: [&[u8]; 4] = [b"/receiver", b".producer", b"/publisher", b"/cursors"];
        if text.starts_with(MEMFD) || of_directories.iter().any(|name| text.ends_with(name)) {
            found.push((number, text.to_owned()));
        }
        buffer = link.into_bytes();
    }
    Ok(found)
}

/// The file behind a descriptor, without a request to its file system. `None` for a descriptor for reading only, as
/// observers have: a side's own are for writing too.
fn behind(pid: u32, fd: u32) -> Option<Behind> {
    let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).ok()?;
    let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let flags = u32::from_str_radix(field("flags:")?, 8).ok()?;
    if flags & libc::O_ACCMODE as u32 == libc::O_RDONLY as u32 {
        return None;
    }
    let number = |name| field(name)?.parse().ok();
    Some(Behind { mount: number("mnt_id:"), inode: number("ino:") })
}

/// The mount of all memfds: that of an own one.
fn mount_of_memfds() -> Result<u64, String> {
    let failed = |error: Errno| format!("making a memfd to compare them with: {error}");
    let own = memfd_create("pelton", MemfdFlags::CLOEXEC).map_err(failed)?;
    let fd = u32::try_from(own.as_raw_fd()).expect("it is open");
    match behind(std::process::id(), fd) {
        Some(Behind { mount: Some(mount), inode: Some(_) }) => Ok(mount),
        _ => Err("/proc/PID/fdinfo has no inodes, which Linux 5.14 and later reports".to_owned()),
    }
}

/// The directories of short names: of this user; as root, of all, with the user whose it must be.
fn bases() -> Vec<(PathBuf, Option<u32>)> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
    let own = runtime.map(|path| (path.join("pelton"), None));
    let temporary = std::env::temp_dir();
    if own_uid() != 0 {
        return own.into_iter().chain([(temporary.join(format!("pelton-{}", own_uid())), None)]).collect();
    }
    let below = |directory: &Path, before: &str, after: &str| -> Vec<(PathBuf, Option<u32>)> {
        let names = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.file_name());
        let of_user = |name: OsString| {
            let uid = name.to_str()?.strip_prefix(before)?.parse().ok()?;
            Some((directory.join(name).join(after), Some(uid)))
        };
        names.filter_map(of_user).collect()
    };
    let all =
        below(Path::new("/run/user"), "", "pelton").into_iter().chain(below(&temporary, "pelton-", "")).chain(own);
    let mut bases = BTreeMap::new();
    for (path, owner) in all {
        // The same directory once: the one with a user.
        bases.entry(path).or_insert(owner);
    }
    bases.into_iter().collect()
}

/// Opens a directory of short names. `None`: there is none.
fn open_base(base: &Path, owner: Option<u32>, mounts: &Mounts) -> Option<Result<OwnedFd, String>> {
    let Some(owner) = owner else {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        return match rustix::fs::open(base, flags, Mode::empty()) {
            Err(Errno::NOENT) => None,
            opened => Some(opened.map_err(|error| error.to_string())),
        };
    };
    let opened = match mounts.open(base) {
        Err(reason) => return reason.map(Err),
        Ok(opened) => opened,
    };
    let found = rustix::fs::fstat(&opened).ok()?;
    Some(match found.st_uid == owner {
        true => Ok(opened),
        false => Err(format!("it is not a directory of uid {owner}")),
    })
}

/// The names in a directory, with their kinds; as far as they can be read.
pub(super) fn entries(directory: &OwnedFd) -> Vec<(OsString, FileType)> {
    let entries = rustix::fs::Dir::read_from(directory).into_iter().flatten().flatten();
    let name = |entry: &rustix::fs::DirEntry| OsString::from_vec(entry.file_name().to_bytes().to_vec());
    entries.map(|entry| (name(&entry), entry.file_type())).filter(|(name, _)| name != "." && name != "..").collect()
}

/// Adds the listeners that no channel shows yet: by the names of their sockets, which have the pid, and by the
/// kernel's list of sockets. Connects to none.
fn add_listeners(holders: &Holders, mounts: &Mounts, found: &mut Found) {
    let sockets = fs::read(Path::new("/proc/net/unix")).unwrap_or_default();
    let sockets = String::from_utf8_lossy(&sockets);
    // Flags 00010000: it accepts connections.
    let listening: BTreeSet<&str> = (sockets.lines())
        .filter(|line| line.split_whitespace().nth(3) == Some("00010000"))
        .filter_map(|line| line.find('/').map(|at| &line[at..]))
        .collect();
    for (base, owner) in bases() {
        let opened = match open_base(&base, owner, mounts) {
            None => continue,
            Some(Ok(opened)) => opened,
            Some(Err(reason)) => {
                found.unreadable.push(Unreadable { what: base.display().to_string(), reason });
                continue;
            }
        };
        for (name, kind) in entries(&opened) {
            // No symbolic link.
            if kind != FileType::Directory {
                continue;
            }
            let path = base.join(&name);
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            // Not a mount of another file system either.
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
            let directory = match owner {
                Some(_) => openat2(&opened, &name, flags, Mode::empty(), resolve),
                None => openat(&opened, &name, flags | OFlags::NOFOLLOW, Mode::empty()),
            };
            let directory = match directory {
                Ok(directory) => directory,
                Err(Errno::NOENT) => continue,
                Err(error) => {
                    let reason = error.to_string();
                    found.unreadable.push(Unreadable { what: path.display().to_string(), reason });
                    continue;
                }
            };
            let name = name.to_string_lossy().into_owned();
            for (socket, _) in entries(&directory) {
                let file = socket.to_string_lossy().into_owned();
                let Some(pid) = file.split_once('.').and_then(|(pid, _)| pid.parse::<u32>().ok()) else { continue };
                if !listening.contains(path.join(&socket).to_string_lossy().as_ref()) {
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
                let made = statat(&directory, &socket, AtFlags::SYMLINK_NOFOLLOW).ok().and_then(|found| {
                    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(u64::try_from(found.st_mtime).ok()?))
                });
                let (lanes, note) = (Vec::new(), is_hidden.then(|| hidden_reason(pid)));
                let (name, kind) = (name.clone(), Kind::Listener);
                found.channels.push(Channel { name, kind, receiver, lanes, made, note, durable: None });
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
