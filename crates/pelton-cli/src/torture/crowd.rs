//! Storms of many senders: processes, and threads of the receiver's own, that send to one receiver, by connect or by path, or append
//! to one file. The receiver releases what it has received, or flushes it to a record file, in which each message has to be once and
//! whole. Whoever is killed has a successor: another sender, with numbers of its own.
//!
//! What is owed of each sender follows from what it said on the board, and from who died after it: a message may be missing only where
//! the guarantees say so, and never one before another that came.

use super::{
    DONE, Host, Side, Stop, Storm, Word,
    crowd_side::{Board, Job, Of, Part, SENDERS_MAX, numbered, told_by},
    holdings::{Holdings, grown},
    ledger::{Fault, Kind, Notes},
    message::{Dice, HEADER_BYTES, Sizes, check, mix},
    side::{By, Plan, Role, Waits},
};
use crate::failure::Failure;
use pelton::{Error, RecordReader};
use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

/// What happens in one: all that a seed decides.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub index: u64,
    pub seed: u64,
    /// What the receiver does.
    pub job: Job,
    pub by: By,
    /// Processes that send, at a time.
    senders: u64,
    /// Threads that send in the receiver's process, or append.
    threads: u64,
    sender_waits: Waits,
    receiver_waits: Waits,
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
    /// What the receiver does, by what, with threads or without, and how it waits.
    pub const COMBINATIONS: u64 = 12;

    pub fn of(seed: u64, index: u64, combination: u64, kills: u64) -> Scenario {
        let mut dice = Dice::new(seed ^ mix(!index));
        let (job, by, threads) = match combination / 2 {
            0 => (Job::Receive, By::Connect, 0),
            1 => (Job::Receive, By::Path, 0),
            2 => (Job::Flush, By::Connect, 0),
            3 => (Job::Flush, By::Connect, 1 + dice.below(3)),
            4 => (Job::Flush, By::Path, 0),
            _ => (Job::Append, By::Path, 1 + dice.below(4)),
        };
        let senders = if job == Job::Append { 0 } else { 2 + dice.below(4) };
        let receiver_waits = [Waits::Block, Waits::Poll][(combination % 2) as usize];
        let capacity = dice.one_of(&[64 << 10, 64 << 10, 256 << 10, 1 << 20]);
        let bytes_max = dice.one_of(&[HEADER_BYTES as u64, 64, 300, 2000, capacity / 8]).min(32 << 10);
        let (sender_pause, receiver_pause) = dice.one_of(&[
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
            by,
            senders,
            threads,
            sender_waits: dice.one_of(&[Waits::Block, Waits::Poll]),
            receiver_waits,
            capacity,
            bytes_max,
            sender_pause,
            receiver_pause,
            // Who comes next takes a dead one's lane over, or may find another.
            lanes: senders as u32 + 1 + dice.below(2) as u32,
            announce: dice.one_in(2),
            flush_bytes: dice.one_of(&[2 << 10, 16 << 10, 128 << 10]),
            flush_interval_us: dice.one_of(&[None, Some(300), Some(5000), Some(100_000)]),
            rotate_bytes: dice.one_of(&[None, None, Some(100 << 10), Some(1 << 20)]),
            // Of four, one is of two at once. And each death may cost as many numbers as there are threads.
            kills: (kills * 4 / 5).clamp(1, 400),
        }
    }

    fn sizes(&self) -> Sizes {
        let seed = mix(self.seed ^ self.index) >> 1;
        Sizes { seed, bytes_min: HEADER_BYTES as u64, bytes_max: self.bytes_max }
    }
}

/// What has to have come of a sender's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owed {
    /// All that it committed. What it was killed in the middle of came whole, or not at all.
    All,
    /// All that was flushed for certain; of what follows, as much as happened to be.
    Flushed,
    /// Whatever came: it died, and then so did its receiver, and with both what was between them.
    Any,
}

