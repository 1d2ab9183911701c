//! A broadcast lane by path: consumers join and leave by themselves, whether there is a producer or not, and a durable
//! one keeps its place while no process uses it.
//!
//! All cursor pages are in one segment, the table, so that the producer finds a new consumer by loads alone. A consumer
//! joins at `kept`, and passes over messages up to the first one that it wants. [join]
//!
//! - The caller has a lock for its slot, so nothing else writes that slot's entry and cursor page.
//! - `kept` may exceed the number of a consumer that joined while the producer moved it. So the producer also stores
//!   `held`, from which on it overwrites nothing, and its successor begins there.

use super::consumer::{BroadcastConsumer, KEPT_TRIES, kept_and_place};
use super::pages::{CURSORS_MAX, CursorPage, NUMBER_MAX, Policy, load_bound, seq_of, store_bound};
use super::producer::{BroadcastMemory, BroadcastProducer, CursorLoss, Joined, Start, StartFrom, Waypoint};
use crate::consumer::record_at;
use crate::edges::{AtomicU64, JOIN, RELEASE, failpoint, fence_after_reading, full_fence};
use crate::error::LaneError;
use crate::layout::{Position, Preamble, WIRE_VERSION, fnv1a, record_bytes, seq_after};
use crate::memory::field;
use alloc::vec::Vec;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::Relaxed;

/// First word of the table of a broadcast lane by path: "pelton-T" in memory order.
pub const MAGIC_TABLE: u64 = u64::from_le_bytes(*b"pelton-T");

/// The longest name of a durable consumer.
pub const DURABLE_BYTES_MAX: usize = 64;

/// The layout of the table in one line, beside that of a broadcast lane. The table contains its hash.
pub const TABLE_TEXT: &str = "broadcast=3836989f4c25b509;\
table:changes@64:u64,held@128:u64,held_place@136:position;\
entry@8192+128*slot:join@0:u64,begun@8:u64,name@64:64;cursor@16384+8192*slot";

/// FNV-1a 64 of [`TABLE_TEXT`].
pub const TABLE_SIGNATURE: u64 = fnv1a(TABLE_TEXT.as_bytes());

// The text above names the layout of a broadcast lane by its signature.
const _: () = assert!(super::pages::BROADCAST_SIGNATURE == 0x3836989f4c25b509);

/// Loom's threads have small stacks.
const PADDING: usize = if cfg!(loom) { 48 } else { 8048 };

/// The table of a broadcast lane by path.
///
/// | offset | type | field | written by | meaning |
/// |---|---|---|---|---|
/// | 0 | 24 bytes | preamble | creator | |
/// | 64 | u64 | changes | any consumer, by an atomic addition | joins and leaves so far |
/// | 128 | u64 | held | producer | it writes no byte of this message, nor of a later one; at most `kept` |
/// | 136 | position | held_place | producer | where that message is, or will be |
/// | 8192 + 128 slot | 128 bytes | entry | see below | |
/// | 16384 + 8192 slot | 8192 bytes | cursor | its consumer | a [`CursorPage`] without a preamble |
///
/// An entry is written by the process that has the lock of its slot:
///
/// | offset | type | field | meaning |
/// |---|---|---|---|
/// | 0 | u64 | join | bit 0: the producer counts this slot; the other bits: how often a consumer has joined here |
/// | 8 | u64 | begun | the `join` with which a consumer has begun: its number is a place in the lane |
/// | 64 | 64 bytes | name | of a durable consumer, filled up with zeros; all zeros: the slot is for any consumer |
#[repr(C, align(128))]
#[derive(Debug)]
pub struct CursorTable {
    preamble: Preamble,
    _zero0: [u8; 40],
    changes: AtomicU64,
    _zero1: [u8; 56],
    held: AtomicU64,
    held_place: AtomicU64,
    _zero2: [u8; PADDING],
    entries: [Entry; CURSORS_MAX],
    cursors: [CursorPage; CURSORS_MAX],
}

#[repr(C, align(128))]
#[derive(Debug)]
struct Entry {
    join: AtomicU64,
    begun: AtomicU64,
    _zero: [u8; 48],
    name: [AtomicU64; DURABLE_BYTES_MAX / 8],
}

#[cfg(not(loom))]
const _: () = {
    use core::mem::{offset_of, size_of};
    assert!(offset_of!(CursorTable, changes) == 64);
    assert!(offset_of!(CursorTable, held) == 128);
    assert!(offset_of!(CursorTable, held_place) == 136);
    assert!(offset_of!(CursorTable, entries) == 8192);
    assert!(offset_of!(Entry, join) == 0);
    assert!(offset_of!(Entry, begun) == 8);
    assert!(offset_of!(Entry, name) == 64);
    assert!(size_of::<Entry>() == 128);
    assert!(offset_of!(CursorTable, cursors) == CursorTable::CURSORS_AT);
    assert!(size_of::<CursorTable>() == CursorTable::BYTES);
};

