//! `pelton-bridge out`: the messages of a channel into a stream.
//!
//! For each subject one message is in flight, with the stream sequence of the subject's last message as the
//! expectation. So the server stores at most one of a late original and its repetitions. What a message contains is
//! released before a message of another lane is published on the subject. So after a kill only the subject's last
//! message can be stored and unreleased, and it says itself which message of which lane it is. A lane that is not
//! there yet (by connect, its sender connects again some time later) stays in doubt, and every message published
//! meanwhile carries that doubt on.

use crate::{
    channel::{Channel, Next, ReceiverEnd},
    failpoint,
    nats::{Direction, Nats, NatsArgs, Retry, SETTLE_TIME, limit_text, meaning_of_ack},
    report,
    status::{self, Status},
    stop::Stop,
    wire::{Doubt, HEADER_BYTES, ID_BYTES_MAX, Lane, NotBridged, Origin, is_at_most, lane_text, pack},
};
use async_nats::jetstream::{
    ErrorCode,
    context::{PublishError, PublishErrorKind},
    message::{PublishMessage, StreamMessage},
    stream::{Config, LastRawMessageErrorKind},
};
use bytes::{Bytes, BytesMut};
use clap::Args;
use futures_util::future::try_join_all;
use pelton::{Chunk, LaneId, Receiver, Record, Traceparent, raw::TakenChunk};
use pelton_cli::failure::Failure;
use std::{
    cell::{Cell, OnceCell},
    collections::{HashMap, HashSet},
    error::Error as _,
    sync::Arc,
    time::Duration,
};
use tokio::time::Instant;

/// Bytes of messages taken from a lane at a time, and packed into one NATS message. One by one, a chunk is one
/// message: the end of a bridge waits for the chunk that it has begun.
const CHUNK_BYTES: u64 = 128 << 10;
/// Lanes served at the same time, each with a subject of its own.
const LANES_AT_ONCE: usize = 64;
/// Subjects remembered; a forgotten one is read again.
const SUBJECTS_MAX: usize = 4096;
/// Lanes in doubt that a subject remembers: one more for each kill of a bridge whose sender does not come back.
const DOUBTS_MAX: usize = 16;
/// The longest text of a doubt in a header.
const DOUBT_BYTES: usize = 96;
/// How long publishes whose acknowledgements are missing are awaited after a signal.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// Options of `pelton-bridge out`.
#[derive(Args)]
pub struct OutArgs {
    /// The channel: a short name or unix:PATH, where this bridge listens for senders, or path:DIR
    pub channel: String,
    /// The subject; {lane} in it becomes the identity of the sender's lane, so that senders are independent
    #[arg(long, value_name = "SUBJECT")]
    subject: String,
    #[command(flatten)]
    nats: NatsArgs,
    /// The name of this bridge, the same after each restart and in a standby [default: HOST/CHANNEL]
    #[arg(long, value_name = "NAME")]
    id: Option<String>,
    /// Put several messages into one NATS message: for streams that only `pelton-bridge in` reads
    #[arg(long)]
    packed: bool,
    /// Create the channel as one whose messages carry traceparents; a channel that is there decides itself
    #[arg(long)]
    traced: bool,
    /// End when the sender has closed and everything is stored; takes one sender
    #[arg(long)]
    once: bool,
    /// Wait without limit while another process receives from the channel, and then take over
    #[arg(long)]
    standby: bool,
}

impl OutArgs {
    fn checked_id(&self, channel: &Channel) -> Result<String, Failure> {
        let id = self.id.clone().unwrap_or_else(|| channel.default_id());
        if id.is_empty() || id.len() > ID_BYTES_MAX || id.contains(|c: char| c.is_control() || !c.is_ascii()) {
            return Err(Failure::Input(format!(
                "the name {id:?} cannot be used: want 1 to {ID_BYTES_MAX} ASCII characters"
            )));
        }
        Ok(id)
    }

    /// The subjects that a stream made by --create takes.
    fn stream_subject(&self) -> String {
        self.subject.replace("{lane}", "*")
    }

    /// Whether `other` publishes where this one does, so that it finds out what this one has stored.
    pub fn succeeds(&self, other: &OutArgs) -> bool {
        self.subject == other.subject && self.id == other.id && self.nats.is_same_stream(&other.nats)
    }

