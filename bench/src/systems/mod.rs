//! The systems under measurement, as a table: what each is, what it can do by which code, how it waits, and how it is
//! built and started. Their code is in the files beside this one, or, if it needs another library or language, a
//! program of its own (`peers.rs`).

mod append;
mod broadcast;
pub mod c;
mod call;
mod framed;
pub mod limits;
mod lisp;
mod many;
mod packets;
pub mod peers;
mod pelton;
mod pipe;
mod redis;
pub mod socket;
mod threads;
mod wire;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;

use self::{
    append::{bump, file, mutex_vec, queues},
    call::{c::CCalls, queue},
    packets::SockSeqpacketBatched,
    peers::{CARGO, FOREIGN, GO, JAVA, NODE, PYTHON, THREADS, built, go, locked},
    pelton::{ByDirectory, BySocket, Pelton, lasting},
    pipe::Pipe,
    socket::{SockDgram, SockDgrams, SockSeqpacket, SockStream, SockStreamBatched},
};
use crate::{
    parameters::{Job, Kind, Process, Wait, words},
    plan::{Choice, SYSTEM, System, Waits},
    workloads::{
        append::part as appending, batches, call::part as calling, fan_in, part, reattach, threads as between,
    },
};

const OWN: System = System { version: |_| env!("CARGO_PKG_VERSION").to_string(), ..SYSTEM };
const IN_PROCESS: System = System { version: |_| "Rust's std".to_string(), ..SYSTEM };
const CROSSBEAM: System = System { version: |_| "crossbeam-queue 0.3".to_string(), ..SYSTEM };
const LISP: System = System { version: |_| lisp::version(), sides: &[(Kind::Append, lisp::part)], ..SYSTEM };
const LIMITS: System = System {
    version: |_| limits::version(),
    // Fixed waits: its eventfds block, its rings spin.
    waits: Waits::Own(|plan| if plan.job.delay_us > 0 { Wait::Block } else { Wait::Spin }),
    run: Some(limits::run),
    ..SYSTEM
};
/// Caller and handler in one process. The caller sleeps in epoll, whatever `--wait` says.
const QUEUE: System =
    System { waits: Waits::Own(|_| Wait::Epoll), process: Process { is_both: true, ..SYSTEM.process }, ..SYSTEM };

