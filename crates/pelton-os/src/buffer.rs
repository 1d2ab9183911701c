//! Memory of an operation on a file; it comes back with the operation's completion.

use std::alloc::{Layout, handle_alloc_error};
use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Memory for reading into or writing from. It moves into an `Operation` and comes back with the `Completion`: no other
/// code can access it while the kernel may.
///
/// A vector is one (all of its length, not its capacity); a slice or a text is copied into one. [`Buffer::aligned`] is
/// for files opened with `Open::direct`; [`Buffer::foreign`] is memory of another language.
pub struct Buffer(Memory);

enum Memory {
    Vector(Vec<u8>),
    Foreign(ForeignMemory),
}

impl Buffer {
    /// `bytes` zeros that begin at a page.
    pub fn aligned(bytes: usize) -> Buffer {
        let page = rustix::param::page_size();
        // Above `isize::MAX` there is no memory.
        let layout = Layout::from_size_align(bytes.max(1), page).expect("no more than half of the address space");
        let layout = layout.pad_to_align();
        // SAFETY: the size is a multiple of the alignment, which is a power of two.
        let base = unsafe { libc::aligned_alloc(page, layout.size()) }.cast::<u8>();
        if base.is_null() {
            handle_alloc_error(layout);
        }
        // SAFETY: the new allocation has at least this number of bytes.
        unsafe { base.write_bytes(0, bytes) };
        // SAFETY: no other code has the memory; any thread may free it.
        unsafe { Buffer::foreign(base, bytes, Some(libc::free), base.cast()) }
    }

    /// `bytes` of memory that other code has allocated, such as another language's runtime. After this is dropped, and
    /// the kernel and the engine do not use the memory any more, some thread calls `release` once, with `context`. A
    /// forked child never calls it, because it has no part in its parent's operations.
    ///
    /// ```
    /// use pelton::file::Buffer;
    /// use std::ffi::c_void;
    /// unsafe extern "C" fn release(context: *mut c_void) {
    ///     // SAFETY: `context` is the box that was leaked below, and `release` is called once.
    ///     drop(unsafe { Box::from_raw(context.cast::<[u8; 4096]>()) });
    /// }
    /// let memory = Box::into_raw(Box::new([0u8; 4096]));
    /// // SAFETY: no other code uses the memory until it is released.
    /// let buffer = unsafe { Buffer::foreign(memory.cast(), 4096, Some(release), memory.cast()) };
    /// assert_eq!(buffer.len(), 4096);
    /// ```
    ///
    /// # Safety
    /// Until the call of `release` (without one, as long as this lives), `base` points to `bytes` initialised bytes. No
    /// other code writes them meanwhile. Other code may read them only if this buffer is only written from. `base` may
    /// be null if `bytes` is 0. Any thread may call `release` with `context`, and `release` does not unwind.
    pub unsafe fn foreign(
        base: *mut u8,
        bytes: usize,
        release: Option<unsafe extern "C" fn(*mut c_void)>,
        context: *mut c_void,
    ) -> Buffer {
        let base = NonNull::new(base).unwrap_or(NonNull::dangling());
        Buffer(Memory::Foreign(ForeignMemory { base, bytes, release, context }))
    }

    /// The bytes as a vector: the one that it was made of, or a copy.
    pub fn into_vec(self) -> Vec<u8> {
        match self.0 {
            Memory::Vector(bytes) => bytes,
            Memory::Foreign(_) => self.to_vec(),
        }
    }
}

impl Default for Buffer {
    fn default() -> Buffer {
        Buffer(Memory::Vector(Vec::new()))
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Memory::Vector(bytes) => bytes,
            // SAFETY: the caller of `Buffer::foreign` guarantees the bytes, which no other code writes.
            Memory::Foreign(memory) => unsafe { std::slice::from_raw_parts(memory.base.as_ptr(), memory.bytes) },
        }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Memory::Vector(bytes) => bytes,
            // SAFETY: the caller of `Buffer::foreign` guarantees the bytes; the borrow is unique.
            Memory::Foreign(memory) => unsafe { std::slice::from_raw_parts_mut(memory.base.as_ptr(), memory.bytes) },
        }
    }
}

impl From<Vec<u8>> for Buffer {
    fn from(bytes: Vec<u8>) -> Buffer {
        Buffer(Memory::Vector(bytes))
    }
}

impl From<&[u8]> for Buffer {
    fn from(bytes: &[u8]) -> Buffer {
        bytes.to_vec().into()
    }
}

impl<const N: usize> From<&[u8; N]> for Buffer {
    fn from(bytes: &[u8; N]) -> Buffer {
        bytes.to_vec().into()
    }
}

impl From<&str> for Buffer {
    fn from(text: &str) -> Buffer {
        text.as_bytes().into()
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes)", self.len())
    }
}

/// Memory of other code, or of the C library.
struct ForeignMemory {
    base: NonNull<u8>,
    bytes: usize,
    release: Option<unsafe extern "C" fn(*mut c_void)>,
    context: *mut c_void,
}

// SAFETY: the caller of `Buffer::foreign` guarantees that no other code uses the memory, and that any thread may
// release it.
unsafe impl Send for ForeignMemory {}
// SAFETY: the caller of `Buffer::foreign` guarantees the memory; shared references only read it.
unsafe impl Sync for ForeignMemory {}

impl Drop for ForeignMemory {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: the caller of `Buffer::foreign` guarantees that any thread may call it; this is the only time.
            unsafe { release(self.context) };
        }
    }
}
