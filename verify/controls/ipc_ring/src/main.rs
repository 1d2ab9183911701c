//! The crate `ipc_ring` in the randomized crash test: see `../../README.md`.
//!
//! A ring has one writer, which creates it, and no other can open it. So a sender's successor removes the file and
//! creates a new one. A receiver takes all messages of its ring, and opens the next one when none arrive.

#![allow(dead_code, reason = "the journal has words that are pelton's own")]

#[path = "../../../../crates/crash-test/src/host.rs"]
mod host;
#[path = "../../../../crates/crash-test/src/journal.rs"]
mod journal;
#[path = "../../../../crates/crash-test/src/message.rs"]
mod message;

use ipc_ring::{RingReader, RingWriter};
use journal::{DONE, FAILED, Journal, READY, Word};
use message::{HEADER_BYTES, Pattern, Sizes, check};
use serde::Deserialize;
use std::{error::Error, fs, os::unix::fs::MetadataExt as _, path::PathBuf, time::Duration};

/// How long no message arrives until a receiver checks for an order to end, or for another ring.
const SLICE: Duration = Duration::from_millis(20);

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[derive(Deserialize)]
struct Plan {
    role: String,
    place: PathBuf,
    journal: PathBuf,
    #[serde(flatten)]
    sizes: Sizes,
    capacity: usize,
    pause_every: u64,
    pause_us: u64,
    next: u64,
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (Some("side"), Some(plan)) = (arguments.next().as_deref(), arguments.next()) else {
        let done = host::host("side");
                // The crash test gives the ring's directory as the one for temporary files.
        let _ = fs::remove_file(std::env::temp_dir().join("ring"));
        return Ok(done?);
    };
    let plan: Plan = serde_json::from_str(&plan)?;
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let journal = Journal::open(&plan.journal)?;
    let done = if plan.role == "send" { send(&plan, &journal) } else { receive(&plan, &journal) };
    if let Err(error) = &done {
        journal.explain(&error.to_string());
    }
    journal.set(Word::State, if done.is_ok() { DONE } else { FAILED });
    Ok(())
}

fn pause(plan: &Plan, journal: &Journal, bytes: usize) {
    journal.add(Word::Messages, 1);
    journal.add(Word::Bytes, bytes as u64);
    if plan.pause_every > 0 && journal.get(Word::Messages).is_multiple_of(plan.pause_every) {
        std::thread::sleep(Duration::from_micros(plan.pause_us));
    }
}

fn send(plan: &Plan, journal: &Journal) -> Result<()> {
    let path = plan.place.join("ring");
    if path.exists() {
        fs::remove_file(&path)?;
    }
    let mut ring = RingWriter::create(&path, plan.capacity)?;
    let pattern = Pattern::new(plan.sizes.bytes_max);
    let (mut number, mut payload) = (plan.next, Vec::new());
    journal.set(Word::Pending, number - 1);
    journal.set(Word::Done, number - 1);
    journal.set(Word::First, number);
    journal.set(Word::State, READY);
    while journal.get(Word::Stop) == 0 {
        payload.resize(plan.sizes.of(number), 0);
        pattern.write(number, &mut payload);
        journal.set(Word::Pending, number);
        ring.push(&payload, None)?;
        journal.set(Word::Done, number);
        number += 1;
        pause(plan, journal, payload.len());
    }
    Ok(())
}

fn receive(plan: &Plan, journal: &Journal) -> Result<()> {
    let path = plan.place.join("ring");
    let (mut ring, mut inode, mut payload) = (None, 0, Vec::new());
    journal.set(Word::State, READY);
    while journal.get(Word::Stop) == 0 || journal.get(Word::Taken) + 1 < journal.get(Word::Stop) {
        let Some(reader) = &mut ring else {
            match (fs::metadata(&path), RingReader::open(&path)) {
                (Ok(metadata), Ok(reader)) => (ring, inode) = (Some(reader), metadata.ino()),
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
            continue;
        };
        let last = journal.get(Word::Taken);
        journal.set(Word::Pending, last + 1);
        match reader.pop(&mut payload, Some(SLICE)) {
            Ok(_) => {}
            Err(ipc_ring::IpcError::Timeout) => {
                if fs::metadata(&path).is_ok_and(|metadata| metadata.ino() != inode) {
                    ring = None;
                }
                continue;
            }
            Err(error) => return Err(error.into()),
        }
        let number = payload.get(..8).map_or(0, |bytes| u64::from_le_bytes(bytes.try_into().expect("8 bytes")));
        if payload.len() < HEADER_BYTES || check(&plan.sizes, number, &payload).is_err() {
            journal.explain(&format!("{} bytes that are no message, which say that they are {number}", payload.len()));
            journal.add(Word::Garbage, 1);
            continue;
        }
        if journal.get(Word::First) == 0 {
            journal.set(Word::Done, number - 1);
            journal.set(Word::Pending, number);
            journal.set(Word::First, number);
        } else if number != last + 1 {
            journal.jump(last + 1, number);
        }
        journal.set(Word::Taken, number);
        journal.set(Word::Pending, number);
        journal.set(Word::Done, number);
        pause(plan, journal, payload.len());
    }
    Ok(())
}
