//! `pelton-bridge in`: the messages of a stream into a channel.
//!
//! The server keeps no position: an ephemeral consumer without acknowledgements begins where the position file ends,
//! and is made anew at each gap and after each failure. Messages that wait are committed as one batch, and the
//! position after it is noted before: see `position`. A large message that came in parts is joined here; reading
//! begins again at its first part if the bridge is killed before its last one.

use crate::{
    channel::{Channel, TURN, claim, continue_sender},
    consumer::{Delivery, Reading, SILENCE_MAX, measure_lag},
    failpoint,
    nats::{Direction, Nats, NatsArgs, Retry, SETTLE_TIME},
    position::{Position, Resolved, Slot, StreamName},
    report,
    status::Status,
    stop::Stop,
    wire::{NotBridged, Origin, is_at_most, traceparent, unpack},
};
use async_nats::jetstream::{self, stream::Info};
use bytes::{Bytes, BytesMut};
use clap::Args;
use futures_util::FutureExt as _;
use pelton::{Error, Sender, Traceparent};
use pelton_cli::failure::Failure;
use std::{
    collections::{HashMap, VecDeque},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::task::{JoinSet, unconstrained};

/// A commit has at most this number of messages and bytes, unless one message has more.
const BATCH_MESSAGES: usize = 512;
const BATCH_BYTES: usize = 64 << 10;
/// Bytes of a record beside its payload, at most.
const RECORD_BYTES: u64 = 16;
/// A wait of the library that no signal ends, between two checks for one.
const SLICE: Duration = Duration::from_millis(100);
/// Commits by connect whose release is not known, at most; beyond that, several count as one.
const UNRELEASED_MAX: usize = 4096;
/// How long the end of the process waits for the receiver to release what it has, by connect.
const RELEASE_WAIT: Duration = Duration::from_secs(5);

/// Options of `pelton-bridge in`.
#[derive(Args)]
pub struct InArgs {
    /// The subject, or subjects with the wildcards * and >
    subject: String,
    /// The channel: a short name or unix:PATH, where a receiver listens, or path:DIR
    pub channel: String,
    #[command(flatten)]
    nats: NatsArgs,
    /// The file that keeps the position [default for path:DIR: DIR.bridge]
    #[arg(long, value_name = "FILE")]
    position: Option<PathBuf>,
    /// Where a bridge without a position begins: `first`, `new`, or a sequence of the stream [default: first, for a
    /// channel that has had no message]
    #[arg(long, value_name = "WHERE", value_parser = start)]
    start: Option<Start>,
    /// Messages keep their traceparents, each one in a commit of its own; creates the channel so, by path
    #[arg(long)]
    traced: bool,
    /// Listen for the receiver instead of connecting to it
    #[arg(long)]
    listen: bool,
    /// Wait without limit while another bridge has the position file or the channel, and then take over
    #[arg(long)]
    standby: bool,
}

impl InArgs {
    fn position_path(&self, channel: &Channel) -> Result<PathBuf, Failure> {
        match (&self.position, channel) {
            (Some(path), _) => Ok(path.clone()),
            (None, Channel::Path(path)) => {
                let mut name = path.clone().into_os_string();
                name.push(".bridge");
                Ok(PathBuf::from(name))
            }
            (None, Channel::Connect(name)) => Err(Failure::Input(format!(
                "`{name}` is no directory beside which a position could be kept: name a file with --position"
            ))),
        }
    }

    /// Checks the options.
    pub fn validate(&self) -> Result<(), Failure> {
        self.position_path(&Channel::parse(&self.channel)?)?;
        self.nats.servers.validate()
    }

    /// Checks the stream; carries nothing.
    pub async fn check(&self, stop: &Stop, status: &Arc<Status>) -> Result<(), Failure> {
        self.nats.check(Direction::In, None, stop, status).await
    }
}

/// Where to begin without a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    First,
    New,
    At(u64),
}

fn start(text: &str) -> Result<Start, String> {
    match text {
        "first" => Ok(Start::First),
        "new" => Ok(Start::New),
        _ => text
            .parse()
            .ok()
            .filter(|sequence| *sequence > 0)
            .map(Start::At)
            .ok_or_else(|| "want `first`, `new`, or the sequence of the first message, at least 1".to_owned()),
    }
}

