//! The engine: it performs an operation in the call, or hands it to the ring or to the threads, and returns a
//! completion.
//!
//! - **Each operation in flight has an entry**, whose index is its key in the ring and for the threads. The ring, the
//!   threads or the engine own the operation itself.
//! - **Ended operations stay in the ring, or in the threads' queue, until the engine takes them.** So each one's
//!   descriptor shows whether more are available. Only `ready` needs the local wake.

use crate::cancel::Cancel;
use crate::completion::{Completion, Submitted};
use crate::file::{File, INLINE_BYTES_PER_TICK, Opened, Root};
use crate::operation::{Operation, Outcome, Output, Work};
use crate::perform::perform;
use crate::pool::{JobState, Pool};
use crate::ring::Ring;
use crate::transfer::{Pieces, Transfer};
use pelton_channel::raw::{BUSY_POLL, LastRing, Polled, Spin, busy_poll};
use pelton_channel::{Armed, Deadline, Error, Peer, Result, Wait};
use pelton_lane::failpoint;
use pelton_os::{LOG_TARGET, LocalWake, Owner, Pollable, own_uid, poll_until};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// As many as a client's calls in flight. A guess.
const IN_FLIGHT_MAX: usize = 1024;
/// A thread costs little while it waits; more of them keep no disk busier. A guess.
const THREADS: usize = 8;
/// How often an operation returns to the ring that the kernel stopped there. So many submitting threads in a row are
/// unlikely to exit at that moment.
const TRIES: u32 = 100;
/// The least cost of an inline operation, as a number of copied bytes.
const CALL_COST_BYTES: usize = 4096;

/// Options of an [`Engine`].
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// # let directory = tempfile::tempdir().unwrap();
/// use pelton::file::{EngineOptions, Open, Operation};
/// let mut engine = EngineOptions::new().root(directory.path()).build()?;
/// let outside = engine.run(Operation::open("../../etc/passwd", Open::for_reading())).unwrap_err();
/// assert!(outside.to_string().contains("EXDEV"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct EngineOptions {
    in_flight_max: usize,
    threads: usize,
    root: Option<PathBuf>,
    io_uring: bool,
}

impl EngineOptions {
    /// 1,024 operations in flight, io_uring if the system permits it, up to 8 threads, no root.
    pub fn new() -> EngineOptions {
        EngineOptions { in_flight_max: IN_FLIGHT_MAX, threads: THREADS, root: None, io_uring: true }
    }

    /// The most submitted operations whose completions were not taken. An operation that [`Engine::run_until`] gave up
    /// counts until it has ended. The one that it waits for is in addition.
    #[must_use]
    pub fn in_flight_max(mut self, operations: usize) -> EngineOptions {
        self.in_flight_max = operations;
        self
    }

    /// The most threads, for what io_uring does not do. The engine starts them on demand.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> EngineOptions {
        self.threads = threads;
        self
    }

    /// Uses threads only, as where the system refuses io_uring.
    #[must_use]
    pub fn without_io_uring(mut self) -> EngineOptions {
        self.io_uring = false;
        self
    }

    /// Confines all paths to this directory. The engine opens, removes and examines nothing outside it, whatever `..`,
    /// absolute paths and symbolic links say (EXDEV, or ELOOP for links of /proc). The target of a new symbolic link is
    /// not checked: this engine cannot follow it out of the directory, but others can.
    #[must_use]
    pub fn root(mut self, directory: impl Into<PathBuf>) -> EngineOptions {
        self.root = Some(directory.into());
        self
    }

    fn try_ring(&self, root: Option<Arc<Root>>) -> Option<Ring> {
        let ring = Ring::new(self.in_flight_max, root);
        if let Err(error) = &ring {
            log::warn!(
                target: LOG_TARGET,
                "io_uring is refused ({error}): threads perform all operations on files, which is slower; permit io_uring in the seccomp filter and kernel.io_uring_disabled, or raise the memory limit"
            );
        }
        ring.ok()
    }

    /// Creates the engine: four descriptors, and memory for the ring.
    ///
    /// # Errors
    /// [`Error::Option`] unless 1 to 16,384 operations and 1 to 1,024 threads are allowed; [`Error::File`] when the
    /// root cannot be opened; [`Error::System`] when descriptors or memory are exhausted.
    pub fn build(&self) -> Result<Engine> {
        for (option, found, most) in [("in_flight_max", self.in_flight_max, 16_384), ("threads", self.threads, 1024)] {
            if !(1..=most).contains(&found) {
                return Err(Error::Option { option, found: found as u64, wanted: format!("1 to {most}") });
            }
        }
        let creating = || Error::system("creating an engine for files");
        let root = self.root.as_deref().map(Root::open).transpose()?.map(Arc::new);
        let pool = Pool::new(self.threads, root.clone()).map_err(creating())?;
        let local_wake = LocalWake::new().map_err(creating())?;
        let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize);
        Ok(Engine {
            owner: Owner::current().map_err(creating())?,
            pollable: Pollable::new(pool.doorbell(), &local_wake).map_err(creating())?,
            // If io_uring is refused, or its memory is lacking, the threads do everything.
            ring: self.io_uring.then(|| self.try_ring(root.clone())).flatten(),
            pool,
            local_wake,
            arming: Arming::Disarmed,
            is_ring_watched: false,
            entries: Vec::new(),
            free: Vec::new(),
            ready: VecDeque::new(),
            run_completion: None,
            in_flight: 0,
            in_flight_max: self.in_flight_max,
            inline_bytes: INLINE_BYTES_PER_TICK,
            has_size_limit: limit.current.is_some(),
            all_begun: true,
            root,
            // The kernel and the threads may use the processors of this process.
            spin: Spin::new(Wait::Block, Some(Peer { pid: std::process::id(), uid: own_uid() })),
        })
    }
}

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions::new()
    }
}

