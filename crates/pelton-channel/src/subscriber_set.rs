//! A topic of many publishers: subscribers for which one thread waits at the same time.

use crate::backoff::Backoff;
use crate::doorbells::Doorbells;
use crate::endpoint::Departure;
use crate::error::{Error, Result};
use crate::subscriber::{Delivery, Subscriber};
use crate::wait::{self, Armed, Deadline, Polled, Side, Spin, Wait};
use pelton_lane::LastRing;
use pelton_os::{self as os, Event, Owner, Ready};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Instant;

/// How many messages a subscriber delivers before the next one has its turn. Also the calls between two checks of
/// whether a publisher has left, of one subscriber each: a set that always has messages never sleeps, which would show
/// it.
const QUANTUM: u32 = 64;

/// One thread receives from the subscribers of many publishers. `Send`, not `Sync`.
///
/// The messages of a publisher arrive in order; between publishers there is no order. Those that have messages take
/// turns, with 64 messages each. A publisher that leaves takes its subscriber out of the set: while others have
/// messages, after at most 64 calls for each subscriber. After [`Subscriber::resume_until`] it can be added again.
/// While that waits, nothing is received from the others. Publishers, policies and sizes may differ. A sleep costs a
/// fraction of a microsecond to some microseconds for each subscriber. Nothing wakes a call that waits to have a
/// subscriber added: give it a deadline, or wait in an event loop, which [`SubscriberSet::add`] wakes.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// use pelton::{Options, SubscriberEvent, SubscriberSet, Wait};
/// let mut publishers = [Options::new().publisher()?, Options::new().publisher()?];
/// let mut topic = SubscriberSet::new(Wait::Block)?;
/// for publisher in &mut publishers {
///     topic.add(publisher.subscriber(&Options::new())?)?;
/// }
/// for (number, mut publisher) in publishers.into_iter().enumerate() {
///     publisher.send(format!("from {number}").as_bytes())?;
/// }
/// let mut received = Vec::new();
/// while let Some(event) = topic.receive()? {
///     match event {
///         SubscriberEvent::Message { key, message } => received.push((key, message.to_vec())),
///         // The publisher was dropped.
///         SubscriberEvent::Left { error, .. } => assert!(matches!(error, pelton::Error::Closed { .. })),
///         _ => {}
///     }
/// }
/// assert_eq!(received, [(0, b"from 0".to_vec()), (1, b"from 1".to_vec())]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SubscriberSet {
    /// By their keys.
    members: Vec<Option<Box<Subscriber>>>,
    /// Only its epoll is used, which polls the members' descriptors.
    doorbells: Doorbells,
    spin: Spin,
    owner: Owner,
    /// The member whose turn it is, and how many messages remain of it.
    turn: usize,
    remaining: u32,
    /// Calls until the next check of whether a publisher has left, and the key of its subscriber.
    until_check: u32,
    next_check: usize,
    /// What the next call returns.
    found: Option<Found>,
    /// As a receiver's of many senders, with the messages received, modulo 2^32.
    backoff: Backoff,
    received: u32,
}

#[derive(Debug)]
enum Found {
    /// This member has a message.
    Message(usize),
    Left(usize, Error),
}

/// What [`SubscriberSet::receive`] returns.
#[derive(Debug)]
#[non_exhaustive]
pub enum SubscriberEvent<'a> {
    /// A message, of the publisher of the subscriber with this key.
    Message {
        /// As [`SubscriberSet::add`] returned it.
        key: usize,
        /// The message.
        message: Delivery<'a>,
    },
    /// A publisher has left, and all its messages were received; or it violated the layout, or its directory is
    /// damaged. Its subscriber is no longer in the set.
    Left {
        /// As [`SubscriberSet::add`] returned it. From now on another subscriber may get it.
        key: usize,
        /// The subscriber, which may wait for the publisher's successor.
        subscriber: Box<Subscriber>,
        /// As [`Subscriber::receive`] would return it.
        error: Error,
    },
}

