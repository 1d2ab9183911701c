//! The payloads of messages: numbered, and checked byte by byte where that costs nothing.

use std::hint::black_box;

/// Messages before the first pass: enough to load the code and touch the first pages.
pub const WARM_UP: u64 = 16;

/// The bits of a number above these are its sender's; 2^40 messages of 1,024 senders fit.
pub const NUMBER_BITS: u32 = 48;

/// The first number of that sender.
pub fn first_number(index: u32) -> u64 {
    (index as u64) << NUMBER_BITS
}

/// The payloads, by round-robin: a message's number is written when the message before it in the same buffer has gone.
/// A sender that copies a message loads its number by a wide load. A wide load over a just-written narrow store cannot
/// be forwarded; it stalls until the store buffer drains. That stall, not the channel, would be measured if the number
/// were written just before. So there are several buffers, see [`buffer_count`].
pub struct Payloads {
    bytes: Vec<u8>,
    size: usize,
    buffer_count: usize,
}

/// How many buffers of `size` bytes there are: between two uses of one there are more stores than a store buffer
/// holds. A power of two.
pub fn buffer_count(size: usize) -> usize {
    if size <= 64 { 16 } else { 2 }
}

impl Payloads {
    /// For messages of at most `size` bytes.
    pub fn new(size: usize) -> Payloads {
        let buffer_count = buffer_count(size);
        let mut payloads = Payloads { bytes: buffer(size).repeat(buffer_count), size, buffer_count };
        payloads.begin(0);
        payloads
    }

    /// Writes the numbers of the first messages, from `first`.
    pub fn begin(&mut self, first: u64) {
        (first..first + self.buffer_count as u64).for_each(|n| self.prepare(n));
    }

    #[inline]
    fn prepare(&mut self, n: u64) {
        let at = self.at(n);
        stamp(&mut self.bytes[at..at + self.size], n);
    }

    #[inline]
    fn at(&self, n: u64) -> usize {
        (n as usize & (self.buffer_count - 1)) * self.size
    }

    /// Message `n`, already prepared.
    #[inline]
    pub fn prepared(&self, n: u64, size: usize) -> &[u8] {
        &self.bytes[self.at(n)..][..size]
    }

    /// Message `n` is sent: its buffer is free for another.
    #[inline]
    pub fn sent(&mut self, n: u64) {
        self.prepare(n + self.buffer_count as u64);
    }

    /// Whether that is message `n`, of `size` bytes, with all its bytes.
    #[inline]
    pub fn is_number(&self, message: &[u8], n: u64, size: usize) -> bool {
        let behind = NUMBER_BYTES.min(size)..;
        // All buffers have the same bytes after the number.
        message.len() == size
            && number(message) == expected(n, size)
            && are_same(&message[behind.clone()], &self.bytes[..size][behind])
    }
}

/// Bytes that are compared word by word; the fastest comparison takes the rest.
const BY_WORDS: usize = 256;

/// Whether those bytes are the same. The first ones word by word: the copy has just stored them by 64 bytes at once. A
/// processor forwards a word of such a store at once, but not an odd half: that load stalls until the store buffer
/// drains, and the stall, not the channel, would be measured.
#[inline]
fn are_same(found: &[u8], wanted: &[u8]) -> bool {
    let words = found.len().min(BY_WORDS) / 8 * 8;
    let ((near, far), (wanted_near, wanted_far)) = (found.split_at(words), wanted.split_at(words));
    let mut pairs = near.as_chunks::<8>().0.iter().zip(wanted_near.as_chunks::<8>().0);
    // Most messages have no rest: its comparison would be a call.
    pairs.all(|(found, wanted)| u64::from_ne_bytes(*found) == u64::from_ne_bytes(*wanted))
        && (far.is_empty() || far == wanted_far)
}

/// A payload without a number yet.
pub fn buffer(size: usize) -> Vec<u8> {
    (0..size).map(pattern).collect()
}

/// The check of most messages: it only keeps the compiler from leaving out the copy.
#[inline]
pub fn glance(message: &[u8]) -> bool {
    black_box(message.as_ptr());
    true
}

/// The check of the first and the last: every byte after the number.
pub fn whole(message: &[u8]) -> bool {
    message.iter().enumerate().skip(NUMBER_BYTES).all(|(at, byte)| *byte == pattern(at))
}

fn pattern(at: usize) -> u8 {
    (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8).wrapping_add(7)
}

/// A message begins with its number, little-endian, or with as much of it as fits.
const NUMBER_BYTES: usize = 8;

/// Writes number `n` into a message.
#[inline]
pub fn stamp(payload: &mut [u8], n: u64) {
    match payload.first_chunk_mut::<NUMBER_BYTES>() {
        Some(first) => *first = n.to_le_bytes(),
        None => {
            let size = payload.len();
            payload.copy_from_slice(&n.to_le_bytes()[..size]);
        }
    }
}

/// The number of a message.
#[inline]
pub fn number(message: &[u8]) -> u64 {
    match message.first_chunk::<NUMBER_BYTES>() {
        Some(first) => u64::from_le_bytes(*first),
        None => message.iter().rev().fold(0, |number, byte| number << 8 | *byte as u64),
    }
}

/// The value of [`number`] for message `n` of `size` bytes.
#[inline]
pub fn expected(n: u64, size: usize) -> u64 {
    if size >= NUMBER_BYTES { n } else { n & ((1 << (8 * size)) - 1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_of_any_size_has_its_number() {
        for size in 0..20 {
            for n in [0, 1, 255, 256, 65_537, u64::MAX - 1] {
                let mut payload: Vec<u8> = (0..size).map(pattern).collect();
                stamp(&mut payload, n);
                assert_eq!(number(&payload), expected(n, size), "{n} in {size} bytes");
                assert!(whole(&payload));
            }
        }
    }

    #[test]
    fn payloads_have_their_numbers_in_every_round() {
        for size in [0, 3, 16, 64, 300] {
            let mut payloads = Payloads::new(size);
            for first in [5, 0] {
                payloads.begin(first);
                for n in first..first + 100 {
                    assert!(payloads.is_number(payloads.prepared(n, size), n, size), "{n} in {size} bytes");
                    payloads.sent(n);
                }
            }
        }
    }

    #[test]
    fn a_changed_byte_is_detected() {
        let mut payload: Vec<u8> = (0..1000).map(pattern).collect();
        payload[999] ^= 1;
        assert!(!whole(&payload));
    }
}
