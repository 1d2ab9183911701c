//! `pelton call`: calls a service, and writes its replies to standard output.
//!
//! One loop for one call and for many. It submits requests while there is free space, takes completions, and writes
//! replies in order. Then one poll waits for the service, input, the signals and a hang-up of the reader of standard
//! output.

use crate::{
    channel::connect_client,
    failure::{Failure, print_stderr},
    frame::{Framing, Splitter},
    output::{Output, WRITE_BYTES},
    report::Ended,
    signals::Signals,
};
use clap::Args;
use pelton::{CallId, Client, Loss, Outcome};
use rustix::event::PollFlags;
use serde::Serialize;
use std::{
    collections::{HashMap, VecDeque},
    ffi::OsString,
    io::{Read as _, Write as _},
    os::{fd::AsFd as _, unix::ffi::OsStrExt as _},
    time::{Duration, Instant},
};

/// Bytes per read. A guess, as in `send`.
const READ_BYTES: usize = 256 * 1024;
/// Limit of the bytes of replies that wait for an earlier one. Beyond it, no request is submitted.
const PENDING_BYTES_MAX: usize = 64 << 20;

/// Options of `pelton call`.
#[derive(Args)]
pub struct CallArgs {
    /// The service: a short name, or unix:PATH for a socket at PATH
    name: String,
    /// The request, or - to read it from standard input [default: empty]
    data: Option<OsString>,
    /// Cancel the call, and fail, after this time without the reply, counted from the start of the command [default:
    /// wait without limit]
    #[arg(long, value_name = "SECONDS", value_parser = crate::seconds)]
    timeout: Option<Duration>,
    /// Send a notification, which has no reply
    #[arg(long)]
    notify: bool,
    /// Call once for each frame of standard input, up to 1,024 calls at a time; the replies are frames in the order of
    /// the input
    #[arg(long, value_enum, conflicts_with = "data")]
    frame: Option<Framing>,
    /// Another user whose processes may be the service; repeatable. Both sides need the option.
    #[arg(long = "uid", value_name = "UID")]
    uids: Vec<u32>,
    /// Report one JSON object at the end, on standard error
    #[arg(long)]
    json: bool,
}

/// The object of `--json`.
#[derive(Serialize)]
struct Report<'a> {
    command: &'static str,
    name: &'a str,
    /// Submitted calls or notifications.
    calls: u64,
    /// Calls that the service failed or dropped.
    failed: u64,
    bytes_asked: u64,
    bytes_answered: u64,
    /// From the connection to the end.
    seconds: f64,
    ended: Ended,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

/// Runs `pelton call`.
pub fn run(args: &CallArgs) -> Result<(), Failure> {
    let signals = Signals::install()?;
    // First: a command that cannot write makes no calls.
    let output = Output::new()?;
    let deadline = args.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let client = connect_client(&args.name, &args.uids, args.timeout, &signals)?;
    let started = Instant::now();
    let splitter = Splitter::new(
        args.frame.unwrap_or(Framing::Len32),
        // The largest length of a len32 frame.
        client.request_bytes_max().min(u32::MAX.into()),
        READ_BYTES,
    );
    let mut call_loop = CallLoop {
        args,
        deadline,
        signals: &signals,
        client,
        input: Input { splitter, deferred: None, ended: false },
        indices: HashMap::new(),
        pending: VecDeque::new(),
        first_pending: 0,
        pending_bytes: 0,
        output,
        counts: Counts::default(),
        first_failure: None,
        has_lost_call: false,
    };
    let done = call_loop.all();
    let done = call_loop.finish(done);
    let CallLoop { counts, .. } = call_loop;
    if args.json {
        let seconds = started.elapsed().as_secs_f64();
        let (ended, result) = match &done {
            Ok(()) => (Ended::Closed, None),
            Err(failure) => (ended_by(failure), failure.text()),
        };
        let Counts { calls, failed, bytes_asked, bytes_answered } = counts;
        let name = &args.name;
        let error = result.as_deref();
        let report =
            Report { command: "call", name, calls, failed, bytes_asked, bytes_answered, seconds, ended, error };
        let line = serde_json::to_string(&report).expect("numbers and text");
        let _ = writeln!(std::io::stderr(), "{line}");
    }
    done
}

