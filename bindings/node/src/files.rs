//! What `lib/fs.js` is made of: the engine of file operations of an environment, and its open files.
//!
//! An operation's memory is its own, and is copied from and to JavaScript's: an environment may end, with its memory,
//! while the kernel still reads or writes.

use crate::endpoint::{Armable, AsRawFdOfLoop, Handle, methods};
use crate::error::{named, raise};
use napi::bindgen_prelude::*;
use napi_derive::napi;
use pelton::file::{Completion, Engine, File, Kind, Open, Operation, Output, Submitted};
use std::collections::{HashSet, VecDeque};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

/// The engine, and what its calls have not returned yet.
pub struct State {
    engine: Engine,
    /// Operations for which the engine has no space yet.
    waiting: VecDeque<(u64, Operation)>,
    /// Completions that another operation's beginning found.
    found: VecDeque<Completion>,
    /// The tokens of the reads that have not ended: their result is their memory.
    reads: HashSet<u64>,
}

impl AsRawFdOfLoop for State {
    fn fd(&self) -> i32 {
        self.engine.as_raw_fd()
    }
}

impl Armable for State {
    fn arm(&mut self, _bytes: usize) -> pelton::Result<bool> {
        Ok(self.found.is_empty() && self.engine.arm()?.is_waiting())
    }
    fn disarm(&mut self) {
        self.engine.disarm();
    }
}

impl State {
    /// Begins an operation. Returns its completion if it has ended within the call.
    fn begin(&mut self, token: u64, operation: Operation) -> pelton::Result<Option<Completion>> {
        match self.engine.try_submit(token, operation)? {
            Submitted::Submitted => {}
            Submitted::Full(operation) => self.waiting.push_back((token, operation)),
        }
        // The operation has begun, so an error of the engine is not its result: the loop finds that error again.
        while let Ok(Some(completion)) = self.engine.try_completion() {
            if completion.token == token {
                return Ok(Some(completion));
            }
            self.found.push_back(completion);
        }
        Ok(None)
    }

    /// The next completion. Begins the operations for which there is space then.
    fn completion(&mut self) -> pelton::Result<Option<Completion>> {
        let completion = match self.found.pop_front() {
            None => self.engine.try_completion()?,
            found => found,
        };
        while self.engine.has_free_slots(1)
            && let Some((token, operation)) = self.waiting.pop_front()
        {
            if let Submitted::Full(operation) = self.engine.try_submit(token, operation)? {
                self.waiting.push_front((token, operation));
                break;
            }
        }
        Ok(completion)
    }
}

/// The file operations of an environment.
#[napi]
pub struct Files(Handle<State>);

methods!(Files);

/// An open file.
#[napi]
pub struct OpenFile(Option<File>);

impl OpenFile {
    fn opened(&self) -> Result<&File> {
        self.0.as_ref().ok_or_else(|| named("closed_handle", "this file is closed: open it again"))
    }
}

#[napi]
impl OpenFile {
    /// Its descriptor; -1 once it is closed.
    #[napi(getter)]
    pub fn fd(&self) -> i32 {
        self.0.as_ref().map_or(-1, |file| file.as_fd().as_raw_fd())
    }
}

/// The properties of a file, as `fs.Stats` names them. `kind` is the file's type in `st_mode`.
#[napi(object)]
pub struct Properties {
    pub kind: u32,
    pub mode: u32,
    pub size: f64,
    pub blocks: f64,
    pub nlink: f64,
    pub uid: u32,
    pub gid: u32,
    pub dev: f64,
    pub ino: f64,
    pub atime_ms: f64,
    pub mtime_ms: f64,
    pub ctime_ms: f64,
    pub birthtime_ms: f64,
}

/// As in `st_mode`.
fn number_of(kind: Kind) -> u32 {
    match kind {
        Kind::File => 0o100_000,
        Kind::Directory => 0o040_000,
        Kind::Symlink => 0o120_000,
        Kind::Fifo => 0o010_000,
        Kind::Socket => 0o140_000,
        Kind::Character => 0o020_000,
        Kind::Block => 0o060_000,
        _ => 0,
    }
}

fn ms(time: SystemTime) -> f64 {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => after.as_secs_f64() * 1e3,
        Err(before) => before.duration().as_secs_f64() * -1e3,
    }
}

