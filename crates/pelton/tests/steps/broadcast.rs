//! Broadcasts in a directory: subscribers that join, receive, leave and return, and publishers that pass a subscriber
//! that lags, wait for one that gates, and take over. The last scenarios stop the victim at each step, and the other
//! side goes on meanwhile.

use super::*;
use pelton::options::maker;
use pelton::{Deadline, Policy, Publisher, StartFrom, Subscriber};
use support::payload;

/// Of small messages, a lane takes hundreds; of large ones four, so that a publisher passes a whole lane in few steps.
pub const SMALL_BYTES: u64 = 100;
pub const LARGE_BYTES: u64 = 15_000;

pub struct Publishing {
    pub publisher: Publisher,
    bytes: u64,
    message: Vec<u8>,
}

impl Publishing {
    pub fn of(publisher: Publisher, bytes: u64) -> Publishing {
        Publishing { publisher, bytes, message: Vec::new() }
    }

    fn open(run: &Run, bytes: u64) -> Publishing {
        Publishing::of(with_capacity(SMALL).create_publisher(run.path()).unwrap(), bytes)
    }

    pub fn next(&self) -> u64 {
        self.publisher.next_number()
    }

    /// Sends one message; false when the deadline passes. Notes that it is committed.
    pub fn one(&mut self, deadline: impl Into<Deadline>) -> bool {
        let number = self.next();
        payload(number, self.bytes as usize, &mut self.message);
        let sent = self.publisher.send_until(&self.message, deadline).unwrap() == Sent::Sent;
        if sent {
            shared().committed.store(number + 1, SeqCst);
        }
        sent
    }

    #[track_caller]
    pub fn send(&mut self, count: u64) {
        for _ in 0..count {
            assert!(self.one(deadline()), "message {} waits for ever", self.next());
        }
    }

    /// Sends as many messages as fill the lane, if nobody that gates holds it up.
    pub fn lap(&mut self) {
        (0..SMALL / self.bytes).for_each(|_| _ = self.one(Deadline::Now));
    }

    /// The same, where nobody may hold it up.
    #[track_caller]
    fn send_a_lap(&mut self) {
        self.send(SMALL / self.bytes + 1);
    }
}

pub struct Subscribing {
    pub subscriber: Subscriber,
    bytes: u64,
    /// The number of the next message, if none is missed before it; 0: any.
    pub next: u64,
}

pub fn oldest() -> Options<maker::OpenSubscriber> {
    opened::<maker::OpenSubscriber>().start_from(StartFrom::Oldest)
}

pub fn by(policy: Policy) -> Options<maker::OpenSubscriber> {
    oldest().policy(policy)
}

pub fn until() -> Options<maker::OpenSubscriber> {
    oldest().lag_after(Duration::from_millis(1))
}

impl Subscribing {
    pub fn of(subscriber: Subscriber, bytes: u64) -> Subscribing {
        Subscribing { subscriber, bytes, next: 0 }
    }

    fn open(run: &Run, options: &Options<maker::OpenSubscriber>, bytes: u64) -> Subscribing {
        Subscribing::of(options.open_subscriber(run.path()).unwrap(), bytes)
    }

    /// Receives one message, which must be the next, or follow those that it says are missed. Notes that it is seen,
    /// and released.
    pub fn one(&mut self, deadline: impl Into<Deadline>) -> pelton::Result<bool> {
        let Some(delivery) = self.subscriber.receive_until(deadline)? else { return Ok(false) };
        let (number, missed) = (delivery.number(), delivery.missed());
        check(number, Sizes::Fixed(self.bytes), &delivery, &mut Vec::new());
        assert!(self.next == 0 || number == self.next + missed, "{number} after {}, {missed} missed", self.next);
        shared().seen.store(number + 1, SeqCst);
        drop(delivery);
        shared().released.store(number + 1, SeqCst);
        self.next = number + 1;
        Ok(true)
    }

