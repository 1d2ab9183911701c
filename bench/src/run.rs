//! Runs: fresh processes for each, pinned alike, the systems taking turns.
//!
//! The program starts itself once for each side, with a [`Job`]. A run's deadline is generous; when it passes, when one side fails, or
//! when the user interrupts, both sides end. When this program dies, they end by themselves.

use std::{
    collections::BTreeMap,
    env, fmt,
    fs::File,
    io::{Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt, process::ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, Signal, kill_process_group},
};

use crate::{
    kill,
    measure::{CallCounter, Usage, now_ns},
    memory,
    parameters::{Calls, Choice, Job, Pass, Role, SizeRange, Slow, SystemName, Wait, Workload, word},
    report::{Death, Figures, Outcome, Parameters, Report, Run, SideFigures, SystemReport},
    rivals::Rival,
    systems::{c, limits, lisp},
    workload::{PassReport, Percentiles, work},
};

/// What the command line asks for.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What the sides do
    pub workload: Workload,
    /// Sizes of the messages
    pub sizes: SizeRange,
    /// Messages, or rounds of a round trip
    pub count: u64,
    /// Bytes of a lane
    pub capacity: u64,
    /// How the sides wait, unless the system has a wait of its own
    pub wait: Wait,
    /// How often each system is measured
    pub runs: usize,
    /// Of each side of a round trip
    pub delay_us: u64,
    /// Which side of a lopsided channel works ten times as long as the other
    pub slow: Slow,
    /// How long, for each message
    pub work_us: u64,
    /// How long each appending thread works for each message
    pub work_ns: u64,
    /// Processes that send in a fan-in
    pub senders: u32,
    /// Connected senders of a fan-in that send nothing
    pub idle: u32,
    /// How calls are made
    pub calls: Calls,
    /// Threads of an append
    pub threads: u32,
    /// The directory for the file that they append to; without it they do to none
    pub file: Option<PathBuf>,
    /// In turn; the first is compared with the others
    pub systems: Vec<Choice>,
}

/// The user wants no more.
#[derive(Debug)]
pub struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// How long an idle channel is watched.
const IDLE_WINDOW: Duration = Duration::from_secs(2);
/// How long it is left alone before, for the receiver to fall asleep.
const IDLE_BEFORE: Duration = Duration::from_millis(200);
/// How long the sides have to end once both have reported.
const END: Duration = Duration::from_secs(10);

