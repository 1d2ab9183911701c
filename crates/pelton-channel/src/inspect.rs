//! Channels seen from outside: who is at a name; what is in a path channel, whether it is whole, making it whole, removing it.

use crate::counters::Counters;
use crate::directory::{Access, Directory, SenderRole};
use crate::error::{Error, Result};
use crate::name::Name;
use pelton_lane::{ConsumerPage, Data, Position, ProducerPage, Scan, failpoint, scan, truncate};
use pelton_os::{self as os, Segment};
use std::path::{Path, PathBuf};

/// What can be seen of a path channel without taking part in it; see [`info`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ChannelInfo {
    /// Its directory.
    pub path: PathBuf,
    /// Bytes of data of each lane.
    pub capacity: u64,
    /// The largest message, in bytes.
    pub message_bytes_max: u64,
    /// Bytes of a lane that a sender uses at first while its reader keeps up: see [`crate::Options::resident_max`].
    pub window: u64,
    /// Permission bits of the directory.
    pub mode: u32,
    /// The most lanes that it can have.
    pub lanes_max: u32,
    /// Whether it was made, or recovered, since the machine was last started.
    pub is_from_this_boot: bool,
    /// The version of the layout and the protocol that it speaks.
    pub wire_version: u32,
    /// The signature of its layout.
    pub layout_signature: u64,
    /// The receiver.
    pub receiver: RoleInfo,
    /// Its lanes, by number.
    pub lanes: Vec<LaneInfo>,
}

/// Who has, or had, a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoleInfo {
    /// Whether somebody has it now: proved by a lock, not guessed.
    pub is_alive: bool,
    /// The process, as it says, of who has it or had it last; 0 if nobody ever did. It may be of another pid namespace.
    pub pid: u32,
    /// How many have had it.
    pub generation: u64,
    /// Whether the last one closed rather than died. Says nothing while `is_alive`.
    pub is_closed: bool,
}

/// One lane of a channel.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LaneInfo {
    /// Which.
    pub number: u32,
    /// Its sender.
    pub sender: RoleInfo,
    /// Messages committed and not released. Of a live channel: about.
    pub depth: u64,
    /// The number of the oldest message not released.
    pub head_seq: u32,
    /// The number of the next message.
    pub tail_seq: u32,
    /// Bytes of memory, or disk, that its data takes.
    pub allocated_bytes: u64,
    /// Figures of its senders, summed up.
    pub sent: Counters,
    /// Figures of its receivers, summed up.
    pub received: Counters,
}

/// What [`check`] finds of a lane, and what [`recover`] did with it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecoveredLane {
    /// Which.
    pub number: u32,
    /// Messages that are whole, and kept.
    pub kept: u64,
    /// Messages that were committed, by the sender's last word, and cannot be kept.
    pub dropped: u64,
    /// What is wrong behind those that are kept.
    pub problem: Option<String>,
}

impl RecoveredLane {
    /// Whether there is, or was, nothing to be done.
    pub fn is_whole(&self) -> bool {
        self.dropped == 0 && self.problem.is_none()
    }
}

/// Looking takes whatever the mode is: what is not to be seen is kept from view by the system.
fn open(path: &Path) -> Result<Directory> {
    let access = Access { uids: Vec::new(), mode: 0o777 };
    let found = Directory::open_any_boot(path, &access)?;
    found.ok_or_else(|| Error::NoChannel { path: path.display().to_string() })
}

