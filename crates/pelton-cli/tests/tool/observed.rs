//! `ls`, `stat`, `top` and `doctor`: what they show of running channels. Other tests have channels of their own at the
//! same time, so each test selects its own name.

use crate::test_dirs;
use pelton_testkit::{Process, ProgramDirs, eventually, json, kernel};
use rustix::process::Signal;
use serde_json::Value;
use std::process::Command;

/// A channel of this name: a sender of one message, which a receiver has received. Both live on.
fn channel(dirs: &ProgramDirs, name: &str) -> (Process, Process) {
    let receiver = dirs.start(&["recv", name]);
    let mut sender = dirs.start(&["send", name]);
    sender.write(b"hello\n");
    assert_eq!(receiver.line(), "hello");
    (sender, receiver)
}

/// The object of a channel in the output of `ls --json`.
fn listed(dirs: &ProgramDirs, name: &str) -> Option<Value> {
    let found = json(&dirs.run(&["ls", "--json"]));
    found["channels"].as_array().unwrap().iter().find(|channel| channel["name"] == name).cloned()
}

#[test]
fn a_channel_is_listed_while_it_lives() {
    let dirs = test_dirs();
    let (sender, receiver) = channel(&dirs, "listed");
    let found = listed(&dirs, "listed").unwrap();
    assert_eq!((&found["kind"], &found["state"]), (&"connect".into(), &"ok".into()));
    assert_eq!((&found["receiver"]["pid"], &found["receiver"]["command"]), (&receiver.pid().into(), &"pelton".into()));
    assert_eq!(found["lanes"][0]["sender"]["pid"], sender.pid());
    assert_eq!((&found["messages"], &found["bytes"], &found["waiting_messages"]), (&1.into(), &5.into(), &0.into()));
    sender.finish().assert(0, &[]);
    receiver.finish().assert(0, &[]);
    assert_eq!(listed(&dirs, "listed"), None);
}

#[test]
fn a_service_and_its_replies_are_well_while_a_client_has_calls() {
    let dirs = test_dirs();
    let service = dirs.start(&["serve", "asked", "--echo"]);
    eventually("it listens", || listed(&dirs, "asked").is_some());
    let client = dirs.start(&["ping", "asked", "--interval", "0.05"]);
    assert!(client.line().contains("asked"));
    let found = json(&dirs.run(&["ls", "--json"]));
    let states: Vec<&Value> = (found["channels"].as_array().unwrap().iter())
        .filter(|channel| channel["name"] == "asked")
        .map(|channel| &channel["state"])
        .collect();
    assert!(states.len() == 2 && states.iter().all(|state| *state == "ok"), "{states:?}");
    dirs.run(&["doctor", "--channel", "asked"]).assert(0, &[]);
    client.signal(Signal::INT);
    client.wait().assert(130, &[]);
    service.signal(Signal::INT);
    let _ = service.wait();
}

#[test]
fn a_listener_without_a_peer_is_listed_without_a_connection_to_it() {
    let dirs = test_dirs();
    let receiver = dirs.start(&["recv", "alone"]);
    eventually("it listens", || listed(&dirs, "alone").is_some());
    let found = listed(&dirs, "alone").unwrap();
    assert_eq!((&found["kind"], &found["receiver"]["pid"]), (&"listener".into(), &receiver.pid().into()));
    receiver.signal(Signal::KILL);
    let _ = receiver.wait();
    assert_eq!(listed(&dirs, "alone"), None, "its socket is left, and nobody listens");
    std::fs::remove_dir_all(dirs.path("run/pelton")).unwrap();
}

