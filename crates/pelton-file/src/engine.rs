//! The engine: what is asked of it is answered at once, or goes to the ring or to the threads, and comes back as a completion.
//!
//! - **What is in flight has an entry**, whose index is its key in the ring and at the threads. An operation is with one of these, or here.
//! - **The ring's ends stay in the ring until they are taken**, and the threads' in their queue, so that each one's descriptor says by itself
//!   whether there is more. Only what is in `ready` has to be announced, by the nudge.

use crate::file::{File, INLINE_BYTES_OF_A_TURN, Opened, Root};
use crate::operation::{Operation, Output, Pieces, Transfer, Work};
use crate::perform;
use crate::pool::{Cancel, Pool};
use crate::ring::Ring;
use pelton_channel::{Error, Result};
use pelton_lane::failpoint;
use pelton_os::{Buffer, LocalWake, Owner, Pollable, poll_until};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// As many as calls in flight of a client. A guess.
const IN_FLIGHT_MAX: usize = 1024;
/// A thread costs little while it waits; more of them keep no disk busier. A guess.
const THREADS: usize = 8;
/// How often an operation is given to the ring again that was stopped there: more threads that begin something and end at once are not likely.
const TRIES: u32 = 100;
/// What an operation costs that is answered at once, at least, as if it had moved so many bytes.
const BYTES_OF_A_CALL: usize = 4096;

/// How an [`Engine`] is made.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// # let directory = tempfile::tempdir().unwrap();
/// use pelton::file::{EngineOptions, Open, Operation};
/// let mut engine = EngineOptions::new().root(directory.path()).open()?;
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
    /// 1,024 operations in flight, io_uring where it is to be had, up to 8 threads, all paths as they are.
    pub fn new() -> EngineOptions {
        EngineOptions { in_flight_max: IN_FLIGHT_MAX, threads: THREADS, root: None, io_uring: true }
    }

    /// How many operations may have been submitted whose completions have not been taken. What [`Engine::run_until`] has given up, and has not ended,
    /// is one of them; what it waits for is one more.
    #[must_use]
    pub fn in_flight_max(mut self, operations: usize) -> EngineOptions {
        self.in_flight_max = operations;
        self
    }

    /// How many threads there may be, for what io_uring does not do. They are started when they are needed first.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> EngineOptions {
        self.threads = threads;
        self
    }

    /// Without io_uring, as where it is refused: the same, by the threads alone.
    #[must_use]
    pub fn without_io_uring(mut self) -> EngineOptions {
        self.io_uring = false;
        self
    }

    /// All paths are below this directory: nothing outside it is opened, removed or asked about, whatever `..`, absolute paths and symbolic links
    /// say (EXDEV, or ELOOP of links of /proc). What a symbolic link made here says is not looked at: it cannot be followed out of
    /// the directory by this engine, but by others.
    #[must_use]
    pub fn root(mut self, directory: impl Into<PathBuf>) -> EngineOptions {
        self.root = Some(directory.into());
        self
    }

    /// Makes the engine: four descriptors, and memory for the ring.
    ///
    /// # Errors
    /// [`Error::Option`] for nothing in flight or no threads, or more than 16,384 or 1,024 of them; [`Error::File`] when the root cannot be opened;
    /// [`Error::System`] when there are no descriptors or no memory left.
    pub fn open(&self) -> Result<Engine> {
        for (option, found, most) in [("in_flight_max", self.in_flight_max, 16_384), ("threads", self.threads, 1024)] {
            if !(1..=most).contains(&found) {
                return Err(Error::Option { option, found: found as u64, wanted: format!("1 to {most}") });
            }
        }
        let made = || Error::system("making an engine for files");
        let root = self.root.as_deref().map(Root::open).transpose()?.map(Arc::new);
        let pool = Pool::new(self.threads, root.clone()).map_err(made())?;
        let nudge = LocalWake::new().map_err(made())?;
        let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize);
        Ok(Engine {
            owner: Owner::current().map_err(made())?,
            pollable: Pollable::new(pool.doorbell(), &nudge).map_err(made())?,
            // Refused, or no memory for it: the threads do everything.
            ring: self.io_uring.then(|| Ring::new(self.in_flight_max, root.clone()).ok()).flatten(),
            pool,
            nudge,
            is_nudged: false,
            is_ring_watched: false,
            is_armed: false,
            has_begun_one: false,
            entries: Vec::new(),
            free: Vec::new(),
            ready: VecDeque::new(),
            answer: None,
            in_flight: 0,
            in_flight_max: self.in_flight_max,
            inline_bytes: INLINE_BYTES_OF_A_TURN,
            has_size_limit: limit.current.is_some(),
            all_begun: true,
            root,
            never: Cancel::never(),
        })
    }
}

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions::new()
    }
}