/// Performs operations on files: see the [module](super).
///
/// The engine reads the limit of file sizes (RLIMIT_FSIZE) when it is created. If there is one, threads do all writes:
/// beyond the limit they get EFBIG and no signal.
///
/// **Dropping** an engine cancels what is in flight, and does not wait for it. The dropping thread closes files whose
/// last handle belongs to an operation that has not begun, and a file server can delay that. [`Engine::close`] waits
/// instead.
///
/// Threads: one at a time; it may move between threads. Give each busy thread an engine of its own.
#[derive(Debug)]
pub struct Engine {
    owner: Owner,
    /// `None` where there is no io_uring.
    ring: Option<Ring>,
    pool: Pool,
    pollable: Pollable,
    /// Wakes an armed loop: `ready` has a completion, or an operation is to be begun.
    local_wake: LocalWake,
    arming: Arming,
    is_ring_watched: bool,
    /// By key.
    entries: Vec<Option<Entry>>,
    free: Vec<u32>,
    ready: VecDeque<Completion>,
    /// The completion for `run`.
    run_completion: Option<Completion>,
    /// Submitted operations whose completions were not taken.
    in_flight: usize,
    in_flight_max: usize,
    /// How many bytes may still be copied inside the caller's calls, before it returns to its loop, or waits.
    inline_bytes: usize,
    has_size_limit: bool,
    /// Whether no operation waits for [`Engine::start`]. If one still does after a start, the system accepts nothing at
    /// the moment. Those in flight may never end, so their ends are no reliable occasion to retry.
    all_begun: bool,
    root: Option<Arc<Root>>,
    spin: Spin,
}

impl Polled for Engine {
    fn poll(&mut self) -> Result<bool> {
        self.poll_ends()?;
        Ok(!self.ready.is_empty())
    }

    /// The poll itself is about as cheap as a hint would be.
    fn may_be_ready(&mut self) -> bool {
        true
    }

    fn spin(&mut self) -> &mut Spin {
        &mut self.spin
    }

    fn last_ring(&self) -> Option<LastRing> {
        None
    }
}

/// What the event loop can rely on since [`Engine::arm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arming {
    Disarmed,
    Armed,
    /// As `Armed`; an operation was begun since.
    BegunOne,
    /// The local wake was rung since: the loop wakes in any case.
    Woken,
}

/// An operation in flight.
#[derive(Debug)]
struct Entry {
    waiter: Waiter,
    /// The rest of its chain, in reverse order.
    rest: Vec<(u64, Operation)>,
    is_cancelled: bool,
    /// How often the kernel stopped it without a cancel.
    tries: u32,
    /// Cancels it if the threads have it; `None` in the ring.
    thread: Option<Arc<JobState>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiter {
    Token(u64),
    /// `run` waits for it.
    Run,
    /// `run` waited for it until its deadline.
    Abandoned,
}

impl Engine {
    /// An engine with the default options.
    ///
    /// # Errors
    /// As of [`EngineOptions::build`].
    pub fn new() -> Result<Engine> {
        EngineOptions::new().build()
    }

    /// Whether it uses io_uring: false if the system refuses it, also if it does so later.
    pub fn uses_io_uring(&self) -> bool {
        self.ring.as_ref().is_some_and(|ring| !ring.is_refused())
    }

