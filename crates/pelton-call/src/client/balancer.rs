//! The connections of one client: to the one service of a socket, or to all services of a short name. It chooses one
//! for each request, discovers others, and submits by another the calls that a lost or draining service did not
//! execute.
//!
//! Nothing here waits, except for the first connection.

use super::connection::{Connection, State};
use super::discovery::{Discovery, READ_INTERVAL};
use crate::calls::{CallId, Calls, Loss, Outcome};
use crate::frame::{Header, Size, check_size};
use crate::inbox::{Inbox, StoredCompletion};
use crate::outbox::FrameSender as _;
use pelton_channel::raw::Settings;
use pelton_channel::raw::{Doorbells, HANDSHAKE_TIMEOUT, Name, RETRY, Spin, Waiter, connect_duplex};
use pelton_channel::{Error, Result};
use pelton_lane::ReservedSpace;
use pelton_os::{Owner, Peer};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Instant;

#[derive(Debug)]
pub(crate) struct Balancer {
    /// One by a socket's path, and any number by a short name.
    pub(crate) connections: Vec<Connection>,
    /// By a short name.
    pub(super) discovery: Option<Discovery>,
    /// Calls that no connection has, and that are to be submitted again.
    pub(super) unrouted: VecDeque<CallId>,
    /// How the only service ended.
    pub(super) end: Option<End>,
    /// The first connection to consider for the next request.
    next_choice: usize,
    /// The connection to poll next: round-robin.
    next_poll: usize,
    pub(crate) owner: Owner,
    pub(super) doorbells: Doorbells,
    pub(super) spin: Spin,
}

/// How the only service ended, once the lane of replies has reported it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// It closed, with this number of requests not released.
    Closed(u64),
    /// It died, with this number of requests not released.
    Died(u64),
    /// It broke the rules.
    Corrupt,
}

/// Connections that one search for space may find lost; the next search continues.
const CONNECTIONS_LOST: usize = 16;
/// Services that may hang up on a client in its first handshakes, before it gets that as an error.
const HANG_UPS: u32 = 16;

impl Balancer {
    /// Connects to the services of a name. Waits for the first.
    pub(super) async fn connect(name: &str, options: &Settings, waiter: &Waiter) -> Result<Balancer> {
        let (name, doorbells) = (Name::parse(name)?, Doorbells::new()?);
        let (mut connections, mut discovery) = (Vec::new(), None);
        match name.is_of_many() {
            true => discovery = Some(Discovery::new(name, options)),
            false => {
                let duplex = connect_duplex(&name, options, &doorbells, waiter).await?;
                connections.push(Connection::new(duplex, PathBuf::new(), 1));
            }
        }
        let mut balancer = Balancer {
            spin: Spin::new(options.wait, connections.first().and_then(Connection::peer)),
            connections,
            discovery,
            unrouted: VecDeque::new(),
            end: None,
            next_choice: 1,
            next_poll: 0,
            owner: Owner::current().map_err(Error::system("looking whose handle this is"))?,
            doorbells,
        };
        if balancer.has_many() {
            balancer.connect_first(options.connect_deadline.from_now(), waiter).await?;
        }
        Ok(balancer)
    }

    /// Waits for the first connection to a service of a short name. Connects to one of them, and to another whenever
    /// that one has left, or has not replied for some time.
    async fn connect_first(&mut self, deadline: Option<Instant>, waiter: &Waiter) -> Result<()> {
        let until = deadline.unwrap_or_else(|| Instant::now() + HANDSHAKE_TIMEOUT);
        let (mut most, mut hang_ups) = (1, 0);
        loop {
            let discovery = self.discovery.as_mut().expect("the name is of many");
            match most {
                0 => discovery.poll(&mut self.connections, &self.doorbells),
                most => discovery.discover(&mut self.connections, &self.doorbells, most)?,
            }
            if !self.connections.is_empty() {
                // The handshakes with the others continue beside the calls.
                let _ = self.discover();
                return Ok(());
            }
            let now = Instant::now();
            if discovery.is_pending() && now < until {
                waiter.sleep(&self.doorbells, Some(until.min(now + READ_INTERVAL))).await?;
                self.doorbells.drain()?;
                most = usize::from(discovery.is_due());
                continue;
            }
            most = 1;
            // There may be a successor, or another service.
            if std::mem::replace(&mut hang_ups, discovery.hang_ups) != discovery.hang_ups && now < until {
                if hang_ups < HANG_UPS {
                    continue;
                }
                return Err(Error::HungUp);
            }
            let name = discovery.name.with_place();
            match discovery.take_error() {
                Some(error) => return Err(error),
                None if deadline.is_none() && !discovery.is_pending() => return Err(Error::NoListener { name }),
                None if now >= until => {
                    return Err(Error::TimedOut(format!("waiting for somebody to listen at {name} and to answer")));
                }
                None => waiter.pause(Instant::now() + RETRY).await?,
            }
        }
    }

