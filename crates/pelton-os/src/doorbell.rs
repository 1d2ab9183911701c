//! Doorbells: what wakes a waiting peer, or a thread of this process.

use crate::descriptor::Descriptor;
use crate::received_fd::ReceivedFd;
use crate::socket::{Socket, is_shut_down, is_unix_seqpacket};
use rustix::event::epoll::EventFlags;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A doorbell: one side rings it, the other waits for it. `spec/protocol.md`, "Doorbells", explains why no peer can
/// make either of them block.
#[derive(Debug)]
pub struct Doorbell(Form);

/// The kinds of doorbells.
#[derive(Debug)]
enum Form {
    /// An eventfd of this process only: readable from a ring until it is drained.
    Own(Descriptor),
    /// An eventfd between processes of one user. To ring adds 0, which succeeds at any value of the counter. An epoll
    /// reports every write; so it is never drained.
    Shared(Descriptor),
    /// It has a name in a directory, so that a successor finds it.
    Fifo(Descriptor),
    /// Both ends of a socket pair: the owner waits at the near one, and gives the far one to a peer of another user.
    Pair { near: Socket, far: Descriptor },
    /// The far end, as a peer gave it. To close it also closes what is queued in it, so it is closed like any
    /// descriptor that a peer sent.
    Far(ReceivedFd),
}

impl Doorbell {
    /// For this process only.
    pub fn own() -> std::io::Result<Doorbell> {
        Ok(Doorbell(Form::Own(new_eventfd()?)))
    }

    /// For peers of this process's user, and threads.
    pub fn shared() -> std::io::Result<Doorbell> {
        Ok(Doorbell(Form::Shared(new_eventfd()?)))
    }

    /// For one peer of another user.
    pub fn pair(peer_uid: u32) -> std::io::Result<Doorbell> {
        let (near, far) = Socket::pair(peer_uid)?;
        Ok(Doorbell(Form::Pair { near, far: Descriptor::new(far)? }))
    }

    /// A FIFO that this process has opened for reading and writing, without waiting. With both it always has a reader:
    /// to ring it never raises SIGPIPE, and it never reports a hang-up.
    pub fn fifo(fd: OwnedFd) -> std::io::Result<Doorbell> {
        Ok(Doorbell(Form::Fifo(Descriptor::new(fd)?)))
    }

    /// A peer's doorbell, as it came over the socket.
    pub fn from_peer(fd: ReceivedFd, is_own_user: bool) -> std::io::Result<Doorbell> {
        use rustix::fs::{AtFlags, StatxFlags, statx};
        // Checked without a request to a file server, which may not reply.
        let asked = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let kind = u32::from(statx(&fd, c"", asked, StatxFlags::TYPE)?.stx_mode) & libc::S_IFMT;
        let unusable = |text: String| std::io::Error::new(std::io::ErrorKind::InvalidData, text);
        match kind {
            libc::S_IFSOCK if is_unix_seqpacket(&fd)? => Ok(Doorbell(Form::Far(fd))),
            // An eventfd has no file type.
            0 if is_own_user => {
                // Non-blocking, whatever the peer has set.
                let set = rustix::fs::fcntl_setfl(&fd, rustix::fs::OFlags::NONBLOCK);
                set.map_err(|error| unusable(format!("the peer's doorbell cannot be used: {error}")))?;
                Ok(Doorbell(Form::Shared(Descriptor::new(fd.into_owned())?)))
            }
            0 => Err(unusable("the peer's doorbell is no socket, which a peer of another user must give".to_owned())),
            kind => Err(unusable(format!(
                "the peer's doorbell is of file type {kind:#o}, wanted an eventfd or a seqpacket Unix socket"
            ))),
        }
    }

    /// Wakes the waiting side. Never blocks: a doorbell that is full rings already.
    pub fn ring(&self) {
        let (count, bytes) = match self.0 {
            Form::Own(_) => (1u64, 8),
            Form::Shared(_) => (0, 8),
            Form::Fifo(_) | Form::Pair { .. } | Form::Far(_) => (1, 1),
        };
        let bytes = &count.to_ne_bytes()[..bytes];
        loop {
            let rung = match &self.0 {
                Form::Pair { .. } | Form::Far(_) => {
                    send(self.given(), bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).map(|_| ())
                }
                Form::Own(fd) | Form::Shared(fd) | Form::Fifo(fd) => rustix::io::write(fd, bytes).map(|_| ()),
            };
            if rung != Err(Errno::INTR) {
                return;
            }
        }
    }

