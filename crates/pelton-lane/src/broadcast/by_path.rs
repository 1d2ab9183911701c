//! A broadcast lane by path: consumers join and leave by themselves, whether there is a producer or not, and a durable
//! one keeps its place while no process uses it.
//!
//! All cursor pages are in one segment, the table, so that the producer finds a new consumer by loads alone. A consumer
//! joins at `kept`, and passes over messages up to the first one that it wants. [join]
//!
//! - The caller has a lock for its slot, so nothing else writes that slot's entry and cursor page.
//! - `kept` may exceed the number of a consumer that joined while the producer moved it. So the producer also stores
//!   `held`, from which on it overwrites nothing, and its successor begins there.

use super::consumer::BroadcastConsumer;
use super::pages::{CURSORS_MAX, KEPT_TRIES, NUMBER_MAX, Policy, seq_of};
use super::producer::{
    BroadcastMemory, BroadcastProducer, CursorLoss, Joined, Start, StartFrom, Waypoint, waypoint_bytes,
};
use super::table::{ByPath, COUNTED, CursorTable};
use crate::consumer::record_at;
use crate::edges::{JOIN, RELEASE, failpoint, fence_after_reading, full_fence};
use crate::error::LaneError;
use crate::layout::{Position, record_bytes, seq_after};
use crate::memory::field;
use alloc::vec::Vec;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::Relaxed;

impl BroadcastProducer {
    /// Creates the producer of a lane by path, which continues after the last message that its predecessor published.
    /// A new lane has `kept` and `held` 1, both at the start. The limit of [`CursorTable::limit_holds`] holds for each
    /// consumer that joins later. Walks through all messages that the lane holds.
    /// `can_barrier` as for [`crate::Sleeper::of_receiver`].
    ///
    /// # Errors
    /// [`LaneError::Corrupt`].
    ///
    /// # Safety
    /// As for [`BroadcastProducer::attach`], but for the data. The table stays mapped writable as long as this lives.
    pub unsafe fn take_over(
        memory: BroadcastMemory,
        table: NonNull<CursorTable>,
        pid: u32,
        can_barrier: bool,
    ) -> Result<BroadcastProducer, LaneError> {
        // SAFETY: the caller guarantees that both are mapped.
        let (page, words) = unsafe { (memory.producer.as_ref(), table.as_ref()) };
        let (capacity, bytes_max) = (memory.data.capacity(), page.producer.message_bytes_max);
        let (held, head) = words.held_and_place(capacity)?;
        let kept = page.kept();
        let apart = waypoint_bytes(capacity);
        // The bytes in `sent_bytes` count from the head until the walk is over.
        let mut waypoints = Vec::from([Waypoint { number: held, place: head, sent_bytes: 0 }]);
        let (mut number, mut tail, mut sent_bytes, mut newest) = (held, head, 0, 0);
        while let Some((record, _)) = record_at(&memory.data, bytes_max, tail)? {
            if number - held > capacity / 8 {
                let wanted = capacity / 8;
                return Err(LaneError::Corrupt { what: "records in the lane", found: number - held, wanted });
            }
            newest = Position { offset: record.offset, seq: record.seq }.pack();
            tail = Position { offset: record.offset + record_bytes(record.bytes), seq: seq_after(record.seq) };
            (number, sent_bytes) = (number + 1, sent_bytes + 8 + record.bytes);
            let last = waypoints[waypoints.len() - 1].sent_bytes;
            if number == kept || sent_bytes - last >= apart {
                waypoints.push(Waypoint { number, place: tail, sent_bytes });
            }
        }
        if !(held..=number).contains(&kept) {
            return Err(LaneError::Corrupt { what: "kept", found: kept, wanted: number });
        }
        page.producer.start_generation(pid);
        let (_, floor) = page.producer.tail_and_floor();
        // The caller's words: a consumer may rely on the fences of the predecessor.
        let was_fenced = page.producer.is_fenced();
        // SAFETY: as the caller guarantees.
        let mut producer =
            unsafe { BroadcastProducer::at(memory, &Start { number, tail, held, head, floor }, can_barrier)? };
        producer.fences |= was_fenced;
        let walked_from = producer.inner.sent_bytes().wrapping_sub(sent_bytes);
        let placed = waypoints.into_iter().map(|waypoint| {
            let sent_bytes = walked_from.wrapping_add(waypoint.sent_bytes);
            Waypoint { sent_bytes, ..waypoint }
        });
        producer.waypoints = placed.collect();
        (producer.kept, producer.newest) = (kept, newest);
        // For consumers of the newest message, which may join at any time.
        producer.latest = 1;
        producer.store_last(if kept < number { newest } else { 0 });
        // SAFETY: the table is mapped, as the caller guarantees; `changes` is a field of it.
        producer.changes = unsafe { field(table, |t| &raw mut (*t).changes) };
        producer.by_path = Some(ByPath { table, joins: [0; CURSORS_MAX], hold_max_ns: words.hold_max_ns() });
        producer.changes_seen = words.changes.load(Relaxed).wrapping_sub(1);
        producer.discover();
        Ok(producer)
    }

