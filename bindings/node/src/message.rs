//! A message in place: an ArrayBuffer over shared memory, until it is released.

use napi::bindgen_prelude::*;
use napi::sys;
use napi_derive::napi;
use pelton::{Held, Traceparent};
use std::cell::RefCell;
use std::ffi::c_void;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::ptr;
use std::rc::Rc;

/// What keeps the bytes: this object, and the memory of the ArrayBuffer.
type Kept = Rc<RefCell<Option<Held>>>;

/// The held message.
#[napi]
pub struct Message {
    held: Kept,
    fds: Vec<OwnedFd>,
    seq: u32,
    lane: u32,
    peer_pid: Option<u32>,
    is_redelivered: bool,
    traceparent: Option<Traceparent>,
}

impl Message {
    pub fn new(mut message: pelton::Message<'_>) -> pelton::Result<Message> {
        let fds = message.take_descriptors()?;
        let (seq, lane, peer_pid) = (message.seq(), message.lane(), message.peer().map(|peer| peer.pid));
        let (is_redelivered, traceparent) = (message.is_redelivered(), message.traceparent());
        let held = Rc::new(RefCell::new(Some(message.hold())));
        Ok(Message { held, fds, seq, lane, peer_pid, is_redelivered, traceparent })
    }
}

/// Node: the memory of the ArrayBuffer is in no use any more. It calls on the environment's thread.
unsafe extern "C" fn unused(_env: sys::napi_env, _data: *mut c_void, hint: *mut c_void) {
    // SAFETY: `hint` is the count that `buffer` has leaked, and Node calls once.
    drop(unsafe { Rc::from_raw(hint.cast::<RefCell<Option<Held>>>()) });
}

#[napi]
impl Message {
    /// The bytes, as an ArrayBuffer over shared memory. `None` where the embedder permits none. One call.
    #[napi]
    pub fn buffer<'env>(&self, env: &'env Env) -> Result<Option<Unknown<'env>>> {
        let held = self.held.borrow();
        let Some(held) = &*held else { return Ok(None) };
        let mut value = ptr::null_mut();
        let hint = Rc::into_raw(self.held.clone()).cast_mut().cast::<c_void>();
        // SAFETY: the bytes stay until `held` is dropped: by `release`, which detaches the ArrayBuffer before, or
        // after `unused`, for which `hint` is a count.
        let status = unsafe {
            sys::napi_create_external_arraybuffer(
                env.raw(),
                held.as_ptr().cast_mut().cast(),
                held.len(),
                Some(unused),
                hint,
                &mut value,
            )
        };
        if status != sys::Status::napi_ok {
            // SAFETY: Node has not taken the count.
            drop(unsafe { Rc::from_raw(hint.cast::<RefCell<Option<Held>>>()) });
            return Ok(None);
        }
        // SAFETY: the value was just made in this environment.
        Ok(Some(unsafe { Unknown::from_raw_unchecked(env.raw(), value) }))
    }

    /// The bytes, copied.
    #[napi]
    pub fn copy(&self) -> Buffer {
        let mut bytes = Vec::new();
        if let Some(held) = self.held.borrow().as_ref() {
            pelton::raw::append(held, &mut bytes);
        }
        bytes.into()
    }

    /// Detaches the ArrayBuffer, and releases the message. One whose memory was moved by `transfer` stays held, until
    /// the memory is collected.
    #[napi]
    pub fn release(&mut self, env: Env, buffer: Option<Unknown<'_>>) {
        self.fds.clear();
        if let Some(buffer) = buffer {
            let mut was_detached = true;
            // SAFETY: the value is of this environment, and `lib/message.js` has it from `buffer`.
            let status = unsafe {
                sys::napi_is_detached_arraybuffer(env.raw(), buffer.raw(), &mut was_detached);
                if was_detached { sys::Status::napi_ok } else { sys::napi_detach_arraybuffer(env.raw(), buffer.raw()) }
            };
            if was_detached || status != sys::Status::napi_ok {
                return;
            }
        }
        drop(self.held.borrow_mut().take());
    }

    /// After the collection of its ArrayBuffer, whose memory may still be in use elsewhere: `unused` releases it.
    #[napi]
    pub fn forget(&mut self) {
        self.fds.clear();
        self.held = Rc::default();
    }

    /// The descriptors that came with it, which the caller closes; empty at the second call.
    #[napi]
    pub fn take_descriptors(&mut self) -> Vec<i32> {
        self.fds.drain(..).map(IntoRawFd::into_raw_fd).collect()
    }

    /// Its number in the lane.
    #[napi(getter)]
    pub fn seq(&self) -> u32 {
        self.seq
    }

    /// Its sender's lane.
    #[napi(getter)]
    pub fn lane(&self) -> u32 {
        self.lane
    }

    /// Its sender's process.
    #[napi(getter)]
    pub fn peer_pid(&self) -> Option<u32> {
        self.peer_pid
    }

    /// Whether an earlier receiver may have received it.
    #[napi(getter)]
    pub fn is_redelivered(&self) -> bool {
        self.is_redelivered
    }

    /// The header `traceparent` with its sender's span.
    #[napi(getter)]
    pub fn traceparent(&self) -> Option<String> {
        self.traceparent.map(|traceparent| traceparent.to_string())
    }
}
