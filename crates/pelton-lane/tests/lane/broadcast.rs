//! A broadcast lane in one thread: against a model, by policy, at the ends of its numbers, and with false values.

use crate::fixture::payload;
use pelton_lane::*;
use proptest::prelude::*;
use std::cell::Cell;
use std::ptr::NonNull;

/// Owns the producer's page and the data of a broadcast lane, and every cursor's page. The sides must not outlive it.
pub struct Broadcast {
    pub memory: BroadcastMemory,
    words: *mut [CacheLine],
    cursors: std::cell::RefCell<Vec<NonNull<CursorPage>>>,
}

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct CacheLine([u64; 8]);

impl Broadcast {
    pub fn new(capacity: u64) -> Broadcast {
        Broadcast::of_generation(capacity, 1)
    }

    pub fn of_generation(capacity: u64, generation: u64) -> Broadcast {
        assert!(capacity_is_valid(capacity));
        let words = Box::into_raw(vec![CacheLine([0; 8]); capacity as usize / 64].into_boxed_slice());
        let page = BroadcastPage::new(capacity, message_bytes_limit(capacity), generation, 1);
        let memory = BroadcastMemory {
            producer: NonNull::from(Box::leak(Box::new(page))),
            // SAFETY: the box has `capacity` bytes, aligned to 64; the drop below frees it.
            data: unsafe { Data::new(NonNull::new(words.cast()).unwrap(), capacity) },
        };
        Broadcast { memory, words, cursors: Default::default() }
    }

    pub fn producer(&self) -> BroadcastProducer {
        self.producer_from(1, true)
    }

    pub fn producer_from(&self, number: u64, can_barrier: bool) -> BroadcastProducer {
        // SAFETY: the memory lives as long as `self`; each test has one producer at a time.
        unsafe { BroadcastProducer::attach(self.memory, number, can_barrier) }
    }

    pub fn join(&self, producer: &mut BroadcastProducer, policy: Policy, from: StartFrom) -> BroadcastConsumer {
        self.join_at(producer, policy, from, true).0
    }

    /// The consumer, and where the producer has let it join.
    pub fn join_at(
        &self,
        producer: &mut BroadcastProducer,
        policy: Policy,
        from: StartFrom,
        can_barrier: bool,
    ) -> (BroadcastConsumer, Joined) {
        let page = NonNull::from(Box::leak(Box::new(CursorPage::new(policy, 2))));
        self.cursors.borrow_mut().push(page);
        let bytes_max = message_bytes_limit(self.memory.data.capacity());
        // SAFETY: the pages live as long as `self`, and each has one consumer.
        unsafe {
            let joined = producer.join(page, policy, from).expect("the lane has a free slot");
            let consumer = BroadcastConsumer::attach(self.memory, page, policy, joined, bytes_max, can_barrier);
            (consumer.unwrap(), joined)
        }
    }

    /// A word of the data, for tests that act as a hostile producer.
    pub fn word(&self, offset: u64) -> &Cell<u64> {
        // SAFETY: the slice checks the bounds; these tests have one thread.
        unsafe {
            let line = &raw mut (*self.words)[offset as usize / 64];
            &*(&raw mut (*line).0[offset as usize % 64 / 8]).cast()
        }
    }
}

impl Drop for Broadcast {
    fn drop(&mut self) {
        // SAFETY: each pointer was made from a box; only this frees them, once.
        unsafe {
            drop(Box::from_raw(self.memory.producer.as_ptr()));
            drop(Box::from_raw(self.words));
            self.cursors.borrow_mut().drain(..).for_each(|page| drop(Box::from_raw(page.as_ptr())));
        }
    }
}

/// Publishes; `None`: the lane is full. Otherwise the slots to ring.
pub fn publish(producer: &mut BroadcastProducer, payload: &[u8]) -> Option<u64> {
    let space = producer.try_reserve(payload.len() as u64).unwrap()?;
    producer.copy_in(space, payload);
    Some(producer.commit(space, payload.len() as u64))
}

/// Reads the next message in place, without a release.
fn take(consumer: &mut BroadcastConsumer) -> Option<Vec<u8>> {
    let record = consumer.peek().unwrap()?;
    // SAFETY: the record is not released while the slice is used.
    let bytes = unsafe { std::slice::from_raw_parts(consumer.payload(&record).as_ptr(), record.bytes as usize) };
    let message = bytes.to_vec();
    consumer.take(&record);
    Some(message)
}

pub fn receive(consumer: &mut BroadcastConsumer) -> Option<Vec<u8>> {
    let message = take(consumer)?;
    let _ = consumer.release();
    Some(message)
}

const LAG: Policy = Policy::Lag { slack: 1024 };
const GATE_UNTIL: Policy = Policy::GateUntil { slack: 1024, lag_after_ns: 1 };

