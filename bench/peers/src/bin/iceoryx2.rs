//! iceoryx2: publish-subscribe over shared memory, by loaned samples.
//!
//! As its documentation recommends for throughput and latency: `ipc::Service`, a publisher that loans uninitialised
//! slices (the only copy writes the message), a subscriber that polls `receive` (`--wait spin`, its best: its own
//! benchmarks poll, on a core of their own). `enable_safe_overflow(false)` and `RetryUntilDelivered` prevent losses. A
//! subscriber's buffer has 1,024 samples: a guess that favours it, because the messages in flight then fit the
//! second-level cache. Large messages to many have as many samples as fit into 64 MiB, pelton's lane, at least 16. One
//! publisher, as many subscribers as receive, a node for each: with larger maxima it would prepare for more.
//!
//! `--wait block` is its other way: an event after each message wakes the receivers; that is a system call for each.
//! Several receivers that poll yield the processor each time, as they have none of their own.
//! The root is the run's own directory: a killed run leaves nothing behind.

use std::{process::ExitCode, rc::Rc};

use anyhow::{Result, anyhow, ensure};
use iceoryx2::{
    port::{
        listener::Listener, notifier::Notifier, publisher::Publisher, subscriber::Subscriber,
        update_connections::UpdateConnections,
    },
    prelude::*,
    service::port_factory,
};
use pelton_bench::{
    endpoints::{Receiving, Sending, Transport},
    parameters::{Job, Wait},
};
use pelton_bench_peers::{open_when_there, processes, spins};

fn main() -> ExitCode {
    // It logs missing files while the other side is not there yet; those are no errors.
    set_log_level(LogLevel::Fatal);
    processes::<Iceoryx>()
}

struct Iceoryx;

type Messages = port_factory::publish_subscribe::PortFactory<ipc::Service, [u8], ()>;
type Events = port_factory::event::PortFactory<ipc::Service>;

/// Samples that a subscriber holds at most.
fn samples(job: &Job) -> usize {
    let pool = (64 << 20) / job.sizes.max.max(1) as usize / job.receivers as usize;
    pool.clamp(16, 1024)
}

fn why(what: &'static str) -> impl Fn(Box<dyn std::error::Error>) -> anyhow::Error {
    move |error| anyhow!("{what}: {error}")
}

fn node(job: &Job) -> Result<Rc<Node<ipc::Service>>> {
    spins(job)?;
    let mut config = Config::default();
    // Shared memory is named, not placed: the prefix distinguishes the runs, and the program removes files by it.
    let name = job.directory.file_name().unwrap_or_default().to_string_lossy().into_owned();
    config.global.prefix = FileName::new(format!("iox2_{name}_").as_bytes()).map_err(|e| anyhow!("a prefix: {e:?}"))?;
    config
        .global
        .set_root_path(&Path::new(job.directory.to_string_lossy().as_bytes()).map_err(|e| anyhow!("a root: {e:?}"))?);
    NodeBuilder::new().config(&config).create::<ipc::Service>().map(Rc::new).map_err(|e| why("making a node")(e.into()))
}

/// The services that both sides share: of the messages, and of the events if they wait by those.
fn services(job: &Job, node: &Node<ipc::Service>, direction: &str) -> Result<(Messages, Option<Events>)> {
    let service = ServiceName::new(direction).map_err(|e| anyhow!("{e:?}"))?;
    let messages = node
        .service_builder(&service)
        .publish_subscribe::<[u8]>()
        .enable_safe_overflow(false)
        .subscriber_max_buffer_size(samples(job))
        .subscriber_max_borrowed_samples(1)
        .history_size(0)
        .max_publishers(1)
        .max_subscribers(job.receivers as usize)
        .max_nodes(1 + job.receivers as usize)
        .open_or_create()
        .map_err(|e| why("the service")(e.into()))?;
    let events = match job.wait {
        Wait::Block => {
            let events = node.service_builder(&service).event();
            let events = events.max_listeners(job.receivers as usize).max_nodes(1 + job.receivers as usize);
            Some(events.open_or_create().map_err(|e| why("events")(e.into()))?)
        }
        _ => None,
    };
    Ok((messages, events))
}

