//! The end of a plain file, as a sink of messages: what many threads append, with a write for each bufferful.

use crate::faults::Fault;
use crate::file::File;
use pelton_channel::{Error, Result};
use pelton_flush::{Chunk, Sink};
use pelton_lane::failpoint;
use rustix::fs::{FileType, Stat, fdatasync, fstat, ftruncate};
use rustix::io::{Errno, ReadWriteFlags, retry_on_intr};
use std::io::IoSlice;

/// The end of a file, to which messages go one after the other, without anything in between.
///
/// With `Appenders::new` any number of threads have a buffer each in memory of their own; a full one is written with one
/// system call, by the thread that filled it. The messages of a thread are in order, and whole. What a process has not flushed when
/// it is killed is gone; `RecordFile` says what is whole after that, this does not.
///
/// Nobody else may write to the file's end meanwhile. After a failed write it is cut back to what it had. A file that another program truncates, as
/// logrotate's `copytruncate` does, goes on at its new end, without zeros before it. That the file was renamed or deleted is not noticed: a
/// `RecordFile` notices, and goes on in a new file.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// # let directory = tempfile::tempdir().unwrap();
/// # let path = directory.path().join("log");
/// use pelton::file::{Engine, Open, Operation, Tail};
/// let log = Engine::new()?.run(Operation::open(&path, Open::for_writing().create(0o640)))?.into_file()?;
/// let appenders = pelton::Appenders::new(&pelton::Options::new().flush_bytes(1 << 20), Tail::of(log)?)?;
/// appenders.append(b"from any thread\n")?;
/// appenders.sync()?;
/// # assert_eq!(std::fs::read(&path).unwrap(), b"from any thread\n");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Tail {
    file: File,
    /// Where the next message goes.
    end: u64,
    /// How many bytes of a failed write may be behind it; `None` if no write has failed.
    torn: Option<u64>,
    bytes: Vec<u8>,
}

impl Tail {
    /// The end of `file`, which was opened to be written, and without [`Open::append`](super::Open::append) or
    /// [`Open::direct`](super::Open::direct).
    ///
    /// # Errors
    /// [`Error::File`] when the system does not say how long it is.
    pub fn of(file: File) -> Result<Tail> {
        let end = fstat(&file).map_err(|errno| failed("asking about", &file, errno))?.st_size as u64;
        Ok(Tail { file, end, torn: None, bytes: Vec::new() })
    }

    fn stat(&self) -> Result<Stat> {
        fstat(&self.file).map_err(|errno| failed("asking about", &self.file, errno))
    }

    /// Cuts off what a failed write has left. Never extends the file: another program may have truncated it before or during that write.
    fn cut(&mut self, torn: u64) -> Result<()> {
        self.torn = Some(torn);
        self.end = self.end.min((self.stat()?.st_size as u64).saturating_sub(torn));
        retry_on_intr(|| ftruncate(&self.file, self.end))
            .map_err(|errno| failed("cutting off what was not written wholly of", &self.file, errno))?;
        self.torn = None;
        Ok(())
    }

    /// Writes the bytes. Answers how many were written before it failed, too.
    fn write_all(&self, flags: ReadWriteFlags) -> std::result::Result<(), (usize, Errno)> {
        pelton_os::check_file_size(self.end + self.bytes.len() as u64).map_err(|errno| (0, errno))?;
        let mut done = 0;
        while done < self.bytes.len() {
            let rest = match Fault::next() {
                Some(Fault::Error(errno)) => return Err((done, errno)),
                Some(Fault::Short(most)) => &self.bytes[done..][..most],
                None => &self.bytes[done..],
            };
            let offset = self.end + done as u64;
            let write = || rustix::io::pwritev2(&self.file, &[IoSlice::new(rest)], offset, flags);
            done += retry_on_intr(write).map_err(|errno| (done, errno))?;
        }
        Ok(())
    }
}

impl Sink for Tail {
    fn write(&mut self, chunks: &[Chunk<'_>]) -> Result<()> {
        if !self.file.is_own() {
            return Err(Error::Forked);
        }
        if let Some(torn) = self.torn {
            self.cut(torn)?;
        }
        self.bytes.clear();
        for chunk in chunks {
            let mut messages = 0;
            for payload in chunk.payloads() {
                self.bytes.extend_from_slice(payload);
                messages += 1;
            }
            if messages != chunk.messages() {
                let (found, wanted) = (messages, chunk.messages());
                return Err(Error::Corrupt(format!("a chunk has {found} valid messages, wanted {wanted}")));
            }
        }
        if self.bytes.is_empty() {
            return Ok(());
        }
        let found = self.stat()?;
        let mut flags = ReadWriteFlags::empty();
        if FileType::from_raw_mode(found.st_mode).is_file() {
            self.end = self.end.min(found.st_size as u64);
            // The kernel writes at the end that it finds: a truncation from here on leaves no zeros before the bytes either.
            flags = ReadWriteFlags::APPEND;
        }
        failpoint("tail: checked");
        if let Err((done, errno)) = self.write_all(flags) {
            // If this fails too, the next write does it first.
            let _ = self.cut(done as u64);
            return Err(failed("writing", &self.file, errno));
        }
        self.end += self.bytes.len() as u64;
        Ok(())
    }

    fn sync(&mut self) -> Result<()> {
        retry_on_intr(|| fdatasync(&self.file)).map_err(|errno| failed("syncing", &self.file, errno))
    }
}

fn failed(what: &'static str, file: &File, errno: Errno) -> Error {
    Error::file(what, file.path().display().to_string(), errno)
}