    /// Performs an operation in the calling thread and waits for it, like a plain system call. Returns only successes;
    /// after an error the operation's memory is freed.
    ///
    /// # Errors
    /// [`Error::File`]: the system's error; [`Error::Forked`]; [`Error::System`] when memory or threads are lacking.
    #[inline]
    pub fn run(&mut self, mut operation: Operation) -> Result<Completion> {
        self.check(&operation)?;
        if !self.all_begun {
            // This operation may wait for one of those.
            self.start()?;
        }
        // In place: moving the operation costs more than checking it.
        if let Work::Transfer(transfer) = &mut operation.0
            && let Some(result) = transfer.read_fast()
        {
            return match (result, operation.0) {
                (Ok(bytes), Work::Transfer(Transfer { memory: Pieces::One(buffer), cut_short_by: None, .. })) => {
                    Ok(Completion::of_count(0, bytes, buffer))
                }
                (result, work) => succeeded(Completion::of(0, work, result.map(Output::Count)).0),
            };
        }
        self.run_slow(operation.0)
    }

    #[inline(never)]
    fn run_slow(&mut self, mut work: Work) -> Result<Completion> {
        if self.has_size_limit && work.action().grows {
            return Ok(self.wait_for(work, None)?.expect("without a deadline it has ended"));
        }
        let result = perform(&mut work, self.root.as_deref(), &Cancel::NEVER, true);
        let result = result.map(|output| output.expect("it was allowed to wait"));
        // The caller waits for the close of a last handle, too.
        succeeded(Completion::of(0, work, result).0)
    }

    /// As [`Engine::run`], until `deadline`. `None` when it passes: the operation is cancelled, and may still finish
    /// what it is doing. io_uring or a thread performs it, unless it can be done inline. Completions of other
    /// operations stay available.
    ///
    /// # Errors
    /// As of [`Engine::run`].
    pub fn run_until(&mut self, operation: Operation, deadline: impl Into<Deadline>) -> Result<Option<Completion>> {
        self.check(&operation)?;
        self.inline_bytes = INLINE_BYTES_PER_TICK;
        let mut work = operation.0;
        match self.try_inline(&mut work) {
            Some(result) => succeeded(self.completion_of(0, work, result.map(Output::Count))).map(Some),
            None => self.wait_for(work, deadline.into().instant()),
        }
    }

    fn wait_for(&mut self, work: Work, deadline: Option<Instant>) -> Result<Option<Completion>> {
        // An operation that was given up before may still occupy its slot.
        if !self.wait(deadline, |engine| engine.under_way() <= engine.in_flight_max)? {
            self.give_back(work.into_parts().1);
            return Ok(None);
        }
        let key = self.enqueue(Waiter::Run, work, Vec::new());
        let waited = self.wait(deadline, |engine| engine.run_completion.is_some());
        // Once it has ended, another operation may have its slot.
        if !matches!(waited, Ok(true))
            && let Some(entry) = self.entries[key as usize].as_mut().filter(|entry| entry.waiter == Waiter::Run)
        {
            entry.waiter = Waiter::Abandoned;
            self.cancel_entry(key);
            let _ = self.start();
        }
        // It may have ended at the last moment.
        match (self.run_completion.take(), waited) {
            (Some(completion), _) => succeeded(completion).map(Some),
            (None, waited) => waited.map(|_| None),
        }
    }

    /// As [`Engine::try_submit`], but begins nothing, even if armed: [`Engine::start_submitted`] does. For FFI.
    #[doc(hidden)]
    #[inline]
    pub fn try_submit_unbegun(&mut self, token: u64, mut operation: Operation) -> Result<Submitted<Operation>> {
        self.check(&operation)?;
        if !self.has_free_slots(1) {
            return Ok(Submitted::Full(operation));
        }
        self.in_flight += 1;
        // In place: moving the operation costs more than checking it.
        match self.try_inline(&mut operation.0) {
            Some(result) => self.complete_fast(token, operation.0, result),
            None => _ = self.enqueue(Waiter::Token(token), operation.0, Vec::new()),
        }
        Ok(Submitted::Submitted)
    }

    /// The usual end, on the fast path: some 40 ns of moves would be a tenth of a read from the page cache.
    #[inline]
    fn complete_fast(&mut self, token: u64, work: Work, result: std::result::Result<usize, Errno>) {
        match (result, work) {
            (Ok(bytes), Work::Transfer(Transfer { file, memory: Pieces::One(buffer), cut_short_by: None, .. })) => {
                self.ready.push_back(Completion::of_count(token, bytes, buffer));
                if let Some(last) = file.into_last() {
                    self.close_in_thread(last);
                }
                self.wake_loop();
            }
            (result, work) => self.complete(token, work, result.map(Output::Count)),
        }
    }

