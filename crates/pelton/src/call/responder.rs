//! A request, what answers it, and room for an answer in place.

mod raw;

pub use raw::{RawReplyRoom, RawRequest};

use super::caller::{Guard, Out, forget_room, has_room};
use super::frame::{HEADER_BYTES, Header, Kind, check_size, slot_of};
use super::hold::Hold;
use super::{Body, Flag, pool};
use crate::error::{Error, Result};
use crate::link::Peer;
use crate::sender::Sent;
use crate::wait::Patience;
use pelton_lane::Space;
use std::mem::ManuallyDrop;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// What a client asks, or tells.
///
/// Its bytes are in memory that the client wrote, unless they came in pieces or [`crate::Service::run`] copied them: reading them in
/// place trusts the client not to write after it has asked. [`Request::copy_out`] is safe against any client.
#[derive(Debug)]
pub struct Request<'a> {
    pub(super) body: Body<'a>,
    pub(super) responder: Answering<'a>,
}

impl<'a> Request<'a> {
    /// Answers, and is done. Does not wait: what the client has no room for is kept until it has.
    ///
    /// # Errors
    /// As [`Responder::reply`].
    #[inline(always)]
    pub fn reply(self, reply: &[u8]) -> Result<()> {
        self.responder.reply(reply)
    }

    /// Fails the call with a code and bytes of the service's own meaning. Does not wait.
    ///
    /// # Errors
    /// As [`Responder::reply`].
    pub fn fail(self, code: u32, bytes: &[u8]) -> Result<()> {
        self.responder.fail(code, bytes)
    }

    /// What answers it, apart from its bytes, which are given back: to answer later, or on another thread.
    pub fn into_responder(self) -> Responder {
        self.responder.away()
    }

    /// Copies the bytes into `buffer`, whose contents they replace, and gives them back; what remains is to answer.
    pub fn copy_out(self, buffer: &mut Vec<u8>) -> Responder {
        self.body.copy_into(buffer);
        self.responder.away()
    }

    /// Its bytes, on their own, and what answers it.
    pub fn into_parts(self) -> (Vec<u8>, Responder) {
        (self.body.into_vec(), self.responder.away())
    }

    /// Its bytes and what answers it, side by side: to write an answer in place while the request is read.
    #[inline]
    pub fn split(&mut self) -> (&[u8], &mut Answering<'a>) {
        (self.body.bytes(), &mut self.responder)
    }

    /// Whether the client does not await an answer: there is nothing to reply to then.
    #[inline]
    pub fn is_notification(&self) -> bool {
        self.responder.id == 0
    }

    /// As [`Responder::peer`].
    pub fn peer(&self) -> Option<Peer> {
        self.responder.peer()
    }

    /// As [`Responder::deadline`].
    pub fn deadline(&self) -> Option<Instant> {
        self.responder.deadline()
    }

    /// As [`Responder::is_cancelled`].
    pub fn is_cancelled(&self) -> bool {
        self.responder.is_cancelled()
    }
}

impl std::ops::Deref for Request<'_> {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        self.body.bytes()
    }
}

/// Answers one request. Dropped without an answer it tells the client that the call was abandoned.
///
/// With its request ([`Request::split`]) it is lent until the service is used again, and answers without a lock as long as nobody has
/// taken away a [`Responder`] of the same client.
#[derive(Debug)]
pub struct Answering<'a> {
    pub(super) caller: Hold<'a>,
    pub(super) id: u64,
    pub(super) deadline: u64,
    pub(super) is_answered: Flag,
}

/// Answers one request at any time, on any thread.
pub type Responder = Answering<'static>;

