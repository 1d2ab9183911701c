//! The built program as a child process, with directories of its own.

use pelton_testkit::{Ended, Process};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Directories of a test's own, for whatever the program leaves in the user's.
pub struct Place {
    root: TempDir,
}

impl Place {
    pub fn new() -> Place {
        let root = TempDir::new().unwrap();
        for name in ["run", "tmp", "cache", "work"] {
            std::fs::create_dir(root.path().join(name)).unwrap();
        }
        // as a runtime directory has to be
        std::fs::set_permissions(root.path().join("run"), std::fs::Permissions::from_mode(0o700)).unwrap();
        Place { root }
    }

    /// The program with `arguments`, living in this place.
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

    /// Runs to the end without input.
    pub fn run(&self, arguments: &[&str]) -> Ended {
        self.start(arguments).finish()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// A file in the working directory.
    pub fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.path("work").join(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    /// Fails if a socket, or anything in the temporary directory, is left.
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

/// What a process wrote to its standard output, which is JSON.
#[track_caller]
pub fn json(ended: &Ended) -> serde_json::Value {
    serde_json::from_slice(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended:?}"))
}
