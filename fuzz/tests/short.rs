//! Each target on inputs from a seed: the short form of fuzzing, which needs only cargo. `PELTON_ROUNDS` sets the
//! number of inputs, `PELTON_SEED` the first.

use pelton_testkit::{Random, Watchdog};

/// Inputs with which libFuzzer has found defects.
const FOUND: [(&str, &[u8]); 1] = [
        // Last numbers after the records that they should precede.
    ("records", b"n\x16\x16\xf9\xff\xff\xff\xff\xff\xe9\xffi\xe9\xe9\xff\xff\xff\xff\xff\xf9\xff\xff\xff\xff\xff\xe9\xffi\xe9\xff\xff\xff\xff\xe9\xff\xff\xff\xff\0\0}}}\xff\xff\xff\0\0}}}}}}}\x9f\xff\x8b"),
];

/// One test, because the targets count the descriptors of the whole process.
#[test]
fn every_target_returns_on_random_programs() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let only = std::env::var("PELTON_TARGET").ok();
    for ((name, target), rounds) in pelton_fuzz::TARGETS.into_iter().zip([15_000, 1500, 2000, 300, 2000, 600, 1000]) {
        if only.as_ref().is_some_and(|only| only != name) {
            continue;
        }
        FOUND.iter().filter(|found| found.0 == name).for_each(|found| target(found.1));
        for round in 0..number("PELTON_ROUNDS").unwrap_or(rounds) {
            let seed = number("PELTON_SEED").unwrap_or(0) + round;
            let program = program(seed);
            // A target that hangs ends only by this.
            let hang = Watchdog::new(format!("target {name}, PELTON_SEED={seed} PELTON_ROUNDS=1"));
            let result = std::panic::catch_unwind(|| target(&program));
            drop(hang);
            if let Err(panic) = result {
                eprintln!("target {name}, PELTON_SEED={seed} PELTON_ROUNDS=1 PELTON_TARGET={name}");
                std::panic::resume_unwind(panic);
            }
        }
        println!("{name}: well");
    }
}

/// Short and long programs.
fn program(seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut byte = || (random.word() >> 24) as usize % 256;
    let len = byte() * if byte() < 64 { 8 } else { 1 };
    random.bytes(len)
}
