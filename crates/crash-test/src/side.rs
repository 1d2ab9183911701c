//! The sides of pelton in a crash test: processes with a [`Plan`], which record their steps in a [`Journal`] until they
//! are killed, or end on request.

use super::journal::{Journal, READY, Word};
use super::message::{Pattern, Random, check};
use super::plan::{Plan, Role, Transport, WaitMode};
use pelton::{Error, Held, Options, Receiver, Sender, Sent, Wait};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::{ClockId, clock_gettime};
use std::{
    collections::VecDeque,
    fs::File,
    os::fd::AsFd,
    path::Path,
    time::{Duration, Instant},
};

/// Longer than the start of a process under any load; the test reports a hang earlier.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(120);
/// A wait for a successor checks after each of these intervals whether the test has ended.
pub const SLICE: Duration = Duration::from_millis(50);
/// The most messages that a receiver holds, and that a batch has.
const HELD_MAX: usize = 5;
const BATCH_MAX: u64 = 8;
/// By connect, one of this number of messages carries a descriptor, of the file below.
const DESCRIPTOR_EVERY: u64 = 16;
pub const SENT_FILE: &str = "/dev/zero";

/// Runs a side of a channel with one sender.
pub fn run(plan: &Plan, journal: &Journal) -> pelton::Result<()> {
    match plan.role {
        Role::Send => SenderSide::open(plan, journal).and_then(SenderSide::run),
        Role::Receive => ReceiverSide::open(plan, journal).and_then(ReceiverSide::run),
    }
}

pub fn options<M>(plan: &Plan) -> Options<M> {
    let wait = if plan.wait_mode == WaitMode::Spin { Wait::Spin } else { Wait::Block };
    <Options>::new().capacity(plan.capacity).wait(wait).cast()
}

/// Options of the connecting side, which waits for the listener.
pub fn connecting_options<M>(plan: &Plan) -> Options<M> {
    let options: Options = options(plan);
    options.connect_deadline(Instant::now() + CONNECT_TIMEOUT).cast()
}

/// Connects, and again after each hang-up: the other side may have been killed during the handshake.
pub fn connect_retrying<T>(connect: impl Fn() -> pelton::Result<T>) -> pelton::Result<T> {
    loop {
        match connect() {
            Err(Error::HungUp) => {}
            done => return done,
        }
    }
}

pub fn name(plan: &Plan) -> String {
    format!("unix:{}", plan.directory.join("s").display())
}

pub fn pause(plan: &Plan, messages: &mut u64) {
    *messages += 1;
    if plan.pause_every > 0 && messages.is_multiple_of(plan.pause_every) {
        std::thread::sleep(Duration::from_micros(plan.pause_us));
    }
}

/// Polls an armed endpoint until it is readable. Without a timeout: a missed wake-up must become a hang.
pub fn wait_readable(end: &impl AsFd) {
    while let Err(error) = poll(&mut [PollFd::new(end, PollFlags::IN)], None) {
        assert_eq!(error, rustix::io::Errno::INTR, "a descriptor can be polled");
    }
}

fn carries_descriptor(plan: &Plan, number: u64) -> bool {
    plan.transport == Transport::Connect && number % DESCRIPTOR_EVERY == 3
}

/// Records in the journal that this side has detected the death of the other one, and when.
pub fn record_death(journal: &Journal, unreleased: u64, count: u64) {
    let now = clock_gettime(ClockId::Monotonic);
    journal.set(Word::Waiting, 0);
    journal.set(Word::ReportedUnreleased, unreleased);
    journal.set(Word::CountAtDetection, count);
    journal.set(Word::DetectedNs, now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64);
    journal.add(Word::Detections, 1);
}

