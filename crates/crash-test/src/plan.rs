//! The orders for a process of a crash test.

use super::message::Sizes;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The role of a process in the channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Send,
    Receive,
}

/// How two sides of pelton find each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    Connect,
    Path,
}

/// How a side waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WaitMode {
    Block,
    Spin,
    /// In a loop of its own, with `arm`, `try_…` and `disarm`.
    Poll,
}

/// The orders for a process, one line of JSON. The first half is for sides of any channel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    pub role: Role,
    /// The directory of the channel, empty at first.
    #[serde(rename = "place")]
    pub directory: PathBuf,
    pub journal: PathBuf,
    #[serde(flatten)]
    pub sizes: Sizes,
    /// The capacity of the lane.
    pub capacity: u64,
    /// After this number of messages (0: never), a pause of this number of microseconds.
    pub pause_every: u64,
    pub pause_us: u64,
    /// The first number of a sender whose channel does not return it.
    pub next: u64,
    /// For sides of pelton: the seed for the choices of this process.
    pub choices_seed: u64,
    pub transport: Transport,
    pub listens: bool,
    pub wait_mode: WaitMode,
    /// For a receiver: the highest number delivered to a predecessor.
    pub delivered: u64,
    /// In a scenario of many senders.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub many_senders: Option<ManySendersPlan>,
    /// In a scenario of a broadcast.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub broadcast: Option<BroadcastPlan>,
}

/// What happens when a subscriber falls behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SubscriberPolicy {
    Gate,
    /// For two milliseconds.
    GateUntil,
    Lag,
    Latest,
}

/// Where a subscriber begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StartAt {
    Now,
    Oldest,
    Last(u64),
}

/// The part of the plan for a broadcast.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BroadcastPlan {
    /// For a publisher: its number among the publishers of the scenario, from 1.
    pub publisher: u64,
    pub history: u64,
    /// For a subscriber, as are the next two.
    pub policy: SubscriberPolicy,
    pub start: StartAt,
    /// The name of a durable subscription, in a directory.
    pub durable: Option<String>,
}

/// The job of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Job {
    Send,
    Receive,
    Flush,
    /// Threads that append; there are no other senders.
    Append,
}

/// The part of the plan for scenarios of many senders.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ManySendersPlan {
    pub job: Job,
    pub sender_table: PathBuf,
    /// The number of the first sender in this process; 0: the sender whose message is the end.
    pub sender_id: u64,
    /// The number of senders that are threads of this process.
    pub threads: u64,
    /// For a path channel.
    pub lanes: u32,
    /// Whether the receiver gets membership events.
    pub announce: bool,
    pub file: PathBuf,
    pub flush_bytes: u64,
    pub flush_interval_us: Option<u64>,
    pub rotate_bytes: Option<u64>,
}
