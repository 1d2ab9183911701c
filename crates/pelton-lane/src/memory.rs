//! The memory of a lane as both sides see it: three pages and the data. Only this file turns offsets into addresses.

use crate::edges::AtomicU64;
use crate::layout::{ConsumerPage, ProducerPage, ReceiverPage};
use core::ptr::NonNull;

/// The pages and the data of one lane. The caller maps them.
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
    base: NonNull<LoomWord>,
    capacity: u64,
}

/// Eight bytes under loom: one location, accessed as a header or as payload.
#[cfg(loom)]
#[derive(Debug)]
pub struct LoomWord {
    header: AtomicU64,
    payload: loom::cell::UnsafeCell<[u8; 8]>,
}

#[cfg(loom)]
impl LoomWord {
    /// A cleared word.
    pub fn new() -> LoomWord {
        LoomWord { header: AtomicU64::new(0), payload: loom::cell::UnsafeCell::new([0; 8]) }
    }
}

#[cfg(loom)]
impl Default for LoomWord {
    fn default() -> LoomWord {
        LoomWord::new()
    }
}

#[cfg(not(loom))]
impl Data {
    /// The data at `base`.
    ///
    /// # Safety
    /// `base` is aligned to 64. The `capacity` bytes from there stay mapped readable (and writable for a producer) as
    /// long as any `Producer` or `Consumer` that uses them lives.
    pub const unsafe fn new(base: NonNull<u8>, capacity: u64) -> Data {
        Data { base, capacity }
    }

    /// The header word at `offset`. The caller has checked that it is a multiple of 8 with 8 bytes before the end.
    #[inline(always)]
    pub(crate) fn header(&self, offset: u64) -> &AtomicU64 {
        debug_assert!(offset + 8 <= self.capacity && offset.is_multiple_of(8));
        // SAFETY: `new`'s caller guarantees the mapping; each caller of this checks `offset + 8 <= capacity` and the
        // alignment.
        unsafe { self.base.cast::<AtomicU64>().byte_add(offset as usize).as_ref() }
    }

    /// The payload at `offset`. The caller has checked that `bytes` fit before the end.
    #[inline(always)]
    pub(crate) fn payload(&self, offset: u64, bytes: u64) -> NonNull<u8> {
        debug_assert!(offset + bytes <= self.capacity);
        // SAFETY: `new`'s caller guarantees the mapping; each caller of this checks `offset + bytes <= capacity`.
        unsafe { self.base.byte_add(offset as usize) }
    }

    /// Prefetches for writing the cache line at `from`, and those at each 64 bytes after it up to `to`. A hint that
    /// needs no bounds check: it neither reads nor writes memory.
    #[inline(always)]
    pub(crate) fn prefetch_to_write(&self, from: u64, to: u64) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            let (mut at, to) =
                (self.base.as_ptr().wrapping_add(from as usize), self.base.as_ptr().wrapping_add(to as usize));
            loop {
                // SAFETY: the processor ignores a prefetch of an invalid address, and one without PREFETCHW executes a
                // NOP.
                unsafe { core::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags, readonly)) };
                at = at.wrapping_add(64);
                if at > to {
                    break;
                }
            }
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let _ = (from, to);
    }

    /// Prefetches the cache line at `offset` for reading. A hint, as above: `offset` may lie past the end.
    #[inline(always)]
    pub(crate) fn prefetch_to_read(&self, offset: u64) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: the processor ignores a prefetch of an invalid address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.base.as_ptr().wrapping_add(offset as usize).cast()) };
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let _ = offset;
    }

    /// Copies `source` into the lane.
    #[inline(always)]
    pub(crate) fn copy_in(&self, offset: u64, source: &[u8]) {
        let to = self.payload(offset, source.len() as u64);
        // SAFETY: the caller has checked the bounds. The space is reserved, so a consumer that obeys the rules does not
        // read it. `source` is a shared slice, so it does not overlap the writable mapping.
        unsafe { copy(source.as_ptr(), to.as_ptr(), source.len()) };
    }

    /// Copies `bytes` out of the lane to `target`.
    ///
    /// # Safety
    /// `target` has space for `bytes`, and is not in a lane.
    #[inline(always)]
    pub(crate) unsafe fn copy_out(&self, offset: u64, bytes: u64, target: *mut u8) {
        // SAFETY: the caller has checked the source's bounds, and guarantees the target.
        unsafe { copy(self.payload(offset, bytes).as_ptr(), target, bytes as usize) };
    }
}

