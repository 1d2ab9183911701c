//! Clients call a service, which replies to each request with its own bytes.
//!
//! A request's number begins with its client's, as in a fan-in. A client has as many calls in flight as the job says.
//! It copies each reply out and compares it with its request: size, number and every other byte. The service counts
//! the requests of the measured clients, not of a flooding one. The service of every system has one thread, so replies
//! arrive in the order of the requests.

use std::collections::VecDeque;

use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{
    fan_in::{NUMBER_BITS, first_number},
    measure::{delay, now_ns},
    parameters::{Job, Pass, Role, SystemName},
    systems::call::{
        Asking, Pelton, PeltonServing, Serving, Sock, SockServing, SockStreamService, c::CSide, nginx, queue::Queue,
    },
    workload::{self, Payloads, Percentiles, Schedule, Section, WARM_UP, check_bytes, histogram, passes, say},
};

/// Calls that a flooding client has in flight: nearly all that pelton allows.
const FLOOD: u64 = 1000;
/// Replies between two checks of the end: often enough to end quickly, seldom enough to cost nothing.
const FLOOD_CHECK_INTERVAL: u64 = 1024;
/// How long before the program's order a flooding client may see the service exit. All sides have ten seconds to exit,
/// see `run.rs`.
const FLOOD_END: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// Does one side's part.
pub fn side(job: &Job) -> Result<()> {
    match (job.system, job.role) {
        (SystemName::Pelton | SystemName::PeltonAlone, Role::Service) => serve(job, PeltonServing::new(job)?),
        (SystemName::Pelton | SystemName::PeltonAlone, _) => ask(job, Pelton::new(job)?),
        (SystemName::PeltonNginx, Role::Service) => serve_warmed_up(job, PeltonServing::new(job)?, nginx::warm_up(job)),
        (SystemName::CosocketNginx, Role::Service) if is_simple(job) => {
            serve_warmed_up(job, SockServing::new(job)?, nginx::warm_up(job))
        }
        (SystemName::CosocketNginx, Role::Service) => {
            // Each coroutine has a connection of its own.
            let connections = Job { senders: job.calls.in_flight, ..job.clone() };
            serve_warmed_up(job, SockStreamService::new(&connections)?, nginx::warm_up(job))
        }
        (SystemName::PeltonNginx | SystemName::CosocketNginx, _) => nginx::measured(job),
        (SystemName::PeltonC, Role::Service) => serve(job, CSide::service(job)?),
        (SystemName::PeltonC | SystemName::PeltonCGo, _) => ask(job, CSide::client(job)?),
        (SystemName::Queue | SystemName::QueueGo, _) => ask(job, Queue::new(job)?),
        (_, Role::Service) if is_simple(job) => serve(job, SockServing::new(job)?),
        (_, Role::Service) => serve(job, SockStreamService::new(job)?),
        _ => ask(job, Sock::new(job)?),
    }
}

/// Whether a connection has at most one message in flight, in one direction: then blocking calls suffice.
pub fn is_simple(job: &Job) -> bool {
    job.calls.one_by_one() && job.idle == 0
}

fn ask(job: &Job, asking: impl Asking) -> Result<()> {
    if job.role == Role::Flooder { flood(job, asking) } else { measured(job, asking) }
}

/// The calls of measured clients that a service has served.
pub struct Tally {
    clients: u64,
    /// Calls
    pub count: u64,
    /// Payload of their requests
    pub bytes: u64,
}

impl Tally {
    /// An empty tally.
    pub fn new(job: &Job) -> Tally {
        Tally { clients: job.senders as u64, count: 0, bytes: 0 }
    }

    /// Of measured clients' calls alone.
    pub fn of(count: u64, bytes: u64) -> Tally {
        Tally { clients: 1, count, bytes }
    }

    /// Counts a request. Returns whether its client is measured.
    #[inline]
    pub fn note(&mut self, request: &[u8]) -> bool {
        let measured = workload::number(request) >> NUMBER_BITS < self.clients;
        self.count += measured as u64;
        self.bytes += if measured { request.len() as u64 } else { 0 };
        measured
    }
}

fn serve(job: &Job, serving: impl Serving) -> Result<()> {
    serve_warmed_up(job, serving, WARM_UP * job.senders as u64)
}

/// Serves, after so many calls before the first pass.
fn serve_warmed_up(job: &Job, mut serving: impl Serving, warm_up: u64) -> Result<()> {
    serving.serve(warm_up)?;
    passes(job, |pass| {
        let section = Section::start(pass)?;
        let tally = serving.serve(pass.count)?;
        let mut report = section.end(tally.bytes)?;
        ensure!(tally.count == pass.count, "{} calls came, wanted {}", tally.count, pass.count);
        check_bytes(job, pass, tally.bytes)?;
        report.resident_bytes = serving.resident_bytes()?;
        Ok(report)
    })
}