fn sender(job: &Job, node: Rc<Node<ipc::Service>>, direction: &str) -> Result<Sender> {
    let (factory, events) = services(job, &node, direction)?;
    let publisher = factory
        .publisher_builder()
        .initial_max_slice_len((job.sizes.max as usize).max(1))
        .max_loaned_samples(1)
        .backpressure_strategy(BackpressureStrategy::RetryUntilDelivered)
        .create()
        .map_err(|e| why("a publisher")(e.into()))?;
    let notifier = match events {
        Some(events) => {
            let notifier = events.notifier_builder().create().map_err(|e| why("a notifier")(e.into()))?;
            open_when_there("the listeners", || match events.dynamic_config().number_of_listeners() {
                count if count < job.receivers as usize => Err("not all are there yet"),
                _ => Ok(()),
            })?;
            Some(notifier)
        }
        None => None,
    };
    // A message published before anybody subscribes is lost.
    open_when_there("the subscribers", || match factory.dynamic_config().number_of_subscribers() {
        count if count < job.receivers as usize => Err("not all are there yet"),
        _ => UpdateConnections::update_connections(&publisher).map_err(|_| "it cannot be connected to"),
    })?;
    Ok(Sender { publisher, notifier, receivers: job.receivers as usize, _node: node })
}

fn receiver(job: &Job, node: Rc<Node<ipc::Service>>, direction: &str) -> Result<Receiver> {
    let (factory, events) = services(job, &node, direction)?;
    let listener = events.map(|events| events.listener_builder().create()).transpose();
    let listener = listener.map_err(|e| why("a listener")(e.into()))?;
    let subscriber =
        factory.subscriber_builder().buffer_size(samples(job)).create().map_err(|e| why("a subscriber")(e.into()))?;
    let buffer = (!job.in_place()).then(|| Vec::with_capacity(job.sizes.max as usize));
    Ok(Receiver { subscriber, listener, yields: job.receivers > 1, buffer, _node: node })
}

impl Transport for Iceoryx {
    type Sending = Sender;
    type Receiving = Receiver;

    fn sending(job: &Job, direction: &str) -> Result<Sender> {
        sender(job, node(job)?, direction)
    }

    fn receiving(job: &Job, direction: &str) -> Result<Receiver> {
        receiver(job, node(job)?, direction)
    }

    fn both(job: &Job) -> Result<(Sender, Receiver)> {
        let node = node(job)?;
        let (out, back) = job.directions();
        let receiver = receiver(job, node.clone(), back)?;
        Ok((sender(job, node, out)?, receiver))
    }
}

struct Sender {
    publisher: Publisher<ipc::Service, [u8], ()>,
    notifier: Option<Notifier<ipc::Service>>,
    receivers: usize,
    _node: Rc<Node<ipc::Service>>,
}

impl Sending for Sender {
    #[inline]
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        let Sender { publisher, notifier, receivers, .. } = self;
        let sample = publisher.loan_slice_uninit(payload.len()).map_err(|e| anyhow!("loaning: {e}"))?;
        let delivered = sample.write_from_slice(payload).send().map_err(|e| anyhow!("sending: {e}"))?;
        ensure!(delivered == *receivers, "a subscriber is gone");
        if let Some(notifier) = notifier {
            notifier.notify().map_err(|e| anyhow!("notifying: {e}"))?;
        }
        Ok(())
    }
}

struct Receiver {
    subscriber: Subscriber<ipc::Service, [u8], ()>,
    listener: Option<Listener<ipc::Service>>,
    /// More processes than processors busy-poll.
    yields: bool,
    buffer: Option<Vec<u8>>,
    _node: Rc<Node<ipc::Service>>,
}

impl Receiving for Receiver {
    #[inline]
    fn receive<R>(&mut self, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let Receiver { subscriber, listener, yields, buffer, .. } = self;
        let sample = loop {
            if let Some(sample) = subscriber.receive().map_err(|e| anyhow!("receiving: {e}"))? {
                break sample;
            }
            match listener {
                // An event that arrived before the poll stays pending until the wait.
                Some(listener) => {
                    listener.blocking_wait(|_| ()).map_err(|e| anyhow!("waiting: {e}"))?;
                }
                None if *yields => std::thread::yield_now(),
                None => std::hint::spin_loop(),
            }
        };
        Ok(match buffer {
            Some(buffer) => {
                buffer.clear();
                buffer.extend_from_slice(sample.payload());
                drop(sample);
                look(buffer)
            }
            None => look(sample.payload()),
        })
    }
}