/// Does operations on files: see the [module](super).
///
/// The limit of file sizes (RLIMIT_FSIZE) is looked at when the engine is made; with one, writing is left to the threads, where passing it is
/// EFBIG and no signal.
///
/// Threads: one at a time; it may go from one to another. Each thread that does much has an engine of its own best.
#[derive(Debug)]
pub struct Engine {
    owner: Owner,
    /// `None` where there is no io_uring.
    ring: Option<Ring>,
    pool: Pool,
    pollable: Pollable,
    /// Rung while `ready` has something, or something is to be begun, for who has armed.
    nudge: LocalWake,
    /// Whether it was rung since the engine was armed: the loop comes back in any case.
    is_nudged: bool,
    is_ring_watched: bool,
    is_armed: bool,
    /// Since it was armed.
    has_begun_one: bool,
    /// By key.
    entries: Vec<Option<Entry>>,
    free: Vec<u32>,
    ready: VecDeque<Completion>,
    /// To who runs an operation.
    answer: Option<Completion>,
    /// Submitted, whose completions have not been taken.
    in_flight: usize,
    in_flight_max: usize,
    /// What may still be copied in the caller's calls, until it goes back to its loop, or waits.
    inline_bytes: usize,
    has_size_limit: bool,
    /// Whether nothing waits for [`Engine::start`].
    all_begun: bool,
    root: Option<Arc<Root>>,
    /// What is never cancelled.
    never: Cancel,
}

/// An operation in flight.
#[derive(Debug)]
struct Entry {
    whose: Whose,
    /// What follows it in a chain, the next one last.
    rest: Vec<(u64, Operation)>,
    is_cancelled: bool,
    /// How often it was stopped without being asked to.
    tries: u32,
    /// At the threads, what cancels it; `None` in the ring.
    thread: Option<Arc<Cancel>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whose {
    Token(u64),
    /// Who waits in `run`.
    Run,
    /// Who waited in `run` until its deadline.
    Nobody,
}

/// What became of an operation that was submitted, and the memory that went into it.
#[derive(Debug)]
#[non_exhaustive]
pub struct Completion {
    /// As it was submitted; 0 of [`Engine::run`].
    pub token: u64,
    /// What came of it. [`Error::File`] with `ECANCELED` for what was cancelled, also as part of a chain that failed before it.
    pub outcome: Result<Output>,
    /// The memory that went in; empty for an operation without any.
    pub buffer: Buffer,
    /// The memory of a vectored operation.
    pub buffers: Vec<Buffer>,
    /// Of a count that is less than what was asked for: the error, or the cancel, that came after so many bytes. `None`: a read or a copy came to the
    /// end of its file.
    pub cut_short_by: Option<Box<Error>>,
}

impl Completion {
    /// And what the operation had of files.
    fn of(token: u64, mut work: Work, result: std::result::Result<Output, Errno>) -> (Completion, [Option<File>; 2]) {
        let outcome = result.map_err(|errno| work.error(errno));
        let cut_short_by = work.cut_short_by().map(|errno| Box::new(work.error(errno)));
        let (memory, files) = work.into_parts();
        let (buffer, buffers) = match memory {
            Pieces::One(buffer) => (buffer, Vec::new()),
            Pieces::Many(buffers) => (Buffer::default(), buffers),
        };
        (Completion { token, outcome, buffer, buffers, cut_short_by }, files)
    }

    /// How many bytes were read, written or copied: 0 for anything else, and for what failed.
    pub fn count(&self) -> usize {
        if let Ok(Output::Count(bytes)) = self.outcome { bytes } else { 0 }
    }

    /// Of a read with one buffer: what was read.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[..self.count().min(self.buffer.len())]
    }

    /// The file that was opened.
    ///
    /// # Errors
    /// What failed; [`Error::Refused`] when it was no opening.
    pub fn into_file(self) -> Result<File> {
        match self.outcome? {
            Output::File(file) => Ok(file),
            other => Err(Error::Refused(format!("found {other:?}, wanted a file: it comes of `Operation::open`"))),
        }
    }
}

