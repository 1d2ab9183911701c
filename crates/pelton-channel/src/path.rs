//! Makers of a path channel's endpoints: they claim a role in a directory and open its files. `directory.rs` has the
//! files and every check of them.

use crate::directory::{Access, Directory, SenderRole};
use crate::doorbells::Doorbells;
use crate::error::{Error, Result};
use crate::lanes::{Lane, ReceiverParts, receiver_sleeper};
use crate::link::{Link, UNKNOWN_PEER};
use crate::opening::{Opening, Waiter, in_call};
use crate::options::{Options, maker};
use crate::receiver::Receiver;
use crate::role::RoleClaim;
use crate::sender::{Sender, SenderMemory, SenderParts};
use crate::settings::Settings;
use crate::transport::{PathTransport, PeerRole};
use pelton_lane::failpoint;
use pelton_os::{membarrier, own_uid};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval of the checks whether the directory exists.
const RETRY: Duration = Duration::from_millis(10);

/// Makes endpoints of path channels.
impl Options<maker::CreateSender> {
    /// Creates the path channel `directory`, or opens an existing one with the sizes that it was created with, as a
    /// sender. Continues after the last message that its predecessor committed. Needs no receiver.
    ///
    /// Waits while the channel has as many senders as lanes: until [`Options::connect_deadline`], and without one for
    /// 200 ms, because a killed process keeps its role until the kernel has ended it. So a restart right after a kill
    /// succeeds.
    ///
    /// # Errors
    /// [`Error::RoleTaken`] if the channel has as many senders as lanes after that wait; [`Error::NotAChannel`] if
    /// something else exists at the path, or a check fails; [`Error::NoSpace`]; [`Error::Rebooted`];
    /// [`Error::Corrupt`]: `pelton recover`; [`Error::TimedOut`], [`Error::Option`], [`Error::System`].
    pub fn create_sender(&self, directory: impl AsRef<Path>) -> Result<Sender> {
        in_call(sender(directory.as_ref().to_owned(), self.settings().clone(), Make::Create, Waiter::Thread))
    }

    /// As [`Options::create_sender`], but does not wait: the caller's event loop continues it. A relative path is
    /// resolved when the loop does so.
    ///
    /// # Errors
    /// As [`Options::start_connect_sender`].
    pub fn start_create_sender(&self, directory: impl AsRef<Path>) -> Result<Opening<Sender>> {
        let (path, settings) = (directory.as_ref().to_owned(), self.settings().begun());
        Opening::new(|waiter| sender(path, settings, Make::Create, waiter))
    }
}

impl Options<maker::OpenSender> {
    /// As [`Options::create_sender`], but does not create a channel.
    ///
    /// # Errors
    /// As [`Options::create_sender`]; [`Error::NoChannel`].
    pub fn open_sender(&self, directory: impl AsRef<Path>) -> Result<Sender> {
        in_call(sender(directory.as_ref().to_owned(), self.settings().clone(), Make::Open, Waiter::Thread))
    }

    /// As [`Options::open_sender`], but does not wait: the caller's event loop continues it. A relative path is
    /// resolved when the loop does so.
    ///
    /// # Errors
    /// As [`Options::start_connect_sender`].
    pub fn start_open_sender(&self, directory: impl AsRef<Path>) -> Result<Opening<Sender>> {
        let (path, settings) = (directory.as_ref().to_owned(), self.settings().begun());
        Opening::new(|waiter| sender(path, settings, Make::Open, waiter))
    }
}

