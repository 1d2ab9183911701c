//! How a client polls its connections: completions by their call, those of other calls into the inbox, and what a
//! draining or ended service says.

use super::balancer::{End, is_end};
use super::connection::{Connection, State as ConnectionState, broken};
use super::{Client, Condition, Found};
use crate::body::RECORDS_PER_POLL;
use crate::calls::{CallId, Loss, Outcome, State};
use crate::frame::{HEADER_BYTES, Header, Kind};
use crate::inbox::StoredCompletion;
use crate::outbox::FrameSender as _;
use pelton_channel::raw::Item;
use pelton_channel::{Deadline, Error, Result};
use pelton_lane::Record;

/// What a record is.
enum Sorted {
    /// A whole completion of an awaited call, still in the lane.
    Completion(CallId, Outcome),
    /// Something else, which has been released.
    Nothing,
    /// The end of what the service says.
    Drained,
}

impl Client {
    /// Whether a completion can only be at the cursor of the only lane, and nothing else is due.
    #[inline(always)]
    fn is_fast(&self) -> bool {
        let balancer = &self.balancer;
        balancer.end.is_none()
            && self.found.is_none()
            && self.inbox.is_empty()
            && balancer.connections.len() == 1
            && balancer.connections[0].outbox.is_empty()
            && balancer.unrouted.is_empty()
    }

    /// Takes a whole reply at the cursor, of that call if one is given, and ends its call. `None`: use
    /// [`Client::find`]. Its result stays in registers.
    #[inline(always)]
    pub(super) fn reply_fast(&mut self, call: Option<CallId>) -> Option<(Record, CallId)> {
        if !self.is_fast() {
            return None;
        }
        let connection = &mut self.balancer.connections[0];
        let (record, words) = connection.replies.peek_words_fast()?;
        let is_taken = Header::is_plain(&words, Kind::Reply)
            && record.bytes - HEADER_BYTES as u64 <= self.reply_bytes_max
            && call.is_none_or(|call| call.0 == words[0])
            && self.calls.end_awaited(CallId(words[0]), connection.number);
        if !is_taken {
            return None;
        }
        connection.in_flight -= 1;
        Some((record, CallId(words[0])))
    }

    /// As [`Client::reply_fast`], but polls several times, which takes less than a microsecond.
    #[inline(always)]
    pub(super) fn await_reply_fast(&mut self, call: Option<CallId>) -> Option<(Record, CallId)> {
        match self.reply_fast(call) {
            None if self.is_fast() && self.calls.awaited() > 0 && self.balancer.connections[0].replies.comes_soon() => {
                self.reply_fast(call)
            }
            found => found,
        }
    }

    /// What the condition asks for, if it is there now. Completions of other calls that come before it are stored.
    pub(super) fn poll(&mut self, condition: Condition) -> Result<Option<Found>> {
        if !self.is_fast() || !condition.is_completion() {
            return self.poll_all(condition);
        }
        match self.poll_connection(0, condition) {
            Err(error) => self.poll_after_failure(0, error, condition),
            // A service has just returned calls.
            Ok(None) if !self.balancer.unrouted.is_empty() => self.poll_memory(condition),
            found => found,
        }
    }

    /// As [`Client::poll`], when there is more than one lane of replies to poll.
    #[inline(never)]
    fn poll_all(&mut self, condition: Condition) -> Result<Option<Found>> {
        if let Some(found) = self.poll_memory(condition)? {
            return Ok(Some(found));
        }
        let unrouted = self.balancer.unrouted.len();
        for _ in 0..self.balancer.connections.len() {
            let at = self.balancer.next_to_poll();
            match self.poll_connection(at, condition) {
                Ok(None) => {}
                Ok(found) => return Ok(found),
                Err(error) => return self.poll_after_failure(at, error, condition),
            }
        }
        if self.balancer.unrouted.len() > unrouted
            && let Some(found) = self.poll_memory(condition)?
        {
            return Ok(Some(found));
        }
        if condition.is_completion() { Ok(None) } else { self.poll_space(condition) }
    }

