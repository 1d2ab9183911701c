//! Invalid arguments, and the help texts.

use crate::test_dirs::TestDirs;

#[test]
fn invalid_arguments_are_refused_with_2() {
    let dirs = TestDirs::new();
    let refused: [(&[&str], &str); 23] = [
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
        (&["demo", "--systems", "pigeon"], "sock-stream-batched"),
        (&["torture", "--kills", "0"], "--kills"),
        (&["torture", "--kills", "5", "--minutes", "1"], "cannot be used with"),
        (&["torture", "--against", ""], "--against needs a program"),
        (&["torture", "--against", "no-such-program"], "`no-such-program` cannot be run"),
    ];
    for (arguments, words) in refused {
        dirs.run(arguments).assert(2, &[words]);
    }
    dirs.assert_nothing_left();
}

#[test]
fn the_help_of_each_command_lists_the_exit_codes() {
    let dirs = TestDirs::new();
    for arguments in [&["--help"][..], &["send", "--help"], &["recv", "--help"], &["demo", "--help"]] {
        let ended = dirs.run(arguments);
        ended.assert(0, &[]);
        let help = String::from_utf8(ended.stdout).unwrap();
        for words in ["Exit codes:", "130  interrupted", "143  terminated"] {
            assert!(help.contains(words), "{arguments:?}: `{words}` is missing in: {help}");
        }
        for hidden in ["demo-send", "torture-side"] {
            assert!(!help.contains(hidden), "{hidden} is an internal command: {help}");
        }
    }
}
