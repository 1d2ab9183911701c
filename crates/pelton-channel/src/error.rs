//! Errors: the value found, the value expected, and the remedy.

use pelton_lane::LaneError;
use rustix::io::Errno;
use std::fmt::{Debug, Display, Formatter};

/// The result of an operation that may fail.
pub type Result<T> = std::result::Result<T, Error>;

/// What failed. Full, empty and timed out are results, not errors: see [`crate::Sent`] and the `Option`s of receiving.
///
/// Its text is complete: it has the values found and the remedy, and also the text of a system's error. So `source`
/// returns nothing, and a report of the whole chain has each text once. Match on [`Error::System`], [`Error::File`] and
/// [`Error::NoSpace`] for the system's error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The other side has closed. A receiver returns this after the last message. For a sender: no receiver will read
    /// more messages.
    #[error("the other side has closed; {unreleased} messages were not released")]
    Closed {
        /// Messages committed that the receiver has not released.
        unreleased: u64,
    },
    /// The other side's process has ended without closing. Its committed messages have been delivered. Its unreleased
    /// messages are still in the lane: `resume` offers them to a successor.
    #[error(
        "the other side died without closing; {unreleased} messages were not released: `resume` waits for a successor"
    )]
    PeerDied {
        /// Messages committed that the receiver has not released.
        unreleased: u64,
    },
    /// The message is larger than the lane's limit; or a request or reply is larger than the other side accepts.
    #[error(
        "a message of {bytes} bytes is larger than the limit of {bytes_max}: send less, or raise it, of a channel by twice the capacity, of calls by call_bytes_max at the side that receives"
    )]
    TooLarge {
        /// The requested size.
        bytes: u64,
        /// The largest size for this channel.
        bytes_max: u64,
    },
    /// A reply would have to wait until its client has read others, and the service has no memory left for it: the call
    /// has failed.
    #[error(
        "{bytes} bytes cannot be kept for a client that does not read its replies: it may have {left} more of the {most} bytes of memory for all clients. Let the client read, or raise the service's memory option"
    )]
    Memory {
        /// Bytes of the reply.
        bytes: u64,
        /// Bytes that are left for that client.
        left: u64,
        /// The limit for all clients.
        most: u64,
    },
    /// More descriptors than can go with one message.
    #[error("{found} descriptors with one message, at most {wanted} can go: send the rest with the next")]
    TooManyDescriptors {
        /// The number given.
        found: usize,
        /// The limit.
        wanted: usize,
    },
    /// This process could not receive all descriptors of a message.
    #[error(
        "{sent} descriptors came with message {seq}, {received} could be received: raise this process's RLIMIT_NOFILE"
    )]
    DescriptorsLost {
        /// The number of the message.
        seq: u32,
        /// The number sent.
        sent: usize,
        /// The number received.
        received: usize,
    },
    /// The peer violated the layout or the protocol. Do not trust the last messages; the channel is not usable any
    /// more.
    #[error("{0}: the peer is damaged, hostile, or not pelton")]
    Corrupt(String),
    /// The handle belongs to another process, of which this one is a fork. Create a channel in this process.
    #[error("this handle belongs to the process that forked this one: connect anew in the child")]
    Forked,
    /// No process listens under the name.
    #[error("nobody listens at {name}: start the other side first, or give a deadline to wait for it")]
    NoListener {
        /// The name as given.
        name: String,
    },
    /// Another process listens under the name.
    #[error("{name} is in use by a listener in process {pid}: stop that one, or choose another name")]
    InUse {
        /// The name as given.
        name: String,
        /// The pid of that process, as it states.
        pid: u32,
    },
    /// The name cannot be used.
    #[error("{name:?} {problem}")]
    Name {
        /// The name as given.
        name: String,
        /// The problem, and a valid form.
        problem: String,
    },
    /// Nothing exists at the path. Create the channel, or give a deadline to wait for it.
    #[error("there is no channel at {path}: create it, or give a deadline to wait for it")]
    NoChannel {
        /// The path of the channel.
        path: String,
    },
    /// Something else than a channel exists at the path, or a channel that this process must not or cannot use.
    #[error("{path} cannot be used as a channel: {problem}")]
    NotAChannel {
        /// The channel's directory.
        path: String,
        /// The value found, the value expected, and the remedy.
        problem: String,
    },
    /// Another process, or another handle of this process, has the role. A channel has one receiver, and each of its
    /// lanes has one sender.
    #[error("{path} has a {role} already, {}: stop that process, or wait until it ends", process(*pid))]
    RoleTaken {
        /// The role.
        role: String,
        /// The channel's directory.
        path: String,
        /// The pid of its holder, as that process states; 0 before it has stored one.
        pid: u32,
    },
    /// Something else than a record file exists at the path, or one of a version that this program does not know.
    #[error("{path} cannot be used as a record file: {problem}")]
    NotARecordFile {
        /// The file.
        path: String,
        /// The value found, the value expected, and the remedy.
        problem: String,
    },
    /// A record file violates its format at this offset. Everything before it is complete.
    #[error("{path} is {} at byte {offset}: found {found}, wanted {wanted}; {}", torn(*next), after(*next))]
    Damaged {
        /// The file.
        path: String,
        /// Bytes from the beginning of the file.
        offset: u64,
        /// The bytes found.
        found: String,
        /// The bytes expected.
        wanted: String,
        /// The offset of the next complete chunk; `None` without one, for instance after a writer was killed.
        next: Option<u64>,
    },
    /// The file system, or this user's part of it, is full. Nothing is damaged.
    #[error("no space for {bytes} bytes of {path}: free some, or have it elsewhere or smaller: {error}")]
    NoSpace {
        /// The file.
        path: String,
        /// Bytes that it needs.
        bytes: u64,
        /// The system's error.
        error: std::io::Error,
    },
    /// The channel was created before the last reboot. Data that was not durable by then may be missing.
    #[error("{path} was made before the last reboot: `pelton recover --repair {path}` keeps what is whole of it")]
    Rebooted {
        /// The channel's directory.
        path: String,
    },
    /// One side refused the connection, or the operation.
    #[error("refused: {0}")]
    Refused(String),
    /// The other side closed the connection during the handshake. With a deadline for connecting, the connector tries
    /// again until then, and returns [`Error::TimedOut`].
    #[error("the peer hung up during the handshake: see what it says")]
    HungUp,
    /// The other side did not listen, or did not reply, before the deadline for connecting.
    #[error("timed out while {0}: start the other side, or wait longer")]
    TimedOut(String),
    /// An option has an invalid value.
    #[error("{option} is {found}, wanted {wanted}")]
    Option {
        /// Its name.
        option: &'static str,
        /// Its value.
        found: u64,
        /// The valid values.
        wanted: String,
    },
    /// A message is no value of the type that the program requested, or a value of that type cannot be encoded.
    #[error("the bytes are no {type_name}: {problem}")]
    Value {
        /// The name of the type.
        type_name: &'static str,
        /// What was found, what was wanted, and what to do.
        problem: String,
    },
    /// The service failed the call, and `Completion::ok` was called.
    #[error("{0}")]
    CallFailed(CallFailure),
    /// The service dropped the call without a reply: its handler panicked, or forgot it.
    #[error("the service dropped the call without a reply: see whether its handler panicked")]
    CallAbandoned,
    /// The sink of a flush did not accept the messages. None of them is released, and the next flush gets them again.
    #[error("the sink took nothing: {0}")]
    Sink(String),
    /// An operation on a file failed.
    #[error("{what} {path}: {errno}: {error}")]
    File {
        /// The operation.
        what: &'static str,
        /// The file.
        path: String,
        /// The name of the system's error, such as `ENOENT`; `error` has its number.
        errno: &'static str,
        /// The system's error.
        error: std::io::Error,
    },
    /// A system call failed.
    #[error("{what}: {error}")]
    System {
        /// The operation.
        what: String,
        /// The system's error.
        error: std::io::Error,
    },
}

