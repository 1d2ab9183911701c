//! Scenarios of many senders: processes, and threads of the receiver's process, that send to one receiver, by connect
//! or by path, or append to one file. The receiver releases messages, or flushes them to a record file, which must have
//! each message once and complete. Every victim has a successor; a successor of a sender has numbers of its own.
//!
//! The expected messages of each sender follow from its words in the shared table, and from later deaths. A message may
//! be missing only where the guarantees say so, and never before a received one.

use super::{
    CrashTest, DONE, Host, Side, Stop, Word,
    ledger::{Fault, FaultKind, JournalEntries},
    many_senders_side::{SENDERS_MAX, SenderTable, SenderWord, message_number, parse_number},
    message::{HEADER_BYTES, Random, Sizes, check, mix},
    plan::{Job, ManySendersPlan, Plan, Role, Transport, WaitMode},
    resources::{Resources, growth},
};
use pelton::{Error, RecordReader};
use pelton_cli::failure::Failure;
use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// The choices of a seed for a scenario.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub index: u64,
    pub seed: u64,
    /// The job of the receiver.
    pub job: Job,
    pub transport: Transport,
    /// The number of sending processes at a time.
    senders: u64,
    /// The number of threads that send in the process of the receiver, or append.
    threads: u64,
    sender_wait_mode: WaitMode,
    receiver_wait_mode: WaitMode,
    capacity: u64,
    bytes_max: u64,
    sender_pause: (u64, u64),
    receiver_pause: (u64, u64),
    lanes: u32,
    announce: bool,
    flush_bytes: u64,
    flush_interval_us: Option<u64>,
    rotate_bytes: Option<u64>,
    kills: u64,
}

impl Scenario {
    /// Job of the receiver, transport, threads and wait mode: each combination once per round.
    pub const COMBINATIONS: u64 = 12;

    pub fn of(seed: u64, index: u64, combination: u64, kills: u64) -> Scenario {
        let mut random = Random::new(seed ^ mix(!index));
        let (job, transport, threads) = match combination / 2 {
            0 => (Job::Receive, Transport::Connect, 0),
            1 => (Job::Receive, Transport::Path, 0),
            2 => (Job::Flush, Transport::Connect, 0),
            3 => (Job::Flush, Transport::Connect, 1 + random.below(3)),
            4 => (Job::Flush, Transport::Path, 0),
            _ => (Job::Append, Transport::Path, 1 + random.below(4)),
        };
        let senders = if job == Job::Append { 0 } else { 2 + random.below(4) };
        let receiver_wait_mode = [WaitMode::Block, WaitMode::Poll][(combination % 2) as usize];
        let capacity = random.one_of(&[64 << 10, 64 << 10, 256 << 10, 1 << 20]);
        let bytes_max = random.one_of(&[HEADER_BYTES as u64, 64, 300, 2000, capacity / 8]).min(32 << 10);
        let (sender_pause, receiver_pause) = random.one_of(&[
            ((1, 50), (0, 0)),
            ((8, 200), (0, 0)),
            ((100, 2000), (0, 0)),
            ((10, 100), (16, 300)),
            ((50, 500), (100, 2000)),
        ]);
        Scenario {
            index,
            seed,
            job,
            transport,
            senders,
            threads,
            sender_wait_mode: random.one_of(&[WaitMode::Block, WaitMode::Poll]),
            receiver_wait_mode,
            capacity,
            bytes_max,
            sender_pause,
            receiver_pause,
            // A successor takes the lane of a dead sender, or another one.
            lanes: senders as u32 + 1 + random.below(2) as u32,
            announce: random.one_in(2),
            flush_bytes: random.one_of(&[2 << 10, 16 << 10, 128 << 10]),
            flush_interval_us: random.one_of(&[None, Some(300), Some(5000), Some(100_000)]),
            rotate_bytes: random.one_of(&[None, None, Some(100 << 10), Some(1 << 20)]),
            // One of four kills has two victims. Each death may use as many sender numbers as there are threads.
            kills: (kills * 4 / 5).clamp(1, 400),
        }
    }

