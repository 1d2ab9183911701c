//! The parts of the two sides, for every system.
//!
//! A side connects, warms up with a few messages checked byte by byte, and then makes its passes. Before each it
//! reports `ready` and waits for `go`; the side that must be first reports `started`. Each message carries its number,
//! which the other side compares.

use std::{
    hint::black_box,
    io::{BufRead, Write},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::{
    append, batches, call, fan_in, kill,
    measure::{self, CallCounter, Usage, delay, now_ns},
    memory,
    parameters::{Job, Pass, Role, SystemName, Wait, Workload},
    reattach,
    systems::{
        ByDirectory, BySocket, Pelton, Pipe, Receiving, Sending, SockSeqpacket, SockSeqpacketBatched, SockStream,
        SockStreamBatched, System, c::CSide, limits, lisp, threads::Batches,
    },
    threads,
};

/// Messages before the first pass: enough to load the code and touch the first pages.
pub const WARM_UP: u64 = 16;

/// One side's report of a pass.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PassReport {
    /// Before the first message
    pub start_ns: u64,
    /// After the last
    pub end_ns: u64,
    /// Used between the two
    pub usage: Usage,
    /// System calls, in a pass that counts them
    pub calls: Option<u64>,
    /// Payload that was sent (sender, asker) or received
    pub bytes: u64,
    /// Of single rounds, in a pass that times them
    pub percentiles: Option<Percentiles>,
    /// Of the channel, seen by the side that receives
    pub resident_bytes: Option<u64>,
}

/// Round trips in nanoseconds, without the delays.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Percentiles {
    /// Of all
    pub mean_ns: f64,
    /// Half of the rounds took no longer; null, as those below, unless ten rounds and more did
    pub p50_ns: Option<u64>,
    /// 90 %
    pub p90_ns: Option<u64>,
    /// 99 %
    pub p99_ns: Option<u64>,
    /// 99.9 %
    pub p999_ns: Option<u64>,
    /// 99.99 %
    pub p9999_ns: Option<u64>,
    /// Quantiles and their values, as far as there are enough rounds
    pub ladder: Vec<(f64, u64)>,
}

/// Quantiles for a plot, evenly spread over 1 / (1 - quantile).
const LADDER: [f64; 20] = [
    0.0, 0.1, 0.25, 0.5, 0.625, 0.75, 0.82, 0.9, 0.94, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9998, 0.9999,
    0.99995, 0.99999,
];

/// Does one side's part and reports by standard output.
pub fn side(job: &Job) -> Result<()> {
    ensure!(
        !matches!(job.wait, Wait::Uv | Wait::UvBulk) || job.system.is_in_c(),
        "only a side in C is in libuv's loop: write pelton-c"
    );
    if job.workload == Workload::Reattach {
        ensure!(job.system == SystemName::PeltonPath, "only a channel that a directory keeps can be gone back to");
        return reattach::side(job);
    }
    if job.system.is_limits() {
        return say(&limits::guard(job)?);
    }
    match job.workload {
        Workload::FanIn => return fan_in::side(job),
        Workload::Append => return append::side(job),
        Workload::Call => return call::side(job),
        Workload::Threads => return threads::side(job),
        _ => {}
    }
    match job.system {
        SystemName::PeltonC | SystemName::EventfdRing => serve_in_c(job),
        SystemName::PeltonSbcl => lisp::side(job, 0),
        SystemName::Pelton => part::<Pelton<BySocket>>(job),
        SystemName::PeltonPath => part::<Pelton<ByDirectory>>(job),
        SystemName::Pipe => part::<Pipe>(job),
        SystemName::SockStream => part::<SockStream>(job),
        SystemName::SockStreamBatched => part::<SockStreamBatched>(job),
        SystemName::SockSeqpacket => part::<SockSeqpacket>(job),
        SystemName::SockSeqpacketBatched => part::<SockSeqpacketBatched>(job),
        SystemName::PeltonBatches => batches::part::<Batches>(job),
        system => bail!("{system:?} is no system of {:?}", job.workload),
    }
}

/// One side's part in any workload of two sides.
pub fn part<S: System>(job: &Job) -> Result<()> {
    match job.workload {
        Workload::Memory => memory::part::<S>(job),
        Workload::Kill => kill::part::<S>(job),
        _ => serve::<S>(job),
    }
}

