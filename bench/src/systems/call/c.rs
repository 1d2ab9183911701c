//! pelton's calls by a C program: c/call.c, compiled at its first use. The clock and the checks are this program's.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    ptr, slice,
};

use anyhow::{Result, anyhow, ensure};

use crate::{
    endpoints::CONNECT,
    parameters::{Job, Wait},
    systems::c,
    workloads::call::{Asking, Serving, Tally},
};

const SOURCE: &str = include_str!("../../../c/call.c");

/// `struct side` of call.c.
#[repr(C)]
struct Shared {
    name: *const c_char,
    capacity: u64,
    connect_ns: i64,
    how: u32,
    client: *mut c_void,
    service: *mut c_void,
    epoll: c_int,
    error: [c_char; 512],
}

type Simple = unsafe extern "C" fn(*mut Shared) -> c_int;
type Make = unsafe extern "C" fn(*mut Shared, *const u8, usize, *mut *const u8, *mut usize) -> c_int;
type Serve = unsafe extern "C" fn(*mut Shared, *mut u64, *mut u64) -> c_int;

/// Compiles the shared object, unless it exists already.
pub fn compile() -> Result<std::path::PathBuf> {
    c::compile_source("call.c", SOURCE)
}

/// A client or a service, in C.
pub struct CSide {
    shared: Box<Shared>,
    make: Make,
    release: Simple,
    end_pass: Simple,
    serve: Serve,
    close: unsafe extern "C" fn(*mut Shared),
    /// A service in Go counts the calls of a pass, and needs no notification.
    ends_passes: bool,
    /// What `shared` points at
    _name: CString,
}

impl CSide {
    /// Connects; waits for the service to listen.
    pub fn client(job: &Job) -> Result<CSide> {
        CSide::open(job, c"call_connect")
    }

    /// Listens.
    pub fn service(job: &Job) -> Result<CSide> {
        CSide::open(job, c"call_listen")
    }

    fn open(job: &Job, by: &CStr) -> Result<CSide> {
        ensure!(
            job.calls.one_by_one() && job.calls.rate.is_none() && job.idle == 0 && job.delay_us == 0,
            "its sides in C have one call at a time, as fast as they go: leave out --clients, --in-flight, --rate, --delay and --beside-flood"
        );
        ensure!(
            !matches!(job.wait, Wait::Uv | Wait::UvBulk),
            "its calls in C are not in libuv's loop: write spin, block or epoll"
        );
        let in_go = job.system == "pelton-c-go";
        // The name of the service in Go is that of bindings/go/bench.
        let place = job.directory.join(if in_go { "there" } else { "service" });
        let name = CString::new(format!("unix:{}", place.display()))?;
        let library = c::load_with_pelton(&compile()?)?;
        let shared = Box::new(Shared {
            name: name.as_ptr(),
            capacity: job.capacity,
            connect_ns: CONNECT.as_nanos() as i64,
            how: job.wait as u32,
            client: ptr::null_mut(),
            service: ptr::null_mut(),
            epoll: -1,
            error: [0; 512],
        });
        // SAFETY: call.c has these functions with these types.
        let (open, mut side): (Simple, CSide) = unsafe {
            let side = CSide {
                shared,
                make: c::function(library, c"call_make")?,
                release: c::function(library, c"call_release")?,
                end_pass: c::function(library, c"call_end_pass")?,
                serve: c::function(library, c"call_serve")?,
                close: c::function(library, c"call_close")?,
                ends_passes: !in_go,
                _name: name,
            };
            (c::function(library, by)?, side)
        };
        // SAFETY: all of its first part is filled in, and stays where it is.
        let code = unsafe { open(&mut *side.shared) };
        side.answer(code)?;
        Ok(side)
    }

    #[inline]
    fn answer(&self, code: c_int) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.error()) }
    }

    #[cold]
    fn error(&self) -> anyhow::Error {
        // SAFETY: call.c terminates the text by a zero, and the buffer begins as one.
        anyhow!("{}", unsafe { CStr::from_ptr(self.shared.error.as_ptr()) }.to_string_lossy())
    }
}

impl Asking for CSide {
    /// The reply is in place: its service does not write to it any more.
    #[inline]
    fn call<R>(&mut self, request: &[u8], inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let (mut reply, mut size) = (ptr::null(), 0);
        // SAFETY: the side is connected, the request is valid, and so are the places for the reply.
        let code = unsafe { (self.make)(&mut *self.shared, request.as_ptr(), request.len(), &mut reply, &mut size) };
        self.answer(code)?;
        // SAFETY: call.c has returned a reply, never NULL, which is valid until its release.
        let seen = inspect(unsafe { slice::from_raw_parts(reply, size) });
        // SAFETY: there is a reply to release.
        let code = unsafe { (self.release)(&mut *self.shared) };
        self.answer(code)?;
        Ok(seen)
    }

    fn end_pass(&mut self) -> Result<()> {
        if !self.ends_passes {
            return Ok(());
        }
        // SAFETY: the side is connected.
        let code = unsafe { (self.end_pass)(&mut *self.shared) };
        self.answer(code)
    }
}

impl Serving for CSide {
    fn serve(&mut self, _count: u64) -> Result<Tally> {
        let (mut count, mut bytes) = (0, 0);
        // SAFETY: the side listens, and the places for the sums are valid.
        let code = unsafe { (self.serve)(&mut *self.shared, &mut count, &mut bytes) };
        self.answer(code)?;
        Ok(Tally::of(count, bytes))
    }
}

impl Drop for CSide {
    fn drop(&mut self) {
        // SAFETY: the side is closed once; NULL is allowed.
        unsafe { (self.close)(&mut *self.shared) };
    }
}
