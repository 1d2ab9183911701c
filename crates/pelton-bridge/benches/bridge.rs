//! The bridge beside async-nats alone, with the same server, guarantees and batches:
//!
//!     ./run bench bridge [--rounds N] [out] [packed] [in] [latency] [subjects] [channels]
//!
//! Without a name, the first four. Rounds alternate; each figure is the median, with the smallest and the largest.
//! Everything runs on one machine, so the network costs a loopback, and all programs share the processors. The CPU time
//! is that of async-nats in this process, and of the bridge's process, without the server's.

#[path = "../tests/support/mod.rs"]
mod support;

use async_nats::jetstream::{self, Context, consumer, message::PublishMessage, stream};
use bytes::Bytes;
use futures_util::StreamExt as _;
use pelton::{Deadline, Options, Receiver, Sender};
use std::{
    cell::Cell,
    path::Path,
    time::{Duration, Instant},
};
use support::{Running, Server, bridge, eventually, server_program};
use tokio::runtime::Runtime;

const BYTES: usize = 256;
/// One by one, each waits for its acknowledgement: about a second of them.
const SINGLE: usize = 5_000;
const PACKED: usize = 200_000;
const READ: usize = 200_000;
/// Of a stream that is read, and of senders of one channel.
const SUBJECTS: usize = 1000;
const CHANNELS: usize = 100;
/// As many bytes as the bridge packs.
const BATCH_BYTES: usize = 128 << 10;
const LATENCY_MESSAGES: u64 = 2_000;
const LATENCY_INTERVAL: Duration = Duration::from_millis(1);

struct Bench {
    here: tempfile::TempDir,
    server: Server,
    runtime: Runtime,
    jetstream: Context,
    rounds: usize,
    /// Seconds that this measurement has taken.
    cpu: Cell<f64>,
}

fn main() {
    let mut words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let rounds = words.iter().position(|word| word == "--rounds").map_or(5, |at| {
        let options: Vec<String> = words.drain(at..).collect();
        options.get(1).and_then(|word| word.parse().ok()).expect("--rounds wants a number, as the last option")
    });
    let Some(program) = server_program() else { return };
    let here = tempfile::tempdir().expect("a directory");
    let server = Server::start(&program, &here.path().join("nats"), &["max_payload: 1048576"]);
    let runtime = Runtime::new().expect("a runtime");
    let jetstream =
        runtime.block_on(async { jetstream::new(async_nats::connect(server.url()).await.expect("a connection")) });
    let bench = Bench { here, server, runtime, jetstream, rounds, cpu: Cell::new(0.0) };
    println!("{BYTES}-byte messages, one server, files, {rounds} rounds: median (smallest to largest)");
    if words.is_empty() {
        words = ["out", "packed", "in", "latency"].map(str::to_owned).to_vec();
    }
    let sides = ["async-nats", "bridge"];
    for word in words {
        match word.as_str() {
            "out" => bench.compare(
                "out, one by one, messages/s",
                sides,
                SINGLE,
                || bench.alone_out(SINGLE, BYTES, 1),
                || bench.bridge_out(SINGLE, &[]),
            ),
            "packed" => bench.compare(
                "out, packed, messages/s",
                sides,
                PACKED,
                || bench.alone_out(PACKED / (BATCH_BYTES / BYTES), BATCH_BYTES, BATCH_BYTES / BYTES),
                || bench.bridge_out(PACKED, &["--packed"]),
            ),
            "in" => bench.compare("in, messages/s", sides, READ, || bench.alone_in(), || bench.bridge_in(1)),
            "latency" => bench.compare(
                "there, at 1,000 messages/s, median in µs",
                sides,
                LATENCY_MESSAGES as usize,
                || bench.counting(|| bench.alone_latency()),
                || bench.counting(|| bench.bridge_latency()),
            ),
            "subjects" => bench.compare(
                "in, messages/s",
                ["one subject", "1,000 subjects"],
                READ,
                || bench.bridge_in(1),
                || bench.bridge_in(SUBJECTS),
            ),
            "channels" => {
                let sides = ["one channel", "100 channels"];
                bench.compare(
                    "out of one process, packed, messages/s",
                    sides,
                    PACKED,
                    || bench.channels_out(1, PACKED, true),
                    || bench.channels_out(CHANNELS, PACKED, true),
                );
                bench.compare(
                    "out of one process, one by one, messages/s",
                    sides,
                    SINGLE,
                    || bench.channels_out(1, SINGLE, false),
                    || bench.channels_out(CHANNELS, SINGLE, false),
                );
            }
            other => panic!("{other} is no measurement"),
        }
    }
}

/// The CPU time of this process, and of the processes that it has waited for.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").expect("the state of this process");
    // After the name: the state is field 3, the user's time of this process field 14.
    let fields: Vec<&str> = text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks: u64 = fields[11..15].iter().map(|field| field.parse::<u64>().expect("ticks")).sum();
    // A tick is 10 ms on every architecture that pelton has.
    ticks as f64 / 100.0
}

