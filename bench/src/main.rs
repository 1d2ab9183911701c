//! The benchmark of pelton: workloads that measure it beside the machine's limits and the operating system's own
//! channels.
//!
//! This file parses the command line; the library beside it does the rest.

mod call_table;
mod suite;

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::ExitCode,
    str::FromStr,
};

use anyhow::Result;
use clap::{CommandFactory, Parser, error::ErrorKind};

use pelton_bench::{
    figures, file,
    parameters::{Calls, Choice, Placement, SizeRange, Slow, Wait, Workload, word},
    results,
    run::{self, Plan, Progress},
    side,
    sides::Interrupts,
};

/// The default systems.
const SYSTEMS: &str = "pelton,limits,pipe,sock-stream,sock-stream-batched,sock-seqpacket";

/// Measures pelton beside the machine's limits, pipes and sockets
///
/// Each run starts fresh processes on the first two CPUs, and the systems take turns. Figures are medians over the
/// runs; ratios are of
/// the first system to each other, run by run.
#[derive(Parser, Debug)]
#[command(name = "pelton-bench", version, max_term_width = 120)]
struct Arguments {
    /// The workload; or `file`, `call-table`, `all` or `figures`, which have a `--help` of their own
    workload: Workload,

    /// Bytes of a message, or MIN..MAX for random ones [default: 256 in a stream, fan-in, lopsided, memory and kill,
    /// 64 in a round trip, a call and threads, 16 in reattach and append, 256 with --file]
    #[arg(long, value_name = "N|MIN..MAX")]
    size: Option<SizeRange>,

    /// Messages of a stream, of all senders of a fan-in together, of each thread of an append, or in the lane; rounds
    /// of a round trip; calls of all clients together
    ///
    /// Defaults: 5,000,000 messages of up to 1 KiB, 1,000,000 of up to 32 KiB, 100,000 larger ones. Round trips and
    /// calls: 200,000; 20,000 with a delay; 10,000 of more than 32 KiB. With many calls in flight five times as many;
    /// with --rate as many as are due in five seconds. Append: 25,600,000 messages of each thread, 1,000,000 with
    /// --file, or as many as take two seconds of work. Reattach: 1,000,000 messages. Lopsided: as many as take the
    /// slow side two seconds of work.
    #[arg(long, value_name = "N")]
    count: Option<u64>,

    /// Gives each system as many messages, rounds or calls as last about S seconds, instead of the same number; with
    /// --count at most N
    ///
    /// One time slice and some page faults decide a pass of milliseconds, and a fast system's pass is the shortest.
    /// Some runs before the first find the number.
    #[arg(long, value_name = "S")]
    seconds: Option<f64>,

    /// Bytes of a pelton or limits lane
    ///
    /// [default: 64 MiB; 4 MiB for call, which is pelton's own; 1 MiB for append, kill and lopsided, so that the lane
    /// is full or empty many times]
    #[arg(long, value_name = "BYTES")]
    capacity: Option<u64>,

    /// How both sides wait [default: spin; block for idle, reattach, lopsided, append, memory, kill and with --delay,
    /// --rate, --beside-flood, --beside-load, --quota, another --placement than apart, or several
    /// --clients; a system of bench/peers as it performs best]
    #[arg(long)]
    wait: Option<Wait>,

    /// How often each system is measured
    #[arg(long, value_name = "N", default_value_t = 9)]
    runs: usize,

    /// Round trips and calls: each side delays each message by so many microseconds, so that the other side sleeps;
    /// the result is without the delays
    #[arg(long, value_name = "US", default_value_t = 0)]
    delay: u64,

    /// Lopsided: the side that works ten times as long as the other [default: receiver]
    #[arg(long, value_name = "SIDE")]
    slow: Option<Slow>,

    /// Lopsided: microseconds of work for each message [default: 200]. Append: NANOSECONDS of work of each thread
    /// [default: 0]
    #[arg(long, value_name = "N")]
    work: Option<u64>,

    /// Fan-in: processes that send [default: 2]
    #[arg(long, value_name = "K")]
    senders: Option<u32>,

