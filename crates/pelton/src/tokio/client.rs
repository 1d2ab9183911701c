//! A client for many tasks at a time. A task of its own hears the descriptor, takes what comes, and wakes those whom it is for. None of
//! them does that for the others: it could be one that is polled no more, while it waits for one of them.

use crate::{CallId, Client, Outcome};
use crate::{Error, Result};
use ::tokio::io::unix::AsyncFd;
use pelton_os::locked;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::future::poll_fn;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

/// A [`Client`] in a Tokio runtime, for any number of tasks: `Clone`, `Send` and `Sync`.
///
/// A call that is dropped before its last answer has come, for instance by `tokio::time::timeout`, is cancelled, and its service
/// told. Parts that come to one [`AsyncCall`] while another is awaited are kept; once they are more than the client takes of
/// one reply ([`crate::Options::call_bytes_max`]) nothing more is taken for anybody until some are read, or that call is dropped.
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
/// let client = pelton::tokio::AsyncClient::new(pelton::Client::connect(&name)?)?;
/// let (one, two) = ::tokio::join!(client.call(b"one"), client.call(b"two"));
/// assert_eq!((&*one?.bytes, &*two?.bytes), (&b"ONE"[..], &b"TWO"[..]));
/// stopper.stop();
/// # serving.join().unwrap()
/// # })
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct AsyncClient(Arc<Handle>);

/// What all clones and calls have. With the last of them the client is closed.
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
    calls: HashMap<CallId, Expecting>,
    /// What the answers among them come to.
    kept_bytes: u64,
    kept_bytes_max: u64,
    /// Who waits for room, by a number of each, in the order in which they came.
    room: BTreeMap<u64, Waker>,
    number: u64,
    /// The task that hears the descriptor.
    driver: Option<Waker>,
    /// It has been told of an error, which is for those who wait to be told too.
    has_failed: bool,
    is_dropped: bool,
}

/// What has come of a call that nobody has taken yet, and who waits for it.
#[derive(Debug, Default)]
struct Expecting {
    answers: VecDeque<Answer>,
    task: Option<Waker>,
}

/// What came of a call, or some of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// What it is.
    pub outcome: Outcome,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

impl Answer {
    fn cost(&self) -> u64 {
        (self.bytes.len() + size_of::<Answer>()) as u64
    }
}

impl State {
    /// Hands what has come to who waits for it. True: there was something.
    fn take_completions(&mut self) -> Result<bool> {
        let mut took = false;
        while self.kept_bytes <= self.kept_bytes_max {
            let Some(completion) = self.client.try_completion()? else { break };
            took = true;
            let call = completion.call();
            let answer = Answer { outcome: completion.outcome(), bytes: completion.into_vec() };
            let Some(expecting) = self.calls.get_mut(&call) else { continue };
            self.kept_bytes += answer.cost();
            expecting.answers.push_back(answer);
            if let Some(task) = &expecting.task {
                task.wake_by_ref();
            }
        }
        Ok(took)
    }

    /// The next answer to a call, or nothing yet, of which this task is to hear then.
    fn take_answer(&mut self, call: CallId, task: &Waker) -> Result<Option<Answer>> {
        loop {
            let expecting = self.calls.get_mut(&call).expect("its handle is there");
            if let Some(answer) = expecting.answers.pop_front() {
                if answer.outcome.is_final() {
                    self.calls.remove(&call);
                }
                self.give_back(answer.cost());
                return Ok(Some(answer));
            }
            expecting.task = Some(task.clone());
            if !self.has_failed || !self.take_completions()? {
                return Ok(None);
            }
        }
    }

    /// So much of what was kept is not any more.
    fn give_back(&mut self, bytes: u64) {
        let was_full = self.kept_bytes > self.kept_bytes_max;
        self.kept_bytes -= bytes;
        if was_full {
            self.wake_driver();
        }
    }

    fn wake_driver(&self) {
        if let Some(driver) = &self.driver {
            driver.wake_by_ref();
        }
    }

