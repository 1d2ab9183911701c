//! Pelton's own sides of a storm: each a process, told what to do by a [`Plan`], that says what it does in its [`Journal`] until
//! it is killed, or asked to end.

use super::crowd_side::{self, Part};
use super::journal::{DONE, FAILED, Journal, READY, Word};
use super::message::{Dice, Pattern, Sizes, check};
use crate::failure::Failure;
use clap::Args;
use pelton::{Error, Held, Options, Receiver, Sender, Sent, Wait};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::{
    collections::VecDeque,
    fs::File,
    os::fd::AsFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Longer than a process takes to come under any load; a storm's own patience ends before.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long a wait for a successor lasts before it is looked whether one will come.
const SLICE: Duration = Duration::from_millis(50);
/// The most messages that a receiver holds at a time, and that a batch has.
const HELD_MAX: usize = 5;
const BATCH_MAX: u64 = 8;
/// By connect, every so many messages one carries a descriptor, of this file.
const DESCRIPTOR_EVERY: u64 = 16;
pub const ALONG: &str = "/dev/zero";

/// Which end of the channel a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Send,
    Receive,
}

/// How pelton's sides find each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum By {
    Connect,
    Path,
}

/// How a side waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Waits {
    Block,
    Spin,
    /// In a loop of its own, by `arm`, `try_…` and `disarm`.
    Poll,
}

/// What a process is to do: one line of JSON. The first half is for sides of any channel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    pub role: Role,
    /// The channel's own directory, empty at first.
    pub place: PathBuf,
    pub journal: PathBuf,
    #[serde(flatten)]
    pub sizes: Sizes,
    /// The lane's bytes.
    pub capacity: u64,
    /// After so many messages (0: never) a pause of so many microseconds.
    pub pause_every: u64,
    pub pause_us: u64,
    /// A sender whose channel does not tell where to go on: the number to begin with.
    pub next: u64,
    /// Of pelton's sides: the seed of the choices that this process makes.
    pub turn: u64,
    pub by: By,
    pub listens: bool,
    pub waits: Waits,
    /// A receiver: the highest number that one before it was given.
    pub given: u64,
    /// In a storm of many senders.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crowd: Option<Part>,
}

/// Options of the hidden commands.
#[derive(Args)]
pub struct SideArgs {
    /// The plan, as JSON
    plan: String,
}

/// A side, until it is done; what is wrong goes to the journal.
pub fn run(args: &SideArgs) -> Result<(), Failure> {
    let plan: Plan = serde_json::from_str(&args.plan).map_err(|error| Failure::Input(error.to_string()))?;
    // A side does not outlive its host.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|error| Failure::system("prctl", error))?;
    let journal = Journal::open(&plan.journal).map_err(|error| Failure::system("opening the journal", error))?;
    let done = match (&plan.crowd, plan.role) {
        (Some(part), _) => crowd_side::run(&plan, part, &journal),
        (None, Role::Send) => Sending::open(&plan, &journal).and_then(Sending::run),
        (None, Role::Receive) => Receiving::open(&plan, &journal).and_then(Receiving::run),
    };
    if let Err(error) = &done {
        journal.explain(&error.to_string());
    }
    journal.set(Word::State, if done.is_ok() { DONE } else { FAILED });
    Ok(())
}

pub fn options(plan: &Plan) -> Options {
    let wait = if plan.waits == Waits::Spin { Wait::Spin } else { Wait::Block };
    Options::new().capacity(plan.capacity).wait(wait)
}

/// By connect: one for who connects to wait for who listens.
pub fn reaching(plan: &Plan) -> Options {
    options(plan).connect_deadline(Instant::now() + PATIENCE)
}

/// Connects, again where the other side went in the middle of it: it may have been killed.
pub fn reach<T>(connect: impl Fn() -> pelton::Result<T>) -> pelton::Result<T> {
    loop {
        match connect() {
            Err(Error::HungUp) => {}
            answer => return answer,
        }
    }
}

pub fn name(plan: &Plan) -> String {
    format!("unix:{}", plan.place.join("s").display())
}

