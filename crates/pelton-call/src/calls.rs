//! A client's calls that are in flight: each in a slot of its own until its final completion has come.

use super::frame::{CALLS_MAX, Header, Kind, Size, generation_of, slot_of};
use pelton_channel::{CallFailure, Error};

/// Identifies a call: [`crate::Client::submit`] returns it, and [`crate::Completion`]s carry it. No two calls of a
/// client have the same one within 2^32 calls; then one may come again, so do not keep that of a finished call for as
/// long as that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallId(pub(crate) u64);

/// What a completion means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The reply. It ends the call.
    Reply,
    /// A part of a streaming reply. More completions follow.
    Part,
    /// The end of a streaming reply. It has no bytes of its own.
    End,
    /// The service failed the call, with a code and bytes of its own meaning. It ends the call.
    Failed(u32),
    /// The service dropped the call without a reply: its handler panicked, or forgot. It ends the call.
    Abandoned,
    /// The service has left, or takes no more calls, and the client continues without it. It ends the call.
    Lost(Loss),
}

/// Why a call was lost.
// As large as the code of a failure: an outcome is copied with each completion, and a single byte would be copied in
// odd pieces.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// The service died. It may have executed the call or not.
    PeerDied,
    /// The service closed without a drain. It may have executed the call or not.
    Closed,
    /// The service broke the rules. It may have executed the call or not.
    Corrupt,
    /// A draining service returned the call without beginning it, and no other serves the name. To submit it again is
    /// harmless.
    Returned,
}

impl Loss {
    /// The error for a caller that awaits a call which was lost.
    #[cold]
    pub(crate) fn error(self) -> Error {
        match self {
            Loss::PeerDied => Error::PeerDied { unreleased: 0 },
            Loss::Closed => Error::Closed { unreleased: 0 },
            Loss::Corrupt => Error::Corrupt("the service broke the rules of calls".to_owned()),
            Loss::Returned => {
                Error::Refused("the service gave the call back, as it drains: ask its successor".to_owned())
            }
        }
    }
}

impl Outcome {
    /// The error that the outcome is, if it is one; `bytes` are the completion's.
    #[doc(hidden)]
    pub fn error(self, bytes: impl FnOnce() -> Vec<u8>) -> Option<Error> {
        match self {
            Outcome::Reply | Outcome::Part | Outcome::End => None,
            Outcome::Failed(code) => Some(Error::CallFailed(CallFailure::new(code, bytes()))),
            Outcome::Abandoned => Some(Error::CallAbandoned),
            Outcome::Lost(loss) => Some(loss.error()),
        }
    }

    /// Whether it ends the call.
    pub fn is_final(self) -> bool {
        self != Outcome::Part
    }
}

/// The table of calls in flight.
#[derive(Debug, Default)]
pub(super) struct Calls {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Calls in flight that are not cancelled.
    awaited: usize,
}

#[derive(Debug)]
// In this order, so that one store begins a call: the flags, `repeats` and the discriminant of `State::Awaited` are 0.
#[repr(C)]
struct Slot {
    deadline: u64,
    /// For another service, if the client can have several.
    request: Vec<u8>,
    generation: u32,
    /// Another service may execute the call after one has begun it.
    is_idempotent: bool,
    /// A part of a streaming reply has come.
    has_part: bool,
    /// The request begins with a traceparent.
    is_traced: bool,
    /// How often it was submitted again though another service may have begun it.
    repeats: u8,
    state: State,
}

/// The state of a slot. A connection is given by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Submitted by this connection.
    Awaited(u32),
    Free,
    /// Its connection ended, for this reason. It is to be submitted by another.
    Unrouted(Loss),
    /// Submitted by this connection, and cancelled. Its final completion has not come.
    Cancelled(u32),
}

impl State {
    fn is_awaited(self) -> bool {
        matches!(self, State::Awaited(_) | State::Unrouted(_))
    }
}

impl Slot {
    fn forget_request(&mut self) {
        match self.request.capacity() > KEPT_BYTES {
            true => self.request = Vec::new(),
            false => self.request.clear(),
        }
    }
}

/// Most memory for a request that a free slot keeps for its next call.
const KEPT_BYTES: usize = 4096;
/// A request that crashes each service which begins it must not crash all of them, and their successors.
const REPEATS_MAX: u8 = 3;

