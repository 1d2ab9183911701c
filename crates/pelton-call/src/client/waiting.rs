//! A client's wait, in which it does everything else that is due: replies of all connections, queued messages,
//! handshakes.

use super::balancer::is_end;
use super::discovery::READ_INTERVAL;
use super::{Balancer, Client, Condition, Connection};
use crate::frame::Size;
use crate::outbox::FrameSender as _;
use pelton_channel::raw::{LastRing, Polled, Side, Spin};
use pelton_channel::{Error, Result};
use pelton_os::Ready;
use std::time::Instant;

/// A client that waits, on both lanes of each connection. It takes replies while it waits for space for a request, so
/// that two full lanes never wait for each other.
pub(super) struct Waiting<'a> {
    pub(super) client: &'a mut Client,
    pub(super) condition: Condition,
    /// Size of another message that waits for space.
    pub(super) wanted: Option<Size>,
}

impl Waiting<'_> {
    /// The size of the largest record for which this connection's lane should have space; `None` if for none.
    fn space_wanted(&self, connection: &Connection) -> Option<usize> {
        let Client { calls, balancer, .. } = &*self.client;
        if !connection.outbox.is_empty() {
            return Some(connection.outbox.next_bytes());
        }
        // The usual wait, which calls this repeatedly.
        if !balancer.has_many() && self.wanted.is_none() && self.condition.is_completion() {
            return None;
        }
        let takes = |size: &Size| !balancer.has_many() || connection.takes(*size);
        let whole = |size| connection.whole_bytes(size).unwrap_or(0);
        if let Some(size) = balancer.unrouted.iter().map(|call| calls.kept_size(*call)).find(takes) {
            return Some(whole(size));
        }
        match self.condition {
            // A completion makes a slot free.
            Condition::Space { is_call: true, .. } if calls.is_full() => None,
            Condition::Space { size, .. } => Some(size).filter(takes).map(whole),
            _ => self.wanted.filter(takes).map(whole),
        }
    }

    /// Whether another service would help. No doorbell reports a new one.
    fn needs_discovery(&self) -> bool {
        let Balancer { unrouted, discovery, .. } = &self.client.balancer;
        let waits = matches!(self.condition, Condition::Space { .. }) || !unrouted.is_empty();
        waits && discovery.is_some()
    }

    fn discover_if_needed(&mut self) {
        if self.needs_discovery() {
            self.client.balancer.discover_if_due();
        }
    }
}

impl Polled for Waiting<'_> {
    fn poll(&mut self) -> Result<bool> {
        if self.client.found.is_none() {
            self.client.found = self.client.poll(self.condition)?;
        }
        Ok(self.client.found.is_some())
    }

    fn may_be_ready(&mut self) -> bool {
        let may_be_ready = |connection: &Connection| {
            connection.replies.has_messages()
                || (self.space_wanted(connection).is_some() && connection.outbox.sender.may_be_ready())
        };
        self.client.balancer.connections.iter().any(may_be_ready)
    }

    fn spin(&mut self) -> &mut Spin {
        let balancer = &mut self.client.balancer;
        match &mut balancer.connections[..] {
            [connection] => Polled::spin(&mut connection.replies),
            _ => &mut balancer.spin,
        }
    }

    /// Of one connection, the last ring for a reply or for space.
    fn last_ring(&self) -> Option<LastRing> {
        match &self.client.balancer.connections[..] {
            [connection] => {
                let for_space = connection.outbox.sender.last_ring();
                connection.replies.last_ring().into_iter().chain([for_space]).max_by_key(|ring| ring.at_ns)
            }
            _ => None,
        }
    }
}

impl Side for Waiting<'_> {
    fn arm(&mut self) -> Result<bool> {
        self.client.balancer.poll_handshakes();
        let mut armed = true;
        let mut has_space = false;
        for at in 0..self.client.balancer.connections.len() {
            let wanted = self.space_wanted(&self.client.balancer.connections[at]);
            let has_many = self.client.balancer.has_many();
            let connection = &mut self.client.balancer.connections[at];
            let done = match (Side::arm(&mut connection.replies), wanted) {
                (Ok(true), Some(bytes)) => match connection.outbox.sender.arm_for_body(bytes) {
                    Err(error) if is_end(&error) => {
                        connection.has_left = true;
                        match self.condition {
                            // The lane of replies reports the end, after the last reply.
                            Condition::Any | Condition::Of(_) => Ok(true),
                            // There may be space elsewhere.
                            _ if has_many => Ok(false),
                            _ => {
                                self.disarm();
                                return Err(error);
                            }
                        }
                    }
                    armed => {
                        has_space |= matches!(armed, Ok(false)) && connection.outbox.is_empty();
                        armed
                    }
                },
                (armed, _) => armed,
            };
            match done {
                Ok(true) => {}
                Ok(false) => armed = false,
                Err(error) => {
                    self.disarm();
                    return self.failed(at, error).map(|_| false);
                }
            }
        }
        // Until the user finds no completion, or submits, each further call of `arm` reports it again. Before that the
        // user may stop to take completions for a while.
        if self.wanted.is_some()
            && let Some(wanted) = &mut self.client.wanted
        {
            wanted.is_reported = has_space;
        }
        if !armed {
            self.disarm();
        }
        Ok(armed)
    }

    fn disarm(&mut self) {
        self.client.disarm();
    }

    fn end(&mut self) -> Result<bool> {
        for at in 0..self.client.balancer.connections.len() {
            match Side::end(&mut self.client.balancer.connections[at].replies) {
                Ok(false) => {}
                Ok(true) => return Ok(true),
                Err(error) => return self.failed(at, error),
            }
        }
        Ok(false)
    }

    fn needs_timed_wait(&self) -> bool {
        let needs_timed_wait = |connection: &Connection| {
            Side::needs_timed_wait(&connection.replies)
                || (self.space_wanted(connection).is_some() && connection.outbox.sender.needs_timed_wait())
        };
        self.client.balancer.connections.iter().any(needs_timed_wait)
    }

    fn sleep(&mut self, deadline: Option<Instant>) -> Result<Ready> {
        let next_read = self.needs_discovery().then(|| Instant::now() + READ_INTERVAL);
        let until = [deadline, next_read].into_iter().flatten().min();
        let balancer = &mut self.client.balancer;
        let is_connecting = balancer.is_connecting();
        let ready = match &mut balancer.connections[..] {
            [connection] if !is_connecting => Side::sleep(&mut connection.replies, until),
            _ => balancer.doorbells.sleep(until),
        };
        self.discover_if_needed();
        ready
    }

    fn rung(&mut self, alone: bool) -> Result<bool> {
        self.client.balancer.doorbells.drain_after_sleep(alone)?;
        self.client.balancer.poll_handshakes();
        Ok(false)
    }

    fn is_peer_known_gone(&mut self) -> Result<bool> {
        self.client.balancer.poll_handshakes();
        self.discover_if_needed();
        for connection in &mut self.client.balancer.connections {
            if Side::is_peer_known_gone(&mut connection.replies)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl Waiting<'_> {
    /// The connection has failed. Returns true: the condition may hold now.
    fn failed(&mut self, at: usize, error: Error) -> Result<bool> {
        self.client.connection_failed(at, error).map(|()| true)
    }
}
