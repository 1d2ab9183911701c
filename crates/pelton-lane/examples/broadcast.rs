//! Measures a broadcast lane between threads, beside a plain lane: the messages that the sender commits in a second.
//!
//!     cargo run --release -p pelton-lane --example broadcast -- [RECEIVERS] [BYTES] [gate|lag]
//!
//! All sides busy-poll, so more threads than processors measure the scheduler. With 0 receivers, or with `lag`, the
//! sender's own cost shows: nobody holds it up.

use pelton_lane::*;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

const CAPACITY: u64 = 64 << 20;

/// The data of a lane: zero, aligned to a page, and freed at the end of a round.
struct Zeroed(NonNull<u8>);

const LAYOUT: std::alloc::Layout = std::alloc::Layout::new::<Lines>();

#[repr(align(4096))]
struct Lines(#[expect(dead_code, reason = "only its size counts")] [u8; CAPACITY as usize]);

impl Zeroed {
    fn new() -> Zeroed {
        // SAFETY: the size is not 0.
        Zeroed(NonNull::new(unsafe { std::alloc::alloc_zeroed(LAYOUT) }).unwrap())
    }

    fn data(&self) -> Data {
        // SAFETY: each round drops this after both sides of its lane.
        unsafe { Data::new(self.0, CAPACITY) }
    }
}

impl Drop for Zeroed {
    fn drop(&mut self) {
        // SAFETY: `new` has allocated it with this layout.
        unsafe { std::alloc::dealloc(self.0.as_ptr(), LAYOUT) };
    }
}

fn page<T>(page: T) -> NonNull<T> {
    NonNull::from(Box::leak(Box::new(page)))
}

fn wait(tries: &mut u32) {
    *tries += 1;
    if tries.is_multiple_of(100) { std::thread::yield_now() } else { std::hint::spin_loop() }
}

fn plain(messages: u64, payload: &[u8]) -> Duration {
    let bytes_max = message_bytes_limit(CAPACITY);
    let zeroed = Zeroed::new();
    let memory = Memory {
        producer: page(ProducerPage::new(CAPACITY, bytes_max, 1, 1)),
        consumer: page(ConsumerPage::new(Position::START, 1, 1)),
        receiver: page(ReceiverPage::new()),
        data: zeroed.data(),
    };
    // SAFETY: the pages live as long as the program, and the lane has one of each side.
    let (mut producer, mut consumer) = unsafe {
        let start = Position::START;
        (Producer::attach(memory, start, start, 0, true).unwrap(), Consumer::attach(memory, bytes_max, true).unwrap())
    };
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (mut tries, mut buffer) = (0, vec![0; payload.len()]);
            for _ in 0..messages {
                let record = loop {
                    match consumer.peek().unwrap() {
                        Some(record) => break record,
                        None => wait(&mut tries),
                    }
                };
                // SAFETY: each message has as many bytes as the buffer.
                unsafe { consumer.copy_out(&record, buffer.as_mut_ptr()) };
                std::hint::black_box(&buffer);
                let _ = consumer.release(&record);
            }
        });
        let (start, mut tries) = (Instant::now(), 0);
        for _ in 0..messages {
            let space = loop {
                match producer.try_reserve(payload.len() as u64).unwrap() {
                    Some(space) => break space,
                    None => wait(&mut tries),
                }
            };
            producer.copy_in(space, payload);
            let _ = producer.commit(space, payload.len() as u64);
        }
        start.elapsed()
    })
}

fn broadcast(messages: u64, payload: &[u8], receivers: usize, policy: Policy) -> (Duration, u64) {
    let bytes_max = message_bytes_limit(CAPACITY);
    let zeroed = Zeroed::new();
    let memory = BroadcastMemory { producer: page(BroadcastPage::new(CAPACITY, bytes_max, 1, 1)), data: zeroed.data() };
    // SAFETY: the pages live as long as the program, and the lane has one producer.
    let mut producer = unsafe { BroadcastProducer::attach(memory, 1, true) };
    let consumers: Vec<_> = (0..receivers)
        .map(|_| {
            let own = page(CursorPage::new(policy, 1));
            // SAFETY: the pages live as long as the program, and each cursor has one consumer.
            unsafe {
                let joined = producer.join(own, policy, StartFrom::Now).expect("at most 64 receivers");
                BroadcastConsumer::attach(memory, own, policy, joined, bytes_max, true).unwrap()
            }
        })
        .collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = consumers
            .into_iter()
            .map(|mut consumer| {
                scope.spawn(move || {
                    let (mut tries, mut buffer) = (0, vec![0; payload.len()]);
                    while consumer.number() <= messages {
                        if policy.reads_in_place() {
                            let Some(record) = consumer.peek().unwrap() else {
                                wait(&mut tries);
                                continue;
                            };
                            let bytes = consumer.payload(&record);
                            // SAFETY: each message has as many bytes as the buffer, which is not in the lane.
                            unsafe { buffer.as_mut_ptr().copy_from_nonoverlapping(bytes.as_ptr(), payload.len()) };
                            consumer.take(&record);
                        } else if consumer.copy(&mut buffer).unwrap().is_none() {
                            wait(&mut tries);
                            continue;
                        }
                        std::hint::black_box(&buffer);
                        let _ = consumer.release();
                    }
                    consumer.store_counters();
                    consumer.cursor_page().missed()
                })
            })
            .collect();
        let (start, mut tries) = (Instant::now(), 0);
        for _ in 0..messages {
            let space = loop {
                match producer.try_reserve(payload.len() as u64).unwrap() {
                    Some(space) => break space,
                    None => wait(&mut tries),
                }
            };
            producer.copy_in(space, payload);
            let _ = producer.commit(space, payload.len() as u64);
        }
        let elapsed = start.elapsed();
        (elapsed, threads.into_iter().map(|thread| thread.join().unwrap()).sum())
    })
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize, default| arguments.get(index).map_or(default, |text| text.parse().unwrap());
    let (receivers, bytes) = (number(0, 1), number(1, 256));
    let policy = match arguments.get(2).map(String::as_str) {
        None | Some("gate") => Policy::Gate,
        Some("lag") => Policy::Lag { slack: BroadcastProducer::SLACK },
        Some(other) => panic!("the policy is `gate` or `lag`, found `{other}`"),
    };
    let payload = vec![7; bytes];
    let messages = (2_000_000_000 / (bytes as u64 + 100)).min(5_000_000);
    let rate = |elapsed: Duration| messages as f64 / elapsed.as_secs_f64() / 1e6;
    let (mut plains, mut broadcasts) = (Vec::new(), Vec::new());
    for round in 1..=7 {
        let (plain, (broadcast, missed)) =
            (plain(messages, &payload), broadcast(messages, &payload, receivers, policy));
        println!(
            "round {round}: plain {:.2} M/s, broadcast to {receivers} {:.2} M/s, missed {missed}",
            rate(plain),
            rate(broadcast)
        );
        plains.push(rate(plain));
        broadcasts.push(rate(broadcast));
    }
    let median = |rates: &mut Vec<f64>| {
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    };
    let (plain, broadcast) = (median(&mut plains), median(&mut broadcasts));
    println!("median: plain {plain:.2} M/s, broadcast {broadcast:.2} M/s, ratio {:.2}", broadcast / plain);
}
