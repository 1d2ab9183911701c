//! Options as C has them. An option that the function cannot use is refused, with the reason.

#[cfg(test)]
mod tests;

use crate::c::{Text, deadline, sized_structures};
use crate::code::{self, Answer, wrong};
use pelton::file::EngineOptions;
use pelton::{Policy, RecordFileOptions, StartFrom, Wait};
use std::ffi::CStr;
use std::time::Duration;

/// A function that creates handles, and the options that it cannot use, each with the reason.
pub struct Maker {
    name: &'static str,
    unused: &'static [(&'static str, &'static str)],
}

impl Maker {
    /// Refuses the options that are set and that it cannot use. `is_set` has all options that some maker cannot use.
    fn check(&self, is_set: &[(&str, bool)]) -> Answer {
        for (option, reason) in self.unused {
            if is_set.iter().any(|(name, is_set)| name == option && *is_set) {
                let detail = format!("{option} is set, but {} does not use it: {reason}", self.name);
                return Err(code::tell(code::OPTION, detail));
            }
        }
        Ok(())
    }
}

const PATH_ONLY: &str = "it is for \"path:DIR\"";
const CREATOR_ONLY: &str = "the channel's creator decides it: set create to 1 to create the channel";
const SENDER_ONLY: &str = "it limits a sender";
const SENDER_DECIDES: &str = "its sender decides that";
const RECEIVER_ONLY: &str = "it limits what a peer can make a receiver use";
const NO_WAIT: &str = "it does not wait";
const CREATOR_DECIDES: &str = "the publisher that created the broadcast has decided it";
const NO_PEER: &str = "its endpoints belong to this process";

pub const SENDER_BY_NAME: Maker = Maker {
    name: "a sender that connects",
    unused: &[("memory_bytes_max", RECEIVER_ONLY), ("create", PATH_ONLY), ("mode", PATH_ONLY), ("lanes", PATH_ONLY)],
};
pub const RECEIVER_BY_NAME: Maker = Maker {
    name: "a receiver that connects",
    unused: &[
        ("resident_bytes_max", SENDER_ONLY),
        ("traced", SENDER_DECIDES),
        ("create", PATH_ONLY),
        ("mode", PATH_ONLY),
        ("lanes", PATH_ONLY),
    ],
};
pub const CREATED_SENDER: Maker = Maker { name: "a sender of a path channel", unused: &[] };
pub const CREATED_RECEIVER: Maker =
    Maker { name: "a receiver of a path channel", unused: &[("resident_bytes_max", SENDER_ONLY)] };
pub const OPENED_SENDER: Maker = Maker {
    name: "a sender of an existing path channel",
    unused: &[
        ("capacity", CREATOR_ONLY),
        ("message_bytes_max", CREATOR_ONLY),
        ("lanes", CREATOR_ONLY),
        ("traced", CREATOR_ONLY),
        ("memory_bytes_max", RECEIVER_ONLY),
    ],
};
pub const OPENED_RECEIVER: Maker = Maker {
    name: "a receiver of an existing path channel",
    unused: &[
        ("capacity", CREATOR_ONLY),
        ("message_bytes_max", CREATOR_ONLY),
        ("lanes", CREATOR_ONLY),
        ("traced", CREATOR_ONLY),
        ("resident_bytes_max", SENDER_ONLY),
    ],
};
pub const LISTENER: Maker = Maker {
    name: "a listener",
    unused: &[("deadline_ns", NO_WAIT), ("create", PATH_ONLY), ("mode", PATH_ONLY), ("lanes", PATH_ONLY)],
};
pub const THREADS: Maker = Maker {
    name: "pelton_threads",
    unused: &[
        ("memory_bytes_max", NO_PEER),
        ("uids", NO_PEER),
        ("deadline_ns", NO_WAIT),
        ("create", PATH_ONLY),
        ("mode", PATH_ONLY),
        ("lanes", PATH_ONLY),
    ],
};
const GATHER_THREADS: Maker =
    Maker { name: "a receiver of threads alone", unused: &[("memory_bytes_max", NO_PEER), ("uids", NO_PEER)] };

