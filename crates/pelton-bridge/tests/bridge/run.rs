//! `run`: many bridges in one process, their reload, `--check`, metrics and health.

use crate::{
    Place, next, refused, send,
    support::{Running, bridge, eventually, free_port},
};
use async_nats::jetstream::{self, stream};
use pelton::{Options, Receiver, Sender, Traceparent};
use rustix::process::Signal;
use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    os::unix::net::UnixDatagram,
    time::{Duration, Instant},
};

fn configure(place: &Place, text: &str) -> String {
    let path = place.path("bridges.toml");
    let url = place.server.url();
    std::fs::write(&path, format!("nats = \"{url}\"\nstream = \"S\"\n{text}")).unwrap();
    path
}

#[track_caller]
fn receive(receiver: &mut Receiver, numbers: std::ops::Range<u32>) {
    for number in numbers {
        assert_eq!(next(receiver), number.to_string());
    }
}

#[test]
fn a_reload_ends_and_starts_only_what_has_changed_and_loses_nothing() {
    let Some(place) = Place::new(&[]) else { return };
    place.make_stream(stream::Config::default());
    let (path, connect) = (place.path("a"), format!("unix:{}", place.path("socket")));
    let inward = |name: &str| {
        let channel = place.channel(&format!("to-{name}"));
        format!("[[in]]\nsubject = 's.{name}'\nchannel = '{channel}'\n")
    };
    let outward = |name: &str, channel: &str, more: &str| {
        format!("[[out]]\nchannel = '{channel}'\nsubject = 's.{name}'\n{more}\n")
    };
    let channel = format!("path:{path}");
    let both =
        |more: &str| [outward("a", &channel, more), outward("b", &connect, more), inward("a"), inward("b")].concat();
    let config = configure(&place, &both(""));
    let mut running = Running::start("run", &mut bridge(&["run", &config]));
    running.says("out: unix:");
    let (mut by_path, mut by_connect) = (place.sender(), Options::new().connect_sender(&connect).unwrap());
    let receiver = |name: &str| Options::new().create_receiver(place.path(&format!("to-{name}"))).unwrap();
    let mut receivers = [receiver("a"), receiver("b")];
    let mut sent = 0;
    let mut pass = |then: &dyn Fn()| {
        for number in sent..sent + 200 {
            let text = number.to_string();
            send(&mut by_path, &text);
            persist(&mut by_connect, |sender| sender.send(text.as_bytes()));
            if number == sent + 100 {
                then();
            }
        }
        // By connect, the sender gives its messages to the next receiver.
        persist(&mut by_connect, Sender::wait_released);
        receivers.iter_mut().for_each(|receiver| receive(receiver, sent..sent + 200));
        sent += 200;
    };
    pass(&|| {});
    // Both bridges outwards change, the others go on.
    configure(&place, &both("packed = true"));
    pass(&|| running.signal(Signal::HUP));
    running.says("reload: 2 go on, 2 have ended, 2 start");
    // An invalid file changes nothing.
    configure(&place, &both("colour = 'red'"));
    pass(&|| running.signal(Signal::HUP));
    running.says("reload refused, the bridges go on as before");
    running.says("--colour");
    // One is gone, a new one that is refused does not disturb the others.
    let lost = outward("lost", &place.channel("lost"), "stream = 'NONE'").replace("stream = 'S'", "");
    configure(&place, &[both("packed = true"), lost].concat());
    pass(&|| running.signal(Signal::HUP));
    running.says("lost has ended, until the next reload: the server has no stream NONE");
    pass(&|| {});
    running.signal(Signal::TERM);
    let (code, errors) = running.wait();
    assert_eq!(code, Some(143), "{errors}");
    assert_eq!(errors.matches("out: ").count(), 4, "{errors}");
    assert_eq!(errors.matches(" from sequence ").count(), 2, "{errors}");
}

/// Does `work` on the sender of a channel by connect, also after its receiver has ended.
fn persist(sender: &mut Sender, mut work: impl FnMut(&mut Sender) -> pelton::Result<()>) {
    while let Err(error) = work(sender) {
        assert!(error.is_closed() || error.is_peer_died(), "{error}");
        sender.resume().unwrap();
    }
}

