//! One exchange: drivers as child processes, each checked by its exit status and its report.

use super::{Lacks, UNPOISONED};
use crate::{failure::Failure, process::Process, signals::Signals};
use std::{
    fmt,
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    process::ExitStatus,
    sync::Mutex,
    time::{Duration, Instant},
};

/// A report is a line. A driver with more output than this is wrong, unless it is `gather`, which no exchange has.
const OUTPUT_BYTES_MAX: usize = 64 * 1024;
/// After a side has failed, the other side gets this long to end by itself: its error may be the cause. A guess.
const GRACE: Duration = Duration::from_secs(1);
/// Characters of a report, and of a line of errors, in a message.
const TEXT_MAX: usize = 300;

/// The program of one language.
#[derive(Clone)]
pub struct Implementation {
    pub name: String,
    pub program: PathBuf,
    /// Arguments before those of a driver.
    pub arguments: Vec<String>,
}

/// A side of an exchange.
#[derive(Clone)]
pub struct Side {
    /// 0: the sending or calling language; 1: the other.
    pub of: usize,
    /// `@` in an argument stands for the exchange's directory.
    pub arguments: Vec<String>,
    pub wanted: Wanted,
    /// The index of the side that must have ended before this one starts.
    pub after: Option<usize>,
}

impl Side {
    pub fn new(of: usize, arguments: &str, wanted: Wanted) -> Side {
        Side { of, arguments: arguments.split(' ').map(str::to_owned).collect(), wanted, after: None }
    }

    pub fn after(self, index: usize) -> Side {
        Side { after: Some(index), ..self }
    }

    /// What a driver may say that it lacks: the command, the command with its `THEN`, and the command by path.
    fn features(&self) -> Vec<String> {
        let command = &self.arguments[0];
        let by_path = self.arguments.get(1).filter(|name| name.starts_with("path:")).map(|_| "path");
        let then = self.arguments.get(4).map(String::as_str);
        let features = then.into_iter().chain(by_path).map(|feature| format!("{command} {feature}"));
        std::iter::once(command.clone()).chain(features).collect()
    }
}

/// How a side must end.
#[derive(Clone)]
pub enum Wanted {
    /// With exit code 0 and this report.
    Report(String),
    /// By SIGKILL, with this report. A shell that ran the driver exits with 137.
    Killed(String),
    /// With exit code 1, without a report.
    Refusal,
    /// With exit code 2: the command alone is wrong usage.
    Usage,
    /// With exit code 0 and a report that begins and ends so, with a number of 1 or more between.
    Number(&'static str, &'static str),
}

impl Wanted {
    fn is(&self, status: ExitStatus, report: &str) -> bool {
        let killed = status.signal() == Some(9) || status.code() == Some(137);
        match self {
            Wanted::Report(wanted) => status.success() && report == wanted,
            Wanted::Killed(wanted) => killed && report == wanted,
            Wanted::Refusal => status.code() == Some(1) && !report.starts_with("ok "),
            Wanted::Usage => status.code() == Some(2),
            Wanted::Number(begins, ends) => {
                let number = report.strip_prefix(begins).and_then(|rest| rest.strip_suffix(ends));
                status.success() && number.is_some_and(|number| number.parse().is_ok_and(|number: u64| number > 0))
            }
        }
    }
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wanted::Report(report) => write!(f, "`{report}` and exit code 0"),
            Wanted::Killed(report) => write!(f, "`{report}` and an end by SIGKILL"),
            Wanted::Refusal => write!(f, "an error and exit code 1"),
            Wanted::Usage => write!(f, "exit code 2, or `unsupported` and exit code 3"),
            Wanted::Number(begins, ends) => write!(f, "`{begins}N{ends}` and exit code 0"),
        }
    }
}

/// The result of an exchange.
#[derive(Clone, PartialEq, Eq)]
pub enum Outcome {
    Passed,
    /// What was found, and what was wanted.
    Failed(String),
    /// Which language lacks what.
    Unsupported(String),
}