#[derive(Clone, Debug)]
enum Step {
    Publish(usize),
    Abort(usize),
    Join(Policy, StartFrom),
    Receive(usize),
    ReceiveAll(usize),
    /// Takes a message and keeps it unreleased for a while.
    Hold(usize),
    Leave(usize),
    /// Its death is proved: its page is not used any more.
    Die(usize),
    LetLag(usize),
    History(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let policy = prop_oneof![Just(Policy::Gate), Just(LAG), Just(Policy::Latest), Just(GATE_UNTIL)];
    let from = prop_oneof![Just(StartFrom::Now), Just(StartFrom::Oldest), (0..40u64).prop_map(StartFrom::Last)];
    prop_oneof![
        12 => (0..300usize).prop_map(Step::Publish),
        1 => (0..2000usize).prop_map(Step::Publish),
        1 => (0..2000usize).prop_map(Step::Abort),
        2 => (policy, from).prop_map(|(policy, from)| Step::Join(policy, from)),
        8 => any::<usize>().prop_map(Step::Receive),
        2 => any::<usize>().prop_map(Step::ReceiveAll),
        2 => any::<usize>().prop_map(Step::Hold),
        1 => any::<usize>().prop_map(Step::Leave),
        1 => any::<usize>().prop_map(Step::Die),
        1 => any::<usize>().prop_map(Step::LetLag),
        1 => (0..30u64).prop_map(Step::History),
    ]
}

/// A joined consumer, and what it must receive next.
struct Reader {
    consumer: BroadcastConsumer,
    next: u64,
    /// A message that it reads in place, unreleased.
    held: Option<(Record, Vec<u8>)>,
    /// It may lag, though it gates otherwise. It gates again once it has caught up, which this model does not follow.
    lags: bool,
}

impl Reader {
    fn gates(&self) -> bool {
        matches!(self.consumer.policy(), Policy::Gate | Policy::GateUntil { .. }) && !self.lags
    }

