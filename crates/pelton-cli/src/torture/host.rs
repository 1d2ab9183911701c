//! The process that starts the sides of a storm, in this program and in the controls (`verify/controls`): the storm may not be
//! their parent, since some channels go only from a parent to its children.

use std::{
    io::{self, BufRead as _},
    process::{Child, Command, Stdio},
};

/// Starts this program with `side` and the plan for each plan on standard input, and answers the process's number; ends them all
/// when the input ends.
pub fn host(side: &str) -> io::Result<()> {
    let program = std::env::current_exe()?;
    let mut children: Vec<Child> = Vec::new();
    for line in io::stdin().lock().lines() {
        // Not before the next is asked for: until then the storm may still look for it by its number.
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
