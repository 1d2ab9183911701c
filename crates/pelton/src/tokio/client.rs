//! A client for many tasks at a time. One task of its own, the driver, polls the descriptor, takes completions, stores
//! them in an [`Inbox`] and wakes the tasks that wait for them. No other task does that: it might not be polled again
//! while it waits for something else.

use crate::raw::{Inbox, StoredCompletion};
use crate::{Armed, CallId, Client, Deadline, Error, Opening, Options, Outcome, Result, Sent, Traceparent};
use ::tokio::io::unix::AsyncFd;
use pelton_os::locked;
use std::collections::BTreeMap;
use std::fmt::{Debug, Formatter};
use std::future::poll_fn;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

/// Completions, or turns without one, after which the driver lets other tasks of its thread run. As Tokio's budget has
/// it.
const COMPLETIONS_PER_POLL: usize = 128;

/// A [`Client`] in a Tokio runtime, for any number of tasks: `Clone`, `Send` and `Sync`.
///
/// A call that is dropped before its final completion, for instance by `tokio::time::timeout`, is cancelled, and its
/// service notified. Parts that come for one [`AsyncCall`] while another is awaited are stored. Once they exceed the
/// largest reply that the client takes ([`crate::Options::call_bytes_max`]), it receives nothing more for any call
/// until some are taken, or that call is dropped.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// # ::tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap().block_on(async {
/// let name = format!("unix:{}/async-client-doc-{}", std::env::temp_dir().display(), std::process::id());
/// let mut service = pelton::Service::listen(&name)?;
/// let stopper = service.stopper();
/// let serving = std::thread::spawn(move || {
///     service.run(1, |request| {
///         let answer = request.to_ascii_uppercase();
///         let _ = request.reply(&answer);
///     })
/// });
/// let client = pelton::tokio::AsyncClient::connect(&name).await?;
/// let (one, two) = ::tokio::join!(client.call(b"one"), client.call(b"two"));
/// assert_eq!((&*one?.bytes, &*two?.bytes), (&b"ONE"[..], &b"TWO"[..]));
/// stopper.stop();
/// # serving.join().unwrap()
/// # })
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct AsyncClient(Arc<Handle>);

/// What all clones and calls share. Dropping the last of them closes the client.
#[derive(Debug)]
struct Handle(Arc<Mutex<State>>);

impl Drop for Handle {
    fn drop(&mut self) {
        let mut state = locked(&self.0);
        state.is_dropped = true;
        state.wake_driver();
    }
}

#[derive(Debug)]
struct State {
    client: Client,
    /// Completions that no task has taken yet, and the tasks that wait for others.
    inbox: Inbox,
    inbox_bytes_max: u64,
    /// Tasks that wait for space, by a number of each, in the order in which they came.
    waiting_for_space: BTreeMap<u64, Waker>,
    number: u64,
    driver: Option<Waker>,
    /// The driver's error, which each waiting task gets too. A new submission clears it: the driver tries again.
    failure: Option<Error>,
    is_dropped: bool,
}

/// A completion of a call.
#[derive(Clone, PartialEq, Eq)]
#[must_use = "check `outcome`: a failed call is a completion too"]
pub struct OwnedCompletion {
    /// What it means.
    pub outcome: Outcome,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

impl OwnedCompletion {
    /// As [`crate::Completion::ok`].
    ///
    /// # Errors
    /// As [`crate::Completion::ok`].
    pub fn ok(mut self) -> Result<OwnedCompletion> {
        match self.outcome.error(|| std::mem::take(&mut self.bytes)) {
            None => Ok(self),
            Some(error) => Err(error),
        }
    }
}

impl AsRef<[u8]> for OwnedCompletion {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Debug for OwnedCompletion {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let OwnedCompletion { outcome, bytes } = self;
        f.debug_struct("OwnedCompletion").field("outcome", outcome).field("bytes", &bytes.len()).finish()
    }
}

impl State {
    fn is_inbox_full(&self) -> bool {
        self.inbox.bytes() > self.inbox_bytes_max
    }

