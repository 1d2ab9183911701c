//! Bridges end to end: what they refuse, in which words, and channels by connect, of many senders, and with secrets.

#[path = "../support/mod.rs"]
mod support;

mod calls;
mod run;
mod servers;

use async_nats::jetstream::{self, stream};
use pelton::{Deadline, Options, Receiver, Sender};
use rustix::process::Signal;
use std::{
    path::Path,
    time::{Duration, Instant},
};
use support::{DEADLINE, Running, Server, bridge, eventually, free_port, server_program};
use tempfile::TempDir;

/// A server, and a directory for the channels.
struct Place {
    here: TempDir,
    server: Server,
    runtime: tokio::runtime::Runtime,
}

impl Place {
    /// Stops the NATS server; returns when none of its threads runs.
    fn stop_server(&self) {
        self.server.process.signal(Signal::STOP);
        let threads = format!("/proc/{}/task", self.server.process.pid());
        eventually("the server's threads to be stopped", || {
            let stats = std::fs::read_dir(&threads).unwrap().map(|thread| thread.unwrap().path().join("stat"));
            stats.into_iter().all(|stat| std::fs::read_to_string(stat).unwrap().contains(") T "))
        });
    }

    fn new(options: &[&str]) -> Option<Place> {
        let program = server_program()?;
        let here = tempfile::tempdir_in("/dev/shm").unwrap();
        let server = Server::start(&program, &here.path().join("nats"), options);
        Some(Place::of(here, server))
    }

    fn of(here: TempDir, server: Server) -> Place {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        Place { here, server, runtime }
    }

    fn path(&self, name: &str) -> String {
        self.here.path().join(name).display().to_string()
    }

    fn channel(&self, name: &str) -> String {
        format!("path:{}", self.path(name))
    }

    fn start(&self, name: &'static str, words: &[&str]) -> Running {
        let url = self.server.url();
        Running::start(name, bridge(words).args(["--nats", &url, "--stream", "S"]))
    }

    fn out(&self, more: &[&str]) -> Running {
        let channel = self.channel("a");
        self.start("out", &[&["out", &channel, "--subject", "s.a"], more].concat())
    }

    fn in_(&self, more: &[&str]) -> Running {
        let channel = self.channel("b");
        self.start("in", &[&["in", "s.>", &channel], more].concat())
    }

    fn jetstream(&self) -> jetstream::Context {
        self.runtime.block_on(async { jetstream::new(async_nats::connect(self.server.url()).await.unwrap()) })
    }

    fn make_stream(&self, config: stream::Config) {
        let config = stream::Config { name: "S".to_owned(), subjects: vec!["s.>".to_owned()], ..config };
        self.runtime.block_on(self.jetstream().create_stream(config)).unwrap();
    }

    fn publish(&self, subject: &str, payload: &'static str) {
        let jetstream = self.jetstream();
        let done = async { jetstream.publish(subject.to_owned(), payload.into()).await.unwrap().await };
        self.runtime.block_on(done).unwrap();
    }

    fn sender(&self) -> Sender {
        Options::new().create_sender(self.path("a")).unwrap()
    }

    fn receiver(&self) -> Receiver {
        Options::new().create_receiver(self.path("b")).unwrap()
    }
}

/// The next message, as text.
fn next(receiver: &mut Receiver) -> String {
    loop {
        match receiver.find_record(Deadline::from(DEADLINE)) {
            Ok(Some(_)) => return String::from_utf8(receiver.receive().unwrap().to_vec()).unwrap(),
            Ok(None) => panic!("no message within {DEADLINE:?}"),
            Err(error) => {
                assert!(error.is_closed() || error.is_peer_died(), "{error}");
                receiver.resume().unwrap();
            }
        }
    }
}

/// Sends a message, whether or not there is a receiver.
fn send(sender: &mut Sender, text: &str) {
    while let Err(error) = sender.send(text.as_bytes()) {
        assert!(error.is_closed() || error.is_peer_died(), "{error}");
        sender.resume_until(Instant::now()).unwrap();
    }
}

