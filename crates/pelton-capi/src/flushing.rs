//! Sinks, flushing what a receiver takes in, and appending.

use crate::code::{self, Answer};
use crate::handle::give;
use crate::handle::{Handle, Object, call, catch, number, share, take};
use crate::options::{self, COptions, deadline, path, wrong};
use crate::receiving::Receiving;
use crate::sending::{self, Open, Sends, bytes};
use pelton::raw::ReservedSpace;
use pelton::{Appender, Appenders, Chunk, Flush, LaneId, Options, Peer, RecordFile, RecordFileOptions, Sender, Sink};
use std::ffi::{c_char, c_int, c_void};

/// `pelton_run`.
#[repr(C)]
pub struct CRun {
    lane_id: [u64; 2],
    bytes: *const c_void,
    size: usize,
    first_seq: u32,
    messages: u32,
    pid: u32,
    uid: u32,
}

const _: () = assert!(size_of::<CRun>() == 48);

impl CRun {
    fn of(run: &Chunk<'_>) -> CRun {
        let (LaneId(lane_id), (pid, uid)) = (run.lane(), numbers(run.peer()));
        let bytes = run.bytes();
        CRun {
            lane_id,
            bytes: bytes.as_ptr().cast(),
            size: bytes.len(),
            first_seq: run.first_seq(),
            messages: run.message_count(),
            pid,
            uid,
        }
    }
}

/// A process and its user as C has them, who may be unknown.
pub fn numbers(peer: Option<Peer>) -> (u32, u32) {
    peer.map_or((0, u32::MAX), |peer| (peer.pid, peer.uid))
}

type Write = unsafe extern "C" fn(*mut c_void, *const CRun, usize) -> c_int;

/// `pelton_sink`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CSink {
    struct_bytes: u32,
    reserved: u32,
    write: Option<Write>,
    context: *mut c_void,
    path: *const c_char,
    rotate_bytes: u64,
    sync_bytes: u64,
    sync_interval_ns: i64,
}

const _: () = assert!(size_of::<CSink>() == 56);

/// A function of the caller's.
struct Callback {
    write: Write,
    context: *mut c_void,
    /// Kept for its memory.
    runs: Vec<CRun>,
}

// SAFETY: the header says that any thread may call it, one at a time; the runs are nobody's between calls.
unsafe impl Send for Callback {}

impl Sink for Callback {
    fn write(&mut self, runs: &[Chunk<'_>]) -> pelton::Result<()> {
        self.runs.clear();
        self.runs.extend(runs.iter().map(CRun::of));
        // SAFETY: the caller's function, called as the header says.
        let answered = unsafe { (self.write)(self.context, self.runs.as_ptr(), self.runs.len()) };
        if answered < 0 { Err(code::sink_error(answered)) } else { Ok(()) }
    }
}

/// What a `pelton_sink` says.
enum Given {
    Callback(Callback),
    File(Box<RecordFile>),
}

impl Given {
    /// # Safety
    /// `sink` is NULL, or as the header says.
    unsafe fn of(sink: *const CSink) -> Answer<Given> {
        if sink.is_null() {
            return Err(code::null("sink"));
        }
        // SAFETY: the caller's promise; NULLs and zeros are one.
        let sink = unsafe { options::copied(sink, size_of::<CSink>(), "pelton_sink: begin with PELTON_SINK_INIT")? };
        if sink.reserved != 0 {
            return Err(wrong("reserved", sink.reserved, "0: begin with PELTON_SINK_INIT"));
        }
        match sink.write {
            Some(write) if sink.path.is_null() => {
                Ok(Given::Callback(Callback { write, context: sink.context, runs: Vec::new() }))
            }
            // SAFETY: the caller's promise.
            None if !sink.path.is_null() => Ok(Given::File(Box::new(unsafe { sink.file()? }))),
            _ => Err(code::tell(code::OPTION, "a sink has either write or path, wanted one of them")),
        }
    }

    fn flush(self, options: &Options, receiver: pelton::Receiver) -> pelton::Result<Flush> {
        match self {
            Given::Callback(callback) => Flush::new(&options.cast(), receiver, callback),
            Given::File(file) => Flush::new(&options.cast(), receiver, *file),
        }
    }

    fn append(self, options: &Options) -> pelton::Result<Appenders> {
        match self {
            Given::Callback(callback) => Appenders::new(&options.cast(), callback),
            Given::File(file) => Appenders::new(&options.cast(), *file),
        }
    }
}

impl CSink {
    /// # Safety
    /// `path` is a string.
    unsafe fn file(&self) -> Answer<RecordFile> {
        let mut made = RecordFileOptions::new();
        if self.rotate_bytes != 0 {
            made = made.rotate_bytes(self.rotate_bytes);
        }
        made = match self.sync_bytes {
            0 => made,
            // PELTON_EACH_WRITE.
            u64::MAX => made.sync_bytes(0),
            bytes => made.sync_bytes(bytes),
        };
        if self.sync_interval_ns != 0 {
            made = made.sync_interval(options::interval("sync_interval_ns", self.sync_interval_ns)?);
        }
        // SAFETY: the caller's promise.
        made.open(unsafe { path(self.path) }).map_err(|error| code::of(&error))
    }
}

/// A flush behind a handle.
pub struct Flushing(Flush);

impl Object for Flushing {
    const KIND: &'static str = "flush";

