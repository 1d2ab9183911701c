//! `Service` of the addon. A request that can be answered is the place of its responder in JavaScript.

use crate::endpoint::{Armable, AsRawFdOfLoop, Handle, methods};
use crate::error::{named, raise};
use crate::fast;
use crate::open::Given;
use napi::bindgen_prelude::*;
use napi::sys;
use napi_derive::napi;
use pelton::{Armed, Responder, Sent};
use std::cell::{RefCell, RefMut};
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::time::Instant;

/// The numbers of a request for JavaScript: the place of its responder, -1 of a notification; the client's process and
/// user, -1 if unknown; the milliseconds that it waits, NaN without a limit.
const HEAD: usize = 4;

/// A request that is taken, but for its bytes.
type Head = [f64; HEAD];

/// What is not answered yet. It outlives the service: a handler may reply after its close.
#[derive(Default)]
struct Unanswered {
    responders: Vec<Option<Responder>>,
    free: Vec<u32>,
    /// A request that had no space: the next one.
    kept: Option<(Vec<u8>, Head)>,
}

impl Unanswered {
    fn keep(&mut self, responder: Responder) -> u32 {
        match self.free.pop() {
            Some(place) => {
                self.responders[place as usize] = Some(responder);
                place
            }
            None => {
                self.responders.push(Some(responder));
                self.responders.len() as u32 - 1
            }
        }
    }

    fn open(&mut self, place: u32) -> Result<&mut Responder> {
        let found = self.responders.get_mut(place as usize).and_then(Option::as_mut);
        found.ok_or_else(|| named("refused", "the call is answered"))
    }

    fn take(&mut self, place: u32) -> Option<Responder> {
        let responder = self.responders.get_mut(place as usize)?.take()?;
        self.free.push(place);
        Some(responder)
    }

    /// Ends the call of a place, unless the reply is too large: then it is still open.
    #[inline]
    fn answer(&mut self, place: u32, bytes: usize, answer: impl FnOnce(Responder) -> pelton::Result<()>) -> Result<()> {
        let checked = self.open(place)?.check_answer(bytes);
        if let Err(error @ pelton::Error::TooLarge { .. }) = checked {
            return Err(raise(error));
        }
        match self.take(place) {
            Some(responder) => checked.and_then(|()| answer(responder)).map_err(raise),
            None => Ok(()),
        }
    }
}

/// A service, and what it has not answered.
#[derive(Clone)]
struct Serving {
    service: Handle<pelton::Service>,
    unanswered: Rc<RefCell<Unanswered>>,
}

impl Serving {
    /// Only an error that is being made runs JavaScript meanwhile.
    #[inline]
    fn unanswered(&self) -> Result<RefMut<'_, Unanswered>> {
        self.unanswered.try_borrow_mut().map_err(|_| named("wrong_thread", "this object is in use: call it after that"))
    }

    /// Takes requests, `most` of them: their bytes to `space`, each from a multiple of 8 on, their sizes and heads.
    /// Returns their number; -1 if there is none; of a first one that does not fit, -2 less its bytes, and it stays the
    /// next. With `most` of 0 it handles cancels, and takes none but a notification of a client that has left.
    #[inline]
    fn receive(&self, space: &mut [u8], sizes: &mut [u32], heads: &mut [f64], most: usize) -> Result<i64> {
        let mut unanswered = self.unanswered()?;
        let mut endpoint = self.service.borrow()?;
        let service = endpoint.get()?;
        let (mut used, mut count) = (0, 0);
        for (size, head) in sizes.iter_mut().zip(heads.as_chunks_mut::<HEAD>().0).take(most.max(1)) {
            if let Some((bytes, kept)) = &unanswered.kept {
                let Some(end) = fast::copy(bytes, space, used) else {
                    return Ok(if count == 0 { -2 - bytes.len() as i64 } else { count });
                };
                (*size, *head, used) = (bytes.len() as u32, *kept, end);
                unanswered.kept = None;
                count += 1;
                continue;
            }
            let found = if most == 0 { service.try_receive_none() } else { service.try_receive() };
            let request = match found {
                Ok(Some(request)) => request,
                Ok(None) => break,
                Err(error) if count == 0 => return Err(raise(error)),
                // The next call returns the error, after these requests.
                Err(_) => break,
            };
            let (is_notification, peer) = (request.is_notification(), request.peer());
            let left = request.deadline().map(|end| end.saturating_duration_since(Instant::now()));
            *head = [
                -1.0,
                peer.map_or(-1.0, |peer| peer.pid.into()),
                peer.map_or(-1.0, |peer| peer.uid.into()),
                left.map_or(f64::NAN, |left| left.as_secs_f64() * 1e3),
            ];
            let (responder, kept) = match fast::copy(&request, space, used) {
                Some(end) => {
                    (*size, used) = (request.len() as u32, end);
                    (request.into_responder(), None)
                }
                None => {
                    let (bytes, responder) = request.into_parts();
                    (responder, Some(bytes))
                }
            };
            if !is_notification {
                head[0] = unanswered.keep(responder).into();
            }
            if let Some(bytes) = kept {
                let length = bytes.len();
                unanswered.kept = Some((bytes, *head));
                return Ok(if count == 0 { -2 - length as i64 } else { count });
            }
            count += 1;
        }
        Ok(if count == 0 { -1 } else { count })
    }
}

impl AsRawFdOfLoop for pelton::Service {
    fn fd(&self) -> i32 {
        self.as_raw_fd()
    }
}

impl Armable for pelton::Service {
    fn arm(&mut self, _bytes: usize) -> pelton::Result<bool> {
        Ok(pelton::Service::arm(self)? == Armed::Waiting)
    }
    fn disarm(&mut self) {
        pelton::Service::disarm(self);
    }
}