    /// Stores at most `most` completions, and wakes the tasks that wait for them. Returns how many have come.
    fn receive(&mut self, most: usize) -> Result<usize> {
        let mut received = 0;
        while received < most && !self.is_inbox_full() {
            let Some(completion) = self.client.try_completion()? else { break };
            received += 1;
            let (call, outcome) = (completion.call_id(), completion.outcome());
            let bytes = completion.into_vec();
            if let Some(task) = self.inbox.store(StoredCompletion { call, outcome, bytes }) {
                task.wake_by_ref();
            }
        }
        Ok(received)
    }

    /// The next completion of a call; or none yet, and the task is woken when it comes.
    fn take(&mut self, call: CallId, task: &Waker) -> Result<Option<OwnedCompletion>> {
        loop {
            let was_full = self.is_inbox_full();
            if let Some(StoredCompletion { outcome, bytes, .. }) = self.inbox.take_of(call) {
                self.resume(was_full);
                return Ok(Some(OwnedCompletion { outcome, bytes }));
            }
            self.inbox.wait_for(call, task);
            let Some(failure) = self.failure.as_ref().map(same) else { return Ok(None) };
            // At its end, a client returns more than one error: first those of the calls.
            if self.receive(COMPLETIONS_PER_POLL)? == 0 {
                return Err(failure);
            }
        }
    }

    /// Wakes the driver after something was taken out of a full inbox.
    fn resume(&self, was_full: bool) {
        if was_full {
            self.wake_driver();
        }
    }

    fn wake_driver(&self) {
        if let Some(driver) = &self.driver {
            driver.wake_by_ref();
        }
    }

    /// Wakes the driver if a message is queued: it arms for its space.
    fn wake_driver_to_write(&self) {
        if self.client.has_queued_messages() {
            self.wake_driver();
        }
    }

    fn wake_tasks_for_space(&mut self) {
        // They try again, and wait again.
        std::mem::take(&mut self.waiting_for_space).into_values().for_each(Waker::wake);
        self.client.cancel_wanted_space();
    }

