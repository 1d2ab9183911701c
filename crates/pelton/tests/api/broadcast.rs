//! One publisher, many subscribers: threads and processes by each policy, which join, fall behind, stop, die and leave.

use crate::support::*;
use pelton::{Armed, Deadline, Error, Options, Policy, Publisher, Sent, StartFrom, Subscriber};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

/// Message `number`, of a size that depends on it.
fn message(number: u64) -> Vec<u8> {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.resize(8 + (number * 37 % 500) as usize, number as u8);
    bytes
}

/// What a subscriber has received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Tally {
    /// The number of the first message that it received or missed.
    first: u64,
    received: u64,
    missed: u64,
}

impl Tally {
    /// Receives until `deadline`; `None`: the broadcast has ended, with this error. Checks each message, and that each
    /// number between the first and the last was received or is counted as missed.
    fn receive(&mut self, subscriber: &mut Subscriber, deadline: Deadline) -> Result<bool, Error> {
        let next = self.first + self.received + self.missed;
        let Some(found) = subscriber.receive_until(deadline)? else { return Ok(false) };
        let (number, missed) = (found.number(), found.missed());
        assert!(found[..] == message(number)[..], "message {number} is damaged: {} bytes", found.len());
        if self.first == 0 {
            self.first = number - missed;
        } else {
            assert_eq!(number, next + missed, "the misses are not exact");
        }
        self.received += 1;
        self.missed += missed;
        Ok(true)
    }

    fn to_the_end(mut self, subscriber: &mut Subscriber) -> (Tally, Error) {
        let end = deadline();
        loop {
            match self.receive(subscriber, end.into()) {
                Ok(found) => assert!(found, "nothing came after {self:?}"),
                Err(error) => return (self, error),
            }
        }
    }
}

fn send(publisher: &mut Publisher, numbers: std::ops::RangeInclusive<u64>) {
    for number in numbers {
        assert_eq!(publisher.next_number(), number);
        assert_eq!(publisher.send_until(&message(number), deadline()).unwrap(), Sent::Sent);
    }
}

fn subscription(role: &Role) -> Subscriber {
    let policy = match role.get("policy") {
        "lag" => Policy::Lag,
        "latest" => Policy::Latest,
        _ => Policy::Gate,
    };
    let from = match (role.get("from"), role.number("last")) {
        (_, Some(last)) => StartFrom::Last(last),
        ("oldest", _) => StartFrom::Oldest,
        _ => StartFrom::Now,
    };
    let mut options = Options::new().policy(policy).start_from(from).connect_deadline(deadline());
    if let Some(ns) = role.number("lag_after_ns") {
        options = options.lag_after(Duration::from_nanos(ns));
    }
    options.connect_subscriber(role.get("name")).unwrap()
}

#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    match role.get("role") {
        // Receives to the end, or stops after some messages until the parent lets it go on.
        "subscriber" => {
            let mut subscriber = subscription(&role);
            report("joined");
            let mut tally = Tally::default();
            for _ in 0..role.number("pause_after").unwrap_or(0) {
                assert!(tally.receive(&mut subscriber, deadline().into()).unwrap());
            }
            if role.number("pause_after").is_some() {
                report("paused");
                read_line_from_parent();
            }
            let (tally, error) = tally.to_the_end(&mut subscriber);
            report(format!("{} {} {} {}", tally.first, tally.received, subscriber.missed(), word(&error)));
        }
        "publisher" => {
            let mut publisher = Options::new().capacity(1 << 16).publish_at(role.get("name")).unwrap();
            publisher.wait_subscribers_until(1, deadline()).unwrap();
            send(&mut publisher, 1..=100);
            report("sent");
            read_line_from_parent();
        }
        other => panic!("{other}"),
    }
}

fn subscriber(name: &str) -> Role {
    Role::new(child, "subscriber").with("name", name)
}

fn tally(child: &Child) -> (Tally, String) {
    let line = child.line();
    let words: Vec<_> = line.split(' ').collect();
    let number = |at: usize| words[at].parse().unwrap();
    (Tally { first: number(0), received: number(1), missed: number(2) }, words[3].to_owned())
}