pub fn pause(plan: &Plan, messages: &mut u64) {
    *messages += 1;
    if plan.pause_every > 0 && messages.is_multiple_of(plan.pause_every) {
        std::thread::sleep(Duration::from_micros(plan.pause_us));
    }
}

/// The caller's own loop: until the armed end is readable. No time limit: a wake that is missed must show.
pub fn wait_readable(end: &impl AsFd) {
    while let Err(error) = poll(&mut [PollFd::new(end, PollFlags::IN)], None) {
        assert_eq!(error, rustix::io::Errno::INTR, "a descriptor can be polled");
    }
}

fn carries_descriptor(plan: &Plan, number: u64) -> bool {
    plan.by == By::Connect && number % DESCRIPTOR_EVERY == 3
}

/// Notes in the journal that the other side died, and when that was known.
pub fn note_told(journal: &Journal, unreleased: u64, beside: u64) {
    let now = clock_gettime(ClockId::Monotonic);
    journal.set(Word::Waiting, 0);
    journal.set(Word::ToldUnreleased, unreleased);
    journal.set(Word::ToldBeside, beside);
    journal.set(Word::ToldNs, now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64);
    journal.add(Word::Told, 1);
}

/// By connect: until a successor has come, true; or none will, false. By path there is nothing to wait for.
fn resume(
    plan: &Plan,
    journal: &Journal,
    mut resume_until: impl FnMut(Instant) -> pelton::Result<bool>,
) -> pelton::Result<bool> {
    if plan.by == By::Path {
        return Ok(true);
    }
    while journal.get(Word::Stop) == 0 {
        if resume_until(Instant::now() + SLICE)? {
            journal.add(Word::Met, 1);
            return Ok(true);
        }
    }
    Ok(false)
}

struct Sending<'a> {
    plan: &'a Plan,
    journal: &'a Journal,
    sender: Sender,
    /// The number of the next message.
    next: u64,
    dice: Dice,
    pattern: Pattern,
    buffer: Vec<u8>,
    /// What goes along as a descriptor: a file that nobody else here has open.
    along: File,
}