    /// Submits an operation, if fewer than [`EngineOptions::in_flight_max`] are in flight. Its completion returns
    /// `token`, which need not be unique. Never waits. If the operation needs no waiting, the call performs it, and its
    /// completion is available. [`Engine::start`] and [`Engine::arm`] begin the others, and so does a call that finds
    /// no completion: with one system call for all of them.
    ///
    /// # Errors
    /// [`Error::Forked`]: it was not accepted. If memory or threads are lacking, it is in flight, and the next call
    /// that begins or takes operations returns the error.
    #[inline]
    pub fn try_submit(&mut self, token: u64, operation: Operation) -> Result<Submitted<Operation>> {
        let submitted = self.try_submit_unbegun(token, operation)?;
        self.start_if_armed();
        Ok(submitted)
    }

    /// Submits operations that run one after another, each after the success of the one before; if there is space for
    /// all. When one fails, is cancelled, or writes less than requested, the rest complete with ECANCELED, undone.
    /// Otherwise as [`Engine::try_submit`].
    ///
    /// # Errors
    /// As of [`Engine::try_submit`]; [`Error::Refused`] for a chain longer than `in_flight_max`.
    pub fn try_submit_chain(
        &mut self,
        chain: impl IntoIterator<Item = (u64, Operation)>,
    ) -> Result<Submitted<Vec<(u64, Operation)>>> {
        let mut chain: Vec<(u64, Operation)> = chain.into_iter().collect();
        chain.iter().try_for_each(|(_, operation)| self.check(operation))?;
        if chain.len() > self.in_flight_max {
            let (found, most) = (chain.len(), self.in_flight_max);
            let text = format!("found a chain of {found} operations, wanted at most {most}: raise `in_flight_max`");
            return Err(Error::Refused(text));
        }
        if !self.has_free_slots(chain.len()) {
            return Ok(Submitted::Full(chain));
        }
        self.in_flight += chain.len();
        chain.reverse();
        if let Some((token, first)) = chain.pop() {
            self.begin(token, first.0, chain);
        }
        self.start_if_armed();
        Ok(Submitted::Submitted)
    }

    /// Begins the submitted operations that could not be done inline. [`Engine::arm`] and waiting for completions do so
    /// too. Only a caller that does neither for a while needs this. Does not wait.
    ///
    /// # Errors
    /// [`Error::Forked`]; [`Error::System`] for lack of memory or threads: the next call tries again.
    pub fn start(&mut self) -> Result<()> {
        self.check_owner()?;
        let begun = || Error::system("beginning operations on files");
        self.start_ring(Ring::start).map_err(begun())?;
        self.pool.start().map_err(begun())?;
        self.all_begun = self.ring.as_ref().is_none_or(|ring| ring.unbegun() == 0);
        Ok(())
    }

    /// As [`Engine::start`]; if the engine is armed, as for an operation submitted then. For FFI.
    #[doc(hidden)]
    pub fn start_submitted(&mut self) -> Result<()> {
        if self.arming == Arming::Disarmed {
            return self.start();
        }
        self.start_if_armed();
        Ok(())
    }

    /// Begins the ring's operations. If the system refuses them by now, the threads get those that the kernel has not
    /// taken.
    fn start_ring(&mut self, start: impl Fn(&mut Ring) -> std::io::Result<()>) -> std::io::Result<()> {
        let Some(ring) = &mut self.ring else { return Ok(()) };
        let begun = start(ring);
        for (key, work) in ring.take_back() {
            self.leave_to_threads(key, work);
        }
        begun
    }

    /// The next completion, if one is available. Never waits.
    ///
    /// # Errors
    /// As of [`Engine::start`].
    #[inline]
    pub fn try_completion(&mut self) -> Result<Option<Completion>> {
        self.check_owner()?;
        match self.take() {
            Some(ready) => Ok(Some(ready)),
            None => self.poll_and_take(),
        }
    }

    fn poll_and_take(&mut self) -> Result<Option<Completion>> {
        self.poll_ends()?;
        let taken = self.take();
        if taken.is_none() {
            self.inline_bytes = INLINE_BYTES_PER_TICK;
        }
        Ok(taken)
    }

    /// The next completion. Waits for it.
    ///
    /// # Errors
    /// As of [`Engine::start`]; [`Error::Refused`] when nothing is in flight.
    #[inline]
    pub fn completion(&mut self) -> Result<Completion> {
        // An inline completion is moved once: it has some 180 bytes.
        if self.owner.is_current()
            && let Some(ready) = self.take()
        {
            self.inline_bytes = INLINE_BYTES_PER_TICK;
            return Ok(ready);
        }
        Ok(self.completion_until(Deadline::Never)?.expect("without a deadline a completion came"))
    }

