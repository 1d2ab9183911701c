//! What threads do to each other, in every order, under loom: the lane, and the words of calls that threads share without a lock.
#![cfg(loom)]

mod calls;
mod lane;
