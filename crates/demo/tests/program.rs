//! The demo as a program: its input, its output and its report.

use pelton_testkit::{NewEntry, Process, ProgramDirs, is_root, json};
use rustix::process::Signal;
use std::{fs, io::Write as _, os::unix::fs::PermissionsExt as _, os::unix::process::CommandExt as _};

/// The demo in directories of one test.
fn test_dirs() -> ProgramDirs {
    ProgramDirs::new(env!("CARGO_BIN_EXE_pelton-demo"))
}

const SOCKETS: &str = "sock-stream,sock-stream-batched";

#[test]
fn an_unusable_file_is_refused_with_2_and_the_reason() {
    let dirs = test_dirs();
    dirs.run(&["nowhere.txt"]).assert(2, &["nowhere.txt", "No such file", "give a readable file"]);
    dirs.run(&["."]).assert(2, &["is a directory"]);
    rustix::fs::mkfifoat(rustix::fs::CWD, dirs.path("work/fifo"), rustix::fs::Mode::RUSR).unwrap();
    dirs.run(&["fifo"]).assert(2, &["is not a regular file"]);
    dirs.assert_nothing_left();
}

#[test]
fn an_unreadable_file_is_refused_with_2() {
    let dirs = test_dirs();
    let path = dirs.file("secret", b"line\n");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
    let program = dirs.path("pelton-demo");
    fs::copy(env!("CARGO_BIN_EXE_pelton-demo"), &program).unwrap();
    let mut command = std::process::Command::new(program);
    command.arg(path);
    command
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    if is_root() {
        // Root may read every file. The user `nobody` may not, but needs access to the directories.
        fs::set_permissions(dirs.path("."), fs::Permissions::from_mode(0o755)).unwrap();
        command.uid(65534).gid(65534);
    }
    Process::start(command).finish().assert(2, &["secret", "Permission denied"]);
}

#[test]
fn an_unsafe_output_is_refused_with_2() {
    let dirs = test_dirs();
    dirs.file("input", b"line\n");
    dirs.run(&["input", "--output", "input"]).assert(2, &["is the input itself"]);
    dirs.run(&["input", "--output", "."]).assert(2, &["is not a regular file"]);
    dirs.run(&["input", "--output", "/dev/null"]).assert(2, &["is not a regular file"]);
    dirs.run(&["input", "--output", "no/such/place"]).assert(2, &["cannot be written", "No such file"]);
    assert_eq!(fs::read(dirs.path("work/input")).unwrap(), b"line\n");
    dirs.assert_nothing_left();
}

#[test]
fn a_line_above_the_limit_is_refused_with_2_and_its_number() {
    let dirs = test_dirs();
    let mut content = b"short\n".to_vec();
    content.resize(33 << 20, b'x');
    dirs.file("long", &content);
    dirs.run(&["long"]).assert(2, &["`long`", "line 2", "at most 33554400"]);
    dirs.assert_nothing_left();
}

#[test]
fn sockets_carry_any_file_through_zstd_and_back() {
    check_any_file_passes(SOCKETS);
}

#[test]
fn pelton_carries_any_file_through_zstd_and_back() {
    check_any_file_passes("pelton");
}

fn check_any_file_passes(systems: &str) {
    let dirs = test_dirs();
    let many: Vec<u8> =
        (0..20_000).flat_map(|i| format!("{{\"event\":{i},\"name\":\"n{}\"}}\n", i % 77).into_bytes()).collect();
    let files: [(&str, Vec<u8>, u64); 9] = [
        ("empty", Vec::new(), 0),
        ("many", many, 20_000),
        ("one byte", b"x".to_vec(), 1),
        ("one newline", b"\n".to_vec(), 1),
        ("no newline at the end", b"a\nb".to_vec(), 2),
        ("empty lines", b"\n\na\n\n\n".to_vec(), 5),
        ("crlf", b"a\r\n\r\nb\r\n".to_vec(), 3),
        ("no text", (0..=255).cycle().take(100_000).collect(), 392),
        ("long lines", [vec![b'y'; 5 << 20], b"\n".to_vec(), vec![b'z'; 3 << 20]].concat(), 2),
    ];
    for (name, content, lines) in files {
        dirs.file(name, &content);
        let ended = dirs.run(&[name, "--output", "out.zst", "--json", "--systems", systems]);
        ended.assert(0, &[]);
        let report = json(&ended);
        assert_eq!(report["verified"], true);
        assert_eq!(report["bytes"], content.len(), "{name}");
        assert_eq!(report["lines"], lines, "{name}");
        assert_eq!(report["too_small_to_time"], true, "{name}");
        assert_eq!(report["results"].as_array().unwrap().len(), 2 * systems.split(',').count());
        let compressed = fs::read(dirs.path("work/out.zst")).unwrap();
        assert_eq!(report["output_bytes"], compressed.len());
        assert!(zstd::decode_all(&compressed[..]).unwrap() == content, "{name}: the output is not the input");
        dirs.assert_nothing_left();
    }
}

