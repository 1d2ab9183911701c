//! The last number of each written lane, for as many lanes as a rotation preserves.

use super::format::{
    ChunkHeader, HEADER, KIND_COMPRESSED, KIND_LAST, KIND_RECORDS, LAST_ENTRIES_MAX, LAST_ENTRY, Scanner, u32_at,
    u64_at,
};
use pelton_channel::LaneId;
use pelton_channel::Result;
use std::collections::HashMap;
use std::os::fd::AsFd;

/// How many lanes a rotation preserves, those written last: four times as many as a receiver has. A lane's number
/// matters only until its records are released, which is before the next write of that lane.
const LANES_REMEMBERED: usize = LAST_ENTRIES_MAX / 2;

/// The last numbers of lanes.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    last: HashMap<LaneId, Last>,
    /// Counts the writes, for `Last`.
    order: u64,
}

/// A lane's last number, and when it was written.
#[derive(Clone, Copy, Debug)]
struct Last {
    seq: u32,
    order: u64,
}

impl Lanes {
    /// The last number of a lane.
    pub(super) fn last_seq(&self, lane: LaneId) -> Option<u32> {
        self.last.get(&lane).map(|last| last.seq)
    }

    /// The number of lanes.
    #[cfg(any(test, feature = "zstd"))]
    pub(super) fn len(&self) -> usize {
        self.last.len()
    }

    /// Sets the last number of a lane.
    pub(super) fn note(&mut self, lane: LaneId, seq: u32) {
        self.order += 1;
        self.last.insert(lane, Last { seq, order: self.order });
        if self.last.len() == LAST_ENTRIES_MAX {
            self.forget_oldest();
        }
    }

    /// Notes the numbers of the chunk that begins at `at`.
    pub(super) fn note_chunk(&mut self, scanner: &mut Scanner<impl AsFd>, at: u64, header: &ChunkHeader) -> Result<()> {
        match header.kind {
            KIND_RECORDS => self.note(header.lane, header.last_seq()),
            KIND_LAST => {
                for entry in scanner.bytes(at + HEADER, header.bytes)?.to_vec().chunks_exact(LAST_ENTRY) {
                    let lane = LaneId([u64_at(entry, 0), u64_at(entry, 8)]);
                    // An entry is from an earlier file: the numbers of this file's chunks are later, wherever the entry
                    // stands.
                    if !self.last.contains_key(&lane) {
                        self.note(lane, u32_at(entry, 16));
                    }
                }
            }
            KIND_COMPRESSED => {
                let entries = scanner.bytes(at + HEADER, header.entries_bytes() as u64)?.to_vec();
                for entry in entries.chunks_exact(LAST_ENTRY) {
                    self.note(LaneId([u64_at(entry, 0), u64_at(entry, 8)]), u32_at(entry, 16));
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Takes over the numbers of `later`.
    pub(super) fn note_all(&mut self, later: &Lanes) {
        for (lane, last) in later.in_order() {
            self.note(lane, last.seq);
        }
    }

    fn forget_oldest(&mut self) {
        let lanes = self.in_order();
        for (lane, _) in &lanes[..lanes.len().saturating_sub(LANES_REMEMBERED)] {
            self.last.remove(lane);
        }
    }

    /// The lanes in the order of their last write.
    fn in_order(&self) -> Vec<(LaneId, Last)> {
        let mut lanes: Vec<(LaneId, Last)> = self.last.iter().map(|(lane, last)| (*lane, *last)).collect();
        lanes.sort_unstable_by_key(|(_, last)| last.order);
        lanes
    }

    /// Encodes a chunk of last numbers: the lanes whose records are in earlier files, in the order of their last write.
    pub(super) fn bytes(&mut self) -> Vec<u8> {
        self.forget_oldest();
        let mut bytes = Vec::with_capacity(self.last.len() * LAST_ENTRY);
        for (lane, last) in self.in_order() {
            bytes.extend(lane.0[0].to_le_bytes());
            bytes.extend(lane.0[1].to_le_bytes());
            bytes.extend(u64::from(last.seq).to_le_bytes());
        }
        bytes
    }
}