impl Bench {
    fn compare(
        &self,
        what: &str,
        sides: [&str; 2],
        count: usize,
        mut one: impl FnMut() -> f64,
        mut other: impl FnMut() -> f64,
    ) {
        let (mut values, mut cpu) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        let mut ratios = Vec::new();
        for _ in 0..self.rounds {
            let measured = [&mut one as &mut dyn FnMut() -> f64, &mut other].map(|measure| {
                self.cpu.set(0.0);
                (measure(), self.cpu.get() / count as f64 * 1e6)
            });
            for (side, (value, microseconds)) in measured.into_iter().enumerate() {
                values[side].push(value);
                cpu[side].push(microseconds);
            }
            ratios.push(measured[1].0 / measured[0].0);
        }
        println!("{what}: ratio {}", summary(&mut ratios, 2));
        for side in 0..2 {
            let value = summary(&mut values[side], 0);
            let cpu = match cpu[side].iter().all(|microseconds| *microseconds == 0.0) {
                true => String::new(),
                false => format!("{} µs of CPU time for each", summary(&mut cpu[side], 2)),
            };
            println!("    {:16} {value:34} {cpu}", sides[side]);
        }
    }

    /// Counts the CPU time that `work` takes, with the end of the processes that it starts.
    fn counting<T>(&self, work: impl FnOnce() -> T) -> T {
        let before = cpu_seconds();
        let done = work();
        self.cpu.set(self.cpu.get() + cpu_seconds() - before);
        done
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.here.path().join(name)
    }

    fn new_stream(&self) {
        self.runtime.block_on(async {
            let _ = self.jetstream.delete_stream("BENCH").await;
            let (name, subjects) = ("BENCH".to_owned(), vec!["bench.>".to_owned()]);
            self.jetstream
                .create_stream(stream::Config { name, subjects, ..Default::default() })
                .await
                .expect("a stream");
        });
    }

    fn bridge(&self, name: &'static str, words: &[&str]) -> Running {
        let url = self.server.url();
        let running = Running::start(name, bridge(words).args(["--nats", &url, "--stream", "BENCH"]));
        running.says(&format!("{name}: "));
        running
    }

    /// One in flight, with the expected sequence. `each` messages are in one.
    fn alone_out(&self, count: usize, bytes: usize, each: usize) -> f64 {
        self.new_stream();
        let payload = Bytes::from(vec![7; bytes]);
        let began = Instant::now();
        let work = async {
            let mut last = 0;
            for _ in 0..count {
                let message = PublishMessage::build().payload(payload.clone()).expected_last_subject_sequence(last);
                let ack = self.jetstream.send_publish("bench.a", message).await.expect("sent").await;
                last = ack.expect("stored").sequence;
            }
        };
        self.counting(|| self.runtime.block_on(work));
        (count * each) as f64 / began.elapsed().as_secs_f64()
    }

    fn bridge_out(&self, count: usize, more: &[&str]) -> f64 {
        self.new_stream();
        let directory = self.path("out");
        let mut sender = Options::new().capacity(256 << 20).create_sender(&directory).expect("a channel");
        for _ in 0..count {
            sender.send(&[7; BYTES]).expect("sent");
        }
        drop(sender);
        let channel = format!("path:{}", directory.display());
        let words = [&["out", &channel, "--subject", "bench.a", "--once"][..], more].concat();
        let seconds = self.counting(|| {
            let mut running = self.bridge("out", &words);
            let began = Instant::now();
            let (code, errors) = running.wait();
            assert_eq!(code, Some(0), "{errors}");
            began.elapsed().as_secs_f64()
        });
        remove(&directory);
        count as f64 / seconds
    }

    fn fill(&self, subjects: usize) {
        self.new_stream();
        self.runtime.block_on(async {
            let mut acks = Vec::new();
            for number in 0..READ {
                let subject = format!("bench.{}", number % subjects);
                acks.push(self.jetstream.publish(subject, vec![7; BYTES].into()).await.expect("sent"));
                if acks.len() == 1000 {
                    for ack in acks.drain(..) {
                        ack.await.expect("stored");
                    }
                }
            }
        });
    }

    async fn messages(&self) -> consumer::pull::Stream {
        let stream = self.jetstream.get_stream("BENCH").await.expect("the stream");
        let config = consumer::pull::Config {
            ack_policy: consumer::AckPolicy::None,
            memory_storage: true,
            ..Default::default()
        };
        let consumer = stream.create_consumer(config).await.expect("a consumer");
        consumer.stream().max_messages_per_batch(1024).messages().await.expect("messages")
    }

    fn alone_in(&self) -> f64 {
        self.fill(1);
        let work = async {
            let mut messages = self.messages().await;
            let began = Instant::now();
            for _ in 0..READ {
                messages.next().await.expect("a message").expect("a message");
            }
            READ as f64 / began.elapsed().as_secs_f64()
        };
        self.counting(|| self.runtime.block_on(work))
    }

