//! Operations on files by io_uring. The ring owns each operation from the push until it returns it. Its paths, its
//! memory and its handle of the file stay in place while the kernel may use them, whatever becomes of the ring.

use crate::faults::Fault;
use crate::file::Root;
use crate::operation::{OnFile, OnPath, Output, Stat, Work};
use crate::perform::STATX;
use crate::transfer::{Pieces, Position, Transfer, rest_of};
use io_uring::{IoUring, Probe, opcode, squeue, types};
use pelton_lane::failpoint;
use pelton_os::LOG_TARGET;
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

/// More operations at once need more than one system call.
const ENTRIES_MAX: u32 = 256;
/// The most bytes of one entry; a larger operation continues after it. A multiple of any block size.
const BYTES_MAX: usize = 1 << 30;
/// A larger read or write goes to the kernel's threads from the start: otherwise the call that begins it would copy the
/// bytes if the page cache has them.
const COPIED_MAX: usize = crate::file::INLINE_BYTES_MAX;
/// With the key of an operation: the cancel of that.
const CANCEL: u64 = 1 << 32;
/// The user data of an entry whose end is ignored.
const IGNORED: u64 = u64::MAX;

pub(crate) struct Ring {
    /// Taken only by `drop`.
    ring: ManuallyDrop<IoUring>,
    owner: Owner,
    probe: Probe,
    root: Option<Arc<Root>>,
    /// By key.
    works: Vec<Option<Held>>,
    /// Keys of operations without an entry yet.
    waiting: VecDeque<u32>,
    /// Keys of begun operations to cancel.
    cancels: VecDeque<u32>,
    /// Entries whose end has not come.
    in_flight: usize,
    /// The user data of entries that the kernel has not taken, in order.
    queued: VecDeque<u64>,
    /// Whether the system refuses further entries, as a later seccomp filter does. Then the ring never tries again.
    is_refused: bool,
}

/// An operation, and what else its entry points to.
struct Held {
    work: Work,
    extra: Option<Box<Extra>>,
    is_begun: bool,
    is_cancelled: bool,
    /// The injected error, for tests.
    fault: Option<Errno>,
}

/// Boxed, so that its address stays the same.
struct Extra {
    paths: [CString; 2],
    found: Statx,
    pieces: Vec<Piece>,
}

/// A `struct iovec`, which is not `Send`.
#[repr(transparent)]
struct Piece(libc::iovec);

// SAFETY: it points into the buffers of the operation in the same `Held`, which are `Send`, and only the kernel
// dereferences it.
unsafe impl Send for Piece {}

impl Ring {
    /// A ring for so many concurrent operations; an error if the system refuses it.
    pub(crate) fn new(operations: usize, root: Option<Arc<Root>>) -> std::io::Result<Ring> {
        let owner = Owner::current()?;
        let entries = u32::try_from(operations).unwrap_or(u32::MAX).clamp(1, ENTRIES_MAX).next_power_of_two();
        let completion_entries =
            u32::try_from(2 * operations).unwrap_or(u32::MAX).clamp(2 * entries, 1 << 15).next_power_of_two();
        let ring = fork::opening(|| {
            IoUring::builder().dontfork().setup_clamp().setup_cqsize(completion_entries).build(entries)
        })?;
        let mut ring = Ring::without_operations(ring, owner, root);
        ring.ring.submitter().register_probe(&mut ring.probe)?;
        // A seccomp filter may permit creating a ring but not using it.
        let nothing = opcode::Nop::new().build().user_data(IGNORED);
        // SAFETY: the entry names no memory and no descriptor.
        unsafe { ring.ring.submission().push(&nothing) }.map_err(std::io::Error::other)?;
        ring.enter(1)?;
        if ring.is_refused {
            return Err(Errno::PERM.into());
        }
        ring.ring.completion().next();
        Ok(ring)
    }

    fn without_operations(ring: IoUring, owner: Owner, root: Option<Arc<Root>>) -> Ring {
        Ring {
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
        }
    }

    /// Whether it supports this operation.
    pub(crate) fn supports(&self, work: &Work) -> bool {
        let is_suitable = match work {
            // A thread writes to streams, since it raises no signal. A thread also gets a stream with an offset, since
            // only system calls refuse that.
            Work::Transfer(Transfer { file, writes, position, .. }) => {
                !file.is_stream() || (!writes && matches!(position, Position::Current))
            }
            // Below a root, threads resolve a name in two steps. No system call accepts a zero byte in a path.
            Work::OnPath(..) => {
                let has_nul = |path: &Path| path.as_os_str().as_bytes().contains(&0);
                self.root.is_none() && !work.paths().into_iter().flatten().any(has_nul)
            }
            _ => true,
        };
        is_suitable && !self.is_refused && work.action().code.is_some_and(|code| self.probe.is_supported(code))
    }