pub const PUBLISHING_THREAD: Maker = Maker {
    name: "a publisher without a name",
    unused: &[("uids", NO_PEER), ("deadline_ns", NO_WAIT), ("mode", PATH_ONLY)],
};
pub const PUBLISHER_BY_NAME: Maker =
    Maker { name: "a publisher under a name", unused: &[("deadline_ns", NO_WAIT), ("mode", PATH_ONLY)] };
pub const CREATED_PUBLISHER: Maker = Maker { name: "a publisher in a directory", unused: &[] };
pub const SUBSCRIBER: Maker =
    Maker { name: "a subscriber that connects", unused: &[("durable", PATH_ONLY), ("mode", PATH_ONLY)] };
const OPENED_SUBSCRIBER: Maker =
    Maker { name: "a subscriber in a directory", unused: &[("message_bytes_max", CREATOR_DECIDES)] };
pub const SUBSCRIBING_THREAD: Maker = Maker {
    name: "pelton_publisher_subscriber",
    unused: &[
        ("capacity", NO_PEER),
        ("message_bytes_max", NO_PEER),
        ("deadline_ns", NO_WAIT),
        ("uids", NO_PEER),
        ("durable", PATH_ONLY),
        ("mode", PATH_ONLY),
    ],
};

/// The options that several makers have.
struct Common {
    wait: u32,
    capacity: u64,
    message_bytes_max: u64,
    resident_bytes_max: u64,
    memory_bytes_max: u64,
    uids: *const u32,
    uid_count: u32,
}

impl Common {
    fn of_sizes(wait: u32, capacity: u64, message_bytes_max: u64, uids: *const u32, uid_count: u32) -> Common {
        Common { wait, capacity, message_bytes_max, resident_bytes_max: 0, memory_bytes_max: 0, uids, uid_count }
    }

    fn build(&self) -> Answer<pelton::Options> {
        let mut options = pelton::Options::new().wait(wait(self.wait)?);
        options = set(self.capacity, options, pelton::Options::capacity);
        options = set(self.message_bytes_max, options, pelton::Options::message_bytes_max);
        options = set(self.resident_bytes_max, options, pelton::Options::resident_max);
        options = set(self.memory_bytes_max, options, pelton::Options::memory);
        if self.uid_count != 0 {
            if self.uids.is_null() {
                return Err(code::null("options.uids, with a count,"));
            }
            // SAFETY: the C caller guarantees so many readable numbers; it is not NULL.
            options = options.allow_uids(unsafe { std::slice::from_raw_parts(self.uids, self.uid_count as usize) });
        }
        Ok(options)
    }
}

/// From `enum pelton_wait`.
pub fn wait(found: u32) -> Answer<Wait> {
    match found {
        0 => Ok(Wait::Block),
        1 => Ok(Wait::Spin),
        found => Err(wrong("wait", found, "PELTON_BLOCK (0) or PELTON_SPIN (1)")),
    }
}

/// Sets an option, unless it is 0: the default.
fn set<T>(value: u64, options: T, set: impl FnOnce(T, u64) -> T) -> T {
    if value == 0 { options } else { set(options, value) }
}

/// Limits the lanes by an option that has another name in C.
fn limit_lanes(options: pelton::Options, option: &str, most: u32) -> Answer<pelton::Options> {
    match most {
        0 => Ok(options),
        1..=1024 => Ok(options.lanes(most)),
        found => Err(wrong(option, found, "1 to 1024")),
    }
}

fn flag(option: &str, found: u32) -> Answer<bool> {
    match found {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(wrong(option, found, "0 or 1")),
    }
}

/// A time that is no deadline.
fn interval(option: &str, found: i64) -> Answer<Duration> {
    u64::try_from(found).map(Duration::from_nanos).map_err(|_| wrong(option, found, "nanoseconds, not less than 0"))
}

