//! Files: an engine, what is asked of it, and what it brings back.
//!
//! Memory without a release is counted while an operation has it: as long as there is any, closing waits, for the caller has no other way to know.
//! An end of a channel is out of its handle while operations have it, and is put back by who takes the completion of the last of these.

use crate::code::{self, Answer, came};
use crate::handle::give;
use crate::handle::{self, Handle, Object, call, catch, enter, number, share};
use crate::options::path;
use crate::options::{self, COptions, Info, deadline, wrong};
use crate::receiving::Receiving;
use crate::sending::{Sending, Sends as _};
use pelton::Deadline;
use pelton::file::{Buffer, Completion, Engine, File, Kind, Open, Operation, Output};
use pelton::{Counters, Error, Receiver, Sender};
use std::collections::HashSet;
use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// An open file behind a handle.
pub struct Opened(File);

impl Opened {
    pub fn fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl Object for Opened {
    const KIND: &'static str = "file";

    fn is_forked(&self) -> bool {
        !self.0.is_own()
    }

    fn is_free(&self) -> bool {
        true
    }
}

/// An engine behind a handle.
pub struct Filing {
    engine: Engine,
    lent: Lent,
    /// What completions that were taken last point to.
    told: Vec<Told>,
}

/// What operations have that is the caller's.
#[derive(Default)]
struct Lent {
    /// Pieces of memory without a release.
    pieces: Arc<AtomicUsize>,
    senders: Loans<Sending>,
    receivers: Loans<Receiving>,
}

impl Lent {
    /// Gives back the ends that no operation has any more.
    fn settle(&mut self) {
        self.senders.settle();
        self.receivers.settle();
    }
}

/// A handle that is an end of a channel.
trait Lends: Object {
    type End;

    /// Whether nothing is reserved, or received.
    fn is_to_be_had(&mut self) -> Answer;
    fn into_end(self) -> Self::End;
    fn of_end(end: Self::End) -> Self;
}

impl Lends for Sending {
    type End = Sender;

    fn is_to_be_had(&mut self) -> Answer {
        self.free().map(drop)
    }

    fn into_end(self) -> Sender {
        self.into_sender()
    }

    fn of_end(end: Sender) -> Sending {
        Sending::new(end)
    }
}

impl Lends for Receiving {
    type End = Receiver;

    fn is_to_be_had(&mut self) -> Answer {
        self.free().map(drop)
    }

    fn into_end(self) -> Receiver {
        self.into_receiver()
    }

    fn of_end(end: Receiver) -> Receiving {
        Receiving::new(end)
    }
}

/// Ends of channels, with the handles that they are out of.
struct Loans<T: Lends>(Vec<Loan<T>>);

struct Loan<T: Lends> {
    handle: *mut Handle<T>,
    end: Arc<Mutex<T::End>>,
}

impl<T: Lends> Default for Loans<T> {
    fn default() -> Loans<T> {
        Loans(Vec::new())
    }
}

impl<T: Lends> Loans<T> {
    fn find(&self, handle: *mut Handle<T>) -> Option<&Arc<Mutex<T::End>>> {
        self.0.iter().find(|loan| loan.handle == handle).map(|loan| &loan.end)
    }

    /// Whether the end can be had. One that other operations of this engine have can: they are before it in a chain, or it is told EBUSY.
    ///
    /// # Safety
    /// As for [`enter`].
    unsafe fn check(&self, handle: *mut Handle<T>) -> Answer {
        match self.find(handle) {
            Some(_) => Ok(()),
            // SAFETY: the caller's promise.
            None => unsafe { enter(handle, T::is_to_be_had) },
        }
    }

    /// The end, which is out of its handle from now on.
    ///
    /// # Safety
    /// As for [`enter`].
    unsafe fn lend(&mut self, handle: *mut Handle<T>) -> Answer<Arc<Mutex<T::End>>> {
        if let Some(end) = self.find(handle) {
            return Ok(end.clone());
        }
        // SAFETY: the caller's promise; it is given back by `settle`.
        let end = Arc::new(Mutex::new(unsafe { handle::lend(handle, T::is_to_be_had)? }.into_end()));
        self.0.push(Loan { handle, end: end.clone() });
        Ok(end)
    }

