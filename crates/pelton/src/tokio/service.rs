//! A service in a Tokio runtime: requests of all clients by one descriptor, replies from any task, handlers as tasks.
//!
//! The *driver* is the task that awaits [`AsyncService::receive`] or [`AsyncService::run`]: it alone polls the service.
//! Tasks that wait for space for a part leave their wakers in [`PartWaiters`], and the driver wakes them.
//!
//! No wake-up is lost: a task leaves its waker before it tries its part for the last time. If there is no space then,
//! the service is notified, which rings the driver; the driver arms, finds space then or later, and wakes all wakers.

use super::stream::poll_rung;
use crate::{Error, Peer, Request, Responder, Result, Sent, Service, Stopper, Traceparent};
use ::tokio::io::unix::AsyncFd;
use ::tokio::task::JoinSet;
use pelton_channel::raw::Polled;
use pelton_os::locked;
use std::collections::{BTreeMap, VecDeque};
use std::future::poll_fn;
use std::ops::Deref;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker, ready};
use std::time::Instant;

/// Requests that [`AsyncService::run`] takes while as many handlers as may be are in flight. As many as the threads of
/// [`Service::run`] take ahead.
const AHEAD_MAX: usize = 1024;
/// As many bytes of them: as much as the largest request may have by default.
const AHEAD_BYTES_MAX: usize = 64 << 20;
/// Requests that the driver takes before other tasks of its thread run. As Tokio's budget has it.
const REQUESTS_PER_POLL: usize = 128;
/// Requests after which the driver wakes the tasks that wait for space, if it never sleeps in between. A guess.
const REQUESTS_PER_WAKE: u32 = 16;

/// A [`Service`] in a Tokio runtime. One task at a time receives; any task replies.
///
/// [`AsyncService::run`] runs a handler for each request. [`AsyncService::receive`] is for a loop of the program's own.
/// A reply never waits. A part of a streaming reply does, with backpressure: [`AsyncResponder::part`].
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// # ::tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap().block_on(async {
/// let name = format!("unix:{}/async-service-doc-{}", std::env::temp_dir().display(), std::process::id());
/// let mut service = pelton::tokio::AsyncService::new(pelton::Service::listen(&name)?)?;
/// let stopper = service.stopper();
/// let serving = ::tokio::spawn(async move {
///     // At most 100 handlers in flight.
///     service.run(100, async |mut request| {
///         for word in request.to_vec().split(|byte| *byte == b' ') {
///             if request.part(word).await.is_err() {
///                 return;
///             }
///         }
///         let _ = request.end();
///     }).await
/// });
/// // Usually another process:
/// let asking = std::thread::spawn(move || -> pelton::Result<usize> {
///     let mut client = pelton::Client::connect(&name)?;
///     let call = client.submit(b"three short words")?;
///     let mut parts = 0;
///     while client.completion_of(call)?.outcome() == pelton::Outcome::Part {
///         parts += 1;
///     }
///     Ok(parts)
/// });
/// # while !asking.is_finished() {
/// #     ::tokio::task::yield_now().await;
/// # }
/// assert_eq!(asking.join().unwrap()?, 3);
/// stopper.stop();
/// serving.await.unwrap()
/// # })
/// # }
/// ```
#[derive(Debug)]
pub struct AsyncService {
    service: AsyncFd<Service>,
    waiters: Arc<PartWaiters>,
    /// Requests so far.
    taken: u32,
}

/// The tasks that wait for space for a part.
#[derive(Debug, Default)]
struct PartWaiters(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    /// The wakers of tasks that wait for space and have not been woken since they last checked.
    wakers: BTreeMap<u64, Waker>,
    next: u64,
    /// Nothing will find space any more: the service has ended.
    is_over: bool,
}

impl PartWaiters {
    fn add(&self) -> PartWaiter<'_> {
        let mut waiting = locked(&self.0);
        waiting.next += 1;
        PartWaiter { waiters: self, number: waiting.next }
    }

    fn wake_all(&self) {
        let wakers = std::mem::take(&mut locked(&self.0).wakers);
        wakers.into_values().for_each(Waker::wake);
    }

    fn set_over(&self, is_over: bool) {
        locked(&self.0).is_over = is_over;
        if is_over {
            self.wake_all();
        }
    }
}

impl AsyncService {
    /// Registers a service with the runtime that this is called in.
    ///
    /// # Errors
    /// [`Error::System`] when the reactor does not take the descriptor.
    ///
    /// # Panics
    /// Outside a Tokio runtime with I/O enabled.
    pub fn new(service: Service) -> Result<AsyncService> {
        Ok(AsyncService { service: super::registered(service)?, waiters: Arc::default(), taken: 0 })
    }

