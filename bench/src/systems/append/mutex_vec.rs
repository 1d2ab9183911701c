//! One buffer for all threads, behind a lock; the thread that finds it full flushes it.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;

use crate::{
    parameters::Job,
    workloads::append::{Appender, BUFFER, Opened, Sink, header, record_bytes},
};

pub struct MutexVec {
    buffer: Mutex<Vec<u8>>,
    sink: Arc<dyn Sink>,
    record: usize,
}

impl MutexVec {
    #[cold]
    #[inline(never)]
    fn flush(&self, buffer: &mut Vec<u8>) {
        self.sink.take(buffer, (buffer.len() / self.record) as u64);
        buffer.clear();
    }
}

/// Opens it.
pub fn open(job: &Job, _count: u64, sink: Arc<dyn Sink>) -> Result<Opened<Arc<MutexVec>>> {
    let mut buffer = vec![1; BUFFER];
    buffer.clear();
    let record = record_bytes(job.sizes.max as usize);
    let shared = Arc::new(MutexVec { buffer: Mutex::new(buffer), sink, record });
    let appenders = vec![shared.clone(); job.threads as usize];
    let finish = move || {
        let mut buffer = shared.buffer.lock().unwrap_or_else(PoisonError::into_inner);
        if !buffer.is_empty() {
            shared.flush(&mut buffer);
        }
        Ok(())
    };
    Ok(Opened { appenders, consumer: None, finish: Some(Box::new(finish)), read_back: None })
}

impl Appender for Arc<MutexVec> {
    #[inline(always)]
    fn append(&mut self, number: u32, payload: &[u8]) -> Result<()> {
        let mut buffer = self.buffer.lock().unwrap_or_else(PoisonError::into_inner);
        let end = buffer.len() + record_bytes(payload.len());
        if end > BUFFER {
            self.flush(&mut buffer);
        }
        write_record(&mut buffer, number, payload);
        Ok(())
    }
}

/// Appends a record to a buffer with enough space.
#[inline(always)]
pub fn write_record(buffer: &mut Vec<u8>, number: u32, payload: &[u8]) {
    buffer.extend_from_slice(&header(number, payload.len()).to_le_bytes());
    buffer.extend_from_slice(payload);
    let padding = payload.len().next_multiple_of(8) - payload.len();
    if padding > 0 {
        buffer.extend_from_slice(&[0; 8][..padding]);
    }
}
