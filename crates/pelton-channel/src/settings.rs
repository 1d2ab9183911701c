//! The settings that the functions which create endpoints read: sizes, a way to wait, users, limits. `options.rs` has
//! the public interface.

use crate::error::{Error, Result};
use crate::memory::{GRANULE, LINK_BYTES_MIN, Limits, SHARES, lane_within};
use crate::wait::{BUSY_POLL, ConnectDeadline, Deadline, Wait};
use pelton_lane::{
    BroadcastProducer, CAPACITY_MAX, CAPACITY_MIN, LANES_MAX, StartFrom, message_bytes_limit,
    traced_message_bytes_limit,
};
use std::time::Duration;

/// Default of [`Options::resident_max`](crate::Options::resident_max).
pub(crate) const RESIDENT_MAX: u64 = 16 << 20;

/// Limit of a whole handshake, unless the caller gave a later deadline.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// What the publisher does when a subscriber falls behind. Each subscriber chooses when it joins:
/// [`Options::policy`](crate::Options::policy).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Policy {
    /// The publisher waits for this subscriber once the lane is full: nothing is lost. The subscriber reads messages in
    /// place. With [`Options::lag_after`](crate::Options::lag_after) it may hold the publisher up for so long only, and
    /// then lags until it has caught up.
    #[default]
    Gate,
    /// The publisher does not wait: a subscriber that falls behind misses messages, and learns exactly how many. It
    /// copies each message.
    Lag,
    /// The subscriber receives the newest message only, and skips those before it. It copies.
    Latest,
}

impl Policy {
    /// A lane's policy, with its time.
    pub(crate) fn of_lane(policy: pelton_lane::Policy) -> (Policy, Option<Duration>) {
        match policy {
            pelton_lane::Policy::Gate => (Policy::Gate, None),
            pelton_lane::Policy::GateUntil { lag_after_ns, .. } => {
                (Policy::Gate, Some(Duration::from_nanos(lag_after_ns)))
            }
            pelton_lane::Policy::Lag { .. } => (Policy::Lag, None),
            pelton_lane::Policy::Latest => (Policy::Latest, None),
        }
    }
}

/// The settings of [`Options`](crate::Options), whatever they are for. Its methods document the fields.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Bytes of a lane; `None`: `usual_capacity`.
    pub capacity: Option<u64>,
    /// The capacity, if none is set.
    pub usual_capacity: u64,
    /// Limit of a message; `None`: what the capacity permits.
    pub message_bytes_max: Option<u64>,
    /// Whether messages may carry a traceparent.
    pub traced: bool,
    /// Limit of the memory that peers can make this side use.
    pub memory: Option<u64>,
    /// How this side waits.
    pub wait: Wait,
    /// Users that may be the peer, besides the own one.
    pub uids: Vec<u32>,
    /// When waiting for a listener, a channel or a peer ends.
    pub connect_deadline: ConnectDeadline,
    /// How long a handshake may take if connecting has no deadline.
    pub handshake: Duration,
    /// Permission bits of a path channel.
    pub mode: u32,
    /// Limit of the senders.
    pub lanes: Option<u32>,
    /// Whether membership events are reported.
    pub membership_events: bool,
    /// Bytes at which a flush hands over.
    pub flush_bytes: u64,
    /// The longest time until a flush hands over.
    pub flush_interval: Option<Duration>,
    /// The part of a lane that is used while its receiver keeps up, if not the default.
    pub window: Option<u64>,
    /// Limit of the part of a lane that is used while its receiver keeps up.
    pub resident_max: u64,
    /// The largest request, reply or part.
    pub call_bytes_max: u64,
    /// How long a client busy-polls for an event loop.
    pub busy_poll: Duration,
    /// Of a subscriber: what happens when it falls behind.
    pub policy: Policy,
    /// Of a subscriber: how long it holds the publisher up.
    pub lag_after: Option<Duration>,
    /// Of a subscriber: how far it may be behind while it lags.
    pub slack: u64,
    /// Of a subscriber: its first message.
    pub start_from: StartFrom,
    /// Of a subscriber in a directory: the name under which it keeps its place.
    pub durable: Option<String>,
    /// Of a publisher: the messages kept for later subscribers.
    pub history: u64,
    /// Of a publisher: how long one subscriber may hold it up; `u64::MAX`: without a limit.
    pub hold_max_ns: u64,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            capacity: None,
            usual_capacity: 64 << 20,
            call_bytes_max: 64 << 20,
            busy_poll: BUSY_POLL,
            policy: Policy::default(),
            lag_after: None,
            slack: BroadcastProducer::SLACK,
            start_from: StartFrom::Now,
            durable: None,
            history: 0,
            hold_max_ns: u64::MAX,
            message_bytes_max: None,
            traced: false,
            memory: None,
            wait: Wait::default(),
            uids: Vec::new(),
            connect_deadline: ConnectDeadline::At(Deadline::Now),
            handshake: HANDSHAKE_TIMEOUT,
            mode: 0o700,
            lanes: None,
            membership_events: false,
            flush_bytes: 1 << 20,
            flush_interval: Some(Duration::from_millis(100)),
            window: None,
            resident_max: RESIDENT_MAX,
        }
    }
}

