//! `pelton tail`: prints the messages of a channel as they pass, without being its receiver.
//!
//! A tap of each lane copies what passes (`pelton::observe::Tap`, which says when a copy is whole). Between two rounds
//! the command sleeps so long that all it does uses a given part of a processor: on a fast stream it misses messages
//! instead of slowing the sides down. With `--lossless` it subscribes to a broadcast, and misses nothing.

use crate::{
    commands::stat::no_channel,
    failure::{Failure, print_stderr, printable},
    observed::{counted, named},
    output::{Output, WRITE_BYTES, json},
    signals::Signals,
};
use clap::{Args, ValueEnum};
use pelton::observe::{FileIds, Observer, Tap, Tapped};
use pelton::{Error, Options, Policy, StartFrom, Subscriber, Traceparent, options::maker};
use rustix::event::PollFlags;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use std::{
    fmt::Write as _,
    io::ErrorKind,
    os::fd::AsFd as _,
    time::{Duration, Instant, SystemTime},
};

/// The interval between two attempts to find a channel.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// The limit of a subscriber's handshake, which a signal does not interrupt.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(1);
/// The shortest sleep between two rounds.
const SLEEP_MIN: Duration = Duration::from_millis(1);
/// The longest one, so that the command notices new lanes and signals.
const SLEEP_MAX: Duration = Duration::from_millis(500);
/// How often the command searches for lanes that are new, at most. A search reads /proc, so it may also take only this
/// part of the processor time that the command may use, in percent.
const SEARCH_INTERVAL: Duration = Duration::from_secs(1);
const SEARCH_SHARE: u32 = 25;
/// While nothing passes: then a successor may be what the next message comes from.
const SEARCH_SHARE_QUIET: u32 = 75;
/// What is formatted of one message, in bytes, and the largest message in which a path is searched: JSON takes much
/// more memory as values. `--json` prints all.
const FORMATTED_BYTES_MAX: usize = 1 << 20;
/// Bytes of a row of `--format hex`.
const ROW: usize = 16;

/// Options of `pelton tail`.
#[derive(Args)]
pub struct TailArgs {
    /// The channel: a short name, unix:PATH, path:DIR, or a DIR with a slash
    name: String,
    /// How each message is printed; control characters are escaped
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// Print only messages that contain TEXT; or, with re:REGEX, in which it matches; or, with jq:PATH, JSON messages
    /// that have a value there other than null and false; or, with jq:PATH==VALUE, that value
    ///
    /// REGEX is that of Rust's crate regex, without look-around and back-references: re:^(GET|PUT) /users/\d+. PATH is
    /// as in jq: .user.name or .items[0].id. VALUE is JSON, or else a text: jq:.level==error. Messages above 1 MiB do
    /// not match a path. With several filters, all must match.
    #[arg(long = "filter", value_name = "TEXT|re:REGEX|jq:PATH", value_parser = filter)]
    filters: Vec<Filter>,
    /// End after this number of printed messages
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Begin with the oldest message that the receiver has not released, instead of the next one sent
    #[arg(long)]
    since_start: bool,
    /// Subscribe to a broadcast (`pelton pub`): miss nothing, and have its publisher wait for this command
    ///
    /// Other channels have one receiver, and refuse this.
    #[arg(long, conflicts_with = "load")]
    lossless: bool,
    /// Use at most about this part of one processor, in percent; more shows more messages of a fast stream
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(1..=100), default_value_t = 1)]
    load: u32,
    /// How long to wait for a channel that is not there yet [default: not at all]
    #[arg(long, value_name = "SECONDS", value_parser = crate::seconds)]
    timeout: Option<Duration>,
    /// Print one JSON object for each message, and for each number of missed messages
    #[arg(long, conflicts_with = "format")]
    json: bool,
}

/// How a message is printed.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// One line
    Text,
    /// Rows of bytes, in hexadecimal and as characters
    Hex,
    /// JSON on several lines; other messages as text
    Pretty,
}

#[derive(Clone, Debug)]
enum Filter {
    Contains(Vec<u8>),
    Matches(regex::bytes::Regex),
    Path { steps: Vec<Step>, value: Option<serde_json::Value> },
}

