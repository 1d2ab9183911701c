//! The receiver of a channel, and messages that are held.

use crate::c::{Info, New, Options, Out, OutArray, Text, sized_structures, structures, text};
use crate::code::{self, Answer, armed, done, found, is_done};
use crate::entries::entries;
use crate::handle::{Handle, Kind, Object, State};
use crate::options::GatherOptions;
use crate::responder::{TRACEPARENT_SIZE, text_of};
use crate::sender::Senders;
use pelton::raw::{Item, Record};
use pelton::{Deadline, Departure, Message, Peer};
use std::ffi::{c_int, c_void};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::ptr::NonNull;

pub struct Receiver {
    channel: pelton::Receiver,
    received: Received,
}

/// What is received and not released. Unless it is nothing, the receiver is used for nothing else.
enum Received {
    Nothing,
    One(Record),
    Batch,
}

impl Receiver {
    pub fn new(channel: pelton::Receiver) -> Receiver {
        Receiver { channel, received: Received::Nothing }
    }

    /// The endpoint, once nothing is received.
    pub fn into_channel(self) -> pelton::Receiver {
        self.channel
    }

    /// The endpoint, for calls that would move what is received.
    pub fn released(&mut self) -> Answer<&mut pelton::Receiver> {
        match self.received {
            Received::Nothing => Ok(&mut self.channel),
            _ => Err(code::plain(code::NOT_RELEASED)),
        }
    }

    /// Makes a record the received message.
    #[inline(always)]
    fn show(&mut self, record: Record) -> CMessage {
        // Not released here.
        let shown = CMessage::of(&ManuallyDrop::new(self.channel.message(record)));
        self.received = Received::One(record);
        shown
    }

    /// Takes the received message, if it is one.
    fn take_one(&mut self) -> Answer<Record> {
        match std::mem::replace(&mut self.received, Received::Nothing) {
            Received::One(record) => Ok(record),
            Received::Nothing => Err(code::plain(code::NOT_RECEIVED)),
            Received::Batch => {
                self.received = Received::Batch;
                Err(code::tell(code::NOT_RECEIVED, "a batch was received: receive one message instead"))
            }
        }
    }
}

impl Object for Receiver {
    const KIND: Kind = Kind::Receiver;

    fn is_forked(&self) -> bool {
        self.channel.is_forked()
    }

    fn state(&self) -> State {
        match self.received {
            Received::Nothing => State::Free,
            Received::One(_) => State::One,
            Received::Batch => State::Slow,
        }
    }
}

structures! {
    "pelton_message" CMessage {
        data: *const c_void,
        size: usize,
        seq: u32,
        lane: u32,
        flags: u32,
        descriptor_count: u32,
    }
}

impl CMessage {
    #[inline(always)]
    fn of(message: &Message<'_>) -> CMessage {
        let (data, size) = message.raw_parts();
        CMessage {
            data: data.as_ptr().cast(),
            size,
            seq: message.seq(),
            lane: message.lane(),
            // PELTON_REDELIVERED.
            flags: u32::from(message.is_redelivered()),
            descriptor_count: message.descriptor_count() as u32,
        }
    }

    const NONE: CMessage =
        CMessage { data: std::ptr::dangling(), size: 0, seq: 0, lane: 0, flags: 0, descriptor_count: 0 };
}

/// `enum pelton_event_kind`.
#[repr(u32)]
enum EventKind {
    Message = 0,
    Joined = 1,
    Left = 2,
    Died = 3,
    Violated = 4,
}

structures! {
    "pelton_event" CEvent {
        kind: EventKind,
        lane: u32,
        peer_pid: u32,
        peer_uid: u32,
        message: CMessage,
    }
}

impl CEvent {
    #[inline(always)]
    fn new(kind: EventKind, lane: u32, peer: Option<Peer>, message: CMessage) -> CEvent {
        let (peer_pid, peer_uid) = numbers(peer);
        CEvent { kind, lane, peer_pid, peer_uid, message }
    }
}

/// A process and its user; 0 and `UINT32_MAX` if they are unknown.
#[inline(always)]
pub fn numbers(peer: Option<Peer>) -> (u32, u32) {
    peer.map_or((0, u32::MAX), |peer| (peer.pid, peer.uid))
}

/// The next message; events are skipped.
fn next(receiver: &mut pelton::Receiver, deadline: Deadline) -> Answer<Record> {
    loop {
        match found(receiver.find(deadline))? {
            Item::Record(record) => return Ok(record),
            Item::Joined | Item::Left(_) => receiver.pass_event(),
        }
    }
}

