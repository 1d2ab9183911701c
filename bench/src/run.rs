//! Runs: fresh processes for each, pinned alike, the systems taking turns.
//!
//! The program starts itself once for each side, with a [`Job`]. A run's deadline is generous. Both sides end when it
//! passes, when one side fails, or when the user interrupts. When this program dies, they end by themselves.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};

use crate::{
    measure::CallCounter,
    parameters::{Job, Launch, Pass, Placement, Role},
    plan::{Choice, Plan, RunOnce},
    quota::Quota,
    record::{Run, run_of_messages},
    report::{Report, SystemReport},
    side::{PassReport, work},
    sides::{Interrupted, Interrupts, Sides},
};

/// A progress bar of so many runs: on a terminal only, and drawn between runs only, since a timer of its own would
/// disturb the measurement. One bar may cover several measurements.
pub fn progress_bar(runs: usize) -> Result<ProgressBar> {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} gone, {eta} left  {msg}")?;
    Ok(ProgressBar::new(runs as u64).with_style(style))
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

/// The receiver's CPU and the sender's; empty if nothing is pinned.
pub fn cpus_of(placement: Option<Placement>) -> Result<Vec<usize>> {
    let Some(placement) = placement.filter(|placement| *placement != Placement::Free) else { return Ok(Vec::new()) };
    Ok(match available_cpus()?[..] {
        [first, ..] if placement == Placement::Together => vec![first; 2],
        [first, second, ..] => vec![first, second],
        _ => {
            eprintln!("note: one CPU only, so that nothing is pinned and the two sides take turns on it");
            Vec::new()
        }
    })
}

/// Measures those systems. The flag is true after an interrupt; the report then has the finished runs. All
/// measurements of a program share `interrupts`, so that a signal between two of them ends the next one.
pub fn measure(plan: &Plan, systems: &[Choice], interrupts: &Interrupts, bar: &ProgressBar) -> Result<(Report, bool)> {
    let cpus = cpus_of(plan.placement)?;
    let count_calls = match CallCounter::start() {
        Ok(_) => true,
        Err(error) => {
            eprintln!("note: system calls are not counted: {error:#}");
            false
        }
    };
    let quota = plan.quota.map(Quota::of).transpose().context("--quota is not possible here")?;
    let _load = Load::start(plan.beside_load);
    let mut report = Report {
        plan: plan.clone(),
        cpus: cpus.clone(),
        systems: systems.iter().map(|choice| SystemReport::new(plan, choice)).collect(),
    };
    let workload = &plan.job.workload;
    let work_steps = plan.work_ns.map(work_steps);
    let mut jobs: Vec<Option<(Job, RunOnce)>> = Vec::new();
    for system in &mut report.systems {
        bar.set_message(format!("{workload}: making {} ready", system.choice));
        let known = system.choice.system;
        let ready =
            known.part(plan.job.kind, workload).and_then(|_| (known.build)(known, plan, system.wait)).map(|program| {
                let mut plan = plan.clone();
                (known.vary)(&mut plan);
                let cgroup = quota.as_ref().map(|quota| quota.path().to_path_buf());
                let launch = Launch { program, process: known.process, cgroup, ..plan.job.launch.clone() };
                let name = if plan.job.system.is_empty() { known.name } else { &plan.job.system };
                let cpu = cpus.first().copied();
                let (system, wait, cpus) = (name.to_string(), system.wait, cpus.clone());
                let job = Job { system, wait, cpu, cpus, work_steps, launch, ..plan.job };
                (job, known.run.unwrap_or(plan.run))
            });
        // An interrupt at a terminal also ends a build. Its failure is then no reason to report, and the next build
        // does not start.
        if interrupts.is_raised() {
            return Ok((report, true));
        }
        jobs.push(match ready {
            Ok(ready) => Some(ready),
            Err(reason) => {
                let reason = format!("{reason:#}");
                bar.suspend(|| eprintln!("note: {} is skipped: {reason}", system.choice));
                system.skipped = Some(reason);
                None
            }
        });
    }
    for number in 0..=plan.runs {
        // Before its first run each system may find its number of messages.
        if number == 0 && plan.seconds.is_none() {
            continue;
        }
        for turn in rotation(systems.len(), number) {
            let system = &mut report.systems[turn];
            bar.set_message(format!("{workload} run {number} of {}: {}", plan.runs, system.choice));
            if let Some((job, run)) = &jobs[turn] {
                let mut counted = Plan { count: system.count, ..plan.clone() };
                (system.choice.system.vary)(&mut counted);
                let passes = counted.passes(system.wait, count_calls, job.launch.process.is_foreign);
                let job = Job { passes, ..job.clone() };
                let once = |job: &Job| run_once(job, *run, interrupts);
                let done = match plan.seconds.filter(|_| number == 0) {
                    Some(seconds) => calibrate(&job, seconds, plan.count, once).map(|count| system.count = count),
                    None => once(&job).map(|run| system.runs.push(run)),
                };
                match done {
                    Ok(()) => {}
                    Err(error) if error.is::<Interrupted>() => return Ok((report, true)),
                    Err(error) => {
                        let reason = if number <= 1 {
                            format!("{error:#}")
                        } else {
                            format!("run {number} of {}: {error:#}", plan.runs)
                        };
                        bar.suspend(|| eprintln!("note: {} is skipped: {reason}", system.choice));
                        system.skipped = Some(reason);
                        system.runs.clear();
                        jobs[turn] = None;
                    }
                }
            }
            bar.inc(u64::from(number > 0));
        }
    }
    Ok((report, false))
}

