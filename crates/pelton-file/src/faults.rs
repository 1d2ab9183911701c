//! Faults that tests have the system make, in builds with `failpoints`: each system call of a transfer or a copy, each entry of the ring, and the beginning of
//! whatever else a thread does, asks here whether it is to fail, or to move less. Without that feature nothing does.

use rustix::io::Errno;

/// What becomes of a call instead.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "failpoints"), expect(dead_code, reason = "made by tests"))]
pub enum Fault {
    /// It fails.
    Error(Errno),
    /// It moves at most so many bytes.
    Short(usize),
}

/// Asked at each step.
#[cfg(feature = "failpoints")]
pub type Hook = fn() -> Option<Fault>;

#[cfg(feature = "failpoints")]
static HOOK: std::sync::RwLock<Option<Hook>> = std::sync::RwLock::new(None);

/// Has `hook` asked from now on, by whichever thread makes a call.
#[cfg(feature = "failpoints")]
pub fn set(hook: Hook) {
    *HOOK.write().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(hook);
}

impl Fault {
    /// Of what is not asked again: an error, of those that no system call is asked again for.
    #[inline(always)]
    pub(crate) fn error() -> Option<Errno> {
        match Fault::next() {
            Some(Fault::Error(errno)) if ![Errno::INTR, Errno::AGAIN].contains(&errno) => Some(errno),
            _ => None,
        }
    }

    #[cfg(feature = "failpoints")]
    pub(crate) fn next() -> Option<Fault> {
        HOOK.read().unwrap_or_else(std::sync::PoisonError::into_inner).and_then(|hook| hook())
    }

    #[cfg(not(feature = "failpoints"))]
    #[inline(always)]
    pub(crate) fn next() -> Option<Fault> {
        None
    }
}
