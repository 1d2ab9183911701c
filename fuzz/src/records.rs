//! Record files.

use crate::program::Program;
use pelton::{Chunk, Error, FileChunk, LaneId, RecordFile, RecordFileOptions, RecordReader, Sink};
use pelton_testkit::{TestDir, descriptors};
use std::path::Path;

const HEADER: usize = 64;

/// A record file, written or of any bytes, is changed by the program, optionally with valid checksums. The target
/// reads it, and a writer opens it and continues it. The same with the next file that a killed rotation left.
pub fn records(program: &[u8]) {
    let before = descriptors();
    let mut program = Program(program);
    let place = TestDir::unwatched();
    let (path, next_file) = (place.path().join("log"), place.path().join("log.pelton-next"));
    let mut bytes = match program.byte() % 8 {
        0 => program.bytes(300).to_vec(),
        _ => written(&path, &mut program),
    };
    for _ in 0..program.below(6) {
        change(&mut bytes, &mut program);
    }
    for entry in std::fs::read_dir(place.path()).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    let is_next_file = program.byte() % 8 == 0;
    let at = if is_next_file { &next_file } else { &path };
    std::fs::write(at, &bytes).unwrap();
    read(at);
    continue_writing(&path, &bytes, is_next_file, &mut program);
    drop(place);
    assert_eq!(descriptors(), before, "descriptors were kept");
}

/// The same with a compressed chunk: its content is such a file's, changed, and its header and its frame may lie, under
/// valid checksums. Whole chunks follow.
pub fn compressed(program: &[u8]) {
    let before = descriptors();
    let mut program = Program(program);
    let place = TestDir::unwatched();
    let path = place.path().join("log");
    let whole = written(&path, &mut program);
    let mut changed = whole.clone();
    for _ in 0..program.below(4) {
        change(&mut changed, &mut program);
    }
    let content = changed.get(HEADER..).unwrap_or_default();
    let mut bytes = whole[..HEADER].to_vec();
    bytes.extend(compressed_chunk(content, &whole, &mut program));
    bytes.extend(&whole[HEADER..]);
    if program.byte() % 4 == 0 {
        change(&mut bytes, &mut program);
    }
    for entry in std::fs::read_dir(place.path()).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    std::fs::write(&path, &bytes).unwrap();
    read_some(&path, content.len(), |found| match found {
        Ok(_) => {}
        Err(error) => refused(error),
    });
    if let Ok(mut reader) = RecordReader::open(&path) {
        if let Err(error) = reader.skip_messages(program.below(20) as u64).and_then(|_| reader.next_chunk().map(drop)) {
            refused(error);
        }
    }
    match RecordFile::open(&path) {
        Ok(mut file) => {
            write(&mut file, 99, 5, &mut program);
            drop(file);
            let mut last = None;
            read_some(&path, content.len(), |found| match found {
                Ok(chunk) => last = Some(chunk.lane()),
                Err(error) => refused(error),
            });
            assert_eq!(last, Some(LaneId([99, 7])));
        }
        Err(error) => refused(error),
    }
    drop(place);
    assert_eq!(descriptors(), before, "descriptors were kept");
}

/// A chunk of this content, with the checksums of the file that it is in.
fn compressed_chunk(content: &[u8], file: &[u8], program: &mut Program) -> Vec<u8> {
    let entries = program.below(4);
    let mut body = Vec::new();
    for _ in 0..entries {
        let lane = program.below(3) as u64;
        [lane, 7, u64::from(program.byte())].iter().for_each(|word| body.extend(word.to_le_bytes()));
    }
    let mut frame = zstd::bulk::compress(content, 1).unwrap();
    for _ in 0..program.below(3) {
        let at = program.below(frame.len());
        frame[at] = program.byte();
    }
    body.extend(&frame);
    body.resize(body.len().next_multiple_of(8), 0);
    let mut header = [0; HEADER];
    header[..4].copy_from_slice(b"pchk");
    header[4] = 2;
    let size = content.len() as u64;
    let size = if program.byte() % 4 == 0 { program.lie(size) } else { size };
    for (at, word) in [(8, body.len() as u64), (24, size), (32, 1 << 32 | entries as u64)] {
        header[at..at + 8].copy_from_slice(&word.to_le_bytes());
    }
    header[56..60].copy_from_slice(&crc32fast::hash(&body).to_le_bytes());
    let mut sum = crc32fast::Hasher::new();
    sum.update(&file[32..40]);
    sum.update(&header[..60]);
    header[60..].copy_from_slice(&sum.finalize().to_le_bytes());
    [&header[..], &body].concat()
}