/// One side's part in streams and round trips; and a sender's in a fan-in.
pub fn serve<S: System>(job: &Job) -> Result<()> {
    let steps = job.work_steps();
    let mut payloads = Payloads::new(job.sizes.max as usize);
    match job.role {
        Role::Sender => {
            let mut sending = S::sending(job)?;
            // Each of several senders has numbers of its own.
            let first = fan_in::first_number(job.index);
            payloads.begin(first);
            for n in first..first + WARM_UP {
                send(&mut sending, &mut payloads, job.sizes.max as usize, n)?;
            }
            sending.flush()?;
            passes(job, |pass| {
                let mut sizes = job.sizes.sequence();
                payloads.begin(first);
                let mut bytes = 0;
                let section = Section::start(pass)?;
                with_work(steps, first..first + job.share(job.index, pass.count), |n| {
                    let size = sizes.next_size();
                    send(&mut sending, &mut payloads, size, n)?;
                    bytes += size as u64;
                    Ok(())
                })?;
                sending.flush()?;
                section.end(bytes)
            })
        }
        Role::Receiver => {
            let mut receiving = S::receiving(job)?;
            for n in 0..WARM_UP {
                receive(&mut receiving, n, whole)?;
            }
            passes(job, |pass| {
                let mut bytes = 0;
                let section = Section::start(pass)?;
                let mut sizes = job.sizes.sequence();
                with_work(steps, 0..pass.count - 1, |n| {
                    bytes += receive_sized(&mut receiving, n, sizes.next_size(), glance)? as u64;
                    Ok(())
                })?;
                bytes += receive_sized(&mut receiving, pass.count - 1, sizes.next_size(), whole)? as u64;
                work(steps);
                let mut report = section.end(bytes)?;
                check_bytes(job, pass, bytes)?;
                report.resident_bytes = receiving.resident_bytes()?;
                Ok(report)
            })
        }
        Role::Filler | Role::Idler | Role::Appender | Role::Service | Role::Client | Role::Flooder | Role::Threads => {
            bail!("that is no part of this workload")
        }
        Role::Asker => {
            let (mut sending, mut receiving) = S::both(job)?;
            let delay_ns = job.delay_us * 1000;
            for n in 0..WARM_UP {
                ask(&mut sending, &mut receiving, (&mut payloads, job.sizes.max as usize), n, 0, whole)?;
            }
            let mut histogram = histogram()?;
            passes(job, |pass| {
                histogram.reset();
                let mut sizes = job.sizes.sequence();
                payloads.begin(0);
                let mut bytes = 0;
                let section = Section::start(pass)?;
                let mut schedule = Schedule::of(job);
                for n in 0..pass.count {
                    let size = sizes.next_size();
                    bytes += size as u64;
                    if let Some(schedule) = &mut schedule {
                        // From its due time, not from its sending: a message that waits for a late reply is late
                        // itself.
                        let due = schedule.wait_for(n);
                        ask(&mut sending, &mut receiving, (&mut payloads, size), n, 0, glance)?;
                        histogram.saturating_record(now_ns() - due);
                    } else if pass.time_each {
                        let start = now_ns();
                        ask(&mut sending, &mut receiving, (&mut payloads, size), n, delay_ns, glance)?;
                        histogram.saturating_record((now_ns() - start).saturating_sub(2 * delay_ns));
                    } else {
                        ask(&mut sending, &mut receiving, (&mut payloads, size), n, delay_ns, glance)?;
                    }
                }
                let mut report = section.end(bytes)?;
                report.percentiles = pass.time_each.then(|| Percentiles::of(&histogram));
                if let Some(schedule) = schedule {
                    schedule.leave_out(&mut report);
                }
                Ok(report)
            })
        }
        Role::Answerer => {
            let (mut sending, mut receiving) = S::both(job)?;
            let delay_ns = job.delay_us * 1000;
            for n in 0..WARM_UP {
                answer(&mut sending, &mut receiving, n, 0, whole)?;
            }
            sending.settle()?;
            passes(job, |pass| {
                let mut bytes = 0;
                let section = Section::start(pass)?;
                for n in 0..pass.count {
                    bytes += answer(&mut sending, &mut receiving, n, delay_ns, glance)? as u64;
                }
                sending.settle()?;
                section.end(bytes)
            })
        }
    }
}