/// A message to commit.
struct Item {
    payload: Bytes,
    traceparent: Option<Traceparent>,
    /// The position after it.
    after: Slot,
    /// Messages of the stream that were read up to it.
    read: u64,
}

/// A message of which parts have come.
struct Partial {
    first: u64,
    origin: Origin,
    bytes: BytesMut,
}

struct Inward<'a> {
    args: &'a InArgs,
    nats: Nats,
    stop: Stop,
    status: Arc<Status>,
    name: StreamName,
    sender: Sender,
    is_path: bool,
    position: Position,
    partials: HashMap<String, Partial>,
    /// Messages to commit.
    batch: Vec<Item>,
    batch_bytes: usize,
    /// Sequences that were not delivered between those of the batch.
    gaps: Vec<Gap>,
    /// By connect: the lane's next number after a commit, and where reading would have to begin without it.
    unreleased: VecDeque<(u32, u64)>,
    /// Messages of the stream that were read, without those that are in the channel already.
    read: u64,
}

/// Sequences that were not delivered: of other subjects, or removed.
struct Gap {
    from: u64,
    to: u64,
    /// Where it is in the batch.
    index: usize,
}

/// Runs `pelton-bridge in`.
pub async fn run(args: &InArgs, stop: &Stop, status: &Arc<Status>) -> Result<(), Failure> {
    let channel = Channel::parse(&args.channel)?;
    let path = args.position_path(&channel)?;
    let (nats, info) = args.nats.connect(Direction::In, args.subject.clone(), stop, status).await?;
    let name = StreamName {
        name: info.config.name.clone(),
        created_ns: info.created.unix_timestamp_nanos(),
        subject: args.subject.clone(),
    };
    let mut position = claim(args.standby, stop, || {
        Position::open(&path)
            .map_err(|failure| Error::Refused(failure.text().unwrap_or_default()))?
            .ok_or_else(|| Error::RoleTaken { role: "bridge".to_owned(), path: path.display().to_string(), pid: 0 })
    })
    .await?;
    position.check_stream(&name)?;
    let sender = match &channel {
        // Before it is opened, which begins a new generation.
        Channel::Path(directory) => {
            resolve_path(directory, args, &info, &mut position, stop).await?;
            channel.open_sender(args.listen, args.standby, args.traced, stop).await?
        }
        Channel::Connect(_) => {
            let sender = channel.open_sender(args.listen, args.standby, args.traced, stop).await?;
            resolve_connect(&sender, args, &info, &mut position)?;
            sender
        }
    };
    let current = position.current();
    status.up(&nats.client);
    report(format_args!(
        "in: {} of stream {} to {}, from sequence {} on",
        args.subject, info.config.name, args.channel, current.from
    ));
    let is_path = matches!(channel, Channel::Path(_));
    let mut inward = Inward {
        args,
        nats,
        stop: stop.clone(),
        status: status.clone(),
        name,
        sender,
        is_path,
        position,
        partials: HashMap::new(),
        batch: Vec::new(),
        batch_bytes: 0,
        gaps: Vec::new(),
        // What a predecessor committed.
        unreleased: VecDeque::from([(current.next_seq, current.from)]),
        read: 0,
    };
    status.done.set(current.done);
    // Ends with it.
    let mut measuring = JoinSet::new();
    let (jetstream, stream) = (inward.nats.jetstream.clone(), inward.nats.stream.clone());
    measuring.spawn(measure_lag(jetstream, stream, args.subject.clone(), status.clone()));
    let done = inward.carry().await;
    inward.note_end().await?;
    done
}

/// The slot at which a bridge without a position begins.
fn first_slot(args: &InArgs, info: &Info, path: &std::path::Path, next_seq: u32) -> Result<Slot, Failure> {
    let from = match args.start {
        Some(Start::First) => 1,
        None if next_seq == 1 => 1,
        Some(Start::New) => info.state.last_sequence + 1,
        Some(Start::At(sequence)) => sequence,
        None => {
            return Err(Failure::Refused(format!(
                "`{}` has had messages, the next has number {next_seq}, and {} has no position: --start says where in \
                 the stream to begin",
                args.channel,
                path.display()
            )));
        }
    };
    Ok(Slot { done: from - 1, from, released: from, ..Slot::default() })
}