    fn settle(&mut self) {
        let mut at = 0;
        while let Some(loan) = self.0.get(at) {
            if Arc::strong_count(&loan.end) > 1 {
                at += 1;
                continue;
            }
            let Loan { handle, end } = self.0.swap_remove(at);
            let end = Arc::into_inner(end).expect("no operation has it");
            // SAFETY: it was lent by `lend`, and the caller of this engine uses the handle no other way meanwhile.
            unsafe { handle::give_back(handle, T::of_end(end.into_inner().unwrap_or_else(PoisonError::into_inner))) };
        }
    }
}

/// What a completion points to. Vectors, whose elements stay valid where they are when these are moved.
enum Told {
    Stat { _stat: Vec<CStat> },
    Text { _text: Vec<u8> },
}

impl Told {
    fn stat(stat: CStat) -> (*const CStat, Told) {
        let stat = vec![stat];
        (stat.as_ptr(), Told::Stat { _stat: stat })
    }

    fn text(text: Vec<u8>) -> (*const c_char, Told) {
        (text.as_ptr().cast(), Told::Text { _text: text })
    }
}

/// Waits whatever is refused meanwhile, as it may be for want of memory: until then somebody else has what is the caller's.
fn insist(mut wait: impl FnMut() -> pelton::Result<bool>) {
    while wait().is_err() {
        std::thread::yield_now();
    }
}

impl Filing {
    pub fn fd(&self) -> RawFd {
        self.engine.as_raw_fd()
    }

    pub fn arm(&mut self) -> Answer {
        came(self.engine.arm().map(|armed| !armed.is_waiting()))
    }

    pub fn disarm(&mut self) -> Answer {
        self.engine.disarm();
        Ok(())
    }

    pub fn info(&self) -> Info {
        let mut info = Info::new(None, Counters::default());
        info.calls = self.engine.in_flight() as u64;
        info
    }

    pub fn drain(&mut self, until: Deadline) -> Answer {
        came(self.engine.wait_idle(until.instant()))
    }

    fn run(&mut self, given: &COperation, until: Deadline) -> Answer<CCompletion> {
        self.told.clear();
        // SAFETY: the caller's promises.
        let operation = unsafe { given.operation(&mut self.lent)? };
        let ended = match until.instant() {
            None => self.engine.run(operation).map(Some),
            Some(deadline) => self.engine.run_until(operation, deadline),
        };
        let is_given_up = matches!(ended, Ok(None) | Err(Error::System { .. }));
        if is_given_up && (given.release.is_none() && given.has_memory() || given.has_channel()) {
            insist(|| self.engine.wait_given_up());
        }
        self.lent.settle();
        match ended {
            Ok(Some(ended)) => Ok(self.tell(given.token, ended)),
            Ok(None) => Err(code::AGAIN),
            Err(error @ Error::File { .. }) => Ok(CCompletion::failed(given.token, &error)),
            Err(error) if given.has_channel() => Ok(CCompletion::failed(given.token, &error)),
            Err(error) => Err(code::of(&error)),
        }
    }

    /// Submits one operation, or a chain.
    fn submit(&mut self, chain: &[COperation]) -> Answer {
        if chain.len() > self.engine.in_flight_max() {
            let (found, most) = (chain.len(), self.engine.in_flight_max());
            let detail = format!("found a chain of {found} operations, wanted at most {most}: raise options.in_flight");
            return Err(code::tell(code::REFUSED, detail));
        }
        if !self.engine.has_free_slots(chain.len()) {
            return Err(code::AGAIN);
        }
        if let [one] = chain {
            // SAFETY: the caller's promises.
            let operation = unsafe { one.operation(&mut self.lent)? };
            return came(
                self.engine.try_submit_unbegun(one.token, operation).map(|submitted| submitted.is_submitted()),
            );
        }
        // All of them are looked at before any is made: a release is not called of what is not taken.
        let mut closed = HashSet::new();
        for given in chain {
            // SAFETY: the caller's promises.
            unsafe { given.check(&self.lent)? };
            if closed.contains(&given.file) || closed.contains(&given.to) {
                return Err(code::tell(code::CLOSED_HANDLE, "the pelton_file is closed earlier in the chain"));
            }
            if given.kind == CLOSE {
                closed.insert(given.file);
            }
        }
        // SAFETY: the caller's promises.
        let make = |given: &COperation| unsafe { Ok((given.token, given.operation(&mut self.lent)?)) };
        let made: Vec<(u64, Operation)> = chain.iter().map(make).collect::<Answer<_>>()?;
        came(self.engine.try_submit_chain(made).map(|submitted| submitted.is_submitted()))
    }