/// As [`serve`], with the loops in C.
fn serve_in_c(job: &Job) -> Result<()> {
    let mut side = CSide::open(job)?;
    side.warm_up(WARM_UP)?;
    let mut histogram = histogram()?;
    passes(job, |pass| {
        histogram.reset();
        let section = Section::start(pass)?;
        let bytes = side.pass(pass, |ns| histogram.saturating_record(ns))?;
        let mut report = section.end(bytes)?;
        report.percentiles = (job.role == Role::Asker && pass.time_each).then(|| Percentiles::of(&histogram));
        if job.role == Role::Receiver {
            check_bytes(job, pass, bytes)?;
            if job.system == SystemName::PeltonC {
                report.resident_bytes = Some(measure::resident_bytes(&job.directory)?);
            }
        }
        Ok(report)
    })
}

/// The due times of round trips, or calls, at a rate.
pub struct Schedule {
    begin_ns: u64,
    rate: u64,
    /// How often it has slept: a system call each, and a context switch
    sleeps: u64,
}

/// How late a sleep may end. A sender wakes up so long before a message is due and polls the clock from then on, so
/// that no figure includes the kernel's timer.
const EARLY_NS: u64 = 200_000;

impl Schedule {
    /// None without a rate. The first message is due soon.
    pub fn of(job: &Job) -> Option<Schedule> {
        job.calls.rate.map(|rate| Schedule { begin_ns: now_ns() + EARLY_NS, rate: rate as u64, sleeps: 0 })
    }

    /// Subtracts the sleeps: to wait for the due time is no part of sending.
    pub fn leave_out(self, report: &mut PassReport) {
        report.calls = report.calls.map(|calls| calls.saturating_sub(self.sleeps));
        report.usage.voluntary_switches = report.usage.voluntary_switches.saturating_sub(self.sleeps);
    }

    fn due_ns(&self, n: u64) -> u64 {
        self.begin_ns + (n as u128 * 1_000_000_000 / self.rate as u128) as u64
    }

    /// Waits until message `n` is due and returns its due time.
    pub fn wait_for(&mut self, n: u64) -> u64 {
        let due = self.due_ns(n);
        let left = due.saturating_sub(now_ns());
        if left > EARLY_NS {
            std::thread::sleep(std::time::Duration::from_nanos(left - EARLY_NS));
            self.sleeps += 1;
        }
        while now_ns() < due {
            std::hint::spin_loop();
        }
        due
    }
}

/// Fails unless all bytes of a pass have arrived.
pub fn check_bytes(job: &Job, pass: &Pass, bytes: u64) -> Result<()> {
    let wanted: u64 = (0..job.senders).map(|index| job.sizes.total(job.share(index, pass.count))).sum();
    ensure!(bytes == wanted, "{bytes} bytes came, wanted {wanted}");
    Ok(())
}

/// From a nanosecond to a minute, three digits.
pub fn histogram() -> Result<Histogram<u64>> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3).context("making a histogram")
}

impl Percentiles {
    /// The percentiles of a histogram.
    pub fn of(histogram: &Histogram<u64>) -> Percentiles {
        let beyond = |quantile: f64| (1.0 - quantile) * histogram.len() as f64;
        // Half a round more, because 1 - 0.9 is not exact.
        let named = |quantile| (beyond(quantile) > 9.5).then(|| histogram.value_at_quantile(quantile));
        Percentiles {
            mean_ns: histogram.mean(),
            p50_ns: named(0.5),
            p90_ns: named(0.9),
            p99_ns: named(0.99),
            p999_ns: named(0.999),
            p9999_ns: named(0.9999),
            ladder: LADDER
                .into_iter()
                .filter(|quantile| beyond(*quantile) >= 1.0)
                .map(|quantile| (quantile, histogram.value_at_quantile(quantile)))
                .chain([(1.0, histogram.max())])
                .collect(),
        }
    }
}

