//! Fault injection for tests, in builds with `failpoints`. Three kinds of steps ask here whether to fail, or to move
//! less: each system call of a transfer or a copy; each entry of the ring; the start of each other operation in a
//! thread. Other builds never inject a fault.

use rustix::io::Errno;

/// The fault of a call.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "_failpoints"), expect(dead_code, reason = "injected by tests"))]
pub enum Fault {
    /// The call fails.
    Error(Errno),
    /// The call moves at most so many bytes.
    Short(usize),
}

/// Called at each step.
#[cfg(feature = "_failpoints")]
pub type Hook = fn() -> Option<Fault>;

#[cfg(feature = "_failpoints")]
static HOOK: std::sync::RwLock<Option<Hook>> = std::sync::RwLock::new(None);

/// Installs `hook` for all threads.
#[cfg(feature = "_failpoints")]
pub fn set(hook: Hook) {
    *HOOK.write().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(hook);
}

impl Fault {
    /// For calls without a retry: an error other than EINTR and EAGAIN.
    #[inline(always)]
    pub(crate) fn error() -> Option<Errno> {
        match Fault::next() {
            Some(Fault::Error(errno)) if ![Errno::INTR, Errno::AGAIN].contains(&errno) => Some(errno),
            _ => None,
        }
    }

    #[cfg(feature = "_failpoints")]
    pub(crate) fn next() -> Option<Fault> {
        HOOK.read().unwrap_or_else(std::sync::PoisonError::into_inner).and_then(|hook| hook())
    }

    #[cfg(not(feature = "_failpoints"))]
    #[inline(always)]
    pub(crate) fn next() -> Option<Fault> {
        None
    }
}
