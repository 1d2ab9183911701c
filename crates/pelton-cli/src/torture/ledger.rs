//! The storm's accounts: from the journals of both sides, what may be in the channel, and what is wrong.
//!
//! A journal brackets every step, so of a dead sender it is known what it committed but for the step that it died in: `Done` or
//! `Pending`, nothing between, since a batch comes whole or not at all. Of a dead receiver the same is known of what it released.
//! The successor's first number decides which, and must be one of the two.

use super::journal::{JUMPS_MAX, Journal, Word};
use serde::Serialize;
use std::{fmt, ops::RangeInclusive};

/// What can be wrong. One counter of the report each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A message that was not sent so, or not at all.
    Garbage,
    /// Committed, and never received.
    Lost,
    /// Received again although it was released, or without saying so.
    Duplicate,
    /// The number of unreleased messages that was told, or found, is not the one there is.
    Miscounted,
    /// No progress, although every process runs.
    Hang,
    /// The survivor was not told of the death.
    NotTold,
    /// A side failed, or ended by itself.
    Failed,
    /// Files that are still there afterwards.
    LeftBehind,
    /// Descriptors or mappings of a survivor that grew with the deaths.
    Grown,
}

/// All kinds, in the order of the report.
pub const KINDS: [Kind; 9] = [
    Kind::Garbage,
    Kind::Lost,
    Kind::Duplicate,
    Kind::Miscounted,
    Kind::Hang,
    Kind::NotTold,
    Kind::Failed,
    Kind::LeftBehind,
    Kind::Grown,
];

impl Kind {
    pub fn words(self) -> &'static str {
        match self {
            Kind::Garbage => "garbage",
            Kind::Lost => "lost",
            Kind::Duplicate => "duplicates out of range or unmarked",
            Kind::Miscounted => "unreleased miscounted",
            Kind::Hang => "hangs",
            Kind::NotTold => "survivors not told",
            Kind::Failed => "sides failed",
            Kind::LeftBehind => "files left behind",
            Kind::Grown => "descriptors or mappings grown",
        }
    }
}

/// One thing wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub kind: Kind,
    /// Messages, or 1.
    pub count: u64,
    pub text: String,
}

impl Fault {
    pub fn new(kind: Kind, count: u64, text: impl fmt::Display) -> Fault {
        Fault { kind, count, text: text.to_string() }
    }
}

/// What a side's journal says of its messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Notes {
    pub first: u64,
    pub pending: u64,
    pub done: u64,
    pub taken: u64,
    pub garbage: u64,
    pub unmarked: u64,
    pub jumps_count: u64,
    pub jumps: Vec<(u64, u64)>,
    pub text: String,
}

impl Notes {
    pub fn of(journal: &Journal) -> Notes {
        Notes {
            first: journal.get(Word::First),
            pending: journal.get(Word::Pending),
            done: journal.get(Word::Done),
            taken: journal.get(Word::Taken),
            garbage: journal.get(Word::Garbage),
            unmarked: journal.get(Word::Unmarked),
            jumps_count: journal.get(Word::Jumps),
            jumps: journal.jumps(),
            text: journal.text(),
        }
    }
}

/// Done at least, and at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Span {
    least: u64,
    most: u64,
}

/// The accounts of one channel. Numbers begin at 1.
#[derive(Debug, Default)]
pub struct Ledger {
    committed: Span,
    released: Span,
    /// The highest number that any receiver was given.
    given: u64,
    /// Numbers of which nobody can say whether they were committed: a channel that does not number its messages itself has its
    /// next sender go on behind them.
    uncertain: Vec<RangeInclusive<u64>>,
    pub faults: Vec<Fault>,
}

impl Ledger {
    /// Where the next sender goes on if the channel cannot tell it.
    pub fn next(&self) -> u64 {
        self.committed.most + 1
    }

    /// The highest number that a receiver was given.
    pub fn given(&self) -> u64 {
        self.given
    }