/// The name of a durable subscription, which the library checks.
pub fn durable(name: &CStr) -> Answer<&str> {
    name.to_str().map_err(|_| code::tell(code::NAME, format!("{name:?} is no durable name: it is not UTF-8")))
}

fn check_reserved(found: u32) -> Answer {
    if found == 0 { Ok(()) } else { Err(wrong("reserved", found, "0: begin with the _INIT macro")) }
}

sized_structures! {
    "pelton_channel_options" ChannelOptions {
        wait: u32,
        capacity: u64,
        message_bytes_max: u64,
        resident_bytes_max: u64,
        memory_bytes_max: u64,
        deadline_ns: i64,
        uids: *const u32,
        uid_count: u32,
        create: u32,
        mode: u32,
        lanes: u32,
        traced: u32,
        reserved: u32,
    }
    "pelton_gather_options" GatherOptions {
        wait: u32,
        capacity: u64,
        message_bytes_max: u64,
        resident_bytes_max: u64,
        memory_bytes_max: u64,
        uids: *const u32,
        uid_count: u32,
        senders_max: u32,
        membership_events: u32,
        traced: u32,
    }
    "pelton_publisher_options" PublisherOptions {
        wait: u32,
        capacity: u64,
        message_bytes_max: u64,
        history: u64,
        hold_max_ns: i64,
        deadline_ns: i64,
        uids: *const u32,
        uid_count: u32,
        mode: u32,
    }
    "pelton_subscriber_options" SubscriberOptions {
        wait: u32,
        start_from: u64,
        lag_after_ns: i64,
        slack: u64,
        capacity: u64,
        message_bytes_max: u64,
        deadline_ns: i64,
        durable: Text,
        uids: *const u32,
        uid_count: u32,
        policy: u32,
        mode: u32,
        reserved: u32,
    }
    "pelton_client_options" ClientOptions {
        wait: u32,
        capacity: u64,
        message_bytes_max: u64,
        resident_bytes_max: u64,
        memory_bytes_max: u64,
        call_bytes_max: u64,
        deadline_ns: i64,
        poll_ns: i64,
        uids: *const u32,
        uid_count: u32,
        reserved: u32,
    }
    "pelton_service_options" ServiceOptions {
        wait: u32,
        capacity: u64,
        message_bytes_max: u64,
        resident_bytes_max: u64,
        memory_bytes_max: u64,
        call_bytes_max: u64,
        uids: *const u32,
        uid_count: u32,
        clients_max: u32,
    }
    "pelton_record_file_options" RecordFile {
        reserved: u32,
        rotate_bytes: u64,
        sync_bytes: u64,
        sync_interval_ns: i64,
    }
    "pelton_flush_options" FlushOptions {
        reserved: u32,
        flush_bytes: u64,
        flush_interval_ns: i64,
    }
    "pelton_appenders_options" AppendersOptions {
        appenders_max: u32,
        flush_bytes: u64,
        message_bytes_max: u64,
        flush_interval_ns: i64,
    }
    "pelton_engine_options" CEngineOptions {
        in_flight_max: u32,
        threads_max: u32,
        reserved: u32,
        root: Text,
    }
}

macro_rules! common {
    ($options:expr) => {
        Common {
            wait: $options.wait,
            capacity: $options.capacity,
            message_bytes_max: $options.message_bytes_max,
            resident_bytes_max: $options.resident_bytes_max,
            memory_bytes_max: $options.memory_bytes_max,
            uids: $options.uids,
            uid_count: $options.uid_count,
        }
        .build()
    };
}

impl ChannelOptions {
    /// Whether to create a path channel.
    pub fn creates(&self) -> Answer<bool> {
        flag("create", self.create)
    }