/// By connect, a reload ends a bridge whose publish is undecided: its sender keeps the lane until the process ends.
#[test]
fn an_undecided_message_by_connect_waits_for_the_end_of_the_process_and_arrives_once() {
    let Some(place) = Place::new(&[]) else { return };
    place.make_stream(stream::Config::default());
    let name = format!("unix:{}", place.path("socket"));
    let table = |more: &str| format!("[[out]]\nchannel = '{name}'\nsubject = 's.a'\n{more}\n");
    let config = configure(&place, &table(""));
    let port = free_port();
    let start = || Running::start("run", &mut bridge(&["run", &config, "--metrics", &format!("127.0.0.1:{port}")]));
    let mut first = start();
    first.says("out: unix:");
    let mut sender = Options::new().connect_sender(&name).unwrap();
    sender.send(b"1").unwrap();
    sender.wait_released().unwrap();
    place.stop_server();
    sender.send(b"2").unwrap();
    eventually("a publish in flight", || has_publish_in_flight(port));
    configure(&place, &table("packed = true"));
    first.signal(Signal::HUP);
    first.says("reload: 0 go on, 1 have ended, 1 start");
    place.server.process.signal(Signal::CONT);
    first.says("restart the process, its senders wait for that");
    first.signal(Signal::TERM);
    first.wait();
    let _second = start();
    persist(&mut sender, Sender::wait_released);
    persist(&mut sender, |sender| sender.send(b"3"));
    let _in = place.in_(&[]);
    let mut receiver = place.receiver();
    receive(&mut receiver, 1..4);
}

fn has_publish_in_flight(port: u16) -> bool {
    let (_, body) = page(port, "/metrics");
    body.lines().any(|line| line.starts_with("pelton_bridge_publishes_in_flight{") && !line.ends_with(" 0.0"))
}

#[test]
fn a_reload_that_moves_a_channel_decides_first_what_is_stored() {
    let Some(place) = Place::new(&[]) else { return };
    place.make_stream(stream::Config::default());
    let table = |subject: &str| format!("[[out]]\nchannel = 'path:a'\nsubject = '{subject}'\n");
    let config = configure(&place, &table("s.a"));
    let port = free_port();
    let mut sender = place.sender();
    let running = Running::start("run", &mut bridge(&["run", &config, "--metrics", &format!("127.0.0.1:{port}")]));
    send(&mut sender, "1");
    persist(&mut sender, Sender::wait_released);
    place.stop_server();
    send(&mut sender, "2");
    eventually("a publish in flight", || has_publish_in_flight(port));
    send(&mut sender, "3");
    configure(&place, &table("s.b"));
    running.signal(Signal::HUP);
    running.says("ends once the server says whether a message is stored");
    place.server.process.signal(Signal::CONT);
    running.says("to s.b in stream S");
    send(&mut sender, "4");
    // Of both subjects.
    let _in = place.in_(&[]);
    receive(&mut place.receiver(), 1..5);
    eventually("the release", || sender.unreleased() == 0);
    let jetstream = place.jetstream();
    let stored = async { jetstream.get_stream("S").await.unwrap().cached_info().state.messages };
    assert_eq!(place.runtime.block_on(stored), 4);
}

#[test]
fn a_reload_by_connect_waits_until_the_receiver_has_released_what_it_has() {
    let Some(place) = Place::new(&[]) else { return };
    place.make_stream(stream::Config::default());
    let table =
        |more: &str| format!("[[in]]\nsubject = 's.a'\nchannel = 'unix:socket'\nposition = 'position'\n{more}\n");
    let config = configure(&place, &table(""));
    let mut receiver: Receiver = Options::new().gather_at(&format!("unix:{}", place.path("socket"))).unwrap();
    let running = Running::start("run", &mut bridge(&["run", &config]));
    for text in ["1", "2", "3"] {
        place.publish("s.a", text);
    }
    assert_eq!(next(&mut receiver), "1");
    configure(&place, &table("traced = true"));
    running.signal(Signal::HUP);
    running.says("waits until the receiver of unix:");
    // It is 5 s later.
    receive(&mut receiver, 2..4);
    running.says("reload: 0 go on, 1 have ended, 1 start");
    place.publish("s.a", "4");
    receive(&mut receiver, 4..5);
}

