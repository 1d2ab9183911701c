//! Engines: operations on files are run, or submitted and taken back as completions.
//!
//! Memory without a release function is counted while an operation uses it. As long as there is some, closing waits:
//! the caller has no other way to know when it is free.

use crate::c::{Array, In, Info, New, OptionalOut, Options, Out, OutArray, Raw, sized_structures, structures};
use crate::code::{self, Answer, armed, done, is_done, wrong};
use crate::entries::entries;
use crate::file::File;
use crate::handle::{Kind, Object};
use crate::operation::{COperation, InUse};
use crate::options::CEngineOptions;
use pelton::file::{Completion, Output, Stat};
use pelton::{Deadline, Error};
use std::collections::HashSet;
use std::ffi::{c_char, c_int};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::time::SystemTime;

pub struct Engine {
    inner: pelton::file::Engine,
    in_use: InUse,
    /// What the completions that were returned last point to.
    results: Vec<Pointee>,
}

/// What a completion points to. Vectors, whose elements stay where they are when these are moved.
enum Pointee {
    Stat { _stat: Vec<CStat> },
    Text { _text: Vec<u8> },
}

impl Object for Engine {
    const KIND: Kind = Kind::Engine;

    fn is_forked(&self) -> bool {
        self.inner.is_forked()
    }
}

/// Waits, whatever is refused meanwhile, for instance memory: until then something else uses what is the caller's.
fn insist(mut wait: impl FnMut() -> pelton::Result<bool>) {
    while wait().is_err() {
        std::thread::yield_now();
    }
}

impl Engine {
    fn run(&mut self, given: &COperation, deadline: Deadline) -> Answer<CFileCompletion> {
        self.results.clear();
        let operation = given.build(&mut self.in_use)?;
        let ended = match deadline {
            Deadline::Never => self.inner.run(operation).map(Some),
            deadline => self.inner.run_until(operation, deadline),
        };
        let is_abandoned = matches!(ended, Ok(None) | Err(Error::System { .. }));
        if is_abandoned && (given.uses_memory_without_release() || given.uses_endpoint()) {
            insist(|| self.inner.wait_given_up());
        }
        self.in_use.give_back_unused();
        match ended {
            Ok(Some(ended)) => Ok(self.completion(given.token, ended)),
            Ok(None) => Err(code::AGAIN),
            Err(error @ Error::File { .. }) => Ok(CFileCompletion::failed(given.token, &error)),
            Err(error) if given.uses_endpoint() => Ok(CFileCompletion::failed(given.token, &error)),
            Err(error) => Err(code::of(&error)),
        }
    }

    /// Submits one operation, or linked ones.
    fn submit(&mut self, linked: &[COperation]) -> Answer {
        let in_flight_max = self.inner.in_flight_max();
        if linked.len() > in_flight_max {
            let count = linked.len();
            let detail = format!("{count} operations are linked, wanted at most {in_flight_max}: raise in_flight_max");
            return Err(code::tell(code::REFUSED, detail));
        }
        if !self.inner.has_free_slots(linked.len()) {
            return Err(code::AGAIN);
        }
        if let [one] = linked {
            let operation = one.build(&mut self.in_use)?;
            let submitted = self.inner.try_submit_unbegun(one.token, operation);
            return is_done(submitted.map(|submitted| submitted.is_submitted()));
        }
        // All are checked before any is built: the release function of what is not accepted must not be called.
        let mut closed = HashSet::new();
        for given in linked {
            given.check(&self.in_use)?;
            if given.files().iter().any(|file| closed.contains(&file.address())) {
                return Err(code::tell(
                    code::CLOSED_HANDLE,
                    "an operation before it in the same links closes the file",
                ));
            }
            closed.extend(given.closes().map(Raw::address));
        }
        let build = |given: &COperation| Ok((given.token, given.build(&mut self.in_use)?));
        let built = linked.iter().map(build).collect::<Answer<Vec<_>>>()?;
        is_done(self.inner.try_submit_chain(built).map(|submitted| submitted.is_submitted()))
    }

    /// Submits as many as fit. Returns their number, and the error of the first that does not.
    fn submit_all(&mut self, given: &[COperation]) -> (usize, Answer) {
        let mut taken = 0;
        let submitted = loop {
            let rest = &given[taken..];
            let Some(last) = rest.iter().position(|operation| !operation.is_linked()) else {
                break match rest {
                    [] => Ok(()),
                    _ => Err(wrong("flags", "PELTON_LINKED in the last operation", "0: none follows")),
                };
            };
            match self.submit(&rest[..=last]) {
                Ok(()) => taken += last + 1,
                Err(code::AGAIN) if taken > 0 => break Ok(()),
                Err(code) => break Err(code),
            }
        };
        // Of those that were not accepted.
        self.in_use.give_back_unused();
        // Also those before an invalid one.
        let started = if taken > 0 { done(self.inner.start_submitted()) } else { Ok(()) };
        (taken, submitted.and(started))
    }

