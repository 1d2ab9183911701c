//! `pelton replay`: sends the messages of record files at the recorded pace, or at another.
//!
//! A chunk of a record file has one time: the messages in it arrived together. The time of the first chunk is the start
//! of the pace. Each later chunk is due as long after the start as it arrived after the first, divided by the speed. A
//! chunk that is late does not delay those after it.

use crate::{
    channel::StreamError,
    commands::{
        cat::{Damage, open},
        send::{SendLoop, SenderArgs, send_all},
    },
    failure::{Failure, print_stderr},
    progress::{self, Progress},
    report::Lateness,
};
use clap::Args;
use hdrhistogram::Histogram;
use pelton::{Error, RecordReader};
use std::{
    num::NonZeroU64,
    path::PathBuf,
    time::{Duration, Instant, SystemTime},
};

/// Options of `pelton replay`.
#[derive(Args)]
pub struct ReplayArgs {
    /// Files of `pelton record`; of a rotated file, the oldest first: LOG.0* LOG
    ///
    /// A file of `pelton flush` has the times of its writes instead of the times of arrival.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    sender: SenderArgs,
    /// Times as fast as recorded: 2 halves each pause, 0.5 doubles it
    #[arg(long, value_name = "N", value_parser = speed, default_value = "1")]
    speed: f64,
    /// Without pauses, as fast as the channel takes the messages
    #[arg(long, conflicts_with = "speed")]
    fast: bool,
    /// Begin with the first message that arrived at or after this time: seconds after the first message of the files,
    /// or with @ seconds since 1970 (`date +@%s.%N`)
    #[arg(long, value_name = "SECONDS", value_parser = moment)]
    from: Option<Moment>,
    /// End before the first message that arrived at or after this time
    #[arg(long, value_name = "SECONDS", value_parser = moment)]
    to: Option<Moment>,
    /// Leave out this number of messages at the begin, after --from
    #[arg(long, value_name = "N", default_value_t = 0)]
    skip: u64,
    /// End after this number of messages
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Send everything this number of times, one after the other; 0: until interrupted
    #[arg(long, value_name = "N", default_value_t = 1)]
    repeat: u64,
}

/// A time in a recording.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Moment {
    /// After the first message.
    After(Duration),
    /// Since 1970.
    At(Duration),
}

impl Moment {
    fn time(self, first: SystemTime) -> SystemTime {
        let time = match self {
            Moment::After(after) => first.checked_add(after),
            Moment::At(since) => SystemTime::UNIX_EPOCH.checked_add(since),
        };
        time.unwrap_or(first + Duration::from_secs(u64::from(u32::MAX)))
    }
}

fn moment(text: &str) -> Result<Moment, String> {
    match text.strip_prefix('@') {
        Some(since) => decimal_seconds(since).map(Moment::At),
        None => decimal_seconds(text).map(Moment::After),
    }
}

/// Seconds to the nanosecond. A floating-point number of seconds since 1970 would be exact to a quarter of a
/// microsecond.
fn decimal_seconds(text: &str) -> Result<Duration, String> {
    let wanted = || format!("found `{text}`, want seconds, such as 10, 0.5 or @1700000000.123456789");
    let (seconds, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(seconds) || !is_number(fraction) || fraction.len() > 9 {
        return Err(wanted());
    }
    let ns = format!("{fraction:0<9}").parse().map_err(|_| wanted())?;
    Ok(Duration::new(seconds.parse().map_err(|_| wanted())?, ns))
}

fn speed(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(speed) if (1e-6..=1e6).contains(&speed) => Ok(speed),
        _ => Err("want a number from 0.000001 to 1000000, such as 2 or 0.5".to_owned()),
    }
}

