//! A process is killed at every step (the feature `_failpoints`: before and after each store to shared memory, after
//! each change to a directory, between the packets of a handshake). Nothing committed is lost, nothing is torn,
//! nothing hangs, nothing is left over. Then the process is stopped instead, at a sample of the steps, and no peer
//! detects a death.
//!
//! A separate program, because it forks; it has one thread. In each scenario a forked child, the victim, counts its
//! steps from a point in its code, and kills itself at the n-th. n grows from 1 until the victim finishes. It notes
//! its progress in a page shared with the parent, which is the survivor, and usually the successor too.
//!
//! This file lists the scenarios and runs them. `steps/` has the scenarios by victim, the victim itself, and the two
//! endpoints that all of them use.

#[path = "steps/broadcast.rs"]
mod broadcast;
#[path = "steps/broadcast_connected.rs"]
mod broadcast_connected;
#[path = "steps/calls.rs"]
mod calls;
#[path = "steps/channel.rs"]
mod channel;
#[path = "steps/connected.rs"]
mod connected;
#[path = "steps/ends.rs"]
mod ends;
#[path = "steps/receivers.rs"]
mod receivers;
#[path = "steps/senders.rs"]
mod senders;
mod support;
#[path = "steps/victim.rs"]
mod victim;

use channel::*;
use connected::*;
use ends::*;
use pelton::{Error, Options, Policy, Receiver, RecordFileOptions, Sender, Sent, Traceparent, inspect};
use receivers::*;
use senders::*;
use std::any::Any;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd as _, FromRawFd as _, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};
use support::{Sizes, check, deadline, descriptors, payload, readable};
use victim::*;

/// The duration of a stop: long enough for a survivor to report a wrongly detected death, short enough to repeat it
/// at each step.
const MOMENT: Duration = Duration::from_millis(4);

/// A victim is stopped at one of that many steps.
const SAMPLE: u64 = 7;

