//! Models under loom, in every interleaving: the lane, and the words of calls that threads share without a lock.
#![cfg(loom)]

mod calls;
mod lane;