    /// Receives one message, and compares it with the log. Returns whether there was anything.
    fn receive(&mut self, log: &[Vec<u8>], first: u64) -> bool {
        let end = first + log.len() as u64;
        if self.consumer.policy().reads_in_place() {
            if let Some((record, message)) = self.held.take() {
                // SAFETY: the record is not released yet.
                let now = unsafe { std::slice::from_raw_parts(self.consumer.payload(&record).as_ptr(), message.len()) };
                assert!(now == message, "what a gating consumer reads in place stays until its release");
                let _ = self.consumer.release();
            }
            let found = receive(&mut self.consumer);
            assert_eq!(found.as_ref(), log.get((self.next - first) as usize), "each message once and in order");
            self.next += u64::from(found.is_some());
            return found.is_some();
        }
        let mut buffer = vec![0xaa; 3];
        let before = self.next;
        let found = self.consumer.copy(&mut buffer).unwrap();
        let is_latest = self.consumer.policy() == Policy::Latest;
        match found {
            None => {
                assert!(is_latest || self.next == end, "an empty lane: {} of {end}", self.next);
                return false;
            }
            Some(Copied::Missed(missed)) => {
                assert!(missed > 0 && !self.gates() && !is_latest, "a consumer that gates is never passed");
                self.next += missed;
            }
            Some(Copied::Message) => {
                if is_latest {
                    assert!(self.consumer.number() == end, "the newest message");
                    self.next = end - 1;
                }
                assert!(buffer == log[(self.next - first) as usize], "the right message, and not torn");
                self.next += 1;
            }
        }
        assert!(self.next > before && self.next <= end && self.consumer.number() == self.next);
        let _ = self.consumer.release();
        true
    }
}

fn run(capacity: u64, window: u64, first: u64, steps: Vec<Step>) {
    let lane = Broadcast::new(capacity);
    let mut producer = lane.producer_from(first, true);
    producer.set_window(window);
    let mut log: Vec<Vec<u8>> = Vec::new();
    let mut readers: Vec<Reader> = Vec::new();
    for step in steps {
        let end = first + log.len() as u64;
        match step {
            Step::Publish(len) => {
                let message = payload(end, len.min(producer.message_bytes_max() as usize));
                match publish(&mut producer, &message) {
                    Some(rings) => {
                        assert_eq!(rings, 0, "nobody sleeps");
                        log.push(message);
                    }
                    None => {
                        let holder = producer.holder().expect("only a consumer that gates holds the producer up");
                        let slowest = readers.iter().find(|reader| reader.consumer.slot() == holder.slot).unwrap();
                        assert!(matches!(slowest.consumer.policy(), Policy::Gate | Policy::GateUntil { .. }));
                        assert!(slowest.next < end || slowest.held.is_some());
                    }
                }
            }
            Step::Abort(len) => {
                let _ = producer.try_reserve(len.min(producer.message_bytes_max() as usize) as u64).unwrap();
            }
            Step::Join(policy, from) => {
                if readers.len() == 5 {
                    continue;
                }
                let (oldest, consumer) = (producer.kept(), lane.join(&mut producer, policy, from));
                let next = match from {
                    StartFrom::Now => end,
                    StartFrom::Oldest => oldest,
                    StartFrom::Last(messages) => end.saturating_sub(messages).max(oldest),
                };
                let next = if policy == Policy::Latest { consumer.number() } else { next };
                readers.push(Reader { consumer, next, held: None, lags: false });
            }
            _ if readers.is_empty() => {}
            Step::Receive(index) => {
                let index = index % readers.len();
                readers[index].receive(&log, first);
            }
            Step::ReceiveAll(index) => {
                let index = index % readers.len();
                while readers[index].receive(&log, first) {}
            }
            Step::Hold(index) => {
                let index = index % readers.len();
                let reader = &mut readers[index];
                if reader.consumer.policy().reads_in_place()
                    && reader.held.is_none()
                    && let Some(record) = reader.consumer.peek().unwrap()
                {
                    let message = take(&mut reader.consumer).unwrap();
                    assert!(message == log[(reader.next - first) as usize]);
                    reader.next += 1;
                    reader.held = Some((record, message));
                }
            }
            Step::Leave(index) => {
                let mut reader = readers.swap_remove(index % readers.len());
                reader.consumer.close();
                let join = reader.consumer.join();
                assert_eq!(producer.lost(), Some((join, CursorLoss::Closed)));
                producer.remove(join);
                assert_eq!(producer.lost(), None);
            }
            Step::Die(index) => producer.remove(readers.swap_remove(index % readers.len()).consumer.join()),
            Step::LetLag(index) => {
                let index = index % readers.len();
                producer.let_lag(readers[index].consumer.join());
                // Until it has caught up, which the producer finds out later.
                readers[index].lags |= readers[index].consumer.policy() == GATE_UNTIL;
            }
            Step::History(messages) => producer.set_history(messages),
        }
    }
    producer.close();
    for reader in &mut readers {
        while reader.receive(&log, first) {}
        assert!(reader.consumer.has_producer_closed());
        let end = first + log.len() as u64;
        assert!(reader.next == end || reader.consumer.policy() == Policy::Latest);
    }
}

#[test]
fn the_text_of_the_signature_is_in_the_spec() {
    let spec = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../spec/broadcast.md")).unwrap();
    let signature = format!("Signature: **`{BROADCAST_SIGNATURE:#018x}`**");
    assert!(spec.contains(&signature), "spec/broadcast.md lacks {signature}");
    assert!(spec.contains(BROADCAST_TEXT), "spec/broadcast.md lacks the text of the signature:\n{BROADCAST_TEXT}");
    assert!(BROADCAST_TEXT.starts_with(&format!("plain={LAYOUT_SIGNATURE:x};")));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 400 }, ..ProptestConfig::default() })]
    #[test]
    fn random_steps_behave_as_the_model(
        capacity in (64..128u64).prop_map(|lines| 64 * lines),
        window in prop_oneof![Just(u64::MAX), 256..4096u64],
        first in prop_oneof![Just(1), Just(0xffff_ffff - 20), Just((1 << 40) - 3)],
        steps in prop::collection::vec(step(), 1..300),
    ) {
        run(capacity, window, first, steps);
    }
}

#[test]
fn a_stopped_gate_holds_the_lane_and_a_stopped_laggard_does_not() {
    let lane = Broadcast::new(4096);
    let mut producer = lane.producer();
    let mut lagging = lane.join(&mut producer, LAG, StartFrom::Now);
    for number in 0..1000 {
        assert_eq!(publish(&mut producer, &payload(number, 100)), Some(0), "a laggard costs no space that is needed");
    }
    let mut buffer = Vec::new();
    let Some(Copied::Missed(missed)) = lagging.copy(&mut buffer).unwrap() else { panic!("it was passed") };
    assert_eq!(missed, producer.kept() - 1, "the exact number");
    assert!(missed < 1000 && 1000 - missed >= 1024 / record_bytes(100), "its slack is still there: {missed}");
    for number in missed..1000 {
        assert_eq!(lagging.copy(&mut buffer).unwrap(), Some(Copied::Message));
        assert_eq!(buffer, payload(number, 100));
    }
    assert_eq!(lagging.copy(&mut buffer).unwrap(), None);
    let mut gating = lane.join(&mut producer, Policy::Gate, StartFrom::Now);
    let mut published = 0;
    while publish(&mut producer, &payload(published, 100)).is_some() {
        published += 1;
    }
    assert_eq!(producer.holder(), Some(Holder { slot: gating.slot(), join: gating.join(), number: 1001 }));
    for number in 0..published {
        assert_eq!(receive(&mut gating), Some(payload(number, 100)));
    }
    assert!(publish(&mut producer, &[]).is_some());
}

