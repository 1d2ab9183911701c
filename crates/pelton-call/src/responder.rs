//! A request, what answers it, and room for an answer in place.

use super::caller::{Out, forget_room};
use super::frame::{HEADER_BYTES, Header, Kind, check_size};
use super::hold::Hold;
use super::leader;
use crate::body::{Body, Flag};
use crate::outbox::FrameSender as _;
use pelton_channel::Deadline;
use pelton_channel::Sent;
use pelton_channel::{Error, Result};
use pelton_os::Peer;
use std::marker::PhantomData;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// What a client asks, or tells.
///
/// Its bytes are in memory that the client wrote, unless they came in pieces or [`crate::Service::run`] copied them: reading them in
/// place trusts the client not to write after it has asked. [`Request::copy_out`] is safe against any client.
///
/// It is one pointer, however much belongs to it: to hand it on costs what it costs to hand a number on.
pub struct Request<'a> {
    /// Its own, in somebody's place that is lent for so long.
    asked: NonNull<Asked<'a>>,
    owns: PhantomData<Asked<'a>>,
}

/// What a request is made of. It stays where it was written until it is over: whoever reads it whole so soon after it was written by words
/// waits until all that was written before is out, and that is the reply before, whose lines the client has (`docs/decisions/0023`).
#[derive(Debug)]
pub(super) struct Asked<'a> {
    pub(super) body: Body<'a>,
    pub(super) responder: Answering<'a>,
}

// SAFETY: a request has what it is made of for itself, as a box has it; the bounds are a box's.
unsafe impl<'a> Send for Request<'a> where Asked<'a>: Send {}

/// Where a request is while it lives; a service has one, and each thread of a pool another. What is left there is nothing.
pub(super) type Place<'a> = MaybeUninit<Asked<'a>>;

impl<'a> Request<'a> {
    /// Has what was asked in that place.
    #[inline(always)]
    pub(super) fn put(place: &'a mut Place<'a>, body: Body<'a>, responder: Answering<'a>) -> Request<'a> {
        Request { asked: NonNull::from(place.write(Asked { body, responder })), owns: PhantomData }
    }

    #[inline(always)]
    pub(super) fn asked(&self) -> &Asked<'a> {
        // SAFETY: written by `put`, in a place that is this one's for as long as it lives.
        unsafe { self.asked.as_ref() }
    }

    #[inline(always)]
    fn asked_mut(&mut self) -> &mut Asked<'a> {
        // SAFETY: as above, and borrowed as this is.
        unsafe { self.asked.as_mut() }
    }

    /// Both halves, out of their place.
    #[inline(always)]
    pub(super) fn into_halves(self) -> (Body<'a>, Answering<'a>) {
        let request = ManuallyDrop::new(self);
        // SAFETY: as above; they are taken out once, since this ends here and is not dropped.
        let Asked { body, responder } = unsafe { request.asked.read() };
        (body, responder)
    }

    /// Answers, and is done. Does not wait: what the client has no room for is kept until it has.
    ///
    /// # Errors
    /// As [`Responder::reply`].
    #[inline(always)]
    pub fn reply(mut self, reply: &[u8]) -> Result<()> {
        let responder = &mut self.asked_mut().responder;
        responder.last(Header::new(Kind::Reply, responder.id), reply)
    }

    /// Fails the call with a code and bytes of the service's own meaning. Does not wait.
    ///
    /// # Errors
    /// As [`Responder::reply`].
    pub fn fail(mut self, code: u32, bytes: &[u8]) -> Result<()> {
        let responder = &mut self.asked_mut().responder;
        responder.last(Header { code, ..Header::new(Kind::Failed, responder.id) }, bytes)
    }

    /// What answers it, apart from its bytes, which are given back: to answer later, or on another thread.
    pub fn into_responder(self) -> Responder {
        let (body, responder) = self.into_halves();
        let responder = responder.away();
        drop(body);
        responder
    }

    /// Copies the bytes into `buffer`, whose contents they replace, and gives them back; what remains is to answer.
    pub fn copy_out(self, buffer: &mut Vec<u8>) -> Responder {
        self.asked().body.copy_into(buffer);
        self.into_responder()
    }

    /// Its bytes, on their own, and what answers it.
    pub fn into_parts(self) -> (Vec<u8>, Responder) {
        let (body, responder) = self.into_halves();
        (body.into_vec(), responder.away())
    }

    /// Its bytes and what answers it, side by side: to write an answer in place while the request is read.
    #[inline]
    pub fn split(&mut self) -> (&[u8], &mut Answering<'a>) {
        let Asked { body, responder } = self.asked_mut();
        (body.bytes(), responder)
    }

    /// Whether the client does not await an answer: there is nothing to reply to then.
    #[inline]
    pub fn is_notification(&self) -> bool {
        self.asked().responder.id == 0
    }

    /// As [`Responder::peer`].
    pub fn peer(&self) -> Option<Peer> {
        self.asked().responder.peer()
    }

    /// As [`Responder::deadline`].
    pub fn deadline(&self) -> Option<Instant> {
        self.asked().responder.deadline()
    }

    /// As [`Responder::is_cancelled`].
    pub fn is_cancelled(&self) -> bool {
        self.asked().responder.is_cancelled()
    }
}

