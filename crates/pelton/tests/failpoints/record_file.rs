//! A writer is killed at each step in turn, until it finishes. After each kill the next writer continues with the
//! missing messages, and so does a third. The files then contain everything once.

use crate::alone;
use crate::support::records::*;
use crate::support::{Child, Role, report};
use pelton::{RecordFile, RecordFileOptions, RecordReader, Sink as _};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

static LEFT: AtomicU64 = AtomicU64::new(0);

fn take_step(_: &'static str) {
    if LEFT.fetch_sub(1, SeqCst) == 1 {
        // SAFETY: no pointers.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        loop {
            std::thread::park();
        }
    }
}

/// Of each of three lanes.
const MESSAGES: u32 = 12;

fn options(sync: bool) -> RecordFileOptions {
    let options = RecordFileOptions::new().rotate_bytes(1500);
    if sync { options.sync_bytes(0) } else { options }
}

/// Writes the missing messages. Lane 1 is written only at the end, so that its number must be kept long; lane 9 has
/// so many chunks that they need several calls.
fn write_missing(path: &Path, sync: bool) {
    let mut file = options(sync).open(path).unwrap();
    let give = |file: &mut RecordFile, runs: &[Owned]| {
        let is_new = |run: &Owned| file.last_seq(run.lane).is_none_or(|last| last < run.first_seq);
        let new: Vec<Owned> = runs.iter().filter(|run| is_new(run)).cloned().collect();
        if !new.is_empty() {
            write(file, &new);
        }
    };
    give(&mut file, &[run(1, 1, 1)]);
    for seq in (1..MESSAGES).step_by(2) {
        give(&mut file, &[run(2, seq, 2), run(3, seq, 1), run(3, seq + 1, 1)]);
    }
    give(&mut file, &(1..=600).map(|seq| run(9, seq, 1)).collect::<Vec<_>>());
    give(&mut file, &[run(1, 2, 1)]);
}

/// Not a test: the entry point of a child process. Without a role it does nothing.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    let path = PathBuf::from(role.get("at"));
    LEFT.store(role.number("step").unwrap(), SeqCst);
    pelton::failpoints::set(take_step);
    write_missing(&path, role.number("sync").unwrap() == 1);
    report("through");
}

#[test]
fn a_writer_killed_at_any_step_leaves_everything_once() {
    let _alone = alone();
    for sync in [0, 1] {
        let mut through = false;
        for step in 1.. {
            assert!(step < 1000, "it does not get through");
            let (dir, path) = dir_and_path();
            let role = Role::new(child, "killed").with("at", path.display()).with("sync", sync);
            let first = Child::start(role.clone().with("step", step));
            through = first.wait().success();
            // Its successor also dies early, while it repairs the files.
            for step in [1, 2, 3] {
                Child::start(role.clone().with("step", step)).wait();
            }
            write_missing(&path, sync == 1);
            let mut files: Vec<PathBuf> = dir.entries();
            files.sort();
            files.rotate_left(1);
            let mut seen: BTreeMap<u64, u32> = BTreeMap::new();
            for (i, file) in files.iter().enumerate() {
                assert_eq!(RecordReader::open(file).unwrap().number(), 1 + i as u64, "step {step}: {files:?}");
                let (found, error) = read(file);
                assert!(error.is_none(), "step {step}: {error:?}");
                for (of, first_seq, messages) in found {
                    let last = seen.entry(of).or_default();
                    assert_eq!(first_seq, *last + 1, "step {step}: lane {of}");
                    *last += messages;
                }
            }
            assert_eq!(seen, BTreeMap::from([(1, 2), (2, MESSAGES), (3, MESSAGES), (9, 600)]), "step {step}");
            assert!(files.len() > 2, "it does not rotate: {files:?}");
            if through {
                break;
            }
        }
        assert!(through);
    }
}

/// Another program's action on a file.
type Disturb = fn(&Path);

/// Done at a step, once.
static DISTURB: Mutex<Option<(&'static str, Disturb, PathBuf)>> = Mutex::new(None);

fn disturb_at_step(step: &'static str) {
    let mut disturb = DISTURB.lock().unwrap();
    if disturb.as_ref().is_some_and(|(at, ..)| *at == step) {
        let (_, disturb, path) = disturb.take().unwrap();
        disturb(&path);
    }
}

#[test]
fn a_file_changed_between_check_and_write_loses_no_message() {
    let _alone = alone();
    pelton::failpoints::set(disturb_at_step);
    let truncate = |path: &Path| std::fs::File::options().write(true).open(path).unwrap().set_len(0).unwrap();
    let disturbs: [(Disturb, &str); 3] = [
        (truncate, "truncated"),
        (|path| std::fs::remove_file(path).unwrap(), "deleted"),
        (|path| std::fs::rename(path, path.with_extension("1")).unwrap(), "renamed"),
    ];
    for step in ["record file: checked", "record file: a part written"] {
        for (disturb, what) in disturbs {
            let (dir, path) = dir_and_path();
            let mut file = RecordFile::open(&path).unwrap();
            write(&mut file, &[run(1, 1, 2)]);
            *DISTURB.lock().unwrap() = Some((step, disturb, path.clone()));
            // Larger than everything before, so that the length alone reveals nothing.
            write(&mut file, &[run(1, 3, 100)]);
            assert!(DISTURB.lock().unwrap().is_none());
            write(&mut file, &[run(1, 103, 1)]);
            drop(file);
            let moved = dir.path().join("log.1");
            let mut found = if moved.exists() { read(&moved).0 } else { vec![(1, 1, 2)] };
            let (more, error) = read(&path);
            assert!(error.is_none(), "{what} at {step}: {error:?}");
            found.extend(more);
            assert_eq!(found, [(1, 1, 2), (1, 3, 100), (1, 103, 1)], "{what} at {step}");
        }
    }
    pelton::failpoints::set(|_| {});
}
