//! Listening under a name. Each accepted connection has some time to send its first packet.

use crate::error::{Error, Result};
use crate::handshake::{Handshake, Pace};
use crate::name::{Bound, Name};
use crate::opening::{Waiter, again};
#[cfg(doc)]
use crate::options::Options;
use crate::settings::HANDSHAKE_TIMEOUT;
use crate::settings::Settings;
use pelton_lane::failpoint;
use pelton_os::socket::{accept_at, first_readable, wait_for};
use pelton_os::{Descriptor, Watch, locked};
use rustix::event::epoll::{self, EventFlags};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Time limit for the first packet of a peer that has connected.
const GREETING: Duration = Duration::from_millis(500);
/// Limit of the peers whose first packet this side waits for at a time.
const CONNECTED_MAX: usize = 64;
/// Interval at which an event loop continues while there are that many. A guess.
const FULL_PAUSE: Duration = Duration::from_millis(10);

/// Waits for connections under a name. Either endpoint may listen. One listener accepts many peers, one after another,
/// as senders or receivers.
///
/// Its socket exists in the file system while the listener, or an endpoint that it accepted, lives. So a peer's
/// successor can connect to it. Dropping the last of them removes the socket. The next listener replaces a socket that
/// a dead process left.
///
/// A process that systemd or `pelton run` has started with a listening socket of the name (`LISTEN_PID`, `LISTEN_FDS`)
/// listens by that socket, and leaves it where it is. This holds for all that listens: services and receivers of many
/// senders too.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// let name = format!("unix:{}/listener-doc-{}", std::env::temp_dir().display(), std::process::id());
/// let listener = pelton::Listener::bind(&name)?;
/// let sending = std::thread::spawn(move || pelton::Sender::connect(&name)?.send(b"hello"));
/// let mut receiver = listener.accept_receiver()?;
/// assert_eq!(&*receiver.receive()?, b"hello");
/// # drop(receiver); sending.join().unwrap()
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Listener {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) bound: Bound,
    pub(crate) options: Settings,
    /// Peers that have connected and have not sent their first packet when a call returned.
    connected: Mutex<VecDeque<Connected>>,
    /// Readable while a connection waits in the backlog, or one of these peers has sent its first packet.
    readable: Descriptor,
}

/// A connected peer, and the deadline for its first packet.
type Connected = (Handshake, Instant);

impl Listener {
    /// Listens under `name` (a short name, or `unix:PATH`) with default [`Options`]. Does not wait.
    ///
    /// # Errors
    /// [`Error::InUse`] while another process listens there: stop it, or choose another name. [`Error::Name`] for a
    /// invalid name. [`Error::System`].
    pub fn bind(name: &str) -> Result<Listener> {
        Listener::with_settings(name, &Settings::default())
    }

    pub(crate) fn with_settings(name: &str, options: &Settings) -> Result<Listener> {
        Listener::bound(name, options, false)
    }

    /// As [`Listener::bind`], beside other processes that listen under the same short name.
    #[doc(hidden)]
    pub fn beside_others(name: &str, options: &Settings) -> Result<Listener> {
        Listener::bound(name, options, true)
    }

    fn bound(name: &str, options: &Settings, is_shared: bool) -> Result<Listener> {
        options.checked_sizes()?;
        let readable =
            Descriptor::opened(|| epoll::create(epoll::CreateFlags::CLOEXEC)).map(|made| made.map_err(Into::into));
        let readable = readable.flatten().map_err(Error::system("making an epoll"))?;
        let bound = Name::parse(name)?.listen(is_shared, !options.uids.is_empty())?;
        let added = epoll::add(&readable, bound.as_fd(), epoll::EventData::new_u64(0), EventFlags::IN);
        added.map_err(|errno| Error::system("watching the listener")(errno.into()))?;
        let inner = Inner { bound, options: options.clone(), connected: Mutex::default(), readable };
        Ok(Listener { inner: Arc::new(inner) })
    }

