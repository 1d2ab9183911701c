//! The report of the demo, as a table and as JSON.

use crate::{
    input::Input,
    run::{Job, Run},
    stage::{System, ZSTD_LEVEL},
    verdict::{Speedup, median, verdict},
};
use serde::Serialize;
use std::{borrow::Cow, fmt::Write as _};

/// The figures of one transport at one job.
#[derive(Serialize)]
pub struct Outcome {
    pub system: System,
    pub job: Job,
    /// The median, as the next three.
    seconds: f64,
    cpu_seconds: f64,
    cpu_seconds_sender: f64,
    cpu_seconds_receiver: f64,
    messages_per_second: f64,
    bytes_per_second: f64,
    /// Of both sides.
    #[serde(skip_serializing_if = "Option::is_none")]
    syscalls_per_message: Option<f64>,
    /// The seconds of each run, in order.
    runs: Vec<f64>,
    /// The speed of the first transport as a multiple of this one's.
    #[serde(skip_serializing_if = "Option::is_none")]
    speedup_of_first: Option<Speedup>,
}

impl Outcome {
    /// `system_calls` are those of one run.
    pub fn of(system: System, job: Job, runs: &[Run], system_calls: Option<u64>, input: &Input) -> Outcome {
        let median_of = |value: fn(&Run) -> f64| median(&runs.iter().map(value).collect::<Vec<f64>>());
        let (lines, seconds) = (input.digest.lines as f64, median_of(|run| run.seconds));
        Outcome {
            system,
            job,
            seconds,
            cpu_seconds: median_of(|run| run.cpu_sender + run.cpu_receiver),
            cpu_seconds_sender: median_of(|run| run.cpu_sender),
            cpu_seconds_receiver: median_of(|run| run.cpu_receiver),
            messages_per_second: lines / seconds,
            bytes_per_second: input.digest.bytes as f64 / seconds,
            syscalls_per_message: system_calls.filter(|_| lines > 0.0).map(|calls| calls as f64 / lines),
            runs: runs.iter().map(|run| run.seconds).collect(),
            speedup_of_first: None,
        }
    }

    /// Compares it with the first transport, round by round.
    pub fn compare(&mut self, first: &Outcome) {
        self.speedup_of_first = Some(Speedup::of(&first.runs, &self.runs));
    }
}

/// The report.
#[derive(Serialize)]
pub struct Report<'a> {
    pub command: &'static str,
    pub file: Cow<'a, str>,
    pub bytes: u64,
    pub lines: u64,
    pub longest_line_bytes: u64,
    pub zstd_level: i32,
    pub output: Option<Cow<'a, str>>,
    pub output_bytes: u64,
    /// Always true: otherwise the demo fails.
    pub verified: bool,
    /// The times say nothing about the transports.
    pub too_small_to_time: bool,
    /// The machine's processors, and how many of them other programs kept busy.
    pub others_busy: Option<(usize, f64)>,
    pub results: Vec<Outcome>,
}

impl Report<'_> {
    /// As one line.
    pub fn json(&self) -> String {
        pelton_cli::output::json(self)
    }

    /// As a table, and the verdict.
    pub fn table(&self) -> String {
        let mut text = String::new();
        self.write_table(&mut text).expect("a String takes everything");
        text
    }

    fn write_table(&self, text: &mut String) -> std::fmt::Result {
        let Report { bytes, lines, longest_line_bytes, output_bytes, .. } = self;
        writeln!(
            text,
            "{}: {} bytes, {} lines, the longest {} bytes",
            self.file,
            grouped(*bytes),
            grouped(*lines),
            grouped(*longest_line_bytes)
        )?;
        let output = self.output.as_ref().map(|output| format!(" in {output}")).unwrap_or_default();
        writeln!(
            text,
            "Compressed to {} bytes{output}, which decompress to the input byte for byte, by each transport.",
            grouped(*output_bytes)
        )?;
        if self.too_small_to_time {
            return writeln!(
                text,
                "The file is too small to compare times. Give a file of at least {} lines or {} MiB, or none for the default file.",
                grouped(crate::TIMED_LINES_MIN),
                crate::TIMED_BYTES_MIN >> 20
            );
        }
        for job in [Job::Lines, Job::Zstd] {
            self.write_job(job, text)?;
        }
        writeln!(text, "\nCPU and system calls: of both processes, with reading the file and writing the output.")?;
        if let Some((processors, busy)) = self.others_busy {
            writeln!(text, "Meanwhile other programs kept {busy:.1} of {processors} processors busy.")?;
        }
        for job in [Job::Lines, Job::Zstd] {
            if let Some(verdict) = self.verdict(job) {
                let label = job.label();
                writeln!(text, "{}{}: {verdict}", label[..1].to_uppercase(), &label[1..])?;
            }
        }
        Ok(())
    }

    fn write_job(&self, job: Job, text: &mut String) -> std::fmt::Result {
        let runs = self.of(job).next().map_or(0, |outcome| outcome.runs.len());
        let title = match job {
            Job::Lines => format!("{}, {runs} runs", job.label()),
            Job::Zstd => format!("{}, level {ZSTD_LEVEL}, {runs} runs", job.label()),
        };
        let counted = self.of(job).any(|outcome| outcome.syscalls_per_message.is_some());
        let calls = if counted { "   calls/line" } else { "" };
        writeln!(
            text,
            "\n{title:<28}{:>9}{:>17}{:>8}{:>11}{:>8}{calls}",
            "seconds", "range", "CPU s", "M lines/s", "GB/s"
        )?;
        for outcome in self.of(job) {
            let mut sorted = outcome.runs.clone();
            sorted.sort_by(f64::total_cmp);
            let range = format!("{:.3} to {:.3}", sorted[0], sorted[runs - 1]);
            write!(text, "  {:<26}{:>9.3}{range:>17}", outcome.system.label(), outcome.seconds)?;
            let (messages, bytes) = (outcome.messages_per_second / 1e6, outcome.bytes_per_second / 1e9);
            write!(text, "{:>8.3}{messages:>11.2}{bytes:>8.3}", outcome.cpu_seconds)?;
            let calls = outcome.syscalls_per_message.map(|calls| format!("{calls:>13.4}")).unwrap_or_default();
            writeln!(text, "{calls}")?;
        }
        Ok(())
    }

    fn verdict(&self, job: Job) -> Option<String> {
        let first = self.of(job).next()?;
        let others: Vec<_> =
            self.of(job).filter_map(|outcome| Some((outcome.system.in_words(), outcome.speedup_of_first?))).collect();
        (!others.is_empty()).then(|| verdict(first.system.in_words(), &others, self.others_busy))
    }

    fn of(&self, job: Job) -> impl Iterator<Item = &Outcome> {
        self.results.iter().filter(move |outcome| outcome.job == job)
    }
}

/// A number with a comma every three digits.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|group| std::str::from_utf8(group).expect("digits")).collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_by_three() {
        assert_eq!([0, 999, 1000, 209_715_345].map(grouped), ["0", "999", "1,000", "209,715,345"]);
    }
}
