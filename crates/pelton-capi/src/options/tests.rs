//! Which options each maker refuses, and with which reason.

use super::*;

fn detail() -> String {
    // SAFETY: it is a string until this thread's next call.
    unsafe { std::ffi::CStr::from_ptr(code::detail()) }.to_string_lossy().into_owned()
}

fn none() -> ChannelOptions {
    // SAFETY: all zeros are a value of it.
    unsafe { std::mem::zeroed() }
}

/// Options with one set to a valid value.
fn with(option: &str) -> ChannelOptions {
    static UIDS: [u32; 1] = [1];
    let mut options = none();
    match option {
        "capacity" => options.capacity = 1 << 20,
        "message_bytes_max" => options.message_bytes_max = 1000,
        "resident_bytes_max" => options.resident_bytes_max = 1 << 20,
        "memory_bytes_max" => options.memory_bytes_max = 1 << 24,
        "deadline_ns" => options.deadline_ns = i64::MAX,
        "uids" => (options.uids, options.uid_count) = (UIDS.as_ptr(), 1),
        "create" => options.create = 1,
        "mode" => options.mode = 0o700,
        "lanes" => options.lanes = 2,
        "traced" => options.traced = 1,
        other => panic!("no option {other}"),
    }
    options
}

const ALL: [&str; 10] = [
    "capacity",
    "message_bytes_max",
    "resident_bytes_max",
    "memory_bytes_max",
    "deadline_ns",
    "uids",
    "create",
    "mode",
    "lanes",
    "traced",
];

#[test]
fn an_option_that_the_maker_does_not_use_is_refused_with_the_reason() {
    let makers = [
        SENDER_BY_NAME,
        RECEIVER_BY_NAME,
        CREATED_SENDER,
        CREATED_RECEIVER,
        OPENED_SENDER,
        OPENED_RECEIVER,
        LISTENER,
        THREADS,
    ];
    for maker in makers {
        for option in ALL {
            let built = with(option).build::<pelton::options::maker::Any>(&maker).map(drop);
            match maker.unused.iter().find(|(unused, _)| *unused == option) {
                None => assert_eq!(built, Ok(()), "{}: {option}", maker.name),
                Some((_, reason)) => {
                    assert_eq!(built, Err(code::OPTION), "{}: {option}", maker.name);
                    assert_eq!(detail(), format!("{option} is set, but {} does not use it: {reason}", maker.name));
                }
            }
        }
        for (option, _) in maker.unused {
            assert!(ALL.contains(option), "{}: {option} is no option", maker.name);
        }
    }
}

#[test]
fn invalid_values_are_refused_with_the_valid_ones() {
    let refused = |options: ChannelOptions, text: &str| {
        assert_eq!(options.build::<pelton::options::maker::Any>(&CREATED_SENDER).err(), Some(code::OPTION));
        assert!(detail().contains(text), "{}", detail());
    };
    refused(ChannelOptions { wait: 2, ..none() }, "wait is 2, wanted PELTON_BLOCK (0) or PELTON_SPIN (1)");
    refused(ChannelOptions { create: 2, ..none() }, "create is 2, wanted 0 or 1");
    let missing = ChannelOptions { uid_count: 1, ..none() };
    assert_eq!(missing.build::<pelton::options::maker::Any>(&CREATED_SENDER).err(), Some(code::NULL));
}

#[test]
fn a_receiver_of_threads_alone_has_no_users_and_no_memory_of_peers() {
    // SAFETY: all zeros are a value of it.
    let mut options: GatherOptions = unsafe { std::mem::zeroed() };
    options.memory_bytes_max = 1 << 24;
    assert!(options.build::<pelton::options::maker::Any>(false).is_ok());
    assert_eq!(options.build::<pelton::options::maker::Any>(true).err(), Some(code::OPTION));
    assert!(detail().contains("its endpoints belong to this process"));
}
