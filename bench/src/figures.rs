//! `./run bench figures RESULTS`: writes the figures of README.md and COMPARE.md from a results file, so that none is
//! copied by hand.
//!
//! A pair of comments, `<!-- bench NAME -->` and `<!-- /bench -->`, marks a place in a file; the command replaces all
//! text between them.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::Value;

use crate::{
    results,
    statistics::{Ratio, digits, paired_ratio},
};

/// Writes the figures of README.md and COMPARE.md from a results file
#[derive(Args, Debug)]
pub struct Arguments {
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

/// Writes them.
pub fn write_all(arguments: &Arguments) -> Result<()> {
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

/// A title, and a system's cell below it.
type Column = (&'static str, fn(&Value) -> Option<String>);

const RATE: Column = ("messages/s", |l| number(l, "messages_per_second").map(rate));
const LATENCY: &[Column] = &[
    ("mean", |l| number(l, "round_trip_ns").map(time)),
    ("median", |l| number(l, "p50_ns").map(time)),
    ("99 %", |l| number(l, "p99_ns").map(time)),
    ("99.9 %", |l| number(l, "p999_ns").map(time)),
];

/// The commands of several places, without the options of [`HOW_MANY`].
const STREAM: &str = "stream --size 256";
const ROUND: &str = "roundtrip --size 64";
const ROUND_IN_THE_KERNEL: &str = "roundtrip --size 64 --wait block";
const ASLEEP: &str = "roundtrip --size 64 --delay 20";

/// The places that are a table of the systems of one command.
const TABLES: [(&str, &str, &[Column]); 8] = [
    (
        "stream",
        STREAM,
        &[
            RATE,
            ("CPU s per million", |l| per_million(l, l).map(digits)),
            ("system calls per message", |l| number(l, "syscalls_per_message").map(digits)),
        ],
    ),
    ("roundtrip", ROUND, LATENCY),
    ("roundtrip-in-the-kernel", ROUND_IN_THE_KERNEL, LATENCY),
    ("asleep", ASLEEP, LATENCY),
    ("threads", "threads --size 64", &[RATE]),
    (
        "memory",
        "memory",
        &[
            ("messages accepted", |l| number(l, "backlog_messages").map(|n| format!("{n:.0}"))),
            ("resident memory", |l| number(l, "backlog_resident_bytes").map(bytes)),
            ("after all were received", |l| number(l, "drained_resident_bytes").map(bytes)),
        ],
    ),
    (
        "idle",
        "idle",
        &[
            ("wake-ups per second", |l| number(l, "wakeups_per_second").map(digits)),
            ("CPU s in 2 s", |l| number(l, "cpu_seconds").map(digits)),
        ],
    ),
    (
        "kill",
        "kill",
        &[
            ("receiver killed: the sender", |l| Some(outcome(l, "receiver"))),
            ("after", |l| number(l, "receiver_death_detected_ns").map(time)),
            ("sender killed: the receiver", |l| Some(outcome(l, "sender"))),
            ("after", |l| number(l, "sender_death_detected_ns").map(time)),
        ],
    ),
];

/// The rows of the headline: a command, pelton's figure, and a remark.
const HEADLINE: [(&str, &str, &str); 10] = [
    (STREAM, "messages_per_second", ""),
    ("stream --size 16", "messages_per_second", ""),
    ("stream --size 1..32768", "messages_per_second", "; read in place, as by *limits*; sockets copy"),
    (ROUND, "round_trip_ns", ""),
    (ASLEEP, "round_trip_ns", ""),
    ("fan-in --senders 8", "messages_per_second", ""),
    ("append --threads 2", "messages_per_second", ""),
    ("call --size 64", "round_trip_ns", ""),
    ("call --size 64 --in-flight 1000 --wait block", "messages_per_second", ""),
    ("reattach", "reattach_receiver_ns", ""),
];

/// What is measured with each placement, and its figure.
const PLACED: [(&str, &str); 3] = [
    ("stream --size 256 --wait block", "messages_per_second"),
    (ROUND_IN_THE_KERNEL, "round_trip_ns"),
    ("call --size 64 --wait block", "round_trip_ns"),
];
const PLACEMENTS: [&str; 3] = ["apart", "together", "free"];

/// A socket by plain system calls, and by io_uring.
type Pair = (&'static str, &'static str, &'static str);
const PAIRS_OF_STREAMS: &[Pair] = &[
    ("stream socket, 64 KiB buffers", "sock-stream-batched:block", "io-uring-stream"),
    ("seqpacket socket, 64 packets a call", "sock-seqpacket-batched:block", "io-uring-seqpacket"),
    ("seqpacket socket, plain: one packet a call", "sock-seqpacket:block", "io-uring-seqpacket"),
];
const PAIRS_OF_ROUNDS: &[Pair] = &[
    ("stream socket", "sock-stream:block", "io-uring-stream"),
    ("seqpacket socket", "sock-seqpacket:block", "io-uring-seqpacket"),
];
const PAIRS_ASLEEP: &[Pair] = &[
    ("stream socket", "sock-stream", "io-uring-stream"),
    ("seqpacket socket", "sock-seqpacket", "io-uring-seqpacket"),
];
/// A command, its pairs, a figure of a run (of the system of that line), and the figure's format.
type PairsRow = (&'static str, &'static [Pair], fn(&Value, &Value) -> Option<f64>, fn(f64) -> String);
const PAIRS: [PairsRow; 6] = [
    (STREAM, PAIRS_OF_STREAMS, |run, _| number(run, "messages_per_second"), rate),
    (STREAM, PAIRS_OF_STREAMS, per_million, |value| format!("{} CPU s a million", digits(value))),
    (
        STREAM,
        PAIRS_OF_STREAMS,
        |run, _| number(run, "syscalls_per_message"),
        |value| format!("{} calls a message", digits(value)),
    ),
    ("stream --size 65536", PAIRS_OF_STREAMS, |run, _| number(run, "messages_per_second"), rate),
    (ROUND_IN_THE_KERNEL, PAIRS_OF_ROUNDS, |run, _| number(run, "round_trip_ns"), time),
    (ASLEEP, PAIRS_ASLEEP, |run, _| number(run, "round_trip_ns"), time),
];

/// The rows of README's table: a name, the labels of its speed and of its kill, and what no figure has: which messages
/// are lost. The kernel, and ZeroMQ, free a dead process's buffers; of pelton the page that is named has the tests.
const FRONT: [(&str, &str, &str, &str); 5] = [
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

/// The commands from which the figures of all places are.
pub fn wanted() -> Vec<String> {
    let of_places = TABLES.map(|(_, command, _)| command).into_iter().chain(HEADLINE.map(|(command, ..)| command));
    let placed = PLACED.iter().flat_map(|(what, _)| PLACEMENTS.map(|place| format!("{what} --placement {place}")));
    of_places.chain(PAIRS.map(|(command, ..)| command)).map(str::to_string).chain(placed).collect()
}

/// Options that do not change the subject of a measurement.
const HOW_MANY: [&str; 6] = ["--count", "--seconds", "--runs", "--systems", "--report", "--results"];

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

struct Figures<'a> {
    lines: &'a [Value],
    name: &'a str,
}

impl Figures<'_> {
    fn block(&self, name: &str) -> Result<String> {
        if let Some((_, command, columns)) = TABLES.iter().find(|(table, ..)| *table == name) {
            return Ok(self.table(command, columns));
        }
        Ok(match name {
            "machine" => self.machine(),
            "placement" => self.placement(),
            "io_uring" => self.pairs(),
            "headline" => self.headline(),
            "front" => self.front(),
            _ => bail!(
                "found a place named `{name}`, wanted machine, placement, io_uring, headline, front, {}",
                TABLES.map(|(table, ..)| table).join(", ")
            ),
        })
    }

    /// The lines of a command's systems, and the figure of its ratios. Of a command with several counts the largest.
    fn of(&self, wanted: &str) -> (Vec<&Value>, Option<&str>) {
        let here = |line: &&Value| line["command"].as_str().is_some_and(|command| key(command) == wanted);
        let systems = || self.lines.iter().filter(here).filter(|line| line["label"].is_string());
        let largest = systems().max_by_key(|line| line["parameters"]["count"].as_u64());
        // Each system may have a count of its own; then one command has several.
        let Some(command) = largest.and_then(|line| line["command"].as_str()) else { return (Vec::new(), None) };
        let of_it = |line: &&Value| line["command"] == command;
        let ratios = self.lines.iter().filter(of_it).find(|line| line["ratios"].is_object());
        (systems().filter(of_it).collect(), ratios.and_then(|line| line["figure"].as_str()))
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

    fn table(&self, command: &str, columns: &[Column]) -> String {
        let (systems, figure) = self.of(command);
        let Some(first) = systems.first() else { return format!("`./run bench {command}` is not in these results.\n") };
        // Of several counts the table has the largest.
        let count = first["parameters"]["count"].as_u64().filter(|_| command == "memory");
        let shown = count.map_or(command.to_string(), |count| format!("{command} --count {count}"));
        let is_speed = |figure: &&str| figure.ends_with("_ns") || figure.ends_with("_per_second");
        let figure = figure.filter(is_speed).filter(|_| systems.len() > 1);
        let mut head = vec![format!("`{shown}`"), "wait".to_string()];
        head.extend(columns.iter().map(|(title, _)| title.to_string()));
        head.extend(figure.map(|_| format!("speedup of {}: median (95 %)", label(first))));
        let mut text = row(&head) + &format!("|{}\n", "---|".repeat(head.len()));
        for system in &systems {
            if let Some(reason) = system["skipped"].as_str() {
                let reason: String = reason.replace(['|', '\n'], " ").chars().take(160).collect();
                text += &row(&[label(system).to_string(), String::new(), format!("skipped: {reason}")]);
                continue;
            }
            let mut cells = vec![label(system).to_string(), system["wait"].as_str().unwrap_or_default().to_string()];
            cells.extend(columns.iter().map(|(_, column)| column(system).unwrap_or_default()));
            cells.extend(figure.map(|figure| speedup(first, system, figure).map(range).unwrap_or_default()));
            text += &row(&cells);
        }
        text
    }

    /// Each system with both sides pinned to processors of their own, pinned to one, and where the scheduler puts them.
    fn placement(&self) -> String {
        let mut text = "| | pinned apart | pinned together | not pinned |\n|---|---|---|---|\n".to_string();
        for (what, figure) in PLACED {
            let all = PLACEMENTS.map(|place| self.of(&format!("{what} --placement {place}")).0);
            if all[0].is_empty() {
                text += &format!("| `{what}` | not in these results | | |\n");
            }
            for name in all[0].iter().map(|line| label(line)) {
                let cells = all.iter().map(|systems| {
                    let line = systems.iter().find(|line| label(line) == name)?;
                    let shown = shown(figure, number(line, figure)?);
                    // pelton's speedup in the same runs.
                    let by = speedup(systems[0], line, figure).map(|by| format!("; {}", range(by)));
                    Some(shown + &by.unwrap_or_default())
                });
                let cells = cells.map(Option::unwrap_or_default);
                text += &row(&std::iter::once(format!("{name}, `{what}`")).chain(cells).collect::<Vec<_>>());
            }
        }
        text
    }

    /// Each socket by io_uring, beside the same by plain system calls, if both wait in the same way.
    fn pairs(&self) -> String {
        let mut text = "| | plain system calls | io_uring | ratio of io_uring to plain, run by run: median (95 %) |\n\
            |---|---|---|---|\n"
            .to_string();
        let mut missing = Vec::new();
        for (command, pairs, figure, show) in PAIRS {
            let (systems, _) = self.of(command);
            for (what, plain, uring) in pairs {
                let (Some(plain), Some(uring)) = (named(&systems, plain), named(&systems, uring)) else {
                    missing.push(format!("{what}, `{command}`"));
                    continue;
                };
                // A busy-polling side is not comparable with one that sleeps.
                if plain["wait"] != uring["wait"] {
                    continue;
                }
                let by = paired_ratio(&of_runs(uring, figure), &of_runs(plain, figure)).map(range);
                if let (Some(plain), Some(uring), Some(by)) = (figure(plain, plain), figure(uring, uring), by) {
                    text += &row(&[format!("{what}, `{command}`"), show(plain), show(uring), by]);
                }
            }
        }
        missing.dedup();
        if !missing.is_empty() {
            text += &format!("\nNot in these results: {}.\n", missing.join("; "));
        }
        text
    }

    /// README's table: what a user may have today beside pelton with its default wait, all of them blocking. Speed is
    /// of one command, what survives a kill of another.
    fn front(&self) -> String {
        let mut text = format!(
            "| 256-byte messages ([results](bench/results/{})) | messages/s | pelton's speedup: median (95 %) | `kill -9` of either side |\n|---|---|---|---|\n",
            self.name
        );
        let ((speeds, _), (kills, _)) = (self.of(STREAM), self.of("kill"));
        for (name, speed, kill, lost) in FRONT {
            let (Some(line), Some(death)) = (named(&speeds, speed), named(&kills, kill)) else {
                text += &format!("| {name} | not in these results | | |\n");
                continue;
            };
            let own = named(&speeds, "pelton:block");
            let by = own.and_then(|own| speedup(own, line, "messages_per_second")).map(range);
            let rate = number(line, "messages_per_second").map(rate);
            let detects = ["sender", "receiver"].map(|killed| outcome(death, killed) == "detects it");
            let reported = match detects {
                [true, true] => {
                    let after = ["sender_death_detected_ns", "receiver_death_detected_ns"];
                    let slowest = after.iter().filter_map(|name| number(death, name)).fold(0.0, f64::max);
                    format!("detected in {}", time(slowest))
                }
                [false, false] => "the other side is not notified".to_string(),
                _ => "only one side is notified".to_string(),
            };
            let cells = [rate.unwrap_or_default(), by.unwrap_or_default(), format!("{reported}; {lost}")];
            text += &row(&std::iter::once(name.to_string()).chain(cells).collect::<Vec<_>>());
        }
        text
    }

    /// pelton's first figure of each command, beside it limits.c (the faster of its windows) and the three closest
    /// other systems of that run.
    fn headline(&self) -> String {
        let mut text = format!(
            "| `./run bench …` ([results](bench/results/{})) | pelton | speedup over other systems in the same run: median (95 %) |\n|---|---|---|\n",
            self.name
        );
        for (command, figure, note) in HEADLINE {
            let (systems, _) = self.of(command);
            let Some(first) = systems.first() else {
                text += &format!("| `{command}` | not in these results | |\n");
                continue;
            };
            let Some(own) = number(first, figure) else { continue };
            // Other variants of pelton are not other systems; but a single sender is the reference for many.
            let is_own = |label: &str| label.starts_with("pelton") && label != "pelton-stream";
            let is_limits = |line: &Value| label(line).starts_with("limits");
            let mut speeds: Vec<(&Value, Ratio)> = systems[1..]
                .iter()
                .filter(|line| !is_own(label(line)))
                .filter_map(|line| Some((*line, speedup(first, line, figure)?)))
                .collect();
            // The closest first, or the comparison would be too easy.
            speeds.sort_by(|a, b| a.1.median.total_cmp(&b.1.median));
            let limits = speeds.iter().find(|(line, _)| is_limits(line));
            let others = limits.into_iter().chain(speeds.iter().filter(|(line, _)| !is_limits(line)).take(3));
            let others = others.map(|(line, speed)| {
                let name = match label(line) {
                    "limits" => "*limits*",
                    "limits-window" => "*limits* with pelton's window",
                    label => label,
                };
                // A speedup that costs processor time has its price beside it.
                let cpu = per_million(first, first).zip(per_million(line, line)).map(|(own, other)| own / other);
                let cpu = cpu.filter(|cpu| *cpu >= 1.25).map(|cpu| format!(", at {} × its CPU time", digits(cpu)));
                format!("{} {name}{}", range(*speed), cpu.unwrap_or_default())
            });
            let others = others.collect::<Vec<_>>().join("; ");
            text += &row(&[format!("`{command}`"), shown(figure, own), others + note]);
        }
        text
    }
}

fn row(cells: &[String]) -> String {
    format!("| {} |\n", cells.join(" | "))
}

fn label(line: &Value) -> &str {
    line["label"].as_str().unwrap_or_default()
}

/// The measured system of that label.
fn named<'a>(systems: &[&'a Value], name: &str) -> Option<&'a Value> {
    systems.iter().find(|line| label(line) == name && line["skipped"].is_null()).copied()
}

/// A figure of each run of that system.
fn of_runs(line: &Value, figure: impl Fn(&Value, &Value) -> Option<f64>) -> Vec<Option<f64>> {
    line["runs"].as_array().into_iter().flatten().map(|run| figure(run, line)).collect()
}

/// The first system's speedup over another one, run by run.
fn speedup(own: &Value, other: &Value, figure: &str) -> Option<Ratio> {
    let [own_runs, others] = [own, other].map(|line| of_runs(line, |run, _| number(run, figure)));
    // Of two times the shorter one is faster.
    let ratio =
        if figure.ends_with("_ns") { paired_ratio(&others, &own_runs) } else { paired_ratio(&own_runs, &others) };
    ratio.filter(|_| label(own) != label(other))
}

/// The median, and its bootstrap interval.
fn range(Ratio { median, interval: (low, high), .. }: Ratio) -> String {
    format!("{} ({} to {})", digits(median), digits(low), digits(high))
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

/// CPU seconds of both sides for a million messages, or rounds.
fn per_million(run: &Value, line: &Value) -> Option<f64> {
    Some(number(run, "cpu_seconds")? / line["parameters"]["count"].as_f64()? * 1e6)
}

fn number(line: &Value, name: &str) -> Option<f64> {
    line[name].as_f64()
}

/// How often the survivor reacted in each way.
fn outcome(line: &Value, killed: &str) -> String {
    let seen = of_outcomes(line, killed);
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

fn of_outcomes<'a>(line: &'a Value, killed: &str) -> Vec<(&'a str, usize)> {
    let mut seen: Vec<(&str, usize)> = Vec::new();
    let runs = line["runs"].as_array().into_iter().flatten();
    for outcome in runs.filter_map(|run| run["deaths"][killed]["outcome"].as_str()) {
        match seen.iter_mut().find(|(name, _)| *name == outcome) {
            Some((_, count)) => *count += 1,
            None => seen.push((outcome, 1)),
        }
    }
    seen
}

fn shown(figure: &str, value: f64) -> String {
    if figure.ends_with("_ns") { time(value) } else { format!("{} messages/s", rate(value)) }
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A system of a command, with that figure in its runs; in the median of the runs the second one.
    fn system(command: &str, label: &str, figure: &str, runs: [f64; 3]) -> Value {
        let command = format!("./run bench {command} --runs 3");
        let of_runs = runs.map(|value| json!({ figure: value }));
        json!({ "label": label, "command": command, "wait": "block", "parameters": { "count": 1000 },
            figure: runs[1], "cpu_seconds": 2e-3, "runs": of_runs })
    }

    fn ratios(command: &str, figure: &str) -> Value {
        json!({ "command": format!("./run bench {command} --runs 3"), "first": "pelton", "figure": figure,
            "ratios": {} })
    }

    fn figures(lines: &[Value]) -> Figures<'_> {
        Figures { lines, name: "r.jsonl" }
    }

    const SPEED: &str = "messages_per_second";

    #[test]
    fn only_the_text_between_the_marks_is_replaced() {
        let mut third = system(STREAM, "third", SPEED, [0.0; 3]);
        third["skipped"] = "no | luck".into();
        let lines = [
            json!({ "machine": {} }),
            system(STREAM, "pelton", SPEED, [51e6, 51_234_567.0, 52e6]),
            system(STREAM, "other", SPEED, [1e6, 2e6, 3e6]),
            third,
            ratios(STREAM, SPEED),
        ];
        let text = "before\n<!-- bench stream -->\nold\n<!-- /bench -->\nafter <!-- other -->\n";
        let once = fill(text, &figures(&lines)).unwrap();
        let head = "before\n<!-- bench stream -->\n| `stream --size 256` | wait | messages/s |";
        assert!(once.starts_with(head), "{once}");
        assert!(once.contains("| pelton | block | 51.2 M | 2.00 |  |  |\n"), "{once}");
        assert!(once.contains("| other | block | 2.00 M | 2.00 |  | 25.6 (17.3 to 51.0) |\n"), "{once}");
        assert!(once.contains("| third |  | skipped: no   luck |\n"), "{once}");
        assert!(once.ends_with("<!-- /bench -->\nafter <!-- other -->\n") && !once.contains("old"), "{once}");
        assert_eq!(fill(&once, &figures(&lines)).unwrap(), once, "the second time changes nothing");
        let missing = fill("<!-- bench memory -->\n<!-- /bench -->", &figures(&lines)).unwrap();
        assert!(missing.contains("`./run bench memory` is not in these results"), "{missing}");
        let error = fill("<!-- bench nonsense -->\n<!-- /bench -->", &figures(&lines)).unwrap_err();
        assert!(error.to_string().contains("`nonsense`"), "{error}");
        let error = fill("<!-- bench stream -->\n", &figures(&lines)).unwrap_err();
        assert!(error.to_string().contains("no `<!-- /bench"), "{error}");
    }

    #[test]
    fn the_headline_names_the_closest_systems_with_interval_and_price() {
        let rates = [("pelton", 72.0), ("far-1", 8.0), ("far-2", 9.0), ("limits", 60.0), ("limits-window", 90.0)];
        let more = [("far-3", 12.0), ("close", 48.0), ("far-4", 18.0), ("pelton-path", 72.0)];
        let mut lines: Vec<Value> = rates
            .into_iter()
            .chain(more)
            .map(|(label, rate)| system(STREAM, label, SPEED, [rate * 1e6, rate * 1e6, rate * 1e6]))
            .collect();
        lines[6]["cpu_seconds"] = 1e-3.into();
        let text = figures(&lines).headline();
        let row = text.lines().find(|line| line.contains("`stream --size 256`")).unwrap();
        assert_eq!(
            row,
            "| `stream --size 256` | 72.0 M messages/s | 0.800 (0.800 to 0.800) *limits* with pelton's window; \
             1.50 (1.50 to 1.50) close, at 2.00 × its CPU time; 4.00 (4.00 to 4.00) far-4; 6.00 (6.00 to 6.00) far-3 |"
        );
        assert!(text.contains("| `reattach` | not in these results | |"), "{text}");
    }

    #[test]
    fn the_front_table_has_speeds_by_turns_and_what_a_kill_does() {
        let death = |label: &str, sender: &str, receiver: &str| {
            let mut line = system("kill", label, "sender_death_detected_ns", [2e6; 3]);
            line["receiver_death_detected_ns"] = 3e6.into();
            let of = |outcome: &str| json!({ "outcome": outcome });
            line["runs"] = json!([{ "deaths": { "sender": of(sender), "receiver": of(receiver) } }]);
            line
        };
        let lines = [
            system(STREAM, "pelton:block", SPEED, [10e6, 20e6, 30e6]),
            system(STREAM, "pipe:block", SPEED, [1e6; 3]),
            system(STREAM, "zeromq-ipc", SPEED, [1e6; 3]),
            death("pelton", "detected", "detected"),
            death("pipe", "hangs", "detected"),
            death("zeromq-ipc", "hangs", "hangs"),
        ];
        let text = figures(&lines).front();
        for row in [
            "| **pelton** | 20.0 M |  | detected in 3.00 ms; **nothing is lost**",
            "| pipe | 1.00 M | 20.0 (10.0 to 30.0) | only one side is notified; ",
            "| ZeroMQ, `ipc://` | 1.00 M | 20.0 (10.0 to 30.0) | the other side is not notified; ",
            "| Unix socket | not in these results | | |",
        ] {
            assert!(text.contains(row), "{text}");
        }
        let runs =
            ["detected", "hangs", "detected"].map(|outcome| json!({ "deaths": { "sender": { "outcome": outcome } } }));
        let mixed = json!({ "runs": runs });
        assert_eq!(outcome(&mixed, "sender"), "detects it (2), hangs (1)");
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
    fn io_uring_is_compared_with_plain_sockets_run_by_run_where_both_wait_alike() {
        let mut spinning = system(ROUND_IN_THE_KERNEL, "sock-seqpacket:block", "round_trip_ns", [1.0; 3]);
        spinning["wait"] = "spin".into();
        let lines = [
            system(ROUND_IN_THE_KERNEL, "sock-stream:block", "round_trip_ns", [10.0, 20.0, 40.0]),
            system(ROUND_IN_THE_KERNEL, "io-uring-stream", "round_trip_ns", [5.0, 10.0, 20.0]),
            spinning,
            system(ROUND_IN_THE_KERNEL, "io-uring-seqpacket", "round_trip_ns", [1.0; 3]),
        ];
        let text = figures(&lines).pairs();
        let row = "| stream socket, `roundtrip --size 64 --wait block` | 20 ns | 10 ns | 0.500 (0.500 to 0.500) |";
        assert!(text.contains(row), "{text}");
        assert!(!text.contains("| seqpacket socket, `roundtrip"), "{text}");
        assert!(text.contains("Not in these results: stream socket, 64 KiB buffers, `stream --size 256`;"), "{text}");
    }

    #[test]
    fn every_placement_is_a_column_and_pelton_s_speedup_is_of_the_same_runs() {
        let mut lines = Vec::new();
        for (place, ns) in [("apart", 4000.0), ("together", 9000.0), ("free", 5000.0)] {
            let command = format!("{ROUND_IN_THE_KERNEL} --placement {place}");
            lines.extend(
                [("pelton", ns), ("pipe", 2.0 * ns)]
                    .map(|(label, ns)| system(&command, label, "round_trip_ns", [ns; 3])),
            );
        }
        let text = figures(&lines).placement();
        let what = "`roundtrip --size 64 --wait block`";
        assert!(text.contains(&format!("| pelton, {what} | 4.00 µs | 9.00 µs | 5.00 µs |")), "{text}");
        let double = "2.00 (2.00 to 2.00)";
        let row = format!("| pipe, {what} | 8.00 µs; {double} | 18.0 µs; {double} | 10.0 µs; {double} |");
        assert!(text.contains(&row), "{text}");
        assert!(text.contains("| `stream --size 256 --wait block` | not in these results | | |"), "{text}");
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
}
