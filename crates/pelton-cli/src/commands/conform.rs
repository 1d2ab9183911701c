//! `pelton conform`: every ordered pair of implementations of spec/ exchanges messages, calls and files. Each is a
//! program with the command line of conformance/README.md. This module computes each report that a driver must write.
//!
//! Jobs run in parallel, as many as there are processors: the questions to one driver; then the exchanges of one pair,
//! the vectors of one language. The exchanges of a job run one after the other, each in a directory of its own.

pub mod driver;
mod exchange;
mod messages;
mod table;
mod vectors;

use crate::{
    failure::{Failure, print_stderr},
    output::print,
    process::Orphans,
    signals::Signals,
};
use exchange::{Implementation, Outcome, Side, Wanted};
use messages::Messages;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tempfile::TempDir;
use vectors::Vector;

#[derive(clap::Args)]
pub struct ConformArgs {
    /// Exchange messages once and calls once between each pair, instead of everything
    #[arg(long)]
    short: bool,
    /// Write every check to FILE, as one JSON object
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the results to FILE too: Markdown tables of the pairs, and of what each language lacks
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
    /// A driver: a program, and the name of its language, which is otherwise that of the file
    ///
    /// This tool is one more, `rust`, unless a driver has that name.
    #[arg(value_name = "NAME=PROGRAM", value_parser = implementation)]
    implementations: Vec<Implementation>,
}

/// Of a lock.
const UNPOISONED: &str = "no thread panics with the lock";

/// How long a driver waits for each step: 10 s, or `PELTON_SECONDS`.
fn wait_limit() -> Duration {
    let seconds = std::env::var("PELTON_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(10))
}

/// An exchange to check.
struct Case {
    /// Its letter in the table. Several cases can have the same one.
    letter: char,
    claim: String,
    sides: Vec<Side>,
    /// What is in the exchange's directory at first.
    vector: Option<Vector>,
}

impl Case {
    fn new(letter: char, claim: &str, sides: Vec<Side>) -> Case {
        Case { letter, claim: claim.to_owned(), sides, vector: None }
    }
}

/// Around the sizes of a word, a cache line, a page, 64 KiB and 1 MiB.
const SIZES: &str = "0,1,7,8,9,63,64,65,4095,4096,65536,1048575,1048576";
/// The last one is the limit of the library's appenders.
const RECORD_SIZES: &str = "0,1,7,8,9,63,64,65,4095,4096,65536,1048560";

/// Two sides that start together, and whose reports have the same messages.
fn pair(letter: char, claim: &str, name: &str, commands: [&str; 2], count: u64, sizes: &str) -> Case {
    let sides = [0, 1].map(|of| side(of, name, commands[of], count, sizes, count));
    Case::new(letter, claim, sides.into())
}

/// A side with `COMMAND` or `COMMAND THEN`, which reports the last `reported` of its messages.
fn side(of: usize, name: &str, command: &str, count: u64, sizes: &str, reported: u64) -> Side {
    let messages = Messages::parse(&count.to_string(), sizes).expect("COUNT and SIZES");
    let (command, then) = command.split_once(' ').unwrap_or((command, ""));
    let report = format!("ok {command} {}", messages.tally_of_last(reported));
    let wanted = if then == "die" { Wanted::Killed(report) } else { Wanted::Report(report) };
    Side::new(of, format!("{command} {name} {count} {sizes} {then}").trim_end(), wanted)
}

fn short_cases() -> Vec<Case> {
    vec![
        pair('m', "messages", "unix:@/s", ["send", "recv"], 5, "0,1,100,70000"),
        pair('c', "calls", "unix:@/s", ["call", "serve"], 5, "0,1,100,70000"),
        pair('t', "traceparents", "unix:@/s", ["send traced", "recv traced"], 7, "0,1,100,70000"),
    ]
}

fn all_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let by_connect = ("unix:@/s", "by a socket", ['m', 'd', 'r', 't']);
    let by_path = ("path:@/channel", "by a path", ['M', 'D', 'R', 'T']);
    for (name, how, [messages, dead_sender, resumed, traced]) in [by_connect, by_path] {
        let mut add = |letter, claim, sides, count, sizes| {
            cases.push(pair(letter, &format!("{claim}, {how}"), name, sides, count, sizes));
        };
        add(messages, "messages of all sizes", ["send", "recv"], 39, SIZES);
        add(messages, "many small messages", ["send", "recv"], 10_000, "1,64,0,9");
        add(traced, "messages with traceparents", ["send traced", "recv traced"], 1000, "0,1,8,9,65536");
        add(dead_sender, "a sender is killed", ["send die", "recv died"], 9, "0,1,8,9,65536");
        for commands in [["send die", "recv close"], ["send close", "recv died"]] {
            let claim = format!("`{}` fails after `{}`, {how}", commands[1], commands[0]);
            let mut other_end = pair(dead_sender, &claim, name, commands, 3, "1,8");
            other_end.sides[1].wanted = Wanted::Refusal;
            cases.push(other_end);
        }
        // The first receiver dies with 13 of 20 messages unreleased.
        let (count, sizes, taken) = (20, "0,1,63,64,65,4096,65536", 7);
        let claim = format!("a receiver is killed, and its successor gets the rest, {how}");
        let sides = vec![
            side(0, name, "send resume", count, sizes, count),
            side(1, name, "recv die", taken, sizes, taken),
            side(1, name, "recv rest", count, sizes, count - taken).after(1),
        ];
        cases.push(Case::new(resumed, &claim, sides));
    }
    let claim = "a sender is killed before a receiver starts, by a path";
    let mut early = pair('D', claim, by_path.0, ["send die", "recv died"], 13, SIZES);
    early.sides[1].after = Some(0);
    cases.push(early);
    cases.push(pair('c', "calls of all sizes", "unix:@/s", ["call", "serve"], 39, SIZES));
    cases.push(pair('c', "many small calls", "unix:@/s", ["call", "serve"], 1000, "1,64,0,9"));
    cases.push(pair('s', "a reply in parts", "unix:@/s", ["stream", "serve-stream"], 26, SIZES));
    let mut records = pair('f', "a record file", "@/records", ["write-records", "read-records"], 24, RECORD_SIZES);
    let Wanted::Report(report) = &records.sides[1].wanted else { unreachable!("a reader is not killed") };
    let report = Wanted::Report(format!("{report} damaged 0 end"));
    records.sides[1] = Side::new(1, "read-records @/records", report).after(0);
    cases.push(records);
    cases
}

