//! A pool of threads that handle requests. The leader waits for a request and then handles it, while another thread
//! becomes the leader.

use super::leader::Inside;
use super::request::{Request, RequestStorage};
use super::responder::Responder;
use super::service::Service;
use super::session::ServiceShared;
use crate::body::{Body, RECORDS_PER_POLL};
use pelton_channel::{Error, Result};
use pelton_os::locked;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, TryLockError};
use std::thread;

/// What the threads of a pool share.
struct Pool<'a> {
    leader: Mutex<Leader<'a>>,
    shared: Arc<ServiceShared>,
}

/// What the leader has.
struct Leader<'a> {
    service: &'a mut Service,
    is_over: bool,
    /// Requests that a handler received when it polled for cancels. They are handled before newer ones.
    ahead: VecDeque<(Vec<u8>, Responder)>,
    ahead_bytes: usize,
}

impl Leader<'_> {
    /// Receives the next request, with its bytes in the buffer.
    fn next(&mut self, buffer: &mut Vec<u8>) -> Result<Responder> {
        match self.ahead.pop_front() {
            Some((bytes, responder)) => {
                self.ahead_bytes -= bytes.len();
                *buffer = bytes;
                Ok(responder)
            }
            None => Ok(self.service.receive()?.copy_into(buffer)),
        }
    }

    /// Receives what has come, for the next free threads, and with it cancels and departures. From
    /// [`RECORDS_PER_POLL`] requests on, or once they exceed the size of the largest request, it takes no more of them.
    fn receive_ahead(&mut self, bytes_max: u64) {
        while !self.is_over {
            let is_full = self.ahead.len() >= RECORDS_PER_POLL || self.ahead_bytes as u64 > bytes_max;
            let found = if is_full { self.service.try_receive_none() } else { self.service.try_receive() };
            // The thread that waits for a request gets the error.
            let Ok(Some(request)) = found else { return };
            let (bytes, responder) = request.into_parts();
            self.ahead_bytes += bytes.len();
            self.ahead.push_back((bytes, responder));
        }
    }
}

/// In a handler of a pool without a leader: receives what has come. Returns whether it did.
fn poll_in_handler(pool: NonNull<()>, shared: &Arc<ServiceShared>) -> bool {
    // SAFETY: `Service::run` gave this pointer to `Inside`, which keeps it only while the handler runs. The pool is in
    // the frame of `run`, which waits for its threads, and nothing here keeps a part of it.
    let pool = unsafe { pool.cast::<Pool<'_>>().as_ref() };
    if !Arc::ptr_eq(&pool.shared, shared) {
        return false;
    }
    let mut leader = match pool.leader.try_lock() {
        Ok(leader) => leader,
        Err(TryLockError::Poisoned(leader)) => leader.into_inner(),
        // The leader receives what comes.
        Err(TryLockError::WouldBlock) => return false,
    };
    leader.receive_ahead(shared.options.call_bytes_max);
    true
}

impl Service {
    /// Handles requests on `threads` threads, this one among them, each by `handler`, until [`crate::Stopper::stop`] is
    /// called, or [`crate::Stopper::drain`] and every taken request is answered; then waits for the running handlers.
    /// The threads take turns at waiting for the next request, so that no request passes from one thread to another.
    /// The handler gets a copy of the request, which no client can change. If a handler panics, its call is abandoned,
    /// and the thread continues.
    ///
    /// While all threads are in handlers, a handler that calls [`crate::Responder::is_cancelled`] polls for requests,
    /// so that a client can cancel a streaming reply also then. Requests that come before the cancel, some 1,000 at
    /// most, wait in memory for the next free thread.
    ///
    /// [`crate::Responder::part`] for a client that does not read blocks its thread, and the return of this function:
    /// [`crate::Responder::part_until`] does not. Meanwhile that client's requests are paused.
    ///
    /// # Errors
    /// As [`Service::receive`], but for [`Error::Closed`], at which this returns `Ok`. [`Error::System`] when a thread
    /// cannot be started: nothing was taken then. After an error it can be called again.
    pub fn run(&mut self, threads: usize, handler: impl Fn(Request<'_>) + Sync) -> Result<()> {
        let shared = self.shared().clone();
        let leader = Leader { service: self, is_over: false, ahead: VecDeque::new(), ahead_bytes: 0 };
        let pool = Pool { leader: Mutex::new(leader), shared };
        let work = || {
            let mut buffer = Vec::new();
            loop {
                let mut leader = locked(&pool.leader);
                if leader.is_over {
                    return Ok(());
                }
                let responder = match leader.next(&mut buffer) {
                    Ok(responder) => responder,
                    Err(error) => {
                        leader.is_over = true;
                        return if error.is_closed() { Ok(()) } else { Err(error) };
                    }
                };
                drop(leader);
                let mut storage = RequestStorage::new();
                let request = storage.put(Body::Borrowed(&buffer), responder);
                let inside = Inside::new(NonNull::from(&pool).cast(), poll_in_handler);
                // The responder abandons the call. The handler's other state is the user's, as in any thread that
                // panics.
                let _ = catch_unwind(AssertUnwindSafe(|| handler(request)));
                drop(inside);
            }
        };
        thread::scope(|scope| {
            // The threads wait for this lock until all are started, or one could not be.
            let mut leader = locked(&pool.leader);
            let start = |_| thread::Builder::new().name("pelton service".to_owned()).spawn_scoped(scope, work);
            let others = (1..threads).map(start).collect::<std::io::Result<Vec<_>>>();
            leader.is_over = others.is_err();
            drop(leader);
            let others = others.map_err(Error::system("starting a thread for requests"))?;
            let own = work();
            let join = |thread: thread::ScopedJoinHandle<'_, Result<()>>| thread.join().expect("panics are caught");
            others.into_iter().map(join).fold(own, |done, other| done.and(other))
        })
    }
}
