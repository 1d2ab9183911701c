//! Framing: a stream of bytes as messages, and back.
//!
//! *lines*: a message is a line without its newline; the last line may lack one. *len32*: before each message is its
//! length, an unsigned 32-bit little-endian number.
//!
//! The splitter owns the one input buffer, and returns frames in place. The buffer grows to the largest frame, and
//! never beyond the limit plus one read: an endless line fails at the limit, a length of 4 GiB once it is read.

use std::fmt;

/// How messages are separated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Framing {
    /// A message is a line, without its newline
    Lines,
    /// A message follows its length: 32 bits, unsigned, little-endian
    Len32,
}

impl Framing {
    /// Appends `message` to `out` as a frame.
    pub fn write(self, message: &[u8], out: &mut Vec<u8>) {
        match self {
            Framing::Lines => {
                pelton::raw::append(message, out);
                out.push(b'\n');
            }
            Framing::Len32 => {
                let length = u32::try_from(message.len()).expect("a message is at most u32::MAX bytes");
                out.extend_from_slice(&length.to_le_bytes());
                pelton::raw::append(message, out);
            }
        }
    }
}

/// An invalid input.
#[allow(missing_docs, reason = "the texts below explain each field")]
#[derive(Debug, PartialEq, Eq)]
pub enum FrameError {
    /// A frame above the limit of a message. For a line, `bytes` of it were read so far.
    TooLarge { framing: Framing, number: u64, bytes: u64, bytes_max: u64 },
    /// The input ends inside the length or the payload of a frame.
    Truncated { inside: &'static str, number: u64, offset: u64, found: u64, expected: u64 },
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            FrameError::TooLarge { framing: Framing::Lines, number, bytes, bytes_max } => {
                write!(f, "line {number} has {bytes} bytes or more, a message has at most {bytes_max}")
            }
            FrameError::TooLarge { framing: Framing::Len32, number, bytes, bytes_max } => {
                write!(
                    f,
                    "frame {number} has a length of {bytes} bytes, a message has at most {bytes_max}: is the input in len32 frames?"
                )
            }
            FrameError::Truncated { inside, number, offset, found, expected } => write!(
                f,
                "the input ends inside the {inside} of frame {number} (at offset {offset}): it has {found} of {expected} bytes; is it truncated?"
            ),
        }
    }
}

/// Splits the input into frames.
pub struct Splitter {
    framing: Framing,
    bytes_max: usize,
    buffer: Vec<u8>,
    /// The first byte after the returned frames.
    start: usize,
    /// The end of the read bytes.
    end: usize,
    /// No newline before this position: a long line is searched once, not at every read.
    searched: usize,
    /// Frames returned so far.
    number: u64,
    /// Bytes of input before `start`.
    offset: u64,
    ended: bool,
}

impl Splitter {
    /// Creates a splitter that reads `read_bytes` at a time and refuses frames above `bytes_max`.
    pub fn new(framing: Framing, bytes_max: u64, read_bytes: usize) -> Splitter {
        Splitter {
            framing,
            bytes_max: usize::try_from(bytes_max).unwrap_or(usize::MAX),
            buffer: vec![0; read_bytes],
            start: 0,
            end: 0,
            searched: 0,
            number: 0,
            offset: 0,
            ended: false,
        }
    }

