//! The job of a measured process, and the words of the command line that it is made of.

use std::{collections::BTreeMap, ffi::OsString, fmt, path::PathBuf, str::FromStr};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// What a system must have to be measured in a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Two processes, one at each side
    Processes,
    /// Two threads of one process
    Threads,
    /// One receiver of many processes
    FanIn,
    /// One sender of many processes, each of which receives every message
    Broadcast,
    /// A service and its clients
    Call,
    /// Threads that append to one sink
    Append,
    /// The same, to a file
    AppendFile,
    /// Successors of killed sides
    Successors,
}

/// How a side waits for the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wait {
    /// Busy-polls
    Spin,
    /// Sleeps in the call itself
    Block,
    /// Never sleeps in the call; sleeps in an epoll instance of the caller's own
    Epoll,
    /// In libuv's loop, both sides, one message a callback; pelton-c and eventfd-ring only
    Uv,
    /// The same, but the sender's callback sends for up to a millisecond
    UvBulk,
}

/// The word of the command line for a value of one of the enums here.
pub fn word<T: ValueEnum>(value: T) -> String {
    value.to_possible_value().expect("no value is hidden").get_name().to_string()
}

/// All words of such an enum.
pub fn words<T: ValueEnum>() -> String {
    T::value_variants()
        .iter()
        .filter_map(|v| v.to_possible_value())
        .map(|v| v.get_name().to_string())
        .collect::<Vec<_>>()
        .join(", ")
}

/// The sizes of the messages: all of one size, or random between two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SizeRange {
    /// The smallest, in bytes
    pub min: u32,
    /// The largest, in bytes
    pub max: u32,
}

/// 1 GiB: every transport here takes less, and sums of lengths stay far from overflow.
const SIZE_MAX: u32 = 1 << 30;

impl SizeRange {
    /// Messages of one size.
    pub fn fixed(bytes: u32) -> SizeRange {
        SizeRange { min: bytes, max: bytes }
    }

    /// Whether all messages are of one size.
    pub fn is_fixed(self) -> bool {
        self.min == self.max
    }

    /// The sizes in their order, from the start; the same at every call.
    pub fn sequence(self) -> SizeSequence {
        SizeSequence { range: self, seed: 1 }
    }

    /// The sum of the first `count` sizes.
    pub fn total(self, count: u64) -> u64 {
        if self.is_fixed() {
            return self.max as u64 * count;
        }
        let mut sequence = self.sequence();
        (0..count).map(|_| sequence.next_size() as u64).sum()
    }
}

impl FromStr for SizeRange {
    type Err = String;

    fn from_str(text: &str) -> Result<SizeRange, String> {
        let bytes = |part: &str| match part.parse::<u32>() {
            Ok(bytes) if bytes <= SIZE_MAX => Ok(bytes),
            _ => Err(format!(
                "found `{text}`, wanted a number of bytes from 0 to {SIZE_MAX}, or two as MIN..MAX: write 256 or 1..32768"
            )),
        };
        match text.split_once("..") {
            None => Ok(SizeRange::fixed(bytes(text)?)),
            Some((min, max)) => {
                let range = SizeRange { min: bytes(min)?, max: bytes(max)? };
                if range.min > range.max {
                    return Err(format!(
                        "found `{text}`, wanted MIN to be at most MAX: write {}..{}",
                        range.max, range.min
                    ));
                }
                Ok(range)
            }
        }
    }
}

impl fmt::Display for SizeRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_fixed() { write!(f, "{}", self.max) } else { write!(f, "{}..{}", self.min, self.max) }
    }
}

/// The generator of limits.c, so that 1..MAX is the same sequence of sizes here and there.
pub struct SizeSequence {
    range: SizeRange,
    seed: u32,
}

impl SizeSequence {
    /// The next message's size.
    #[inline]
    pub fn next_size(&mut self) -> usize {
        let SizeRange { min, max } = self.range;
        if min == max {
            return max as usize;
        }
        self.seed = self.seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (min + (self.seed >> 8) % (max - min + 1)) as usize
    }
}