impl std::ops::Deref for Request<'_> {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        self.asked().body.bytes()
    }
}

impl Drop for Request<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: as above; nobody looks there any more.
        unsafe { self.asked.drop_in_place() };
    }
}

impl std::fmt::Debug for Request<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.asked().fmt(formatter)
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
    /// than the client takes ([`Options::call_bytes_max`](pelton_channel::Options::call_bytes_max) there); the call is abandoned. [`Error::Refused`] for a notification;
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
        self.send_part(part, Deadline::Never).map(|_| ())
    }

    /// As [`Responder::part`], if there is room now: [`Sent::Full`] otherwise, and then [`crate::Service::arm`] tells the service's event
    /// loop once there is. Never waits.
    ///
    /// # Errors
    /// As [`Responder::part`].
    pub fn try_part(&mut self, part: &[u8]) -> Result<Sent> {
        self.send_part(part, Deadline::Now)
    }

    /// As [`Responder::part`], until `deadline`: [`Sent::TimedOut`] when it passes.
    ///
    /// # Errors
    /// As [`Responder::part`].
    pub fn part_until(&mut self, part: &[u8], deadline: Instant) -> Result<Sent> {
        self.send_part(part, Deadline::At(deadline))
    }

    /// Reserves room for a reply, or a part of it, of `bytes`, to be written in place; `None` when there is none now: reply with
    /// a copy then. Write it at once: meanwhile no other reply to this client is written, and one from this very thread is
    /// refused. Never waits for the client.
    ///
    /// # Errors
    /// As [`Responder::reply`]; [`Error::TooLarge`] also for more than the lane's largest message less 24 bytes.
    #[inline(always)]
    pub fn try_reserve(&mut self, bytes: usize) -> Result<Option<ReplyRoom<'_>>> {
        self.check(bytes)?;
        let is_reserved = self.caller.room_at_once(bytes) || self.caller.room_slowly(bytes)?;
        Ok(if is_reserved { Some(self.room()) } else { None })
    }

    /// The room that has just been reserved for this.
    #[inline(always)]
    pub(super) fn room(&mut self) -> ReplyRoom<'_> {
        ReplyRoom { answering: NonNull::from(self).cast(), of: PhantomData }
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
        self.id != 0 && (is_cancelled() || (leader::poll_ahead(&self.caller.desk) && is_cancelled()))
    }

    /// The same, taken away from its request.
    pub(super) fn away(self) -> Responder {
        let answering = ManuallyDrop::new(self);
        let Answering { caller, id, deadline, is_answered } = &*answering;
        // SAFETY: what is read is not dropped here.
        let caller = unsafe { std::ptr::read(caller) };
        Answering { caller: caller.away(), id: *id, deadline: *deadline, is_answered: *is_answered }
    }

    #[inline(always)]
    pub(super) fn check(&self, bytes: usize) -> Result<()> {
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

    fn send_part(&mut self, part: &[u8], deadline: Deadline) -> Result<Sent> {
        self.check(part.len())?;
        self.caller.send_part(Header::new(Kind::Part, self.id), part, deadline)
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

/// Room for a reply, to be written in place; see [`Responder::try_reserve`]. Dropping it gives the room back, and nothing is seen
/// of it. It stays on its thread.
#[derive(Debug)]
pub struct ReplyRoom<'a> {
    /// Its own for so long, and by that the client's lane, where the room is.
    answering: NonNull<Answering<'static>>,
    of: PhantomData<&'a mut ()>,
}

impl ReplyRoom<'_> {
    #[inline(always)]
    fn answering(&self) -> &Answering<'_> {
        // SAFETY: borrowed for as long as this lives; only the time in it is another.
        unsafe { self.answering.as_ref() }
    }

    #[inline(always)]
    fn out(&self) -> &Out {
        // SAFETY: this has what is behind the lock, and is borrowed.
        unsafe { &*self.answering().caller.reserved() }
    }

    #[inline(always)]
    fn out_mut(&mut self) -> &mut Out {
        // SAFETY: as above, and not to look alone.
        unsafe { &mut *self.answering().caller.reserved() }
    }

    /// Replies with the first `bytes` of the room, which is the last of the call. Does not wait.
    ///
    /// # Errors
    /// [`Error::TooLarge`] when `bytes` is more than was reserved, [`Error::Forked`]; nothing is sent then.
    #[inline(always)]
    pub fn reply(mut self, bytes: usize) -> Result<()> {
        self.publish(Kind::Reply, bytes)?;
        // SAFETY: borrowed as long as this lives, and not to look alone.
        unsafe { self.answering.as_mut() }.is_answered = Flag::Yes;
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
        let id = self.answering().id;
        let space = self.out().space();
        if bytes > space.bytes as usize - HEADER_BYTES {
            let bytes_max = space.bytes - HEADER_BYTES as u64;
            return Err(Error::TooLarge { bytes: bytes as u64, bytes_max });
        }
        if kind.is_final() {
            self.answering().caller.end(id);
        }
        self.out_mut().outbox.sender.publish_body(space, Header::new(kind, id).words(), bytes)
    }
}

