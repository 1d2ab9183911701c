//! Flushing: every message reaches the sink once and in order, for any sender, whatever the sink or its process does
//! meanwhile.

use crate::support::*;
use pelton::{Chunk, Error, Forward, LaneId, Options, Sender, Sink, Wait};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

/// The offset of the sleep word in a sender's page.
const SLEEP: usize = 256;
const LONG: Option<Duration> = Some(Duration::from_secs(3600));

/// The content of a sink: for each sender, which its messages name, the numbers in order of arrival.
#[derive(Clone, Default)]
struct Seen {
    numbers: Arc<Mutex<BTreeMap<u32, Vec<u32>>>>,
    writes: Arc<AtomicUsize>,
}

fn numbered(id: u32, number: u32, bytes: usize) -> Vec<u8> {
    let mut message = vec![number as u8; bytes.max(8)];
    message[..4].copy_from_slice(&id.to_le_bytes());
    message[4..8].copy_from_slice(&number.to_le_bytes());
    message
}

impl Seen {
    fn take(&self, runs: &[Chunk<'_>]) {
        let mut numbers = self.numbers.lock().unwrap();
        self.writes.fetch_add(1, SeqCst);
        for run in runs {
            assert_eq!(run.payloads().count(), run.message_count() as usize);
            assert_eq!(run.bytes()[4..8], run.first_seq().to_le_bytes());
            for message in run.payloads() {
                let word = |at: usize| u32::from_le_bytes(message[at..at + 4].try_into().unwrap());
                assert!(message[8..].iter().all(|byte| *byte == word(4) as u8));
                numbers.entry(word(0)).or_default().push(word(4));
            }
        }
    }

    fn sink(&self) -> impl Sink + use<> {
        let seen = self.clone();
        move |runs: &[Chunk<'_>]| {
            seen.take(runs);
            Ok(())
        }
    }

    /// Each of `senders`' first `count` messages once, in order, and nothing else.
    #[track_caller]
    fn check(&self, senders: u32, count: u32) {
        let numbers = self.numbers.lock().unwrap();
        assert_eq!(numbers.keys().copied().collect::<Vec<_>>(), (0..senders).collect::<Vec<_>>());
        for (id, numbers) in &*numbers {
            assert!(numbers.iter().copied().eq(0..count), "of {id}: {} messages", numbers.len());
        }
    }

    fn count(&self) -> usize {
        self.numbers.lock().unwrap().values().map(Vec::len).sum()
    }

    /// Waits until that many messages have arrived.
    fn wait_for(&self, count: usize) {
        let until = deadline();
        while self.count() < count {
            assert!(Instant::now() < until, "{} of {count} messages came", self.count());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    let count = role.number("count").unwrap() as u32;
    let id = role.number("id").unwrap() as u32;
    let options = Options::new().capacity(1 << 18).connect_deadline(deadline());
    let mut sender = options.connect_sender(role.get("name")).unwrap();
    for number in 0..count {
        sender.send(&numbered(id, number, 100)).unwrap();
    }
    report("sent");
    read_line_from_parent();
}

#[test]
fn messages_of_one_sender_are_flushed_up_to_its_close() {
    let _hang = Watchdog::new("a flush ends with its sender");
    let soon = Some(Duration::from_millis(10));
    // A sender that spins for free space may wait for the interval.
    for (wait, interval) in [(Wait::Block, LONG), (Wait::Block, soon), (Wait::Spin, soon), (Wait::Block, None)] {
        let (mut sender, receiver) = Options::new().capacity(1 << 16).wait(wait).threads().unwrap();
        let seen = Seen::default();
        let mut flush =
            pelton::Flush::new(&Options::new().flush_interval(interval).flush_bytes(1 << 20), receiver, seen.sink())
                .unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for number in 0..20_000 {
                    // Some messages take a large part of the lane, which holds much less than one flush writes.
                    let bytes = if number % 1000 == 0 { 30_000 } else { number as usize % 300 };
                    sender.send(&numbered(0, number, bytes)).unwrap();
                }
            });
            flush.run().unwrap();
        });
        seen.check(1, 20_000);
    }
}

#[test]
fn a_deadline_ends_a_flush_under_continuous_load() {
    let _hang = Watchdog::new("a flush ends at its deadline");
    let (mut sender, receiver) = Options::new().capacity(1 << 16).threads().unwrap();
    sender.send(b"first").unwrap();
    let writes = Arc::new(AtomicUsize::new(0));
    let counted = writes.clone();
    // After each write there is another message to write.
    let sink = move |_: &[Chunk<'_>]| {
        counted.fetch_add(1, SeqCst);
        sender.send(b"another")
    };
    let mut flush = pelton::Flush::new(&Options::new().flush_bytes(1), receiver, sink).unwrap();
    assert!(!flush.run_until(Instant::now() + Duration::from_millis(20)).unwrap());
    let so_far = writes.load(SeqCst);
    assert!(!flush.run_until(Instant::now()).unwrap());
    assert!(so_far >= 1 && writes.load(SeqCst) == so_far + 1);
}

