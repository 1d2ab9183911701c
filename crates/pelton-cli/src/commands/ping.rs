//! `pelton ping`: calls a service again and again, one call at a time, and measures each round trip.
//!
//! A call waits in the library, in slices, and the signals are checked between them. A service that leaves is reported,
//! and the next call connects again.

use crate::{
    channel::connect_client,
    failure::{Failure, printable},
    output::{json, print},
    report::Ended,
    signals::{SLICE, Signals},
};
use clap::Args;
use hdrhistogram::Histogram;
use pelton::{Client, Outcome};
use serde::Serialize;
use std::{
    fmt::Write as _,
    time::{Duration, Instant},
};

/// Options of `pelton ping`.
#[derive(Args)]
pub struct PingArgs {
    /// The service: a short name, or unix:PATH for a socket at PATH; `pelton serve NAME --echo` is one for this purpose
    name: String,
    /// End after this number of calls
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Time from one call to the next; a call begins only after the reply to the one before
    #[arg(short, long, value_name = "SECONDS", value_parser = crate::seconds, default_value = "1")]
    interval: Duration,
    /// Make each call immediately after the reply to the one before, and print only the summary
    #[arg(short, long, conflicts_with = "interval")]
    flood: bool,
    /// Bytes of each request, with K, M or G: its number in 8 bytes, little-endian, and zeros
    ///
    /// The service handles each request like any other call. If it does not know such requests, use --data.
    #[arg(short, long, value_name = "BYTES", value_parser = crate::bytes, default_value = "64")]
    bytes: u64,
    /// The request, the same in each call
    #[arg(short, long, value_name = "TEXT", conflicts_with = "bytes")]
    data: Option<String>,
    /// How long each call waits for its reply, and the first one for the service
    #[arg(short, long, value_name = "SECONDS", value_parser = crate::seconds, default_value = "10")]
    timeout: Duration,
    /// Another user whose processes may be the service; repeatable. Both sides need the option.
    #[arg(long = "uid", value_name = "UID")]
    uids: Vec<u32>,
    /// Print only one JSON object, at the end
    #[arg(long)]
    json: bool,
}

/// The object of `--json`. Times are in nanoseconds.
#[derive(Serialize)]
struct Report<'a> {
    command: &'static str,
    name: &'a str,
    #[serde(flatten)]
    counts: &'a Counts,
    seconds: f64,
    round_trip_ns: Option<RoundTrips>,
    ended: Ended,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

#[derive(Default, Serialize)]
struct Counts {
    calls: u64,
    /// Calls with a reply, or with a failure that the service returned: both are round trips.
    replies: u64,
    /// Those that the service failed.
    failed: u64,
    /// Calls without a reply in time.
    timed_out: u64,
    /// Calls whose service left, or dropped them.
    lost: u64,
}

#[derive(Serialize)]
struct RoundTrips {
    min: u64,
    mean: f64,
    p50: u64,
    p90: u64,
    p99: u64,
    p999: u64,
    max: u64,
}

/// The result of one call.
enum Answer {
    Reply { bytes: u64, time: Duration },
    Failed { code: u32, text: String, time: Duration },
    TimedOut,
    Lost(String),
}

struct Pings<'a> {
    args: &'a PingArgs,
    signals: Signals,
    client: Option<Client>,
    request: Vec<u8>,
    counts: Counts,
    /// In nanoseconds.
    times: Histogram<u64>,
    began: Instant,
}

/// Runs `pelton ping`.
pub fn run(args: &PingArgs) -> Result<(), Failure> {
    let signals = Signals::install()?;
    let client = connect_client(&args.name, &args.uids, Some(args.timeout), &signals)?;
    let request = match &args.data {
        Some(text) => text.clone().into_bytes(),
        None if args.bytes > client.request_bytes_max() => {
            let most = client.request_bytes_max();
            return Err(Failure::Input(format!(
                "--bytes {}: this service takes requests up to {most} bytes",
                args.bytes
            )));
        }
        None => vec![0; args.bytes as usize],
    };
    let mut pings = Pings {
        args,
        signals,
        client: Some(client),
        request,
        counts: Counts::default(),
        times: Histogram::new(3).expect("3 digits are valid"),
        began: Instant::now(),
    };
    let done = pings.all();
    pings.finish(done)
}

