//! The Unix sockets that connect two sides: seqpacket, with descriptors and credentials.

use super::Descriptor;
use crate::link::Peer;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, recvmsg, sendmsg,
    socket_with,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::time::Instant;

/// The most descriptors that go with one message.
pub(crate) const DESCRIPTORS_MAX: usize = 64;

/// One end of a connected socket.
#[derive(Debug)]
pub(crate) struct Socket(Descriptor);

fn new() -> std::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// A listening socket at `path`, which must not exist.
pub(crate) fn listen_at(path: &Path) -> std::io::Result<Descriptor> {
    let address = SocketAddrUnix::new(path)?;
    let fd = new()?;
    bind(&fd, &address)?;
    pelton_lane::step("name: bound");
    let listening = listen(&fd, 128).map_err(std::io::Error::from).and_then(|()| Descriptor::new(fd));
    listening.inspect_err(|_| {
        let _ = std::fs::remove_file(path);
    })
}

/// The next connection; `None` when there is none yet.
pub(crate) fn accept_at(listener: &Descriptor) -> std::io::Result<Option<Socket>> {
    match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        Ok(fd) => Ok(Some(Socket(Descriptor::new(fd)?))),
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

impl Socket {
    /// Connects. `ConnectionRefused`: nobody listens there any more. `WouldBlock`: somebody does, and has no time.
    pub(crate) fn connect(path: &Path) -> std::io::Result<Socket> {
        let address = SocketAddrUnix::new(path)?;
        let fd = new()?;
        connect(&fd, &address)?;
        Ok(Socket(Descriptor::new(fd)?))
    }

    /// Who made, or listens at, the other end.
    pub(crate) fn peer(&self) -> std::io::Result<Peer> {
        let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
        self.option(libc::SO_PEERCRED, &mut found)?;
        Ok(Peer { pid: found.pid as u32, uid: found.uid })
    }

    /// A descriptor that is readable once the peer's process has ended. `None` where the kernel or the pid namespace does
    /// not let us have one; the socket's own hang-up must do then.
    pub(crate) fn peer_process(&self) -> std::io::Result<Option<Descriptor>> {
        const SO_PEERPIDFD: libc::c_int = 77;
        let mut fd: libc::c_int = -1;
        if self.option(SO_PEERPIDFD, &mut fd).is_ok() && fd >= 0 {
            // SAFETY: the kernel has just made it, for us.
            return Ok(Some(Descriptor::new(unsafe { OwnedFd::from_raw_fd(fd) })?));
        }
        // Before 6.5: by number, which could have been given to another process; then the socket has hung up. A process
        // of another pid namespace has none here.
        let Some(pid) = rustix::process::Pid::from_raw(self.peer()?.pid as i32) else { return Ok(None) };
        match rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) {
            Ok(fd) => Ok(Some(Descriptor::new(fd)?)),
            Err(Errno::SRCH | Errno::INVAL | Errno::PERM | Errno::NOSYS) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads a socket option. Our own call: a pid from another namespace is 0, which rustix's type cannot say.
    fn option<T: Copy>(&self, option: libc::c_int, value: &mut T) -> std::io::Result<()> {
        let mut len = size_of::<T>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes of plain integers to `value`.
        let done = unsafe {
            let raw = self.0.as_fd().as_raw_fd();
            libc::getsockopt(raw, libc::SOL_SOCKET, option, std::ptr::from_mut(value).cast(), &mut len)
        };
        if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    }

    /// Sends one packet, with descriptors. False: the socket is full.
    pub(crate) fn try_send(&self, packet: &[u8], fds: &[BorrowedFd<'_>]) -> std::io::Result<bool> {
        assert!(fds.len() <= DESCRIPTORS_MAX);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(fds));
        }
        loop {
            match sendmsg(&self.0, &[IoSlice::new(packet)], &mut ancillary, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(_) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Receives one packet into `packet`: how many bytes, the descriptors, and whether some did not fit into this
    /// process. `None`: nothing there now. 0 bytes: the peer is gone.
    pub(crate) fn try_receive(&self, packet: &mut [u8]) -> std::io::Result<Option<(usize, Vec<OwnedFd>, bool)>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut reset = false;
        loop {
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            match recvmsg(&self.0, &mut [IoSliceMut::new(packet)], &mut ancillary, flags) {
                Ok(received) => {
                    let mut fds = Vec::new();
                    for message in ancillary.drain() {
                        if let RecvAncillaryMessage::ScmRights(rights) = message {
                            fds.extend(rights);
                        }
                    }
                    let truncated = received.flags.contains(rustix::net::ReturnFlags::CTRUNC);
                    return Ok(Some((received.bytes, fds, truncated)));
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                // Said once, of a peer that closed with packets of ours unread; what it sent before is still there.
                Err(Errno::CONNRESET) if !reset => reset = true,
                Err(Errno::CONNRESET) => return Ok(Some((0, Vec::new(), false))),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Tells the peer that this side is gone, whoever else has the socket.
    pub(crate) fn shutdown(&self) {
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }
}

/// Waits until a descriptor is readable (or writable, or hung up), or `process` ends. False: the deadline.
pub(crate) fn wait_for(
    fd: BorrowedFd<'_>,
    process: Option<BorrowedFd<'_>>,
    to_write: bool,
    deadline: Option<Instant>,
) -> std::io::Result<bool> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    loop {
        let flags = if to_write { PollFlags::OUT } else { PollFlags::IN };
        let timeout = deadline.map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
        });
        let (also, its_flags) = process.map_or((fd, flags), |process| (process, PollFlags::IN));
        match poll(&mut [PollFd::new(&fd, flags), PollFd::new(&also, its_flags)], timeout.as_ref()) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(ready) => return Ok(ready > 0),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
