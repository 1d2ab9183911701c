//! `pelton pub` and `pelton sub`: lines to several subscribers, by their policies, and their ends.

use crate::test_dirs;
use pelton_testkit::{eventually, json};
use rustix::process::Signal;
use serde_json::Value;

fn lines(range: std::ops::Range<u64>) -> Vec<u8> {
    range.flat_map(|number| format!("{number}{}\n", " word".repeat(number as usize * 7 % 50)).into_bytes()).collect()
}

#[test]
fn lines_reach_each_subscriber_by_its_policy() {
    let dirs = test_dirs();
    let start = |options: &[&str]| dirs.start(&[&["sub", "topic", "--json"], options].concat());
    let policies: [&[&str]; 4] = [&[], &["--gate", "--lag-after", "60"], &["--lag"], &["--latest"]];
    let subscribers = policies.map(start);
    let (killed, counts) = (start(&[]), start(&["--count", "5000"]));
    let mut publisher =
        dirs.start(&["pub", "topic", "--subscribers", "6", "--capacity", "64K", "--history", "20", "--json"]);
    publisher.write(&lines(0..10));
    assert_eq!(killed.line(), "0");
    killed.kill();
    publisher.write(&lines(10..5000));
    // Now all these lines are published.
    counts.finish().assert(0, &[]);
    let last = start(&["-n", "5", "--count", "6"]);
    let late = start(&["--from", "oldest", "--count", "1"]);
    late.wait().assert(0, &[]);
    // It has joined, with five lines from before; the sixth comes after.
    assert_eq!(last.line().split(' ').next(), Some("4995"));
    publisher.write_all_and_close(lines(5000..20_000));
    let published = publisher.finish();
    published.assert(0, &[]);
    assert_eq!(json(&published)["messages"], 20_000);
    last.wait().assert(0, &[]);
    for (policy, subscriber) in ["gate", "gate until", "lag", "latest"].into_iter().zip(subscribers) {
        let ended = subscriber.finish();
        ended.assert(0, &[]);
        let report = ended.stderr.lines().last().expect("a report");
        let report: Value = serde_json::from_str(report).unwrap();
        let (messages, missed) = (report["messages"].as_u64().unwrap(), report["missed"].as_u64().unwrap());
        assert_eq!(messages + missed, 20_000, "{policy}: {report}");
        assert_eq!(ended.stdout.iter().filter(|byte| **byte == b'\n').count() as u64, messages, "{policy}");
        if policy.starts_with("gate") {
            assert!(missed == 0 && ended.stdout == lines(0..20_000), "{policy}: {report}");
        }
        assert!(ended.stdout.ends_with(&lines(19_999..20_000)), "{policy} has the last line");
    }
    dirs.assert_nothing_left();
}

#[test]
fn a_subscriber_follows_publishers_and_reports_their_ends() {
    let dirs = test_dirs();
    let name = format!("unix:{}", dirs.path("run/socket").display());
    let follows = dirs.start(&["sub", &name, "--follow"]);
    let ends = dirs.start(&["sub", &name]);
    let mut dies = dirs.start(&["pub", &name, "--subscribers", "2"]);
    dies.write(b"from one that dies\n");
    assert_eq!(follows.line(), "from one that dies");
    assert_eq!(ends.line(), "from one that dies");
    dies.kill();
    ends.wait().assert(1, &["publisher", "died after 1 messages"]);
    let mut next = dirs.start(&["pub", &name, "--subscribers", "1"]);
    next.write(b"from the next\n");
    assert_eq!(follows.line(), "from the next");
    next.signal(Signal::INT);
    next.wait().assert(130, &[]);
    follows.signal(Signal::TERM);
    follows.wait().assert(143, &[]);
    dirs.assert_nothing_left();
}

