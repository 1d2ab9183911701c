//! What bridges do at present: their metrics and their health, which a thread serves over HTTP.
//!
//! A bridge only counts. A scrape reads the counters, and of channels outwards what waits in them.

use crate::report;
use async_nats::{Client, Statistics, connection, jetstream::stream::State};
use pelton::observe::{Channel, Observer};
use pelton_cli::{
    failure::Failure,
    openmetrics::{self, Metric, MetricSource, Number, Sample, Unit, http},
    signals::Signals,
};
use std::{
    net::SocketAddr,
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{SystemTime, UNIX_EPOCH},
};

/// A number that one thread writes, and a scrape reads: so every access is relaxed.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    pub fn add(&self, more: u64) {
        self.0.fetch_add(more, Relaxed);
    }

    pub fn sub(&self, less: u64) {
        self.0.fetch_sub(less, Relaxed);
    }

    pub fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    pub fn raise(&self, value: u64) {
        self.0.fetch_max(value, Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// What one bridge does.
#[derive(Debug)]
pub struct Status {
    /// `out`, `in`, `serve` or `call`.
    kind: &'static str,
    /// The channel or the service.
    name: String,
    phase: Mutex<Phase>,
    /// Messages carried, or calls.
    pub messages: Count,
    /// Bytes of their payloads.
    pub bytes: Count,
    /// Publishes that are stored.
    pub acks: Count,
    /// Publishes without an acknowledgement yet.
    pub in_flight: Count,
    /// Publishes that were repeated; messages that were read again.
    pub redeliveries: Count,
    /// Inwards: messages of the stream whose contents are in the channel, and how many there will be once all that are
    /// in the stream are.
    pub carried: Count,
    pub known: Count,
    /// Inwards: the sequence of the last of them.
    pub done: Count,
    /// Inwards: the mean size of the stream's messages.
    pub mean_bytes: Count,
    /// Since when messages wait, in nanoseconds of UNIX time; 0: none does.
    pub waiting_since: Count,
    connections: Mutex<Connections>,
    problems: Mutex<Vec<(u64, String)>>,
}

/// Something that fails again and again, until this is dropped.
pub struct Problem {
    status: Arc<Status>,
    number: u64,
}

impl Problem {
    pub fn begin(status: &Arc<Status>, text: String) -> Problem {
        let mut problems = status.problems();
        let number = problems.last().map_or(0, |(number, _)| number + 1);
        problems.push((number, text));
        Problem { status: status.clone(), number }
    }
}

impl Drop for Problem {
    fn drop(&mut self) {
        self.status.problems().retain(|(number, _)| *number != self.number);
    }
}

/// Counts connections over several clients.
#[derive(Debug, Default)]
struct Connections {
    /// Of the clients before the present one.
    before: u64,
    present: Option<Arc<Statistics>>,
}

impl Connections {
    /// Another client, unless it is the present one.
    fn count(&mut self, of: Arc<Statistics>) {
        if !self.present.as_ref().is_some_and(|present| Arc::ptr_eq(present, &of)) {
            self.before = self.total();
            self.present = Some(of);
        }
    }

    fn total(&self) -> u64 {
        self.before + self.present.as_ref().map_or(0, |present| present.connects.load(Relaxed))
    }
}

#[derive(Debug, Default)]
enum Phase {
    #[default]
    Starting,
    Up(Client),
    Ended(String),
}

impl Status {
    pub fn new(kind: &'static str, name: String) -> Arc<Status> {
        Arc::new(Status {
            kind,
            name,
            phase: Mutex::default(),
            messages: Count::default(),
            bytes: Count::default(),
            acks: Count::default(),
            in_flight: Count::default(),
            redeliveries: Count::default(),
            carried: Count::default(),
            known: Count::default(),
            done: Count::default(),
            mean_bytes: Count::default(),
            waiting_since: Count::default(),
            connections: Mutex::default(),
            problems: Mutex::default(),
        })
    }

    /// It carries from now on.
    pub fn up(&self, client: &Client) {
        *self.phase() = Phase::Up(client.clone());
        self.in_flight.set(0);
        self.connections().count(client.statistics());
    }

    /// Of a stream inwards.
    pub fn note_mean(&self, stream: &State) {
        self.mean_bytes.set(stream.bytes / stream.messages.max(1));
    }

    /// It does not carry. Returns whether that is new.
    pub fn ended(&self, why: String) -> bool {
        let mut phase = self.phase();
        let is_new = !matches!(&*phase, Phase::Ended(known) if *known == why);
        *phase = Phase::Ended(why);
        is_new
    }

    fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why it does not carry now, if it does not.
    fn problem(&self) -> Option<String> {
        match &*self.phase() {
            Phase::Starting => Some("starts".to_owned()),
            Phase::Up(client) if client.connection_state() == connection::State::Connected => {
                self.problems().first().map(|(_, text)| text.clone())
            }
            Phase::Up(_) => Some("has no connection to NATS".to_owned()),
            Phase::Ended(why) => Some(why.clone()),
        }
    }

    fn problems(&self) -> MutexGuard<'_, Vec<(u64, String)>> {
        self.problems.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reconnects(&self) -> u64 {
        self.connections().total().saturating_sub(1)
    }

    /// The lag in messages, bytes and seconds. Of a channel, its unreleased messages; of a stream, those that are not
    /// in the channel, with bytes by their mean. The seconds outwards are since the bridge last found the channel
    /// empty; inwards, since the oldest message that waits was stored.
    fn lag(&self, channels: &[Channel]) -> (u64, u64, f64) {
        let (messages, bytes) = match self.kind {
            "out" => channels
                .iter()
                .find(|channel| channel.name == self.name)
                .map_or((0, 0), |channel| (channel.waiting_messages(), channel.waiting_bytes())),
            _ => {
                let messages = self.known.get().saturating_sub(self.carried.get());
                (messages, messages * self.mean_bytes.get())
            }
        };
        let seconds = match self.waiting_since.get() {
            0 => 0.0,
            since => now().saturating_sub(since) as f64 / 1e9,
        };
        (messages, bytes, if messages == 0 { 0.0 } else { seconds })
    }
}

/// Nanoseconds of UNIX time.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
}

/// The bridges of this process.
pub type Bridges = Arc<Mutex<Vec<Arc<Status>>>>;

/// Serves metrics and health in a thread, until the process ends.
pub fn serve(address: SocketAddr, bridges: Bridges) -> Result<(), Failure> {
    let listener = http::listen("--metrics", address)?;
    // The port too, if it was 0.
    let address = listener.local_addr().map_err(|error| Failure::system("the listening socket", error))?;
    let signals = Signals::none()?;
    let mut observer = Observer::new();
    std::thread::Builder::new()
        .name("metrics".to_owned())
        .spawn(move || {
            let bridges = || bridges.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let served = http::serve(&listener, &signals, |path, format| match path {
                "/metrics" => Some(("200 OK", openmetrics::text(snapshot(&bridges(), &mut observer), format))),
                "/health" => Some(health(&bridges())),
                _ => None,
            });
            if let Err(failure) = served {
                report(format_args!("metrics have ended: {}", failure.text().unwrap_or_default()));
            }
        })
        .map_err(|error| Failure::system("a thread for --metrics", error))?;
    report(format_args!("metrics: http://{address}/metrics and http://{address}/health"));
    Ok(())
}

/// The status, and a line for each bridge that does not carry.
fn health(bridges: &[Arc<Status>]) -> (&'static str, String) {
    let problem = |bridge: &Arc<Status>| Some(format!("{} {}: {}\n", bridge.kind, bridge.name, bridge.problem()?));
    let problems: String = bridges.iter().filter_map(problem).collect();
    match problems.is_empty() {
        true => ("200 OK", format!("{} of {} carry\n", bridges.len(), bridges.len())),
        false => ("503 Service Unavailable", problems),
    }
}

/// The numbers of one bridge.
#[derive(Debug)]
struct Series {
    kind: &'static str,
    name: String,
    counters: [u64; 5],
    gauges: [f64; 5],
}

#[derive(Debug)]
struct Snapshot(Vec<Series>);

fn snapshot(bridges: &[Arc<Status>], observer: &mut Observer) -> Snapshot {
    let outwards = || bridges.iter().filter(|bridge| bridge.kind == "out");
    for directory in outwards().filter_map(|bridge| bridge.name.strip_prefix("path:")) {
        observer.add_directory(Path::new(directory));
    }
    let channels = if outwards().count() > 0 { observer.channels().channels } else { Vec::new() };
    let series = bridges.iter().map(|bridge| {
        let (messages, bytes, seconds) = bridge.lag(&channels);
        let is_up = if bridge.problem().is_none() { 1.0 } else { 0.0 };
        Series {
            kind: bridge.kind,
            name: bridge.name.clone(),
            counters: [
                bridge.messages.get(),
                bridge.bytes.get(),
                bridge.acks.get(),
                bridge.redeliveries.get(),
                bridge.reconnects(),
            ],
            gauges: [is_up, bridge.in_flight.get() as f64, messages as f64, bytes as f64, seconds],
        }
    });
    Snapshot(series.collect())
}

type Description = (&'static str, &'static str, Option<Unit>);

impl MetricSource for Snapshot {
    fn metrics(&self) -> Vec<Metric<'_>> {
        let counters: [Description; 5] = [
            ("bridge_messages", "Messages, or calls, that were carried", None),
            ("bridge_payload", "Bytes of their payloads", Some(Unit::Bytes)),
            ("bridge_acks", "Publishes that the server has acknowledged", None),
            ("bridge_redeliveries", "Publishes that were repeated, or messages that were read again", None),
            ("bridge_reconnects", "Connections to NATS after the first one", None),
        ];
        let gauges: [Description; 5] = [
            ("bridge_up", "1 while it is connected and carries", None),
            ("bridge_publishes_in_flight", "Publishes without an acknowledgement yet", None),
            ("bridge_lag_messages", "Messages that wait in the channel, or in the stream", None),
            ("bridge_lag", "Their bytes; of a stream by the mean of its messages", Some(Unit::Bytes)),
            ("bridge_lag", "Time since none waited; of a stream, the age of the oldest there", Some(Unit::Seconds)),
        ];
        let all = counters.into_iter().map(|metric| (metric, true)).chain(gauges.into_iter().map(|m| (m, false)));
        all.enumerate()
            .map(|(at, ((name, help, unit), is_counter))| {
                let samples = self.0.iter().map(|of| Sample {
                    labels: vec![("bridge", of.name.as_str()), ("kind", of.kind)],
                    value: match is_counter {
                        true => Number::Whole(of.counters[at]),
                        false => Number::Real(of.gauges[at - 5]),
                    },
                });
                Metric { name, help, unit, is_counter, samples: samples.collect() }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_comes_up_again_is_no_further_connection() {
        let mut connections = Connections::default();
        let connected = |times: u64| {
            let statistics = Arc::new(Statistics::default());
            statistics.connects.store(times, Relaxed);
            statistics
        };
        let first = connected(2);
        connections.count(first.clone());
        connections.count(first);
        assert_eq!(connections.total(), 2);
        connections.count(connected(1));
        assert_eq!(connections.total(), 3);
    }
}