#[test]
fn threads_receive_by_their_policies() {
    const COUNT: u64 = 30_000;
    let mut publisher = Options::new().capacity(1 << 16).publisher().unwrap();
    let mut join = |policy| publisher.subscriber(&Options::new().policy(policy).slack(4096)).unwrap();
    let subscribers = [Policy::Gate, Policy::Gate, Policy::Lag, Policy::Latest].map(|policy| (policy, join(policy)));
    std::thread::scope(|scope| {
        for (policy, mut subscriber) in subscribers {
            scope.spawn(move || {
                let (tally, error) = Tally::default().to_the_end(&mut subscriber);
                assert!(matches!(error, Error::Closed { unreleased: 0 }), "{error}");
                assert_eq!(subscriber.missed(), tally.missed);
                assert_eq!(subscriber.counters().messages, tally.received);
                assert_eq!((tally.first, tally.received + tally.missed), (1, COUNT), "{policy:?}");
                assert!(policy != Policy::Gate || tally.missed == 0);
            });
        }
        send(&mut publisher, 1..=COUNT);
        assert_eq!(publisher.counters().messages, COUNT);
        drop(publisher);
    });
}

#[test]
fn a_subscriber_begins_where_it_wants_and_is_shown_until_it_leaves() {
    let mut publisher = Options::new().capacity(1 << 16).history(50).publisher().unwrap();
    send(&mut publisher, 1..=200);
    let mut join = |from| publisher.subscriber(&Options::new().start_from(from)).unwrap();
    let mut starts = [StartFrom::Now, StartFrom::Last(50), StartFrom::Last(7), StartFrom::Oldest].map(&mut join);
    let first = starts.each_ref().map(Subscriber::next_number);
    assert!(first[3] <= 151, "the history is kept: {first:?}");
    assert_eq!(publisher.subscribers().len(), 4);
    send(&mut publisher, 201..=201);
    for (subscriber, wanted) in starts.iter_mut().zip([201, 151, 194, first[3]]) {
        let mut tally = Tally::default();
        while tally.receive(subscriber, Deadline::Now).unwrap() {}
        assert_eq!((tally.first, tally.received, tally.missed), (wanted, 202 - wanted, 0));
    }
    assert!(publisher.wait_released_until(Deadline::Now).unwrap());
    drop(starts);
    assert_eq!(publisher.admit().unwrap(), 0);
    assert!(publisher.subscribers().is_empty());
}

#[test]
fn a_publisher_refuses_a_subscriber_that_could_hold_it_up_too_long() {
    let directory = TestDir::new("a refusal says why");
    let options = Options::new().hold_max(Duration::from_secs(1));
    let mut publisher = options.publish_at(&directory.name()).unwrap();
    let gate = |ms| Options::new().lag_after(Duration::from_millis(ms));
    for (options, is_taken) in [
        (Options::new(), false),
        (gate(1001), false),
        (gate(1000), true),
        (Options::new().policy(Policy::Lag), true),
        (Options::new().policy(Policy::Latest), true),
    ] {
        let joined = publisher.subscriber(&options);
        assert_eq!(joined.is_ok(), is_taken, "{joined:?}");
        let name = directory.name();
        let connecting = std::thread::spawn(move || options.connect_subscriber(&name).map(drop));
        while !connecting.is_finished() {
            publisher.wait_subscribers_until(64, Instant::now() + Duration::from_millis(1)).unwrap();
        }
        match connecting.join().unwrap() {
            Ok(()) => assert!(is_taken),
            Err(Error::Refused(why)) => assert!(!is_taken && why.contains("hold_max"), "{why}"),
            Err(error) => panic!("{error}"),
        }
    }
    // All 64, of which some have left.
    let mut subscribers = Vec::new();
    while publisher.admit().unwrap() < 64 {
        subscribers.push(publisher.subscriber(&Options::new().policy(Policy::Lag)).unwrap());
    }
    assert!(matches!(publisher.subscriber(&Options::new().policy(Policy::Lag)), Err(Error::Refused(_))));
    subscribers.pop();
    publisher.subscriber(&Options::new().policy(Policy::Lag)).unwrap();
}

