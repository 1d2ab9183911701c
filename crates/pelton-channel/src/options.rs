//! How a channel is created: its sizes, a way to wait, and which users may connect.

use crate::error::{Error, Result};
use crate::memory::{GRANULE, LINK_BYTES_MIN, Limits, SHARES, lane_within};
use crate::wait::Wait;
use pelton_lane::{CAPACITY_MAX, CAPACITY_MIN, LANES_MAX, message_bytes_limit};
use std::time::{Duration, Instant};

/// Default of [`Options::resident_max`].
pub(crate) const RESIDENT_MAX: u64 = 16 << 20;

/// How a channel is created. A sender creates its lane; each side limits the capacity and the messages, and the lower
/// limit applies. The creator of a path channel decides both. Each side decides how it waits.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// use pelton::{Options, Wait};
/// let (mut sender, mut receiver) = Options::new().capacity(1 << 20).wait(Wait::Block).threads()?;
/// sender.send(b"hello")?;
/// assert_eq!(&*receiver.receive()?, b"hello");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    capacity: Option<u64>,
    /// The capacity, if none is set.
    usual_capacity: u64,
    message_bytes_max: Option<u64>,
    pub(crate) memory: Option<u64>,
    #[doc(hidden)]
    pub wait: Wait,
    pub(crate) uids: Vec<u32>,
    #[doc(hidden)]
    pub connect_deadline: Option<Instant>,
    /// How long a handshake may take if connecting has no deadline.
    pub(crate) handshake: Duration,
    pub(crate) mode: u32,
    lanes: Option<u32>,
    pub(crate) announces: bool,
    #[doc(hidden)]
    pub flush_bytes: u64,
    #[doc(hidden)]
    pub flush_interval: Option<Duration>,
    /// The part of a lane that is used while its receiver keeps up, if not the default.
    #[doc(hidden)]
    pub window: Option<u64>,
    pub(crate) resident_max: u64,
    #[doc(hidden)]
    pub call_bytes_max: u64,
    #[doc(hidden)]
    pub hold: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options::new()
    }
}

impl Options {
    /// 64 MiB (calls: 4 MiB each way), messages up to half of that less 32 bytes, [`Wait::Block`], the same user only; a path
    /// channel of mode 0o700 with one lane.
    pub fn new() -> Options {
        Options {
            capacity: None,
            usual_capacity: 64 << 20,
            call_bytes_max: 64 << 20,
            hold: Duration::from_micros(20),
            message_bytes_max: None,
            memory: None,
            wait: Wait::default(),
            uids: Vec::new(),
            connect_deadline: None,
            handshake: Duration::from_secs(5),
            mode: 0o700,
            lanes: None,
            announces: false,
            flush_bytes: 1 << 20,
            flush_interval: Some(Duration::from_millis(100)),
            window: None,
            resident_max: RESIDENT_MAX,
        }
    }

    /// Bytes of the lane: what the sender can be ahead of the receiver. Rounded up to a multiple of 64 KiB, at most 16
    /// GiB. Memory is allocated only as it is used. A lane whose receiver keeps up uses 256 KiB of it, and a little
    /// more at times.
    ///
    /// For a receiver, or either side of calls, it is also the largest lane that this side accepts: the peer creates no
    /// larger one. The default is 16 GiB for a peer of the same user and 64 MiB for another user.
    pub fn capacity(mut self, bytes: u64) -> Options {
        self.capacity = Some(bytes);
        self
    }

    /// Limit, in bytes, of the part of the lane that this side's sender uses while its receiver keeps up; default 16
    /// MiB. If the receiver falls behind, the lane still extends up to its capacity.
    ///
    /// A sender starts with 256 KiB. While it is saturated (256 KiB take less than a millisecond, and the lane is not
    /// empty), it tries more from time to time, and keeps more only if the throughput is higher. It releases the memory
    /// some time after a trial that failed, when the stream slows down, within 256 messages after a pause, and by
    /// `Sender::trim`. A sender that sends nothing more keeps it. All senders of a process together use at most 64 MiB
    /// more than their 256 KiB each. Appenders are not affected.
    pub fn resident_max(mut self, bytes: u64) -> Options {
        self.resident_max = bytes;
        self
    }