    fn fault(&mut self, kind: Kind, count: u64, text: impl fmt::Display) {
        self.faults.push(Fault::new(kind, count, text));
    }

    /// Whether a sender began where it may.
    fn sender_began(&mut self, notes: &Notes) {
        let (Span { least, most }, first) = (self.committed, notes.first);
        if first <= least {
            let lost = least + 1 - first;
            self.fault(Kind::Lost, lost, format_args!("{least} were committed, and the next sender begins at {first}"));
        } else if first > most + 1 {
            let text = format!("at most {most} were committed, and the next sender begins at {first}");
            self.fault(Kind::Garbage, first - most - 1, text);
        } else if least + 1 < first && first <= most {
            let text = format!("of the batch {} to {most} only what is before {first} was committed", least + 1);
            self.fault(Kind::Garbage, 1, text);
        }
    }

    /// A sender that has begun is dead, or done; `numbered`: its channel told it where to begin.
    pub fn sender_ended(&mut self, notes: &Notes, numbered: bool) {
        if notes.garbage > 0 {
            self.fault(Kind::Garbage, notes.garbage, &notes.text);
        }
        if notes.first == 0 {
            return;
        }
        self.sender_began(notes);
        self.committed = Span { least: notes.done, most: notes.pending };
        // Now, not when the next one ends: a receiver may end before that.
        if !numbered && self.committed.least < self.committed.most {
            self.uncertain.push(self.committed.least + 1..=self.committed.most);
        }
    }

    /// A receiver is dead, or done. `sent_most`: the highest number that any sender may have committed, looked at after it.
    pub fn receiver_ended(&mut self, notes: &Notes, sent_most: u64) {
        if notes.garbage > 0 {
            self.fault(Kind::Garbage, notes.garbage, &notes.text);
        }
        if notes.unmarked > 0 {
            let text = "messages that a predecessor had been given came again, unmarked";
            self.fault(Kind::Duplicate, notes.unmarked, text);
        }
        if notes.first == 0 {
            // It died before it knew where it was: with this many messages in its hands, at most.
            self.released.most += notes.pending;
            return;
        }
        let (Span { least, most }, first) = (self.released, notes.first);
        let missing = self.certain(least + 1, first).saturating_sub(most - least);
        if first <= least {
            let text = format!("{least} were released, and the next receiver begins at {first}");
            self.fault(Kind::Duplicate, least + 1 - first, text);
        } else if missing > 0 {
            let text = format!("at most {most} were released, and the next receiver begins at {first}");
            self.fault(Kind::Lost, missing, text);
        } else if self.uncertain.is_empty() && first != least + 1 && first != most + 1 {
            let text = format!("of {} to {most}, released by one store, only what is before {first} was", least + 1);
            self.fault(Kind::Duplicate, 1, text);
        }
        for (expected, found) in &notes.jumps {
            let text = format!("{found} came where {expected} was expected");
            let skipped = self.certain(*expected, *found);
            match found < expected {
                true => self.fault(Kind::Duplicate, expected - found, text),
                false if skipped > 0 => self.fault(Kind::Lost, skipped, text),
                false => {}
            }
        }
        if notes.jumps_count > JUMPS_MAX {
            self.fault(Kind::Lost, notes.jumps_count - JUMPS_MAX, "more jumps than a journal keeps");
        }
        if notes.taken > sent_most {
            let text = format!("{} came, and at most {sent_most} were committed", notes.taken);
            self.fault(Kind::Garbage, notes.taken - sent_most, text);
        }
        self.released = Span { least: notes.done, most: notes.pending.max(notes.done) };
        self.given = self.given.max(notes.taken);
    }

    /// Numbers from `from` on before `to` that were committed for certain, as far as that hangs on dead senders.
    fn certain(&self, from: u64, to: u64) -> u64 {
        let overlap = |range: &RangeInclusive<u64>| (to.min(range.end() + 1)).saturating_sub(from.max(*range.start()));
        to.saturating_sub(from) - self.uncertain.iter().map(overlap).sum::<u64>()
    }

