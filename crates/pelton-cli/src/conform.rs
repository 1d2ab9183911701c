//! `pelton conform`: every ordered pair of implementations of spec/ exchanges messages, calls and files. Each is a
//! program with the command line of conformance/README.md. This module computes each report that a driver must write.
//!
//! Jobs run in parallel, as many as there are processors: the questions to one driver, the exchanges of one pair, the
//! vectors of one language. The exchanges of a job run one after the other, each in a directory of its own.

pub mod driver;
mod exchange;
mod messages;
mod table;
mod vectors;

use crate::{
    failure::{Failure, print_stderr},
    inspect::print,
    signals::Signals,
};
use exchange::{Implementation, Outcome, Side, Wanted};
use messages::Messages;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tempfile::TempDir;

#[derive(clap::Args)]
pub struct ConformArgs {
    /// Exchange messages once and calls once between each pair, instead of everything
    #[arg(long)]
    short: bool,
    /// Write every check to FILE, as one JSON object
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the table of pairs to FILE, as Markdown
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
    /// A driver: a program, with the name of its language before it or else that of its file or directory
    ///
    /// This tool is one more, `rust`, unless a driver has that name.
    #[arg(value_name = "NAME=PROGRAM", value_parser = implementation)]
    implementations: Vec<Implementation>,
}

/// How long a driver waits for each step: 10 s, or `PELTON_SECONDS`.
fn wait_limit() -> Duration {
    let seconds = std::env::var("PELTON_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(10))
}

/// A check that every pair of languages gets.
struct Case {
    /// Its letter in the table. Several cases can have the same one.
    letter: char,
    claim: String,
    sides: Vec<Side>,
}

/// Around the sizes of a word, a cache line, a page, 64 KiB and 1 MiB.
const SIZES: &str = "0,1,7,8,9,63,64,65,4095,4096,65536,1048575,1048576";
/// The last one is the limit of the library's appenders.
const RECORD_SIZES: &str = "0,1,7,8,9,63,64,65,4095,4096,65536,1048560";

/// Two sides that start together, and whose reports have the same messages.
fn pair(letter: char, claim: &str, name: &str, commands: [&str; 2], count: u64, sizes: &str) -> Case {
    let sides = [0, 1].map(|of| side(of, name, commands[of], count, sizes, count));
    Case { letter, claim: claim.to_owned(), sides: sides.into() }
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
    ]
}

fn all_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let by_connect = ("unix:@/s", "by a socket", ['m', 'd', 'r']);
    let by_path = ("path:@/channel", "by a path", ['M', 'D', 'R']);
    for (name, how, [messages, dead_sender, resumed]) in [by_connect, by_path] {
        let mut add = |letter, claim, sides, count, sizes| {
            cases.push(pair(letter, &format!("{claim}, {how}"), name, sides, count, sizes));
        };
        add(messages, "messages of all sizes", ["send", "recv"], 39, SIZES);
        add(messages, "many small messages", ["send", "recv"], 10_000, "1,64,0,9");
        add(dead_sender, "a sender is killed", ["send die", "recv died"], 9, "0,1,8,9,65536");
        // The first receiver dies with 13 of 20 messages unreleased.
        let (count, sizes, taken) = (20, "0,1,63,64,65,4096,65536", 7);
        cases.push(Case {
            letter: resumed,
            claim: format!("a receiver is killed, and its successor gets the rest, {how}"),
            sides: vec![
                side(0, name, "send resume", count, sizes, count),
                side(1, name, "recv die", taken, sizes, taken),
                side(1, name, "recv rest", count, sizes, count - taken).after(1),
            ],
        });
    }
    let mut early = pair(
        'D',
        "a sender is killed before a receiver starts, by a path",
        by_path.0,
        ["send die", "recv died"],
        13,
        SIZES,
    );
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

/// What each language does not have, by its driver's own statement: the reason, by the language and the feature.
#[derive(Default)]
pub struct Lacks(Mutex<BTreeMap<(String, String), String>>);

impl Lacks {
    fn has(&self, language: &str, feature: &str) -> bool {
        self.lock().contains_key(&(language.to_owned(), feature.to_owned()))
    }

    fn add(&self, language: &str, feature: String, reason: String) {
        self.lock().insert((language.to_owned(), feature), reason);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<(String, String), String>> {
        self.0.lock().expect("no thread panics with the lock")
    }
}

/// One check and its result.
pub struct Check {
    letter: char,
    claim: String,
    /// Indexes of the sending and of the receiving language; the same one for a question or a vector.
    languages: [usize; 2],
    outcome: Outcome,
    seconds: f64,
}

/// A part of the run. Its checks run one after the other.
enum Job {
    /// Asks a language whether it has each command.
    Ask(usize),
    Pair([usize; 2]),
    Vectors(usize),
}

struct Run<'a> {
    languages: &'a [Implementation],
    cases: Vec<Case>,
    vectors: Vec<vectors::Vector>,
    lacks: Lacks,
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
        cases: if args.short { short_cases() } else { all_cases() },
        vectors: if args.short { Vec::new() } else { vectors::all() },
        lacks: Lacks::default(),
        directory: tempfile::Builder::new()
            .prefix("pelton-conform-")
            .tempdir()
            .map_err(|error| Failure::system("creating a temporary directory", error))?,
        exchanges: AtomicUsize::new(0),
        signals,
    };
    let all = 0..languages.len();
    // The answers come first, so that no exchange starts with a language that lacks its command.
    let mut checks = run.jobs(all.clone().map(Job::Ask).collect())?;
    let mut jobs: Vec<Job> = all.clone().flat_map(|from| all.clone().map(move |to| Job::Pair([from, to]))).collect();
    if !args.short {
        jobs.extend(all.map(Job::Vectors));
    }
    checks.extend(run.jobs(jobs)?);
    let summary = table::Summary::new(&languages, &checks, &run.lacks, &run.cases, began.elapsed());
    print(summary.text())?;
    let write = |path: &Option<PathBuf>, text: String| match path {
        Some(path) => std::fs::write(path, text).map_err(|error| Failure::system(path.display(), error)),
        None => Ok(()),
    };
    write(&args.table, summary.markdown())?;
    write(&args.json, summary.json())?;
    match summary.failed() {
        0 => Ok(()),
        failed => Err(Failure::Peer(format!("{failed} of {} checks failed", checks.len()))),
    }
}