    /// As [`Engine::completion`], until `deadline`; `None` when it passes, and the operations stay in flight.
    ///
    /// # Errors
    /// As of [`Engine::completion`].
    pub fn completion_until(&mut self, deadline: impl Into<Deadline>) -> Result<Option<Completion>> {
        self.check_owner()?;
        if self.in_flight == 0 {
            return Err(Error::Refused(
                "nothing is in flight, so nothing completes: submit something first".to_owned(),
            ));
        }
        self.inline_bytes = INLINE_BYTES_PER_TICK;
        self.wait(deadline.into().instant(), |engine| !engine.ready.is_empty())?;
        Ok(self.take())
    }

    #[inline]
    fn take(&mut self) -> Option<Completion> {
        let completion = self.ready.pop_front()?;
        self.in_flight -= 1;
        Some(completion)
    }

    /// The submitted operations whose completions were not taken.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Cancels the operations submitted with `token`, and in chains those after them. Each still completes: with
    /// ECANCELED, or, if it was too late to stop it, with its usual outcome. Does not wait. False: no
    /// operation with that token is still to complete.
    ///
    /// # Errors
    /// As of [`Engine::start`].
    pub fn cancel(&mut self, token: u64) -> Result<bool> {
        self.check_owner()?;
        let mut found = false;
        for key in 0..self.entries.len() {
            let Some(entry) = &mut self.entries[key] else { continue };
            // The rest of a chain is in reverse order.
            if let Some(last) = entry.rest.iter().rposition(|(next, _)| *next == token) {
                let undone: Vec<_> = entry.rest.drain(..=last).rev().collect();
                self.complete_undone(undone);
                found = true;
            }
            if self.entries[key].as_ref().is_some_and(|entry| entry.waiter == Waiter::Token(token)) {
                self.cancel_entry(key as u32);
                found = true;
            }
        }
        self.start_if_armed();
        Ok(found)
    }

    fn cancel_entry(&mut self, key: u32) {
        let Some(entry) = &mut self.entries[key as usize] else { return };
        entry.is_cancelled = true;
        match (&entry.thread, &mut self.ring) {
            (Some(job), _) => self.pool.cancel(job),
            (None, Some(ring)) => match ring.cancel(key) {
                Some(mut work) => {
                    let result = work.failed(Errno::CANCELED);
                    self.end(key, work, result);
                }
                None => self.all_begun = false,
            },
            (None, None) => unreachable!("without a ring the threads have everything"),
        }
    }

    /// For an event loop: the descriptor becomes readable when an operation completes. Also begins the submitted
    /// operations.
    ///
    /// Operations submitted while the engine is armed begin by themselves, the first immediately. If there are more,
    /// the descriptor becomes readable, and the rest begins when the loop takes completions or arms again: one system
    /// call for all. Does not wait.
    ///
    /// # Errors
    /// As of [`Engine::start`].
    pub fn arm(&mut self) -> Result<Armed> {
        self.check_owner()?;
        self.inline_bytes = INLINE_BYTES_PER_TICK;
        if let (false, Some(ring)) = (self.is_ring_watched, &self.ring) {
            self.pollable.add(ring).map_err(Error::system("watching the ring"))?;
            self.is_ring_watched = true;
        }
        self.local_wake.drain();
        self.pool.doorbell().drain();
        self.arming = Arming::Armed;
        let begun = self.poll_ends();
        if begun.is_err() || !self.ready.is_empty() || !self.all_begun {
            // Nothing else would wake the loop: it wakes and retries.
            self.wake_loop();
        }
        begun?;
        Ok(if self.ready.is_empty() { Armed::Waiting } else { Armed::Ready })
    }

    /// For an event loop, before [`Engine::arm`]: polls for a completion for some microseconds, and returns whether
    /// there is one. Also begins the submitted operations. Polls for less if that was useless lately, and only once if
    /// nothing is in flight. With one processor it yields once instead. Neither sleeps nor arms.
    ///
    /// # Errors
    /// As of [`Engine::start`].
    pub fn busy_poll(&mut self) -> Result<bool> {
        self.check_owner()?;
        busy_poll(self, if self.in_flight > 0 { BUSY_POLL } else { Duration::ZERO }, 0)
    }

    /// Withdraws [`Engine::arm`].
    pub fn disarm(&mut self) {
        self.arming = Arming::Disarmed;
    }

    /// Waits until all submitted operations and the threads have ended, and closes the engine. Take the completions
    /// that matter first: it drops them. To cancel operations instead of waiting, drop the engine.
    ///
    /// # Errors
    /// As of [`Engine::start`]; after an error the engine is closed as if dropped.
    pub fn close(self) -> Result<()> {
        self.close_until(Deadline::Never).map(drop)
    }

