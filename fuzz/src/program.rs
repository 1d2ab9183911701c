//! Bytes as a list of actions.

use std::sync::atomic::{AtomicBool, Ordering};

/// Sets the flag when dropped, also by a panic, to stop the other threads.
pub struct Over<'a>(pub &'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The bytes that are left. After the end they are zeros.
pub struct Program<'a>(pub &'a [u8]);

impl<'a> Program<'a> {
    pub fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    pub fn below(&mut self, bound: usize) -> usize {
        let word = if bound > 256 { u16::from_le_bytes([self.byte(), self.byte()]) } else { self.byte().into() };
        usize::from(word) % bound
    }

    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    pub fn bytes(&mut self, most: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    /// The first and the second half, for two threads that act at the same time.
    pub fn split(self) -> (Program<'a>, Program<'a>) {
        let (one, other) = self.0.split_at(self.0.len() / 2);
        (Program(one), Program(other))
    }

    /// A value in place of `truth`: one near it, an end of a range, or any value.
    pub fn lie(&mut self, truth: u64) -> u64 {
        const BOUNDARIES: [u64; 16] = [
            0,
            1,
            2,
            8,
            64,
            1 << 28,
            1 << 31,
            0xffff_ffff,
            1 << 32,
            1 << 63,
            u64::MAX,
            4096,
            65536,
            32736,
            8192,
            1 << 34,
        ];
        let small = u64::from(self.byte() % 9);
        match self.byte() % 8 {
            0 => truth ^ 1 << (self.byte() % 64),
            1 => truth.wrapping_add(small),
            2 => truth.wrapping_sub(small),
            3 => self.of(&BOUNDARIES).wrapping_add(small),
            4 => self.of(&BOUNDARIES).wrapping_sub(small),
            5 => truth >> 32 << 32 | self.of(&BOUNDARIES).wrapping_sub(small) & 0xffff_ffff,
            6 => self.of(&BOUNDARIES) << 32 | truth & 0xffff_ffff,
            _ => {
                let mut word = [0; 8];
                let bytes = self.bytes(8);
                word[..bytes.len()].copy_from_slice(bytes);
                u64::from_le_bytes(word)
            }
        }
    }
}