    fn submit_all(&mut self, given: &[COperation], taken: &mut usize) -> Answer {
        let submitted = loop {
            let rest = &given[*taken..];
            let Some(last) = rest.iter().position(|operation| operation.flags & LINKED == 0) else {
                break match rest {
                    [] => Ok(()),
                    _ => Err(wrong("flags", "PELTON_LINKED in the last operation", "0: nothing comes after it")),
                };
            };
            match self.submit(&rest[..=last]) {
                Ok(()) => *taken += last + 1,
                Err(code::AGAIN) if *taken > 0 => break Ok(()),
                Err(code) => break Err(code),
            }
        };
        // Of what was not taken.
        self.lent.settle();
        // Also what came before a mistake.
        let started = if *taken > 0 { self.engine.start_submitted().map_err(|error| code::of(&error)) } else { Ok(()) };
        submitted.and(started)
    }

    fn completions(&mut self, until: Deadline, out: *mut CCompletion, count: usize, taken: &mut usize) -> Answer {
        self.told.clear();
        if count == 0 {
            return Err(code::plain(code::TOO_SMALL));
        }
        while *taken < count {
            let next = match until {
                _ if *taken > 0 => self.engine.try_completion(),
                Deadline::Now => self.engine.try_completion(),
                Deadline::At(instant) => self.engine.completion_until(instant),
                Deadline::Never => self.engine.completion().map(Some),
            };
            match next {
                Ok(Some(ended)) => {
                    self.lent.settle();
                    let told = self.tell(ended.token, ended);
                    // SAFETY: the caller's promise: there is room for `count`.
                    unsafe { out.add(*taken).write(told) };
                    *taken += 1;
                }
                Ok(None) => break,
                // It is told again when nothing was taken before.
                Err(_) if *taken > 0 => break,
                Err(error) => return Err(code::of(&error)),
            }
        }
        if *taken > 0 { Ok(()) } else { Err(code::AGAIN) }
    }

    fn tell(&mut self, token: u64, ended: Completion) -> CCompletion {
        let mut told = match &ended.outcome {
            Ok(_) => CCompletion { token, count: ended.count() as u64, ..CCompletion::NONE },
            Err(error) => CCompletion::failed(token, error),
        };
        if let Some(error) = &ended.cut_short_by {
            told.error = errno(error);
        }
        match ended.outcome {
            Ok(Output::File(file)) => told.file = Handle::boxed(Opened(file)),
            Ok(Output::Stat(found)) => {
                let (at, kept) = Told::stat(CStat::of(&found));
                told.stat = at;
                self.told.push(kept);
            }
            Ok(Output::Path(path)) => {
                let mut text = path.into_os_string().into_encoded_bytes();
                told.text_size = text.len();
                text.push(0);
                self.tell_text(&mut told, text);
            }
            Ok(Output::Entries(entries)) => {
                let mut text = Vec::new();
                for entry in entries {
                    text.extend_from_slice(&entry.inode.to_le_bytes());
                    text.push(kind(entry.kind) as u8);
                    text.extend_from_slice(entry.name.as_bytes());
                    text.push(0);
                }
                told.text_size = text.len();
                self.tell_text(&mut told, text);
            }
            _ => {}
        }
        told
    }

    fn tell_text(&mut self, told: &mut CCompletion, text: Vec<u8>) {
        let (at, kept) = Told::text(text);
        told.text = at;
        self.told.push(kept);
    }
}

impl Drop for Filing {
    /// Waits only for memory that has no release, and for ends of channels.
    fn drop(&mut self) {
        if self.engine.is_forked() {
            return;
        }
        self.lent.settle();
        let has_nothing = self.lent.pieces.load(Ordering::Acquire) == 0;
        if has_nothing && self.lent.senders.0.is_empty() && self.lent.receivers.0.is_empty() {
            return;
        }
        // What it could not begin by now, the wait begins.
        let _ = self.engine.cancel_all();
        // What has ended without being taken has memory too, which nobody writes any more.
        insist(|| self.engine.wait_idle(None));
        self.lent.settle();
    }
}

impl Object for Filing {
    const KIND: &'static str = "engine";

