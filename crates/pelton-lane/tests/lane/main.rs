//! The lane, over memory on the heap, with the production atomics; for loom see `tests/loom`. `two_threads.rs` and
//! `one_thread.rs` also run under Miri. All but `hostile.rs` and `two_threads.rs` must fail with each change by
//! cargo-mutants.
#![cfg(not(loom))]

mod broadcast;
mod broadcast_path;
mod broadcast_threads;
mod broadcast_vectors;
mod chunks;
mod fixture;
mod hostile;
mod one_thread;
mod pages;
mod producer;
mod two_threads;
mod vectors;