    /// Whether a lost service may be replaced by another: by a short name.
    pub(super) fn has_many(&self) -> bool {
        self.discovery.is_some()
    }

    pub(super) fn is_connecting(&self) -> bool {
        self.discovery.as_ref().is_some_and(Discovery::is_pending)
    }

    pub(super) fn peer(&self) -> Option<Peer> {
        self.connections.first().and_then(Connection::peer)
    }

    /// The connections that take requests; the only one always.
    pub(super) fn usable(&self) -> impl Iterator<Item = &Connection> {
        self.connections.iter().filter(|connection| !self.has_many() || connection.is_open())
    }

    pub(super) fn request_bytes_max(&self) -> u64 {
        self.usable().map(|connection| connection.request_bytes_max).max().unwrap_or(u64::MAX)
    }

    /// Checks that the client can be used, and takes a message of this size.
    #[inline(always)]
    pub(super) fn check(&self, bytes: usize) -> Result<()> {
        if self.end.is_some() {
            return Err(self.ended());
        }
        match self.has_many() {
            false => check_size(bytes, self.connections[0].request_bytes_max),
            true => self.check_of_many(bytes),
        }
    }

    #[inline(never)]
    fn check_of_many(&self, bytes: usize) -> Result<()> {
        if self.owner.is_forked() {
            return Err(Error::Forked);
        }
        check_size(bytes, self.request_bytes_max())
    }

    pub(super) fn count_submission(&mut self) {
        if let Some(discovery) = &mut self.discovery {
            discovery.count_submission(&mut self.connections, &self.doorbells);
        }
    }

    /// The connection to poll next.
    pub(super) fn next_to_poll(&mut self) -> usize {
        let at = if self.next_poll < self.connections.len() { self.next_poll } else { 0 };
        self.next_poll = at + 1;
        at
    }

    /// The open connection with the fewest calls in flight, round-robin between equals.
    fn least_busy(&mut self) -> Option<usize> {
        let count = self.connections.len();
        if count == 1 {
            return self.connections[0].is_open().then_some(0);
        }
        let candidates = (0..count).map(|step| (self.next_choice + step) % count);
        let open = candidates.filter(|at| self.connections[*at].is_open());
        let best = open.min_by_key(|at| self.connections[*at].in_flight)?;
        self.next_choice = best + 1;
        Some(best)
    }

    /// Writes a message to a service that has space. Returns the connection's index; `None` if there is no space, or no
    /// connection yet.
    pub(super) fn write(
        &mut self,
        header: Header,
        payload: &[u8],
        calls: &mut Calls,
        inbox: &mut Inbox,
    ) -> Result<Option<usize>> {
        if self.has_many() {
            return self.write_to_any(header, payload, calls, inbox);
        }
        match self.connections[0].write(header, payload) {
            Ok(is_written) => Ok(is_written.then_some(0)),
            Err(error) => Err(self.write_failed(error, calls, inbox)),
        }
    }

    /// Writes a message to the least busy service that has space.
    fn write_to_any(
        &mut self,
        header: Header,
        payload: &[u8],
        calls: &mut Calls,
        inbox: &mut Inbox,
    ) -> Result<Option<usize>> {
        for _ in 0..=CONNECTIONS_LOST {
            let Some(best) = self.least_busy() else {
                match self.find_service()? {
                    true => continue,
                    false => return Ok(None),
                }
            };
            let size = header.size_of(payload);
            let takes = |connection: &Connection| connection.takes(size);
            let mut at = best;
            let lost = loop {
                if takes(&self.connections[at]) {
                    match self.connections[at].write(header, payload) {
                        Ok(true) => return Ok(Some(at)),
                        Ok(false) => {}
                        Err(error) if is_end(&error) => self.connections[at].has_left = true,
                        Err(error) => break Some(error),
                    }
                }
                at = (at + 1) % self.connections.len();
                if at == best {
                    break None;
                }
            };
            match lost {
                Some(error) => self.connection_failed(at, error, calls, inbox)?,
                None if self.connections.iter().any(takes) => return Ok(None),
                // The remaining services take less than one that has left.
                None if self.connections.iter().any(Connection::is_open) => {
                    check_size(size.bytes, self.request_bytes_max())?;
                }
                None => {}
            }
        }
        Ok(None)
    }

