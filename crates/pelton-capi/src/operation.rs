//! Operations on files: what each kind uses, and how it is built.
//!
//! An endpoint that operations use is detached from its handle, and is put back when the completion of the last of them
//! is taken.

#[cfg(test)]
mod tests;

use crate::c::{Raw, Text, structures};
use crate::code::{self, Answer, wrong};
use crate::file::File;
use crate::handle::Object;
use crate::receiver::Receiver;
use crate::sender::Sender;
use crate::writer::Writer;
use pelton::file::{Buffer, Open, Operation};
use std::ffi::c_void;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

structures! {
    "pelton_operation" COperation {
        pub token: u64,
        kind: u32,
        flags: u32,
        file: Raw<File>,
        to: Raw<File>,
        path: Text,
        path_to: Text,
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
        sender: Raw<Sender>,
        receiver: Raw<Receiver>,
        message_bytes: u64,
    }
}

/// `PELTON_LINKED`.
const LINKED: u32 = 1;
/// `PELTON_CURRENT`.
const CURRENT: u64 = u64::MAX;
/// `PELTON_AT_END`.
const AT_END: u64 = u64::MAX - 1;
/// `PELTON_UNCHANGED`.
const UNCHANGED: i64 = i64::MIN;

/// What an operation uses, of what can be NULL, closed or otherwise invalid.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Uses {
    Path,
    PathTo,
    File,
    /// The file, whose handle it closes.
    ClosedFile,
    /// The file, or the path if that is NULL.
    FileOrPath,
    To,
    Memory,
    Sender,
    Receiver,
}

type Build = fn(&COperation, &mut InUse) -> Answer<Operation>;

/// `enum pelton_file_operation`, from 1 on: what each one uses, and how it is built.
const OPERATIONS: [(&[Uses], Build); 22] = {
    use Uses::{ClosedFile, File, FileOrPath, Memory, Path, PathTo, Receiver, Sender, To};
    [
        (&[Path], |o, _| Ok(Operation::open(o.path()?, Open::from_raw(o.open_flags, o.mode, o.resolve)))),
        (&[ClosedFile], |o, _| Ok(Operation::close(o.file.take(|_| Ok(()))?.0.0))),
        (&[File, Memory], |o, in_use| o.transfer(Direction::Read, in_use)),
        (&[File, Memory], |o, in_use| o.transfer(Direction::Write, in_use)),
        (&[File], |o, _| Ok(Operation::sync(&o.file()?))),
        (&[File], |o, _| Ok(Operation::sync_data(&o.file()?))),
        (&[File], |o, _| Ok(Operation::truncate(&o.file()?, o.bytes))),
        (&[File], |o, _| Ok(Operation::allocate(&o.file()?, o.offset, o.bytes))),
        (&[FileOrPath], |o, _| match o.file.is_null() {
            true => Ok(Operation::stat(o.path()?)),
            false => Ok(Operation::stat_file(&o.file()?)),
        }),
        (&[Path], |o, _| Ok(Operation::stat_link(o.path()?))),
        (&[Path], |o, _| Ok(Operation::set_times(o.path()?, time(o.accessed_ns), time(o.modified_ns)))),
        (&[Path], |o, _| Ok(Operation::unlink(o.path()?))),
        (&[Path], |o, _| Ok(Operation::remove_directory(o.path()?))),
        (&[Path, PathTo], |o, _| Ok(Operation::rename(o.path()?, o.path_to()?))),
        (&[Path, PathTo], |o, _| Ok(Operation::link(o.path()?, o.path_to()?))),
        (&[Path, PathTo], |o, _| Ok(Operation::symlink(o.path()?, o.path_to()?))),
        (&[Path], |o, _| Ok(Operation::read_link(o.path()?))),
        (&[Path], |o, _| Ok(Operation::make_directory(o.path()?, o.mode))),
        (&[File], |o, _| Ok(Operation::list(&o.file()?))),
        (&[File, To], |o, _| {
            let to = o.to.share(|to| Ok(to.0.clone()))?;
            Ok(Operation::copy(&o.file()?, o.offset, &to, o.offset_to, o.bytes))
        }),
        (&[File, Sender], |o, in_use| {
            let (file, sender) = (o.file()?, in_use.senders.detach(o.sender)?);
            let message_bytes = usize::try_from(o.message_bytes).unwrap_or(usize::MAX);
            Ok(Operation::send(&file, o.offset, o.bytes, &sender, message_bytes))
        }),
        (&[File, Receiver], |o, in_use| {
            let (file, receiver) = (o.file()?, in_use.receivers.detach(o.receiver)?);
            Ok(Operation::receive(&file, o.offset, o.bytes, &receiver))
        }),
    ]
};

/// `PELTON_FILE_OPEN`.
const OPEN: u32 = 1;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Read,
    Write,
}

impl COperation {
    pub fn is_linked(&self) -> bool {
        self.flags & LINKED != 0
    }

    pub fn opens(&self) -> bool {
        self.kind == OPEN
    }

    pub fn uses_memory_without_release(&self) -> bool {
        self.release.is_none() && self.uses(Uses::Memory)
    }

