//! crossbeam's queues, of messages of 16 bytes, and one thread that moves the messages into a buffer of records, and
//! flushes it.

use std::{marker::PhantomData, sync::Arc};

use anyhow::{Context, Result, ensure};
use crossbeam_queue::{ArrayQueue, SegQueue};

use super::{Backoff, mutex_vec::write_record};
use crate::{
    parameters::Job,
    workloads::append::{AppendSystem, Appender, BUFFER, Opened, Sink, record_bytes},
};

/// Bytes of a message here.
const SIZE: usize = 16;
type Message = [u8; SIZE];

/// Capacity of the bounded queue in messages. Measured: with 2^12 one thread is a tenth slower, and eight on two CPUs
/// are half as fast.
const CAPACITY: usize = 1 << 16;

/// The operations that both queues have.
pub trait CrossbeamQueue: Send + Sync + 'static {
    /// Empty.
    fn new() -> Self;
    /// Returns the message if the queue is full.
    fn push(&self, message: Message) -> Result<(), Message>;
    /// The oldest message.
    fn pop(&self) -> Option<Message>;
}

impl CrossbeamQueue for ArrayQueue<Message> {
    fn new() -> Self {
        ArrayQueue::new(CAPACITY)
    }
    #[inline(always)]
    fn push(&self, message: Message) -> Result<(), Message> {
        ArrayQueue::push(self, message)
    }
    #[inline(always)]
    fn pop(&self) -> Option<Message> {
        ArrayQueue::pop(self)
    }
}

impl CrossbeamQueue for SegQueue<Message> {
    fn new() -> Self {
        SegQueue::new()
    }
    #[inline(always)]
    fn push(&self, message: Message) -> Result<(), Message> {
        SegQueue::push(self, message);
        Ok(())
    }
    #[inline(always)]
    fn pop(&self) -> Option<Message> {
        SegQueue::pop(self)
    }
}

/// Messages by the queue `Q`.
pub struct Queue<Q>(PhantomData<Q>);

impl<Q: CrossbeamQueue> AppendSystem for Queue<Q> {
    type Appender = QueueAppender<Q>;

    fn open(job: &Job, count: u64, sink: Arc<dyn Sink>) -> Result<Opened<QueueAppender<Q>>> {
        ensure!(job.sizes.max as usize == SIZE, "the queues' messages are of {SIZE} bytes, wanted {}", job.sizes);
        let queue = Arc::new(Q::new());
        let appenders = (0..job.threads).map(|_| QueueAppender(queue.clone())).collect();
        let total = job.threads as u64 * count;
        let consumer = move || {
            drain(&*queue, total, &*sink);
            Ok(())
        };
        Ok(Opened { appenders, consumer: Some(Box::new(consumer)), finish: None, read_back: None })
    }
}

fn drain(queue: &impl CrossbeamQueue, total: u64, sink: &dyn Sink) {
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
        let Some(message) = queue.pop() else {
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

pub struct QueueAppender<Q>(Arc<Q>);

impl<Q: CrossbeamQueue> Appender for QueueAppender<Q> {
    #[inline(always)]
    fn append(&mut self, _number: u32, payload: &[u8]) -> Result<()> {
        let mut message = Message::try_from(payload).context("a message of another size")?;
        let mut backoff = Backoff::default();
        while let Err(back) = self.0.push(message) {
            message = back;
            backoff.wait();
        }
        Ok(())
    }
}
