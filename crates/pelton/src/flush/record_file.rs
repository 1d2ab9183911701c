//! A file that takes runs of records, and gives them back: the sink, its rotation, and what it finds when it is opened again. The
//! bytes are in `spec/record-file.md`.
//!
//! - **A file is made aside**, as FILE.pelton-next, whole, locked, and then renamed: what stands at FILE has a header, and an owner if
//!   anybody has.
//! - **A write is at an offset of the sink's own.** What a failed one left is cut off, or written over; the file never ends
//!   behind what the sink counts as written but for a moment.
//! - **Bytes that somebody else may change are looked at once.** The records of another user's process are copied first: their
//!   checksum is of what is in the file.

mod format;
mod reader;
#[cfg(test)]
mod tests;

pub use reader::{Chunk, Record, RecordReader, Records};

use crate::error::{Error, Result, failure};
use crate::flush::{LaneId, Run, Sink};
use crate::os::lock::{self, Lock};
use crate::os::{Descriptor, Owner, Syncer, check_file_size, own_uid, sync};
use format::{
    CHUNK_BYTES_MAX, ChunkHeader, Chunks, FileHeader, HEADER, KIND_LAST, KIND_RUN, LAST_ENTRIES_MAX, LAST_ENTRY,
    u32_at, u64_at,
};
use pelton_lane::step;
use rustix::fs::{CWD, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::hash::{BuildHasher as _, Hasher as _};
use std::io::IoSlice;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// Of what lies so near the end of a file the checksums are looked at when it is opened: more than a kernel that was not told to
/// sync may have had in work when a machine failed is not covered, `pelton cat --verify` looks at all.
const VERIFIED: u64 = 4 << 20;
/// How many lanes are remembered over a rotation, the last that were written: four times as many as a receiver has. A lane's
/// number matters only until its records are released, which is before anything more of it is written.
const LANES_REMEMBERED: usize = LAST_ENTRIES_MAX / 2;
/// The most pieces that the system takes with one call.
const IOV_MAX: usize = 1024;
/// How often a file is looked for that others are making, or rotating, at the same time.
const TRIES: usize = 100;

/// How a [`RecordFile`] is written.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// # let directory = tempfile::tempdir().unwrap();
/// # let path = directory.path().join("log");
/// use pelton::RecordFileOptions;
/// let file = RecordFileOptions::new().rotate_bytes(1 << 30).sync_bytes(16 << 20).open(&path)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct RecordFileOptions {
    rotate_bytes: Option<u64>,
    sync_bytes: Option<u64>,
    sync_interval: Option<Duration>,
}

impl RecordFileOptions {
    /// One file, which grows, and is left to the system to bring to the disk.
    pub fn new() -> RecordFileOptions {
        RecordFileOptions::default()
    }

    /// A write that would make the file larger than this begins a new one: FILE is renamed to FILE.000001 (FILE.000002, and so on),
    /// and FILE is empty again. One write is never divided, so one that is larger has a file of its own.
    #[must_use]
    pub fn rotate_bytes(mut self, bytes: u64) -> RecordFileOptions {
        self.rotate_bytes = Some(bytes);
        self
    }

    /// Have what is written on the disk (fdatasync) each time so many bytes more have been. The next writes do not wait for it,
    /// where the system has io_uring. 0: before each write returns.
    #[must_use]
    pub fn sync_bytes(mut self, bytes: u64) -> RecordFileOptions {
        self.sync_bytes = Some(bytes);
        self
    }

    /// Have what is written on the disk so long after it was written. It is looked at with each write, also of nothing,
    /// which a flush makes in time.
    #[must_use]
    pub fn sync_interval(mut self, interval: Duration) -> RecordFileOptions {
        self.sync_interval = Some(interval);
        self
    }

