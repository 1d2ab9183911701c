//! pelton: a lane for each thread, and one thread that receives of all of them.
//!
//! The receiver takes messages where they lie, by the batch, and copies nothing. Numbers and lengths are the lane's own headers.

use std::sync::Arc;

use anyhow::{Context, Result};
use pelton::{Receiver, Sender};

use super::{AppendSystem, Appender, BUFFER, HEADER, Opened, Sink};
use crate::{parameters::Job, systems::lasting};

/// By `Options::gather`.
pub struct Pelton;

impl AppendSystem for Pelton {
    type Appender = Sender;

    fn open(job: &Job, _count: u64, sink: Arc<dyn Sink>) -> Result<Opened<Sender>> {
        let (senders, receiver) = lasting(job).lanes(job.threads).gather().context("making the receiver")?;
        let appender = |_| senders.sender().context("making a sender");
        let appenders = (0..job.threads).map(appender).collect::<Result<_>>()?;
        // With the last sender the receiver is told the end.
        Ok(Opened { appenders, consumer: Some(Box::new(move || drain(receiver, &*sink))), finish: None })
    }
}

fn drain(mut receiver: Receiver, sink: &dyn Sink) -> Result<()> {
    let looks = sink.looks();
    let (mut messages, mut bytes) = (0, 0);
    loop {
        let mut batch = match receiver.receive_batch() {
            Ok(batch) => batch,
            Err(error) if error.is_closed() => break,
            Err(error) => return Err(error.into()),
        };
        while let Some(message) = batch.next()? {
            if looks {
                sink.look(message);
            }
            messages += 1;
            bytes += HEADER + message.len().next_multiple_of(8);
        }
        if bytes >= BUFFER {
            sink.count(messages, bytes as u64);
            (messages, bytes) = (0, 0);
        }
    }
    sink.count(messages, bytes as u64);
    Ok(())
}

impl Appender for Sender {
    #[inline(always)]
    fn append(&mut self, _number: u32, payload: &[u8]) -> Result<()> {
        Ok(self.send(payload)?)
    }
}
