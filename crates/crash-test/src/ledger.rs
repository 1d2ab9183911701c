//! The accounts of a crash test: from the journals of both sides, the possible contents of the channel, and the faults.
//!
//! A journal has an entry before and after every step. So everything that a dead sender committed is known, except for
//! the step in which it died: the last number is `Done` or `Pending`, and none between, because a batch is atomic. The
//! same holds for the releases of a dead receiver. The first number of the successor decides, and must agree with one
//! of the two.

use super::journal::{JUMPS_MAX, Journal, Word};
use serde::Serialize;
use std::{fmt, ops::RangeInclusive};

/// The kinds of faults; each has a counter in the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// A message that was not sent, or with other bytes.
    Garbage,
    /// Committed, and never received.
    Lost,
    /// Received again after its release, or without the redelivery mark.
    Duplicate,
    /// A wrong number of unreleased messages.
    Miscounted,
    /// No progress while every process runs.
    Hang,
    /// The survivor did not detect the death.
    DeathUndetected,
    /// A side failed, or ended without a request.
    Failed,
    /// Files left after the end.
    LeftBehind,
    /// Descriptors or mappings of a survivor grew with the deaths.
    Grown,
}

/// All kinds, in the order of the report.
pub const FAULT_KINDS: [FaultKind; 9] = [
    FaultKind::Garbage,
    FaultKind::Lost,
    FaultKind::Duplicate,
    FaultKind::Miscounted,
    FaultKind::Hang,
    FaultKind::DeathUndetected,
    FaultKind::Failed,
    FaultKind::LeftBehind,
    FaultKind::Grown,
];

impl FaultKind {
    pub fn label(self) -> &'static str {
        match self {
            FaultKind::Garbage => "garbage",
            FaultKind::Lost => "lost",
            FaultKind::Duplicate => "duplicates out of range or unmarked",
            FaultKind::Miscounted => "unreleased miscounted",
            FaultKind::Hang => "hangs",
            FaultKind::DeathUndetected => "deaths not detected",
            FaultKind::Failed => "sides failed",
            FaultKind::LeftBehind => "files left behind",
            FaultKind::Grown => "descriptors or mappings grown",
        }
    }
}

/// A fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub kind: FaultKind,
    /// The number of messages, or 1.
    pub count: u64,
    pub text: String,
}

impl Fault {
    pub fn new(kind: FaultKind, count: u64, text: impl fmt::Display) -> Fault {
        Fault { kind, count, text: text.to_string() }
    }
}

/// A copy of a side's journal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JournalEntries {
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

