//! Replays the lists of `spec/vectors/broadcast.json`, as every implementation does. Their README defines them.

use crate::broadcast::Broadcast;
use crate::broadcast_path::PathLane;
use crate::fixture::payload;
use crate::vectors::{list, number, text, vectors};
use pelton_lane::*;
use serde_json::Value;
use std::collections::HashMap;
use std::ptr::NonNull;

#[test]
fn every_list_of_a_broadcasts_steps_has_the_results_that_the_vectors_say() {
    for steps in list(&vectors("broadcast.json")["lists"]) {
        run(steps);
    }
}

struct Reader {
    consumer: BroadcastConsumer,
    sleeper: Sleeper,
    /// Messages that it had missed before the last one received.
    missed: u64,
}

/// The lane that a list of steps operates on. The sides end before the lane does.
struct Lane {
    readers: HashMap<String, Reader>,
    producer: Option<BroadcastProducer>,
    is_by_path: bool,
    /// Its table is unused, unless the list is by path.
    path_lane: PathLane,
}

fn run(steps: &Value) {
    let name = text(&steps["name"]);
    let mut path_lane = PathLane::new(number(&steps["capacity"]));
    let is_by_path = steps["by_path"] == true;
    if !is_by_path {
        path_lane.lane = Broadcast::new(number(&steps["capacity"]));
    }
    let first = steps["first"].as_u64().unwrap_or(1);
    let producer = (!is_by_path).then(|| path_lane.lane.producer_from(first, true));
    let mut lane = Lane { readers: HashMap::new(), producer, is_by_path, path_lane };
    for (at, step) in list(&steps["steps"]).iter().enumerate() {
        let context = format!("{name}, step {at}: {step}");
        for i in 0..step["times"].as_u64().unwrap_or(1) {
            lane.step(step, i, &context);
        }
    }
}

fn policy_of(step: &Value) -> Policy {
    let slack = step["slack"].as_u64().unwrap_or(0);
    match text(&step["policy"]) {
        "gate" => Policy::Gate,
        "lag" => Policy::Lag { slack },
        "latest" => Policy::Latest,
        "gate until" => Policy::GateUntil { slack, lag_after_ns: number(&step["lag_after_ns"]) },
        other => panic!("no policy {other:?}"),
    }
}

fn from_of(step: &Value) -> StartFrom {
    match &step["from"] {
        Value::Null => StartFrom::Now,
        Value::String(from) if from == "now" => StartFrom::Now,
        Value::String(from) if from == "oldest" => StartFrom::Oldest,
        messages => StartFrom::Last(number(messages)),
    }
}

/// Whether a result is what the step says: a number, or *corrupt*.
fn assert_is(found: Result<u64, LaneError>, step: &Value, context: &str) {
    match found {
        Ok(found) => assert_eq!(Some(found), step["is"].as_u64(), "{context}"),
        Err(LaneError::Corrupt { .. }) => assert_eq!("corrupt", text(&step["is"]), "{context}"),
        Err(LaneError::HoldTooLong { .. }) => assert_eq!("refused", text(&step["is"]), "{context}"),
        Err(other) => panic!("{context}: {other}"),
    }
}

