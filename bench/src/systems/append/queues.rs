//! crossbeam's queues, of messages of 16 bytes, and one thread that moves the messages into a buffer of records, and
//! flushes it.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use crossbeam_queue::{ArrayQueue, SegQueue};

use super::{Backoff, mutex_vec::write_record};
use crate::{
    parameters::Job,
    workloads::append::{Appender, BUFFER, Opened, Sink, record_bytes},
};

/// Bytes of a message here.
const SIZE: usize = 16;
type Message = [u8; SIZE];

/// Capacity of the bounded queue in messages. Measured: with 2^12 one thread is a tenth slower, and eight on two CPUs
/// are half as fast.
const CAPACITY: usize = 1 << 16;

/// The bounded queue.
pub fn bounded(job: &Job, count: u64, sink: Arc<dyn Sink>) -> Result<Opened<impl Appender + use<>>> {
    open(job, count, sink, ArrayQueue::new(CAPACITY), ArrayQueue::push, ArrayQueue::pop)
}

/// The unbounded one.
pub fn unbounded(job: &Job, count: u64, sink: Arc<dyn Sink>) -> Result<Opened<impl Appender + use<>>> {
    let push = |queue: &SegQueue<Message>, message| {
        queue.push(message);
        Ok(())
    };
    open(job, count, sink, SegQueue::new(), push, SegQueue::pop)
}

/// `push` returns the message if the queue is full, `pop` the oldest one.
fn open<Q: Send + Sync + 'static, F: Fn(&Q, Message) -> Result<(), Message> + Copy + Send>(
    job: &Job,
    count: u64,
    sink: Arc<dyn Sink>,
    queue: Q,
    push: F,
    pop: impl Fn(&Q) -> Option<Message> + Send + 'static,
) -> Result<Opened<QueueAppender<Q, F>>> {
    ensure!(job.sizes.max as usize == SIZE, "the queues' messages are of {SIZE} bytes, wanted {}", job.sizes);
    let queue = Arc::new(queue);
    let appenders = (0..job.threads).map(|_| QueueAppender { queue: queue.clone(), push }).collect();
    let total = job.threads as u64 * count;
    let consumer = move || {
        drain(|| pop(&queue), total, &*sink);
        Ok(())
    };
    Ok(Opened { appenders, consumer: Some(Box::new(consumer)), finish: None, read_back: None })
}

fn drain(pop: impl Fn() -> Option<Message>, total: u64, sink: &dyn Sink) {
    let mut buffer = vec![1; BUFFER];
    buffer.clear();
    let record = record_bytes(SIZE);
    let flush = |buffer: &mut Vec<u8>| {
        sink.take(buffer, (buffer.len() / record) as u64);
        buffer.clear();
    };
    let mut backoff = Backoff::default();
    let mut taken = 0;
    while taken < total {
        let Some(message) = pop() else {
            backoff.wait();
            continue;
        };
        backoff = Backoff::default();
        if buffer.len() + record > BUFFER {
            flush(&mut buffer);
        }
        write_record(&mut buffer, taken as u32, &message);
        taken += 1;
    }
    if !buffer.is_empty() {
        flush(&mut buffer);
    }
}

struct QueueAppender<Q, F> {
    queue: Arc<Q>,
    push: F,
}

impl<Q: Send + Sync, F: Fn(&Q, Message) -> Result<(), Message> + Send> Appender for QueueAppender<Q, F> {
    #[inline(always)]
    fn append(&mut self, _number: u32, payload: &[u8]) -> Result<()> {
        let mut message = Message::try_from(payload).context("a message of another size")?;
        let mut backoff = Backoff::default();
        while let Err(back) = (self.push)(&self.queue, message) {
            message = back;
            backoff.wait();
        }
        Ok(())
    }
}