impl SubscriberSet {
    /// A set without subscribers. Does not wait. `wait` is how the set waits, whatever the subscribers' options say.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn new(wait: Wait) -> Result<SubscriberSet> {
        let owner = Owner::current().map_err(Error::system("reading the owner of the handle"))?;
        Ok(SubscriberSet {
            members: Vec::new(),
            doorbells: Doorbells::new()?,
            spin: Spin::new(wait, None),
            owner,
            turn: 0,
            remaining: QUANTUM,
            until_check: QUANTUM,
            next_check: 0,
            found: None,
            backoff: Backoff::new(),
            received: 0,
        })
    }

    fn check_owner(&self) -> Result<()> {
        if self.owner.is_forked() { Err(Error::Forked) } else { Ok(()) }
    }

    /// Adds a subscriber, and returns its key: the smallest number that no other one has. Does not wait.
    ///
    /// # Errors
    /// [`Error::System`], [`Error::Forked`]; the subscriber is dropped then.
    pub fn add(&mut self, subscriber: impl Into<Box<Subscriber>>) -> Result<usize> {
        self.add_or_return(subscriber.into()).map_err(|(_, error)| error)
    }

    /// Polls the descriptor of a subscriber, and returns the key that it gets.
    fn watch(&mut self, subscriber: &Subscriber) -> Result<usize> {
        self.check_owner()?;
        // An inherited one, in a child's own set.
        subscriber.endpoint.check_owner()?;
        let free = self.members.iter().position(Option::is_none);
        let key = free.unwrap_or(self.members.len());
        let watched = self.doorbells.watch_connecting(subscriber.as_fd(), key as u32);
        watched.map_err(Error::system("polling a subscriber"))?;
        Ok(key)
    }

    /// Removes a subscriber, which keeps its place, and still holds its publisher up if it gates. `None`: there is none
    /// with this key.
    pub fn remove(&mut self, key: usize) -> Option<Box<Subscriber>> {
        let mut subscriber = self.members.get_mut(key)?.take()?;
        // It may have been armed with the others.
        subscriber.disarm();
        if matches!(self.found, Some(Found::Message(found) | Found::Left(found, _)) if found == key) {
            self.found = None;
        }
        // A child would end the polling of its parent's epoll.
        if !self.owner.is_forked() {
            self.doorbells.forget(subscriber.as_fd());
        }
        Some(subscriber)
    }

    /// The subscriber with this key, for its counters.
    pub fn get(&self, key: usize) -> Option<&Subscriber> {
        self.members.get(key)?.as_deref()
    }

    /// How many subscribers it has.
    pub fn len(&self) -> usize {
        self.members.iter().flatten().count()
    }

    /// Whether it has no subscribers. Then [`SubscriberSet::receive`] returns `None` without a wait.
    pub fn is_empty(&self) -> bool {
        self.members.iter().all(Option::is_none)
    }

    /// The next message, or the end of a publisher, if there is one now. Never waits.
    ///
    /// # Errors
    /// [`Error::Forked`]; [`Error::System`], for instance when descriptors run out: the next call tries again. The end
    /// of a publisher is no error, but [`SubscriberEvent::Left`].
    pub fn try_receive(&mut self) -> Result<Option<SubscriberEvent<'_>>> {
        self.receive_until(Deadline::Now)
    }

    /// The next message, or the end of a publisher. Waits for it without a limit; `None`: the set is empty.
    ///
    /// # Errors
    /// As [`SubscriberSet::try_receive`].
    pub fn receive(&mut self) -> Result<Option<SubscriberEvent<'_>>> {
        self.receive_until(Deadline::Never)
    }

    /// As [`SubscriberSet::receive`], until `deadline`; `None` when it passes. An empty set waits for that, too.
    ///
    /// # Errors
    /// As [`SubscriberSet::try_receive`].
    #[inline]
    pub fn receive_until(&mut self, deadline: impl Into<Deadline>) -> Result<Option<SubscriberEvent<'_>>> {
        if self.until_check == 0 {
            self.find_end()?;
        }
        self.until_check -= 1;
        match self.find_fast() {
            Some(key) => Ok(self.message(key)),
            None => self.receive_slow(deadline.into()),
        }
    }

    /// The member whose turn it is, if it has a message in the usual case.
    #[inline(always)]
    fn find_fast(&mut self) -> Option<usize> {
        self.end_turn();
        let is_found = self.found.is_none() && self.members.get_mut(self.turn)?.as_mut()?.find_fast();
        is_found.then_some(self.turn)
    }

    /// The message that the member with this key, whose turn it is, has found.
    #[inline(always)]
    fn message(&mut self, key: usize) -> Option<SubscriberEvent<'_>> {
        self.remaining = self.remaining.saturating_sub(1);
        self.received = self.received.wrapping_add(1);
        let message = self.members[key].as_mut()?.delivery();
        Some(SubscriberEvent::Message { key, message })
    }

    #[inline(never)]
    fn receive_slow(&mut self, deadline: Deadline) -> Result<Option<SubscriberEvent<'_>>> {
        self.check_owner()?;
        let is_found = self.poll()? || self.find_slow(deadline)?;
        Ok(if is_found { self.take_found() } else { None })
    }

    #[cold]
    #[inline(never)]
    fn find_slow(&mut self, deadline: Deadline) -> Result<bool> {
        if self.is_empty() {
            if let Deadline::At(end) = deadline {
                std::thread::sleep(end.saturating_duration_since(Instant::now()));
            }
            return Ok(false);
        }
        // As in `Subscriber`: a deadline that has passed is no wait.
        let until = deadline.until().filter(|until| until.is_none_or(|until| Instant::now() < until));
        let Some(until) = until else { return self.each(Subscriber::has_message) };
        if self.comes_soon() && self.poll()? {
            return Ok(true);
        }
        self.members.iter().flatten().for_each(|member| member.parts.lane.count_wait());
        // False: the deadline, or one was faster than a member's copies.
        while wait::wait(self, until)? {
            if self.poll()? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// As `Subscriber::comes_soon`.
    fn comes_soon(&mut self) -> bool {
        if self.spin.first_polls() > 0 {
            for _ in 0..self.backoff.next_pauses(self.received, 0) {
                os::relax();
            }
        }
        for _ in 0..self.spin.first_polls() {
            os::relax();
            if self.may_be_ready() {
                return true;
            }
        }
        false
    }

    /// Checks whether a publisher has left, the next one in turn: with each check all would cost more than messages.
    #[cold]
    #[inline(never)]
    fn find_end(&mut self) -> Result<()> {
        self.until_check = QUANTUM;
        self.check_owner()?;
        let key = self.next_check;
        self.next_check = (key + 1) % self.members.len().max(1);
        let Some(Some(member)) = self.members.get_mut(key) else { return Ok(()) };
        let ended = member.is_peer_known_gone().and_then(|is_gone| Ok(is_gone && Side::end(member.as_mut())?));
        ended.map(drop).or_else(|error| self.note(key, error))
    }

    /// After an error of a member: notes that it has left. Returns the error if that may pass.
    fn note(&mut self, key: usize, error: Error) -> Result<()> {
        let Some(member) = &mut self.members[key] else { return Err(error) };
        if member.endpoint.departure.is_none() {
            if matches!(error, Error::System { .. }) {
                // The next call tries again: its descriptor, which was drained, is readable until then.
                member.endpoint.doorbells.local_wake().ring();
                return Err(error);
            }
            // Its directory is damaged. Returned each time, that would end every wait for the others.
            member.endpoint.leave(Departure::Corrupt);
        }
        // A second one is found by its next poll.
        self.found.get_or_insert(Found::Left(key, error));
        Ok(())
    }

    fn take_found(&mut self) -> Option<SubscriberEvent<'_>> {
        match self.found.take()? {
            Found::Message(key) => self.message(key),
            Found::Left(key, error) => {
                let subscriber = self.remove(key)?;
                Some(SubscriberEvent::Left { key, subscriber, error })
            }
        }
    }

    /// The next member's turn begins if this one's has ended.
    #[inline(always)]
    fn end_turn(&mut self) {
        if self.remaining == 0 {
            self.pass_turn();
        }
    }

    fn pass_turn(&mut self) {
        self.turn = (self.turn + 1) % self.members.len().max(1);
        self.remaining = QUANTUM;
    }

    /// Applies `is_ready` to each member, from the one whose turn it is, until it holds or that member has left.
    /// Returns whether there was such a one.
    fn each(&mut self, mut is_ready: impl FnMut(&mut Subscriber) -> Result<bool>) -> Result<bool> {
        if self.found.is_some() {
            return Ok(true);
        }
        self.end_turn();
        for _ in 0..self.members.len() {
            if let Some(member) = &mut self.members[self.turn] {
                match is_ready(member) {
                    Ok(false) => {}
                    Ok(true) => {
                        // Not if its publisher was faster than its copies.
                        self.found = member.has_found().then_some(Found::Message(self.turn));
                        return Ok(true);
                    }
                    Err(error) => {
                        let key = self.turn;
                        // Otherwise an error that lasts would hide the others' ends.
                        self.pass_turn();
                        return self.note(key, error).map(|()| true);
                    }
                }
            }
            self.pass_turn();
        }
        Ok(false)
    }

    /// Makes the descriptor readable when there is a message, or a publisher leaves. Does not wait. As
    /// [`Subscriber::arm`]; an empty set waits for [`SubscriberSet::add`].
    ///
    /// # Errors
    /// As [`SubscriberSet::try_receive`].
    pub fn arm(&mut self) -> Result<Armed> {
        self.check_owner()?;
        self.doorbells.drain()?;
        let is_armed = self.arm_each(|member| Ok(member.arm()?.is_waiting()))?;
        if !is_armed {
            // A member that has left does not keep its descriptor readable.
            self.doorbells.local_wake().ring();
        }
        Ok(Armed::waiting_if(is_armed))
    }

    /// Arms all by `arm`, or none. Returns whether it has.
    fn arm_each(&mut self, mut arm: impl FnMut(&mut Subscriber) -> Result<bool>) -> Result<bool> {
        let is_ready = self.each(|member| Ok(!arm(member)?));
        if !matches!(is_ready, Ok(false)) {
            self.disarm();
        }
        Ok(!is_ready?)
    }

    /// Undoes [`SubscriberSet::arm`].
    pub fn disarm(&mut self) {
        self.members.iter_mut().flatten().for_each(|member| member.disarm());
    }
}