    /// The space for the next read; call it only after `next` has returned `None`.
    pub fn space(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.searched -= self.start;
            self.start = 0;
        }
        if self.end == self.buffer.len() {
            // Doubled, so that a large frame is copied a bounded number of times.
            self.buffer.resize(self.buffer.len() * 2, 0);
        }
        &mut self.buffer[self.end..]
    }

    /// The caller has read this many bytes into `space`; 0 is the end of the input.
    pub fn filled(&mut self, bytes: usize) {
        self.end += bytes;
        self.ended |= bytes == 0;
    }

    /// Whether the input has ended; frames may remain.
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// Bytes of input in the frames returned so far.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The next frame. `None`: there are no more frames at the end of the input; before it, the caller reads more.
    #[allow(clippy::should_implement_trait, reason = "an Iterator cannot lend frames of itself")]
    pub fn next(&mut self) -> Result<Option<&[u8]>, FrameError> {
        match self.framing {
            Framing::Lines => self.next_line(),
            Framing::Len32 => self.next_len32(),
        }
    }

    fn next_line(&mut self) -> Result<Option<&[u8]>, FrameError> {
        let (line_end, after) = match memchr::memchr(b'\n', &self.buffer[self.searched..self.end]) {
            Some(at) => (self.searched + at, self.searched + at + 1),
            None if self.ended && self.start < self.end => (self.end, self.end),
            None => {
                self.searched = self.end;
                self.check(self.end - self.start)?;
                return Ok(None);
            }
        };
        self.check(line_end - self.start)?;
        Ok(Some(self.return_frame(self.start, line_end, after)))
    }

    fn next_len32(&mut self) -> Result<Option<&[u8]>, FrameError> {
        let found = self.end - self.start;
        let Some(length) = self.buffer[self.start..self.end].first_chunk::<4>() else {
            return self.incomplete("length", found, 4);
        };
        let length = u32::from_le_bytes(*length) as usize;
        self.check(length)?;
        let (first, after) = (self.start + 4, self.start + 4 + length);
        if after > self.end {
            return self.incomplete("payload", found - 4, length);
        }
        Ok(Some(self.return_frame(first, after, after)))
    }

    /// Returns `first..last`; the next frame begins at `after`.
    fn return_frame(&mut self, first: usize, last: usize, after: usize) -> &[u8] {
        self.offset += (after - self.start) as u64;
        self.start = after;
        self.searched = after;
        self.number += 1;
        &self.buffer[first..last]
    }

    fn check(&self, bytes: usize) -> Result<(), FrameError> {
        if bytes <= self.bytes_max {
            return Ok(());
        }
        let (bytes, bytes_max) = (bytes as u64, self.bytes_max as u64);
        Err(FrameError::TooLarge { framing: self.framing, number: self.number + 1, bytes, bytes_max })
    }

    fn incomplete(&self, inside: &'static str, found: usize, expected: usize) -> Result<Option<&[u8]>, FrameError> {
        if !self.ended || self.start == self.end {
            return Ok(None);
        }
        let (found, expected) = (found as u64, expected as u64);
        Err(FrameError::Truncated { inside, number: self.number + 1, offset: self.offset, found, expected })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All frames of `input`, read `step` bytes at a time.
    fn split(framing: Framing, bytes_max: u64, mut input: &[u8], step: usize) -> Result<Vec<Vec<u8>>, FrameError> {
        let mut splitter = Splitter::new(framing, bytes_max, 8);
        let mut frames = Vec::new();
        loop {
            while let Some(frame) = splitter.next()? {
                frames.push(frame.to_vec());
            }
            if splitter.ended() {
                return Ok(frames);
            }
            let space = splitter.space();
            let bytes = step.min(space.len()).min(input.len());
            space[..bytes].copy_from_slice(&input[..bytes]);
            input = &input[bytes..];
            splitter.filled(bytes);
        }
    }

    fn strings(frames: Vec<Vec<u8>>) -> Vec<String> {
        frames.into_iter().map(|frame| String::from_utf8(frame).unwrap()).collect()
    }

    #[test]
    fn lines_keep_everything_but_their_newline() {
        for step in 1..40 {
            let frames = split(Framing::Lines, 100, b"one\r\n\n\ntwo and a longer one\nlast", step).unwrap();
            assert_eq!(strings(frames), ["one\r", "", "", "two and a longer one", "last"], "step {step}");
        }
    }

    #[test]
    fn a_newline_at_the_end_does_not_start_another_line() {
        assert_eq!(strings(split(Framing::Lines, 100, b"a\nb\n", 3).unwrap()), ["a", "b"]);
        assert_eq!(strings(split(Framing::Lines, 100, b"\n", 3).unwrap()), [""]);
        assert!(split(Framing::Lines, 100, b"", 3).unwrap().is_empty());
    }

    #[test]
    fn bytes_that_are_no_text_are_kept() {
        let line: Vec<u8> = (0..=255).filter(|byte| *byte != b'\n').collect();
        assert_eq!(split(Framing::Lines, 300, &line, 7).unwrap(), [line]);
    }

    #[test]
    fn len32_carries_any_bytes_and_empty_messages() {
        let messages: [&[u8]; 5] = [b"", b"\n\n", &[0, 255, 10, 13], b"", &[7; 1000]];
        let mut input = Vec::new();
        for message in messages {
            Framing::Len32.write(message, &mut input);
        }
        for step in 1..40 {
            assert_eq!(split(Framing::Len32, 1000, &input, step).unwrap(), messages, "step {step}");
        }
    }

    #[test]
    fn the_error_for_a_truncated_len32_frame_has_its_position() {
        let mut input = Vec::new();
        Framing::Len32.write(b"whole", &mut input);
        Framing::Len32.write(b"cut off", &mut input);
        for cut in 10..input.len() {
            let error = split(Framing::Len32, 100, &input[..cut], 5).unwrap_err();
            let (inside, found, expected) = if cut < 13 { ("length", cut - 9, 4) } else { ("payload", cut - 13, 7) };
            let found = found as u64;
            assert_eq!(error, FrameError::Truncated { inside, number: 2, offset: 9, found, expected }, "cut at {cut}");
        }
        assert_eq!(split(Framing::Len32, 100, &input[..9], 5).unwrap(), [b"whole"]);
        let error = split(Framing::Len32, 100, &input[..11], 5).unwrap_err().to_string();
        assert_eq!(
            error,
            "the input ends inside the length of frame 2 (at offset 9): it has 2 of 4 bytes; is it truncated?"
        );
    }

    #[test]
    fn a_frame_above_the_limit_is_refused_before_it_is_read_completely() {
        let mut endless = Splitter::new(Framing::Lines, 100, 64);
        let error = loop {
            if let Err(error) = endless.next() {
                break error;
            }
            let space = endless.space();
            space.fill(b'x');
            let bytes = space.len();
            endless.filled(bytes);
        };
        assert!(matches!(error, FrameError::TooLarge { number: 1, bytes: 101..=256, bytes_max: 100, .. }), "{error}");

        let error = split(Framing::Len32, 100, &[255, 255, 255, 255, 1], 5).unwrap_err();
        assert!(matches!(error, FrameError::TooLarge { bytes: 0xffff_ffff, .. }), "{error}");
    }

    #[test]
    fn a_frame_of_exactly_the_limit_passes() {
        let line = [b'y'; 100];
        assert_eq!(split(Framing::Lines, 100, &line, 9).unwrap(), [line]);
        let mut input = Vec::new();
        Framing::Len32.write(&line, &mut input);
        assert_eq!(split(Framing::Len32, 100, &input, 9).unwrap(), [line]);
    }
}