    fn is_forked(&self) -> bool {
        self.engine.is_forked()
    }

    fn is_free(&self) -> bool {
        true
    }
}

type Handled = *mut Handle<Filing>;

/// `pelton_operation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct COperation {
    token: u64,
    kind: u32,
    flags: u32,
    file: *mut Handle<Opened>,
    to: *mut Handle<Opened>,
    path: *const c_char,
    path_to: *const c_char,
    memory: *const libc::iovec,
    memory_count: usize,
    offset: u64,
    offset_to: u64,
    bytes: u64,
    open_flags: u32,
    mode: u32,
    resolve: u64,
    accessed_ns: i64,
    modified_ns: i64,
    release: Option<unsafe extern "C" fn(*mut c_void)>,
    context: *mut c_void,
    channel: *mut c_void,
    message_bytes: u64,
}

const _: () = assert!(size_of::<COperation>() == 152);

const LINKED: u32 = 1;
const CURRENT: u64 = u64::MAX;
const END: u64 = u64::MAX - 1;
const UNCHANGED: i64 = i64::MIN;

const OPEN: u32 = 1;
const CLOSE: u32 = 2;
const READ: u32 = 3;
const WRITE: u32 = 4;
const STAT: u32 = 9;
const COPY: u32 = 20;
const SEND: u32 = 21;
const RECEIVE: u32 = 22;

impl COperation {
    fn has_memory(&self) -> bool {
        self.kind == READ || self.kind == WRITE
    }

    fn has_channel(&self) -> bool {
        self.kind == SEND || self.kind == RECEIVE
    }

    /// Whether it can be made: whatever this says no to is not taken.
    ///
    /// # Safety
    /// What it points to is there, as the header says.
    unsafe fn check(&self, lent: &Lent) -> Answer {
        if !(OPEN..=RECEIVE).contains(&self.kind) {
            return Err(wrong("kind", self.kind, "one of enum pelton_file_operation"));
        }
        if self.flags & !LINKED != 0 {
            return Err(wrong("flags", self.flags, "0 or PELTON_LINKED (1)"));
        }
        let (needs_file, needs_path, needs_path_to) = match self.kind {
            OPEN | 10..=13 | 17 | 18 => (false, true, false),
            14..=16 => (false, true, true),
            STAT => (!self.file.is_null(), self.file.is_null(), false),
            _ => (true, false, false),
        };
        if needs_path && self.path.is_null() {
            return Err(code::null("operation.path"));
        }
        if needs_path_to && self.path_to.is_null() {
            return Err(code::null("operation.path_to"));
        }
        // SAFETY: the caller's promise.
        unsafe {
            if needs_file {
                share(self.file, |_| Ok(()))?;
            }
            if self.kind == COPY {
                share(self.to, |_| Ok(()))?;
            }
            match self.kind {
                SEND => lent.senders.check(self.channel.cast())?,
                RECEIVE => lent.receivers.check(self.channel.cast())?,
                _ => {}
            }
        }
        if !self.has_memory() {
            return match (self.memory_count, self.release) {
                (0, None) => Ok(()),
                _ => Err(wrong("memory_count or release", "set", "nothing, but of a read or a write")),
            };
        }
        if self.memory.is_null() && self.memory_count > 0 {
            return Err(code::null("operation.memory"));
        }
        if self.kind == READ && self.offset == END {
            return Err(wrong("offset", "PELTON_AT_END", "where to read from"));
        }
        let mut bytes = 0usize;
        // SAFETY: the caller's promise.
        for piece in unsafe { self.pieces() } {
            if piece.iov_base.is_null() && piece.iov_len > 0 {
                return Err(code::null("a piece of operation.memory"));
            }
            if isize::try_from(piece.iov_len).is_err() {
                return Err(wrong("a piece of memory", piece.iov_len, "no more bytes than there can be"));
            }
            bytes = bytes.saturating_add(piece.iov_len);
        }
        if isize::try_from(bytes).is_err() {
            return Err(wrong("the sum of the pieces of memory", bytes, "no more bytes than there can be"));
        }
        Ok(())
    }

