//! `pelton serve`: answers calls by a command.
//!
//! One loop: it takes requests into a queue, dispatches them to processes, and returns their replies. Then one poll,
//! the only wait, waits for the service, the processes and the signals. A call is dropped wherever it is once its
//! client cancels it or leaves; that kills the process of the call.

use crate::{
    descriptors,
    failure::{Failure, print_stderr},
    frame::{FrameError, Framing, Splitter},
    notify::{self, notify},
    process::Process,
    report::Ended,
    signals::Signals,
};
use clap::Args;
use pelton::{Options, Responder, Service};
use rustix::event::PollFlags;
use serde::Serialize;
use std::{
    collections::VecDeque,
    io::Write as _,
    os::{fd::AsFd as _, unix::process::ExitStatusExt as _},
    process::ExitStatus,
    time::Instant,
};

/// The most requests that wait for a process, and their bytes. A full queue stops taking requests.
const QUEUE_MAX: usize = 1024;
const QUEUE_BYTES_MAX: usize = 64 << 20;
/// The largest reply: the default limit of clients.
const REPLY_BYTES_MAX: usize = 64 << 20;
/// The most requests that a co-process gets before it replies to the first. A guess: enough to keep it busy.
const AHEAD_MAX: usize = 64;
/// The code of a call that this command fails; exit statuses are at most 255.
const OWN_CODE: u32 = 256;

/// Options of `pelton serve`.
#[derive(Args)]
pub struct ServeArgs {
    /// The service: a short name, which several services may share, or unix:PATH for a socket at PATH
    name: String,
    /// Run by `sh -c` for each request: standard input is the request, standard output the reply
    ///
    /// An exit status other than 0 fails the call. The status (for a signal, 128 plus its number) is the code, and the
    /// first 4,096 bytes of standard error are the text. The process is killed, with its process group, when the call
    /// is cancelled or its client leaves. A reply of more than 64 MiB fails with code 256.
    #[arg(long, value_name = "CMD", required_unless_present = "echo", default_value = "", hide_default_value = true)]
    exec: String,
    /// Reply to each request with its own bytes, for `pelton ping`
    #[arg(long, conflicts_with_all = ["exec", "co_process", "parallel"])]
    echo: bool,
    /// Run CMD once, and again after it ends: it reads requests from standard input and writes replies to standard
    /// output, in order, each after its length (32 bits, little-endian)
    ///
    /// It also replies to notifications; those replies are discarded. When it ends, its calls without a reply fail,
    /// with its exit status as the code, or 256 if that is 0. A cancelled call does not interrupt it.
    #[arg(long)]
    co_process: bool,
    /// Processes at a time [default: the number of processors; with --co-process, 1]
    ///
    /// Up to 1,024 requests, or 64 MiB, wait for a process. Further ones wait in the lanes of the clients, where
    /// cancels have no effect.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    parallel: Option<u32>,
    /// Limit of the memory that clients can make this command use, with K, M or G: their lanes, replies that they do
    /// not read, and incomplete requests [default: none for lanes; 256M for the rest]
    ///
    /// A new client is offered a sixteenth of the remaining memory, and is refused if that is less than 128K. A call
    /// that does not fit fails with code 4294901761.
    #[arg(long, value_name = "BYTES", value_parser = crate::bytes)]
    memory: Option<u64>,
    /// Another user whose processes may call; repeatable. Both sides need the option.
    #[arg(long = "uid", value_name = "UID")]
    uids: Vec<u32>,
    /// Report one JSON object at the end, on standard output
    #[arg(long)]
    json: bool,
}

/// Counters of `--json`.
#[derive(Default, Serialize)]
struct Counts {
    /// Dispatched calls.
    calls: u64,
    notifications: u64,
    /// Failed calls.
    failed: u64,
    /// Calls that were cancelled, or whose client left.
    cancelled: u64,
    /// Starts of a co-process after its first one.
    restarts: u64,
}

#[derive(Serialize)]
struct Report<'a> {
    command: &'static str,
    name: &'a str,
    #[serde(flatten)]
    counts: &'a Counts,
    seconds: f64,
    ended: Ended,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