    /// Opens, or begins, a file to write to. Does not wait for another writer.
    ///
    /// A new file has mode 0640, less the umask, as is usual for logs; a file that follows another in a rotation has the mode of that.
    /// Of a file that is there the headers of all chunks are read, and the checksums of the last 4 MiB. What is torn at its end, as a
    /// killed writer leaves it, is cut off: [`RecordFile::cut_bytes`].
    ///
    /// # Errors
    /// - [`Error::RoleTaken`]: another handle writes to it, of this process or another.
    /// - [`Error::Damaged`]: something in the middle is broken, with whole chunks after it; nothing has been changed. Move the file away.
    /// - [`Error::NotARecordFile`]: it is something else, or of a later version; [`Error::Option`]; [`Error::NoSpace`];
    ///   [`Error::System`].
    pub fn open(&self, path: impl AsRef<Path>) -> Result<RecordFile> {
        if self.rotate_bytes == Some(0) {
            let wanted = "at least 1, or not to be said".to_owned();
            return Err(Error::Option { option: "rotate_bytes", found: 0, wanted });
        }
        RecordFile::with(path.as_ref(), self.clone())
    }
}

/// A sink that is a file: the runs as they are, each with a header. [`RecordReader`] reads it, and `pelton cat`.
///
/// A run is *safe* when the system has it: whatever becomes of this process, it will be in the file. It is on the disk, and
/// outlives the machine's failure, by [`Sink::sync`] or as [`RecordFileOptions::sync_bytes`] says. After a failed write nothing of
/// it counts as written, and the file is cut back to where it was.
///
/// What has been written is to be released before more of the same lane is: [`Sink::last_seq`] has one number for each of the lanes
/// that were written last, 4,096 of them over rotations.
///
/// Threads: a handle may go from one to another. In a forked child it does nothing.
#[derive(Debug)]
pub struct RecordFile {
    /// Absolute, for rotations.
    path: PathBuf,
    options: RecordFileOptions,
    owner: Owner,
    uid: u32,
    file: Lock,
    header: FileHeader,
    /// Where the next chunk goes.
    end: u64,
    /// Where the first one that has records went, or will go.
    begin: u64,
    /// Whether something may stand behind the end.
    is_torn: bool,
    cut_bytes: u64,
    last: HashMap<LaneId, Last>,
    /// Counts what was written, for `Last`.
    turn: u64,
    syncer: Syncer,
    /// Where the last sync that was begun has seen the file's end.
    synced: u64,
    /// Since when there has been something beyond that.
    unsynced_since: Option<Instant>,
    /// Of a sync that could not be begun: told by the next call.
    sync_failed: Option<Errno>,
    /// For the records of other users.
    copies: Vec<u8>,
}

/// What is known of a lane.
#[derive(Clone, Copy, Debug)]
struct Last {
    seq: u32,
    turn: u64,
}

