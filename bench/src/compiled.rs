//! Programs that the benchmark runs to their end, and C code that it compiles at its first use, into cargo's target
//! directory, beside this program.

use std::{
    env, fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use libloading::{
    AsFilename,
    os::unix::{Library, RTLD_NOW},
};

/// FNV-1a, 64 bits: enough to distinguish sources.
pub fn fingerprint(source: &str) -> String {
    let hash = source
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ byte as u64).wrapping_mul(0x0100_0000_01b3));
    format!("{hash:016x}")
}

/// The directory of cargo's output.
pub fn directory() -> Result<PathBuf> {
    let own = env::current_exe().context("finding this program")?;
    Ok(own.parent().context("this program is in no directory")?.to_path_buf())
}

/// Cargo's target directory, for what is built once for all profiles.
pub fn target_directory() -> Result<PathBuf> {
    let own = directory()?;
    Ok(own.parent().unwrap_or(&own).to_path_buf())
}

/// Compiles `source` with `cc FLAGS -x c - -o PLACE LIBRARIES`, unless that is done. The output's name is `name` and a
/// fingerprint of source and arguments.
pub fn compile(name: &str, source: &str, flags: &[&str], libraries: &[&str]) -> Result<PathBuf> {
    let mark = fingerprint(&format!("{source}{flags:?}{libraries:?}"));
    let place = directory()?.join(format!("{name}-{mark}"));
    if place.exists() {
        return Ok(place);
    }
    let temporary = directory()?.join(format!("{name}-{mark}.{}", std::process::id()));
    let mut cc = Command::new("cc")
        .args(flags)
        .args(["-x", "c", "-", "-o"])
        .arg(&temporary)
        .args(["-x", "none"])
        .args(libraries)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting `cc` to compile {name}: install a C compiler"))?;
    // A compiler that exits without reading has printed the reason.
    let handed = cc.stdin.take().expect("it is piped").write_all(source.as_bytes());
    let done = cc.wait_with_output().context("waiting for cc")?;
    if !done.status.success() {
        bail!(
            "`cc {} {}` failed on {name}: {}",
            flags.join(" "),
            libraries.join(" "),
            String::from_utf8_lossy(&done.stderr).trim()
        );
    }
    handed.with_context(|| format!("handing {name} to cc"))?;
    fs::rename(&temporary, &place).with_context(|| format!("renaming a file to {}", place.display()))?;
    Ok(place)
}

/// Loads a shared object, for as long as this process lives.
pub fn load(path: impl AsFilename) -> Result<&'static Library> {
    // SAFETY: the object is responsible for its initialisers, and is never unloaded.
    let library = unsafe { Library::open(Some(path), RTLD_NOW) }?;
    Ok(Box::leak(Box::new(library)))
}

/// Runs it to its end, and returns what it printed; the error has its error output.
pub fn output(command: &mut Command) -> Result<String> {
    let name = Path::new(command.get_program()).display().to_string();
    let done = command.stdin(Stdio::null()).output().with_context(|| format!("starting `{name}`: is it installed?"))?;
    if !done.status.success() {
        let said = [&done.stdout[..], &done.stderr[..]].concat();
        let said = String::from_utf8_lossy(&said);
        let lines: Vec<&str> = said.lines().filter(|line| line.to_lowercase().contains("error")).take(3).collect();
        let said = if lines.is_empty() { said.trim().to_string() } else { lines.join("; ") };
        bail!("`{name}` failed ({}): {}", done.status, said.chars().take(600).collect::<String>());
    }
    Ok(String::from_utf8_lossy(&done.stdout).trim().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_build_is_reported_with_its_error_output() {
        let error = output(Command::new("sh").args(["-c", "echo 'error: no luck' >&2; exit 3"])).unwrap_err();
        assert!(error.to_string().contains("no luck"), "{error}");
        let error = output(&mut Command::new("/nowhere/at-all")).unwrap_err();
        assert!(format!("{error:#}").contains("is it installed"), "{error:#}");
    }
}