    /// # Safety
    /// As of [`COperation::check`].
    unsafe fn pieces(&self) -> &[libc::iovec] {
        match self.memory_count {
            0 => &[],
            // SAFETY: the caller's promise.
            count => unsafe { std::slice::from_raw_parts(self.memory, count) },
        }
    }

    /// The operation that is meant. A file to be closed is taken from its handle, an end of a channel lent.
    ///
    /// # Safety
    /// As of [`COperation::check`]; the memory is the kernel's until it is released.
    unsafe fn operation(&self, lent: &mut Lent) -> Answer<Operation> {
        // SAFETY: the caller's promises.
        unsafe {
            self.check(lent)?;
            let file = || share(self.file, |opened| Ok(opened.0.clone()));
            let (at, to) = (|| path(self.path), || path(self.path_to));
            Ok(match self.kind {
                OPEN => Operation::open(at(), Open::from_raw(self.open_flags, self.mode, self.resolve)),
                CLOSE => Operation::close(handle::take(self.file, |_| Ok(()))?.0.0),
                READ | WRITE => self.transfer(&file()?, &lent.pieces),
                5 => Operation::sync(&file()?),
                6 => Operation::sync_data(&file()?),
                7 => Operation::truncate(&file()?, self.bytes),
                8 => Operation::allocate(&file()?, self.offset, self.bytes),
                STAT if !self.file.is_null() => Operation::stat_file(&file()?),
                STAT => Operation::stat(at()),
                10 => Operation::stat_link(at()),
                11 => Operation::set_times(at(), time(self.accessed_ns), time(self.modified_ns)),
                12 => Operation::unlink(at()),
                13 => Operation::remove_directory(at()),
                14 => Operation::rename(at(), to()),
                15 => Operation::link(at(), to()),
                16 => Operation::symlink(at(), to()),
                17 => Operation::read_link(at()),
                18 => Operation::make_directory(at(), self.mode),
                19 => Operation::list(&file()?),
                SEND => {
                    let (file, sender) = (file()?, lent.senders.lend(self.channel.cast())?);
                    let message_bytes = usize::try_from(self.message_bytes).unwrap_or(usize::MAX);
                    Operation::send(&file, self.offset, self.bytes, &sender, message_bytes)
                }
                RECEIVE => {
                    let (file, receiver) = (file()?, lent.receivers.lend(self.channel.cast())?);
                    Operation::receive(&file, self.offset, self.bytes, &receiver)
                }
                _ => {
                    let to = share(self.to, |opened| Ok(opened.0.clone()))?;
                    Operation::copy(&file()?, self.offset, &to, self.offset_to, self.bytes)
                }
            })
        }
    }

    /// # Safety
    /// As of [`COperation::operation`].
    unsafe fn transfer(&self, file: &File, pieces_lent: &Arc<AtomicUsize>) -> Operation {
        // SAFETY: the caller's promises. The last piece releases all of them.
        let (mut pieces, last) = unsafe {
            match self.pieces() {
                [] => ([].iter(), self.lend(std::ptr::null_mut(), 0, pieces_lent)),
                [rest @ .., last] => (rest.iter(), self.lend(last.iov_base.cast(), last.iov_len, pieces_lent)),
            }
        };
        let writes = self.kind == WRITE;
        if pieces.len() == 0 {
            return match (self.offset, writes) {
                (CURRENT, false) => Operation::read(file, last),
                (CURRENT, true) => Operation::write(file, last),
                (END, _) => Operation::append(file, last),
                (offset, false) => Operation::read_at(file, last, offset),
                (offset, true) => Operation::write_at(file, last, offset),
            };
        }
        // SAFETY: as above.
        let piece = |piece: &libc::iovec| unsafe {
            Buffer::foreign(piece.iov_base.cast(), piece.iov_len, None, std::ptr::null_mut())
        };
        let buffers: Vec<Buffer> = pieces.by_ref().map(piece).chain(std::iter::once(last)).collect();
        match (self.offset, writes) {
            (CURRENT | END, _) => Operation::vectored(file, buffers, self.offset == END, writes),
            (offset, false) => Operation::read_vectored_at(file, buffers, offset),
            (offset, true) => Operation::write_vectored_at(file, buffers, offset),
        }
    }

