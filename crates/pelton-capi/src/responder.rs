//! Replies to one request.

use crate::c::{Bytes, Out, Raw, check_size};
use crate::code::{self, Answer, done, found, sent};
use crate::entries::entries;
use crate::handle::{Kind, Object};
use crate::writer::check_used;
use pelton::raw::RawReplyReservation;
use pelton::{Deadline, ReplyReservation, Traceparent};
use std::ffi::c_void;

/// `PELTON_TRACEPARENT_SIZE`: 55 characters and a NUL.
pub const TRACEPARENT_SIZE: usize = 56;

/// The text of a traceparent, with its NUL.
pub fn text_of(traceparent: Traceparent) -> [u8; TRACEPARENT_SIZE] {
    let mut text = [0; TRACEPARENT_SIZE];
    text[..TRACEPARENT_SIZE - 1].copy_from_slice(traceparent.to_string().as_bytes());
    text
}

pub struct Responder {
    inner: pelton::Responder,
    /// The reserved space, and its size: meanwhile nothing else is replied, and only by the thread that reserved it.
    reserved: Option<(RawReplyReservation, usize)>,
}

impl Object for Responder {
    const KIND: Kind = Kind::Responder;

    fn is_forked(&self) -> bool {
        self.inner.is_forked()
    }

    fn before_closing(&mut self) -> Answer {
        self.abort()
    }
}

impl Responder {
    pub fn new(inner: pelton::Responder) -> Responder {
        Responder { inner, reserved: None }
    }

    /// Takes what is reserved, if it is this thread's.
    fn take_reserved(&mut self) -> Answer<Option<(ReplyReservation<'_>, usize)>> {
        if self.reserved.is_some() && !self.inner.has_reservation_here() {
            let detail = "another thread has reserved space for this reply: it must use or abort it";
            return Err(code::tell(code::WRONG_THREAD, detail));
        }
        // SAFETY: it is the responder's reservation, which this thread has kept since.
        Ok(self.reserved.take().map(|(raw, size)| (unsafe { self.inner.reservation_from_raw(raw) }, size)))
    }

    fn abort(&mut self) -> Answer {
        self.take_reserved().map(drop)
    }

    /// Whether a reply of so many bytes can be sent by copy.
    fn check(&self, size: usize) -> Answer {
        if self.reserved.is_some() {
            return Err(code::plain(code::RESERVED));
        }
        done(self.inner.check_answer(size))
    }

    /// Takes the reservation, to send `size` bytes of it.
    fn reserved(&mut self, size: usize) -> Answer<ReplyReservation<'_>> {
        let reserved = self.reserved.as_ref().map(|(_, size)| *size);
        check_used(size, reserved.ok_or_else(|| code::plain(code::NOT_RESERVED))?)?;
        self.take_reserved()?.map(|(space, _)| space).ok_or_else(|| code::plain(code::NOT_RESERVED))
    }
}

entries! {
    fn pelton_responder_reply(responder: Raw<Responder>, data[size]: Bytes) {
        let (responder, ()) = responder.take(|responder| responder.check(data.len()))?;
        done(responder.inner.reply(data))
    }

    fn pelton_responder_fail(responder: Raw<Responder>, code: u32, data[size]: Bytes) {
        let (responder, ()) = responder.take(|responder| responder.check(data.len()))?;
        done(responder.inner.fail(code, data))
    }

    fn pelton_responder_part(responder: &mut Responder, data[size]: Bytes, deadline_ns: Deadline) {
        responder.check(data.len())?;
        sent(responder.inner.part_until(data, deadline_ns))
    }

    fn pelton_responder_end(responder: Raw<Responder>) {
        let (responder, ()) = responder.take(|responder| responder.check(0))?;
        done(responder.inner.end())
    }

    fn pelton_responder_reserve(responder: &mut Responder, size: usize, out: Out<*mut c_void>) {
        responder.abort()?;
        check_size(size)?;
        let mut space = found(responder.inner.try_reserve(size))?;
        out.write(space.raw_parts().0.as_ptr().cast());
        // SAFETY: it is taken back before the responder goes, by `take_reserved`: on use, on abort, and before closing.
        responder.reserved = Some((unsafe { space.into_raw() }, size));
        Ok(())
    }

    fn pelton_responder_reply_reserved(responder: Raw<Responder>, size: usize) {
        // Once it is taken, the responder closes, even if the client has gone.
        let (_, replied) = responder.take(|responder| Ok(done(responder.reserved(size)?.reply_bytes(size))))?;
        replied
    }

    fn pelton_responder_part_reserved(responder: &mut Responder, size: usize) {
        done(responder.reserved(size)?.part_bytes(size))
    }

    fn pelton_responder_abort(responder: &mut Responder) {
        match responder.take_reserved()? {
            Some(_) => Ok(()),
            None => Err(code::plain(code::NOT_RESERVED)),
        }
    }

    fn pelton_responder_traceparent(responder: &mut Responder, out: Out<[u8; TRACEPARENT_SIZE]>) {
        let Some(traceparent) = responder.inner.traceparent() else { return Ok(0) };
        out.write(text_of(traceparent));
        Ok(1)
    }

    fn pelton_responder_is_cancelled(responder: &mut Responder) {
        Ok(i32::from(responder.inner.is_cancelled()))
    }
}
