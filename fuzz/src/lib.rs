//! Hostile peers that act by a program of bytes: by libFuzzer in the long form (`fuzz_targets/`), from a seed in the
//! short form (`tests/short.rs`). Each target is a function of a program. Its return, under AddressSanitizer, shows
//! that nothing panics, hangs, accesses memory out of bounds, or keeps a descriptor.
//!
//! - [`lane`]: lies in any word of a lane, on the heap, where every byte out of bounds is poisoned;
//! - [`handshake`]: any packets and descriptors, to a listener, and to a survivor that waits for a successor;
//! - [`connected`]: a peer that after a correct handshake continues to write, ring and send, while the other side
//! works;
//! - [`directory`]: the files of a path channel, before they are opened and while they are in use;
//! - [`records`]: a record file, read, and opened for writing;
//! - [`compressed`]: the same with a compressed chunk, of any content;
//! - [`calls`]: a client of a service, or the service of a client, after a correct handshake.

#[path = "../../crates/pelton-lane/tests/lane/fixture.rs"]
#[allow(dead_code, reason = "the lane's tests use the rest")]
mod fixture;
#[path = "../../crates/pelton/tests/support/raw.rs"]
#[allow(dead_code, reason = "the channels' tests use the rest")]
mod raw;

mod calls;
mod directory;
mod handshake;
mod lane;
mod peer;
mod program;
mod records;

pub use calls::calls;
pub use directory::directory;
pub use handshake::handshake;
pub use lane::lane;
pub use peer::connected;
pub use records::{compressed, records};

/// A target.
pub type Target = fn(&[u8]);

/// All targets, by their names.
pub const TARGETS: [(&str, Target); 7] = [
    ("lane", lane),
    ("handshake", handshake),
    ("connected", connected),
    ("directory", directory),
    ("records", records),
    ("calls", calls),
    ("compressed", compressed),
];
