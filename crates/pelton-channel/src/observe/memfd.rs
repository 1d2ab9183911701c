//! The lanes in memfds: which processes have their descriptors.

use super::Found;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// The memfds found so far.
#[derive(Debug, Default)]
pub(super) struct Memfds {
    directories: BTreeSet<PathBuf>,
}

impl Memfds {
    /// Adds the channels in memfds.
    pub(super) fn find(&mut self, _found: &mut Found) {}

    /// The directories of path channels that processes have open.
    pub(super) fn directories(&self) -> impl Iterator<Item = &PathBuf> {
        self.directories.iter()
    }
}
