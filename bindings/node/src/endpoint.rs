//! An endpoint in JavaScript's hands: open, away in a step of a thread, or closed.

use crate::error::{named, raise};
use crate::open::accepting;
use crate::watch::{Cancel, Step, Watch};
use napi::bindgen_prelude::*;
use pelton::Deadline;
use std::cell::{RefCell, RefMut};
use std::rc::Rc;
use std::time::Duration;

/// A step returns the endpoint, and whether it has reached its end before the deadline.
type Stepped<T> = (T, pelton::Result<bool>);

/// An endpoint with its watch.
pub struct Endpoint<T> {
    // Before the value, whose descriptor it watches.
    watch: Option<Watch>,
    step: Option<Step<Stepped<T>>>,
    value: Option<T>,
    /// Whether the peer may ring: undone before the endpoint is used.
    is_armed: bool,
    /// What it is, for errors.
    noun: &'static str,
}

/// An endpoint of JavaScript's object and of its functions: `fast.rs`.
pub struct Handle<T>(Rc<RefCell<Endpoint<T>>>);

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Handle<T> {
        Handle(self.0.clone())
    }
}

impl<T> Handle<T> {
    pub fn new(noun: &'static str, value: T) -> Handle<T> {
        let endpoint = Endpoint { watch: None, step: None, value: Some(value), is_armed: false, noun };
        Handle(Rc::new(RefCell::new(endpoint)))
    }

    /// The endpoint. Only an error that is being made runs JavaScript meanwhile.
    #[inline]
    pub fn borrow(&self) -> Result<RefMut<'_, Endpoint<T>>> {
        self.0.try_borrow_mut().map_err(|_| named("wrong_thread", "this object is in use: call it after that"))
    }
}

/// What a descriptor of an event loop belongs to.
pub trait Armable: AsRawFdOfLoop {
    /// Announces a wait, with what is wanted in bytes. Returns false if it is there.
    fn arm(&mut self, bytes: usize) -> pelton::Result<bool>;
    /// Withdraws it.
    fn disarm(&mut self);
}

/// The descriptor.
pub trait AsRawFdOfLoop {
    /// Its number.
    fn fd(&self) -> i32;
}

impl<T: Armable> Endpoint<T> {
    /// The endpoint, for a call that does not wait.
    #[inline]
    pub fn get(&mut self) -> Result<&mut T> {
        match &mut self.value {
            Some(value) => {
                if self.is_armed {
                    self.is_armed = false;
                    value.disarm();
                }
                Ok(value)
            }
            None if self.step.is_some() => {
                let text = format!("this {} waits for its peer: await that before another call", self.noun);
                Err(named("wrong_thread", &text))
            }
            None => Err(named("closed_handle", &format!("this {} is closed: open another one", self.noun))),
        }
    }

    /// The endpoint, for a question that leaves a wait as it is.
    pub fn asked(&mut self) -> Result<&mut T> {
        match self.value {
            Some(ref mut value) => Ok(value),
            None => self.get(),
        }
    }

    /// Has the loop watch the descriptor. The first call; `callback` is called after `wait`.
    pub fn watch(&mut self, env: &Env, callback: &Function<'_, (), ()>) -> Result<()> {
        let fd = self.get()?.fd();
        self.watch = Some(Watch::new(env, fd, callback.raw())?);
        Ok(())
    }

    /// Waits, unless what is wanted is there: then it returns false.
    pub fn wait(&mut self, bytes: usize) -> Result<bool> {
        let armed = self.get()?.arm(bytes).map_err(raise)?;
        self.is_armed = true;
        if let (true, Some(watch)) = (armed, &self.watch) {
            watch.start();
        }
        Ok(armed)
    }

    /// Has the callback called when the descriptor is readable, though nothing is armed.
    pub fn watch_idle(&self) {
        if let Some(watch) = &self.watch {
            watch.start();
        }
    }

    /// Ends the wait.
    pub fn stop(&mut self) {
        if let Some(watch) = &self.watch {
            watch.stop();
        }
        if let (true, Some(value)) = (std::mem::take(&mut self.is_armed), &mut self.value) {
            value.disarm();
        }
    }

    pub fn set_ref(&self, is_ref: bool) {
        if let Some(watch) = &self.watch {
            watch.set_ref(is_ref);
        }
        if let Some(step) = &self.step {
            step.set_ref(is_ref);
        }
    }

    pub fn is_closed(&self) -> bool {
        self.value.is_none() && self.step.is_none()
    }

    /// Closes it. A step notices within 50 ms.
    pub fn close(&mut self) {
        // In this order: another descriptor may get the number after the close.
        self.watch = None;
        self.value = None;
        self.step = None;
    }

    /// Takes the endpoint out, for another thread of this process.
    pub fn detach(&mut self) -> Result<T> {
        self.get()?;
        self.watch = None;
        self.value.take().ok_or_else(|| named("closed_handle", "it is closed"))
    }
}

/// An endpoint of a channel.
pub trait Channel: Armable + Send + 'static {
    /// The listener that had accepted it, which accepts a successor of its peer too.
    fn listener(&self) -> Option<&pelton::Listener>;
    /// Waits for a successor of its peer; false at the deadline.
    fn resume_until(&mut self, deadline: Deadline) -> pelton::Result<bool>;
    /// Makes a path channel durable.
    fn sync(&mut self) -> pelton::Result<()>;
}

