//! Service discovery: how a client finds and connects to the services of one name.
//!
//! Nothing here waits. The client reads the name's directory when a connection has ended or drains, when no connection
//! can take a request, once in some hundred submissions, and at intervals while something waits for space. Handshakes
//! continue when their socket is ready.

use super::connection::Connection;
use pelton_channel::raw::Settings;
use pelton_channel::raw::{Connecting, Doorbells, HANDSHAKE_TIMEOUT, Name, start_duplex, start_duplex_later};
use pelton_channel::{Error, Result};
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Submissions between two reads of the directory, each of which costs some microseconds; and between two polls of
/// pending handshakes.
const SUBMISSIONS_PER_READ: u32 = 256;
const SUBMISSIONS_PER_POLL: u32 = 16;
/// Time between two reads of the directory while something waits for space, or for the first reply of a handshake.
pub(super) const READ_INTERVAL: Duration = Duration::from_millis(100);
/// Most connections and handshakes of a client, so that a process which can create sockets cannot exhaust the client's
/// descriptors.
const SERVICES_MAX: usize = 64;

#[derive(Debug)]
pub(super) struct Discovery {
    pub(super) name: Name,
    options: Settings,
    pending: Vec<Pending>,
    /// The last number given to a connection or a handshake.
    number: u32,
    submissions: u32,
    /// When the directory was read last.
    read: Instant,
    /// Services that did not reply, and until when they are skipped.
    unresponsive: Vec<(PathBuf, Instant)>,
    /// Services that refused this client, and until when they are skipped, or until the user has that error.
    rejected: Vec<(PathBuf, Instant)>,
    /// Why the last handshake failed, unless its service had hung up.
    error: Option<Error>,
    /// Services that hung up in a handshake.
    pub(super) hang_ups: u32,
    /// There has been a connection.
    has_connected: bool,
}

/// A handshake with a service.
struct Pending {
    path: PathBuf,
    began: Instant,
    /// Returns `None` if nobody listens there any more.
    handshake: Connecting,
}

impl std::fmt::Debug for Pending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a service at {}", self.path.display())
    }
}

impl Discovery {
    pub(super) fn new(name: Name, options: &Settings) -> Discovery {
        Discovery {
            name,
            options: options.clone(),
            pending: Vec::new(),
            number: 0,
            submissions: 0,
            read: Instant::now(),
            unresponsive: Vec::new(),
            rejected: Vec::new(),
            error: None,
            hang_ups: 0,
            has_connected: false,
        }
    }

    /// Whether the directory was last read some time ago.
    pub(super) fn is_due(&self) -> bool {
        self.read.elapsed() >= READ_INTERVAL
    }

    /// Whether a handshake is pending.
    pub(super) fn is_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Why the last handshake failed, once.
    pub(super) fn take_error(&mut self) -> Option<Error> {
        self.rejected.clear();
        self.error.take()
    }

    /// A request was submitted. At intervals this discovers services.
    #[inline(always)]
    pub(super) fn count_submission(&mut self, connections: &mut Vec<Connection>, doorbells: &Doorbells) {
        self.submissions = self.submissions.wrapping_add(1);
        if self.submissions.is_multiple_of(SUBMISSIONS_PER_READ) {
            // There is a connection. If there is none later, the same error comes again.
            let _ = self.discover(connections, doorbells, SERVICES_MAX);
        } else if !self.pending.is_empty() && self.submissions.is_multiple_of(SUBMISSIONS_PER_POLL) {
            self.poll(connections, doorbells);
        }
    }

    /// Begins a handshake with each service that listens and is not known, at most `most` of them.
    #[cold]
    pub(super) fn discover(
        &mut self,
        connections: &mut Vec<Connection>,
        doorbells: &Doorbells,
        most: usize,
    ) -> Result<()> {
        self.read = Instant::now();
        self.unresponsive.retain(|(_, until)| self.read < *until);
        self.rejected.retain(|(_, until)| self.read < *until);
        let mut paths = self.name.sockets()?;
        // Clients that submit a call or two should be spread too.
        let start = RandomState::new().hash_one(self.number) as usize % paths.len().max(1);
        paths.rotate_left(start);
        let mut begun = 0;
        for path in paths {
            if begun == most || connections.len() + self.pending.len() >= SERVICES_MAX {
                break;
            }
            let is_known = |of: &Path| of == path;
            // A draining service listens no more: its path may be that of a process with the same number in another pid
            // namespace.
            if connections.iter().any(|connection| connection.is_open() && connection.is_to(&path))
                || self.pending.iter().any(|on| is_known(&on.path))
                || self.unresponsive.iter().chain(&self.rejected).any(|(path, _)| is_known(path))
            {
                continue;
            }
            match self.connect(path, doorbells) {
                Ok(true) => begun += 1,
                Ok(false) => {}
                // There may be others.
                Err(error) => self.error = Some(error),
            }
        }
        self.poll(connections, doorbells);
        Ok(())
    }

    /// Begins a handshake. Returns false if nobody listens there.
    fn connect(&mut self, path: PathBuf, doorbells: &Doorbells) -> Result<bool> {
        let number = self.number + 1;
        let Some(handshake) = start_duplex(&self.name, &path, &self.options, doorbells, number)? else {
            return Ok(false);
        };
        self.number = number;
        self.pending.push(Pending { path, began: self.read, handshake });
        Ok(true)
    }

    /// Connects again, after a pause, to a service that has hung up: it may hang up on every client. Until then the
    /// handshake is pending.
    fn connect_later(&mut self, path: PathBuf, doorbells: &Doorbells) -> Result<()> {
        self.number += 1;
        let handshake = start_duplex_later(&self.name, &path, &self.options, doorbells, self.number)?;
        self.pending.push(Pending { path, began: Instant::now(), handshake });
        Ok(())
    }

    fn note_failure(&mut self, error: Error) {
        match error {
            // The next read of the directory finds its successor.
            Error::HungUp => self.hang_ups += 1,
            error => self.error = Some(error),
        }
    }

    /// Continues the pending handshakes.
    pub(super) fn poll(&mut self, connections: &mut Vec<Connection>, doorbells: &Doorbells) {
        let mut index = 0;
        while index < self.pending.len() {
            let Pending { handshake, began, .. } = &mut self.pending[index];
            let Poll::Ready(result) = handshake.as_mut().poll(&mut Context::from_waker(Waker::noop())) else {
                if began.elapsed() < HANDSHAKE_TIMEOUT {
                    index += 1;
                    continue;
                }
                // It may live, but it does not serve.
                let Pending { path, .. } = self.pending.swap_remove(index);
                self.note_failure(Error::TimedOut(format!(
                    "greeting the service at {}, which does not answer",
                    path.display()
                )));
                self.unresponsive.push((path, Instant::now() + HANDSHAKE_TIMEOUT));
                continue;
            };
            let Pending { path, .. } = self.pending.swap_remove(index);
            self.number += 1;
            match result {
                Ok(None) => {}
                Ok(Some(duplex)) => {
                    connections.push(Connection::new(duplex, path, self.number));
                    self.error = None;
                    self.has_connected = true;
                }
                // Before its first connection, the client has a deadline of its own.
                Err(Error::HungUp) if self.has_connected => {
                    self.connect_later(path, doorbells).unwrap_or_else(|error| self.note_failure(error));
                }
                Err(error) => {
                    self.note_failure(error);
                    // The user should have the error before the client connects again.
                    self.rejected.push((path, Instant::now() + READ_INTERVAL));
                }
            }
        }
    }
}