/// A value of JavaScript, of something that napi-rs can convert.
fn value<'env, T: ToNapiValue>(env: &'env Env, of: T) -> Result<Unknown<'env>> {
    // SAFETY: this is the environment's thread.
    unsafe { Ok(Unknown::from_raw_unchecked(env.raw(), T::to_napi_value(env.raw(), of)?)) }
}

/// What the caller of an operation gets: bytes of a read, a number, a file, and so on; true if there is nothing.
fn result<'env>(env: &'env Env, completion: Completion, is_read: bool) -> Result<Unknown<'env>> {
    let Completion { outcome, buffer, cut_short_by, .. } = completion;
    match outcome.map_err(raise)? {
        Output::Done => value(env, true),
        // Of a read that an error has cut short, the next one returns the error.
        Output::Count(count) if is_read => {
            let mut bytes = buffer.into_vec();
            bytes.truncate(count);
            value(env, BufferSlice::from_data(env, bytes)?)
        }
        Output::Count(count) => match cut_short_by {
            Some(error) => Err(raise(*error)),
            None => value(env, count as f64),
        },
        Output::File(file) => value(env, OpenFile(Some(file))),
        Output::Stat(stat) => value(
            env,
            Properties {
                kind: number_of(stat.kind),
                mode: stat.mode | number_of(stat.kind),
                size: stat.bytes as f64,
                blocks: (stat.allocated_bytes / 512) as f64,
                nlink: stat.links as f64,
                uid: stat.uid,
                gid: stat.gid,
                dev: rustix::fs::makedev(stat.device.0, stat.device.1) as f64,
                ino: stat.inode as f64,
                atime_ms: ms(stat.accessed),
                mtime_ms: ms(stat.modified),
                ctime_ms: ms(stat.changed),
                birthtime_ms: stat.created.map_or(0.0, ms),
            },
        ),
        Output::Entries(entries) => {
            let named = |entry: pelton::file::Entry| -> Result<(BufferSlice<'env>, u32)> {
                Ok((BufferSlice::from_data(env, OsStringExt::into_vec(entry.name))?, number_of(entry.kind)))
            };
            value(env, entries.into_iter().map(named).collect::<Result<Vec<_>>>()?)
        }
        Output::Path(path) => value(env, BufferSlice::from_data(env, OsStringExt::into_vec(path.into_os_string()))?),
        other => Err(named("internal", &format!("found {other:?}, which no operation here returns: report this bug"))),
    }
}

fn path(bytes: &[u8]) -> PathBuf {
    PathBuf::from(std::ffi::OsStr::from_bytes(bytes))
}

impl Files {
    fn begin<'env>(&self, env: &'env Env, token: f64, operation: Operation) -> Result<Option<Unknown<'env>>> {
        let completion = self.0.borrow()?.get()?.begin(token as u64, operation).map_err(raise)?;
        completion.map(|completion| result(env, completion, false)).transpose()
    }
}

/// Makes the engine of this environment.
#[napi]
pub fn files() -> Result<Files> {
    let engine = Engine::new().map_err(raise)?;
    Ok(Files(Handle::new(
        "engine",
        State { engine, waiting: VecDeque::new(), found: VecDeque::new(), reads: HashSet::new() },
    )))
}