    /// Adds an operation that [`Ring::supports`] accepts, under an unused key; [`Ring::start`] begins it.
    pub(crate) fn push(&mut self, key: u32, work: Work) {
        let index = key as usize;
        if self.works.len() <= index {
            self.works.resize_with(index + 1, || None);
        }
        debug_assert!(self.works[index].is_none(), "one operation for each key");
        self.works[index] = Some(Held { work, extra: None, is_begun: false, is_cancelled: false, fault: None });
        self.waiting.push_back(key);
    }

    /// Whether the system refuses further entries: see [`Ring::take_back`].
    pub(crate) fn is_refused(&self) -> bool {
        self.is_refused
    }

    /// After a refusal, returns the operations that the kernel has not taken. Those that it has taken end in their own
    /// time, and cannot be cancelled.
    pub(crate) fn take_back(&mut self) -> Vec<(u32, Work)> {
        if !self.is_refused {
            return Vec::new();
        }
        self.cancels.clear();
        // The entries stay in the submission queue, which the kernel reads no more.
        let queued: Vec<u32> =
            self.queued.drain(..).filter(|entry| entry & CANCEL == 0).map(|key| key as u32).collect();
        self.in_flight -= queued.len();
        let keys = queued.into_iter().chain(self.waiting.drain(..));
        keys.filter_map(|key| Some((key, self.works[key as usize].take()?.work))).collect()
    }

    /// Begins the pushed operations: one system call for up to 256.
    pub(crate) fn start(&mut self) -> std::io::Result<()> {
        if self.is_refused {
            return Ok(());
        }
        self.fill()?;
        let has_none = self.ring.submission().is_empty();
        if has_none { Ok(()) } else { self.enter(0) }
    }

    /// Begins the pushed operations, and waits until one ends: with one system call, if the entries suffice.
    pub fn wait(&mut self) -> std::io::Result<()> {
        self.fill()?;
        self.enter(1)
    }

    /// Creates entries for pushed operations, and for cancels of operations that have one, as long as the kernel
    /// accepts more. A caller that takes ended operations begins the rest.
    fn fill(&mut self) -> std::io::Result<()> {
        while let Some(&key) = self.cancels.front() {
            let data = CANCEL | u64::from(key);
            // SAFETY: the entry names no memory and no descriptor.
            if !unsafe { self.add(opcode::AsyncCancel::new(key.into()).build().user_data(data)) }? {
                return Ok(());
            }
            self.cancels.pop_front();
        }
        while let Some(&key) = self.waiting.front() {
            let held = self.works[key as usize].as_mut().expect("it waits for an entry");
            let entry = held.entry(self.root.as_deref()).user_data(key.into());
            // SAFETY: the entry points only into `held` and memory that it owns. The ring neither moves nor frees that
            // before `ended` has taken the operation's end, also for operations in flight when the ring is dropped.
            if !unsafe { self.add(entry) }? {
                return Ok(());
            }
            self.works[key as usize].as_mut().expect("it has an entry").is_begun = true;
            self.in_flight += 1;
            self.waiting.pop_front();
        }
        Ok(())
    }

