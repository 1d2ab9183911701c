//! `pelton-bridge run`: many bridges in one process, as a configuration file names them.
//!
//! Each table of the file becomes the command line of one bridge, so both have the same options, defaults and errors.
//! A bridge is a thread with a runtime and a connection of its own: none waits for another. One that fails because
//! of its peers or the system is started again; one that was refused stays down until the next reload.
//!
//! SIGHUP reads the file again. Bridges whose tables are unchanged go on; the others end as by SIGTERM before new ones
//! begin, because both may have the same channel.

use crate::{
    Cli, Command, carry, channel, on_runtime, report,
    status::{Bridges, Status},
    stop::{RELOAD, RELOAD_ELSEWHERE, Stop},
};
use clap::{Arg, Args, CommandFactory as _, Parser as _};
use futures_util::future::join_all;
use pelton_cli::{
    descriptors,
    failure::Failure,
    notify::{self, notify},
};
use std::{
    any::TypeId,
    collections::HashSet,
    io,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant},
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
};
use toml::{Table, Value};

/// The tables of a configuration.
const KINDS: [&str; 4] = ["out", "in", "serve", "call"];
/// The pauses before a bridge that has failed is started again: they double up to the second one.
const PAUSES: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(30)];

/// Options of `pelton-bridge run`.
#[derive(Args)]
pub struct RunArgs {
    /// The configuration: tables [[out]], [[in]], [[serve]] and [[call]] with the names of the command-line options
    config: PathBuf,
    /// Check the file and, where a server is reachable, the streams; carry nothing
    #[arg(long)]
    pub check: bool,
}

/// One bridge of a configuration.
struct Entry {
    /// Its command line.
    words: Vec<String>,
    /// Its kind and channel, or service: the name for people.
    title: String,
    /// What only one bridge can have.
    role: String,
    command: Command,
}

/// A bridge of the present configuration, or one that ends because it is not there any more.
struct Bridge {
    number: u64,
    entry: Arc<Entry>,
    status: Arc<Status>,
    state: State,
}

enum State {
    /// For its predecessor's end, or for a thread.
    Waits,
    Runs(Thread),
    /// After a reload.
    Ends(Thread),
    Ended(Result<(), Failure>),
}

struct Thread {
    stop: watch::Sender<i32>,
    handle: JoinHandle<()>,
}

/// Notifies the main thread of a bridge's end, also if its thread panics.
struct Notice {
    number: u64,
    status: Arc<Status>,
    done: Option<Result<(), Failure>>,
    ended: mpsc::UnboundedSender<(u64, Result<(), Failure>)>,
}

impl Drop for Notice {
    fn drop(&mut self) {
        let done = self.done.take().unwrap_or_else(|| {
            self.status.ended("has ended: its thread panicked".to_owned());
            Err(Failure::System("the thread of a bridge panicked".to_owned()))
        });
        // The main thread may have ended.
        let _ = self.ended.send((self.number, done));
    }
}

/// All bridges of the process.
struct All {
    bridges: Vec<Bridge>,
    next_number: u64,
    ended: mpsc::UnboundedSender<(u64, Result<(), Failure>)>,
    shown: Bridges,
    /// What a reload that goes on has to report.
    reloading: Option<String>,
}

