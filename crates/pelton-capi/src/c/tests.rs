//! Structures as the headers declare them, and of older and newer programs; arrays that are NULL.

use super::*;
use crate::{broadcast, client, engine, flush, operation, options, receiver, records, sender, service};
use std::collections::BTreeMap;

sized_structures! {
    #[derive(Debug, PartialEq, Eq)]
    "known" Known {
        first: u32,
        second: u64,
        third: u64,
    }
}

fn given(words: &[u64]) -> Answer<Known> {
    let given = (words.as_ptr().cast::<Known>(),);
    // SAFETY: the words begin with a size that is not more than theirs.
    unsafe { Options::<Known>::checked(&given, "options") }
}

/// The first word: a size, and `first`.
fn head(bytes: u64, first: u64) -> u64 {
    bytes | first << 32
}

#[test]
fn an_older_program_s_options_end_in_zeros() {
    let all = Known { struct_bytes: 24, first: 1, second: 2, third: 3 };
    assert_eq!(given(&[head(24, 1), 2, 3]), Ok(all));
    assert_eq!(given(&[head(16, 1), 2, 3]), Ok(Known { struct_bytes: 16, third: 0, ..all }));
    let null = (std::ptr::null(),);
    // SAFETY: NULL is permitted.
    let none = unsafe { Options::<Known>::checked(&null, "options") };
    assert_eq!(none, Ok(Known { struct_bytes: 0, first: 0, second: 0, third: 0 }));
}

#[test]
fn a_newer_program_s_options_are_refused_if_an_unknown_one_is_set() {
    assert!(given(&[head(40, 1), 2, 3, 0, 0]).is_ok());
    assert_eq!(given(&[head(40, 1), 2, 3, 0, 1]), Err(code::OPTION));
    for bytes in [0, 4, 4097] {
        assert_eq!(given(&[head(bytes, 1), 2, 3]), Err(code::OPTION), "{bytes}");
    }
}

#[test]
fn figures_are_written_as_far_as_the_caller_s_structure_goes() {
    for (bytes, wanted) in [
        (8, [head(8, 1), 99, 99, 99]),
        (16, [head(16, 1), 2, 99, 99]),
        (24, [head(24, 1), 2, 3, 99]),
        (32, [head(32, 1), 2, 3, 0]),
    ] {
        let mut words = [head(bytes, 99), 99, 99, 99];
        let given = (words.as_mut_ptr().cast::<Known>(),);
        // SAFETY: the words begin with a size that is not more than theirs.
        let place = unsafe { Info::<Known>::checked(&given, "out") }.expect("the size is valid");
        place.write(Known { struct_bytes: 0, first: 1, second: 2, third: 3 }).expect("it cannot fail");
        assert_eq!(words, wanted, "{bytes}");
    }
    for bytes in [0, 12, 4104] {
        let mut words = [head(bytes, 0), 0, 0, 0];
        let given = (words.as_mut_ptr().cast::<Known>(),);
        // SAFETY: only the size is read, which is invalid.
        assert_eq!(unsafe { Info::<Known>::checked(&given, "out") }.map(drop), Err(code::OPTION), "{bytes}");
    }
}

#[test]
fn an_array_may_be_null_only_without_elements() {
    let (null, one) = (std::ptr::null::<u32>(), [0u32]);
    assert_eq!(check_array(null, 0, "array"), Ok(()));
    assert_eq!(check_array(null, 1, "array"), Err(code::NULL));
    assert_eq!(check_array(one.as_ptr(), usize::MAX, "array"), Err(code::TOO_LARGE));
    assert_eq!(check_array(one.as_ptr(), usize::MAX / 4, "array"), Err(code::TOO_LARGE));
}

#[test]
fn a_deadline_of_0_does_not_wait_and_the_largest_has_no_limit() {
    assert_eq!(deadline(0), Deadline::Now);
    assert_eq!(deadline(-5), Deadline::Now);
    assert_eq!(deadline(i64::MAX), Deadline::Never);
    let Deadline::At(soon) = deadline(now() + 1_000_000_000) else { panic!("it is a time") };
    assert!(soon <= Instant::now() + Duration::from_secs(1));
}

/// A structure's lines as they are in `pelton.abi`.
fn lines<T: Structure>() -> (String, Vec<String>) {
    let name = T::NAME;
    let size = format!("struct {name} bytes {}", size_of::<T>());
    let fields = T::FIELDS.iter().map(|(field, at, bytes)| format!("field {name}.{field} at {at} bytes {bytes}"));
    (name.to_owned(), std::iter::once(size).chain(fields).collect())
}

#[test]
fn each_structure_has_the_size_and_the_fields_of_pelton_abi() {
    let mut declared = BTreeMap::<String, Vec<String>>::new();
    for line in include_str!("../../../../include/pelton.abi").lines() {
        let mut words = line.split(' ');
        if let (Some("struct" | "field"), Some(of)) = (words.next(), words.next()) {
            let name = of.split('.').next().expect("split returns at least one part");
            declared.entry(name.to_owned()).or_default().push(line.to_owned());
        }
    }
    // The caller's own: an inline function of the header fills it from a completion's text.
    assert!(declared.remove("pelton_entry").is_some());
    let defined = BTreeMap::from([
        lines::<options::ChannelOptions>(),
        lines::<options::GatherOptions>(),
        lines::<options::ClientOptions>(),
        lines::<options::ServiceOptions>(),
        lines::<options::RecordFile>(),
        lines::<options::FlushOptions>(),
        lines::<options::AppendersOptions>(),
        lines::<options::CEngineOptions>(),
        lines::<sender::SenderInfo>(),
        lines::<receiver::CMessage>(),
        lines::<receiver::CEvent>(),
        lines::<receiver::ReceiverInfo>(),
        lines::<options::PublisherOptions>(),
        lines::<options::SubscriberOptions>(),
        lines::<broadcast::CDelivery>(),
        lines::<broadcast::CSubscriberState>(),
        lines::<broadcast::PublisherInfo>(),
        lines::<broadcast::SubscriberInfo>(),
        lines::<client::CCompletion>(),
        lines::<client::ClientInfo>(),
        lines::<service::CRequest>(),
        lines::<service::ServiceInfo>(),
        lines::<flush::CChunk>(),
        lines::<records::CRecord>(),
        lines::<operation::COperation>(),
        lines::<engine::CStat>(),
        lines::<engine::CFileCompletion>(),
        lines::<engine::EngineInfo>(),
    ]);
    assert_eq!(defined, declared);
}
