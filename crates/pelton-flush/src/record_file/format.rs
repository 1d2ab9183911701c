//! The bytes of a record file, as `spec/record-file.md` defines them, and the search for chunks in arbitrary bytes.

use pelton_channel::LaneId;
use pelton_channel::{Error, Result};
use pelton_lane::{record_bytes, seq_after};
use pelton_os::Peer;
use rustix::fd::AsFd;
use std::path::Path;

pub(super) const MAGIC: [u8; 8] = *b"pelton-F";
pub(super) const VERSION: u32 = 1;
/// Bytes of the file's header, and of each chunk's.
pub(super) const HEADER: u64 = 64;
const CHUNK_MAGIC: [u8; 4] = *b"pchk";

/// Records of one lane.
pub(super) const KIND_RECORDS: u16 = 0;
/// The last numbers of lanes whose records are in earlier files of the rotation.
pub(super) const KIND_LAST: u16 = 1;
/// Chunks of records, compressed together.
pub(super) const KIND_COMPRESSED: u16 = 2;
/// A reader may skip unknown kinds from here on.
const KIND_OPTIONAL: u16 = 0x8000;
/// How many messages and which times are before this place of the file.
pub(super) const KIND_SEEK_POINT: u16 = 0x8000;
/// In a chunk of [`KIND_LAST`] or [`KIND_COMPRESSED`]: a lane, its last number, and 4 bytes of zeros.
pub(super) const LAST_ENTRY: usize = 24;
/// The most entries: eight times as many lanes as a receiver has.
pub(super) const LAST_ENTRIES_MAX: usize = 8 * pelton_lane::LANES_MAX as usize;
const LAST_BYTES_MAX: u64 = (LAST_ENTRY * LAST_ENTRIES_MAX) as u64;
const FLAG_PEER: u16 = 1;
const FLAG_ARRIVED: u16 = 2;
/// The most bytes of records in a chunk: the largest lane's capacity.
pub(super) const CHUNK_BYTES_MAX: u64 = pelton_lane::CAPACITY_MAX;

/// The most bytes that a compressed chunk contains: a reader needs so much memory for it.
pub(super) const CONTENT_BYTES_MAX: u64 = 64 << 20;

/// Bytes of one read: a chunk's header, and several of them if chunks are small. A guess.
const WINDOW: usize = 16 << 10;
/// Bytes that one step of a verification reads.
const PIECE: u64 = 1 << 20;

/// The header of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileHeader {
    /// Nanoseconds since 1970.
    pub created: u64,
    /// Its position in the rotation: 1 for the first file.
    pub number: u64,
    /// Random. The checksums of chunk headers begin with it. So a process that only chooses payloads cannot forge such
    /// a header, and a chunk of another file is never taken for one of this.
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

    /// Decodes the beginning of a file; or returns what is wrong with it.
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

/// The header before a chunk's records.
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
    /// Whether that is the time at which the writer found the messages in the lane.
    pub is_arrival: bool,
    pub checksum: u32,
}