    /// Adds an entry to the queue. False: the kernel accepts no more at the moment.
    ///
    /// # Safety
    /// What the entry points to stays until its end has come.
    unsafe fn add(&mut self, entry: squeue::Entry) -> std::io::Result<bool> {
        // SAFETY: guaranteed by the caller.
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.enter(0)?;
            if self.is_refused || self.ring.submission().is_full() {
                return Ok(false);
            }
        }
        self.queued.push_back(entry.get_user_data());
        Ok(true)
    }

    /// Submits the queue to the kernel, and waits for so many ends. The kernel stops at an entry that it refuses, and
    /// does not wait then: the next call submits the entries behind it.
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
                // No memory, or no free space for ends. The caller must take ended operations before it waits.
                Err((Some(libc::EAGAIN | libc::EBUSY), _)) => return Ok(()),
                Err((Some(libc::ENOMEM), error)) => return Err(error),
                Err((_, error)) => {
                    log::warn!(
                        target: LOG_TARGET,
                        "io_uring is refused from now on ({error}): threads perform all further operations on files, which is slower"
                    );
                    self.is_refused = true;
                    return Ok(());
                }
            }
        }
    }

    /// An operation that has ended, and its result. `None` as output: it has moved some bytes, and is incomplete.
    pub(crate) fn ended(&mut self) -> Option<(u32, Work, Result<Option<Output>, Errno>)> {
        loop {
            let Some(end) = self.ring.completion().next() else {
                // Ends that overflowed come with the next call.
                let has_more = self.ring.submission().cq_overflow();
                if has_more && self.enter(0).is_ok() && !self.ring.completion().is_empty() {
                    continue;
                }
                return None;
            };
            if end.user_data() == IGNORED {
                continue;
            }
            let key = end.user_data() as u32;
            if end.user_data() & CANCEL != 0 {
                // The operation was just between an attempt and a wait, where the kernel does not find it, or cannot
                // stop it. Only an operation that may wait for ever needs another cancel; others end by themselves.
                let is_missed = [-libc::EALREADY, -libc::ENOENT].contains(&end.result());
                let may_wait_for_ever =
                    |work: &Work| matches!(work, Work::Transfer(transfer) if transfer.file.is_stream());
                let needs_another_cancel =
                    |held: &Held| held.is_begun && held.is_cancelled && may_wait_for_ever(&held.work);
                if is_missed && !self.is_refused && self.works[key as usize].as_ref().is_some_and(needs_another_cancel)
                {
                    self.cancels.push_back(key);
                }
                continue;
            }
            let Held { mut work, extra, fault, .. } =
                self.works[key as usize].take().expect("only a begun operation ends");
            self.in_flight -= 1;
            let result = match fault.map_or(end.result(), |errno| -errno.raw_os_error()) {
                error @ ..0 => Err(Errno::from_raw_os_error(-error)),
                result => Ok(match (&mut work, extra) {
                    (Work::Transfer(transfer), _) => transfer.advance(result as usize).map(Output::Count),
                    (Work::OnFile(_, OnFile::Stat) | Work::OnPath(_, OnPath::Stat { .. }), Some(extra)) => {
                        Some(Output::Stat(Box::new(Stat::of(&extra.found))))
                    }
                    _ => Some(Output::Done),
                }),
            };
            return Some((key, work, result));
        }
    }

    /// Cancels an operation. Returns it if it had not begun; otherwise [`Ring::start`] submits the cancel, and the
    /// operation ends in its own time.
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

    /// The number of entries and operations that the kernel has not taken.
    pub(crate) fn unbegun(&self) -> usize {
        self.waiting.len() + self.cancels.len() + self.queued.len()
    }

    /// Whether it has no operation.
    pub(crate) fn is_empty(&self) -> bool {
        self.in_flight == 0 && self.waiting.is_empty()
    }
}

impl Held {
    /// The entry for the operation, or for the rest of it.
    fn entry(&mut self, root: Option<&Root>) -> squeue::Entry {
        let at = types::Fd(root.map_or(CWD, Root::as_fd).as_raw_fd());
        let extra = Extra::of(&self.work).map(|extra| &mut **self.extra.insert(extra));
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
            (Work::OnFile(on, what), extra) => {
                let fd = types::Fd(on.as_fd().as_raw_fd());
                match (what, extra) {
                    (OnFile::Sync { data_only: true }, _) => {
                        opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build()
                    }
                    (OnFile::Sync { data_only: false }, _) => opcode::Fsync::new(fd).build(),
                    (OnFile::Truncate { bytes }, _) => opcode::Ftruncate::new(fd, *bytes).build(),
                    (OnFile::Allocate { offset, bytes }, _) => {
                        opcode::Fallocate::new(fd, *bytes).offset(*offset).build()
                    }
                    (OnFile::Stat, Some(extra)) => extra.stat(fd, AtFlags::EMPTY_PATH),
                    _ => unreachable!("an operation on a file that is unsupported"),
                }
            }
            (Work::OnPath(_, what), Some(extra)) => {
                let [first, second] = [0, 1].map(|which: usize| extra.paths[which].as_ptr());
                match what {
                    OnPath::Stat { follows: true } => extra.stat(at, AtFlags::empty()),
                    OnPath::Stat { follows: false } => extra.stat(at, AtFlags::SYMLINK_NOFOLLOW),
                    OnPath::Unlink { directory } => {
                        let flags = if *directory { libc::AT_REMOVEDIR } else { 0 };
                        opcode::UnlinkAt::new(at, first).flags(flags).build()
                    }
                    OnPath::Rename { .. } => opcode::RenameAt::new(at, first, at, second).build(),
                    OnPath::Link { .. } => opcode::LinkAt::new(at, first, at, second).build(),
                    OnPath::Symlink { .. } => opcode::SymlinkAt::new(at, first, second).build(),
                    OnPath::MakeDirectory { mode } => opcode::MkDirAt::new(at, first).mode(*mode).build(),
                    _ => unreachable!("an operation on a path that is unsupported"),
                }
            }
            _ => unreachable!("work that is unsupported"),
        }
    }
}

