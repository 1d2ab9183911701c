//! Wakes: a descriptor in libuv's loop of this environment, and threads for the few steps that have no descriptor.
//!
//! - The descriptor stays open until libuv has left it: an object has its [`Watch`] before its endpoint.
//! - JavaScript's callback is referenced strongly only while it is awaited, so that a forgotten object is collected.
//! - When an environment ends, a cleanup hook closes the handle, and the environment waits until libuv has.

use crate::error::named;
use napi::bindgen_prelude::*;
use napi::sys;
use pelton::Deadline;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// `UV_POLL` and `UV_READABLE` of libuv 1, whose numbers do not change.
const UV_POLL: c_int = 8;
const UV_READABLE: c_int = 1;

type PollCallback = unsafe extern "C" fn(handle: *mut c_void, status: c_int, events: c_int);
type CloseCallback = unsafe extern "C" fn(handle: *mut c_void);

// Node exports libuv's functions to its addons.
unsafe extern "C" {
    fn uv_handle_size(kind: c_int) -> usize;
    fn uv_handle_set_data(handle: *mut c_void, data: *mut c_void);
    fn uv_handle_get_data(handle: *const c_void) -> *mut c_void;
    fn uv_poll_init(uv_loop: *mut c_void, handle: *mut c_void, fd: c_int) -> c_int;
    fn uv_poll_start(handle: *mut c_void, events: c_int, callback: PollCallback) -> c_int;
    fn uv_poll_stop(handle: *mut c_void) -> c_int;
    fn uv_close(handle: *mut c_void, callback: CloseCallback);
    fn uv_ref(handle: *mut c_void);
    fn uv_unref(handle: *mut c_void);
}

/// A descriptor in the loop. Only the environment's thread uses it.
pub struct Watch(Rc<Inner>);

struct Inner {
    env: sys::napi_env,
    callback: sys::napi_ref,
    context: sys::napi_async_context,
    hook: Cell<sys::napi_async_cleanup_hook_handle>,
    /// libuv's handle.
    memory: Vec<Cell<u64>>,
    is_awaited: Cell<bool>,
    is_polling: Cell<bool>,
    is_closed: Cell<bool>,
    /// Whether a wait keeps the process alive.
    is_ref: Cell<bool>,
}

fn checked(status: sys::napi_status) -> Result<()> {
    match status {
        sys::Status::napi_ok => Ok(()),
        status => Err(named("internal", &format!("Node-API returned {}: report this bug", Status::from(status)))),
    }
}

impl Watch {
    /// Registers a descriptor, which stays open until the watch is dropped. `callback` is called after
    /// [`Watch::start`], once the descriptor is readable; its owner keeps it.
    pub fn new(env: &Env, fd: RawFd, callback: sys::napi_value) -> Result<Watch> {
        let raw = env.raw();
        let uv_loop = env.get_uv_event_loop()?;
        let (mut reference, mut context, mut name) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        // SAFETY: this is the environment's thread, and the values are its own.
        unsafe {
            checked(sys::napi_create_reference(raw, callback, 0, &mut reference))?;
            checked(sys::napi_create_string_utf8(raw, c"pelton".as_ptr(), 6, &mut name))?;
            checked(sys::napi_async_init(raw, ptr::null_mut(), name, &mut context))?;
        }
        // SAFETY: it takes a number.
        let bytes = unsafe { uv_handle_size(UV_POLL) };
        let inner = Rc::new(Inner {
            env: raw,
            callback: reference,
            context,
            hook: Cell::new(ptr::null_mut()),
            memory: vec![Cell::new(0); bytes.div_ceil(8)],
            is_awaited: Cell::new(false),
            is_polling: Cell::new(false),
            is_closed: Cell::new(false),
            is_ref: Cell::new(true),
        });
        // SAFETY: the memory has libuv's size for this handle, and lives until `closed`, because libuv owns a count.
        let status = unsafe { uv_poll_init(uv_loop.cast(), inner.handle(), fd) };
        if status != 0 {
            return Err(named("system", &format!("libuv does not take a descriptor: error {status}")));
        }
        let owned = Rc::into_raw(inner.clone()).cast_mut().cast::<c_void>();
        // SAFETY: the handle is initialised. `owned` is a count that `closed` returns.
        unsafe {
            uv_handle_set_data(inner.handle(), owned);
            uv_unref(inner.handle());
        }
        let watch = Watch(inner);
        let mut hook = ptr::null_mut();
        // SAFETY: `owned` lives until `closed`, which removes the hook.
        checked(unsafe { sys::napi_add_async_cleanup_hook(raw, Some(environment_ends), owned, &mut hook) })?;
        watch.0.hook.set(hook);
        Ok(watch)
    }