static SYSTEMS: &[System] = &[
    System {
        name: "pelton",
        about: "pelton, connected by the name of a Unix socket; between threads, for calls and for appending its own",
        sides: &[
            (Kind::Processes, part::<Pelton<BySocket>>),
            (Kind::Threads, |job| between::one_by_one(job, threads::pair(job)?)),
            (Kind::FanIn, |job| fan_in::part::<Pelton<BySocket>, _>(job, Pelton::gathering)),
            (Kind::Broadcast, broadcast::part::<BySocket>),
            (Kind::Call, |job| calling(job, call::Pelton::new, call::PeltonServing::new)),
            (Kind::Append, |job| appending(job, append::pelton::open)),
            (Kind::AppendFile, |job| appending(job, file::open_records)),
        ],
        ..OWN
    },
    System {
        name: "pelton-path",
        about: "pelton, in a directory that keeps the channel: a tmpfs where there is one",
        sides: &[
            (Kind::Processes, part::<Pelton<ByDirectory>>),
            (Kind::Broadcast, broadcast::part::<ByDirectory>),
            (Kind::Successors, |job| reattach::part(job, lasting(job))),
        ],
        process: Process { in_shared_memory: true, ..SYSTEM.process },
        ..OWN
    },
    System {
        name: "pelton-batches",
        about: "pelton, 64 messages to a reservation, and several to a release",
        sides: &[
            (Kind::Processes, |job| batches::part(job, threads::sending_batches, threads::receiving_batches)),
            (Kind::Threads, |job| between::batches(job, threads::pair_of_batches(job)?)),
        ],
        only: &["stream"],
        ..OWN
    },
    System {
        name: "pelton-c",
        about: "pelton by a C program",
        sides: &[(Kind::Processes, c::part), (Kind::Call, |job| calling(job, CCalls::open, CCalls::open))],
        only: &["stream", "roundtrip", "lopsided", "idle"],
        in_libuv: true,
        build: |system, _, wait| c::compile(system.name, wait).map(|_| Vec::new()),
        ..OWN
    },
    System {
        name: "pelton-c-go",
        about: "pelton by a C program, to a service in Go",
        sides: &[(Kind::Call, |job| calling(job, CCalls::open, CCalls::open))],
        process: Process { is_service_only: true, ..SYSTEM.process },
        build: |system, _, wait| c::compile(system.name, wait).and_then(|_| go("pelton-go")),
        ..OWN
    },
    System {
        name: "pelton-stream",
        about: "pelton with one sender, by a channel of two, whatever --senders says",
        sides: &[(Kind::FanIn, |job| fan_in::part::<Pelton<BySocket>, _>(job, Pelton::<BySocket>::one_sender))],
        vary: |plan| (plan.job.senders, plan.job.idle) = (1, 0),
        ..OWN
    },
    System {
        name: "pelton-alone",
        about: "pelton without the idle senders, the lagging subscribers, or the flooding client",
        sides: &[
            (Kind::Broadcast, broadcast::part::<BySocket>),
            (Kind::FanIn, |job| fan_in::part::<Pelton<BySocket>, _>(job, Pelton::gathering)),
            (Kind::Call, |job| calling(job, call::Pelton::new, call::PeltonServing::new)),
        ],
        vary: |plan| plan.job.idle = 0,
        ..OWN
    },
    System {
        name: "pelton-copies",
        about: "pelton with a channel to each receiver, into each of which the sender copies each message",
        sides: &[(Kind::Broadcast, part::<broadcast::Copies>)],
        ..OWN
    },
    System {
        name: "pelton-topic",
        about: "pelton with a publisher for each sender, and a set of subscribers",
        sides: &[(Kind::FanIn, |job| fan_in::part::<broadcast::Topic, _>(job, broadcast::Topic::gathering))],
        ..OWN
    },
    System {
        name: "pelton-fan-in",
        about: "as many messages one way as the calls have, by a fan-in of as many senders",
        sides: &[(Kind::Call, |job| fan_in::part::<Pelton<BySocket>, _>(job, Pelton::gathering))],
        vary: fan_in::instead_of_calls,
        ..OWN
    },
    System {
        name: "limits",
        about: "bench/limits/limits.c, the least code that could do the job",
        sides: &[
            (Kind::Processes, limits::part),
            (Kind::FanIn, limits::part),
            (Kind::Call, limits::part),
            (Kind::Append, limits::part),
        ],
        only: &["stream", "roundtrip"],
        ..LIMITS
    },
    System {
        name: "limits-window",
        about: "the same with pelton's window of 256 KiB instead of 128: how far a sender writes before it returns",
        sides: &[(Kind::Processes, limits::part), (Kind::FanIn, limits::part)],
        only: &["stream"],
        ..LIMITS
    },
    System {
        name: "pipe",
        about: "a pipe: length and payload in one write",
        sides: &[(Kind::Processes, part::<Pipe>)],
        ..SYSTEM
    },
    System {
        name: "sock-stream",
        about: "a Unix stream socket: length and payload in one write",
        sides: &[
            (Kind::Processes, part::<SockStream>),
            (Kind::FanIn, |job| fan_in::part::<SockStream, _>(job, SockStream::gathering)),
            (Kind::Call, call::by_socket),
        ],
        ..SYSTEM
    },
    System {
        name: "sock-stream-batched",
        about: "the same with 64 KiB of buffer on both sides",
        sides: &[(Kind::Processes, part::<SockStreamBatched>), (Kind::Call, call::by_socket)],
        ..SYSTEM
    },
    System {
        name: "sock-stream-alone",
        about: "sock-stream without the flooding client",
        sides: &[(Kind::Call, call::by_socket)],
        vary: |plan| plan.job.idle = 0,
        ..SYSTEM
    },
    System {
        name: "sock-seqpacket",
        about: "a Unix seqpacket socket",
        sides: &[
            (Kind::Processes, part::<SockSeqpacket>),
            (Kind::FanIn, |job| fan_in::part::<SockSeqpacket, _>(job, SockSeqpacket::gathering)),
        ],
        ..SYSTEM
    },
    System {
        name: "sock-seqpacket-batched",
        about: "the same, up to 64 messages a system call",
        sides: &[(Kind::Processes, part::<SockSeqpacketBatched>)],
        ..SYSTEM
    },
    System {
        name: "sock-dgram",
        about: "a Unix datagram socket; in a broadcast, one for each receiver",
        sides: &[(Kind::Processes, part::<SockDgram>), (Kind::Broadcast, part::<SockDgrams>)],
        ..SYSTEM
    },
    System {
        name: "redis",
        about: "Redis's publish-subscribe over a Unix socket, by the redis-server that is installed",
        sides: &[(Kind::Broadcast, part::<redis::Redis>)],
        waits: Waits::Own(|_| Wait::Block),
        process: Process { is_unpinned: true, ..SYSTEM.process },
        version: |_| redis::version().unwrap_or("Redis".to_string()),
        build: |_, _, _| redis::version().map(|_| Vec::new()),
        suite: Some("processes"),
        ..SYSTEM
    },
    System {
        name: "eventfd-ring",
        about: "a least ring in C with eventfds, in libuv's loop",
        sides: &[(Kind::Processes, c::part)],
        only: &["stream"],
        in_libuv: true,
        build: |system, _, wait| c::compile(system.name, wait).map(|_| Vec::new()),
        ..SYSTEM
    },
    System {
        name: "queue",
        about: "inside one C program: a queue to a handler thread, and an eventfd for the replies",
        sides: &[(Kind::Call, queue::part)],
        build: |_, _, _| queue::library("queue").map(|_| Vec::new()),
        ..QUEUE
    },
    System {
        name: "queue-go",
        about: "the same with the handler in Go",
        sides: &[(Kind::Call, queue::part)],
        build: |_, _, _| queue::build_go().map(|()| Vec::new()),
        ..QUEUE
    },
    System {
        name: "bump",
        about: "one buffer for all threads, in which each takes space by fetch_add",
        sides: &[(Kind::Append, |job| appending(job, bump::open))],
        ..IN_PROCESS
    },
    System {
        name: "mutex-vec",
        about: "one buffer for all threads, behind a lock",
        sides: &[(Kind::Append, |job| appending(job, mutex_vec::open))],
        ..IN_PROCESS
    },
    System {
        name: "write",
        about: "the same, and a plain write of the buffer when it is full",
        sides: &[(Kind::AppendFile, |job| appending(job, file::open_plain))],
        ..IN_PROCESS
    },
    System {
        name: "array-queue",
        about: "crossbeam's bounded queue, and a thread that moves the messages from it into a buffer",
        sides: &[(Kind::Append, |job| appending(job, queues::bounded))],
        ..CROSSBEAM
    },
    System {
        name: "seg-queue",
        about: "crossbeam's unbounded queue, and such a thread",
        sides: &[(Kind::Append, |job| appending(job, queues::unbounded))],
        ..CROSSBEAM
    },
    System {
        name: "pelton-sbcl",
        about: "pelton by a program in SBCL",
        sides: &[(Kind::Append, lisp::part), (Kind::Processes, lisp::part)],
        only: &["stream"],
        ..LISP
    },
    System {
        name: "pelton-sbcl-reserved",
        about: "pelton by a program in SBCL that writes each message in place",
        ..LISP
    },
    System { name: "sbcl-mutex", about: "in SBCL: one buffer for all threads, behind a lock", ..LISP },
    System {
        name: "sbcl-compare-and-swap",
        about: "in SBCL: one buffer for all threads, in which each takes space by a compare-and-swap",
        ..LISP
    },
    // Programs of bench/peers, each named as its program: `bench/README.md` has the reasons for each best wait.
    System { name: "ipc_ring", about: "the crate ipc_ring: a ring in a file", ..CARGO },
    System { name: "ipmpsc", about: "the crate ipmpsc: a ring in a file", ..CARGO },
    System {
        name: "iceoryx2",
        about: "the crate iceoryx2: publish-subscribe by loaned samples",
        sides: &[(Kind::Processes, peers::elsewhere), (Kind::Broadcast, peers::elsewhere)],
        waits: Waits::Best(Wait::Spin, Wait::Spin),
        ..CARGO
    },
    System { name: "shmem-ipc", about: "the crate shmem-ipc, up to 64 messages a call", ..CARGO },
    System {
        name: "io-uring-stream",
        about: "a Unix stream socket by io_uring, 64 KiB of buffer on both sides",
        waits: Waits::Best(Wait::Block, Wait::Block),
        version: |_| peers::io_uring(),
        ..CARGO
    },
    System {
        name: "io-uring-seqpacket",
        about: "a Unix seqpacket socket by io_uring, up to 64 messages a system call",
        waits: Waits::Best(Wait::Block, Wait::Block),
        version: |_| peers::io_uring(),
        ..CARGO
    },
    System {
        name: "zeromq-ipc",
        about: "ZeroMQ's ipc transport, by the libzmq that is installed",
        sides: &[(Kind::Processes, peers::elsewhere), (Kind::Broadcast, peers::elsewhere)],
        process: Process { is_unpinned: true, ..CARGO.process },
        version: |_| "libzmq as installed".to_string(),
        build: |system, _, _| built(system.name).context("it needs libzmq: on Debian, install libzmq3-dev"),
        ..CARGO
    },
    System {
        name: "rtrb",
        about: "the crate rtrb, one message a call",
        waits: Waits::Best(Wait::Spin, Wait::Spin),
        ..THREADS
    },
    System {
        name: "rtrb-chunks",
        about: "the crate rtrb, 64 messages to a chunk",
        waits: Waits::Best(Wait::Spin, Wait::Spin),
        build: |_, _, _| built("rtrb"),
        version: |_| locked("rtrb"),
        ..THREADS
    },
    System {
        name: "crossbeam-channel",
        about: "the crate crossbeam-channel",
        build: |_, _, _| built("channels"),
        ..THREADS
    },
    System { name: "flume", about: "the crate flume", build: |_, _, _| built("channels"), ..THREADS },
    System { name: "kanal", about: "the crate kanal", build: |_, _, _| built("channels"), ..THREADS },
    System { name: "multiprocessing-queue", about: "Python's multiprocessing.Queue", ..PYTHON },
    System { name: "multiprocessing-pipe", about: "Python's multiprocessing.Pipe", ..PYTHON },
    System { name: "pelton-python", about: "pelton between two Python processes, by bindings/python", ..PYTHON },
    System {
        name: "pelton-node",
        about: "pelton between two Node processes, by bindings/node",
        sides: &[(Kind::Processes, peers::elsewhere), (Kind::Call, peers::elsewhere)],
        ..NODE
    },
    System {
        name: "pelton-node-batches",
        about: "pelton between two Node processes, 64 messages a call",
        only: &["stream"],
        ..NODE
    },
    System { name: "node-child-process", about: "Node's child_process IPC, with advanced serialization", ..NODE },
    System { name: "node-worker", about: "Node's postMessage between worker threads", ..NODE },
    System { name: "node-sock-stream", about: "Node's Unix socket, with length prefixes", ..NODE },
    System {
        name: "node-undici",
        about: "HTTP over a Unix socket in Node: undici calls node:http",
        sides: &[(Kind::Call, peers::elsewhere)],
        ..NODE
    },
    System {
        name: "node-grpc",
        about: "gRPC over a Unix socket in Node: @grpc/grpc-js",
        sides: &[(Kind::Call, peers::elsewhere)],
        ..NODE
    },
    System {
        name: "aeron",
        about: "Aeron's IPC, between two Java processes, or more",
        sides: &[(Kind::Processes, peers::elsewhere), (Kind::Broadcast, peers::elsewhere)],
        only: &["stream", "roundtrip"],
        waits: Waits::Best(Wait::Spin, Wait::Spin),
        process: Process { is_unpinned: true, ..FOREIGN.process },
        build: |_, _, _| peers::aeron(),
        version: |_| format!("Aeron {}", peers::aeron_version()),
        ..FOREIGN
    },
    System {
        name: "pelton-java",
        about: "pelton between two Java processes, by bindings/java",
        sides: &[(Kind::Processes, peers::elsewhere), (Kind::Call, peers::elsewhere)],
        waits: Waits::Best(Wait::Block, Wait::Spin),
        ..JAVA
    },
    System {
        name: "java-sock-stream",
        about: "Java's Unix socket (SocketChannel), with length prefixes",
        sides: &[(Kind::Processes, peers::elsewhere), (Kind::Call, peers::elsewhere)],
        ..JAVA
    },
    System {
        name: "chronicle-queue",
        about: "Chronicle Queue's open-source edition, between two Java processes",
        waits: Waits::Best(Wait::Spin, Wait::Spin),
        ..JAVA
    },
    System {
        name: "java-grpc",
        about: "gRPC over a Unix socket in Java: grpc-netty by epoll",
        sides: &[(Kind::Call, peers::elsewhere)],
        ..JAVA
    },
    System {
        name: "pelton-go",
        about: "pelton by a Go program, by bindings/go",
        sides: &[(Kind::Processes, peers::elsewhere), (Kind::Call, peers::elsewhere)],
        ..GO
    },
    System {
        name: "go-sock-stream",
        about: "between two Go processes: a Unix stream socket, one write a message",
        ..GO
    },
    System {
        name: "net-rpc",
        about: "between two Go processes: net/rpc over a Unix socket",
        sides: &[(Kind::Call, peers::elsewhere)],
        ..GO
    },
];

