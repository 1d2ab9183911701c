//! Results files: JSON lines, the machine first, and the page that shows them.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::compiled::output;

const PAGE: &str = include_str!("report.html");
/// The place of the results in the page.
const PLACE: &str = "/*RESULTS*/";

/// The machine, and the date. `interrupted`: the results are not complete.
pub fn machine(command: &str, interrupted: bool) -> Value {
    let read = |place: &str| fs::read_to_string(place).ok().map(|text| text.trim().to_string());
    let cpuinfo = read("/proc/cpuinfo").unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.trim_start_matches([' ', '\t', ':', '=']).trim_matches('"').to_string())
    };
    let uname = rustix::system::uname();
    let git =
        |arguments: &[&str]| output(Command::new("git").args(["-C", env!("CARGO_MANIFEST_DIR")]).args(arguments)).ok();
    // Except for the results file that this run writes.
    let paths = ["--", ":(top)", ":(top,exclude)bench/results"];
    let changed = git(&[&["status", "--porcelain", "--untracked-files=no"][..], &paths].concat())
        .is_some_and(|text| !text.is_empty());
    json!({ "machine": {
        "date": date(),
        "command": command,
        "interrupted": interrupted,
        "processor": field(&cpuinfo, "model name"),
        "processors": cpuinfo.lines().filter(|line| line.starts_with("processor")).count(),
        "virtual": cpuinfo.split_whitespace().any(|word| word == "hypervisor"),
        "memory": field(&read("/proc/meminfo").unwrap_or_default(), "MemTotal"),
        "kernel": format!("{} {}", uname.sysname().to_string_lossy(), uname.release().to_string_lossy()),
        "system": field(&read("/etc/os-release").unwrap_or_default(), "PRETTY_NAME"),
        // Two CPUs of one core share all but their registers.
        "cpus_of_the_first_core": read("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list"),
        "caches": (1..4).map(|level| read(&format!("/sys/devices/system/cpu/cpu0/cache/index{level}/size"))).collect::<Vec<_>>(),
        "huge_pages": read("/sys/kernel/mm/transparent_hugepage/enabled"),
        // Most virtual machines do not see one.
        "governor": read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "load_at_the_end": read("/proc/loadavg"),
        "commit": git(&["rev-parse", "--short", "HEAD"]).map(|commit| {
            if changed { format!("{commit}, with changes") } else { commit }
        }),
        "rust": output(Command::new("rustc").arg("--version")).ok(),
        "pelton": env!("CARGO_PKG_VERSION"),
    }})
}

/// Now, in UTC: `2026-11-22 14:03`.
pub fn date() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M").to_string()
}

/// Reads a results file.
pub fn read(place: &Path) -> Result<Vec<Value>> {
    let text = fs::read_to_string(place).with_context(|| format!("reading {}", place.display()))?;
    let lines: Vec<Value> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .enumerate()
        .map(|(at, line)| {
            serde_json::from_str(line).with_context(|| format!("line {} of {} is no JSON", at + 1, place.display()))
        })
        .collect::<Result<_>>()?;
    ensure!(
        lines.first().is_some_and(|first| first["machine"].is_object()),
        "{} does not begin with the machine, wanted the output of `./run bench all` or of --results",
        place.display()
    );
    Ok(lines)
}

/// Writes a results file atomically: no reader finds half of it.
pub fn write(place: &Path, lines: &[Value]) -> Result<()> {
    let mut text = String::new();
    for line in lines {
        text.push_str(&line.to_string());
        text.push('\n');
    }
    put(place, &text)
}

/// Writes the page that shows the results.
pub fn write_page(place: &Path, lines: &[Value]) -> Result<()> {
    // No text within a script element may contain its end tag. JSON escapes line separators.
    let data = Value::Array(lines.to_vec()).to_string().replace('<', "\\u003c");
    let (before, after) = PAGE.split_once(PLACE).expect("the page has a place for the results");
    put(place, &format!("{before}{data}{after}"))
}

/// Writes a file under a temporary name and renames it to its own.
pub fn put(place: &Path, text: &str) -> Result<()> {
    let name = place.file_name().with_context(|| format!("{} is not a file name", place.display()))?;
    let temporary = place.with_file_name(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
    fs::write(&temporary, text).with_context(|| format!("writing {}", temporary.display()))?;
    fs::rename(&temporary, place).with_context(|| format!("renaming a temporary file to {}", place.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_read_as_written_and_other_files_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("results.jsonl");
        let lines = vec![machine("stream", false), json!({ "workload": "stream" })];
        write(&place, &lines).unwrap();
        assert_eq!(read(&place).unwrap(), lines);
        write(&place, &lines[1..]).unwrap();
        assert!(read(&place).unwrap_err().to_string().contains("begin with the machine"));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn no_text_in_the_results_ends_the_pages_script() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("page.html");
        let evil = json!({ "machine": { "processor": "</script><script>document.title = 'taken'</script>" } });
        write_page(&place, &[evil]).unwrap();
        let page = fs::read_to_string(&place).unwrap();
        assert_eq!(page.matches("</script>").count(), PAGE.matches("</script>").count());
    }
}