#[test]
fn history_and_the_newest_message_are_there_for_later_consumers() {
    let lane = Broadcast::new(8192);
    let mut producer = lane.producer();
    producer.set_window(1024);
    producer.set_history(10);
    for number in 0..500 {
        assert_eq!(publish(&mut producer, &payload(number, 40)), Some(0));
    }
    let mut last = lane.join(&mut producer, Policy::Gate, StartFrom::Last(10));
    for number in 490..500 {
        assert_eq!(receive(&mut last), Some(payload(number, 40)));
    }
    assert_eq!(receive(&mut last), None);
    last.close();

    let mut latest = lane.join(&mut producer, Policy::Latest, StartFrom::Now);
    let mut buffer = Vec::new();
    assert_eq!(latest.copy(&mut buffer).unwrap(), None, "nothing since it joined");
    for lap in 1..5u64 {
        for number in 0..300 {
            assert!(publish(&mut producer, &payload(300 * lap + number, 40)).is_some());
        }
        assert!(latest.may_be_ready());
        assert_eq!(latest.copy(&mut buffer).unwrap(), Some(Copied::Message));
        assert_eq!(buffer, payload(300 * lap + 299, 40));
        assert_eq!(latest.copy(&mut buffer).unwrap(), None);
        assert!(!latest.may_be_ready());
        assert_eq!(latest.cursor_page().missed(), lap * 299);
    }
}

#[test]
fn each_sleeper_is_rung_once_and_only_the_holder_rings_the_producer() {
    let lane = Broadcast::new(4096);
    let mut producer = lane.producer();
    let mut consumers: Vec<_> = (0..3).map(|_| lane.join(&mut producer, Policy::Gate, StartFrom::Now)).collect();
    // SAFETY: the pages outlive the sleepers.
    let mut sleepers: Vec<_> = consumers.iter().map(|consumer| unsafe { consumer.sleeper(true) }).collect();
    sleepers[0].arm(|| {});
    sleepers[2].arm(|| {});
    assert_eq!(publish(&mut producer, &[1]), Some(0b101));
    assert_eq!(publish(&mut producer, &[2]), Some(0), "once for each sleep");
    sleepers[2].disarm();
    sleepers[2].arm(|| {});
    assert_eq!(publish(&mut producer, &[3]), Some(0b100));
    assert_eq!(producer.slots(), 0b111);
    sleepers[1].close();
    assert_eq!(publish(&mut producer, &[4]), Some(0));

    while publish(&mut producer, &[5; 200]).is_some() {}
    let end = producer.number();
    // All have read something, consumer 1 the least.
    for (index, reads) in [(0, 6), (1, 2), (2, 8)] {
        (0..reads).for_each(|_| assert!(receive(&mut consumers[index]).is_some()));
    }
    let mut barriers = 0;
    assert!(producer.arm(Some(2000), || barriers += 1));
    assert_eq!(barriers, 1);
    assert_eq!(producer.holder(), Some(Holder { slot: 1, join: 2, number: 3 }));
    let ring = |consumer: &mut BroadcastConsumer| {
        let record = consumer.peek().unwrap().unwrap();
        consumer.take(&record);
        consumer.release()
    };
    assert_eq!(ring(&mut consumers[0]), Wake::None, "another consumer's release gives no space");
    let mut rings = 0;
    while consumers[1].number() < end {
        let wake = ring(&mut consumers[1]);
        assert_eq!(wake == Wake::Ring, consumers[1].number() == 3 + (end - 3).div_ceil(2), "once, at half");
        rings += u32::from(wake == Wake::Ring);
    }
    assert_eq!(rings, 1);
    producer.disarm();
    assert!(producer.arm(None, || {}), "the other two have not released everything");
    assert_ne!(producer.holder().unwrap().slot, 1);
}

/// With space, a producer that arms gives up nothing that history and consumers that lag may still want.
#[test]
fn arming_gives_up_no_message_as_long_as_there_is_space() {
    let lane = Broadcast::new(4096);
    let mut producer = lane.producer();
    producer.set_history(10);
    let mut latest = lane.join(&mut producer, Policy::Latest, StartFrom::Now);
    let mut lagging = lane.join(&mut producer, LAG, StartFrom::Now);
    let mut buffer = Vec::new();
    for number in 0..5 {
        assert!(publish(&mut producer, &payload(number, 100)).is_some());
        assert!(!producer.arm(Some(100), || panic!("there is space")));
        assert_eq!(latest.copy(&mut buffer), Ok(Some(Copied::Message)));
        assert_eq!(buffer, payload(number, 100));
    }
    let mut gating = lane.join(&mut producer, Policy::Gate, StartFrom::Oldest);
    assert_eq!(gating.number(), 1, "the history is there");
    assert!(receive(&mut gating).is_some());
    assert!(producer.arm(None, || {}));
    for number in 0..5 {
        assert_eq!(lagging.copy(&mut buffer), Ok(Some(Copied::Message)));
        assert_eq!(buffer, payload(number, 100));
    }
}