impl Lane {
    fn step(&mut self, step: &Value, i: u64, context: &str) {
        let bytes = step["bytes"].as_u64();
        let by = text(&step["by"]);
        let mut wake = None;
        match text(&step["do"]) {
            "join" => self.join(step, context),
            "end" => drop(self.readers.remove(by).expect(context)),
            "successor" => {
                // The predecessor has died.
                self.producer = None;
                let successor = self.path_lane.producer();
                assert_is(successor.as_ref().map(BroadcastProducer::number).map_err(|error| *error), step, context);
                self.producer = successor.ok();
            }
            "send" => self.send(bytes.unwrap(), step, context),
            "receive" => wake = self.receive(step, i, context),
            "take" => self.expect_message(step, i, context),
            "release" => wake = Some(self.reader(by).consumer.release()),
            "arm" if by.is_empty() => {
                let sleeps = self.producer().arm(bytes, || {});
                assert_eq!(if sleeps { "sleep" } else { "awake" }, text(&step["is"]), "{context}");
            }
            "disarm" if by.is_empty() => self.producer().disarm(),
            "arm" => self.reader(by).sleeper.arm(|| {}),
            "disarm" => self.reader(by).sleeper.disarm(),
            "leave" => {
                let reader = self.reader(by);
                reader.consumer.close();
                reader.sleeper.close();
            }
            "lost" => {
                let producer = self.producer();
                let lost = producer.lost();
                let why = match lost {
                    None => "none",
                    Some((_, CursorLoss::Closed)) => "closed",
                    Some((_, CursorLoss::Corrupt(_))) => "corrupt",
                };
                assert_eq!(why, text(&step["is"]), "{context}");
                lost.into_iter().for_each(|(join, _)| producer.remove(join));
            }
            "remove" => self.of_consumer(by, BroadcastProducer::remove),
            "let lag" => self.of_consumer(by, BroadcastProducer::let_lag),
            "history" => self.producer().set_history(number(&step["messages"])),
            "close" => self.producer().close(),
            "words" => {
                for word in list(&step["are"]) {
                    let is_long = text(&word[1]).len() > 10;
                    let at = self.address(text(&step["of"]), number(&word[0]));
                    // SAFETY: `at` is an aligned word in the memory of this test, which has one thread.
                    let found =
                        unsafe { if is_long { at.read_volatile() } else { at.cast::<u32>().read_volatile().into() } };
                    assert_eq!(format!("{found:#x}"), format!("{:#x}", number(&word[1])), "{context}: {}", word[0]);
                }
            }
            "poke" => {
                for word in list(&step["words"]) {
                    let at = self.address(text(&step["of"]), number(&word[0]));
                    // SAFETY: as above.
                    unsafe {
                        match text(&word[1]).len() {
                            18 => at.write_volatile(number(&word[1])),
                            _ => at.cast::<u32>().write_volatile(number(&word[1]) as u32),
                        }
                    };
                }
            }
            other => panic!("{context}: no step {other:?}"),
        }
        if let Some(rings) = step["ring"].as_bool() {
            assert_eq!(wake.expect("a step that may ring") == Wake::Ring, rings, "{context}");
        }
    }

    fn producer(&mut self) -> &mut BroadcastProducer {
        self.producer.as_mut().expect("a producer")
    }

    fn reader(&mut self, by: &str) -> &mut Reader {
        self.readers.get_mut(by).unwrap_or_else(|| panic!("no consumer {by:?}"))
    }

    /// The producer does something to a consumer that has joined by connect.
    fn of_consumer(&mut self, by: &str, act: fn(&mut BroadcastProducer, u64)) {
        let join = self.reader(by).consumer.join();
        act(self.producer(), join);
    }

    fn join(&mut self, step: &Value, context: &str) {
        let (policy, from) = (policy_of(step), from_of(step));
        let joined = if self.is_by_path {
            let slot = number(&step["slot"]) as u32;
            self.path_lane.join(slot, policy, from, step["continues"] == true)
        } else {
            let producer = self.producer.as_mut().expect("a producer");
            let (consumer, joined) = self.path_lane.lane.join_at(producer, policy, from, true);
            if let Some(wanted) = step.get("joined") {
                let found = [joined.slot.into(), joined.number, joined.place.pack(), joined.skip];
                let wanted = ["slot", "number", "place", "skip"].map(|field| number(&wanted[field]));
                assert_eq!(found, wanted, "{context}: slot, number, place, skip");
            }
            Ok(consumer)
        };
        assert_is(joined.as_ref().map(BroadcastConsumer::number).map_err(|error| *error), step, context);
        if let Ok(consumer) = joined {
            // SAFETY: the page lives as long as the lane.
            let sleeper = unsafe { consumer.sleeper(true) };
            self.readers.insert(text(&step["as"]).to_owned(), Reader { consumer, sleeper, missed: 0 });
        }
    }

