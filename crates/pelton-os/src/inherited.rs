//! Listening sockets that another process has created and left open for this one (LISTEN_FDS), as systemd and `pelton
//! run` do: descriptors from 3 on, for the process that LISTEN_PID names.
//!
//! The variables stay set: another thread may read the environment meanwhile. A child has another process ID, so it
//! takes nothing. Once a socket is taken, a child's `exec` closes it.

use crate::descriptor::Descriptor;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, getsockname};
use std::ffi::{OsStr, OsString};
use std::io::Error;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// The number of the first descriptor.
const FIRST: RawFd = 3;
/// Limit of LISTEN_FDS: more descriptors than a process has by default.
const COUNT_MAX: RawFd = 65536;

/// An inherited socket with a path.
#[derive(Debug)]
struct Found {
    number: RawFd,
    path: PathBuf,
    /// Why nothing can listen by it.
    problem: Option<String>,
    /// Once it was taken for the first time. Stays open, so that this process can listen again.
    socket: OnceLock<Descriptor>,
    is_used: AtomicBool,
}

/// An inherited listening socket. This process listens by it until it is dropped, and may then take it again. The
/// socket stays, for the process that created it.
#[derive(Debug)]
pub struct Inherited {
    found: &'static Found,
}

/// The inherited sockets of this process.
fn all() -> std::io::Result<&'static [Found]> {
    static ALL: OnceLock<Vec<Found>> = OnceLock::new();
    let own = OsString::from(std::process::id().to_string());
    if std::env::var_os("LISTEN_PID").as_ref() != Some(&own) {
        return Ok(&[]);
    }
    if let Some(all) = ALL.get() {
        return Ok(all);
    }
    let count = std::env::var_os("LISTEN_FDS").unwrap_or_default();
    let count = count.to_str().and_then(|text| text.parse().ok()).filter(|count| (0..=COUNT_MAX).contains(count));
    let Some(count) = count else {
        return Err(Error::other(format!(
            "LISTEN_PID names this process, and LISTEN_FDS is {:?}: wanted a number of descriptors, or neither variable",
            std::env::var_os("LISTEN_FDS").unwrap_or_default()
        )));
    };
    Ok(ALL.get_or_init(|| (FIRST..FIRST + count).filter_map(find).collect()))
}

/// The descriptor of that number, if it is a Unix socket with a path; other ones are for other parts of the program.
fn find(number: RawFd) -> Option<Found> {
    // SAFETY: it is used here only, and the kernel reports an error for one that is not open.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    if socket_domain(fd).ok()? != AddressFamily::UNIX {
        return None;
    }
    let address = SocketAddrUnix::try_from(getsockname(fd).ok()?).ok()?;
    let path = PathBuf::from(OsStr::from_bytes(address.path_bytes()?));
    let problem = match (socket_type(fd), socket_acceptconn(fd)) {
        (Ok(SocketType::SEQPACKET), Ok(true)) => None,
        (Ok(SocketType::SEQPACKET), _) => Some("does not listen".to_owned()),
        _ => Some("is no seqpacket socket: write ListenSequentialPacket= in the socket unit".to_owned()),
    };
    Some(Found { number, path, problem, socket: OnceLock::new(), is_used: AtomicBool::new(false) })
}

impl Inherited {
    /// Takes the inherited socket whose path `is_wanted`; `None` if there is none. An error of the kind `AddrInUse`:
    /// this process listens by it already.
    pub fn take(is_wanted: impl Fn(&Path) -> bool) -> std::io::Result<Option<Inherited>> {
        let Some(found) = all()?.iter().find(|found| is_wanted(&found.path)) else { return Ok(None) };
        if let Some(problem) = &found.problem {
            let number = found.number;
            return Err(Error::other(format!("descriptor {number} of LISTEN_FDS has that path, but {problem}")));
        }
        if found.is_used.swap(true, Ordering::Relaxed) {
            return Err(std::io::ErrorKind::AddrInUse.into());
        }
        let inherited = Inherited { found };
        if found.socket.get().is_none() {
            // A copy first: after an error the number stays open, and the next call finds it.
            // SAFETY: LISTEN_PID says that it was left for this purpose, and it is open until a copy is kept.
            let left = unsafe { BorrowedFd::borrow_raw(found.number) };
            let socket = Descriptor::opened(|| fcntl_dupfd_cloexec(left, 0))??;
            fcntl_setfl(&socket, fcntl_getfl(&socket)? | OFlags::NONBLOCK)?;
            crate::socket::refuse_descriptors(&socket);
            let _ = found.socket.set(socket);
            // SAFETY: closed once, as `socket` is set from now on. `is_used` excludes other threads.
            drop(unsafe { OwnedFd::from_raw_fd(found.number) });
        }
        Ok(Some(inherited))
    }

    /// A copy of its descriptor, to listen by.
    pub fn socket(&self) -> std::io::Result<Descriptor> {
        let socket = self.found.socket.get().expect("it was taken").as_fd();
        Descriptor::opened(|| fcntl_dupfd_cloexec(socket, 0))?.map_err(Into::into)
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.found.path
    }
}

impl Drop for Inherited {
    fn drop(&mut self) {
        self.found.is_used.store(false, Ordering::Relaxed);
    }
}