    /// Fan-in: additional connected senders that send nothing, in one process [default: 0]
    #[arg(long, value_name = "N")]
    idle: Option<u32>,

    /// Call: processes that call the one service [default: 1]
    #[arg(long, value_name = "N")]
    clients: Option<u32>,

    /// Call: calls that each client has in flight at a time [default: 1]
    #[arg(long, value_name = "N")]
    in_flight: Option<u32>,

    /// Round trips and calls: how many are due in a second [default: unlimited]
    ///
    /// The time of each counts from its due time, however late the answer before it was.
    #[arg(long, value_name = "PER_SECOND")]
    rate: Option<u32>,

    /// Call: one more client, which is not measured, keeps 1,000 calls in flight meanwhile
    #[arg(long)]
    beside_flood: bool,

    /// Where the processes run
    #[arg(long, value_enum, default_value_t = Placement::Apart)]
    placement: Placement,

    /// So many other threads that only compute, at normal priority, run meanwhile
    #[arg(long, value_name = "N", default_value_t = 0)]
    beside_load: u32,

    /// The measured processes together get at most so many percent of one processor, by a control group: needs root,
    /// and a writable hierarchy with the cpu controller
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    quota: Option<u32>,

    /// Append: threads, all in one process [default: 2]
    #[arg(long, value_name = "T")]
    threads: Option<u32>,

    /// Append: to a file in this directory, removed at the end, instead of to a callback that counts
    ///
    /// The file is not synced. After each pass the program checks what the file holds; the figures leave that out.
    #[arg(long, value_name = "DIR")]
    file: Option<PathBuf>,

    /// Systems, in turn; the first is compared with the others
    ///
    /// pelton; pelton-c, the same by a C program; pelton-path, in a directory that keeps the channel; pelton-batches,
    /// 64 messages to a reservation, streams and between threads; limits, the least code that could do the job;
    /// limits-window, the same with pelton's window; pipe; sock-stream, one write per message; sock-stream-batched, 64
    /// KiB of buffer on both sides; sock-seqpacket; sock-seqpacket-batched, up to 64 messages a system call.
    ///
    /// Fan-in: also pelton-stream, one sender whatever --senders says; and pelton-alone, without idle senders. Calls:
    /// pelton, pelton-c, limits, sock-stream, sock-stream-batched; queue, a request queue to a handler thread inside
    /// one C program, and queue-go, with a handler in Go; pelton-c-go, a client in C of a service in Go;
    /// pelton-fan-in, as many messages one way; and pelton-alone and sock-stream-alone, without the flooding client.
    ///
    /// Append: bump, a buffer whose space threads take by fetch_add; mutex-vec; array-queue and seg-queue,
    /// crossbeam's. With --file: pelton, whose sink is a RecordFile, and write, one buffer of 1 MiB behind a lock,
    /// passed to write(2) when full.
    ///
    /// Systems of bench/peers, built at their first use: ipc_ring, ipmpsc, iceoryx2, shmem-ipc, io-uring-stream,
    /// io-uring-seqpacket, zeromq-ipc, multiprocessing-queue, multiprocessing-pipe, aeron; pelton-go, go-sock-stream
    /// and net-rpc, streams and calls in Go; between threads rtrb, rtrb-chunks, crossbeam-channel, flume, kanal.
    ///
    /// A system may have its own wait: `pelton:block,pelton:spin` compares the two in one interleaved run.
    ///
    /// [default: all but pelton-c and pelton-path; for idle, pelton; for reattach, pelton-path, the only one that can;
    /// for lopsided, pelton, sock-stream, sock-seqpacket; for fan-in, pelton, pelton-stream, limits, sock-stream,
    /// sock-seqpacket, and pelton-alone if there are idle senders; for call, pelton, limits, sock-stream, with many in
    /// flight sock-stream-batched instead of limits, of several clients also pelton-fan-in, and beside a flood pelton,
    /// pelton-alone, sock-stream, sock-stream-alone; for append, pelton, limits, bump, mutex-vec, array-queue,
    /// seg-queue, and with --file, pelton, write]
    #[arg(long, value_name = "A,B,...", value_parser = systems)]
    systems: Option<Systems>,

