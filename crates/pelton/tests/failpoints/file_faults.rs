//! Files on a failing system: full or broken disks, interrupted calls, and calls that transfer less than requested,
//! by io_uring and by the threads. Random operations run against a model that trusts the engine's reports. One more
//! test forces a rare order of events.
//!
//! `PROPTEST_CASES` makes the random sequences many.

use crate::alone;
use crate::support::records::run;
use crate::support::{DEADLINE, Random, Watchdog, deadline};
use pelton::file::faults::{self, Fault};
use pelton::file::{Buffer, Completion, Engine, EngineOptions, File, Open, Operation, Tail};
use pelton::{Error, Sink as _};
use proptest::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

/// The percentage of calls with a fault; 0 if a test wants none.
static OF_A_HUNDRED: AtomicU64 = AtomicU64::new(0);
/// Shared by all threads: the assignment of random numbers to threads is random anyway.
static RANDOM: Mutex<Random> = Mutex::new(Random::new(1));

fn fault() -> Option<Fault> {
    let random = RANDOM.lock().unwrap().word() >> 16;
    if random % 100 >= OF_A_HUNDRED.load(Ordering::Relaxed) {
        return None;
    }
    Some(match (random >> 8) % 8 {
        0 => Fault::Error(Errno::NOSPC),
        1 => Fault::Error(Errno::IO),
        2 | 3 => Fault::Error(Errno::INTR),
        4 => Fault::Error(Errno::AGAIN),
        size => Fault::Short([1, 511, 4096][size as usize - 5]),
    })
}

#[derive(Clone, Debug)]
enum Step {
    Write { offset: u64, bytes: usize },
    WritePieces { offset: u64, pieces: Vec<usize> },
    Append { bytes: usize },
    Read { offset: u64, bytes: usize },
    ReadPieces { offset: u64, pieces: Vec<usize> },
    Truncate { bytes: u64 },
    Copy { from: u64, to: u64, bytes: u64 },
    Sync,
}

fn any_step() -> impl Strategy<Value = Step> {
    let offset = 0..100_000u64;
    let bytes = prop_oneof![4 => 0..9000usize, 1 => 250_000..300_000usize];
    let pieces = prop::collection::vec(0..5000usize, 0..6);
    prop_oneof![
        4 => (offset.clone(), bytes.clone()).prop_map(|(offset, bytes)| Step::Write { offset, bytes }),
        2 => (offset.clone(), pieces.clone()).prop_map(|(offset, pieces)| Step::WritePieces { offset, pieces }),
        2 => bytes.clone().prop_map(|bytes| Step::Append { bytes }),
        4 => (offset.clone(), bytes).prop_map(|(offset, bytes)| Step::Read { offset, bytes }),
        2 => (offset.clone(), pieces).prop_map(|(offset, pieces)| Step::ReadPieces { offset, pieces }),
        1 => offset.clone().prop_map(|bytes| Step::Truncate { bytes }),
        1 => (offset.clone(), offset.clone(), offset).prop_map(|(from, to, bytes)| Step::Copy { from, to, bytes }),
        1 => Just(Step::Sync),
    ]
}

fn pattern(seed: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|n| (n.wrapping_mul(31) ^ seed.wrapping_mul(7919)) as u8 | 1).collect()
}

fn cut(bytes: &[u8], pieces: &[usize]) -> Vec<Buffer> {
    let mut rest = bytes;
    pieces.iter().map(|length| rest.split_off(..*length).unwrap().into()).collect()
}

/// One of two errors that such a disk returns; never one that a caller can do nothing about.
fn check(error: &Error) -> Result<(), TestCaseError> {
    let Error::File { errno, .. } = error else { panic!("{error:?}") };
    prop_assert!(["ENOSPC", "EIO"].contains(errno), "{error}");
    Ok(())
}