/// Whether a language has each command that the cases need: the command alone is wrong usage.
fn questions(cases: &[&Case]) -> Vec<Case> {
    let commands = cases.iter().flat_map(|case| &case.sides).map(|side| side.arguments[0].as_str());
    let ask = |command| {
        let sides = vec![Side::new(0, command, Wanted::Usage)];
        Case::new('?', &format!("the command `{command}` alone"), sides)
    };
    commands.collect::<BTreeSet<_>>().into_iter().map(ask).collect()
}

/// What each language does not have, by its driver's own statement: the reason, by the language and the feature.
type Lacks = BTreeMap<(String, String), String>;

/// One check and its result.
pub struct Check<'a> {
    case: &'a Case,
    /// Indexes of the sending and of the receiving language; the same one for a question or a vector.
    languages: [usize; 2],
    outcome: Outcome,
    seconds: f64,
}

impl Check<'_> {
    fn has_failed(&self) -> bool {
        matches!(self.outcome, Outcome::Failed(_))
    }

    fn is_unsupported(&self) -> bool {
        matches!(self.outcome, Outcome::Unsupported(_))
    }
}

/// Cases of one pair of languages, or of one language, which run one after the other.
type Job<'a> = ([usize; 2], &'a [Case]);

struct Run<'a> {
    languages: &'a [Implementation],
    lacks: Mutex<Lacks>,
    /// Ends before the directory does, which these processes may use.
    _orphans: Orphans,
    directory: TempDir,
    /// Numbers the directories of the exchanges.
    exchanges: AtomicUsize,
    signals: Signals,
}

pub fn run(args: &ConformArgs) -> Result<(), Failure> {
    let mut languages: Vec<Implementation> = Vec::new();
    if args.implementations.iter().all(|implementation| implementation.name != "rust") {
        let program = std::env::current_exe().map_err(|error| Failure::system("finding this program", error))?;
        languages.push(Implementation { name: "rust".to_owned(), program, arguments: vec!["driver".to_owned()] });
    }
    for given in &args.implementations {
        if languages.iter().any(|other| other.name == given.name) {
            return Err(Failure::Input(format!("two drivers have the name `{}`: write NAME=PROGRAM", given.name)));
        }
        languages.push(given.clone());
    }
    // Before the first file that an interrupt would leave. A second signal need not hasten the end.
    let signals = Signals::install_without_exit()?;
    let began = Instant::now();
    let run = Run {
        languages: &languages,
        lacks: Mutex::default(),
        _orphans: Orphans::adopt()?,
        directory: tempfile::Builder::new()
            .prefix("pelton-conform-")
            .tempdir()
            .map_err(|error| Failure::system("creating a temporary directory", error))?,
        exchanges: AtomicUsize::new(0),
        signals,
    };
    let (cases, vectors) = if args.short { (short_cases(), Vec::new()) } else { (all_cases(), vectors::all()) };
    let questions = questions(&cases.iter().chain(&vectors).collect::<Vec<_>>());
    let all = 0..languages.len();
    let mut checks = run.jobs(all.clone().map(|language| ([language; 2], &questions[..])).collect())?;
    for (at, language) in languages.iter().enumerate() {
        let mut answers = checks.iter().filter(|check| check.languages[0] == at);
        if answers.all(Check::is_unsupported) {
            let lacks = run.lacks.lock().expect(UNPOISONED);
            let ((_, command), reason) = lacks.iter().find(|((of, _), _)| *of == language.name).expect("these answers");
            let commands: Vec<&str> = questions.iter().map(|case| case.sides[0].arguments[0].as_str()).collect();
            let text = format!(
                "{} has none of the commands {}, so nothing is checked. It says of `{command}`: {reason}",
                language.name,
                commands.join(", ")
            );
            return Err(Failure::Peer(text));
        }
    }
    // A driver with a wrong answer would fail in every exchange.
    let has_answers = !checks.iter().any(Check::has_failed);
    if has_answers {
        let pairs = all.clone().flat_map(|from| all.clone().map(move |to| [from, to]));
        let of_each = all.clone().map(|language| ([language; 2], &vectors[..])).filter(|_| !vectors.is_empty());
        checks.extend(run.jobs(pairs.map(|pair| (pair, &cases[..])).chain(of_each).collect())?);
    }
    let lacks = run.lacks.lock().expect(UNPOISONED);
    let seconds = began.elapsed().as_secs_f64();
    let summary = table::Summary { languages: &languages, checks: &checks, lacks: &lacks, seconds };
    if has_answers {
        print(summary.markdown())?;
    }
    let write = |path: &Option<PathBuf>, text: String| match path {
        Some(path) => std::fs::write(path, text).map_err(|error| Failure::system(path.display(), error)),
        None => Ok(()),
    };
    write(&args.table, summary.markdown())?;
    write(&args.json, summary.json())?;
    match checks.iter().filter(|check| check.has_failed()).count() {
        0 => Ok(()),
        failed if has_answers => Err(Failure::Peer(format!("{failed} of {} checks failed", checks.len()))),
        failed => Err(Failure::Peer(format!("{failed} answers are wrong, so no exchange was started"))),
    }
}