#[test]
fn flushing_survives_threads_and_processes_that_join_leave_and_die() {
    let dir = TestDir::new("a flush of many senders ends");
    let receiver = Options::new().gather_at(&dir.name()).unwrap();
    let senders = receiver.senders().unwrap();
    let seen = Seen::default();
    let mut flush = pelton::Flush::new(&Options::new().flush_interval(LONG), receiver, seen.sink()).unwrap();
    let children: Vec<_> = (0..3)
        .map(|id| {
            let role = Role::new(child, "sender").with("name", dir.name()).with("id", id).with("count", 5000);
            Child::start(role)
        })
        .collect();
    std::thread::scope(|scope| {
        for id in 3..6 {
            let mut sender = senders.sender().unwrap();
            scope.spawn(move || {
                for number in 0..5000 {
                    sender.send(&numbered(id, number, 50)).unwrap();
                }
            });
        }
        scope.spawn(|| {
            for child in children {
                child.expect("sent");
                child.kill();
            }
        });
        while seen.count() < 30_000 {
            assert!(!flush.run_until(Instant::now() + Duration::from_millis(20)).unwrap());
            flush.flush().unwrap();
        }
    });
    seen.check(6, 5000);
}

#[test]
fn the_last_messages_of_a_sender_that_left_are_flushed() {
    let _hang = Watchdog::new("messages of a lane that leaves are flushed");
    let (senders, receiver) = Options::new().capacity(1 << 20).gather().unwrap();
    let seen = Seen::default();
    let mut flush = pelton::Flush::new(&Options::new().flush_interval(LONG), receiver, seen.sink()).unwrap();
    for id in 0..3 {
        let mut sender = senders.sender().unwrap();
        sender.send(&numbered(id, 0, 9)).unwrap();
        // Taken, and not due.
        assert!(!flush.run_until(Instant::now()).unwrap());
        sender.send(&numbered(id, 1, 9)).unwrap();
        drop(sender);
        assert!(!flush.run_until(Instant::now()).unwrap());
        assert_eq!(seen.writes.load(SeqCst), 0);
    }
    drop(senders);
    flush.flush().unwrap_err();
    seen.check(3, 2);
    assert_eq!(seen.writes.load(SeqCst), 1);
}

#[test]
fn a_small_amount_is_flushed_after_the_interval() {
    let dir = TestDir::new("little is flushed in time");
    let receiver = Options::new().gather_at(&dir.name()).unwrap();
    let seen = Seen::default();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (seen, stop, mut sender) = (&seen, &stop, receiver.senders().unwrap().sender().unwrap());
        let interval = Some(Duration::from_millis(5));
        let mut flush = pelton::Flush::new(&Options::new().flush_interval(interval), receiver, seen.sink()).unwrap();
        scope.spawn(move || {
            while !stop.load(SeqCst) {
                flush.run_until(Instant::now() + Duration::from_millis(50)).unwrap();
            }
        });
        for number in 0..3 {
            sender.send(&numbered(0, number, 10)).unwrap();
            seen.wait_for(number as usize + 1);
        }
        stop.store(true, SeqCst);
    });
    seen.check(1, 3);
}

#[test]
fn a_failed_sink_gets_the_same_chunk_again_and_nothing_is_released_before() {
    let _hang = Watchdog::new("a failing sink loses nothing");
    let (mut sender, receiver) = Options::new().capacity(1 << 20).threads().unwrap();
    let seen = Seen::default();
    let (count, fails) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(true)));
    let sink = {
        let (seen, count, fails) = (seen.clone(), count.clone(), fails.clone());
        move |runs: &[Chunk<'_>]| {
            count.store(runs.iter().map(|run| run.message_count() as usize).sum(), SeqCst);
            if fails.load(SeqCst) {
                return Err(Error::Sink("not now".to_owned()));
            }
            seen.take(runs);
            Ok(())
        }
    };
    let mut flush = pelton::Flush::new(&Options::new().flush_interval(LONG), receiver, sink).unwrap();
    for number in 0..10 {
        sender.send(&numbered(0, number, 10)).unwrap();
    }
    for more in 0..3 {
        let error = flush.flush().unwrap_err();
        assert!(matches!(&error, Error::Sink(text) if text == "not now"), "{error}");
        assert_eq!((count.load(SeqCst), sender.unreleased()), (10, 10 + more), "just the same again");
        sender.send(&numbered(0, 10 + more as u32, 10)).unwrap();
    }
    fails.store(false, SeqCst);
    flush.flush().unwrap();
    assert_eq!(sender.unreleased(), 0);
    sender.send(&numbered(0, 13, 10)).unwrap();
    drop(sender);
    // The end is reported after the messages before it are in the sink, even if that fails at first.
    fails.store(true, SeqCst);
    assert!(matches!(flush.run(), Err(Error::Sink(_))));
    fails.store(false, SeqCst);
    flush.run().unwrap();
    seen.check(1, 14);
}