/// A message that is stored and not released may be packed with others, and its successor does not pack.
#[test]
fn a_bridge_that_does_not_pack_succeeds_one_that_does() {
    let Some(place) = Place::new(&[]) else { return };
    place.make_stream(stream::Config::default());
    let mut sender = place.sender();
    for number in 0..100 {
        sender.send(format!("{number}").as_bytes()).unwrap();
    }
    let (url, channel) = (place.server.url(), place.channel("a"));
    let words = ["out", &channel, "--subject", "s.a", "--stream", "S", "--packed", "--nats", &url];
    let mut first = Running::start("out", bridge(&words).env("PELTON_BRIDGE_DIE_AT", "unreleased:1"));
    assert_eq!(first.wait().0, None);
    send(&mut sender, "100");
    let _second = place.out(&[]);
    persist(&mut sender, Sender::wait_released);
    let _in = place.in_(&[]);
    let mut receiver = place.receiver();
    receive(&mut receiver, 0..101);
    let jetstream = place.jetstream();
    let stored = async { jetstream.get_stream("S").await.unwrap().cached_info().state.messages };
    assert_eq!(place.runtime.block_on(stored), 2);
}

#[test]
fn a_process_without_bridges_ends_with_the_first_failure() {
    let Some(place) = Place::new(&[]) else { return };
    place.make_stream(stream::Config::default());
    let table = |name: &str, stream: &str| {
        format!("[[out]]\nchannel = '{}'\nsubject = 's.{name}'\nstream = '{stream}'\n", place.channel(name))
    };
    let config = configure(&place, "");
    let both = [table("a", "NONE"), table("b", "NONE")].concat();
    std::fs::write(&config, format!("nats = '{}'\n{both}", place.server.url())).unwrap();
    refused(Running::start("run", &mut bridge(&["run", &config])), 3, &["out path:", "no stream NONE"]);
}

#[test]
fn a_bridge_inwards_outlives_a_long_outage() {
    let Some(mut place) = Place::new(&[]) else { return };
    place.make_stream(stream::Config::default());
    let mut running = place.in_(&[]);
    running.says("from sequence");
    let began = Instant::now();
    place.server.process.kill();
    // Two requests to the server fail in this time.
    eventually("a long outage", || {
        assert_eq!(running.has_ended(), None, "{}", running.errors());
        began.elapsed() > Duration::from_secs(24)
    });
    place.server.start_again();
    place.server.wait_until_up();
    place.publish("s.a", "1");
    assert_eq!(next(&mut place.receiver()), "1");
}

#[test]
fn a_check_says_what_would_fail_and_carries_nothing() {
    let Some(place) = Place::new(&[]) else { return };
    let channel = place.channel("a");
    let out = format!("[[out]]\nchannel = '{channel}'\nsubject = 's.a'\n");
    let check = |text: &str| Running::start("run", &mut bridge(&["run", "--check", &configure(&place, text)]));
    refused(check(&out), 3, &["out path:", "no stream S"]);
    refused(check(&format!("{out}create = true")), 0, &["can run"]);
    // It has created nothing.
    refused(check(&out), 3, &["no stream S"]);
    place.make_stream(stream::Config::default());
    refused(check(&out), 0, &["can run"]);
    refused(check(&out.replace("s.a", "s.{lane}")), 0, &["can run"]);
    refused(check(&out.replace("s.a", "typo.a")), 3, &["does not take typo.a, only s.>"]);
    refused(check(&format!("{out}require-replicas = 3")), 3, &["has 1 replicas"]);
    let nobody = format!("nats = 'nats://127.0.0.1:{}'\nconnect-timeout = 0.1\n", free_port());
    refused(check(&format!("{out}{nobody}")), 0, &["the server was not checked", "no connection"]);
    refused(check("[[in]]\nsubject = 's.a'\nchannel = 'short'\n"), 2, &["[[in]] number 1: `short`", "--position"]);
    refused(check(&format!("{out}creds = '/nowhere'\n")), 2, &["--creds /nowhere"]);
    refused(check("[[out]]\n"), 2, &["bridges.toml", "channel is missing"]);
    assert!(!std::path::Path::new(&place.path("a")).exists());
    let words = ["run", "--check", "/nowhere.toml"];
    refused(Running::start("run", &mut bridge(&words)), 2, &["/nowhere.toml"]);
}

