//! Record files: chunks to write, and the reading of their content.

use super::*;
use pelton::{Chunk, LaneId, Peer, RecordFile, RecordReader, Sink as _};
use std::path::{Path, PathBuf};

/// A chunk that owns its bytes.
#[derive(Clone, Debug)]
pub struct Owned {
    pub lane: LaneId,
    pub peer: Option<Peer>,
    pub first_seq: u32,
    pub messages: u32,
    pub bytes: Vec<u8>,
}

impl Owned {
    pub fn run(&self) -> Chunk<'_> {
        Chunk::new(self.lane, self.peer, self.first_seq, self.messages, &self.bytes)
    }
}

pub fn lane(number: u64) -> LaneId {
    LaneId([number, !number])
}

pub fn seq_after(seq: u32) -> u32 {
    seq.checked_add(1).unwrap_or(1)
}

/// Messages of many sizes, whose payloads contain their numbers; the padding is not zero.
pub fn run(of: u64, first_seq: u32, messages: u32) -> Owned {
    let (mut bytes, mut one, mut seq) = (Vec::new(), Vec::new(), first_seq);
    for _ in 0..messages {
        payload(u64::from(seq) << 8 | of, seq as usize * 37 % 300, &mut one);
        bytes.extend((u64::from(seq) << 32 | one.len() as u64).to_le_bytes());
        bytes.extend(&one);
        bytes.resize(bytes.len().next_multiple_of(8), 0xee);
        seq = seq_after(seq);
    }
    Owned { lane: lane(of), peer: None, first_seq, messages, bytes }
}

pub fn write(file: &mut RecordFile, runs: &[Owned]) {
    file.write(&runs.iter().map(Owned::run).collect::<Vec<_>>()).unwrap();
}

/// Reads the whole chunks from the start, and checks each payload. Returns each chunk as lane, first number and
/// count.
pub fn read(path: &Path) -> (Vec<(u64, u32, u32)>, Option<Error>) {
    let mut reader = RecordReader::open(path).unwrap();
    let (mut found, mut wanted) = (Vec::new(), Vec::new());
    loop {
        match reader.next_chunk() {
            Ok(Some(chunk)) => {
                let (of, mut seq, mut count) = (chunk.lane().0[0], chunk.first_seq(), 0);
                for record in chunk.records() {
                    payload(u64::from(seq) << 8 | of, seq as usize * 37 % 300, &mut wanted);
                    assert_eq!((record.seq(), record.payload()), (seq, &wanted[..]));
                    (seq, count) = (seq_after(seq), count + 1);
                }
                assert_eq!(count, chunk.message_count());
                found.push((of, chunk.first_seq(), chunk.message_count()));
            }
            Ok(None) => return (found, None),
            Err(error) => return (found, Some(error)),
        }
    }
}

pub fn dir_and_path() -> (TestDir, PathBuf) {
    let dir = TestDir::unwatched();
    let path = dir.path().join("log");
    (dir, path)
}