/// Bit 0 of `join`.
const COUNTED: u64 = 1;

/// What a slot of the table says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableSlot {
    /// The producer counts it.
    pub is_counted: bool,
    /// How often a consumer has joined here.
    pub joins: u64,
    /// The name of a durable consumer, filled up with zeros; all zeros: none.
    pub name: [u8; DURABLE_BYTES_MAX],
}

impl TableSlot {
    /// The name without its zeros; `None`: the slot is for any consumer, or the name is not UTF-8.
    pub fn durable(&self) -> Option<&str> {
        let bytes = self.name.iter().position(|byte| *byte == 0).unwrap_or(DURABLE_BYTES_MAX);
        core::str::from_utf8(&self.name[..bytes]).ok().filter(|name| !name.is_empty())
    }
}

impl CursorTable {
    /// Where the cursor pages begin, and the bytes of one.
    pub const CURSORS_AT: usize = 16384;
    /// See [`CursorTable::CURSORS_AT`].
    pub const CURSOR_BYTES: usize = 8192;
    /// Bytes of the table.
    pub const BYTES: usize = CursorTable::CURSORS_AT + CURSORS_MAX * CursorTable::CURSOR_BYTES;

    /// The preamble of a table.
    pub fn preamble() -> Preamble {
        Preamble {
            magic: MAGIC_TABLE,
            wire_version: WIRE_VERSION,
            segment_bytes: CursorTable::BYTES as u32,
            layout_signature: TABLE_SIGNATURE,
        }
    }

    /// The first bytes of the table of a new lane. All others are zero.
    #[cfg(not(loom))]
    pub fn first_bytes() -> [u8; 144] {
        let preamble = CursorTable::preamble();
        let mut bytes = [0; 144];
        bytes[..8].copy_from_slice(&preamble.magic.to_le_bytes());
        bytes[8..12].copy_from_slice(&preamble.wire_version.to_le_bytes());
        bytes[12..16].copy_from_slice(&preamble.segment_bytes.to_le_bytes());
        bytes[16..24].copy_from_slice(&preamble.layout_signature.to_le_bytes());
        bytes[128..136].copy_from_slice(&1u64.to_le_bytes());
        bytes[136..144].copy_from_slice(&Position::START.pack().to_le_bytes());
        bytes
    }

    /// The table of a new lane under loom.
    #[cfg(loom)]
    pub fn new() -> CursorTable {
        let zero = || AtomicU64::new(0);
        let entry = |_| Entry { join: zero(), begun: zero(), _zero: [0; 48], name: core::array::from_fn(|_| zero()) };
        CursorTable {
            preamble: CursorTable::preamble(),
            _zero0: [0; 40],
            changes: zero(),
            _zero1: [0; 56],
            held: AtomicU64::new(1),
            held_place: AtomicU64::new(Position::START.pack()),
            _zero2: [0; PADDING],
            entries: core::array::from_fn(entry),
            cursors: core::array::from_fn(|_| CursorPage::new(Policy::Gate, 0)),
        }
    }

    /// A slot as it is now: the process that has its lock may be changing it.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn slot(&self, slot: u32) -> TableSlot {
        let entry = &self.entries[slot as usize];
        let join = entry.join.load(JOIN.load());
        let mut name = [0; DURABLE_BYTES_MAX];
        for (bytes, word) in name.chunks_mut(8).zip(&entry.name) {
            // Relaxed: only the process that has the lock writes it.
            bytes.copy_from_slice(&word.load(Relaxed).to_le_bytes());
        }
        TableSlot { is_counted: join & COUNTED != 0, joins: join >> 1, name }
    }

    /// The cursor page of a slot.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn cursor(&self, slot: u32) -> &CursorPage {
        &self.cursors[slot as usize]
    }

    /// Names a slot that the producer does not count. The caller has the slot's lock. An empty name frees it.
    ///
    /// # Panics
    /// If the name is longer than [`DURABLE_BYTES_MAX`].
    pub fn name(&self, slot: u32, name: &str) {
        let mut bytes = [0; DURABLE_BYTES_MAX];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        // From the last word to the first: a name of which a part is written begins with a zero.
        for (word, bytes) in self.entries[slot as usize].name.iter().zip(bytes.chunks(8)).rev() {
            let mut whole = [0; 8];
            whole.copy_from_slice(bytes);
            // Relaxed: the lock orders it.
            word.store(u64::from_le_bytes(whole), Relaxed);
            failpoint("table: a word of a name");
        }
    }

    /// The producer counts this slot no more. The caller has its lock. Ring the producer afterwards: it may wait for
    /// this consumer.
    pub fn detach(&self, slot: u32) {
        let entry = &self.entries[slot as usize];
        // Relaxed: the caller has the lock.
        let join = entry.join.load(Relaxed);
        entry.join.store(join & !COUNTED, JOIN.store()); // [join]
        failpoint("table: detached");
        self.changes.fetch_add(1, JOIN.store());
        failpoint("table: leave counted");
    }

    /// Counts the slot from now on as that of another consumer. The caller has its lock.
    fn count(&self, slot: u32) {
        let entry = &self.entries[slot as usize];
        // Relaxed: the caller has the lock.
        let join = (entry.join.load(Relaxed) & !COUNTED).wrapping_add(2) | COUNTED;
        failpoint("table: before the join");
        entry.join.store(join, JOIN.store()); // [join]
        failpoint("table: joined");
        self.changes.fetch_add(1, JOIN.store());
        failpoint("table: join counted");
    }

    fn hold(&self, number: u64, place: Position) {
        let failpoints = ["hold: before", "hold: place", "hold: number"];
        store_bound(&self.held, &self.held_place, number, place, failpoints);
    }

    fn held_and_place(&self, capacity: u64) -> Result<(u64, Position), LaneError> {
        for _ in 0..KEPT_TRIES {
            if let Some(found) = load_bound("held", &self.held, &self.held_place, capacity)? {
                return Ok(found);
            }
        }
        let found = self.held.load(Relaxed);
        Err(LaneError::Corrupt { what: "held, which changes at each load", found, wanted: 0 })
    }
}

