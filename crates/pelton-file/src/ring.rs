//! Operations on files by io_uring. The ring owns each operation from when it is pushed until it is given back: its paths, its memory and its share
//! of the file stay where they are while the kernel may use them, whatever becomes of the ring.

use crate::faults::Fault;
use crate::file::{File, Root};
use crate::operation::{Output, Pieces, Place, Stat, Transfer, Work};
use crate::perform::{STATX, rest_of};
use io_uring::{IoUring, Probe, opcode, squeue, types};
use pelton_lane::failpoint;
use pelton_os::fork::{self, Owner};
use rustix::fs::{AtFlags, CWD, Statx};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::ffi::CString;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::Arc;

/// More that begin at a time take more than one system call.
const ENTRIES_MAX: u32 = 256;
/// As much as one operation moves; what is larger goes on after it. A multiple of any block.
const BYTES_MAX: usize = 1 << 30;
/// A read or a write larger than this is left to the kernel's threads from the start: otherwise it would be copied in the call that begins it,
/// if the page cache has it.
const COPIED_MAX: usize = crate::file::INLINE_BYTES_MAX;
/// With another's key: the cancelling of that.
const CANCEL: u64 = 1 << 32;
/// Names what nobody wants to hear of.
const NOTHING: u64 = u64::MAX;

pub(crate) struct Ring {
    /// Taken away only by `drop`.
    ring: ManuallyDrop<IoUring>,
    owner: Owner,
    probe: Probe,
    root: Option<Arc<Root>>,
    /// By key.
    works: Vec<Option<Held>>,
    /// Keys of those that no entry was made for yet.
    waiting: VecDeque<u32>,
    /// Keys of those that have begun, and are to be told to stop.
    cancels: VecDeque<u32>,
    /// Entries made, whose end has not come.
    in_flight: usize,
    /// What the entries say of themselves that the kernel has not taken, in order.
    queued: VecDeque<u64>,
    /// Whether the system refuses from now on to take any, as a filter does that came later. Then it is never asked again.
    is_refused: bool,
}

/// An operation, and what its entry points to besides.
struct Held {
    work: Work,
    extra: Option<Box<Extra>>,
    is_begun: bool,
    is_cancelled: bool,
    /// What it is to end by instead of being done: for tests.
    fault: Option<Errno>,
}

/// Boxed, so that it stays where it is.
struct Extra {
    paths: [CString; 2],
    found: Option<Statx>,
    pieces: Vec<Piece>,
}

/// As `struct iovec`, which is not `Send`.
#[repr(transparent)]
struct Piece(libc::iovec);

// SAFETY: it points into the buffers of the operation beside it, which are `Send`, and only the kernel follows it.
unsafe impl Send for Piece {}

impl Ring {
    /// A ring for so many operations at a time; an error where the system refuses it.
    pub(crate) fn new(operations: usize, root: Option<Arc<Root>>) -> std::io::Result<Ring> {
        let owner = Owner::current()?;
        let entries = u32::try_from(operations).unwrap_or(u32::MAX).clamp(1, ENTRIES_MAX).next_power_of_two();
        let ends = u32::try_from(2 * operations).unwrap_or(u32::MAX).clamp(2 * entries, 1 << 15).next_power_of_two();
        let ring = fork::opening(|| IoUring::builder().dontfork().setup_clamp().setup_cqsize(ends).build(entries))?;
        let mut ring = Ring {
            ring: ManuallyDrop::new(ring),
            owner,
            probe: Probe::new(),
            root,
            works: Vec::new(),
            waiting: VecDeque::new(),
            cancels: VecDeque::new(),
            in_flight: 0,
            queued: VecDeque::new(),
            is_refused: false,
        };
        ring.ring.submitter().register_probe(&mut ring.probe)?;
        // A filter may let a ring be made, and not used.
        let nothing = opcode::Nop::new().build().user_data(NOTHING);
        // SAFETY: the entry names no memory and no descriptor.
        unsafe { ring.ring.submission().push(&nothing) }.map_err(std::io::Error::other)?;
        ring.enter(1)?;
        if ring.is_refused {
            return Err(Errno::PERM.into());
        }
        ring.ring.completion().next();
        Ok(ring)
    }