impl Owed {
    /// What is wrong with the first `came` messages' having come. Sent were `least` at least, and `most` at most.
    fn judge(self, who: u64, (least, most): (u64, u64), came: u64) -> Option<Fault> {
        let text = format!("sender {who}: {least} were sent for certain, {most} at most, and {came} came");
        match self {
            _ if came > most => Some(Fault::new(Kind::Garbage, came - most, text)),
            Owed::All | Owed::Flushed if came < least => Some(Fault::new(Kind::Lost, least - came, text)),
            Owed::All if came > least && came < most => {
                Some(Fault::new(Kind::Garbage, 1, text + ": a part of a batch"))
            }
            _ => None,
        }
    }
}

/// A sender that there is, or was.
struct Account {
    who: u64,
    /// In the receiver's process.
    is_thread: bool,
    is_dead: bool,
    owed: Owed,
}

/// What is in a record file and in those that it was before, as far as it has been read: each message is looked at once.
struct Book {
    path: PathBuf,
    sizes: Sizes,
    reader: Option<RecordReader>,
    /// Of each sender, how many there are.
    last: HashMap<u64, u64>,
    messages: u64,
    bytes: u64,
    faults: Vec<Fault>,
}

impl Book {
    fn new(path: PathBuf, sizes: Sizes) -> Book {
        Book { path, sizes, reader: None, last: HashMap::new(), messages: 0, bytes: 0, faults: Vec::new() }
    }

    fn came(&self, who: u64) -> u64 {
        self.last.get(&who).copied().unwrap_or(0)
    }

    /// The file of this number if it has been rotated away.
    fn rotated(&self, number: u64) -> PathBuf {
        self.path.with_extension(format!("{number:06}"))
    }

    /// Reads on. While nobody writes, up to the end, but for what is torn there.
    fn read(&mut self) -> Result<(), Stop> {
        loop {
            let mut reader = match self.reader.take() {
                Some(reader) => reader,
                None => match self.open(1)? {
                    Some(reader) => reader,
                    None => return Ok(()),
                },
            };
            // Before the end is found: what was renamed by then is not written to any more.
            let is_rotated = self.rotated(reader.number()).exists();
            self.read_to_end(&mut reader, is_rotated)?;
            let next = if is_rotated { self.open(reader.number() + 1)? } else { None };
            let goes_on = next.is_some();
            self.reader = Some(next.unwrap_or(reader));
            if !goes_on {
                return Ok(());
            }
        }
    }

