//! Threads that wait, for what io_uring does not do, and for everything where it is refused. They are started as they are needed, up to a
//! bound, and end with the engine. What an engine has asked for is taken from the queue in order, and comes back in any order.

use super::perform::perform;
use super::{Opened, Output, Root, Work};
use crate::os::{Bell, Owner, block_signals, locked};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, retry_on_intr};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;

#[derive(Debug)]
pub(super) struct Pool {
    owner: Owner,
    shared: Arc<Shared>,
    /// Not given to the threads yet: `start` does, all together.
    waiting: Vec<Job>,
    threads: Vec<JoinHandle<()>>,
    threads_max: usize,
    /// Given, and not taken back.
    in_flight: usize,
}

#[derive(Debug)]
struct Shared {
    root: Option<Arc<Root>>,
    jobs: Mutex<Jobs>,
    there_is_one: Condvar,
    /// Files that are to be closed, of which nobody hears.
    closing: AtomicUsize,
    ended: Mutex<VecDeque<Ended>>,
    /// Rung when something has ended after nothing had.
    bell: Bell,
}

#[derive(Debug, Default)]
struct Jobs {
    queue: VecDeque<Job>,
    /// Threads that wait for one.
    idle: usize,
    is_over: bool,
}

#[derive(Debug)]
enum Job {
    Do {
        key: u32,
        work: Work,
        cancel: Arc<Cancel>,
    },
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
            closing: AtomicUsize::new(0),
            ended: Mutex::default(),
            bell: Bell::new()?,
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
        let cancel = Arc::new(Cancel::default());
        self.waiting.push(Job::Do { key, work, cancel: cancel.clone() });
        cancel
    }

    /// Notes a file to be closed by a thread, for closing may wait.
    pub(super) fn push_close(&mut self, file: Opened) {
        self.shared.closing.fetch_add(1, Ordering::Relaxed);
        self.waiting.push(Job::Close(file));
    }

    /// Has the threads begin.
    pub(super) fn start(&mut self) -> std::io::Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let mut jobs = locked(&self.shared.jobs);
        self.in_flight += answered(&self.waiting);
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
                    self.in_flight -= answered(&self.waiting);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Ends the threads when they have done what they were given, and waits for that; not if one of them is still closing a file, unless `waits`.
    pub(super) fn finish(&mut self, waits: bool) {
        // Acquire: with the decrement, so that a thread seen to have closed its file is only to end.
        if !waits && self.shared.closing.load(Ordering::Acquire) > 0 {
            return;
        }
        locked(&self.shared.jobs).is_over = true;
        self.shared.there_is_one.notify_all();
        for thread in self.threads.drain(..) {
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

    pub(super) fn bell(&self) -> &Bell {
        &self.shared.bell
    }
}

/// How many there are that somebody waits for.
fn answered(jobs: &[Job]) -> usize {
    jobs.iter().filter(|job| matches!(job, Job::Do { .. })).count()
}

impl AsFd for Pool {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.bell.as_fd()
    }
}

impl Shared {
    /// A thread's life.
    fn serve(&self) {
        block_signals();
        loop {
            let mut jobs = locked(&self.jobs);
            let job = loop {
                match jobs.queue.pop_front() {
                    Some(job) => break job,
                    None if jobs.is_over => return,
                    None => {
                        jobs.idle += 1;
                        jobs = self.there_is_one.wait(jobs).unwrap_or_else(PoisonError::into_inner);
                        jobs.idle -= 1;
                    }
                }
            };
            drop(jobs);
            let (key, mut work, cancel) = match job {
                Job::Do { key, work, cancel } => (key, work, cancel),
                Job::Close(file) => {
                    drop(file);
                    self.closing.fetch_sub(1, Ordering::Release);
                    continue;
                }
            };
            let result = perform(&mut work, self.root.as_deref(), &cancel);
            let mut ended = locked(&self.ended);
            ended.push_back(Ended { key, work, result });
            let first = ended.len() == 1;
            drop(ended);
            if first {
                self.bell.ring();
            }
        }
    }
}

impl Drop for Pool {
    /// What no thread has begun is not done; what one is at, it ends, with all that belongs to it.
    fn drop(&mut self) {
        // A child has none of the threads, and perhaps a lock that one of them held.
        if !self.owner.is_current() {
            std::mem::forget(std::mem::take(&mut self.threads));
            return;
        }
        let mut jobs = locked(&self.shared.jobs);
        jobs.is_over = true;
        let left = std::mem::take(&mut jobs.queue);
        drop(jobs);
        self.shared.there_is_one.notify_all();
        drop(left);
    }
}

/// How a job is given up: what has not begun ends at once, a copy at its next piece, and who waits for a pipe or a socket is woken. What is at
/// a disk goes on.
#[derive(Debug, Default)]
pub(crate) struct Cancel {
    is_said: AtomicBool,
    /// Made by who waits for a stream, which may never have anything to say. None inside: there was no descriptor for it, or it is never said.
    bell: OnceLock<Option<Bell>>,
}

impl Cancel {
    /// What is never said.
    pub(super) fn never() -> Cancel {
        Cancel { is_said: AtomicBool::new(false), bell: OnceLock::from(None) }
    }

    pub(super) fn say(&self) {
        self.is_said.store(true, Ordering::Relaxed);
        // Either this finds the bell of who is about to wait, or that one finds that it is said.
        fence(Ordering::SeqCst);
        if let Some(Some(bell)) = self.bell.get() {
            bell.ring();
        }
    }

    pub(super) fn is_said(&self) -> bool {
        self.is_said.load(Ordering::Relaxed)
    }

    /// Waits until a stream is ready, or this is said.
    pub(super) fn wait_for(&self, stream: BorrowedFd<'_>, event: PollFlags) -> rustix::io::Result<()> {
        // Without a descriptor for it, it cannot be woken: the next bytes do.
        let bell = self.bell.get_or_init(|| Bell::new().ok());
        fence(Ordering::SeqCst);
        if self.is_said() {
            return Ok(());
        }
        let mut fds = vec![PollFd::from_borrowed_fd(stream, event)];
        fds.extend(bell.iter().map(|bell| PollFd::new(bell, PollFlags::IN)));
        retry_on_intr(|| poll(&mut fds, None)).map(drop)
    }
}