    /// Counts consumers that have joined by themselves, and finds those that have left.
    pub(super) fn discover(&mut self) {
        let Some(by_path) = &self.by_path else { return };
        let table = by_path.table;
        // SAFETY: `take_over`'s caller keeps it mapped.
        let words = unsafe { table.as_ref() };
        let changes = words.changes.load(JOIN.load()); // [join]
        if changes == self.changes_seen {
            return;
        }
        self.changes_seen = changes;
        for slot in 0..CURSORS_MAX {
            let join = words.entries[slot].join.load(JOIN.load()); // [join]
            let Some(by_path) = &mut self.by_path else { return };
            if core::mem::replace(&mut by_path.joins[slot], join) == join {
                continue;
            }
            for former in self.slots.iter_mut().filter(|former| former.slot as usize == slot) {
                former.lost.get_or_insert(CursorLoss::Closed);
            }
            // A policy that is none is that of no consumer: it has never stored it.
            let Ok(policy) = words.cursors[slot].policy() else { continue };
            if join & COUNTED == 0 {
                continue;
            }
            self.joins += 1;
            // One that holds it up for longer has not loaded the limit yet, or is hostile. [join]
            let policy = policy.within(self.inner.capacity()).holding_at_most(by_path.hold_max_ns);
            let (join, held) = (self.joins, self.held);
            // SAFETY: the page is a field of the table, which stays mapped; the slot is below CURSORS_MAX.
            unsafe {
                let page = field(table, |t| &raw mut (*t).cursors[slot]);
                self.count(slot as u32, join, page, policy, held);
            }
        }
    }

    /// Moves `held` to `kept`, or less far if a consumer has joined before that meanwhile. Returns the waypoint there.
    pub(super) fn hold(&mut self) -> Waypoint {
        // A consumer that joins either loads the new `kept`, and joins there, or is found here. Full, as that consumer
        // has no membarrier to rely on, and rare: at most once per waypoint. [join]
        full_fence("admit");
        let changes = self.changes_seen;
        self.discover();
        if changes != self.changes_seen {
            self.load_cursors();
        }
        let gating = self.slots.iter().filter(|slot| slot.gates()).map(|slot| slot.seen);
        let waypoint = self.waypoint_before(gating.fold(self.kept, u64::min).max(self.held));
        if let Some(by_path) = self.by_path.as_ref().filter(|_| waypoint.number > self.held) {
            by_path.table().hold(waypoint.number, waypoint.place); // [keep]
        }
        waypoint
    }

    /// The consumers that are counted now: the slot and [`Joined::join`] of each, and how often a consumer has joined
    /// at that slot.
    pub fn joined(&self) -> impl Iterator<Item = (u32, u64, u64)> {
        let joins = |slot: u32| self.by_path.as_ref().map_or(0, |by_path| by_path.joins[slot as usize] >> 1);
        self.slots.iter().filter(|slot| slot.lost.is_none()).map(move |slot| (slot.slot, slot.join, joins(slot.slot)))
    }

    /// The policy of a consumer.
    pub fn policy_of(&self, join: u64) -> Option<Policy> {
        self.slots.iter().find(|slot| slot.join == join).map(|slot| slot.policy)
    }

