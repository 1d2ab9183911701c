//! Which directories are on local file systems, without a request to any file system: one that does not reply would
//! block the observer.

use pelton_os::own_uid;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

/// File systems that no server or user's program implements.
const LOCAL: [&str; 10] = ["tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "overlay", "f2fs", "zfs"];

/// The mounts of this process, in their order, with the types of their file systems.
#[derive(Debug)]
pub(super) struct Mounts(Vec<(PathBuf, String)>);

impl Mounts {
    pub(super) fn read() -> Mounts {
        let text = fs::read("/proc/self/mountinfo").unwrap_or_default();
        Mounts::parse(&String::from_utf8_lossy(&text))
    }

    fn parse(text: &str) -> Mounts {
        let mounts = text.lines().filter_map(|line| {
            let (mount, system) = line.split_once(" - ")?;
            Some((unescaped(mount.split(' ').nth(4)?), system.split(' ').next()?.to_owned()))
        });
        Mounts(mounts.collect())
    }

    /// The type of the file system at an absolute path without symbolic links.
    fn type_of(&self, path: &Path) -> &str {
        let at = self.0.iter().filter(|(mount, _)| path.starts_with(mount));
        // Of several at one place the last one is on top.
        at.max_by_key(|(mount, _)| mount.components().count()).map_or("", |(_, kind)| kind)
    }

    /// Whether a directory that another process named may be read.
    ///
    /// # Errors
    /// Why not.
    pub(super) fn check(&self, directory: &Path) -> Result<(), String> {
        let kind = self.type_of(directory);
        if !LOCAL.contains(&kind) {
            return Err(format!(
                "it is on a file system of type {kind:?}, which may not reply: name it on the command line"
            ));
        }
        // As root: another user may have put a symbolic link there, which leads anywhere.
        if own_uid() != 0 {
            return Ok(());
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match openat2(CWD, directory, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS) {
            Err(rustix::io::Errno::LOOP) => Err("its path has a symbolic link".to_owned()),
            // What does not exist blocks nobody.
            Ok(_) | Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
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
            assert_eq!(mounts.type_of(Path::new(path)), kind, "{path}");
        }
        assert!(mounts.check(Path::new("/mnt/d")).unwrap_err().contains("nfs4"));
    }
}
