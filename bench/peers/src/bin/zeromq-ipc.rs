//! ZeroMQ's ipc transport, by the installed libzmq (Debian: libzmq5), loaded at run time: without it the system is
//! skipped.
//!
//! As its guide recommends: PUSH and PULL one way, PAIR there and back, one I/O thread, `zmq_send` and `zmq_recv` into
//! a buffer of the caller's own. High-water marks of 100,000 messages on both sides instead of 1,000: a guess that
//! favours it, because with the default it waits more often. It batches by itself, in its I/O thread, so this program
//! does not. `--wait block` sleeps in its calls; `--wait spin` polls with ZMQ_DONTWAIT. Its I/O threads need processor
//! time of their own: neither process is pinned to one CPU.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    process::ExitCode,
    sync::OnceLock,
};

use anyhow::{Context, Result, bail, ensure};
use libloading::Library;
use pelton_bench::{
    endpoints::{Receiving, Sending, Transport},
    parameters::{Job, Role, Wait},
};
use pelton_bench_peers::processes;

fn main() -> ExitCode {
    processes::<Zeromq>()
}

struct Zeromq;

const PAIR: c_int = 0;
const PULL: c_int = 7;
const PUSH: c_int = 8;
const SNDHWM: c_int = 23;
const RCVHWM: c_int = 24;
const DONTWAIT: c_int = 1;
static HIGH_WATER: c_int = 100_000;

/// The functions of libzmq that this program uses, as declared in zmq.h.
struct Api {
    ctx_new: unsafe extern "C" fn() -> *mut c_void,
    socket: unsafe extern "C" fn(*mut c_void, c_int) -> *mut c_void,
    setsockopt: unsafe extern "C" fn(*mut c_void, c_int, *const c_void, usize) -> c_int,
    bind: unsafe extern "C" fn(*mut c_void, *const c_char) -> c_int,
    connect: unsafe extern "C" fn(*mut c_void, *const c_char) -> c_int,
    send: unsafe extern "C" fn(*mut c_void, *const c_void, usize, c_int) -> c_int,
    recv: unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int) -> c_int,
    errno: unsafe extern "C" fn() -> c_int,
    strerror: unsafe extern "C" fn(c_int) -> *const c_char,
    close: unsafe extern "C" fn(*mut c_void) -> c_int,
    ctx_term: unsafe extern "C" fn(*mut c_void) -> c_int,
    /// The loaded functions
    _library: Library,
}

fn api() -> Result<&'static Api> {
    static API: OnceLock<Result<Api, String>> = OnceLock::new();
    let api = API.get_or_init(|| {
        // SAFETY: the library is responsible for its initialisers; the types are those of zmq.h.
        let load = || unsafe {
            let library = Library::new("libzmq.so.5")?;
            Ok(Api {
                ctx_new: *library.get(b"zmq_ctx_new\0")?,
                socket: *library.get(b"zmq_socket\0")?,
                setsockopt: *library.get(b"zmq_setsockopt\0")?,
                bind: *library.get(b"zmq_bind\0")?,
                connect: *library.get(b"zmq_connect\0")?,
                send: *library.get(b"zmq_send\0")?,
                recv: *library.get(b"zmq_recv\0")?,
                errno: *library.get(b"zmq_errno\0")?,
                strerror: *library.get(b"zmq_strerror\0")?,
                close: *library.get(b"zmq_close\0")?,
                ctx_term: *library.get(b"zmq_ctx_term\0")?,
                _library: library,
            })
        };
        load().map_err(|error: libloading::Error| error.to_string())
    });
    match api {
        Ok(api) => Ok(api),
        Err(error) => bail!("loading libzmq.so.5: {error}: on Debian it is in the package libzmq5"),
    }
}

impl Api {
    fn trouble(&self, what: &str) -> anyhow::Error {
        // SAFETY: both take only a number, and return a text that stays.
        let text = unsafe { CStr::from_ptr((self.strerror)((self.errno)())) };
        anyhow::anyhow!("{what}: {}", text.to_string_lossy())
    }

    fn must_wait(&self) -> bool {
        // SAFETY: it takes nothing.
        let errno = unsafe { (self.errno)() };
        errno == libc::EAGAIN || errno == libc::EINTR
    }
}

/// A socket and its context.
struct Socket {
    api: &'static Api,
    socket: *mut c_void,
    context: *mut c_void,
    flags: c_int,
}

impl Drop for Socket {
    fn drop(&mut self) {
        // SAFETY: both are open, and are not used again. The call waits until the sent messages have gone out.
        unsafe {
            (self.api.close)(self.socket);
            (self.api.ctx_term)(self.context);
        }
    }
}

fn open(job: &Job, kind: c_int) -> Result<Socket> {
    ensure!(job.wait != Wait::Epoll, "its descriptor is edge-triggered, and not measured here: write spin or block");
    let api = api()?;
    // SAFETY: the calls are as declared in zmq.h, with pointers that are valid until they return.
    unsafe {
        let context = (api.ctx_new)();
        ensure!(!context.is_null(), api.trouble("making a context"));
        let socket = (api.socket)(context, kind);
        ensure!(!socket.is_null(), api.trouble("making a socket"));
        for option in [SNDHWM, RCVHWM] {
            let mark = (&raw const HIGH_WATER).cast();
            ensure!((api.setsockopt)(socket, option, mark, size_of::<c_int>()) == 0, api.trouble("setting a mark"));
        }
        let name = CString::new(format!("ipc://{}", job.directory.join("zeromq").display()))?;
        let open = if job.role.listens() { api.bind } else { api.connect };
        ensure!(open(socket, name.as_ptr()) == 0, api.trouble("opening the socket"));
        Ok(Socket { api, socket, context, flags: if job.wait == Wait::Spin { DONTWAIT } else { 0 } })
    }
}

impl Transport for Zeromq {
    type Sending = Outgoing;
    type Receiving = Incoming;

    fn both(job: &Job) -> Result<(Outgoing, Incoming)> {
        let kind = match job.role {
            Role::Sender => PUSH,
            Role::Receiver => PULL,
            _ => PAIR,
        };
        let socket = std::rc::Rc::new(open(job, kind)?);
        Ok((Outgoing(socket.clone()), Incoming(socket, vec![0; job.sizes.max as usize])))
    }
}

struct Outgoing(std::rc::Rc<Socket>);

impl Sending for Outgoing {
    #[inline]
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        let Socket { api, socket, flags, .. } = &*self.0;
        loop {
            // SAFETY: the bytes are copied before it returns.
            let sent = unsafe { (api.send)(*socket, payload.as_ptr().cast(), payload.len(), *flags) };
            if sent >= 0 {
                return Ok(());
            }
            if !api.must_wait() {
                return Err(api.trouble("sending"));
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
        let Socket { api, socket, flags, .. } = &**shared;
        loop {
            // SAFETY: it writes at most the buffer's length.
            let came = unsafe { (api.recv)(*socket, buffer.as_mut_ptr().cast(), buffer.len(), *flags) };
            if let Ok(came) = usize::try_from(came) {
                return Ok(look(buffer.get(..came).context("a message is larger than the largest")?));
            }
            if !api.must_wait() {
                return Err(api.trouble("receiving"));
            }
            std::hint::spin_loop();
        }
    }
}
