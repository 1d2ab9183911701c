//! Why a command failed: one kind per exit code, with the text for standard error.

use std::{
    fmt::{Display, Write as _},
    io::{self, Write as _},
    process::ExitCode,
};

/// Why a command failed.
#[derive(Debug)]
pub enum Failure {
    /// The other side died or left messages unreleased, or a check failed.
    Peer(String),
    /// Bad input, or options that do not fit it.
    Input(String),
    /// The name or the other side is refused.
    Refused(String),
    /// The other side did not appear in time.
    TimedOut(String),
    /// A system call failed, or the channel is corrupt.
    System(String),
    /// The service failed a call, or dropped it.
    Call(String),
    /// A signal ended the command, after it closed the channel.
    Signal(i32),
    /// The reader of standard output closed it: no error, and no text.
    OutputClosed,
}

impl Failure {
    /// The exit code; `--help` has the table.
    pub fn code(&self) -> u8 {
        match self {
            Failure::Peer(_) => 1,
            Failure::Input(_) => 2,
            Failure::Refused(_) => 3,
            Failure::TimedOut(_) => 4,
            Failure::System(_) => 5,
            Failure::Call(_) => 6,
            // As shells report it.
            Failure::Signal(signal) => 128 + *signal as u8,
            Failure::OutputClosed => 128 + 13,
        }
    }

    /// The text for standard error and for `--json`, if any. It is safe on a terminal, whichever process it comes from.
    pub fn text(&self) -> Option<String> {
        match self {
            Failure::Peer(text) | Failure::Input(text) | Failure::Refused(text) => Some(printable(text)),
            Failure::TimedOut(text) | Failure::System(text) | Failure::Call(text) => Some(printable(text)),
            Failure::Signal(_) | Failure::OutputClosed => None,
        }
    }

    /// A failed system call; `what` names the operation.
    pub fn system(what: impl Display, error: impl Into<io::Error>) -> Failure {
        Failure::System(format!("{what}: {}", error.into()))
    }

    /// A record file that cannot be opened: bad input if its path is to blame, and not the system.
    pub fn of_file(error: pelton::Error) -> Failure {
        use io::ErrorKind::{IsADirectory, NotADirectory, NotFound};
        use pelton::Error::{File, NotARecordFile, System};
        let is_input = match &error {
            NotARecordFile { .. } => true,
            System { error, .. } | File { error, .. } => {
                // EPERM is the system's: a seccomp filter refuses the call.
                matches!(error.kind(), NotFound | IsADirectory | NotADirectory)
                    || error.raw_os_error() == Some(libc::EACCES)
            }
            _ => false,
        };
        if is_input { Failure::Input(error.to_string()) } else { error.into() }
    }
}

impl From<pelton::Error> for Failure {
    fn from(error: pelton::Error) -> Failure {
        use pelton::Error;
        // The library's texts advise programmers: to set a deadline, to call `resume`. Users of a command can do
        // neither.
        let text = match &error {
            Error::NoListener { name } => format!("nobody listens at {name}: start the other side first"),
            Error::NoChannel { path } => {
                format!("there is no channel at {path}: `pelton send` or `pelton recv` creates it")
            }
            Error::PeerDied { unreleased } => {
                format!("the other side died without closing; {unreleased} messages were not released")
            }
            _ => error.to_string(),
        };
        match error {
            Error::Closed { .. } | Error::PeerDied { .. } => Failure::Peer(text),
            Error::TooLarge { .. } | Error::Memory { .. } | Error::Option { .. } => Failure::Input(text),
            Error::Refused(_) | Error::HungUp | Error::Name { .. } | Error::InUse { .. } => Failure::Refused(text),
            Error::NoChannel { .. } | Error::NotAChannel { .. } => Failure::Refused(text),
            Error::RoleTaken { .. } | Error::Rebooted { .. } => Failure::Refused(text),
            Error::TimedOut(_) | Error::NoListener { .. } => Failure::TimedOut(text),
            _ => Failure::System(text),
        }
    }
}

/// The exit code of a program, after its text for standard error.
pub fn exit(program: &str, done: Result<(), Failure>) -> ExitCode {
    let Err(failure) = done else { return ExitCode::SUCCESS };
    // `text` has already escaped control characters.
    if let Some(text) = failure.text() {
        let _ = writeln!(io::stderr(), "{program}: {text}");
    }
    ExitCode::from(failure.code())
}

/// Prints a line on standard error.
pub fn print_stderr(text: impl Display) {
    // Standard error may be closed too; the exit code still reports the failure.
    let _ = writeln!(io::stderr(), "pelton: {}", printable(&text.to_string()));
}

/// Makes a text that may come from another process safe for a terminal. Control characters, and characters that change
/// the direction of text, become escapes; tabs stay. Further lines are indented, so that none resembles a line of this
/// program.
pub fn printable(text: &str) -> String {
    let mut printed = String::with_capacity(text.len());
    for character in text.trim_end().chars() {
        match character {
            '\n' => printed.push_str("\n    "),
            '\t' => printed.push('\t'),
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                let _ = write!(printed, "{}", character.escape_unicode());
            }
            control if control.is_control() => {
                let _ = write!(printed, "{}", control.escape_default());
            }
            other => printed.push(other),
        }
    }
    printed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_other_processes_are_printed_without_control_characters() {
        for (text, printed) in [
            ("plain, with \u{e4}\u{1f600}\ta tab", "plain, with \u{e4}\u{1f600}\ta tab"),
            ("\x1b[31mred\x1b]0;title\x07\r\x7f", "\\u{1b}[31mred\\u{1b}]0;title\\u{7}\\r\\u{7f}"),
            ("\u{9b}2J\0\u{202e}txt", "\\u{9b}2J\\u{0}\\u{202e}txt"),
            ("two\npelton: lines\n", "two\n    pelton: lines"),
        ] {
            assert_eq!(printable(text), printed);
        }
    }
}
