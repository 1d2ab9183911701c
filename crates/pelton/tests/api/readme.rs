//! Users start with the Rust code of README.md, here and at the root: it compiles, without warnings except for unused
//! items. `docs/try` runs what else README.md has, and the guide.

use std::path::Path;
use std::process::Command;

/// A reader's addition: a function around it that may fail.
const BEFORE: &str = "fn main() -> Result<(), Box<dyn std::error::Error>> {\n";

#[test]
fn the_rust_in_readme_compiles() {
    let crate_root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = crate_root.join("../..");
    let texts = [root.as_path(), crate_root].map(|folder| std::fs::read_to_string(folder.join("README.md")).unwrap());
    let [of_root, of_crate] = texts.each_ref().map(|text| rust_blocks(text));
    assert!(!of_root.is_empty() && !of_crate.is_empty(), "they have Rust: {}, {}", of_root.len(), of_crate.len());
    // A separate package, like a user's. Nothing is fetched: its dependencies are this package's.
    let dir = tempfile::tempdir().unwrap();
    let binaries = dir.path().join("src/bin");
    std::fs::create_dir_all(&binaries).unwrap();
    let manifest = format!(
        "[package]\nname = \"user\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[dependencies]\npelton = {{ path = {crate_root:?} }}\n[workspace]\n"
    );
    std::fs::write(dir.path().join("Cargo.toml"), manifest).unwrap();
    std::fs::copy(root.join("Cargo.lock"), dir.path().join("Cargo.lock")).unwrap();
    for (number, block) in of_root.iter().chain(&of_crate).enumerate() {
        std::fs::write(binaries.join(format!("block-{number}.rs")), format!("{BEFORE}{block}Ok(()) }}\n")).unwrap();
    }
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["check", "--offline", "--quiet", "--keep-going"]).current_dir(dir.path());
    cargo.env("CARGO_TARGET_DIR", Path::new(env!("CARGO_TARGET_TMPDIR")).join("readme"));
    let checked = cargo.env("RUSTFLAGS", "-D warnings -A unused_variables -A unused_imports").output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
}

fn rust_blocks(text: &str) -> Vec<&str> {
    text.split("```rust\n").skip(1).map(|rest| rest.split_once("```").unwrap().0).collect()
}