impl Answering<'_> {
    /// Answers; after parts, this is the last of them. Does not wait: what the client has no room for is kept until it has.
    ///
    /// # Errors
    /// [`Error::PeerDied`] and [`Error::Closed`] when the client has gone: the reply is dropped. [`Error::TooLarge`] for more
    /// than the client takes ([`crate::Options::call_bytes_max`] there); the call is abandoned. [`Error::Refused`] for a notification;
    /// [`Error::Corrupt`], [`Error::Forked`].
    #[inline(always)]
    pub fn reply(mut self, reply: &[u8]) -> Result<()> {
        self.last(Header::new(Kind::Reply, self.id), reply)
    }

    /// Fails the call with a code and bytes of the service's own meaning. Does not wait.
    ///
    /// # Errors
    /// As [`Responder::reply`].
    pub fn fail(mut self, code: u32, bytes: &[u8]) -> Result<()> {
        self.last(Header { code, ..Header::new(Kind::Failed, self.id) }, bytes)
    }

    /// Ends a reply that was given in parts, or has none. Does not wait.
    ///
    /// # Errors
    /// As [`Responder::reply`].
    pub fn end(mut self) -> Result<()> {
        self.last(Header::new(Kind::End, self.id), &[])
    }

    /// Gives a part of the reply. Waits until the client has room for it, on a thread of its own, please: as long as this
    /// waits in the loop that takes requests, no client's are taken. On other threads it keeps the service from taking more
    /// requests of this client alone; those that it had taken before may each have a thread of [`crate::Service::run`] wait.
    ///
    /// # Errors
    /// As [`Responder::reply`]; the call goes on after [`Error::TooLarge`]. [`Error::Refused`] also instead of waiting while this
    /// thread has room reserved for another reply.
    pub fn part(&mut self, part: &[u8]) -> Result<()> {
        self.send_part(part, Patience::Endless).map(|_| ())
    }

    /// As [`Responder::part`], if there is room now: [`Sent::Full`] otherwise, and then [`crate::Service::arm`] tells the service's event
    /// loop once there is. Never waits.
    ///
    /// # Errors
    /// As [`Responder::part`].
    pub fn try_part(&mut self, part: &[u8]) -> Result<Sent> {
        self.send_part(part, Patience::None)
    }

    /// As [`Responder::part`], until `deadline`: [`Sent::TimedOut`] when it passes.
    ///
    /// # Errors
    /// As [`Responder::part`].
    pub fn part_until(&mut self, part: &[u8], deadline: Instant) -> Result<Sent> {
        self.send_part(part, Patience::Until(deadline))
    }

    /// Reserves room for a reply, or a part of it, of `bytes`, to be written in place; `None` when there is none now: reply with
    /// a copy then. Write it at once: meanwhile no other reply to this client is written, and one from this very thread is
    /// refused. Never waits for the client.
    ///
    /// # Errors
    /// As [`Responder::reply`]; [`Error::TooLarge`] also for more than the lane's largest message less 24 bytes.
    #[inline(always)]
    pub fn try_reserve(&mut self, bytes: usize) -> Result<Option<ReplyRoom<'_>>> {
        match self.room_at_once(bytes) {
            Some(space) => {
                let out = self.caller.alone();
                debug_assert!(out.is_some(), "it was just found to be so");
                let held = Held { caller: &self.caller, out };
                Ok(Some(ReplyRoom { held, space, id: self.id, is_answered: &mut self.is_answered }))
            }
            None => self.reserve_slowly(bytes),
        }
    }

    /// The common case: the client is this one's alone, nothing waits before this, and there is room.
    #[inline(always)]
    fn room_at_once(&self, bytes: usize) -> Option<Space> {
        let is_due = self.id != 0 && !self.is_answered.is_set() && bytes as u64 <= self.caller.bytes_max;
        let mut out = self.caller.alone().filter(|out| is_due && out.outbox.is_empty())?;
        if self.caller.has_later() { None } else { out.outbox.sender.room_at_once(bytes) }
    }

    #[cold]
    #[inline(never)]
    fn reserve_slowly(&mut self, bytes: usize) -> Result<Option<ReplyRoom<'_>>> {
        self.check(bytes)?;
        let caller = &self.caller;
        let mut out = match caller.alone() {
            Some(out) => out,
            None if has_room() => return Err(room_is_held()),
            None => caller.lock()?,
        };
        if !out.outbox.is_empty() || caller.has_later() {
            caller.flush(&mut out)?;
        }
        if !out.outbox.is_empty() {
            return Ok(None);
        }
        let Some(space) = out.outbox.sender.try_room(bytes).map_err(|error| caller.went(error))? else {
            return Ok(None);
        };
        if out.is_locked() {
            caller.note_room();
        }
        let held = Held { caller, out: Some(out) };
        Ok(Some(ReplyRoom { held, space, id: self.id, is_answered: &mut self.is_answered }))
    }

    /// Who asked.
    pub fn peer(&self) -> Option<Peer> {
        self.caller.peer
    }

    /// When the client will not await the answer any more, if it has said so. What it says is for the service to weigh: nothing is
    /// dropped because of it.
    pub fn deadline(&self) -> Option<Instant> {
        self.caller.desk.clock.instant_of(self.deadline)
    }

    /// Whether nobody awaits the answer any more: the client has cancelled the call, or is gone. The service learns of it as
    /// it looks for requests, so on another thread, or between two; in a handler of [`crate::Service::run`] this looks, if all threads
    /// are in handlers. Answer all the same, in whatever way is cheapest: the client makes no other use of the call's place before.
    pub fn is_cancelled(&self) -> bool {
        let is_cancelled = || self.caller.is_cancelled(self.id);
        self.id != 0 && (is_cancelled() || (pool::look_out(&self.caller.desk) && is_cancelled()))
    }

    /// The same, taken away from its request.
    fn away(self) -> Responder {
        let answering = ManuallyDrop::new(self);
        let Answering { caller, id, deadline, is_answered } = &*answering;
        // SAFETY: what is read is not dropped here.
        let caller = unsafe { std::ptr::read(caller) };
        Answering { caller: caller.away(), id: *id, deadline: *deadline, is_answered: *is_answered }
    }

    #[inline(always)]
    fn check(&self, bytes: usize) -> Result<()> {
        if self.id == 0 {
            return Err(Error::Refused("a notification is not answered".to_owned()));
        }
        if self.is_answered.is_set() {
            return Err(Error::Refused("the call has been answered".to_owned()));
        }
        check_size(bytes, self.caller.bytes_max)
    }

    #[inline(always)]
    fn last(&mut self, header: Header, payload: &[u8]) -> Result<()> {
        self.check(payload.len())?;
        let sent = self.caller.send_last(header, payload);
        // Also to who has gone.
        self.is_answered = Flag::Yes;
        sent
    }

    fn send_part(&mut self, part: &[u8], patience: Patience) -> Result<Sent> {
        self.check(part.len())?;
        self.caller.send_part(Header::new(Kind::Part, self.id), part, patience)
    }
}

