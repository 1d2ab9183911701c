//! `pelton`, the command-line tool: what its commands and their options are, and the one table of exit codes that they share.

mod demo;
mod failure;
mod frame;
mod progress;
mod recv;
mod report;
mod send;
mod signals;

use clap::{Args, Parser, Subcommand, ValueEnum};
use failure::Failure;
use std::{
    io::Write as _,
    process::ExitCode,
    time::{Duration, Instant},
};

/// What `--help` says of the exit codes; `Failure::code` is where they are given out.
const EXIT_CODES: &str = "\
Exit codes:
    0  done
    1  the other side died or went with messages unreleased (standard error says
       how many); demo: what came out is not what went in
    2  usage or bad input
    3  refused: the name is taken or unusable, or the other side may not connect
    4  timed out
    5  the system failed: disk full, no memory, a corrupt channel
  130  interrupted (SIGINT): the channel was closed, the other side told so
  141  standard output was closed by its reader, as `head` does
  143  terminated (SIGTERM), closed alike";

/// Messages at memory speed between the processes of one machine
#[derive(Parser)]
#[command(name = "pelton", version, after_help = EXIT_CODES, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// One variant a command; further commands go beside these.
#[derive(Subcommand)]
enum Command {
    /// Read standard input and send each frame of it as a message
    #[command(after_help = EXIT_CODES)]
    Send(send::SendArgs),
    /// Receive messages and write each as a frame to standard output
    #[command(after_help = EXIT_CODES)]
    Recv(recv::RecvArgs),
    /// Stream a file through a channel and zstd, check the result, and measure it against a Unix socket
    #[command(after_help = EXIT_CODES)]
    Demo(demo::DemoArgs),
    /// The sending process of a demo
    #[command(hide = true)]
    DemoSend(demo::pipeline::StageArgs),
    /// The receiving process of a demo
    #[command(hide = true)]
    DemoReceive(demo::pipeline::StageArgs),
}

/// What `send` and `recv` have in common.
#[derive(Args)]
struct ChannelArgs {
    /// The channel: a short name, or unix:PATH for a socket at PATH
    name: String,
    /// How messages are told apart in the stream of bytes
    #[arg(long, value_enum, default_value_t = frame::Framing::Lines)]
    frame: frame::Framing,
    /// Give up when the other side has not appeared after so long [default: wait for ever]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,
    /// How to wait for the other side once connected
    #[arg(long, value_enum, default_value_t = WaitArg::Block)]
    wait: WaitArg,
    /// Report as one JSON object at the end
    #[arg(long)]
    json: bool,
}

impl ChannelArgs {
    /// When to stop waiting for the other side to appear, counted from now; `None` is never.
    fn appear_by(&self) -> Option<Instant> {
        self.timeout.and_then(|timeout| Instant::now().checked_add(timeout))
    }

    /// The failure of the other side not having appeared in time.
    fn nobody(&self, wanted: &str) -> Failure {
        Failure::TimedOut(format!(
            "no {wanted} appeared on `{}` within {} s: start one, or wait longer with --timeout",
            self.name,
            self.timeout.unwrap_or_default().as_secs_f64()
        ))
    }
}

/// `--wait`, in the words of the command line.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum WaitArg {
    /// Keep a core busy: the lowest latency
    Spin,
    /// Spin briefly, then sleep
    Block,
}

impl From<WaitArg> for pelton::Wait {
    fn from(wait: WaitArg) -> pelton::Wait {
        match wait {
            WaitArg::Spin => pelton::Wait::Spin,
            WaitArg::Block => pelton::Wait::Block,
        }
    }
}

/// A time in seconds, with or without a fraction.
fn seconds(text: &str) -> Result<Duration, String> {
    let wanted = "want seconds, such as 10 or 0.5";
    let number: f64 = text.parse().map_err(|_| wanted.to_string())?;
    Duration::try_from_secs_f64(number).map_err(|error| format!("{error}: {wanted}"))
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

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Send(args) => send::run(&args),
        Command::Recv(args) => recv::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::DemoSend(args) => demo::pipeline::send_stage(&args),
        Command::DemoReceive(args) => demo::pipeline::receive_stage(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if let Some(text) = failure.text() {
                // standard error may be gone as well; the exit code still tells
                let _ = writeln!(std::io::stderr(), "pelton: {text}");
            }
            ExitCode::from(failure.code())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_of_the_command_line_is_consistent() {
        use clap::CommandFactory as _;
        Cli::command().debug_assert();
    }

    #[test]
    fn bytes_take_binary_suffixes_and_refuse_the_rest() {
        assert_eq!(bytes("65536"), Ok(65536));
        assert_eq!(bytes("64K"), Ok(65536));
        assert_eq!(bytes("64MiB"), Ok(64 << 20));
        assert_eq!(bytes("2g"), Ok(2 << 30));
        for bad in ["", "K", "-1", "1T", "1.5M", "99999999999G"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn seconds_refuse_what_is_no_time() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["", "soon", "-1", "nan", "inf"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}