    /// Reserves space in the lane of a service that has some. Returns the connection's index too.
    pub(super) fn reserve(
        &mut self,
        bytes: usize,
        calls: &mut Calls,
        inbox: &mut Inbox,
    ) -> Result<Option<(usize, ReservedSpace)>> {
        let best = match self.has_many() {
            true => match self.least_busy() {
                Some(best) => best,
                None if self.find_service()? => self.least_busy().unwrap_or(0),
                None => return Ok(None),
            },
            false => 0,
        };
        for step in 0..self.connections.len() {
            let at = (best + step) % self.connections.len();
            let has_many = self.has_many();
            let connection = &mut self.connections[at];
            if has_many && !connection.takes(Size::untraced(bytes)) {
                continue;
            }
            let outbox = &mut connection.outbox;
            match outbox.flush().and_then(|all| if all { outbox.sender.try_reserve_body(bytes) } else { Ok(None) }) {
                Ok(Some(space)) => return Ok(Some((at, space))),
                Ok(None) => {}
                Err(error) if !has_many => return Err(self.write_failed(error, calls, inbox)),
                Err(error) if is_end(&error) => connection.has_left = true,
                Err(error) => {
                    self.connection_failed(at, error, calls, inbox)?;
                    break;
                }
            }
        }
        Ok(None)
    }

    /// There is no open connection: discovers services. Returns whether there is one now, and false while one is
    /// connecting.
    #[cold]
    fn find_service(&mut self) -> Result<bool> {
        self.poll_handshakes();
        self.discover()?;
        if self.connections.iter().any(Connection::is_open) {
            return Ok(true);
        }
        if self.is_connecting() {
            return Ok(false);
        }
        // Why those that listen refuse this client.
        let error = self.discovery.as_mut().and_then(Discovery::take_error);
        Err(error.unwrap_or_else(|| self.no_listener()))
    }

    #[cold]
    pub(super) fn no_listener(&self) -> Error {
        let name = self.discovery.as_ref().map_or(String::new(), |discovery| discovery.name.with_place());
        Error::NoListener { name }
    }

    /// Begins handshakes with the services of the name that are not known yet.
    #[cold]
    fn discover(&mut self) -> Result<()> {
        let Some(discovery) = &mut self.discovery else { return Ok(()) };
        if self.owner.is_forked() {
            return Err(Error::Forked);
        }
        let discovered = discovery.discover(&mut self.connections, &self.doorbells, usize::MAX);
        self.note_peer();
        discovered
    }

    /// As [`Balancer::discover`], unless that was done just now. An error comes again when there is no connection.
    #[cold]
    pub(super) fn discover_if_due(&mut self) {
        if self.discovery.as_ref().is_some_and(Discovery::is_due) {
            let _ = self.discover();
        }
    }

    /// Continues the pending handshakes.
    pub(super) fn poll_handshakes(&mut self) {
        if let Some(discovery) = &mut self.discovery
            && discovery.is_pending()
            && !self.owner.is_forked()
        {
            let before = self.connections.len();
            discovery.poll(&mut self.connections, &self.doorbells);
            if self.connections.len() > before {
                self.note_peer();
            }
        }
    }

    /// How long to spin depends on the processors of the peer.
    fn note_peer(&mut self) {
        if let Some(connection) = self.connections.last() {
            self.spin.set_peer(connection.peer());
        }
    }

    /// The error of a failed write to the only service.
    #[cold]
    pub(super) fn write_failed(&mut self, error: Error, calls: &mut Calls, inbox: &mut Inbox) -> Error {
        match error {
            Error::Corrupt(_) => self.connection_failed(0, error, calls, inbox).expect_err("there is no other"),
            // The lane of replies reports the end, after the last reply.
            error => error,
        }
    }

