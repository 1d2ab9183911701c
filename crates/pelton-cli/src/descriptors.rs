//! The limit of open descriptors. This program raises it to the hard limit, because each peer costs some. Programs that
//! it starts get the original limit: some close every descriptor below it.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::{borrow::Cow, io::Write as _, sync::OnceLock};

/// The soft limit before [`raise`].
static ORIGINAL: OnceLock<Option<u64>> = OnceLock::new();

/// The most peers that a receiver of many senders, or a service, has at a time.
const PEERS_MAX: u64 = 1024;
/// Descriptors for the program itself and the library.
const RESERVED: u64 = 96;

/// Raises the soft limit to the hard one. If that is too low for `PEERS_MAX` `peers` at `each` descriptors, prints
/// how many fit.
pub fn raise(peers: &str, each: u64) {
    raise_quietly();
    let Some(most) = getrlimit(Resource::Nofile).current else { return };
    let fit = most.saturating_sub(RESERVED) / each;
    if fit < PEERS_MAX {
        let _ = writeln!(
            std::io::stderr(),
            "pelton: at most about {fit} {peers} at a time, as RLIMIT_NOFILE is {most}: `ulimit -Hn` sets it"
        );
    }
}

/// Raises the soft limit to the hard one.
pub fn raise_quietly() {
    let limit = getrlimit(Resource::Nofile);
    ORIGINAL.get_or_init(|| limit.current);
    // A refusal leaves the limit as it was.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// `command`, changed so that the shell restores the original limit first.
pub fn with_original_limit(command: &str) -> Cow<'_, str> {
    match ORIGINAL.get() {
        Some(Some(limit)) => format!("ulimit -S -n {limit}\n{command}").into(),
        _ => command.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_stays_unchanged_if_no_limit_was_raised() {
        assert_eq!(with_original_limit("cat"), "cat");
    }
}
