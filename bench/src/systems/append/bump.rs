//! One buffer for all threads, in which each takes space by fetch_add.
//!
//! Whoever overflows it opens the other buffer, waits for those who still write to the full one, and flushes that. To be waited for costs
//! a writer two stores to a cache line of its own, no second read-modify-write instruction: it says which buffer it is about to write
//! to, and afterwards that it writes to none.
//!
//! ```text
//! [take]   writer: store `writing`, fetch_add the tail  ->  who overflows: fetch_add the tail, load `writing`
//!          whose space was taken before is seen to write
//! [wrote]  writer: store `writing` none  ->  who overflows: load it       the records are visible
//! [open]   who overflows: reset a tail, store the epoch  ->  writer: load the epoch     the buffer is empty, and flushed
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

use super::{Apart, AppendSystem, Appender, BUFFER, HEADER, Opened, Patience, Sink, header, record_bytes};
use crate::parameters::Job;

/// How many buffers take turns. Measured: with one, two and eight threads are a twentieth slower, and one thread a tenth faster.
const BUFFERS: u64 = 2;

/// What `writing` says of who does not.
const NONE: u64 = u64::MAX;

struct Buffer {
    /// Bytes taken, and wanted in vain.
    tail: Apart<AtomicUsize>,
    bytes: UnsafeCell<Box<[u8]>>,
}

/// What all threads share.
pub struct Bump {
    buffers: [Buffer; BUFFERS as usize],
    /// Counts the buffers opened: the one of number `epoch % BUFFERS` is written to.
    epoch: Apart<AtomicU64>,
    /// How many have been flushed.
    flushed: Apart<AtomicU64>,
    /// For each thread, the number of the buffer it writes to.
    writing: Box<[Apart<AtomicU64>]>,
    sink: Arc<dyn Sink>,
    record: usize,
}

// SAFETY: a buffer's bytes are written by whoever took them, each byte by one thread in an epoch, and read by the one who flushes, who has
// waited for all writers by [take] and [wrote]; nobody writes again before [open].
unsafe impl Sync for Bump {}

impl Bump {
    fn flush(&self, buffer: &Buffer, bytes: usize) {
        if bytes > 0 {
            // SAFETY: only who overflowed, or who comes after all threads, is here, and has waited for the writers of these bytes.
            let all = unsafe { &*buffer.bytes.get() };
            self.sink.take(&all[..bytes], (bytes / self.record) as u64);
        }
    }

    /// The buffer of that epoch is full with `bytes`, by the calling thread, which writes to none.
    #[cold]
    #[inline(never)]
    fn turn(&self, epoch: u64, bytes: usize) {
        // The next buffer must have been flushed.
        let mut patience = Patience::default();
        while self.flushed.0.load(Ordering::Acquire) + BUFFERS <= epoch + 1 {
            patience.wait();
        }
        self.buffers[((epoch + 1) % BUFFERS) as usize].tail.0.store(0, Ordering::Relaxed);
        self.epoch.0.store(epoch + 1, Ordering::Release); // [open]
        let number = epoch % BUFFERS;
        for writing in &self.writing {
            let mut patience = Patience::default();
            while writing.0.load(Ordering::Acquire) == number {
                patience.wait(); // [wrote]
            }
        }
        self.flush(&self.buffers[number as usize], bytes);
        self.flushed.0.store(epoch + 1, Ordering::Release);
    }
}

impl AppendSystem for Bump {
    type Appender = BumpAppender;

    fn open(job: &Job, _count: u64, sink: Arc<dyn Sink>) -> Result<Opened<BumpAppender>> {
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
}

/// One thread's.
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
                self.bump.turn(epoch, at);
            } else {
                let mut patience = Patience::default();
                while self.bump.epoch.0.load(Ordering::Acquire) == epoch {
                    patience.wait();
                }
            }
        }
    }
}
