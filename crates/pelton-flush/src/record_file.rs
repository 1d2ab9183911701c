//! A file that stores chunks of records: the sink, its rotation, and what a writer checks when it opens the file again.
//! `spec/record-file.md` defines the bytes.
//!
//! - **A file at its path is complete.** The writer creates it as FILE.pelton-next, locks it, writes its header, and
//!   then renames it. So the file at FILE has a header, and a lock as long as it has a writer.
//! - **A write goes to the end that the sink counts.** The sink cuts off what a failed write left. Beyond that end the
//!   file has bytes only while a write runs.
//! - **Each write is checked before and after.** Before it, the sink checks that the file is at its path and has its
//!   length; after it, that the length is right and the file not deleted. Otherwise another program has truncated,
//!   moved or deleted it, and the sink starts a new file at the path.
//! - **The sink reads bytes once that another process may change.** It copies the records of another user's process
//!   first, so that the checksum is of the bytes in the file.

#[cfg(feature = "zstd")]
mod compressed;
mod format;
mod lanes;
mod path;
mod reader;
#[cfg(test)]
mod tests;

pub use reader::{FileChunk, RecordReader};

use crate::flush::{Chunk, Sink};
use format::{CHUNK_BYTES_MAX, ChunkHeader, FileHeader, HEADER, KIND_LAST, KIND_RECORDS, Scanner, read_at};
use lanes::Lanes;
use path::{
    Identity, Location, Predecessor, absolute, create_temporary, highest_number, identity, locate, numbered,
    open_or_begin, rename, stat, sync_directory, temporary_path, unstable_at,
};
use pelton_channel::LaneId;
use pelton_channel::raw::failure;
use pelton_channel::{Error, Result};
use pelton_lane::failpoint;
use pelton_os::lock::Lock;
use pelton_os::{Owner, Syncer, check_file_size, own_uid, sync};
use rustix::fs::Mode;
use rustix::io::Errno;
use std::hash::{BuildHasher as _, Hasher as _};
use std::io::IoSlice;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};
#[cfg(feature = "zstd")]
use {compressed::Frames, format::CONTENT_BYTES_MAX};

/// A writer that opens a file verifies checksums this close to its end. Without a sync, a machine failure may lose
/// more; `pelton cat --verify` checks everything.
const VERIFIED_BYTES: u64 = 4 << 20;
/// The writer puts a seek point after so many bytes, so that a search finds one by reading that much. A guess.
const SEEK_POINT_BYTES: u64 = 1 << 20;
/// The most buffers of one writev.
const IOV_MAX: usize = 1024;
/// How often the writer retries while other programs create, rotate or truncate the file at the same time.
const TRIES: usize = 100;

/// Options of a [`RecordFile`].
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
    rotate_interval: Option<Duration>,
    sync_bytes: Option<u64>,
    sync_interval: Option<Duration>,
    #[cfg(feature = "zstd")]
    is_compressed: bool,
}

impl RecordFileOptions {
    /// One growing file, which the kernel writes to the disk when it chooses.
    pub fn new() -> RecordFileOptions {
        RecordFileOptions::default()
    }

    /// A write that would make the file larger than this starts a new one: the sink renames FILE to FILE.000001
    /// (FILE.000002, and so on), and creates an empty FILE. It never divides a write, so a larger one gets a file of
    /// its own.
    #[must_use]
    pub fn rotate_bytes(mut self, bytes: u64) -> RecordFileOptions {
        self.rotate_bytes = Some(bytes);
        self
    }

    /// A write that long after the file was created starts a new one, as for [`RecordFileOptions::rotate_bytes`].
    /// Without a write there is no new file.
    #[must_use]
    pub fn rotate_interval(mut self, interval: Duration) -> RecordFileOptions {
        self.rotate_interval = Some(interval);
        self
    }

    /// Syncs (fdatasync) after each `bytes` bytes. Later writes do not wait for it where the system has io_uring. 0:
    /// each write returns only after its sync.
    #[must_use]
    pub fn sync_bytes(mut self, bytes: u64) -> RecordFileOptions {
        self.sync_bytes = Some(bytes);
        self
    }

    /// Syncs `interval` after a write. The sink checks that at each write, also at an empty one, which a flush makes in
    /// time.
    #[must_use]
    pub fn sync_interval(mut self, interval: Duration) -> RecordFileOptions {
        self.sync_interval = Some(interval);
        self
    }