    /// The listening socket, for a process that this one starts.
    #[doc(hidden)]
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.inner.bound.as_fd()
    }

    /// Whether this process is a fork of the one that created the handle. For FFI.
    #[doc(hidden)]
    pub fn is_forked(&self) -> bool {
        self.inner.bound.is_forked()
    }

    /// Accepts until a handshake succeeds, or the deadline.
    pub(crate) async fn accept<T, F: Future<Output = Result<T>>>(
        &self,
        deadline: Option<Instant>,
        waiter: &Waiter,
        mut handshake: impl FnMut(Handshake) -> F,
    ) -> Result<Option<T>> {
        while let Some(begun) = self.begun(deadline, waiter).await? {
            if let Some(done) = Listener::done(handshake(begun).await)? {
                return Ok(Some(done));
            }
        }
        Ok(None)
    }

    /// The result of a handshake; `None` if the peer is at fault, which has received the reason.
    pub(crate) fn done<T>(handshake: Result<T>) -> Result<Option<T>> {
        match handshake {
            Err(error @ Error::System { .. }) => Err(error),
            done => Ok(done.ok()),
        }
    }

    /// Accepts a peer that has sent its first packet, and begins its handshake. `None` at the deadline.
    pub(crate) async fn begun(&self, deadline: Option<Instant>, waiter: &Waiter) -> Result<Option<Handshake>> {
        let Inner { bound, readable, .. } = &*self.inner;
        loop {
            if bound.is_forked() {
                return Err(Error::Forked);
            }
            let now = Instant::now();
            // Checks the deadline before it accepts a peer: afterwards it would have to disconnect that peer.
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(None);
            }
            let limit = now + HANDSHAKE_TIMEOUT;
            let watch = match waiter {
                Waiter::Thread => {
                    let Some(mut handshake) = self.greeted_until(deadline)? else { continue };
                    handshake.wait_until(deadline.map_or(limit, |deadline| deadline.min(limit)));
                    return Ok(Some(handshake));
                }
                Waiter::Loop(watch) => watch,
            };
            if let Some(mut handshake) = self.greeted(Some(now))? {
                handshake.poll_until(limit);
                // Otherwise the loop would not sleep while another peer waits for its turn.
                watch.remove(readable.as_fd());
                let watched = watch.add_socket(handshake.socket()).and_then(|()| watch.wake_at(Some(limit)));
                watched.map_err(Error::system("watching a connection"))?;
                return Ok(Some(handshake));
            }
            self.watch_by(watch).map_err(Error::system("watching the listener"))?;
            again().await;
        }
    }

    /// Has an event loop continue when a peer may have sent its first packet, or has not sent it in time.
    fn watch_by(&self, watch: &Watch) -> std::io::Result<()> {
        let readable = &self.inner.readable;
        let (is_full, first_silent) = self.silent();
        if !is_full {
            watch.add(readable.as_fd())?;
            return watch.wake_at(first_silent);
        }
        // It is readable by a peer that cannot be accepted yet, and so is no reason to continue.
        watch.remove(readable.as_fd());
        watch.wake_at(Some(Instant::now() + FULL_PAUSE))
    }

    /// Whether this side awaits the first packets of as many peers as it may, and the deadline of the first of them.
    fn silent(&self) -> (bool, Option<Instant>) {
        let connected = locked(&self.inner.connected);
        (connected.len() >= CONNECTED_MAX, connected.front().map(|(_, until)| *until))
    }

    /// As [`Listener::greeted`], for a thread: while it sleeps, the waiting peers are in the common list, because an
    /// event loop may accept one meanwhile, and leave it there.
    fn greeted_until(&self, deadline: Option<Instant>) -> Result<Option<Handshake>> {
        let earlier = |one: Option<Instant>| [deadline, one].into_iter().flatten().min();
        loop {
            let now = Instant::now();
            // While the list is full, the epoll is readable by a peer that cannot be accepted yet.
            let step = if self.silent().0 { now + FULL_PAUSE } else { now };
            let greeted = self.greeted(earlier(Some(step)))?;
            if greeted.is_some() || deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(greeted);
            }
            let (is_full, first_silent) = self.silent();
            if !is_full {
                let waited = wait_for(self.inner.readable.as_fd(), None, false, earlier(first_silent));
                waited.map_err(Error::system("waiting for a connection"))?;
            }
        }
    }

    /// Waits until a peer has sent its first packet, or the deadline. Accepts connections meanwhile. Takes one step
    /// even if the deadline has passed.
    fn greeted(&self, deadline: Option<Instant>) -> Result<Option<Handshake>> {
        let Inner { connected, readable, .. } = &*self.inner;
        let mut waiting = std::mem::take(&mut *locked(connected));
        waiting.iter().for_each(|(handshake, _)| _ = epoll::delete(readable, handshake.socket().as_fd()));
        let greeted = self.greeted_of(&mut waiting, deadline);
        // The next call continues with the waiting peers.
        let event = epoll::EventData::new_u64(0);
        waiting
            .retain(|(handshake, _)| epoll::add(readable, handshake.socket().as_fd(), event, EventFlags::IN).is_ok());
        locked(connected).append(&mut waiting);
        greeted
    }

    /// Waits for the first packets of several peers concurrently, so that a silent peer delays no other.
    fn greeted_of(&self, connected: &mut VecDeque<Connected>, deadline: Option<Instant>) -> Result<Option<Handshake>> {
        let bound = &self.inner.bound;
        loop {
            if bound.is_forked() {
                return Err(Error::Forked);
            }
            let listener = (connected.len() < CONNECTED_MAX).then(|| bound.as_fd());
            let first_silent = connected.front().map(|(_, until)| *until);
            let until = [deadline, first_silent].into_iter().flatten().min();
            let fds: Vec<_> =
                connected.iter().map(|(handshake, _)| handshake.socket().as_fd()).chain(listener).collect();
            let ready = first_readable(&fds, until).map_err(Error::system("waiting for a connection"))?;
            let Some(index) = ready else {
                let now = Instant::now();
                connected.retain(|(_, until)| now < *until);
                match deadline.is_some_and(|deadline| now >= deadline) {
                    true => return Ok(None),
                    false => continue,
                }
            };
            if let Some((greeting, _)) = connected.remove(index) {
                return Ok(Some(greeting));
            }
            if let Some(socket) = accept_at(bound.socket()).map_err(Error::system("accepting a connection"))? {
                failpoint("connect: accepted");
                match Handshake::new(socket, Pace::Polled(None), &self.inner.options, bound.name()) {
                    Ok(handshake) => connected.push_back((handshake, Instant::now() + GREETING)),
                    // Returns an error of the system, and no fault of the peer.
                    Err(error @ Error::System { .. }) => return Err(error),
                    Err(_) => {}
                }
            }
            // A handshake after it would disconnect the peer.
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(None);
            }
        }
    }
}

impl AsFd for Listener {
    /// Readable while a connection waits to be accepted.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.readable.as_fd()
    }
}
