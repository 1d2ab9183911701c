//! The randomized crash test of pelton. It kills sides at random moments, thousands of times, and checks every
//! promise about crashes.
//!
//! A test is a sequence of scenarios. Each has a channel with a sender and a receiver, each a process (`side`)
//! that works at full speed until the test kills it. Both sides record their steps in journals
//! (`journal`). The test compares one journal with the other and with the rest in the channel (`ledger`). Only its view
//! of a path channel from outside depends on pelton, so sides of any other channel can take part (`--against`). Further
//! scenarios, only for sides of pelton, have many senders and record files (`many_senders`), or a publisher and its
//! subscribers (`broadcast`).
//!
//! `scenario` has the choices of a seed, `processes` the processes as the test uses them, `report` the report.

mod broadcast;
mod broadcast_side;
mod host;
mod journal;
mod ledger;
mod many_senders;
mod many_senders_side;
mod message;
mod observers;
mod plan;
mod processes;
mod report;
mod resources;
mod scenario;
mod side;

use clap::{Parser, Subcommand};
use journal::{DONE, FAILED, Journal, Word};
use ledger::{Fault, FaultKind, JournalEntries, Ledger};
use message::{Random, Sizes, mix};
use observers::{Observed, Observers};
use pelton_cli::{
    failure::{self, Failure},
    progress::Progress,
    signals::Signals,
};
use plan::{Plan, Role, Transport};
use processes::{Host, Pair, Side};
use report::{DetectionTimes, Failed, Report};
use resources::{Resources, growth};
use rustix::time::{ClockId, clock_gettime};
use scenario::{Scenario, Victims, in_turn};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// The test reports a hang after this time without progress while every process runs. Sides of pelton make progress
/// within milliseconds, on a loaded machine within a second or two.
const HANG_TIMEOUT: Duration = Duration::from_secs(60);
/// The same for other channels: their hangs are expected, and each costs this time.
const HANG_TIMEOUT_AGAINST: Duration = Duration::from_secs(4);
/// How long the survivor of another channel may take to detect the death.
const DETECTION_TIMEOUT_AGAINST: Duration = Duration::from_millis(200);
/// Between two polls of the journals.
const POLL_INTERVAL: Duration = Duration::from_micros(200);
/// Faults printed per kind, or one for another channel; all are counted.
const FAULTS_PRINTED: usize = 3;
/// Limit of the median detection time of waiting survivors.
const DETECTION_LIMIT: Duration = Duration::from_millis(10);

/// Kill senders and receivers at random moments; check that nothing is lost, torn, duplicated or left behind
#[derive(Parser)]
#[command(name = "pelton-crash-test", version, args_conflicts_with_subcommands = true, after_help = EXIT_CODES)]
struct CrashTestArgs {
    /// The number of kills [default: 1000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "minutes")]
    kills: Option<u64>,
    /// Run for this number of minutes instead
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    minutes: Option<u64>,
    /// Repeat the scenarios of this seed, but not their timing [default: a random seed]
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Run only this scenario of the seed
    #[arg(long, value_name = "I")]
    scenario: Option<u64>,
    /// Kill the sides of another channel; COMMAND is its program: see verify/controls/README.md
    #[arg(long, value_name = "COMMAND")]
    against: Option<String>,
    /// Observe the channels meanwhile by PROGRAM, the tool `pelton`: its tail, top and ls, which are killed too
    #[arg(long, value_name = "PROGRAM", conflicts_with = "against")]
    observers: Option<String>,
    /// Report one JSON object
    #[arg(long)]
    json: bool,
    #[command(subcommand)]
    process: Option<Process>,
}

/// The processes that the test starts.
#[derive(Subcommand)]
enum Process {
    /// The process that starts the sides
    #[command(hide = true)]
    Host,
    /// A side of a channel
    #[command(hide = true)]
    Side {
        /// The plan, as JSON
        plan: String,
    },
}

const EXIT_CODES: &str = "\
Exit codes:
    0  no fault
    1  faults found
    2  usage, or the program of --against cannot be run
    5  the system failed
  130  interrupted (SIGINT); 143: terminated (SIGTERM)";