    /// Polls the driver: until there is nothing to do, when something wakes it, or until other tasks should run.
    fn drive(&mut self, context: &mut Context<'_>, readiness: &AsyncFd<OwnedFd>) -> Poll<()> {
        self.driver = Some(context.waker().clone());
        let mut left = COMPLETIONS_PER_POLL;
        while !self.is_dropped {
            if left == 0 {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            match self.receive(left) {
                Ok(0) => left -= 1,
                Ok(received) => {
                    left -= received;
                    // A slot may be free now.
                    self.wake_tasks_for_space();
                    continue;
                }
                Err(error) => return self.fail(error),
            }
            if self.is_inbox_full() {
                return Poll::Pending;
            }
            match self.client.busy_poll() {
                Ok(false) => {}
                Ok(true) => continue,
                Err(error) => return self.fail(error),
            }
            match self.client.arm() {
                Ok(Armed::Waiting) => {}
                Ok(Armed::Ready) => {
                    self.wake_tasks_for_space();
                    continue;
                }
                Err(error) => return self.fail(error),
            }
            match readiness.poll_read_ready(context) {
                Poll::Pending => return Poll::Pending,
                // The reactor reports the next ring, because `arm` drains the descriptor before it polls.
                Poll::Ready(Ok(mut ready)) => ready.clear_ready(),
                Poll::Ready(Err(error)) => return self.fail(Error::system("waiting in the Tokio runtime")(error)),
            }
        }
        Poll::Ready(())
    }

    /// Each waiting task gets the error.
    fn fail(&mut self, error: Error) -> Poll<()> {
        self.failure = Some(error);
        self.wake_tasks_for_space();
        self.inbox.wake_all();
        Poll::Pending
    }

    /// After an error, the driver tries again.
    fn retry(&mut self) {
        if self.failure.take().is_some() {
            self.wake_driver();
        }
    }
}

/// The driver's error for one more task.
fn same(error: &Error) -> Error {
    match error {
        Error::Closed { unreleased } => Error::Closed { unreleased: *unreleased },
        Error::PeerDied { unreleased } => Error::PeerDied { unreleased: *unreleased },
        Error::Corrupt(text) => Error::Corrupt(text.clone()),
        Error::Forked => Error::Forked,
        Error::System { what, error } => {
            let of_text = || std::io::Error::new(error.kind(), error.to_string());
            let error = error.raw_os_error().map_or_else(of_text, std::io::Error::from_raw_os_error);
            Error::System { what: what.clone(), error }
        }
        other => Error::system("driving the client")(std::io::Error::other(other.to_string())),
    }
}

/// A task that waits for space, until it is dropped.
struct WaitingForSpace<'a> {
    state: &'a Mutex<State>,
    number: u64,
}

impl<'a> WaitingForSpace<'a> {
    fn new(state: &'a Mutex<State>) -> WaitingForSpace<'a> {
        let mut locked = locked(state);
        locked.number += 1;
        WaitingForSpace { state, number: locked.number }
    }

    /// Waits until `attempt` returns something. Fails with the driver's error if the driver fails meanwhile.
    async fn until<T>(&self, mut attempt: impl FnMut(&mut State) -> Result<Option<T>>) -> Result<T> {
        let mut has_waited = false;
        poll_fn(|context| {
            let mut state = locked(self.state);
            if let Some(found) = attempt(&mut state)? {
                state.waiting_for_space.remove(&self.number);
                return Poll::Ready(Ok(found));
            }
            match &state.failure {
                Some(failure) if has_waited => return Poll::Ready(Err(same(failure))),
                _ => has_waited = true,
            }
            state.waiting_for_space.insert(self.number, context.waker().clone());
            // The driver arms the client, which then reports the space. An earlier failure is cleared: the attempt has
            // just succeeded without finding space, so the client works. If the driver fails again, it stores the error
            // and wakes this task, which then returns that error.
            state.failure = None;
            state.wake_driver();
            Poll::Pending
        })
        .await
    }
}

impl Drop for WaitingForSpace<'_> {
    fn drop(&mut self) {
        locked(self.state).waiting_for_space.remove(&self.number);
    }
}

impl AsyncClient {
    /// Connects to the service that listens under `name` (a short name, or `unix:PATH`) with default [`Options`], as
    /// [`Client::connect`] does, without blocking the thread, and registers the client as [`AsyncClient::new`] does.
    /// Cancel-safe: dropped before it completes, it leaves nothing behind.
    ///
    /// # Errors
    /// As [`Options::connect_sender`].
    ///
    /// # Panics
    /// Outside a Tokio runtime with I/O enabled.
    pub async fn connect(name: &str) -> Result<AsyncClient> {
        AsyncClient::open(Client::start_connect(name, &Options::new())?).await
    }

    /// As [`AsyncClient::connect`], with options: of [`Client::start_connect`].
    ///
    /// # Errors
    /// As [`Opening::try_finish`].
    ///
    /// # Panics
    /// As [`AsyncClient::connect`].
    pub async fn open(opening: Opening<Client>) -> Result<AsyncClient> {
        AsyncClient::new(super::opened(opening).await?)
    }

    /// Registers a client with the runtime that this is called in, and starts a task there for it. The task ends when
    /// all clones of this and all its calls have been dropped.
    ///
    /// # Errors
    /// [`Error::System`] when the reactor does not take the descriptor, or the process has none left.
    ///
    /// # Panics
    /// Outside a Tokio runtime with I/O enabled.
    pub fn new(client: Client) -> Result<AsyncClient> {
        let descriptor = client.as_fd().try_clone_to_owned().map_err(Error::system("duplicating a descriptor"))?;
        let readiness = super::registered(descriptor)?;
        let state = Arc::new(Mutex::new(State {
            inbox_bytes_max: client.reply_bytes_max(),
            client,
            inbox: Inbox::default(),
            waiting_for_space: BTreeMap::new(),
            number: 0,
            driver: None,
            failure: None,
            is_dropped: false,
        }));
        let driven = state.clone();
        ::tokio::spawn(async move { poll_fn(|context| locked(&driven).drive(context, &readiness)).await });
        Ok(AsyncClient(Arc::new(Handle(state))))
    }

