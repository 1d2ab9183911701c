//! The built program as a child process, with directories of the test.

use pelton_testkit::{Ended, Process};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Directories of one test, in place of the directories of the user.
pub struct TestDirs {
    root: TempDir,
}

impl TestDirs {
    pub fn new() -> TestDirs {
        let root = TempDir::new().unwrap();
        for name in ["run", "tmp", "cache", "work"] {
            std::fs::create_dir(root.path().join(name)).unwrap();
        }
        // As required of a runtime directory.
        std::fs::set_permissions(root.path().join("run"), std::fs::Permissions::from_mode(0o700)).unwrap();
        TestDirs { root }
    }

    /// The program with `arguments`, in these directories.
    pub fn pelton(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pelton"));
        command.args(arguments).current_dir(self.path("work"));
        command.env("XDG_RUNTIME_DIR", self.path("run")).env("TMPDIR", self.path("tmp"));
        command.env("XDG_CACHE_HOME", self.path("cache"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub fn start(&self, arguments: &[&str]) -> Process {
        Process::start(self.pelton(arguments))
    }

    /// Runs the program to its end without input.
    pub fn run(&self, arguments: &[&str]) -> Ended {
        self.start(arguments).finish()
    }

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
