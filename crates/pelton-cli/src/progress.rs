//! Progress on standard error: only on a terminal, only for work that has lasted a second, and out of the messages' way (one look
//! at the clock each time it is told, which is once a buffer, not once a message).

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use std::{
    io::IsTerminal as _,
    time::{Duration, Instant},
};

/// Messages and bytes that have passed.
pub struct Progress {
    /// `None` where nobody would see it
    due: Option<Instant>,
    bytes_total: Option<u64>,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// To be shown a second from now. `data_on_terminal`: the messages themselves are typed or shown there, so nothing is drawn over them.
    pub fn new(bytes_total: Option<u64>, data_on_terminal: bool) -> Progress {
        let visible = !data_on_terminal && std::io::stderr().is_terminal();
        Progress { due: visible.then(|| Instant::now() + Duration::from_secs(1)), bytes_total, bar: None }
    }

    /// So much has passed.
    pub fn at(&mut self, messages: u64, bytes: u64) {
        let Some(due) = self.due else { return };
        let now = Instant::now();
        if now < due {
            return;
        }
        self.due = Some(now + Duration::from_millis(100));
        let bar = self.bar.get_or_insert_with(|| match self.bytes_total {
            // from here on, or the rate of the first second would be counted as that of an instant
            Some(total) => bar(total).with_position(bytes),
            None => styled(ProgressBar::no_length(), "{spinner} {bytes} {bytes_per_sec} {msg}").with_position(bytes),
        });
        bar.set_message(format!("{messages} messages"));
        bar.set_position(bytes);
        bar.tick();
    }
}

/// A bar over a known number of bytes, shown at once; hidden when standard error is no terminal.
pub fn bar(bytes_total: u64) -> ProgressBar {
    styled(ProgressBar::new(bytes_total), "{msg:<34} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}")
}

/// A bar over a number of `what`, if it is known, shown at once; hidden when standard error is no terminal.
pub fn count(total: Option<u64>, what: &str) -> ProgressBar {
    match total {
        Some(total) => styled(ProgressBar::new(total), &format!("{{wide_bar}} {{pos}}/{{len}} {what}, {{eta}} left")),
        None => styled(ProgressBar::no_length(), &format!("{{spinner}} {{pos}} {what}, {{elapsed}}")),
    }
}

fn styled(bar: ProgressBar, template: &str) -> ProgressBar {
    bar.set_draw_target(ProgressDrawTarget::stderr());
    // cleared whatever the work's end was
    bar.with_finish(ProgressFinish::AndClear)
        .with_style(ProgressStyle::with_template(template).expect("the template is ours"))
}
