//! What ties a handle to its peer: the bells, the socket that tells a death, and the descriptor for the caller's loop.

use crate::error::{Error, Result};
use crate::os::socket::{DESCRIPTORS_MAX, Socket};
use crate::os::{Bell, Descriptor, Pollable, Ready, poll_until};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Who is at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its process when it connected.
    pub pid: u32,
    /// Its user, as the kernel vouches for.
    pub uid: u32,
}

/// Descriptors on their way between threads, by the number of their message.
type Local = Arc<Mutex<VecDeque<(u32, Vec<OwnedFd>)>>>;

#[derive(Debug)]
enum Way {
    Socket { socket: Socket, process: Option<Descriptor> },
    Threads(Local),
}

/// The connection of one handle.
#[derive(Debug)]
pub(crate) struct Link {
    bell: Arc<Bell>,
    peer_bell: Bell,
    way: Way,
    peer: Peer,
    pollable: Pollable,
    looked: Instant,
    /// Descriptors received ahead of the message that they belong to.
    received: VecDeque<(u32, Vec<OwnedFd>)>,
}

/// How often an operation that finds no reason to sleep may look whether the peer is alive.
const LOOK_EVERY: Duration = Duration::from_millis(1);

impl Link {
    /// A link over a socket. `bell` and `pollable` are this side's, and stay the same for a successor.
    pub(crate) fn over_socket(
        (bell, pollable): (Bell, Pollable),
        peer_bell: Bell,
        socket: Socket,
        peer: Peer,
    ) -> std::io::Result<Link> {
        let way = watch(&pollable, socket)?;
        Ok(Link {
            bell: Arc::new(bell),
            peer_bell,
            way,
            peer,
            pollable,
            looked: Instant::now(),
            received: VecDeque::new(),
        })
    }

    /// Two links between threads.
    pub(crate) fn between_threads() -> std::io::Result<[Link; 2]> {
        let local = Local::default();
        let peer = Peer { pid: std::process::id(), uid: rustix::process::geteuid().as_raw() };
        let (left, right) = (Bell::new()?, Bell::new()?);
        let link = |bell: Bell, peer_bell: &Bell| -> std::io::Result<Link> {
            let peer_bell = Bell::from_peer(peer_bell.as_fd().try_clone_to_owned()?)?;
            let pollable = Pollable::new(&bell)?;
            Ok(Link {
                bell: Arc::new(bell),
                peer_bell,
                way: Way::Threads(local.clone()),
                peer,
                pollable,
                looked: Instant::now(),
                received: VecDeque::new(),
            })
        };
        let right_for_left = Bell::from_peer(right.as_fd().try_clone_to_owned()?)?;
        let second = link(right, &left)?;
        Ok([link(left, &right_for_left)?, second])
    }

    pub(crate) fn peer(&self) -> Peer {
        self.peer
    }

    /// Goes on with the peer's successor: the bell and the pollable descriptor stay.
    pub(crate) fn reconnect(&mut self, peer_bell: Bell, socket: Socket, peer: Peer) -> std::io::Result<()> {
        self.way = watch(&self.pollable, socket)?;
        (self.peer_bell, self.peer) = (peer_bell, peer);
        Ok(())
    }