    /// A sender that lives was told `told` unreleased messages when it had committed `committed`.
    pub fn unreleased_told(&mut self, told: u64, committed: u64) {
        let released = self.released;
        if ![released.least, released.most].iter().any(|released| committed.checked_sub(*released) == Some(told)) {
            let text = format!("{told} unreleased were told, with {committed} committed and {released:?} released");
            self.fault(Kind::Miscounted, 1, text);
        }
    }

    /// Everybody is dead, and so many messages are there.
    pub fn waiting_found(&mut self, found: u64) {
        let (committed, released) = (self.committed, self.released);
        let fits =
            |sent: u64| [released.least, released.most].iter().any(|head| sent.checked_sub(*head) == Some(found));
        if !fits(committed.least) && !fits(committed.most) {
            let text = format!("{found} wait in the channel, with {committed:?} committed and {released:?} released");
            self.fault(Kind::Miscounted, 1, text);
        }
    }

    /// The sender is dead, and the receiver, which lives, was told so: after everything that was committed. It was given all up to
    /// `taken`; nothing if that is 0, as what came before it was released by another.
    pub fn all_taken(&mut self, taken: u64) {
        let (Span { least, most }, released) = (self.committed, self.released);
        let ends = if taken > 0 { [taken; 2] } else { [released.least, released.most] };
        if ends.iter().any(|end| *end == least || *end == most) {
            return;
        }
        let end = ends[1];
        let text = format!("{least} or {most} were committed, and {end} came before the end");
        match end < least {
            true => self.fault(Kind::Lost, least - end, text),
            false => self.fault(Kind::Garbage, 1, text),
        }
    }