fn lost(error: pelton::Error) -> Answer {
    Answer::Lost(Failure::from(error).text().unwrap_or_default())
}

impl Pings<'_> {
    fn all(&mut self) -> Result<(), Failure> {
        let mut next = Instant::now();
        loop {
            let answer = self.call()?;
            self.count(&answer);
            if !self.args.flood && !self.args.json {
                print(self.line(&answer))?;
            }
            if self.args.count == Some(self.counts.calls) {
                return Ok(());
            }
            if self.args.flood {
                continue;
            }
            next += self.args.interval;
            loop {
                let left = next.saturating_duration_since(Instant::now()).min(Duration::from_secs(3600));
                if left.is_zero() {
                    break;
                }
                self.signals.poll([], Some(left))?;
            }
            // After a reply that took longer than the interval, the next calls keep the interval among each other.
            next = next.max(Instant::now() - self.args.interval);
        }
    }

    /// Makes one call, and waits for its reply.
    fn call(&mut self) -> Result<Answer, Failure> {
        self.signals.check()?;
        self.counts.calls += 1;
        if self.args.data.is_none() {
            let number = self.counts.calls.to_le_bytes();
            let most = self.request.len().min(number.len());
            self.request[..most].copy_from_slice(&number[..most]);
        }
        let mut client = match self.client.take() {
            Some(client) => client,
            None => match connect_client(&self.args.name, &self.args.uids, Some(self.args.timeout), &self.signals) {
                Ok(client) => client,
                Err(Failure::TimedOut(text)) => return Ok(Answer::Lost(text)),
                Err(failure) => return Err(failure),
            },
        };
        let answer = self.round_trip(&mut client);
        match answer {
            // The next call connects again.
            Err(error) if error.is_closed() || error.is_peer_died() => Ok(lost(error)),
            Err(error @ pelton::Error::NoListener { .. }) => Ok(lost(error)),
            answer => {
                self.client = Some(client);
                // A signal may have ended the wait.
                self.signals.check()?;
                Ok(answer?)
            }
        }
    }

    fn round_trip(&self, client: &mut Client) -> pelton::Result<Answer> {
        let began = Instant::now();
        let deadline = began + self.args.timeout;
        let Some(call) = client.submit_until(&self.request, deadline)? else { return Ok(Answer::TimedOut) };
        let mut bytes = 0;
        loop {
            let until = deadline.min(Instant::now() + SLICE);
            let Some(done) = client.completion_until(until)? else {
                if deadline <= Instant::now() || self.signals.check().is_err() {
                    client.cancel(call)?;
                    return Ok(Answer::TimedOut);
                }
                continue;
            };
            let time = began.elapsed();
            // Parts of a cancelled call may still arrive.
            if done.call_id() != call {
                continue;
            }
            bytes += done.len() as u64;
            return Ok(match done.outcome() {
                Outcome::Part => continue,
                Outcome::Reply | Outcome::End => Answer::Reply { bytes, time },
                Outcome::Failed(code) => {
                    Answer::Failed { code, text: String::from_utf8_lossy(&done.into_vec()).into_owned(), time }
                }
                Outcome::Lost(loss) => {
                    drop(done);
                    lost(client.loss_error(loss))
                }
                _ => Answer::Lost("the service dropped the call without a reply".to_owned()),
            });
        }
    }

    fn count(&mut self, answer: &Answer) {
        let Counts { replies, failed, timed_out, lost, .. } = &mut self.counts;
        match answer {
            Answer::Reply { .. } => *replies += 1,
            Answer::Failed { .. } => (*replies, *failed) = (*replies + 1, *failed + 1),
            Answer::TimedOut => *timed_out += 1,
            Answer::Lost(_) => *lost += 1,
        }
        if let Answer::Reply { time, .. } | Answer::Failed { time, .. } = answer {
            // `record` resizes the histogram; `saturating_record` would not.
            self.times.record(time.as_nanos() as u64).expect("a histogram that resizes takes any value");
        }
    }

    fn line(&self, answer: &Answer) -> String {
        let (name, call) = (&self.args.name, self.counts.calls);
        match answer {
            Answer::Reply { bytes, time } => {
                format!("{bytes} bytes from {name}: call={call} time={}\n", text_of(*time))
            }
            Answer::Failed { code, text, time } => {
                let text = printable(text);
                format!("failure {code} from {name}: call={call} time={} {text}\n", text_of(*time))
            }
            Answer::TimedOut => {
                format!("no reply from {name} within {} s: call={call}\n", self.args.timeout.as_secs_f64())
            }
            Answer::Lost(text) => format!("no reply from {name}: call={call} {}\n", printable(text)),
        }
    }

    fn round_trips(&self) -> Option<RoundTrips> {
        let at = |quantile| self.times.value_at_quantile(quantile);
        (!self.times.is_empty()).then(|| RoundTrips {
            min: self.times.min(),
            mean: self.times.mean(),
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: self.times.max(),
        })
    }

    /// Prints the summary, also after a signal, and returns the result of the command.
    fn finish(&self, done: Result<(), Failure>) -> Result<(), Failure> {
        let Counts { calls, replies, failed, timed_out, lost } = self.counts;
        let name = &self.args.name;
        let counts =
            format!("{calls} calls, {replies} replies ({failed} of them failures), {timed_out} timed out, {lost} lost");
        let result = match done {
            Ok(()) if replies == 0 && lost > 0 => Err(Failure::Peer(format!("no reply from `{name}`: {counts}"))),
            Ok(()) if replies == 0 => Err(Failure::TimedOut(format!("no reply from `{name}`: {counts}"))),
            Ok(()) if replies == failed => Err(Failure::Call(format!("`{name}` failed each call: {counts}"))),
            done => done,
        };
        let seconds = self.began.elapsed().as_secs_f64();
        let round_trip_ns = self.round_trips();
        if self.args.json {
            let failure = result.as_ref().err();
            let ended = failure.map_or(Ended::Counted, Ended::by);
            let error = failure.and_then(Failure::text);
            let error = error.as_deref();
            let counts = &self.counts;
            print(json(&Report { command: "ping", name, counts, seconds, round_trip_ns, ended, error }))?;
            return result;
        }
        let mut text = format!("--- {name}: {counts}, in {seconds:.1} s\n");
        if let Some(RoundTrips { min, mean, p50, p90, p99, p999, max }) = round_trip_ns {
            let of = |ns| text_of(Duration::from_nanos(ns));
            let mean = of(mean as u64);
            let _ = write!(text, "round trip: min {}, mean {mean}, median {}, 90 % {}, ", of(min), of(p50), of(p90));
            let _ = writeln!(text, "99 % {}, 99.9 % {}, max {}", of(p99), of(p999), of(max));
        }
        match print(text) {
            Err(failure) if result.is_ok() => Err(failure),
            _ => result,
        }
    }
}

/// A time with the unit that shows it best.
fn text_of(time: Duration) -> String {
    match time.as_nanos() as f64 / 1e3 {
        us if us < 1e3 => format!("{us:.1} µs"),
        us if us < 1e6 => format!("{:.2} ms", us / 1e3),
        us => format!("{:.2} s", us / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_has_the_unit_that_shows_it_best() {
        let texts = [1_234, 999_000, 1_500_000, 2_250_000_000].map(|ns| text_of(Duration::from_nanos(ns)));
        assert_eq!(texts, ["1.2 µs", "999.0 µs", "1.50 ms", "2.25 s"]);
    }
}
