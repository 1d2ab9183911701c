//! The position file of `pelton-bridge in`: which message of the stream is the last one in the channel.
//!
//! Two slots, each written by one `pwrite` in a block of its own. Before a commit into the channel, the slot that
//! is not the truth gets the position after that commit. So after a kill at any instruction, the slot whose number
//! equals the end of the channel's lane is the truth: the older one if the commit did not happen, the newer one if
//! it did. Writes of a killed process stay in the page cache, in order; a checksum refuses a slot that a crash of
//! the machine has torn. The file is locked by `flock`, which belongs to the open file: one bridge at a time has
//! it.

use pelton_cli::failure::Failure;
use std::{
    fs::{File, OpenOptions},
    io::ErrorKind,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

const MAGIC: &[u8; 16] = b"pelton-bridge 1\n";
/// Each part has a block of its own, so that no write tears another part.
const BLOCK: u64 = 4096;
const SLOT_BYTES: usize = 88;
/// A name of a stream has at most 255 bytes; subjects may be longer.
const TEXT_BYTES_MAX: usize = 3900;

/// The position after one commit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot {
    /// Counts the slots written: the newer of two has the larger one. 0: the slot is empty.
    pub order: u64,
    /// The identity of the channel's lane.
    pub lane: [u64; 2],
    /// The generation of the sender that commits.
    pub generation: u64,
    /// The number that the lane's next message has after the commit.
    pub next_seq: u32,
    /// Every message of the stream up to this sequence is in the channel, except the parts from `from` on that belong
    /// to a message whose end has not come.
    pub done: u64,
    /// Messages of the packed message `done + 1` that are in the channel too.
    pub index: u32,
    /// The sequence at which reading has to begin: at most `done + 1`.
    pub from: u64,
    /// The newest sequence read, and when the server stored it, in nanoseconds since 1970; 0: none yet.
    pub seen: u64,
    pub seen_ns: i64,
    /// As `from`, for the messages that the channel's receiver has released.
    pub released: u64,
}

impl Slot {
    fn encode(&self) -> [u8; SLOT_BYTES] {
        let mut bytes = [0; SLOT_BYTES];
        let words = [
            self.order,
            self.lane[0],
            self.lane[1],
            self.generation,
            u64::from(self.next_seq) | u64::from(self.index) << 32,
            self.done,
            self.from,
            self.seen,
            self.seen_ns as u64,
            self.released,
        ];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        let sum = crc32fast::hash(&bytes[..80]);
        bytes[80..84].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// `None`: empty, or torn.
    fn decode(bytes: &[u8; SLOT_BYTES]) -> Option<Slot> {
        let word = |index: usize| u64::from_le_bytes(bytes[index * 8..index * 8 + 8].try_into().expect("eight bytes"));
        let sum = u32::from_le_bytes(bytes[80..84].try_into().expect("four bytes"));
        (word(0) != 0 && crc32fast::hash(&bytes[..80]) == sum).then(|| Slot {
            order: word(0),
            lane: [word(1), word(2)],
            generation: word(3),
            next_seq: word(4) as u32,
            index: (word(4) >> 32) as u32,
            done: word(5),
            from: word(6),
            seen: word(7),
            seen_ns: word(8) as i64,
            released: word(9),
        })
    }
}

/// What the slots say about a lane whose end is known.
#[derive(Debug, PartialEq, Eq)]
pub enum Resolved {
    /// The bridge has not begun.
    Fresh,
    /// This slot is the truth.
    At(Slot),
    /// The slots are of another lane: `0` is the newer one.
    OtherLane(Slot),
    /// Another sender used the lane while it was unknown whether the last commit happened.
    Foreign(Slot),
    /// Neither slot fits the lane's end.
    Unknown(Slot),
}

/// The file, locked by this process.
#[derive(Debug)]
pub struct Position {
    file: File,
    path: PathBuf,
    /// The truth, and the place of its slot.
    current: Slot,
    place: u64,
}

impl Position {
    /// Opens the file, or creates it, and locks it. `None`: another process has it.
    pub fn open(path: &Path) -> Result<Option<Position>, Failure> {
        let failed = |what: &str, error: std::io::Error| Failure::system(format!("{what} {}", path.display()), error);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(|error| failed("opening the position file", error))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => return Ok(None),
            Err(std::fs::TryLockError::Error(error)) => return Err(failed("locking the position file", error)),
        }
        Ok(Some(Position { file, path: path.to_owned(), current: Slot::default(), place: 1 }))
    }