impl Options<maker::CreateReceiver> {
    /// Creates the path channel `directory`, or opens an existing one, as its receiver. Begins with the oldest message
    /// that its predecessor had not released. Needs no sender. Waits while another receiver is alive, as
    /// [`Options::create_sender`] does.
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// use std::time::{Duration, Instant};
    /// let directory = std::env::temp_dir().join(format!("pelton-role-doc-{}", std::process::id()));
    /// let first = pelton::Options::new().create_receiver(&directory)?;
    /// let mut sender = pelton::Options::new().open_sender(&directory)?;
    /// sender.send(b"for the successor")?;
    /// // Usually another process, which ends some time later:
    /// let ending = std::thread::spawn(move || drop(first));
    /// let deadline = Instant::now() + Duration::from_secs(10);
    /// let mut second = pelton::Options::new().connect_deadline(deadline).open_receiver(&directory)?;
    /// assert_eq!(&*second.receive()?, b"for the successor");
    /// # ending.join().unwrap();
    /// # drop((sender, second));
    /// # pelton::inspect::remove(&directory)
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Options::create_sender`]; [`Error::RoleTaken`] when another receiver is alive after that wait.
    pub fn create_receiver(&self, directory: impl AsRef<Path>) -> Result<Receiver> {
        in_call(receiver(directory.as_ref().to_owned(), self.settings().clone(), Make::Create, Waiter::Thread))
    }

    /// As [`Options::create_receiver`], but does not wait: the caller's event loop continues it. A relative path is
    /// resolved when the loop does so.
    ///
    /// # Errors
    /// As [`Options::start_connect_sender`].
    pub fn start_create_receiver(&self, directory: impl AsRef<Path>) -> Result<Opening<Receiver>> {
        let (path, settings) = (directory.as_ref().to_owned(), self.settings().begun());
        Opening::new(|waiter| receiver(path, settings, Make::Create, waiter))
    }
}

impl Options<maker::OpenReceiver> {
    /// As [`Options::create_receiver`], but does not create a channel.
    ///
    /// # Errors
    /// As [`Options::create_receiver`]; [`Error::NoChannel`].
    pub fn open_receiver(&self, directory: impl AsRef<Path>) -> Result<Receiver> {
        in_call(receiver(directory.as_ref().to_owned(), self.settings().clone(), Make::Open, Waiter::Thread))
    }

    /// As [`Options::open_receiver`], but does not wait: the caller's event loop continues it. A relative path is
    /// resolved when the loop does so.
    ///
    /// # Errors
    /// As [`Options::start_connect_sender`].
    pub fn start_open_receiver(&self, directory: impl AsRef<Path>) -> Result<Opening<Receiver>> {
        let (path, settings) = (directory.as_ref().to_owned(), self.settings().begun());
        Opening::new(|waiter| receiver(path, settings, Make::Open, waiter))
    }
}

/// Whether to create a channel that does not exist.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Make {
    Create,
    Open,
}

async fn directory(
    path: &Path,
    options: &Settings,
    make: Make,
    deadline: Option<Instant>,
    waiter: &Waiter,
) -> Result<Arc<Directory>> {
    let access = Access { uids: options.uids.clone(), mode: options.mode };
    if make == Make::Create {
        let (capacity, limit) = options.path_sizes()?;
        let lanes = options.checked_lanes()?;
        return Directory::create(path, &access, capacity, limit, lanes, options.traced).map(Arc::new);
    }
    directory_or_wait(path, deadline, waiter, || Directory::open(path, &access)).await.map(Arc::new)
}

/// Waits until `deadline` for a channel that `open` finds.
pub(crate) async fn directory_or_wait(
    path: &Path,
    deadline: Option<Instant>,
    waiter: &Waiter,
    open: impl Fn() -> Result<Option<Directory>>,
) -> Result<Directory> {
    loop {
        if let Some(directory) = open()? {
            return Ok(directory);
        }
        match deadline {
            Some(deadline) if Instant::now() < deadline => waiter.pause(Instant::now() + RETRY).await?,
            _ => return Err(Error::NoChannel { path: path.display().to_string() }),
        }
    }
}

async fn sender(path: PathBuf, options: Settings, make: Make, waiter: Waiter) -> Result<Sender> {
    let deadline = options.connect_deadline.from_now();
    let directory = directory(&path, &options, make, deadline, &waiter).await?;
    let can_barrier = membarrier::register();
    let SenderRole { number: _, lock, page, data, consumer, receiver, doorbell, receiver_doorbell, liveness } =
        directory.claim_sender_until(deadline, &waiter).await?;
    failpoint("sender: claimed");
    let role = RoleClaim::new(directory.clone(), liveness, lock);
    let [page, data, consumer, receiver] = [page, data, consumer, receiver].map(Arc::new);
    let memory = SenderMemory { page, data, consumer, receiver, is_moved: false };
    let doorbells = Doorbells::with(doorbell).map_err(Error::system("making an eventfd and an epoll"))?;
    let link = Link::new(receiver_doorbell, PathTransport::new(directory.clone(), PeerRole::Receiver), UNKNOWN_PEER);
    let mut lane = memory.take_over(directory.message_bytes_max(), can_barrier)?;
    failpoint("sender: taken over");
    // The last receiver may have closed. How much of the memory is allocated is unknown.
    lane.continue_without_consumer();
    lane.set_backed(0);
    // The channel's creator has decided that.
    let options = Settings { traced: directory.is_traced(), ..options };
    let mut sender = Sender::new(SenderParts { lane, link, memory }, doorbells, &options)?;
    sender.endpoint.role = Some(role);
    sender.find_and_ring_peer()?;
    failpoint("sender: met");
    if let Some(deadline) = deadline
        && !sender.wait_for_peer(Some(deadline), &waiter).await?
    {
        return Err(timed_out("a receiver", &path));
    }
    Ok(sender)
}

/// Checks the channel's size: without a handshake, its creator does not know the receiver's limits.
pub(crate) fn check_size(directory: &Directory, options: &Settings) -> Result<()> {
    let (bytes, lanes) = (directory.capacity(), u64::from(directory.lanes_max()));
    let most = options.path_lane_bytes_max(directory.owner() == own_uid());
    if bytes <= most && options.memory.is_none_or(|memory| bytes * lanes <= memory) {
        return Ok(());
    }
    let memory = options.memory.map_or(String::new(), |memory| format!(", and {memory} in all"));
    let problem = format!(
        "it has up to {lanes} lanes of {bytes} bytes, this receiver takes lanes of {most}{memory}: raise its memory option"
    );
    Err(Error::NotAChannel { path: directory.path().display().to_string(), problem })
}

async fn receiver(path: PathBuf, options: Settings, make: Make, waiter: Waiter) -> Result<Receiver> {
    let deadline = options.connect_deadline.from_now();
    let directory = directory(&path, &options, make, deadline, &waiter).await?;
    check_size(&directory, &options)?;
    let can_barrier = membarrier::register();
    let role = directory.claim_receiver_until(deadline, &waiter).await?;
    failpoint("receiver: claimed");
    let claim = RoleClaim::new(directory, role.liveness, role.lock);
    let doorbells = Doorbells::with(role.doorbell).map_err(Error::system("making an eventfd and an epoll"))?;
    let page = Arc::new(role.page);
    // Before it opens a lane: a predecessor that closed has marked this page as closed.
    let sleeper = receiver_sleeper(&page, can_barrier);
    let lane = Lane::open(&claim.directory, 0, page)?;
    failpoint("receiver: taken over");
    let parts = ReceiverParts { lane, sleeper, doorbells };
    let mut receiver = Receiver::new(parts, &options)?.with_role(claim);
    receiver.find_and_ring_senders()?;
    failpoint("receiver: met");
    // With messages in the channel, the receiver needs no sender.
    if let Some(deadline) = deadline
        && !receiver.has_messages()
        && !receiver.wait_for_peer(Some(deadline), &waiter).await?
    {
        return Err(timed_out("a sender", &path));
    }
    Ok(receiver)
}

fn timed_out(peer: &str, path: &Path) -> Error {
    Error::TimedOut(format!("waiting for {peer} to open {}", path.display()))
}
