//! The output of the tool if standard error is a terminal.

use crate::test_dirs;
use pelton_testkit::{Process, ProgramDirs, wait_for_readable};
use rustix::process::Signal;
use std::fs::File;
use std::io::Read as _;
use std::os::fd::{AsFd as _, FromRawFd as _};

/// A pseudo-terminal: the master, and the slave for a program.
fn terminal() -> (File, File) {
    let (mut master, mut slave) = (-1, -1);
    let none = std::ptr::null_mut();
    // SAFETY: both out-pointers are to live integers; openpty accepts null for the name, the settings and the size.
    assert_eq!(unsafe { libc::openpty(&mut master, &mut slave, none, none.cast(), none.cast()) }, 0);
    // SAFETY: openpty has opened both descriptors, and nothing else owns them.
    unsafe { (File::from_raw_fd(master), File::from_raw_fd(slave)) }
}

/// Starts the command on a terminal, waits until it has printed all of `wanted`, and interrupts it.
fn assert_prints(dirs: &ProgramDirs, arguments: &[&str], wanted: &[&str]) {
    let (mut master, slave) = terminal();
    let mut command = dirs.command(arguments);
    command.stderr(slave);
    let process = Process::start(command);
    let mut text = String::new();
    while !wanted.iter().all(|part| text.contains(part)) {
        wait_for_readable(&[master.as_fd()], &format!("{arguments:?} to print {wanted:?}, not {text:?}"));
        let mut bytes = [0; 4096];
        let read = master.read(&mut bytes).unwrap();
        text.push_str(std::str::from_utf8(&bytes[..read]).unwrap());
    }
    assert_eq!(text.matches("waiting for").count(), 1, "{text:?}");
    process.signal(Signal::INT);
    process.finish();
}

#[test]
fn a_waiting_command_prints_what_it_waits_for() {
    let dirs = test_dirs();
    let directory = format!("path:{}", dirs.path("work/channel").display());
    assert_prints(&dirs, &["recv", "nobody"], &["waiting for a sender on `nobody`"]);
    assert_prints(&dirs, &["send", "nobody"], &["waiting for a receiver that listens", "on `nobody`"]);
    assert_prints(&dirs, &["recv", &directory], &["waiting for messages on `path:"]);
    assert_prints(&dirs, &["flush", &directory, "-"], &["waiting for messages on `path:"]);
    assert_prints(&dirs, &["recv", "--follow", "nobody"], &["waiting for messages on `nobody`"]);
}

#[test]
fn a_second_sender_reports_that_the_receiver_has_a_sender() {
    let dirs = test_dirs();
    let receiver = dirs.start(&["recv", "taken"]);
    let mut first = dirs.start(&["send", "taken"]);
    first.write(b"hello\n");
    assert_eq!(receiver.line(), "hello");
    assert_prints(&dirs, &["send", "taken"], &["has no sender yet (`recv --follow` takes many) on `taken`"]);
}
