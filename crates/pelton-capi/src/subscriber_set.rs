//! Subscribers of many publishers, for which one thread waits.
//!
//! A member's handle is detached while a set has it, so it stays allocated until the set gives its subscriber back.

use crate::broadcast::{CDelivery, Subscriber, SubscriberInfo, show};
use crate::c::{Info, New, Out, Raw};
use crate::code::{self, Answer, armed, done};
use crate::entries::entries;
use crate::handle::{Handle, Kind, Object, State};
use crate::options;
use pelton::{Deadline, SubscriberEvent};
use std::ffi::c_int;
use std::os::fd::AsRawFd;

pub struct SubscriberSet {
    set: pelton::SubscriberSet,
    /// The members' handles, by their keys.
    members: Vec<Option<Raw<Subscriber>>>,
    /// The member that keeps a delivery. Until that is released, the set is used for nothing else.
    received: Option<usize>,
}

impl Object for SubscriberSet {
    const KIND: Kind = Kind::SubscriberSet;

    fn is_forked(&self) -> bool {
        self.set.is_forked()
    }

    fn state(&self) -> State {
        if self.received.is_some() { State::One } else { State::Free }
    }
}

impl SubscriberSet {
    /// The set, for calls that would move what is received.
    fn released(&mut self) -> Answer<&mut SubscriberSet> {
        if self.received.is_some() { Err(code::plain(code::NOT_RELEASED)) } else { Ok(self) }
    }

    fn key_of(&self, subscriber: Raw<Subscriber>) -> Answer<usize> {
        if let Some(key) = self.members.iter().position(|member| *member == Some(subscriber)) {
            return Ok(key);
        }
        // NULL, a closed one, and one of another set have errors of their own.
        subscriber.enter(|_| Ok(()))?;
        Err(code::tell(code::REFUSED, "the subscriber is not in this set"))
    }

    fn add(&mut self, handle: Raw<Subscriber>) -> Answer {
        let subscriber = handle.detach(|subscriber| subscriber.released().map(drop))?.into_broadcast();
        match self.set.add_or_return(Box::new(subscriber)) {
            Ok(key) => {
                self.members.resize(self.members.len().max(key + 1), None);
                self.members[key] = Some(handle);
                Ok(())
            }
            Err((subscriber, error)) => {
                // SAFETY: it was detached above, and the caller uses it in no other thread.
                unsafe { handle.reattach(Subscriber::new(*subscriber)) };
                Err(code::of(&error))
            }
        }
    }

    fn remove(&mut self, key: usize) {
        if let Some(subscriber) = self.set.remove(key) {
            give_back(&mut self.members[key], subscriber);
        }
    }

    /// Receives a message. Also if a publisher has left, `from` becomes its subscriber.
    fn receive(&mut self, deadline: Deadline, from: &mut Raw<Subscriber>) -> Answer<CDelivery> {
        match done(self.set.receive_until(deadline))? {
            None => Err(code::AGAIN),
            Some(SubscriberEvent::Message { key, message }) => {
                *from = self.members[key].expect("each member has a handle");
                self.received = Some(key);
                Ok(show(message))
            }
            Some(SubscriberEvent::Left { key, subscriber, error }) => {
                *from = give_back(&mut self.members[key], subscriber);
                Err(code::of(&error))
            }
            Some(event) => Err(code::tell(code::INTERNAL, format!("no code for this event: {event:?}"))),
        }
    }

    /// Receives a message in the usual case.
    #[inline(always)]
    fn receive_fast(&mut self) -> Option<(Raw<Subscriber>, CDelivery)> {
        let SubscriberEvent::Message { key, message } = self.set.receive_fast()? else { return None };
        let shown = show(message);
        self.received = Some(key);
        self.members[key].map(|member| (member, shown))
    }

    /// Releases the received message; false: there is none.
    fn release(&mut self) -> bool {
        match self.received.take() {
            Some(key) => {
                drop(self.set.kept_delivery(key));
                true
            }
            None => false,
        }
    }
}

/// Gives a subscriber that has left the set back to its handle.
fn give_back(member: &mut Option<Raw<Subscriber>>, subscriber: Box<pelton::Subscriber>) -> Raw<Subscriber> {
    let handle = member.take().expect("each member has a handle");
    // SAFETY: `add` has detached it, and the caller does not use it otherwise while the set has it.
    unsafe { handle.reattach(Subscriber::new(*subscriber)) };
    handle
}

