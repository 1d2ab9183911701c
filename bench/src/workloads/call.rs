//! Clients call a service, which replies to each request with its own bytes.
//!
//! A request's number begins with its client's, as in a fan-in. A client has as many calls in flight as the job says.
//! It copies each reply out and compares it with its request: size, number and every other byte. The service counts
//! the requests of the measured clients, not of a flooding one. The service of every system has one thread, so replies
//! arrive in the order of the requests.

use std::collections::VecDeque;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hdrhistogram::Histogram;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::roundtrip::Pace;
use crate::{
    measure::{delay, now_ns},
    parameters::{Calls, Job, Kind, Pass, Placement, Role},
    payload::{NUMBER_BITS, Payloads, WARM_UP, first_number, number},
    plan::{Common, Defaults, Options, Passes, Plan},
    record::{Column, LATENCY, RATES, Run, run_of_messages, set_percentiles},
    run::reports,
    side::{PassReport, Percentiles, Schedule, Section, check_bytes, histogram, passes, say},
    sides::Interrupts,
};

/// Clients call a service, which replies to each request with its own bytes
///
/// Defaults: 64 bytes, lanes of 4 MiB, which is pelton's own; 200,000 calls, 10,000 of more than 32 KiB; 20,000 with a
/// delay; with many calls in flight five times as many; with --rate as many as are due in five seconds.
/// `pelton-fan-in` is as many messages one way; `pelton-alone` and `sock-stream-alone` are without the flooding client.
#[derive(Args)]
pub struct Call {
    #[command(flatten)]
    pace: Pace,

    /// Processes that call the one service
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    clients: u32,

    /// Calls that each client has in flight at a time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    in_flight: u32,

    /// One more client, which is not measured, keeps 1,000 calls in flight meanwhile
    #[arg(long, conflicts_with = "rate")]
    beside_flood: bool,
}

const COLUMNS: &[Column] = &[("calls_per_second", "M calls/s", 1e-6)];

impl Options for Call {
    const NAME: &str = "call";

    fn plan(&self, common: &Common) -> Result<Plan> {
        self.pace.check(common)?;
        let Call { clients, in_flight, beside_flood, .. } = *self;
        let one_cpu = common.placement == Placement::Together;
        let calls = Calls { clients, in_flight, rate: self.pace.rate, beside_flood, one_cpu };
        ensure!(
            calls.one_by_one() || !(self.pace.rests() || beside_flood),
            "found --rate, --delay or --beside-flood with several calls at a time: leave out --clients and --in-flight"
        );
        if beside_flood {
            common.no_seconds("calls beside a flood")?;
        }
        let defaults = Defaults {
            kind: Kind::Call,
            roles: &[Role::Service, Role::Client],
            size: 64,
            capacity: 4 << 20,
            sleeps: self.pace.rests() || beside_flood || clients > 1,
            systems: match calls {
                _ if beside_flood => "pelton,pelton-alone,sock-stream,sock-stream-alone",
                _ if clients > 1 => "pelton,pelton-fan-in,sock-stream,sock-stream-batched",
                _ if in_flight > 1 => "pelton,sock-stream,sock-stream-batched",
                _ if one_cpu || calls.rate.is_some() => "pelton,sock-stream",
                _ => "pelton,limits,sock-stream",
            },
        };
        let mut plan = common.plan::<Self>(defaults, |sizes| match (sizes.max, calls.one_by_one()) {
            (32_769.., true) => self.pace.count(10_000).min(10_000),
            (32_769.., false) => 50_000,
            (_, true) => self.pace.count(200_000),
            (_, false) => 1_000_000,
        })?;
        let Plan { count, job: Job { sizes, .. }, .. } = plan;
        ensure!(
            sizes.min >= 8 || (clients == 1 && !beside_flood),
            "found --size {sizes} with several clients, wanted 8 or more: a request begins with its client's number"
        );
        ensure!(
            count >= u64::from(clients),
            "found --count {count}, wanted at least one for each of {clients} clients"
        );
        (plan.job.calls, plan.job.delay_us) = (calls, self.pace.delay);
        (plan.job.senders, plan.job.idle) = (clients, beside_flood.into());
        (plan.job.messages_each, plan.job.launch.numbered) = (2, true);
        Ok(Plan {
            passes: Passes::Timed,
            own: vec![("calls", serde_json::to_value(calls).expect("it has only numbers"))],
            figure: Some(match calls.one_by_one() {
                _ if beside_flood => "p99_ns",
                true => "round_trip_ns",
                false => "messages_per_second",
            }),
            columns: vec![COLUMNS, RATES, LATENCY],
            run,
            ..plan
        })
    }
}