fn measured(job: &Job, asking: impl Asking) -> Result<()> {
    let first = first_number(job.index);
    let payloads = Payloads::new(job.sizes.max as usize);
    let mut client = Client { job, asking, payloads, first, histogram: histogram()? };
    client.pass(&Pass { count: WARM_UP * job.senders as u64, ..Pass::default() })?;
    client.asking.end_pass()?;
    passes(job, |pass| {
        client.histogram.reset();
        let section = Section::start(pass)?;
        let (bytes, schedule) = client.pass(pass)?;
        let mut report = section.end(bytes)?;
        if let Some(schedule) = schedule {
            schedule.leave_out(&mut report);
        }
        report.percentiles = pass.time_each.then(|| Percentiles::of(&client.histogram));
        client.asking.end_pass()?;
        Ok(report)
    })
}

/// A measured client.
struct Client<'a, A> {
    job: &'a Job,
    asking: A,
    payloads: Payloads,
    first: u64,
    histogram: Histogram<u64>,
}

impl<A: Asking> Client<'_, A> {
    /// Makes its share of the calls. Returns the payload of the requests, and the schedule if there is a rate.
    fn pass(&mut self, pass: &Pass) -> Result<(u64, Option<Schedule>)> {
        let count = self.job.share(self.job.index, pass.count);
        self.payloads.begin(self.first);
        match self.job.calls.in_flight {
            1 => self.one_by_one(count, pass.time_each),
            most => self.many(count, most as u64, pass.time_each).map(|bytes| (bytes, None)),
        }
    }

    fn one_by_one(&mut self, count: u64, time_each: bool) -> Result<(u64, Option<Schedule>)> {
        let Client { job, asking, payloads, first, histogram } = self;
        let delay_ns = job.delay_us * 1000;
        let mut schedule = Schedule::of(job);
        let (mut sizes, mut bytes) = (job.sizes.sequence(), 0);
        for n in 0..count {
            let size = sizes.next_size();
            let number = *first + n;
            // From its due time, not from its sending: a call that waits for a late reply is late itself.
            let start_ns = match &mut schedule {
                Some(schedule) => schedule.wait_for(n),
                None if time_each => now_ns(),
                None => 0,
            };
            delay(delay_ns);
            let right =
                asking.call(payloads.prepared(number, size), |reply| payloads.is_number(reply, number, size))?;
            if time_each {
                histogram.saturating_record((now_ns() - start_ns).saturating_sub(2 * delay_ns));
            }
            payloads.sent(number);
            if !right {
                return Err(wrong(n));
            }
            bytes += size as u64;
        }
        Ok((bytes, schedule))
    }

    /// Sends a request whenever fewer than `most` calls are in flight and there is free space; else receives a reply.
    fn many(&mut self, count: u64, most: u64, time_each: bool) -> Result<u64> {
        let Client { job, asking, payloads, first, histogram } = self;
        let (mut to_ask, mut to_come) = (job.sizes.sequence(), job.sizes.sequence());
        let (mut asked, mut answered, mut bytes) = (0, 0, 0);
        let mut begun = VecDeque::new();
        let mut size = to_ask.next_size();
        while answered < count {
            while asked < count && asked - answered < most && asking.try_ask(payloads.prepared(*first + asked, size))? {
                if time_each {
                    begun.push_back(now_ns());
                }
                payloads.sent(*first + asked);
                asked += 1;
                bytes += size as u64;
                size = to_ask.next_size();
            }
            let (number, awaited) = (*first + answered, to_come.next_size());
            let right = asking.reply(|reply| payloads.is_number(reply, number, awaited))?;
            if let Some(begun_ns) = begun.pop_front() {
                histogram.saturating_record(now_ns() - begun_ns);
            }
            if !right {
                return Err(wrong(answered));
            }
            answered += 1;
        }
        Ok(bytes)
    }
}

/// Not inlined: it must not lengthen the path of right replies.
#[cold]
#[inline(never)]
fn wrong(n: u64) -> anyhow::Error {
    anyhow::anyhow!(
        "the reply to call {n} has other bytes than the request, or replies were lost, doubled or out of order"
    )
}

/// Calls without end, until the program orders the end, or the service, which may get its order first, is gone.
fn flood(job: &Job, mut asking: impl Asking) -> Result<()> {
    let mut payloads = Payloads::new(job.sizes.max as usize);
    let first = first_number(job.senders);
    let (mut asked, mut answered) = (0, 0);
    payloads.begin(first);
    say(&"ready")?;
    loop {
        let mut exchange = || -> Result<()> {
            while asked - answered < FLOOD
                && asking.try_ask(payloads.prepared(first + asked, job.sizes.max as usize))?
            {
                payloads.sent(first + asked);
                asked += 1;
            }
            let right = asking.reply(|reply| reply.len() == job.sizes.max as usize)?;
            ensure!(right, "a reply to the flooding client has another size than its request");
            answered += 1;
            Ok(())
        };
        let done = (0..FLOOD_CHECK_INTERVAL).try_for_each(|_| exchange());
        let wait = if done.is_ok() { Timespec { tv_sec: 0, tv_nsec: 0 } } else { FLOOD_END };
        match (is_over(&wait)?, done) {
            (true, _) => return Ok(()),
            (false, Err(error)) => return Err(error).context("flooding"),
            (false, Ok(())) => {}
        }
    }
}

