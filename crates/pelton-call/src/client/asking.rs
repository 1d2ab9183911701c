//! What a client asks, and whom: the one service, or the least busy of several.

use super::{Client, Want, is_end};
use crate::calls::CallId;
use crate::crowd::{Crowd, LOOK_AGAIN, Link};
use crate::frame::{CALLS_MAX, Header, Kind, check_size};
use crate::outbox::FrameSender as _;
use pelton_channel::Deadline;
use pelton_channel::raw::HANDSHAKE_TIMEOUT;
use pelton_channel::raw::RETRY;
use pelton_channel::{Error, Result};
use pelton_lane::ReservedSpace;
use std::time::Instant;

/// What came of looking for a link to write by.
#[derive(Debug)]
pub(super) enum Written {
    /// By the link at that place.
    By(usize),
    /// There is no room, or nobody yet.
    Full,
    Nobody,
}

/// Links that may turn out to be lost in one search for one to write by; the next search goes on.
const LINKS_LOST: usize = 16;
/// Services that may hang up on a client that connects, before it takes that for the answer.
const HANG_UPS: u32 = 16;

impl Client {
    /// The common case: one service, nothing waits before this, and there is room. `None`: ask [`Client::submit_at_once`]. Apart, so
    /// that it stays in registers.
    #[inline(always)]
    pub(super) fn submit_plainly(&mut self, request: &[u8]) -> Option<CallId> {
        if self.crowd.is_some() || self.fate.is_some() || !self.aside.is_empty() {
            return None;
        }
        let link = &mut self.links[0];
        if request.len() as u64 > link.request_bytes_max || !link.outbox.is_empty() {
            return None;
        }
        let call = self.calls.next()?;
        let header = Header::new(Kind::Request, call.0);
        if !link.outbox.sender.write_fast(header.words(), request) {
            return None;
        }
        link.in_flight += 1;
        self.calls.begin(call, link.number);
        self.wanted = None;
        Some(call)
    }

    #[inline(never)]
    pub(super) fn submit_at_once(&mut self, request: &[u8], deadline: u64) -> Result<Option<CallId>> {
        self.check(request.len())?;
        let Some(call) = self.next_call() else { return Ok(None) };
        let header = Header { deadline, ..Header::new(Kind::Request, call.0) };
        if self.crowd.is_some() {
            return self.submit_to_any(call, header, request);
        }
        let written = match self.links[0].write(header, request) {
            Ok(written) => written,
            Err(error) => return Err(self.not_written(error)),
        };
        self.wanted = if written { None } else { Some(request.len()) };
        if written {
            self.begin(call, 0);
        }
        Ok(written.then_some(call))
    }

    pub(super) fn next_call(&mut self) -> Option<CallId> {
        let is_place = self.aside.is_empty() || !self.is_sated();
        if is_place { self.calls.next() } else { None }
    }

    #[inline(always)]
    pub(super) fn begin(&mut self, call: CallId, at: usize) {
        let link = &mut self.links[at];
        link.in_flight += 1;
        self.calls.begin(call, link.number);
    }

    /// Whether so many answers wait in memory that no more are to be asked for.
    #[cold]
    pub(super) fn is_sated(&self) -> bool {
        self.aside_bytes > self.reply_bytes_max || self.aside_last >= CALLS_MAX as usize
    }

    #[inline(never)]
    fn submit_to_any(&mut self, call: CallId, header: Header, request: &[u8]) -> Result<Option<CallId>> {
        match self.write_to_any(header, request)? {
            Written::By(at) => {
                self.wanted = None;
                // Calls of a link that failed meanwhile have ended.
                self.calls.put_first(call);
                self.begin(call, at);
                self.calls.keep(call, header.deadline, request);
                self.count_submission();
                Ok(Some(call))
            }
            Written::Full => {
                self.wanted = Some(request.len());
                self.look_around_now_and_then();
                Ok(None)
            }
            Written::Nobody => Err(self.nobody()),
        }
    }

    pub(super) fn count_submission(&mut self) {
        if let Some(crowd) = &mut self.crowd {
            crowd.count(&mut self.links, &self.doorbells);
        }
    }