    /// The largest message in bytes, if less than the capacity permits: half of it less 32, and below 2 GiB. For a
    /// receiver it is the largest that it accepts; the default is 1 MiB for a peer of another user. A sender whose
    /// limit is above that of its receiver fails to connect with [`Error::Option`].
    pub fn message_bytes_max(mut self, bytes: u64) -> Options {
        self.message_bytes_max = Some(bytes);
        self
    }

    /// Limit, in bytes, of the memory that the peers of this handle can make it use; by default none for lanes. For
    /// several peers at least 1 MiB, for a service 2 MiB.
    ///
    /// A receiver of several senders, or a service, offers each new peer lanes of at most a sixteenth of what is left
    /// of it, and refuses peers while that is less than 64 KiB. A service counts its replies that wait for a client to
    /// read, and requests that have come in part; a call that does not fit fails. Of one client it keeps only as much
    /// as is then left for the others: alone it has half. Without this option all clients together may have 256 MiB, or
    /// four times [`Options::call_bytes_max`] if that is more. With one peer, and of a path channel, it limits the
    /// lanes. What the program keeps itself, for instance copies of messages, does not count.
    pub fn memory(mut self, bytes: u64) -> Options {
        self.memory = Some(bytes);
        self
    }

    /// How this side waits.
    pub fn wait(mut self, wait: Wait) -> Options {
        self.wait = wait;
        self
    }

    /// Users that may be the peer, besides this process's own user.
    pub fn allow_uids(mut self, uids: &[u32]) -> Options {
        self.uids = uids.to_vec();
        self
    }

    /// Connecting waits until `deadline` for a listener; opening a path waits for the channel to be created, and for
    /// the other side to open it too. Without a deadline, connecting fails at once with [`Error::NoListener`] when no
    /// process listens. Opening then fails with [`Error::NoChannel`] when there is no channel, but does not wait for
    /// the other side.
    pub fn connect_deadline(mut self, deadline: Instant) -> Options {
        self.connect_deadline = Some(deadline);
        self
    }

    /// Limit of a handshake, if connecting has no deadline. For the `pelton` command, which checks for signals while no
    /// process listens.
    #[doc(hidden)]
    pub fn handshake(mut self, limit: Duration) -> Options {
        self.handshake = limit;
        self
    }

    /// A receiver of several senders also reports membership:
    /// [`Receiver::receive_event`](crate::Receiver::receive_event) returns that a sender has joined, before its first
    /// message, and that it has left, after its last. Other methods skip these events.
    pub fn announce(mut self, announce: bool) -> Options {
        self.announces = announce;
        self
    }

    /// Messages are handed to the sink at this number of bytes, by default 1 MiB: with their headers of 8 bytes, each
    /// padded to a multiple of 8.
    pub fn flush_bytes(mut self, bytes: u64) -> Options {
        self.flush_bytes = bytes;
        self
    }

    /// Messages are handed to the sink at most this long after they came, by default 100 ms; earlier if there are
    /// enough, or a quarter of a lane's capacity. A sender that does not sleep while it waits for space may have to
    /// wait this long, if its messages are about as large as that. `None`: a `Flush` hands over as soon as no more
    /// messages are there; `Appenders` only when a buffer is full, or on request.
    pub fn flush_interval(mut self, interval: Option<Duration>) -> Options {
        self.flush_interval = interval;
        self
    }

    /// Permission bits of a path channel's directory, by default 0o700: which other users may open it. Its files have
    /// the same without the execute bits, whatever the umask. A directory that permits more than this is refused.
    pub fn mode(mut self, bits: u32) -> Options {
        self.mode = bits;
        self
    }

    /// Limit of the senders that a receiver has at a time, at most 1024. For a path channel the default is 1, and its
    /// creator decides; for a receiver of several senders the default is 1024. Each sender has a lane of its own,
    /// created when it is first needed. For it the receiver needs three descriptors, or four for another user; a
    /// service needs five for a client; a thread's sender has four. A new peer is refused where less than an eighth of
    /// all descriptors (at most 64) would be left, after up to a second in which others may become free.
    pub fn lanes(mut self, lanes: u32) -> Options {
        self.lanes = Some(lanes);
        self
    }