/// The body of a page, and its status.
fn page(port: u16, path: &str) -> (String, String) {
    let mut socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
    socket.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head[9..12].to_owned(), body.to_owned())
}

#[test]
fn metrics_and_health_say_what_the_bridges_do() {
    let Some(mut place) = Place::new(&[]) else { return };
    place.make_stream(stream::Config::default());
    let (a, b) = (place.channel("a"), place.channel("b"));
    let out = format!("[[out]]\nchannel = '{a}'\nsubject = 's.a'\n");
    let both = format!("{out}[[in]]\nsubject = 's.a'\nchannel = '{b}'\n");
    let config = configure(&place, &both);
    let port = free_port();
    let address = format!("127.0.0.1:{port}");
    let notified = UnixDatagram::bind(place.path("notify")).unwrap();
    let mut command = bridge(&["run", &config, "--metrics", &address]);
    let running = Running::start("run", command.env("NOTIFY_SOCKET", place.path("notify")));
    let state = || {
        let mut bytes = [0; 100];
        let count = notified.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..count].to_vec()).unwrap()
    };
    assert_eq!(state(), "READY=1");
    let (mut sender, mut receiver) = (place.sender(), place.receiver());
    for number in 0..100 {
        send(&mut sender, &number.to_string());
    }
    receive(&mut receiver, 0..100);
    let value = |metric: &str, name: &str| {
        let (_, body) = page(port, "/metrics");
        let begin = format!("pelton_bridge_{metric}{{bridge=\"{name}\"");
        let line = body.lines().find(|line| line.starts_with(&begin)).unwrap_or_else(|| panic!("{begin} in {body}"));
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    eventually("both bridges to have counted", || {
        value("messages_total", &a) == 100.0 && value("messages_total", &b) == 100.0
    });
    assert_eq!((value("payload_bytes_total", &a), value("payload_bytes_total", &b)), (190.0, 190.0));
    assert_eq!((value("acks_total", &a), value("publishes_in_flight", &a)), (100.0, 0.0));
    assert_eq!((value("lag_messages", &a), value("lag_bytes", &a), value("lag_seconds", &a)), (0.0, 0.0, 0.0));
    assert_eq!((value("lag_messages", &b), value("redeliveries_total", &b)), (0.0, 0.0));
    assert_eq!(page(port, "/health"), ("200".to_owned(), "2 of 2 carry\n".to_owned()));
    assert_eq!(page(port, "/").0, "404");
    // `pelton ls` shows the bridge on both channels, with its process.
    let shown = pelton::observe::Observer::new().channels().channels;
    let of = |name: &str| shown.iter().find(|channel| channel.name == name).expect("it is observed");
    let (first, second) = (&of(&a).receiver, &of(&b).lanes[0].sender);
    assert_eq!((first.pid, second.pid), (running.pid(), running.pid()));
    assert!(first.command.contains("pelton-bridge"), "{}", first.command);

    // While the receiver takes nothing, what waits is counted in the stream.
    let held = Options::new().capacity(64 << 10).create_receiver(place.path("c")).unwrap();
    let c = place.channel("c");
    configure(&place, &format!("{out}[[in]]\nsubject = 's.c'\nchannel = '{c}'\n"));
    running.signal(Signal::HUP);
    assert!(state().starts_with("RELOADING=1\n") && state() == "READY=1");
    let publish = |count: u32| {
        place.runtime.block_on(async {
            let jetstream = jetstream::new(async_nats::connect(place.server.url()).await.unwrap());
            let send = |number: u32| jetstream.publish("s.c", format!("{number:0100}").into());
            let sent = futures_util::future::try_join_all((0..count).map(send)).await.unwrap();
            futures_util::future::try_join_all(sent.into_iter().map(IntoFuture::into_future)).await.unwrap();
        });
    };
    let lags = |count: u32| {
        eventually("the lag", || value("lag_messages", &c) == f64::from(count) - value("messages_total", &c));
        value("lag_messages", &c)
    };
    publish(3000);
    let lag = lags(3000);
    assert!(lag > 1000.0 && value("lag_bytes", &c) > 100.0 * lag && value("lag_seconds", &c) > 0.0, "{lag}");
    // Behind everything that the server has sent ahead.
    publish(500);
    assert!(lags(3500) == lag + 500.0);
    let mut receiver_of_c = held;
    (0..3500).for_each(|_| drop(next(&mut receiver_of_c)));
    assert_eq!(lags(3500), 0.0);
    configure(&place, &both);
    running.signal(Signal::HUP);
    assert!(state().starts_with("RELOADING=1\n") && state() == "READY=1");
    eventually("both to carry", || page(port, "/health") == ("200".to_owned(), "2 of 2 carry\n".to_owned()));

    // Without a server, messages wait, and one publish is in flight.
    place.server.process.kill();
    eventually("the loss of the connections", || {
        let (status, text) = page(port, "/health");
        status == "503" && text.contains(&format!("out {a}: has no connection to NATS\n"))
    });
    for number in 100..110 {
        send(&mut sender, &number.to_string());
    }
    eventually("a publish in flight", || value("publishes_in_flight", &a) == 1.0);
    assert_eq!((value("lag_messages", &a), value("up", &a)), (10.0, 0.0));
    assert!(value("lag_bytes", &a) > 0.0 && value("lag_seconds", &a) > 0.0);
    place.server.start_again();
    receive(&mut receiver, 100..110);
    assert!(value("reconnects_total", &a) == 1.0 && value("reconnects_total", &b) == 1.0);
    eventually("both to carry", || page(port, "/health").0 == "200");

    // A bridge that was refused stays in the text until the next reload.
    let none = format!("[[out]]\nchannel = '{}'\nsubject = 's.c'\nstream = 'NONE'\n", place.channel("c"));
    configure(&place, &[out, none].concat());
    running.signal(Signal::HUP);
    let reloading = state();
    assert!(reloading.starts_with("RELOADING=1\nMONOTONIC_USEC="), "{reloading}");
    assert_eq!(state(), "READY=1");
    eventually("the refusal", || page(port, "/health").1.contains("no stream NONE"));
    assert_eq!(page(port, "/health").1.lines().count(), 1);

    // What fails again and again is a problem.
    configure(&place, &format!("[[out]]\nchannel = '{a}'\nsubject = 'typo.a'\n"));
    running.signal(Signal::HUP);
    assert!(state().starts_with("RELOADING=1\n"));
    assert_eq!(state(), "READY=1");
    send(&mut sender, "lost?");
    eventually("the problem", || page(port, "/health").1.contains("publishing: no stream takes the subject"));
    running.signal(Signal::TERM);
    assert_eq!(state(), "STOPPING=1");
}

