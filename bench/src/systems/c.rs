//! Sides in C: pelton by the loops of c/side.c, linked with libpelton.so, and the ring of c/ring.c; both compiled at
//! their first use.
//!
//! They are in a shared object of their own, which a side loads: its calls go through its PLT to libpelton.so, as
//! those of an installed program do. The clock, the resource usage and the check of every byte are this program's.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    mem,
    process::Command,
    ptr,
};

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::{
    compiled,
    endpoints::CONNECT,
    measure,
    parameters::{Job, Pass, Role, Wait},
    payload::{self, WARM_UP},
    side::{self, Percentiles, Section, check_bytes, histogram, passes},
};

const SOURCE: &str = include_str!("../../c/side.c");
const RING: &str = include_str!("../../c/ring.c");
/// What they include: like the source, part of the fingerprint of the compiled program.
const HEADERS: [&str; 8] = [
    include_str!("../../c/side.h"),
    include_str!("../../../include/pelton/result.h"),
    include_str!("../../../include/pelton/channel.h"),
    include_str!("../../../include/pelton/call.h"),
    include_str!("../../../include/pelton/flush.h"),
    include_str!("../../../include/pelton/file.h"),
    include_str!("../../../bindings/c/pelton_uv.h"),
    include_str!("../../../bindings/c/pelton_uv.c"),
];
/// The compiler's include directories.
const INCLUDES: [&str; 3] = [
    concat!("-I", env!("CARGO_MANIFEST_DIR"), "/c"),
    concat!("-I", env!("CARGO_MANIFEST_DIR"), "/../include"),
    concat!("-I", env!("CARGO_MANIFEST_DIR"), "/../bindings/c"),
];
/// The compiler's flags for a shared object.
const SHARED: [&str; 6] = ["-O3", "-fPIC", "-shared", INCLUDES[0], INCLUDES[1], INCLUDES[2]];

/// `struct side` of side.c.
#[repr(C)]
struct Shared {
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
    sender: *mut c_void,
    receiver: *mut c_void,
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

/// One side, in C.
pub struct CSide {
    shared: Box<Shared>,
    pass: unsafe extern "C" fn(*mut Shared, *mut SharedPass) -> c_int,
    close: unsafe extern "C" fn(*mut Shared),
    /// The fields that `shared` points at.
    _kept: (CString, CString, [Vec<u8>; 2]),
}

/// Compiles the shared object of a system with sides in C, unless it exists already. Before the sides start, so that
/// they need not wait for the compiler.
pub fn compile(system: &str, wait: Wait) -> Result<std::path::PathBuf> {
    let in_libuv = matches!(wait, Wait::Uv | Wait::UvBulk);
    let made = match system {
        "eventfd-ring" => compiled::compile("ring.c", &with_headers(RING), &SHARED, &["-luv"]),
        _ if in_libuv => compiled::compile(
            "side.c",
            &with_headers(SOURCE),
            &[&SHARED[..], &["-DSIDE_UV"]].concat(),
            &[&library()?, "-luv"],
        ),
        _ => compile_source("side.c", SOURCE),
    };
    if in_libuv { made.context(NEEDS_LIBUV) } else { made }
}

/// A shared object of sides in C, compiled unless it exists already.
pub fn compile_source(name: &str, source: &str) -> Result<std::path::PathBuf> {
    // Of the library the compiler takes over only the soname.
    compiled::compile(name, &with_headers(source), &SHARED, &[&library()?])
}

const NEEDS_LIBUV: &str = "libuv's header is wanted, too: on Debian it is in the package libuv1-dev";

/// The bytes of the ring of c/ring.c. It cycles through all of its memory: without `--capacity` it has its best size,
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
            _ => bail!("a side in C has no such part"),
        };
        ensure!(job.calls.rate.is_none(), "its loops in C know no rate: measure pelton, it is the same library");
        let is_ring = job.system == "eventfd-ring";
        ensure!(
            !is_ring || matches!(job.wait, Wait::Uv | Wait::UvBulk),
            "its sides are in libuv's loop: write --wait uv or uv-bulk"
        );
        let name = |part| CString::new(format!("unix:{}", job.directory.join(part).display()));
        let (forward_name, backward_name) = (name("forward_name")?, name("backward_name")?);
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
            sender: ptr::null_mut(),
            receiver: ptr::null_mut(),
            sender_epoll: -1,
            receiver_epoll: -1,
            seed: 0,
            error: [0; 512],
        });
        let library = load_with_pelton(&compile(&job.system, job.wait)?)?;
        // SAFETY: both sources have these three functions with these types.
        let (open, pass, close) = unsafe {
            let open: unsafe extern "C" fn(*mut Shared) -> c_int = function(library, c"side_open")?;
            (open, function(library, c"side_pass")?, function(library, c"side_close")?)
        };
        let mut side = CSide { shared, pass, close, _kept: (forward_name, backward_name, buffers) };
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

    fn answer(&self, code: c_int) -> Result<()> {
        // SAFETY: side.c terminates the text by a zero, and the buffer begins as one.
        let error = unsafe { CStr::from_ptr(self.shared.error.as_ptr()) };
        if code == 0 { Ok(()) } else { Err(anyhow!("{}", error.to_string_lossy())) }
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

/// Loads a shared object that calls libpelton.so. The loader finds a needed library among those loaded before.
pub(super) fn load_with_pelton(object: &std::path::Path) -> Result<*mut c_void> {
    load(&library()?)?;
    load(object.to_str().context("a path that is not UTF-8")?)
}

/// For as long as this process lives.
pub(super) fn load(path: &str) -> Result<*mut c_void> {
    let name = CString::new(path)?;
    // SAFETY: the name ends with a zero; the libraries are responsible for their initialisers.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
    ensure!(!library.is_null(), "loading {path}: {}", dl_error_text());
    Ok(library)
}

/// A function of a loaded library.
///
/// # Safety
/// It has the type `F`.
pub(super) unsafe fn function<F: Copy>(library: *mut c_void, name: &CStr) -> Result<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: a loaded library, and a name that ends with a zero.
    let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
    ensure!(!symbol.is_null(), "finding {name:?}: {}", dl_error_text());
    // SAFETY: the caller says that it has this type, which is as large as a pointer.
    Ok(unsafe { mem::transmute_copy(&symbol) })
}

fn dl_error_text() -> String {
    // SAFETY: right after a failed call it returns a text of this thread's.
    unsafe { CStr::from_ptr(libc::dlerror()) }.to_string_lossy().into_owned()
}
