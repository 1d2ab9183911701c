//! Pelton's sides of a storm of many senders: who sends, who receives from all of them, who flushes to a record file, and threads
//! that append to one. Every message says whose it is and which of theirs; how far each sender has come stands on the board, which
//! all processes of a scenario map.

use super::journal::{Journal, READY, Word, Words};
use super::message::{Dice, HEADER_BYTES, Pattern, check};
use super::side::{By, Plan, Waits, name, note_told, options, pause, reach, reaching, wait_readable};
use pelton::{Error, Flush, Kind, Receiver, RecordFile, RecordFileOptions, Run, Sender, Senders, Sent, Sink};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// What a process of such a storm does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Job {
    Send,
    Receive,
    Flush,
    /// Threads that append, and nobody else.
    Append,
}

/// What is said to it besides the rest of the plan.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Part {
    pub job: Job,
    pub board: PathBuf,
    /// The number of the first sender in this process; 0 is who says that this is the end.
    pub who: u64,
    /// So many senders are threads of it.
    pub threads: u64,
    /// Of a path channel.
    pub lanes: u32,
    /// A receiver is told of who comes and goes.
    pub announce: bool,
    pub file: PathBuf,
    pub flush_bytes: u64,
    pub flush_interval_us: Option<u64>,
    pub rotate_bytes: Option<u64>,
}

/// How many senders a scenario may have, one after another.
pub const SENDERS_MAX: u64 = 2048;
const WORDS: usize = 8;

/// What stands on the board for each sender. Those of a sender are written by it, the others by the receiver that there is.
#[derive(Clone, Copy, Debug)]
#[repr(usize)]
pub enum Of {
    /// Sent up to here at most.
    SentMost,
    /// Sent up to here at least; of threads that append: flushed.
    SentLeast,
    /// 1: it has ended in order.
    Ended,
    /// The last one given to a receiver.
    Given,
    /// Released up to here at most.
    ReleasedMost,
    /// Released up to here at least.
    ReleasedLeast,
}

/// The board of a scenario.
pub struct Board(Words);

impl Board {
    pub fn create(path: &Path) -> io::Result<Board> {
        Words::create(path, SENDERS_MAX as usize * WORDS).map(Board)
    }

    pub fn open(path: &Path) -> io::Result<Board> {
        Words::open(path, SENDERS_MAX as usize * WORDS).map(Board)
    }

    pub fn get(&self, who: u64, of: Of) -> u64 {
        self.0.load(who as usize * WORDS + of as usize)
    }

    fn set(&self, who: u64, of: Of, value: u64) {
        self.0.store(who as usize * WORDS + of as usize, value);
    }
}

/// The number that a message bears: whose, and which of theirs, from 1 on.
pub fn numbered(who: u64, nth: u64) -> u64 {
    who << 32 | nth
}

/// What [`numbered`] put together, of a message that has room for it.
pub fn told_by(payload: &[u8]) -> Option<(u64, u64, u64)> {
    let number = u64::from_le_bytes(*payload.first_chunk()?);
    (payload.len() >= HEADER_BYTES && number >> 32 < SENDERS_MAX).then_some((
        number,
        number >> 32,
        number & 0xffff_ffff,
    ))
}

pub fn run(plan: &Plan, part: &Part, journal: &Journal) -> pelton::Result<()> {
    let board = Board::open(&part.board).map_err(system("opening the board"))?;
    match part.job {
        Job::Send => send(plan, part, &board, journal),
        Job::Receive => receive(plan, part, &board, journal),
        Job::Flush => flush(plan, part, journal),
        Job::Append => append(plan, part, &board, journal),
    }
}

fn system(what: &str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::System { what: what.to_owned(), source }
}

/// One sender, and what it sends.
struct Line<'a> {
    plan: &'a Plan,
    board: &'a Board,
    who: u64,
    /// Which message is next.
    next: u64,
    dice: Dice,
    pattern: Pattern,
    buffer: Vec<u8>,
}

