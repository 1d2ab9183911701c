//! Reading record files.

use crate::code;
use crate::flushing::numbers;
use crate::handle::give;
use crate::handle::{Handle, Object, call, catch, number};
use crate::options::path;
use pelton::{LaneId, RecordReader, Records};
use std::ffi::{c_char, c_int, c_void};

/// `pelton_record`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CRecord {
    data: *const c_void,
    size: usize,
    lane_id: [u64; 2],
    seq: u32,
    pid: u32,
    uid: u32,
    reserved: u32,
}

const _: () = assert!(size_of::<CRecord>() == 48);

/// A reader of a record file behind a handle.
pub struct Reading {
    /// Those of the chunk that was read last, in the reader's memory: it is asked for another only when there is none.
    records: Option<Records<'static>>,
    /// What is the same for all of them.
    of_chunk: CRecord,
    reader: RecordReader,
}

impl Object for Reading {
    const KIND: &'static str = "records";

    /// A child reads on by itself: the file's position is the handle's own.
    fn is_forked(&self) -> bool {
        false
    }

    fn is_free(&self) -> bool {
        true
    }
}

impl Reading {
    fn next(&mut self) -> pelton::Result<Option<CRecord>> {
        loop {
            if let Some(record) = self.records.as_mut().and_then(Iterator::next) {
                let (seq, payload) = (record.seq(), record.payload());
                return Ok(Some(CRecord { data: payload.as_ptr().cast(), size: payload.len(), seq, ..self.of_chunk }));
            }
            self.records = None;
            let Some(chunk) = self.reader.next_chunk()? else { return Ok(None) };
            let (LaneId(lane_id), (pid, uid)) = (chunk.lane(), numbers(chunk.peer()));
            self.of_chunk = CRecord { lane_id, pid, uid, ..NONE };
            // SAFETY: only the time is another: they stand in memory that the reader keeps as it is until it is asked for another
            // chunk, or dropped, and they are gone by then.
            self.records = Some(unsafe { std::mem::transmute::<Records<'_>, Records<'static>>(chunk.records()) });
        }
    }
}

const NONE: CRecord = CRecord { data: std::ptr::null(), size: 0, lane_id: [0; 2], seq: 0, pid: 0, uid: 0, reserved: 0 };

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_records_open(file: *const c_char, out: *mut *mut Handle<Reading>) -> c_int {
    let open = || {
        if file.is_null() {
            return Err(code::null("path"));
        }
        // SAFETY: the caller's promise.
        let reader = RecordReader::open(unsafe { path(file) }).map_err(|error| code::of(&error))?;
        Ok(Reading { records: None, of_chunk: NONE, reader })
    };
    // SAFETY: the caller's promises.
    number(catch(|| unsafe { give(out, open) }))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_records_next(records: *mut Handle<Reading>, out: *mut CRecord) -> c_int {
    let next = |reading: &mut Reading| {
        if out.is_null() {
            return Err(code::null("out"));
        }
        let record = reading.next().map_err(|error| code::of(&error))?.ok_or(code::AGAIN)?;
        // SAFETY: the caller's promise.
        unsafe { out.write(record) };
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { call(records, next) }
}