fn main() -> ExitCode {
    let args = CrashTestArgs::parse();
    let done = match &args.process {
        None => run(&args),
        Some(Process::Host) => host::host("side").map_err(|error| Failure::system("starting a side", error)),
        Some(Process::Side { plan }) => run_side(plan),
    };
    failure::exit("pelton-crash-test", done)
}

fn run(args: &CrashTestArgs) -> Result<(), Failure> {
    // First: a signal during the set-up leaves no files.
    let signals = Signals::install()?;
    let root = TempDir::with_prefix("pelton-crash-test-")
        .map_err(|error| Failure::system("cannot create a temporary directory", error))?;
    let kills = args.kills.or(if args.minutes.is_some() { None } else { Some(1000) });
    let seed = args.seed.unwrap_or_else(|| mix(std::process::id().into()) ^ monotonic_ns());
    let mut test = CrashTest {
        root,
        host: host_command(args)?,
        is_own: args.against.is_none(),
        signals,
        progress: Progress::after(Duration::ZERO),
        kills_wanted: kills,
        side_files: BTreeSet::new(),
        entries_before: BTreeSet::new(),
        report: Report {
            command: "crash-test",
            against: args.against.clone(),
            seed,
            scenarios: 0,
            kills: 0,
            kills_of_senders: 0,
            kills_of_receivers: 0,
            kills_by_connect: 0,
            kills_by_path: 0,
            kills_while_starting: 0,
            kills_of_many: 0,
            kills_of_broadcasts: 0,
            missed: 0,
            messages: 0,
            messages_in_files: 0,
            bytes: 0,
            redelivered: 0,
            deaths_outlived_most: 0,
            kills_of_observers: 0,
            bytes_observed: 0,
            detected_late: false,
            detection: Vec::new(),
            faults: Vec::new(),
            failures: Vec::new(),
            seconds: 0.0,
        },
        detection_ns: [Vec::new(), Vec::new()],
    };
    test.entries_before = test.temporary_entries();
    let observers = args
        .observers
        .as_ref()
        .map(|program| Observers::start(program, &test.directory(), test.root.path().join("observed"), seed));
    let began = Instant::now();
    let deadline = args.minutes.map(|minutes| began + Duration::from_secs(60 * minutes));
    // Each combination takes part, and the kills are divided among them: a survivor outlives that many deaths.
    let own_combinations = many_senders::Scenario::COMBINATIONS + broadcast::Scenario::COMBINATIONS;
    let combinations = Scenario::COMBINATIONS + if test.is_own { own_combinations } else { 0 };
    let each = kills.map_or(100, |kills| (kills / combinations).clamp(5, 400));
    let is_done = |report: &Report| {
        kills.is_some_and(|kills| report.kills >= kills) || deadline.is_some_and(|deadline| Instant::now() >= deadline)
    };
    let mut index = args.scenario.unwrap_or(0);
    while !is_done(&test.report) {
        let left = kills.map_or(each, |kills| kills - test.report.kills);
        let combination = in_turn(seed, index, combinations);
        let (faults, details) = match combination.checked_sub(Scenario::COMBINATIONS) {
            None => {
                let mut scenario = Scenario::of(seed, index, combination, each.min(left));
                if !test.is_own {
                    scenario.restrict_to_any_channel();
                }
                (test.scenario(&scenario)?, format!("{scenario:?}"))
            }
            Some(other) if other >= many_senders::Scenario::COMBINATIONS => {
                let of_broadcast = other - many_senders::Scenario::COMBINATIONS;
                let scenario = broadcast::Scenario::of(seed, index, of_broadcast, each.min(left));
                (test.broadcast(&scenario)?, format!("{scenario:?}"))
            }
            Some(of_many) => {
                let scenario = many_senders::Scenario::of(seed, index, of_many, each.min(left));
                (test.many_senders(&scenario)?, format!("{scenario:?}"))
            }
        };
        for fault in faults {
            test.record_fault(seed, index, &details, fault, kills);
        }
        test.report.scenarios += 1;
        index += 1;
        if args.scenario.is_some() || test.report.failures.len() >= 100 {
            break;
        }
    }
    test.progress.erase();
    if let Some(observers) = observers {
        let Observed { kills, bytes } = observers.finish()?;
        (test.report.kills_of_observers, test.report.bytes_observed) = (kills, bytes);
    }
    let CrashTest { root, mut report, detection_ns, .. } = test;
    report.seconds = began.elapsed().as_secs_f64();
    report.detection = [(Transport::Connect, &detection_ns[0]), (Transport::Path, &detection_ns[1])]
        .into_iter()
        .filter_map(|(transport, times)| {
            DetectionTimes::of(if args.against.is_some() { None } else { Some(transport) }, times)
        })
        .collect();
    report.detected_late = report.detection.iter().any(|times| times.median_us > DETECTION_LIMIT.as_micros() as f64);
    // Removed before the report is printed, so a reader of the report finds no directory.
    root.close().map_err(|error| Failure::system("removing the temporary directory", error))?;
    report.print(args.json)?;
    let fault_count: u64 = report.faults.iter().map(|(_, count)| count).sum();
    match fault_count {
        0 => Ok(()),
        _ => Err(Failure::Peer(format!("the crash test found {fault_count} faults in {} kills", report.kills))),
    }
}