#[test]
fn a_directory_without_processes_is_listed_below_a_root() {
    let dirs = test_dirs();
    let mut sender = dirs.start(&["send", "path:queue"]);
    sender.write(b"one\ntwo\n");
    sender.finish().assert(0, &[]);
    for arguments in [&["ls", "--json", "--root", "."][..], &["ls", "--json", "queue"]] {
        let found = json(&dirs.run(arguments));
        let is_it = |channel: &&Value| channel["name"].as_str().unwrap().ends_with("/work/queue");
        let queue = found["channels"].as_array().unwrap().iter().find(is_it).unwrap();
        assert_eq!((&queue["state"], &queue["waiting_messages"]), (&"nobody reads".into(), &2.into()));
    }
    let stat = dirs.run(&["stat", "./queue", "--interval", "0"]);
    stat.assert(0, &[]);
    let text = String::from_utf8(stat.stdout).unwrap();
    assert!(text.contains("; 1 lane;") && text.contains("sent      2 messages, 6 bytes;"), "{text}");
    // A tail, by the same names, and by another way to the directory.
    std::os::unix::fs::symlink("queue", dirs.path("work/link")).unwrap();
    for name in ["path:queue", "./queue", "link/", "path:link"] {
        let tail = dirs.run(&["tail", name, "--since-start", "-n", "1"]);
        tail.assert(0, &["1 message printed"]);
    }
}

#[test]
fn a_directory_that_is_no_channel_is_an_error() {
    let dirs = test_dirs();
    std::fs::create_dir(dirs.path("work/other")).unwrap();
    let mut sender = dirs.start(&["send", "path:queue"]);
    sender.write(b"one\n");
    sender.finish().assert(0, &[]);
    for (directory, reason) in [("other", "it is no channel"), ("missing", "there is no such directory")] {
        for json in [&[][..], &["--json"]] {
            let ended = dirs.run(&[&["ls", "queue", directory], json].concat());
            ended.assert(3, &[&format!("/work/{directory}: {reason}")]);
            // The others are listed, and standard output has nothing else.
            let text = String::from_utf8(ended.stdout).unwrap();
            assert!(text.contains("/work/queue") && !text.contains(reason), "{text}");
        }
    }
    for command in [&["ls"][..], &["stat", "name"], &["doctor", "--channel", "name"], &["top", "--json"]] {
        let ended = dirs.run(&[command, &["--root", "missing"]].concat());
        ended.assert(2, &["--root missing: ", "want a directory to search"]);
        assert!(ended.stdout.is_empty(), "{ended:?}");
    }
}

#[test]
fn a_pipe_gets_whole_names() {
    let dirs = test_dirs();
    let name = "a-name-that-is-much-longer-than-its-column-of-a-terminal";
    let _channel = channel(&dirs, name);
    let text = String::from_utf8(dirs.run(&["ls"]).stdout).unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    assert!(line.contains(" pelton ") && line.ends_with(" ok"), "{text}");
}

#[test]
fn a_name_with_control_characters_is_escaped() {
    let dirs = test_dirs();
    let name = format!("unix:{}", dirs.path("tmp/\x1b[2J\u{202e}").display());
    let (sender, receiver) = channel(&dirs, &name);
    let printed = dirs.run(&["ls"]);
    let text = String::from_utf8(printed.stdout).unwrap();
    // Of a long name the end is shown.
    assert!(text.contains("[2J\\u{202e}"), "{text}");
    assert!(!text.contains(['\x1b', '\u{202e}']), "{text:?}");
    drop((sender, receiver));
    let _ = std::fs::remove_file(name.strip_prefix("unix:").unwrap());
}

#[test]
fn stat_measures_rates_and_reports_a_missing_channel() {
    let dirs = test_dirs();
    let receiver = dirs.start(&["recv", "busy"]);
    let mut sender = dirs.start(&["send", "busy"]);
    sender.write(b"first\n");
    assert_eq!(receiver.line(), "first");
    // Both sides work throughout the interval: the input is a pipe that the other thread fills.
    let done = std::sync::atomic::AtomicBool::new(false);
    let found = std::thread::scope(|scope| {
        let done = &done;
        let sender = &mut sender;
        scope.spawn(move || {
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                sender.write(&b"more\n".repeat(1000));
            }
        });
        let found = json(&dirs.run(&["stat", "busy", "--json", "--interval", "0.5"]));
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        found
    });
    let rates = &found["lanes"][0]["per_second"];
    for rate in ["sent_messages", "sent_bytes", "received_messages", "received_bytes"] {
        assert!(rates[rate].as_f64().unwrap() > 0.0, "{rate}: {found}");
    }
    assert!(found["lanes"][0]["mean_delay_seconds"].as_f64().unwrap() > 0.0, "{found}");
    dirs.run(&["stat", "missing"]).assert(3, &["there is no channel missing"]);
    drop((sender, receiver));
}

