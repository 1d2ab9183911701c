//! What pelton's calls are compared with: a request queue to a handler thread of the caller's own process, in C, with
//! the handler in C or in Go. bindings/c/bench/queue/queue.h has its description. Each request is passed by its
//! address, and each reply is read where the handler has written it.

use std::{
    ffi::{c_char, c_void},
    io,
    path::PathBuf,
    slice,
};

use anyhow::{Result, ensure};

use crate::{
    compiled,
    parameters::Job,
    side::pin,
    systems::peers,
    workloads::call::{Asking, ask},
};

/// All of the library with a handler in C; that in Go is built from the same directory.
const SOURCES: [&str; 4] = [
    include_str!("../../../../bindings/c/bench/queue/queue.h"),
    include_str!("../../../../bindings/c/bench/queue/queue.c"),
    include_str!("../../../../bindings/c/bench/queue/caller.c"),
    include_str!("../../../../bindings/c/bench/queue/handler.c"),
];
/// Their directory.
const DIRECTORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../bindings/c/bench/queue");

/// `struct queue_call` of queue.h, up to its last field that is read here.
#[repr(C)]
struct Call {
    next: *mut Call,
    request: *const c_char,
    request_size: usize,
    reply: *const u8,
    reply_size: usize,
}

type CallerCall = unsafe extern "C" fn(*mut c_void, *const u8, usize) -> *mut Call;

/// The part of caller and handler.
pub fn part(job: &Job) -> Result<()> {
    ask(job, Queue::new(job)?)
}

/// Builds the library with the handler in Go, unless that is done.
pub fn build_go() -> Result<()> {
    peers::build_go_library("queue", DIRECTORY)
}

/// The library of that system; that in C is built unless it exists already.
pub fn library(system: &str) -> Result<PathBuf> {
    if system == "queue-go" {
        return peers::go_library("queue");
    }
    let include = format!("-I{DIRECTORY}");
    compiled::compile("queue", &SOURCES[1..].concat(), &["-O2", "-shared", "-fPIC", "-pthread", &include], &[])
}

/// The caller. Its process also has the handler.
pub struct Queue {
    caller: *mut c_void,
    call: CallerCall,
    end: unsafe extern "C" fn(*mut c_void),
}

impl Queue {
    /// Starts the handler, on the first CPU if they are pinned, and stays on the second.
    pub fn new(job: &Job) -> Result<Queue> {
        ensure!(
            job.calls.one_by_one() && job.idle == 0 && job.delay_us == 0,
            "the queue has one caller and one call at a time: leave out --clients, --in-flight, --beside-flood and --delay"
        );
        let place = library(&job.system)?;
        // All threads of the library are the calling thread's, and inherit its CPU.
        if let Some(cpu) = job.cpus.first() {
            pin(*cpu)?;
        }
        let library = compiled::load(place)?;
        // SAFETY: queue.h has these functions with these types.
        let (open, call, end) = unsafe {
            let open = *library.get::<unsafe extern "C" fn() -> *mut c_void>(b"caller_open")?;
            (open, *library.get(b"caller_call")?, *library.get(b"caller_end")?)
        };
        // SAFETY: it needs nothing.
        let caller = unsafe { open() };
        ensure!(!caller.is_null(), "opening the queue: {}", io::Error::last_os_error());
        if let Some(cpu) = job.cpus.get(1) {
            pin(*cpu)?;
        }
        Ok(Queue { caller, call, end })
    }
}

impl Asking for Queue {
    /// The handler does not write to the reply any more.
    #[inline]
    fn call<R>(&mut self, request: &[u8], inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        // SAFETY: the caller is open, and the request lives until its reply.
        let call = unsafe { (self.call)(self.caller, request.as_ptr(), request.len()) };
        ensure!(!call.is_null(), "waiting for a reply: {}", io::Error::last_os_error());
        // SAFETY: a call's reply is valid until the next call, and has this size.
        Ok(inspect(unsafe { slice::from_raw_parts((*call).reply, (*call).reply_size) }))
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: the caller is open, and its memory stays.
        unsafe { (self.end)(self.caller) };
    }
}