    #[cold]
    pub(super) fn nobody(&self) -> Error {
        let name = self.crowd.as_ref().map_or(String::new(), |crowd| crowd.name.with_place());
        Error::NoListener { name }
    }

    #[cold]
    pub(super) fn submit_slowly(
        &mut self,
        request: &[u8],
        deadline: Deadline,
        deadline_ns: u64,
    ) -> Result<Option<CallId>> {
        loop {
            if self.find(Want::Room { bytes: request.len(), is_call: true }, deadline)?.is_none() {
                return Ok(None);
            }
            if let Some(call) = self.submit_at_once(request, deadline_ns)? {
                return Ok(Some(call));
            }
        }
    }

    /// Writes to the least busy service that has room.
    pub(super) fn write_to_any(&mut self, header: Header, payload: &[u8]) -> Result<Written> {
        for _ in 0..=LINKS_LOST {
            let Some(best) = self.least_busy() else {
                match self.find_somebody()? {
                    Written::By(_) => continue,
                    none => return Ok(none),
                }
            };
            let takes = |link: &Link| link.takes(payload.len());
            let mut at = best;
            let lost = loop {
                if takes(&self.links[at]) {
                    match self.links[at].write(header, payload) {
                        Ok(true) => return Ok(Written::By(at)),
                        Ok(false) => {}
                        Err(error) if is_end(&error) => self.links[at].has_left = true,
                        Err(error) => break Some(error),
                    }
                }
                at = (at + 1) % self.links.len();
                if at == best {
                    break None;
                }
            };
            match lost {
                Some(error) => self.link_failed(at, error)?,
                None if self.links.iter().any(takes) => return Ok(Written::Full),
                // Those who are left take less than one that has gone.
                None if self.links.iter().any(Link::is_open) => check_size(payload.len(), self.request_bytes_max())?,
                None => {}
            }
        }
        Ok(Written::Full)
    }

    /// The link with the fewest calls in flight; of those the next.
    fn least_busy(&mut self) -> Option<usize> {
        let count = self.links.len();
        if count == 1 {
            return self.links[0].is_open().then_some(0);
        }
        let turns = (0..count).map(|step| (self.next_open + step) % count);
        let best = turns.filter(|at| self.links[*at].is_open()).min_by_key(|at| self.links[*at].in_flight)?;
        self.next_open = best + 1;
        Some(best)
    }

    /// There is no link to write by: looks for others. By: there is one now.
    #[cold]
    fn find_somebody(&mut self) -> Result<Written> {
        self.attend();
        self.look_around()?;
        let Some(crowd) = &mut self.crowd else { return Ok(Written::Nobody) };
        if self.links.iter().any(Link::is_open) {
            return Ok(Written::By(0));
        }
        if crowd.is_reaching() {
            return Ok(Written::Full);
        }
        // What those said who do not want this client.
        crowd.take_why().map_or(Ok(Written::Nobody), Err)
    }

    /// Looks who else listens under a name of many.
    #[cold]
    pub(super) fn look_around(&mut self) -> Result<()> {
        let Some(crowd) = &mut self.crowd else { return Ok(()) };
        if self.owner.is_forked() {
            return Err(Error::Forked);
        }
        let looked = crowd.look(&mut self.links, &self.doorbells, usize::MAX);
        self.meet();
        looked
    }

    /// As [`Client::look_around`], unless that was done just now. There is somebody, or an error is told to who asks next and finds
    /// nobody.
    #[cold]
    pub(super) fn look_around_now_and_then(&mut self) {
        if self.crowd.as_ref().is_some_and(Crowd::is_look_due) {
            let _ = self.look_around();
        }
    }