impl ChunkHeader {
    pub fn bytes(&self, file: &FileHeader) -> [u8; HEADER as usize] {
        let mut bytes = [0; HEADER as usize];
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        let flags = flag(self.peer.is_some(), FLAG_PEER) | flag(self.is_arrival, FLAG_ARRIVED);
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

    /// Decodes a chunk's header; `left` bytes remain in the file from there.
    pub fn of(bytes: &[u8], left: u64, file: &FileHeader) -> std::result::Result<ChunkHeader, Broken> {
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
            is_arrival: flags & FLAG_ARRIVED != 0,
            checksum: u32_at(bytes, 56),
        };
        let left_bytes = left - HEADER;
        if header.bytes > left_bytes {
            return Err(Broken::new(format!("{left_bytes} bytes of a chunk's records"), header.bytes.to_string()));
        }
        if !header.bytes.is_multiple_of(8) || header.bytes > CHUNK_BYTES_MAX {
            let wanted = format!("a multiple of 8, at most {CHUNK_BYTES_MAX}");
            return Err(Broken::new(format!("a chunk of {} bytes", header.bytes), wanted));
        }
        if header.kind == KIND_RECORDS && (header.first_seq == 0 || header.messages == 0) {
            let found = format!("{} messages from number {}", header.messages, header.first_seq);
            return Err(Broken::new(found, "at least one, from 1 on"));
        }
        if header.kind == KIND_LAST
            && (!header.bytes.is_multiple_of(LAST_ENTRY as u64) || header.bytes > LAST_BYTES_MAX)
        {
            let wanted = format!("a multiple of {LAST_ENTRY}, at most {LAST_BYTES_MAX}");
            return Err(Broken::new(format!("{} bytes of last numbers", header.bytes), wanted));
        }
        if header.kind == KIND_COMPRESSED {
            let (entries, content) = (u64::from(header.first_seq), header.content_bytes());
            let is_valid = (1..=LAST_ENTRIES_MAX as u64).contains(&entries)
                && (HEADER..=CONTENT_BYTES_MAX).contains(&content)
                && (entries * LAST_ENTRY as u64..content + 2 * LAST_BYTES_MAX).contains(&header.bytes)
                && header.messages > 0;
            if !is_valid {
                let found = format!("{content} bytes of {entries} lanes, compressed to {}", header.bytes);
                return Err(Broken::new(found, format!("at most {CONTENT_BYTES_MAX} and {LAST_ENTRIES_MAX}")));
            }
        }
        Ok(header)
    }

    /// Of a compressed chunk: the latest time of its chunks.
    pub fn last_written(&self) -> u64 {
        if self.kind == KIND_COMPRESSED { self.lane.0[0] } else { self.written }
    }

    /// Of a compressed chunk: the bytes that it contains.
    pub fn content_bytes(&self) -> u64 {
        self.lane.0[1]
    }

    /// Of a compressed chunk: the bytes of its list of lanes, before the frame.
    pub fn entries_bytes(&self) -> usize {
        self.first_seq as usize * LAST_ENTRY
    }

    /// Whether it has records, compressed or not.
    pub fn has_records(&self) -> bool {
        matches!(self.kind, KIND_RECORDS | KIND_COMPRESSED)
    }

    /// Of a seek point: the number of messages before it in the file, if it is at its own place, and no copy.
    pub fn messages_before(&self, at: u64) -> Option<u64> {
        (self.kind == KIND_SEEK_POINT && self.bytes == 0 && self.lane.0[1] == at).then_some(self.lane.0[0])
    }

    /// The seek point for this place.
    pub fn seek_point(at: u64, messages: u64, written: u64) -> ChunkHeader {
        ChunkHeader {
            kind: KIND_SEEK_POINT,
            bytes: 0,
            lane: LaneId([messages, at]),
            first_seq: 0,
            messages: 0,
            peer: None,
            written,
            is_arrival: false,
            checksum: 0,
        }
    }

    /// The chunk's bytes with its header.
    pub fn all_bytes(&self) -> u64 {
        HEADER + self.bytes
    }