/// A consumer that lags finds its slack also after the producer has armed: waypoints continue to be noted.
#[test]
fn arming_leaves_no_gap_between_waypoints() {
    let lane = Broadcast::new(1 << 16);
    let mut producer = lane.producer();
    let mut lagging = lane.join(&mut producer, LAG, StartFrom::Now);
    let mut count = 0;
    assert!(!producer.arm(Some(100), || panic!("there is space")));
    while producer.kept() == 1 {
        assert!(publish(&mut producer, &payload(count, 100)).is_some());
        count += 1;
    }
    let mut buffer = Vec::new();
    let Some(Copied::Missed(missed)) = lagging.copy(&mut buffer).unwrap() else { panic!("it was passed") };
    assert!(count - missed >= 1024 / record_bytes(100), "its slack is there: {missed} of {count}");
}

/// The consumer that was the slowest goes on during the barrier: another one has to ring.
#[test]
fn arming_finds_the_slowest_consumer_after_its_barrier() {
    let lane = Broadcast::new(4096);
    let mut producer = lane.producer();
    let mut first = lane.join(&mut producer, Policy::Gate, StartFrom::Now);
    let mut second = lane.join(&mut producer, Policy::Gate, StartFrom::Now);
    while publish(&mut producer, &[7; 500]).is_some() {}
    for bytes in [Some(2000), None] {
        let mut barriers = 0;
        assert!(producer.arm(bytes, || {
            barriers += 1;
            if barriers == 1 {
                assert!(receive(&mut first).is_some());
            }
        }));
        assert_eq!((barriers, producer.holder().unwrap().slot), (2, second.slot()));
        let mut rings = 0;
        while let Some(record) = second.peek().unwrap() {
            second.take(&record);
            rings += u32::from(second.release() == Wake::Ring);
        }
        assert_eq!(rings, 1, "{bytes:?}");
        producer.disarm();
        while receive(&mut first).is_some() {}
        while publish(&mut producer, &[7; 500]).is_some() {}
    }
    // If they overtake each other each time, the producer does not stay here.
    let mut turn = 0;
    assert!(!producer.arm(None, || {
        turn += 1;
        let _ = receive(if turn % 2 == 1 { &mut first } else { &mut second });
        let _ = receive(if turn % 2 == 1 { &mut first } else { &mut second });
    }));
    assert!(turn > 1);
}

#[test]
fn a_consumer_without_membarrier_makes_the_producer_fence() {
    let lane = Broadcast::new(4096);
    let mut producer = lane.producer();
    let consumer = lane.join_at(&mut producer, Policy::Gate, StartFrom::Now, false).0;
    // SAFETY: the pages outlive the sleeper.
    let sleeper = unsafe { consumer.sleeper(false) };
    assert!(!consumer.is_producer_fencing() && sleeper.needs_fenced_wakers());
    assert_eq!(publish(&mut producer, &[1]), Some(0));
    assert!(consumer.is_producer_fencing());
}

#[test]
fn the_65th_consumer_finds_no_slot_until_one_leaves() {
    let lane = Broadcast::new(4096);
    let mut producer = lane.producer();
    let mut consumers: Vec<_> = (0..CURSORS_MAX).map(|_| lane.join(&mut producer, LAG, StartFrom::Now)).collect();
    assert_eq!(producer.slots(), u64::MAX);
    let page = CursorPage::new(LAG, 3);
    // SAFETY: the page outlives its slot, which is not given.
    assert_eq!(unsafe { producer.join(NonNull::from(&page), LAG, StartFrom::Now) }, None);
    consumers[40].close();
    assert_eq!(producer.lost(), Some((41, CursorLoss::Closed)));
    producer.remove(41);
    let successor = lane.join(&mut producer, GATE_UNTIL, StartFrom::Now);
    assert_eq!((successor.slot(), successor.join()), (40, 65));
    // What was meant for the first consumer of the slot does not reach the second.
    producer.remove(41);
    producer.let_lag(41);
    assert!(!producer.lags(65) && producer.lags(64) && producer.cursor_of(65) == Some(1));
}

