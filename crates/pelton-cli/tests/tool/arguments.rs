//! Invalid arguments, and the help texts.

use crate::test_dirs;

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
fn the_help_of_each_command_has_its_own_exit_codes() {
    let dirs = test_dirs();
    let help = |arguments: &[&str]| {
        let ended = dirs.run(arguments);
        ended.assert(0, &[]);
        String::from_utf8(ended.stdout).unwrap()
    };
    for (arguments, present, absent) in [
        (&["--help"][..], &["\n    6  call: the service failed", "\n  130  interrupted"][..], None),
        (&["send", "--help"], &["\n    1  the other side died", "\n  143  terminated"], Some("\n    6  ")),
        (&["recv", "--help"], &["\n    4  timed out", "\n  130  interrupted"], Some("\n    6  ")),
        (&["call", "--help"], &["\n    6  the service failed the call"], Some("is torn")),
        (&["ls", "--help"], &["\n    3  there is no such channel"], Some("\n  130  ")),
        (&["conform", "--help"], &["\n    1  an exchange failed"], Some("\n    6  ")),
    ] {
        let help = help(arguments);
        assert!(help.contains("\nExit codes:\n    0  done\n"), "{help}");
        for words in present {
            assert!(help.contains(words), "{arguments:?}: `{words}` is missing in: {help}");
        }
        assert!(absent.is_none_or(|words| !help.contains(words)), "{arguments:?}: `{absent:?}` is in: {help}");
        assert!(!help.contains("driver  "), "`driver` is an internal command: {help}");
    }
    // The words of the texts are explained. Where lines break depends on the terminal.
    for (command, words) in [
        ("stat", &["lane what", "waits messages", "waited how", "slept how", "rang how"][..]),
        ("tail", &["`?` behind the number", "`N missed` counts"]),
        ("recv", &["refuse the option"]),
    ] {
        let help = help(&[command, "--help"]);
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        for words in words {
            assert!(help.contains(words), "{command}: {words}: {help}");
        }
    }
}

#[test]
fn bridge_executes_the_program_beside_it_or_on_the_path() {
    let here = tempfile::tempdir().unwrap();
    // A child writes the programs. If this process did, a child that another test forks meanwhile would have them open
    // for writing, and they could not be executed.
    let shell = |script: &str, argument: &str| {
        let mut command = std::process::Command::new("sh");
        command.args(["-c", script, argument]).current_dir(here.path());
        assert!(command.status().unwrap().success(), "{script}");
    };
    shell("mkdir bin && cp \"$0\" bin/pelton", env!("CARGO_BIN_EXE_pelton"));
    let own = here.path().join("bin/pelton");
    let run = || {
        let mut command = std::process::Command::new(&own);
        command.args(["bridge", "out", "--help", "x"]).env("PATH", here.path());
        command.output().unwrap()
    };
    let missing = run();
    assert_eq!(missing.status.code(), Some(5));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("there is no `pelton-bridge`"), "{missing:?}");
    for place in ["pelton-bridge", "bin/pelton-bridge"] {
        shell("printf '#!/bin/sh\\necho %s \"$@\"\\n' \"$0\" > \"$0\" && chmod 755 \"$0\"", place);
        assert_eq!(String::from_utf8_lossy(&run().stdout), format!("{place} out --help x\n"));
    }
}