/// Makes the passes on the program's orders, and then stays until it closes our input: a side that exits before the
/// other has read its last message would be a death in the measurement.
pub fn passes(job: &Job, mut pass_once: impl FnMut(&Pass) -> Result<PassReport>) -> Result<()> {
    let mut orders = std::io::stdin().lock();
    let mut order = String::new();
    for pass in &job.passes {
        say(&"ready")?;
        order.clear();
        orders.read_line(&mut order).context("reading an order")?;
        ensure!(order == "go\n", "found the order {order:?}, wanted \"go\"");
        if job.role.listens() {
            say(&"started")?;
        }
        let alone = pass.alone && job.workload != Workload::Append;
        say(&if alone { work_alone(job, pass)? } else { pass_once(pass)? })?;
    }
    order.clear();
    orders.read_line(&mut order).context("waiting for the end")?;
    ensure!(order.is_empty(), "found the order {order:?}, wanted the end");
    Ok(())
}

/// The work of this side for so many messages, without the messages.
fn work_alone(job: &Job, pass: &Pass) -> Result<PassReport> {
    let section = Section::start(pass)?;
    for _ in 0..pass.count {
        work(job.work_steps());
    }
    section.end(0)
}

/// Calls `each` for each of `numbers`, with so much work for it. Two loops, since even the check for work would be
/// measurable in the one without.
#[inline(always)]
fn with_work(steps: u64, numbers: std::ops::Range<u64>, mut each: impl FnMut(u64) -> Result<()>) -> Result<()> {
    if steps == 0 {
        return numbers.into_iter().try_for_each(each);
    }
    for n in numbers {
        work(steps);
        each(n)?;
    }
    Ok(())
}

/// Works: each step waits for the one before, so that the time does not depend on the processor's other instructions.
#[inline]
pub fn work(steps: u64) {
    if steps > 0 {
        work_on(steps);
    }
}

#[inline(never)]
fn work_on(steps: u64) {
    let mut value = steps;
    for _ in 0..steps {
        value = value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    }
    black_box(value);
}

/// Writes one line of JSON to the program.
pub fn say(value: &impl Serialize) -> Result<()> {
    let mut output = std::io::stdout().lock();
    serde_json::to_writer(&mut output, value)?;
    output.write_all(b"\n")?;
    output.flush()?;
    Ok(())
}

/// The measured part of a pass.
pub struct Section {
    usage: Usage,
    counter: Option<CallCounter>,
    start_ns: u64,
}

impl Section {
    /// Starts the measurement.
    pub fn start(pass: &Pass) -> Result<Section> {
        let usage = Usage::of_self();
        let counter = if pass.count_calls { Some(CallCounter::start()?) } else { None };
        Ok(Section { usage, counter, start_ns: now_ns() })
    }

    /// Ends the measurement.
    pub fn end(self, bytes: u64) -> Result<PassReport> {
        let end_ns = now_ns();
        let calls = self.counter.map(CallCounter::stop).transpose()?;
        let usage = Usage::of_self().since(self.usage);
        Ok(PassReport { start_ns: self.start_ns, end_ns, usage, calls, bytes, ..PassReport::default() })
    }
}

/// The payloads, by round-robin: a message's number is written when the message before it in the same buffer has gone.
/// A sender that copies a message loads its number by a wide load. A wide load over a just-written narrow store cannot
/// be forwarded; it stalls until the store buffer drains. That stall, not the channel, would be measured if the number
/// were written just before. So there are several buffers, see [`buffer_count`].
pub struct Payloads {
    bytes: Vec<u8>,
    size: usize,
    buffer_count: usize,
}

/// How many buffers of `size` bytes there are: between two uses of one there are more stores than a store buffer
/// holds. A power of two.
pub fn buffer_count(size: usize) -> usize {
    if size <= 64 { 16 } else { 2 }
}

impl Payloads {
    /// For messages of at most `size` bytes.
    pub fn new(size: usize) -> Payloads {
        let buffer_count = buffer_count(size);
        let mut payloads = Payloads { bytes: buffer(size).repeat(buffer_count), size, buffer_count };
        payloads.begin(0);
        payloads
    }

    /// Writes the numbers of the first messages, from `first`.
    pub fn begin(&mut self, first: u64) {
        (first..first + self.buffer_count as u64).for_each(|n| self.prepare(n));
    }

    #[inline]
    fn prepare(&mut self, n: u64) {
        let at = self.at(n);
        stamp(&mut self.bytes[at..at + self.size], n);
    }

    #[inline]
    fn at(&self, n: u64) -> usize {
        (n as usize & (self.buffer_count - 1)) * self.size
    }