/// Runs `pelton-bridge run`.
pub async fn run(args: &RunArgs, stop: &Stop, shown: &Bridges) -> Result<(), Failure> {
    let entries = read(&args.config)?;
    // A bridge has about 16.
    descriptors::raise_quietly();
    if args.check {
        return check(&entries, stop).await;
    }
    let mut reloads = signal(SignalKind::hangup()).map_err(|error| Failure::system("cannot catch SIGHUP", error))?;
    let (ended, mut ends) = mpsc::unbounded_channel();
    let mut all = All { bridges: Vec::new(), next_number: 0, ended, shown: shown.clone(), reloading: None };
    all.add(entries);
    all.start();
    notify(notify::READY);
    let failure = loop {
        tokio::select! {
            Some((number, done)) = ends.recv() => all.note_end(number, done),
            () = tokio::time::sleep(PAUSES[0]), if all.has_waiting() => {}
            _ = reloads.recv() => {
                notify(&notify::reloading());
                match read(&args.config) {
                    Ok(entries) => all.reload(entries),
                    Err(failure) => {
                        report(format_args!(
                            "reload refused, the bridges go on as before: {}",
                            failure.text().unwrap_or_default()
                        ));
                        notify(notify::READY);
                    }
                }
            }
            failure = stop.requested() => break failure,
        }
        all.start();
        // The first failure decides how a process without bridges ends. Until then, a reload may start them again.
        if let Some(done) = all.result() {
            return done;
        }
    };
    notify(notify::STOPPING);
    all.stop(if let Failure::Signal(number) = failure { number } else { 15 });
    while all.has_threads()
        && let Some((number, done)) = ends.recv().await
    {
        all.note_end(number, done);
    }
    Err(failure)
}

impl All {
    fn add(&mut self, entries: impl IntoIterator<Item = Entry>) {
        for entry in entries {
            let status = entry.command.status();
            self.bridges.push(Bridge { number: self.next_number, entry: Arc::new(entry), status, state: State::Waits });
            self.next_number += 1;
        }
        // In the metrics.
        let statuses = self.bridges.iter().filter(|bridge| !matches!(bridge.state, State::Ends(_)));
        let statuses = statuses.map(|bridge| bridge.status.clone()).collect();
        *self.shown.lock().unwrap_or_else(PoisonError::into_inner) = statuses;
    }

    /// Starts the bridges that wait, except those whose predecessors have not ended.
    fn start(&mut self) {
        let ending: HashSet<String> = self
            .bridges
            .iter()
            .filter(|bridge| matches!(bridge.state, State::Ends(_)))
            .map(|bridge| bridge.entry.role.clone())
            .collect();
        for bridge in self.bridges.iter_mut().filter(|bridge| matches!(bridge.state, State::Waits)) {
            if ending.contains(&bridge.entry.role) {
                continue;
            }
            match bridge.spawn(&self.ended) {
                Ok(thread) => bridge.state = State::Runs(thread),
                Err(error) => {
                    let text = format!("waits for a thread: {error}");
                    if bridge.status.ended(text.clone()) {
                        report(format_args!("{} {text}", bridge.entry.title));
                    }
                }
            }
        }
        if ending.is_empty()
            && let Some(text) = self.reloading.take()
        {
            report(text);
            notify(notify::READY);
        }
    }

    fn note_end(&mut self, number: u64, done: Result<(), Failure>) {
        let Some(at) = self.bridges.iter().position(|bridge| bridge.number == number) else { return };
        let thread = match std::mem::replace(&mut self.bridges[at].state, State::Ended(done)) {
            State::Ends(thread) => {
                self.bridges.remove(at);
                thread
            }
            State::Runs(thread) => thread,
            other => {
                self.bridges[at].state = other;
                return;
            }
        };
        // It has nothing more to do. A panic is in the result.
        let _ = thread.handle.join();
    }