/// Every value of a cursor that a consumer may not have, between two that obey the rules.
#[test]
fn a_false_cursor_harms_nobody_else() {
    for value in [2, 3, 4, 100, u64::MAX, 1 << 63, 1 << 32] {
        let lane = Broadcast::new(4096);
        let mut producer = lane.producer();
        let mut honest = lane.join(&mut producer, Policy::Gate, StartFrom::Now);
        let mut hostile = lane.join(&mut producer, Policy::Gate, StartFrom::Now);
        for number in 0..4 {
            assert!(publish(&mut producer, &payload(number, 100)).is_some());
            assert!(receive(&mut hostile).is_some());
        }
        // Loads the cursor: 5.
        assert!(!producer.arm(None, || {}) || producer.holder().unwrap().slot == honest.slot());
        producer.disarm();
        let page: *const CursorPage = hostile.cursor_page();
        // SAFETY: the word `number` of the hostile consumer's own page, at its offset in the layout.
        unsafe { &*page.cast::<Cell<u64>>().byte_add(128) }.set(value);
        let mut published = 4;
        while publish(&mut producer, &payload(published, 100)).is_some() {
            published += 1;
        }
        assert_eq!(producer.lost().map(|(slot, _)| slot), Some(hostile.join()), "{value}");
        assert_eq!(producer.holder().unwrap().slot, honest.slot());
        producer.remove(hostile.join());
        for number in 0..published {
            assert_eq!(receive(&mut honest), Some(payload(number, 100)));
        }
        assert!(publish(&mut producer, &[1; 1000]).is_some());
    }
    let page = CursorPage::new(LAG, 3);
    // SAFETY: the word `policy` of a page that nothing else uses.
    unsafe { &*(&raw const page).cast::<Cell<u32>>().byte_add(64) }.set(5);
    assert!(matches!(page.policy(), Err(LaneError::Corrupt { .. })));
}

/// Each word that a consumer reads of the producer's, with each bit flipped and set to the ends of all ranges.
#[test]
fn a_false_word_of_the_producer_is_within_bounds_or_corrupt() {
    let offsets = [512u64, 520, 640];
    let values = |old: u64| {
        (0..64).map(move |bit| old ^ 1 << bit).chain([0, 1, u64::MAX, 1 << 63, 1 << 62, (1 << 62) + 1, 4088 / 8])
    };
    for policy in [Policy::Gate, LAG, Policy::Latest, GATE_UNTIL] {
        // The words of the page, the headers, the cleared one behind them, and a word of each payload.
        let headers = (0..13).flat_map(|record| [26 * record, 26 * record + 1]);
        for word in (0..3).chain(headers.map(|word| offsets.len() + word)) {
            let old = |lane: &Broadcast| match offsets.get(word) {
                // SAFETY: a word of the page, at its offset in the layout.
                Some(offset) => unsafe { lane.memory.producer.cast::<u64>().byte_add(*offset as usize).read() },
                None => lane.word(8 * (word - offsets.len()) as u64).get(),
            };
            let filled = || {
                let lane = Broadcast::new(4096);
                let mut producer = lane.producer();
                let consumer = lane.join(&mut producer, policy, StartFrom::Now);
                for number in 0..12 {
                    assert!(publish(&mut producer, &payload(number, 200)).is_some());
                }
                (lane, consumer)
            };
            let at_first = old(&filled().0);
            for value in values(at_first) {
                let (lane, mut consumer) = filled();
                match offsets.get(word) {
                    // SAFETY: as above; the test has one thread.
                    Some(offset) => unsafe {
                        lane.memory.producer.cast::<u64>().byte_add(*offset as usize).write(value)
                    },
                    None => lane.word(8 * (word - offsets.len()) as u64).set(value),
                }
                let mut buffer = Vec::new();
                for _ in 0..40 {
                    let more = if policy.reads_in_place() {
                        match consumer.peek() {
                            Ok(Some(record)) => {
                                assert!(record.bytes <= message_bytes_limit(4096));
                                consumer.take(&record);
                                true
                            }
                            _ => false,
                        }
                    } else {
                        matches!(consumer.copy(&mut buffer), Ok(Some(_)))
                    };
                    let _ = consumer.release();
                    if !more {
                        break;
                    }
                }
            }
        }
    }
}

const STOPPED: Policy = Policy::GateUntil { slack: 2048, lag_after_ns: 1 };

#[test]
fn a_gate_that_was_let_lag_holds_the_lane_again_only_once_it_has_got_there() {
    // More slack than a lane has counts as half of it.
    let boundless = Policy::GateUntil { slack: u64::MAX, lag_after_ns: 1 };
    for policy in [STOPPED, boundless] {
        let lane = Broadcast::new(4096);
        let mut producer = lane.producer();
        let mut stopped = lane.join(&mut producer, policy, StartFrom::Now);
        for _ in 0..2 {
            assert!(publish(&mut producer, &[7; 1000]).is_some());
            assert_eq!(stopped.copy(&mut Vec::new()), Ok(Some(Copied::Message)));
        }
        let _ = stopped.release();
        // All of its backlog is within its slack.
        assert!(publish(&mut producer, &[7; 1000]).is_some());
        let largest = vec![7; producer.message_bytes_max() as usize];
        assert_eq!(publish(&mut producer, &largest), None);
        assert!(!producer.lags(stopped.join()));
        let called_at = producer.number();
        producer.let_lag(stopped.join());
        assert!(publish(&mut producer, &largest).is_some());
        for _ in 0..100 {
            assert!(publish(&mut producer, &[7; 1000]).is_some(), "it is stopped, and must not hold the lane");
        }
        assert!(producer.lags(stopped.join()));
        let mut buffer = Vec::new();
        assert!(matches!(stopped.copy(&mut buffer), Ok(Some(Copied::Missed(_)))));
        while stopped.copy(&mut buffer).unwrap().is_some() {}
        let _ = stopped.release();
        assert!(stopped.number() > called_at);
        while publish(&mut producer, &[7; 1000]).is_some() {}
        assert_eq!(producer.holder().map(|holder| holder.join), Some(stopped.join()), "it has caught up, and gates");
        producer.remove(stopped.join());
    }
}