#[test]
fn a_lossless_tail_is_a_subscriber_that_misses_nothing() {
    let dirs = test_dirs();
    let tail =
        dirs.start(&["tail", "topic", "--lossless", "--timeout", "20", "--json", "--filter", "re:^1[0-9]*[05] "]);
    let first = dirs.start(&["tail", "topic", "--lossless", "--timeout", "20", "-n", "3"]);
    let mut publisher = dirs.start(&["pub", "topic", "--subscribers", "2", "--capacity", "64K"]);
    publisher.write_all_and_close(lines(0..20_000));
    publisher.wait().assert(0, &[]);
    let ended = first.finish();
    ended.assert(0, &["3 messages printed, 0 missed"]);
    assert_eq!(ended.stdout.split(|byte| *byte == b'\n').count(), 4);
    let ended = tail.finish();
    let printed: Vec<Value> = String::from_utf8(ended.stdout.clone())
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let is_printed = |line: &&[u8]| {
        line.starts_with(b"1") && line.contains(&b' ') && {
            let number: Vec<u8> = line.iter().copied().take_while(u8::is_ascii_digit).collect();
            number.len() > 1 && matches!(number.last(), Some(b'0' | b'5'))
        }
    };
    let all = lines(0..20_000);
    let wanted: Vec<_> = all.split(|byte| *byte == b'\n').filter(is_printed).collect();
    assert_eq!(printed.iter().map(|object| object["text"].as_str().unwrap().as_bytes()).collect::<Vec<_>>(), wanted);
    ended.assert(0, &["0 missed"]);
    // A tap of the same channel says what to do.
    let mut publisher = dirs.start(&["pub", "other", "--subscribers", "1"]);
    let subscriber = dirs.start(&["sub", "other"]);
    publisher.write(b"hello\n");
    assert_eq!(subscriber.line(), "hello");
    dirs.run(&["tail", "other"]).assert(3, &["subscribe to it, as `pelton sub` does"]);
    publisher.write_all_and_close(Vec::new());
    publisher.wait().assert(0, &[]);
    subscriber.wait().assert(0, &[]);
    dirs.assert_nothing_left();
}

#[test]
fn what_does_not_fit_a_broadcast_is_refused_with_the_reason() {
    let dirs = test_dirs();
    let path = format!("path:{}", dirs.path("channel").display());
    dirs.start(&["pub", &path, "--lanes", "2"]).wait().assert(2, &["--lanes", "one publisher"]);
    dirs.start(&["sub", &path, "--timeout", "0.01"]).wait().assert(4, &["publisher"]);
    dirs.start(&["sub", "topic", "--durable", "audit"]).wait().assert(2, &["--durable", "path:DIR"]);
    dirs.start(&["sub", "topic", "--capacity", "64K"]).wait().assert(2, &["--capacity"]);
    dirs.start(&["sub", "topic", "--timeout", "0.05"]).wait().assert(4, &["no publisher appeared"]);
    dirs.start(&["pub", "topic", "--subscribers", "1", "--timeout", "0.05"])
        .wait()
        .assert(4, &["no subscriber appeared"]);
    let mut publisher = dirs.start(&["pub", &path, "--hold-max", "0.5"]);
    publisher.write_all_and_close(Vec::new());
    publisher.wait().assert(0, &[]);
    dirs.start(&["sub", &path]).wait().assert(3, &["hold_max"]);
    // The next publisher's own limit counts. One with a limit waits for the subscriber, and lets another one publish.
    let publish = |text: &str| {
        let mut publisher = dirs.start(&["pub", &path]);
        publisher.write_all_and_close(text.as_bytes().to_vec());
        publisher.wait().assert(0, &[]);
    };
    publish("hello\n");
    let subscriber = dirs.start(&["sub", &path, "--from", "oldest", "--count", "2"]);
    assert_eq!(subscriber.line(), "hello");
    let mut limited = dirs.start(&["pub", &path, "--hold-max", "0.5", "--timeout", "20"]);
    publish("world\n");
    assert_eq!(subscriber.line(), "world");
    subscriber.wait().assert(0, &[]);
    limited.write_all_and_close(Vec::new());
    limited.wait().assert(0, &[]);
    let mut publisher = dirs.start(&["pub", "topic", "--hold-max", "0.5", "--subscribers", "1"]);
    dirs.start(&["sub", "topic"]).wait().assert(3, &["hold_max"]);
    let subscriber = dirs.start(&["sub", "topic", "--lag-after", "0.5"]);
    publisher.write_all_and_close(b"hello\n".to_vec());
    assert_eq!(subscriber.line(), "hello");
    publisher.wait().assert(0, &[]);
    subscriber.wait().assert(0, &[]);
}

