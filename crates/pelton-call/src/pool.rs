//! Threads that answer requests: whoever waits for one answers it, and another waits meanwhile.

use super::caller::Desk;
use super::leader::Inside;
use super::responder::{Request, Responder};
use super::service::Service;
use crate::body::{Body, LOOKS};
use pelton_channel::{Error, Result};
use pelton_os::locked;
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, TryLockError};
use std::thread;

/// What the threads of a pool share.
struct Pool<'a> {
    turn: Mutex<Turn<'a>>,
    desk: Arc<Desk>,
}

/// What one of them has at a time.
struct Turn<'a> {
    service: &'a mut Service,
    is_over: bool,
    /// Taken by a thread that looked for something else, to be answered before what comes.
    ahead: VecDeque<(Vec<u8>, Responder)>,
    ahead_bytes: usize,
}

impl Turn<'_> {
    /// The next request, whose bytes are put into the buffer.
    fn next(&mut self, buffer: &mut Vec<u8>) -> Result<Responder> {
        match self.ahead.pop_front() {
            Some((bytes, responder)) => {
                self.ahead_bytes -= bytes.len();
                *buffer = bytes;
                Ok(responder)
            }
            None => Ok(self.service.receive()?.copy_out(buffer)),
        }
    }

    /// Takes what has come, for whoever is free first, and hears with it who has cancelled a call, or gone. No more than that many requests,
    /// nor than one more when they come to what the largest may be.
    fn look_ahead(&mut self, bytes_max: u64) {
        while !self.is_over && self.ahead.len() < LOOKS && self.ahead_bytes as u64 <= bytes_max {
            // An error is told to who waits for a request.
            let Ok(Some(request)) = self.service.try_receive() else { return };
            let (bytes, responder) = request.into_parts();
            self.ahead_bytes += bytes.len();
            self.ahead.push_back((bytes, responder));
        }
    }
}

/// In a handler of a pool whose threads are all in one: takes what has come, in their stead. Returns whether it did.
fn look_out(pool: NonNull<()>, desk: &Arc<Desk>) -> bool {
    // SAFETY: `Inside` gave it, for as long as the handler runs; it is a pool in this thread's frame, and nothing of it is
    // kept.
    let pool = unsafe { pool.cast::<Pool<'_>>().as_ref() };
    if !Arc::ptr_eq(&pool.desk, desk) {
        return false;
    }
    let mut turn = match pool.turn.try_lock() {
        Ok(turn) => turn,
        Err(TryLockError::Poisoned(turn)) => turn.into_inner(),
        // The thread that has it takes what comes.
        Err(TryLockError::WouldBlock) => return false,
    };
    turn.look_ahead(desk.options.call_bytes_max);
    true
}

impl Service {
    /// Answers requests on `threads` threads, this one among them, each by `handler`, until [`crate::Stopper::stop`] is called, or
    /// [`crate::Stopper::drain`] and everything taken is answered; then waits for the handlers that are at work. The threads take
    /// turns at waiting for the next request, so one of them needs no other to hand it on. The handler gets a copy of the request,
    /// which no client can change. One that panics has its call abandoned, and the thread goes on.
    ///
    /// While all threads are in handlers, one that asks [`crate::Responder::is_cancelled`] hears what has come, so that a stream of replies can
    /// be cancelled also then; requests that it finds before that, some 1,000 at most, wait in memory for the next thread that is free.
    ///
    /// One that waits in [`crate::Responder::part`] for a client that does not read keeps its thread, and this from returning:
    /// [`crate::Responder::part_until`] does not. While it waits, no more of that client's requests are taken.
    ///
    /// # Errors
    /// As [`Service::receive`], but for [`Error::Closed`], which is how this ends. [`Error::System`] when a thread cannot be
    /// started: nothing was taken then. After an error it can be called again.
    pub fn run(&mut self, threads: usize, handler: impl Fn(Request<'_>) + Sync) -> Result<()> {
        let desk = self.desk().clone();
        let turn = Turn { service: self, is_over: false, ahead: VecDeque::new(), ahead_bytes: 0 };
        let pool = Pool { turn: Mutex::new(turn), desk };
        let work = || {
            let mut buffer = Vec::new();
            loop {
                let mut turn = locked(&pool.turn);
                if turn.is_over {
                    return Ok(());
                }
                let responder = match turn.next(&mut buffer) {
                    Ok(responder) => responder,
                    Err(error) => {
                        turn.is_over = true;
                        return if error.is_closed() { Ok(()) } else { Err(error) };
                    }
                };
                drop(turn);
                let mut place = MaybeUninit::uninit();
                let request = Request::put(&mut place, Body::Lent(&buffer), responder);
                let inside = Inside::new(NonNull::from(&pool).cast(), look_out);
                // The responder says that it was abandoned; what else the handler has is its own affair, as in any thread that panics.
                let _ = catch_unwind(AssertUnwindSafe(|| handler(request)));
                drop(inside);
            }
        };
        thread::scope(|scope| {
            // They wait for their turn until all are there, or it is known that one is wanting.
            let mut turn = locked(&pool.turn);
            let start = |_| thread::Builder::new().name("pelton service".to_owned()).spawn_scoped(scope, work);
            let others = (1..threads).map(start).collect::<std::io::Result<Vec<_>>>();
            turn.is_over = others.is_err();
            drop(turn);
            let others = others.map_err(Error::system("starting a thread for requests"))?;
            let own = work();
            let join = |thread: thread::ScopedJoinHandle<'_, Result<()>>| thread.join().expect("panics are caught");
            others.into_iter().map(join).fold(own, |done, other| done.and(other))
        })
    }
}