    pub(crate) fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }

    pub(crate) fn ring_peer(&self) {
        self.peer_bell.ring();
    }

    fn life(&self) -> [Option<BorrowedFd<'_>>; 2] {
        match &self.way {
            Way::Socket { socket, process } => [Some(socket.as_fd()), process.as_ref().map(|p| p.as_fd())],
            Way::Threads(_) => [None, None],
        }
    }

    /// Sleeps until the peer rings or goes, or the deadline.
    pub(crate) fn sleep(&self, deadline: Option<Instant>) -> Result<Ready> {
        poll_until(Some(self.bell.as_fd()), self.life(), deadline).map_err(Error::system("waiting for the peer"))
    }

    /// Whether the peer has gone, by one system call.
    pub(crate) fn is_peer_gone(&mut self) -> Result<bool> {
        self.looked = Instant::now();
        if let Way::Threads(_) = self.way {
            return Ok(false);
        }
        let ready = poll_until(None, self.life(), Some(self.looked)).map_err(Error::system("looking at the peer"))?;
        Ok(ready == Ready::Gone)
    }

    /// As [`Link::is_peer_gone`], but looks only once in a millisecond: for those who ask often.
    pub(crate) fn is_peer_known_gone(&mut self) -> Result<bool> {
        if self.looked.elapsed() < LOOK_EVERY {
            return Ok(false);
        }
        self.is_peer_gone()
    }

    /// Ends the connection from this side.
    pub(crate) fn shutdown(&self) {
        match &self.way {
            Way::Socket { socket, .. } => socket.shutdown(),
            Way::Threads(_) => {}
        }
    }

    /// Sends the descriptors of message `seq`. False: there is no room for them now.
    pub(crate) fn try_send_descriptors(&self, seq: u32, fds: &[BorrowedFd<'_>]) -> Result<bool> {
        match &self.way {
            Way::Socket { socket, .. } => {
                let packet = crate::connect::descriptors_packet(seq);
                socket.try_send(&packet, fds).map_err(Error::system("sending descriptors"))
            }
            Way::Threads(local) => {
                let owned = fds.iter().map(|fd| fd.try_clone_to_owned()).collect::<std::io::Result<Vec<_>>>();
                let owned = owned.map_err(Error::system("duplicating descriptors"))?;
                local.lock().unwrap_or_else(PoisonError::into_inner).push_back((seq, owned));
                Ok(true)
            }
        }
    }

    /// Waits until descriptors may be sent again. False: the deadline.
    pub(crate) fn wait_for_descriptor_room(&self, deadline: Option<Instant>) -> Result<bool> {
        match &self.way {
            Way::Socket { socket, .. } => {
                socket.wait(true, deadline).map_err(Error::system("waiting for room for descriptors"))
            }
            Way::Threads(_) => Ok(true),
        }
    }

    /// The descriptors of message `seq`, which were sent before it was committed.
    pub(crate) fn receive_descriptors(&mut self, seq: u32, count: u32) -> Result<Vec<OwnedFd>> {
        let truncated = self.take_in(Some(seq))?;
        let place = self.received.iter().position(|(of, _)| *of == seq);
        let fds = place.and_then(|place| self.received.remove(place)).map(|(_, fds)| fds).unwrap_or_default();
        if fds.len() == count as usize {
            Ok(fds)
        } else if truncated {
            Err(Error::DescriptorsLost { seq, sent: count as usize, received: fds.len() })
        } else {
            Err(Error::Corrupt(format!("message {seq} came with {} descriptors, said {count}", fds.len())))
        }
    }

    /// Takes in what descriptors have come, up to those of message `until`; answers whether some were cut off.
    pub(crate) fn take_in(&mut self, until: Option<u32>) -> Result<bool> {
        let mut truncated_any = false;
        match &self.way {
            Way::Threads(local) => {
                self.received.extend(local.lock().unwrap_or_else(PoisonError::into_inner).drain(..));
            }
            Way::Socket { socket, .. } => {
                let mut packet = [0; crate::connect::PACKET_BYTES];
                while !self.received.iter().any(|(seq, _)| Some(*seq) == until) {
                    let got = socket.try_receive(&mut packet).map_err(Error::system("receiving descriptors"))?;
                    let Some((bytes, fds, truncated)) = got.filter(|(bytes, ..)| *bytes > 0) else { break };
                    truncated_any |= truncated;
                    let Some(seq) = crate::connect::descriptors_of(&packet[..bytes]) else {
                        return Err(Error::Corrupt(format!("a packet of {bytes} bytes came, wanted descriptors")));
                    };
                    if fds.len() > DESCRIPTORS_MAX || self.received.len() > 1 << 16 {
                        return Err(Error::Corrupt("descriptors came for no message".to_owned()));
                    }
                    self.received.push_back((seq, fds));
                }
            }
        }
        Ok(truncated_any)
    }

    /// Forgets descriptors of message `seq` and later ones: their sender died before it committed them.
    pub(crate) fn forget_descriptors_from(&mut self, seq: u32) {
        self.received.retain(|(of, _)| (of.wrapping_sub(seq) as i32) < 0);
    }
}

/// Has the pollable descriptor tell the end of the peer at this socket. A former peer's descriptors left it when they
/// were closed.
fn watch(pollable: &Pollable, socket: Socket) -> std::io::Result<Way> {
    let process = socket.peer_process()?;
    pollable.watch(socket.as_fd(), process.as_ref().map(|process| process.as_fd()))?;
    Ok(Way::Socket { socket, process })
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pollable.as_fd()
    }
}
