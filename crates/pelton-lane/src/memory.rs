//! The memory of a lane as both sides see it: three pages and the data. The only file that turns offsets into addresses.

use crate::edges::AtomicU64;
use crate::layout::{ConsumerPage, ProducerPage, ReceiverPage};
use core::ptr::NonNull;

/// The pages and the data of one lane, mapped by somebody else.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// The producer's page.
    pub producer: NonNull<ProducerPage>,
    /// The consumer's page.
    pub consumer: NonNull<ConsumerPage>,
    /// The receiver's page.
    pub receiver: NonNull<ReceiverPage>,
    /// The data.
    pub data: Data,
}

/// The data of a lane: `capacity` bytes of records.
#[derive(Clone, Copy, Debug)]
pub struct Data {
    #[cfg(not(loom))]
    base: NonNull<u8>,
    #[cfg(loom)]
    base: NonNull<Slot>,
    capacity: u64,
}

/// Eight bytes under loom: the same place seen as a header and as payload.
#[cfg(loom)]
#[derive(Debug)]
pub struct Slot {
    header: AtomicU64,
    payload: loom::cell::UnsafeCell<[u8; 8]>,
}

#[cfg(loom)]
impl Slot {
    /// A cleared slot.
    pub fn new() -> Slot {
        Slot { header: AtomicU64::new(0), payload: loom::cell::UnsafeCell::new([0; 8]) }
    }
}

#[cfg(loom)]
impl Default for Slot {
    fn default() -> Slot {
        Slot::new()
    }
}

#[cfg(not(loom))]
impl Data {
    /// The data at `base`.
    ///
    /// # Safety
    /// `capacity` bytes from `base`, which is aligned to 64, stay mapped readable (and writable for a producer) as long
    /// as any `Producer` or `Consumer` made from this lives.
    pub const unsafe fn new(base: NonNull<u8>, capacity: u64) -> Data {
        Data { base, capacity }
    }

    /// The header word at `offset`, which the caller has checked to lie at a multiple of 8 with 8 bytes before the end.
    #[inline(always)]
    pub(crate) fn header(&self, offset: u64) -> &AtomicU64 {
        debug_assert!(offset + 8 <= self.capacity && offset.is_multiple_of(8));
        // SAFETY: `new` promises the mapping; every caller keeps `offset + 8 <= capacity` and the alignment.
        unsafe { self.base.cast::<AtomicU64>().byte_add(offset as usize).as_ref() }
    }

    /// The payload at `offset`; `bytes` must fit before the end, which the caller has checked.
    #[inline(always)]
    pub(crate) fn payload(&self, offset: u64, bytes: u64) -> NonNull<u8> {
        debug_assert!(offset + bytes <= self.capacity);
        // SAFETY: as for `header`.
        unsafe { self.base.byte_add(offset as usize) }
    }

    /// Asks for cache lines, counted from the start of the data, to be made this processor's own, ahead of writing them. A hint:
    /// no bounds need hold, nothing is read or written.
    #[inline(always)]
    pub(crate) fn prefetch_to_write(&self, lines: core::ops::Range<u64>) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        for line in lines {
            let at = self.base.as_ptr().wrapping_add((64 * line) as usize);
            // SAFETY: a prefetch of any address is harmless; processors without PREFETCHW take it for a NOP.
            unsafe { core::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags, readonly)) };
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let _ = lines;
    }

    /// Copies `source` into the lane.
    #[inline(always)]
    pub(crate) fn copy_in(&self, offset: u64, source: &[u8]) {
        let to = self.payload(offset, source.len() as u64);
        // SAFETY: `payload` checked the bounds; the place is reserved, so nobody who obeys the rules reads it meanwhile,
        // and `source` is ordinary memory of ours that cannot overlap a lane's writable mapping through a shared slice.
        unsafe { copy(source.as_ptr(), to.as_ptr(), source.len()) };
    }

    /// Copies `bytes` out of the lane to `target`.
    ///
    /// # Safety
    /// `bytes` may be written at `target`, which is not in a lane.
    #[inline(always)]
    pub(crate) unsafe fn copy_out(&self, offset: u64, bytes: u64, target: *mut u8) {
        // SAFETY: `payload` says that the source is in bounds, the caller that the target is.
        unsafe { copy(self.payload(offset, bytes).as_ptr(), target, bytes as usize) };
    }
}

