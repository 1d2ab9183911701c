//! The public interface, by purpose. All tests of one binary run concurrently: a test that counts the resources of
//! its process, limits them, or forks does so in a child process. Tests that need a binary of their own are beside
//! this directory. `starvation.rs` replaces the C library's clocks. `fork.rs`, `steps.rs` and `sanitized.rs` have one
//! thread or their own harness. `failpoints/` and `steps.rs` need that feature. `races/` runs one race at a time, and
//! `fast_path.rs` is for release builds.

#[cfg(feature = "tokio")]
mod async_service;
mod broadcast;
mod broadcast_hostile;
mod broadcast_path;
mod broadcast_set;
mod call;
#[cfg(feature = "postcard")]
mod encoded;
mod file;
mod flush;
mod foreign;
mod gather;
mod handshake;
mod hostile;
mod log;
mod memory;
mod messages;
mod observe;
mod openings;
mod path;
mod readme;
mod record_file;
mod record_file_rotated;
mod roles;
mod services;
#[cfg(feature = "tokio")]
mod streams;
#[path = "../support/mod.rs"]
mod support;
mod threads;
#[cfg(feature = "tokio")]
mod tokio;
mod traced;
mod two_processes;
#[cfg(feature = "zerocopy")]
mod values;