    fn sizes(&self) -> Sizes {
        let seed = mix(self.seed ^ self.index) >> 1;
        Sizes { seed, bytes_min: HEADER_BYTES as u64, bytes_max: self.bytes_max }
    }
}

/// Which of a sender's messages must have been received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    /// All committed ones. An interrupted batch was received completely or not at all.
    All,
    /// All certainly flushed ones, and any number of later ones.
    Flushed,
    /// Any number: the sender died, then its receiver, and the messages between them are lost.
    Any,
}

impl Expected {
    /// The fault, if any, when the first `received` messages arrived. At least `least` and at most `most` were sent.
    fn check_received(self, sender_id: u64, (least, most): (u64, u64), received: u64) -> Option<Fault> {
        let text =
            format!("sender {sender_id}: at least {least} and at most {most} were sent, and {received} were received");
        match self {
            _ if received > most => Some(Fault::new(FaultKind::Garbage, received - most, text)),
            Expected::All | Expected::Flushed if received < least => {
                Some(Fault::new(FaultKind::Lost, least - received, text))
            }
            Expected::All if received > least && received < most => {
                Some(Fault::new(FaultKind::Garbage, 1, text + ": a part of a batch"))
            }
            _ => None,
        }
    }
}

/// A live or a former sender.
struct Account {
    sender_id: u64,
    /// Whether it is a thread of the receiver's process.
    is_thread: bool,
    is_dead: bool,
    expected: Expected,
}

/// The contents of a record file and its rotated predecessors, as far as read. Each message is read once.
struct FileCheck {
    path: PathBuf,
    sizes: Sizes,
    reader: Option<RecordReader>,
    /// The number of messages of each sender.
    last: HashMap<u64, u64>,
    messages: u64,
    bytes: u64,
    faults: Vec<Fault>,
}

impl FileCheck {
    fn new(path: PathBuf, sizes: Sizes) -> FileCheck {
        FileCheck { path, sizes, reader: None, last: HashMap::new(), messages: 0, bytes: 0, faults: Vec::new() }
    }

    fn received(&self, sender_id: u64) -> u64 {
        self.last.get(&sender_id).copied().unwrap_or(0)
    }

    /// The path of the file `number` after its rotation.
    fn rotated(&self, number: u64) -> PathBuf {
        self.path.with_extension(format!("{number:06}"))
    }

    /// Reads further, up to the end, which a running or killed writer may leave torn, or for `limit`: a running writer
    /// may be faster.
    fn read(&mut self, limit: Duration) -> Result<(), Stop> {
        let began = Instant::now();
        loop {
            let mut reader = match self.reader.take() {
                Some(reader) => reader,
                None => match self.open(1)? {
                    Some(reader) => reader,
                    None => return Ok(()),
                },
            };
            // Before the end is read: a file that is renamed now gets no further writes.
            let is_rotated = self.rotated(reader.number()).exists();
            let is_at_end = self.read_to_end(&mut reader, is_rotated, || began.elapsed() > limit)?;
            let next = if is_rotated && is_at_end { self.open(reader.number() + 1)? } else { None };
            let continues = next.is_some();
            self.reader = Some(next.unwrap_or(reader));
            if !continues {
                return Ok(());
            }
        }
    }