/// A client.
pub trait Asking {
    /// One call, while no other is in flight: sends the request, and passes a copy of the reply in memory of the
    /// client's own to `inspect`. Exceptions: the queue and a client in C pass it where the other side has written it.
    fn call<R>(&mut self, request: &[u8], inspect: impl FnOnce(&[u8]) -> R) -> Result<R>;

    /// Sends a request if there is free space; false otherwise, and then a call is in flight. Never waits.
    fn try_ask(&mut self, _request: &[u8]) -> Result<bool> {
        bail!("it has one call at a time: leave out --in-flight and --beside-flood")
    }

    /// Waits for the next reply, as the job says, and passes a copy of it to `inspect`. The requests have been sent by
    /// then.
    fn reply<R>(&mut self, _inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        bail!("it has one call at a time: leave out --in-flight and --beside-flood")
    }

    /// All replies of a pass have arrived.
    fn end_pass(&mut self) -> Result<()> {
        Ok(())
    }
}

/// A service.
pub trait Serving {
    /// Serves until all measured clients have their replies to `count` calls.
    fn serve(&mut self, count: u64) -> Result<Tally>;

    /// Resident memory of the lanes, where this can be known.
    fn resident_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }
}

/// Calls that a flooding client has in flight: nearly all that pelton allows.
const FLOOD: u64 = 1000;
/// Replies between two checks of the end: often enough to end quickly, seldom enough to cost nothing.
const FLOOD_CHECK_INTERVAL: u64 = 1024;
/// How long before the program's order a flooding client may see the service exit. All sides have ten seconds to exit,
/// see `run.rs`.
const FLOOD_END: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// One side's part; `client` and `service` connect.
pub fn part<'a, A: Asking, S: Serving>(
    job: &'a Job,
    client: impl FnOnce(&'a Job) -> Result<A>,
    service: impl FnOnce(&'a Job) -> Result<S>,
) -> Result<()> {
    if job.role == Role::Service { serve(job, service(job)?) } else { ask(job, client(job)?) }
}

/// A run, and its figures: for each pass the service's report and then those of its clients.
fn run(job: &Job, interrupts: &Interrupts) -> Result<Run> {
    let (job, reports) = reports(job, interrupts)?;
    Ok(run_of_calls(&job, &reports))
}

fn run_of_calls(job: &Job, reports: &[Vec<PassReport>]) -> Run {
    let mut run = run_of_messages(job, reports);
    // One process can be both.
    let clients_of = |reports: &[PassReport]| usize::from(reports.len() > 1);
    let (pass, clients) = (&job.passes[0], &reports[0][clients_of(&reports[0])..]);
    let start_ns = clients.iter().map(|client| client.start_ns).min().unwrap_or_default();
    let end_ns = clients.iter().map(|client| client.end_ns).max().unwrap_or_default();
    let elapsed_ns = end_ns.saturating_sub(start_ns) as f64;
    let percentiles = || {
        reports
            .iter()
            .flat_map(|reports| &reports[clients_of(reports)..])
            .filter_map(|client| client.percentiles.as_ref())
    };
    let rests = job.delay_us > 0 || job.calls.rate.is_some();
    let rate = |amount: f64| (!rests && elapsed_ns > 0.0).then(|| amount / (elapsed_ns * 1e-9));
    let mean_ns = match job.calls {
        calls if !calls.one_by_one() => None,
        Calls { rate: Some(_), .. } => percentiles().next().map(|percentiles| percentiles.mean_ns),
        _ => Some(elapsed_ns / pass.count as f64 - 2000.0 * job.delay_us as f64),
    };
    let sleeps = |report: &PassReport| report.usage.voluntary_switches as f64 / pass.count as f64;
    let sleeps_of_both = || reports[0].iter().map(sleeps).fold(f64::INFINITY, f64::min);
    for (name, value) in [
        ("seconds", Some(elapsed_ns * 1e-9)),
        ("calls_per_second", rate(pass.count as f64)),
        ("messages_per_second", rate(job.messages(pass.count) as f64)),
        ("bytes_per_second", rate(2.0 * reports[0][0].bytes as f64)),
        ("round_trip_ns", mean_ns),
        ("sleeps_per_wait", (job.calls.one_by_one() && reports[0].len() > 1).then(sleeps_of_both)),
    ] {
        run.figures.set(name, value);
    }
    // Of several clients the longest time.
    set_percentiles(&mut run.figures, |name| percentiles().filter_map(|client| client.get(name)).max());
    let ladder = percentiles().next().filter(|_| job.senders == 1).map(|client| client.ladder.clone());
    Run { latency: ladder.unwrap_or_default(), ..run }
}

/// A client's part.
pub fn ask(job: &Job, asking: impl Asking) -> Result<()> {
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
        let measured = number(request) >> NUMBER_BITS < self.clients;
        self.count += measured as u64;
        self.bytes += if measured { request.len() as u64 } else { 0 };
        measured
    }
}

