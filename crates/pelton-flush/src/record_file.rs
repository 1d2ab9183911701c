//! A file that takes runs of records, and gives them back: the sink, its rotation, and what it finds when it is opened again. The
//! bytes are in `spec/record-file.md`.
//!
//! - **A file is made aside**, as FILE.pelton-next, whole, locked, and then renamed: what stands at FILE has a header, and an owner if
//!   anybody has.
//! - **A write is at the end, and the end is where the sink counts it.** What a failed write left is cut off; the file never ends
//!   behind what the sink counts as written but for a moment.
//! - **Before each write the sink checks that the file is at its path and as long as it was**, after it that it is as long as it must be, and
//!   not deleted. Otherwise somebody has truncated, moved or deleted it, and the sink begins a new one at the path.
//! - **Bytes that somebody else may change are looked at once.** The records of another user's process are copied first: their
//!   checksum is of what is in the file.

mod format;
mod lanes;
mod place;
mod reader;
#[cfg(test)]
mod tests;

pub use reader::{Chunk, Record, RecordReader, Records};

use crate::flush::{Run, Sink};
use format::{CHUNK_BYTES_MAX, ChunkHeader, Chunks, FileHeader, HEADER, KIND_LAST, KIND_RUN, read_at};
use lanes::Lanes;
use pelton_channel::LaneId;
use pelton_channel::raw::failure;
use pelton_channel::{Error, Result};
use pelton_lane::failpoint;
use pelton_os::lock::Lock;
use pelton_os::{Owner, Syncer, check_file_size, own_uid, sync};
use place::{
    Before, Identity, There, absolute, aside, create_aside, find, highest_number, nothing_at, numbered, open_or_begin,
    rename, sync_directory,
};
use rustix::fs::Mode;
use rustix::io::Errno;
use std::hash::{BuildHasher as _, Hasher as _};
use std::io::IoSlice;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// Of what lies so near the end of a file the checksums are looked at when it is opened: more than a kernel that was not told to
/// sync may have had in work when a machine failed is not covered, `pelton cat --verify` looks at all.
const VERIFIED: u64 = 4 << 20;
/// The most pieces that the system takes with one call.
const IOV_MAX: usize = 1024;
/// How often a file is looked for, or written to, that others create, rotate or truncate at the same time.
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

    /// Opens, or begins, a file to write to. While another writer has it, waits up to a second: a writer that was just killed has it for a moment.
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
/// # Other programs that rotate the file
/// Each write first checks that the file is at its path and has its length, with one system call. If another program has renamed or deleted it, the
/// write goes to the file that is at the path now: a new one, if there is none or it is empty. If another program has truncated it
/// to nothing, the file begins anew. Nothing that is written after that is lost. [`RecordFile::take_change`] says what was found. Only what
/// another program deletes or truncates is gone, which with logrotate's `copytruncate` includes what is written between its copy and its
/// truncation; `create` and `nocreate` have no such gap, and neither has [`RecordFileOptions::rotate_bytes`]. `spec/record-file.md` has the
/// configurations. What is at the path and is no record file, or has another writer, is an error of each write until it is moved away.
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
    identity: Identity,
    header: FileHeader,
    /// Where the next chunk goes.
    end: u64,
    /// Where the first one that has records went, or will go.
    begin: u64,
    /// Whether something may stand behind the end.
    is_torn: bool,
    cut_bytes: u64,
    lanes: Lanes,
    change: Option<FileChange>,
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

/// What another program has done to a [`RecordFile`] that is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileChange {
    /// It was shorter than the sink had written it. What was cut off is gone, unless there is a copy.
    Truncated,
    /// It was renamed: what was written before is in the renamed file.
    Moved,
    /// It was deleted, with what was written before.
    Deleted,
    /// It was longer than the sink had written it. What stood behind the end was cut off.
    Extended,
}

impl std::fmt::Display for FileChange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            FileChange::Truncated => "was truncated by another program, and goes on from where it ends",
            FileChange::Moved => {
                "was renamed by another program: the records that follow are in the file that is at the path now"
            }
            FileChange::Deleted => {
                "was deleted by another program: the records that follow are in the file that is at the path now"
            }
            FileChange::Extended => "was written to by another program: its bytes at the end were cut off",
        })
    }
}

/// What is in a file, and where it ends.
struct Survey {
    header: FileHeader,
    begin: u64,
    end: u64,
    lanes: Lanes,
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

    /// What another program has done to the file, as the last writes have found it. Says it once.
    pub fn take_change(&mut self) -> Option<FileChange> {
        self.change.take()
    }

