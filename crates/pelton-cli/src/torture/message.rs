//! The messages of a storm: what size a number's has, what is in it, and whether one is what it should be.
//!
//! From 16 bytes on a message begins with its number (u64), its size (u32) and a CRC-32 (u32) of those 12 bytes and of the rest,
//! little-endian; the rest is bytes that count up from the number, modulo 251. A shorter one has as many bytes of its number,
//! twice, as there is room for.

use serde::{Deserialize, Serialize};

/// What goes before the bytes of a message.
pub const HEADER_BYTES: usize = 16;
/// Prime, so that no power of two repeats the pattern.
const PERIOD: usize = 251;

/// How large the messages of a channel are: both sides know it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Sizes {
    pub seed: u64,
    pub bytes_min: u64,
    pub bytes_max: u64,
}

impl Sizes {
    /// Small ones more often than large ones: of eight messages one is drawn from all sizes, one from half of them, and so on.
    pub fn of(&self, number: u64) -> usize {
        let drawn = mix(self.seed.wrapping_add(number));
        let range = ((self.bytes_max - self.bytes_min + 1) >> (drawn >> 61)).max(1);
        (self.bytes_min + (drawn & 0xffff_ffff) % range) as usize
    }
}

/// SplitMix64's step: every bit of the answer hangs on every bit of the number.
pub fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Numbers that a seed gives.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice(mix(seed))
    }

    /// Below `bound`.
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

/// The pattern that every message's rest is cut from.
pub struct Pattern(Vec<u8>);

impl Pattern {
    pub fn new(bytes_max: u64) -> Pattern {
        Pattern((0..bytes_max as usize + PERIOD).map(|at| (at % PERIOD) as u8).collect())
    }

    /// Writes the message of this number into all of `room`.
    pub fn write(&self, number: u64, room: &mut [u8]) {
        let size = room.len();
        let Some((header, rest)) = room.split_at_mut_checked(HEADER_BYTES) else {
            return room.copy_from_slice(&short(number)[..size]);
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

/// Whether `payload` is the message of this number, or what is wrong with it. What is expected is not looked at but for the
/// size: the message must prove itself.
pub fn check(sizes: &Sizes, number: u64, payload: &[u8]) -> Result<(), String> {
    let wanted = sizes.of(number);
    if payload.len() != wanted {
        return Err(format!("message {number} has {} bytes, {wanted} were sent", payload.len()));
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
    let (found, told) = (sum.finalize().to_le_bytes(), &header[12..]);
    let says = u64::from_le_bytes(header[..8].try_into().expect("8 bytes"));
    if found != told {
        return Err(format!(
            "message {number} of {wanted} bytes, which says it is {says}, has the CRC {found:02x?}, not {told:02x?}"
        ));
    }
    match says == number {
        true => Ok(()),
        false => Err(format!("message {number} says it is {says}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_proves_itself_and_any_changed_byte_is_noticed() {
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
    fn sizes_reach_both_ends() {
        let sizes = Sizes { seed: 1, bytes_min: 0, bytes_max: 1000 };
        let all: Vec<usize> = (1..20_000).map(|number| sizes.of(number)).collect();
        assert_eq!(all.iter().min(), Some(&0));
        assert_eq!(all.iter().max(), Some(&1000));
    }
}
