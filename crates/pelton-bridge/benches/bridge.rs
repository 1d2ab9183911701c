//! The bridge beside async-nats alone, with the same server, guarantees and batches: `./run bench bridge`.
//!
//! Rounds alternate; each figure is the median, with the smallest and the largest. Everything runs on one machine, so
//! the network costs a loopback, and all programs share the processors.

#[path = "../tests/support/mod.rs"]
mod support;

use async_nats::jetstream::{self, Context, consumer, message::PublishMessage, stream};
use bytes::Bytes;
use futures_util::StreamExt as _;
use pelton::{Deadline, Options, Receiver, Sender};
use std::{
    path::Path,
    time::{Duration, Instant},
};
use support::{Running, Server, bridge, eventually, server_program};
use tokio::runtime::Runtime;

const BYTES: usize = 256;
/// One by one, each waits for its acknowledgement: about a second of them.
const SINGLE: usize = 5_000;
const PACKED: usize = 200_000;
const READ: usize = 50_000;
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
}

fn main() {
    let mut words = std::env::args().skip(1).skip_while(|word| word != "--rounds").skip(1);
    let rounds = words.next().and_then(|word| word.parse().ok()).unwrap_or(5);
    let Some(program) = server_program() else { return };
    let here = tempfile::tempdir().expect("a directory");
    let server = Server::start(&program, &here.path().join("nats"), &["max_payload: 1048576"]);
    let runtime = Runtime::new().expect("a runtime");
    let jetstream =
        runtime.block_on(async { jetstream::new(async_nats::connect(server.url()).await.expect("a connection")) });
    let bench = Bench { here, server, runtime, jetstream, rounds };
    println!("{BYTES}-byte messages, one server, files, {rounds} rounds: median (smallest to largest)");
    bench.compare(
        "out, one by one, messages/s",
        || bench.alone_out(SINGLE, BYTES, 1),
        || bench.bridge_out(SINGLE, &[]),
    );
    bench.compare(
        "out, packed, messages/s",
        || bench.alone_out(PACKED / (BATCH_BYTES / BYTES), BATCH_BYTES, BATCH_BYTES / BYTES),
        || bench.bridge_out(PACKED, &["--packed"]),
    );
    bench.compare("in, messages/s", || bench.alone_in(), || bench.bridge_in());
    bench.compare("there, at 1,000 messages/s, median in µs", || bench.alone_latency(), || bench.bridge_latency());
}

impl Bench {
    fn compare(&self, what: &str, mut alone: impl FnMut() -> f64, mut bridge: impl FnMut() -> f64) {
        let (mut one, mut other, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..self.rounds {
            let (alone, bridge) = (alone(), bridge());
            one.push(alone);
            other.push(bridge);
            ratios.push(bridge / alone);
        }
        println!(
            "{what:44} async-nats {:30} bridge {:30} ratio {}",
            summary(&mut one, 0),
            summary(&mut other, 0),
            summary(&mut ratios, 2)
        );
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
        self.runtime.block_on(async {
            let mut last = 0;
            for _ in 0..count {
                let message = PublishMessage::build().payload(payload.clone()).expected_last_subject_sequence(last);
                let ack = self.jetstream.send_publish("bench.a", message).await.expect("sent").await;
                last = ack.expect("stored").sequence;
            }
        });
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
        let mut running = self.bridge("out", &words);
        let began = Instant::now();
        let (code, errors) = running.wait();
        assert_eq!(code, Some(0), "{errors}");
        let seconds = began.elapsed().as_secs_f64();
        remove(&directory);
        count as f64 / seconds
    }

    fn fill(&self) {
        self.new_stream();
        self.runtime.block_on(async {
            let mut acks = Vec::new();
            for _ in 0..READ {
                acks.push(self.jetstream.publish("bench.a", vec![7; BYTES].into()).await.expect("sent"));
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
        self.fill();
        self.runtime.block_on(async {
            let mut messages = self.messages().await;
            let began = Instant::now();
            for _ in 0..READ {
                messages.next().await.expect("a message").expect("a message");
            }
            READ as f64 / began.elapsed().as_secs_f64()
        })
    }

    fn bridge_in(&self) -> f64 {
        self.fill();
        let directory = self.path("in");
        let mut receiver = Options::new().create_receiver(&directory).expect("a channel");
        let channel = format!("path:{}", directory.display());
        let running = self.bridge("in", &["in", "bench.>", &channel]);
        let began = Instant::now();
        (0..READ).for_each(|_| receive(&mut receiver));
        let seconds = began.elapsed().as_secs_f64();
        drop((running, receiver));
        remove(&directory);
        READ as f64 / seconds
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
