//! `pelton torture`: sides are killed at random moments, by the thousand, and everything that is promised of that is checked.
//!
//! A storm is a row of scenarios, each a channel with a sender and a receiver in processes of their own (`side`) that send and
//! receive as fast as they may until they are killed, again and again. What they did stands in their journals (`journal`); the
//! storm compares what one side says with what the other says and with what is left (`ledger`). It knows nothing of pelton but
//! where it looks at a path channel from outside: sides of any other channel go through the same (`--against`). Pelton's own go
//! through others besides, of many senders and of record files (`crowd`). What a seed decides is in `scenario`, the processes as the storm
//! has them in `processes`, what is said at the end in `report`.

mod crowd;
mod crowd_side;
mod holdings;
mod host;
mod journal;
mod ledger;
mod message;
mod processes;
mod report;
mod scenario;
pub mod side;

use crate::{failure::Failure, inspect, progress, signals::Signals};
use clap::Args;
use holdings::{Holdings, grown};
use indicatif::ProgressBar;
use journal::{DONE, FAILED, Word};
use ledger::{Fault, Kind, Ledger, Notes};
use message::{Dice, Sizes, mix};
use processes::{Host, Pair, Side};
use report::{Failed, Report, Told};
use rustix::time::{ClockId, clock_gettime};
use scenario::{Scenario, Victims, in_turn};
use side::{By, Plan, Role};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// Without any progress for so long, with every process running, it is a hang. Pelton's sides make progress within milliseconds,
/// on a loaded machine within a second or two.
const PATIENCE: Duration = Duration::from_secs(60);
/// The same for other channels, whose hangs are no news and are waited for each time.
const PATIENCE_AGAINST: Duration = Duration::from_secs(4);
/// How long the survivor of another channel may take to say that it was told.
const TELLING_AGAINST: Duration = Duration::from_millis(200);
/// Between two looks at the journals.
const LOOK: Duration = Duration::from_micros(200);
/// So many faults of a kind are told in words, and one if they are no news; all are counted.
const FAULTS_TOLD: usize = 3;
/// So soon a survivor that waits is to be told, by the middle one of all times.
const TOLD_WITHIN: Duration = Duration::from_millis(10);

