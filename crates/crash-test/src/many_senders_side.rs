//! The sides of pelton in a scenario of many senders: a sender, a receiver of all of them, a flush to a record file, or
//! threads that append to one. Every message has the number of its sender, and its own. The progress of each sender is
//! in a table that all processes of the scenario map.

use super::journal::{Journal, READY, Word, Words};
use super::message::{HEADER_BYTES, Pattern, Random, check};
use super::plan::{Job, ManySendersPlan, Plan, Transport, WaitMode};
use super::side::{connect_retrying, connecting_options, name, options, pause, record_death, wait_readable};
use pelton::{Armed, Chunk, Error, Event, Flush, Receiver, RecordFile, RecordFileOptions, Sender, Senders, Sent, Sink};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::{
    collections::HashMap,
    io,
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// The most senders of a scenario, one after another.
pub const SENDERS_MAX: u64 = 2048;
const WORDS: usize = 8;

/// The words of a sender in the table. The sender writes the first three, its receiver the others.
#[derive(Clone, Copy, Debug)]
#[repr(usize)]
pub enum SenderWord {
    /// Sent up to here at most.
    SentMost,
    /// Sent up to here at least; for appending threads: flushed.
    SentLeast,
    /// 1: ended in order.
    Ended,
    /// The last message delivered to a receiver.
    Delivered,
    /// Released up to here at most.
    ReleasedMost,
    /// Released up to here at least.
    ReleasedLeast,
}

/// The table of a scenario.
pub struct SenderTable(Words);

impl SenderTable {
    pub fn create(path: &Path) -> io::Result<SenderTable> {
        Words::create(path, SENDERS_MAX as usize * WORDS).map(SenderTable)
    }

    pub fn open(path: &Path) -> io::Result<SenderTable> {
        Words::open(path, SENDERS_MAX as usize * WORDS).map(SenderTable)
    }

    pub fn get(&self, sender_id: u64, word: SenderWord) -> u64 {
        self.0.load(sender_id as usize * WORDS + word as usize)
    }

    fn set(&self, sender_id: u64, word: SenderWord, value: u64) {
        self.0.store(sender_id as usize * WORDS + word as usize, value);
    }
}

/// The number of a message: its sender, and its index among the messages of that sender, from 1 on.
pub fn message_number(sender_id: u64, index: u64) -> u64 {
    sender_id << 32 | index
}

/// Reads the number of a message with a header: the whole number, its sender and its index.
pub fn parse_number(payload: &[u8]) -> Option<(u64, u64, u64)> {
    let number = u64::from_le_bytes(*payload.first_chunk()?);
    (payload.len() >= HEADER_BYTES && number >> 32 < SENDERS_MAX).then_some((
        number,
        number >> 32,
        number & 0xffff_ffff,
    ))
}

pub fn run(plan: &Plan, part: &ManySendersPlan, journal: &Journal) -> pelton::Result<()> {
    let sender_table = SenderTable::open(&part.sender_table).map_err(system("opening the table"))?;
    match part.job {
        Job::Send => send(plan, part, &sender_table, journal),
        Job::Receive => receive(plan, part, &sender_table, journal),
        Job::Flush => flush(plan, part, journal),
        Job::Append => append(plan, part, &sender_table, journal),
    }
}

fn system(what: &str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::System { what: what.to_owned(), error: source }
}

/// The state of one sender.
struct SenderState<'a> {
    plan: &'a Plan,
    sender_table: &'a SenderTable,
    sender_id: u64,
    /// The index of the next message.
    next: u64,
    random: Random,
    pattern: Pattern,
    buffer: Vec<u8>,
}

