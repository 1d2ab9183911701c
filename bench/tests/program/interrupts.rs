//! However the program ends, no process and no file of it remains. The tests find its processes by an environment
//! variable that only they have.

use std::{
    fs,
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use pelton_testkit::{eventually, kernel};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::command::{PROGRAM, figure, has, lines, script};

/// The program, and the directory of its own in which it makes its files.
struct Running {
    program: Child,
    directory: TempDir,
}

/// A measurement long enough for the test to end it. DIR in the command is that directory.
fn start(command: &str) -> Running {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().to_str().unwrap();
    let program = Command::new(PROGRAM)
        .args(command.split(' ').map(|word| word.replace("DIR", place)))
        .env("TMPDIR", place)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    Running { program, directory }
}

fn stream(system: &str) -> Running {
    start(&format!("stream --count 2000000000 --runs 1 --wait block --systems {system}"))
}

impl Running {
    /// The directories in /proc of the program's processes.
    fn processes(&self) -> Vec<PathBuf> {
        let mark = format!("TMPDIR={}\0", self.directory.path().display());
        let is_marked = |path: &PathBuf| {
            let environment = fs::read(path.join("environ")).unwrap_or_default();
            environment.windows(mark.len()).any(|window| window == mark.as_bytes())
        };
        fs::read_dir("/proc").unwrap().filter_map(|entry| Some(entry.ok()?.path())).filter(is_marked).collect()
    }

    /// Waits until so many run; or the program has exited and waits for its parent. (Not by an empty environment: a
    /// starting process has one, too.)
    fn until_processes(&self, number: usize) {
        eventually("all processes run", || {
            self.processes().len() >= number || kernel::state_of(self.program.id()) == Some('Z')
        });
    }

    /// The run's directory in shared memory, which the sides of some systems have in their arguments.
    fn in_shared_memory(&self) -> Option<PathBuf> {
        self.processes().iter().find_map(|process| {
            let arguments = String::from_utf8_lossy(&fs::read(process.join("cmdline")).ok()?).into_owned();
            let at = arguments.find("/dev/shm/pelton-bench-")?;
            arguments[at..].split('"').next().map(PathBuf::from)
        })
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.program), signal).unwrap();
    }

    /// After an interrupt the program ends by itself, with everything that it has started and made.
    fn ends_by_an_interrupt(mut self, can_be_skipped: bool) {
        self.signal(Signal::INT);
        let status = self.program.wait().unwrap();
        assert!(status.code() == Some(130) || can_be_skipped, "{status}");
        eventually("no process is left", || self.processes().is_empty());
        assert_eq!(fs::read_dir(self.directory.path()).unwrap().count(), 0);
    }
}

/// The program and the two sides, or limits.c's two and the one that starts them.
const SIDES: [(&str, usize); 2] = [("pipe", 3), ("limits", 4)];

#[test]
fn an_interrupt_ends_all_and_removes_the_directory() {
    for (system, processes) in SIDES {
        let running = stream(system);
        running.until_processes(processes);
        // If limits.c cannot run, the program has exited before, with nothing measured.
        running.ends_by_an_interrupt(system == "limits");
    }
}

#[test]
fn an_interrupted_append_leaves_no_file() {
    // More messages than there is time for.
    let running = start("append --file DIR --count 1000000000 --runs 1");
    let has_file = |entry: fs::DirEntry| entry.path().join("records").exists();
    eventually("there is a file", || {
        fs::read_dir(running.directory.path()).unwrap().any(|entry| entry.is_ok_and(has_file))
    });
    running.ends_by_an_interrupt(false);
}

#[test]
fn an_interrupted_flood_ends() {
    for system in ["pelton", "sock-stream"] {
        let running = start(&format!("call --beside-flood --count 2000000000 --runs 1 --systems {system}"));
        running.until_processes(4);
        running.ends_by_an_interrupt(false);
    }
}

#[test]
fn the_processes_of_a_killed_program_end_too() {
    let python = has("python3", "a system in Python").then_some(("multiprocessing-pipe", 3));
    for (system, processes) in SIDES.into_iter().chain(python) {
        let mut running = stream(system);
        running.until_processes(processes);
        // The killed program cannot remove it.
        let mut shared = None;
        eventually("a side has its directory in shared memory", || {
            shared = running.in_shared_memory();
            shared.is_some() || system != "multiprocessing-pipe"
        });
        running.signal(Signal::KILL);
        let status = running.program.wait().unwrap();
        assert!(status.signal() == Some(9) || system == "limits", "{system}: {status}");
        eventually("no process is left", || running.processes().is_empty());
        shared.map(fs::remove_dir_all).transpose().unwrap();
    }
}

#[test]
fn an_interrupt_during_a_build_starts_no_other_build() {
    let directory = tempfile::tempdir().unwrap();
    let [cargo, asked, go_on] = ["cargo", "asked", "go-on"].map(|name| directory.path().join(name));
    // The program announces its call, and waits for the signal, or the test has failed.
    let text = format!(
        "echo \"$@\" >>'{}'\nn=0\nwhile [ ! -e '{}' ] && [ $n -lt 6000 ]; do n=$((n + 1)); sleep 0.01; done\nexit 101",
        asked.display(),
        go_on.display()
    );
    script(&cargo, &text);
    let program = Command::new(PROGRAM)
        .args(["stream", "--count", "500", "--runs", "1", "--systems", "ipc_ring,ipmpsc,pipe"])
        .env("CARGO", &cargo)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    eventually("something is built", || fs::read_to_string(&asked).is_ok_and(|text| text.ends_with('\n')));
    kill_process(Pid::from_child(&program), Signal::INT).unwrap();
    fs::write(&go_on, "").unwrap();
    let output = program.wait_with_output().unwrap();
    let asked = fs::read_to_string(&asked).unwrap();
    assert_eq!((asked.lines().count(), output.status.code()), (1, Some(130)), "{asked}{output:?}");
    assert!(!String::from_utf8_lossy(&output.stderr).contains("is skipped"), "{output:?}");
}

#[test]
fn parts_finished_before_an_interrupt_are_in_the_results() {
    let mut running = start("all --only lopsided --results DIR/r.jsonl");
    let results = running.directory.path().join("r.jsonl");
    // The file exists after the first part: the signal falls between the two, or at the start of the second.
    eventually("the first part is measured", || {
        assert!(running.program.try_wait().unwrap().is_none());
        results.exists()
    });
    running.signal(Signal::INT);
    let status = running.program.wait().unwrap();
    let lines = lines(&fs::read(&results).unwrap());
    assert_eq!(status.code(), Some(130), "{status}");
    assert_eq!(lines[0]["machine"]["interrupted"], true);
    assert!(figure(&lines[1], "share_of_own_speed") > 0.0, "{}", lines[1]);
}
