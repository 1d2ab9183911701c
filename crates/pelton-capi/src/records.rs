//! Reading record files.

use crate::c::{AnyPath, New, Out, structures};
use crate::code::{done, found};
use crate::entries::entries;
use crate::handle::{Kind, Object};
use crate::receiver::numbers;
use pelton::{LaneId, RecordReader};
use std::ffi::c_void;

structures! {
    #[derive(Clone, Copy)]
    "pelton_record" CRecord {
        data: *const c_void,
        size: usize,
        lane_id: [u64; 2],
        seq: u32,
        pid: u32,
        uid: u32,
        reserved: u32,
    }
}

impl CRecord {
    const NONE: CRecord =
        CRecord { data: std::ptr::null(), size: 0, lane_id: [0; 2], seq: 0, pid: 0, uid: 0, reserved: 0 };
}

/// A reader of a record file.
pub struct Records {
    /// Those of the chunk that was read last, in the reader's memory: the next chunk is read when there is none left.
    records: Option<pelton::Records<'static>>,
    /// What all records of that chunk share.
    of_chunk: CRecord,
    reader: RecordReader,
}

impl Object for Records {
    const KIND: Kind = Kind::Records;

    /// A forked child may continue: the position in the file is the handle's own.
    fn is_forked(&self) -> bool {
        false
    }
}

impl Records {
    fn next(&mut self) -> pelton::Result<Option<CRecord>> {
        loop {
            if let Some(record) = self.records.as_mut().and_then(Iterator::next) {
                let (seq, payload) = (record.seq(), record.payload());
                return Ok(Some(CRecord { data: payload.as_ptr().cast(), size: payload.len(), seq, ..self.of_chunk }));
            }
            self.records = None;
            let Some(chunk) = self.reader.next_chunk()? else { return Ok(None) };
            let (LaneId(lane_id), (pid, uid)) = (chunk.lane(), numbers(chunk.peer()));
            self.of_chunk = CRecord { lane_id, pid, uid, ..CRecord::NONE };
            // SAFETY: only the lifetime differs. They are in memory that the reader keeps until it reads another chunk
            // or is dropped, and this field is cleared before the one and dropped before the other.
            self.records =
                Some(unsafe { std::mem::transmute::<pelton::Records<'_>, pelton::Records<'static>>(chunk.records()) });
        }
    }
}

entries! {
    fn pelton_records_open(path: AnyPath, out: New<Records>) {
        out.give(Records { records: None, of_chunk: CRecord::NONE, reader: done(RecordReader::open(path))? })
    }

    fn pelton_records_next(records: &mut Records, out: Out<CRecord>) {
        out.write(found(records.next())?);
        Ok(())
    }
}