    /// No process uses this durable consumer now: its sleep word has no meaning. It still counts by its policy.
    pub fn set_away(&mut self, join: u64) {
        if let Some(index) = self.slots.iter().position(|slot| slot.join == join) {
            // SAFETY: a field of `own`, which lives as long as this. Nothing writes it.
            self.sleep_words[index] = unsafe { field(self.own, |p| &raw mut (*p).zero) };
        }
    }
}

/// How a consumer joins by itself.
#[derive(Clone, Copy, Debug)]
pub struct JoinByPath {
    /// Its slot, whose lock the caller has.
    pub slot: u32,
    /// Its policy.
    pub policy: Policy,
    /// Where it begins, if it does not continue.
    pub from: StartFrom,
    /// It is durable: it continues where the last consumer of this slot was, if there was one. If that one could be
    /// passed, this one must not gate: see [`CursorTable::continued_policy`].
    pub continues: bool,
    /// Its process, for diagnostics only.
    pub pid: u32,
}

impl BroadcastConsumer {
    /// Joins a lane by path, with or without a producer. Does not wait. Passes over the messages before the first one
    /// that it wants, which takes some nanoseconds for each. Ring the producer afterwards, so that it finds the end of
    /// this process. `message_bytes_max` and `can_barrier` as for [`BroadcastConsumer::attach`].
    ///
    /// # Errors
    /// [`LaneError::Corrupt`]; [`LaneError::HoldTooLong`]: ring the producer then too.
    ///
    /// # Safety
    /// `memory` and `table` stay mapped, the table writable, as long as this and its sleeper live. The caller has the
    /// lock of the slot as long.
    pub unsafe fn join_by_path(
        memory: BroadcastMemory,
        table: NonNull<CursorTable>,
        joining: JoinByPath,
        message_bytes_max: u64,
        can_barrier: bool,
    ) -> Result<BroadcastConsumer, LaneError> {
        let JoinByPath { slot, policy, from, continues, pid } = joining;
        // SAFETY: the caller guarantees that both are mapped.
        let (words, page) = unsafe { (table.as_ref(), memory.producer.as_ref()) };
        let (entry, cursor) = (&words.entries[slot as usize], &words.cursors[slot as usize]);
        // Relaxed: this side has the lock.
        let (join, begun) = (entry.join.load(Relaxed), entry.begun.load(Relaxed));
        let left_at = cursor.number.load(Relaxed);
        // Otherwise the last consumer died before it had begun, and this one begins anew.
        let continues = continues && join & COUNTED != 0 && begun != 0;
        // One that is none is that of no consumer.
        let former = cursor.policy().unwrap_or(Policy::Lag { slack: 0 });
        if continues && policy.reads_in_place() {
            // Before any store: what gates by this page holds the producer up.
            let (held, _) = words.held_and_place(memory.data.capacity())?;
            if !former.reads_in_place() || held > left_at {
                let what = "number of a durable cursor that gates";
                return Err(LaneError::Corrupt { what, found: left_at, wanted: held });
            }
        }
        if !continues {
            entry.begun.store(0, Relaxed);
            failpoint("join: not begun");
            // The producer must not take what follows for the former consumer's.
            words.detach(slot);
        }
        cursor.begin(policy, pid);
        failpoint("join: page");
        // SAFETY: as the caller guarantees; the page is a field of the table.
        let attach = |number, place, skip| unsafe {
            let joined = Joined { slot, join: 0, number, place, skip };
            let cursor = field(table, |t| &raw mut (*t).cursors[slot as usize]);
            let consumer = BroadcastConsumer::at(memory, cursor, policy, joined, message_bytes_max, can_barrier);
            consumer.map(|consumer| BroadcastConsumer { table: Some(table), ..consumer })
        };
        // A producer that begins with a limit has either found this consumer, or stored what is loaded here. [join]
        let check_hold = || policy.check_hold(words.hold_max_ns());
        if continues {
            words.count(slot);
            full_fence("joiner"); // [join]
            // A former policy that could hold the producer up for as long has been found by one that begins with a
            // limit. And it must not come back: a producer without a limit may have passed this consumer by now.
            if policy.holds_ns() > former.holds_ns()
                && let Err(refused) = check_hold()
            {
                cursor.begin(former, pid);
                words.count(slot);
                return Err(refused);
            }
            let mut consumer = attach(left_at, Position { offset: 0, seq: seq_of(left_at) }, 0)?;
            consumer.seek(words, left_at, false)?;
            return Ok(consumer);
        }
        let mut tries = 0..KEPT_TRIES;
        let mut consumer = loop {
            let Some(earlier) = tries.next() else { return Err(page.changing()) };
            let (number, place) = page.oldest(memory.data.capacity())?;
            let (tail, _) = page.producer.tail_and_floor();
            let (tail, most) = (number + tail.since(place), memory.data.capacity() / 8);
            // The tail may be of an earlier time, or a predecessor's that died before it stored it.
            let tail = if tail - number > most { number } else { tail };
            let first = match from {
                StartFrom::Now => tail,
                StartFrom::Oldest => number,
                StartFrom::Last(messages) => tail.saturating_sub(messages).max(number),
            };
            cursor.number.store(number, RELEASE.store());
            failpoint("join: number");
            if earlier == 0 {
                words.count(slot);
            }
            full_fence("joiner"); // [join]
            if let Err(refused) = check_hold() {
                words.detach(slot);
                return Err(refused);
            }
            // `kept` only grows: if it is at most `number`, nothing that this side wants has been overwritten.
            if page.kept() <= number {
                break attach(number, place, first - number)?;
            }
        };
        // So that its successor need not pass over them, if it is durable. One that lags may be passed meanwhile.
        if consumer.seek(words, consumer.number(), true)? {
            consumer.skip = 0;
            cursor.number.store(consumer.number, RELEASE.store());
            failpoint("join: passed over");
        }
        // Relaxed: this side has the lock.
        entry.begun.store(entry.join.load(Relaxed), Relaxed);
        failpoint("join: begun");
        Ok(consumer)
    }