    /// Message `n`, already prepared.
    #[inline]
    pub fn prepared(&self, n: u64, size: usize) -> &[u8] {
        &self.bytes[self.at(n)..][..size]
    }

    /// Message `n` is sent: its buffer is free for another.
    #[inline]
    pub fn sent(&mut self, n: u64) {
        self.prepare(n + self.buffer_count as u64);
    }

    /// Whether that is message `n`, of `size` bytes, with all its bytes.
    #[inline]
    pub fn is_number(&self, message: &[u8], n: u64, size: usize) -> bool {
        let behind = NUMBER_BYTES.min(size)..;
        // All buffers have the same bytes after the number.
        message.len() == size
            && number(message) == expected(n, size)
            && are_same(&message[behind.clone()], &self.bytes[..size][behind])
    }
}

/// Bytes that are compared word by word; the fastest comparison takes the rest.
const BY_WORDS: usize = 256;

/// Whether those bytes are the same. The first ones word by word: the copy has just stored them by 64 bytes at once. A
/// processor forwards a word of such a store at once, but not an odd half: that load stalls until the store buffer
/// drains, and the stall, not the channel, would be measured.
#[inline]
fn are_same(found: &[u8], wanted: &[u8]) -> bool {
    let words = found.len().min(BY_WORDS) / 8 * 8;
    let ((near, far), (wanted_near, wanted_far)) = (found.split_at(words), wanted.split_at(words));
    let mut pairs = near.as_chunks::<8>().0.iter().zip(wanted_near.as_chunks::<8>().0);
    // Most messages have no rest: its comparison would be a call.
    pairs.all(|(found, wanted)| u64::from_ne_bytes(*found) == u64::from_ne_bytes(*wanted))
        && (far.is_empty() || far == wanted_far)
}

/// A payload without a number yet.
pub fn buffer(size: usize) -> Vec<u8> {
    (0..size).map(pattern).collect()
}

/// Sends message `n`.
#[inline(always)]
fn send(sending: &mut impl Sending, payloads: &mut Payloads, size: usize, n: u64) -> Result<()> {
    sending.send(payloads.prepared(n, size))?;
    payloads.sent(n);
    Ok(())
}

/// Receives message `n`, compares its number, and returns its size.
#[inline(always)]
fn receive(receiving: &mut impl Receiving, n: u64, check: impl FnOnce(&[u8]) -> bool) -> Result<usize> {
    let (size, found, right) = receiving.receive(|message| (message.len(), number(message), check(message)))?;
    if found != expected(n, size) || !right {
        return Err(wrong(n, found, size));
    }
    Ok(size)
}

/// As [`receive`], with a known size.
#[inline(always)]
fn receive_sized(
    receiving: &mut impl Receiving,
    n: u64,
    wanted: usize,
    check: impl FnOnce(&[u8]) -> bool,
) -> Result<usize> {
    let size = receive(receiving, n, check)?;
    ensure!(size == wanted, "message {n} has {size} bytes, wanted {wanted}");
    Ok(size)
}

/// Not inlined: it must not lengthen the path of right messages.
#[cold]
#[inline(never)]
fn wrong(n: u64, found: u64, size: usize) -> anyhow::Error {
    if found != expected(n, size) {
        anyhow!("message {n} has the number {found}: messages were lost, doubled or out of order")
    } else {
        anyhow!("message {n} has other bytes than were sent")
    }
}

/// One round of the asker's.
#[inline(always)]
fn ask(
    sending: &mut impl Sending,
    receiving: &mut impl Receiving,
    (payloads, size): (&mut Payloads, usize),
    n: u64,
    delay_ns: u64,
    check: impl FnOnce(&[u8]) -> bool,
) -> Result<()> {
    delay(delay_ns);
    send(sending, payloads, size, n)?;
    sending.flush()?;
    let came = receive(receiving, n, check)?;
    ensure!(came == size, "round {n} went out with {size} bytes and came back with {came}");
    Ok(())
}

/// One round of the answerer's: sends back the copied bytes. Returns their number.
#[inline(always)]
fn answer(
    sending: &mut impl Sending,
    receiving: &mut impl Receiving,
    n: u64,
    delay_ns: u64,
    check: impl FnOnce(&[u8]) -> bool,
) -> Result<usize> {
    let (size, right) = receiving.receive(|message| {
        let right = number(message) == expected(n, message.len()) && check(message);
        delay(delay_ns);
        sending.send(message)?;
        sending.flush()?;
        anyhow::Ok((message.len(), right))
    })??;
    ensure!(right, "round {n} did not come as it was sent");
    Ok(size)
}

