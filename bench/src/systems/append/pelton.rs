//! pelton: a lane for each thread, which the thread itself flushes when it holds a bufferful.

use std::sync::Arc;

use anyhow::{Context, Result};
use pelton::{Chunk, Options};

use crate::{
    parameters::Job,
    workloads::append::{Appender, BUFFER, Opened, Sink},
};

/// By `Appenders::new`.
pub fn open(job: &Job, _count: u64, sink: Arc<dyn Sink>) -> Result<Opened<pelton::Appender>> {
    let take = move |runs: &[Chunk<'_>]| {
        runs.iter().for_each(|run| sink.take(run.bytes(), run.message_count().into()));
        Ok(())
    };
    open_with(job, take)
}

/// With any of pelton's sinks.
pub fn open_with(job: &Job, sink: impl pelton::Sink + 'static) -> Result<Opened<pelton::Appender>> {
    // As the others: flushed when full and at the end, not by a timer.
    let options = Options::new().flush_bytes(BUFFER as u64).flush_interval(None).lanes(job.threads);
    let appenders = pelton::Appenders::new(&options, sink).context("making the buffers")?;
    let each = (0..job.threads).map(|_| appenders.appender().context("making a buffer")).collect::<Result<_>>()?;
    let finish = move || Ok(appenders.sync()?);
    Ok(Opened { appenders: each, consumer: None, finish: Some(Box::new(finish)), read_back: None })
}

impl Appender for pelton::Appender {
    #[inline(always)]
    fn append(&mut self, _number: u32, payload: &[u8]) -> Result<()> {
        Ok(self.append(payload)?)
    }
}
