//! Shared memory: a memfd, mapped and sealed, or the peer's, checked and mapped.

use super::Descriptor;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

/// What a segment is for, and so who may write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Pages that only who made them may ever write.
    Control,
    /// Records. A successor of the producer writes them too.
    Data,
}

impl Kind {
    /// What the other side must find on it: its size cannot change under a mapping (no SIGBUS), and a control page has
    /// no writer but the mapping that was made before it was sealed.
    fn seals(self) -> SealFlags {
        let size = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        match self {
            Kind::Control => size | SealFlags::FUTURE_WRITE,
            Kind::Data => size,
        }
    }
}

/// A mapped memfd.
#[derive(Debug)]
pub(crate) struct Segment {
    base: NonNull<u8>,
    bytes: usize,
    fd: Descriptor,
}

// SAFETY: an address range and a descriptor; who reads and writes the range when is the lane's business.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// Makes a segment of zeros, `write`s to it, and seals it. Its memory is taken as it is touched.
    pub(crate) fn create(
        name: &str,
        kind: Kind,
        bytes: u64,
        write: impl FnOnce(NonNull<u8>),
    ) -> std::io::Result<Segment> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Hardened systems insist on the last flag; before Linux 6.3 it is unknown.
        let fd = memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL).or_else(|_| memfd_create(name, flags))?;
        ftruncate(&fd, bytes)?;
        let segment = Segment::map(fd, bytes, true)?;
        write(segment.base);
        fcntl_add_seals(&segment.fd, kind.seals())?;
        Ok(segment)
    }

    /// Maps a segment that came from the peer, after checking that it is what it must be.
    ///
    /// # Errors
    /// `InvalidData` with what was found and wanted; otherwise the system's error.
    pub(crate) fn open(fd: OwnedFd, what: &str, kind: Kind, bytes: u64, writable: bool) -> std::io::Result<Segment> {
        let refuse = |text: String| std::io::Error::new(std::io::ErrorKind::InvalidData, text);
        // Only a memfd has seals: anything else, a file, a pipe, a device, fails here.
        let Ok(seals) = fcntl_get_seals(&fd) else {
            return Err(refuse(format!("the peer's {what} segment is not a memfd")));
        };
        if !seals.contains(kind.seals()) {
            return Err(refuse(format!("the peer's {what} segment has seals {seals:?}, wanted {:?}", kind.seals())));
        }
        if writable && seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
            return Err(refuse(format!("the peer's {what} segment has seals {seals:?} and cannot be written")));
        }
        let found = fstat(&fd)?.st_size as u64;
        if found != bytes {
            return Err(refuse(format!("the peer's {what} segment has {found} bytes, wanted {bytes}")));
        }
        Segment::map(fd, bytes, writable)
    }

    fn map(fd: OwnedFd, bytes: u64, writable: bool) -> std::io::Result<Segment> {
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        let bytes = usize::try_from(bytes).map_err(|_| rustix::io::Errno::NOMEM)?;
        // SAFETY: a new mapping at an address of the kernel's choice; the size was just set or checked, and sealed.
        let base = unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, &fd, 0)? };
        let base = NonNull::new(base.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Segment { base, bytes, fd: Descriptor::new(fd)? })
    }

    /// The first byte.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes mapped.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Gives the pages that lie wholly in the range back to the system; they read as zeros afterwards.
    pub(crate) fn punch(&self, offset: u64, bytes: u64) -> std::io::Result<()> {
        let page = rustix::param::page_size() as u64;
        let (from, to) = (offset.next_multiple_of(page), (offset + bytes) / page * page);
        if from < to {
            use rustix::fs::{FallocateFlags, fallocate};
            fallocate(&self.fd, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, from, to - from)?;
        }
        Ok(())
    }
}

impl AsFd for Segment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: mapped in `map`, unmapped once, here; the handles keep their segments as long as their lanes.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
