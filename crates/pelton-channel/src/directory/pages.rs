//! The contents of a channel's files: the channel's header, and the preamble of every page.

use crate::error::{Error, Result};
use crate::packet::{BROADCAST_CHANNEL, TRACED_MESSAGES};
use pelton_lane::{
    ChannelPage, LANES_MAX, LAYOUT_SIGNATURE, MAGIC_CHANNEL, Preamble, SEGMENT_BYTES, WIRE_VERSION, capacity_is_valid,
    fnv1a, message_bytes_limit, traced_message_bytes_limit,
};
use std::io::ErrorKind;
use std::mem::offset_of;

pub(super) const CHANNEL: &str = "channel";
/// The length of the header: the checked part of the file `channel`.
pub(super) const HEADER_BYTES: usize = 144;
/// The part of the header that a recovery writes: everything before the count of lanes.
pub(super) const RECOVERED_BYTES: usize = 120;
pub(super) const LANES_AT: usize = offset_of!(ChannelPage, lanes);

/// The advice in errors about an invalid file.
pub(super) const DAMAGED: &str = "it is damaged: restore it, or remove the channel and make it anew";

/// The header of the file `channel`, read once.
#[derive(Clone, Debug)]
pub(super) struct Header {
    pub(super) capacity: u64,
    pub(super) message_bytes_max: u64,
    pub(super) lanes_max: u32,
    pub(super) mode: u32,
    pub(super) boot_id: [u8; 16],
    /// Whether it requires [`TRACED_MESSAGES`].
    pub(super) is_traced: bool,
    /// Whether it is a broadcast, which has other files: it requires [`BROADCAST_CHANNEL`].
    pub(super) is_broadcast: bool,
}

impl Header {
    /// The bytes of the header for a channel with one lane.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; page_bytes(size_of::<ChannelPage>(), rustix::param::page_size())];
        let mut put = |offset: usize, value: &[u8]| bytes[offset..offset + value.len()].copy_from_slice(value);
        put(offset_of!(ChannelPage, preamble.magic), &MAGIC_CHANNEL.to_le_bytes());
        put(offset_of!(ChannelPage, preamble.wire_version), &WIRE_VERSION.to_le_bytes());
        put(offset_of!(ChannelPage, preamble.segment_bytes), &(SEGMENT_BYTES as u32).to_le_bytes());
        put(offset_of!(ChannelPage, preamble.layout_signature), &LAYOUT_SIGNATURE.to_le_bytes());
        put(offset_of!(ChannelPage, capacity), &self.capacity.to_le_bytes());
        put(offset_of!(ChannelPage, message_bytes_max), &self.message_bytes_max.to_le_bytes());
        put(offset_of!(ChannelPage, lanes_max), &self.lanes_max.to_le_bytes());
        put(offset_of!(ChannelPage, mode), &self.mode.to_le_bytes());
        put(offset_of!(ChannelPage, boot_id), &self.boot_id);
        put(LANES_AT, &1u32.to_le_bytes());
        let features = if self.is_traced { TRACED_MESSAGES } else { 0 };
        let features = features | if self.is_broadcast { BROADCAST_CHANNEL } else { 0 };
        put(offset_of!(ChannelPage, features_required), &features.to_le_bytes());
        let checksum = fnv1a(&bytes[..ChannelPage::CHECKED_BYTES]);
        bytes[offset_of!(ChannelPage, checksum)..][..8].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> std::result::Result<Header, String> {
        check_preamble(bytes, MAGIC_CHANNEL).map_err(|problem| format!("{CHANNEL} {problem}"))?;
        let found = u64_at(bytes, offset_of!(ChannelPage, checksum));
        let wanted = fnv1a(&bytes[..ChannelPage::CHECKED_BYTES]);
        if found != wanted {
            return Err(format!("{CHANNEL} has checksum {found:#018x}, its bytes come to {wanted:#018x}: {DAMAGED}"));
        }
        let features = u64_at(bytes, offset_of!(ChannelPage, features_required));
        let header = Header {
            is_traced: features & TRACED_MESSAGES != 0,
            is_broadcast: features & BROADCAST_CHANNEL != 0,
            capacity: u64_at(bytes, offset_of!(ChannelPage, capacity)),
            message_bytes_max: u64_at(bytes, offset_of!(ChannelPage, message_bytes_max)),
            lanes_max: u32_at(bytes, offset_of!(ChannelPage, lanes_max)),
            mode: u32_at(bytes, offset_of!(ChannelPage, mode)),
            boot_id: array_at(bytes, offset_of!(ChannelPage, boot_id)),
        };
        let unknown = features & !(TRACED_MESSAGES | BROADCAST_CHANNEL);
        if unknown != 0 {
            return Err(format!(
                "{CHANNEL} requires feature {}, which this version of pelton does not have: use the version that made it, or a later one",
                unknown.trailing_zeros()
            ));
        }
        match header.problem() {
            Some((what, found, wanted)) => Err(format!("{CHANNEL} says {what} {found}, wanted {wanted}: {DAMAGED}")),
            None => Ok(header),
        }
    }