    /// Writes a page of the results, which needs no other file and no network
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,

    /// Writes a results file: the machine, and the lines of --json
    #[arg(long, value_name = "FILE.jsonl")]
    results: Option<PathBuf>,

    /// One JSON object a line for each system, then one of ratios, instead of the table
    #[arg(long)]
    json: bool,
}

/// A list of systems, each once.
#[derive(Clone, Debug)]
struct Systems(Vec<Choice>);

fn systems(text: &str) -> Result<Systems, String> {
    let mut choices: Vec<Choice> = Vec::new();
    for part in text.split(',') {
        let choice = Choice::from_str(part)?;
        if choices.contains(&choice) {
            return Err(format!("found `{part}` twice, wanted each system once: use --runs to measure it more often"));
        }
        choices.push(choice);
    }
    Ok(Systems(choices))
}

impl Arguments {
    fn plan(self) -> Result<Plan, String> {
        let Arguments { workload, size, count, capacity, wait, runs, delay, slow, work, .. } = self;
        let Arguments { senders, idle, threads, file, systems: chosen, .. } = self;
        let Arguments { clients, in_flight, rate, beside_flood, placement, beside_load, quota, seconds, .. } = self;
        let one_cpu = workload == Workload::Call && placement == Placement::Together;
        let calls =
            Calls { clients: clients.unwrap_or(1), in_flight: in_flight.unwrap_or(1), rate, beside_flood, one_cpu };
        let call = workload == Workload::Call;
        if !call && (Calls { rate: None, ..calls } != Calls::default() || clients.is_some() || in_flight.is_some()) {
            return Err(
                "found --clients, --in-flight, --beside-flood with messages without a reply: use them with call"
                    .to_string(),
            );
        }
        if !call && workload != Workload::Roundtrip && rate.is_some() {
            return Err("found --rate with messages without a reply: use it with roundtrip or call".to_string());
        }
        for (option, found, most) in [("--clients", calls.clients, 1000), ("--in-flight", calls.in_flight, 1024)] {
            if !(1..=most).contains(&found) {
                return Err(format!("found {option} {found}, wanted 1 to {most}"));
            }
        }
        if rate.is_some_and(|rate| !(1..=1_000_000).contains(&rate)) {
            return Err(format!("found --rate {}, wanted 1 to 1000000 calls a second", rate.unwrap_or_default()));
        }
        if !calls.one_by_one() && (rate.is_some() || delay > 0 || beside_flood) {
            return Err(
                "found --rate, --delay or --beside-flood with several calls at a time: leave out --clients and --in-flight"
                    .to_string(),
            );
        }
        if rate.is_some() && (delay > 0 || beside_flood) {
            return Err("found --rate with --delay or --beside-flood: use one of them".to_string());
        }
        if workload == Workload::Idle && (size.is_some() || count.is_some()) {
            return Err("found --size or --count with idle, which sends nothing: leave them out".to_string());
        }
        if !call && workload != Workload::Roundtrip && delay > 0 {
            return Err(format!(
                "found --delay {delay} with a workload that answers nothing: use it with roundtrip or call"
            ));
        }
        let append = workload == Workload::Append;
        if workload != Workload::Lopsided && (slow.is_some() || (work.is_some() && !append)) {
            return Err(
                "found --slow or --work with sides that do not work: use them with lopsided, --work also with append"
                    .to_string(),
            );
        }
        if workload != Workload::FanIn && (senders.is_some() || idle.is_some()) {
            return Err("found --senders or --idle with one sender: use them with fan-in".to_string());
        }
        if !append && threads.is_some() {
            return Err("found --threads with processes of one thread: use it with append".to_string());
        }
        if !append && file.is_some() {
            return Err("found --file with messages that go to a receiver: use it with append".to_string());
        }
        if let Some(file) = file.as_ref().filter(|file| !file.is_dir()) {
            return Err(format!("found --file {}, wanted a directory", file.display()));
        }
        let (senders, idle, threads) = (senders.unwrap_or(2), idle.unwrap_or(0), threads.unwrap_or(2));
        if senders == 0 || senders as u64 + idle as u64 > 1024 {
            return Err(format!("found --senders {senders} --idle {idle}, wanted 1 to 1024 together, one that sends"));
        }
        if !(1..=1024).contains(&threads) {
            return Err(format!("found --threads {threads}, wanted 1 to 1024"));
        }
        let (work_us, work_ns) = if append { (200, work.unwrap_or(0)) } else { (work.unwrap_or(200), 0) };
        if !(1..=1_000_000).contains(&work_us) {
            return Err(format!("found --work {work_us}, wanted 1 to 1000000 microseconds"));
        }
        if work_ns > 1_000_000_000 {
            return Err(format!("found --work {work_ns}, wanted at most 1000000000 nanoseconds"));
        }
        // An hour: beyond it a sum of delays could overflow.
        if delay > 3_600_000_000 {
            return Err(format!("found --delay {delay}, wanted at most 3600000000 microseconds"));
        }
        let sizes = size.unwrap_or(SizeRange::fixed(match workload {
            Workload::Stream | Workload::FanIn | Workload::Lopsided => 256,
            Workload::Append if file.is_some() => 256,
            Workload::Reattach | Workload::Append => 16,
            Workload::Memory | Workload::Kill => 256,
            Workload::Roundtrip | Workload::Idle | Workload::Call | Workload::Threads => 64,
        }));
        let fixed = matches!(workload, Workload::Reattach | Workload::Threads | Workload::Memory | Workload::Kill);
        if fixed && !sizes.is_fixed() {
            return Err(format!("found --size {sizes} with {}, wanted one size", word(workload)));
        }
        if append && !(sizes.is_fixed() && (8..=65_536).contains(&sizes.max)) {
            return Err(format!("found --size {sizes} with append, wanted one size from 8 to 65536"));
        }
        if workload == Workload::FanIn && sizes.min < 8 {
            return Err(format!(
                "found --size {sizes} with fan-in, wanted 8 or more: a message begins with its sender's number"
            ));
        }
        if call && sizes.min < 8 && (calls.clients > 1 || beside_flood) {
            return Err(format!(
                "found --size {sizes} with several clients, wanted 8 or more: a request begins with its client's number"
            ));
        }
        let capacity = capacity.unwrap_or(match workload {
            // Kill, too: a survivor that reads all messages before it reports the death then has few of them to read.
            Workload::Lopsided | Workload::Append | Workload::Kill => 1 << 20,
            Workload::Call => 4 << 20,
            _ => 64 << 20,
        });
        // Larger requests and replies travel in pieces.
        if !call && sizes.max as u64 + 32 > capacity / 2 {
            return Err(format!(
                "found messages of {} bytes in lanes of {capacity}, wanted at most half the capacity less 32: write --capacity {} or more",
                sizes.max,
                (2 * (sizes.max as u64 + 32)).next_power_of_two()
            ));
        }
        let most = seconds.map(|_| i32::MAX as u64); // the largest count of limits.c
        let count = count.or(most).unwrap_or(match (workload, sizes.max) {
            (Workload::Idle, _) => 1,
            (Workload::Reattach, _) => 1_000_000,
            (Workload::Lopsided, _) => (2_000_000 / work_us).max(1),
            (Workload::Append, _) => {
                let most = if file.is_some() { 1_000_000 } else { 25_600_000 };
                most.min(2_000_000_000u64.checked_div(work_ns).unwrap_or(u64::MAX)).max(1)
            }
            (Workload::Kill, _) => 1,
            (Workload::Memory, _) => 100_000,
            (Workload::Threads, _) => 10_000_000,
            (Workload::Call | Workload::Roundtrip, _) if rate.is_some() => 5 * rate.unwrap_or_default() as u64,
            (Workload::Call, 32_769..) => {
                if calls.one_by_one() {
                    10_000
                } else {
                    50_000
                }
            }
            (Workload::Call, _) if !calls.one_by_one() => 1_000_000,
            (Workload::Roundtrip | Workload::Call, _) if delay > 0 => 20_000,
            (Workload::Roundtrip | Workload::Call, _) => 200_000,
            (Workload::Stream | Workload::FanIn, ..=1024) => 5_000_000,
            (Workload::Stream | Workload::FanIn, ..=32_768) => 1_000_000,
            (Workload::Stream | Workload::FanIn, _) => 100_000,
        });
        // Deadlines and totals are computed from it: stay far from overflow.
        if count == 0 || count > 1 << 40 {
            return Err(format!("found --count {count}, wanted 1 to {}", 1u64 << 40));
        }
        if workload == Workload::FanIn && count < senders as u64 {
            return Err(format!("found --count {count}, wanted at least one for each of {senders} senders"));
        }
        if call && count < calls.clients as u64 {
            return Err(format!("found --count {count}, wanted at least one for each of {} clients", calls.clients));
        }
        if append && count > u32::MAX as u64 {
            return Err(format!("found --count {count}, wanted at most {}: a header's number has 32 bits", u32::MAX));
        }
        if let Some(seconds) = seconds {
            let is_throughput = matches!(
                workload,
                Workload::Stream | Workload::Roundtrip | Workload::Threads | Workload::FanIn | Workload::Call
            );
            if !is_throughput || rate.is_some() || beside_flood {
                return Err(format!(
                    "found --seconds with {}{}, wanted stream, roundtrip, threads, fan-in or call without a rate: use --count",
                    word(workload),
                    if rate.is_some() || beside_flood { " at a rate or beside a flood" } else { "" }
                ));
            }
            if !(0.001..=600.0).contains(&seconds) {
                return Err(format!("found --seconds {seconds}, wanted 0.001 to 600"));
            }
        }
        if runs == 0 {
            return Err("found --runs 0, wanted at least 1".to_string());
        }
        let is_busy = placement != Placement::Apart || beside_load > 0 || quota.is_some();
        let has_pauses = rate.is_some() || is_busy || beside_flood || calls.clients > 1;
        let asleep = delay > 0
            || has_pauses
            || matches!(
                workload,
                Workload::Idle
                    | Workload::Reattach
                    | Workload::Lopsided
                    | Workload::Append
                    | Workload::Memory
                    | Workload::Kill
            );
        let wait = wait.unwrap_or(if asleep { Wait::Block } else { Wait::Spin });
        let default = match workload {
            Workload::Idle => "pelton,pelton-path,pipe,sock-stream",
            Workload::Reattach => "pelton-path",
            Workload::Lopsided => "pelton,sock-stream,sock-seqpacket",
            Workload::FanIn if idle > 0 => {
                "pelton,pelton-alone,pelton-stream,limits,sock-stream:block,sock-seqpacket:block"
            }
            Workload::FanIn => "pelton,pelton-stream,limits,sock-stream:block,sock-seqpacket:block",
            Workload::Append if file.is_some() => "pelton,write",
            Workload::Append => "pelton,limits,bump,mutex-vec,array-queue,seg-queue",
            Workload::Call if beside_flood => "pelton,pelton-alone,sock-stream,sock-stream-alone",
            Workload::Call if calls.clients > 1 => "pelton,pelton-fan-in,sock-stream,sock-stream-batched",
            Workload::Call if calls.in_flight > 1 => "pelton,sock-stream,sock-stream-batched",
            Workload::Call if one_cpu || rate.is_some() => "pelton,sock-stream",
            Workload::Call => "pelton,limits,sock-stream",
            Workload::Threads => "pelton,pelton-batches,rtrb,rtrb-chunks,crossbeam-channel,flume,kanal",
            Workload::Memory | Workload::Kill => "pelton,pelton-path,pipe,sock-stream,sock-seqpacket",
            Workload::Roundtrip if rate.is_some() => "pelton,sock-stream,sock-seqpacket",
            Workload::Stream | Workload::Roundtrip => SYSTEMS,
        };
        let Systems(systems) = match chosen {
            Some(chosen) => chosen,
            None => systems(default)?,
        };
        Ok(Plan {
            workload,
            placement,
            beside_load,
            quota,
            sizes,
            count,
            seconds,
            capacity,
            wait,
            runs,
            delay_us: delay,
            slow: slow.unwrap_or(Slow::Receiver),
            work_us,
            work_ns,
            senders,
            idle,
            calls,
            threads,
            file,
            systems,
        })
    }
}

