//! The doorbells of an endpoint, and the one descriptor that a caller's event loop polls for it.

use crate::error::{Error, Result};
use pelton_os::socket::Socket;
use pelton_os::{Descriptor, Doorbell, Event, LocalWake, Peer, Pollable, Ready, own_uid};
use rustix::event::epoll::EventFlags;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

/// Everything that can wake an endpoint, for any kind of peers.
#[derive(Clone, Debug)]
pub struct Doorbells {
    /// Rung by threads, and by peers of this process's user.
    doorbell: Arc<Doorbell>,
    /// Rung by this process only. No peer has a descriptor of it, so no peer can make a ring block.
    local_wake: Arc<LocalWake>,
    pollable: Arc<Pollable>,
}

impl Doorbells {
    /// Creates doorbells that do not ring yet.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn new() -> Result<Doorbells> {
        Doorbell::shared().and_then(Doorbells::with).map_err(Error::system("making eventfds and an epoll"))
    }

    pub(crate) fn with(doorbell: Doorbell) -> std::io::Result<Doorbells> {
        let local_wake = LocalWake::new()?;
        let pollable = Arc::new(Pollable::new(&doorbell, &local_wake)?);
        Ok(Doorbells { doorbell: Arc::new(doorbell), local_wake: Arc::new(local_wake), pollable })
    }

    /// Creates doorbells for one lane of an endpoint that sends by several. The lane has a doorbell of its own. After
    /// [`Doorbells::add_doorbell`], the endpoint's descriptor reports it. Nothing polls the lane's local wake, `null`.
    pub fn for_one_lane(&self, null: &Arc<LocalWake>, peer: Peer) -> std::io::Result<Doorbells> {
        let doorbell = if peer.uid == own_uid() { Doorbell::shared()? } else { Doorbell::pair(peer.uid)? };
        Ok(Doorbells { doorbell: Arc::new(doorbell), local_wake: null.clone(), pollable: self.pollable.clone() })
    }

    /// The doorbell of threads, and of peers of this process's user.
    pub fn doorbell(&self) -> &Arc<Doorbell> {
        &self.doorbell
    }

    /// The doorbell to give to `peer`. A peer of another user gets one of its own, so that it can neither ring for
    /// other peers nor drain their rings.
    pub fn doorbell_for(&self, peer: Peer) -> std::io::Result<Arc<Doorbell>> {
        if peer.uid == own_uid() {
            return Ok(self.doorbell.clone());
        }
        let doorbell = Arc::new(Doorbell::pair(peer.uid)?);
        self.pollable.add_doorbell(&doorbell)?;
        Ok(doorbell)
    }

    /// Also polls a doorbell that only one peer rings. Other threads may poll it too.
    pub fn add_doorbell(&self, doorbell: &Doorbell) -> Result<()> {
        self.pollable.add_shared_doorbell(doorbell).map_err(Error::system("polling a client's doorbell"))
    }

    /// Also polls a listener, a timer or the socket of a handshake: reported as [`Event::Connecting`] with this number.
    pub fn watch_connecting(&self, fd: BorrowedFd<'_>, number: u32) -> std::io::Result<()> {
        self.pollable.watch([Some((fd, EventFlags::IN)), None], Event::Connecting(number))
    }

    /// As [`Doorbells::watch_connecting`], for a socket. Removes the socket from the epoll before its close, because
    /// the close may block.
    pub fn watch_connecting_socket(&self, socket: &Socket, number: u32) -> std::io::Result<()> {
        self.pollable.watch_socket(socket, EventFlags::IN, Event::Connecting(number))
    }

    /// Pauses, or resumes, the events of such a descriptor.
    pub fn pause_connecting(&self, fd: BorrowedFd<'_>, number: u32, is_paused: bool) -> std::io::Result<()> {
        let events = if is_paused { EventFlags::empty() } else { EventFlags::IN };
        self.pollable.change(fd, events, Event::Connecting(number))
    }

    /// Call this after the handshake at `fd`. From then on the epoll reports only the peer's end, with the number of
    /// `lane`. Allocates no resource, so it cannot fail for lack of one.
    pub fn finish_connecting(&self, fd: BorrowedFd<'_>, lane: u32) -> Result<()> {
        let changed = self.pollable.change(fd, EventFlags::RDHUP, Event::Gone(lane));
        changed.map_err(Error::system("watching the peer"))
    }

    /// Stops polling `fd`. To close a doorbell would not stop that, because the peer has a descriptor of it too.
    pub fn forget(&self, fd: BorrowedFd<'_>) {
        self.pollable.forget([Some(fd), None]);
    }

    /// Stops polling the descriptors of a former peer.
    pub fn forget_liveness(&self, liveness: [Option<BorrowedFd<'_>>; 2]) {
        self.pollable.forget(liveness);
    }

    /// Also polls a liveness handle by `flags`.
    pub fn watch_liveness(&self, fd: BorrowedFd<'_>, flags: EventFlags, event: Event) -> Result<()> {
        self.pollable.watch([Some((fd, flags)), None], event).map_err(Error::system("watching the peer"))
    }

    /// Appends all events except rings. Drains the doorbells that only one peer rings.
    pub fn take_events(&self, events: &mut Vec<Event>) -> Result<()> {
        if self.pollable.events(events).map_err(Error::system("polling the peers"))? {
            self.keep_readable();
        }
        Ok(())
    }

    /// Keeps the descriptor readable until [`Doorbells::drain`], because more events are left. An edge-triggered event
    /// loop would not report them again.
    pub fn keep_readable(&self) {
        self.local_wake.ring();
    }

    /// The eventfd by which this process wakes this endpoint.
    pub fn local_wake(&self) -> &Arc<LocalWake> {
        &self.local_wake
    }

    /// Polls for the end of the peer at this socket, of lane `lane`, and of the peer's process. Returns the process's
    /// pidfd. Both leave the epoll when they are closed.
    pub fn watch(&self, socket: &Socket, lane: u32) -> std::io::Result<Option<Descriptor>> {
        let process = socket.peer_process()?;
        let of_process = process.as_ref().map(|process| (process.as_fd(), EventFlags::IN));
        self.pollable.watch([None, of_process], Event::Gone(lane))?;
        match self.pollable.watch_socket(socket, EventFlags::RDHUP, Event::Gone(lane)) {
            // The socket of a handshake is in the epoll already: `finish_connecting` changes its events.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(process),
            watched => watched.map(|()| process),
        }
    }

    /// Drains the doorbells, and returns whether a peer is gone. Call it before you announce a sleep. The descriptor
    /// stays readable while a peer is gone, so an event loop also learns of one that leaves after this.
    pub fn drain(&self) -> Result<bool> {
        self.doorbell.drain();
        self.local_wake.drain();
        self.pollable.drain().map_err(Error::system("polling the peers"))
    }

    /// As [`Doorbells::drain`], after a sleep that returned [`Ready::RungAlone`] if `alone`: that has reported all
    /// rings before, which spares a system call.
    pub fn drain_after_sleep(&self, alone: bool) -> Result<()> {
        if !alone {
            return self.drain().map(|_| ());
        }
        self.doorbell.drain();
        self.local_wake.drain();
        Ok(())
    }

    /// Sleeps until a doorbell rings, a peer is gone, or the deadline.
    pub fn sleep(&self, deadline: Option<Instant>) -> Result<Ready> {
        self.pollable.wait(deadline).map_err(Error::system("waiting for the peers"))
    }

    /// Whether a peer is gone. A doorbell that rings meanwhile stays readable.
    pub fn is_any_gone(&self) -> Result<bool> {
        let ready = self.sleep(Some(Instant::now()))?;
        if ready != Ready::TimedOut {
            self.keep_readable();
        }
        Ok(ready == Ready::Gone)
    }
}

impl AsFd for Doorbells {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pollable.as_fd()
    }
}