impl RecordFile {
    /// Opens, or begins, a file to write to, with the usual options: see [`RecordFileOptions::open`].
    ///
    /// # Errors
    /// As of [`RecordFileOptions::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<RecordFile> {
        RecordFileOptions::new().open(path)
    }

    /// How many bytes were cut off when it was opened: a write that was not finished.
    pub fn cut_bytes(&self) -> u64 {
        self.cut_bytes
    }

    /// Where it is: absolute, and without symbolic links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn with(path: &Path, options: RecordFileOptions) -> Result<RecordFile> {
        let owner = Owner::current().map_err(Error::system("asking which process this is"))?;
        let path = absolute(path)?;
        let file = find_or_make(&path, options.syncs())?;
        let mut opened = RecordFile {
            header: FileHeader { created: 0, number: 0, id: 0 },
            path,
            options,
            owner,
            uid: own_uid(),
            file,
            end: HEADER,
            begin: HEADER,
            is_torn: false,
            cut_bytes: 0,
            last: HashMap::new(),
            turn: 0,
            syncer: Syncer::new(),
            synced: 0,
            unsynced_since: None,
            sync_failed: None,
            copies: Vec::new(),
        };
        opened.survey()?;
        // What an earlier life wrote may not be on the disk.
        opened.unsynced_since = (opened.options.syncs() && opened.end > opened.begin).then(Instant::now);
        Ok(opened)
    }

    /// Finds out what is in the file, and cuts what is torn at its end.
    fn survey(&mut self) -> Result<()> {
        let mut chunks = Chunks::of(self.file.as_fd(), &self.path)?;
        self.header = chunks.header;
        let end = self.stat()?.st_size as u64;
        while self.end < end {
            let fd = self.file.as_fd();
            let found = match chunks.chunk(fd, self.end, end, false)? {
                Ok(header) if self.end + header.all_bytes() + VERIFIED > end || header.kind == KIND_LAST => {
                    chunks.chunk(fd, self.end, end, true)?
                }
                found => found,
            };
            let header = match found {
                Ok(header) => header,
                Err(broken) => match chunks.damage(fd, self.end, end, broken)? {
                    (None, _) => break,
                    (Some(_), damaged) => return Err(damaged),
                },
            };
            match header.kind {
                KIND_RUN => self.note(header.lane, header.last_seq()),
                KIND_LAST => {
                    let entries = chunks.bytes(fd, self.end + HEADER, header.bytes)?.to_vec();
                    for entry in entries.chunks_exact(LAST_ENTRY) {
                        let lane = LaneId([u64_at(entry, 0), u64_at(entry, 8)]);
                        // Of the files before: what this one has is later, wherever the chunk stands.
                        if !self.last.contains_key(&lane) {
                            self.note(lane, u32_at(entry, 16));
                        }
                    }
                    self.begin = self.end + header.all_bytes();
                }
                _ => {}
            }
            self.end += header.all_bytes();
        }
        self.cut_bytes = end - self.end;
        self.cut()
    }

    fn stat(&self) -> Result<rustix::fs::Stat> {
        rustix::fs::fstat(&self.file).map_err(failed("reading", &self.path, 0))
    }

    /// Cuts off what stands behind the end.
    fn cut(&mut self) -> Result<()> {
        self.is_torn = true;
        if self.stat()?.st_size as u64 > self.end {
            rustix::io::retry_on_intr(|| rustix::fs::ftruncate(&self.file, self.end)).map_err(failed(
                "cutting off what was not written wholly of",
                &self.path,
                0,
            ))?;
            step("record file: cut");
        }
        self.is_torn = false;
        Ok(())
    }

    /// The last number of a lane is this one now.
    fn note(&mut self, lane: LaneId, seq: u32) {
        self.turn += 1;
        self.last.insert(lane, Last { seq, turn: self.turn });
        if self.last.len() == LAST_ENTRIES_MAX {
            self.forget_the_oldest();
        }
    }

    fn forget_the_oldest(&mut self) {
        let mut turns: Vec<u64> = self.last.values().map(|last| last.turn).collect();
        turns.sort_unstable();
        let first = turns[turns.len().saturating_sub(LANES_REMEMBERED)..].first().copied().unwrap_or(0);
        self.last.retain(|_, last| last.turn >= first);
    }

    /// Begins a new file. Whatever step is the last that is done, the next opening finds a whole file at FILE, or none there and a
    /// whole one aside.
    fn rotate(&mut self) -> Result<()> {
        if self.options.syncs() {
            self.sync_all()?;
        }
        let number = free_number(&self.path)?.max(self.header.number);
        let (rotated, aside) = (numbered(&self.path, number), aside(&self.path));
        let next = lock_at(&aside, true)?.ok_or_else(|| nothing_at(&aside))?;
        self.forget_the_oldest();
        let header = FileHeader::new(number + 1);
        let end = begin_file(&next, &aside, &header, &self.last_numbers())?;
        let mode = Mode::from_raw_mode(self.stat()?.st_mode & 0o777);
        rustix::fs::fchmod(&next, mode).map_err(failed("setting the mode of", &aside, 0))?;
        step("record file: made aside");
        if self.options.syncs() {
            sync(&next).map_err(failed("syncing", &aside, 0))?;
        }
        rename(&self.path, &rotated).map_err(failed("renaming", &self.path, 0))?;
        step("record file: renamed away");
        if let Err(error) = rename(&aside, &self.path) {
            // As it was. If that cannot be done either, each further write says so; everything written is in the renamed file.
            let _ = rename(&rotated, &self.path);
            return Err(failed("renaming", &aside, 0)(error));
        }
        step("record file: renamed into place");
        (self.file, self.header, self.end, self.begin) = (next, header, end, end);
        (self.is_torn, self.synced, self.unsynced_since) = (false, 0, None);
        if self.options.syncs() {
            sync_directory(&self.path)?;
        }
        Ok(())
    }

    /// The lanes whose records are in earlier files, by when they were written.
    fn last_numbers(&self) -> Vec<u8> {
        let mut lanes: Vec<(&LaneId, &Last)> = self.last.iter().collect();
        lanes.sort_unstable_by_key(|(_, last)| last.turn);
        let mut bytes = Vec::with_capacity(lanes.len() * LAST_ENTRY);
        for (lane, last) in lanes {
            bytes.extend(lane.0[0].to_le_bytes());
            bytes.extend(lane.0[1].to_le_bytes());
            bytes.extend(u64::from(last.seq).to_le_bytes());
        }
        bytes
    }

    /// Writes chunks at the end; on failure whatever got there is behind the end still.
    fn write_chunks(&mut self, runs: &[Run<'_>]) -> rustix::io::Result<()> {
        let written = now();
        // Copied before a header is made of any, so that nothing of it moves.
        self.copies.clear();
        let strange = || runs.iter().filter(|run| is_strange(run, self.uid));
        let bytes = strange().map(|run| run.bytes().len()).sum();
        self.copies.try_reserve(bytes).map_err(|_| Errno::NOMEM)?;
        strange().for_each(|run| self.copies.extend_from_slice(run.bytes()));
        let mut copies = &self.copies[..];
        let bytes_of: Vec<&[u8]> = (runs.iter())
            .map(|run| match is_strange(run, self.uid) {
                true => copies.split_off(..run.bytes().len()).expect("it was copied"),
                false => run.bytes(),
            })
            .collect();
        let headers: Vec<[u8; HEADER as usize]> = (runs.iter().zip(&bytes_of))
            .map(|(run, bytes)| {
                let header = ChunkHeader {
                    kind: KIND_RUN,
                    bytes: bytes.len() as u64,
                    lane: run.lane(),
                    first_seq: run.first_seq(),
                    messages: run.messages(),
                    peer: run.peer(),
                    written,
                    checksum: crc32fast::hash(bytes),
                };
                header.bytes(&self.header)
            })
            .collect();
        let pieces =
            headers.iter().zip(&bytes_of).flat_map(|(header, bytes)| [IoSlice::new(header), IoSlice::new(bytes)]);
        let mut pieces: Vec<IoSlice<'_>> = pieces.collect();
        write_all_at(self.file.as_fd(), &mut pieces, self.end)
    }

    /// Tells once what became of a sync that was begun, if it failed and that is known.
    fn tell_of_sync(&mut self) -> Result<()> {
        let ended = if self.syncer.is_busy() { self.syncer.ended(&self.file) } else { None };
        let failed_before = self.sync_failed.take().map(Err);
        ended.or(failed_before).unwrap_or(Ok(())).map_err(failed(UNSYNCED, &self.path, 0))
    }

    /// Begins a sync if it is time for one and none is under way.
    fn sync_if_due(&mut self) {
        let Some(since) = self.unsynced_since else { return };
        let many = self.options.sync_bytes.is_some_and(|bytes| self.end - self.synced >= bytes);
        let late = self.options.sync_interval.is_some_and(|interval| since.elapsed() >= interval);
        if (many || late) && !self.syncer.is_busy() {
            (self.synced, self.unsynced_since) = (self.end, None);
            self.sync_failed = self.syncer.start(&self.file).err();
        }
    }

    /// Waits until all is on the disk.
    fn sync_all(&mut self) -> Result<()> {
        self.tell_of_sync()?;
        let ended = self.syncer.wait(&self.file);
        ended.and_then(|()| sync(&self.file)).map_err(failed(UNSYNCED, &self.path, 0))?;
        (self.synced, self.unsynced_since) = (self.end, None);
        Ok(())
    }

    fn write_runs(&mut self, runs: &[Run<'_>]) -> Result<()> {
        let bytes: u64 = runs.iter().map(|run| HEADER + run.bytes().len() as u64).sum();
        if let Some(run) = runs.iter().find(|run| run.bytes().len() as u64 > CHUNK_BYTES_MAX) {
            return Err(Error::TooLarge { bytes: run.bytes().len() as u64, bytes_max: CHUNK_BYTES_MAX });
        }
        if self.end > self.begin && self.options.rotate_bytes.is_some_and(|most| self.end + bytes > most) {
            self.rotate()?;
        }
        if self.is_torn {
            self.cut()?;
        }
        self.is_torn = true;
        let syncs = self.options.sync_bytes == Some(0);
        let mut done = check_file_size(self.end + bytes).and_then(|()| self.write_chunks(runs));
        if syncs {
            done = done.and_then(|()| sync(&self.file));
        }
        if let Err(error) = done {
            // What cannot be cut off now is cut off before the next write.
            let _ = self.cut();
            return Err(failed("writing to", &self.path, bytes)(error));
        }
        step("record file: written");
        self.is_torn = false;
        self.end += bytes;
        for run in runs {
            self.note(run.lane(), format::last_seq(run.first_seq(), run.messages()));
        }
        if syncs {
            self.synced = self.end;
        } else if self.options.syncs() {
            self.unsynced_since.get_or_insert_with(Instant::now);
        }
        Ok(())
    }

    fn check_owner(&self) -> Result<()> {
        if self.owner.is_current() { Ok(()) } else { Err(Error::Forked) }
    }
}

/// What is said of a sync that failed, of writes that have returned long since.
const UNSYNCED: &str = "what was written before may not be on the disk: syncing";

impl Sink for RecordFile {
    /// Writes all of `runs`, or nothing that counts. Waits for the system to take it.
    ///
    /// # Errors
    /// [`Error::NoSpace`], or [`Error::System`] with what the system said (a disk's error, a limit to the size of files): try again, or
    /// give up; the file is as it was. [`Error::System`] also of an earlier sync that has failed since, once; nothing of
    /// `runs` is written then. [`Error::Forked`].
    fn write(&mut self, runs: &[Run<'_>]) -> Result<()> {
        self.check_owner()?;
        self.tell_of_sync()?;
        if !runs.is_empty() {
            self.write_runs(runs)?;
        }
        self.sync_if_due();
        Ok(())
    }

    /// Waits until everything written is on the disk.
    ///
    /// # Errors
    /// [`Error::System`]: it may not be there, now or from an earlier sync; do not rely on a second try. [`Error::Forked`].
    fn sync(&mut self) -> Result<()> {
        self.check_owner()?;
        self.sync_all()
    }

    /// When the next sync is due, by [`RecordFileOptions::sync_interval`].
    fn due(&self) -> Option<Instant> {
        Some(self.unsynced_since? + self.options.sync_interval?)
    }

    fn last_seq(&self, lane: LaneId) -> Option<u32> {
        self.last.get(&lane).map(|last| last.seq)
    }
}

impl RecordFileOptions {
    fn syncs(&self) -> bool {
        self.sync_bytes.is_some() || self.sync_interval.is_some()
    }
}

impl FileHeader {
    /// Of a file that is begun now.
    fn new(number: u64) -> FileHeader {
        let id = std::hash::RandomState::new().build_hasher().finish();
        FileHeader { created: now(), number, id }
    }
}

/// Nanoseconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// Whether whoever sent it may be somebody who would change it afterwards: who runs as this user could do worse.
fn is_strange(run: &Run<'_>, uid: u32) -> bool {
    run.peer().is_some_and(|peer| peer.uid != uid)
}

fn failed(what: &str, path: &Path, bytes: u64) -> impl FnOnce(Errno) -> Error + use<> {
    let (what, path) = (format!("{what} {}", path.display()), path.display().to_string());
    move |errno| failure(what, path, bytes, errno)
}

/// Without symbolic links, so that a rotation renames the file and not a link to it, and good in any working directory.
fn absolute(path: &Path) -> Result<PathBuf> {
    match std::fs::canonicalize(path) {
        Ok(path) => Ok(path),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            std::path::absolute(path).map_err(Error::system(format!("finding {}", path.display())))
        }
        Err(error) => Err(Error::system(format!("finding {}", path.display()))(error)),
    }
}

/// The name with something at its end.
fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    PathBuf::from(name)
}

