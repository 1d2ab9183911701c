//! The identity of a lane.

/// The identity of a lane: two words that no other lane has, also after a restart of either side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LaneId(pub [u64; 2]);

impl LaneId {
    /// For a file system that reports no creation time. No sink can recognise such a lane.
    pub const NONE: LaneId = LaneId([0; 2]);

    pub(crate) fn since_boot(self, boot: [u8; 16]) -> LaneId {
        if self == LaneId::NONE {
            return self;
        }
        let [low, high] = [0, 8].map(|at| u64::from_le_bytes(boot[at..at + 8].try_into().expect("eight bytes")));
        LaneId([self.0[0] ^ low, self.0[1] ^ high])
    }
}