    /// As [`Engine::close`], until `deadline`; false when it passes: then it cancels the rest. It does not wait for a
    /// thread that is still closing the file of a last handle.
    ///
    /// # Errors
    /// As of [`Engine::close`].
    pub fn close_until(mut self, deadline: impl Into<Deadline>) -> Result<bool> {
        let deadline = deadline.into().instant();
        self.check_owner()?;
        let has_ended = self.wait(deadline, |engine| {
            engine.ready.clear();
            engine.entries.iter().all(Option::is_none)
        })?;
        if has_ended {
            self.pool.finish(deadline.is_none());
        }
        Ok(has_ended)
    }

    fn check_owner(&self) -> Result<()> {
        if self.owner.is_current() { Ok(()) } else { Err(Error::Forked) }
    }

    /// Whether this process created the engine and the files.
    #[inline]
    fn check(&self, operation: &Operation) -> Result<()> {
        self.check_owner()?;
        match operation.0.files().into_iter().flatten().all(File::is_own) {
            true => Ok(()),
            false => Err(Error::Forked),
        }
    }

    /// Cancels everything in flight. For FFI.
    #[doc(hidden)]
    pub fn cancel_all(&mut self) -> Result<()> {
        self.check_owner()?;
        for key in 0..self.entries.len() {
            if let Some(entry) = &mut self.entries[key] {
                let undone = std::mem::take(&mut entry.rest);
                self.complete_undone(undone.into_iter().rev());
                self.cancel_entry(key as u32);
            }
        }
        self.start()
    }

    /// Waits until all operations have ended, also those given up; their completions stay available. False at the
    /// deadline. For FFI.
    #[doc(hidden)]
    pub fn wait_idle(&mut self, deadline: Option<Instant>) -> Result<bool> {
        self.check_owner()?;
        self.wait(deadline, |engine| engine.under_way() == 0)
    }

    /// Waits until all given-up operations have ended. For FFI.
    #[doc(hidden)]
    pub fn wait_given_up(&mut self) -> Result<bool> {
        self.wait(None, |engine| engine.entries.iter().flatten().all(|entry| entry.waiter != Waiter::Abandoned))
    }

    /// Whether this process is a fork of the handle's creator. For FFI.
    #[doc(hidden)]
    pub fn is_forked(&self) -> bool {
        self.owner.is_forked()
    }

    /// The most operations in flight. For FFI.
    #[doc(hidden)]
    pub fn in_flight_max(&self) -> usize {
        self.in_flight_max
    }

    /// Whether so many operations can be submitted. A given-up operation of `run_until` occupies a slot until it has
    /// ended. For FFI.
    #[doc(hidden)]
    pub fn has_free_slots(&self, operations: usize) -> bool {
        self.in_flight + operations <= self.in_flight_max && self.under_way() + operations <= self.in_flight_max
    }

    fn under_way(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    #[inline]
    fn try_inline(&mut self, work: &mut Work) -> Option<std::result::Result<usize, Errno>> {
        match work {
            Work::Transfer(transfer)
                if !(transfer.writes && self.has_size_limit) && transfer.bytes() <= self.inline_bytes =>
            {
                let result = transfer.try_inline();
                self.inline_bytes = self.inline_bytes.saturating_sub(transfer.done.max(CALL_COST_BYTES));
                result
            }
            _ => None,
        }
    }

    /// Begins an operation and the rest of its chain, as far as they are done inline.
    fn begin(&mut self, mut token: u64, mut work: Work, mut rest: Vec<(u64, Operation)>) {
        while let Some(result) = self.try_inline(&mut work) {
            let result = result.map(Output::Count);
            let continues = is_whole(&work, &result);
            self.complete(token, work, result);
            if !continues {
                return self.complete_undone(rest.into_iter().rev());
            }
            match rest.pop() {
                Some((next, operation)) => (token, work) = (next, operation.0),
                None => return,
            }
        }
        self.enqueue(Waiter::Token(token), work, rest);
    }

    /// Hands it to the ring or a thread, which begins it at the next start.
    fn enqueue(&mut self, waiter: Waiter, work: Work, rest: Vec<(u64, Operation)>) -> u32 {
        let key = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() as u32 - 1
        });
        self.entries[key as usize] = Some(Entry { waiter, rest, is_cancelled: false, tries: 0, thread: None });
        self.assign(key, work);
        key
    }

