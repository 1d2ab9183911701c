//! How many descriptors this program may have: as many as its hard limit lets it, as each peer costs some. The programs that it starts have the
//! limit that it was started with, since some take the number for how many they are to close.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::{borrow::Cow, io::Write as _, sync::OnceLock};

/// The soft limit before [`raise`].
static BEFORE: OnceLock<Option<u64>> = OnceLock::new();

/// Peers that a receiver of many, or a service, can have at a time.
const PEERS_MAX: u64 = 1024;
/// What it has open for itself, and the library leaves to it.
const OWN: u64 = 96;

/// Raises the soft limit to the hard one. If fewer `peers` than can come fit into that, at `each` descriptors, says how many do.
pub fn raise(peers: &str, each: u64) {
    let limit = getrlimit(Resource::Nofile);
    BEFORE.get_or_init(|| limit.current);
    // Refused is as if it had not been asked for.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    let Some(most) = getrlimit(Resource::Nofile).current else { return };
    let fit = most.saturating_sub(OWN) / each;
    if fit < PEERS_MAX {
        let _ = writeln!(
            std::io::stderr(),
            "pelton: at most about {fit} {peers} at a time, as RLIMIT_NOFILE is {most}: `ulimit -Hn` sets it"
        );
    }
}

/// A command for the shell that runs with the limit from before.
pub fn as_before(command: &str) -> Cow<'_, str> {
    match BEFORE.get() {
        Some(Some(limit)) => format!("ulimit -S -n {limit}\n{command}").into(),
        _ => command.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_run_as_it_is_where_nothing_was_raised() {
        assert_eq!(as_before("cat"), "cat");
    }
}
