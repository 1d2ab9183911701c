//! The table of a broadcast lane by path: the cursor pages of all its consumers, and which slots are in use.
//! `by_path.rs` has the steps of the sides.

use super::pages::{CURSORS_MAX, CursorPage, KEPT_TRIES, Policy, load_bound, store_bound};
use crate::edges::{AtomicU64, JOIN, failpoint, full_fence};
use crate::error::LaneError;
use crate::layout::{Position, Preamble, WIRE_VERSION, fnv1a};
use core::ptr::NonNull;
use core::sync::atomic::Ordering::Relaxed;

/// First word of the table of a broadcast lane by path: "pelton-T" in memory order.
pub const MAGIC_TABLE: u64 = u64::from_le_bytes(*b"pelton-T");

/// The longest name of a durable consumer.
pub const DURABLE_BYTES_MAX: usize = 64;

/// The layout of the table in one line, beside that of a broadcast lane. The table contains its hash.
pub const TABLE_TEXT: &str = "broadcast=3836989f4c25b509;\
table:changes@64:u64,held@128:u64,held_place@136:position,hold_limit@144:u64;\
entry@8192+128*slot:join@0:u64,begun@8:u64,name@64:64;cursor@16384+8192*slot";

/// FNV-1a 64 of [`TABLE_TEXT`].
pub const TABLE_SIGNATURE: u64 = fnv1a(TABLE_TEXT.as_bytes());

// The text above names the layout of a broadcast lane by its signature.
const _: () = assert!(super::pages::BROADCAST_SIGNATURE == 0x3836989f4c25b509);

/// Loom's threads have small stacks.
const PADDING: usize = if cfg!(loom) { 40 } else { 8040 };

/// The table of a broadcast lane by path.
///
/// | offset | type | field | written by | meaning |
/// |---|---|---|---|---|
/// | 0 | 24 bytes | preamble | creator | |
/// | 64 | u64 | changes | any consumer, by an atomic addition | joins and leaves so far |
/// | 128 | u64 | held | producer | it writes no byte of this message, nor of a later one; at most `kept` |
/// | 136 | position | held_place | producer | where that message is, or will be |
/// | 144 | u64 | hold_limit | producer | 0: none; else 1 + the nanoseconds for which a consumer may hold it up |
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
    pub(super) changes: AtomicU64,
    _zero1: [u8; 56],
    pub(super) held: AtomicU64,
    held_place: AtomicU64,
    hold_limit: AtomicU64,
    _zero2: [u8; PADDING],
    pub(super) entries: [Entry; CURSORS_MAX],
    pub(super) cursors: [CursorPage; CURSORS_MAX],
}

#[repr(C, align(128))]
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) join: AtomicU64,
    pub(super) begun: AtomicU64,
    _zero: [u8; 48],
    name: [AtomicU64; DURABLE_BYTES_MAX / 8],
}

#[cfg(not(loom))]
const _: () = {
    use core::mem::{offset_of, size_of};
    assert!(offset_of!(CursorTable, changes) == 64);
    assert!(offset_of!(CursorTable, held) == 128);
    assert!(offset_of!(CursorTable, held_place) == 136);
    assert!(offset_of!(CursorTable, hold_limit) == 144);
    assert!(offset_of!(CursorTable, entries) == 8192);
    assert!(offset_of!(Entry, join) == 0);
    assert!(offset_of!(Entry, begun) == 8);
    assert!(offset_of!(Entry, name) == 64);
    assert!(size_of::<Entry>() == 128);
    assert!(offset_of!(CursorTable, cursors) == CursorTable::CURSORS_AT);
    assert!(size_of::<CursorTable>() == CursorTable::BYTES);
};

