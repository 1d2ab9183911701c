//! Writes the manual pages of `pelton`, and its completions for bash, zsh and fish, below the directory PREFIX, where
//! `man` and the shells find them. The pages show DATE:
//!
//!     cargo run --example manual -- PREFIX YYYY-MM-DD

mod pages;

use clap::Command;
use std::{io, path::Path};

fn main() -> io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [prefix, date] = &arguments[..] else {
        let found = arguments.len();
        return Err(io::Error::other(format!("found {found} arguments, wanted two: PREFIX YYYY-MM-DD")));
    };
    let prefix = Path::new(prefix);

    // Without the commands that only the tool itself starts.
    let all = pelton_cli::command();
    let command = Command::new("pelton")
        .version(env!("CARGO_PKG_VERSION"))
        .about(all.get_about().cloned().unwrap_or_default())
        .after_help(all.get_after_help().cloned().unwrap_or_default())
        .subcommand_required(true)
        .subcommands(all.get_subcommands().filter(|command| !command.is_hide_set()).cloned());
    pages::write(command, prefix, date)
}
