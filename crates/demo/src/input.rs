//! The file to stream: that of the user, or the default one.

use crate::{
    corpus,
    stage::{Digest, each_line},
};
use pelton_cli::{
    failure::Failure,
    progress::{self, Progress},
    signals::Signals,
};
use std::{
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
};

/// The file to stream, and the results of a first reading.
pub struct Input {
    pub path: PathBuf,
    pub bytes: u64,
    /// Its lines, as `each_line` splits them.
    pub digest: Digest,
    pub longest: u64,
    ends_with_newline: bool,
}

impl Input {
    /// Reads the whole file, in which every line must fit a message.
    pub fn open(path: &Path, signals: &Signals) -> Result<Input, Failure> {
        let shown = path.display();
        let bad = |why: String| Failure::Input(format!("`{shown}` {why}"));
        let hint = "give a readable file of lines, or none for the default one";
        // Checked before the open: opening a FIFO would wait for its writer.
        let metadata = fs::metadata(path).map_err(|error| bad(format!("cannot be opened: {error}; {hint}")))?;
        if metadata.is_dir() {
            return Err(bad(format!("is a directory; {hint}")));
        }
        if !metadata.is_file() {
            return Err(bad(
                "is not a regular file, and the demo reads it more than once; copy it into one first".to_string()
            ));
        }
        let file = File::open(path).map_err(|error| bad(format!("cannot be opened: {error}; {hint}")))?;
        let mut input = Input {
            path: path.to_path_buf(),
            bytes: 0,
            digest: Digest::default(),
            longest: 0,
            ends_with_newline: false,
        };
        each_line(MonitoredReader::new(&file, metadata.len(), "reading", signals), |line| {
            input.digest.add(line);
            input.longest = input.longest.max(line.len() as u64);
            input.ends_with_newline = line.is_empty();
            Ok(())
        })
        .map_err(|failure| match failure {
            Failure::Input(text) => bad(format!("cannot be streamed: {text}")),
            Failure::System(text) => Failure::System(format!("`{shown}`: {text}")),
            // A signal ended the read.
            other => signals.check().err().unwrap_or(other),
        })?;
        signals.check()?;
        // Newlines are between the lines. An empty file has no line.
        input.bytes = input.digest.bytes + input.digest.lines.saturating_sub(1);
        Ok(input)
    }

    /// The number of lines, without an empty one after the last newline.
    pub fn lines(&self) -> u64 {
        self.digest.lines - u64::from(self.ends_with_newline)
    }
}

/// The default file, generated if it is missing or damaged.
pub fn default_input(signals: &Signals) -> Result<Input, Failure> {
    let path = corpus::cache_directory()?.join(corpus::NAME);
    let is_intact = |input: &Input| (input.bytes, input.digest.value()) == corpus::EXPECTED;
    if path.exists() {
        match Input::open(&path, signals) {
            Ok(input) if is_intact(&input) => return Ok(input),
            Ok(_) | Err(Failure::Input(_)) => {
                eprintln!("pelton-demo: `{}` is damaged, generating it again", path.display())
            }
            Err(failure) => return Err(failure),
        }
    }
    let mut progress = Progress::after(progress::DELAY);
    corpus::create(&path, |bytes| {
        progress.update(|seconds| {
            format!("generating the default file: {}", progress::amount(bytes, Some(corpus::BYTES_MIN), seconds))
        });
        signals.check()
    })?;
    drop(progress);
    let input = Input::open(&path, signals)?;
    if !is_intact(&input) {
        let created = (input.bytes, input.digest.value());
        let text = format!(
            "`{}` was generated as {created:?}, expected {:?} (bytes, digest)",
            path.display(),
            corpus::EXPECTED
        );
        return Err(Failure::System(format!("{text}: a fault of memory, disk or this program")));
    }
    Ok(input)
}

/// A reader of a file that shows its progress, and ends after a signal.
pub struct MonitoredReader<'a> {
    file: &'a File,
    bytes: u64,
    done: u64,
    what: &'a str,
    progress: Progress,
    signals: &'a Signals,
}

impl<'a> MonitoredReader<'a> {
    /// Reads `file` from its position, which has `bytes`; `what` names the work.
    pub fn new(file: &'a File, bytes: u64, what: &'a str, signals: &'a Signals) -> MonitoredReader<'a> {
        MonitoredReader { file, bytes, done: 0, what, progress: Progress::after(progress::DELAY), signals }
    }
}

impl Read for MonitoredReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.signals.check().is_err() {
            // The end of the file: the caller checks the signals.
            return Ok(0);
        }
        let count = self.file.read(buffer)?;
        self.done += count as u64;
        self.progress
            .update(|seconds| format!("{}: {}", self.what, progress::amount(self.done, Some(self.bytes), seconds)));
        Ok(count)
    }
}
