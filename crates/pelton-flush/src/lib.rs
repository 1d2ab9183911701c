//! Messages in chunks to a sink, from a receiver or from appending threads; and the record file, a sink on disk. An
//! internal crate: use the crate `pelton`, which has the documentation.

mod flush;
mod record_file;

pub use flush::{Appender, Appenders, Chunk, Flush, Forward, Record, Records, Sink};
pub use record_file::{FileChange, FileChunk, RecordFile, RecordFileOptions, RecordReader};
