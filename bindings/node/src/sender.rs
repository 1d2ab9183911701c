//! `Sender` of the addon.

use crate::endpoint::{Armable, AsRawFdOfLoop, Endpoint, deadline};
use crate::error::raise;
use crate::open::{Info, Token, tokens};
use napi::bindgen_prelude::*;
use napi_derive::napi;
use pelton::Sent;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

/// How much `try_send_many` sends before the loop has another turn: a millisecond or so. A guess.
const TURN_MESSAGES: u32 = 1024;
const TURN_BYTES: usize = 4 << 20;

/// A sender, and the listener that had accepted it, which accepts a successor too.
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

/// The sending endpoint.
#[napi]
pub struct Sender(Endpoint<Sending>);

impl Sender {
    pub fn new(sender: pelton::Sender, listener: Option<pelton::Listener>) -> Sender {
        Sender(Endpoint::new("sender", Sending { sender, listener }))
    }
}

#[napi]
impl Sender {
    /// Has the loop watch the descriptor: see `Endpoint::watch`.
    #[napi]
    pub fn watch(&mut self, env: Env, callback: Function<'_, (), ()>) -> Result<()> {
        self.0.watch(&env, &callback)
    }

    /// Sends a message, if there is space.
    #[napi]
    pub fn try_send(&mut self, data: &[u8]) -> Result<bool> {
        let sender = &mut self.0.get()?.sender;
        Ok(sender.send_fast(data) || sender.try_send(data).map_err(raise)? == Sent::Sent)
    }

    /// Sends messages from the index `from` on, while there is space, and within the bounds of a turn. Returns the
    /// index of the first one not sent. An error after the first message comes again at the next call.
    #[napi]
    pub fn try_send_many(&mut self, messages: Array<'_>, from: u32) -> Result<u32> {
        let sender = &mut self.0.get()?.sender;
        let (end, mut bytes) = (messages.len().min(from.saturating_add(TURN_MESSAGES)), 0);
        for index in from..end {
            let data: &[u8] = messages.get(index)?.unwrap_or_default();
            if !sender.send_fast(data) {
                match sender.try_send(data) {
                    Ok(Sent::Sent) => {}
                    Err(error) if index == from => return Err(raise(error)),
                    _ => return Ok(index),
                }
            }
            bytes += data.len();
            if bytes > TURN_BYTES {
                return Ok(index + 1);
            }
        }
        Ok(end)
    }

    /// Begins to send a message with descriptors: a step.
    #[napi]
    pub fn start_send_descriptors(
        &mut self,
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
        self.0.start_step(&env, &callback, move |it, cancel| {
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(std::os::fd::AsFd::as_fd).collect();
            cancel.wait(deadline, |until| Ok(it.sender.send_with_descriptors_until(&data, &fds, until)? == Sent::Sent))
        })
    }

    /// Begins to wait until the receiver has released every message: a step.
    #[napi]
    pub fn start_wait_released(
        &mut self,
        env: Env,
        timeout: Option<f64>,
        callback: Function<'_, (), ()>,
    ) -> Result<()> {
        let deadline = deadline(timeout);
        self.0.start_step(&env, &callback, move |it, cancel| {
            cancel.wait(deadline, |until| it.sender.wait_released_until(until))
        })
    }

    /// Begins to wait for the receiver's successor: a step.
    #[napi]
    pub fn start_resume(&mut self, env: Env, timeout: Option<f64>, callback: Function<'_, (), ()>) -> Result<()> {
        let deadline = deadline(timeout);
        self.0.start_step(&env, &callback, move |it, cancel| match &it.listener {
            Some(listener) => {
                let listener = listener.clone();
                crate::open::accepting(&listener, deadline, cancel, |until| it.sender.resume_until(until))
            }
            None => cancel.wait(deadline, |until| it.sender.resume_until(until)),
        })
    }

    /// Begins to make the messages of a path channel durable: a step.
    #[napi]
    pub fn start_sync(&mut self, env: Env, callback: Function<'_, (), ()>) -> Result<()> {
        self.0.start_step(&env, &callback, |it, _| it.sender.sync().map(|()| true))
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

    /// Waits for space; false if there is some.
    #[napi]
    pub fn wait(&mut self, bytes: u32) -> Result<bool> {
        self.0.wait(bytes as usize)
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
        let sender = &mut self.0.asked()?.sender;
        let unreleased = sender.unreleased();
        let info = Info::new(sender.capacity(), sender.message_bytes_max(), sender.peer(), sender.counters());
        Ok(Info { unreleased: Some(unreleased as f64), ..info })
    }

    /// Hands it over to another thread of this process: a number for `attachSender` there.
    #[napi]
    pub fn detach(&mut self) -> Result<f64> {
        Ok(tokens().keep(Token::Sender(Box::new(self.0.detach()?))))
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
