//! Hostile peers whose doings are read from bytes: by libFuzzer in the long run (`fuzz_targets/`), from a seed in the short one
//! (`tests/short.rs`). Each is a function of a program; that it returns is what is to be shown, under AddressSanitizer:
//! nothing panics, hangs, leaves its bounds, or keeps a descriptor.
//!
//! - [`lane`]: any word of a lane, on the heap, where every byte beyond the bounds is poisoned;
//! - [`handshake`]: any packets and descriptors, to whoever listens, and to a survivor who looks for a successor;
//! - [`connected`]: a peer of a good hand-shake that goes on writing, ringing, sending, while the other side works;
//! - [`directory`]: the files of a path channel, before they are opened and while they are in use;
//! - [`records`]: a record file, read, and opened to be written;
//! - [`calls`]: a client of a service, or the service of a client, of a good hand-shake.

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
pub use records::records;

/// A target.
pub type Target = fn(&[u8]);

/// All of them, by their names.
pub const TARGETS: [(&str, Target); 6] = [
    ("lane", lane),
    ("handshake", handshake),
    ("connected", connected),
    ("directory", directory),
    ("records", records),
    ("calls", calls),
];