    /// Awaits the descriptor: the callback is called once when it is readable.
    pub fn start(&self) {
        let inner = &*self.0;
        if inner.is_closed.get() || inner.is_awaited.replace(true) {
            return;
        }
        // SAFETY: the handle and the reference are open until `is_closed`.
        unsafe {
            sys::napi_reference_ref(inner.env, inner.callback, ptr::null_mut());
            if !inner.is_polling.replace(true) {
                uv_poll_start(inner.handle(), UV_READABLE, readable);
            }
            if inner.is_ref.get() {
                uv_ref(inner.handle());
            }
        }
    }

    /// Ends the wait, if there is one.
    pub fn stop(&self) {
        self.0.end_wait();
    }

    /// As `set_ref` has set it.
    pub fn is_ref(&self) -> bool {
        self.0.is_ref.get()
    }

    /// Whether a wait keeps the process alive.
    pub fn set_ref(&self, is_ref: bool) {
        let inner = &*self.0;
        inner.is_ref.set(is_ref);
        if inner.is_awaited.get() {
            // SAFETY: it is awaited, so the handle is open.
            unsafe { if is_ref { uv_ref(inner.handle()) } else { uv_unref(inner.handle()) } }
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Inner {
    fn handle(&self) -> *mut c_void {
        self.memory.as_ptr().cast_mut().cast()
    }

    fn end_wait(&self) {
        if self.is_awaited.replace(false) && !self.is_closed.get() {
            // SAFETY: as in `start`, which has made the reference strong.
            unsafe {
                sys::napi_reference_unref(self.env, self.callback, ptr::null_mut());
                uv_unref(self.handle());
            }
        }
    }

    fn close(&self) {
        self.end_wait();
        if self.is_closed.replace(true) {
            return;
        }
        // SAFETY: this is the environment's thread, and each is released once.
        unsafe {
            uv_poll_stop(self.handle());
            uv_close(self.handle(), closed);
            sys::napi_delete_reference(self.env, self.callback);
            sys::napi_async_destroy(self.env, self.context);
        }
    }

    /// Calls the callback. An exception of it becomes the process's uncaught exception.
    fn call(&self) {
        let env = self.env;
        let (mut scope, mut callback, mut global, mut result) =
            (ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        // SAFETY: libuv calls on the environment's thread, while the environment lives: its end closes the handle.
        unsafe {
            sys::napi_open_handle_scope(env, &mut scope);
            sys::napi_get_reference_value(env, self.callback, &mut callback);
            sys::napi_get_global(env, &mut global);
            if !callback.is_null() {
                let status = sys::napi_make_callback(env, self.context, global, callback, 0, ptr::null(), &mut result);
                if status == sys::Status::napi_pending_exception {
                    let mut exception = ptr::null_mut();
                    sys::napi_get_and_clear_last_exception(env, &mut exception);
                    sys::napi_fatal_exception(env, exception);
                }
            }
            sys::napi_close_handle_scope(env, scope);
        }
    }
}

/// libuv: the descriptor is readable.
unsafe extern "C" fn readable(handle: *mut c_void, _status: c_int, _events: c_int) {
    // SAFETY: the data is the count that the handle owns; this takes another one, for a close in the callback.
    let inner = unsafe {
        let data = uv_handle_get_data(handle).cast::<Inner>();
        Rc::increment_strong_count(data);
        Rc::from_raw(data)
    };
    if !inner.is_awaited.get() {
        // Nobody waits, so nobody drains the descriptor: it would be readable in each iteration of the loop.
        inner.is_polling.set(false);
        // SAFETY: the handle is open, as libuv calls.
        unsafe { uv_poll_stop(handle) };
        return;
    }
    inner.end_wait();
    inner.call();
}

/// libuv: the handle's memory is free.
unsafe extern "C" fn closed(handle: *mut c_void) {
    // SAFETY: the data is the count that the handle owns.
    let inner = unsafe { Rc::from_raw(uv_handle_get_data(handle).cast::<Inner>()) };
    let hook = inner.hook.get();
    if !hook.is_null() {
        // SAFETY: the hook is removed once, here.
        unsafe { sys::napi_remove_async_cleanup_hook(hook) };
    }
}

/// Node: the environment ends.
unsafe extern "C" fn environment_ends(_hook: sys::napi_async_cleanup_hook_handle, data: *mut c_void) {
    // SAFETY: the count that the handle owns lives until `closed`, which removes this hook.
    unsafe { &*data.cast::<Inner>() }.close();
}

/// Between two slices of a step's wait, its thread detects a cancel.
const SLICE: Duration = Duration::from_millis(30);

/// A step on a thread of its own: a wait for a peer that has no descriptor, or one for the disk. Rare. Dropped, it is
/// cancelled, and its thread drops the result.
pub struct Step<T> {
    watch: Watch,
    shared: Arc<Shared<T>>,
}

struct Shared<T> {
    result: Mutex<Option<T>>,
    is_cancelled: AtomicBool,
    doorbell: OwnedFd,
}

/// What the thread of a step sees of its cancel.
pub struct Cancel<'a>(&'a AtomicBool);

impl Cancel<'_> {
    /// Repeats `attempt`, until a deadline that is at most a slice away, until it returns true; false once `deadline`
    /// has passed, or the step is cancelled.
    pub fn wait(
        &self,
        deadline: Deadline,
        mut attempt: impl FnMut(Instant) -> pelton::Result<bool>,
    ) -> pelton::Result<bool> {
        loop {
            let slice = Instant::now() + SLICE;
            let until = match deadline {
                Deadline::At(end) => end.min(slice),
                _ => slice,
            };
            if attempt(until)? {
                return Ok(true);
            }
            let has_passed = matches!(deadline, Deadline::At(end) if Instant::now() >= end);
            // Relaxed: it publishes nothing.
            if has_passed || deadline == Deadline::Now || self.0.load(Ordering::Relaxed) {
                return Ok(false);
            }
        }
    }
}

impl<T> Step<T> {
    /// Has the thread return soon.
    pub fn cancel(&self) {
        self.shared.is_cancelled.store(true, Ordering::Relaxed);
    }

    /// See `Watch::set_ref`.
    pub fn set_ref(&self, is_ref: bool) {
        self.watch.set_ref(is_ref);
    }
}

impl<T> Drop for Step<T> {
    fn drop(&mut self) {
        self.cancel();
    }
}

impl<T: Send + 'static> Step<T> {
    /// Begins `work` with `value`, which stays there if this fails. `callback` is called once its result is there.
    /// `is_ref`: whether that keeps the process alive.
    pub fn start<V: Send + 'static>(
        env: &Env,
        callback: sys::napi_value,
        is_ref: bool,
        value: &mut Option<V>,
        work: impl FnOnce(V, &Cancel<'_>) -> T + Send + 'static,
    ) -> Result<Step<T>> {
        let failed = |error: std::io::Error| named("system", &format!("starting a step: {error}"));
        let doorbell =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| failed(error.into()))?;
        let shared = Arc::new(Shared { result: Mutex::new(None), is_cancelled: AtomicBool::new(false), doorbell });
        let watch = Watch::new(env, shared.doorbell.as_raw_fd(), callback)?;
        watch.set_ref(is_ref);
        let of_thread = shared.clone();
        // A thread that is not started drops what it has.
        let (give, given) = mpsc::channel();
        std::thread::Builder::new()
            .name("pelton step".to_owned())
            .spawn(move || {
                let Ok(value) = given.recv() else { return };
                let result = work(value, &Cancel(&of_thread.is_cancelled));
                *of_thread.result.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
                // It has a count of one place only, so the write finds space.
                let _ = rustix::io::write(&of_thread.doorbell, &1_u64.to_ne_bytes());
            })
            .map_err(failed)?;
        if let Some(value) = value.take() {
            // The thread receives it.
            let _ = give.send(value);
        }
        watch.start();
        Ok(Step { watch, shared })
    }

    /// The result, once.
    pub fn take(&self) -> Option<T> {
        self.watch.stop();
        self.shared.result.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Waits for the result, on this thread: when the process ends.
    pub fn wait(&self) -> Option<T> {
        let mut doorbell = [PollFd::new(&self.shared.doorbell, PollFlags::IN)];
        while poll(&mut doorbell, None) == Err(rustix::io::Errno::INTR) {}
        self.take()
    }
}
