//! One buffer for all threads, in which each takes space by fetch_add.
//!
//! The thread that overflows the buffer opens the other one, waits for the writers that still write to the full one,
//! and flushes that. The wait costs each writer two stores to a cache line of its own and no second read-modify-write
//! instruction: before a write it stores the buffer's number, afterwards that it writes to none.
//!
//! ```text
//! [take]   writer: store `writing`, fetch_add the tail  ->  flusher: fetch_add the tail, load `writing`
//!          the flusher detects each writer that took space before
//! [wrote]  writer: store `writing` none  ->  flusher: load it       the records are visible
//! [open]   flusher: reset a tail, store the epoch  ->  writer: load the epoch     the buffer is empty, and flushed
//! ```

use std::{
    cell::UnsafeCell,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use anyhow::{Result, ensure};

use super::{Apart, Backoff};
use crate::{
    parameters::Job,
    workloads::append::{Appender, BUFFER, HEADER, Opened, Sink, header, record_bytes},
};

/// How many buffers alternate. Measured: with one, two and eight threads are a twentieth slower, and one thread a
/// tenth faster.
const BUFFERS: u64 = 2;

/// The value of `writing` of a thread that does not write.
const NONE: u64 = u64::MAX;

struct Buffer {
    /// Bytes taken, and bytes of failed attempts.
    tail: Apart<AtomicUsize>,
    bytes: UnsafeCell<Box<[u8]>>,
}

pub struct Bump {
    buffers: [Buffer; BUFFERS as usize],
    /// The number of the open buffer: threads write to the one of number `epoch % BUFFERS`.
    epoch: Apart<AtomicU64>,
    /// The number of flushed buffers.
    flushed: Apart<AtomicU64>,
    /// For each thread, the number of the buffer it writes to.
    writing: Box<[Apart<AtomicU64>]>,
    sink: Arc<dyn Sink>,
    record: usize,
}

// SAFETY: the owner of a buffer's bytes writes them, each byte by one thread in an epoch. The flusher reads them after
// it has waited for all writers by [take] and [wrote]; no thread writes again before [open].
unsafe impl Sync for Bump {}

impl Bump {
    fn flush(&self, buffer: &Buffer, bytes: usize) {
        if bytes > 0 {
            // SAFETY: only the thread that overflowed, or the one after all threads, calls this; it has waited for the
            // writers of these bytes.
            let all = unsafe { &*buffer.bytes.get() };
            self.sink.take(&all[..bytes], (bytes / self.record) as u64);
        }
    }

    /// Flushes the buffer of that epoch, full with `bytes`, and opens the next. The calling thread writes to none.
    #[cold]
    #[inline(never)]
    fn flush_and_open_next(&self, epoch: u64, bytes: usize) {
        // The next buffer must have been flushed.
        let mut backoff = Backoff::default();
        while self.flushed.0.load(Ordering::Acquire) + BUFFERS <= epoch + 1 {
            backoff.wait();
        }
        self.buffers[((epoch + 1) % BUFFERS) as usize].tail.0.store(0, Ordering::Relaxed);
        self.epoch.0.store(epoch + 1, Ordering::Release); // [open]
        let number = epoch % BUFFERS;
        for writing in &self.writing {
            let mut backoff = Backoff::default();
            while writing.0.load(Ordering::Acquire) == number {
                backoff.wait(); // [wrote]
            }
        }
        self.flush(&self.buffers[number as usize], bytes);
        self.flushed.0.store(epoch + 1, Ordering::Release);
    }
}

/// Opens it.
pub fn open(job: &Job, _count: u64, sink: Arc<dyn Sink>) -> Result<Opened<BumpAppender>> {
    let record = record_bytes(job.sizes.max as usize);
    ensure!(record <= BUFFER, "a record has {record} bytes, wanted at most {BUFFER}");
    let buffer = |_| Buffer { tail: Apart::default(), bytes: UnsafeCell::new(vec![1; BUFFER].into_boxed_slice()) };
    let bump = Arc::new(Bump {
        buffers: std::array::from_fn(buffer),
        epoch: Apart::default(),
        flushed: Apart::default(),
        writing: (0..job.threads).map(|_| Apart(AtomicU64::new(NONE))).collect(),
        sink,
        record,
    });
    let appender = |thread| BumpAppender { bump: bump.clone(), thread };
    let appenders = (0..job.threads as usize).map(appender).collect();
    let finish = move || {
        let buffer = &bump.buffers[(bump.epoch.0.load(Ordering::Acquire) % BUFFERS) as usize];
        bump.flush(buffer, buffer.tail.0.load(Ordering::Acquire));
        Ok(())
    };
    Ok(Opened { appenders, consumer: None, finish: Some(Box::new(finish)), read_back: None })
}

pub struct BumpAppender {
    bump: Arc<Bump>,
    thread: usize,
}

impl Appender for BumpAppender {
    #[inline(always)]
    fn append(&mut self, number: u32, payload: &[u8]) -> Result<()> {
        let need = record_bytes(payload.len());
        let writing = &self.bump.writing[self.thread].0;
        loop {
            let epoch = self.bump.epoch.0.load(Ordering::Acquire); // [open]
            let index = epoch % BUFFERS;
            let buffer = &self.bump.buffers[index as usize];
            writing.store(index, Ordering::Release);
            let at = buffer.tail.0.fetch_add(need, Ordering::AcqRel); // [take]
            if at + need <= BUFFER {
                // SAFETY: fetch_add has given these bytes to this thread alone, and they lie in the buffer.
                unsafe {
                    let record = (*buffer.bytes.get()).as_mut_ptr().add(at);
                    ptr::copy_nonoverlapping(payload.as_ptr(), record.add(HEADER), payload.len());
                    record.cast::<u64>().write_unaligned(header(number, payload.len()));
                }
                writing.store(NONE, Ordering::Release); // [wrote]
                return Ok(());
            }
            writing.store(NONE, Ordering::Release);
            if at <= BUFFER {
                self.bump.flush_and_open_next(epoch, at);
            } else {
                let mut backoff = Backoff::default();
                while self.bump.epoch.0.load(Ordering::Acquire) == epoch {
                    backoff.wait();
                }
            }
        }
    }
}
