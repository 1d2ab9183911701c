//! Every word that the peer may write, in every state of the lane, with each bit flipped and set to the ends of all
//! ranges. Each side, and each side's successor, finds a message within its bounds, no message, or *corrupt*.

use crate::fixture::*;
use pelton_lane::*;

const CAPACITY: u64 = 4096;

/// A lane in one of `STATES`, and the records that its consumer holds.
struct Lane {
    pages: Pages,
    producer: Producer,
    consumer: Consumer,
    held: Vec<(Ticket, Record)>,
}

impl Lane {
    fn new(state: &str) -> Lane {
        let pages = Pages::new(
            CAPACITY,
            Position { offset: 0, seq: if state == "at the end of numbers" { u32::MAX - 1 } else { 1 } },
        );
        let (producer, consumer) = pages.attach();
        let mut lane = Lane { pages, producer, consumer, held: Vec::new() };
        match state {
            "empty" => {}
            "full" | "at the end of numbers" => lane.fill(),
            // The tail has wrapped and is before the head.
            "at the wrap" => {
                lane.fill();
                (0..3).for_each(|_| lane.receive());
                lane.fill();
            }
            // An early wrap whose consumer stopped: the tail has jumped past the lap's end.
            "jumped" => {
                lane.producer.set_window(1024);
                while lane.producer.tail().offset < 800 {
                    assert!(send(&mut lane.producer, &[0xee; 200]));
                    lane.receive();
                }
                lane.fill();
            }
            "marked" => {
                for _ in 0..3 {
                    let space = lane.producer.try_reserve_with_descriptors(100, 2).unwrap().unwrap();
                    lane.producer.copy_in(space, &[0xee; 100]);
                    let _ = lane.producer.commit(space, 100);
                }
            }
            "holding" => {
                lane.fill();
                for _ in 0..3 {
                    let record = lane.consumer.peek().unwrap().unwrap();
                    lane.held.push((lane.consumer.hold(&record), record));
                }
                let _ = lane.consumer.release_held(lane.held.remove(1).0);
            }
            other => panic!("no state {other}"),
        }
        lane
    }

    fn fill(&mut self) {
        while send(&mut self.producer, &[0xee; 200]) {}
    }

    fn receive(&mut self) {
        assert!(receive(&mut self.consumer).is_some());
    }

    /// Runs every operation of the consumer. Returns how many messages it found.
    fn consume(&mut self) -> Result<u64, LaneError> {
        self.consumer.end_of_committed()?;
        let mut found = 0;
        let start = self.pages.word(0).as_ptr().cast::<u8>().cast_const();
        // SAFETY: the result is one past the end of the data, at most.
        let end = unsafe { start.add(CAPACITY as usize) };
        let mut check = |consumer: &Consumer, record: &Record| {
            let payload = bytes(consumer, record);
            assert!(payload.len() as u64 <= message_bytes_limit(CAPACITY));
            assert!(payload.as_ptr() >= start && payload.as_ptr_range().end <= end, "the payload is inside the data");
            found += 1;
            assert!(found <= CAPACITY / 8, "an endless loop");
        };
        while let Some(record) = self.consumer.peek()? {
            check(&self.consumer, &record);
            let _ = self.consumer.release(&record);
            // And two more through a cursor.
            let (mut cursor, mut bytes) = (self.consumer.cursor(), 0);
            for _ in 0..2 {
                if let Some(record) = self.consumer.take_at(&mut cursor) {
                    check(&self.consumer, &record);
                    bytes += record.bytes;
                }
            }
            self.consumer.take_to(cursor, bytes);
            let _ = self.consumer.release_taken();
        }
        for (ticket, _) in self.held.drain(..) {
            let _ = self.consumer.release_held(ticket);
        }
        let _ = (self.consumer.has_producer_closed(), self.consumer.generation(), self.consumer.taken());
        Ok(found)
    }

    /// Runs every operation of the producer.
    fn produce(&mut self) -> Result<(), LaneError> {
        for bytes in [0, 24, 700, 2016] {
            if let Some(space) = self.producer.try_reserve(bytes)? {
                self.producer.copy_in(space, &vec![0xdd; bytes as usize]);
                let _ = self.producer.commit(space, bytes);
            }
            if let Some(mut batch) = self.producer.try_begin_batch(64)? {
                let space = self.producer.batch_message(&mut batch, 50).unwrap();
                self.producer.copy_in(space, &[0xdd; 50]);
                let _ = self.producer.commit_batch(batch);
            }
            self.producer.arm(Some(bytes), || ())?;
            self.producer.disarm();
        }
        for (offset, bytes) in self.producer.idle() {
            assert!(offset + bytes <= CAPACITY, "idle ranges are inside the data");
        }
        Ok(())
    }