#[test]
fn a_sender_under_the_name_of_a_publisher_is_refused() {
    let directory = TestDir::new("a wrong role is refused");
    let (name, mut publisher) = (directory.name(), Publisher::bind(&directory.name()).unwrap());
    let connecting = std::thread::spawn(move || pelton::Receiver::connect(&name).map(drop));
    while !connecting.is_finished() {
        publisher.wait_subscribers_until(1, Instant::now() + Duration::from_millis(1)).unwrap();
    }
    let error = connecting.join().unwrap().unwrap_err();
    assert!(error.to_string().contains("publisher"), "{error}");
}

/// Gates receive each message once and in order; a killed one that held the publisher up frees it at once; a stopped
/// one that may lag learns its misses.
#[test]
fn processes_receive_by_their_policies_also_when_they_are_stopped_and_killed() {
    const COUNT: u64 = 20_000;
    let directory = TestDir::new("a publisher goes on");
    let name = directory.name();
    let mut publisher = Options::new().capacity(1 << 16).publish_at(&name).unwrap();
    let start = |role: Role| Child::start(role);
    let gate = start(subscriber(&name));
    let lag = start(subscriber(&name).with("policy", "lag"));
    let latest = start(subscriber(&name).with("policy", "latest"));
    let stopped = start(subscriber(&name).with("pause_after", 10).with("lag_after_ns", 1_000_000));
    let killed = start(subscriber(&name).with("pause_after", 20));
    let all = [&gate, &lag, &latest, &stopped, &killed];
    assert!(publisher.wait_subscribers_until(all.len(), deadline()).unwrap());
    all.iter().for_each(|child| child.expect("joined"));
    send(&mut publisher, 1..=30);
    stopped.expect("paused");
    killed.expect("paused");
    // Both hold the lane; one of them lags after a while.
    let mut number = 31;
    while publisher.send_until(&message(number), Instant::now() + Duration::from_millis(50)).unwrap() == Sent::Sent {
        number += 1;
        assert!(number < COUNT);
    }
    let states = publisher.subscribers();
    let holder = states.iter().find(|state| state.holds.is_some()).expect("a subscriber holds the publisher up");
    assert_eq!((holder.peer.pid, holder.policy, holder.lag_after), (killed.pid(), Policy::Gate, None));
    assert!(!holder.holds.unwrap().is_zero() && holder.behind == number - 21, "{holder:?}");
    let lagging = states.iter().find(|state| state.peer.pid == stopped.pid()).unwrap();
    assert!(lagging.lags && lagging.lag_after == Some(Duration::from_millis(1)), "{lagging:?}");
    // The death frees a publisher that waits, without another event.
    let killing = std::thread::spawn(move || killed.kill());
    send(&mut publisher, number..=COUNT);
    killing.join().unwrap();
    assert_eq!(publisher.admit().unwrap(), 4);
    // A late one gets the messages that are there, and all later ones.
    let late = start(subscriber(&name).with("from", "oldest"));
    assert!(publisher.wait_subscribers_until(5, deadline()).unwrap());
    late.expect("joined");
    send(&mut publisher, COUNT + 1..=2 * COUNT);
    let mut stopped = stopped;
    stopped.write_line("go on");
    assert!(publisher.wait_released_until(deadline()).unwrap());
    publisher.close().unwrap();
    for (child, policy) in [(gate, "gate"), (lag, "lag"), (latest, "latest"), (stopped, "stopped"), (late, "late")] {
        let (tally, end) = tally(&child);
        child.wait_for_success();
        assert_eq!(end, "Closed", "{policy}");
        assert_eq!(tally.first + tally.received + tally.missed, 2 * COUNT + 1, "{policy}: {tally:?}");
        assert!(!matches!(policy, "gate" | "late") || tally.missed == 0, "{policy}: {tally:?}");
        assert!(policy != "stopped" || tally.missed > 0, "{policy}: {tally:?}");
        assert!(policy == "late" || tally.first == 1, "{policy}: {tally:?}");
    }
}