    /// Whether it does such operations.
    pub(crate) fn supports(&self, work: &Work) -> bool {
        if self.is_refused || matches!(work, Work::Transfer(transfer) if !transfer.is_for_ring()) {
            return false;
        }
        // Below a root a name is looked up in two steps, which threads do. They open files, too: the kernel would have the call that begins it wait for
        // a file server, and not wait for the other end of a FIFO; or have one of its few threads wait for that.
        let code = match work {
            Work::Transfer(Transfer { memory: Pieces::One(_), writes: false, .. }) => opcode::Read::CODE,
            Work::Transfer(Transfer { memory: Pieces::One(_), writes: true, .. }) => opcode::Write::CODE,
            Work::Transfer(Transfer { memory: Pieces::Many(_), writes: false, .. }) => opcode::Readv::CODE,
            Work::Transfer(Transfer { memory: Pieces::Many(_), writes: true, .. }) => opcode::Writev::CODE,
            Work::Sync { .. } => opcode::Fsync::CODE,
            Work::Truncate { .. } => opcode::Ftruncate::CODE,
            Work::Allocate { .. } => opcode::Fallocate::CODE,
            Work::StatFile(_) => opcode::Statx::CODE,
            Work::Stat { .. } if self.root.is_none() => opcode::Statx::CODE,
            Work::Unlink { .. } if self.root.is_none() => opcode::UnlinkAt::CODE,
            Work::Rename { .. } if self.root.is_none() => opcode::RenameAt::CODE,
            Work::Link { .. } if self.root.is_none() => opcode::LinkAt::CODE,
            Work::Symlink { .. } if self.root.is_none() => opcode::SymlinkAt::CODE,
            Work::MakeDirectory { .. } if self.root.is_none() => opcode::MkDirAt::CODE,
            _ => return false,
        };
        self.probe.is_supported(code) && !work.has_nul()
    }

    /// Notes an operation that [`Ring::supports`] says yes to, under a key that none has; [`Ring::start`] begins it.
    pub(crate) fn push(&mut self, key: u32, work: Work) {
        let index = key as usize;
        if self.works.len() <= index {
            self.works.resize_with(index + 1, || None);
        }
        debug_assert!(self.works[index].is_none(), "one operation for each key");
        self.works[index] = Some(Held { work, extra: None, is_begun: false, is_cancelled: false, fault: None });
        self.waiting.push_back(key);
    }

    /// Whether it takes nothing any more: see [`Ring::take_back`].
    pub(crate) fn is_refused(&self) -> bool {
        self.is_refused
    }

    /// Of a ring that the system refuses by now to begin anything by: what the kernel has not taken. What it has taken ends in its own time, and cannot be
    /// cancelled.
    pub(crate) fn take_back(&mut self) -> Vec<(u32, Work)> {
        if !self.is_refused {
            return Vec::new();
        }
        self.cancels.clear();
        // The entries stay in the queue, which nobody reads any more.
        let queued: Vec<u32> =
            self.queued.drain(..).filter(|entry| entry & CANCEL == 0).map(|key| key as u32).collect();
        self.in_flight -= queued.len();
        let keys = queued.into_iter().chain(self.waiting.drain(..));
        keys.filter_map(|key| Some((key, self.works[key as usize].take()?.work))).collect()
    }

    /// Begins what was pushed: one system call for up to 256 operations.
    pub(crate) fn start(&mut self) -> std::io::Result<()> {
        if self.is_refused {
            return Ok(());
        }
        self.fill()?;
        let has_none = self.ring.submission().is_empty();
        if has_none { Ok(()) } else { self.enter(0) }
    }

    /// Begins what was pushed, and waits until something ends; with one system call, if it has as many entries.
    pub fn wait(&mut self) -> std::io::Result<()> {
        self.fill()?;
        self.enter(1)
    }

    /// Makes entries of what was pushed, and of what is to be told to stop, whose own entries are made already.
    fn fill(&mut self) -> std::io::Result<()> {
        while let Some(&key) = self.cancels.front() {
            let data = CANCEL | u64::from(key);
            let entry = opcode::AsyncCancel::new(key.into()).build().user_data(data);
            // SAFETY: the entry names no memory and no descriptor.
            if unsafe { self.ring.submission().push(&entry) }.is_err() {
                self.enter(0)?;
                if self.is_refused || self.ring.submission().is_full() {
                    return Ok(());
                }
                continue;
            }
            self.queued.push_back(data);
            self.cancels.pop_front();
        }
        while let Some(&key) = self.waiting.front() {
            let held = self.works[key as usize].as_mut().expect("what waits is there");
            let entry = held.entry(self.root.as_deref()).user_data(key.into());
            // SAFETY: what the entry points to is in `held` or owned by it, does not move, and is given up only when its end has
            // come: in `ended`, also for what is left when the ring is dropped.
            if unsafe { self.ring.submission().push(&entry) }.is_err() {
                self.enter(0)?;
                if self.is_refused || self.ring.submission().is_full() {
                    // The kernel takes no more for now; who takes what has ended begins the rest.
                    return Ok(());
                }
                continue;
            }
            held.is_begun = true;
            self.in_flight += 1;
            self.queued.push_back(key.into());
            self.waiting.pop_front();
        }
        Ok(())
    }

