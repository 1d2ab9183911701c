//! The report of a crash test, as a table and as JSON.

use super::{
    DETECTION_LIMIT,
    ledger::{FAULT_KINDS, FaultKind},
    plan::Transport,
};
use pelton_cli::failure::Failure;
use serde::Serialize;
use std::fmt::Write as _;

/// Detection times of waiting survivors.
#[derive(Serialize)]
pub struct DetectionTimes {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transport: Option<Transport>,
    pub survivors: u64,
    pub median_us: f64,
    p99_us: f64,
    max_us: f64,
}

impl DetectionTimes {
    pub fn of(transport: Option<Transport>, times: &[u64]) -> Option<DetectionTimes> {
        let mut sorted = times.to_vec();
        sorted.sort_unstable();
        let last = sorted.len().checked_sub(1)?;
        let at = |index: usize| sorted[index] as f64 / 1000.0;
        Some(DetectionTimes {
            transport,
            survivors: sorted.len() as u64,
            median_us: at(last / 2),
            p99_us: at(last * 99 / 100),
            max_us: at(last),
        })
    }
}

/// A fault, and its scenario.
#[derive(Serialize)]
pub struct Failed {
    pub kind: FaultKind,
    pub scenario: u64,
    pub text: String,
}

/// The report of a crash test.
#[derive(Serialize)]
pub struct Report {
    pub command: &'static str,
    pub against: Option<String>,
    pub seed: u64,
    pub scenarios: u64,
    pub kills: u64,
    pub kills_of_senders: u64,
    pub kills_of_receivers: u64,
    pub kills_by_connect: u64,
    pub kills_by_path: u64,
    /// Before the victim had opened the channel.
    pub kills_while_starting: u64,
    /// In scenarios of many senders or appending threads.
    pub kills_of_many: u64,
    /// In scenarios of a broadcast.
    pub kills_of_broadcasts: u64,
    /// Messages that subscribers count as missed.
    pub missed: u64,
    /// Received and checked; each delivery counts.
    pub messages: u64,
    /// Found in record files and checked.
    pub messages_in_files: u64,
    pub bytes: u64,
    pub redelivered: u64,
    /// By one process whose descriptors and mappings were counted after each.
    pub deaths_outlived_most: u64,
    /// Of `--observers`.
    pub kills_of_observers: u64,
    pub bytes_observed: u64,
    /// A median exceeds 10 ms.
    pub detected_late: bool,
    pub detection: Vec<DetectionTimes>,
    /// Counts that are not zero.
    pub faults: Vec<(FaultKind, u64)>,
    pub failures: Vec<Failed>,
    pub seconds: f64,
}

impl Report {
    pub fn print(&self, json: bool) -> Result<(), Failure> {
        let text = match json {
            true => serde_json::to_string(self).expect("numbers and text") + "\n",
            false => self.table().expect("a String takes everything"),
        };
        pelton_cli::output::print(text)
    }

    pub fn table(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        let Report { seed, scenarios, kills, messages, bytes, redelivered, .. } = self;
        let channel = self.against.as_deref().unwrap_or("pelton");
        writeln!(text, "{channel}: {kills} kills in {scenarios} scenarios of seed {seed}, {:.1} s", self.seconds)?;
        let mut row = |name: &str, value: u64| writeln!(text, "  {name:<38}{value:>14}");
        row("senders killed", self.kills_of_senders)?;
        row("receivers killed", self.kills_of_receivers)?;
        if self.against.is_none() {
            row("by connect", self.kills_by_connect)?;
            row("by path", self.kills_by_path)?;
        }
        row("while they started", self.kills_while_starting)?;
        if self.against.is_none() {
            row("of many senders or their receiver", self.kills_of_many)?;
            row("of publishers and subscribers", self.kills_of_broadcasts)?;
        }
        row("deaths that one survivor outlived", self.deaths_outlived_most)?;
        if self.kills_of_observers > 0 {
            row("observers killed", self.kills_of_observers)?;
            row("bytes that observers printed", self.bytes_observed)?;
        }
        row("messages received and checked", *messages)?;
        if self.against.is_none() {
            row("messages checked in record files", self.messages_in_files)?;
            row("messages missed by subscribers that lag", self.missed)?;
        }
        row("bytes", *bytes)?;
        row("marked as redelivered", *redelivered)?;
        for kind in FAULT_KINDS {
            row(kind.label(), self.count(kind))?;
        }
        for times in &self.detection {
            let transport =
                times.transport.map(|transport| format!(" by {transport:?}").to_lowercase()).unwrap_or_default();
            let DetectionTimes { survivors, median_us, p99_us, max_us, .. } = times;
            writeln!(
                text,
                "{survivors} waiting survivors{transport} detected the death after {median_us:.0} µs (median), {p99_us:.0} (p99), {max_us:.0} (maximum)"
            )?;
        }
        if self.detected_late {
            writeln!(text, "LATE: half of the survivors detected the death after more than {DETECTION_LIMIT:?}")?;
        }
        Ok(text)
    }

    pub fn count(&self, kind: FaultKind) -> u64 {
        self.faults.iter().filter(|(found, _)| *found == kind).map(|(_, count)| count).sum()
    }
}
