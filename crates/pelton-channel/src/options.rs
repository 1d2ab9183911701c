//! The options of each maker, a function that creates endpoints or handles: [`Options`], and the options that it takes.

#[cfg(doc)]
use crate::error::Error;
use crate::settings::{Policy, Settings};
use crate::wait::{ConnectDeadline, Wait};
use pelton_lane::StartFrom;
use std::fmt::Debug;
use std::marker::PhantomData;
use std::time::Duration;
#[cfg(doc)]
use std::time::Instant;

/// How to create endpoints: sizes, a way to wait, and which users may connect. `M` is the maker, the kind of function
/// that creates them. The compiler infers it from the method that ends the chain, and refuses an option that this maker
/// would ignore.
///
/// | option | taken by |
/// |---|---|
/// | [`capacity`](Options::capacity) | all but `open_*`, subscribers, flushes and appenders |
/// | [`message_bytes_max`](Options::message_bytes_max) | the same, and appenders |
/// | [`traced`](Options::traced) | `threads`, `gather`, `gather_at`, `connect_sender`, `listen`, `create_*` |
/// | [`resident_max`](Options::resident_max) | makers of senders, publishers |
/// | [`memory`](Options::memory) | `gather_at`, `connect_receiver`, `listen`, `create_*`, `open_receiver`, calls |
/// | [`wait`](Options::wait) | all but flushes |
/// | [`allow_uids`](Options::allow_uids) | all between processes |
/// | [`connect_deadline`](Options::connect_deadline) | `connect_*`, `create_*`, `open_*`, clients |
/// | [`lanes`](Options::lanes) | `gather`, `gather_at`, `create_*`, services, appenders |
/// | [`membership_events`](Options::membership_events) | `gather`, `gather_at` |
/// | [`mode`](Options::mode) | `create_*`, `open_*` |
/// | [`call_bytes_max`](Options::call_bytes_max) | calls |
/// | [`busy_poll`](Options::busy_poll) | clients |
/// | [`policy`](Options::policy), [`lag_after`](Options::lag_after) | subscribers |
/// | [`slack`](Options::slack), [`start_from`](Options::start_from) | subscribers |
/// | [`durable`](Options::durable) | `open_subscriber` |
/// | [`history`](Options::history), [`hold_max`](Options::hold_max) | publishers |
/// | [`flush_bytes`](Options::flush_bytes), [`flush_interval`](Options::flush_interval) | flushes, appenders |
///
/// A sender creates its lane; each side limits the capacity and the messages, and the lower limit applies. The creator
/// of a path channel decides both. Each side decides how it waits.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// use pelton::{Options, Wait};
/// let (mut sender, mut receiver) = Options::new().capacity(1 << 20).wait(Wait::Block).threads()?;
/// sender.send(b"hello")?;
/// assert_eq!(&*receiver.receive()?, b"hello");
/// # Ok(())
/// # }
/// ```
///
/// Threads have no users:
/// ```compile_fail,E0277
/// let _ = pelton::Options::new().allow_uids(&[1000]).threads();
/// ```
#[derive(Clone, Debug)]
pub struct Options<M = maker::Any> {
    settings: Settings,
    maker: PhantomData<fn() -> M>,
}

impl<M> Default for Options<M> {
    fn default() -> Options<M> {
        Options::new()
    }
}

impl<M> Options<M> {
    /// The defaults: 64 MiB (calls: 4 MiB each way), messages up to half of that less 32 bytes, [`Wait::Block`], the
    /// same user only; a path channel of mode 0o700 with one lane.
    pub fn new() -> Options<M> {
        Options { settings: Settings::default(), maker: PhantomData }
    }

    /// These options for another maker, which ignores those that it does not take. For a program that decides at run
    /// time how it makes an endpoint: `Options` without a parameter takes all options.
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// use pelton::Options;
    /// let directory = std::env::temp_dir().join(format!("pelton-options-doc-{}", std::process::id()));
    /// let options: Options = Options::new().capacity(1 << 20);
    /// let sender = options.cast().create_sender(&directory)?;
    /// let receiver = options.cast().open_receiver(&directory)?;
    /// # drop((sender, receiver));
    /// # pelton::inspect::remove(&directory)
    /// # }
    /// ```
    pub fn cast<N>(&self) -> Options<N> {
        Options { settings: self.settings.clone(), maker: PhantomData }
    }

