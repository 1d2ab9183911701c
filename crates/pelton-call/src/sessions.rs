//! The sessions of a service, by the index that the receiver keeps with each lane of requests.

use super::frame::Assembly;
use super::session::{ServiceShared, Session};
use super::session_ref::SessionOwner;
use pelton_channel::Receiver;
use pelton_channel::raw::ReplyLane;
use std::sync::Arc;

/// What the service's loop alone has of a client.
#[derive(Debug)]
pub(super) struct SessionSlot {
    pub(super) session: SessionOwner,
    /// A request of which some pieces have come.
    pub(super) assembly: Option<Assembly>,
    /// The size of the last request that came in pieces; 0 if it was not stored.
    pub(super) assembled: usize,
    /// The number of its lane of requests.
    lane: u32,
    /// Whether that lane is paused.
    is_paused: bool,
}

#[derive(Debug, Default)]
pub(super) struct Sessions {
    slots: Vec<Option<SessionSlot>>,
    free: Vec<usize>,
}

impl Sessions {
    pub(super) fn iter(&self) -> impl Iterator<Item = &SessionSlot> {
        self.slots.iter().flatten()
    }

    #[inline(always)]
    pub(super) fn get(&mut self, index: usize) -> Option<&mut SessionSlot> {
        self.slots.get_mut(index)?.as_mut()
    }

    /// Creates the session of a client whose requests come by the lane of that number. Returns its index.
    pub(super) fn add(&mut self, reply: ReplyLane, lane: u32, shared: &Arc<ServiceShared>) -> usize {
        let index = self.free.pop().unwrap_or(self.slots.len());
        let session = SessionOwner::new(Session::new(reply, index, shared.clone()));
        let added = Some(SessionSlot { session, assembly: None, assembled: 0, lane, is_paused: false });
        match self.slots.get_mut(index) {
            Some(slot) => *slot = added,
            None => self.slots.push(added),
        }
        index
    }

    pub(super) fn remove(&mut self, index: usize) -> Option<SessionSlot> {
        let removed = self.slots.get_mut(index)?.take()?;
        self.free.push(index);
        Some(removed)
    }

    /// Pauses or resumes a client's lane of requests, by its session's present state. Returns whether it is paused.
    pub(super) fn update_pause(&mut self, session: &Arc<Session>, requests: &mut Receiver) -> bool {
        // The client may have left, and another may have its index.
        let Some(slot) = self.get(session.index).filter(|slot| Arc::ptr_eq(&slot.session, session)) else {
            return false;
        };
        let is_paused = session.is_paused();
        if slot.is_paused != is_paused {
            slot.is_paused = is_paused;
            requests.set_paused(slot.lane, is_paused);
        }
        is_paused
    }
}
