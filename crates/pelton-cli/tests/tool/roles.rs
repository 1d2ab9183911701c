//! A role of a path channel that another process has: `--timeout` waits for it.

use crate::test_dirs;
use rustix::process::Signal;

#[test]
fn a_timeout_waits_for_a_role_until_its_holder_ends() {
    for how in [Signal::KILL, Signal::INT] {
        let dirs = test_dirs();
        let name = format!("path:{}", dirs.path("run").join("channel").display());
        let mut sender = dirs.start(&["send", &name]);
        let holder = dirs.start(&["recv", &name]);
        sender.write(b"first\n");
        assert_eq!(holder.line(), "first");
        let waiting = dirs.start(&["recv", &name, "--timeout", "60"]);
        // Without the option a receiver gives up after a while, which the other outlasts.
        dirs.start(&["recv", &name]).finish().assert(3, &["receiver", &format!("process {}", holder.pid())]);
        holder.signal(how);
        let _ = holder.wait();
        sender.write(b"second\n");
        assert_eq!(waiting.line(), "second");
        waiting.signal(Signal::INT);
        let _ = waiting.wait();
        let _ = sender.finish();
        std::fs::remove_dir_all(dirs.path("run").join("channel")).unwrap();
        dirs.assert_nothing_left();
    }
}

#[test]
fn a_timeout_that_passes_while_a_role_is_taken_reports_the_holder_and_a_signal_ends_it() {
    let dirs = test_dirs();
    let name = format!("path:{}", dirs.path("run").join("channel").display());
    let receiver = dirs.start(&["recv", &name]);
    let mut sender = dirs.start(&["send", &name]);
    sender.write(b"hello\n");
    assert_eq!(receiver.line(), "hello");
    let second = dirs.start(&["send", &name, "--timeout", "0.3"]);
    second.finish().assert(3, &["sender", &format!("process {}", sender.pid())]);
    let waiting = dirs.start(&["send", &name, "--timeout", "60"]);
    waiting.wait_for_state('S');
    waiting.signal(Signal::INT);
    assert_ne!(waiting.wait().code(), Some(0));
    sender.finish().assert(0, &[]);
    receiver.finish().assert(0, &[]);
    std::fs::remove_dir_all(dirs.path("run").join("channel")).unwrap();
    dirs.assert_nothing_left();
}