    /// Has the kernel take what is in the queue, and waits for so many ends. It stops at an entry that it refuses, with which it does not wait either:
    /// what is behind that is for the next call.
    fn enter(&mut self, wanted: usize) -> std::io::Result<()> {
        if self.is_refused {
            return Ok(());
        }
        loop {
            failpoint("ring: enters");
            let before = self.ring.submission().len();
            let entered = self.ring.submit_and_wait(wanted);
            let left = self.ring.submission().len();
            self.queued.drain(..self.queued.len().saturating_sub(left));
            match entered.map_err(|error| (error.raw_os_error(), error)) {
                Ok(_) if left == 0 || left == before => return Ok(()),
                Ok(_) | Err((Some(libc::EINTR), _)) => {}
                // No memory, or no room for ends. Who waits does not wait here: what has ended is to be taken first.
                Err((Some(libc::EAGAIN | libc::EBUSY), _)) => return Ok(()),
                Err((Some(libc::ENOMEM), error)) => return Err(error),
                Err(_) => {
                    self.is_refused = true;
                    return Ok(());
                }
            }
        }
    }

    /// An operation that has ended, and what came of it. No output: it has moved some bytes, and is not at its end.
    pub(crate) fn ended(&mut self) -> Option<(u32, Work, Result<Option<Output>, Errno>)> {
        loop {
            let Some(end) = self.ring.completion().next() else {
                // Ends that had no room come with the next call.
                let has_more = self.ring.submission().cq_overflow();
                if has_more && self.enter(0).is_ok() && !self.ring.completion().is_empty() {
                    continue;
                }
                return None;
            };
            if end.user_data() == NOTHING {
                continue;
            }
            let key = end.user_data() as u32;
            if end.user_data() & CANCEL != 0 {
                // It was just between trying and waiting, where it is not found, or not to be stopped. What may wait for ever is told again; whatever else
                // there is ends by itself.
                let is_missed = [-libc::EALREADY, -libc::ENOENT].contains(&end.result());
                let is_left = |held: &Held| held.is_begun && held.is_cancelled && held.may_wait_for_ever();
                if is_missed && !self.is_refused && self.works[key as usize].as_ref().is_some_and(is_left) {
                    self.cancels.push_back(key);
                }
                continue;
            }
            let Held { mut work, extra, fault, .. } = self.works[key as usize].take().expect("what ends was begun");
            self.in_flight -= 1;
            let result = match fault.map_or(end.result(), |errno| -errno.raw_os_error()) {
                error @ ..0 => Err(Errno::from_raw_os_error(-error)),
                went => judge(&mut work, extra, went),
            };
            return Some((key, work, result));
        }
    }

    /// Gives an operation up. It is given back here if it had not begun; else [`Ring::start`] says so to the kernel, and it ends in its own time.
    pub(crate) fn cancel(&mut self, key: u32) -> Option<Work> {
        let held = self.works.get_mut(key as usize)?;
        if held.as_ref().is_some_and(|held| !held.is_begun) {
            self.waiting.retain(|waiting| *waiting != key);
            return held.take().map(|held| held.work);
        }
        held.as_mut()?.is_cancelled = true;
        if !self.is_refused {
            self.cancels.push_back(key);
        }
        None
    }

    /// What the kernel has not taken yet.
    pub(crate) fn unbegun(&self) -> usize {
        self.waiting.len() + self.cancels.len() + self.queued.len()
    }

    /// Whether it has nothing to do.
    pub(crate) fn is_empty(&self) -> bool {
        self.in_flight == 0 && self.waiting.is_empty()
    }
}

/// What a number that is no error says of an operation.
fn judge(work: &mut Work, extra: Option<Box<Extra>>, went: i32) -> Result<Option<Output>, Errno> {
    match work {
        Work::Transfer(transfer) => Ok(transfer.went(went as usize)),
        _ => Ok(Some(match extra.and_then(|extra| extra.found) {
            Some(found) => Output::Stat(Box::new(Stat::of(&found))),
            None => Output::Done,
        })),
    }
}

