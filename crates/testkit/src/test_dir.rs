//! Temporary directories, mounts, and new entries of a directory.

use crate::deadline::{Watchdog, wait_for_readable};
use crate::kernel::is_root;
use rustix::fs::inotify;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A directory of a test's own, removed at its end, also when it fails.
pub struct TestDir {
    root: tempfile::TempDir,
    _watchdog: Option<Watchdog>,
}

impl TestDir {
    /// Creates it, with a [`Watchdog`] that names the test's claim.
    pub fn new(claim: &'static str) -> TestDir {
        TestDir { _watchdog: Some(Watchdog::new(claim)), ..TestDir::unwatched() }
    }

    /// For a test whose children detect a hang themselves.
    pub fn unwatched() -> TestDir {
        // A Unix socket's path must be short, so the directory is in /tmp.
        TestDir { root: tempfile::Builder::new().prefix("pt").tempdir_in("/tmp").unwrap(), _watchdog: None }
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        self.root.path()
    }

    /// The path of a socket in it.
    pub fn socket(&self) -> PathBuf {
        self.path().join("s")
    }

    /// The name of a channel that is connected by that socket.
    pub fn name(&self) -> String {
        format!("unix:{}", self.socket().display())
    }

    /// The name of a channel in a directory.
    pub fn path_name(&self) -> String {
        format!("path:{}", self.path().join("c").display())
    }

    /// The entries of the directory.
    pub fn entries(&self) -> Vec<PathBuf> {
        std::fs::read_dir(self.path()).unwrap().map(|entry| entry.unwrap().path()).collect()
    }
}

/// A file system of a test's own, unmounted when dropped.
pub struct Mounted(pub PathBuf);

impl Mounted {
    /// Mounts a tmpfs at a path, which is created. Without permission, prints a line and returns `None`.
    pub fn tmpfs(point: &Path, options: &str) -> Option<Mounted> {
        Mounted::by(point, &["-t", "tmpfs", "-o", options, "tmpfs"])
    }

    /// As [`Mounted::tmpfs`], any file system: the arguments of `mount`, but for the path.
    pub fn by(point: &Path, arguments: &[&str]) -> Option<Mounted> {
        std::fs::create_dir_all(point).unwrap();
        if is_root() && mount(arguments, point) {
            return Some(Mounted(point.to_owned()));
        }
        eprintln!("SKIPPED: no permission for mount {}", arguments.join(" "));
        None
    }

    /// Changes the size of a tmpfs.
    pub fn resize(&self, bytes: &str) {
        assert!(mount(&["-o", &format!("remount,size={bytes}")], &self.0));
    }
}

fn mount(arguments: &[&str], point: &Path) -> bool {
    let done = Command::new("mount").args(arguments).arg(point).stderr(Stdio::null()).status();
    done.is_ok_and(|status| status.success())
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Lazily: a mapping that a failed test leaves must not leave the mount.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// The event that something is created in a directory, or moved to it.
pub struct NewEntry(OwnedFd);

impl NewEntry {
    /// Watches from now on.
    pub fn watch(directory: &Path) -> NewEntry {
        let inotify = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
        let events = inotify::WatchFlags::CREATE | inotify::WatchFlags::MOVED_TO;
        inotify::add_watch(&inotify, directory, events).unwrap();
        NewEntry(inotify)
    }

    /// Waits for it.
    #[track_caller]
    pub fn wait(self) {
        wait_for_readable(&[self.0.as_fd()], "something is created in the directory");
    }
}
