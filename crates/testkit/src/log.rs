//! What the libraries log.

use std::sync::{Mutex, OnceLock, PoisonError};

/// Keeps all log records of the target `pelton`, of all threads of this process.
#[derive(Debug, Default)]
pub struct Kept {
    lines: Mutex<Vec<String>>,
}

impl Kept {
    /// Begins to keep them, or continues.
    ///
    /// # Panics
    /// If this process has another logger.
    pub fn start() -> &'static Kept {
        static KEPT: OnceLock<Kept> = OnceLock::new();
        let mut is_new = false;
        let kept = KEPT.get_or_init(|| {
            is_new = true;
            Kept::default()
        });
        if is_new {
            log::set_logger(kept).expect("this process has no other logger");
            log::set_max_level(log::LevelFilter::Trace);
        }
        kept
    }

    /// Level and text of each record so far.
    pub fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl log::Log for Kept {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.target() == "pelton"
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            let line = format!("{} {}", record.level(), record.args());
            self.lines.lock().unwrap_or_else(PoisonError::into_inner).push(line);
        }
    }

    fn flush(&self) {}
}