    #[track_caller]
    pub fn read(&mut self, count: u64) {
        for _ in 0..count {
            assert!(self.one(deadline()).unwrap(), "nothing came after {}", self.next);
        }
    }

    /// Receives all messages before this number, or counts them, over as many publishers as it takes.
    #[track_caller]
    pub fn read_to(&mut self, number: u64) {
        while self.subscriber.next_number() < number {
            match self.one(deadline()) {
                Ok(read) => assert!(read, "message {} did not arrive", self.next),
                Err(error) => {
                    assert!(is_end(&error), "{error}");
                    assert!(self.subscriber.resume_until(deadline()).unwrap());
                }
            }
        }
    }
}

/// A subscriber that comes now gets each message that is there, and goes on with the publisher over a whole lane.
#[track_caller]
fn works(run: &Run, publishing: &mut Publishing) {
    let mut subscribing = Subscribing::open(run, &oldest(), publishing.bytes);
    subscribing.read_to(publishing.next());
    for _ in 0..3 {
        publishing.send(2);
        subscribing.read_to(publishing.next());
    }
    drop(subscribing);
    publishing.send_a_lap();
}

/// The subscriptions of the directory.
fn subscriptions(run: &Run) -> usize {
    inspect::broadcast(run.path()).unwrap().subscriptions.len()
}

/// A subscriber without a name joins and receives. A dead one holds nobody up.
pub fn subscriber_joins(run: &Run, policy: Policy) {
    let mut publishing = Publishing::open(run, SMALL_BYTES);
    publishing.send(30);
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        let mut subscribing = Subscribing::open(run, &by(policy), SMALL_BYTES);
        subscribing.read(3);
        subscribing
    });
    run.finish(victim, || publishing.lap());
    publishing.send_a_lap();
    assert_eq!(subscriptions(run), 0);
    works(run, &mut publishing);
}

/// A durable one joins, for the first time or again, and receives; the next process continues exactly there.
pub fn durable_joins(run: &Run, options: fn() -> Options<maker::OpenSubscriber>, continues: bool) {
    let options = options().durable("audit");
    let mut publishing = Publishing::open(run, SMALL_BYTES);
    publishing.send(30);
    if continues {
        Subscribing::open(run, &options, SMALL_BYTES).read(5);
    }
    let before = shared().released.load(SeqCst).max(1);
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        let mut subscribing = Subscribing::open(run, &options, SMALL_BYTES);
        subscribing.read(3);
        subscribing
    });
    run.finish(victim, || publishing.send(1));
    publishing.send(5);
    let (released, seen) = (shared().released.load(SeqCst), shared().seen.load(SeqCst));
    let mut subscribing = Subscribing::open(run, &options, SMALL_BYTES);
    assert!(subscribing.subscriber.continues() || (!continues && seen == 0));
    subscribing.read(1);
    let first = subscribing.next - 1;
    assert!((released.max(before)..=seen.max(before)).contains(&first), "{released}, {seen}: begins at {first}");
    subscribing.read_to(publishing.next());
    assert_eq!(subscribing.subscriber.missed(), 0);
    drop(subscribing);
    assert!(inspect::remove_durable(run.path(), "audit").unwrap());
    works(run, &mut publishing);
}

/// Without a name it is gone; with one, its place stays.
pub fn subscriber_leaves(run: &Run, durable: bool) {
    let mut publishing = Publishing::open(run, SMALL_BYTES);
    let options = if durable { oldest().durable("audit") } else { oldest() };
    let victim = fork(Last::Exit, |inside| {
        let mut subscribing = Subscribing::open(run, &options, SMALL_BYTES);
        inside.synchronize();
        subscribing.read(2);
        inside.count();
        drop(subscribing);
    });
    victim.wait_for_child();
    publishing.send(5);
    victim.go();
    run.finish(victim, || publishing.send(1));
    if durable {
        let mut subscribing = Subscribing::open(run, &options, SMALL_BYTES);
        subscribing.read(1);
        assert_eq!(subscribing.next, 4);
        drop(subscribing);
        assert!(inspect::remove_durable(run.path(), "audit").unwrap());
    }
    publishing.send_a_lap();
    assert_eq!(subscriptions(run), 0);
    works(run, &mut publishing);
}