    #[doc(hidden)]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Bytes of the lane: how far the sender can be ahead of the receiver. Rounded up to a multiple of 64 KiB, at most
    /// 16 GiB. Memory is allocated only as it is used. A lane whose receiver keeps up uses 256 KiB of it, and a little
    /// more at times.
    ///
    /// For a receiver, or either side of calls, it is also the largest lane that this side accepts: the peer creates
    /// no larger one. A subscriber refuses a publisher with a larger one. The default is 16 GiB for a peer of the
    /// same user and 64 MiB for another user.
    pub fn capacity(mut self, bytes: u64) -> Options<M>
    where
        M: Accepts<setting::Capacity>,
    {
        self.settings.capacity = Some(bytes);
        self
    }

    /// Limit, in bytes, of the part of the lane that this side's sender uses while its receiver keeps up; default 16
    /// MiB. If the receiver falls behind, the lane still extends up to its capacity.
    ///
    /// A sender starts with 256 KiB. It is saturated while 256 KiB take less than a millisecond and the lane is not
    /// empty. Then it tries a larger part at intervals, and keeps it only if the throughput is higher. It releases the
    /// memory some time after a failed trial, when the stream slows down, within 256 messages after a pause, and by
    /// `Sender::trim`. A sender that sends no further message keeps its memory. All senders of a process together use
    /// at most 64 MiB more than their 256 KiB each. A publisher keeps the memory as long as it lives. Appenders are not
    /// affected.
    pub fn resident_max(mut self, bytes: u64) -> Options<M>
    where
        M: Accepts<setting::ResidentMax>,
    {
        self.settings.resident_max = bytes;
        self
    }

    /// The largest message in bytes, if less than the capacity permits: half of it less 32, and below 2 GiB. For a
    /// receiver or subscriber it is the largest that it accepts; the default is 1 MiB for a peer of another user. A
    /// sender whose limit is above that of its receiver fails to connect with [`Error::Option`]. A publisher has one
    /// limit for all subscribers, by default half its capacity less 32: between users, set it to 1 MiB or less, or
    /// raise that of the subscribers.
    pub fn message_bytes_max(mut self, bytes: u64) -> Options<M>
    where
        M: Accepts<setting::MessageBytesMax>,
    {
        self.settings.message_bytes_max = Some(bytes);
        self
    }

    /// Messages may carry the position of their sender in a distributed trace: [`Sender::send_traced`] and
    /// [`Message::traceparent`](crate::Message::traceparent). Off by default. A message without one takes no more space
    /// and no more time than without this option; the largest message is 40 bytes smaller.
    ///
    /// A sender decides that for its lane, and for a path channel the process that creates it decides; receivers of
    /// others need no option. A receiver of an earlier version of pelton, which would not understand the lane, is
    /// refused when it connects, or opens the path. Without this option, `send_traced` sends the message without its
    /// traceparent.
    ///
    /// [`Sender::send_traced`]: crate::Sender::send_traced
    pub fn traced(mut self, traced: bool) -> Options<M>
    where
        M: Accepts<setting::Traced>,
    {
        self.settings.traced = traced;
        self
    }

    /// Limit, in bytes, of the memory that the peers of this handle can make it use. By default lanes have no such
    /// limit. The value must be at least 1 MiB for several peers, and 2 MiB for a service.
    ///
    /// A receiver of several senders, or a service, offers each new peer lanes of at most a sixteenth of the memory
    /// that is left. It refuses peers while less than 64 KiB is left. A service counts replies that wait for their
    /// client to read, and requests that have arrived in part; a call that does not fit fails. For one client, a
    /// service keeps at most as much as then remains for the others: a single client has at most half. Without this
    /// option all clients together may have 256 MiB, or four times [`Options::call_bytes_max`] if that is more. With
    /// one peer, and for a path channel, this limits the lanes. Memory that the program itself keeps, for instance
    /// copies of messages, does not count.
    pub fn memory(mut self, bytes: u64) -> Options<M>
    where
        M: Accepts<setting::Memory>,
    {
        self.settings.memory = Some(bytes);
        self
    }

    /// How this side waits.
    pub fn wait(mut self, wait: Wait) -> Options<M>
    where
        M: Accepts<setting::Waits>,
    {
        self.settings.wait = wait;
        self
    }

    /// Users that may be the peer, besides this process's own user.
    pub fn allow_uids(mut self, uids: &[u32]) -> Options<M>
    where
        M: Accepts<setting::AllowUids>,
    {
        self.settings.uids = uids.to_vec();
        self
    }

