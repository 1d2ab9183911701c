//! Threads that wait, for what io_uring does not do, and for everything where it is refused. They are started as they are needed, up to a
//! bound, and end with the engine. What an engine has asked for is taken from the queue in order, and comes back in any order.
//!
//! What would have one of them wait for somebody else, at a pipe or a FIFO, goes on in a thread of its own, beyond the bound: so what waits for ever
//! keeps nothing else waiting. All that the threads share is under locks.

use crate::file::{Opened, Root};
use crate::interrupt::Interrupt;
use crate::operation::{Output, Work};
use crate::perform::{open_file, perform};
use pelton_lane::failpoint;
use pelton_os::{Doorbell, Owner, block_signals, locked, wait_on};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, retry_on_intr};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

/// How many threads may be left at FIFOs that nobody opens before none is begun for another: whoever makes FIFOs, and knows when somebody gives them
/// up, shall not have all of the process's threads.
const LEFT_MAX: usize = 256;
/// Threads of the process that are left at a FIFO, of which nobody wants to hear. Relaxed: it is a number only.
static LEFT: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug)]
pub(super) struct Pool {
    owner: Owner,
    shared: Arc<Shared>,
    /// Not given to the threads yet: `start` does, all together.
    waiting: Vec<Job>,
    threads: Vec<JoinHandle<()>>,
    threads_max: usize,
    /// Noted, and not taken back.
    in_flight: usize,
}

#[derive(Debug)]
struct Shared {
    root: Option<Arc<Root>>,
    jobs: Mutex<Jobs>,
    there_is_one: Condvar,
    ended: Mutex<VecDeque<Ended>>,
    /// Rung when something has ended after nothing had.
    bell: Doorbell,
}

#[derive(Debug, Default)]
struct Jobs {
    queue: VecDeque<Job>,
    /// Threads that wait for one.
    idle: usize,
    /// Files that are to be closed, of which nobody hears.
    closing: usize,
    /// Threads with a job of their own, which end with that.
    apart: Vec<JoinHandle<()>>,
    is_over: bool,
}

#[derive(Debug)]
enum Job {
    /// What it is to do is kept there, until a thread takes it, or it is given up.
    Do(Arc<Cancel>),
    /// To close a file to which nobody has a handle any more, and of which nobody wants to hear.
    Close(Opened),
}

/// What a thread has done.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) key: u32,
    pub(super) work: Work,
    pub(super) result: Result<Output, Errno>,
}

impl Pool {
    pub(super) fn new(threads_max: usize, root: Option<Arc<Root>>) -> std::io::Result<Pool> {
        let shared = Shared {
            root,
            jobs: Mutex::default(),
            there_is_one: Condvar::new(),
            ended: Mutex::default(),
            bell: Doorbell::own()?,
        };
        let owner = Owner::current()?;
        Ok(Pool {
            owner,
            shared: Arc::new(shared),
            waiting: Vec::new(),
            threads: Vec::new(),
            threads_max,
            in_flight: 0,
        })
    }

    /// Notes a job, for [`Pool::start`]. Answers what cancels it.
    pub(super) fn push(&mut self, key: u32, work: Work) -> Arc<Cancel> {
        let given = Given { kept: Some(Kept { key, work, left_to: None }), ..Given::default() };
        let cancel = Arc::new(Cancel(Some(Mutex::new(given))));
        self.waiting.push(Job::Do(cancel.clone()));
        self.in_flight += 1;
        cancel
    }

    /// Notes a file to be closed by a thread, for closing may wait.
    pub(super) fn push_close(&mut self, file: Opened) {
        locked(&self.shared.jobs).closing += 1;
        self.waiting.push(Job::Close(file));
    }

    /// Gives up a job: what has not begun ends here and now, whatever the threads are at; a copy at its next piece, and who waits for a pipe or a socket
    /// is woken. Who waits for a FIFO to be opened is left to it, and what it was to do ends here. What is at a disk goes on.
    pub(super) fn cancel(&self, cancel: &Cancel) {
        if let Some(Kept { key, mut work, .. }) = cancel.say() {
            let result = work.failed(Errno::CANCELED);
            self.shared.end(key, work, result);
        }
    }

