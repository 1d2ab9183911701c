//! The items of a `pelton.JoinableQueue` that a process has taken and not done.
//!
//! Each process that gets has files of its own beside the queue's, with a copy of each such item, and a lock on a
//! description of its own: the kernel drops it when the process dies. Then another consumer takes the lock for a
//! moment, and one of the items: it writes a copy into its own file, and marks that item in the other file as done.
//!
//! Invariants:
//! - An item is written here before it is released from the lane, so it is always in one of the two. A consumer that
//!   died in between has left it in both; the next one voids the copy before it takes the item from the lane.
//! - A consumer that died while it adopted an item may have left it in two files: it is given twice then.
//! - `claim`, `adopt` and `void` are called by the consumer of the lane; an item is done by one store of 4 bytes.
//!
//! The edge `[done]` of `queue_edges.rs` orders a mark, and `join`.

use crate::queue_edges::{after_marks, before_mark};
use pelton::{Error, Result};
use pelton_os::{Descriptor, write_at};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::thread::ThreadId;

/// A process whose file has so many bytes begins another one, so that one old item does not keep all later ones.
const FILE_BYTES: u64 = 1 << 20;

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

/// An item that this process has been given, and not done yet.
struct Given {
    /// Counts the items of this process.
    order: u64,
    thread: ThreadId,
    entry: Entry,
}

/// A file of this process, which has its lock.
struct Own {
    path: PathBuf,
    /// A forked child closes it: otherwise it would keep the lock.
    file: Descriptor,
    end: u64,
    given: VecDeque<Given>,
}

/// The claims of this process.
pub struct Claims {
    queue: PathBuf,
    /// The last one is written.
    files: Vec<Own>,
    count: u64,
    has_ended: bool,
}

fn failed(path: &Path) -> impl Fn(Errno) -> Error {
    move |errno| match errno {
        Errno::NOSPC | Errno::DQUOT => {
            Error::NoSpace { path: path.display().to_string(), bytes: HEADER, error: errno.into() }
        }
        errno => {
            Error::System { what: format!("keeping the items of a process in {}", path.display()), error: errno.into() }
        }
    }
}

fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// The files of claims of a queue.
pub fn files_of(queue: &Path) -> Result<Vec<PathBuf>> {
    let (Some(directory), Some(name)) = (queue.parent(), queue.file_name()) else { return Ok(Vec::new()) };
    let prefix = format!("{}.", name.to_string_lossy());
    let mut files = Vec::new();
    let failed = |error: std::io::Error| failed(directory)(errno_of(&error));
    for entry in fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix)) {
            files.push(path);
        }
    }
    Ok(files)
}

const FLAGS: OFlags = OFlags::RDWR.union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK);

/// Opens a file of claims. `None`: it has been removed, or is no file of this user.
fn open(path: &Path) -> Result<Option<Descriptor>> {
    let opened = Descriptor::opened(|| rustix::fs::open(path, FLAGS, Mode::empty()));
    let file = match opened.map_err(|error| failed(path)(errno_of(&error)))? {
        Err(Errno::NOENT | Errno::LOOP | Errno::ACCESS | Errno::NXIO | Errno::ISDIR) => return Ok(None),
        opened => opened.map_err(failed(path))?,
    };
    let found = rustix::fs::fstat(&file).map_err(failed(path))?;
    let is_file = rustix::fs::FileType::from_raw_mode(found.st_mode).is_file();
    Ok((is_file && found.st_uid == rustix::process::geteuid().as_raw()).then_some(file))
}