fn transfer_entry(transfer: &mut Transfer, extra: Option<&mut Extra>, most: usize) -> squeue::Entry {
    let fd = types::Fd(transfer.file.as_fd().as_raw_fd());
    let (offset, done, left) = (transfer.offset(), transfer.done, transfer.bytes() - transfer.done);
    let flags = if matches!(transfer.position, Position::End) { libc::RWF_APPEND } else { 0 };
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
        (Pieces::Many(_), None, _) => unreachable!("several buffers have a list"),
    };
    // Not for a stream: a cancel may not find an operation that one of the kernel's threads waits in.
    match (left > COPIED_MAX || transfer.is_async) && !transfer.file.is_direct() && !transfer.file.is_stream() {
        true => entry.flags(squeue::Flags::ASYNC),
        false => entry,
    }
}

impl Extra {
    /// The memory to which the entry points, if the operation needs any.
    fn of(work: &Work) -> Option<Box<Extra>> {
        let c_path = |path: Option<&Path>| {
            let bytes = path.map_or(&b""[..], |path| path.as_os_str().as_bytes());
            CString::new(bytes).expect("`supports` has refused paths with a zero byte")
        };
        let pieces = match work {
            Work::Transfer(Transfer { memory: Pieces::Many(buffers), done, .. }) => {
                // The kernel writes through these pointers into memory that only `work` owns.
                let piece = |bytes: &[u8]| {
                    Piece(libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() })
                };
                rest_of(buffers, *done).map(piece).collect()
            }
            Work::OnFile(_, OnFile::Stat) | Work::OnPath(..) => Vec::new(),
            _ => return None,
        };
        // SAFETY: `statx` has only integers, for which zero bytes are valid.
        let found = unsafe { std::mem::zeroed() };
        Some(Box::new(Extra { paths: work.paths().map(c_path), found, pieces }))
    }

    fn stat(&mut self, at: types::Fd, flags: AtFlags) -> squeue::Entry {
        opcode::Statx::new(at, self.paths[0].as_ptr(), (&raw mut self.found).cast())
            .flags(flags.bits() as i32)
            .mask(STATX.bits())
            .build()
    }
}

impl AsFd for Ring {
    /// Readable while an ended operation is available.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `self` owns the ring, which keeps the descriptor open for this borrow.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

impl Drop for Ring {
    /// Does not wait for operations. It cancels those that have begun, and a thread keeps all that belongs to them
    /// until the kernel no longer uses it. The dropping thread frees the others, and closes files of which they have
    /// the last handle.
    fn drop(&mut self) {
        // SAFETY: only `drop` takes it, and `drop` runs once.
        let ring = unsafe { ManuallyDrop::take(&mut self.ring) };
        if !self.owner.is_current() {
            // A forked child has neither the descriptor nor the mapping: other things may be at that number and that
            // address. The memory of operations in flight is the parent's.
            std::mem::forget((ring, std::mem::take(&mut self.works)));
            return;
        }
        if self.in_flight == 0 {
            return fork::close(ring);
        }
        let mut left = Ring::without_operations(ring, self.owner, self.root.take());
        (left.works, left.queued) = (std::mem::take(&mut self.works), std::mem::take(&mut self.queued));
        (left.in_flight, left.is_refused) = (self.in_flight, self.is_refused);
        for held in &mut left.works {
            held.take_if(|held| !held.is_begun);
        }
        let begun: Vec<u32> = (0..).zip(&left.works).filter(|(_, held)| held.is_some()).map(|(key, _)| key).collect();
        for key in begun {
            left.cancel(key);
        }
        let _ = left.start();
        drop(left.take_back());
        // Without a thread, everything is leaked.
        let left = ManuallyDrop::new(left);
        let _ = std::thread::Builder::new().name("pelton-file-end".to_owned()).spawn(move || {
            pelton_os::block_signals();
            let mut left = ManuallyDrop::into_inner(left);
            while left.in_flight > 0 {
                if left.ended().is_some() {
                    continue;
                }
                match left.wait() {
                    // No memory at the moment.
                    Ok(()) if left.unbegun() > 0 => std::thread::yield_now(),
                    Ok(()) if !left.is_refused => {}
                    // The system refuses further entries, but the ring still reports ends.
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
