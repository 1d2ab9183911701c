//! The log: what it has, and that it has nothing else. The processes of these tests have no other refusals.

use crate::support::raw::*;
use crate::support::*;
use pelton::{Options, Receiver};
use pelton_testkit::log::Kept;
use std::os::fd::AsFd;
use std::path::Path;

/// Not a test: the entry point of a child process. Without a role it does nothing.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    let (kept, name) = (Kept::start(), role.get("name"));
    let mut receiver = Options::new().gather_at(name).unwrap();
    let own = format!(
        "WARN refused the peer, process {} of uid {}: a packet of 3 bytes came, wanted at least 80",
        std::process::id(),
        rustix::process::geteuid().as_raw()
    );
    match role.get("role") {
        "refuse-one" => {
            std::thread::scope(|scope| {
                scope.spawn(|| Options::new().connect_sender(name).unwrap().send(b"hello").unwrap());
                assert_eq!(&*receiver.receive().unwrap(), b"hello");
            });
            assert_eq!(kept.lines(), Vec::<String>::new());
            refuse_one(&mut receiver, name);
            assert_eq!(kept.lines(), [own]);
        }
        "refuse-many" => {
            (0..REFUSALS).for_each(|_| refuse_one(&mut receiver, name));
            let before_the_end = kept.lines().len();
            drop(receiver);
            let lines = kept.lines();
            // The end has a line of its own for the last burst, unless the last refusal had a line.
            let refused = lines.iter().filter(|line| line.starts_with(&own)).count();
            assert!((1..REFUSALS).contains(&refused) && refused == before_the_end, "{lines:?}");
            let left_out = lines.iter().map(|line| {
                let others = line.strip_prefix(&own).or(line.strip_prefix("WARN a listener ends")).unwrap();
                if others.is_empty() {
                    return 0;
                }
                let number = others.strip_prefix(" (earlier refusals without a line: ").unwrap();
                number.strip_suffix(')').unwrap().parse::<usize>().unwrap()
            });
            assert_eq!(refused + left_out.sum::<usize>(), REFUSALS, "{lines:?}");
        }
        other => panic!("no role {other}"),
    }
}

/// Of each of a hundred a line would need a hundred seconds, more than a test may run.
const REFUSALS: usize = 100;

/// Connects, sends no packet of the protocol, and returns once the receiver has refused that.
fn refuse_one(receiver: &mut Receiver, name: &str) {
    let socket = raw_connect(Path::new(name.trim_start_matches("unix:")));
    raw_send(&socket, b"bad", &[]);
    eventually("the peer is refused", || {
        let _ = receiver.try_receive().unwrap();
        is_readable(socket.as_fd())
    });
    assert_eq!(kind_of(&raw_receive(&socket).0), REFUSED);
}

fn run(role: &'static str) {
    let dir = TestDir::new(role);
    Child::start(Role::new(child, role).with("name", dir.name())).wait_for_success();
}

#[test]
fn a_refused_peer_is_logged_with_its_process_user_and_reason_and_nothing_else_is() {
    run("refuse-one");
}

#[test]
fn many_refusals_have_few_lines_which_count_the_others() {
    run("refuse-many");
}