    fn open(&self, number: u64) -> Result<Option<RecordReader>, Stop> {
        // In this order: it may be rotated away in between, not back.
        for path in [&self.path, &self.rotated(number)] {
            match RecordReader::open(path) {
                Ok(reader) if reader.number() == number => return Ok(Some(reader)),
                Ok(_) => {}
                Err(Error::System { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(Stop::Fault(Fault::new(Kind::Garbage, 1, error))),
            }
        }
        Ok(None)
    }

    fn read_to_end(&mut self, reader: &mut RecordReader, is_whole: bool) -> Result<(), Stop> {
        loop {
            let chunk = match reader.next_chunk() {
                Ok(Some(chunk)) => chunk,
                Ok(None) => return Ok(()),
                // What is torn, by a writer that was killed or is writing.
                Err(Error::Damaged { .. }) if !is_whole => return Ok(()),
                Err(error) => return Err(Stop::Fault(Fault::new(Kind::Garbage, 1, error))),
            };
            for record in chunk.records() {
                let payload = record.payload();
                self.messages += 1;
                self.bytes += payload.len() as u64;
                let Some((number, who, nth)) = told_by(payload) else {
                    let text = format!("{} bytes in the file are no message", payload.len());
                    self.faults.push(Fault::new(Kind::Garbage, 1, text));
                    continue;
                };
                if let Err(problem) = check(&self.sizes, number, payload) {
                    self.faults.push(Fault::new(Kind::Garbage, 1, format_args!("in the file: {problem}")));
                }
                let last = self.last.entry(who).or_insert(0);
                let text = format!("in the file, of sender {who}: message {nth} after {last}");
                match nth.cmp(&(*last + 1)) {
                    std::cmp::Ordering::Less => self.faults.push(Fault::new(Kind::Duplicate, *last + 1 - nth, text)),
                    std::cmp::Ordering::Greater => self.faults.push(Fault::new(Kind::Lost, nth - *last - 1, text)),
                    std::cmp::Ordering::Equal => {}
                }
                *last = nth;
            }
        }
    }
}

/// One scenario on its way.
pub struct Run<'a> {
    storm: &'a mut Storm,
    scenario: &'a Scenario,
    board: Board,
    board_at: PathBuf,
    book: Book,
    accounts: Vec<Account>,
    pub faults: Vec<Fault>,
    holdings: Vec<Holdings>,
    /// Processes started so far.
    started: u64,
    /// The number of the next sender.
    who: u64,
}

/// Everybody who lives.
struct Cast {
    receiver: Side,
    senders: Vec<Side>,
}

impl Cast {
    fn sides(&self) -> Vec<&Side> {
        self.senders.iter().chain([&self.receiver]).collect()
    }
}

impl Drop for Cast {
    fn drop(&mut self) {
        self.sides().iter().for_each(|side| side.kill());
        self.sides().iter().for_each(|side| side.await_death());
    }
}

impl<'a> Run<'a> {
    pub fn new(storm: &'a mut Storm, scenario: &'a Scenario, journals: &Path) -> Result<Run<'a>, Failure> {
        let board_at = journals.join("board");
        let board = Board::create(&board_at).map_err(|error| Failure::system("making a journal", error))?;
        let book = Book::new(journals.join("log"), scenario.sizes());
        let (accounts, faults, holdings) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Run { storm, scenario, board, board_at, book, accounts, faults, holdings, started: 0, who: 1 })
    }

    pub fn run(&mut self, host: &mut Host) -> Result<(), Stop> {
        let scenario = self.scenario;
        let mut dice = Dice::new(scenario.seed ^ mix(scenario.index ^ 0x7075));
        let mut cast = Cast { receiver: self.start(host, scenario.job)?, senders: Vec::new() };
        for _ in 0..scenario.senders {
            let sender = self.start(host, Job::Send)?;
            cast.senders.push(sender);
        }
        for _ in 0..scenario.kills {
            self.storm.signals.check()?;
            if self.who + 2 + scenario.threads >= SENDERS_MAX {
                break;
            }
            // Some in the middle of their beginnings, most in the middle of their work.
            if dice.one_in(4) {
                std::thread::sleep(Duration::from_micros(dice.below(3000)));
            } else {
                self.wait(&cast, "all sides to meet", |_, cast| Ok(cast.sides().iter().all(|side| side.is_met())))?;
                std::thread::sleep(
                    Duration::from_micros(20 << dice.below(10)) + Duration::from_micros(dice.below(100)),
                );
                cast.sides().iter().for_each(|side| self.storm.seen.extend(side.files()));
                self.holdings.push(cast.receiver.holdings());
                let most = self.holdings.len().saturating_sub(1) as u64;
                self.storm.report.deaths_outlived_most = self.storm.report.deaths_outlived_most.max(most);
            }
            let (sender_dies, receiver_dies) = match dice.below(4) {
                _ if scenario.senders == 0 => (false, true),
                0 | 1 => (true, false),
                2 => (false, true),
                _ => (true, true),
            };
            if receiver_dies && dice.one_in(2) {
                self.wait(&cast, "what dead senders had sent", |run, _| run.dead_have_come())?;
            }
            let place = sender_dies.then(|| dice.below(scenario.senders) as usize);
            if let Some(place) = place {
                cast.senders[place].kill();
            }
            if receiver_dies {
                self.kill_receiver(&cast, place, dice.one_in(2))?;
            }
            if let Some(place) = place {
                let victim = &cast.senders[place];
                victim.await_death();
                self.storm.count(victim);
                self.settle(victim);
                // What it had for another receiver than the one that lives is gone with both.
                let its_own = victim.get(Word::First) == cast.receiver.pid.as_raw_nonzero().get() as u64;
                self.end_of(who_of(victim), its_own && !receiver_dies);
                cast.senders[place] = self.start(host, Job::Send)?;
            }
            if receiver_dies {
                cast.receiver = self.start(host, scenario.job)?;
            }
        }
        self.end(host, &mut cast)
    }

    fn start(&mut self, host: &mut Host, job: Job) -> Result<Side, Failure> {
        let scenario = self.scenario;
        self.started += 1;
        let is_sender = job == Job::Send;
        let (pause_every, pause_us) = match job {
            Job::Send | Job::Append => scenario.sender_pause,
            _ => scenario.receiver_pause,
        };
        let who = self.who;
        let threads = if is_sender { 0 } else { scenario.threads };
        let mine = if is_sender { 1 } else { threads };
        let owed = if job == Job::Append { Owed::Flushed } else { Owed::All };
        let accounts = (who..who + mine).map(|who| Account { who, is_thread: !is_sender, is_dead: false, owed });
        self.accounts.extend(accounts);
        self.who += mine;
        let journal = self.storm.root.path().join("journals").join(self.started.to_string());
        host.side(Plan {
            role: if is_sender { Role::Send } else { Role::Receive },
            place: self.storm.place(),
            journal,
            sizes: scenario.sizes(),
            capacity: scenario.capacity,
            pause_every,
            pause_us,
            next: 1,
            turn: mix(scenario.seed ^ scenario.index ^ self.started << 32) >> 1,
            by: scenario.by,
            listens: !is_sender,
            waits: if is_sender { scenario.sender_waits } else { scenario.receiver_waits },
            given: 0,
            crowd: Some(self.part(job, who, threads)),
        })
    }

    fn part(&self, job: Job, who: u64, threads: u64) -> Part {
        Part {
            job,
            board: self.board_at.clone(),
            who,
            threads,
            lanes: self.scenario.lanes,
            announce: self.scenario.announce,
            file: self.book.path.clone(),
            flush_bytes: self.scenario.flush_bytes,
            flush_interval_us: self.scenario.flush_interval_us,
            rotate_bytes: self.scenario.rotate_bytes,
        }
    }

    fn wait(
        &mut self,
        cast: &Cast,
        what: &str,
        mut is_so: impl FnMut(&mut Self, &Cast) -> Result<bool, Stop>,
    ) -> Result<(), Stop> {
        let mut patience = self.storm.patience(&cast.sides());
        while !is_so(self, cast)? {
            self.storm.wait_on(&mut patience, &cast.sides(), what, self.scenario.by)?;
        }
        Ok(())
    }

    /// How many of a sender's messages have come, for good.
    fn came(&self, who: u64) -> u64 {
        match self.scenario.job {
            Job::Receive => self.board.get(who, Of::ReleasedMost),
            _ => self.book.came(who),
        }
    }

    fn sent(&self, who: u64) -> (u64, u64) {
        (self.board.get(who, Of::SentLeast), self.board.get(who, Of::SentMost))
    }

    /// Whether all has come that is owed of the dead.
    fn dead_have_come(&mut self) -> Result<bool, Stop> {
        self.book.read()?;
        Ok((self.accounts.iter())
            .filter(|account| account.is_dead && account.owed == Owed::All)
            .all(|account| account.owed.judge(account.who, self.sent(account.who), self.came(account.who)).is_none()))
    }

    /// That sender is dead. `received`: there is a receiver that has to have all of it; on a path there always is.
    fn end_of(&mut self, who: u64, received: bool) {
        let account = self.accounts.iter_mut().find(|account| account.who == who).expect("it has been started");
        account.is_dead = true;
        if !received && self.scenario.by == By::Connect {
            account.owed = Owed::Any;
        }
    }

    /// A side that is dead, or done: what its journal says is wrong.
    fn settle(&mut self, side: &Side) {
        let notes = Notes::of(&side.journal);
        let jumps: Vec<_> = notes.jumps.iter().map(|(wanted, found)| (numbers(*wanted), numbers(*found))).collect();
        for (kind, count, text) in [
            (Kind::Garbage, notes.garbage, notes.text.clone()),
            (
                Kind::Duplicate,
                notes.unmarked,
                "messages that a predecessor had been given came again, unmarked".to_owned(),
            ),
            (Kind::Lost, notes.jumps_count, format!("(sender, message) that were due, and that came: {jumps:?}")),
        ] {
            if count > 0 {
                self.faults.push(Fault::new(kind, count, text));
            }
        }
        // It is mapped where it is wanted.
        let _ = fs::remove_file(&side.plan.journal);
    }

    /// `beside`: the sender that has been killed too. `must_tell`: waits until the others have been told.
    fn kill_receiver(&mut self, cast: &Cast, beside: Option<usize>, must_tell: bool) -> Result<(), Stop> {
        let victim = &cast.receiver;
        self.storm.look_whether_failed(victim)?;
        let survivors: Vec<&Side> =
            cast.senders.iter().enumerate().filter(|(place, _)| Some(*place) != beside).map(|(_, side)| side).collect();
        // Before: who has met it by then is told of its death.
        let met: Vec<&Side> = survivors.iter().copied().filter(|side| side.is_met()).collect();
        let told_before: Vec<u64> = met.iter().map(|side| side.get(Word::Told)).collect();
        victim.kill();
        victim.await_death();
        self.storm.count(victim);
        self.settle(victim);
        self.faults.extend(grown(&self.holdings));
        self.holdings.clear();
        self.book.read()?;
        for account in &mut self.accounts {
            if account.is_thread && !account.is_dead {
                account.is_dead = true;
                account.owed = if self.scenario.job == Job::Append { Owed::Flushed } else { Owed::Any };
            } else if account.is_dead && self.scenario.by == By::Connect && account.owed == Owed::All {
                // All of it has come, or what has not is gone with both.
                account.owed = Owed::Any;
            }
        }
        if !must_tell || self.scenario.by == By::Path {
            return Ok(());
        }
        self.wait(cast, "the survivors to be told", |_, _| Ok(survivors.iter().all(|side| !side.is_met())))?;
        for (side, told_before) in met.iter().zip(told_before) {
            let who = who_of(side);
            let (unreleased, sent) = (side.get(Word::ToldUnreleased), side.get(Word::ToldBeside));
            let right = match (side.get(Word::Told) - told_before, sent.checked_sub(unreleased), self.scenario.job) {
                (1, Some(released), Job::Receive) => {
                    [Of::ReleasedLeast, Of::ReleasedMost].iter().any(|of| self.board.get(who, *of) == released)
                }
                // What is released is in the file.
                (1, Some(released), _) => released <= self.book.came(who),
                _ => false,
            };
            if !right {
                let of = |of| self.board.get(who, of);
                let text = format!(
                    "sender {who} was told {unreleased} unreleased of {sent}, with {} to {} released, and {} in the file",
                    of(Of::ReleasedLeast),
                    of(Of::ReleasedMost),
                    self.book.came(who)
                );
                self.faults.push(Fault::new(Kind::Miscounted, 1, text));
            }
        }
        Ok(())
    }

    /// All end in order, the receiver after the last message; then the accounts are made up.
    fn end(&mut self, host: &mut Host, cast: &mut Cast) -> Result<(), Stop> {
        self.wait(cast, "all sides to meet", |_, cast| Ok(cast.sides().iter().all(|side| side.is_met())))?;
        cast.sides().iter().for_each(|side| side.journal.set(Word::Stop, 1));
        self.wait(cast, "the senders to end", |run, cast| {
            let threads = run.accounts.iter().filter(|account| account.is_thread && !account.is_dead);
            let mut ended = threads.map(|thread| run.board.get(thread.who, Of::Ended) == 1);
            Ok(cast.senders.iter().all(|side| side.get(Word::State) == DONE)
                && (run.scenario.job == Job::Append || ended.all(|ended| ended)))
        })?;
        if self.scenario.job != Job::Append {
            // Nobody's account: it says that this is the end.
            let who = std::mem::replace(&mut self.who, 0);
            let last = self.start(host, Job::Send)?;
            self.who = who;
            self.accounts.retain(|account| account.who != 0);
            cast.senders.push(last);
        }
        self.wait(cast, "all to end", |_, cast| Ok(cast.sides().iter().all(|side| side.get(Word::State) == DONE)))?;
        for side in cast.sides() {
            side.await_death();
            self.storm.tally(side);
            self.settle(side);
        }
        self.book.read()?;
        self.faults.extend(grown(&self.holdings));
        if self.scenario.job != Job::Receive {
            self.storm.report.messages_in_files += self.book.messages;
        }
        self.faults.append(&mut self.book.faults);
        for account in &self.accounts {
            let who = account.who;
            self.faults.extend(account.owed.judge(who, self.sent(who), self.came(who)));
            let released = (self.board.get(who, Of::ReleasedLeast), self.board.get(who, Of::ReleasedMost));
            if self.scenario.job == Job::Receive && !account.is_dead && released.0 != released.1 {
                let text = format!("all are done, and of sender {who} {released:?} were released");
                self.faults.push(Fault::new(Kind::Miscounted, 1, text));
            }
        }
        Ok(())
    }
}

