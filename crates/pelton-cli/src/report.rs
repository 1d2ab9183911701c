//! What `send` and `recv` report at their end with `--json`.

use crate::failure::Failure;
use serde::Serialize;

/// One object a run.
#[derive(Serialize)]
pub struct Report<'a> {
    /// `send` or `recv`.
    pub command: &'static str,
    /// The channel's name, as given.
    pub name: &'a str,
    /// Messages that passed this side.
    pub messages: u64,
    /// Their payloads together.
    pub bytes: u64,
    /// From the connection to the end.
    pub seconds: f64,
    /// How it ended.
    pub ended: Ended,
    /// What else there is to say about the end: the text of standard error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<&'a str>,
    /// Messages committed and not released by the receiver.
    pub unreleased: u64,
    /// The library's own counters of this side.
    pub counters: Counters,
}

/// How a channel ended, in the words of `--json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// All was sent and released, or received; closed in order.
    Closed,
    /// As many messages as `--count` asks for were received.
    Counted,
    /// The receiver closed before all was sent.
    PeerClosed,
    /// The other side died without closing.
    PeerDied,
    /// A signal asked for the end.
    Interrupted,
    /// The reader of standard output went away.
    OutputClosed,
    /// Anything else; `error` says what.
    Failed,
}

impl Ended {
    /// The word for a failure that is not about the other side.
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
        let pelton::Counters { messages, bytes, waits, sleeps, wakes_sent, depth_max } = counters;
        Counters { messages, bytes, waits, sleeps, wakes_sent, depth_max }
    }
}

impl Report<'_> {
    /// The object, on a line of its own.
    pub fn line(&self) -> String {
        let mut line = serde_json::to_string(self).expect("numbers and text");
        line.push('\n');
        line
    }
}