/// Runs `pelton replay`.
pub fn run(args: &ReplayArgs) -> Result<(), Failure> {
    // First: no receiver gets a connection from a command that has nothing to send.
    let first = match open(&args.files[0])?.next_chunk() {
        Ok(chunk) => chunk.map(|chunk| chunk.written_at()),
        Err(Error::Damaged { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    let first = first.unwrap_or(SystemTime::UNIX_EPOCH);
    let from = args.from.map(|from| from.time(first));
    let to = args.to.map(|to| to.time(first));
    // The default lets the kernel wake this thread up to 50 µs late. A failure only costs accuracy.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
    let mut damage = Damage::default();
    let mut lateness = Histogram::<u64>::new(3).expect("3 digits are valid");
    let sent = send_all("replay", &args.sender, |send_loop| {
        let done = send_files(args, from, to, send_loop, &mut damage, &mut lateness);
        send_loop.lateness_ns = summary(&lateness);
        done
    });
    if let Some(Lateness { p50, p99, max }) = summary(&lateness) {
        let us = |ns| ns as f64 / 1e3;
        let (median, most, worst) = (us(p50), us(p99), us(max));
        print_stderr(format!("later than recorded: median {median:.1} µs, 99 % {most:.1} µs, most {worst:.1} µs"));
    }
    sent.and(damage.result())
}

/// `None` if no message was due at a time.
fn summary(lateness: &Histogram<u64>) -> Option<Lateness> {
    let at = |quantile| lateness.value_at_quantile(quantile);
    (!lateness.is_empty()).then(|| Lateness { p50: at(0.5), p99: at(0.99), max: at(1.0) })
}

/// Makes all passes through the files.
fn send_files(
    args: &ReplayArgs,
    from: Option<SystemTime>,
    to: Option<SystemTime>,
    send_loop: &mut SendLoop<'_>,
    damage: &mut Damage,
    lateness: &mut Histogram<u64>,
) -> Result<(), StreamError> {
    let mut progress = Progress::after(progress::DELAY);
    let mut round = 0;
    while args.repeat == 0 || round < args.repeat {
        round += 1;
        *damage = Damage::default();
        let mut pass = Pass { args, to, send_loop, lateness, start: None, skip: args.skip, sent: 0 };
        for path in &args.files {
            let mut reader = open(path)?;
            if !pass.send_file(&mut reader, from, damage, &mut progress)? {
                break;
            }
        }
        if pass.sent == 0 {
            break;
        }
    }
    Ok(())
}

/// One pass through the files.
struct Pass<'a, 'b> {
    args: &'a ReplayArgs,
    to: Option<SystemTime>,
    send_loop: &'a mut SendLoop<'b>,
    /// How much later than due each chunk was sent, in nanoseconds.
    lateness: &'a mut Histogram<u64>,
    /// The time of the first chunk that is sent, and when it was sent.
    start: Option<(SystemTime, Instant)>,
    /// Messages to leave out.
    skip: u64,
    sent: u64,
}

impl Pass<'_, '_> {
    /// Sends the messages of one file. Returns whether the next file follows.
    fn send_file(
        &mut self,
        reader: &mut RecordReader,
        from: Option<SystemTime>,
        damage: &mut Damage,
        progress: &mut Progress,
    ) -> Result<bool, StreamError> {
        if let Some(from) = from {
            reader.skip_before(from)?;
        }
        self.skip = reader.skip_messages(self.skip)?;
        loop {
            let chunk = match reader.next_chunk() {
                Ok(Some(chunk)) => chunk,
                Ok(None) => return Ok(true),
                Err(error @ Error::Damaged { .. }) => {
                    print_stderr(&error);
                    if damage.count(&error) {
                        continue;
                    }
                    return Ok(true);
                }
                Err(error) => return Err(error.into()),
            };
            let time = chunk.written_at();
            // The search above ends at damage.
            if from.is_some_and(|from| time < from) {
                continue;
            }
            if self.to.is_some_and(|to| time >= to) {
                return Ok(false);
            }
            for (index, record) in chunk.records().skip(self.skip as usize).enumerate() {
                if self.args.count == Some(self.sent) {
                    return Ok(false);
                }
                if index == 0 {
                    self.wait_for(time)?;
                }
                self.send_loop.send(record.payload())?;
                self.sent += 1;
            }
            self.skip = self.skip.saturating_sub(chunk.message_count().into());
            let sent = self.sent;
            progress.update(|seconds| format!("{sent} messages, {:.0}/s", sent as f64 / seconds));
        }
    }

    /// Waits until a chunk of this time is due.
    fn wait_for(&mut self, time: SystemTime) -> Result<(), StreamError> {
        if self.args.fast {
            return Ok(());
        }
        let (first, start) = *self.start.get_or_insert((time, Instant::now()));
        // A time before the first one: another program set the clock between two recorders.
        let after = time.duration_since(first).unwrap_or_default().as_secs_f64() / self.args.speed;
        let due = Duration::try_from_secs_f64(after).ok().and_then(|after| start.checked_add(after));
        let due = due.ok_or_else(|| {
            StreamError::Other(Failure::Input(format!("a message is due {after} s after the start: raise --speed")))
        })?;
        self.send_loop.wait_until(due)?;
        let late = due.elapsed().as_nanos() as u64;
        self.lateness.record(late).expect("a histogram that resizes takes any value");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_relative_or_since_1970() {
        assert_eq!(moment("1.5"), Ok(Moment::After(Duration::from_millis(1500))));
        assert_eq!(moment("@1700000000.25"), Ok(Moment::At(Duration::from_millis(1_700_000_000_250))));
        assert_eq!(moment("@1700000000.123456789"), Ok(Moment::At(Duration::new(1_700_000_000, 123_456_789))));
        for bad in ["", "@", "-1", "+1", "1.", ".5", "1e3", "12:30", "@now", "1.0123456789", "99999999999999999999"] {
            assert!(moment(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_speed_is_a_positive_number() {
        assert_eq!(speed("0.5"), Ok(0.5));
        for bad in ["", "0", "-1", "nan", "inf", "fast"] {
            assert!(speed(bad).is_err(), "{bad}");
        }
    }
}
