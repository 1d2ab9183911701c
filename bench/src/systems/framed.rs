//! Messages over a byte stream: each is its length in four bytes, little-endian, and its payload.
//!
//! Without batching the sender makes one write per message. The receiver's reads ask for as many bytes as the largest
//! message has, so that messages of one size take one read each. With batching both sides have 64 KiB of buffer.

use std::{
    io::IoSlice,
    os::fd::{AsFd, BorrowedFd},
};

use anyhow::{Context, Result, ensure};

use super::{many::OneOfMany, wire::Wire};
use crate::endpoints::{Receiving, Sending};

/// The buffer of each side when batching.
pub const BATCH_BYTES: usize = 64 * 1024;
/// Of a message's length.
pub const PREFIX_BYTES: usize = 4;

pub struct FramedSending {
    wire: Wire,
    batched: bool,
    held: Vec<u8>,
}

impl FramedSending {
    /// Over `wire`.
    pub fn new(wire: Wire, batched: bool) -> FramedSending {
        FramedSending { wire, batched, held: Vec::with_capacity(if batched { BATCH_BYTES } else { 0 }) }
    }

    fn write(&self, payload: &[u8]) -> Result<()> {
        let prefix = (payload.len() as u32).to_le_bytes();
        let mut done = self
            .wire
            .retry(|fd| rustix::io::writev(fd, &[IoSlice::new(&prefix), IoSlice::new(payload)]))
            .context("writing a message")?;
        while done < PREFIX_BYTES {
            done +=
                self.wire.retry(|fd| rustix::io::write(fd, &prefix[done..])).context("writing the rest of a length")?;
        }
        self.write_all(&payload[done - PREFIX_BYTES..])
    }

    fn write_all(&self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let done = self.wire.retry(|fd| rustix::io::write(fd, bytes)).context("writing the rest of a message")?;
            bytes = &bytes[done..];
        }
        Ok(())
    }
}

impl Sending for FramedSending {
    #[inline]
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        if !self.batched {
            return self.write(payload);
        }
        let bytes = PREFIX_BYTES + payload.len();
        if self.held.len() + bytes > BATCH_BYTES {
            self.flush()?;
        }
        if bytes > BATCH_BYTES {
            return self.write(payload);
        }
        self.held.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        self.held.extend_from_slice(payload);
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.write_all(&self.held)?;
        self.held.clear();
        Ok(())
    }
}

/// The received bytes of such a stream that no message has taken yet.
pub struct Frames {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    size_max: usize,
}

impl Frames {
    /// Messages of at most `size_max` bytes; space for one such, or for `least` bytes.
    pub fn new(size_max: usize, least: usize) -> Frames {
        Frames { buffer: vec![0; least.max(PREFIX_BYTES + size_max)], start: 0, end: 0, size_max }
    }

    /// The length of the message at the front, when all of it is there.
    #[inline]
    pub fn whole(&self) -> Result<Option<usize>> {
        let Some((prefix, rest)) = self.buffer[self.start..self.end].split_first_chunk::<PREFIX_BYTES>() else {
            return Ok(None);
        };
        let len = u32::from_le_bytes(*prefix) as usize;
        ensure!(len <= self.size_max, "a message says that it has {len} bytes, wanted at most {}", self.size_max);
        Ok((rest.len() >= len).then_some(len))
    }

    /// That message, which stays until it is taken.
    #[inline]
    pub fn message(&self, len: usize) -> &[u8] {
        &self.buffer[self.start + PREFIX_BYTES..][..len]
    }

    /// Removes it.
    #[inline]
    pub fn take(&mut self, len: usize) {
        self.start += PREFIX_BYTES + len;
    }

    /// The free space behind the received bytes.
    pub fn free_space(&mut self) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start > 0 {
            // Only a part of a message: the rest may not fit behind it.
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.buffer[self.end..]
    }

    /// So many bytes were received there.
    pub fn received(&mut self, done: usize) -> Result<()> {
        ensure!(done > 0, "the other side is gone before the last message");
        self.end += done;
        Ok(())
    }
}

pub struct FramedReceiving {
    wire: Wire,
    frames: Frames,
}

impl FramedReceiving {
    /// Over `wire`, messages of at most `size_max` bytes.
    pub fn new(wire: Wire, batched: bool, size_max: usize) -> FramedReceiving {
        FramedReceiving { wire, frames: Frames::new(size_max, if batched { BATCH_BYTES } else { 0 }) }
    }

    fn read(&mut self) -> Result<()> {
        let free_space = self.frames.free_space();
        let done = self.wire.retry(|fd| rustix::io::read(fd, &mut *free_space)).context("reading")?;
        self.frames.received(done)
    }

    #[inline]
    fn show<R>(&mut self, len: usize, inspect: impl FnOnce(&[u8]) -> R) -> R {
        let answer = inspect(self.frames.message(len));
        self.frames.take(len);
        answer
    }
}

impl AsFd for FramedReceiving {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wire.as_fd()
    }
}

impl OneOfMany for FramedReceiving {
    #[inline]
    fn fetch(&mut self) -> Result<Option<usize>> {
        loop {
            if let Some(len) = self.frames.whole()? {
                return Ok(Some(len));
            }
            let free_space = self.frames.free_space();
            match self.wire.try_once(|fd| rustix::io::read(fd, &mut *free_space)).context("reading")? {
                Some(done) => self.frames.received(done)?,
                None => return Ok(None),
            }
        }
    }

    #[inline]
    fn take<R>(&mut self, len: usize, inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        Ok(self.show(len, inspect))
    }
}

impl Receiving for FramedReceiving {
    #[inline]
    fn receive<R>(&mut self, inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        loop {
            if let Some(len) = self.frames.whole()? {
                return Ok(self.show(len, inspect));
            }
            self.read()?;
        }
    }
}