impl Settings {
    /// The same for a link of two lanes: 4 MiB a lane by default, because each of a thousand clients may fill its
    /// lanes.
    pub fn of_link(&self) -> Result<Settings> {
        // A link reports no membership events, because they are not requests.
        let options = Settings { usual_capacity: 4 << 20, membership_events: false, traced: false, ..self.clone() };
        match options.checked_sizes()? {
            (_, limit) if limit < LINK_BYTES_MIN => Err(Error::Option {
                option: "message_bytes_max",
                found: limit,
                wanted: format!("at least {LINK_BYTES_MIN} bytes for calls"),
            }),
            _ => Ok(options),
        }
    }

    /// The same for a use that begins now and continues later: a duration of `connect_deadline` counts from now.
    pub fn begun(&self) -> Settings {
        let deadline = self.connect_deadline.from_now().map_or(Deadline::Now, Deadline::At);
        Settings { connect_deadline: deadline.into(), ..self.clone() }
    }

    /// Checks that the memory has space for the first peer, with this number of lanes.
    pub fn check_memory(&self, lanes: u64) -> Result<()> {
        let least = GRANULE * SHARES * lanes;
        match self.memory {
            Some(found) if found < least => {
                Err(Error::Option { option: "memory", found, wanted: format!("at least {least} bytes") })
            }
            _ => Ok(()),
        }
    }

