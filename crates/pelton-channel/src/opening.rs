//! Opening without waiting: the operation is a future, and its caller's event loop polls it. The same future, run by a
//! thread that blocks, is the blocking form. So there is one description of the steps, retries and deadlines.

use crate::doorbells::Doorbells;
use crate::error::{Error, Result};
#[cfg(doc)]
use crate::options::Options;
use pelton_os::{Owner, Watch, locked};
use std::future::poll_fn;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

/// An endpoint or client that is being opened, for an event loop: [`Options::start_connect_sender`],
/// [`Options::start_connect_receiver`], `Client::start_connect`, and for a path [`Options::start_create_sender`],
/// [`Options::start_create_receiver`], [`Options::start_open_sender`] and [`Options::start_open_receiver`].
///
/// Whenever its descriptor is readable, call [`Opening::try_finish`]. The descriptor is level-triggered, and readable
/// from the beginning. Once the opening has ended, the descriptor is not readable any more. Nothing of it waits for
/// another process, and it needs no thread. Dropping it cancels: the other side detects that as the end of a
/// connection. `Send`: one thread at a time.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// use std::os::fd::AsFd;
/// let name = format!("unix:{}/opening-doc-{}", std::env::temp_dir().display(), std::process::id());
/// let listener = pelton::Listener::bind(&name)?;
/// let accepting = std::thread::spawn(move || listener.accept_receiver());
///
/// let mut opening = pelton::Options::new().start_connect_sender(&name)?;
/// let mut sender = loop {
///     // Your event loop waits instead.
///     rustix::event::poll(&mut [rustix::event::PollFd::new(&opening.as_fd(), rustix::event::PollFlags::IN)], None)
///         .unwrap();
///     if let Some(sender) = opening.try_finish()? {
///         break sender;
///     }
/// };
/// sender.send(b"hello")?;
/// assert_eq!(&*accepting.join().unwrap()?.receive()?, b"hello");
/// # Ok(())
/// # }
/// ```
#[must_use = "dropping it cancels"]
pub struct Opening<T> {
    /// `None` once it has finished.
    steps: Option<Pin<Box<dyn Future<Output = Result<T>> + Send>>>,
    watch: Arc<Watch>,
    owner: Owner,
}

impl<T> Opening<T> {
    /// Creates an opening of these steps, which wait by the given waiter. Runs none of them yet.
    #[doc(hidden)]
    pub fn new<F: Future<Output = Result<T>> + Send + 'static>(steps: impl FnOnce(Waiter) -> F) -> Result<Opening<T>> {
        let watch = Arc::new(Watch::new().map_err(Error::system("making an epoll and a timer"))?);
        let owner = Owner::current().map_err(Error::system("reading the owner of the handle"))?;
        Ok(Opening { steps: Some(Box::pin(steps(Waiter::Loop(watch.clone())))), watch, owner })
    }

    /// Continues, and returns the endpoint or client once it is open. `None`: not yet; watch the descriptor. Does not
    /// wait. Call it at any time; a call without a readable descriptor has no effect.
    ///
    /// # Errors
    /// Those of the blocking form, after which the opening has ended; [`Error::Forked`]; [`Error::Refused`] once it has
    /// ended.
    pub fn try_finish(&mut self) -> Result<Option<T>> {
        if self.owner.is_forked() {
            return Err(Error::Forked);
        }
        let ended = || Error::Refused("this opening has ended: start another one".to_owned());
        let steps = self.steps.as_mut().ok_or_else(ended)?;
        match steps.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Pending => Ok(None),
            Poll::Ready(opened) => {
                self.steps = None;
                self.watch.end();
                opened.map(Some)
            }
        }
    }
}

#[doc(hidden)]
impl<T> Opening<T> {
    /// Whether this process is a fork of the one that created the handle.
    pub fn is_forked(&self) -> bool {
        self.owner.is_forked()
    }
}

/// How to wait for a successor of the peer.
pub(crate) struct Resume<'a> {
    pub(crate) doorbells: &'a Doorbells,
    pub(crate) deadline: Option<Instant>,
    pub(crate) waiter: &'a Waiter,
}

/// Steps that borrow what they work on.
pub(crate) type Steps<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

/// An endpoint that waits for a successor of its peer, for an event loop: [`crate::Sender::start_resume`],
/// [`crate::Receiver::start_resume`].
///
/// As with an [`Opening`], call [`Resuming::try_finish`] whenever its descriptor is readable. [`Resuming::cancel`]
/// returns the endpoint, before the end too. Dropping it drops the endpoint. `Send`: one thread at a time.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// use std::os::fd::AsFd;
/// let name = format!("unix:{}/resuming-doc-{}", std::env::temp_dir().display(), std::process::id());
/// let listener = pelton::Listener::bind(&name)?;
/// # let connecting = name.clone();
/// let first = std::thread::spawn(move || pelton::Receiver::connect(&connecting));
/// let mut sender = listener.accept_sender()?;
/// sender.send(b"for the successor")?;
/// drop(first.join().unwrap()?);
///
/// let mut resuming = sender.start_resume().map_err(|failed| failed.1)?;
/// let second = std::thread::spawn(move || pelton::Receiver::connect(&name));
/// while !resuming.try_finish()? {
///     // Your event loop waits instead.
///     rustix::event::poll(&mut [rustix::event::PollFd::new(&resuming.as_fd(), rustix::event::PollFlags::IN)], None)
///         .unwrap();
/// }
/// sender = resuming.cancel();
/// assert_eq!(&*second.join().unwrap()?.receive()?, b"for the successor");
/// # drop(sender);
/// # Ok(())
/// # }
/// ```
#[must_use = "dropping it drops the endpoint"]
pub struct Resuming<T> {
    /// The first field: dropped before the endpoint, which its steps return.
    opening: Opening<()>,
    endpoint: Arc<Mutex<Option<T>>>,
}

