//! `pelton metrics`: the numbers of all channels in the text format of OpenMetrics, printed once or served.
//!
//! The channels are found and read at each scrape, and nothing runs in between. A series has the channel's name and
//! kind as labels, never a process or a lane, so their number is bounded: `--channels-max`.

use crate::{
    failure::Failure,
    notify::{self, notify},
    observed::{Where, name_of},
    openmetrics::{self, Format, Metric, MetricSource, Number, Sample, http},
    output::{json, print},
    signals::Signals,
};
use clap::Args;
use pelton::observe::{Channel, FileIds, Observer, Reading, State};
use prometheus_client::registry::Unit;
use serde_json::{Value, json};
use std::{collections::BTreeMap, net::SocketAddr, time::Instant};

/// Options of `pelton metrics`.
#[derive(Args)]
pub struct MetricsArgs {
    /// Serve them at http://ADDRESS/metrics until interrupted [without an ADDRESS: 127.0.0.1:9464]
    ///
    /// ADDRESS is an IP address and a port; with port 0 the system chooses one. Every process that can connect there
    /// can read the metrics, and in them the names of channels.
    #[arg(long, value_name = "ADDRESS", num_args = 0..=1, default_missing_value = "127.0.0.1:9464")]
    listen: Option<SocketAddr>,
    /// The format on standard output. Over HTTP the client chooses
    #[arg(long, value_enum, default_value_t = Format::Openmetrics, conflicts_with = "listen")]
    format: Format,
    /// Have series for at most this number of channels; `pelton_channels_omitted` counts the others
    #[arg(long, value_name = "N", default_value_t = 500)]
    channels_max: usize,
    #[command(flatten)]
    place: Where,
    /// Print one JSON object instead of text; with --listen, one with the address
    #[arg(long, conflicts_with = "format")]
    json: bool,
}

/// Runs `pelton metrics`.
pub fn run(args: &MetricsArgs) -> Result<(), Failure> {
    let mut exporter = Exporter { observer: args.place.observer()?, totals: BTreeMap::new(), most: args.channels_max };
    let Some(address) = args.listen else {
        if args.json {
            let metrics: Vec<Value> = exporter.snapshot().metrics().iter().map(Metric::object).collect();
            return print(json(&json!({ "metrics": metrics })));
        }
        return print(exporter.scrape(args.format));
    };
    let signals = Signals::install()?;
    let listener = http::listen("--listen", address)?;
    // The port too, if it was 0.
    let address = listener.local_addr().map_err(|error| Failure::system("the listening socket", error))?;
    let url = format!("http://{address}/metrics");
    print(if args.json { json(&json!({ "url": url })) } else { url + "\n" })?;
    notify(notify::READY);
    http::serve(&listener, &signals, |path, format| (path == "/metrics").then(|| ("200 OK", exporter.scrape(format))))
}

/// The value of the label `side`, if there are two; whose count it is; and the count.
type Side = (&'static str, Of, fn(&Reading) -> u64);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    Sender,
    Receiver,
}

/// A counter, and its series in each channel.
struct Counter {
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    series: &'static [Side],
}

const COUNTERS: [Counter; 7] = [
    Counter {
        name: "sent_messages",
        help: "Messages sent",
        unit: None,
        series: &[("", Of::Sender, |reading| reading.sent.messages)],
    },
    Counter {
        name: "sent",
        help: "Bytes of the payloads of messages sent",
        unit: Some(Unit::Bytes),
        series: &[("", Of::Sender, |reading| reading.sent.bytes)],
    },
    Counter {
        name: "received_messages",
        help: "Messages that the receiver has released",
        unit: None,
        series: &[("", Of::Receiver, |reading| reading.received.messages)],
    },
    Counter {
        name: "received",
        help: "Bytes of the payloads of messages that the receiver has released",
        unit: Some(Unit::Bytes),
        series: &[("", Of::Receiver, |reading| reading.received.bytes)],
    },
    Counter {
        name: "waits",
        help: "Waits of a side: of senders for space, of the receiver for messages",
        unit: None,
        series: &[
            ("sender", Of::Sender, |reading| reading.sent.waits),
            ("receiver", Of::Receiver, |reading| reading.received.waits),
        ],
    },
    Counter {
        name: "sleeps",
        help: "Waits of a side in which it slept, after polling",
        unit: None,
        series: &[
            ("sender", Of::Sender, |reading| reading.sent.sleeps),
            ("receiver", Of::Receiver, |reading| reading.received.sleeps),
        ],
    },
    Counter {
        name: "wakes",
        help: "Rings of a side that woke the other one",
        unit: None,
        series: &[
            ("sender", Of::Sender, |reading| reading.sent.wakes_sent),
            ("receiver", Of::Receiver, |reading| reading.received.wakes_sent),
        ],
    },
];