    /// Waits until there is a request, and does not take it: follow with [`AsyncService::try_receive`]. Cancel-safe.
    ///
    /// # Errors
    /// As [`Service::receive`].
    pub async fn ready(&mut self) -> Result<()> {
        self.waiters.set_over(false);
        let found = poll_fn(|context| self.poll_request(context)).await;
        self.service.get_mut().disarm();
        if found.is_err() {
            self.waiters.set_over(true);
        }
        found
    }

    /// The next request, in place; waits for it. It borrows the service: reply before the next one, or take
    /// [`Request::into_responder`] and reply at any time, in any task. For parts with backpressure give that to
    /// [`AsyncService::responder`].
    ///
    /// Clients join and leave, and parts find space, only while this is awaited, or [`AsyncService::run`] is.
    /// Cancel-safe: dropped before it completes, it has taken nothing.
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// # ::tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap().block_on(async {
    /// let name = format!("unix:{}/async-receive-doc-{}", std::env::temp_dir().display(), std::process::id());
    /// let mut service = pelton::tokio::AsyncService::new(pelton::Service::listen(&name)?)?;
    /// // Usually another process:
    /// let asking = std::thread::spawn(move || pelton::Client::connect(&name)?.call(b"2 + 2").map(|sum| sum.to_vec()));
    /// let request = service.receive().await?;
    /// assert_eq!(&*request, b"2 + 2");
    /// request.reply(b"4")?;
    /// assert_eq!(asking.join().unwrap()?, b"4");
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Service::receive`]: [`Error::Closed`] once [`Stopper::stop`] was called, or after [`Stopper::drain`] when
    /// everything is answered.
    pub async fn receive(&mut self) -> Result<Request<'_>> {
        loop {
            self.ready().await?;
            // Checked twice, because a returned borrow cannot be given back.
            if self.service.get_mut().poll()? {
                break;
            }
        }
        self.taken = self.taken.wrapping_add(1);
        Ok(self.service.get_mut().try_receive()?.expect("the check keeps the request that it finds"))
    }

    /// The next request, in place, if there is one now. Never waits.
    ///
    /// # Errors
    /// As [`Service::try_receive`].
    pub fn try_receive(&mut self) -> Result<Option<Request<'_>>> {
        self.taken = self.taken.wrapping_add(1);
        self.service.get_mut().try_receive()
    }

    /// A responder of this service whose parts wait in the runtime. For one of another service,
    /// [`AsyncResponder::part`] may wait for ever.
    pub fn responder(&self, responder: Responder) -> AsyncResponder {
        AsyncResponder { responder, waiters: self.waiters.clone() }
    }

    /// Receives requests and runs `handler` for each, as a task of the runtime, at most `in_flight_max` of them (at
    /// least one) at a time. Completes without an error once [`Stopper::stop`] was called, or [`Stopper::drain`] and
    /// everything taken is answered; first it waits for the handlers in flight.
    ///
    /// While all handlers are in flight, up to 1,024 more requests (or 64 MiB) wait in this process; further ones stay
    /// in their clients' lanes, which is backpressure for the clients. Parts and replies still find space, and a cancel
    /// that no such request precedes reaches its handler. A handler that panics has its call abandoned,
    /// and the others continue.
    ///
    /// Dropping the future aborts the handlers in flight and abandons their calls, and those of requests that wait: use
    /// the [`Stopper`] to end gracefully. The service itself remains usable.
    ///
    /// # Errors
    /// As [`Service::receive`], except [`Error::Closed`], which is how this ends. The handlers in flight have ended
    /// then; it can be called again.
    pub async fn run<H, F>(&mut self, in_flight_max: usize, mut handler: H) -> Result<()>
    where
        H: FnMut(AsyncRequest) -> F,
        F: Future<Output = ()> + Send + 'static,
    {
        self.waiters.set_over(false);
        let mut run = Run {
            handlers: JoinSet::new(),
            in_flight_max: in_flight_max.max(1),
            ahead: VecDeque::new(),
            ahead_bytes: 0,
            end: None,
        };
        let done = poll_fn(|context| run.poll(self, context, &mut handler)).await;
        self.service.get_mut().disarm();
        done
    }

    /// Stops or drains this service, from any task or thread: see [`Stopper`].
    pub fn stopper(&self) -> Stopper {
        self.service.get_ref().stopper()
    }

    /// The service, taken out of the runtime. Responders that wait for space fail with [`Error::Closed`].
    pub fn into_inner(self) -> Service {
        self.waiters.set_over(true);
        self.service.into_inner()
    }

    /// Waits until the service has found a request, which it keeps.
    fn poll_request(&mut self, context: &mut Context<'_>) -> Poll<Result<()>> {
        // A driver that always finds a request never arms, and so would never find space.
        if self.taken.is_multiple_of(REQUESTS_PER_WAKE) {
            self.waiters.wake_all();
        }
        while !self.service.get_mut().poll()? {
            ready!(self.poll_event(context))?;
        }
        Poll::Ready(Ok(()))
    }

    /// Waits for an event of the service, of which it found no request just now.
    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Result<()>> {
        if !self.service.get_mut().arm()?.is_waiting() {
            // A request, or space, which is reported once.
            self.waiters.wake_all();
            return Poll::Ready(Ok(()));
        }
        poll_rung(&mut self.service, context)
    }
}

/// One run of a service.
struct Run {
    handlers: JoinSet<()>,
    in_flight_max: usize,
    /// Requests that wait for a handler.
    ahead: VecDeque<(Vec<u8>, Responder)>,
    ahead_bytes: usize,
    /// Nothing more is taken, and why.
    end: Option<Result<()>>,
}

impl Run {
    fn poll<H, F>(&mut self, service: &mut AsyncService, context: &mut Context<'_>, handler: &mut H) -> Poll<Result<()>>
    where
        H: FnMut(AsyncRequest) -> F,
        F: Future<Output = ()> + Send + 'static,
    {
        for _ in 0..REQUESTS_PER_POLL {
            // A panic is that handler's own affair: its responder has reported that the call is abandoned.
            while let Poll::Ready(Some(_)) = self.handlers.poll_join_next(context) {}
            while self.handlers.len() < self.in_flight_max
                && let Some((bytes, responder)) = self.ahead.pop_front()
            {
                self.ahead_bytes -= bytes.len();
                self.handlers.spawn(handler(AsyncRequest { bytes, responder: service.responder(responder) }));
            }
            if self.end.is_some() {
                if !self.handlers.is_empty() {
                    return Poll::Pending;
                }
                return Poll::Ready(self.end.take().unwrap_or(Ok(())));
            }
            let is_full = self.ahead.len() >= AHEAD_MAX || self.ahead_bytes >= AHEAD_BYTES_MAX;
            let found = match is_full {
                true => service.service.get_mut().try_receive_none(),
                false => service.try_receive(),
            };
            let found = found.map(|request| request.map(Request::into_parts));
            match found {
                Ok(Some((bytes, responder))) => {
                    self.ahead_bytes += bytes.len();
                    self.ahead.push_back((bytes, responder));
                    if service.taken.is_multiple_of(REQUESTS_PER_WAKE) {
                        service.waiters.wake_all();
                    }
                }
                Ok(None) => match service.poll_event(context) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Ok(())) => {}
                    Poll::Ready(Err(error)) => self.stop(service, error),
                },
                Err(error) => self.stop(service, error),
            }
        }
        service.waiters.wake_all();
        context.waker().wake_by_ref();
        Poll::Pending
    }

    fn stop(&mut self, service: &AsyncService, error: Error) {
        self.end = Some(if error.is_closed() { Ok(()) } else { Err(error) });
        // Nothing drives the service from here on.
        service.waiters.set_over(true);
    }
}

/// A request that [`AsyncService::run`] gives its handler: a copy of the bytes, which no client can change, and what
/// replies to it. Dropped without a reply, the call is abandoned.
pub struct AsyncRequest {
    bytes: Vec<u8>,
    responder: AsyncResponder,
}

impl AsyncRequest {
    /// As [`AsyncResponder::reply`].
    ///
    /// # Errors
    /// As [`Responder::reply`].
    pub fn reply(self, reply: &[u8]) -> Result<()> {
        self.responder.reply(reply)
    }

    /// As [`AsyncResponder::fail`].
    ///
    /// # Errors
    /// As [`Responder::reply`].
    pub fn fail(self, code: u32, bytes: &[u8]) -> Result<()> {
        self.responder.fail(code, bytes)
    }

    /// As [`AsyncResponder::part`].
    ///
    /// # Errors
    /// As [`AsyncResponder::part`].
    pub async fn part(&mut self, part: &[u8]) -> Result<()> {
        self.responder.part(part).await
    }

    /// As [`AsyncResponder::end`].
    ///
    /// # Errors
    /// As [`Responder::reply`].
    pub fn end(self) -> Result<()> {
        self.responder.end()
    }

    /// Its bytes, and what replies to it.
    pub fn into_parts(self) -> (Vec<u8>, AsyncResponder) {
        (self.bytes, self.responder)
    }

    /// What replies to it: for its client, its deadline, and whether the call is cancelled.
    pub fn responder(&self) -> &AsyncResponder {
        &self.responder
    }
}

impl Deref for AsyncRequest {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl AsRef<[u8]> for AsyncRequest {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl std::fmt::Debug for AsyncRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AsyncRequest")
            .field("peer", &self.responder.peer())
            .field("bytes", &self.bytes.len())
            .finish_non_exhaustive()
    }
}

/// A [`Responder`] whose parts wait in the runtime. `Send`: it replies in any task, on any thread. Dropped without a
/// reply, the call is abandoned.
#[derive(Debug)]
pub struct AsyncResponder {
    responder: Responder,
    waiters: Arc<PartWaiters>,
}

impl AsyncResponder {
    /// Replies; after parts, this is the last of them. Does not wait: what the client has no space for is kept.
    ///
    /// # Errors
    /// As [`Responder::reply`].
    pub fn reply(self, reply: &[u8]) -> Result<()> {
        self.responder.reply(reply)
    }

    /// Fails the call with a code and bytes of the service's own meaning. Does not wait.
    ///
    /// # Errors
    /// As [`Responder::reply`].
    pub fn fail(self, code: u32, bytes: &[u8]) -> Result<()> {
        self.responder.fail(code, bytes)
    }

    /// Ends a reply that was given in parts, or has none. Does not wait.
    ///
    /// # Errors
    /// As [`Responder::reply`].
    pub fn end(self) -> Result<()> {
        self.responder.end()
    }

    /// Gives a part of the reply. Waits, as a task, until the client has space for it: backpressure. Meanwhile some
    /// task has to be in [`AsyncService::run`] or [`AsyncService::receive`], because that detects the space.
    /// Cancel-safe: dropped before it completes, it has given nothing.
    ///
    /// # Errors
    /// As [`Responder::part`]; [`Error::Closed`] instead of waiting, once the service is stopped.
    pub async fn part(&mut self, part: &[u8]) -> Result<()> {
        if self.responder.try_part(part)? == Sent::Sent {
            return Ok(());
        }
        let waiter = self.waiters.add();
        let responder = &mut self.responder;
        poll_fn(|context| {
            let is_over = waiter.wait(context.waker());
            match responder.try_part(part)? {
                Sent::Sent => Poll::Ready(Ok(())),
                _ if is_over => Poll::Ready(Err(Error::Closed { unreleased: 0 })),
                _ => Poll::Pending,
            }
        })
        .await
    }

    /// As [`Responder::try_part`]. Never waits.
    ///
    /// # Errors
    /// As [`Responder::try_part`].
    pub fn try_part(&mut self, part: &[u8]) -> Result<Sent> {
        self.responder.try_part(part)
    }

    /// As [`Responder::is_cancelled`].
    pub fn is_cancelled(&self) -> bool {
        self.responder.is_cancelled()
    }

    /// As [`Responder::deadline`].
    pub fn deadline(&self) -> Option<Instant> {
        self.responder.deadline()
    }

    /// As [`Responder::traceparent`].
    ///
    /// [`Responder::traceparent`]: crate::BorrowedResponder::traceparent
    pub fn traceparent(&self) -> Option<Traceparent> {
        self.responder.traceparent()
    }

    /// As [`Responder::peer`].
    pub fn peer(&self) -> Option<Peer> {
        self.responder.peer()
    }

    /// The responder, whose parts block the thread.
    pub fn into_inner(self) -> Responder {
        self.responder
    }
}

/// A task that waits for space, until it is dropped.
struct PartWaiter<'a> {
    waiters: &'a PartWaiters,
    number: u64,
}

impl PartWaiter<'_> {
    /// Leaves the waker. Returns whether nothing will use it any more.
    fn wait(&self, waker: &Waker) -> bool {
        let mut waiting = locked(&self.waiters.0);
        waiting.wakers.insert(self.number, waker.clone());
        waiting.is_over
    }
}

impl Drop for PartWaiter<'_> {
    fn drop(&mut self) {
        locked(&self.waiters.0).wakers.remove(&self.number);
    }
}
