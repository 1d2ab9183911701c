//! Test support for several crates. It depends on no crate of pelton, so each of them may use it.
//!
//! - [`child`]: the test binary again, as a child process with a role;
//! - [`process`]: any program as a child process, and its output;
//! - [`program_dirs`]: a built program, with directories of the test;
//! - [`mod@deadline`]: waits that end in a failure instead of a hang;
//! - [`test_dir`]: temporary directories, mounts, and new entries of a directory;
//! - [`kernel`]: the kernel's view of a process or a thread, and its processors;
//! - [`mod@log`]: what the libraries log;
//! - [`seccomp`]: system calls that fail;
//! - [`random`]: the one random generator of the tests.

pub mod child;
pub mod deadline;
pub mod kernel;
pub mod log;
pub mod process;
pub mod program_dirs;
pub mod random;
pub mod seccomp;
pub mod test_dir;

pub use child::{Child, Role, read_line_from_parent, report, this_program};
pub use deadline::{
    DEADLINE, Watchdog, deadline, eventually, eventually_is, is_readable, readable, readable_until, wait_for_readable,
};
pub use kernel::{descriptors, is_root, mappings, this_thread, wait_until_thread_polls};
pub use process::{Ended, Process};
pub use program_dirs::{ProgramDirs, json};
pub use random::Random;
pub use test_dir::{Mounted, NewEntry, TestDir};