impl Run<'_> {
    /// Runs jobs in parallel. Returns their checks in the order of the jobs.
    fn jobs(&self, jobs: Vec<Job>) -> Result<Vec<Check>, Failure> {
        let next = AtomicUsize::new(0);
        let done = Mutex::new(BTreeMap::new());
        let work = || -> Result<(), Failure> {
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(job) = jobs.get(at) else { return Ok(()) };
                // After an error or a signal no further job begins.
                let checks = self.job(job).inspect_err(|_| next.store(jobs.len(), Ordering::Relaxed))?;
                done.lock().expect("no thread panics with the lock").insert(at, checks);
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("a job does not panic"))
        })?;
        Ok(done.into_inner().expect("no thread panicked with the lock").into_values().flatten().collect())
    }

    fn job(&self, job: &Job) -> Result<Vec<Check>, Failure> {
        let mut checks = Vec::new();
        match *job {
            Job::Ask(language) => {
                let sides = self.cases.iter().flat_map(|case| &case.sides);
                let sides = sides.chain(self.vectors.iter().flat_map(|vector| &vector.sides));
                let mut commands: Vec<&String> = sides.map(|side| &side.arguments[0]).collect();
                commands.sort();
                commands.dedup();
                for command in commands {
                    let sides = [Side::new(0, command, Wanted::Usage)];
                    let claim = format!("the command `{command}` alone");
                    checks.push(self.check('?', claim, [language; 2], &sides, None)?);
                }
            }
            Job::Pair(languages) => {
                for case in &self.cases {
                    checks.push(self.check(case.letter, case.claim.clone(), languages, &case.sides, None)?);
                }
            }
            Job::Vectors(language) => {
                for vector in &self.vectors {
                    let (claim, sides) = (vector.name.clone(), &vector.sides);
                    checks.push(self.check('v', claim, [language; 2], sides, Some(vector))?);
                }
            }
        }
        self.print(job, &checks);
        Ok(checks)
    }

    /// One exchange, in a directory of its own with the files of the vector, if any.
    fn check(
        &self,
        letter: char,
        claim: String,
        languages: [usize; 2],
        sides: &[Side],
        vector: Option<&vectors::Vector>,
    ) -> Result<Check, Failure> {
        let began = Instant::now();
        let failed = |error| Failure::system("creating a directory", error);
        let directory = self.directory.path().join(self.exchanges.fetch_add(1, Ordering::Relaxed).to_string());
        let directory = std::path::absolute(directory).map_err(failed)?;
        std::fs::create_dir(&directory).map_err(failed)?;
        vector.map_or(Ok(()), |vector| vector.write(&directory))?;
        let pair = languages.map(|language| &self.languages[language]);
        // Three times the limit of a driver: a side may wait for another, which waits for a third.
        let mut outcome = exchange::run(sides, pair, &self.lacks, &directory, 3 * wait_limit(), &self.signals)?;
        if outcome == Outcome::Passed {
            let problem = vector.and_then(|vector| vector.problem_after(&directory));
            outcome = problem.map_or(outcome, Outcome::Failed);
        }
        // A killed child of a driver may still be ending there; then the whole directory is removed at the end.
        let _ = std::fs::remove_dir_all(&directory);
        Ok(Check { letter, claim, languages, outcome, seconds: began.elapsed().as_secs_f64() })
    }

    /// A line for a finished job, and one for each failed check.
    fn print(&self, job: &Job, checks: &[Check]) {
        let name = |at: usize| &self.languages[at].name;
        let what = match *job {
            Job::Ask(language) => format!("{} answers", name(language)),
            Job::Pair([from, to]) => format!("{} to {}", name(from), name(to)),
            Job::Vectors(language) => format!("vectors of {}", name(language)),
        };
        let seconds: f64 = checks.iter().map(|check| check.seconds).sum();
        print_stderr(format_args!("{what}: {} ({seconds:.1} s)", table::counts(checks.iter())));
        for check in checks {
            if let Outcome::Failed(problem) = &check.outcome {
                print_stderr(format_args!("FAILED: {what}, {}: {problem}", check.claim));
            }
        }
    }
}

/// Parses NAME=PROGRAM, or PROGRAM: then its name is that of the file, or of its directory if the file is `driver`.
fn implementation(text: &str) -> Result<Implementation, String> {
    let (name, program) = match text.split_once('=') {
        Some((name, program)) => (name.to_owned(), PathBuf::from(program)),
        None => {
            let program = PathBuf::from(text);
            let directory = program.parent().and_then(Path::file_name);
            let name = program.file_stem().filter(|name| *name != "driver").or(directory);
            (name.unwrap_or_default().to_string_lossy().into_owned(), program)
        }
    };
    if name.is_empty() {
        return Err("found no name of the language: write NAME=PROGRAM".to_owned());
    }
    // A driver starts in a directory of its own.
    let program = program.canonicalize().map_err(|error| format!("{error}: want an executable file"))?;
    Ok(Implementation { name, program, arguments: Vec::new() })
}
