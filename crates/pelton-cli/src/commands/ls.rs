//! `pelton ls`: all channels and services, found without their cooperation.

use crate::{
    failure::Failure,
    observed::{
        Where, cell, is_detail, json_of, json_of_unreadable, name_cell, name_of, one_line, percent, senders, short,
        short_age, short_bytes, side,
    },
    output::{json, print},
};
use clap::Args;
use pelton::observe::{Channel, Found};
use serde_json::json;
use std::{io::IsTerminal as _, path::PathBuf};

/// Options of `pelton ls`.
#[derive(Args)]
pub struct LsArgs {
    /// Directories of channels that no process uses; those in use are found anyway
    #[arg(value_name = "DIR")]
    directories: Vec<PathBuf>,
    #[command(flatten)]
    place: Where,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Runs `pelton ls`.
pub fn run(args: &LsArgs) -> Result<(), Failure> {
    let mut observer = args.place.observer();
    for directory in &args.directories {
        observer.add_directory(std::path::absolute(directory).unwrap_or_else(|_| directory.clone()));
    }
    let found = observer.channels();
    if args.json {
        let channels: Vec<_> = found.channels.iter().map(json_of).collect();
        let unreadable: Vec<_> = found.unreadable.iter().map(json_of_unreadable).collect();
        return print(json(&json!({ "channels": channels, "unreadable": unreadable })));
    }
    print(text(&found, is_wide()))
}

/// Whether there is room for all columns. A file or pipe has as much as a line needs.
fn is_wide() -> bool {
    let output = std::io::stdout();
    !output.is_terminal() || rustix::termios::tcgetwinsize(&output).is_ok_and(|size| size.ws_col >= 118)
}

fn text(found: &Found, is_wide: bool) -> String {
    let mut text = line(
        is_wide,
        ["NAME", "KIND", "SENDER", "RECEIVER", "WAITS", "FULL"],
        "STATE",
        ["BYTES", "OF", "SENT", "BYTES", "AGE"],
    );
    for channel in found.channels.iter().filter(|channel| !is_detail(channel)) {
        text += &row(channel, is_wide);
    }
    for unreadable in &found.unreadable {
        text += &format!("cannot read {}: {}\n", one_line(&unreadable.what), one_line(&unreadable.reason));
    }
    text
}

fn row(channel: &Channel, is_wide: bool) -> String {
    let cells = [
        &*name_of(channel),
        channel.kind.word(),
        &senders(channel),
        &side(&channel.receiver),
        &short(channel.waiting_messages()),
        &format!("{}%", percent(channel)),
    ];
    let further = [
        &*short_bytes(channel.waiting_bytes()),
        &short_bytes(channel.capacity()),
        &short(channel.messages()),
        &short_bytes(channel.bytes()),
        &short_age(channel),
    ];
    line(is_wide, cells, channel.state().words(), further)
}

/// A line of the table: 80 columns, or 112 with the `further` ones.
fn line(is_wide: bool, cells: [&str; 6], state: &str, further: [&str; 5]) -> String {
    let [name, kind, sender, receiver, waits, full] = cells;
    let mut line = format!(
        "{} {} {} {} {waits:>5} {full:>4}",
        name_cell(name, 16),
        cell(kind, 8),
        cell(sender, 13),
        cell(receiver, 13)
    );
    if is_wide {
        let [bytes, of, sent, sent_bytes, age] = further;
        line += &format!(" {bytes:>6} {of:>5} {sent:>5} {sent_bytes:>5} {age:>4}");
    }
    format!("{line} {state}\n")
}
