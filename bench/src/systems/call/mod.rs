//! The systems that serve calls. A reply is the bytes of its request.

pub mod c;
mod pelton;
pub mod queue;
mod socket;

pub use self::{
    pelton::{Pelton, PeltonServing},
    socket::by_socket,
};
