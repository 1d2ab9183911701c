//! How a submission is answered, and how its operation ends.

use crate::file::File;
use crate::operation::{Outcome, Output, Work};
use crate::transfer::Pieces;
use pelton_channel::{Error, Result};
use pelton_os::Buffer;

/// The outcome of a submitted operation, and its memory.
#[derive(Debug)]
#[non_exhaustive]
pub struct Completion {
    /// The token of its submission; 0 from [`Engine::run`](crate::Engine::run).
    pub token: u64,
    /// The outcome. [`Error::File`] with `ECANCELED` if it was cancelled, or an earlier operation of its chain failed.
    pub outcome: Result<Output>,
    /// The operation's memory; empty if it has none.
    pub buffer: Buffer,
    /// The memory of a vectored operation.
    pub buffers: Vec<Buffer>,
    /// If the count is less than requested: the error or the cancel after so many bytes. `None`: a read or a copy
    /// reached the end of its file.
    pub cut_short_by: Option<Box<Error>>,
}

impl Completion {
    /// Also returns the operation's handles of files.
    pub(crate) fn of(token: u64, mut work: Work, result: Outcome) -> (Completion, [Option<File>; 2]) {
        let outcome = result.map_err(|errno| work.error(errno));
        let cut_short_by = work.cut_short_by().map(|errno| Box::new(work.error(errno)));
        let (memory, files) = work.into_parts();
        let (buffer, buffers) = match memory {
            Pieces::One(buffer) => (buffer, Vec::new()),
            Pieces::Many(buffers) => (Buffer::default(), buffers),
        };
        (Completion { token, outcome, buffer, buffers, cut_short_by }, files)
    }

    /// Of a transfer with one buffer that nothing cut short.
    #[inline]
    pub(crate) fn of_count(token: u64, bytes: usize, buffer: Buffer) -> Completion {
        Completion { token, outcome: Ok(Output::Count(bytes)), buffer, buffers: Vec::new(), cut_short_by: None }
    }

    /// How many bytes were read, written or copied; 0 for other operations and after a failure.
    pub fn count(&self) -> usize {
        if let Ok(Output::Count(bytes)) = self.outcome { bytes } else { 0 }
    }

    /// The bytes that a read with one buffer read.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[..self.count().min(self.buffer.len())]
    }

    /// The file that was opened.
    ///
    /// # Errors
    /// The operation's error; [`Error::Refused`] if it was not [`Operation::open`](crate::Operation::open).
    pub fn into_file(self) -> Result<File> {
        match self.outcome? {
            Output::File(file) => Ok(file),
            other => Err(Error::Refused(format!("found {other:?}, wanted a file: only `Operation::open` returns one"))),
        }
    }
}

/// Whether the engine accepted a submission.
#[derive(Debug)]
#[must_use = "an operation that was not accepted is not performed"]
pub enum Submitted<T> {
    /// Accepted: a completion will follow.
    Submitted,
    /// Too many are in flight. Take completions, then submit this again.
    Full(T),
}

impl<T> Submitted<T> {
    /// Whether it was accepted.
    pub fn is_submitted(&self) -> bool {
        matches!(self, Submitted::Submitted)
    }
}