/// Ends with `code`, and its last words contain `words`.
#[track_caller]
fn refused(mut running: Running, code: i32, words: &[&str]) {
    let (found, errors) = running.wait();
    assert_eq!(found, Some(code), "{errors}");
    for word in words {
        assert!(errors.contains(word), "{word:?} is not in: {errors}");
    }
}

#[test]
fn no_server_no_jetstream_and_no_stream_are_reported() {
    let Some(place) = Place::new(&[]) else { return };
    let nobody = format!("nats://127.0.0.1:{}", free_port());
    let words = ["out", "x", "--subject", "s", "--stream", "S", "--connect-timeout", "0.2", "--nats"];
    refused(Running::start("out", bridge(&words).arg(&nobody)), 4, &[&nobody, "start the server"]);
    refused(Running::start("out", bridge(&words).arg("nats://u:secret@h")), 2, &["--user-file"]);
    refused(place.out(&[]), 3, &["no stream S", "create it"]);
    refused(place.out(&["--id", "\u{e9}"]), 2, &["ASCII"]);
    let no_jetstream = place.here.path().join("plain.conf");
    let port = free_port();
    std::fs::write(&no_jetstream, format!("listen: 127.0.0.1:{port}\n")).unwrap();
    let program = server_program().unwrap();
    let _plain = Running::start("nats-server", std::process::Command::new(program).arg("-c").arg(&no_jetstream));
    let url = format!("nats://127.0.0.1:{port}");
    let words = ["in", "s", "path:/nowhere", "--stream", "S", "--nats", &url];
    refused(Running::start("in", &mut bridge(&words)), 4, &["--jetstream"]);
}

#[test]
fn streams_that_remove_messages_are_refused() {
    let Some(place) = Place::new(&[]) else { return };
    let retention = stream::RetentionPolicy::WorkQueue;
    place.make_stream(stream::Config { retention, ..Default::default() });
    refused(place.out(&[]), 3, &["work queue"]);
    refused(place.in_(&[]), 3, &["work queue"]);
    place.runtime.block_on(place.jetstream().delete_stream("S")).unwrap();
    place.make_stream(stream::Config { max_messages: 5, ..Default::default() });
    refused(place.out(&[]), 3, &["max_msgs 5", "--allow-limits"]);
    refused(place.in_(&[]), 3, &["max_msgs 5", "--allow-limits"]);
    refused(place.out(&["--allow-limits", "--require-replicas", "3"]), 3, &["--require-replicas"]);
}

#[test]
fn a_bridge_outwards_continues_after_a_limit_has_removed_its_last_message() {
    let Some(place) = Place::new(&[]) else { return };
    place.make_stream(stream::Config { max_messages: 1, ..Default::default() });
    let mut sender = place.sender();
    let _out = place.out(&["--allow-limits"]);
    for number in 0..3 {
        sender.send(b"ours").unwrap();
        eventually("the message", || sender.unreleased() == 0);
        // Of another subject: the stream keeps one message.
        place.publish("s.other", if number == 0 { "first" } else { "next" });
    }
}

#[test]
fn a_foreign_message_on_the_subject_stops_a_bridge_outwards_and_loses_nothing() {
    let Some(place) = Place::new(&[]) else { return };
    place.make_stream(stream::Config::default());
    place.publish("s.a", "foreign");
    refused(place.out(&[]), 3, &["not of a bridge", "message 1 "]);
    // Between two messages of a running bridge.
    let mut sender = place.sender();
    let channel = place.channel("a");
    let mut running = place.start("out", &["out", &channel, "--subject", "s.b"]);
    sender.send(b"one").unwrap();
    eventually("the first message", || sender.unreleased() == 0);
    place.publish("s.b", "foreign");
    sender.send(b"two").unwrap();
    let (code, errors) = running.wait();
    assert_eq!(code, Some(3), "{errors}");
    assert!(errors.contains("something else publishes there"), "{errors}");
    assert_eq!(sender.unreleased(), 1);
    // Inwards it is a message like any other.
    let _in = place.in_(&[]);
    let mut receiver = place.receiver();
    assert_eq!([next(&mut receiver), next(&mut receiver), next(&mut receiver)], ["foreign", "one", "foreign"]);
}