/// A step of a path into a JSON value.
#[derive(Clone, Debug, PartialEq)]
enum Step {
    Key(String),
    Index(usize),
}

fn filter(text: &str) -> Result<Filter, String> {
    if let Some(regex) = text.strip_prefix("re:") {
        return regex::bytes::Regex::new(regex).map(Filter::Matches).map_err(|error| error.to_string());
    }
    let Some(text) = text.strip_prefix("jq:") else { return Ok(Filter::Contains(text.as_bytes().to_vec())) };
    let wanted = || format!("found `{text}`, want a path such as .user.name or .items[0].id, perhaps with ==VALUE");
    let (path, value) = match text.split_once("==") {
        Some((path, value)) => (path.trim(), Some(value.trim())),
        None => (text.trim(), None),
    };
    let value = value.map(|value| serde_json::from_str(value).unwrap_or_else(|_| value.into()));
    let mut steps = Vec::new();
    let mut rest = path;
    while !rest.is_empty() && rest != "." {
        if let Some(after) = rest.strip_prefix('[').or_else(|| rest.strip_prefix(".[")) {
            let (index, after) = after.split_once(']').ok_or_else(wanted)?;
            steps.push(Step::Index(index.parse().map_err(|_| wanted())?));
            rest = after;
        } else {
            let after = rest.strip_prefix('.').ok_or_else(wanted)?;
            let end = after.find(['.', '[']).unwrap_or(after.len());
            if end == 0 {
                return Err(wanted());
            }
            steps.push(Step::Key(after[..end].to_owned()));
            rest = &after[end..];
        }
    }
    if !path.starts_with('.') {
        return Err(wanted());
    }
    Ok(Filter::Path { steps, value })
}

impl Filter {
    fn matches(&self, payload: &[u8]) -> bool {
        match self {
            Filter::Matches(regex) => regex.is_match(payload),
            Filter::Contains(text) => memchr::memmem::find(payload, text).is_some(),
            Filter::Path { steps, value } => {
                if payload.len() > FORMATTED_BYTES_MAX {
                    return false;
                }
                let Ok(found) = serde_json::from_slice::<serde_json::Value>(payload) else { return false };
                let found = steps.iter().try_fold(&found, |found, step| match step {
                    Step::Key(key) => found.get(key),
                    Step::Index(index) => found.get(index),
                });
                match value {
                    Some(value) => found.unwrap_or(&serde_json::Value::Null) == value,
                    None => found.is_some_and(|found| !found.is_null() && found != &serde_json::Value::Bool(false)),
                }
            }
        }
    }
}

/// The object of a message with `--json`.
#[derive(Serialize)]
struct Object<'a> {
    /// When it was read.
    time_ns: u64,
    lane: &'a str,
    seq: u32,
    is_proven: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    span_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hex: Option<String>,
}

/// The object of missed messages.
#[derive(Serialize)]
struct MissedObject<'a> {
    time_ns: u64,
    lane: &'a str,
    missed: u64,
}

/// A lane, and what was reported of it.
struct LaneTap {
    label: String,
    tap: Tap,
    files: FileIds,
    /// Missed messages that are reported.
    reported: u64,
    /// Whether the last round found something.
    has_news: bool,
    /// Why it cannot be read. That ends the command, unless the next search finds other files for the lane, or none.
    fault: Option<String>,
}

struct TailLoop<'a> {
    args: &'a TailArgs,
    signals: Signals,
    output: Output,
    observer: Observer,
    taps: Vec<LaneTap>,
    /// Missed messages of lanes that are gone.
    missed: u64,
    shown: u64,
    unproven: u64,
}

/// A message to print.
#[derive(Clone, Copy)]
struct Shown<'a> {
    lane: &'a str,
    seq: u32,
    payload: &'a [u8],
    traceparent: Option<Traceparent>,
    is_proven: bool,
}