impl<'a> SenderState<'a> {
    fn new(plan: &'a Plan, sender_table: &'a SenderTable, sender_id: u64) -> SenderState<'a> {
        let (random, pattern) = (Random::new(plan.choices_seed ^ sender_id), Pattern::new(plan.sizes.bytes_max));
        SenderState { plan, sender_table, sender_id, next: 1, random, pattern, buffer: Vec::new() }
    }

    fn size(&self, index: u64) -> usize {
        self.plan.sizes.of(message_number(self.sender_id, index))
    }

    /// Writes the bytes of the next message, and records that it may be sent.
    fn write(&mut self) {
        self.buffer.resize(self.size(self.next), 0);
        self.pattern.write(message_number(self.sender_id, self.next), &mut self.buffer);
        self.sender_table.set(self.sender_id, SenderWord::SentMost, self.next);
    }

    fn sent(&mut self, messages: u64) {
        self.next += messages;
        self.sender_table.set(self.sender_id, SenderWord::SentLeast, self.next - 1);
    }

    /// Sends one message, or a batch, by a random method.
    fn send(&mut self, sender: &mut Sender) -> pelton::Result<()> {
        match self.random.below(4) {
            0 => self.send_batch(sender),
            1 => {
                let (size, most) = (self.size(self.next), self.size(self.next) + self.random.below(40) as usize);
                let Some(mut space) = sender.try_reserve(most.min(sender.message_bytes_max() as usize))? else {
                    return self.send_copied(sender);
                };
                self.pattern.write(message_number(self.sender_id, self.next), &mut space[..size]);
                self.sender_table.set(self.sender_id, SenderWord::SentMost, self.next);
                space.commit_bytes(size)?;
                self.sent(1);
                Ok(())
            }
            _ => self.send_copied(sender),
        }
    }

    fn send_copied(&mut self, sender: &mut Sender) -> pelton::Result<()> {
        self.write();
        if self.plan.wait_mode != WaitMode::Poll {
            sender.send(&self.buffer)?;
        }
        while self.plan.wait_mode == WaitMode::Poll && sender.try_send(&self.buffer)? != Sent::Sent {
            if sender.arm(self.buffer.len())?.is_waiting() {
                wait_readable(sender);
            }
            if self.random.one_in(2) {
                sender.disarm();
            }
        }
        self.sent(1);
        Ok(())
    }

    fn send_batch(&mut self, sender: &mut Sender) -> pelton::Result<()> {
        let sizes: Vec<usize> = (0..2 + self.random.below(6)).map(|more| self.size(self.next + more)).collect();
        let total: usize = sizes.iter().map(|size| size + 16).sum();
        if total as u64 > sender.message_bytes_max() {
            return self.send_copied(sender);
        }
        let Some(mut batch) = sender.try_reserve_batch(sizes.iter().copied())? else { return self.send_copied(sender) };
        for (index, size) in (self.next..).zip(&sizes) {
            let space = batch.reserve(*size).expect("the batch has this space");
            self.pattern.write(message_number(self.sender_id, index), space);
        }
        self.sender_table.set(self.sender_id, SenderWord::SentMost, self.next + sizes.len() as u64 - 1);
        batch.commit()?;
        self.sent(sizes.len() as u64);
        Ok(())
    }
}

fn send(plan: &Plan, part: &ManySendersPlan, sender_table: &SenderTable, journal: &Journal) -> pelton::Result<()> {
    let mut sender = match plan.transport {
        Transport::Path => options(plan).lanes(part.lanes).create_sender(plan.directory.join("c"))?,
        Transport::Connect => connect_retrying(|| connecting_options(plan).connect_sender(&name(plan)))?,
    };
    let record_connection = |sender: &Sender| {
        // The test needs the peer to know whose death loses which messages.
        journal.set(Word::First, sender.peer().map_or(0, |peer| peer.pid.into()));
        journal.add(Word::Connections, 1);
    };
    record_connection(&sender);
    journal.set(Word::State, READY);
    let mut state = SenderState::new(plan, sender_table, part.sender_id);
    let mut messages = 0;
    let mut done = Ok(());
    loop {
        // The sender of the end sends only that.
        let has_ended = journal.get(Word::Stop) != 0 || (part.sender_id == 0 && state.next > 1);
        done = match (done, has_ended) {
            (Err(Error::PeerDied { unreleased }), _) => {
                record_death(journal, unreleased, state.next - 1);
                // A sender that is to end waits for a successor of its receiver too.
                if plan.transport == Transport::Connect {
                    sender.resume()?;
                    record_connection(&sender);
                }
                Ok(())
            }
            (Err(error), _) => return Err(error),
            (Ok(()), false) => {
                journal.set(Word::Messages, state.next - 1);
                pause(plan, &mut messages);
                if part.sender_id == 0 { state.send_copied(&mut sender) } else { state.send(&mut sender) }
            }
            (Ok(()), true) => match sender.wait_released() {
                Ok(()) => return sender.close(),
                died => died,
            },
        };
    }
}