impl<'a> Line<'a> {
    fn new(plan: &'a Plan, board: &'a Board, who: u64) -> Line<'a> {
        let (dice, pattern) = (Dice::new(plan.turn ^ who), Pattern::new(plan.sizes.bytes_max));
        Line { plan, board, who, next: 1, dice, pattern, buffer: Vec::new() }
    }

    fn size(&self, nth: u64) -> usize {
        self.plan.sizes.of(numbered(self.who, nth))
    }

    /// The next message's bytes, of which it is said that they may be sent.
    fn write(&mut self) {
        self.buffer.resize(self.size(self.next), 0);
        self.pattern.write(numbered(self.who, self.next), &mut self.buffer);
        self.board.set(self.who, Of::SentMost, self.next);
    }

    fn sent(&mut self, messages: u64) {
        self.next += messages;
        self.board.set(self.who, Of::SentLeast, self.next - 1);
    }

    /// One message, or a batch, in one of the ways there are.
    fn send(&mut self, sender: &mut Sender) -> pelton::Result<()> {
        match self.dice.below(4) {
            0 => self.send_batch(sender),
            1 => {
                let (size, most) = (self.size(self.next), self.size(self.next) + self.dice.below(40) as usize);
                let Some(mut room) = sender.try_reserve(most.min(sender.message_bytes_max() as usize))? else {
                    return self.send_copied(sender);
                };
                self.pattern.write(numbered(self.who, self.next), &mut room[..size]);
                self.board.set(self.who, Of::SentMost, self.next);
                room.commit_bytes(size)?;
                self.sent(1);
                Ok(())
            }
            _ => self.send_copied(sender),
        }
    }

    fn send_copied(&mut self, sender: &mut Sender) -> pelton::Result<()> {
        self.write();
        if self.plan.waits != Waits::Poll {
            sender.send(&self.buffer)?;
        }
        while self.plan.waits == Waits::Poll && sender.try_send(&self.buffer)? != Sent::Sent {
            if sender.arm(self.buffer.len())? {
                wait_readable(sender);
            }
            if self.dice.one_in(2) {
                sender.disarm();
            }
        }
        self.sent(1);
        Ok(())
    }

    fn send_batch(&mut self, sender: &mut Sender) -> pelton::Result<()> {
        let sizes: Vec<usize> = (0..2 + self.dice.below(6)).map(|more| self.size(self.next + more)).collect();
        let total: usize = sizes.iter().map(|size| size + 16).sum();
        if total as u64 > sender.message_bytes_max() {
            return self.send_copied(sender);
        }
        let Some(mut batch) = sender.try_reserve_batch(sizes.iter().copied())? else { return self.send_copied(sender) };
        for (nth, size) in (self.next..).zip(&sizes) {
            let room = batch.reserve(*size).expect("the room was asked for");
            self.pattern.write(numbered(self.who, nth), room);
        }
        self.board.set(self.who, Of::SentMost, self.next + sizes.len() as u64 - 1);
        batch.commit()?;
        self.sent(sizes.len() as u64);
        Ok(())
    }
}

