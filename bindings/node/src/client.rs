//! `Client` of the addon.

use crate::endpoint::{Armable, AsRawFdOfLoop, Handle, deadline, methods};
use crate::error::raise;
use napi::bindgen_prelude::*;
use napi_derive::napi;
use pelton::{Armed, CallId, Deadline, Outcome, Sent};
use std::os::fd::AsRawFd;

impl AsRawFdOfLoop for pelton::Client {
    fn fd(&self) -> i32 {
        self.as_raw_fd()
    }
}

impl Armable for pelton::Client {
    fn arm(&mut self, _bytes: usize) -> pelton::Result<bool> {
        Ok(pelton::Client::arm(self)? == Armed::Waiting)
    }
    fn disarm(&mut self) {
        pelton::Client::disarm(self);
    }
}

/// A call's number in JavaScript: its generation of 32 bits, and its slot of 10, which a double holds exactly.
fn number(call: CallId) -> f64 {
    let bits = call.to_bits();
    ((bits >> 32 << 10) | (bits & 0x3ff)) as f64
}

fn call_of(number: f64) -> CallId {
    let number = number as u64;
    CallId::from_bits(number >> 10 << 32 | number & 0x3ff)
}

/// A client of calls.
#[napi]
pub struct Client(Handle<pelton::Client>);

impl Client {
    pub fn new(client: pelton::Client) -> Client {
        Client(Handle::new("client", client))
    }
}

/// A completion: the call's number, whether it has ended, and one of bytes, an error, or nothing.
#[napi(object)]
pub struct Completion<'env> {
    pub call: f64,
    pub is_final: bool,
    pub data: Option<BufferSlice<'env>>,
    pub error: Option<Unknown<'env>>,
}

methods!(Client);

#[napi]
impl Client {
    /// Submits a request; null if there is no space, or too many calls are in flight.
    #[napi]
    pub fn try_submit(&self, request: &[u8], timeout: Option<f64>, is_idempotent: bool) -> Result<Option<f64>> {
        let mut endpoint = self.0.borrow()?;
        let client = endpoint.get()?;
        let submitted = match deadline(timeout) {
            Deadline::At(end) => client.try_submit_by(request, end),
            _ => client.try_submit(request),
        };
        let submitted = submitted.map_err(raise)?;
        if let (Some(call), true) = (submitted, is_idempotent) {
            client.mark_idempotent(call).map_err(raise)?;
        }
        Ok(submitted.map(number))
    }

    /// Sends a message that gets no reply; false if there is no space.
    #[napi]
    pub fn try_notify(&self, message: &[u8]) -> Result<bool> {
        Ok(self.0.borrow()?.get()?.try_notify(message).map_err(raise)? == Sent::Sent)
    }

    /// The next completion; null if there is none.
    #[napi]
    pub fn completion<'env>(&self, env: &'env Env) -> Result<Option<Completion<'env>>> {
        let mut endpoint = self.0.borrow()?;
        let client = endpoint.get()?;
        let Some(completion) = client.try_completion().map_err(raise)? else { return Ok(None) };
        let (call, outcome) = (number(completion.call_id()), completion.outcome());
        let is_final = outcome.is_final();
        if matches!(outcome, Outcome::Reply | Outcome::Part) {
            let data = Some(BufferSlice::copy_from(env, &completion)?);
            return Ok(Some(Completion { call, is_final, data, error: None }));
        }
        let bytes = completion.into_vec();
        let error = match outcome {
            Outcome::Lost(loss) => Some(client.loss_error(loss)),
            outcome => outcome.error(|| bytes),
        };
        let error = error.map(|error| JsError::from(raise(error)).into_unknown(*env));
        Ok(Some(Completion { call, is_final, data: None, error }))
    }

    /// Cancels a call.
    #[napi]
    pub fn cancel(&self, call: f64) -> Result<bool> {
        self.0.borrow()?.get()?.cancel(call_of(call)).map_err(raise)
    }

    /// Polls for a completion for some microseconds.
    #[napi]
    pub fn busy_poll(&self) -> Result<bool> {
        self.0.borrow()?.get()?.busy_poll().map_err(raise)
    }

    /// Waits for a completion, or for space; false if something is there.
    #[napi]
    pub fn wait(&self) -> Result<bool> {
        self.0.borrow()?.wait(0)
    }

    /// Calls whose last completion has not come.
    #[napi(getter)]
    pub fn in_flight(&self) -> Result<u32> {
        Ok(self.0.borrow()?.asked()?.in_flight() as u32)
    }

    /// Services that it uses at present.
    #[napi(getter)]
    pub fn services(&self) -> Result<u32> {
        Ok(self.0.borrow()?.asked()?.service_count() as u32)
    }

    /// Whether a large request or a cancel waits for space.
    #[napi(getter)]
    pub fn has_queued(&self) -> Result<bool> {
        Ok(self.0.borrow()?.asked()?.has_queued_messages())
    }

    /// The largest reply.
    #[napi(getter)]
    pub fn call_bytes_max(&self) -> Result<f64> {
        Ok(self.0.borrow()?.asked()?.reply_bytes_max() as f64)
    }
}
