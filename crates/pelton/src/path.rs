//! The ends of a path channel: they claim a role in a directory, and find everything else there. What the directory holds, and
//! every check of it, is in `directory.rs`.

use crate::connect::Origin;
use crate::directory::{Access, Directory, SenderRole};
use crate::doorbells::Doorbells;
use crate::error::{Error, Result};
use crate::lanes::{Lane, LaneMemory, receiver_sleeper};
use crate::link::Link;
use crate::options::Options;
use crate::receiver::{Receiver, ReceiverParts};
use crate::sender::{Sender, SenderMemory, SenderParts};
use crate::transport::{PathTransport, PeerRole};
use pelton_lane::failpoint;
use pelton_os::Peer;
use pelton_os::lock::Lock;
use pelton_os::{Descriptor, Segment, membarrier, own_uid};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Until a peer is found.
const UNKNOWN: Peer = Peer { pid: 0, uid: 0 };
/// Between two looks whether the directory is there by now.
const RETRY: Duration = Duration::from_millis(10);

/// A role in a directory, as long as its handle lives.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) directory: Arc<Directory>,
    is_synced: AtomicBool,
    /// Held open: the other sides notice when it is no more.
    _life: Descriptor,
    /// After the life, so that a successor finds this one gone.
    _lock: Lock,
}

/// Whether to make a channel that is not there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Make {
    Create,
    Open,
}

fn directory(path: &Path, options: &Options, make: Make) -> Result<Arc<Directory>> {
    let access = Access { uids: options.uids.clone(), mode: options.mode };
    if make == Make::Create {
        let (capacity, limit) = options.path_sizes()?;
        return Directory::create(path, &access, capacity, limit, options.checked_lanes()?).map(Arc::new);
    }
    loop {
        if let Some(directory) = Directory::open(path, &access)? {
            return Ok(Arc::new(directory));
        }
        match options.connect_deadline {
            Some(deadline) if Instant::now() < deadline => std::thread::sleep(RETRY),
            _ => return Err(Error::NoChannel { path: path.display().to_string() }),
        }
    }
}

pub(crate) fn sender(path: &Path, options: &Options, make: Make) -> Result<Sender> {
    let directory = directory(path, options, make)?;
    let can_barrier = membarrier::register();
    let SenderRole { number: _, lock, page, data, consumer, receiver, bell, receiver_bell, life } =
        directory.claim_sender()?;
    failpoint("sender: claimed");
    let place =
        Arc::new(Place { directory: directory.clone(), is_synced: AtomicBool::new(false), _life: life, _lock: lock });
    let [page, data, consumer, receiver] = [page, data, consumer, receiver].map(Arc::new);
    let memory = SenderMemory { page, data, consumer, receiver };
    let bells = Doorbells::with(bell).map_err(Error::system("making an eventfd and an epoll"))?;
    let link = Link::new(receiver_bell, PathTransport::new(directory.clone(), PeerRole::Receiver), UNKNOWN);
    let mut lane = memory.take_over(directory.message_bytes_max(), can_barrier)?;
    failpoint("sender: taken over");
    // Whoever received last may have closed; and nothing is known of what has memory behind it.
    lane.continue_without_consumer();
    lane.set_backed(0);
    let mut sender = Sender::new(SenderParts { lane, bells, link, memory }, options, Origin::Path(place))?;
    sender.meet()?;
    failpoint("sender: met");
    if let Some(deadline) = options.connect_deadline
        && !sender.wait_for_peer(Some(deadline))?
    {
        return Err(nobody("a receiver", path));
    }
    Ok(sender)
}

/// There is no handshake in which the maker would learn what the receiver takes.
fn check_size(directory: &Directory, options: &Options) -> Result<()> {
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

pub(crate) fn receiver(path: &Path, options: &Options, make: Make) -> Result<Receiver> {
    let directory = directory(path, options, make)?;
    check_size(&directory, options)?;
    let can_barrier = membarrier::register();
    let role = directory.claim_receiver()?;
    failpoint("receiver: claimed");
    let place = Arc::new(Place { directory, is_synced: AtomicBool::new(false), _life: role.life, _lock: role.lock });
    let bells = Doorbells::with(role.bell).map_err(Error::system("making an eventfd and an epoll"))?;
    let page = Arc::new(role.page);
    // Before any lane says that it is open: a predecessor that closed said so here as well.
    let sleeper = receiver_sleeper(&page, can_barrier);
    let lane = place.open_lane(0, page)?;
    failpoint("receiver: taken over");
    let parts = ReceiverParts { lane, sleeper, bells };
    let mut receiver = Receiver::new(parts, options, Origin::Path(place))?;
    receiver.meet()?;
    failpoint("receiver: met");
    // Messages that wait are as good as who sent them.
    if let Some(deadline) = options.connect_deadline
        && !receiver.has_messages()
        && !receiver.wait_for_peer(Some(deadline))?
    {
        return Err(nobody("a sender", path));
    }
    Ok(receiver)
}

fn nobody(whom: &str, path: &Path) -> Error {
    Error::TimedOut(format!("waiting for {whom} to open {}", path.display()))
}

impl Place {
    /// Sees to it that the directory and its names are on the disk, once: what is in its files is of no use without.
    pub(crate) fn sync_directory(&self) -> Result<()> {
        if !self.is_synced.load(Relaxed) {
            self.directory.sync()?;
            // Relaxed: done twice at worst.
            self.is_synced.store(true, Relaxed);
        }
        Ok(())
    }

    /// The receiver's part of a lane, which goes on where its predecessor had released to.
    pub(crate) fn open_lane(&self, number: u32, receiver: Arc<Segment>) -> Result<Lane> {
        let files = self.directory.lane_for_receiver(number)?;
        let [page, data, consumer] = [files.producer, files.data, files.consumer].map(Arc::new);
        let memory = LaneMemory { page, data, consumer, receiver };
        let limit = self.directory.message_bytes_max();
        let (consumer, redelivered) = memory.take_over(limit, membarrier::register())?;
        let link =
            Link::new(files.bell, PathTransport::new(self.directory.clone(), PeerRole::SenderOf(number)), UNKNOWN);
        let mut lane = Lane::new(consumer, link, redelivered, number, memory);
        // After the machine's end numbers may come again, of what was not on the disk.
        lane.id = lane.id.since_boot(self.directory.boot_id());
        Ok(lane)
    }
}