/// Receives, if a message is there, or comes within a microsecond and the caller waits. `write` gets it.
///
/// # Safety
/// As for [`Handle::object_in`]; `out` is NULL or writable.
#[inline(always)]
unsafe fn receive_fast<T>(
    handle: *mut Handle<Receiver>,
    deadline_ns: i64,
    out: *mut T,
    of: impl Fn(&mut Receiver, CMessage) -> T,
) -> Option<c_int> {
    // SAFETY: the caller guarantees the handle.
    let receiver = unsafe { Handle::object_in(handle, State::Free) }?;
    if out.is_null() {
        return None;
    }
    let record = match receiver.channel.peek_fast() {
        Some(record) => record,
        None if deadline_ns > 0 => receiver.channel.peek_soon()?,
        None => return None,
    };
    let shown = receiver.show(record);
    // SAFETY: the caller guarantees `out`; the object was found.
    unsafe {
        out.write(of(receiver, shown));
        Handle::set_state(handle, State::One);
    }
    Some(0)
}

/// Copies the next message, as [`receive_fast`], and releases it.
///
/// # Safety
/// As for [`receive_fast`]; `capacity` bytes are writable at `buffer`, unless it is NULL.
#[inline(always)]
unsafe fn copy_fast(
    handle: *mut Handle<Receiver>,
    buffer: *mut u8,
    capacity: usize,
    deadline_ns: i64,
    out_size: *mut usize,
) -> Option<c_int> {
    // SAFETY: the caller guarantees the handle.
    let receiver = unsafe { Handle::object_in(handle, State::Free) }?;
    let buffer = NonNull::new(buffer)?;
    if out_size.is_null() {
        return None;
    }
    let target = |bytes| (bytes <= capacity).then_some(buffer);
    let channel = &mut receiver.channel;
    // SAFETY: the caller guarantees the buffer, which is its own, so not in a lane; and `out_size`, which is not NULL.
    unsafe {
        let (size, must_check) = match channel.copy_before_check(target) {
            // Without a message, not with one that is too large.
            None if deadline_ns > 0 && channel.peek_fast().is_none() && comes_soon(handle) => {
                Handle::object_in(handle, State::Free)?.channel.copy_before_check(target)?
            }
            copied => copied?,
        };
        out_size.write(size);
        Some(if must_check { finish_release(handle) } else { 0 })
    }
}

/// Polls for a message for less than a microsecond.
///
/// # Safety
/// [`Handle::object_in`] has found the object.
#[inline(never)]
unsafe fn comes_soon(handle: *mut Handle<Receiver>) -> bool {
    // SAFETY: the caller guarantees it.
    unsafe {
        let Some(receiver) = Handle::object_in(handle, State::Free) else { return false };
        Handle::run_fast(handle, || receiver.channel.peek_soon().is_some()).unwrap_or(false)
    }
}

/// What remains to be done after a release, in the rare case.
///
/// # Safety
/// [`Handle::object_in`] has found the object.
#[cold]
#[inline(never)]
unsafe fn finish_release(handle: *mut Handle<Receiver>) -> c_int {
    // SAFETY: the caller guarantees it: so the gate has the state that a release leaves.
    unsafe {
        let Some(receiver) = Handle::object_in(handle, State::Free) else { return code::INTERNAL };
        Handle::run_fast(handle, || receiver.channel.check_sender()).err().unwrap_or(0)
    }
}

/// Releases one message.
///
/// # Safety
/// As for [`Handle::object_in`].
#[inline(always)]
unsafe fn release_fast(handle: *mut Handle<Receiver>) -> Option<c_int> {
    // SAFETY: the caller guarantees the handle.
    let receiver = unsafe { Handle::object_in(handle, State::One) }?;
    if receiver.channel.is_forked() {
        return None;
    }
    let Receiver { channel, received: Received::One(record) } = &mut *receiver else { return None };
    // SAFETY: the object was found.
    unsafe {
        let must_check = channel.release_before_check(record)?;
        receiver.received = Received::Nothing;
        Handle::set_state(handle, State::Free);
        Some(if must_check { finish_release(handle) } else { 0 })
    }
}

/// As [`release_fast`], also of a message with marks before it.
///
/// # Safety
/// As for [`release_fast`].
unsafe fn release_marked(handle: *mut Handle<Receiver>) -> Option<c_int> {
    // SAFETY: the caller guarantees the handle.
    let receiver = unsafe { Handle::object_in(handle, State::One) }?;
    if receiver.channel.is_forked() {
        return None;
    }
    let Receiver { channel, received: Received::One(record) } = &mut *receiver else { return None };
    // SAFETY: the object was found.
    let released = unsafe { Handle::run_fast(handle, || channel.release_record(record)) };
    receiver.received = Received::Nothing;
    Some(match released {
        Ok(()) => {
            // SAFETY: the object was found.
            unsafe { Handle::set_state(handle, State::Free) };
            0
        }
        Err(code) => code,
    })
}

