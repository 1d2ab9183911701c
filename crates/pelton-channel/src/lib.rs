//! Channels: endpoints, their connection, path channels, several senders, inspection. An internal crate: use the crate
//! `pelton`, which has the documentation. Only the types that `pelton` exports are stable.
//!
//! From below: `error`, `memory`, `options` and `wait` know no peer. `doorbells`, `transport` and `link` connect one
//! lane to its peer. `lanes` has the lanes of a receiver; `handshake` creates them. `sender` and `receiver` are the
//! endpoints; `connect`, `path` and `gather` create them. [`raw`] is the interface of the crates above.

mod acceptor;
mod backoff;
mod broadcast_role;
mod connect;
mod counters;
mod directory;
mod doorbells;
mod endpoint;
mod error;
mod gather;
mod handshake;
pub mod inspect;
mod lane_id;
mod lanes;
mod link;
mod listener;
mod lockstep;
mod memory;
mod name;
pub mod observe;
mod opening;
pub mod options;
mod packet;
mod path;
mod path_broadcast;
mod publisher;
pub mod raw;
mod receiver;
mod refusals;
mod registry;
mod role;
mod sender;
mod settings;
mod subscriber;
mod subscriber_set;
mod traceparent;
mod transport;
mod wait;
mod window;

pub use counters::Counters;
pub use endpoint::Departure;
pub use error::{CallFailure, Error, Result};
pub use gather::Senders;
pub use lane_id::LaneId;
pub use listener::Listener;
pub use opening::{Opening, Resuming};
pub use options::Options;
pub use pelton_lane::StartFrom;
pub use pelton_os::Peer;
pub use publisher::{Publisher, SubscriberState};
pub use receiver::{Batch, Event, Held, Member, Message, Messages, Receiver};
pub use sender::{BatchReservation, Reservation, Sender, Sent};
pub use settings::Policy;
pub use subscriber::{Delivery, Subscriber};
pub use subscriber_set::{SubscriberEvent, SubscriberSet};
pub use traceparent::Traceparent;
pub use wait::{Armed, ConnectDeadline, Deadline, Wait};