    /// Ends what is not in `entries`, and adds what does not run.
    fn reload(&mut self, mut entries: Vec<Entry>) {
        let is_wanted = |bridge: &Bridge| entries.iter().any(|entry| entry.words == bridge.entry.words);
        let has_successor = |bridge: &Bridge| match &bridge.entry.command {
            Command::Out(old) => entries.iter().any(|entry| {
                entry.role == bridge.entry.role && matches!(&entry.command, Command::Out(new) if new.succeeds(old))
            }),
            _ => true,
        };
        let mut ends = 0;
        for bridge in &mut self.bridges {
            bridge.state = match std::mem::replace(&mut bridge.state, State::Waits) {
                State::Runs(thread) if !is_wanted(bridge) => {
                    thread.stop.send_replace(if has_successor(bridge) { RELOAD } else { RELOAD_ELSEWHERE });
                    ends += 1;
                    State::Ends(thread)
                }
                State::Ended(_) => State::Waits,
                other => other,
            };
        }
        self.bridges.retain(|bridge| !matches!(bridge.state, State::Waits));
        let is_running = |bridge: &&Bridge| matches!(bridge.state, State::Runs(_));
        let running: HashSet<&Vec<String>> =
            self.bridges.iter().filter(is_running).map(|bridge| &bridge.entry.words).collect();
        entries.retain(|entry| !running.contains(&entry.words));
        let text = format!("reload: {} go on, {ends} have ended, {} start", running.len(), entries.len());
        self.reloading = Some(text);
        self.add(entries);
    }

    /// Ends all bridges as a signal would.
    fn stop(&self, signal: i32) {
        for bridge in &self.bridges {
            if let State::Runs(thread) | State::Ends(thread) = &bridge.state {
                thread.stop.send_replace(signal);
            }
        }
    }

    fn has_waiting(&self) -> bool {
        self.bridges.iter().any(|bridge| matches!(bridge.state, State::Waits))
    }

    fn has_threads(&self) -> bool {
        self.bridges.iter().any(|bridge| matches!(bridge.state, State::Runs(_) | State::Ends(_)))
    }

    /// The first failure, once all bridges have ended.
    fn result(&mut self) -> Option<Result<(), Failure>> {
        if self.has_waiting() || self.has_threads() {
            return None;
        }
        self.bridges
            .drain(..)
            .try_for_each(|bridge| if let State::Ended(done) = bridge.state { done } else { Ok(()) })
            .into()
    }
}

impl Bridge {
    fn spawn(&self, ended: &mpsc::UnboundedSender<(u64, Result<(), Failure>)>) -> io::Result<Thread> {
        let (send, stop) = Stop::of_one_bridge();
        let (entry, status) = (self.entry.clone(), self.status.clone());
        let (number, ended) = (self.number, ended.clone());
        let handle = std::thread::Builder::new().name("bridge".to_owned()).spawn(move || {
            let mut notice = Notice { number, status: status.clone(), done: None, ended };
            notice.done = Some(keep(&entry, &stop, &status));
        })?;
        Ok(Thread { stop: send, handle })
    }
}

/// Keeps one bridge running.
fn keep(entry: &Entry, stop: &Stop, status: &Arc<Status>) -> Result<(), Failure> {
    let title = &entry.title;
    let mut pause = PAUSES[0];
    loop {
        let began = Instant::now();
        let failure = match on_runtime(carry(&entry.command, stop, status)) {
            Err(failure @ (Failure::Peer(_) | Failure::TimedOut(_) | Failure::System(_))) => failure,
            Err(failure) => {
                if let Some(text) = failure.text() {
                    let text = format!("has ended, until the next reload: {text}");
                    report(format_args!("{title} {text}"));
                    status.ended(text);
                }
                return Err(failure);
            }
            Ok(()) => {
                status.ended("has ended: everything is carried".to_owned());
                return Ok(());
            }
        };
        if began.elapsed() > PAUSES[1] {
            pause = PAUSES[0];
        }
        let text = failure.text().unwrap_or_default();
        status.ended(format!("is started again: {text}"));
        report(format_args!("{title} is started again in {} s: {text}", pause.as_secs_f64()));
        stop.sleep(pause)?;
        pause = (pause * 2).min(PAUSES[1]);
    }
}

/// Reads and checks a configuration.
fn read(path: &Path) -> Result<Vec<Entry>, Failure> {
    let failed = |error: io::Error| Failure::Input(format!("reading {}: {error}", path.display()));
    let text = std::fs::read_to_string(path).map_err(failed)?;
    let whole = std::path::absolute(path).map_err(failed)?;
    let folder = whole.parent().unwrap_or(Path::new("/"));
    parse(&text, folder).map_err(|problem| Failure::Input(format!("{}: {problem}", path.display())))
}