/// Runs `pelton tail`.
pub fn run(args: &TailArgs) -> Result<(), Failure> {
    if args.lossless {
        return subscribe(args);
    }
    let signals = Signals::install()?;
    let output = Output::new()?;
    let (observer, taps) = (Observer::new(), Vec::new());
    let mut tail_loop = TailLoop { args, signals, output, observer, taps, missed: 0, shown: 0, unproven: 0 };
    tail_loop.find()?;
    let done = tail_loop.all();
    let written = match done {
        Err(Failure::OutputClosed) => Ok(()),
        _ => tail_loop.output.write(&tail_loop.signals),
    };
    let missed = tail_loop.missed + tail_loop.taps.iter().map(|one| one.tap.missed()).sum::<u64>();
    let TailLoop { shown, unproven, .. } = tail_loop;
    if !matches!(done, Err(Failure::OutputClosed)) {
        let printed = counted(shown, "message");
        print_stderr(format!("{printed} printed, {unproven} of them not proven (?), {missed} missed"));
    }
    done.and(match written {
        // The signal that ended the command.
        Err(Failure::Signal(_)) => Ok(()),
        written => written,
    })
}

impl TailLoop<'_> {
    /// Waits for the channel.
    fn find(&mut self) -> Result<(), Failure> {
        let deadline = self.args.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        while !self.search(self.args.since_start)? {
            let name = &self.args.name;
            match (self.args.timeout, deadline) {
                (None, _) => return Err(no_channel(name)),
                (Some(timeout), Some(deadline)) if deadline <= Instant::now() => {
                    return Err(Failure::TimedOut(format!(
                        "no channel {name} with a sender and a receiver appeared within {} s: `pelton ls` lists those \
                         there are",
                        timeout.as_secs_f64()
                    )));
                }
                _ => self.signals.poll([], Some(RETRY_INTERVAL))?,
            };
        }
        Ok(())
    }

    fn all(&mut self) -> Result<(), Failure> {
        let mut search_due = Instant::now() + SEARCH_INTERVAL;
        let mut is_quiet = true;
        // The processor time that sleeps account for: all of it, also that of searches and of the sleeps themselves.
        let mut accounted = processor_time();
        let mut owed = Duration::ZERO;
        loop {
            let mut has_more = false;
            for index in 0..self.taps.len() {
                has_more |= self.round(index)?;
                is_quiet &= !self.taps[index].has_news;
            }
            self.output.write(&self.signals)?;
            if self.args.count.is_some_and(|count| self.shown >= count) {
                return Ok(());
            }
            let used = processor_time();
            owed += (used - accounted) * (100 - self.args.load) / self.args.load;
            accounted = used;
            if self.args.load < 100 || !has_more {
                let before = Instant::now();
                self.signals.poll([], Some(owed.clamp(SLEEP_MIN, SLEEP_MAX)))?;
                // No more than the next sleep can pay: what was busy does not delay what comes long after it.
                owed = owed.saturating_sub(before.elapsed()).min(SLEEP_MAX);
            }
            self.signals.check()?;
            if search_due <= Instant::now() || self.taps.iter().any(|one| one.fault.is_some()) {
                let before = processor_time();
                if !self.search(true)? && !has_more {
                    return Ok(());
                }
                let share = self.args.load * if is_quiet { SEARCH_SHARE_QUIET } else { SEARCH_SHARE };
                let interval = processor_time().saturating_sub(before) * 10_000 / share;
                search_due = Instant::now() + SEARCH_INTERVAL.max(interval);
                is_quiet = true;
            }
        }
    }

    /// Adds a tap for each new lane, replaces that of a lane whose files a successor has replaced, and drops those of
    /// lanes that are gone. Returns whether the channel exists. A lane that is new since the last search is read from
    /// its oldest message.
    fn search(&mut self, since_start: bool) -> Result<bool, Failure> {
        let channels = named(&mut self.observer, &self.args.name);
        let mut exists = false;
        let mut problem = None;
        let mut is_found = vec![false; self.taps.len()];
        for channel in &channels {
            for lane in &channel.lanes {
                let Ok(files) = lane.file_ids() else { continue };
                let known = self.taps.iter().position(|one| one.files.is_same_lane(&files));
                if let Some(index) = known {
                    exists = true;
                    is_found[index] = true;
                    let one = &mut self.taps[index];
                    if one.files == files {
                        if let Some(fault) = one.fault.take() {
                            return Err(Failure::System(fault));
                        }
                        continue;
                    }
                }
                let tap = match lane.tap(since_start) {
                    Ok(tap) => tap,
                    Err(error) => {
                        problem = Some(format!("lane {} of {}: {error}", lane.number, channel.name));
                        continue;
                    }
                };
                exists = true;
                if let Some(index) = known {
                    let one = &mut self.taps[index];
                    let before = std::mem::replace(&mut one.tap, tap);
                    one.tap.continue_from(&before);
                    (one.files, one.fault) = (files, None);
                    continue;
                }
                let label = match channels.len() {
                    1 => lane.number.to_string(),
                    _ => format!("{}:{}", channel.kind.word(), lane.number),
                };
                self.taps.push(LaneTap { label, tap, files, reported: 0, has_news: true, fault: None });
                is_found.push(true);
            }
        }
        let missed = &mut self.missed;
        let mut is_found = is_found.into_iter();
        self.taps.retain(|one| {
            let is_kept = is_found.next() == Some(true) || (one.has_news && one.fault.is_none());
            *missed += if is_kept { 0 } else { one.tap.missed() };
            is_kept
        });
        match problem {
            Some(problem) if !exists && !channels.is_empty() => Err(Failure::Refused(problem)),
            _ => Ok(exists),
        }
    }

    /// Prints what has passed in a lane since the last round. Returns whether there is more.
    fn round(&mut self, index: usize) -> Result<bool, Failure> {
        let TailLoop { args, taps, output, shown, unproven, .. } = self;
        let LaneTap { label, tap, reported, has_news, fault, .. } = &mut taps[index];
        if fault.is_some() {
            return Ok(false);
        }
        *has_news = false;
        let now = wall_clock();
        let polled = tap.poll(|tapped| {
            *has_news = true;
            let Tapped { seq, payload, traceparent, is_proven, .. } = tapped;
            if args.count == Some(*shown) || !args.is_wanted(payload) {
                return Ok(());
            }
            *shown += 1;
            *unproven += u64::from(!is_proven);
            write_message(args, now, Shown { lane: label, seq, payload, traceparent, is_proven }, &mut output.buffer);
            Ok(())
        });
        let more = polled.unwrap_or_else(|error| {
            *fault = Some(match error.kind() {
                ErrorKind::InvalidData => format!("lane {label} of `{}` is corrupt: {error}", args.name),
                _ => format!("reading lane {label} of `{}`: {error}", args.name),
            });
            false
        });
        *has_news |= more;
        let missed = tap.missed() - *reported;
        if missed > 0 {
            *reported += missed;
            let line = match args.json {
                true => json(&MissedObject { time_ns: now.as_nanos() as u64, lane: label, missed }),
                false => format!("{} {label} ... {missed} missed\n", clock_text(now)),
            };
            output.buffer.extend_from_slice(line.as_bytes());
        }
        Ok(more)
    }
}

