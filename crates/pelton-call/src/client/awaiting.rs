//! A client's wait, in which it does whatever else there is to do: replies of all links, room, handshakes.

use super::{Client, Want, is_end};
use crate::crowd::{Crowd, LOOK_AGAIN, Link};
use crate::outbox::FrameSender as _;
use pelton_channel::raw::{Side, Spin};
use pelton_channel::{Error, Result};
use pelton_os::Ready;
use std::time::Instant;

/// A client that waits, on both lanes of each link at once: replies are taken while it waits for room for a request, so that two
/// full lanes never wait for each other.
pub(super) struct Awaiting<'a> {
    pub(super) client: &'a mut Client,
    pub(super) want: Want,
    /// Bytes of a message that there is to be room for besides.
    pub(super) wanted: Option<usize>,
}

impl Awaiting<'_> {
    /// The most bytes of a record that there has to be room for in that link's lane, if there has.
    fn room(&self, link: &Link) -> Option<usize> {
        let Client { calls, homeless, crowd, .. } = &*self.client;
        if !link.outbox.is_empty() {
            return Some(link.outbox.next_bytes());
        }
        // The usual wait, which asks this again and again.
        if crowd.is_none() && self.wanted.is_none() && matches!(self.want, Want::Any | Want::Of(_)) {
            return None;
        }
        let takes = |bytes: &usize| crowd.is_none() || link.takes(*bytes);
        let whole = |bytes| if link.outbox.is_whole(bytes) { bytes } else { 0 };
        if let Some(bytes) = homeless.iter().map(|call| calls.kept_bytes(*call)).find(takes) {
            return Some(whole(bytes));
        }
        match self.want {
            // A place comes by an answer.
            Want::Room { is_call: true, .. } if calls.is_full() => None,
            Want::Room { bytes, .. } => Some(bytes).filter(takes).map(whole),
            _ => self.wanted.filter(takes).map(whole),
        }
    }

    /// Whether another service would help, of which nothing tells.
    fn is_seeking(&self) -> bool {
        let waits = matches!(self.want, Want::Room { .. }) || !self.client.homeless.is_empty();
        waits && self.client.crowd.is_some()
    }

    fn seek(&mut self) {
        if self.is_seeking() {
            self.client.look_around_now_and_then();
        }
    }

    fn failed(&mut self, at: usize, error: Error) -> Result<bool> {
        self.client.link_failed(at, error).map(|()| true)
    }
}

impl Side for Awaiting<'_> {
    fn look(&mut self) -> Result<bool> {
        if self.client.found.is_none() {
            self.client.found = self.client.look_for(self.want)?;
        }
        Ok(self.client.found.is_some())
    }

    fn may_be_ready(&self) -> bool {
        let stirs = |link: &Link| {
            link.replies.has_messages() || (self.room(link).is_some() && link.outbox.sender.may_be_ready())
        };
        self.client.links.iter().any(stirs)
    }

    fn arm(&mut self) -> Result<bool> {
        self.client.attend();
        let mut armed = true;
        let mut has_room = false;
        for at in 0..self.client.links.len() {
            let room = self.room(&self.client.links[at]);
            let link = &mut self.client.links[at];
            let done = match (Side::arm(&mut link.replies), room) {
                (Ok(true), Some(bytes)) => match link.outbox.sender.arm_for_body(bytes) {
                    Err(error) if is_end(&error) => {
                        link.has_left = true;
                        match self.want {
                            // The lane of replies tells it, after what was answered.
                            Want::Any | Want::Of(_) => Ok(true),
                            // There may be room elsewhere.
                            _ if self.client.crowd.is_some() => Ok(false),
                            _ => {
                                self.disarm();
                                return Err(error);
                            }
                        }
                    }
                    armed => {
                        has_room |= matches!(armed, Ok(false)) && link.outbox.is_empty();
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
        if has_room && self.wanted.is_some() {
            // Told once: who still wants it asks for it again. A loop whose request was dropped would never sleep.
            self.client.wanted = None;
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
        for at in 0..self.client.links.len() {
            match Side::end(&mut self.client.links[at].replies) {
                Ok(false) => {}
                Ok(true) => return Ok(true),
                Err(error) => return self.failed(at, error),
            }
        }
        Ok(false)
    }

    fn needs_timed_wait(&self) -> bool {
        let needs_timed_wait = |link: &Link| {
            Side::needs_timed_wait(&link.replies)
                || (self.room(link).is_some() && link.outbox.sender.needs_timed_wait())
        };
        self.client.links.iter().any(needs_timed_wait)
    }

    fn sleep(&mut self, deadline: Option<Instant>) -> Result<Ready> {
        let is_reaching = self.client.crowd.as_ref().is_some_and(Crowd::is_reaching);
        let again = self.is_seeking().then(|| Instant::now() + LOOK_AGAIN);
        let until = [deadline, again].into_iter().flatten().min();
        let ready = match &mut self.client.links[..] {
            [link] if !is_reaching => Side::sleep(&mut link.replies, until),
            _ => self.client.doorbells.sleep(until),
        };
        self.seek();
        ready
    }

    fn rung(&mut self, _alone: bool) -> Result<bool> {
        self.client.doorbells.drain()?;
        self.client.attend();
        Ok(false)
    }

    fn is_peer_known_gone(&mut self) -> Result<bool> {
        self.client.attend();
        self.seek();
        for link in &mut self.client.links {
            if Side::is_peer_known_gone(&mut link.replies)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn spin(&mut self) -> &mut Spin {
        &mut self.client.spin
    }
}