/// A sending thread, which runs until the test ends it.
fn send_by_thread(plan: &Plan, part: &ManySendersPlan, senders: &Senders, index: u64) -> pelton::Result<()> {
    let sender_table = SenderTable::open(&part.sender_table).map_err(system("opening the table"))?;
    let journal = Journal::open(&plan.journal).map_err(system("opening the journal"))?;
    let mut sender = senders.sender()?;
    let mut state = SenderState::new(plan, &sender_table, part.sender_id + index);
    let mut messages = 0;
    while journal.get(Word::Stop) == 0 {
        state.send(&mut sender)?;
        pause(plan, &mut messages);
    }
    sender.wait_released()?;
    sender_table.set(state.sender_id, SenderWord::Ended, 1);
    Ok(())
}

/// The received messages, as a receiver knows them.
struct ReceiverState<'a> {
    plan: &'a Plan,
    sender_table: &'a SenderTable,
    journal: &'a Journal,
    /// The last message of each sender that this process received.
    last: HashMap<u64, u64>,
    /// The last message of each sender that a predecessor received.
    before: Vec<u64>,
    has_ended: bool,
}

impl ReceiverState<'_> {
    /// Checks and records a received message. `marked`: its redelivery mark, if known.
    fn record_message(&mut self, payload: &[u8], marked: Option<bool>) -> Option<(u64, u64)> {
        let garbage = |problem: &str| {
            self.journal.explain(problem);
            self.journal.add(Word::Garbage, 1);
        };
        let Some((number, sender_id, index)) = parse_number(payload) else {
            garbage(&format!("{} bytes that are no message", payload.len()));
            return None;
        };
        if let Err(problem) = check(&self.plan.sizes, number, payload) {
            garbage(&problem);
        }
        self.journal.add(Word::Messages, 1);
        self.journal.add(Word::Bytes, payload.len() as u64);
        if sender_id == 0 {
            self.has_ended = true;
            return None;
        }
        let sender_table = self.sender_table;
        let last = self.last.entry(sender_id).or_insert_with(|| {
            let most = sender_table.get(sender_id, SenderWord::ReleasedMost);
            // A predecessor may have released it and died before it recorded that.
            if index == most + 1 { most } else { sender_table.get(sender_id, SenderWord::ReleasedLeast) }
        });
        if index != *last + 1 {
            self.journal.jump(message_number(sender_id, *last + 1), number);
        }
        *last = index;
        sender_table.set(sender_id, SenderWord::Delivered, index);
        match marked {
            Some(true) => self.journal.add(Word::Redelivered, 1),
            Some(false) if index <= self.before[sender_id as usize] => self.journal.add(Word::Unmarked, 1),
            _ => {}
        }
        Some((sender_id, index))
    }

    /// Records a release before and after it.
    fn release(&self, received: &[(u64, u64)], release: impl FnOnce()) {
        received
            .iter()
            .for_each(|(sender_id, index)| self.sender_table.set(*sender_id, SenderWord::ReleasedMost, *index));
        release();
        received
            .iter()
            .for_each(|(sender_id, index)| self.sender_table.set(*sender_id, SenderWord::ReleasedLeast, *index));
    }

    /// Receives the next message, or several. False: there is none.
    fn take(&mut self, receiver: &mut Receiver, random: &mut Random) -> pelton::Result<bool> {
        if random.one_in(2) {
            let Some(event) = receiver.try_receive_event()? else { return Ok(false) };
            if let Event::Message(message) = event {
                let received = self.record_message(&message, Some(message.is_redelivered()));
                self.release(received.as_slice(), || drop(message));
            }
            return Ok(true);
        }
        let most = 1 + random.below(20);
        let Some(mut batch) = receiver.try_receive_batch()? else { return Ok(false) };
        let (mut received, mut failed) = (Vec::new(), None);
        for _ in 0..most {
            match batch.next() {
                Ok(Some(payload)) => received.extend(self.record_message(payload, None)),
                Ok(None) => break,
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        self.release(&received, || drop(batch));
        failed.map_or(Ok(true), Err)
    }
}

/// A path channel reports the end of all senders, and continues with successors.
fn continues_after(plan: &Plan, error: &Error) -> bool {
    plan.transport == Transport::Path && (error.is_peer_died() || error.is_closed())
}

fn receiver(plan: &Plan, part: &ManySendersPlan) -> pelton::Result<Receiver> {
    match plan.transport {
        Transport::Path => options(plan).lanes(part.lanes).create_receiver(plan.directory.join("c")),
        Transport::Connect => options(plan).membership_events(part.announce).gather_at(&name(plan)),
    }
}

fn ready(journal: &Journal) {
    journal.add(Word::Connections, 1);
    journal.set(Word::State, READY);
}

fn receive(plan: &Plan, part: &ManySendersPlan, sender_table: &SenderTable, journal: &Journal) -> pelton::Result<()> {
    let before = (0..SENDERS_MAX).map(|sender_id| sender_table.get(sender_id, SenderWord::Delivered)).collect();
    let mut state = ReceiverState { plan, sender_table, journal, last: HashMap::new(), before, has_ended: false };
    let mut receiver = receiver(plan, part)?;
    ready(journal);
    let (mut random, mut messages) = (Random::new(plan.choices_seed), 0);
    loop {
        match state.take(&mut receiver, &mut random) {
            Ok(true) => pause(plan, &mut messages),
            Err(error) if continues_after(plan, &error) => {}
            Err(error) => return Err(error),
            // Messages of dead senders may follow the end.
            Ok(false) if state.has_ended => return receiver.close(),
            Ok(false) if plan.wait_mode == WaitMode::Poll => match receiver.arm() {
                Ok(Armed::Waiting) => wait_readable(&receiver),
                Ok(Armed::Ready) => {}
                Err(error) if continues_after(plan, &error) => {}
                Err(error) => return Err(error),
            },
            Ok(false) => match receiver.receive_batch() {
                // The next round takes it.
                Ok(batch) => drop(batch),
                Err(error) if continues_after(plan, &error) => {}
                Err(error) => return Err(error),
            },
        }
    }
}

/// A record file that detects the end message, and delays some writes.
struct DelayedFile {
    file: RecordFile,
    journal: Journal,
    random: Random,
    has_ended: bool,
}

impl Sink for DelayedFile {
    fn write(&mut self, runs: &[Chunk<'_>]) -> pelton::Result<()> {
        let is_end = |payload: &[u8]| matches!(parse_number(payload), Some((_, 0, _)));
        if !self.has_ended && runs.iter().flat_map(Chunk::payloads).any(is_end) {
            self.has_ended = true;
            return Err(Error::Sink("the end message".to_owned()));
        }
        self.file.write(runs)?;
        let (messages, bytes) = runs.iter().fold((0, 0), |(messages, bytes), run| {
            (messages + u64::from(run.message_count()), bytes + run.bytes().len() as u64)
        });
        self.journal.add(Word::Messages, messages);
        self.journal.add(Word::Bytes, bytes);
        // So that a kill may hit before the release.
        if self.random.one_in(4) {
            thread::sleep(Duration::from_micros(self.random.below(300)));
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

fn open_file(plan: &Plan, part: &ManySendersPlan) -> pelton::Result<DelayedFile> {
    let mut options = RecordFileOptions::new();
    if let Some(bytes) = part.rotate_bytes {
        options = options.rotate_bytes(bytes);
    }
    let journal = Journal::open(&plan.journal).map_err(system("opening the journal"))?;
    Ok(DelayedFile {
        file: options.open(&part.file)?,
        journal,
        random: Random::new(plan.choices_seed),
        has_ended: false,
    })
}

fn flush_options<M>(plan: &Plan, part: &ManySendersPlan) -> pelton::Options<M> {
    let interval = part.flush_interval_us.map(Duration::from_micros);
    let options: pelton::Options = options(plan);
    options.flush_bytes(part.flush_bytes).flush_interval(interval).cast()
}

fn flush(plan: &Plan, part: &ManySendersPlan, journal: &Journal) -> pelton::Result<()> {
    let sink = open_file(plan, part)?;
    let receiver = receiver(plan, part)?;
    let senders = (part.threads > 0).then(|| receiver.senders()).transpose()?;
    let mut flush = Flush::new(&flush_options(plan, part), receiver, sink)?;
    ready(journal);
    let threads: Vec<_> = (0..part.threads)
        .map(|index| {
            let (plan, part) = (plan.clone(), part.clone());
            let senders = senders.clone().expect("created for the threads");
            thread::spawn(move || {
                if let Err(error) = send_by_thread(&plan, &part, &senders, index) {
                    // Without this, the test would wait for the thread.
                    panic!("a sending thread: {error}");
                }
            })
        })
        .collect();
    loop {
        match flush_step(plan, &mut flush) {
            Ok(()) => {}
            Err(Error::Sink(_)) => break,
            Err(error) if continues_after(plan, &error) => {}
            Err(error) => return Err(error),
        }
        if threads.iter().any(|thread| thread.is_finished()) && journal.get(Word::Stop) == 0 {
            return Err(Error::Sink("a sending thread has ended without a request".to_owned()));
        }
    }
    match flush.sync() {
        Err(error) if !continues_after(plan, &error) => Err(error),
        _ => Ok(()),
    }
}

fn flush_step(plan: &Plan, flush: &mut Flush) -> pelton::Result<()> {
    if plan.wait_mode != WaitMode::Poll {
        return flush.run_until(Instant::now() + Duration::from_secs(1)).map(|_| ());
    }
    let due = flush.tick()?;
    if flush.arm().is_waiting() {
        let left = due.map(|due| due.saturating_duration_since(Instant::now()));
        let left = left.map(|left| Timespec::try_from(left).expect("it is short"));
        // An interrupted poll has no effect here.
        let _ = poll(&mut [PollFd::new(&*flush, PollFlags::IN)], left.as_ref());
    }
    Ok(())
}

fn append(plan: &Plan, part: &ManySendersPlan, sender_table: &SenderTable, journal: &Journal) -> pelton::Result<()> {
    let appenders = pelton::Appenders::new(&flush_options(plan, part), open_file(plan, part)?)?;
    ready(journal);
    let append = |index: u64| -> pelton::Result<u64> {
        let (mut appender, mut state) =
            (appenders.appender()?, SenderState::new(plan, sender_table, part.sender_id + index));
        let mut messages = 0;
        while journal.get(Word::Stop) == 0 {
            state.write();
            appender.append(&state.buffer)?;
            state.next += 1;
            if state.random.one_in(300) {
                appender.flush()?;
                sender_table.set(state.sender_id, SenderWord::SentLeast, state.next - 1);
            }
            pause(plan, &mut messages);
        }
        Ok(state.next - 1)
    };
    let appended = thread::scope(|scope| {
        let threads: Vec<_> = (0..part.threads).map(|index| scope.spawn(move || append(index))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("an appending thread does not panic"))
            .collect::<pelton::Result<Vec<u64>>>()
    })?;
    appenders.sync()?;
    for (sender_id, last) in (part.sender_id..).zip(appended) {
        sender_table.set(sender_id, SenderWord::SentLeast, last);
    }
    Ok(())
}
