//! Threads that answer requests: whoever waits for one answers it, and another waits meanwhile.

use super::Body;
use super::responder::Request;
use super::service::Service;
use crate::error::{Error, Result};
use crate::os::locked;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::thread;

impl Service {
    /// Answers requests on `threads` threads, this one among them, each by `handler`, until [`crate::Stopper::stop`] is called, or
    /// [`crate::Stopper::drain`] and everything taken is answered; then waits for the handlers that are at work. The threads take
    /// turns at waiting for the next request, so one of them needs no other to hand it on. The handler gets a copy of the request,
    /// which no client can change. One that panics has its call abandoned, and the thread goes on.
    ///
    /// One that waits in [`crate::Responder::part`] for a client that does not read keeps its thread, and this from returning:
    /// [`crate::Responder::part_until`] does not. While it waits, no more of that client's requests are taken.
    ///
    /// # Errors
    /// As [`Service::receive`], but for [`Error::Closed`], which is how this ends. [`Error::System`] when a thread cannot be
    /// started: nothing was taken then. After an error it can be called again.
    pub fn run(&mut self, threads: usize, handler: impl Fn(Request<'_>) + Sync) -> Result<()> {
        let service = Mutex::new((self, false));
        let work = || {
            let mut buffer = Vec::new();
            loop {
                let mut turn = locked(&service);
                let (service, is_over) = &mut *turn;
                if *is_over {
                    return Ok(());
                }
                let responder = match service.receive() {
                    Ok(request) => request.copy_out(&mut buffer),
                    Err(error) => {
                        *is_over = true;
                        return if error.is_closed() { Ok(()) } else { Err(error) };
                    }
                };
                drop(turn);
                let request = Request { body: Body::Lent(&buffer), responder };
                // The responder says that it was abandoned; what else the handler has is its own affair, as in any thread that panics.
                let _ = catch_unwind(AssertUnwindSafe(|| handler(request)));
            }
        };
        thread::scope(|scope| {
            // They wait for their turn until all are there, or it is known that one is wanting.
            let mut turn = locked(&service);
            let start = |_| thread::Builder::new().name("pelton service".to_owned()).spawn_scoped(scope, work);
            let others = (1..threads).map(start).collect::<std::io::Result<Vec<_>>>();
            turn.1 = others.is_err();
            drop(turn);
            let others = others.map_err(Error::system("starting a thread for requests"))?;
            let own = work();
            let join = |thread: thread::ScopedJoinHandle<'_, Result<()>>| thread.join().expect("panics are caught");
            others.into_iter().map(join).fold(own, |done, other| done.and(other))
        })
    }
}
