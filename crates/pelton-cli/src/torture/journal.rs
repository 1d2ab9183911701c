//! What one side of a storm has done, in a file that both it and the storm map: it survives the side, and has nothing to do with
//! the channel. `verify/controls/README.md` has the words as a table, for sides in other languages.
//!
//! Each word has one writer: the side, but for `Stop`. A side stores a word *before* or *after* the step of the channel that it
//! tells of, in the order of the program; whoever reads it when the side is dead finds at most the one step in between undecided.

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::{
    ffi::c_void,
    fs::File,
    io,
    path::Path,
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering},
};

/// Bytes of a journal.
const BYTES: usize = 4096;
/// Pairs of a jump: the number that was expected, and what came.
pub const JUMPS_MAX: u64 = 64;
const JUMPS_AT: usize = 64;
const TEXT_AT: usize = 256;

/// The words of a journal, by place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Word {
    /// 0 starting, 1 in the channel, 2 done in order, 3 failed (the text says why).
    State,
    /// Written by the storm: 0 goes on; a sender: 1 ends in order; a receiver: the number behind the last message.
    Stop,
    /// The number of the first message that this side dealt with, 0 before.
    First,
    /// Sender: committed up to here at most. Receiver: released up to here at most.
    Pending,
    /// Sender: committed up to here at least. Receiver: released up to here at least.
    Done,
    /// Receiver: the last number given out by the channel.
    Taken,
    /// 1 while it waits for the other side.
    Waiting,
    /// How often it was told that the other side died.
    Told,
    /// When, the last time: CLOCK_MONOTONIC, nanoseconds.
    ToldNs,
    /// How many messages were told as not released.
    ToldUnreleased,
    /// Sender: `Done` at that moment. Receiver: how many messages it held.
    ToldBeside,
    /// How often it met another side: a successor, by connect.
    Met,
    /// Messages whose bytes are not those that were sent.
    Garbage,
    /// Messages that a predecessor had been given, and that were not marked as given again.
    Unmarked,
    /// Messages marked as given again.
    Again,
    /// Messages committed or received.
    Messages,
    /// Their payloads together.
    Bytes,
    /// Jumps noted: the number that came was not the one expected.
    Jumps,
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

// SAFETY: a mapping of its own, of which only whole words are loaded and stored, atomically.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// New ones, all 0.
    pub fn create(path: &Path, count: usize) -> io::Result<Words> {
        let file = File::options().read(true).write(true).create_new(true).open(path)?;
        file.set_len(count as u64 * 8)?;
        Words::map(&file, count)
    }

    /// Those that the storm has made.
    pub fn open(path: &Path, count: usize) -> io::Result<Words> {
        let file = File::options().read(true).write(true).open(path)?;
        match file.metadata()?.len() {
            length if length == count as u64 * 8 => Words::map(&file, count),
            length => Err(io::Error::other(format!("a journal has {length} bytes, wanted {}", count * 8))),
        }
    }

    fn map(file: &File, count: usize) -> io::Result<Words> {
        // SAFETY: a new mapping, which nobody knows yet, of a file as long as it.
        let map = unsafe {
            mmap(std::ptr::null_mut(), count * 8, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)?
        };
        let words = NonNull::new(map.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Words { words, count })
    }

    fn at(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.count);
        // SAFETY: within the mapping, which lives as long as `self`; aligned, as a page is; other processes store whole words.
        unsafe { self.words.add(index).as_ref() }
    }

    pub fn load(&self, index: usize) -> u64 {
        self.at(index).load(Ordering::Acquire)
    }

    /// Stored neither before what the program did before it, nor after what it does then: both are stores, with release.
    pub fn store(&self, index: usize, value: u64) {
        self.at(index).store(value, Ordering::Release);
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and nothing of it is lent any more. An error would leave some pages mapped, no more.
        let _ = unsafe { munmap(self.words.as_ptr().cast::<c_void>(), self.count * 8) };
    }
}

/// A journal, mapped.
pub struct Journal(Words);

impl Journal {
    /// A new one, all 0.
    pub fn create(path: &Path) -> io::Result<Journal> {
        Words::create(path, BYTES / 8).map(Journal)
    }

    /// One that the storm has made.
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

    /// Another number came than the one expected.
    pub fn jump(&self, expected: u64, found: u64) {
        let count = self.get(Word::Jumps);
        if count < JUMPS_MAX {
            let at = JUMPS_AT + 2 * count as usize;
            self.0.store(at, expected);
            self.0.store(at + 1, found);
        }
        self.set(Word::Jumps, count + 1);
    }

    /// The jumps, up to as many as are kept.
    pub fn jumps(&self) -> Vec<(u64, u64)> {
        let load = |at| self.0.load(at);
        let count = self.get(Word::Jumps).min(JUMPS_MAX) as usize;
        (0..count).map(|jump| (load(JUMPS_AT + 2 * jump), load(JUMPS_AT + 2 * jump + 1))).collect()
    }

    /// Says what is wrong; the first text stays.
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

    /// Every word that tells of progress, for who looks whether there is any.
    pub fn fingerprint(&self) -> Vec<u64> {
        (0..=Word::Jumps as usize).map(|index| self.0.load(index)).collect()
    }

    /// Its words by name, for people.
    pub fn words(&self) -> String {
        const ALL: [Word; 18] = {
            use Word::*;
            [
                State,
                Stop,
                First,
                Pending,
                Done,
                Taken,
                Waiting,
                Told,
                ToldNs,
                ToldUnreleased,
                ToldBeside,
                Met,
                Garbage,
                Unmarked,
                Again,
                Messages,
                Bytes,
                Jumps,
            ]
        };
        ALL.iter().map(|word| format!("{word:?} {}", self.get(*word))).collect::<Vec<_>>().join(", ")
    }
}
