//! Runs: fresh processes for each, pinned alike, the systems taking turns.
//!
//! The program starts itself once for each side, with a [`Job`]. A run's deadline is generous. Both sides end when it
//! passes, when one side fails, or when the user interrupts. When this program dies, they end by themselves.

use std::{
    env,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use indicatif::{ProgressBar, ProgressStyle};

use crate::{
    kill,
    measure::CallCounter,
    memory,
    parameters::{Calls, Choice, Job, Pass, Placement, Role, SizeRange, Slow, SystemName, Wait, Workload, word},
    peers::Peer,
    quota::Quota,
    reattach,
    report::{Parameters, Report, Run, SystemReport},
    run_figures::{idle_run, run_of, run_of_calls},
    sides::{Interrupted, Interrupts, Side, Sides},
    systems::{
        c,
        call::{c as call_in_c, queue},
        limits, lisp,
    },
    workload::{PassReport, work},
};

/// The command line's request.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The workload
    pub workload: Workload,
    /// Sizes of the messages
    pub sizes: SizeRange,
    /// Messages, or rounds of a round trip; with `seconds` the maximum
    pub count: u64,
    /// Each system has as many as last about so long, instead of the same number
    pub seconds: Option<f64>,
    /// Bytes of a lane
    pub capacity: u64,
    /// How the sides wait, unless the system has a wait of its own
    pub wait: Wait,
    /// Runs of each system
    pub runs: usize,
    /// Microseconds of delay of each side of a round trip
    pub delay_us: u64,
    /// Which side of a lopsided channel works ten times as long as the other
    pub slow: Slow,
    /// Microseconds of work for each message
    pub work_us: u64,
    /// Nanoseconds of work of each appending thread for each message
    pub work_ns: u64,
    /// Processes that send in a fan-in
    pub senders: u32,
    /// Connected senders of a fan-in that send nothing
    pub idle: u32,
    /// The options of calls
    pub calls: Calls,
    /// Where the sides run
    pub placement: Placement,
    /// Threads that compute meanwhile
    pub beside_load: u32,
    /// Percent of one processor that the measured processes together get
    pub quota: Option<u32>,
    /// Threads of an append
    pub threads: u32,
    /// The directory for the file that the threads append to; None appends to no file
    pub file: Option<PathBuf>,
    /// In turn; the first is compared with the others
    pub systems: Vec<Choice>,
}

/// How long the program observes an idle channel.
const IDLE_WINDOW: Duration = Duration::from_secs(2);
/// How long the channel is idle before that, so that the receiver falls asleep.
const IDLE_BEFORE: Duration = Duration::from_millis(200);
/// The progress bar: on a terminal only, and drawn between runs only, since a timer of its own would disturb the
/// measurement.
pub struct Progress {
    /// One bar may cover several measurements
    pub bar: ProgressBar,
    /// The progress of one run of one system
    pub weight: u64,
}

impl Progress {
    /// Of one measurement alone.
    pub fn of(plan: &Plan) -> Result<Progress> {
        let bar = ProgressBar::new((plan.runs * plan.systems.len()) as u64);
        bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} gone, {eta} left  {msg}")?);
        Ok(Progress { bar, weight: 1 })
    }
}