    fn wake_those_without_room(&mut self) {
        // They ask again, and so are noted again.
        std::mem::take(&mut self.room).into_values().for_each(Waker::wake);
        self.client.forget_room();
    }

    /// What the task does that hears the descriptor, until there is nothing to do, when it is woken.
    fn drive(&mut self, context: &mut Context<'_>, readiness: &AsyncFd<OwnedFd>) -> Poll<()> {
        self.driver = Some(context.waker().clone());
        while !self.is_dropped {
            match self.take_completions() {
                Ok(false) => {}
                Ok(true) => {
                    // A place among the calls may have come free.
                    self.wake_those_without_room();
                    continue;
                }
                Err(_) => return self.fail(),
            }
            if self.kept_bytes > self.kept_bytes_max {
                return Poll::Pending;
            }
            match self.client.arm() {
                Ok(true) => {}
                Ok(false) => {
                    self.wake_those_without_room();
                    continue;
                }
                Err(_) => return self.fail(),
            }
            match readiness.poll_read_ready(context) {
                Poll::Pending => return Poll::Pending,
                // The reactor hears of the next ring because `arm` silences the descriptor before it looks.
                Poll::Ready(Ok(mut ready)) => ready.clear_ready(),
                Poll::Ready(Err(_)) => return self.fail(),
            }
        }
        Poll::Ready(())
    }

    /// All who wait are to see for themselves. Whoever asks anew wakes this.
    fn fail(&mut self) -> Poll<()> {
        self.has_failed = true;
        self.wake_those_without_room();
        self.calls.values().filter_map(|expecting| expecting.task.as_ref()).for_each(Waker::wake_by_ref);
        Poll::Pending
    }
}

/// A task that waits for room, until it is dropped.
struct WaitingForRoom<'a> {
    state: &'a Mutex<State>,
    number: u64,
}

impl<'a> WaitingForRoom<'a> {
    fn new(state: &'a Mutex<State>) -> WaitingForRoom<'a> {
        let mut locked = locked(state);
        locked.number += 1;
        WaitingForRoom { state, number: locked.number }
    }

    /// Waits until `attempt` has found something.
    async fn until<T>(&self, mut attempt: impl FnMut(&mut State) -> Result<Option<T>>) -> Result<T> {
        poll_fn(|context| {
            let mut state = locked(self.state);
            if let Some(found) = attempt(&mut state)? {
                state.room.remove(&self.number);
                return Poll::Ready(Ok(found));
            }
            state.room.insert(self.number, context.waker().clone());
            // It asks to hear of room.
            state.wake_driver();
            Poll::Pending
        })
        .await
    }
}

impl Drop for WaitingForRoom<'_> {
    fn drop(&mut self) {
        locked(self.state).room.remove(&self.number);
    }
}

impl AsyncClient {
    /// Registers a client with the runtime that this is called in, and starts a task there for it, which ends when all clones of this and
    /// all its calls have been dropped.
    ///
    /// # Errors
    /// [`Error::System`] when the reactor does not take the descriptor, or there is none to be had.
    ///
    /// # Panics
    /// Outside a Tokio runtime with I/O enabled.
    pub fn new(client: Client) -> Result<AsyncClient> {
        let descriptor = client.as_fd().try_clone_to_owned().map_err(Error::system("duplicating a descriptor"))?;
        let readiness = super::registered(descriptor)?;
        let state = Arc::new(Mutex::new(State {
            kept_bytes_max: client.reply_bytes_max(),
            client,
            calls: HashMap::new(),
            kept_bytes: 0,
            room: BTreeMap::new(),
            number: 0,
            driver: None,
            has_failed: false,
            is_dropped: false,
        }));
        let driven = state.clone();
        ::tokio::spawn(async move { poll_fn(|context| locked(&driven).drive(context, &readiness)).await });
        Ok(AsyncClient(Arc::new(Handle(state))))
    }