type Scenario = (&'static str, bool, fn(&Run));

/// The name, whether it also applies to stopping, and the code for each step.
const SCENARIOS: &[Scenario] = &[
    ("create, by a sender", true, |run| create(run, true)),
    ("create, by a receiver", true, |run| create(run, false)),
    ("create, over a dead creator's remains", true, create_over_leftovers),
    ("sender attaches to a fresh lane", true, |run| sender_attaches(run, 0, 0)),
    ("sender attaches to a lane with messages", true, |run| sender_attaches(run, 5, 2)),
    ("sender attaches to a lane that has been read", true, |run| sender_attaches(run, 5, 5)),
    ("sender attaches behind a jump", false, sender_attaches_behind_a_jump),
    ("sender adds a lane", true, |run| sender_adds_a_lane(run, false)),
    ("sender adds a lane over a dead one's remains", false, |run| sender_adds_a_lane(run, true)),
    ("sender adds a lane, and another at the same time", true, two_senders_add_a_lane),
    ("sender commits: empty lane", true, |run| sender_commits(run, At::Empty, false)),
    ("sender commits: without a receiver", true, |run| sender_commits(run, At::Alone, false)),
    ("sender commits: nearly full", true, |run| sender_commits(run, At::NearlyFull, false)),
    ("sender commits: full, and waits", true, |run| sender_commits(run, At::Full, false)),
    ("sender commits: at an early wrap", true, |run| sender_commits(run, At::EarlyWrap, false)),
    ("sender commits: at a jump", true, |run| sender_commits(run, At::Jump, false)),
    ("sender commits: at the wrap after a jump", true, |run| sender_commits(run, At::AfterJump, false)),
    ("sender commits: in the middle of the payload", true, |run| sender_commits(run, At::Payload, false)),
    ("sender commits: a batch", true, |run| sender_commits(run, At::Batch, false)),
    ("sender commits: a batch at an early wrap", true, |run| sender_commits(run, At::BatchAtWrap, false)),
    ("sender commits: with a traceparent", true, |run| sender_commits(run, At::Traced, false)),
    ("sender commits: with a traceparent at an early wrap", true, |run| sender_commits(run, At::TracedAtWrap, false)),
    ("sender commits: a successor's first message", true, |run| sender_commits(run, At::Successor, false)),
    ("sender commits: a successor's first message, at a wrap", true, |run| {
        sender_commits(run, At::SuccessorAtWrap, false)
    }),
    ("sender commits: the receiver asleep", true, |run| sender_commits(run, At::Asleep, false)),
    ("sender commits: the receiver asleep in a wait", false, |run| sender_commits(run, At::Waited, false)),
    ("sender commits: nearly full, read late", false, |run| sender_commits(run, At::NearlyFull, true)),
    ("sender commits: at an early wrap, read late", false, |run| sender_commits(run, At::EarlyWrap, true)),
    ("sender commits: at a jump, read late", false, |run| sender_commits(run, At::Jump, true)),
    ("sender commits: at the wrap after a jump, read late", false, |run| sender_commits(run, At::AfterJump, true)),
    ("sender commits: a batch at an early wrap, read late", false, |run| sender_commits(run, At::BatchAtWrap, true)),
    ("sender commits: a successor's first message, at a wrap, read late", false, |run| {
        sender_commits(run, At::SuccessorAtWrap, true)
    }),
    ("sender syncs", true, |run| sender_commits(run, At::Sync, false)),
    ("sender closes", true, sender_closes),
    ("receiver attaches: empty lane", true, |run| receiver_attaches(run, 0)),
    ("receiver attaches: messages wait", true, |run| receiver_attaches(run, 5)),
    ("receiver waits in an event loop", true, receiver_arms),
    ("receiver releases: one by one", true, |run| receiver_releases(run, Take::One)),
    ("receiver releases: copied", true, |run| receiver_releases(run, Take::Copy)),
    ("receiver releases: a batch", true, |run| receiver_releases(run, Take::Batch)),
    ("receiver releases: held, out of order", true, |run| receiver_releases(run, Take::Held)),
    ("receiver releases: wakes a full sender", true, |run| receiver_releases(run, Take::Wake)),
    ("receiver releases: without a sender", true, receiver_releases_alone),
    ("receiver flushes to a file", true, |run| receiver_flushes(run, &RecordFileOptions::new())),
    ("receiver flushes to files incrementally", true, |run| {
        receiver_flushes(run, &RecordFileOptions::new().rotate_bytes(700))
    }),
    ("receiver resumes", true, receiver_resumes),
    ("sender resumes", true, sender_resumes),
    ("sender commits, and its successor dies as well", false, successors_die),
    ("receiver closes", true, receiver_closes),
    ("recover", true, recover),
    ("remove", true, remove),
    ("connect: sender commits", true, |run| connected_sender_commits(run, false)),
    ("connect: sender commits, with descriptors", true, |run| connected_sender_commits(run, true)),
    ("connect: receiver releases", true, |run| connected_receiver_releases(run, false)),
    ("connect: receiver releases, with descriptors", true, |run| connected_receiver_releases(run, true)),
    ("gather: sender joins, commits and closes", true, gathered_sender),
    ("gather: receiver accepts senders and releases", false, gathering_receiver),
    ("broadcast: publisher creates and sends", true, broadcast::publisher_creates),
    ("broadcast: publisher passes one that lags", true, |run| {
        broadcast::publisher_laps(run, || broadcast::by(Policy::Lag))
    }),
    ("broadcast: publisher passes one that has held it up", false, |run| {
        broadcast::publisher_laps(run, broadcast::until)
    }),
    ("broadcast: publisher waits in a full lane", true, broadcast::publisher_waits),
    ("broadcast: publisher takes over", true, broadcast::publisher_takes_over),
    ("broadcast: publisher sends, stopped, and a gate joins", false, |run| {
        broadcast::publisher_goes_on_and_one_joins(run, false)
    }),
    ("broadcast: publisher takes over, stopped, and a gate joins", false, |run| {
        broadcast::publisher_goes_on_and_one_joins(run, true)
    }),
    ("broadcast: subscriber joins: gate", true, |run| broadcast::subscriber_joins(run, Policy::Gate)),
    ("broadcast: subscriber joins: lag", true, |run| broadcast::subscriber_joins(run, Policy::Lag)),
    ("broadcast: subscriber joins, stopped, and is passed: gate", false, |run| {
        broadcast::subscriber_joins_and_is_passed(run, broadcast::oldest)
    }),
    ("broadcast: subscriber joins, stopped, and is passed: lag", false, |run| {
        broadcast::subscriber_joins_and_is_passed(run, || broadcast::by(Policy::Lag))
    }),
    ("broadcast: durable joins: gate", true, |run| broadcast::durable_joins(run, broadcast::oldest, false)),
    ("broadcast: durable continues: gate", true, |run| broadcast::durable_joins(run, broadcast::oldest, true)),
    ("broadcast: durable continues: gate until", true, |run| broadcast::durable_joins(run, broadcast::until, true)),
    ("broadcast: durable continues: lag", false, |run| {
        broadcast::durable_joins(run, || broadcast::by(Policy::Lag), true)
    }),
    ("broadcast: subscriber leaves", true, |run| broadcast::subscriber_leaves(run, false)),
    ("broadcast: durable leaves", true, |run| broadcast::subscriber_leaves(run, true)),
    ("broadcast: durable is removed", true, broadcast::durable_is_removed),
    ("broadcast: publisher begins with a limit", true, broadcast::publisher_limits),
    ("broadcast: publisher begins with a limit, stopped, and a gate joins", false, |run| {
        broadcast::publisher_limits_and_a_gate_joins(run)
    }),
    ("broadcast: subscriber joins, stopped, and a limit begins: gate", false, |run| {
        broadcast::subscriber_joins_beside_a_limit(run, false, false)
    }),
    ("broadcast: subscriber joins, stopped, and a limit begins: durable gate", false, |run| {
        broadcast::subscriber_joins_beside_a_limit(run, true, false)
    }),
    ("broadcast: subscriber joins, stopped, and a limit begins: durable continues", false, |run| {
        broadcast::subscriber_joins_beside_a_limit(run, true, true)
    }),
    ("broadcast by connect: subscriber joins: gate", true, |run| {
        broadcast_connected::subscriber_joins(run, Policy::Gate)
    }),
    ("broadcast by connect: subscriber joins: lag", true, |run| {
        broadcast_connected::subscriber_joins(run, Policy::Lag)
    }),
    ("broadcast by connect: subscriber leaves: gate", true, |run| {
        broadcast_connected::subscriber_leaves(run, Policy::Gate)
    }),
    ("broadcast by connect: subscriber leaves: lag", false, |run| {
        broadcast_connected::subscriber_leaves(run, Policy::Lag)
    }),
    ("broadcast by connect: publisher admits and sends: gate", true, |run| {
        broadcast_connected::publisher_ends(run, Policy::Gate, false)
    }),
    ("broadcast by connect: publisher admits and sends: lag", true, |run| {
        broadcast_connected::publisher_ends(run, Policy::Lag, false)
    }),
    ("broadcast by connect: publisher closes", true, |run| {
        broadcast_connected::publisher_ends(run, Policy::Gate, true)
    }),
    ("call: client connects, calls and closes: empty lanes", true, |run| calls::client_calls(run, calls::Lanes::Empty)),
    ("call: client connects, calls and closes: full lanes", false, |run| calls::client_calls(run, calls::Lanes::Full)),
    ("call: client connects, calls and closes: in pieces", false, |run| calls::client_calls(run, calls::Lanes::Pieces)),
    ("call: service answers and closes: empty lanes", true, |run| calls::service_answers(run, calls::Lanes::Empty)),
    ("call: service answers and closes: full lanes", false, |run| calls::service_answers(run, calls::Lanes::Full)),
    ("call: service answers and closes: in pieces", false, |run| calls::service_answers(run, calls::Lanes::Pieces)),
    ("call: service drains: empty lanes", true, |run| calls::service_drains(run, calls::Lanes::Empty)),
    ("call: service drains: full lanes", false, |run| calls::service_drains(run, calls::Lanes::Full)),
    ("call: service drains: in pieces", false, |run| calls::service_drains(run, calls::Lanes::Pieces)),
    ("handshake: sender connects", true, |run| handshake(run, true, false, Before::Fresh)),
    ("handshake: sender listens", true, |run| handshake(run, true, true, Before::Fresh)),
    ("handshake: sender connects to a survivor", true, |run| handshake(run, true, false, Before::Survives)),
    ("handshake: sender listens for a survivor", true, |run| handshake(run, true, true, Before::Survives)),
    ("handshake: sender connects to the survivor of a jump", true, |run| handshake(run, true, false, Before::Jumped)),
    ("handshake: sender listens for the survivor of a jump", true, |run| handshake(run, true, true, Before::Jumped)),
    ("handshake: receiver connects", true, |run| handshake(run, false, false, Before::Fresh)),
    ("handshake: receiver listens", true, |run| handshake(run, false, true, Before::Fresh)),
    ("handshake: receiver connects to a survivor", true, |run| handshake(run, false, false, Before::Survives)),
    ("handshake: receiver listens for a survivor", true, |run| handshake(run, false, true, Before::Survives)),
    ("handshake by a short name: sender connects", true, |run| by_short_name(run, true, false, Before::Fresh)),
    ("handshake by a short name: sender listens", true, |run| by_short_name(run, true, true, Before::Fresh)),
    ("handshake by a short name: sender listens for a survivor", true, |run| {
        by_short_name(run, true, true, Before::Survives)
    }),
    ("handshake by a short name: receiver connects to a survivor", true, |run| {
        by_short_name(run, false, false, Before::Survives)
    }),
];

fn main() {
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    let (mut passed, mut failed) = (0, 0);
    shared();
    for stops in [false, true] {
        for (name, stoppable, scenario) in SCENARIOS {
            let full = format!("{} at every step: {name}", if stops { "stopped" } else { "killed" });
            if !full.contains(&filter) || (stops && !stoppable) {
                continue;
            }
            // Broadcasts take a minute: CI kills at every eighth step, `./run verify steps` at all, and stops too.
            let all = !name.starts_with("broadcast") || std::env::var_os("PELTON_EVERY_STEP").is_some();
            if stops && !all {
                continue;
            }
            match every_step(*scenario, stops, if all { 1 } else { 8 }) {
                Ok(steps) => {
                    passed += 1;
                    println!("test {full} ... ok, {steps} steps");
                }
                Err(step) => {
                    failed += 1;
                    println!("test {full} ... FAILED at step {step}");
                }
            }
        }
    }
    println!("\ntest result: {}. {passed} passed; {failed} failed", if failed == 0 { "ok" } else { "FAILED" });
    std::process::exit((failed != 0).into());
}

/// Runs the scenario with n from 1 on, `apart`; returns the victim's number of steps, or the step that failed.
fn every_step(scenario: fn(&Run), stops: bool, apart: u64) -> Result<u64, String> {
    // In memory, if possible: the scenarios create thousands of channels.
    let base = if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" };
    let root = tempfile::Builder::new().prefix("pt").tempdir_in(base).unwrap();
    // Early enough to stop a victim of few steps too.
    let mut n = if stops { 2 } else { 1 };
    loop {
        let run = Run { stops, root: root.path().join(n.to_string()), has_short_name: false };
        std::fs::create_dir(&run.root).unwrap();
        shared().begin(n, stops);
        let open = descriptors();
        let well = catch_unwind(AssertUnwindSafe(|| {
            scenario(&run);
            pelton_testkit::eventually_is(open, "descriptors", descriptors);
            assert_eq!(run.mappings(), Vec::<String>::new(), "mappings were left");
        }));
        let steps = shared().steps.load(SeqCst);
        if well.is_err() {
            return Err(format!("{n} ({})", if steps < n { "got through" } else { shared().step() }));
        }
        if steps < n {
            return Ok(steps);
        }
        std::fs::remove_dir_all(&run.root).unwrap();
        n += if stops { SAMPLE } else { apart };
    }
}

/// One pass of a scenario.
struct Run {
    stops: bool,
    /// Empty at first, and for this pass only.
    root: PathBuf,
    /// Then it is below the root.
    has_short_name: bool,
}

impl Run {
    fn path(&self) -> PathBuf {
        self.root.join("channel")
    }

    fn name(&self) -> String {
        match self.has_short_name {
            true => "short".to_owned(),
            false => format!("unix:{}", self.root.join("s").display()),
        }
    }

    /// The names in the root.
    fn left(&self) -> Vec<String> {
        names(&self.root)
    }

    /// Whether only the channel is left, with the files of that many lanes and no others.
    #[track_caller]
    fn only_the_channel_is_left(&self, lanes: u32) {
        assert_eq!(self.left(), ["channel"]);
        let mut wanted: Vec<String> =
            ["channel", "receiver", "receiver.bell", "receiver.life"].map(str::to_owned).to_vec();
        for lane in 0..lanes {
            wanted.extend(["bell", "consumer", "data", "life", "producer"].map(|kind| format!("{lane}.{kind}")));
        }
        wanted.sort();
        assert_eq!(names(&self.path()), wanted);
    }

    /// Mappings of lanes in this process.
    fn mappings(&self) -> Vec<String> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let ours = |line: &&str| line.contains(self.root.to_str().unwrap()) || line.contains("memfd:pelton");
        maps.lines().filter(ours).map(str::to_owned).collect()
    }

    /// Waits for the victim's end, whatever the victim does until then. At a stop it calls `look` before it lets the
    /// victim continue.
    fn finish(&self, victim: Child, mut look: impl FnMut()) {
        victim.watch(false, &mut look);
        victim.wait();
        assert_eq!(shared().panicked.load(SeqCst), 0, "the victim panicked");
    }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
