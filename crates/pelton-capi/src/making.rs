//! Opening, listening and accepting.

use crate::code::{self, Answer};
use crate::handle::{Handle, Object, call, catch, give, number};
use crate::options::{self, COptions, deadline, text};
use crate::receiving::Receiving;
use crate::sending::Sending;
use pelton::Deadline;
use pelton::{Listener, Options, Receiver, Sender};
use std::ffi::{CStr, OsStr, c_char, c_int};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// A listener behind a handle.
pub struct Listening(Listener);

impl Object for Listening {
    const KIND: &'static str = "listener";

    fn is_forked(&self) -> bool {
        self.0.is_forked()
    }

    fn is_free(&self) -> bool {
        true
    }
}

impl Listening {
    pub fn fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// How to open an end at a place.
struct Opener<T> {
    connect: fn(&Options, &str) -> pelton::Result<T>,
    open: fn(&Options, &Path) -> pelton::Result<T>,
    create: fn(&Options, &Path) -> pelton::Result<T>,
}

impl<T> Opener<T> {
    /// # Safety
    /// `name` is NULL or a string; `options` as for [`options::of`].
    unsafe fn at(&self, name: *const c_char, options: *const COptions) -> Answer<T> {
        if name.is_null() {
            return Err(code::null("name"));
        }
        // SAFETY: the caller's promise.
        let (name, (options, create)) = unsafe { (CStr::from_ptr(name), options::of(options)?) };
        let opened = match name.to_bytes().strip_prefix(b"path:") {
            Some(b"") => return Err(code::tell(code::NAME, "\"path:\" names no directory: write path:DIR")),
            Some(directory) => {
                let open = if create { self.create } else { self.open };
                open(&options, Path::new(OsStr::from_bytes(directory)))
            }
            None if create => {
                let detail =
                    "create is 1, wanted 0 with a name that is not path:DIR: a listener makes its channels itself";
                return Err(code::tell(code::OPTION, detail));
            }
            None => (self.connect)(&options, text(name)?),
        };
        opened.map_err(|error| code::of(&error))
    }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_sender_open(
    name: *const c_char,
    options: *const COptions,
    out: *mut *mut Handle<Sending>,
) -> c_int {
    let opener = Opener {
        connect: |options: &Options, name| options.cast().connect_sender(name),
        open: |options, directory| options.cast().open_sender(directory),
        create: |options, directory| options.cast().create_sender(directory),
    };
    // SAFETY: the caller's promises.
    number(catch(|| unsafe { give(out, || opener.at(name, options).map(Sending::new)) }))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_receiver_open(
    name: *const c_char,
    options: *const COptions,
    out: *mut *mut Handle<Receiving>,
) -> c_int {
    let opener = Opener {
        connect: |options: &Options, name| options.cast().connect_receiver(name),
        open: |options, directory| options.cast().open_receiver(directory),
        create: |options, directory| options.cast().create_receiver(directory),
    };
    // SAFETY: the caller's promises.
    number(catch(|| unsafe { give(out, || opener.at(name, options).map(Receiving::new)) }))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_threads(
    options: *const COptions,
    out_sender: *mut *mut Handle<Sending>,
    out_receiver: *mut *mut Handle<Receiving>,
) -> c_int {
    number(catch(|| {
        if out_sender.is_null() || out_receiver.is_null() {
            return Err(code::null("out_sender or out_receiver"));
        }
        // SAFETY: the caller's promises.
        let (options, _) = unsafe { options::of(options)? };
        let (sender, receiver): (Sender, Receiver) = options.cast().threads().map_err(|error| code::of(&error))?;
        // SAFETY: the caller's promises.
        unsafe {
            out_sender.write(Handle::boxed(Sending::new(sender)));
            out_receiver.write(Handle::boxed(Receiving::new(receiver)));
        }
        Ok(())
    }))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_gather(
    name: *const c_char,
    options: *const COptions,
    out: *mut *mut Handle<Receiving>,
) -> c_int {
    let gather = || {
        // SAFETY: the caller's promises.
        let (options, _) = unsafe { options::of(options)? };
        let gathered = match name.is_null() {
            true => options.cast().gather().map(|(_, receiver)| receiver),
            // SAFETY: the caller's promise.
            false => options.cast().gather_at(text(unsafe { CStr::from_ptr(name) })?),
        };
        gathered.map(Receiving::new).map_err(|error| code::of(&error))
    };
    // SAFETY: the caller's promises.
    number(catch(|| unsafe { give(out, gather) }))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_listen(
    name: *const c_char,
    options: *const COptions,
    out: *mut *mut Handle<Listening>,
) -> c_int {
    let listen = || {
        if name.is_null() {
            return Err(code::null("name"));
        }
        // SAFETY: the caller's promises.
        let (name, (options, _)) = unsafe { (CStr::from_ptr(name), options::of(options)?) };
        options.cast().listen(text(name)?).map(Listening).map_err(|error| code::of(&error))
    };
    // SAFETY: the caller's promises.
    number(catch(|| unsafe { give(out, listen) }))
}

/// Accepts by `accept`, which is asked only while there is reason to.
fn accept<T>(
    listener: &Listener,
    until: Deadline,
    accept: impl Fn(&Listener, Instant) -> pelton::Result<Option<T>>,
) -> Answer<T> {
    /// As long as a peer may take to greet; once it has connected there is no accepting without it.
    const SHAKING: Duration = Duration::from_millis(500);
    let until = match until {
        // Who has connected is accepted all the same: pelton would let it go again.
        Deadline::At(instant) if instant <= Instant::now() => Deadline::Now,
        until => until,
    };
    loop {
        let deadline = match until {
            Deadline::Now => {
                let mut poll = libc::pollfd { fd: listener.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
                // SAFETY: one struct of ours.
                if unsafe { libc::poll(&mut poll, 1, 0) } != 1 {
                    return Err(code::AGAIN);
                }
                Instant::now() + SHAKING
            }
            Deadline::At(instant) => instant,
            // A day, again and again.
            Deadline::Never => Instant::now() + Duration::from_secs(86_400),
        };
        match accept(listener, deadline).map_err(|error| code::of(&error))? {
            Some(accepted) => return Ok(accepted),
            None if until == Deadline::Never => {}
            None => return Err(code::AGAIN),
        }
    }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_accept_sender(
    listener: *mut Handle<Listening>,
    deadline_ns: i64,
    out: *mut *mut Handle<Sending>,
) -> c_int {
    let make = |listening: &mut Listening| {
        accept(&listening.0, deadline(deadline_ns), Listener::accept_sender_until).map(Sending::new)
    };
    // SAFETY: the caller's promises.
    unsafe { call(listener, |listening| give(out, || make(listening))) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_accept_receiver(
    listener: *mut Handle<Listening>,
    deadline_ns: i64,
    out: *mut *mut Handle<Receiving>,
) -> c_int {
    let make = |listening: &mut Listening| {
        accept(&listening.0, deadline(deadline_ns), Listener::accept_receiver_until).map(Receiving::new)
    };
    // SAFETY: the caller's promises.
    unsafe { call(listener, |listening| give(out, || make(listening))) }
}