/// Takes requests.
#[napi]
pub struct Service(Handle<pelton::Service>, Rc<RefCell<Unanswered>>);

/// Listens under a name for clients.
#[napi]
pub fn listen_service(name: String, given: Given) -> Result<Service> {
    let service = pelton::Service::listen_with(&name, &given.options().cast()).map_err(raise)?;
    Ok(Service(Handle::new("service", service), Rc::default()))
}

methods!(Service);

/// `receive(space, offset, sizes, heads, most)`: [`Serving::receive`], to `space` from `offset` on.
unsafe extern "C" fn receive(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: Node calls, and `functions` has made the function. JavaScript has no views of these arrays in one memory.
    unsafe {
        fast::call::<Serving, i64, 5>(env, info, |serving, arguments| {
            let space = arguments.space(0)?.get_mut(arguments.number(1) as usize..).unwrap_or_default();
            serving.receive(space, arguments.numbers(2)?, arguments.doubles(3)?, arguments.number(4) as usize)
        })
    }
}

/// `busyPoll()`: polls for a request for some microseconds.
unsafe extern "C" fn busy_poll(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: as `receive`.
    unsafe {
        fast::call::<Serving, bool, 0>(env, info, |serving, _| {
            serving.service.borrow()?.get()?.busy_poll().map_err(raise)
        })
    }
}

/// `wait()`: waits for a request, a cancel, or space for a part; false if something is there.
unsafe extern "C" fn wait(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: as `receive`.
    unsafe { fast::call::<Serving, bool, 0>(env, info, |serving, _| serving.service.borrow()?.wait(0)) }
}

/// `cancels()`: how many cancels, and departures of clients, have come.
unsafe extern "C" fn cancels(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: as `receive`.
    unsafe {
        fast::call::<Serving, i64, 0>(env, info, |serving, _| Ok(serving.service.borrow()?.asked()?.cancels() as i64))
    }
}

/// `reply(place, data)`: replies, and ends the call, also if it fails; unless the reply is too large.
unsafe extern "C" fn reply(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: as `receive`.
    unsafe {
        fast::call::<Serving, bool, 2>(env, info, |serving, arguments| {
            let data = arguments.bytes(1)?;
            let answer = |responder: Responder| responder.reply(data);
            serving.unanswered()?.answer(arguments.number(0), data.len(), answer)?;
            Ok(true)
        })
    }
}

#[napi]
impl Service {
    /// The functions that are called for each request.
    #[napi]
    pub fn functions<'env>(&self, env: &'env Env) -> Result<Vec<Unknown<'env>>> {
        let serving = Serving { service: self.0.clone(), unanswered: self.1.clone() };
        // SAFETY: each is a `call` with `Serving`.
        unsafe {
            Ok(vec![
                fast::function(env, c"receive", &serving, Some(receive))?,
                fast::function(env, c"busyPoll", &serving, Some(busy_poll))?,
                fast::function(env, c"wait", &serving, Some(wait))?,
                fast::function(env, c"cancels", &serving, Some(cancels))?,
                fast::function(env, c"reply", &serving, Some(reply))?,
            ])
        }
    }

    fn unanswered(&self) -> Result<RefMut<'_, Unanswered>> {
        self.1.try_borrow_mut().map_err(|_| named("wrong_thread", "this object is in use: call it after that"))
    }

    /// Whether nobody waits for the reply of a place any more.
    #[napi]
    pub fn is_cancelled(&self, place: u32) -> Result<bool> {
        Ok(self.unanswered()?.open(place)?.is_cancelled())
    }

    /// The header `traceparent` with which the request of a place has come.
    #[napi]
    pub fn traceparent(&self, place: u32) -> Result<Option<String>> {
        Ok(self.unanswered()?.open(place)?.traceparent().map(|traceparent| traceparent.to_string()))
    }

    /// Fails the call of a place, as `reply`.
    #[napi]
    pub fn fail(&self, place: u32, code: u32, data: &[u8]) -> Result<()> {
        self.unanswered()?.answer(place, data.len(), |responder| responder.fail(code, data))
    }

    /// Ends the reply in parts of a place, as `reply`.
    #[napi]
    pub fn end_parts(&self, place: u32) -> Result<()> {
        self.unanswered()?.answer(place, 0, Responder::end)
    }

    /// Sends a part; false if there is no space.
    #[napi]
    pub fn try_part(&self, place: u32, data: &[u8]) -> Result<bool> {
        Ok(self.unanswered()?.open(place)?.try_part(data).map_err(raise)? == Sent::Sent)
    }

    /// Drops the call of a place.
    #[napi]
    pub fn abandon(&self, place: u32) -> Result<()> {
        self.unanswered()?.take(place);
        Ok(())
    }

    /// Takes no more requests.
    #[napi]
    pub fn end(&self) -> Result<()> {
        self.0.borrow()?.asked()?.stopper().stop();
        Ok(())
    }

    /// Answers what it has taken, and takes no more.
    #[napi]
    pub fn drain(&self) -> Result<()> {
        self.0.borrow()?.asked()?.stopper().drain();
        Ok(())
    }

    /// Replies to clients that had left.
    #[napi(getter)]
    pub fn replies_dropped(&self) -> Result<f64> {
        Ok(self.0.borrow()?.asked()?.replies_dropped() as f64)
    }

    /// Clients that broke the rules, and were disconnected.
    #[napi(getter)]
    pub fn corrupt_clients(&self) -> Result<f64> {
        Ok(self.0.borrow()?.asked()?.corrupt_clients() as f64)
    }
}