/// A service's part.
pub fn serve(job: &Job, mut serving: impl Serving) -> Result<()> {
    serving.serve(WARM_UP * job.senders as u64)?;
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
    use crate::{parameters::SizeRange, payload::stamp, plan::tests::job_of};

    const ROLES: &[Role] = &[Role::Service, Role::Client];

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
        let job = Job { sizes, calls, delay_us: 0, ..job_of(ROLES, Vec::new()) };
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
        let job = Job { senders: 2, ..job_of(ROLES, Vec::new()) };
        let mut tally = Tally::new(&job);
        for (index, measured) in [(0, true), (1, true), (2, false)] {
            let mut request = [0; 16];
            stamp(&mut request, first_number(index) + 5);
            assert_eq!(tally.note(&request), measured);
        }
        assert_eq!((tally.count, tally.bytes), (2, 32));
        assert!(tally.note(&[]));
    }

    #[test]
    fn calls_last_from_the_first_client_to_the_last_and_the_slowest_is_reported() {
        let percentiles = |p99_ns: u64| {
            let named = [("p99_ns".to_string(), Some(p99_ns))].into();
            Some(Percentiles { mean_ns: 50.0, ladder: vec![(1.0, p99_ns)], named })
        };
        let part = |start_ns, end_ns, percentiles| PassReport {
            start_ns,
            end_ns,
            bytes: 640,
            percentiles,
            ..PassReport::default()
        };
        // The service learns late that all calls are done.
        let service = || part(0, 9_000_000_000, None);
        let calls = Calls { clients: 2, in_flight: 10, ..Calls::default() };
        let passes =
            vec![Pass { count: 10, ..Pass::default() }, Pass { count: 10, time_each: true, ..Pass::default() }];
        let mut job = Job { senders: 2, messages_each: 2, calls, delay_us: 0, ..job_of(ROLES, passes) };
        job.launch.numbered = true;
        let reports = [
            vec![service(), part(1000, 900_001_000, None), part(1500, 1_000_001_000, None)],
            vec![service(), part(0, 1, percentiles(70)), part(0, 1, percentiles(90))],
        ];
        let run = run_of_calls(&job, &reports);
        assert_eq!((run.figures.get("seconds"), run.figures.get("calls_per_second")), (Some(1.0), Some(10.0)));
        assert_eq!(
            (run.figures.get("messages_per_second"), run.figures.get("bytes_per_second")),
            (Some(20.0), Some(1280.0))
        );
        assert_eq!((run.figures.get("p99_ns"), run.figures.get("round_trip_ns")), (Some(90.0), None));
        assert_eq!(run.latency, []);
        assert_eq!(run.sides.keys().collect::<Vec<_>>(), ["client-1", "client-2", "service"]);

        // Calls at a low rate: the time between them is no part of theirs.
        let calls = Calls { rate: Some(10), ..Calls::default() };
        let passes = vec![Pass { count: 10, time_each: true, ..Pass::default() }];
        let job = Job { calls, delay_us: 0, ..job_of(ROLES, passes) };
        let run = run_of_calls(&job, &[vec![service(), part(0, 1_000_000_000, percentiles(90))]]);
        assert_eq!((run.figures.get("round_trip_ns"), run.figures.get("calls_per_second")), (Some(50.0), None));
        assert_eq!(run.latency, [(1.0, 90)]);
    }
}
