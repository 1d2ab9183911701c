//! Replays `spec/vectors/record-file.json`.

#[cfg(feature = "zstd")]
use super::format::LAST_ENTRIES_MAX;
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
                // Chunks of one frame have its offset.
                let is_it = |wanted: &Value| {
                    number(&wanted["offset"]) == chunk.offset() && lane(&wanted["lane"]) == chunk.lane()
                };
                let at = chunks.iter().position(is_it).unwrap();
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
        if name.starts_with("compressed: ") && cfg!(not(feature = "zstd")) {
            continue;
        }
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

/// A record of `seq` with a payload of `size` bytes that zstd compresses little.
fn record(seq: u32, size: usize, to: &mut Vec<u8>) {
    to.extend((u64::from(seq) << 32 | size as u64).to_le_bytes());
    let mut word = u64::from(seq);
    for _ in 0..size.div_ceil(8) {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        to.extend((word >> 32).to_le_bytes());
    }
}

const LANES: [LaneId; 2] = [LaneId([1, 1]), LaneId([2, 2])];

/// Writes `chunks` chunks of 1 to 3 messages by turns of two lanes, 16 in a write, a millisecond apart. Returns what a
/// reader is to find of each: lane, first number, messages, nanoseconds.
fn write_file(path: &Path, options: &RecordFileOptions, chunks: u64) -> Vec<(LaneId, u32, u32, u64)> {
    let mut written = Vec::new();
    let (mut seqs, mut records) = ([1u32; 2], Vec::new());
    for number in 0..chunks {
        let (lane, messages) = (number as usize % 2, 1 + number as u32 % 3);
        let mut bytes = Vec::new();
        (0..messages).for_each(|more| record(seqs[lane] + more, 400, &mut bytes));
        written.push((LANES[lane], seqs[lane], messages, 1_000_000_000 + number * 1_000_000));
        seqs[lane] += messages;
        records.push(bytes);
    }
    let mut file = options.open(path).unwrap();
    let chunks: Vec<Chunk<'_>> = (written.iter().zip(&records))
        .map(|((lane, seq, messages, ns), records)| {
            Chunk::new(*lane, None, *seq, *messages, records).with_arrival(Some(*ns))
        })
        .collect();
    for (number, some) in chunks.chunks(16).enumerate() {
        // A writer that opens the file again continues, with its seek points.
        if number % 100 == 99 {
            drop(file);
            file = options.open(path).unwrap();
        }
        file.write(some).unwrap();
    }
    for lane in [0, 1] {
        assert_eq!(file.last_seq(LANES[lane]), Some(seqs[lane] - 1));
    }
    written
}

fn found(chunk: &FileChunk<'_>) -> (LaneId, u32, u32, u64) {
    let ns = chunk.written_at().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos() as u64;
    for record in chunk.records() {
        let mut wanted = Vec::new();
        self::record(record.seq(), 400, &mut wanted);
        assert!(record.payload() == &wanted[8..], "the payload of {}", record.seq());
    }
    (chunk.lane(), chunk.first_seq(), chunk.message_count(), ns)
}

/// The options to test: a plain file, and one that is compressed.
fn options() -> Vec<RecordFileOptions> {
    let mut options = vec![RecordFileOptions::new()];
    #[cfg(feature = "zstd")]
    options.push(RecordFileOptions::new().compress_zstd());
    options
}

#[test]
fn a_search_finds_a_time_and_a_number_and_reads_a_small_part_of_the_file() {
    let directory = tempfile::tempdir().unwrap();
    for (number, options) in options().iter().enumerate() {
        let path = directory.path().join(number.to_string());
        let written = write_file(&path, options, 50_000);
        let size = std::fs::metadata(&path).unwrap().len();
        let before = bytes_read();
        let mut searches = 0;
        for at in [0, 17, 1501, 33_333, 49_999, 50_000] {
            let time = written.get(at).map_or(u64::MAX / 2, |chunk| chunk.3);
            for early in [0, 999_999] {
                let mut reader = RecordReader::open(&path).unwrap();
                reader.skip_before(SystemTime::UNIX_EPOCH + Duration::from_nanos(time - early)).unwrap();
                assert_eq!(reader.next_chunk().unwrap().map(|chunk| found(&chunk)), written.get(at).copied());
                searches += 1;
            }
            // From there on by number, within a chunk too.
            for skip in [0, 3, 40_000] {
                let mut reader = RecordReader::open(&path).unwrap();
                reader.skip_before(SystemTime::UNIX_EPOCH + Duration::from_nanos(time)).unwrap();
                let left = reader.skip_messages(skip).unwrap();
                let (mut wanted_at, mut wanted_left) = (at, skip);
                while let Some(chunk) = written.get(wanted_at)
                    && u64::from(chunk.2) <= wanted_left
                {
                    wanted_left -= u64::from(chunk.2);
                    wanted_at += 1;
                }
                let chunk = reader.next_chunk().unwrap().map(|chunk| found(&chunk));
                assert_eq!((left, chunk), (wanted_left, written.get(wanted_at).copied()), "{at} and {skip} more");
                searches += 2;
            }
        }
        let read = (bytes_read() - before) / searches;
        assert!(size > 8 << 20 && read < size / 3, "{read} bytes for a search in {size}");
    }
}

