//! A line of progress on standard error: only on a terminal, at most ten times a second, and erased at the end. An
//! update costs one read of the clock, so callers make one per buffer, not per message.

use crate::failure::printable;
use rustix::termios::tcgetwinsize;
use std::{
    io::{IsTerminal as _, Write as _},
    time::{Duration, Instant},
};

/// Work that takes less time needs no line.
pub const DELAY: Duration = Duration::from_secs(1);
/// Between two drawings.
const INTERVAL: Duration = Duration::from_millis(100);

/// The line.
pub struct Progress {
    began: Instant,
    /// When it is drawn next; `None`: never.
    due: Option<Instant>,
    is_drawn: bool,
}

impl Progress {
    /// A line that appears after a time.
    pub fn after(delay: Duration) -> Progress {
        let began = Instant::now();
        Progress { began, due: std::io::stderr().is_terminal().then_some(began + delay), is_drawn: false }
    }

    /// A line that never appears, because it would overwrite messages that are typed or printed on the terminal.
    pub fn never() -> Progress {
        Progress { began: Instant::now(), due: None, is_drawn: false }
    }

    /// Draws the line if it is due: `text` gets the seconds since the start.
    pub fn update(&mut self, text: impl FnOnce(f64) -> String) {
        let Some(due) = self.due else { return };
        let now = Instant::now();
        if now < due {
            return;
        }
        self.due = Some(now + INTERVAL);
        self.is_drawn = true;
        // A line that wraps could not be erased.
        let columns = tcgetwinsize(std::io::stderr()).map_or(80, |size| usize::from(size.ws_col).max(2));
        let text = printable(&text((now - self.began).as_secs_f64()));
        let line: String = text.chars().take(columns - 1).collect();
        let _ = write!(std::io::stderr(), "\r\x1b[K{line}");
    }

    /// Erases the line. The next update draws it again.
    pub fn erase(&mut self) {
        if std::mem::take(&mut self.is_drawn) {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
        if let Some(due) = &mut self.due {
            *due = self.began.max(*due - INTERVAL);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.erase();
    }
}

/// Bytes after so many seconds, of a total if that is known, and their rate.
pub fn amount(bytes: u64, total: Option<u64>, seconds: f64) -> String {
    let of = total.map(|total| format!(" of {}", bytes_text(total as f64))).unwrap_or_default();
    format!("{}{of}, {}/s", bytes_text(bytes as f64), bytes_text(bytes as f64 / seconds.max(1e-3)))
}

/// `bytes` with a binary unit.
fn bytes_text(bytes: f64) -> String {
    let (mut value, mut unit) = (bytes, "B");
    for larger in ["KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, larger);
    }
    if unit == "B" { format!("{value:.0} B") } else { format!("{value:.1} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_a_binary_unit() {
        let texts = [0.0, 1023.0, 1024.0, 1_572_864.0, 5e12].map(bytes_text);
        assert_eq!(texts, ["0 B", "1023 B", "1.0 KiB", "1.5 MiB", "4.5 TiB"]);
    }
}
