//! Publishing and releasing race with going to sleep: no wake-up is lost. `PELTON_RACES` gives the total number,
//! `PELTON_SEED` repeats a run, and `PELTON_WANTED=message`, or `room`, selects one kind. A hundred million:
//!
//!     PELTON_RACES=100000000 cargo test --release -p pelton --test races -- --nocapture race::

use crate::sides::{Race, race};
use crate::support::Role;

/// Not a test: the entry point of a child process. Without a role it does nothing.
#[test]
pub fn child() {
    let Some(role) = Role::of_this_process() else { return };
    race(&role);
}

/// Both directions, and both ways to order a sleep: membarrier, and fences where it is refused.
#[track_caller]
fn no_wake_up_is_lost(processes: bool, path: bool) {
    let races = std::env::var("PELTON_RACES").map_or(80_000, |text| text.parse().unwrap());
    let only = std::env::var("PELTON_WANTED").ok();
    for wanted in ["message", "room"].into_iter().filter(|wanted| only.as_deref().is_none_or(|only| only == *wanted)) {
        for refused in [["", ""], ["before", "before"]] {
            // One of sixteen in all.
            Race { processes, path, wanted, refused }.must_not_lose(races / 16);
        }
    }
}

#[test]
fn no_wake_up_is_lost_between_threads() {
    no_wake_up_is_lost(false, false);
}

#[test]
fn no_wake_up_is_lost_between_processes() {
    no_wake_up_is_lost(true, false);
}

#[test]
fn no_wake_up_is_lost_between_threads_by_path() {
    no_wake_up_is_lost(false, true);
}

#[test]
fn no_wake_up_is_lost_between_processes_by_path() {
    no_wake_up_is_lost(true, true);
}
