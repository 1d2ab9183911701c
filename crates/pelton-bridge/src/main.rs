//! The program `pelton-bridge`: see the library.

fn main() -> std::process::ExitCode {
    pelton_bridge::run()
}