#[test]
fn two_bridges_do_not_interleave_and_a_standby_takes_over() {
    let Some(place) = Place::new(&[]) else { return };
    let mut sender = place.sender();
    let mut first = place.out(&["--create", "--id", "x"]);
    first.says("out: ");
    // The channel's receiver, or the position, is taken.
    let standby = place.out(&["--standby", "--id", "x"]);
    standby.says("standing by");
    let mut reads = place.in_(&[]);
    reads.says("in: ");
    let mut receiver = place.receiver();
    sender.send(b"one").unwrap();
    assert_eq!(next(&mut receiver), "one");
    let second = place.in_(&["--standby"]);
    second.says("standing by");
    first.kill();
    reads.kill();
    standby.says("out: ");
    second.says("in: ");
    send(&mut sender, "two");
    assert_eq!(next(&mut receiver), "two");
    // Another channel with the same name: the bridge that published last continues, the other one stops.
    let other = place.channel("other");
    let mut foreign = Options::new().create_sender(place.path("other")).unwrap();
    foreign.send(b"three").unwrap();
    let _other = place.start("out", &["out", &other, "--subject", "s.a", "--id", "x"]);
    assert_eq!(next(&mut receiver), "three");
    send(&mut sender, "four");
    refused(standby, 3, &["another bridge with the name \"x\""]);
    refused(place.out(&["--id", "y"]), 3, &["of the bridge \"x\""]);
}

#[test]
fn a_stream_made_anew_or_gone_back_is_detected() {
    let Some(mut place) = Place::new(&[]) else { return };
    place.make_stream(stream::Config::default());
    let mut running = place.in_(&[]);
    let mut receiver = place.receiver();
    place.publish("s.a", "one");
    assert_eq!(next(&mut receiver), "one");
    let store = place.here.path().join("nats/store");
    let copy = place.here.path().join("copy");
    place.server.process.kill();
    std::process::Command::new("cp").arg("-a").args([&store, &copy]).status().unwrap();
    place.server.start_again();
    place.server.wait_until_up();
    place.publish("s.a", "two");
    assert_eq!(next(&mut receiver), "two");
    // The server loses what it had acknowledged, as after a crash of its machine; then others follow in its place.
    place.server.process.kill();
    std::fs::remove_dir_all(&store).unwrap();
    std::process::Command::new("cp").arg("-a").args([&copy, &store]).status().unwrap();
    place.server.start_again();
    place.server.wait_until_up();
    let (code, errors) = running.wait();
    assert_eq!(code, Some(3), "{errors}");
    assert!(errors.contains("gone back: its last sequence is 1, and 2 is in the channel"), "{errors}");
    place.publish("s.a", "another two");
    refused(place.in_(&[]), 3, &["stored at another time"]);
    place.runtime.block_on(place.jetstream().delete_stream("S")).unwrap();
    place.make_stream(stream::Config::default());
    refused(place.in_(&[]), 3, &["made anew"]);
}