fn aside(path: &Path) -> PathBuf {
    beside(path, ".pelton-next")
}

fn numbered(path: &Path, number: u64) -> PathBuf {
    beside(path, &format!(".{number:06}"))
}

/// One more than the highest number that a file of the rotation has.
fn free_number(path: &Path) -> Result<u64> {
    use std::os::unix::ffi::OsStrExt as _;
    let directory = path.parent().unwrap_or(path);
    let what = || format!("reading the directory {}", directory.display());
    let mut highest = 0;
    for entry in std::fs::read_dir(directory).map_err(Error::system(what()))? {
        let name = entry.map_err(Error::system(what()))?.file_name();
        let ours = path.file_name().and_then(|ours| name.as_bytes().strip_prefix(ours.as_bytes()));
        let digits = ours.and_then(|rest| rest.strip_prefix(b".")).filter(|digits| digits.len() >= 6);
        let number = digits.and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
        // Nothing of ours has so many before it that it could not be counted.
        highest = number.filter(|number| *number < u64::from(u32::MAX)).map_or(highest, |number| highest.max(number));
    }
    Ok(highest + 1)
}

/// Never over anything.
fn rename(from: &Path, to: &Path) -> rustix::io::Result<()> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // A file system that cannot: nobody else gives files such names.
        Err(Errno::INVAL | Errno::NOSYS) if std::fs::symlink_metadata(to).is_err() => rustix::fs::rename(from, to),
        done => done,
    }
}

