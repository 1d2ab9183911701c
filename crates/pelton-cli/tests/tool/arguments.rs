//! Invalid arguments, and the help texts.

use crate::test_dirs;
use std::os::unix::fs::PermissionsExt as _;

#[test]
fn invalid_arguments_are_refused_with_2() {
    let dirs = test_dirs();
    let refused: [(&[&str], &str); 18] = [
        (&[], "Usage"),
        (&["shout"], "unrecognized subcommand"),
        (&["send"], "<NAME>"),
        (&["recv"], "<NAME>"),
        (&["send", "a", "--frame", "xml"], "lines, len32"),
        (&["send", "a", "--capacity", "much"], "want a number of bytes"),
        (&["send", "a", "--timeout", "soon"], "want seconds"),
        (&["recv", "a", "--count", "0"], "--count"),
        (&["recv", "a", "--capacity", "64M"], "--capacity is only for a channel in a directory"),
        (&["recv", "unix:a", "--follow", "--connect"], "leave --connect out"),
        (&["recv", "unix:a", "--lanes", "2"], "--lanes is only for a channel in a directory"),
        (&["send", "a", "--mode", "700"], "--mode is only for a channel in a directory"),
        (&["send", "a", "--lanes", "2"], "--lanes is only for a channel in a directory"),
        (&["send", "a", "--drain"], "--drain is only for a channel in a directory"),
        (&["send", "path:a", "--listen"], "--listen does not apply"),
        (&["recv", "path:a", "--connect"], "--connect does not apply"),
        (&["send", "path:a", "--mode", "rwx"], "permission bits in octal"),
        (&["send", "path:a", "--lanes", "0"], "--lanes"),
    ];
    for (arguments, words) in refused {
        dirs.run(arguments).assert(2, &[words]);
    }
    dirs.assert_nothing_left();
}

#[test]
fn the_help_of_each_command_lists_the_exit_codes() {
    let dirs = test_dirs();
    for arguments in [&["--help"][..], &["send", "--help"], &["recv", "--help"], &["conform", "--help"]] {
        let ended = dirs.run(arguments);
        ended.assert(0, &[]);
        let help = String::from_utf8(ended.stdout).unwrap();
        for words in ["Exit codes:", "130  interrupted", "143  terminated"] {
            assert!(help.contains(words), "{arguments:?}: `{words}` is missing in: {help}");
        }
        assert!(!help.contains("driver  "), "`driver` is an internal command: {help}");
    }
}

#[test]
fn bridge_executes_the_program_beside_it_or_on_the_path() {
    let here = tempfile::tempdir().unwrap();
    let own = here.path().join("bin/pelton");
    std::fs::create_dir_all(own.parent().unwrap()).unwrap();
    std::fs::copy(env!("CARGO_BIN_EXE_pelton"), &own).unwrap();
    let run = || {
        let mut command = std::process::Command::new(&own);
        command.args(["bridge", "out", "--help", "x"]).env("PATH", here.path());
        command.output().unwrap()
    };
    let missing = run();
    assert_eq!(missing.status.code(), Some(5));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("there is no `pelton-bridge`"), "{missing:?}");
    for place in ["pelton-bridge", "bin/pelton-bridge"] {
        let program = here.path().join(place);
        std::fs::write(&program, format!("#!/bin/sh\necho {place} \"$@\"\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(String::from_utf8_lossy(&run().stdout), format!("{place} out --help x\n"));
    }
}