    /// Connecting waits until `deadline` for a listener. Opening a path waits for the channel to be created, for its
    /// role to be free, and for the other side to open it too. Without a deadline, connecting fails immediately with
    /// [`Error::NoListener`] if no process listens. Opening without one fails with [`Error::NoChannel`] if there is no
    /// channel, and does not wait for the other side. A [`Duration`] counts from each use of the options (also from
    /// `start_*`, not from [`Opening::try_finish`](crate::Opening::try_finish)), an [`Instant`] stays the same for all.
    ///
    /// ```
    /// use std::time::Duration;
    /// let name = format!("unix:{}/nobody-{}", std::env::temp_dir().display(), std::process::id());
    /// let options = pelton::Options::new().connect_deadline(Duration::from_millis(5));
    /// assert!(matches!(options.connect_sender(&name), Err(pelton::Error::TimedOut(_))));
    /// ```
    pub fn connect_deadline(mut self, deadline: impl Into<ConnectDeadline>) -> Options<M>
    where
        M: Accepts<setting::ConnectDeadline>,
    {
        self.settings.connect_deadline = deadline.into();
        self
    }

    /// Limit of a handshake, if connecting has no deadline. For the `pelton` command, which checks for signals while no
    /// process listens.
    #[doc(hidden)]
    pub fn handshake(mut self, limit: Duration) -> Options<M>
    where
        M: Accepts<setting::Handshake>,
    {
        self.settings.handshake = limit;
        self
    }

    /// A receiver of several senders also reports membership:
    /// [`Receiver::receive_event`](crate::Receiver::receive_event) returns that a sender has joined, before its first
    /// message, and that it has left, after its last. Other methods skip these events.
    pub fn membership_events(mut self, reports: bool) -> Options<M>
    where
        M: Accepts<setting::MembershipEvents>,
    {
        self.settings.membership_events = reports;
        self
    }

    /// A flush hands messages to the sink once they have this number of bytes, by default 1 MiB. Each message counts
    /// with its header of 8 bytes, and is padded to a multiple of 8.
    pub fn flush_bytes(mut self, bytes: u64) -> Options<M>
    where
        M: Accepts<setting::FlushBytes>,
    {
        self.settings.flush_bytes = bytes;
        self
    }

    /// A flush hands messages to the sink at most this long after they arrived, by default 100 ms. It does so earlier
    /// once it has [`Options::flush_bytes`], or a quarter of a lane's capacity. A sender that busy-polls for space may
    /// wait this long if its messages are about as large as that quarter. `None`: a `Flush` hands over once no message
    /// is left; `Appenders` only when a buffer is full, or on request.
    pub fn flush_interval(mut self, interval: Option<Duration>) -> Options<M>
    where
        M: Accepts<setting::FlushInterval>,
    {
        self.settings.flush_interval = interval;
        self
    }

    /// Permission bits of a path channel's directory, by default 0o700: which other users may open it. Its files have
    /// the same without the execute bits, whatever the umask. A directory that permits more than this is refused.
    pub fn mode(mut self, bits: u32) -> Options<M>
    where
        M: Accepts<setting::Mode>,
    {
        self.settings.mode = bits;
        self
    }

    /// Limit of the senders that a receiver has at a time, at most 1024. For a path channel the default is 1, and its
    /// creator decides; for a receiver of several senders the default is 1024. Each sender has a lane of its own,
    /// created when it is first needed. For each sender the receiver needs three descriptors, or four if it belongs to
    /// another user. A service needs five for each client; the sender of a thread has four itself. The receiver refuses
    /// a new peer if less than an eighth of all descriptors (at most 64) would remain. Before that, it waits up to a
    /// second for others to become free.
    pub fn lanes(mut self, lanes: u32) -> Options<M>
    where
        M: Accepts<setting::Lanes>,
    {
        self.settings.lanes = Some(lanes);
        self
    }

    /// The largest request, or reply, or part of one, that this side accepts, in bytes; by default 64 MiB. This side
    /// assembles anything above the lane's message limit in its own memory, one from each peer at a time.
    pub fn call_bytes_max(mut self, bytes: u64) -> Options<M>
    where
        M: Accepts<setting::CallBytesMax>,
    {
        self.settings.call_bytes_max = bytes;
        self
    }

    /// How long `Client::busy_poll` polls for replies, by default 50 µs, if recent replies arrived within that time.
    /// For large requests it polls for up to 100 µs. Zero: it polls once.
    pub fn busy_poll(mut self, limit: Duration) -> Options<M>
    where
        M: Accepts<setting::BusyPoll>,
    {
        self.settings.busy_poll = limit;
        self
    }
}

/// Publish and subscribe.
impl<M> Options<M> {
    /// What the publisher does when this subscriber falls behind; default [`Policy::Gate`].
    pub fn policy(mut self, policy: Policy) -> Options<M>
    where
        M: Accepts<setting::Policy>,
    {
        self.settings.policy = policy;
        self
    }

