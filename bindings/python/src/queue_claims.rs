//! The items of a `pelton.JoinableQueue` that a process has taken and not done.
//!
//! Each process that gets has a file of its own beside the queue's, with a copy of each such item, and a lock on a
//! description of its own: the kernel drops it when the process dies. Then another consumer takes the lock, and with it
//! the file: it adopts the items, gives them again, and marks them in that file as they are done.
//!
//! Invariants:
//! - An item is written here before it is released from the lane, so it is always in one of the two. A consumer that
//!   died in between has left it in both; the next one voids the copy before it takes the item from the lane.
//! - `claim`, `adopt` and `void` are called by the consumer of the lane; an item is done by one store of 4 bytes.

use pelton::{Error, Result};
use pelton_os::{Descriptor, write_at};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::thread::ThreadId;

/// Before each item: its state, its number in the lane, u32, and its bytes, u64.
const HEADER: u64 = 16;

/// The states of an item. The end of the file follows the last one.
const CLAIMED: u32 = 1;
const DONE: u32 = 2;

/// An item in a file.
#[derive(Clone, Copy)]
struct Entry {
    at: u64,
    bytes: u64,
    seq: u32,
    state: u32,
}

impl Entry {
    fn end(&self) -> u64 {
        self.at + HEADER + self.bytes
    }
}

/// A file of claims whose lock this process has.
struct Claimed {
    path: PathBuf,
    /// A forked child closes it: otherwise it would keep the lock.
    file: Descriptor,
    end: u64,
    /// Items that a process left which was killed, not given again yet.
    left: VecDeque<Entry>,
    /// Items that this process has been given, each with the thread, not done yet.
    given: VecDeque<(ThreadId, Entry)>,
}

/// The claims of this process.
pub struct Claims {
    queue: PathBuf,
    /// The own one first, once there is one.
    files: Vec<Claimed>,
    has_own: bool,
}

fn failed(what: &'static str) -> impl Fn(Errno) -> Error {
    move |errno| Error::System { what: format!("{what} of a queue"), error: errno.into() }
}

/// The files of claims of a queue.
pub fn files_of(queue: &Path) -> Vec<PathBuf> {
    let (Some(directory), Some(name)) = (queue.parent(), queue.file_name()) else { return Vec::new() };
    let prefix = format!("{}.", name.to_string_lossy());
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    paths.filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix))).collect()
}

const FLAGS: OFlags = OFlags::RDWR.union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK);

fn open(path: &Path) -> Option<Descriptor> {
    let file = Descriptor::opened(|| rustix::fs::open(path, FLAGS, Mode::empty())).ok()?.ok()?;
    let found = rustix::fs::fstat(&file).ok()?;
    let is_file = rustix::fs::FileType::from_raw_mode(found.st_mode).is_file();
    (is_file && found.st_uid == rustix::process::geteuid().as_raw()).then_some(file)
}

fn size(file: &Descriptor) -> u64 {
    rustix::fs::fstat(file).map_or(0, |found| found.st_size as u64)
}

