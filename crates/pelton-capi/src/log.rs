//! The function that receives the log of the library, by the crate `log`.

use log::{Level, LevelFilter, Log, Metadata, Record};
use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::{PoisonError, RwLock};

/// `pelton_log` of `pelton.h`.
pub(crate) type Function = unsafe extern "C" fn(context: *mut c_void, priority: c_int, text: *const c_char);

struct Receiver {
    function: Function,
    context: *mut c_void,
}

// SAFETY: the C caller of `pelton_set_log` guarantees that any thread may call the function with this context.
unsafe impl Send for Receiver {}
// SAFETY: likewise.
unsafe impl Sync for Receiver {}

static RECEIVER: RwLock<Option<Receiver>> = RwLock::new(None);

/// Sets the function, or none. Returns once no thread is in the previous one.
pub(crate) fn set(function: Option<Function>, context: *mut c_void) {
    // Fails if it is set already: then it stays.
    let _ = log::set_logger(&ToFunction);
    log::set_max_level(if function.is_some() { LevelFilter::Info } else { LevelFilter::Off });
    *RECEIVER.write().unwrap_or_else(PoisonError::into_inner) = function.map(|function| Receiver { function, context });
}

struct ToFunction;

impl Log for ToFunction {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        // `set` is replacing the function: neither of them receives this.
        let Ok(receiver) = RECEIVER.try_read() else { return };
        let Some(Receiver { function, context }) = &*receiver else { return };
        // The priorities of syslog(3).
        let priority = match record.level() {
            Level::Error => 3,
            Level::Warn => 4,
            Level::Info | Level::Debug | Level::Trace => 6,
        };
        let text = CString::new(record.args().to_string().replace('\0', " ")).unwrap_or_default();
        // SAFETY: the C caller of `pelton_set_log` guarantees that any thread may call the function with this context
        // until `set` has returned; the lock delays that.
        unsafe { function(*context, priority, text.as_ptr()) }
    }

    fn flush(&self) {}
}