    pub fn build<M>(&self, maker: &Maker) -> Answer<pelton::Options<M>> {
        self.creates()?;
        maker.check(&[
            ("capacity", self.capacity != 0),
            ("message_bytes_max", self.message_bytes_max != 0),
            ("resident_bytes_max", self.resident_bytes_max != 0),
            ("memory_bytes_max", self.memory_bytes_max != 0),
            ("deadline_ns", self.deadline_ns != 0),
            ("uids", self.uid_count != 0),
            ("create", self.create != 0),
            ("mode", self.mode != 0),
            ("lanes", self.lanes != 0),
            ("traced", self.traced != 0),
        ])?;
        check_reserved(self.reserved)?;
        let mut options = common!(self)?.connect_deadline(deadline(self.deadline_ns));
        options = options.traced(flag("traced", self.traced)?);
        options = set(self.mode.into(), options, |options, mode| options.mode(mode as u32));
        options = set(self.lanes.into(), options, |options, lanes| options.lanes(lanes as u32));
        Ok(options.cast())
    }
}

impl GatherOptions {
    pub fn build<M>(&self, is_threads_alone: bool) -> Answer<pelton::Options<M>> {
        if is_threads_alone {
            GATHER_THREADS.check(&[("memory_bytes_max", self.memory_bytes_max != 0), ("uids", self.uid_count != 0)])?;
        }
        let options = common!(self)?.membership_events(flag("membership_events", self.membership_events)?);
        let options = options.traced(flag("traced", self.traced)?);
        Ok(limit_lanes(options, "senders_max", self.senders_max)?.cast())
    }
}

impl PublisherOptions {
    pub fn build<M>(&self, maker: &Maker) -> Answer<pelton::Options<M>> {
        maker.check(&[
            ("hold_max_ns", self.hold_max_ns != 0),
            ("deadline_ns", self.deadline_ns != 0),
            ("uids", self.uid_count != 0),
            ("mode", self.mode != 0),
        ])?;
        let options = Common::of_sizes(self.wait, self.capacity, self.message_bytes_max, self.uids, self.uid_count);
        let options = options.build()?.connect_deadline(deadline(self.deadline_ns));
        let options = set(self.history, options, pelton::Options::history);
        let options = set(self.mode.into(), options, |options, mode| options.mode(mode as u32));
        Ok(match self.hold_max_ns {
            0 => options,
            // PELTON_NO_HOLD.
            -1 => options.hold_max(Duration::ZERO),
            ns => options.hold_max(interval("hold_max_ns", ns)?),
        }
        .cast())
    }
}

impl SubscriberOptions {
    pub fn build<M>(&self, maker: &Maker) -> Answer<pelton::Options<M>> {
        let policy = match self.policy {
            0 => Policy::Gate,
            1 => Policy::Lag,
            2 => Policy::Latest,
            found => return Err(wrong("policy", found, "PELTON_GATE (0), PELTON_LAG (1) or PELTON_LATEST (2)")),
        };
        maker.check(&[
            ("capacity", self.capacity != 0),
            ("message_bytes_max", self.message_bytes_max != 0),
            ("deadline_ns", self.deadline_ns != 0),
            ("uids", self.uid_count != 0),
            ("durable", !self.durable.is_null()),
            ("mode", self.mode != 0),
        ])?;
        check_reserved(self.reserved)?;
        let gates = policy == Policy::Gate;
        if self.lag_after_ns != 0 && !gates {
            return Err(wrong("lag_after_ns", self.lag_after_ns, "0, or the policy PELTON_GATE"));
        }
        if self.slack != 0 && (policy == Policy::Latest || gates && self.lag_after_ns == 0) {
            return Err(wrong("slack", self.slack, "0, the policy PELTON_LAG, or PELTON_GATE with lag_after_ns"));
        }
        let options = Common::of_sizes(self.wait, self.capacity, self.message_bytes_max, self.uids, self.uid_count);
        let options = options.build()?.policy(policy).connect_deadline(deadline(self.deadline_ns));
        let options = options.start_from(match self.start_from {
            0 => StartFrom::Now,
            // PELTON_OLDEST.
            u64::MAX => StartFrom::Oldest,
            messages => StartFrom::Last(messages),
        });
        let options = set(self.slack, options, pelton::Options::slack);
        let mut options = set(self.mode.into(), options, |options, mode| options.mode(mode as u32));
        if !self.durable.is_null() {
            options = options.durable(durable(self.durable.string("options.durable")?)?);
        }
        Ok(match self.lag_after_ns {
            0 => options,
            ns => options.lag_after(interval("lag_after_ns", ns)?),
        }
        .cast())
    }

