//! What a bridge writes into a NATS message: headers that say which messages of which lane it carries, and the body
//! of a packed message. The body of any other message is the payload, or a part of it.
//!
//! | header | value |
//! |---|---|
//! | `Pelton-Bridge` | the name of the bridge (`--id`) |
//! | `Pelton-Run` | one process of it: 16 hexadecimal digits |
//! | `Pelton-Lane` | the lane of the sender: 32 hexadecimal digits |
//! | `Pelton-Generation` | the generation of the lane's sender |
//! | `Pelton-Number` | the number of the (last) message in its lane |
//! | `Pelton-Count` | a packed message: how many messages the body has |
//! | `Pelton-Part` | a part of a large message: `offset/total`, in bytes |
//! | `traceparent` | of the message, or of the first one in a packed body: W3C Trace Context |
//! | `Pelton-Doubt` | lanes of a predecessor of this process whose last message may be unreleased: see [`Doubt`] |
//!
//! A packed body is, for each message, its length as a little-endian u32 and its bytes.

use async_nats::HeaderMap;
use bytes::{Bytes, BytesMut};
use pelton::Traceparent;
use std::str::FromStr;

/// Every bridged message has this header.
pub const BRIDGE: &str = "Pelton-Bridge";
const RUN: &str = "Pelton-Run";
const LANE: &str = "Pelton-Lane";
const GENERATION: &str = "Pelton-Generation";
const NUMBER: &str = "Pelton-Number";
const COUNT: &str = "Pelton-Count";
const PART: &str = "Pelton-Part";
const DOUBT: &str = "Pelton-Doubt";
/// Not a bridge's own: other publishers and readers use it too.
pub const TRACEPARENT: &str = "traceparent";

/// Bytes of the headers with the longest numbers, without the bridge's name and the doubts; the server counts them.
pub const HEADER_BYTES: usize = 512;
/// The longest name of a bridge.
pub const ID_BYTES_MAX: usize = 200;

/// The identity of a lane.
pub type Lane = [u64; 2];

/// How far a lane is known to be stored: up to message `number`, of which the first `end` of `total` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doubt {
    pub lane: Lane,
    pub number: u32,
    pub end: u64,
    pub total: u64,
}

impl Doubt {
    /// Whether the whole message is stored.
    pub fn is_whole(&self) -> bool {
        self.end == self.total
    }
}

/// Where a NATS message comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    pub bridge: String,
    pub run: u64,
    pub lane: Lane,
    pub generation: u32,
    /// The number of the last message in it.
    pub number: u32,
    /// A packed message.
    pub count: Option<u32>,
    /// A part: its first byte, and the bytes of the whole.
    pub part: Option<(u64, u64)>,
    /// Of the message, or of the first one in a packed body.
    pub traceparent: Option<Traceparent>,
    pub doubts: Vec<Doubt>,
}

/// A message on the subject that is not of a bridge, or is damaged.
#[derive(Debug, PartialEq, Eq)]
pub enum NotBridged {
    /// It has no header of a bridge.
    Foreign,
    /// Its headers contradict each other: this one is missing or wrong.
    Damaged(&'static str),
}

impl Origin {
    /// The headers.
    pub fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(BRIDGE, self.bridge.as_str());
        headers.insert(RUN, format!("{:016x}", self.run));
        headers.insert(LANE, lane_text(self.lane));
        headers.insert(GENERATION, self.generation.to_string());
        headers.insert(NUMBER, self.number.to_string());
        if let Some(count) = self.count {
            headers.insert(COUNT, count.to_string());
        }
        if let Some((offset, total)) = self.part {
            headers.insert(PART, format!("{offset}/{total}"));
        }
        if let Some(traceparent) = self.traceparent {
            headers.insert(TRACEPARENT, traceparent.to_string());
        }
        if !self.doubts.is_empty() {
            let doubts: Vec<String> = self
                .doubts
                .iter()
                .map(|doubt| format!("{}:{}:{}/{}", lane_text(doubt.lane), doubt.number, doubt.end, doubt.total))
                .collect();
            headers.insert(DOUBT, doubts.join(" "));
        }
        headers
    }

    /// Parses the headers of a message.
    ///
    /// # Errors
    /// [`NotBridged`].
    pub fn parse(headers: &HeaderMap) -> Result<Origin, NotBridged> {
        let text = |name: &'static str| headers.get(name).map(|value| value.as_str());
        let bridge = text(BRIDGE).ok_or(NotBridged::Foreign)?.to_owned();
        let part = text(PART)
            .map(|text| {
                let (offset, total) = pair(text, '/')?;
                (offset < total).then_some((offset, total))
            })
            .map_or(Ok(None), |part| part.map(Some).ok_or(NotBridged::Damaged(PART)))?;
        let count = match text(COUNT) {
            None => None,
            Some(text) => {
                let count = text.parse().ok().filter(|count| *count > 0 && part.is_none());
                Some(count.ok_or(NotBridged::Damaged(COUNT))?)
            }
        };
        Ok(Origin {
            bridge,
            run: text(RUN).and_then(|text| u64::from_str_radix(text, 16).ok()).ok_or(NotBridged::Damaged(RUN))?,
            lane: text(LANE).and_then(parse_lane).ok_or(NotBridged::Damaged(LANE))?,
            generation: text(GENERATION).and_then(parsed).ok_or(NotBridged::Damaged(GENERATION))?,
            number: text(NUMBER).and_then(parsed).filter(|number| *number > 0).ok_or(NotBridged::Damaged(NUMBER))?,
            count,
            part,
            traceparent: traceparent(headers),
            doubts: text(DOUBT)
                .map_or(Some(Vec::new()), |text| text.split(' ').map(parse_doubt).collect())
                .ok_or(NotBridged::Damaged(DOUBT))?,
        })
    }

