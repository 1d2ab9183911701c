//! The way into one lane for messages with headers: in order, and what there is no room for waits in memory.

use super::frame::{HEADER_BYTES, Header, Outgoing};
use crate::error::Result;
use crate::sender::Sender;
use std::collections::VecDeque;

#[derive(Debug)]
pub(crate) struct Outbox {
    pub(crate) sender: Sender,
    queue: VecDeque<Outgoing>,
}

impl Outbox {
    pub(crate) fn new(sender: Sender) -> Outbox {
        Outbox { sender, queue: VecDeque::new() }
    }

    /// Whether nothing waits for room.
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether a message goes into the lane as one record.
    #[inline(always)]
    pub(crate) fn is_whole(&self, bytes: usize) -> bool {
        bytes as u64 + HEADER_BYTES as u64 <= self.sender.message_bytes_max()
    }

    /// Writes a message that goes into one record, if there is room now and nothing waits before it.
    #[inline(always)]
    pub(crate) fn try_write(&mut self, header: Header, payload: &[u8]) -> Result<bool> {
        Ok(self.queue.is_empty() && self.sender.try_write(header.words(), payload)?)
    }

    /// Puts a message behind those that wait; [`Outbox::flush`] writes it.
    pub(crate) fn push(&mut self, header: Header, payload: &[u8]) {
        self.push_all(Outgoing::new(header, payload.to_vec(), None));
    }

    /// As [`Outbox::push`].
    pub(crate) fn push_all(&mut self, message: Outgoing) {
        self.queue.push_back(message);
    }

    /// Writes as much as there is room for. True: nothing waits any more.
    pub(crate) fn flush(&mut self) -> Result<bool> {
        let most = self.sender.message_bytes_max();
        while let Some(first) = self.queue.front_mut() {
            let bytes = first.next_bytes(most);
            let (header, piece) = first.next(bytes);
            if !self.sender.try_write(header, piece)? {
                return Ok(false);
            }
            if first.advance(bytes) {
                self.queue.pop_front();
            }
        }
        Ok(true)
    }

    /// Bytes of the record that is waiting for room.
    pub(crate) fn wanted(&self) -> usize {
        self.queue.front().map_or(0, |first| first.next_bytes(self.sender.message_bytes_max()))
    }

    /// Nobody is there to read it any more.
    pub(crate) fn clear(&mut self) {
        self.queue.clear();
    }
}
