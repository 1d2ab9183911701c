//! Reads a record file chunk by chunk. It checks each chunk before it returns any of its records.

use super::format::{Broken, ChunkHeader, HEADER, KIND_RECORDS, Scanner, check_checksum, check_records, read_at};
use crate::flush::Chunk;
use pelton_channel::{Error, Result};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use std::fs::File;
use std::ops::Deref;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// The records of a chunk up to this size are read in any case: some seconds of flushing.
const SPARSE_BYTES_MAX: u64 = 64 << 20;
/// Of a larger chunk, the file must have at least one byte of this number: a copy may have made long runs of zeros into
/// holes. Otherwise a file of a few blocks would make its reader allocate 16 GiB.
const BYTES_PER_DATA: u64 = 64;

/// Reads the records of a file that a [`RecordFile`](crate::RecordFile) wrote, or is writing.
///
/// Whatever the file contains, the reader returns valid records, or an error with the position of the damage.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// # let directory = tempfile::tempdir().unwrap();
/// # let path = directory.path().join("log");
/// use pelton::{RecordFile, RecordReader};
/// RecordFile::open(&path)?;
/// let mut reader = RecordReader::open(&path)?;
/// while let Some(chunk) = reader.next_chunk()? {
///     for record in chunk.records() {
///         println!("{:?} {}: {} bytes", chunk.lane(), record.seq(), record.payload().len());
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct RecordReader {
    scanner: Scanner<File>,
    /// Where the next chunk begins.
    at: u64,
    records: Vec<u8>,
}

impl RecordReader {
    /// Opens a file. Others can write to it meanwhile.
    ///
    /// # Errors
    /// [`Error::NotARecordFile`]: it has another format, or a version that this program does not know.
    /// [`Error::System`]: opening or reading fails.
    pub fn open(path: impl AsRef<Path>) -> Result<RecordReader> {
        let path = path.as_ref();
        let what = || format!("opening {}", path.display());
        // Does not wait for the writer of a FIFO, which is refused below.
        let opened = File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path);
        let file = opened.map_err(Error::system(what()))?;
        if !file.metadata().map_err(Error::system(what()))?.is_file() {
            let problem = "it is not a regular file".to_owned();
            return Err(Error::NotARecordFile { path: path.display().to_string(), problem });
        }
        Ok(RecordReader { scanner: Scanner::of(file, path)?, at: HEADER, records: Vec::new() })
    }

    /// The next chunk, checked completely; `None` at the end of the file. A writer may append more, so the caller can
    /// call again.
    ///
    /// # Errors
    /// [`Error::Damaged`]: the bytes are not valid. It says whether a valid chunk follows. If so, the next call
    /// continues with that; if not, it checks the same position again: a killed writer leaves a torn tail, and so does
    /// a live one in the middle of a write. [`Error::NotARecordFile`]: a chunk of a later version. [`Error::System`]:
    /// reading failed.
    pub fn next_chunk(&mut self) -> Result<Option<FileChunk<'_>>> {
        let header = loop {
            let end = self.scanner.file.metadata();
            let end = end.map_err(Error::system(format!("reading {}", self.scanner.path)))?.len();
            if end <= self.at {
                self.scanner.forget();
                return Ok(None);
            }
            let found = match self.scanner.chunk(self.at, end, |header| header.kind != KIND_RECORDS)? {
                Ok(header) if header.kind == KIND_RECORDS => self.read_records(header)?,
                found => found,
            };
            match found {
                Ok(header) if header.kind == KIND_RECORDS => break header,
                Ok(header) => self.at += header.all_bytes(),
                Err(broken) => {
                    let (next, error) = self.scanner.damage(self.at, end, broken)?;
                    self.scanner.forget();
                    self.at = next.unwrap_or(self.at);
                    return Err(error);
                }
            }
        };
        let offset = self.at;
        self.at += header.all_bytes();
        match check_records(&header, &self.records) {
            Ok(()) => {
                let ChunkHeader { lane, peer, first_seq, messages, written, is_arrival, .. } = header;
                let chunk = Chunk::new(lane, peer, first_seq, messages, &self.records);
                let chunk = chunk.with_arrival(is_arrival.then_some(written));
                Ok(Some(FileChunk { chunk, written, offset }))
            }
            // The writer wrote it so. The chunks after it are independent of it.
            Err(broken) => Err(self.scanner.damaged(offset, broken, Some(self.at))),
        }
    }

    /// Skips chunks of which `is_skipped` returns true for the time of [`FileChunk::written_at`] and the number of
    /// messages. This reads only their headers, so it finds a time in a large file without reading its messages, and
    /// without checking them. The next call of [`RecordReader::next_chunk`] returns the first chunk that is not
    /// skipped, or reports the damage that ended the search.
    ///
    /// # Errors
    /// As [`RecordReader::next_chunk`], without [`Error::Damaged`].
    pub fn skip_while(&mut self, mut is_skipped: impl FnMut(SystemTime, u32) -> bool) -> Result<()> {
        let end = self.scanner.file.metadata();
        let end = end.map_err(Error::system(format!("reading {}", self.scanner.path)))?.len();
        while self.at < end {
            let Ok(header) = self.scanner.chunk(self.at, end, |_| false)? else { break };
            let time = SystemTime::UNIX_EPOCH + Duration::from_nanos(header.written);
            if header.kind == KIND_RECORDS && !is_skipped(time, header.messages) {
                break;
            }
            self.at += header.all_bytes();
        }
        Ok(())
    }

    /// Reads the records of the next chunk, and compares their checksum.
    fn read_records(&mut self, header: ChunkHeader) -> Result<std::result::Result<ChunkHeader, Broken>> {
        if let Some(broken) = self.mostly_hole(&header) {
            return Ok(Err(broken));
        }
        let what = || format!("reading {} bytes of {}", header.bytes, self.scanner.path);
        let bytes = header.bytes as usize;
        let reserved = self.records.try_reserve(bytes.saturating_sub(self.records.len()));
        reserved.map_err(|_| Error::system(what())(std::io::ErrorKind::OutOfMemory.into()))?;
        self.records.resize(bytes, 0);
        let read = read_at(&self.scanner.file, &mut self.records, self.at + HEADER).map_err(Error::system(what()))?;
        // If the file was truncated meanwhile, the missing bytes do not count.
        Ok(check_checksum(&header, crc32fast::hash(&self.records[..read])).map(|()| header))
    }

    /// What is wrong with a large chunk of which the file has almost nothing.
    fn mostly_hole(&self, header: &ChunkHeader) -> Option<Broken> {
        let wanted = header.bytes / BYTES_PER_DATA;
        let begin = self.at + HEADER;
        if header.bytes <= SPARSE_BYTES_MAX {
            return None;
        }
        let found = data_between(&self.scanner.file, begin, begin + header.bytes, wanted);
        (found < wanted).then(|| Broken {
            found: format!("{found} bytes of data in a chunk of {} bytes, the rest is a hole", header.bytes),
            wanted: format!("at least {wanted}"),
        })
    }

    /// The file's position in its rotation: 1 for the first.
    pub fn number(&self) -> u64 {
        self.scanner.header.number
    }

    /// When the file was created.
    pub fn created_at(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_nanos(self.scanner.header.created)
    }
}

