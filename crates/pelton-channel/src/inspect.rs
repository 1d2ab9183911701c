//! Inspection of channels from outside: the listeners under a name; the state of a path channel, its check, its
//! recovery, its removal.

use crate::counters::Counters;
use crate::directory::{Access, Directory, SenderRole, table_of};
use crate::error::{Error, Result};
use crate::lane_id::LaneId;
use crate::name::Name;
use crate::settings::Policy;
use pelton_lane::{BroadcastPage, ConsumerPage, Data, Position, ProducerPage, Scan, failpoint, scan, truncate};
use pelton_os::{self as os, Segment};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The state of a path channel as [`info`] reads it, without a role.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ChannelInfo {
    /// Its directory.
    pub path: PathBuf,
    /// Bytes of data of each lane.
    pub capacity: u64,
    /// The largest message, in bytes.
    pub message_bytes_max: u64,
    /// Bytes of a lane that a sender uses at first while its receiver keeps up: see [`crate::Options::resident_max`].
    pub window: u64,
    /// Permission bits of the directory.
    pub mode: u32,
    /// The most lanes that it can have.
    pub lanes_max: u32,
    /// Whether it was created, or recovered, since the machine last started.
    pub is_from_this_boot: bool,
    /// The version of its layout and its protocol.
    pub wire_version: u32,
    /// The signature of its layout.
    pub layout_signature: u64,
    /// The receiver.
    pub receiver: RoleInfo,
    /// Its lanes, by number.
    pub lanes: Vec<LaneInfo>,
}

/// The present, or last, holder of a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RoleInfo {
    /// Whether a process holds the role now: a lock proves that.
    pub is_alive: bool,
    /// The pid of the present or last holder, as that process stored it; 0 if there was none. The process may be in
    /// another pid namespace.
    pub pid: u32,
    /// The number of its holders so far.
    pub generation: u64,
    /// Whether the last holder closed, and did not die. Meaningless while `is_alive`.
    pub is_closed: bool,
}

/// One lane of a channel.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LaneInfo {
    /// Its number.
    pub number: u32,
    /// Its sender.
    pub sender: RoleInfo,
    /// Messages committed and not released; approximate while the channel is in use.
    pub depth: u64,
    /// The sequence number of the oldest message that is not released.
    pub head_seq: u32,
    /// The sequence number of the next message.
    pub tail_seq: u32,
    /// Bytes of memory, or of disk, that its data occupies.
    pub allocated_bytes: u64,
    /// The counters of all its senders together.
    pub sent: Counters,
    /// The counters of all its receivers together.
    pub received: Counters,
}

/// What [`recover`] did with a lane, or would do: the result of [`check`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecoveredLane {
    /// The lane's number.
    pub number: u32,
    /// Complete messages; they are kept.
    pub kept: u64,
    /// Messages that the sender's page counts as committed, but that cannot be kept.
    pub dropped: u64,
    /// The problem behind the last message that is kept.
    pub problem: Option<String>,
}

impl RecoveredLane {
    /// Whether the lane needs, or needed, no repair.
    pub fn is_whole(&self) -> bool {
        self.dropped == 0 && self.problem.is_none()
    }
}

/// Opens a channel of any mode, but no broadcast.
fn open(path: &Path) -> Result<Directory> {
    let directory = open_any(path)?;
    directory.check_kind(false)?;
    Ok(directory)
}

/// Opens a channel of any mode: the kernel checks the permissions of this process.
fn open_any(path: &Path) -> Result<Directory> {
    let access = Access { uids: Vec::new(), mode: 0o777 };
    let found = Directory::open_any_boot(path, &access)?;
    found.ok_or_else(|| Error::NoChannel { path: path.display().to_string() })
}