    fn chunk_bytes(&self) -> u64 {
        if self.packed { CHUNK_BYTES } else { 1 }
    }

    fn lanes_at_once(&self) -> usize {
        if self.subject.contains("{lane}") { LANES_AT_ONCE } else { 1 }
    }

    /// Checks the options.
    pub fn validate(&self) -> Result<(), Failure> {
        self.checked_id(&Channel::parse(&self.channel)?)?;
        self.nats.servers.validate()
    }

    /// Checks the stream; carries nothing.
    pub async fn check(&self, stop: &Stop, status: &Arc<Status>) -> Result<(), Failure> {
        let subject = self.subject.replace("{lane}", &lane_text([0, 0]));
        self.nats.check(Direction::Out, Some(&subject), stop, status).await
    }
}

/// What is known about a subject.
struct Subject {
    name: String,
    /// The stream sequence of its last message; 0: it has none.
    last: u64,
    /// Whether this process has stored a message there: no predecessor can any more.
    is_mine: bool,
    doubts: Vec<Doubt>,
}

/// The outcome of one publish.
enum Stored {
    Mine,
    /// A message that a predecessor had in flight was stored instead, and reaches this far.
    Predecessors(Doubt),
}

/// A chunk before its lane is checked.
struct Taken {
    chunk: TakenChunk,
    generation: u32,
    traceparent: Option<Traceparent>,
}

impl Taken {
    fn new(chunk: TakenChunk, receiver: &ReceiverEnd) -> Taken {
        let receiver = receiver.get();
        let traceparent = receiver.traceparent_of(chunk.chunk.first_seq);
        Taken { chunk, generation: receiver.generation(), traceparent }
    }
}

/// Messages of one lane.
struct Work<'a> {
    /// The lane's number in this receiver.
    number: u32,
    lane: Lane,
    generation: u32,
    /// Of the first message of the chunk: a message that has one begins a chunk.
    traceparent: Option<Traceparent>,
    chunk: Chunk<'a>,
}

/// How far a lane is stored: its number in this receiver, its identity, and the last message.
type Stage = (u32, Lane, u32);

struct Outward {
    nats: Nats,
    config: Config,
    id: String,
    run: u64,
    packed: bool,
    allow_limits: bool,
    stop: Stop,
    status: Arc<Status>,
    /// Whether a message may be stored that is not released.
    in_doubt: Cell<bool>,
    /// After a signal: when nothing is awaited any more.
    ends_at: OnceCell<Instant>,
    is_reported: Cell<bool>,
    channel: String,
}

/// Runs `pelton-bridge out`.
pub async fn run(args: &OutArgs, stop: &Stop, status: &Arc<Status>) -> Result<(), Failure> {
    let channel = Channel::parse(&args.channel)?;
    let id = args.checked_id(&channel)?;
    let (nats, info) = args.nats.connect(Direction::Out, args.stream_subject(), stop, status).await?;
    let out = Outward {
        nats,
        config: info.config,
        id,
        run: random(),
        packed: args.packed,
        allow_limits: args.nats.allow_limits,
        stop: stop.clone(),
        status: status.clone(),
        in_doubt: Cell::new(false),
        ends_at: OnceCell::new(),
        is_reported: Cell::new(false),
        channel: args.channel.clone(),
    };
    let mut subjects = HashMap::new();
    if !args.subject.contains("{lane}") {
        // Before a sender can come: a subject that cannot be used is refused at the start.
        subjects.insert(args.subject.clone(), out.open_subject(args.subject.clone()).await?);
    }
    let receiver = channel.open_receiver(args.once, args.standby, args.traced, stop).await?;
    let mut end = End { receiver: Some(receiver), channel: &channel, may_close: matches!(channel, Channel::Path(_)) };
    let receiver = end.receiver.as_mut().expect("it was just opened");
    status.up(&out.nats.client);
    report(format_args!(
        "out: {} to {} in stream {}; {}",
        args.channel,
        args.subject,
        out.nats.stream,
        meaning_of_ack(&out.config)
    ));
    let mut settled = HashSet::new();
    let done = out.carry(args, receiver, &mut subjects, &mut settled).await;
    end.may_close |= done.is_ok() || (stop.is_outlived() && out.may_close(receiver, &settled));
    done
}