    fn open(&self, number: u64) -> Result<Option<RecordReader>, Stop> {
        // In this order: the file may be rotated in between, and never back.
        for path in [&self.path, &self.rotated(number)] {
            match RecordReader::open(path) {
                Ok(reader) if reader.number() == number => return Ok(Some(reader)),
                Ok(_) => {}
                Err(Error::System { error: source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(Stop::Fault(Fault::new(FaultKind::Garbage, 1, error))),
            }
        }
        Ok(None)
    }

    /// Returns whether it is at the end, rather than late.
    fn read_to_end(
        &mut self,
        reader: &mut RecordReader,
        is_whole: bool,
        is_late: impl Fn() -> bool,
    ) -> Result<bool, Stop> {
        while !is_late() {
            let chunk = match reader.next_chunk() {
                Ok(Some(chunk)) => chunk,
                Ok(None) => return Ok(true),
                // A torn end, by a killed or a running writer.
                Err(Error::Damaged { .. }) if !is_whole => return Ok(true),
                Err(error) => return Err(Stop::Fault(Fault::new(FaultKind::Garbage, 1, error))),
            };
            for record in chunk.records() {
                let payload = record.payload();
                self.messages += 1;
                self.bytes += payload.len() as u64;
                let Some((number, sender_id, index)) = parse_number(payload) else {
                    let text = format!("the file has {} bytes that are no message", payload.len());
                    self.faults.push(Fault::new(FaultKind::Garbage, 1, text));
                    continue;
                };
                if let Err(problem) = check(&self.sizes, number, payload) {
                    self.faults.push(Fault::new(FaultKind::Garbage, 1, format_args!("in the file: {problem}")));
                }
                let wanted = self.received(sender_id) + 1;
                if index != wanted {
                    let kind = if index < wanted { FaultKind::Duplicate } else { FaultKind::Lost };
                    let text = format!("in the file, of sender {sender_id}: message {index}, wanted {wanted}");
                    self.faults.push(Fault::new(kind, index.abs_diff(wanted), text));
                }
                self.last.insert(sender_id, index);
            }
        }
        Ok(false)
    }
}

/// A running scenario.
pub struct Run<'a> {
    test: &'a mut CrashTest,
    scenario: &'a Scenario,
    sender_table: SenderTable,
    table_path: PathBuf,
    file_check: FileCheck,
    accounts: Vec<Account>,
    pub faults: Vec<Fault>,
    resources: Vec<Resources>,
    /// Number of processes started so far.
    started: u64,
    /// The number of the next sender.
    sender_id: u64,
}

/// The live processes.
struct Processes {
    receiver: Side,
    senders: Vec<Side>,
}

impl Processes {
    fn sides(&self) -> Vec<&Side> {
        self.senders.iter().chain([&self.receiver]).collect()
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        self.sides().iter().for_each(|side| side.kill());
        self.sides().iter().for_each(|side| side.await_death());
    }
}

impl<'a> Run<'a> {
    pub fn new(test: &'a mut CrashTest, scenario: &'a Scenario, journals: &Path) -> Result<Run<'a>, Failure> {
        let table_path = journals.join("senders");
        let sender_table =
            SenderTable::create(&table_path).map_err(|error| Failure::system("creating a journal", error))?;
        let file_check = FileCheck::new(journals.join("log"), scenario.sizes());
        let (accounts, faults, resources) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Run {
            test,
            scenario,
            sender_table,
            table_path,
            file_check,
            accounts,
            faults,
            resources,
            started: 0,
            sender_id: 1,
        })
    }

    pub fn run(&mut self, host: &mut Host) -> Result<(), Stop> {
        let scenario = self.scenario;
        let mut random = Random::new(scenario.seed ^ mix(scenario.index ^ 0x7075));
        let mut processes = Processes { receiver: self.start(host, scenario.job)?, senders: Vec::new() };
        for _ in 0..scenario.senders {
            let sender = self.start(host, Job::Send)?;
            processes.senders.push(sender);
        }
        for _ in 0..scenario.kills {
            self.test.signals.check()?;
            if self.sender_id + 2 + scenario.threads >= SENDERS_MAX {
                break;
            }
            // Some victims die while they start, most while they work.
            if random.one_in(4) {
                std::thread::sleep(Duration::from_micros(random.below(3000)));
            } else {
                self.wait(&processes, "all sides to connect", |_, processes| {
                    Ok(processes.sides().iter().all(|side| side.is_connected()))
                })?;
                std::thread::sleep(
                    Duration::from_micros(20 << random.below(10)) + Duration::from_micros(random.below(100)),
                );
                processes.sides().iter().for_each(|side| self.test.side_files.extend(side.files()));
                self.resources.push(processes.receiver.resources());
                let most = self.resources.len().saturating_sub(1) as u64;
                self.test.report.deaths_outlived_most = self.test.report.deaths_outlived_most.max(most);
            }
            let (sender_dies, receiver_dies) = match random.below(4) {
                _ if scenario.senders == 0 => (false, true),
                0 | 1 => (true, false),
                2 => (false, true),
                _ => (true, true),
            };
            if receiver_dies && random.one_in(2) {
                self.wait(&processes, "the messages of dead senders", |run, _| run.dead_senders_received())?;
            }
            let victim_index = sender_dies.then(|| random.below(scenario.senders) as usize);
            if let Some(victim_index) = victim_index {
                processes.senders[victim_index].kill();
            }
            if receiver_dies {
                self.kill_receiver(&processes, victim_index, random.one_in(2))?;
            }
            if let Some(victim_index) = victim_index {
                let victim = &processes.senders[victim_index];
                victim.await_death();
                self.test.count(victim);
                self.record_end(victim);
                // Its messages for an earlier receiver are lost with both.
                let receiver_is_its_peer =
                    victim.get(Word::First) == processes.receiver.pid.as_raw_nonzero().get() as u64;
                self.mark_dead(sender_id_of(victim), receiver_is_its_peer && !receiver_dies);
                processes.senders[victim_index] = self.start(host, Job::Send)?;
            }
            if receiver_dies {
                processes.receiver = self.start(host, scenario.job)?;
            }
        }
        self.end(host, &mut processes)
    }

    fn start(&mut self, host: &mut Host, job: Job) -> Result<Side, Failure> {
        let scenario = self.scenario;
        self.started += 1;
        let is_sender = job == Job::Send;
        // Of a flush, only its threads pause, which send: without a pause they fill the file faster than it is read.
        let (pause_every, pause_us) = match job {
            Job::Receive => scenario.receiver_pause,
            Job::Send | Job::Flush | Job::Append => scenario.sender_pause,
        };
        let sender_id = self.sender_id;
        let threads = if is_sender { 0 } else { scenario.threads };
        let own_senders = if is_sender { 1 } else { threads };
        let expected = if job == Job::Append { Expected::Flushed } else { Expected::All };
        let accounts = (sender_id..sender_id + own_senders).map(|sender_id| Account {
            sender_id,
            is_thread: !is_sender,
            is_dead: false,
            expected,
        });
        self.accounts.extend(accounts);
        self.sender_id += own_senders;
        let journal = self.test.root.path().join("journals").join(self.started.to_string());
        host.side(Plan {
            role: if is_sender { Role::Send } else { Role::Receive },
            directory: self.test.directory(),
            journal,
            sizes: scenario.sizes(),
            capacity: scenario.capacity,
            pause_every,
            pause_us,
            next: 1,
            choices_seed: mix(scenario.seed ^ scenario.index ^ self.started << 32) >> 1,
            transport: scenario.transport,
            listens: !is_sender,
            wait_mode: if is_sender { scenario.sender_wait_mode } else { scenario.receiver_wait_mode },
            delivered: 0,
            many_senders: Some(self.many_senders_plan(job, sender_id, threads)),
            broadcast: None,
        })
    }

    fn many_senders_plan(&self, job: Job, sender_id: u64, threads: u64) -> ManySendersPlan {
        ManySendersPlan {
            job,
            sender_table: self.table_path.clone(),
            sender_id,
            threads,
            lanes: self.scenario.lanes,
            announce: self.scenario.announce,
            file: self.file_check.path.clone(),
            flush_bytes: self.scenario.flush_bytes,
            flush_interval_us: self.scenario.flush_interval_us,
            rotate_bytes: self.scenario.rotate_bytes,
        }
    }

    fn wait(
        &mut self,
        processes: &Processes,
        what: &str,
        mut is_so: impl FnMut(&mut Self, &Processes) -> Result<bool, Stop>,
    ) -> Result<(), Stop> {
        let mut watch = self.test.watch_progress(&processes.sides());
        while !is_so(self, processes)? {
            self.test.wait_step(&mut watch, &processes.sides(), what, self.scenario.transport)?;
        }
        Ok(())
    }

    /// How many messages of a sender have been received and released.
    fn received(&self, sender_id: u64) -> u64 {
        match self.scenario.job {
            Job::Receive => self.sender_table.get(sender_id, SenderWord::ReleasedMost),
            _ => self.file_check.received(sender_id),
        }
    }

    fn sent(&self, sender_id: u64) -> (u64, u64) {
        (
            self.sender_table.get(sender_id, SenderWord::SentLeast),
            self.sender_table.get(sender_id, SenderWord::SentMost),
        )
    }

    /// Whether all expected messages of dead senders have been received.
    fn dead_senders_received(&mut self) -> Result<bool, Stop> {
        self.file_check.read(Duration::from_millis(20))?;
        Ok((self.accounts.iter()).filter(|account| account.is_dead && account.expected == Expected::All).all(
            |account| {
                account
                    .expected
                    .check_received(account.sender_id, self.sent(account.sender_id), self.received(account.sender_id))
                    .is_none()
            },
        ))
    }

    /// A sender has died. `received`: a live receiver must receive all its messages; a path channel always has one.
    fn mark_dead(&mut self, sender_id: u64, received: bool) {
        let account =
            self.accounts.iter_mut().find(|account| account.sender_id == sender_id).expect("the sender was started");
        account.is_dead = true;
        if !received && self.scenario.transport == Transport::Connect {
            account.expected = Expected::Any;
        }
    }

    /// Adds the faults in the journal of a side that is dead or done.
    fn record_end(&mut self, side: &Side) {
        let entries = JournalEntries::of(&side.journal);
        let jumps: Vec<_> =
            entries.jumps.iter().map(|(wanted, found)| (split_number(*wanted), split_number(*found))).collect();
        for (kind, count, text) in [
            (FaultKind::Garbage, entries.garbage, entries.text.clone()),
            (FaultKind::Duplicate, entries.unmarked, "messages were redelivered without the mark".to_owned()),
            (FaultKind::Lost, entries.jumps_count, format!("expected and received (sender, message): {jumps:?}")),
        ] {
            if count > 0 {
                self.faults.push(Fault::new(kind, count, text));
            }
        }
        // Still mapped where needed.
        let _ = fs::remove_file(&side.plan.journal);
    }

    /// `other_victim`: a sender that was killed too. `await_detection`: waits until the survivors have detected the
    /// death.
    fn kill_receiver(
        &mut self,
        processes: &Processes,
        other_victim: Option<usize>,
        await_detection: bool,
    ) -> Result<(), Stop> {
        let victim = &processes.receiver;
        self.test.check_side(victim)?;
        let survivors: Vec<&Side> = processes
            .senders
            .iter()
            .enumerate()
            .filter(|(index, _)| Some(*index) != other_victim)
            .map(|(_, side)| side)
            .collect();
        // Before the kill: the senders that are connected now detect the death.
        let connected: Vec<&Side> = survivors.iter().copied().filter(|side| side.is_connected()).collect();
        let detections_before: Vec<u64> = connected.iter().map(|side| side.get(Word::Detections)).collect();
        victim.kill();
        victim.await_death();
        self.test.count(victim);
        self.record_end(victim);
        self.faults.extend(growth(&self.resources));
        self.resources.clear();
        self.file_check.read(Duration::MAX)?;
        for account in &mut self.accounts {
            if account.is_thread && !account.is_dead {
                account.is_dead = true;
                account.expected = if self.scenario.job == Job::Append { Expected::Flushed } else { Expected::Any };
            } else if account.is_dead
                && self.scenario.transport == Transport::Connect
                && account.expected == Expected::All
            {
                // All its messages were received, or the rest is lost with both.
                account.expected = Expected::Any;
            }
        }
        if !await_detection || self.scenario.transport == Transport::Path {
            return Ok(());
        }
        self.wait(processes, "the survivors to detect the death", |_, _| {
            Ok(survivors.iter().all(|side| !side.is_connected()))
        })?;
        for (side, detections_before) in connected.iter().zip(detections_before) {
            let sender_id = sender_id_of(side);
            let (unreleased, sent) = (side.get(Word::ReportedUnreleased), side.get(Word::CountAtDetection));
            let is_exact =
                match (side.get(Word::Detections) - detections_before, sent.checked_sub(unreleased), self.scenario.job)
                {
                    (1, Some(released), Job::Receive) => [SenderWord::ReleasedLeast, SenderWord::ReleasedMost]
                        .iter()
                        .any(|word| self.sender_table.get(sender_id, *word) == released),
                    // Released messages are in the file.
                    (1, Some(released), _) => released <= self.file_check.received(sender_id),
                    _ => false,
                };
            if !is_exact {
                let word = |word| self.sender_table.get(sender_id, word);
                let text = format!(
                    "sender {sender_id} reports {unreleased} unreleased of {sent}, with {} to {} released, and {} in the file",
                    word(SenderWord::ReleasedLeast),
                    word(SenderWord::ReleasedMost),
                    self.file_check.received(sender_id)
                );
                self.faults.push(Fault::new(FaultKind::Miscounted, 1, text));
            }
        }
        Ok(())
    }

    /// Ends all processes in order, the receiver after the last message, and checks the accounts.
    fn end(&mut self, host: &mut Host, processes: &mut Processes) -> Result<(), Stop> {
        self.wait(processes, "all sides to connect", |_, processes| {
            Ok(processes.sides().iter().all(|side| side.is_connected()))
        })?;
        processes.sides().iter().for_each(|side| side.journal.set(Word::Stop, 1));
        self.wait(processes, "the senders to end", |run, processes| {
            let threads = run.accounts.iter().filter(|account| account.is_thread && !account.is_dead);
            let mut ended = threads.map(|thread| run.sender_table.get(thread.sender_id, SenderWord::Ended) == 1);
            Ok(processes.senders.iter().all(|side| side.get(Word::State) == DONE)
                && (run.scenario.job == Job::Append || ended.all(|ended| ended)))
        })?;
        if self.scenario.job != Job::Append {
            // A sender without an account: its message is the end.
            let sender_id = std::mem::replace(&mut self.sender_id, 0);
            let last = self.start(host, Job::Send)?;
            self.sender_id = sender_id;
            self.accounts.retain(|account| account.sender_id != 0);
            processes.senders.push(last);
        }
        self.wait(processes, "all to end", |_, processes| {
            Ok(processes.sides().iter().all(|side| side.get(Word::State) == DONE))
        })?;
        for side in processes.sides() {
            side.await_death();
            self.test.tally(side);
            self.record_end(side);
        }
        self.file_check.read(Duration::MAX)?;
        self.faults.extend(growth(&self.resources));
        if self.scenario.job != Job::Receive {
            self.test.report.messages_in_files += self.file_check.messages;
        }
        self.faults.append(&mut self.file_check.faults);
        for account in &self.accounts {
            let sender_id = account.sender_id;
            self.faults.extend(account.expected.check_received(
                sender_id,
                self.sent(sender_id),
                self.received(sender_id),
            ));
            let released = (
                self.sender_table.get(sender_id, SenderWord::ReleasedLeast),
                self.sender_table.get(sender_id, SenderWord::ReleasedMost),
            );
            if self.scenario.job == Job::Receive && !account.is_dead && released.0 != released.1 {
                let text = format!("all sides have ended, and of sender {sender_id} {released:?} were released");
                self.faults.push(Fault::new(FaultKind::Miscounted, 1, text));
            }
        }
        Ok(())
    }
}

