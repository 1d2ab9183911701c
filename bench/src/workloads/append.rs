//! Threads of one process append messages. The buffer flushes them to a callback that counts them, or to a file, whose
//! records the same callback gets after the pass.
//!
//! Before the passes each system makes a smaller one that checks every record: its length and number, its place in the
//! order of its thread, and all its bytes. In the passes a thread's messages all have the same bytes. The callback
//! checks the first length of each buffer and how many bytes its messages have; at the end the sums must be exact.

use std::{
    hint::black_box,
    panic,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use anyhow::{Result, bail, ensure};
use clap::Args;

use crate::{
    parameters::{Job, Kind, Pass, Role},
    payload::{buffer, first_number, number, stamp, whole},
    plan::{Common, Defaults, Options, Passes, Plan},
    record::RATES,
    run::exchange,
    side::{PassReport, Section, passes},
};

/// Threads of one process append messages with headers; the buffer flushes them
///
/// Defaults: 16 bytes, lanes of 1 MiB, 25,600,000 messages of each thread; with --file 256 bytes and 1,000,000. The
/// threads are not pinned.
#[derive(Args)]
pub struct Append {
    /// Threads, all in one process
    #[arg(long, value_name = "T", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,

    /// Appends to a file in this directory, removed at the end, instead of to a callback that counts
    ///
    /// The file is not synced. After each pass the program checks what the file holds; the figures leave that out.
    #[arg(long, value_name = "DIR")]
    file: Option<PathBuf>,
}

impl Options for Append {
    const NAME: &str = "append";

    fn plan(&self, common: &Common) -> Result<Plan> {
        common.no_seconds(Self::NAME)?;
        if let Some(file) = &self.file {
            ensure!(file.is_dir(), "found --file {}, wanted a directory", file.display());
        }
        let (kind, size, most, systems) = match self.file {
            Some(_) => (Kind::AppendFile, 256, 1_000_000, "pelton,write"),
            None => (Kind::Append, 16, 25_600_000, "pelton,limits,bump,mutex-vec,array-queue,seg-queue"),
        };
        let defaults = Defaults { kind, roles: &[Role::Appender], size, capacity: 1 << 20, sleeps: true, systems };
        let mut plan = common.plan::<Self>(defaults, |_| most)?;
        let Plan { count, job: Job { sizes, .. }, .. } = plan;
        ensure!(
            sizes.is_fixed() && (8..=65_536).contains(&sizes.max),
            "found --size {sizes} with append, wanted one size from 8 to 65536"
        );
        ensure!(
            count <= u32::MAX.into(),
            "found --count {count}, wanted at most {}: a header's number has 32 bits",
            u32::MAX
        );
        (plan.job.threads, plan.job.messages_each) = (self.threads, self.threads);
        if let Some(file) = &self.file {
            plan.job.directory.clone_from(file);
        }
        let file = self.file.as_ref().map(|file| file.display().to_string());
        Ok(Plan {
            // The kernel places the threads of one process.
            placement: None,
            passes: Passes::Counted,
            own: vec![("threads", self.threads.into()), ("file", file.into())],
            figure: Some("messages_per_second"),
            columns: vec![RATES],
            run: exchange,
            ..plan
        })
    }
}

/// Bytes of a buffer.
pub const BUFFER: usize = 1 << 20;

/// A header's bytes.
pub const HEADER: usize = 8;

/// The header before a payload, as in pelton's lanes and in limits.c.
#[inline]
pub fn header(number: u32, len: usize) -> u64 {
    (number as u64) << 32 | len as u64
}

/// Bytes of the record of a message of `len` bytes: records begin at multiples of eight.
#[inline]
pub const fn record_bytes(len: usize) -> usize {
    HEADER + len.next_multiple_of(8)
}

/// Consumes buffers, one at a time; afterwards the system may reuse the space. Systems call it as `dyn`, as they would
/// a user's callback.
pub trait Sink: Send + Sync {
    /// So many records, back to back.
    fn take(&self, records: &[u8], messages: u64);
}

/// One thread's endpoint.
pub trait Appender: Send {
    /// Appends; waits when there is no room. `number` counts the thread's messages.
    fn append(&mut self, number: u32, payload: &[u8]) -> Result<()>;
}

/// A task for any thread.
pub type Task = Box<dyn FnOnce() -> Result<()> + Send>;

/// An opened system.
pub struct Opened<A> {
    /// One for each thread, which drops it when it has appended all
    pub appenders: Vec<A>,
    /// For a thread beside the others; ends when it has passed all messages on
    pub consumer: Option<Task>,
    /// After the end of all threads: passes the rest on
    pub finish: Option<Task>,
    /// With a file: passes its content to the sink, and removes it. Not measured
    pub read_back: Option<Task>,
}

/// Messages of each thread in the first, checked pass: some full buffers, and one that is not full.
const CHECKED_MESSAGES: u64 = 100_000;

/// How many that are in this job.
pub fn checked(job: &Job) -> u64 {
    job.passes[0].count.min(CHECKED_MESSAGES)
}

/// The part of all threads. `open` gets the number of messages that each thread appends.
pub fn part<A: Appender>(job: &Job, open: impl Fn(&Job, u64, Arc<dyn Sink>) -> Result<Opened<A>>) -> Result<()> {
    let size = job.sizes.max as usize;
    let checking =
        Arc::new(Checking { size, state: Mutex::new(Checked { due: first_numbers(job), ..Checked::default() }) });
    let check = Pass { count: checked(job), ..Pass::default() };
    append::<_, true>(job, &check, open(job, check.count, checking.clone())?)?;
    checking.finish(job, &check)?;
    passes(job, |pass| {
        let counting = Arc::new(Counting { size, ..Counting::default() });
        let report = append::<_, false>(job, pass, open(job, pass.count, counting.clone())?)?;
        counting.finish(job, pass)?;
        Ok(report)
    })
}

fn first_numbers(job: &Job) -> Vec<u64> {
    (0..job.threads).map(first_number).collect()
}

/// All threads append `pass.count` messages each. `NUMBERED`: each message has its thread's and its own number.
fn append<A: Appender, const NUMBERED: bool>(job: &Job, pass: &Pass, opened: Opened<A>) -> Result<PassReport> {
    let Opened { appenders, consumer, finish, read_back } = opened;
    let section = Section::start(pass)?;
    thread::scope(|scope| -> Result<()> {
        let consumer = consumer.map(|consumer| scope.spawn(consumer));
        let append =
            |(thread, appender)| scope.spawn(move || append_all::<_, NUMBERED>(job, thread, appender, pass.count));
        let threads: Vec<_> = (0..job.threads).zip(appenders).map(append).collect();
        let ended: Vec<_> = threads.into_iter().chain(consumer).map(thread::ScopedJoinHandle::join).collect();
        // The first failure caused the others: an endpoint that was gone, for instance.
        ended.into_iter().try_for_each(|ended| ended.unwrap_or_else(|panic| panic::resume_unwind(panic)))
    })?;
    finish.map_or(Ok(()), |finish| finish())?;
    let report = section.end(job.messages(pass.count) * job.sizes.max as u64)?;
    read_back.map_or(Ok(()), |read_back| read_back())?;
    Ok(report)
}

/// One thread's part.
fn append_all<A: Appender, const NUMBERED: bool>(job: &Job, thread: u32, appender: A, count: u64) -> Result<()> {
    let mut payload = buffer(job.sizes.max as usize);
    stamp(&mut payload, first_number(thread));
    // A constant size, which the compiler copies without a call.
    match <[u8; 16]>::try_from(&payload[..]) {
        Ok(mut payload) => append_each::<A, _, NUMBERED>(thread, appender, count, black_box(&mut payload)),
        Err(_) => append_each::<A, _, NUMBERED>(thread, appender, count, black_box(&mut payload)),
    }
}

fn append_each<A: Appender, P: AsRef<[u8]> + AsMut<[u8]>, const NUMBERED: bool>(
    thread: u32,
    mut appender: A,
    count: u64,
    payload: &mut P,
) -> Result<()> {
    for n in 0..count {
        if NUMBERED {
            stamp(payload.as_mut(), first_number(thread) + n);
        }
        appender.append(n as u32, payload.as_ref())?;
    }
    Ok(())
}

/// Counts messages and bytes.
#[derive(Default)]
struct Counting {
    size: usize,
    messages: AtomicU64,
    bytes: AtomicU64,
    wrong: AtomicBool,
}

impl Sink for Counting {
    fn take(&self, records: &[u8], messages: u64) {
        let len = number(records) as u32;
        if len as usize != self.size || records.len() as u64 != messages * record_bytes(self.size) as u64 {
            self.wrong.store(true, Ordering::Relaxed);
        }
        self.messages.fetch_add(messages, Ordering::Relaxed);
        self.bytes.fetch_add(records.len() as u64, Ordering::Relaxed);
    }
}

impl Counting {
    fn finish(&self, job: &Job, pass: &Pass) -> Result<()> {
        ensure!(!self.wrong.load(Ordering::Relaxed), "a buffer does not begin with a record, or is not full of them");
        exact(job, pass, self.messages.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }
}

fn exact(job: &Job, pass: &Pass, messages: u64, bytes: u64) -> Result<()> {
    let wanted = job.messages(pass.count);
    let bytes_wanted = wanted * record_bytes(job.sizes.max as usize) as u64;
    ensure!(
        (messages, bytes) == (wanted, bytes_wanted),
        "{messages} messages in {bytes} bytes arrived, wanted {wanted} in {bytes_wanted}"
    );
    Ok(())
}

/// Checks every record.
struct Checking {
    size: usize,
    state: Mutex<Checked>,
}

#[derive(Default)]
struct Checked {
    /// The next number of each thread.
    due: Vec<u64>,
    messages: u64,
    bytes: u64,
    wrong: Option<String>,
}

impl Checked {
    /// Checks the next message of any thread and returns its number.
    fn check(&mut self, payload: &[u8], size: usize) -> u64 {
        let found = if payload.len() == size { number(payload) } else { u64::MAX };
        match self.due.iter_mut().find(|due| **due == found) {
            Some(due) if whole(payload) => *due += 1,
            _ => self.fail(format!("message {found:#x} is none of the expected {:x?}, or has other bytes", self.due)),
        }
        self.messages += 1;
        found
    }

    fn fail(&mut self, reason: String) {
        self.wrong.get_or_insert(reason);
    }
}

impl Checking {
    fn state(&self) -> MutexGuard<'_, Checked> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn finish(&self, job: &Job, pass: &Pass) -> Result<()> {
        let state = self.state();
        if let Some(reason) = &state.wrong {
            bail!("{reason}");
        }
        exact(job, pass, state.messages, state.bytes)
    }
}

impl Sink for Checking {
    fn take(&self, records: &[u8], messages: u64) {
        let mut state = self.state();
        let before = state.messages;
        state.bytes += records.len() as u64;
        for record in records.chunks(record_bytes(self.size)) {
            let (header, rest) = record.split_at(HEADER.min(record.len()));
            let (len, counted) = (number(header) as u32 as usize, (number(header) >> 32) as u32);
            let in_all = state.messages;
            let payload = rest.get(..len).unwrap_or_default();
            let own = state.check(payload, self.size);
            // The header has its thread's number of the message, or where one thread makes all records, that one's; a
            // lane's first is 1.
            if ![own as u32, (own as u32).wrapping_add(1), in_all as u32].contains(&counted) {
                state.fail(format!("the header of message {own:#x} has the number {counted}"));
            }
        }
        if state.messages - before != messages {
            state.fail(format!("a buffer of {} bytes was reported with {messages} messages", records.len()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: usize = 20;

    fn checking(threads: u32) -> Checking {
        let due = (0..threads).map(first_number).collect();
        Checking { size: SIZE, state: Mutex::new(Checked { due, ..Checked::default() }) }
    }

    fn record(thread: u32, n: u64) -> Vec<u8> {
        let mut payload = buffer(SIZE);
        stamp(&mut payload, first_number(thread) + n);
        let mut record = header(n as u32, SIZE).to_le_bytes().to_vec();
        record.extend(payload);
        record.resize(record_bytes(SIZE), 0);
        record
    }

    #[test]
    fn a_record_lost_doubled_changed_or_out_of_order_is_detected() {
        let wrong = |records: &[Vec<u8>], messages: u64| {
            let checking = checking(2);
            checking.take(&records.concat(), messages);
            checking.state().wrong.clone()
        };
        let right = [record(0, 0), record(1, 0), record(1, 1), record(0, 1)];
        assert_eq!(wrong(&right, 4), None);
        assert!(wrong(&right, 5).unwrap().contains("reported with 5"));
        let order = [record(0, 0), record(1, 1), record(1, 0)];
        assert!(wrong(&order, 3).unwrap().contains("none of the expected"));
        assert!(wrong(&[record(0, 0), record(0, 0)], 2).unwrap().contains("none of the expected"));
        assert!(wrong(&[record(2, 0)], 1).unwrap().contains("none of the expected"));
        for (at, words) in [(0, "none of the expected"), (4, "has the number"), (HEADER + SIZE - 1, "other bytes")] {
            let mut changed = record(0, 0);
            changed[at] ^= 4;
            assert!(wrong(&[changed], 1).unwrap().contains(words), "byte {at}");
        }
    }

    #[test]
    fn a_truncated_buffer_is_detected_by_the_counting_sink() {
        let counting = Counting { size: SIZE, ..Counting::default() };
        let records = [record(0, 0), record(0, 1)].concat();
        counting.take(&records, 2);
        assert!(!counting.wrong.load(Ordering::Relaxed));
        counting.take(&records[..40], 2);
        assert!(counting.wrong.load(Ordering::Relaxed));
    }
}
