//! A client's calls that are in flight: each in a place of its own until its last answer has come.

use super::frame::{CALLS_MAX, generation_of, slot_of};

/// Which call: as [`crate::Client::submit`] answers it, and as its [`crate::Completion`]s say it. No two of a client's calls are the same in
/// 2^32 calls; then one may come again, so one that is over is not to be kept for as long as that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallId(pub(crate) u64);

/// What came of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The reply; nothing more comes of this call.
    Reply,
    /// A part of a streaming reply. More comes.
    Part,
    /// A streaming reply has ended. It has no bytes of its own.
    End,
    /// The service failed the call, with a code and bytes of its own meaning. Nothing more comes.
    Failed(u32),
    /// The service let the call go without a reply: its handler panicked, or forgot. Nothing more comes.
    Abandoned,
    /// The service has gone, or takes no more calls, and the client goes on without it. Nothing more comes.
    Lost(Loss),
}

/// Why a call was lost.
// As large as the code of a failure: an outcome is copied on the way of each answer, and one with a byte at an odd place in pieces.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// The service died. Whether it had carried the call out nobody knows.
    PeerDied,
    /// The service closed without having drained. Whether it had carried the call out nobody knows.
    Closed,
    /// The service broke the rules. Whether it had carried the call out nobody knows.
    Corrupt,
    /// The service gave the call back, which it had not begun, since it drains; and no other serves the name. To ask again does
    /// no harm.
    Returned,
}

impl Outcome {
    /// Whether nothing more comes of the call.
    pub fn is_final(self) -> bool {
        self != Outcome::Part
    }
}

#[derive(Debug, Default)]
pub(super) struct Calls {
    places: Vec<Place>,
    free: Vec<u32>,
    /// Of those in flight, not given up.
    waiting: usize,
}

#[derive(Debug)]
struct Place {
    generation: u32,
    state: State,
    /// The link that it was submitted by; 0 while there is none.
    link: u32,
    /// Its service may carry it out though another has begun to.
    is_idempotent: bool,
    /// How often it was submitted again though another service may have begun it.
    repeats: u8,
    /// Some of a streaming reply has been received.
    has_part: bool,
    /// Why it has no link.
    loss: Loss,
    deadline: u64,
    /// To be submitted elsewhere, if there can be an elsewhere.
    request: Vec<u8>,
}