/// Opens what is at a path, for its only writer. `None`: nothing is there.
fn lock_at(path: &Path, create: bool) -> Result<Option<Lock>> {
    let opening = || failed("opening", path, 0);
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY | if create { OFlags::CREATE } else { OFlags::empty() };
    for _ in 0..TRIES {
        let opened = Descriptor::opened(|| rustix::fs::open(path, flags, Mode::from_raw_mode(0o640)));
        let file = match opened.map_err(Error::system(format!("opening {}", path.display())))? {
            Err(Errno::NOENT) if !create => return Ok(None),
            file => file.map_err(opening())?,
        };
        let found = rustix::fs::fstat(&file).map_err(opening())?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            let problem = "it is not a regular file".to_owned();
            return Err(Error::NotARecordFile { path: path.display().to_string(), problem });
        }
        let locked = lock::try_lock(file).map_err(Error::system(format!("locking {}", path.display())))?;
        let Some(lock) = locked else {
            let path = path.display().to_string();
            return Err(Error::RoleTaken { role: "writer".to_owned(), path, pid: 0 });
        };
        // Its owner may have renamed, or removed, it before the lock was had.
        match rustix::fs::stat(path) {
            Ok(there) if (there.st_dev, there.st_ino) == (found.st_dev, found.st_ino) => return Ok(Some(lock)),
            _ => {}
        }
    }
    Err(nothing_at(path))
}