#[test]
fn doctor_says_what_is_wrong_with_a_channel() {
    let dirs = test_dirs();
    let (mut sender, receiver) = channel(&dirs, "sick");
    let well = dirs.run(&["doctor", "--channel", "sick"]);
    assert_eq!(well.code(), Some(0), "{well:?}");
    receiver.signal(Signal::STOP);
    receiver.wait_for_state('T');
    sender.write(b"two\nthree\n");
    eventually("they wait", || listed(&dirs, "sick").unwrap()["waiting_messages"] == 2);
    let sick = dirs.run(&["doctor", "--channel", "sick"]);
    sick.assert(1, &["problem"]);
    let text = String::from_utf8(sick.stdout).unwrap();
    assert!(text.contains(&format!("receiver {} pelton is stopped", receiver.pid())), "{text}");
    assert!(text.contains("2 messages wait (32 bytes)"), "{text}");
    sender.signal(Signal::KILL);
    let _ = sender.wait();
    let sick = dirs.run(&["doctor", "--channel", "sick", "--json"]);
    let found: Value = serde_json::from_slice(&sick.stdout).unwrap();
    assert_eq!(found["channels"][0]["problems"].as_array().unwrap().len(), 2, "{found}");
    dirs.run(&["doctor", "--channel", "missing"]).assert(3, &[]);
}

#[test]
fn doctor_says_which_side_an_idle_channel_lacks() {
    let dirs = test_dirs();
    let idle = |name: &str| {
        eventually("it is idle", || listed(&dirs, name).is_some_and(|found| found["state"] == "idle"));
        let ended = dirs.run(&["doctor", "--channel", name]);
        ended.assert(0, &[]);
        String::from_utf8(ended.stdout).unwrap()
    };
    // Of a sender of many that was killed nothing is left.
    let receiver = dirs.start(&["recv", "--follow", "left"]);
    let mut sender = dirs.start(&["send", "left"]);
    sender.write(b"hello\n");
    assert_eq!(receiver.line(), "hello");
    sender.kill();
    assert!(idle("left").contains("nothing waits, and there is no sender: start one"));
    let _listens = dirs.start(&["recv", "unmet"]);
    assert!(idle("unmet").contains("nothing waits, and nobody is connected"));
}

#[test]
fn doctor_checks_the_machine() {
    let dirs = test_dirs();
    let whole = json(&dirs.run(&["doctor", "--json"]));
    let checks = whole["checks"].as_array().unwrap();
    let health = |what: &str, checks: &[Value]| {
        checks.iter().find(|check| check["what"] == what).unwrap_or_else(|| panic!("{what}"))["health"].clone()
    };
    for what in ["kernel", "memfd and seals", "pidfd", "runtime directory"] {
        assert_eq!(health(what, checks), "ok", "{checks:?}");
    }
    // What is wrong is found: a directory that others may enter, and too few descriptors.
    std::fs::create_dir_all(dirs.path("run/pelton")).unwrap();
    let others = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(dirs.path("run/pelton"), others).unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 32; exec \"$0\" doctor --json", env!("CARGO_BIN_EXE_pelton")]);
    command.env("XDG_RUNTIME_DIR", dirs.path("run"));
    let broken = command.output().unwrap();
    assert_eq!(broken.status.code(), Some(1));
    let found: Value = serde_json::from_slice(&broken.stdout).unwrap();
    for what in ["runtime directory", "descriptors"] {
        assert_eq!(health(what, found["checks"].as_array().unwrap()), "broken", "{found}");
    }
}