fn send(plan: &Plan, part: &Part, board: &Board, journal: &Journal) -> pelton::Result<()> {
    let mut sender = match plan.by {
        By::Path => options(plan).lanes(part.lanes).create_sender(plan.place.join("c"))?,
        By::Connect => reach(|| reaching(plan).connect_sender(&name(plan)))?,
    };
    let met = |sender: &Sender| {
        // Whose messages die with whom hangs on that.
        journal.set(Word::First, sender.peer().map_or(0, |peer| peer.pid.into()));
        journal.add(Word::Met, 1);
    };
    met(&sender);
    journal.set(Word::State, READY);
    let mut line = Line::new(plan, board, part.who);
    let mut messages = 0;
    let mut done = Ok(());
    loop {
        // Who says that this is the end says nothing else.
        let is_over = journal.get(Word::Stop) != 0 || (part.who == 0 && line.next > 1);
        done = match (done, is_over) {
            (Err(Error::PeerDied { unreleased }), _) => {
                note_told(journal, unreleased, line.next - 1);
                // Also one that is to end has a receiver to come.
                if plan.by == By::Connect {
                    sender.resume()?;
                    met(&sender);
                }
                Ok(())
            }
            (Err(error), _) => return Err(error),
            (Ok(()), false) => {
                journal.set(Word::Messages, line.next - 1);
                pause(plan, &mut messages);
                if part.who == 0 { line.send_copied(&mut sender) } else { line.send(&mut sender) }
            }
            (Ok(()), true) => match sender.drain() {
                Ok(()) => return sender.close(),
                died => died,
            },
        };
    }
}

/// A thread that sends, until the storm says that it is enough.
fn send_by_thread(plan: &Plan, part: &Part, senders: &Senders, nth: u64) -> pelton::Result<()> {
    let board = Board::open(&part.board).map_err(system("opening the board"))?;
    let journal = Journal::open(&plan.journal).map_err(system("opening the journal"))?;
    let mut sender = senders.sender()?;
    let mut line = Line::new(plan, &board, part.who + nth);
    let mut messages = 0;
    while journal.get(Word::Stop) == 0 {
        line.send(&mut sender)?;
        pause(plan, &mut messages);
    }
    sender.drain()?;
    board.set(line.who, Of::Ended, 1);
    Ok(())
}

/// What a receiver knows of what has come.
struct Noted<'a> {
    plan: &'a Plan,
    board: &'a Board,
    journal: &'a Journal,
    /// Of each sender, the last that came to this process.
    last: HashMap<u64, u64>,
    /// Of each, the last that came to one before.
    before: Vec<u64>,
    is_over: bool,
}