/// The endpoint while the steps work on it. It returns to its place when they end, and when they are dropped.
struct Borrowed<T> {
    endpoint: Option<T>,
    place: Arc<Mutex<Option<T>>>,
}

impl<T> Drop for Borrowed<T> {
    fn drop(&mut self) {
        *locked(&self.place) = self.endpoint.take();
    }
}

impl<T: Send + 'static> Resuming<T> {
    /// Runs `resumed`, without a deadline. Returns the endpoint with an error.
    pub(crate) fn new(
        endpoint: T,
        resumed: impl for<'a> Fn(&'a mut T, &'a Waiter) -> Steps<'a, bool> + Send + 'static,
    ) -> std::result::Result<Resuming<T>, Box<(T, Error)>> {
        let place = Arc::new(Mutex::new(None));
        let mut borrowed = Borrowed { endpoint: Some(endpoint), place: place.clone() };
        let opening = Opening::new(|waiter| async move {
            let Some(endpoint) = &mut borrowed.endpoint else { unreachable!("it returns at the end of the steps") };
            resumed(endpoint, &waiter).await.map(|_| ())
        });
        match opening {
            Ok(opening) => Ok(Resuming { opening, endpoint: place }),
            Err(error) => Err(Box::new((returned(&place), error))),
        }
    }
}

impl<T> Resuming<T> {
    /// Continues, and returns whether the peer has a successor. False: not yet; watch the descriptor. Does not wait.
    /// Call it at any time. Of a sender whose receiver had closed, it copies all unreleased messages, up to the lane's
    /// capacity, once a successor has connected.
    ///
    /// # Errors
    /// Those of the blocking form, after which it has ended; [`Error::Forked`]; [`Error::Refused`] once it has ended.
    pub fn try_finish(&mut self) -> Result<bool> {
        self.opening.try_finish().map(|resumed| resumed.is_some())
    }

    /// Returns the endpoint, and cancels the wait if it has not ended: the endpoint is as before. Does not wait. A
    /// successor whose handshake has begun detects the end of a connection, and connects again.
    pub fn cancel(self) -> T {
        let Resuming { opening, endpoint } = self;
        drop(opening);
        returned(&endpoint)
    }
}

fn returned<T>(place: &Mutex<Option<T>>) -> T {
    locked(place).take().expect("the steps are over, and have returned the endpoint")
}

impl<T> std::fmt::Debug for Resuming<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Resuming").field("opening", &self.opening).finish_non_exhaustive()
    }
}

impl<T> AsFd for Resuming<T> {
    /// The descriptor for an event loop. It is another one than that of the endpoint.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.opening.as_fd()
    }
}

impl<T> AsRawFd for Resuming<T> {
    /// As [`AsFd`], for runtimes that need the number.
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl<T> std::fmt::Debug for Opening<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opening").field("has_ended", &self.steps.is_none()).finish_non_exhaustive()
    }
}

impl<T> AsFd for Opening<T> {
    /// The descriptor for an event loop. It is another one than that of the opened endpoint.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.watch.as_fd()
    }
}

impl<T> AsRawFd for Opening<T> {
    /// As [`AsFd`], for runtimes that need the number.
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// How the steps of an opening wait.
#[derive(Clone, Debug)]
pub enum Waiter {
    /// The calling thread blocks. So the first poll of the steps completes them: run them by [`in_call`].
    Thread,
    /// The steps are pending, and this descriptor becomes readable when they can continue.
    Loop(Arc<Watch>),
}

impl Waiter {
    /// Waits until then.
    pub async fn pause(&self, until: Instant) -> Result<()> {
        match self {
            Waiter::Thread => std::thread::sleep(until.saturating_duration_since(Instant::now())),
            Waiter::Loop(watch) => {
                watch.wake_at(Some(until)).map_err(Error::system("setting a timer"))?;
                while Instant::now() < until {
                    again().await;
                }
            }
        }
        Ok(())
    }

    /// Waits until one of the doorbells rings, or the deadline. May also return earlier.
    pub async fn sleep(&self, doorbells: &Doorbells, deadline: Option<Instant>) -> Result<()> {
        match self {
            Waiter::Thread => _ = doorbells.sleep(deadline)?,
            Waiter::Loop(watch) => {
                let watched = watch.add(doorbells.as_fd()).and_then(|()| watch.wake_at(deadline));
                watched.map_err(Error::system("watching doorbells"))?;
                again().await;
            }
        }
        Ok(())
    }
}

/// A future that is pending once, and ready at the next poll.
pub(crate) fn again() -> impl Future<Output = ()> {
    let mut is_polled = false;
    poll_fn(move |_| if std::mem::replace(&mut is_polled, true) { Poll::Ready(()) } else { Poll::Pending })
}

/// Runs steps that block.
pub fn in_call<T>(steps: impl Future<Output = T>) -> T {
    match pin!(steps).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => done,
        Poll::Pending => unreachable!("steps that block are never pending"),
    }
}
