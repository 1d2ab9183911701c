//! `pelton cp`: a file to a file, by an engine for files, whose descriptor is polled beside the signals'.
//!
//! The copy is made aside, in the same directory, and takes its name when it is whole: whoever looks there finds what was, or the copy.

use crate::{failure::Failure, progress, signals::Signals};
use clap::Args;
use pelton::file::{Completion, Engine, File, Kind, Open, Operation, Output};
use rustix::event::PollFlags;
use std::{
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Copied at a time: some milliseconds between two looks at the signals.
const PIECE: u64 = 16 << 20;

/// Options of `pelton cp`.
#[derive(Args)]
pub struct CpArgs {
    /// The file to copy
    source: PathBuf,
    /// Where the copy goes: a file, which is replaced when the copy is whole, or a directory
    destination: PathBuf,
    /// Have the copy on the disk before it takes its name
    #[arg(long)]
    sync: bool,
}

/// Runs `pelton cp`.
pub fn run(args: &CpArgs) -> Result<(), Failure> {
    let mut loop_ = Loop { engine: Engine::new()?, signals: Signals::install()? };
    let source = loop_.run(Operation::open(&args.source, Open::for_reading()))?.into_file()?;
    let Ok(Output::Stat(found)) = loop_.run(Operation::stat_file(&source))?.outcome else {
        unreachable!("a stat answers a stat");
    };
    if found.kind != Kind::File {
        let text = format!("{} is a {:?}, wanted a regular file", args.source.display(), found.kind);
        return Err(Failure::Input(text));
    }
    let destination = match (loop_.run(Operation::stat(&args.destination)), args.source.file_name()) {
        (Ok(Completion { outcome: Ok(Output::Stat(there)), .. }), Some(name)) if there.kind == Kind::Directory => {
            args.destination.join(name)
        }
        (Err(Failure::Signal(signal)), _) => return Err(Failure::Signal(signal)),
        _ => args.destination.clone(),
    };
    let aside = aside(&destination)?;
    let open = Operation::open(&aside, Open::for_writing().create_new(found.mode & 0o777));
    let copy = loop_.create(open, &aside)?.into_file()?;
    let copied = loop_.copy(&source, &copy, found.bytes).and_then(|()| {
        if args.sync {
            loop_.run(Operation::sync(&copy))?;
        }
        loop_.run(Operation::rename(&aside, &destination)).map(drop)
    });
    if copied.is_err() {
        // What the copy failed by is what is told. Not by the engine, which a signal may have left at work.
        let _ = std::fs::remove_file(&aside);
    }
    copied
}

/// In the directory of the destination, a name that no other process of this kind has.
fn aside(destination: &Path) -> Result<PathBuf, Failure> {
    let name = destination.file_name();
    let name = name.ok_or_else(|| Failure::Input(format!("{} is no name for a file", destination.display())))?;
    let mut aside = std::ffi::OsString::from(".");
    aside.push(name);
    aside.push(format!(".pelton-{}", std::process::id()));
    Ok(destination.with_file_name(aside))
}

/// The engine, and what else ends a wait.
struct Loop {
    engine: Engine,
    signals: Signals,
}

impl Loop {
    /// Does one operation; a signal ends the wait for it, and cancels it.
    fn run(&mut self, operation: Operation) -> Result<Completion, Failure> {
        self.signals.check()?;
        let submitted = self.engine.try_submit(0, operation)?;
        debug_assert!(submitted.is_submitted(), "one at a time");
        loop {
            if let Some(mut done) = self.engine.try_completion()? {
                done.outcome = Ok(done.outcome?);
                return Ok(done);
            }
            if self.engine.arm()? {
                self.signals.poll([(self.engine.as_fd(), PollFlags::IN)], None)?;
            }
        }
    }

    /// Does one operation that creates `path`. A signal may come after it was done and before it was reported: then the file is removed.
    fn create(&mut self, operation: Operation, path: &Path) -> Result<Completion, Failure> {
        let done = self.run(operation);
        if matches!(done, Err(Failure::Signal(_))) {
            // `Ok` only if this operation created the file, not if there was one of that name. A file system that hangs is not waited for.
            let deadline = Instant::now() + Duration::from_secs(1);
            if let Ok(Some(Completion { outcome: Ok(_), .. })) = self.engine.completion_until(deadline) {
                let _ = std::fs::remove_file(path);
            }
        }
        done
    }

    /// Copies until the source has no more, which may be later than at the length that it had.
    fn copy(&mut self, from: &File, to: &File, bytes: u64) -> Result<(), Failure> {
        let bar = progress::bar(bytes).with_message(from.path().display().to_string());
        let mut done = 0;
        loop {
            match self.run(Operation::copy(from, done, to, done, PIECE))?.count() as u64 {
                0 => return Ok(()),
                count => done += count,
            }
            bar.set_length(bytes.max(done));
            bar.set_position(done);
        }
    }
}
