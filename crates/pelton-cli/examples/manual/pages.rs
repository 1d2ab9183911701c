//! Manual pages and completions of a program, from the definition of its command line.

use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;
use std::{fmt::Write as _, fs, io, path::Path};

/// Writes those of `command` below `prefix`; the pages show `date`.
pub fn write(mut command: Command, prefix: &Path, date: &str) -> io::Result<()> {
    let name = command.get_name().to_owned();
    for (shell, file) in [
        (Shell::Bash, format!("share/bash-completion/completions/{name}")),
        (Shell::Zsh, format!("share/zsh/site-functions/_{name}")),
        (Shell::Fish, format!("share/fish/vendor_completions.d/{name}.fish")),
    ] {
        let file = prefix.join(file);
        fs::create_dir_all(file.parent().expect("it is below the prefix"))?;
        clap_complete::generate(shell, &mut command.clone(), &name, &mut fs::File::create(file)?);
    }

    let pages = prefix.join("share/man/man1");
    fs::create_dir_all(&pages)?;
    command = command.disable_help_subcommand(true);
    command.build();
    // A command that has no help of its own is another program. The page is that one's.
    let own = command.get_subcommands().filter(|command| !command.is_disable_help_flag_set());
    for command in std::iter::once(&command).chain(own) {
        write_page(command, date, &pages)?;
    }
    Ok(())
}

fn write_page(command: &Command, date: &str, pages: &Path) -> io::Result<()> {
    let man = Man::new(command.clone())
        .date(date)
        .source(concat!("pelton ", env!("CARGO_PKG_VERSION")))
        .manual("User Commands");
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    let codes = command.get_after_help().map(|text| text.to_string()).unwrap_or_default();
    // The generator separates paragraphs by requests that mandoc warns of.
    let page = String::from_utf8_lossy(&page).replace(".br\n\n.br\n", ".sp\n") + &exit_status(&codes);
    fs::write(pages.join(man.get_filename()), page)
}

/// The section about the exit codes, from the text of `--help`: a line that begins with a number begins an entry.
fn exit_status(codes: &str) -> String {
    let mut section = String::from(".SH \"EXIT STATUS\"\n");
    for line in codes.lines().skip(1).map(str::trim) {
        let line = line.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq").replace('`', "\\(ga");
        let written = match line.split_once("  ") {
            Some((code, meaning)) if code.parse::<u8>().is_ok() => writeln!(section, ".TP\n{code}\n{meaning}"),
            _ => writeln!(section, "{line}"),
        };
        written.expect("a string takes all");
    }
    section
}
