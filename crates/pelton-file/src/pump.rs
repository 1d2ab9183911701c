//! From a file into a channel, and from a channel into a file: it reads into the lane, and writes from there. It runs
//! in a thread of its own, because it may wait for ever for the channel's peer.

use crate::cancel::Cancel;
use crate::file::File;
use pelton_channel::Error;
use pelton_channel::Receiver;
use pelton_channel::Sender;
use rustix::event::PollFlags;
use rustix::io::{Errno, ReadWriteFlags, Result};
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, TryLockError};

#[derive(Debug)]
pub(crate) struct Pump {
    pub(super) file: File,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) channel: Channel,
    done: u64,
    /// The error that ended it after some bytes.
    pub(super) cut_short_by: Option<Errno>,
    /// The channel's error, for which there is no errno.
    pub(super) channel_error: Option<Error>,
}

#[derive(Clone, Debug)]
pub(crate) enum Channel {
    /// With the bytes of a message.
    To(Arc<Mutex<Sender>>, usize),
    From(Arc<Mutex<Receiver>>),
}

impl Pump {
    pub(super) fn new(file: &File, offset: u64, bytes: u64, channel: Channel) -> Pump {
        Pump { file: file.clone(), offset, bytes, channel, done: 0, cut_short_by: None, channel_error: None }
    }

    /// Runs to its end, and waits as long as that takes.
    pub(super) fn run(&mut self, cancel: &Cancel) -> Result<usize> {
        let ended = match self.channel.clone() {
            Channel::To(sender, message_bytes) => {
                with_endpoint(&sender, |sender| self.send(sender, message_bytes, cancel))
            }
            Channel::From(receiver) => with_endpoint(&receiver, |receiver| self.receive(receiver, cancel)),
        };
        ended.map(|()| self.done as usize).or_else(|errno| self.failed(errno))
    }

    /// Keeps an error of the channel, for which there is no errno.
    fn keep_error<T>(&mut self, result: pelton_channel::Result<T>) -> Result<T> {
        result.map_err(|error| {
            self.channel_error = Some(error);
            Errno::PIPE
        })
    }

    /// The outcome after an error: as of a transfer.
    pub(super) fn failed(&mut self, error: Errno) -> Result<usize> {
        if self.done == 0 {
            return Err(error);
        }
        self.cut_short_by = Some(error);
        Ok(self.done as usize)
    }

    fn send(&mut self, sender: &mut Sender, message_bytes: usize, cancel: &Cancel) -> Result<()> {
        if message_bytes == 0 {
            return Err(Errno::INVAL);
        }
        while self.done < self.bytes {
            let wanted = (self.bytes - self.done).min(message_bytes as u64) as usize;
            if let Some(mut space) = self.keep_error(sender.try_reserve(wanted))? {
                let mut filled = 0;
                while filled < wanted {
                    let from = self.offset + self.done + filled as u64;
                    match self.read(&mut space[filled..], from, cancel)? {
                        0 => break,
                        bytes => filled += bytes,
                    }
                    // Later bytes of a stream belong to the next message.
                    if self.file.is_stream() {
                        break;
                    }
                }
                if filled > 0 {
                    self.keep_error(space.commit_bytes(filled))?;
                }
                self.done += filled as u64;
                if filled == 0 || (filled < wanted && !self.file.is_stream()) {
                    break;
                }
            } else if self.keep_error(sender.arm(wanted))?.is_waiting() {
                cancel.wait_for(sender.as_fd(), PollFlags::IN)?;
                sender.disarm();
            }
            cancel.check()?;
        }
        Ok(())
    }

    fn receive(&mut self, receiver: &mut Receiver, cancel: &Cancel) -> Result<()> {
        while self.done < self.bytes {
            let is_empty = match receiver.try_receive() {
                Ok(Some(message)) => {
                    let is_written = match message.len() as u64 <= self.bytes - self.done {
                        true => self.write(&message, cancel).map(|()| true),
                        false => Ok(false),
                    };
                    if let Ok(true) = is_written {
                        self.done += message.len() as u64;
                    } else {
                        // It stays in the channel, for the next receive.
                        std::mem::forget(message);
                        return is_written.map(drop);
                    }
                    false
                }
                Ok(None) => true,
                Err(error) if error.is_closed() => return Ok(()),
                Err(error) => return self.keep_error(Err(error)),
            };
            if is_empty && self.keep_error(receiver.arm())?.is_waiting() {
                cancel.wait_for(receiver.as_fd(), PollFlags::IN)?;
                receiver.disarm();
            }
            cancel.check()?;
        }
        Ok(())
    }

    fn read(&self, space: &mut [u8], from: u64, cancel: &Cancel) -> Result<usize> {
        self.nonblocking(PollFlags::IN, cancel, |flags| match flags.is_empty() {
            true => rustix::io::pread(&self.file, &mut *space, from),
            false => rustix::io::preadv2(&self.file, &mut [IoSliceMut::new(space)], from, flags),
        })
    }

    fn write(&self, bytes: &[u8], cancel: &Cancel) -> Result<()> {
        let mut written = 0;
        while written < bytes.len() {
            let (to, rest) = (self.offset + self.done + written as u64, &bytes[written..]);
            written += self.nonblocking(PollFlags::OUT, cancel, |flags| match flags.is_empty() {
                true => rustix::io::pwrite(&self.file, rest, to),
                false => rustix::io::pwritev2(&self.file, &[IoSlice::new(rest)], to, flags),
            })?;
        }
        Ok(())
    }

    /// A system call that does not wait on a stream, because a cancel could not interrupt it. The thread waits for the
    /// stream and the cancel before. A file without RWF_NOWAIT reports readiness.
    fn nonblocking(
        &self,
        event: PollFlags,
        cancel: &Cancel,
        mut call: impl FnMut(ReadWriteFlags) -> Result<usize>,
    ) -> Result<usize> {
        let mut flags = match self.file.is_stream() {
            true => ReadWriteFlags::NOWAIT,
            false => ReadWriteFlags::empty(),
        };
        loop {
            match call(flags) {
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) if self.file.is_stream() => {}
                Err(Errno::OPNOTSUPP) if !flags.is_empty() => flags = ReadWriteFlags::empty(),
                done => return done,
            }
            cancel.wait_for(self.file.as_fd(), event)?;
            cancel.check()?;
        }
    }
}

/// Locks a shared endpoint, unless another thread uses it.
fn with_endpoint<T>(shared: &Mutex<T>, work: impl FnOnce(&mut T) -> Result<()>) -> Result<()> {
    match shared.try_lock() {
        Ok(mut endpoint) => work(&mut endpoint),
        Err(TryLockError::Poisoned(endpoint)) => work(&mut endpoint.into_inner()),
        Err(TryLockError::WouldBlock) => Err(Errno::BUSY),
    }
}