/// Fills the buffer. Returns false at the end of the file.
fn read_at(file: &Descriptor, mut buffer: &mut [u8], mut at: u64) -> rustix::io::Result<bool> {
    while !buffer.is_empty() {
        match rustix::io::pread(file, &mut *buffer, at) {
            Ok(0) => return Ok(false),
            Ok(read) => {
                buffer = &mut buffer[read..];
                at += read as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(true)
}

/// The items of a file. The last one may be incomplete, and is not one then.
fn entries(file: &Descriptor) -> Vec<Entry> {
    let size = size(file);
    let (mut entries, mut at) = (Vec::new(), 0);
    loop {
        let mut header = [0; HEADER as usize];
        if read_at(file, &mut header, at) != Ok(true) {
            return entries;
        }
        let word = |at| u32::from_ne_bytes(std::array::from_fn(|byte| header[at + byte]));
        let (state, seq) = (word(0), word(4));
        let bytes = u64::from_ne_bytes(std::array::from_fn(|byte| header[8 + byte]));
        let entry = Entry { at, bytes, seq, state };
        if state == 0 || bytes > size || entry.end() > size {
            return entries;
        }
        at = entry.end();
        entries.push(entry);
    }
}

fn mark(file: &Descriptor, entry: &Entry) -> Result<()> {
    write_at(file.as_fd(), &DONE.to_ne_bytes(), entry.at).map_err(failed("marking an item as done"))
}

/// Whether some process has an item of the queue that is not done, or was killed with one.
pub fn is_any_left(queue: &Path) -> bool {
    let is_left =
        |path: PathBuf| open(&path).is_some_and(|file| entries(&file).iter().any(|entry| entry.state == CLAIMED));
    files_of(queue).into_iter().any(is_left)
}

/// Voids the copy of an item that is still in the lane: the consumer that wrote it died before the release.
pub fn void(queue: &Path, seq: u32) -> Result<()> {
    for file in files_of(queue).iter().filter_map(|path| open(path)) {
        for entry in entries(&file).iter().filter(|entry| entry.seq == seq && entry.state == CLAIMED) {
            mark(&file, entry)?;
        }
    }
    Ok(())
}

impl Claims {
    pub fn new(queue: PathBuf) -> Claims {
        Claims { queue, files: Vec::new(), has_own: false }
    }

    fn make_own(&mut self) -> Result<()> {
        for number in 0.. {
            let name = self.queue.file_name().unwrap_or_default().to_string_lossy();
            let path = self.queue.with_file_name(format!("{name}.{}.{number}", std::process::id()));
            let flags = FLAGS | OFlags::CREATE | OFlags::EXCL;
            let creating = failed("creating a file");
            let opened = Descriptor::opened(|| rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR));
            let file = match opened.map_err(|error| creating(Errno::from_io_error(&error).unwrap_or(Errno::IO)))? {
                Err(Errno::EXIST) => continue,
                opened => opened.map_err(&creating)?,
            };
            rustix::fs::flock(&file, FlockOperation::LockExclusive).map_err(failed("locking a file"))?;
            // Another consumer may have taken the new file for one that was left.
            if rustix::fs::fstat(&file).is_ok_and(|found| found.st_nlink > 0) {
                let own = Claimed { path, file, end: 0, left: VecDeque::new(), given: VecDeque::new() };
                self.files.insert(0, own);
                self.has_own = true;
                return Ok(());
            }
        }
        unreachable!("there are enough numbers")
    }

    /// Writes an item that this thread is about to take.
    pub fn claim(&mut self, seq: u32, message: &[u8]) -> Result<()> {
        if !self.has_own {
            self.make_own()?;
        }
        let own = &mut self.files[0];
        let entry = Entry { at: own.end, bytes: message.len() as u64, seq, state: CLAIMED };
        let mut header = [0; HEADER as usize];
        header[..4].copy_from_slice(&CLAIMED.to_ne_bytes());
        header[4..8].copy_from_slice(&seq.to_ne_bytes());
        header[8..].copy_from_slice(&entry.bytes.to_ne_bytes());
        // In this order: a header without its item is the end of the file.
        let written = write_at(own.file.as_fd(), message, entry.at + HEADER);
        written.and_then(|()| write_at(own.file.as_fd(), &header, entry.at)).map_err(failed("keeping an item"))?;
        own.end = entry.end();
        own.given.push_back((std::thread::current().id(), entry));
        Ok(())
    }

    /// Adopts the items of consumers that were killed. `interrupted` is the number of the item in the lane that one of
    /// them had begun to take.
    pub fn adopt(&mut self, interrupted: Option<u32>) -> Result<()> {
        for path in files_of(&self.queue) {
            if self.files.iter().any(|claimed| claimed.path == path) {
                continue;
            }
            let Some(file) = open(&path) else { continue };
            if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
                continue;
            }
            let found = entries(&file);
            let mut left = VecDeque::new();
            for entry in found.iter().filter(|entry| entry.state == CLAIMED) {
                match interrupted == Some(entry.seq) {
                    true => mark(&file, entry)?,
                    false => left.push_back(*entry),
                }
            }
            if left.is_empty() {
                let _ = fs::remove_file(&path);
                continue;
            }
            let end = found.last().map_or(0, Entry::end);
            self.files.push(Claimed { path, file, end, left, given: VecDeque::new() });
        }
        Ok(())
    }

    /// Gives an adopted item again: its message.
    pub fn give_again(&mut self) -> Result<Option<Vec<u8>>> {
        for claimed in &mut self.files {
            if let Some(entry) = claimed.left.front().copied() {
                let mut message = vec![0; entry.bytes as usize];
                read_at(&claimed.file, &mut message, entry.at + HEADER).map_err(failed("reading an item"))?;
                claimed.left.pop_front();
                claimed.given.push_back((std::thread::current().id(), entry));
                return Ok(Some(message));
            }
        }
        Ok(None)
    }

    /// Marks the oldest item of this thread as done; if it has none, the oldest of this process. Returns false if that
    /// has none.
    pub fn task_done(&mut self) -> Result<bool> {
        let thread = std::thread::current().id();
        let own = |claimed: &Claimed| claimed.given.iter().position(|(of, _)| *of == thread);
        let found = self.files.iter().enumerate().find_map(|(file, claimed)| Some((file, own(claimed)?)));
        let any = || self.files.iter().position(|claimed| !claimed.given.is_empty()).map(|file| (file, 0));
        let Some((at, index)) = found.or_else(any) else { return Ok(false) };
        let claimed = &mut self.files[at];
        mark(&claimed.file, &claimed.given[index].1)?;
        claimed.given.remove(index);
        if claimed.given.is_empty() && claimed.left.is_empty() {
            match at == 0 && self.has_own {
                true => {
                    rustix::fs::ftruncate(&claimed.file, 0).map_err(failed("clearing a file"))?;
                    claimed.end = 0;
                }
                false => {
                    let _ = fs::remove_file(&claimed.path);
                    self.files.remove(at);
                }
            }
        }
        Ok(true)
    }

    /// Ends the claims in order: what was given is done. What was adopted and not given again is left to others.
    pub fn end(&mut self) {
        for claimed in self.files.drain(..) {
            for (_, entry) in &claimed.given {
                let _ = mark(&claimed.file, entry);
            }
            if claimed.left.is_empty() {
                let _ = fs::remove_file(&claimed.path);
            }
        }
        self.has_own = false;
    }
}