impl JournalEntries {
    pub fn of(journal: &Journal) -> JournalEntries {
        JournalEntries {
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

/// The bounds of a number: at least, and at most.
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
    /// The highest number delivered to a receiver.
    delivered: u64,
    /// Numbers that may or may not have been committed. A channel that does not number its messages starts its next
    /// sender after them.
    uncertain: Vec<RangeInclusive<u64>>,
    pub faults: Vec<Fault>,
}

impl Ledger {
    /// The first number of the next sender, if the channel does not return it.
    pub fn next(&self) -> u64 {
        self.committed.most + 1
    }

    /// The highest number delivered to a receiver.
    pub fn delivered(&self) -> u64 {
        self.delivered
    }

    fn fault(&mut self, kind: FaultKind, count: u64, text: impl fmt::Display) {
        self.faults.push(Fault::new(kind, count, text));
    }

    /// Checks the first number of a sender.
    fn check_sender_start(&mut self, entries: &JournalEntries) {
        let (Span { least, most }, first) = (self.committed, entries.first);
        if first <= least {
            let lost = least + 1 - first;
            self.fault(
                FaultKind::Lost,
                lost,
                format_args!("{least} were committed, and the next sender begins at {first}"),
            );
        } else if first > most + 1 {
            let text = format!("at most {most} were committed, and the next sender begins at {first}");
            self.fault(FaultKind::Garbage, first - most - 1, text);
        } else if least + 1 < first && first <= most {
            let text = format!("of the batch {} to {most}, only the part before {first} was committed", least + 1);
            self.fault(FaultKind::Garbage, 1, text);
        }
    }

    /// A sender is dead, or done. `is_numbered`: its channel returned its first number.
    pub fn sender_ended(&mut self, entries: &JournalEntries, is_numbered: bool) {
        if entries.garbage > 0 {
            self.fault(FaultKind::Garbage, entries.garbage, &entries.text);
        }
        if entries.first == 0 {
            return;
        }
        self.check_sender_start(entries);
        self.committed = Span { least: entries.done, most: entries.pending };
        // Added now, and not when the next sender ends: a receiver may end before that.
        if !is_numbered && self.committed.least < self.committed.most {
            self.uncertain.push(self.committed.least + 1..=self.committed.most);
        }
    }

    /// A receiver is dead, or done. `sent_most`: the highest number that any sender may have committed, read after the
    /// end of the receiver.
    pub fn receiver_ended(&mut self, entries: &JournalEntries, sent_most: u64) {
        if entries.garbage > 0 {
            self.fault(FaultKind::Garbage, entries.garbage, &entries.text);
        }
        if entries.unmarked > 0 {
            let text = "messages were redelivered without the mark";
            self.fault(FaultKind::Duplicate, entries.unmarked, text);
        }
        if entries.first == 0 {
            // It died before its first message was known, with at most this number of messages taken.
            self.released.most += entries.pending;
            return;
        }
        let (Span { least, most }, first) = (self.released, entries.first);
        let missing = self.certain(least + 1, first).saturating_sub(most - least);
        if first <= least {
            let text = format!("{least} were released, and the next receiver begins at {first}");
            self.fault(FaultKind::Duplicate, least + 1 - first, text);
        } else if missing > 0 {
            let text = format!("at most {most} were released, and the next receiver begins at {first}");
            self.fault(FaultKind::Lost, missing, text);
        } else if self.uncertain.is_empty() && first != least + 1 && first != most + 1 {
            let text =
                format!("of {} to {most}, released by one store, only the part before {first} was released", least + 1);
            self.fault(FaultKind::Duplicate, 1, text);
        }
        for (expected, found) in &entries.jumps {
            let text = format!("{found} arrived where {expected} was expected");
            let skipped = self.certain(*expected, *found);
            match found < expected {
                true => self.fault(FaultKind::Duplicate, expected - found, text),
                false if skipped > 0 => self.fault(FaultKind::Lost, skipped, text),
                false => {}
            }
        }
        if entries.jumps_count > JUMPS_MAX {
            self.fault(FaultKind::Lost, entries.jumps_count - JUMPS_MAX, "more jumps than a journal has space for");
        }
        if entries.taken > sent_most {
            let text = format!("{} arrived, and at most {sent_most} were committed", entries.taken);
            self.fault(FaultKind::Garbage, entries.taken - sent_most, text);
        }
        self.released = Span { least: entries.done, most: entries.pending.max(entries.done) };
        self.delivered = self.delivered.max(entries.taken);
    }

    /// How many of the numbers from `from` to before `to` were certainly committed by dead senders.
    fn certain(&self, from: u64, to: u64) -> u64 {
        let overlap = |range: &RangeInclusive<u64>| (to.min(range.end() + 1)).saturating_sub(from.max(*range.start()));
        to.saturating_sub(from) - self.uncertain.iter().map(overlap).sum::<u64>()
    }

    /// A live sender reports `reported` unreleased messages, after it has committed `committed`.
    pub fn check_unreleased(&mut self, reported: u64, committed: u64) {
        let released = self.released;
        if ![released.least, released.most].iter().any(|released| committed.checked_sub(*released) == Some(reported)) {
            let text =
                format!("{reported} unreleased were reported, with {committed} committed and {released:?} released");
            self.fault(FaultKind::Miscounted, 1, text);
        }
    }

    /// All sides are dead, and this number of messages is in the channel.
    pub fn check_waiting(&mut self, found: u64) {
        let (committed, released) = (self.committed, self.released);
        let fits =
            |sent: u64| [released.least, released.most].iter().any(|head| sent.checked_sub(*head) == Some(found));
        if !fits(committed.least) && !fits(committed.most) {
            let text = format!("{found} wait in the channel, with {committed:?} committed and {released:?} released");
            self.fault(FaultKind::Miscounted, 1, text);
        }
    }

    /// The sender is dead, and the live receiver has reported that, after every committed message. It received
    /// everything up to `taken`; 0: nothing, because a predecessor released everything.
    pub fn check_all_taken(&mut self, taken: u64) {
        let (Span { least, most }, released) = (self.committed, self.released);
        let ends = if taken > 0 { [taken; 2] } else { [released.least, released.most] };
        if ends.iter().any(|end| *end == least || *end == most) {
            return;
        }
        let end = ends[1];
        let text = format!("{least} or {most} were committed, and {end} arrived before the end");
        match end < least {
            true => self.fault(FaultKind::Lost, least - end, text),
            false => self.fault(FaultKind::Garbage, 1, text),
        }
    }

    /// Both sides have ended in order.
    pub fn closed(&mut self) {
        let (Span { least: sent, .. }, taken) = (self.committed, self.delivered);
        let missing = self.certain(taken + 1, sent + 1);
        if missing > 0 {
            self.fault(
                FaultKind::Lost,
                missing,
                format_args!("{sent} were committed, and the last delivered one is {taken}"),
            );
        }
        // A last receiver that received nothing does not show whether the release that killed its predecessor was done.
        let Span { least, most } = self.released;
        if !(least..=most).contains(&taken) {
            let text = format!("both sides have ended, and {least} to {most} of {taken} were released");
            self.fault(FaultKind::Miscounted, 1, text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(first: u64, done: u64, pending: u64) -> JournalEntries {
        JournalEntries { first, done, pending, ..JournalEntries::default() }
    }

    fn received(first: u64, released: u64, pending: u64, taken: u64) -> JournalEntries {
        JournalEntries { first, done: released, pending, taken, ..JournalEntries::default() }
    }

    /// A ledger after a sender died in the batch 11 to 14, and a receiver died while it released 5, after it took 7.
    fn after_both_died() -> Ledger {
        let mut ledger = Ledger::default();
        ledger.sender_ended(&sent(1, 10, 14), true);
        ledger.receiver_ended(&received(1, 4, 5, 7), 14);
        assert_eq!(ledger.faults, []);
        ledger
    }

    fn kinds(ledger: &Ledger) -> Vec<(FaultKind, u64)> {
        ledger.faults.iter().map(|fault| (fault.kind, fault.count)).collect()
    }

    #[test]
    fn both_outcomes_of_an_interrupted_step_are_accepted() {
        for first in [11, 15] {
            let mut ledger = after_both_died();
            ledger.sender_ended(&sent(first, 20, 20), true);
            ledger.receiver_ended(&received(if first == 11 { 5 } else { 6 }, 20, 20, 20), 20);
            ledger.closed();
            assert_eq!(ledger.faults, []);
        }
    }

    #[test]
    fn another_first_number_of_a_sender_shows_a_loss_or_a_torn_batch() {
        for (first, fault) in [
            (10, (FaultKind::Lost, 1)),
            (1, (FaultKind::Lost, 10)),
            (12, (FaultKind::Garbage, 1)),
            (17, (FaultKind::Garbage, 2)),
        ] {
            let mut ledger = after_both_died();
            ledger.sender_ended(&sent(first, 20, 20), true);
            assert_eq!(kinds(&ledger), [fault], "at {first}");
        }
    }

    #[test]
    fn another_first_number_of_a_receiver_shows_a_duplicate_or_a_loss() {
        for (first, fault) in [
            (4, (FaultKind::Duplicate, 1)),
            (1, (FaultKind::Duplicate, 4)),
            (7, (FaultKind::Lost, 1)),
            (9, (FaultKind::Lost, 3)),
        ] {
            let mut ledger = after_both_died();
            ledger.receiver_ended(&received(first, 9, 9, 9), 14);
            assert_eq!(kinds(&ledger), [fault], "at {first}");
        }
    }

    #[test]
    fn jumps_garbage_missing_marks_and_unsent_messages_are_counted() {
        let mut ledger = after_both_died();
        let entries = JournalEntries {
            jumps_count: 2,
            jumps: vec![(8, 10), (12, 11)],
            garbage: 3,
            unmarked: 4,
            ..received(5, 15, 15, 15)
        };
        ledger.receiver_ended(&entries, 14);
        let wanted = [
            (FaultKind::Garbage, 3),
            (FaultKind::Duplicate, 4),
            (FaultKind::Lost, 2),
            (FaultKind::Duplicate, 1),
            (FaultKind::Garbage, 1),
        ];
        assert_eq!(kinds(&ledger), wanted);
    }

    #[test]
    fn an_unreleased_count_is_exact() {
        let mut ledger = after_both_died();
        for right in [16, 15] {
            ledger.check_unreleased(right, 20);
        }
        for right in [6, 5, 10, 9] {
            ledger.check_waiting(right);
        }
        ledger.check_all_taken(10);
        ledger.check_all_taken(14);
        let mut empty = Ledger { released: ledger.committed, ..Ledger::default() };
        empty.committed = ledger.committed;
        empty.check_all_taken(0);
        assert_eq!(empty.faults, []);
        assert_eq!(ledger.faults, []);
        for wrong in [14, 17, 0] {
            ledger.check_unreleased(wrong, 20);
        }
        for wrong in [4, 7, 8, 11] {
            ledger.check_waiting(wrong);
        }
        assert_eq!(kinds(&ledger), [(FaultKind::Miscounted, 1); 7]);
        ledger.faults.clear();
        ledger.check_all_taken(9);
        ledger.check_all_taken(12);
        ledger.check_all_taken(0);
        assert_eq!(kinds(&ledger), [(FaultKind::Lost, 1), (FaultKind::Garbage, 1), (FaultKind::Lost, 5)]);
    }

    #[test]
    fn a_channel_without_numbers_may_lose_only_uncertain_messages() {
        let mut ledger = Ledger::default();
        ledger.sender_ended(&sent(1, 10, 11), false);
        assert_eq!(ledger.next(), 12);
        ledger.sender_ended(&sent(12, 20, 20), false);
        let jump = |expected, found| JournalEntries {
            jumps_count: 1,
            jumps: vec![(expected, found)],
            ..received(1, 20, 20, 20)
        };
        ledger.receiver_ended(&jump(11, 12), 20);
        ledger.closed();
        assert_eq!(ledger.faults, []);
        ledger.released = Span::default();
        ledger.receiver_ended(&jump(10, 12), 20);
        assert_eq!(kinds(&ledger), [(FaultKind::Lost, 1)]);
    }

    #[test]
    fn uncertain_messages_may_be_missing_while_the_next_sender_lives() {
        let mut ledger = Ledger::default();
        ledger.sender_ended(&sent(1, 10, 11), false);
        // The next sender has begun at 12 and has not ended.
        let jump = JournalEntries { jumps_count: 1, jumps: vec![(11, 12)], ..received(1, 12, 12, 12) };
        ledger.receiver_ended(&jump, 12);
        assert_eq!(ledger.faults, []);
    }

    #[test]
    fn a_last_receiver_without_messages_leaves_the_last_release_uncertain() {
        let mut ledger = Ledger::default();
        ledger.sender_ended(&sent(1, 10, 10), true);
        ledger.receiver_ended(&received(1, 9, 10, 10), 10);
        ledger.receiver_ended(&received(0, 0, 0, 0), 10);
        ledger.closed();
        assert_eq!(ledger.faults, []);
        ledger.released = Span { least: 8, most: 9 };
        ledger.closed();
        assert_eq!(kinds(&ledger), [(FaultKind::Miscounted, 1)]);
    }

    #[test]
    fn an_undelivered_message_is_lost_at_the_end() {
        let mut ledger = Ledger::default();
        ledger.sender_ended(&sent(1, 10, 10), true);
        ledger.receiver_ended(&received(1, 8, 8, 8), 10);
        ledger.closed();
        assert_eq!(kinds(&ledger), [(FaultKind::Lost, 2)]);
    }
}
