//! What a client hears: answers, sorted by the call that they are of, those for later set aside, and what a service says that
//! drains or ends.

use super::{Answer, Client, Fate, Found, Want, Written, is_end};
use crate::body::RECORDS_PER_POLL;
use crate::calls::State;
use crate::calls::{CallId, Loss, Outcome};
use crate::crowd::{Crowd, Link};
use crate::frame::{Assembly, By, HEADER_BYTES, Header, Kind};
use crate::outbox::FrameSender as _;
use pelton_channel::Deadline;
use pelton_channel::raw::Item;
use pelton_channel::{Error, Result};
use pelton_lane::Record;

/// What a record comes to.
enum Sorted {
    /// To somebody's answer, which is still in the lane.
    Answer(CallId, Outcome),
    /// To nothing in the lane.
    Nothing,
    /// To the end of what the service says.
    Drained,
}

impl Client {
    /// Whether an answer can only be at the cursor of the one lane, and nothing else is to be looked after.
    #[inline(always)]
    fn is_usual(&self) -> bool {
        self.fate.is_none()
            && self.found.is_none()
            && self.aside.is_empty()
            && self.links.len() == 1
            && self.links[0].outbox.is_empty()
            && self.homeless.is_empty()
    }

    /// The common case: a whole reply stands there, to that call if one is wanted. The call is over then; `None`: ask
    /// [`Client::find`]. Apart, so that it stays in registers.
    #[inline(always)]
    pub(super) fn plain_reply(&mut self, want: Option<CallId>) -> Option<(Record, CallId)> {
        if !self.is_usual() {
            return None;
        }
        let link = &mut self.links[0];
        let (record, words) = link.replies.peek_words_fast()?;
        let is_wanted = Header::is_plain(&words, Kind::Reply)
            && record.bytes - HEADER_BYTES as u64 <= self.reply_bytes_max
            && want.is_none_or(|want| want.0 == words[0])
            && self.calls.end_awaited(words[0], link.number);
        if !is_wanted {
            return None;
        }
        link.in_flight -= 1;
        Some((record, CallId(words[0])))
    }

    /// As [`Client::plain_reply`], also for one that is on its way: looks some times, which takes less than a microsecond.
    #[inline(always)]
    pub(super) fn plain_reply_soon(&mut self, want: Option<CallId>) -> Option<(Record, CallId)> {
        match self.plain_reply(want) {
            None if self.is_usual() && self.calls.waiting() > 0 && self.links[0].replies.comes_soon() => {
                self.plain_reply(want)
            }
            found => found,
        }
    }

    /// What is wanted, if it is there now: of what else has come before it, answers to other calls are put aside.
    pub(super) fn look_for(&mut self, want: Want) -> Result<Option<Found>> {
        if !self.is_usual() || matches!(want, Want::Room { .. } | Want::Written(_)) {
            return self.look_everywhere(want);
        }
        match self.look_at(0, want) {
            Err(error) => self.look_elsewhere(0, error, want),
            // They were given back just now.
            Ok(None) if !self.homeless.is_empty() => self.look_aside(want),
            found => found,
        }
    }

    /// As [`Client::look_for`], when there is more than one lane of replies to look at.
    #[inline(never)]
    fn look_everywhere(&mut self, want: Want) -> Result<Option<Found>> {
        if let Some(found) = self.look_aside(want)? {
            return Ok(Some(found));
        }
        let homeless = self.homeless.len();
        for _ in 0..self.links.len() {
            let at = if self.turn < self.links.len() { self.turn } else { 0 };
            self.turn = at + 1;
            match self.look_at(at, want) {
                Ok(None) => {}
                Ok(found) => return Ok(found),
                Err(error) => return self.look_elsewhere(at, error, want),
            }
        }
        if self.homeless.len() > homeless
            && let Some(found) = self.look_aside(want)?
        {
            return Ok(Some(found));
        }
        match want {
            Want::Any | Want::Of(_) => Ok(None),
            _ => self.look_for_room(want),
        }
    }