    /// The next completion, if there is one by the deadline.
    fn next(&mut self, deadline: Deadline) -> pelton::Result<Option<CFileCompletion>> {
        let ended = match deadline {
            Deadline::Now => self.inner.try_completion(),
            Deadline::At(instant) => self.inner.completion_until(instant),
            Deadline::Never => self.inner.completion().map(Some),
        }?;
        self.in_use.give_back_unused();
        Ok(ended.map(|ended| self.completion(ended.token, ended)))
    }

    fn completion(&mut self, token: u64, ended: Completion) -> CFileCompletion {
        let count = ended.count() as u64;
        let output = match ended.outcome {
            Ok(output) => output,
            Err(error) => return CFileCompletion::failed(token, &error),
        };
        let error = ended.cut_short_by.as_deref().map_or(0, errno);
        let mut shown = CFileCompletion { token, count, error, ..CFileCompletion::NONE };
        match output {
            Output::File(file) => shown.file = Raw::new(File(file)),
            Output::Stat(stat) => {
                let stat = vec![CStat::of(&stat)];
                shown.stat = stat.as_ptr();
                self.results.push(Pointee::Stat { _stat: stat });
            }
            Output::Path(path) => {
                let mut text = path.into_os_string().into_encoded_bytes();
                shown.text_size = text.len();
                text.push(0);
                self.show_text(&mut shown, text);
            }
            Output::Entries(entries) => {
                let mut text = Vec::new();
                for entry in entries {
                    text.extend_from_slice(&entry.inode.to_le_bytes());
                    text.push(file_kind(entry.kind) as u8);
                    text.extend_from_slice(entry.name.as_bytes());
                    text.push(0);
                }
                shown.text_size = text.len();
                self.show_text(&mut shown, text);
            }
            _ => {}
        }
        shown
    }

    fn show_text(&mut self, shown: &mut CFileCompletion, text: Vec<u8>) {
        shown.text = text.as_ptr().cast();
        self.results.push(Pointee::Text { _text: text });
    }
}

impl Drop for Engine {
    /// Waits only for memory without a release function, and for endpoints.
    fn drop(&mut self) {
        if self.inner.is_forked() {
            return;
        }
        self.in_use.give_back_unused();
        if self.in_use.is_empty() {
            return;
        }
        // What it could not start by now, the wait starts.
        let _ = self.inner.cancel_all();
        // Also operations that have ended but were not taken use memory, which nothing writes any more.
        insist(|| self.inner.wait_idle(None));
        self.in_use.give_back_unused();
    }
}

/// `enum pelton_file_kind`.
fn file_kind(kind: pelton::file::Kind) -> u32 {
    use pelton::file::Kind;
    match kind {
        Kind::File => 1,
        Kind::Directory => 2,
        Kind::Symlink => 3,
        Kind::Fifo => 4,
        Kind::Socket => 5,
        Kind::Character => 6,
        Kind::Block => 7,
        _ => 0,
    }
}

/// Nanoseconds since 1970.
fn since_1970(time: SystemTime) -> i64 {
    let ns = |since: std::time::Duration| i64::try_from(since.as_nanos()).unwrap_or(i64::MAX);
    match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) => ns(since),
        Err(before) => -ns(before.duration()),
    }
}

structures! {
    "pelton_stat" CStat {
        kind: u32,
        mode: u32,
        bytes: u64,
        allocated_bytes: u64,
        links: u64,
        uid: u32,
        gid: u32,
        device_major: u32,
        device_minor: u32,
        inode: u64,
        accessed_ns: i64,
        modified_ns: i64,
        changed_ns: i64,
        created_ns: i64,
    }
}

impl CStat {
    fn of(stat: &Stat) -> CStat {
        CStat {
            kind: file_kind(stat.kind),
            mode: stat.mode,
            bytes: stat.bytes,
            allocated_bytes: stat.allocated_bytes,
            links: stat.links,
            uid: stat.uid,
            gid: stat.gid,
            device_major: stat.device.0,
            device_minor: stat.device.1,
            inode: stat.inode,
            accessed_ns: since_1970(stat.accessed),
            modified_ns: since_1970(stat.modified),
            changed_ns: since_1970(stat.changed),
            created_ns: stat.created.map_or(i64::MIN, since_1970),
        }
    }
}

