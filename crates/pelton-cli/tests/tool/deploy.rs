//! The units of docs/guide/deploy.md: systemd's checker accepts them, and its program for trying socket units starts
//! what they start, at the first connection. Without systemd they are left out, which CI does not allow.

use crate::test_dirs;
use pelton_testkit::{Process, eventually};
use rustix::process::Signal;
use std::{
    collections::BTreeMap,
    process::{Command, Stdio},
};

const PAGE: &str = include_str!("../../../../docs/guide/deploy.md");
/// Where the units say that the tool is.
const INSTALLED: &str = "/usr/local/bin/pelton";

/// The units of the page, by name.
fn units() -> BTreeMap<&'static str, &'static str> {
    let blocks = PAGE.split("```ini\n# ").skip(1).map(|block| block.split("\n```").next().unwrap());
    blocks.map(|block| block.split_once('\n').unwrap()).collect()
}

fn has_systemd() -> bool {
    let found = Command::new("systemd-socket-activate").arg("--version").output().is_ok();
    assert!(found || std::env::var_os("PELTON_CI").is_none(), "systemd is missing: ./run installs it");
    if !found {
        println!("skipped: there is no systemd-socket-activate");
    }
    found
}

#[test]
fn systemd_accepts_the_units_of_the_guide() {
    if !has_systemd() {
        return;
    }
    let dirs = test_dirs();
    let paths = units().into_iter().map(|(name, text)| {
        assert!(!name.ends_with(".service") || text.contains(INSTALLED), "{name}: {text}");
        dirs.file(name, text.replace(INSTALLED, env!("CARGO_BIN_EXE_pelton")).as_bytes())
    });
    let paths: Vec<_> = paths.collect();
    assert!(paths.len() >= 5, "{paths:?}");
    let done = Command::new("systemd-analyze").args(["verify", "--man=no"]).args(paths).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success() && said.trim().is_empty(), "{said}");
}

#[test]
fn a_socket_unit_starts_its_service_at_the_first_connection() {
    if !has_systemd() {
        return;
    }
    let dirs = test_dirs();
    for (unit, peer, printed) in [("upper", ["call", "hello"], "HELLO"), ("events", ["send", ""], "hello")] {
        let (socket, service) = (units()[&*format!("{unit}.socket")], units()[&*format!("{unit}.service")]);
        let line = |text: &'static str, key: &str| text.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        let listens_at = line(socket, "ListenSequentialPacket=");
        let path = dirs.path("work").join(format!("{unit}.socket")).display().to_string();
        let command = line(service, "ExecStart=").replace(INSTALLED, env!("CARGO_BIN_EXE_pelton"));
        assert!(command.contains(listens_at), "{unit}: {command}");
        // The page's user is another one than this.
        let own = format!("--uid {}", rustix::process::getuid().as_raw());
        let command = command.replace(listens_at, &path).replace("--uid 33", &own);
        let mut activate = Command::new("sh");
        let script = format!("exec systemd-socket-activate --seqpacket -l {path} {command}");
        activate.args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let manager = Process::start(activate);
        eventually("systemd listens", || std::fs::exists(&path).unwrap());
        let comm = || std::fs::read_to_string(format!("/proc/{}/comm", manager.pid())).unwrap();
        assert_ne!(comm(), "pelton\n", "nobody has connected");
        let name = format!("unix:{path}");
        match peer {
            ["call", data] => {
                let called = dirs.run(&["call", "--timeout", "20", &name, data]);
                called.assert(0, &[]);
                assert_eq!(String::from_utf8(called.stdout).unwrap(), printed);
            }
            _ => {
                let mut sender = dirs.start(&["send", "--timeout", "20", &name]);
                sender.write(b"hello\n");
                assert_eq!(manager.line(), printed);
                sender.finish().assert(0, &[]);
            }
        }
        assert_eq!(comm(), "pelton\n");
        manager.signal(Signal::TERM);
        // As SuccessExitStatus of the units says.
        manager.wait().assert(143, &[]);
        let _ = std::fs::remove_file(&path);
    }
}
