//! A role in the directory of a path channel: one receiver, and one sender for each lane.

use crate::directory::Directory;
use crate::error::Result;
use pelton_os::Descriptor;
use pelton_os::lock::Lock;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A role that this process has claimed, for as long as its handle lives.
#[derive(Debug)]
pub(crate) struct RoleClaim {
    pub(crate) directory: Arc<Directory>,
    is_synced: AtomicBool,
    /// Held open: its close proves to the other sides that this one is gone.
    _liveness: Descriptor,
    /// Dropped after the liveness handle, so that a successor finds this one gone. A receiver's held messages keep it
    /// as well: a successor would release them.
    pub(crate) lock: Arc<Lock>,
}

impl RoleClaim {
    pub(crate) fn new(directory: Arc<Directory>, liveness: Descriptor, lock: Lock) -> RoleClaim {
        RoleClaim { directory, is_synced: AtomicBool::new(false), _liveness: liveness, lock: Arc::new(lock) }
    }

    /// Syncs the directory and its entries, once: without them the contents of its files are lost.
    pub(crate) fn sync_directory(&self) -> Result<()> {
        if !self.is_synced.load(Relaxed) {
            self.directory.sync()?;
            // Relaxed: at worst two threads sync it.
            self.is_synced.store(true, Relaxed);
        }
        Ok(())
    }
}