/// What is drawn while it runs: on a terminal only, and between runs only, since a clock of its own would disturb what is measured.
pub struct Progress {
    /// It may be several measurements'
    pub bar: ProgressBar,
    /// By how much a run of one system moves it on
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

/// Measures all systems. The flag says whether it was interrupted; what is finished is in the report all the same.
pub fn measure(plan: &Plan, progress: &Progress) -> Result<(Report, bool)> {
    let interrupts = Interrupts::new()?;
    let available = available_cpus()?;
    // Threads of one process are where the kernel puts them.
    let pinned = plan.workload != Workload::Append;
    let cpus = match available[..] {
        [first, ..] if pinned && plan.calls.one_cpu => vec![first; 2],
        [first, second, ..] if pinned => vec![first, second],
        _ => Vec::new(),
    };
    if pinned && cpus.is_empty() {
        eprintln!("note: one CPU only, so that nothing is pinned and the two sides take turns on it");
    }
    let count_calls = match CallCounter::start() {
        Ok(_) => true,
        Err(error) => {
            eprintln!("note: system calls are not counted: {error:#}");
            false
        }
    };
    let mut report = Report {
        workload: plan.workload,
        parameters: Parameters {
            size: plan.sizes.to_string(),
            count: plan.count,
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
            cpus: cpus.clone(),
        },
        systems: plan.systems.iter().map(|choice| system_report(plan, choice)).collect(),
    };
    for system in &mut report.systems {
        if let Err(reason) = make_ready(plan, system) {
            let reason = format!("{reason:#}");
            eprintln!("note: {} is skipped: {reason}", system.choice);
            system.skipped = Some(reason);
        }
    }
    let work_steps = work_steps(plan);
    let bar = &progress.bar;
    for number in 1..=plan.runs {
        for system in &mut report.systems {
            bar.set_message(format!("{} run {number} of {}: {}", word(plan.workload), plan.runs, system.choice));
            if system.skipped.is_none() {
                let job = Job { work_steps, ..job(plan, system, &cpus, count_calls) };
                match run_once(&job, &cpus, &interrupts) {
                    Ok(run) => system.runs.push(run),
                    Err(error) if error.is::<Interrupted>() => {
                        return Ok((report, true));
                    }
                    Err(error) => {
                        let reason = if number == 1 {
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
            bar.inc(progress.weight);
        }
    }
    Ok((report, false))
}

/// Builds what is not in this program, before anything is measured.
fn make_ready(plan: &Plan, system: &mut SystemReport) -> Result<()> {
    let name = system.choice.system;
    name.belongs(plan.workload, plan.file.is_some()).map_err(|reason| anyhow!("{reason}"))?;
    if let Some(rival) = Rival::of(name) {
        system.program = rival.command()?;
    }
    Ok(())
}

fn system_report(plan: &Plan, choice: &Choice) -> SystemReport {
    let rival = Rival::of(choice.system);
    let wait = match choice.system {
        _ if rival.is_some() && choice.wait.is_none() && plan.wait == Wait::Spin => {
            rival.map_or(plan.wait, Rival::best_wait)
        }
        // limits.c waits as it must: its eventfds block, its rings spin.
        SystemName::Limits if plan.delay_us > 0 => Wait::Block,
        SystemName::Limits => Wait::Spin,
        _ => choice.wait.unwrap_or(plan.wait),
    };
    let version = match choice.system {
        _ if rival.is_some() => rival.map(Rival::version).unwrap_or_default(),
        SystemName::Pelton
        | SystemName::PeltonBatches
        | SystemName::PeltonPath
        | SystemName::PeltonC
        | SystemName::PeltonStream
        | SystemName::PeltonFanIn
        | SystemName::PeltonNginx
        | SystemName::PeltonAlone => env!("CARGO_PKG_VERSION").to_string(),
        SystemName::Limits => limits::version(),
        SystemName::PeltonSbcl | SystemName::SbclMutex | SystemName::SbclCas => lisp::version(),
        SystemName::Bump | SystemName::MutexVec | SystemName::Write => "Rust's std".to_string(),
        SystemName::ArrayQueue | SystemName::SegQueue => "crossbeam-queue 0.3".to_string(),
        _ => format!("Linux {}", rustix::system::uname().release().to_string_lossy()),
    };
    SystemReport { choice: choice.clone(), wait, version, program: Vec::new(), runs: Vec::new(), skipped: None }
}

/// The job of the side on the first CPU.
fn job(plan: &Plan, system: &SystemReport, cpus: &[usize], count_calls: bool) -> Job {
    let (senders, idle) = match (plan.workload, system.choice.system) {
        (Workload::FanIn, SystemName::PeltonAlone) => (plan.senders, 0),
        (Workload::FanIn, SystemName::PeltonStream) => (1, 0),
        (Workload::FanIn, _) => (plan.senders, plan.idle),
        (Workload::Call, SystemName::PeltonAlone | SystemName::SockStreamAlone) => (plan.calls.clients, 0),
        (Workload::Call, SystemName::PeltonFanIn) => (plan.calls.clients, 0),
        (Workload::Call, _) => (plan.calls.clients, u32::from(plan.calls.beside_flood)),
        _ => (1, 0),
    };
    // As many messages as the calls are, but one way.
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
        passes: passes(plan, system.wait, count_calls),
        cpu: cpus.first().copied(),
        cpus: cpus.to_vec(),
        program: system.program.clone(),
        directory: plan.file.clone().unwrap_or_else(env::temp_dir),
        parent: std::process::id(),
    }
}

/// What the receiver and the sender work for each message: as many steps as take so long on this machine now.
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

/// The first pass makes the figures; those behind it only what would disturb it.
fn passes(plan: &Plan, wait: Wait, count_calls: bool) -> Vec<Pass> {
    if plan.workload == Workload::Reattach {
        return vec![Pass { count: plan.count, ..Pass::default() }];
    }
    if plan.workload == Workload::Idle {
        return vec![Pass { count: 1, ..Pass::default() }];
    }
    if matches!(plan.workload, Workload::Memory | Workload::Kill) {
        return vec![Pass { count: plan.count, ..Pass::default() }];
    }
    // Asking the clock twice costs some 50 ns. A round trip that sleeps takes a hundred times as long and can bear it; one that spins
    // takes 250 and cannot, so its mean is of a pass without, its percentiles are of a second pass of half the count.
    // Of many calls at a time none takes so long.
    let call = plan.workload == Workload::Call;
    let (timed, rests) = (call || plan.workload == Workload::Roundtrip, plan.delay_us > 0 || plan.calls.rate.is_some());
    let one_by_one = !call || plan.calls.one_by_one();
    let time_apart = timed && !(one_by_one && (wait != Wait::Spin || rests));
    let mut passes = vec![Pass { count: plan.count, time_each: timed && !time_apart, ..Pass::default() }];
    if plan.workload == Workload::Lopsided || (plan.workload == Workload::Append && plan.work_ns > 0) {
        passes.push(Pass { count: plan.count, alone: true, ..Pass::default() });
    }
    if time_apart {
        passes.push(Pass { count: plan.count.div_ceil(2), time_each: true, ..Pass::default() });
    }
    // What is asked by who floods is no message that is measured.
    if count_calls && !plan.calls.beside_flood {
        // Enough to find one call in ten thousand messages.
        let enough = if plan.calls.rate.is_some() { 1 } else { 100_000 };
        let count = plan.count.min((plan.count / 4).max(enough).max(plan.calls.clients as u64));
        passes.push(Pass { count, count_calls: true, ..Pass::default() });
    }
    passes
}

/// Longer than any of the systems can need: they make at least 10,000 messages and 20 MB a second.
fn deadline(job: &Job) -> Instant {
    let messages: u64 = job.passes.iter().map(|pass| job.messages(pass.count)).sum();
    // A step of work takes a nanosecond or two, and sixteen threads may share a CPU.
    let work = job.work_steps.iter().sum::<u64>() as f64 * 1e-8;
    let rest = job.calls.rate.map_or(0.0, |rate| 1.0 / rate as f64);
    let seconds = messages as f64 * (1e-4 + job.delay_us as f64 * 1e-6 + rest + work + job.sizes.max as f64 / 20e6);
    // A month is for ever, and within what an Instant can hold.
    Instant::now() + Duration::from_secs(60) + Duration::from_secs_f64(seconds.min(30.0 * 86400.0))
}

fn run_once(job: &Job, cpus: &[usize], interrupts: &Interrupts) -> Result<Run> {
    if job.system == SystemName::PeltonC {
        c::compile(job.wait)?;
    }
    let directory = directory(job.system, &job.directory)?;
    let job = Job { directory: directory.path().to_path_buf(), ..job.clone() };
    let deadline = deadline(&job);
    if job.system == SystemName::Limits {
        return run_limits(&job, cpus, interrupts, deadline);
    }
    if job.workload == Workload::Reattach {
        return run_reattach(&job, cpus, interrupts, deadline);
    }
    if job.workload == Workload::Kill {
        return run_kill(&job, cpus, interrupts);
    }
    let rival = Rival::of(job.system);
    let both = rival.is_some_and(Rival::is_both_sides);
    let mut sides = Sides { sides: Vec::new(), interrupts, deadline };
    if job.workload == Workload::Memory {
        return run_memory(&job, cpus, sides);
    }
    for role in if both { &[Role::Threads] } else { job.workload.roles() } {
        if *role == Role::Sender && job.idle > 0 {
            // All connected before anybody sends.
            sides.start(&job, Role::Idler, 0, cpus)?;
            sides.expect_word(sides.sides.len() - 1, "ready")?;
        }
        if *role == Role::Client && job.idle > 0 {
            // Connected before, and at it from then on.
            sides.start(&job, Role::Flooder, 0, cpus)?;
            sides.expect_word(sides.sides.len() - 1, "ready")?;
        }
        for index in 0..if matches!(role, Role::Sender | Role::Client) { job.senders } else { 1 } {
            sides.start(&job, *role, index, cpus)?;
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
        let counts_from_outside = pass.count_calls && rival.is_some_and(Rival::is_foreign);
        let counter = counts_from_outside.then(|| CallCounter::of_processes(&sides.pids())).transpose()?;
        for side in &early {
            sides.order_go(*side)?;
            sides.expect_word(*side, "started")?;
        }
        if job.workload == Workload::Idle {
            sides.leave_alone(IDLE_BEFORE)?;
            let (before, start) = (sides.usages()?, Instant::now());
            sides.leave_alone(IDLE_WINDOW)?;
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
            // Nobody knows whose they were.
            let (calls, sides) = (counter.stop()?, pass.len() as u64);
            for (index, report) in pass.iter_mut().enumerate() {
                report.calls = Some(calls / sides + if index == 0 { calls % sides } else { 0 });
            }
        }
        let (first, others) = pass.split_first().context("nobody reported")?;
        let bytes: u64 = others.iter().map(|other| other.bytes).sum();
        ensure!(others.is_empty() || first.bytes == bytes, "one side says {} bytes and the other {bytes}", first.bytes);
        reports.push(pass);
    }
    sides.end()?;
    Ok(match idle {
        Some((usages, seconds)) => idle_run(usages, seconds, &reports[0][0]),
        None if job.workload == Workload::Call => run_of_calls(&job, &reports),
        None => run_of(&job, &reports),
    })
}

/// A run's own, which goes with it. Channels that a directory keeps are to be in memory, as the others are.
fn directory(system: SystemName, parent: &Path) -> Result<RunDirectory> {
    let mut builder = tempfile::Builder::new();
    builder.prefix("pelton-bench-");
    if (system == SystemName::PeltonPath || Rival::of(system).is_some())
        && let Ok(directory) = builder.tempdir_in("/dev/shm")
    {
        return Ok(RunDirectory(directory));
    }
    let made = builder.tempdir_in(parent).with_context(|| format!("making a directory in {}", parent.display()))?;
    Ok(RunDirectory(made))
}

/// Removed with all that is named after it: who was killed leaves shared memory of its own naming behind.
struct RunDirectory(tempfile::TempDir);

impl RunDirectory {
    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for RunDirectory {
    fn drop(&mut self) {
        let own = self.0.path();
        let Some(name) = own.file_name().map(|name| name.to_string_lossy()) else { return };
        for entry in std::fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().contains(&*name) && entry.path() != own {
                // It may be gone by now.
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

/// Memory with nothing sent, with as much as nobody took, and after all was taken.
fn run_memory(job: &Job, cpus: &[usize], mut sides: Sides) -> Result<Run> {
    sides.start(job, Role::Receiver, 0, cpus)?;
    sides.start(job, Role::Sender, 0, cpus)?;
    let (receiver, sender) = (0, 1);
    sides.expect_word(receiver, "ready")?;
    sides.expect_word(sender, "ready")?;
    let resident = |sides: &Sides| memory::resident_bytes(&sides.pids());
    let before = resident(&sides)?;
    sides.order_go(sender)?;
    let held: u64 = sides.line(sender)?.parse().context("reading how many messages were sent")?;
    let filled = resident(&sides)?;
    sides.order_go(receiver)?;
    sides.expect_word(receiver, "started")?;
    let mut reports = Vec::new();
    for side in [receiver, sender] {
        reports.push(serde_json::from_str::<PassReport>(&sides.line(side)?).context("reading a report")?);
    }
    let drained = resident(&sides)?;
    sides.end()?;
    let figures = Figures {
        backlog_messages: Some(held as f64),
        backlog_resident_bytes: Some(filled.saturating_sub(before) as f64),
        drained_resident_bytes: Some(drained.saturating_sub(before) as f64),
        ..Figures::default()
    };
    let side = |report: PassReport| SideFigures { usage: report.usage, ..SideFigures::default() };
    Ok(Run { figures, sides: by_role(job.workload, reports.into_iter().map(side)), ..Run::default() })
}

/// How long a survivor may take to be told: ten times what any of those that are told takes here, and longer than `ipc_ring`'s own half second.
const TOLD_WITHIN: Duration = Duration::from_secs(2);
/// Messages after which a stream is under way.
const UNDER_WAY: u64 = 1000;
/// Two looks at how far a survivor is, so far apart.
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);

/// Two streams: the receiver of one is killed, and the sender of the other.
fn run_kill(job: &Job, cpus: &[usize], interrupts: &Interrupts) -> Result<Run> {
    let mut run = Run::default();
    for (killed, name) in [(0, "receiver"), (1, "sender")] {
        let directory = directory(job.system, &job.directory)?;
        let job = Job { directory: directory.path().to_path_buf(), ..job.clone() };
        let mut sides = Sides { sides: Vec::new(), interrupts, deadline: deadline(&job) };
        sides.start(&job, Role::Receiver, 0, cpus)?;
        sides.start(&job, Role::Sender, 0, cpus)?;
        sides.expect_word(0, "ready")?;
        sides.expect_word(1, "ready")?;
        sides.order_go(0)?;
        sides.expect_word(0, "started")?;
        sides.order_go(1)?;
        // In the stream, however long its sides take to get there; somewhere, that is what the clock's last digits say.
        for side in [0, 1] {
            while sides.how_far(side)? < UNDER_WAY {
                sides.leave_alone(Duration::from_millis(1))?;
            }
        }
        sides.leave_alone(Duration::from_millis(20 + now_ns() % 60))?;
        let killed_ns = now_ns();
        let mut victim = sides.sides.remove(killed);
        victim.kill();
        let death = sides.outlive(killed_ns);
        drop(victim);
        let (death, told_ns) = death?;
        match name {
            "receiver" => run.figures.receiver_death_told_ns = told_ns,
            _ => run.figures.sender_death_told_ns = told_ns,
        }
        run.deaths.insert(name.to_string(), death);
        // What it makes of its own end is no part of this.
        sides.sides.clear();
    }
    Ok(run)
}

/// Each end is killed on a lane full of messages, and a fresh process takes its place.
fn run_reattach(job: &Job, cpus: &[usize], interrupts: &Interrupts, deadline: Instant) -> Result<Run> {
    let mut sides = Sides { sides: Vec::new(), interrupts, deadline };
    sides.come(job, Role::Filler, cpus)?;
    sides.come(job, Role::Receiver, cpus)?;
    sides.sides.truncate(1); // dropped: killed, and gone
    let receiver = sides.come(job, Role::Receiver, cpus)?;
    sides.sides.remove(0);
    let sender = sides.come(job, Role::Sender, cpus)?;
    let ns = |report: &PassReport| Some(report.end_ns.saturating_sub(report.start_ns) as f64);
    let figures = Figures {
        cpu_seconds: Some(receiver.usage.cpu_seconds + sender.usage.cpu_seconds),
        reattach_receiver_ns: ns(&receiver),
        reattach_sender_ns: ns(&sender),
        ..Figures::default()
    };
    let side = |report: PassReport| SideFigures { usage: report.usage, ..SideFigures::default() };
    Ok(Run { figures, sides: by_role(Workload::Reattach, [receiver, sender].map(side)), ..Run::default() })
}

fn run_limits(job: &Job, cpus: &[usize], interrupts: &Interrupts, deadline: Instant) -> Result<Run> {
    limits::arguments(job, 1)?;
    ensure!(
        cpus == [0, 1] || available_cpus()?.starts_with(&[0, 1]),
        "limits.c pins its processes to the CPUs 0 and 1, found {:?}: allow it those",
        available_cpus()?
    );
    limits::compile()?;
    let mut sides = Sides { sides: vec![Side::start(&Job { cpu: None, ..job.clone() })?], interrupts, deadline };
    let line = sides.line(0)?;
    sides.end()?;
    serde_json::from_str(&line).with_context(|| format!("reading a report: `{line}`"))
}

/// The figures of a run of messages: for each pass the reports of all sides, the one of the first CPU first.
fn run_of(job: &Job, reports: &[Vec<PassReport>]) -> Run {
    let (first, others) = reports[0].split_first().expect("a run has a side");
    let roundtrip = job.workload == Workload::Roundtrip;
    let pass = &job.passes[0];
    // The start is that of who sends first or asks, the end the receiver's or again the asker's: one clock for all processes.
    let start_ns = match others.iter().map(|other| other.start_ns).min() {
        Some(start_ns) if !roundtrip => start_ns,
        _ => first.start_ns,
    };
    let elapsed_ns = first.end_ns.saturating_sub(start_ns) as f64;
    let seconds = elapsed_ns * 1e-9;
    let counted = job.passes.iter().zip(reports).find(|(pass, _)| pass.count_calls);
    let calls = counted.and_then(|(pass, reports)| {
        let calls: Option<Vec<u64>> = reports.iter().map(|report| report.calls).collect();
        Some((calls?, job.messages(pass.count) as f64))
    });
    let sleeps = |report: &PassReport| roundtrip.then(|| report.usage.voluntary_switches as f64 / pass.count as f64);
    let percentiles = reports.iter().find_map(|reports| reports[0].percentiles.as_ref());
    let percentile = |of: fn(&Percentiles) -> u64| percentiles.map(|percentiles| of(percentiles) as f64);
    let latency = percentiles.map(|percentiles| percentiles.ladder.clone()).unwrap_or_default();
    let rate = |amount: f64| (!roundtrip && seconds > 0.0).then(|| amount / seconds);
    // All worked alone at the same time, too.
    let alone = job.passes.iter().zip(reports).find(|(pass, _)| pass.alone).map(|(_, reports)| reports);
    let alone_ns = |report: &PassReport| report.end_ns.saturating_sub(report.start_ns) as f64;
    let cpu_seconds = |reports: &[PassReport]| reports.iter().map(|report| report.usage.cpu_seconds).sum::<f64>();
    let figures = Figures {
        seconds: Some(seconds),
        share_of_own_speed: alone.map(|alone| alone.iter().map(alone_ns).fold(0.0, f64::max) / elapsed_ns),
        cpu_to_own_work: alone.map(|alone| cpu_seconds(&reports[0]) / cpu_seconds(alone)),
        messages_per_second: rate(job.messages(pass.count) as f64),
        bytes_per_second: rate(first.bytes as f64),
        round_trip_ns: match job.calls.rate {
            _ if !roundtrip => None,
            Some(_) => percentiles.map(|percentiles| percentiles.mean_ns),
            None => Some(elapsed_ns / pass.count as f64 - 2000.0 * job.delay_us as f64),
        },
        p50_ns: percentile(|p| p.p50_ns),
        p90_ns: percentile(|p| p.p90_ns),
        p99_ns: percentile(|p| p.p99_ns),
        p999_ns: percentile(|p| p.p999_ns),
        p9999_ns: percentile(|p| p.p9999_ns),
        cpu_seconds: Some(cpu_seconds(&reports[0])),
        syscalls_per_message: calls.as_ref().map(|(calls, messages)| calls.iter().sum::<u64>() as f64 / messages),
        sleeps_per_wait: reports[0].iter().filter_map(sleeps).reduce(f64::min),
        resident_bytes: first.resident_bytes.map(|bytes| bytes as f64),
        ..Figures::default()
    };
    let sides = reports[0].iter().enumerate().map(|(index, report)| SideFigures {
        usage: report.usage,
        syscalls_per_message: calls.as_ref().map(|(calls, messages)| calls[index] as f64 / messages),
        sleeps_per_wait: sleeps(report),
    });
    Run { figures, sides: by_role(job.workload, sides), latency, ..Run::default() }
}

/// The figures of a run of calls: for each pass the service's report and then those of its clients.
fn run_of_calls(job: &Job, reports: &[Vec<PassReport>]) -> Run {
    let run = run_of(job, reports);
    let (pass, clients) = (&job.passes[0], &reports[0][1..]);
    let start_ns = clients.iter().map(|client| client.start_ns).min().unwrap_or_default();
    let end_ns = clients.iter().map(|client| client.end_ns).max().unwrap_or_default();
    let elapsed_ns = end_ns.saturating_sub(start_ns) as f64;
    // Of several clients that for which it took the longest.
    let percentiles =
        || reports.iter().flat_map(|reports| &reports[1..]).filter_map(|client| client.percentiles.as_ref());
    let percentile = |of: fn(&Percentiles) -> u64| percentiles().map(of).max().map(|ns| ns as f64);
    let rests = job.delay_us > 0 || job.calls.rate.is_some();
    let rate = |amount: f64| (!rests && elapsed_ns > 0.0).then(|| amount / (elapsed_ns * 1e-9));
    let mean_ns = match job.calls {
        calls if !calls.one_by_one() => None,
        Calls { rate: Some(_), .. } => percentiles().next().map(|percentiles| percentiles.mean_ns),
        _ => Some(elapsed_ns / pass.count as f64 - 2000.0 * job.delay_us as f64),
    };
    let sleeps = |report: &PassReport| report.usage.voluntary_switches as f64 / pass.count as f64;
    let figures = Figures {
        seconds: Some(elapsed_ns * 1e-9),
        calls_per_second: rate(pass.count as f64),
        messages_per_second: rate(job.messages(pass.count) as f64),
        bytes_per_second: rate(2.0 * reports[0][0].bytes as f64),
        round_trip_ns: mean_ns,
        p50_ns: percentile(|p| p.p50_ns),
        p90_ns: percentile(|p| p.p90_ns),
        p99_ns: percentile(|p| p.p99_ns),
        p999_ns: percentile(|p| p.p999_ns),
        p9999_ns: percentile(|p| p.p9999_ns),
        sleeps_per_wait: job.calls.one_by_one().then(|| reports[0].iter().map(sleeps).fold(f64::INFINITY, f64::min)),
        ..run.figures
    };
    let latency = percentiles().next().map(|percentiles| percentiles.ladder.clone()).unwrap_or_default();
    Run { figures, latency, ..run }
}

/// The figures of a window in which nothing was sent.
fn idle_run(usages: [Usage; 2], seconds: f64, receiver: &PassReport) -> Run {
    let switches: u64 = usages.iter().map(|usage| usage.voluntary_switches + usage.involuntary_switches).sum();
    let figures = Figures {
        seconds: Some(seconds),
        cpu_seconds: Some(usages[0].cpu_seconds + usages[1].cpu_seconds),
        wakeups_per_second: Some(switches as f64 / seconds),
        resident_bytes: receiver.resident_bytes.map(|bytes| bytes as f64),
        ..Figures::default()
    };
    let sides = usages.map(|usage| SideFigures { usage, ..SideFigures::default() });
    Run { figures, sides: by_role(Workload::Idle, sides), ..Run::default() }
}

/// Senders of a fan-in have numbers, and so have clients.
fn by_role(workload: Workload, sides: impl IntoIterator<Item = SideFigures>) -> BTreeMap<String, SideFigures> {
    let sides: Vec<SideFigures> = sides.into_iter().collect();
    // A program that starts the other side itself.
    let alone = sides.len() == 1;
    let name = |index: usize| match workload.roles() {
        [_, _] if alone => "both".to_string(),
        [_, role] if matches!(workload, Workload::FanIn | Workload::Call) && index > 0 => {
            format!("{}-{index}", role.name())
        }
        roles => roles[index].name().to_string(),
    };
    sides.into_iter().enumerate().map(|(index, side)| (name(index), side)).collect()
}

fn available_cpus() -> Result<Vec<usize>> {
    let set = rustix::thread::sched_getaffinity(None).context("asking for the CPUs")?;
    Ok((0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

/// SIGINT, SIGTERM and SIGHUP as something to poll.
struct Interrupts(UnixStream);

impl Interrupts {
    fn new() -> Result<Interrupts> {
        let (ours, theirs) = UnixStream::pair().context("making a socket pair")?;
        for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
            signal_hook::low_level::pipe::register(signal.as_raw(), theirs.try_clone()?).context("taking a signal")?;
        }
        Ok(Interrupts(ours))
    }
}

/// One process of a run. It does not outlive this value.
struct Side {
    role: Role,
    child: Child,
    orders: Option<ChildStdin>,
    output: File,
    text: Vec<u8>,
}

impl Side {
    fn start(job: &Job) -> Result<Side> {
        let program = match &job.program[..] {
            [] => vec![env::current_exe().context("finding this program")?.into_os_string()],
            program => program.to_vec(),
        };
        let mut child = Command::new(&program[0])
            .args(&program[1..])
            .arg(crate::side::SIDE)
            .arg(serde_json::to_string(job)?)
            // A group of its own: an interrupt at the terminal comes to us only, and all of a side's processes can be ended together.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {}", program[0].display()))?;
        let orders = child.stdin.take();
        let output = File::from(OwnedFd::from(child.stdout.take().expect("it is piped")));
        Ok(Side { role: job.role, child, orders, output, text: Vec::new() })
    }

    fn name(&self) -> &'static str {
        self.role.name()
    }

    fn kill(&mut self) {
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // It may have ended by itself.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }

    fn take_line(&mut self) -> Option<String> {
        let end = self.text.iter().position(|byte| *byte == b'\n')?;
        let line = String::from_utf8_lossy(&self.text[..end]).into_owned();
        self.text.drain(..=end);
        Some(line)
    }

    /// What it said of its failure, after its end.
    fn last_words(&mut self) -> String {
        let mut words = String::new();
        if let Some(mut errors) = self.child.stderr.take() {
            let mut bytes = Vec::new();
            let _ = errors.read_to_end(&mut bytes);
            words = String::from_utf8_lossy(&bytes).split_whitespace().collect::<Vec<_>>().join(" ");
        }
        words
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        self.kill();
        let _ = self.child.wait();
    }
}

/// The processes of a run, listened to together, so that the failure of one is noticed whichever is waited for.
struct Sides<'a> {
    sides: Vec<Side>,
    interrupts: &'a Interrupts,
    deadline: Instant,
}

/// What woke the listener.
enum Event {
    /// A side has written something
    Text,
    /// A side has closed its output, by ending
    End(usize),
    /// The time given is over
    Time,
}

impl Sides<'_> {
    fn event(&mut self, until: Instant) -> Result<Event> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos() as i64 };
            let mut fds = vec![PollFd::new(&self.interrupts.0, PollFlags::IN)];
            fds.extend(self.sides.iter().map(|side| PollFd::from_borrowed_fd(side.output.as_fd(), PollFlags::IN)));
            match poll(&mut fds, Some(&left)) {
                Ok(0) => return Ok(Event::Time),
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error).context("waiting for the sides"),
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready[0] {
                return Err(Interrupted.into());
            }
            let index = ready[1..].iter().position(|ready| *ready).expect("poll answered that one is ready");
            let side = &mut self.sides[index];
            let mut bytes = [0; 4096];
            let done = side.output.read(&mut bytes).context("reading from a side")?;
            side.text.extend_from_slice(&bytes[..done]);
            return Ok(if done == 0 { Event::End(index) } else { Event::Text });
        }
    }

    fn line(&mut self, index: usize) -> Result<String> {
        loop {
            if let Some(line) = self.sides[index].take_line() {
                return Ok(line);
            }
            match self.event(self.deadline)? {
                Event::Text => {}
                Event::End(failed) => return Err(self.failure(failed)),
                Event::Time => return Err(self.too_long()),
            }
        }
    }

    fn expect_word(&mut self, index: usize, word: &str) -> Result<()> {
        let line = self.line(index)?;
        ensure!(line == format!("\"{word}\""), "the {} said `{line}`, wanted \"{word}\"", self.sides[index].name());
        Ok(())
    }

    /// Starts one side more: `index` tells several of one role apart.
    fn start(&mut self, job: &Job, role: Role, index: u32, cpus: &[usize]) -> Result<()> {
        // Of programs with threads of their own each may use both.
        let pinned = Rival::of(job.system).is_none_or(Rival::is_pinned);
        let cpu = cpus.get(role.cpu_index()).copied().filter(|_| pinned && role != Role::Threads);
        self.sides.push(Side::start(&Job { role, index, cpu, ..job.clone() })?);
        Ok(())
    }

    /// Starts one side more and has it do its part.
    fn come(&mut self, job: &Job, role: Role, cpus: &[usize]) -> Result<PassReport> {
        let index = self.sides.len();
        self.start(job, role, 0, cpus)?;
        self.expect_word(index, "ready")?;
        self.order_go(index)?;
        if role.listens() {
            self.expect_word(index, "started")?;
        }
        let line = self.line(index)?;
        serde_json::from_str(&line).with_context(|| format!("reading a report: `{line}`"))
    }

    fn order_go(&mut self, index: usize) -> Result<()> {
        let orders = self.sides[index].orders.as_mut().expect("orders stay open until the end");
        // A side that is gone is noticed, with its reason, when its answer is waited for.
        match orders.write_all(b"go\n") {
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error).context("ordering a side to go"),
            _ => Ok(()),
        }
    }

    /// Waits; neither side should say anything.
    fn leave_alone(&mut self, time: Duration) -> Result<()> {
        match self.event(Instant::now() + time)? {
            Event::Time => Ok(()),
            Event::End(failed) => Err(self.failure(failed)),
            Event::Text => bail!("a side of an idle channel got a message that nobody sent"),
        }
    }

    fn pids(&self) -> Vec<u32> {
        self.sides.iter().map(|side| side.child.id()).collect()
    }

    /// What the only side left makes of the other's death, and after how many nanoseconds it said so.
    fn outlive(&mut self, killed_ns: u64) -> Result<(Death, Option<f64>)> {
        let until = Instant::now() + TOLD_WITHIN;
        loop {
            if let Some(line) = self.sides[0].take_line() {
                let kill::Word::End { outcome, at_ns, messages, words } = read_word(&line)? else {
                    bail!("the survivor said `{line}` without being asked");
                };
                let told = (outcome == Outcome::Told).then(|| at_ns.saturating_sub(killed_ns) as f64);
                return Ok((Death { outcome, messages, words }, told));
            }
            match self.event(until)? {
                Event::Text => {}
                Event::End(_) => {
                    let words = self.failure(0).to_string();
                    return Ok((Death { outcome: Outcome::Crashed, messages: 0, words }, None));
                }
                Event::Time => break,
            }
        }
        let first = self.how_far_or_end()?;
        // That it says something by itself at last is too late.
        let _ = self.event(Instant::now() + BETWEEN_LOOKS)?;
        let last = self.how_far_or_end()?;
        let outcome = if last > first { Outcome::GoesOn } else { Outcome::Hangs };
        let words = format!("nothing within {} s", TOLD_WITHIN.as_secs());
        Ok((Death { outcome, messages: last, words }, None))
    }

    /// How far a side of a stream is that nobody was killed in yet.
    fn how_far(&mut self, index: usize) -> Result<u64> {
        self.ask_how_far(index)?;
        match read_word(&self.line(index)?)? {
            kill::Word::Far(messages) => Ok(messages),
            kill::Word::End { words, .. } => bail!("the {} ended by itself: {words}", self.sides[index].name()),
        }
    }

    /// How far the survivor is; what it says by itself now is too late.
    fn how_far_or_end(&mut self) -> Result<u64> {
        self.ask_how_far(0)?;
        self.deadline = Instant::now() + END;
        loop {
            if let kill::Word::Far(messages) = read_word(&self.line(0)?)? {
                return Ok(messages);
            }
        }
    }

    fn ask_how_far(&mut self, index: usize) -> Result<()> {
        let orders = self.sides[index].orders.as_mut().expect("orders stay open until the end");
        orders.write_all(kill::HOW_FAR).with_context(|| format!("asking the {}", self.sides[index].name()))
    }

    fn usages(&self) -> Result<[Usage; 2]> {
        Ok([Usage::of_process(self.sides[0].child.id())?, Usage::of_process(self.sides[1].child.id())?])
    }

    /// Lets both sides go and sees that they end well.
    fn end(&mut self) -> Result<()> {
        for side in &mut self.sides {
            side.orders = None;
        }
        self.deadline = Instant::now() + END;
        let mut open = self.sides.len();
        while open > 0 {
            // Taken from the list once ended, or poll would answer the same end again.
            match self.event(self.deadline)? {
                Event::Text => {}
                Event::Time => return Err(self.too_long()),
                Event::End(index) => {
                    let mut side = self.sides.swap_remove(index);
                    let status = side.child.wait().context("waiting for a side")?;
                    ensure!(
                        status.success(),
                        "the {} failed at its end ({status}): {}",
                        side.name(),
                        side.last_words()
                    );
                    open -= 1;
                }
            }
        }
        Ok(())
    }

    fn too_long(&mut self) -> anyhow::Error {
        let said = self.end_all(None);
        anyhow!("the run took longer than its deadline and was ended{}{said}", if said.is_empty() { "" } else { ": " })
    }

    fn failure(&mut self, failed: usize) -> anyhow::Error {
        anyhow!("{}", self.end_all(Some(failed)))
    }

    /// Ends all and collects what they said of it.
    fn end_all(&mut self, failed: Option<usize>) -> String {
        let mut said = Vec::new();
        for index in 0..self.sides.len() {
            let side = &mut self.sides[index];
            if failed == Some(index) {
                // It has closed its output, so that it is about to end by itself, with its own status.
                let until = Instant::now() + Duration::from_secs(1);
                while Instant::now() < until && matches!(side.child.try_wait(), Ok(None)) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            side.kill();
            let status = side.child.wait();
            let words = side.last_words();
            let name = side.name();
            match status {
                _ if !words.is_empty() => said.push(format!("{name}: {words}")),
                Ok(status) if failed == Some(index) => match status.signal() {
                    Some(signal) => said.push(format!("{name}: ended by signal {signal}")),
                    None => said.push(format!("{name}: ended early with {status}")),
                },
                _ => {}
            }
        }
        said.join("; ")
    }
}

fn read_word(line: &str) -> Result<kill::Word> {
    serde_json::from_str(line).with_context(|| format!("reading what the survivor said: `{line}`"))
}

#[cfg(test)]
#[allow(missing_docs)]
pub mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan {
            workload: Workload::Roundtrip,
            sizes: SizeRange::fixed(64),
            count: 1000,
            capacity: 1 << 20,
            wait: Wait::Block,
            runs: 1,
            delay_us: 20,
            slow: Slow::Receiver,
            work_us: 20,
            work_ns: 0,
            senders: 2,
            idle: 0,
            calls: Calls::default(),
            threads: 2,
            file: None,
            systems: Vec::new(),
        }
    }

    #[test]
    fn the_clock_is_asked_apart_only_where_it_would_disturb() {
        let asleep = passes(&plan(), Wait::Block, true);
        assert_eq!(asleep[0], Pass { count: 1000, time_each: true, ..Pass::default() });
        assert_eq!(asleep[1..], [Pass { count: 1000, count_calls: true, ..Pass::default() }]);
        let spinning = passes(&Plan { delay_us: 0, ..plan() }, Wait::Spin, false);
        assert_eq!(
            spinning,
            [Pass { count: 1000, ..Pass::default() }, Pass { count: 500, time_each: true, ..Pass::default() }]
        );
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
            program: Vec::new(),
            directory: env::temp_dir(),
            parent: 1,
        }
    }

    #[test]
    fn a_lopsided_channel_is_compared_with_the_slower_sides_work_and_the_cpu_time_of_both() {
        let passes = passes(&Plan { workload: Workload::Lopsided, delay_us: 0, ..plan() }, Wait::Block, false);
        assert_eq!(
            passes,
            [Pass { count: 1000, ..Pass::default() }, Pass { count: 1000, alone: true, ..Pass::default() }]
        );
        let job = job_of(Workload::Lopsided, passes);
        let part = |start_ns, end_ns, cpu_seconds| PassReport {
            start_ns,
            end_ns,
            usage: Usage { cpu_seconds, ..Usage::default() },
            ..PassReport::default()
        };
        let together = [part(900, 2000, 1.0), part(1000, 1950, 0.2)];
        let alone = [part(5000, 5900, 0.9), part(5000, 5090, 0.1)];
        let run = run_of(&job, &[together.to_vec(), alone.to_vec()]);
        assert_eq!((run.figures.share_of_own_speed, run.figures.cpu_to_own_work), (Some(0.9), Some(1.2)));
        assert_eq!(run.figures.round_trip_ns, None);
    }

    #[test]
    fn a_fan_in_lasts_from_the_first_that_sends_and_costs_what_all_cost() {
        let passes =
            vec![Pass { count: 10, ..Pass::default() }, Pass { count: 10, count_calls: true, ..Pass::default() }];
        let job = Job { senders: 3, ..job_of(Workload::FanIn, passes) };
        assert_eq!((0..3).map(|index| job.share(index, 10)).collect::<Vec<_>>(), [4, 3, 3]);
        let part = |start_ns, end_ns, calls| PassReport {
            start_ns,
            end_ns,
            calls,
            usage: Usage { cpu_seconds: 0.5, ..Usage::default() },
            ..PassReport::default()
        };
        let timed = vec![
            part(100, 1_000_001_000, None),
            part(1000, 1200, None),
            part(1100, 1300, None),
            part(1050, 1990, None),
        ];
        let counted = vec![part(0, 1, Some(5)), part(0, 1, Some(1)), part(0, 1, Some(3)), part(0, 1, Some(1))];
        let run = run_of(&job, &[timed, counted]);
        assert_eq!((run.figures.seconds, run.figures.messages_per_second), (Some(1.0), Some(10.0)));
        assert_eq!((run.figures.cpu_seconds, run.figures.syscalls_per_message), (Some(2.0), Some(1.0)));
        assert_eq!(run.sides.keys().collect::<Vec<_>>(), ["receiver", "sender-1", "sender-2", "sender-3"]);
    }

    #[test]
    fn calls_last_from_the_first_client_to_the_last_and_the_slowest_is_told() {
        let percentiles = |p99_ns| Some(Percentiles { p99_ns, mean_ns: 50.0, ..Percentiles::default() });
        let part = |start_ns, end_ns, percentiles| PassReport {
            start_ns,
            end_ns,
            bytes: 640,
            percentiles,
            ..PassReport::default()
        };
        // The service hears late that all is over.
        let service = || part(0, 9_000_000_000, None);
        let calls = Calls { clients: 2, in_flight: 10, ..Calls::default() };
        let passes =
            vec![Pass { count: 10, ..Pass::default() }, Pass { count: 10, time_each: true, ..Pass::default() }];
        let job = Job { senders: 2, calls, delay_us: 0, ..job_of(Workload::Call, passes) };
        let reports = [
            vec![service(), part(1000, 900_001_000, None), part(1500, 1_000_001_000, None)],
            vec![service(), part(0, 1, percentiles(70)), part(0, 1, percentiles(90))],
        ];
        let run = run_of_calls(&job, &reports);
        assert_eq!((run.figures.seconds, run.figures.calls_per_second), (Some(1.0), Some(10.0)));
        assert_eq!((run.figures.messages_per_second, run.figures.bytes_per_second), (Some(20.0), Some(1280.0)));
        assert_eq!((run.figures.p99_ns, run.figures.round_trip_ns), (Some(90.0), None));
        assert_eq!(run.sides.keys().collect::<Vec<_>>(), ["client-1", "client-2", "service"]);

        // Of calls that come seldom the time between them is none of theirs.
        let calls = Calls { rate: Some(10), ..Calls::default() };
        let passes = vec![Pass { count: 10, time_each: true, ..Pass::default() }];
        let job = Job { calls, delay_us: 0, ..job_of(Workload::Call, passes) };
        let run = run_of_calls(&job, &[vec![service(), part(0, 1_000_000_000, percentiles(90))]]);
        assert_eq!((run.figures.round_trip_ns, run.figures.calls_per_second), (Some(50.0), None));
    }

    #[test]
    fn the_delays_are_taken_off() {
        let job = job_of(Workload::Roundtrip, vec![Pass { count: 10, time_each: true, ..Pass::default() }]);
        let usage = Usage { cpu_seconds: 0.25, voluntary_switches: 10, involuntary_switches: 0 };
        let asker = PassReport { start_ns: 1000, end_ns: 501_000, usage, ..PassReport::default() };
        let answerer = PassReport { usage: Usage { voluntary_switches: 9, ..usage }, ..PassReport::default() };
        let run = run_of(&job, &[vec![asker, answerer]]);
        assert_eq!(run.figures.round_trip_ns, Some(10_000.0));
        assert_eq!(run.figures.sleeps_per_wait, Some(0.9));
        assert_eq!(run.figures.cpu_seconds, Some(0.5));
        assert_eq!(run.figures.messages_per_second, None);
        assert_eq!(run.sides["asker"].sleeps_per_wait, Some(1.0));
    }
}