fn nothing_at(path: &Path) -> Error {
    let problem = format!("it was another file at each of {TRIES} looks: let one process at a time write to it");
    Error::NotARecordFile { path: path.display().to_string(), problem }
}

/// The file at a path, for its only writer. Where there is none it is begun, or what a killed rotation left aside is put there.
fn find_or_make(path: &Path, syncs: bool) -> Result<Lock> {
    let aside = aside(path);
    for _ in 0..TRIES {
        if let Some(file) = lock_at(path, false)? {
            // Who has this lock is the only one to make anything aside, but before there was a file.
            let _ = std::fs::remove_file(&aside);
            let stat = rustix::fs::fstat(&file).map_err(failed("reading", path, 0))?;
            if stat.st_size == 0 {
                begin_file(&file, path, &FileHeader::new(free_number(path)?), &[])?;
            }
            return Ok(file);
        }
        let made = lock_at(&aside, true)?.ok_or_else(|| nothing_at(&aside))?;
        if std::fs::symlink_metadata(path).is_ok() {
            continue;
        }
        if !is_whole(&made, &aside)? {
            begin_file(&made, &aside, &FileHeader::new(free_number(path)?), &[])?;
        }
        step("record file: first made aside");
        if syncs {
            sync(&made).map_err(failed("syncing", &aside, 0))?;
        }
        match rename(&aside, path) {
            Ok(()) => {
                step("record file: first renamed into place");
                if syncs {
                    sync_directory(path)?;
                }
                return Ok(made);
            }
            Err(Errno::EXIST) => {}
            Err(error) => return Err(failed("renaming", &aside, 0)(error)),
        }
    }
    Err(nothing_at(path))
}

