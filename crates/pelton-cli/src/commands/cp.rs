//! `pelton cp`: copies a file, with the engine for files; one poll waits for the engine and the signals.
//!
//! The copy is created under a temporary name in the same directory, and renamed once complete, so the destination
//! never has a part of it. It gets the mode of the file that it replaces, and the holes of the source. The command
//! writes to an existing device or FIFO, as `cp` does.

use crate::{
    failure::Failure,
    progress::{self, Progress},
    signals::Signals,
};
use clap::Args;
use pelton::file::{Completion, Engine, File, Kind, Open, Operation, Output, Stat};
use rustix::{
    event::PollFlags,
    fs::{Gid, Mode, SeekFrom, Uid},
    io::Errno,
};
use std::{
    io::ErrorKind,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Bytes per copy operation: some milliseconds between two checks of the signals.
const COPY_BYTES: u64 = 16 << 20;
/// Bytes per write to a device or a FIFO.
const WRITE_BYTES: usize = 1 << 20;

/// Options of `pelton cp`.
#[derive(Args)]
pub struct CpArgs {
    /// The file to copy
    source: PathBuf,
    /// The destination: a file, which is replaced and keeps its mode; a directory; or a device or FIFO, which is
    /// written to
    destination: PathBuf,
    /// Sync the copy to disk before it gets its name
    #[arg(long)]
    sync: bool,
}

/// Runs `pelton cp`.
pub fn run(args: &CpArgs) -> Result<(), Failure> {
    let mut copy_loop = CopyLoop { engine: Engine::new()?, signals: Signals::install()?, token: 0 };
    let source = copy_loop.run(Operation::open(&args.source, Open::for_reading()))?.into_file()?;
    let source_stat = copy_loop.stat(Operation::stat_file(&source))?.expect("an open file has metadata");
    if source_stat.kind != Kind::File {
        let text = format!("{} is a {:?}, wanted a regular file", args.source.display(), source_stat.kind);
        return Err(Failure::Input(text));
    }
    let mut destination = args.destination.clone();
    let mut old = copy_loop.stat(Operation::stat(&destination))?;
    if old.as_ref().is_some_and(|old| old.kind == Kind::Directory)
        && let Some(name) = args.source.file_name()
    {
        destination.push(name);
        old = copy_loop.stat(Operation::stat(&destination))?;
    }
    match old.as_ref().map(|old| old.kind) {
        None | Some(Kind::File) => copy_loop.replace(args, &source, &source_stat, &destination, old.as_deref()),
        Some(Kind::Fifo | Kind::Character | Kind::Block) => {
            copy_loop.write_to(args, &source, source_stat.bytes, &destination)
        }
        Some(other) => {
            let (path, kind) = (destination.display(), format!("{other:?}").to_lowercase());
            Err(Failure::Input(format!("{path} is a {kind}, wanted a file, a directory, a FIFO or a device")))
        }
    }
}

/// The target of a symbolic link: the target is replaced, not the link.
fn resolved(destination: &Path) -> Result<PathBuf, Failure> {
    match std::fs::symlink_metadata(destination) {
        Ok(metadata) if metadata.is_symlink() => std::fs::canonicalize(destination).map_err(|error| {
            let path = destination.display();
            Failure::Input(format!("{path} is a symbolic link without a target ({error}): remove it, or name a file"))
        }),
        _ => Ok(destination.to_owned()),
    }
}

/// The engine and the signals.
struct CopyLoop {
    engine: Engine,
    signals: Signals,
    /// The token of the last operation. The completion of an abandoned one may arrive during the next.
    token: u64,
}

impl CopyLoop {
    /// Runs one operation. A signal ends the wait and cancels it.
    fn run(&mut self, operation: Operation) -> Result<Completion, Failure> {
        let mut done = self.try_run(operation)?;
        done.outcome = Ok(done.outcome?);
        Ok(done)
    }

    /// As [`CopyLoop::run`], but the error of the operation is in the completion.
    fn try_run(&mut self, operation: Operation) -> Result<Completion, Failure> {
        self.signals.check()?;
        self.token += 1;
        let submitted = self.engine.try_submit(self.token, operation)?;
        debug_assert!(submitted.is_submitted(), "at most one operation, besides abandoned ones");
        loop {
            while let Some(done) = self.engine.try_completion()? {
                if done.token == self.token {
                    return Ok(done);
                }
            }
            if self.engine.arm()?.is_waiting() {
                self.signals.poll([(self.engine.as_fd(), PollFlags::IN)], None)?;
            }
        }
    }

    /// The metadata of a file; `None` if it does not exist.
    fn stat(&mut self, operation: Operation) -> Result<Option<Box<Stat>>, Failure> {
        match self.try_run(operation)?.outcome {
            Ok(Output::Stat(stat)) => Ok(Some(stat)),
            Err(pelton::Error::File { error: source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
            Ok(other) => unreachable!("a stat returned {other:?}"),
        }
    }

    /// Copies under a temporary name, and renames.
    fn replace(
        &mut self,
        args: &CpArgs,
        source: &File,
        source_stat: &Stat,
        destination: &Path,
        old: Option<&Stat>,
    ) -> Result<(), Failure> {
        let destination = resolved(destination)?;
        // Until the copy has its owner, no other user may open it.
        let mode = if old.is_some() { 0o600 } else { source_stat.mode & 0o777 };
        let (copy, temporary) = self.create_temporary(&destination, mode)?;
        let copied = old.map_or(Ok(()), |old| copy_ownership(&copy, old, &temporary));
        let copied = copied.and_then(|()| self.copy(source, &copy, source_stat.bytes)).and_then(|()| {
            if args.sync {
                self.run(Operation::sync(&copy))?;
            }
            self.run(Operation::rename(&temporary, &destination)).map(drop)
        });
        if copied.is_err() {
            // The first error is reported. This does not use the engine, which may be busy after a signal.
            let _ = std::fs::remove_file(&temporary);
        }
        copied
    }

    /// Creates a file in the directory of the destination. Its name has a fixed length: the destination may have the
    /// longest possible name.
    fn create_temporary(&mut self, destination: &Path, mode: u32) -> Result<(File, PathBuf), Failure> {
        if destination.file_name().is_none() {
            return Err(Failure::Input(format!("{} is no file name", destination.display())));
        }
        for attempt in 0u32.. {
            let temporary = destination.with_file_name(format!(".pelton-cp-{}-{attempt}", std::process::id()));
            match self.create(Operation::open(&temporary, Open::for_writing().create_new(mode)), &temporary)?.outcome {
                // The file of a killed process, or of a process with this number in another container.
                Err(pelton::Error::File { error: source, .. }) if source.kind() == ErrorKind::AlreadyExists => {}
                Ok(Output::File(file)) => return Ok((file, temporary)),
                Err(error) => return Err(error.into()),
                Ok(other) => unreachable!("an open returned {other:?}"),
            }
        }
        unreachable!("no directory has that many files")
    }

    /// Runs one operation that creates `path`. If a signal or an error ends the wait, the operation may still complete;
    /// then this removes the file.
    fn create(&mut self, operation: Operation, path: &Path) -> Result<Completion, Failure> {
        let done = self.try_run(operation);
        if done.is_err() {
            // Bounded, because a file system may hang.
            let deadline = Instant::now() + Duration::from_secs(1);
            while let Ok(Some(late)) = self.engine.completion_until(deadline) {
                // `Ok` only if this operation created the file, not if it existed.
                if late.token == self.token && late.outcome.is_ok() {
                    let _ = std::fs::remove_file(path);
                }
            }
        }
        done
    }

    /// Copies up to the end of the source, which may grow meanwhile. Leaves out its holes.
    fn copy(&mut self, from: &File, to: &File, bytes: u64) -> Result<(), Failure> {
        let mut progress = Progress::after(progress::DELAY);
        let mut done = 0;
        loop {
            let (data, end) = next_data(from, done);
            if data > done {
                // Also for a hole at the end.
                self.run(Operation::truncate(to, data))?;
                done = data;
            }
            while done < end {
                match self.run(Operation::copy(from, done, to, done, COPY_BYTES.min(end - done)))?.count() as u64 {
                    0 => return Ok(()),
                    count => done += count,
                }
                update(&mut progress, from, done, bytes);
            }
        }
    }

    /// Writes to an existing device or FIFO.
    fn write_to(&mut self, args: &CpArgs, from: &File, bytes: u64, destination: &Path) -> Result<(), Failure> {
        let to = self.run(Operation::open(destination, Open::for_writing()))?.into_file()?;
        let mut progress = Progress::after(progress::DELAY);
        let mut done = 0;
        loop {
            let read = self.run(Operation::read_at(from, vec![0; WRITE_BYTES], done))?;
            if read.count() == 0 {
                break;
            }
            done += read.count() as u64;
            let mut left = read.bytes().to_vec();
            // After a short count, the next write returns the reason.
            while !left.is_empty() {
                let count = self.run(Operation::write(&to, left.clone()))?.count();
                left.drain(..count);
            }
            update(&mut progress, from, done, bytes);
        }
        if args.sync {
            // Devices and FIFOs may not support a sync.
            match rustix::fs::fsync(&to) {
                Ok(()) | Err(Errno::INVAL | Errno::NOTSUP | Errno::ROFS) => {}
                Err(errno) => return Err(Failure::system(format!("syncing {}", destination.display()), errno)),
            }
        }
        Ok(())
    }
}

/// The position of the next data of a file, at or after `from`, and of the hole behind it. After the last data: the
/// length of the file, and no end, because it may grow.
fn next_data(file: &File, from: u64) -> (u64, u64) {
    let file = file.as_fd();
    match rustix::fs::seek(file, SeekFrom::Data(from)) {
        Ok(data) => (data, rustix::fs::seek(file, SeekFrom::Hole(data)).unwrap_or(u64::MAX)),
        // A hole up to the end, or the end.
        Err(Errno::NXIO) => {
            let length = rustix::fs::fstat(file).map_or(from, |stat| stat.st_size as u64);
            (length.max(from), u64::MAX)
        }
        // A file system without this information.
        Err(_) => (from, u64::MAX),
    }
}

/// Gives a file the owner, the group and the mode of the file that it replaces, as far as this user may.
fn copy_ownership(file: &File, old: &Stat, path: &Path) -> Result<(), Failure> {
    let mut mode = old.mode & 0o777;
    let (uid, gid) = (Uid::from_raw(old.uid), Gid::from_raw(old.gid));
    if rustix::fs::fchown(file, Some(uid), Some(gid)).is_err() && rustix::fs::fchown(file, None, Some(gid)).is_err() {
        // The group differs, so it gets the permissions of others.
        mode = mode & 0o707 | (mode & 0o007) << 3;
    }
    let done = rustix::fs::fchmod(file, Mode::from_raw_mode(mode));
    done.map_err(|errno| Failure::system(format!("setting the mode of {}", path.display()), errno))
}

/// Shows how much of a file is copied.
fn update(progress: &mut Progress, from: &File, done: u64, bytes: u64) {
    progress.update(|seconds| {
        let amount = progress::amount(done, Some(bytes.max(done)), seconds);
        format!("{}: {amount}", from.path().display())
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use pelton_testkit::seccomp;

    #[test]
    fn an_operation_never_takes_the_completion_of_an_abandoned_one() {
        let mut copy_loop = CopyLoop { engine: Engine::new().unwrap(), signals: Signals::install().unwrap(), token: 0 };
        if !copy_loop.engine.uses_io_uring() {
            return eprintln!("SKIPPED: no io_uring");
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        // A thread for which the kernel refuses to submit an operation.
        let starved = std::thread::spawn(|| {
            seccomp::refuse(libc::SYS_io_uring_enter, libc::ENOMEM);
            let failed = copy_loop.stat(Operation::stat("/"));
            assert!(failed.is_err(), "{failed:?}");
            copy_loop
        });
        let mut copy_loop = starved.join().unwrap();
        let opened = copy_loop.run(Operation::open(&path, Open::for_writing().create_new(0o600))).unwrap();
        assert!(opened.into_file().is_ok(), "the completion of the stat");
        assert!(copy_loop.stat(Operation::stat(&path)).unwrap().is_some_and(|stat| stat.kind == Kind::File));
        assert_eq!(copy_loop.engine.in_flight(), 0);
    }
}
