//! The addon `pelton.node`: channels, broadcasts, calls and files over the crate `pelton`, of which nothing waits.
//! `lib/` has what users import, and makes promises of it: `lib/waits.js` has the one queue of waits.
//!
//! - One environment's thread uses an object: Node gives no object to another thread.
//! - A wait is `wait`, which arms the endpoint and has libuv poll its descriptor: `watch.rs`.
//! - A message in place is an ArrayBuffer over shared memory, which `Message.release` detaches: `message.rs`.

mod broadcast;
mod client;
mod endpoint;
mod error;
mod fast;
mod files;
mod log;
mod message;
mod open;
mod receiver;
mod records;
mod sender;
mod service;
mod watch;

use napi::bindgen_prelude::*;
use napi_derive::napi;

/// Sets the function that makes the errors of this environment. The first call.
#[napi]
pub fn initialize(env: Env, make_error: Function<'_, FnArgs<(Unknown<'_>,)>, Unknown<'_>>) -> Result<()> {
    error::set_maker(&env, &make_error)
}
