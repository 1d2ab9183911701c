//! Replays `spec/vectors/images.json` and `steps.json`, as every implementation does. Their README defines them.

use crate::fixture::*;
use pelton_lane::*;
use serde_json::Value;
use std::collections::HashMap;
use std::ptr::NonNull;

pub fn vectors(file: &str) -> Value {
    let path = format!("{}/../../spec/vectors/{file}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// A word written as hexadecimal text, or a number.
pub fn number(value: &Value) -> u64 {
    match value {
        Value::String(text) => u64::from_str_radix(text.strip_prefix("0x").expect("0x"), 16).unwrap(),
        value => value.as_u64().unwrap_or_else(|| panic!("{value} is no number")),
    }
}

pub fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], |list| list)
}

pub fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("")
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

fn corrupt_what(error: LaneError) -> &'static str {
    match error {
        LaneError::Corrupt { what, .. } => what,
        other => panic!("{other}"),
    }
}

#[test]
fn every_image_of_memory_is_read_as_the_vectors_say() {
    for image in list(&vectors("images.json")["images"]) {
        let name = text(&image["name"]);
        let head = Position::unpack(number(&image["head"]));
        let limit = number(&image["message_bytes_max"]);
        let pages = Pages::with_limit(number(&image["capacity"]), limit, head);
        for word in list(&image["words"]) {
            pages.word(number(&word[0])).set(number(&word[1]));
        }
        for run in list(&image["bytes"]) {
            for (i, byte) in unhex(text(&run[1])).into_iter().enumerate() {
                let offset = number(&run[0]) + i as u64;
                let word = pages.word(offset / 8 * 8);
                let shift = offset % 8 * 8;
                word.set(word.get() & !(0xff << shift) | u64::from(byte) << shift);
            }
        }
        let wanted = image["then"]["corrupt"].as_str();
        // SAFETY: the memory lives as long as `pages`; no producer and no other consumer is attached.
        let mut consumer = match unsafe { Consumer::attach(pages.memory, limit, true) } {
            Ok(consumer) => consumer,
            Err(error) => {
                assert_eq!(Some(corrupt_what(error)), wanted, "{name}");
                continue;
            }
        };
        match consumer.end_of_committed() {
            Ok((end, messages)) => {
                assert_eq!(end.pack(), number(&image["end"]), "{name}");
                assert_eq!(messages, list(&image["messages"]).len() as u64, "{name}");
            }
            Err(error) => assert_eq!(Some(corrupt_what(error)), wanted, "{name}"),
        }
        for message in list(&image["messages"]) {
            let record = consumer.peek().unwrap().unwrap_or_else(|| panic!("{name}: no {message}"));
            assert_eq!(u64::from(record.seq), number(&message["seq"]), "{name}");
            assert_eq!(record.bytes, number(&message["length"]), "{name}");
            assert_eq!(u64::from(record.descriptors), number(&message["descriptors"]), "{name}");
            assert_eq!(u64::from(consumer.generation()), number(&message["generation"]), "{name}");
            if let Some(payload) = message["payload"].as_str() {
                assert_eq!(bytes(&consumer, &record), unhex(payload), "{name}");
            }
            let trace = message["trace"].as_str().map(unhex);
            assert_eq!(consumer.trace_of(record.seq).map(|trace| trace.to_vec()), trace, "{name}");
            let _ = consumer.release(&record);
        }
        match consumer.peek() {
            Ok(found) => assert_eq!((found, text(&image["then"])), (None, "empty"), "{name}"),
            Err(error) => assert_eq!(Some(corrupt_what(error)), wanted, "{name}"),
        }
    }
}

#[test]
fn every_list_of_steps_has_the_results_that_the_vectors_say() {
    for steps in list(&vectors("steps.json")["lists"]) {
        run(steps);
    }
}

