//! The journal of one side of a crash test: a file that the side and the test map. It outlives the side, and is
//! independent of the channel. `verify/controls/README.md` has the words as a table, for sides in other languages.
//!
//! Each word has one writer: the side, except for `Stop`. A side stores a word *before* or *after* a step of the
//! channel, in program order. So after the death of the side, at most one step is uncertain.

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::{
    ffi::c_void,
    fs::File,
    io,
    path::Path,
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering},
};

/// Size of a journal.
const BYTES: usize = 4096;
/// The most jumps in a journal: pairs of the expected and the received number.
pub const JUMPS_MAX: u64 = 64;
const JUMPS_AT: usize = 64;
const TEXT_AT: usize = 256;

/// The words of a journal, by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Word {
    /// 0 starting, 1 in the channel, 2 done in order, 3 failed (the text has the reason).
    State,
    /// Written by the test. 0: continue. For a sender, 1: end in order. For a receiver: the number after the last
    /// message.
    Stop,
    /// The number of the first message of this side; 0 before.
    First,
    /// Sender: committed up to here at most. Receiver: released up to here at most.
    Pending,
    /// Sender: committed up to here at least. Receiver: released up to here at least.
    Done,
    /// Receiver: the last number that the channel delivered.
    Taken,
    /// 1 while it waits for the other side.
    Waiting,
    /// How often it detected the death of the other side.
    Detections,
    /// When it did so last: CLOCK_MONOTONIC, nanoseconds.
    DetectedNs,
    /// The number of unreleased messages in that error.
    ReportedUnreleased,
    /// Sender: `Done` at that moment. Receiver: the number of messages that it held.
    CountAtDetection,
    /// How often it connected: to the first peer and to successors.
    Connections,
    /// Messages with wrong bytes.
    Garbage,
    /// Redelivered messages without the mark.
    Unmarked,
    /// Messages with the redelivery mark.
    Redelivered,
    /// Messages committed or received.
    Messages,
    /// Bytes of their payloads.
    Bytes,
    /// Jumps: the received number was not the expected one.
    Jumps,
    /// Of a broadcast. Subscriber: messages that it counts as missed.
    Missed,
    /// Of a broadcast. Subscriber: the number of its last message's publisher.
    Peer,
}

/// See [`Word::State`].
pub const READY: u64 = 1;
/// See [`Word::State`].
pub const DONE: u64 = 2;
/// See [`Word::State`].
pub const FAILED: u64 = 3;

/// Words in a file that several processes map. Each word has one writer.
pub struct Words {
    words: NonNull<AtomicU64>,
    count: usize,
}

// SAFETY: the mapping belongs to this value and is not tied to a thread.
unsafe impl Send for Words {}
// SAFETY: shared access only loads and stores whole words, atomically.
unsafe impl Sync for Words {}

impl Words {
    /// Creates the file; all words are 0.
    pub fn create(path: &Path, count: usize) -> io::Result<Words> {
        let file = File::options().read(true).write(true).create_new(true).open(path)?;
        file.set_len(count as u64 * 8)?;
        Words::map(&file, count)
    }

    /// Opens a file that the test has created.
    pub fn open(path: &Path, count: usize) -> io::Result<Words> {
        let file = File::options().read(true).write(true).open(path)?;
        match file.metadata()?.len() {
            length if length == count as u64 * 8 => Words::map(&file, count),
            length => Err(io::Error::other(format!("a journal has {length} bytes, wanted {}", count * 8))),
        }
    }

    fn map(file: &File, count: usize) -> io::Result<Words> {
        // SAFETY: the kernel chooses the address of a new mapping, so no other object overlaps it; the file is as long
        // as the mapping.
        let map = unsafe {
            mmap(std::ptr::null_mut(), count * 8, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)?
        };
        let words = NonNull::new(map.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Words { words, count })
    }

    fn at(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.count);
        // SAFETY: the assertion keeps the index within the mapping, which lives as long as `self` and is page-aligned.
        // Other processes store whole words atomically.
        unsafe { self.words.add(index).as_ref() }
    }

    pub fn load(&self, index: usize) -> u64 {
        self.at(index).load(Ordering::Acquire)
    }

    /// A release store: earlier stores of the program are visible first. The next step is a release store too, so this
    /// one is visible before it.
    pub fn store(&self, index: usize, value: u64) {
        self.at(index).store(value, Ordering::Release);
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: `map` created the mapping, and the end of `self` ends every borrow of it. An error would only leave
        // pages mapped.
        let _ = unsafe { munmap(self.words.as_ptr().cast::<c_void>(), self.count * 8) };
    }
}

/// A mapped journal.
pub struct Journal(Words);

impl Journal {
    /// Creates a journal; all words are 0.
    pub fn create(path: &Path) -> io::Result<Journal> {
        Words::create(path, BYTES / 8).map(Journal)
    }

    /// Opens a journal that the test has created.
    pub fn open(path: &Path) -> io::Result<Journal> {
        Words::open(path, BYTES / 8).map(Journal)
    }

    pub fn get(&self, word: Word) -> u64 {
        self.0.load(word as usize)
    }

    /// As [`Words::store`].
    pub fn set(&self, word: Word, value: u64) {
        self.0.store(word as usize, value);
    }

    pub fn add(&self, word: Word, more: u64) {
        self.set(word, self.get(word) + more);
    }

    /// Records that another number arrived than the expected one.
    pub fn jump(&self, expected: u64, found: u64) {
        let count = self.get(Word::Jumps);
        if count < JUMPS_MAX {
            let at = JUMPS_AT + 2 * count as usize;
            self.0.store(at, expected);
            self.0.store(at + 1, found);
        }
        self.set(Word::Jumps, count + 1);
    }

    /// The first [`JUMPS_MAX`] jumps.
    pub fn jumps(&self) -> Vec<(u64, u64)> {
        let load = |at| self.0.load(at);
        let count = self.get(Word::Jumps).min(JUMPS_MAX) as usize;
        (0..count).map(|jump| (load(JUMPS_AT + 2 * jump), load(JUMPS_AT + 2 * jump + 1))).collect()
    }

    /// Stores a text about a failure, unless there is one.
    pub fn explain(&self, text: &str) {
        if self.0.load(TEXT_AT) != 0 {
            return;
        }
        for (index, bytes) in text.as_bytes().chunks(8).take(BYTES / 8 - TEXT_AT - 1).enumerate() {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            self.0.store(TEXT_AT + index, u64::from_le_bytes(word));
        }
    }

    pub fn text(&self) -> String {
        let words = (TEXT_AT..BYTES / 8).map(|index| self.0.load(index));
        let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).take_while(|byte| *byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// All words, to detect progress.
    pub fn fingerprint(&self) -> Vec<u64> {
        (0..=Word::Peer as usize).map(|index| self.0.load(index)).collect()
    }

    /// Its words with their names, as text.
    pub fn words(&self) -> String {
        const ALL: [Word; 20] = {
            use Word::*;
            [
                State,
                Stop,
                First,
                Pending,
                Done,
                Taken,
                Waiting,
                Detections,
                DetectedNs,
                ReportedUnreleased,
                CountAtDetection,
                Connections,
                Garbage,
                Unmarked,
                Redelivered,
                Messages,
                Bytes,
                Jumps,
                Missed,
                Peer,
            ]
        };
        ALL.iter().map(|word| format!("{word:?} {}", self.get(*word))).collect::<Vec<_>>().join(", ")
    }
}
