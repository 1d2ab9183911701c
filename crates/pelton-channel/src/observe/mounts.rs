//! Opens directories that other processes have named, on local file systems only, without a request to any other: one
//! that does not reply would block the observer. What was checked is what was opened: a directory that is exchanged
//! meanwhile is refused.

use pelton_os::own_uid;
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, StatxFlags, open, openat2, statx};
use rustix::io::Errno;
use std::ffi::OsString;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

/// File systems that no server or user's program implements.
const LOCAL: [&str; 10] = ["tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "overlay", "f2fs", "zfs"];

/// The mounts of this process, in their order.
#[derive(Debug)]
pub(super) struct Mounts(Vec<Mount>);

#[derive(Debug)]
struct Mount {
    id: u64,
    path: PathBuf,
    /// The type of its file system.
    kind: String,
}

impl Mounts {
    pub(super) fn read() -> Mounts {
        let text = fs::read("/proc/self/mountinfo").unwrap_or_default();
        Mounts::parse(&String::from_utf8_lossy(&text))
    }

    fn parse(text: &str) -> Mounts {
        let mounts = text.lines().filter_map(|line| {
            let (mount, system) = line.split_once(" - ")?;
            let mut fields = mount.split(' ');
            let (id, path) = (fields.next()?.parse().ok()?, unescaped(fields.nth(3)?));
            Some(Mount { id, path, kind: system.split(' ').next()?.to_owned() })
        });
        Mounts(mounts.collect())
    }

    /// The mount at an absolute path without symbolic links.
    fn at(&self, path: &Path) -> Option<&Mount> {
        let at = self.0.iter().filter(|mount| path.starts_with(&mount.path));
        // Of several at one place the last one is on top.
        at.max_by_key(|mount| mount.path.components().count())
    }

    /// Opens a directory that another process named. As root, no symbolic link is followed, and no mount that was made
    /// meanwhile: another user may have put them there, and they lead anywhere.
    ///
    /// # Errors
    /// `None` if there is no such directory; else why it may not be read.
    pub(super) fn open(&self, directory: &Path) -> Result<OwnedFd, Option<String>> {
        let mount = self.at(directory);
        let kind = mount.map_or("", |mount| &mount.kind);
        let Some(mount) = mount.filter(|_| LOCAL.contains(&kind)) else {
            let text = "which may not reply: name it on the command line";
            return Err(Some(format!("it is on a file system of type {kind:?}, {text}")));
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = if own_uid() == 0 { mount.open(directory, flags) } else { open(directory, flags, Mode::empty()) };
        opened.map_err(|error| match error {
            Errno::NOENT | Errno::NOTDIR => None,
            Errno::LOOP => Some("its path has a symbolic link".to_owned()),
            Errno::XDEV => Some("another file system was mounted there meanwhile".to_owned()),
            error => Some(error.to_string()),
        })
    }
}

impl Mount {
    fn open(&self, directory: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let root = open(&self.path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        if statx(&root, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?.stx_mnt_id != self.id {
            return Err(Errno::XDEV);
        }
        let below = directory.strip_prefix(&self.path).ok().filter(|below| !below.as_os_str().is_empty());
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
        openat2(&root, below.unwrap_or(Path::new(".")), flags, Mode::empty(), resolve)
    }
}

/// The path in a field of mountinfo: some bytes are written as \\ and three octal digits.
fn unescaped(field: &str) -> PathBuf {
    let mut bytes = Vec::new();
    let mut rest = field.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()).filter(|_| *first == b'\\') {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[3..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_and_deepest_mount_counts() {
        let text = "1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:9 / /home/a\\040b rw shared:1 - fuse.sshfs x rw\n\
                    3 1 0:9 / /mnt rw - ext4 x rw\n4 3 0:9 / /mnt rw - nfs4 x rw\n";
        let mounts = Mounts::parse(text);
        for (path, kind) in [("/home/a b", "fuse.sshfs"), ("/home", "ext4"), ("/mnt/d", "nfs4"), ("/mnt2", "ext4")] {
            assert_eq!(mounts.at(Path::new(path)).unwrap().kind, kind, "{path}");
        }
        assert!(mounts.open(Path::new("/mnt/d")).unwrap_err().unwrap().contains("nfs4"));
    }

    #[test]
    fn a_directory_is_opened_where_it_is_and_not_where_a_link_or_another_mount_leads() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap();
        std::fs::create_dir(path.join("real")).unwrap();
        std::os::unix::fs::symlink("real", path.join("link")).unwrap();
        let mut mounts = Mounts::read();
        assert!(mounts.open(&path.join("real")).is_ok());
        assert!(mounts.open(&path.join("missing")).unwrap_err().is_none());
        assert!(mounts.open(&path.join("link")).is_err());
        // What was mounted there since the mounts were read.
        if own_uid() == 0 {
            mounts.0.iter_mut().for_each(|mount| mount.id += 1 << 40);
            let reason = mounts.open(&path.join("real")).unwrap_err().unwrap();
            assert!(reason.contains("meanwhile"), "{reason}");
        }
    }
}