    /// Attaches a successor of each side to its page.
    fn succeed(&self) -> Result<(), LaneError> {
        let memory = self.pages.memory;
        let limit = message_bytes_limit(CAPACITY);
        // SAFETY: the pages outlive this, and the test uses their predecessors no more.
        let (producer, consumer) = unsafe { (memory.producer.as_ref(), memory.consumer.as_ref()) };
        let found = scan(&memory.data, limit, consumer.head(), CAPACITY / 8 + 1);
        assert!(found.problem.is_some() || found.end.offset + 8 <= CAPACITY);
        let (stored, floor) = producer.tail_and_floor();
        let (tail, _) = find_end(&memory.data, limit, stored)?;
        producer.start_generation(3);
        // SAFETY: the pages outlive the successor, and the test uses its predecessor no more.
        let mut successor = unsafe { Producer::attach(memory, tail, consumer.head(), floor, true)? };
        if let Some(space) = successor.try_reserve(limit)? {
            let _ = successor.commit(space, limit);
        }
        // SAFETY: the pages outlive the successor, and the test uses its predecessor no more.
        let mut successor = unsafe { Consumer::attach(memory, limit, true)? };
        consumer.start_generation(4);
        while let Some(record) = successor.peek()? {
            let _ = successor.release(&record);
        }
        Ok(())
    }
}

const STATES: [&str; 7] = ["empty", "full", "at the wrap", "jumped", "marked", "holding", "at the end of numbers"];

/// The false values for a word.
fn lies(truth: u64) -> impl Iterator<Item = u64> {
    let ends = [0, 8, 1 << 28, 1 << 31, 1 << 32, 1 << 63, CAPACITY, CAPACITY / 8, CAPACITY / 64, 2016, u32::MAX.into()];
    let nearby = ends.into_iter().flat_map(|end| [end.wrapping_sub(1), end, end + 1]);
    // And the same in each half of the word.
    let halves =
        nearby.clone().flat_map(move |end| [truth >> 32 << 32 | end & 0xffff_ffff, end << 32 | truth & 0xffff_ffff]);
    (0..64).map(move |bit| truth ^ 1 << bit).chain(nearby).chain(halves).chain([u64::MAX])
}

/// Checks that the result is success, *corrupt* or *closed*.
#[track_caller]
fn check_allowed<T>(result: Result<T, LaneError>, what: &str) {
    match result {
        Ok(_) | Err(LaneError::Corrupt { .. } | LaneError::Closed) => {}
        Err(error) => panic!("{what}: {error}"),
    }
}

/// In each state sets each of `words` to each false value, then runs `victim` and the successors.
fn run_with_lies(words: impl Fn(&Lane) -> Vec<*mut u64>, victim: impl Fn(&mut Lane) -> Result<(), LaneError>) {
    for state in STATES {
        let count = words(&Lane::new(state)).len();
        for which in 0..count {
            let truth = {
                let lane = Lane::new(state);
                // SAFETY: the word is in the lane's memory, which only this thread uses.
                unsafe { *words(&lane)[which] }
            };
            for lie in lies(truth) {
                let mut lane = Lane::new(state);
                let word = words(&lane)[which];
                // SAFETY: the word is in the lane's memory, which only this thread uses.
                unsafe { *word = lie };
                let what = format!("{state}, word {which} is {lie:#x}, was {truth:#x}");
                check_allowed(victim(&mut lane), &what);
                check_allowed(lane.succeed(), &what);
            }
        }
    }
}

/// The headers of records, marks and jumps, and the cleared header after the last record.
fn headers(lane: &Lane) -> Vec<*mut u64> {
    let words = (0..CAPACITY / 8).map(|i| lane.pages.word(8 * i));
    let is_header = |word: u64| word as u8 != 0xee && word >> 56 != 0xee;
    let headers = words.filter(|word| is_header(word.get()) && word.get() != 0).map(|word| word.as_ptr());
    headers.chain([lane.pages.word(lane.producer.tail().offset).as_ptr()]).collect()
}

fn fields<Page>(page: std::ptr::NonNull<Page>, offsets: &[usize]) -> Vec<*mut u64> {
    offsets.iter().map(|at| page.as_ptr().cast::<u64>().wrapping_byte_add(*at)).collect()
}

#[test]
fn any_header_is_a_message_or_corrupt_to_the_consumer() {
    run_with_lies(headers, |lane| lane.consume().map(|_| ()));
}

#[test]
fn any_field_of_the_producers_page_changes_nothing_for_the_consumer() {
    let offsets = [128, 136, 144, 152, 160, 200, 256, 264, 384, 392];
    run_with_lies(
        |lane| fields(lane.pages.memory.producer, &offsets),
        |lane| {
            let committed = lane.consumer.end_of_committed().unwrap().1;
            assert_eq!(lane.consume(), Ok(committed), "no word of that page changes which messages are committed");
            Ok(())
        },
    );
}

#[test]
fn any_field_of_a_consumers_pages_keeps_the_producer_in_bounds() {
    let words = |lane: &Lane| {
        let mut words = fields(lane.pages.memory.consumer, &[128, 136, 144, 176, 256, 264]);
        words.extend(fields(lane.pages.memory.receiver, &[128]));
        words
    };
    run_with_lies(words, |lane| lane.produce());
}

#[test]
fn the_producer_never_reads_the_data() {
    for state in STATES {
        let (mut lane, mut scribbled) = (Lane::new(state), Lane::new(state));
        (0..CAPACITY / 8).for_each(|i| scribbled.pages.word(8 * i).set(0xdead_beef_dead_beef));
        assert_eq!(lane.produce(), scribbled.produce(), "{state}");
        assert_eq!(lane.producer.tail(), scribbled.producer.tail(), "{state}");
    }
}
