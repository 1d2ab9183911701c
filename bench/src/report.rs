//! A measurement's report, as JSON (one object a line) and as a table.

use std::{collections::BTreeMap, io::Write};

use anyhow::Result;
use serde_json::{Value, json};

use crate::{
    parameters::{Wait, word},
    plan::{Choice, Plan},
    record::{COSTS, Column, Figures, Run},
    statistics::{Ratio, digits, paired_ratio},
};

/// All runs of one system.
pub struct SystemReport {
    /// Its word in the list of systems
    pub choice: Choice,
    /// How it waited
    pub wait: Wait,
    /// Of the library, the kernel or the program
    pub version: String,
    /// Its number of messages, or rounds
    pub count: u64,
    /// In order; after an interrupt one system may have one more than the next
    pub runs: Vec<Run>,
    /// The reason why it was not measured
    pub skipped: Option<String>,
}

impl SystemReport {
    /// Without runs yet.
    pub fn new(plan: &Plan, choice: &Choice) -> SystemReport {
        let (wait, version) = (choice.system.wait(plan, choice.wait), (choice.system.version)(choice.system));
        SystemReport { choice: choice.clone(), wait, version, count: plan.count, runs: Vec::new(), skipped: None }
    }
}

/// The whole measurement.
pub struct Report {
    /// What was to be measured
    pub plan: Plan,
    /// The receiver's (asker's) and the sender's (answerer's); empty if the processes were not pinned
    pub cpus: Vec<usize>,
    /// In the order of the list
    pub systems: Vec<SystemReport>,
}

impl Report {
    /// One object for each system, and one of ratios, each with the command.
    pub fn lines(&self, command: &str) -> Result<Vec<Value>> {
        let workload = &self.plan.job.workload;
        let mut lines = Vec::new();
        for system in &self.systems {
            let mut line = json!({
                "workload": workload, "system": system.choice.system.name, "label": system.choice.to_string(),
                "wait": system.wait, "version": system.version, "skipped": system.skipped, "runs": system.runs,
                "parameters": self.plan.parameters(system.count, &self.cpus), "command": command,
            });
            let medians = serde_json::to_value(Figures::medians(&system.runs))?;
            line.as_object_mut().expect("it is one").extend(medians.as_object().cloned().unwrap_or_default());
            lines.push(line);
        }
        lines.push(json!({
            "workload": workload, "first": self.systems.first().map(|first| first.choice.to_string()),
            "figure": self.plan.figure, "ratios": self.ratios(), "command": command,
        }));
        Ok(lines)
    }

    /// Of the first system to each other, for the workload's first figure.
    pub fn ratios(&self) -> BTreeMap<String, Ratio> {
        let (Some(figure), Some((first, others))) = (self.plan.figure, self.systems.split_first()) else {
            return BTreeMap::new();
        };
        let values = |system: &SystemReport| system.runs.iter().map(|run| run.figures.get(figure)).collect::<Vec<_>>();
        let of_first = values(first);
        let pair = |other: &SystemReport| Some((other.choice.to_string(), paired_ratio(&of_first, &values(other))?));
        others.iter().filter_map(pair).collect()
    }

