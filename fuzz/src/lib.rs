//! Hostile peers whose doings are read from bytes: by libFuzzer in the long run (`fuzz_targets/`), from a seed in the short one
//! (`tests/short.rs`). Each is a function of a program; that it returns is what is to be shown, under AddressSanitizer:
//! nothing panics, hangs, leaves its bounds, or keeps a descriptor.
//!
//! - [`lane`]: any word of a lane, on the heap, where every byte beyond the bounds is poisoned;
//! - [`handshake`]: any packets and descriptors, to whoever listens, and to a survivor who looks for a successor;
//! - [`connected`]: a peer of a good hand-shake that goes on writing, ringing, sending, while the other side works;
//! - [`directory`]: the files of a path channel, before they are opened and while they are in use.

#[path = "../../crates/pelton-lane/tests/fixture/mod.rs"]
mod fixture;
#[path = "../../crates/pelton/tests/support/mod.rs"]
mod support;

mod directory;
mod handshake;
mod lane;
mod peer;
mod program;

pub use directory::directory;
pub use handshake::handshake;
pub use lane::lane;
pub use peer::connected;

/// A target.
pub type Target = fn(&[u8]);

/// All of them, by their names.
pub const TARGETS: [(&str, Target); 4] =
    [("lane", lane), ("handshake", handshake), ("connected", connected), ("directory", directory)];
