//! The vectors of spec/vectors, which this program contains, as exchanges of one language with files.

use super::{
    Case,
    exchange::{Side, Wanted},
    messages::{Messages, Tally},
};
use crate::failure::Failure;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::Value;
use std::{fs::Permissions, io::Write as _, os::unix::fs::PermissionsExt as _, path::Path};

macro_rules! vectors {
    ($($name:literal)*) => { &[$(($name, include_str!(concat!("../../../vectors/", $name)))),*] };
}
const FILES: &[(&str, &str)] =
    vectors!("images.json" "steps.json" "broadcast.json" "packets.json" "record-file.json" "calls.json" "paths.json");

/// The list of a file.
fn list(file: &str, field: &str) -> Vec<Value> {
    let (_, text) = FILES.iter().find(|(name, _)| *name == file).expect("a file of these vectors");
    let mut vectors: Value = serde_json::from_str(text).expect("the vectors are JSON");
    let Value::Array(list) = vectors[field].take() else { panic!("{file} has no list `{field}`") };
    list
}

fn text(value: &Value) -> &str {
    value.as_str().expect("the vectors have a text there")
}

/// The bytes of a value: a word `0x…`, little-endian, or bytes in hexadecimal.
fn bytes(value: &Value) -> Vec<u8> {
    let (digits, is_word) = text(value).strip_prefix("0x").map_or((text(value), false), |digits| (digits, true));
    let pairs = (0..digits.len()).step_by(2).map(|at| &digits[at..at + 2]);
    let mut bytes: Vec<u8> = pairs.map(|pair| u8::from_str_radix(pair, 16).expect("hexadecimal digits")).collect();
    if is_word {
        bytes.reverse();
    }
    bytes
}

/// What is in the directory of an exchange at first.
pub enum Vector {
    /// The directory of all vectors.
    All,
    RecordFile(Vec<u8>),
    Channel(Value),
}

/// An exchange for each vector that a driver of any language can replay, and one for a language's own replay of all.
pub fn all() -> Vec<Case> {
    let own = Side::new(0, "vectors @/vectors", Wanted::Number("ok vectors ", " files"));
    let own = case("its own replay", vec![own], Vector::All);
    let files = list("record-file.json", "files").into_iter().map(record_file);
    let channels = list("paths.json", "directories").into_iter().map(channel);
    std::iter::once(own).chain(files).chain(channels).collect()
}

fn case(claim: &str, sides: Vec<Side>, vector: Vector) -> Case {
    Case { vector: Some(vector), ..Case::new('v', claim, sides) }
}

fn record_file(vector: Value) -> Case {
    let (mut tally, mut damaged, mut end) = (Tally::default(), 0, "refused");
    for read in vector["reads"].as_array().into_iter().flatten() {
        if let Some(chunk) = read.as_u64() {
            let messages = vector["chunks"][chunk as usize]["messages"].as_array().expect("messages of a chunk");
            messages.iter().for_each(|message| tally.add(&bytes(&message["payload"])));
        } else if read.get("damaged").is_some() {
            damaged += 1;
        } else {
            end = match read.as_str() {
                Some("end") => "end",
                Some("later version") => "later",
                _ => "torn",
            };
        }
    }
    let report = Wanted::Report(format!("ok read-records {tally} damaged {damaged} {end}"));
    let side = Side::new(0, "read-records @/vector", report);
    case(&format!("record file: {}", text(&vector["name"])), vec![side], Vector::RecordFile(bytes(&vector["hex"])))
}

fn channel(vector: Value) -> Case {
    let mut sides: Vec<Side> = Vec::new();
    for (at, step) in vector["steps"].as_array().expect("steps").iter().enumerate() {
        let [command, count, sizes, then] = ["do", "count", "sizes", "then"].map(|field| text(&step[field]));
        let wanted = match &step["is"] {
            Value::String(_) => Wanted::Refusal,
            last => {
                let messages = Messages::parse(count, sizes).expect("COUNT and SIZES");
                let tally = messages.tally_of_last(last.as_u64().expect("a number of messages"));
                let report = format!("ok {command} {tally}");
                if then == "die" { Wanted::Killed(report) } else { Wanted::Report(report) }
            }
        };
        let side = Side::new(0, &format!("{command} path:@/vector {count} {sizes} {then}"), wanted);
        sides.push(if at == 0 { side } else { side.after(at - 1) });
    }
    case(&format!("path: {}", text(&vector["name"])), sides, Vector::Channel(vector))
}