#[test]
fn subscribers_drain_the_lane_of_a_dead_publisher_and_continue_with_its_successor() {
    let directory = TestDir::new("the death of a publisher is reported");
    let name = directory.name();
    let publishing = Child::start(Role::new(child, "publisher").with("name", &name));
    let connect = Options::new().connect_deadline(deadline());
    let mut subscriber = connect.connect_subscriber(&name).unwrap();
    assert_eq!(subscriber.peer().unwrap().pid, publishing.pid());
    publishing.expect("sent");
    publishing.kill();
    let (tally, error) = Tally::default().to_the_end(&mut subscriber);
    assert!(matches!(error, Error::PeerDied { unreleased: 0 }), "{error}");
    assert_eq!(tally, Tally { first: 1, received: 100, missed: 0 });
    assert!(matches!(subscriber.try_receive(), Err(Error::PeerDied { .. })));
    assert!(!subscriber.resume_until(Deadline::Now).unwrap());
    let mut successor = Options::new().capacity(1 << 16).publish_at(&name).unwrap();
    std::thread::scope(|scope| {
        let resumed = scope.spawn(|| subscriber.resume_until(deadline()).unwrap());
        assert!(successor.wait_subscribers_until(1, deadline()).unwrap());
        assert!(resumed.join().unwrap());
    });
    send(&mut successor, 1..=10);
    drop(successor);
    let (tally, error) = Tally::default().to_the_end(&mut subscriber);
    assert!(matches!(error, Error::Closed { unreleased: 0 }), "{error}");
    assert_eq!(tally, Tally { first: 1, received: 10, missed: 0 });
}

/// As with bindings, which wait in slices: none of these lasts until the publisher's next call.
#[test]
fn a_resume_in_slices_joins_a_publisher_that_seldom_calls_and_keeps_the_descriptor() {
    let directory = TestDir::new("a successor is joined");
    let name = directory.name();
    let mut publisher = Options::new().capacity(1 << 16).publish_at(&name).unwrap();
    let mut opening = Options::new().start_connect_subscriber(&name).unwrap();
    let mut subscriber = loop {
        if let Some(opened) = opening.try_finish().unwrap() {
            break opened;
        }
        publisher.admit().unwrap();
    };
    let descriptor = subscriber.as_raw_fd();
    for _ in 0..3 {
        send(&mut publisher, 1..=1);
        assert_eq!(subscriber.receive_until(deadline()).unwrap().unwrap().number(), 1);
        drop(publisher);
        assert!(matches!(subscriber.receive_until(deadline()), Err(Error::Closed { .. })));
        assert!(!subscriber.resume_until(Deadline::Now).unwrap());
        publisher = Options::new().capacity(1 << 16).publish_at(&name).unwrap();
        let end = Instant::now() + Duration::from_secs(20);
        while !subscriber.resume_until(Deadline::Now).unwrap() {
            assert!(Instant::now() < end, "it has not joined");
            assert!(matches!(subscriber.try_receive(), Err(Error::Closed { .. })));
            publisher.admit().unwrap();
        }
        assert_eq!(publisher.subscriber_count(), 1);
        assert!(matches!(subscriber.resume_until(Deadline::Now), Err(Error::Refused(_))));
        assert_eq!(subscriber.as_raw_fd(), descriptor);
        assert!(subscriber.arm().unwrap().is_waiting());
        send(&mut publisher, 1..=1);
        readable(subscriber.as_fd());
        assert!(!subscriber.arm().unwrap().is_waiting());
        assert!(subscriber.try_receive().unwrap().is_some_and(|delivery| delivery.number() == 1));
        // Nothing of the former publisher is left that would keep the descriptor readable.
        while subscriber.arm().unwrap().is_waiting() && is_readable(subscriber.as_fd()) {
            assert!(Instant::now() < end, "the descriptor stays readable");
        }
        publisher.close().unwrap();
        readable(subscriber.as_fd());
        assert!(matches!(subscriber.arm(), Err(Error::Closed { .. })));
        publisher = Options::new().capacity(1 << 16).publish_at(&name).unwrap();
        while !subscriber.resume_until(Deadline::Now).unwrap() {
            assert!(Instant::now() < end, "it has not joined");
            publisher.admit().unwrap();
        }
    }
}