/// Checks the transferred bytes, and that a short count before the end of the file gives its reason.
fn count(ended: &Completion, wanted: usize) -> Result<usize, TestCaseError> {
    if let Err(error) = &ended.outcome {
        check(error)?;
        return Ok(0);
    }
    if let Some(error) = &ended.cut_short_by {
        check(error)?;
        // At the end of the file, the read of more may be the call that failed.
        prop_assert!((1..=wanted).contains(&ended.count()));
    } else {
        prop_assert_eq!(ended.count(), wanted);
    }
    Ok(ended.count())
}

fn put(model: &mut Vec<u8>, offset: usize, bytes: &[u8]) {
    if bytes.is_empty() {
        return;
    }
    model.resize(model.len().max(offset + bytes.len()), 0);
    model[offset..offset + bytes.len()].copy_from_slice(bytes);
}

#[test]
fn on_a_failing_disk_every_byte_is_where_the_engine_reports_it() {
    let _alone = alone();
    let _hang = Watchdog::new("on a failing disk every byte is where the engine reports it");
    faults::set(fault);
    for (way, dir) in [("ring", "/var/tmp"), ("threads", "/var/tmp"), ("ring", "/dev/shm"), ("threads", "/dev/shm")] {
        let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases()) };
        proptest!(config, |(steps in prop::collection::vec(any_step(), 1..40), often in 5..60u64)| {
            OF_A_HUNDRED.store(0, Ordering::Relaxed);
            let root = tempfile::tempdir_in(dir).unwrap();
            let options = if way == "ring" { EngineOptions::new() } else { EngineOptions::new().without_io_uring() };
            let mut engine = options.build().unwrap();
            let (files, mut models) = (["a", "b"].map(|name| opened(&mut engine, root.path().join(name))), [Vec::new(), Vec::new()]);
            OF_A_HUNDRED.store(often, Ordering::Relaxed);
            for (number, step) in steps.iter().enumerate() {
                let which = number % 2;
                let (file, end) = (&files[which], models[which].len());
                match step {
                    Step::Write { offset, bytes } => {
                        let text = pattern(number, *bytes);
                        let ended = submitted(&mut engine, Operation::write_at(file, text.clone(), *offset));
                        let count = count(&ended, *bytes)?;
                        put(&mut models[which], *offset as usize, &text[..count]);
                    }
                    Step::WritePieces { offset, pieces } => {
                        let text = pattern(number, pieces.iter().sum());
                        let ended = submitted(&mut engine, Operation::write_vectored_at(file, cut(&text, pieces), *offset));
                        let count = count(&ended, text.len())?;
                        put(&mut models[which], *offset as usize, &text[..count]);
                    }
                    Step::Append { bytes } => {
                        let text = pattern(number, *bytes);
                        let ended = submitted(&mut engine, Operation::append(file, text.clone()));
                        let count = count(&ended, *bytes)?;
                        put(&mut models[which], end, &text[..count]);
                    }
                    Step::Read { offset, bytes } => {
                        let ended = submitted(&mut engine, Operation::read_at(file, vec![0; *bytes], *offset));
                        let there = models[which].get(*offset as usize..).unwrap_or_default();
                        let count = count(&ended, there.len().min(*bytes))?;
                        prop_assert!(ended.buffer[..count] == there[..count]);
                    }
                    Step::ReadPieces { offset, pieces } => {
                        let bytes: usize = pieces.iter().sum();
                        let ended = submitted(&mut engine, Operation::read_vectored_at(file, cut(&vec![0; bytes], pieces), *offset));
                        let there = models[which].get(*offset as usize..).unwrap_or_default();
                        let count = count(&ended, there.len().min(bytes))?;
                        let found: Vec<u8> = ended.buffers.iter().flat_map(|piece| piece.iter().copied()).collect();
                        prop_assert!(found[..count] == there[..count]);
                    }
                    Step::Truncate { bytes } => match submitted(&mut engine, Operation::truncate(file, *bytes)).outcome {
                        Ok(_) => models[which].resize(*bytes as usize, 0),
                        Err(error) => check(&error)?,
                    },
                    Step::Copy { from, to, bytes } => {
                        let ended = submitted(&mut engine, Operation::copy(file, *from, &files[1 - which], *to, *bytes));
                        let there = models[which].get(*from as usize..).unwrap_or_default();
                        let count = count(&ended, there.len().min(*bytes as usize))?;
                        let copied = there[..count].to_vec();
                        put(&mut models[1 - which], *to as usize, &copied);
                    }
                    Step::Sync => {
                        if let Err(error) = submitted(&mut engine, Operation::sync_data(file)).outcome {
                            check(&error)?;
                        }
                    }
                }
            }
            OF_A_HUNDRED.store(0, Ordering::Relaxed);
            for (name, model) in ["a", "b"].iter().zip(&models) {
                prop_assert!(std::fs::read(root.path().join(name)).unwrap() == *model, "file {}", name);
            }
        });
    }
}

fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").map_or(40, |text| text.parse().unwrap())
}

fn opened(engine: &mut Engine, path: std::path::PathBuf) -> File {
    engine.run(Operation::open(path, Open::for_both().create(0o600))).unwrap().into_file().unwrap()
}

fn submitted(engine: &mut Engine, operation: Operation) -> Completion {
    assert!(engine.try_submit(1, operation).unwrap().is_submitted());
    engine.completion_until(deadline()).unwrap().expect("it completes")
}

static ENTERED: AtomicUsize = AtomicUsize::new(0);

fn count_entries(step: &'static str) {
    if step == "ring: enters" {
        ENTERED.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn operations_submitted_while_armed_begin_with_few_system_calls() {
    let _alone = alone();
    let _hang = Watchdog::new("operations submitted while armed begin with few system calls");
    let mut engine = EngineOptions::new().build().unwrap();
    if !engine.uses_io_uring() {
        eprintln!("no io_uring here: it is not entered");
        return;
    }
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let (read, mut write) = (File::from_fd(read, "a pipe").unwrap(), std::fs::File::from(write));
    let readable = |engine: &Engine, seconds| {
        let timeout = Timespec { tv_sec: seconds, tv_nsec: 0 };
        poll(&mut [PollFd::new(engine, PollFlags::IN)], Some(&timeout)).unwrap() == 1
    };
    pelton::failpoints::set(count_entries);
    for round in 0..3 {
        assert!(engine.arm().unwrap().is_waiting());
        ENTERED.store(0, Ordering::Relaxed);
        for token in 0..100 {
            assert!(engine.try_submit(token, Operation::read(&read, vec![0; 1])).unwrap().is_submitted());
        }
        assert_eq!(ENTERED.load(Ordering::Relaxed), 1, "round {round}: the first begins at once");
        // The others begin when the loop ticks again, as the engine requested.
        assert!(readable(&engine, DEADLINE.as_secs() as i64));
        assert!(engine.arm().unwrap().is_waiting() && !readable(&engine, 0), "round {round}");
        assert_eq!(ENTERED.load(Ordering::Relaxed), 2, "round {round}: the rest begins together");
        write.write_all(&[1; 100]).unwrap();
        let mut tokens = std::collections::BTreeSet::new();
        while tokens.len() < 100 {
            assert!(readable(&engine, DEADLINE.as_secs() as i64));
            while let Some(ended) = engine.try_completion().unwrap() {
                assert_eq!(ended.count(), 1);
                tokens.insert(ended.token);
            }
            assert_eq!(engine.arm().unwrap().is_waiting(), engine.in_flight() > 0 || tokens.len() == 100);
        }
    }
}

static ENDED: AtomicUsize = AtomicUsize::new(0);
static WRITER: Mutex<Option<std::fs::File>> = Mutex::new(None);

/// Between the poll and the clearing of the doorbell, the awaited operation completes, and then another, whose bytes
/// arrive only now.
fn two_end(step: &'static str) {
    let wait = |ended: usize| {
        while ENDED.load(Ordering::Relaxed) < ended {
            std::thread::yield_now();
        }
    };
    match step {
        "engine's thread: ended one" => _ = ENDED.fetch_add(1, Ordering::Relaxed),
        "engine waits: looked" => {
            if let Some(mut writer) = WRITER.lock().unwrap().take() {
                wait(1);
                writer.write_all(b"x").unwrap();
                wait(2);
            }
        }
        _ => {}
    }
}

#[test]
fn a_completion_just_before_the_doorbell_is_cleared_reaches_the_loop() {
    let _alone = alone();
    let _hang = Watchdog::new("a completion just before the doorbell is cleared reaches the loop");
    let mut engine = EngineOptions::new().without_io_uring().build().unwrap();
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let read = File::from_fd(read, "a pipe").unwrap();
    assert!(engine.try_submit(1, Operation::read(&read, vec![0; 1])).unwrap().is_submitted());
    assert!(engine.arm().unwrap().is_waiting());
    *WRITER.lock().unwrap() = Some(write.into());
    pelton::failpoints::set(two_end);
    let found = engine.run_until(Operation::stat("/"), Instant::now() + DEADLINE).unwrap();
    assert!(found.is_some());
    let timeout = Timespec { tv_sec: DEADLINE.as_secs() as i64, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(&engine, PollFlags::IN)], Some(&timeout)).unwrap(), 1, "the ring is lost");
    assert_eq!(engine.try_completion().unwrap().expect("it has ended").bytes(), b"x");
}

