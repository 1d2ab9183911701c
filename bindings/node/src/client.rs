//! `Client` of the addon. A call is its slot in JavaScript, which has one call at a time in each.

use crate::endpoint::{Armable, AsRawFdOfLoop, Handle, deadline, methods};
use crate::error::raise;
use crate::fast;
use napi::bindgen_prelude::*;
use napi::sys;
use napi_derive::napi;
use pelton::{Armed, CallId, Deadline, Outcome, Sent, Traceparent};
use std::os::fd::AsRawFd;

/// Of a completion for JavaScript, whose head is its slot, and these bits: it has ended the call; it has bytes; it is
/// an error; the next one is taken, and waits for space. `lib/client.js` has them too.
const FINAL: u32 = 1;
const BYTES: u32 = 2;
const FAILED: u32 = 4;
const MORE: u32 = 8;
const SLOT_SHIFT: u32 = 4;

/// A client, and its calls by slot.
pub struct Calling {
    client: pelton::Client,
    calls: Vec<Option<CallId>>,
    /// A completion that had no space: the next one.
    kept: Option<Kept>,
}

/// A completion that is taken.
struct Kept {
    call: CallId,
    head: u32,
    bytes: Vec<u8>,
}

/// The slot of a call: less than 1,024.
fn slot_of(call: CallId) -> u32 {
    (call.to_bits() & 0x3ff) as u32
}

impl Calling {
    /// Submits a request: its slot; -1 if there is no space, or too many calls are in flight.
    #[inline]
    fn submit(
        &mut self,
        request: &[u8],
        timeout: Option<f64>,
        is_idempotent: bool,
        traceparent: Option<Traceparent>,
    ) -> pelton::Result<i32> {
        let submitted = match (traceparent, deadline(timeout)) {
            (Some(traceparent), deadline) => self.client.try_submit_traced_by(request, traceparent, deadline)?,
            (None, Deadline::At(end)) => self.client.try_submit_by(request, end)?,
            (None, _) => self.client.try_submit(request)?,
        };
        let Some(call) = submitted else { return Ok(-1) };
        if is_idempotent {
            self.client.mark_idempotent(call)?;
        }
        let slot = slot_of(call);
        if self.calls.len() <= slot as usize {
            self.calls.resize(slot as usize + 1, None);
        }
        self.calls[slot as usize] = Some(call);
        Ok(slot as i32)
    }

    fn call(&self, slot: u32) -> Option<CallId> {
        self.calls.get(slot as usize).copied().flatten()
    }

    /// Takes completions: their bytes to `space`, each from a multiple of 8 on, and their sizes and heads. `failed`
    /// gets the errors, and which of them they are. Returns their number; -1 if there is none; of a first one that does
    /// not fit, -2 less its bytes, and it stays the next.
    fn complete(
        &mut self,
        space: &mut [u8],
        sizes: &mut [u32],
        heads: &mut [u32],
        failed: &mut Vec<(u32, pelton::Error)>,
    ) -> pelton::Result<i64> {
        if let Some(kept) = &self.kept {
            let is_awaited = self.call(slot_of(kept.call)) == Some(kept.call);
            match (is_awaited, &mut *sizes, &mut *heads) {
                (true, [size, ..], [head, ..]) => {
                    if fast::copy(&kept.bytes, space, 0).is_none() {
                        return Ok(-2 - kept.bytes.len() as i64);
                    }
                    (*size, *head) = (kept.bytes.len() as u32, kept.head);
                    self.kept = None;
                    // Alone, so that parts do not come without an end.
                    return Ok(1);
                }
                // JavaScript had no memory for it, and has failed its call since.
                _ => self.kept = None,
            }
        }
        let (mut used, mut count) = (0, 0);
        while count < sizes.len().min(heads.len()) {
            let completion = match self.client.try_completion() {
                Ok(Some(completion)) => completion,
                Ok(None) => break,
                Err(error) if count == 0 => return Err(error),
                // The next call returns the error, after these completions.
                Err(_) => break,
            };
            let (call, outcome) = (completion.call_id(), completion.outcome());
            let mut head = slot_of(call) << SLOT_SHIFT | if outcome.is_final() { FINAL } else { 0 };
            let mut size = 0;
            match outcome {
                Outcome::Reply | Outcome::Part => {
                    head |= BYTES;
                    size = completion.len();
                    match fast::copy(&completion, space, used) {
                        Some(end) => used = end,
                        None => {
                            self.kept = Some(Kept { call, head, bytes: completion.into_vec() });
                            match count.checked_sub(1) {
                                Some(last) => heads[last] |= MORE,
                                None => return Ok(-2 - size as i64),
                            }
                            break;
                        }
                    }
                }
                Outcome::End => {}
                Outcome::Lost(loss) => {
                    head |= FAILED;
                    drop(completion);
                    failed.push((count as u32, self.client.loss_error(loss)));
                }
                outcome => {
                    let bytes = completion.into_vec();
                    head |= FAILED;
                    failed.extend(outcome.error(|| bytes).map(|error| (count as u32, error)));
                }
            }
            (sizes[count], heads[count]) = (size as u32, head);
            count += 1;
        }
        Ok(if count == 0 { -1 } else { count as i64 })
    }
}

