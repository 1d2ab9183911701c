//! `Receiver` of the addon.

use crate::endpoint::{Armable, AsRawFdOfLoop, Channel, Handle, channel_methods, methods, step_methods};
use crate::error::{named, raise};
use crate::fast;
use crate::message::Message;
use crate::open::{Info, Token, tokens};
use napi::bindgen_prelude::*;
use napi::sys;
use napi_derive::napi;
use pelton::raw::{Ahead, Record};
use pelton::{Deadline, Traceparent};
use std::os::fd::AsRawFd;

/// A receiver, the messages that JavaScript has copies of, and the listener that had accepted it.
pub struct Receiving {
    pub receiver: pelton::Receiver,
    pub listener: Option<pelton::Listener>,
    ahead: Ahead,
    /// Of the last message that was read: one that has a traceparent is read alone.
    traceparent: Option<Traceparent>,
}

impl Receiving {
    #[inline]
    fn find(&mut self) -> Result<Option<Record>> {
        match self.receiver.peek_fast() {
            Some(record) => Ok(Some(record)),
            None => self.receiver.find_record(Deadline::Now).map_err(raise),
        }
    }

    /// Copies messages to `space`, each from a multiple of 8 on, and their sizes to `sizes`. Releases the first one,
    /// and the others by [`Receiving::release`]. Returns their number; -1 if there is none; of a first one that does
    /// not fit, -2 less its bytes, and it stays the next.
    #[inline]
    fn read(&mut self, space: &mut [u8], sizes: &mut [u32]) -> Result<i64> {
        let Some(record) = self.find()? else { return Ok(-1) };
        let bytes = record.bytes as usize;
        if bytes > space.len() || sizes.is_empty() {
            return Ok(-2 - bytes as i64);
        }
        let (mut used, mut count) = (0, 0);
        self.receiver.read_ahead(&mut self.ahead, |message| {
            let Some(size) = sizes.get_mut(count) else { return false };
            // The copy is of this side's memory: a peer that writes meanwhile changes bytes only.
            let Some(end) = fast::copy(message, space, used) else { return false };
            *size = message.len() as u32;
            (used, count) = (end, count + 1);
            true
        });
        if count > 0 {
            self.traceparent = None;
            self.receiver.release_ahead(&mut self.ahead, 1);
            return Ok(count as i64);
        }
        // Not of the common case: one is held, or this one has descriptors or a traceparent, or is the first of a lap.
        let message = self.receiver.message(record);
        self.traceparent = message.traceparent();
        fast::copy(&message, space, 0).expect("it fits: the sizes were compared");
        sizes[0] = bytes as u32;
        Ok(1)
    }

    /// Releases messages of [`Receiving::read`] that JavaScript has handed out.
    #[inline]
    fn release(&mut self, count: u32) {
        self.receiver.release_ahead(&mut self.ahead, count as usize);
    }
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

impl Channel for Receiving {
    fn listener(&self) -> Option<&pelton::Listener> {
        self.listener.as_ref()
    }
    fn resume_until(&mut self, deadline: Deadline) -> pelton::Result<bool> {
        self.receiver.resume_until(deadline)
    }
    fn sync(&mut self) -> pelton::Result<()> {
        self.receiver.sync()
    }
}

/// The receiving endpoint.
#[napi]
pub struct Receiver(Handle<Receiving>);

methods!(Receiver);
step_methods!(Receiver);
channel_methods!(Receiver);

impl Receiver {
    pub fn new(receiver: pelton::Receiver, listener: Option<pelton::Listener>) -> Receiver {
        Receiver(Handle::new("receiver", Receiving { receiver, listener, ahead: Ahead::default(), traceparent: None }))
    }
}

/// `read(space, offset, sizes, handed)`: releases `handed` more messages of the last read, which ends; then
/// [`Receiving::read`], to `space` from `offset` on.
unsafe extern "C" fn read(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: Node calls, and `functions` has made the function. JavaScript has no view of both arrays in one memory.
    unsafe {
        fast::call::<Handle<Receiving>, i64, 4>(env, info, |handle, arguments| {
            let mut endpoint = handle.borrow()?;
            let receiving = endpoint.get()?;
            receiving.release(arguments.number(3));
            let space = arguments.space(0)?.get_mut(arguments.number(1) as usize..).unwrap_or_default();
            receiving.read(space, arguments.numbers(2)?)
        })
    }
}

/// `release(handed)`: releases `handed` more messages of the last read, while the others stay.
unsafe extern "C" fn release(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: Node calls, and `functions` has made the function.
    unsafe {
        fast::call::<Handle<Receiving>, bool, 1>(env, info, |handle, arguments| {
            handle.borrow()?.get()?.release(arguments.number(0));
            Ok(true)
        })
    }
}

/// `wait()`: waits for a message; false if there is one.
unsafe extern "C" fn wait(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: as `release`.
    unsafe { fast::call::<Handle<Receiving>, bool, 0>(env, info, |handle, _| handle.borrow()?.wait(0)) }
}

#[napi]
impl Receiver {
    /// The functions that are called for each message, or each batch.
    #[napi]
    pub fn functions<'env>(&self, env: &'env Env) -> Result<Vec<Unknown<'env>>> {
        // SAFETY: each is a `call` with a handle of `Receiving`.
        unsafe {
            Ok(vec![
                fast::function(env, c"read", &self.0, Some(read))?,
                fast::function(env, c"release", &self.0, Some(release))?,
                fast::function(env, c"wait", &self.0, Some(wait))?,
            ])
        }
    }

    /// The next message in place; null if there is none.
    #[napi]
    pub fn try_peek(&self) -> Result<Option<Message>> {
        let mut endpoint = self.0.borrow()?;
        let receiving = endpoint.get()?;
        let Some(record) = receiving.find()? else { return Ok(None) };
        let message = receiving.receiver.message(record);
        receiving.traceparent = message.traceparent();
        Message::new(message).map(Some).map_err(raise)
    }

    /// The traceparent of the message that was handed out last.
    #[napi(getter)]
    pub fn traceparent(&self) -> Result<Option<String>> {
        Ok(self.0.borrow()?.asked()?.traceparent.map(|it| it.to_string()))
    }

    /// Sizes, peer and counters.
    #[napi]
    pub fn info(&self) -> Result<Info> {
        let mut endpoint = self.0.borrow()?;
        let receiver = &endpoint.asked()?.receiver;
        if receiver.is_forked() {
            return Err(named("forked", "this receiver belongs to the process that forked this one"));
        }
        Ok(Info::new(receiver.capacity(), receiver.message_bytes_max(), receiver.peer(), receiver.counters()))
    }
}
