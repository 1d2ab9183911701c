//! `./run bench regress OLD..NEW`: has a change made a hot path slower? Builds the benchmark at two commits, each with
//! its own library, and runs both by turns.
//!
//! One run of each is a pair: what slows the machine down slows both. A path is slower, or faster, if the bootstrap
//! interval of the pairs' ratio does not contain 1.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde_json::Value;

use pelton_bench::{
    compiled::output,
    statistics::{median, paired_ratio},
};

/// Compares the hot paths of two commits, by runs that take turns
#[derive(Args, Debug)]
pub struct Arguments {
    /// The two commits, as git names them; without `..NEW` the second is HEAD
    #[arg(value_name = "OLD..NEW")]
    commits: String,

    /// Runs of each command at each commit
    #[arg(long, value_name = "N", default_value_t = 15)]
    runs: usize,

    /// Only the commands that contain this
    #[arg(long, value_name = "WORDS")]
    only: Option<String>,
}

/// The hot paths.
const PATHS: [&str; 11] = [
    "stream --size 16 --seconds 0.2",
    "stream --size 256 --seconds 0.2",
    "stream --size 256 --wait block --seconds 0.2",
    "stream --size 65536 --seconds 0.2",
    "roundtrip --size 64 --seconds 0.2",
    "roundtrip --size 64 --wait block --seconds 0.2",
    "call --size 64 --seconds 0.2",
    "call --size 64 --in-flight 1000 --wait block --seconds 0.2",
    "fan-in --senders 8 --seconds 0.2",
    "broadcast --receivers 2 --seconds 0.2",
    "append --threads 2 --count 1000000",
];

/// 0 if no path is slower, 1 if one is.
pub fn compare(arguments: &Arguments) -> Result<ExitCode> {
    let (old, new) = arguments.commits.split_once("..").unwrap_or((&arguments.commits, "HEAD"));
    let paths: Vec<&str> =
        PATHS.into_iter().filter(|path| arguments.only.as_ref().is_none_or(|only| path.contains(only))).collect();
    ensure!(!paths.is_empty() && arguments.runs > 0, "found no command or no run: the commands are {PATHS:?}");
    let programs = [built(old)?, built(new)?];
    let mut any_slower = false;
    println!("{:60} {:>9} {:>9}  speed of new to old (95 %)", "command", "old", "new");
    for path in paths {
        let mut speeds = [Vec::new(), Vec::new()];
        for run in 0..arguments.runs {
            // Each begins as often as the other.
            for which in [run % 2, 1 - run % 2] {
                speeds[which].push(Some(speed(&programs[which], path, "pelton")?));
            }
        }
        let ratio = paired_ratio(&speeds[1], &speeds[0]).context("no pair of runs")?;
        let verdict = verdict(ratio.interval);
        any_slower |= verdict == "SLOWER";
        let [old, new] = speeds.map(|all| median(all.into_iter().flatten().collect()).unwrap_or_default());
        let (low, high) = ratio.interval;
        println!("{path:60} {old:9.3e} {new:9.3e}  {:.3} ({low:.3} to {high:.3}) {verdict}", ratio.median);
    }
    Ok(ExitCode::from(u8::from(any_slower)))
}

fn verdict((low, high): (f64, f64)) -> &'static str {
    match () {
        () if high < 1.0 => "SLOWER",
        () if low > 1.0 => "faster",
        () => "",
    }
}

/// The benchmark of that commit, built below the target directory unless it is there.
fn built(commit: &str) -> Result<PathBuf> {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let git = |arguments: &[&str]| output(Command::new("git").arg("-C").arg(root).args(arguments));
    let name = git(&["rev-parse", "--verify", &format!("{commit}^{{commit}}")])
        .with_context(|| format!("found `{commit}`, wanted a commit"))?;
    let own = std::env::current_exe().context("finding this program")?;
    let target = own.ancestors().nth(2).context("this program is in no target directory")?.join("regress");
    let program = target.join(&name[..12]);
    if !program.exists() {
        eprintln!("building {commit} ({})", &name[..12]);
        fs::create_dir_all(&target).with_context(|| format!("creating {}", target.display()))?;
        // Removed also when the build fails.
        let tree = tempfile::tempdir_in(&target).context("making a directory for the commit's files")?;
        let archive = tree.path().join("files.tar");
        git(&["archive", "--output", &archive.to_string_lossy(), &name])?;
        output(Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(tree.path()))?;
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
        cargo.args(["build", "--release", "--quiet", "-p", "pelton-bench", "--target-dir"]).arg(target.join("build"));
        output(cargo.current_dir(tree.path()))?;
        let made = target.join("build/release/pelton-bench");
        fs::rename(&made, &program).with_context(|| format!("renaming {}", made.display()))?;
    }
    Ok(program)
}

/// The speed of one run of a system: messages a second, or round trips.
pub fn speed(program: &Path, command: &str, system: &str) -> Result<f64> {
    let mut run = Command::new(program);
    let text = output(run.args(command.split(' ')).args(["--runs", "1", "--systems", system, "--json"]))?;
    let line: Value = serde_json::from_str(text.lines().next().unwrap_or_default()).context("reading a report")?;
    match (line["round_trip_ns"].as_f64(), line["messages_per_second"].as_f64()) {
        (Some(ns), _) => Ok(1e9 / ns),
        (None, Some(rate)) => Ok(rate),
        _ => bail!("`{command}` has no figure: {}", line["skipped"]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pelton_bench::commands::Measurement;

    #[test]
    fn every_path_is_a_command() {
        for path in PATHS {
            Measurement::parse(&format!("{path} --runs 1 --systems pelton --json")).unwrap();
        }
    }

    #[test]
    fn a_path_is_slower_only_if_the_whole_interval_is_below_one() {
        assert_eq!([(0.8, 0.99), (0.9, 1.0), (1.01, 1.2)].map(verdict), ["SLOWER", "", "faster"]);
    }

    #[test]
    fn what_is_no_commit_is_named() {
        let error = format!("{:#}", built("no-such-commit").unwrap_err());
        assert!(error.contains("found `no-such-commit`, wanted a commit"), "{error}");
    }
}