/// Relative paths in it begin at `folder`.
fn parse(text: &str, folder: &Path) -> Result<Vec<Entry>, String> {
    let mut defaults: Table = text.parse().map_err(|error: toml::de::Error| error.to_string().trim_end().to_owned())?;
    let mut tables = Vec::new();
    for kind in KINDS {
        match defaults.remove(kind) {
            None => {}
            Some(Value::Array(array)) if array.iter().all(Value::is_table) => {
                let of_kind = array.into_iter().enumerate().filter_map(|(at, value)| match value {
                    Value::Table(table) => Some((kind, at + 1, table)),
                    _ => None,
                });
                tables.extend(of_kind);
            }
            Some(_) => return Err(format!("{kind} is no list of tables: begin each bridge by a line [[{kind}]]")),
        }
    }
    if tables.is_empty() {
        return Err("it has no bridge: begin each one by a line [[out]], [[in]], [[serve]] or [[call]]".to_owned());
    }
    let program = Cli::command();
    let has_option = |kind: &str, name: &str| {
        let command = program.find_subcommand(kind).expect("each kind is a command");
        command.get_arguments().any(|argument| argument.get_long() == Some(name))
    };
    if let Some(name) = defaults.keys().find(|name| !KINDS.iter().any(|kind| has_option(kind, name))) {
        return Err(format!("no bridge has the option {name}, which is before the tables"));
    }
    let mut seen = HashSet::new();
    let mut entries = Vec::new();
    for (kind, number, mut table) in tables {
        let place = format!("[[{kind}]] number {number}");
        for (name, value) in defaults.iter().filter(|(name, _)| has_option(kind, name)) {
            if !table.contains_key(name) {
                table.insert(name.clone(), value.clone());
            }
        }
        let table_has_metrics = table.contains_key("metrics");
        let words = words(kind, table, folder).map_err(|problem| format!("{place}: {problem}"))?;
        let command = Cli::try_parse_from([&["pelton-bridge".to_owned()], &words[..]].concat())
            .map_err(|error| format!("{place}: {}", first_paragraph(&error.to_string())))?
            .command;
        let (title, role) = (title(&command), role(&command));
        if table_has_metrics {
            return Err(format!("{place}: metrics is an option of the command line"));
        }
        if let Err(failure) = command.validate() {
            return Err(format!("{place}: {}", failure.text().unwrap_or_default()));
        }
        if !seen.insert(role.clone()) {
            return Err(format!("{place}: `{title}` is there twice"));
        }
        entries.push(Entry { words, title, role, command });
    }
    Ok(entries)
}

/// A path, or a name with one, begins at `folder`.
fn in_folder(argument: Option<&Arg>, text: String, folder: &Path) -> String {
    let whole = |path: &str| folder.join(path).display().to_string();
    let Some(argument) = argument else { return text };
    if argument.get_value_parser().type_id() == TypeId::of::<PathBuf>() {
        return whole(&text);
    }
    let is_name = ["channel", "service", "name", "prefer_local"].contains(&argument.get_id().as_str());
    match text.split_once(':') {
        Some((kind @ ("path" | "unix"), path)) if is_name && !path.is_empty() => format!("{kind}:{}", whole(path)),
        _ => text,
    }
}

