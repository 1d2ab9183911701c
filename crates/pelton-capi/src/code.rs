//! The codes, which `build.rs` reads from `result.h`, and the detail that explains the last one.

use pelton::{Armed, Error, Sent};
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};

include!(concat!(env!("OUT_DIR"), "/codes.rs"));

/// The result of a function: `Err` is a code whose detail has been stored, if it has one.
pub type Answer<T = ()> = Result<T, c_int>;

/// `PELTON_READY`.
const READY: c_int = 1;

/// What a function returns besides negative codes.
pub trait Success {
    fn number(self) -> c_int;
}

impl Success for () {
    fn number(self) -> c_int {
        0
    }
}

impl Success for c_int {
    fn number(self) -> c_int {
        self
    }
}

/// The number that C gets.
pub fn number(answer: Answer<impl Success>) -> c_int {
    answer.map_or_else(|code| code, Success::number)
}

thread_local! {
    static DETAIL: RefCell<CString> = RefCell::default();
}

pub fn text(code: c_int) -> &'static CStr {
    match code {
        0 => c"ok",
        code => TEXTS.iter().find(|(number, _)| *number == code).map_or(c"an unknown code", |(_, text)| *text),
    }
}

pub fn detail() -> *const c_char {
    DETAIL.try_with(|detail| detail.try_borrow().map_or(c"".as_ptr(), |text| text.as_ptr())).unwrap_or(c"".as_ptr())
}

/// Stores the detail of a code.
#[cold]
pub fn tell(code: c_int, detail: impl Into<String>) -> c_int {
    let mut bytes = detail.into().into_bytes();
    bytes.retain(|byte| *byte != 0);
    let text = CString::new(bytes).unwrap_or_default();
    // A thread that is ending reads it no more.
    let _ = DETAIL.try_with(|detail| detail.try_borrow_mut().map(|mut stored| *stored = text));
    code
}

/// A code whose text is its detail.
#[cold]
pub fn plain(code: c_int) -> c_int {
    tell(code, text(code).to_string_lossy())
}

/// The error for a pointer that is NULL.
#[cold]
pub fn null(what: &str) -> c_int {
    tell(NULL, format!("{what} is NULL"))
}

/// The error for an option, or a field, with an invalid value.
#[cold]
pub fn wrong(option: &str, found: impl std::fmt::Display, wanted: &str) -> i32 {
    tell(OPTION, format!("{option} is {found}, wanted {wanted}"))
}

/// The code of an error, which becomes the detail.
#[cold]
pub fn of(error: &Error) -> c_int {
    // The only option of a library's error that has another name in C.
    if let Error::Option { option: "memory", found, wanted } = error {
        return wrong("memory_bytes_max", found, wanted);
    }
    let code = match error {
        Error::Closed { .. } => CLOSED,
        Error::PeerDied { .. } => PEER_DIED,
        Error::TooLarge { .. } => TOO_LARGE,
        Error::TooManyDescriptors { .. } => TOO_MANY_DESCRIPTORS,
        Error::DescriptorsLost { .. } => DESCRIPTORS_LOST,
        Error::Corrupt(_) => CORRUPT,
        Error::Forked => FORKED,
        Error::NoListener { .. } => NO_LISTENER,
        Error::InUse { .. } => IN_USE,
        Error::Name { .. } => NAME,
        Error::NoChannel { .. } => NO_CHANNEL,
        Error::NotAChannel { .. } => NOT_A_CHANNEL,
        Error::RoleTaken { .. } => ROLE_TAKEN,
        Error::NoSpace { .. } => NO_SPACE,
        Error::Rebooted { .. } => REBOOTED,
        // The call has failed, and its responder is closed.
        Error::Memory { .. } | Error::Refused(_) => REFUSED,
        Error::HungUp => HUNG_UP,
        Error::TimedOut(_) => TIMED_OUT,
        Error::Option { .. } => OPTION,
        Error::NotARecordFile { .. } => NOT_A_RECORD_FILE,
        Error::Damaged { next: Some(_), .. } => DAMAGED,
        Error::Damaged { next: None, .. } => TORN,
        Error::Sink(_) => SINK,
        Error::System { .. } | Error::File { .. } => SYSTEM,
        other => return tell(INTERNAL, format!("no code for this error: {other}")),
    };
    tell(code, error.to_string());
    if let Error::System { error: source, .. }
    | Error::NoSpace { error: source, .. }
    | Error::File { error: source, .. } = error
    {
        set_errno(source.raw_os_error().unwrap_or(libc::EIO));
    }
    if let Error::Sink(why) = error
        && let Some(answered) = why.strip_prefix(ANSWERED).and_then(|number| number.parse::<c_int>().ok())
    {
        set_errno(answered.checked_neg().unwrap_or(c_int::MAX));
    }
    code
}

/// The beginning of the error of a caller's sink; its number follows. Another thread than the sink's may get the error.
const ANSWERED: &str = "its write returned ";

/// The error of a caller's sink that returned a negative number.
#[cold]
pub fn sink_error(answered: c_int) -> Error {
    Error::Sink(format!("{ANSWERED}{answered}"))
}

/// The result, or its error's code.
pub fn done<T>(result: pelton::Result<T>) -> Answer<T> {
    result.map_err(|error| of(&error))
}

/// What was found; `PELTON_AGAIN` if nothing was.
pub fn found<T>(result: pelton::Result<Option<T>>) -> Answer<T> {
    done(result)?.ok_or(AGAIN)
}

/// `PELTON_AGAIN` unless it is true.
pub fn is_done(result: pelton::Result<bool>) -> Answer {
    if done(result)? { Ok(()) } else { Err(AGAIN) }
}

/// `PELTON_AGAIN` unless it was sent.
pub fn sent(result: pelton::Result<Sent>) -> Answer {
    match done(result)? {
        Sent::Sent => Ok(()),
        Sent::Full | Sent::TimedOut => Err(AGAIN),
    }
}

/// `PELTON_OK` or `PELTON_READY`.
pub fn armed(result: pelton::Result<Armed>) -> Answer<c_int> {
    Ok(if done(result)?.is_waiting() { 0 } else { READY })
}

/// An error that the kernel would report, as it reports it.
#[cold]
pub fn system(errno: c_int, detail: &str) -> c_int {
    set_errno(errno);
    tell(SYSTEM, format!("{detail}: {}", std::io::Error::from_raw_os_error(errno)))
}

fn set_errno(errno: c_int) {
    // SAFETY: it returns the address of this thread's errno.
    unsafe { *libc::__errno_location() = errno };
}
