//! `pelton stat`: one channel in full, with its rates.

use crate::{
    failure::Failure,
    observed::{
        Where, counted, json_of, mean_delay, name_of, named, one_line, percent_of, policy_words, rate, receiver,
        short_age, short_bytes, short_delay, short_time, side,
    },
    output::{json, print},
};
use clap::Args;
use pelton::observe::{Activity, Channel, Lane, Reading, Side};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// The description in `--help`.
pub const ABOUT: &str = "\
Show one channel in full, with its rates; changes nothing

The words of the text:
  lane    what one sender writes and the receiver reads; each sender has its own
  waits   messages that are sent, and not yet released by the receiver
  waited  how often the side found nothing to do: the sender no space, the
          receiver no message
  slept   how often it slept then, after it had polled for a while
  rang    how often it woke the other side from such a sleep
  delay   mean time from the sending of a message to its release, by Little's
          law: the mean number that waits, of samples each millisecond,
          divided by the number received per second";

/// Time between two samples of what waits: two system calls for each lane.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(1);
/// A sample of many lanes takes at most this part of the time.
const SAMPLE_PART: u32 = 50;

/// Options of `pelton stat`.
#[derive(Args)]
pub struct StatArgs {
    /// The channel: a short name, unix:PATH, path:DIR, or a DIR with a slash
    name: String,
    /// Measure the rates over this many seconds
    #[arg(long, value_name = "SECONDS", value_parser = crate::seconds, default_value = "1")]
    interval: Duration,
    #[command(flatten)]
    place: Where,
    /// Print one JSON object for each channel of the name instead of text
    #[arg(long)]
    json: bool,
}

/// Runs `pelton stat`.
pub fn run(args: &StatArgs) -> Result<(), Failure> {
    let mut channels = named(&mut args.place.observer()?, &args.name);
    if channels.is_empty() {
        return Err(no_channel(&args.name));
    }
    let began = Instant::now();
    let before: Vec<Vec<Reading>> =
        channels.iter().map(|channel| channel.lanes.iter().map(|lane| lane.reading.clone()).collect()).collect();
    let (samples, waiting) = sample(&channels, began + args.interval);
    for ((channel, before), waiting) in channels.iter_mut().zip(&before).zip(&waiting) {
        for lane in &mut channel.lanes {
            lane.reading = lane.read().map_err(|error| Failure::System(format!("a lane of {}: {error}", args.name)))?;
        }
        let rates = Rates { before, seconds: began.elapsed().as_secs_f64(), samples, waiting };
        print(if args.json { json(&object(channel, &rates)) } else { text(channel, &rates) })?;
    }
    Ok(())
}

/// Waits until `end`. Returns how often it read all lanes meanwhile, and how many messages waited in each of them,
/// summed up over these samples. Nothing to close: a signal ends the process.
fn sample(channels: &[Channel], end: Instant) -> (u64, Vec<Vec<u64>>) {
    let mut waiting: Vec<Vec<u64>> = channels.iter().map(|channel| vec![0; channel.lanes.len()]).collect();
    let mut samples = 0;
    while let left = end.saturating_duration_since(Instant::now())
        && !left.is_zero()
    {
        let began = Instant::now();
        for (lane, sum) in channels.iter().flat_map(|channel| &channel.lanes).zip(waiting.iter_mut().flatten()) {
            // A lane that cannot be read fails below.
            *sum += lane.read().map_or(0, |reading| reading.waiting_messages);
        }
        samples += 1;
        std::thread::sleep(SAMPLE_INTERVAL.max(began.elapsed() * SAMPLE_PART).min(left));
    }
    (samples, waiting)
}

/// The failure if no channel has the name.
pub fn no_channel(name: &str) -> Failure {
    Failure::Refused(format!(
        "there is no channel {name}, or this user may not see it: `pelton ls` lists those there are"
    ))
}

/// The readings before the interval, its length, and the samples in it.
struct Rates<'a> {
    before: &'a [Reading],
    seconds: f64,
    samples: u64,
    /// Messages that waited in each lane: the sum of all samples.
    waiting: &'a [u64],
}

impl Rates<'_> {
    /// How much a number grew per second, in one lane. A successor's counters begin anew.
    fn of(&self, lane: &Lane, number: impl Fn(&Reading) -> u64) -> f64 {
        let before = self.before.get(lane.number as usize).map_or(0, &number);
        number(&lane.reading).saturating_sub(before) as f64 / self.seconds.max(1e-9)
    }

    /// The mean delay of the messages of a lane, in seconds, and the least one that so many samples show.
    fn delay(&self, lane: &Lane) -> Option<(f64, f64)> {
        let samples = self.samples.max(1) as f64;
        let waiting = *self.waiting.get(lane.number as usize)? as f64 / samples;
        let received = self.of(lane, |reading| reading.received.messages);
        mean_delay(waiting, received).zip(mean_delay(1.0 / samples, received))
    }
}

