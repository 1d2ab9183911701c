//! How a client submits requests and notifications without waiting.

use super::{Client, Condition, Wanted};
use crate::calls::CallId;
use crate::frame::{CALLS_MAX, Header, Kind, Size};
use crate::outbox::FrameSender as _;
use pelton_channel::{Deadline, Error, Result, Traceparent};
use pelton_lane::ReservedSpace;
use std::time::Instant;

impl Client {
    /// Submits to the only service, with an empty queue and space at the tail. `None` in any other case: use
    /// [`Client::submit_now`]. Its result stays in registers.
    #[inline(always)]
    pub(super) fn submit_fast(&mut self, request: &[u8]) -> Option<CallId> {
        if self.balancer.discovery.is_some() || self.balancer.end.is_some() || !self.inbox.is_empty() {
            return None;
        }
        let connection = &mut self.balancer.connections[0];
        if request.len() as u64 > connection.request_bytes_max || !connection.outbox.is_empty() {
            return None;
        }
        let call = self.calls.next()?;
        let header = Header::new(Kind::Request, call.0);
        if !connection.outbox.sender.write_fast(header.words(), request) {
            return None;
        }
        connection.in_flight += 1;
        self.calls.begin(call, connection.number);
        self.wanted = None;
        Some(call)
    }

    /// Submits a request, if there is space now.
    #[inline(never)]
    pub(super) fn submit_now(&mut self, request: &[u8], deadline: u64) -> Result<Option<CallId>> {
        self.submit_header(Header { deadline, ..Header::new(Kind::Request, 0) }, request)
    }

    /// As [`Client::submit_now`], with a header that lacks only the id, and with what it says is before the request.
    fn submit_header(&mut self, header: Header, request: &[u8]) -> Result<Option<CallId>> {
        self.balancer.check(request.len() - header.prefix_bytes())?;
        let Some(call) = self.next_call() else { return Ok(None) };
        let header = Header { id: call.0, ..header };
        let Some(at) = self.write_now(header, request)? else { return Ok(None) };
        if self.balancer.has_many() {
            // Calls of a connection that failed meanwhile have ended.
            self.calls.put_first(call);
        }
        self.begin(call, at);
        if self.balancer.has_many() {
            self.calls.keep(call, header, request);
            self.balancer.count_submission();
        }
        Ok(Some(call))
    }

    #[cold]
    pub(super) fn submit_waiting(
        &mut self,
        request: &[u8],
        deadline: Deadline,
        deadline_ns: u64,
    ) -> Result<Option<CallId>> {
        let header = Header { deadline: deadline_ns, ..Header::new(Kind::Request, 0) };
        self.submit_header_waiting(header, request, deadline)
    }

    fn submit_header_waiting(&mut self, header: Header, request: &[u8], deadline: Deadline) -> Result<Option<CallId>> {
        let condition = Condition::Space { size: header.size_of(request), is_call: true };
        while self.find(condition, deadline)?.is_some() {
            if let Some(call) = self.submit_header(header, request)? {
                return Ok(Some(call));
            }
            // `find` checks the deadline only when it has to wait.
            if deadline.instant().is_some_and(|deadline| Instant::now() >= deadline) {
                break;
            }
        }
        Ok(None)
    }