/// How many bytes from `begin` to `end` are data, and no holes; stops counting at `enough`. A file system that knows no
/// holes has only data.
fn data_between(file: &File, begin: u64, end: u64, enough: u64) -> u64 {
    let (mut at, mut found) = (begin, 0);
    while at < end && found < enough {
        let data = match seek(file, SeekFrom::Data(at)) {
            Ok(data) => data.min(end),
            // No data follows.
            Err(Errno::NXIO) => break,
            Err(_) => return enough,
        };
        let hole = seek(file, SeekFrom::Hole(data)).unwrap_or(end).min(end);
        found += hole - data.min(hole);
        // Forward in any case, also if another program changes the file meanwhile.
        at = hole.max(at + 1);
    }
    found
}

/// A chunk as it stands in a file: a [`Chunk`] whose records were checked, with when and where it was written.
#[derive(Clone, Copy, Debug)]
pub struct FileChunk<'a> {
    chunk: Chunk<'a>,
    written: u64,
    offset: u64,
}

impl FileChunk<'_> {
    /// When it was written, by the clock of the writer's machine. In a file of `pelton record` that is when it arrived:
    /// [`Chunk::arrived_at`].
    pub fn written_at(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_nanos(self.written)
    }

    /// Its byte offset in the file.
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

impl<'a> Deref for FileChunk<'a> {
    type Target = Chunk<'a>;

    /// The chunk as the sink got it. [`Chunk::peer`] is this writer's own process if one of its threads sent the
    /// messages.
    fn deref(&self) -> &Chunk<'a> {
        &self.chunk
    }
}