impl Held {
    fn may_wait_for_ever(&self) -> bool {
        matches!(&self.work, Work::Transfer(transfer) if transfer.file.is_stream())
    }

    /// The entry that asks for it, or for the rest of it.
    fn entry(&mut self, root: Option<&Root>) -> squeue::Entry {
        let file = |file: &File| types::Fd(file.as_fd().as_raw_fd());
        let at = types::Fd(root.map_or(CWD, Root::as_fd).as_raw_fd());
        let extra = Extra::of(&self.work).map(|extra| &mut **self.extra.insert(extra));
        let path = |extra: &Extra, which: usize| extra.paths[which].as_ptr();
        let (fault, most) = match Fault::next() {
            Some(Fault::Error(errno)) => (Some(errno), 0),
            Some(Fault::Short(bytes)) => (None, bytes),
            None => (None, BYTES_MAX),
        };
        self.fault = fault;
        if fault.is_some() {
            return opcode::Nop::new().build();
        }
        match (&mut self.work, extra) {
            (Work::Transfer(transfer), extra) => transfer_entry(transfer, extra, most),
            (Work::Sync { file: synced, data_only }, _) => {
                let flags = if *data_only { types::FsyncFlags::DATASYNC } else { types::FsyncFlags::empty() };
                opcode::Fsync::new(file(synced)).flags(flags).build()
            }
            (Work::Truncate { file: cut, bytes }, _) => opcode::Ftruncate::new(file(cut), *bytes).build(),
            (Work::Allocate { file: longer, offset, bytes }, _) => {
                opcode::Fallocate::new(file(longer), *bytes).offset(*offset).build()
            }
            (Work::Stat { follows, .. }, Some(extra)) => {
                let flags = if *follows { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
                extra.stat(at, flags)
            }
            (Work::StatFile(asked), Some(extra)) => extra.stat(file(asked), AtFlags::EMPTY_PATH),
            (Work::Unlink { directory, .. }, Some(extra)) => {
                let flags = if *directory { libc::AT_REMOVEDIR } else { 0 };
                opcode::UnlinkAt::new(at, path(extra, 0)).flags(flags).build()
            }
            (Work::Rename { .. }, Some(extra)) => opcode::RenameAt::new(at, path(extra, 0), at, path(extra, 1)).build(),
            (Work::Link { .. }, Some(extra)) => opcode::LinkAt::new(at, path(extra, 0), at, path(extra, 1)).build(),
            (Work::Symlink { .. }, Some(extra)) => opcode::SymlinkAt::new(at, path(extra, 0), path(extra, 1)).build(),
            (Work::MakeDirectory { mode, .. }, Some(extra)) => {
                opcode::MkDirAt::new(at, path(extra, 0)).mode(*mode).build()
            }
            (work, _) => unreachable!("{work:?} is not for the ring"),
        }
    }
}

fn transfer_entry(transfer: &mut Transfer, extra: Option<&mut Extra>, most: usize) -> squeue::Entry {
    let fd = types::Fd(transfer.file.as_fd().as_raw_fd());
    let (offset, done, left) = (transfer.offset(), transfer.done, transfer.bytes() - transfer.done);
    let flags = if matches!(transfer.place, Place::End) { libc::RWF_APPEND } else { 0 };
    let bytes = left.min(most) as u32;
    let entry = match (&mut transfer.memory, extra, transfer.writes) {
        (Pieces::One(buffer), _, false) => {
            opcode::Read::new(fd, buffer[done..].as_mut_ptr(), bytes).offset(offset).rw_flags(flags).build()
        }
        (Pieces::One(buffer), _, true) => {
            opcode::Write::new(fd, buffer[done..].as_ptr(), bytes).offset(offset).rw_flags(flags).build()
        }
        (Pieces::Many(_), Some(extra), writes) => {
            let count = if most < BYTES_MAX { extra.pieces.len().min(1) } else { extra.pieces.len() } as u32;
            let pieces = extra.pieces.as_ptr().cast::<libc::iovec>();
            match writes {
                false => opcode::Readv::new(fd, pieces, count).offset(offset).rw_flags(flags).build(),
                true => opcode::Writev::new(fd, pieces, count).offset(offset).rw_flags(flags).build(),
            }
        }
        (Pieces::Many(_), None, _) => unreachable!("several pieces have a list"),
    };
    // Not of a stream: whoever waits for one in the kernel's threads may not be found there by a cancel.
    match (left > COPIED_MAX || transfer.is_apart) && !transfer.file.is_direct() && !transfer.file.is_stream() {
        true => entry.flags(squeue::Flags::ASYNC),
        false => entry,
    }
}

impl Extra {
    /// What the kernel is to be pointed to, if an operation has any such thing.
    fn of(work: &Work) -> Option<Box<Extra>> {
        let c_path = |path: Option<&Path>| {
            let bytes = path.map_or(&b""[..], |path| path.as_os_str().as_bytes());
            CString::new(bytes).expect("`supports` has refused what has a zero in it")
        };
        let mut extra = Extra { paths: work.paths().map(c_path), found: None, pieces: Vec::new() };
        match work {
            Work::Transfer(Transfer { memory: Pieces::Many(buffers), done, .. }) => {
                // The kernel writes through these to memory that `work` owns, and that nobody else has.
                let piece = |bytes: &[u8]| {
                    Piece(libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() })
                };
                extra.pieces.extend(rest_of(buffers, *done).map(piece));
            }
            Work::Stat { .. } | Work::StatFile(_) => {
                // SAFETY: it is made of integers.
                extra.found = Some(unsafe { std::mem::zeroed() });
            }
            Work::Unlink { .. }
            | Work::Rename { .. }
            | Work::Link { .. }
            | Work::Symlink { .. }
            | Work::MakeDirectory { .. } => {}
            _ => return None,
        }
        Some(Box::new(extra))
    }