/// The command that starts sides: this program or another.
fn host_command(args: &CrashTestArgs) -> Result<Vec<String>, Failure> {
    let own = || {
        let program = std::env::current_exe().map_err(|error| Failure::system("finding this program", error))?;
        let program = program.to_str().ok_or_else(|| Failure::System(format!("{program:?} is not UTF-8")))?;
        Ok(vec![program.to_owned(), "host".to_owned()])
    };
    let Some(command) = &args.against else { return own() };
    let words: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
    match words.is_empty() {
        true => Err(Failure::Input("--against needs a program: see verify/controls/README.md".to_owned())),
        false => Ok(words),
    }
}

fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Why a scenario ends early.
enum Stop {
    /// A fault that ends the scenario.
    Fault(Fault),
    /// The test itself fails.
    Test(Failure),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Stop {
        Stop::Test(failure)
    }
}

struct CrashTest {
    root: TempDir,
    host: Vec<String>,
    is_own: bool,
    signals: Signals,
    progress: Progress,
    kills_wanted: Option<u64>,
    /// Files that sides had open outside the directory of the test.
    side_files: BTreeSet<PathBuf>,
    entries_before: BTreeSet<PathBuf>,
    report: Report,
    /// Detection times of waiting survivors, by connect and by path.
    detection_ns: [Vec<u64>; 2],
}

impl CrashTest {
    fn directory(&self) -> PathBuf {
        self.root.path().join("channel")
    }

    /// The entries of the directories in which sides could leave files.
    fn temporary_entries(&self) -> BTreeSet<PathBuf> {
        let all = ["/dev/shm", "/tmp"].into_iter().filter_map(|directory| fs::read_dir(directory).ok()).flatten();
        all.flatten().map(|entry| entry.path()).collect()
    }

    fn record_fault(&mut self, seed: u64, index: u64, details: &str, fault: Fault, kills: Option<u64>) {
        let Fault { kind, count, text } = fault;
        match self.report.faults.iter_mut().find(|(found, _)| *found == kind) {
            Some((_, sum)) => *sum += count,
            None => self.report.faults.push((kind, count)),
        }
        let printed = self.report.failures.iter().filter(|failed| failed.kind == kind).count();
        if printed < if self.is_own { FAULTS_PRINTED } else { 1 } {
            let kills = kills.map(|kills| format!(" --kills {kills}")).unwrap_or_default();
            let again = format!("pelton-crash-test --seed {seed}{kills} --scenario {index}");
            self.progress.erase();
            eprintln!("pelton-crash-test: {}: {text}\n  `{again}`: {details}", kind.label());
        }
        self.report.failures.push(Failed { kind, scenario: index, text });
    }

