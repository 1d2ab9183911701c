//! The messages of an exchange, and a driver's report of them.

use std::fmt;

/// COUNT messages, whose sizes repeat.
#[derive(Clone)]
pub struct Messages {
    pub count: u64,
    pub sizes: Vec<usize>,
}

impl Messages {
    /// Parses COUNT and SIZES of a command line.
    pub fn parse(count: &str, sizes: &str) -> Result<Messages, String> {
        let count = count.parse().map_err(|error| format!("`{count}` is no COUNT: {error}"))?;
        let sizes = sizes.split(',').map(|size| size.parse().map_err(|error| format!("`{size}` is no size: {error}")));
        Ok(Messages { count, sizes: sizes.collect::<Result<_, _>>()? })
    }

    /// Message `i`, counted from 0.
    pub fn get(&self, i: u64) -> Vec<u8> {
        let size = self.sizes[(i % self.sizes.len() as u64) as usize];
        let letters: Vec<u8> = (0..26).map(|j| b'a' + ((i + j) % 26) as u8).collect();
        let mut message = letters.repeat(size.div_ceil(26));
        message.truncate(size);
        message
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = Vec<u8>> + '_ {
        (0..self.count).map(|i| self.get(i))
    }

    /// The tally of the last `count` of them.
    pub fn tally_of_last(&self, count: u64) -> Tally {
        (self.count - count..self.count).map(|i| self.get(i)).collect()
    }
}

/// The number of messages, their bytes, and the sum of their checksums.
#[derive(Clone, Copy, Default)]
pub struct Tally {
    pub messages: u64,
    bytes: u64,
    checksum: u32,
}

impl Tally {
    pub fn add(&mut self, message: &[u8]) {
        self.messages += 1;
        self.bytes += message.len() as u64;
        self.checksum = self.checksum.wrapping_add(crc32fast::hash(message));
    }
}

impl<M: AsRef<[u8]>> FromIterator<M> for Tally {
    fn from_iter<I: IntoIterator<Item = M>>(messages: I) -> Tally {
        let mut tally = Tally::default();
        messages.into_iter().for_each(|message| tally.add(message.as_ref()));
        tally
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} messages {} bytes checksum {:08x}", self.messages, self.bytes, self.checksum)
    }
}