    fn stat(&mut self, at: types::Fd, flags: AtFlags) -> squeue::Entry {
        let found: *mut Statx = self.found.as_mut().expect("made for this");
        opcode::Statx::new(at, self.paths[0].as_ptr(), found.cast())
            .flags(flags.bits() as i32)
            .mask(STATX.bits())
            .build()
    }
}

impl AsFd for Ring {
    /// Readable while something has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: it is open as long as the ring is.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

impl Drop for Ring {
    /// Does not wait. What has begun is cancelled, and a thread keeps all that belongs to it until the kernel is done.
    fn drop(&mut self) {
        // SAFETY: taken once, here.
        let ring = unsafe { ManuallyDrop::take(&mut self.ring) };
        if !self.owner.is_current() {
            // A child has neither the descriptor nor the mapping: where that was, there may be something else. Nor is the memory of what was in flight its.
            std::mem::forget((ring, std::mem::take(&mut self.works)));
            return;
        }
        if self.in_flight == 0 {
            return fork::close(ring);
        }
        let mut works = std::mem::take(&mut self.works);
        works.iter_mut().filter(|held| held.as_ref().is_some_and(|held| !held.is_begun)).for_each(|held| *held = None);
        let mut left = Ring {
            ring: ManuallyDrop::new(ring),
            owner: self.owner,
            probe: Probe::new(),
            root: self.root.take(),
            works,
            waiting: VecDeque::new(),
            cancels: VecDeque::new(),
            in_flight: self.in_flight,
            queued: std::mem::take(&mut self.queued),
            is_refused: self.is_refused,
        };
        let begun: Vec<u32> = (0..).zip(&left.works).filter(|(_, held)| held.is_some()).map(|(key, _)| key).collect();
        for key in begun {
            left.cancel(key);
        }
        let _ = left.start();
        drop(left.take_back());
        // Where no thread can be had, it is all kept for good.
        let left = ManuallyDrop::new(left);
        let _ = std::thread::Builder::new().name("pelton-file-end".to_owned()).spawn(move || {
            pelton_os::block_signals();
            let mut left = ManuallyDrop::into_inner(left);
            while left.in_flight > 0 {
                if left.ended().is_some() {
                    continue;
                }
                match left.wait() {
                    // There is no memory for now.
                    Ok(()) if left.unbegun() > 0 => std::thread::yield_now(),
                    Ok(()) if !left.is_refused => {}
                    // Nothing is asked of it any more, but it says what ends.
                    Ok(())
                        if !left.ring.submission().cq_overflow()
                            && pelton_os::poll_until(&[left.as_fd()], [None, None], None).is_ok() => {}
                    _ => return std::mem::forget(left),
                }
            }
        });
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("in_flight", &self.in_flight).finish_non_exhaustive()
    }
}
