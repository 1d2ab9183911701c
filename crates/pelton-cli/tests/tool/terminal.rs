//! What the tool prints where standard error is a terminal.

use crate::place::Place;
use pelton_testkit::{Process, wait_for_readable};
use rustix::process::Signal;
use std::fs::File;
use std::io::Read as _;
use std::os::fd::{AsFd as _, FromRawFd as _};

/// A terminal: this side, and the one that a program gets.
fn terminal() -> (File, File) {
    let (mut master, mut slave) = (-1, -1);
    let none = std::ptr::null_mut();
    // SAFETY: two places for the numbers; no name, settings or size are asked for.
    assert_eq!(unsafe { libc::openpty(&mut master, &mut slave, none, none.cast(), none.cast()) }, 0);
    // SAFETY: openpty has just opened both, and nothing else has the numbers.
    unsafe { (File::from_raw_fd(master), File::from_raw_fd(slave)) }
}

/// Starts the command at a terminal, waits until it has printed all of `wanted`, and interrupts it.
fn assert_prints(place: &Place, arguments: &[&str], wanted: &[&str]) {
    let (mut shown, given) = terminal();
    let mut command = place.pelton(arguments);
    command.stderr(given);
    let process = Process::start(command);
    let mut text = String::new();
    while !wanted.iter().all(|part| text.contains(part)) {
        wait_for_readable(&[shown.as_fd()], &format!("{arguments:?} to print {wanted:?}, not {text:?}"));
        let mut bytes = [0; 4096];
        let read = shown.read(&mut bytes).unwrap();
        text.push_str(std::str::from_utf8(&bytes[..read]).unwrap());
    }
    assert_eq!(text.matches("waiting for").count(), 1, "{text:?}");
    process.signal(Signal::INT);
    process.finish();
}

#[test]
fn a_command_that_waits_says_what_for() {
    let place = Place::new();
    let directory = format!("path:{}", place.path("work/channel").display());
    assert_prints(&place, &["recv", "nobody"], &["waiting for a sender on `nobody`"]);
    assert_prints(&place, &["send", "nobody"], &["waiting for a receiver that listens", "on `nobody`"]);
    assert_prints(&place, &["recv", &directory], &["waiting for messages on `path:"]);
    assert_prints(&place, &["flush", &directory, "-"], &["waiting for messages on `path:"]);
    assert_prints(&place, &["recv", "--follow", "nobody"], &["waiting for messages on `nobody`"]);
}

#[test]
fn a_second_sender_says_that_the_receiver_has_one() {
    let place = Place::new();
    let receiver = place.start(&["recv", "taken"]);
    let mut first = place.start(&["send", "taken"]);
    first.write(b"hello\n");
    assert_eq!(receiver.line(), "hello");
    assert_prints(&place, &["send", "taken"], &["has no sender yet (`recv --follow` takes many) on `taken`"]);
}