    /// Compresses each write with zstd, in frames of about 1 MiB, if that makes it smaller. So a larger flush buffer
    /// (`Options::flush_bytes`) or a longer `Options::flush_interval` compresses better. An existing file may have
    /// both kinds of chunks. Readers in Rust need the feature `zstd`; those in other languages, `pelton cat` and
    /// `pelton replay` have it.
    #[cfg(feature = "zstd")]
    #[must_use]
    pub fn compress_zstd(mut self) -> RecordFileOptions {
        self.is_compressed = true;
        self
    }

    /// Opens or creates a file to write to. While another writer has it, waits up to a second: the lock of a writer
    /// that was just killed lasts a moment.
    ///
    /// A new file has mode 0640, less the umask, as is usual for logs; a file that follows another in a rotation has
    /// that one's mode. Of an existing file this reads the headers of all chunks, and verifies the checksums of the
    /// last 4 MiB. It cuts off a torn tail, as a killed writer leaves it: [`RecordFile::cut_bytes`].
    ///
    /// # Errors
    /// - [`Error::RoleTaken`]: another handle writes to it, in this process or another.
    /// - [`Error::Damaged`]: bytes in the middle are damaged, with valid chunks after them; the file is unchanged. Move
    ///   it away.
    /// - [`Error::NotARecordFile`]: the file has another format, or a later version; [`Error::Option`];
    ///   [`Error::NoSpace`]; [`Error::System`].
    pub fn open(&self, path: impl AsRef<Path>) -> Result<RecordFile> {
        if self.rotate_bytes == Some(0) {
            let wanted = "at least 1, or do not set it".to_owned();
            return Err(Error::Option { option: "rotate_bytes", found: 0, wanted });
        }
        let owner = Owner::current().map_err(Error::system("checking which process this is"))?;
        let path = absolute(path.as_ref())?;
        let file = open_or_begin(&path, self.syncs(), None)?;
        let found = stat(&file, &path)?;
        let Survey { header, begin, end, lanes, index } = survey(&file, &path, found.st_size as u64)?;
        #[cfg(feature = "zstd")]
        let frames = self.is_compressed.then(Frames::new).transpose();
        let mut opened = RecordFile {
            path,
            options: self.clone(),
            owner,
            uid: own_uid(),
            file,
            identity: identity(&found),
            header,
            end,
            begin,
            is_torn: false,
            cut_bytes: found.st_size as u64 - end,
            lanes,
            index,
            #[cfg(feature = "zstd")]
            frames: frames.map_err(Error::system("preparing zstd"))?,
            change: None,
            syncer: Syncer::default(),
            synced: 0,
            unsynced_since: None,
            sync_failed: None,
            copies: Vec::new(),
        };
        opened.cut()?;
        // What an earlier writer wrote may not be on the disk.
        opened.unsynced_since = (self.syncs() && end > begin).then(Instant::now);
        Ok(opened)
    }

    fn syncs(&self) -> bool {
        self.sync_bytes.is_some() || self.sync_interval.is_some()
    }
}

/// A sink on disk: it writes the chunks unchanged, each after a header. [`RecordReader`] and `pelton cat` read the
/// file.
///
/// A chunk survives this process as soon as [`Sink::write`] returns: the kernel has it. It survives a failure of the
/// machine after [`Sink::sync`], or as [`RecordFileOptions::sync_bytes`] says. A failed write has no effect: the sink
/// cuts the file back to its former length.
///
/// The caller releases messages before it writes more of the same lane: [`Sink::last_seq`] has one number per lane, for
/// the 4,096 lanes written last, across rotations.
///
/// # Other programs that rotate the file
/// Each write first checks, with one system call, that the file is at its path and has its length. If another program
/// has renamed or deleted it, the write goes to the file now at the path; or to a new one if there is none or it is
/// empty. If another program has truncated it to nothing, the sink writes its header again. No later message is lost.
/// [`RecordFile::take_change`] reports what happened.
///
/// Only what another program deletes or truncates is lost. With logrotate's `copytruncate` that includes what is
/// written between its copy and its truncation. `create` and `nocreate` have no such gap, and neither has
/// [`RecordFileOptions::rotate_bytes`]. `spec/record-file.md` has the configurations. If the path has a file of another
/// format, or one with another writer, each write fails until somebody moves that file away.
///
/// **Dropping** it syncs nothing, and waits only for closing the file: the kernel writes it to the disk later.
/// [`Sink::sync`] first, if that matters.
///
/// Threads: a handle may move between threads. In a forked child, writing and syncing return [`Error::Forked`], and
/// dropping the handle has no effect on the file.
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
    /// Where the first chunk with records begins, or will begin.
    begin: u64,
    /// Whether the file may have bytes behind the end.
    is_torn: bool,
    cut_bytes: u64,
    lanes: Lanes,
    index: Index,
    #[cfg(feature = "zstd")]
    frames: Option<Frames>,
    change: Option<FileChange>,
    syncer: Syncer,
    /// The file's end when the last sync was started.
    synced: u64,
    /// When the first write after it returned.
    unsynced_since: Option<Instant>,
    /// The error of a sync that could not start, for the next call.
    sync_failed: Option<Errno>,
    /// Copies of the records of other users' processes.
    copies: Vec<u8>,
}