/// The check of most messages: it only keeps the compiler from leaving out the copy.
#[inline]
pub fn glance(message: &[u8]) -> bool {
    black_box(message.as_ptr());
    true
}

/// The check of the first and the last: every byte after the number.
pub fn whole(message: &[u8]) -> bool {
    message.iter().enumerate().skip(NUMBER_BYTES).all(|(at, byte)| *byte == pattern(at))
}

fn pattern(at: usize) -> u8 {
    (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8).wrapping_add(7)
}

/// A message begins with its number, little-endian, or with as much of it as fits.
const NUMBER_BYTES: usize = 8;

/// Writes number `n` into a message.
#[inline]
pub fn stamp(payload: &mut [u8], n: u64) {
    match payload.first_chunk_mut::<NUMBER_BYTES>() {
        Some(first) => *first = n.to_le_bytes(),
        None => {
            let size = payload.len();
            payload.copy_from_slice(&n.to_le_bytes()[..size]);
        }
    }
}

/// The number of a message.
#[inline]
pub fn number(message: &[u8]) -> u64 {
    match message.first_chunk::<NUMBER_BYTES>() {
        Some(first) => u64::from_le_bytes(*first),
        None => message.iter().rev().fold(0, |number, byte| number << 8 | *byte as u64),
    }
}

/// The value of [`number`] for message `n` of `size` bytes.
#[inline]
pub fn expected(n: u64, size: usize) -> u64 {
    if size >= NUMBER_BYTES { n } else { n & ((1 << (8 * size)) - 1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_of_any_size_has_its_number() {
        for size in 0..20 {
            for n in [0, 1, 255, 256, 65_537, u64::MAX - 1] {
                let mut payload: Vec<u8> = (0..size).map(pattern).collect();
                stamp(&mut payload, n);
                assert_eq!(number(&payload), expected(n, size), "{n} in {size} bytes");
                assert!(whole(&payload));
            }
        }
    }

    #[test]
    fn payloads_have_their_numbers_in_every_round() {
        for size in [0, 3, 16, 64, 300] {
            let mut payloads = Payloads::new(size);
            for first in [5, 0] {
                payloads.begin(first);
                for n in first..first + 100 {
                    assert!(payloads.is_number(payloads.prepared(n, size), n, size), "{n} in {size} bytes");
                    payloads.sent(n);
                }
            }
        }
    }

    #[test]
    fn the_due_time_of_a_round_depends_on_its_number_alone() {
        let mut schedule = Schedule { begin_ns: 500, rate: 3, sleeps: 0 };
        assert_eq!([0, 1, 2, 3].map(|n| schedule.due_ns(n)), [500, 333_333_833, 666_667_166, 1_000_000_500]);
        // Long past: it returns that time, not now.
        assert_eq!(schedule.wait_for(3), 1_000_000_500);
        assert_eq!(schedule.sleeps, 0);
        // A millisecond from now: it sleeps, and wakes up in time.
        schedule.begin_ns = now_ns() + 1_000_000;
        assert_eq!((schedule.wait_for(0), schedule.sleeps), (schedule.begin_ns, 1));
        assert!(now_ns() >= schedule.begin_ns);
    }

    #[test]
    fn percentiles_beyond_the_counted_rounds_are_null() {
        let mut histogram = histogram().unwrap();
        (1..=1000).for_each(|ns| histogram.record(ns).unwrap());
        let percentiles = Percentiles::of(&histogram);
        assert_eq!((percentiles.p50_ns, percentiles.p90_ns, percentiles.p99_ns), (Some(500), Some(900), Some(990)));
        assert_eq!((percentiles.p999_ns, percentiles.p9999_ns), (None, None), "one of a thousand says nothing");
        let last: Vec<f64> = percentiles.ladder.iter().rev().take(2).map(|(quantile, _)| *quantile).collect();
        assert_eq!(last, [1.0, 0.999]);
    }

    #[test]
    fn a_changed_byte_is_detected() {
        let mut payload: Vec<u8> = (0..1000).map(pattern).collect();
        payload[999] ^= 1;
        assert!(!whole(&payload));
    }
}
