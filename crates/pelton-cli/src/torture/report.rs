//! What a storm says at its end, to people and as JSON.

use super::{
    TOLD_WITHIN,
    ledger::{KINDS, Kind},
    side::By,
};
use crate::failure::Failure;
use serde::Serialize;
use std::{fmt::Write as _, io::Write as _};

/// How soon survivors that waited were told.
#[derive(Serialize)]
pub struct Told {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<By>,
    pub survivors: u64,
    pub median_us: f64,
    p99_us: f64,
    max_us: f64,
}

impl Told {
    pub fn of(by: Option<By>, times: &[u64]) -> Option<Told> {
        let mut sorted = times.to_vec();
        sorted.sort_unstable();
        let last = sorted.len().checked_sub(1)?;
        let at = |index: usize| sorted[index] as f64 / 1000.0;
        Some(Told {
            by,
            survivors: sorted.len() as u64,
            median_us: at(last / 2),
            p99_us: at(last * 99 / 100),
            max_us: at(last),
        })
    }
}

/// A fault, and where it was found.
#[derive(Serialize)]
pub struct Failed {
    pub kind: Kind,
    pub scenario: u64,
    pub text: String,
}

/// What the storm says at its end.
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
    /// before the victim had joined
    pub kills_while_starting: u64,
    /// where many senders have one receiver, or append to one file
    pub kills_of_many: u64,
    /// received and checked, redelivered ones each time
    pub messages: u64,
    /// found in record files and checked
    pub messages_in_files: u64,
    pub bytes: u64,
    pub redelivered: u64,
    /// by one process whose descriptors and mappings were counted after each
    pub deaths_outlived_most: u64,
    /// the median of one is above 10 ms
    pub told_late: bool,
    pub told: Vec<Told>,
    /// those that are not zero
    pub faults: Vec<(Kind, u64)>,
    pub failures: Vec<Failed>,
    pub seconds: f64,
}

impl Report {
    pub fn print(&self, json: bool) -> Result<(), Failure> {
        let text = match json {
            true => serde_json::to_string(self).expect("numbers and text") + "\n",
            false => self.table().expect("a String takes everything"),
        };
        match std::io::stdout().write_all(text.as_bytes()) {
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Err(Failure::OutputClosed),
            done => done.map_err(|error| Failure::system("standard output", error)),
        }
    }

    pub fn table(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        let Report { seed, scenarios, kills, messages, bytes, redelivered, .. } = self;
        let whom = self.against.as_deref().unwrap_or("pelton");
        writeln!(text, "{whom}: {kills} kills in {scenarios} scenarios of seed {seed}, {:.1} s", self.seconds)?;
        let mut row = |name: &str, value: u64| writeln!(text, "  {name:<38}{value:>14}");
        row("senders killed", self.kills_of_senders)?;
        row("receivers killed", self.kills_of_receivers)?;
        if self.against.is_none() {
            row("by connect", self.kills_by_connect)?;
            row("by path", self.kills_by_path)?;
        }
        row("before they had joined", self.kills_while_starting)?;
        if self.against.is_none() {
            row("of many senders or their receiver", self.kills_of_many)?;
        }
        row("deaths that one survivor outlived", self.deaths_outlived_most)?;
        row("messages received and checked", *messages)?;
        if self.against.is_none() {
            row("messages checked in record files", self.messages_in_files)?;
        }
        row("bytes", *bytes)?;
        row("marked as given again", *redelivered)?;
        for kind in KINDS {
            row(kind.words(), self.count(kind))?;
        }
        for told in &self.told {
            let by = told.by.map(|by| format!(" by {by:?}").to_lowercase()).unwrap_or_default();
            let Told { survivors, median_us, p99_us, max_us, .. } = told;
            writeln!(
                text,
                "{survivors} survivors that waited{by} were told after {median_us:.0} µs (median), {p99_us:.0} (p99), {max_us:.0} (most)"
            )?;
        }
        if self.told_late {
            writeln!(text, "LATE: half of the survivors were told after more than {TOLD_WITHIN:?}")?;
        }
        Ok(text)
    }

    pub fn count(&self, kind: Kind) -> u64 {
        self.faults.iter().filter(|(found, _)| *found == kind).map(|(_, count)| count).sum()
    }
}
