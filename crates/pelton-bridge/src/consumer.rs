//! The consumer of `pelton-bridge in`: its settings, its messages with what the server says of each, and what waits in
//! the stream.

use crate::{nats::Nats, status::Status};
use async_nats::{
    Client, Message, StatusCode, Subject, Subscriber,
    jetstream::{
        Context,
        consumer::{AckPolicy, DeliverPolicy, PullConsumer, pull},
    },
};
use bytes::Bytes;
use futures_util::StreamExt as _;
use std::{sync::Arc, time::Duration};

/// Messages and bytes that the server sends ahead: this bounds the bridge's memory, with one message of the largest
/// size for each subject whose parts have not all come.
const AHEAD_MESSAGES: usize = 1024;
const AHEAD_BYTES: usize = 8 << 20;
/// How long a request for messages stands, and how often the server says meanwhile that it does.
const EXPIRES: Duration = Duration::from_secs(20);
const HEARTBEAT: Duration = Duration::from_secs(5);
/// Without a message or a heartbeat for so long, the consumer is gone.
pub const SILENCE_MAX: Duration = Duration::from_secs(2 * HEARTBEAT.as_secs());
/// How often what waits in the stream is counted.
const LAG_INTERVAL: Duration = Duration::from_secs(5);

/// The messages of a consumer.
///
/// The library's own stream gives each message a copy of its context, with a dozen reference counts.
pub struct Reading {
    client: Client,
    messages: Subscriber,
    /// A request for more messages: where it goes, where the messages go, and what it says.
    subject: Subject,
    inbox: Subject,
    request: Bytes,
    bytes_max: usize,
    /// What the server may send before the next request.
    ahead_messages: usize,
    ahead_bytes: usize,
}

impl Reading {
    /// Creates an ephemeral consumer that begins at `sequence`.
    pub async fn begin(nats: &Nats, sequence: u64, subject: String) -> Result<Reading, String> {
        let text = |error: &dyn std::error::Error| error.to_string();
        let stream = nats.jetstream.get_stream_no_info(&nats.stream).await.map_err(|error| text(&error))?;
        let consumer = stream.create_consumer(consumer_from(sequence, subject)).await.map_err(|error| text(&error))?;
        let inbox = Subject::from(nats.client.new_inbox());
        let messages = nats.client.subscribe(inbox.clone()).await.map_err(|error| text(&error))?;
        let bytes_max = AHEAD_BYTES.max(nats.client.server_info().max_payload * 2);
        let request = serde_json::json!({
            "batch": AHEAD_MESSAGES,
            "max_bytes": bytes_max,
            "expires": EXPIRES.as_nanos() as u64,
            "idle_heartbeat": HEARTBEAT.as_nanos() as u64,
        });
        Ok(Reading {
            client: nats.client.clone(),
            messages,
            subject: format!("{}.CONSUMER.MSG.NEXT.{}.{}", nats.api, nats.stream, consumer.cached_info().name).into(),
            inbox,
            request: request.to_string().into(),
            bytes_max,
            ahead_messages: 0,
            ahead_bytes: 0,
        })
    }

    /// The next message; `None`: the server says that there is none yet. Waits for either. Cancel-safe.
    pub async fn next(&mut self) -> Result<Option<(Message, Delivery)>, String> {
        if self.ahead_messages <= AHEAD_MESSAGES / 2 || self.ahead_bytes <= self.bytes_max / 2 {
            let (subject, inbox) = (self.subject.clone(), self.inbox.clone());
            let asking = self.client.publish_with_reply(subject, inbox, self.request.clone());
            asking.await.map_err(|error| error.to_string())?;
            self.ahead_messages += AHEAD_MESSAGES;
            self.ahead_bytes += self.bytes_max;
        }
        let Some(message) = self.messages.next().await else { return Err("the connection is closed".to_owned()) };
        // First: a publisher may have given its message a status.
        if let Some(delivery) = message.reply.as_deref().and_then(Delivery::parse) {
            self.has_come(1, message.length);
            return Ok(Some((message, delivery)));
        }
        let left = |name: &str| message.headers.as_ref()?.get(name)?.as_str().parse().ok();
        match (message.status, left("Nats-Pending-Messages"), left("Nats-Pending-Bytes")) {
            (Some(StatusCode::IDLE_HEARTBEAT), ..) => Ok(None),
            // The request has ended with so much left.
            (Some(StatusCode::TIMEOUT | StatusCode::REQUEST_TERMINATED), Some(messages), Some(bytes)) => {
                self.has_come(messages, bytes);
                Ok(None)
            }
            (Some(status), ..) => {
                Err(format!("the server has ended the consumer: {status} {}", message.description.unwrap_or_default()))
            }
            (None, ..) => Err(format!("the server sent a message without a position, for {:?}", message.reply)),
        }
    }

