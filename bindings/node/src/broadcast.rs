//! `Publisher` and `Subscriber` of the addon: one sends, many receive.

use crate::endpoint::{Armable, AsRawFdOfLoop, Handle, deadline, methods, step_methods};
use crate::error::{named, raise};
use crate::fast;
use crate::open::{Given, Info};
use napi::bindgen_prelude::*;
use napi::sys;
use napi_derive::napi;
use pelton::{Policy, Sent};
use std::os::fd::AsRawFd;

impl AsRawFdOfLoop for pelton::Publisher {
    fn fd(&self) -> i32 {
        self.as_raw_fd()
    }
}

impl Armable for pelton::Publisher {
    fn arm(&mut self, bytes: usize) -> pelton::Result<bool> {
        // As a sender.
        Ok(!self.busy_poll(bytes)? && pelton::Publisher::arm(self, bytes)?.is_waiting())
    }
    fn disarm(&mut self) {
        pelton::Publisher::disarm(self);
    }
}

impl AsRawFdOfLoop for pelton::Subscriber {
    fn fd(&self) -> i32 {
        self.as_raw_fd()
    }
}

impl Armable for pelton::Subscriber {
    fn arm(&mut self, _bytes: usize) -> pelton::Result<bool> {
        // As a receiver.
        Ok(!self.busy_poll()? && pelton::Subscriber::arm(self)?.is_waiting())
    }
    fn disarm(&mut self) {
        pelton::Subscriber::disarm(self);
    }
}

/// The sending endpoint of a broadcast.
#[napi]
pub struct Publisher(Handle<pelton::Publisher>);

methods!(Publisher);
step_methods!(Publisher);

/// Publishes under a name.
#[napi]
pub fn publish(name: String, given: Given) -> Result<Publisher> {
    Ok(Publisher::new(given.options().cast().publish_at(&name).map_err(raise)?))
}

impl Publisher {
    pub fn new(publisher: pelton::Publisher) -> Publisher {
        Publisher(Handle::new("publisher", publisher))
    }
}

/// `trySend(data)`: sends a message, if there is space.
unsafe extern "C" fn try_send(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: Node calls, and `functions` has made the function.
    unsafe {
        fast::call::<Handle<pelton::Publisher>, bool, 1>(env, info, |handle, arguments| {
            let data = arguments.bytes(0)?;
            Ok(handle.borrow()?.get()?.try_send(data).map_err(raise)? == Sent::Sent)
        })
    }
}

/// `wait(bytes)`: waits for space; false if there is some.
unsafe extern "C" fn wait_for_space(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: as `try_send`.
    unsafe {
        fast::call::<Handle<pelton::Publisher>, bool, 1>(env, info, |handle, arguments| {
            handle.borrow()?.wait(arguments.number(0) as usize)
        })
    }
}

/// A subscriber, as its publisher shows it. Times are in milliseconds.
#[napi(object)]
pub struct SubscriberState {
    pub pid: u32,
    pub uid: u32,
    pub durable: Option<String>,
    pub policy: String,
    pub lag_after: Option<f64>,
    pub lags: bool,
    pub behind: f64,
    pub messages: f64,
    pub missed: f64,
    pub holds: Option<f64>,
}

impl SubscriberState {
    fn of(state: &pelton::SubscriberState) -> SubscriberState {
        let policy = match state.policy {
            Policy::Gate => "gate",
            Policy::Lag => "lag",
            Policy::Latest => "latest",
        };
        SubscriberState {
            pid: state.peer.pid,
            uid: state.peer.uid,
            durable: state.durable.clone(),
            policy: policy.to_owned(),
            lag_after: state.lag_after.map(|time| time.as_secs_f64() * 1e3),
            lags: state.lags,
            behind: state.behind as f64,
            messages: state.messages as f64,
            missed: state.missed as f64,
            holds: state.holds.map(|time| time.as_secs_f64() * 1e3),
        }
    }
}