    /// Submits a request and awaits its completion; of a streaming reply the first part, after which the call is
    /// cancelled: for all of them use [`AsyncClient::submit`]. A call that the service failed is `Ok` here:
    /// [`OwnedCompletion::ok`] turns it into an error. Waits for space and for the completion. Dropped before it
    /// completes, the call is cancelled, or was not submitted.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub async fn call(&self, request: &[u8]) -> Result<OwnedCompletion> {
        let mut call = self.submit(request).await?;
        Ok(call.next().await?.expect("nothing of it has been taken"))
    }

    /// Submits a request. Waits for space, and for a free slot among 1,024 calls. Dropped before it completes, it has
    /// submitted nothing.
    ///
    /// # Errors
    /// As [`Client::try_submit`].
    pub async fn submit(&self, request: &[u8]) -> Result<AsyncCall> {
        self.submitted(|client| client.try_submit(request), false).await
    }

    /// As [`AsyncClient::submit`], with a deadline that the service sees: it need not reply after it. Here nothing ends
    /// by it: for that use `tokio::time::timeout_at`.
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// # ::tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// # let name = format!("unix:{}/async-deadline-doc-{}", std::env::temp_dir().display(), std::process::id());
    /// # let mut service = pelton::Service::listen(&name)?;
    /// # let stopper = service.stopper();
    /// # let serving = std::thread::spawn(move || service.run(1, |request| _ = request.reply(b"")));
    /// use std::time::{Duration, Instant};
    /// let client = pelton::tokio::AsyncClient::new(pelton::Client::connect(&name)?)?;
    /// let deadline = Instant::now() + Duration::from_millis(20);
    /// let call = async { client.submit_by(b"request", deadline).await?.next().await };
    /// match ::tokio::time::timeout_at(deadline.into(), call).await {
    ///     Ok(completion) => println!("{:?}", completion?),
    ///     Err(_) => println!("no reply in time: the call is cancelled"),
    /// }
    /// # stopper.stop();
    /// # serving.join().unwrap()
    /// # })
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`AsyncClient::submit`].
    pub async fn submit_by(&self, request: &[u8], deadline: Instant) -> Result<AsyncCall> {
        self.submitted(|client| client.try_submit_by(request, deadline), false).await
    }

    /// As [`AsyncClient::submit`], of a call that may be executed more than once, as [`Client::mark_idempotent`] says.
    /// If it were marked later, its service could have died in between.
    ///
    /// # Errors
    /// As [`AsyncClient::submit`].
    pub async fn submit_idempotent(&self, request: &[u8]) -> Result<AsyncCall> {
        self.submitted(|client| client.try_submit(request), true).await
    }

    /// As [`AsyncClient::submit`], with the span of which the call is a part, for [`AsyncResponder::traceparent`] and
    /// [`Request::traceparent`]. A service of an earlier version gets the request without it. A deadline is that of
    /// [`AsyncClient::submit_by`]: [`Deadline::Never`] for none.
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// # ::tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap().block_on(async {
    /// # let name = format!("unix:{}/async-traced-doc-{}", std::env::temp_dir().display(), std::process::id());
    /// # let mut service = pelton::Service::listen(&name)?;
    /// # let stopper = service.stopper();
    /// # let serving = std::thread::spawn(move || {
    /// #     service.run(1, |request| {
    /// #         let span = request.traceparent().map_or(String::new(), |span| span.to_string());
    /// #         _ = request.reply(span.as_bytes());
    /// #     })
    /// # });
    /// let client = pelton::tokio::AsyncClient::new(pelton::Client::connect(&name)?)?;
    /// let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    /// let span = pelton::Traceparent::parse(text).unwrap();
    /// let mut call = client.submit_traced(b"now", span, pelton::Deadline::Never).await?;
    /// assert_eq!(call.next().await?.unwrap().ok()?.as_ref(), text.as_bytes());
    /// # stopper.stop();
    /// # serving.join().unwrap()
    /// # })
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`AsyncClient::submit`].
    ///
    /// [`AsyncResponder::traceparent`]: super::AsyncResponder::traceparent
    /// [`Request::traceparent`]: crate::Request::traceparent
    pub async fn submit_traced(
        &self,
        request: &[u8],
        traceparent: Traceparent,
        deadline: impl Into<Deadline>,
    ) -> Result<AsyncCall> {
        let deadline = deadline.into();
        self.submitted(|client| client.try_submit_traced_by(request, traceparent, deadline), false).await
    }

    async fn submitted(
        &self,
        mut submit: impl FnMut(&mut Client) -> Result<Option<CallId>>,
        is_idempotent: bool,
    ) -> Result<AsyncCall> {
        let attempt = |state: &mut State| {
            let Some(call) = submit(&mut state.client)? else { return Ok(None) };
            if is_idempotent {
                state.client.mark_idempotent(call)?;
            }
            // By a short name another service has come.
            state.retry();
            state.wake_driver_to_write();
            Ok(Some(call))
        };
        let call = WaitingForSpace::new(&self.0.0).until(attempt).await?;
        Ok(AsyncCall { handle: self.0.clone(), call, is_over: false })
    }

    /// Sends the service a message that gets no reply. Waits for space. Dropped before it completes, it has sent
    /// nothing.
    ///
    /// # Errors
    /// As [`Client::try_notify`].
    pub async fn notify(&self, message: &[u8]) -> Result<()> {
        let attempt = |state: &mut State| {
            if state.client.try_notify(message)? != Sent::Sent {
                return Ok(None);
            }
            state.wake_driver_to_write();
            Ok(Some(()))
        };
        WaitingForSpace::new(&self.0.0).until(attempt).await
    }

    /// Calls whose final completion has not come, cancelled ones included.
    pub fn in_flight(&self) -> usize {
        locked(&self.0.0).client.in_flight()
    }
}

