//! `pelton cat`: prints the messages of record files, or checks the files.

use crate::{
    failure::{Failure, print_stderr},
    frame::Framing,
    output::{json, print},
};
use clap::Args;
use pelton::{Error, FileChunk, RecordReader};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::SystemTime,
};

/// Write once this many bytes are buffered, as `recv` does. A guess.
const WRITE_BYTES: usize = 256 * 1024;
/// Gaps printed per lane; all are counted.
const GAPS_PRINTED: usize = 10;

/// Options of `pelton cat`.
#[derive(Args)]
pub struct CatArgs {
    /// Files that `pelton flush` wrote; of a rotated file, the oldest first: LOG.0* LOG
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// How messages are separated in the stream of bytes
    #[arg(long, value_enum, default_value_t = Framing::Lines)]
    frame: Framing,
    /// One JSON object per message, with its lane, number, sender and time; with --verify, one object instead of text
    #[arg(long, conflicts_with = "frame")]
    json: bool,
    /// Write no messages: check everything, and report each lane and its gaps
    #[arg(long, conflicts_with = "frame")]
    verify: bool,
}

/// Runs `pelton cat`.
pub fn run(args: &CatArgs) -> Result<(), Failure> {
    let mut out = Vec::with_capacity(2 * WRITE_BYTES);
    let (mut summary, mut damage) = (Summary::default(), Damage::default());
    for path in &args.files {
        let mut reader = open(path)?;
        loop {
            let chunk = match reader.next_chunk() {
                Ok(Some(chunk)) => chunk,
                Ok(None) => break,
                Err(error @ Error::Damaged { .. }) => {
                    print_stderr(&error);
                    if damage.count(&error) {
                        continue;
                    }
                    break;
                }
                Err(error) => return Err(error.into()),
            };
            match (args.verify, args.json) {
                (true, _) => summary.count(path, &chunk),
                (false, true) => write_objects(&chunk, &mut out),
                (false, false) => chunk.records().for_each(|record| args.frame.write(record.payload(), &mut out)),
            }
            if out.len() >= WRITE_BYTES {
                print(&out)?;
                out.clear();
            }
        }
    }
    if args.verify {
        let text = if args.json { json(&summary.report(&damage)) } else { summary.text(args.files.len()) };
        out.extend(text.into_bytes());
    }
    print(&out)?;
    damage.result()?;
    match summary.lanes.values().map(|lane| lane.gaps).sum() {
        0u64 => Ok(()),
        gaps => Err(Failure::Peer(format!("{gaps} gaps between the numbers of messages of one lane"))),
    }
}

/// Opens a record file. Another kind of file, or none, is bad input.
pub fn open(path: &Path) -> Result<RecordReader, Failure> {
    RecordReader::open(path).map_err(Failure::of_file)
}

/// Counts of damaged places and of torn ends.
#[derive(Default)]
pub struct Damage {
    damaged: u64,
    torn: u64,
}

impl Damage {
    /// Counts one; returns whether an intact chunk follows.
    pub fn count(&mut self, error: &Error) -> bool {
        let continues = matches!(error, Error::Damaged { next: Some(_), .. });
        *(if continues { &mut self.damaged } else { &mut self.torn }) += 1;
        continues
    }

    /// The failure; each place has been printed.
    pub fn result(&self) -> Result<(), Failure> {
        match (self.damaged, self.torn) {
            (0, 0) => Ok(()),
            (0, _) => Err(Failure::Peer("the unfinished end of a file is left out".to_owned())),
            (damaged, _) => {
                Err(Failure::System(format!("{damaged} damaged places; the intact messages around them were read")))
            }
        }
    }
}

/// The object of a message with `--json`.
#[derive(Serialize)]
struct Object<'a> {
    lane: String,
    seq: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    uid: Option<u32>,
    written_ns: u64,
    /// If the message is UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    /// Otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    hex: Option<String>,
}