impl Noted<'_> {
    /// A message has come: whose, and which. `marked`: as given again, if it said.
    fn came(&mut self, payload: &[u8], marked: Option<bool>) -> Option<(u64, u64)> {
        let garbage = |problem: &str| {
            self.journal.explain(problem);
            self.journal.add(Word::Garbage, 1);
        };
        let Some((number, who, nth)) = told_by(payload) else {
            garbage(&format!("{} bytes that are no message", payload.len()));
            return None;
        };
        if let Err(problem) = check(&self.plan.sizes, number, payload) {
            garbage(&problem);
        }
        self.journal.add(Word::Messages, 1);
        self.journal.add(Word::Bytes, payload.len() as u64);
        if who == 0 {
            self.is_over = true;
            return None;
        }
        let board = self.board;
        let last = self.last.entry(who).or_insert_with(|| {
            let most = board.get(who, Of::ReleasedMost);
            // One before may have released it, and not have come to say so.
            if nth == most + 1 { most } else { board.get(who, Of::ReleasedLeast) }
        });
        if nth != *last + 1 {
            self.journal.jump(numbered(who, *last + 1), number);
        }
        *last = nth;
        board.set(who, Of::Given, nth);
        match marked {
            Some(true) => self.journal.add(Word::Again, 1),
            Some(false) if nth <= self.before[who as usize] => self.journal.add(Word::Unmarked, 1),
            _ => {}
        }
        Some((who, nth))
    }

    /// What `release` releases is said to be, before and after.
    fn release(&self, came: &[(u64, u64)], release: impl FnOnce()) {
        came.iter().for_each(|(who, nth)| self.board.set(*who, Of::ReleasedMost, *nth));
        release();
        came.iter().for_each(|(who, nth)| self.board.set(*who, Of::ReleasedLeast, *nth));
    }

    /// The message that is there, or some. False: none is.
    fn take(&mut self, receiver: &mut Receiver, dice: &mut Dice) -> pelton::Result<bool> {
        if dice.one_in(2) {
            let Some(message) = receiver.try_receive()? else { return Ok(false) };
            if message.kind() == Kind::Message {
                let came = self.came(&message, Some(message.is_redelivered()));
                self.release(came.as_slice(), || drop(message));
            }
            return Ok(true);
        }
        let most = 1 + dice.below(20);
        let Some(mut batch) = receiver.try_receive_batch()? else { return Ok(false) };
        let (mut came, mut failed) = (Vec::new(), None);
        for _ in 0..most {
            match batch.next() {
                Ok(Some(payload)) => came.extend(self.came(payload, None)),
                Ok(None) => break,
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        self.release(&came, || drop(batch));
        failed.map_or(Ok(true), Err)
    }
}

/// On a path the end of all senders is told once, and there are more to come.
fn goes_on(plan: &Plan, error: &Error) -> bool {
    plan.by == By::Path && (error.is_peer_died() || error.is_closed())
}

fn receiver(plan: &Plan, part: &Part) -> pelton::Result<Receiver> {
    match plan.by {
        By::Path => options(plan).lanes(part.lanes).create_receiver(plan.place.join("c")),
        By::Connect => options(plan).announce(part.announce).gather_at(&name(plan)),
    }
}

fn ready(journal: &Journal) {
    journal.add(Word::Met, 1);
    journal.set(Word::State, READY);
}

fn receive(plan: &Plan, part: &Part, board: &Board, journal: &Journal) -> pelton::Result<()> {
    let before = (0..SENDERS_MAX).map(|who| board.get(who, Of::Given)).collect();
    let mut noted = Noted { plan, board, journal, last: HashMap::new(), before, is_over: false };
    let mut receiver = receiver(plan, part)?;
    ready(journal);
    let (mut dice, mut messages) = (Dice::new(plan.turn), 0);
    loop {
        match noted.take(&mut receiver, &mut dice) {
            Ok(true) => pause(plan, &mut messages),
            Err(error) if goes_on(plan, &error) => {}
            Err(error) => return Err(error),
            // What dead ones had sent may come after the end.
            Ok(false) if noted.is_over => return receiver.close(),
            Ok(false) if plan.waits == Waits::Poll => match receiver.arm() {
                Ok(true) => wait_readable(&receiver),
                Ok(false) => {}
                Err(error) if goes_on(plan, &error) => {}
                Err(error) => return Err(error),
            },
            Ok(false) => match receiver.receive_batch() {
                // Taken by the next turn.
                Ok(batch) => drop(batch),
                Err(error) if goes_on(plan, &error) => {}
                Err(error) => return Err(error),
            },
        }
    }
}

/// A record file that is told when it is the end, and takes its time.
struct File {
    file: RecordFile,
    journal: Journal,
    dice: Dice,
    is_over: bool,
}

impl Sink for File {
    fn write(&mut self, runs: &[Run<'_>]) -> pelton::Result<()> {
        let is_end = |payload: &[u8]| matches!(told_by(payload), Some((_, 0, _)));
        if !self.is_over && runs.iter().flat_map(Run::payloads).any(is_end) {
            self.is_over = true;
            return Err(Error::Sink("it is the end".to_owned()));
        }
        self.file.write(runs)?;
        let (messages, bytes) = runs.iter().fold((0, 0), |(messages, bytes), run| {
            (messages + u64::from(run.messages()), bytes + run.bytes().len() as u64)
        });
        self.journal.add(Word::Messages, messages);
        self.journal.add(Word::Bytes, bytes);
        // To be killed before it is released.
        if self.dice.one_in(4) {
            thread::sleep(Duration::from_micros(self.dice.below(300)));
        }
        Ok(())
    }

    fn sync(&mut self) -> pelton::Result<()> {
        self.file.sync()
    }

    fn due(&self) -> Option<Instant> {
        self.file.due()
    }

    fn last_seq(&self, lane: pelton::LaneId) -> Option<u32> {
        self.file.last_seq(lane)
    }
}

fn file(plan: &Plan, part: &Part) -> pelton::Result<File> {
    let mut options = RecordFileOptions::new();
    if let Some(bytes) = part.rotate_bytes {
        options = options.rotate_bytes(bytes);
    }
    let journal = Journal::open(&plan.journal).map_err(system("opening the journal"))?;
    Ok(File { file: options.open(&part.file)?, journal, dice: Dice::new(plan.turn), is_over: false })
}

fn flush_options(plan: &Plan, part: &Part) -> pelton::Options {
    let interval = part.flush_interval_us.map(Duration::from_micros);
    options(plan).flush_bytes(part.flush_bytes).flush_interval(interval)
}

fn flush(plan: &Plan, part: &Part, journal: &Journal) -> pelton::Result<()> {
    let sink = file(plan, part)?;
    let receiver = receiver(plan, part)?;
    let senders = (part.threads > 0).then(|| receiver.senders()).transpose()?;
    let mut flush = flush_options(plan, part).flush(receiver, sink)?;
    ready(journal);
    let threads: Vec<_> = (0..part.threads)
        .map(|nth| {
            let (plan, part) = (plan.clone(), part.clone());
            let senders = senders.clone().expect("made for them");
            thread::spawn(move || {
                if let Err(error) = send_by_thread(&plan, &part, &senders, nth) {
                    // Without its end the storm would wait for it.
                    panic!("a thread that sends: {error}");
                }
            })
        })
        .collect();
    loop {
        match flush_on(plan, &mut flush) {
            Ok(()) => {}
            Err(Error::Sink(_)) => break,
            Err(error) if goes_on(plan, &error) => {}
            Err(error) => return Err(error),
        }
        if threads.iter().any(|thread| thread.is_finished()) && journal.get(Word::Stop) == 0 {
            return Err(Error::Sink("a thread that sends has ended by itself".to_owned()));
        }
    }
    match flush.sync() {
        Err(error) if !goes_on(plan, &error) => Err(error),
        _ => Ok(()),
    }
}

fn flush_on(plan: &Plan, flush: &mut Flush) -> pelton::Result<()> {
    if plan.waits != Waits::Poll {
        return flush.run_until(Instant::now() + Duration::from_secs(1)).map(|_| ());
    }
    let due = flush.turn()?;
    if flush.arm() {
        let left = due.map(|due| due.saturating_duration_since(Instant::now()));
        let left = left.map(|left| Timespec::try_from(left).expect("it is short"));
        // Interrupted is as good.
        let _ = poll(&mut [PollFd::new(&*flush, PollFlags::IN)], left.as_ref());
    }
    Ok(())
}

fn append(plan: &Plan, part: &Part, board: &Board, journal: &Journal) -> pelton::Result<()> {
    let appenders = flush_options(plan, part).append(file(plan, part)?)?;
    ready(journal);
    let append = |nth: u64| -> pelton::Result<u64> {
        let (mut appender, mut line) = (appenders.appender()?, Line::new(plan, board, part.who + nth));
        let mut messages = 0;
        while journal.get(Word::Stop) == 0 {
            line.write();
            appender.append(&line.buffer)?;
            line.next += 1;
            if line.dice.one_in(300) {
                appender.flush()?;
                board.set(line.who, Of::SentLeast, line.next - 1);
            }
            pause(plan, &mut messages);
        }
        Ok(line.next - 1)
    };
    let appended = thread::scope(|scope| {
        let threads: Vec<_> = (0..part.threads).map(|nth| scope.spawn(move || append(nth))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("it does not panic"))
            .collect::<pelton::Result<Vec<u64>>>()
    })?;
    appenders.sync()?;
    for (who, last) in (part.who..).zip(appended) {
        board.set(who, Of::SentLeast, last);
    }
    Ok(())
}
