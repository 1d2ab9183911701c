//! Notifications to the service manager that has started this program (`sd_notify`): one datagram to the socket that
//! NOTIFY_SOCKET names.

use crate::failure::print_stderr;
use std::{
    ffi::OsString,
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
};

/// This program listens, or has what it needs.
pub const READY: &str = "READY=1";
/// It ends once it has finished its work.
pub const STOPPING: &str = "STOPPING=1";

/// It reads its configuration again; [`READY`] follows. systemd compares the time with its own.
pub fn reloading() -> String {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    format!("RELOADING=1\nMONOTONIC_USEC={}", now.tv_sec * 1_000_000 + now.tv_nsec / 1000)
}

/// Sends `state`, if a service manager wants it. A failure is reported, and changes nothing else.
pub fn notify(state: &str) {
    let Some(address) = std::env::var_os("NOTIFY_SOCKET").filter(|address| !address.is_empty()) else { return };
    if let Err(error) = send(&address, state) {
        print_stderr(format_args!("cannot send {state} to NOTIFY_SOCKET, {}: {error}", address.display()));
    }
}

fn send(address: &OsString, state: &str) -> io::Result<()> {
    let address = match address.as_bytes().split_first() {
        Some((b'@', name)) => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(address)?,
    };
    let socket = UnixDatagram::unbound()?;
    // A manager that does not read must not block this program.
    socket.set_nonblocking(true)?;
    socket.send_to_addr(state.as_bytes(), &address).map(|_| ())
}
