//! Counters of an endpoint.

/// Counters of one side of a channel, since its creation. They cost almost nothing: each side writes its own page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Messages sent or released.
    pub messages: u64,
    /// Their payload bytes.
    pub bytes: u64,
    /// Operations that found no free space, or no message, and waited or returned that.
    pub waits: u64,
    /// Times that this side slept, or armed its descriptor.
    pub sleeps: u64,
    /// Times that this side rang the other.
    pub wakes_sent: u64,
    /// The most messages in the lane at any check of the sender; 0 for a receiver.
    pub depth_max: u64,
}
