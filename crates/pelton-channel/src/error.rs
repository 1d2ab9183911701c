//! Errors: the value found, the value expected, and the remedy.

use pelton_lane::LaneError;
use rustix::io::Errno;

/// The result of an operation that may fail.
pub type Result<T> = std::result::Result<T, Error>;

/// What failed. Full, empty and timed out are results, not errors: see [`crate::Sent`] and the `Option`s of receiving.
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
    #[error("no space for {bytes} bytes of {path}: free some, or have it elsewhere or smaller: {source}")]
    NoSpace {
        /// The file.
        path: String,
        /// Bytes that it needs.
        bytes: u64,
        /// The system's error.
        source: std::io::Error,
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
    /// The other side closed the connection during the handshake.
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
    /// The sink of a flush did not accept the messages. None of them is released, and the next flush gets them again.
    #[error("the sink took nothing: {0}")]
    Sink(String),
    /// An operation on a file failed.
    #[error("{what} {path}: {errno}: {source}")]
    File {
        /// The operation.
        what: &'static str,
        /// The file.
        path: String,
        /// The name of the system's error, such as `ENOENT`; `source` has its number.
        errno: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// The operation.
        what: String,
        /// The system's error.
        source: std::io::Error,
    },
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
        Error::File { what, path, errno: pelton_os::errno_name(errno), source: errno.into() }
    }

    /// A function that maps the error of a system call.
    #[doc(hidden)]
    pub fn system(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Error {
        let what = what.into();
        move |source| {
            if source.kind() == std::io::ErrorKind::InvalidData {
                Error::Corrupt(source.to_string())
            } else {
                Error::System { what, source }
            }
        }
    }
}

/// The error for a failed system call on `path`, which needs `bytes`, or only a directory entry.
pub fn failure(what: String, path: String, bytes: u64, errno: Errno) -> Error {
    let source = errno.into();
    match errno {
        // A directory entry may need a block too.
        Errno::NOSPC | Errno::DQUOT => Error::NoSpace { path, bytes: bytes.max(4096), source },
        Errno::FBIG => Error::System { what: format!("{what}: raise this process's RLIMIT_FSIZE"), source },
        _ => Error::System { what, source },
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
fn process(pid: u32) -> String {
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
            other => Error::Corrupt(other.to_string()),
        }
    }
}