impl<'a> Sending<'a> {
    fn open(plan: &'a Plan, journal: &'a Journal) -> pelton::Result<Sending<'a>> {
        let sender = match (plan.by, plan.listens) {
            (By::Path, _) => options(plan).create_sender(plan.place.join("c"))?,
            (By::Connect, true) => options(plan).listen(&name(plan))?.accept_sender()?,
            (By::Connect, false) => reach(|| reaching(plan).connect_sender(&name(plan)))?,
        };
        let next = u64::from(sender.next_seq());
        journal.set(Word::Pending, next - 1);
        journal.set(Word::Done, next - 1);
        journal.set(Word::First, next);
        journal.add(Word::Met, 1);
        journal.set(Word::State, READY);
        let pattern = Pattern::new(plan.sizes.bytes_max);
        let along = File::open(ALONG).map_err(|source| Error::System { what: ALONG.to_owned(), source })?;
        Ok(Sending { plan, journal, sender, next, dice: Dice::new(plan.turn), pattern, buffer: Vec::new(), along })
    }

    fn run(mut self) -> pelton::Result<()> {
        let mut messages = 0;
        while self.journal.get(Word::Stop) == 0 {
            match self.send() {
                Ok(()) => pause(self.plan, &mut messages),
                Err(Error::PeerDied { unreleased }) => {
                    if !self.told(unreleased)? {
                        return self.sender.close();
                    }
                }
                Err(error) => return Err(error),
            }
        }
        loop {
            match self.sender.drain() {
                Ok(()) => {
                    self.look_for_duplicates();
                    return self.sender.close();
                }
                Err(Error::PeerDied { unreleased }) => {
                    if !self.told(unreleased)? {
                        return self.sender.close();
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Everything is released, so no duplicate of a descriptor that went along is kept any more.
    fn look_for_duplicates(&mut self) {
        self.sender.unreleased();
        let open = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
        let kept =
            open.filter(|entry| std::fs::read_link(entry.path()).is_ok_and(|path| path == Path::new(ALONG))).count();
        if kept != 1 {
            self.journal.add(Word::Garbage, 1);
            self.journal.explain(&format!("a drained sender keeps {} descriptors that went along", kept - 1));
        }
    }

    /// False: nobody will come.
    fn told(&mut self, unreleased: u64) -> pelton::Result<bool> {
        note_told(self.journal, unreleased, self.journal.get(Word::Done));
        resume(self.plan, self.journal, |deadline| self.sender.resume_until(deadline))
    }

    /// One message, or a batch, in one of the ways there are.
    fn send(&mut self) -> pelton::Result<()> {
        let number = self.next;
        let size = self.plan.sizes.of(number);
        if carries_descriptor(self.plan, number) {
            return self.send_with_descriptor(size);
        }
        match self.dice.below(8) {
            0 | 1 if self.send_batch()? => Ok(()),
            2 => {
                // Nothing of it is ever seen.
                if let Some(mut room) = self.sender.try_reserve(size)? {
                    room.fill(0xee);
                    room.abort();
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
            if self.plan.waits == Waits::Poll {
                self.wait_for_room(size)?;
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

    /// Written in place, with more room than the message takes.
    fn send_reserved(&mut self, size: usize) -> pelton::Result<()> {
        let most = (size + self.dice.below(40) as usize).min(self.sender.message_bytes_max() as usize);
        loop {
            if let Some(mut room) = self.sender.try_reserve(most)? {
                self.pattern.write(self.next, &mut room[..size]);
                self.journal.set(Word::Pending, self.next);
                room.commit_bytes(size)?;
                self.committed(1, size);
                return Ok(());
            }
            if self.plan.waits == Waits::Poll {
                self.wait_for_room(most)?;
                continue;
            }
            self.journal.set(Word::Waiting, 1);
            self.sender.reserve(most)?.abort();
            self.journal.set(Word::Waiting, 0);
        }
    }

    /// False: there is no room for a batch now, or it would be none.
    fn send_batch(&mut self) -> pelton::Result<bool> {
        let (limit, mut total) = (self.sender.message_bytes_max(), 0);
        let wanted = 2 + self.dice.below(BATCH_MAX - 1);
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
            let room = batch.reserve(size(number)).expect("the room was asked for");
            self.pattern.write(*number, room);
            bytes += room.len();
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
        self.sender.send_with_descriptors(&self.buffer, &[self.along.as_fd()])?;
        self.committed(1, size);
        Ok(())
    }

    fn wait_for_room(&mut self, bytes: usize) -> pelton::Result<()> {
        if self.sender.arm(bytes)? {
            self.journal.set(Word::Waiting, 1);
            wait_readable(&self.sender);
            self.journal.set(Word::Waiting, 0);
        }
        if self.dice.one_in(2) {
            self.sender.disarm();
        }
        Ok(())
    }

    fn committed(&mut self, messages: u64, bytes: usize) {
        self.next += messages;
        self.journal.set(Word::Done, self.next - 1);
        self.journal.add(Word::Messages, messages);
        self.journal.add(Word::Bytes, bytes as u64);
        let told = u64::from(self.sender.next_seq());
        if told != self.next {
            self.journal.add(Word::Garbage, 1);
            self.journal.explain(&format!("the sender says that {told} is next after {}", self.next - 1));
        }
    }
}

struct Receiving<'a> {
    plan: &'a Plan,
    journal: &'a Journal,
    receiver: Receiver,
    /// The last number that came, 0 before.
    last: u64,
    held: VecDeque<(u64, Held)>,
    dice: Dice,
    buffer: Vec<u8>,
}

impl<'a> Receiving<'a> {
    fn open(plan: &'a Plan, journal: &'a Journal) -> pelton::Result<Receiving<'a>> {
        let receiver = match (plan.by, plan.listens) {
            (By::Path, _) => options(plan).create_receiver(plan.place.join("c"))?,
            (By::Connect, true) => options(plan).listen(&name(plan))?.accept_receiver()?,
            (By::Connect, false) => reach(|| reaching(plan).connect_receiver(&name(plan)))?,
        };
        journal.add(Word::Met, 1);
        journal.set(Word::State, READY);
        let (held, dice) = (VecDeque::new(), Dice::new(plan.turn));
        Ok(Receiving { plan, journal, receiver, last: 0, held, dice, buffer: Vec::new() })
    }

    fn run(mut self) -> pelton::Result<()> {
        let mut messages = 0;
        loop {
            match self.receive() {
                Ok(()) => pause(self.plan, &mut messages),
                Err(Error::PeerDied { unreleased }) => {
                    note_told(self.journal, unreleased, self.held.len() as u64);
                    if !resume(self.plan, self.journal, |deadline| self.receiver.resume_until(deadline))? {
                        return self.receiver.close();
                    }
                }
                Err(Error::Closed { .. }) => {
                    self.journal.set(Word::Pending, self.last);
                    self.held.clear();
                    self.receiver.close()?;
                    self.journal.set(Word::Done, self.last);
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// One message, or those that are there, in one of the ways there are.
    fn receive(&mut self) -> pelton::Result<()> {
        if !self.held.is_empty() && self.dice.one_in(4) {
            self.release_held()?;
        }
        self.wait_for_message()?;
        // The first says where this receiver begins, and is received in a way that tells its number.
        match self.dice.below(8) {
            0 | 1 if self.last != 0 => self.receive_copied(),
            2 | 3 if self.last != 0 => self.receive_batch(),
            way => self.receive_in_place(way == 4 && self.held.len() < HELD_MAX),
        }
    }

    /// Until a message is there; the end is an error.
    fn wait_for_message(&mut self) -> pelton::Result<()> {
        while self.receiver.try_receive_batch()?.is_none() {
            // The sender may be waiting for just their room.
            while !self.held.is_empty() {
                self.release_held()?;
            }
            if self.plan.waits != Waits::Poll {
                self.journal.set(Word::Waiting, 1);
                drop(self.receiver.receive_batch()?);
                self.journal.set(Word::Waiting, 0);
                return Ok(());
            }
            if self.receiver.arm()? {
                self.journal.set(Word::Waiting, 1);
                wait_readable(&self.receiver);
                self.journal.set(Word::Waiting, 0);
            }
            if self.dice.one_in(2) {
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
        if message.descriptors() != wanted {
            problem = Some(format!("{} descriptors came with message {number}, not {wanted}", message.descriptors()));
        } else if wanted > 0 && self.dice.one_in(2) && message.take_descriptors()?.len() != wanted {
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
            self.came(number, bytes, problem);
        } else {
            self.journal.set(Word::Taken, number);
            let released = self.held.front().map_or(number, |(oldest, _)| oldest - 1);
            self.journal.set(Word::Pending, released);
            drop(message);
            self.journal.set(Word::Done, released);
            self.came(number, bytes, problem);
        }
        if marked {
            self.journal.add(Word::Again, 1);
        } else if number <= self.plan.given {
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
        self.came(number, bytes, check(&self.plan.sizes, number, &self.buffer).err());
        Ok(())
    }

    fn receive_batch(&mut self) -> pelton::Result<()> {
        let most = 1 + self.dice.below(BATCH_MAX);
        let Some(mut batch) = self.receiver.try_receive_batch()? else { return Ok(()) };
        let (mut number, mut came) = (self.last, Vec::new());
        while number < self.last + most
            && let Some(payload) = batch.next()?
        {
            number += 1;
            self.journal.set(Word::Taken, number);
            came.push((number, payload.len(), check(&self.plan.sizes, number, payload).err()));
        }
        let released = self.held.front().map_or(number, |(oldest, _)| oldest - 1);
        self.journal.set(Word::Pending, released);
        drop(batch);
        self.journal.set(Word::Done, released);
        for (number, bytes, problem) in came {
            self.came(number, bytes, problem);
        }
        Ok(())
    }

    /// Gives back one of the held messages, any of them.
    fn release_held(&mut self) -> pelton::Result<()> {
        let index = self.dice.below(self.held.len() as u64) as usize;
        let (_, message) = self.held.remove(index).expect("it is among them");
        let released = self.held.front().map_or(self.last, |(oldest, _)| oldest - 1);
        self.journal.set(Word::Pending, released);
        drop(message);
        // The receiver's next call takes it back, and moves the head.
        drop(self.receiver.try_receive_batch()?);
        self.journal.set(Word::Done, released);
        Ok(())
    }

    fn came(&mut self, number: u64, bytes: usize, problem: Option<String>) {
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