fn who_of(side: &Side) -> u64 {
    side.plan.crowd.as_ref().expect("it is one of many").who
}

/// A number as (sender, message).
fn numbers(number: u64) -> (u64, u64) {
    (number >> 32, number - numbered(number >> 32, 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torture::message::Pattern;
    use pelton::{RecordFileOptions, Sink as _};

    #[test]
    fn what_is_owed_is_exact() {
        let judge = |owed: Owed, came| owed.judge(1, (10, 14), came).map(|fault| (fault.kind, fault.count));
        for owed in [Owed::All, Owed::Flushed, Owed::Any] {
            assert_eq!([judge(owed, 10), judge(owed, 14)], [None, None], "{owed:?}");
            assert_eq!(judge(owed, 16), Some((Kind::Garbage, 2)), "{owed:?}");
        }
        assert_eq!(judge(Owed::All, 12), Some((Kind::Garbage, 1)), "a torn batch");
        assert_eq!([judge(Owed::Flushed, 12), judge(Owed::Any, 12), judge(Owed::Any, 0)], [None; 3]);
        assert_eq!(judge(Owed::All, 7), Some((Kind::Lost, 3)));
        assert_eq!(judge(Owed::Flushed, 7), Some((Kind::Lost, 3)));
    }

    /// A file of messages (sender, which), one a write.
    fn file(messages: &[(u64, u64)], spoil: impl Fn(&mut Vec<u8>)) -> (tempfile::TempDir, Book) {
        let place = tempfile::tempdir().unwrap();
        let sizes = Sizes { seed: 5, bytes_min: HEADER_BYTES as u64, bytes_max: 200 };
        let path = place.path().join("log");
        let mut file = RecordFileOptions::new().rotate_bytes(1000).open(&path).unwrap();
        for (seq, (who, nth)) in (1u32..).zip(messages) {
            let number = numbered(*who, *nth);
            let mut payload = vec![0; sizes.of(number)];
            Pattern::new(200).write(number, &mut payload);
            spoil(&mut payload);
            let mut bytes = (u64::from(seq) << 32 | payload.len() as u64).to_le_bytes().to_vec();
            bytes.extend(&payload);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
            file.write(&[pelton::Run::new(pelton::LaneId([1, 2]), None, seq, 1, &bytes)]).unwrap();
        }
        let book = Book::new(path, sizes);
        (place, book)
    }

    fn faults_of(messages: &[(u64, u64)], spoil: impl Fn(&mut Vec<u8>)) -> Vec<(Kind, u64)> {
        let (_place, mut book) = file(messages, spoil);
        assert!(book.read().is_ok());
        assert_eq!(book.messages, messages.len() as u64);
        book.faults.iter().map(|fault| (fault.kind, fault.count)).collect()
    }

    #[test]
    fn a_book_reads_all_files_of_a_rotation_and_finds_what_is_wrong_in_them() {
        let right: Vec<_> = (1..40).flat_map(|nth| [(1, nth), (2, nth)]).collect();
        assert_eq!(faults_of(&right, |_| ()), []);
        let with = |place: usize, message| {
            let mut all = right.clone();
            all.insert(place, message);
            all
        };
        assert_eq!(faults_of(&with(20, (1, 5)), |_| ())[0], (Kind::Duplicate, 6));
        assert_eq!(faults_of(&with(78, (1, 43)), |_| ()), [(Kind::Lost, 3)]);
        assert_eq!(faults_of(&right, |payload| payload[15] ^= 1).len(), right.len());
    }

    #[test]
    fn a_torn_end_is_none_of_the_book_until_it_is_whole() {
        let (place, mut book) = file(&[(1, 1), (1, 2)], |_| ());
        let path = place.path().join("log");
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 3]).unwrap();
        assert!(book.read().is_ok());
        assert_eq!(book.came(1), 1);
        fs::write(&path, &whole).unwrap();
        assert!(book.read().is_ok());
        assert_eq!((book.came(1), book.faults.len()), (2, 0));
    }
}
