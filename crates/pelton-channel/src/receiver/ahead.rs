//! Messages read ahead of their release: for a caller that copies many at once, and hands them out one by one.

use super::{QUANTUM, Receiver};
use pelton_lane::Cursor;

/// The messages of [`Receiver::read_ahead`]. Those that are not released are still the receiver's next ones.
#[derive(Debug, Default)]
pub struct Ahead {
    /// For each message the position after it, and the payload's bytes up to there.
    ends: Vec<(Cursor, u64)>,
    released: usize,
}

#[doc(hidden)]
impl Receiver {
    /// Reads the current lane's next messages in the common case, up to the end of its quantum, until `read` refuses
    /// one by returning false. It releases none, and forgets what `ahead` had before.
    #[inline]
    pub fn read_ahead(&mut self, ahead: &mut Ahead, mut read: impl FnMut(&[u8]) -> bool) {
        ahead.ends.clear();
        ahead.released = 0;
        if self.peek_fast().is_none() {
            return;
        }
        let consumer = &self.lanes.current.consumer;
        let (mut cursor, mut bytes) = (consumer.cursor(), 0);
        while let Some(record) = consumer.take_at(&mut cursor) {
            let payload = consumer.payload(&record);
            // SAFETY: the lane checked that the record lies in the data. It is not released before this borrow ends.
            if !read(unsafe { std::slice::from_raw_parts(payload.as_ptr(), record.bytes as usize) }) {
                break;
            }
            bytes += record.bytes;
            ahead.ends.push((cursor, bytes));
            if self.many && record.seq.is_multiple_of(QUANTUM) {
                break;
            }
        }
    }

    /// Releases the oldest `count` messages of `ahead`, or all that it has. The receiver has done nothing else since
    /// [`Receiver::read_ahead`].
    pub fn release_ahead(&mut self, ahead: &mut Ahead, count: usize) {
        let count = count.min(ahead.ends.len() - ahead.released);
        if count == 0 {
            return;
        }
        let bytes_before = ahead.released.checked_sub(1).map_or(0, |last| ahead.ends[last].1);
        ahead.released += count;
        let (cursor, bytes) = ahead.ends[ahead.released - 1];
        self.release_to(cursor, bytes - bytes_before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;

    fn read(receiver: &mut Receiver, ahead: &mut Ahead, most: usize) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        receiver.read_ahead(ahead, |bytes| {
            let fits = found.len() < most;
            if fits {
                found.push(bytes.to_vec());
            }
            fits
        });
        found
    }

    #[test]
    fn messages_read_ahead_stay_the_next_until_they_are_released() {
        let (mut sender, mut receiver) = Options::new().threads().unwrap();
        for number in 0..10_u8 {
            sender.send(&[number; 100]).unwrap();
        }
        let mut ahead = Ahead::default();
        assert_eq!(read(&mut receiver, &mut ahead, 4).len(), 4);
        assert_eq!(sender.unreleased(), 10);
        receiver.release_ahead(&mut ahead, 1);
        receiver.release_ahead(&mut ahead, 2);
        assert_eq!(sender.unreleased(), 7);
        // The fourth one was read, and is found again.
        let found = read(&mut receiver, &mut ahead, 100);
        assert_eq!(found.iter().map(|message| message[0]).collect::<Vec<_>>(), [3, 4, 5, 6, 7, 8, 9]);
        receiver.release_ahead(&mut ahead, 100);
        receiver.release_ahead(&mut ahead, 1);
        assert_eq!((sender.unreleased(), receiver.counters().messages, receiver.counters().bytes), (0, 10, 1000));
        assert!(read(&mut receiver, &mut ahead, 1).is_empty());
    }

    #[test]
    fn nothing_is_read_ahead_of_a_held_message() {
        let (mut sender, mut receiver) = Options::new().threads().unwrap();
        sender.send(b"held").unwrap();
        sender.send(b"next").unwrap();
        let held = receiver.receive().unwrap().hold();
        let mut ahead = Ahead::default();
        assert!(read(&mut receiver, &mut ahead, 1).is_empty());
        drop(held);
        assert_eq!(&*receiver.receive().unwrap(), b"next");
        assert_eq!(sender.unreleased(), 0);
    }
}