    /// Where it is: absolute, and without symbolic links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn with(path: &Path, options: RecordFileOptions) -> Result<RecordFile> {
        let owner = Owner::current().map_err(Error::system("asking which process this is"))?;
        let path = absolute(path)?;
        let file = open_or_begin(&path, options.syncs(), None)?;
        let found = rustix::fs::fstat(&file).map_err(failed("reading", &path, 0))?;
        let Survey { header, begin, end, lanes } = survey(&file, &path, found.st_size as u64)?;
        let mut opened = RecordFile {
            path,
            options,
            owner,
            uid: own_uid(),
            file,
            identity: Identity::of(&found),
            header,
            end,
            begin,
            is_torn: false,
            cut_bytes: found.st_size as u64 - end,
            lanes,
            change: None,
            syncer: Syncer::default(),
            synced: 0,
            unsynced_since: None,
            sync_failed: None,
            copies: Vec::new(),
        };
        opened.cut()?;
        // What an earlier life wrote may not be on the disk.
        opened.unsynced_since = (opened.options.syncs() && opened.end > opened.begin).then(Instant::now);
        Ok(opened)
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
            failpoint("record file: cut");
        }
        self.is_torn = false;
        Ok(())
    }

    /// Begins a new file. Whatever step is the last that is done, the next opening finds a whole file at FILE, or none there and a
    /// whole one aside.
    fn rotate(&mut self) -> Result<()> {
        if self.options.syncs() {
            self.sync_all()?;
        }
        let number = (highest_number(&self.path)? + 1).max(self.header.number);
        let (rotated, aside) = (numbered(&self.path, number), aside(&self.path));
        let next = create_aside(&aside, Some(self.mode()?))?;
        let header = FileHeader::new(number + 1);
        let end = begin_file(&next, &aside, &header, &self.lanes.bytes())?;
        let identity = Identity::of(&rustix::fs::fstat(&next).map_err(failed("reading", &aside, 0))?);
        failpoint("record file: made aside");
        if self.options.syncs() {
            sync(&next).map_err(failed("syncing", &aside, 0))?;
        }
        rename(&self.path, &rotated).map_err(failed("renaming", &self.path, 0))?;
        failpoint("record file: renamed away");
        if let Err(error) = rename(&aside, &self.path) {
            // As it was. If that cannot be done either, each further write says so; everything written is in the renamed file.
            let _ = rename(&rotated, &self.path);
            return Err(failed("renaming", &aside, 0)(error));
        }
        failpoint("record file: renamed into place");
        (self.file, self.identity, self.header, self.end, self.begin) = (next, identity, header, end, end);
        (self.is_torn, self.synced, self.unsynced_since) = (false, 0, None);
        if self.options.syncs() {
            sync_directory(&self.path)?;
        }
        Ok(())
    }

    fn mode(&self) -> Result<Mode> {
        Ok(Mode::from_raw_mode(self.stat()?.st_mode & 0o777))
    }

    /// Sees to it that `file` is the one at the path, and ends where this counts it.
    fn check_file(&mut self) -> Result<()> {
        match find(&self.file, self.identity, &self.path)? {
            There::Bytes(bytes) if bytes == self.end => Ok(()),
            There::Bytes(bytes) => self.mend(bytes),
            There::Moved => self.begin_at_path(FileChange::Moved),
            There::Deleted => self.begin_at_path(FileChange::Deleted),
        }
    }

    /// The file has `bytes` bytes, which are not as many as it should have.
    #[cold]
    fn mend(&mut self, bytes: u64) -> Result<()> {
        let mut begin = [0; HEADER as usize];
        let read =
            read_at(&self.file, &mut begin, 0).map_err(Error::system(format!("reading {}", self.path.display())))?;
        if read == begin.len() && begin == self.header.bytes() {
            if bytes > self.end {
                self.change = Some(FileChange::Extended).filter(|_| !self.is_torn).or(self.change);
                return self.cut();
            }
            let survey = survey(&self.file, &self.path, bytes)?;
            (self.begin, self.end) = (survey.begin, survey.end);
        } else if bytes == 0 || self.is_torn {
            // A failed write may have left something where the file was truncated meanwhile.
            let (number, lanes) = (self.header.number + 1, self.lanes.bytes());
            self.header = FileHeader::new(number);
            self.end = begin_file(&self.file, &self.path, &self.header, &lanes)?;
            self.begin = self.end;
            failpoint("record file: begun again");
        } else {
            let problem = "another program has overwritten it while it was open: move it away".to_owned();
            return Err(Error::NotARecordFile { path: self.path.display().to_string(), problem });
        }
        self.synced = self.synced.min(self.end);
        self.change = Some(FileChange::Truncated);
        self.cut()
    }

    /// Goes on in the file that is at the path now, or in a new one.
    #[cold]
    fn begin_at_path(&mut self, change: FileChange) -> Result<()> {
        // What is in the old file is to be on the disk as before. A sync's error is reported first, since the system reports it once; any other
        // error comes again with the next write.
        let synced = if self.options.syncs() { self.sync_all() } else { Ok(()) };
        synced.and(self.open_at_path(change))
    }

    fn open_at_path(&mut self, change: FileChange) -> Result<()> {
        let before = Before { number: self.header.number + 1, mode: Some(self.mode()?), lanes: self.lanes.bytes() };
        let file = open_or_begin(&self.path, self.options.syncs(), Some(&before))?;
        let found = rustix::fs::fstat(&file).map_err(failed("reading", &self.path, 0))?;
        let Survey { header, begin, end, mut lanes } = survey(&file, &self.path, found.st_size as u64)?;
        lanes.note_all(&self.lanes);
        (self.file, self.identity, self.lanes) = (file, Identity::of(&found), lanes);
        (self.header, self.begin, self.end) = (header, begin, end);
        (self.synced, self.unsynced_since, self.change) = (0, None, Some(change));
        self.cut()
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
        append_all(self.file.as_fd(), &mut pieces)
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
        for _ in 0..TRIES {
            if self.try_write_runs(runs, bytes)? {
                failpoint("record file: written");
                self.is_torn = false;
                self.end += bytes;
                for run in runs {
                    self.lanes.note(run.lane(), format::last_seq(run.first_seq(), run.messages()));
                }
                if self.options.sync_bytes == Some(0) {
                    self.synced = self.end;
                } else if self.options.syncs() {
                    self.unsynced_since.get_or_insert_with(Instant::now);
                }
                return Ok(());
            }
        }
        Err(nothing_at(&self.path))
    }

    /// False: the file was truncated or deleted just before or after the write, which does not count then.
    fn try_write_runs(&mut self, runs: &[Run<'_>], bytes: u64) -> Result<bool> {
        self.check_file()?;
        if self.end > self.begin && self.options.rotate_bytes.is_some_and(|most| self.end + bytes > most) {
            self.rotate()?;
        }
        failpoint("record file: checked");
        self.is_torn = true;
        let mut done = check_file_size(self.end + bytes).and_then(|()| self.write_chunks(runs));
        let found = self.stat()?;
        let (is_deleted, found) = (found.st_nlink == 0, found.st_size as u64);
        if done.is_ok() && (is_deleted || found != self.end + bytes) {
            // As far as it is what was written here. The check before the next attempt sees to the rest.
            let begin = found.saturating_sub(bytes);
            let cut = rustix::io::retry_on_intr(|| rustix::fs::ftruncate(&self.file, begin));
            return cut.map(|()| false).map_err(failed("cutting off what was not written wholly of", &self.path, 0));
        }
        if self.options.sync_bytes == Some(0) {
            done = done.and_then(|()| sync(&self.file));
        }
        if let Err(error) = done {
            // What cannot be cut off now is cut off before the next write.
            let _ = self.cut();
            return Err(failed("writing to", &self.path, bytes)(error));
        }
        Ok(true)
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
    /// `runs` is written then. [`Error::NotARecordFile`], [`Error::Damaged`], [`Error::RoleTaken`]: another program has put something else, or
    /// another writer's file, at the path: move it away. [`Error::Forked`].
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
        self.lanes.last_seq(lane)
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

fn failed(what: &str, path: &Path, bytes: u64) -> impl FnOnce(Errno) -> Error {
    move |errno| failure(format!("{what} {}", path.display()), path.display().to_string(), bytes, errno)
}

/// What is in a file of so many bytes: its end is before what is torn.
fn survey(file: &Lock, path: &Path, bytes: u64) -> Result<Survey> {
    let fd = file.as_fd();
    let mut chunks = Chunks::of(fd, path)?;
    let (header, lanes) = (chunks.header, Lanes::default());
    let mut found = Survey { header, begin: HEADER, end: HEADER, lanes };
    while found.end < bytes {
        let chunk = match chunks.chunk(fd, found.end, bytes, false)? {
            Ok(header) if found.end + header.all_bytes() + VERIFIED > bytes || header.kind == KIND_LAST => {
                chunks.chunk(fd, found.end, bytes, true)?
            }
            chunk => chunk,
        };
        let header = match chunk {
            Ok(header) => header,
            Err(broken) => match chunks.damage(fd, found.end, bytes, broken)? {
                (None, _) => break,
                (Some(_), damaged) => return Err(damaged),
            },
        };
        found.lanes.note_chunk(&mut chunks, fd, found.end, &header)?;
        found.end += header.all_bytes();
        if header.kind == KIND_LAST {
            found.begin = found.end;
        }
    }
    Ok(found)
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
        .and_then(|()| append_all(file.as_fd(), &mut [IoSlice::new(&bytes)]));
    done.map_err(failed("writing to", path, end))?;
    Ok(end)
}

/// Writes all of it at the end of the file, with as few calls as the system allows.
fn append_all(file: BorrowedFd<'_>, mut pieces: &mut [IoSlice<'_>]) -> rustix::io::Result<()> {
    IoSlice::advance_slices(&mut pieces, 0);
    while !pieces.is_empty() {
        let some = &pieces[..pieces.len().min(IOV_MAX)];
        match rustix::io::retry_on_intr(|| rustix::io::writev(file, some))? {
            // No system says so of a file.
            0 => return Err(Errno::IO),
            written => {
                IoSlice::advance_slices(&mut pieces, written);
                failpoint("record file: a part written");
            }
        }
    }
    Ok(())
}