    pub fn uses_endpoint(&self) -> bool {
        self.uses(Uses::Sender) || self.uses(Uses::Receiver)
    }

    /// The files that it has, whether it uses them or not.
    pub fn files(&self) -> [Raw<File>; 2] {
        [self.file, self.to]
    }

    /// The file whose handle it closes.
    pub fn closes(&self) -> Option<Raw<File>> {
        self.uses(Uses::ClosedFile).then_some(self.file)
    }

    fn uses(&self, what: Uses) -> bool {
        self.row().is_ok_and(|(uses, _)| uses.contains(&what))
    }

    fn row(&self) -> Answer<&'static (&'static [Uses], Build)> {
        let row = self.kind.checked_sub(1).and_then(|index| OPERATIONS.get(index as usize));
        row.ok_or_else(|| wrong("kind", self.kind, "one of enum pelton_file_operation"))
    }

    fn path(&self) -> Answer<&Path> {
        self.path.path("operation.path")
    }

    fn path_to(&self) -> Answer<&Path> {
        self.path_to.path("operation.path_to")
    }

    fn file(&self) -> Answer<pelton::file::File> {
        self.file.share(|file| Ok(file.0.clone()))
    }

    /// Whether it can be built. After this, building it does not fail.
    pub fn check(&self, in_use: &InUse) -> Answer {
        let (uses, _) = self.row()?;
        if self.flags & !LINKED != 0 {
            return Err(wrong("flags", self.flags, "0 or PELTON_LINKED (1)"));
        }
        if !uses.contains(&Uses::Memory) && (self.memory_count > 0 || self.release.is_some()) {
            return Err(wrong("memory_count or release", "set", "0: only a read or a write uses them"));
        }
        for used in *uses {
            match used {
                Uses::Path => self.path().map(drop)?,
                Uses::PathTo => self.path_to().map(drop)?,
                Uses::File | Uses::ClosedFile => self.file.share(|_| Ok(()))?,
                Uses::FileOrPath if self.file.is_null() => self.path().map(drop)?,
                Uses::FileOrPath => self.file.share(|_| Ok(()))?,
                Uses::To => self.to.share(|_| Ok(()))?,
                Uses::Memory => self.check_memory()?,
                Uses::Sender => in_use.senders.check(self.sender)?,
                Uses::Receiver => in_use.receivers.check(self.receiver)?,
            }
        }
        Ok(())
    }

    /// The operation. The file that it closes is taken from its handle, and an endpoint is detached from it.
    pub fn build(&self, in_use: &mut InUse) -> Answer<Operation> {
        self.check(in_use)?;
        let (_, build) = self.row()?;
        build(self, in_use)
    }

    fn check_memory(&self) -> Answer {
        if self.memory.is_null() && self.memory_count > 0 {
            return Err(code::null("operation.memory"));
        }
        if self.offset == AT_END && self.row()?.1 as usize == OPERATIONS[2].1 as usize {
            return Err(wrong("offset", "PELTON_AT_END", "where to read from"));
        }
        let mut bytes = 0usize;
        for piece in self.pieces() {
            if piece.iov_base.is_null() && piece.iov_len > 0 {
                return Err(code::null("a piece of operation.memory"));
            }
            bytes = bytes.saturating_add(piece.iov_len);
        }
        if isize::try_from(bytes).is_err() {
            return Err(wrong("the size of the memory", bytes, "no more bytes than can exist"));
        }
        Ok(())
    }

    fn pieces(&self) -> &[libc::iovec] {
        match self.memory_count {
            0 => &[],
            // SAFETY: the C caller guarantees so many pieces; `check_memory` has refused NULL.
            count => unsafe { std::slice::from_raw_parts(self.memory, count) },
        }
    }

    /// A read or a write.
    fn transfer(&self, direction: Direction, in_use: &InUse) -> Answer<Operation> {
        let file = self.file()?;
        let (rest, last) = match self.pieces() {
            // A piece of no bytes releases too.
            [] => (&[][..], self.last_piece(&libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }, in_use)),
            [rest @ .., last] => (rest, self.last_piece(last, in_use)),
        };
        if rest.is_empty() {
            return Ok(match (self.offset, direction) {
                (CURRENT, Direction::Read) => Operation::read(&file, last),
                (CURRENT, Direction::Write) => Operation::write(&file, last),
                (AT_END, _) => Operation::append(&file, last),
                (offset, Direction::Read) => Operation::read_at(&file, last, offset),
                (offset, Direction::Write) => Operation::write_at(&file, last, offset),
            });
        }
        // SAFETY: the C caller guarantees the memory until it is released, which the last piece does for all.
        let piece = |piece: &libc::iovec| unsafe {
            Buffer::foreign(piece.iov_base.cast(), piece.iov_len, None, std::ptr::null_mut())
        };
        let buffers: Vec<Buffer> = rest.iter().map(piece).chain(std::iter::once(last)).collect();
        Ok(match (self.offset, direction) {
            (CURRENT | AT_END, _) => {
                Operation::vectored(&file, buffers, self.offset == AT_END, direction == Direction::Write)
            }
            (offset, Direction::Read) => Operation::read_vectored_at(&file, buffers, offset),
            (offset, Direction::Write) => Operation::write_vectored_at(&file, buffers, offset),
        })
    }

    /// The piece of memory that, when it is dropped, releases all of the operation's.
    fn last_piece(&self, piece: &libc::iovec, in_use: &InUse) -> Buffer {
        unsafe extern "C" fn count_down(count: *mut c_void) {
            // SAFETY: it is from `into_raw` below, and this is called once for it.
            let count = unsafe { Arc::from_raw(count.cast::<AtomicUsize>().cast_const()) };
            // Release: the thread that closes the engine may use the memory then.
            count.fetch_sub(1, Ordering::Release);
        }
        let (release, context) = match self.release {
            Some(_) => (self.release, self.context),
            None => {
                // Relaxed: only the engine's thread adds.
                in_use.memory.fetch_add(1, Ordering::Relaxed);
                (Some(count_down as _), Arc::into_raw(in_use.memory.clone()).cast_mut().cast())
            }
        };
        // SAFETY: the C caller guarantees the memory until it is released, and the function for that.
        unsafe { Buffer::foreign(piece.iov_base.cast(), piece.iov_len, release, context) }
    }
}