/// A chunk of consecutive messages of one lane in its record layout, from this number on.
fn chunk_of(first_seq: u32, messages: u32, program: &mut Program) -> Vec<u8> {
    let mut bytes = Vec::new();
    for nth in 0..messages {
        let payload = program.below(40);
        // The numbering skips 0.
        let (seq, wrapped) = first_seq.overflowing_add(nth);
        bytes.extend((u64::from(seq + u32::from(wrapped)) << 32 | payload as u64).to_le_bytes());
        bytes.extend(std::iter::repeat_n(nth as u8, payload.next_multiple_of(8)));
    }
    bytes
}

fn write(file: &mut RecordFile, lane: u64, first_seq: u32, program: &mut Program) {
    let messages = 1 + program.below(5) as u32;
    let bytes = chunk_of(first_seq, messages, program);
    file.write(&[Chunk::new(LaneId([lane, 7]), None, first_seq, messages, &bytes)]).unwrap();
}

/// The file of a writer that also rotates.
fn written(path: &Path, program: &mut Program) -> Vec<u8> {
    let mut options = RecordFileOptions::new();
    if program.byte() % 2 == 0 {
        options = options.rotate_bytes(500);
    }
    let mut file = options.open(path).unwrap();
    for turn in 0..program.below(8) as u32 {
        let lane = program.below(3) as u64;
        let first_seq = program.of(&[1 + turn * 5, u32::MAX - 2]);
        write(&mut file, lane, first_seq, program);
    }
    drop(file);
    std::fs::read(path).unwrap()
}

fn change(bytes: &mut Vec<u8>, program: &mut Program) {
    let some_word = |bytes: &[u8], program: &mut Program| match program.byte() % 2 {
        // In a header, most often; headers may be anywhere.
        0 => program.below(HEADER / 8) * 8,
        _ => program.below((bytes.len() / 8).max(1)) * 8,
    };
    match program.byte() % 8 {
        0..=2 => {
            let at = some_word(bytes, program);
            if let Some(word) = bytes.get_mut(at..at + 8) {
                let lie = program.lie(u64::from_le_bytes((&*word).try_into().unwrap()));
                word.copy_from_slice(&lie.to_le_bytes());
            }
        }
        3 => bytes.truncate(program.below(bytes.len() + 1)),
        4 => bytes.extend(program.bytes(200)),
        5 => {
            // Repeats a part of it.
            let at = some_word(bytes, program).min(bytes.len());
            let part = bytes[at..].iter().copied().take(200).collect::<Vec<u8>>();
            bytes.extend(part);
        }
        _ => fix_checksums(bytes, program),
    }
}

/// Makes the checksums valid of the file's header, and of some of its chunks, whatever they say.
fn fix_checksums(bytes: &mut [u8], program: &mut Program) {
    if bytes.len() < HEADER {
        return;
    }
    let sum = crc32fast::hash(&bytes[..60]);
    bytes[60..64].copy_from_slice(&sum.to_le_bytes());
    let id: [u8; 8] = bytes[32..40].try_into().unwrap();
    let mut at = HEADER;
    while at + HEADER <= bytes.len() {
        let records = u64::from_le_bytes(bytes[at + 8..at + 16].try_into().unwrap());
        let end = (at + HEADER).saturating_add(records as usize);
        if let Some(records) = bytes.get(at + HEADER..end).filter(|_| program.byte() % 4 != 0) {
            let sum = crc32fast::hash(records);
            bytes[at + 56..at + 60].copy_from_slice(&sum.to_le_bytes());
        }
        let mut sum = crc32fast::Hasher::new();
        sum.update(&id);
        sum.update(&bytes[at..at + 60]);
        bytes[at + 60..at + 64].copy_from_slice(&sum.finalize().to_le_bytes());
        if end <= at || end > bytes.len() {
            return;
        }
        at = end.next_multiple_of(8);
    }
}