fn text(channel: &Channel, rates: &Rates<'_>) -> String {
    let durable = channel.durable.as_deref().map(|name| one_line(name) + " ").unwrap_or_default();
    let mut text = format!(
        "{}: {}, {}; {}; made {} ago\nreceiver: {}\n",
        name_of(channel),
        channel.kind.word(),
        channel.state().words(),
        counted(channel.lanes.len() as u64, "lane"),
        short_age(channel),
        match channel.receiver.activity {
            Activity::Absent if channel.durable.is_some() => receiver(channel),
            _ => format!("{durable}{}", in_full(&channel.receiver)),
        }
    );
    if let Some(note) = &channel.note {
        text += &format!("note: {}\n", one_line(note));
    }
    for lane in &channel.lanes {
        let Reading { capacity, message_bytes_max, waiting_messages, waiting_bytes, sent, received, .. } =
            &lane.reading;
        let per_second = |of: fn(&Reading) -> u64| rate(rates.of(lane, of));
        let full = if lane.is_full() { ", full" } else { "" };
        text += &format!("lane {}: sender: {}\n", lane.number, in_full(&lane.sender));
        text += &format!("  capacity  {} bytes, messages up to {message_bytes_max}\n", capacity);
        text += &format!(
            "  waits     {}, {}, {}% of the lane{full}\n",
            counted(*waiting_messages, "message"),
            counted(*waiting_bytes, "byte"),
            percent_of(&lane.reading)
        );
        text += &format!(
            "  sent      {}, {}; {}/s, {}B/s\n",
            counted(sent.messages, "message"),
            counted(sent.bytes, "byte"),
            per_second(|reading| reading.sent.messages),
            short_bytes(rates.of(lane, |reading| reading.sent.bytes) as u64)
        );
        text += &format!(
            "  received  {}, {}; {}/s, {}B/s\n",
            counted(received.messages, "message"),
            counted(received.bytes, "byte"),
            per_second(|reading| reading.received.messages),
            short_bytes(rates.of(lane, |reading| reading.received.bytes) as u64)
        );
        if let Reading { policy: Some(policy), lag_after, missed, is_sender_waiting, .. } = lane.reading {
            let holds = if is_sender_waiting { "; it holds the publisher up" } else { "" };
            text += &format!("  policy    {}{holds}\n", policy_words(policy, lag_after));
            text += &format!("  missed    {}\n", counted(missed, "message"));
        }
        text += &match rates.delay(lane) {
            Some((delay, least)) if delay < least => format!("  delay     below {}\n", short_delay(least)),
            Some((delay, _)) => format!("  delay     {} on average\n", short_delay(delay)),
            None => "  delay     unknown: nothing was received\n".to_owned(),
        };
        text += &format!(
            "  sender    waited {}, slept {}, rang {}; {}, {}, {} per second\n",
            counted(sent.waits, "time"),
            sent.sleeps,
            sent.wakes_sent,
            per_second(|reading| reading.sent.waits),
            per_second(|reading| reading.sent.sleeps),
            per_second(|reading| reading.sent.wakes_sent)
        );
        text += &format!(
            "  receiver  waited {}, slept {}, rang {}; {}, {}, {} per second\n",
            counted(received.waits, "time"),
            received.sleeps,
            received.wakes_sent,
            per_second(|reading| reading.received.waits),
            per_second(|reading| reading.received.sleeps),
            per_second(|reading| reading.received.wakes_sent)
        );
    }
    text
}

fn in_full(of: &Side) -> String {
    match (of.activity, of.stopped_for) {
        (Activity::Absent, _) => "none so far".to_owned(),
        (Activity::Stopped, Some(time)) => format!("{}, stopped for {}", side(of), short_time(time)),
        (Activity::Stopped, None) => format!("{}, stopped", side(of)),
        (Activity::Alive, _) => format!("{}, alive", side(of)),
        (Activity::Unknown, _) => format!("{}, which cannot be inspected", side(of)),
        _ => side(of),
    }
}

fn object(channel: &Channel, rates: &Rates<'_>) -> Value {
    let mut object = json_of(channel);
    let lane = |lane: &Lane| {
        json!({
            "sent_messages": rates.of(lane, |reading| reading.sent.messages),
            "sent_bytes": rates.of(lane, |reading| reading.sent.bytes),
            "received_messages": rates.of(lane, |reading| reading.received.messages),
            "received_bytes": rates.of(lane, |reading| reading.received.bytes),
            "sender_waits": rates.of(lane, |reading| reading.sent.waits),
            "sender_sleeps": rates.of(lane, |reading| reading.sent.sleeps),
            "sender_wakes_sent": rates.of(lane, |reading| reading.sent.wakes_sent),
            "receiver_waits": rates.of(lane, |reading| reading.received.waits),
            "receiver_sleeps": rates.of(lane, |reading| reading.received.sleeps),
            "receiver_wakes_sent": rates.of(lane, |reading| reading.received.wakes_sent),
        })
    };
    object["interval_seconds"] = rates.seconds.into();
    for (at, of) in channel.lanes.iter().enumerate() {
        object["lanes"][at]["per_second"] = lane(of);
        object["lanes"][at]["mean_delay_seconds"] = rates.delay(of).map(|(delay, least)| delay.max(least)).into();
    }
    object
}