    /// Waits for the first link to those who listen under a name of many: greets one of them, and another whenever that one has gone, or
    /// said nothing for some time.
    pub(super) fn find_first(&mut self, deadline: Option<Instant>) -> Result<()> {
        let until = deadline.unwrap_or_else(|| Instant::now() + HANDSHAKE_TIMEOUT);
        let (mut most, mut hung_up) = (1, 0);
        loop {
            let crowd = self.crowd.as_mut().expect("the name is of many");
            match most {
                0 => crowd.attend(&mut self.links, &self.doorbells),
                most => crowd.look(&mut self.links, &self.doorbells, most)?,
            }
            if !self.links.is_empty() {
                // The others come beside its calls.
                let _ = self.look_around();
                return Ok(());
            }
            let now = Instant::now();
            if crowd.is_reaching() && now < until {
                self.doorbells.sleep(Some(until.min(now + LOOK_AGAIN)))?;
                self.doorbells.drain()?;
                most = usize::from(crowd.is_look_due());
                continue;
            }
            most = 1;
            // Its successor is here, or another, or nobody is.
            if std::mem::replace(&mut hung_up, crowd.hung_up) != crowd.hung_up && now < until {
                if hung_up < HANG_UPS {
                    continue;
                }
                return Err(Error::HungUp);
            }
            let name = crowd.name.with_place();
            match crowd.take_why() {
                Some(why) => return Err(why),
                None if deadline.is_none() && !crowd.is_reaching() => return Err(Error::NoListener { name }),
                None if now >= until => {
                    return Err(Error::TimedOut(format!("waiting for somebody to listen at {name} and to answer")));
                }
                None => std::thread::sleep(RETRY),
            }
        }
    }

    /// Goes on with handshakes.
    pub(super) fn attend(&mut self) {
        if let Some(crowd) = &mut self.crowd
            && crowd.is_reaching()
            && !self.owner.is_forked()
        {
            let before = self.links.len();
            crowd.attend(&mut self.links, &self.doorbells);
            if self.links.len() > before {
                self.meet();
            }
        }
    }

    fn meet(&mut self) {
        if let Some(link) = self.links.last() {
            self.spin.set_peer(link.peer());
        }
    }

    /// What is to be said of a write that failed, when there is one service.
    #[cold]
    pub(super) fn not_written(&mut self, error: Error) -> Error {
        match error {
            Error::Corrupt(_) => self.link_failed(0, error).expect_err("there is no other"),
            // The lane of replies tells it, after what was answered.
            error => error,
        }
    }

    #[inline(always)]
    pub(super) fn check(&self, bytes: usize) -> Result<()> {
        if self.fate.is_some() {
            return Err(self.ended_before());
        }
        match &self.crowd {
            None => check_size(bytes, self.links[0].request_bytes_max),
            Some(_) => self.check_of_many(bytes),
        }
    }

    #[inline(never)]
    fn check_of_many(&self, bytes: usize) -> Result<()> {
        if self.owner.is_forked() {
            return Err(Error::Forked);
        }
        check_size(bytes, self.request_bytes_max())
    }

    pub(super) fn room(&mut self, bytes: usize) -> Result<Option<(usize, ReservedSpace)>> {
        let best = match self.crowd.is_some() {
            true => match self.least_busy() {
                Some(best) => best,
                None => match self.find_somebody()? {
                    Written::By(_) => self.least_busy().unwrap_or(0),
                    Written::Full => return Ok(None),
                    Written::Nobody => return Err(self.nobody()),
                },
            },
            false => 0,
        };
        for step in 0..self.links.len() {
            let at = (best + step) % self.links.len();
            let link = &mut self.links[at];
            if self.crowd.is_some() && !link.takes(bytes) {
                continue;
            }
            let flushed = link.outbox.flush();
            match flushed.and_then(|all| if all { link.outbox.sender.try_reserve_body(bytes) } else { Ok(None) }) {
                Ok(Some(space)) => {
                    self.wanted = None;
                    return Ok(Some((at, space)));
                }
                Ok(None) => {}
                Err(error) if self.crowd.is_none() => return Err(self.not_written(error)),
                Err(error) if is_end(&error) => link.has_left = true,
                Err(error) => {
                    self.link_failed(at, error)?;
                    break;
                }
            }
        }
        self.wanted = Some(bytes);
        self.look_around_now_and_then();
        Ok(None)
    }
}