    /// Moves to `number`. Returns false if the producer has passed that: this consumer lags, and finds out when it
    /// copies. One that `begins` moves to the end of the messages if that is before `number`: the tail by which it has
    /// chosen the number may be visible before the last messages are.
    fn seek(&mut self, table: &CursorTable, mut number: u64, begins: bool) -> Result<bool, LaneError> {
        let capacity = self.data.capacity();
        let (found, mut passed) = (number, 0);
        let corrupt = |wanted| LaneError::Corrupt { what: "number of a durable cursor", found, wanted };
        if number == 0 || number > NUMBER_MAX {
            return Err(corrupt(NUMBER_MAX));
        }
        let gates = self.policy.reads_in_place();
        let bound = |consumer: &BroadcastConsumer| match gates {
            true => table.held_and_place(capacity),
            false => consumer.kept_and_place(),
        };
        for _ in 0..KEPT_TRIES {
            let (mut at, mut place) = bound(self)?;
            if at > number && gates {
                return Err(corrupt(at));
            }
            if at > number {
                return Ok(false);
            }
            // The bound only grows, so all these walks together pass over each message at most once.
            if number - at > capacity / 8 || at < passed {
                return Err(corrupt(at));
            }
            // As a consumer that lags: the producer may overwrite what this side passes over. [keep]
            let is_passed = loop {
                let found = record_at(&self.data, self.bytes_max, place);
                fence_after_reading(); // [keep]
                let oldest = if gates { table.held.load(Relaxed) } else { self.producer().kept() };
                failpoint("join: passes a message");
                if oldest > at {
                    passed = oldest;
                    break true;
                }
                if at == number {
                    break false;
                }
                let Some((record, _)) = found? else {
                    if !begins {
                        return Err(corrupt(at));
                    }
                    number = at;
                    break false;
                };
                place = Position { offset: record.offset + record_bytes(record.bytes), seq: seq_after(record.seq) };
                at += 1;
            };
            if !is_passed {
                (self.cursor, self.seq, self.number) = (place.offset, place.seq, number);
                return Ok(true);
            }
        }
        Err(LaneError::Corrupt { what: "the oldest message, which changes at each load", found, wanted: 0 })
    }
}
