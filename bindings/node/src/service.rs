//! `Service` of the addon, and its requests.

use crate::endpoint::{Armable, AsRawFdOfLoop, Handle, methods};
use crate::error::{named, raise};
use crate::open::Given;
use napi::bindgen_prelude::*;
use napi_derive::napi;
use pelton::{Armed, Responder, Sent};
use std::os::fd::AsRawFd;

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
pub struct Service(Handle<pelton::Service>);

/// Listens under a name for clients.
#[napi]
pub fn listen_service(name: String, given: Given) -> Result<Service> {
    let service = pelton::Service::listen_with(&name, &given.options().cast()).map_err(raise)?;
    Ok(Service(Handle::new("service", service)))
}

methods!(Service);

#[napi]
impl Service {
    /// The next request; null if there is none. With `pauses` it takes none, and handles cancels.
    #[napi]
    pub fn try_receive(&self, pauses: bool) -> Result<Option<Request>> {
        let mut endpoint = self.0.borrow()?;
        let service = endpoint.get()?;
        let found = if pauses { service.try_receive_none() } else { service.try_receive() };
        let Some(request) = found.map_err(raise)? else { return Ok(None) };
        let (is_notification, peer) = (request.is_notification(), request.peer());
        let (bytes, responder) = request.into_parts();
        let left = responder.deadline().map(|end| end.saturating_duration_since(std::time::Instant::now()));
        Ok(Some(Request {
            data: Some(bytes),
            responder: (!is_notification).then_some(responder),
            is_notification,
            peer_pid: peer.map(|peer| peer.pid),
            peer_uid: peer.map(|peer| peer.uid),
            ms_left: left.map(|left| left.as_secs_f64() * 1e3),
        }))
    }

    /// How many cancels, and departures of clients, have come.
    #[napi(getter)]
    pub fn cancels(&self) -> Result<f64> {
        Ok(self.0.borrow()?.asked()?.cancels() as f64)
    }

    /// Polls for a request for some microseconds.
    #[napi]
    pub fn busy_poll(&self) -> Result<bool> {
        self.0.borrow()?.get()?.busy_poll().map_err(raise)
    }

    /// Waits for a request, a cancel, or space for a part; false if something is there.
    #[napi]
    pub fn wait(&self) -> Result<bool> {
        self.0.borrow()?.wait(0)
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

/// A request, and its responder.
#[napi]
pub struct Request {
    data: Option<Vec<u8>>,
    responder: Option<Responder>,
    is_notification: bool,
    peer_pid: Option<u32>,
    peer_uid: Option<u32>,
    ms_left: Option<f64>,
}

impl Request {
    fn answer(&mut self, bytes: usize, answer: impl FnOnce(Responder) -> pelton::Result<()>) -> Result<()> {
        // After an error of the size, the call is still open.
        self.open()?.check_answer(bytes).map_err(raise)?;
        match self.responder.take() {
            Some(responder) => answer(responder).map_err(raise),
            None => Ok(()),
        }
    }

    fn open(&mut self) -> Result<&mut Responder> {
        let text = if self.is_notification { "a notification is not answered" } else { "the call is answered" };
        self.responder.as_mut().ok_or_else(|| named("refused", text))
    }
}

#[napi]
impl Request {
    /// The bytes, once.
    #[napi]
    pub fn take_data<'env>(&mut self, env: &'env Env) -> Result<BufferSlice<'env>> {
        BufferSlice::copy_from(env, self.data.take().unwrap_or_default())
    }

    /// Whether it is a notification.
    #[napi(getter)]
    pub fn is_notification(&self) -> bool {
        self.is_notification
    }

    /// Whether it was answered, or is a notification.
    #[napi(getter)]
    pub fn is_answered(&self) -> bool {
        self.responder.is_none()
    }

    /// How long the client waits, in milliseconds, when it was taken.
    #[napi(getter)]
    pub fn ms_left(&self) -> Option<f64> {
        self.ms_left
    }

    /// The process of the client.
    #[napi(getter)]
    pub fn peer_pid(&self) -> Option<u32> {
        self.peer_pid
    }

    /// The user of the client.
    #[napi(getter)]
    pub fn peer_uid(&self) -> Option<u32> {
        self.peer_uid
    }

    /// Whether nobody waits for the reply any more.
    #[napi(getter)]
    pub fn is_cancelled(&self) -> bool {
        self.responder.as_ref().is_some_and(Responder::is_cancelled)
    }

    /// Replies, and ends the call.
    #[napi]
    pub fn reply(&mut self, data: &[u8]) -> Result<()> {
        self.answer(data.len(), |responder| responder.reply(data))
    }

    /// Fails the call.
    #[napi]
    pub fn fail(&mut self, code: u32, data: &[u8]) -> Result<()> {
        self.answer(data.len(), |responder| responder.fail(code, data))
    }

    /// Ends a reply in parts.
    #[napi]
    pub fn end(&mut self) -> Result<()> {
        self.answer(0, Responder::end)
    }

    /// Sends a part; false if there is no space.
    #[napi]
    pub fn try_part(&mut self, data: &[u8]) -> Result<bool> {
        Ok(self.open()?.try_part(data).map_err(raise)? == Sent::Sent)
    }

    /// Drops the call.
    #[napi]
    pub fn abandon(&mut self) {
        self.responder = None;
    }
}
