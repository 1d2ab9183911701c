//! Sides in C: pelton by the loops of bindings/c/bench/side.c, linked with libpelton.so, and the ring of ring.c there;
//! both compiled at their first use.
//!
//! They are in a shared object of their own, which a side loads: its calls go through its PLT to libpelton.so, as
//! those of an installed program do. The clock, the resource usage and the check of every byte are this program's.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    path::PathBuf,
    process::Command,
    ptr,
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use libloading::os::unix::Library;

use crate::{
    compiled,
    endpoints::{BACK, CONNECT, THERE},
    measure,
    parameters::{Job, Pass, Role, Wait},
    payload::{self, WARM_UP},
    side::{self, Percentiles, Section, check_bytes, histogram, passes},
};

const SOURCE: &str = include_str!("../../../bindings/c/bench/side.c");
const RING: &str = include_str!("../../../bindings/c/bench/ring.c");
/// What they include: like the source, part of the fingerprint of the compiled program.
const HEADERS: [&str; 9] = [
    include_str!("../../../bindings/c/bench/side.h"),
    include_str!("../../../include/pelton/result.h"),
    include_str!("../../../include/pelton/channel.h"),
    include_str!("../../../include/pelton/broadcast.h"),
    include_str!("../../../include/pelton/call.h"),
    include_str!("../../../include/pelton/flush.h"),
    include_str!("../../../include/pelton/file.h"),
    include_str!("../../../bindings/c/pelton_uv.h"),
    include_str!("../../../bindings/c/pelton_uv.c"),
];
/// The compiler's include directories.
const INCLUDES: [&str; 3] = [
    concat!("-I", env!("CARGO_MANIFEST_DIR"), "/../bindings/c/bench"),
    concat!("-I", env!("CARGO_MANIFEST_DIR"), "/../include"),
    concat!("-I", env!("CARGO_MANIFEST_DIR"), "/../bindings/c"),
];
/// The compiler's flags for a shared object.
const SHARED: [&str; 6] = ["-O3", "-fPIC", "-shared", INCLUDES[0], INCLUDES[1], INCLUDES[2]];

/// `struct side` of side.c.
#[repr(C)]
pub(super) struct Shared {
    forward_name: *const c_char,
    backward_name: *const c_char,
    capacity: u64,
    connect_ns: i64,
    role: u32,
    how: u32,
    size_min: u32,
    size_max: u32,
    in_place: u32,
    delay_ns: u64,
    work_steps: u64,
    payloads: *mut u8,
    buffer_count: u32,
    buffer: *mut u8,
    is_whole: extern "C" fn(*const u8, usize) -> c_int,
    work: extern "C" fn(u64),
    handles: [*mut c_void; 4],
    sender_epoll: c_int,
    receiver_epoll: c_int,
    seed: u32,
    error: [c_char; 512],
}

/// `struct pass` of side.c.
#[repr(C)]
struct SharedPass {
    count: u64,
    whole_from: u64,
    warms_up: c_int,
    timed: Option<unsafe extern "C" fn(*mut c_void, u64)>,
    of: *mut c_void,
    bytes: u64,
}

type Close = unsafe extern "C" fn(*mut Shared);
type Open = unsafe extern "C" fn(*mut Shared) -> c_int;
type MakePass = unsafe extern "C" fn(*mut Shared, *mut SharedPass) -> c_int;

/// One side, in C.
pub struct CSide {
    pub(super) shared: Box<Shared>,
    pub(super) library: &'static Library,
    pass: MakePass,
    close: Close,
    /// The fields that `shared` points at.
    _kept: (CString, CString, [Vec<u8>; 2]),
}

/// Compiles the shared object of a system with sides in C, unless it exists already. Before the sides start, so that
/// they need not wait for the compiler.
pub fn compile(system: &str, wait: Wait) -> Result<PathBuf> {
    let in_libuv = matches!(wait, Wait::Uv | Wait::UvBulk);
    let uv_flags = [&SHARED[..], &["-DSIDE_UV"]].concat();
    let made = match system {
        "eventfd-ring" => compiled::compile("ring.c", &with_headers(RING), &SHARED, &["-luv"]),
        // Of the library the compiler takes over only the soname.
        _ if in_libuv => compiled::compile("side.c", &with_headers(SOURCE), &uv_flags, &[&library()?, "-luv"]),
        _ => compiled::compile("side.c", &with_headers(SOURCE), &SHARED, &[&library()?]),
    };
    if in_libuv { made.context(NEEDS_LIBUV) } else { made }
}

