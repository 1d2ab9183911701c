//! Threads that wait: for operations that io_uring does not support, and for all if it is refused. The engine starts
//! them on demand, up to a bound, and they end with it. They take jobs from the queue in order; the jobs end in any
//! order.
//!
//! A job that would wait for another process, at a pipe or a FIFO, continues in a thread of its own, beyond the bound.
//! So a job that waits for ever delays no other. Locks protect everything that the threads share.

use crate::cancel::Cancel;
use crate::file::{Opened, Root};
use crate::operation::{OnPath, Outcome, Output, Work};
use crate::perform::{open_file, perform};
use pelton_lane::failpoint;
use pelton_os::{Doorbell, Owner, block_signals, locked, wait_on};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

/// The most threads that stay at FIFOs that no process opens. Otherwise a process that creates FIFOs, and can observe
/// cancels, could exhaust this process's threads.
const STRANDED_MAX: usize = 256;
/// Threads of this process that wait to open a FIFO for a cancelled job. Relaxed: only a number.
static STRANDED: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug)]
pub(super) struct Pool {
    owner: Owner,
    shared: Arc<Shared>,
    /// Jobs that `start` hands to the threads, all together.
    waiting: Vec<Job>,
    threads: Vec<JoinHandle<()>>,
    threads_max: usize,
    /// Jobs pushed whose ends were not taken.
    in_flight: usize,
}

#[derive(Debug)]
struct Shared {
    root: Option<Arc<Root>>,
    jobs: Mutex<Jobs>,
    job_available: Condvar,
    ended: Mutex<VecDeque<Ended>>,
    /// Rung when a job ends and no other ended one is there.
    doorbell: Doorbell,
}

#[derive(Debug, Default)]
struct Jobs {
    queue: VecDeque<Job>,
    /// Threads that wait for a job.
    idle: usize,
    /// Files to be closed, without a completion.
    closing: usize,
    /// Threads with a single job each.
    own_threads: Vec<JoinHandle<()>>,
    is_closed: bool,
}

#[derive(Debug)]
enum Job {
    /// The operation is in the state until a thread takes it, or a cancel does.
    Do(Arc<JobState>),
    /// Closes a file without any other handle. No completion reports it.
    Close(Opened),
}

#[derive(Debug)]
pub(super) struct JobState {
    cancel: Cancel,
    /// The job itself, while no thread uses it. A cancel holds this lock.
    parked: Mutex<Option<Parked>>,
}

/// A job before its thread takes it; or while its own thread waits for another process, and will take it afterwards.
#[derive(Debug)]
struct Parked {
    key: u32,
    work: Work,
    shared: Option<Arc<Shared>>,
}

/// A job that has ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) key: u32,
    pub(super) work: Work,
    pub(super) result: Outcome,
}