fn write_objects(chunk: &FileChunk<'_>, out: &mut Vec<u8>) {
    let written = chunk.written_at().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    for record in chunk.records() {
        let text = std::str::from_utf8(record.payload()).ok();
        let object = Object {
            lane: name(chunk.lane().0),
            seq: record.seq(),
            pid: chunk.peer().map(|peer| peer.pid),
            uid: chunk.peer().map(|peer| peer.uid),
            written_ns: written.as_nanos() as u64,
            text,
            hex: text.is_none().then(|| record.payload().iter().map(|byte| format!("{byte:02x}")).collect()),
        };
        out.extend(json(&object).into_bytes());
    }
}

/// A lane's identity in hexadecimal.
fn name(lane: [u64; 2]) -> String {
    format!("{:016x}{:016x}", lane[0], lane[1])
}

/// The content of all files.
#[derive(Default)]
struct Summary {
    chunks: u64,
    messages: u64,
    bytes: u64,
    lanes: BTreeMap<[u64; 2], Lane>,
}

/// The content of one lane.
#[derive(Default, Serialize)]
struct Lane {
    chunks: u64,
    messages: u64,
    first_seq: u32,
    last_seq: u32,
    /// The last known sender.
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    uid: Option<u32>,
    /// Whether there was another sender, known or not.
    #[serde(skip)]
    others: bool,
    gaps: u64,
    first_gaps: Vec<Gap>,
}

/// A gap between the numbers of a lane.
#[derive(Serialize)]
struct Gap {
    file: PathBuf,
    offset: u64,
    after: u32,
    found: u32,
}

impl Summary {
    fn count(&mut self, file: &Path, chunk: &FileChunk<'_>) {
        self.chunks += 1;
        self.messages += u64::from(chunk.message_count());
        self.bytes += chunk.records().map(|record| record.payload().len() as u64).sum::<u64>();
        let lane = self.lanes.entry(chunk.lane().0).or_default();
        let (after, found) = (lane.last_seq, chunk.first_seq());
        let (known, sender) = (lane.pid.zip(lane.uid), chunk.peer().map(|peer| (peer.pid, peer.uid)));
        if lane.chunks == 0 {
            lane.first_seq = found;
        } else if found != after.checked_add(1).unwrap_or(1) {
            lane.gaps += 1;
            if lane.first_gaps.len() < GAPS_PRINTED {
                lane.first_gaps.push(Gap { file: file.to_owned(), offset: chunk.offset(), after, found });
            }
        }
        lane.others |= lane.chunks > 0 && known != sender;
        (lane.pid, lane.uid) = sender.or(known).unzip();
        lane.chunks += 1;
        lane.messages += u64::from(chunk.message_count());
        lane.last_seq = chunk.last_seq();
    }

    fn text(&self, files: usize) -> String {
        let mut text = format!(
            "{} chunks, {} messages of {} bytes, {} lanes, {files} files\n",
            self.chunks,
            self.messages,
            self.bytes,
            self.lanes.len(),
        );
        for (number, lane) in &self.lanes {
            // For threads, it is the process of the writer. A path channel may have senders that its receiver has not
            // discovered: they ended before, or the receiver never waited.
            let sender = match (lane.pid, lane.uid) {
                (Some(pid), Some(uid)) if lane.others => format!("process {pid} of user {uid} and others"),
                (Some(pid), Some(uid)) => format!("process {pid} of user {uid}"),
                _ => "an unknown process by path".to_owned(),
            };
            text += &format!(
                "lane {}: {} messages, {} to {}, in {} chunks, from {sender}, {} gaps\n",
                name(*number),
                lane.messages,
                lane.first_seq,
                lane.last_seq,
                lane.chunks,
                lane.gaps
            );
            for gap in &lane.first_gaps {
                let file = gap.file.display();
                text += &format!("  after {} comes {}, at byte {} of {file}\n", gap.after, gap.found, gap.offset);
            }
        }
        text
    }

    fn report(&self, damage: &Damage) -> serde_json::Value {
        let lanes: serde_json::Map<_, _> = (self.lanes.iter())
            .map(|(number, lane)| (name(*number), serde_json::to_value(lane).expect("numbers and text")))
            .collect();
        serde_json::json!({
            "chunks": self.chunks, "messages": self.messages, "bytes": self.bytes,
            "damaged": damage.damaged, "torn": damage.torn, "lanes": lanes,
        })
    }
}
