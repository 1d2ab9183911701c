//! `pelton cp`: a file to a file, by an engine for files, whose descriptor is polled beside the signals'.
//!
//! The copy is created under a temporary name, in the same directory, and takes its name when it is whole: whoever looks there finds what was, or
//! the copy. It has the mode of what it replaces, and the source's holes. A device or a FIFO is not replaced, but written to, as `cp` does.

use crate::{failure::Failure, progress, signals::Signals};
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

/// Copied at a time: some milliseconds between two looks at the signals.
const PIECE: u64 = 16 << 20;
/// Written at a time to what is no regular file.
const POURED: usize = 1 << 20;

/// Options of `pelton cp`.
#[derive(Args)]
pub struct CpArgs {
    /// The file to copy
    source: PathBuf,
    /// Where the copy goes: a file, which is replaced when the copy is whole and keeps its mode; a directory; or a device or a FIFO,
    /// which is written to
    destination: PathBuf,
    /// Have the copy on the disk before it takes its name
    #[arg(long)]
    sync: bool,
}

/// Runs `pelton cp`.
pub fn run(args: &CpArgs) -> Result<(), Failure> {
    let mut loop_ = Loop { engine: Engine::new()?, signals: Signals::install()?, token: 0 };
    let source = loop_.run(Operation::open(&args.source, Open::for_reading()))?.into_file()?;
    let found = loop_.stat(Operation::stat_file(&source))?.expect("an open file has them");
    if found.kind != Kind::File {
        let text = format!("{} is a {:?}, wanted a regular file", args.source.display(), found.kind);
        return Err(Failure::Input(text));
    }
    let mut destination = args.destination.clone();
    let mut there = loop_.stat(Operation::stat(&destination))?;
    if there.as_ref().is_some_and(|there| there.kind == Kind::Directory)
        && let Some(name) = args.source.file_name()
    {
        destination.push(name);
        there = loop_.stat(Operation::stat(&destination))?;
    }
    match there.as_ref().map(|there| there.kind) {
        None | Some(Kind::File) => loop_.replace(args, &source, &found, &destination, there.as_deref()),
        Some(Kind::Fifo | Kind::Character | Kind::Block) => loop_.pour(args, &source, found.bytes, &destination),
        Some(other) => {
            let (path, kind) = (destination.display(), format!("{other:?}").to_lowercase());
            Err(Failure::Input(format!("{path} is a {kind}, wanted a file, a directory, a FIFO or a device")))
        }
    }
}

/// What a symbolic link leads to, so that the file is replaced and not the link.
fn resolved(destination: &Path) -> Result<PathBuf, Failure> {
    match std::fs::symlink_metadata(destination) {
        Ok(found) if found.is_symlink() => std::fs::canonicalize(destination).map_err(|error| {
            let path = destination.display();
            Failure::Input(format!("{path} is a symbolic link that leads nowhere ({error}): remove it, or name a file"))
        }),
        _ => Ok(destination.to_owned()),
    }
}

/// The engine, and what else ends a wait.
struct Loop {
    engine: Engine,
    signals: Signals,
    /// Of the last operation: of one that was given up, the completion may come while another is waited for.
    token: u64,
}

impl Loop {
    /// Does one operation; a signal ends the wait for it, and cancels it.
    fn run(&mut self, operation: Operation) -> Result<Completion, Failure> {
        let mut done = self.try_run(operation)?;
        done.outcome = Ok(done.outcome?);
        Ok(done)
    }

    /// As [`Loop::run`]; also what it failed by is in the completion.
    fn try_run(&mut self, operation: Operation) -> Result<Completion, Failure> {
        self.signals.check()?;
        self.token += 1;
        let submitted = self.engine.try_submit(self.token, operation)?;
        debug_assert!(submitted.is_submitted(), "one at a time, but for those that were given up");
        loop {
            while let Some(done) = self.engine.try_completion()? {
                if done.token == self.token {
                    return Ok(done);
                }
            }
            if self.engine.arm()? {
                self.signals.poll([(self.engine.as_fd(), PollFlags::IN)], None)?;
            }
        }
    }

