//! `pelton ls`: all channels and services, found without their cooperation.

use crate::{
    failure::Failure,
    observed::{
        Where, cell as cut, is_detail, json_of, json_of_unreadable, name_cell, name_of, one_line, percent, receiver,
        senders, short, short_age, short_bytes, whole_path,
    },
    output::{json, print},
};
use clap::Args;
use pelton::observe::{Channel, Found, Unreadable};
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
    let mut observer = args.place.observer()?;
    let directories: Vec<PathBuf> = args.directories.iter().map(|directory| whole_path(directory)).collect();
    directories.iter().for_each(|directory| observer.add_directory(directory));
    let mut found = observer.channels();
    // What the command line names and is no channel is an error; what the search meets is a line of the list.
    let is_named = |unreadable: &Unreadable| {
        directories.iter().any(|directory| directory.display().to_string() == unreadable.what)
    };
    let (refused, unreadable) = found.unreadable.into_iter().partition(is_named);
    found.unreadable = unreadable;
    if args.json {
        let channels: Vec<_> = found.channels.iter().map(json_of).collect();
        let unreadable: Vec<_> = found.unreadable.iter().map(json_of_unreadable).collect();
        print(json(&json!({ "channels": channels, "unreadable": unreadable })))?;
    } else {
        print(text(&found))?;
    }
    let refused: Vec<String> =
        refused.iter().map(|Unreadable { what, reason, .. }| format!("{what}: {reason}")).collect();
    match refused.is_empty() {
        true => Ok(()),
        false => Err(Failure::Refused(refused.join("\n"))),
    }
}

/// A column: its head, its width on a terminal, and on which side of it the text is.
struct Column(&'static str, usize, Align);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Align {
    Left,
    /// As left, but of a long text the end is shown.
    End,
    Right,
}

/// The columns. A terminal of fewer than [`WIDE`] columns gets those of [`NARROW`], 80 columns wide with the state.
const COLUMNS: [Column; 12] = [
    Column("NAME", 15, Align::End),
    Column("KIND", 8, Align::Left),
    Column("SENDER", 13, Align::Left),
    Column("RECEIVER", 13, Align::Left),
    Column("WAITS", 5, Align::Right),
    Column("FULL", 4, Align::Right),
    Column("WAITS-B", 7, Align::Right),
    Column("OF", 5, Align::Right),
    Column("SENT", 5, Align::Right),
    Column("SENT-B", 6, Align::Right),
    Column("AGE", 4, Align::Right),
    Column("STATE", 0, Align::Left),
];
const NARROW: [usize; 7] = [0, 1, 2, 3, 4, 5, 11];
const WIDE: u16 = 118;

fn text(found: &Found) -> String {
    let output = std::io::stdout();
    let is_terminal = output.is_terminal();
    let is_narrow = is_terminal && rustix::termios::tcgetwinsize(&output).is_ok_and(|size| size.ws_col < WIDE);
    let rows: Vec<_> = found.channels.iter().filter(|channel| !is_detail(channel)).map(row).collect();
    let mut text = table(&rows, is_terminal, is_narrow);
    for unreadable in &found.unreadable {
        text += &format!("cannot read {}: {}\n", one_line(&unreadable.what), one_line(&unreadable.reason));
    }
    text
}

fn row(channel: &Channel) -> [String; 12] {
    [
        name_of(channel),
        channel.kind.word().to_owned(),
        senders(channel),
        receiver(channel),
        short(channel.waiting_messages()),
        format!("{}%", percent(channel)),
        short_bytes(channel.waiting_bytes()),
        short_bytes(channel.capacity()),
        short(channel.messages()),
        short_bytes(channel.bytes()),
        short_age(channel),
        channel.state().words().to_owned(),
    ]
}

/// The table. A terminal has lines of one length and cuts long texts; a file or a pipe gets all of each text.
fn table(rows: &[[String; 12]], is_terminal: bool, is_narrow: bool) -> String {
    let head = COLUMNS.each_ref().map(|Column(head, ..)| (*head).to_owned());
    let mut text = String::new();
    for row in [&head].into_iter().chain(rows) {
        let mut line = String::new();
        for (at, (Column(_, width, align), cell)) in COLUMNS.iter().zip(row).enumerate() {
            if is_narrow && !NARROW.contains(&at) {
                continue;
            }
            let longest = || rows.iter().map(|row| row[at].chars().count()).max().unwrap_or(0);
            let width = if is_terminal { *width } else { longest().max(*width) };
            line += &match align {
                // The last one.
                _ if width == 0 || at + 1 == COLUMNS.len() => cell.clone(),
                Align::Left => cut(cell, width),
                Align::End => name_cell(cell, width),
                Align::Right => format!("{cell:>width$}"),
            };
            line.push(' ');
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_cuts_a_long_name_and_a_pipe_does_not() {
        let mut row = [(); 12].map(|()| "1".to_owned());
        row[0] = "path:/a/very/long/name/of/a/channel".to_owned();
        row[2] = "12345 a-long-command".to_owned();
        row[11] = "receiver stopped".to_owned();
        let rows = [row.clone()];
        for is_narrow in [true, false] {
            let table = table(&rows, true, is_narrow);
            let most = if is_narrow { 80 } else { WIDE.into() };
            assert!(table.lines().all(|line| line.chars().count() <= most), "{table}");
            assert!(table.contains("…e/of/a/channel") && table.contains("receiver stopped"), "{table}");
        }
        let table = table(&rows, false, false);
        assert!(table.contains(&row[0]) && table.contains(&row[2]), "{table}");
        let head: Vec<&str> = table.lines().next().unwrap().split_whitespace().collect();
        assert!((1..head.len()).all(|at| !head[..at].contains(&head[at])), "two columns have one name: {head:?}");
    }
}