#[test]
fn each_subscriber_is_listed_with_how_far_it_is_behind() {
    let dirs = test_dirs();
    let mut publisher = dirs.start(&["pub", "topic", "--subscribers", "2"]);
    let gate = dirs.start(&["sub", "topic"]);
    let lag = dirs.start(&["sub", "topic", "--lag"]);
    publisher.write(b"first\n");
    assert_eq!((gate.line(), lag.line()), ("first".to_owned(), "first".to_owned()));
    gate.signal(Signal::STOP);
    gate.wait_for_state('T');
    publisher.write(b"second\nthird\n");
    assert_eq!((lag.line(), lag.line()), ("second".to_owned(), "third".to_owned()));
    // Also those of other tests are listed.
    let publisher_pid = publisher.pid();
    let broadcasts = || {
        let listed = json(&dirs.run(&["ls", "--json"]));
        let channels = listed["channels"].as_array().unwrap().clone();
        let is_ours =
            |channel: &Value| channel["kind"] == "broadcast" && channel["lanes"][0]["sender"]["pid"] == publisher_pid;
        channels.into_iter().filter(is_ours).collect::<Vec<_>>()
    };
    let of = |pid: u32| {
        let found = broadcasts().into_iter().find(|channel| channel["receiver"]["pid"] == pid).expect("it is listed");
        assert_eq!(found["name"], "topic");
        found
    };
    let (behind, current) = (of(gate.pid()), of(lag.pid()));
    assert_eq!((&behind["waiting_messages"], &behind["receiver"]["activity"]), (&2.into(), &"stopped".into()));
    assert_eq!((&current["waiting_messages"], &current["lanes"][0]["missed"]), (&0.into(), &0.into()));
    let shown = dirs.run(&["stat", "topic", "--interval", "0.01"]);
    shown.assert(0, &[]);
    let text = String::from_utf8(shown.stdout).unwrap();
    assert!(text.contains("waits     2 messages") && text.contains("missed    0 messages"), "{text}");
    gate.signal(Signal::CONT);
    publisher.write_all_and_close(Vec::new());
    publisher.wait().assert(0, &[]);
    gate.wait().assert(0, &[]);
    lag.wait().assert(0, &[]);
    assert!(broadcasts().is_empty());
}