    /// As [`Client::submit_until`], for a service that reads [`Request::traceparent`](crate::Request::traceparent).
    /// With [`Deadline::Now`] it does not wait, and the service gets no deadline. Services of earlier versions, which
    /// take no traceparent, get the request without it. The request is copied once more than by [`Client::submit`].
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// # let name = format!("unix:{}/traced-doc-{}", std::env::temp_dir().display(), std::process::id());
    /// let mut service = pelton::Service::listen(&name)?;
    /// # let stopper = service.stopper();
    /// // Usually another process:
    /// let serving = std::thread::spawn(move || {
    ///     service.run(1, |request| {
    ///         let parent = request.traceparent().map_or("none".to_owned(), |parent| parent.to_string());
    ///         let _ = request.reply(parent.as_bytes());
    ///     })
    /// });
    ///
    /// let mut client = pelton::Client::connect(&name)?;
    /// let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    /// let span = pelton::Traceparent::parse(text).unwrap();
    /// let call = client.submit_traced(b"now", span, pelton::Deadline::Never)?.unwrap();
    /// assert_eq!(&*client.completion_of(call)?.ok()?, text.as_bytes());
    /// # stopper.stop();
    /// # serving.join().unwrap()
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Client::submit`].
    pub fn submit_traced(
        &mut self,
        request: &[u8],
        traceparent: Traceparent,
        deadline: impl Into<Deadline>,
    ) -> Result<Option<CallId>> {
        let deadline = deadline.into();
        let (header, bytes) = self.traced(request, traceparent, deadline);
        match self.submit_header(header, &bytes)? {
            None if deadline != Deadline::Now => self.submit_header_waiting(header, &bytes, deadline),
            call => Ok(call),
        }
    }

    /// As [`Client::submit_traced`], with a deadline for the service. Never waits.
    #[doc(hidden)]
    pub fn try_submit_traced_by(
        &mut self,
        request: &[u8],
        traceparent: Traceparent,
        deadline: Deadline,
    ) -> Result<Option<CallId>> {
        let (header, bytes) = self.traced(request, traceparent, deadline);
        self.submit_header(header, &bytes)
    }

    /// A header without an id, and what follows it.
    fn traced(&self, request: &[u8], traceparent: Traceparent, deadline: Deadline) -> (Header, Vec<u8>) {
        // Not to wait for space says nothing about the reply.
        let deadline = match deadline {
            Deadline::At(instant) => self.clock.ns_of(instant),
            Deadline::Now | Deadline::Never => 0,
        };
        let header = Header { deadline, traced: true, ..Header::new(Kind::Request, 0) };
        (header, [&traceparent.encode(), request].concat())
    }

    /// Sends a notification, if there is space now. Returns the index of the connection.
    pub(super) fn notify_now(&mut self, message: &[u8]) -> Result<Option<usize>> {
        self.balancer.check(message.len())?;
        if self.balancer.has_many() {
            self.receive_drains()?;
        }
        let written = self.write_now(Header::new(Kind::Notify, 0), message)?;
        if written.is_some() {
            self.balancer.count_submission();
        }
        Ok(written)
    }

    /// The id of the next call, if the client may have one more.
    pub(super) fn next_call(&mut self) -> Option<CallId> {
        let may_submit = self.inbox.is_empty() || !self.is_inbox_full();
        if may_submit { self.calls.next() } else { None }
    }

    #[inline(always)]
    pub(super) fn begin(&mut self, call: CallId, at: usize) {
        let connection = &mut self.balancer.connections[at];
        connection.in_flight += 1;
        self.calls.begin(call, connection.number);
    }

    /// Whether so many completions are stored that the client submits nothing more.
    #[cold]
    pub(super) fn is_inbox_full(&self) -> bool {
        self.inbox.bytes() > self.reply_bytes_max || self.inbox.finals() >= CALLS_MAX as usize
    }

    /// Writes a message to a service that has space. Returns the index of the connection.
    fn write_now(&mut self, header: Header, payload: &[u8]) -> Result<Option<usize>> {
        self.before_failure();
        let Client { balancer, calls, inbox, wanted, .. } = self;
        let written = balancer.write(header, payload, calls, inbox)?;
        *wanted = if written.is_some() { None } else { Some(Wanted::of(header.size_of(payload))) };
        if written.is_none() {
            balancer.discover_if_due();
        }
        Ok(written)
    }

    /// Reserves space in the lane of a service that has some. Returns the index of the connection too.
    pub(super) fn reserve_now(&mut self, bytes: usize) -> Result<Option<(usize, ReservedSpace)>> {
        self.before_failure();
        let Client { balancer, calls, inbox, wanted, .. } = self;
        let reserved = balancer.reserve(bytes, calls, inbox)?;
        *wanted = if reserved.is_some() { None } else { Some(Wanted::of(Size::untraced(bytes))) };
        if reserved.is_none() {
            balancer.discover_if_due();
        }
        Ok(reserved)
    }

    /// A connection that fails is removed: a completion that a wait has found in its lane is stored before.
    fn before_failure(&mut self) {
        if self.found.is_some() && self.balancer.has_many() {
            self.store_found();
        }
    }

    #[cold]
    pub(super) fn connection_failed(&mut self, at: usize, error: Error) -> Result<()> {
        self.before_failure();
        self.balancer.connection_failed(at, error, &mut self.calls, &mut self.inbox)
    }
}