    /// Runs one scenario; returns its faults.
    fn scenario(&mut self, scenario: &Scenario) -> Result<Vec<Fault>, Failure> {
        self.run_in_directory(scenario.transport, scenario.ends_without_successor, |test, host, _| {
            let mut run = Run { test, scenario, ledger: Ledger::default(), resources: Vec::new(), started: 0 };
            let result = run.run(host);
            let Run { mut ledger, resources, .. } = run;
            ledger.faults.extend(growth(&resources));
            Ok((result, ledger.faults))
        })
    }

    /// Runs one scenario of many senders; returns its faults.
    fn many_senders(&mut self, scenario: &many_senders::Scenario) -> Result<Vec<Fault>, Failure> {
        // Appending threads have no channel.
        let transport = if scenario.job == plan::Job::Append { Transport::Connect } else { scenario.transport };
        let before = self.report.kills;
        let faults = self.run_in_directory(transport, false, |test, host, journals| {
            let mut run = many_senders::Run::new(test, scenario, journals)?;
            let result = run.run(host);
            Ok((result, run.faults))
        })?;
        self.report.kills_of_many += self.report.kills - before;
        Ok(faults)
    }

    /// Runs one scenario of a broadcast; returns its faults.
    fn broadcast(&mut self, scenario: &broadcast::Scenario) -> Result<Vec<Fault>, Failure> {
        let before = self.report.kills;
        // It removes a directory itself.
        let faults = self.run_in_directory(Transport::Connect, false, |test, host, _| {
            let mut run = broadcast::Run::new(test, scenario);
            let result = run.run(host);
            Ok((result, run.faults))
        })?;
        self.report.kills_of_broadcasts += self.report.kills - before;
        Ok(faults)
    }

    /// Creates the directories and the host of a scenario, and runs it. If it ended in order, checks that no file is
    /// left.
    fn run_in_directory(
        &mut self,
        transport: Transport,
        ends_without_successor: bool,
        run: impl FnOnce(&mut CrashTest, &mut Host, &Path) -> Result<(Result<(), Stop>, Vec<Fault>), Failure>,
    ) -> Result<Vec<Fault>, Failure> {
        let (directory, journals) = (self.directory(), self.root.path().join("journals"));
        let created = fs::create_dir(&directory).and_then(|()| fs::create_dir(&journals));
        created.map_err(|error| Failure::system("cannot create a temporary directory", error))?;
        let mut host = Host::start(&self.host, &directory)?;
        let (result, mut faults) = run(self, &mut host, &journals)?;
        host.close();
        match result {
            Ok(()) => faults.extend(self.left_behind(transport, ends_without_successor)),
            Err(Stop::Fault(fault)) => faults.push(fault),
            Err(Stop::Test(failure)) => return Err(failure),
        }
        let removed = fs::remove_dir_all(&directory).and_then(|()| fs::remove_dir_all(&journals));
        removed.map_err(|error| Failure::system("removing a scenario's directory", error))?;
        Ok(faults)
    }

    /// After a scenario that ended in order: its directory must be empty, and no file may be anywhere else.
    fn left_behind(&mut self, transport: Transport, ends_without_successor: bool) -> Vec<Fault> {
        let directory = self.directory();
        let mut faults = Vec::new();
        if self.is_own && transport == Transport::Path {
            let channel = directory.join("c");
            match pelton::inspect::check(&channel, false) {
                Ok(lanes) if lanes.iter().all(|lane| lane.is_whole() && lane.kept == 0) => {}
                found => faults.push(Fault::new(FaultKind::Miscounted, 1, format_args!("at the end: {found:?}"))),
            }
            faults.extend(remove_channel(&channel));
        }
        if self.is_own && transport == Transport::Connect && ends_without_successor {
            // The next listener removes the socket of a killed one.
            let name = format!("unix:{}", directory.join("s").display());
            if let Err(error) = pelton::Listener::bind(&name) {
                faults.push(Fault::new(
                    FaultKind::LeftBehind,
                    1,
                    format_args!("{name} cannot be bound again: {error}"),
                ));
            }
        }
        let left = fs::read_dir(&directory).into_iter().flatten().flatten().map(|entry| entry.path());
        let own = self.root.path();
        let is_new =
            |path: &&PathBuf| !path.ancestors().any(|above| above == own || self.entries_before.contains(above));
        let elsewhere = self.side_files.iter().filter(is_new);
        let left: Vec<PathBuf> = left.chain(elsewhere.filter(|path| path.exists()).cloned()).collect();
        if !left.is_empty() {
            faults.push(Fault::new(FaultKind::LeftBehind, left.len() as u64, format_args!("left behind: {left:?}")));
        }
        self.side_files.clear();
        faults
    }
}

