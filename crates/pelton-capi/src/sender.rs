//! The sender of a channel, and what creates senders for threads.

use crate::c::{Array, Bytes, Info, New, Out, Text, check_size, sized_structures};
use crate::code::{self, Answer, armed, done, found, is_done, sent};
use crate::entries::entries;
use crate::handle::{Kind, Object, State};
use crate::writer::{Reserved, Writer, commit_fast, commit_marked, reserve_fast, send_fast, send_short};
use pelton::{Deadline, Error, Traceparent};
use std::ffi::{CStr, c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};

pub struct Sender {
    channel: pelton::Sender,
    reserved: Reserved,
}

impl Sender {
    pub fn new(channel: pelton::Sender) -> Sender {
        Sender { channel, reserved: None }
    }

    /// The endpoint, once nothing is reserved.
    pub fn into_channel(self) -> pelton::Sender {
        self.channel
    }
}

impl Object for Sender {
    const KIND: Kind = Kind::Sender;

    fn is_forked(&self) -> bool {
        self.channel.is_forked()
    }

    fn state(&self) -> State {
        if self.reserved.is_some() { State::One } else { State::Free }
    }
}

impl Writer for Sender {
    #[inline(always)]
    fn parts(&mut self) -> (&mut pelton::Sender, &mut Reserved) {
        (&mut self.channel, &mut self.reserved)
    }
}

sized_structures! {
    "pelton_sender_info" SenderInfo {
        has_peer: u32,
        peer_pid: u32,
        peer_uid: u32,
        next_seq: u32,
        reserved: u32,
        capacity: u64,
        message_bytes_max: u64,
        unreleased: u64,
        unreleased_max: u64,
        messages: u64,
        bytes: u64,
        waits: u64,
        sleeps: u64,
        wakes_sent: u64,
    }
}

entries! {
    fn pelton_sender_send(sender: &mut Sender, data[size]: Bytes, deadline_ns: Deadline)
    short { send_short(sender, data, size) }
    fast { send_fast(sender, data, size) }
    {
        sent(sender.unreserved()?.send_until(data, deadline_ns))
    }

    fn pelton_sender_send_traced(
        sender: &mut Sender,
        data[size]: Bytes,
        traceparent: Option<Text>,
        deadline_ns: Deadline,
    ) {
        let sender = sender.unreserved()?;
        sent(match parsed(traceparent) {
            Some(traceparent) => sender.send_traced(data, traceparent, deadline_ns),
            None => sender.send_until(data, deadline_ns),
        })
    }

    fn pelton_sender_send_batch(sender: &mut Sender, messages[count]: Array<libc::iovec>, deadline_ns: Deadline) {
        send_batch(sender.unreserved()?, messages, deadline_ns)
    }

    fn pelton_sender_send_descriptors(
        sender: &mut Sender,
        data[size]: Bytes,
        fds[count]: Array<c_int>,
        deadline_ns: Deadline,
    ) {
        let sender = sender.unreserved()?;
        // Far more than are possible: the sender says how many are.
        let fds = &fds[..fds.len().min(1 << 16)];
        if let Some(closed) = fds.iter().find(|fd| **fd < 0) {
            return Err(code::system(libc::EBADF, &format!("sending descriptor {closed}")));
        }
        // SAFETY: not negative; the sender duplicates them at once, and refuses one that is not open.
        let fds: Vec<_> = fds.iter().map(|fd| unsafe { BorrowedFd::borrow_raw(*fd) }).collect();
        sent(match deadline_ns {
            Deadline::Never => sender.send_with_descriptors(data, &fds).map(|()| pelton::Sent::Sent),
            deadline => sender.send_with_descriptors_until(data, &fds, deadline),
        })
    }

    fn pelton_sender_reserve(sender: &mut Sender, size: usize, deadline_ns: Deadline, out: Out<*mut c_void>)
    fast { reserve_fast(sender, size, out) }
    {
        let find = |sender: &mut Sender| sender.channel.reserve_space(size, deadline_ns);
        out.write(sender.reserve(size, find)?);
        Ok(())
    }

    fn pelton_sender_reserve_traced(
        sender: &mut Sender,
        size: usize,
        traceparent: Option<Text>,
        deadline_ns: Deadline,
        out: Out<*mut c_void>,
    ) {
        let traceparent = parsed(traceparent);
        let find = |sender: &mut Sender| match traceparent {
            Some(traceparent) => sender.channel.reserve_traced_space(size, traceparent, deadline_ns),
            None => sender.channel.reserve_space(size, deadline_ns),
        };
        out.write(sender.reserve(size, find)?);
        Ok(())
    }

    fn pelton_sender_commit(sender: &mut Sender, size: usize)
    short { commit_fast(sender, size) }
    fast { commit_marked(sender, size) }
    {
        sender.commit(size)
    }

    fn pelton_sender_abort(sender: &mut Sender) {
        sender.abort()
    }

    fn pelton_sender_wait_released(sender: &mut Sender, deadline_ns: Deadline) {
        is_done(sender.unreserved()?.wait_released_until(deadline_ns))
    }

    fn pelton_sender_resume(sender: &mut Sender, deadline_ns: Deadline) {
        is_done(sender.unreserved()?.resume_until(deadline_ns))
    }

    fn pelton_sender_sync(sender: &mut Sender) {
        done(sender.unreserved()?.sync())
    }

    fn pelton_sender_trim(sender: &mut Sender) {
        done(sender.unreserved()?.trim())
    }

    fn pelton_sender_fd(sender: &mut Sender) {
        Ok(sender.channel.as_raw_fd())
    }

    fn pelton_sender_poll(sender: &mut Sender, size: usize) {
        check_size(size)?;
        is_done(sender.unreserved()?.busy_poll(size))
    }

    fn pelton_sender_arm(sender: &mut Sender, size: usize) {
        check_size(size)?;
        armed(sender.unreserved()?.arm(size))
    }

    fn pelton_sender_arm_for_end(sender: &mut Sender) {
        done(sender.unreserved()?.arm_for_end())
    }

    fn pelton_sender_disarm(sender: &mut Sender) {
        sender.channel.disarm();
        Ok(())
    }

    fn pelton_sender_get_info(sender: &mut Sender, out: Info<SenderInfo>) {
        let sender = &mut sender.channel;
        let (peer, counters) = (sender.peer(), sender.counters());
        out.write(SenderInfo {
            struct_bytes: 0,
            has_peer: peer.is_some().into(),
            peer_pid: peer.map_or(0, |peer| peer.pid),
            peer_uid: peer.map_or(0, |peer| peer.uid),
            next_seq: sender.next_seq(),
            reserved: 0,
            capacity: sender.capacity(),
            message_bytes_max: sender.message_bytes_max(),
            unreleased: sender.unreleased(),
            unreleased_max: counters.depth_max,
            messages: counters.messages,
            bytes: counters.bytes,
            waits: counters.waits,
            sleeps: counters.sleeps,
            wakes_sent: counters.wakes_sent,
        })
    }
}

