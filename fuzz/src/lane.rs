//! The lane alone, in heap memory.

use crate::fixture::{Pages, bytes};
use crate::program::{Over, Program};
use pelton_lane::{
    Consumer, LaneError, Memory, Position, Producer, Record, Sleeper, TRACE_BYTES, Ticket, find_end, scan,
};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Both sides act by the program's first half. Its second half is stored into the words that the other side of each
/// may write: between their steps, or at the same time by another thread.
pub fn lane(program: &[u8]) {
    let mut program = Program(program);
    let (capacity, ways) = (program.of(&[4096, 4160, 8192, 65536]), program.byte());
    let (threads, is_traced) = (ways & 1 == 1, ways & 2 == 2);
    let seq = program.of(&[1, u32::MAX - 2, 1000]);
    let pages = Pages::new(capacity, Position { offset: 0, seq });
    let (work, lies) = program.split();
    let is_over = AtomicBool::new(false);
    let sides = Sides::new(&pages, is_traced);
    std::thread::scope(|scope| {
        let scribbler = threads.then(|| {
            scope.spawn(|| {
                // Without end, as long as the others work.
                while !is_over.load(Ordering::Relaxed) {
                    let mut again = Program(lies.0);
                    loop {
                        store_lie(&pages, &mut again);
                        if again.is_over() || is_over.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                }
            })
        });
        let over = Over(&is_over);
        sides.work(work, if threads { Program(&[]) } else { Program(lies.0) });
        drop(over);
        // The scope waits for the closure only; this waits for the thread's exit. Before that, its heap memory is a
        // leak to LeakSanitizer.
        scribbler.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// Stores one word.
fn store_lie(pages: &Pages, lies: &mut Program) {
    let words = pages.memory.data.capacity() as usize / 8;
    let Memory { producer, consumer, receiver, .. } = pages.memory;
    // SAFETY: the page outlives this function's use of it.
    let head = unsafe { consumer.as_ref() }.head();
    let at = match lies.byte() % 6 {
        0 => producer.as_ptr().cast::<u64>().wrapping_add(lies.of(&[16, 17, 18, 19, 25, 32, 33, 48, 49])),
        1 => consumer.as_ptr().cast::<u64>().wrapping_add(lies.of(&[16, 17, 22, 32, 33])),
        2 => receiver.as_ptr().cast::<u64>().wrapping_add(16),
        // A message of another length at the next record.
        3 if lies.byte() % 2 == 0 && head.offset + 8 <= pages.memory.data.capacity() => {
            let length = lies.below(2100) as u64;
            // SAFETY: an aligned word of the pages, which outlive this; other users access it atomically.
            let word = unsafe { AtomicU64::from_ptr(pages.word(head.offset).as_ptr()) };
            return word.store(u64::from(head.seq) << 32 | length, Ordering::Release);
        }
        // Anywhere, and mostly near records.
        3 => pages.word(8 * lies.below(words) as u64).as_ptr(),
        _ => pages.word(8 * lies.below(64) as u64).as_ptr(),
    };
    // SAFETY: an aligned word of the pages, which outlive this; other users access it atomically, except for payloads,
    // of which any value is valid.
    let word = unsafe { AtomicU64::from_ptr(at) };
    word.store(lies.lie(word.load(Ordering::Relaxed)), Ordering::Release);
}

struct Sides<'a> {
    pages: &'a Pages,
    /// Whether a message may have a traceparent.
    is_traced: bool,
    /// `None`: the lane has failed and must not be used further.
    producer: Option<Producer>,
    consumer: Option<Consumer>,
    sleeper: Sleeper,
    held: Vec<(Ticket, Record)>,
}

impl Sides<'_> {
    fn new(pages: &Pages, is_traced: bool) -> Sides<'_> {
        let (mut producer, consumer) = pages.attach();
        if is_traced {
            producer.permit_traced();
        }
        // SAFETY: the page outlives this value, which is its only writer that follows the protocol.
        let sleeper = unsafe { Sleeper::of_receiver(pages.memory.receiver, true) };
        Sides { pages, is_traced, producer: Some(producer), consumer: Some(consumer), sleeper, held: Vec::new() }
    }

    fn work(mut self, mut work: Program, mut lies: Program) {
        while !work.is_over() {
            let step = work.byte();
            if step & 1 == 1 && !lies.is_over() {
                store_lie(self.pages, &mut lies);
            }
            let bytes = work.of(&[0, 1, 8, 24, 100, 500, 1000, 2016]);
            let done = match step >> 1 & 1 {
                0 => self.produce(step >> 2, bytes),
                _ => self.consume(step >> 2),
            };
            if let Err(error) = done {
                // A side that has found a lie is not used again; a new one may take its place.
                assert!(
                    matches!(error, LaneError::Corrupt { .. } | LaneError::Closed | LaneError::TooLarge { .. }),
                    "{error}"
                );
                match step >> 1 & 1 {
                    0 => self.producer = None,
                    _ => self.consumer = None,
                }
            }
        }
    }

    fn produce(&mut self, step: u8, bytes: u64) -> Result<(), LaneError> {
        let memory = self.pages.memory;
        let Some(producer) = &mut self.producer else {
            // SAFETY: the pages outlive both, and the previous producer is gone.
            let (page, consumer) = unsafe { (memory.producer.as_ref(), memory.consumer.as_ref()) };
            let (stored, floor) = page.tail_and_floor();
            let (tail, _) = find_end(&memory.data, page.message_bytes_max, stored)?;
            page.start_generation(1);
            // SAFETY: the pages outlive both, and the previous producer is gone.
            let mut producer = unsafe { Producer::attach(memory, tail, consumer.head(), floor, true)? };
            if self.is_traced {
                producer.permit_traced();
            }
            self.producer = Some(producer);
            return Ok(());
        };
        match step % 6 {
            0 | 1 => {
                let bytes = bytes.min(producer.message_bytes_max());
                let space = match self.is_traced && step & 32 == 32 {
                    true => producer.try_reserve_traced(bytes, &[step; TRACE_BYTES])?,
                    false => producer.try_reserve(bytes)?,
                };
                if let Some(space) = space {
                    producer.copy_in(space, &vec![step; space.bytes as usize]);
                    let _ = producer.commit(space, space.bytes);
                }
            }
            2 => {
                if let Some(space) = producer.try_reserve_with_descriptors(bytes / 2, 3)? {
                    let _ = producer.commit(space, space.bytes / 2);
                }
            }
            3 => {
                if let Some(mut batch) = producer.try_begin_batch(3 * 32)? {
                    for _ in 0..4 {
                        let space = producer.batch_message(&mut batch, 20);
                        space.into_iter().for_each(|space| producer.copy_in(space, &[step; 20]));
                    }
                    let _ = producer.commit_batch(batch);
                }
            }
            4 => {
                producer.arm((step & 32 == 0).then_some(bytes), || ())?;
                producer.disarm();
            }
            _ => {
                producer.refresh_head()?;
                for (offset, bytes) in producer.idle() {
                    assert!(offset + bytes <= producer.capacity(), "idle space lies in the data");
                }
                producer.continue_without_consumer();
            }
        }
        Ok(())
    }

    fn consume(&mut self, step: u8) -> Result<(), LaneError> {
        let memory = self.pages.memory;
        let Some(consumer) = &mut self.consumer else {
            self.held.clear();
            // SAFETY: the pages outlive both, and the previous consumer is gone.
            let page = unsafe { memory.consumer.as_ref() };
            // SAFETY: the pages outlive both, and the previous consumer is gone. The limit is the agreed one, whatever
            // the page says now.
            let consumer =
                unsafe { Consumer::attach(memory, pelton_lane::message_bytes_limit(memory.data.capacity()), true)? };
            page.start_generation(1);
            self.consumer = Some(consumer);
            return Ok(());
        };
        let checked = |consumer: &Consumer, record: &Record| {
            assert!(record.bytes <= consumer.message_bytes_max());
            // Every byte of it is readable.
            let trace = consumer.trace_of(record.seq).into_iter().flatten();
            std::hint::black_box(
                bytes(consumer, record).iter().chain(trace).fold(0u8, |sum, &byte| sum.wrapping_add(byte)),
            );
        };
        match step % 6 {
            0 => {
                if let Some(record) = consumer.peek()? {
                    checked(consumer, &record);
                    let _ = consumer.release(&record);
                }
            }
            1 => {
                // As in a batch: the marks before it are `peek`'s.
                if let Some(record) = consumer.peek()? {
                    checked(consumer, &record);
                    consumer.take(&record);
                    let (mut cursor, mut bytes) = (consumer.cursor(), 0);
                    while let Some(record) = consumer.take_at(&mut cursor) {
                        checked(consumer, &record);
                        bytes += record.bytes;
                    }
                    consumer.take_to(cursor, bytes);
                    let _ = consumer.release_taken();
                }
            }
            2 => {
                if let Some(record) = consumer.peek()? {
                    self.held.push((consumer.hold(&record), record));
                }
            }
            3 => {
                for (ticket, record) in self.held.drain(..) {
                    checked(consumer, &record);
                    let _ = consumer.release_held(ticket);
                }
            }
            4 => {
                self.sleeper.arm(|| ());
                let _ =
                    (consumer.may_be_ready(), consumer.needs_timed_wait(&self.sleeper), consumer.has_producer_closed());
                self.sleeper.disarm();
            }
            _ => {
                consumer.end_of_committed()?;
                let found = scan(&memory.data, consumer.message_bytes_max(), consumer.head(), consumer.capacity() / 8);
                assert!(found.problem.is_some() || found.end.offset + 8 <= consumer.capacity());
            }
        }
        Ok(())
    }
}