#[napi]
impl Publisher {
    /// The functions that are called for each message.
    #[napi]
    pub fn functions<'env>(&self, env: &'env Env) -> Result<Vec<Unknown<'env>>> {
        // SAFETY: each is a `call` with a handle of a publisher.
        unsafe {
            Ok(vec![
                fast::function(env, c"trySend", &self.0, Some(try_send))?,
                fast::function(env, c"wait", &self.0, Some(wait_for_space))?,
            ])
        }
    }

    /// Admits subscribers, and calls the callback of `watch` when there is more to do.
    #[napi]
    pub fn admit(&self) -> Result<()> {
        let mut endpoint = self.0.borrow()?;
        let admitted = endpoint.get()?.admit();
        // Also after an error: the publisher tries again at intervals.
        endpoint.watch_idle();
        admitted.map(|_| ()).map_err(raise)
    }

    /// Begins to wait until there are `count` subscribers: a step.
    #[napi]
    pub fn start_wait_subscribers(
        &self,
        env: Env,
        count: u32,
        timeout: Option<f64>,
        callback: Function<'_, (), ()>,
    ) -> Result<()> {
        let deadline = deadline(timeout);
        self.0.borrow()?.start_step(&env, &callback, move |publisher, cancel| {
            cancel.wait(deadline, |until| publisher.wait_subscribers_until(count as usize, until))
        })
    }

    /// Begins to wait until each subscriber that gates has released every message: a step.
    #[napi]
    pub fn start_wait_released(&self, env: Env, timeout: Option<f64>, callback: Function<'_, (), ()>) -> Result<()> {
        let deadline = deadline(timeout);
        self.0.borrow()?.start_step(&env, &callback, move |publisher, cancel| {
            cancel.wait(deadline, |until| publisher.wait_released_until(until))
        })
    }

    /// The subscribers.
    #[napi]
    pub fn subscribers(&self) -> Result<Vec<SubscriberState>> {
        let mut endpoint = self.0.borrow()?;
        Ok(endpoint.asked()?.subscribers().iter().map(SubscriberState::of).collect())
    }

    /// Sizes and counters.
    #[napi]
    pub fn info(&self) -> Result<Info> {
        let mut endpoint = self.0.borrow()?;
        let publisher = endpoint.asked()?;
        Ok(Info::new(publisher.capacity(), publisher.message_bytes_max(), None, publisher.counters()))
    }
}

/// A receiving endpoint of a broadcast.
#[napi]
pub struct Subscriber(Handle<pelton::Subscriber>);

methods!(Subscriber);
step_methods!(Subscriber);

impl Subscriber {
    pub fn new(subscriber: pelton::Subscriber) -> Subscriber {
        Subscriber(Handle::new("subscriber", subscriber))
    }
}

/// Copies the next message to `space`, its size to `size`, and its number to `numbers`, with how many were missed
/// before it. Returns 1; -1 if there is none; of one that does not fit, -2 less its bytes, and it stays the
/// next.
fn read_one(
    subscriber: &mut pelton::Subscriber,
    space: &mut [u8],
    size: &mut [u32],
    numbers: &mut [f64],
) -> Result<i64> {
    let Some(delivery) = subscriber.try_receive().map_err(raise)? else { return Ok(-1) };
    let bytes = delivery.len();
    let ([size, ..], [number, missed, ..], Some(_)) = (size, numbers, fast::copy(&delivery, space, 0)) else {
        delivery.keep();
        return Ok(-2 - bytes as i64);
    };
    (*size, *number, *missed) = (bytes as u32, delivery.number() as f64, delivery.missed() as f64);
    Ok(1)
}

/// `read(space, offset, sizes, numbers)`: [`read_one`], to `space` from `offset` on.
unsafe extern "C" fn read(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: Node calls, and `functions` has made the function. JavaScript has no view of two arrays in one memory.
    unsafe {
        fast::call::<Handle<pelton::Subscriber>, i64, 4>(env, info, |handle, arguments| {
            let mut endpoint = handle.borrow()?;
            let space = arguments.space(0)?.get_mut(arguments.number(1) as usize..).unwrap_or_default();
            read_one(endpoint.get()?, space, arguments.numbers(2)?, arguments.doubles(3)?)
        })
    }
}

/// `wait()`: waits for a message; false if there is one.
unsafe extern "C" fn wait_for_message(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: Node calls, and `functions` has made the function.
    unsafe { fast::call::<Handle<pelton::Subscriber>, bool, 0>(env, info, |handle, _| handle.borrow()?.wait(0)) }
}

#[napi]
impl Subscriber {
    /// The functions that are called for each message.
    #[napi]
    pub fn functions<'env>(&self, env: &'env Env) -> Result<Vec<Unknown<'env>>> {
        // SAFETY: each is a `call` with a handle of a subscriber.
        unsafe {
            Ok(vec![
                fast::function(env, c"read", &self.0, Some(read))?,
                fast::function(env, c"wait", &self.0, Some(wait_for_message))?,
            ])
        }
    }

    /// Begins to wait for the publisher's successor: a step.
    #[napi]
    pub fn start_resume(&self, env: Env, timeout: Option<f64>, callback: Function<'_, (), ()>) -> Result<()> {
        let deadline = deadline(timeout);
        self.0.borrow()?.start_step(&env, &callback, move |subscriber, cancel| {
            cancel.wait(deadline, |until| subscriber.resume_until(until))
        })
    }

    /// Messages missed so far.
    #[napi(getter)]
    pub fn missed(&self) -> Result<f64> {
        Ok(self.0.borrow()?.asked()?.missed() as f64)
    }

    /// Whether it continues a durable subscription.
    #[napi(getter)]
    pub fn continues(&self) -> Result<bool> {
        Ok(self.0.borrow()?.asked()?.continues())
    }

    /// Sizes, publisher and counters.
    #[napi]
    pub fn info(&self) -> Result<Info> {
        let mut endpoint = self.0.borrow()?;
        let subscriber = endpoint.asked()?;
        if subscriber.is_forked() {
            return Err(named("forked", "this subscriber belongs to the process that forked this one"));
        }
        Ok(Info::new(subscriber.capacity(), subscriber.message_bytes_max(), subscriber.peer(), subscriber.counters()))
    }
}
