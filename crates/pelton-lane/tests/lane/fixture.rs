//! A lane's memory on the heap, for one test.

use pelton_lane::*;
use std::ptr::NonNull;

/// Owns the pages and the data. A lane attached to them must not outlive it.
pub struct Pages {
    pub memory: Memory,
    words: *mut [CacheLine],
}

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct CacheLine([u64; 8]);

// SAFETY: plain memory; the tests give each side to one thread.
unsafe impl Send for Pages {}
// SAFETY: plain memory; the tests give each side to one thread.
unsafe impl Sync for Pages {}

impl Pages {
    pub fn new(capacity: u64, start: Position) -> Pages {
        Pages::with_limit(capacity, message_bytes_limit(capacity), start)
    }

    pub fn with_limit(capacity: u64, bytes_max: u64, start: Position) -> Pages {
        assert!(capacity_is_valid(capacity));
        let words = Box::into_raw(vec![CacheLine([0; 8]); capacity as usize / 64].into_boxed_slice());
        let memory = Memory {
            producer: NonNull::from(Box::leak(Box::new(ProducerPage::new(capacity, bytes_max, 1, 1)))),
            consumer: NonNull::from(Box::leak(Box::new(ConsumerPage::new(start, 1, 2)))),
            receiver: NonNull::from(Box::leak(Box::new(ReceiverPage::new()))),
            // SAFETY: the box has `capacity` bytes, aligned to 64; the drop below frees it.
            data: unsafe { Data::new(NonNull::new(words.cast()).unwrap(), capacity) },
        };
        Pages { memory, words }
    }

    pub fn attach(&self) -> (Producer, Consumer) {
        self.attach_with(true, true)
    }

    pub fn attach_with(&self, producer_barrier: bool, consumer_barrier: bool) -> (Producer, Consumer) {
        // SAFETY: the memory lives as long as `self`; the tests have at most one of each side at a time.
        unsafe {
            let start = self.memory.consumer.as_ref().head();
            let max = self.memory.producer.as_ref().message_bytes_max;
            let producer = Producer::attach(self.memory, start, start, 0, producer_barrier).unwrap();
            (producer, Consumer::attach(self.memory, max, consumer_barrier).unwrap())
        }
    }

    /// A word of the data, for tests that act as a hostile peer.
    pub fn word(&self, offset: u64) -> &std::cell::Cell<u64> {
        // SAFETY: the slice checks the bounds; these tests have one thread.
        unsafe {
            let chunk = &raw mut (*self.words)[offset as usize / 64];
            &*(&raw mut (*chunk).0[offset as usize % 64 / 8]).cast()
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: `with_limit` made each pointer from a box; only this frees them, once.
        unsafe {
            drop(Box::from_raw(self.memory.producer.as_ptr()));
            drop(Box::from_raw(self.memory.consumer.as_ptr()));
            drop(Box::from_raw(self.memory.receiver.as_ptr()));
            drop(Box::from_raw(self.words));
        }
    }
}

pub fn send(producer: &mut Producer, payload: &[u8]) -> bool {
    match producer.try_reserve(payload.len() as u64).unwrap() {
        Some(space) => {
            producer.copy_in(space, payload);
            let _ = producer.commit(space, payload.len() as u64);
            true
        }
        None => false,
    }
}

pub fn bytes<'a>(consumer: &Consumer, record: &Record) -> &'a [u8] {
    // SAFETY: the tests do not use the slice after the record's release.
    unsafe { std::slice::from_raw_parts(consumer.payload(record).as_ptr(), record.bytes as usize) }
}

pub fn receive(consumer: &mut Consumer) -> Option<Vec<u8>> {
    let record = consumer.peek().unwrap()?;
    let payload = bytes(consumer, &record).to_vec();
    let _ = consumer.release(&record);
    Some(payload)
}

/// A payload that depends on its number, its length and each byte's index.
pub fn payload(number: u64, len: usize) -> Vec<u8> {
    (0..len).map(|i| (number.wrapping_mul(0x9e3779b97f4a7c15) >> 32) as u8 ^ i as u8 ^ len as u8).collect()
}