/// Whether a file that was made aside was finished.
fn is_whole(file: &Lock, path: &Path) -> Result<bool> {
    let end = rustix::fs::fstat(file).map_err(failed("reading", path, 0))?.st_size as u64;
    let mut chunks = match Chunks::of(file.as_fd(), path) {
        Ok(chunks) => chunks,
        Err(Error::NotARecordFile { .. }) => return Ok(false),
        Err(error) => return Err(error),
    };
    let mut at = HEADER;
    while at < end {
        match chunks.chunk(file.as_fd(), at, end, true)? {
            Ok(header) => at += header.all_bytes(),
            Err(_) => return Ok(false),
        }
    }
    Ok(true)
}

/// Writes the beginning of a file, with the last numbers of lanes, if there are any; answers how far it goes.
fn begin_file(file: &Lock, path: &Path, header: &FileHeader, lanes: &[u8]) -> Result<u64> {
    let last = ChunkHeader {
        kind: KIND_LAST,
        bytes: lanes.len() as u64,
        lane: LaneId([0, 0]),
        first_seq: 0,
        messages: 0,
        peer: None,
        written: header.created,
        checksum: crc32fast::hash(lanes),
    };
    let mut bytes = header.bytes().to_vec();
    if !lanes.is_empty() {
        bytes.extend(last.bytes(header));
        bytes.extend(lanes);
    }
    let end = bytes.len() as u64;
    // Not of an empty one: ext4 would begin to write out all that is written after it when the file is closed, and have that wait.
    let emptied = match rustix::fs::fstat(file).map_err(failed("reading", path, 0))?.st_size {
        0 => Ok(()),
        _ => rustix::fs::ftruncate(file, 0),
    };
    let done = emptied
        .and_then(|()| check_file_size(end))
        .and_then(|()| write_all_at(file.as_fd(), &mut [IoSlice::new(&bytes)], 0));
    done.map_err(failed("writing to", path, end))?;
    Ok(end)
}

/// Writes all of it at a place of the file, with as few calls as the system allows.
fn write_all_at(file: BorrowedFd<'_>, mut pieces: &mut [IoSlice<'_>], mut at: u64) -> rustix::io::Result<()> {
    IoSlice::advance_slices(&mut pieces, 0);
    while !pieces.is_empty() {
        let some = &pieces[..pieces.len().min(IOV_MAX)];
        match rustix::io::retry_on_intr(|| rustix::io::pwritev(file, some, at))? {
            // No system says so of a file.
            0 => return Err(Errno::IO),
            written => {
                IoSlice::advance_slices(&mut pieces, written);
                at += written as u64;
                step("record file: a part written");
            }
        }
    }
    Ok(())
}

/// The names in the directory of a file are on the disk after it.
fn sync_directory(path: &Path) -> Result<()> {
    let directory = path.parent().unwrap_or(path);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let synced = rustix::fs::open(directory, flags, Mode::empty()).and_then(rustix::fs::fsync);
    synced.map_err(failed("syncing the directory", directory, 0))
}
