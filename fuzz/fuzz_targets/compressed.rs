#![no_main]
libfuzzer_sys::fuzz_target!(|program: &[u8]| pelton_fuzz::compressed(program));
