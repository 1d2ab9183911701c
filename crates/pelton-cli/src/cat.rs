//! `pelton cat`: the messages of record files to standard output, or what there is in them and whether it is whole.

use crate::{
    failure::{Failure, say},
    frame::Framing,
    inspect::{json, print},
};
use clap::Args;
use pelton::{Chunk, Error, RecordReader};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::SystemTime,
};

/// Write when so much has gathered, as `recv` does. A guess.
const WRITE_BYTES: usize = 256 * 1024;
/// So many gaps of a lane are shown; all are counted.
const GAPS_SHOWN: usize = 10;

/// Options of `pelton cat`.
#[derive(Args)]
pub struct CatArgs {
    /// Files that `pelton flush` wrote; of a rotated one the oldest first: LOG.0* LOG
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// How messages are told apart in the stream of bytes
    #[arg(long, value_enum, default_value_t = Framing::Lines)]
    frame: Framing,
    /// Each message as a JSON object on a line, with its lane, number, sender and time; with --verify one object instead of text
    #[arg(long, conflicts_with = "frame")]
    json: bool,
    /// Write no messages: check everything, and say what there is of each lane, and what is missing
    #[arg(long, conflicts_with = "frame")]
    verify: bool,
}

/// Runs `pelton cat`.
pub fn run(args: &CatArgs) -> Result<(), Failure> {
    let mut out = Vec::with_capacity(2 * WRITE_BYTES);
    let (mut found, mut broken) = (Found::default(), Broken::default());
    for path in &args.files {
        let mut reader = open(path)?;
        loop {
            let chunk = match reader.next_chunk() {
                Ok(Some(chunk)) => chunk,
                Ok(None) => break,
                Err(error @ Error::Damaged { .. }) => {
                    say(&error);
                    if broken.note(&error) {
                        continue;
                    }
                    break;
                }
                Err(error) => return Err(error.into()),
            };
            match (args.verify, args.json) {
                (true, _) => found.count(path, &chunk),
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
        let text = if args.json { json(&found.report(&broken)) } else { found.text(args.files.len()) };
        out.extend(text.into_bytes());
    }
    print(&out)?;
    broken.judge()?;
    match found.lanes.values().map(|lane| lane.gaps).sum() {
        0u64 => Ok(()),
        gaps => Err(Failure::Peer(format!("{gaps} gaps between the numbers of messages of one lane"))),
    }
}

/// Opens one. What is none is bad input.
fn open(path: &Path) -> Result<RecordReader, Failure> {
    RecordReader::open(path).map_err(|error| match error {
        error @ Error::NotARecordFile { .. } => Failure::Input(error.to_string()),
        error => error.into(),
    })
}

/// Places that are not as they should be.
#[derive(Default)]
struct Broken {
    damaged: u64,
    torn: u64,
}

impl Broken {
    /// Counts one; answers whether something whole comes after it.
    fn note(&mut self, error: &Error) -> bool {
        let goes_on = matches!(error, Error::Damaged { next: Some(_), .. });
        *(if goes_on { &mut self.damaged } else { &mut self.torn }) += 1;
        goes_on
    }

    /// Each has been told by now.
    fn judge(&self) -> Result<(), Failure> {
        match (self.damaged, self.torn) {
            (0, 0) => Ok(()),
            (0, _) => Err(Failure::Peer("what a writer had not finished is left out".to_owned())),
            (damaged, _) => {
                Err(Failure::System(format!("{damaged} damaged places; what is whole around them was read")))
            }
        }
    }
}

/// Who wrote it, for machines.
#[derive(Serialize)]
struct Object<'a> {
    lane: String,
    seq: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    uid: Option<u32>,
    written_ns: u64,
    /// Where the message is UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    /// Where it is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    hex: Option<String>,
}

fn write_objects(chunk: &Chunk<'_>, out: &mut Vec<u8>) {
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

/// A lane's identity, as it is shown.
fn name(lane: [u64; 2]) -> String {
    format!("{:016x}{:016x}", lane[0], lane[1])
}

/// What there is in all the files.
#[derive(Default)]
struct Found {
    chunks: u64,
    messages: u64,
    bytes: u64,
    lanes: BTreeMap<[u64; 2], Lane>,
}

/// What there is of a lane.
#[derive(Default, Serialize)]
struct Lane {
    chunks: u64,
    messages: u64,
    first_seq: u32,
    last_seq: u32,
    /// The last sender that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    uid: Option<u32>,
    /// Whether there was another too, known or not.
    #[serde(skip)]
    others: bool,
    gaps: u64,
    first_gaps: Vec<Gap>,
}

/// Where a lane's numbers do not go on.
#[derive(Serialize)]
struct Gap {
    file: PathBuf,
    offset: u64,
    after: u32,
    found: u32,
}

impl Found {
    fn count(&mut self, file: &Path, chunk: &Chunk<'_>) {
        self.chunks += 1;
        self.messages += u64::from(chunk.messages());
        self.bytes += chunk.records().map(|record| record.payload().len() as u64).sum::<u64>();
        let lane = self.lanes.entry(chunk.lane().0).or_default();
        let (after, found) = (lane.last_seq, chunk.first_seq());
        let (known, sender) = (lane.pid.zip(lane.uid), chunk.peer().map(|peer| (peer.pid, peer.uid)));
        if lane.chunks == 0 {
            lane.first_seq = found;
        } else if found != after.checked_add(1).unwrap_or(1) {
            lane.gaps += 1;
            if lane.first_gaps.len() < GAPS_SHOWN {
                lane.first_gaps.push(Gap { file: file.to_owned(), offset: chunk.offset(), after, found });
            }
        }
        lane.others |= lane.chunks > 0 && known != sender;
        (lane.pid, lane.uid) = sender.or(known).unzip();
        lane.chunks += 1;
        lane.messages += u64::from(chunk.messages());
        lane.last_seq = chunk.last_seq();
    }

    /// For people.
    fn text(&self, files: usize) -> String {
        let mut text = format!(
            "{} chunks, {} messages of {} bytes, {} lanes, {files} files\n",
            self.chunks,
            self.messages,
            self.bytes,
            self.lanes.len(),
        );
        for (number, lane) in &self.lanes {
            // Of threads it is the writer's process. A path has senders that its receiver did not meet: they had gone, or it had no
            // need to look for them.
            let who = match (lane.pid, lane.uid) {
                (Some(pid), Some(uid)) if lane.others => format!("process {pid} of user {uid} and others"),
                (Some(pid), Some(uid)) => format!("process {pid} of user {uid}"),
                _ => "an unknown process by path".to_owned(),
            };
            text += &format!(
                "lane {}: {} messages, {} to {}, in {} chunks, from {who}, {} gaps\n",
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

    fn report(&self, broken: &Broken) -> serde_json::Value {
        let lanes: serde_json::Map<_, _> = (self.lanes.iter())
            .map(|(number, lane)| (name(*number), serde_json::to_value(lane).expect("numbers and text")))
            .collect();
        serde_json::json!({
            "chunks": self.chunks, "messages": self.messages, "bytes": self.bytes,
            "damaged": broken.damaged, "torn": broken.torn, "lanes": lanes,
        })
    }
}