/// A call in flight; see [`AsyncClient::submit`]. Dropped before its final completion, it is cancelled.
#[derive(Debug)]
#[must_use = "dropping it cancels the call"]
pub struct AsyncCall {
    handle: Arc<Handle>,
    call: CallId,
    is_over: bool,
}

impl AsyncCall {
    /// The next completion: the reply, or the next part of one; `None` after the last. Waits for it. Dropped before it
    /// completes, it has taken nothing.
    ///
    /// # Errors
    /// As [`Client::completion_of`]; the call has no further completion then.
    pub async fn next(&mut self) -> Result<Option<OwnedCompletion>> {
        if self.is_over {
            return Ok(None);
        }
        let call = self.call;
        let found = poll_fn(|context| match locked(&self.handle.0).take(call, context.waker()) {
            Ok(None) => Poll::Pending,
            Ok(Some(answer)) => Poll::Ready(Ok(answer)),
            Err(error) => Poll::Ready(Err(error)),
        })
        .await;
        self.is_over = found.as_ref().map_or(true, |answer| answer.outcome.is_final());
        match found {
            Ok(OwnedCompletion { outcome: Outcome::Lost(loss), .. }) => {
                Err(locked(&self.handle.0).client.loss_error(loss))
            }
            Ok(answer) => Ok(Some(answer)),
            Err(error) => {
                self.cancel();
                Err(error)
            }
        }
    }

    fn cancel(&self) {
        let mut state = locked(&self.handle.0);
        let was_full = state.is_inbox_full();
        state.inbox.forget(self.call);
        // An error is that of the client's end, which the next function that uses it returns.
        let _ = state.client.cancel(self.call);
        state.wake_driver_to_write();
        state.resume(was_full);
    }
}

impl Drop for AsyncCall {
    fn drop(&mut self) {
        if !self.is_over {
            self.cancel();
        }
    }
}
