//! pelton's calls by a C program: side.c. The clock and the checks are this program's.

use std::{ffi::c_int, ptr, slice};

use anyhow::{Result, ensure};

use crate::{
    parameters::Job,
    systems::c::{CSide, Shared},
    workloads::call::{Asking, Serving, Tally},
};

type Simple = unsafe extern "C" fn(*mut Shared) -> c_int;
type Call = unsafe extern "C" fn(*mut Shared, *const u8, usize, *mut *const u8, *mut usize) -> c_int;
type Serve = unsafe extern "C" fn(*mut Shared, *mut u64, *mut u64) -> c_int;

/// A client or a service, in C.
pub struct CCalls {
    side: CSide,
    call: Call,
    release: Simple,
    end_pass: Simple,
    serve: Serve,
    /// A service in Go counts the calls of a pass, and needs no notification.
    ends_passes: bool,
}

impl CCalls {
    /// Connects or listens, as the job says.
    pub fn open(job: &Job) -> Result<CCalls> {
        ensure!(
            job.calls.one_by_one() && job.calls.rate.is_none() && job.idle == 0 && job.delay_us == 0,
            "its sides in C have one call at a time, as fast as they go: leave out --clients, --in-flight, --rate, --delay and --beside-flood"
        );
        let side = CSide::open(job)?;
        // SAFETY: side.c has these functions with these types.
        unsafe {
            Ok(CCalls {
                call: *side.library.get(b"side_call")?,
                release: *side.library.get(b"side_release_reply")?,
                end_pass: *side.library.get(b"side_end_pass")?,
                serve: *side.library.get(b"side_serve")?,
                ends_passes: job.system != "pelton-c-go",
                side,
            })
        }
    }
}

impl Asking for CCalls {
    /// The reply is in place: its service does not write to it any more.
    #[inline]
    fn call<R>(&mut self, request: &[u8], inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let (shared, mut reply, mut size) = (&raw mut *self.side.shared, ptr::null(), 0);
        // SAFETY: the side is connected, the request is valid, and so are the places for the reply.
        let code = unsafe { (self.call)(shared, request.as_ptr(), request.len(), &mut reply, &mut size) };
        self.side.answer(code)?;
        // SAFETY: side.c has returned a reply, never NULL, which is valid until its release.
        let seen = inspect(unsafe { slice::from_raw_parts(reply, size) });
        // SAFETY: there is a reply to release.
        let code = unsafe { (self.release)(shared) };
        self.side.answer(code)?;
        Ok(seen)
    }

    fn end_pass(&mut self) -> Result<()> {
        if !self.ends_passes {
            return Ok(());
        }
        // SAFETY: the side is connected.
        let code = unsafe { (self.end_pass)(&mut *self.side.shared) };
        self.side.answer(code)
    }
}

impl Serving for CCalls {
    fn serve(&mut self, _count: u64) -> Result<Tally> {
        let (mut count, mut bytes) = (0, 0);
        // SAFETY: the side listens, and the places for the sums are valid.
        let code = unsafe { (self.serve)(&mut *self.side.shared, &mut count, &mut bytes) };
        self.side.answer(code)?;
        Ok(Tally::of(count, bytes))
    }
}
