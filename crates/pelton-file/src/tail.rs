//! The end of a plain file as a sink: many threads append, with one write per full buffer.

use crate::faults::Fault;
use crate::file::File;
use pelton_channel::{Error, Result};
use pelton_flush::{Chunk, Sink};
use pelton_lane::failpoint;
use rustix::fs::{FileType, Stat, fdatasync, fstat, ftruncate};
use rustix::io::{Errno, ReadWriteFlags, retry_on_intr};
use std::io::IoSlice;

/// A sink that appends messages to a file, back to back.
///
/// With `Appenders::new` any number of threads have a buffer each in their own memory. The thread that fills a buffer
/// writes it with one system call. The messages of one thread stay complete and in order. A killed process loses what
/// it has not flushed. After that, a `RecordFile` identifies the complete messages; this file does not.
///
/// No other process may write to the file's end meanwhile. After a failed write the sink cuts the file back to its
/// former length. If another program truncates the file, as logrotate's `copytruncate` does, appending continues at the
/// new end, without zeros before it. The sink does not notice a rename or a deletion: a `RecordFile` does, and
/// continues in a new file.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// # let directory = tempfile::tempdir().unwrap();
/// # let path = directory.path().join("log");
/// use pelton::file::{Engine, Open, Operation, Tail};
/// let log = Engine::new()?.run(Operation::open(&path, Open::for_writing().create(0o640)))?.into_file()?;
/// let appenders = pelton::Appenders::new(&pelton::Options::new().flush_bytes(1 << 20), Tail::new(log)?)?;
/// appenders.append(b"from any thread\n")?;
/// appenders.sync()?;
/// # assert_eq!(std::fs::read(&path).unwrap(), b"from any thread\n");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Tail {
    file: File,
    /// The offset of the next message.
    end: u64,
    /// How many bytes of a failed write the file may have behind `end`; `None` if no write has failed.
    torn: Option<u64>,
    bytes: Vec<u8>,
}

impl Tail {
    /// A sink at the end of `file`, which must be open for writing, without [`Open::append`](super::Open::append) and
    /// [`Open::direct`](super::Open::direct).
    ///
    /// # Errors
    /// [`Error::File`] when the system does not report its length.
    pub fn new(file: File) -> Result<Tail> {
        let end = fstat(&file).map_err(|errno| failed("examining", &file, errno))?.st_size as u64;
        Ok(Tail { file, end, torn: None, bytes: Vec::new() })
    }

    fn stat(&self) -> Result<Stat> {
        fstat(&self.file).map_err(|errno| failed("examining", &self.file, errno))
    }

    /// Cuts off the bytes of a failed write. Never extends the file: another program may have truncated it before or
    /// during that write.
    fn cut(&mut self, torn: u64) -> Result<()> {
        self.torn = Some(torn);
        self.end = self.end.min((self.stat()?.st_size as u64).saturating_sub(torn));
        retry_on_intr(|| ftruncate(&self.file, self.end))
            .map_err(|errno| failed("cutting a partial write off", &self.file, errno))?;
        self.torn = None;
        Ok(())
    }

    /// Writes the bytes. An error comes with the number of bytes written before it.
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
            if messages != chunk.message_count() {
                let (found, wanted) = (messages, chunk.message_count());
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
            // The kernel writes at the end that the file has then: after a truncation from here on there are no zeros
            // before the bytes either.
            flags = ReadWriteFlags::APPEND;
        }
        failpoint("tail: checked");
        if let Err((done, errno)) = self.write_all(flags) {
            // If that fails too, the next write does it first.
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
