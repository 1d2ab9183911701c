//! `pelton serve`: answers calls by a command.
//!
//! One loop: it takes requests into a queue, hands them to processes as those have time, gives back what they write, and then one poll
//! waits for the service, the processes and the signals. Nothing else waits. A call whose client has cancelled it, or is gone, is
//! dropped wherever it is; of a process for each call, that is its end.

use crate::{
    descriptors,
    failure::{Failure, say},
    frame::{FrameError, Framing, Splitter},
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

/// Requests that wait for a process at most, and their bytes; while there are as many none is taken.
const QUEUE: usize = 1024;
const QUEUE_BYTES: usize = 64 << 20;
/// The largest reply: what clients take if they say nothing else.
const REPLY_BYTES: usize = 64 << 20;
/// Requests that a co-process is given before it has answered the first of them. A guess: enough for it to have always the next.
const AHEAD: usize = 64;
/// The code of a call that failed here and not by a process's exit status, which is at most 255.
const OWN_CODE: u32 = 256;

/// Options of `pelton serve`.
#[derive(Args)]
pub struct ServeArgs {
    /// The service: a short name, by which several may serve, or unix:PATH for a socket at PATH
    name: String,
    /// Run by `sh -c` for each request, which is its standard input; its standard output is the reply
    ///
    /// An exit status other than 0 fails the call: the status (128 and the number of a signal that ended it) is the code, and the first
    /// 4,096 bytes of standard error are what is said. The process is killed, with its process group, when the call is
    /// cancelled or its client has gone. A reply of more than 64 MiB fails with code 256.
    #[arg(long, value_name = "CMD")]
    exec: String,
    /// Run CMD once, and again when it has ended: it reads requests from standard input and writes replies, in their order, to
    /// standard output, each after its length (32 bits, little-endian)
    ///
    /// It answers notifications as well; those replies are dropped. When it ends, the calls that it has not answered fail with its
    /// exit status as the code, or 256 if that was 0. To cancel a call does not interrupt it.
    #[arg(long)]
    co_process: bool,
    /// Processes at a time [default: as many as there are processors, of --co-process one]
    ///
    /// Further requests wait: 1,024, or 64 MiB of them; then in the clients' lanes, where nothing is noticed of cancelling.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    parallel: Option<u32>,
    /// Limit of the memory that clients can make this command use, with K, M or G: their lanes, replies that they do not read, and
    /// requests of which a part has come [default: none for lanes; 256M for the rest]
    ///
    /// Each new client is offered a sixteenth of what is left, and is refused when that is less than 128K. A call that does not fit fails with
    /// code 4294901761.
    #[arg(long, value_name = "BYTES", value_parser = crate::bytes)]
    memory: Option<u64>,
    /// A user that may call besides this one; several times for several. Both sides have to say so.
    #[arg(long = "uid", value_name = "UID")]
    uids: Vec<u32>,
    /// Report as one JSON object at the end, on standard output
    #[arg(long)]
    json: bool,
}

/// The object of `--json`.
#[derive(Default, Serialize)]
struct Counts {
    /// Requests taken, but for those that were cancelled while they waited
    calls: u64,
    notifications: u64,
    /// Of the calls, those that failed
    failed: u64,
    /// And those that nobody awaited any more
    cancelled: u64,
    /// Starts of a co-process after its first
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
    let signals = Signals::install_patiently()?;
    descriptors::raise("clients", 5);
    let options = args.memory.into_iter().fold(Options::new().allow_uids(&args.uids), Options::memory);
    let service = options.listen_service(&args.name)?;
    let started = Instant::now();
    let parallel = match (args.parallel, args.co_process) {
        (Some(parallel), _) => parallel as usize,
        (None, true) => 1,
        (None, false) => std::thread::available_parallelism().map_or(1, usize::from),
    };
    let mut serving = Serving {
        args,
        service,
        parallel,
        queue: VecDeque::new(),
        queue_bytes: 0,
        once: Vec::new(),
        lasting: Vec::new(),
        is_ending: false,
        is_drained: false,
        counts: Counts::default(),
    };
    let done = serving.until_signal(&signals);
    let Serving { counts, .. } = serving;
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

/// A request.
struct Asked {
    bytes: Vec<u8>,
    /// `None`: nobody awaits an answer
    responder: Option<Responder>,
}

impl Asked {
    fn is_cancelled(&self) -> bool {
        self.responder.as_ref().is_some_and(Responder::is_cancelled)
    }
}

/// A process for one request.
struct Once {
    process: Process,
    responder: Option<Responder>,
}

impl Once {
    fn is_cancelled(&self) -> bool {
        self.responder.as_ref().is_some_and(Responder::is_cancelled)
    }
}

/// A process that lasts, and whom it is to answer.
struct Lasting {
    process: Process,
    splitter: Splitter,
    awaited: VecDeque<Option<Responder>>,
}

/// The service at work.
struct Serving<'a> {
    args: &'a ServeArgs,
    service: Service,
    parallel: usize,
    queue: VecDeque<Asked>,
    queue_bytes: usize,
    once: Vec<Once>,
    lasting: Vec<Lasting>,
    /// It drains: what was taken is answered, and no more is taken
    is_ending: bool,
    /// That is done, and every client knows
    is_drained: bool,
    counts: Counts,
}

impl Serving<'_> {
    /// Serves until a signal comes, and then drains; a second one ends that.
    fn until_signal(&mut self, signals: &Signals) -> Result<(), Failure> {
        while self.args.co_process && self.lasting.len() < self.parallel {
            self.start_lasting()?;
        }
        let signal = match self.serve(signals) {
            Err(signal @ Failure::Signal(_)) => signal,
            done => return done,
        };
        signals.forget();
        self.is_ending = true;
        self.service.stopper().drain();
        match self.serve(signals) {
            Ok(()) => Err(signal),
            failed => failed,
        }
    }

    fn serve(&mut self, signals: &Signals) -> Result<(), Failure> {
        loop {
            let is_deaf = self.take()?;
            self.hand_out()?;
            self.step_once()?;
            self.step_lasting()?;
            if self.is_drained && self.once.is_empty() && self.lasting.is_empty() {
                return Ok(());
            }
            signals.check()?;
            // Who has time takes the next at once.
            if self.has_time() && !self.queue.is_empty() {
                continue;
            }
            if !is_deaf && !self.arm()? {
                continue;
            }
            // To arm was to look who has gone.
            if self.queue.iter().any(Asked::is_cancelled) || self.once.iter().any(Once::is_cancelled) {
                continue;
            }
            let service = (!is_deaf).then_some((self.service.as_fd(), PollFlags::IN));
            let once = self.once.iter().flat_map(|once| once.process.waits());
            let lasting = self.lasting.iter().flat_map(|lasting| lasting.process.waits());
            let polled = signals.poll_all(service.into_iter().chain(once).chain(lasting), None);
            if !is_deaf {
                self.service.disarm();
            }
            polled?;
        }
    }

    fn arm(&mut self) -> Result<bool, Failure> {
        match self.service.arm() {
            Err(pelton::Error::Closed { .. }) if self.is_ending => {
                self.is_drained = true;
                Ok(false)
            }
            armed => Ok(armed?),
        }
    }

    /// Takes what requests there are; drops what nobody awaits. Answers whether no more is to be taken now.
    fn take(&mut self) -> Result<bool, Failure> {
        let full = |this: &Self| this.queue.len() >= QUEUE || this.queue_bytes >= QUEUE_BYTES;
        while !full(self) && !self.is_drained {
            let request = match self.service.try_receive() {
                Ok(Some(request)) => request,
                Ok(None) => break,
                Err(pelton::Error::Closed { .. }) if self.is_ending => {
                    self.is_drained = true;
                    break;
                }
                Err(error) => return Err(error.into()),
            };
            let is_notification = request.is_notification();
            let (bytes, responder) = request.into_parts();
            self.queue_bytes += bytes.len();
            self.queue.push_back(Asked { bytes, responder: (!is_notification).then_some(responder) });
        }
        let queue_bytes = &mut self.queue_bytes;
        let before = self.queue.len() + self.once.len();
        self.queue.retain(|asked| {
            let stays = !asked.is_cancelled();
            *queue_bytes -= if stays { 0 } else { asked.bytes.len() };
            stays
        });
        self.once.retain(|once| !once.is_cancelled());
        self.counts.cancelled += (before - self.queue.len() - self.once.len()) as u64;
        Ok(full(self) || self.is_drained)
    }

    fn has_time(&self) -> bool {
        match self.args.co_process {
            true => self.lasting.len() < self.parallel || self.lasting.iter().any(|one| one.awaited.len() < AHEAD),
            false => self.once.len() < self.parallel,
        }
    }

    fn hand_out(&mut self) -> Result<(), Failure> {
        while self.has_time()
            && let Some(Asked { bytes, responder }) = self.queue.pop_front()
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
                        self.once.push(Once { process, responder });
                    }
                    Err(failure) => self.fail(responder, OWN_CODE, failure.text().unwrap_or_default().as_bytes()),
                }
                continue;
            }
            if self.lasting.len() < self.parallel {
                if let Err(failure) = self.start_lasting() {
                    self.fail(responder, OWN_CODE, failure.text().unwrap_or_default().as_bytes());
                    continue;
                }
                self.counts.restarts += 1;
            }
            let least = self.lasting.iter_mut().min_by_key(|one| one.awaited.len()).expect("one was started");
            let mut frame = Vec::with_capacity(bytes.len() + 4);
            Framing::Len32.write(&bytes, &mut frame);
            least.process.write(&frame);
            least.awaited.push_back(responder);
        }
        Ok(())
    }

    fn start_lasting(&mut self) -> Result<(), Failure> {
        let process = Process::start(&self.args.exec, false)?;
        let splitter = Splitter::new(Framing::Len32, REPLY_BYTES as u64, 64 * 1024);
        self.lasting.push(Lasting { process, splitter, awaited: VecDeque::new() });
        Ok(())
    }

    fn fail(&mut self, responder: Option<Responder>, code: u32, says: &[u8]) {
        if let Some(responder) = responder {
            self.counts.failed += 1;
            // Who has gone is not told.
            let _ = responder.fail(code, says);
        }
    }

    fn step_once(&mut self) -> Result<(), Failure> {
        let mut at = 0;
        while at < self.once.len() {
            let has_ended = self.once[at].process.step(REPLY_BYTES)?;
            let too_much = self.once[at].process.output.len() > REPLY_BYTES;
            if !has_ended && !too_much {
                at += 1;
                continue;
            }
            let Once { mut process, responder } = self.once.swap_remove(at);
            let output = std::mem::take(&mut process.output);
            let (status, errors) = process.end();
            if too_much {
                let says = format!("the reply of `{}` has more than {REPLY_BYTES} bytes", self.args.exec);
                self.fail(responder, OWN_CODE, says.as_bytes());
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
            // The call was abandoned: the client says that it takes no more.
            Err(pelton::Error::TooLarge { .. }) => self.counts.failed += 1,
            // Who has gone is not told.
            Err(_) => self.counts.cancelled += 1,
        }
    }

    fn step_lasting(&mut self) -> Result<(), Failure> {
        let mut at = 0;
        while at < self.lasting.len() {
            let has_ended = self.lasting[at].process.step(REPLY_BYTES)?;
            let wrong = self.take_replies(at);
            let says = match (has_ended, wrong) {
                (true, _) => "the process ended before it answered".to_owned(),
                (false, Some(wrong)) => format!("the process was ended: {wrong}"),
                (false, None) => {
                    if self.is_drained && self.lasting[at].awaited.is_empty() {
                        self.lasting[at].process.close_input();
                    }
                    at += 1;
                    continue;
                }
            };
            let Lasting { process, awaited, .. } = self.lasting.swap_remove(at);
            let status = process.end().0;
            let code = if has_ended && !status.success() { code_of(status) } else { OWN_CODE };
            if !(self.is_drained && awaited.is_empty()) {
                let lost = awaited.len();
                say(format!("`{}`: {says}, {lost} calls failed ({status})", self.args.exec));
            }
            for responder in awaited {
                self.fail(responder, code, says.as_bytes());
            }
        }
        Ok(())
    }

    /// Hands on the replies that a co-process has written; answers what is wrong with them.
    fn take_replies(&mut self, at: usize) -> Option<String> {
        let mut came = std::mem::take(&mut self.lasting[at].process.output);
        let mut rest = &came[..];
        loop {
            loop {
                let Lasting { splitter, awaited, .. } = &mut self.lasting[at];
                let reply = match splitter.next() {
                    Ok(Some(reply)) => reply,
                    Ok(None) => break,
                    Err(FrameError::TooLarge { bytes, bytes_max, .. }) => {
                        return Some(format!("it says that a reply has {bytes} bytes, wanted at most {bytes_max}"));
                    }
                    Err(error) => return Some(error.to_string()),
                };
                let Some(responder) = awaited.pop_front() else {
                    return Some("it has written a reply to nothing".to_owned());
                };
                // A copy, since the counters are beside it.
                let reply = reply.to_vec();
                self.reply(responder, &reply);
            }
            if rest.is_empty() {
                came.clear();
                return None;
            }
            let space = self.lasting[at].splitter.space();
            let bytes = space.len().min(rest.len());
            space[..bytes].copy_from_slice(&rest[..bytes]);
            rest = &rest[bytes..];
            self.lasting[at].splitter.filled(bytes);
        }
    }
}

/// As shells say it.
fn code_of(status: ExitStatus) -> u32 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code as u32,
        (None, Some(signal)) => 128 + signal as u32,
        (None, None) => OWN_CODE,
    }
}
