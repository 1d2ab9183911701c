//! A built program as a child process, with directories of the test in place of those of the user.

use crate::{Ended, Process};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// A program, and the directories of one test.
pub struct ProgramDirs {
    program: &'static str,
    root: TempDir,
}

impl ProgramDirs {
    /// Creates the directories. `program` is `env!("CARGO_BIN_EXE_…")`.
    pub fn new(program: &'static str) -> ProgramDirs {
        let root = TempDir::new().unwrap();
        for name in ["run", "tmp", "cache", "work"] {
            std::fs::create_dir(root.path().join(name)).unwrap();
        }
        // As required of a runtime directory.
        std::fs::set_permissions(root.path().join("run"), std::fs::Permissions::from_mode(0o700)).unwrap();
        ProgramDirs { program, root }
    }

    /// The program with `arguments`, in these directories.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.program);
        command.args(arguments).current_dir(self.path("work"));
        command.env("XDG_RUNTIME_DIR", self.path("run")).env("TMPDIR", self.path("tmp"));
        command.env("XDG_CACHE_HOME", self.path("cache"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Starts the program with `arguments`.
    pub fn start(&self, arguments: &[&str]) -> Process {
        Process::start(self.command(arguments))
    }

    /// Runs the program to its end without input.
    pub fn run(&self, arguments: &[&str]) -> Ended {
        self.start(arguments).finish()
    }

    /// The path of a file in these directories: `work/…`, `tmp/…`, `run/…`, `cache/…`.
    pub fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// Creates a file in the working directory.
    pub fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.path("work").join(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    /// Fails if a socket is left, or a file in the temporary directory.
    pub fn assert_nothing_left(&self) {
        fn visit(directory: &Path, left: &mut Vec<PathBuf>) {
            for entry in std::fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                let file_type = std::fs::symlink_metadata(&path).unwrap().file_type();
                if file_type.is_dir() {
                    visit(&path, left);
                } else if file_type.is_socket() {
                    left.push(path);
                }
            }
        }
        let mut left: Vec<PathBuf> =
            std::fs::read_dir(self.path("tmp")).unwrap().map(|entry| entry.unwrap().path()).collect();
        visit(self.root.path(), &mut left);
        assert!(left.is_empty(), "left behind: {left:?}");
    }
}

/// The standard output of a process, as JSON.
#[track_caller]
pub fn json(ended: &Ended) -> serde_json::Value {
    serde_json::from_slice(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended:?}"))
}
