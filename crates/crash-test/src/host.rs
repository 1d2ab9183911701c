//! The process that starts the sides of a crash test, in this program and in the controls (`verify/controls`). The test
//! may not be their parent, because some channels work only from a parent to its children.

use std::{
    io::{self, BufRead as _},
    process::{Child, Command, Stdio},
};

/// Starts this program, with `side` and a plan, for each plan on standard input, and prints the number of the process.
/// Kills all of them when the input ends.
pub fn host(side: &str) -> io::Result<()> {
    let program = std::env::current_exe()?;
    let mut children: Vec<Child> = Vec::new();
    for line in io::stdin().lock().lines() {
        // Reaped only at the next plan: until then, the test may still use its number.
        children.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        let child = Command::new(&program).arg(side).arg(line?).stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
        println!("{}", child.id());
        children.push(child);
    }
    for mut child in children {
        let _ = child.kill();
        let _ = child.wait();
    }
    Ok(())
}