/// A program uses the publisher while its event loop waits for space.
#[test]
fn no_call_takes_the_wake_up_that_an_event_loop_waits_for() {
    type Call = fn(&mut Publisher);
    let calls: [(&str, Call); 6] = [
        ("a small message", |publisher| assert_eq!(publisher.try_send(b"small").unwrap(), Sent::Sent)),
        ("a large message", |publisher| _ = publisher.try_send(&[0; 30_000]).unwrap()),
        ("admit", |publisher| _ = publisher.admit().unwrap()),
        ("a subscriber that leaves", |publisher| drop(publisher.subscriber(&Options::new()).unwrap())),
        ("wait_released_until", |publisher| _ = publisher.wait_released_until(Deadline::Now).unwrap()),
        ("busy_poll", |publisher| assert!(publisher.busy_poll(5).unwrap())),
    ];
    for (what, call) in calls {
        for released_before in [5, u64::MAX] {
            let mut publisher = Options::new().capacity(1 << 16).publisher().unwrap();
            let mut subscriber = publisher.subscriber(&Options::new()).unwrap();
            while publisher.try_send(&[0; 1000]).unwrap() == Sent::Sent {}
            assert!(publisher.arm(30_000).unwrap().is_waiting());
            // Fewer than half ring nobody.
            let mut receive = |most: u64| (0..most).take_while(|_| subscriber.try_receive().unwrap().is_some()).count();
            receive(released_before);
            call(&mut publisher);
            receive(u64::MAX);
            let end = Instant::now() + Duration::from_secs(20);
            while {
                assert!(readable_until(publisher.as_fd(), end), "after {what}, with {released_before} released");
                publisher.arm(30_000).unwrap().is_waiting()
            } {}
        }
    }
    // An event loop may wait for a subscriber, too.
    let mut publisher = Options::new().publisher().unwrap();
    assert_eq!(publisher.admit().unwrap(), 0);
    let _subscriber = publisher.subscriber(&Options::new()).unwrap();
    readable(publisher.as_fd());
}

#[test]
fn descriptors_report_messages_space_subscribers_and_ends() {
    let directory = TestDir::new("the descriptors become readable");
    let mut publisher = Options::new().capacity(1 << 16).publish_at(&directory.name()).unwrap();
    assert!(publisher.arm(100).unwrap() == Armed::Ready, "an empty lane has space");
    publisher.disarm();
    let mut opening = Options::new().start_connect_subscriber(&directory.name()).unwrap();
    let mut opened = None;
    while opened.is_none() {
        let readable =
            pelton_testkit::wait_for_readable(&[publisher.as_fd(), opening.as_fd()], "the handshake continues");
        if readable[0] {
            publisher.admit().unwrap();
        }
        if readable[1] {
            opened = opening.try_finish().unwrap();
        }
    }
    let mut subscriber = opened.unwrap();
    assert_eq!(publisher.admit().unwrap(), 1);
    assert!(subscriber.arm().unwrap().is_waiting());
    send(&mut publisher, 1..=1);
    readable(subscriber.as_fd());
    assert!(!subscriber.arm().unwrap().is_waiting());
    assert_eq!(subscriber.try_receive().unwrap().as_deref(), Some(&message(1)[..]));
    let mut number = 2;
    while publisher.try_send(&message(number)).unwrap() == Sent::Sent {
        number += 1;
    }
    assert!(publisher.arm(1000).unwrap().is_waiting());
    let mut tally = Tally::default();
    while tally.receive(&mut subscriber, Deadline::Now).unwrap() {}
    assert_eq!(tally.received, number - 2);
    readable(publisher.as_fd());
    assert!(!publisher.arm(1000).unwrap().is_waiting());
    publisher.disarm();
    // One that holds the publisher up, and may do so for a millisecond.
    let lagging = publisher.subscriber(&Options::new().lag_after(Duration::from_millis(1))).unwrap();
    let fill = |publisher: &mut Publisher, subscriber: &mut Subscriber, number: &mut u64| {
        while publisher.try_send(&message(*number)).unwrap() == Sent::Sent {
            *number += 1;
            assert!(subscriber.try_receive().unwrap().is_some());
        }
    };
    fill(&mut publisher, &mut subscriber, &mut number);
    while publisher.arm(1000).unwrap().is_waiting() {
        readable(publisher.as_fd());
    }
    assert!(publisher.subscribers()[1].lags);
    drop(lagging);
    assert!(subscriber.arm().unwrap().is_waiting());
    drop(publisher);
    readable(subscriber.as_fd());
    assert!(matches!(subscriber.arm(), Err(Error::Closed { unreleased: 0 })));
}