    /// Chooses the ring or the threads.
    fn assign(&mut self, key: u32, mut work: Work) {
        self.all_begun = false;
        // Copies in the beginning call count towards the same budget as inline operations.
        if let Work::Transfer(transfer) = &mut work
            && !transfer.file.is_direct()
        {
            let left = transfer.bytes() - transfer.done;
            transfer.is_async = left > self.inline_bytes;
            self.inline_bytes = self.inline_bytes.saturating_sub(left);
        }
        match &mut self.ring {
            // A passed limit raises a signal that ends the process; threads block that signal.
            Some(ring) if ring.supports(&work) && !(self.has_size_limit && work.action().grows) => ring.push(key, work),
            _ => self.leave_to_threads(key, work),
        }
    }

    fn leave_to_threads(&mut self, key: u32, work: Work) {
        self.all_begun = false;
        let job = self.pool.push(key, work);
        let entry = self.entries[key as usize].as_mut().expect("it is in flight");
        if entry.is_cancelled {
            self.pool.cancel(&job);
        }
        entry.thread = Some(job);
    }

    /// Begins submitted operations of an armed engine: see [`Engine::arm`]. If they cannot begin at the moment, the
    /// loop wakes, retries, and gets the error.
    #[inline]
    fn start_if_armed(&mut self) {
        if !self.all_begun && matches!(self.arming, Arming::Armed | Arming::BegunOne) {
            self.start_or_wake();
        }
    }

    fn start_or_wake(&mut self) {
        if self.arming == Arming::Armed {
            self.arming = Arming::BegunOne;
            if self.start().is_ok() && self.all_begun {
                return;
            }
            self.all_begun = false;
        }
        self.wake_loop();
    }

    /// Keeps the descriptor of an armed engine readable.
    #[inline]
    fn wake_loop(&mut self) {
        if matches!(self.arming, Arming::Armed | Arming::BegunOne) {
            self.arming = Arming::Woken;
            self.local_wake.ring();
        }
    }

    /// Moves completions to `ready`, if there are any. Otherwise begins the waiting operations.
    fn poll_ends(&mut self) -> Result<()> {
        self.reap_and_start(&|engine: &mut Engine| !engine.ready.is_empty())
    }

    /// Takes ended operations and begins waiting ones, until there is enough, or nothing of either is left. An ended
    /// operation may cause another to begin, which may end immediately.
    fn reap_and_start(&mut self, is_enough: &impl Fn(&mut Engine) -> bool) -> Result<()> {
        loop {
            let has_ended = self.reap(is_enough);
            self.all_begun &= self.ring.as_ref().is_none_or(|ring| ring.unbegun() == 0);
            if is_enough(self) || self.all_begun && !has_ended {
                return Ok(());
            }
            self.start()?;
            // The system accepts nothing at the moment, and no operation has ended that would free a slot.
            if !self.all_begun && !self.reap(is_enough) {
                return Ok(());
            }
        }
    }

    /// Takes ended operations until there is enough. Returns whether there was any.
    fn reap(&mut self, is_enough: &impl Fn(&mut Engine) -> bool) -> bool {
        let mut any = false;
        while !is_enough(self) {
            if let Some((key, work, result)) = self.ring.as_mut().and_then(Ring::ended) {
                self.on_ring_end(key, work, result);
            } else if let Some(ended) = self.pool.ended() {
                self.end(ended.key, ended.work, ended.result);
            } else {
                break;
            }
            any = true;
        }
        any
    }

    /// Decides whether the ring's result ends an operation.
    fn on_ring_end(&mut self, key: u32, mut work: Work, result: std::result::Result<Option<Output>, Errno>) {
        let entry = self.entries[key as usize].as_mut().expect("it is in flight");
        match result {
            Ok(Some(output)) => self.end(key, work, Ok(output)),
            // A partial transfer; or the thread that began it has exited, which makes the kernel stop it.
            Ok(None) | Err(Errno::CANCELED | Errno::INTR | Errno::AGAIN) if entry.is_cancelled => {
                let result = work.failed(Errno::CANCELED);
                self.end(key, work, result);
            }
            Ok(None) => self.assign(key, work),
            Err(Errno::CANCELED | Errno::INTR) if entry.tries < TRIES => {
                entry.tries += 1;
                self.assign(key, work);
            }
            // If the file system itself returns the first two, a thread gets them too: then that is the outcome. After
            // the last it has to wait in a way that the ring does not support.
            Err(Errno::CANCELED | Errno::INTR | Errno::AGAIN) => self.leave_to_threads(key, work),
            Err(error) => {
                let result = work.failed(error);
                self.end(key, work, result);
            }
        }
    }

