//! The Unix sockets that connect two sides: seqpacket, with descriptors and credentials.

use crate::descriptor::Descriptor;
use crate::mutex::locked;
use crate::received_fd::{ReceivedFd, close_elsewhere};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, recvmsg, sendmsg, socket_with,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Instant;

/// Limit of the descriptors with one message.
pub const DESCRIPTORS_MAX: usize = 64;
/// The kernel's limit for one packet (SCM_MAX_FD). Descriptors beyond the receiver's space are closed in its call,
/// whatever they are.
const KERNEL_DESCRIPTORS_MAX: usize = 253;
/// Space for that many descriptors and for credentials.
// SAFETY: these only compute sizes.
const CONTROL_BYTES: usize = unsafe {
    (libc::CMSG_SPACE((KERNEL_DESCRIPTORS_MAX * size_of::<libc::c_int>()) as u32)
        + libc::CMSG_SPACE(size_of::<libc::ucred>() as u32)) as usize
};

/// The process at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its process ID when it connected; on a path channel, as the peer states it.
    pub pid: u32,
    /// Its user ID, from the kernel; on a path channel, the owner of the directory.
    pub uid: u32,
}

/// One end of a connected socket.
#[derive(Debug)]
pub struct Socket {
    fd: ManuallyDrop<Descriptor>,
    /// The epolls that poll it: the socket leaves them before its close, which may block.
    epolls: Mutex<Vec<Weak<Descriptor>>>,
    /// Of a socket pair: the user of the other end.
    other_uid: Option<u32>,
    /// Of a socket that connected: the process that sent its first packet.
    sender: Option<OnceLock<Peer>>,
}

/// A socket that accepts no descriptors yet, nor do connections that are accepted from it: see
/// [`Socket::take_descriptors`].
fn new() -> std::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    set_option(&fd, SO_PASSRIGHTS, 0);
    Ok(fd)
}

/// Has a listening socket, and connections that are accepted from it later, accept no descriptors yet.
pub(crate) fn refuse_descriptors(listener: &Descriptor) {
    set_option(listener, SO_PASSRIGHTS, 0);
}

/// Whether others may send descriptors to a socket. Before Linux 6.16 they always may.
const SO_PASSRIGHTS: libc::c_int = 83;

/// A listening socket at `path`, which must not exist. If it `permits_others`, every user whom the directory lets in
/// can connect, whatever the umask, unless other users may write the directory. Otherwise the umask decides.
pub fn listen_at(path: &Path, permits_others: bool) -> std::io::Result<Descriptor> {
    let address = SocketAddrUnix::new(path)?;
    let fd = new()?;
    bind(&fd, &address)?;
    pelton_lane::failpoint("name: bound");
    let permitted = if permits_others { permit_others(path) } else { Ok(()) };
    let listening = permitted.and_then(|()| Ok(listen(&fd, 128)?)).and_then(|()| Descriptor::new(fd));
    listening.inspect_err(|_| {
        let _ = std::fs::remove_file(path);
    })
}

/// Lets every user connect to the socket at `path`, if only this user or root may write its directory: in any other,
/// such as /tmp, another process may have replaced the socket, and everybody could reach it. What is no socket of this
/// user stays as it is.
fn permit_others(path: &Path) -> std::io::Result<()> {
    use rustix::fs::{FileType, Mode, OFlags, fstat, open};
    let own = rustix::process::geteuid().as_raw();
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let directory = rustix::fs::stat(parent)?;
    if directory.st_mode & 0o022 != 0 || ![own, 0].contains(&directory.st_uid) {
        return Ok(());
    }
    let fd = open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let found = fstat(&fd)?;
    if !FileType::from_raw_mode(found.st_mode).is_socket() || found.st_uid != own {
        return Ok(());
    }
    // fchmod takes no such descriptor, and before Linux 6.6 no chmod spares what a symbolic link leads to.
    rustix::fs::chmod(format!("/proc/self/fd/{}", fd.as_raw_fd()), Mode::from_raw_mode(0o666))
        .map_err(|errno| std::io::Error::other(format!("letting other users connect, by /proc: {errno}")))
}

