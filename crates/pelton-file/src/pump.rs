//! From a file into a channel, and from a channel into a file: bytes are read into the lane, and written from there. In a thread of its own, for it may
//! wait for ever for the other side of the channel.

use crate::file::File;
use crate::interrupt::Interrupt;
use pelton_channel::Error;
use pelton_channel::Receiver;
use pelton_channel::Sender;
use rustix::event::PollFlags;
use rustix::io::{Errno, ReadWriteFlags};
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
    /// What was the end, after some bytes.
    pub(super) cut_short_by: Option<Errno>,
    /// What the channel said, for which there is no errno.
    pub(super) told: Option<Error>,
}

#[derive(Clone, Debug)]
pub(crate) enum Channel {
    /// Messages of so many bytes.
    To(Arc<Mutex<Sender>>, usize),
    From(Arc<Mutex<Receiver>>),
}

/// What ended it: an error of the file's, or of the channel's.
enum End {
    File(Errno),
    Channel(Error),
}

impl From<Errno> for End {
    fn from(errno: Errno) -> End {
        End::File(errno)
    }
}

impl From<Error> for End {
    fn from(error: Error) -> End {
        End::Channel(error)
    }
}

impl Pump {
    pub(super) fn new(file: &File, offset: u64, bytes: u64, channel: Channel) -> Pump {
        Pump { file: file.clone(), offset, bytes, channel, done: 0, cut_short_by: None, told: None }
    }

    /// Goes on until it is done, and waits as long as it takes.
    pub(super) fn run(&mut self, cancel: &dyn Interrupt) -> std::result::Result<usize, Errno> {
        let ended = match self.channel.clone() {
            Channel::To(sender, message_bytes) => with(&sender, |sender| self.send(sender, message_bytes, cancel)),
            Channel::From(receiver) => with(&receiver, |receiver| self.receive(receiver, cancel)),
        };
        let errno = match ended {
            Ok(()) => return Ok(self.done as usize),
            Err(End::File(errno)) => errno,
            Err(End::Channel(error)) => {
                self.told = Some(error);
                Errno::PIPE
            }
        };
        self.failed(errno)
    }

    /// What an error means after some bytes have gone, as of a transfer.
    pub(super) fn failed(&mut self, error: Errno) -> std::result::Result<usize, Errno> {
        if self.done == 0 {
            return Err(error);
        }
        self.cut_short_by = Some(error);
        Ok(self.done as usize)
    }

    fn send(
        &mut self,
        sender: &mut Sender,
        message_bytes: usize,
        cancel: &dyn Interrupt,
    ) -> std::result::Result<(), End> {
        if message_bytes == 0 {
            return Err(Errno::INVAL.into());
        }
        while self.done < self.bytes {
            let wanted = (self.bytes - self.done).min(message_bytes as u64) as usize;
            if let Some(mut room) = sender.try_reserve(wanted)? {
                let mut filled = 0;
                while filled < wanted {
                    let from = self.offset + self.done + filled as u64;
                    match self.read(&mut room[filled..], from, cancel)? {
                        0 => break,
                        bytes => filled += bytes,
                    }
                    // What more comes of a stream is for the next message.
                    if self.file.is_stream() {
                        break;
                    }
                }
                if filled > 0 {
                    room.commit_bytes(filled)?;
                }
                self.done += filled as u64;
                if filled == 0 || (filled < wanted && !self.file.is_stream()) {
                    break;
                }
            } else if sender.arm(wanted)? {
                cancel.wait_for(sender.as_fd(), PollFlags::IN)?;
                sender.disarm();
            }
            cancel.check()?;
        }
        Ok(())
    }

    fn receive(&mut self, receiver: &mut Receiver, cancel: &dyn Interrupt) -> std::result::Result<(), End> {
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
                        // It stays in the channel: whoever receives next has it.
                        std::mem::forget(message);
                        return is_written.map(drop).map_err(End::File);
                    }
                    false
                }
                Ok(None) => true,
                Err(error) if error.is_closed() => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            if is_empty && receiver.arm()? {
                cancel.wait_for(receiver.as_fd(), PollFlags::IN)?;
                receiver.disarm();
            }
            cancel.check()?;
        }
        Ok(())
    }

    fn read(&self, room: &mut [u8], from: u64, cancel: &dyn Interrupt) -> rustix::io::Result<usize> {
        self.without_waiting(PollFlags::IN, cancel, |flags| match flags.is_empty() {
            true => rustix::io::pread(&self.file, &mut *room, from),
            false => rustix::io::preadv2(&self.file, &mut [IoSliceMut::new(room)], from, flags),
        })
    }

    fn write(&self, bytes: &[u8], cancel: &dyn Interrupt) -> rustix::io::Result<()> {
        let mut written = 0;
        while written < bytes.len() {
            let (to, rest) = (self.offset + self.done + written as u64, &bytes[written..]);
            written += self.without_waiting(PollFlags::OUT, cancel, |flags| match flags.is_empty() {
                true => rustix::io::pwrite(&self.file, rest, to),
                false => rustix::io::pwritev2(&self.file, &[IoSlice::new(rest)], to, flags),
            })?;
        }
        Ok(())
    }

    /// A system call, which of a stream is made so that nobody waits in it, where no cancel is heard: that is waited for before. One that cannot be
    /// asked so says that it is ready.
    fn without_waiting(
        &self,
        event: PollFlags,
        cancel: &dyn Interrupt,
        mut call: impl FnMut(ReadWriteFlags) -> rustix::io::Result<usize>,
    ) -> rustix::io::Result<usize> {
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

/// With the end of a channel that was lent, if nobody else uses it.
fn with<T>(lent: &Mutex<T>, work: impl FnOnce(&mut T) -> std::result::Result<(), End>) -> std::result::Result<(), End> {
    match lent.try_lock() {
        Ok(mut end) => work(&mut end),
        Err(TryLockError::Poisoned(end)) => work(&mut end.into_inner()),
        Err(TryLockError::WouldBlock) => Err(End::File(Errno::BUSY)),
    }
}