impl std::ops::Deref for ReplyRoom<'_> {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        let out = self.out();
        out.outbox.sender.body(out.space())
    }
}

impl std::ops::DerefMut for ReplyRoom<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        let out = self.out_mut();
        let space = out.space();
        out.outbox.sender.body_mut(space)
    }
}

impl Drop for ReplyRoom<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // Nearly always: there is nothing to give back, and nobody is to be told. Also when nothing was written: to reserve was to be
        // awake. In a forked child this is so too, or is found there.
        if self.out().is_watched() || self.answering().caller.desk.is_draining.load(Relaxed) {
            self.give_back();
        }
    }
}

impl ReplyRoom<'_> {
    #[cold]
    #[inline(never)]
    fn give_back(&mut self) {
        let lock = self.out_mut().take_lock();
        let caller = &self.answering().caller;
        // Who else waits for this does so in the parent; the doorbell is closed here, and its number may be somebody else's.
        if caller.is_forked() {
            return;
        }
        // SAFETY: as in `out_mut`, which is not borrowed any more.
        let out = unsafe { &mut *caller.reserved() };
        if caller.has_later() {
            // An error is of the client's end, which its lane tells.
            let _ = caller.flush(out);
        }
        caller.pass_on(out);
        if lock.is_some() {
            forget_room();
        }
        drop(lock);
        caller.note_last();
    }
}
