//! What each kind of operation refuses.

use super::*;

fn of_kind(kind: u32) -> COperation {
    // SAFETY: all zeros are a value of it: numbers, and pointers that may be NULL.
    COperation { kind, ..unsafe { std::mem::zeroed() } }
}

#[test]
fn every_kind_refuses_what_it_lacks_and_no_other_kind_exists() {
    let mut in_use = InUse::default();
    for kind in 1..=OPERATIONS.len() as u32 {
        // No kind of operation uses nothing.
        assert_eq!(of_kind(kind).check(&in_use), Err(code::NULL), "kind {kind}");
        assert_eq!(of_kind(kind).build(&mut in_use).err(), Some(code::NULL), "kind {kind}");
    }
    for kind in [0, OPERATIONS.len() as u32 + 1, u32::MAX] {
        assert_eq!(of_kind(kind).check(&in_use), Err(code::OPTION), "kind {kind}");
    }
    assert!(in_use.is_empty());
}

#[test]
fn only_a_read_or_a_write_has_memory() {
    let in_use = InUse::default();
    for kind in 1..=OPERATIONS.len() as u32 {
        let with_memory = COperation { memory_count: 1, ..of_kind(kind) };
        let wanted = if matches!(kind, 3 | 4) { code::NULL } else { code::OPTION };
        assert_eq!(with_memory.check(&in_use), Err(wanted), "kind {kind}");
    }
}

#[test]
fn unknown_flags_are_refused() {
    let in_use = InUse::default();
    for flags in [2, 3, u32::MAX] {
        assert_eq!(COperation { flags, ..of_kind(OPEN) }.check(&in_use), Err(code::OPTION), "flags {flags}");
    }
    assert!(COperation { flags: LINKED, ..of_kind(OPEN) }.is_linked());
}

#[test]
fn times_before_1970_and_unchanged_ones_are_distinct() {
    let epoch = SystemTime::UNIX_EPOCH;
    assert_eq!(time(UNCHANGED), None);
    assert_eq!(time(0), Some(epoch));
    assert_eq!(time(1_000_000_001), Some(epoch + Duration::from_nanos(1_000_000_001)));
    assert_eq!(time(-1), Some(epoch - Duration::from_nanos(1)));
}
