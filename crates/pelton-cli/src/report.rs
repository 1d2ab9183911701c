//! The report of `send`, `recv`, `pub`, `sub`, `flush`, `record` and `replay` with `--json`.

use crate::failure::Failure;
use serde::Serialize;

/// The object.
#[derive(Serialize)]
pub struct Report<'a> {
    /// `send`, `recv`, `pub`, `sub`, `flush`, `record` or `replay`.
    pub command: &'static str,
    /// The channel's name, as given.
    pub name: &'a str,
    /// Messages that this side sent or received.
    pub messages: u64,
    /// Bytes of their payloads.
    pub bytes: u64,
    /// From the connection to the end.
    pub seconds: f64,
    /// Why it ended.
    pub ended: Ended,
    /// The text on standard error, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<&'a str>,
    /// Messages committed and not released by the receiver.
    pub unreleased: u64,
    /// The library's own counters of this side.
    pub counters: Counters,
    /// `replay` at a pace: how much later than due the messages were sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lateness_ns: Option<Lateness>,
    /// `sub`: messages that it missed, or skipped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missed: Option<u64>,
}

/// How late messages were, in nanoseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Lateness {
    pub p50: u64,
    pub p99: u64,
    pub max: u64,
}

/// Why a command ended, as in `--json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// Every message was sent and released, or received, and the channel closed.
    Closed,
    /// The receiver has received `--count` messages.
    Counted,
    /// The receiver closed before it released every message.
    PeerClosed,
    /// The other side died without closing.
    PeerDied,
    /// A signal.
    Interrupted,
    /// The reader of standard output closed it.
    OutputClosed,
    /// Another reason, in `error`.
    Failed,
}

impl Ended {
    /// The reason for a failure that does not concern the other side.
    pub fn by(failure: &Failure) -> Ended {
        match failure {
            Failure::Signal(_) => Ended::Interrupted,
            Failure::OutputClosed => Ended::OutputClosed,
            _ => Ended::Failed,
        }
    }
}

/// `pelton::Counters`, as JSON.
#[derive(Serialize)]
pub struct Counters {
    messages: u64,
    bytes: u64,
    waits: u64,
    sleeps: u64,
    wakes_sent: u64,
    depth_max: u64,
}

impl From<pelton::Counters> for Counters {
    fn from(counters: pelton::Counters) -> Counters {
        let pelton::Counters { messages, bytes, waits, sleeps, wakes_sent, depth_max, .. } = counters;
        Counters { messages, bytes, waits, sleeps, wakes_sent, depth_max }
    }
}

impl Report<'_> {
    /// The object, as one line.
    pub fn line(&self) -> String {
        let mut line = serde_json::to_string(self).expect("numbers and text");
        line.push('\n');
        line
    }
}