impl TailArgs {
    fn is_wanted(&self, payload: &[u8]) -> bool {
        self.filters.iter().all(|filter| filter.matches(payload))
    }
}

/// Runs `pelton tail --lossless`.
fn subscribe(args: &TailArgs) -> Result<(), Failure> {
    let signals = Signals::install()?;
    let mut output = Output::new()?;
    let mut subscriber = subscriber(args, &signals)?;
    let mut shown = 0;
    let done = print_received(args, &signals, &mut output, &mut subscriber, &mut shown);
    let written = match done {
        Err(Failure::OutputClosed) => return done,
        _ => output.write(&signals),
    };
    let missed = subscriber.missed();
    print_stderr(format!("{} printed, {missed} missed", counted(shown, "message")));
    done.and(written)
}

/// Waits for the publisher.
fn subscriber(args: &TailArgs, signals: &Signals) -> Result<Subscriber, Failure> {
    let from = if args.since_start { StartFrom::Oldest } else { StartFrom::Now };
    let options: Options = Options::new().policy(Policy::Gate).start_from(from);
    let options = options.cast::<maker::Subscribe>().handshake(HANDSHAKE_TIMEOUT);
    let deadline = args.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        match options.clone().connect_subscriber(&args.name) {
            Err(Error::NoListener { .. } | Error::HungUp | Error::TimedOut(_))
                if deadline.is_some_and(|deadline| Instant::now() < deadline) => {}
            done => return Ok(done?),
        }
        signals.poll([], Some(RETRY_INTERVAL))?;
    }
}

