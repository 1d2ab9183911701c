//! Compressed chunks: chunks of records in one zstd frame, behind the last number of each of their lanes. So a writer
//! finds those numbers without decompressing, and a reader skips a frame by its header.

use super::format::{Broken, ChunkHeader, FileHeader, HEADER, KIND_COMPRESSED, LAST_ENTRIES_MAX};
use super::lanes::Lanes;
use pelton_channel::LaneId;
use std::fmt;
use std::io;
use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::{compress_bound, find_frame_compressed_size};

/// A frame gets chunks until it has this many bytes: a seek decompresses so many. A guess; larger ones compress little
/// better.
const FRAME_BYTES: usize = 1 << 20;
/// zstd's own default.
const LEVEL: i32 = 3;

/// Collects chunks, and encodes them as compressed chunks.
pub(super) struct Frames {
    compressor: Compressor<'static>,
    /// The chunks of the next frame, as they would be in a file.
    content: Vec<u8>,
    lanes: Lanes,
    messages: u32,
    first_written: u64,
    last_written: u64,
    is_arrival: bool,
    /// A compressed frame.
    frame: Vec<u8>,
    /// What was encoded since `begin`.
    encoded: Vec<u8>,
}

impl Frames {
    pub(super) fn new() -> io::Result<Frames> {
        Ok(Frames {
            compressor: Compressor::new(LEVEL)?,
            content: Vec::new(),
            lanes: Lanes::default(),
            messages: 0,
            first_written: 0,
            last_written: 0,
            is_arrival: false,
            frame: Vec::new(),
            encoded: Vec::new(),
        })
    }

    /// Begins to encode.
    pub(super) fn begin(&mut self) {
        self.encoded.clear();
        self.content.clear();
    }

    /// Adds a chunk: its records are copied once, before their checksum is computed.
    pub(super) fn add(&mut self, mut header: ChunkHeader, records: &[u8], file: &FileHeader) -> io::Result<()> {
        if self.content.is_empty() {
            (self.lanes, self.messages, self.first_written) = (Lanes::default(), 0, header.written);
            (self.last_written, self.is_arrival) = (header.written, header.is_arrival);
        }
        let at = self.content.len();
        self.content.resize(at + HEADER as usize, 0);
        self.content.extend_from_slice(records);
        header.checksum = crc32fast::hash(&self.content[at + HEADER as usize..]);
        self.content[at..at + HEADER as usize].copy_from_slice(&header.bytes(file));
        self.lanes.note(header.lane, header.last_seq());
        self.messages += header.messages;
        self.last_written = self.last_written.max(header.written);
        if self.content.len() >= FRAME_BYTES || self.lanes.len() >= LAST_ENTRIES_MAX / 2 {
            self.end_frame(file)?;
        }
        Ok(())
    }

    /// What was added since `begin`, as compressed chunks.
    pub(super) fn encoded(&mut self, file: &FileHeader) -> io::Result<&[u8]> {
        if !self.content.is_empty() {
            self.end_frame(file)?;
        }
        Ok(&self.encoded)
    }

    fn end_frame(&mut self, file: &FileHeader) -> io::Result<()> {
        self.frame.clear();
        self.frame.reserve(compress_bound(self.content.len()));
        self.compressor.compress_to_buffer(&self.content, &mut self.frame)?;
        let entries = self.lanes.bytes();
        let begin = self.encoded.len();
        self.encoded.resize(begin + HEADER as usize, 0);
        self.encoded.extend_from_slice(&entries);
        self.encoded.extend_from_slice(&self.frame);
        self.encoded.resize(self.encoded.len().next_multiple_of(8), 0);
        let (header, body) = self.encoded[begin..].split_at_mut(HEADER as usize);
        let of_frame = ChunkHeader {
            kind: KIND_COMPRESSED,
            bytes: body.len() as u64,
            lane: LaneId([self.last_written, self.content.len() as u64]),
            first_seq: self.lanes.len() as u32,
            messages: self.messages,
            peer: None,
            written: self.first_written,
            is_arrival: self.is_arrival,
            checksum: crc32fast::hash(body),
        };
        header.copy_from_slice(&of_frame.bytes(file));
        self.content.clear();
        Ok(())
    }
}

impl fmt::Debug for Frames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frames").field("content", &self.content.len()).finish_non_exhaustive()
    }
}

/// Decompresses the bytes behind the header of a compressed chunk, whose checksum matches, into `content`.
pub(super) fn decompress(header: &ChunkHeader, bytes: &[u8], content: &mut Vec<u8>) -> Result<(), Broken> {
    let broken = |found: String| Broken::new(found, "a frame of zstd".to_owned());
    content.clear();
    // Behind the frame are zeros up to the next multiple of 8.
    let frame = &bytes[header.entries_bytes()..];
    let size = find_frame_compressed_size(frame).map_err(|_| broken(format!("{} other bytes", frame.len())))?;
    // The header's check bounds it.
    let wanted = header.content_bytes() as usize;
    if content.try_reserve_exact(wanted).is_err() {
        return Err(Broken::new(format!("a frame of {wanted} bytes"), "less than there is memory"));
    }
    let mut decompressor = Decompressor::new().map_err(|error| broken(error.to_string()))?;
    let frame = &frame[..size];
    let found =
        decompressor.decompress_to_buffer(frame, content).map_err(|error| broken(format!("{error} in a frame")))?;
    match found == wanted {
        true => Ok(()),
        false => Err(Broken::new(format!("a frame of {found} bytes"), wanted.to_string())),
    }
}