/// The command line of a table.
fn words(kind: &str, mut table: Table, folder: &Path) -> Result<Vec<String>, String> {
    let program = Cli::command();
    let command = program.find_subcommand(kind).expect("each kind is a command");
    let option = |name: &str| command.get_arguments().find(|argument| argument.get_long() == Some(name));
    let mut operands = Vec::new();
    for operand in command.get_positionals() {
        let name = operand.get_id().as_str();
        match table.remove(name) {
            Some(Value::String(text)) => operands.push(in_folder(Some(operand), text, folder)),
            Some(value) => return Err(format!("{name} is a {}: want a string", value.type_str())),
            None => return Err(format!("{name} is missing")),
        }
    }
    let mut words = vec![kind.to_owned()];
    for (name, value) in table {
        let several = match value {
            Value::Array(several) => several,
            one => vec![one],
        };
        for value in several {
            match value {
                Value::Boolean(false) => {}
                Value::Boolean(true) => words.push(format!("--{name}")),
                Value::String(text) => words.push(format!("--{name}={}", in_folder(option(&name), text, folder))),
                Value::Integer(number) => words.push(format!("--{name}={number}")),
                Value::Float(number) => words.push(format!("--{name}={number}")),
                _ => return Err(format!("{name} is a {}: want a string, a number or a boolean", value.type_str())),
            }
        }
    }
    words.push("--".to_owned());
    words.append(&mut operands);
    Ok(words)
}

/// What a bridge is called in reports.
fn title(command: &Command) -> String {
    match command {
        Command::Out(args) => format!("out {}", args.channel),
        Command::In(args) => format!("in {}", args.channel),
        Command::Serve(args) => format!("serve {} as {}", args.service, args.subject),
        Command::Call(args) => format!("call {}", args.name),
        Command::Run(_) => "run".to_owned(),
    }
}

/// Its kind and channel, or service, the same in all spellings.
fn role(command: &Command) -> String {
    match command {
        Command::Out(args) => format!("out {}", channel::whole_name(&args.channel)),
        Command::In(args) => format!("in {}", channel::whole_name(&args.channel)),
        other => title(other),
    }
}

/// Of an error of the command line, without the usage.
fn first_paragraph(text: &str) -> String {
    let text = text.strip_prefix("error: ").unwrap_or(text);
    let lines = text.lines().take_while(|line| !line.starts_with("Usage:")).map(str::trim);
    lines.filter(|line| !line.is_empty() && !line.starts_with("tip:")).collect::<Vec<_>>().join(" ")
}

/// Checks the bridges against their servers. A server that is not reachable is no failure.
async fn check(entries: &[Entry], stop: &Stop) -> Result<(), Failure> {
    let results = join_all(entries.iter().map(|entry| check_one(&entry.command, stop))).await;
    let mut first = Ok(());
    for (entry, result) in entries.iter().zip(results) {
        let text = match &result {
            Ok(()) => "can run".to_owned(),
            Err(Failure::Signal(number)) => return Err(Failure::Signal(*number)),
            Err(failure @ Failure::TimedOut(_)) => {
                format!("the server was not checked: {}", failure.text().unwrap_or_default())
            }
            Err(failure) => failure.text().unwrap_or_default(),
        };
        report(format_args!("{}: {text}", entry.title));
        if !matches!(result, Err(Failure::TimedOut(_))) {
            first = first.and(result);
        }
    }
    first
}