/// The lane that a list of steps operates on.
struct Lane<'a> {
    pages: &'a Pages,
    producer: Producer,
    consumer: Consumer,
    sleeper: Sleeper,
    memory: Memory,
    barrier: [bool; 2],
    held: HashMap<String, Ticket>,
    space: Option<ReservedSpace>,
}

fn run(steps: &Value) {
    let name = text(&steps["name"]);
    let window = steps["window"].as_u64();
    assert!(window.is_none_or(|window| window == WINDOW), "{name} assumes another window than {WINDOW}");
    let pages = Pages::new(number(&steps["capacity"]), Position::unpack(number(&steps["start"])));
    let barrier = ["producer", "receiver"].map(|side| steps["can_barrier"][side].as_bool().unwrap_or(true));
    let (producer, consumer) = pages.attach_with(barrier[0], barrier[1]);
    // SAFETY: the page lives as long as `pages`, and nothing else writes it.
    let sleeper = unsafe { Sleeper::of_receiver(pages.memory.receiver, barrier[1]) };
    let memory = pages.memory;
    let mut lane =
        Lane { pages: &pages, producer, consumer, sleeper, memory, barrier, held: HashMap::new(), space: None };
    for (number, step) in list(&steps["steps"]).iter().enumerate() {
        let context = format!("{name}, step {number}: {step}");
        for i in 0..step["times"].as_u64().unwrap_or(1) {
            lane.step(step, i, &context);
        }
    }
    // A test may leak the successors' pages. `pages` frees the first ones.
}