#[test]
fn a_policy_counts_as_accepted_whatever_its_page_says_later() {
    let lane = Broadcast::new(4096);
    let mut producer = lane.producer();
    let page = CursorPage::new(LAG, 3);
    let policy = page.policy().unwrap();
    assert_eq!((policy.holds_ns(), Policy::Gate.holds_ns(), GATE_UNTIL.holds_ns()), (0, u64::MAX, 1));
    // SAFETY: the word `policy` of a page that nothing else uses.
    unsafe { &*(&raw const page).cast::<Cell<u32>>().byte_add(64) }.set(1);
    assert_eq!(page.policy(), Ok(Policy::Gate));
    // SAFETY: the page outlives the producer's use of it.
    let joined = unsafe { producer.join(NonNull::from(&page), policy, StartFrom::Now) }.unwrap();
    for _ in 0..100 {
        assert!(publish(&mut producer, &[7; 1000]).is_some());
    }
    assert!(producer.lags(joined.join));
    producer.remove(joined.join);
}

#[test]
fn the_end_of_the_holder_ends_the_sleep_that_it_would_have_ended() {
    let lane = Broadcast::new(4096);
    let mut producer = lane.producer();
    let is_armed = || {
        // SAFETY: the producer's sleep word, at its offset in the layout.
        unsafe { lane.memory.producer.cast::<u64>().byte_add(256).read() & 1 == 1 }
    };
    for ends in [BroadcastProducer::remove, BroadcastProducer::let_lag] {
        let stopped = lane.join(&mut producer, STOPPED, StartFrom::Now);
        while publish(&mut producer, &[7; 500]).is_some() {}
        assert!(producer.arm(Some(500), || {}) && is_armed());
        ends(&mut producer, stopped.join());
        assert!(!is_armed(), "nobody is left that would ring");
        assert!(publish(&mut producer, &[7; 500]).is_some());
        producer.remove(stopped.join());
    }
    // SAFETY: the count of sleeps, at its offset in the layout.
    assert_eq!(unsafe { lane.memory.producer.cast::<u64>().byte_add(176).read() }, 2);
}

#[test]
fn a_consumer_goes_on_after_a_producer_that_died_between_the_two_words() {
    let lane = Broadcast::new(4096);
    let mut producer = lane.producer();
    let mut lagging = lane.join(&mut producer, Policy::Lag { slack: 0 }, StartFrom::Now);
    let mut latest = lane.join(&mut producer, Policy::Latest, StartFrom::Now);
    let mut kept = vec![producer.kept()];
    let mut count = 0;
    while kept.len() < 4 {
        assert!(publish(&mut producer, &payload(count, 200)).is_some());
        count += 1;
        if producer.kept() != *kept.last().unwrap() {
            kept.push(producer.kept());
        }
    }
    // The last `kept` is not stored, but its place is.
    // SAFETY: the word `kept`, at its offset in the layout; the test has one thread.
    unsafe { lane.memory.producer.cast::<u64>().byte_add(512).write(kept[2]) };
    let mut buffer = Vec::new();
    assert_eq!(lagging.copy(&mut buffer), Ok(Some(Copied::Missed(kept[3] - 1))));
    for number in kept[3] - 1..count {
        assert_eq!(lagging.copy(&mut buffer), Ok(Some(Copied::Message)));
        assert_eq!(buffer, payload(number, 200));
    }
    assert_eq!(lagging.copy(&mut buffer), Ok(None));
    assert_eq!(latest.copy(&mut buffer), Ok(Some(Copied::Message)));
    assert_eq!((latest.number(), buffer), (count + 1, payload(count - 1, 200)));
}

#[test]
fn a_false_joining_is_refused() {
    let lane = Broadcast::new(4096);
    let mut producer = lane.producer();
    let page = CursorPage::new(LAG, 3);
    // SAFETY: the page outlives both sides.
    let joined = unsafe { producer.join(NonNull::from(&page), LAG, StartFrom::Now) }.unwrap();
    let attached = |joined| {
        // SAFETY: as above; no other consumer of this page is used.
        unsafe { BroadcastConsumer::attach(lane.memory, NonNull::from(&page), LAG, joined, 2000, true) }.map(|_| ())
    };
    assert!(attached(Joined { skip: 3, ..joined }).is_ok());
    for joined in [
        Joined { skip: 4, ..joined },
        Joined { skip: u64::MAX, ..joined },
        Joined { slot: 64, ..joined },
        Joined { number: 2, ..joined },
        Joined { number: 0, ..joined },
        Joined { place: Position { offset: 4096, ..joined.place }, ..joined },
    ] {
        assert!(matches!(attached(joined), Err(LaneError::Corrupt { .. })), "{joined:?}");
    }
    assert!(matches!(producer.try_reserve(u64::MAX), Err(LaneError::TooLarge { .. })));
    assert!(matches!(producer.try_reserve(u64::MAX - 20), Err(LaneError::TooLarge { .. })));
}