/// A removed subscription holds nobody up; one that was not removed can be.
pub fn durable_is_removed(run: &Run) {
    let mut publishing = Publishing::open(run, SMALL_BYTES);
    Subscribing::open(run, &oldest().durable("audit"), SMALL_BYTES);
    publishing.send(5);
    let victim = fork(Last::Exit, |inside| {
        inside.count();
        assert!(inspect::remove_durable(run.path(), "audit").unwrap());
    });
    run.finish(victim, || publishing.send(1));
    inspect::remove_durable(run.path(), "audit").unwrap();
    publishing.send_a_lap();
    assert_eq!(subscriptions(run), 0);
    let subscribing = Subscribing::open(run, &oldest().durable("audit"), SMALL_BYTES);
    assert!(!subscribing.subscriber.continues());
    drop(subscribing);
    assert!(inspect::remove_durable(run.path(), "audit").unwrap());
    works(run, &mut publishing);
}

/// A publisher that creates the broadcast and sends.
pub fn publisher_creates(run: &Run) {
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        let mut publishing = Publishing::open(run, SMALL_BYTES);
        publishing.send(2);
        publishing
    });
    run.finish(victim, || ());
    let mut publishing = next_publisher(run, SMALL_BYTES);
    assert_eq!(run.left(), ["channel"]);
    works(run, &mut publishing);
}

/// The next publisher, which continues after the last message of a dead one.
#[track_caller]
fn next_publisher(run: &Run, bytes: u64) -> Publishing {
    let publishing = Publishing::open(run, bytes);
    let committed = shared().committed.load(SeqCst).max(1);
    assert!((committed..=committed + 1).contains(&publishing.next()), "{committed}: {}", publishing.next());
    publishing
}

/// A publisher passes a subscriber that lags, or that has held it up for long enough.
pub fn publisher_laps(run: &Run, options: fn() -> Options<maker::OpenSubscriber>) {
    let mut publishing = Publishing::open(run, LARGE_BYTES);
    let mut lagging = Subscribing::open(run, &options(), LARGE_BYTES);
    publishing.send(1);
    lagging.read(1);
    publishing.send(2);
    drop(publishing);
    let victim = fork(Last::Killed, |inside| {
        let mut publishing = Publishing::open(run, LARGE_BYTES);
        inside.count();
        publishing.send(6);
        publishing
    });
    run.finish(victim, || ());
    let mut publishing = next_publisher(run, LARGE_BYTES);
    lagging.read_to(publishing.next());
    publishing.send(3);
    lagging.read_to(publishing.next());
    drop(lagging);
    works(run, &mut publishing);
}

/// A publisher that waits in a full lane for a subscriber that gates.
pub fn publisher_waits(run: &Run) {
    let victim = fork(Last::Killed, |inside| {
        let mut publishing = Publishing::open(run, LARGE_BYTES);
        inside.synchronize();
        while publishing.one(Deadline::Now) {}
        inside.count();
        publishing.send(2);
        publishing
    });
    victim.wait_for_child();
    let mut gating = Subscribing::open(run, &oldest(), LARGE_BYTES);
    victim.go();
    victim.watch(true, &mut || ());
    gating.read(3);
    run.finish(victim, || ());
    let mut publishing = next_publisher(run, LARGE_BYTES);
    gating.read_to(publishing.next());
    assert_eq!(gating.subscriber.missed(), 0);
    drop(gating);
    works(run, &mut publishing);
}

