//! The sending end, and what it has in common with an appender: room reserved in a lane.

use crate::code::{self, Answer, came};
use crate::handle::give;
use crate::handle::{Handle, ONE, Object, call, number, share};
use crate::options::{Info, deadline};
use pelton::Deadline;
use pelton::raw::ReservedSpace;
use pelton::{Error, Sender, Senders, Sent};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

/// A sender behind a handle.
pub struct Sending {
    sender: Sender,
    open: Open,
}

/// What is reserved, with its size. While it is not nothing the sender is used for nothing else.
pub type Open = Option<(ReservedSpace, usize)>;

/// What has a sender, and may have reserved room in its lane.
pub trait Sends: Object {
    fn parts(&mut self) -> (&mut Sender, &mut Open);

    /// Waits for room, if need be, when nothing is reserved.
    fn find_room(&mut self, size: usize, deadline_ns: i64) -> Answer<ReservedSpace>;

    /// The sender, for calls that would move what is reserved.
    fn free(&mut self) -> Answer<&mut Sender> {
        match self.parts() {
            (sender, None) => Ok(sender),
            _ => Err(code::plain(code::RESERVED)),
        }
    }

    fn reserve(&mut self, size: usize, deadline_ns: i64) -> Answer<*mut c_void> {
        *self.parts().1 = None;
        fits(size)?;
        let space = self.find_room(size, deadline_ns)?;
        let (sender, open) = self.parts();
        *open = Some((space, size));
        Ok(sender.payload(space).as_ptr().cast())
    }

    fn commit(&mut self, size: usize) -> Answer {
        let (sender, open) = self.parts();
        let (_, reserved) = open.as_ref().ok_or_else(|| code::plain(code::NOT_RESERVED))?;
        check_committed(size, *reserved)?;
        let (space, _) = open.take().expect("it was just there");
        // SAFETY: kept since it was reserved, and the sender not used meanwhile.
        match unsafe { sender.commit_space(space, size) } {
            true => Ok(()),
            false => Err(code::of(&Error::Forked)),
        }
    }

    /// To give it back is to forget it.
    fn abort(&mut self) -> Answer {
        self.parts().1.take().map(|_| ()).ok_or_else(|| code::plain(code::NOT_RESERVED))
    }
}

/// Whether no more is used than was reserved.
pub fn check_committed(size: usize, reserved: usize) -> Answer {
    if size <= reserved {
        return Ok(());
    }
    let detail = format!("{size} bytes committed of {reserved} reserved: commit at most those");
    Err(code::tell(code::TOO_LARGE, detail))
}

impl Sending {
    pub fn new(sender: Sender) -> Sending {
        Sending { sender, open: None }
    }

    /// The sender alone, once nothing is reserved.
    pub fn into_sender(self) -> Sender {
        self.sender
    }

    pub fn fd(&self) -> RawFd {
        self.sender.as_raw_fd()
    }

    /// For the receiver's end alone, which is never there already: then it is an error.
    pub fn arm(&mut self) -> Answer {
        self.free()?.arm_for_end().map_err(|error| code::of(&error))?;
        Err(code::AGAIN)
    }

    pub fn disarm(&mut self) -> Answer {
        self.sender.disarm();
        Ok(())
    }

    pub fn info(&mut self) -> Info {
        let sender = &mut self.sender;
        let mut info = Info::new(sender.peer(), sender.counters());
        info.next_seq = sender.next_seq();
        info.capacity = sender.capacity();
        info.message_bytes_max = sender.message_bytes_max();
        info.unreleased = sender.unreleased();
        info
    }

    pub fn resume(&mut self, until: Deadline) -> Answer {
        let sender = self.free()?;
        came(match until.instant() {
            Some(instant) => sender.resume_until(instant),
            None => sender.resume().map(|()| true),
        })
    }

    pub fn sync(&mut self) -> Answer {
        self.free()?.sync().map_err(|error| code::of(&error))
    }

    pub fn drain(&mut self, until: Deadline) -> Answer {
        let sender = self.free()?;
        came(match until.instant() {
            Some(instant) => sender.wait_released_until(instant),
            None => sender.wait_released().map(|()| true),
        })
    }
}

impl Sends for Sending {
    #[inline(always)]
    fn parts(&mut self) -> (&mut Sender, &mut Open) {
        (&mut self.sender, &mut self.open)
    }

    fn find_room(&mut self, size: usize, deadline_ns: i64) -> Answer<ReservedSpace> {
        find_room(&mut self.sender, size, deadline(deadline_ns))
    }
}

/// Reserves, waiting as long as is said.
fn find_room(sender: &mut Sender, size: usize, until: Deadline) -> Answer<ReservedSpace> {
    sender.reserve_space(size, until).map_err(|error| code::of(&error))?.ok_or(code::AGAIN)
}

impl Object for Sending {
    const KIND: &'static str = "sender";

    fn is_forked(&self) -> bool {
        self.sender.is_forked()
    }

    fn is_free(&self) -> bool {
        self.open.is_none()
    }