impl<T: Channel> Endpoint<T> {
    /// Begins to wait for the peer's successor: a step.
    pub fn start_resume(&mut self, env: &Env, timeout: Option<f64>, callback: &Function<'_, (), ()>) -> Result<()> {
        let deadline = deadline(timeout);
        self.start_step(env, callback, move |it, cancel| match it.listener().cloned() {
            Some(listener) => accepting(&listener, deadline, cancel, |until| it.resume_until(until)),
            None => cancel.wait(deadline, |until| it.resume_until(until.into())),
        })
    }
}

impl<T: Armable + Send + 'static> Endpoint<T> {
    /// Begins a step of a thread. `callback` is called once `finish_step` has its result.
    pub fn start_step(
        &mut self,
        env: &Env,
        callback: &Function<'_, (), ()>,
        step: impl FnOnce(&mut T, &Cancel<'_>) -> pelton::Result<bool> + Send + 'static,
    ) -> Result<()> {
        self.get()?;
        self.stop();
        let is_ref = self.watch.as_ref().is_none_or(Watch::is_ref);
        let started = Step::start(env, callback.raw(), is_ref, &mut self.value, move |mut value: T, cancel| {
            let outcome = step(&mut value, cancel);
            (value, outcome)
        })?;
        self.step = Some(started);
        Ok(())
    }

    /// The end of a step: whether its condition was met before its deadline. `None` before it has ended.
    pub fn finish_step(&mut self) -> Result<Option<bool>> {
        let Some(step) = &self.step else {
            return Err(named("closed_handle", &format!("this {} is closed: open another one", self.noun)));
        };
        let Some((value, outcome)) = step.take() else { return Ok(None) };
        self.step = None;
        self.value = Some(value);
        outcome.map(Some).map_err(raise)
    }

    /// Ends a step's wait: it is finished within 50 ms.
    pub fn cancel_step(&self) {
        if let Some(step) = &self.step {
            step.cancel();
        }
    }
}

/// The methods of each endpoint's object, whose one field is its handle.
macro_rules! methods {
    ($object:ident) => {
        #[napi]
        impl $object {
            /// Has the loop watch the descriptor: see `Endpoint::watch`.
            #[napi]
            pub fn watch(&self, env: Env, callback: Function<'_, (), ()>) -> Result<()> {
                self.0.borrow()?.watch(&env, &callback)
            }

            /// Ends the wait.
            #[napi]
            pub fn stop(&self) -> Result<()> {
                self.0.borrow()?.stop();
                Ok(())
            }

            /// See `Watch::set_ref`.
            #[napi]
            pub fn set_ref(&self, is_ref: bool) -> Result<()> {
                self.0.borrow()?.set_ref(is_ref);
                Ok(())
            }

            /// Closes it.
            #[napi]
            pub fn close(&self) -> Result<()> {
                self.0.borrow()?.close();
                Ok(())
            }

            /// Whether it is closed.
            #[napi(getter)]
            pub fn closed(&self) -> Result<bool> {
                Ok(self.0.borrow()?.is_closed())
            }
        }
    };
}
pub(crate) use methods;

/// The methods of each endpoint that takes steps, besides [`methods`].
macro_rules! step_methods {
    ($object:ident) => {
        #[napi]
        impl $object {
            /// See `Endpoint::finish_step`.
            #[napi]
            pub fn finish_step(&self) -> Result<Option<bool>> {
                self.0.borrow()?.finish_step()
            }

            /// See `Endpoint::cancel_step`.
            #[napi]
            pub fn cancel_step(&self) -> Result<()> {
                self.0.borrow()?.cancel_step();
                Ok(())
            }
        }
    };
}
pub(crate) use step_methods;

/// The methods of a channel's endpoints, besides [`methods`].
macro_rules! channel_methods {
    ($object:ident) => {
        #[napi]
        impl $object {
            /// Begins to wait for the peer's successor: a step.
            #[napi]
            pub fn start_resume(&self, env: Env, timeout: Option<f64>, callback: Function<'_, (), ()>) -> Result<()> {
                self.0.borrow()?.start_resume(&env, timeout, &callback)
            }

            /// Begins to make a path channel durable: a step.
            #[napi]
            pub fn start_sync(&self, env: Env, callback: Function<'_, (), ()>) -> Result<()> {
                self.0.borrow()?.start_step(&env, &callback, |it, _| it.sync().map(|()| true))
            }

            /// Hands it over to another thread of this process: a number for `attach` there.
            #[napi]
            pub fn detach(&self) -> Result<f64> {
                Ok(tokens().keep(Token::$object(Box::new(self.0.borrow()?.detach()?))))
            }
        }
    };
}
pub(crate) use channel_methods;

/// A timeout of JavaScript: milliseconds; `None` and infinity are no limit, 0 and less not to wait.
pub fn deadline(timeout: Option<f64>) -> Deadline {
    match timeout {
        None => Deadline::Never,
        Some(ms) if ms <= 0.0 => Deadline::Now,
        Some(ms) => Duration::try_from_secs_f64(ms / 1e3).map_or(Deadline::Never, Deadline::from),
    }
}
