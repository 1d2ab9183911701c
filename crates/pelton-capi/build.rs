//! Reads the codes, their texts and the version from `include/pelton/result.h`, which is written by hand.

use std::fmt::Write;

fn main() {
    let root = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let header = format!("{root}/include/pelton/result.h");
    println!("cargo:rerun-if-changed={header}");
    let text = std::fs::read_to_string(&header).unwrap_or_else(|error| panic!("{header}: {error}"));
    let mut codes = String::new();
    let mut version = Vec::new();
    let mut texts = String::new();
    for line in text.lines() {
        let Some(code) = line.trim().strip_prefix("X(PELTON_") else { continue };
        let code = code.trim_end_matches('\\').trim_end().strip_suffix(')').expect("a code's line ends with )");
        let (name, rest) = code.split_once(", ").expect("X(name, number, text)");
        let (number, text) = rest.split_once(", ").expect("X(name, number, text)");
        writeln!(codes, "#[allow(dead_code)]\npub const {name}: i32 = {number};").expect("a string takes all");
        let text = text.strip_suffix('"').expect("the text is quoted");
        writeln!(texts, "    ({number}, c{text}\"),").expect("a string takes all");
    }
    for part in ["MAJOR", "MINOR", "PATCH"] {
        let line = format!("#define PELTON_VERSION_{part} ");
        let number = text.lines().find_map(|l| l.strip_prefix(&line)).expect("the header has a version");
        let crates = std::env::var(format!("CARGO_PKG_VERSION_{part}")).expect("cargo sets it");
        assert_eq!(number, crates, "{header}: PELTON_VERSION_{part} is not the crate's");
        writeln!(codes, "pub const VERSION_{part}: u32 = {number};").expect("a string takes all");
        version.push(number);
    }
    // Programs get another library only if its interface is the same: before 1.0 each minor version may change it.
    let compatible = if version[0] == "0" { version[..2].join(".") } else { version[0].to_owned() };
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libpelton.so.{compatible}");
    let out = std::env::var("OUT_DIR").expect("cargo sets it");
    let made = format!("{codes}pub const TEXTS: &[(i32, &std::ffi::CStr)] = &[\n{texts}];\n");
    std::fs::write(format!("{out}/codes.rs"), made).expect("cargo's directory is writable");
}