    /// Both sides are done.
    pub fn closed(&mut self) {
        let (Span { least: sent, .. }, taken) = (self.committed, self.given);
        let missing = self.certain(taken + 1, sent + 1);
        if missing > 0 {
            self.fault(Kind::Lost, missing, format_args!("{sent} were committed, and the last to come was {taken}"));
        }
        if self.released.least != taken {
            let text = format!("all are done, and {} of {taken} were released", self.released.least);
            self.fault(Kind::Miscounted, 1, text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(first: u64, done: u64, pending: u64) -> Notes {
        Notes { first, done, pending, ..Notes::default() }
    }

    fn received(first: u64, released: u64, pending: u64, taken: u64) -> Notes {
        Notes { first, done: released, pending, taken, ..Notes::default() }
    }

    /// After a sender that died in the batch 11 to 14, and a receiver that died releasing 5 with 7 taken.
    fn after_both_died() -> Ledger {
        let mut ledger = Ledger::default();
        ledger.sender_ended(&sent(1, 10, 14), true);
        ledger.receiver_ended(&received(1, 4, 5, 7), 14);
        assert_eq!(ledger.faults, []);
        ledger
    }

    fn kinds(ledger: &Ledger) -> Vec<(Kind, u64)> {
        ledger.faults.iter().map(|fault| (fault.kind, fault.count)).collect()
    }

    #[test]
    fn what_a_death_leaves_open_is_accepted_either_way() {
        for first in [11, 15] {
            let mut ledger = after_both_died();
            ledger.sender_ended(&sent(first, 20, 20), true);
            ledger.receiver_ended(&received(if first == 11 { 5 } else { 6 }, 20, 20, 20), 20);
            ledger.closed();
            assert_eq!(ledger.faults, []);
        }
    }

    #[test]
    fn a_sender_that_begins_anywhere_else_tells_of_loss_or_of_a_torn_batch() {
        for (first, fault) in
            [(10, (Kind::Lost, 1)), (1, (Kind::Lost, 10)), (12, (Kind::Garbage, 1)), (17, (Kind::Garbage, 2))]
        {
            let mut ledger = after_both_died();
            ledger.sender_ended(&sent(first, 20, 20), true);
            assert_eq!(kinds(&ledger), [fault], "at {first}");
        }
    }

    #[test]
    fn a_receiver_that_begins_elsewhere_was_given_too_much_or_too_little() {
        for (first, fault) in
            [(4, (Kind::Duplicate, 1)), (1, (Kind::Duplicate, 4)), (7, (Kind::Lost, 1)), (9, (Kind::Lost, 3))]
        {
            let mut ledger = after_both_died();
            ledger.receiver_ended(&received(first, 9, 9, 9), 14);
            assert_eq!(kinds(&ledger), [fault], "at {first}");
        }
    }

    #[test]
    fn jumps_garbage_marks_and_inventions_are_counted() {
        let mut ledger = after_both_died();
        let notes = Notes {
            jumps_count: 2,
            jumps: vec![(8, 10), (12, 11)],
            garbage: 3,
            unmarked: 4,
            ..received(5, 15, 15, 15)
        };
        ledger.receiver_ended(&notes, 14);
        let wanted =
            [(Kind::Garbage, 3), (Kind::Duplicate, 4), (Kind::Lost, 2), (Kind::Duplicate, 1), (Kind::Garbage, 1)];
        assert_eq!(kinds(&ledger), wanted);
    }

    #[test]
    fn an_unreleased_count_is_exact() {
        let mut ledger = after_both_died();
        for right in [16, 15] {
            ledger.unreleased_told(right, 20);
        }
        for right in [6, 5, 10, 9] {
            ledger.waiting_found(right);
        }
        ledger.all_taken(10);
        ledger.all_taken(14);
        let mut empty = Ledger { released: ledger.committed, ..Ledger::default() };
        empty.committed = ledger.committed;
        empty.all_taken(0);
        assert_eq!(empty.faults, []);
        assert_eq!(ledger.faults, []);
        for wrong in [14, 17, 0] {
            ledger.unreleased_told(wrong, 20);
        }
        for wrong in [4, 7, 8, 11] {
            ledger.waiting_found(wrong);
        }
        assert_eq!(kinds(&ledger), [(Kind::Miscounted, 1); 7]);
        ledger.faults.clear();
        ledger.all_taken(9);
        ledger.all_taken(12);
        ledger.all_taken(0);
        assert_eq!(kinds(&ledger), [(Kind::Lost, 1), (Kind::Garbage, 1), (Kind::Lost, 5)]);
    }

    #[test]
    fn a_channel_that_does_not_number_may_lose_only_what_was_never_certain() {
        let mut ledger = Ledger::default();
        ledger.sender_ended(&sent(1, 10, 11), false);
        assert_eq!(ledger.next(), 12);
        ledger.sender_ended(&sent(12, 20, 20), false);
        let jump =
            |expected, found| Notes { jumps_count: 1, jumps: vec![(expected, found)], ..received(1, 20, 20, 20) };
        ledger.receiver_ended(&jump(11, 12), 20);
        ledger.closed();
        assert_eq!(ledger.faults, []);
        ledger.released = Span::default();
        ledger.receiver_ended(&jump(10, 12), 20);
        assert_eq!(kinds(&ledger), [(Kind::Lost, 1)]);
    }

    #[test]
    fn what_was_never_certain_may_be_missing_while_the_next_sender_lives() {
        let mut ledger = Ledger::default();
        ledger.sender_ended(&sent(1, 10, 11), false);
        // The next sender, which has begun at 12, has not ended.
        let jump = Notes { jumps_count: 1, jumps: vec![(11, 12)], ..received(1, 12, 12, 12) };
        ledger.receiver_ended(&jump, 12);
        assert_eq!(ledger.faults, []);
    }

    #[test]
    fn what_never_came_is_lost_at_the_end() {
        let mut ledger = Ledger::default();
        ledger.sender_ended(&sent(1, 10, 10), true);
        ledger.receiver_ended(&received(1, 8, 8, 8), 10);
        ledger.closed();
        assert_eq!(kinds(&ledger), [(Kind::Lost, 2)]);
    }
}