/// Whether what was submitted was taken.
#[derive(Debug)]
#[must_use = "an operation that was not taken is not done"]
pub enum Submitted<T> {
    /// It was: its completion will come.
    Submitted,
    /// So many are in flight already. Take completions, then submit it again: here it is.
    Full(T),
}

impl<T> Submitted<T> {
    /// Whether it was taken.
    pub fn is_submitted(&self) -> bool {
        matches!(self, Submitted::Submitted)
    }
}

impl Engine {
    /// An engine with the usual options.
    ///
    /// # Errors
    /// As of [`EngineOptions::open`].
    pub fn new() -> Result<Engine> {
        EngineOptions::new().open()
    }

    /// Whether it uses io_uring: false where the system refuses that, also if it does so later.
    pub fn uses_io_uring(&self) -> bool {
        self.ring.as_ref().is_some_and(|ring| !ring.is_refused())
    }

    /// Does an operation, and waits for it: the calling thread does it itself, as with the plain system call. What comes is a success; what it failed
    /// by is the error, and its memory is gone then.
    ///
    /// # Errors
    /// [`Error::File`]: what the system said; [`Error::Forked`]; [`Error::System`] when it cannot be begun, for lack of memory or threads.
    #[inline]
    pub fn run(&mut self, mut operation: Operation) -> Result<Completion> {
        self.check(&operation)?;
        if !self.all_begun {
            // It may be what this one waits for.
            self.start()?;
        }
        // Where it is: moving it costs more than looking at it.
        if let Work::Transfer(transfer) = &mut operation.0
            && let Some(result) = perform::plainly(transfer)
        {
            return run_plainly(operation.0, result);
        }
        self.run_otherwise(operation.0)
    }

    #[inline(never)]
    fn run_otherwise(&mut self, mut work: Work) -> Result<Completion> {
        if self.has_size_limit && work.grows() {
            return Ok(self.wait_for(work, None)?.expect("without a deadline there is an answer"));
        }
        let result = perform::perform(&mut work, self.root.as_deref(), &self.never, true);
        let result = result.map(|output| output.expect("it has waited"));
        // Who waits for it waits for the last handle to be closed, too.
        succeeded(Completion::of(0, work, result).0)
    }

    /// As [`Engine::run`], until `deadline`; `None` when it passes: the operation is cancelled then, and what it is at, it may still do. Done by io_uring
    /// or a thread, unless it can be done at once. Completions of others that come meanwhile are kept for later.
    ///
    /// # Errors
    /// As of [`Engine::run`].
    pub fn run_until(&mut self, operation: Operation, deadline: Instant) -> Result<Option<Completion>> {
        self.check(&operation)?;
        self.inline_bytes = INLINE_BYTES_OF_A_TURN;
        let mut work = operation.0;
        match self.at_once(&mut work) {
            Some(result) => succeeded(self.completion_of(0, work, result)).map(Some),
            None => self.wait_for(work, Some(deadline)),
        }
    }

    fn wait_for(&mut self, work: Work, deadline: Option<Instant>) -> Result<Option<Completion>> {
        // What was given up before may be in its place.
        if !self.wait(deadline, |engine| engine.under_way() <= engine.in_flight_max)? {
            self.give_back(work.into_parts().1);
            return Ok(None);
        }
        let key = self.enqueue(Whose::Run, work, Vec::new());
        let waited = self.wait(deadline, |engine| engine.answer.is_some());
        if !matches!(waited, Ok(true)) {
            self.give_up(key);
        }
        // It may have come at the last moment.
        match (self.answer.take(), waited) {
            (Some(answer), _) => succeeded(answer).map(Some),
            (None, waited) => waited.map(|_| None),
        }
    }

    /// Nobody waits for it any more.
    fn give_up(&mut self, key: u32) {
        // Once it has ended, its place may be another's.
        if let Some(entry) = self.entries[key as usize].as_mut().filter(|entry| entry.whose == Whose::Run) {
            entry.whose = Whose::Nobody;
            self.cancel_entry(key);
            let _ = self.start();
        }
    }

    /// As [`Engine::try_submit`], and begins nothing, also where it is armed: [`Engine::start_submitted`] does. For bindings.
    #[doc(hidden)]
    #[inline]
    pub fn try_submit_unbegun(&mut self, token: u64, mut operation: Operation) -> Result<Submitted<Operation>> {
        self.check(&operation)?;
        if !self.has_room(1) {
            return Ok(Submitted::Full(operation));
        }
        self.in_flight += 1;
        // Where it is: moving it costs more than looking at it.
        match self.at_once(&mut operation.0) {
            Some(result) => self.end_at_once(token, operation.0, result),
            None => _ = self.enqueue(Whose::Token(token), operation.0, Vec::new()),
        }
        Ok(Submitted::Submitted)
    }