/// Returns the state of a path channel, in use or not, and changes nothing. Does not wait.
///
/// # Errors
/// [`Error::NoChannel`], [`Error::NotAChannel`], [`Error::System`].
pub fn info(path: impl AsRef<Path>) -> Result<ChannelInfo> {
    let directory = open(path.as_ref())?;
    let mut receiver = RoleInfo { is_alive: directory.is_receiver_held()?, pid: 0, generation: 0, is_closed: false };
    let mut lanes = Vec::new();
    for number in 0..directory.lanes()? {
        let files = directory.lane_read_only(number)?;
        let is_alive = directory.is_sender_held(number)?;
        let (producer, consumer) = (producer_page(&files.producer), consumer_page(&files.consumer));
        if consumer.generation() > receiver.generation {
            let (pid, generation, is_closed) = (consumer.pid(), consumer.generation(), consumer.is_closed());
            receiver = RoleInfo { pid, generation, is_closed, ..receiver };
        }
        // Loads the tail before the head. In between the head can only grow, so the depth is never too large.
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
            allocated_bytes: files
                .data
                .allocated_bytes()
                .map_err(Error::system("reading the size of a lane's data"))?,
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

/// A listener under a name, live or dead.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListenerInfo {
    /// Its socket.
    pub path: PathBuf,
    /// Its pid; `None` if it died and left the socket, which the next listener replaces; 0 if it is too busy to accept.
    pub pid: Option<u32>,
}

/// Returns the listeners under a short name or `unix:PATH`. Connected processes share anonymous memory, which no other
/// process can inspect. Does not wait, and does not affect the listeners.
///
/// # Errors
/// [`Error::Name`], [`Error::System`].
pub fn listeners(name: &str) -> Result<Vec<ListenerInfo>> {
    let found = Name::parse(name)?.listeners()?;
    Ok(found.into_iter().map(|(path, pid)| ListenerInfo { path, pid }).collect())
}

/// Returns for each lane what [`recover`] would do, and changes nothing.
///
/// # Errors
/// As [`recover`].
pub fn check(path: impl AsRef<Path>, keep_unsynced: bool) -> Result<Vec<RecoveredLane>> {
    let channel = Claimed::new(open(path.as_ref())?)?;
    channel.lanes.iter().map(|lane| Ok(channel.examine(lane, keep_unsynced)?.1)).collect()
}

/// The end of a lane of a path channel, as its next sender finds it: the result of [`sender_end`].
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SenderEnd {
    /// The lane's identity, as its receiver has it.
    pub lane: LaneId,
    /// The number of its senders so far.
    pub generation: u64,
    /// The number that the next message gets.
    pub next_seq: u32,
}

/// The end of lane `number` of a path channel that has no sender there. Changes nothing: to open the channel would
/// begin a new generation. A sender of several processes uses it to find out which of its messages are committed,
/// before it becomes the next sender.
///
/// # Errors
/// [`Error::RoleTaken`] while the lane has a sender; [`Error::NoChannel`]; [`Error::Rebooted`], as the lane's end is
/// unknown then; [`Error::NotAChannel`], [`Error::Corrupt`], [`Error::System`].
#[doc(hidden)]
pub fn sender_end(path: impl AsRef<Path>, number: u32) -> Result<SenderEnd> {
    let directory = open(path.as_ref())?;
    if !directory.is_from_this_boot() {
        return Err(Error::Rebooted { path: directory.path().display().to_string() });
    }
    let role = directory.claim_lane(number)?;
    let page = producer_page(&role.page);
    // The producer's own count may be older than its last messages. No more messages fit than `most`.
    let (tail, most) = (page.tail_and_floor().0, role.data.bytes() / 8);
    let found = scan(&data_of(&role), directory.message_bytes_max(), tail, most);
    match found.problem {
        Some(problem) => Err(Error::Corrupt(format!("{}: {problem}", directory.path().display()))),
        None => Ok(SenderEnd {
            lane: LaneId(role.data.identity()).since_boot(directory.boot_id()),
            generation: page.generation(),
            next_seq: found.end.seq,
        }),
    }
}

/// Repairs a path channel that no process uses. It needs that after a reboot, where opening fails with
/// [`Error::Rebooted`], and after damage, where it fails with [`Error::Corrupt`].
///
/// Each lane keeps its messages from the oldest unreleased one up to the first that is incomplete. The rest is dropped,
/// and the result has both numbers. After a reboot only messages are kept that [`crate::Sender::sync`] made durable,
/// unless `keep_unsynced`: then a message that seems complete may contain bytes that never reached the disk.
///
/// # Errors
/// [`Error::RoleTaken`] while a process uses it; [`Error::NoChannel`]; [`Error::NotAChannel`] if the files themselves
/// are damaged, which cannot be repaired; [`Error::System`]. After an error the channel is unchanged, or can be
/// recovered again.
pub fn recover(path: impl AsRef<Path>, keep_unsynced: bool) -> Result<Vec<RecoveredLane>> {
    let channel = Claimed::new(open(path.as_ref())?)?;
    // Examines all lanes before it changes one.
    let found = channel.lanes.iter().map(|lane| channel.examine(lane, keep_unsynced)).collect::<Result<Vec<_>>>()?;
    let mut done = Vec::new();
    for (lane, (found, report)) in channel.lanes.iter().zip(found) {
        let end = found.end.offset;
        let (from, to) = (end / os::PIECE * os::PIECE, (end + 8).next_multiple_of(os::PIECE).min(lane.data.bytes()));
        let allocated = lane.data.allocate(from, to);
        allocated.map_err(|error| channel.directory.cannot_allocate(lane.number, to - from, error))?;
        // SAFETY: this process has every role, so no other one uses the lane; the segments are mapped writable.
        unsafe { truncate(&data_of(lane), producer_page(&lane.page), &found) };
        lane.data.sync().map_err(Error::system("syncing a lane"))?;
        failpoint("recovery: a lane's data");
        // The kept messages are durable now, and only they count as synced. `note_recovered` syncs the page.
        producer_page(&lane.page).set_synced(found.end);
        done.push(report);
    }
    channel.directory.note_recovered(&channel.lanes)?;
    Ok(done)
}

/// Removes a path channel, or a broadcast in a directory, with its messages, if no process uses it and its directory
/// contains no other file.
///
/// # Errors
/// [`Error::RoleTaken`], [`Error::NoChannel`], [`Error::NotAChannel`], [`Error::System`].
pub fn remove(path: impl AsRef<Path>) -> Result<()> {
    open_any(path.as_ref())?.remove()
}

/// The state of a broadcast in a directory: the result of [`broadcast`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BroadcastInfo {
    /// Its directory.
    pub path: PathBuf,
    /// Bytes of data.
    pub capacity: u64,
    /// The largest message, in bytes.
    pub message_bytes_max: u64,
    /// Permission bits of the directory.
    pub mode: u32,
    /// Whether it was created since the machine last started. Otherwise it can only be removed.
    pub is_from_this_boot: bool,
    /// The publisher.
    pub publisher: RoleInfo,
    /// The number of the oldest message that is still there for a new subscriber.
    pub oldest: u64,
    /// The number of the next message.
    pub next: u64,
    /// Bytes of memory, or of disk, that its data occupies.
    pub allocated_bytes: u64,
    /// The counters of all its publishers together.
    pub sent: Counters,
    /// Its subscribers, and the durable subscriptions that no process uses.
    pub subscriptions: Vec<SubscriptionInfo>,
}

