//! Reading a record file: chunk by chunk, each checked before anything of it is given out.

use super::format::{Broken, ChunkHeader, Chunks, HEADER, KIND_RUN, check_checksum, check_records, read_at, record_at};
use crate::flush::Run;
use pelton_channel::LaneId;
use pelton_channel::{Error, Result};
use pelton_lane::seq_after;
use pelton_os::Peer;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Reads the records of a file that a [`RecordFile`](crate::RecordFile) wrote, or is writing.
///
/// Whatever the bytes of the file are, it gives out what is as the format says or an error that says where it is not.
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
    file: File,
    chunks: Chunks,
    /// Where the next chunk begins.
    at: u64,
    records: Vec<u8>,
}

impl RecordReader {
    /// Opens a file. Nobody is kept from writing to it.
    ///
    /// # Errors
    /// [`Error::NotARecordFile`]: it is something else, or of a version that this program does not know. [`Error::System`]: it cannot
    /// be opened or read.
    pub fn open(path: impl AsRef<Path>) -> Result<RecordReader> {
        let path = path.as_ref();
        let what = || format!("opening {}", path.display());
        // Without waiting for the writer of a FIFO, which is then refused.
        let opened = File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path);
        let file = opened.map_err(Error::system(what()))?;
        if !file.metadata().map_err(Error::system(what()))?.is_file() {
            let problem = "it is not a regular file".to_owned();
            return Err(Error::NotARecordFile { path: path.display().to_string(), problem });
        }
        let chunks = Chunks::of(file.as_fd(), path)?;
        Ok(RecordReader { file, chunks, at: HEADER, records: Vec::new() })
    }

    /// The next chunk, all of which has been checked; `None` at the end of the file, where a writer may add more: then it can be
    /// asked again.
    ///
    /// # Errors
    /// [`Error::Damaged`]: what is there is not as the format says. It tells whether something whole comes after it; then the next
    /// call goes on with that, and if not, it looks at the same place again: a torn tail is what a killed writer leaves, or a live
    /// one that is writing. [`Error::NotARecordFile`]: a chunk of a later version. [`Error::System`]: reading failed.
    pub fn next_chunk(&mut self) -> Result<Option<Chunk<'_>>> {
        let header = loop {
            let end = self.file.metadata().map_err(Error::system(format!("reading {}", self.chunks.path)))?.len();
            if end <= self.at {
                self.chunks.forget();
                return Ok(None);
            }
            let found = match self.chunks.chunk(self.file.as_fd(), self.at, end, false)? {
                Ok(header) if header.kind == KIND_RUN => self.read_records(header)?,
                Ok(_) => self.chunks.chunk(self.file.as_fd(), self.at, end, true)?,
                broken => broken,
            };
            match found {
                Ok(header) if header.kind == KIND_RUN => break header,
                Ok(header) => self.at += header.all_bytes(),
                Err(broken) => {
                    let (next, error) = self.chunks.damage(self.file.as_fd(), self.at, end, broken)?;
                    self.chunks.forget();
                    self.at = next.unwrap_or(self.at);
                    return Err(error);
                }
            }
        };
        let offset = self.at;
        self.at += header.all_bytes();
        match check_records(&header, &self.records) {
            Ok(()) => Ok(Some(Chunk { header, offset, records: &self.records })),
            // It was written so: whatever comes after it is as good as anything.
            Err(broken) => Err(self.chunks.damaged(offset, broken, Some(self.at))),
        }
    }

    /// Reads the records of the chunk here, and compares their checksum.
    fn read_records(&mut self, header: ChunkHeader) -> Result<std::result::Result<ChunkHeader, Broken>> {
        let what = || format!("reading {} bytes of {}", header.bytes, self.chunks.path);
        let bytes = header.bytes as usize;
        let reserved = self.records.try_reserve(bytes.saturating_sub(self.records.len()));
        reserved.map_err(|_| Error::system(what())(std::io::ErrorKind::OutOfMemory.into()))?;
        self.records.resize(bytes, 0);
        let read = read_at(&self.file, &mut self.records, self.at + HEADER).map_err(Error::system(what()))?;
        // What is not there any more, as the file has become shorter meanwhile, is no part of it.
        Ok(check_checksum(&header, crc32fast::hash(&self.records[..read])).map(|()| header))
    }

    /// The file's place in its rotation: 1 for the first.
    pub fn number(&self) -> u64 {
        self.chunks.header.number
    }

    /// When the file was begun.
    pub fn created_at(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_nanos(self.chunks.header.created)
    }
}

/// Messages of one lane that were written at once.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    header: ChunkHeader,
    offset: u64,
    records: &'a [u8],
}

impl<'a> Chunk<'a> {
    /// Whose they are.
    pub fn lane(&self) -> LaneId {
        self.header.lane
    }

    /// Who sent them: of a thread of the writer, its own process. `None` of a path channel's sender that the writer had not met.
    pub fn peer(&self) -> Option<Peer> {
        self.header.peer
    }

    /// The number of the first one.
    pub fn first_seq(&self) -> u32 {
        self.header.first_seq
    }

    /// The number of the last one.
    pub fn last_seq(&self) -> u32 {
        self.header.last_seq()
    }

    /// How many there are, at least one.
    pub fn messages(&self) -> u32 {
        self.header.messages
    }

    /// When they were written, by the clock of the writer's machine.
    pub fn written_at(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_nanos(self.header.written)
    }

    /// Where in the file the chunk begins.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// As they were given to the sink.
    pub fn run(&self) -> Run<'a> {
        Run::new(self.lane(), self.peer(), self.first_seq(), self.messages(), self.records)
    }

    /// One by one.
    pub fn records(&self) -> Records<'a> {
        Records { records: self.records, at: 0, seq: self.header.first_seq }
    }
}

/// The records of a chunk.
#[derive(Clone, Debug)]
pub struct Records<'a> {
    records: &'a [u8],
    at: usize,
    seq: u32,
}

impl<'a> Iterator for Records<'a> {
    type Item = Record<'a>;

    fn next(&mut self) -> Option<Record<'a>> {
        if self.at == self.records.len() {
            return None;
        }
        // All of them have been looked at before.
        let (payload, next) = record_at(self.records, self.at, self.seq).ok()?;
        let record = Record { seq: self.seq, payload: &self.records[payload] };
        (self.at, self.seq) = (next, seq_after(self.seq));
        Some(record)
    }
}

/// A message as it stands in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    seq: u32,
    payload: &'a [u8],
}

impl<'a> Record<'a> {
    /// Its number in its lane.
    pub fn seq(&self) -> u32 {
        self.seq
    }

    /// What was sent.
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }
}
