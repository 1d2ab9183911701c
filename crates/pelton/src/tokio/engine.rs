//! Files in a Tokio runtime: a future for each operation, any number of tasks on one engine.
//!
//! Whoever is polled takes all that has completed, and wakes those whose it is. The reactor keeps one waker, of the task that was polled last: the
//! *watcher*. When that is done, or dropped, it wakes another, which takes its place.

use crate::file::{Completion, Engine, Operation, Submitted};
use crate::{Error, Result};
use ::tokio::io::unix::AsyncFd;
use pelton_os::locked;
use std::collections::HashMap;
use std::future::poll_fn;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Mutex;
use std::task::{Context, Poll, Waker, ready};

/// An [`Engine`] in a Tokio runtime, for any number of tasks.
///
/// A future that is dropped cancels its operation, which may be done all the same; its memory is kept until the kernel is done.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// # let directory = tempfile::tempdir().unwrap();
/// # let path = directory.path().join("notes");
/// # ::tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap().block_on(async {
/// use pelton::file::{Engine, Open, Operation};
/// let engine = pelton::tokio::AsyncEngine::new(Engine::new()?)?;
/// let file = engine.run(Operation::open(&path, Open::for_both().create(0o644))).await?.into_file()?;
/// engine.run(Operation::write_at(&file, "hello", 0)).await?;
/// engine.run(Operation::sync_data(&file)).await?;
/// assert_eq!(engine.run(Operation::read_at(&file, vec![0; 9], 0)).await?.bytes(), b"hello");
/// # Ok(())
/// # })
/// # }
/// ```
#[derive(Debug)]
pub struct AsyncEngine(AsyncFd<Shared>);

#[derive(Debug)]
struct Shared {
    /// The engine's.
    fd: RawFd,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    engine: Engine,
    /// By token: whose operation is in flight, or wants to be.
    tasks: HashMap<u64, Task>,
    next: u64,
    watcher: Option<u64>,
}

#[derive(Debug)]
enum Task {
    Waits(Waker),
    /// For room: nothing of it is in flight.
    WaitsForRoom(Waker),
    Done(Completion),
}

impl AsRawFd for Shared {
    fn as_raw_fd(&self) -> RawFd {
        self.fd
    }
}

impl AsyncEngine {
    /// Registers an engine, with nothing in flight, with the runtime that this is called in.
    ///
    /// # Errors
    /// [`Error::System`] when the reactor does not take the descriptor; [`Error::Refused`] when something is in flight.
    ///
    /// # Panics
    /// Outside a Tokio runtime with I/O enabled.
    pub fn new(engine: Engine) -> Result<AsyncEngine> {
        if engine.in_flight() > 0 {
            return Err(Error::Refused(
                "operations are in flight, whose tokens would meet others: take them first".to_owned(),
            ));
        }
        let state = State { tasks: HashMap::new(), next: 0, watcher: None, engine };
        let fd = state.engine.as_raw_fd();
        super::registered(Shared { fd, state: Mutex::new(state) }).map(AsyncEngine)
    }

    /// Does an operation. While as many are in flight as the engine takes, it waits for its turn.
    ///
    /// # Errors
    /// As of [`Engine::run`].
    pub async fn run(&self, operation: Operation) -> Result<Completion> {
        let mut ticket = Ticket { engine: self, token: self.next_token(), operation: Some(operation) };
        let completion = poll_fn(|context| ticket.poll(context)).await?;
        match completion.outcome {
            Err(error) => Err(error),
            Ok(_) => Ok(completion),
        }
    }

    fn next_token(&self) -> u64 {
        let mut state = locked(&self.0.get_ref().state);
        state.next += 1;
        state.next
    }

    /// The engine, taken out of the runtime, with what dropped futures have left in flight.
    pub fn into_inner(self) -> Engine {
        let state = self.0.into_inner().state.into_inner();
        let mut engine = state.unwrap_or_else(std::sync::PoisonError::into_inner).engine;
        engine.disarm();
        engine
    }
}

/// One future's part.
struct Ticket<'a> {
    engine: &'a AsyncEngine,
    token: u64,
    /// What was not submitted yet.
    operation: Option<Operation>,
}

impl Ticket<'_> {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Completion>> {
        let shared = self.engine.0.get_ref();
        let mut state = locked(&shared.state);
        loop {
            if let Some(operation) = self.operation.take() {
                let task = match state.engine.try_submit(self.token, operation)? {
                    Submitted::Submitted => Task::Waits(context.waker().clone()),
                    Submitted::Full(operation) => {
                        self.operation = Some(operation);
                        Task::WaitsForRoom(context.waker().clone())
                    }
                };
                state.tasks.insert(self.token, task);
            }
            state.take_all()?;
            match state.tasks.get_mut(&self.token) {
                Some(Task::Done(_)) => {
                    let Some(Task::Done(completion)) = state.tasks.remove(&self.token) else { unreachable!("it is") };
                    return Poll::Ready(Ok(completion));
                }
                Some(Task::Waits(waker) | Task::WaitsForRoom(waker)) => waker.clone_from(context.waker()),
                None => unreachable!("it is removed by who takes it, and when it is dropped"),
            }
            if self.operation.is_some() && state.engine.has_free_slots(1) {
                continue;
            }
            if !state.engine.arm()?.is_waiting() {
                continue;
            }
            state.watcher = Some(self.token);
            // The reactor hears of the next completion, because arming silences the descriptor before it looks.
            let mut readable = ready!(self.engine.0.poll_read_ready(context))
                .map_err(Error::system("waiting in the Tokio runtime"))?;
            readable.clear_ready();
        }
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        let mut state = locked(&self.engine.0.get_ref().state);
        if let Some(Task::Waits(_)) = state.tasks.remove(&self.token) {
            // Of an engine that cannot be used any more there is nothing to cancel.
            let _ = state.engine.cancel(self.token);
        }
        if state.watcher == Some(self.token) {
            // Who is woken is the watcher already: if it is dropped before it is polled, it wakes the next.
            let next = state.tasks.iter().find_map(|(token, task)| match task {
                Task::Waits(waker) | Task::WaitsForRoom(waker) => Some((*token, waker.clone())),
                Task::Done(_) => None,
            });
            state.watcher = next.as_ref().map(|(token, _)| *token);
            drop(state);
            if let Some((_, waker)) = next {
                waker.wake();
            }
        }
    }
}

impl State {
    /// Takes what has completed, and wakes those whose it is, and those who wait for room.
    fn take_all(&mut self) -> Result<()> {
        let mut made_room = false;
        while let Some(completion) = self.engine.try_completion()? {
            made_room = true;
            // Nobody's, if its future was dropped.
            if let Some(task) = self.tasks.get_mut(&completion.token)
                && let Task::Waits(waker) = std::mem::replace(task, Task::Done(completion))
            {
                waker.wake();
            }
        }
        if made_room {
            for task in self.tasks.values() {
                if let Task::WaitsForRoom(waker) = task {
                    waker.wake_by_ref();
                }
            }
        }
        Ok(())
    }
}