    /// The number of its last message.
    pub fn last_seq(&self) -> u32 {
        crate::flush::last_seq(self.first_seq, self.messages)
    }
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

/// What was found, and what is valid there.
#[derive(Debug)]
pub(super) struct Broken {
    pub found: String,
    pub wanted: String,
}

impl Broken {
    pub fn new(found: impl Into<String>, wanted: impl Into<String>) -> Broken {
        Broken { found: found.into(), wanted: wanted.into() }
    }
}

/// Checks the records against their chunk's header.
pub(super) fn check_records(header: &ChunkHeader, records: &[u8]) -> std::result::Result<(), Broken> {
    let (mut at, mut seq) = (0, header.first_seq);
    for _ in 0..header.messages {
        let left = (records.len() - at) as u64;
        let wanted = || format!("message {seq}");
        if left < 8 {
            return Err(Broken::new(format!("the end of the chunk at byte {at} of its records"), wanted()));
        }
        let (found, bytes) = (u32_at(records, at + 4), u64::from(u32_at(records, at)));
        if found != seq {
            return Err(Broken::new(format!("message {found} at byte {at} of the chunk's records"), wanted()));
        }
        if bytes >> 31 != 0 || record_bytes(bytes) > left {
            let found = format!("message {seq} of {bytes} bytes at byte {at} of the chunk's records");
            return Err(Broken::new(found, format!("at most {}", left - 8)));
        }
        at += record_bytes(bytes) as usize;
        seq = seq_after(seq);
    }
    match records.len() - at {
        0 => Ok(()),
        left => Err(Broken::new(format!("{left} bytes after a chunk's last message"), "none")),
    }
}

/// A place in a file: so many messages are before it, and none of them is later than `written`.
#[derive(Clone, Copy, Debug)]
pub(super) struct SeekPoint {
    pub at: u64,
    pub messages: u64,
    pub written: u64,
}

/// Reads chunk headers of an open file, through a window of its bytes.
#[derive(Debug)]
pub(super) struct Scanner<F> {
    pub file: F,
    pub path: String,
    pub header: FileHeader,
    window: Vec<u8>,
    window_at: u64,
}

impl<F: AsFd> Scanner<F> {
    /// Reads and checks the file's header.
    pub fn of(file: F, path: &Path) -> Result<Scanner<F>> {
        let path = path.display().to_string();
        let header = FileHeader { created: 0, number: 0, id: 0 };
        let mut scanner = Scanner { file, path, header, window: Vec::new(), window_at: 0 };
        let begin = scanner.bytes(0, HEADER)?;
        scanner.header = match FileHeader::of(begin) {
            Ok(header) => header,
            Err(problem) => return Err(scanner.refuse(problem)),
        };
        Ok(scanner)
    }

    pub fn refuse(&self, problem: String) -> Error {
        Error::NotARecordFile { path: self.path.clone(), problem }
    }

    /// The chunk that begins at `at`, before `end`. Verifies its records if `is_verified` says so.
    pub fn chunk(
        &mut self,
        at: u64,
        end: u64,
        is_verified: impl Fn(&ChunkHeader) -> bool,
    ) -> Result<std::result::Result<ChunkHeader, Broken>> {
        let file = self.header;
        let bytes = self.bytes(at, HEADER.min(end - at))?;
        let header = match ChunkHeader::of(bytes, end - at, &file) {
            Ok(header) => header,
            Err(broken) => return Ok(Err(broken)),
        };
        if header.kind > KIND_COMPRESSED && header.kind < KIND_OPTIONAL {
            return Err(self.refuse(format!(
                "the chunk at byte {at} is of kind {}, this program knows up to {KIND_COMPRESSED}: use a pelton as new as its writer",
                header.kind
            )));
        }
        if !is_verified(&header) {
            return Ok(Ok(header));
        }
        let mut checksum = crc32fast::Hasher::new();
        let mut done = 0;
        while done < header.bytes {
            let piece = self.bytes(at + HEADER + done, PIECE.min(header.bytes - done))?;
            if piece.is_empty() {
                return Ok(Err(Broken::new(format!("{done} bytes of a chunk's records"), header.bytes.to_string())));
            }
            checksum.update(piece);
            done += piece.len() as u64;
        }
        Ok(check_checksum(&header, checksum.finalize()).map(|()| header))
    }

