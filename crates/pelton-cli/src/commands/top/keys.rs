//! The keys of a terminal in raw mode. Read here, because the terminal library's reader never returns once its terminal
//! has hung up.

use crate::{failure::Failure, signals::Signals};
use ratatui::crossterm::event::KeyCode;
use rustix::event::PollFlags;
use std::{
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

/// How long the rest of a key's bytes may take. Longer, and Escape was pressed.
const REST: Duration = Duration::from_millis(25);

/// The next keys, until the deadline: none then. Fails with the signal of a Ctrl-C, or of a terminal that hung up.
pub fn read(signals: &Signals, deadline: Instant) -> Result<Vec<KeyCode>, Failure> {
    let stdin = std::io::stdin();
    let is_readable = |timeout| Ok::<_, Failure>(signals.poll([(stdin.as_fd(), PollFlags::IN)], Some(timeout))?[0]);
    let mut bytes = Vec::new();
    let mut timeout = deadline.saturating_duration_since(Instant::now());
    while is_readable(timeout)? {
        let mut part = [0; 64];
        match rustix::io::read(&stdin, &mut part) {
            Ok(0) | Err(rustix::io::Errno::IO) => return Err(Failure::Signal(signal_hook::consts::SIGHUP)),
            Ok(count) => bytes.extend_from_slice(&part[..count]),
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            Err(error) => return Err(Failure::system("the terminal", error)),
        }
        if !is_incomplete(&bytes) {
            break;
        }
        timeout = REST;
    }
    // Raw mode makes Ctrl-C a byte.
    match bytes.contains(&3) {
        true => Err(Failure::Signal(signal_hook::consts::SIGINT)),
        false => Ok(keys(&bytes)),
    }
}

/// Whether more bytes of a key may follow: after Escape, or in a character.
fn is_incomplete(bytes: &[u8]) -> bool {
    let sequence = bytes.iter().rposition(|byte| *byte == 0x1b).map(|at| &bytes[at + 1..]);
    match sequence {
        Some([]) | Some([b'[' | b'O']) => true,
        Some([b'[', rest @ ..]) => rest.iter().all(|byte| byte.is_ascii_digit() || *byte == b';'),
        _ => std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none()),
    }
}

/// The keys in these bytes. Unknown sequences are none.
fn keys(bytes: &[u8]) -> Vec<KeyCode> {
    let mut keys = Vec::new();
    let text = String::from_utf8_lossy(bytes);
    let mut rest = text.as_ref();
    while let Some(first) = rest.chars().next() {
        rest = &rest[first.len_utf8()..];
        let key = match first {
            '\x1b' => {
                let (key, length) = after_escape(rest);
                rest = &rest[length..];
                key
            }
            '\r' | '\n' => Some(KeyCode::Enter),
            '\x7f' | '\x08' => Some(KeyCode::Backspace),
            character if !character.is_control() => Some(KeyCode::Char(character)),
            _ => None,
        };
        keys.extend(key);
    }
    keys
}

/// The key of a sequence behind Escape, and the sequence's length.
fn after_escape(rest: &str) -> (Option<KeyCode>, usize) {
    let bytes = rest.as_bytes();
    match bytes {
        // The console of Linux: F1 to F5.
        [b'[', b'[', key @ b'A'..=b'E', ..] => (Some(KeyCode::F(key - b'A' + 1)), 3),
        [b'O', key, ..] if key.is_ascii_alphabetic() => (with_letter(*key), 2),
        [b'[', ..] => {
            let is_parameter = |byte: &u8| byte.is_ascii_digit() || *byte == b';';
            let digits = bytes[1..].iter().take_while(|byte| is_parameter(byte)).count();
            let number = rest[1..1 + digits].split(';').next().and_then(|number| number.parse().ok());
            match (number, bytes.get(1 + digits)) {
                (Some(number), Some(b'~')) => (with_number(number), digits + 2),
                (_, Some(letter)) if letter.is_ascii() => (with_letter(*letter), digits + 2),
                _ => (None, digits + 1),
            }
        }
        _ => (Some(KeyCode::Esc), 0),
    }
}

fn with_letter(letter: u8) -> Option<KeyCode> {
    Some(match letter {
        b'A' => KeyCode::Up,
        b'B' => KeyCode::Down,
        b'H' => KeyCode::Home,
        b'F' => KeyCode::End,
        b'P'..=b'S' => KeyCode::F(letter - b'P' + 1),
        _ => return None,
    })
}

fn with_number(number: u8) -> Option<KeyCode> {
    Some(match number {
        1 | 7 => KeyCode::Home,
        4 | 8 => KeyCode::End,
        5 => KeyCode::PageUp,
        6 => KeyCode::PageDown,
        11..=15 => KeyCode::F(number - 10),
        17..=21 => KeyCode::F(number - 11),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keys_of_several_terminals_are_known() {
        for (bytes, expected) in [
            ("q", vec![KeyCode::Char('q')]),
            ("\x1b", vec![KeyCode::Esc]),
            ("\x1b[A\x1bOB", vec![KeyCode::Up, KeyCode::Down]),
            ("\x1b[5~\x1b[6;2~", vec![KeyCode::PageUp, KeyCode::PageDown]),
            ("\x1bOP\x1b[[A\x1b[11~", vec![KeyCode::F(1); 3]),
            ("\x1b[17~\x1b[21~", vec![KeyCode::F(6), KeyCode::F(10)]),
            ("\x1b[200~", vec![]),
            ("\u{e4}\x7f\r", vec![KeyCode::Char('\u{e4}'), KeyCode::Backspace, KeyCode::Enter]),
        ] {
            assert_eq!(keys(bytes.as_bytes()), expected, "{bytes:?}");
        }
    }

    #[test]
    fn a_part_of_a_key_waits_for_its_rest() {
        for part in [&b"\x1b"[..], b"a\x1b[", b"\x1b[1", b"\x1b[6;2", b"\xc3"] {
            assert!(is_incomplete(part), "{part:?}");
        }
        for whole in [&b"q"[..], b"\x1b[A", b"\x1b[5~", b"\xff", b"\x1bOP"] {
            assert!(!is_incomplete(whole), "{whole:?}");
        }
    }
}
