//! What to measure: the words of the command line, and the job of a measured process.

use std::{ffi::OsString, fmt, path::PathBuf, str::FromStr};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::peers::Peer;

/// The workloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Workload {
    /// Messages one way, without a rate
    Stream,
    /// One message there and back at a time
    Roundtrip,
    /// As a stream, but both sides work for each message, and one of them ten times as long as the other
    Lopsided,
    /// An open channel whose receiver waits and receives nothing
    Idle,
    /// The successors of a receiver, and then of a sender, killed on a lane full of messages; pelton-path only
    Reattach,
    /// As a stream, but many processes send to one receiver
    FanIn,
    /// Threads of one process append messages with headers; the buffer flushes them
    Append,
    /// Clients call a service, which replies to each request with its own bytes
    Call,
    /// As a stream, but between two threads of one process
    Threads,
    /// The resident memory of a channel whose receiver reads nothing while the sender sends
    Memory,
    /// The program kills each side in the middle of a stream: does the other detect it?
    Kill,
}

impl Workload {
    /// The processes, that of the first CPU first. A fan-in has several of the second.
    pub fn roles(self) -> &'static [Role] {
        match self {
            Workload::Roundtrip => &[Role::Asker, Role::Answerer],
            Workload::Append => &[Role::Appender],
            Workload::Threads => &[Role::Threads],
            Workload::Call => &[Role::Service, Role::Client],
            _ => &[Role::Receiver, Role::Sender],
        }
    }
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

/// Which side of a lopsided channel works ten times as long as the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Slow {
    /// Then the sender waits for free space most of the time
    Receiver,
    /// Then the receiver waits for messages most of the time
    Sender,
}

/// The systems: how messages are carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SystemName {
    /// pelton, connected by the name of a Unix socket
    Pelton,
    /// pelton by a C program, connected by the name of a Unix socket
    PeltonC,
    /// Streams in libuv's loop: a least ring in shared memory with eventfds, in C
    EventfdRing,
    /// pelton, in a directory that keeps the channel: a tmpfs where there is one
    PeltonPath,
    /// bench/limits/limits.c, the least code that could do the job
    Limits,
    /// The same with pelton's own window of 256 KiB instead of 128: how far a sender writes before it returns to the
    /// front of its ring
    LimitsWindow,
    /// A pipe: length and payload in one write
    Pipe,
    /// A Unix stream socket: length and payload in one write
    SockStream,
    /// A Unix stream socket with 64 KiB of buffer on both sides
    SockStreamBatched,
    /// Calls: a Unix stream socket without the flooding client
    SockStreamAlone,
    /// A Unix seqpacket socket
    SockSeqpacket,
    /// The same, up to 64 messages a system call
    SockSeqpacketBatched,
    /// Fan-in: pelton with one sender, by a channel of two, whatever --senders says
    PeltonStream,
    /// Fan-in: pelton without the idle senders; calls: without the flooding client
    PeltonAlone,
    /// Calls: as many messages one way, by a fan-in of as many senders
    PeltonFanIn,
    /// Calls: pelton from nginx, in Lua
    PeltonNginx,
    /// Calls: a Unix stream socket from nginx, by ngx_lua's cosockets, with a 4-byte length
    CosocketNginx,
    /// Calls: pelton by a C program, to a service in Go
    PeltonCGo,
    /// Calls inside one C program: a queue to a handler thread, and an eventfd for the replies
    Queue,
    /// The same with the handler in Go
    QueueGo,
    /// Append: one buffer for all threads, in which each takes space by fetch_add
    Bump,
    /// Append: one buffer for all threads, behind a lock
    MutexVec,
    /// Append to a file: one buffer for all threads, behind a lock, and a plain write of it when it is full
    Write,
    /// pelton by a program in SBCL: appending, and streams
    PeltonSbcl,
    /// Append, in SBCL: pelton's appenders, where each message is written in place
    PeltonSbclReserved,
    /// Append, in SBCL: one buffer for all threads, behind a lock
    SbclMutex,
    /// Append, in SBCL: one buffer for all threads, in which each takes space by an atomic addition
    SbclCas,
    /// Append, in SBCL: the same by a compare-and-swap, and without a list of the writers
    SbclCompareAndSwap,
    /// Append: crossbeam's bounded queue, and a thread that moves the messages from it into a buffer
    ArrayQueue,
    /// Append: crossbeam's unbounded queue, and such a thread
    SegQueue,
    /// pelton, 64 messages to a reservation, and several to a release: streams, and between threads
    PeltonBatches,
    /// The crate ipc_ring; this system and all below are programs of `bench/peers`
    #[value(name = "ipc_ring")]
    IpcRing,
    /// The crate ipmpsc
    Ipmpsc,
    /// The crate iceoryx2
    Iceoryx2,
    /// The crate shmem-ipc, up to 64 messages a call
    ShmemIpc,
    /// A Unix stream socket by io_uring, 64 KiB of buffer on both sides
    IoUringStream,
    /// A Unix seqpacket socket by io_uring, up to 64 messages a system call
    IoUringSeqpacket,
    /// ZeroMQ's ipc transport, by the libzmq that is installed
    ZeromqIpc,
    /// Python's multiprocessing.Queue
    MultiprocessingQueue,
    /// Python's multiprocessing.Pipe
    MultiprocessingPipe,
    /// Aeron's IPC, between two Java processes
    Aeron,
    /// pelton by a Go program, by bindings/go: streams and calls
    PeltonGo,
    /// Streams between two Go processes: a Unix stream socket, one write a message
    GoSockStream,
    /// Calls between two Go processes: net/rpc over a Unix socket
    NetRpc,
    /// Between threads: the crate rtrb, one message a call
    Rtrb,
    /// Between threads: the crate rtrb, 64 messages to a chunk
    RtrbChunks,
    /// Between threads: the crate crossbeam-channel
    CrossbeamChannel,
    /// Between threads: the crate flume
    Flume,
    /// Between threads: the crate kanal
    Kanal,
}

