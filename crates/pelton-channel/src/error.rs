//! Errors: what was found, what was wanted, and what to do.

use pelton_lane::LaneError;
use rustix::io::Errno;

/// The result of an operation that may fail.
pub type Result<T> = std::result::Result<T, Error>;

/// What failed. Full, empty and timed out are results, not errors: see [`crate::Sent`] and the `Option`s of receiving.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The other side has closed on purpose. A receiver returns it after the last message. For a sender: no receiver
    /// reads further.
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
    /// The message is larger than the lane's limit, or, of a call, than the other side accepts.
    #[error(
        "a message of {bytes} bytes is larger than the limit of {bytes_max}: send less, or raise it, of a channel by twice the capacity, of calls by call_bytes_max at the side that receives"
    )]
    TooLarge {
        /// The size asked for.
        bytes: u64,
        /// The largest that this channel takes.
        bytes_max: u64,
    },
    /// A reply would have to wait until its client has read others, and the service has no memory left for it: the call
    /// has failed.
    #[error(
        "{bytes} bytes cannot be kept for a client that does not read its replies: it may have {left} more of the {most} bytes of memory for all clients. Let the client read, or raise the service's memory option"
    )]
    Memory {
        /// What was to be kept.
        bytes: u64,
        /// What is left for that client.
        left: u64,
        /// The limit for all clients.
        most: u64,
    },
    /// More descriptors than can go with one message.
    #[error("{found} descriptors with one message, at most {wanted} can go: send the rest with the next")]
    TooManyDescriptors {
        /// How many were given.
        found: usize,
        /// The limit.
        wanted: usize,
    },
    /// Descriptors came with a message, and this process could not receive all of them.
    #[error(
        "{sent} descriptors came with message {seq}, {received} could be received: raise this process's RLIMIT_NOFILE"
    )]
    DescriptorsLost {
        /// The number of the message.
        seq: u32,
        /// How many were sent.
        sent: usize,
        /// How many were received.
        received: usize,
    },
    /// The peer violated the layout or the protocol. Do not trust the last messages; the channel is not usable any
    /// more.
    #[error("{0}: the peer is damaged, hostile, or not pelton")]
    Corrupt(String),
    /// The handle was made in another process, of which this one is a fork. Make a channel in this process.
    #[error("this handle belongs to the process that forked this one: connect anew in the child")]
    Forked,
    /// No process listens under the name.
    #[error("nobody listens at {name}: start the other side first, or give a deadline to wait for it")]
    NoListener {
        /// The name as given.
        name: String,
    },
    /// Another process listens there.
    #[error("{name} is in use by a listener in process {pid}: stop that one, or choose another name")]
    InUse {
        /// The name as given.
        name: String,
        /// Its process, as it states.
        pid: u32,
    },
    /// The name cannot be used.
    #[error("{name:?} {problem}")]
    Name {
        /// The name as given.
        name: String,
        /// What is wrong with it, and what would be right.
        problem: String,
    },
    /// Nothing is at the path. Create the channel, or give a deadline to wait for it.
    #[error("there is no channel at {path}: create it, or give a deadline to wait for it")]
    NoChannel {
        /// Where it should be.
        path: String,
    },
    /// What is at the path is no channel, or one that this process must not or cannot use.
    #[error("{path} cannot be used as a channel: {problem}")]
    NotAChannel {
        /// The channel's directory.
        path: String,
        /// What was found, what was wanted, and what to do.
        problem: String,
    },
    /// Another process, or another handle of this one, has the role: a channel has one receiver, each of its lanes one
    /// sender.
    #[error("{path} has a {role} already, {}: stop that process, or wait until it ends", process(*pid))]
    RoleTaken {
        /// The role.
        role: String,
        /// The channel's directory.
        path: String,
        /// Its process, as it states; 0 before it has.
        pid: u32,
    },
    /// What is at the path is no record file, or one of a version that this program does not know.
    #[error("{path} cannot be used as a record file: {problem}")]
    NotARecordFile {
        /// The file.
        path: String,
        /// What was found, what was wanted, and what to do.
        problem: String,
    },
    /// A record file is not as its format says. What comes before that place is whole.
    #[error("{path} is {} at byte {offset}: found {found}, wanted {wanted}; {}", torn(*next), after(*next))]
    Damaged {
        /// The file.
        path: String,
        /// Where, in bytes from its beginning.
        offset: u64,
        /// What is there.
        found: String,
        /// What should be there.
        wanted: String,
        /// Where the next whole chunk begins; `None` when nothing whole comes after it, as where a writer was killed.
        next: Option<u64>,
    },
    /// The file system, or this user's part of it, is full. Nothing is damaged.
    #[error("no space for {bytes} bytes of {path}: free some, or have it elsewhere or smaller: {source}")]
    NoSpace {
        /// The file.
        path: String,
        /// What it wants.
        bytes: u64,
        /// What the system said.
        source: std::io::Error,
    },
    /// The channel was made before the machine was last started: what was not on disk by then may be missing.
    #[error("{path} was made before the last reboot: `pelton recover --repair {path}` keeps what is whole of it")]
    Rebooted {
        /// The channel's directory.
        path: String,
    },
    /// The other side does not want this connection, or this side does not want the other.
    #[error("refused: {0}")]
    Refused(String),
    /// The other side went during the handshake.
    #[error("the peer hung up during the handshake: see what it says")]
    HungUp,
    /// The other side did not appear, or not answer, by the deadline of connecting.
    #[error("timed out while {0}: start the other side, or wait longer")]
    TimedOut(String),
    /// An option has a value that cannot be.
    #[error("{option} is {found}, wanted {wanted}")]
    Option {
        /// Its name.
        option: &'static str,
        /// Its value.
        found: u64,
        /// What it may be.
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
    /// What a flush hands its messages to did not take them: nothing of them is released, and they come again.
    #[error("the sink took nothing: {0}")]
    Sink(String),
    /// An operation on a file failed.
    #[error("{what} {path}: {errno}: {source}")]
    File {
        /// What was being done.
        what: &'static str,
        /// Of which file.
        path: String,
        /// The name of what the system said, as `ENOENT`; `source` has its number.
        errno: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// The operating system refused something.
    #[error("{what}: {source}")]
    System {
        /// What was being done.
        what: String,
        /// What the system said.
        source: std::io::Error,
    },
}

impl Error {
    /// Whether the other side has closed on purpose: the ordinary end of a channel.
    pub fn is_closed(&self) -> bool {
        matches!(self, Error::Closed { .. })
    }

    /// Whether the other side died: `resume` may go on with a successor.
    pub fn is_peer_died(&self) -> bool {
        matches!(self, Error::PeerDied { .. })
    }

    /// An operation on a file failed.
    #[doc(hidden)]
    pub fn file(what: &'static str, path: String, errno: Errno) -> Error {
        Error::File { what, path, errno: pelton_os::errno_name(errno), source: errno.into() }
    }

    /// The system refused something: to be mapped from its error.
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

/// Puts into words what the system said of `path`, which wants `bytes`, or just a name.
pub fn failure(what: String, path: String, bytes: u64, errno: Errno) -> Error {
    let source = errno.into();
    match errno {
        // A name costs a block too, more or less.
        Errno::NOSPC | Errno::DQUOT => Error::NoSpace { path, bytes: bytes.max(4096), source },
        Errno::FBIG => Error::System { what: format!("{what}: raise this process's RLIMIT_FSIZE"), source },
        _ => Error::System { what, source },
    }
}

/// Whether it is a tail or a hole.
fn torn(next: Option<u64>) -> &'static str {
    if next.is_none() { "torn" } else { "damaged" }
}

/// What to do about it.
fn after(next: Option<u64>) -> String {
    match next {
        None => "nothing whole comes after it, and whoever next writes to the file cuts it there".to_owned(),
        Some(next) => format!(
            "what comes from byte {next} on is whole, and `pelton cat` reads around it; to write, move the file away and begin a new one"
        ),
    }
}

/// A process in words.
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