    /// The CPU time has that of the receiver, which is in this process.
    fn bridge_in(&self, subjects: usize) -> f64 {
        self.fill(subjects);
        let directory = self.path("in");
        let mut receiver = Options::new().create_receiver(&directory).expect("a channel");
        let channel = format!("path:{}", directory.display());
        let seconds = self.counting(|| {
            let running = self.bridge("in", &["in", "bench.>", &channel]);
            let began = Instant::now();
            (0..READ).for_each(|_| receive(&mut receiver));
            let seconds = began.elapsed().as_secs_f64();
            drop(running);
            seconds
        });
        drop(receiver);
        remove(&directory);
        READ as f64 / seconds
    }

    /// Channels of one process, which carries their messages out until all are stored.
    fn channels_out(&self, channels: usize, count: usize, is_packed: bool) -> f64 {
        self.new_stream();
        let path = |number: usize| self.path(&format!("channel-{number}"));
        let table = |number: usize| {
            let channel = path(number);
            format!("[[out]]\nchannel = \"path:{}\"\nsubject = \"bench.{number}\"\n", channel.display())
        };
        let tables: String = (0..channels).map(table).collect();
        let config = self.path("bridges.toml");
        let text = format!("nats = \"{}\"\nstream = \"BENCH\"\npacked = {is_packed}\n{tables}", self.server.url());
        std::fs::write(&config, text).expect("the configuration");
        let running = Running::start("run", bridge(&["run"]).arg(&config));
        eventually("all bridges", || running.errors().matches("out: ").count() == channels);
        let sender = |number| Options::new().create_sender(path(number)).expect("a channel");
        let mut senders: Vec<Sender> = (0..channels).map(sender).collect();
        let began = Instant::now();
        for number in 0..count {
            senders[number % channels].send(&[7; BYTES]).expect("sent");
        }
        senders.iter_mut().for_each(|sender| sender.wait_released().expect("a receiver"));
        let seconds = began.elapsed().as_secs_f64();
        drop((running, senders));
        (0..channels).for_each(|number| remove(&path(number)));
        count as f64 / seconds
    }

    fn alone_latency(&self) -> f64 {
        self.new_stream();
        self.runtime.block_on(async {
            let mut messages = self.messages().await;
            let jetstream = self.jetstream.clone();
            let base = Instant::now();
            let sending = tokio::spawn(async move {
                let mut last = 0;
                for number in 1..=LATENCY_MESSAGES {
                    tokio::time::sleep_until((base + LATENCY_INTERVAL * number as u32).into()).await;
                    let message = PublishMessage::build()
                        .payload(stamp(base).to_vec().into())
                        .expected_last_subject_sequence(last);
                    last =
                        jetstream.send_publish("bench.a", message).await.expect("sent").await.expect("stored").sequence;
                }
            });
            let mut times = Vec::new();
            for _ in 0..LATENCY_MESSAGES {
                let message = messages.next().await.expect("a message").expect("a message");
                times.push(since(base, &message.payload));
            }
            sending.await.expect("all sent");
            median(&mut times)
        })
    }

    fn bridge_latency(&self) -> f64 {
        self.new_stream();
        let (first, second) = (self.path("first"), self.path("second"));
        let mut sender: Sender = Options::new().create_sender(&first).expect("a channel");
        let mut receiver = Options::new().create_receiver(&second).expect("a channel");
        let (from, to) = (format!("path:{}", first.display()), format!("path:{}", second.display()));
        let out = self.bridge("out", &["out", &from, "--subject", "bench.a"]);
        let in_ = self.bridge("in", &["in", "bench.>", &to]);
        let base = Instant::now();
        let sending = std::thread::spawn(move || {
            for number in 1..=LATENCY_MESSAGES {
                let due = base + LATENCY_INTERVAL * number as u32;
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                sender.send(&stamp(base)).expect("sent");
            }
            sender
        });
        let mut times = Vec::new();
        for _ in 0..LATENCY_MESSAGES {
            assert!(receiver.find_record(Deadline::Never).expect("a message").is_some());
            times.push(since(base, &receiver.receive().expect("a message")));
        }
        drop((sending.join().expect("all sent"), out, in_, receiver));
        remove(&first);
        remove(&second);
        median(&mut times)
    }
}

fn receive(receiver: &mut Receiver) {
    drop(receiver.receive().expect("a message"));
}

fn stamp(base: Instant) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    bytes[..8].copy_from_slice(&(base.elapsed().as_nanos() as u64).to_le_bytes());
    bytes
}

/// Microseconds since the stamp.
fn since(base: Instant, bytes: &[u8]) -> f64 {
    let sent = u64::from_le_bytes(*bytes.first_chunk::<8>().expect("a stamp"));
    (base.elapsed().as_nanos() as u64 - sent) as f64 / 1000.0
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn summary(values: &mut [f64], digits: usize) -> String {
    let middle = median(values);
    format!("{middle:.digits$} ({:.digits$} to {:.digits$})", values[0], values[values.len() - 1])
}

/// A killed bridge keeps its role for a moment.
fn remove(directory: &Path) {
    eventually("the channel's processes to end", || pelton::inspect::remove(directory).is_ok());
    let mut position = directory.as_os_str().to_owned();
    position.push(".bridge");
    let _ = std::fs::remove_file(position);
}
