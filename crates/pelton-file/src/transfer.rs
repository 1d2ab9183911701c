//! Reads and writes: their state, and the system calls that perform them, inline or in a thread that may wait. The ring
//! performs them by entries instead.

use crate::cancel::Cancel;
use crate::faults::Fault;
use crate::file::{File, INLINE_BYTES_MAX, InlineMode};
use pelton_os::Buffer;
use rustix::event::PollFlags;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::{Errno, ReadWriteFlags, Result};
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd as _};

/// The most buffers of one vectored system call.
pub(crate) const IOV_MAX: usize = 1024;
/// How often a file that is not a stream may return EAGAIN, which it should never do.
const TRIES: usize = 1000;

/// A read or a write.
#[derive(Debug)]
pub(crate) struct Transfer {
    pub(crate) file: File,
    pub(crate) memory: Pieces,
    pub(crate) position: Position,
    pub(crate) writes: bool,
    /// Bytes transferred so far.
    pub(crate) done: usize,
    /// The error that ended it after some bytes.
    pub(crate) cut_short_by: Option<Errno>,
    /// Whether the kernel must not copy its bytes inside the call that begins it.
    pub(crate) is_async: bool,
}

#[derive(Debug)]
pub(crate) enum Pieces {
    One(Buffer),
    Many(Vec<Buffer>),
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Position {
    At(u64),
    /// The file's own position, which the transfer advances.
    Current,
    End,
}

impl Transfer {
    /// All bytes of the transfer.
    pub(crate) fn bytes(&self) -> usize {
        match &self.memory {
            Pieces::One(buffer) => buffer.len(),
            Pieces::Many(buffers) => buffers.iter().map(|buffer| buffer.len()).sum(),
        }
    }

    /// The offset of the rest, for system calls. The current position and the end have no offset.
    pub(crate) fn offset(&self) -> u64 {
        match self.position {
            // An invalid offset stays invalid, and does not become the current position.
            Position::At(offset) => offset.saturating_add(self.done as u64).min(1 << 63),
            Position::Current => u64::MAX,
            Position::End => 0,
        }
    }

    /// Counts transferred bytes. Returns the count if the transfer is complete.
    pub(crate) fn advance(&mut self, bytes: usize) -> Option<usize> {
        self.done += bytes;
        let all = self.done == self.bytes() || bytes == 0 || (!self.writes && self.file.is_stream());
        all.then_some(self.done)
    }

    /// The outcome after an error: after some bytes their count, and the next operation gets the error.
    pub(crate) fn failed(&mut self, error: Errno) -> Result<usize> {
        if self.done == 0 {
            return Err(error);
        }
        self.cut_short_by = Some(error);
        Ok(self.done)
    }