    fn send(&mut self, bytes: u64, step: &Value, context: &str) {
        let producer = self.producer();
        let message = payload(seq_of(producer.number()).into(), bytes as usize);
        match producer.try_reserve(bytes) {
            Ok(Some(space)) => {
                assert_eq!("sent", text(&step["is"]), "{context}");
                producer.copy_in(space, &message);
                let rings = producer.commit(space, bytes);
                let wanted = list(&step["rings"]).iter().fold(0, |mask, slot| mask | 1 << number(slot));
                assert_eq!(rings, wanted, "{context}: the mask of the slots to ring");
            }
            Ok(None) => assert_eq!("full", text(&step["is"]), "{context}"),
            Err(LaneError::TooLarge { .. }) => assert_eq!("too large", text(&step["is"]), "{context}"),
            Err(error) => panic!("{context}: {error}"),
        }
    }

    fn receive(&mut self, step: &Value, i: u64, context: &str) -> Option<Wake> {
        let by = text(&step["by"]);
        match text(&step["is"]) {
            "" => self.expect_message(step, i, context),
            "closed" => {
                assert!(self.next(by).unwrap().is_none(), "{context}");
                assert!(self.reader(by).consumer.has_producer_closed(), "{context}");
                assert!(self.next(by).unwrap().is_none(), "{context}");
                return None;
            }
            wanted => {
                let found = self.next(by);
                let word = match &found {
                    Ok(Some(_)) => "a message",
                    Ok(None) => "empty",
                    Err(LaneError::Corrupt { .. }) => "corrupt",
                    Err(error) => panic!("{context}: {error}"),
                };
                assert_eq!(word, wanted, "{context}: {found:?}");
                if word == "corrupt" || !self.reader(by).consumer.has_passed() {
                    return None;
                }
            }
        }
        Some(self.reader(by).consumer.release())
    }

    /// The next message: its number and its payload. Takes it.
    fn next(&mut self, by: &str) -> Result<Option<(u64, Vec<u8>)>, LaneError> {
        let consumer = &mut self.reader(by).consumer;
        let mut buffer = Vec::new();
        if consumer.policy().reads_in_place() {
            let Some(record) = consumer.peek()? else { return Ok(None) };
            // SAFETY: the record is not released while the slice is used.
            let bytes =
                unsafe { std::slice::from_raw_parts(consumer.payload(&record).as_ptr(), record.bytes as usize) };
            buffer.extend_from_slice(bytes);
            consumer.take(&record);
        } else {
            loop {
                match consumer.copy(&mut buffer)? {
                    None => return Ok(None),
                    Some(Copied::Missed(_)) => {}
                    Some(Copied::Message) => break,
                }
            }
        }
        Ok(Some((consumer.number() - 1, buffer)))
    }

    /// Takes the next message, which must match the step's description, with the number `i` higher.
    fn expect_message(&mut self, step: &Value, i: u64, context: &str) {
        let by = text(&step["by"]);
        let found = self.next(by).unwrap_or_else(|error| panic!("{context}: {error}"));
        let (found, message) = found.unwrap_or_else(|| panic!("{context}: empty"));
        let wanted = (number(&step["number"]) + i, number(&step["bytes"]));
        assert_eq!((found, message.len() as u64), wanted, "{context}");
        assert!(message == payload(seq_of(found).into(), message.len()), "{context}: payload");
        let reader = self.reader(by);
        let missed = reader.consumer.missed() - std::mem::replace(&mut reader.missed, reader.consumer.missed());
        assert_eq!(missed, step["missed"].as_u64().unwrap_or(0), "{context}: missed");
    }

    fn address(&self, of: &str, offset: u64) -> *mut u64 {
        let memory = &self.path_lane.lane.memory;
        let (page, bytes) = match of {
            "producer" => (memory.producer.cast::<u64>(), size_of::<BroadcastPage>()),
            "table" => (self.path_lane.table.cast(), CursorTable::BYTES),
            "data" => return self.path_lane.lane.word(offset).as_ptr(),
            by => (NonNull::from(self.readers[by].consumer.cursor_page()).cast(), size_of::<CursorPage>()),
        };
        assert!(offset as usize + 8 <= bytes);
        // SAFETY: the word is inside its page.
        unsafe { page.cast::<u8>().byte_add(offset as usize).cast().as_ptr() }
    }
}