/// Each method that begins an operation returns its result if it has ended within the call. Otherwise null: then
/// `completions` returns it, with its token.
#[napi]
impl Files {
    /// Opens a file with the flags of open(2).
    #[napi]
    pub fn open<'env>(
        &self,
        env: &'env Env,
        token: f64,
        at: &[u8],
        flags: u32,
        mode: u32,
    ) -> Result<Option<Unknown<'env>>> {
        self.begin(env, token, Operation::open(path(at), Open::from_raw(flags, mode, 0)))
    }

    /// Reads up to `bytes`, at the file's own position unless one is given: the bytes.
    #[napi]
    pub fn read<'env>(
        &self,
        env: &'env Env,
        token: f64,
        file: &OpenFile,
        bytes: u32,
        position: Option<f64>,
    ) -> Result<Option<Unknown<'env>>> {
        let (file, memory) = (file.opened()?, vec![0; bytes as usize]);
        let operation = match position {
            Some(position) => Operation::read_at(file, memory, position as u64),
            None => Operation::read(file, memory),
        };
        let mut endpoint = self.0.borrow()?;
        let (state, token) = (endpoint.get()?, token as u64);
        match state.begin(token, operation).map_err(raise)? {
            Some(completion) => result(env, completion, true).map(Some),
            None => {
                state.reads.insert(token);
                Ok(None)
            }
        }
    }

    /// Writes all of `data`, at the file's own position unless one is given.
    #[napi]
    pub fn write<'env>(
        &self,
        env: &'env Env,
        token: f64,
        file: &OpenFile,
        data: &[u8],
        position: Option<f64>,
    ) -> Result<Option<Unknown<'env>>> {
        let (file, memory) = (file.opened()?, data.to_vec());
        let operation = match position {
            Some(position) => Operation::write_at(file, memory, position as u64),
            None => Operation::write(file, memory),
        };
        self.begin(env, token, operation)
    }

    /// An operation on an open file.
    #[napi]
    pub fn on_file<'env>(
        &self,
        env: &'env Env,
        token: f64,
        what: String,
        file: &OpenFile,
        bytes: Option<f64>,
    ) -> Result<Option<Unknown<'env>>> {
        let file = file.opened()?;
        let operation = match &what[..] {
            "fstat" => Operation::stat_file(file),
            "fsync" => Operation::sync(file),
            "fdatasync" => Operation::sync_data(file),
            "ftruncate" => Operation::truncate(file, bytes.unwrap_or_default() as u64),
            "scandir" => Operation::list(file),
            _ => return Err(named("internal", &format!("no operation {what}: report this bug"))),
        };
        self.begin(env, token, operation)
    }

    /// Copies a file to another, both from their beginning.
    #[napi]
    pub fn copy<'env>(
        &self,
        env: &'env Env,
        token: f64,
        from: &OpenFile,
        to: &OpenFile,
    ) -> Result<Option<Unknown<'env>>> {
        self.begin(env, token, Operation::copy(from.opened()?, 0, to.opened()?, 0, u64::MAX))
    }

    /// Closes a file, once the operations on it have ended.
    #[napi]
    pub fn close_file<'env>(&self, env: &'env Env, token: f64, file: &mut OpenFile) -> Result<Option<Unknown<'env>>> {
        file.opened()?;
        match file.0.take() {
            Some(opened) => self.begin(env, token, Operation::close(opened)),
            None => Ok(None),
        }
    }

    /// An operation on a path, or two.
    #[napi]
    pub fn on_path<'env>(
        &self,
        env: &'env Env,
        token: f64,
        what: String,
        at: &[u8],
        other: Option<&[u8]>,
        mode: Option<u32>,
    ) -> Result<Option<Unknown<'env>>> {
        let (at, other) = (path(at), path(other.unwrap_or_default()));
        let operation = match &what[..] {
            "stat" => Operation::stat(at),
            "lstat" => Operation::stat_link(at),
            "unlink" => Operation::unlink(at),
            "rmdir" => Operation::remove_directory(at),
            "mkdir" => Operation::make_directory(at, mode.unwrap_or(0o777)),
            "rename" => Operation::rename(at, other),
            "link" => Operation::link(at, other),
            "symlink" => Operation::symlink(at, other),
            "readlink" => Operation::read_link(at),
            _ => return Err(named("internal", &format!("no operation {what}: report this bug"))),
        };
        self.begin(env, token, operation)
    }

    /// Operations that have ended: for each the token, whether it has failed, and its result or its error.
    #[napi]
    pub fn completions<'env>(&self, env: &'env Env) -> Result<Vec<(f64, bool, Unknown<'env>)>> {
        let mut ended = Vec::new();
        loop {
            let mut endpoint = self.0.borrow()?;
            let state = endpoint.get()?;
            let completion = match state.completion() {
                Ok(Some(completion)) => completion,
                Ok(None) => return Ok(ended),
                Err(error) if ended.is_empty() => return Err(raise(error)),
                // The next call returns it again: what has ended comes first.
                Err(_) => return Ok(ended),
            };
            let is_read = state.reads.remove(&completion.token);
            let token = completion.token as f64;
            ended.push(match result(env, completion, is_read) {
                Ok(found) => (token, false, found),
                Err(error) => (token, true, JsError::from(error).into_unknown(*env)),
            });
        }
    }

    /// Waits for a completion; false if there is one.
    #[napi]
    pub fn wait(&self) -> Result<bool> {
        self.0.borrow()?.wait(0)
    }
}
