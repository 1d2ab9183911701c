//! Shared memory: a memfd, mapped and sealed, or the peer's, checked and mapped; or a mapped file.

use crate::descriptor::Descriptor;
use crate::received_fd::ReceivedFd;
use pelton_lane::failpoint;
use rustix::fs::{
    AtFlags, FallocateFlags, MemfdFlags, SealFlags, SeekFrom, StatxFlags, fallocate, fcntl_add_seals, fcntl_get_seals,
    fstat, fstatfs, ftruncate, memfd_create, seek, statx,
};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::cell::UnsafeCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

/// The type of file systems in memory, memfds' too.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// The purpose of a segment, which determines its writers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Pages, or a broadcast lane's records, that only their creator may ever write.
    Control,
    /// Records. A successor of the producer writes them too.
    Data,
}

impl Kind {
    /// The seals that the other side requires. The size cannot change under a mapping (no SIGBUS). Only the mapping
    /// from before the seals can write a control page.
    fn seals(self) -> SealFlags {
        let size = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        match self {
            Kind::Control => size | SealFlags::FUTURE_WRITE,
            Kind::Data => size,
        }
    }
}

/// A mapped memfd, or file.
#[derive(Debug)]
pub struct Segment {
    base: NonNull<u8>,
    bytes: usize,
    fd: Option<Descriptor>,
    /// From the descriptor, while it was open.
    identity: [u64; 2],
}

// SAFETY: a segment is an address range and a descriptor, neither tied to a thread. The lane's protocol determines
// which thread accesses the range.
unsafe impl Send for Segment {}
// SAFETY: a shared reference returns only addresses, and the lane's protocol orders the accesses to them.
unsafe impl Sync for Segment {}

