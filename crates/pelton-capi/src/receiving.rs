//! The receiving end, and messages held.

use crate::code::{self, Answer, came};
use crate::handle::{Handle, ONE, Object, call};
use crate::making::give;
use crate::options::{Info, Until};
use crate::sending::Gathering;
use pelton::{Held, Kind, Message, RawMessage, Receiver};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, IntoRawFd, RawFd};

/// A receiver behind a handle.
pub struct Receiving {
    receiver: Receiver,
    current: Current,
}

/// What is received and not released. While it is not nothing the receiver is used for nothing else.
enum Current {
    Nothing,
    One(RawMessage),
    Batch,
}

impl Receiving {
    pub fn new(receiver: Receiver) -> Receiving {
        Receiving { receiver, current: Current::Nothing }
    }

    /// The receiver alone, once nothing is received.
    pub fn into_receiver(self) -> Receiver {
        self.receiver
    }

    /// The receiver, for calls that would move what is received.
    pub fn free(&mut self) -> Answer<&mut Receiver> {
        match self.current {
            Current::Nothing => Ok(&mut self.receiver),
            _ => Err(code::plain(code::NOT_RELEASED)),
        }
    }

    pub fn fd(&self) -> RawFd {
        self.receiver.as_raw_fd()
    }

    pub fn arm(&mut self) -> Answer {
        came(self.free()?.arm().map(|armed| !armed))
    }

    pub fn disarm(&mut self) -> Answer {
        self.receiver.disarm();
        Ok(())
    }

    pub fn info(&self) -> Info {
        let receiver = &self.receiver;
        let mut info = Info::new(receiver.peer(), receiver.counters());
        info.generation = receiver.generation();
        info.capacity = receiver.capacity();
        info.message_bytes_max = receiver.message_bytes_max();
        info
    }

    pub fn resume(&mut self, until: Until) -> Answer {
        let receiver = self.free()?;
        came(match until.instant() {
            Some(instant) => receiver.resume_until(instant),
            None => receiver.resume().map(|()| true),
        })
    }

    pub fn sync(&mut self) -> Answer {
        self.free()?.sync().map_err(|error| code::of(&error))
    }

    pub fn release(&mut self) -> Answer {
        match std::mem::replace(&mut self.current, Current::Nothing) {
            Current::Nothing => return Err(code::plain(code::NOT_RECEIVED)),
            // SAFETY: received last, and the receiver not used meanwhile.
            Current::One(raw) => drop(unsafe { self.receiver.message_from_raw(raw) }),
            Current::Batch => self.receiver.release_batch(),
        }
        Ok(())
    }
}

impl Object for Receiving {
    const FREE: u32 = 0x7265_6300;
    const KIND: &'static str = "receiver";

    fn is_forked(&self) -> bool {
        self.receiver.is_forked()
    }

    fn is_free(&self) -> bool {
        matches!(self.current, Current::Nothing)
    }

    fn has_one(&self) -> bool {
        matches!(self.current, Current::One(_))
    }
}

type Handled = *mut Handle<Receiving>;

/// `pelton_message`.
#[repr(C)]
pub struct CMessage {
    data: *const c_void,
    size: usize,
    seq: u32,
    lane: u32,
    flags: u32,
    descriptors: u32,
}

const _: () = assert!(size_of::<CMessage>() == 32);

/// PELTON_REDELIVERED, PELTON_JOINED and so on.
fn flags(message: &Message<'_>) -> u32 {
    match message.kind() {
        Kind::Message => u32::from(message.is_redelivered()),
        Kind::Joined => 2,
        Kind::Closed => 4,
        Kind::PeerDied => 8,
        Kind::Corrupt => 16,
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
            flags: flags(message),
            descriptors: message.descriptors() as u32,
        }
    }
}

/// The next message, waiting as long as is said.
fn next(receiver: &mut Receiver, deadline_ns: i64) -> Answer<Message<'_>> {
    let found = match Until::of(deadline_ns) {
        Until::Now => receiver.try_receive(),
        Until::Deadline(instant) => receiver.receive_until(instant),
        Until::Forever => receiver.receive().map(Some),
    };
    found.map_err(|error| code::of(&error))?.ok_or(code::AGAIN)
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_receive(receiver: Handled, deadline_ns: i64, out: *mut CMessage) -> c_int {
    // SAFETY: the caller's promises.
    if let Some(receiving) = unsafe { Handle::object_at(receiver, Receiving::FREE) }
        && !out.is_null()
    {
        // SAFETY: the caller's promise; the gate was open.
        unsafe {
            if let Some(message) = receiving.receiver.receive_at_once() {
                return show(receiver, message, &mut receiving.current, out);
            }
            if deadline_ns > 0
                && let Some(message) = receiving.receiver.receive_soon()
            {
                return show(receiver, message, &mut receiving.current, out);
            }
        }
    }
    // SAFETY: the caller's promises.
    unsafe { receive_slowly(receiver, deadline_ns, out) }
}

