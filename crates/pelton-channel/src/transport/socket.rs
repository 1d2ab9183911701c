//! The transport to another process, over the socket of the handshake.

use super::{Arrived, Transport};
use crate::error::{Error, Result};
use crate::packet::{PACKET_BYTES, descriptors_of, descriptors_packet};
use pelton_os::socket::{DESCRIPTORS_MAX, Socket, wait_for};
use pelton_os::{Descriptor, ReceivedFd};
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Limit of the descriptor packets that belong to other messages than the requested one: far more than fit into a
/// socket.
pub(crate) const PACKETS_MAX: usize = 1024;
/// Pause before a retry while the user has too many descriptors in flight.
const RETRY: Duration = Duration::from_millis(1);

/// A socket, and the process at its other end: either reports the peer's end.
#[derive(Clone, Debug)]
pub struct SharedLiveness {
    socket: Arc<Socket>,
    process: Option<Arc<Descriptor>>,
}

impl SharedLiveness {
    /// Descriptors to poll.
    pub fn fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [Some(self.socket.as_fd()), self.process.as_ref().map(|process| process.as_fd())]
    }
}

/// The transport of one lane. The two lanes of a link have clones of one.
#[derive(Clone, Debug)]
pub(crate) struct SocketTransport(SharedLiveness);

impl SocketTransport {
    /// A socket that [`crate::doorbells::Doorbells::watch`] watches, with the process that it returned.
    pub(crate) fn new(socket: Socket, process: Option<Descriptor>) -> SocketTransport {
        SocketTransport(SharedLiveness { socket: Arc::new(socket), process: process.map(Arc::new) })
    }

    fn wait(&self, to_write: bool, deadline: Option<Instant>, what: &str) -> Result<bool> {
        let process = self.0.process.as_ref().map(|process| process.as_fd());
        wait_for(self.0.socket.as_fd(), process, to_write, deadline).map_err(Error::system(what))
    }
}

impl Transport for SocketTransport {
    fn liveness(&self) -> [Option<BorrowedFd<'_>>; 2] {
        self.0.fds()
    }

    fn shared_liveness(&self) -> Option<SharedLiveness> {
        Some(self.0.clone())
    }

    fn shutdown(&self) {
        self.0.socket.shutdown();
    }

    fn try_send_descriptors(&self, seq: u32, fds: &[BorrowedFd<'_>]) -> Result<bool> {
        match self.0.socket.try_send(&descriptors_packet(seq), fds) {
            // The peer has gone, or has closed with unread data. The wait for space reports that.
            Err(error) if [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset].contains(&error.kind()) => Ok(false),
            // This user has too many descriptors in flight, in all of its sockets.
            Err(error) if error.raw_os_error() == Some(libc::ETOOMANYREFS) => {
                std::thread::sleep(RETRY);
                Ok(false)
            }
            sent => sent.map_err(Error::system("sending descriptors")),
        }
    }

    fn wait_for_descriptor_space(&self, deadline: Option<Instant>) -> Result<bool> {
        self.wait(true, deadline, "waiting for space for descriptors")
    }

    fn next_descriptors(&mut self, deadline: Option<Instant>) -> Result<Option<Arrived>> {
        loop {
            if let Some(arrived) = receive_packet(&self.0.socket)? {
                return Ok(arrived);
            }
            if deadline.is_none() || !self.wait(false, deadline, "waiting for descriptors")? {
                return Ok(None);
            }
        }
    }

    fn drain_descriptors(&mut self, arrived: &mut VecDeque<Arrived>) -> Result<()> {
        while let Some(Some(next)) = receive_packet(&self.0.socket)? {
            arrived.push_back(next);
            if arrived.len() > PACKETS_MAX {
                return Err(Error::Corrupt(format!("descriptors came for more than {PACKETS_MAX} messages")));
            }
        }
        Ok(())
    }
}

/// Receives the next packet of descriptors. Returns `None` if there is none yet, and `Some(None)` if the peer has
/// closed.
fn receive_packet(socket: &Socket) -> Result<Option<Option<Arrived>>> {
    let mut packet = [0; PACKET_BYTES];
    let received = socket.try_receive(&mut packet).map_err(Error::system("receiving descriptors"))?;
    let Some((bytes, fds, is_truncated)) = received else { return Ok(None) };
    if bytes == 0 {
        return Ok(Some(None));
    }
    let found = fds.len();
    if found > DESCRIPTORS_MAX {
        return Err(Error::Corrupt(format!(
            "{found} descriptors came with a packet, wanted at most {DESCRIPTORS_MAX}"
        )));
    }
    if let Some(waiting) = fds.first().and_then(ReceivedFd::overdue) {
        return Err(Error::Corrupt(format!(
            "descriptors came while {waiting} of that user's wait to be closed for long"
        )));
    }
    match descriptors_of(&packet[..bytes]) {
        Some(seq) => Ok(Some(Some(Arrived { seq, fds, is_truncated }))),
        None => Err(Error::Corrupt(format!("a packet of {bytes} bytes came, wanted descriptors"))),
    }
}
