//! `pelton`, the command-line tool: the definition of its command line, and the exit codes that its commands share.
//!
//! `commands` has a file for each command. Beside it: `channel`, the options and the opening of `send`, `recv` and
//! `flush`; `observed`, the channels that `ls`, `stat`, `top` and `doctor` show; `frame`, messages in a stream;
//! `output`, standard output; `report`, the object of `--json`; `process`, a command that runs beside an event loop;
//! `notify`, messages to systemd; `failure`, why a command failed; `signals`, `progress`, `descriptors`.
//!
//! It is a library so that `examples/manual.rs` has the command line's definition, and so that the demo and the crash
//! test share the public modules. It is no interface for other programs.

mod channel;
mod commands;
mod descriptors;
pub mod failure;
pub mod frame;
mod notify;
mod observed;
pub mod output;
mod process;
pub mod progress;
mod report;
pub mod signals;

use clap::{CommandFactory as _, Parser, Subcommand};
use commands::{
    bridge, call, cat, conform, cp, doctor, flush, info, ls, ping, record, recover, recv, replay, rm, run, send, serve,
    stat, tail, top,
};
use std::{process::ExitCode, time::Duration};

/// The exit codes in `--help`; `Failure::code` assigns them.
const EXIT_CODES: &str = "\
Exit codes:
    0  done
    1  the other side died or left with messages unreleased (standard error gives
       the number); cat: a file's end is torn, or --verify found gaps; conform and
       doctor: a check failed; doctor --channel: something is wrong with it
    2  usage or bad input
    3  refused: the name is taken or unusable, the other side may not connect, or
       path:DIR is no channel, has that side already, or predates the last reboot;
       stat, doctor: there is no such channel
    4  timed out: the other side did not appear, or the reply did not arrive, in
       time; info: nobody listens now
    5  the system failed: disk full, no memory, a corrupt channel or file
    6  call: the service failed the call (standard error has its code and text),
       or dropped it without a reply
  129  hung up (SIGHUP): the channel was closed as for SIGINT; a SIGHUP ignored
       at the start, as by nohup, stays ignored
  130  interrupted (SIGINT): the channel was closed, the other side notified
  141  the reader of standard output closed it, as `head` does
  143  terminated (SIGTERM): the channel was closed as for SIGINT";

/// Messages at memory speed between the processes of one machine
#[derive(Parser)]
#[command(name = "pelton", version, after_help = EXIT_CODES, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Read standard input and send each frame of it as a message
    #[command(after_help = EXIT_CODES)]
    Send(send::SendArgs),
    /// Receive messages and write each as a frame to standard output
    #[command(after_help = EXIT_CODES)]
    Recv(recv::RecvArgs),
    /// Receive messages and write each to a record file once, also after a kill and a restart
    #[command(after_help = EXIT_CODES)]
    Flush(flush::FlushArgs),
    /// Receive messages and write each to a record file, with the time at which it arrived
    #[command(after_help = EXIT_CODES)]
    Record(record::RecordArgs),
    /// Send the messages of record files at the recorded pace, or at another
    #[command(after_help = EXIT_CODES)]
    Replay(replay::ReplayArgs),
    /// Write the messages of record files to standard output, or check them
    #[command(after_help = EXIT_CODES)]
    Cat(cat::CatArgs),
    /// Copy a file, in the kernel if possible; the copy gets its name once complete
    #[command(after_help = EXIT_CODES)]
    Cp(cp::CpArgs),
    /// Call a service, and write its reply to standard output
    #[command(after_help = EXIT_CODES)]
    Call(call::CallArgs),
    /// Answer calls by a command: a process per call, or one co-process
    #[command(after_help = EXIT_CODES)]
    Serve(serve::ServeArgs),
    /// Keep a service running, in any language: start it, start it again after its end, replace it on SIGHUP
    #[command(after_help = EXIT_CODES)]
    Run(run::RunArgs),
    /// Call a service repeatedly, and measure the round trips
    #[command(after_help = EXIT_CODES)]
    Ping(ping::PingArgs),
    /// Print the messages of a channel as they pass, without being its receiver; changes nothing
    #[command(after_help = EXIT_CODES)]
    Tail(tail::TailArgs),
    /// List all channels and services: their processes, and what waits in them; changes nothing
    #[command(after_help = EXIT_CODES)]
    Ls(ls::LsArgs),
    /// Show one channel in full, with its rates; changes nothing
    #[command(after_help = EXIT_CODES)]
    Stat(stat::StatArgs),
    /// Show all channels live: rates, backlogs, states; F1 shows the keys; changes nothing
    #[command(after_help = EXIT_CODES)]
    Top(top::TopArgs),
    /// Check what this machine and user can do; with --channel, say what is wrong with a channel
    #[command(after_help = EXIT_CODES)]
    Doctor(doctor::DoctorArgs),
    /// Show which processes use a channel and which messages wait in it; changes nothing
    #[command(after_help = EXIT_CODES)]
    Info(info::InfoArgs),
    /// Check a channel in a directory that no process uses; with --repair, repair it
    #[command(after_help = EXIT_CODES)]
    Recover(recover::RecoverArgs),
    /// Remove a channel in a directory that no process uses, with the messages in it
    #[command(after_help = EXIT_CODES)]
    Rm(rm::RmArgs),
    /// Check that programs in other languages exchange messages, calls and files with each other and with this one
    #[command(after_help = EXIT_CODES)]
    Conform(conform::ConformArgs),
    /// Carry a channel to other machines over NATS JetStream: executes pelton-bridge, a package of its own
    #[command(disable_help_flag = true, after_help = EXIT_CODES)]
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

/// The definition of the command line.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Does what the process's arguments say.
pub fn run() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Send(args) => send::run(&args),
        Command::Recv(args) => recv::run(&args),
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
