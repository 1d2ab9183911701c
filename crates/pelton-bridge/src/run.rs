//! `pelton-bridge run`: many bridges in one process, as a configuration file names them.
//!
//! Each table of the file becomes the command line of one bridge, so both have the same options, defaults and errors.
//! A bridge is a thread with a runtime and a connection of its own: none waits for another. One that fails because
//! of its peers or the system is started again; one that was refused stays down until the next reload.
//!
//! SIGHUP reads the file again. Bridges whose tables are unchanged go on; the others end as by SIGTERM before new ones
//! begin, because both may have the same channel.

use crate::{
    Cli, Command, carry, on_runtime, report,
    status::{Bridges, Status},
    stop::{RELOAD, Stop},
};
use clap::{Args, CommandFactory as _, Parser as _};
use futures_util::future::join_all;
use pelton_cli::{
    descriptors,
    failure::Failure,
    notify::{self, notify},
};
use std::{
    collections::HashSet,
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
    check: bool,
}

/// One bridge of a configuration.
struct Entry {
    /// Its command line.
    words: Vec<String>,
    /// Its kind and channel, or service: the name for people.
    title: String,
    command: Command,
}

/// A bridge that was started. It may have ended.
struct Running {
    words: Vec<String>,
    title: String,
    status: Arc<Status>,
    stop: watch::Sender<i32>,
    thread: JoinHandle<Result<(), Failure>>,
}

/// Runs `pelton-bridge run`.
pub async fn run(args: &RunArgs, stop: &Stop, shown: &Bridges) -> Result<(), Failure> {
    let entries = read(&args.config)?;
    if args.check {
        return check(&entries, stop).await;
    }
    // A bridge has about 16.
    descriptors::raise_quietly();
    let mut reloads = signal(SignalKind::hangup()).map_err(|error| Failure::system("cannot catch SIGHUP", error))?;
    let (ended, mut ends) = mpsc::unbounded_channel();
    let mut bridges = Vec::new();
    start(entries, &mut bridges, &ended)?;
    show(&bridges, shown);
    notify(notify::READY);
    let mut last = Ok(());
    while !bridges.is_empty() {
        tokio::select! {
            Some(()) = ends.recv() => {}
            _ = reloads.recv() => {
                notify(&notify::reloading());
                match read(&args.config) {
                    Ok(entries) => {
                        reload(entries, &mut bridges, &ended).await?;
                        show(&bridges, shown);
                    }
                    Err(failure) => report(format_args!(
                        "reload refused, the bridges go on as before: {}",
                        failure.text().unwrap_or_default()
                    )),
                }
                notify(notify::READY);
            }
            failure = stop.requested() => {
                notify(notify::STOPPING);
                let number = if let Failure::Signal(number) = failure { number } else { 15 };
                end(bridges, number).await;
                return Err(failure);
            }
        }
        // The last failure decides how a process without bridges ends. Until then, a reload may start them again.
        if bridges.iter().all(|bridge| bridge.thread.is_finished()) {
            for done in bridges.drain(..).map(Running::result) {
                last = last.and(done);
            }
        }
    }
    last
}

impl Running {
    fn result(self) -> Result<(), Failure> {
        self.thread.join().unwrap_or_else(|_| Err(Failure::System(format!("{}: its thread panicked", self.title))))
    }
}

/// Shows the bridges in the metrics.
fn show(bridges: &[Running], shown: &Bridges) {
    let all = bridges.iter().map(|bridge| bridge.status.clone()).collect();
    *shown.lock().unwrap_or_else(PoisonError::into_inner) = all;
}

/// Starts the bridges of `entries`.
fn start(entries: Vec<Entry>, bridges: &mut Vec<Running>, ended: &mpsc::UnboundedSender<()>) -> Result<(), Failure> {
    for Entry { words, title, command } in entries {
        let (send, stop) = Stop::of_one_bridge();
        let (name, ended, status) = (title.clone(), ended.clone(), command.status());
        let shown = status.clone();
        let thread = std::thread::Builder::new()
            .name("bridge".to_owned())
            .spawn(move || {
                let done = on_runtime(keep(&name, &command, &stop, &status));
                // The main thread may have ended.
                let _ = ended.send(());
                done
            })
            .map_err(|error| Failure::system(format!("a thread for {title}"), error))?;
        bridges.push(Running { words, title, status: shown, stop: send, thread });
    }
    Ok(())
}