    fn is_forked(&self) -> bool {
        self.0.is_forked()
    }

    fn is_free(&self) -> bool {
        true
    }
}

impl Flushing {
    pub fn now(&mut self) -> Answer {
        self.0.flush().map_err(|error| code::of(&error))
    }

    pub fn sync(&mut self) -> Answer {
        self.0.sync().map_err(|error| code::of(&error))
    }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_flush_open(
    receiver: *mut Handle<Receiving>,
    options: *const COptions,
    sink: *const CSink,
    out: *mut *mut Handle<Flushing>,
) -> c_int {
    let open = || {
        let sure = |receiving: &mut Receiving| {
            receiving.free()?;
            // SAFETY: the caller's promises.
            let (options, _) = unsafe { options::of(options)? };
            Flush::check_options(&options.cast()).map_err(|error| code::of(&error))?;
            // SAFETY: the caller's promises.
            Ok((options, unsafe { Given::of(sink)? }))
        };
        // SAFETY: the caller's promises.
        let (receiving, (options, sink)) = unsafe { take(receiver, sure)? };
        sink.flush(&options, receiving.into_receiver()).map(Flushing).map_err(|error| code::of(&error))
    };
    // SAFETY: the caller's promises.
    number(catch(|| unsafe { give(out, open) }))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_flush_run(flush: *mut Handle<Flushing>, deadline_ns: i64) -> c_int {
    let run = |flushing: &mut Flushing| {
        code::came(match deadline(deadline_ns).instant() {
            Some(instant) => flushing.0.run_until(instant),
            None => flushing.0.run().map(|()| true),
        })
    };
    // SAFETY: the caller's promises.
    unsafe { call(flush, run) }
}

/// What makes appenders, behind a handle.
pub struct Making(Appenders);

impl Object for Making {
    const KIND: &'static str = "appenders";

    fn is_forked(&self) -> bool {
        self.0.is_forked()
    }

    fn is_free(&self) -> bool {
        true
    }
}

impl Making {
    pub fn now(&self) -> Answer {
        self.0.flush().map_err(|error| code::of(&error))
    }

    pub fn sync(&self) -> Answer {
        self.0.sync().map_err(|error| code::of(&error))
    }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_appenders_open(
    options: *const COptions,
    sink: *const CSink,
    out: *mut *mut Handle<Making>,
) -> c_int {
    let open = || {
        // SAFETY: the caller's promises.
        let ((options, _), sink) = unsafe { (options::of(options)?, Given::of(sink)?) };
        sink.append(&options).map(Making).map_err(|error| code::of(&error))
    };
    // SAFETY: the caller's promises.
    number(catch(|| unsafe { give(out, open) }))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_appenders_append(
    appenders: *mut Handle<Making>,
    data: *const c_void,
    size: usize,
) -> c_int {
    let append = |making: &Making| {
        // SAFETY: the caller's promise.
        making.0.append(unsafe { bytes(data, size)? }).map_err(|error| code::of(&error))
    };
    // SAFETY: the caller's promises.
    number(unsafe { share(appenders, append) })
}

/// An appender behind a handle.
pub struct Appending {
    appender: Appender,
    open: Open,
}

impl Object for Appending {
    const KIND: &'static str = "appender";

    fn is_forked(&self) -> bool {
        self.appender.is_forked()
    }

    fn is_free(&self) -> bool {
        self.open.is_none()
    }

    fn has_one(&self) -> bool {
        self.open.is_some()
    }
}

impl Sends for Appending {
    #[inline(always)]
    fn parts(&mut self) -> (&mut Sender, &mut Open) {
        (self.appender.sender(), &mut self.open)
    }

    /// By flushing, if need be.
    fn find_room(&mut self, size: usize, _deadline_ns: i64) -> Answer<ReservedSpace> {
        self.appender.reserve_space(size).map_err(|error| code::of(&error))
    }
}

type Handled = *mut Handle<Appending>;

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_appender_open(appenders: *mut Handle<Making>, out: *mut Handled) -> c_int {
    let open = |making: &Making| {
        let make = || making.0.appender().map_err(|error| code::of(&error));
        // SAFETY: the caller's promise.
        unsafe { give(out, || make().map(|appender| Appending { appender, open: None })) }
    };
    // SAFETY: the caller's promises.
    number(unsafe { share(appenders, open) })
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_append(appender: Handled, data: *const c_void, size: usize) -> c_int {
    // SAFETY: the caller's promises.
    unsafe {
        match sending::send_at_once(appender, data, size) {
            Some(answer) => answer,
            None => append_slowly(appender, data, size),
        }
    }
}

#[cold]
#[inline(never)]
unsafe fn append_slowly(appender: Handled, data: *const c_void, size: usize) -> c_int {
    let append = |appending: &mut Appending| {
        appending.free()?;
        // SAFETY: the caller's promise.
        appending.appender.append(unsafe { bytes(data, size)? }).map_err(|error| code::of(&error))
    };
    // SAFETY: the caller's promises.
    unsafe { call(appender, append) }
}