/// Nanoseconds since 1970; `None`: unchanged.
fn time(ns: i64) -> Option<SystemTime> {
    let since = Duration::from_nanos(ns.unsigned_abs());
    match ns {
        UNCHANGED => None,
        0.. => Some(SystemTime::UNIX_EPOCH + since),
        _ => Some(SystemTime::UNIX_EPOCH - since),
    }
}

/// What operations use that is the caller's.
#[derive(Default)]
pub struct InUse {
    /// Operations that use memory without a release function.
    memory: Arc<AtomicUsize>,
    senders: Endpoints<Sender>,
    receivers: Endpoints<Receiver>,
}

impl InUse {
    /// Puts endpoints back that no operation uses any more.
    pub fn give_back_unused(&mut self) {
        self.senders.give_back_unused();
        self.receivers.give_back_unused();
    }

    pub fn is_empty(&self) -> bool {
        // Acquire: what used the memory has finished with it.
        self.memory.load(Ordering::Acquire) == 0 && self.senders.0.is_empty() && self.receivers.0.is_empty()
    }
}

/// An endpoint of a channel, as operations use it.
trait Endpoint: Object {
    type Inner;

    /// Whether nothing is reserved, or received.
    fn check_unused(&mut self) -> Answer;
    fn into_inner(self) -> Self::Inner;
    fn from_inner(inner: Self::Inner) -> Self;
}

impl Endpoint for Sender {
    type Inner = pelton::Sender;

    fn check_unused(&mut self) -> Answer {
        self.unreserved().map(drop)
    }

    fn into_inner(self) -> pelton::Sender {
        self.into_channel()
    }

    fn from_inner(inner: pelton::Sender) -> Sender {
        Sender::new(inner)
    }
}

impl Endpoint for Receiver {
    type Inner = pelton::Receiver;

    fn check_unused(&mut self) -> Answer {
        self.released().map(drop)
    }

    fn into_inner(self) -> pelton::Receiver {
        self.into_channel()
    }

    fn from_inner(inner: pelton::Receiver) -> Receiver {
        Receiver::new(inner)
    }
}

/// Endpoints that operations use, with the handles that they are detached from.
struct Endpoints<T: Endpoint>(Vec<(Raw<T>, SharedEndpoint<T>)>);

type SharedEndpoint<T> = Arc<Mutex<<T as Endpoint>::Inner>>;

impl<T: Endpoint> Default for Endpoints<T> {
    fn default() -> Endpoints<T> {
        Endpoints(Vec::new())
    }
}

impl<T: Endpoint> Endpoints<T> {
    fn find(&self, handle: Raw<T>) -> Option<&SharedEndpoint<T>> {
        self.0.iter().find(|(detached, _)| *detached == handle).map(|(_, endpoint)| endpoint)
    }

    /// Whether an operation can use it. It can if others of this engine do: linked ones before it, or it gets EBUSY.
    fn check(&self, handle: Raw<T>) -> Answer {
        if self.find(handle).is_some() { Ok(()) } else { handle.enter(T::check_unused) }
    }

    fn detach(&mut self, handle: Raw<T>) -> Answer<SharedEndpoint<T>> {
        if let Some(endpoint) = self.find(handle) {
            return Ok(endpoint.clone());
        }
        let endpoint = Arc::new(Mutex::new(handle.detach(T::check_unused)?.into_inner()));
        self.0.push((handle, endpoint.clone()));
        Ok(endpoint)
    }

    fn give_back_unused(&mut self) {
        let unused = self.0.extract_if(.., |(_, endpoint)| Arc::strong_count(endpoint) == 1);
        for (handle, endpoint) in unused {
            let endpoint = Arc::into_inner(endpoint).expect("no operation has it");
            let endpoint = T::from_inner(endpoint.into_inner().unwrap_or_else(PoisonError::into_inner));
            // SAFETY: `detach` has detached it, and the caller does not use it otherwise while operations do.
            unsafe { handle.reattach(endpoint) };
        }
    }
}
