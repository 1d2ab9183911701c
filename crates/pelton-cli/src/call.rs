//! `pelton call`: asks a service, and writes its replies to standard output.
//!
//! One loop for one call and for many: it hands in what there is room for, takes the answers that have come, writes those whose turn it
//! is, and then one poll waits for the service, more input, the signals and the going of standard output's reader.

use crate::{
    channel::unless_timed_out,
    failure::{Failure, say},
    frame::{Framing, Splitter},
    output::{Output, WRITE_BYTES},
    report::Ended,
    signals::{SLICE, Signals},
};
use clap::Args;
use pelton::{CallId, Client, Loss, Options, Outcome};
use rustix::event::PollFlags;
use serde::Serialize;
use std::{
    collections::{HashMap, VecDeque},
    ffi::OsString,
    io::{Read as _, Write as _},
    os::{fd::AsFd as _, unix::ffi::OsStrExt as _},
    time::{Duration, Instant},
};

/// Read at once. A guess, as in `send`.
const READ_BYTES: usize = 256 * 1024;
/// Replies wait here for one before them that is late. Once they come to so much, nothing more is asked.
const WAITING_BYTES: usize = 64 << 20;

/// Options of `pelton call`.
#[derive(Args)]
pub struct CallArgs {
    /// The service: a short name, or unix:PATH for a socket at PATH
    name: String,
    /// The request, or - to read it from standard input [default: an empty one]
    data: Option<OsString>,
    /// Give up, and cancel the call, when the answer has not come after so long, with the time for the service to appear
    /// [default: wait for ever]
    #[arg(long, value_name = "SECONDS", value_parser = crate::seconds)]
    timeout: Option<Duration>,
    /// Tell the service, and await no answer
    #[arg(long)]
    notify: bool,
    /// Make a call of each frame of standard input, up to 1,024 at a time; the replies are frames in the order of the input
    #[arg(long, value_enum, conflicts_with = "data")]
    frame: Option<Framing>,
    /// A user that may be at the other end besides this one; several times for several. Both sides have to say so.
    #[arg(long = "uid", value_name = "UID")]
    uids: Vec<u32>,
    /// Report as one JSON object at the end, on standard error
    #[arg(long)]
    json: bool,
}

/// The object of `--json`.
#[derive(Serialize)]
struct Report<'a> {
    command: &'static str,
    name: &'a str,
    /// Calls, or notifications, that were handed in
    calls: u64,
    /// Of those, calls that the service failed or let go
    failed: u64,
    bytes_asked: u64,
    bytes_answered: u64,
    /// From the connection to the end
    seconds: f64,
    ended: Ended,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

/// Runs `pelton call`.
pub fn run(args: &CallArgs) -> Result<(), Failure> {
    let signals = Signals::install()?;
    // First: what cannot be written is not to be asked for.
    let output = Output::new()?;
    let deadline = args.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let client = appear(args, deadline, &signals)?;
    let started = Instant::now();
    let splitter = Splitter::new(
        args.frame.unwrap_or(Framing::Len32),
        // a len32 length cannot say more
        client.request_bytes_max().min(u32::MAX.into()),
        READ_BYTES,
    );
    let mut calling = Calling {
        args,
        deadline,
        signals: &signals,
        client,
        input: Input { splitter, held: None, ended: false },
        places: HashMap::new(),
        awaited: VecDeque::new(),
        taken: 0,
        waiting_bytes: 0,
        output,
        counts: Counts::default(),
        first_failure: None,
        is_lost: false,
    };
    let done = calling.all();
    let done = calling.finish(done);
    let Calling { counts, .. } = calling;
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

/// Connects; waits for the service to listen.
fn appear(args: &CallArgs, deadline: Option<Instant>, signals: &Signals) -> Result<Client, Failure> {
    let options = Options::new().allow_uids(&args.uids);
    loop {
        let now = Instant::now();
        let slice = deadline.map_or(now + SLICE, |deadline| deadline.min(now + SLICE));
        if let Some(client) = unless_timed_out(options.clone().connect_deadline(slice).connect_client(&args.name))? {
            return Ok(client);
        }
        signals.check()?;
        if deadline.is_some_and(|deadline| deadline <= now) {
            return Err(Failure::TimedOut(format!(
                "no service appeared on `{}` within {} s: start one, or wait longer with --timeout",
                args.name,
                args.timeout.unwrap_or_default().as_secs_f64()
            )));
        }
    }
}

/// What was done.
#[derive(Default)]
struct Counts {
    calls: u64,
    failed: u64,
    bytes_asked: u64,
    bytes_answered: u64,
}

/// What is to be asked.
struct Input {
    splitter: Splitter,
    /// There was no room for this one.
    held: Option<Vec<u8>>,
    /// There is no more.
    ended: bool,
}

/// A call whose answer is not written yet.
#[derive(Default)]
struct Awaited {
    answer: Vec<u8>,
    is_final: bool,
}

/// The client at work.
struct Calling<'a> {
    args: &'a CallArgs,
    deadline: Option<Instant>,
    signals: &'a Signals,
    client: Client,
    input: Input,
    /// Of each call in flight, its number
    places: HashMap<CallId, u64>,
    /// In order, from number `taken` on
    awaited: VecDeque<Awaited>,
    taken: u64,
    /// Of answers in `awaited`
    waiting_bytes: usize,
    output: Output,
    counts: Counts,
    first_failure: Option<String>,
    /// With a service that has gone, of several by one name
    is_lost: bool,
}

