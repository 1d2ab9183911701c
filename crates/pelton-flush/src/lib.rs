//! Messages in chunks to a sink, from a receiver or from appending threads; and the sink that is a record file. An
//! internal crate: use the crate `pelton`, which has the documentation.

mod flush;
mod record_file;

pub use flush::{Appender, Appenders, Flush, Forward, Run, Sink};
pub use record_file::{Chunk, FileChange, Record, RecordFile, RecordFileOptions, RecordReader, Records};