#[test]
fn a_consumer_that_joins_with_the_last_messages_misses_none_of_those_before() {
    let lane = Broadcast::new(1 << 20);
    let mut producer = lane.producer();
    for number in 0..300 {
        assert!(publish(&mut producer, &payload(number, 40)).is_some());
    }
    let mut buffer = Vec::new();
    // Waypoints are 4096 bytes apart.
    for (last, next) in [(0, 301), (1, 300), (2, 299), (20, 281), (300, 1)] {
        let mut latest = lane.join(&mut producer, Policy::Latest, StartFrom::Last(last));
        let gating = lane.join(&mut producer, Policy::Gate, StartFrom::Last(last));
        assert_eq!((latest.number(), gating.number()), (next, next));
        let found = latest.copy(&mut buffer).unwrap();
        assert_eq!((found.is_some(), latest.missed(), latest.number()), (last > 0, last.saturating_sub(1), 301));
        // With none, the consumer has nothing to release that the producer would wait for.
        assert_eq!(producer.is_released(), last == 0);
        producer.remove(gating.join());
        producer.remove(latest.join());
    }
}

/// It has passed over all messages, and says so: the producer may wait for that.
#[test]
fn a_consumer_that_has_passed_over_all_messages_releases_them() {
    let lane = Broadcast::new(4096);
    let mut producer = lane.producer();
    let mut stopped = lane.join(&mut producer, STOPPED, StartFrom::Now);
    while publish(&mut producer, &[7; 1000]).is_some() {}
    producer.let_lag(stopped.join());
    while producer.kept() < producer.number() {
        assert!(publish(&mut producer, &[7; 1800]).is_some() && producer.number() < 1000);
        // A message for which only an empty lane has space.
        let _ = producer.try_reserve(2000).unwrap();
    }
    let mut buffer = Vec::new();
    assert!(!stopped.has_passed());
    assert_eq!(stopped.copy(&mut buffer), Ok(Some(Copied::Missed(producer.number() - 1))));
    assert_eq!(stopped.copy(&mut buffer), Ok(None));
    assert!(stopped.has_passed() && producer.lags(stopped.join()));
    let _ = stopped.release();
    assert!(!stopped.has_passed() && producer.is_released());
    assert!(!producer.lags(stopped.join()), "it has caught up");
}

/// Frames are larger than the slack: each one is there until the next one is complete.
#[test]
fn a_consumer_that_lags_finds_the_newest_message_though_it_is_larger_than_its_slack() {
    let lane = Broadcast::new(1 << 16);
    let mut producer = lane.producer();
    producer.set_window(4096);
    let mut lagging = lane.join(&mut producer, LAG, StartFrom::Now);
    let mut buffer = Vec::new();
    assert!(publish(&mut producer, &payload(0, 5000)).is_some());
    for number in 0..100 {
        let space = producer.try_reserve(5000).unwrap().unwrap();
        assert_eq!(lagging.copy(&mut buffer), Ok(Some(Copied::Message)));
        assert_eq!(buffer, payload(number, 5000));
        producer.copy_in(space, &payload(number + 1, 5000));
        assert_eq!(producer.commit(space, 5000), 0);
    }
}

/// The seq of an old message comes round; it must not be taken for the newest.
#[test]
fn a_consumer_of_the_newest_message_finds_no_older_one_when_it_joins() {
    let lane = Broadcast::new(4096);
    let mut producer = lane.producer();
    let first = lane.join(&mut producer, Policy::Latest, StartFrom::Now);
    assert!(publish(&mut producer, &[1; 100]).is_some());
    producer.remove(first.join());
    // The lane gives up everything.
    while producer.kept() < producer.number() {
        assert!(publish(&mut producer, &[2; 1800]).is_some());
        assert!(producer.number() < 100_000);
        // A message for which only an empty lane has space.
        let _ = producer.try_reserve(2000).unwrap();
    }
    let mut latest = lane.join(&mut producer, Policy::Latest, StartFrom::Oldest);
    // SAFETY: the word `last`, at its offset in the layout.
    assert_eq!(unsafe { lane.memory.producer.cast::<u64>().byte_add(640).read() }, 0);
    assert_eq!(latest.copy(&mut Vec::new()), Ok(None));
}
