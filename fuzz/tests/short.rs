//! Each target on inputs from a seed: the short form of fuzzing, which needs no more than cargo.
//! `PELTON_ROUNDS` and `PELTON_SEED` make it longer, or another.

/// Inputs that libFuzzer found something with once.
const FOUND: [(&str, &[u8]); 1] = [
    // Last numbers behind the records that they are said to come before.
    ("records", b"n\x16\x16\xf9\xff\xff\xff\xff\xff\xe9\xffi\xe9\xe9\xff\xff\xff\xff\xff\xf9\xff\xff\xff\xff\xff\xe9\xffi\xe9\xff\xff\xff\xff\xe9\xff\xff\xff\xff\0\0}}}\xff\xff\xff\0\0}}}}}}}\x9f\xff\x8b"),
];

/// One test, as the targets count the descriptors of the whole process.
#[test]
fn whatever_a_peer_does_it_is_answered() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let only = std::env::var("PELTON_TARGET").ok();
    for ((name, target), rounds) in pelton_fuzz::TARGETS.into_iter().zip([15_000, 1500, 2000, 300, 2000, 600]) {
        if only.as_ref().is_some_and(|only| only != name) {
            continue;
        }
        FOUND.iter().filter(|found| found.0 == name).for_each(|found| target(found.1));
        for round in 0..number("PELTON_ROUNDS").unwrap_or(rounds) {
            let seed = number("PELTON_SEED").unwrap_or(0) + round;
            let program = program(seed);
            let (done, is_done) = std::sync::mpsc::channel();
            // A target that hangs has no other end.
            let result = std::thread::scope(|scope| {
                scope.spawn(move || {
                    if is_done.recv_timeout(std::time::Duration::from_secs(120))
                        == Err(std::sync::mpsc::RecvTimeoutError::Timeout)
                    {
                        eprintln!("HANG: target {name}, PELTON_SEED={seed} PELTON_ROUNDS=1");
                        std::process::abort();
                    }
                });
                let result = std::panic::catch_unwind(|| target(&program));
                done.send(()).unwrap();
                result
            });
            if let Err(panic) = result {
                eprintln!("target {name}, PELTON_SEED={seed} PELTON_ROUNDS=1 PELTON_TARGET={name}");
                std::panic::resume_unwind(panic);
            }
        }
        println!("{name}: well");
    }
}

/// Short ones and long ones.
fn program(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    let len = usize::from(next()) * if next() < 64 { 8 } else { 1 };
    (0..len).map(|_| next()).collect()
}