fn is_linked(file: &Descriptor) -> bool {
    rustix::fs::fstat(file).is_ok_and(|found| found.st_nlink > 0)
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
fn entries(file: &Descriptor) -> rustix::io::Result<Vec<Entry>> {
    let size = size(file);
    let (mut entries, mut at) = (Vec::new(), 0);
    loop {
        let mut header = [0; HEADER as usize];
        if !read_at(file, &mut header, at)? {
            return Ok(entries);
        }
        let word = |at| u32::from_ne_bytes(std::array::from_fn(|byte| header[at + byte]));
        let (state, seq) = (word(0), word(4));
        let bytes = u64::from_ne_bytes(std::array::from_fn(|byte| header[8 + byte]));
        let entry = Entry { at, bytes, seq, state };
        if state == 0 || bytes > size || entry.end() > size {
            return Ok(entries);
        }
        at = entry.end();
        entries.push(entry);
    }
}

fn mark(file: &Descriptor, path: &Path, entry: &Entry) -> Result<()> {
    before_mark(); // [done]
    write_at(file.as_fd(), &DONE.to_ne_bytes(), entry.at).map_err(failed(path))
}

/// Whether some process has an item of the queue that is not done, or was killed with one.
pub fn is_any_left(queue: &Path) -> Result<bool> {
    for path in files_of(queue)? {
        if let Some(file) = open(&path)?
            && entries(&file).map_err(failed(&path))?.iter().any(|entry| entry.state == CLAIMED)
        {
            return Ok(true);
        }
    }
    after_marks(); // [done]
    Ok(false)
}

/// Voids the copy of an item that is still in the lane: the consumer that wrote it died before the release.
pub fn void(queue: &Path, seq: u32) -> Result<()> {
    for path in files_of(queue)? {
        let Some(file) = open(&path)? else { continue };
        for entry in entries(&file).map_err(failed(&path))? {
            if entry.seq == seq && entry.state == CLAIMED {
                mark(&file, &path, &entry)?;
            }
        }
    }
    Ok(())
}

impl Claims {
    pub fn new(queue: PathBuf) -> Claims {
        Claims { queue, files: Vec::new(), count: 0, has_ended: false }
    }

    fn make_own(&mut self) -> Result<()> {
        for number in 0.. {
            let name = self.queue.file_name().unwrap_or_default().to_string_lossy();
            let path = self.queue.with_file_name(format!("{name}.{}.{number}", std::process::id()));
            let flags = FLAGS | OFlags::CREATE | OFlags::EXCL;
            let opened = Descriptor::opened(|| rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR));
            let file = match opened.map_err(|error| failed(&path)(errno_of(&error)))? {
                Err(Errno::EXIST) => continue,
                opened => opened.map_err(failed(&path))?,
            };
            let locked = rustix::io::retry_on_intr(|| rustix::fs::flock(&file, FlockOperation::LockExclusive));
            locked.map_err(failed(&path))?;
            // Another consumer may have taken the new file for one that was left.
            if is_linked(&file) {
                self.files.push(Own { path, file, end: 0, given: VecDeque::new() });
                return Ok(());
            }
        }
        unreachable!("there are enough numbers")
    }

    /// Writes an item that this thread is about to take. Returns its number, for `done`; `None` after `end`.
    pub fn claim(&mut self, seq: u32, message: &[u8]) -> Result<Option<u64>> {
        if self.has_ended {
            return Ok(None);
        }
        if self.files.last().is_none_or(|own| own.end >= FILE_BYTES) {
            self.make_own()?;
        }
        let own = self.files.last_mut().expect("one was made");
        let entry = Entry { at: own.end, bytes: message.len() as u64, seq, state: CLAIMED };
        let mut header = [0; HEADER as usize];
        header[..4].copy_from_slice(&CLAIMED.to_ne_bytes());
        header[4..8].copy_from_slice(&seq.to_ne_bytes());
        header[8..].copy_from_slice(&entry.bytes.to_ne_bytes());
        // In this order: a header without its item is the end of the file.
        let written = write_at(own.file.as_fd(), message, entry.at + HEADER);
        written.and_then(|()| write_at(own.file.as_fd(), &header, entry.at)).map_err(|errno| {
            // What was written of it must not follow a later item as another one.
            let _ = rustix::fs::ftruncate(&own.file, own.end);
            failed(&own.path)(errno)
        })?;
        own.end = entry.end();
        self.count += 1;
        own.given.push_back(Given { order: self.count, thread: std::thread::current().id(), entry });
        Ok(Some(self.count))
    }

    /// Claims an item of a consumer that was killed: returns what `copy` makes of it, and its number. `interrupted` is
    /// the number of the item in the lane that one of them had begun to take.
    pub fn adopt<T>(
        &mut self,
        interrupted: Option<u32>,
        copy: impl Fn(&[u8]) -> Result<T>,
    ) -> Result<Option<(T, u64)>> {
        for path in files_of(&self.queue)? {
            if self.files.iter().any(|own| own.path == path) {
                continue;
            }
            let Some(file) = open(&path)? else { continue };
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK) => continue,
                locked => locked.map_err(failed(&path))?,
            }
            // Another consumer may have emptied and removed it meanwhile.
            if !is_linked(&file) {
                continue;
            }
            let mut left = entries(&file).map_err(failed(&path))?;
            left.retain(|entry| entry.state == CLAIMED);
            if let Some(index) = left.iter().position(|entry| interrupted == Some(entry.seq)) {
                mark(&file, &path, &left.remove(index))?;
            }
            let mut adopted = None;
            if let Some(entry) = left.first() {
                let mut message = vec![0; entry.bytes as usize];
                read_at(&file, &mut message, entry.at + HEADER).map_err(failed(&path))?;
                // In this order: without memory for it, or after `end`, the item is left to others.
                let copied = copy(&message)?;
                let Some(number) = self.claim(entry.seq, &message)? else { return Ok(None) };
                mark(&file, &path, entry)?;
                adopted = Some((copied, number));
            }
            if left.len() <= 1 {
                let _ = fs::remove_file(&path);
            }
            if adopted.is_some() {
                return Ok(adopted);
            }
        }
        Ok(None)
    }

    /// Marks the oldest item of this thread as done; if it has none, the oldest of this process. Returns false if that
    /// has none.
    pub fn task_done(&mut self) -> Result<bool> {
        let thread = std::thread::current().id();
        let given = || self.files.iter().flat_map(|own| &own.given);
        let oldest = given().filter(|given| given.thread == thread).map(|given| given.order).min();
        match oldest.or_else(|| given().map(|given| given.order).min()) {
            Some(number) => self.done(number).map(|()| true),
            None => Ok(false),
        }
    }

    /// Marks the item of this number as done.
    pub fn done(&mut self, number: u64) -> Result<()> {
        let last = self.files.len().saturating_sub(1);
        for (at, own) in self.files.iter_mut().enumerate() {
            let Some(index) = own.given.iter().position(|given| given.order == number) else { continue };
            mark(&own.file, &own.path, &own.given[index].entry)?;
            own.given.remove(index);
            if own.given.is_empty() && at == last {
                rustix::fs::ftruncate(&own.file, 0).map_err(failed(&own.path))?;
                own.end = 0;
            } else if own.given.is_empty() {
                let _ = fs::remove_file(&own.path);
                self.files.remove(at);
            }
            break;
        }
        Ok(())
    }

    /// Ends the claims in order: what was given is done. Nothing is claimed any more.
    pub fn end(&mut self) {
        self.has_ended = true;
        for own in self.files.drain(..) {
            for given in &own.given {
                let _ = mark(&own.file, &own.path, &given.entry);
            }
            let _ = fs::remove_file(&own.path);
        }
    }
}