/// How a service failed a call, in terms of its own.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CallFailure {
    /// The code.
    pub code: u32,
    /// The bytes, for instance a text.
    pub bytes: Vec<u8>,
}

impl CallFailure {
    #[doc(hidden)]
    pub fn new(code: u32, bytes: Vec<u8>) -> CallFailure {
        CallFailure { code, bytes }
    }
}

impl Display for CallFailure {
    /// The code, and the number of the bytes. The bytes are the service's, and may be anything.
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "the service failed the call with code {} and {} bytes of its own", self.code, self.bytes.len())
    }
}

impl Debug for CallFailure {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CallFailure").field("code", &self.code).field("bytes", &self.bytes.len()).finish()
    }
}

impl Error {
    /// Whether the other side has closed: the ordinary end of a channel.
    pub fn is_closed(&self) -> bool {
        matches!(self, Error::Closed { .. })
    }

    /// Whether the other side died: `resume` may continue with a successor.
    pub fn is_peer_died(&self) -> bool {
        matches!(self, Error::PeerDied { .. })
    }

    /// An operation on a file failed.
    #[doc(hidden)]
    pub fn file(what: &'static str, path: String, errno: Errno) -> Error {
        Error::File { what, path, errno: pelton_os::errno_name(errno), error: errno.into() }
    }