/// Bytes up to which a message is copied without a call of `memcpy`.
#[cfg(not(loom))]
pub const COPY_INLINE_MAX: usize = 64;

/// Copies without overlap. A call to `memcpy` costs as much as a short copy. So a short copy is two loads and two
/// stores that overlap in the middle. A long one avoids a slow case of `rep movsb`.
///
/// # Safety
/// As for `copy_nonoverlapping`.
#[cfg(not(loom))]
#[inline(always)]
pub unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    /// Copies `bytes` as two halves of type `T`, which may overlap.
    ///
    /// # Safety
    /// As for `copy`; `bytes` is at least the size of `T` and at most twice that.
    #[inline(always)]
    unsafe fn halves<T: Copy>(from: *const u8, to: *mut u8, bytes: usize) {
        let second = bytes - size_of::<T>();
        // SAFETY: the caller guarantees both buffers and the size; both halves lie within `bytes`.
        unsafe {
            let (low, high) = (from.cast::<T>().read_unaligned(), from.add(second).cast::<T>().read_unaligned());
            to.cast::<T>().write_unaligned(low);
            to.add(second).cast::<T>().write_unaligned(high);
        }
    }
    // SAFETY: the caller guarantees both buffers; each arm matches only sizes that `halves` accepts.
    unsafe {
        // Comparisons, not a `match`: the compiler would first compare with the single values 0 and 1.
        if bytes == 16 {
            // One store: two halves would be two equal stores, and each occupies a slot of the store buffer.
            to.cast::<u128>().write_unaligned(from.cast::<u128>().read_unaligned());
        } else if (17..=32).contains(&bytes) {
            halves::<u128>(from, to, bytes);
        } else if (33..=COPY_INLINE_MAX).contains(&bytes) {
            // Not as pairs of u128: the compiler moves those through the stack.
            halves::<u128>(from, to, 32);
            halves::<u128>(from.add(bytes - 32), to.add(bytes - 32), 32);
        } else if (8..=15).contains(&bytes) {
            halves::<u64>(from, to, bytes);
        } else if bytes > COPY_INLINE_MAX {
            if is_by_pieces(from, to, bytes) {
                copy_pieces(from, to, bytes);
            } else {
                core::ptr::copy_nonoverlapping(from, to, bytes);
            }
        } else if bytes >= 4 {
            halves::<u32>(from, to, bytes);
        } else if bytes > 0 {
            let [low, middle, high] = [0, bytes / 2, bytes - 1].map(|at| from.add(at).read());
            to.write(low);
            to.add(bytes / 2).write(middle);
            to.add(bytes - 1).write(high);
        }
    }
}

/// glibc copies with `rep movsb` from 2,112 bytes on, and on AMD up to the size of the second-level cache, which is
/// rarely above this limit.
#[cfg(not(loom))]
const PIECE: usize = 2048;
#[cfg(not(loom))]
const REP_MOVSB_MAX: usize = 1 << 20;

/// Whether to avoid `rep movsb`. On AMD's Zen 3 it takes some 17 times as long if the target is 1 to 31 bytes above the
/// source, modulo 4096. That is usual: a message at the front of a lap is 8 bytes after a page's start, a request 32,
/// and a large buffer of `malloc` 16 (docs/decisions/0053-slow-rep-movsb.md).
#[cfg(not(loom))]
#[inline(always)]
fn is_by_pieces(from: *const u8, to: *mut u8, bytes: usize) -> bool {
    cfg!(target_arch = "x86_64")
        && bytes > PIECE
        && bytes <= REP_MOVSB_MAX
        && (1..32).contains(&(to.addr().wrapping_sub(from.addr()) % 4096))
}

/// Copies by pieces that are too short for `rep movsb`.
///
/// # Safety
/// As for `copy_nonoverlapping`.
#[cfg(not(loom))]
#[inline(never)]
unsafe fn copy_pieces(from: *const u8, to: *mut u8, bytes: usize) {
    for at in (0..bytes).step_by(PIECE) {
        // SAFETY: the caller guarantees both buffers, and each piece lies within `bytes`.
        unsafe { core::ptr::copy_nonoverlapping(from.add(at), to.add(at), PIECE.min(bytes - at)) };
    }
}

/// Appends `bytes` to `target` by [`copy`].
#[cfg(not(loom))]
pub fn append(bytes: &[u8], target: &mut alloc::vec::Vec<u8>) {
    let before = target.len();
    target.reserve(bytes.len());
    // SAFETY: `reserve` has made the space, which no other slice overlaps; the copy initialises it.
    unsafe {
        copy(bytes.as_ptr(), target.as_mut_ptr().add(before), bytes.len());
        target.set_len(before + bytes.len());
    }
}