/// Keeps one bridge running.
async fn keep(title: &str, command: &Command, stop: &Stop, status: &Arc<Status>) -> Result<(), Failure> {
    let mut pause = PAUSES[0];
    loop {
        let began = Instant::now();
        let failure = match carry(command, stop, status).await {
            Err(failure @ (Failure::Peer(_) | Failure::TimedOut(_) | Failure::System(_))) => failure,
            Err(failure) => {
                if let Some(text) = failure.text() {
                    status.ended(format!("has ended, until the next reload: {text}"));
                    report(format_args!("{title} has ended, until the next reload: {text}"));
                }
                return Err(failure);
            }
            Ok(()) => return Ok(()),
        };
        if began.elapsed() > PAUSES[1] {
            pause = PAUSES[0];
        }
        let text = failure.text().unwrap_or_default();
        status.ended(format!("is started again: {text}"));
        report(format_args!("{title} is started again in {} s: {text}", pause.as_secs_f64()));
        stop.pause(pause).await?;
        pause = (pause * 2).min(PAUSES[1]);
    }
}

/// Ends what is not in `entries`, and starts what does not run.
async fn reload(
    mut entries: Vec<Entry>,
    bridges: &mut Vec<Running>,
    ended: &mpsc::UnboundedSender<()>,
) -> Result<(), Failure> {
    let wanted: HashSet<&Vec<String>> = entries.iter().map(|entry| &entry.words).collect();
    let (kept, old): (Vec<_>, Vec<_>) = std::mem::take(bridges)
        .into_iter()
        .partition(|bridge| wanted.contains(&bridge.words) && !bridge.thread.is_finished());
    let count = (kept.len(), old.iter().filter(|bridge| !bridge.thread.is_finished()).count());
    end(old, RELOAD).await;
    let running: HashSet<&Vec<String>> = kept.iter().map(|bridge| &bridge.words).collect();
    entries.retain(|entry| !running.contains(&entry.words));
    report(format_args!("reload: {} go on, {} have ended, {} start", count.0, count.1, entries.len()));
    *bridges = kept;
    start(entries, bridges, ended)
}

/// Ends bridges as a signal would, and waits for them.
async fn end(bridges: Vec<Running>, signal: i32) {
    for bridge in &bridges {
        bridge.stop.send_replace(signal);
    }
    let joining = tokio::task::spawn_blocking(|| bridges.into_iter().for_each(|bridge| drop(bridge.result())));
    let _ = joining.await;
}

/// Reads and checks a configuration.
fn read(path: &Path) -> Result<Vec<Entry>, Failure> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| Failure::Input(format!("reading {}: {error}", path.display())))?;
    parse(&text).map_err(|problem| Failure::Input(format!("{}: {problem}", path.display())))
}

fn parse(text: &str) -> Result<Vec<Entry>, String> {
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
        let words = words(kind, table).map_err(|problem| format!("{place}: {problem}"))?;
        let command = Cli::try_parse_from([&["pelton-bridge".to_owned()], &words[..]].concat())
            .map_err(|error| format!("{place}: {}", first_paragraph(&error.to_string())))?
            .command;
        let title = title(&command);
        if table_has_metrics {
            return Err(format!("{place}: metrics is an option of the command line"));
        }
        if !seen.insert(title.clone()) {
            return Err(format!("{place}: `{title}` is there twice"));
        }
        entries.push(Entry { words, title, command });
    }
    Ok(entries)
}

/// The command line of a table.
fn words(kind: &str, mut table: Table) -> Result<Vec<String>, String> {
    let program = Cli::command();
    let command = program.find_subcommand(kind).expect("each kind is a command");
    let mut operands = Vec::new();
    for operand in command.get_positionals() {
        let name = operand.get_id().as_str();
        match table.remove(name) {
            Some(Value::String(text)) => operands.push(text),
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
                Value::String(text) => words.push(format!("--{name}={text}")),
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
        Command::Out(args) => args.check(stop).await,
        Command::In(args) => args.check(stop).await,
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
        let problem = parse(text).err().unwrap_or_else(|| panic!("not refused: {text}"));
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
        let entries = parse(text).unwrap();
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
    fn mistakes_are_reported_with_their_place() {
        refused("", &["no bridge", "[[out]]"]);
        refused("x", &["line 1"]);
        refused("[out]\nchannel = 'a'", &["[[out]]"]);
        let out = "[[out]]\nchannel = 'a'\nsubject = 's'\nstream = 'S'\n";
        refused(&format!("colour = 'red'\n{out}"), &["colour", "before the tables"]);
        refused(&format!("{out}colour = 'red'"), &["[[out]] number 1", "--colour"]);
        refused(&format!("{out}{out}"), &["number 2", "twice"]);
        refused("[[out]]\nsubject = 's'\nstream = 'S'", &["channel is missing"]);
        refused("[[out]]\nchannel = 'a'\nsubject = 's'", &["--stream"]);
        refused(&format!("{out}[[call]]\nsubject = 's'\nname = 'n'\ntimeout = 'soon'"), &["[[call]]", "seconds"]);
        refused(&format!("{out}id = {{ a = 1 }}"), &["id is a table", "want a string"]);
    }
}