    /// A function that maps the error of a system call.
    #[doc(hidden)]
    pub fn system(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Error {
        let what = what.into();
        move |error| {
            if error.kind() == std::io::ErrorKind::InvalidData {
                Error::Corrupt(error.to_string())
            } else {
                Error::System { what, error }
            }
        }
    }
}

/// The error for a failed system call on `path`, which needs `bytes`, or only a directory entry.
pub fn failure(what: String, path: String, bytes: u64, errno: Errno) -> Error {
    let error = errno.into();
    match errno {
        // A directory entry may need a block too.
        Errno::NOSPC | Errno::DQUOT => Error::NoSpace { path, bytes: bytes.max(4096), error },
        Errno::FBIG => Error::System { what: format!("{what}: raise this process's RLIMIT_FSIZE"), error },
        _ => Error::System { what, error },
    }
}

/// The word for a problem: torn if nothing follows it, else damaged.
fn torn(next: Option<u64>) -> &'static str {
    if next.is_none() { "torn" } else { "damaged" }
}

/// The remedy.
fn after(next: Option<u64>) -> String {
    match next {
        None => "no complete chunk follows, and the next writer of the file cuts it there".to_owned(),
        Some(next) => format!(
            "what comes from byte {next} on is whole, and `pelton cat` reads around it; to write, move the file away and begin a new one"
        ),
    }
}

/// The text for a process.
pub(crate) fn process(pid: u32) -> String {
    match pid {
        0 => "a process whose number is not known".to_owned(),
        pid => format!("process {pid}"),
    }
}

