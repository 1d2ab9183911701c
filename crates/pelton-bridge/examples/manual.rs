//! Writes the manual pages of `pelton-bridge`, and its completions for bash, zsh and fish, below the directory PREFIX,
//! where `man` and the shells find them. The pages show DATE:
//!
//!     cargo run -p pelton-bridge --example manual-bridge -- PREFIX YYYY-MM-DD

#[path = "../../pelton-cli/examples/manual/pages.rs"]
mod pages;

use std::{io, path::Path};

fn main() -> io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [prefix, date] = &arguments[..] else {
        let found = arguments.len();
        return Err(io::Error::other(format!("found {found} arguments, wanted two: PREFIX YYYY-MM-DD")));
    };
    pages::write(pelton_bridge::command(), Path::new(prefix), date)
}
