//! The exit codes in `--help`: all of them in that of the tool, and in that of a command its own. `Failure::code`
//! assigns them.

use std::fmt::Write as _;

/// A code, what it means, and the commands that return it; none: each command does.
struct Code {
    code: &'static str,
    meaning: &'static str,
    commands: &'static [&'static str],
}

const fn code(code: &'static str, meaning: &'static str, commands: &'static [&'static str]) -> Code {
    Code { code, meaning, commands }
}

/// Those that close their channel when a signal ends them. The others end by the signal itself.
const HANDLE_SIGNALS: &[&str] = &[
    "send", "recv", "pub", "sub", "flush", "record", "replay", "cat", "cp", "call", "serve", "run", "ping", "tail",
    "top", "conform", "metrics", "bridge",
];

/// Columns of a line.
const WIDTH: usize = 79;

const CODES: &[Code] = &[
    code("0", "done", &[]),
    code(
        "1",
        "the other side died, or left with messages unreleased (standard error gives the number)",
        &["send", "recv", "flush", "record", "replay"],
    ),
    code("1", "the publisher died", &["sub"]),
    code("1", "the end of a file is torn", &["replay"]),
    code("1", "the end of a file is torn, or --verify found gaps", &["cat"]),
    code("1", "the service left before it replied; the call may have been carried out", &["call"]),
    code("1", "the service left, and there was no reply", &["ping"]),
    code("1", "an exchange failed", &["conform"]),
    code("1", "a check failed; with --channel, something is wrong with the channel", &["doctor"]),
    code("2", "usage or bad input", &[]),
    code(
        "3",
        "refused: the name is taken or unusable, the other side may not connect, or path:DIR is no channel, has that \
         side already, or predates the last reboot",
        &["send", "recv", "pub", "sub", "flush", "record", "replay", "call", "serve", "run", "ping"],
    ),
    code("3", "there is no such channel, or this user may not see it", &["ls", "stat", "doctor", "tail"]),
    code("3", "there is no such channel, or a process uses it", &["rm", "recover", "info"]),
    code("3", "refused: the stream's settings, another bridge or publisher, the position", &["bridge"]),
    code("3", "--listen: the address is taken or unusable", &["metrics"]),
    code(
        "4",
        "timed out: the other side did not appear in time",
        &["send", "recv", "pub", "sub", "flush", "record", "replay"],
    ),
    code("4", "timed out: the service did not appear, or not reply, in time", &["call", "ping"]),
    code("4", "timed out: no server, or no other side", &["bridge"]),
    code("4", "timed out: the channel did not appear within --timeout", &["tail"]),
    code("4", "nobody listens under the name now", &["info"]),
    code("5", "the system failed: disk full, no memory, a corrupt channel or file", &[]),
    code("5", "the channel is damaged, and --repair was not given", &["recover"]),
    code(
        "6",
        "the service failed the call (standard error has its code and text), or dropped it without a reply",
        &["call"],
    ),
    code("6", "every reply was a failure", &["ping"]),
    code(
        "129",
        "hung up (SIGHUP): as SIGINT; a SIGHUP ignored at the start, as by nohup, stays ignored",
        HANDLE_SIGNALS,
    ),
    code("130", "interrupted (SIGINT): a channel was closed, and its other side notified", HANDLE_SIGNALS),
    code("141", "the reader of standard output closed it, as `head` does", &[]),
    code("143", "terminated (SIGTERM): as SIGINT", HANDLE_SIGNALS),
];

/// Those of a command.
pub fn of(command: &str) -> String {
    let has = |code: &&Code| code.commands.is_empty() || code.commands.contains(&command);
    text(CODES.iter().filter(has).map(|code| (code.code, code.meaning.to_owned())))
}

/// Those of all commands.
pub fn all() -> String {
    text(CODES.iter().map(|code| match code.commands {
        [] | [_, _, _, _, _, _, ..] => (code.code, code.meaning.to_owned()),
        some => (code.code, format!("{}: {}", some.join(", "), code.meaning)),
    }))
}

fn text<'a>(codes: impl Iterator<Item = (&'a str, String)>) -> String {
    let mut text = "Exit codes:".to_owned();
    let mut last = "";
    for (code, meaning) in codes {
        let shown = if code == last { "" } else { code };
        last = code;
        let _ = write!(text, "\n  {shown:>3} ");
        let mut column = 6;
        for word in meaning.split(' ') {
            if column + 1 + word.chars().count() > WIDTH {
                text.push_str("\n      ");
                column = 6;
            }
            let _ = write!(text, " {word}");
            column += 1 + word.chars().count();
        }
    }
    text
}
