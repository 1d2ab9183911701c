//! Written by the next commit.
fn main() {}