#[test]
fn a_consumer_deleted_underneath_and_messages_purged_before_they_were_read() {
    let Some(place) = Place::new(&[]) else { return };
    place.make_stream(stream::Config::default());
    let mut running = place.in_(&[]);
    let mut receiver = place.receiver();
    place.publish("s.a", "one");
    assert_eq!(next(&mut receiver), "one");
    let stream = place.runtime.block_on(place.jetstream().get_stream("S")).unwrap();
    place.runtime.block_on(async {
        use futures_util::TryStreamExt as _;
        let names: Vec<String> = stream.consumer_names().try_collect().await.unwrap();
        assert_eq!(names.len(), 1);
        stream.delete_consumer(&names[0]).await.unwrap();
    });
    place.publish("s.a", "two");
    assert_eq!(next(&mut receiver), "two");
    running.kill();
    place.publish("s.a", "three");
    place.publish("s.a", "four");
    place.runtime.block_on(async { stream.purge().keep(1).await.unwrap() });
    refused(place.in_(&[]), 3, &["sequences 3 to 3", "removed before they were read"]);
    let _in = place.in_(&["--allow-limits"]);
    assert_eq!(next(&mut receiver), "four");
}

#[test]
fn messages_removed_while_a_bridge_reads_are_detected() {
    let Some(place) = Place::new(&[]) else { return };
    place.make_stream(stream::Config::default());
    static LARGE: [u8; 60_000] = [b'x'; 60_000];
    let jetstream = place.jetstream();
    // More than the bridge reads ahead.
    const COUNT: u64 = 250;
    place.runtime.block_on(async {
        for _ in 0..COUNT {
            jetstream.publish("s.a", LARGE[..].into()).await.unwrap().await.unwrap();
        }
    });
    let mut running = place.in_(&[]);
    let mut receiver = place.receiver();
    assert!(receiver.find_record(Deadline::from(DEADLINE)).unwrap().is_some());
    place.runtime.block_on(async { jetstream.get_stream("S").await.unwrap().purge().keep(1).await.unwrap() });
    let mut count = 0;
    let deadline = Instant::now() + DEADLINE;
    while running.has_ended().is_none() {
        assert!(Instant::now() < deadline, "{count} messages, and no end");
        if let Ok(Some(_)) = receiver.find_record(Deadline::from(Duration::from_millis(20))) {
            drop(receiver.receive().unwrap());
            count += 1;
        }
    }
    while receiver.find_record(Deadline::Now).is_ok_and(|found| found.is_some()) {
        drop(receiver.receive().unwrap());
        count += 1;
    }
    // What had come before the gap is in the channel.
    let from = format!("sequences {} to {}", count + 1, COUNT - 1);
    refused(running, 3, &[&from, "removed before they were read"]);
}

#[test]
fn a_channel_with_messages_needs_a_place_to_begin() {
    let Some(place) = Place::new(&[]) else { return };
    place.make_stream(stream::Config::default());
    for text in ["one", "two", "three"] {
        place.publish("s.a", text);
    }
    let mut receiver = place.receiver();
    Options::new().open_sender(place.path("b")).unwrap().send(b"earlier").unwrap();
    assert_eq!(next(&mut receiver), "earlier");
    refused(place.in_(&[]), 3, &["--start"]);
    let mut running = place.in_(&["--start", "2"]);
    assert_eq!([next(&mut receiver), next(&mut receiver)], ["two", "three"]);
    // Another sender, while nothing is in doubt: the bridge does not know what of the stream that was.
    running.kill();
    Options::new().connect_deadline(DEADLINE).open_sender(place.path("b")).unwrap().send(b"between").unwrap();
    assert_eq!(next(&mut receiver), "between");
    refused(place.in_(&[]), 3, &["another sender"]);
}