    fn has_one(&self) -> bool {
        self.open.is_some()
    }
}

type Handled = *mut Handle<Sending>;

/// The caller's bytes.
///
/// # Safety
/// `size` bytes can be read at `data`, unless it is NULL.
pub unsafe fn bytes<'a>(data: *const c_void, size: usize) -> Answer<&'a [u8]> {
    match (data.is_null(), size) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(code::null("data")),
        (false, _) => {
            fits(size)?;
            // SAFETY: the caller's promise; no longer than a slice may be.
            Ok(unsafe { std::slice::from_raw_parts(data.cast(), size) })
        }
    }
}

/// Whether a size may be asked for at all.
pub fn fits(size: usize) -> Answer {
    if size <= isize::MAX as usize {
        return Ok(());
    }
    Err(code::tell(code::TOO_LARGE, format!("a size of {size} bytes: less than 2 GiB is possible")))
}

/// Whether it was sent.
pub fn answer(sent: pelton::Result<Sent>) -> Answer {
    match sent {
        Ok(Sent::Sent) => Ok(()),
        Ok(Sent::Full | Sent::TimedOut) => Err(code::AGAIN),
        Err(error) => Err(code::of(&error)),
    }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_send(sender: Handled, data: *const c_void, size: usize, deadline_ns: i64) -> c_int {
    // SAFETY: the caller's promises.
    unsafe {
        match send_at_once(sender, data, size) {
            Some(answer) => answer,
            None => send_slowly(sender, data, size, deadline_ns),
        }
    }
}

/// Sends in the common case.
///
/// # Safety
/// As for [`Handle::object_at`] and [`bytes`].
#[inline(always)]
pub unsafe fn send_at_once<T: Sends>(handle: *mut Handle<T>, data: *const c_void, size: usize) -> Option<c_int> {
    // SAFETY: the caller's promises.
    let sends = unsafe { Handle::object_at(handle, T::FREE) }?;
    if data.is_null() || size > u32::MAX as usize {
        return None;
    }
    // SAFETY: the caller's promise; no longer than a slice may be.
    let payload = unsafe { std::slice::from_raw_parts(data.cast(), size) };
    // SAFETY: the gate was open.
    match unsafe { Handle::briefly(handle, || sends.parts().0.send_fast(payload)) } {
        Ok(true) => Some(0),
        Ok(false) => None,
        Err(code) => Some(code),
    }
}

/// Sends, waiting as long as is said.
fn send(sender: &mut Sender, payload: &[u8], deadline_ns: i64) -> pelton::Result<Sent> {
    match deadline(deadline_ns) {
        Deadline::Now => sender.try_send(payload),
        Deadline::At(instant) => sender.send_until(payload, instant),
        Deadline::Never => sender.send(payload).map(|()| Sent::Sent),
    }
}

#[cold]
#[inline(never)]
unsafe fn send_slowly(sender: Handled, data: *const c_void, size: usize, deadline_ns: i64) -> c_int {
    let send = |sending: &mut Sending| {
        let sender = sending.free()?;
        // SAFETY: the caller's promise.
        let payload = unsafe { bytes(data, size)? };
        answer(send(sender, payload, deadline_ns))
    };
    // SAFETY: the caller's promises.
    unsafe { call(sender, send) }
}

/// Reserves in the common case; in another does `otherwise`.
///
/// # Safety
/// As for [`Handle::object_at`]; `out` is NULL, or may be written.
#[inline(always)]
pub unsafe fn reserve<T: Sends>(
    handle: *mut Handle<T>,
    size: usize,
    out: *mut *mut c_void,
    otherwise: impl FnOnce() -> c_int,
) -> c_int {
    // SAFETY: the caller's promises.
    if let Some(sends) = unsafe { Handle::object_at(handle, T::FREE) }
        && !out.is_null()
        && let (sender, open) = sends.parts()
        && let Some(space) = sender.reserve_fast(size)
    {
        // SAFETY: the caller's promise; the gate was open.
        unsafe {
            out.write(sender.payload(space).as_ptr().cast());
            *open = Some((space, size));
            Handle::set_gate(handle, T::FREE + ONE);
        }
        return 0;
    }
    otherwise()
}

/// Commits in the common case; in another does `otherwise`.
///
/// # Safety
/// As for [`Handle::object_at`].
#[inline(always)]
pub unsafe fn commit<T: Sends>(handle: *mut Handle<T>, size: usize, otherwise: impl FnOnce() -> c_int) -> c_int {
    // SAFETY: the caller's promises.
    if let Some(sends) = unsafe { Handle::object_at(handle, T::FREE + ONE) }
        && let (sender, open) = sends.parts()
        && let Some((space, _)) = *open
    {
        // SAFETY: kept since it was reserved, and the sender not used meanwhile; the gate was found as it is then.
        match unsafe { Handle::briefly(handle, || sender.commit_space(space, size)) } {
            Ok(true) => {
                *open = None;
                // SAFETY: as above.
                unsafe { Handle::set_gate(handle, T::FREE) };
                return 0;
            }
            Ok(false) => {}
            Err(code) => {
                *open = None;
                return code;
            }
        }
    }
    otherwise()
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_send_batch(
    sender: Handled,
    messages: *const libc::iovec,
    count: usize,
    deadline_ns: i64,
) -> c_int {
    let send = |sending: &mut Sending| {
        let sender = sending.free()?;
        let messages = match (messages.is_null(), count) {
            (_, 0) => return Ok(()),
            (true, _) => return Err(code::null("messages")),
            (false, _) => {
                fits(count.saturating_mul(size_of::<libc::iovec>()))?;
                // SAFETY: the caller's promise; no longer than a slice may be.
                unsafe { std::slice::from_raw_parts(messages, count) }
            }
        };
        let bytes_max = sender.message_bytes_max();
        let mut room = 0usize;
        for message in messages {
            // SAFETY: the caller's promise.
            unsafe { bytes(message.iov_base, message.iov_len)? };
            let bytes = message.iov_len as u64;
            if bytes > bytes_max {
                return Err(code::of(&Error::TooLarge { bytes, bytes_max }));
            }
            /// A record's header.
            const HEADER: usize = 8;
            room = room.saturating_add(HEADER + message.iov_len.next_multiple_of(8));
        }
        let until = deadline(deadline_ns);
        loop {
            let batch = sender.try_reserve_batch(messages.iter().map(|message| message.iov_len));
            if let Some(mut batch) = batch.map_err(|error| code::of(&error))? {
                for message in messages {
                    // SAFETY: as above.
                    let is_in = batch.push(unsafe { bytes(message.iov_base, message.iov_len)? });
                    assert!(is_in, "there is room for all of them");
                }
                return batch.commit().map_err(|error| code::of(&error));
            }
            if until == Deadline::Now {
                return Err(code::AGAIN);
            }
            // As one message that takes as much room as all of them; to give that back is to forget it.
            find_room(sender, (room - 8).min(bytes_max as usize), until)?;
        }
    };
    // SAFETY: the caller's promises.
    unsafe { call(sender, send) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_send_descriptors(
    sender: Handled,
    data: *const c_void,
    size: usize,
    fds: *const c_int,
    count: usize,
    deadline_ns: i64,
) -> c_int {
    let send = |sending: &mut Sending| {
        let sender = sending.free()?;
        // SAFETY: the caller's promise.
        let payload = unsafe { bytes(data, size)? };
        if count > 0 && fds.is_null() {
            return Err(code::null("fds"));
        }
        // Far more than can go: pelton says how many do.
        let count = count.min(1 << 16);
        let numbers = match count {
            0 => &[][..],
            // SAFETY: the caller's promise.
            _ => unsafe { std::slice::from_raw_parts(fds, count) },
        };
        if let Some(bad) = numbers.iter().find(|fd| **fd < 0) {
            return Err(code::system(libc::EBADF, &format!("sending descriptor {bad}")));
        }
        // SAFETY: not negative; one that is not open is refused when it is duplicated.
        let fds: Vec<_> = numbers.iter().map(|fd| unsafe { BorrowedFd::borrow_raw(*fd) }).collect();
        answer(match deadline(deadline_ns).instant() {
            Some(instant) => sender.send_with_descriptors_until(payload, &fds, instant),
            None => sender.send_with_descriptors(payload, &fds).map(|()| Sent::Sent),
        })
    };
    // SAFETY: the caller's promises.
    unsafe { call(sender, send) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_trim(sender: Handled) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { call(sender, |sending| sending.free()?.trim().map_err(|error| code::of(&error))) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_arm_send(sender: Handled, size: usize) -> c_int {
    let arm = |sending: &mut Sending| {
        let sender = sending.free()?;
        fits(size)?;
        came(sender.arm(size).map(|armed| !armed.is_waiting()))
    };
    // SAFETY: the caller's promises.
    unsafe { call(sender, arm) }
}

/// What makes senders for threads, behind a handle.
pub struct Gathering(pub Senders);

impl Object for Gathering {
    const KIND: &'static str = "senders";

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
pub unsafe extern "C" fn pelton_senders_open(senders: *mut Handle<Gathering>, out: *mut Handled) -> c_int {
    let open = |gathering: &Gathering| {
        let make = || gathering.0.sender().map(Sending::new).map_err(|error| code::of(&error));
        // SAFETY: the caller's promise.
        unsafe { give(out, make) }
    };
    // SAFETY: the caller's promises.
    number(unsafe { share(senders, open) })
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_senders_send(
    senders: *mut Handle<Gathering>,
    data: *const c_void,
    size: usize,
    deadline_ns: i64,
) -> c_int {
    let send = |gathering: &Gathering| {
        // SAFETY: the caller's promise.
        let payload = unsafe { bytes(data, size)? };
        answer(gathering.0.with(|sender| send(sender, payload, deadline_ns)).flatten())
    };
    // SAFETY: the caller's promises.
    number(unsafe { share(senders, send) })
}