    /// The largest request, or reply, or part of one, that this side accepts, in bytes; by default 64 MiB. What is
    /// larger than the lane's largest message is assembled in this side's memory, one from each peer at a time.
    pub fn call_bytes_max(mut self, bytes: u64) -> Options {
        self.call_bytes_max = bytes;
        self
    }

    /// How long `Client::arm` may busy-poll for replies that have lately come within that time; by default 20 µs. Zero:
    /// not at all.
    pub fn hold(mut self, most: Duration) -> Options {
        self.hold = most;
        self
    }

    /// The same for a link of two lanes, whose memory each of a thousand clients may fill: 4 MiB a lane by default.
    #[doc(hidden)]
    pub fn of_link(&self) -> Result<Options> {
        // Membership events are no requests.
        let options = Options { usual_capacity: 4 << 20, announces: false, ..self.clone() };
        match options.checked_sizes()? {
            (_, limit) if limit < LINK_BYTES_MIN => Err(Error::Option {
                option: "message_bytes_max",
                found: limit,
                wanted: format!("at least {LINK_BYTES_MIN} bytes for calls"),
            }),
            _ => Ok(options),
        }
    }

    /// That the memory has space for the first peer, with this number of lanes.
    #[doc(hidden)]
    pub fn check_memory(&self, lanes: u64) -> Result<()> {
        let least = GRANULE * SHARES * lanes;
        match self.memory {
            Some(found) if found < least => {
                Err(Error::Option { option: "memory", found, wanted: format!("at least {least} bytes") })
            }
            _ => Ok(()),
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
    #[doc(hidden)]
    pub fn message_bytes_max_or(&self, bytes: u64) -> u64 {
        self.message_bytes_max.map_or(bytes, |most| most.min(bytes))
    }

    /// What this side accepts from a peer of its own user, or of another.
    pub(crate) fn takes(&self, is_own_user: bool) -> Limits {
        let usual = if is_own_user { Limits::ALL } else { Limits::OF_ANOTHER_USER };
        let of_memory = self.memory.map_or(u64::MAX, lane_within).max(CAPACITY_MIN);
        // The handle's maker has reported impossible values.
        let lane_bytes = self
            .capacity
            .map_or(usual.lane_bytes, |bytes| bytes.clamp(CAPACITY_MIN, CAPACITY_MAX).next_multiple_of(GRANULE));
        let lane_bytes = lane_bytes.min(of_memory);
        let message_bytes = self.message_bytes_max.unwrap_or(usual.message_bytes);
        Limits { lane_bytes, message_bytes: message_bytes.min(message_bytes_limit(lane_bytes)) }
    }

    /// The largest lane that this side accepts from a path channel. Its own capacity is for a channel that it creates.
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
        Ok((capacity, limit.min(message_bytes_limit(capacity))))
    }

    /// The capacity and the message limit of a lane that the peer accepts.
    pub(crate) fn sizes_within(&self, within: Limits) -> Result<(u64, u64)> {
        let (capacity, limit) = self.checked_sizes()?;
        let capacity = capacity.min(lane_within(within.lane_bytes));
        let most = message_bytes_limit(capacity).min(within.message_bytes);
        match self.message_bytes_max {
            // Requests and replies go in pieces where the lane takes no larger ones.
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

    /// The capacity and the message limit that result from these options.
    #[doc(hidden)]
    pub fn checked_sizes(&self) -> Result<(u64, u64)> {
        let capacity = self.capacity.unwrap_or(self.usual_capacity);
        if !(CAPACITY_MIN..=CAPACITY_MAX).contains(&capacity) {
            let wanted = format!("{CAPACITY_MIN} to {CAPACITY_MAX} bytes");
            return Err(Error::Option { option: "capacity", found: capacity, wanted });
        }
        let capacity = capacity.next_multiple_of(GRANULE);
        let limit = message_bytes_limit(capacity);
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
