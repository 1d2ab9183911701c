//! A control group that limits the processor time of the measured processes, as containers are limited.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process, thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

/// The period of a quota, the kernel's default.
const PERIOD_US: u64 = 100_000;
/// The deadline for killed processes to leave the group: one without quota left runs, and ends, in the next period.
const END: Duration = Duration::from_secs(5);

/// The control group, without any process at first. Dropping it removes it.
pub struct Quota(PathBuf);

impl Quota {
    /// A group whose processes together get that percentage of one processor.
    pub fn of(percent: u32) -> Result<Quota> {
        let mounts = fs::read_to_string("/proc/mounts").context("reading /proc/mounts")?;
        let quota_us = PERIOD_US * u64::from(percent) / 100;
        let limits = [("cpu.max", format!("{quota_us} {PERIOD_US}")), ("cpu.cfs_quota_us", quota_us.to_string())];
        for root in hierarchies(&mounts) {
            let group = Quota(root.join(format!("pelton-bench-{}", process::id())));
            fs::create_dir(&group.0)
                .with_context(|| format!("creating the control group {} (needs root)", group.0.display()))?;
            // The kernel has put the files of the enabled controllers into it.
            let file_and_limit =
                limits.iter().map(|(file, limit)| (group.0.join(file), limit)).find(|(file, _)| file.exists());
            if let Some((file, limit)) = file_and_limit {
                fs::write(&file, limit).with_context(|| format!("writing {limit} to {}", file.display()))?;
                return Ok(group);
            }
        }
        bail!(
            "found no control group with cpu.max or cpu.cfs_quota_us: mount cgroup2, and write +cpu to its cgroup.subtree_control"
        )
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

/// Where the hierarchies are mounted that may limit processor time: of version 2, or of version 1 with that controller.
fn hierarchies(mounts: &str) -> impl Iterator<Item = &Path> {
    mounts.lines().filter_map(|mount| match mount.split(' ').collect::<Vec<_>>()[..] {
        [_, root, "cgroup2", ..] => Some(Path::new(root)),
        [_, root, "cgroup", options, ..] if options.split(',').any(|option| option == "cpu") => Some(Path::new(root)),
        _ => None,
    })
}

impl Drop for Quota {
    fn drop(&mut self) {
        let until = Instant::now() + END;
        while let Err(error) = fs::remove_dir(&self.0) {
            match error.kind() {
                io::ErrorKind::ResourceBusy if Instant::now() < until => thread::sleep(Duration::from_millis(1)),
                io::ErrorKind::NotFound => return, // it could not be created
                _ => return eprintln!("note: remove {} by rmdir: {error}", self.0.display()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hierarchies_that_may_limit_processor_time_are_tried() {
        let mounts = "tmpfs /c tmpfs rw,cpu 0 0\ncgroup /a cgroup rw,cpuset 0 0\ncgroup /b cgroup rw,cpu,cpuacct 0 0\n\
                      cgroup2 /u cgroup2 rw 0 0\n\n";
        assert_eq!(hierarchies(mounts).collect::<Vec<_>>(), [Path::new("/b"), Path::new("/u")]);
    }
}