impl SystemName {
    /// Whether it is limits.c, which starts its own processes.
    pub fn is_limits(self) -> bool {
        matches!(self, SystemName::Limits | SystemName::LimitsWindow)
    }

    /// Whether one process is both the client and the service of its calls.
    pub fn is_one_process(self) -> bool {
        matches!(self, SystemName::Queue | SystemName::QueueGo)
    }

    /// Whether its sides are loops in C, which this program loads.
    pub fn is_in_c(self) -> bool {
        matches!(self, SystemName::PeltonC | SystemName::EventfdRing)
    }

    /// Whether this is a system of that workload (which may append to a file), or else in which workload it belongs.
    pub fn belongs(self, workload: Workload, to_file: bool) -> Result<(), &'static str> {
        let (appends, gathers) = (workload == Workload::Append, workload == Workload::FanIn);
        let calls = workload == Workload::Call;
        let threads = workload == Workload::Threads;
        if let Some(peer) = Peer::of(self) {
            return if peer.workloads().contains(&workload) { Ok(()) } else { Err(peer.elsewhere()) };
        }
        match self {
            SystemName::Pelton => Ok(()),
            SystemName::EventfdRing if workload == Workload::Stream => Ok(()),
            SystemName::EventfdRing => Err("its program in C has the workload stream only"),
            SystemName::PeltonBatches if threads || workload == Workload::Stream => Ok(()),
            SystemName::PeltonBatches => Err("it has messages that go together: measure it with stream or threads"),
            SystemName::PeltonFanIn | SystemName::PeltonAlone if calls => Ok(()),
            SystemName::SockStream | SystemName::SockStreamAlone | SystemName::SockStreamBatched if calls => Ok(()),
            SystemName::PeltonNginx | SystemName::CosocketNginx if calls => Ok(()),
            SystemName::PeltonC | SystemName::PeltonCGo | SystemName::Queue | SystemName::QueueGo if calls => Ok(()),
            SystemName::PeltonCGo | SystemName::Queue | SystemName::QueueGo => {
                Err("it has calls only: measure it with call")
            }
            SystemName::PeltonNginx | SystemName::CosocketNginx => Err("it calls from nginx: measure it with call"),
            SystemName::PeltonFanIn | SystemName::SockStreamAlone => {
                Err("it is what calls are compared with: measure it with call")
            }
            SystemName::Write if to_file => Ok(()),
            SystemName::Write => Err("it writes to a file: measure it with append --file DIR"),
            _ if to_file => Err("it does not append to a file: leave out --file"),
            SystemName::Limits if matches!(workload, Workload::Threads | Workload::Memory | Workload::Kill) => {
                Err("limits.c has streams, round trips and appending between its own processes only")
            }
            SystemName::Limits => Ok(()),
            SystemName::LimitsWindow if matches!(workload, Workload::Stream | Workload::FanIn) => Ok(()),
            SystemName::LimitsWindow => Err("only its streams have a window: measure limits"),
            SystemName::PeltonSbcl if matches!(workload, Workload::Append | Workload::Stream) => Ok(()),
            SystemName::PeltonSbcl => Err("its sides in Lisp append, or have a stream"),
            SystemName::Bump
            | SystemName::MutexVec
            | SystemName::PeltonSbclReserved
            | SystemName::SbclMutex
            | SystemName::SbclCas
            | SystemName::SbclCompareAndSwap
            | SystemName::ArrayQueue
            | SystemName::SegQueue => {
                if appends {
                    Ok(())
                } else {
                    Err("it is between threads only: measure it with append")
                }
            }
            SystemName::PeltonStream | SystemName::PeltonAlone => {
                if gathers {
                    Ok(())
                } else {
                    Err("it is what many senders are compared with: measure it with fan-in")
                }
            }
            SystemName::SockStream | SystemName::SockSeqpacket if !appends && !calls && !threads => Ok(()),
            _ if appends => Err("it is between processes: measure it with another workload than append"),
            _ if gathers => Err("it has no side here that receives of many senders"),
            _ if threads => Err("it is between processes: measure it with another workload than threads"),
            SystemName::PeltonC if matches!(workload, Workload::Memory | Workload::Kill) => {
                Err("its loops in C have no part in this: measure pelton, it is the same library")
            }
            _ if calls => Err("it has no calls here"),
            _ => Ok(()),
        }
    }
}

