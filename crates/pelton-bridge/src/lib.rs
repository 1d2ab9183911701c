//! `pelton-bridge`: carries channels over NATS JetStream, without loss or duplicates, and calls over NATS.
//!
//! `outward` takes messages from a channel and publishes them; `inward` takes messages of a stream into a channel.
//! `serve` offers a local service as one of NATS, `call` one of NATS as a local one; `calls` has what both need.
//! Beside them: `wire`, what a bridge writes into a NATS message; `consumer`, how one reads a stream; `position`, the
//! file that says what of a stream is in a channel; `nats`, the connection and the stream's settings; `channel`, the
//! endpoints; `status`, metrics and health; `stop`, signals. `run` has many bridges in one process.
//!
//! A bridge is one thread, which carries messages and serves the connection: nothing is handed from thread to thread.
//! So where it waits for a channel without the runtime, it does so in slices, between which the connection has its
//! turn.
//!
//! It is a library so that `examples/manual.rs` has the command line's definition. It is no interface for other
//! programs.

mod call;
mod calls;
mod channel;
mod consumer;
mod inward;
mod nats;
mod outward;
mod position;
mod run;
mod serve;
mod status;
mod stop;
mod wire;

use clap::{CommandFactory as _, Parser, Subcommand};
use pelton_cli::failure::{self, Failure};
use status::{Bridges, Status};
use std::{
    fmt::Display,
    io::Write as _,
    net::SocketAddr,
    process::ExitCode,
    sync::{Arc, PoisonError},
};

/// The exit codes in `--help`: those of `pelton`.
const EXIT_CODES: &str = "\
Exit codes:
    0  done: out --once, everything is stored
    1  out --once: the sender died
    2  usage or bad input
    3  refused: the stream's settings, another bridge or publisher, the position
    4  timed out: no server accepts the connection
    5  the system failed, or the stream has lost messages
  130  interrupted (SIGINT): nothing is lost, the next bridge continues
  143  terminated (SIGTERM): as for SIGINT";

/// Carries pelton's channels to other machines over NATS JetStream
#[derive(Parser)]
#[command(name = "pelton-bridge", version, after_help = EXIT_CODES, max_term_width = 100)]
struct Cli {
    /// Serve metrics at http://ADDRESS/metrics, and whether everything is carried at /health; port 0: a free one
    #[arg(long, value_name = "ADDRESS", global = true)]
    metrics: Option<SocketAddr>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Take messages from a channel and publish them into a stream
    #[command(after_help = EXIT_CODES)]
    Out(outward::OutArgs),
    /// Take the messages of a stream into a channel
    #[command(after_help = EXIT_CODES)]
    In(inward::InArgs),
    /// Offer a local service to other machines, as a service of NATS
    #[command(after_help = EXIT_CODES)]
    Serve(serve::ServeArgs),
    /// Offer a service of NATS to local clients, as a local service
    #[command(after_help = EXIT_CODES)]
    Call(call::CallArgs),
    /// Run many bridges in one process, as a configuration file names them
    #[command(after_help = EXIT_CODES)]
    Run(run::RunArgs),
}

/// Prints a line on standard error.
fn report(text: impl Display) {
    // One write, because two bridges may share a terminal.
    let line = format!("pelton-bridge: {}\n", failure::printable(&text.to_string()));
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// For the crash test, and only in debug builds: ends this process as abruptly as `kill -9` when it passes `name` for
/// the N-th time, if PELTON_BRIDGE_DIE_AT is NAME:N. Random kills do not meet steps of a microsecond.
fn failpoint(name: &str) {
    #[cfg(debug_assertions)]
    {
        use std::sync::{
            LazyLock,
            atomic::{AtomicU64, Ordering::Relaxed},
        };
        static WANTED: LazyLock<Option<(String, u64)>> = LazyLock::new(|| {
            let text = std::env::var("PELTON_BRIDGE_DIE_AT").ok()?;
            let (name, number) = text.split_once(':')?;
            Some((name.to_owned(), number.parse().ok()?))
        });
        // Relaxed: one thread passes each failpoint.
        static PASSED: AtomicU64 = AtomicU64::new(0);
        if let Some((wanted, number)) = &*WANTED
            && wanted == name
            && PASSED.fetch_add(1, Relaxed) + 1 == *number
        {
            std::process::abort();
        }
    }
    #[cfg(not(debug_assertions))]
    let _ = name;
}

/// The definition of the command line.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Does what the process's arguments say.
pub fn run() -> ExitCode {
    failure::exit("pelton-bridge", execute(&Cli::parse()))
}

fn execute(cli: &Cli) -> Result<(), Failure> {
    let bridges = Bridges::default();
    let is_check = matches!(&cli.command, Command::Run(args) if args.check);
    if let Some(address) = cli.metrics.filter(|_| !is_check) {
        status::serve(address, bridges.clone())?;
    }
    on_runtime(async {
        let stop = stop::Stop::install()?;
        match &cli.command {
            Command::Run(args) => run::run(args, &stop, &bridges).await,
            one => {
                let status = one.status();
                bridges.lock().unwrap_or_else(PoisonError::into_inner).push(status.clone());
                carry(one, &stop, &status).await
            }
        }
    })
}

impl Command {
    /// Checks the options, as far as nothing else is needed.
    fn validate(&self) -> Result<(), Failure> {
        match self {
            Command::Out(args) => args.validate(),
            Command::In(args) => args.validate(),
            Command::Serve(args) => {
                checked_name(&args.service)?;
                args.servers.validate()
            }
            Command::Call(args) => args.validate(),
            Command::Run(_) => Ok(()),
        }
    }

    /// A status for it.
    fn status(&self) -> Arc<Status> {
        match self {
            Command::Out(args) => Status::new("out", channel::whole_name(&args.channel)),
            Command::In(args) => Status::new("in", channel::whole_name(&args.channel)),
            Command::Serve(args) => Status::new("serve", format!("{} as {}", args.service, args.subject)),
            Command::Call(args) => Status::new("call", args.name.clone()),
            Command::Run(_) => Status::new("run", String::new()),
        }
    }
}

/// Checks a name by connect.
fn checked_name(name: &str) -> Result<(), Failure> {
    match name.strip_prefix("unix:") {
        Some("") => Err(Failure::Input(format!("{name:?} names no socket: write unix:PATH"))),
        None if name.contains([':', '/']) || name.is_empty() => Err(Failure::Input(format!(
            "{name:?} is no name: write unix:PATH, or a short name without a colon or slash"
        ))),
        _ => Ok(()),
    }
}

/// Runs one bridge until it ends.
async fn carry(command: &Command, stop: &stop::Stop, status: &Arc<Status>) -> Result<(), Failure> {
    command.validate()?;
    match command {
        Command::Out(args) => outward::run(args, stop, status).await,
        Command::In(args) => inward::run(args, stop, status).await,
        Command::Serve(args) => serve::run(args, stop, status).await,
        Command::Call(args) => call::run(args, stop, status).await,
        Command::Run(_) => Err(Failure::Input("a bridge of a configuration cannot be `run`".to_owned())),
    }
}

/// Runs `work` in this thread.
fn on_runtime(work: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::system("starting the runtime", error))?;
    let done = runtime.block_on(work);
    // Requests that nobody awaits any more.
    runtime.shutdown_background();
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_of_the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