    /// Compares the stream that the file belongs to with `stream`, or notes it in a new file.
    pub fn check_stream(&self, stream: &StreamName) -> Result<(), Failure> {
        let text = stream.text();
        if text.len() > TEXT_BYTES_MAX {
            return Err(Failure::Input(format!(
                "the stream's name and the subject have {} bytes, at most {TEXT_BYTES_MAX} are possible",
                text.len()
            )));
        }
        let mut found = vec![0; BLOCK as usize];
        let bytes = self.read(&mut found, 0)?;
        found.truncate(bytes);
        if found.is_empty() {
            let mut header = MAGIC.to_vec();
            header.extend((text.len() as u32).to_le_bytes());
            header.extend(text.as_bytes());
            header.extend(crc32fast::hash(&header).to_le_bytes());
            return self.write(&header, 0);
        }
        let noted = parse_header(&found).ok_or_else(|| {
            Failure::Refused(format!(
                "{} is no position file of a bridge, or is damaged: name another file with --position",
                self.path.display()
            ))
        })?;
        if noted == text {
            return Ok(());
        }
        Err(Failure::Refused(format!(
            "{} belongs to {}, and this is {}: the stream was made anew, or is another one. What of it is in the \
             channel is not known: after removing the file, --start says where to begin",
            self.path.display(),
            describe(noted),
            describe(&text)
        )))
    }

    /// Finds the truth for a lane whose next message has the number `next_seq`, and whose last sender was of
    /// `generation`.
    pub fn resolve(&self, lane: [u64; 2], generation: u64, next_seq: u32) -> Result<Resolved, Failure> {
        let mut slots: Vec<Slot> = Vec::new();
        for place in [1, 2] {
            slots.extend(self.slot(place)?);
        }
        slots.sort_by_key(|slot| slot.order);
        let Some(&newer) = slots.last() else { return Ok(Resolved::Fresh) };
        let here: Vec<Slot> = slots.into_iter().filter(|slot| slot.lane == lane).collect();
        if here.is_empty() {
            return Ok(Resolved::OtherLane(newer));
        }
        let is_in_doubt = here.len() == 2 && here[0].next_seq != here[1].next_seq;
        if is_in_doubt && newer.generation != generation {
            return Ok(Resolved::Foreign(newer));
        }
        Ok(match here.iter().rev().find(|slot| slot.next_seq == next_seq) {
            Some(slot) => Resolved::At(*slot),
            None => Resolved::Unknown(newer),
        })
    }

    /// Begins at `slot`, and removes the other slot. Nothing is in doubt afterwards.
    pub fn begin(&mut self, slot: Slot) -> Result<(), Failure> {
        let mut newest = 0;
        let mut place = 1;
        for candidate in [1, 2] {
            if let Some(found) = self.slot(candidate)? {
                newest = newest.max(found.order);
                if found.order == slot.order {
                    place = candidate;
                }
            }
        }
        // Written first: a kill in between leaves one of the two that fit the lane's end.
        self.current = Slot { order: newest + 1, ..slot };
        self.place = 3 - place;
        self.write(&self.current.encode(), self.place * BLOCK)?;
        self.write(&[0; SLOT_BYTES], place * BLOCK)
    }

    /// Notes the position after the next commit, which the caller makes now.
    pub fn note(&mut self, slot: Slot) -> Result<(), Failure> {
        let slot = Slot { order: self.current.order + 1, ..slot };
        let place = 3 - self.place;
        self.write(&slot.encode(), place * BLOCK)?;
        (self.current, self.place) = (slot, place);
        Ok(())
    }

    /// The last slot noted.
    pub fn current(&self) -> Slot {
        self.current
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn slot(&self, place: u64) -> Result<Option<Slot>, Failure> {
        let mut bytes = [0; SLOT_BYTES];
        let count = self.read(&mut bytes, place * BLOCK)?;
        Ok(if count == SLOT_BYTES { Slot::decode(&bytes) } else { None })
    }

    fn read(&self, into: &mut [u8], at: u64) -> Result<usize, Failure> {
        let mut count = 0;
        while count < into.len() {
            match self.file.read_at(&mut into[count..], at + count as u64) {
                Ok(0) => break,
                Ok(bytes) => count += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Failure::system(format!("reading {}", self.path.display()), error)),
            }
        }
        Ok(count)
    }

    fn write(&self, bytes: &[u8], at: u64) -> Result<(), Failure> {
        self.file
            .write_all_at(bytes, at)
            .map_err(|error| Failure::system(format!("writing {}", self.path.display()), error))
    }
}

/// What a position is relative to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamName {
    /// The stream.
    pub name: String,
    /// When it was made, in nanoseconds since 1970: a stream made anew counts from 1 again.
    pub created_ns: i128,
    /// The subjects that the bridge takes.
    pub subject: String,
}

impl StreamName {
    fn text(&self) -> String {
        format!("{}\n{}\n{}", self.name, self.created_ns, self.subject)
    }
}