/// Removes a channel in a directory. A fault if that fails.
fn remove_channel(channel: &Path) -> Option<Fault> {
    // The next creator of the channel removes files of a killed one.
    let remove = || pelton::inspect::remove(channel);
    let again = || pelton::Options::new().capacity(1 << 16).create_sender(channel).and_then(pelton::Sender::close);
    let removed = remove().and_then(|()| again()).and_then(|()| remove());
    let error = removed.err()?;
    Some(Fault::new(FaultKind::LeftBehind, 1, format_args!("the channel cannot be removed: {error}")))
}

/// During a wait: when it began, and when a journal last changed.
struct ProgressWatch {
    began: Instant,
    last_progress: Instant,
    fingerprints: Vec<Vec<u64>>,
}

impl CrashTest {
    fn watch_progress(&self, sides: &[&Side]) -> ProgressWatch {
        ProgressWatch { began: Instant::now(), last_progress: Instant::now(), fingerprints: fingerprints(sides) }
    }

    /// One step of a wait. Fails if nothing progresses, and if a side has failed.
    fn wait_step(
        &self,
        watch: &mut ProgressWatch,
        sides: &[&Side],
        what: &str,
        transport: Transport,
    ) -> Result<(), Stop> {
        let most = if self.is_own { HANG_TIMEOUT } else { HANG_TIMEOUT_AGAINST };
        self.signals.check()?;
        for side in sides {
            self.check_side(side)?;
        }
        std::thread::sleep(POLL_INTERVAL);
        let now = fingerprints(sides);
        if now != watch.fingerprints {
            *watch = ProgressWatch { last_progress: Instant::now(), fingerprints: now, ..*watch };
        }
        // Other sides may progress while the awaited event does not happen.
        if watch.last_progress.elapsed() > most || watch.began.elapsed() > 3 * most {
            return Err(Stop::Fault(Fault::new(FaultKind::Hang, 1, self.hang(sides, what, transport, most))));
        }
        Ok(())
    }

    fn check_side(&self, side: &Side) -> Result<(), Stop> {
        let failed = |text: String| Err(Stop::Fault(Fault::new(FaultKind::Failed, 1, text)));
        // Before its state is read: a side that ends stores its state first.
        let has_ended = !side.is_killed.get() && side.is_dead(Duration::ZERO);
        match side.get(Word::State) {
            FAILED => failed(format!("the {:?} side: {}", side.plan.role, side.journal.text())),
            _ if side.get(Word::Garbage) > 0 && !self.is_own => {
                let count = side.get(Word::Garbage);
                Err(Stop::Fault(Fault::new(FaultKind::Garbage, count, side.journal.text())))
            }
            state if has_ended && state != DONE => {
                failed(format!("the {:?} side ended by itself: {}", side.plan.role, side.journal.words()))
            }
            _ => Ok(()),
        }
    }

    fn hang(&self, sides: &[&Side], what: &str, transport: Transport, timeout: Duration) -> String {
        let mut text = format!(
            "no progress for {} s, or none towards the event for three times that, while waiting for: {what}\n",
            timeout.as_secs()
        );
        for side in sides {
            text += &side.describe();
        }
        if self.is_own && transport == Transport::Path {
            let channel = self.directory().join("c");
            match (pelton::inspect::info(&channel), pelton::inspect::broadcast(&channel)) {
                (Ok(info), _) => text += &format!("{info:#?}\n"),
                (_, Ok(info)) => text += &format!("{info:#?}\n"),
                (Err(error), _) => text += &error.to_string(),
            }
        }
        text
    }