/// A process's role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Receives the messages (stream, idle); on the first CPU, as in limits.c
    Receiver,
    /// Sends them; on the second CPU
    Sender,
    /// Fills a lane until the program kills it there
    Filler,
    /// Begins each round trip and times it; on the first CPU, as in limits.c
    Asker,
    /// Sends each message back; on the second CPU
    Answerer,
    /// Connects as many senders, and sends nothing, or as many subscribers that lag; on the second CPU
    Idler,
    /// All threads of an append; on any CPU
    Appender,
    /// Serves calls; on the first CPU, as a receiver
    Service,
    /// Calls; on the second CPU
    Client,
    /// Calls without end, as many at a time as it can, while others are measured; on the second CPU
    Flooder,
    /// Two threads, or a program that starts the other side itself: the receiving one on the first CPU, the sending
    /// one on the second
    Threads,
}

impl Role {
    /// Which of the two CPUs is this role's.
    pub fn cpu_index(self) -> usize {
        matches!(self, Role::Sender | Role::Filler | Role::Answerer | Role::Idler | Role::Client | Role::Flooder)
            as usize
    }

    /// Whether this side creates the name that the other connects to.
    pub fn listens(self) -> bool {
        matches!(self, Role::Receiver | Role::Answerer | Role::Service)
    }
}

/// One pass over the channel. The same two processes make several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pass {
    /// Messages, or rounds of a round trip
    pub count: u64,
    /// Time every round on its own, for the percentiles
    pub time_each: bool,
    /// Count system calls instead of time: the counter slows each of them down by 130 ns here
    pub count_calls: bool,
    /// Only work, as for so many messages, and send nothing
    pub alone: bool,
    /// Not measured: memory is touched for the first time, processors wake up
    pub warms_up: bool,
}

/// Where the two sides run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Each pinned to a CPU of its own
    Apart,
    /// All pinned to one CPU
    Together,
    /// Not pinned, as ordinary programs: the kernel's scheduler decides
    Free,
}

/// The options of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Calls {
    /// Processes that call
    pub clients: u32,
    /// Calls that each of them has in flight at a time
    pub in_flight: u32,
    /// Calls that are due in a second, each timed from its due time; None: without a rate
    pub rate: Option<u32>,
    /// One more client floods the service meanwhile
    pub beside_flood: bool,
    /// All processes are on one CPU
    pub one_cpu: bool,
}

impl Default for Calls {
    fn default() -> Calls {
        Calls { clients: 1, in_flight: 1, rate: None, beside_flood: false, one_cpu: false }
    }
}

impl Calls {
    /// Whether one client waits for each reply before its next call: then the measurement is of latency.
    pub fn one_by_one(self) -> bool {
        self.clients == 1 && self.in_flight == 1
    }
}

/// How the program starts the processes of a system. It stays in the program.
#[derive(Clone, Debug, Default)]
pub struct Launch {
    /// The program to start, with its first arguments; empty for this program itself
    pub program: Vec<OsString>,
    /// The processes of the workload, that of the first CPU first. A fan-in has several of the second
    pub roles: &'static [Role],
    /// The sides of the second role have numbers
    pub numbered: bool,
    /// What its processes are like
    pub process: Process,
    /// The control group of its processes, if they have a quota
    pub cgroup: Option<PathBuf>,
}

/// What the processes of a system are like. Most are none of this.
#[derive(Clone, Copy, Debug, Default)]
pub struct Process {
    /// One process is both sides, or starts the other itself
    pub is_both: bool,
    /// Its processes have threads beside the measured one: they may use every CPU
    pub is_unpinned: bool,
    /// System calls are counted from outside, because its processes cannot count their own
    pub is_foreign: bool,
    /// The program is the service of its calls only: the client is this program
    pub is_service_only: bool,
    /// Its files are in shared memory, where that is possible
    pub in_shared_memory: bool,
}