    /// A connection has failed: takes its calls off it, and removes it. An error if the client cannot continue.
    #[cold]
    pub(super) fn connection_failed(
        &mut self,
        at: usize,
        error: Error,
        calls: &mut Calls,
        inbox: &mut Inbox,
    ) -> Result<()> {
        let connection = &mut self.connections[at];
        let loss = match error {
            Error::Closed { .. } | Error::PeerDied { .. } if connection.state == State::Drained => Loss::Returned,
            Error::PeerDied { .. } if !connection.outbox.sender.has_receiver_closed() => Loss::PeerDied,
            Error::Closed { .. } | Error::PeerDied { .. } => Loss::Closed,
            Error::Corrupt(_) => Loss::Corrupt,
            error => return Err(error),
        };
        if self.discovery.is_none() && loss != Loss::Returned {
            let unreleased = connection.outbox.sender.unreleased();
            self.end = Some(match loss {
                Loss::PeerDied => End::Died(unreleased),
                Loss::Corrupt => End::Corrupt,
                _ => End::Closed(unreleased),
            });
            connection.outbox.clear();
            connection.replies.retire();
            return Err(if loss == Loss::Corrupt { error } else { self.ended() });
        }
        // The service has begun a call of which some pieces have come.
        if let Some(of) = &connection.assembly {
            calls.note_part(CallId(of.header.id));
        }
        for call in calls.of_connection(connection.number) {
            self.lose_call(call, loss, calls, inbox);
        }
        match self.has_many() {
            true => drop(self.connections.swap_remove(at)),
            // There is no other service, and this one takes nothing.
            false => self.end = Some(End::Closed(0)),
        }
        // An error comes again when there is no connection.
        let _ = self.discover();
        Ok(())
    }

    /// The service of a call does not complete it.
    pub(super) fn lose_call(&mut self, call: CallId, loss: Loss, calls: &mut Calls, inbox: &mut Inbox) {
        let is_awaited = calls.is_awaited(call);
        // A service that has sent a part had begun the call, whatever it says.
        let loss = if loss == Loss::Returned && calls.has_part(call) { Loss::Corrupt } else { loss };
        if is_awaited && self.has_many() && calls.unroute(call, loss) {
            self.unrouted.push_back(call);
            return;
        }
        calls.end(call);
        if is_awaited {
            inbox.store(StoredCompletion { call, outcome: Outcome::Lost(loss), bytes: Vec::new() });
        }
    }

    /// The service of this connection takes no more requests.
    pub(super) fn note_drain(&mut self, at: usize, state: State) {
        self.connections[at].state = state;
        if state == State::Draining {
            // A successor may listen already. An error comes again when there is no connection.
            let _ = self.discover();
        }
    }

    /// Submits the unrouted calls to other services.
    #[cold]
    pub(super) fn reroute(&mut self, calls: &mut Calls, inbox: &mut Inbox) -> Result<()> {
        let mut index = 0;
        // There is no space for a payload of this size, with or without a traceparent.
        let mut full = usize::MAX;
        while let Some(call) = self.unrouted.get(index).copied() {
            if calls.kept_size(call).bytes >= full {
                index += 1;
                continue;
            }
            let (header, request) = calls.take_kept(call);
            let written = self.write_to_any(header, &request, calls, inbox);
            let bytes = request.len();
            calls.put_back(call, request);
            match written {
                Ok(Some(at)) => {
                    let connection = &mut self.connections[at];
                    connection.in_flight += 1;
                    calls.reroute(call, connection.number);
                }
                Ok(None) => {
                    full = full.min(bytes);
                    index += 1;
                    continue;
                }
                // A service that is connecting may take it.
                Err(Error::TooLarge { .. }) if self.is_connecting() => {
                    index += 1;
                    continue;
                }
                Err(error @ Error::Forked) => return Err(error),
                // There is no service, or it refuses this client, takes less, or cannot be reached.
                Err(_) => {
                    if let crate::calls::State::Unrouted(loss) = calls.state(call) {
                        calls.end(call);
                        inbox.store(StoredCompletion { call, outcome: Outcome::Lost(loss), bytes: Vec::new() });
                    }
                }
            }
            self.unrouted.remove(index);
        }
        Ok(())
    }

    /// The error of a client whose only service has ended.
    #[cold]
    pub(super) fn ended(&self) -> Error {
        match self.end {
            Some(End::Closed(unreleased)) => Error::Closed { unreleased },
            Some(End::Died(unreleased)) => Error::PeerDied { unreleased },
            _ => Error::Corrupt("the service broke the rules before".to_owned()),
        }
    }
}

/// Whether the service has closed or died.
pub(super) fn is_end(error: &Error) -> bool {
    error.is_closed() || error.is_peer_died()
}