/// All of them.
pub fn all() -> &'static [System] {
    SYSTEMS
}

/// The system of that name.
pub fn find(name: &str) -> Option<&'static System> {
    SYSTEMS.iter().find(|system| system.name == name)
}

/// One side's part, in its process: the whole of this program.
pub fn side(job: &Job) -> Result<()> {
    let system = find(&job.system).with_context(|| format!("no system is named {}", job.system))?;
    ensure!(
        system.in_libuv || !matches!(job.wait, Wait::Uv | Wait::UvBulk),
        "only a side in C is in libuv's loop: write pelton-c"
    );
    system.part(job.kind, &job.workload)?(job)
}

/// Reads a list of systems, each once, which may have waits of their own.
pub fn choices(text: &str) -> Result<Vec<Choice>> {
    let mut choices: Vec<Choice> = Vec::new();
    for part in text.split(',') {
        let choice = choice(part)?;
        ensure!(
            choices.iter().all(|other| other.to_string() != choice.to_string()),
            "found `{part}` twice, wanted each system once: use --runs to measure it more often"
        );
        choices.push(choice);
    }
    Ok(choices)
}

fn choice(text: &str) -> Result<Choice> {
    let (name, wait) = text.split_once(':').map_or((text, None), |(name, wait)| (name, Some(wait)));
    let names = || SYSTEMS.iter().map(|system| system.name).collect::<Vec<_>>().join(", ");
    let system = find(name).with_context(|| format!("found the system `{name}`, wanted one of {}", names()))?;
    let Some(wait) = wait else { return Ok(Choice { system, wait: None }) };
    ensure!(
        !matches!(system.waits, Waits::Own(_)),
        "found `{text}`, but {name} waits in one way only, not by {wait}: write `{name}`"
    );
    let found = Wait::from_str(wait, false).ok();
    ensure!(found.is_some(), "found the wait `{wait}` in `{text}`, wanted one of {}", words::<Wait>());
    Ok(Choice { system, wait: found })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::plan;

    #[test]
    fn a_system_may_have_a_wait_of_its_own() {
        let waits = |text| choices(text).unwrap().iter().map(|choice| choice.wait).collect::<Vec<_>>();
        assert_eq!(waits("pelton:block,sock-stream-batched,pelton"), [Some(Wait::Block), None, None]);
        assert_eq!(choice("pelton:block").unwrap().to_string(), "pelton:block");
        for (bad, words) in [
            ("carrier-pigeon", "`carrier-pigeon`, wanted one of pelton,"),
            ("pipe:doze", "`doze`"),
            ("limits:spin", "one way only"),
            ("pipe,pipe", "twice"),
        ] {
            let error = choices(bad).err().unwrap().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn every_system_has_a_name_of_its_own_and_a_part() {
        for (at, system) in SYSTEMS.iter().enumerate() {
            assert!(!system.about.is_empty() && !system.sides.is_empty(), "{}", system.name);
            assert!(!(system.version)(system).is_empty(), "{}", system.name);
            assert!(SYSTEMS[..at].iter().all(|other| other.name != system.name), "{} twice", system.name);
        }
    }

    #[test]
    fn round_trips_spin_where_they_can_and_streams_use_the_best_wait() {
        let there_and_back = crate::plan::Plan { wait: Wait::Spin, ..plan() };
        let mut one_way = there_and_back.clone();
        one_way.job.launch.roles = &[crate::parameters::Role::Receiver, crate::parameters::Role::Sender];
        let wait = |name: &str, plan| find(name).unwrap().wait(plan, None);
        assert_eq!((wait("ipmpsc", &there_and_back), wait("ipmpsc", &one_way)), (Wait::Spin, Wait::Block));
        // Its ring is in the kernel, which cannot spin.
        assert_eq!(wait("io-uring-stream", &there_and_back), Wait::Block);
        assert_eq!(find("ipmpsc").unwrap().wait(&one_way, Some(Wait::Spin)), Wait::Spin);
        assert_eq!(wait("queue", &one_way), Wait::Epoll);
    }
}
