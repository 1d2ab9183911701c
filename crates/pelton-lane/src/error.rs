//! The errors of a lane.

/// Why a lane refuses an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LaneError {
    /// The message exceeds the lane's limit. Send less, or create the lane with twice the capacity.
    TooLarge {
        /// The requested size.
        bytes: u64,
        /// The largest size that this lane takes.
        bytes_max: u64,
    },
    /// A word that the peer writes breaks the rules of the layout. Do not use the lane any more.
    Corrupt {
        /// Which word.
        what: &'static str,
        /// Its value.
        found: u64,
        /// The bound or value that it breaks.
        wanted: u64,
    },
    /// The consumer has closed: it will not receive further messages.
    Closed,
    /// The data needs memory behind at least its first `bytes`. Allocate it, call [`crate::Producer::set_backed`],
    /// retry.
    Unbacked {
        /// Counted from the start of the data.
        bytes: u64,
    },
}

impl core::fmt::Display for LaneError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            LaneError::TooLarge { bytes, bytes_max } => {
                write!(f, "message of {bytes} bytes is larger than this lane's limit of {bytes_max}")
            }
            LaneError::Corrupt { what, found, wanted } => {
                write!(f, "the peer broke the lane's rules: {what} is {found:#x}, wanted {wanted:#x}")
            }
            LaneError::Closed => write!(f, "the consumer has closed the lane"),
            LaneError::Unbacked { bytes } => write!(f, "the lane needs {bytes} bytes of its data allocated"),
        }
    }
}

impl core::error::Error for LaneError {}