impl AsRawFdOfLoop for Calling {
    fn fd(&self) -> i32 {
        self.client.as_raw_fd()
    }
}

impl Armable for Calling {
    fn arm(&mut self, _bytes: usize) -> pelton::Result<bool> {
        Ok(self.client.arm()? == Armed::Waiting)
    }
    fn disarm(&mut self) {
        self.client.disarm();
    }
}

/// A client of calls.
#[napi]
pub struct Client(Handle<Calling>);

impl Client {
    pub fn new(client: pelton::Client) -> Client {
        Client(Handle::new("client", Calling { client, calls: Vec::new(), kept: None }))
    }
}

methods!(Client);

/// `trySubmit(request, timeout, isIdempotent, traceparent)`: [`Calling::submit`].
unsafe extern "C" fn try_submit(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: Node calls, and `functions` has made the function.
    unsafe {
        fast::call::<Handle<Calling>, i32, 4>(env, info, |handle, arguments| {
            let request = arguments.bytes(0)?;
            let (timeout, is_idempotent) = (arguments.double(1), arguments.is_true(2));
            let mut endpoint = handle.borrow()?;
            endpoint.get()?.submit(request, timeout, is_idempotent, arguments.traceparent(3)).map_err(raise)
        })
    }
}

/// `completions(space, offset, sizes, heads, errors)`: [`Calling::complete`], to `space` from `offset` on. `errors` is
/// an array, which gets the errors at the places of their completions.
unsafe extern "C" fn completions(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: as `try_submit`. JavaScript has no views of these arrays in one memory.
    unsafe {
        fast::call::<Handle<Calling>, i64, 5>(env, info, |handle, arguments| {
            let mut failed = Vec::new();
            let count = {
                let space = arguments.space(0)?.get_mut(arguments.number(1) as usize..).unwrap_or_default();
                let (sizes, heads) = (arguments.numbers(2)?, arguments.numbers(3)?);
                handle.borrow()?.get()?.complete(space, sizes, heads, &mut failed).map_err(raise)?
            };
            for (place, error) in failed {
                arguments.set_error(4, place, raise(error))?;
            }
            Ok(count)
        })
    }
}

/// `busyPoll()`: polls for a completion for some microseconds.
unsafe extern "C" fn busy_poll(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: as `try_submit`.
    unsafe {
        fast::call::<Handle<Calling>, bool, 0>(env, info, |handle, _| {
            let mut endpoint = handle.borrow()?;
            let calling = endpoint.get()?;
            Ok(calling.kept.is_some() || calling.client.busy_poll().map_err(raise)?)
        })
    }
}

/// `wait()`: waits for a completion, or for space; false if something is there.
unsafe extern "C" fn wait(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: as `try_submit`.
    unsafe { fast::call::<Handle<Calling>, bool, 0>(env, info, |handle, _| handle.borrow()?.wait(0)) }
}

/// `hasQueued()`: whether a large request or a cancel waits for space.
unsafe extern "C" fn has_queued(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: as `try_submit`.
    unsafe {
        fast::call::<Handle<Calling>, bool, 0>(env, info, |handle, _| {
            Ok(handle.borrow()?.asked()?.client.has_queued_messages())
        })
    }
}

#[napi]
impl Client {
    /// The functions that are called for each call.
    #[napi]
    pub fn functions<'env>(&self, env: &'env Env) -> Result<Vec<Unknown<'env>>> {
        // SAFETY: each is a `call` with a handle of `Calling`.
        unsafe {
            Ok(vec![
                fast::function(env, c"trySubmit", &self.0, Some(try_submit))?,
                fast::function(env, c"completions", &self.0, Some(completions))?,
                fast::function(env, c"busyPoll", &self.0, Some(busy_poll))?,
                fast::function(env, c"wait", &self.0, Some(wait))?,
                fast::function(env, c"hasQueued", &self.0, Some(has_queued))?,
            ])
        }
    }

    /// Sends a message that gets no reply; false if there is no space.
    #[napi]
    pub fn try_notify(&self, message: &[u8]) -> Result<bool> {
        Ok(self.0.borrow()?.get()?.client.try_notify(message).map_err(raise)? == Sent::Sent)
    }

    /// Cancels the call of a slot.
    #[napi]
    pub fn cancel(&self, slot: u32) -> Result<bool> {
        let mut endpoint = self.0.borrow()?;
        let calling = endpoint.get()?;
        match calling.call(slot) {
            Some(call) => calling.client.cancel(call).map_err(raise),
            None => Ok(false),
        }
    }

    /// Calls whose last completion has not come.
    #[napi(getter)]
    pub fn in_flight(&self) -> Result<u32> {
        Ok(self.0.borrow()?.asked()?.client.in_flight() as u32)
    }

    /// Services that it uses at present.
    #[napi(getter)]
    pub fn services(&self) -> Result<u32> {
        Ok(self.0.borrow()?.asked()?.client.service_count() as u32)
    }

    /// The largest reply.
    #[napi(getter)]
    pub fn call_bytes_max(&self) -> Result<f64> {
        Ok(self.0.borrow()?.asked()?.client.reply_bytes_max() as f64)
    }
}
