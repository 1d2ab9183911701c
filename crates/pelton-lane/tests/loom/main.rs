//! Models under loom, in every interleaving: the lane; the words of calls that threads share without a lock; and those
//! of Python's queue that processes share.
#![cfg(loom)]

mod calls;
mod lane;
mod queue;