fn sender_id_of(side: &Side) -> u64 {
    side.plan.many_senders.as_ref().expect("the scenario has many senders").sender_id
}

/// The sender and the message of a number.
fn split_number(number: u64) -> (u64, u64) {
    (number >> 32, number - message_number(number >> 32, 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Pattern;
    use pelton::{RecordFileOptions, Sink as _};

    #[test]
    fn the_expected_messages_are_exact() {
        let check_received = |expected: Expected, received| {
            expected.check_received(1, (10, 14), received).map(|fault| (fault.kind, fault.count))
        };
        for expected in [Expected::All, Expected::Flushed, Expected::Any] {
            assert_eq!([check_received(expected, 10), check_received(expected, 14)], [None, None], "{expected:?}");
            assert_eq!(check_received(expected, 16), Some((FaultKind::Garbage, 2)), "{expected:?}");
        }
        assert_eq!(check_received(Expected::All, 12), Some((FaultKind::Garbage, 1)), "a torn batch");
        assert_eq!(
            [
                check_received(Expected::Flushed, 12),
                check_received(Expected::Any, 12),
                check_received(Expected::Any, 0)
            ],
            [None; 3]
        );
        assert_eq!(check_received(Expected::All, 7), Some((FaultKind::Lost, 3)));
        assert_eq!(check_received(Expected::Flushed, 7), Some((FaultKind::Lost, 3)));
    }

    /// A file of messages (sender, index), one per write.
    fn file(messages: &[(u64, u64)], spoil: impl Fn(&mut Vec<u8>)) -> (tempfile::TempDir, FileCheck) {
        let directory = tempfile::tempdir().unwrap();
        let sizes = Sizes { seed: 5, bytes_min: HEADER_BYTES as u64, bytes_max: 200 };
        let path = directory.path().join("log");
        let mut file = RecordFileOptions::new().rotate_bytes(1000).open(&path).unwrap();
        for (seq, (sender_id, index)) in (1u32..).zip(messages) {
            let number = message_number(*sender_id, *index);
            let mut payload = vec![0; sizes.of(number)];
            Pattern::new(200).write(number, &mut payload);
            spoil(&mut payload);
            let mut bytes = (u64::from(seq) << 32 | payload.len() as u64).to_le_bytes().to_vec();
            bytes.extend(&payload);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
            file.write(&[pelton::Chunk::new(pelton::LaneId([1, 2]), None, seq, 1, &bytes)]).unwrap();
        }
        let file_check = FileCheck::new(path, sizes);
        (directory, file_check)
    }

    fn faults_of(messages: &[(u64, u64)], spoil: impl Fn(&mut Vec<u8>)) -> Vec<(FaultKind, u64)> {
        let (_directory, mut file_check) = file(messages, spoil);
        assert!(file_check.read(Duration::MAX).is_ok());
        assert_eq!(file_check.messages, messages.len() as u64);
        file_check.faults.iter().map(|fault| (fault.kind, fault.count)).collect()
    }

    #[test]
    fn the_check_reads_all_rotated_files_and_finds_their_faults() {
        let correct: Vec<_> = (1..40).flat_map(|index| [(1, index), (2, index)]).collect();
        assert_eq!(faults_of(&correct, |_| ()), []);
        let with = |index: usize, message| {
            let mut all = correct.clone();
            all.insert(index, message);
            all
        };
        assert_eq!(faults_of(&with(20, (1, 5)), |_| ())[0], (FaultKind::Duplicate, 6));
        assert_eq!(faults_of(&with(78, (1, 43)), |_| ()), [(FaultKind::Lost, 3)]);
        assert_eq!(faults_of(&correct, |payload| payload[15] ^= 1).len(), correct.len());
    }

    #[test]
    fn the_check_ignores_a_torn_end_until_it_is_complete() {
        let (directory, mut file_check) = file(&[(1, 1), (1, 2)], |_| ());
        let path = directory.path().join("log");
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 3]).unwrap();
        assert!(file_check.read(Duration::MAX).is_ok());
        assert_eq!(file_check.received(1), 1);
        fs::write(&path, &whole).unwrap();
        assert!(file_check.read(Duration::MAX).is_ok());
        assert_eq!((file_check.received(1), file_check.faults.len()), (2, 0));
    }
}