/// Finds the position in a channel of a directory.
async fn resolve_path(
    directory: &std::path::Path,
    args: &InArgs,
    info: &Info,
    position: &mut Position,
    stop: &Stop,
) -> Result<(), Failure> {
    let options = pelton::Options::<pelton::options::maker::CreateSender>::new().traced(args.traced);
    let mut lane_end = || match pelton::inspect::sender_end(directory, 0) {
        // Creates it, and leaves again.
        Err(Error::NoChannel { .. }) => {
            drop(options.create_sender(directory)?);
            pelton::inspect::sender_end(directory, 0)
        }
        found => found,
    };
    let end = claim(args.standby, stop, &mut lane_end).await?;
    let lanes = pelton::inspect::info(directory)?.lanes_max;
    if lanes > 1 {
        return Err(Failure::Refused(format!(
            "{} has up to {lanes} senders: the bridge cannot identify its own lane. Use a channel for one",
            args.channel
        )));
    }
    let place = Slot { lane: end.lane.0, generation: end.generation, next_seq: end.next_seq, ..Slot::default() };
    let path = position.path().to_owned();
    let unknown = |slot: &Slot, problem: &str| {
        Failure::Refused(format!(
            "{}: {problem}: the channel's next message has number {}, {} says {} at sequence {} of the stream. What \
             of the stream is in the channel is not known: after removing that file, --start says where to begin",
            args.channel,
            end.next_seq,
            path.display(),
            slot.next_seq,
            slot.done
        ))
    };
    let slot = match position.resolve(end.lane.0, end.generation, end.next_seq)? {
        Resolved::Fresh => {
            let first = first_slot(args, info, &path, end.next_seq)?;
            Slot { done: first.done, from: first.from, released: first.released, ..place }
        }
        Resolved::At(slot) => slot,
        Resolved::OtherLane(slot) => return Err(unknown(&slot, "the channel was made anew")),
        Resolved::Foreign(slot) => return Err(unknown(&slot, "another sender used the channel after a kill")),
        Resolved::Unknown(slot) => return Err(unknown(&slot, "another sender has sent messages")),
    };
    position.begin(slot)
}

/// Finds the position in a connected channel: the surviving receiver's lane says it, if there is one.
fn resolve_connect(sender: &Sender, args: &InArgs, info: &Info, position: &mut Position) -> Result<(), Failure> {
    let (lane, generation, next_seq) = (sender.lane_id().0, sender.generation(), sender.next_seq());
    let path = position.path().to_owned();
    // The last sender's generation: this one has begun its own.
    let slot = match position.resolve(lane, generation.saturating_sub(1), next_seq)? {
        Resolved::Fresh => first_slot(args, info, &path, next_seq)?,
        Resolved::At(slot) => slot,
        Resolved::OtherLane(slot) => {
            if slot.from != slot.released {
                report(format_args!(
                    "the last lane is gone: what was sent there from sequence {} of the stream on may come a second \
                     time",
                    slot.released
                ));
            }
            match slot.from == slot.released {
                true => slot,
                false => Slot { done: slot.released - 1, from: slot.released, index: 0, ..slot },
            }
        }
        Resolved::Foreign(slot) | Resolved::Unknown(slot) => {
            return Err(Failure::Refused(format!(
                "another sender has used the lane of `{}`: its next message has number {next_seq}, {} says {}. After \
                 removing that file, --start says where to begin",
                args.channel,
                path.display(),
                slot.next_seq
            )));
        }
    };
    position.begin(Slot { lane, generation, next_seq, ..slot })
}