/// The word of the command line for a value of one of the enums above.
pub fn word<T: ValueEnum>(value: T) -> String {
    value.to_possible_value().expect("no value is hidden").get_name().to_string()
}

/// A system of the list, which may have a wait of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The system
    pub system: SystemName,
    /// Overrides `--wait`
    pub wait: Option<Wait>,
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Choice, String> {
        let (name, wait) = match text.split_once(':') {
            Some((name, wait)) => (name, Some(wait)),
            None => (text, None),
        };
        let system = SystemName::from_str(name, false)
            .map_err(|_| format!("found the system `{name}`, wanted one of {}", words::<SystemName>()))?;
        let wait = wait
            .map(|wait| {
                Wait::from_str(wait, false)
                    .map_err(|_| format!("found the wait `{wait}` in `{text}`, wanted one of {}", words::<Wait>()))
            })
            .transpose()?;
        if system.is_limits() && wait.is_some() {
            return Err(format!("found `{text}`, but the limits wait in one way only: write `{name}`"));
        }
        Ok(Choice { system, wait })
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&word(self.system))?;
        match self.wait {
            Some(wait) => write!(f, ":{}", word(wait)),
            None => Ok(()),
        }
    }
}

fn words<T: ValueEnum>() -> String {
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
    /// Connects as many senders, and sends nothing; on the second CPU
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

    /// The word for error messages.
    pub fn name(self) -> &'static str {
        match self {
            Role::Receiver => "receiver",
            Role::Sender => "sender",
            Role::Filler => "filler",
            Role::Asker => "asker",
            Role::Answerer => "answerer",
            Role::Idler => "idler",
            Role::Appender => "appender",
            Role::Service => "service",
            Role::Client => "client",
            Role::Flooder => "flooder",
            Role::Threads => "threads",
        }
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

/// The whole input of one measured process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// The system
    pub system: SystemName,
    /// How this side waits
    pub wait: Wait,
    /// The workload
    pub workload: Workload,
    /// This process's role
    pub role: Role,
    /// Sizes of the messages
    pub sizes: SizeRange,
    /// Bytes of a pelton or limits lane
    pub capacity: u64,
    /// Microseconds that each side of a round trip busy-waits before it sends
    pub delay_us: u64,
    /// The work of the receiver and the sender of a lopsided channel for each message, in steps of
    /// [`work`](crate::workload::work); the first is also each appending thread's
    pub work_steps: [u64; 2],
    /// Processes that send in a fan-in, or call
    pub senders: u32,
    /// Connected senders of a fan-in that send nothing
    pub idle: u32,
    /// The options of calls
    pub calls: Calls,
    /// This sender's number
    pub index: u32,
    /// Threads of an append
    pub threads: u32,
    /// Whether they append to a file, in `directory`
    pub to_file: bool,
    /// The passes, in order
    pub passes: Vec<Pass>,
    /// The CPU to pin to
    pub cpu: Option<usize>,
    /// The receiver's (asker's) and the sender's, for programs that are both; empty if nothing is pinned
    pub cpus: Vec<usize>,
    /// The directory by which the two sides find each other
    pub directory: PathBuf,
    /// The control group of the measured processes, if they have a quota
    #[serde(skip)]
    pub cgroup: Option<PathBuf>,
    /// The program to start, with its first arguments; empty for this program itself
    #[serde(skip)]
    pub program: Vec<OsString>,
}