fn parse_header(bytes: &[u8]) -> Option<&str> {
    let (body, sum) = {
        let len = u32::from_le_bytes(bytes.get(16..20)?.try_into().ok()?) as usize;
        let end = len.checked_add(20)?;
        (bytes.get(..end)?, bytes.get(end..end + 4)?)
    };
    let is_whole = body.starts_with(MAGIC) && crc32fast::hash(body).to_le_bytes() == sum;
    is_whole.then(|| std::str::from_utf8(&body[20..]).ok()).flatten()
}

fn describe(text: &str) -> String {
    let mut lines = text.splitn(3, '\n');
    let mut next = || lines.next().unwrap_or_default();
    format!("stream `{}` made at {} ns, subject `{}`", next(), next(), next())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LANE: [u64; 2] = [7, 9];

    fn stream() -> StreamName {
        StreamName { name: "S".to_owned(), created_ns: 5, subject: "a.>".to_owned() }
    }

    fn slot(next_seq: u32, done: u64) -> Slot {
        Slot { lane: LANE, generation: 2, next_seq, done, from: done + 1, ..Slot::default() }
    }

    fn opened(path: &Path) -> Position {
        let position = Position::open(path).unwrap().expect("nobody else has the file");
        position.check_stream(&stream()).unwrap();
        position
    }

    #[test]
    fn the_end_of_the_lane_says_whether_the_last_commit_happened() {
        let here = tempfile::tempdir().unwrap();
        let path = here.path().join("position");
        let mut position = opened(&path);
        assert_eq!(position.resolve(LANE, 1, 1).unwrap(), Resolved::Fresh);
        position.begin(slot(1, 0)).unwrap();
        for number in 2..20 {
            position.note(slot(number, u64::from(number) - 1)).unwrap();
            drop(position);
            position = opened(&path);
            for end in [number - 1, number] {
                match position.resolve(LANE, 2, end).unwrap() {
                    Resolved::At(found) => assert_eq!((found.next_seq, found.done), (end, u64::from(end) - 1)),
                    other => panic!("{other:?}"),
                }
            }
            let Resolved::At(found) = position.resolve(LANE, 2, number).unwrap() else { panic!() };
            position.begin(found).unwrap();
        }
    }

    #[test]
    fn an_end_between_is_refused_and_a_foreign_sender_beside_a_doubt_too() {
        let here = tempfile::tempdir().unwrap();
        let mut position = opened(&here.path().join("position"));
        position.begin(slot(10, 9)).unwrap();
        position.note(slot(20, 19)).unwrap();
        assert!(matches!(position.resolve(LANE, 2, 15).unwrap(), Resolved::Unknown(_)));
        assert!(matches!(position.resolve(LANE, 3, 20).unwrap(), Resolved::Foreign(_)));
        assert!(matches!(position.resolve([1, 1], 2, 20).unwrap(), Resolved::OtherLane(_)));
        let Resolved::At(found) = position.resolve(LANE, 2, 20).unwrap() else { panic!() };
        position.begin(found).unwrap();
        // Without a doubt, a later sender that sent nothing changes nothing.
        assert!(matches!(position.resolve(LANE, 3, 20).unwrap(), Resolved::At(_)));
        assert!(matches!(position.resolve(LANE, 3, 21).unwrap(), Resolved::Unknown(_)));
    }

    #[test]
    fn a_torn_slot_is_no_slot() {
        let here = tempfile::tempdir().unwrap();
        let path = here.path().join("position");
        let mut position = opened(&path);
        position.begin(slot(1, 0)).unwrap();
        position.note(slot(2, 1)).unwrap();
        let place = position.place;
        for byte in 0..84 {
            let mut bytes = [0; 1];
            position.file.read_exact_at(&mut bytes, place * BLOCK + byte).unwrap();
            position.file.write_all_at(&[!bytes[0]], place * BLOCK + byte).unwrap();
            assert!(matches!(position.resolve(LANE, 2, 2).unwrap(), Resolved::Unknown(_)), "byte {byte}");
            assert!(matches!(position.resolve(LANE, 2, 1).unwrap(), Resolved::At(_)), "byte {byte}");
            position.file.write_all_at(&bytes, place * BLOCK + byte).unwrap();
        }
    }

    #[test]
    fn a_stream_made_anew_and_a_second_bridge_are_refused() {
        let here = tempfile::tempdir().unwrap();
        let path = here.path().join("position");
        let position = opened(&path);
        assert!(Position::open(&path).unwrap().is_none());
        let anew = StreamName { created_ns: 6, ..stream() };
        let refused = position.check_stream(&anew).unwrap_err().text().unwrap();
        assert!(refused.contains("made anew"), "{refused}");
        std::fs::write(&path, "something else").unwrap();
        assert!(position.check_stream(&stream()).is_err());
    }
}
