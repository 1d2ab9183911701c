//! Runs of records as the bytes they are, and who takes them.

pub(crate) mod record_file;

use crate::error::Result;
use crate::link::Peer;

/// Which lane of all that ever were: two words that tell it from any other, also after a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaneId(pub [u64; 2]);

/// A run of whole records of one lane, as the bytes they are: for each message a header, u64 little-endian `seq << 32 | bytes`, the
/// payload, zero to seven bytes of padding (of any value), so that the next begins at a multiple of eight. No marks, no cleared
/// header.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    lane: LaneId,
    peer: Option<Peer>,
    first_seq: u32,
    messages: u32,
    bytes: &'a [u8],
}

impl<'a> Run<'a> {
    #[doc(hidden)]
    pub fn new(lane: LaneId, peer: Option<Peer>, first_seq: u32, messages: u32, bytes: &'a [u8]) -> Run<'a> {
        Run { lane, peer, first_seq, messages, bytes }
    }

    /// Whose records they are.
    pub fn lane(&self) -> LaneId {
        self.lane
    }

    /// Who sent them; `None` for a thread of this process.
    pub fn peer(&self) -> Option<Peer> {
        self.peer
    }

    /// The number of the first message.
    pub fn first_seq(&self) -> u32 {
        self.first_seq
    }

    /// How many messages there are.
    pub fn messages(&self) -> u32 {
        self.messages
    }

    /// The records.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

/// Who takes runs of records.
pub trait Sink: Send {
    /// Takes all of `runs`, in order, or none: after an error the same come again. Safe (as the sink's documentation says) when it
    /// returns Ok.
    fn write(&mut self, runs: &[Run<'_>]) -> Result<()>;

    /// Has everything written so far on the disk, or the like. Waits.
    fn sync(&mut self) -> Result<()> {
        Ok(())
    }

    /// The last message of that lane that the sink has from an earlier life (killed between writing and releasing): what came up
    /// to it is not to be written again.
    fn last_seq(&self, _lane: LaneId) -> Option<u32> {
        None
    }
}