/// A subscription of a broadcast in a directory.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SubscriptionInfo {
    /// Its name; `None`: it ends with its process.
    pub durable: Option<String>,
    /// Whether a process uses it now: a lock proves that.
    pub is_alive: bool,
    /// The pid of that process, or of the last one, as it stored it.
    pub pid: u32,
    /// What the publisher does when it falls behind.
    pub policy: Policy,
    /// With [`Policy::Gate`]: how long it may hold the publisher up.
    pub lag_after: Option<Duration>,
    /// Messages sent and not released by it.
    pub behind: u64,
    /// The counters of the process that uses it, or of the last one.
    pub received: Counters,
    /// Messages that the same process missed.
    pub missed: u64,
}

/// Returns the state of a broadcast in a directory, in use or not, and changes nothing. Does not wait.
///
/// # Errors
/// [`Error::NoChannel`]; [`Error::NotAChannel`], also if it is a channel with a receiver; [`Error::Corrupt`],
/// [`Error::System`].
pub fn broadcast(path: impl AsRef<Path>) -> Result<BroadcastInfo> {
    let directory = open_any(path.as_ref())?;
    directory.check_kind(true)?;
    let segment = directory.publisher_page(false)?;
    // SAFETY: the segment maps 64 KiB, which hold the page, for as long as it lives, and the words that other processes
    // write are atomics.
    let page = unsafe { segment.base().cast::<BroadcastPage>().as_ref() };
    let is_alive = directory.is_publisher_held()?;
    let corrupt = |problem| Error::Corrupt(format!("{}: {problem}", directory.path().display()));
    let (oldest, next) = page.numbers(directory.capacity()).map_err(corrupt)?;
    let sent = &page.producer;
    let (table, slots) = directory.subscriptions()?;
    let subscriptions = slots.into_iter().map(|(slot, words, is_alive)| {
        let cursor = table_of(&table).cursor(slot);
        // One that has not joined yet has no policy.
        let (policy, lag_after) = Policy::of_lane(cursor.policy().unwrap_or(pelton_lane::Policy::Gate));
        SubscriptionInfo {
            durable: words.durable().map(str::to_owned),
            is_alive,
            pid: cursor.pid(),
            policy,
            lag_after,
            behind: next.saturating_sub(cursor.number().max(1)),
            received: Counters {
                messages: cursor.messages(),
                bytes: cursor.bytes(),
                waits: cursor.waits(),
                sleeps: cursor.sleeps(),
                wakes_sent: cursor.wakes_sent(),
                depth_max: 0,
            },
            missed: cursor.missed(),
        }
    });
    Ok(BroadcastInfo {
        path: directory.path().to_owned(),
        capacity: directory.capacity(),
        message_bytes_max: directory.message_bytes_max(),
        mode: directory.mode(),
        is_from_this_boot: directory.is_from_this_boot(),
        publisher: RoleInfo { is_alive, pid: sent.pid(), generation: sent.generation(), is_closed: sent.is_closed() },
        oldest,
        next,
        allocated_bytes: directory.allocated_bytes()?,
        sent: Counters {
            messages: sent.messages(),
            bytes: sent.bytes(),
            waits: sent.waits(),
            sleeps: sent.sleeps(),
            wakes_sent: sent.wakes_sent(),
            depth_max: sent.depth_max(),
        },
        subscriptions: subscriptions.collect(),
    })
}