impl From<LaneError> for Error {
    fn from(error: LaneError) -> Error {
        match error {
            LaneError::TooLarge { bytes, bytes_max } => Error::TooLarge { bytes, bytes_max },
            LaneError::Closed => Error::Closed { unreleased: 0 },
            LaneError::HoldTooLong { .. } => Error::Refused(error.to_string()),
            other => Error::Corrupt(other.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn system() -> std::io::Error {
        Errno::NOENT.into()
    }

    const VARIANTS: usize = 28;

    /// One error of each variant. The match does not compile with a variant that it lacks: add that here too.
    fn of_every_variant() -> Vec<Error> {
        let all = vec![
            Error::Closed { unreleased: 1 },
            Error::PeerDied { unreleased: 1 },
            Error::TooLarge { bytes: 2, bytes_max: 1 },
            Error::Memory { bytes: 1, left: 2, most: 3 },
            Error::TooManyDescriptors { found: 65, wanted: 64 },
            Error::DescriptorsLost { seq: 1, sent: 2, received: 1 },
            Error::Corrupt("a header".to_owned()),
            Error::Forked,
            Error::NoListener { name: "a".to_owned() },
            Error::InUse { name: "a".to_owned(), pid: 1 },
            Error::Name { name: "a/".to_owned(), problem: "ends with a slash".to_owned() },
            Error::NoChannel { path: "a".to_owned() },
            Error::NotAChannel { path: "a".to_owned(), problem: "it is a file".to_owned() },
            Error::RoleTaken { role: "sender".to_owned(), path: "a".to_owned(), pid: 0 },
            Error::NotARecordFile { path: "a".to_owned(), problem: "it is a directory".to_owned() },
            Error::Damaged {
                path: "a".to_owned(),
                offset: 8,
                found: "1".to_owned(),
                wanted: "2".to_owned(),
                next: Some(16),
            },
            Error::NoSpace { path: "a".to_owned(), bytes: 1, error: system() },
            Error::Rebooted { path: "a".to_owned() },
            Error::Refused("no".to_owned()),
            Error::HungUp,
            Error::TimedOut("connecting".to_owned()),
            Error::Option { option: "capacity", found: 1, wanted: "more".to_owned() },
            Error::Value { type_name: "u8", problem: "no bytes".to_owned() },
            Error::CallFailed(CallFailure::new(7, b"secret".to_vec())),
            Error::CallAbandoned,
            Error::Sink("full".to_owned()),
            Error::file("opening", "a".to_owned(), Errno::NOENT),
            Error::system("polling")(system()),
        ];
        let variants: std::collections::HashSet<_> = all.iter().map(std::mem::discriminant).collect();
        assert_eq!((variants.len(), all.len()), (VARIANTS, VARIANTS), "one of each");
        for error in &all {
            match error {
                Error::Closed { .. } | Error::PeerDied { .. } | Error::TooLarge { .. } | Error::Memory { .. } => {}
                Error::TooManyDescriptors { .. } | Error::DescriptorsLost { .. } | Error::Corrupt(_) => {}
                Error::Forked | Error::NoListener { .. } | Error::InUse { .. } | Error::Name { .. } => {}
                Error::NoChannel { .. } | Error::NotAChannel { .. } | Error::RoleTaken { .. } => {}
                Error::NotARecordFile { .. } | Error::Damaged { .. } | Error::NoSpace { .. } => {}
                Error::Rebooted { .. } | Error::Refused(_) | Error::HungUp | Error::TimedOut(_) => {}
                Error::Option { .. } | Error::Value { .. } | Error::CallFailed(_) | Error::CallAbandoned => {}
                Error::Sink(_) | Error::File { .. } | Error::System { .. } => {}
            }
        }
        all
    }

    #[test]
    fn a_report_of_the_whole_chain_has_each_text_once() {
        for error in of_every_variant() {
            let mut texts: Vec<String> = Vec::new();
            let mut next: Option<&dyn std::error::Error> = Some(&error);
            while let Some(link) = next {
                let text = link.to_string();
                assert!(
                    !text.is_empty() && !texts.iter().any(|before| before.contains(&text)),
                    "{text:?} after {texts:?}"
                );
                texts.push(text);
                next = link.source();
            }
        }
    }

    #[test]
    fn the_text_of_a_systems_error_is_complete() {
        let reason = system().to_string();
        for error in of_every_variant() {
            if let Error::System { .. } | Error::File { .. } | Error::NoSpace { .. } = error {
                assert!(error.to_string().contains(&reason), "{error}");
            }
        }
    }

    #[test]
    fn a_failed_calls_bytes_are_in_no_text() {
        let error = Error::CallFailed(CallFailure::new(7, b"secret".to_vec()));
        for text in [error.to_string(), format!("{error:?}")] {
            assert!(
                text.contains('7') && text.contains('6') && !text.contains("115") && !text.contains("secret"),
                "{text}"
            );
        }
    }
}