/// Gives the members back.
impl Drop for SubscriberSet {
    fn drop(&mut self) {
        self.release();
        (0..self.members.len()).for_each(|key| self.remove(key));
    }
}

/// Receives, if a message is there.
///
/// # Safety
/// As for [`Handle::object_in`]; `from` and `out` are NULL or writable.
#[inline(always)]
unsafe fn receive_fast(
    handle: *mut Handle<SubscriberSet>,
    from: *mut Raw<Subscriber>,
    out: *mut CDelivery,
) -> Option<c_int> {
    if from.is_null() || out.is_null() {
        return None;
    }
    // Whatever follows: a caller that finds a subscriber there takes an error for the end of its publisher.
    // SAFETY: the caller guarantees it.
    unsafe { from.write(Raw::NULL) };
    // SAFETY: the caller guarantees the handle.
    let set = unsafe { Handle::object_in(handle, State::Free) }?;
    // SAFETY: the object was found.
    match unsafe { Handle::run_fast(handle, || set.receive_fast()) } {
        Ok(Some((member, shown))) => {
            // SAFETY: the caller guarantees both; the object was found.
            unsafe {
                from.write(member);
                out.write(shown);
                Handle::set_state(handle, State::One);
            }
            Some(0)
        }
        // The slow path waits, and finds an error again.
        Ok(None) => None,
        Err(code) => Some(code),
    }
}

/// Releases the received message.
///
/// # Safety
/// As for [`Handle::object_in`].
#[inline(always)]
unsafe fn release_fast(handle: *mut Handle<SubscriberSet>) -> Option<c_int> {
    // SAFETY: the caller guarantees the handle.
    let set = unsafe { Handle::object_in(handle, State::One) }?;
    if set.is_forked() {
        return None;
    }
    // SAFETY: the object was found.
    Some(match unsafe { Handle::run_fast(handle, || set.release()) } {
        Ok(_) => {
            // SAFETY: the object was found.
            unsafe { Handle::set_state(handle, State::Free) };
            0
        }
        Err(code) => code,
    })
}

entries! {
    fn pelton_subscriber_set_open(wait: u32, out: New<SubscriberSet>) {
        let set = done(pelton::SubscriberSet::new(options::wait(wait)?))?;
        out.give(SubscriberSet { set, members: Vec::new(), received: None })
    }

    fn pelton_subscriber_set_add(set: &mut SubscriberSet, subscriber: Raw<Subscriber>) {
        set.released()?.add(subscriber)
    }

    fn pelton_subscriber_set_remove(set: &mut SubscriberSet, subscriber: Raw<Subscriber>) {
        let key = set.key_of(subscriber)?;
        set.released()?.remove(key);
        Ok(())
    }

    fn pelton_subscriber_set_receive(
        set: &mut SubscriberSet,
        deadline_ns: Deadline,
        from: Out<Raw<Subscriber>>,
        out: Out<CDelivery>,
    )
    fast { receive_fast(set, from, out) }
    {
        let mut found = Raw::NULL;
        let received = set.released().and_then(|set| set.receive(deadline_ns, &mut found));
        from.write(found);
        out.write(received?);
        Ok(())
    }

    fn pelton_subscriber_set_release(set: &mut SubscriberSet)
    fast { release_fast(set) }
    {
        if set.release() { Ok(()) } else { Err(code::plain(code::NOT_RECEIVED)) }
    }

    fn pelton_subscriber_set_fd(set: &mut SubscriberSet) {
        Ok(set.set.as_raw_fd())
    }

    fn pelton_subscriber_set_arm(set: &mut SubscriberSet) {
        armed(set.released()?.set.arm())
    }

    fn pelton_subscriber_set_disarm(set: &mut SubscriberSet) {
        set.set.disarm();
        Ok(())
    }

    fn pelton_subscriber_set_get_info(
        set: &mut SubscriberSet,
        subscriber: Raw<Subscriber>,
        out: Info<SubscriberInfo>,
    ) {
        let key = set.key_of(subscriber)?;
        out.write(SubscriberInfo::of(set.set.get(key).expect("it is a member")))
    }
}