impl Run<'_> {
    /// Runs jobs in parallel. Returns their checks in the order of the jobs.
    fn jobs<'a>(&self, jobs: Vec<Job<'a>>) -> Result<Vec<Check<'a>>, Failure> {
        let next = AtomicUsize::new(0);
        let done = Mutex::new(BTreeMap::new());
        let work = || -> Result<(), Failure> {
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(&job) = jobs.get(at) else { return Ok(()) };
                // After an error or a signal no further job begins.
                let checks = self.job(job).inspect_err(|_| next.store(jobs.len(), Ordering::Relaxed))?;
                done.lock().expect(UNPOISONED).insert(at, checks);
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("a job does not panic"))
        })?;
        Ok(done.into_inner().expect(UNPOISONED).into_values().flatten().collect())
    }

    /// Prints a line for the job, and one for each failed check.
    fn job<'a>(&self, (languages, cases): Job<'a>) -> Result<Vec<Check<'a>>, Failure> {
        let [from, to] = languages.map(|language| &self.languages[language].name);
        let title = match cases[0].letter {
            '?' => format!("{from} answers"),
            'v' => format!("vectors of {from}"),
            _ => format!("{from} to {to}"),
        };
        let checks = cases.iter().map(|case| self.check(case, languages)).collect::<Result<Vec<_>, _>>()?;
        let seconds: f64 = checks.iter().map(|check| check.seconds).sum();
        print_stderr(format_args!("{title}: {} ({seconds:.1} s)", table::counts(&checks)));
        for check in &checks {
            if let Outcome::Failed(problem) = &check.outcome {
                print_stderr(format_args!("FAILED: {title}, {}: {problem}", check.case.claim));
            }
        }
        Ok(checks)
    }

    /// One exchange, in a directory of its own.
    fn check<'a>(&self, case: &'a Case, languages: [usize; 2]) -> Result<Check<'a>, Failure> {
        let began = Instant::now();
        let failed = |error| Failure::system("creating a directory", error);
        let directory = self.directory.path().join(self.exchanges.fetch_add(1, Ordering::Relaxed).to_string());
        let directory = std::path::absolute(directory).map_err(failed)?;
        std::fs::create_dir(&directory).map_err(failed)?;
        case.vector.as_ref().map_or(Ok(()), |vector| vector.write(&directory))?;
        let pair = languages.map(|language| &self.languages[language]);
        // Three times the limit of a driver: a side may wait for another, which waits for a third.
        let mut outcome = exchange::run(&case.sides, pair, &self.lacks, &directory, 3 * wait_limit(), &self.signals)?;
        if outcome == Outcome::Passed {
            let problem = case.vector.as_ref().and_then(|vector| vector.problem_after(&directory));
            outcome = problem.map_or(outcome, Outcome::Failed);
        }
        // A killed child of a driver may still be ending there; then the whole directory is removed at the end.
        let _ = std::fs::remove_dir_all(&directory);
        Ok(Check { case, languages, outcome, seconds: began.elapsed().as_secs_f64() })
    }
}

/// Parses NAME=PROGRAM, or PROGRAM: then the file's name is that of the language.
fn implementation(text: &str) -> Result<Implementation, String> {
    let stem = Path::new(text).file_stem().unwrap_or_default().to_string_lossy();
    let (name, program) = text.split_once('=').unwrap_or((&stem, text));
    if name.is_empty() {
        return Err("found no name of the language: write NAME=PROGRAM".to_owned());
    }
    // A driver starts in a directory of its own.
    let program = Path::new(program).canonicalize().map_err(|error| format!("{error}: want an executable file"))?;
    Ok(Implementation { name: name.to_owned(), program, arguments: Vec::new() })
}
