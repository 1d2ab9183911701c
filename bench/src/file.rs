//! Files: cached and uncached reads, small appends of many threads, and an event loop that writes and syncs. A program
//! of one process; the systems take turns, for cached reads in slices of some milliseconds.
//!
//! The program checks all bytes that it reads, and compares all bytes that it appended or wrote afterwards.

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::{BufRead as _, BufReader, Write as _},
    ops::Range,
    os::{
        fd::AsRawFd as _,
        unix::fs::{FileExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::Instant,
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, ValueEnum};
use io_uring::{IoUring, opcode, types};
use pelton::file::{Buffer, Engine, EngineOptions, Open, Operation, Tail};

use crate::{
    compiled,
    measure::CallCounter,
    run::Load,
    statistics::{Ratio, median, paired_ratio},
    systems::c,
};

/// Measures pelton's files beside the system's own calls, and the io-uring crate used directly
///
/// Figures are medians over the runs; ratios are of pelton to each other system, run by run.
#[derive(Args, Debug)]
pub struct Arguments {
    /// The parts [default: all]
    #[arg(value_enum)]
    parts: Vec<Part>,

    /// Where the program creates its files, in a directory that it removes at the end
    #[arg(long, value_name = "DIR", default_value = "/tmp")]
    dir: PathBuf,

    /// Runs of each system
    #[arg(long, value_name = "N", default_value_t = 9)]
    runs: usize,

    /// So many threads that only compute, at normal priority, run meanwhile
    #[arg(long, value_name = "N", default_value_t = 0)]
    beside_load: u32,

    /// One JSON object a line for each part, instead of the table
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// 4 KiB from the page cache: nanoseconds a read, waited for (pelton), submitted (pelton-submit), and by pread
    Cached,
    /// The same for event loops: submitted (pelton-submit), libuv's uv_fs and tokio's thread pool; those two 32 at a
    /// time
    Loops,
    /// 4 KiB past the page cache, 32 in flight: reads a second, and of the same loop on the io-uring crate
    Direct,
    /// 100 bytes at a time from 8 threads: messages a second, and with a write for each
    Append,
    /// 1 GiB written and synced by an event loop: its longest callback, in microseconds of its thread's CPU time and
    /// of the clock, and when it writes itself; CPU time by libuv's loop with pelton_uv.h too. Separate figures:
    /// iterations with context switches (-switched), whose CPU time Linux may charge to the loop, and those that found
    /// no work (-empty)
    Loop,
    /// The same by libuv's loop: the median lateness of its timers, in microseconds, and of a loop without other work
    LoopTimers,
}

impl Part {
    fn name(self) -> String {
        self.to_possible_value().expect("none is skipped").get_name().to_owned()
    }
}

/// The figures of a part, of all runs.
type Figures = BTreeMap<&'static str, f64>;

struct Report {
    part: Part,
    unit: &'static str,
    runs: Vec<Figures>,
    /// Figures of a single system.
    extra: BTreeMap<String, f64>,
}

/// Measures the parts, and prints their figures.
pub fn measure(arguments: &Arguments) -> Result<()> {
    let place = tempfile::Builder::new().prefix("pelton-bench-file").tempdir_in(&arguments.dir)?;
    let parts = if arguments.parts.is_empty() { Part::value_variants() } else { &arguments.parts };
    let _load = Load::start(arguments.beside_load);
    for &part in parts {
        type Run = fn(&Path) -> Result<Vec<Figures>>;
        let (units, run): (&[&str], Run) = match part {
            Part::Cached => (&["ns a read"], |place| Ok(vec![cached(place, &["pread", "pelton", "pelton-submit"])?])),
            Part::Loops => {
                (&["ns a read"], |place| Ok(vec![cached(place, &["pelton-submit", "libuv-fs", "tokio-fs"])?]))
            }
            Part::Direct => (&["reads a second"], |place| Ok(vec![direct(place)?])),
            Part::Append => (&["messages a second"], |place| Ok(vec![append(place)?])),
            Part::Loop => {
                (&["us of CPU in the longest callback", "us by the clock in the longest callback"], |place| {
                    Ok(event_loop(place)?.into())
                })
            }
            Part::LoopTimers => (&["us late, a timer in the middle"], |place| Ok(vec![loop_timers(place)?])),
        };
        let mut extra = match part {
            Part::Append => append_calls(place.path())?,
            _ => BTreeMap::new(),
        };
        if arguments.beside_load > 0 {
            extra.insert("computing threads beside it".to_owned(), arguments.beside_load.into());
        }
        let report = |unit: &&'static str| Report { part, unit, runs: Vec::new(), extra: extra.clone() };
        let mut reports: Vec<Report> = units.iter().map(report).collect();
        for _ in 0..arguments.runs {
            let figures = run(place.path())?;
            reports.iter_mut().zip(figures).for_each(|(report, figures)| report.runs.push(figures));
        }
        for report in &reports {
            report.write(arguments.json)?;
        }
    }
    Ok(())
}

impl Report {
    fn of(&self, system: &str) -> Vec<Option<f64>> {
        self.runs.iter().map(|figures| figures.get(system).copied()).collect()
    }

    fn write(&self, json: bool) -> Result<()> {
        let name = self.part.name();
        let systems: Vec<&str> = self.runs[0].keys().copied().collect();
        let middle = |system: &str| median(self.of(system).into_iter().flatten().collect()).unwrap_or(f64::NAN);
        // The separate iterations of a loop have no counterparts.
        let is_separate = |system: &str| system.ends_with("-switched") || system.ends_with("-empty");
        let whole = || systems.iter().filter(|system| !is_separate(system));
        let pelton = whole().filter(|system| system.starts_with("pelton"));
        let ratios: BTreeMap<String, Ratio> = pelton
            .flat_map(|ours| whole().filter(|other| !other.starts_with("pelton")).map(move |other| (ours, other)))
            .filter_map(|(ours, other)| {
                Some((format!("{ours} to {other}"), paired_ratio(&self.of(ours), &self.of(other))?))
            })
            .collect();
        let mut out = std::io::stdout().lock();
        if json {
            let figures: BTreeMap<&str, f64> = systems.iter().map(|system| (*system, middle(system))).collect();
            let line = serde_json::json!({ "workload": "file", "part": name, "unit": self.unit, "medians": figures,
                "runs": self.runs, "ratios": ratios, "extra": self.extra });
            return Ok(writeln!(out, "{line}")?);
        }
        writeln!(out, "{name}: {} (median of {})", self.unit, self.runs.len())?;
        for system in &systems {
            let figure = middle(system);
            let decimals = if figure < 100.0 { 4 } else { 1 };
            let all = || self.of(system).into_iter().flatten();
            let (least, most) = (all().fold(f64::INFINITY, f64::min), all().fold(0.0, f64::max));
            writeln!(out, "    {system:22} {figure:12.decimals$}  ({least:.decimals$} to {most:.decimals$})")?;
        }
        for (what, value) in &self.extra {
            writeln!(out, "    {what}: {value:.4}")?;
        }
        for (pair, Ratio { median, min, max, .. }) in &ratios {
            writeln!(out, "    ratio of {pair}: {median:.3}  ({min:.3} to {max:.3})")?;
        }
        Ok(())
    }
}

const BLOCK: usize = 4096;
const BLOCKS: u64 = 16_384;

/// 64 MiB; each block begins with its number.
fn numbered(path: &Path) -> Result<()> {
    if path.exists() {
        return Ok(());
    }
    let mut file = std::io::BufWriter::with_capacity(1 << 20, File::create(path)?);
    let mut block = [0x5a; BLOCK];
    for number in 0..BLOCKS {
        block[..8].copy_from_slice(&number.to_le_bytes());
        file.write_all(&block)?;
    }
    file.into_inner().map_err(|error| error.into_error())?.sync_all()?;
    Ok(())
}

fn check(block: &[u8], number: u64) -> Result<()> {
    ensure!(block.len() == BLOCK && block[..8] == number.to_le_bytes(), "block {number} is not what was written");
    Ok(())
}

/// Pseudorandom numbers below `most`, the same in every run.
fn scattered(n: u64, most: u64) -> u64 {
    (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % most
}

/// The seconds of each system: in so many slices by turns, in which each begins a round as often as any other.
fn by_turns(
    systems: &[&'static str],
    slices: u64,
    mut slice_of: impl FnMut(&str, u64) -> Result<()>,
) -> Result<Figures> {
    let mut spent = Figures::new();
    for slice in 0..slices {
        for turn in 0..systems.len() {
            let system = systems[(slice as usize + turn) % systems.len()];
            let begun = Instant::now();
            slice_of(system, slice)?;
            *spent.entry(system).or_default() += begun.elapsed().as_secs_f64();
        }
    }
    Ok(spent)
}

const SLICES: u64 = 40;
const SLICE: u64 = 2_000;
/// More than the processor's caches hold, so that the reads are from memory.
const CACHED_BLOCKS: u64 = 4096;

fn cached(place: &Path, systems: &[&'static str]) -> Result<Figures> {
    let path = place.join("numbered");
    numbered(&path)?;
    let plain = File::open(&path)?;
    let mut engine = Engine::new()?;
    let file = engine.run(Operation::open(&path, Open::for_reading()))?.into_file()?;
    let mut block = vec![0; BLOCK];
    let mut buffer: Option<Buffer> = Some(vec![0; BLOCK].into());
    for number in 0..CACHED_BLOCKS {
        plain.read_exact_at(&mut block, number * BLOCK as u64)?;
    }
    let mut systems = systems.to_vec();
    let mut libuv = if systems.contains(&"libuv-fs") { Libuv::start(&path)? } else { None };
    systems.retain(|system| *system != "libuv-fs" || libuv.is_some());
    let tokio = Tokio::start(&path)?;
    let spent = by_turns(&systems, SLICES, |system, slice| {
        let slice = slice * SLICE..(slice + 1) * SLICE;
        let numbers = slice.clone().map(|n| scattered(n, CACHED_BLOCKS));
        match system {
            "pread" => {
                for number in numbers {
                    let read = plain.read_at(&mut block, number * BLOCK as u64)?;
                    check(&block[..read], number)?;
                }
            }
            "pelton" => {
                for number in numbers {
                    let owned = buffer.take().context("the buffer came back")?;
                    let read = engine.run(Operation::read_at(&file, owned, number * BLOCK as u64))?;
                    check(read.bytes(), number)?;
                    buffer = Some(read.buffer);
                }
            }
            "pelton-submit" => {
                for number in numbers {
                    let owned = buffer.take().context("the buffer came back")?;
                    let read = Operation::read_at(&file, owned, number * BLOCK as u64);
                    ensure!(engine.try_submit(number, read)?.is_submitted(), "one fits");
                    let read = engine.completion()?;
                    check(read.bytes(), read.token)?;
                    buffer = Some(read.buffer);
                }
            }
            "tokio-fs" => tokio.read(slice)?,
            _ => libuv.as_mut().context("it is there")?.read(slice)?,
        }
        Ok(())
    })?;
    Ok(spent.into_iter().map(|(system, spent)| (system, spent * 1e9 / (SLICES * SLICE) as f64)).collect())
}

/// libuv's own files, in a process that reads as many blocks as it is ordered to.
struct Libuv(Child);

impl Libuv {
    fn start(path: &Path) -> Result<Option<Libuv>> {
        let program =
            match compiled::compile("uvfs.c", include_str!("../../bindings/c/bench/uvfs.c"), &["-O2"], &["-luv"]) {
                Ok(program) => program,
                Err(error) => {
                    eprintln!("pelton-bench file: libuv-fs is skipped: {error:#}: on Debian, install libuv1-dev");
                    return Ok(None);
                }
            };
        let child = Command::new(program)
            .arg(path)
            .arg(IN_FLIGHT.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting uvfs")?;
        Ok(Some(Libuv(child)))
    }

    fn read(&mut self, numbers: Range<u64>) -> Result<()> {
        let (stdin, stdout) = (self.0.stdin.as_mut(), self.0.stdout.as_mut());
        writeln!(stdin.context("it is piped")?, "{} {}", numbers.start, numbers.end)?;
        let mut line = String::new();
        BufReader::with_capacity(1, stdout.context("it is piped")?).read_line(&mut line)?;
        line.trim().parse::<u64>().map(drop).context("uvfs failed")
    }
}

impl Drop for Libuv {
    fn drop(&mut self) {
        // It exits when its standard input closes.
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// tokio, with as many tasks as the others have reads in flight. tokio::fs has no read at an offset, so each read is
/// one of the opened file in its thread pool, as tokio::fs would do it.
struct Tokio {
    runtime: tokio::runtime::Runtime,
    file: Arc<File>,
}

impl Tokio {
    fn start(path: &Path) -> Result<Tokio> {
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        Ok(Tokio { runtime, file: Arc::new(File::open(path)?) })
    }

    fn read(&self, numbers: Range<u64>) -> Result<()> {
        let each = (numbers.end - numbers.start) / IN_FLIGHT + 1;
        self.runtime.block_on(async {
            let tasks: Vec<_> = (0..IN_FLIGHT)
                .map(|task| {
                    let file = self.file.clone();
                    let (first, end) =
                        (numbers.start + task * each, numbers.end.min(numbers.start + (task + 1) * each));
                    tokio::spawn(async move {
                        let mut block = vec![0; BLOCK];
                        for number in (first..end).map(|n| scattered(n, CACHED_BLOCKS)) {
                            let file = file.clone();
                            let read = move || file.read_exact_at(&mut block, number * BLOCK as u64).map(|()| block);
                            block = tokio::task::spawn_blocking(read).await??;
                            check(&block, number)?;
                        }
                        anyhow::Ok(())
                    })
                })
                .collect();
            for task in tasks {
                task.await??;
            }
            Ok(())
        })
    }
}

const IN_FLIGHT: u64 = 32;
const DIRECT_READS: u64 = 20_000;
const DIRECT_SLICES: u64 = 10;

fn direct(place: &Path) -> Result<Figures> {
    let path = place.join("numbered");
    numbered(&path)?;
    let (mut engine, mut ring) = (Engine::new()?, IoUring::new(IN_FLIGHT as u32)?);
    ensure!(engine.uses_io_uring(), "io_uring is refused here");
    let spent = by_turns(&["pelton", "io-uring-direct"], DIRECT_SLICES, |system, slice| {
        let numbers = slice * DIRECT_READS / DIRECT_SLICES..(slice + 1) * DIRECT_READS / DIRECT_SLICES;
        match system {
            "pelton" => direct_by_pelton(&mut engine, &path, numbers),
            _ => direct_by_ring(&mut ring, &path, numbers),
        }
    })?;
    Ok(spent.into_iter().map(|(system, seconds)| (system, DIRECT_READS as f64 / seconds)).collect())
}

fn direct_by_pelton(engine: &mut Engine, path: &Path, mut numbers: Range<u64>) -> Result<()> {
    let file = engine.run(Operation::open(path, Open::for_reading().direct()))?.into_file()?;
    let mut submit = |engine: &mut Engine, buffer: Buffer| -> Result<()> {
        if let Some(n) = numbers.next() {
            let number = scattered(n, BLOCKS);
            let read = Operation::read_at(&file, buffer, number * BLOCK as u64);
            ensure!(engine.try_submit(number, read)?.is_submitted(), "there is room for {IN_FLIGHT}");
        }
        Ok(())
    };
    for _ in 0..IN_FLIGHT {
        submit(engine, Buffer::aligned(BLOCK))?;
    }
    while engine.in_flight() > 0 {
        let read = engine.completion()?;
        check(read.bytes(), read.token)?;
        submit(engine, read.buffer)?;
    }
    Ok(())
}

/// The same loop, written as a user of the crate would.
fn direct_by_ring(ring: &mut IoUring, path: &Path, mut numbers: Range<u64>) -> Result<()> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let fd = types::Fd(file.as_raw_fd());
    let mut buffers: Vec<Buffer> = (0..IN_FLIGHT).map(|_| Buffer::aligned(BLOCK)).collect();
    let mut of = vec![0; IN_FLIGHT as usize];
    let mut in_flight = 0;
    let mut push = |ring: &mut IoUring, of: &mut [u64], buffer: &mut Buffer, slot: usize| -> Result<u64> {
        let Some(n) = numbers.next() else { return Ok(0) };
        of[slot] = scattered(n, BLOCKS);
        let entry = opcode::Read::new(fd, buffer.as_mut_ptr(), BLOCK as u32).offset(of[slot] * BLOCK as u64);
        // SAFETY: the buffer lives until the ring has nothing in flight, and no code reads it before its completion.
        unsafe { ring.submission().push(&entry.build().user_data(slot as u64)) }?;
        Ok(1)
    };
    for (slot, buffer) in buffers.iter_mut().enumerate() {
        in_flight += push(ring, &mut of, buffer, slot)?;
    }
    while in_flight > 0 {
        ring.submit_and_wait(1)?;
        loop {
            let end = ring.completion().next();
            let Some(end) = end else { break };
            in_flight -= 1;
            let slot = end.user_data() as usize;
            ensure!(end.result() == BLOCK as i32, "a read answered {}", end.result());
            check(&buffers[slot], of[slot])?;
            in_flight += push(ring, &mut of, &mut buffers[slot], slot)?;
        }
    }
    Ok(())
}

const THREADS: usize = 8;
const APPENDS: usize = 125_000;
const MESSAGE: usize = 100;

fn message(thread: usize, number: usize) -> [u8; MESSAGE] {
    let mut bytes = [b'.'; MESSAGE];
    bytes[..8].copy_from_slice(&(thread as u64).to_le_bytes());
    bytes[8..16].copy_from_slice(&(number as u64).to_le_bytes());
    bytes
}

fn append(place: &Path) -> Result<Figures> {
    let each = (THREADS * APPENDS) as f64;
    let pelton = append_by_pelton(place)?;
    Ok(BTreeMap::from([("pelton", each / pelton), ("write", each / append_by_write(place)?)]))
}

/// System calls a message, in a pass that is not timed; empty if they cannot be counted.
fn append_calls(place: &Path) -> Result<BTreeMap<String, f64>> {
    let mut found = BTreeMap::new();
    match CallCounter::start() {
        Err(error) => eprintln!("pelton-bench file: {error:#}"),
        Ok(counter) => {
            append_by_pelton(place)?;
            let calls = counter.stop()? as f64 / (THREADS * APPENDS) as f64;
            found.insert("system calls a message, opening and reading back included".to_owned(), calls);
        }
    }
    Ok(found)
}

/// All threads append all of their messages, each in its order.
fn append_all(append: impl Fn(&[u8]) -> Result<()> + Sync) -> Result<()> {
    let all = &|thread| (0..APPENDS).try_for_each(|number| append(&message(thread, number)));
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || all(thread))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("it does not panic"))
    })
}

fn append_by_pelton(place: &Path) -> Result<f64> {
    let path = place.join("log");
    let mut engine = Engine::new()?;
    let file = engine.run(Operation::open(&path, Open::for_writing().create(0o600).truncate()))?.into_file()?;
    let appenders = pelton::Appenders::new(&pelton::Options::new().flush_bytes(1 << 20), Tail::new(file)?)?;
    let begun = Instant::now();
    append_all(|message| Ok(appenders.append(message)?))?;
    appenders.flush()?;
    let seconds = begun.elapsed().as_secs_f64();
    drop(appenders);
    read_back(&path)?;
    Ok(seconds)
}

fn append_by_write(place: &Path) -> Result<f64> {
    let path = place.join("log");
    let file = OpenOptions::new().create(true).append(true).open(&path)?;
    file.set_len(0)?;
    let begun = Instant::now();
    append_all(|message| Ok((&file).write_all(message)?))?;
    let seconds = begun.elapsed().as_secs_f64();
    read_back(&path)?;
    Ok(seconds)
}

/// Checks that every byte is there, and each thread's messages are in order.
fn read_back(path: &Path) -> Result<()> {
    let bytes = std::fs::read(path)?;
    ensure!(
        bytes.len() == THREADS * APPENDS * MESSAGE,
        "{} bytes, wanted {}",
        bytes.len(),
        THREADS * APPENDS * MESSAGE
    );
    let mut next = [0; THREADS];
    for found in bytes.chunks(MESSAGE) {
        let thread = u64::from_le_bytes(found[..8].try_into()?) as usize;
        ensure!(thread < THREADS && found == message(thread, next[thread]), "a message is not whole, or not in order");
        next[thread] += 1;
    }
    Ok(())
}

const PIECE: usize = 1 << 20;
const PIECES: u64 = 1024;
const PIECES_IN_FLIGHT: u64 = 4;
/// Synced after each so many.
const SYNC_AFTER: u64 = 64;

/// By the thread's CPU time, and by the clock.
fn event_loop(place: &Path) -> Result<[Figures; 2]> {
    let loops = [
        ("pelton", loop_by_pelton(place, &EngineOptions::new())?),
        ("pelton-threads", loop_by_pelton(place, &EngineOptions::new().without_io_uring())?),
        ("write", loop_by_write(place)?),
    ];
    let mut figures: [Figures; 2] =
        [0, 1].map(|which| loops.iter().map(|(system, longest)| (*system, longest.0[which])).collect());
    // These loops' callbacks run within the poll, whose waiting counts on the clock but is no CPU time; `loop-timers`
    // measures them by the clock. Beside pelton's a loop whose own callbacks do almost nothing: it shows the machine's
    // own interruptions.
    for (systems, how) in [
        (["pelton-uv", "pelton-uv-switched", "pelton-uv-empty"], "pelton"),
        (["libuv-fs", "libuv-fs-switched", "libuv-fs-empty"], "libuv-fs"),
    ] {
        match loop_by_uv(how, place) {
            Ok(uv) => figures[0].extend(systems.into_iter().zip(uv.worst_us)),
            Err(error) => eprintln!("pelton-bench file: {how} in a libuv loop is skipped: {error:#}"),
        }
    }
    Ok(figures)
}

/// The longest of a loop's callbacks, in microseconds of its thread's CPU time, and by the clock: a sleep in the
/// kernel blocks a loop as well. On a busy machine the clock only shows more.
#[derive(Default)]
struct Longest([f64; 2]);

impl Longest {
    fn times<R>(&mut self, callback: impl FnOnce() -> Result<R>) -> Result<R> {
        let now = || [rustix::time::ClockId::ThreadCPUTime, rustix::time::ClockId::Monotonic].map(us);
        let begun = now();
        let done = callback();
        for (longest, (ended, begun)) in self.0.iter_mut().zip(now().into_iter().zip(begun)) {
            *longest = longest.max(ended - begun);
        }
        done
    }
}

fn us(clock: rustix::time::ClockId) -> f64 {
    let time = rustix::time::clock_gettime(clock);
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 * 1e-3
}

fn loop_timers(place: &Path) -> Result<Figures> {
    let pelton = loop_by_uv("pelton", place)?;
    let own = loop_by_uv("libuv-fs", place)?;
    let idle = uv_loop(&["idle", &pelton.seconds.to_string()])?;
    Ok(BTreeMap::from([("pelton-uv", pelton.late_us), ("libuv-fs", own.late_us), ("idle", idle.late_us)]))
}

/// The report of a libuv loop.
struct UvLoop {
    /// Of all iterations; of those with context switches; of those that found no work.
    worst_us: [f64; 3],
    late_us: f64,
    seconds: f64,
}

/// The same bytes, written and synced by libuv's loop.
fn loop_by_uv(how: &str, place: &Path) -> Result<UvLoop> {
    let path = place.join("gigabyte");
    let numbers = [PIECE as u64, PIECES, PIECES_IN_FLIGHT, SYNC_AFTER].map(|number| number.to_string());
    let mut arguments = vec![how, path.to_str().context("a path that is not UTF-8")?];
    arguments.extend(numbers.iter().map(String::as_str));
    let found = uv_loop(&arguments)?;
    whole(&path)?;
    Ok(found)
}

fn uv_loop(arguments: &[&str]) -> Result<UvLoop> {
    let mut program = c::program("uvloop.c", include_str!("../../bindings/c/bench/uvloop.c"))?;
    let done = program.args(arguments).stderr(Stdio::inherit()).output().context("starting uvloop")?;
    ensure!(done.status.success(), "uvloop {arguments:?} failed");
    let text = String::from_utf8(done.stdout)?;
    let numbers: Vec<f64> = text.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    let [worst, switched, empty, late_us, seconds] = numbers[..] else {
        bail!("uvloop printed {text:?}, wanted five numbers")
    };
    Ok(UvLoop { worst_us: [worst, switched, empty], late_us, seconds })
}

fn piece(number: u64) -> Vec<u8> {
    vec![number as u8 | 1; PIECE]
}

fn loop_by_pelton(place: &Path, options: &EngineOptions) -> Result<Longest> {
    use rustix::event::{PollFd, PollFlags, poll};
    let path = place.join("gigabyte");
    let mut engine = options.build()?;
    let file = engine.run(Operation::open(&path, Open::for_writing().create(0o600).truncate()))?.into_file()?;
    let (mut next, mut longest) = (0, Longest::default());
    // The buffers are created before, not by the loop.
    let mut pieces: Vec<Vec<u8>> = (0..PIECES_IN_FLIGHT).map(|_| piece(0)).collect();
    let submit = |engine: &mut Engine, next: &mut u64, piece: Vec<u8>| -> Result<()> {
        let write = Operation::write_at(&file, piece, *next * PIECE as u64);
        ensure!(engine.try_submit(0, write)?.is_submitted(), "a slot is free");
        *next += 1;
        if next.is_multiple_of(SYNC_AFTER) {
            ensure!(engine.try_submit(1, Operation::sync_data(&file))?.is_submitted(), "a slot is free");
        }
        Ok(())
    };
    // The first callback begins the writes.
    let mut nothing_yet = longest.times(|| {
        pieces.drain(..).try_for_each(|piece| submit(&mut engine, &mut next, piece))?;
        Ok(engine.arm()?.is_waiting())
    })?;
    while engine.in_flight() > 0 {
        if nothing_yet {
            poll(&mut [PollFd::new(&engine, PollFlags::IN)], None)?;
        }
        // Each other callback: all completions, the operations that follow, and arming, which begins those.
        nothing_yet = longest.times(|| {
            while let Some(done) = engine.try_completion()? {
                done.outcome?;
                if done.token == 0 {
                    ensure!(done.buffer.len() == PIECE, "it came back whole");
                    if next < PIECES {
                        submit(&mut engine, &mut next, done.buffer.into_vec())?;
                    }
                }
            }
            Ok(engine.arm()?.is_waiting())
        })?;
    }
    engine.close()?;
    whole(&path)?;
    Ok(longest)
}

fn loop_by_write(place: &Path) -> Result<Longest> {
    let path = place.join("gigabyte");
    let file = File::create(&path)?;
    let (piece, mut longest) = (piece(0), Longest::default());
    for number in 0..PIECES {
        longest.times(|| {
            file.write_all_at(&piece, number * PIECE as u64)?;
            if (number + 1).is_multiple_of(SYNC_AFTER) {
                file.sync_data()?;
            }
            Ok(())
        })?;
    }
    whole(&path)?;
    Ok(longest)
}

fn whole(path: &Path) -> Result<()> {
    use std::io::Read as _;
    let (mut file, mut found, wanted) = (File::open(path)?, vec![0; PIECE], piece(0));
    for number in 0..PIECES {
        file.read_exact(&mut found)?;
        ensure!(found == wanted, "piece {number} is not what was written");
    }
    ensure!(file.read(&mut found)? == 0, "there is more than was written");
    std::fs::remove_file(path)?;
    Ok(())
}