fn ended_by(failure: &Failure) -> Ended {
    match failure {
        Failure::Peer(_) => Ended::PeerDied,
        failure => Ended::by(failure),
    }
}

#[derive(Default)]
struct Counts {
    calls: u64,
    failed: u64,
    bytes_asked: u64,
    bytes_answered: u64,
}

/// The requests of standard input.
struct Input {
    splitter: Splitter,
    /// A request that waits for free space.
    deferred: Option<Vec<u8>>,
    /// No request follows.
    ended: bool,
}

/// A call whose reply is not written yet.
#[derive(Default)]
struct PendingReply {
    bytes: Vec<u8>,
    is_final: bool,
}

struct CallLoop<'a> {
    args: &'a CallArgs,
    deadline: Option<Instant>,
    signals: &'a Signals,
    client: Client,
    input: Input,
    /// The index of each call in flight.
    indices: HashMap<CallId, u64>,
    /// In order; the first has the index `first_pending`.
    pending: VecDeque<PendingReply>,
    first_pending: u64,
    /// Bytes of replies in `pending`.
    pending_bytes: usize,
    output: Output,
    counts: Counts,
    first_failure: Option<String>,
    /// A call was lost with its service, one of several with the name.
    has_lost_call: bool,
}

impl CallLoop<'_> {
    fn all(&mut self) -> Result<(), Failure> {
        if self.args.frame.is_none() {
            self.submit_once()?;
        }
        loop {
            self.submit_available()?;
            let has_completed = self.take_completions()?;
            if self.input.ended && self.input.deferred.is_none() && self.pending.is_empty() {
                return self.output.write(self.signals);
            }
            self.signals.check()?;
            // A completion may have freed space, and no later event may report that.
            if !(has_completed && self.input.deferred.is_some()) {
                self.wait()?;
            }
        }
    }

    /// Submits the one request.
    fn submit_once(&mut self) -> Result<(), Failure> {
        let request = match &self.args.data {
            Some(data) if data == "-" => self.read_all()?,
            Some(data) => data.as_bytes().to_vec(),
            None => Vec::new(),
        };
        self.input.ended = true;
        // The first request: free space needs no completion, so this call may wait for it.
        let call = match self.deadline {
            Some(deadline) if !self.args.notify => self.client.submit_until(&request, deadline)?,
            _ => return if self.submit(&request)? { Ok(()) } else { self.defer(request) },
        };
        match call {
            Some(call) => self.register(call, request.len()),
            None => return Err(self.timed_out()),
        }
        Ok(())
    }

    /// Reads standard input to its end.
    fn read_all(&mut self) -> Result<Vec<u8>, Failure> {
        let (mut request, most) = (Vec::new(), self.client.request_bytes_max());
        let stdin = std::io::stdin();
        loop {
            self.wait_for_input()?;
            let mut chunk = [0; 64 * 1024];
            match stdin.lock().read(&mut chunk) {
                Ok(0) => return Ok(request),
                Ok(bytes) => request.extend_from_slice(&chunk[..bytes]),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Failure::system("standard input", error)),
            }
            if request.len() as u64 > most {
                return Err(Failure::Input(format!(
                    "standard input has more than {most} bytes, the largest request of this service"
                )));
            }
        }
    }

    /// Waits for input; fails if the service leaves meanwhile.
    fn wait_for_input(&mut self) -> Result<(), Failure> {
        loop {
            if self.client.arm()?.is_waiting() {
                let stdin = std::io::stdin();
                let waits = [(stdin.as_fd(), PollFlags::IN), (self.client.as_fd(), PollFlags::IN)];
                let polled = self.signals.poll(waits, self.left()?);
                self.client.disarm();
                if polled?[0] {
                    return Ok(());
                }
            } else {
                // Without a call in flight, only the departure of the service is reported.
                self.client.try_completion()?;
            }
        }
    }

    /// The remaining time; fails if there is none.
    fn left(&self) -> Result<Option<Duration>, Failure> {
        let Some(deadline) = self.deadline else { return Ok(None) };
        match deadline.checked_duration_since(Instant::now()) {
            // Bounded, so that it fits the `timespec` of `poll`; each caller loops.
            Some(left) => Ok(Some(left.min(Duration::from_secs(3600)))),
            None => Err(self.timed_out()),
        }
    }

    fn timed_out(&self) -> Failure {
        Failure::TimedOut(format!(
            "no reply from `{}` within {} s, the call is cancelled: wait longer with --timeout",
            self.args.name,
            self.args.timeout.unwrap_or_default().as_secs_f64()
        ))
    }

    /// Submits a request, if there is free space.
    fn submit(&mut self, request: &[u8]) -> Result<bool, Failure> {
        if self.args.notify {
            // Waits for free space: a notification has no completion, and each must be in the lane before the end.
            self.client.notify(request)?;
            self.counts.calls += 1;
            self.counts.bytes_asked += request.len() as u64;
            return Ok(true);
        }
        let Some(call) = self.client.try_submit(request)? else { return Ok(false) };
        self.register(call, request.len());
        Ok(true)
    }

    fn register(&mut self, call: CallId, bytes: usize) {
        self.indices.insert(call, self.first_pending + self.pending.len() as u64);
        self.pending.push_back(PendingReply::default());
        self.counts.calls += 1;
        self.counts.bytes_asked += bytes as u64;
    }

    fn defer(&mut self, request: Vec<u8>) -> Result<(), Failure> {
        self.input.deferred = Some(request);
        Ok(())
    }

    /// Submits the available requests, as long as there is free space.
    fn submit_available(&mut self) -> Result<(), Failure> {
        if let Some(deferred) = self.input.deferred.take() {
            if self.indices.is_empty() {
                // No completion will report free space, so this waits for it.
                let call = self.client.submit(&deferred)?;
                self.register(call, deferred.len());
            } else if !self.submit(&deferred)? {
                return self.defer(deferred);
            }
        }
        while !self.input.ended && self.pending_bytes < PENDING_BYTES_MAX {
            let next =
                self.input.splitter.next().map_err(|error| Failure::Input(format!("standard input: {error}")))?;
            // A copy: the frame borrows from the input.
            let Some(request) = next.map(<[u8]>::to_vec) else {
                self.input.ended = self.input.splitter.ended();
                return Ok(());
            };
            if !self.submit(&request)? {
                return self.defer(request);
            }
        }
        Ok(())
    }

    /// Takes the available completions, and writes the replies whose turn it is. Returns whether there was one.
    fn take_completions(&mut self) -> Result<bool, Failure> {
        let before = self.indices.len();
        // After the last completion, the service may close.
        while !self.indices.is_empty() {
            let completion =
                self.client.try_completion()?.map(|done| (done.call_id(), done.outcome(), done.into_vec()));
            let Some((call, outcome, bytes)) = completion else { break };
            self.complete(call, outcome, bytes);
            self.write_in_turn();
            if self.output.buffer.len() >= WRITE_BYTES {
                self.output.write(self.signals)?;
            }
            self.signals.check()?;
        }
        self.output.write(self.signals)?;
        Ok(self.indices.len() < before)
    }

    fn complete(&mut self, call: CallId, outcome: Outcome, bytes: Vec<u8>) {
        let Some(number) = self.indices.get(&call).copied() else { return };
        if outcome.is_final() {
            self.indices.remove(&call);
        }
        let is_reply = matches!(outcome, Outcome::Reply | Outcome::Part | Outcome::End);
        let reply = &mut self.pending[(number - self.first_pending) as usize];
        reply.is_final = outcome.is_final();
        if is_reply {
            self.counts.bytes_answered += bytes.len() as u64;
            self.pending_bytes += bytes.len();
            reply.bytes.extend_from_slice(&bytes);
            return;
        }
        let which = if self.args.frame.is_some() { format!("call {}", number + 1) } else { "the call".to_owned() };
        let text = match outcome {
            Outcome::Failed(code) => {
                let text = String::from_utf8_lossy(&bytes);
                let text = text.trim_end();
                format!("{which} failed with code {code}{}{text}", if text.is_empty() { "" } else { ": " })
            }
            Outcome::Lost(loss) => {
                self.has_lost_call = true;
                let why = match loss {
                    Loss::PeerDied => "died before it replied",
                    Loss::Closed => "closed before it replied",
                    Loss::Corrupt => "violated the protocol",
                    Loss::Returned => "accepted no more calls: call again",
                };
                format!("{which} was lost: the service on `{}` {why}", self.args.name)
            }
            _ => format!("{which} was dropped by the service without a reply"),
        };
        self.counts.failed += 1;
        if self.args.frame.is_some() {
            print_stderr(&text);
        }
        self.first_failure.get_or_insert(text);
    }

    /// Moves complete replies to the output, in order; of a single call, also its parts.
    fn write_in_turn(&mut self) {
        while let Some(first) = self.pending.front_mut() {
            match self.args.frame {
                None => {
                    self.pending_bytes -= first.bytes.len();
                    self.output.buffer.append(&mut first.bytes);
                }
                Some(framing) if first.is_final => {
                    self.pending_bytes -= first.bytes.len();
                    framing.write(&first.bytes, &mut self.output.buffer);
                }
                Some(_) => return,
            }
            if !first.is_final {
                return;
            }
            self.pending.pop_front();
            self.first_pending += 1;
        }
    }

    /// Waits for a completion, or for input while there is free space.
    fn wait(&mut self) -> Result<(), Failure> {
        let wants_input = !self.input.ended && self.input.deferred.is_none() && self.pending_bytes < PENDING_BYTES_MAX;
        let stdin = std::io::stdin();
        // Without a call in flight, the departure of the service is no failure if the input has ended too.
        if wants_input && self.indices.is_empty() {
            let [readable] = self.signals.poll([(stdin.as_fd(), PollFlags::IN)], Some(Duration::ZERO))?;
            if readable {
                return self.read_input();
            }
        }
        if self.client.busy_poll()? || !self.client.arm()?.is_waiting() {
            return Ok(());
        }
        let input = if wants_input { PollFlags::IN } else { PollFlags::empty() };
        // No events for the output: the poll reports an error or a hang-up of the reader.
        let own = [(self.client.as_fd(), PollFlags::IN), (self.output.as_fd(), PollFlags::empty())];
        let waits = own.into_iter().chain(wants_input.then(|| (stdin.as_fd(), input)));
        let polled = self.signals.poll_all(waits, self.left()?);
        self.client.disarm();
        let ready = polled?;
        if ready[1] {
            return Err(Failure::OutputClosed);
        }
        if ready.get(2) == Some(&true) { self.read_input() } else { Ok(()) }
    }

    /// Reads what standard input has, once it is readable.
    fn read_input(&mut self) -> Result<(), Failure> {
        match rustix::io::read(std::io::stdin(), self.input.splitter.space()) {
            Ok(bytes) => self.input.splitter.filled(bytes),
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            Err(error) => return Err(Failure::system("standard input", error)),
        }
        Ok(())
    }

    /// The result of the command. Replies from before a failure are written first.
    fn finish(&mut self, done: Result<(), Failure>) -> Result<(), Failure> {
        match (done, self.first_failure.take()) {
            (Ok(()), None) => Ok(()),
            (Ok(()), Some(text)) => {
                let Counts { calls, failed, .. } = self.counts;
                let text = if self.args.frame.is_none() { text } else { format!("{failed} of {calls} calls failed") };
                Err(if self.has_lost_call { Failure::Peer(text) } else { Failure::Call(text) })
            }
            (Err(Failure::Peer(text)), _) => {
                self.output.write(self.signals)?;
                let left = self.pending.len();
                Err(Failure::Peer(format!(
                    "the service on `{}` has left, {left} calls have no reply: {text}",
                    self.args.name
                )))
            }
            (Err(failure), _) => Err(failure),
        }
    }
}