/// Runs the sides of an exchange to their ends, until `limit` at most. `directory` is theirs.
pub fn run(
    sides: &[Side],
    languages: [&Implementation; 2],
    lacks: &Mutex<Lacks>,
    directory: &Path,
    limit: Duration,
    signals: &Signals,
) -> Result<Outcome, Failure> {
    for side in sides {
        let language = &languages[side.of].name;
        let lacks = lacks.lock().expect(UNPOISONED);
        let has = |feature: &String| !lacks.contains_key(&(language.clone(), feature.clone()));
        if let Some(feature) = side.features().iter().find(|feature| !has(feature)) {
            return Ok(Outcome::Unsupported(format!("{language} lacks `{feature}`")));
        }
    }
    let mut deadline = Instant::now() + limit;
    let mut running: Vec<Option<Process>> = sides.iter().map(|_| None).collect();
    let mut has_ended = vec![false; sides.len()];
    let mut problems = Vec::new();
    loop {
        for (at, side) in sides.iter().enumerate() {
            let is_due = side.after.is_none_or(|before| has_ended[before]);
            if running[at].is_none() && !has_ended[at] && is_due && problems.is_empty() {
                let mut process = Process::start(&command(side, languages[side.of], directory), true)?;
                process.close_input();
                running[at] = Some(process);
            }
        }
        if running.iter().all(Option::is_none) {
            break;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        signals.poll_all(running.iter().flatten().flat_map(Process::poll_events), Some(left))?;
        let (is_late, is_first) = (Instant::now() >= deadline, problems.is_empty());
        for (at, side) in sides.iter().enumerate() {
            let Some(mut process) = running[at].take() else { continue };
            let is_done = process.step(OUTPUT_BYTES_MAX)?;
            if !is_done && !is_late && process.output.len() <= OUTPUT_BYTES_MAX {
                running[at] = Some(process);
                continue;
            }
            has_ended[at] = true;
            let output = String::from_utf8_lossy(&std::mem::take(&mut process.output)).into_owned();
            let report = output.trim_end().lines().last().unwrap_or_default();
            let (status, errors) = process.end();
            let language = &languages[side.of].name;
            if is_done && status.code() == Some(3) {
                // The harness has asked for the commands: afterwards only a `THEN` or a path can be missing.
                let is_question = matches!(side.wanted, Wanted::Usage);
                let features = side.features().into_iter().filter(|feature| feature.contains(' ') != is_question);
                let statement = features.into_iter().find_map(|feature| {
                    let reason = report.strip_prefix(&format!("unsupported {feature}: "))?.to_owned();
                    Some((feature, reason))
                });
                if let Some((feature, reason)) = statement {
                    let text = format!("{language} lacks `{feature}`");
                    lacks.lock().expect(UNPOISONED).insert((language.clone(), feature), reason);
                    return Ok(Outcome::Unsupported(text));
                }
            }
            if is_done && side.wanted.is(status, report) {
                continue;
            }
            let how = match () {
                () if is_done => format!("ended with {status}"),
                () if !is_late => format!("wrote more than {OUTPUT_BYTES_MAX} bytes to standard output"),
                () if is_first => format!("was killed after {:.0} s", limit.as_secs_f64()),
                () => format!("was killed {:.0} s later", GRACE.as_secs_f64()),
            };
            let report: String = report.chars().take(TEXT_MAX).collect();
            problems.push(format!(
                "{language}, `driver {}`, {how}, {}; wanted {}{}",
                side.arguments.join(" "),
                if report.is_empty() { "without a report".to_owned() } else { format!("and reported `{report}`") },
                side.wanted,
                shortened(&errors),
            ));
            deadline = deadline.min(Instant::now() + GRACE);
        }
    }
    Ok(if problems.is_empty() { Outcome::Passed } else { Outcome::Failed(problems.join("\n")) })
}

/// The first and the last lines of a side's errors: of a runtime's stack trace, one of them is the reason.
fn shortened(errors: &[u8]) -> String {
    let errors = String::from_utf8_lossy(errors);
    let lines: Vec<String> = errors.trim().lines().map(|line| line.chars().take(TEXT_MAX).collect()).collect();
    match lines.len() {
        0 => String::new(),
        1..=6 => format!("; its errors: {}", lines.join("\n")),
        count => format!("; its errors: {}\n[...]\n{}", lines[..3].join("\n"), lines[count - 3..].join("\n")),
    }
}

/// The side's command line for a shell.
fn command(side: &Side, language: &Implementation, directory: &Path) -> String {
    let quoted = |text: &str| format!("'{}'", text.replace('\'', r"'\''"));
    let directory = directory.display().to_string();
    let words = language.arguments.iter().cloned();
    let words = words.chain(side.arguments.iter().map(|argument| argument.replace('@', &directory)));
    let words: Vec<String> = words.map(|word| quoted(&word)).collect();
    let program = quoted(&language.program.display().to_string());
    let directory = quoted(&directory);
    format!("cd {directory} && TMPDIR={directory} exec {program} {}", words.join(" "))
}