/// For the C library and other bindings, whose languages know no borrows.
#[doc(hidden)]
impl SubscriberSet {
    /// Whether this process is a forked child of the set's.
    pub fn is_forked(&self) -> bool {
        self.owner.is_forked()
    }

    /// As [`SubscriberSet::add`], but an error returns the subscriber too.
    pub fn add_or_return(
        &mut self,
        subscriber: Box<Subscriber>,
    ) -> std::result::Result<usize, (Box<Subscriber>, Error)> {
        let key = match self.watch(&subscriber) {
            Ok(key) => key,
            Err(error) => return Err((subscriber, error)),
        };
        self.spin.set_peer(subscriber.peer());
        match self.members.get_mut(key) {
            Some(free) => *free = Some(subscriber),
            None => self.members.push(Some(subscriber)),
        }
        // An event loop that waits has to arm it too.
        self.doorbells.local_wake().ring();
        Ok(key)
    }

    /// The next message, in the usual case.
    #[inline(always)]
    pub fn receive_fast(&mut self) -> Option<SubscriberEvent<'_>> {
        self.until_check = self.until_check.checked_sub(1)?;
        let key = self.find_fast()?;
        self.message(key)
    }

    /// The delivery of this member that [`Delivery::keep`] has kept. As [`Subscriber::kept_delivery`].
    pub fn kept_delivery(&mut self, key: usize) -> Option<Delivery<'_>> {
        Some(self.members.get_mut(key)?.as_mut()?.kept_delivery())
    }
}