structures! {
    "pelton_file_completion" CFileCompletion {
        token: u64,
        code: i32,
        error: i32,
        count: u64,
        file: Raw<File>,
        stat: *const CStat,
        text: *const c_char,
        text_size: usize,
    }
}

impl CFileCompletion {
    const NONE: CFileCompletion = CFileCompletion {
        token: 0,
        code: 0,
        error: 0,
        count: 0,
        file: Raw::NULL,
        stat: std::ptr::null(),
        text: std::ptr::null(),
        text_size: 0,
    };

    fn failed(token: u64, error: &Error) -> CFileCompletion {
        let (code, error) = match error {
            Error::File { .. } | Error::System { .. } => (code::SYSTEM, errno(error)),
            of_channel => (code::of(of_channel), 0),
        };
        CFileCompletion { token, code, error, ..CFileCompletion::NONE }
    }
}

/// The kernel's number; of a channel's error EPIPE.
fn errno(error: &Error) -> c_int {
    match error {
        Error::File { error, .. } | Error::System { error, .. } => error.raw_os_error().unwrap_or(libc::EIO),
        _ => libc::EPIPE,
    }
}

sized_structures! {
    "pelton_engine_info" EngineInfo {
        reserved: u32,
        in_flight: u64,
    }
}

entries! {
    fn pelton_engine_open(options: Options<CEngineOptions>, out: New<Engine>) {
        let inner = done(options.build()?.build())?;
        out.give(Engine { inner, in_use: InUse::default(), results: Vec::new() })
    }

    fn pelton_engine_run(
        engine: &mut Engine,
        operation: In<COperation>,
        deadline_ns: Deadline,
        out: OptionalOut<CFileCompletion>,
    ) {
        if operation.is_linked() {
            return Err(wrong("flags", "PELTON_LINKED", "0: one operation is run at a time"));
        }
        if operation.opens() && out.is_none() {
            return Err(code::null("out, of an operation that opens,"));
        }
        let completion = engine.run(operation, deadline_ns)?;
        let (code, error) = (completion.code, completion.error);
        if let Some(out) = out {
            out.write(completion);
        }
        match code {
            0 => Ok(()),
            code::SYSTEM => Err(code::system(error, "the operation failed")),
            of_channel => Err(of_channel),
        }
    }

    fn pelton_engine_submit(engine: &mut Engine, operations[count]: Array<COperation>, taken: Out<usize>) {
        let (submitted, result) = engine.submit_all(operations);
        taken.write(submitted);
        result
    }

    fn pelton_engine_completions(
        engine: &mut Engine,
        deadline_ns: Deadline,
        out[count]: OutArray<CFileCompletion>,
        taken: Out<usize>,
    ) {
        let count = engine.completions(deadline_ns, out)?;
        taken.write(count);
        Ok(())
    }

    fn pelton_engine_cancel(engine: &mut Engine, token: u64) {
        is_done(engine.inner.cancel(token))
    }

    fn pelton_engine_wait_idle(engine: &mut Engine, deadline_ns: Deadline) {
        is_done(engine.inner.wait_idle(deadline_ns.instant()))
    }

    fn pelton_engine_fd(engine: &mut Engine) {
        Ok(engine.inner.as_raw_fd())
    }

    fn pelton_engine_poll(engine: &mut Engine) {
        is_done(engine.inner.busy_poll())
    }

    fn pelton_engine_arm(engine: &mut Engine) {
        armed(engine.inner.arm())
    }

    fn pelton_engine_disarm(engine: &mut Engine) {
        engine.inner.disarm();
        Ok(())
    }

    fn pelton_engine_get_info(engine: &mut Engine, out: Info<EngineInfo>) {
        out.write(EngineInfo { struct_bytes: 0, reserved: 0, in_flight: engine.inner.in_flight() as u64 })
    }
}

impl Engine {
    /// Takes the completions that are there; waits for the first.
    fn completions(&mut self, deadline: Deadline, out: &mut [MaybeUninit<CFileCompletion>]) -> Answer<usize> {
        self.results.clear();
        if out.is_empty() {
            return Err(code::plain(code::TOO_SMALL));
        }
        let mut count = 0;
        while let Some(place) = out.get_mut(count) {
            match self.next(if count == 0 { deadline } else { Deadline::Now }) {
                Ok(Some(completion)) => place.write(completion),
                Ok(None) => break,
                // The next call returns it.
                Err(_) if count > 0 => break,
                Err(error) => return Err(code::of(&error)),
            };
            count += 1;
        }
        if count > 0 { Ok(count) } else { Err(code::AGAIN) }
    }
}