    /// In a directory, where the limit of the lane is that of the memory.
    pub fn build_in_directory<M>(&self) -> Answer<pelton::Options<M>> {
        let options: pelton::Options = self.build(&OPENED_SUBSCRIBER)?;
        Ok(set(self.capacity, options, pelton::Options::memory).cast())
    }
}

impl ClientOptions {
    pub fn build<M>(&self) -> Answer<pelton::Options<M>> {
        check_reserved(self.reserved)?;
        let options = common!(self)?.connect_deadline(deadline(self.deadline_ns));
        let options = set(self.call_bytes_max, options, pelton::Options::call_bytes_max);
        Ok(match self.poll_ns {
            0 => options,
            // PELTON_NO_POLL.
            -1 => options.busy_poll(Duration::ZERO),
            ns => options.busy_poll(interval("poll_ns", ns)?),
        }
        .cast())
    }
}

impl ServiceOptions {
    pub fn build<M>(&self) -> Answer<pelton::Options<M>> {
        let options = set(self.call_bytes_max, common!(self)?, pelton::Options::call_bytes_max);
        Ok(limit_lanes(options, "clients_max", self.clients_max)?.cast())
    }
}

impl RecordFile {
    pub fn build(&self) -> Answer<RecordFileOptions> {
        check_reserved(self.reserved)?;
        let options = set(self.rotate_bytes, RecordFileOptions::new(), RecordFileOptions::rotate_bytes);
        let options = match self.sync_bytes {
            0 => options,
            // PELTON_EACH_WRITE.
            u64::MAX => options.sync_bytes(0),
            bytes => options.sync_bytes(bytes),
        };
        match self.sync_interval_ns {
            0 => Ok(options),
            ns => Ok(options.sync_interval(interval("sync_interval_ns", ns)?)),
        }
    }
}

/// When a flush, or appenders, call the sink.
fn flushing(flush_bytes: u64, flush_interval_ns: i64) -> Answer<pelton::Options> {
    let options = set(flush_bytes, pelton::Options::new(), pelton::Options::flush_bytes);
    Ok(match flush_interval_ns {
        0 => options,
        i64::MAX => options.flush_interval(None),
        ns => options.flush_interval(Some(interval("flush_interval_ns", ns)?)),
    })
}

impl FlushOptions {
    pub fn build<M>(&self) -> Answer<pelton::Options<M>> {
        check_reserved(self.reserved)?;
        Ok(flushing(self.flush_bytes, self.flush_interval_ns)?.cast())
    }
}

impl AppendersOptions {
    pub fn build<M>(&self) -> Answer<pelton::Options<M>> {
        let options = flushing(self.flush_bytes, self.flush_interval_ns)?;
        let options = set(self.message_bytes_max, options, pelton::Options::message_bytes_max);
        Ok(limit_lanes(options, "appenders_max", self.appenders_max)?.cast())
    }
}

impl CEngineOptions {
    pub fn build(&self) -> Answer<EngineOptions> {
        check_reserved(self.reserved)?;
        let mut options = EngineOptions::new();
        if self.in_flight_max != 0 {
            options = options.in_flight_max(self.in_flight_max as usize);
        }
        if self.threads_max != 0 {
            options = options.threads(self.threads_max as usize);
        }
        if !self.root.is_null() {
            options = options.root(self.root.path("options.root")?);
        }
        Ok(options)
    }
}