    /// The memory whose being dropped releases the operation's.
    ///
    /// # Safety
    /// As of [`COperation::operation`].
    unsafe fn lend(&self, base: *mut u8, bytes: usize, lent: &Arc<AtomicUsize>) -> Buffer {
        unsafe extern "C" fn give_back(lent: *mut c_void) {
            // SAFETY: it was made of one below, and comes once.
            let lent = unsafe { Arc::from_raw(lent.cast::<AtomicUsize>().cast_const()) };
            // Release: what closes the engine has the memory then.
            lent.fetch_sub(1, Ordering::Release);
        }
        // SAFETY: the caller's promise.
        unsafe {
            match self.release {
                Some(_) => Buffer::foreign(base, bytes, self.release, self.context),
                None => {
                    // Relaxed: it is the caller's own that it adds.
                    lent.fetch_add(1, Ordering::Relaxed);
                    Buffer::foreign(base, bytes, Some(give_back), Arc::into_raw(lent.clone()).cast_mut().cast())
                }
            }
        }
    }
}

/// Nanoseconds since 1970; `None`: as it is.
fn time(ns: i64) -> Option<SystemTime> {
    let since = Duration::from_nanos(ns.unsigned_abs());
    match ns {
        UNCHANGED => None,
        0.. => Some(SystemTime::UNIX_EPOCH + since),
        _ => Some(SystemTime::UNIX_EPOCH - since),
    }
}

fn since_1970(time: SystemTime) -> i64 {
    let ns = |since: Duration| i64::try_from(since.as_nanos()).unwrap_or(i64::MAX);
    match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) => ns(since),
        Err(before) => -ns(before.duration()),
    }
}

/// `enum pelton_file_kind`.
fn kind(kind: Kind) -> u32 {
    match kind {
        Kind::File => 1,
        Kind::Directory => 2,
        Kind::Symlink => 3,
        Kind::Fifo => 4,
        Kind::Socket => 5,
        Kind::Character => 6,
        Kind::Block => 7,
        _ => 0,
    }
}

/// `pelton_stat`.
#[repr(C)]
pub struct CStat {
    kind: u32,
    mode: u32,
    bytes: u64,
    allocated_bytes: u64,
    links: u64,
    uid: u32,
    gid: u32,
    device_major: u32,
    device_minor: u32,
    inode: u64,
    accessed_ns: i64,
    modified_ns: i64,
    changed_ns: i64,
    created_ns: i64,
}

const _: () = assert!(size_of::<CStat>() == 88);

impl CStat {
    fn of(found: &pelton::file::Stat) -> CStat {
        CStat {
            kind: kind(found.kind),
            mode: found.mode,
            bytes: found.bytes,
            allocated_bytes: found.allocated_bytes,
            links: found.links,
            uid: found.uid,
            gid: found.gid,
            device_major: found.device.0,
            device_minor: found.device.1,
            inode: found.inode,
            accessed_ns: since_1970(found.accessed),
            modified_ns: since_1970(found.modified),
            changed_ns: since_1970(found.changed),
            created_ns: found.created.map_or(i64::MIN, since_1970),
        }
    }
}

/// `pelton_file_completion`.
#[repr(C)]
pub struct CCompletion {
    token: u64,
    code: i32,
    error: i32,
    count: u64,
    file: *mut Handle<Opened>,
    stat: *const CStat,
    text: *const c_char,
    text_size: usize,
}

const _: () = assert!(size_of::<CCompletion>() == 56);

impl CCompletion {
    const NONE: CCompletion = CCompletion {
        token: 0,
        code: 0,
        error: 0,
        count: 0,
        file: std::ptr::null_mut(),
        stat: std::ptr::null(),
        text: std::ptr::null(),
        text_size: 0,
    };