impl Inward<'_> {
    /// Carries messages until a signal or a failure.
    async fn carry(&mut self) -> Result<(), Failure> {
        let mut retry = Retry::new("reading the stream", &self.status);
        loop {
            self.stop.check()?;
            self.check_stream().await?;
            // What of an unfinished message came before is read again.
            self.partials.clear();
            match self.read(&mut retry).await? {
                None => {}
                Some(problem) => retry.pause(&self.stop, problem).await?,
            }
        }
    }

    /// Whether the stream is still the one that the position belongs to.
    async fn check_stream(&mut self) -> Result<(), Failure> {
        let began = Instant::now();
        let mut retry = Retry::new("checking the stream", &self.status);
        loop {
            let info = self.nats.info(&self.stop).await?;
            self.status.note_mean(&info.state);
            let found = tokio::select! {
                found = self.find_problem(&info) => found,
                failure = self.stop.requested() => return Err(failure),
            };
            let problem = match found {
                Ok(None) => return Ok(()),
                Ok(Some(problem)) => problem,
                // The server did not answer.
                Err(error) => {
                    retry.pause(&self.stop, error).await?;
                    continue;
                }
            };
            if began.elapsed() > SETTLE_TIME || matches!(problem, Problem::Anew) {
                return Err(Failure::Refused(problem.text(&self.nats.stream, self.position.path())));
            }
            retry.pause(&self.stop, "the stream is shorter than it was").await?;
        }
    }

    async fn find_problem(&self, info: &Info) -> Result<Option<Problem>, String> {
        let current = self.position.current();
        if info.created.unix_timestamp_nanos() != self.name.created_ns {
            return Ok(Some(Problem::Anew));
        }
        let Slot { seen, seen_ns, .. } = current;
        if seen == 0 {
            return Ok(None);
        }
        if info.state.last_sequence < seen {
            return Ok(Some(Problem::Shorter { seen, last: info.state.last_sequence }));
        }
        if info.state.first_sequence <= seen {
            let stream = self.nats.jetstream.get_stream_no_info(&self.nats.stream).await;
            match stream.map_err(|error| error.to_string())?.get_raw_message(seen).await {
                Ok(message) if message.time.unix_timestamp_nanos() as i64 != seen_ns => {
                    return Ok(Some(Problem::Replaced { seen }));
                }
                Ok(_) => {}
                // Removed by somebody.
                Err(error) if matches!(error.kind(), jetstream::stream::LastRawMessageErrorKind::NoMessageFound) => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        if info.state.first_sequence > current.from {
            let (from, to) = (current.from, info.state.first_sequence - 1);
            if !self.args.nats.allow_limits {
                return Ok(Some(Problem::Removed { from, to }));
            }
            report_removed(from, to);
        }
        Ok(None)
    }

    /// Reads until something fails, which is returned; `None`: a gap, or the connection was lost.
    async fn read(&mut self, retry: &mut Retry) -> Result<Option<String>, Failure> {
        let current = self.position.current();
        let mut connections = self.nats.connections.clone();
        connections.mark_unchanged();
        let stop = self.stop.clone();
        let requested = stop.requested();
        tokio::pin!(requested);
        let opened = tokio::select! {
            opened = Reading::begin(&self.nats, current.from, self.args.subject.clone()) => opened,
            failure = &mut requested => return Err(failure),
        };
        let mut reading = match opened {
            Ok(reading) => reading,
            Err(problem) => return Ok(Some(problem)),
        };
        // What was read and is not committed is read again.
        self.read = self.status.carried.get();
        let (mut expected, mut wanted) = (1, current.from);
        loop {
            let next = tokio::select! {
                next = reading.next() => next,
                // Its ephemeral consumer may be gone with the server.
                _ = connections.changed() => return Ok(None),
                failure = &mut requested => return Err(failure),
                () = tokio::time::sleep(SILENCE_MAX) => return Ok(Some("no heartbeat of the consumer".to_owned())),
            };
            let mut next = Some(next);
            // And the messages that have come with it.
            while let Some(item) = next {
                let (message, Delivery { sequence, number, time_ns, pending }) = match item {
                    Ok(Some(delivered)) => delivered,
                    Ok(None) => break,
                    Err(problem) => {
                        self.commit().await?;
                        return Ok(Some(problem));
                    }
                };
                // A message is missing: what follows it is read again.
                if number != expected {
                    self.commit().await?;
                    return Ok(None);
                }
                expected += 1;
                if sequence > wanted {
                    self.gaps.push(Gap { from: wanted, to: sequence - 1, index: self.batch.len() });
                }
                wanted = sequence + 1;
                retry.succeeded();
                self.read += u64::from(sequence > self.position.current().done);
                self.status.known.raise(self.read + pending);
                self.take(message, sequence, time_ns)?;
                if self.batch.len() >= BATCH_MESSAGES || self.batch_bytes >= BATCH_BYTES {
                    self.commit().await?;
                }
                next = unconstrained(reading.next()).now_or_never();
            }
            self.commit().await?;
        }
    }

    /// Takes one message of the stream: its messages go into the batch.
    fn take(&mut self, message: async_nats::Message, sequence: u64, time: i64) -> Result<(), Failure> {
        let current = self.position.current();
        // Read again for the parts that belong to a later message.
        let is_old = sequence <= current.done;
        self.status.redeliveries.add(u64::from(is_old));
        let async_nats::Message { subject, payload, headers, .. } = message;
        let stream = &self.args.nats.stream;
        let damaged = |what: &str| {
            Failure::System(format!(
                "message {sequence} of stream {stream}, on {subject}, has {what}: it is not whole, or not of a bridge"
            ))
        };
        let origin = match headers.as_ref().map(Origin::parse) {
            // A message of another publisher is a message of the channel.
            None | Some(Err(NotBridged::Foreign)) => None,
            Some(Err(NotBridged::Damaged(header))) => return Err(damaged(&format!("a damaged header {header}"))),
            Some(Ok(origin)) => Some(origin),
        };
        let traceparent = if self.args.traced { headers.as_ref().and_then(traceparent) } else { None };
        let part = origin.as_ref().and_then(|origin| origin.part);
        if part.is_none() && !self.partials.is_empty() {
            self.partials.remove(subject.as_str());
        }
        let after = Slot { done: sequence, seen: sequence, seen_ns: time, ..Slot::default() };
        match origin {
            Some(origin) if part.is_some() => match self.join(&subject, origin, &payload, sequence, is_old)? {
                Joined::Whole(bytes) if !is_old => self.add(bytes, traceparent, after)?,
                Joined::NoBeginning if !is_old => {
                    return Err(damaged("a part of a message whose beginning is not in the stream any more"));
                }
                Joined::Whole(_) | Joined::NoBeginning | Joined::More => return Ok(()),
            },
            Some(Origin { count: Some(count), .. }) => {
                let whole = unpack(payload, count).ok_or_else(|| damaged("a damaged packed body"))?;
                if is_old {
                    return Ok(());
                }
                // A packed message may be larger than a commit, so each of its messages has a position.
                let skip = if sequence == current.done + 1 { current.index as usize } else { 0 };
                let count = whole.len();
                for (at, bytes) in whole.into_iter().enumerate().skip(skip) {
                    let after = match at + 1 == count {
                        true => after,
                        false => Slot { done: sequence - 1, index: at as u32 + 1, ..after },
                    };
                    // The traceparent is that of the first one.
                    self.add(bytes, traceparent.filter(|_| at == 0), after)?;
                }
            }
            _ if is_old => return Ok(()),
            _ => self.add(payload, traceparent, after)?,
        }
        Ok(())
    }

    /// Adds a message to the batch.
    fn add(&mut self, payload: Bytes, traceparent: Option<Traceparent>, after: Slot) -> Result<(), Failure> {
        let limit = self.sender.message_bytes_max();
        if payload.len() as u64 > limit {
            return Err(Failure::Input(format!(
                "message {} of stream {} has {} bytes, and `{}` takes at most {limit}: use a channel of more capacity",
                after.seen,
                self.nats.stream,
                payload.len(),
                self.args.channel
            )));
        }
        let unfinished = self.partials.values().map(|partial| partial.first).min().unwrap_or(u64::MAX);
        self.batch_bytes += payload.len();
        let after = Slot { from: unfinished.min(after.done + 1), ..after };
        self.batch.push(Item { payload, traceparent, after, read: self.read });
        Ok(())
    }

    /// Joins a part to those before it.
    fn join(
        &mut self,
        subject: &str,
        origin: Origin,
        body: &[u8],
        sequence: u64,
        is_old: bool,
    ) -> Result<Joined, Failure> {
        let (offset, total) = origin.part.expect("a part");
        let limit = self.sender.message_bytes_max();
        if total > limit && !is_old {
            return Err(Failure::Input(format!(
                "message {sequence} of stream {} is a part of {total} bytes, and `{}` takes at most {limit}: use a \
                 channel of more capacity",
                self.nats.stream, self.args.channel
            )));
        }
        if offset == 0 {
            let partial = Partial { first: sequence, origin: origin.clone(), bytes: BytesMut::new() };
            self.partials.insert(subject.to_owned(), partial);
        }
        let Some(partial) = self.partials.get_mut(subject) else { return Ok(Joined::NoBeginning) };
        let known = &partial.origin;
        let is_next = (known.lane, known.number) == (origin.lane, origin.number)
            && known.part.is_some_and(|(_, known)| known == total)
            && partial.bytes.len() as u64 == offset
            && offset + body.len() as u64 <= total;
        if !is_next {
            self.partials.remove(subject);
            return Ok(Joined::NoBeginning);
        }
        partial.bytes.extend_from_slice(body);
        if (partial.bytes.len() as u64) < total {
            return Ok(Joined::More);
        }
        let partial = self.partials.remove(subject).expect("found above");
        Ok(Joined::Whole(partial.bytes.freeze()))
    }

    /// Commits the batch.
    async fn commit(&mut self) -> Result<(), Failure> {
        let removed = self.find_removed().await?;
        // Its memory is used again.
        let mut batch = std::mem::take(&mut self.batch);
        self.batch_bytes = 0;
        let mut rest = match &removed {
            Some((index, _)) => &batch[..*index],
            None => &batch[..],
        };
        while !rest.is_empty() {
            let limit = (BATCH_BYTES as u64).min(self.sender.message_bytes_max());
            let mut bytes = 0;
            let fitting = rest.iter().take(BATCH_MESSAGES).take_while(|item| {
                bytes += item.payload.len() as u64 + RECORD_BYTES;
                bytes <= limit && item.traceparent.is_none()
            });
            let (now, later) = rest.split_at(fitting.count().max(1));
            self.status.waiting_since.set(now[0].after.seen_ns as u64);
            self.commit_once(now).await?;
            rest = later;
        }
        batch.clear();
        self.batch = batch;
        removed.map_or(Ok(()), |(_, failure)| Err(failure))
    }

    /// Whether messages were removed between those of the batch: where, and the failure.
    async fn find_removed(&mut self) -> Result<Option<(usize, Failure)>, Failure> {
        let gaps = std::mem::take(&mut self.gaps);
        if gaps.is_empty() {
            return Ok(None);
        }
        let first = self.nats.info(&self.stop).await?.state.first_sequence;
        let Some(gap) = gaps.into_iter().find(|gap| gap.from < first) else { return Ok(None) };
        let (from, to) = (gap.from, gap.to.min(first - 1));
        if self.args.nats.allow_limits {
            report_removed(from, to);
            return Ok(None);
        }
        let text = Problem::Removed { from, to }.text(&self.nats.stream, self.position.path());
        Ok(Some((gap.index, Failure::Refused(text))))
    }

    /// Commits some messages at once, and notes the position after the last one before.
    async fn commit_once(&mut self, batch: &[Item]) -> Result<(), Failure> {
        loop {
            self.stop.check()?;
            let next_seq = seq_after(self.sender.next_seq(), batch.len());
            let slot = Slot {
                lane: self.position.current().lane,
                generation: self.sender.generation(),
                next_seq,
                released: self.released(),
                ..batch[batch.len() - 1].after
            };
            let Inward { sender, position, .. } = self;
            let until = Instant::now() + SLICE;
            // What to commit once the position is noted: one message with a traceparent, or a batch without.
            let committed = match batch {
                [Item { payload, traceparent: Some(traceparent), .. }] => {
                    match sender.reserve_traced(payload.len(), *traceparent, until) {
                        Ok(None) => Ok(None),
                        Err(error) => Err(error),
                        Ok(Some(mut reservation)) => {
                            reservation.copy_from_slice(payload);
                            position.note(slot)?;
                            failpoint("noted");
                            Ok(Some(reservation.commit()?))
                        }
                    }
                }
                _ => match sender.reserve_batch_until(batch.iter().map(|item| item.payload.len()), until) {
                    Ok(None) => Ok(None),
                    Err(error) => Err(error),
                    Ok(Some(mut reservation)) => {
                        for item in batch {
                            if !reservation.push(&item.payload) {
                                return Err(Failure::System(
                                    "a reserved message does not fit: a mistake of the bridge".to_owned(),
                                ));
                            }
                        }
                        position.note(slot)?;
                        failpoint("noted");
                        Ok(Some(reservation.commit()?))
                    }
                },
            };
            match committed {
                Ok(Some(())) => {
                    failpoint("committed");
                    self.status.messages.add(batch.len() as u64);
                    self.status.carried.set(batch[batch.len() - 1].read);
                    self.status.done.set(slot.done);
                    self.status.bytes.add(batch.iter().map(|item| item.payload.len() as u64).sum());
                    self.note_unreleased(next_seq, slot.from);
                    return Ok(());
                }
                // The receiver is slow: the bridge waits, and the server keeps what follows.
                Ok(None) => self.stop.pause(TURN).await?,
                Err(error @ (Error::Closed { .. } | Error::PeerDied { .. })) => {
                    continue_sender(sender, error, self.is_path, &self.stop, &self.status).await?;
                    if !self.is_path {
                        // A receiver that had closed left the lane to be copied.
                        let (lane, generation) = (self.sender.lane_id().0, self.sender.generation());
                        let current = self.position.current();
                        self.position.begin(Slot { lane, generation, ..current })?;
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Where reading would have to begin if the lane were lost with both sides.
    fn released(&mut self) -> u64 {
        let (next_seq, open) = (self.sender.next_seq(), self.sender.unreleased());
        let mut released = self.position.current().released;
        // Numbers skip 0, which at worst counts one message too few.
        let boundary = next_seq.wrapping_sub(open as u32).wrapping_sub(u32::from(open as u32 >= next_seq));
        while let Some(&(number, from)) = self.unreleased.front().filter(|(number, _)| is_at_most(*number, boundary)) {
            let _ = number;
            released = from;
            self.unreleased.pop_front();
        }
        released
    }

    fn note_unreleased(&mut self, next_seq: u32, from: u64) {
        if self.is_path {
            return;
        }
        if self.unreleased.len() >= UNRELEASED_MAX {
            self.unreleased.pop_back();
        }
        self.unreleased.push_back((next_seq, from));
    }

    /// At the end, by connect: what the receiver releases in time does not come a second time. If the process goes on,
    /// it has all the time that it needs.
    async fn note_end(&mut self) -> Result<(), Failure> {
        if self.is_path {
            return Ok(());
        }
        let until = Instant::now() + RELEASE_WAIT;
        let mut is_reported = false;
        // An error means that the receiver is gone; what it released is known all the same.
        while let Ok(false) = self.sender.wait_released_until(Instant::now() + SLICE) {
            if Instant::now() > until {
                if !self.stop.is_outlived() {
                    break;
                }
                if !std::mem::replace(&mut is_reported, true) {
                    report(format_args!(
                        "in: waits until the receiver of {} has released what it has",
                        self.args.channel
                    ));
                }
            }
            tokio::time::sleep(TURN).await;
        }
        let released = self.released();
        let current = self.position.current();
        self.position.begin(Slot { released, ..current })
    }
}

/// The number after `count` more messages; numbers skip 0.
fn seq_after(next_seq: u32, count: usize) -> u32 {
    let next = u64::from(next_seq) + count as u64;
    (if next > u64::from(u32::MAX) { next - u64::from(u32::MAX) } else { next }) as u32
}

/// The result of a part.
enum Joined {
    Whole(Bytes),
    More,
    NoBeginning,
}

/// Why the stream does not continue what was read of it.
fn report_removed(from: u64, to: u64) {
    report(format_args!("sequences {from} to {to} of the stream were removed before they were read"));
}

enum Problem {
    Anew,
    Shorter { seen: u64, last: u64 },
    Replaced { seen: u64 },
    Removed { from: u64, to: u64 },
}

impl Problem {
    fn text(&self, stream: &str, position: &std::path::Path) -> String {
        let problem = match self {
            Problem::Anew => "was made anew".to_owned(),
            Problem::Shorter { seen, last } => {
                format!("has gone back: its last sequence is {last}, and {seen} is in the channel already")
            }
            Problem::Replaced { seen } => {
                format!("has gone back: its message {seen} was stored at another time than the one that was read")
            }
            Problem::Removed { from, to } => {
                return format!(
                    "sequences {from} to {to} of the stream {stream} were removed before they were read: --allow-limits \
                     continues without them"
                );
            }
        };
        format!(
            "the stream {stream} {problem}. What is in the channel stays there; to begin again, remove {} and say \
             --start",
            position.display()
        )
    }
}
