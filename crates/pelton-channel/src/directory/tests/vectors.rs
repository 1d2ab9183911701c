//! Replays `spec/vectors/paths.json`, except a sender that is killed: `pelton conform` replays that with a process. And
//! the directories of `broadcast.json`.

use super::*;
use crate::options::Options;
use pelton_lane::{CursorTable, StartFrom};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::Value;

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

/// A word `0x…`, little-endian, or bytes in hexadecimal.
fn bytes(value: &Value) -> Vec<u8> {
    let digits = text(value).strip_prefix("0x").unwrap_or(text(value));
    let mut bytes: Vec<u8> =
        (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect();
    if text(value).starts_with("0x") {
        bytes.reverse();
    }
    bytes
}

fn words(of: &Value) -> impl Iterator<Item = (usize, Vec<u8>)> {
    let words = of.as_array().map_or(&[][..], Vec::as_slice);
    words.iter().map(|word| (word[0].as_u64().unwrap() as usize, bytes(&word[1])))
}

fn vectors(file: &str) -> Value {
    let file = format!("{}/../../spec/vectors/{file}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

/// The file `name` of a vector's directory, of these bytes: the words of the fresh file `like`, then the vector's own.
fn write_file(fresh: &Value, vector: &Value, path: &Path, name: &str, like: &str, len: u64) {
    let mut content = vec![0; len as usize];
    if ["channel", "0.producer", "publisher"].contains(&like) {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().replace('-', "");
        content[96..112].copy_from_slice(&bytes(&boot.into()));
    }
    for (at, bytes) in words(&fresh[like]).chain(words(&vector["words"][name])) {
        content[at..at + bytes.len()].copy_from_slice(&bytes);
    }
    if name == "channel" {
        let checksum = fnv1a(&content[..ChannelPage::CHECKED_BYTES]);
        let checksum = checksum ^ vector["checksum_xor"].as_u64().unwrap_or(0);
        content[112..120].copy_from_slice(&checksum.to_le_bytes());
    }
    std::fs::write(path.join(name), content).unwrap();
    std::fs::set_permissions(path.join(name), std::fs::Permissions::from_mode(0o600)).unwrap();
}

fn write_fifos(path: &Path, owner: &str) {
    for name in [format!("{owner}.bell"), format!("{owner}.life")] {
        mknodat(CWD, path.join(name), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    }
}

fn write_channel(fresh: &Value, vector: &Value, path: &Path) {
    std::fs::create_dir(path).unwrap();
    for file in ["channel", "receiver"] {
        write_file(fresh, vector, path, file, file, CAPACITY);
    }
    write_fifos(path, "receiver");
    for lane in 0..vector["lanes"].as_u64().unwrap_or(1) {
        for file in ["producer", "consumer", "data"] {
            write_file(fresh, vector, path, &format!("{lane}.{file}"), &format!("0.{file}"), CAPACITY);
        }
        write_fifos(path, &lane.to_string());
    }
    let mode = vector["mode"].as_str().map_or(0o700, |mode| u32::from_str_radix(mode, 8).unwrap());
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

fn write_broadcast(fresh: &Value, vector: &Value, path: &Path) {
    std::fs::create_dir(path).unwrap();
    let table = CursorTable::BYTES as u64;
    for (file, len) in [("channel", CAPACITY), ("publisher", CAPACITY), ("data", CAPACITY), ("cursors", table)] {
        write_file(fresh, vector, path, file, file, vector["bytes"][file].as_u64().unwrap_or(len));
    }
    write_fifos(path, "publisher");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700)).unwrap();
}

fn assert_after(vector: &Value, path: &Path) {
    for (file, wanted) in vector["after"].as_object().into_iter().flatten() {
        let found = std::fs::read(path.join(file)).unwrap();
        for (at, wanted) in words(wanted) {
            assert_eq!(found[at..at + wanted.len()], wanted, "{}: {file} at offset {at}", vector["name"]);
        }
    }
}

/// Whether opening is refused because of what the files say.
fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::NotAChannel { .. } | Error::Rebooted { .. } | Error::Corrupt(_) | Error::Refused(_))
}

/// Message `i` by the rule of conformance/README.md.
fn message(i: usize, sizes: &[usize]) -> Vec<u8> {
    (0..sizes[i % sizes.len()]).map(|j| b'a' + ((i + j) % 26) as u8).collect()
}

/// Receives until an error, and returns it with the number of redelivered messages.
fn receive(path: &Path, step: &Value) -> (Error, u64) {
    let mut redelivered = 0;
    let mut receiver = match Options::new().create_receiver(path) {
        Ok(receiver) => receiver,
        Err(error) => return (error, redelivered),
    };
    let sizes: Vec<usize> = text(&step["sizes"]).split(',').map(|size| size.parse().unwrap()).collect();
    let count: usize = text(&step["count"]).parse().unwrap();
    let first = count - step["is"].as_u64().unwrap_or(count as u64) as usize;
    for i in first.. {
        match receiver.receive_until(Instant::now() + DEADLINE) {
            Ok(found) => {
                let found = found.expect("a message, or the end of the sender");
                assert_eq!(&*found, message(i, &sizes), "message {i}");
                redelivered += u64::from(found.is_redelivered());
            }
            Err(error) => {
                assert!(i == count || step["is"] == "refused", "{i} of {count} messages: {error}");
                return (error, redelivered);
            }
        }
    }
    unreachable!("it receives until an error")
}

#[test]
fn path_channels_are_opened_and_received_as_the_vectors_say() {
    let vectors = vectors("paths.json");
    for vector in vectors["directories"].as_array().unwrap() {
        let name = text(&vector["name"]);
        println!("{name}");
        let (_root, path) = root();
        write_channel(&vectors["fresh"], vector, &path);
        let steps = vector["steps"].as_array().unwrap();
        if steps.len() > 1 {
            continue;
        }
        let error = if steps[0]["do"] == "send" {
            Options::new().create_sender(&path).err().unwrap_or_else(|| panic!("{name}: a sender opened it"))
        } else {
            let (error, redelivered) = receive(&path, &steps[0]);
            assert_eq!(redelivered, vector["redelivered"].as_u64().unwrap_or(0), "{name}");
            error
        };
        println!("    {error}");
        match (text(&steps[0]["then"]), &error) {
            _ if steps[0]["is"] == "refused" => assert!(is_refusal(&error), "{name}: {error:?}"),
            ("close" | "rest", Error::Closed { .. }) | ("died", Error::PeerDied { .. }) => {}
            (then, error) => panic!("{name}: wanted {then}, found {error:?}"),
        }
        assert_after(vector, &path);
    }
}

#[test]
fn the_directories_of_broadcasts_are_opened_as_the_vectors_say() {
    let vectors = vectors("broadcast.json");
    for vector in vectors["directories"].as_array().unwrap() {
        let name = text(&vector["name"]);
        println!("{name}");
        let (_root, path) = root();
        write_broadcast(&vectors["fresh"], vector, &path);
        for open in vector["opens"].as_array().unwrap() {
            let opened = if open[0] == "subscriber" {
                let options: Options = Options::new().start_from(StartFrom::Oldest);
                options.cast().open_subscriber(&path).map(|subscriber| {
                    let next = subscriber.next_number();
                    subscriber.close().unwrap();
                    next
                })
            } else {
                let options: Options = Options::new();
                options.cast().create_publisher(&path).map(|publisher| publisher.next_number())
            };
            match opened {
                Ok(next) => assert_eq!(Some(next), open[1].as_u64(), "{name}: {open}"),
                Err(error) => assert!(open[1] == "refused" && is_refusal(&error), "{name}: {open}: {error:?}"),
            }
        }
        assert_after(vector, &path);
    }
}