/// The order of the systems in that run: each run begins with another system, so that none always follows the same one
/// and its after-effects.
fn rotation(systems: usize, run: usize) -> impl Iterator<Item = usize> {
    (0..systems).map(move |turn| (turn + run.saturating_sub(1)) % systems)
}

/// How many messages, or rounds, last about `seconds`, of at most `most`: the runs grow until one lasts a tenth
/// of that.
fn calibrate(job: &Job, seconds: f64, most: u64, mut run: impl FnMut(&Job) -> Result<Run>) -> Result<u64> {
    let least = u64::from(job.senders).max(16);
    let mut count = most.min(5000);
    loop {
        let passes = vec![Pass { count, ..Pass::default() }];
        let figures = run(&Job { passes, ..job.clone() })?.figures;
        // limits.c reports of round trips only the time of one.
        let each = figures.get("round_trip_ns").map(|ns| (ns + 2000.0 * job.delay_us as f64) * 1e-9 * count as f64);
        let took = figures.get("seconds").or(each).context("a run says not how long it took")?.max(1e-6);
        let wanted = |seconds: f64| ((count as f64 * seconds / took) as u64).clamp(least, most);
        if took >= seconds / 10.0 || count >= most {
            return Ok(wanted(seconds));
        }
        // The first messages take longer than those that follow.
        count = wanted(seconds / 3.0).clamp(2 * count, 100 * count).min(most);
    }
}

/// So much work in steps; a short measurement finds how many take so long on this machine.
fn work_steps(ns: u64) -> u64 {
    const MANY: u64 = 1 << 20;
    if ns == 0 {
        return 0;
    }
    let once = |_| {
        let start = Instant::now();
        work(MANY);
        start.elapsed()
    };
    let shortest = (0..10).map(once).min().expect("ten are not none");
    (ns as f64 * 1e-9 / shortest.as_secs_f64() * MANY as f64).max(1.0) as u64
}

/// Longer than any system can need: each makes at least 10,000 messages and 20 MB a second.
pub fn deadline(job: &Job) -> Instant {
    let messages: u64 = job.passes.iter().map(|pass| job.messages(pass.count)).sum();
    // A step of work takes a nanosecond or two, and sixteen threads may share a CPU.
    let work = job.work_steps.iter().sum::<u64>() as f64 * 1e-8;
    let rest = job.calls.rate.map_or(0.0, |rate| 1.0 / rate as f64);
    let seconds = messages as f64 * (1e-4 + job.delay_us as f64 * 1e-6 + rest + work + job.sizes.max as f64 / 20e6);
    // A month stands for no deadline, and an Instant can hold it.
    Instant::now() + Duration::from_secs(60) + Duration::from_secs_f64(seconds.min(30.0 * 86400.0))
}

fn run_once(job: &Job, run: RunOnce, interrupts: &Interrupts) -> Result<Run> {
    let directory = directory(job)?;
    run(&Job { directory: directory.path().to_path_buf(), ..job.clone() }, interrupts)
}

/// A run in which all sides make all passes together, and its figures.
pub fn exchange(job: &Job, interrupts: &Interrupts) -> Result<Run> {
    let (job, reports) = reports(job, interrupts)?;
    Ok(run_of_messages(&job, &reports))
}

