//! `Receiver` of the addon.

use crate::endpoint::{Armable, AsRawFdOfLoop, Endpoint, deadline};
use crate::error::{named, raise};
use crate::message::Message;
use crate::open::{Info, Token, tokens};
use napi::bindgen_prelude::*;
use napi_derive::napi;
use pelton::Deadline;
use pelton::raw::Record;
use std::os::fd::AsRawFd;

/// A receiver, and the listener that had accepted it, which accepts a successor too.
pub struct Receiving {
    pub receiver: pelton::Receiver,
    pub listener: Option<pelton::Listener>,
}

impl AsRawFdOfLoop for Receiving {
    fn fd(&self) -> i32 {
        self.receiver.as_raw_fd()
    }
}

impl Armable for Receiving {
    fn arm(&mut self, _bytes: usize) -> pelton::Result<bool> {
        // A poll of some microseconds, less if that was useless lately, spares both sides a wake-up.
        Ok(!self.receiver.busy_poll()? && self.receiver.arm()?.is_waiting())
    }
    fn disarm(&mut self) {
        self.receiver.disarm();
    }
}

/// The receiving endpoint.
#[napi]
pub struct Receiver(Endpoint<Receiving>);

impl Receiver {
    pub fn new(receiver: pelton::Receiver, listener: Option<pelton::Listener>) -> Receiver {
        Receiver(Endpoint::new("receiver", Receiving { receiver, listener }))
    }

    #[inline]
    fn find(&mut self) -> Result<Option<Record>> {
        let receiver = &mut self.0.get()?.receiver;
        match receiver.peek_fast() {
            Some(record) => Ok(Some(record)),
            None => receiver.find_record(Deadline::Now).map_err(raise),
        }
    }
}

#[napi]
impl Receiver {
    /// Has the loop watch the descriptor: see `Endpoint::watch`.
    #[napi]
    pub fn watch(&mut self, env: Env, callback: Function<'_, (), ()>) -> Result<()> {
        self.0.watch(&env, &callback)
    }

    /// Copies the next message to `space[offset..]`, releases it, and returns its bytes. -1 if there is none; of one
    /// that does not fit, -2 less its bytes, and it stays the next.
    #[napi]
    pub fn try_recv_into(&mut self, mut space: BufferSlice<'_>, offset: u32) -> Result<f64> {
        let Some(record) = self.find()? else { return Ok(-1.0) };
        let bytes = record.bytes as usize;
        let Some(target) = space.get_mut(offset as usize..).and_then(|free| free.get_mut(..bytes)) else {
            return Ok(-2.0 - bytes as f64);
        };
        // The copy is of this side's memory: a peer that writes meanwhile changes bytes only.
        target.copy_from_slice(&self.0.get()?.receiver.message(record));
        Ok(bytes as f64)
    }

    /// Copies messages to `space`, one behind the other, their sizes to `sizes`, releases them, and returns their
    /// number. Of a first one that does not fit, -2 less its bytes; -1 if there is none.
    #[napi]
    pub fn try_recv_many(&mut self, mut space: BufferSlice<'_>, mut sizes: Uint32ArraySlice<'_>) -> Result<f64> {
        // SAFETY: only this thread uses the array, and no JavaScript runs until this returns.
        let sizes = unsafe { sizes.as_mut() };
        let Some(first) = self.find()? else { return Ok(-1.0) };
        if first.bytes > space.len() as u64 {
            return Ok(-2.0 - first.bytes as f64);
        }
        let receiver = &mut self.0.get()?.receiver;
        let (mut used, mut count) = (0, 0);
        // Releases once, at the end. An error after the first message comes again at the next call.
        while count < sizes.len() {
            let Some(record) = receiver.peek_fast() else { break };
            let bytes = record.bytes as usize;
            if bytes > space.len() - used {
                break;
            }
            space[used..used + bytes].copy_from_slice(&receiver.message(record));
            sizes[count] = bytes as u32;
            (used, count) = (used + bytes, count + 1);
        }
        if count == 0 {
            // Not of the fast path: it holds messages, or is a message with descriptors.
            let Some(record) = receiver.find_record(Deadline::Now).map_err(raise)? else { return Ok(-1.0) };
            let bytes = record.bytes as usize;
            space[..bytes].copy_from_slice(&receiver.message(record));
            (sizes[0], count) = (bytes as u32, 1);
        }
        Ok(count as f64)
    }

    /// The next message in place; null if there is none.
    #[napi]
    pub fn try_peek(&mut self) -> Result<Option<Message>> {
        let Some(record) = self.find()? else { return Ok(None) };
        Message::new(self.0.get()?.receiver.message(record)).map(Some).map_err(raise)
    }

    /// Begins to wait for the sender's successor: a step.
    #[napi]
    pub fn start_resume(&mut self, env: Env, timeout: Option<f64>, callback: Function<'_, (), ()>) -> Result<()> {
        let deadline = deadline(timeout);
        self.0.start_step(&env, &callback, move |it, cancel| match &it.listener {
            Some(listener) => {
                let listener = listener.clone();
                crate::open::accepting(&listener, deadline, cancel, |until| it.receiver.resume_until(until))
            }
            None => cancel.wait(deadline, |until| it.receiver.resume_until(until)),
        })
    }

    /// Begins to make the releases of a path channel durable: a step.
    #[napi]
    pub fn start_sync(&mut self, env: Env, callback: Function<'_, (), ()>) -> Result<()> {
        self.0.start_step(&env, &callback, |it, _| it.receiver.sync().map(|()| true))
    }

    /// See `Endpoint::finish_step`.
    #[napi]
    pub fn finish_step(&mut self) -> Result<Option<bool>> {
        self.0.finish_step()
    }

    /// See `Endpoint::cancel_step`.
    #[napi]
    pub fn cancel_step(&self) {
        self.0.cancel_step();
    }

    /// Waits for a message; false if there is one.
    #[napi]
    pub fn wait(&mut self) -> Result<bool> {
        self.0.wait(0)
    }

    /// Ends the wait.
    #[napi]
    pub fn stop(&mut self) {
        self.0.stop();
    }

    /// See `Watch::set_ref`.
    #[napi]
    pub fn set_ref(&self, is_ref: bool) {
        self.0.set_ref(is_ref);
    }

    /// Sizes, peer and counters.
    #[napi]
    pub fn info(&mut self) -> Result<Info> {
        let receiver = &self.0.asked()?.receiver;
        if receiver.is_forked() {
            return Err(named("forked", "this receiver belongs to the process that forked this one"));
        }
        Ok(Info::new(receiver.capacity(), receiver.message_bytes_max(), receiver.peer(), receiver.counters()))
    }

    /// Hands it over to another thread of this process: a number for `attachReceiver` there.
    #[napi]
    pub fn detach(&mut self) -> Result<f64> {
        Ok(tokens().keep(Token::Receiver(Box::new(self.0.detach()?))))
    }

    /// Closes it.
    #[napi]
    pub fn close(&mut self) {
        self.0.close();
    }

    /// Whether it is closed.
    #[napi(getter)]
    pub fn closed(&self) -> bool {
        self.0.is_closed()
    }
}