/// Options of `pelton torture`.
#[derive(Args)]
pub struct TortureArgs {
    /// How many kills [default: 1000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "minutes")]
    kills: Option<u64>,
    /// Go on for so long instead
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    minutes: Option<u64>,
    /// Repeat the scenarios of this seed (not their timing) [default: another each time]
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Only this scenario of them
    #[arg(long, value_name = "I")]
    scenario: Option<u64>,
    /// Kill the sides of another channel, whose program this is: see verify/controls/README.md
    #[arg(long, value_name = "COMMAND")]
    against: Option<String>,
    /// Report as one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs `pelton torture`.
pub fn run(args: &TortureArgs) -> Result<(), Failure> {
    // Before there is anything that a signal could leave behind.
    let signals = Signals::install()?;
    let root = TempDir::with_prefix("pelton-torture-")
        .map_err(|error| Failure::system("cannot make a temporary directory", error))?;
    let kills = args.kills.or(if args.minutes.is_some() { None } else { Some(1000) });
    let seed = args.seed.unwrap_or_else(|| mix(std::process::id().into()) ^ monotonic_ns());
    let mut storm = Storm {
        root,
        host: host_command(args)?,
        is_own: args.against.is_none(),
        signals,
        bar: progress::count(kills, "kills"),
        seen: BTreeSet::new(),
        before: BTreeSet::new(),
        report: Report {
            command: "torture",
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
            messages: 0,
            messages_in_files: 0,
            bytes: 0,
            redelivered: 0,
            deaths_outlived_most: 0,
            told_late: false,
            told: Vec::new(),
            faults: Vec::new(),
            failures: Vec::new(),
            seconds: 0.0,
        },
        told_ns: [Vec::new(), Vec::new()],
    };
    storm.before = storm.strangers();
    let began = Instant::now();
    let deadline = args.minutes.map(|minutes| began + Duration::from_secs(60 * minutes));
    // Every combination has its turn, and a survivor lives through as many deaths as that leaves to it.
    let combinations = Scenario::COMBINATIONS + if storm.is_own { crowd::Scenario::COMBINATIONS } else { 0 };
    let each = kills.map_or(100, |kills| (kills / combinations).clamp(5, 400));
    let is_over = |report: &Report| {
        kills.is_some_and(|kills| report.kills >= kills) || deadline.is_some_and(|deadline| Instant::now() >= deadline)
    };
    let mut index = args.scenario.unwrap_or(0);
    while !is_over(&storm.report) {
        let left = kills.map_or(each, |kills| kills - storm.report.kills);
        let combination = in_turn(seed, index, combinations);
        let (faults, words) = match combination.checked_sub(Scenario::COMBINATIONS) {
            None => {
                let mut scenario = Scenario::of(seed, index, combination, each.min(left));
                if !storm.is_own {
                    scenario.against();
                }
                (storm.scenario(&scenario)?, format!("{scenario:?}"))
            }
            Some(of_many) => {
                let scenario = crowd::Scenario::of(seed, index, of_many, each.min(left));
                (storm.crowd(&scenario)?, format!("{scenario:?}"))
            }
        };
        for fault in faults {
            storm.note(seed, index, &words, fault, kills);
        }
        storm.report.scenarios += 1;
        index += 1;
        if args.scenario.is_some() || storm.report.failures.len() >= 100 {
            break;
        }
    }
    storm.bar.finish_and_clear();
    let Storm { root, mut report, told_ns, .. } = storm;
    report.seconds = began.elapsed().as_secs_f64();
    report.told = [(By::Connect, &told_ns[0]), (By::Path, &told_ns[1])]
        .into_iter()
        .filter_map(|(by, times)| Told::of(if args.against.is_some() { None } else { Some(by) }, times))
        .collect();
    report.told_late = report.told.iter().any(|told| told.median_us > TOLD_WITHIN.as_micros() as f64);
    // Gone before anything is said: whoever reads the report finds nothing left behind.
    root.close().map_err(|error| Failure::system("removing the temporary directory", error))?;
    report.print(args.json)?;
    let wrong: u64 = report.faults.iter().map(|(_, count)| count).sum();
    match wrong {
        0 => Ok(()),
        _ => Err(Failure::Peer(format!("the storm found {wrong} faults in {} kills", report.kills))),
    }
}

/// Runs the process that starts pelton's sides.
pub fn run_host() -> Result<(), Failure> {
    host::host("torture-side").map_err(|error| Failure::system("starting a side", error))
}

/// The program that starts sides, this one or another.
fn host_command(args: &TortureArgs) -> Result<Vec<String>, Failure> {
    let own = || {
        let program = std::env::current_exe().map_err(|error| Failure::system("finding this program", error))?;
        let program = program.to_str().ok_or_else(|| Failure::System(format!("{program:?} is not UTF-8")))?;
        Ok(vec![program.to_owned(), "torture-host".to_owned()])
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

/// Why a scenario cannot go on: a fault that ends it, or that the storm cannot go on either.
enum Stop {
    Fault(Fault),
    Storm(Failure),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Stop {
        Stop::Storm(failure)
    }
}

struct Storm {
    root: TempDir,
    host: Vec<String>,
    is_own: bool,
    signals: Signals,
    bar: ProgressBar,
    /// Files that sides had, outside the storm's directory.
    seen: BTreeSet<PathBuf>,
    before: BTreeSet<PathBuf>,
    report: Report,
    /// From the kill to the moment that a survivor that waited was told, by connect and by path.
    told_ns: [Vec<u64>; 2],
}

impl Storm {
    fn place(&self) -> PathBuf {
        self.root.path().join("place")
    }

    /// What stands in the directories that sides could leave something in besides their own.
    fn strangers(&self) -> BTreeSet<PathBuf> {
        let all = ["/dev/shm", "/tmp"].into_iter().filter_map(|directory| fs::read_dir(directory).ok()).flatten();
        all.flatten().map(|entry| entry.path()).collect()
    }

    fn note(&mut self, seed: u64, index: u64, words: &str, fault: Fault, kills: Option<u64>) {
        let Fault { kind, count, text } = fault;
        match self.report.faults.iter_mut().find(|(found, _)| *found == kind) {
            Some((_, sum)) => *sum += count,
            None => self.report.faults.push((kind, count)),
        }
        let told = self.report.failures.iter().filter(|failed| failed.kind == kind).count();
        if told < if self.is_own { FAULTS_TOLD } else { 1 } {
            let kills = kills.map(|kills| format!(" --kills {kills}")).unwrap_or_default();
            let again = format!("pelton torture --seed {seed}{kills} --scenario {index}");
            self.bar.suspend(|| eprintln!("pelton: {}: {text}\n  `{again}`: {words}", kind.words()));
        }
        self.report.failures.push(Failed { kind, scenario: index, text });
    }

    /// Runs one; what is wrong is answered.
    fn scenario(&mut self, scenario: &Scenario) -> Result<Vec<Fault>, Failure> {
        self.staged(scenario.by, scenario.ends_alone, |storm, host, _| {
            let mut run = Run { storm, scenario, ledger: Ledger::default(), holdings: Vec::new(), started: 0 };
            let went = run.run(host);
            let Run { mut ledger, holdings, .. } = run;
            ledger.faults.extend(grown(&holdings));
            Ok((went, ledger.faults))
        })
    }

    /// Runs one of many senders.
    fn crowd(&mut self, scenario: &crowd::Scenario) -> Result<Vec<Fault>, Failure> {
        // Who appends has no channel.
        let by = if scenario.job == crowd_side::Job::Append { By::Connect } else { scenario.by };
        let before = self.report.kills;
        let faults = self.staged(by, false, |storm, host, journals| {
            let mut run = crowd::Run::new(storm, scenario, journals)?;
            let went = run.run(host);
            Ok((went, run.faults))
        })?;
        self.report.kills_of_many += self.report.kills - before;
        Ok(faults)
    }

    /// Makes a scenario's directories, and its host; and looks, when it has ended in order, that nothing is left.
    fn staged(
        &mut self,
        by: By,
        ends_alone: bool,
        run: impl FnOnce(&mut Storm, &mut Host, &Path) -> Result<(Result<(), Stop>, Vec<Fault>), Failure>,
    ) -> Result<Vec<Fault>, Failure> {
        let (place, journals) = (self.place(), self.root.path().join("journals"));
        let made = fs::create_dir(&place).and_then(|()| fs::create_dir(&journals));
        made.map_err(|error| Failure::system("cannot make a temporary directory", error))?;
        let mut host = Host::start(&self.host, &place)?;
        let (went, mut faults) = run(self, &mut host, &journals)?;
        host.close();
        match went {
            Ok(()) => faults.extend(self.left_behind(by, ends_alone)),
            Err(Stop::Fault(fault)) => faults.push(fault),
            Err(Stop::Storm(failure)) => return Err(failure),
        }
        let removed = fs::remove_dir_all(&place).and_then(|()| fs::remove_dir_all(&journals));
        removed.map_err(|error| Failure::system("removing a scenario's directory", error))?;
        Ok(faults)
    }

    /// After a scenario that ended in order: its place is to be empty, and nothing is to be anywhere else.
    fn left_behind(&mut self, by: By, ends_alone: bool) -> Vec<Fault> {
        let place = self.place();
        let mut faults = Vec::new();
        if self.is_own && by == By::Path {
            let channel = place.join("c");
            match pelton::inspect::check(&channel, false) {
                Ok(lanes) if lanes.iter().all(|lane| lane.is_whole() && lane.kept == 0) => {}
                found => faults.push(Fault::new(Kind::Miscounted, 1, format_args!("at the end: {found:?}"))),
            }
            // What a maker that was killed left aside is the next maker's to remove.
            let remove = || pelton::inspect::remove(&channel);
            let again =
                || pelton::Options::new().capacity(1 << 16).create_sender(&channel).and_then(pelton::Sender::close);
            if let Err(error) = remove().and_then(|()| again()).and_then(|()| remove()) {
                faults.push(Fault::new(Kind::LeftBehind, 1, format_args!("the channel cannot be removed: {error}")));
            }
        }
        if self.is_own && by == By::Connect && ends_alone {
            // The socket of a listener that was killed is the next listener's to remove.
            let name = format!("unix:{}", place.join("s").display());
            if let Err(error) = pelton::Listener::bind(&name) {
                faults.push(Fault::new(Kind::LeftBehind, 1, format_args!("{name} cannot be bound again: {error}")));
            }
        }
        let left = fs::read_dir(&place).into_iter().flatten().flatten().map(|entry| entry.path());
        let own = self.root.path();
        let is_new = |path: &&PathBuf| !path.ancestors().any(|above| above == own || self.before.contains(above));
        let elsewhere = self.seen.iter().filter(is_new);
        let left: Vec<PathBuf> = left.chain(elsewhere.filter(|path| path.exists()).cloned()).collect();
        if !left.is_empty() {
            faults.push(Fault::new(Kind::LeftBehind, left.len() as u64, format_args!("left behind: {left:?}")));
        }
        self.seen.clear();
        faults
    }
}

/// While something is waited for: since when, and when any side moved last.
struct Patience {
    began: Instant,
    moved: Instant,
    prints: Vec<Vec<u64>>,
}

impl Storm {
    fn patience(&self, sides: &[&Side]) -> Patience {
        Patience { began: Instant::now(), moved: Instant::now(), prints: prints(sides) }
    }

    /// A moment, of a wait for something that is not so. Fails when nothing moves any more, and when a side fails that should not.
    fn wait_on(&self, patience: &mut Patience, sides: &[&Side], what: &str, by: By) -> Result<(), Stop> {
        let most = if self.is_own { PATIENCE } else { PATIENCE_AGAINST };
        self.signals.check()?;
        for side in sides {
            self.look_whether_failed(side)?;
        }
        std::thread::sleep(LOOK);
        let now = prints(sides);
        if now != patience.prints {
            *patience = Patience { moved: Instant::now(), prints: now, ..*patience };
        }
        // Others may move while what is waited for does not come.
        if patience.moved.elapsed() > most || patience.began.elapsed() > 3 * most {
            return Err(Stop::Fault(Fault::new(Kind::Hang, 1, self.hang(sides, what, by, most))));
        }
        Ok(())
    }

    fn look_whether_failed(&self, side: &Side) -> Result<(), Stop> {
        let failed = |text: String| Err(Stop::Fault(Fault::new(Kind::Failed, 1, text)));
        // Before its state: one that is done says so first.
        let has_ended = !side.is_killed.get() && side.is_dead(Duration::ZERO);
        match side.get(Word::State) {
            FAILED => failed(format!("the {:?} side: {}", side.plan.role, side.journal.text())),
            _ if side.get(Word::Garbage) > 0 && !self.is_own => {
                let count = side.get(Word::Garbage);
                Err(Stop::Fault(Fault::new(Kind::Garbage, count, side.journal.text())))
            }
            state if has_ended && state != DONE => {
                failed(format!("the {:?} side ended by itself: {}", side.plan.role, side.journal.words()))
            }
            _ => Ok(()),
        }
    }

    fn hang(&self, sides: &[&Side], what: &str, by: By, patience: Duration) -> String {
        let mut text = format!(
            "for {} s, or three times that in all, nothing moved that is waited for: {what}\n",
            patience.as_secs()
        );
        for side in sides {
            text += &side.describe();
        }
        if self.is_own && by == By::Path {
            match pelton::inspect::info(self.place().join("c")) {
                Ok(info) => text += &inspect::text_of(&info),
                Err(error) => text += &error.to_string(),
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
        match victim.plan.by {
            By::Connect => report.kills_by_connect += 1,
            By::Path => report.kills_by_path += 1,
        }
        report.kills_while_starting += u64::from(!victim.is_ready());
        self.bar.set_position(report.kills);
        self.tally(victim);
    }

    /// A side that has ended: its figures.
    fn tally(&mut self, side: &Side) {
        let report = &mut self.report;
        report.redelivered += side.get(Word::Again);
        if side.plan.role == Role::Receive {
            report.messages += side.get(Word::Messages);
            report.bytes += side.get(Word::Bytes);
        }
    }
}

fn prints(sides: &[&Side]) -> Vec<Vec<u64>> {
    sides.iter().map(|side| side.journal.fingerprint()).collect()
}

/// One scenario on its way.
struct Run<'a> {
    storm: &'a mut Storm,
    scenario: &'a Scenario,
    ledger: Ledger,
    holdings: Vec<Holdings>,
    /// Sides started so far.
    started: u64,
}

impl Run<'_> {
    fn run(&mut self, host: &mut Host) -> Result<(), Stop> {
        let scenario = self.scenario;
        let mut dice = Dice::new(scenario.seed ^ mix(scenario.index ^ 0x7075));
        let mut pair = Pair { sender: self.start(host, Role::Send)?, receiver: self.start(host, Role::Receive)? };
        for kill in 1..=scenario.kills {
            self.storm.signals.check()?;
            let (sender_dies, receiver_dies) = match scenario.victims {
                Victims::Sender => (true, false),
                Victims::Receiver => (false, true),
                Victims::Either if dice.one_in(2) => (true, false),
                Victims::Either => (false, true),
                Victims::Both => (true, true),
            };
            // Some in the middle of their beginnings, most in the middle of their work.
            let is_last = kill == scenario.kills;
            if self.storm.is_own && dice.one_in(4) && !(is_last && scenario.ends_alone) {
                std::thread::sleep(Duration::from_micros(dice.below(3000)));
            } else {
                self.wait(&pair, "both sides to meet", |pair| pair.sides().iter().all(|side| side.is_met()))?;
                std::thread::sleep(Duration::from_micros(20 << dice.below(9)) + Duration::from_micros(dice.below(100)));
                self.look_at_holdings(&pair, sender_dies, receiver_dies);
            }
            if sender_dies && receiver_dies {
                self.kill_both(&pair, dice.one_in(2));
            } else {
                let must_tell = dice.one_in(2) || (is_last && scenario.ends_alone);
                self.kill_one(&pair, sender_dies, must_tell)?;
            }
            if is_last && scenario.ends_alone {
                return self.end_alone(&pair, sender_dies);
            }
            // The successors: the old side is dropped, which does nothing to a dead process.
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
        let journal = self.storm.root.path().join("journals").join(self.started.to_string());
        let sizes = Sizes {
            seed: mix(scenario.seed ^ scenario.index) >> 1,
            bytes_min: scenario.bytes_min,
            bytes_max: scenario.bytes_max,
        };
        host.side(Plan {
            role,
            place: self.storm.place(),
            journal,
            sizes,
            capacity: scenario.capacity,
            pause_every,
            pause_us,
            next: self.ledger.next(),
            turn: mix(scenario.seed ^ scenario.index ^ self.started << 32) >> 1,
            by: scenario.by,
            listens: is_sender == scenario.sender_listens,
            waits: if is_sender { scenario.sender_waits } else { scenario.receiver_waits },
            given: self.ledger.given(),
            crowd: None,
        })
    }

    /// Until it is so. Fails when nothing moves any more, and when a side fails that should not.
    fn wait(&self, pair: &Pair, what: &str, is_so: impl Fn(&Pair) -> bool) -> Result<(), Stop> {
        let mut patience = self.storm.patience(&pair.sides());
        while !is_so(pair) {
            self.storm.wait_on(&mut patience, &pair.sides(), what, self.scenario.by)?;
        }
        Ok(())
    }

    fn look_at_holdings(&mut self, pair: &Pair, sender_dies: bool, receiver_dies: bool) {
        for side in pair.sides() {
            self.storm.seen.extend(side.files());
        }
        match (sender_dies, receiver_dies) {
            // Only a side that lives through all of it can show growth.
            _ if self.scenario.victims == Victims::Either => {}
            (true, false) => self.holdings.push(pair.receiver.holdings()),
            (false, true) => self.holdings.push(pair.sender.holdings()),
            _ => {}
        }
        self.storm.report.deaths_outlived_most =
            self.storm.report.deaths_outlived_most.max(self.holdings.len().saturating_sub(1) as u64);
    }

    /// The accounts of a side that has ended.
    fn settle(&mut self, side: &Side, sender: &Side) {
        let notes = Notes::of(&side.journal);
        match side.plan.role {
            Role::Send => self.ledger.sender_ended(&notes, self.storm.is_own),
            Role::Receive => {
                let sent_most = sender.get(Word::Pending).max(self.ledger.next() - 1);
                self.ledger.receiver_ended(&notes, sent_most);
            }
        }
        // It is mapped where it is wanted.
        let _ = fs::remove_file(&side.plan.journal);
    }

    fn kill_one(&mut self, pair: &Pair, sender_dies: bool, must_tell: bool) -> Result<(), Stop> {
        let (victim, survivor) =
            if sender_dies { (&pair.sender, &pair.receiver) } else { (&pair.receiver, &pair.sender) };
        let (told, was_met, was_ready) = (survivor.get(Word::Told), survivor.is_met(), victim.is_ready());
        self.storm.look_whether_failed(victim)?;
        let was_waiting = survivor.get(Word::Waiting) == 1;
        let killed_ns = monotonic_ns();
        victim.kill();
        victim.await_death();
        self.storm.count(victim);
        self.settle(victim, &pair.sender);
        let is_told = |pair: &Pair| {
            let survivor = if sender_dies { &pair.receiver } else { &pair.sender };
            survivor.get(Word::Told) > told
        };
        if !self.storm.is_own {
            let deadline = Instant::now() + TELLING_AGAINST;
            while must_tell && !is_told(pair) && Instant::now() < deadline {
                std::thread::sleep(LOOK);
            }
            if must_tell && !is_told(pair) {
                self.ledger.faults.push(Fault::new(Kind::NotTold, 1, "the survivor was not told"));
            }
        } else if self.scenario.by == By::Connect && must_tell {
            // Also one that was meeting the victim: it has either met it, and is told, or has not.
            self.wait(pair, "the survivor to be told", |pair| {
                let survivor = if sender_dies { &pair.receiver } else { &pair.sender };
                !survivor.is_met()
            })?;
        } else if must_tell && was_ready && was_met {
            // One that came when the victim had died already is not told.
            self.wait(pair, "the survivor to be told", is_told)?;
        }
        if !is_told(pair) {
            return Ok(());
        }
        if was_waiting && was_met {
            let by = usize::from(self.scenario.by == By::Path);
            self.storm.told_ns[by].push(survivor.get(Word::ToldNs).saturating_sub(killed_ns));
        }
        if must_tell && self.storm.is_own {
            let (unreleased, beside) = (survivor.get(Word::ToldUnreleased), survivor.get(Word::ToldBeside));
            if sender_dies {
                // What it holds is what it has not released; and it has all there was.
                if unreleased != beside {
                    let text = format!("a receiver that holds {beside} was told {unreleased}");
                    self.ledger.faults.push(Fault::new(Kind::Miscounted, 1, text));
                }
                self.ledger.all_taken(survivor.get(Word::Taken));
            } else {
                self.ledger.unreleased_told(unreleased, beside);
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
            self.storm.count(side);
            self.settle(side, &pair.sender);
        }
        let channel = self.storm.place().join("c");
        // The first may have died before there was one.
        if self.storm.is_own && channel.exists() {
            match pelton::inspect::check(&channel, false) {
                Ok(lanes) if lanes.len() == 1 && lanes[0].is_whole() => self.ledger.waiting_found(lanes[0].kept),
                found => {
                    let text = format!("both are dead, and the channel is not whole: {found:?}");
                    self.ledger.faults.push(Fault::new(Kind::Garbage, 1, text));
                }
            }
        }
    }

    /// The survivor is told that nobody comes, and ends.
    fn end_alone(&mut self, pair: &Pair, sender_died: bool) -> Result<(), Stop> {
        let survivor = if sender_died { &pair.receiver } else { &pair.sender };
        survivor.journal.set(Word::Stop, 1);
        self.wait(pair, "the survivor to end", |pair| {
            let survivor = if sender_died { &pair.receiver } else { &pair.sender };
            survivor.get(Word::State) == DONE
        })?;
        self.storm.tally(survivor);
        self.settle(survivor, &pair.sender);
        Ok(())
    }

    /// The sender ends in order, and the receiver after the last message.
    fn end(&mut self, pair: &Pair) -> Result<(), Stop> {
        self.wait(pair, "both sides to meet", |pair| pair.sides().iter().all(|side| side.is_met()))?;
        pair.sender.journal.set(Word::Stop, 1);
        self.wait(pair, "the sender to end", |pair| pair.sender.get(Word::State) == DONE)?;
        pair.receiver.journal.set(Word::Stop, pair.sender.get(Word::Done) + 1);
        self.wait(pair, "the receiver to end", |pair| pair.receiver.get(Word::State) == DONE)?;
        for side in pair.sides() {
            self.storm.tally(side);
            self.settle(side, &pair.sender);
            side.await_death();
        }
        self.ledger.closed();
        Ok(())
    }
}