/// A terminal of 80 columns and 24 lines, in tmux.
struct Tmux<'a> {
    dirs: &'a ProgramDirs,
}

impl<'a> Tmux<'a> {
    /// Runs the tool there, by `how` (`exec`). `None` without tmux, which `./run` installs.
    fn start(dirs: &'a ProgramDirs, how: &str, command: &str) -> Option<Tmux<'a>> {
        if Command::new("tmux").arg("-V").output().is_err() {
            println!("skipped: there is no tmux");
            return None;
        }
        let tmux = Tmux { dirs };
        let runtime = dirs.path("run");
        let tool = env!("CARGO_BIN_EXE_pelton");
        let line = format!("export XDG_RUNTIME_DIR={}; {how} {tool} {command}", runtime.display());
        tmux.run(&["new-session", "-d", "-x", "80", "-y", "24", &line]);
        Some(tmux)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("tmux");
        // Nothing of the user's settings, or of a tmux around this one.
        command.env_remove("TMUX").env("TERM", "xterm-256color").env("NO_COLOR", "1").env("LC_ALL", "C.UTF-8");
        command.arg("-S").arg(self.dirs.path("work/tmux")).args(["-f", "/dev/null"]).args(arguments);
        command
    }

    #[track_caller]
    fn run(&self, arguments: &[&str]) -> String {
        let done = self.command(arguments).output().unwrap();
        assert!(done.status.success(), "{arguments:?}: {done:?}");
        String::from_utf8(done.stdout).unwrap()
    }

    fn keys(&self, keys: &[&str]) {
        self.run(&[&["send-keys"], keys].concat());
    }

    fn screen(&self) -> String {
        self.run(&["capture-pane", "-p"])
    }

    /// Waits until the screen shows all of it, and returns the screen.
    #[track_caller]
    fn wait_for(&self, wanted: &[&str]) -> String {
        let mut screen = String::new();
        eventually(&format!("the screen shows {wanted:?}"), || {
            screen = self.screen();
            wanted.iter().all(|text| screen.contains(text))
        });
        screen
    }

    /// The process on the terminal.
    fn pid(&self) -> u32 {
        self.run(&["list-panes", "-F", "#{pane_pid}"]).trim().parse().unwrap()
    }
}

impl Drop for Tmux<'_> {
    fn drop(&mut self) {
        let _ = self.command(&["kill-server"]).output();
        let _ = std::fs::remove_file(self.dirs.path("work/tmux"));
    }
}