#[test]
fn traceparents_pass_in_both_directions_one_by_one_and_packed() {
    let Some(place) = Place::new(&[]) else { return };
    place.make_stream(stream::Config::default());
    let span = |number: u8| Traceparent::new([7; 16], [number; 8], 1).unwrap();
    let mut sender = Options::new().traced(true).create_sender(place.path("a")).unwrap();
    let mut receiver = Options::new().traced(true).create_receiver(place.path("b")).unwrap();
    let mut run = |more: &[&str], numbers: std::ops::Range<u8>| {
        for number in numbers.clone() {
            let traceparent = span(number);
            // Every third message has none.
            while let Err(error) = match number % 3 {
                0 => sender.send(&[number]),
                _ => sender.send_traced(&[number], traceparent, pelton::Deadline::Never).map(drop),
            } {
                assert!(error.is_closed() || error.is_peer_died(), "{error}");
                sender.resume_until(Instant::now()).unwrap();
            }
        }
        let running = [place.out(more), place.in_(&["--traced"])];
        running.iter().for_each(|bridge| bridge.says(&format!("{}: ", bridge.name)));
        for number in numbers {
            while receiver.find_record(pelton::Deadline::Never).is_err() {
                receiver.resume().unwrap();
            }
            let message = receiver.receive().unwrap();
            assert_eq!(*message, [number]);
            assert_eq!(message.traceparent(), (number % 3 > 0).then(|| span(number)), "{number}");
        }
    };
    run(&[], 1..50);
    run(&["--packed"], 50..100);
    // The header is that of W3C, which other programs read.
    let jetstream = place.jetstream();
    let found = place.runtime.block_on(async {
        let stream = jetstream.get_stream("S").await.unwrap();
        stream.get_raw_message(1).await.unwrap().headers.get("traceparent").unwrap().as_str().to_owned()
    });
    assert_eq!(found, span(1).to_string());
}