    fn count(&mut self, victim: &Side) {
        let report = &mut self.report;
        report.kills += 1;
        match victim.plan.role {
            Role::Send => report.kills_of_senders += 1,
            Role::Receive => report.kills_of_receivers += 1,
        }
        match victim.plan.transport {
            Transport::Connect => report.kills_by_connect += 1,
            Transport::Path => report.kills_by_path += 1,
        }
        report.kills_while_starting += u64::from(!victim.is_ready());
        let (kills, wanted) = (report.kills, self.kills_wanted);
        self.progress.update(|seconds| match wanted {
            Some(wanted) => format!("{kills} of {wanted} kills, {seconds:.0} s"),
            None => format!("{kills} kills, {seconds:.0} s"),
        });
        self.tally(victim);
    }

    /// Adds the figures of a side that has ended.
    fn tally(&mut self, side: &Side) {
        let report = &mut self.report;
        report.redelivered += side.get(Word::Redelivered);
        if side.plan.role == Role::Receive {
            report.messages += side.get(Word::Messages);
            report.bytes += side.get(Word::Bytes);
            report.missed += side.get(Word::Missed);
        }
    }
}

fn fingerprints(sides: &[&Side]) -> Vec<Vec<u64>> {
    sides.iter().map(|side| side.journal.fingerprint()).collect()
}

/// A running scenario.
struct Run<'a> {
    test: &'a mut CrashTest,
    scenario: &'a Scenario,
    ledger: Ledger,
    resources: Vec<Resources>,
    /// Number of sides started so far.
    started: u64,
}