#[test]
fn top_shows_channels_on_80_columns_and_follows_its_keys() {
    let dirs = test_dirs();
    let (first, mut second) = (channel(&dirs, "screen-one"), channel(&dirs, "screen-two"));
    first.1.signal(Signal::STOP);
    let Some(tmux) = Tmux::start(&dirs, "exec", "top") else { return };
    let screen = tmux.wait_for(&["NAME", "MSG/S", " DELAY FULL", "STATE", "F10 Quit", "screen-one", "screen-two"]);
    assert!(screen.lines().all(|line| line.chars().count() <= 80), "{screen}");
    let line = screen.lines().find(|line| line.starts_with("screen-one")).unwrap();
    assert!(line.contains("connect") && line.trim_end().ends_with("receiver stopped"), "{line}");
    // The delay of one that receives, in its column of 80; the other receives nothing.
    let mut screen = String::new();
    eventually("the delay is shown", || {
        second.0.write(b"again\n");
        assert_eq!(second.1.line(), "again");
        screen = tmux.screen();
        let line = |name: &str| screen.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        let at = line("NAME").find(" DELAY FULL").expect("the column of the delay");
        let cell = |name: &str| line(name).get(at..at + " DELAY".len()).unwrap_or_default();
        cell("screen-one") == "     -" && ["ns", "us", "ms"].iter().any(|unit| cell("screen-two").ends_with(unit))
    });
    // Without colour there is none, only what shows the cursor.
    let escaped = tmux.run(&["capture-pane", "-p", "-e"]);
    assert!(["31", "33"].iter().all(|colour| !escaped.contains(&format!("\x1b[{colour}m"))), "{escaped:?}");
    // The filter, and what it hides.
    tmux.keys(&["F4"]);
    tmux.wait_for(&["Filter: "]);
    tmux.keys(&["SCREEN-TWO", "Enter"]);
    let screen = tmux.wait_for(&["only *SCREEN-TWO*", "F4 Filter"]);
    assert!(!screen.contains("screen-one"), "{screen}");
    // The channel, opened, with its lane and its history.
    tmux.keys(&["Enter"]);
    let screen = tmux.wait_for(&["screen-two, connect", "LANE", "Esc Back", "messages/s, at most"]);
    assert!(screen.contains(&format!("receiver {} pelton", second.1.pid())), "{screen}");
    // Escape leaves the channel first, and then the filter.
    tmux.keys(&["Escape"]);
    tmux.wait_for(&["only *SCREEN-TWO*", "F4 Filter"]);
    tmux.keys(&["Escape"]);
    let screen = tmux.wait_for(&["screen-one", "F4 Filter"]);
    assert!(!screen.contains("only *"), "{screen}");
    // A narrow window leaves columns out, not the name or the state.
    tmux.run(&["resize-window", "-x", "44", "-y", "12"]);
    let screen = tmux.wait_for(&["NAME", "MSG/S", "screen-one", "receiver stopped"]);
    assert!(!screen.contains("SLP/S") && !screen.contains("KIND"), "{screen}");
    tmux.keys(&["F4"]);
    tmux.keys(&["screen-two", "Enter"]);
    eventually("the filter applies", || !tmux.screen().contains("screen-one"));
    tmux.keys(&["Enter"]);
    tmux.wait_for(&["screen-two, connect"]);
    // A smaller terminal, and a larger one.
    for (width, height) in [("60", "12"), ("120", "40")] {
        tmux.run(&["resize-window", "-x", width, "-y", height]);
        eventually("it fills the terminal", || {
            let screen = tmux.screen();
            let lines: Vec<&str> = screen.lines().collect();
            lines.len().to_string() == height && lines.last().is_some_and(|line| line.contains("Esc Back"))
        });
    }
    tmux.keys(&["Escape"]);
    tmux.keys(&["Z"]);
    tmux.wait_for(&["PAUSED"]);
    tmux.keys(&["Z", ">"]);
    let screen = tmux.wait_for(&["by bytes/s"]);
    assert!(!screen.contains("PAUSED"), "{screen}");
    tmux.keys(&[">", ">"]);
    tmux.wait_for(&["by delay"]);
    tmux.keys(&["h"]);
    tmux.wait_for(&["Nothing of a channel changes"]);
    let pid = tmux.pid();
    tmux.keys(&["q"]);
    eventually("it quits", || kernel::state_of(pid).is_none());
}

#[test]
fn top_ends_with_its_terminal() {
    let dirs = test_dirs();
    let _channel = channel(&dirs, "hung-up");
    let Some(tmux) = Tmux::start(&dirs, "exec", "top") else { return };
    tmux.wait_for(&["hung-up"]);
    let pid = tmux.pid();
    drop(tmux);
    eventually("it ends", || kernel::state_of(pid).is_none());
}

#[test]
fn ls_fits_a_terminal_of_80_columns_and_top_wants_one() {
    let dirs = test_dirs();
    let _channel = channel(&dirs, "a-very-long-name-of-a-channel-that-does-not-fit-into-its-column");
    dirs.run(&["top"]).assert(2, &["needs a terminal"]);
    let Some(tmux) = Tmux::start(&dirs, "", "ls; exec sleep 60") else { return };
    let screen = tmux.wait_for(&["NAME", "STATE", "its-column"]);
    let line = screen.lines().find(|line| line.contains("its-column")).unwrap();
    assert!(line.starts_with('…') && line.trim_end().ends_with("ok"), "{line}");
}