    /// The usual end, by the short way: some 40 ns of moving things about are a tenth of a read of the page cache.
    #[inline]
    fn end_at_once(&mut self, token: u64, work: Work, result: std::result::Result<Output, Errno>) {
        match (result, work) {
            (
                Ok(Output::Count(count)),
                Work::Transfer(Transfer { file, memory: Pieces::One(buffer), cut_short_by: None, .. }),
            ) => {
                let outcome = Ok(Output::Count(count));
                self.ready.push_back(Completion { token, outcome, buffer, buffers: Vec::new(), cut_short_by: None });
                if let Some(last) = file.into_last() {
                    self.close_apart(last);
                }
                if self.is_armed {
                    self.keep_readable();
                }
            }
            (result, work) => self.complete(token, work, result),
        }
    }

    /// Submits an operation, if fewer than [`EngineOptions::in_flight_max`] are in flight. Its completion brings back `token`, which is for the caller: two
    /// may be the same. Never waits: what needs no waiting is done in the call, and its completion is there; the rest is begun by
    /// [`Engine::start`], [`Engine::arm`], or when completions are taken and none is there, all that was submitted meanwhile with one
    /// system call.
    ///
    /// # Errors
    /// [`Error::Forked`]: it was not taken. Where it cannot be begun for lack of memory or threads, it is in flight, and whoever begins or takes is told.
    #[inline]
    pub fn try_submit(&mut self, token: u64, operation: Operation) -> Result<Submitted<Operation>> {
        let submitted = self.try_submit_unbegun(token, operation)?;
        self.start_if_armed();
        Ok(submitted)
    }

