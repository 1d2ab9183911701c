//! Counters of an endpoint.

/// Figures of one side of a channel, since it was made. They cost nothing to keep: each side writes its own page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Messages sent or released.
    pub messages: u64,
    /// Their payload bytes.
    pub bytes: u64,
    /// Times that there was no room, or no message, and the operation waited or said so.
    pub waits: u64,
    /// Times that this side went to sleep, or armed its descriptor.
    pub sleeps: u64,
    /// Times that this side rang the other.
    pub wakes_sent: u64,
    /// The most messages in the lane that the sender noticed when it looked; 0 for a receiver.
    pub depth_max: u64,
}