/// Series of counters in each channel.
const SERIES: usize = 10;

/// The counts of these sides.
fn counted(reading: &Reading, sides: &[Of]) -> [u64; SERIES] {
    let series = COUNTERS.iter().flat_map(|counter| counter.series);
    let mut values = series.map(|(_, side, count)| if sides.contains(side) { count(reading) } else { 0 });
    std::array::from_fn(|_| values.next().expect("as many series as SERIES"))
}

/// The lanes of a channel at a scrape. The subscribers of a publisher share its lane, and only receive in their own
/// right.
#[derive(Default)]
struct Lanes<'a> {
    /// Also those of subscribers.
    counts: Vec<(FileIds, [u64; SERIES])>,
    /// Of a publisher's subscribers the one with the most unreleased bytes.
    readings: Vec<(Option<FileIds>, &'a Reading)>,
}

impl<'a> Lanes<'a> {
    fn of(lanes: impl Iterator<Item = (Option<FileIds>, &'a Reading)>) -> Lanes<'a> {
        let mut all = Lanes::default();
        for (files, reading) in lanes {
            let Some(publisher) = files.and_then(|files| files.publisher()) else {
                all.counts.extend(files.map(|files| (files, counted(reading, &[Of::Sender, Of::Receiver]))));
                all.readings.push((None, reading));
                continue;
            };
            all.counts.extend(files.map(|files| (files, counted(reading, &[Of::Receiver]))));
            let is_same = |other: &Option<FileIds>| other.is_some_and(|other| other.is_same_lane(&publisher));
            match all.readings.iter_mut().find(|(other, _)| is_same(other)) {
                Some((_, most)) if most.waiting_bytes < reading.waiting_bytes => *most = reading,
                Some(_) => {}
                None => {
                    all.counts.push((publisher, counted(reading, &[Of::Sender])));
                    all.readings.push((Some(publisher), reading));
                }
            }
        }
        all
    }

    fn sum(&self, of: fn(&Reading) -> u64) -> u64 {
        self.readings.iter().fold(0, |sum, (_, reading)| sum.saturating_add(of(reading)))
    }
}

/// Counts of one lane at the last scrape.
struct LaneCounts {
    files: FileIds,
    counts: [u64; SERIES],
}

/// Counts of a channel since it was first seen. They only grow, also if a lane leaves.
#[derive(Default)]
struct Totals {
    counts: [u64; SERIES],
    lanes: Vec<LaneCounts>,
}

impl Totals {
    /// Adds what its lanes have counted since the last scrape.
    fn add(&mut self, readings: impl Iterator<Item = (FileIds, [u64; SERIES])>) {
        let mut before = std::mem::take(&mut self.lanes);
        for (files, mut counts) in readings {
            let same = before.iter().position(|lane| lane.files.is_same_lane(&files));
            let last = same.map(|index| before.swap_remove(index));
            for (at, now) in counts.iter_mut().enumerate() {
                let last_count = last.as_ref().map_or(0, |lane| lane.counts[at]);
                let grown = match now.checked_sub(last_count) {
                    Some(grown) => grown,
                    // A successor brought a page of its own, which counts anew.
                    None if last.as_ref().is_some_and(|lane| lane.files != files) => *now,
                    // A received count is an estimate while the receiver works.
                    None => {
                        *now = last_count;
                        0
                    }
                };
                self.counts[at] = self.counts[at].saturating_add(grown);
            }
            self.lanes.push(LaneCounts { files, counts });
        }
    }
}

/// The labels that each series of a channel has. Channels that share them, as the services of a name, are one.
type Labels = (String, &'static str);

struct Exporter {
    observer: Observer,
    totals: BTreeMap<Labels, Totals>,
    most: usize,
}

impl Exporter {
    fn scrape(&mut self, format: Format) -> String {
        openmetrics::text(self.snapshot(), format)
    }

    fn snapshot(&mut self) -> Snapshot {
        let began = Instant::now();
        let found = self.observer.channels();
        let mut channels: BTreeMap<Labels, Vec<&Channel>> = BTreeMap::new();
        let mut states = BTreeMap::from(State::ALL.map(|state| (state.words(), 0)));
        for channel in &found.channels {
            channels.entry((name_of(channel), channel.kind.word())).or_default().push(channel);
            *states.entry(channel.state().words()).or_default() += 1;
        }
        let omitted = channels.len().saturating_sub(self.most);
        if omitted > 0 {
            // Those of the last scrape stay, so that series do not come and go.
            let mut names: Vec<_> = channels.keys().map(|labels| (!self.totals.contains_key(labels), labels)).collect();
            names.sort();
            let names: Vec<Labels> = names.into_iter().skip(self.most).map(|(_, labels)| labels.clone()).collect();
            names.iter().for_each(|labels| _ = channels.remove(labels));
        }
        self.totals.retain(|labels, _| channels.contains_key(labels));
        let series = channels.into_iter().map(|(labels, channels)| {
            let lanes = channels.iter().flat_map(|channel| &channel.lanes);
            let lanes = Lanes::of(lanes.map(|lane| (lane.file_ids().ok(), &lane.reading)));
            let full = |reading: &Reading| reading.waiting_bytes as f64 / reading.capacity.max(1) as f64;
            let full = lanes.readings.iter().map(|(_, reading)| full(reading));
            let totals = self.totals.entry(labels.clone()).or_default();
            totals.add(lanes.counts.iter().copied());
            // Of several, the one that is not well.
            let states = channels.iter().map(|channel| channel.state());
            Series {
                counts: totals.counts,
                lanes: lanes.readings.len() as u64,
                capacity: lanes.sum(|reading| reading.capacity),
                waiting_messages: lanes.sum(|reading| reading.waiting_messages),
                waiting_bytes: lanes.sum(|reading| reading.waiting_bytes),
                full: full.fold(0.0, f64::max).min(1.0),
                state: states.max_by_key(|state| !matches!(state, State::Ok | State::Idle)).map_or("", State::words),
                labels,
            }
        });
        let series = series.collect();
        let unreadable = found.unreadable.len();
        Snapshot { states, series, omitted, unreadable, seconds: began.elapsed().as_secs_f64() }
    }
}

/// The numbers of one channel.
#[derive(Debug)]
struct Series {
    labels: Labels,
    counts: [u64; SERIES],
    lanes: u64,
    capacity: u64,
    waiting_messages: u64,
    waiting_bytes: u64,
    full: f64,
    state: &'static str,
}

/// The numbers of one scrape.
#[derive(Debug)]
struct Snapshot {
    states: BTreeMap<&'static str, u64>,
    series: Vec<Series>,
    omitted: usize,
    unreadable: usize,
    seconds: f64,
}

impl Series {
    fn labels(&self, more: Option<(&'static str, &'static str)>) -> Vec<(&'static str, &str)> {
        [("channel", &*self.labels.0), ("kind", self.labels.1)].into_iter().chain(more).collect()
    }
}

impl MetricSource for Snapshot {
    fn metrics(&self) -> Vec<Metric<'_>> {
        let states = self.states.iter().map(|(state, count)| {
            let labels = vec![("state", *state)];
            Sample { labels, value: Number::Whole(*count) }
        });
        let one = |value| vec![Sample { labels: Vec::new(), value }];
        let whole = |count: usize| one(Number::Whole(count as u64));
        let gauge = |name, help, unit, samples| Metric { name, help, unit, is_counter: false, samples };
        let unreadable = "Processes, files and directories that could not be read: see pelton ls";
        let duration = "Time that finding and reading the channels took";
        let mut metrics = vec![
            gauge("channels", "Channels and services by state", None, states.collect()),
            gauge("channels_omitted", "Channels above --channels-max, which have no series", None, whole(self.omitted)),
            gauge("unreadable", unreadable, None, whole(self.unreadable)),
            gauge("scrape_duration", duration, Some(Unit::Seconds), one(Number::Real(self.seconds))),
        ];
        let mut first = 0;
        for Counter { name, help, unit, series } in &COUNTERS {
            let mut samples = Vec::new();
            for of in &self.series {
                for (at, (side, ..)) in series.iter().enumerate() {
                    let side = (!side.is_empty()).then_some(("side", *side));
                    let value = Number::Whole(of.counts[first + at]);
                    samples.push(Sample { labels: of.labels(side), value });
                }
            }
            metrics.push(Metric { name, help, unit: unit.clone(), is_counter: true, samples });
            first += series.len();
        }
        type Gauge = (&'static str, &'static str, Option<Unit>, fn(&Series) -> f64);
        let gauges: [Gauge; 5] = [
            ("lanes", "Lanes: one for each sender", None, |of| of.lanes as f64),
            ("capacity", "Bytes that its lanes can hold", Some(Unit::Bytes), |of| of.capacity as f64),
            (
                "waiting_messages",
                "Messages that are sent and not released; of a broadcast by its slowest subscriber",
                None,
                |of| of.waiting_messages as f64,
            ),
            ("waiting", "Bytes of the lanes that these occupy", Some(Unit::Bytes), |of| of.waiting_bytes as f64),
            ("full", "How full the fullest lane is, 0 to 1", Some(Unit::Other("ratio".to_owned())), |of| of.full),
        ];
        for (name, help, unit, value) in gauges {
            let sample = |of| Sample { labels: Series::labels(of, None), value: Number::Real(value(of)) };
            metrics.push(gauge(name, help, unit, self.series.iter().map(sample).collect()));
        }
        let states = self.series.iter().map(|of| {
            let labels = of.labels(Some(("state", of.state)));
            Sample { labels, value: Number::Whole(1) }
        });
        metrics.push(gauge("channel_state", "1 for the state that the channel is in", None, states.collect()));
        metrics
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(count: usize) -> Vec<FileIds> {
        // Lanes of path channels, whose files are their own.
        let directory = tempfile::tempdir().unwrap();
        let mut observer = Observer::new();
        for number in 0..count {
            let path = directory.path().join(number.to_string());
            let mut sender = pelton::Options::new().capacity(1 << 16).create_sender(&path).unwrap();
            sender.send(b"hello").unwrap();
            observer.add_directory(path);
        }
        let found = observer.channels();
        let own = |channel: &&Channel| channel.name.contains(directory.path().to_str().unwrap());
        found.channels.iter().filter(own).map(|channel| channel.lanes[0].file_ids().unwrap()).collect()
    }

    #[test]
    fn totals_grow_while_lanes_come_and_go() {
        let files = files(2);
        let mut totals = Totals::default();
        let counts = |count| [count; SERIES];
        let mut add = |lanes: &[(usize, u64)]| {
            totals.add(lanes.iter().map(|(lane, count)| (files[*lane], counts(*count))));
            totals.counts[0]
        };
        assert_eq!(add(&[(0, 10), (1, 5)]), 15);
        assert_eq!(add(&[(0, 12), (1, 5)]), 17);
        // A lane leaves; a plain sum would fall, which Prometheus takes for a restart.
        assert_eq!(add(&[(1, 6)]), 18);
        // An estimate that was too large is not counted twice.
        assert_eq!(add(&[(1, 4)]), 18);
        assert_eq!(add(&[(1, 7)]), 19);
    }
}