/// Looks at a path channel, live or not, without touching it. Does not wait.
///
/// # Errors
/// [`Error::NoChannel`], [`Error::NotAChannel`], [`Error::System`].
pub fn info(path: impl AsRef<Path>) -> Result<ChannelInfo> {
    let directory = open(path.as_ref())?;
    let mut receiver = RoleInfo { is_alive: directory.is_receiver_held()?, pid: 0, generation: 0, is_closed: false };
    let mut lanes = Vec::new();
    for number in 0..directory.lanes()? {
        let files = directory.lane_to_look_at(number)?;
        let is_alive = directory.is_sender_held(number)?;
        let (producer, consumer) = (producer_page(&files.producer), consumer_page(&files.consumer));
        if consumer.generation() > receiver.generation {
            let (pid, generation, is_closed) = (consumer.pid(), consumer.generation(), consumer.is_closed());
            receiver = RoleInfo { pid, generation, is_closed, ..receiver };
        }
        // The tail before the head: the head can only have moved on.
        let (tail, head) = (producer.tail_and_floor().0, consumer.head());
        lanes.push(LaneInfo {
            number,
            sender: RoleInfo {
                is_alive,
                pid: producer.pid(),
                generation: producer.generation(),
                is_closed: producer.is_closed(),
            },
            depth: if is_behind(head, tail) { tail.since(head) } else { 0 },
            head_seq: head.seq,
            tail_seq: tail.seq,
            allocated_bytes: files.data.allocated_bytes().map_err(Error::system("looking at a lane's data"))?,
            sent: Counters {
                messages: producer.messages(),
                bytes: producer.bytes(),
                waits: producer.waits(),
                sleeps: producer.sleeps(),
                wakes_sent: producer.wakes_sent(),
                depth_max: producer.depth_max(),
            },
            received: Counters {
                messages: consumer.messages(),
                bytes: consumer.bytes(),
                waits: consumer.waits(),
                sleeps: consumer.sleeps(),
                wakes_sent: consumer.wakes_sent(),
                depth_max: 0,
            },
        });
    }
    Ok(ChannelInfo {
        path: directory.path().to_owned(),
        capacity: directory.capacity(),
        message_bytes_max: directory.message_bytes_max(),
        window: pelton_lane::WINDOW.min(directory.capacity()),
        mode: directory.mode(),
        lanes_max: directory.lanes_max(),
        is_from_this_boot: directory.is_from_this_boot(),
        wire_version: pelton_lane::WIRE_VERSION,
        layout_signature: pelton_lane::LAYOUT_SIGNATURE,
        receiver,
        lanes,
    })
}

/// One who listens under a name, or did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerInfo {
    /// Its socket.
    pub path: PathBuf,
    /// Its process; `None` if it died and left the socket, which the next listener replaces; 0 if it is too busy to say.
    pub pid: Option<u32>,
}

/// Who listens under a short name or `unix:PATH`. What goes on between two connected processes is theirs alone, and cannot be
/// seen from outside. Does not wait, and disturbs nobody.
///
/// # Errors
/// [`Error::Name`], [`Error::System`].
pub fn listeners(name: &str) -> Result<Vec<ListenerInfo>> {
    let found = Name::parse(name)?.listeners()?;
    Ok(found.into_iter().map(|(path, pid)| ListenerInfo { path, pid }).collect())
}

/// Says what [`recover`] would do, lane by lane, and does nothing.
///
/// # Errors
/// As [`recover`].
pub fn check(path: impl AsRef<Path>, keep_unsynced: bool) -> Result<Vec<RecoveredLane>> {
    let channel = Claimed::new(open(path.as_ref())?)?;
    channel.lanes.iter().map(|lane| Ok(channel.examine(lane, keep_unsynced)?.1)).collect()
}

/// Makes a path channel whole that nobody uses: after a reboot, which opening refuses, or damage, which it calls corrupt.
/// Keeps the messages from the oldest unreleased one on as far as they are whole, drops what lies behind the first that is
/// not, and says of each lane how many. After a reboot only what [`crate::Sender::sync`] had vouched for is kept, unless
/// `keep_unsynced`: what looks whole may then carry bytes that never reached the disk.
///
/// # Errors
/// [`Error::RoleTaken`] while somebody uses it; [`Error::NoChannel`]; [`Error::NotAChannel`] for damage that cannot be
/// repaired, of the files themselves; [`Error::System`]. Nothing is changed then, or can be done again.
pub fn recover(path: impl AsRef<Path>, keep_unsynced: bool) -> Result<Vec<RecoveredLane>> {
    let channel = Claimed::new(open(path.as_ref())?)?;
    // All of them before any is changed.
    let found = channel.lanes.iter().map(|lane| channel.examine(lane, keep_unsynced)).collect::<Result<Vec<_>>>()?;
    let mut done = Vec::new();
    for (lane, (found, report)) in channel.lanes.iter().zip(found) {
        let end = found.end.offset;
        let (from, to) = (end / os::PIECE * os::PIECE, (end + 8).next_multiple_of(os::PIECE).min(lane.data.bytes()));
        let allocated = lane.data.allocate(from, to);
        allocated.map_err(|error| channel.directory.cannot_allocate(lane.number, to - from, error))?;
        // SAFETY: all roles are claimed, so nobody else has the lane; the segments are mapped writable.
        unsafe { truncate(&data_of(lane), producer_page(&lane.page), &found) };
        lane.data.sync().map_err(Error::system("syncing a lane"))?;
        failpoint("recovery: a lane's data");
        // What is kept is on the disk now, and no more than that is vouched for. The page is synced with the recovery's note.
        producer_page(&lane.page).set_synced(found.end);
        done.push(report);
    }
    channel.directory.note_recovered(&channel.lanes)?;
    Ok(done)
}