    /// The first valid chunk at or after `from`, at any multiple of 8. It checks each byte once: the records of a chunk
    /// with a valid header contain no other chunk.
    pub fn whole_from(&mut self, from: u64, end: u64) -> Result<Option<u64>> {
        let mut at = from.next_multiple_of(8);
        while at + HEADER <= end {
            // A payload may look like the beginning of a header every 8 bytes: what is in the window is not read again.
            let piece = if self.loaded(at) < HEADER { PIECE } else { self.loaded(at) };
            let bytes = self.bytes(at, piece.min(end - at))?;
            let found = bytes.chunks_exact(8).position(|word| word[..4] == CHUNK_MAGIC);
            let checked = bytes.len() as u64 / 8 * 8;
            match found {
                // Another program has truncated the file.
                None if checked == 0 => return Ok(None),
                None => at += checked,
                Some(word) => {
                    at += word as u64 * 8;
                    match self.chunk(at, end, |_| false)? {
                        Err(_) => at += 8,
                        Ok(header) => match self.chunk(at, end, |_| true)? {
                            Ok(_) => return Ok(Some(at)),
                            Err(_) => at += header.all_bytes(),
                        },
                    }
                }
            }
        }
        Ok(None)
    }

    /// The first seek point in `from..end`, with the number of messages before it and the latest time of those.
    pub fn seek_point_from(&mut self, from: u64, end: u64) -> Result<Option<SeekPoint>> {
        let mut at = from.next_multiple_of(8);
        while at + HEADER <= end {
            let piece = if self.loaded(at) < HEADER { PIECE } else { self.loaded(at) };
            let bytes = self.bytes(at, piece.min(end - at))?;
            let checked = bytes.len() as u64 / 8 * 8;
            let wanted = [CHUNK_MAGIC, [KIND_SEEK_POINT as u8, (KIND_SEEK_POINT >> 8) as u8, 0, 0]].concat();
            match bytes.chunks_exact(8).position(|word| word == wanted) {
                None if checked == 0 => return Ok(None),
                None => at += checked,
                Some(word) => {
                    at += word as u64 * 8;
                    if let Ok(header) = self.chunk(at, end, |_| false)?
                        && let Some(messages) = header.messages_before(at)
                    {
                        return Ok(Some(SeekPoint { at, messages, written: header.written }));
                    }
                    at += 8;
                }
            }
        }
        Ok(None)
    }

    /// The error for damage at `at`, and the next valid chunk. It does not search the records of a chunk whose header
    /// is valid.
    pub fn damage(&mut self, at: u64, end: u64, broken: Broken) -> Result<(Option<u64>, Error)> {
        let from = match self.chunk(at, end, |_| false)? {
            Ok(header) => at + header.all_bytes(),
            Err(_) => at + 8,
        };
        let next = self.whole_from(from, end)?;
        Ok((next, self.damaged(at, broken, next)))
    }

    pub fn damaged(&self, offset: u64, broken: Broken, next: Option<u64>) -> Error {
        let Broken { found, wanted } = broken;
        Error::Damaged { path: self.path.clone(), offset, found, wanted, next }
    }

    /// Up to `wanted` bytes from `at` on: fewer only at the end of the file.
    pub fn bytes(&mut self, at: u64, wanted: u64) -> Result<&[u8]> {
        let is_loaded = wanted <= self.loaded(at);
        let wanted = wanted as usize;
        if !is_loaded {
            self.window_at = at;
            self.window.resize(wanted.max(WINDOW), 0);
            let read = read_at(&self.file, &mut self.window, at);
            self.window.truncate(*read.as_ref().unwrap_or(&0));
            read.map_err(Error::system(format!("reading {}", self.path)))?;
        }
        let from = (at - self.window_at) as usize;
        Ok(&self.window[from..self.window.len().min(from + wanted)])
    }

    /// How many bytes the window has from `at` on.
    fn loaded(&self, at: u64) -> u64 {
        if at < self.window_at { 0 } else { (self.window_at + self.window.len() as u64).saturating_sub(at) }
    }

    /// Empties the window, because a live writer may have changed those bytes.
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

/// Fills `bytes` from `at` on. Returns how many bytes the file had.
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