    /// What is known of a file; `None` if there is none.
    fn stat(&mut self, operation: Operation) -> Result<Option<Box<Stat>>, Failure> {
        match self.try_run(operation)?.outcome {
            Ok(Output::Stat(found)) => Ok(Some(found)),
            Err(pelton::Error::File { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
            Ok(other) => unreachable!("a stat answers {other:?}"),
        }
    }

    /// Copies under a temporary name, and renames.
    fn replace(
        &mut self,
        args: &CpArgs,
        source: &File,
        found: &Stat,
        destination: &Path,
        there: Option<&Stat>,
    ) -> Result<(), Failure> {
        let destination = resolved(destination)?;
        // Until the copy has its owner, nobody else gets at it.
        let mode = if there.is_some() { 0o600 } else { found.mode & 0o777 };
        let (copy, aside) = self.create_aside(&destination, mode)?;
        let copied = there.map_or(Ok(()), |there| take_after(&copy, there, &aside));
        let copied = copied.and_then(|()| self.copy(source, &copy, found.bytes)).and_then(|()| {
            if args.sync {
                self.run(Operation::sync(&copy))?;
            }
            self.run(Operation::rename(&aside, &destination)).map(drop)
        });
        if copied.is_err() {
            // What the copy failed by is what is told. Not by the engine, which a signal may have left at work.
            let _ = std::fs::remove_file(&aside);
        }
        copied
    }

    /// A new file in the directory of the destination. Its name does not grow with the destination's, which may be as long as a name can be.
    fn create_aside(&mut self, destination: &Path, mode: u32) -> Result<(File, PathBuf), Failure> {
        if destination.file_name().is_none() {
            return Err(Failure::Input(format!("{} is no name for a file", destination.display())));
        }
        for attempt in 0u32.. {
            let aside = destination.with_file_name(format!(".pelton-cp-{}-{attempt}", std::process::id()));
            match self.create(Operation::open(&aside, Open::for_writing().create_new(mode)), &aside)?.outcome {
                // Another container's process of this number, or one that was killed.
                Err(pelton::Error::File { source, .. }) if source.kind() == ErrorKind::AlreadyExists => {}
                Ok(Output::File(file)) => return Ok((file, aside)),
                Err(error) => return Err(error.into()),
                Ok(other) => unreachable!("opening answers {other:?}"),
            }
        }
        unreachable!("no directory has so many files")
    }

    /// Does one operation that creates `path`. If a signal, or the system, ends the wait for it, it may be done all the same: then the file is removed.
    fn create(&mut self, operation: Operation, path: &Path) -> Result<Completion, Failure> {
        let done = self.try_run(operation);
        if done.is_err() {
            // A file system that hangs is not waited for.
            let deadline = Instant::now() + Duration::from_secs(1);
            while let Ok(Some(late)) = self.engine.completion_until(deadline) {
                // `Ok` only if this operation created the file, not if there was one of that name.
                if late.token == self.token && late.outcome.is_ok() {
                    let _ = std::fs::remove_file(path);
                }
            }
        }
        done
    }

    /// Copies until the source has no more, which may be later than at the length that it had. Leaves out its holes.
    fn copy(&mut self, from: &File, to: &File, bytes: u64) -> Result<(), Failure> {
        let bar = progress::bar(bytes).with_message(from.path().display().to_string());
        let mut done = 0;
        loop {
            let (data, end) = next_data(from, done);
            if data > done {
                // Also where nothing comes behind the hole.
                self.run(Operation::truncate(to, data))?;
                done = data;
            }
            while done < end {
                match self.run(Operation::copy(from, done, to, done, PIECE.min(end - done)))?.count() as u64 {
                    0 => return Ok(()),
                    count => done += count,
                }
                bar.set_length(bytes.max(done));
                bar.set_position(done);
            }
        }
    }

    /// Writes to what is at the destination, and stays there.
    fn pour(&mut self, args: &CpArgs, from: &File, bytes: u64, destination: &Path) -> Result<(), Failure> {
        let to = self.run(Operation::open(destination, Open::for_writing()))?.into_file()?;
        let bar = progress::bar(bytes).with_message(from.path().display().to_string());
        let mut done = 0;
        loop {
            let read = self.run(Operation::read_at(from, vec![0; POURED], done))?;
            if read.count() == 0 {
                break;
            }
            done += read.count() as u64;
            let mut left = read.bytes().to_vec();
            // A count that is short is followed by what was the reason.
            while !left.is_empty() {
                let count = self.run(Operation::write(&to, left.clone()))?.count();
                left.drain(..count);
            }
            bar.set_length(bytes.max(done));
            bar.set_position(done);
        }
        if args.sync {
            // Of what has nothing to sync, the system says so.
            match rustix::fs::fsync(&to) {
                Ok(()) | Err(Errno::INVAL | Errno::NOTSUP | Errno::ROFS) => {}
                Err(errno) => return Err(Failure::system(format!("syncing {}", destination.display()), errno)),
            }
        }
        Ok(())
    }
}

/// Where the next data of a file begins, at `from` or behind it, and where the next hole. Behind the last data: the file's length, and no end,
/// for it may grow.
fn next_data(file: &File, from: u64) -> (u64, u64) {
    let file = file.as_fd();
    match rustix::fs::seek(file, SeekFrom::Data(from)) {
        Ok(data) => (data, rustix::fs::seek(file, SeekFrom::Hole(data)).unwrap_or(u64::MAX)),
        // A hole up to the end, or nothing.
        Err(Errno::NXIO) => {
            let length = rustix::fs::fstat(file).map_or(from, |found| found.st_size as u64);
            (length.max(from), u64::MAX)
        }
        // A file system that does not know.
        Err(_) => (from, u64::MAX),
    }
}

/// Gives a file the owner, the group and the mode of the one that it replaces, as far as this user may.
fn take_after(file: &File, there: &Stat, path: &Path) -> Result<(), Failure> {
    let mut mode = there.mode & 0o777;
    let (uid, gid) = (Uid::from_raw(there.uid), Gid::from_raw(there.gid));
    if rustix::fs::fchown(file, Some(uid), Some(gid)).is_err() && rustix::fs::fchown(file, None, Some(gid)).is_err() {
        // The group is another: it may do what others may.
        mode = mode & 0o707 | (mode & 0o007) << 3;
    }
    let done = rustix::fs::fchmod(file, Mode::from_raw_mode(mode));
    done.map_err(|errno| Failure::system(format!("setting the mode of {}", path.display()), errno))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pelton_testkit::seccomp;

    #[test]
    fn an_operation_never_takes_the_answer_of_one_that_was_given_up() {
        let mut loop_ = Loop { engine: Engine::new().unwrap(), signals: Signals::install().unwrap(), token: 0 };
        if !loop_.engine.uses_io_uring() {
            return eprintln!("SKIPPED: no io_uring");
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        // A thread in which the kernel has no memory to begin anything.
        let starved = std::thread::spawn(|| {
            seccomp::refuse(libc::SYS_io_uring_enter, libc::ENOMEM);
            let failed = loop_.stat(Operation::stat("/"));
            assert!(failed.is_err(), "{failed:?}");
            loop_
        });
        let mut loop_ = starved.join().unwrap();
        let made = loop_.run(Operation::open(&path, Open::for_writing().create_new(0o600))).unwrap();
        assert!(made.into_file().is_ok(), "the answer to the stat");
        assert!(loop_.stat(Operation::stat(&path)).unwrap().is_some_and(|found| found.kind == Kind::File));
        assert_eq!(loop_.engine.in_flight(), 0);
    }
}
