//! The receiving end, and messages held.

use crate::code::{self, Answer, came};
use crate::handle::give;
use crate::handle::{Handle, ONE, Object, call};
use crate::options::{Info, deadline};
use crate::sending::Gathering;
use pelton::Deadline;
use pelton::raw::{Item, Record};
use pelton::{Departure, Held, Message, Receiver};
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
    One(Record),
    /// A sender has joined or left.
    Event,
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
        came(self.free()?.arm().map(|armed| !armed.is_waiting()))
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

    pub fn resume(&mut self, until: Deadline) -> Answer {
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
            Current::One(record) => drop(self.receiver.message(record)),
            Current::Event => self.receiver.pass_event(),
            Current::Batch => self.receiver.release_batch(),
        }
        Ok(())
    }
}

impl Object for Receiving {
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

impl CMessage {
    #[inline(always)]
    fn of(message: &Message<'_>) -> CMessage {
        let (data, size) = message.raw_parts();
        CMessage {
            data: data.as_ptr().cast(),
            size,
            seq: message.seq(),
            lane: message.lane(),
            flags: u32::from(message.is_redelivered()),
            descriptors: message.descriptor_count() as u32,
        }
    }

    /// A sender has joined or left: PELTON_JOINED and so on.
    fn of_event(lane: u32, departure: Option<Departure>) -> CMessage {
        let flags = match departure {
            None => 2,
            Some(Departure::Closed) => 4,
            Some(Departure::PeerDied) => 8,
            Some(_) => 16,
        };
        CMessage { data: std::ptr::dangling(), size: 0, seq: 0, lane, flags, descriptors: 0 }
    }
}

/// The next message or event, waiting until the deadline.
fn next(receiver: &mut Receiver, deadline_ns: i64) -> Answer<Item> {
    receiver.find(deadline(deadline_ns)).map_err(|error| code::of(&error))?.ok_or(code::AGAIN)
}

/// Shows what was found, which is the current one from now on.
///
/// # Safety
/// `out` can be written.
unsafe fn show_item(receiver: &mut Receiver, item: Item, out: *mut CMessage) -> Current {
    let (shown, current) = match item {
        Item::Record(record) => {
            let message = receiver.message(record);
            let shown = CMessage::of(&message);
            std::mem::forget(message);
            (shown, Current::One(record))
        }
        Item::Joined => (CMessage::of_event(receiver.lane(), None), Current::Event),
        Item::Left(departure) => (CMessage::of_event(receiver.lane(), Some(departure)), Current::Event),
    };
    // SAFETY: the caller guarantees it.
    unsafe { out.write(shown) };
    current
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
            if let Some(record) = receiving.receiver.peek_fast() {
                return show(receiver, receiving, record, out);
            }
            if deadline_ns > 0
                && let Some(record) = receiving.receiver.peek_soon()
            {
                return show(receiver, receiving, record, out);
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
unsafe fn show(handle: Handled, receiving: &mut Receiving, record: Record, out: *mut CMessage) -> c_int {
    // Not released here.
    let message = std::mem::ManuallyDrop::new(receiving.receiver.message(record));
    // SAFETY: the caller's promises.
    unsafe {
        out.write(CMessage::of(&message));
        receiving.current = Current::One(record);
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
        let item = next(receiver, deadline_ns)?;
        // SAFETY: the caller's promise.
        receiving.current = unsafe { show_item(receiver, item, out) };
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
        let is_batch = matches!(first, Item::Record(record) if count > 1 && record.descriptors == 0);
        if !is_batch {
            // SAFETY: the caller's promise.
            receiving.current = unsafe { show_item(receiver, first, out) };
            found = 1;
        } else {
            // From the first one on, which is not taken yet.
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
        let copy = || unsafe { receiving.receiver.copy_fast(buffer.cast(), capacity, deadline_ns > 0) };
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
        let record = loop {
            match next(receiver, deadline_ns)? {
                Item::Record(record) => break record,
                _ => receiver.pass_event(),
            }
        };
        let message = receiver.message(record);
        let (data, size) = message.raw_parts();
        // SAFETY: the caller's promise.
        unsafe { out_size.write(size) };
        if size > capacity {
            // Not released: the next call finds it again.
            std::mem::forget(message);
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
        && let Receiving { receiver: own, current: Current::One(record) } = &mut *receiving
    {
        // SAFETY: received last, and the receiver not used meanwhile.
        let released = unsafe { Handle::briefly(receiver, || own.release_record(record)) };
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
pub struct Holding(
    /// `None`: what was held says that a sender joined or left, and has no bytes.
    Option<Held>,
);

impl Object for Holding {
    const KIND: &'static str = "held";

    fn is_forked(&self) -> bool {
        self.0.as_ref().is_some_and(Held::is_forked)
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
            Current::One(record) => {
                let held = receiving.receiver.message(record).hold();
                // SAFETY: the caller's promise.
                unsafe { out.write(Handle::boxed(Holding(Some(held)))) };
                Ok(())
            }
            Current::Event => {
                receiving.receiver.pass_event();
                // SAFETY: the caller's promise.
                unsafe { out.write(Handle::boxed(Holding(None))) };
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
        let record = match std::mem::replace(&mut receiving.current, Current::Nothing) {
            Current::One(record) => record,
            Current::Nothing => return Err(code::plain(code::NOT_RECEIVED)),
            // None of a batch's messages has any.
            other => {
                receiving.current = other;
                // SAFETY: the caller's promise.
                unsafe { out_count.write(0) };
                return Ok(());
            }
        };
        let mut message = receiving.receiver.message(record);
        let count = message.descriptor_count();
        let taken = if count > capacity {
            // SAFETY: the caller's promise.
            unsafe { out_count.write(count) };
            Err(code::tell(code::TOO_SMALL, format!("{count} descriptors came, there is room for {capacity}")))
        } else {
            message.take_descriptors().map_err(|error| code::of(&error))
        };
        let record = message.record();
        std::mem::forget(message);
        receiving.current = Current::One(record);
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