/// The whole input of one measured process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// The system's name
    pub system: String,
    /// How this side waits
    pub wait: Wait,
    /// The workload's name
    pub workload: String,
    /// Which of the system's parts it needs
    pub kind: Kind,
    /// This process's role
    pub role: Role,
    /// Sizes of the messages
    pub sizes: SizeRange,
    /// Bytes of a pelton or limits lane
    pub capacity: u64,
    /// Microseconds that each side of a round trip busy-waits before it sends, and that a lagging subscriber sleeps
    /// after each message
    pub delay_us: u64,
    /// The work of the receiver and the sender of a lopsided channel for each message, in steps of
    /// [`work`](crate::side::work)
    pub work_steps: [u64; 2],
    /// Processes that send in a fan-in, or call
    pub senders: u32,
    /// Connected senders of a fan-in that send nothing; subscribers of a broadcast that may be passed
    pub idle: u32,
    /// Processes that receive each message of a broadcast
    pub receivers: u32,
    /// The options of calls
    pub calls: Calls,
    /// This sender's number, or, in a broadcast, this receiver's
    pub index: u32,
    /// Threads of an append
    pub threads: u32,
    /// The passes, in order
    pub passes: Vec<Pass>,
    /// The CPU to pin to
    pub cpu: Option<usize>,
    /// The receiver's (asker's) and the sender's, for programs that are both; empty if nothing is pinned
    pub cpus: Vec<usize>,
    /// The directory by which the two sides find each other
    pub directory: PathBuf,
    /// Options that only its workload has, by name
    pub options: BTreeMap<String, u64>,
    /// Messages for each of a pass's count: two of a round trip, one of each appending thread
    pub messages_each: u32,
    /// How the processes are started
    #[serde(skip)]
    pub launch: Launch,
}

impl Job {
    /// The number of messages of all senders in a pass of `count`: rounds, or messages of each thread.
    pub fn messages(&self, count: u64) -> u64 {
        u64::from(self.messages_each) * count
    }

    /// That sender's share of `count` messages.
    pub fn share(&self, index: u32, count: u64) -> u64 {
        let senders = self.senders as u64;
        count / senders + u64::from((index as u64) < count % senders)
    }

    /// There and back: the names of the direction this side sends on and of the one it receives on, as its other side
    /// has them.
    pub fn directions(&self) -> (&'static str, &'static str) {
        if self.role.listens() { ("back", "there") } else { ("there", "back") }
    }

    /// The value of an option that only its workload has.
    pub fn option(&self, name: &str) -> u64 {
        self.options.get(name).copied().unwrap_or_default()
    }

    /// The work of this side for each message.
    pub fn work_steps(&self) -> u64 {
        self.work_steps[self.role.cpu_index()]
    }

    /// Whether systems that can read messages in place do so.
    pub fn in_place(&self) -> bool {
        self.kind == Kind::Broadcast || !matches!(self.role, Role::Asker | Role::Answerer) && !self.sizes.is_fixed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_one_number_or_two() {
        assert_eq!("256".parse(), Ok(SizeRange::fixed(256)));
        assert_eq!("0".parse(), Ok(SizeRange::fixed(0)));
        assert_eq!("1..32768".parse(), Ok(SizeRange { min: 1, max: 32768 }));
        assert_eq!("1..32768".parse::<SizeRange>().unwrap().to_string(), "1..32768");
        assert_eq!("7..7".parse::<SizeRange>().unwrap().to_string(), "7");
    }

    #[test]
    fn a_bad_size_is_named_in_the_error() {
        for bad in ["", "x", "-1", "1..", "..5", "1..2..3", "4294967296", "1073741825", "1 MB"] {
            let error = bad.parse::<SizeRange>().unwrap_err();
            assert!(error.contains(&format!("found `{bad}`")) && error.contains("wanted"), "{error}");
        }
        assert!("9..3".parse::<SizeRange>().unwrap_err().contains("write 3..9"));
    }

    #[test]
    fn random_sizes_are_those_of_limits_c() {
        // The first of `seed = seed * 1664525u + 1013904223u, len = 1 + (seed >> 8) % 32768` from seed 1, printed by a
        // C program.
        let mut sequence = SizeRange { min: 1, max: 32768 }.sequence();
        let sizes: Vec<usize> = (0..C_SIZES.len()).map(|_| sequence.next_size()).collect();
        assert_eq!(sizes, C_SIZES);
        assert_eq!(SizeRange { min: 1, max: 32768 }.total(C_SIZES.len() as u64), C_SIZES.iter().sum::<usize>() as u64);
    }

    const C_SIZES: [usize; 8] = [2138, 2182, 5634, 29499, 28782, 6338, 22238, 25184];
}