/// Shows a message that was found the short way.
///
/// # Safety
/// `handle` was free, and has received the message.
#[inline(always)]
unsafe fn show(handle: Handled, message: Message<'_>, current: &mut Current, out: *mut CMessage) -> c_int {
    // SAFETY: the caller's promises.
    unsafe {
        out.write(CMessage::of(&message));
        *current = Current::One(message.into_raw());
        Handle::set_gate(handle, Receiving::FREE + ONE);
    }
    0
}

#[cold]
#[inline(never)]
unsafe fn receive_slowly(receiver: Handled, deadline_ns: i64, out: *mut CMessage) -> c_int {
    let receive = |receiving: &mut Receiving| {
        let receiver = receiving.free()?;
        if out.is_null() {
            return Err(code::null("out"));
        }
        let message = next(receiver, deadline_ns)?;
        // SAFETY: the caller's promise.
        unsafe { out.write(CMessage::of(&message)) };
        receiving.current = Current::One(message.into_raw());
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { call(receiver, receive) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_receive_batch(
    receiver: Handled,
    deadline_ns: i64,
    out: *mut CMessage,
    count: usize,
    out_count: *mut usize,
) -> c_int {
    let receive = |receiving: &mut Receiving| {
        let receiver = receiving.free()?;
        if out.is_null() || out_count.is_null() {
            return Err(code::null("out or out_count"));
        }
        if count == 0 {
            return Err(code::tell(code::TOO_SMALL, "room for 0 messages, wanted at least 1"));
        }
        let first = next(receiver, deadline_ns)?;
        let mut found = 0;
        if count == 1 || first.descriptors() != 0 || first.kind() != Kind::Message {
            // SAFETY: the caller's promise.
            unsafe { out.write(CMessage::of(&first)) };
            receiving.current = Current::One(first.into_raw());
            found = 1;
        } else {
            // From the first one on, which was only looked at so far.
            let _ = first.into_raw();
            receiving.current = Current::Batch;
            while found < count {
                // SAFETY: the caller's promise; less than count.
                let look = |message: &Message<'_>| unsafe { out.add(found).write(CMessage::of(message)) };
                match receiving.receiver.take_for_batch(found == 0, look) {
                    Ok(true) => found += 1,
                    Ok(false) => break,
                    // For the next call to tell.
                    Err(_) if found > 0 => break,
                    Err(error) => {
                        receiving.current = Current::Nothing;
                        return Err(code::of(&error));
                    }
                }
            }
        }
        // A hostile sender may have taken back what stood there.
        if found == 0 {
            receiving.current = Current::Nothing;
            return Err(code::AGAIN);
        }
        // SAFETY: as above.
        unsafe { out_count.write(found) };
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { call(receiver, receive) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_receive_copy(
    receiver: Handled,
    buffer: *mut c_void,
    capacity: usize,
    deadline_ns: i64,
    out_size: *mut usize,
) -> c_int {
    // SAFETY: the caller's promises.
    if let Some(receiving) = unsafe { Handle::object_at(receiver, Receiving::FREE) }
        && !buffer.is_null()
        && !out_size.is_null()
    {
        // SAFETY: the caller's promises.
        let copy = || unsafe { receiving.receiver.copy_at_once(buffer.cast(), capacity, deadline_ns > 0) };
        // SAFETY: the gate was open.
        match unsafe { Handle::briefly(receiver, copy) } {
            Ok(Some(size)) => {
                // SAFETY: the caller's promise.
                unsafe { out_size.write(size) };
                return 0;
            }
            Ok(None) => {}
            Err(code) => return code,
        }
    }
    // SAFETY: the caller's promises.
    unsafe { copy_slowly(receiver, buffer, capacity, deadline_ns, out_size) }
}

#[cold]
#[inline(never)]
unsafe fn copy_slowly(
    receiver: Handled,
    buffer: *mut c_void,
    capacity: usize,
    deadline_ns: i64,
    out_size: *mut usize,
) -> c_int {
    let receive = |receiving: &mut Receiving| {
        let receiver = receiving.free()?;
        if out_size.is_null() || (buffer.is_null() && capacity > 0) {
            return Err(code::null("buffer or out_size"));
        }
        let message = loop {
            let found = next(receiver, deadline_ns)?;
            if found.kind() == Kind::Message {
                // Again, as what is found in a loop cannot be borrowed beyond it.
                let raw = found.into_raw();
                // SAFETY: received last, and the receiver not used meanwhile.
                break unsafe { receiver.message_from_raw(raw) };
            }
        };
        let (data, size) = message.raw_parts();
        // SAFETY: the caller's promise.
        unsafe { out_size.write(size) };
        if size > capacity {
            // Not released: the next call finds it again.
            let _ = message.into_raw();
            let detail = format!("a message of {size} bytes waits, the buffer has {capacity}");
            return Err(code::tell(code::TOO_SMALL, detail));
        }
        if size > 0 {
            // SAFETY: the lane checked that so many bytes are there, and nothing looks at them after the copy; the caller
            // promises the buffer, which is not NULL with a capacity.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), buffer.cast(), size) };
        }
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { call(receiver, receive) }
}

/// Releases one message in the common case; in another does `otherwise`.
///
/// # Safety
/// As for [`Handle::object_at`].
#[inline(always)]
pub unsafe fn release(receiver: Handled, otherwise: impl FnOnce() -> c_int) -> c_int {
    // SAFETY: the caller's promises.
    if let Some(receiving) = unsafe { Handle::object_at(receiver, Receiving::FREE + ONE) }
        && !receiving.receiver.is_forked()
        && let Receiving { receiver: own, current: Current::One(raw) } = &mut *receiving
    {
        // SAFETY: received last, and the receiver not used meanwhile.
        let released = unsafe { Handle::briefly(receiver, || own.release_raw(raw)) };
        receiving.current = Current::Nothing;
        return match released {
            Ok(()) => {
                // SAFETY: the gate was found as it is for one message.
                unsafe { Handle::set_gate(receiver, Receiving::FREE) };
                0
            }
            Err(code) => code,
        };
    }
    otherwise()
}

/// A message held, behind a handle.
pub struct Holding(Held);

impl Object for Holding {
    const FREE: u32 = 0x6865_6c00;
    const KIND: &'static str = "held";

    fn is_forked(&self) -> bool {
        self.0.is_forked()
    }

    fn is_free(&self) -> bool {
        true
    }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_hold(receiver: Handled, out: *mut *mut Handle<Holding>) -> c_int {
    let hold = |receiving: &mut Receiving| {
        if out.is_null() {
            return Err(code::null("out"));
        }
        match std::mem::replace(&mut receiving.current, Current::Nothing) {
            Current::One(raw) => {
                // SAFETY: received last, and the receiver not used meanwhile; the caller's promise.
                unsafe {
                    let message = receiving.receiver.message_from_raw(raw);
                    out.write(Handle::boxed(Holding(message.hold())));
                }
                Ok(())
            }
            Current::Batch => {
                receiving.current = Current::Batch;
                Err(code::tell(code::NOT_RECEIVED, "a batch was received, which cannot be held: receive one message"))
            }
            Current::Nothing => Err(code::plain(code::NOT_RECEIVED)),
        }
    };
    // SAFETY: the caller's promises.
    unsafe { call(receiver, hold) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_take_descriptors(
    receiver: Handled,
    out: *mut c_int,
    capacity: usize,
    out_count: *mut usize,
) -> c_int {
    let take = |receiving: &mut Receiving| {
        if out_count.is_null() || (out.is_null() && capacity > 0) {
            return Err(code::null("out or out_count"));
        }
        let raw = match std::mem::replace(&mut receiving.current, Current::Nothing) {
            Current::One(raw) => raw,
            // None of a batch's messages has any.
            other => {
                receiving.current = other;
                let Current::Batch = receiving.current else { return Err(code::plain(code::NOT_RECEIVED)) };
                // SAFETY: the caller's promise.
                unsafe { out_count.write(0) };
                return Ok(());
            }
        };
        // SAFETY: received last, and the receiver not used meanwhile.
        let mut message = unsafe { receiving.receiver.message_from_raw(raw) };
        let count = message.descriptors();
        let taken = if count > capacity {
            // SAFETY: the caller's promise.
            unsafe { out_count.write(count) };
            Err(code::tell(code::TOO_SMALL, format!("{count} descriptors came, there is room for {capacity}")))
        } else {
            message.take_descriptors().map_err(|error| code::of(&error))
        };
        receiving.current = Current::One(message.into_raw());
        let taken = taken?;
        // SAFETY: the caller's promises; no more than its room.
        unsafe {
            out_count.write(taken.len());
            for (place, fd) in taken.into_iter().enumerate() {
                out.add(place).write(fd.into_raw_fd());
            }
        }
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { call(receiver, take) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_receiver_senders(receiver: Handled, out: *mut *mut Handle<Gathering>) -> c_int {
    let senders = |receiving: &mut Receiving| {
        let make = || receiving.receiver.senders().map(Gathering).map_err(|error| code::of(&error));
        // SAFETY: the caller's promise.
        unsafe { give(out, make) }
    };
    // SAFETY: the caller's promises.
    unsafe { call(receiver, senders) }
}
