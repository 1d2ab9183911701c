//! The log: what it has, and that it has nothing else.

use crate::support::raw::*;
use crate::support::*;
use pelton::Options;
use pelton_testkit::log::Kept;
use std::path::Path;

#[test]
fn a_refused_peer_is_logged_with_its_process_user_and_reason_and_nothing_else_is() {
    let kept = Kept::start();
    let dir = TestDir::new("a refused peer is logged");
    let mut receiver = Options::new().gather_at(&dir.name()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| Options::new().connect_sender(&dir.name()).unwrap().send(b"hello").unwrap());
        assert_eq!(&*receiver.receive().unwrap(), b"hello");
    });
    let own =
        format!("refused the peer, process {} of uid {}: ", std::process::id(), rustix::process::geteuid().as_raw());
    let of_this_test =
        || kept.lines().into_iter().filter(|line| line.contains("a packet of 3 bytes")).collect::<Vec<_>>();
    assert_eq!(of_this_test(), Vec::<String>::new());
    let socket = raw_connect(Path::new(dir.name().trim_start_matches("unix:")));
    raw_send(&socket, b"bad", &[]);
    eventually("a refusal is logged", || {
        let _ = receiver.try_receive().unwrap();
        !of_this_test().is_empty()
    });
    assert_eq!(of_this_test(), [format!("WARN {own}a packet of 3 bytes came, wanted at least 80")]);
}