/// Threads that only compute, beside the measured processes, until this is dropped. They belong to this process, whose
/// own processor time is not counted.
pub struct Load {
    is_over: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Load {
    /// Starts so many.
    pub fn start(threads: u32) -> Load {
        let is_over = Arc::new(AtomicBool::new(false));
        let compute = |is_over: Arc<AtomicBool>| {
            move || {
                let mut number = 1u64;
                while !is_over.load(Ordering::Relaxed) {
                    for _ in 0..1000 {
                        number = std::hint::black_box(number.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1));
                    }
                }
            }
        };
        let threads = (0..threads).map(|_| std::thread::spawn(compute(is_over.clone()))).collect();
        Load { is_over, threads }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Measures all systems. The flag is true after an interrupt; the report then has the finished runs. All measurements
/// of a program share `interrupts`, so that a signal between two of them ends the next one.
pub fn measure(plan: &Plan, interrupts: &Interrupts, progress: &Progress) -> Result<(Report, bool)> {
    let available = available_cpus()?;
    // The kernel places the threads of one process.
    let pinned = plan.workload != Workload::Append;
    let cpus = match available[..] {
        _ if plan.placement == Placement::Free => Vec::new(),
        [first, ..] if pinned && plan.placement == Placement::Together => vec![first; 2],
        [first, second, ..] if pinned => vec![first, second],
        _ => Vec::new(),
    };
    if pinned && cpus.is_empty() && plan.placement != Placement::Free {
        eprintln!("note: one CPU only, so that nothing is pinned and the two sides take turns on it");
    }
    let count_calls = match CallCounter::start() {
        Ok(_) => true,
        Err(error) => {
            eprintln!("note: system calls are not counted: {error:#}");
            false
        }
    };
    let _load = Load::start(plan.beside_load);
    let mut report = Report {
        workload: plan.workload,
        parameters: Parameters {
            size: plan.sizes.to_string(),
            count: plan.count,
            seconds: plan.seconds,
            capacity: plan.capacity,
            delay_us: plan.delay_us,
            work_us: plan.work_us,
            slow: (plan.workload == Workload::Lopsided).then_some(plan.slow),
            work_ns: (plan.workload == Workload::Append).then_some(plan.work_ns),
            threads: (plan.workload == Workload::Append).then_some(plan.threads),
            file: plan.file.as_ref().map(|file| file.display().to_string()),
            rate: plan.calls.rate.filter(|_| plan.workload == Workload::Roundtrip),
            senders: (plan.workload == Workload::FanIn).then_some(plan.senders),
            idle: (plan.workload == Workload::FanIn).then_some(plan.idle),
            calls: (plan.workload == Workload::Call).then_some(plan.calls),
            runs: plan.runs,
            beside_load: plan.beside_load,
            quota: plan.quota,
            cpus: cpus.clone(),
        },
        systems: plan.systems.iter().map(|choice| system_report(plan, choice)).collect(),
    };
    let bar = &progress.bar;
    // It outlives the processes, and is removed however this function returns.
    let quota = match plan.quota.map(Quota::of).transpose() {
        Ok(quota) => quota,
        Err(error) => {
            let reason = format!("--quota is not possible here: {error:#}");
            bar.suspend(|| eprintln!("note: all systems are skipped: {reason}"));
            report.systems.iter_mut().for_each(|system| system.skipped = Some(reason.clone()));
            return Ok((report, false));
        }
    };
    let cgroup = quota.as_ref().map(|quota| quota.path().to_path_buf());
    for system in &mut report.systems {
        bar.set_message(format!("{}: making {} ready", word(plan.workload), system.choice));
        let ready = prepare(plan, system);
        // An interrupt at a terminal also ends a build. Its failure is then no reason to report, and the next build
        // does not start.
        if interrupts.is_raised() {
            return Ok((report, true));
        }
        if let Err(reason) = ready {
            let reason = format!("{reason:#}");
            bar.suspend(|| eprintln!("note: {} is skipped: {reason}", system.choice));
            system.skipped = Some(reason);
        }
    }
    let work_steps = work_steps(plan);
    let number_of_systems = report.systems.len();
    for number in 0..=plan.runs {
        // Before its first run each system may find its number of messages.
        if number == 0 && plan.seconds.is_none() {
            continue;
        }
        for turn in rotation(number_of_systems, number) {
            let system = &mut report.systems[turn];
            bar.set_message(format!("{} run {number} of {}: {}", word(plan.workload), plan.runs, system.choice));
            if system.skipped.is_none() {
                let job = Job { work_steps, cgroup: cgroup.clone(), ..job(plan, system, &cpus, count_calls) };
                let done = match plan.seconds.filter(|_| number == 0) {
                    Some(seconds) => {
                        calibrate(&job, seconds, plan, |job| run_once(job, &cpus, interrupts)).map(|count| {
                            system.count = count;
                        })
                    }
                    None => run_once(&job, &cpus, interrupts).map(|run| system.runs.push(run)),
                };
                match done {
                    Ok(()) => {}
                    Err(error) if error.is::<Interrupted>() => {
                        return Ok((report, true));
                    }
                    Err(error) => {
                        let reason = if number <= 1 {
                            format!("{error:#}")
                        } else {
                            format!("run {number} of {}: {error:#}", plan.runs)
                        };
                        bar.suspend(|| eprintln!("note: {} is skipped: {reason}", system.choice));
                        system.skipped = Some(reason);
                        system.runs.clear();
                    }
                }
            }
            bar.inc(if number > 0 { progress.weight } else { 0 });
        }
    }
    Ok((report, false))
}

/// The order of the systems in that run: each run begins with another system, so that none always follows the same one
/// and its after-effects.
fn rotation(systems: usize, run: usize) -> impl Iterator<Item = usize> {
    (0..systems).map(move |turn| (turn + run.saturating_sub(1)) % systems)
}

/// How many messages, or rounds, last about `seconds`, of at most `plan.count`: the runs grow until one lasts a tenth
/// of that.
fn calibrate(job: &Job, seconds: f64, plan: &Plan, mut run: impl FnMut(&Job) -> Result<Run>) -> Result<u64> {
    let least = u64::from(plan.senders.max(plan.calls.clients)).max(16);
    let mut count = plan.count.min(5000);
    loop {
        let passes = vec![Pass { count, ..Pass::default() }];
        let figures = run(&Job { passes, ..job.clone() })?.figures;
        // limits.c reports of round trips only the time of one.
        let each = figures.round_trip_ns.map(|ns| (ns + 2000.0 * job.delay_us as f64) * 1e-9 * count as f64);
        let took = figures.seconds.or(each).context("a run says not how long it took")?.max(1e-6);
        let wanted = |seconds: f64| ((count as f64 * seconds / took) as u64).clamp(least, plan.count);
        if took >= seconds / 10.0 || count >= plan.count {
            return Ok(wanted(seconds));
        }
        // The first messages take longer than those that follow.
        count = wanted(seconds / 3.0).clamp(2 * count, 100 * count).min(plan.count);
    }
}

/// Builds the programs that are not part of this one, before any measurement.
fn prepare(plan: &Plan, system: &mut SystemReport) -> Result<()> {
    let name = system.choice.system;
    name.belongs(plan.workload, plan.file.is_some()).map_err(|reason| anyhow!("{reason}"))?;
    match (name, plan.workload) {
        (SystemName::Queue | SystemName::QueueGo, _) => queue::build(name)?,
        (SystemName::PeltonC, Workload::Call) => drop(call_in_c::compile()?),
        (SystemName::PeltonC | SystemName::EventfdRing, _) => drop(c::compile(name, system.wait)?),
        (SystemName::PeltonCGo, _) => {
            call_in_c::compile()?;
            // Of its service; the client is this program.
            system.program = Peer::Go("pelton-go").command()?;
        }
        _ => {
            if let Some(peer) = Peer::of(name) {
                system.program = peer.command()?;
            }
        }
    }
    Ok(())
}

fn system_report(plan: &Plan, choice: &Choice) -> SystemReport {
    let peer = Peer::of(choice.system);
    let wait = match choice.system {
        _ if peer.is_some() && choice.wait.is_none() && plan.wait == Wait::Spin => {
            peer.map_or(plan.wait, |peer| peer.best_wait(plan.workload))
        }
        // limits.c has fixed waits: its eventfds block, its rings spin.
        SystemName::Limits if plan.delay_us > 0 => Wait::Block,
        SystemName::Limits | SystemName::LimitsWindow => Wait::Spin,
        // Its caller sleeps in epoll, whatever --wait says.
        SystemName::Queue | SystemName::QueueGo => Wait::Epoll,
        _ => choice.wait.unwrap_or(plan.wait),
    };
    let version = match choice.system {
        _ if peer.is_some() => peer.map(Peer::version).unwrap_or_default(),
        SystemName::Pelton
        | SystemName::PeltonBatches
        | SystemName::PeltonPath
        | SystemName::PeltonC
        | SystemName::PeltonCGo
        | SystemName::PeltonStream
        | SystemName::PeltonFanIn
        | SystemName::PeltonNginx
        | SystemName::PeltonAlone => env!("CARGO_PKG_VERSION").to_string(),
        SystemName::Limits | SystemName::LimitsWindow => limits::version(),
        SystemName::PeltonSbcl
        | SystemName::PeltonSbclReserved
        | SystemName::SbclMutex
        | SystemName::SbclCas
        | SystemName::SbclCompareAndSwap => lisp::version(),
        SystemName::Bump | SystemName::MutexVec | SystemName::Write => "Rust's std".to_string(),
        SystemName::ArrayQueue | SystemName::SegQueue => "crossbeam-queue 0.3".to_string(),
        _ => format!("Linux {}", rustix::system::uname().release().to_string_lossy()),
    };
    SystemReport {
        choice: choice.clone(),
        wait,
        version,
        count: plan.count,
        program: Vec::new(),
        runs: Vec::new(),
        skipped: None,
    }
}

/// The job of the side on the first CPU.
fn job(plan: &Plan, system: &SystemReport, cpus: &[usize], count_calls: bool) -> Job {
    let plan = &Plan { count: system.count, ..plan.clone() };
    let (senders, idle) = match (plan.workload, system.choice.system) {
        (Workload::FanIn, SystemName::PeltonAlone) => (plan.senders, 0),
        (Workload::FanIn, SystemName::PeltonStream) => (1, 0),
        (Workload::FanIn, _) => (plan.senders, plan.idle),
        (Workload::Call, SystemName::PeltonAlone | SystemName::SockStreamAlone) => (plan.calls.clients, 0),
        (Workload::Call, SystemName::PeltonFanIn) => (plan.calls.clients, 0),
        (Workload::Call, _) => (plan.calls.clients, u32::from(plan.calls.beside_flood)),
        _ => (1, 0),
    };
    // As many messages as the calls have, but one way.
    let fan_in = Plan { workload: Workload::FanIn, count: 2 * plan.count, ..plan.clone() };
    let (plan, name) = match system.choice.system {
        SystemName::PeltonFanIn => (&fan_in, SystemName::Pelton),
        name => (plan, name),
    };
    Job {
        system: name,
        wait: system.wait,
        workload: plan.workload,
        role: plan.workload.roles()[0],
        sizes: plan.sizes,
        capacity: plan.capacity,
        delay_us: plan.delay_us,
        work_steps: [0; 2],
        senders,
        idle,
        calls: plan.calls,
        index: 0,
        threads: plan.threads,
        to_file: plan.file.is_some(),
        passes: passes(plan, system.wait, count_calls, Peer::of(name).is_some_and(Peer::is_foreign)),
        cpu: cpus.first().copied(),
        cpus: cpus.to_vec(),
        cgroup: None,
        program: system.program.clone(),
        directory: plan.file.clone().unwrap_or_else(env::temp_dir),
    }
}

/// The work of the receiver and of the sender for each message, in steps; a short measurement finds how many take so
/// long on this machine.
fn work_steps(plan: &Plan) -> [u64; 2] {
    const MANY: u64 = 1 << 20;
    let works = plan.workload == Workload::Lopsided || (plan.workload == Workload::Append && plan.work_ns > 0);
    if !works {
        return [0; 2];
    }
    let once = |_| {
        let start = Instant::now();
        work(MANY);
        start.elapsed()
    };
    let shortest = (0..10).map(once).min().expect("ten are not none");
    let steps = |seconds: f64, least: f64| (seconds / shortest.as_secs_f64() * MANY as f64).max(least) as u64;
    if plan.workload == Workload::Append {
        return [steps(plan.work_ns as f64 * 1e-9, 1.0); 2];
    }
    let slow = steps(plan.work_us as f64 * 1e-6, 10.0);
    match plan.slow {
        Slow::Receiver => [slow, slow / 10],
        Slow::Sender => [slow / 10, slow],
    }
}

/// The first pass after the warm-up makes the figures; the passes after it have what would disturb it. `foreign`:
/// system calls are counted from outside.
pub(crate) fn passes(plan: &Plan, wait: Wait, count_calls: bool, foreign: bool) -> Vec<Pass> {
    if plan.workload == Workload::Reattach {
        return vec![Pass { count: plan.count, ..Pass::default() }];
    }
    if plan.workload == Workload::Idle {
        return vec![Pass { count: 1, ..Pass::default() }];
    }
    if matches!(plan.workload, Workload::Memory | Workload::Kill) {
        return vec![Pass { count: plan.count, ..Pass::default() }];
    }
    // Two clock reads cost some 50 ns. A round trip that sleeps takes a hundred times as long and can bear it. One
    // that spins takes 250 ns and cannot: its mean is of a pass without, its percentiles of a second pass of half the
    // count. With many calls in flight none is that short.
    let call = plan.workload == Workload::Call;
    let (timed, rests) = (call || plan.workload == Workload::Roundtrip, plan.delay_us > 0 || plan.calls.rate.is_some());
    let one_by_one = !call || plan.calls.one_by_one();
    let time_apart = timed && !(one_by_one && (wait != Wait::Spin || rests));
    let mut passes = Vec::new();
    let fast = matches!(plan.workload, Workload::Stream | Workload::FanIn | Workload::Threads) || timed;
    if fast && plan.calls.rate.is_none() && !plan.calls.beside_flood {
        // The first touch of memory takes a page fault, and the shortest pass would pay most for it.
        let count = plan.count.div_ceil(4).max(plan.senders.max(plan.calls.clients) as u64);
        passes.push(Pass { count, warms_up: true, ..Pass::default() });
    }
    passes.push(Pass { count: plan.count, time_each: timed && !time_apart, ..Pass::default() });
    if plan.workload == Workload::Lopsided || (plan.workload == Workload::Append && plan.work_ns > 0) {
        passes.push(Pass { count: plan.count, alone: true, ..Pass::default() });
    }
    if time_apart {
        passes.push(Pass { count: plan.count.div_ceil(2), time_each: true, ..Pass::default() });
    }
    // The flooding client's calls are not measured.
    if count_calls && !plan.calls.beside_flood {
        // Enough to find one call in ten thousand messages.
        let enough = if plan.calls.rate.is_some() { 1 } else { 100_000 };
        let count = plan.count.min((plan.count / 4).max(enough).max(plan.calls.clients as u64));
        if foreign {
            // The calls that a side makes to take orders and to report: an empty pass has only those.
            passes.push(Pass { count: 0, count_calls: true, ..Pass::default() });
        }
        passes.push(Pass { count, count_calls: true, ..Pass::default() });
    }
    passes
}

/// Longer than any system can need: each makes at least 10,000 messages and 20 MB a second.
pub(crate) fn deadline(job: &Job) -> Instant {
    let messages: u64 = job.passes.iter().map(|pass| job.messages(pass.count)).sum();
    // A step of work takes a nanosecond or two, and sixteen threads may share a CPU.
    let work = job.work_steps.iter().sum::<u64>() as f64 * 1e-8;
    let rest = job.calls.rate.map_or(0.0, |rate| 1.0 / rate as f64);
    let seconds = messages as f64 * (1e-4 + job.delay_us as f64 * 1e-6 + rest + work + job.sizes.max as f64 / 20e6);
    // A month stands for no deadline, and an Instant can hold it.
    Instant::now() + Duration::from_secs(60) + Duration::from_secs_f64(seconds.min(30.0 * 86400.0))
}

fn run_once(job: &Job, cpus: &[usize], interrupts: &Interrupts) -> Result<Run> {
    let directory = directory(job.system, &job.directory)?;
    let job = Job { directory: directory.path().to_path_buf(), ..job.clone() };
    let deadline = deadline(&job);
    if job.system.is_limits() {
        return run_limits(&job, cpus, interrupts, deadline);
    }
    if job.workload == Workload::Reattach {
        return reattach::run(&job, cpus, interrupts, deadline);
    }
    if job.workload == Workload::Kill {
        return kill::run(&job, cpus, interrupts);
    }
    let peer = Peer::of(job.system);
    let both = peer.is_some_and(Peer::is_both_sides) || job.system.is_one_process();
    let mut sides = Sides::new(interrupts, deadline);
    if job.workload == Workload::Memory {
        return memory::run(&job, cpus, sides);
    }
    for role in if both { &[Role::Threads] } else { job.workload.roles() } {
        if *role == Role::Sender && job.idle > 0 {
            // All connect before the first message.
            sides.start(&job, Role::Idler, 0, cpus)?;
            sides.expect_word(sides.sides.len() - 1, "ready")?;
        }
        if *role == Role::Client && job.idle > 0 {
            // The flooding client connects before the measured ones, and floods from then on.
            sides.start(&job, Role::Flooder, 0, cpus)?;
            sides.expect_word(sides.sides.len() - 1, "ready")?;
        }
        for index in 0..if matches!(role, Role::Sender | Role::Client) { job.senders } else { 1 } {
            sides.start(&job_of_role(&job, *role), *role, index, cpus)?;
        }
    }
    let reporting: Vec<usize> =
        (0..sides.sides.len()).filter(|side| !matches!(sides.sides[*side].role, Role::Idler | Role::Flooder)).collect();
    let (early, late): (Vec<usize>, Vec<usize>) =
        reporting.iter().copied().partition(|side| sides.sides[*side].role.listens());
    let mut reports: Vec<Vec<PassReport>> = Vec::new();
    let mut idle = None;
    for pass in &job.passes {
        for side in early.iter().chain(&late) {
            sides.expect_word(*side, "ready")?;
        }
        let counts_from_outside = pass.count_calls && peer.is_some_and(Peer::is_foreign);
        let counter = counts_from_outside.then(|| CallCounter::of_processes(&sides.pids())).transpose()?;
        for side in &early {
            sides.order_go(*side)?;
            sides.expect_word(*side, "started")?;
        }
        if job.workload == Workload::Idle {
            sides.expect_silence(IDLE_BEFORE)?;
            let (before, start) = (sides.usages()?, Instant::now());
            sides.expect_silence(IDLE_WINDOW)?;
            let (after, seconds) = (sides.usages()?, start.elapsed().as_secs_f64());
            idle = Some(([after[0].since(before[0]), after[1].since(before[1])], seconds));
        }
        for side in &late {
            sides.order_go(*side)?;
        }
        let mut pass: Vec<PassReport> = Vec::new();
        for side in &reporting {
            let line = sides.line(*side)?;
            let report: PassReport =
                serde_json::from_str(&line).with_context(|| format!("reading a report: `{line}`"))?;
            pass.push(report);
        }
        if let Some(counter) = counter {
            // No process can be named for these calls: the first gets all of them.
            let calls = counter.stop()?;
            pass[0].calls = Some(calls);
        }
        let (first, others) = pass.split_first().context("nobody reported")?;
        let bytes: u64 = others.iter().map(|other| other.bytes).sum();
        ensure!(others.is_empty() || first.bytes == bytes, "one side says {} bytes and the other {bytes}", first.bytes);
        reports.push(pass);
    }
    sides.end()?;
    let (job, reports) = measured(job, reports);
    Ok(match idle {
        Some((usages, seconds)) => idle_run(usages, seconds, &reports[0][0]),
        None if job.workload == Workload::Call => run_of_calls(&job, &reports),
        None => run_of(&job, &reports),
    })
}

/// The job as the process of that role gets it: a client in C can call a service in Go, whose waits are Go's own.
fn job_of_role(job: &Job, role: Role) -> Job {
    match (job.system, role) {
        (SystemName::PeltonCGo, Role::Service) => Job { wait: Wait::Block, ..job.clone() },
        (SystemName::PeltonCGo, _) => Job { program: Vec::new(), ..job.clone() },
        _ => job.clone(),
    }
}

/// Leaves out the passes that make no figures.
fn measured(job: Job, mut reports: Vec<Vec<PassReport>>) -> (Job, Vec<Vec<PassReport>>) {
    let empty = job.passes.iter().position(|pass| pass.count_calls && pass.count == 0);
    if let Some(empty) = empty {
        let without = reports[empty][0].calls.unwrap_or_default();
        let with = &mut reports[empty + 1][0].calls;
        *with = with.map(|calls| calls.saturating_sub(without));
    }
    let all = job.passes.iter().zip(reports).filter(|(pass, _)| !pass.warms_up && pass.count > 0);
    let (passes, reports): (Vec<Pass>, Vec<_>) = all.map(|(pass, reports)| (*pass, reports)).unzip();
    (Job { passes, ..job }, reports)
}

/// A run's own directory, removed after it. Channels that a directory keeps are in memory, as the others are.
pub(crate) fn directory(system: SystemName, parent: &Path) -> Result<RunDirectory> {
    let mut builder = tempfile::Builder::new();
    builder.prefix("pelton-bench-");
    if (system == SystemName::PeltonPath || Peer::of(system).is_some())
        && let Ok(directory) = builder.tempdir_in("/dev/shm")
    {
        return Ok(RunDirectory(directory));
    }
    let made = builder.tempdir_in(parent).with_context(|| format!("making a directory in {}", parent.display()))?;
    Ok(RunDirectory(made))
}

/// Removed with everything that is named after it: a killed process leaves shared memory under its own names behind.
pub(crate) struct RunDirectory(tempfile::TempDir);

impl RunDirectory {
    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for RunDirectory {
    fn drop(&mut self) {
        let own = self.0.path();
        let Some(name) = own.file_name().map(|name| name.to_string_lossy()) else { return };
        for entry in std::fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().contains(&*name) && entry.path() != own {
                // It may be gone already.
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

fn run_limits(job: &Job, cpus: &[usize], interrupts: &Interrupts, deadline: Instant) -> Result<Run> {
    limits::arguments(job, 1)?;
    ensure!(
        cpus == [0, 1] || available_cpus()?.starts_with(&[0, 1]),
        "limits.c pins its processes to the CPUs 0 and 1, found {:?}: allow it those",
        available_cpus()?
    );
    limits::compile()?;
    let mut sides = Sides::new(interrupts, deadline);
    sides.sides.push(Side::start(&Job { cpu: None, ..job.clone() })?);
    let line = sides.line(0)?;
    sides.end()?;
    serde_json::from_str(&line).with_context(|| format!("reading a report: `{line}`"))
}

fn available_cpus() -> Result<Vec<usize>> {
    let set = rustix::thread::sched_getaffinity(None).context("asking for the CPUs")?;
    Ok((0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

#[cfg(test)]
#[allow(missing_docs)]
pub mod tests {
    use super::*;

    pub fn plan() -> Plan {
        Plan {
            workload: Workload::Roundtrip,
            sizes: SizeRange::fixed(64),
            count: 1000,
            seconds: None,
            capacity: 1 << 20,
            wait: Wait::Block,
            runs: 1,
            delay_us: 20,
            slow: Slow::Receiver,
            work_us: 20,
            work_ns: 0,
            senders: 2,
            idle: 0,
            placement: Placement::Apart,
            beside_load: 0,
            quota: None,
            calls: Calls::default(),
            threads: 2,
            file: None,
            systems: Vec::new(),
        }
    }

    #[test]
    fn single_rounds_are_timed_in_a_separate_pass_only_where_the_clock_would_disturb() {
        let warm = Pass { count: 250, warms_up: true, ..Pass::default() };
        let counted = Pass { count: 1000, count_calls: true, ..Pass::default() };
        let asleep = passes(&plan(), Wait::Block, true, false);
        assert_eq!(asleep, [warm, Pass { count: 1000, time_each: true, ..Pass::default() }, counted]);
        let spinning = passes(&Plan { delay_us: 0, ..plan() }, Wait::Spin, false, false);
        assert_eq!(
            spinning,
            [warm, Pass { count: 1000, ..Pass::default() }, Pass { count: 500, time_each: true, ..Pass::default() }]
        );
        let foreign = passes(&plan(), Wait::Block, true, true);
        assert_eq!(foreign[2..], [Pass { count: 0, ..counted }, counted]);
        // One message a second is not warmed up for.
        let rated = Plan { delay_us: 0, calls: Calls { rate: Some(1), ..Calls::default() }, ..plan() };
        assert_eq!(
            passes(&rated, Wait::Block, false, false),
            [Pass { count: 1000, time_each: true, ..Pass::default() }]
        );
    }

    #[test]
    fn every_system_has_every_position() {
        let orders: Vec<Vec<usize>> = (1..=4).map(|run| rotation(3, run).collect()).collect();
        assert_eq!(orders, [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]);
    }

    #[test]
    fn the_warm_up_makes_no_figure_and_calls_of_an_empty_pass_are_subtracted() {
        let passes = passes(&Plan { delay_us: 0, ..plan() }, Wait::Block, true, true);
        let report = |start_ns, calls| PassReport { start_ns, calls, ..PassReport::default() };
        let both = |start_ns, calls| vec![report(start_ns, calls), report(start_ns, None)];
        let reports = vec![both(1, None), both(2, None), both(3, Some(70)), both(4, Some(2070))];
        let (job, reports) = measured(job_of(Workload::Roundtrip, passes), reports);
        assert_eq!(reports.iter().map(|reports| reports[0].start_ns).collect::<Vec<_>>(), [2, 4]);
        assert_eq!((reports[1][0].calls, reports[1][1].calls), (Some(2000), None));
        assert!(job.passes.iter().all(|pass| !pass.warms_up && pass.count > 0));
    }

    #[test]
    fn each_system_has_as_many_messages_as_last_the_given_seconds() {
        use crate::report::Figures;
        let plan = Plan { count: 100_000_000, delay_us: 0, workload: Workload::Stream, ..plan() };
        let job = job_of(Workload::Stream, Vec::new());
        // So many a second, and a tenth of a millisecond until it begins.
        let counted = |rate: f64, most: u64| {
            let mut made = Vec::new();
            let count = calibrate(&job, 0.3, &Plan { count: most, ..plan.clone() }, |job| {
                let count = job.passes[0].count;
                made.push(count);
                let seconds = Some(1e-4 + count as f64 / rate);
                Ok(Run { figures: Figures { seconds, ..Figures::default() }, ..Run::default() })
            });
            (count.unwrap(), made.len())
        };
        for rate in [100e6, 1e6, 30e3, 1e3] {
            let (count, made) = counted(rate, plan.count);
            assert!((0.25..0.35).contains(&(count as f64 / rate)), "{count} at {rate}");
            assert!(made <= 5, "{made} runs at {rate}");
        }
        assert_eq!(counted(100e6, 20_000), (20_000, 2), "no more than were allowed");
    }

    pub fn job_of(workload: Workload, passes: Vec<Pass>) -> Job {
        Job {
            system: SystemName::Pipe,
            wait: Wait::Block,
            workload,
            role: workload.roles()[0],
            sizes: SizeRange::fixed(64),
            capacity: 1 << 20,
            delay_us: 20,
            work_steps: [0; 2],
            senders: 1,
            idle: 0,
            calls: Calls::default(),
            index: 0,
            threads: 2,
            to_file: false,
            passes,
            cpu: None,
            cpus: Vec::new(),
            cgroup: None,
            program: Vec::new(),
            directory: env::temp_dir(),
        }
    }
}