    /// Submits operations of which each begins when the one before it has succeeded; if there is room for all of them. When one fails, is cancelled,
    /// or writes less than it was to, those behind it complete with ECANCELED, undone. Otherwise as [`Engine::try_submit`].
    ///
    /// # Errors
    /// As of [`Engine::try_submit`]; [`Error::Refused`] for more than can ever be in flight.
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
        if !self.has_room(chain.len()) {
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

    /// Begins what was submitted and could not be done at once. [`Engine::arm`] does so too, and who waits for completions; only who does neither
    /// for a while needs this. Does not wait.
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

    /// As [`Engine::start`]; in an engine that is armed as what is submitted begins by itself. For bindings.
    #[doc(hidden)]
    pub fn start_submitted(&mut self) -> Result<()> {
        if !self.is_armed {
            return self.start();
        }
        self.start_if_armed();
        Ok(())
    }

    /// Has the ring begin what it has. Where that is refused by now, the threads get what the kernel has not taken.
    fn start_ring(&mut self, start: impl Fn(&mut Ring) -> std::io::Result<()>) -> std::io::Result<()> {
        let Some(ring) = &mut self.ring else { return Ok(()) };
        let begun = start(ring);
        for (key, work) in ring.take_back() {
            self.leave_to_threads(key, work);
        }
        begun
    }

    /// The next completion, if there is one now. Never waits.
    ///
    /// # Errors
    /// As of [`Engine::start`].
    #[inline]
    pub fn try_completion(&mut self) -> Result<Option<Completion>> {
        self.check_owner()?;
        match self.take() {
            Some(ready) => Ok(Some(ready)),
            None => self.look_and_take(),
        }
    }

    fn look_and_take(&mut self) -> Result<Option<Completion>> {
        self.look()?;
        let taken = self.take();
        if taken.is_none() {
            self.inline_bytes = INLINE_BYTES_OF_A_TURN;
        }
        Ok(taken)
    }

    /// The next completion. Waits for it.
    ///
    /// # Errors
    /// As of [`Engine::start`]; [`Error::Refused`] when nothing is in flight.
    #[inline]
    pub fn completion(&mut self) -> Result<Completion> {
        // What was answered at once is moved once: a completion is some 180 bytes.
        if self.owner.is_current()
            && let Some(ready) = self.take()
        {
            self.inline_bytes = INLINE_BYTES_OF_A_TURN;
            return Ok(ready);
        }
        Ok(self.completion_by(None)?.expect("without a deadline there is one"))
    }

    /// As [`Engine::completion`], until `deadline`; `None` when it passes, and the operations stay in flight.
    ///
    /// # Errors
    /// As of [`Engine::completion`].
    pub fn completion_until(&mut self, deadline: Instant) -> Result<Option<Completion>> {
        self.completion_by(Some(deadline))
    }

    fn completion_by(&mut self, deadline: Option<Instant>) -> Result<Option<Completion>> {
        self.check_owner()?;
        if self.in_flight == 0 {
            return Err(Error::Refused(
                "nothing is in flight, so nothing completes: submit something first".to_owned(),
            ));
        }
        self.inline_bytes = INLINE_BYTES_OF_A_TURN;
        self.wait(deadline, |engine| !engine.ready.is_empty())?;
        Ok(self.take())
    }

    #[inline]
    fn take(&mut self) -> Option<Completion> {
        let completion = self.ready.pop_front()?;
        self.in_flight -= 1;
        Some(completion)
    }

    /// Operations that were submitted, whose completions have not been taken.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Gives up what was submitted with `token`, and in chains what comes after it. Each completes all the same: with ECANCELED; or, where it could not be
    /// stopped any more, as if nothing had been said. Does not wait. False: nothing with that token has yet to complete.
    ///
    /// # Errors
    /// As of [`Engine::start`].
    pub fn cancel(&mut self, token: u64) -> Result<bool> {
        self.check_owner()?;
        let mut found = false;
        for key in 0..self.entries.len() {
            let Some(entry) = &mut self.entries[key] else { continue };
            // A chain's last is the first here.
            if let Some(last) = entry.rest.iter().rposition(|(next, _)| *next == token) {
                let undone: Vec<_> = entry.rest.drain(..=last).rev().collect();
                self.complete_undone(undone);
                found = true;
            }
            if self.entries[key].as_ref().is_some_and(|entry| entry.whose == Whose::Token(token)) {
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
            (Some(cancel), _) => self.pool.cancel(cancel),
            (None, Some(ring)) => match ring.cancel(key) {
                Some(mut work) => {
                    let result = work.failed(Errno::CANCELED);
                    self.end(key, work, result);
                }
                None => self.all_begun = false,
            },
            (None, None) => unreachable!("without a ring everything is at the threads"),
        }
    }

    /// For an event loop: asks that the descriptor become readable when an operation completes, and begins what was submitted. True: there is no
    /// completion now, go back to the loop. False: there is one, take it. What is submitted while the engine is armed begins by itself: the first at
    /// once; where there are more, the descriptor becomes readable, and the rest begins when the loop looks for completions or arms again, with
    /// one system call for all of it. Does not wait.
    ///
    /// # Errors
    /// As of [`Engine::start`].
    pub fn arm(&mut self) -> Result<bool> {
        self.check_owner()?;
        self.inline_bytes = INLINE_BYTES_OF_A_TURN;
        self.nudge.drain();
        self.is_nudged = false;
        self.pool.doorbell().drain();
        if let (false, Some(ring)) = (self.is_ring_watched, &self.ring) {
            self.pollable.add(ring).map_err(Error::system("watching the ring"))?;
            self.is_ring_watched = true;
        }
        self.is_armed = true;
        if let Err(error) = self.look() {
            // The loop comes again, and tries again.
            self.keep_readable();
            return Err(error);
        }
        self.has_begun_one = false;
        if !self.ready.is_empty() {
            self.keep_readable();
            return Ok(false);
        }
        if self.is_stuck() {
            // Nothing would ever wake the loop: it comes again, and tries again.
            self.keep_readable();
        }
        Ok(true)
    }

    /// Takes [`Engine::arm`] back.
    pub fn disarm(&mut self) {
        self.is_armed = false;
    }

    /// Waits until all that was submitted has ended, and its threads too, and closes. Completions that were not taken are dropped: take them first where they matter. To
    /// cancel what is in flight instead, and not to wait, drop the engine.
    ///
    /// # Errors
    /// As of [`Engine::start`]; it is closed then as if it had been dropped.
    pub fn close(self) -> Result<()> {
        self.closed(None).map(drop)
    }

    /// As [`Engine::close`], until `deadline`; false when it passes: what is left is cancelled. A thread that still closes a file that an operation had the
    /// last handle of is not waited for.
    ///
    /// # Errors
    /// As of [`Engine::close`].
    pub fn close_until(self, deadline: Instant) -> Result<bool> {
        self.closed(Some(deadline))
    }

    fn closed(mut self, deadline: Option<Instant>) -> Result<bool> {
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

    /// Whether this process made the engine, and the files.
    #[inline]
    fn check(&self, operation: &Operation) -> Result<()> {
        self.check_owner()?;
        match operation.0.files().into_iter().flatten().all(File::is_own) {
            true => Ok(()),
            false => Err(Error::Forked),
        }
    }

    /// Cancels all that is in flight. For bindings.
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

    /// Waits until all that was submitted has ended, and all that was given up; completions stay to be taken. False at the deadline. For bindings.
    #[doc(hidden)]
    pub fn settle(&mut self, deadline: Option<Instant>) -> Result<bool> {
        self.check_owner()?;
        self.wait(deadline, |engine| engine.under_way() == 0)
    }

    /// Waits until all that was given up has ended. For bindings.
    #[doc(hidden)]
    pub fn settle_given_up(&mut self) -> Result<bool> {
        self.wait(None, |engine| engine.entries.iter().flatten().all(|entry| entry.whose != Whose::Nobody))
    }

    /// Whether this process is a fork of the one that made the handle. For bindings.
    #[doc(hidden)]
    pub fn is_forked(&self) -> bool {
        self.owner.is_forked()
    }

    /// How many operations can be in flight. For bindings.
    #[doc(hidden)]
    pub fn in_flight_max(&self) -> usize {
        self.in_flight_max
    }

    /// An operation given up by `run_until` has a place too, until it has ended. For bindings.
    #[doc(hidden)]
    pub fn has_room(&self, operations: usize) -> bool {
        self.in_flight + operations <= self.in_flight_max && self.under_way() + operations <= self.in_flight_max
    }

    fn under_way(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    #[inline]
    fn at_once(&mut self, work: &mut Work) -> Option<std::result::Result<Output, Errno>> {
        match work {
            Work::Transfer(transfer)
                if !(transfer.writes && self.has_size_limit) && transfer.bytes() <= self.inline_bytes =>
            {
                let answer = perform::at_once(transfer);
                self.inline_bytes = self.inline_bytes.saturating_sub(transfer.done.max(BYTES_OF_A_CALL));
                answer
            }
            _ => None,
        }
    }

    /// Begins an operation, and what comes after it in a chain, as far as that is done at once.
    fn begin(&mut self, mut token: u64, mut work: Work, mut rest: Vec<(u64, Operation)>) {
        while let Some(result) = self.at_once(&mut work) {
            let goes_on = is_whole(&work, &result);
            self.complete(token, work, result);
            if !goes_on {
                return self.complete_undone(rest.into_iter().rev());
            }
            match rest.pop() {
                Some((next, operation)) => (token, work) = (next, operation.0),
                None => return,
            }
        }
        self.enqueue(Whose::Token(token), work, rest);
    }

    /// Has the ring do it, or a thread, once it is started.
    fn enqueue(&mut self, whose: Whose, work: Work, rest: Vec<(u64, Operation)>) -> u32 {
        let key = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() as u32 - 1
        });
        self.entries[key as usize] = Some(Entry { whose, rest, is_cancelled: false, tries: 0, thread: None });
        self.assign(key, work);
        key
    }

    /// To the ring, or to the threads.
    fn assign(&mut self, key: u32, mut work: Work) {
        self.all_begun = false;
        // What the call that begins it may copy is of the same measure as what is answered at once.
        if let Work::Transfer(transfer) = &mut work
            && !transfer.file.is_direct()
        {
            let left = transfer.bytes() - transfer.done;
            transfer.is_apart = left > self.inline_bytes;
            self.inline_bytes = self.inline_bytes.saturating_sub(left);
        }
        match &mut self.ring {
            // The signal of a passed limit would end the process: the threads do not hear it.
            Some(ring) if ring.supports(&work) && !(self.has_size_limit && work.grows()) => ring.push(key, work),
            _ => self.leave_to_threads(key, work),
        }
    }

    fn leave_to_threads(&mut self, key: u32, work: Work) {
        self.all_begun = false;
        let cancel = self.pool.push(key, work);
        let entry = self.entries[key as usize].as_mut().expect("it is in flight");
        if entry.is_cancelled {
            self.pool.cancel(&cancel);
        }
        entry.thread = Some(cancel);
    }

    /// In an engine that is armed what was submitted begins by itself: see [`Engine::arm`]. Where it cannot be begun for now, the loop comes again and
    /// tries, and is told what is wrong.
    #[inline]
    fn start_if_armed(&mut self) {
        if self.is_armed && !self.all_begun && !self.is_nudged {
            self.start_or_nudge();
        }
    }

    fn start_or_nudge(&mut self) {
        if !std::mem::replace(&mut self.has_begun_one, true) {
            match self.start() {
                Ok(()) if !self.is_stuck() => return,
                _ => self.all_begun = false,
            }
        }
        self.keep_readable();
    }

    fn keep_readable(&mut self) {
        if !std::mem::replace(&mut self.is_nudged, true) {
            self.nudge.ring();
        }
    }

    /// Whether something is still to be begun, after it has been tried: what is under way may never end, and be no occasion to try again.
    fn is_stuck(&self) -> bool {
        !self.all_begun
    }

    /// Sees to it that there is a completion in `ready`, if there is any. Begins what waits, if there is none.
    fn look(&mut self) -> Result<()> {
        self.reap_and_start(&|engine: &mut Engine| !engine.ready.is_empty())
    }

    /// Takes what has ended, and begins what is to be begun, until there is enough, or nothing of both. What has ended may ask for more to be begun,
    /// and that may have ended by then.
    fn reap_and_start(&mut self, is_enough: &impl Fn(&mut Engine) -> bool) -> Result<()> {
        loop {
            let has_ended = self.reap(is_enough);
            self.all_begun &= self.ring.as_ref().is_none_or(|ring| ring.unbegun() == 0);
            if is_enough(self) || self.all_begun && !has_ended {
                return Ok(());
            }
            self.start()?;
            // The system takes nothing for now, and nothing has ended that makes room.
            if !self.all_begun && !self.reap(is_enough) {
                return Ok(());
            }
        }
    }

    /// Takes what has ended, until there is enough of it. Whether there was anything.
    fn reap(&mut self, is_enough: &impl Fn(&mut Engine) -> bool) -> bool {
        let mut any = false;
        while !is_enough(self) {
            if let Some((key, work, result)) = self.ring.as_mut().and_then(Ring::ended) {
                self.judge(key, work, result);
            } else if let Some(ended) = self.pool.ended() {
                self.end(ended.key, ended.work, ended.result);
            } else {
                break;
            }
            any = true;
        }
        any
    }

    /// What the ring says of an operation is its end, or not.
    fn judge(&mut self, key: u32, mut work: Work, result: std::result::Result<Option<Output>, Errno>) {
        let is_cancelled = self.entries[key as usize].as_ref().is_some_and(|entry| entry.is_cancelled);
        match result {
            Ok(Some(output)) => self.end(key, work, Ok(output)),
            // Cut short, or the thread that began it has ended, which the kernel takes for a reason to stop.
            Ok(None) | Err(Errno::CANCELED | Errno::INTR | Errno::AGAIN) if is_cancelled => {
                let result = work.failed(Errno::CANCELED);
                self.end(key, work, result);
            }
            Ok(None) => self.assign(key, work),
            Err(Errno::CANCELED | Errno::INTR) if self.is_tried_again(key) => self.assign(key, work),
            // A file system that says so itself says so to a thread, too: then it is the answer.
            Err(Errno::CANCELED | Errno::INTR) => self.leave_to_threads(key, work),
            // It would have to wait in a way that the ring does not.
            Err(Errno::AGAIN) => self.leave_to_threads(key, work),
            Err(error) => {
                let result = work.failed(error);
                self.end(key, work, result);
            }
        }
    }

    /// Counts how often an operation was stopped in the ring, as it is when the thread that began it has ended.
    fn is_tried_again(&mut self, key: u32) -> bool {
        let entry = self.entries[key as usize].as_mut().expect("it is in flight");
        entry.tries += 1;
        entry.tries < TRIES
    }

    /// An operation has ended.
    fn end(&mut self, key: u32, work: Work, result: std::result::Result<Output, Errno>) {
        let Entry { whose, mut rest, is_cancelled, .. } = self.entries[key as usize].take().expect("it was in flight");
        self.free.push(key);
        match whose {
            Whose::Run => self.answer = Some(self.completion_of(0, work, result)),
            Whose::Nobody => {
                if let Ok(Output::File(file)) = self.completion_of(0, work, result).outcome {
                    self.give_back([Some(file), None]);
                }
            }
            Whose::Token(token) => {
                let goes_on = is_whole(&work, &result) && !is_cancelled;
                self.complete(token, work, result);
                match (goes_on, rest.pop()) {
                    (true, Some((next, operation))) => self.begin(next, operation.0, rest),
                    (false, Some(next)) => self.complete_undone(std::iter::once(next).chain(rest.into_iter().rev())),
                    (_, None) => {}
                }
            }
        }
    }

    fn complete(&mut self, token: u64, work: Work, result: std::result::Result<Output, Errno>) {
        let completion = self.completion_of(token, work, result);
        self.ready.push_back(completion);
        if self.is_armed {
            self.keep_readable();
        }
    }

    fn completion_of(&mut self, token: u64, work: Work, result: std::result::Result<Output, Errno>) -> Completion {
        let (completion, files) = Completion::of(token, work, result);
        self.give_back(files);
        completion
    }

    /// Gives handles of files up.
    fn give_back(&mut self, files: [Option<File>; 2]) {
        for last in files.into_iter().flatten().filter_map(File::into_last) {
            self.close_apart(last);
        }
    }

    /// A last handle's file is closed by a thread: that may wait, as for a file server's answer.
    #[cold]
    fn close_apart(&mut self, last: Opened) {
        self.pool.push_close(last);
        if self.pool.start().is_err() {
            // There is no thread to be had for now.
            self.all_begun = false;
        }
    }

    fn complete_undone(&mut self, operations: impl IntoIterator<Item = (u64, Operation)>) {
        for (token, Operation(work)) in operations {
            self.complete(token, work, Err(Errno::CANCELED));
        }
    }

    /// Waits until it is there; false at the deadline.
    fn wait(&mut self, deadline: Option<Instant>, is_there: impl Fn(&mut Engine) -> bool) -> Result<bool> {
        let failed = || Error::system("waiting for operations on files");
        loop {
            self.reap(&is_there);
            if is_there(self) {
                return Ok(true);
            }
            self.pool.start().map_err(Error::system("beginning operations on files"))?;
            if let (Some(ring), None, 0) = (&self.ring, deadline, self.pool.in_flight())
                && !ring.is_empty()
                && !ring.is_refused()
            {
                // With one system call, what is to begin and the wait.
                self.start_ring(Ring::wait).map_err(failed())?;
                continue;
            }
            failpoint("engine waits: looked");
            self.pool.doorbell().drain();
            self.reap_and_start(&is_there)?;
            if is_there(self) {
                // Of what is left a loop is to hear.
                self.pool.ring_again();
                return Ok(true);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(false);
            }
            if self.is_stuck() {
                std::thread::yield_now();
                continue;
            }
            let mut bells = vec![self.pool.as_fd()];
            bells.extend(self.ring.as_ref().map(|ring| ring.as_fd()));
            poll_until(&bells, [None, None], deadline).map_err(failed())?;
        }
    }
}

impl Drop for Engine {
    /// Cancels what is in flight, and does not wait for it.
    fn drop(&mut self) {
        // A child's descriptors of these numbers are somebody else's, and so is the memory of what was in flight.
        if !self.owner.is_current() {
            std::mem::forget((std::mem::take(&mut self.entries), std::mem::take(&mut self.ready), self.answer.take()));
            return;
        }
        // The ring sees to what it has.
        for cancel in self.entries.iter().flatten().filter_map(|entry| entry.thread.as_ref()) {
            self.pool.cancel(cancel);
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
    /// As [`AsFd`], for runtimes that ask for the number.
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// The usual end of what was run, by the short way: as [`Engine::end_at_once`].
#[inline]
fn run_plainly(work: Work, result: std::result::Result<Output, Errno>) -> Result<Completion> {
    match (result, work) {
        (
            Ok(Output::Count(count)),
            Work::Transfer(Transfer { memory: Pieces::One(buffer), cut_short_by: None, .. }),
        ) => Ok(Completion {
            token: 0,
            outcome: Ok(Output::Count(count)),
            buffer,
            buffers: Vec::new(),
            cut_short_by: None,
        }),
        (result, work) => succeeded(Completion::of(0, work, result).0),
    }
}

fn succeeded(completion: Completion) -> Result<Completion> {
    match completion.outcome {
        Err(error) => Err(error),
        _ => Ok(completion),
    }
}

/// Whether a chain goes on after it.
fn is_whole(work: &Work, result: &std::result::Result<Output, Errno>) -> bool {
    let is_written = match work {
        Work::Transfer(transfer) => !transfer.writes || transfer.done == transfer.bytes(),
        _ => true,
    };
    result.is_ok() && is_written && work.cut_short_by().is_none()
}