#[test]
fn by_connect_senders_survive_a_killed_bridge_and_nothing_is_lost() {
    let Some(place) = Place::new(&[]) else { return };
    let name = format!("unix:{}", place.path("socket"));
    let start = || place.start("out", &["out", &name, "--subject", "s.{lane}", "--create", "--packed"]);
    let mut running = start();
    running.says("out: ");
    let mut senders: Vec<Sender> =
        (0..3).map(|_| Options::new().connect_deadline(DEADLINE).connect_sender(&name).unwrap()).collect();
    let _in = place.in_(&["--create"]);
    let mut receiver = place.receiver();
    let mut wanted = [1, 1, 1];
    for round in 1..=4 {
        for (index, sender) in senders.iter_mut().enumerate() {
            for number in round * 100 - 99..=round * 100 {
                sender.send(format!("{index} {number}").as_bytes()).unwrap();
            }
        }
        running.kill();
        running = start();
        for sender in &mut senders {
            // It detects the death, and offers its lane to the next bridge.
            eventually("the bridge's death", || {
                sender.wait_released_until(Deadline::from(Duration::from_millis(50))).is_err()
                    || sender.unreleased() == 0
            });
            match sender.resume() {
                Ok(()) => {}
                Err(error) => panic!("{error}"),
            }
        }
        while wanted.iter().any(|wanted| *wanted <= round * 100) {
            let text = next(&mut receiver);
            let (index, number) = text.split_once(' ').unwrap();
            let index: usize = index.parse().unwrap();
            assert_eq!(number.parse(), Ok(wanted[index]), "of sender {index}");
            wanted[index] += 1;
        }
    }
}

#[test]
fn inwards_by_connect_the_surviving_receiver_says_where_to_continue() {
    let Some(place) = Place::new(&[]) else { return };
    place.make_stream(stream::Config::default());
    let (name, position) = (format!("unix:{}", place.path("socket")), place.path("position"));
    refused(place.start("in", &["in", "s.a", &name]), 2, &["--position"]);
    let start = || place.start("in", &["in", "s.a", &name, "--position", &position]);
    let listener = Options::new().listen(&name).unwrap();
    let mut running = start();
    let mut receiver = listener.accept_receiver().unwrap();
    for round in ["one", "two", "three", "four"] {
        place.publish("s.a", round);
        // Committed, and not released.
        let found = receiver.find_record(Deadline::from(DEADLINE)).unwrap();
        assert!(found.is_some());
        running.kill();
        running = start();
        assert_eq!(&*receiver.receive().unwrap(), round.as_bytes());
        assert!(receiver.receive().is_err());
        receiver.resume().unwrap();
    }
    // Both ends go: what was released does not come again.
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(running.pid() as i32).unwrap(),
        rustix::process::Signal::TERM,
    )
    .unwrap();
    let (code, errors) = running.wait();
    assert_eq!(code, Some(143), "{errors}");
    drop(receiver);
    place.publish("s.a", "five");
    let _in = start();
    let mut receiver = listener.accept_receiver().unwrap();
    assert_eq!(next(&mut receiver), "five");
}

#[test]
fn secrets_come_from_files() {
    let Some(place) = Place::new(&["authorization { user: u, password: \"p w\" }"]) else { return };
    let file = |name: &str, text: &str| {
        let path = place.path(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let (right, wrong, short) = (file("right", "u\np w\n"), file("wrong", "u\nx\n"), file("short", "u\n"));
    refused(place.out(&["--user-file", &wrong, "--create"]), 3, &["refused"]);
    refused(place.out(&["--user-file", &short, "--create"]), 2, &["two lines"]);
    refused(place.out(&["--user-file", &place.path("none"), "--create"]), 2, &["reading"]);
    let out = place.out(&["--user-file", &right, "--create"]);
    out.says("out: ");
    let shown = std::fs::read(Path::new("/proc").join(out.pid().to_string()).join("cmdline")).unwrap();
    assert!(!String::from_utf8_lossy(&shown).contains("p w"));
}

#[test]
fn once_ends_when_everything_is_stored() {
    let Some(place) = Place::new(&[]) else { return };
    let mut sender = place.sender();
    for number in 0..1000 {
        sender.send(format!("{number}").as_bytes()).unwrap();
    }
    drop(sender);
    let (code, errors) = place.out(&["--create", "--once"]).wait();
    assert_eq!(code, Some(0), "{errors}");
    let _in = place.in_(&[]);
    let mut receiver = place.receiver();
    for number in 0..1000 {
        assert_eq!(next(&mut receiver), number.to_string());
    }
}