const NEEDS_LIBUV: &str = "libuv's header is wanted, too: on Debian it is in the package libuv1-dev";

/// The bytes of the ring of ring.c. It cycles through all of its memory: without `--capacity` it has its best size,
/// and several of the largest messages.
fn ring_bytes(job: &Job) -> u64 {
    const BEST: u64 = 1 << 20;
    if job.capacity == CAPACITY { BEST.max((16 * u64::from(job.sizes.max)).next_power_of_two()) } else { job.capacity }
}

/// The default of `--capacity` in a stream.
const CAPACITY: u64 = 64 << 20;

/// A program on libuv and libpelton.so, compiled unless it exists already.
pub fn program(name: &str, source: &str) -> Result<Command> {
    let library = library()?;
    let flags = ["-O2", INCLUDES[1], INCLUDES[2]];
    let made = compiled::compile(name, &with_headers(source), &flags, &[&library, "-luv"]).context(NEEDS_LIBUV)?;
    let mut program = Command::new(made);
    // cargo builds it under another file name than its soname.
    program.env("LD_PRELOAD", library);
    Ok(program)
}

fn with_headers(source: &str) -> String {
    format!("/* {} */\n{source}", compiled::fingerprint(&HEADERS.concat()))
}

/// libpelton.so as built by cargo.
fn library() -> Result<String> {
    let path = compiled::directory()?.join("libpelton_capi.so");
    ensure!(
        path.exists(),
        "{} does not exist: `cargo build -p pelton-capi`, in the profile of this program",
        path.display()
    );
    path.to_str().map(str::to_string).with_context(|| format!("{} is not UTF-8", path.display()))
}

/// One side's part, with the loops in C.
pub fn part(job: &Job) -> Result<()> {
    let mut side = CSide::open(job)?;
    side.warm_up(WARM_UP)?;
    let mut histogram = histogram()?;
    passes(job, |pass| {
        histogram.reset();
        let section = Section::start(pass)?;
        let bytes = side.pass(pass, |ns| histogram.saturating_record(ns))?;
        let mut report = section.end(bytes)?;
        report.percentiles = (job.role == Role::Asker && pass.time_each).then(|| Percentiles::of(&histogram));
        if job.role == Role::Receiver {
            check_bytes(job, pass, bytes)?;
            if job.system == "pelton-c" {
                report.resident_bytes = Some(measure::resident_bytes(&job.directory)?);
            }
        }
        Ok(report)
    })
}