impl Calls {
    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty() && self.slots.len() == CALLS_MAX as usize
    }

    pub(super) fn count(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn awaited(&self) -> usize {
        self.awaited
    }

    /// The id of the next call, in the slot that was used last: its memory is in the cache.
    #[inline(always)]
    pub(super) fn next(&mut self) -> Option<CallId> {
        let slot = match self.free.last() {
            Some(slot) => *slot,
            None => self.add_slot()?,
        };
        let generation = self.slots[slot as usize].generation.checked_add(1).unwrap_or(1);
        Some(CallId(u64::from(generation) << 32 | u64::from(slot)))
    }

    #[cold]
    fn add_slot(&mut self) -> Option<u32> {
        if self.is_full() {
            return None;
        }
        let index = self.slots.len() as u32;
        self.slots.push(Slot {
            generation: 0,
            state: State::Free,
            is_idempotent: false,
            has_part: false,
            is_traced: false,
            repeats: 0,
            deadline: 0,
            request: Vec::new(),
        });
        self.free.push(index);
        Some(index)
    }

    /// Moves a call's slot back to the head of the free list. [`Calls::next`] had returned this call; while its request
    /// was written, other calls ended and freed their slots.
    pub(super) fn put_first(&mut self, call: CallId) {
        let slot = slot_of(call.0);
        if self.free.last() != Some(&slot) {
            self.free.retain(|free| *free != slot);
            self.free.push(slot);
        }
    }

    /// The call that [`Calls::next`] returned was submitted by that connection. It is still the next one.
    #[inline(always)]
    pub(super) fn begin(&mut self, call: CallId, connection: u32) {
        self.free.pop();
        self.awaited += 1;
        let slot = self.slot_mut(call);
        (slot.generation, slot.state) = (generation_of(call.0), State::Awaited(connection));
        (slot.is_idempotent, slot.has_part, slot.is_traced, slot.repeats) = (false, false, false, 0);
    }

    /// Keeps the header and a copy of the request, for another service.
    pub(super) fn keep(&mut self, call: CallId, header: Header, request: &[u8]) {
        let slot = self.slot_mut(call);
        (slot.deadline, slot.is_traced) = (header.deadline, header.traced);
        slot.request.extend_from_slice(request);
    }

    /// The header, and the copy, taken out; [`Calls::put_back`] reverses it.
    pub(super) fn take_kept(&mut self, call: CallId) -> (Header, Vec<u8>) {
        let slot = self.slot_mut(call);
        let header = Header { deadline: slot.deadline, traced: slot.is_traced, ..Header::new(Kind::Request, call.0) };
        (header, std::mem::take(&mut slot.request))
    }

    pub(super) fn put_back(&mut self, call: CallId, request: Vec<u8>) {
        self.slot_mut(call).request = request;
    }

    pub(super) fn kept_size(&self, call: CallId) -> Size {
        let slot = &self.slots[slot_of(call.0) as usize];
        let header = Header { traced: slot.is_traced, ..Header::new(Kind::Request, call.0) };
        header.size_of(&slot.request)
    }

    fn slot_mut(&mut self, call: CallId) -> &mut Slot {
        &mut self.slots[slot_of(call.0) as usize]
    }

    fn slot(&self, call: CallId) -> Option<&Slot> {
        self.slots.get(slot_of(call.0) as usize).filter(|slot| slot.generation == generation_of(call.0))
    }

    pub(super) fn state(&self, call: CallId) -> State {
        self.slot(call).map_or(State::Free, |slot| slot.state)
    }

    pub(super) fn is_awaited(&self, call: CallId) -> bool {
        self.state(call).is_awaited()
    }

    pub(super) fn set_idempotent(&mut self, call: CallId) {
        self.slot_mut(call).is_idempotent = true;
    }

    pub(super) fn note_part(&mut self, call: CallId) {
        self.slot_mut(call).has_part = true;
    }

    pub(super) fn has_part(&self, call: CallId) -> bool {
        self.slot(call).is_some_and(|slot| slot.has_part)
    }

    /// Takes a call off its connection, if another service may execute it after such a loss. Returns whether it did.
    pub(super) fn unroute(&mut self, call: CallId, loss: Loss) -> bool {
        let slot = self.slot_mut(call);
        let is_repeat = loss != Loss::Returned;
        if is_repeat && !(slot.is_idempotent && slot.repeats < REPEATS_MAX && !slot.has_part) {
            return false;
        }
        slot.state = State::Unrouted(loss);
        slot.repeats += u8::from(is_repeat);
        true
    }

    /// Another connection has submitted the call.
    pub(super) fn reroute(&mut self, call: CallId, connection: u32) {
        self.slot_mut(call).state = State::Awaited(connection);
    }

    /// The call is cancelled, and the service has not ended it yet.
    pub(super) fn cancel(&mut self, call: CallId, connection: u32) {
        self.slot_mut(call).state = State::Cancelled(connection);
        self.awaited -= 1;
    }

    #[inline(always)]
    pub(super) fn end(&mut self, call: CallId) {
        let slot = self.slot_mut(call);
        let before = std::mem::replace(&mut slot.state, State::Free);
        slot.forget_request();
        self.awaited -= usize::from(before.is_awaited());
        self.free.push(slot_of(call.0));
    }

    /// Ends a call that is awaited from that connection, as nearly all completed ones are. Returns false for any other.
    #[inline(always)]
    pub(super) fn end_awaited(&mut self, call: CallId, connection: u32) -> bool {
        let Some(slot) = self.slots.get_mut(slot_of(call.0) as usize) else { return false };
        if slot.generation != generation_of(call.0) || slot.state != State::Awaited(connection) {
            return false;
        }
        slot.state = State::Free;
        if !slot.request.is_empty() {
            slot.forget_request();
        }
        self.awaited -= 1;
        self.free.push(slot_of(call.0));
        true
    }

    /// The calls that were submitted by that connection.
    pub(super) fn of_connection(&self, connection: u32) -> Vec<CallId> {
        let of = |(index, slot): (usize, &Slot)| {
            let is_of = matches!(slot.state, State::Awaited(of) | State::Cancelled(of) if of == connection);
            is_of.then_some(CallId(u64::from(slot.generation) << 32 | index as u64))
        };
        self.slots.iter().enumerate().filter_map(of).collect()
    }
}