/// Removes a durable subscription ([`crate::Options::durable`]) that no process uses, and so what it holds up. Returns
/// false if the broadcast has none of the name. Waits for at most 200 ms, while another process opens or removes one.
///
/// # Errors
/// [`Error::RoleTaken`] while a process uses it; [`Error::TimedOut`] after that wait, as a stopped process may have the
/// lock; [`Error::Name`]; as [`broadcast`].
pub fn remove_durable(path: impl AsRef<Path>, name: &str) -> Result<bool> {
    crate::broadcast_role::check_durable(name)?;
    let directory = open_any(path.as_ref())?;
    directory.check_kind(true)?;
    directory.remove_durable(name)
}

/// A channel in which this process has every role.
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

    /// Finds the complete messages of a lane, and describes the result.
    fn examine(&self, role: &SenderRole, keep_unsynced: bool) -> Result<(Scan, RecoveredLane)> {
        let page = producer_page(&role.page);
        let (head, (tail, _)) = (consumer_page(&role.consumer).head(), page.tail_and_floor());
        let synced = page.synced();
        let keeps_all = self.directory.is_from_this_boot() || keep_unsynced;
        // No more messages fit. The bound ends the scan even if a process writes to the file without a role.
        let all = role.data.bytes() / 8;
        let most = match keeps_all {
            true => all,
            false if is_behind(head, synced) => synced.since(head).min(all),
            false => 0,
        };
        let found = scan(&data_of(role), self.directory.message_bytes_max(), head, most);
        let mut problem = found.problem.map(|problem| problem.to_string());
        if problem.is_none() && !keeps_all && is_behind(found.end, tail) {
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
            let problem = format!("lane {} has its head at {head:x?}, which is outside its data", role.number);
            return Err(Error::Corrupt(format!("{path}: {problem}; that cannot be repaired, remove the channel")));
        }
        Ok((found, RecoveredLane { number: role.number, kept: found.messages, dropped, problem }))
    }
}

/// Whether one position comes before another, by their sequence numbers, which wrap.
fn is_behind(one: Position, other: Position) -> bool {
    (other.seq.wrapping_sub(one.seq) as i32) > 0
}

fn data_of(role: &SenderRole) -> Data {
    os::lane_memory(&role.page, &role.consumer, &role.receiver, &role.data).data
}

fn producer_page(segment: &Segment) -> &ProducerPage {
    // SAFETY: the segment maps 64 KiB for as long as it lives, and the fields that other processes write are atomics.
    unsafe { segment.base().cast().as_ref() }
}

fn consumer_page(segment: &Segment) -> &ConsumerPage {
    // SAFETY: the segment maps 64 KiB for as long as it lives, and the fields that other processes write are atomics.
    unsafe { segment.base().cast().as_ref() }
}