    /// As a table.
    pub fn write_table(&self, out: &mut impl Write) -> Result<()> {
        let Plan { runs, seconds, .. } = &self.plan;
        let parameters = self.plan.parameters(self.plan.count, &self.cpus);
        let all = parameters.as_object().into_iter().flatten();
        // The options of calls are an object of their own.
        let all = all.flat_map(|(name, value)| value.as_object().map_or(vec![(name, value)], |of| of.iter().collect()));
        let shown = all.filter(|(name, value)| {
            let is_own = name.as_str() == "count" && seconds.is_some(); // each system has its own
            !(is_own || name.as_str() == "runs" || value.is_null() || **value == 0 || **value == false)
        });
        let shown = shown
            .map(|(name, value)| value.as_str().map_or(format!("{name} {value}"), |word| format!("{name} {word}")));
        writeln!(out, "{}: {}", self.plan.job.workload, shown.collect::<Vec<_>>().join(", "))?;
        writeln!(out, "medians of {runs} runs, systems interleaved\n")?;

        let ratios = self.ratios();
        let columns: Vec<Column> =
            self.plan.columns.iter().chain([&COSTS]).flat_map(|group| group.iter().copied()).collect();
        let mut rows: Vec<Vec<String>> = vec![vec!["system".to_string(), "wait".to_string()]];
        rows[0].extend(columns.iter().map(|(_, title, _)| title.to_string()));
        // With different counts only the cost of one message is comparable.
        let each_has_its_own = seconds.is_some();
        if each_has_its_own {
            rows[0].iter_mut().filter(|title| *title == "CPU s").for_each(|title| *title = "CPU s/million".to_string());
            rows[0].push("count".to_string());
        }
        let first = self.systems.first().map(|first| first.choice.to_string()).unwrap_or_default();
        // Of two times the shorter one is faster.
        let (is_time, is_rate) = self
            .plan
            .figure
            .map_or((false, false), |figure| (figure.ends_with("_ns"), figure.ends_with("_per_second")));
        rows[0].push(match is_time || is_rate {
            true => format!("speedup of {first} over this (95 %)"),
            false => format!("{first} divided by this (95 %)"),
        });
        for system in self.systems.iter().filter(|system| !system.runs.is_empty()) {
            let mut medians = Figures::medians(&system.runs);
            if each_has_its_own {
                let million = medians.get("cpu_seconds").map(|seconds| seconds / system.count as f64 * 1e6);
                medians.set("cpu_seconds", million);
            }
            let mut row = vec![system.choice.to_string(), word(system.wait)];
            row.extend(
                columns
                    .iter()
                    .map(|(name, _, scale)| medians.get(name).map(|value| digits(value * scale)).unwrap_or_default()),
            );
            if each_has_its_own {
                row.push(system.count.to_string());
            }
            let ratio = ratios.get(&system.choice.to_string());
            row.push(
                ratio
                    .map(|&Ratio { median, interval: (low, high), .. }| match is_time {
                        true => format!("{:.3} ({:.3} to {:.3})", 1.0 / median, 1.0 / high, 1.0 / low),
                        false => format!("{median:.3} ({low:.3} to {high:.3})"),
                    })
                    .unwrap_or_default(),
            );
            rows.push(row);
        }
        write_aligned(out, &rows)?;
        for system in &self.systems {
            for (killed, outcomes) in outcomes(&system.runs) {
                writeln!(out, "{}, its {killed} killed: {outcomes}", system.choice)?;
            }
        }
        for system in &self.systems {
            if let Some(reason) = &system.skipped {
                writeln!(out, "skipped {}: {reason}", system.choice)?;
            }
        }
        Ok(())
    }
}

/// By the killed side, how often each outcome occurred: `detected 5`, or `detected 3, hangs 2`.
fn outcomes(runs: &[Run]) -> BTreeMap<&str, String> {
    let mut counts: BTreeMap<&str, BTreeMap<String, usize>> = BTreeMap::new();
    for (killed, death) in runs.iter().flat_map(|run| &run.deaths) {
        *counts.entry(killed).or_default().entry(word(death.outcome)).or_default() += 1;
    }
    let text = |of: BTreeMap<String, usize>| of.iter().map(|(what, n)| format!("{what} {n}")).collect::<Vec<_>>();
    counts.into_iter().map(|(killed, of)| (killed, text(of).join(", "))).collect()
}

/// Columns without any value are left out.
fn write_aligned(out: &mut impl Write, rows: &[Vec<String>]) -> Result<()> {
    let columns = rows[0].len();
    let width =
        |column: usize, rows: &[Vec<String>]| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let kept: Vec<usize> = (0..columns).filter(|column| width(*column, &rows[1..]) > 0).collect();
    if kept.is_empty() {
        return Ok(());
    }
    for row in rows {
        let cells: Vec<String> = kept
            .iter()
            .map(|&column| {
                let pad = " ".repeat(width(column, rows) - row[column].chars().count());
                // Words to the left, numbers to the right.
                if column < 2 { format!("{}{pad}", row[column]) } else { format!("{pad}{}", row[column]) }
            })
            .collect();
        writeln!(out, "{}", cells.join("  ").trim_end())?;
    }
    Ok(())
}