/// A text that is not valid is as none: W3C demands it.
fn parsed(traceparent: Option<&CStr>) -> Option<Traceparent> {
    traceparent.and_then(|text| Traceparent::parse(text.to_bytes()))
}

/// A message of a batch.
fn bytes_of(message: &libc::iovec) -> Answer<&[u8]> {
    match (message.iov_base.is_null(), message.iov_len) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(code::null("the address of a message")),
        (false, size) => {
            check_size(size)?;
            // SAFETY: the C caller guarantees that each message of the array has so many readable bytes.
            Ok(unsafe { std::slice::from_raw_parts(message.iov_base.cast(), size) })
        }
    }
}

/// Sends all, or none.
fn send_batch(sender: &mut pelton::Sender, messages: &[libc::iovec], deadline: Deadline) -> Answer {
    /// A record's header.
    const HEADER: usize = 8;
    let bytes_max = sender.message_bytes_max();
    let mut space = 0usize;
    for message in messages {
        let size = bytes_of(message)?.len();
        if size as u64 > bytes_max {
            return Err(code::of(&Error::TooLarge { bytes: size as u64, bytes_max }));
        }
        space = space.saturating_add(HEADER + size.next_multiple_of(8));
    }
    if messages.is_empty() {
        return Ok(());
    }
    loop {
        if let Some(mut batch) = done(sender.try_reserve_batch(messages.iter().map(|message| message.iov_len)))? {
            for message in messages {
                assert!(batch.push(bytes_of(message)?), "space for all of them was reserved");
            }
            return done(batch.commit());
        }
        if deadline == Deadline::Now {
            return Err(code::AGAIN);
        }
        // Waits for one message that takes as much space as all of them, and aborts it.
        found(sender.reserve_space((space - HEADER).min(bytes_max as usize), deadline))?;
    }
}

/// Creates senders for threads.
pub struct Senders(pub pelton::Senders);

impl Object for Senders {
    const KIND: Kind = Kind::Senders;

    fn is_forked(&self) -> bool {
        self.0.is_forked()
    }
}

entries! {
    fn pelton_senders_sender(senders: &Senders, out: New<Sender>) {
        out.give(Sender::new(done(senders.0.sender())?))
    }

    fn pelton_senders_send(senders: &Senders, data[size]: Bytes, deadline_ns: Deadline) {
        sent(senders.0.with(|sender| sender.send_until(data, deadline_ns)).flatten())
    }
}