impl Polled for SubscriberSet {
    #[inline]
    fn poll(&mut self) -> Result<bool> {
        self.each(Subscriber::poll_if_usable)
    }

    fn may_be_ready(&mut self) -> bool {
        self.members.iter_mut().flatten().any(|member| member.may_be_ready())
    }

    fn spin(&mut self) -> &mut Spin {
        &mut self.spin
    }

    /// The newest of all.
    fn last_ring(&self) -> Option<LastRing> {
        self.members.iter().flatten().filter_map(|member| member.last_ring()).max_by_key(|ring| ring.at_ns)
    }
}

impl Side for SubscriberSet {
    fn arm(&mut self) -> Result<bool> {
        self.arm_each(Side::arm)
    }

    fn disarm(&mut self) {
        SubscriberSet::disarm(self);
    }

    fn end(&mut self) -> Result<bool> {
        self.each(Side::end)
    }

    fn needs_timed_wait(&self) -> bool {
        self.members.iter().flatten().any(|member| member.needs_timed_wait())
    }

    fn sleep(&mut self, deadline: Option<Instant>) -> Result<Ready> {
        self.doorbells.sleep(deadline)
    }

    fn rung(&mut self, _alone: bool) -> Result<bool> {
        self.doorbells.drain()?;
        let mut events = Vec::new();
        self.doorbells.take_events(&mut events)?;
        let mut result = Ok(());
        for event in events {
            let Event::Connecting(key) = event else { continue };
            let Some(member) = &mut self.members[key as usize] else { continue };
            let ended = member
                .endpoint
                .doorbells
                .drain()
                .and_then(|is_gone| Ok(member.rung(true)? || is_gone && Side::end(member.as_mut())?));
            // The message that there may be is found by a poll, in turn.
            if let Err(error) = ended {
                result = result.and(self.note(key as usize, error));
            }
        }
        result?;
        self.poll()
    }

    fn is_peer_known_gone(&mut self) -> Result<bool> {
        self.each(Side::is_peer_known_gone)
    }
}

impl AsFd for SubscriberSet {
    /// The descriptor for an event loop: see [`SubscriberSet::arm`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.doorbells.as_fd()
    }
}

impl AsRawFd for SubscriberSet {
    /// As [`AsFd`], for runtimes that need the number.
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}
