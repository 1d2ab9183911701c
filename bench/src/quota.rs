//! A control group that limits the processor time of the measured processes, as containers are limited.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

/// The period of the quota, the kernel's default.
const PERIOD_US: u64 = 100_000;
/// How long the last processes of the group may take to end: they have been killed by then.
const END: Duration = Duration::from_secs(5);

/// The control group, without any process at first. Dropping it removes it.
pub struct Quota(PathBuf);

impl Quota {
    /// A group whose processes together get so many percent of one processor.
    pub fn of(percent: u32) -> Result<Quota> {
        let mounts = fs::read_to_string("/proc/mounts").context("reading /proc/mounts")?;
        let (root, version) = hierarchy(&mounts)?;
        let quota = Quota(root.join(format!("pelton-bench-{}", std::process::id())));
        fs::create_dir(&quota.0).with_context(|| format!("creating {}: run as root", quota.0.display()))?;
        let quota_us = PERIOD_US * percent as u64 / 100;
        let (file, limit) = match version {
            2 => ("cpu.max", format!("{quota_us} {PERIOD_US}")),
            _ => ("cpu.cfs_quota_us", quota_us.to_string()),
        };
        fs::write(quota.0.join(file), &limit)
            .with_context(|| format!("writing {limit} to {}", quota.0.join(file).display()))?;
        Ok(quota)
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

/// The mounted hierarchy that can limit processor time, and its version.
fn hierarchy(mounts: &str) -> Result<(PathBuf, u32)> {
    let fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    for mount in fields.filter(|fields| fields.len() > 3) {
        let root = PathBuf::from(mount[1]);
        match mount[2] {
            // Only then do the groups below it have cpu.max.
            "cgroup2" if lists_cpu(&root.join("cgroup.subtree_control")) => return Ok((root, 2)),
            "cgroup" if mount[3].split(',').any(|option| option == "cpu") => return Ok((root, 1)),
            _ => {}
        }
    }
    bail!(
        "found no control groups that limit processor time in /proc/mounts: mount cgroup2, and write +cpu to its cgroup.subtree_control"
    )
}

fn lists_cpu(file: &Path) -> bool {
    fs::read_to_string(file).is_ok_and(|text| text.split_whitespace().any(|controller| controller == "cpu"))
}

impl Drop for Quota {
    fn drop(&mut self) {
        let until = Instant::now() + END;
        while let Err(error) = fs::remove_dir(&self.0) {
            match error.kind() {
                // A killed process leaves its group when the kernel has ended it.
                io::ErrorKind::ResourceBusy if Instant::now() < until => thread::sleep(Duration::from_millis(1)),
                io::ErrorKind::NotFound => return,
                _ => {
                    eprintln!("note: {} is still there ({error}): remove it with rmdir", self.0.display());
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hierarchy_without_the_processor_controller_is_passed_over() {
        let found =
            hierarchy("cgroup2 /nowhere cgroup2 rw 0 0\ncgroup /a cgroup rw,memory 0 0\ncgroup /b cgroup rw,cpu 0 0");
        assert_eq!(found.unwrap(), (PathBuf::from("/b"), 1));
        let error = hierarchy("tmpfs /tmp tmpfs rw 0 0\n").unwrap_err().to_string();
        assert!(error.contains("write +cpu"), "{error}");
        let directory = tempfile::tempdir().unwrap();
        let mounts = format!("cgroup2 {} cgroup2 rw 0 0", directory.path().display());
        fs::write(directory.path().join("cgroup.subtree_control"), "memory cpu pids\n").unwrap();
        assert_eq!(hierarchy(&mounts).unwrap(), (directory.path().to_path_buf(), 2));
        fs::write(directory.path().join("cgroup.subtree_control"), "memory cpuset\n").unwrap();
        assert!(hierarchy(&mounts).is_err());
    }
}
