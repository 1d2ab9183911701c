//! Why a command did not end with 0: one kind per exit code, with the sentence for standard error.

use std::{
    fmt::{Display, Write as _},
    io::{self, Write as _},
};

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

    /// What to say on standard error, or in a report, if anything. May be shown on a terminal, whoever it is from.
    pub fn text(&self) -> Option<String> {
        match self {
            Failure::Peer(text) | Failure::Input(text) | Failure::Refused(text) => Some(printable(text)),
            Failure::TimedOut(text) | Failure::System(text) | Failure::Call(text) => Some(printable(text)),
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
        // The library's advice is for its callers: a command waits by itself, and has no deadline to be given, nor `resume`.
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

/// A line on standard error.
pub fn say(text: impl Display) {
    // Standard error may be gone as well; the exit code still tells.
    let _ = writeln!(io::stderr(), "pelton: {}", printable(&text.to_string()));
}

/// A text that may have come from another process, as a terminal is to get it: control characters, and those that change the direction of what is
/// shown, become escapes. Tabs stay. Lines stay too, indented, so that none of them passes for one of this program's.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.trim_end().chars() {
        match character {
            '\n' => shown.push_str("\n    "),
            '\t' => shown.push('\t'),
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                let _ = write!(shown, "{}", character.escape_unicode());
            }
            control if control.is_control() => {
                let _ = write!(shown, "{}", control.escape_default());
            }
            other => shown.push(other),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_process_says_reaches_the_terminal_without_control_characters() {
        for (text, shown) in [
            ("plain, with \u{e4}\u{1f600}\ta tab", "plain, with \u{e4}\u{1f600}\ta tab"),
            ("\x1b[31mred\x1b]0;title\x07\r\x7f", "\\u{1b}[31mred\\u{1b}]0;title\\u{7}\\r\\u{7f}"),
            ("\u{9b}2J\0\u{202e}txt", "\\u{9b}2J\\u{0}\\u{202e}txt"),
            ("two\npelton: lines\n", "two\n    pelton: lines"),
        ] {
            assert_eq!(printable(text), shown);
        }
    }
}