    /// Silences it until the next ring. Never waits, whatever the peer did to shared flags. Returns false if nobody can
    /// ring it any more: the peer has shut it down, or sends something that is no ring.
    pub fn drain(&self) -> bool {
        // Rings without a sleeper that drains them add up to the FIFO's 64 KiB at most. A peer that rings faster than
        // this drains keeps it readable, which costs the waiting thread one more iteration.
        const DRAINS: usize = 64;
        match &self.0 {
            // No peer has it, so it is still non-blocking.
            Form::Own(fd) => _ = rustix::io::retry_on_intr(|| rustix::io::read(fd, &mut [0u8; 8])),
            Form::Shared(_) | Form::Far(_) => {}
            Form::Fifo(fd) => {
                let mut rings = [0u8; 1024];
                for _ in 0..DRAINS {
                    match rustix::io::read(fd, &mut rings[..]) {
                        Err(Errno::INTR) => {}
                        // A short read has emptied it. Later rings make it readable again.
                        Ok(count) if count == rings.len() => {}
                        _ => break,
                    }
                }
            }
            Form::Pair { near, .. } => {
                for _ in 0..DRAINS {
                    match near.try_receive(&mut [0; 8]) {
                        Ok(None) => break,
                        // An empty packet, or the end.
                        Ok(Some((0, ..))) if is_shut_down(near) => return false,
                        // A ring has no descriptors, and more would come with each drain.
                        Ok(Some((_, fds, cut_off))) if cut_off || !fds.is_empty() => return false,
                        Ok(Some(_)) => {}
                        Err(_) => return false,
                    }
                }
            }
        }
        true
    }

    /// The descriptor for the peer.
    pub fn given(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Form::Pair { far, .. } => far.as_fd(),
            _ => self.as_fd(),
        }
    }

    /// Notes an epoll that polls the socket of a pair: the socket leaves it before its close, which may block.
    pub(crate) fn add_epoll(&self, epoll: &Arc<Descriptor>) {
        if let Form::Pair { near, .. } = &self.0 {
            near.add_epoll(epoll);
        }
    }

    /// The events by which an epoll reports a ring.
    pub(crate) fn events(&self) -> EventFlags {
        match self.0 {
            // One of the two holds at every value of the counter.
            Form::Shared(_) => EventFlags::IN | EventFlags::OUT | EventFlags::ET,
            _ => EventFlags::IN,
        }
    }
}

fn new_eventfd() -> std::io::Result<Descriptor> {
    Descriptor::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

impl AsFd for Doorbell {
    /// The owner waits at it, or the peer rings it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Form::Own(fd) | Form::Shared(fd) | Form::Fifo(fd) => fd.as_fd(),
            Form::Far(far) => far.as_fd(),
            Form::Pair { near, .. } => near.as_fd(),
        }
    }
}

/// A doorbell that only this process rings: a flag notes whether there is anything to drain.
#[derive(Debug)]
pub struct LocalWake {
    doorbell: Doorbell,
    rung: AtomicBool,
}

impl LocalWake {
    /// A silent one.
    pub fn new() -> std::io::Result<LocalWake> {
        Ok(LocalWake { doorbell: Doorbell::own()?, rung: AtomicBool::new(false) })
    }

    /// Wakes the thread that polls it.
    pub fn ring(&self) {
        // The doorbell before the flag: a drain between the two leaves the doorbell ringing once more, at worst, with
        // the flag set. In the other order, nothing would ever silence it.
        self.doorbell.ring();
        self.rung.store(true, Ordering::Release);
    }

    /// Silences it until the next ring.
    pub fn drain(&self) {
        if self.rung.swap(false, Ordering::Acquire) {
            self.doorbell.drain();
        }
    }
}

impl AsFd for LocalWake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.doorbell.as_fd()
    }
}
