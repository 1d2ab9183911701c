//! Options, deadlines and figures as C has them.

use crate::code::{self, Answer};
use pelton::file::EngineOptions;
use pelton::{Deadline, Options, Peer, Wait};
use std::ffi::{CStr, OsStr, c_char};
use std::mem::{MaybeUninit, size_of};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// `pelton_options`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct COptions {
    struct_bytes: u32,
    wait: u32,
    capacity: u64,
    message_bytes_max: u64,
    deadline_ns: i64,
    uids: *const u32,
    uids_count: u32,
    create: u32,
    mode: u32,
    lanes: u32,
    announce: u32,
    reserved: u32,
    flush_bytes: u64,
    flush_interval_ns: i64,
    call_bytes_max: u64,
    hold_ns: i64,
    in_flight: u32,
    threads: u32,
    root: *const c_char,
    resident_max: u64,
    memory: u64,
}

const _: () = assert!(size_of::<COptions>() == 128);
/// Of the first header.
const OPTIONS_BYTES_MIN: usize = 64;

/// More than a struct of any header will have.
const BYTES_MAX: u32 = 4096;

/// Nanoseconds of CLOCK_MONOTONIC.
pub fn now() -> i64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: fills a struct of ours; this clock is always there.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

/// A `deadline_ns`.
#[cold]
pub fn deadline(deadline_ns: i64) -> Deadline {
    match deadline_ns {
        ..=0 => Deadline::Now,
        i64::MAX => Deadline::Never,
        // An instant is only made from another one and a difference.
        _ => Deadline::At(Instant::now() + Duration::from_nanos((deadline_ns - now()).max(0) as u64)),
    }
}

/// The options given, and whether to create.
///
/// # Safety
/// `options` is NULL, or points to as many bytes as its first word says.
pub unsafe fn of(options: *const COptions) -> Answer<(Options, bool)> {
    if options.is_null() {
        return Ok((Options::new(), false));
    }
    // SAFETY: the caller's promise.
    let given = unsafe { copied(options, OPTIONS_BYTES_MIN, "pelton_options: begin with PELTON_OPTIONS_INIT")? };
    let wait = match given.wait {
        0 => Wait::Block,
        1 => Wait::Spin,
        found => return Err(wrong("wait", found, "PELTON_BLOCK (0) or PELTON_SPIN (1)")),
    };
    let create = match given.create {
        0 => false,
        1 => true,
        found => return Err(wrong("create", found, "0 or 1")),
    };
    let mut made = Options::new().wait(wait);
    if given.capacity != 0 {
        made = made.capacity(given.capacity);
    }
    if given.message_bytes_max != 0 {
        made = made.message_bytes_max(given.message_bytes_max);
    }
    made = made.connect_deadline(deadline(given.deadline_ns));
    if given.uids_count != 0 {
        if given.uids.is_null() {
            return Err(code::null("options.uids, with a count,"));
        }
        // SAFETY: the caller's promise.
        made = made.allow_uids(unsafe { std::slice::from_raw_parts(given.uids, given.uids_count as usize) });
    }
    if given.mode != 0 {
        made = made.mode(given.mode);
    }
    if given.lanes != 0 {
        made = made.lanes(given.lanes);
    }
    made = match given.announce {
        0 => made,
        1 => made.membership_events(true),
        found => return Err(wrong("announce", found, "0 or 1")),
    };
    if given.reserved != 0 {
        return Err(wrong("reserved", given.reserved, "0: begin with PELTON_OPTIONS_INIT"));
    }
    if given.flush_bytes != 0 {
        made = made.flush_bytes(given.flush_bytes);
    }
    made = match given.flush_interval_ns {
        0 => made,
        i64::MAX => made.flush_interval(None),
        found => made.flush_interval(Some(interval("flush_interval_ns", found)?)),
    };
    if given.call_bytes_max != 0 {
        made = made.call_bytes_max(given.call_bytes_max);
    }
    made = match given.hold_ns {
        0 => made,
        // PELTON_NO_HOLD.
        -1 => made.busy_poll(Duration::ZERO),
        found => made.busy_poll(interval("hold_ns", found)?),
    };
    if given.resident_max != 0 {
        made = made.resident_max(given.resident_max);
    }
    if given.memory != 0 {
        made = made.memory(given.memory);
    }
    Ok((made, create))
}