    /// Receives what services have said, in case one of them drains or has ended: it would not take a notification, and
    /// nothing would report that. Not while too much is stored.
    pub(super) fn receive_drains(&mut self) -> Result<()> {
        if self.is_inbox_full() || self.inbox.part_bytes() > self.reply_bytes_max {
            return Ok(());
        }
        if self.balancer.connections.iter().any(|connection| connection.replies.has_messages()) {
            match self.poll_all(Condition::Written(0)) {
                // Now too much is stored.
                Ok(_) | Err(Error::Refused(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// A connection has failed; by a short name there may be others.
    #[cold]
    fn poll_after_failure(&mut self, at: usize, error: Error, condition: Condition) -> Result<Option<Found>> {
        self.connection_failed(at, error)?;
        match self.poll_memory(condition)? {
            Some(found) => Ok(Some(found)),
            // Another connection may have space, or a slot may be free now. A function that waits for a completion
            // polls again.
            None if matches!(condition, Condition::Space { .. }) => Ok(Some(Found::Space)),
            None => Ok(None),
        }
    }

    /// As [`Client::poll`], in one connection's lane of replies.
    fn poll_connection(&mut self, at: usize, condition: Condition) -> Result<Option<Found>> {
        for _ in 0..RECORDS_PER_POLL {
            let found = self.balancer.connections[at].replies.find(Deadline::Now)?;
            let Some(Item::Record(record)) = found else { break };
            match self.sort(at, &record)? {
                Sorted::Completion(call, outcome)
                    if condition == Condition::Any || condition == Condition::Of(call) =>
                {
                    return Ok(Some(Found::InPlace(record, call, outcome, at)));
                }
                Sorted::Completion(call, outcome) => {
                    self.store_copy(at, &record, call, outcome);
                    self.check_parts(condition)?;
                }
                Sorted::Nothing => {}
                Sorted::Drained => return Err(Error::Closed { unreleased: 0 }),
            }
            // A last piece may have completed one.
            if !self.inbox.is_empty()
                && let Some(found) = self.take_stored(condition)
            {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    fn poll_space(&mut self, condition: Condition) -> Result<Option<Found>> {
        let Condition::Space { size, is_call } = condition else {
            return Ok(self.flush(condition)?.then_some(Found::Space));
        };
        if is_call && self.is_inbox_full() {
            return Err(Error::Refused(format!(
                "{} answers of {} bytes in all wait: take them by completion before asking for more",
                self.inbox.len(),
                self.inbox.bytes()
            )));
        }
        if is_call && self.calls.is_full() {
            return Ok(None);
        }
        let has_many = self.balancer.has_many();
        let mut is_taken = false;
        for at in 0..self.balancer.connections.len() {
            let connection = &mut self.balancer.connections[at];
            if has_many && !connection.takes(size) {
                continue;
            }
            is_taken = true;
            let has_space = |connection: &mut Connection| -> Result<bool> {
                let whole_bytes = connection.whole_bytes(size);
                let outbox = &mut connection.outbox;
                Ok(outbox.flush()?
                    && match whole_bytes {
                        Some(bytes) => outbox.sender.try_reserve_body(bytes)?.is_some(),
                        None => true,
                    })
            };
            match has_space(connection) {
                Ok(true) => return Ok(Some(Found::Space)),
                Ok(false) => {}
                // The next attempt to write returns the error.
                Err(_) if has_many => return Ok(Some(Found::Space)),
                Err(error) => return Err(self.balancer.write_failed(error, &mut self.calls, &mut self.inbox)),
            }
        }
        // The same if no service takes it, and none is connecting.
        Ok((!is_taken && !self.balancer.is_connecting()).then_some(Found::Space))
    }

    /// Writes what there is space for. Returns whether all is written; for [`Condition::Written`], by that connection.
    fn flush(&mut self, condition: Condition) -> Result<bool> {
        let has_many = self.balancer.has_many();
        let mut is_all = true;
        for at in 0..self.balancer.connections.len() {
            let connection = &mut self.balancer.connections[at];
            if connection.outbox.is_empty() {
                continue;
            }
            let number = connection.number;
            match connection.outbox.flush() {
                Ok(flushed) => {
                    is_all &= flushed || matches!(condition, Condition::Written(wanted) if wanted != number);
                }
                // To a function that awaits a completion the lane of replies reports the end, after the last reply.
                Err(error) if is_end(&error) && (has_many || condition.is_completion()) => {
                    connection.has_left = true;
                    connection.outbox.clear();
                }
                Err(error) if !has_many => {
                    return Err(self.balancer.write_failed(error, &mut self.calls, &mut self.inbox));
                }
                Err(error) => {
                    self.connection_failed(at, error)?;
                    // Another connection may have its index.
                    return self.flush(condition);
                }
            }
        }
        Ok(is_all)
    }

    /// What there is to do, and to find, without the lanes of replies.
    #[cold]
    fn poll_memory(&mut self, condition: Condition) -> Result<Option<Found>> {
        if self.balancer.end == Some(End::Corrupt) {
            return Err(self.balancer.ended());
        }
        match (condition, self.found.take()) {
            (Condition::Space { .. } | Condition::Written(_), Some(Found::Space)) => return Ok(Some(Found::Space)),
            (Condition::Any, found @ Some(Found::InPlace(..) | Found::Owned(_))) => return Ok(found),
            (Condition::Of(call), Some(found)) if found.call() == Some(call) => return Ok(Some(found)),
            (_, found) => {
                self.found = found;
                self.store_found();
            }
        }
        if self.balancer.end.is_none() {
            self.flush(condition)?;
            self.balancer.reroute(&mut self.calls, &mut self.inbox)?;
        }
        if let Some(found) = self.take_stored(condition) {
            return Ok(Some(found));
        }
        self.check_parts(condition)?;
        if self.balancer.end.is_some() { Err(self.balancer.ended()) } else { Ok(None) }
    }

    fn take_stored(&mut self, condition: Condition) -> Option<Found> {
        let completion = match condition {
            Condition::Any => self.inbox.take_first(),
            Condition::Of(call) => self.inbox.take_of(call),
            Condition::Space { .. } | Condition::Written(_) => None,
        };
        completion.map(Found::Owned)
    }

    /// Stores a completion that a wait has found and that another function does not want.
    pub(super) fn store_found(&mut self) {
        match self.found.take() {
            Some(Found::InPlace(record, call, outcome, at)) => self.store_copy(at, &record, call, outcome),
            Some(Found::Owned(completion)) => self.inbox.store_first(completion),
            Some(Found::Space) | None => {}
        }
    }

    /// Stores a copy of a completion, and releases its record.
    #[inline(never)]
    fn store_copy(&mut self, at: usize, record: &Record, call: CallId, outcome: Outcome) {
        let mut bytes = Vec::new();
        let replies = &mut self.balancer.connections[at].replies;
        replies.append(record, HEADER_BYTES, &mut bytes);
        replies.release_record(record);
        self.store(call, outcome, bytes);
    }

    fn store(&mut self, call: CallId, outcome: Outcome, bytes: Vec<u8>) {
        if outcome == Outcome::Part {
            self.calls.note_part(call);
        }
        self.inbox.store(StoredCompletion { call, outcome, bytes });
    }

    /// Final completions are as many as there are calls; parts are not bounded.
    #[inline(always)]
    fn check_parts(&self, condition: Condition) -> Result<()> {
        let may_store = condition == Condition::Any || self.inbox.part_bytes() <= self.reply_bytes_max;
        if may_store { Ok(()) } else { Err(self.too_many_parts()) }
    }

    #[cold]
    fn too_many_parts(&self) -> Error {
        Error::Refused(format!(
            "{} bytes of parts of other calls' replies wait: take them by completion first, or cancel their calls",
            self.inbox.part_bytes()
        ))
    }

    /// What the next record is. It is released unless it is a whole completion of an awaited call.
    fn sort(&mut self, at: usize, record: &Record) -> Result<Sorted> {
        let connection = &mut self.balancer.connections[at];
        let header = connection.header(record, self.reply_bytes_max)?;
        if matches!(header.kind, Kind::Draining | Kind::Drained | Kind::Returned) {
            return self.sort_of_drain(at, record, header);
        }
        let call = CallId(header.id);
        let is_awaited = match self.calls.state(call) {
            State::Awaited(number) if number == connection.number => true,
            State::Cancelled(number) if number == connection.number => false,
            _ => return Err(broken("id", record)),
        };
        if header.more || header.continued {
            let complete = connection.assemble(record, header, is_awaited, self.reply_bytes_max)?;
            let Some(assembly) = complete else { return Ok(Sorted::Nothing) };
            self.note_complete(at, call, header.kind);
            match is_awaited {
                true => self.store(call, outcome_of(&assembly.header), assembly.into_bytes()),
                false => self.completions_dropped += 1,
            }
            return Ok(Sorted::Nothing);
        }
        self.note_complete(at, call, header.kind);
        if !is_awaited {
            self.completions_dropped += 1;
            self.balancer.connections[at].replies.release_record(record);
            return Ok(Sorted::Nothing);
        }
        Ok(Sorted::Completion(call, outcome_of(&header)))
    }

    /// The last record of a completion has come.
    fn note_complete(&mut self, at: usize, call: CallId, kind: Kind) {
        if kind.is_final() {
            self.balancer.connections[at].in_flight -= 1;
            self.calls.end(call);
        }
    }

    /// A record of a service that takes no more requests.
    #[cold]
    fn sort_of_drain(&mut self, at: usize, record: &Record, header: Header) -> Result<Sorted> {
        let connection = &mut self.balancer.connections[at];
        let is_open = connection.state == ConnectionState::Open;
        let call = CallId(header.id);
        match header.kind {
            Kind::Returned => {
                let state = self.calls.state(call);
                let number = connection.number;
                if state != State::Awaited(number) && state != State::Cancelled(number) {
                    return Err(broken("id", record));
                }
                // A service returns only calls that it has not begun.
                let is_begun = self.calls.has_part(call) || connection.has_piece_of(call.0);
                if is_open || is_begun {
                    return Err(broken("kind", record));
                }
                connection.replies.release_record(record);
                connection.in_flight -= 1;
                self.balancer.lose_call(call, Loss::Returned, &mut self.calls, &mut self.inbox);
            }
            Kind::Draining if !is_open => return Err(broken("kind", record)),
            Kind::Drained => {
                connection.replies.release_record(record);
                self.balancer.note_drain(at, ConnectionState::Drained);
                return Ok(Sorted::Drained);
            }
            _ => {
                connection.replies.release_record(record);
                self.balancer.note_drain(at, ConnectionState::Draining);
            }
        }
        Ok(Sorted::Nothing)
    }
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
