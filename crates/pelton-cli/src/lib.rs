//! `pelton`, the command-line tool: the definition of its command line.
//!
//! `commands` has a file for each command. Beside it: `channel`, the options and the opening of `send`, `recv` and
//! `flush`; `observed`, the channels that `ls`, `stat`, `top` and `doctor` show; `frame`, messages in a stream;
//! `output`, standard output; `report`, the object of `--json`; `process`, a command that runs beside an event loop;
//! `notify`, messages to systemd; `openmetrics`, the format of metrics and their server; `failure`, why a command
//! failed; `exit_codes`, their table; `signals`, `progress`, `descriptors`.
//!
//! It is a library so that `examples/manual.rs` has the command line's definition, and so that the demo and the crash
//! test share the public modules. It is no interface for other programs.

mod channel;
mod commands;
pub mod descriptors;
mod exit_codes;
pub mod failure;
pub mod frame;
pub mod notify;
mod observed;
pub mod openmetrics;
pub mod output;
mod process;
pub mod progress;
mod report;
pub mod signals;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use commands::{
    bridge, call, cat, conform, cp, doctor, flush, info, ls, metrics, ping, publish, record, recover, recv, replay, rm,
    run, send, serve, stat, subscribe, tail, top,
};
use std::{process::ExitCode, time::Duration};

/// Messages at memory speed between the processes of one machine
#[derive(Parser)]
#[command(name = "pelton", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Read standard input and send each frame of it as a message
    Send(send::SendArgs),
    /// Receive messages and write each as a frame to standard output
    Recv(recv::RecvArgs),
    /// Publish each frame of standard input as a message to every subscriber
    Pub(publish::PubArgs),
    /// Subscribe to a publisher, and write each message as a frame to standard output
    Sub(subscribe::SubArgs),
    /// Receive messages and write each to a record file once, also after a kill and a restart
    Flush(flush::FlushArgs),
    /// Receive messages and write each to a record file, with the time at which it arrived
    Record(record::RecordArgs),
    /// Send the messages of record files at the recorded pace, or at another
    Replay(replay::ReplayArgs),
    /// Write the messages of record files to standard output, or check them
    Cat(cat::CatArgs),
    /// Copy a file, in the kernel if possible; the copy gets its name once complete
    Cp(cp::CpArgs),
    /// Call a service, and write its reply to standard output
    Call(call::CallArgs),
    /// Answer calls by a command: a process per call, or one co-process
    Serve(serve::ServeArgs),
    /// Keep a service running, in any language: start it, start it again after its end, replace it on SIGHUP
    Run(run::RunArgs),
    /// Call a service repeatedly, and measure the round trips
    Ping(ping::PingArgs),
    /// Print the messages of a channel as they pass, without being its receiver; changes nothing
    ///
    /// Each line has the time of reading in UTC, LANE:NUMBER, and the message. A message without a mark is whole. A `?`
    /// behind the number says that this is not proven: the receiver had released the message before it was copied. The
    /// sender had sent nothing since, so it is whole, unless the sender was just then writing the next message there.
    /// `N missed` counts messages that may have been overwritten before they were copied: raise --load to miss fewer.
    Tail(tail::TailArgs),
    /// List all channels and services: their processes, and what waits in them; changes nothing
    Ls(ls::LsArgs),
    /// Show one channel in full, with its rates; changes nothing
    #[command(long_about = stat::ABOUT)]
    Stat(stat::StatArgs),
    /// Show all channels live: rates, backlogs, states; F1 shows the keys; changes nothing
    Top(top::TopArgs),
    /// Print the numbers of all channels for Prometheus and OpenMetrics, or serve them; changes nothing
    Metrics(metrics::MetricsArgs),
    /// Check what this machine and user can do; with --channel, say what is wrong with a channel
    Doctor(doctor::DoctorArgs),
    /// Show which processes use a channel and which messages wait in it; changes nothing
    Info(info::InfoArgs),
    /// Check a channel in a directory that no process uses; with --repair, repair it
    Recover(recover::RecoverArgs),
    /// Remove a channel in a directory that no process uses, with the messages in it
    Rm(rm::RmArgs),
    /// Check that programs in other languages exchange messages, calls and files with each other and with this one
    Conform(conform::ConformArgs),
    /// Carry a channel to other machines over NATS JetStream: executes pelton-bridge, a package of its own
    #[command(disable_help_flag = true)]
    Bridge(bridge::BridgeArgs),
    /// The conformance driver of Rust
    #[command(hide = true)]
    Driver(conform::driver::DriverArgs),
}