/// Whether the program has closed our input, or closes it within that time.
fn is_over(within: &Timespec) -> Result<bool> {
    let input = std::io::stdin();
    let mut fds = [PollFd::new(&input, PollFlags::IN)];
    match poll(&mut fds, Some(within)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => bail!("waiting for the end: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        parameters::SizeRange,
        parameters::{Calls, Workload},
        run::tests::job_of,
    };

    type Spoil = fn(&mut Vec<u8>);

    /// Replies with the bytes of each request, but spoils one reply.
    struct Echo {
        asked: VecDeque<Vec<u8>>,
        most: usize,
        spoil: Option<(u64, Spoil)>,
        replies: u64,
        /// The delay of the first reply
        takes: Duration,
    }

    impl Asking for Echo {
        fn call<R>(&mut self, request: &[u8], inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
            assert!(self.try_ask(request)?);
            self.reply(inspect)
        }

        fn try_ask(&mut self, request: &[u8]) -> Result<bool> {
            let has_space = self.asked.len() < self.most;
            if has_space {
                self.asked.push_back(request.to_vec());
            }
            Ok(has_space)
        }

        fn reply<R>(&mut self, inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
            let mut reply = self.asked.pop_front().context("nothing was asked")?;
            if let Some((_, spoil)) = self.spoil.filter(|(n, _)| *n == self.replies) {
                spoil(&mut reply);
            }
            self.replies += 1;
            std::thread::sleep(std::mem::take(&mut self.takes));
            Ok(inspect(&reply))
        }
    }

    fn pass(in_flight: u32, sizes: SizeRange, spoil: Option<(u64, Spoil)>) -> Result<u64> {
        let calls = Calls { in_flight, ..Calls::default() };
        let (bytes, times) = timed(calls, sizes, spoil, Duration::ZERO)?;
        assert_eq!(times.len(), 100);
        Ok(bytes)
    }

    fn timed(
        calls: Calls,
        sizes: SizeRange,
        spoil: Option<(u64, Spoil)>,
        takes: Duration,
    ) -> Result<(u64, Histogram<u64>)> {
        let job = Job { sizes, calls, delay_us: 0, ..job_of(Workload::Call, Vec::new()) };
        // Less space than calls may be in flight.
        let asking = Echo { asked: VecDeque::new(), most: 7, spoil, replies: 0, takes };
        let payloads = Payloads::new(sizes.max as usize);
        let mut client = Client { job: &job, asking, payloads, first: 0, histogram: histogram()? };
        let (bytes, _) = client.pass(&Pass { count: 100, time_each: true, ..Pass::default() })?;
        Ok((bytes, client.histogram))
    }

    #[test]
    fn every_reply_is_compared_with_its_request() {
        for sizes in [SizeRange::fixed(0), SizeRange::fixed(3), SizeRange::fixed(64), SizeRange { min: 0, max: 3000 }] {
            for in_flight in [1, 5, 50] {
                assert_eq!(pass(in_flight, sizes, None).unwrap(), sizes.total(100));
            }
        }
        let spoils: [Spoil; 4] = [
            |reply| *reply.last_mut().unwrap() ^= 1,
            |reply| reply[0] ^= 1,
            |reply| reply.truncate(63),
            |reply| reply.push(0),
        ];
        for spoil in spoils {
            for in_flight in [1, 50] {
                for n in [0, 60, 99] {
                    let error = pass(in_flight, SizeRange::fixed(64), Some((n, spoil))).unwrap_err().to_string();
                    assert!(error.contains(&format!("reply to call {n} ")), "{error}");
                }
            }
        }
    }

    #[test]
    fn a_call_that_falls_due_behind_a_late_one_is_late_itself() {
        // All are due within a tenth of a millisecond, and the first reply takes twenty.
        let takes = Duration::from_millis(20);
        let sizes = SizeRange::fixed(64);
        let (_, due) = timed(Calls { rate: Some(1_000_000), ..Calls::default() }, sizes, None, takes).unwrap();
        assert!(due.min() > 19_000_000, "a call took {} ns", due.min());
    }

    #[test]
    fn calls_of_a_flooding_client_are_not_counted() {
        let job = Job { senders: 2, ..job_of(Workload::Call, Vec::new()) };
        let mut tally = Tally::new(&job);
        for (index, measured) in [(0, true), (1, true), (2, false)] {
            let mut request = [0; 16];
            workload::stamp(&mut request, first_number(index) + 5);
            assert_eq!(tally.note(&request), measured);
        }
        assert_eq!((tally.count, tally.bytes), (2, 32));
        assert!(tally.note(&[]));
    }
}