impl Place {
    fn forget_request(&mut self) {
        match self.request.capacity() > KEPT_BYTES {
            true => self.request = Vec::new(),
            false => self.request.clear(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Free,
    Waiting,
    /// Nobody waits for it any more; the service has not let go of it yet.
    GivenUp,
}

/// Of a place's memory for requests, what is kept for the next call.
const KEPT_BYTES: usize = 4096;
/// One request that ends each service which begins it is not to end them all, and their successors.
const REPEATS_MAX: u8 = 3;

impl Calls {
    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty() && self.places.len() == CALLS_MAX as usize
    }

    pub(super) fn count(&self) -> usize {
        self.places.len() - self.free.len()
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }

    /// The id of the next call, in the place used last: its memory is warm.
    #[inline(always)]
    pub(super) fn next(&mut self) -> Option<CallId> {
        let slot = match self.free.last() {
            Some(slot) => *slot,
            None => self.add_place()?,
        };
        let generation = self.places[slot as usize].generation.checked_add(1).unwrap_or(1);
        Some(CallId(u64::from(generation) << 32 | u64::from(slot)))
    }

    #[cold]
    fn add_place(&mut self) -> Option<u32> {
        if self.is_full() {
            return None;
        }
        let (loss, request) = (Loss::Returned, Vec::new());
        let state = State::Free;
        let place = Place {
            generation: 0,
            state,
            link: 0,
            is_idempotent: false,
            repeats: 0,
            has_part: false,
            loss,
            deadline: 0,
            request,
        };
        self.places.push(place);
        let slot = self.places.len() as u32 - 1;
        self.free.push(slot);
        Some(slot)
    }

    /// [`Calls::next`] has answered this call, and others have ended since, while it was being written: it stands first again.
    pub(super) fn put_first(&mut self, call: CallId) {
        let slot = slot_of(call.0);
        if self.free.last() != Some(&slot) {
            self.free.retain(|free| *free != slot);
            self.free.push(slot);
        }
    }

    /// The call that [`Calls::next`] answered has been submitted by that link; it stands first still.
    #[inline(always)]
    pub(super) fn begin(&mut self, call: CallId, link: u32) {
        self.free.pop();
        self.waiting += 1;
        let place = self.place_mut(call);
        (place.generation, place.state, place.link) = (generation_of(call.0), State::Waiting, link);
        (place.is_idempotent, place.repeats, place.has_part) = (false, 0, false);
    }

    /// What the call says, in case that it is to be said again.
    pub(super) fn keep(&mut self, call: CallId, deadline: u64, request: &[u8]) {
        let place = self.place_mut(call);
        place.deadline = deadline;
        place.request.extend_from_slice(request);
    }

    /// What [`Calls::keep`] was told, taken out; [`Calls::put_back`] gives it back.
    pub(super) fn take_kept(&mut self, call: CallId) -> (u64, Vec<u8>) {
        let place = self.place_mut(call);
        (place.deadline, std::mem::take(&mut place.request))
    }

    pub(super) fn put_back(&mut self, call: CallId, request: Vec<u8>) {
        self.place_mut(call).request = request;
    }

    pub(super) fn kept_bytes(&self, call: CallId) -> usize {
        self.places[slot_of(call.0) as usize].request.len()
    }

    fn place_mut(&mut self, call: CallId) -> &mut Place {
        &mut self.places[slot_of(call.0) as usize]
    }

    fn place(&self, id: u64) -> Option<&Place> {
        self.places.get(slot_of(id) as usize).filter(|place| place.generation == generation_of(id))
    }

    pub(super) fn state(&self, id: u64) -> State {
        self.place(id).map_or(State::Free, |place| place.state)
    }

    /// As [`Calls::state`], as far as that link is concerned.
    #[inline(always)]
    pub(super) fn state_at(&self, id: u64, link: u32) -> State {
        self.place(id).map_or(State::Free, |place| if place.link == link { place.state } else { State::Free })
    }

    /// Which link it is submitted by; 0 for none.
    pub(super) fn link(&self, call: CallId) -> u32 {
        self.places[slot_of(call.0) as usize].link
    }

    pub(super) fn set_idempotent(&mut self, call: CallId) {
        self.place_mut(call).is_idempotent = true;
    }

    pub(super) fn note_part(&mut self, call: CallId) {
        self.place_mut(call).has_part = true;
    }

    pub(super) fn has_part(&self, id: u64) -> bool {
        self.place(id).is_some_and(|place| place.has_part)
    }

    /// Whether it may be submitted elsewhere, when its service is lost like that.
    pub(super) fn may_move(&self, call: CallId, loss: Loss) -> bool {
        let place = &self.places[slot_of(call.0) as usize];
        loss == Loss::Returned || (place.is_idempotent && place.repeats < REPEATS_MAX && !place.has_part)
    }

    /// It is submitted by no link any more, for that reason, and is to be by another.
    pub(super) fn unhouse(&mut self, call: CallId, loss: Loss) {
        let place = self.place_mut(call);
        (place.link, place.loss) = (0, loss);
        place.repeats += u8::from(loss != Loss::Returned);
    }

    pub(super) fn house(&mut self, call: CallId, link: u32) {
        self.place_mut(call).link = link;
    }

    pub(super) fn loss(&self, call: CallId) -> Loss {
        self.places[slot_of(call.0) as usize].loss
    }

    pub(super) fn give_up(&mut self, call: CallId) {
        self.place_mut(call).state = State::GivenUp;
        self.waiting -= 1;
    }

    #[inline(always)]
    pub(super) fn end(&mut self, id: u64) {
        let place = self.place_mut(CallId(id));
        let before = std::mem::replace(&mut place.state, State::Free);
        place.forget_request();
        self.waiting -= usize::from(before == State::Waiting);
        self.free.push(slot_of(id));
    }

    /// Ends a call that is awaited of that link, as nearly all are that are answered; false of any other.
    #[inline(always)]
    pub(super) fn end_awaited(&mut self, id: u64, link: u32) -> bool {
        let Some(place) = self.places.get_mut(slot_of(id) as usize) else { return false };
        if place.generation != generation_of(id) || place.link != link || place.state != State::Waiting {
            return false;
        }
        place.state = State::Free;
        if !place.request.is_empty() {
            place.forget_request();
        }
        self.waiting -= 1;
        self.free.push(slot_of(id));
        true
    }

    /// The calls that are submitted by that link.
    pub(super) fn of_link(&self, link: u32) -> Vec<CallId> {
        let of = |(slot, place): (usize, &Place)| {
            let is_of = place.state != State::Free && place.link == link;
            is_of.then_some(CallId(u64::from(place.generation) << 32 | slot as u64))
        };
        self.places.iter().enumerate().filter_map(of).collect()
    }
}