/// Reads to the end, or to the first failure. Returns the last number of each chunk, with its lane; `None` for a
/// damaged one.
fn read(path: &Path) -> Vec<Option<(LaneId, u32)>> {
    let mut found = Vec::new();
    let bytes = std::fs::metadata(path).unwrap().len();
    read_some(path, 0, |one| match one {
        Ok(chunk) => {
            assert!(chunk.offset() + chunk.bytes().len() as u64 <= bytes);
            found.push(Some((chunk.lane(), chunk.last_seq())));
        }
        Err(error @ Error::NotARecordFile { .. }) if found.is_empty() => refused(error),
        Err(error) => {
            refused(error);
            found.push(None);
        }
    });
    found
}

/// Reads to the end, or to the first failure. `content` bytes more are in a frame.
fn read_some(path: &Path, content: usize, mut each: impl FnMut(pelton::Result<FileChunk<'_>>)) {
    let mut reader = match RecordReader::open(path) {
        Ok(reader) => reader,
        Err(error) => return each(Err(error)),
    };
    let bytes = std::fs::metadata(path).unwrap().len() as usize;
    // No more chunks than fit, and each may be damaged.
    for _ in 0..2 + (bytes + content) / 8 {
        match reader.next_chunk() {
            Ok(Some(chunk)) => {
                let mut seqs = chunk.records().map(|record| {
                    std::hint::black_box(record.payload().iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)));
                    record.seq()
                });
                assert_eq!(seqs.next(), Some(chunk.first_seq()));
                assert_eq!(seqs.last().unwrap_or(chunk.first_seq()), chunk.last_seq());
                assert_eq!(chunk.payloads().count(), chunk.message_count() as usize);
                each(Ok(chunk));
            }
            Ok(None) => return,
            Err(error) => each(Err(error)),
        }
    }
}

fn refused(error: Error) {
    match error {
        Error::NotARecordFile { .. } | Error::Damaged { .. } => {}
        error => panic!("{error}"),
    }
}

/// A writer refuses the file and changes nothing, or cuts the torn part, knows the last number of each lane, and
/// continues it.
fn continue_writing(path: &Path, bytes: &[u8], is_next_file: bool, program: &mut Program) {
    let mut file = match RecordFile::open(path) {
        Ok(file) => file,
        Err(error) => {
            refused(error);
            assert!(is_next_file || std::fs::read(path).unwrap() == bytes, "a refused file is unchanged");
            return;
        }
    };
    let kept = read(path);
    // A damaged chunk of invalid records, if it was written so, still has numbers.
    let last =
        |place: usize| kept[place + 1..].iter().all(|later| later.is_some_and(|it| it.0 != kept[place].unwrap().0));
    for (place, (lane, seq)) in kept.iter().enumerate().filter_map(|(place, it)| Some((place, (*it)?))) {
        assert!(!last(place) || file.last_seq(lane) == Some(seq));
    }
    assert!(
        is_next_file || std::fs::metadata(path).unwrap().len() + file.cut_bytes() == bytes.len().max(HEADER) as u64
    );
    write(&mut file, 99, 5, program);
    drop(file);
    let now = read(path);
    assert!(
        now.len() == kept.len() + 1
            && now.starts_with(&kept)
            && now[kept.len()].is_some_and(|it| it.0 == LaneId([99, 7]))
    );
}
