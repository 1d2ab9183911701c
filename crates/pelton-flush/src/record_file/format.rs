//! The bytes of a record file, as `spec/record-file.md` says them, and finding chunks among bytes that may be anything.

use pelton_channel::LaneId;
use pelton_channel::{Error, Result};
use pelton_lane::{record_bytes, seq_after};
use pelton_os::Peer;
use rustix::fd::{AsFd, BorrowedFd};
use std::path::Path;

pub(super) const MAGIC: [u8; 8] = *b"pelton-F";
pub(super) const VERSION: u32 = 1;
/// Bytes of the file's header, and of each chunk's.
pub(super) const HEADER: u64 = 64;
const CHUNK_MAGIC: [u8; 4] = *b"pchk";

/// The records of a run.
pub(super) const KIND_RUN: u16 = 0;
/// The last numbers of lanes whose records are in earlier files of the rotation.
pub(super) const KIND_LAST: u16 = 1;
/// Kinds from here on say something that a reader who does not know them may pass over.
const KIND_OPTIONAL: u16 = 0x8000;
/// In a chunk of [`KIND_LAST`]: a lane, its last number, and 4 bytes of zeros.
pub(super) const LAST_ENTRY: usize = 24;
/// The most of them: eight times as many lanes as a receiver has.
pub(super) const LAST_ENTRIES_MAX: usize = 8 * pelton_lane::LANES_MAX as usize;
const LAST_BYTES_MAX: u64 = (LAST_ENTRY * LAST_ENTRIES_MAX) as u64;
const FLAG_PEER: u16 = 1;
/// The most bytes of records in a chunk: what the largest lane holds.
pub(super) const CHUNK_BYTES_MAX: u64 = pelton_lane::CAPACITY_MAX;

/// Looked at with one read: a chunk's header, and with small chunks several of them. A guess.
const WINDOW: usize = 16 << 10;
/// Checked at a time, where the bytes are not wanted for anything else.
const PIECE: u64 = 1 << 20;

/// What stands at the beginning of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileHeader {
    /// Nanoseconds since 1970.
    pub created: u64,
    /// Its place in the rotation: 1 for the first file.
    pub number: u64,
    /// Random. The checksums of chunk headers begin with it, so that nobody who only has payloads written can make such a
    /// header, and none of another file is taken for one of this.
    pub id: u64,
}