    /// A subscriber with [`Policy::Gate`] holds the publisher up for at most this long at one message of the publisher,
    /// also if it receives some meanwhile. Then it lags until it has caught up: it may miss messages, and learns how
    /// many. It copies each message. By default it holds the publisher up without a limit.
    pub fn lag_after(mut self, time: Duration) -> Options<M>
    where
        M: Accepts<setting::LagAfter>,
    {
        self.settings.lag_after = Some(time);
        self
    }

    /// How many bytes of messages a subscriber that lags may be behind before the publisher passes it; default 256
    /// KiB, at most half the publisher's capacity. The newest message, if it has at most half the capacity, counts
    /// whatever its size. The publisher keeps them only while no message needs their space. More makes the publisher
    /// use more memory, which is slower.
    pub fn slack(mut self, bytes: u64) -> Options<M>
    where
        M: Accepts<setting::Slack>,
    {
        self.settings.slack = bytes;
        self
    }

    /// The first message of a subscriber; default [`StartFrom::Now`]. See [`Options::history`] for earlier ones.
    pub fn start_from(mut self, from: StartFrom) -> Options<M>
    where
        M: Accepts<setting::StartFrom>,
    {
        self.settings.start_from = from;
        self
    }

    /// A subscriber in a directory keeps its place under this name while no process uses it, over restarts of the
    /// subscriber and of the publisher: the next subscriber of the name continues there, and [`Options::start_from`] is
    /// for the first one alone. Meanwhile it still counts by the policy of the last one: with [`Policy::Gate`] it holds
    /// the publisher up once the lane is full, until it comes back, or until
    /// [`inspect::remove_durable`](crate::inspect::remove_durable). One process at a time uses a name. A message counts
    /// as received once its [`Delivery`](crate::Delivery) is dropped: if the subscriber is killed before that, its
    /// successor receives the message again, with the same [number](crate::Delivery::number). 1 to 64 letters, digits,
    /// '.', '_' or '-'. Not with [`Policy::Latest`].
    pub fn durable(mut self, name: &str) -> Options<M>
    where
        M: Accepts<setting::Durable>,
    {
        self.settings.durable = Some(name.to_owned());
        self
    }

    /// A publisher keeps its last `messages` for subscribers that join later, as far as they fit into half its
    /// capacity and no message needs the space; default 0. Without it, a subscriber that begins with earlier messages
    /// finds those that happen not to be overwritten yet.
    pub fn history(mut self, messages: u64) -> Options<M>
    where
        M: Accepts<setting::History>,
    {
        self.settings.history = messages;
        self
    }

    /// How long one subscriber may hold the publisher up at one message. Several that do so in turn hold it up for
    /// the sum of their times. A subscriber that could do so for longer is refused: with a limit, [`Policy::Gate`]
    /// needs an [`Options::lag_after`] of at most that, and with zero each subscriber must lag. By default there is
    /// no limit. In a directory the limit of the last publisher also refuses while there is none, and a publisher does
    /// not begin while a subscription may hold it up for longer, even if no process uses that subscription.
    pub fn hold_max(mut self, time: Duration) -> Options<M>
    where
        M: Accepts<setting::HoldMax>,
    {
        self.settings.hold_max_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self
    }
}

/// Implemented if the maker takes the option: see the table of [`Options`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not take the option `{S}`",
    note = "an option that the maker would ignore is refused: the table of `pelton::Options` has which maker takes which"
)]
pub trait Accepts<S> {}