impl Segment {
    /// Creates a segment of zeros, `write`s to it, and seals it. Memory is allocated as it is used.
    pub fn create(name: &str, kind: Kind, bytes: u64, write: impl FnOnce(NonNull<u8>)) -> std::io::Result<Segment> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Hardened systems require the last flag; before Linux 6.3 it is unknown.
        let fd = memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL).or_else(|_| memfd_create(name, flags))?;
        failpoint("segment: made");
        check_file_size(bytes)?;
        ftruncate(&fd, bytes)?;
        failpoint("segment: size");
        let segment = Segment::map(fd, bytes, true)?;
        write(segment.base);
        failpoint("segment: written");
        fcntl_add_seals(&segment, kind.seals())?;
        failpoint("segment: sealed");
        Ok(segment)
    }

    /// Maps a segment that came from the peer, after all checks.
    ///
    /// # Errors
    /// `InvalidData` with what was found and wanted; otherwise the system's error.
    pub fn open(fd: ReceivedFd, what: &str, kind: Kind, bytes: u64, writable: bool) -> std::io::Result<Segment> {
        let refuse = |text: String| std::io::Error::new(std::io::ErrorKind::InvalidData, text);
        // Only a memfd has seals: a file, a pipe or a device fails here. This check is the first, because it makes no
        // request to a file system, as `fstat` does: a file server may not reply.
        let Ok(seals) = fcntl_get_seals(&fd) else {
            return Err(refuse(format!("the peer's {what} segment is not a memfd")));
        };
        if !seals.contains(kind.seals()) {
            return Err(refuse(format!("the peer's {what} segment has seals {seals:?}, wanted {:?}", kind.seals())));
        }
        if writable && seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
            return Err(refuse(format!("the peer's {what} segment has seals {seals:?} and cannot be written")));
        }
        // Not hugetlbfs, whose pages a peer can remove for good.
        let system = fstatfs(&fd)?.f_type as i64;
        if system != TMPFS_MAGIC {
            return Err(refuse(format!("the peer's {what} segment is of file system {system:#x}, wanted tmpfs")));
        }
        let found = fstat(&fd)?.st_size as u64;
        if found != bytes {
            return Err(refuse(format!("the peer's {what} segment has {found} bytes, wanted {bytes}")));
        }
        // If there is no memory for the smallest lane, this side lacks it; the size of a larger one was the peer's
        // choice.
        let too_large = bytes > pelton_lane::SEGMENT_BYTES;
        Segment::map(fd.into_owned(), bytes, writable).map_err(|error| match error.kind() {
            std::io::ErrorKind::OutOfMemory if !too_large => error,
            std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::OutOfMemory => {
                refuse(format!("the peer's {what} segment of {bytes} bytes cannot be mapped: {error}"))
            }
            _ => error,
        })
    }

    /// Maps a regular file whose owner and permissions have been checked. A file has no seals: a process that may write
    /// it can also truncate it under the mapping, and is trusted not to.
    ///
    /// # Errors
    /// `InvalidData` with what was found and wanted; otherwise the system's error.
    pub fn open_file(fd: OwnedFd, what: &str, bytes: u64, writable: bool) -> std::io::Result<Segment> {
        let refuse = |text: String| std::io::Error::new(std::io::ErrorKind::InvalidData, text);
        let found = fstat(&fd)?;
        if found.st_mode & libc::S_IFMT != libc::S_IFREG {
            return Err(refuse(format!("{what} is not a regular file")));
        }
        if found.st_size as u64 != bytes {
            return Err(refuse(format!("{what} has {} bytes, wanted {bytes}", found.st_size)));
        }
        Segment::map(fd, bytes, writable)
    }

    fn map(fd: OwnedFd, bytes: u64, writable: bool) -> std::io::Result<Segment> {
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        let bytes = usize::try_from(bytes).map_err(|_| Errno::NOMEM)?;
        // First: a mapping without an owner would stay.
        let fd = Descriptor::new(fd)?;
        // SAFETY: a new mapping at an address of the kernel's choice; the size was just set or checked.
        let base = unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, &fd, 0)? };
        let base = NonNull::<u8>::new(base.cast()).ok_or(Errno::NOMEM)?;
        // A core dump would allocate the memory of the whole lane and write it, which delays the detection of this
        // process's death.
        if bytes as u64 > pelton_lane::SEGMENT_BYTES {
            // SAFETY: the new mapping; only the content of a core dump changes. Where the system refuses, it contains
            // the lane.
            let _ = unsafe { madvise(base.as_ptr().cast(), bytes, Advice::LinuxDontDump) };
        }
        Ok(Segment { base, bytes, fd: Some(fd), identity: [0; 2] })
    }

    /// Keeps only the mapping, which needs no descriptor for reads and writes.
    pub fn without_descriptor(mut self) -> Segment {
        self.forget_descriptor();
        self
    }

    /// Keeps only the mapping.
    pub fn forget_descriptor(&mut self) {
        self.identity = self.identity();
        self.fd = None;
    }

    /// The first byte.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes mapped.
    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// A word that another process may store, and that is not part of the lane.
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.bytes);
        // SAFETY: inside the mapping, which lives as long as `self`, and aligned: a mapping begins at a page.
        unsafe { &*self.base.as_ptr().add(offset).cast() }
    }

    /// Two words that no other segment has: its file and its creation time. Zeros if the system does not report them.
    pub fn identity(&self) -> [u64; 2] {
        let Some(fd) = &self.fd else { return self.identity };
        let wanted = StatxFlags::INO | StatxFlags::BTIME;
        // Without the time, the next file with this inode could be mistaken for it.
        let found = statx(fd, c"", AtFlags::EMPTY_PATH, wanted)
            .ok()
            .filter(|found| found.stx_mask & wanted.bits() == wanted.bits());
        found.map_or([0; 2], |found| {
            let device = u64::from(found.stx_dev_major) << 32 | u64::from(found.stx_dev_minor);
            let made = found.stx_btime;
            [found.stx_ino ^ device.rotate_left(48), made.tv_sec as u64 * 1_000_000_000 + u64::from(made.tv_nsec)]
        })
    }

    /// The number of its file; 0 without a descriptor.
    pub fn inode(&self) -> u64 {
        self.fd.as_ref().and_then(|fd| fstat(fd).ok()).map_or(0, |found| found.st_ino)
    }

    /// Backs a range of a file with memory, or blocks of the disk, so that writing there cannot fail.
    pub fn allocate(&self, from: u64, to: u64) -> std::io::Result<()> {
        debug_assert!(to <= self.bytes(), "the file would grow");
        allocate(self, from, to)
    }

    /// Waits until everything that was written to the file is on its disk.
    pub fn sync(&self) -> std::io::Result<()> {
        Ok(crate::syncer::sync(self)?)
    }

    /// Bytes of memory, or disk, that it takes.
    pub fn allocated_bytes(&self) -> std::io::Result<u64> {
        Ok(fstat(self)?.st_blocks as u64 * 512)
    }

    /// Copies a range to the same place in `other`, which is new: all zeros, and of this size. Omits pages of zeros.
    ///
    /// Reads by the descriptor: a load from the mapping would allocate memory for each hole of this segment.
    /// `SEEK_DATA` would find the holes, but waits for a lock of the file, which a peer can hold for ever (by a `write`
    /// from memory of a file server that does not reply).
    pub fn copy_to(&self, other: &Segment, mut from: u64, to: u64) -> std::io::Result<()> {
        let mut buffer = vec![0; PIECE as usize];
        while from < to {
            // The next piece ends at a multiple of its size, so the pieces of zeros below are pages.
            let bytes = (to - from).min(PIECE - from % PIECE) as usize;
            let read = rustix::io::retry_on_intr(|| rustix::io::pread(self, &mut buffer[..bytes], from))?;
            if read == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            let mut rest = &buffer[..read];
            while !rest.is_empty() {
                let (page, after) = rest.split_at(rest.len().min((4096 - from % 4096) as usize));
                if page.iter().any(|byte| *byte != 0) {
                    write_at(other.as_fd(), page, from)?;
                }
                (rest, from) = (after, from + page.len() as u64);
            }
        }
        Ok(())
    }

    /// Releases the pages that lie wholly in the range; they read as zeros afterwards.
    pub fn punch(&self, offset: u64, bytes: u64) -> std::io::Result<()> {
        let (from, to) = whole_pages(offset, bytes, rustix::param::page_size() as u64);
        if from >= to {
            return Ok(());
        }
        match &self.fd {
            Some(fd) => fallocate(fd, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, from, to - from)?,
            None => {
                assert!(to <= self.bytes());
                let base = self.base.as_ptr().wrapping_add(from as usize);
                // SAFETY: inside the mapping. Both sides accept any bytes in a lane's memory, also zeros.
                unsafe { madvise(base.cast(), (to - from) as usize, Advice::LinuxRemove)? };
            }
        }
        Ok(())
    }
}