impl Vector {
    /// Writes the vector into the directory of its exchange.
    pub fn write(&self, directory: &Path) -> Result<(), Failure> {
        let path = directory.join("vector");
        let written = match self {
            Vector::All => {
                let all = directory.join("vectors");
                let write = |(name, text): &(&str, &str)| std::fs::write(all.join(name), text);
                std::fs::create_dir(&all).and_then(|()| FILES.iter().try_for_each(write))
            }
            Vector::RecordFile(bytes) => std::fs::write(path, bytes),
            Vector::Channel(vector) => write_channel(vector, &path),
        };
        written.map_err(|error| Failure::system("writing a vector", error))
    }

    /// The problem if the words that the vector requires after its steps are not in the files.
    pub fn problem_after(&self, directory: &Path) -> Option<String> {
        let Vector::Channel(vector) = self else { return None };
        for (file, words) in vector["after"].as_object()? {
            let found = std::fs::read(directory.join("vector").join(file)).unwrap_or_default();
            for word in words.as_array()? {
                let (at, wanted) = (word[0].as_u64()? as usize, bytes(&word[1]));
                let found = found.get(at..at + wanted.len()).unwrap_or_default();
                if found != wanted {
                    let mut found = found.to_vec();
                    found.reverse();
                    let found: String = found.iter().map(|byte| format!("{byte:02x}")).collect();
                    return Some(format!("{file} has 0x{found} at offset {at}, wanted {}", text(&word[1])));
                }
            }
        }
        None
    }
}

/// Creates the channel of a vector, by the rules of spec/vectors/README.md.
fn write_channel(vector: &Value, path: &Path) -> std::io::Result<()> {
    let (_, paths) = FILES.last().expect("paths.json");
    let fresh: Value = serde_json::from_str::<Value>(paths).expect("the vectors are JSON")["fresh"].take();
    std::fs::create_dir(path)?;
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().replace('-', "");
    let boot = bytes(&Value::String(boot));
    let lanes = vector["lanes"].as_u64().unwrap_or(1);
    let mut names = vec!["channel".to_owned(), "receiver".to_owned()];
    names.extend((0..lanes).flat_map(|lane| ["producer", "consumer", "data"].map(|file| format!("{lane}.{file}"))));
    for name in names {
        // All lanes begin alike.
        let like = name.find('.').map_or(name.clone(), |dot| format!("0{}", &name[dot..]));
        let mut content = vec![0; 65536];
        if name == "channel" || name.ends_with(".producer") {
            content[96..112].copy_from_slice(&boot);
        }
        let mut put = |words: &Value| {
            for word in words.as_array().into_iter().flatten() {
                let (at, bytes) = (word[0].as_u64().expect("an offset") as usize, bytes(&word[1]));
                content[at..at + bytes.len()].copy_from_slice(&bytes);
            }
        };
        put(&fresh[&like]);
        put(&vector["words"][&name]);
        if name == "channel" {
            let checksum = content[..112].iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
                (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
            });
            let wrong = vector["checksum_xor"].as_u64().unwrap_or(0);
            content[112..120].copy_from_slice(&(checksum ^ wrong).to_le_bytes());
        }
        let mut file = std::fs::File::create_new(path.join(&name))?;
        file.write_all(&content)?;
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    let owners = std::iter::once("receiver".to_owned()).chain((0..lanes).map(|lane| lane.to_string()));
    for name in owners.flat_map(|owner| [format!("{owner}.bell"), format!("{owner}.life")]) {
        mknodat(CWD, path.join(name), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    }
    let mode = vector["mode"].as_str().map_or(0o700, |mode| u32::from_str_radix(mode, 8).expect("octal digits"));
    std::fs::set_permissions(path, Permissions::from_mode(mode))
}
