//! `./run bench figures RESULTS`: writes the figures of README.md and COMPARE.md from a results file, so that none is
//! copied by hand.
//!
//! A pair of comments, `<!-- bench NAME -->` and `<!-- /bench -->`, marks a place in a file; the command replaces all
//! text between them.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result, bail};
use clap::Parser;
use serde_json::Value;

use crate::{results, statistics::paired_ratio};

/// Writes the figures of README.md and COMPARE.md from a results file
#[derive(Parser, Debug)]
#[command(name = "pelton-bench figures", max_term_width = 120)]
struct Arguments {
    /// The output of `./run bench all`
    results: PathBuf,

    /// Files with places for figures [default: README.md and COMPARE.md of the project's tree]
    files: Vec<PathBuf>,

    /// Accepts results that are not for publication: a short or interrupted measurement, or one of a tree with changes
    #[arg(long)]
    draft: bool,

    /// Also writes the page of these results
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
}

/// Runs the command line after `figures`.
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
    let lines = results::read(&arguments.results)?;
    if let Some(reason) = draft(&lines[0]["machine"]).filter(|_| !arguments.draft) {
        bail!(
            "found results that are not for publication, {} ({reason}), wanted those of `./run bench all` at a commit: measure again, or use --draft",
            arguments.results.display()
        );
    }
    let name = arguments.results.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let files = match &arguments.files[..] {
        [] => vec![root.join("README.md"), root.join("COMPARE.md")],
        files => files.to_vec(),
    };
    for file in files {
        let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        let filled = fill(&text, &Figures { lines: &lines, name: &name })
            .with_context(|| format!("filling in {}", file.display()))?;
        results::put(&file, &filled)?;
    }
    if let Some(page) = &arguments.report {
        results::write_page(page, &lines)?;
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

/// The commands of the tables, without the options of [`HOW_MANY`].
const STREAM: &str = "stream --size 256";
const ROUND: &str = "roundtrip --size 64";
const ROUND_IN_THE_KERNEL: &str = "roundtrip --size 64 --wait block";
const ASLEEP: &str = "roundtrip --size 64 --delay 20";
/// The commands of all tables, the pairs and the headline.
pub const WANTED: [&str; 25] = [
    STREAM,
    ROUND,
    ROUND_IN_THE_KERNEL,
    ASLEEP,
    "stream --size 16",
    "stream --size 65536",
    "stream --size 1..32768",
    "threads --size 64",
    "memory",
    "idle",
    "kill",
    "fan-in --senders 8",
    "append --threads 2",
    "call --size 64",
    "call --size 64 --in-flight 1000 --wait block",
    "reattach",
    PLACED[0].1[0],
    PLACED[0].1[1],
    PLACED[0].1[2],
    PLACED[1].1[0],
    PLACED[1].1[1],
    PLACED[1].1[2],
    PLACED[2].1[0],
    PLACED[2].1[1],
    PLACED[2].1[2],
];
/// Of each placement: the figure, and the commands with both sides pinned apart, pinned together, and not pinned.
const PLACED: [(&str, [&str; 3]); 3] = [
    (
        "messages_per_second",
        [
            "stream --size 256 --wait block --placement apart",
            "stream --size 256 --wait block --placement together",
            "stream --size 256 --wait block --placement free",
        ],
    ),
    (
        "round_trip_ns",
        [
            "roundtrip --size 64 --wait block --placement apart",
            "roundtrip --size 64 --wait block --placement together",
            "roundtrip --size 64 --wait block --placement free",
        ],
    ),
    (
        "round_trip_ns",
        [
            "call --size 64 --wait block --placement apart",
            "call --size 64 --wait block --placement together",
            "call --size 64 --wait block --placement free",
        ],
    ),
];
/// Options that do not change the subject of a measurement. Older results have `--record` for `--results`.
const HOW_MANY: [&str; 7] = ["--count", "--seconds", "--runs", "--systems", "--report", "--results", "--record"];

/// The command of a line, without those options.
pub fn key(command: &str) -> String {
    let mut words = command.trim_start_matches("./run bench ").split(' ');
    let mut kept = Vec::new();
    while let Some(word) = words.next() {
        if HOW_MANY.contains(&word) {
            words.next();
        } else {
            kept.push(word);
        }
    }
    kept.join(" ")
}

/// The first system's speedup over another. Of times it is the inverse ratio.
#[derive(Clone, Copy)]
struct Speed {
    median: f64,
    min: f64,
    max: f64,
    steady: bool,
}

impl Speed {
    fn of(ratios: &Value, label: &str) -> Option<Speed> {
        let ratio = &ratios["ratios"][label];
        let of = |name: &str| ratio[name].as_f64();
        let (median, min, max) = (of("median")?, of("min")?, of("max")?);
        // The middle half of the runs; all runs in older results, which have no quartiles.
        let steady = of("high").unwrap_or(max) <= NOT_STEADY * of("low").unwrap_or(min);
        let figure = ratios["figure"].as_str()?;
        if figure.ends_with("_ns") {
            Some(Speed { median: 1.0 / median, min: 1.0 / max, max: 1.0 / min, steady })
        } else {
            Some(Speed { median, min, max, steady })
        }
    }

    /// Median and range; "not steady" where the range is too wide for a figure.
    fn text(self) -> String {
        let range = format!("{} ({} to {})", digits(self.median), digits(self.min), digits(self.max));
        if self.steady { range } else { format!("{range}, not steady") }
    }
}

/// The ratio of the quartiles above which a figure is not steady.
const NOT_STEADY: f64 = 1.5;

impl Figures<'_> {
    fn block(&self, name: &str) -> Result<String> {
        Ok(match name {
            "machine" => self.machine(),
            "stream" => self.table(
                STREAM,
                &[
                    ("messages/s", |l| number(l, "messages_per_second").map(rate)),
                    ("CPU s per million", |l| per_million(l, l).map(digits)),
                    ("system calls per message", |l| number(l, "syscalls_per_message").map(digits)),
                ],
            ),
            "roundtrip" => self.table(ROUND, &LATENCY),
            "roundtrip-in-the-kernel" => self.table(ROUND_IN_THE_KERNEL, &LATENCY),
            "asleep" => self.table(ASLEEP, &LATENCY),
            "threads" => {
                self.table("threads --size 64", &[("messages/s", |l| number(l, "messages_per_second").map(rate))])
            }
            "memory" => self.table(
                "memory",
                &[
                    ("messages accepted", |l| number(l, "backlog_messages").map(|n| format!("{n:.0}"))),
                    ("resident memory", |l| number(l, "backlog_resident_bytes").map(bytes)),
                    ("after all were received", |l| number(l, "drained_resident_bytes").map(bytes)),
                ],
            ),
            "idle" => self.table(
                "idle",
                &[
                    ("wake-ups per second", |l| number(l, "wakeups_per_second").map(digits)),
                    ("CPU s in 2 s", |l| number(l, "cpu_seconds").map(digits)),
                ],
            ),
            "kill" => self.table(
                "kill",
                &[
                    ("receiver killed: the sender", |l| Some(outcome(l, "receiver"))),
                    ("after", |l| number(l, "receiver_death_detected_ns").map(time)),
                    ("sender killed: the receiver", |l| Some(outcome(l, "sender"))),
                    ("after", |l| number(l, "sender_death_detected_ns").map(time)),
                ],
            ),
            "placement" => self.placement(),
            "io_uring" => self.pairs(),
            "headline" => self.headline(),
            "front" => self.front(),
            _ => bail!(
                "found a place named `{name}`, wanted machine, stream, roundtrip, roundtrip-in-the-kernel, asleep, threads, memory, idle, kill, placement, io_uring, headline or front"
            ),
        })
    }

    /// The lines of a command's systems, and its line of ratios. Of a command with several counts the largest.
    fn of(&self, wanted: &str) -> (Vec<&Value>, Option<&Value>) {
        debug_assert!(WANTED.contains(&wanted), "{wanted} is to be among what is wanted");
        let here = |line: &&Value| line["command"].as_str().is_some_and(|command| key(command) == wanted);
        let systems = || self.lines.iter().filter(here).filter(|line| line["label"].is_string());
        let largest = systems().max_by_key(|line| line["parameters"]["count"].as_u64());
        // Each system may have a count of its own; then one command has several.
        let Some(command) = largest.and_then(|line| line["command"].as_str()) else { return (Vec::new(), None) };
        let of_it = |line: &&Value| line["command"] == command;
        let ratios = self.lines.iter().filter(of_it).find(|line| line["ratios"].is_object());
        (systems().filter(of_it).collect(), ratios)
    }

    fn machine(&self) -> String {
        let machine = &self.lines[0]["machine"];
        let word = |name: &str| machine[name].as_str().unwrap_or("not known").to_string();
        format!(
            "Measured {}, `{}`{}: {} processors, {}, {}, commit {}, load {} ([results](bench/results/{})).\n",
            word("date"),
            word("command"),
            match draft(machine) {
                Some(reason) => format!(" ({reason}: to show the form, not for its figures)"),
                None => String::new(),
            },
            machine["processors"],
            word("processor"),
            word("kernel"),
            word("commit"),
            word("load_at_the_end").split(' ').take(3).collect::<Vec<_>>().join(" "),
            self.name
        )
    }

    fn table(&self, command: &str, columns: &[(&str, Column)]) -> String {
        let (systems, ratios) = self.of(command);
        if systems.is_empty() {
            return not_in_results(command);
        }
        // Of several counts the table has the largest.
        let count = systems[0]["parameters"]["count"].as_u64().filter(|_| command == "memory");
        let shown = count.map_or(command.to_string(), |count| format!("{command} --count {count}"));
        let mut text = format!("| `{shown}` | wait |");
        let first = ratios.and_then(|line| line["first"].as_str()).unwrap_or_default();
        let ratios = ratios.filter(|line| {
            let is_speed = |figure: &str| figure.ends_with("_ns") || figure.ends_with("_per_second");
            line["figure"].as_str().is_some_and(is_speed)
                && line["ratios"].as_object().is_some_and(|all| !all.is_empty())
        });
        columns.iter().for_each(|(title, _)| _ = write!(text, " {title} |"));
        if ratios.is_some() {
            _ = write!(text, " speedup of {first}: median (range) |");
        }
        text.push_str("\n|---|");
        text.push_str(&"---|".repeat(1 + columns.len() + usize::from(ratios.is_some())));
        text.push('\n');
        for system in systems {
            let label = system["label"].as_str().unwrap_or_default();
            if let Some(reason) = system["skipped"].as_str() {
                let reason: String = reason.replace(['|', '\n'], " ").chars().take(160).collect();
                _ = writeln!(text, "| {label} | | skipped: {reason} |");
                continue;
            }
            _ = write!(text, "| {label} | {} |", system["wait"].as_str().unwrap_or_default());
            columns.iter().for_each(|(_, column)| _ = write!(text, " {} |", column(system).unwrap_or_default()));
            if let Some(ratios) = ratios {
                _ = write!(text, " {} |", Speed::of(ratios, label).map(Speed::text).unwrap_or_default());
            }
            text.push('\n');
        }
        text
    }

    /// Each system with both sides pinned to processors of their own, pinned to one, and where the scheduler puts them.
    fn placement(&self) -> String {
        let mut text = "| | pinned apart | pinned together | not pinned |\n|---|---|---|---|\n".to_string();
        for (figure, commands) in PLACED {
            let all = commands.map(|command| self.of(command));
            let what = commands[0].split(" --placement").next().unwrap_or_default();
            if all[0].0.is_empty() {
                _ = writeln!(text, "| `{what}` | not in these results | | |");
            }
            for label in all[0].0.iter().filter_map(|line| line["label"].as_str()) {
                let cells = all.iter().map(|(systems, ratios)| {
                    let line = systems.iter().find(|line| line["label"] == label)?;
                    let value = number(line, figure)?;
                    let shown = if figure.ends_with("_ns") { time(value) } else { rate(value) };
                    // pelton's speedup in the same runs.
                    let by = ratios.and_then(|ratios| Speed::of(ratios, label));
                    Some(by.map_or(shown.clone(), |by| format!("{shown}; {}", by.text())))
                });
                let cells: Vec<String> = cells.map(Option::unwrap_or_default).collect();
                _ = writeln!(text, "| {label}, `{what}` | {} |", cells.join(" | "));
            }
        }
        text
    }

    /// Each socket by io_uring, beside the same by plain system calls, if both wait in the same way.
    fn pairs(&self) -> String {
        const STREAMS: [Pair; 3] = [
            ("stream socket, 64 KiB buffers", "sock-stream-batched:block", "io-uring-stream"),
            ("seqpacket socket, 64 packets a call", "sock-seqpacket-batched:block", "io-uring-seqpacket"),
            ("seqpacket socket, plain: one packet a call", "sock-seqpacket:block", "io-uring-seqpacket"),
        ];
        const ROUNDS: [Pair; 2] = [
            ("stream socket", "sock-stream:block", "io-uring-stream"),
            ("seqpacket socket", "sock-seqpacket:block", "io-uring-seqpacket"),
        ];
        const RESTING: [Pair; 2] = [
            ("stream socket", "sock-stream", "io-uring-stream"),
            ("seqpacket socket", "sock-seqpacket", "io-uring-seqpacket"),
        ];
        let mut text =
            "| | plain system calls | io_uring | ratio of io_uring to plain, run by run: median (range) |\n|---|---|---|---|\n".to_string();
        let mut missing = Vec::new();
        let rows: [PairsRow<'_>; 6] = [
            (STREAM, &STREAMS, |run, _| number(run, "messages_per_second"), rate),
            (STREAM, &STREAMS, per_million, |value| format!("{} CPU s a million", digits(value))),
            (
                STREAM,
                &STREAMS,
                |run, _| number(run, "syscalls_per_message"),
                |value| format!("{} calls a message", digits(value)),
            ),
            ("stream --size 65536", &STREAMS, |run, _| number(run, "messages_per_second"), rate),
            (ROUND_IN_THE_KERNEL, &ROUNDS, |run, _| number(run, "round_trip_ns"), time),
            (ASLEEP, &RESTING, |run, _| number(run, "round_trip_ns"), time),
        ];
        for (command, pairs, figure, show) in rows {
            let (systems, _) = self.of(command);
            for (what, plain, uring) in pairs {
                let find = |name: &str| {
                    systems.iter().find(|line| line["label"] == name && line["skipped"].is_null()).copied()
                };
                let (Some(plain), Some(uring)) = (find(plain), find(uring)) else {
                    missing.push(format!("{what}, `{command}`"));
                    continue;
                };
                // A busy-polling side is not comparable with one that sleeps.
                if plain["wait"] != uring["wait"] {
                    continue;
                }
                let of_runs = |line: &Value| -> Vec<Option<f64>> {
                    let runs = line["runs"].as_array().map(Vec::as_slice).unwrap_or_default();
                    runs.iter().map(|run| figure(run, line)).collect()
                };
                let by = paired_ratio(&of_runs(uring), &of_runs(plain));
                let by = by.map(|by| format!("{} ({} to {})", digits(by.median), digits(by.min), digits(by.max)));
                if let (Some(plain), Some(uring), Some(by)) = (figure(plain, plain), figure(uring, uring), by) {
                    _ = writeln!(text, "| {what}, `{command}` | {} | {} | {by} |", show(plain), show(uring));
                }
            }
        }
        missing.dedup();
        if !missing.is_empty() {
            _ = writeln!(text, "\nNot in these results: {}.", missing.join("; "));
        }
        text
    }

    /// README's table: what a user may have today beside pelton with its default wait, all of them blocking. Speed is
    /// of one command, what survives a kill of another.
    fn front(&self) -> String {
        // The label of the speed, that of the kill, and what no figure has: which messages are lost. The kernel, and
        // ZeroMQ, free a dead process's buffers; of pelton the page that is named has the tests.
        const ROWS: [(&str, &str, &str, &str); 5] = [
            ("pipe", "pipe:block", "pipe", "what is in the pipe is lost"),
            ("Unix socket", "sock-stream:block", "sock-stream", "what is in the socket is lost"),
            (
                "Unix socket, 64 KiB batches",
                "sock-stream-batched:block",
                "sock-stream",
                "the same, and the sender's last batch",
            ),
            ("ZeroMQ, `ipc://`", "zeromq-ipc", "zeromq-ipc", "what the killed side has queued is lost"),
            ("**pelton**", "pelton:block", "pelton", "**nothing is lost**: [a successor gets it](docs/guarantees.md)"),
        ];
        let mut text = format!(
            "| 256-byte messages ([results](bench/results/{})) | messages/s | pelton's speedup: median (range) | `kill -9` of either side |\n|---|---|---|---|\n",
            self.name
        );
        let ((speeds, _), (kills, _)) = (self.of(STREAM), self.of("kill"));
        let find = |all: &[&Value], label: &str| {
            all.iter().find(|line| line["label"] == label && line["skipped"].is_null()).map(|line| (*line).clone())
        };
        let rates = |line: &Value| -> Vec<Option<f64>> {
            let runs = line["runs"].as_array().map(Vec::as_slice).unwrap_or_default();
            runs.iter().map(|run| number(run, "messages_per_second")).collect()
        };
        let own = find(&speeds, "pelton:block");
        for (name, speed, kill, lost) in ROWS {
            let (Some(line), Some(death)) = (find(&speeds, speed), find(&kills, kill)) else {
                _ = writeln!(text, "| {name} | not in these results | | |");
                continue;
            };
            let by = own.as_ref().filter(|_| speed != "pelton:block");
            let by = by.and_then(|own| paired_ratio(&rates(own), &rates(&line)));
            let by = by.map(|by| format!("{} ({} to {})", digits(by.median), digits(by.min), digits(by.max)));
            let rate = number(&line, "messages_per_second").map(rate).unwrap_or_default();
            let reported =
                match [outcome(&death, "sender"), outcome(&death, "receiver")].map(|seen| seen == "detects it") {
                    [true, true] => {
                        let after = ["sender_death_detected_ns", "receiver_death_detected_ns"];
                        let slowest = after.iter().filter_map(|name| number(&death, name)).fold(0.0, f64::max);
                        format!("detected in {}", time(slowest))
                    }
                    [false, false] => "the other side is not notified".to_string(),
                    _ => "only one side is notified".to_string(),
                };
            _ = writeln!(text, "| {name} | {rate} | {} | {reported}; {lost} |", by.unwrap_or_default());
        }
        text
    }

    /// pelton's first figure of each command, beside it limits.c (the faster of its windows) and the three closest
    /// other systems of that run.
    fn headline(&self) -> String {
        let mut text = format!(
            "| `./run bench …` ([results](bench/results/{})) | pelton | speedup over other systems in the same run: median (range) |\n|---|---|---|\n",
            self.name
        );
        let messages = |value| format!("{} messages/s", rate(value));
        let rows: [(&str, &str, Show<'_>, &str); 10] = [
            (STREAM, "messages_per_second", &messages, ""),
            ("stream --size 16", "messages_per_second", &messages, ""),
            (
                "stream --size 1..32768",
                "messages_per_second",
                &messages,
                "; read in place, as by *limits*; sockets copy",
            ),
            (ROUND, "round_trip_ns", &time, ""),
            (ASLEEP, "round_trip_ns", &time, ""),
            ("fan-in --senders 8", "messages_per_second", &messages, ""),
            ("append --threads 2", "messages_per_second", &messages, ""),
            ("call --size 64", "round_trip_ns", &time, ""),
            ("call --size 64 --in-flight 1000 --wait block", "messages_per_second", &messages, ""),
            ("reattach", "reattach_receiver_ns", &time, ""),
        ];
        for (command, figure, show, note) in rows {
            let (systems, ratios) = self.of(command);
            let Some(first) = systems.first() else {
                _ = writeln!(text, "| `{command}` | not in these results | |");
                continue;
            };
            let Some(own) = number(first, figure) else { continue };
            // Other variants of pelton are not other systems; but a single sender is the reference for many.
            let is_own = |label: &str| label.starts_with("pelton") && label != "pelton-stream";
            let speeds = systems.iter().skip(1).filter_map(|line| {
                let label = line["label"].as_str().filter(|label| !is_own(label))?;
                Some((label, *line, Speed::of(ratios?, label)?))
            });
            let mut speeds: Vec<(&str, &Value, Speed)> = speeds.collect();
            // The closest first, or the comparison would be too easy.
            speeds.sort_by(|a, b| a.2.median.total_cmp(&b.2.median));
            let is_limits = |label: &str| label.starts_with("limits");
            let limits = speeds.iter().find(|(label, ..)| is_limits(label));
            let others = speeds.iter().filter(|(label, ..)| !is_limits(label)).take(3);
            let others: Vec<String> = limits
                .into_iter()
                .chain(others)
                .map(|(label, line, speed)| {
                    let name = match *label {
                        "limits" => "*limits*".to_string(),
                        "limits-window" => "*limits* with pelton's window".to_string(),
                        label => label.to_string(),
                    };
                    // A speedup that costs processor time has its price beside it.
                    let cpu = per_million(first, first).zip(per_million(line, line)).map(|(own, other)| own / other);
                    let cpu = cpu.filter(|cpu| *cpu >= 1.25).map(|cpu| format!(", at {} × its CPU time", digits(cpu)));
                    format!("{} {name}{}", speed.text(), cpu.unwrap_or_default())
                })
                .collect();
            _ = writeln!(text, "| `{command}` | {} | {}{note} |", show(own), others.join("; "));
        }
        text
    }
}

fn not_in_results(command: &str) -> String {
    format!("`./run bench {command}` is not in these results.\n")
}

/// The reason why results are not for publication, if there is one.
fn draft(machine: &Value) -> Option<&'static str> {
    let word = |name: &str| machine[name].as_str().unwrap_or_default();
    match () {
        _ if word("command").contains("--short") => Some("one short run"),
        _ if machine["interrupted"] == true => Some("interrupted"),
        _ if word("commit").contains("with changes") => Some("of a tree with changes that nobody else has"),
        _ => None,
    }
}