/// Copies without overlap. A call costs as much as a short copy: those are two loads and two stores that meet in the middle.
///
/// # Safety
/// As for `copy_nonoverlapping`.
#[cfg(not(loom))]
#[inline(always)]
unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    /// Two possibly overlapping halves of what is between one and two `T`s long.
    ///
    /// # Safety
    /// As for `copy`; `bytes` is at least the size of `T` and at most twice that.
    #[inline(always)]
    unsafe fn halves<T: Copy>(from: *const u8, to: *mut u8, bytes: usize) {
        let second = bytes - size_of::<T>();
        // SAFETY: the caller's promise; both halves lie within `bytes`.
        unsafe {
            let (low, high) = (from.cast::<T>().read_unaligned(), from.add(second).cast::<T>().read_unaligned());
            to.cast::<T>().write_unaligned(low);
            to.add(second).cast::<T>().write_unaligned(high);
        }
    }
    // SAFETY: the caller's promise, and the sizes in each arm.
    unsafe {
        match bytes {
            // One store, where halves would be two of the same: each takes a place among those that wait for their lines.
            16 => to.cast::<u128>().write_unaligned(from.cast::<u128>().read_unaligned()),
            17..=32 => halves::<u128>(from, to, bytes),
            // Not as pairs of u128, which are moved by way of the stack.
            33..=64 => {
                halves::<u128>(from, to, 32);
                halves::<u128>(from.add(bytes - 32), to.add(bytes - 32), 32);
            }
            8..=15 => halves::<u64>(from, to, bytes),
            _ => core::ptr::copy_nonoverlapping(from, to, bytes),
        }
    }
}

#[cfg(loom)]
impl Data {
    /// The slots of a loom model.
    ///
    /// # Safety
    /// `capacity / 8` slots from `base` live as long as any `Producer` or `Consumer` made from this.
    pub const unsafe fn new(base: NonNull<Slot>, capacity: u64) -> Data {
        Data { base, capacity }
    }

    fn slot(&self, offset: u64) -> &Slot {
        assert!(offset + 8 <= self.capacity && offset % 8 == 0);
        // SAFETY: `new` promises the slots; the bounds were just checked.
        unsafe { self.base.add((offset / 8) as usize).as_ref() }
    }

    pub(crate) fn header(&self, offset: u64) -> &AtomicU64 {
        &self.slot(offset).header
    }

    pub(crate) fn prefetch_to_write(&self, _lines: core::ops::Range<u64>) {}

    /// Copies `source` into the slots, so that loom sees a race with a reader.
    pub(crate) fn copy_in(&self, offset: u64, source: &[u8]) {
        for (i, chunk) in source.chunks(8).enumerate() {
            // SAFETY: loom checks that nobody else is in the cell.
            self.slot(offset + 8 * i as u64)
                .payload
                .with_mut(|p| unsafe { (&mut *p)[..chunk.len()].copy_from_slice(chunk) });
        }
    }

    /// Copies out of the slots, so that loom sees a race with the writer.
    pub(crate) fn copy_out_slots(&self, offset: u64, target: &mut [u8]) {
        for (i, chunk) in target.chunks_mut(8).enumerate() {
            // SAFETY: loom checks that nobody writes the cell.
            self.slot(offset + 8 * i as u64).payload.with(|p| unsafe { chunk.copy_from_slice(&(&*p)[..chunk.len()]) });
        }
    }
}

impl Data {
    /// Bytes of data.
    #[inline(always)]
    pub fn capacity(&self) -> u64 {
        self.capacity
    }
}