/// A publisher takes over from one that is gone, with a durable gate at its place, and one that lags.
pub fn publisher_takes_over(run: &Run) {
    let durable = oldest().durable("audit");
    let mut publishing = Publishing::open(run, LARGE_BYTES);
    let mut lagging = Subscribing::open(run, &by(Policy::Lag), LARGE_BYTES);
    publishing.send(6);
    let mut gating = Subscribing::open(run, &durable, LARGE_BYTES);
    gating.read_to(7);
    publishing.send(2);
    gating.read(1);
    drop((gating, publishing));
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        let mut publishing = Publishing::open(run, LARGE_BYTES);
        publishing.send(2);
        publishing
    });
    run.finish(victim, || ());
    let mut publishing = next_publisher(run, LARGE_BYTES);
    let mut gating = Subscribing::open(run, &durable, LARGE_BYTES);
    gating.next = 8;
    for _ in 0..3 {
        gating.read_to(publishing.next());
        lagging.read_to(publishing.next());
        publishing.send(2);
    }
    assert_eq!(gating.subscriber.missed(), 0);
    drop((gating, lagging));
    assert!(inspect::remove_durable(run.path(), "audit").unwrap());
    works(run, &mut publishing);
}

/// A subscriber is stopped at each step of its join, and the publisher passes a whole lane meanwhile, unless that waits
/// for it already. [join]
pub fn subscriber_joins_and_is_passed(run: &Run, options: fn() -> Options<maker::OpenSubscriber>) {
    shared().stops.store(true, SeqCst);
    let mut publishing = Publishing::open(run, LARGE_BYTES);
    publishing.send(6);
    let victim = fork(Last::Exit, |inside| {
        inside.count();
        let mut subscribing = Subscribing::open(run, &options(), LARGE_BYTES);
        inside.synchronize();
        subscribing.read_to(shared().committed.load(SeqCst));
    });
    victim.watch_until_met(&mut || publishing.lap());
    publishing.lap();
    victim.go();
    run.finish(victim, || ());
    publishing.send_a_lap();
    works(run, &mut publishing);
}

/// A publisher is stopped at each step of a lap, or of a takeover and a message, and a gate joins meanwhile. [join]
pub fn publisher_goes_on_and_one_joins(run: &Run, takes_over: bool) {
    shared().stops.store(true, SeqCst);
    let mut publishing = Publishing::open(run, LARGE_BYTES);
    publishing.send(6);
    drop(publishing);
    let mut lagging = Subscribing::open(run, &by(Policy::Lag), LARGE_BYTES);
    let victim = fork(Last::Exit, |inside| {
        inside.count_if(takes_over);
        let mut publishing = Publishing::open(run, LARGE_BYTES);
        inside.count();
        publishing.send(if takes_over { 1 } else { 6 });
    });
    let mut joined = None;
    let until = deadline();
    while victim.state() != 'Z' {
        victim.watch_once(&mut || joined = Some(Subscribing::open(run, &oldest(), LARGE_BYTES)));
        for subscribing in joined.iter_mut().chain([&mut lagging]) {
            match subscribing.one(Deadline::Now) {
                Ok(_) => {}
                Err(error) => {
                    assert!(is_end(&error), "{error}");
                    subscribing.subscriber.resume_until(Deadline::Now).unwrap();
                }
            }
        }
        assert!(Instant::now() < until, "the victim hangs");
    }
    run.finish(victim, || ());
    let mut publishing = next_publisher(run, LARGE_BYTES);
    for _ in 0..3 {
        for subscribing in joined.iter_mut().chain([&mut lagging]) {
            subscribing.read_to(publishing.next());
        }
        publishing.send(1);
    }
    assert!(joined.as_ref().is_none_or(|gate| gate.subscriber.missed() == 0));
    drop((joined, lagging));
    works(run, &mut publishing);
}

/// A publisher that admits none which holds it up. It does not wait for one to leave.
fn limited(run: &Run) -> pelton::Result<Publishing> {
    let options = with_capacity::<maker::CreatePublisher>(SMALL).hold_max(Duration::ZERO);
    let publisher = options.connect_deadline(Deadline::Now).create_publisher(run.path());
    publisher.map(|publisher| Publishing::of(publisher, LARGE_BYTES))
}