impl Lane<'_> {
    fn step(&mut self, step: &Value, i: u64, context: &str) {
        let bytes = step["bytes"].as_u64();
        let wanted = text(&step["is"]);
        let mut ring = None;
        match text(&step["do"]) {
            "send" => {
                let bytes = bytes.unwrap();
                let descriptors = step["descriptors"].as_u64().unwrap_or(0) as u32;
                let reserved = self.producer.try_reserve_with_descriptors(bytes, descriptors);
                let found = self.result_of(&reserved, step, context);
                if let Ok(Some(space)) = reserved {
                    assert!(wanted.starts_with("sent"), "{context}");
                    ring = Some(self.commit(space, bytes));
                } else {
                    assert!(wanted.ends_with(found), "{context}: {found}");
                }
            }
            "reserve" => {
                let reserved = self.producer.try_reserve(bytes.unwrap());
                let found = self.result_of(&reserved, step, context);
                assert_eq!(found.replace("sent", "reserved"), wanted, "{context}");
                self.space = reserved.unwrap();
            }
            "commit" => {
                let space = self.space.take().expect("reserved");
                ring = Some(self.commit(space, bytes.unwrap()));
            }
            "abort" => self.space = None,
            "batch" => ring = self.batch(step, context),
            "receive" => ring = self.receive(step, i, context),
            "take" => {
                let record = self.expect_record(step, i, context);
                self.consumer.take(&record);
            }
            "release taken" => ring = Some(self.consumer.release_taken()),
            "hold" => {
                let record = self.expect_record(step, i, context);
                self.held.insert(text(&step["as"]).to_owned(), self.consumer.hold(&record));
            }
            "release" => ring = Some(self.consumer.release_held(self.held.remove(text(&step["of"])).expect("held"))),
            "arm receiver" => self.sleeper.arm(|| ()),
            "disarm receiver" => self.sleeper.disarm(),
            "arm producer" => {
                let sleep = self.producer.arm(bytes, || ()).unwrap();
                assert_eq!(if sleep { "sleep" } else { "awake" }, wanted, "{context}");
            }
            "lose barrier" if step["side"] == "receiver" => self.sleeper.request_fencing(),
            "lose barrier" => self.producer.request_fencing(),
            "nap" => {
                let needs_timed_wait = match text(&step["side"]) {
                    "receiver" => self.consumer.needs_timed_wait(&self.sleeper),
                    _ => self.producer.needs_timed_wait(),
                };
                assert_eq!(Some(needs_timed_wait), step["is"].as_bool(), "{context}");
            }
            "close producer" => self.producer.close(),
            "close consumer" => {
                self.consumer.close();
                self.sleeper.close();
            }
            "successor" => self.replace_producer(number(&step["tail"]), context),
            "consumer successor" => self.replace_consumer(number(&step["head"]), context),
            "words" => {
                for word in list(&step["are"]) {
                    let found = self.word(text(&step["of"]), number(&word[0]), text(&word[1]).len());
                    assert_eq!(format!("{found:#x}"), format!("{:#x}", number(&word[1])), "{context}: {}", word[0]);
                }
            }
            "poke" => {
                for word in list(&step["words"]) {
                    let address = self.address(text(&step["of"]), number(&word[0]));
                    // SAFETY: `address` is an aligned word in the memory of this test, which has one thread.
                    unsafe { address.write_volatile(number(&word[1])) };
                }
            }
            other => panic!("{context}: no step {other:?}"),
        }
        if let Some(rings) = step["ring"].as_bool() {
            assert_eq!(ring.expect("a step that may ring") == Wake::Ring, rings, "{context}");
        }
    }

    /// The result of a reservation in the vectors' words. If it is *corrupt*, the step must name the same word.
    fn result_of(
        &self,
        reserved: &Result<Option<ReservedSpace>, LaneError>,
        step: &Value,
        context: &str,
    ) -> &'static str {
        match reserved {
            Ok(Some(_)) => "sent",
            Ok(None) => "full",
            Err(LaneError::TooLarge { .. }) => "too large",
            Err(LaneError::Closed) => "closed",
            Err(error) => {
                assert_eq!(corrupt_what(*error), text(&step["what"]), "{context}");
                "corrupt"
            }
        }
    }

    fn commit(&mut self, space: ReservedSpace, bytes: u64) -> Wake {
        let message = payload(self.producer.tail().seq.into(), bytes as usize);
        self.producer.copy_in(space, &message);
        self.producer.commit(space, bytes)
    }

    fn batch(&mut self, step: &Value, context: &str) -> Option<Wake> {
        let records = list(&step["room"]).iter().map(|bytes| record_bytes(number(bytes))).sum();
        let (found, batch) = match self.producer.try_begin_batch(records) {
            Ok(Some(batch)) => ("sent", Some(batch)),
            Ok(None) => ("full", None),
            Err(LaneError::TooLarge { .. }) => ("too large", None),
            Err(error) => panic!("{context}: {error}"),
        };
        let mut seq = self.producer.tail().seq;
        let batch = batch.map(|mut batch| {
            for bytes in list(&step["bytes"]) {
                let space = self.producer.batch_message(&mut batch, number(bytes)).expect("room");
                self.producer.copy_in(space, &payload(seq.into(), number(bytes) as usize));
                assert_eq!(self.consumer.peek_fast().filter(|record| record.seq == seq), None, "{context}");
                seq = seq.checked_add(1).unwrap_or(1);
            }
            batch
        });
        if text(&step["is"]) == "aborted" {
            return None;
        }
        assert_eq!(found, text(&step["is"]), "{context}");
        batch.map(|batch| self.producer.commit_batch(batch))
    }

    fn receive(&mut self, step: &Value, i: u64, context: &str) -> Option<Wake> {
        match text(&step["is"]) {
            "" => {
                let record = self.expect_record(step, i, context);
                return Some(self.consumer.release(&record));
            }
            "empty" => assert_eq!(self.consumer.peek(), Ok(None), "{context}"),
            "closed" => {
                assert_eq!(self.consumer.peek(), Ok(None), "{context}");
                assert!(self.consumer.has_producer_closed(), "{context}");
                assert_eq!(self.consumer.peek(), Ok(None), "{context}");
            }
            other => panic!("{context}: {other}"),
        }
        None
    }

    /// The next message. It must match the step's description, with the number `i` higher.
    fn expect_record(&mut self, step: &Value, i: u64, context: &str) -> Record {
        let record = self.consumer.peek().unwrap().unwrap_or_else(|| panic!("{context}: empty"));
        let first = number(&step["seq"]) as u32;
        let seq = (0..i).fold(first, |seq, _| seq.checked_add(1).unwrap_or(1));
        assert_eq!((record.seq, record.bytes), (seq, number(&step["bytes"])), "{context}");
        assert!(bytes(&self.consumer, &record) == payload(seq.into(), record.bytes as usize), "{context}: payload");
        if let Some(descriptors) = step["descriptors"].as_u64() {
            assert_eq!(u64::from(record.descriptors), descriptors, "{context}");
        }
        if let Some(generation) = step["generation"].as_u64() {
            assert_eq!(u64::from(self.consumer.generation()), generation, "{context}");
        }
        record
    }

    /// Replaces the producer as after its death, and after the successor's handshake with the consumer.
    fn replace_producer(&mut self, wanted: u64, context: &str) {
        let (tail, _) = self.consumer.end_of_committed().unwrap();
        assert_eq!(tail.pack(), wanted, "{context}");
        let dead = self.consumer.producer_page();
        let (floor, generation) = (dead.tail_and_floor().1, dead.generation() + 1);
        let page = ProducerPage::new(self.producer.capacity(), self.producer.message_bytes_max(), generation, 1);
        self.memory.producer = NonNull::from(Box::leak(Box::new(page)));
        // SAFETY: the new page is never freed, and this drops the dead producer.
        unsafe {
            let head = self.consumer.head();
            self.producer = Producer::attach(self.memory, tail, head, floor, self.barrier[0]).unwrap();
            self.consumer.attach_producer(self.memory.producer, self.barrier[1]);
        }
    }

    /// Replaces the consumer as after its death, and after the successor's handshake with the producer.
    fn replace_consumer(&mut self, wanted: u64, context: &str) {
        self.producer.refresh_head().unwrap();
        let head = self.producer.head();
        assert_eq!(head.pack(), wanted, "{context}");
        self.memory.consumer = NonNull::from(Box::leak(Box::new(ConsumerPage::new(head, 1, 2))));
        self.memory.receiver = NonNull::from(Box::leak(Box::new(ReceiverPage::new())));
        let limit = self.producer.message_bytes_max();
        // SAFETY: the new pages are never freed, and this drops the dead consumer.
        unsafe {
            self.consumer = Consumer::attach(self.memory, limit, self.barrier[1]).unwrap();
            self.sleeper = Sleeper::of_receiver(self.memory.receiver, self.barrier[1]);
            self.producer.attach_consumer(self.memory.consumer, self.memory.receiver, self.barrier[0]).unwrap();
        }
    }

    /// The address of a word of the segment `of`.
    fn address(&self, of: &str, offset: u64) -> *mut u64 {
        let (base, bytes): (*mut u8, u64) = match of {
            "producer" => (self.memory.producer.as_ptr().cast(), size_of::<ProducerPage>() as u64),
            "consumer" => (self.memory.consumer.as_ptr().cast(), size_of::<ConsumerPage>() as u64),
            "receiver" => (self.memory.receiver.as_ptr().cast(), size_of::<ReceiverPage>() as u64),
            _ => return self.pages.word(offset).as_ptr(),
        };
        assert!(offset + 8 <= bytes, "{of} has no word at {offset}");
        // SAFETY: the assertion checks that the word is inside the segment.
        unsafe { base.add(offset as usize).cast() }
    }

    /// The bytes of a word: 8, or 4 where the vectors write 8 digits.
    fn word(&self, of: &str, offset: u64, written: usize) -> u64 {
        let address = self.address(of, offset);
        // SAFETY: `address` checks that the word is inside the segment; the test has one thread.
        unsafe { if written == 10 { address.cast::<u32>().read_volatile().into() } else { address.read_volatile() } }
    }
}
