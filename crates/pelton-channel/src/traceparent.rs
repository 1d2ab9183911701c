//! The position of a request or a message in a distributed trace, by W3C Trace Context.

use std::fmt::{Display, Formatter};

/// A position in a distributed trace: the trace, the span of the caller or the sender, and flags, as in the header
/// `traceparent` of [W3C Trace Context](https://www.w3.org/TR/trace-context/). pelton transports it and interprets nothing; a library
/// such as OpenTelemetry creates the spans.
///
/// ```
/// use pelton::Traceparent;
/// let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
/// let traceparent = Traceparent::parse(text).unwrap();
/// assert_eq!(traceparent.to_string(), text);
/// assert_eq!(traceparent.span_id(), 0x00f0_67aa_0ba9_02b7_u64.to_be_bytes());
/// assert!(traceparent.is_sampled());
/// // What is not valid is as if it were not there, as W3C demands.
/// assert_eq!(Traceparent::parse("00-00000000000000000000000000000000-00f067aa0ba902b7-01"), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Traceparent {
    trace_id: [u8; 16],
    span_id: [u8; 8],
    flags: u8,
}

/// Bytes of an encoded position, before the payload or the message that it belongs to.
pub(crate) const BYTES: usize = pelton_lane::TRACE_BYTES;
/// The version that this writes. A later one is read as this one, except the invalid 255.
const VERSION: u8 = 0;

impl Traceparent {
    /// A position with these values; `None` if one of the ids is zero, which is invalid.
    pub fn new(trace_id: [u8; 16], span_id: [u8; 8], flags: u8) -> Option<Traceparent> {
        let is_valid = trace_id != [0; 16] && span_id != [0; 8];
        is_valid.then_some(Traceparent { trace_id, span_id, flags })
    }

    /// Reads the text of a header `traceparent`; `None` if it is not valid: continue as if there were none. Of a later
    /// version than 00 it takes the fields that it knows.
    pub fn parse(text: impl AsRef<[u8]>) -> Option<Traceparent> {
        let text = text.as_ref();
        let is_dash = |at: usize| text.get(at) == Some(&b'-');
        let [version] = hex(text.get(..2)?)?;
        let is_whole = text.len() == 55 || version > VERSION && is_dash(55);
        if version == u8::MAX || !is_whole || !(is_dash(2) && is_dash(35) && is_dash(52)) {
            return None;
        }
        let [flags] = hex(&text[53..55])?;
        Traceparent::new(hex(&text[3..35])?, hex(&text[36..52])?, flags)
    }

    /// The trace. Never zero.
    pub fn trace_id(&self) -> [u8; 16] {
        self.trace_id
    }

    /// The caller's span: the parent of the spans that follow. Never zero.
    pub fn span_id(&self) -> [u8; 8] {
        self.span_id
    }

    /// All flags: bit 0 is that of [`Traceparent::is_sampled`].
    pub fn flags(&self) -> u8 {
        self.flags
    }

    /// Whether the caller may have recorded its span.
    pub fn is_sampled(&self) -> bool {
        self.flags & 1 != 0
    }

    /// The bytes of `spec/call.md`, "Traceparent".
    #[doc(hidden)]
    pub fn encode(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        (bytes[0], bytes[1]) = (VERSION, self.flags);
        bytes[8..16].copy_from_slice(&self.span_id);
        bytes[16..].copy_from_slice(&self.trace_id);
        bytes
    }

    /// Reads such bytes of a peer; `None` if they are not valid: as if there were none.
    #[doc(hidden)]
    pub fn decode(bytes: &[u8; BYTES]) -> Option<Traceparent> {
        if bytes[0] == u8::MAX {
            return None;
        }
        let span_id = std::array::from_fn(|index| bytes[8 + index]);
        Traceparent::new(std::array::from_fn(|index| bytes[16 + index]), span_id, bytes[1])
    }
}

/// `00-TRACE-SPAN-FLAGS`, the text of the header.
impl Display for Traceparent {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let put = |f: &mut Formatter<'_>, bytes: &[u8]| bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"));
        write!(f, "{VERSION:02x}-")?;
        put(f, &self.trace_id)?;
        f.write_str("-")?;
        put(f, &self.span_id)?;
        write!(f, "-{:02x}", self.flags)
    }
}

/// Reads lower-case hexadecimal digits, two for each byte.
fn hex<const N: usize>(text: &[u8]) -> Option<[u8; N]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    (text.len() == 2 * N).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn text_and_bytes_say_the_same() {
        let traceparent = Traceparent::parse(TEXT).unwrap();
        assert_eq!(traceparent.to_string(), TEXT);
        let bytes = traceparent.encode();
        assert_eq!(bytes[..2], [0, 1]);
        assert_eq!(bytes[2..8], [0; 6]);
        assert_eq!(bytes[8..], hex::<24>(b"b7ad6b71692033310af7651916cd43dd8448eb211c80319c").unwrap());
        assert_eq!(Traceparent::decode(&bytes), Some(traceparent));
        let mut later = bytes;
        (later[0], later[2], later[7]) = (7, 9, 9);
        assert_eq!(Traceparent::decode(&later), Some(traceparent), "a later version, and bytes that it may define");
    }

    #[test]
    fn what_w3c_calls_invalid_is_none() {
        let valid = Traceparent::parse(TEXT).unwrap().encode();
        for (at, value) in [(0, vec![255]), (8, vec![0; 8]), (16, vec![0; 16])] {
            let mut bytes = valid;
            bytes[at..at + value.len()].copy_from_slice(&value);
            assert_eq!(Traceparent::decode(&bytes), None, "{at}");
        }
        let later = TEXT.replacen("00-", "01-", 1);
        for valid in [later.clone(), format!("{later}-more"), TEXT.replace("-01", "-ff")] {
            assert!(Traceparent::parse(&valid).is_some(), "{valid}");
        }
        for invalid in [
            String::new(),
            TEXT[..54].to_owned(),
            format!("{TEXT}-more"),
            format!("{later}more"),
            TEXT.replacen("00-", "ff-", 1),
            TEXT.replace('-', "_"),
            TEXT.to_uppercase(),
            TEXT.replace("af", "a:"),
            TEXT.replace("b7ad6b7169203331", "0000000000000000"),
            TEXT.replace("0af7651916cd43dd8448eb211c80319c", "00000000000000000000000000000000"),
        ] {
            assert_eq!(Traceparent::parse(&invalid), None, "{invalid}");
        }
    }
}