    /// Asks and awaits the answer, of a streaming reply the first part, after which the call is cancelled: for all of them
    /// [`AsyncClient::submit`]. Waits for room and for the answer. Dropped before it completes, the call is cancelled, or was not
    /// made.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub async fn call(&self, request: &[u8]) -> Result<Answer> {
        let mut call = self.submit(request).await?;
        Ok(call.next().await?.expect("nothing of it has been taken"))
    }

    /// Asks. Waits for room, and for a place among 1,024 calls. Dropped before it completes, it has asked nothing.
    ///
    /// # Errors
    /// As [`Client::try_submit`].
    pub async fn submit(&self, request: &[u8]) -> Result<AsyncCall> {
        self.submitted(request, false).await
    }

    /// As [`AsyncClient::submit`], of a call that may be carried out more than once, as [`Client::mark_idempotent`] says: marked later,
    /// its service could have died in between.
    ///
    /// # Errors
    /// As [`AsyncClient::submit`].
    pub async fn submit_idempotent(&self, request: &[u8]) -> Result<AsyncCall> {
        self.submitted(request, true).await
    }

    async fn submitted(&self, request: &[u8], is_idempotent: bool) -> Result<AsyncCall> {
        let attempt = |state: &mut State| {
            let Some(call) = state.client.try_submit(request)? else { return Ok(None) };
            if is_idempotent {
                state.client.mark_idempotent(call)?;
            }
            state.calls.insert(call, Expecting::default());
            // Of a name of many services another has come.
            if std::mem::take(&mut state.has_failed) || state.client.has_unwritten() {
                state.wake_driver();
            }
            Ok(Some(call))
        };
        let call = WaitingForRoom::new(&self.0.0).until(attempt).await?;
        Ok(AsyncCall { handle: self.0.clone(), call, is_over: false })
    }

    /// Tells the service something that it does not answer. Waits for room. Dropped before it completes, it has told nothing.
    ///
    /// # Errors
    /// As [`Client::try_notify`].
    pub async fn notify(&self, message: &[u8]) -> Result<()> {
        let attempt = |state: &mut State| {
            let is_told = state.client.try_notify(message)?;
            if is_told && state.client.has_unwritten() {
                state.wake_driver();
            }
            Ok(is_told.then_some(()))
        };
        WaitingForRoom::new(&self.0.0).until(attempt).await
    }

    /// Calls whose last answer has not come, also those cancelled.
    pub fn in_flight(&self) -> usize {
        locked(&self.0.0).client.in_flight()
    }
}

/// A call in flight; see [`AsyncClient::submit`]. Dropped before its last answer has come, it is cancelled.
#[derive(Debug)]
pub struct AsyncCall {
    handle: Arc<Handle>,
    call: CallId,
    is_over: bool,
}

impl AsyncCall {
    /// The next answer: the reply, or the next part of one; `None` after the last. Waits for it. Dropped before it completes, it
    /// has taken nothing.
    ///
    /// # Errors
    /// As [`Client::completion_of`]; nothing more comes of the call then.
    pub async fn next(&mut self) -> Result<Option<Answer>> {
        if self.is_over {
            return Ok(None);
        }
        let call = self.call;
        let found = poll_fn(|context| match locked(&self.handle.0).take_answer(call, context.waker()) {
            Ok(None) => Poll::Pending,
            Ok(Some(answer)) => Poll::Ready(Ok(answer)),
            Err(error) => Poll::Ready(Err(error)),
        })
        .await;
        self.is_over = found.as_ref().map_or(true, |answer| answer.outcome.is_final());
        match found? {
            Answer { outcome: Outcome::Lost(loss), .. } => Err(locked(&self.handle.0).client.lost(loss)),
            answer => Ok(Some(answer)),
        }
    }
}

impl Drop for AsyncCall {
    fn drop(&mut self) {
        let mut state = locked(&self.handle.0);
        if let Some(expecting) = state.calls.remove(&self.call) {
            // An error is of the client's end, which whoever uses it next is told.
            let _ = state.client.cancel(self.call);
            if state.client.has_unwritten() {
                state.wake_driver();
            }
            state.give_back(expecting.answers.iter().map(Answer::cost).sum());
        }
    }
}
