//! `Sender` of the addon.

use crate::endpoint::{Armable, AsRawFdOfLoop, Channel, Handle, channel_methods, deadline, methods, step_methods};
use crate::error::raise;
use crate::fast;
use crate::open::{Info, Token, tokens};
use napi::bindgen_prelude::*;
use napi::sys;
use napi_derive::napi;
use pelton::{Deadline, Sent};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

/// How many messages one call of `try_send_many` takes, as arguments: the elements of an array take 60 ns each.
/// `lib/channel.js` has it too.
const CHUNK: usize = 64;
/// The bytes after which it sends no other: a copy of some 50 microseconds. A guess.
const CHUNK_BYTES: usize = 256 << 10;

/// A sender, and the listener that had accepted it.
pub struct Sending {
    pub sender: pelton::Sender,
    pub listener: Option<pelton::Listener>,
}

impl AsRawFdOfLoop for Sending {
    fn fd(&self) -> i32 {
        self.sender.as_raw_fd()
    }
}

impl Armable for Sending {
    fn arm(&mut self, bytes: usize) -> pelton::Result<bool> {
        // As a receiver.
        Ok(!self.sender.busy_poll(bytes)? && self.sender.arm(bytes)?.is_waiting())
    }
    fn disarm(&mut self) {
        self.sender.disarm();
    }
}

impl Channel for Sending {
    fn listener(&self) -> Option<&pelton::Listener> {
        self.listener.as_ref()
    }
    fn resume_until(&mut self, deadline: Deadline) -> pelton::Result<bool> {
        self.sender.resume_until(deadline)
    }
    fn sync(&mut self) -> pelton::Result<()> {
        self.sender.sync()
    }
}

/// The sending endpoint.
#[napi]
pub struct Sender(Handle<Sending>);

methods!(Sender);
step_methods!(Sender);
channel_methods!(Sender);

impl Sender {
    pub fn new(sender: pelton::Sender, listener: Option<pelton::Listener>) -> Sender {
        Sender(Handle::new("sender", Sending { sender, listener }))
    }
}

/// `trySend(data)`: sends a message, if there is space.
unsafe extern "C" fn try_send(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: Node calls, and `functions` has made the function.
    unsafe {
        fast::call::<Handle<Sending>, bool, 1>(env, info, |handle, arguments| {
            let data = arguments.bytes(0)?;
            let mut endpoint = handle.borrow()?;
            let sender = &mut endpoint.get()?.sender;
            Ok(sender.send_fast(data) || sender.try_send(data).map_err(raise)? == Sent::Sent)
        })
    }
}

/// `trySendTraced(data, traceparent)`: as `trySend`, with a traceparent, if that is valid and the channel has them.
unsafe extern "C" fn try_send_traced(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: as `try_send`.
    unsafe {
        fast::call::<Handle<Sending>, bool, 2>(env, info, |handle, arguments| {
            let data = arguments.bytes(0)?;
            let mut endpoint = handle.borrow()?;
            let sender = &mut endpoint.get()?.sender;
            let sent = match arguments.traceparent(1) {
                Some(traceparent) => sender.send_traced(data, traceparent, Deadline::Now),
                None => sender.try_send(data),
            };
            Ok(sent.map_err(raise)? == Sent::Sent)
        })
    }
}

/// `trySendMany(message...)`: sends messages while there is space, up to a number of bytes. Returns how many. An error
/// after the first message comes again at the next call.
unsafe extern "C" fn try_send_many(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: as `try_send`.
    unsafe {
        fast::call::<Handle<Sending>, i64, CHUNK>(env, info, |handle, arguments| {
            let mut endpoint = handle.borrow()?;
            let sender = &mut endpoint.get()?.sender;
            let (mut sent, mut bytes) = (0, 0);
            while sent < arguments.count() && bytes < CHUNK_BYTES {
                let data = match arguments.bytes(sent) {
                    Ok(data) => data,
                    Err(error) if sent == 0 => return Err(error),
                    // The next call returns the error, after what this one has sent.
                    Err(_) => break,
                };
                if !sender.send_fast(data) {
                    match sender.try_send(data) {
                        Ok(Sent::Sent) => {}
                        Err(error) if sent == 0 => return Err(raise(error)),
                        _ => break,
                    }
                }
                (sent, bytes) = (sent + 1, bytes + data.len());
            }
            Ok(sent as i64)
        })
    }
}

/// `wait(bytes)`: waits for space; false if there is some.
unsafe extern "C" fn wait(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: as `try_send`.
    unsafe {
        fast::call::<Handle<Sending>, bool, 1>(env, info, |handle, arguments| {
            handle.borrow()?.wait(arguments.number(0) as usize)
        })
    }
}

#[napi]
impl Sender {
    /// The functions that are called for each message, or each batch.
    #[napi]
    pub fn functions<'env>(&self, env: &'env Env) -> Result<Vec<Unknown<'env>>> {
        // SAFETY: each is a `call` with a handle of `Sending`.
        unsafe {
            Ok(vec![
                fast::function(env, c"trySend", &self.0, Some(try_send))?,
                fast::function(env, c"trySendMany", &self.0, Some(try_send_many))?,
                fast::function(env, c"trySendTraced", &self.0, Some(try_send_traced))?,
                fast::function(env, c"wait", &self.0, Some(wait))?,
            ])
        }
    }

    /// Begins to send a message with descriptors: a step.
    #[napi]
    pub fn start_send_descriptors(
        &self,
        env: Env,
        data: &[u8],
        fds: Vec<i32>,
        timeout: Option<f64>,
        callback: Function<'_, (), ()>,
    ) -> Result<()> {
        let (data, deadline) = (data.to_vec(), deadline(timeout));
        let duplicated = |fd: i32| -> std::io::Result<OwnedFd> {
            if fd < 0 {
                return Err(std::io::Error::from_raw_os_error(rustix::io::Errno::BADF.raw_os_error()));
            }
            // SAFETY: the number is not negative. Of a closed descriptor the system returns EBADF.
            unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()
        };
        let fds: Vec<OwnedFd> = fds
            .into_iter()
            .map(duplicated)
            .collect::<std::io::Result<_>>()
            .map_err(|error| raise(pelton::Error::System { what: "duplicating a descriptor".to_owned(), error }))?;
        self.0.borrow()?.start_step(&env, &callback, move |it, cancel| {
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(std::os::fd::AsFd::as_fd).collect();
            cancel.wait(deadline, |until| Ok(it.sender.send_with_descriptors_until(&data, &fds, until)? == Sent::Sent))
        })
    }

    /// Begins to wait until the receiver has released every message: a step.
    #[napi]
    pub fn start_wait_released(&self, env: Env, timeout: Option<f64>, callback: Function<'_, (), ()>) -> Result<()> {
        let deadline = deadline(timeout);
        self.0.borrow()?.start_step(&env, &callback, move |it, cancel| {
            cancel.wait(deadline, |until| it.sender.wait_released_until(until))
        })
    }

    /// Sizes, peer and counters.
    #[napi]
    pub fn info(&self) -> Result<Info> {
        let mut endpoint = self.0.borrow()?;
        let sender = &mut endpoint.asked()?.sender;
        let unreleased = sender.unreleased();
        let info = Info::new(sender.capacity(), sender.message_bytes_max(), sender.peer(), sender.counters());
        Ok(Info { unreleased: Some(unreleased as f64), ..info })
    }
}