impl Calling<'_> {
    fn all(&mut self) -> Result<(), Failure> {
        if self.args.frame.is_none() {
            self.ask_once()?;
        }
        loop {
            self.ask()?;
            let took = self.take()?;
            if self.input.ended && self.input.held.is_none() && self.awaited.is_empty() {
                return self.output.write(self.signals);
            }
            self.signals.check()?;
            // Where something was taken there may be room now, and nothing else to come.
            if !(took && self.input.held.is_some()) {
                self.wait()?;
            }
        }
    }

    /// Hands in the one request.
    fn ask_once(&mut self) -> Result<(), Failure> {
        let request = match &self.args.data {
            Some(data) if data == "-" => self.read_all()?,
            Some(data) => data.as_bytes().to_vec(),
            None => Vec::new(),
        };
        self.input.ended = true;
        // Nothing was handed in before, so nothing waits for room but what goes on as this loop does.
        let call = match self.deadline {
            Some(deadline) if !self.args.notify => self.client.submit_until(&request, deadline)?,
            _ => return if self.hand_in(&request)? { Ok(()) } else { self.hold(request) },
        };
        match call {
            Some(call) => self.begin(call, request.len()),
            None => return Err(self.timed_out()),
        }
        Ok(())
    }

    /// Standard input to its end.
    fn read_all(&mut self) -> Result<Vec<u8>, Failure> {
        let (mut request, most) = (Vec::new(), self.client.request_bytes_max());
        let stdin = std::io::stdin();
        loop {
            self.poll_input()?;
            let mut chunk = [0; 64 * 1024];
            match stdin.lock().read(&mut chunk) {
                Ok(0) => return Ok(request),
                Ok(bytes) => request.extend_from_slice(&chunk[..bytes]),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Failure::system("standard input", error)),
            }
            if request.len() as u64 > most {
                return Err(Failure::Input(format!(
                    "standard input has more than {most} bytes, which is the largest request that the service takes"
                )));
            }
        }
    }

    /// Waits for input, the service being there all the while.
    fn poll_input(&mut self) -> Result<(), Failure> {
        loop {
            if self.client.arm()? {
                let stdin = std::io::stdin();
                let waits = [(stdin.as_fd(), PollFlags::IN), (self.client.as_fd(), PollFlags::IN)];
                let polled = self.signals.poll(waits, self.left()?);
                self.client.disarm();
                if polled?[0] {
                    return Ok(());
                }
            } else {
                // Nothing was asked: this says that the service has gone.
                self.client.try_completion()?;
            }
        }
    }

    /// The time that is left; fails when it has passed.
    fn left(&self) -> Result<Option<Duration>, Failure> {
        let Some(deadline) = self.deadline else { return Ok(None) };
        match deadline.checked_duration_since(Instant::now()) {
            // Long ones are asked for again.
            Some(left) => Ok(Some(left.min(Duration::from_secs(3600)))),
            None => Err(self.timed_out()),
        }
    }

    fn timed_out(&self) -> Failure {
        Failure::TimedOut(format!(
            "no answer came from `{}` within {} s, and the call is cancelled: wait longer with --timeout",
            self.args.name,
            self.args.timeout.unwrap_or_default().as_secs_f64()
        ))
    }

    /// Hands in a request, if there is room.
    fn hand_in(&mut self, request: &[u8]) -> Result<bool, Failure> {
        if self.args.notify {
            // Waits for room: nothing comes of it that this loop could wait for, and it is to be all there before the end.
            self.client.notify(request)?;
            self.counts.calls += 1;
            self.counts.bytes_asked += request.len() as u64;
            return Ok(true);
        }
        let Some(call) = self.client.try_submit(request)? else { return Ok(false) };
        self.begin(call, request.len());
        Ok(true)
    }

    fn begin(&mut self, call: CallId, bytes: usize) {
        self.places.insert(call, self.taken + self.awaited.len() as u64);
        self.awaited.push_back(Awaited::default());
        self.counts.calls += 1;
        self.counts.bytes_asked += bytes as u64;
    }

    fn hold(&mut self, request: Vec<u8>) -> Result<(), Failure> {
        self.input.held = Some(request);
        Ok(())
    }

    /// Hands in what there is, as far as there is room.
    fn ask(&mut self) -> Result<(), Failure> {
        if let Some(held) = self.input.held.take() {
            if self.places.is_empty() {
                // No answer will come that says that there is room.
                let call = self.client.submit(&held)?;
                self.begin(call, held.len());
            } else if !self.hand_in(&held)? {
                return self.hold(held);
            }
        }
        while !self.input.ended && self.waiting_bytes < WAITING_BYTES {
            let next =
                self.input.splitter.next().map_err(|error| Failure::Input(format!("standard input: {error}")))?;
            // A copy: what it is cut from belongs to the input.
            let Some(request) = next.map(<[u8]>::to_vec) else {
                self.input.ended = self.input.splitter.ended();
                return Ok(());
            };
            if !self.hand_in(&request)? {
                return self.hold(request);
            }
        }
        Ok(())
    }

    /// Takes the answers that have come, and writes those whose turn it is. Answers whether there were any.
    fn take(&mut self) -> Result<bool, Failure> {
        let before = self.places.len();
        // Once there are all, the service may go.
        while !self.places.is_empty() {
            let came = self.client.try_completion()?.map(|answer| (answer.call(), answer.outcome(), answer.into_vec()));
            let Some((call, outcome, bytes)) = came else { break };
            self.took(call, outcome, bytes);
            self.write_in_turn();
            if self.output.buffer.len() >= WRITE_BYTES {
                self.output.write(self.signals)?;
            }
            self.signals.check()?;
        }
        self.output.write(self.signals)?;
        Ok(self.places.len() < before)
    }

    fn took(&mut self, call: CallId, outcome: Outcome, bytes: Vec<u8>) {
        let Some(number) = self.places.get(&call).copied() else { return };
        if outcome.is_final() {
            self.places.remove(&call);
        }
        let is_reply = matches!(outcome, Outcome::Reply | Outcome::Part | Outcome::End);
        let awaited = &mut self.awaited[(number - self.taken) as usize];
        awaited.is_final = outcome.is_final();
        if is_reply {
            self.counts.bytes_answered += bytes.len() as u64;
            self.waiting_bytes += bytes.len();
            awaited.answer.extend_from_slice(&bytes);
            return;
        }
        let which = if self.args.frame.is_some() { format!("call {}", number + 1) } else { "the call".to_owned() };
        let text = match outcome {
            Outcome::Failed(code) => {
                let says = String::from_utf8_lossy(&bytes);
                let says = says.trim_end();
                format!("{which} failed with code {code}{}{says}", if says.is_empty() { "" } else { ": " })
            }
            Outcome::Lost(loss) => {
                self.is_lost = true;
                let why = match loss {
                    Loss::PeerDied => "died before it answered",
                    Loss::Closed => "closed before it answered",
                    Loss::Corrupt => "broke the rules",
                    Loss::Returned => "took no more calls: ask again",
                };
                format!("{which} was lost: the service on `{}` {why}", self.args.name)
            }
            _ => format!("{which} was let go by the service, without a reply"),
        };
        self.counts.failed += 1;
        if self.args.frame.is_some() {
            say(&text);
        }
        self.first_failure.get_or_insert(text);
    }

    /// Moves to the output what is complete and has nothing before it; of a single call, also its parts.
    fn write_in_turn(&mut self) {
        while let Some(first) = self.awaited.front_mut() {
            match self.args.frame {
                None => {
                    self.waiting_bytes -= first.answer.len();
                    self.output.buffer.append(&mut first.answer);
                }
                Some(framing) if first.is_final => {
                    self.waiting_bytes -= first.answer.len();
                    framing.write(&first.answer, &mut self.output.buffer);
                }
                Some(_) => return,
            }
            if !first.is_final {
                return;
            }
            self.awaited.pop_front();
            self.taken += 1;
        }
    }

    /// Waits until there is something to do: an answer, or input that there is room for.
    fn wait(&mut self) -> Result<(), Failure> {
        let wants_input = !self.input.ended && self.input.held.is_none() && self.waiting_bytes < WAITING_BYTES;
        let stdin = std::io::stdin();
        // Without a call in flight the end of the service is no failure if the input has ended too.
        if wants_input && self.places.is_empty() {
            let [readable] = self.signals.poll([(stdin.as_fd(), PollFlags::IN)], Some(Duration::ZERO))?;
            if readable {
                return self.read_input();
            }
        }
        if !self.client.arm()? {
            return Ok(());
        }
        let input = if wants_input { PollFlags::IN } else { PollFlags::empty() };
        // no events asked for of the output: only an error, or that nobody reads any more
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

    /// What became of it: what was answered before the end is written, whatever the end was.
    fn finish(&mut self, done: Result<(), Failure>) -> Result<(), Failure> {
        match (done, self.first_failure.take()) {
            (Ok(()), None) => Ok(()),
            (Ok(()), Some(text)) => {
                let Counts { calls, failed, .. } = self.counts;
                let text = if self.args.frame.is_none() { text } else { format!("{failed} of {calls} calls failed") };
                Err(if self.is_lost { Failure::Peer(text) } else { Failure::Call(text) })
            }
            (Err(Failure::Peer(text)), _) => {
                self.output.write(self.signals)?;
                let left = self.awaited.len();
                Err(Failure::Peer(format!(
                    "the service on `{}` has gone, {left} calls unanswered: {text}",
                    self.args.name
                )))
            }
            (Err(failure), _) => Err(failure),
        }
    }
}
