//! Why a command did not end with 0: one kind per exit code, with the sentence for standard error.

use std::{fmt::Display, io};

/// A command's end other than success.
#[derive(Debug)]
pub enum Failure {
    /// The other side died or left messages unreleased, or a demo's output is not its input.
    Peer(String),
    /// Bad input, or options that do not fit it.
    Input(String),
    /// The name or the other side was refused.
    Refused(String),
    /// The other side did not appear in time.
    TimedOut(String),
    /// A system call failed, or the channel is corrupt.
    System(String),
    /// The service failed a call, or let it go.
    Call(String),
    /// A signal asked for the end; the channel was closed first.
    Signal(i32),
    /// The reader of standard output went away: no error of ours, and nothing to say.
    OutputClosed,
}

impl Failure {
    /// The exit code, as `--help` lists them.
    pub fn code(&self) -> u8 {
        match self {
            Failure::Peer(_) => 1,
            Failure::Input(_) => 2,
            Failure::Refused(_) => 3,
            Failure::TimedOut(_) => 4,
            Failure::System(_) => 5,
            Failure::Call(_) => 6,
            // the convention of shells
            Failure::Signal(signal) => 128 + *signal as u8,
            Failure::OutputClosed => 128 + 13,
        }
    }

    /// What to say on standard error, if anything.
    pub fn text(&self) -> Option<&str> {
        match self {
            Failure::Peer(text) | Failure::Input(text) | Failure::Refused(text) => Some(text),
            Failure::TimedOut(text) | Failure::System(text) | Failure::Call(text) => Some(text),
            Failure::Signal(_) | Failure::OutputClosed => None,
        }
    }

    /// A failed system call: `what` was being done.
    pub fn system(what: impl Display, error: impl Into<io::Error>) -> Failure {
        Failure::System(format!("{what}: {}", error.into()))
    }
}

impl From<pelton::Error> for Failure {
    fn from(error: pelton::Error) -> Failure {
        use pelton::Error;
        let text = error.to_string();
        match error {
            Error::Closed { .. } | Error::PeerDied { .. } => Failure::Peer(text),
            Error::TooLarge { .. } | Error::Option { .. } => Failure::Input(text),
            Error::Refused(_) | Error::HungUp | Error::Name { .. } | Error::InUse { .. } => Failure::Refused(text),
            Error::NoChannel { .. } | Error::NotAChannel { .. } => Failure::Refused(text),
            Error::RoleTaken { .. } | Error::Rebooted { .. } => Failure::Refused(text),
            Error::TimedOut(_) | Error::NoListener { .. } => Failure::TimedOut(text),
            _ => Failure::System(text),
        }
    }
}