impl Run<'_> {
    fn run(&mut self, host: &mut Host) -> Result<(), Stop> {
        let scenario = self.scenario;
        let mut random = Random::new(scenario.seed ^ mix(scenario.index ^ 0x7075));
        let mut pair = Pair { sender: self.start(host, Role::Send)?, receiver: self.start(host, Role::Receive)? };
        for kill in 1..=scenario.kills {
            self.test.signals.check()?;
            let (sender_dies, receiver_dies) = match scenario.victims {
                Victims::Sender => (true, false),
                Victims::Receiver => (false, true),
                Victims::Either if random.one_in(2) => (true, false),
                Victims::Either => (false, true),
                Victims::Both => (true, true),
            };
            // Some victims die while they start, most while they work.
            let is_last = kill == scenario.kills;
            if self.test.is_own && random.one_in(4) && !(is_last && scenario.ends_without_successor) {
                std::thread::sleep(Duration::from_micros(random.below(3000)));
            } else {
                self.wait(&pair, "both sides to connect", |pair| pair.sides().iter().all(|side| side.is_connected()))?;
                std::thread::sleep(
                    Duration::from_micros(20 << random.below(9)) + Duration::from_micros(random.below(100)),
                );
                self.record_resources(&pair, sender_dies, receiver_dies);
            }
            if sender_dies && receiver_dies {
                self.kill_both(&pair, random.one_in(2));
            } else {
                let await_detection = random.one_in(2) || (is_last && scenario.ends_without_successor);
                self.kill_one(&pair, sender_dies, await_detection)?;
            }
            if is_last && scenario.ends_without_successor {
                return self.end_without_successor(&pair, sender_dies);
            }
            // The successors replace the old sides; the drop of a dead one has no effect.
            if receiver_dies {
                pair.receiver = self.start(host, Role::Receive)?;
            }
            if sender_dies {
                pair.sender = self.start(host, Role::Send)?;
            }
        }
        self.end(&pair)
    }

    fn start(&mut self, host: &mut Host, role: Role) -> Result<Side, Failure> {
        let scenario = self.scenario;
        self.started += 1;
        let is_sender = role == Role::Send;
        let (pause_every, pause_us) = if is_sender { scenario.sender_pause } else { scenario.receiver_pause };
        let journal = self.test.root.path().join("journals").join(self.started.to_string());
        let sizes = Sizes {
            seed: mix(scenario.seed ^ scenario.index) >> 1,
            bytes_min: scenario.bytes_min,
            bytes_max: scenario.bytes_max,
        };
        host.side(Plan {
            role,
            directory: self.test.directory(),
            journal,
            sizes,
            capacity: scenario.capacity,
            pause_every,
            pause_us,
            next: self.ledger.next(),
            choices_seed: mix(scenario.seed ^ scenario.index ^ self.started << 32) >> 1,
            transport: scenario.transport,
            listens: is_sender == scenario.sender_listens,
            wait_mode: if is_sender { scenario.sender_wait_mode } else { scenario.receiver_wait_mode },
            delivered: self.ledger.delivered(),
            many_senders: None,
            broadcast: None,
        })
    }

    /// Waits for a condition. Fails if nothing progresses, and if a side has failed.
    fn wait(&self, pair: &Pair, what: &str, is_so: impl Fn(&Pair) -> bool) -> Result<(), Stop> {
        let mut watch = self.test.watch_progress(&pair.sides());
        while !is_so(pair) {
            self.test.wait_step(&mut watch, &pair.sides(), what, self.scenario.transport)?;
        }
        Ok(())
    }

    fn record_resources(&mut self, pair: &Pair, sender_dies: bool, receiver_dies: bool) {
        for side in pair.sides() {
            self.test.side_files.extend(side.files());
        }
        match (sender_dies, receiver_dies) {
            // Only a side that outlives every death can show growth.
            _ if self.scenario.victims == Victims::Either => {}
            (true, false) => self.resources.push(pair.receiver.resources()),
            (false, true) => self.resources.push(pair.sender.resources()),
            _ => {}
        }
        self.test.report.deaths_outlived_most =
            self.test.report.deaths_outlived_most.max(self.resources.len().saturating_sub(1) as u64);
    }

    /// Adds the journal of a side that has ended to the ledger.
    fn record_end(&mut self, side: &Side, sender: &Side) {
        let entries = JournalEntries::of(&side.journal);
        match side.plan.role {
            Role::Send => self.ledger.sender_ended(&entries, self.test.is_own),
            Role::Receive => {
                let sent_most = sender.get(Word::Pending).max(self.ledger.next() - 1);
                self.ledger.receiver_ended(&entries, sent_most);
            }
        }
        // Still mapped where needed.
        let _ = fs::remove_file(&side.plan.journal);
    }

    fn kill_one(&mut self, pair: &Pair, sender_dies: bool, await_detection: bool) -> Result<(), Stop> {
        let (victim, survivor) =
            if sender_dies { (&pair.sender, &pair.receiver) } else { (&pair.receiver, &pair.sender) };
        let (detections, was_connected, was_ready) =
            (survivor.get(Word::Detections), survivor.is_connected(), victim.is_ready());
        self.test.check_side(victim)?;
        let was_waiting = survivor.get(Word::Waiting) == 1;
        let killed_ns = monotonic_ns();
        victim.kill();
        victim.await_death();
        self.test.count(victim);
        self.record_end(victim, &pair.sender);
        let has_detected = |pair: &Pair| {
            let survivor = if sender_dies { &pair.receiver } else { &pair.sender };
            survivor.get(Word::Detections) > detections
        };
        if !self.test.is_own {
            let deadline = Instant::now() + DETECTION_TIMEOUT_AGAINST;
            while await_detection && !has_detected(pair) && Instant::now() < deadline {
                std::thread::sleep(POLL_INTERVAL);
            }
            if await_detection && !has_detected(pair) {
                self.ledger.faults.push(Fault::new(
                    FaultKind::DeathUndetected,
                    1,
                    "the survivor did not detect the death",
                ));
            }
        } else if self.scenario.transport == Transport::Connect && await_detection {
            // Also for a survivor in its handshake: it has connected, and detects the death, or it has not.
            self.wait(pair, "the survivor to detect the death", |pair| {
                let survivor = if sender_dies { &pair.receiver } else { &pair.sender };
                !survivor.is_connected()
            })?;
        } else if await_detection && was_ready && was_connected {
            // A survivor that opened the channel after the death detects none.
            self.wait(pair, "the survivor to detect the death", has_detected)?;
        }
        if !has_detected(pair) {
            return Ok(());
        }
        if was_waiting && was_connected {
            let transport = usize::from(self.scenario.transport == Transport::Path);
            self.test.detection_ns[transport].push(survivor.get(Word::DetectedNs).saturating_sub(killed_ns));
        }
        if await_detection && self.test.is_own {
            let (unreleased, counted) = (survivor.get(Word::ReportedUnreleased), survivor.get(Word::CountAtDetection));
            if sender_dies {
                // A receiver has received everything, and only the messages it holds are unreleased.
                if unreleased != counted {
                    let text = format!("a receiver that holds {counted} messages reports {unreleased} unreleased");
                    self.ledger.faults.push(Fault::new(FaultKind::Miscounted, 1, text));
                }
                self.ledger.check_all_taken(survivor.get(Word::Taken));
            } else {
                self.ledger.check_unreleased(unreleased, counted);
            }
        }
        Ok(())
    }

    fn kill_both(&mut self, pair: &Pair, sender_first: bool) {
        let (first, second) =
            if sender_first { (&pair.sender, &pair.receiver) } else { (&pair.receiver, &pair.sender) };
        first.kill();
        second.kill();
        first.await_death();
        second.await_death();
        for side in pair.sides() {
            self.test.count(side);
            self.record_end(side, &pair.sender);
        }
        let channel = self.test.directory().join("c");
        // Both may have died before the channel existed.
        if self.test.is_own && channel.exists() {
            match pelton::inspect::check(&channel, false) {
                Ok(lanes) if lanes.len() == 1 && lanes[0].is_whole() => self.ledger.check_waiting(lanes[0].kept),
                found => {
                    let text = format!("both sides are dead, and the channel is damaged: {found:?}");
                    self.ledger.faults.push(Fault::new(FaultKind::Garbage, 1, text));
                }
            }
        }
    }

    /// Ends a survivor without a successor for its peer.
    fn end_without_successor(&mut self, pair: &Pair, sender_died: bool) -> Result<(), Stop> {
        let survivor = if sender_died { &pair.receiver } else { &pair.sender };
        survivor.journal.set(Word::Stop, 1);
        self.wait(pair, "the survivor to end", |pair| {
            let survivor = if sender_died { &pair.receiver } else { &pair.sender };
            survivor.get(Word::State) == DONE
        })?;
        self.test.tally(survivor);
        self.record_end(survivor, &pair.sender);
        Ok(())
    }

    /// Ends the sender in order, and the receiver after the last message.
    fn end(&mut self, pair: &Pair) -> Result<(), Stop> {
        self.wait(pair, "both sides to connect", |pair| pair.sides().iter().all(|side| side.is_connected()))?;
        pair.sender.journal.set(Word::Stop, 1);
        self.wait(pair, "the sender to end", |pair| pair.sender.get(Word::State) == DONE)?;
        pair.receiver.journal.set(Word::Stop, pair.sender.get(Word::Done) + 1);
        self.wait(pair, "the receiver to end", |pair| pair.receiver.get(Word::State) == DONE)?;
        for side in pair.sides() {
            self.test.tally(side);
            self.record_end(side, &pair.sender);
            side.await_death();
        }
        self.ledger.closed();
        Ok(())
    }
}
/// Runs a side to its end; an error goes to the journal.
fn run_side(plan: &str) -> Result<(), Failure> {
    let plan: Plan = serde_json::from_str(plan).map_err(|error| Failure::Input(error.to_string()))?;
    // The kernel kills a side when its host dies.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|error| Failure::system("prctl", error))?;
    let journal = Journal::open(&plan.journal).map_err(|error| Failure::system("opening the journal", error))?;
    let done = match (&plan.many_senders, &plan.broadcast) {
        (Some(part), _) => many_senders_side::run(&plan, part, &journal),
        (_, Some(part)) => broadcast_side::run(&plan, part, &journal),
        (None, None) => side::run(&plan, &journal),
    };
    if let Err(error) = &done {
        journal.explain(&error.to_string());
    }
    journal.set(Word::State, if done.is_ok() { DONE } else { FAILED });
    Ok(())
}