/// The publisher asks the next slowest for a ring when it lets the slowest lag while it arms.
#[test]
fn a_publisher_that_lets_one_subscriber_lag_is_rung_by_the_next_one() {
    let mut publisher = Options::new().capacity(1 << 16).publisher().unwrap();
    let _stopped = publisher.subscriber(&Options::new().lag_after(Duration::from_millis(1))).unwrap();
    let mut slow = publisher.subscriber(&Options::new()).unwrap();
    let mut number = 1;
    while publisher.try_send(&message(number)).unwrap() == Sent::Sent {
        number += 1;
    }
    while !publisher.subscribers()[0].lags {
        assert!(publisher.arm(1000).unwrap().is_waiting());
        if !publisher.subscribers()[0].lags {
            readable(publisher.as_fd());
        }
    }
    // It is armed, and the only subscriber that can ring is the second.
    let mut tally = Tally::default();
    while tally.receive(&mut slow, Deadline::Now).unwrap() {}
    readable(publisher.as_fd());
    assert!(!publisher.arm(1000).unwrap().is_waiting());
}

#[test]
fn everything_is_released_when_the_wait_for_that_ends() {
    let mut publisher = Options::new().capacity(1 << 16).publisher().unwrap();
    let subscribers = [(); 3].map(|()| publisher.subscriber(&Options::new()).unwrap());
    std::thread::scope(|scope| {
        for mut subscriber in subscribers {
            scope.spawn(move || Tally::default().to_the_end(&mut subscriber));
        }
        for round in 0..1000 {
            send(&mut publisher, 5 * round + 1..=5 * round + 5);
            assert!(publisher.wait_released_until(deadline()).unwrap());
            let behind: Vec<_> = publisher.subscribers().iter().map(|state| state.behind).collect();
            assert_eq!(behind, [0; 3], "in round {round}");
        }
        drop(publisher);
    });
}

#[test]
fn a_subscriber_from_the_last_no_messages_has_released_them() {
    let mut publisher = Options::new().capacity(1 << 20).publisher().unwrap();
    send(&mut publisher, 1..=100);
    let mut subscriber = publisher.subscriber(&Options::new().start_from(StartFrom::Last(0))).unwrap();
    assert_eq!(subscriber.next_number(), 101);
    assert!(subscriber.try_receive().unwrap().is_none());
    assert!(publisher.wait_released_until(Deadline::Now).unwrap());
}

/// A gate that may lag, and is passed up to the newest message, has caught up once it knows that.
#[test]
fn a_gate_that_was_passed_up_to_the_newest_message_gates_again() {
    let mut publisher = Options::new().capacity(1 << 16).publisher().unwrap();
    let options = Options::new().lag_after(Duration::from_nanos(1));
    let mut stopped = publisher.subscriber(&options).unwrap();
    let large = vec![7; publisher.message_bytes_max() as usize];
    for _ in 0..10 {
        assert_eq!(publisher.send_until(&large, deadline()).unwrap(), Sent::Sent);
        assert_eq!(publisher.send_until(&large[..20_000], deadline()).unwrap(), Sent::Sent);
    }
    assert!(publisher.subscribers()[0].lags);
    while stopped.try_receive().unwrap().is_some() {}
    assert_eq!(publisher.subscribers()[0].behind, 0);
    assert!(!publisher.subscribers()[0].lags);
}