    /// Takes in what services have said, in case that one of them drains or has ended: what it is told nobody takes, and nothing
    /// comes back that would say so. Not while more waits in memory than is to be kept.
    pub(super) fn hear_ends(&mut self) -> Result<()> {
        if self.is_sated() || self.part_bytes > self.reply_bytes_max {
            return Ok(());
        }
        if self.links.iter().any(|link| link.replies.has_messages()) {
            match self.look_everywhere(Want::Written(0)) {
                // Now there is more than that.
                Ok(_) | Err(Error::Refused(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// That link has failed; but of a name of many services there may be others.
    #[cold]
    fn look_elsewhere(&mut self, at: usize, error: Error, want: Want) -> Result<Option<Found>> {
        self.link_failed(at, error)?;
        match self.look_aside(want)? {
            Some(found) => Ok(Some(found)),
            // To those who want a place or room there may be some by another; and who waits looks again.
            None if matches!(want, Want::Room { .. }) => Ok(Some(Found::Room)),
            None => Ok(None),
        }
    }

    /// As [`Client::look_for`], in one link's lane of replies.
    fn look_at(&mut self, at: usize, want: Want) -> Result<Option<Found>> {
        for _ in 0..RECORDS_PER_POLL {
            let Some(Item::Record(record)) = self.links[at].replies.find(Deadline::Now)? else { break };
            match self.sort(at, &record)? {
                Sorted::Answer(call, outcome) if want == Want::Any || want == Want::Of(call) => {
                    return Ok(Some(Found::InPlace(record, call, outcome, at)));
                }
                Sorted::Answer(call, outcome) => {
                    self.copy_aside(at, &record, call, outcome);
                    self.check_parts(want)?;
                }
                Sorted::Nothing => {}
                Sorted::Drained => return Err(Error::Closed { unreleased: 0 }),
            }
            // Perhaps the last piece of one.
            if !self.aside.is_empty()
                && let Some(found) = self.take_aside(want)
            {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    fn look_for_room(&mut self, want: Want) -> Result<Option<Found>> {
        let Want::Room { bytes, is_call } = want else { return Ok(self.flush(want)?.then_some(Found::Room)) };
        if is_call && self.is_sated() {
            return Err(Error::Refused(format!(
                "{} answers of {} bytes in all wait: take them by completion before asking for more",
                self.aside.len(),
                self.aside_bytes
            )));
        }
        if is_call && self.calls.is_full() {
            return Ok(None);
        }
        let is_one = self.crowd.is_none();
        let mut is_somebody = false;
        for at in 0..self.links.len() {
            let link = &mut self.links[at];
            if !(is_one || link.takes(bytes)) {
                continue;
            }
            is_somebody = true;
            let is_room = |link: &mut Link| -> Result<bool> {
                Ok(link.outbox.flush()?
                    && (!link.outbox.is_whole(bytes) || link.outbox.sender.try_reserve_body(bytes)?.is_some()))
            };
            match is_room(link) {
                Ok(true) => return Ok(Some(Found::Room)),
                Ok(false) => {}
                Err(error) if is_one => return Err(self.not_written(error)),
                // Who wants it is told by trying.
                Err(_) => return Ok(Some(Found::Room)),
            }
        }
        // As above, when nobody is on the way either.
        let is_reaching = self.crowd.as_ref().is_some_and(Crowd::is_reaching);
        Ok((!is_somebody && !is_reaching).then_some(Found::Room))
    }

    /// Writes what there is room for. True: nothing waits any more.
    fn flush(&mut self, want: Want) -> Result<bool> {
        let mut is_all = true;
        for at in 0..self.links.len() {
            let link = &mut self.links[at];
            if link.outbox.is_empty() {
                continue;
            }
            match link.outbox.flush() {
                Ok(flushed) => is_all &= flushed || matches!(want, Want::Written(number) if number != link.number),
                // To who awaits an answer the lane of replies tells it, after what was answered.
                Err(error) if is_end(&error) && (self.crowd.is_some() || matches!(want, Want::Any | Want::Of(_))) => {
                    link.has_left = true;
                    link.outbox.clear();
                }
                Err(error) if self.crowd.is_none() => return Err(self.not_written(error)),
                Err(error) => {
                    self.link_failed(at, error)?;
                    // Another may have its place.
                    return self.flush(want);
                }
            }
        }
        Ok(is_all)
    }

    /// What there is to do, and to be found, apart from the lanes of replies.
    #[cold]
    fn look_aside(&mut self, want: Want) -> Result<Option<Found>> {
        if self.fate == Some(Fate::Broken) {
            return Err(self.ended_before());
        }
        match (want, self.found.take()) {
            (Want::Room { .. } | Want::Written(_), Some(Found::Room)) => return Ok(Some(Found::Room)),
            (Want::Any, found @ Some(Found::InPlace(..) | Found::Apart(_))) => return Ok(found),
            (Want::Of(call), Some(found)) if found.call() == Some(call) => return Ok(Some(found)),
            (_, found) => {
                self.found = found;
                self.keep_found();
            }
        }
        if self.fate.is_none() {
            self.flush(want)?;
            self.house()?;
        }
        if let Some(found) = self.take_aside(want) {
            return Ok(Some(found));
        }
        self.check_parts(want)?;
        if self.fate.is_some() { Err(self.ended_before()) } else { Ok(None) }
    }

    fn take_aside(&mut self, want: Want) -> Option<Found> {
        let place = match want {
            Want::Any => (!self.aside.is_empty()).then_some(0),
            Want::Of(call) => self.aside.iter().position(|answer| answer.call == call),
            Want::Room { .. } | Want::Written(_) => None,
        };
        Some(Found::Apart(self.remove_aside(place?)))
    }

    pub(super) fn remove_aside(&mut self, place: usize) -> Answer {
        let answer = self.aside.remove(place).expect("it was found there");
        self.aside_bytes -= answer.cost();
        match answer.outcome.is_final() {
            true => self.aside_last -= 1,
            false => self.part_bytes -= answer.cost(),
        }
        answer
    }

    /// Puts aside what was found for somebody else.
    pub(super) fn keep_found(&mut self) {
        match self.found.take() {
            Some(Found::InPlace(record, call, outcome, at)) => self.copy_aside(at, &record, call, outcome),
            Some(Found::Apart(answer)) => {
                self.aside_bytes += answer.cost();
                match answer.outcome.is_final() {
                    true => self.aside_last += 1,
                    false => self.part_bytes += answer.cost(),
                }
                self.aside.push_front(answer);
            }
            Some(Found::Room) | None => {}
        }
    }

    #[inline(never)]
    fn copy_aside(&mut self, at: usize, record: &Record, call: CallId, outcome: Outcome) {
        let mut bytes = Vec::new();
        let replies = &mut self.links[at].replies;
        replies.append(record, HEADER_BYTES, &mut bytes);
        replies.release_record(record);
        self.put_aside(Answer { call, outcome, bytes });
    }

    /// Makes room in the lane by keeping an answer in memory.
    fn put_aside(&mut self, answer: Answer) {
        self.aside_bytes += answer.cost();
        match answer.outcome.is_final() {
            true => self.aside_last += 1,
            false => {
                self.part_bytes += answer.cost();
                self.calls.note_part(answer.call);
            }
        }
        self.aside.push_back(answer);
    }

    /// Last answers are as many as there are calls; of parts there is no end.
    #[inline(always)]
    fn check_parts(&self, want: Want) -> Result<()> {
        if want == Want::Any || self.part_bytes <= self.reply_bytes_max { Ok(()) } else { Err(self.too_many_parts()) }
    }

    #[cold]
    fn too_many_parts(&self) -> Error {
        Error::Refused(format!(
            "{} bytes of parts of other calls' replies wait: take them by completion first, or cancel their calls",
            self.part_bytes
        ))
    }

    /// What the next record is; if it is no answer that is whole, and awaited, it has been released.
    fn sort(&mut self, at: usize, record: &Record) -> Result<Sorted> {
        let link = &mut self.links[at];
        let payload_bytes = record.bytes.saturating_sub(HEADER_BYTES as u64);
        let read = match link.replies.words(record) {
            Some(words) => Header::read(words, payload_bytes, By::Service),
            None => Err("length"),
        };
        let header = read.map_err(|rule| broken(rule, record))?;
        if payload_bytes > self.reply_bytes_max {
            return Err(broken("size", record));
        }
        if matches!(header.kind, Kind::Draining | Kind::Drained | Kind::Returned) {
            return self.sort_of_drain(at, record, header);
        }
        let state = self.calls.state_at(header.id, link.number);
        if state == State::Free {
            return Err(broken("id", record));
        }
        if header.more || header.continued {
            return self.assemble(at, record, header).map(|()| Sorted::Nothing);
        }
        if header.kind.is_final() {
            link.in_flight -= 1;
            self.calls.end(header.id);
        }
        if state == State::GivenUp {
            self.late += 1;
            link.replies.release_record(record);
            return Ok(Sorted::Nothing);
        }
        Ok(Sorted::Answer(CallId(header.id), outcome_of(&header)))
    }

    #[cold]
    fn assemble(&mut self, at: usize, record: &Record, header: Header) -> Result<()> {
        let link = &mut self.links[at];
        Assembly::check(&link.assembly, &header).map_err(|rule| broken(rule, record))?;
        let mut assembly = link.assembly.take().unwrap_or_else(|| Assembly::new(header, None));
        if assembly.bytes.len() as u64 + record.bytes - HEADER_BYTES as u64 > self.reply_bytes_max {
            return Err(broken("size", record));
        }
        let is_awaited = self.calls.state(header.id) == State::Waiting;
        // What nobody waits for is not kept, but its end is to be known.
        if is_awaited {
            link.replies.append(record, HEADER_BYTES, &mut assembly.bytes);
        } else {
            assembly.bytes.clear();
        }
        link.replies.release_record(record);
        if header.more {
            link.assembly = Some(assembly);
            return Ok(());
        }
        if header.kind.is_final() {
            link.in_flight -= 1;
            self.calls.end(header.id);
        }
        let Assembly { header, bytes, .. } = assembly;
        match is_awaited {
            true => self.put_aside(Answer { call: CallId(header.id), outcome: outcome_of(&header), bytes }),
            false => self.late += 1,
        }
        Ok(())
    }

    /// What a service says that takes no more requests.
    #[cold]
    fn sort_of_drain(&mut self, at: usize, record: &Record, header: Header) -> Result<Sorted> {
        let link = &mut self.links[at];
        let call = CallId(header.id);
        match header.kind {
            Kind::Returned => {
                let state = self.calls.state_at(header.id, link.number);
                if state == State::Free {
                    return Err(broken("id", record));
                }
                // Nothing of it may have been carried out.
                let is_begun = self.calls.has_part(header.id)
                    || link.assembly.as_ref().is_some_and(|of| of.header.id == header.id);
                if !link.is_draining || is_begun {
                    return Err(broken("kind", record));
                }
                link.replies.release_record(record);
                link.in_flight -= 1;
                self.lose_call(call, Loss::Returned);
            }
            Kind::Draining if link.is_draining => return Err(broken("kind", record)),
            kind => {
                link.replies.release_record(record);
                link.is_draining = true;
                if kind == Kind::Drained {
                    link.is_drained = true;
                    return Ok(Sorted::Drained);
                }
                // Whoever listens now has perhaps come for it. Otherwise it is looked for when somebody asks.
                let _ = self.look_around();
            }
        }
        Ok(Sorted::Nothing)
    }

    /// The service of a call does not answer it.
    fn lose_call(&mut self, call: CallId, loss: Loss) {
        let is_awaited = self.calls.state(call.0) == State::Waiting;
        // Who has given a part of it had begun it, whatever it says.
        let loss = if loss == Loss::Returned && self.calls.has_part(call.0) { Loss::Corrupt } else { loss };
        if is_awaited && self.crowd.is_some() && self.calls.may_move(call, loss) {
            self.calls.unhouse(call, loss);
            self.homeless.push_back(call);
            return;
        }
        self.calls.end(call.0);
        if is_awaited {
            self.put_aside(Answer { call, outcome: Outcome::Lost(loss), bytes: Vec::new() });
        }
    }

    /// Submits calls whose service is lost to another.
    #[cold]
    fn house(&mut self) -> Result<()> {
        let mut place = 0;
        // For so many bytes there is no room.
        let mut full = usize::MAX;
        while let Some(call) = self.homeless.get(place).copied() {
            if self.calls.kept_bytes(call) >= full {
                place += 1;
                continue;
            }
            let (deadline, request) = self.calls.take_kept(call);
            let header = Header { deadline, ..Header::new(Kind::Request, call.0) };
            let written = self.write_to_any(header, &request);
            let bytes = request.len();
            self.calls.put_back(call, request);
            match written {
                Ok(Written::By(at)) => {
                    let link = &mut self.links[at];
                    link.in_flight += 1;
                    self.calls.house(call, link.number);
                }
                Ok(Written::Full) => {
                    full = bytes;
                    continue;
                }
                // Who is on the way may take it.
                Err(Error::TooLarge { .. }) if self.crowd.as_ref().is_some_and(Crowd::is_reaching) => {
                    place += 1;
                    continue;
                }
                Err(error @ Error::Forked) => return Err(error),
                // Those who are there do not want this client, or take less, or cannot be reached.
                Ok(Written::Nobody) | Err(_) => {
                    let loss = self.calls.loss(call);
                    self.calls.end(call.0);
                    self.put_aside(Answer { call, outcome: Outcome::Lost(loss), bytes: Vec::new() });
                }
            }
            self.homeless.remove(place);
        }
        Ok(())
    }

    /// What is to be done when the link at that place has failed: an error if there is no going on.
    #[cold]
    pub(super) fn link_failed(&mut self, at: usize, error: Error) -> Result<()> {
        let link = &mut self.links[at];
        let loss = match error {
            Error::Closed { .. } | Error::PeerDied { .. } if link.is_drained => Loss::Returned,
            Error::PeerDied { .. } if !link.outbox.sender.has_receiver_closed() => Loss::PeerDied,
            Error::Closed { .. } | Error::PeerDied { .. } => Loss::Closed,
            Error::Corrupt(_) => Loss::Corrupt,
            error => return Err(error),
        };
        if self.crowd.is_none() && loss != Loss::Returned {
            let unreleased = link.outbox.sender.unreleased();
            self.fate = Some(match loss {
                Loss::PeerDied => Fate::Died(unreleased),
                Loss::Corrupt => Fate::Broken,
                _ => Fate::Closed(unreleased),
            });
            link.outbox.clear();
            link.replies.retire();
            return Err(if loss == Loss::Corrupt { error } else { self.ended_before() });
        }
        self.keep_found();
        // Of what has come in pieces some was begun.
        if let Some(of) = &self.links[at].assembly {
            self.calls.note_part(CallId(of.header.id));
        }
        let number = self.links[at].number;
        for call in self.calls.of_link(number) {
            self.lose_call(call, loss);
        }
        match self.crowd.is_some() {
            true => drop(self.links.swap_remove(at)),
            // There is no other, and this one takes nothing.
            false => self.fate = Some(Fate::Closed(0)),
        }
        // An error is told to who asks next, and finds nobody.
        let _ = self.look_around();
        Ok(())
    }

    #[cold]
    pub(super) fn ended_before(&self) -> Error {
        match self.fate {
            Some(Fate::Closed(unreleased)) => Error::Closed { unreleased },
            Some(Fate::Died(unreleased)) => Error::PeerDied { unreleased },
            _ => Error::Corrupt("the service broke the rules before".to_owned()),
        }
    }
}

#[cold]
fn broken(rule: &str, record: &Record) -> Error {
    Error::Corrupt(format!("the service's message {} breaks the rule {rule:?} of calls", record.seq))
}

fn outcome_of(header: &Header) -> Outcome {
    match header.kind {
        Kind::Part => Outcome::Part,
        Kind::End => Outcome::End,
        Kind::Failed => Outcome::Failed(header.code),
        Kind::Abandoned => Outcome::Abandoned,
        Kind::Returned => Outcome::Lost(Loss::Returned),
        _ => Outcome::Reply,
    }
}
