//! The messages of a crash test: their sizes, their contents, and a check of both.
//!
//! A message of 16 bytes or more begins with its number (u64), its size (u32) and a CRC-32 (u32), little-endian. The
//! CRC covers the number, the size and the rest. The rest counts up from the number, modulo 251. A shorter message is
//! the start of its number, written twice.

use serde::{Deserialize, Serialize};

/// Size of the header of a message.
pub const HEADER_BYTES: usize = 16;
/// A prime: the pattern repeats at no power of two.
const PERIOD: usize = 251;

/// The sizes of the messages of a channel, known to both sides.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Sizes {
    pub seed: u64,
    pub bytes_min: u64,
    pub bytes_max: u64,
}

impl Sizes {
    /// Small sizes are more frequent: of eight numbers, about one draws from the whole range, one from its lower half,
    /// one from its lower quarter, and so on.
    pub fn of(&self, number: u64) -> usize {
        let drawn = mix(self.seed.wrapping_add(number));
        let range = ((self.bytes_max - self.bytes_min + 1) >> (drawn >> 61)).max(1);
        (self.bytes_min + (drawn & 0xffff_ffff) % range) as usize
    }
}

/// A step of SplitMix64: every bit of the result depends on every bit of the number.
pub fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Random numbers from a seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(mix(seed))
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0) % bound
    }

    pub fn one_in(&mut self, bound: u64) -> bool {
        self.below(bound) == 0
    }

    pub fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }
}

/// The bytes from which the rest of every message is taken.
pub struct Pattern(Vec<u8>);

impl Pattern {
    pub fn new(bytes_max: u64) -> Pattern {
        Pattern((0..bytes_max as usize + PERIOD).map(|at| (at % PERIOD) as u8).collect())
    }

    /// Writes the message `number` into all of `space`.
    pub fn write(&self, number: u64, space: &mut [u8]) {
        let size = space.len();
        let Some((header, rest)) = space.split_at_mut_checked(HEADER_BYTES) else {
            return space.copy_from_slice(&short(number)[..size]);
        };
        rest.copy_from_slice(self.rest(number, size));
        header.copy_from_slice(&self.header(number, size));
    }

    fn rest(&self, number: u64, size: usize) -> &[u8] {
        &self.0[(number % PERIOD as u64) as usize..][..size - HEADER_BYTES]
    }

    fn header(&self, number: u64, size: usize) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(&number.to_le_bytes());
        header[8..12].copy_from_slice(&(size as u32).to_le_bytes());
        let mut sum = crc32fast::Hasher::new();
        sum.update(&header[..12]);
        sum.update(self.rest(number, size));
        header[12..].copy_from_slice(&sum.finalize().to_le_bytes());
        header
    }
}

fn short(number: u64) -> [u8; HEADER_BYTES] {
    let mut twice = [0; HEADER_BYTES];
    twice[..8].copy_from_slice(&number.to_le_bytes());
    twice[8..].copy_from_slice(&number.to_le_bytes());
    twice
}

/// Checks that `payload` is the message `number`. Only the size comes from `number`; the rest must agree with the
/// header of the message.
pub fn check(sizes: &Sizes, number: u64, payload: &[u8]) -> Result<(), String> {
    let wanted = sizes.of(number);
    if payload.len() != wanted {
        return Err(format!("message {number} has {} bytes, wanted {wanted}", payload.len()));
    }
    let Some((header, rest)) = payload.split_at_checked(HEADER_BYTES) else {
        return match *payload == short(number)[..wanted] {
            true => Ok(()),
            false => Err(format!("message {number} is {payload:02x?}")),
        };
    };
    let mut sum = crc32fast::Hasher::new();
    sum.update(&header[..12]);
    sum.update(rest);
    let (found, stored) = (sum.finalize().to_le_bytes(), &header[12..]);
    let own_number = u64::from_le_bytes(header[..8].try_into().expect("8 bytes"));
    if found != stored {
        return Err(format!(
            "message {number} of {wanted} bytes, with the number {own_number} in it, has the CRC {found:02x?}, not {stored:02x?}"
        ));
    }
    match own_number == number {
        true => Ok(()),
        false => Err(format!("message {number} has the number {own_number} in it")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_accepts_a_message_and_detects_any_changed_byte() {
        let sizes = Sizes { seed: 7, bytes_min: 0, bytes_max: 200 };
        let pattern = Pattern::new(200);
        for number in 1..300 {
            let mut message = vec![0; sizes.of(number)];
            pattern.write(number, &mut message);
            assert_eq!(check(&sizes, number, &message), Ok(()));
            for at in 0..message.len() {
                message[at] ^= 1;
                assert!(check(&sizes, number, &message).is_err(), "byte {at} of {number}");
                message[at] ^= 1;
            }
            message.push(0);
            assert!(check(&sizes, number, &message).is_err());
            let other = (number + 1..).find(|other| sizes.of(*other) == message.len() - 1 && *other != number).unwrap();
            message.pop();
            assert!(message.is_empty() || check(&sizes, other, &message).is_err(), "{number} taken for {other}");
        }
    }

    #[test]
    fn sizes_reach_both_bounds() {
        let sizes = Sizes { seed: 1, bytes_min: 0, bytes_max: 1000 };
        let all: Vec<usize> = (1..20_000).map(|number| sizes.of(number)).collect();
        assert_eq!(all.iter().min(), Some(&0));
        assert_eq!(all.iter().max(), Some(&1000));
    }
}