/// A pair's name, the plain system, and the system of io_uring.
type Pair = (&'static str, &'static str, &'static str);

/// A command, its pairs, its figure, and the figure's format.
type PairsRow<'a> = (&'static str, &'a [Pair], Of, fn(f64) -> String);

/// A figure's format.
type Show<'a> = &'a dyn Fn(f64) -> String;

/// A figure of a run, or of the medians, of the system of that line.
type Of = fn(&Value, &Value) -> Option<f64>;

/// CPU seconds of both sides for a million messages, or rounds.
fn per_million(run: &Value, line: &Value) -> Option<f64> {
    Some(number(run, "cpu_seconds")? / line["parameters"]["count"].as_f64()? * 1e6)
}

/// A table's column of a system.
type Column = fn(&Value) -> Option<String>;

const LATENCY: [(&str, Column); 4] = [
    ("mean", |l| number(l, "round_trip_ns").map(time)),
    ("median", |l| number(l, "p50_ns").map(time)),
    ("99 %", |l| number(l, "p99_ns").map(time)),
    ("99.9 %", |l| number(l, "p999_ns").map(time)),
];

fn number(line: &Value, name: &str) -> Option<f64> {
    line[name].as_f64()
}

fn outcome(line: &Value, killed: &str) -> String {
    let runs = line["runs"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut seen: Vec<(&str, usize)> = Vec::new();
    for outcome in runs.iter().filter_map(|run| run["deaths"][killed]["outcome"].as_str()) {
        match seen.iter_mut().find(|(name, _)| *name == outcome) {
            Some((_, count)) => *count += 1,
            None => seen.push((outcome, 1)),
        }
    }
    let text = |name: &str| match name {
        "detected" => "detects it",
        "hangs" => "hangs",
        "continues" => "continues, undetected",
        "wrong" => "receives a wrong message",
        _ => "crashes too",
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

/// Three significant digits.
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
            json!({ "label": label, "command": command, "skipped": null, "wait": "spin",
            "parameters": { "count": 10 }, "messages_per_second": rate, "cpu_seconds": 2e-5 })
        };
        vec![
            json!({ "machine": { "date": "2026-01-02 03:04", "command": "./run bench all", "processors": 2 } }),
            system("pelton", 51_234_567.0),
            system("other", 2_000.0),
            json!({ "label": "third", "command": command, "skipped": "no | luck" }),
            json!({ "command": command, "first": "pelton", "figure": "messages_per_second", "ratios": { "other": { "median": 25.0, "min": 1.0, "max": 99.9 } } }),
        ]
    }

    #[test]
    fn only_the_text_between_the_marks_is_replaced() {
        let lines = lines();
        let figures = Figures { lines: &lines, name: "r.jsonl" };
        let text = "before\n<!-- bench stream -->\nold\n<!-- /bench -->\nafter <!-- other -->\n";
        let once = fill(text, &figures).unwrap();
        let head = "before\n<!-- bench stream -->\n| `stream --size 256` | wait | messages/s |";
        assert!(once.starts_with(head), "{once}");
        assert!(once.contains("| pelton | spin | 51.2 M | 2.00 |  |  |\n"), "{once}");
        assert!(once.contains("| other | spin | 2.00 k | 2.00 |  | 25.0 (1.00 to 99.9), not steady |\n"), "{once}");
        assert!(once.contains("| third | | skipped: no   luck |\n"), "{once}");
        assert!(once.ends_with("<!-- /bench -->\nafter <!-- other -->\n") && !once.contains("old"), "{once}");
        assert_eq!(fill(&once, &figures).unwrap(), once, "the second time changes nothing");
        let missing = fill("<!-- bench memory -->\n<!-- /bench -->", &figures).unwrap();
        assert!(missing.contains("`./run bench memory` is not in these results"), "{missing}");
    }

    #[test]
    fn options_of_count_do_not_change_the_key_of_a_command() {
        assert_eq!(key("./run bench stream --size 256 --seconds 0.3 --runs 7 --systems pelton,pipe"), STREAM);
        assert_eq!(key("./run bench roundtrip --size 64 --wait block --count 3"), ROUND_IN_THE_KERNEL);
        assert_eq!(key("./run bench roundtrip --size 64 --delay 20 --count 3"), ASLEEP);
    }

    /// pelton beside limits with both windows, close systems, and distant ones.
    fn close_and_far() -> Vec<Value> {
        let command = "./run bench stream --size 256 --seconds 1 --systems all";
        let system = |label: &str, cpu_seconds: f64| {
            json!({ "label": label, "command": command, "wait": "spin", "parameters": { "count": 1000 },
                "messages_per_second": 1e6, "cpu_seconds": cpu_seconds })
        };
        let steady = |median: f64| json!({ "median": median, "min": 0.9 * median, "max": 1.1 * median });
        let labels = ["pelton", "far-1", "far-2", "limits", "limits-window", "far-3", "close", "far-4", "pelton-path"];
        let mut lines: Vec<Value> = vec![json!({ "machine": { "command": "./run bench all" } })];
        lines.extend(labels.map(|label| system(label, if label == "close" { 0.5 } else { 1.0 })));
        let ratios = [9.0, 8.0, 1.2, 0.8, 7.0, 1.05, 6.0, 1.0];
        let ratios: serde_json::Map<String, Value> =
            labels[1..].iter().zip(ratios).map(|(label, ratio)| (label.to_string(), steady(ratio))).collect();
        lines.push(json!({ "command": command, "first": "pelton", "figure": "messages_per_second", "ratios": ratios }));
        lines
    }

    #[test]
    fn the_headline_names_the_closest_systems_with_range_and_price() {
        let lines = close_and_far();
        let text = Figures { lines: &lines, name: "r.jsonl" }.headline();
        let row = text.lines().find(|line| line.contains("`stream --size 256`")).unwrap();
        assert_eq!(
            row,
            "| `stream --size 256` | 1.00 M messages/s | 0.800 (0.720 to 0.880) *limits* with pelton's window; \
             1.05 (0.945 to 1.16) close, at 2.00 × its CPU time; 6.00 (5.40 to 6.60) far-4; 7.00 (6.30 to 7.70) far-3 |"
        );
        assert!(text.contains("| `reattach` | not in these results | |"), "{text}");
    }

    #[test]
    fn the_front_table_has_speeds_by_turns_and_what_a_kill_does() {
        let (stream, kill) = ("./run bench stream --size 256 --runs 3", "./run bench kill --runs 2");
        let speed = |label: &str, rates: [f64; 3]| {
            let runs = rates.map(|rate| json!({ "messages_per_second": rate }));
            json!({ "label": label, "command": stream, "parameters": { "count": 9 },
                "messages_per_second": rates[1], "runs": runs })
        };
        let death = |label: &str, sender: &str, receiver: &str| {
            let of = |outcome: &str| json!({ "outcome": outcome });
            json!({ "label": label, "command": kill, "parameters": { "count": 9 }, "sender_death_detected_ns": 2e6,
                "receiver_death_detected_ns": 3e6,
                "runs": [{ "deaths": { "sender": of(sender), "receiver": of(receiver) } }] })
        };
        let lines = [
            json!({ "machine": {} }),
            speed("pelton:block", [10e6, 20e6, 30e6]),
            speed("pipe:block", [1e6, 1e6, 1e6]),
            speed("sock-stream:block", [1e6, 1e6, 1e6]),
            speed("zeromq-ipc", [1e6, 1e6, 1e6]),
            death("pelton", "detected", "detected"),
            death("pipe", "hangs", "detected"),
            death("zeromq-ipc", "hangs", "hangs"),
        ];
        let text = Figures { lines: &lines, name: "r.jsonl" }.front();
        assert!(text.contains("| **pelton** | 20.0 M |  | detected in 3.00 ms; **nothing is lost**"), "{text}");
        assert!(text.contains("| pipe | 1.00 M | 20.0 (10.0 to 30.0) | only one side is notified; "), "{text}");
        assert!(
            text.contains("| ZeroMQ, `ipc://` | 1.00 M | 20.0 (10.0 to 30.0) | the other side is not notified; "),
            "{text}"
        );
        assert!(text.contains("| Unix socket | not in these results | | |"), "{text}");
    }

    /// The page that the front table names, and that the tests which it names are there.
    #[test]
    fn what_survives_a_kill_is_shown_by_tests() {
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        let guarantees = fs::read_to_string(root.join("docs/guarantees.md")).unwrap();
        let row = guarantees.lines().find(|line| line.contains("a successor gets everything unreleased")).unwrap();
        let tests: Vec<&str> = row.split('`').filter_map(|name| name.strip_prefix("two_processes::")).collect();
        assert!(tests.len() >= 2, "{row}");
        let code = fs::read_to_string(root.join("crates/pelton/tests/api/two_processes.rs")).unwrap();
        for test in tests {
            assert!(code.contains(&format!("fn {test}()")), "{test}");
        }
    }

    #[test]
    fn of_two_times_the_shorter_one_is_faster() {
        let ratios = json!({ "figure": "round_trip_ns", "ratios": { "a": { "median": 0.5, "min": 0.25, "max": 1.0, "low": 0.4, "high": 0.5 } } });
        assert_eq!(Speed::of(&ratios, "a").unwrap().text(), "2.00 (1.00 to 4.00)");
        let ratios = json!({ "figure": "round_trip_ns", "ratios": { "a": { "median": 0.5, "min": 0.25, "max": 1.0, "low": 0.3, "high": 0.5 } } });
        assert!(Speed::of(&ratios, "a").unwrap().text().ends_with("not steady"));
    }

    #[test]
    fn io_uring_is_compared_with_plain_sockets_run_by_run_where_both_wait_alike() {
        let command = "./run bench roundtrip --size 64 --wait block --seconds 1";
        let system = |label: &str, wait: &str, runs: [f64; 3]| {
            let runs = runs.map(|ns| json!({ "round_trip_ns": ns }));
            json!({ "label": label, "command": command, "wait": wait, "parameters": { "count": 9 }, "round_trip_ns": 10.0, "runs": runs })
        };
        let lines = [
            json!({ "machine": {} }),
            system("sock-stream:block", "block", [10.0, 20.0, 40.0]),
            system("io-uring-stream", "block", [5.0, 10.0, 20.0]),
            system("sock-seqpacket:block", "spin", [1.0; 3]),
            system("io-uring-seqpacket", "block", [1.0; 3]),
        ];
        let text = Figures { lines: &lines, name: "r.jsonl" }.pairs();
        assert!(
            text.contains(
                "| stream socket, `roundtrip --size 64 --wait block` | 10 ns | 10 ns | 0.500 (0.500 to 0.500) |"
            ),
            "{text}"
        );
        assert!(!text.contains("| seqpacket socket, `roundtrip"), "{text}");
        assert!(text.contains("Not in these results: stream socket, 64 KiB buffers, `stream --size 256`;"), "{text}");
    }

    #[test]
    fn no_figures_are_taken_from_draft_results() {
        let directory = tempfile::tempdir().unwrap();
        let (place, file) = (directory.path().join("r.jsonl"), directory.path().join("f.md"));
        std::fs::write(&file, "<!-- bench machine -->\n<!-- /bench -->\n").unwrap();
        for (machine, is_draft) in [
            (json!({ "command": "./run bench all --short", "commit": "abc" }), true),
            (json!({ "command": "./run bench all", "interrupted": true, "commit": "abc" }), true),
            (json!({ "command": "./run bench all", "commit": "abc, with changes" }), true),
            (json!({ "command": "./run bench all", "interrupted": false, "commit": "abc" }), false),
        ] {
            results::write(&place, &[json!({ "machine": machine })]).unwrap();
            let arguments =
                |draft| Arguments { results: place.clone(), files: vec![file.clone()], draft, report: None };
            let done = write_all(&arguments(false));
            assert_eq!(done.is_err(), is_draft, "{machine}: {done:?}");
            assert!(done.err().is_none_or(|error| error.to_string().contains("use --draft")));
            write_all(&arguments(true)).unwrap();
            let text = std::fs::read_to_string(&file).unwrap();
            assert_eq!(text.contains("not for its figures"), is_draft, "{text}");
        }
    }

    /// Each page quotes exactly the figures of the results file that it names.
    #[test]
    fn the_figures_of_the_projects_pages_are_those_of_the_results_that_they_name() {
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        let mut checked = 0;
        for page in ["README.md", "COMPARE.md"] {
            let text = fs::read_to_string(root.join(page)).unwrap();
            let between = text.split_once("<!-- bench ").unwrap().1.split_once(END).unwrap().0;
            let Some((_, name)) = between.split_once("(bench/results/") else { continue };
            let name = name.split_once(')').unwrap().0;
            let lines = results::read(&root.join("bench/results").join(name)).unwrap();
            let filled = fill(&text, &Figures { lines: &lines, name }).unwrap();
            assert!(
                filled == text,
                "{page} is not what `./run bench figures bench/results/{name}` writes: run it again"
            );
            checked += 1;
        }
        assert!(checked > 0, "none of the pages names its results");
    }

    #[test]
    fn every_placement_is_a_column_and_pelton_s_speedup_is_of_the_same_runs() {
        let mut lines = vec![json!({ "machine": {} })];
        for (place, ns) in [("apart", 4000.0), ("together", 9000.0), ("free", 5000.0)] {
            let command = format!("./run bench roundtrip --size 64 --wait block --placement {place} --runs 3");
            lines.extend([("pelton", ns), ("pipe", 2.0 * ns)].map(|(label, ns)| {
                json!({ "label": label, "command": command, "parameters": { "count": 9 }, "round_trip_ns": ns })
            }));
            let half = json!({ "median": 0.5, "min": 0.5, "max": 0.5 });
            lines.push(
                json!({ "command": command, "first": "pelton", "figure": "round_trip_ns", "ratios": { "pipe": half } }),
            );
        }
        let text = Figures { lines: &lines, name: "r.jsonl" }.placement();
        let what = "`roundtrip --size 64 --wait block`";
        assert!(text.contains(&format!("| pelton, {what} | 4.00 µs | 9.00 µs | 5.00 µs |")), "{text}");
        let double = "2.00 (2.00 to 2.00)";
        let row = format!("| pipe, {what} | 8.00 µs; {double} | 18.0 µs; {double} | 10.0 µs; {double} |");
        assert!(text.contains(&row), "{text}");
        assert!(text.contains("| `stream --size 256 --wait block` | not in these results | | |"), "{text}");
    }

    #[test]
    fn an_unknown_or_unclosed_place_is_an_error() {
        let lines = lines();
        let figures = Figures { lines: &lines, name: "r.jsonl" };
        let error = fill("<!-- bench nonsense -->\n<!-- /bench -->", &figures).unwrap_err();
        assert!(error.to_string().contains("`nonsense`"), "{error}");
        assert!(fill("<!-- bench stream -->\n", &figures).unwrap_err().to_string().contains("no `<!-- /bench"));
    }

    #[test]
    fn outcomes_of_survivors_are_counted() {
        let run = |outcome: &str| json!({ "deaths": { "sender": { "outcome": outcome } } });
        let line = json!({ "runs": [run("detected"), run("hangs"), run("detected")] });
        assert_eq!(outcome(&line, "sender"), "detects it (2), hangs (1)");
    }
}