/// What another program has done to a [`RecordFile`] that is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileChange {
    /// It was shorter than the sink wrote it. What was cut off is lost, unless there is a copy.
    Truncated,
    /// It was renamed: the renamed file has the records before.
    Moved,
    /// It was deleted, with the records before.
    Deleted,
    /// It was longer than the sink wrote it. The sink cut the foreign bytes off.
    Extended,
}

impl std::fmt::Display for FileChange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            FileChange::Truncated => "was truncated by another program; writing continues at its new end",
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

/// What the next seek point of a file says.
#[derive(Clone, Copy, Debug, Default)]
struct Index {
    /// Messages in the file.
    messages: u64,
    /// The latest time of a chunk.
    written: u64,
    /// Where the last seek point is; 0 if there is none.
    point_at: u64,
}

/// What a writer knows after it has read a file.
struct Survey {
    index: Index,
    header: FileHeader,
    begin: u64,
    end: u64,
    lanes: Lanes,
}

impl RecordFile {
    /// Opens or creates a file to write to, with the default options: see [`RecordFileOptions::open`].
    ///
    /// # Errors
    /// As of [`RecordFileOptions::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<RecordFile> {
        RecordFileOptions::new().open(path)
    }

    /// How many bytes of an unfinished write the opening cut off.
    pub fn cut_bytes(&self) -> u64 {
        self.cut_bytes
    }

    /// What another program did to the file, as the last writes detected it. Reports each change once.
    pub fn take_change(&mut self) -> Option<FileChange> {
        self.change.take()
    }

    /// Its path: absolute, and without symbolic links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Cuts off the bytes behind the end.
    fn cut(&mut self) -> Result<()> {
        self.is_torn = true;
        if stat(&self.file, &self.path)?.st_size as u64 > self.end {
            rustix::io::retry_on_intr(|| rustix::fs::ftruncate(&self.file, self.end)).map_err(failed(
                "cutting a partial write off",
                &self.path,
                0,
            ))?;
            failpoint("record file: cut");
        }
        self.is_torn = false;
        Ok(())
    }

    /// Starts a new file. After a kill at any step, the next opening finds a complete file at FILE, or none there and a
    /// complete one under the temporary name.
    fn rotate(&mut self) -> Result<()> {
        if self.options.syncs() {
            self.sync_all()?;
        }
        let number = (highest_number(&self.path)? + 1).max(self.header.number);
        let (rotated, temporary) = (numbered(&self.path, number), temporary_path(&self.path));
        let next = create_temporary(&temporary, Some(self.mode()?))?;
        let header = FileHeader::new(number + 1);
        let end = begin_file(&next, &temporary, &header, &self.lanes.bytes())?;
        let identity = identity(&stat(&next, &temporary)?);
        failpoint("record file: next file complete");
        if self.options.syncs() {
            sync(&next).map_err(failed("syncing", &temporary, 0))?;
        }
        rename(&self.path, &rotated).map_err(failed("renaming", &self.path, 0))?;
        failpoint("record file: renamed away");
        if let Err(error) = rename(&temporary, &self.path) {
            // Restores the old name. If that fails too, each further write reports it; the renamed file has everything.
            let _ = rename(&rotated, &self.path);
            return Err(failed("renaming", &temporary, 0)(error));
        }
        failpoint("record file: renamed into place");
        (self.file, self.identity, self.header, self.end, self.begin) = (next, identity, header, end, end);
        (self.is_torn, self.synced, self.unsynced_since, self.index) = (false, 0, None, Index::default());
        if self.options.syncs() {
            sync_directory(&self.path)?;
        }
        Ok(())
    }

    fn mode(&self) -> Result<Mode> {
        Ok(Mode::from_raw_mode(stat(&self.file, &self.path)?.st_mode & 0o777))
    }

    /// Handles a length that is not the counted one.
    #[cold]
    fn repair(&mut self, bytes: u64) -> Result<()> {
        let mut begin = [0; HEADER as usize];
        let read =
            read_at(&self.file, &mut begin, 0).map_err(Error::system(format!("reading {}", self.path.display())))?;
        if read == begin.len() && begin == self.header.bytes() {
            if bytes > self.end {
                self.change = Some(FileChange::Extended).filter(|_| !self.is_torn).or(self.change);
                return self.cut();
            }
            let survey = survey(&self.file, &self.path, bytes)?;
            (self.begin, self.end, self.index) = (survey.begin, survey.end, survey.index);
        } else if bytes == 0 || self.is_torn {
            // A failed write may have left bytes in a file that was truncated meanwhile.
            let (number, lanes) = (self.header.number + 1, self.lanes.bytes());
            self.header = FileHeader::new(number);
            self.end = begin_file(&self.file, &self.path, &self.header, &lanes)?;
            (self.begin, self.index) = (self.end, Index::default());
            failpoint("record file: restarted");
        } else {
            let problem = "another program has overwritten it while it was open: move it away".to_owned();
            return Err(Error::NotARecordFile { path: self.path.display().to_string(), problem });
        }
        self.synced = self.synced.min(self.end);
        self.change = Some(FileChange::Truncated);
        self.cut()
    }

    /// Continues in the file that is at the path now, or in a new one.
    #[cold]
    fn begin_at_path(&mut self, change: FileChange) -> Result<()> {
        // The old file's records become durable, as before. A sync's error is reported first, since the system reports
        // it once; any other error repeats with the next write.
        let synced = if self.options.syncs() { self.sync_all() } else { Ok(()) };
        synced.and(self.open_at_path(change))
    }

    fn open_at_path(&mut self, change: FileChange) -> Result<()> {
        let before =
            Predecessor { number: self.header.number + 1, mode: Some(self.mode()?), lanes: self.lanes.bytes() };
        let file = open_or_begin(&self.path, self.options.syncs(), Some(&before))?;
        let found = stat(&file, &self.path)?;
        let Survey { header, begin, end, mut lanes, index } = survey(&file, &self.path, found.st_size as u64)?;
        lanes.note_all(&self.lanes);
        (self.file, self.identity, self.lanes) = (file, identity(&found), lanes);
        (self.header, self.begin, self.end, self.index) = (header, begin, end, index);
        (self.synced, self.unsynced_since, self.change) = (0, None, Some(change));
        self.cut()
    }

    /// The header of a chunk; its checksum is not known yet.
    fn chunk_header(&self, chunk: &Chunk<'_>, written: u64) -> ChunkHeader {
        ChunkHeader {
            kind: KIND_RECORDS,
            bytes: chunk.bytes().len() as u64,
            lane: chunk.lane(),
            first_seq: chunk.first_seq(),
            messages: chunk.message_count(),
            peer: chunk.peer(),
            written: chunk.arrived_ns().unwrap_or(written),
            is_arrival: chunk.arrived_ns().is_some(),
            checksum: 0,
        }
    }

    /// Writes chunks at the end, after `point`, the bytes of a seek point or none. On failure the file may have some of
    /// their bytes behind the end.
    fn write_chunks(&mut self, chunks: &[Chunk<'_>], point: &[u8], written: u64) -> rustix::io::Result<()> {
        // All copies are made before any header refers to one, so that none moves.
        self.copies.clear();
        let foreign = || chunks.iter().filter(|chunk| is_foreign(chunk, self.uid));
        let bytes = foreign().map(|chunk| chunk.bytes().len()).sum();
        self.copies.try_reserve(bytes).map_err(|_| Errno::NOMEM)?;
        foreign().for_each(|chunk| pelton_lane::append(chunk.bytes(), &mut self.copies));
        let mut copies = &self.copies[..];
        let bytes_of: Vec<&[u8]> = (chunks.iter())
            .map(|chunk| match is_foreign(chunk, self.uid) {
                true => copies.split_off(..chunk.bytes().len()).expect("it was copied"),
                false => chunk.bytes(),
            })
            .collect();
        let headers: Vec<[u8; HEADER as usize]> = (chunks.iter().zip(&bytes_of))
            .map(|(chunk, bytes)| {
                let header = ChunkHeader { checksum: crc32fast::hash(bytes), ..self.chunk_header(chunk, written) };
                header.bytes(&self.header)
            })
            .collect();
        let pieces =
            headers.iter().zip(&bytes_of).flat_map(|(header, bytes)| [IoSlice::new(header), IoSlice::new(bytes)]);
        let mut pieces: Vec<IoSlice<'_>> = std::iter::once(IoSlice::new(point)).chain(pieces).collect();
        append_all(self.file.as_fd(), &mut pieces)
    }

    /// Compresses chunks, for the file's present header. Returns their size. `None`: they are to be written as they
    /// are, because that is smaller, or because one of them is too large for a frame.
    #[cfg(feature = "zstd")]
    fn compress(&mut self, chunks: &[Chunk<'_>], written: u64) -> Result<Option<u64>> {
        let Some(mut frames) = self.frames.take() else { return Ok(None) };
        let plain = plain_bytes(chunks);
        let is_large = |chunk: &Chunk<'_>| HEADER + chunk.bytes().len() as u64 > CONTENT_BYTES_MAX / 2;
        let mut encode = || {
            frames.begin();
            for chunk in chunks {
                frames.add(self.chunk_header(chunk, written), chunk.bytes(), &self.header)?;
            }
            Ok(frames.encoded(&self.header)?.len() as u64)
        };
        let encoded = if chunks.iter().any(is_large) { Ok(plain) } else { encode() };
        self.frames = Some(frames);
        let bytes = encoded.map_err(Error::system("compressing"))?;
        Ok((bytes < plain).then_some(bytes))
    }

    #[cfg(not(feature = "zstd"))]
    fn compress(&mut self, _: &[Chunk<'_>], _: u64) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Writes what was compressed last.
    #[cfg(feature = "zstd")]
    fn write_compressed(&mut self, point: &[u8]) -> rustix::io::Result<()> {
        let Some(frames) = &mut self.frames else { return Ok(()) };
        let encoded = frames.encoded(&self.header).map_err(|_| Errno::IO)?;
        append_all(self.file.as_fd(), &mut [IoSlice::new(point), IoSlice::new(encoded)])
    }

    /// Nothing is ever compressed.
    #[cfg(not(feature = "zstd"))]
    fn write_compressed(&mut self, _: &[u8]) -> rustix::io::Result<()> {
        Ok(())
    }

    /// Reports once the failure of a started sync, if it is known.
    fn report_sync(&mut self) -> Result<()> {
        let ended = if self.syncer.is_busy() { self.syncer.ended(&self.file) } else { None };
        let failed_before = self.sync_failed.take().map(Err);
        ended.or(failed_before).unwrap_or(Ok(())).map_err(failed(UNSYNCED, &self.path, 0))
    }

    /// Waits until everything is on the disk.
    fn sync_all(&mut self) -> Result<()> {
        self.report_sync()?;
        let ended = self.syncer.wait(&self.file);
        ended.and_then(|()| sync(&self.file)).map_err(failed(UNSYNCED, &self.path, 0))?;
        (self.synced, self.unsynced_since) = (self.end, None);
        Ok(())
    }

    fn append(&mut self, chunks: &[Chunk<'_>]) -> Result<()> {
        if let Some(chunk) = chunks.iter().find(|chunk| chunk.bytes().len() as u64 > CHUNK_BYTES_MAX) {
            return Err(Error::TooLarge { bytes: chunk.bytes().len() as u64, bytes_max: CHUNK_BYTES_MAX });
        }
        for _ in 0..TRIES {
            if let Some(bytes) = self.try_append(chunks)? {
                failpoint("record file: written");
                self.is_torn = false;
                self.end += bytes;
                for chunk in chunks {
                    self.lanes.note(chunk.lane(), chunk.last_seq());
                }
                if self.options.sync_bytes == Some(0) {
                    self.synced = self.end;
                } else if self.options.syncs() {
                    self.unsynced_since.get_or_insert_with(Instant::now);
                }
                return Ok(());
            }
        }
        Err(unstable_at(&self.path))
    }

    /// The position of the seek point that the next write begins with, if it does.
    fn next_point(&self) -> Option<u64> {
        (self.end - self.index.point_at >= SEEK_POINT_BYTES).then_some(self.end)
    }

    /// The number of bytes written. `None`: the file was truncated or deleted just before or after the write, which
    /// then does not count.
    fn try_append(&mut self, chunks: &[Chunk<'_>]) -> Result<Option<u64>> {
        match locate(&self.file, self.identity, &self.path)? {
            Location::Bytes(bytes) if bytes == self.end => {}
            Location::Bytes(bytes) => self.repair(bytes)?,
            Location::Moved => self.begin_at_path(FileChange::Moved)?,
            Location::Deleted => self.begin_at_path(FileChange::Deleted)?,
        }
        let written = now();
        let mut compressed = self.compress(chunks, written)?;
        let plain = plain_bytes(chunks);
        let age = Duration::from_nanos(now().saturating_sub(self.header.created));
        let with_point = self.end + self.next_point().map_or(0, |_| HEADER);
        let is_full = self.options.rotate_bytes.is_some_and(|most| with_point + compressed.unwrap_or(plain) > most)
            || self.options.rotate_interval.is_some_and(|most| age >= most);
        if self.end > self.begin && is_full {
            self.rotate()?;
            // The checksums in the frames begin with the file's id.
            compressed = self.compress(chunks, written)?;
        }
        let point_at = self.next_point();
        let point =
            point_at.map(|at| ChunkHeader::seek_point(at, self.index.messages, self.index.written).bytes(&self.header));
        let point = point.as_ref().map_or(&[][..], |point| point);
        let bytes = point.len() as u64 + compressed.unwrap_or(plain);
        failpoint("record file: checked");
        self.is_torn = true;
        let mut done = check_file_size(self.end + bytes).and_then(|()| match compressed {
            Some(_) => self.write_compressed(point),
            None => self.write_chunks(chunks, point, written),
        });
        let found = stat(&self.file, &self.path)?;
        let (is_deleted, found) = (found.st_nlink == 0, found.st_size as u64);
        if done.is_ok() && (is_deleted || found != self.end + bytes) {
            // Cuts this write's bytes off, as far as they are still there. The next attempt's check handles the rest.
            let begin = found.saturating_sub(bytes);
            let cut = rustix::io::retry_on_intr(|| rustix::fs::ftruncate(&self.file, begin));
            return cut.map(|()| None).map_err(failed("cutting a partial write off", &self.path, 0));
        }
        if self.options.sync_bytes == Some(0) {
            done = done.and_then(|()| sync(&self.file));
        }
        if let Err(error) = done {
            // If that fails now, the next write does it first.
            let _ = self.cut();
            return Err(failed("writing to", &self.path, bytes)(error));
        }
        self.index.point_at = point_at.unwrap_or(self.index.point_at);
        for chunk in chunks {
            self.index.messages += u64::from(chunk.message_count());
            self.index.written = self.index.written.max(chunk.arrived_ns().unwrap_or(written));
        }
        Ok(Some(bytes))
    }

    fn check_owner(&self) -> Result<()> {
        if self.owner.is_current() { Ok(()) } else { Err(Error::Forked) }
    }
}

/// The error text of a failed sync, whose writes returned earlier.
const UNSYNCED: &str = "what was written before may not be on the disk: syncing";

impl Sink for RecordFile {
    /// Writes all of `chunks`, or nothing that counts. Waits until the kernel has them.
    ///
    /// # Errors
    /// [`Error::NoSpace`], or [`Error::System`] with the system's error (of the disk, or a limit of file sizes): the
    /// file is as it was, so the caller can retry. [`Error::System`] also reports once that an earlier sync has failed;
    /// no chunk is written then. [`Error::NotARecordFile`], [`Error::Damaged`], [`Error::RoleTaken`]: the path has a
    /// foreign file, or another writer's: move it away. [`Error::Forked`].
    fn write(&mut self, chunks: &[Chunk<'_>]) -> Result<()> {
        self.check_owner()?;
        self.report_sync()?;
        if !chunks.is_empty() {
            self.append(chunks)?;
        }
        if let Some(since) = self.unsynced_since
            && !self.syncer.is_busy()
            && (self.options.sync_bytes.is_some_and(|bytes| self.end - self.synced >= bytes)
                || self.options.sync_interval.is_some_and(|interval| since.elapsed() >= interval))
        {
            (self.synced, self.unsynced_since) = (self.end, None);
            self.sync_failed = self.syncer.start(&self.file).err();
        }
        Ok(())
    }

    /// Waits until everything written is on the disk.
    ///
    /// # Errors
    /// [`Error::System`]: some of it may be lost, by this sync or an earlier one; a retry proves nothing.
    /// [`Error::Forked`].
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

impl FileHeader {
    /// The header of a new file.
    fn new(number: u64) -> FileHeader {
        let id = std::hash::RandomState::new().build_hasher().finish();
        FileHeader { created: now(), number, id }
    }
}

/// Nanoseconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// The size of chunks that are not compressed.
fn plain_bytes(chunks: &[Chunk<'_>]) -> u64 {
    chunks.iter().map(|chunk| HEADER + chunk.bytes().len() as u64).sum()
}

/// Whether the sender runs as another user and could change the bytes later. A process of this user could do worse
/// anyway.
fn is_foreign(chunk: &Chunk<'_>, uid: u32) -> bool {
    chunk.peer().is_some_and(|peer| peer.uid != uid)
}

fn failed(what: &str, path: &Path, bytes: u64) -> impl FnOnce(Errno) -> Error {
    move |errno| failure(format!("{what} {}", path.display()), path.display().to_string(), bytes, errno)
}

/// Reads a file of so many bytes. Its end is before a torn tail.
fn survey(file: &Lock, path: &Path, bytes: u64) -> Result<Survey> {
    let mut scanner = Scanner::of(file, path)?;
    let (header, lanes) = (scanner.header, Lanes::default());
    let mut found = Survey { header, begin: HEADER, end: HEADER, lanes, index: Index::default() };
    while found.end < bytes {
        let at = found.end;
        let is_verified =
            |header: &ChunkHeader| header.kind == KIND_LAST || at + header.all_bytes() + VERIFIED_BYTES > bytes;
        let header = match scanner.chunk(at, bytes, is_verified)? {
            Ok(header) => header,
            Err(broken) => match scanner.damage(at, bytes, broken)? {
                (None, _) => break,
                (Some(_), damaged) => return Err(damaged),
            },
        };
        found.lanes.note_chunk(&mut scanner, at, &header)?;
        if header.has_records() {
            found.index.messages += u64::from(header.messages);
            found.index.written = found.index.written.max(header.last_written());
        }
        if header.messages_before(at).is_some() {
            found.index.point_at = at;
        }
        found.end += header.all_bytes();
        if header.kind == KIND_LAST {
            found.begin = found.end;
        }
    }
    Ok(found)
}

/// Writes the beginning of a file, with the last numbers of lanes, if there are any. Returns its length.
fn begin_file(file: &Lock, path: &Path, header: &FileHeader, lanes: &[u8]) -> Result<u64> {
    let last = ChunkHeader {
        kind: KIND_LAST,
        bytes: lanes.len() as u64,
        lane: LaneId([0, 0]),
        first_seq: 0,
        messages: 0,
        peer: None,
        written: header.created,
        is_arrival: false,
        checksum: crc32fast::hash(lanes),
    };
    let mut bytes = header.bytes().to_vec();
    if !lanes.is_empty() {
        bytes.extend(last.bytes(header));
        bytes.extend(lanes);
    }
    let end = bytes.len() as u64;
    // An empty file is not truncated: after that, ext4 writes out later data at close, which then waits for the disk.
    let emptied = match stat(file, path)?.st_size {
        0 => Ok(()),
        _ => rustix::fs::ftruncate(file, 0),
    };
    let done = emptied.and_then(|()| check_file_size(end)).and_then(|()| {
        // Otherwise a part of it would pass as a beginning, without the last numbers.
        append_all(file.as_fd(), &mut [IoSlice::new(&bytes)]).inspect_err(|_| _ = rustix::fs::ftruncate(file, 0))
    });
    done.map_err(failed("writing to", path, end))?;
    Ok(end)
}

/// Writes everything at the end of the file, with as few calls as the system allows.
fn append_all(file: BorrowedFd<'_>, mut pieces: &mut [IoSlice<'_>]) -> rustix::io::Result<()> {
    IoSlice::advance_slices(&mut pieces, 0);
    while !pieces.is_empty() {
        let some = &pieces[..pieces.len().min(IOV_MAX)];
        match rustix::io::retry_on_intr(|| rustix::io::writev(file, some))? {
            // No system returns 0 for a file.
            0 => return Err(Errno::IO),
            written => {
                IoSlice::advance_slices(&mut pieces, written);
                failpoint("record file: a part written");
            }
        }
    }
    Ok(())
}