    fn has_come(&mut self, messages: usize, bytes: usize) {
        self.ahead_messages = self.ahead_messages.saturating_sub(messages);
        self.ahead_bytes = self.ahead_bytes.saturating_sub(bytes);
    }
}

/// What the server says of a message, in the subject for its acknowledgement.
#[derive(Debug, PartialEq, Eq)]
pub struct Delivery {
    /// In the stream.
    pub sequence: u64,
    /// Of the consumer, from 1 on without a gap.
    pub number: u64,
    /// When it was stored, since 1970.
    pub time_ns: i64,
    /// Messages behind it.
    pub pending: u64,
}

impl Delivery {
    /// `$JS.ACK`, with or without two tokens of the domain and the account, then the stream, the consumer, the
    /// deliveries, and these numbers.
    fn parse(reply: &str) -> Option<Delivery> {
        let mut tokens = [&[][..]; 12];
        let mut count = 0;
        for (place, token) in tokens.iter_mut().zip(reply.strip_prefix("$JS.ACK.")?.as_bytes().split(|b| *b == b'.')) {
            *place = token;
            count += 1;
        }
        let first = match count {
            7 => 3,
            9.. => 5,
            _ => return None,
        };
        let number = |at: usize| {
            let token = tokens[first + at];
            let add = |number: u64, digit: &u8| match digit {
                b'0'..=b'9' => number.checked_mul(10)?.checked_add(u64::from(digit - b'0')),
                _ => None,
            };
            if token.is_empty() { None } else { token.iter().try_fold(0, add) }
        };
        Some(Delivery {
            sequence: number(0)?,
            number: number(1)?,
            time_ns: number(2)?.try_into().ok()?,
            pending: number(3)?,
        })
    }
}

/// An ephemeral consumer without acknowledgements.
fn consumer_from(sequence: u64, subject: String) -> pull::Config {
    pull::Config {
        deliver_policy: DeliverPolicy::ByStartSequence { start_sequence: sequence },
        ack_policy: AckPolicy::None,
        filter_subject: subject,
        inactive_threshold: Duration::from_secs(60),
        memory_storage: true,
        num_replicas: 1,
        ..pull::Config::default()
    }
}

/// While messages of the stream wait, counts them again and again: those that are stored while the channel is full are
/// behind no message that was read. The server counts by a consumer that takes nothing.
pub async fn measure_lag(jetstream: Context, name: String, subject: String, status: Arc<Status>) {
    let mut counting: Option<(u64, PullConsumer)> = None;
    loop {
        tokio::time::sleep(LAG_INTERVAL).await;
        let carried = status.carried.get();
        if status.known.get() <= carried {
            counting = None;
            continue;
        }
        let from = status.done.get() + 1;
        let measuring = async {
            let stream = jetstream.get_stream(&name).await.ok()?;
            status.note_mean(&stream.cached_info().state);
            let (base, consumer) = match counting.take() {
                Some((base, mut consumer)) => {
                    consumer.info().await.ok()?;
                    (base, consumer)
                }
                None => (carried, stream.create_consumer(consumer_from(from, subject.clone())).await.ok()?),
            };
            status.known.set(base + consumer.cached_info().num_pending);
            Some((base, consumer))
        };
        // `None`: the server does not answer, or has removed the consumer.
        counting = measuring.await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delivery_is_parsed_in_both_forms_and_a_damaged_one_is_none() {
        let wanted = Delivery { sequence: 12, number: 7, time_ns: 1_700_000_000_123_456_789, pending: 0 };
        let numbers = "1.12.7.1700000000123456789.0";
        for begin in ["$JS.ACK.S.consumer.", "$JS.ACK._.hash.S.consumer.", "$JS.ACK.domain.hash.S.consumer."] {
            assert_eq!(Delivery::parse(&format!("{begin}{numbers}")).as_ref(), Some(&wanted), "{begin}");
        }
        assert_eq!(Delivery::parse(&format!("$JS.ACK._.hash.S.consumer.{numbers}.token.more")), Some(wanted));
        for damaged in [
            "",
            "$JS.ACK.",
            "$JS.ACK.S.consumer.1.12.7.1",
            "$JS.ACK.S.consumer.1.12.x.1.0",
            "$JS.ACK.S.consumer.1..7.1.0",
            "$JS.ACK.S.consumer.1.99999999999999999999.7.1.0",
            "$JS.ACK.S.consumer.1.1.7.9999999999999999999.0",
            "$JS.ACK.S.consumer.1.12.7.1.0.one",
        ] {
            assert_eq!(Delivery::parse(damaged), None, "{damaged}");
        }
    }
}
