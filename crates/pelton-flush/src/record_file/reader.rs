//! Reads a record file chunk by chunk. It checks each chunk before it returns any of its records.

use super::format::{
    Broken, ChunkHeader, HEADER, KIND_COMPRESSED, KIND_RECORDS, Scanner, SeekPoint, check_checksum, check_records,
    read_at,
};
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
/// A search by seek points ends when so many bytes are left, of which it reads the headers: about as many as between
/// two of them.
const SEARCH_BYTES_MIN: u64 = 2 << 20;
/// Most bytes from one seek point to the next: `spec/record-file.md`.
const SEEK_POINT_DISTANCE_MAX: u64 = 32 << 20;

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
    /// The chunks of the compressed chunk at `content_offset`, and where the next of them begins.
    content: Vec<u8>,
    content_at: usize,
    content_offset: u64,
}

/// The times and messages of chunks that a search could skip.
struct Span {
    /// The latest time.
    written: u64,
    messages: u32,
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
        Ok(RecordReader {
            scanner: Scanner::of(file, path)?,
            at: HEADER,
            records: Vec::new(),
            content: Vec::new(),
            content_at: 0,
            content_offset: 0,
        })
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
        loop {
            let Some(header) = self.next_header()? else { return Ok(None) };
            let (offset, begin) = (self.at, self.content_at);
            let is_inside = self.is_inside();
            let records = match is_inside {
                true => {
                    self.content_at = begin + header.all_bytes() as usize;
                    begin + HEADER as usize..self.content_at
                }
                false => {
                    self.at += header.all_bytes();
                    0..self.records.len()
                }
            };
            if header.kind == KIND_COMPRESSED {
                self.open_frame(&header, offset)?;
                continue;
            }
            let (records, offset) = match is_inside {
                true => (&self.content[records], self.content_offset),
                false => (&self.records[records], offset),
            };
            return match check_records(&header, records) {
                Ok(()) => {
                    let ChunkHeader { lane, peer, first_seq, messages, written, is_arrival, .. } = header;
                    let chunk = Chunk::new(lane, peer, first_seq, messages, records);
                    let chunk = chunk.with_arrival(is_arrival.then_some(written));
                    Ok(Some(FileChunk { chunk, written, offset }))
                }
                // The writer wrote it so. The chunks after it are independent of it.
                Err(broken) => Err(self.scanner.damaged(offset, broken, Some(self.at))),
            };
        }
    }

    /// Whether the next chunk is in a frame.
    fn is_inside(&self) -> bool {
        self.content_at < self.content.len()
    }

    /// The header of the next chunk that has records, compressed or not. Its bytes are read, and match their checksum.
    fn next_header(&mut self) -> Result<Option<ChunkHeader>> {
        if self.is_inside() {
            return match self.header_inside() {
                Ok(header) => Ok(Some(header)),
                Err(broken) => {
                    self.content.clear();
                    Err(self.scanner.damaged(self.content_offset, broken, Some(self.at)))
                }
            };
        }
        loop {
            let end = self.end()?;
            if end <= self.at {
                self.scanner.forget();
                return Ok(None);
            }
            let found = match self.scanner.chunk(self.at, end, |header| !header.has_records())? {
                Ok(header) if header.has_records() => self.read_records(header)?,
                found => found,
            };
            match found {
                Ok(header) if header.has_records() => return Ok(Some(header)),
                Ok(header) => self.at += header.all_bytes(),
                Err(broken) => {
                    let (next, error) = self.scanner.damage(self.at, end, broken)?;
                    self.scanner.forget();
                    self.at = next.unwrap_or(self.at);
                    return Err(error);
                }
            }
        }
    }

    /// The header of the next chunk of a frame, whose records match their checksum.
    fn header_inside(&self) -> std::result::Result<ChunkHeader, Broken> {
        let rest = &self.content[self.content_at..];
        let header = ChunkHeader::of(rest, rest.len() as u64, &self.scanner.header)?;
        if header.kind != KIND_RECORDS {
            return Err(Broken::new(format!("a chunk of kind {} in a frame", header.kind), KIND_RECORDS.to_string()));
        }
        let records = &rest[HEADER as usize..header.all_bytes() as usize];
        check_checksum(&header, crc32fast::hash(records)).map(|()| header)
    }

    /// Decompresses what was just read, at `offset`.
    #[cfg(feature = "zstd")]
    fn open_frame(&mut self, header: &ChunkHeader, offset: u64) -> Result<()> {
        (self.content_at, self.content_offset) = (0, offset);
        super::compressed::decompress(header, &self.records, &mut self.content).map_err(|broken| {
            self.content.clear();
            self.scanner.damaged(offset, broken, Some(self.at))
        })
    }

    #[cfg(not(feature = "zstd"))]
    fn open_frame(&mut self, _: &ChunkHeader, offset: u64) -> Result<()> {
        self.at = offset;
        Err(self.scanner.refuse(format!(
            "the chunk at byte {offset} is compressed by zstd, and this program was built without the feature `zstd`: \
             `pelton cat` reads it"
        )))
    }

    fn end(&self) -> Result<u64> {
        let found = self.scanner.file.metadata();
        Ok(found.map_err(Error::system(format!("reading {}", self.scanner.path)))?.len())
    }

    /// Skips chunks up to the first one that is not before `time`, by [`FileChunk::written_at`]. This reads headers
    /// only: of a large file a few of them, by the seek points of its writer. It checks no records.
    ///
    /// The next call of [`RecordReader::next_chunk`] returns that chunk, or reports the damage that ended the search.
    ///
    /// # Errors
    /// As [`RecordReader::next_chunk`]; [`Error::Damaged`] only for a compressed chunk.
    pub fn skip_before(&mut self, time: SystemTime) -> Result<()> {
        let time = time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        self.skip(|chunk| u128::from(chunk.written) < time, |point, _| u128::from(point.written) < time)
    }

    /// Skips `count` messages, as far as these are whole chunks. Returns how many of the next chunk's messages are
    /// still to skip; at the end of the file, how many it lacks. It reads headers only, as
    /// [`RecordReader::skip_before`].
    ///
    /// # Errors
    /// As [`RecordReader::skip_before`].
    pub fn skip_messages(&mut self, count: u64) -> Result<u64> {
        let left = std::cell::Cell::new(count);
        // The number of messages of the file before the first one that is not skipped.
        let mut wanted = None;
        self.skip(
            |chunk| match left.get().checked_sub(chunk.messages.into()) {
                Some(rest) => {
                    left.set(rest);
                    true
                }
                None => false,
            },
            |point, is_jump| {
                let wanted = *wanted.get_or_insert(point.messages.saturating_add(left.get()));
                if is_jump && point.messages <= wanted {
                    left.set(wanted - point.messages);
                }
                point.messages <= wanted
            },
        )?;
        Ok(left.get())
    }

    /// Skips chunks as long as `is_skipped`. From the first seek point on it searches the last one in front of which
    /// everything is to be skipped, by `is_before`. Its last call, with true, is for the one that the reader continues
    /// at.
    fn skip(
        &mut self,
        mut is_skipped: impl FnMut(&Span) -> bool,
        mut is_before: impl FnMut(&SeekPoint, bool) -> bool,
    ) -> Result<()> {
        let end = self.end()?;
        let mut has_searched = false;
        loop {
            while self.is_inside() {
                let Ok(header) = self.header_inside() else { return Ok(()) };
                if !is_skipped(&Span { written: header.written, messages: header.messages }) {
                    return Ok(());
                }
                self.content_at += header.all_bytes() as usize;
            }
            if self.at >= end {
                return Ok(());
            }
            let Ok(header) = self.scanner.chunk(self.at, end, |_| false)? else { return Ok(()) };
            if let Some(messages) = header.messages_before(self.at)
                && !has_searched
            {
                has_searched = true;
                let first = SeekPoint { at: self.at, messages, written: header.written };
                self.at = self.search(first, end, &mut is_before)?;
            } else if header.has_records()
                && !is_skipped(&Span { written: header.last_written(), messages: header.messages })
            {
                if header.kind == KIND_RECORDS {
                    return Ok(());
                }
                // It may begin with chunks to skip.
                let Ok(header) = self.read_records(header)? else { return Ok(()) };
                let offset = self.at;
                self.at += header.all_bytes();
                self.open_frame(&header, offset)?;
            } else {
                self.at += header.all_bytes();
            }
        }
    }

    /// Searches the last seek point for which `is_before`, by halves. Returns where it is.
    fn search(
        &mut self,
        first: SeekPoint,
        end: u64,
        mut is_before: impl FnMut(&SeekPoint, bool) -> bool,
    ) -> Result<u64> {
        let (mut low, mut high) = (first, end);
        is_before(&low, false);
        while high - low.at > SEARCH_BYTES_MIN {
            let middle = low.at + (high - low.at) / 2;
            match self.scanner.seek_point_from(middle, high.min(middle + SEEK_POINT_DISTANCE_MAX))? {
                Some(point) if is_before(&point, false) => low = point,
                _ => high = middle,
            }
        }
        is_before(&low, true);
        Ok(low.at)
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
