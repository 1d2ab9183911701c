//! `pelton stat`: one channel in full, with its rates.

use crate::{
    failure::Failure,
    observed::{
        Where, counted, json_of, name_of, named, one_line, percent_of, rate, short_age, short_bytes, short_time, side,
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
  rang    how often it woke the other side from such a sleep";

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
    // Nothing to close: a signal ends the process.
    std::thread::sleep(args.interval);
    for (channel, before) in channels.iter_mut().zip(&before) {
        for lane in &mut channel.lanes {
            lane.reading = lane.read().map_err(|error| Failure::System(format!("a lane of {}: {error}", args.name)))?;
        }
        let rates = Rates { before, seconds: began.elapsed().as_secs_f64() };
        print(if args.json { json(&object(channel, &rates)) } else { text(channel, &rates) })?;
    }
    Ok(())
}

/// The failure if no channel has the name.
pub fn no_channel(name: &str) -> Failure {
    Failure::Refused(format!(
        "there is no channel {name}, or this user may not see it: `pelton ls` lists those there are"
    ))
}

/// The readings before the interval, and its length.
struct Rates<'a> {
    before: &'a [Reading],
    seconds: f64,
}

impl Rates<'_> {
    /// How much a number grew per second, in one lane. A successor's counters begin anew.
    fn of(&self, lane: &Lane, number: impl Fn(&Reading) -> u64) -> f64 {
        let before = self.before.get(lane.number as usize).map_or(0, &number);
        number(&lane.reading).saturating_sub(before) as f64 / self.seconds.max(1e-9)
    }
}

fn text(channel: &Channel, rates: &Rates<'_>) -> String {
    let mut text = format!(
        "{}: {}, {}; {}; made {} ago\nreceiver: {}\n",
        name_of(channel),
        channel.kind.word(),
        channel.state().words(),
        counted(channel.lanes.len() as u64, "lane"),
        short_age(channel),
        in_full(&channel.receiver)
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
    }
    object
}