sized_structures! {
    "pelton_receiver_info" ReceiverInfo {
        has_peer: u32,
        peer_pid: u32,
        peer_uid: u32,
        generation: u32,
        reserved: u32,
        capacity: u64,
        message_bytes_max: u64,
        messages: u64,
        bytes: u64,
        waits: u64,
        sleeps: u64,
        wakes_sent: u64,
    }
}

entries! {
    fn pelton_receiver_gather(name: Option<Text>, options: Options<GatherOptions>, out: New<Receiver>) {
        let channel = match name {
            Some(name) => done(options.build(false)?.gather_at(text(name)?))?,
            None => done(options.build(true)?.gather())?.1,
        };
        out.give(Receiver::new(channel))
    }

    fn pelton_receiver_senders(receiver: &mut Receiver, out: New<Senders>) {
        out.give(Senders(done(receiver.channel.senders())?))
    }

    fn pelton_receiver_receive(receiver: &mut Receiver, deadline_ns: Deadline, out: Out<CMessage>)
    fast { receive_fast(receiver, deadline_ns, out, |_, message| message) }
    {
        let record = next(receiver.released()?, deadline_ns)?;
        out.write(receiver.show(record));
        Ok(())
    }

    fn pelton_receiver_receive_event(receiver: &mut Receiver, deadline_ns: Deadline, out: Out<CEvent>)
    fast {
        receive_fast(receiver, deadline_ns, out, |receiver, message| {
            CEvent::new(EventKind::Message, message.lane, receiver.channel.peer(), message)
        })
    }
    {
        let channel = receiver.released()?;
        let item = found(channel.find(deadline_ns))?;
        let (lane, peer) = (channel.lane(), channel.peer());
        let kind = match item {
            Item::Record(record) => {
                out.write(CEvent::new(EventKind::Message, lane, peer, receiver.show(record)));
                return Ok(());
            }
            Item::Joined => EventKind::Joined,
            Item::Left(Departure::Closed) => EventKind::Left,
            Item::Left(Departure::PeerDied) => EventKind::Died,
            Item::Left(_) => EventKind::Violated,
        };
        channel.pass_event();
        out.write(CEvent::new(kind, lane, peer, CMessage::NONE));
        Ok(())
    }

    fn pelton_receiver_receive_batch(
        receiver: &mut Receiver,
        deadline_ns: Deadline,
        out[count]: OutArray<CMessage>,
        out_count: Out<usize>,
    ) {
        let channel = receiver.released()?;
        if out.is_empty() {
            return Err(code::tell(code::TOO_SMALL, "space for 0 messages, wanted at least 1"));
        }
        let first = next(channel, deadline_ns)?;
        let received = if out.len() == 1 || first.descriptors > 0 {
            out[0].write(receiver.show(first));
            1
        } else {
            receiver.take_batch(out)?
        };
        out_count.write(received);
        Ok(())
    }

    fn pelton_receiver_receive_copy(
        receiver: &mut Receiver,
        buffer[capacity]: OutArray<u8>,
        deadline_ns: Deadline,
        out_size: Out<usize>,
    )
    fast { copy_fast(receiver, buffer, capacity, deadline_ns, out_size) }
    {
        let channel = receiver.released()?;
        let record = next(channel, deadline_ns)?;
        let message = channel.message(record);
        let (data, size) = message.raw_parts();
        out_size.write(size);
        if size > buffer.len() {
            // Not released: the next call finds it again.
            std::mem::forget(message);
            let detail = format!("the message has {size} bytes, the buffer {}", buffer.len());
            return Err(code::tell(code::TOO_SMALL, detail));
        }
        // SAFETY: the lane checked that so many bytes are there, and they are no more than the buffer's. The sender may
        // change them meanwhile; nothing reads them after the copy.
        unsafe { pelton::raw::copy(data.as_ptr(), buffer.as_mut_ptr().cast(), size) };
        Ok(())
    }

    fn pelton_receiver_release(receiver: &mut Receiver)
    short { release_fast(receiver) }
    fast { release_marked(receiver) }
    {
        match std::mem::replace(&mut receiver.received, Received::Nothing) {
            Received::Nothing => return Err(code::plain(code::NOT_RECEIVED)),
            Received::One(record) => drop(receiver.channel.message(record)),
            Received::Batch => receiver.channel.release_batch(),
        }
        Ok(())
    }

    fn pelton_receiver_traceparent(receiver: &mut Receiver, out: Out<[u8; TRACEPARENT_SIZE]>) {
        let found = match &receiver.received {
            Received::One(record) => receiver.channel.traceparent_of(record.seq),
            // The last message of a batch, or the last that was copied.
            Received::Batch | Received::Nothing => receiver.channel.traceparent(),
        };
        let Some(traceparent) = found else { return Ok(0) };
        out.write(text_of(traceparent));
        Ok(1)
    }

    fn pelton_receiver_hold(receiver: &mut Receiver, out: New<Held>) {
        let record = receiver.take_one()?;
        out.give(Held(receiver.channel.message(record).hold()))
    }

    fn pelton_receiver_take_descriptors(
        receiver: &mut Receiver,
        out[capacity]: OutArray<c_int>,
        out_count: Out<usize>,
    ) {
        if let Received::Batch = receiver.received {
            // No message of a batch has any.
            out_count.write(0);
            return Ok(());
        }
        let record = receiver.take_one()?;
        let mut message = ManuallyDrop::new(receiver.channel.message(record));
        let count = message.descriptor_count();
        let taken = if count > out.len() {
            out_count.write(count);
            let detail = format!("the message has {count} descriptors, there is space for {}", out.len());
            Err(code::tell(code::TOO_SMALL, detail))
        } else {
            done(message.take_descriptors())
        };
        receiver.received = Received::One(message.record());
        let taken = taken?;
        out_count.write(taken.len());
        for (place, fd) in out.iter_mut().zip(taken) {
            place.write(fd.into_raw_fd());
        }
        Ok(())
    }

    fn pelton_receiver_resume(receiver: &mut Receiver, deadline_ns: Deadline) {
        is_done(receiver.released()?.resume_until(deadline_ns))
    }

    fn pelton_receiver_sync(receiver: &mut Receiver) {
        done(receiver.released()?.sync())
    }

    fn pelton_receiver_fd(receiver: &mut Receiver) {
        Ok(receiver.channel.as_raw_fd())
    }

    fn pelton_receiver_poll(receiver: &mut Receiver) {
        is_done(receiver.released()?.busy_poll())
    }

    fn pelton_receiver_arm(receiver: &mut Receiver) {
        armed(receiver.released()?.arm())
    }

    fn pelton_receiver_disarm(receiver: &mut Receiver) {
        receiver.channel.disarm();
        Ok(())
    }

    fn pelton_receiver_get_info(receiver: &mut Receiver, out: Info<ReceiverInfo>) {
        let receiver = &receiver.channel;
        let (peer, counters) = (receiver.peer(), receiver.counters());
        out.write(ReceiverInfo {
            struct_bytes: 0,
            has_peer: peer.is_some().into(),
            peer_pid: peer.map_or(0, |peer| peer.pid),
            peer_uid: peer.map_or(0, |peer| peer.uid),
            generation: receiver.generation(),
            reserved: 0,
            capacity: receiver.capacity(),
            message_bytes_max: receiver.message_bytes_max(),
            messages: counters.messages,
            bytes: counters.bytes,
            waits: counters.waits,
            sleeps: counters.sleeps,
            wakes_sent: counters.wakes_sent,
        })
    }
}

impl Receiver {
    /// Takes a batch, from the next message on, which is there.
    fn take_batch(&mut self, out: &mut [MaybeUninit<CMessage>]) -> Answer<usize> {
        self.received = Received::Batch;
        let mut count = 0;
        let mut is_traced = false;
        for place in out {
            let show = |message: &Message<'_>| {
                place.write(CMessage::of(message));
                is_traced = message.traceparent().is_some();
            };
            match self.channel.take_for_batch(count == 0, show) {
                Ok(true) => {
                    count += 1;
                    if is_traced {
                        break;
                    }
                }
                Ok(false) => break,
                // The next call returns it.
                Err(_) if count > 0 => break,
                Err(error) => {
                    self.received = Received::Nothing;
                    return Err(code::of(&error));
                }
            }
        }
        // A hostile sender may have withdrawn the first one.
        if count == 0 {
            self.received = Received::Nothing;
            return Err(code::AGAIN);
        }
        Ok(count)
    }
}

/// A message that is held.
pub struct Held(pelton::Held);

impl Object for Held {
    const KIND: Kind = Kind::Held;

    fn is_forked(&self) -> bool {
        self.0.is_forked()
    }
}
