//! skeleton of the public API: bodies come later, signatures hold
#![allow(missing_docs, unused)]
use std::{os::fd::*, time::Instant, ops::{Deref, DerefMut}, marker::PhantomData};

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("closed")] Closed { unreleased: u64 },
    #[error("peer died")] PeerDied { unreleased: u64 },
    #[error("too large")] TooLarge { bytes: u64, bytes_max: u64 },
    #[error("corrupt")] Corrupt(String),
    #[error("forked")] Forked,
    #[error("refused")] Refused(String),
    #[error("timed out")] TimedOut(String), // connect/accept only
    #[error("name")] Name(String),
    #[error("{what}")] System { what: String, source: std::io::Error },
}
pub type Result<T> = std::result::Result<T, Error>;
impl Error { pub fn is_closed(&self) -> bool { todo!() } pub fn is_peer_died(&self) -> bool { todo!() } }

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait { Spin, Block }

/// What became of a message: full and timed out are answers, not errors.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent { Sent, Full, TimedOut }

#[derive(Clone, Debug)]
pub struct Options {}
impl Options {
    pub fn new() -> Options { todo!() }
    /// bytes, the sender's side decides; default 64 MiB
    pub fn capacity(self, bytes: u64) -> Self { todo!() }
    pub fn message_bytes_max(self, bytes: u64) -> Self { todo!() }
    pub fn wait(self, wait: Wait) -> Self { todo!() }
    pub fn allow_uids(self, uids: &[u32]) -> Self { todo!() }
    /// connect waits for a listener until then; default: at once, no waiting
    pub fn connect_deadline(self, deadline: Instant) -> Self { todo!() }
    pub fn connect_sender(&self, name: &str) -> Result<Sender> { todo!() }
    pub fn connect_receiver(&self, name: &str) -> Result<Receiver> { todo!() }
    pub fn listen(&self, name: &str) -> Result<Listener> { todo!() }
    /// both ends in one process, anonymous memory
    pub fn threads(&self) -> Result<(Sender, Receiver)> { todo!() }
}
pub struct Listener {}
impl Listener {
    pub fn bind(name: &str) -> Result<Listener> { todo!() }
    /// waits for a connecting receiver: this side sends
    pub fn accept_sender(&self) -> Result<Sender> { todo!() }
    /// waits for a connecting sender: this side receives
    pub fn accept_receiver(&self) -> Result<Receiver> { todo!() }
    pub fn accept_sender_until(&self, deadline: Instant) -> Result<Option<Sender>> { todo!() }
    pub fn accept_receiver_until(&self, deadline: Instant) -> Result<Option<Receiver>> { todo!() }
}
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters { pub messages: u64, pub bytes: u64, pub waits: u64, pub sleeps: u64, pub wakes_sent: u64, pub depth_max: u64 }

pub struct Sender {}
impl Sender {
    pub fn connect(name: &str) -> Result<Sender> { todo!() }
    /// copies; Full at once when there is no room
    pub fn try_send(&mut self, payload: &[u8]) -> Result<Sent> { todo!() }
    /// copies; waits for room as `Wait` says
    pub fn send(&mut self, payload: &[u8]) -> Result<()> { todo!() }
    pub fn send_until(&mut self, payload: &[u8], deadline: Instant) -> Result<Sent> { todo!() }
    pub fn try_reserve(&mut self, bytes: usize) -> Result<Option<Reservation<'_>>> { todo!() }
    pub fn reserve(&mut self, bytes: usize) -> Result<Reservation<'_>> { todo!() }
    pub fn reserve_until(&mut self, bytes: usize, deadline: Instant) -> Result<Option<Reservation<'_>>> { todo!() }
    /// messages committed and not yet released by the receiver
    pub fn unreleased(&self) -> u64 { todo!() }
    /// waits until the receiver has released every message
    pub fn drain(&mut self) -> Result<()> { todo!() }
    pub fn drain_until(&mut self, deadline: Instant) -> Result<bool> { todo!() }
    pub fn counters(&self) -> Counters { todo!() }
    pub fn capacity(&self) -> u64 { todo!() }
    pub fn message_bytes_max(&self) -> u64 { todo!() }
    /// for an event loop: true = no room now for `bytes`, the descriptor becomes readable when there is (or the peer goes);
    /// false = there is room now
    pub fn arm(&mut self, bytes: usize) -> Result<bool> { todo!() }
    pub fn disarm(&mut self) { todo!() }
    /// after PeerDied: waits for the receiver's successor under the same name and offers it the lane with everything unreleased
    pub fn resume(&mut self) -> Result<()> { todo!() }
    pub fn resume_until(&mut self, deadline: Instant) -> Result<bool> { todo!() }
    /// gives memory that holds no message back to the system
    pub fn trim(&mut self) -> Result<()> { todo!() }
    pub fn close(self) -> Result<()> { todo!() }
}
impl AsFd for Sender { fn as_fd(&self) -> BorrowedFd<'_> { todo!() } }

/// space reserved in the lane; dropping it aborts
pub struct Reservation<'a>(PhantomData<&'a mut Sender>);
impl Reservation<'_> {
    pub fn commit(self) -> Result<()> { todo!() }
    /// commits the first `bytes` only
    pub fn commit_bytes(self, bytes: usize) -> Result<()> { todo!() }
    pub fn abort(self) { todo!() }
}
impl Deref for Reservation<'_> { type Target = [u8]; fn deref(&self) -> &[u8] { todo!() } }
impl DerefMut for Reservation<'_> { fn deref_mut(&mut self) -> &mut [u8] { todo!() } }

pub struct Receiver {}
impl Receiver {
    pub fn connect(name: &str) -> Result<Receiver> { todo!() }
    /// in place; None when the lane is empty. After the last message of a closed sender: Err(Closed); of a dead one: Err(PeerDied)
    pub fn try_receive(&mut self) -> Result<Option<Message<'_>>> { todo!() }
    /// in place; waits as `Wait` says
    pub fn receive(&mut self) -> Result<Message<'_>> { todo!() }
    pub fn receive_until(&mut self, deadline: Instant) -> Result<Option<Message<'_>>> { todo!() }
    /// copies the next message into `buffer` (contents replaced) and releases it; safe against any peer. Answers its length
    pub fn try_receive_into(&mut self, buffer: &mut Vec<u8>) -> Result<Option<usize>> { todo!() }
    pub fn receive_into(&mut self, buffer: &mut Vec<u8>) -> Result<usize> { todo!() }
    pub fn receive_into_until(&mut self, buffer: &mut Vec<u8>, deadline: Instant) -> Result<Option<usize>> { todo!() }
    pub fn counters(&self) -> Counters { todo!() }
    pub fn capacity(&self) -> u64 { todo!() }
    pub fn message_bytes_max(&self) -> u64 { todo!() }
    /// for an event loop: true = nothing waits, the descriptor becomes readable when a message comes (or the peer goes);
    /// false = a message waits now
    pub fn arm(&mut self) -> Result<bool> { todo!() }
    pub fn disarm(&mut self) { todo!() }
    pub fn resume(&mut self) -> Result<()> { todo!() }
    pub fn resume_until(&mut self, deadline: Instant) -> Result<bool> { todo!() }
    pub fn close(self) -> Result<()> { todo!() }
}
impl AsFd for Receiver { fn as_fd(&self) -> BorrowedFd<'_> { todo!() } }

/// a message in the lane; dropping it releases its space
pub struct Message<'a>(PhantomData<&'a mut Receiver>);
impl Deref for Message<'_> { type Target = [u8]; fn deref(&self) -> &[u8] { todo!() } }
