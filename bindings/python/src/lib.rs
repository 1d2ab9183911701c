//! The extension module `pelton._pelton`: channels and calls, over the crate `pelton`. `python/pelton/` has what
//! users import, its `_pelton.pyi` the types; the documentation is here, for `help()`.
//!
//! - One thread at a time uses an endpoint: [`handle::Handle`]. Its waits run without the GIL, and end for a signal.
//! - Threads share a client and a service of calls: `client.rs`, `service.rs`. No thread waits for the GIL while it
//!   holds a lock of theirs.
//! - A message in place, and reserved space, are exported by the buffer protocol. What is exported stays valid until
//!   the last view is gone: a message stays held, and a reservation keeps its sender from being used.

mod broadcast;
mod bytes;
mod client;
mod descriptors;
mod error;
mod files;
mod handle;
mod log;
mod loop_client;
mod number;
mod open;
mod queue;
mod queue_claims;
mod queue_edges;
mod queue_file;
mod receiver;
mod records;
mod sender;
mod service;
mod subscriber_set;
mod view;

use pyo3::pymodule;

#[pymodule(gil_used = true)]
mod _pelton {
    use pyo3::exceptions::PyImportError;
    use pyo3::ffi;
    use pyo3::prelude::*;

    /// Classes and exceptions are one for all interpreters of a process, which those of Python must not be. So is the
    /// log.
    #[pymodule_init]
    fn refuse_subinterpreters(_module: &Bound<'_, PyModule>) -> PyResult<()> {
        // SAFETY: this thread is attached to an interpreter, whose state Python returns.
        match unsafe { ffi::PyInterpreterState_GetID(ffi::PyInterpreterState_Get()) } {
            0 => {
                crate::log::start();
                Ok(())
            }
            _ => Err(PyImportError::new_err(
                "pelton does not support subinterpreters: import it in the main interpreter, or start another process",
            )),
        }
    }

    #[pymodule_export]
    use crate::broadcast::{Delivery, Publisher, Subscriber, SubscriberState, publish, remove_subscription};
    #[pymodule_export]
    use crate::client::{Call, Client};
    #[pymodule_export]
    use crate::files::{Engine, File};
    #[pymodule_export]
    use crate::loop_client::LoopClient;
    #[pymodule_export]
    use crate::open::{Info, Listener, Opening, gather, listen, threads};
    #[pymodule_export]
    use crate::queue::{Parts, QueueFile};
    #[pymodule_export]
    use crate::receiver::{Message, Receiver};
    #[pymodule_export]
    use crate::records::{RecordFile, RecordReader};
    #[pymodule_export]
    use crate::sender::{Reservation, Sender};
    #[pymodule_export]
    use crate::service::{Request, Service};
    #[pymodule_export]
    use crate::subscriber_set::SubscriberSet;
}