/// A sink that outlives its flush, and knows its content.
#[derive(Clone, Default)]
struct Kept {
    seen: Seen,
    last: Arc<Mutex<HashMap<LaneId, u32>>>,
}

impl Sink for Kept {
    fn write(&mut self, runs: &[Chunk<'_>]) -> pelton::Result<()> {
        self.seen.take(runs);
        for run in runs {
            let header = run.payloads().count() as u32 - 1;
            self.last.lock().unwrap().insert(run.lane(), run.first_seq() + header);
        }
        Ok(())
    }

    fn last_seq(&self, lane: LaneId) -> Option<u32> {
        self.last.lock().unwrap().get(&lane).copied()
    }
}

/// Sends by a path, where the end of a receiver is reported once.
fn send_to_the_next(sender: &mut Sender, message: &[u8]) {
    if let Err(error) = sender.send(message) {
        assert!(error.is_closed(), "{error}");
        sender.send(message).unwrap();
    }
}

#[test]
fn messages_written_but_not_released_are_not_written_again() {
    let dir = TestDir::new("a path channel's flush continues after a death");
    let path = dir.path().join("c");
    let mut sender = Options::new().capacity(1 << 20).create_sender(&path).unwrap();
    let sink = Kept::default();
    for round in 0..3u32 {
        for number in 0..10 {
            send_to_the_next(&mut sender, &numbered(0, round * 10 + number, 20));
        }
        // Writes, and exits before it has released: as if killed there.
        let mut dying = sink.clone();
        let receiver = Options::new().open_receiver(&path).unwrap();
        let mut flush = pelton::Flush::new(&Options::new(), receiver, move |runs: &[Chunk<'_>]| {
            Sink::write(&mut dying, runs).unwrap();
            Err(Error::Sink("killed".to_owned()))
        })
        .unwrap();
        // The check would find messages written again.
        flush.flush().unwrap_err();
        drop(flush);
        send_to_the_next(&mut sender, &numbered(0, round * 10 + 10, 20));
        let receiver = Options::new().open_receiver(&path).unwrap();
        let mut flush = pelton::Flush::new(&Options::new(), receiver, sink.clone()).unwrap();
        flush.flush().unwrap();
        assert_eq!(sender.unreleased(), 0, "what was skipped is released");
        drop(flush);
        sink.seen.numbers.lock().unwrap().get_mut(&0).unwrap().pop();
        let last = &mut *sink.last.lock().unwrap();
        assert_eq!(last.len(), 1, "one lane is one lane for every receiver");
    }
    sink.seen.check(1, 30);
    // Another channel at the same path is a different one.
    drop(sender);
    pelton::inspect::remove(&path).unwrap();
    let mut sender = Options::new().capacity(1 << 20).create_sender(&path).unwrap();
    sender.send(&numbered(1, 0, 20)).unwrap();
    let receiver = Options::new().open_receiver(&path).unwrap();
    pelton::Flush::new(&Options::new(), receiver, sink.clone()).unwrap().flush().unwrap();
    assert_eq!(sink.seen.numbers.lock().unwrap()[&1], [0]);
    assert_eq!(sink.last.lock().unwrap().len(), 2);
}

#[test]
fn messages_are_forwarded_to_another_channel_once_though_it_ends_between() {
    let dir = TestDir::new("forwarding continues with a successor");
    let (mut sender, receiver) = Options::new().capacity(1 << 20).threads().unwrap();
    let path = dir.path().join("c");
    let onward = Options::new().capacity(1 << 16).create_sender(&path).unwrap();
    let mut flush = pelton::Flush::new(&Options::new().flush_interval(None), receiver, Forward::new(onward)).unwrap();
    let mut first = Options::new().open_receiver(&path).unwrap();
    for number in 0..1000 {
        sender.send(&numbered(0, number, 200)).unwrap();
    }
    drop(sender);
    std::thread::scope(|scope| {
        let (report_result, reported) = mpsc::channel();
        scope.spawn(move || {
            // Reported after the receiver has ended, in the middle of a chunk. It is the sink's end, not the
            // channel's.
            report_result.send(flush.run()).unwrap();
            flush.run().unwrap();
        });
        let mut got: Vec<u32> = Vec::new();
        let word = |message: &[u8]| u32::from_le_bytes(message[4..8].try_into().unwrap());
        for _ in 0..100 {
            got.push(word(&first.receive_until(deadline()).unwrap().unwrap()));
        }
        drop(first);
        // The rest exceeds the free space.
        let reported = reported.recv_timeout(DEADLINE).unwrap();
        assert!(matches!(reported, Err(Error::Sink(_))), "{reported:?}");
        let mut second = Options::new().open_receiver(&path).unwrap();
        while got.len() < 1000 {
            got.push(word(&second.receive_until(deadline()).unwrap().unwrap()));
        }
        assert!(got.iter().copied().eq(0..1000));
    });
}

#[test]
fn messages_of_many_appending_threads_are_in_order_by_thread() {
    let _hang = Watchdog::new("threads append");
    for interval in [None, Some(Duration::from_micros(100))] {
        let seen = Seen::default();
        let options = Options::new().flush_bytes(1 << 16).flush_interval(interval);
        let appenders = pelton::Appenders::new(&options, seen.sink()).unwrap();
        std::thread::scope(|scope| {
            for id in 0..8 {
                let appenders = &appenders;
                scope.spawn(move || {
                    let mut own = appenders.appender().unwrap();
                    for number in 0..20_000 {
                        let message = numbered(id, number, number as usize % 40);
                        // Copied, by another appender, and in place.
                        match number % 2000 {
                            0..1000 => own.append(&message).unwrap(),
                            1999 => {
                                // Messages of the previous appender must be there first.
                                own.flush().unwrap();
                                own = appenders.appender().unwrap();
                                own.append(&message).unwrap();
                            }
                            _ => {
                                let mut reservation = own.reserve(message.len() + 3).unwrap();
                                reservation[..message.len()].copy_from_slice(&message);
                                reservation.commit_bytes(message.len()).unwrap();
                            }
                        }
                    }
                });
            }
        });
        appenders.sync().unwrap();
        seen.check(8, 20_000);
    }
}

#[test]
fn a_thread_appends_without_an_appender_and_the_last_part_is_flushed_at_the_end() {
    let _hang = Watchdog::new("the last part is flushed");
    for interval in [None, LONG] {
        let seen = Seen::default();
        let appenders = pelton::Appenders::new(&Options::new().flush_interval(interval), seen.sink()).unwrap();
        std::thread::scope(|scope| {
            for id in 0..4 {
                let appenders = appenders.clone();
                scope.spawn(move || (0..1000).for_each(|number| appenders.append(&numbered(id, number, 9)).unwrap()));
            }
        });
        assert_eq!(seen.count(), 0, "1000 messages are no bufferful");
        let appender = appenders.appender().unwrap();
        drop(appenders);
        assert_eq!(seen.count(), 0, "one thread may append");
        drop(appender);
        seen.check(4, 1000);
        assert_eq!(seen.writes.load(SeqCst), 1);
    }
}

#[test]
fn a_flush_includes_everything_appended_before_it() {
    let _hang = Watchdog::new("a flush has everything");
    let seen = Seen::default();
    let appenders = pelton::Appenders::new(&Options::new().flush_interval(None), seen.sink()).unwrap();
    let mut appender = appenders.appender().unwrap();
    for number in 0..100 {
        appender.append(&numbered(0, number, 9)).unwrap();
        appenders.append(&numbered(1, number, 9)).unwrap();
        if number % 2 == 0 {
            appenders.flush().unwrap()
        } else {
            appender.flush().unwrap()
        }
        assert_eq!(seen.count(), 2 * (number as usize + 1));
    }
    seen.check(2, 100);
}

#[test]
fn appended_messages_are_flushed_after_the_interval_and_the_timer_thread_ends() {
    let _hang = Watchdog::new("little is flushed in time");
    let seen = Seen::default();
    let of_flushing = || {
        let threads = std::fs::read_dir("/proc/self/task").unwrap();
        let name = |path: std::path::PathBuf| std::fs::read_to_string(path.join("comm")).unwrap_or_default();
        threads.filter(|thread| name(thread.as_ref().unwrap().path()).trim() == "pelton-flush").count()
    };
    let appenders =
        pelton::Appenders::new(&Options::new().flush_interval(Some(Duration::from_millis(3))), seen.sink()).unwrap();
    for number in 0..5 {
        appenders.append(&numbered(0, number, 9)).unwrap();
        seen.wait_for(number as usize + 1);
    }
    assert!(of_flushing() >= 1);
    drop(appenders);
    seen.check(1, 5);
    // Threads of other tests end as well.
    let until = deadline();
    while of_flushing() != 0 {
        assert!(Instant::now() < until, "the thread has not ended");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_failing_sink_loses_no_appended_message() {
    let _hang = Watchdog::new("a failing sink loses nothing");
    let seen = Seen::default();
    let calls = Arc::new(AtomicU64::new(0));
    let sink = {
        let (seen, calls) = (seen.clone(), calls.clone());
        move |runs: &[Chunk<'_>]| {
            if calls.fetch_add(1, SeqCst) % 3 != 2 {
                return Err(Error::Sink("full".to_owned()));
            }
            seen.take(runs);
            Ok(())
        }
    };
    let appenders = pelton::Appenders::new(&Options::new().flush_bytes(1 << 16).flush_interval(None), sink).unwrap();
    std::thread::scope(|scope| {
        for id in 0..3 {
            let appenders = &appenders;
            scope.spawn(move || {
                let mut appender = appenders.appender().unwrap();
                for number in 0..20_000 {
                    let message = numbered(id, number, 30);
                    while let Err(error) = appender.append(&message) {
                        assert!(matches!(error, Error::Sink(_)), "{error}");
                    }
                }
            });
        }
    });
    while appenders.sync().is_err() {}
    seen.check(3, 20_000);
    assert!(calls.load(SeqCst) > 30);
}

#[test]
fn messages_as_large_as_the_buffer_are_appended_and_larger_ones_refused() {
    let sizes = Arc::new(Mutex::new(Vec::new()));
    let sink = {
        let sizes = sizes.clone();
        move |runs: &[Chunk<'_>]| {
            sizes.lock().unwrap().extend(runs.iter().flat_map(Chunk::payloads).map(<[u8]>::len));
            Ok(())
        }
    };
    let appenders = pelton::Appenders::new(&Options::new().flush_bytes(1 << 16).flush_interval(None), sink).unwrap();
    let mut appender = appenders.appender().unwrap();
    let most = (1 << 16) - 16;
    let mut random = Random::new(7);
    let mut wanted = Vec::new();
    for round in 0..300 {
        let bytes = if round % 3 == 0 { most } else { random.below(most as u64) as usize };
        appender.append(&vec![1; bytes]).unwrap();
        wanted.push(bytes);
        let refused = appender.append(&vec![1; most + 1]).unwrap_err();
        assert!(
            matches!(refused, Error::TooLarge { bytes, bytes_max } if (bytes, bytes_max) == (most as u64 + 1, most as u64))
        );
        assert!(matches!(appender.reserve(most + 1), Err(Error::TooLarge { .. })));
    }
    appenders.flush().unwrap();
    assert_eq!(*sizes.lock().unwrap(), wanted);
    for bytes in [0, 2 << 30] {
        let error = pelton::Appenders::new(&Options::new().flush_bytes(bytes), |_: &[Chunk<'_>]| Ok(())).unwrap_err();
        assert!(matches!(error, Error::Option { option: "flush_bytes", .. }), "{error}");
    }
}

#[test]
fn a_sink_that_panics_takes_nothing() {
    let _hang = Watchdog::new("a panic is not the end");
    let seen = Seen::default();
    let first = Arc::new(AtomicBool::new(true));
    let sink = {
        let seen = seen.clone();
        move |runs: &[Chunk<'_>]| {
            assert!(!first.swap(false, SeqCst), "the sink panics, as the test wants");
            seen.take(runs);
            Ok(())
        }
    };
    let appenders = pelton::Appenders::new(&Options::new().flush_interval(None), sink).unwrap();
    appenders.append(&numbered(0, 0, 9)).unwrap();
    assert!(std::thread::scope(|scope| scope.spawn(|| appenders.flush()).join()).is_err());
    appenders.append(&numbered(0, 1, 9)).unwrap();
    appenders.flush().unwrap();
    seen.check(1, 2);
}

#[test]
fn flushing_closes_the_descriptors_of_its_messages() {
    let (mut sender, receiver) = Options::new().threads().unwrap();
    let seen = Seen::default();
    let (read, write) = rustix::pipe::pipe().unwrap();
    sender.send(&numbered(0, 0, 9)).unwrap();
    sender.send_with_descriptors(&numbered(0, 1, 9), &[std::os::fd::AsFd::as_fd(&write)]).unwrap();
    sender.send(&numbered(0, 2, 9)).unwrap();
    drop(write);
    let mut flush = pelton::Flush::new(&Options::new().flush_interval(None), receiver, seen.sink()).unwrap();
    flush.flush().unwrap();
    seen.check(1, 3);
    // The sender keeps its own until it detects the release.
    assert_eq!(sender.unreleased(), 0);
    assert_eq!(rustix::io::read(&read, &mut [0; 1]).unwrap(), 0, "the other endpoint is gone");
}

#[test]
fn the_death_of_a_connected_sender_is_reported_after_its_messages_are_flushed() {
    let dir = TestDir::new("a death is reported");
    let listener = Options::new().listen(&dir.name()).unwrap();
    let role = Role::new(child, "sender").with("name", dir.name()).with("id", 0).with("count", 1000);
    let child = Child::start(role);
    let receiver = listener.accept_receiver().unwrap();
    let seen = Seen::default();
    let mut flush = pelton::Flush::new(&Options::new().flush_interval(LONG), receiver, seen.sink()).unwrap();
    child.expect("sent");
    child.kill();
    let error = flush.run().unwrap_err();
    assert!(error.is_peer_died(), "{error}");
    seen.check(1, 1000);
}

#[test]
fn the_sender_of_flushed_messages_detects_the_end_of_the_flush() {
    let (give, take) = mpsc::channel();
    let (mut sender, receiver): (Sender, _) = Options::new().threads().unwrap();
    let sink = move |runs: &[Chunk<'_>]| {
        give.send(runs[0].message_count()).unwrap();
        Ok(())
    };
    let mut flush = pelton::Flush::new(&Options::new().flush_interval(LONG), receiver, sink).unwrap();
    sender.send(b"one").unwrap();
    flush.flush().unwrap();
    sender.send(b"two").unwrap();
    // Taken, and never written.
    assert!(!flush.run_until(Instant::now()).unwrap());
    drop(flush);
    assert!(matches!(sender.wait_released().unwrap_err(), Error::Closed { unreleased: 1 }));
    assert_eq!(take.iter().collect::<Vec<_>>(), [1]);
}

#[test]
fn each_message_is_forwarded_once_after_the_sink_refused_some() {
    let dir = TestDir::new("forwarding continues");
    let path = dir.path().join("c");
    let (senders, receiver) = Options::new().capacity(1 << 20).gather().unwrap();
    let mut sending = [senders.sender().unwrap(), senders.sender().unwrap()];
    let mut onward = Options::new().capacity(1 << 16).create_receiver(&path).unwrap();
    let forward = Forward::new(Options::new().open_sender(&path).unwrap());
    let mut flush = pelton::Flush::new(&Options::new().flush_interval(LONG), receiver, forward).unwrap();
    let mut send = |numbers: std::ops::Range<u32>| {
        for number in numbers {
            (0..2).for_each(|id| sending[id].send(&numbered(id as u32, number, 300)).unwrap());
        }
    };
    send(0..300);
    let seen = Seen::default();
    let take = |receiver: &mut pelton::Receiver| {
        let message = receiver.receive_until(deadline()).unwrap().unwrap();
        let word = |at: usize| u32::from_le_bytes(message[at..at + 4].try_into().unwrap());
        seen.numbers.lock().unwrap().entry(word(0)).or_default().push(word(4));
    };
    std::thread::scope(|scope| {
        let flushing = scope.spawn(|| {
            let refused = flush.flush().unwrap_err();
            assert!(matches!(refused, Error::Sink(_)), "{refused}");
            flush
        });
        (0..20).for_each(|_| take(&mut onward));
        drop(onward);
        let mut flush = flushing.join().unwrap();
        // Of the first of the two chunks, part of which the sink has.
        send(300..350);
        let mut onward = Options::new().open_receiver(&path).unwrap();
        scope.spawn(move || flush.flush().unwrap());
        (20..700).for_each(|_| take(&mut onward));
    });
    seen.check(2, 350);
}

#[test]
fn a_damaged_chunk_is_reported_once_and_affects_no_other() {
    let record = |seq: u64, byte: u8| [&(seq << 32 | 8).to_le_bytes()[..], &[byte; 8]].concat();
    let (bad, good) = ([record(1, 1), record(9, 2)].concat(), [record(1, 3), record(2, 4)].concat());
    let run = |lane, bytes| Chunk::new(LaneId([lane, lane]), None, 1, 2, bytes);
    let (onward, mut receiver) = Options::new().capacity(1 << 16).threads().unwrap();
    let mut forward = Forward::new(onward);
    let runs = [run(1, &bad), run(2, &good)];
    assert!(matches!(forward.write(&runs), Err(Error::Corrupt(_))));
    forward.write(&runs).unwrap();
    let mut came = Vec::new();
    while let Some(message) = receiver.try_receive().unwrap() {
        came.push(message[0]);
    }
    assert_eq!(came, [1, 3, 4]);
}

#[test]
fn a_lane_stays_while_a_chunk_of_it_is_taken_after_a_held_message() {
    let (senders, mut receiver) = Options::new().capacity(1 << 20).gather().unwrap();
    let (mut leaves, mut stays) = (senders.sender().unwrap(), senders.sender().unwrap());
    stays.send(&numbered(1, 0, 8)).unwrap();
    leaves.send(&numbered(0, 0, 8)).unwrap();
    let held: Vec<_> = (0..2).map(|_| receiver.receive().unwrap().hold()).collect();
    leaves.send(&numbered(0, 1, 5000)).unwrap();
    let seen = Seen::default();
    let mut flush = pelton::Flush::new(&Options::new().flush_interval(LONG), receiver, seen.sink()).unwrap();
    flush.tick().unwrap();
    drop(leaves);
    (0..3).for_each(|_| _ = flush.tick().unwrap());
    drop(held);
    flush.tick().unwrap();
    flush.flush().unwrap();
    assert_eq!(*seen.numbers.lock().unwrap(), BTreeMap::from([(0, vec![1])]));
}

/// A sink that is due until it is written; it counts the polls.
struct Due(Arc<AtomicUsize>);
impl Sink for Due {
    fn write(&mut self, _: &[Chunk<'_>]) -> pelton::Result<()> {
        self.0.fetch_add(1, SeqCst);
        Ok(())
    }
    fn due(&self) -> Option<Instant> {
        (self.0.load(SeqCst) == 0).then(Instant::now)
    }
}

#[test]
fn a_due_sink_is_written_even_if_a_taken_chunk_is_not_due() {
    let _hang = Watchdog::new("a deadline passes");
    let (mut sender, receiver) = Options::new().threads().unwrap();
    sender.send(b"x").unwrap();
    let writes = Arc::new(AtomicUsize::new(0));
    let mut flush = pelton::Flush::new(&Options::new().flush_interval(LONG), receiver, Due(writes.clone())).unwrap();
    assert!(!flush.run_until(Instant::now() + Duration::from_millis(5)).unwrap());
    assert_eq!(writes.load(SeqCst), 1);
}

#[test]
fn a_message_too_large_spoils_nothing_and_buffers_are_always_filled() {
    let sizes = Arc::new(Mutex::new(Vec::new()));
    let sink = {
        let sizes = sizes.clone();
        move |runs: &[Chunk<'_>]| {
            sizes.lock().unwrap().extend(runs.iter().map(|run| run.bytes().len()));
            Ok(())
        }
    };
    let appenders = pelton::Appenders::new(&Options::new().flush_bytes(1 << 16).flush_interval(None), sink).unwrap();
    let mut appender = appenders.appender().unwrap();
    for _ in 0..2000 {
        appender.append(&[1; 992]).unwrap();
        assert!(matches!(appender.append(&vec![0; 2 << 20]), Err(Error::TooLarge { .. })));
    }
    let sizes = sizes.lock().unwrap();
    assert_eq!(sizes.len(), 2000 / 65);
    assert!(sizes.iter().all(|bytes| *bytes == 65 * 1000), "{sizes:?}");
}

#[test]
fn appenders_of_ended_threads_block_no_flush() {
    let seen = Seen::default();
    let options = <Options>::new().lanes(8).capacity(1 << 16).flush_bytes(1 << 16).flush_interval(None);
    let appenders = pelton::Appenders::new(&options.cast(), seen.sink()).unwrap();
    for number in 0..100 {
        appenders.appender().unwrap().append(&numbered(0, number, 9)).unwrap();
        std::thread::scope(|scope| scope.spawn(|| appenders.append(&numbered(1, number, 9)).unwrap()).join()).unwrap();
    }
    appenders.flush().unwrap();
    seen.check(2, 100);
}

#[test]
fn the_next_flush_returns_an_error_that_occurred_before_it() {
    struct Fails(Arc<AtomicUsize>);
    impl Sink for Fails {
        fn write(&mut self, _: &[Chunk<'_>]) -> pelton::Result<()> {
            match self.0.fetch_add(1, SeqCst) {
                0 => Err(Error::Sink("reported once".to_owned())),
                1 => panic!("the sink panics, as the test wants"),
                _ => Ok(()),
            }
        }
    }
    let calls = Arc::new(AtomicUsize::new(0));
    let options = Options::new().flush_interval(Some(Duration::from_millis(2)));
    let appenders = pelton::Appenders::new(&options, Fails(calls.clone())).unwrap();
    appenders.append(b"x").unwrap();
    let until = deadline();
    while calls.load(SeqCst) < 3 {
        assert!(Instant::now() < until, "nothing is flushed at intervals any more");
        std::thread::sleep(Duration::from_millis(1));
    }
    let reported = appenders.sync().unwrap_err();
    assert!(matches!(reported, Error::Sink(_)), "{reported}");
    appenders.sync().unwrap();
}

#[test]
fn a_sink_that_becomes_due_while_idle_is_written_without_another_interval() {
    let writes = Arc::new(AtomicUsize::new(0));
    let appenders = pelton::Appenders::new(&Options::new().flush_interval(LONG), Due(writes.clone())).unwrap();
    let until = deadline();
    while writes.load(SeqCst) == 0 {
        assert!(Instant::now() < until, "the sink is due, and nothing is written to it");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(appenders);
}

#[test]
fn a_sink_that_stays_due_is_polled_again_with_a_pause() {
    struct Busy(Arc<AtomicUsize>);
    impl Sink for Busy {
        fn write(&mut self, _: &[Chunk<'_>]) -> pelton::Result<()> {
            self.0.fetch_add(1, SeqCst);
            Ok(())
        }
        fn due(&self) -> Option<Instant> {
            Some(Instant::now())
        }
    }
    let (_sender, receiver) = Options::new().threads().unwrap();
    let writes = Arc::new(AtomicUsize::new(0));
    let mut flush = pelton::Flush::new(&Options::new().flush_interval(LONG), receiver, Busy(writes.clone())).unwrap();
    let began = Instant::now();
    while writes.load(SeqCst) < 3 {
        assert!(!flush.run_until(Instant::now() + Duration::from_millis(50)).unwrap());
    }
    // One each 10 ms, and one more in each call.
    let (writes, most) =
        (writes.load(SeqCst) as u128, began.elapsed().as_millis() / 10 + 2 * began.elapsed().as_millis() / 50);
    assert!(writes <= most + 4, "{writes} writes, where {most} were wanted");
}

#[test]
fn a_sink_that_appends_to_its_own_flush_is_refused() {
    let _hang = Watchdog::new("a sink that appends to its own ends");
    let own: Arc<Mutex<Option<pelton::Appenders>>> = Arc::default();
    let reported = Arc::new(Mutex::new(Vec::new()));
    let other = Seen::default();
    let others = pelton::Appenders::new(&Options::new().flush_interval(None), other.sink()).unwrap();
    let sink = {
        let (own, reported) = (own.clone(), reported.clone());
        let mut number = 0;
        move |_: &[Chunk<'_>]| {
            let Some(own) = own.lock().unwrap().clone() else { return Ok(()) };
            let mut reported = reported.lock().unwrap();
            reported.push(own.flush().unwrap_err());
            reported.push(own.sync().unwrap_err());
            let mut appender = own.appender().unwrap();
            // Until its buffer is full.
            let refused = (0..).find_map(|_| appender.append(&[0; 1000]).err());
            reported.push(refused.unwrap());
            // It may append to others.
            others.appender().unwrap().append(&numbered(0, number, 8)).unwrap();
            others.flush().unwrap();
            number += 1;
            Ok(())
        }
    };
    let appenders = pelton::Appenders::new(&Options::new().flush_bytes(1 << 16).flush_interval(None), sink).unwrap();
    *own.lock().unwrap() = Some(appenders.clone());
    appenders.append(b"by the thread's own").unwrap();
    appenders.flush().unwrap();
    other.wait_for(1);
    // The same within the thread's own append, when its buffer is full.
    while other.count() < 2 {
        appenders.append(&[1; 1000]).unwrap();
    }
    *own.lock().unwrap() = None;
    for error in &*reported.lock().unwrap() {
        assert!(matches!(error, Error::Refused(why) if why.contains("sink")), "{error}");
    }
    assert_eq!(reported.lock().unwrap().len(), 6);
    appenders.sync().unwrap();
}

#[test]
fn a_sink_that_drops_the_last_handle_is_dropped_after_everything_is_flushed() {
    let own: Arc<Mutex<Option<pelton::Appenders>>> = Arc::default();
    let (report_result, reported) = mpsc::channel();
    let sink = {
        let own = own.clone();
        move |runs: &[Chunk<'_>]| {
            for run in runs {
                report_result.send(run.message_count()).unwrap();
            }
            drop(own.lock().unwrap().take());
            Ok(())
        }
    };
    let appenders =
        pelton::Appenders::new(&Options::new().flush_interval(Some(Duration::from_millis(1))), sink).unwrap();
    let mut appender = appenders.appender().unwrap();
    // Nothing is flushed before the sink can reach the handle.
    {
        let mut slot = own.lock().unwrap();
        appender.append(b"one").unwrap();
        drop(appender);
        *slot = Some(appenders);
    }
    drop(own);
    let mut flushed = 0;
    loop {
        match reported.recv_timeout(DEADLINE) {
            Ok(messages) => flushed += messages,
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(error) => panic!("the sink is still there: {error}"),
        }
    }
    assert_eq!(flushed, 1);
}

#[test]
fn a_sender_that_marks_every_message_as_waiting_does_not_cause_a_write_each() {
    let dir = TestDir::new("an incremental flush ends");
    let listener = Options::new().listen(&dir.name()).unwrap();
    let socket = dir.socket();
    let connecting = std::thread::spawn(move || raw::RawPeer::sender(&socket));
    let receiver = listener.accept_receiver_until(deadline()).unwrap().expect("it connects");
    let peer = connecting.join().unwrap();
    let (writes, messages) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let sink = {
        let (writes, messages) = (writes.clone(), messages.clone());
        move |runs: &[Chunk<'_>]| {
            writes.fetch_add(1, SeqCst);
            messages.fetch_add(runs.iter().map(|run| run.message_count() as usize).sum(), SeqCst);
            Ok(())
        }
    };
    let mut flush = pelton::Flush::new(&Options::new().flush_interval(LONG), receiver, sink).unwrap();
    let began = Instant::now();
    // Together less than a quarter of the lane, the amount written at once.
    for number in 0..800u32 {
        peer.put(number as usize * 16, number + 1, 8);
        peer.shown[0].word(SLEEP).store(u64::from(number + 1) << 3 | 1, SeqCst);
        flush.tick().unwrap();
    }
    let most = began.elapsed().as_millis() as usize / 10 + 2;
    assert!(messages.load(SeqCst) > 0, "it is believed the first time");
    assert!(writes.load(SeqCst) <= most, "{} writes, where {most} were wanted", writes.load(SeqCst));
}