/// By connect: waits for a successor; false if none will connect. By path: returns true.
fn resume(
    plan: &Plan,
    journal: &Journal,
    mut resume_until: impl FnMut(Instant) -> pelton::Result<bool>,
) -> pelton::Result<bool> {
    if plan.transport == Transport::Path {
        return Ok(true);
    }
    while journal.get(Word::Stop) == 0 {
        if resume_until(Instant::now() + SLICE)? {
            journal.add(Word::Connections, 1);
            return Ok(true);
        }
    }
    Ok(false)
}

struct SenderSide<'a> {
    plan: &'a Plan,
    journal: &'a Journal,
    sender: Sender,
    /// The number of the next message.
    next: u64,
    random: Random,
    pattern: Pattern,
    buffer: Vec<u8>,
    /// The file whose descriptor goes with messages; this process opens it nowhere else.
    sent_file: File,
}

impl<'a> SenderSide<'a> {
    fn open(plan: &'a Plan, journal: &'a Journal) -> pelton::Result<SenderSide<'a>> {
        let sender = match (plan.transport, plan.listens) {
            (Transport::Path, _) => options(plan).create_sender(plan.directory.join("c"))?,
            (Transport::Connect, true) => options(plan).listen(&name(plan))?.accept_sender()?,
            (Transport::Connect, false) => connect_retrying(|| connecting_options(plan).connect_sender(&name(plan)))?,
        };
        let next = u64::from(sender.next_seq());
        journal.set(Word::Pending, next - 1);
        journal.set(Word::Done, next - 1);
        journal.set(Word::First, next);
        journal.add(Word::Connections, 1);
        journal.set(Word::State, READY);
        let pattern = Pattern::new(plan.sizes.bytes_max);
        let sent_file =
            File::open(SENT_FILE).map_err(|source| Error::System { what: SENT_FILE.to_owned(), error: source })?;
        Ok(SenderSide {
            plan,
            journal,
            sender,
            next,
            random: Random::new(plan.choices_seed),
            pattern,
            buffer: Vec::new(),
            sent_file,
        })
    }

    fn run(mut self) -> pelton::Result<()> {
        let mut messages = 0;
        while self.journal.get(Word::Stop) == 0 {
            match self.send() {
                Ok(()) => pause(self.plan, &mut messages),
                Err(Error::PeerDied { unreleased }) => {
                    if !self.handle_death(unreleased)? {
                        return self.sender.close();
                    }
                }
                Err(error) => return Err(error),
            }
        }
        loop {
            match self.sender.wait_released() {
                Ok(()) => {
                    self.check_kept_descriptors();
                    return self.sender.close();
                }
                Err(Error::PeerDied { unreleased }) => {
                    if !self.handle_death(unreleased)? {
                        return self.sender.close();
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// After everything is released, the sender must keep no duplicate of a sent descriptor.
    fn check_kept_descriptors(&mut self) {
        self.sender.unreleased();
        let kept = sent_descriptors();
        if kept != 1 {
            self.journal.add(Word::Garbage, 1);
            self.journal.explain(&format!("a drained sender keeps {} sent descriptors", kept - 1));
        }
    }

    /// False: the receiver has no successor.
    fn handle_death(&mut self, unreleased: u64) -> pelton::Result<bool> {
        record_death(self.journal, unreleased, self.journal.get(Word::Done));
        resume(self.plan, self.journal, |deadline| self.sender.resume_until(deadline))
    }

    /// Sends one message, or a batch, by a random method.
    fn send(&mut self) -> pelton::Result<()> {
        let number = self.next;
        let size = self.plan.sizes.of(number);
        if carries_descriptor(self.plan, number) {
            return self.send_with_descriptor(size);
        }
        match self.random.below(8) {
            0 | 1 if self.send_batch()? => Ok(()),
            2 => {
                // The receiver must never receive a part of it.
                if let Some(mut space) = self.sender.try_reserve(size)? {
                    space.fill(0xee);
                    space.abort();
                }
                self.send_reserved(size)
            }
            3 | 4 => self.send_reserved(size),
            _ => self.send_copied(size),
        }
    }

    fn send_copied(&mut self, size: usize) -> pelton::Result<()> {
        self.buffer.resize(size, 0);
        self.pattern.write(self.next, &mut self.buffer);
        self.journal.set(Word::Pending, self.next);
        while self.sender.try_send(&self.buffer)? != Sent::Sent {
            if self.plan.wait_mode == WaitMode::Poll {
                self.wait_for_space(size)?;
                continue;
            }
            self.journal.set(Word::Waiting, 1);
            self.sender.send(&self.buffer)?;
            self.journal.set(Word::Waiting, 0);
            break;
        }
        self.committed(1, size);
        Ok(())
    }

    /// Writes in place, with a reservation larger than the message.
    fn send_reserved(&mut self, size: usize) -> pelton::Result<()> {
        let most = (size + self.random.below(40) as usize).min(self.sender.message_bytes_max() as usize);
        loop {
            if let Some(mut space) = self.sender.try_reserve(most)? {
                self.pattern.write(self.next, &mut space[..size]);
                self.journal.set(Word::Pending, self.next);
                space.commit_bytes(size)?;
                self.committed(1, size);
                return Ok(());
            }
            if self.plan.wait_mode == WaitMode::Poll {
                self.wait_for_space(most)?;
                continue;
            }
            self.journal.set(Word::Waiting, 1);
            self.sender.reserve(most)?.abort();
            self.journal.set(Word::Waiting, 0);
        }
    }

    /// False: there is no free space for a batch now, or it would have fewer than two messages.
    fn send_batch(&mut self) -> pelton::Result<bool> {
        let (limit, mut total) = (self.sender.message_bytes_max(), 0);
        let wanted = 2 + self.random.below(BATCH_MAX - 1);
        let numbers: Vec<u64> = (self.next..self.next + wanted)
            .take_while(|number| {
                total += self.plan.sizes.of(*number) as u64 + 16;
                total <= limit && !carries_descriptor(self.plan, *number)
            })
            .collect();
        if numbers.len() < 2 {
            return Ok(false);
        }
        let size = |number: &u64| self.plan.sizes.of(*number);
        let Some(mut batch) = self.sender.try_reserve_batch(numbers.iter().map(size))? else { return Ok(false) };
        let mut bytes = 0;
        for number in &numbers {
            let space = batch.reserve(size(number)).expect("the batch has this space");
            self.pattern.write(*number, space);
            bytes += space.len();
        }
        self.journal.set(Word::Pending, self.next + numbers.len() as u64 - 1);
        batch.commit()?;
        self.committed(numbers.len() as u64, bytes);
        Ok(true)
    }

    fn send_with_descriptor(&mut self, size: usize) -> pelton::Result<()> {
        self.buffer.resize(size, 0);
        self.pattern.write(self.next, &mut self.buffer);
        self.journal.set(Word::Pending, self.next);
        self.sender.send_with_descriptors(&self.buffer, &[self.sent_file.as_fd()])?;
        self.committed(1, size);
        Ok(())
    }

    fn wait_for_space(&mut self, bytes: usize) -> pelton::Result<()> {
        if self.sender.arm(bytes)?.is_waiting() {
            self.journal.set(Word::Waiting, 1);
            wait_readable(&self.sender);
            self.journal.set(Word::Waiting, 0);
        }
        if self.random.one_in(2) {
            self.sender.disarm();
        }
        Ok(())
    }

    fn committed(&mut self, messages: u64, bytes: usize) {
        self.next += messages;
        self.journal.set(Word::Done, self.next - 1);
        self.journal.add(Word::Messages, messages);
        self.journal.add(Word::Bytes, bytes as u64);
        let returned = u64::from(self.sender.next_seq());
        if returned != self.next {
            self.journal.add(Word::Garbage, 1);
            self.journal.explain(&format!("the sender returns {returned} as the number after {}", self.next - 1));
        }
    }
}

/// Descriptors of this process that were sent along with messages, or are to be.
fn sent_descriptors() -> usize {
    let open = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    open.filter(|entry| std::fs::read_link(entry.path()).is_ok_and(|path| path == Path::new(SENT_FILE))).count()
}

struct ReceiverSide<'a> {
    plan: &'a Plan,
    journal: &'a Journal,
    receiver: Receiver,
    /// The last received number; 0 before.
    last: u64,
    held: VecDeque<(u64, Held)>,
    random: Random,
    buffer: Vec<u8>,
}

impl<'a> ReceiverSide<'a> {
    fn open(plan: &'a Plan, journal: &'a Journal) -> pelton::Result<ReceiverSide<'a>> {
        let receiver = match (plan.transport, plan.listens) {
            (Transport::Path, _) => options(plan).create_receiver(plan.directory.join("c"))?,
            (Transport::Connect, true) => options(plan).listen(&name(plan))?.accept_receiver()?,
            (Transport::Connect, false) => connect_retrying(|| connecting_options(plan).connect_receiver(&name(plan)))?,
        };
        journal.add(Word::Connections, 1);
        journal.set(Word::State, READY);
        let (held, random) = (VecDeque::new(), Random::new(plan.choices_seed));
        Ok(ReceiverSide { plan, journal, receiver, last: 0, held, random, buffer: Vec::new() })
    }

    fn run(mut self) -> pelton::Result<()> {
        let mut messages = 0;
        loop {
            match self.receive() {
                Ok(()) => pause(self.plan, &mut messages),
                Err(Error::PeerDied { unreleased }) => {
                    record_death(self.journal, unreleased, self.held.len() as u64);
                    if !resume(self.plan, self.journal, |deadline| self.receiver.resume_until(deadline))? {
                        return self.receiver.close();
                    }
                }
                Err(Error::Closed { .. }) => {
                    self.journal.set(Word::Pending, self.last);
                    self.held.clear();
                    self.check_received_descriptors();
                    self.receiver.close()?;
                    self.journal.set(Word::Done, self.last);
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The end comes after the last message, so no received descriptor may be left. Another thread closes those that
    /// the program has not taken: this waits for it.
    fn check_received_descriptors(&mut self) {
        let limit = Instant::now() + Duration::from_secs(10);
        while sent_descriptors() > 0 && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(1));
        }
        if let kept @ 1.. = sent_descriptors() {
            self.journal.add(Word::Garbage, 1);
            self.journal.explain(&format!("a receiver at the end of its channel keeps {kept} descriptors"));
        }
    }

    /// Receives one message, or the available ones, by a random method.
    fn receive(&mut self) -> pelton::Result<()> {
        if !self.held.is_empty() && self.random.one_in(4) {
            self.release_held()?;
        }
        self.wait_for_message()?;
        // The first message shows where this receiver begins, so it is received with its number.
        match self.random.below(8) {
            0 | 1 if self.last != 0 => self.receive_copied(),
            2 | 3 if self.last != 0 => self.receive_batch(),
            method => self.receive_in_place(method == 4 && self.held.len() < HELD_MAX),
        }
    }

    /// Waits for a message; the end of the channel is an error.
    fn wait_for_message(&mut self) -> pelton::Result<()> {
        while self.receiver.try_receive_batch()?.is_none() {
            // The sender may be waiting for their space.
            while !self.held.is_empty() {
                self.release_held()?;
            }
            if self.plan.wait_mode != WaitMode::Poll {
                self.journal.set(Word::Waiting, 1);
                drop(self.receiver.receive_batch()?);
                self.journal.set(Word::Waiting, 0);
                return Ok(());
            }
            if self.receiver.arm()?.is_waiting() {
                self.journal.set(Word::Waiting, 1);
                wait_readable(&self.receiver);
                self.journal.set(Word::Waiting, 0);
            }
            if self.random.one_in(2) {
                self.receiver.disarm();
            }
        }
        Ok(())
    }

    fn receive_in_place(&mut self, hold: bool) -> pelton::Result<()> {
        let Some(mut message) = self.receiver.try_receive()? else { return Ok(()) };
        let (number, marked) = (u64::from(message.seq()), message.is_redelivered());
        let wanted = usize::from(carries_descriptor(self.plan, number));
        let mut problem = check(&self.plan.sizes, number, &message).err();
        if message.descriptor_count() != wanted {
            problem = Some(format!("message {number} has {} descriptors, wanted {wanted}", message.descriptor_count()));
        } else if wanted > 0 && self.random.one_in(2) && message.take_descriptors()?.len() != wanted {
            problem = Some(format!("the descriptor of message {number} cannot be taken"));
        }
        let bytes = message.len();
        if self.last == 0 {
            self.journal.set(Word::Done, number - 1);
            self.journal.set(Word::First, number);
            self.last = number - 1;
        }
        if hold {
            self.held.push_back((number, message.hold()));
            self.record_received(number, bytes, problem);
        } else {
            self.journal.set(Word::Taken, number);
            let released = self.held.front().map_or(number, |(oldest, _)| oldest - 1);
            self.journal.set(Word::Pending, released);
            drop(message);
            self.journal.set(Word::Done, released);
            self.record_received(number, bytes, problem);
        }
        if marked {
            self.journal.add(Word::Redelivered, 1);
        } else if number <= self.plan.delivered {
            self.journal.add(Word::Unmarked, 1);
        }
        Ok(())
    }

    fn receive_copied(&mut self) -> pelton::Result<()> {
        let number = self.last + 1;
        let released = self.held.front().map_or(number, |(oldest, _)| oldest - 1);
        self.journal.set(Word::Pending, released);
        let bytes = self.receiver.receive_into(&mut self.buffer)?;
        self.journal.set(Word::Taken, number);
        self.journal.set(Word::Done, released);
        self.record_received(number, bytes, check(&self.plan.sizes, number, &self.buffer).err());
        Ok(())
    }

    fn receive_batch(&mut self) -> pelton::Result<()> {
        let most = 1 + self.random.below(BATCH_MAX);
        let Some(mut batch) = self.receiver.try_receive_batch()? else { return Ok(()) };
        let (mut number, mut received) = (self.last, Vec::new());
        while number < self.last + most
            && let Some(payload) = batch.next()?
        {
            number += 1;
            self.journal.set(Word::Taken, number);
            received.push((number, payload.len(), check(&self.plan.sizes, number, payload).err()));
        }
        let released = self.held.front().map_or(number, |(oldest, _)| oldest - 1);
        self.journal.set(Word::Pending, released);
        drop(batch);
        self.journal.set(Word::Done, released);
        for (number, bytes, problem) in received {
            self.record_received(number, bytes, problem);
        }
        Ok(())
    }

    /// Releases one of the held messages, chosen at random.
    fn release_held(&mut self) -> pelton::Result<()> {
        let index = self.random.below(self.held.len() as u64) as usize;
        let (_, message) = self.held.remove(index).expect("the index is in range");
        let released = self.held.front().map_or(self.last, |(oldest, _)| oldest - 1);
        self.journal.set(Word::Pending, released);
        drop(message);
        // The next call of the receiver moves the head.
        drop(self.receiver.try_receive_batch()?);
        self.journal.set(Word::Done, released);
        Ok(())
    }

    fn record_received(&mut self, number: u64, bytes: usize, problem: Option<String>) {
        self.journal.set(Word::Taken, number);
        if number != self.last + 1 {
            self.journal.jump(self.last + 1, number);
        }
        self.last = number;
        if let Some(problem) = problem {
            self.journal.explain(&problem);
            self.journal.add(Word::Garbage, 1);
        }
        self.journal.add(Word::Messages, 1);
        self.journal.add(Word::Bytes, bytes as u64);
    }
}