#[cfg(loom)]
impl Data {
    /// The words of a loom model.
    ///
    /// # Safety
    /// `capacity / 8` words from `base` live as long as any `Producer` or `Consumer` that uses them.
    pub const unsafe fn new(base: NonNull<LoomWord>, capacity: u64) -> Data {
        Data { base, capacity }
    }

    fn word(&self, offset: u64) -> &LoomWord {
        assert!(offset + 8 <= self.capacity && offset % 8 == 0);
        // SAFETY: `new`'s caller guarantees the words; the assertion checks the bounds.
        unsafe { self.base.add((offset / 8) as usize).as_ref() }
    }

    pub(crate) fn header(&self, offset: u64) -> &AtomicU64 {
        &self.word(offset).header
    }

    pub(crate) fn prefetch_to_write(&self, _from: u64, _to: u64) {}

    pub(crate) fn prefetch_to_read(&self, _offset: u64) {}

    /// Copies `source` into the words, so loom detects a race with a reader.
    pub(crate) fn copy_in(&self, offset: u64, source: &[u8]) {
        for (i, chunk) in source.chunks(8).enumerate() {
            // SAFETY: loom checks that no other thread accesses the cell.
            self.word(offset + 8 * i as u64)
                .payload
                .with_mut(|p| unsafe { (&mut *p)[..chunk.len()].copy_from_slice(chunk) });
        }
    }

    /// Copies out of the words, so loom detects a race with the writer.
    pub(crate) fn copy_out_words(&self, offset: u64, target: &mut [u8]) {
        for (i, chunk) in target.chunks_mut(8).enumerate() {
            // SAFETY: loom checks that no other thread writes the cell.
            self.word(offset + 8 * i as u64).payload.with(|p| unsafe { chunk.copy_from_slice(&(&*p)[..chunk.len()]) });
        }
    }
}

/// Copies as many whole blocks of 64 bytes as there are, where another side may write them at the same time or read
/// them. The compiler knows nothing of these accesses, so it assumes no more of them than of atomic ones of single
/// bytes. Word by word, a copy of 256 bytes would take twice as many slots of the store buffer. Returns how many bytes
/// it copied.
///
/// # Safety
/// Both addresses have `bytes` valid bytes, which do not overlap.
#[cfg(all(target_arch = "x86_64", target_feature = "sse2", not(miri), not(loom)))]
unsafe fn copy_blocks_racing(from: *const u8, to: *mut u8, bytes: usize) -> usize {
    let blocks = bytes / 64;
    if blocks > 0 {
        // SAFETY: the caller guarantees both buffers, and the loop ends after the last whole block.
        unsafe {
            core::arch::asm!(
                "2:",
                "movups {a}, [{from}]",
                "movups {b}, [{from} + 16]",
                "movups {c}, [{from} + 32]",
                "movups {d}, [{from} + 48]",
                "movups [{to}], {a}",
                "movups [{to} + 16], {b}",
                "movups [{to} + 32], {c}",
                "movups [{to} + 48], {d}",
                "add {from}, 64",
                "add {to}, 64",
                "dec {blocks}",
                "jnz 2b",
                from = inout(reg) from => _,
                to = inout(reg) to => _,
                blocks = inout(reg) blocks => _,
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                c = out(xmm_reg) _,
                d = out(xmm_reg) _,
                options(nostack)
            );
        }
    }
    64 * blocks
}

/// Copies that another side may race with: blocks where the processor allows that, otherwise whole words, each by one
/// atomic access. A broadcast lane uses them for consumers that may lag. The offset is a multiple of 8, and the padding
/// behind a payload belongs to its record.
impl Data {
    /// Copies `source` into the lane, and zeros into the rest of its last word.
    pub(crate) fn copy_in_racing(&self, offset: u64, source: &[u8]) {
        #[cfg(all(target_arch = "x86_64", target_feature = "sse2", not(miri), not(loom)))]
        // SAFETY: the caller has checked the bounds. `source` is a shared slice, so it is not in the writable mapping.
        let done = unsafe {
            let to = self.payload(offset, source.len() as u64);
            copy_blocks_racing(source.as_ptr(), to.as_ptr(), source.len())
        };
        #[cfg(not(all(target_arch = "x86_64", target_feature = "sse2", not(miri), not(loom))))]
        let done = 0;
        for (i, chunk) in source[done..].chunks(8).enumerate() {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            // Relaxed: the record's header publishes it [publish]; `kept` guards a consumer that lags [keep].
            let word = u64::from_le_bytes(bytes);
            self.header(offset + (done + 8 * i) as u64).store(word, core::sync::atomic::Ordering::Relaxed);
        }
    }