/// A producer's view of the table.
#[derive(Debug)]
pub(super) struct ByPath {
    table: NonNull<CursorTable>,
    /// The `join` of each slot, as last loaded.
    joins: [u64; CURSORS_MAX],
}

impl ByPath {
    fn table(&self) -> &CursorTable {
        // SAFETY: `take_over`'s caller keeps it mapped.
        unsafe { self.table.as_ref() }
    }

    /// Whether another consumer has joined at this slot, or its consumer has left.
    pub(super) fn has_changed(&self, slot: u32) -> bool {
        self.table().entries[slot as usize].join.load(JOIN.load()) != self.joins[slot as usize]
    }
}

impl BroadcastProducer {
    /// Creates the producer of a lane by path, which continues after the last message that its predecessor published.
    /// A new lane has `kept` and `held` 1, both at the start. Walks through all messages that the lane holds.
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
        let apart = super::producer::waypoint_bytes(capacity);
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
        producer.by_path = Some(ByPath { table, joins: [0; CURSORS_MAX] });
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
            let (join, policy, held) = (self.joins, policy.within(self.inner.capacity()), self.held);
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
    /// It is durable: it continues where the last consumer of this slot was, if there was one.
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
    /// [`LaneError::Corrupt`].
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
        if continues {
            words.count(slot);
            full_fence("joiner"); // [join]
            let mut consumer = attach(left_at, Position { offset: 0, seq: seq_of(left_at) }, 0)?;
            consumer.seek(words, left_at)?;
            return Ok(consumer);
        }
        let mut is_counted = false;
        let mut consumer = loop {
            let (number, place) = kept_and_place(page, memory.data.capacity())?;
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
            if !core::mem::replace(&mut is_counted, true) {
                words.count(slot);
            }
            full_fence("joiner"); // [join]
            // `kept` only grows: if it is at most `number`, nothing that this side wants has been overwritten.
            if page.kept() <= number {
                break attach(number, place, first - number)?;
            }
        };
        // So that its successor need not pass over them, if it is durable. One that lags may be passed meanwhile.
        if consumer.seek(words, consumer.number())? {
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
    /// copies.
    fn seek(&mut self, table: &CursorTable, number: u64) -> Result<bool, LaneError> {
        let capacity = self.data.capacity();
        let corrupt = |wanted| LaneError::Corrupt { what: "number of a durable cursor", found: number, wanted };
        if number == 0 || number > NUMBER_MAX {
            return Err(corrupt(NUMBER_MAX));
        }
        let gates = self.policy.reads_in_place();
        let bound = |consumer: &BroadcastConsumer| match gates {
            true => table.held_and_place(capacity),
            false => consumer.kept_and_place(),
        };
        loop {
            let (mut at, mut place) = bound(self)?;
            if at > number && gates {
                return Err(corrupt(at));
            }
            if at > number {
                return Ok(false);
            }
            if number - at > capacity / 8 {
                return Err(corrupt(at));
            }
            // As a consumer that lags: the producer may overwrite what this side passes over. [keep]
            let is_passed = loop {
                let found = record_at(&self.data, self.bytes_max, place);
                fence_after_reading(); // [keep]
                let oldest = if gates { table.held.load(Relaxed) } else { self.producer().kept() };
                if oldest > at {
                    break true;
                }
                if at == number {
                    break false;
                }
                let Some((record, _)) = found? else { return Err(corrupt(at)) };
                place = Position { offset: record.offset + record_bytes(record.bytes), seq: seq_after(record.seq) };
                at += 1;
            };
            if !is_passed {
                (self.cursor, self.seq, self.number) = (place.offset, place.seq, number);
                return Ok(true);
            }
        }
    }
}
