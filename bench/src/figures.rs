//! `./run bench figures RECORD`: writes the figures of README.md and COMPARE.md from a record, so that none is copied by hand.
//!
//! A file says where with a pair of comments, `<!-- bench NAME -->` and `<!-- /bench -->`; all between them is written anew.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result, bail};
use clap::Parser;
use serde_json::Value;

use crate::record;

/// Writes the figures of README.md and COMPARE.md from a record
#[derive(Parser, Debug)]
#[command(name = "pelton-bench figures", max_term_width = 120)]
struct Arguments {
    /// What `./run bench all` has written
    record: PathBuf,

    /// Files with places for figures [default: README.md and COMPARE.md of the project's tree]
    files: Vec<PathBuf>,

    /// Writes the page of this record, too
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
}

/// Does what the command line says behind `figures`.
pub fn main(arguments: impl Iterator<Item = String>) -> ExitCode {
    let arguments = Arguments::parse_from(std::iter::once("pelton-bench figures".to_string()).chain(arguments));
    match write_all(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pelton-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn write_all(arguments: &Arguments) -> Result<()> {
    let lines = record::read(&arguments.record)?;
    let name = arguments.record.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let files = match &arguments.files[..] {
        [] => vec![root.join("README.md"), root.join("COMPARE.md")],
        files => files.to_vec(),
    };
    for file in files {
        let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        let filled = fill(&text, &Figures { lines: &lines, name: &name })
            .with_context(|| format!("filling in {}", file.display()))?;
        record::put(&file, &filled)?;
    }
    if let Some(page) = &arguments.report {
        record::write_page(page, &lines)?;
    }
    Ok(())
}

const END: &str = "<!-- /bench -->";

/// The text with its places filled in.
fn fill(text: &str, figures: &Figures) -> Result<String> {
    let (mut filled, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once("<!-- bench ") {
        let (name, after) = after.split_once(" -->\n").context("a `<!-- bench` without its end")?;
        let (_, after) = after.split_once(END).with_context(|| format!("`{name}` has no `{END}` behind it"))?;
        write!(filled, "{before}<!-- bench {name} -->\n{}{END}", figures.block(name)?)?;
        rest = after;
    }
    Ok(filled + rest)
}

struct Figures<'a> {
    lines: &'a [Value],
    name: &'a str,
}

/// What is measured by a table: a command begins with these words.
const STREAM: &str = "stream --size 256 ";
const ROUND: &str = "roundtrip --size 64 --count";
const ASLEEP: &str = "roundtrip --size 64 --delay 20 ";

impl Figures<'_> {
    fn block(&self, name: &str) -> Result<String> {
        Ok(match name {
            "machine" => self.machine(),
            "stream" => self.table(
                STREAM,
                &[
                    ("messages/s", |l| number(l, "messages_per_second").map(rate)),
                    ("CPU s for a million", |l| {
                        Some(digits(number(l, "cpu_seconds")? / l["parameters"]["count"].as_f64()? * 1e6))
                    }),
                    ("system calls a message", |l| number(l, "syscalls_per_message").map(digits)),
                ],
            ),
            "roundtrip" => self.table(ROUND, &LATENCY),
            "asleep" => self.table(ASLEEP, &LATENCY),
            "threads" => self.table("threads ", &[("messages/s", |l| number(l, "messages_per_second").map(rate))]),
            "memory" => self.table(
                "memory --count 100000 ",
                &[
                    ("sent before it had to wait", |l| number(l, "backlog_messages").map(|n| format!("{n:.0}"))),
                    ("memory then", |l| number(l, "backlog_resident_bytes").map(bytes)),
                    ("after all were taken", |l| number(l, "drained_resident_bytes").map(bytes)),
                ],
            ),
            "idle" => self.table(
                "idle ",
                &[
                    ("wake-ups a second", |l| number(l, "wakeups_per_second").map(digits)),
                    ("CPU s of two", |l| number(l, "cpu_seconds").map(digits)),
                ],
            ),
            "kill" => self.table(
                "kill ",
                &[
                    ("its receiver killed: the sender", |l| Some(outcome(l, "receiver"))),
                    ("after", |l| number(l, "receiver_death_told_ns").map(time)),
                    ("its sender killed: the receiver", |l| Some(outcome(l, "sender"))),
                    ("after", |l| number(l, "sender_death_told_ns").map(time)),
                ],
            ),
            "io_uring" => self.pairs(),
            "headline" => self.headline(),
            _ => bail!(
                "found a place named `{name}`, wanted machine, stream, roundtrip, asleep, threads, memory, idle, kill, io_uring or headline"
            ),
        })
    }

    /// Of a command: the systems' lines, and that of ratios.
    fn of(&self, command: &str) -> (Vec<&Value>, Option<&Value>) {
        let wanted = format!("./run bench {command}");
        let here = |line: &&Value| line["command"].as_str().is_some_and(|found| found.starts_with(&wanted));
        let systems = self.lines.iter().filter(here).filter(|line| line["label"].is_string()).collect();
        (systems, self.lines.iter().filter(here).find(|line| line["ratios"].is_object()))
    }

    fn machine(&self) -> String {
        let machine = &self.lines[0]["machine"];
        let word = |name: &str| machine[name].as_str().unwrap_or("not known").to_string();
        let is_short = machine["command"].as_str().is_some_and(|command| command.contains("--short"));
        format!(
            "Measured {}, `{}`{}: {} processors, {}, {}, commit {} ([record](bench/record/{})).\n",
            word("date"),
            word("command"),
            if is_short {
                " (one short run while the machine was busy: to show the form, not for its figures)"
            } else {
                ""
            },
            machine["processors"],
            word("processor"),
            word("kernel"),
            word("commit"),
            self.name
        )
    }

    fn table(&self, command: &str, columns: &[(&str, Column)]) -> String {
        let (systems, ratios) = self.of(command);
        let mut text = format!("| `{}` |", command.trim().trim_end_matches(" --count"));
        let first = ratios.and_then(|line| line["first"].as_str()).unwrap_or_default();
        let compares = ratios.is_some_and(|line| line["ratios"].as_object().is_some_and(|all| !all.is_empty()));
        columns.iter().for_each(|(title, _)| _ = write!(text, " {title} |"));
        if compares {
            _ = write!(text, " {first} by this, run by run |");
        }
        text.push_str("\n|---|");
        text.push_str(&"---|".repeat(columns.len() + usize::from(compares)));
        text.push('\n');
        for system in systems {
            let label = system["label"].as_str().unwrap_or_default();
            if let Some(reason) = system["skipped"].as_str() {
                _ = writeln!(text, "| {label} | left out: {} |", reason.replace(['|', '\n'], " "));
                continue;
            }
            _ = write!(text, "| {label} |");
            columns.iter().for_each(|(_, column)| _ = write!(text, " {} |", column(system).unwrap_or_default()));
            if compares {
                let ratio = ratios.map(|line| &line["ratios"][label]);
                _ = write!(text, " {} |", ratio.and_then(ratio_text).unwrap_or_default());
            }
            text.push('\n');
        }
        text
    }

    /// Each socket by io_uring, beside the same by plain system calls.
    fn pairs(&self) -> String {
        let mut text = "| | plain system calls | io_uring | io_uring by plain |\n|---|---|---|---|\n".to_string();
        for (command, figure, show) in [
            (STREAM, "messages_per_second", rate as fn(f64) -> String),
            (STREAM, "cpu_seconds", |value| format!("{} CPU s", digits(value))),
            (STREAM, "syscalls_per_message", |value| format!("{} calls a message", digits(value))),
            ("stream --size 65536 ", "messages_per_second", rate),
            (ROUND, "round_trip_ns", time),
            (ASLEEP, "round_trip_ns", time),
        ] {
            let (systems, _) = self.of(command);
            let find = |names: &[&str]| {
                let line = systems.iter().find(|line| names.contains(&line["label"].as_str().unwrap_or_default()))?;
                number(line, figure)
            };
            for (what, plain, uring) in [
                ("stream socket, 64 KiB buffers", ["sock-stream-batched:block", "sock-stream"], "io-uring-stream"),
                ("seqpacket socket", ["sock-seqpacket:block", "sock-seqpacket"], "io-uring-seqpacket"),
            ] {
                if let (Some(plain), Some(uring)) = (find(&plain), find(&[uring])) {
                    let by = digits(uring / plain);
                    _ = writeln!(text, "| {what}, `{}` | {} | {} | {by} |", command.trim(), show(plain), show(uring));
                }
            }
        }
        text
    }

    /// pelton's first figure of each command, and that by others' in the same run: at most six of them, or the line would be a page.
    fn headline(&self) -> String {
        let mut text = "| `./run bench …` | pelton | beside it, in the same run |\n|---|---|---|\n".to_string();
        for (command, figure, show) in [
            ("stream --size 16 ", "messages_per_second", rate as fn(f64) -> String),
            (STREAM, "messages_per_second", rate),
            ("stream --size 1..32768 ", "messages_per_second", rate),
            (ROUND, "round_trip_ns", time),
            (ASLEEP, "round_trip_ns", time),
            ("threads ", "messages_per_second", rate),
            ("lopsided --slow receiver ", "share_of_own_speed", digits),
            ("lopsided --slow sender ", "share_of_own_speed", digits),
            ("fan-in --senders 2 ", "messages_per_second", rate),
            ("fan-in --senders 8 ", "messages_per_second", rate),
            ("append ", "messages_per_second", rate),
            ("call --size 64 --count", "round_trip_ns", time),
            ("call --size 64 --in-flight 1000 ", "messages_per_second", rate),
            ("reattach ", "reattach_receiver_ns", time),
        ] {
            let (systems, ratios) = self.of(command);
            let Some(own) = systems.first().and_then(|line| number(line, figure)) else { continue };
            let all = ratios.and_then(|line| line["ratios"].as_object());
            // In the order in which they were measured.
            let others: Vec<String> = systems
                .iter()
                .filter_map(|line| {
                    let name = line["label"].as_str()?;
                    let median = all?.get(name)?["median"].as_f64()?;
                    Some(format!("{} × {}", digits(median), name.trim_end_matches(":block")))
                })
                .take(6)
                .collect();
            let command = command.trim().trim_end_matches(" --count");
            _ = writeln!(text, "| `{command}` | {} | {} |", show(own), others.join(", "));
        }
        text
    }
}

/// What a table shows of a system.
type Column = fn(&Value) -> Option<String>;

const LATENCY: [(&str, Column); 4] = [
    ("mean", |l| number(l, "round_trip_ns").map(time)),
    ("half", |l| number(l, "p50_ns").map(time)),
    ("99 %", |l| number(l, "p99_ns").map(time)),
    ("99.9 %", |l| number(l, "p999_ns").map(time)),
];

fn number(line: &Value, name: &str) -> Option<f64> {
    line[name].as_f64()
}

fn ratio_text(ratio: &Value) -> Option<String> {
    let of = |name: &str| ratio[name].as_f64().map(digits);
    Some(format!("{} ({} to {})", of("median")?, of("min")?, of("max")?))
}

fn outcome(line: &Value, who: &str) -> String {
    let runs = line["runs"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut seen: Vec<(&str, usize)> = Vec::new();
    for outcome in runs.iter().filter_map(|run| run["deaths"][who]["outcome"].as_str()) {
        match seen.iter_mut().find(|(name, _)| *name == outcome) {
            Some((_, count)) => *count += 1,
            None => seen.push((outcome, 1)),
        }
    }
    let text = |name: &str| match name {
        "told" => "is told",
        "hangs" => "is not told, and waits",
        "goes-on" => "is not told, and goes on",
        "wrong" => "gets a wrong message",
        _ => "dies too",
    };
    match &seen[..] {
        [(name, _)] => text(name).to_string(),
        seen => seen.iter().map(|(name, n)| format!("{} ({n})", text(name))).collect::<Vec<_>>().join(", "),
    }
}

fn rate(value: f64) -> String {
    if value >= 1e6 { format!("{} M", digits(value / 1e6)) } else { format!("{} k", digits(value / 1e3)) }
}

fn time(ns: f64) -> String {
    match ns {
        _ if ns >= 1e9 => format!("{} s", digits(ns / 1e9)),
        _ if ns >= 1e6 => format!("{} ms", digits(ns / 1e6)),
        _ if ns >= 1e3 => format!("{} µs", digits(ns / 1e3)),
        _ => format!("{ns:.0} ns"),
    }
}

fn bytes(value: f64) -> String {
    if value >= 1048576.0 { format!("{} MiB", digits(value / 1048576.0)) } else { format!("{:.0} KiB", value / 1024.0) }
}

/// Three digits that count.
fn digits(value: f64) -> String {
    let size = value.abs();
    let behind = match size {
        _ if size == 0.0 => return "0".to_string(),
        _ if size >= 100.0 => 0,
        _ if size >= 10.0 => 1,
        _ if size >= 1.0 => 2,
        _ if size >= 0.1 => 3,
        _ if size >= 0.01 => 4,
        _ => return format!("{value:.1e}"),
    };
    format!("{value:.behind$}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn lines() -> Vec<Value> {
        let command = "./run bench stream --size 256 --count 10";
        let system = |label: &str, rate: f64| {
            json!({ "label": label, "command": command, "skipped": null,
            "parameters": { "count": 10 }, "messages_per_second": rate, "cpu_seconds": 2e-5 })
        };
        vec![
            json!({ "machine": { "date": "2026-01-02 03:04", "command": "./run bench all", "processors": 2 } }),
            system("pelton", 51_234_567.0),
            system("other", 2_000.0),
            json!({ "label": "third", "command": command, "skipped": "no | luck" }),
            json!({ "command": command, "first": "pelton", "ratios": { "other": { "median": 25.0, "min": 1.0, "max": 99.9 } } }),
        ]
    }

    #[test]
    fn what_is_between_the_marks_is_written_anew_and_nothing_else() {
        let lines = lines();
        let figures = Figures { lines: &lines, name: "r.jsonl" };
        let text = "before\n<!-- bench stream -->\nold\n<!-- /bench -->\nafter <!-- other -->\n";
        let once = fill(text, &figures).unwrap();
        assert!(once.starts_with("before\n<!-- bench stream -->\n| `stream --size 256` | messages/s |"), "{once}");
        assert!(once.contains("| pelton | 51.2 M | 2.00 |  |  |\n"), "{once}");
        assert!(once.contains("| other | 2.00 k | 2.00 |  | 25.0 (1.00 to 99.9) |\n"), "{once}");
        assert!(once.contains("| third | left out: no   luck |\n"), "{once}");
        assert!(once.ends_with("<!-- /bench -->\nafter <!-- other -->\n") && !once.contains("old"), "{once}");
        assert_eq!(fill(&once, &figures).unwrap(), once, "the second time changes nothing");
    }

    #[test]
    fn a_place_that_nobody_knows_or_that_never_ends_is_told() {
        let lines = lines();
        let figures = Figures { lines: &lines, name: "r.jsonl" };
        let error = fill("<!-- bench nonsense -->\n<!-- /bench -->", &figures).unwrap_err();
        assert!(error.to_string().contains("`nonsense`"), "{error}");
        assert!(fill("<!-- bench stream -->\n", &figures).unwrap_err().to_string().contains("no `<!-- /bench"));
    }

    #[test]
    fn what_became_of_survivors_is_counted() {
        let run = |outcome: &str| json!({ "deaths": { "sender": { "outcome": outcome } } });
        let line = json!({ "runs": [run("told"), run("hangs"), run("told")] });
        assert_eq!(outcome(&line, "sender"), "is told (2), is not told, and waits (1)");
    }
}
