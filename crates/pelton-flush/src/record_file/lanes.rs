//! The last number of each lane that was written, for as many lanes as a rotation takes along.

use super::format::{ChunkHeader, Chunks, HEADER, KIND_LAST, KIND_RUN, LAST_ENTRIES_MAX, LAST_ENTRY, u32_at, u64_at};
use pelton_channel::LaneId;
use pelton_channel::Result;
use std::collections::HashMap;
use std::os::fd::BorrowedFd;

/// How many lanes are remembered over a rotation, the last that were written: four times as many as a receiver has. A lane's
/// number matters only until its records are released, which is before anything more of it is written.
const LANES_REMEMBERED: usize = LAST_ENTRIES_MAX / 2;

/// What is known of the lanes.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    last: HashMap<LaneId, Last>,
    /// Counts what was written, for `Last`.
    turn: u64,
}

/// What is known of a lane.
#[derive(Clone, Copy, Debug)]
struct Last {
    seq: u32,
    turn: u64,
}

impl Lanes {
    /// The last number of a lane.
    pub(super) fn last_seq(&self, lane: LaneId) -> Option<u32> {
        self.last.get(&lane).map(|last| last.seq)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.last.len()
    }

    /// The last number of a lane is this one now.
    pub(super) fn note(&mut self, lane: LaneId, seq: u32) {
        self.turn += 1;
        self.last.insert(lane, Last { seq, turn: self.turn });
        if self.last.len() == LAST_ENTRIES_MAX {
            self.forget_the_oldest();
        }
    }

    /// Notes what a chunk says, which begins at `at`.
    pub(super) fn note_chunk(
        &mut self,
        chunks: &mut Chunks,
        fd: BorrowedFd<'_>,
        at: u64,
        header: &ChunkHeader,
    ) -> Result<()> {
        match header.kind {
            KIND_RUN => self.note(header.lane, header.last_seq()),
            KIND_LAST => {
                for entry in chunks.bytes(fd, at + HEADER, header.bytes)?.to_vec().chunks_exact(LAST_ENTRY) {
                    let lane = LaneId([u64_at(entry, 0), u64_at(entry, 8)]);
                    // Of the files before: what this one has is later, wherever the chunk stands.
                    if !self.last.contains_key(&lane) {
                        self.note(lane, u32_at(entry, 16));
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// What `later` has is later.
    pub(super) fn note_all(&mut self, later: &Lanes) {
        for (lane, last) in later.in_order() {
            self.note(lane, last.seq);
        }
    }

    fn forget_the_oldest(&mut self) {
        let mut turns: Vec<u64> = self.last.values().map(|last| last.turn).collect();
        turns.sort_unstable();
        let first = turns[turns.len().saturating_sub(LANES_REMEMBERED)..].first().copied().unwrap_or(0);
        self.last.retain(|_, last| last.turn >= first);
    }

    /// By when they were written.
    fn in_order(&self) -> Vec<(LaneId, Last)> {
        let mut lanes: Vec<(LaneId, Last)> = self.last.iter().map(|(lane, last)| (*lane, *last)).collect();
        lanes.sort_unstable_by_key(|(_, last)| last.turn);
        lanes
    }

    /// As a chunk of last numbers has them: the lanes whose records are in earlier files, by when they were written.
    pub(super) fn bytes(&mut self) -> Vec<u8> {
        self.forget_the_oldest();
        let mut bytes = Vec::with_capacity(self.last.len() * LAST_ENTRY);
        for (lane, last) in self.in_order() {
            bytes.extend(lane.0[0].to_le_bytes());
            bytes.extend(lane.0[1].to_le_bytes());
            bytes.extend(u64::from(last.seq).to_le_bytes());
        }
        bytes
    }
}
