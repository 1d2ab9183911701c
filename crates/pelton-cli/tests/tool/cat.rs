//! `pelton cat`: the messages of record files, and the report on incomplete or damaged ones.

use crate::test_dirs;
use pelton::{Chunk, LaneId, Peer, RecordFile, RecordFileOptions, Sink as _};
use pelton_testkit::{Process, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// The records of messages, in the layout of a lane.
fn records(first_seq: u32, messages: &[&[u8]]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (seq, message) in (u64::from(first_seq)..).zip(messages) {
        bytes.extend((seq << 32 | message.len() as u64).to_le_bytes());
        bytes.extend(*message);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }
    bytes
}

fn write(file: &mut RecordFile, lane: u64, first_seq: u32, messages: &[&[u8]]) {
    let peer = (lane > 1).then_some(Peer { pid: 4711, uid: 1000 });
    let bytes = records(first_seq, messages);
    file.write(&[Chunk::new(LaneId([lane, 0]), peer, first_seq, messages.len() as u32, &bytes)]).unwrap();
}

const LANES: [&str; 2] = ["00000000000000010000000000000000", "00000000000000020000000000000000"];

fn invert_byte(path: &Path, at: usize) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[at] = !bytes[at];
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn cat_prints_messages_as_lines_len32_or_json() {
    let dirs = test_dirs();
    let mut file = RecordFile::open(dirs.path("work/log")).unwrap();
    write(&mut file, 1, 1, &[b"one", b"", b"with \"quotes\""]);
    write(&mut file, 2, 7, &[b"\xff\x00"]);
    write(&mut file, 1, 4, &[b"last"]);

    let lines = dirs.run(&["cat", "log"]);
    lines.assert(0, &[]);
    assert_eq!(lines.stdout, b"one\n\nwith \"quotes\"\n\xff\x00\nlast\n");
    assert_eq!(lines.stderr, "");

    let mut wanted = Vec::new();
    for message in [&b"one"[..], b"", b"with \"quotes\"", b"\xff\x00", b"last"] {
        wanted.extend((message.len() as u32).to_le_bytes());
        wanted.extend(message);
    }
    let len32 = dirs.run(&["cat", "log", "--frame", "len32"]);
    len32.assert(0, &[]);
    assert_eq!(len32.stdout, wanted);

    let objects = dirs.run(&["cat", "log", "--json"]);
    objects.assert(0, &[]);
    let objects: Vec<serde_json::Value> =
        objects.stdout.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect();
    let part = |name: &str| objects.iter().map(|object| object[name].clone()).collect::<serde_json::Value>();
    assert_eq!(part("seq"), serde_json::json!([1, 2, 3, 7, 4]));
    assert_eq!(part("lane"), serde_json::json!([LANES[0], LANES[0], LANES[0], LANES[1], LANES[0]]));
    assert_eq!(part("text"), serde_json::json!(["one", "", "with \"quotes\"", null, "last"]));
    assert_eq!(part("hex"), serde_json::json!([null, null, null, "ff00", null]));
    assert_eq!((&objects[3]["pid"], &objects[3]["uid"]), (&4711.into(), &1000.into()));
    assert!(objects[0].get("pid").is_none() && objects[0]["written_ns"].as_u64().unwrap() > 1 << 60);
}

#[test]
fn output_of_several_writes_is_complete_and_its_reader_may_stop() {
    let dirs = test_dirs();
    let mut file = RecordFile::open(dirs.path("work/log")).unwrap();
    let message = vec![b'x'; 1000];
    let messages = vec![&message[..]; 2000];
    write(&mut file, 1, 1, &messages);
    write(&mut file, 1, 2001, &messages);
    let all = dirs.run(&["cat", "log"]);
    all.assert(0, &[]);
    assert_eq!(all.stdout.len(), 4000 * 1001);
    let mut stops = Process::start_unread(dirs.command(&["cat", "log"]));
    drop(stops.take_stdout());
    stops.finish().assert(141, &[]);
}

#[test]
fn verify_reports_lanes_and_gaps_over_all_files() {
    let dirs = test_dirs();
    let mut file = RecordFileOptions::new().rotate_bytes(319).open(dirs.path("work/log")).unwrap();
    write(&mut file, 1, u32::MAX - 1, &[b"a", b"b"]);
    write(&mut file, 1, 1, &[b"c"]);
    write(&mut file, 2, 5, &[b"d"]);
    let files = ["log.000001", "log"];
    let all = dirs.run(&[&["cat", "--verify"], &files[..]].concat());
    all.assert(0, &[]);
    assert_eq!(
        String::from_utf8(all.stdout).unwrap(),
        format!(
            "3 chunks, 4 messages of 4 bytes, 2 lanes, 2 files\n\
             lane {}: 3 messages, 4294967294 to 1, in 2 chunks, from an unknown process by path, 0 gaps\n\
             lane {}: 1 messages, 5 to 5, in 1 chunks, from process 4711 of user 1000, 0 gaps\n",
            LANES[0], LANES[1]
        )
    );
    write(&mut file, 2, 8, &[b"gap"]);
    let gap = dirs.run(&[&["cat", "--verify"], &files[..]].concat());
    gap.assert(1, &["1 gaps"]);
    assert!(String::from_utf8(gap.stdout).unwrap().contains("  after 5 comes 8, at byte"), "the gap is printed");
    let object = dirs.run(&[&["cat", "--verify", "--json"], &files[..]].concat());
    object.assert(1, &["1 gaps"]);
    let lane = &json(&object)["lanes"][LANES[1]];
    assert_eq!((&lane["gaps"], &lane["first_gaps"][0]["after"]), (&1.into(), &5.into()));
    assert_eq!((&lane["first_gaps"][0]["found"], &lane["first_gaps"][0]["file"]), (&8.into(), &"log".into()));
}

#[test]
fn verify_reports_the_known_senders() {
    let dirs = test_dirs();
    let (channel, log) = (dirs.path("work/channel"), dirs.path("work/log"));
    let options = pelton::Options::new();
    let verified = || {
        let ended = dirs.run(&["cat", "--verify", "log"]);
        ended.assert(0, &[]);
        String::from_utf8(ended.stdout).unwrap()
    };
    let here = format!("process {} of user {}", std::process::id(), rustix::process::geteuid().as_raw());

    options.create_sender(&channel).unwrap().send(b"from a sender that has ended").unwrap();
    let receiver = options.cast().create_receiver(&channel).unwrap();
    let mut flush = pelton::Flush::new(&options.cast(), receiver, RecordFile::open(&log).unwrap()).unwrap();
    flush.run().unwrap();
    assert!(verified().ends_with("in 1 chunks, from an unknown process by path, 0 gaps\n"), "{}", verified());

    let mut sender = options.create_sender(&channel).unwrap();
    // Without messages the receiver waits, and a waiting receiver discovers its peer.
    assert!(!flush.run_until(Instant::now() + Duration::from_millis(1)).unwrap());
    sender.send(b"from a sender that lives").unwrap();
    flush.tick().unwrap();
    flush.flush().unwrap();
    drop((sender, flush));
    assert!(verified().ends_with(&format!("in 2 chunks, from {here} and others, 0 gaps\n")), "{}", verified());

    std::fs::remove_file(&log).unwrap();
    let appenders = pelton::Appenders::new(&options.cast(), RecordFile::open(&log).unwrap()).unwrap();
    appenders.append(b"by a thread of the writer").unwrap();
    appenders.sync().unwrap();
    assert!(verified().ends_with(&format!("in 1 chunks, from {here}, 0 gaps\n")), "{}", verified());
}

#[test]
fn a_torn_end_damage_and_another_kind_of_file_are_distinguished() {
    let dirs = test_dirs();
    let path = dirs.path("work/log");
    let mut file = RecordFile::open(&path).unwrap();
    write(&mut file, 1, 1, &[b"first"]);
    let second = std::fs::metadata(&path).unwrap().len() as usize;
    write(&mut file, 1, 2, &[b"second"]);
    write(&mut file, 1, 3, &[b"third"]);
    drop(file);
    let all = std::fs::read(&path).unwrap();

    std::fs::write(&path, &all[..all.len() - 1]).unwrap();
    let torn = dirs.run(&["cat", "log"]);
    torn.assert(1, &["log is torn at byte", "found", "wanted"]);
    assert_eq!(torn.stdout, b"first\nsecond\n");
    let verified = dirs.run(&["cat", "--verify", "--json", "log"]);
    verified.assert(1, &["torn at byte"]);
    assert_eq!((&json(&verified)["torn"], &json(&verified)["messages"]), (&1.into(), &2.into()));

    std::fs::write(&path, &all).unwrap();
    invert_byte(&path, second + 70);
    let damaged = dirs.run(&["cat", "log"]);
    damaged.assert(5, &[&format!("log is damaged at byte {second}"), "checksum"]);
    assert_eq!(damaged.stdout, b"first\nthird\n");
    dirs.run(&["cat", "--verify", "log"]).assert(5, &["damaged at byte"]);

    dirs.file("notes", b"another kind of file, but long enough for the header of a record file");
    dirs.run(&["cat", "notes"]).assert(2, &["notes cannot be used as a record file", "it begins with"]);
    dirs.run(&["cat", "none"]).assert(2, &["opening none", "No such file"]);
    dirs.run(&["cat"]).assert(2, &["<FILE>"]);
    dirs.run(&["cat", "log", "--verify", "--frame", "lines"]).assert(2, &["cannot be used with"]);
}