/// The file is truncated at a step, or in a fault.
static LOG: Mutex<Option<std::path::PathBuf>> = Mutex::new(None);
/// The number of fault decisions.
static ASKED: AtomicUsize = AtomicUsize::new(0);

/// Another program truncates the file, once.
fn truncate() {
    if let Some(path) = LOG.lock().unwrap().take() {
        std::fs::File::options().write(true).open(path).unwrap().set_len(0).unwrap();
    }
}

#[test]
fn a_plain_file_truncated_during_a_write_has_no_zeros() {
    let _alone = alone();
    let root = tempfile::tempdir_in("/var/tmp").unwrap();
    let before = |name: &str| {
        let path = root.path().join(name);
        let mut tail = Tail::new(opened(&mut Engine::new().unwrap(), path.clone())).unwrap();
        tail.write(&[run(1, 1, 5).run()]).unwrap();
        *LOG.lock().unwrap() = Some(path.clone());
        (path, tail)
    };
    let (path, mut tail) = before("control");
    truncate();
    tail.write(&[run(1, 2, 5).run()]).unwrap();
    let wanted = std::fs::read(path).unwrap();
    let (path, mut tail) = before("between the check and the write");
    pelton::failpoints::set(|step| {
        if step == "tail: checked" {
            truncate()
        }
    });
    tail.write(&[run(1, 2, 5).run()]).unwrap();
    pelton::failpoints::set(|_| {});
    assert_eq!(std::fs::read(path).unwrap(), wanted);
    // A first part is written, then the write fails. The truncation is before the first part, or after it.
    let faults: [faults::Hook; 2] = [
        || match ASKED.fetch_add(1, Ordering::Relaxed) {
            0 => {
                truncate();
                Some(Fault::Short(3))
            }
            _ => Some(Fault::Error(Errno::NOSPC)),
        },
        || match ASKED.fetch_add(1, Ordering::Relaxed) {
            0 => Some(Fault::Short(3)),
            _ => {
                truncate();
                Some(Fault::Error(Errno::NOSPC))
            }
        },
    ];
    for (number, fault) in faults.into_iter().enumerate() {
        let (path, mut tail) = before(&format!("failed {number}"));
        ASKED.store(0, Ordering::Relaxed);
        faults::set(fault);
        let failed = tail.write(&[run(1, 2, 5).run()]);
        faults::set(|| None);
        assert!(failed.is_err_and(|error| error.to_string().contains("No space")));
        assert_eq!(std::fs::read(&path).unwrap(), b"");
        tail.write(&[run(1, 2, 5).run()]).unwrap();
        assert_eq!(std::fs::read(path).unwrap(), wanted);
    }
}