/// The reports of a run in which all sides make all passes together: for each pass that makes figures those of all
/// sides, the one of the first CPU first.
pub fn reports(job: &Job, interrupts: &Interrupts) -> Result<(Job, Vec<Vec<PassReport>>)> {
    let process = job.launch.process;
    let mut sides = Sides::new(interrupts, deadline(job));
    for role in if process.is_both { &[Role::Threads] } else { job.launch.roles } {
        if job.idle > 0 {
            // The sides that are not measured connect before those that are; a flooding client floods from then on.
            let beside = match role {
                Role::Sender => Some(Role::Idler),
                Role::Client => Some(Role::Flooder),
                _ => None,
            };
            if let Some(beside) = beside {
                sides.start(job, beside, 0)?;
                sides.expect_word(sides.sides.len() - 1, "ready")?;
            }
        }
        let sides_of_role = match role {
            Role::Sender | Role::Client => job.senders,
            Role::Receiver => job.receivers,
            _ => 1,
        };
        for index in 0..sides_of_role {
            sides.start(job, *role, index)?;
        }
    }
    let measured_sides =
        (0..sides.sides.len()).filter(|side| !matches!(sides.sides[*side].role, Role::Idler | Role::Flooder));
    let reporting: Vec<usize> = measured_sides.collect();
    let (early, late): (Vec<usize>, Vec<usize>) =
        reporting.iter().copied().partition(|side| sides.sides[*side].role.listens());
    let mut reports: Vec<Vec<PassReport>> = Vec::new();
    for pass in &job.passes {
        for side in early.iter().chain(&late) {
            sides.expect_word(*side, "ready")?;
        }
        let counts_from_outside = pass.count_calls && process.is_foreign;
        let counter = counts_from_outside.then(|| CallCounter::of_processes(&sides.pids())).transpose()?;
        for side in &early {
            sides.order_start(*side)?;
        }
        for side in &late {
            sides.order_go(*side)?;
        }
        let report = |side: &usize| sides.report::<PassReport>(*side)?.summed_up();
        let mut pass = reporting.iter().map(report).collect::<Result<Vec<_>>>()?;
        if let Some(counter) = counter {
            // No process can be named for these calls: the first gets all of them.
            pass[0].calls = Some(counter.stop()?);
        }
        // A program that is both sides makes one report.
        let (firsts, others) = pass.split_at(pass.len().min(job.receivers as usize));
        let [first, other] = [firsts, others].map(|sides| sides.iter().map(|side| side.bytes).sum::<u64>());
        let wanted = other * u64::from(job.receivers);
        ensure!(others.is_empty() || first == wanted, "one side says {first} bytes and the other {wanted}");
        reports.push(pass);
    }
    sides.end()?;
    Ok(measured(job.clone(), reports))
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
pub fn directory(job: &Job) -> Result<RunDirectory> {
    let mut builder = tempfile::Builder::new();
    builder.prefix("pelton-bench-");
    if job.launch.process.in_shared_memory
        && let Ok(directory) = builder.tempdir_in("/dev/shm")
    {
        return Ok(RunDirectory(directory));
    }
    let made = builder
        .tempdir_in(&job.directory)
        .with_context(|| format!("making a directory in {}", job.directory.display()))?;
    Ok(RunDirectory(made))
}

/// Removed with everything that is named after it: a killed process leaves shared memory under its own names behind.
pub struct RunDirectory(tempfile::TempDir);

impl RunDirectory {
    /// Its path.
    pub fn path(&self) -> &Path {
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

/// The CPUs that this process may use.
pub fn available_cpus() -> Result<Vec<usize>> {
    let set = rustix::thread::sched_getaffinity(None).context("asking for the CPUs")?;
    Ok((0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        parameters::Wait,
        plan::tests::{job_of, plan},
        record::Figures,
    };

    #[test]
    fn every_system_has_every_position() {
        let orders: Vec<Vec<usize>> = (1..=4).map(|run| rotation(3, run).collect()).collect();
        assert_eq!(orders, [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]);
    }

    #[test]
    fn the_warm_up_makes_no_figure_and_calls_of_an_empty_pass_are_subtracted() {
        let mut busy = plan();
        busy.job.delay_us = 0;
        let passes = busy.passes(Wait::Block, true, true);
        let report = |start_ns, calls| PassReport { start_ns, calls, ..PassReport::default() };
        let both = |start_ns, calls| vec![report(start_ns, calls), report(start_ns, None)];
        let reports = vec![both(1, None), both(2, None), both(3, Some(70)), both(4, Some(2070))];
        let (job, reports) = measured(job_of(&[Role::Asker, Role::Answerer], passes), reports);
        assert_eq!(reports.iter().map(|reports| reports[0].start_ns).collect::<Vec<_>>(), [2, 4]);
        assert_eq!((reports[1][0].calls, reports[1][1].calls), (Some(2000), None));
        assert!(job.passes.iter().all(|pass| !pass.warms_up && pass.count > 0));
    }

    #[test]
    fn each_system_has_as_many_messages_as_last_the_given_seconds() {
        let job = job_of(&[Role::Receiver, Role::Sender], Vec::new());
        // So many a second, and a tenth of a millisecond until it begins.
        let counted = |rate: f64, most: u64| {
            let mut made = Vec::new();
            let count = calibrate(&job, 0.3, most, |job| {
                let count = job.passes[0].count;
                made.push(count);
                let figures = Figures::from([("seconds", Some(1e-4 + count as f64 / rate))]);
                Ok(Run { figures, ..Run::default() })
            });
            (count.unwrap(), made.len())
        };
        for rate in [100e6, 1e6, 30e3, 1e3] {
            let (count, made) = counted(rate, 100_000_000);
            assert!((0.25..0.35).contains(&(count as f64 / rate)), "{count} at {rate}");
            assert!(made <= 5, "{made} runs at {rate}");
        }
        assert_eq!(counted(100e6, 20_000), (20_000, 2), "no more than were allowed");
    }
}