impl Job {
    /// The number of messages of all senders in a pass of `count`: rounds, or messages of each thread.
    pub fn messages(&self, count: u64) -> u64 {
        match self.workload {
            Workload::Roundtrip | Workload::Call => 2 * count,
            Workload::Append => self.threads as u64 * count,
            _ => count,
        }
    }

    /// That sender's share of `count` messages.
    pub fn share(&self, index: u32, count: u64) -> u64 {
        let senders = self.senders as u64;
        count / senders + u64::from((index as u64) < count % senders)
    }

    /// There and back: the names of the direction this side sends on and of the one it receives on, as its other side
    /// has them.
    pub fn directions(&self) -> (&'static str, &'static str) {
        if self.role == Role::Asker { ("there", "back") } else { ("back", "there") }
    }

    /// The work of this side for each message.
    pub fn work_steps(&self) -> u64 {
        self.work_steps[self.role.cpu_index()]
    }

    /// Whether systems that can read messages in place do so.
    pub fn in_place(&self) -> bool {
        self.workload != Workload::Roundtrip && !self.sizes.is_fixed()
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
    fn a_system_may_have_a_wait_of_its_own() {
        assert_eq!("pelton:block".parse(), Ok(Choice { system: SystemName::Pelton, wait: Some(Wait::Block) }));
        assert_eq!("sock-stream-batched".parse(), Ok(Choice { system: SystemName::SockStreamBatched, wait: None }));
        assert_eq!("pelton:block".parse::<Choice>().unwrap().to_string(), "pelton:block");
        assert!("carrier-pigeon".parse::<Choice>().unwrap_err().contains("`carrier-pigeon`"));
        assert!("pipe:doze".parse::<Choice>().unwrap_err().contains("`doze`"));
        assert!("limits:spin".parse::<Choice>().is_err());
    }

    #[test]
    fn every_system_names_its_workloads() {
        assert_eq!(SystemName::Pelton.belongs(Workload::Append, false), Ok(()));
        assert_eq!(SystemName::Bump.belongs(Workload::Append, false), Ok(()));
        assert_eq!(SystemName::PeltonAlone.belongs(Workload::FanIn, false), Ok(()));
        assert_eq!(SystemName::Pipe.belongs(Workload::Stream, false), Ok(()));
        assert_eq!(SystemName::PeltonFanIn.belongs(Workload::Call, false), Ok(()));
        assert_eq!(SystemName::CosocketNginx.belongs(Workload::Call, false), Ok(()));
        assert_eq!(SystemName::Write.belongs(Workload::Append, true), Ok(()));
        assert_eq!(SystemName::Pelton.belongs(Workload::Append, true), Ok(()));
        assert!(SystemName::Limits.belongs(Workload::Append, true).is_err());
        for (system, workload) in [
            (SystemName::Write, Workload::Append),
            (SystemName::Bump, Workload::Stream),
            (SystemName::SockStream, Workload::Append),
            (SystemName::PeltonStream, Workload::Roundtrip),
            (SystemName::Pipe, Workload::FanIn),
            (SystemName::PeltonC, Workload::Append),
            (SystemName::Queue, Workload::Roundtrip),
            (SystemName::PeltonCGo, Workload::Stream),
            (SystemName::EventfdRing, Workload::Roundtrip),
            (SystemName::Pipe, Workload::Call),
            (SystemName::SockSeqpacket, Workload::Call),
            (SystemName::PeltonFanIn, Workload::FanIn),
            (SystemName::SockStreamAlone, Workload::Stream),
            (SystemName::PeltonNginx, Workload::Roundtrip),
            (SystemName::LimitsWindow, Workload::Roundtrip),
        ] {
            assert!(system.belongs(workload, false).is_err(), "{system:?} {workload:?}");
        }
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