/// Bit 0 of `join`.
pub(super) const COUNTED: u64 = 1;

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
    /// From a copy of the bytes of its entry.
    ///
    /// # Panics
    /// If these are fewer than 128.
    pub fn of_bytes(entry: &[u8]) -> TableSlot {
        let mut join = [0; 8];
        let mut name = [0; DURABLE_BYTES_MAX];
        join.copy_from_slice(&entry[..8]);
        name.copy_from_slice(&entry[64..128]);
        let join = u64::from_le_bytes(join);
        TableSlot { is_counted: join & COUNTED != 0, joins: join >> 1, name }
    }

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
            hold_limit: zero(),
            _zero2: [0; PADDING],
            entries: core::array::from_fn(entry),
            cursors: core::array::from_fn(|_| CursorPage::new(Policy::Latest, 0)),
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
        let words = &self.entries[slot as usize].name;
        let store = |at: usize| {
            let mut whole = [0; 8];
            whole.copy_from_slice(&bytes[8 * at..8 * at + 8]);
            // Relaxed: the lock orders it.
            words[at].store(u64::from_le_bytes(whole), Relaxed);
            failpoint("table: a word of a name");
        };
        // A name of which a part is written, or freed, begins with a zero.
        if name.is_empty() { (0..words.len()).for_each(store) } else { (0..words.len()).rev().for_each(store) }
    }

    /// Whether a consumer of this slot has begun: its number is a place in the lane. Otherwise it has died, or is about
    /// to begin.
    pub fn has_begun(&self, slot: u32) -> bool {
        // Relaxed: the caller knows that the consumer has ended, and the kernel orders its stores before that.
        self.entries[slot as usize].begun.load(Relaxed) != 0
    }

    /// The policy of the consumer that a durable one of this slot would continue; `None`: it would begin anew. The
    /// caller has the slot's lock. One that could be passed is not continued by one that gates: the producer may have
    /// overwritten its next message, or be about to.
    ///
    /// # Errors
    /// [`LaneError::Corrupt`].
    pub fn continued_policy(&self, slot: u32) -> Result<Option<Policy>, LaneError> {
        let is_continued = self.slot(slot).is_counted && self.has_begun(slot);
        is_continued.then(|| self.cursor(slot).policy()).transpose()
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
    pub(super) fn count(&self, slot: u32) {
        let entry = &self.entries[slot as usize];
        // Relaxed: the caller has the lock.
        let join = (entry.join.load(Relaxed) & !COUNTED).wrapping_add(2) | COUNTED;
        failpoint("table: before the join");
        entry.join.store(join, JOIN.store()); // [join]
        failpoint("table: joined");
        self.changes.fetch_add(1, JOIN.store());
        failpoint("table: join counted");
    }

    /// How long one consumer may hold the producer up, in nanoseconds; `u64::MAX`: without a limit. It is that of the
    /// producer that began last, or died before it had begun.
    pub fn hold_max_ns(&self) -> u64 {
        // Relaxed: the caller's fence orders it. [join]
        self.hold_limit.load(Relaxed).wrapping_sub(1)
    }

    /// Limits how long a consumer may hold the producer up. The caller has the producer's lock, and calls this before
    /// [`crate::BroadcastProducer::take_over`]. Then [`CursorTable::longer_holders`] returns each consumer that has not
    /// loaded this.
    pub fn limit_holds(&self, hold_max_ns: u64) {
        self.hold_limit.store(hold_max_ns.wrapping_add(1), Relaxed); // [join]
        failpoint("table: limit");
        full_fence("limit");
    }

    /// The slots that are counted, and whose consumers may hold the producer up for longer than that, in nanoseconds.
    pub fn longer_holders(&self, hold_max_ns: u64) -> impl Iterator<Item = u32> {
        let holds_longer = move |slot: &u32| {
            let is_counted = self.entries[*slot as usize].join.load(JOIN.load()) & COUNTED != 0; // [join]
            // A policy that is none is that of no consumer, as for the producer.
            is_counted && self.cursor(*slot).policy().is_ok_and(|policy| policy.holds_ns() > hold_max_ns)
        };
        (0..CURSORS_MAX as u32).filter(holds_longer)
    }

    /// `held`, unchecked.
    pub(super) fn held(&self) -> u64 {
        // Relaxed: a later load finds what this one does not.
        self.held.load(Relaxed)
    }

    pub(super) fn hold(&self, number: u64, place: Position) {
        let failpoints = ["hold: before", "hold: place", "hold: number"];
        store_bound(&self.held, &self.held_place, number, place, failpoints);
    }

    pub(super) fn held_and_place(&self, capacity: u64) -> Result<(u64, Position), LaneError> {
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
    pub(super) table: NonNull<CursorTable>,
    /// The `join` of each slot, as last loaded.
    pub(super) joins: [u64; CURSORS_MAX],
    /// How long a consumer may hold the producer up.
    pub(super) hold_max_ns: u64,
}

impl ByPath {
    pub(super) fn table(&self) -> &CursorTable {
        // SAFETY: `take_over`'s caller keeps it mapped.
        unsafe { self.table.as_ref() }
    }

    /// Whether another consumer has joined at this slot, or its consumer has left.
    pub(super) fn has_changed(&self, slot: u32) -> bool {
        self.table().entries[slot as usize].join.load(JOIN.load()) != self.joins[slot as usize]
    }
}