/// Prints until the publisher has closed, or `--count` is reached.
fn print_received(
    args: &TailArgs,
    signals: &Signals,
    output: &mut Output,
    subscriber: &mut Subscriber,
    shown: &mut u64,
) -> Result<(), Failure> {
    loop {
        while output.buffer.len() < WRITE_BYTES {
            let message = match subscriber.try_receive() {
                Ok(Some(message)) => message,
                Ok(None) => break,
                Err(Error::Closed { .. }) => return Ok(()),
                Err(Error::PeerDied { .. }) => {
                    return Err(Failure::Peer(format!("the publisher on `{}` died, without closing", args.name)));
                }
                Err(error) => return Err(error.into()),
            };
            if !args.is_wanted(&message) {
                continue;
            }
            let seq = message.number() as u32;
            let message = Shown { lane: "0", seq, payload: &message, traceparent: None, is_proven: true };
            write_message(args, wall_clock(), message, &mut output.buffer);
            *shown += 1;
            if args.count == Some(*shown) {
                return Ok(());
            }
        }
        if output.buffer.is_empty() {
            // No events of the output: the poll reports an error or a hang-up of its reader.
            if subscriber.arm()?.is_waiting() {
                let channel = (subscriber.as_fd(), PollFlags::IN);
                let polled = signals.poll([channel, (output.as_fd(), PollFlags::empty())], None);
                subscriber.disarm();
                if polled?[1] {
                    return Err(Failure::OutputClosed);
                }
            }
        }
        output.write(signals)?;
        signals.check()?;
    }
}

/// The time since 1970.
fn wall_clock() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// The processor time that this thread has used.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The time of day in UTC, with microseconds.
fn clock_text(since: Duration) -> String {
    let seconds = since.as_secs() % 86_400;
    format!("{:02}:{:02}:{:02}.{:06}", seconds / 3600, seconds / 60 % 60, seconds % 60, since.subsec_micros())
}

fn write_message(args: &TailArgs, now: Duration, message: Shown<'_>, out: &mut Vec<u8>) {
    let Shown { lane, seq, payload, traceparent, is_proven } = message;
    if args.json {
        let text = std::str::from_utf8(payload).ok();
        let hex_of = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let hex = text.is_none().then(|| hex_of(payload));
        let trace_id = traceparent.map(|traceparent| hex_of(&traceparent.trace_id()));
        let span_id = traceparent.map(|traceparent| hex_of(&traceparent.span_id()));
        let object = Object { time_ns: now.as_nanos() as u64, lane, seq, is_proven, trace_id, span_id, text, hex };
        out.extend_from_slice(json(&object).as_bytes());
        return;
    }
    let mark = if is_proven { "" } else { "?" };
    let all = payload.len();
    let payload = &payload[..all.min(FORMATTED_BYTES_MAX)];
    let mut text = format!("{} {lane}:{seq}{mark} ", clock_text(now));
    match args.format {
        Format::Text => text.push_str(&escaped(payload)),
        Format::Hex => {
            let _ = write!(text, "{all} bytes");
            for (row, bytes) in payload.chunks(ROW).enumerate() {
                let hex: String = bytes.iter().map(|byte| format!("{byte:02x} ")).collect();
                let characters: String =
                    bytes.iter().map(|byte| if (b' '..=b'~').contains(byte) { *byte as char } else { '.' }).collect();
                let _ = write!(text, "\n    {:08x}  {hex:<48} {characters}", row * ROW);
            }
        }
        Format::Pretty => match serde_json::from_slice::<serde_json::Value>(payload) {
            Ok(value) => text.push_str(&printable(&pretty(&value))),
            Err(_) => text.push_str(&escaped(payload)),
        },
    }
    if payload.len() < all {
        let _ = write!(text, " ... {all} bytes");
    }
    text.push('\n');
    out.extend_from_slice(text.as_bytes());
}

