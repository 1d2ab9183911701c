//! The codes, which `build.rs` reads from the header, and the text that explains the last one.

use pelton::Error;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};

include!(concat!(env!("OUT_DIR"), "/codes.rs"));

/// What a function answers: `Err` is a code whose detail, if it is to have one, has been told.
pub type Answer<T = ()> = Result<T, c_int>;

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

/// Tells the detail of a code.
#[cold]
pub fn tell(code: c_int, detail: impl Into<String>) -> c_int {
    let mut bytes = detail.into().into_bytes();
    bytes.retain(|byte| *byte != 0);
    let text = CString::new(bytes).unwrap_or_default();
    // A thread that is ending has nobody to read it.
    let _ = DETAIL.try_with(|detail| detail.try_borrow_mut().map(|mut told| *told = text));
    code
}

/// Tells a code whose text says all.
#[cold]
pub fn plain(code: c_int) -> c_int {
    tell(code, text(code).to_string_lossy())
}

/// NULL where it must not be.
#[cold]
pub fn null(what: &str) -> c_int {
    tell(NULL, format!("{what} is NULL"))
}

/// The code of an error, told.
#[cold]
pub fn of(error: &Error) -> c_int {
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
        Error::TimedOut(_) => AGAIN,
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

/// What the error of a sink of the caller's begins with; its number follows. It may be told in another thread than the sink was called in.
const ANSWERED: &str = "its write answered ";

/// The error of a sink of the caller's that answered a number below 0.
#[cold]
pub fn sink_error(answered: c_int) -> Error {
    Error::Sink(format!("{ANSWERED}{answered}"))
}

/// Whether it came true, by the deadline if there is one.
pub fn came(answer: pelton::Result<bool>) -> Answer {
    match answer {
        Ok(true) => Ok(()),
        Ok(false) => Err(AGAIN),
        Err(error) => Err(of(&error)),
    }
}

/// A mistake that the system would have found, told as it does.
#[cold]
pub fn system(errno: c_int, detail: &str) -> c_int {
    set_errno(errno);
    tell(SYSTEM, format!("{detail}: {}", std::io::Error::from_raw_os_error(errno)))
}

fn set_errno(errno: c_int) {
    // SAFETY: the thread's own word, always there.
    unsafe { *libc::__errno_location() = errno };
}
