//! Publishing and releasing against going to sleep, between two processes: no wake-up is lost. `PELTON_ROUNDS` makes it
//! long, `PELTON_SEED` repeats one.

mod support;

use support::race::{figure, narrow, ping_pong, run};
use support::*;

/// Not a test: what a child does. Without a role it does nothing.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    // A long run is longer than a child usually lives; it tells a hang itself.
    // SAFETY: no pointers.
    unsafe { libc::alarm(0) };
    match role.get("role") {
        "ping-pong" => ping_pong(&role, || {}),
        "narrow" => narrow(&role),
        other => panic!("no role {other}"),
    }
}

fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).map_or(otherwise, |text| text.parse().unwrap())
}

fn role(name: String, role: &str, how: How, rounds: u64) -> Role {
    let seed = number("PELTON_SEED", std::process::id().into());
    Role::new(role)
        .with("name", name)
        .with("how", format!("{how:?}"))
        .with("capacity", 65536)
        .with("rounds", number("PELTON_ROUNDS", rounds))
        .with("seed", seed)
}

fn a_message_always_wakes(how: How, name: fn(&Place) -> String) {
    let place = Place::unwatched();
    let role = role(name(&place), "ping-pong", how, 30_000);
    let said = run(role.clone(), role);
    assert!(said.iter().all(|line| figure(line, "sleeps") > 100), "they hardly slept: {said:?}");
}

#[test]
fn a_message_always_wakes_a_receiver_that_blocks() {
    a_message_always_wakes(How::Block, Place::name);
}

#[test]
fn a_message_always_wakes_a_receiver_in_an_event_loop() {
    a_message_always_wakes(How::Epoll, Place::name);
}

fn room_always_wakes(how: How, name: fn(&Place) -> String) {
    let place = Place::unwatched();
    let role = role(name(&place), "narrow", how, 30_000);
    let said = run(role.clone().with("side", "receive"), role.with("side", "send"));
    assert!(said.iter().map(|line| figure(line, "sleeps")).sum::<u64>() > 100, "they hardly slept: {said:?}");
}

#[test]
fn room_always_wakes_a_sender_that_blocks() {
    room_always_wakes(How::Block, Place::name);
}

#[test]
fn room_always_wakes_a_sender_in_an_event_loop() {
    room_always_wakes(How::Epoll, Place::name);
}

#[test]
fn a_message_always_wakes_by_path_a_receiver_that_blocks() {
    a_message_always_wakes(How::Block, Place::path_name);
}

#[test]
fn a_message_always_wakes_by_path_a_receiver_in_an_event_loop() {
    a_message_always_wakes(How::Epoll, Place::path_name);
}

#[test]
fn room_always_wakes_by_path_a_sender_that_blocks() {
    room_always_wakes(How::Block, Place::path_name);
}