/// JSON on several lines. Of nested values, which their indentation makes much longer, only the begin.
fn pretty(value: &serde_json::Value) -> String {
    let mut bytes = vec![0; 4 * FORMATTED_BYTES_MAX];
    let mut rest = &mut bytes[..];
    let is_whole = serde_json::to_writer_pretty(&mut rest, value).is_ok();
    let unused = rest.len();
    bytes.truncate(bytes.len() - unused);
    let mut text = String::from_utf8_lossy(&bytes).into_owned();
    if !is_whole {
        text.push_str(" ...");
    }
    text
}

/// A message as one line: control characters, and bytes that are no UTF-8, become escapes.
fn escaped(payload: &[u8]) -> String {
    let mut text = String::with_capacity(payload.len());
    for chunk in payload.utf8_chunks() {
        for line in chunk.valid().split_inclusive('\n') {
            let (line, newline) = line.strip_suffix('\n').map_or((line, ""), |line| (line, "\\n"));
            // `printable` removes white space at the end.
            let end = line.trim_end().len();
            text.push_str(&printable(line));
            line[end..].chars().for_each(|space| match space {
                ' ' | '\t' => text.push(space),
                other => _ = write!(text, "{}", other.escape_default()),
            });
            text.push_str(newline);
        }
        for byte in chunk.invalid() {
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line_without_control_characters() {
        for (payload, text) in [
            (&b"plain"[..], "plain"),
            (b"\x1b]0;title\x07", "\\u{1b}]0;title\\u{7}"),
            (b"two\nlines\n", "two\\nlines\\n"),
            (b"\xff\xc3\xa4\xc3", "\\xff\u{e4}\\xc3"),
            (b"space  \r\n", "space  \\r\\n"),
            (b"a\xe2\x80\xaetxt", "a\\u{202e}txt"),
        ] {
            assert_eq!(escaped(payload), text);
        }
    }

    #[test]
    fn long_json_is_cut() {
        let value = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        assert_eq!(pretty(&value(r#"{"a":[1]}"#)), "{\n  \"a\": [\n    1\n  ]\n}");
        let nested = format!("{}{}1{}", "[".repeat(100), "1,".repeat(100_000), "]".repeat(100));
        let text = pretty(&value(&nested));
        assert!(text.len() <= 4 * FORMATTED_BYTES_MAX + 4 && text.ends_with(" ..."), "{} bytes", text.len());
        let long = format!("\"{}\"", "x".repeat(FORMATTED_BYTES_MAX));
        assert!(!filter("jq:.").unwrap().matches(long.as_bytes()));
    }

    #[test]
    fn a_filter_is_a_text_or_a_path_into_json() {
        let matches = |text: &str, payload: &[u8]| filter(text).unwrap().matches(payload);
        let message = br#"{"user":{"name":"ada"},"items":[{"id":7}],"on":false,"none":null}"#;
        for (text, matching) in [
            ("ada", true),
            ("grace", false),
            ("jq:.user", true),
            ("jq:.user.name==ada", true),
            ("jq:.user.name == \"ada\"", true),
            ("jq:.user.name==grace", false),
            ("jq:.items[0].id==7", true),
            ("jq:.items[1].id", false),
            ("jq:.on", false),
            ("jq:.on==false", true),
            ("jq:.none", false),
            ("jq:.missing==null", true),
            ("jq:.missing", false),
            ("jq:.", true),
            ("re:\"id\":[0-9]+\\}", true),
            ("re:^ada", false),
            ("re:(?i)ADA", true),
        ] {
            assert_eq!(matches(text, message), matching, "{text}");
        }
        assert!(!matches("jq:.", b"not JSON"));
        assert!(matches(r"re:(?-u)^\xff.$", b"\xff\xfe") && !matches("re:.", b"\xff"), "bytes that are no text");
        assert!(filter("re:(").unwrap_err().contains("unclosed group"));
        for bad in ["jq:", "jq:user", "jq:.a..b", "jq:.[x]", "jq:.a[", "jq:==1"] {
            assert!(filter(bad).is_err(), "{bad}");
        }
    }
}