/// The next connection; `None` when there is none yet.
pub fn accept_at(listener: &Descriptor) -> std::io::Result<Option<Socket>> {
    match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        Ok(fd) => Ok(Some(Socket::of(fd)?)),
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Sets an integer option. One that the kernel does not know has no effect.
fn set_option(fd: impl AsFd, option: libc::c_int, value: libc::c_int) {
    // SAFETY: the kernel reads one integer.
    unsafe {
        let (raw, len) = (fd.as_fd().as_raw_fd(), size_of::<libc::c_int>() as libc::socklen_t);
        libc::setsockopt(raw, libc::SOL_SOCKET, option, (&raw const value).cast(), len);
    }
}

/// Reads an option. Not by rustix, whose type cannot represent a pid from another namespace, which is 0.
fn option<T: Copy>(fd: impl AsFd, option: libc::c_int, value: &mut T) -> std::io::Result<()> {
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes of plain integers to `value`.
    let done = unsafe {
        let raw = fd.as_fd().as_raw_fd();
        libc::getsockopt(raw, libc::SOL_SOCKET, option, std::ptr::from_mut(value).cast(), &mut len)
    };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Whether a received socket is of the kind of doorbells. Makes a request to the socket only.
pub(crate) fn is_unix_seqpacket(fd: impl AsFd) -> std::io::Result<bool> {
    Ok(socket_domain(&fd)? == AddressFamily::UNIX && socket_type(&fd)? == SocketType::SEQPACKET)
}

/// Whether the other end is shut down.
pub(crate) fn is_shut_down(socket: &Socket) -> bool {
    matches!(poll_by(&mut [PollFd::new(socket, PollFlags::RDHUP)], Some(Instant::now())), Ok(true))
}

/// Whether descriptors may wait in a socket that was shut down: not where they were refused; else if there is a packet,
/// also an empty one, which a read does not distinguish from the end. So the kernel adds the sender's credentials to
/// each packet.
fn may_have_descriptors(fd: impl AsFd) -> bool {
    let mut lets_in: libc::c_int = 1;
    if option(&fd, SO_PASSRIGHTS, &mut lets_in).is_ok() && lets_in == 0 {
        return false;
    }
    set_option(&fd, libc::SO_PASSCRED, 1);
    // There is no space for credentials or descriptors here: they stay in the socket, and the result is marked as
    // truncated.
    let mut none = RecvAncillaryBuffer::default();
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let mut look = || rustix::io::retry_on_intr(|| recvmsg(&fd, &mut [IoSliceMut::new(&mut [0])], &mut none, flags));
    // Reported once, if the peer closed with unread packets of this side; what it sent before is still there.
    let found = look().or_else(|error| if error == Errno::CONNRESET { look() } else { Err(error) });
    found.is_ok_and(|found| found.bytes > 0 || found.flags.contains(rustix::net::ReturnFlags::CTRUNC))
}

impl Socket {
    fn of(fd: OwnedFd) -> std::io::Result<Socket> {
        let fd = ManuallyDrop::new(Descriptor::new(fd)?);
        Ok(Socket { fd, epolls: Mutex::default(), other_uid: None, sender: None })
    }

    /// A connected pair: this side's end, which accepts no descriptors where the kernel can refuse them, and that
    /// user's end.
    pub(crate) fn pair(other_uid: u32) -> std::io::Result<(Socket, OwnedFd)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (near, far) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        set_option(&near, SO_PASSRIGHTS, 0);
        let mut near = Socket::of(near)?;
        near.other_uid = Some(other_uid);
        Ok((near, far))
    }

    fn other_uid(&self) -> std::io::Result<u32> {
        self.other_uid.map_or_else(|| self.peer().map(|peer| peer.uid), Ok)
    }

    /// Notes an epoll that polls this socket.
    pub(crate) fn add_epoll(&self, epoll: &Arc<Descriptor>) {
        let mut epolls = locked(&self.epolls);
        epolls.retain(|other| other.strong_count() > 0 && other.as_ptr() != Arc::as_ptr(epoll));
        epolls.push(Arc::downgrade(epoll));
    }

    /// From now on the peer may send descriptors: its user is checked.
    pub fn take_descriptors(&self) {
        set_option(self, SO_PASSRIGHTS, 1);
    }

    /// Connects. `ConnectionRefused`: no process listens there any more. `WouldBlock`: the listener is too busy.
    pub fn connect(path: &Path) -> std::io::Result<Socket> {
        let address = SocketAddrUnix::new(path)?;
        let fd = new()?;
        connect(&fd, &address)?;
        // The process that listens may have inherited the socket: then the kernel names the one that created it.
        set_option(&fd, libc::SO_PASSCRED, 1);
        let mut socket = Socket::of(fd)?;
        socket.sender = Some(OnceLock::new());
        Ok(socket)
    }

    /// Whether this end has connected, to a listening socket.
    pub fn has_connected(&self) -> bool {
        self.sender.is_some()
    }

    /// The process at the other end. Until its first packet has arrived, a socket that connected knows only the process
    /// that created the listening socket.
    pub fn peer(&self) -> std::io::Result<Peer> {
        match self.sender.as_ref().and_then(OnceLock::get) {
            Some(sender) => Ok(*sender),
            None => self.creator(),
        }
    }

    /// The process that connected to, or created, the other end.
    fn creator(&self) -> std::io::Result<Peer> {
        let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
        option(self, libc::SO_PEERCRED, &mut found)?;
        Ok(Peer { pid: found.pid as u32, uid: found.uid })
    }

    /// A descriptor that is readable once the peer's process has ended. `None` where the kernel or the pid namespace
    /// does not permit one; then the socket's own hang-up has to suffice.
    pub fn peer_process(&self) -> std::io::Result<Option<Descriptor>> {
        const SO_PEERPIDFD: libc::c_int = 77;
        let mut fd: libc::c_int = -1;
        let peer = self.peer()?;
        if self.creator()? == peer && option(self, SO_PEERPIDFD, &mut fd).is_ok() && fd >= 0 {
            // SAFETY: the kernel has just created it, for this call.
            return Ok(Some(Descriptor::new(unsafe { OwnedFd::from_raw_fd(fd) })?));
        }
        // Before 6.5, and for a process that inherited the listening socket: by its number, which could belong to
        // another process by now; then the socket has hung up. A process of another pid namespace has no number here.
        let Some(pid) = rustix::process::Pid::from_raw(peer.pid as i32) else { return Ok(None) };
        match rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) {
            Ok(fd) => Ok(Some(Descriptor::new(fd)?)),
            Err(Errno::SRCH | Errno::INVAL | Errno::PERM | Errno::NOSYS) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Sends one packet, with descriptors. Returns false if the socket is full.
    pub fn try_send(&self, packet: &[u8], fds: &[BorrowedFd<'_>]) -> std::io::Result<bool> {
        assert!(fds.len() <= DESCRIPTORS_MAX);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(fds));
        }
        loop {
            match sendmsg(self, &[IoSlice::new(packet)], &mut ancillary, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(_) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Receives one packet into `packet`. Returns its bytes, the descriptors, and whether this process had too few free
    /// descriptors. `None`: no packet is there now. 0 bytes: the peer is gone.
    pub fn try_receive(&self, packet: &mut [u8]) -> std::io::Result<Option<(usize, Vec<ReceivedFd>, bool)>> {
        let mut control = [0_u64; CONTROL_BYTES.div_ceil(size_of::<u64>())];
        let mut reset = false;
        loop {
            let mut part = libc::iovec { iov_base: packet.as_mut_ptr().cast(), iov_len: packet.len() };
            // SAFETY: its fields are integers and pointers, for which zero is valid.
            let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
            (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
            (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), CONTROL_BYTES as _);
            let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
            // SAFETY: the kernel writes at most the given lengths to the two buffers.
            let received = unsafe { libc::recvmsg(self.as_fd().as_raw_fd(), &mut message, flags) };
            if received >= 0 {
                let fds = self.take_control(&message)?;
                return Ok(Some((received as usize, fds, message.msg_flags & libc::MSG_CTRUNC != 0)));
            }
            match Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO) {
                Errno::INTR => {}
                Errno::AGAIN => return Ok(None),
                // Reported once, if the peer closed with unread packets of this side; what it sent before is still
                // there.
                Errno::CONNRESET if !reset => reset = true,
                Errno::CONNRESET => return Ok(Some((0, Vec::new(), false))),
                error => return Err(error.into()),
            }
        }
    }

    /// Takes the descriptors of a received packet. Notes its sender, if it is the first packet of a socket that
    /// connected.
    fn take_control(&self, message: &libc::msghdr) -> std::io::Result<Vec<ReceivedFd>> {
        let mut fds = Vec::new();
        // SAFETY: the kernel has filled the control buffer, and reduced its length to that of whole messages.
        let mut control = unsafe { libc::CMSG_FIRSTHDR(message) };
        while !control.is_null() {
            // SAFETY: it points to a message in the buffer, whose length includes its header.
            let (header, data) = unsafe { (control.read_unaligned(), libc::CMSG_DATA(control)) };
            // SAFETY: as above; a header has a constant size.
            let bytes = header.cmsg_len as u64 as usize - unsafe { libc::CMSG_LEN(0) } as usize;
            match (header.cmsg_level, header.cmsg_type) {
                (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                    for index in 0..bytes / size_of::<libc::c_int>() {
                        // SAFETY: the kernel has created the descriptors for this call, which owns them from here on.
                        fds.push(unsafe {
                            OwnedFd::from_raw_fd(data.cast::<libc::c_int>().add(index).read_unaligned())
                        });
                    }
                }
                (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) if bytes >= size_of::<libc::ucred>() => {
                    // SAFETY: the message has that many bytes, which are integers.
                    let found = unsafe { data.cast::<libc::ucred>().read_unaligned() };
                    self.note_sender(Peer { pid: found.pid as u32, uid: found.uid })?;
                }
                _ => {}
            }
            // SAFETY: both point into the same buffer.
            control = unsafe { libc::CMSG_NXTHDR(message, control) };
        }
        if fds.is_empty() {
            return Ok(Vec::new());
        }
        let uid = self.other_uid()?;
        fds.into_iter().map(|fd| ReceivedFd::of_peer(fd, uid)).collect()
    }

    fn note_sender(&self, found: Peer) -> std::io::Result<()> {
        let Some(sender) = &self.sender else { return Ok(()) };
        // Of the process that created the socket, the effective uid is known; these credentials have the real one.
        let creator = self.creator()?;
        let is_creator = found.pid == creator.pid && found.pid != 0;
        if sender.set(if is_creator { creator } else { found }).is_ok() {
            set_option(self, libc::SO_PASSCRED, 0);
        }
        Ok(())
    }

    /// Reports to the peer that this side is gone, whichever processes have the socket.
    pub fn shutdown(&self) {
        let _ = rustix::net::shutdown(self, rustix::net::Shutdown::Both);
    }
}

/// Waits until one of these is readable, or hung up, and returns its index. `None`: the deadline.
pub fn first_readable(fds: &[BorrowedFd<'_>], deadline: Option<Instant>) -> std::io::Result<Option<usize>> {
    let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    Ok(poll_by(&mut polled, deadline)?.then(|| polled.iter().position(|fd| !fd.revents().is_empty())).flatten())
}

/// Waits until a descriptor is readable (or writable, or hung up), or `process` ends. Returns false at the deadline.
pub fn wait_for(
    fd: BorrowedFd<'_>,
    process: Option<BorrowedFd<'_>>,
    to_write: bool,
    deadline: Option<Instant>,
) -> std::io::Result<bool> {
    let flags = if to_write { PollFlags::OUT } else { PollFlags::IN };
    let (also, its_flags) = process.map_or((fd, flags), |process| (process, PollFlags::IN));
    poll_by(&mut [PollFd::new(&fd, flags), PollFd::new(&also, its_flags)], deadline)
}

/// Waits until one of these is ready, or hung up. Returns false at the deadline.
pub(crate) fn poll_by(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> std::io::Result<bool> {
    loop {
        let timeout = deadline.map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
        });
        match poll(fds, timeout.as_ref()) {
            Err(Errno::INTR) => {}
            ready => return Ok(ready? > 0),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let uid = self.other_uid();
        // SAFETY: taken once, here.
        let socket = unsafe { ManuallyDrop::take(&mut self.fd) };
        if !socket.is_own() {
            return;
        }
        // To close it also closes what is queued. After this nothing can be queued any more.
        let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
        // Explicitly: a process that inherited the socket may keep it open, and it would be reported for ever.
        for epoll in locked(&self.epolls).drain(..).filter_map(|epoll| epoll.upgrade()) {
            let _ = rustix::event::epoll::delete(&*epoll, &socket);
        }
        if may_have_descriptors(&socket)
            && let Ok(uid) = uid
            && let Some(fd) = socket.into_owned()
        {
            close_elsewhere(fd, uid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn mode(path: &Path) -> u32 {
        std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_socket_permits_others_only_if_asked_and_never_what_has_replaced_it() {
        let directory = std::env::temp_dir().join(format!("pelton-socket-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o755)).unwrap();
        let at = |name: &str| directory.join(name);
        let found = std::panic::catch_unwind(|| {
            let _own = listen_at(&at("own"), false).unwrap();
            std::fs::create_dir(at("made")).unwrap();
            assert_eq!(mode(&at("own")), mode(&at("made")), "the umask decides");
            let _public = listen_at(&at("public"), true).unwrap();
            assert_eq!(mode(&at("public")), 0o666);

            std::fs::write(at("secret"), "").unwrap();
            std::fs::set_permissions(at("secret"), std::fs::Permissions::from_mode(0o600)).unwrap();
            std::os::unix::fs::symlink(at("secret"), at("link")).unwrap();
            std::os::unix::fs::symlink(at("own"), at("link to a socket")).unwrap();
            for name in ["secret", "link", "link to a socket"] {
                permit_others(&at(name)).unwrap();
            }
            assert_eq!((mode(&at("secret")), mode(&at("own"))), (0o600, mode(&at("made"))));

            std::fs::set_permissions(at("made"), std::fs::Permissions::from_mode(0o1777)).unwrap();
            let _writable = listen_at(&at("made/socket"), true).unwrap();
            assert_ne!(mode(&at("made/socket")), 0o666, "others may write the directory");
        });
        std::fs::remove_dir_all(&directory).unwrap();
        found.unwrap();
    }
}
