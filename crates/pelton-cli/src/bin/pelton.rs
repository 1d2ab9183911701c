//! The command `pelton`; all of it is in the library.

fn main() -> std::process::ExitCode {
    pelton_cli::run()
}
