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
