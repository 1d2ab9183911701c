//! Whether a uid identifies a user.

use rustix::process::geteuid;
use std::sync::OnceLock;

/// The uid of this process, as the kernel compares it.
pub fn own_uid() -> u32 {
    geteuid().as_raw()
}

/// Whether a uid from the kernel may belong to several users. A user that this process's user namespace does not map
/// appears as the overflow uid, 65534 by default. So may the user with that number. Only a namespace that maps all
/// uids, as the first one does, has no such users.
pub fn is_ambiguous_uid(uid: u32) -> bool {
    static OVERFLOW_UID: OnceLock<u32> = OnceLock::new();
    let read = || std::fs::read_to_string("/proc/sys/kernel/overflowuid").ok()?.trim().parse().ok();
    uid == *OVERFLOW_UID.get_or_init(|| read().unwrap_or(65534))
        && !std::fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| maps_all(&map))
}

/// Whether a user namespace's map has all uids, in one line.
fn maps_all(map: &str) -> bool {
    let mut words = map.split_whitespace();
    let (first, count) = (words.next(), words.nth(1));
    first == Some("0") && count == Some("4294967295")
}

/// A text about such a uid.
pub fn ambiguous_uid_text(uid: u32) -> String {
    format!(
        "uid {uid} is that of every user that this process's user namespace does not map (/proc/self/uid_map), so it may be any of them: \
         map that user there, or run both sides in one namespace under another uid"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_map_of_all_uids_makes_the_overflow_uid_unambiguous() {
        assert!(maps_all("         0          0 4294967295\n"));
        for part in ["", "0 0 65536\n", "0 1000 1\n1 100000 65536\n", "1 1 4294967294\n", "0 0\n"] {
            assert!(!maps_all(part), "{part}");
        }
        assert!(!is_ambiguous_uid(12345));
    }
}