/// Removes a path channel with all that is in it, if nobody uses it and nothing else is in its directory.
///
/// # Errors
/// [`Error::RoleTaken`], [`Error::NoChannel`], [`Error::NotAChannel`], [`Error::System`].
pub fn remove(path: impl AsRef<Path>) -> Result<()> {
    open(path.as_ref())?.remove()
}

/// A channel of which this process has every role.
struct Claimed {
    directory: Directory,
    _receiver: crate::directory::ReceiverRole,
    lanes: Vec<SenderRole>,
}

impl Claimed {
    fn new(directory: Directory) -> Result<Claimed> {
        let receiver = directory.claim_receiver()?;
        let lanes = (0..directory.lanes()?).map(|number| directory.claim_lane(number)).collect::<Result<_>>()?;
        Ok(Claimed { directory, _receiver: receiver, lanes })
    }

    /// What is whole in a lane, and what to say of it.
    fn examine(&self, role: &SenderRole, keep_unsynced: bool) -> Result<(Scan, RecoveredLane)> {
        let page = producer_page(&role.page);
        let (head, (tail, _)) = (consumer_page(&role.consumer).head(), page.tail_and_floor());
        let synced = page.synced();
        let vouched = self.directory.is_from_this_boot() || keep_unsynced;
        // No more fits; and whoever writes there all the same is not to keep the walk going.
        let all = role.data.bytes() / 8;
        let most = match vouched {
            true => all,
            false if is_behind(head, synced) => synced.since(head).min(all),
            false => 0,
        };
        let found = scan(&data_of(role), self.directory.message_bytes_max(), head, most);
        let mut problem = found.problem.map(|problem| problem.to_string());
        if problem.is_none() && !vouched && is_behind(found.end, tail) {
            problem = Some("what was not synced before the reboot is not known to be whole".to_owned());
        } else if problem.is_none() && is_behind(found.end, tail) {
            problem = Some(format!(
                "nothing is at message {}, the sender's last was {}",
                found.end.seq,
                tail.seq.wrapping_sub(1)
            ));
        }
        let dropped = if is_behind(found.end, tail) { tail.since(found.end) } else { 0 };
        if found.messages == 0 && found.problem.is_some() && (head.seq == 0 || head.offset + 8 > role.data.bytes()) {
            let path = self.directory.path().display();
            let problem = format!("lane {} has its head at {head:x?}, which is no place in it", role.number);
            return Err(Error::Corrupt(format!("{path}: {problem}; that cannot be repaired, remove the channel")));
        }
        Ok((found, RecoveredLane { number: role.number, kept: found.messages, dropped, problem }))
    }
}

/// Whether one place comes before another, as far as numbers can tell that run round.
fn is_behind(one: Position, other: Position) -> bool {
    (other.seq.wrapping_sub(one.seq) as i32) > 0
}

fn data_of(role: &SenderRole) -> Data {
    os::lane_memory(&role.page, &role.consumer, &role.receiver, &role.data).data
}

fn producer_page(segment: &Segment) -> &ProducerPage {
    // SAFETY: 64 KiB are mapped as long as the segment lives; what others write of a page is atomic.
    unsafe { segment.base().cast().as_ref() }
}

fn consumer_page(segment: &Segment) -> &ConsumerPage {
    // SAFETY: as above.
    unsafe { segment.base().cast().as_ref() }
}