impl FileHeader {
    pub fn bytes(&self) -> [u8; HEADER as usize] {
        let mut bytes = [0; HEADER as usize];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(HEADER as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.created.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.number.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.id.to_le_bytes());
        let checksum = crc32fast::hash(&bytes[..60]);
        bytes[60..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Of what is at the beginning of a file; or what is wrong with it.
    pub fn of(bytes: &[u8]) -> std::result::Result<FileHeader, String> {
        if bytes.len() < HEADER as usize {
            return Err(format!("it has {} bytes, a record file at least {HEADER}: move it away", bytes.len()));
        }
        if bytes[..8] != MAGIC {
            let found = bytes[..8].escape_ascii();
            return Err(format!("it begins with \"{found}\", a record file with \"{}\"", MAGIC.escape_ascii()));
        }
        let (found, wanted) = (u32_at(bytes, 60), crc32fast::hash(&bytes[..60]));
        if found != wanted {
            return Err(format!("the checksum of its header is {found:#010x}, wanted {wanted:#010x}: move it away"));
        }
        let version = u32_at(bytes, 8);
        if version != VERSION || u64::from(u32_at(bytes, 12)) != HEADER {
            return Err(format!(
                "it has version {version}, this program knows {VERSION}: use a pelton as new as its writer"
            ));
        }
        let unknown = u64_at(bytes, 40);
        if unknown != 0 {
            return Err(format!(
                "it requires feature {}, which this program does not know: use a pelton as new as its writer",
                unknown.trailing_zeros()
            ));
        }
        Ok(FileHeader { created: u64_at(bytes, 16), number: u64_at(bytes, 24), id: u64_at(bytes, 32) })
    }
}

/// What stands before a chunk's records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChunkHeader {
    pub kind: u16,
    /// Of the records.
    pub bytes: u64,
    pub lane: LaneId,
    pub first_seq: u32,
    pub messages: u32,
    pub peer: Option<Peer>,
    /// Nanoseconds since 1970.
    pub written: u64,
    pub checksum: u32,
}

impl ChunkHeader {
    pub fn bytes(&self, file: &FileHeader) -> [u8; HEADER as usize] {
        let mut bytes = [0; HEADER as usize];
        let flags = if self.peer.is_some() { FLAG_PEER } else { 0 };
        bytes[..4].copy_from_slice(&CHUNK_MAGIC);
        bytes[4..6].copy_from_slice(&self.kind.to_le_bytes());
        bytes[6..8].copy_from_slice(&flags.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.lane.0[0].to_le_bytes());
        bytes[24..32].copy_from_slice(&self.lane.0[1].to_le_bytes());
        bytes[32..36].copy_from_slice(&self.first_seq.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.messages.to_le_bytes());
        if let Some(peer) = self.peer {
            bytes[40..44].copy_from_slice(&peer.pid.to_le_bytes());
            bytes[44..48].copy_from_slice(&peer.uid.to_le_bytes());
        }
        bytes[48..56].copy_from_slice(&self.written.to_le_bytes());
        bytes[56..60].copy_from_slice(&self.checksum.to_le_bytes());
        let checksum = header_checksum(file, &bytes);
        bytes[60..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Of what is where a chunk should begin, which reaches to `left` bytes from there at most.
    fn of(bytes: &[u8], left: u64, file: &FileHeader) -> std::result::Result<ChunkHeader, Broken> {
        if bytes.len() < HEADER as usize {
            return Err(Broken::new(format!("{} bytes", bytes.len()), format!("a chunk's header of {HEADER}")));
        }
        if bytes[..4] != CHUNK_MAGIC {
            let found = bytes[..4].escape_ascii();
            return Err(Broken::new(format!("\"{found}\""), format!("a chunk, \"{}\"", CHUNK_MAGIC.escape_ascii())));
        }
        let (found, wanted) = (u32_at(bytes, 60), header_checksum(file, bytes));
        if found != wanted {
            return Err(Broken::new(format!("a chunk's header of checksum {found:#010x}"), format!("{wanted:#010x}")));
        }
        let flags = u16_at(bytes, 6);
        let header = ChunkHeader {
            kind: u16_at(bytes, 4),
            bytes: u64_at(bytes, 8),
            lane: LaneId([u64_at(bytes, 16), u64_at(bytes, 24)]),
            first_seq: u32_at(bytes, 32),
            messages: u32_at(bytes, 36),
            peer: (flags & FLAG_PEER != 0).then(|| Peer { pid: u32_at(bytes, 40), uid: u32_at(bytes, 44) }),
            written: u64_at(bytes, 48),
            checksum: u32_at(bytes, 56),
        };
        let room = left - HEADER;
        if header.bytes > room {
            return Err(Broken::new(format!("{room} bytes of a chunk's records"), header.bytes.to_string()));
        }
        if !header.bytes.is_multiple_of(8) || header.bytes > CHUNK_BYTES_MAX {
            let wanted = format!("a multiple of 8, at most {CHUNK_BYTES_MAX}");
            return Err(Broken::new(format!("a chunk of {} bytes", header.bytes), wanted));
        }
        if header.kind == KIND_RUN && (header.first_seq == 0 || header.messages == 0) {
            let found = format!("{} messages from number {}", header.messages, header.first_seq);
            return Err(Broken::new(found, "at least one, from 1 on"));
        }
        if header.kind == KIND_LAST
            && (!header.bytes.is_multiple_of(LAST_ENTRY as u64) || header.bytes > LAST_BYTES_MAX)
        {
            let wanted = format!("a multiple of {LAST_ENTRY}, at most {LAST_BYTES_MAX}");
            return Err(Broken::new(format!("{} bytes of last numbers", header.bytes), wanted));
        }
        Ok(header)
    }

    /// With its header.
    pub fn all_bytes(&self) -> u64 {
        HEADER + self.bytes
    }

    /// The number of its last message.
    pub fn last_seq(&self) -> u32 {
        last_seq(self.first_seq, self.messages)
    }
}

/// The number of the last of so many messages, at least one: numbers are 1 to 2^32 - 1, and begin again.
pub(super) fn last_seq(first_seq: u32, messages: u32) -> u32 {
    let last = u64::from(first_seq) + u64::from(messages) - 1;
    (if last > u64::from(u32::MAX) { last - u64::from(u32::MAX) } else { last }) as u32
}

fn header_checksum(file: &FileHeader, bytes: &[u8]) -> u32 {
    let mut checksum = crc32fast::Hasher::new();
    checksum.update(&file.id.to_le_bytes());
    checksum.update(&bytes[..60]);
    checksum.finalize()
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// What is not as it should be.
#[derive(Debug)]
pub(super) struct Broken {
    pub found: String,
    pub wanted: String,
}

impl Broken {
    fn new(found: impl Into<String>, wanted: impl Into<String>) -> Broken {
        Broken { found: found.into(), wanted: wanted.into() }
    }
}

/// The record at `at`: its payload's place, and where the next one begins.
pub(super) fn record_at(
    records: &[u8],
    at: usize,
    seq: u32,
) -> std::result::Result<(std::ops::Range<usize>, usize), Broken> {
    let left = (records.len() - at) as u64;
    if left < 8 {
        return Err(Broken::new(format!("the end of the chunk at byte {at} of its records"), format!("message {seq}")));
    }
    let (found, bytes) = (u32_at(records, at + 4), u64::from(u32_at(records, at)));
    if found != seq {
        return Err(Broken::new(
            format!("message {found} at byte {at} of the chunk's records"),
            format!("message {seq}"),
        ));
    }
    if bytes >> 31 != 0 || record_bytes(bytes) > left {
        return Err(Broken::new(
            format!("message {seq} of {bytes} bytes at byte {at} of the chunk's records"),
            format!("at most {}", left - 8),
        ));
    }
    let payload = at + 8..at + 8 + bytes as usize;
    Ok((payload, at + record_bytes(bytes) as usize))
}

/// Whether the records are those that the header tells of.
pub(super) fn check_records(header: &ChunkHeader, records: &[u8]) -> std::result::Result<(), Broken> {
    let (mut at, mut seq) = (0, header.first_seq);
    for _ in 0..header.messages {
        at = record_at(records, at, seq)?.1;
        seq = seq_after(seq);
    }
    match records.len() - at {
        0 => Ok(()),
        left => Err(Broken::new(format!("{left} bytes after a chunk's last message"), "none")),
    }
}

/// An open file whose chunks are looked for.
#[derive(Debug)]
pub(super) struct Chunks {
    pub path: String,
    pub header: FileHeader,
    window: Vec<u8>,
    window_at: u64,
}

impl Chunks {
    /// Of a file that says that it is one.
    pub fn of(fd: BorrowedFd<'_>, path: &Path) -> Result<Chunks> {
        let path = path.display().to_string();
        let header = FileHeader { created: 0, number: 0, id: 0 };
        let mut chunks = Chunks { path, header, window: Vec::new(), window_at: 0 };
        let begin = chunks.bytes(fd, 0, HEADER)?;
        chunks.header = match FileHeader::of(begin) {
            Ok(header) => header,
            Err(problem) => return Err(chunks.refuse(problem)),
        };
        Ok(chunks)
    }

    pub fn refuse(&self, problem: String) -> Error {
        Error::NotARecordFile { path: self.path.clone(), problem }
    }

    /// The chunk that begins at `at`, before `end`, with its records checked if that is asked for.
    pub fn chunk(
        &mut self,
        fd: BorrowedFd<'_>,
        at: u64,
        end: u64,
        verify: bool,
    ) -> Result<std::result::Result<ChunkHeader, Broken>> {
        let file = self.header;
        let bytes = self.bytes(fd, at, HEADER.min(end - at))?;
        let header = match ChunkHeader::of(bytes, end - at, &file) {
            Ok(header) => header,
            Err(broken) => return Ok(Err(broken)),
        };
        if header.kind > KIND_LAST && header.kind < KIND_OPTIONAL {
            return Err(self.refuse(format!(
                "the chunk at byte {at} is of kind {}, this program knows up to {KIND_LAST}: use a pelton as new as its writer",
                header.kind
            )));
        }
        if !verify {
            return Ok(Ok(header));
        }
        let mut checksum = crc32fast::Hasher::new();
        let mut done = 0;
        while done < header.bytes {
            let piece = self.bytes(fd, at + HEADER + done, PIECE.min(header.bytes - done))?;
            if piece.is_empty() {
                return Ok(Err(Broken::new(format!("{done} bytes of a chunk's records"), header.bytes.to_string())));
            }
            checksum.update(piece);
            done += piece.len() as u64;
        }
        Ok(check_checksum(&header, checksum.finalize()).map(|()| header))
    }

    /// The first whole chunk at or after `from`, wherever it begins. Each byte is checked once: the records of a header that is as
    /// it should be hold no other.
    pub fn whole_from(&mut self, fd: BorrowedFd<'_>, from: u64, end: u64) -> Result<Option<u64>> {
        let mut at = from.next_multiple_of(8);
        while at + HEADER <= end {
            let bytes = self.bytes(fd, at, PIECE.min(end - at))?;
            let found = bytes.chunks_exact(8).position(|word| word[..4] == CHUNK_MAGIC);
            let looked = bytes.len() as u64 / 8 * 8;
            match found {
                // The file has become shorter.
                None if looked == 0 => return Ok(None),
                None => at += looked,
                Some(word) => {
                    at += word as u64 * 8;
                    match self.chunk(fd, at, end, false)? {
                        Err(_) => at += 8,
                        Ok(header) => match self.chunk(fd, at, end, true)? {
                            Ok(_) => return Ok(Some(at)),
                            Err(_) => at += header.all_bytes(),
                        },
                    }
                }
            }
        }
        Ok(None)
    }

    /// What is broken at `at`, with whether anything whole comes after it. Of a chunk whose header is as it should be nothing is
    /// looked for in its records.
    pub fn damage(&mut self, fd: BorrowedFd<'_>, at: u64, end: u64, broken: Broken) -> Result<(Option<u64>, Error)> {
        let from = match self.chunk(fd, at, end, false)? {
            Ok(header) => at + header.all_bytes(),
            Err(_) => at + 8,
        };
        let next = self.whole_from(fd, from, end)?;
        Ok((next, self.damaged(at, broken, next)))
    }

    pub fn damaged(&self, offset: u64, broken: Broken, next: Option<u64>) -> Error {
        let Broken { found, wanted } = broken;
        Error::Damaged { path: self.path.clone(), offset, found, wanted, next }
    }

    /// Up to `wanted` bytes from `at` on: fewer only at the end of the file.
    pub fn bytes(&mut self, fd: BorrowedFd<'_>, at: u64, wanted: u64) -> Result<&[u8]> {
        let wanted = wanted as usize;
        let there = self.window_at <= at && at + wanted as u64 <= self.window_at + self.window.len() as u64;
        if !there {
            self.window_at = at;
            self.window.resize(wanted.max(WINDOW), 0);
            let read = read_at(fd, &mut self.window, at);
            self.window.truncate(*read.as_ref().unwrap_or(&0));
            read.map_err(Error::system(format!("reading {}", self.path)))?;
        }
        let from = (at - self.window_at) as usize;
        Ok(&self.window[from..self.window.len().min(from + wanted)])
    }

    /// Where a live writer may have written since.
    pub fn forget(&mut self) {
        self.window.clear();
    }
}

pub(super) fn check_checksum(header: &ChunkHeader, found: u32) -> std::result::Result<(), Broken> {
    match header.checksum {
        wanted if wanted == found => Ok(()),
        wanted => Err(Broken::new(format!("a chunk's records of checksum {found:#010x}"), format!("{wanted:#010x}"))),
    }
}

/// Fills `bytes` from `at` on; answers how much of it there was.
pub(super) fn read_at(fd: impl AsFd, bytes: &mut [u8], at: u64) -> std::io::Result<usize> {
    let mut read = 0;
    while read < bytes.len() {
        match rustix::io::retry_on_intr(|| rustix::io::pread(fd.as_fd(), &mut bytes[read..], at + read as u64))? {
            0 => break,
            some => read += some,
        }
    }
    Ok(read)
}