/// The receiver until its end.
///
/// By connect, to close makes the senders copy what is unreleased into new lanes: what is in doubt must not be closed.
/// A sender that detects the end of this process keeps its lane, and offers it to the next one.
struct End<'a> {
    receiver: Option<ReceiverEnd>,
    channel: &'a Channel,
    may_close: bool,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        if !self.may_close
            && let Some(receiver) = self.receiver.take()
        {
            self.channel.abandon(receiver);
        }
    }
}

/// A number that no other process has.
fn random() -> u64 {
    use std::hash::{BuildHasher as _, Hasher as _};
    std::hash::RandomState::new().build_hasher().finish()
}

impl Outward {
    /// Carries messages until the channel ends, or a signal. `settled` gets the numbers of the lanes of which a
    /// predecessor left nothing in doubt.
    async fn carry(
        &self,
        args: &OutArgs,
        receiver: &mut ReceiverEnd,
        subjects: &mut HashMap<String, Subject>,
        settled: &mut HashSet<u32>,
    ) -> Result<(), Failure> {
        loop {
            let taken = match self.stop.check() {
                Ok(()) => self.take(args, receiver),
                // What may be in doubt is decided before the channel is closed, or is published elsewhere.
                Err(failure) => match self.stop.has_no_successor() || self.stop.is_reload() && !receiver.is_path() {
                    true => match self.take_unsettled(args, receiver, settled)? {
                        taken if taken.is_empty() => return Err(failure),
                        taken => Ok(taken),
                    },
                    false => return Err(failure),
                },
            };
            let taken = match taken {
                Ok(taken) if taken.is_empty() => {
                    self.status.waiting_since.set(0);
                    // A signal is handled above.
                    let Ok(ready) = receiver.ready(&self.stop).await else { continue };
                    self.status.waiting_since.set(status::now());
                    ready.map(|()| taken)
                }
                taken => taken,
            };
            let taken = match taken {
                Ok(taken) => taken,
                Err(error) => match receiver.continue_after(error, args.once)? {
                    Next::Continue => continue,
                    Next::Done => return Ok(()),
                },
            };
            // By subject, each with its chunks in order.
            let mut groups: Vec<(Subject, Vec<Work<'_>>)> = Vec::new();
            for Taken { chunk: taken, generation, traceparent } in &taken {
                let lane = checked_lane(taken.id)?;
                let name = args.subject.replace("{lane}", &lane_text(lane));
                let bytes = receiver.get().bytes_of(taken);
                let chunk = Chunk::new(taken.id, taken.peer, taken.chunk.first_seq, taken.chunk.messages, bytes);
                let work = Work { number: taken.lane, lane, generation: *generation, traceparent: *traceparent, chunk };
                match groups.iter_mut().find(|(subject, _)| subject.name == name) {
                    Some((_, works)) => works.push(work),
                    None => {
                        let subject = match subjects.remove(&name) {
                            Some(subject) => subject,
                            None => self.open_subject(name).await?,
                        };
                        groups.push((subject, vec![work]));
                    }
                }
            }
            let is_new =
                |subject: &Subject, work: &Work<'_>| subject.doubts.iter().all(|doubt| doubt.lane != work.lane);
            for (subject, works) in &groups {
                settled.extend(works.iter().filter(|work| is_new(subject, work)).map(|work| work.number));
            }
            let done =
                try_join_all(groups.into_iter().map(|(subject, works)| self.publish_all(subject, works))).await?;
            failpoint("unreleased");
            receiver.get_mut().release_chunks();
            self.in_doubt.set(false);
            if subjects.len() > SUBJECTS_MAX {
                subjects.clear();
            }
            for (mut subject, released) in done {
                for (number, lane, last) in released {
                    // A predecessor may have packed more messages than this chunk has.
                    subject.doubts.retain(|doubt| doubt.lane != lane || !is_at_most(doubt.number, last));
                    if subject.doubts.iter().all(|doubt| doubt.lane != lane) {
                        settled.insert(number);
                    }
                }
                subjects.insert(subject.name.clone(), subject);
            }
        }
    }

    /// Takes the available messages: of one lane, or of several if each has a subject of its own.
    fn take(&self, args: &OutArgs, receiver: &mut ReceiverEnd) -> pelton::Result<Vec<Taken>> {
        let mut taken = Vec::new();
        while taken.len() < args.lanes_at_once() {
            match receiver.get_mut().take_chunk(args.chunk_bytes(), |_| None) {
                Ok(Some(chunk)) => taken.push(Taken::new(chunk, receiver)),
                Ok(None) => break,
                // What was taken first: the next call returns the error again.
                Err(_) if !taken.is_empty() => break,
                Err(error) => return Err(error),
            }
        }
        Ok(taken)
    }

    /// Takes messages of connected lanes that are not settled.
    fn take_unsettled(
        &self,
        args: &OutArgs,
        receiver: &mut ReceiverEnd,
        settled: &HashSet<u32>,
    ) -> pelton::Result<Vec<Taken>> {
        let mut taken = Vec::new();
        for lane in receiver.get_mut().ends_of_lanes()?.into_iter().filter(|(number, _)| !settled.contains(number)) {
            if taken.len() == args.lanes_at_once() {
                break;
            }
            if let Some(chunk) = receiver.get_mut().take_chunk_before(lane, args.chunk_bytes(), |_| None)? {
                taken.push(Taken::new(chunk, receiver));
            }
        }
        Ok(taken)
    }

    /// Whether nothing is in doubt, by connect, so that the channel can be closed.
    fn may_close(&self, receiver: &mut ReceiverEnd, settled: &HashSet<u32>) -> bool {
        let receiver = receiver.get_mut();
        let is_settled = |lane: (u32, u32), receiver: &mut Receiver| {
            settled.contains(&lane.0) || matches!(receiver.take_chunk_before(lane, 1, |_| None), Ok(None))
        };
        !self.in_doubt.get()
            && receiver.ends_of_lanes().is_ok_and(|lanes| lanes.into_iter().all(|lane| is_settled(lane, receiver)))
    }

    /// Reads the last message of a subject.
    async fn open_subject(&self, name: String) -> Result<Subject, Failure> {
        let mut subject = Subject { name, last: 0, is_mine: false, doubts: Vec::new() };
        let Some(message) = self.read_last(&subject.name).await? else { return Ok(subject) };
        let origin = self.own_origin(&subject.name, &message)?;
        subject.last = message.sequence;
        subject.is_mine = origin.run == self.run;
        subject.doubts = origin.doubts.clone();
        subject.add_doubt(origin.reached(message.payload.len()));
        Ok(subject)
    }

    /// The origin of a message of this bridge; fails for another's.
    fn own_origin(&self, subject: &str, message: &StreamMessage) -> Result<Origin, Failure> {
        let sequence = message.sequence;
        let problem = match Origin::parse(&message.headers) {
            Ok(origin) if origin.bridge == self.id => return Ok(origin),
            Ok(origin) => {
                format!(
                    "is of the bridge {:?}, and this one is {:?}: --id, if this one succeeds it",
                    origin.bridge, self.id
                )
            }
            Err(NotBridged::Foreign) => "is not of a bridge: something else publishes there".to_owned(),
            Err(NotBridged::Damaged(header)) => format!("has a damaged header {header}"),
        };
        Err(Failure::Refused(format!(
            "message {sequence} of stream {}, the last on {subject}, {problem}; otherwise use another subject. Nothing \
             that is not stored was released",
            self.nats.stream
        )))
    }

    /// The last message of a subject, from the stream's leader.
    async fn read_last(&self, subject: &str) -> Result<Option<StreamMessage>, Failure> {
        let mut retry = Retry::new("reading the subject's last message", &self.status);
        let grace = self.grace();
        tokio::pin!(grace);
        loop {
            let read = async {
                match self.nats.jetstream.get_stream_no_info(&self.nats.stream).await {
                    Ok(stream) => {
                        stream.get_last_raw_message_by_subject(subject).await.map_err(|error| match error.kind() {
                            LastRawMessageErrorKind::NoMessageFound => None,
                            _ => Some(error.to_string()),
                        })
                    }
                    Err(error) => Err(Some(error.to_string())),
                }
            };
            let error = tokio::select! {
                read = read => match read {
                    Ok(message) => return Ok(Some(message)),
                    Err(None) => return Ok(None),
                    Err(Some(error)) => error,
                },
                failure = &mut grace => return Err(failure),
            };
            tokio::select! {
                failure = &mut grace => return Err(failure),
                () = retry.pause_through(error) => {}
            }
        }
    }

    /// The failure that a signal causes, some time after it: a publish in flight is decided first, if the server
    /// answers. After a reload without a successor it is decided in any case.
    async fn grace(&self) -> Failure {
        self.stop.requested().await;
        tokio::time::sleep_until(*self.ends_at.get_or_init(|| Instant::now() + STOP_GRACE)).await;
        if self.stop.has_no_successor() && !self.is_reported.replace(true) {
            report(format_args!(
                "out {}: ends once the server says whether a message is stored, because no table publishes the channel \
                 at the same place any more",
                self.channel
            ));
        }
        self.stop.requested_with_successor().await
    }

    /// Publishes the messages of chunks on one subject, in order. Returns what can be released: the lanes, and each
    /// one's last message.
    async fn publish_all(&self, mut subject: Subject, works: Vec<Work<'_>>) -> Result<(Subject, Vec<Stage>), Failure> {
        let mut stored = Vec::new();
        for work in works {
            let last = self.publish_chunk(&mut subject, &work).await?;
            stored.push((work.number, work.lane, last));
        }
        Ok((subject, stored))
    }

    /// Returns the number of the chunk's last message.
    async fn publish_chunk(&self, subject: &mut Subject, work: &Work<'_>) -> Result<u32, Failure> {
        let records: Vec<Record<'_>> = work.chunk.records().collect();
        if records.len() != work.chunk.message_count() as usize {
            return Err(Failure::System(format!(
                "{} of {} messages are valid: their sender wrote into committed messages",
                records.len(),
                work.chunk.message_count()
            )));
        }
        // A reader drops the parts of a message that another one follows.
        for doubt in subject.doubts.iter_mut().filter(|doubt| doubt.lane != work.lane && !doubt.is_whole()) {
            doubt.end = 0;
        }
        let mut at = 0;
        while let Some(record) = records.get(at) {
            let payload = record.payload();
            let Some(begin) = subject.missing_from(work.lane, record.seq(), payload.len() as u64) else {
                at += 1;
                continue;
            };
            let limit = self.body_bytes_max(subject)?;
            let together = if self.packed && begin == 0 { fitting(&records[at..], limit) } else { 0 };
            let stored = if together > 0 {
                let packed = &records[at..at + together];
                let bytes = packed.iter().map(|record| record.payload().len() + 4).sum();
                let mut body = BytesMut::with_capacity(bytes);
                packed.iter().for_each(|record| pack(&mut body, record.payload()));
                let (first, last) = (packed[0].seq(), packed[together - 1].seq());
                let origin = Origin { count: Some(together as u32), ..self.origin(subject, work, first, last) };
                self.publish(subject, &origin, body.freeze()).await?
            } else {
                // A copy: every repetition has the same bytes, even if a hostile sender changes its own.
                let payload = Bytes::copy_from_slice(payload);
                self.publish_parts(subject, work, record.seq(), begin, payload, limit).await?
            };
            match stored {
                Stored::Mine => at += together.max(1),
                // What of these messages is missing is decided anew.
                Stored::Predecessors(doubt) => subject.add_doubt(doubt),
            }
        }
        self.status.messages.add(records.len() as u64);
        self.status.bytes.add(records.iter().map(|record| record.payload().len() as u64).sum());
        Ok(records.last().map_or(work.chunk.first_seq(), Record::seq))
    }

    /// Publishes a message from byte `begin` on, in parts if it is too large for one.
    async fn publish_parts(
        &self,
        subject: &mut Subject,
        work: &Work<'_>,
        number: u32,
        begin: u64,
        mut rest: Bytes,
        limit: usize,
    ) -> Result<Stored, Failure> {
        let total = rest.len() as u64;
        let is_whole = begin == 0 && rest.len() <= limit;
        let mut offset = begin;
        let _ = rest.split_to(begin as usize);
        loop {
            let body = rest.split_to(rest.len().min(limit));
            let part = (!is_whole).then_some((offset, total));
            offset += body.len() as u64;
            let origin = Origin { part, ..self.origin(subject, work, number, number) };
            match self.publish(subject, &origin, body).await? {
                Stored::Mine if !rest.is_empty() => {}
                stored => return Ok(stored),
            }
        }
    }

    /// Of the messages `first` to `number`.
    fn origin(&self, subject: &Subject, work: &Work<'_>, first: u32, number: u32) -> Origin {
        Origin {
            bridge: self.id.clone(),
            run: self.run,
            lane: work.lane,
            generation: work.generation,
            number,
            count: None,
            part: None,
            traceparent: work.traceparent.filter(|_| first == work.chunk.first_seq()),
            doubts: subject.doubts.iter().filter(|doubt| doubt.lane != work.lane).copied().collect(),
        }
    }

    fn body_bytes_max(&self, subject: &Subject) -> Result<usize, Failure> {
        let headers = HEADER_BYTES + self.id.len() + subject.doubts.len() * DOUBT_BYTES;
        match self.nats.body_bytes_max(&self.config, headers) {
            limit @ 1.. => Ok(limit),
            0 => Err(Failure::Refused(format!(
                "the server or the stream takes messages of fewer bytes than the {headers} of a bridge's headers: \
                 raise max_payload, or max_msg_size"
            ))),
        }
    }

    /// Publishes one message, and waits until it is stored. Repeats it, with the same expectation, until that is
    /// decided.
    async fn publish(&self, subject: &mut Subject, origin: &Origin, body: Bytes) -> Result<Stored, Failure> {
        self.in_doubt.set(true);
        self.status.in_flight.add(1);
        let stored = self.publish_until_decided(subject, origin, body).await;
        self.status.in_flight.sub(1);
        stored
    }

    async fn publish_until_decided(
        &self,
        subject: &mut Subject,
        origin: &Origin,
        body: Bytes,
    ) -> Result<Stored, Failure> {
        let headers = origin.headers();
        let mut connections = self.nats.connections.clone();
        let mut retry = Retry::new("publishing", &self.status);
        let mut lost_since = None;
        let mut is_repeated = false;
        let grace = self.grace();
        tokio::pin!(grace);
        loop {
            connections.mark_unchanged();
            let message = PublishMessage::build()
                .payload(body.clone())
                .headers(headers.clone())
                .expected_last_subject_sequence(subject.last);
            self.status.redeliveries.add(u64::from(is_repeated));
            is_repeated = true;
            let attempt = async { self.nats.jetstream.send_publish(subject.name.clone(), message).await?.await };
            let problem = tokio::select! {
                result = attempt => match result {
                    Ok(ack) if ack.stream != self.nats.stream => {
                        return Err(Failure::Refused(format!(
                            "{} is a subject of the stream {}, not of {}: name that stream, or another subject",
                            subject.name, ack.stream, self.nats.stream
                        )));
                    }
                    Ok(ack) => {
                        failpoint("stored");
                        self.status.acks.add(1);
                        (subject.last, subject.is_mine) = (ack.sequence, true);
                        return Ok(Stored::Mine);
                    }
                    Err(error) => self.problem_of(&error)?,
                },
                // The connection was lost in between, perhaps with the message or its acknowledgement.
                _ = connections.changed() => None,
                failure = &mut grace => return Err(failure),
            };
            // The server may have stored it nevertheless: the subject's last message decides.
            let last = self.read_last(&subject.name).await?;
            match last {
                Some(message) if message.sequence > subject.last => return self.decide(subject, origin, &message),
                Some(message) if message.sequence == subject.last => lost_since = None,
                None if subject.last == 0 => lost_since = None,
                // Removed by a limit of the stream.
                None if self.allow_limits => subject.last = 0,
                // A server that is starting, or a new leader, may not have read all of its files yet.
                found => {
                    let since = *lost_since.get_or_insert_with(Instant::now);
                    if since.elapsed() > SETTLE_TIME {
                        let found = found.map_or("none".to_owned(), |message| message.sequence.to_string());
                        return Err(Failure::System(format!(
                            "the stream {} has lost messages: the last one on {} was acknowledged as {}, now it is \
                             {found}. The messages in between were released, and are gone unless a reader has them: \
                             restart the bridge to continue",
                            self.nats.stream, subject.name, subject.last
                        )));
                    }
                }
            }
            if let Some(problem) = problem {
                tokio::select! {
                    failure = &mut grace => return Err(failure),
                    () = retry.pause_through(problem) => {}
                }
            }
        }
    }

    /// A later message than the expected one is the last on the subject: whose is it?
    fn decide(&self, subject: &mut Subject, sent: &Origin, message: &StreamMessage) -> Result<Stored, Failure> {
        let found = self.own_origin(&subject.name, message)?;
        subject.last = message.sequence;
        if found.run == self.run && (found.lane, found.number, found.part) == (sent.lane, sent.number, sent.part) {
            subject.is_mine = true;
            return Ok(Stored::Mine);
        }
        if found.run != self.run && !subject.is_mine {
            return Ok(Stored::Predecessors(found.reached(message.payload.len())));
        }
        Err(Failure::Refused(format!(
            "another bridge with the name {:?} has published message {} on {}: one of the two must end, or have another \
             --id",
            self.id, message.sequence, subject.name
        )))
    }

    /// Why a publish failed, if a pause is due before the next attempt. Fails if no attempt can succeed.
    fn problem_of(&self, error: &PublishError) -> Result<Option<String>, Failure> {
        let refused = error.source().and_then(|source| source.downcast_ref::<async_nats::jetstream::Error>());
        if let Some(text) = refused.and_then(|refused| limit_text(refused, &self.nats.stream)) {
            return Ok(Some(text));
        }
        let code = refused.map(|refused| refused.error_code());
        match (error.kind(), code) {
            (PublishErrorKind::WrongLastSequence, _) | (_, Some(ErrorCode::STREAM_WRONG_LAST_SEQUENCE_CONSTANT)) => {
                Ok(None)
            }
            (PublishErrorKind::MaxPayloadExceeded, _) | (_, Some(ErrorCode::STREAM_MESSAGE_EXCEEDS_MAXIMUM)) => {
                Err(Failure::Refused(format!(
                    "{error}: the server or the stream takes smaller messages than when the bridge started. Restart it"
                )))
            }
            (PublishErrorKind::StreamNotFound, _) => {
                Ok(Some("no stream takes the subject, or JetStream is not ready".to_owned()))
            }
            _ => Ok(Some(match error.source() {
                Some(source) => format!("{error}: {source}"),
                None => error.to_string(),
            })),
        }
    }
}

impl Subject {
    /// The first byte of a message that is not known to be stored; `None`: all of it is.
    fn missing_from(&self, lane: Lane, number: u32, bytes: u64) -> Option<u64> {
        let Some(doubt) = self.doubts.iter().find(|doubt| doubt.lane == lane) else { return Some(0) };
        match is_at_most(number, doubt.number) {
            false => Some(0),
            true if number != doubt.number || doubt.is_whole() => None,
            // Of another size it cannot be that message.
            true if doubt.total != bytes => Some(0),
            true => Some(doubt.end),
        }
    }

    fn add_doubt(&mut self, doubt: Doubt) {
        self.doubts.retain(|other| other.lane != doubt.lane);
        if self.doubts.len() == DOUBTS_MAX {
            let forgotten = self.doubts.remove(0);
            report(format_args!(
                "{}: whether message {} of lane {} is stored is forgotten, because the senders of {DOUBTS_MAX} lanes \
                 have not come back",
                self.name,
                forgotten.number,
                lane_text(forgotten.lane)
            ));
        }
        self.doubts.push(doubt);
    }
}

/// How many of the first messages fit into one packed body.
fn fitting(records: &[Record<'_>], limit: usize) -> usize {
    let mut bytes = 0;
    records
        .iter()
        .take_while(|record| {
            bytes += record.payload().len() + 4;
            bytes <= limit
        })
        .count()
}

fn checked_lane(id: LaneId) -> Result<Lane, Failure> {
    if id == LaneId::NONE {
        return Err(Failure::Refused(
            "the file system of the channel reports no creation times, so a restarted bridge cannot recognise its \
             lanes: put the channel on tmpfs, ext4, xfs or btrfs"
                .to_owned(),
        ));
    }
    Ok(id.0)
}
