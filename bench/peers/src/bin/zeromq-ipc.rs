//! ZeroMQ's ipc transport, by the installed libzmq (Debian: libzmq3-dev): without it the system is skipped.
//!
//! As its guide recommends: PUSH and PULL one way, PAIR there and back, one I/O thread, `zmq_send` and `zmq_recv` into
//! a buffer of the caller's own. High-water marks of 100,000 messages on both sides instead of 1,000: a guess that
//! favours it, because with the default it waits more often. It batches by itself, in its I/O thread, so this program
//! does not. `--wait block` sleeps in its calls; `--wait spin` polls with ZMQ_DONTWAIT. Its I/O threads need processor
//! time of their own: neither process is pinned to one CPU.
//!
//! One to many by XPUB and SUB. XPUB_NODROP has the sender wait instead of losing messages, and the marks are 64 MiB of
//! messages, as much as pelton's lane has.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    process::ExitCode,
};

use anyhow::{Context, Result, ensure};
use pelton_bench::{
    endpoints::{Receiving, Sending, Transport},
    parameters::{Job, Kind, Role, Wait},
};
use pelton_bench_peers::processes;

fn main() -> ExitCode {
    processes::<Zeromq>()
}

struct Zeromq;

const PAIR: c_int = 0;
const SUB: c_int = 2;
const PULL: c_int = 7;
const PUSH: c_int = 8;
const XPUB: c_int = 9;
const SUBSCRIBE: c_int = 6;
const SNDHWM: c_int = 23;
const RCVHWM: c_int = 24;
const XPUB_VERBOSE: c_int = 40;
const XPUB_NODROP: c_int = 69;
const DONTWAIT: c_int = 1;

// The functions of libzmq that this program uses, as declared in zmq.h.
#[link(name = "zmq")]
unsafe extern "C" {
    fn zmq_ctx_new() -> *mut c_void;
    fn zmq_socket(context: *mut c_void, kind: c_int) -> *mut c_void;
    fn zmq_setsockopt(socket: *mut c_void, option: c_int, value: *const c_void, size: usize) -> c_int;
    fn zmq_bind(socket: *mut c_void, name: *const c_char) -> c_int;
    fn zmq_connect(socket: *mut c_void, name: *const c_char) -> c_int;
    fn zmq_send(socket: *mut c_void, bytes: *const c_void, size: usize, flags: c_int) -> c_int;
    fn zmq_recv(socket: *mut c_void, bytes: *mut c_void, size: usize, flags: c_int) -> c_int;
    safe fn zmq_errno() -> c_int;
    safe fn zmq_strerror(error: c_int) -> *const c_char;
    fn zmq_close(socket: *mut c_void) -> c_int;
    fn zmq_ctx_term(context: *mut c_void) -> c_int;
}

fn trouble(what: &str) -> anyhow::Error {
    // SAFETY: it is a text of libzmq's own, which stays.
    let text = unsafe { CStr::from_ptr(zmq_strerror(zmq_errno())) };
    anyhow::anyhow!("{what}: {}", text.to_string_lossy())
}

fn must_wait() -> bool {
    matches!(zmq_errno(), libc::EAGAIN | libc::EINTR)
}

/// A socket and its context.
struct Socket {
    socket: *mut c_void,
    context: *mut c_void,
    flags: c_int,
}

impl Drop for Socket {
    fn drop(&mut self) {
        // SAFETY: both are open, and are not used again. The call waits until the sent messages have gone out.
        unsafe {
            zmq_close(self.socket);
            zmq_ctx_term(self.context);
        }
    }
}

/// Messages that each side holds at most.
fn high_water(job: &Job) -> c_int {
    match job.kind {
        Kind::Broadcast => ((64 << 20) / job.sizes.max.max(1)).clamp(16, 100_000) as c_int,
        _ => 100_000,
    }
}

fn open(job: &Job, kind: c_int) -> Result<Socket> {
    ensure!(job.wait != Wait::Epoll, "its descriptor is edge-triggered, and not measured here: write spin or block");
    // SAFETY: the calls are as declared in zmq.h, with pointers that are valid until they return.
    unsafe {
        let context = zmq_ctx_new();
        ensure!(!context.is_null(), trouble("making a context"));
        let socket = zmq_socket(context, kind);
        ensure!(!socket.is_null(), trouble("making a socket"));
        let set = |option, value: c_int| {
            let done = zmq_setsockopt(socket, option, (&raw const value).cast(), size_of::<c_int>());
            ensure!(done == 0, trouble("setting an option"));
            Ok(())
        };
        set(SNDHWM, high_water(job))?;
        set(RCVHWM, high_water(job))?;
        if kind == XPUB {
            set(XPUB_NODROP, 1)?;
            set(XPUB_VERBOSE, 1)?;
        }
        if kind == SUB {
            ensure!(zmq_setsockopt(socket, SUBSCRIBE, std::ptr::null(), 0) == 0, trouble("subscribing"));
        }
        let name = CString::new(format!("ipc://{}", job.directory.join("zeromq").display()))?;
        let binds = if job.kind == Kind::Broadcast { kind == XPUB } else { job.role.listens() };
        let open = if binds { zmq_bind } else { zmq_connect };
        ensure!(open(socket, name.as_ptr()) == 0, trouble("opening the socket"));
        Ok(Socket { socket, context, flags: if job.wait == Wait::Spin { DONTWAIT } else { 0 } })
    }
}

impl Transport for Zeromq {
    type Sending = Outgoing;
    type Receiving = Incoming;

    fn both(job: &Job) -> Result<(Outgoing, Incoming)> {
        let kind = match job.role {
            Role::Sender if job.kind == Kind::Broadcast => XPUB,
            Role::Receiver if job.kind == Kind::Broadcast => SUB,
            Role::Sender => PUSH,
            Role::Receiver => PULL,
            _ => PAIR,
        };
        let socket = std::rc::Rc::new(open(job, kind)?);
        for _ in 0..if kind == XPUB { job.receivers } else { 0 } {
            // A message for each subscription: a byte of 1 and the topic, which is empty.
            let mut one = 0u8;
            // SAFETY: it writes at most that byte.
            let came = unsafe { zmq_recv(socket.socket, (&raw mut one).cast(), 1, 0) };
            ensure!((came, one) == (1, 1), "a subscription was expected");
        }
        Ok((Outgoing(socket.clone()), Incoming(socket, vec![0; job.sizes.max as usize])))
    }
}

struct Outgoing(std::rc::Rc<Socket>);

impl Sending for Outgoing {
    #[inline]
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        let Socket { socket, flags, .. } = &*self.0;
        loop {
            // SAFETY: the bytes are copied before it returns.
            let sent = unsafe { zmq_send(*socket, payload.as_ptr().cast(), payload.len(), *flags) };
            if sent >= 0 {
                return Ok(());
            }
            if !must_wait() {
                return Err(trouble("sending"));
            }
            std::hint::spin_loop();
        }
    }
}

struct Incoming(std::rc::Rc<Socket>, Vec<u8>);

impl Receiving for Incoming {
    #[inline]
    fn receive<R>(&mut self, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let Incoming(shared, buffer) = self;
        let Socket { socket, flags, .. } = &**shared;
        loop {
            // SAFETY: it writes at most the buffer's length.
            let came = unsafe { zmq_recv(*socket, buffer.as_mut_ptr().cast(), buffer.len(), *flags) };
            if let Ok(came) = usize::try_from(came) {
                return Ok(look(buffer.get(..came).context("a message is larger than the largest")?));
            }
            if !must_wait() {
                return Err(trouble("receiving"));
            }
            std::hint::spin_loop();
        }
    }
}