/// The first byte of the first page that lies wholly in the range, and the byte after the last one. The range has no
/// such page if the second is not greater.
fn whole_pages(offset: u64, bytes: u64, page: u64) -> (u64, u64) {
    (offset.next_multiple_of(page), (offset + bytes) / page * page)
}

/// Whether this process may write a file up to `bytes`. Checked before, because the kernel would send a signal that
/// ends the process.
pub fn check_file_size(bytes: u64) -> rustix::io::Result<()> {
    use rustix::process::{Resource, getrlimit};
    match getrlimit(Resource::Fsize).current {
        Some(most) if most < bytes => Err(Errno::FBIG),
        _ => Ok(()),
    }
}

/// As [`Segment::allocate`], of a file that is not mapped.
pub fn allocate(fd: impl AsFd, from: u64, to: u64) -> std::io::Result<()> {
    match fstatfs(&fd)?.f_type as i64 {
        TMPFS_MAGIC => allocate_memory(fd.as_fd(), from, to),
        _ => Ok(write_holes(fd.as_fd(), from, to)?),
    }
}

fn allocate_memory(fd: BorrowedFd<'_>, mut from: u64, to: u64) -> std::io::Result<()> {
    let mut piece = to.saturating_sub(from);
    while from < to {
        match fallocate(fd, FallocateFlags::empty(), from, piece.min(to - from)) {
            Ok(()) => from += piece,
            // A signal makes tmpfs release what it had allocated, and report that. Where the next signal comes before
            // as much is allocated again, smaller pieces succeed. Not at first: if a single piece fails as a whole,
            // nothing is left of it.
            Err(Errno::INTR) => piece = (piece / 2).next_multiple_of(4096),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Files are allocated in whole pieces of this size, where they are long enough: the kernel keeps their pages together,
/// in about this number, and a store to one of them needs a place on the disk for all.
pub const PIECE: u64 = 64 << 10;

/// Zeros, in an `UnsafeCell` so that they are in `.bss`; a constant has its bytes in the file of each program.
struct Zeros(UnsafeCell<[u8; PIECE as usize]>);
// SAFETY: nobody writes to it.
unsafe impl Sync for Zeros {}
static ZEROS: Zeros = Zeros(UnsafeCell::new([0; PIECE as usize]));

/// Writes zeros wherever nothing has been written. On a disk `fallocate` is not enough: the first store to each
/// allocated page makes a new entry in the file's map. A full disk may have no place for that, which is a SIGBUS
/// (ext4).
fn write_holes(fd: BorrowedFd<'_>, mut from: u64, to: u64) -> rustix::io::Result<()> {
    // SAFETY: nobody writes to it.
    let zeros = unsafe { &*ZEROS.0.get() };
    while from < to {
        // A hole in the file's map, not one of pages in memory: a page that was only read is still a hole.
        let hole = seek(fd, SeekFrom::Hole(from))?;
        let end = match seek(fd, SeekFrom::Data(hole)) {
            Err(Errno::NXIO) => to,
            data => data?.min(to),
        };
        from = hole;
        while from < end {
            let next = end.min((from / PIECE + 1) * PIECE);
            write_at(fd, &zeros[..(next - from) as usize], from)?;
            from = next;
        }
    }
    Ok(())
}

/// Whether [`allocate`] can determine what to allocate of this file, to which nothing has been written.
pub fn can_allocate(fd: impl AsFd) -> bool {
    seek(fd, SeekFrom::Hole(0)) == Ok(0)
}

/// Writes all of it. Not by a mapping: then it has its place on the disk.
pub fn write_at(fd: BorrowedFd<'_>, mut bytes: &[u8], mut offset: u64) -> rustix::io::Result<()> {
    check_file_size(offset + bytes.len() as u64)?;
    while !bytes.is_empty() {
        let written = rustix::io::retry_on_intr(|| rustix::io::pwrite(fd, bytes, offset))?;
        bytes = &bytes[written..];
        offset += written as u64;
    }
    Ok(())
}

impl AsFd for Segment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("a segment to send, sync or allocate keeps its descriptor").as_fd()
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: mapped in `map`, unmapped once, here; the handles keep their segments as long as their lanes.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// The lane's view of four segments.
pub fn lane_memory(page: &Segment, consumer: &Segment, receiver: &Segment, data: &Segment) -> pelton_lane::Memory {
    pelton_lane::Memory {
        producer: page.base().cast(),
        consumer: consumer.base().cast(),
        receiver: receiver.base().cast(),
        // SAFETY: the segment's mapping is as long as its size, page-aligned, and kept by the owner of the lane.
        data: unsafe { pelton_lane::Data::new(data.base(), data.bytes()) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pages_without_a_byte_outside_the_range_are_released_whatever_their_size() {
        for page in [4 << 10, 16 << 10, 64 << 10] {
            // A lane of the smallest capacity may be less than one page.
            for (offset, bytes) in
                [(0, 4096), (64, 3 * page - 64), (page - 64, page + 128), (4096, 1 << 20), (page, page)]
            {
                let (from, to) = whole_pages(offset, bytes, page);
                assert!(from.is_multiple_of(page) && to.is_multiple_of(page));
                assert!(offset <= from && to <= offset + bytes, "{offset} {bytes}: {from} to {to}");
                // No further page before or behind them is whole.
                assert!(from - offset < page && offset + bytes - to < page, "{offset} {bytes}: {from} to {to}");
            }
            // What is backed, released and copied in pieces of this size never splits a page.
            assert!(PIECE.is_multiple_of(page) && pelton_lane::SEGMENT_BYTES.is_multiple_of(page));
            assert!(pelton_lane::WINDOW.is_multiple_of(page));
        }
    }

    #[test]
    fn the_memory_of_a_lane_is_in_no_core_dump_and_a_control_segment_is() {
        for (kind, bytes, is_left_out) in
            [(Kind::Data, 1 << 20, true), (Kind::Control, pelton_lane::SEGMENT_BYTES, false)]
        {
            let segment = Segment::create("pelton-test", kind, bytes, |_| ()).unwrap();
            let begins = format!("{:x}-", segment.base().as_ptr() as usize);
            let mappings = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let mut lines = mappings.lines().skip_while(|line| !line.starts_with(&begins));
            let flags = lines.find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
            assert_eq!(flags.split(' ').any(|flag| flag == "dd"), is_left_out, "{flags}");
        }
    }
}