#[track_caller]
fn is_refused<T>(result: pelton::Result<T>) -> bool {
    match result {
        Ok(_) => false,
        Err(Error::Refused(_)) => true,
        Err(error) => panic!("{error}"),
    }
}

/// A publisher begins with a limit. If it dies, the next one has its own.
pub fn publisher_limits(run: &Run) {
    drop(Publishing::open(run, LARGE_BYTES));
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        let mut publishing = limited(run).unwrap();
        publishing.send(2);
        publishing
    });
    run.finish(victim, || ());
    is_refused(oldest().open_subscriber(run.path()));
    let mut publishing = next_publisher(run, LARGE_BYTES);
    works(run, &mut publishing);
}

/// A publisher is stopped at each step of a beginning with a limit, and a gate joins meanwhile: one of them is refused.
/// [join]
pub fn publisher_limits_and_a_gate_joins(run: &Run) {
    shared().stops.store(true, SeqCst);
    drop(Publishing::open(run, LARGE_BYTES));
    let victim = fork(Last::Exit, |inside| {
        inside.count();
        if let Ok(mut publishing) = limited(run) {
            publishing.send_a_lap();
        }
    });
    let mut joined = None;
    victim.watch(false, &mut || {
        if joined.is_none() {
            joined = oldest().open_subscriber(run.path()).map_err(|error| is_refused::<()>(Err(error))).ok();
        }
    });
    run.finish(victim, || ());
    assert!(joined.is_none() || shared().committed.load(SeqCst) == 0, "both");
    let mut publishing = next_publisher(run, LARGE_BYTES);
    publishing.send(1);
    if let Some(subscriber) = joined {
        Subscribing::of(subscriber, LARGE_BYTES).read_to(publishing.next());
    }
    works(run, &mut publishing);
}

/// A subscriber is stopped at each step of its join, or of a return by which it may hold the publisher up, and a
/// publisher with a limit begins meanwhile: one of them is refused. The subscriber leaves nothing behind, or all as it
/// was. [join]
pub fn subscriber_joins_beside_a_limit(run: &Run, durable: bool, continues: bool) {
    shared().stops.store(true, SeqCst);
    let mut publishing = Publishing::open(run, LARGE_BYTES);
    let name = |options: Options<maker::OpenSubscriber>| if durable { options.durable("audit") } else { options };
    if continues {
        drop(name(by(Policy::Lag)).open_subscriber(run.path()).unwrap());
    }
    publishing.send(2);
    drop(publishing);
    let options = name(if continues { until() } else { oldest() });
    let victim = fork(Last::Exit, |inside| {
        inside.count();
        let opened = options.open_subscriber(run.path());
        shared().seen.store(u64::from(opened.is_ok()), SeqCst);
        // It leaves by its end, after all steps.
        is_refused(opened.map(std::mem::forget));
    });
    let mut beginning = None;
    victim.watch(false, &mut || {
        if beginning.is_none() {
            beginning = limited(run).map_err(|error| is_refused::<()>(Err(error))).ok();
        }
        beginning.iter_mut().for_each(Publishing::send_a_lap);
    });
    run.finish(victim, || ());
    let joined = shared().seen.load(SeqCst) == 1;
    if let Some(mut publishing) = beginning {
        assert!(!joined, "both");
        publishing.send_a_lap();
        assert_eq!(subscriptions(run), usize::from(continues));
        drop(publishing);
    }
    let mut publishing = next_publisher(run, LARGE_BYTES);
    if continues {
        let mut subscribing = Subscribing::open(run, &name(by(Policy::Lag)), LARGE_BYTES);
        assert!(subscribing.subscriber.continues());
        subscribing.read_to(publishing.next());
    }
    if durable {
        inspect::remove_durable(run.path(), "audit").unwrap();
    }
    works(run, &mut publishing);
}