/// Runs `pelton serve`.
pub fn run(args: &ServeArgs) -> Result<(), Failure> {
    let signals = Signals::install_without_exit()?;
    descriptors::raise("clients", 5);
    let options = args.memory.into_iter().fold(Options::new().allow_uids(&args.uids), Options::memory);
    let service = Service::listen_with(&args.name, &options)?;
    notify(notify::READY);
    let started = Instant::now();
    let parallel = match (args.parallel, args.co_process) {
        (Some(parallel), _) => parallel as usize,
        (None, true) => 1,
        (None, false) => std::thread::available_parallelism().map_or(1, usize::from),
    };
    let mut serve_loop = ServeLoop {
        args,
        service,
        parallel,
        queue: VecDeque::new(),
        queue_bytes: 0,
        request_processes: Vec::new(),
        co_processes: Vec::new(),
        is_draining: false,
        is_drained: false,
        counts: Counts::default(),
    };
    let done = serve_loop.until_signal(&signals);
    let ServeLoop { counts, .. } = serve_loop;
    if args.json {
        let failure = done.as_ref().err();
        let (ended, error) = (failure.map_or(Ended::Closed, Ended::by), failure.and_then(Failure::text));
        let seconds = started.elapsed().as_secs_f64();
        let error = error.as_deref();
        let report = Report { command: "serve", name: &args.name, counts: &counts, seconds, ended, error };
        let _ = writeln!(std::io::stdout(), "{}", serde_json::to_string(&report).expect("numbers and text"));
    }
    done
}

/// A request in the queue.
struct QueuedRequest {
    bytes: Vec<u8>,
    /// `None` for a notification.
    responder: Option<Responder>,
}

impl QueuedRequest {
    fn is_cancelled(&self) -> bool {
        self.responder.as_ref().is_some_and(Responder::is_cancelled)
    }
}

/// A process for one request.
struct RequestProcess {
    process: Process,
    responder: Option<Responder>,
}

impl RequestProcess {
    fn is_cancelled(&self) -> bool {
        self.responder.as_ref().is_some_and(Responder::is_cancelled)
    }
}

/// A co-process, and the calls that wait for its replies.
struct CoProcess {
    process: Process,
    splitter: Splitter,
    pending: VecDeque<Option<Responder>>,
}

struct ServeLoop<'a> {
    args: &'a ServeArgs,
    service: Service,
    parallel: usize,
    queue: VecDeque<QueuedRequest>,
    queue_bytes: usize,
    request_processes: Vec<RequestProcess>,
    co_processes: Vec<CoProcess>,
    /// The service drains: it answers accepted requests and accepts no more.
    is_draining: bool,
    /// It has drained, and every client is notified.
    is_drained: bool,
    counts: Counts,
}