impl Drop for Answering<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if !self.is_answered.is_set() {
            self.abandon();
        }
    }
}

impl Answering<'_> {
    #[cold]
    #[inline(never)]
    fn abandon(&mut self) {
        // Who has gone is not told.
        let _ = self.caller.send_last(Header::new(Kind::Abandoned, self.id), &[]);
    }
}

#[cold]
pub(super) fn room_is_held() -> Error {
    Error::Refused("this thread has room reserved for another reply: send that first".to_owned())
}

/// The client's lane, and that this thread has it.
#[derive(Debug)]
struct Held<'a> {
    caller: &'a Hold<'a>,
    /// Until it is dropped.
    out: Option<Guard<'a>>,
}

impl Held<'_> {
    fn out(&self) -> &Out {
        self.out.as_ref().expect("it is held")
    }

    fn out_mut(&mut self) -> &mut Out {
        self.out.as_mut().expect("it is held")
    }
}

impl Drop for Held<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        let Some(mut out) = self.out.take() else { return };
        // Who else waits for this does so in the parent; the bell is closed here, and its number may be somebody else's.
        if self.caller.is_forked() {
            return;
        }
        if self.caller.has_later() {
            // An error is of the client's end, which its lane tells.
            let _ = self.caller.flush(&mut out);
        }
        // Also when nothing was written: to reserve was to be awake.
        self.caller.pass_on(&mut out);
        if out.is_locked() {
            forget_room();
        }
        drop(out);
        self.caller.note_last();
    }
}

/// Room for a reply, to be written in place; see [`Responder::try_reserve`]. Dropping it gives the room back, and nothing is seen
/// of it. It stays on its thread.
#[derive(Debug)]
pub struct ReplyRoom<'a> {
    held: Held<'a>,
    space: Space,
    id: u64,
    is_answered: &'a mut Flag,
}

impl ReplyRoom<'_> {
    /// Replies with the first `bytes` of the room, which is the last of the call. Does not wait.
    ///
    /// # Errors
    /// [`Error::TooLarge`] when `bytes` is more than was reserved, [`Error::Forked`]; nothing is sent then.
    #[inline(always)]
    pub fn reply(mut self, bytes: usize) -> Result<()> {
        self.publish(Kind::Reply, bytes)?;
        *self.is_answered = Flag::Yes;
        Ok(())
    }

    /// Gives the first `bytes` of the room as a part of the reply. Does not wait.
    ///
    /// # Errors
    /// As [`ReplyRoom::reply`].
    pub fn part(mut self, bytes: usize) -> Result<()> {
        self.publish(Kind::Part, bytes)
    }

    #[inline(always)]
    fn publish(&mut self, kind: Kind, bytes: usize) -> Result<()> {
        let caller = self.held.caller;
        let sender = &mut self.held.out_mut().outbox.sender;
        if bytes > self.space.bytes as usize - HEADER_BYTES {
            let bytes_max = self.space.bytes - HEADER_BYTES as u64;
            return Err(Error::TooLarge { bytes: bytes as u64, bytes_max });
        }
        if kind.is_final() {
            // Before the reply, which lets the client use the place again.
            caller.calls[slot_of(self.id) as usize].store(0, Relaxed);
        }
        sender.publish_room(self.space, Header::new(kind, self.id).words(), bytes)
    }
}

impl std::ops::Deref for ReplyRoom<'_> {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        self.held.out().outbox.sender.room_read(self.space)
    }
}

impl std::ops::DerefMut for ReplyRoom<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        let space = self.space;
        self.held.out_mut().outbox.sender.room(space)
    }
}