impl Pool {
    pub(super) fn new(threads_max: usize, root: Option<Arc<Root>>) -> std::io::Result<Pool> {
        let shared = Shared {
            root,
            jobs: Mutex::default(),
            job_available: Condvar::new(),
            ended: Mutex::default(),
            doorbell: Doorbell::own()?,
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

    /// Adds a job, for [`Pool::start`]. Returns what cancels it.
    pub(super) fn push(&mut self, key: u32, work: Work) -> Arc<JobState> {
        let parked = Mutex::new(Some(Parked { key, work, shared: None }));
        let job = Arc::new(JobState { cancel: Cancel::new(), parked });
        self.waiting.push(Job::Do(job.clone()));
        self.in_flight += 1;
        job
    }

    /// Adds a file for a thread to close, because closing may wait.
    pub(super) fn push_close(&mut self, file: Opened) {
        locked(&self.shared.jobs).closing += 1;
        self.waiting.push(Job::Close(file));
    }

    /// Cancels a job. One that has not begun ends here and now, whatever the threads do. A copy ends at its next piece.
    /// A thread that waits for a pipe or a socket wakes up. A thread that opens a FIFO remains, and the job ends
    /// here. Disk I/O continues to its end.
    pub(super) fn cancel(&self, job: &JobState) {
        let mut parked = locked(&job.parked);
        job.cancel.set();
        let Some(Parked { key, mut work, shared }) = parked.take() else { return };
        // Its thread finds no job, and ends. Counted under the lock, before that thread counts its end.
        STRANDED.fetch_add(usize::from(shared.is_some() && matches!(work, Work::OnPath(_, OnPath::Open(_)))), Relaxed);
        drop(parked);
        let result = work.failed(Errno::CANCELED);
        self.shared.end(key, work, result);
    }

    /// Hands the jobs to the threads.
    pub(super) fn start(&mut self) -> std::io::Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let mut jobs = locked(&self.shared.jobs);
        jobs.queue.extend(self.waiting.drain(..));
        let (queued, idle) = (jobs.queue.len(), jobs.idle);
        drop(jobs);
        match queued {
            1 => self.shared.job_available.notify_one(),
            _ => self.shared.job_available.notify_all(),
        }
        for _ in idle..queued {
            if self.threads.len() == self.threads_max {
                break;
            }
            let shared = self.shared.clone();
            let started = std::thread::Builder::new().name("pelton-file".to_owned()).spawn(move || shared.serve());
            match started {
                Ok(thread) => self.threads.push(thread),
                // The existing threads suffice. Without any, the jobs go back, and the caller can retry.
                Err(_) if !self.threads.is_empty() => break,
                Err(error) => {
                    self.waiting.extend(locked(&self.shared.jobs).queue.drain(..));
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Ends the threads after their jobs, and waits for that; but not while one closes a file, unless `waits`.
    pub(super) fn finish(&mut self, waits: bool) {
        let mut jobs = locked(&self.shared.jobs);
        if !waits && jobs.closing > 0 {
            return;
        }
        jobs.is_closed = true;
        let own_threads = std::mem::take(&mut jobs.own_threads);
        drop(jobs);
        self.shared.job_available.notify_all();
        for thread in self.threads.drain(..).chain(own_threads) {
            let _ = thread.join();
        }
    }

    /// The next job that has ended, if any.
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
        &self.shared.doorbell
    }

    /// Rings the drained doorbell again if ended jobs are left.
    pub(super) fn ring_again(&self) {
        if self.in_flight > 0 && !locked(&self.shared.ended).is_empty() {
            self.shared.doorbell.ring();
        }
    }
}

impl JobState {
    fn take(&self) -> Option<Parked> {
        locked(&self.parked).take()
    }
}

impl Shared {
    /// The loop of a thread.
    fn serve(self: &Arc<Shared>) {
        block_signals();
        loop {
            let mut jobs = locked(&self.jobs);
            let job = loop {
                match jobs.queue.pop_front() {
                    Some(job) => break job,
                    None if jobs.is_closed => return,
                    None => {
                        jobs.idle += 1;
                        jobs = wait_on(&self.job_available, &self.jobs, jobs, None);
                        jobs.idle -= 1;
                    }
                }
            };
            drop(jobs);
            match job {
                Job::Do(job) => {
                    // A job that was cancelled before it began has ended already.
                    let Some(Parked { key, mut work, .. }) = job.take() else { continue };
                    match perform(&mut work, self.root.as_deref(), &job.cancel, false).transpose() {
                        Some(result) => self.end(key, work, result),
                        None => self.move_to_own_thread(key, work, job),
                    }
                }
                Job::Close(file) => {
                    drop(file);
                    locked(&self.jobs).closing -= 1;
                }
            }
        }
    }

    /// Moves a job that waits for another process to a thread of its own.
    fn move_to_own_thread(self: &Arc<Shared>, key: u32, mut work: Work, job: Arc<JobState>) {
        let opens = if let Work::OnPath(path, OnPath::Open(how)) = &work { Some((path.clone(), *how)) } else { None };
        if opens.is_some() && STRANDED.load(Relaxed) >= STRANDED_MAX {
            return self.end(key, work, Err(Errno::MFILE));
        }
        let mut parked = locked(&job.parked);
        if job.cancel.is_cancelled() {
            let result = work.failed(Errno::CANCELED);
            return self.end(key, work, result);
        }
        *parked = Some(Parked { key, work, shared: Some(self.clone()) });
        drop(parked);
        let (ours, root, is_open) = (job.clone(), self.root.clone(), opens.is_some());
        let body = move || {
            block_signals();
            match opens {
                // The thread owns nothing of the engine while it waits, so the engine can end without it.
                Some((path, how)) => {
                    let opened = open_file(root.as_deref(), &path, how).map(Output::File);
                    match ours.take() {
                        Some(Parked { key, work, shared }) => shared.expect("parked with it").end(key, work, opened),
                        None => drop(STRANDED.fetch_sub(1, Relaxed)),
                    }
                }
                None => {
                    if let Some(Parked { key, work, shared }) = ours.take() {
                        shared.expect("parked with it").perform_waiting(key, work, &ours.cancel);
                    }
                }
            }
        };
        match std::thread::Builder::new().name("pelton-file-own".to_owned()).spawn(body) {
            Ok(_) if is_open => {}
            Ok(thread) => {
                let mut jobs = locked(&self.jobs);
                jobs.own_threads.retain(|thread| !thread.is_finished());
                jobs.own_threads.push(thread);
            }
            // Without a new thread, this one waits.
            Err(_) => match job.take() {
                Some(Parked { key, work, .. }) => self.perform_waiting(key, work, &job.cancel),
                None if is_open => drop(STRANDED.fetch_sub(1, Relaxed)),
                None => {}
            },
        }
    }

    fn perform_waiting(&self, key: u32, mut work: Work, cancel: &Cancel) {
        let result = perform(&mut work, self.root.as_deref(), cancel, true);
        self.end(key, work, result.map(|output| output.expect("it was allowed to wait")));
    }

    fn end(&self, key: u32, work: Work, result: Outcome) {
        let mut ended = locked(&self.ended);
        ended.push_back(Ended { key, work, result });
        let first = ended.len() == 1;
        drop(ended);
        if first {
            self.doorbell.ring();
        }
        failpoint("engine's thread: ended one");
    }
}

impl Drop for Pool {
    /// Discards the jobs that no thread has begun. A thread finishes its current job, with all that belongs to it. It
    /// waits for no thread, but the dropped jobs may close files.
    fn drop(&mut self) {
        // A forked child has none of the threads, and perhaps a lock that one of them held. The memory of jobs in
        // flight is the parent's.
        if !self.owner.is_current() {
            std::mem::forget((
                std::mem::take(&mut self.threads),
                std::mem::take(&mut self.waiting),
                self.shared.clone(),
            ));
            return;
        }
        let mut jobs = locked(&self.shared.jobs);
        jobs.is_closed = true;
        let left = std::mem::take(&mut jobs.queue);
        drop(jobs);
        self.shared.job_available.notify_all();
        // Cancelled jobs have ended already, and their ends are not taken any more; a thread may work for long.
        let ended = std::mem::take(&mut *locked(&self.shared.ended));
        drop((left, ended));
    }
}