#[test]
fn the_summary_is_a_table_on_standard_output() {
    let dirs = test_dirs();
    let table = |name: &str, systems: &str| {
        let ended = dirs.run(&[name, "--systems", systems]);
        // Without a terminal, no progress bar.
        assert_eq!(ended.stderr, "");
        ended.assert(0, &[]);
        String::from_utf8(ended.stdout).unwrap()
    };
    dirs.file("input", &b"some line\n".repeat(100_000));
    let of_many = table("input", SOCKETS);
    for words in [
        "1,000,000 bytes, 100,000 lines",
        "byte for byte",
        "the lines alone, 9 runs",
        "to zstd, level 3, 6 runs",
        "other programs kept",
        "The lines alone: a socket with a write per line ",
        "To zstd: a socket with a write per line ",
    ] {
        assert!(of_many.contains(words), "`{words}` is missing in: {of_many}");
    }
    assert!(!of_many.contains("too small"), "{of_many}");
    // The summary compares no times of a small file.
    dirs.file("small", &b"some line\n".repeat(99_999));
    let of_few = table("small", "pelton,sock-stream-batched");
    assert!(of_few.contains("byte for byte") && of_few.contains("The file is too small to compare times."), "{of_few}");
    assert!(!of_few.contains("runs"), "{of_few}");
    // Few lines suffice if they are long. A single transport is compared with none.
    dirs.file("long", &vec![b'x'; 16 << 20]);
    let of_one = table("long", "sock-stream-batched");
    assert!(of_one.contains("9 runs") && !of_one.contains("To zstd:"), "{of_one}");
}

/// The system calls are those of the transports: a write for each line, and fewer for batches.
#[test]
#[cfg(target_arch = "x86_64")]
fn system_calls_are_counted_for_any_user() {
    let dirs = test_dirs();
    dirs.file("input", &b"some line\n".repeat(20_000));
    let report = json(&dirs.run(&["input", "--json"]));
    let calls = |index: usize| report["results"][index]["syscalls_per_message"].as_f64().unwrap();
    assert!((1.0..2.1).contains(&calls(1)), "{report}");
    assert!(calls(2) < 0.1, "{report}");
    assert!(calls(0) > 0.0, "{report}");
    assert!(report["results"][3]["syscalls_per_message"].is_null(), "with zstd they are not counted: {report}");
}

#[test]
fn a_failed_stage_is_reported_and_no_file_is_left() {
    let dirs = test_dirs();
    dirs.file("input", &b"some line\n".repeat(1000));
    // The path of this temporary directory is longer than the name of a socket may be.
    let deep = dirs.path("tmp").join("d".repeat(120));
    fs::create_dir(&deep).unwrap();
    let mut command = dirs.command(&["input", "--output", "out.zst", "--systems", "sock-stream"]);
    command.env("TMPDIR", &deep);
    // Either stage may be the first to fail.
    Process::start(command).finish().assert(5, &["process", "the socket"]);
    assert_eq!(fs::read_dir(&deep).unwrap().count(), 0);
    assert_eq!(fs::read_dir(dirs.path("work")).unwrap().count(), 1, "the input and nothing else");
}

#[test]
fn an_interrupted_demo_leaves_no_file() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let dirs = test_dirs();
        let mut input = fs::File::create(dirs.path("work/input")).unwrap();
        for i in 0..1_000_000 {
            writeln!(input, "line {i}").unwrap();
        }
        let entry = NewEntry::watch(&dirs.path("tmp"));
        let demo = dirs.start(&["input", "--output", "out.zst", "--systems", SOCKETS]);
        entry.wait();
        demo.signal(signal);
        let ended = demo.finish();
        ended.assert(code, &[]);
        assert_eq!(ended.stdout, b"");
        dirs.assert_nothing_left();
        assert_eq!(fs::read_dir(dirs.path("work")).unwrap().count(), 1, "the input and nothing else");
    }
}
