//! Where membarrier is refused, by a seccomp filter, both sides fence instead, and no wake-up is lost.

mod support;

use support::Role;
use support::race::{Race, race, refuse_membarrier};

/// Not a test: what a child does. Without a role it does nothing.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    race(&role, refuse_membarrier);
}

/// Of the sender, which listens, and the receiver.
#[track_caller]
fn exchange(refused: [&'static str; 2]) {
    for wanted in ["message", "room"] {
        Race { processes: true, path: false, wanted, refused }.must_not_lose(4_000);
    }
}

#[test]
fn no_wake_up_is_lost_when_the_listening_side_has_no_membarrier() {
    exchange(["before", ""]);
}

#[test]
fn no_wake_up_is_lost_when_the_connecting_side_has_no_membarrier() {
    exchange(["", "before"]);
}

#[test]
fn no_wake_up_is_lost_when_neither_side_has_membarrier() {
    exchange(["before", "before"]);
}

#[test]
fn no_wake_up_is_lost_when_membarrier_is_taken_away_later() {
    exchange(["after", ""]);
    exchange(["", "after"]);
    exchange(["after", "before"]);
}