/// As much of the options as is for an engine.
///
/// # Safety
/// As of [`of`]; `root` is NULL or a string.
pub unsafe fn of_engine(options: *const COptions) -> Answer<EngineOptions> {
    let mut made = EngineOptions::new();
    if options.is_null() {
        return Ok(made);
    }
    // SAFETY: the caller's promises.
    unsafe {
        of(options)?;
        let given = copied(options, OPTIONS_BYTES_MIN, "pelton_options: begin with PELTON_OPTIONS_INIT")?;
        if given.in_flight != 0 {
            made = made.in_flight_max(given.in_flight as usize);
        }
        if given.threads != 0 {
            made = made.threads(given.threads as usize);
        }
        if !given.root.is_null() {
            made = made.root(path(given.root));
        }
    }
    Ok(made)
}

/// A time that is no deadline.
pub fn interval(option: &str, found: i64) -> Answer<Duration> {
    u64::try_from(found).map(Duration::from_nanos).map_err(|_| wrong(option, found, "nanoseconds, not less than 0"))
}

#[cold]
pub fn wrong(option: &str, found: impl std::fmt::Display, wanted: &str) -> i32 {
    code::tell(code::OPTION, format!("{option} is {found}, wanted {wanted}"))
}

/// A struct of a caller whose header may be newer: then what this library does not know must be 0. What an older one lacks is 0.
///
/// # Safety
/// `given` points to as many bytes as its first word, an u32, says; all zeros are a `T`.
pub unsafe fn copied<T: Copy>(given: *const T, bytes_min: usize, what: &str) -> Answer<T> {
    let bytes_known = size_of::<T>();
    // SAFETY: the caller's promise.
    let bytes = unsafe { given.cast::<u32>().read() } as usize;
    if bytes < bytes_min || bytes > BYTES_MAX as usize {
        return Err(wrong("struct_bytes", bytes, &format!("the size of {what}")));
    }
    // SAFETY: as above.
    let all = unsafe { std::slice::from_raw_parts(given.cast::<u8>(), bytes) };
    if all.iter().skip(bytes_known).any(|byte| *byte != 0) {
        return Err(code::tell(
            code::OPTION,
            "an option is set that this libpelton does not know: install one as new as the program's pelton.h",
        ));
    }
    let mut copy = MaybeUninit::<T>::zeroed();
    // SAFETY: no more than both have; the caller's promise about zeros.
    unsafe {
        std::ptr::copy_nonoverlapping(all.as_ptr(), copy.as_mut_ptr().cast(), bytes.min(bytes_known));
        Ok(copy.assume_init())
    }
}

/// `pelton_info`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Info {
    struct_bytes: u32,
    has_peer: u32,
    peer_pid: u32,
    peer_uid: u32,
    pub next_seq: u32,
    pub generation: u32,
    pub capacity: u64,
    pub message_bytes_max: u64,
    pub unreleased: u64,
    messages: u64,
    bytes: u64,
    waits: u64,
    sleeps: u64,
    wakes_sent: u64,
    depth_max: u64,
    pub calls: u64,
    pub dropped: u64,
    pub corrupt: u64,
    pub services: u64,
}

const _: () = assert!(size_of::<Info>() == 128);

impl Info {
    pub fn new(peer: Option<Peer>, counters: pelton::Counters) -> Info {
        let pelton::Counters { messages, bytes, waits, sleeps, wakes_sent, depth_max, .. } = counters;
        Info {
            has_peer: peer.is_some().into(),
            peer_pid: peer.map_or(0, |peer| peer.pid),
            peer_uid: peer.map_or(0, |peer| peer.uid),
            messages,
            bytes,
            waits,
            sleeps,
            wakes_sent,
            depth_max,
            ..Info::default()
        }
    }

    /// Writes as much as the caller's header knows of.
    ///
    /// # Safety
    /// `out` points to as many bytes as its first word says.
    pub unsafe fn write(mut self, out: *mut Info) -> Answer {
        // SAFETY: the caller's promise.
        let bytes = unsafe { (*out).struct_bytes };
        // Set by nobody, it could be anything.
        if bytes == 0 || bytes % 8 != 0 || bytes > BYTES_MAX {
            return Err(wrong("struct_bytes", bytes, "sizeof(pelton_info)"));
        }
        self.struct_bytes = bytes;
        let known = (bytes as usize).min(size_of::<Info>());
        // SAFETY: as above; what is beyond what this library knows is 0.
        unsafe {
            out.cast::<u8>().write_bytes(0, bytes as usize);
            std::ptr::copy_nonoverlapping((&raw const self).cast::<u8>(), out.cast::<u8>(), known);
        }
        Ok(())
    }
}

/// A name that is not a path's.
pub fn text(name: &CStr) -> Answer<&str> {
    name.to_str().map_err(|_| code::tell(code::NAME, format!("{name:?} is not UTF-8: use a path that is")))
}

/// # Safety
/// It is a string, which stays for as long as is said.
pub unsafe fn path<'a>(path: *const c_char) -> &'a Path {
    // SAFETY: the caller's promise.
    Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes()))
}