impl ServeLoop<'_> {
    /// Serves until a signal, and then drains; a second signal ends that.
    fn until_signal(&mut self, signals: &Signals) -> Result<(), Failure> {
        while self.args.co_process && self.co_processes.len() < self.parallel {
            self.start_co_process()?;
        }
        let signal = match self.serve(signals) {
            Err(signal @ Failure::Signal(_)) => signal,
            done => return done,
        };
        signals.clear();
        notify(notify::STOPPING);
        self.is_draining = true;
        self.service.stopper().drain();
        match self.serve(signals) {
            Ok(()) => Err(signal),
            failed => failed,
        }
    }

    fn serve(&mut self, signals: &Signals) -> Result<(), Failure> {
        loop {
            let is_paused = self.take_requests()?;
            self.dispatch()?;
            self.step_request_processes()?;
            self.step_co_processes()?;
            if self.is_drained && self.request_processes.is_empty() && self.co_processes.is_empty() {
                return Ok(());
            }
            signals.check()?;
            // An idle process takes the next request without a poll.
            if self.has_idle_process() && !self.queue.is_empty() {
                continue;
            }
            if !is_paused && !self.arm()? {
                continue;
            }
            // Arming detects clients that have left.
            if self.queue.iter().any(QueuedRequest::is_cancelled)
                || self.request_processes.iter().any(RequestProcess::is_cancelled)
            {
                continue;
            }
            let service = (!is_paused).then_some((self.service.as_fd(), PollFlags::IN));
            let request_processes = self.request_processes.iter().flat_map(|one| one.process.poll_events());
            let co_processes = self.co_processes.iter().flat_map(|one| one.process.poll_events());
            let polled = signals.poll_all(service.into_iter().chain(request_processes).chain(co_processes), None);
            if !is_paused {
                self.service.disarm();
            }
            polled?;
        }
    }

    fn arm(&mut self) -> Result<bool, Failure> {
        match self.service.arm() {
            Err(pelton::Error::Closed { .. }) if self.is_draining => {
                self.is_drained = true;
                Ok(false)
            }
            armed => Ok(armed?.is_waiting()),
        }
    }

    /// Takes the available requests, and drops cancelled ones. Returns whether to pause: the queue is full, or the
    /// service has drained.
    fn take_requests(&mut self) -> Result<bool, Failure> {
        let full = |this: &Self| this.queue.len() >= QUEUE_MAX || this.queue_bytes >= QUEUE_BYTES_MAX;
        while !full(self) && !self.is_drained {
            let request = match self.service.try_receive() {
                Ok(Some(request)) => request,
                Ok(None) => break,
                Err(pelton::Error::Closed { .. }) if self.is_draining => {
                    self.is_drained = true;
                    break;
                }
                Err(error) => return Err(error.into()),
            };
            let is_notification = request.is_notification();
            let (bytes, responder) = request.into_parts();
            if self.args.echo {
                match is_notification {
                    true => self.counts.notifications += 1,
                    false => self.counts.calls += 1,
                }
                self.reply((!is_notification).then_some(responder), &bytes);
                continue;
            }
            self.queue_bytes += bytes.len();
            self.queue.push_back(QueuedRequest { bytes, responder: (!is_notification).then_some(responder) });
        }
        let queue_bytes = &mut self.queue_bytes;
        let before = self.queue.len() + self.request_processes.len();
        self.queue.retain(|request| {
            let stays = !request.is_cancelled();
            *queue_bytes -= if stays { 0 } else { request.bytes.len() };
            stays
        });
        self.request_processes.retain(|one| !one.is_cancelled());
        self.counts.cancelled += (before - self.queue.len() - self.request_processes.len()) as u64;
        Ok(full(self) || self.is_drained)
    }

    fn has_idle_process(&self) -> bool {
        match self.args.co_process {
            true => {
                self.co_processes.len() < self.parallel
                    || self.co_processes.iter().any(|one| one.pending.len() < AHEAD_MAX)
            }
            false => self.request_processes.len() < self.parallel,
        }
    }

    fn dispatch(&mut self) -> Result<(), Failure> {
        while self.has_idle_process()
            && let Some(QueuedRequest { bytes, responder }) = self.queue.pop_front()
        {
            self.queue_bytes -= bytes.len();
            match responder {
                Some(_) => self.counts.calls += 1,
                None => self.counts.notifications += 1,
            }
            if !self.args.co_process {
                match Process::start(&self.args.exec, true) {
                    Ok(mut process) => {
                        process.write(&bytes);
                        process.close_input();
                        self.request_processes.push(RequestProcess { process, responder });
                    }
                    Err(failure) => self.fail(responder, OWN_CODE, failure.text().unwrap_or_default().as_bytes()),
                }
                continue;
            }
            if self.co_processes.len() < self.parallel {
                if let Err(failure) = self.start_co_process() {
                    self.fail(responder, OWN_CODE, failure.text().unwrap_or_default().as_bytes());
                    continue;
                }
                self.counts.restarts += 1;
            }
            let least = self.co_processes.iter_mut().min_by_key(|one| one.pending.len()).expect("one was started");
            let mut frame = Vec::with_capacity(bytes.len() + 4);
            Framing::Len32.write(&bytes, &mut frame);
            least.process.write(&frame);
            least.pending.push_back(responder);
        }
        Ok(())
    }

    fn start_co_process(&mut self) -> Result<(), Failure> {
        let process = Process::start(&self.args.exec, false)?;
        let splitter = Splitter::new(Framing::Len32, REPLY_BYTES_MAX as u64, 64 * 1024);
        self.co_processes.push(CoProcess { process, splitter, pending: VecDeque::new() });
        Ok(())
    }

    fn fail(&mut self, responder: Option<Responder>, code: u32, text: &[u8]) {
        if let Some(responder) = responder {
            self.counts.failed += 1;
            // The client has left.
            let _ = responder.fail(code, text);
        }
    }

    fn step_request_processes(&mut self) -> Result<(), Failure> {
        let mut at = 0;
        while at < self.request_processes.len() {
            let has_ended = self.request_processes[at].process.step(REPLY_BYTES_MAX)?;
            let too_much = self.request_processes[at].process.output.len() > REPLY_BYTES_MAX;
            if !has_ended && !too_much {
                at += 1;
                continue;
            }
            let RequestProcess { mut process, responder } = self.request_processes.swap_remove(at);
            let output = std::mem::take(&mut process.output);
            let (status, errors) = process.end();
            if too_much {
                let text = format!("the reply of `{}` has more than {REPLY_BYTES_MAX} bytes", self.args.exec);
                self.fail(responder, OWN_CODE, text.as_bytes());
            } else if status.success() {
                self.reply(responder, &output);
            } else {
                self.fail(responder, code_of(status), &errors);
            }
        }
        Ok(())
    }

    fn reply(&mut self, responder: Option<Responder>, reply: &[u8]) {
        let Some(responder) = responder else { return };
        match responder.reply(reply) {
            Ok(()) => {}
            // Abandoned: the reply exceeds the limit of the client.
            Err(pelton::Error::TooLarge { .. }) => self.counts.failed += 1,
            // The client has left.
            Err(_) => self.counts.cancelled += 1,
        }
    }

    fn step_co_processes(&mut self) -> Result<(), Failure> {
        let mut at = 0;
        while at < self.co_processes.len() {
            let has_ended = self.co_processes[at].process.step(REPLY_BYTES_MAX)?;
            let problem = self.take_replies(at);
            let text = match (has_ended, problem) {
                (true, _) => "the process ended before it replied".to_owned(),
                (false, Some(problem)) => format!("the process was killed: {problem}"),
                (false, None) => {
                    if self.is_drained && self.co_processes[at].pending.is_empty() {
                        self.co_processes[at].process.close_input();
                    }
                    at += 1;
                    continue;
                }
            };
            let CoProcess { process, pending, .. } = self.co_processes.swap_remove(at);
            let status = process.end().0;
            let code = if has_ended && !status.success() { code_of(status) } else { OWN_CODE };
            if !(self.is_drained && pending.is_empty()) {
                let lost = pending.len();
                print_stderr(format!("`{}`: {text}, {lost} calls failed ({status})", self.args.exec));
            }
            for responder in pending {
                self.fail(responder, code, text.as_bytes());
            }
        }
        Ok(())
    }

    /// Sends the replies that a co-process has written. Returns the problem, if they are invalid.
    fn take_replies(&mut self, at: usize) -> Option<String> {
        let mut output = std::mem::take(&mut self.co_processes[at].process.output);
        let mut rest = &output[..];
        loop {
            loop {
                let CoProcess { splitter, pending, .. } = &mut self.co_processes[at];
                let reply = match splitter.next() {
                    Ok(Some(reply)) => reply,
                    Ok(None) => break,
                    Err(FrameError::TooLarge { bytes, bytes_max, .. }) => {
                        return Some(format!("it wrote a reply length of {bytes} bytes, wanted at most {bytes_max}"));
                    }
                    Err(error) => return Some(error.to_string()),
                };
                let Some(responder) = pending.pop_front() else {
                    return Some("it wrote a reply without a request".to_owned());
                };
                // A copy: `self.reply` needs all of `self`.
                let reply = reply.to_vec();
                self.reply(responder, &reply);
            }
            if rest.is_empty() {
                output.clear();
                return None;
            }
            let space = self.co_processes[at].splitter.space();
            let bytes = space.len().min(rest.len());
            space[..bytes].copy_from_slice(&rest[..bytes]);
            rest = &rest[bytes..];
            self.co_processes[at].splitter.filled(bytes);
        }
    }
}

/// The code, as shells report an exit status.
fn code_of(status: ExitStatus) -> u32 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code as u32,
        (None, Some(signal)) => 128 + signal as u32,
        (None, None) => OWN_CODE,
    }
}
