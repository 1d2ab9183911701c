//! Appending to a file, created for each pass and not synced: pelton's record file, and the plain write of full
//! buffers. Afterwards the sink gets the file's content.

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Read, Write as _},
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use pelton::{Chunk, LaneId, RecordFile, RecordReader};

use super::{
    mutex_vec::{self, MutexVec},
    pelton::open_with,
};
use crate::{
    parameters::Job,
    workloads::append::{BUFFER, Opened, Sink, record_bytes},
};

/// In the run's directory, which is in that of `--file`.
fn path(job: &Job) -> PathBuf {
    job.directory.join("records")
}

/// pelton's appenders, with `pelton::RecordFile` as their sink.
pub fn open_records(job: &Job, _count: u64, sink: Arc<dyn Sink>) -> Result<Opened<pelton::Appender>> {
    let (path, size) = (path(job), job.sizes.max as usize);
    let opened = open_with(job, Unsynced(RecordFile::open(&path)?))?;
    let read_back = move || {
        let mut reader = RecordReader::open(&path)?;
        while let Some(chunk) = reader.next_chunk()? {
            let found = chunk.records().map(|record| record.payload().len()).find(|bytes| *bytes != size);
            ensure!(found.is_none(), "a record has {found:?} bytes, wanted {size}");
            sink.take(chunk.bytes(), chunk.message_count().into());
        }
        remove(&path)
    };
    Ok(Opened { read_back: Some(Box::new(read_back)), ..opened })
}

/// Appenders that end sync their sink; but a disk's time must not be in the figures.
struct Unsynced(RecordFile);

impl pelton::Sink for Unsynced {
    fn write(&mut self, runs: &[Chunk<'_>]) -> pelton::Result<()> {
        self.0.write(runs)
    }

    fn sync(&mut self) -> pelton::Result<()> {
        Ok(())
    }

    fn due(&self) -> Option<Instant> {
        self.0.due()
    }

    fn last_seq(&self, lane: LaneId) -> Option<u32> {
        self.0.last_seq(lane)
    }
}

/// One buffer behind a lock, given to write(2) when it is full.
pub fn open_plain(job: &Job, count: u64, sink: Arc<dyn Sink>) -> Result<Opened<Arc<MutexVec>>> {
    let (path, record) = (path(job), record_bytes(job.sizes.max as usize));
    let file = File::create_new(&path).with_context(|| format!("making {}", path.display()))?;
    let written = Arc::new(Written { file, failed: OnceLock::new() });
    let opened = mutex_vec::open(job, count, written.clone())?;
    // The file is closed with the last buffer's writing, as pelton's is.
    let finish = move || {
        opened.finish.map_or(Ok(()), |finish| finish())?;
        written.failed.get().map_or(Ok(()), |error| bail!("writing to the file: {error}"))
    };
    let read_back = move || {
        let mut file = BufReader::with_capacity(BUFFER, File::open(&path)?);
        let mut bytes = vec![0; record];
        while !file.fill_buf()?.is_empty() {
            file.read_exact(&mut bytes).context("reading the last record")?;
            sink.take(&bytes, 1);
        }
        remove(&path)
    };
    Ok(Opened { finish: Some(Box::new(finish)), read_back: Some(Box::new(read_back)), ..opened })
}

/// A file, and the error that kept it incomplete.
struct Written {
    file: File,
    failed: OnceLock<io::Error>,
}

impl Sink for Written {
    fn take(&self, records: &[u8], _messages: u64) {
        if let Err(error) = (&self.file).write_all(records) {
            // The first error is reported.
            let _ = self.failed.set(error);
        }
    }
}

fn remove(path: &Path) -> Result<()> {
    fs::remove_file(path).with_context(|| format!("removing {}", path.display()))
}