impl CSide {
    /// Connects. Waits for the other side.
    pub fn open(job: &Job) -> Result<CSide> {
        let role = match job.role {
            Role::Receiver => 0,
            Role::Sender => 1,
            Role::Asker => 2,
            Role::Answerer => 3,
            Role::Client => 4,
            Role::Service => 5,
            _ => bail!("a side in C has no such part"),
        };
        ensure!(job.calls.rate.is_none(), "its loops in C know no rate: measure pelton, it is the same library");
        let is_ring = job.system == "eventfd-ring";
        ensure!(
            matches!(job.role, Role::Receiver | Role::Sender) || !matches!(job.wait, Wait::Uv | Wait::UvBulk),
            "its sides in libuv's loop have messages one way: write spin, block or epoll"
        );
        ensure!(
            !is_ring || matches!(job.wait, Wait::Uv | Wait::UvBulk),
            "its sides are in libuv's loop: write --wait uv or uv-bulk"
        );
        let name = |part| CString::new(format!("unix:{}", job.directory.join(part).display()));
        let (forward_name, backward_name) = (name(THERE)?, name(BACK)?);
        let size = job.sizes.max as usize;
        let buffer_count = payload::buffer_count(size);
        let mut buffers = [payload::buffer(size).repeat(buffer_count), vec![0; size]];
        let shared = Box::new(Shared {
            forward_name: forward_name.as_ptr(),
            backward_name: backward_name.as_ptr(),
            capacity: if is_ring { ring_bytes(job) } else { job.capacity },
            connect_ns: CONNECT.as_nanos() as i64,
            role,
            how: job.wait as u32,
            size_min: job.sizes.min,
            size_max: job.sizes.max,
            in_place: job.in_place() as u32,
            delay_ns: job.delay_us * 1000,
            work_steps: job.work_steps(),
            payloads: buffers[0].as_mut_ptr(),
            buffer_count: buffer_count as u32,
            buffer: buffers[1].as_mut_ptr(),
            is_whole,
            work,
            handles: [ptr::null_mut(); 4],
            sender_epoll: -1,
            receiver_epoll: -1,
            seed: 0,
            error: [0; 512],
        });
        // The loader finds a needed library among those loaded before.
        compiled::load(library()?)?;
        let library = compiled::load(compile(&job.system, job.wait)?)?;
        // SAFETY: both sources have these three functions with these types.
        let (open, pass, close) = unsafe {
            let open = *library.get::<Open>(b"side_open")?;
            (open, *library.get::<MakePass>(b"side_pass")?, *library.get::<Close>(b"side_close")?)
        };
        let mut side = CSide { shared, library, pass, close, _kept: (forward_name, backward_name, buffers) };
        // SAFETY: all of its first part is filled in, and stays where it is.
        let code = unsafe { open(&mut *side.shared) };
        side.answer(code)?;
        Ok(side)
    }

    /// The messages before the first pass, with all bytes checked.
    pub fn warm_up(&mut self, count: u64) -> Result<()> {
        self.run(SharedPass { warms_up: 1, whole_from: 0, ..pass_of(count) }).map(|_| ())
    }

    /// Makes a pass, and returns the bytes of its messages. `timed` gets each round's time, if the pass times them.
    pub fn pass(&mut self, pass: &Pass, mut timed: impl FnMut(u64)) -> Result<u64> {
        unsafe extern "C" fn call<F: FnMut(u64)>(of: *mut c_void, ns: u64) {
            // SAFETY: `of` is the closure below, which no other code uses while C runs.
            unsafe { (*of.cast::<F>())(ns) };
        }
        fn callback<F: FnMut(u64)>(_: &F) -> unsafe extern "C" fn(*mut c_void, u64) {
            call::<F>
        }
        let whole_from = if self.shared.role == 0 { pass.count - 1 } else { u64::MAX };
        let timed_by = pass.time_each.then(|| callback(&timed));
        self.run(SharedPass { whole_from, timed: timed_by, of: (&raw mut timed).cast(), ..pass_of(pass.count) })
    }

    fn run(&mut self, mut pass: SharedPass) -> Result<u64> {
        // SAFETY: the side is open, and the pass's pointers are valid until the call returns.
        let code = unsafe { (self.pass)(&mut *self.shared, &mut pass) };
        self.answer(code)?;
        Ok(pass.bytes)
    }

    #[inline]
    pub(super) fn answer(&self, code: c_int) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.error()) }
    }

    #[cold]
    fn error(&self) -> anyhow::Error {
        // SAFETY: the sources terminate the text by a zero, and the buffer begins as one.
        anyhow!("{}", unsafe { CStr::from_ptr(self.shared.error.as_ptr()) }.to_string_lossy())
    }
}

impl Drop for CSide {
    fn drop(&mut self) {
        // SAFETY: the side is closed once; NULL is allowed.
        unsafe { (self.close)(&mut *self.shared) };
    }
}

fn pass_of(count: u64) -> SharedPass {
    SharedPass { count, whole_from: u64::MAX, warms_up: 0, timed: None, of: ptr::null_mut(), bytes: 0 }
}

extern "C" fn is_whole(message: *const u8, size: usize) -> c_int {
    // SAFETY: side.c passes a message that it holds.
    payload::whole(unsafe { std::slice::from_raw_parts(message, size) }) as c_int
}

extern "C" fn work(steps: u64) {
    side::work(steps);
}
