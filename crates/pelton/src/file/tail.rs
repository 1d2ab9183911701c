//! The end of a plain file, as a sink of messages: what many threads append, with a write for each bufferful.

use super::File;
use crate::error::{Error, Result};
use crate::flush::{Run, Sink};
use rustix::fs::{FileType, fdatasync, fstat, ftruncate};
use rustix::io::{Errno, retry_on_intr};

/// The end of a file, to which messages go one after the other, without anything in between.
///
/// With [`Options::append`](crate::Options::append) any number of threads have a buffer each in memory of their own; a full one is written with one
/// system call, by the thread that filled it. The messages of a thread are in order, and whole. What a process has not flushed when
/// it is killed is gone; [`RecordFile`](crate::RecordFile) says what is whole after that, this does not.
///
/// Nobody else may write to the file's end meanwhile. After a failed write it is cut back to what it had. A file that another program has truncated, as
/// logrotate's `copytruncate` does, goes on at its new end. That the file was renamed or deleted is not noticed: a
/// [`RecordFile`](crate::RecordFile) notices, and goes on in a new file.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// # let directory = tempfile::tempdir().unwrap();
/// # let path = directory.path().join("log");
/// use pelton::file::{Engine, Open, Operation, Tail};
/// let log = Engine::new()?.run(Operation::open(&path, Open::for_writing().create(0o640)))?.into_file()?;
/// let appenders = pelton::Options::new().flush_bytes(1 << 20).append(Tail::of(log)?)?;
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
    /// Whether something of a failed write may be behind it.
    is_torn: bool,
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
        Ok(Tail { file, end, is_torn: false, bytes: Vec::new() })
    }

    fn cut(&mut self) -> Result<()> {
        retry_on_intr(|| ftruncate(&self.file, self.end))
            .map_err(|errno| failed("cutting off what was not written wholly of", &self.file, errno))?;
        self.is_torn = false;
        Ok(())
    }

    fn write_all(&self) -> rustix::io::Result<()> {
        crate::os::check_file_size(self.end + self.bytes.len() as u64)?;
        let mut done = 0;
        while done < self.bytes.len() {
            done += retry_on_intr(|| rustix::io::pwrite(&self.file, &self.bytes[done..], self.end + done as u64))?;
        }
        Ok(())
    }
}

impl Sink for Tail {
    fn write(&mut self, runs: &[Run<'_>]) -> Result<()> {
        if !self.file.is_own() {
            return Err(Error::Forked);
        }
        if self.is_torn {
            self.cut()?;
        }
        self.bytes.clear();
        for run in runs {
            let mut messages = 0;
            for payload in run.payloads() {
                self.bytes.extend_from_slice(payload);
                messages += 1;
            }
            if messages != run.messages() {
                let (found, wanted) = (messages, run.messages());
                return Err(Error::Corrupt(format!("a run has {found} whole messages, wanted {wanted}")));
            }
        }
        if self.bytes.is_empty() {
            return Ok(());
        }
        let found = fstat(&self.file).map_err(|errno| failed("asking about", &self.file, errno))?;
        if FileType::from_raw_mode(found.st_mode).is_file() {
            self.end = self.end.min(found.st_size as u64);
        }
        if let Err(errno) = self.write_all() {
            self.is_torn = true;
            // If this fails too, the next write does it first.
            let _ = self.cut();
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