    /// Handles the end of an operation.
    fn end(&mut self, key: u32, work: Work, result: Outcome) {
        let Entry { waiter, mut rest, is_cancelled, .. } = self.entries[key as usize].take().expect("it was in flight");
        self.free.push(key);
        match waiter {
            Waiter::Run => self.run_completion = Some(self.completion_of(0, work, result)),
            Waiter::Abandoned => {
                if let Ok(Output::File(file)) = self.completion_of(0, work, result).outcome {
                    self.give_back([Some(file), None]);
                }
            }
            Waiter::Token(token) => {
                let continues = is_whole(&work, &result) && !is_cancelled;
                self.complete(token, work, result);
                match (continues, rest.pop()) {
                    (true, Some((next, operation))) => self.begin(next, operation.0, rest),
                    (false, Some(next)) => self.complete_undone(std::iter::once(next).chain(rest.into_iter().rev())),
                    (_, None) => {}
                }
            }
        }
    }

    fn complete(&mut self, token: u64, work: Work, result: Outcome) {
        let completion = self.completion_of(token, work, result);
        self.ready.push_back(completion);
        self.wake_loop();
    }

    fn completion_of(&mut self, token: u64, work: Work, result: Outcome) -> Completion {
        let (completion, files) = Completion::of(token, work, result);
        self.give_back(files);
        completion
    }

    /// Drops handles of files.
    fn give_back(&mut self, files: [Option<File>; 2]) {
        for last in files.into_iter().flatten().filter_map(File::into_last) {
            self.close_in_thread(last);
        }
    }

    /// A thread closes the file of a last handle, because that may wait, for instance for a file server.
    #[cold]
    fn close_in_thread(&mut self, last: Opened) {
        self.pool.push_close(last);
        if self.pool.start().is_err() {
            // No thread can be started at the moment.
            self.all_begun = false;
        }
    }

    fn complete_undone(&mut self, operations: impl IntoIterator<Item = (u64, Operation)>) {
        for (token, Operation(work)) in operations {
            self.complete(token, work, Err(Errno::CANCELED));
        }
    }

    /// Waits until the condition holds; false at the deadline.
    fn wait(&mut self, deadline: Option<Instant>, is_done: impl Fn(&mut Engine) -> bool) -> Result<bool> {
        let failed = || Error::system("waiting for operations on files");
        loop {
            self.reap(&is_done);
            if is_done(self) {
                return Ok(true);
            }
            self.pool.start().map_err(Error::system("beginning operations on files"))?;
            if let (Some(ring), None, 0) = (&self.ring, deadline, self.pool.in_flight())
                && !ring.is_empty()
                && !ring.is_refused()
            {
                // One system call begins operations and waits.
                self.start_ring(Ring::wait).map_err(failed())?;
                continue;
            }
            failpoint("engine waits: looked");
            self.pool.doorbell().drain();
            self.reap_and_start(&is_done)?;
            if is_done(self) {
                // A loop must be woken for the rest.
                self.pool.ring_again();
                return Ok(true);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(false);
            }
            if !self.all_begun {
                std::thread::yield_now();
                continue;
            }
            let mut descriptors = vec![self.pool.doorbell().as_fd()];
            descriptors.extend(self.ring.as_ref().map(|ring| ring.as_fd()));
            poll_until(&descriptors, [None, None], deadline).map_err(failed())?;
        }
    }
}

impl Drop for Engine {
    /// Cancels what is in flight, and does not wait for it. May close files: see [`Engine`].
    fn drop(&mut self) {
        // In a forked child these descriptor numbers may belong to other files. The memory of operations in flight is
        // the parent's.
        if !self.owner.is_current() {
            std::mem::forget((
                std::mem::take(&mut self.entries),
                std::mem::take(&mut self.ready),
                self.run_completion.take(),
            ));
            return;
        }
        // The ring's own drop cancels its operations.
        for job in self.entries.iter().flatten().filter_map(|entry| entry.thread.as_ref()) {
            self.pool.cancel(job);
        }
    }
}

impl AsFd for Engine {
    /// The descriptor for an event loop: see [`Engine::arm`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pollable.as_fd()
    }
}

impl AsRawFd for Engine {
    /// As [`AsFd`], for runtimes that need the number.
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

fn succeeded(completion: Completion) -> Result<Completion> {
    match completion.outcome {
        Err(error) => Err(error),
        _ => Ok(completion),
    }
}

/// Whether its chain continues.
fn is_whole(work: &Work, result: &Outcome) -> bool {
    let is_written = match work {
        Work::Transfer(transfer) => !transfer.writes || transfer.done == transfer.bytes(),
        _ => true,
    };
    result.is_ok() && is_written && work.cut_short_by().is_none()
}