macro_rules! kinds {
    ($(#[doc = $doc:literal] $name:ident,)*) => {
        $(#[doc = $doc] #[derive(Clone, Copy, Debug)] pub enum $name {})*
    };
}

/// The makers: the `M` of [`Options<M>`](super::Options).
pub mod maker {
    kinds! {
        /// [`Options::threads`](crate::Options::threads).
        Threads,
        /// [`Options::gather`](crate::Options::gather).
        Gather,
        /// [`Options::gather_at`](crate::Options::gather_at).
        GatherAt,
        /// [`Options::connect_sender`](crate::Options::connect_sender).
        ConnectSender,
        /// [`Options::connect_receiver`](crate::Options::connect_receiver).
        ConnectReceiver,
        /// [`Options::listen`](crate::Options::listen).
        Listen,
        /// [`Options::create_sender`](crate::Options::create_sender).
        CreateSender,
        /// [`Options::create_receiver`](crate::Options::create_receiver).
        CreateReceiver,
        /// [`Options::open_sender`](crate::Options::open_sender).
        OpenSender,
        /// [`Options::open_receiver`](crate::Options::open_receiver).
        OpenReceiver,
        /// [`Options::publisher`](crate::Options::publisher).
        Publish,
        /// [`Options::publish_at`](crate::Options::publish_at).
        PublishAt,
        /// [`Options::create_publisher`](crate::Options::create_publisher).
        CreatePublisher,
        /// [`Options::connect_subscriber`](crate::Options::connect_subscriber); a thread's subscriber.
        Subscribe,
        /// [`Options::open_subscriber`](crate::Options::open_subscriber).
        OpenSubscriber,
        /// `Client::connect_with`.
        Client,
        /// `Service::listen_with`.
        Service,
        /// `Flush::new`.
        Flush,
        /// `Appenders::new`.
        Appenders,
        /// Any of these, by [`Options::cast`](crate::Options::cast).
        Any,
    }
}

/// The options, for [`Accepts`].
#[doc(hidden)]
pub mod setting {
    kinds! {
        /// `capacity`.
        Capacity,
        /// `message_bytes_max`.
        MessageBytesMax,
        /// `traced`.
        Traced,
        /// `resident_max`.
        ResidentMax,
        /// `memory`.
        Memory,
        /// `wait`.
        Waits,
        /// `allow_uids`.
        AllowUids,
        /// `connect_deadline`.
        ConnectDeadline,
        /// `handshake`.
        Handshake,
        /// `lanes`.
        Lanes,
        /// `membership_events`.
        MembershipEvents,
        /// `mode`.
        Mode,
        /// `call_bytes_max`.
        CallBytesMax,
        /// `busy_poll`.
        BusyPoll,
        /// `flush_bytes`.
        FlushBytes,
        /// `flush_interval`.
        FlushInterval,
        /// `policy`.
        Policy,
        /// `lag_after`.
        LagAfter,
        /// `slack`.
        Slack,
        /// `start_from`.
        StartFrom,
        /// `durable`.
        Durable,
        /// `history`.
        History,
        /// `hold_max`.
        HoldMax,
    }
}

macro_rules! accepts {
    ($($setting:ident: $($maker:ident)*;)*) => {
        $($(impl Accepts<setting::$setting> for maker::$maker {})*)*
        $(impl Accepts<setting::$setting> for maker::Any {})*
    };
}

accepts! {
    Capacity: Publish PublishAt Subscribe Threads Gather GatherAt ConnectSender ConnectReceiver Listen CreateSender CreateReceiver Client Service CreatePublisher;
    MessageBytesMax: Publish PublishAt Subscribe Threads Gather GatherAt ConnectSender ConnectReceiver Listen CreateSender CreateReceiver Client Service Appenders CreatePublisher;
    Traced: Threads Gather GatherAt ConnectSender Listen CreateSender CreateReceiver;
    ResidentMax: Publish PublishAt Threads Gather GatherAt ConnectSender Listen CreateSender OpenSender Client Service;
    Memory: GatherAt ConnectReceiver Listen CreateSender CreateReceiver OpenReceiver Client Service OpenSubscriber;
    Waits: Publish PublishAt Subscribe Threads Gather GatherAt ConnectSender ConnectReceiver Listen CreateSender CreateReceiver OpenSender OpenReceiver Client Service Appenders CreatePublisher OpenSubscriber;
    AllowUids: PublishAt Subscribe GatherAt ConnectSender ConnectReceiver Listen CreateSender CreateReceiver OpenSender OpenReceiver Client Service CreatePublisher OpenSubscriber;
    ConnectDeadline: Subscribe ConnectSender ConnectReceiver CreateSender CreateReceiver OpenSender OpenReceiver Client CreatePublisher OpenSubscriber;
    Handshake: Subscribe ConnectSender ConnectReceiver;
    Lanes: Gather GatherAt CreateSender CreateReceiver Service Appenders;
    MembershipEvents: Gather GatherAt;
    Mode: CreateSender CreateReceiver OpenSender OpenReceiver CreatePublisher OpenSubscriber;
    CallBytesMax: Client Service;
    BusyPoll: Client;
    FlushBytes: Flush Appenders;
    FlushInterval: Flush Appenders;
    Policy: Subscribe OpenSubscriber;
    LagAfter: Subscribe OpenSubscriber;
    Slack: Subscribe OpenSubscriber;
    StartFrom: Subscribe OpenSubscriber;
    Durable: OpenSubscriber;
    History: Publish PublishAt CreatePublisher;
    HoldMax: Publish PublishAt CreatePublisher;
}
