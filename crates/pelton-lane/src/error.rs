//! The errors of a lane.

use core::time::Duration;

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
    /// The producer admits no consumer that may hold it up for so long. Join by another policy.
    HoldTooLong {
        /// As [`crate::Policy::holds_ns`].
        holds_ns: u64,
        /// The longest time that the producer admits.
        hold_max_ns: u64,
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
            LaneError::HoldTooLong { holds_ns, hold_max_ns } => {
                write!(f, "the subscriber may hold the publisher up ")?;
                match *holds_ns {
                    u64::MAX => write!(f, "without a limit")?,
                    ns => write!(f, "for {:?}", Duration::from_nanos(ns))?,
                }
                let most = Duration::from_nanos(*hold_max_ns);
                write!(f, ", which takes at most {most:?} of that: subscribe by lag, or by gate with a lag_after of ")?;
                write!(f, "at most {most:?}, or raise the publisher's hold_max")
            }
        }
    }
}

impl core::error::Error for LaneError {}
