//! Replays `spec/vectors/record-file.json`.

use super::*;
use pelton_os::Peer;
use serde_json::{Value, json};

fn number(value: &Value) -> u64 {
    match value {
        Value::String(text) => u64::from_str_radix(&text[2..], 16).unwrap(),
        value => value.as_u64().unwrap(),
    }
}

fn bytes(hex: &Value) -> Vec<u8> {
    let hex = hex.as_str().unwrap();
    (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
}

fn lane(value: &Value) -> LaneId {
    LaneId([number(&value[0]), number(&value[1])])
}

fn peer(chunk: &Value) -> Option<Peer> {
    let peer = chunk.get("peer").filter(|peer| !peer.is_null())?;
    Some(Peer { pid: number(&peer["pid"]) as u32, uid: number(&peer["uid"]) as u32 })
}

/// The chunk as a writer encodes it.
fn chunk_bytes(chunk: &Value, file: &FileHeader) -> Vec<u8> {
    let mut records = Vec::new();
    let empty = Vec::new();
    for last in chunk["last"].as_array().unwrap_or(&empty) {
        let LaneId(words) = lane(&last["lane"]);
        [words[0], words[1], number(&last["seq"])].iter().for_each(|word| records.extend(word.to_le_bytes()));
    }
    let messages = chunk["messages"].as_array().unwrap_or(&empty);
    for message in messages {
        let payload = bytes(&message["payload"]);
        records.extend((number(&message["seq"]) << 32 | payload.len() as u64).to_le_bytes());
        records.extend(payload);
        records.resize(records.len().next_multiple_of(8), number(&chunk["padding"]) as u8);
    }
    let header = ChunkHeader {
        kind: if chunk.get("last").is_some() { KIND_LAST } else { KIND_RECORDS },
        bytes: records.len() as u64,
        lane: chunk.get("lane").map_or(LaneId([0, 0]), lane),
        first_seq: messages.first().map_or(0, |message| number(&message["seq"]) as u32),
        messages: messages.len() as u32,
        peer: peer(chunk),
        written: number(&chunk["written"]),
        is_arrival: chunk["is_arrival"] == true,
        checksum: crc32fast::hash(&records),
    };
    [&header.bytes(file)[..], &records].concat()
}

/// What a reader finds, in the terms of the vectors.
fn reads(path: &Path, wanted: &Value) -> Value {
    let mut reader = match RecordReader::open(path) {
        Ok(reader) => reader,
        Err(Error::NotARecordFile { .. }) => return json!("refused"),
        Err(error) => panic!("{error}"),
    };
    let header = &wanted["header"];
    assert_eq!(reader.number(), number(&header["number"]));
    let since = reader.created_at().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    assert_eq!(since.as_nanos() as u64, number(&header["created"]));
    let mut found = Vec::new();
    loop {
        found.push(match reader.next_chunk() {
            Ok(Some(chunk)) => {
                let chunks = wanted["chunks"].as_array().unwrap();
                let at = chunks.iter().position(|wanted| number(&wanted["offset"]) == chunk.offset()).unwrap();
                let wanted = &chunks[at];
                assert_eq!((chunk.lane(), chunk.peer()), (lane(&wanted["lane"]), peer(wanted)));
                let since = chunk.written_at().duration_since(SystemTime::UNIX_EPOCH).unwrap();
                assert_eq!(since.as_nanos() as u64, number(&wanted["written"]));
                let records: Vec<(u64, Vec<u8>)> =
                    chunk.records().map(|record| (record.seq().into(), record.payload().to_vec())).collect();
                let messages = wanted["messages"].as_array().unwrap();
                let wanted: Vec<(u64, Vec<u8>)> =
                    messages.iter().map(|message| (number(&message["seq"]), bytes(&message["payload"]))).collect();
                assert_eq!(records, wanted);
                json!(at)
            }
            Ok(None) => {
                found.push(json!("end"));
                break;
            }
            Err(Error::Damaged { offset, next: None, .. }) => {
                found.push(json!({ "torn": offset }));
                break;
            }
            Err(Error::Damaged { offset, next: Some(next), .. }) => json!({ "damaged": offset, "next": next }),
            Err(Error::NotARecordFile { .. }) => {
                found.push(json!("later version"));
                break;
            }
            Err(error) => panic!("{error}"),
        });
    }
    Value::Array(found)
}

/// What a writer finds when it opens the file.
fn opens(path: &Path, wanted: &Value) -> Value {
    match RecordFile::open(path) {
        Ok(file) => {
            let last = wanted["last"].as_array().unwrap();
            for last in last {
                assert_eq!(file.last_seq(lane(&last["lane"])).map(u64::from), Some(number(&last["seq"])));
            }
            assert_eq!(file.lanes.len(), last.len());
            json!({ "cut": file.cut_bytes(), "last": last })
        }
        Err(Error::Damaged { offset, next, .. }) => json!({ "damaged": offset, "next": next }),
        Err(Error::NotARecordFile { problem, .. }) if problem.contains("kind") => json!("later version"),
        Err(Error::NotARecordFile { .. }) => json!("refused"),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn the_vectors_are_written_and_read() {
    let path = format!("{}/../../spec/vectors/record-file.json", env!("CARGO_MANIFEST_DIR"));
    let vectors: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    for vector in vectors["files"].as_array().unwrap() {
        let (name, all) = (vector["name"].as_str().unwrap(), bytes(&vector["hex"]));
        println!("{name}");
        let header = &vector["header"];
        if !header.is_null() {
            let [created, number, id] = ["created", "number", "id"].map(|field| number(&header[field]));
            let header = FileHeader { created, number, id };
            assert_eq!(header.bytes(), all[..HEADER as usize], "{name}");
            if vector["is_written"] == true {
                let chunks = vector["chunks"].as_array().unwrap();
                let written: Vec<u8> = chunks.iter().flat_map(|chunk| chunk_bytes(chunk, &header)).collect();
                assert!(written == all[HEADER as usize..], "{name}");
            }
        }
        let path = directory.path().join("log");
        std::fs::write(&path, &all).unwrap();
        assert_eq!(reads(&path, vector), vector["reads"], "{name}");
        assert_eq!(opens(&path, &vector["opens"]), vector["opens"], "{name}");
        let cut = vector["opens"]["cut"].as_u64().unwrap_or(0) as usize;
        assert!(std::fs::read(&path).unwrap() == all[..all.len() - cut], "{name}: only a tail is cut");
    }
}

/// How many bytes this thread has read.
fn bytes_read() -> u64 {
    let counters = std::fs::read_to_string("/proc/thread-self/io").unwrap();
    counters.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

/// A sender may fill its messages with what begins a header.
#[test]
fn a_search_for_a_chunk_reads_each_byte_once() {
    let header = FileHeader { created: 0, number: 1, id: 7 };
    let mut bytes = header.bytes().to_vec();
    bytes.extend(b"pchklike".repeat(5 << 17));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    std::fs::write(&path, &bytes).unwrap();
    let mut scanner = Scanner::of(std::fs::File::open(&path).unwrap(), &path).unwrap();
    let before = bytes_read();
    assert_eq!(scanner.whole_from(HEADER, bytes.len() as u64).unwrap(), None);
    // And the windows at the ends of pieces.
    let read = bytes_read() - before;
    assert!(read < 2 * bytes.len() as u64, "read {read} bytes of a file of {}", bytes.len());
}

/// Writes a file of one chunk, whose records are one message: the beginning of `data`, zeros up to `bytes` as a hole.
fn sparse_file(path: &Path, data: &[u8], bytes: u64, checksum: u32) {
    use std::os::unix::fs::FileExt as _;
    let file_header = FileHeader { created: 0, number: 1, id: 7 };
    let header = ChunkHeader {
        kind: KIND_RECORDS,
        bytes,
        lane: LaneId([1, 2]),
        first_seq: 1,
        messages: 1,
        peer: None,
        written: 0,
        is_arrival: false,
        checksum,
    };
    let file = std::fs::File::create(path).unwrap();
    file.write_all_at(&[&file_header.bytes()[..], &header.bytes(&file_header), data].concat(), 0).unwrap();
    file.set_len(2 * HEADER + bytes).unwrap();
}

#[test]
fn a_large_chunk_that_is_a_hole_is_damage_and_not_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    sparse_file(&path, &(1u64 << 32 | 100).to_le_bytes(), CHUNK_BYTES_MAX, 0);
    let mut reader = RecordReader::open(&path).unwrap();
    let error = reader.next_chunk().unwrap_err();
    assert!(matches!(error, Error::Damaged { offset: HEADER, next: None, .. }), "{error}");
    assert!(error.to_string().contains("in a chunk of 17179869184 bytes, the rest is a hole"), "{error}");
}

#[test]
fn a_large_chunk_whose_zeros_became_a_hole_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    let bytes = 65 << 20;
    let mut data = (1 << 32 | (bytes - 8u64)).to_le_bytes().to_vec();
    data.resize(2 << 20, b'x');
    let mut checksum = crc32fast::Hasher::new();
    checksum.update(&data);
    checksum.update(&vec![0; bytes as usize - data.len()]);
    sparse_file(&path, &data, bytes, checksum.finalize());
    let mut reader = RecordReader::open(&path).unwrap();
    let chunk = reader.next_chunk().unwrap().unwrap();
    let record = chunk.records().next().unwrap();
    assert_eq!((record.seq(), record.payload().len() as u64), (1, bytes - 8));
    assert_eq!(record.payload().iter().filter(|byte| **byte == b'x').count(), data.len() - 8);
}