    /// Performs as much of a transfer as needs no waiting. `None`: the rest would, or may, wait.
    #[inline]
    pub(crate) fn try_inline(&mut self) -> Option<Result<usize>> {
        // Inline writes to a stream could raise a signal.
        if self.bytes() > INLINE_BYTES_MAX || (self.writes && self.file.is_stream()) {
            return None;
        }
        loop {
            let mode = self.file.inline_mode(self.writes).get();
            let flags = match mode {
                InlineMode::NOWAIT => ReadWriteFlags::NOWAIT,
                InlineMode::MEMORY => ReadWriteFlags::empty(),
                _ => return None,
            };
            match self.step(flags, usize::MAX) {
                // Linux 5.9 and 5.10 also return 0 for bytes outside the page cache (preadv2(2), BUGS).
                Ok(0) if mode == InlineMode::NOWAIT && self.done < self.bytes() => return None,
                Ok(bytes) => {
                    if let Some(count) = self.advance(bytes) {
                        return Some(Ok(count));
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return None,
                // Tried once per file.
                Err(Errno::OPNOTSUPP) if mode == InlineMode::NOWAIT => {
                    self.file.inline_mode(self.writes).set(InlineMode::NEVER);
                }
                Err(error) => return Some(self.failed(error)),
            }
        }
    }

    /// The fast path for the most frequent operation: a read that waits like the plain system call, from a file that is
    /// not a stream. `None`: the rest is for [`Transfer::run`].
    #[inline]
    pub(crate) fn read_fast(&mut self) -> Option<Result<usize>> {
        if self.writes || self.file.is_stream() {
            return None;
        }
        match self.step(ReadWriteFlags::empty(), usize::MAX) {
            Ok(bytes) => self.advance(bytes).map(Ok),
            Err(Errno::INTR | Errno::AGAIN) => None,
            Err(error) => Some(self.failed(error)),
        }
    }

    /// Transfers all bytes. A call on a stream does not wait, because a cancel could not interrupt it: other readers or
    /// writers may be faster. The thread waits for the stream and for the cancel together. If `is_nonblocking`, the
    /// file's own flag does that, and calls need no flag.
    pub(crate) fn run(&mut self, cancel: &Cancel, waits: bool, is_nonblocking: bool) -> Result<Option<usize>> {
        let is_stream = self.file.is_stream();
        let event = if self.writes { PollFlags::OUT } else { PollFlags::IN };
        let (mut flags, mut most) = match is_stream && !is_nonblocking {
            true => (ReadWriteFlags::NOWAIT, usize::MAX),
            false => (ReadWriteFlags::empty(), usize::MAX),
        };
        let mut tries = TRIES;
        loop {
            // Without RWF_NOWAIT: a stream that reports readiness has at least this much space.
            if is_stream && flags.is_empty() && !is_nonblocking {
                if !waits {
                    return Ok(None);
                }
                cancel.wait_for(self.file.as_fd(), event)?;
                most = if self.writes { libc::PIPE_BUF } else { usize::MAX };
            }
            if cancel.is_cancelled() {
                return self.failed(Errno::CANCELED).map(Some);
            }
            match self.step(flags, most) {
                Ok(bytes) => {
                    if let Some(count) = self.advance(bytes) {
                        return Ok(Some(count));
                    }
                }
                Err(Errno::OPNOTSUPP) if !flags.is_empty() => {
                    if waits
                        && cancel.can_cancel()
                        && let Some(reopened) = self.reopened_nonblocking()
                    {
                        let file = std::mem::replace(&mut self.file, reopened);
                        let result = self.run(cancel, waits, true);
                        self.file = file;
                        return result;
                    }
                    flags = ReadWriteFlags::empty();
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if is_stream && !waits => return Ok(None),
                Err(Errno::AGAIN) if is_stream => cancel.wait_for(self.file.as_fd(), event)?,
                // No event says when to retry.
                Err(Errno::AGAIN) if tries > 0 => tries -= 1,
                Err(error) => return self.failed(error).map(Some),
            }
        }
    }

    /// A FIFO does not support RWF_NOWAIT, so this opens it once more with O_NONBLOCK. Otherwise a faster reader could
    /// leave this thread blocked in a call, which no cancel interrupts. `None`: it is no FIFO, has no reader, or may
    /// not be opened.
    #[cold]
    fn reopened_nonblocking(&self) -> Option<File> {
        let file = &self.file;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(file).ok()?.st_mode);
        if kind != FileType::Fifo {
            return None;
        }
        let access = if self.writes { OFlags::WRONLY } else { OFlags::RDONLY };
        let flags = access | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let itself = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
        File::opened(rustix::fs::open(itself, flags, Mode::empty()).ok()?, file.path().to_owned(), flags).ok()
    }

    /// One system call of a transfer, which moves at most so many bytes.
    #[inline]
    fn step(&mut self, flags: ReadWriteFlags, most: usize) -> Result<usize> {
        let most = match Fault::next() {
            Some(Fault::Error(errno)) => return Err(errno),
            Some(Fault::Short(bytes)) => most.min(bytes),
            None => most,
        };
        let (offset, done) = (self.offset(), self.done);
        let fd = self.file.as_fd();
        let flags = if matches!(self.position, Position::End) { flags | ReadWriteFlags::APPEND } else { flags };
        let is_plain = flags.is_empty() && matches!(self.position, Position::At(_));
        // The most frequent case first.
        if let (Pieces::One(buffer), false, usize::MAX) = (&mut self.memory, self.writes, most) {
            let rest = &mut buffer[done..];
            // The plain calls are some tens of nanoseconds faster than those with flags.
            return match is_plain {
                true => rustix::io::pread(fd, rest, offset),
                false => rustix::io::preadv2(fd, &mut [IoSliceMut::new(rest)], offset, flags),
            };
        }
        self.step_slow(flags, most)
    }

    /// Any other system call of a self.
    #[inline(never)]
    fn step_slow(&mut self, flags: ReadWriteFlags, most: usize) -> Result<usize> {
        let (offset, done) = (self.offset(), self.done);
        let fd = self.file.as_fd();
        let is_plain = flags.is_empty() && matches!(self.position, Position::At(_));
        // A limited call moves bytes of one buffer only.
        let count = if most < usize::MAX { 1 } else { IOV_MAX };
        match (&mut self.memory, self.writes) {
            (Pieces::One(buffer), false) => {
                let bytes = &mut buffer[done..];
                let most = most.min(bytes.len());
                rustix::io::preadv2(fd, &mut [IoSliceMut::new(&mut bytes[..most])], offset, flags)
            }
            (Pieces::One(buffer), true) => {
                let bytes = &buffer[done..];
                let bytes = &bytes[..most.min(bytes.len())];
                match is_plain {
                    true => rustix::io::pwrite(fd, bytes, offset),
                    false => rustix::io::pwritev2(fd, &[IoSlice::new(bytes)], offset, flags),
                }
            }
            (Pieces::Many(buffers), false) => {
                let mut skipped = done;
                let mut slices: Vec<IoSliceMut<'_>> = (buffers.iter_mut())
                    .filter_map(|buffer| {
                        let skip = skipped.min(buffer.len());
                        skipped -= skip;
                        (skip < buffer.len()).then(|| IoSliceMut::new(&mut buffer[skip..]))
                    })
                    .take(count)
                    .collect();
                rustix::io::preadv2(fd, &mut slices, offset, flags)
            }
            (Pieces::Many(buffers), true) => {
                let rest = rest_of(buffers, done).take(count).map(|bytes| &bytes[..most.min(bytes.len())]);
                let slices: Vec<IoSlice<'_>> = rest.map(IoSlice::new).collect();
                rustix::io::pwritev2(fd, &slices, offset, flags)
            }
        }
    }
}

/// The bytes after the first `done`, as many buffers as one call takes.
pub(crate) fn rest_of(buffers: &[Buffer], mut done: usize) -> impl Iterator<Item = &[u8]> {
    (buffers.iter())
        .filter_map(move |buffer| {
            let skip = done.min(buffer.len());
            done -= skip;
            (skip < buffer.len()).then(|| &buffer[skip..])
        })
        .take(IOV_MAX)
}