#[test]
fn an_operator_finds_the_subscription_that_holds_a_publisher_in_a_directory_up() {
    let dirs = test_dirs();
    let directory = dirs.path("broadcast").display().to_string();
    let path = format!("path:{directory}");
    let audit = dirs.start(&["sub", &path, "--durable", "audit"]);
    let mut publisher = dirs.start(&["pub", &path, "--capacity", "64K", "--subscribers", "2"]);
    let lag = dirs.start(&["sub", &path, "--lag"]);
    publisher.write(b"first\n");
    assert_eq!((audit.line(), lag.line()), ("first".to_owned(), "first".to_owned()));
    let listed = || {
        let found = json(&dirs.run(&["ls", "--json"]));
        let channels = found["channels"].as_array().unwrap().clone();
        channels.into_iter().filter(|channel| channel["name"] == *path).collect::<Vec<Value>>()
    };
    let of = |durable: Value| listed().into_iter().find(|channel| channel["durable"] == durable).expect("it is listed");
    let (one, other) = (of("audit".into()), of(Value::Null));
    assert_eq!((&one["receiver"]["pid"], &other["receiver"]["pid"]), (&audit.pid().into(), &lag.pid().into()));
    assert_eq!((&one["lanes"][0]["policy"], &other["lanes"][0]["policy"]), (&"gate".into(), &"lag".into()));
    assert_eq!((&one["state"], &one["lanes"][0]["sender"]["pid"]), (&"ok".into(), &publisher.pid().into()));
    dirs.run(&["doctor", "--channel", &path]).assert(0, &[]);
    audit.kill();
    let filling = std::thread::spawn(move || {
        publisher.write_all_and_close(lines(0..5000));
        publisher
    });
    eventually("the publisher waits", || of("audit".into())["lanes"][0]["is_full"] == true);
    let away = of("audit".into());
    assert_eq!((&away["state"], &away["receiver"]["activity"]), (&"nobody reads".into(), &"absent".into()));
    assert_eq!(of(Value::Null)["lanes"][0]["is_full"], false);
    let text = |ended: pelton_testkit::Ended| String::from_utf8(ended.stdout).unwrap();
    let found = text(dirs.run(&["doctor", "--channel", &path]));
    let advice = format!("pelton rm {path} --durable audit");
    assert!(found.contains("holds the publisher up") && found.contains(&advice), "{found}");
    let found = text(dirs.run(&["stat", &path, "--interval", "0.01"]));
    assert!(found.contains("receiver: audit away") && found.contains("gate; it holds the publisher up"), "{found}");
    let found = text(dirs.run(&["ls"]));
    assert!(found.lines().any(|line| line.contains(&path) && line.contains("audit away")), "{found}");
    dirs.run(&["rm", &path, "--durable", "audit"]).assert(0, &[]);
    filling.join().unwrap().wait().assert(0, &[]);
    lag.wait().assert(0, &[]);
    // Nobody has it open now.
    assert!(listed().is_empty());
    let found = text(dirs.run(&["ls", &directory]));
    assert!(found.lines().any(|line| line.contains(&path) && line.contains("idle")), "{found}");
    dirs.run(&["rm", &directory]).assert(0, &[]);
    dirs.assert_nothing_left();
}

#[test]
fn a_durable_subscription_in_a_directory_continues_and_is_removed() {
    let dirs = test_dirs();
    let directory = dirs.path("broadcast").display().to_string();
    let path = format!("path:{directory}");
    let publish = |text: &[u8]| {
        let mut publisher = dirs.start(&["pub", &path, "--history", "10"]);
        publisher.write_all_and_close(text.to_vec());
        publisher.wait().assert(0, &[]);
    };
    // Without a subscriber, and after its end.
    publish(b"one\ntwo\n");
    let first = dirs.start(&["sub", &path, "--durable", "audit", "--from", "oldest"]);
    assert_eq!((first.line(), first.line()), ("one".to_owned(), "two".to_owned()));
    dirs.start(&["sub", &path, "--durable", "audit"]).wait().assert(3, &["audit", &first.pid().to_string()]);
    first.kill();
    publish(b"three\nfour\n");
    let info = dirs.start(&["info", &directory, "--json"]).finish();
    info.assert(0, &[]);
    let info = json(&info);
    let one = &info["subscriptions"][0];
    assert_eq!((&one["durable"], &one["is_alive"], &one["behind"]), (&"audit".into(), &false.into(), &2.into()));
    assert_eq!(info["next"], 5);
    let second = dirs.start(&["sub", &path, "--durable", "audit", "--count", "2"]).finish();
    second.assert(0, &[]);
    assert_eq!(second.stdout, b"three\nfour\n");
    let text = dirs.start(&["info", &directory]).finish();
    text.assert(0, &[]);
    assert!(String::from_utf8(text.stdout).unwrap().contains("durable audit: no process, gate, 0 behind"));
    dirs.start(&["rm", &directory, "--durable", "audit"]).wait().assert(0, &[]);
    dirs.start(&["rm", &directory, "--durable", "audit"]).wait().assert(2, &["audit"]);
    dirs.start(&["rm", &directory]).wait().assert(0, &[]);
    dirs.assert_nothing_left();
}