/// A time in seconds, with or without a fraction.
fn seconds(text: &str) -> Result<Duration, String> {
    let expected = "want seconds, such as 10 or 0.5";
    let number: f64 = text.parse().map_err(|_| expected.to_string())?;
    Duration::try_from_secs_f64(number).map_err(|error| format!("{error}: {expected}"))
}

/// A number of bytes, plain or with K, M or G (powers of 1024).
fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        _ => return Err("want a number of bytes, such as 65536, 64K, 64M or 1G".to_string()),
    };
    let number: u64 =
        digits.parse().map_err(|error| format!("{error}: want a number of bytes, such as 65536, 64K, 64M or 1G"))?;
    number.checked_mul(1 << shift).ok_or_else(|| "more bytes than 64 bits can count".to_string())
}

/// The definition of the command line. The help of each command ends with the exit codes that it has.
pub fn command() -> clap::Command {
    let mut command = Cli::command().after_help(exit_codes::all());
    let names: Vec<String> = command.get_subcommands().map(|command| command.get_name().to_owned()).collect();
    for name in names {
        command = command.mut_subcommand(&name, |command| command.after_help(exit_codes::of(&name)));
    }
    command
}

/// Does what the process's arguments say.
pub fn run() -> ExitCode {
    let cli = Cli::from_arg_matches(&command().get_matches()).unwrap_or_else(|error| error.exit());
    let done = match cli.command {
        Command::Send(args) => send::run(&args),
        Command::Recv(args) => recv::run(&args),
        Command::Pub(args) => publish::run(&args),
        Command::Sub(args) => subscribe::run(&args),
        Command::Flush(args) => flush::run(&args),
        Command::Record(args) => record::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Cat(args) => cat::run(&args),
        Command::Cp(args) => cp::run(&args),
        Command::Call(args) => call::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Ping(args) => ping::run(&args),
        Command::Tail(args) => tail::run(&args),
        Command::Ls(args) => ls::run(&args),
        Command::Stat(args) => stat::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Metrics(args) => metrics::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Info(args) => info::run(&args),
        Command::Recover(args) => recover::run(&args),
        Command::Rm(args) => rm::run(&args),
        Command::Conform(args) => conform::run(&args),
        Command::Bridge(args) => bridge::run(&args),
        Command::Driver(args) => return conform::driver::run(&args),
    };
    failure::exit("pelton", done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_of_the_command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn each_command_has_json_or_prints_nothing_of_its_own() {
        // `run` and `bridge` execute another program, whose output is its own.
        let silent = ["rm", "cp", "run", "bridge"];
        let readme = include_str!("../README.md");
        let (_, documented) = readme.split_once("\n## `--json`\n").expect("the section on --json");
        let (documented, _) = documented.split_once("\n## ").expect("the next section");
        let command = command();
        let commands: Vec<_> = command.get_subcommands().filter(|command| !command.is_hide_set()).collect();
        assert!(commands.len() > 20, "{commands:?}");
        for command in commands {
            let name = command.get_name();
            let has_json = command.get_arguments().any(|argument| argument.get_long() == Some("json"));
            assert_ne!(has_json, silent.contains(&name), "{name}");
            assert!(
                documented.contains(&format!("`{name}")),
                "{name} is missing in the section on --json of README.md"
            );
        }
    }

    #[test]
    fn bytes_take_binary_suffixes_and_refuse_other_texts() {
        assert_eq!(bytes("65536"), Ok(65536));
        assert_eq!(bytes("64K"), Ok(65536));
        assert_eq!(bytes("64MiB"), Ok(64 << 20));
        assert_eq!(bytes("2g"), Ok(2 << 30));
        for bad in ["", "K", "-1", "1T", "1.5M", "99999999999G"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn seconds_refuse_other_texts() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["", "soon", "-1", "nan", "inf"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}
