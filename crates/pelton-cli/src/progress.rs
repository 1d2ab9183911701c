//! Progress on standard error: only on a terminal, and only for work of more than a second. It costs one read of the
//! clock per buffer, not per message.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use std::{
    io::IsTerminal as _,
    time::{Duration, Instant},
};

/// Messages and bytes so far.
pub struct Progress {
    /// When it is drawn next; `None`: never.
    due: Option<Instant>,
    bytes_total: Option<u64>,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Shown from the next second on. `data_on_terminal`: messages are typed or printed there, so a bar would overwrite
    /// them.
    pub fn new(bytes_total: Option<u64>, data_on_terminal: bool) -> Progress {
        let visible = !data_on_terminal && std::io::stderr().is_terminal();
        Progress { due: visible.then(|| Instant::now() + Duration::from_secs(1)), bytes_total, bar: None }
    }

    /// Updates the numbers.
    pub fn update(&mut self, messages: u64, bytes: u64) {
        let Some(due) = self.due else { return };
        let now = Instant::now();
        if now < due {
            return;
        }
        self.due = Some(now + Duration::from_millis(100));
        let bar = self.bar.get_or_insert_with(|| match self.bytes_total {
            // From this position on: the rate would count the first second as an instant.
            Some(total) => bar(total).with_position(bytes),
            None => styled(ProgressBar::no_length(), "{spinner} {bytes} {bytes_per_sec} {msg}").with_position(bytes),
        });
        bar.set_message(format!("{messages} messages"));
        bar.set_position(bytes);
        bar.tick();
    }
}

/// A bar over a known number of bytes, shown immediately; hidden if standard error is no terminal.
pub fn bar(bytes_total: u64) -> ProgressBar {
    styled(ProgressBar::new(bytes_total), "{msg:<34} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}")
}

/// A bar over a number of `what`, if it is known, shown immediately; hidden if standard error is no terminal.
pub fn count(total: Option<u64>, what: &str) -> ProgressBar {
    match total {
        Some(total) => styled(ProgressBar::new(total), &format!("{{wide_bar}} {{pos}}/{{len}} {what}, {{eta}} left")),
        None => styled(ProgressBar::no_length(), &format!("{{spinner}} {{pos}} {what}, {{elapsed}}")),
    }
}

fn styled(bar: ProgressBar, template: &str) -> ProgressBar {
    bar.set_draw_target(ProgressDrawTarget::stderr());
    // Cleared however the work ends.
    bar.with_finish(ProgressFinish::AndClear).with_style(ProgressStyle::with_template(template).expect("a constant"))
}
