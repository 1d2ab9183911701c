//! Models under loom, in every interleaving: the lane; a broadcast lane; the words of calls that threads share without
//! a lock; and those of Python's queue that processes share.
#![cfg(loom)]

mod broadcast;
mod calls;
mod lane;
mod queue;