    fn failed(token: u64, error: &Error) -> CCompletion {
        let (code, error) = match error {
            Error::File { .. } | Error::System { .. } => (code::SYSTEM, errno(error)),
            // What a channel says.
            said => (code::of(said), 0),
        };
        CCompletion { token, code, error, ..CCompletion::NONE }
    }
}

fn errno(error: &Error) -> c_int {
    match error {
        Error::File { error: source, .. } | Error::System { error: source, .. } => {
            source.raw_os_error().unwrap_or(libc::EIO)
        }
        // What a channel says.
        _ => libc::EPIPE,
    }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_engine_open(options: *const COptions, out: *mut Handled) -> c_int {
    let open = || {
        // SAFETY: the caller's promises.
        let engine = unsafe { options::of_engine(options)? }.build().map_err(|error| code::of(&error))?;
        Ok(Filing { engine, lent: Lent::default(), told: Vec::new() })
    };
    // SAFETY: the caller's promises.
    number(catch(|| unsafe { give(out, open) }))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_file_run(
    engine: Handled,
    operation: *const COperation,
    deadline_ns: i64,
    out: *mut CCompletion,
) -> c_int {
    let run = |filing: &mut Filing| {
        // SAFETY: the caller's promise.
        let given = unsafe { operation.as_ref() }.ok_or_else(|| code::null("operation"))?;
        if given.flags & LINKED != 0 {
            return Err(wrong("flags", "PELTON_LINKED", "0: one operation is run at a time"));
        }
        if given.kind == OPEN && out.is_null() {
            return Err(code::null("out, of what opens,"));
        }
        let told = filing.run(given, deadline(deadline_ns))?;
        let (code, error) = (told.code, told.error);
        if !out.is_null() {
            // SAFETY: the caller's promise.
            unsafe { out.write(told) };
        }
        match code {
            0 => Ok(()),
            code::SYSTEM => Err(code::system(error, "the operation failed")),
            said => Err(said),
        }
    };
    // SAFETY: the caller's promises.
    unsafe { call(engine, run) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_file_submit(
    engine: Handled,
    operations: *const COperation,
    count: usize,
    taken: *mut usize,
) -> c_int {
    let submit = |filing: &mut Filing| {
        if taken.is_null() {
            return Err(code::null("taken"));
        }
        // SAFETY: the caller's promises.
        unsafe { taken.write(0) };
        if count > 0 && operations.is_null() {
            return Err(code::null("operations"));
        }
        let given = match count {
            0 => &[],
            // SAFETY: the caller's promise.
            _ => unsafe { std::slice::from_raw_parts(operations, count) },
        };
        let mut so_many = 0;
        let submitted = filing.submit_all(given, &mut so_many);
        // SAFETY: the caller's promise.
        unsafe { taken.write(so_many) };
        submitted
    };
    // SAFETY: the caller's promises.
    unsafe { call(engine, submit) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_file_completions(
    engine: Handled,
    deadline_ns: i64,
    out: *mut CCompletion,
    count: usize,
    taken: *mut usize,
) -> c_int {
    let take = |filing: &mut Filing| {
        if out.is_null() || taken.is_null() {
            return Err(code::null(if out.is_null() { "out" } else { "taken" }));
        }
        let mut so_many = 0;
        filing.completions(deadline(deadline_ns), out, count, &mut so_many)?;
        // SAFETY: the caller's promise.
        unsafe { taken.write(so_many) };
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { call(engine, take) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_file_cancel(engine: Handled, token: u64) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { call(engine, |filing| came(filing.engine.cancel(token))) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_file_from_fd(fd: c_int, name: *const c_char, out: *mut *mut Handle<Opened>) -> c_int {
    let open = || {
        if name.is_null() {
            return Err(code::null("name"));
        }
        // SAFETY: asks about a number.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
            return Err(code::system(libc::EBADF, "the descriptor is not open"));
        }
        // SAFETY: it is open, and the caller gives it.
        let (fd, path) = unsafe { (OwnedFd::from_raw_fd(fd), PathBuf::from(path(name))) };
        File::from_fd(fd, path).map(Opened).map_err(|error| code::of(&error))
    };
    // SAFETY: the caller's promises.
    number(catch(|| unsafe { give(out, open) }))
}