fn main() -> ExitCode {
    if let Some(ended) = side::run_if_side(side::any) {
        return ended;
    }
    // These have command lines of their own, because files are no channel.
    let rest = std::env::args().skip(2);
    match std::env::args().nth(1).as_deref() {
        Some("file") => return file::main(rest),
        Some("call-table") => return call_table::main(rest),
        Some("all") => return suite::main(rest),
        Some("figures") => return figures::main(rest),
        _ => {}
    }
    let arguments = Arguments::parse();
    let (json, page, kept) = (arguments.json, arguments.report.clone(), arguments.results.clone());
    let plan = match arguments.plan() {
        Ok(plan) => plan,
        Err(error) => Arguments::command().error(ErrorKind::ValueValidation, error).exit(),
    };
    measure(&plan, json, page.as_deref(), kept.as_deref()).unwrap_or_else(|error| {
        eprintln!("pelton-bench: {error:#}");
        ExitCode::FAILURE
    })
}

/// 0 when something was measured, 1 when nothing could be, 130 when interrupted. Bad arguments are 2, by clap.
fn measure(plan: &Plan, json: bool, page: Option<&Path>, kept: Option<&Path>) -> Result<ExitCode> {
    let progress = Progress::of(plan)?;
    let (report, interrupted) = run::measure(plan, &Interrupts::new()?, &progress)?;
    progress.bar.finish_and_clear();
    let command = std::iter::once("./run bench".to_string()).chain(std::env::args().skip(1));
    let command = command.collect::<Vec<_>>().join(" ");
    let mut lines = vec![results::machine(&command, interrupted)];
    lines.extend(results::lines(&report, &command)?);
    if let Some(place) = kept {
        results::write(place, &lines)?;
    }
    if let Some(place) = page {
        results::write_page(place, &lines)?;
    }
    let mut out = std::io::stdout().lock();
    if json {
        report.write_json(&mut out)?;
    } else {
        report.write_table(&mut out)?;
    }
    out.flush()?;
    if interrupted {
        eprintln!("pelton-bench: interrupted; the runs that were finished are above");
        return Ok(ExitCode::from(130));
    }
    let measured = report.systems.iter().any(|system| !system.runs.is_empty());
    Ok(if measured { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(arguments: &[&str]) -> Result<Plan, String> {
        let arguments =
            Arguments::try_parse_from([&["pelton-bench"], arguments].concat()).map_err(|error| error.to_string())?;
        arguments.plan()
    }

    #[test]
    fn the_command_line_is_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn defaults_follow_the_workload() {
        let stream = plan(&["stream"]).unwrap();
        assert_eq!(
            (stream.sizes.max, stream.count, stream.wait, stream.systems.len()),
            (256, 5_000_000, Wait::Spin, 6)
        );
        let asleep = plan(&["roundtrip", "--delay", "20"]).unwrap();
        assert_eq!((asleep.sizes.max, asleep.count, asleep.wait), (64, 20_000, Wait::Block));
        assert_eq!(plan(&["idle"]).unwrap().systems[0], Choice::from_str("pelton").unwrap());
        let rated = plan(&["roundtrip", "--rate", "100"]).unwrap();
        assert_eq!((rated.sizes.max, rated.count, rated.wait, rated.systems.len()), (64, 500, Wait::Block, 3));
        let threads = plan(&["threads"]).unwrap();
        assert_eq!((threads.sizes.max, threads.wait, threads.systems.len()), (64, Wait::Spin, 7));
        assert_eq!(plan(&["kill"]).unwrap().capacity, 1 << 20);
        let many = plan(&["fan-in", "--senders", "10", "--idle", "990"]).unwrap();
        assert_eq!((many.sizes.max, many.count, many.wait, many.systems.len()), (256, 5_000_000, Wait::Spin, 6));
        let call = plan(&["call"]).unwrap();
        assert_eq!((call.sizes.max, call.count, call.wait, call.capacity), (64, 200_000, Wait::Spin, 4 << 20));
        let many = plan(&["call", "--in-flight", "1000", "--size", "5000000"]).unwrap();
        assert_eq!((many.count, many.wait, many.systems.len()), (50_000, Wait::Spin, 3));
        let seldom = plan(&["call", "--rate", "1"]).unwrap();
        assert_eq!((seldom.count, seldom.wait, seldom.systems.len()), (5, Wait::Block, 2));
        let append = plan(&["append"]).unwrap();
        assert_eq!((append.sizes.max, append.count, append.threads, append.work_ns), (16, 25_600_000, 2, 0));
        assert_eq!(plan(&["append", "--work", "2000"]).unwrap().count, 1_000_000);
        let to_file = plan(&["append", "--file", "/"]).unwrap();
        assert_eq!((to_file.sizes.max, to_file.count, to_file.systems.len()), (256, 1_000_000, 2));
    }

    #[test]
    fn bad_arguments_say_what_was_found_and_what_to_do() {
        for (arguments, words) in [
            (&["gallop"][..], "gallop"),
            (&["stream", "--size", "5..1"], "write 1..5"),
            (&["stream", "--size", "1..1000000", "--capacity", "65536"], "write --capacity 2097152"),
            (&["stream", "--systems", "pelton,carrier"], "`carrier`, wanted one of pelton"),
            (&["stream", "--systems", "pipe,pipe"], "`pipe` twice"),
            (&["stream", "--delay", "20"], "use it with roundtrip"),
            (&["stream", "--slow", "sender"], "use them with lopsided"),
            (&["lopsided", "--work", "0"], "found --work 0"),
            (&["stream", "--count", "0"], "--count 0"),
            (&["stream", "--runs", "0"], "--runs 0"),
            (&["append", "--seconds", "1"], "found --seconds with append"),
            (&["roundtrip", "--rate", "5", "--seconds", "1"], "at a rate"),
            (&["stream", "--seconds", "0"], "wanted 0.001 to 600"),
            (&["idle", "--count", "5"], "leave them out"),
            (&["stream", "--senders", "2"], "use them with fan-in"),
            (&["stream", "--threads", "2"], "use it with append"),
            (&["stream", "--work", "2"], "--work also with append"),
            (&["fan-in", "--senders", "0"], "found --senders 0"),
            (&["fan-in", "--senders", "10", "--idle", "1015"], "wanted 1 to 1024 together"),
            (&["fan-in", "--size", "4"], "wanted 8 or more"),
            (&["fan-in", "--senders", "8", "--count", "7"], "wanted at least one for each"),
            (&["stream", "--file", "/"], "use it with append"),
            (&["append", "--file", "/dev/null"], "found --file /dev/null, wanted a directory"),
            (&["stream", "--clients", "1"], "use them with call"),
            (&["stream", "--rate", "1"], "use it with roundtrip or call"),
            (&["memory", "--size", "1..2"], "wanted one size"),
            (&["call", "--in-flight", "1025"], "found --in-flight 1025, wanted 1 to 1024"),
            (&["call", "--clients", "0"], "found --clients 0"),
            (&["call", "--clients", "2", "--size", "7"], "wanted 8 or more"),
            (&["call", "--clients", "5", "--count", "4"], "at least one for each"),
            (&["call", "--in-flight", "2", "--delay", "20"], "leave out --clients and --in-flight"),
            (&["call", "--rate", "0"], "found --rate 0"),
            (&["call", "--rate", "5", "--beside-flood"], "use one of them"),
            (&["append", "--threads", "0"], "found --threads 0"),
            (&["append", "--size", "1..16"], "wanted one size"),
            (&["append", "--work", "1000000001"], "nanoseconds"),
            (&["append", "--count", "5000000000"], "32 bits"),
        ] {
            let error = plan(arguments).unwrap_err();
            assert!(error.contains(words), "{arguments:?}: {error}");
        }
    }
}