    /// Has the threads begin.
    pub(super) fn start(&mut self) -> std::io::Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let mut jobs = locked(&self.shared.jobs);
        jobs.queue.extend(self.waiting.drain(..));
        let (queued, idle) = (jobs.queue.len(), jobs.idle);
        drop(jobs);
        match queued {
            1 => self.shared.there_is_one.notify_one(),
            _ => self.shared.there_is_one.notify_all(),
        }
        for _ in idle..queued {
            if self.threads.len() == self.threads_max {
                break;
            }
            let shared = self.shared.clone();
            let started = std::thread::Builder::new().name("pelton-file".to_owned()).spawn(move || shared.serve());
            match started {
                Ok(thread) => self.threads.push(thread),
                // Those that are there will do. If there is none, all is as it was: it can be tried again.
                Err(_) if !self.threads.is_empty() => break,
                Err(error) => {
                    self.waiting.extend(locked(&self.shared.jobs).queue.drain(..));
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Ends the threads when they have done what they were given, and waits for that; not if one of them is still closing a file, unless `waits`.
    pub(super) fn finish(&mut self, waits: bool) {
        let mut jobs = locked(&self.shared.jobs);
        if !waits && jobs.closing > 0 {
            return;
        }
        jobs.is_over = true;
        let apart = std::mem::take(&mut jobs.apart);
        drop(jobs);
        self.shared.there_is_one.notify_all();
        for thread in self.threads.drain(..).chain(apart) {
            let _ = thread.join();
        }
    }

    /// Something that has ended, if anything has.
    pub(super) fn ended(&mut self) -> Option<Ended> {
        if self.in_flight == 0 {
            return None;
        }
        let ended = locked(&self.shared.ended).pop_front();
        self.in_flight -= usize::from(ended.is_some());
        ended
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    pub(super) fn doorbell(&self) -> &Doorbell {
        &self.shared.bell
    }

    /// Has the bell ring again that was silenced, if something has ended that was not taken.
    pub(super) fn ring_again(&self) {
        if self.in_flight > 0 && !locked(&self.shared.ended).is_empty() {
            self.shared.bell.ring();
        }
    }
}

impl AsFd for Pool {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.bell.as_fd()
    }
}

impl Shared {
    /// A thread's life.
    fn serve(self: &Arc<Shared>) {
        block_signals();
        loop {
            let mut jobs = locked(&self.jobs);
            let job = loop {
                match jobs.queue.pop_front() {
                    Some(job) => break job,
                    None if jobs.is_over => return,
                    None => {
                        jobs.idle += 1;
                        jobs = wait_on(&self.there_is_one, &self.jobs, jobs, None);
                        jobs.idle -= 1;
                    }
                }
            };
            drop(jobs);
            match job {
                Job::Do(cancel) => {
                    // Given up before it began, it has ended.
                    let Some(Kept { key, mut work, .. }) = cancel.take() else { continue };
                    match perform(&mut work, self.root.as_deref(), &*cancel, false).transpose() {
                        Some(result) => self.end(key, work, result),
                        None => self.leave(key, work, cancel),
                    }
                }
                Job::Close(file) => {
                    drop(file);
                    locked(&self.jobs).closing -= 1;
                }
            }
        }
    }

    /// Leaves to a thread of its own what waits for somebody else.
    fn leave(self: &Arc<Shared>, key: u32, work: Work, cancel: Arc<Cancel>) {
        let opens = if let Work::Open { path, how } = &work { Some((path.clone(), *how)) } else { None };
        if opens.is_some() && LEFT.load(Relaxed) >= LEFT_MAX {
            return self.end(key, work, Err(Errno::MFILE));
        }
        if let Some(Kept { key, mut work, .. }) = cancel.keep(Kept { key, work, left_to: Some(self.clone()) }) {
            let result = work.failed(Errno::CANCELED);
            return self.end(key, work, result);
        }
        let (ours, root, is_open) = (cancel.clone(), self.root.clone(), opens.is_some());
        let goes_on = move || {
            block_signals();
            match opens {
                // Nothing here is the engine's while it waits: it may be left alone with that.
                Some((path, how)) => {
                    let opened = open_file(root.as_deref(), &path, how).map(Output::File);
                    match ours.take() {
                        Some(Kept { key, work, left_to }) => left_to.expect("kept so").end(key, work, opened),
                        None => drop(LEFT.fetch_sub(1, Relaxed)),
                    }
                }
                None => {
                    if let Some(Kept { key, work, left_to }) = ours.take() {
                        left_to.expect("kept so").go_on(key, work, &ours);
                    }
                }
            }
        };
        match std::thread::Builder::new().name("pelton-file-own".to_owned()).spawn(goes_on) {
            Ok(_) if is_open => {}
            Ok(thread) => {
                let mut jobs = locked(&self.jobs);
                jobs.apart.retain(|thread| !thread.is_finished());
                jobs.apart.push(thread);
            }
            // There is none to be had: this one waits.
            Err(_) => match cancel.take() {
                Some(Kept { key, work, .. }) => self.go_on(key, work, &cancel),
                None if is_open => drop(LEFT.fetch_sub(1, Relaxed)),
                None => {}
            },
        }
    }

    fn go_on(&self, key: u32, mut work: Work, cancel: &Cancel) {
        let result = perform(&mut work, self.root.as_deref(), cancel, true);
        self.end(key, work, result.map(|output| output.expect("it has waited")));
    }

    fn end(&self, key: u32, work: Work, result: Result<Output, Errno>) {
        let mut ended = locked(&self.ended);
        ended.push_back(Ended { key, work, result });
        let first = ended.len() == 1;
        drop(ended);
        if first {
            self.bell.ring();
        }
        failpoint("engine's thread: ended one");
    }
}

impl Drop for Pool {
    /// What no thread has begun is not done; what one is at, it ends, with all that belongs to it.
    fn drop(&mut self) {
        // A child has none of the threads, and perhaps a lock that one of them held; nor is the memory of what was in flight its.
        if !self.owner.is_current() {
            std::mem::forget((
                std::mem::take(&mut self.threads),
                std::mem::take(&mut self.waiting),
                self.shared.clone(),
            ));
            return;
        }
        let mut jobs = locked(&self.shared.jobs);
        jobs.is_over = true;
        let left = std::mem::take(&mut jobs.queue);
        drop(jobs);
        self.shared.there_is_one.notify_all();
        // What was given up has ended already, and nobody takes that any more; a thread may be at work for long.
        let ended = std::mem::take(&mut *locked(&self.shared.ended));
        drop((left, ended));
    }
}

/// Whether a job was given up: see [`Pool::cancel`]. Without a lock in it, what is never given up.
#[derive(Debug)]
pub(crate) struct Cancel(Option<Mutex<Given>>);

/// What is known of a job besides.
#[derive(Debug, Default)]
struct Given {
    is_given_up: bool,
    /// Made by who waits for a stream, which may never have anything to say.
    bell: Option<Arc<Doorbell>>,
    /// The job itself, while no thread has a use for it.
    kept: Option<Kept>,
}

/// A job that waits for its thread; or whose own thread waits for somebody else, and has this to come back to.
#[derive(Debug)]
struct Kept {
    key: u32,
    work: Work,
    left_to: Option<Arc<Shared>>,
}

impl Cancel {
    /// What is never said.
    pub(super) fn never() -> Cancel {
        Cancel(None)
    }

    /// Answers a job that no thread has a use for.
    fn say(&self) -> Option<Kept> {
        let mut job = locked(self.0.as_ref()?);
        job.is_given_up = true;
        if let Some(bell) = &job.bell {
            bell.ring();
        }
        let kept = job.kept.take()?;
        // Its thread finds that nobody wants to hear.
        LEFT.fetch_add(usize::from(kept.left_to.is_some() && matches!(kept.work, Work::Open { .. })), Relaxed);
        Some(kept)
    }

    /// Keeps a job until somebody takes it; gives it back if it is given up already.
    fn keep(&self, kept: Kept) -> Option<Kept> {
        let mut job = locked(self.0.as_ref().expect("of a job"));
        if job.is_given_up {
            return Some(kept);
        }
        job.kept = Some(kept);
        None
    }

    fn take(&self) -> Option<Kept> {
        locked(self.0.as_ref()?).kept.take()
    }
}

impl Interrupt for Cancel {
    fn can_cancel(&self) -> bool {
        self.0.is_some()
    }

    fn is_cancelled(&self) -> bool {
        self.0.as_ref().is_some_and(|job| locked(job).is_given_up)
    }

    fn wait_for(&self, stream: BorrowedFd<'_>, event: PollFlags) -> rustix::io::Result<()> {
        let bell = match self.0.as_ref().map(locked) {
            Some(job) if job.is_given_up => return Ok(()),
            Some(mut job) => {
                if job.bell.is_none() {
                    // Without a descriptor for it, it cannot be woken: the next bytes do.
                    job.bell = Doorbell::own().ok().map(Arc::new);
                }
                job.bell.clone()
            }
            None => None,
        };
        let mut fds = vec![PollFd::from_borrowed_fd(stream, event)];
        fds.extend(bell.iter().map(|bell| PollFd::new(bell, PollFlags::IN)));
        retry_on_intr(|| poll(&mut fds, None)).map(drop)
    }
}