#[cfg(feature = "zstd")]
#[test]
fn a_compressed_file_is_smaller_and_has_the_same_chunks() {
    let directory = tempfile::tempdir().unwrap();
    let (plain, packed) = (directory.path().join("plain"), directory.path().join("packed"));
    let rotated = RecordFileOptions::new().compress_zstd().rotate_bytes(300 << 10);
    let written = write_file(&plain, &RecordFileOptions::new(), 5_000);
    assert_eq!(write_file(&packed, &rotated, 5_000), written);
    let mut files: Vec<_> = std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.file_name().unwrap().to_str().unwrap().starts_with("packed."));
    files.sort();
    files.push(packed);
    assert!(files.len() > 2);
    let bytes: u64 = files.iter().map(|path| std::fs::metadata(path).unwrap().len()).sum();
    assert!(bytes < std::fs::metadata(&plain).unwrap().len() * 2 / 3, "{bytes} bytes");
    let mut all = Vec::new();
    for path in &files {
        let mut reader = RecordReader::open(path).unwrap();
        while let Some(chunk) = reader.next_chunk().unwrap() {
            all.push(found(&chunk));
        }
    }
    assert_eq!(all, written);
}

/// Whatever a byte of it becomes, a reader finds the other frames' chunks unchanged, or says what is wrong.
#[cfg(feature = "zstd")]
#[test]
fn damage_in_a_frame_hides_that_frame_only() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    let written = write_file(&path, &RecordFileOptions::new().compress_zstd(), 48);
    let whole = std::fs::read(&path).unwrap();
    let (mut state, mut damaged) = (7u64, 0);
    for round in 0..400 {
        let mut bytes = whole.clone();
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let at = HEADER as usize + (state >> 33) as usize % (bytes.len() - HEADER as usize);
        bytes[at] ^= 1 << (round % 8);
        std::fs::write(&path, &bytes).unwrap();
        let mut reader = RecordReader::open(&path).unwrap();
        let mut all = Vec::new();
        loop {
            match reader.next_chunk() {
                Ok(Some(chunk)) => all.push(found(&chunk)),
                Ok(None) => break,
                Err(Error::Damaged { next, .. }) => {
                    damaged += 1;
                    if next.is_none() {
                        break;
                    }
                }
                Err(error) => panic!("{error}"),
            }
        }
        // A frame has the 16 chunks of a write.
        assert!(all.len() >= 32 && all.iter().all(|chunk| written.contains(chunk)), "byte {at}: {} chunks", all.len());
    }
    assert_eq!(damaged, 400);
    // Wrong fields under right checksums: what another program wrote.
    let file = FileHeader::of(&whole).unwrap();
    let header = ChunkHeader::of(&whole[HEADER as usize..], whole.len() as u64 - HEADER, &file).unwrap();
    let body = &whole[2 * HEADER as usize..][..header.bytes as usize];
    let mut content = Vec::new();
    compressed::decompress(&header, body, &mut content).unwrap();
    assert_eq!(content.len() as u64, header.content_bytes());
    for content_bytes in [HEADER, header.content_bytes() - 8, header.content_bytes() + 8, CONTENT_BYTES_MAX] {
        let wrong = ChunkHeader { lane: LaneId([header.lane.0[0], content_bytes]), ..header };
        assert!(compressed::decompress(&wrong, body, &mut content).is_err(), "{content_bytes}");
    }
    for (wrong, body) in [(header, vec![0; body.len()]), (header, body[..64].to_vec())] {
        assert!(compressed::decompress(&wrong, &body, &mut content).is_err());
    }
    for lane in [LaneId([0, CONTENT_BYTES_MAX + 1]), LaneId([0, 0]), LaneId([0, u64::MAX])] {
        let wrong = ChunkHeader { lane, ..header }.bytes(&file);
        assert!(ChunkHeader::of(&wrong, u64::MAX, &file).is_err(), "{lane:?}");
    }
    for first_seq in [0, LAST_ENTRIES_MAX as u32 + 1, u32::MAX] {
        let wrong = ChunkHeader { first_seq, ..header }.bytes(&file);
        assert!(ChunkHeader::of(&wrong, u64::MAX, &file).is_err(), "{first_seq}");
    }
}

/// A sender may fill its messages with a seek point of the file, if it can read the file.
#[test]
fn a_copied_seek_point_is_none() {
    let file = FileHeader { created: 0, number: 1, id: 7 };
    let copied = ChunkHeader::seek_point(4096, 1_000_000, u64::MAX).bytes(&file);
    let bytes = [&file.bytes()[..], &copied.repeat(100)].concat();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    std::fs::write(&path, &bytes).unwrap();
    let mut scanner = Scanner::of(std::fs::File::open(&path).unwrap(), &path).unwrap();
    let end = bytes.len() as u64;
    assert_eq!(
        scanner.seek_point_from(HEADER, end).unwrap().map(|point| point.at),
        Some(4096),
        "the one at its own place"
    );
    assert!(scanner.seek_point_from(4097, end).unwrap().is_none());
}

#[test]
fn a_file_with_its_seek_points_is_no_larger_than_its_limit() {
    let directory = tempfile::tempdir().unwrap();
    // The second write begins with a seek point.
    let (mut first, mut second) = (Vec::new(), Vec::new());
    record(1, SEEK_POINT_BYTES as usize, &mut first);
    record(2, 1000, &mut second);
    for (spare, is_rotated) in [(HEADER, false), (HEADER - 1, true), (0, true)] {
        let path = directory.path().join(spare.to_string());
        let mut file = RecordFileOptions::new().open(&path).unwrap();
        file.write(&[Chunk::new(LANES[0], None, 1, 1, &first)]).unwrap();
        drop(file);
        let limit = std::fs::metadata(&path).unwrap().len() + HEADER + second.len() as u64 + spare;
        let mut file = RecordFileOptions::new().rotate_bytes(limit).open(&path).unwrap();
        file.write(&[Chunk::new(LANES[0], None, 2, 1, &second)]).unwrap();
        assert_eq!(path.with_extension("000001").exists(), is_rotated, "{spare} bytes for the seek point");
        assert!(std::fs::metadata(&path).unwrap().len() <= limit);
    }
}
