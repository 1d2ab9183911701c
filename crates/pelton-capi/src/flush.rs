//! Sinks; flushing a receiver; appenders.

use crate::c::{AnyPath, Bytes, New, Options, Out, Parameter, Raw, structures};
use crate::code::{self, Answer, done, is_done};
use crate::entries::entries;
use crate::handle::{Kind, Object, State};
use crate::options::{AppendersOptions, FlushOptions, RecordFile};
use crate::receiver::{Receiver, numbers};
use crate::writer::{Reserved, Writer, commit_fast, commit_marked, reserve_fast, send_fast, send_short};
use pelton::{Chunk, Deadline, LaneId, Sink};
use std::ffi::{c_int, c_void};

structures! {
    "pelton_chunk" CChunk {
        lane_id: [u64; 2],
        bytes: *const c_void,
        size: usize,
        first_seq: u32,
        messages: u32,
        pid: u32,
        uid: u32,
    }
}

impl CChunk {
    fn of(chunk: &Chunk<'_>) -> CChunk {
        let (LaneId(lane_id), (pid, uid)) = (chunk.lane(), numbers(chunk.peer()));
        let bytes = chunk.bytes();
        CChunk {
            lane_id,
            bytes: bytes.as_ptr().cast(),
            size: bytes.len(),
            first_seq: chunk.first_seq(),
            messages: chunk.message_count(),
            pid,
            uid,
        }
    }
}

/// `pelton_write`.
type Write = unsafe extern "C" fn(*mut c_void, *const CChunk, usize) -> c_int;

impl Parameter for Write {
    type C = Option<Write>;
    type Given = (Option<Write>,);
    type Value<'a> = Write;

    unsafe fn checked(given: &(Option<Write>,), name: &'static str) -> Answer<Write> {
        given.0.ok_or_else(|| code::null(name))
    }
}

/// A sink that is the caller's function.
struct Callback {
    write: Write,
    context: *mut c_void,
    /// Kept for its memory.
    chunks: Vec<CChunk>,
}

impl Callback {
    fn new(write: Write, context: *mut c_void) -> Callback {
        Callback { write, context, chunks: Vec::new() }
    }
}

// SAFETY: `pelton.h` says that any thread may call it, one at a time; the chunks are used only during a call.
unsafe impl Send for Callback {}

impl Sink for Callback {
    fn write(&mut self, chunks: &[Chunk<'_>]) -> pelton::Result<()> {
        self.chunks.clear();
        self.chunks.extend(chunks.iter().map(CChunk::of));
        // SAFETY: the C caller passed this function for these calls.
        let returned = unsafe { (self.write)(self.context, self.chunks.as_ptr(), self.chunks.len()) };
        if returned < 0 { Err(code::sink_error(returned)) } else { Ok(()) }
    }
}

pub struct Flush(pelton::Flush);

impl Object for Flush {
    const KIND: Kind = Kind::Flush;

    fn is_forked(&self) -> bool {
        self.0.is_forked()
    }
}

/// Makes the receiver part of a flush, if options and sink permit.
fn flush<S: Sink + Send + 'static>(
    receiver: Raw<Receiver>,
    options: &FlushOptions,
    sink: impl FnOnce() -> Answer<S>,
) -> Answer<Flush> {
    let check = |receiver: &mut Receiver| {
        receiver.released()?;
        let options = options.build()?;
        done(pelton::Flush::check_options(&options))?;
        Ok((options, sink()?))
    };
    let (receiver, (options, sink)) = receiver.take(check)?;
    done(pelton::Flush::new(&options, receiver.into_channel(), sink)).map(Flush)
}

entries! {
    fn pelton_flush_to_record_file(
        receiver: Raw<Receiver>,
        path: AnyPath,
        file: Options<RecordFile>,
        options: Options<FlushOptions>,
        out: New<Flush>,
    ) {
        out.give(flush(receiver, &options, || done(file.build()?.open(path)))?)
    }

    fn pelton_flush_to_function(
        receiver: Raw<Receiver>,
        write: Write,
        context: *mut c_void,
        options: Options<FlushOptions>,
        out: New<Flush>,
    ) {
        out.give(flush(receiver, &options, || Ok(Callback::new(write, context)))?)
    }

    fn pelton_flush_run(flush: &mut Flush, deadline_ns: Deadline) {
        is_done(match deadline_ns {
            Deadline::Never => flush.0.run().map(|()| true),
            deadline => flush.0.run_until(deadline),
        })
    }

    fn pelton_flush_flush(flush: &mut Flush) {
        done(flush.0.flush())
    }

    fn pelton_flush_sync(flush: &mut Flush) {
        done(flush.0.sync())
    }
}

pub struct Appenders(pelton::Appenders);

impl Object for Appenders {
    const KIND: Kind = Kind::Appenders;

    fn is_forked(&self) -> bool {
        self.0.is_forked()
    }
}

pub struct Appender {
    inner: pelton::Appender,
    reserved: Reserved,
}

impl Object for Appender {
    const KIND: Kind = Kind::Appender;

    fn is_forked(&self) -> bool {
        self.inner.is_forked()
    }

    fn state(&self) -> State {
        if self.reserved.is_some() { State::One } else { State::Free }
    }
}

impl Writer for Appender {
    #[inline(always)]
    fn parts(&mut self) -> (&mut pelton::Sender, &mut Reserved) {
        (self.inner.sender(), &mut self.reserved)
    }
}

entries! {
    fn pelton_appenders_to_record_file(
        path: AnyPath,
        file: Options<RecordFile>,
        options: Options<AppendersOptions>,
        out: New<Appenders>,
    ) {
        let (options, file) = (options.build()?, done(file.build()?.open(path))?);
        out.give(Appenders(done(pelton::Appenders::new(&options, file))?))
    }

    fn pelton_appenders_to_function(
        write: Write,
        context: *mut c_void,
        options: Options<AppendersOptions>,
        out: New<Appenders>,
    ) {
        let sink = Callback::new(write, context);
        out.give(Appenders(done(pelton::Appenders::new(&options.build()?, sink))?))
    }

    fn pelton_appenders_append(appenders: &Appenders, data[size]: Bytes) {
        done(appenders.0.append(data))
    }

    fn pelton_appenders_appender(appenders: &Appenders, out: New<Appender>) {
        out.give(Appender { inner: done(appenders.0.appender())?, reserved: None })
    }

    fn pelton_appenders_flush(appenders: &Appenders) {
        done(appenders.0.flush())
    }

    fn pelton_appenders_sync(appenders: &Appenders) {
        done(appenders.0.sync())
    }

    fn pelton_appender_append(appender: &mut Appender, data[size]: Bytes)
    short { send_short(appender, data, size) }
    fast { send_fast(appender, data, size) }
    {
        appender.unreserved()?;
        done(appender.inner.append(data))
    }

    fn pelton_appender_reserve(appender: &mut Appender, size: usize, out: Out<*mut c_void>)
    fast { reserve_fast(appender, size, out) }
    {
        out.write(appender.reserve(size, |appender| appender.inner.reserve_space(size).map(Some))?);
        Ok(())
    }

    fn pelton_appender_commit(appender: &mut Appender, size: usize)
    short { commit_fast(appender, size) }
    fast { commit_marked(appender, size) }
    {
        appender.commit(size)
    }

    fn pelton_appender_abort(appender: &mut Appender) {
        appender.abort()
    }
}