/// The time counts from the beginning of the wait, however often the subscriber releases a message meanwhile.
/// By a lane so large that a waypoint's distance is more than the slack.
#[test]
fn a_laggard_within_its_slack_misses_nothing() {
    let mut publisher = Options::new().publisher().unwrap();
    let lag = Options::new().policy(Policy::Lag).slack(32 << 10);
    let mut subscriber = publisher.subscriber(&lag).unwrap();
    for round in 0..100 {
        for _ in 0..100 {
            publisher.send(&[0; 256]).unwrap();
        }
        for message in 1..=100 {
            let received = subscriber.try_receive().unwrap().expect("it is there");
            assert_eq!((received.number(), received.missed()), (100 * round + message, 0));
        }
    }
}

#[test]
fn a_slow_gate_lags_after_its_time_though_it_goes_on_and_is_not_waited_for() {
    let mut publisher = Options::new().capacity(4 << 20).publisher().unwrap();
    let mut slow = publisher.subscriber(&Options::new().lag_after(Duration::from_millis(15))).unwrap();
    while publisher.try_send(&[0; 8]).unwrap() == Sent::Sent {}
    // Fewer than a waypoint: they make no space.
    for _ in 0..900 {
        let begun = Instant::now();
        assert!(slow.try_receive().unwrap().is_some());
        while begun.elapsed() < Duration::from_micros(25) {}
        if publisher.try_send(&[0; 8]).unwrap() == Sent::Sent {
            break;
        }
    }
    let state = publisher.subscribers().remove(0);
    assert!(state.lags && state.holds.is_none(), "{state:?}");
    while slow.try_receive().unwrap().is_some() {}
    // It has caught up, gates again, and stops.
    publisher.send(&[0; 8]).unwrap();
    assert!(!publisher.subscribers()[0].lags);
    assert!(publisher.wait_released_until(deadline()).unwrap());
    assert!(publisher.subscribers()[0].lags);
    assert_eq!(slow.try_receive().unwrap().as_deref(), Some(&[0; 8][..]), "nothing needed its space");
}

#[test]
fn a_publisher_that_sends_rarely_after_a_burst_admits_a_subscriber() {
    let directory = TestDir::new("a rare sender admits");
    let mut publisher = Options::new().capacity(1 << 16).publish_at(&directory.name()).unwrap();
    send(&mut publisher, 1..=10_000);
    let mut opening = Options::new().start_connect_subscriber(&directory.name()).unwrap();
    let mut number = 10_001;
    while opening.try_finish().unwrap().is_none() {
        let readable =
            pelton_testkit::wait_for_readable(&[publisher.as_fd(), opening.as_fd()], "the handshake continues");
        if readable[0] {
            // Longer than the interval of the checks.
            std::thread::sleep(Duration::from_millis(20));
            send(&mut publisher, number..=number);
            number += 1;
        }
        assert!(number < 10_064, "it is not admitted");
    }
}

#[test]
fn a_subscriber_refuses_a_publisher_that_is_larger_than_it_takes() {
    let directory = TestDir::new("a large publisher is refused");
    let mut publisher = Options::new().capacity(1 << 20).publish_at(&directory.name()).unwrap();
    for (options, word) in [
        (Options::new().capacity(1 << 16), "lower the publisher's capacity"),
        (Options::new().message_bytes_max(1000), "message_bytes_max option, or lower the publisher's"),
    ] {
        let name = directory.name();
        let connecting = std::thread::spawn(move || options.connect_subscriber(&name).map(drop));
        while !connecting.is_finished() {
            publisher.wait_subscribers_until(1, Instant::now() + Duration::from_millis(1)).unwrap();
        }
        let error = connecting.join().unwrap().unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    }
    let none = Options::new().capacity(1).connect_subscriber(&directory.name());
    assert!(matches!(none, Err(Error::Option { option: "capacity", .. })), "{none:?}");
}