    /// How far this message brings its lane; `bytes` is the length of its body.
    pub fn reached(&self, bytes: usize) -> Doubt {
        let (end, total) = self.part.map_or((0, 0), |(offset, total)| (offset + bytes as u64, total));
        Doubt { lane: self.lane, number: self.number, end, total }
    }
}

/// That of a message of any publisher. One that is not valid is as none.
pub fn traceparent(headers: &HeaderMap) -> Option<Traceparent> {
    Traceparent::parse(headers.get(TRACEPARENT)?.as_str())
}

fn parsed<T: FromStr>(text: &str) -> Option<T> {
    text.parse().ok()
}

fn pair(text: &str, between: char) -> Option<(u64, u64)> {
    let (one, other) = text.split_once(between)?;
    Some((parsed(one)?, parsed(other)?))
}

/// A lane as text.
pub fn lane_text(lane: Lane) -> String {
    format!("{:016x}{:016x}", lane[0], lane[1])
}

fn parse_lane(text: &str) -> Option<Lane> {
    let word = |range| u64::from_str_radix(text.get(range)?, 16).ok();
    (text.len() == 32).then_some(())?;
    Some([word(0..16)?, word(16..32)?])
}

fn parse_doubt(text: &str) -> Option<Doubt> {
    let mut parts = text.splitn(3, ':');
    let lane = parse_lane(parts.next()?)?;
    let number = parsed(parts.next()?)?;
    let (end, total) = pair(parts.next()?, '/')?;
    (end <= total).then_some(Doubt { lane, number, end, total })
}

/// Appends a message to a packed body.
pub fn pack(body: &mut BytesMut, payload: &[u8]) {
    body.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    body.extend_from_slice(payload);
}

/// The messages of a packed body, without a copy. `None`: it has not exactly `count` messages.
pub fn unpack(mut body: Bytes, count: u32) -> Option<Vec<Bytes>> {
    let mut messages = Vec::new();
    while !body.is_empty() {
        let bytes = u32::from_le_bytes(*body.first_chunk::<4>()?) as usize;
        if body.len() - 4 < bytes || messages.len() == count as usize {
            return None;
        }
        let _ = body.split_to(4);
        messages.push(body.split_to(bytes));
    }
    (messages.len() == count as usize).then_some(messages)
}

/// Whether message `number` of a lane is `last` or an earlier one. Numbers are modulo 2^32.
pub fn is_at_most(number: u32, last: u32) -> bool {
    last.wrapping_sub(number) as i32 >= 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin() -> Origin {
        Origin {
            bridge: "host/events".to_owned(),
            run: 77,
            lane: [1, u64::MAX],
            generation: 3,
            number: u32::MAX,
            count: None,
            part: None,
            traceparent: None,
            doubts: Vec::new(),
        }
    }

    #[test]
    fn headers_say_what_they_were_made_from() {
        let doubt = Doubt { lane: [3, 4], number: 9, end: 5, total: 10 };
        for origin in [
            origin(),
            Origin { count: Some(4), traceparent: Traceparent::new([1; 16], [2; 8], 1), ..origin() },
            Origin { part: Some((1 << 40, u64::MAX)), doubts: vec![doubt, Doubt { end: 10, ..doubt }], ..origin() },
        ] {
            let headers = origin.headers();
            assert_eq!(Origin::parse(&headers), Ok(origin));
            let bytes: usize =
                headers.iter().map(|(name, values)| name.to_string().len() + 4 + values[0].as_str().len()).sum();
            assert!(bytes < HEADER_BYTES + ID_BYTES_MAX, "{bytes}");
        }
    }

    #[test]
    fn foreign_and_damaged_headers_are_different_errors() {
        assert_eq!(Origin::parse(&HeaderMap::new()), Err(NotBridged::Foreign));
        for (name, value) in [
            (RUN, "x"),
            (LANE, "12"),
            (LANE, "000000000000000g0000000000000000"),
            (LANE, "\u{e9}00000000000000000000000000000\u{e9}"),
            (GENERATION, "-1"),
            (NUMBER, "0"),
            (COUNT, "0"),
            (PART, "5"),
            (PART, "7/7"),
            (DOUBT, "1:2"),
            (DOUBT, ""),
        ] {
            let mut headers = origin().headers();
            headers.insert(name, value);
            assert_eq!(Origin::parse(&headers), Err(NotBridged::Damaged(name)), "{name} {value}");
        }
    }

    #[test]
    fn a_packed_body_has_exactly_its_messages() {
        let mut body = BytesMut::new();
        let messages = [&b""[..], b"one", b"", b"four"];
        messages.iter().for_each(|message| pack(&mut body, message));
        let body = body.freeze();
        assert_eq!(unpack(body.clone(), 4).unwrap(), messages);
        assert_eq!(unpack(Bytes::new(), 0), Some(Vec::new()));
        for count in [0, 3, 5] {
            assert_eq!(unpack(body.clone(), count), None);
        }
        for end in 1..body.len() {
            let cut = unpack(body.slice(..end), 4);
            assert_eq!(cut, None, "{end}");
        }
    }

    #[test]
    fn numbers_are_compared_modulo_their_range() {
        assert!(is_at_most(5, 5) && is_at_most(u32::MAX, 1) && !is_at_most(6, 5) && !is_at_most(1, u32::MAX));
    }
}