    /// Checks a header that comes from options, before a file is created.
    pub(super) fn check_wanted(&self) -> Result<()> {
        match self.problem() {
            Some((option, found, wanted)) => Err(Error::Option { option, found, wanted }),
            None => Ok(()),
        }
    }

    pub(super) fn problem(&self) -> Option<(&'static str, u64, String)> {
        let limit_of = if self.is_traced { traced_message_bytes_limit } else { message_bytes_limit };
        let limit = limit_of(self.capacity);
        if !capacity_is_valid(self.capacity) {
            return Some(("capacity", self.capacity, "a multiple of 64 from 4096 to 16 GiB".to_owned()));
        }
        if self.message_bytes_max > limit {
            return Some(("message_bytes_max", self.message_bytes_max, format!("at most {limit}")));
        }
        if self.lanes_max == 0 || self.lanes_max > LANES_MAX {
            return Some(("lanes_max", self.lanes_max.into(), format!("1 to {LANES_MAX}")));
        }
        if self.mode & !0o777 != 0 || self.mode & 0o700 != 0o700 {
            return Some(("mode", self.mode.into(), format!("{} (0o700) to {} (0o777)", 0o700, 0o777)));
        }
        None
    }
}

/// The identifier of the current boot.
pub(super) fn boot_id() -> Result<[u8; 16]> {
    const FILE: &str = "/proc/sys/kernel/random/boot_id";
    let text =
        std::fs::read_to_string(FILE).map_err(Error::system(format!("reading {FILE}, which detects reboots")))?;
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let digit = |i: usize| (digits[i] as char).to_digit(16).unwrap_or(0) as u8;
    if digits.len() != 32 {
        let source =
            std::io::Error::new(ErrorKind::Unsupported, format!("found {text:?}, wanted 32 hexadecimal digits"));
        return Err(Error::System { what: format!("reading {FILE}"), error: source });
    }
    Ok(std::array::from_fn(|i| digit(2 * i) << 4 | digit(2 * i + 1)))
}

/// Checks that a page begins with this magic number, and has this version's layout.
pub(super) fn check_preamble(bytes: &[u8], magic: u64) -> std::result::Result<(), String> {
    check_preamble_of(bytes, Preamble::new(magic))
}

/// Checks that a page begins with this preamble.
pub(super) fn check_preamble_of(bytes: &[u8], wanted: Preamble) -> std::result::Result<(), String> {
    let Preamble { magic, wire_version, segment_bytes, layout_signature } = wanted;
    let found = u64_at(bytes, offset_of!(Preamble, magic));
    if found != magic {
        let text = |magic: u64| magic.to_le_bytes().escape_ascii().to_string();
        return Err(format!("begins with \"{}\", wanted \"{}\": {DAMAGED}", text(found), text(magic)));
    }
    let found =
        (u32_at(bytes, offset_of!(Preamble, wire_version)), u64_at(bytes, offset_of!(Preamble, layout_signature)));
    if found != (wire_version, layout_signature) {
        return Err(format!(
            "is of wire version {} with layout {:#018x}, wanted {wire_version} with {layout_signature:#018x}: read it to its end with the version of pelton that made it, then make it anew",
            found.0, found.1
        ));
    }
    let found = u32_at(bytes, offset_of!(Preamble, segment_bytes));
    if found != segment_bytes {
        return Err(format!("says that it has {found} bytes, wanted {segment_bytes}: {DAMAGED}"));
    }
    Ok(())
}

/// The bytes of a new page in its file.
pub(super) fn bytes_of<Page>(page: Page) -> Vec<u8> {
    let mut bytes = vec![0; page_bytes(size_of::<Page>(), rustix::param::page_size())];
    // SAFETY: the vector is at least as long as the page, which is words without padding between them.
    unsafe { bytes.as_mut_ptr().cast::<Page>().write_unaligned(page) };
    bytes
}

/// Rounds up to whole memory pages, so that the disk has a block for each page that is written later.
pub(super) fn page_bytes(bytes: usize, page: usize) -> usize {
    bytes.next_multiple_of(page).min(SEGMENT_BYTES as usize)
}

pub(super) fn array_at<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[offset + i])
}

pub(super) fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, offset))
}

pub(super) fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, offset))
}