    /// A subscriber's policy, as its lane has it.
    pub(crate) fn lane_policy(&self) -> pelton_lane::Policy {
        let slack = self.slack;
        match (self.policy, self.lag_after) {
            (Policy::Gate, None) => pelton_lane::Policy::Gate,
            (Policy::Gate, Some(time)) => {
                // The largest value means that it has no limit.
                let lag_after_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX - 1);
                pelton_lane::Policy::GateUntil { slack, lag_after_ns }
            }
            (Policy::Lag, _) => pelton_lane::Policy::Lag { slack },
            (Policy::Latest, _) => pelton_lane::Policy::Latest,
        }
    }

    /// The number of lanes of a path channel.
    pub(crate) fn checked_lanes(&self) -> Result<u32> {
        self.lanes_or(1)
    }

    /// Limit of the senders of a receiver that has several.
    pub(crate) fn checked_senders(&self) -> Result<u32> {
        self.lanes_or(LANES_MAX)
    }

    fn lanes_or(&self, usual: u32) -> Result<u32> {
        let lanes = self.lanes.unwrap_or(usual);
        if (1..=LANES_MAX).contains(&lanes) {
            return Ok(lanes);
        }
        Err(Error::Option { option: "lanes", found: lanes.into(), wanted: format!("1 to {LANES_MAX}") })
    }

    /// The largest message: as it was set, but at most `bytes`.
    pub fn message_bytes_max_or(&self, bytes: u64) -> u64 {
        self.message_bytes_max.map_or(bytes, |most| most.min(bytes))
    }

    /// What this side accepts from a peer of its own user, or of another.
    pub(crate) fn takes(&self, is_own_user: bool) -> Limits {
        let usual = if is_own_user { Limits::ALL } else { Limits::OF_ANOTHER_USER };
        let of_memory = self.memory.map_or(u64::MAX, lane_within).max(CAPACITY_MIN);
        // Invalid values are impossible here: the function that created the handle has refused them.
        let lane_bytes = self
            .capacity
            .map_or(usual.lane_bytes, |bytes| bytes.clamp(CAPACITY_MIN, CAPACITY_MAX).next_multiple_of(GRANULE));
        let lane_bytes = lane_bytes.min(of_memory);
        let message_bytes = self.message_bytes_max.unwrap_or(usual.message_bytes);
        Limits { lane_bytes, message_bytes: message_bytes.min(message_bytes_limit(lane_bytes)) }
    }

    /// The largest lane that this side accepts from a path channel. `capacity` is no limit here: it is the size of a
    /// channel that this side creates.
    pub(crate) fn path_lane_bytes_max(&self, is_own_user: bool) -> u64 {
        let usual = if is_own_user { Limits::ALL } else { Limits::OF_ANOTHER_USER };
        self.memory.unwrap_or(usual.lane_bytes)
    }

    /// The capacity and the message limit of the lanes of a path channel that this side creates, within its memory.
    pub(crate) fn path_sizes(&self) -> Result<(u64, u64)> {
        let (capacity, limit) = self.checked_sizes()?;
        let most =
            self.memory.map_or(u64::MAX, |memory| lane_within(memory / u64::from(self.checked_lanes().unwrap_or(1))));
        let capacity = capacity.min(most.max(CAPACITY_MIN));
        Ok((capacity, limit.min(self.limit_of(capacity))))
    }

    /// The capacity and the message limit of a lane that the peer accepts.
    pub(crate) fn sizes_within(&self, within: Limits) -> Result<(u64, u64)> {
        let (capacity, limit) = self.checked_sizes()?;
        let capacity = capacity.min(lane_within(within.lane_bytes));
        let most = self.limit_of(capacity).min(within.message_bytes);
        match self.message_bytes_max {
            // A request or reply above the lane's message limit is sent in pieces.
            Some(found) if found > most && within.message_bytes != Limits::ALL.message_bytes => {
                let wanted = format!(
                    "at most {most}, as the peer takes lanes of {} bytes and messages of {}: lower it, or raise the peer's capacity, message_bytes_max or memory",
                    within.lane_bytes, within.message_bytes
                );
                Err(Error::Option { option: "message_bytes_max", found, wanted })
            }
            _ => Ok((capacity, limit.min(most))),
        }
    }

    /// The largest message of a lane of this side with this capacity.
    fn limit_of(&self, capacity: u64) -> u64 {
        if self.traced { traced_message_bytes_limit(capacity) } else { message_bytes_limit(capacity) }
    }

    /// The capacity and the message limit that result from these options.
    pub fn checked_sizes(&self) -> Result<(u64, u64)> {
        let capacity = self.capacity.unwrap_or(self.usual_capacity);
        if !(CAPACITY_MIN..=CAPACITY_MAX).contains(&capacity) {
            let wanted = format!("{CAPACITY_MIN} to {CAPACITY_MAX} bytes");
            return Err(Error::Option { option: "capacity", found: capacity, wanted });
        }
        let capacity = capacity.next_multiple_of(GRANULE);
        let limit = self.limit_of(capacity);
        match self.message_bytes_max {
            Some(bytes) if bytes > limit => Err(Error::Option {
                option: "message_bytes_max",
                found: bytes,
                wanted: format!("at most {limit} bytes with a capacity of {capacity}: raise the capacity"),
            }),
            bytes => Ok((capacity, bytes.unwrap_or(limit))),
        }
    }
}