async fn check_one(command: &Command, stop: &Stop) -> Result<(), Failure> {
    match command {
        Command::Out(args) => args.check(stop, &command.status()).await,
        Command::In(args) => args.check(stop, &command.status()).await,
        Command::Serve(args) => args.servers.connect(stop).await.map(drop),
        Command::Call(args) => args.servers.connect(stop).await.map(drop),
        Command::Run(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn refused(text: &str, words: &[&str]) {
        let problem = parse(text, Path::new("/etc")).err().unwrap_or_else(|| panic!("not refused: {text}"));
        for word in words {
            assert!(problem.contains(word), "{word:?} is not in: {problem}");
        }
    }

    #[test]
    fn a_table_is_a_command_line_and_options_before_the_tables_are_defaults() {
        let text = r#"
            stream = "S"
            nats = ["nats://a:4222", "nats://b:4222"]
            [[out]]
            channel = "path:/x"
            subject = "s.a"
            packed = true
            require-replicas = 3
            [[in]]
            subject = "s.>"
            channel = "path:/y"
            stream = "T"
            create = false
            [[call]]
            subject = "svc.a"
            name = "a"
            timeout = 0.5
        "#;
        let entries = parse(text, Path::new("/etc")).unwrap();
        let lines: Vec<String> = entries.iter().map(|entry| entry.words.join(" ")).collect();
        let servers = "--nats=nats://a:4222 --nats=nats://b:4222";
        assert_eq!(
            lines,
            [
                format!("out {servers} --packed --require-replicas=3 --stream=S --subject=s.a -- path:/x"),
                format!("in {servers} --stream=T -- s.> path:/y"),
                format!("call {servers} --timeout=0.5 -- svc.a a"),
            ]
        );
        assert_eq!(entries[0].title, "out path:/x");
    }

    #[test]
    fn relative_paths_begin_at_the_folder_of_the_file() {
        let text = r#"
            creds = "nats.creds"
            [[out]]
            channel = "path:a"
            subject = "path:x"
            stream = "S"
            id = "path:y"
            [[in]]
            subject = "s"
            channel = "unix:../b"
            stream = "S"
            position = "b.position"
            creds = "/run/nats.creds"
            [[call]]
            subject = "s"
            name = "short"
            prefer-local = "unix:here"
        "#;
        let entries = parse(text, Path::new("/etc/app")).unwrap();
        let lines: Vec<String> = entries.iter().map(|entry| entry.words.join(" ")).collect();
        assert_eq!(
            lines,
            [
                "out --creds=/etc/app/nats.creds --id=path:y --stream=S --subject=path:x -- path:/etc/app/a",
                "in --creds=/run/nats.creds --position=/etc/app/b.position --stream=S -- s unix:/etc/app/../b",
                "call --creds=/etc/app/nats.creds --prefer-local=unix:/etc/app/here -- s short",
            ]
        );
    }

    #[test]
    fn mistakes_are_reported_with_their_place() {
        refused("", &["no bridge", "[[out]]"]);
        refused("x", &["line 1"]);
        refused("[out]\nchannel = 'a'", &["[[out]]"]);
        let out = "[[out]]\nchannel = 'a'\nsubject = 's'\nstream = 'S'\n";
        refused(&format!("colour = 'red'\n{out}"), &["colour", "before the tables"]);
        refused(&format!("{out}colour = 'red'"), &["[[out]] number 1", "--colour"]);
        refused(&format!("{out}{out}"), &["number 2", "twice"]);
        refused(&out.replace("'a'", "'tcp:x'"), &["[[out]] number 1", "tcp:x", "unix:PATH"]);
        refused(&out.replace("'a'", "'path:'"), &["path:DIR"]);
        refused(&format!("{out}id = ''"), &["ASCII"]);
        refused(&format!("nats = 'nats://a:b@c'\n{out}"), &["ps", "--user-file"]);
        refused("[[in]]\nsubject = 's'\nchannel = 'a'\nstream = 'S'", &["[[in]] number 1", "--position"]);
        refused("[[call]]\nsubject = 's'\nname = 'n'\nprefer-local = 'n'", &["call itself"]);
        // In two spellings.
        let path = |path: &str| out.replace("'a'", &format!("'path:{path}'"));
        refused(&[path("/x/y"), path("/x/./y/")].concat(), &["number 2", "twice"]);
        refused("[[out]]\nsubject = 's'\nstream = 'S'", &["channel is missing"]);
        refused("[[out]]\nchannel = 'a'\nsubject = 's'", &["--stream"]);
        refused(&format!("{out}[[call]]\nsubject = 's'\nname = 'n'\ntimeout = 'soon'"), &["[[call]]", "seconds"]);
        refused(&format!("{out}id = {{ a = 1 }}"), &["id is a table", "want a string"]);
    }
}