    /// Replaces the content of `target` by `bytes` bytes of the lane. The caller has checked that they fit.
    pub(crate) fn copy_out_racing(&self, offset: u64, bytes: u64, target: &mut alloc::vec::Vec<u8>) {
        target.clear();
        target.reserve((bytes as usize).next_multiple_of(8));
        #[cfg(all(target_arch = "x86_64", target_feature = "sse2", not(miri), not(loom)))]
        // SAFETY: the caller has checked the bounds, and `reserve` has made the space, which is in no lane.
        unsafe {
            let from = self.payload(offset, bytes);
            let done = copy_blocks_racing(from.as_ptr(), target.as_mut_ptr(), bytes as usize);
            target.set_len(done);
        }
        for at in (offset + target.len() as u64..offset + bytes).step_by(8) {
            // Relaxed: as above.
            let word = self.header(at).load(core::sync::atomic::Ordering::Relaxed);
            target.extend_from_slice(&word.to_le_bytes());
        }
        target.truncate(bytes as usize);
    }
}

impl Data {
    /// Bytes of data.
    #[inline(always)]
    pub fn capacity(&self) -> u64 {
        self.capacity
    }
}

/// The address of a field of a shared page.
///
/// # Safety
/// `page` is mapped, and `pick` returns an address inside it.
pub(crate) unsafe fn field<P, F>(page: NonNull<P>, pick: impl FnOnce(*mut P) -> *mut F) -> NonNull<F> {
    // SAFETY: the caller guarantees that `pick` returns an address inside the page, which is not null.
    unsafe { NonNull::new_unchecked(pick(page.as_ptr())) }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{COPY_INLINE_MAX, PIECE, REP_MOVSB_MAX, append, copy, is_by_pieces};

    const PAGE: usize = 4096;
    /// Longer copies use `rep movsb`.
    const _: () = assert!(PIECE < 2112);

    /// Distances of the two buffers, modulo a page, around those with a slow `rep movsb`; sizes around each limit.
    #[test]
    fn a_copy_is_exact_at_all_distances_of_the_buffers() {
        let sizes = [0, 1, COPY_INLINE_MAX, COPY_INLINE_MAX + 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE + 7];
        let source: Vec<u8> = (0..4 * PAGE).map(|i| (i % 251) as u8).collect();
        let mut target = vec![0; 6 * PAGE];
        for distance in (0..40).chain(PAGE - 40..PAGE) {
            for bytes in sizes {
                // The first place in the target at that distance, after at least 8 bytes that stay.
                let at = 8 + (source.as_ptr().addr() + distance).wrapping_sub(target.as_ptr().addr() + 8) % PAGE;
                target.fill(0xee);
                // SAFETY: both vectors have so many bytes at these places.
                unsafe { copy(source.as_ptr(), target.as_mut_ptr().add(at), bytes) };
                assert!(target[at..at + bytes] == source[..bytes], "{bytes} bytes at a distance of {distance}");
                assert!(target[..at].iter().chain(&target[at + bytes..]).all(|byte| *byte == 0xee), "{bytes} bytes");
            }
        }
    }

    /// Nothing reads or writes these addresses.
    #[test]
    fn only_a_long_copy_to_a_little_above_its_source_is_by_pieces() {
        let is = |distance: usize, bytes| {
            let from = 3 * PAGE + 8;
            is_by_pieces(std::ptr::without_provenance(from), std::ptr::without_provenance_mut(from + distance), bytes)
        };
        for distance in 0..PAGE {
            let is_slow = cfg!(target_arch = "x86_64") && (1..=31).contains(&distance);
            for bytes in [PIECE + 1, REP_MOVSB_MAX] {
                assert_eq!(is(distance, bytes), is_slow, "{bytes} bytes at a distance of {distance}");
                assert_eq!(is(7 * PAGE + distance, bytes), is_slow);
            }
            assert!(!is(distance, PIECE) && !is(distance, REP_MOVSB_MAX + 1), "at a distance of {distance}");
        }
    }

    #[test]
    fn appended_bytes_follow_the_others() {
        let mut all = b"one".to_vec();
        append(b" two", &mut all);
        append(b"", &mut all);
        append(&[b'3'; 5000], &mut all);
        assert!(all.starts_with(b"one two333") && all.len() == 5007 && all[7..].iter().all(|byte| *byte == b'3'));
    }
}
