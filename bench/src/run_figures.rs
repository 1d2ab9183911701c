//! The figures of a run, from the reports of its sides.

use std::collections::BTreeMap;

use crate::{
    measure::Usage,
    parameters::{Calls, Job, Workload},
    report::{Figures, Run, SideFigures},
    workload::{PassReport, Percentiles},
};

/// The figures of a run of messages: for each pass the reports of all sides, the one of the first CPU first.
pub(crate) fn run_of(job: &Job, reports: &[Vec<PassReport>]) -> Run {
    let (first, others) = reports[0].split_first().expect("a run has a side");
    let roundtrip = job.workload == Workload::Roundtrip;
    let pass = &job.passes[0];
    // The start is that of the sender or the asker, the end the receiver's or the asker's: all processes share one
    // clock.
    let start_ns = match others.iter().map(|other| other.start_ns).min() {
        Some(start_ns) if !roundtrip => start_ns,
        _ => first.start_ns,
    };
    let elapsed_ns = first.end_ns.saturating_sub(start_ns) as f64;
    let seconds = elapsed_ns * 1e-9;
    let counted = job.passes.iter().zip(reports).find(|(pass, _)| pass.count_calls);
    // Calls of programs in other languages are counted from outside: the first report has all of them.
    let calls = counted.and_then(|(pass, reports)| {
        let calls: Vec<Option<u64>> = reports.iter().map(|report| report.calls).collect();
        calls[0]?;
        Some((calls, job.messages(pass.count) as f64))
    });
    let sleeps = |report: &PassReport| roundtrip.then(|| report.usage.voluntary_switches as f64 / pass.count as f64);
    let percentiles = reports.iter().find_map(|reports| reports[0].percentiles.as_ref());
    let percentile = |of: fn(&Percentiles) -> Option<u64>| percentiles.and_then(of).map(|ns| ns as f64);
    let latency = percentiles.map(|percentiles| percentiles.ladder.clone()).unwrap_or_default();
    let rate = |amount: f64| (!roundtrip && seconds > 0.0).then(|| amount / seconds);
    // All sides worked alone at the same time, too.
    let alone = job.passes.iter().zip(reports).find(|(pass, _)| pass.alone).map(|(_, reports)| reports);
    let alone_ns = |report: &PassReport| report.end_ns.saturating_sub(report.start_ns) as f64;
    let cpu_seconds = |reports: &[PassReport]| reports.iter().map(|report| report.usage.cpu_seconds).sum::<f64>();
    let figures = Figures {
        seconds: Some(seconds),
        share_of_own_speed: alone.map(|alone| alone.iter().map(alone_ns).fold(0.0, f64::max) / elapsed_ns),
        cpu_to_own_work: alone.map(|alone| cpu_seconds(&reports[0]) / cpu_seconds(alone)),
        messages_per_second: rate(job.messages(pass.count) as f64),
        bytes_per_second: rate(first.bytes as f64),
        round_trip_ns: match job.calls.rate {
            _ if !roundtrip => None,
            Some(_) => percentiles.map(|percentiles| percentiles.mean_ns),
            None => Some(elapsed_ns / pass.count as f64 - 2000.0 * job.delay_us as f64),
        },
        p50_ns: percentile(|p| p.p50_ns),
        p90_ns: percentile(|p| p.p90_ns),
        p99_ns: percentile(|p| p.p99_ns),
        p999_ns: percentile(|p| p.p999_ns),
        p9999_ns: percentile(|p| p.p9999_ns),
        cpu_seconds: Some(cpu_seconds(&reports[0])),
        syscalls_per_message: calls
            .as_ref()
            .map(|(calls, messages)| calls.iter().flatten().sum::<u64>() as f64 / messages),
        sleeps_per_wait: reports[0].iter().filter_map(sleeps).reduce(f64::min),
        resident_bytes: first.resident_bytes.map(|bytes| bytes as f64),
        ..Figures::default()
    };
    let sides = reports[0].iter().enumerate().map(|(index, report)| SideFigures {
        usage: report.usage,
        syscalls_per_message: calls.as_ref().and_then(|(calls, messages)| {
            let all_known = calls.iter().all(Option::is_some);
            calls[index].filter(|_| all_known).map(|calls| calls as f64 / messages)
        }),
        sleeps_per_wait: sleeps(report),
    });
    Run { figures, sides: by_role(job.workload, sides), latency, ..Run::default() }
}

/// The figures of a run of calls: for each pass the service's report and then those of its clients.
pub(crate) fn run_of_calls(job: &Job, reports: &[Vec<PassReport>]) -> Run {
    let run = run_of(job, reports);
    // One process can be both.
    let clients_of = |reports: &[PassReport]| usize::from(reports.len() > 1);
    let (pass, clients) = (&job.passes[0], &reports[0][clients_of(&reports[0])..]);
    let start_ns = clients.iter().map(|client| client.start_ns).min().unwrap_or_default();
    let end_ns = clients.iter().map(|client| client.end_ns).max().unwrap_or_default();
    let elapsed_ns = end_ns.saturating_sub(start_ns) as f64;
    // Of several clients the longest time.
    let percentiles = || {
        reports
            .iter()
            .flat_map(|reports| &reports[clients_of(reports)..])
            .filter_map(|client| client.percentiles.as_ref())
    };
    let percentile = |of: fn(&Percentiles) -> Option<u64>| percentiles().filter_map(of).max().map(|ns| ns as f64);
    let rests = job.delay_us > 0 || job.calls.rate.is_some();
    let rate = |amount: f64| (!rests && elapsed_ns > 0.0).then(|| amount / (elapsed_ns * 1e-9));
    let mean_ns = match job.calls {
        calls if !calls.one_by_one() => None,
        Calls { rate: Some(_), .. } => percentiles().next().map(|percentiles| percentiles.mean_ns),
        _ => Some(elapsed_ns / pass.count as f64 - 2000.0 * job.delay_us as f64),
    };
    let sleeps = |report: &PassReport| report.usage.voluntary_switches as f64 / pass.count as f64;
    let figures = Figures {
        seconds: Some(elapsed_ns * 1e-9),
        calls_per_second: rate(pass.count as f64),
        messages_per_second: rate(job.messages(pass.count) as f64),
        bytes_per_second: rate(2.0 * reports[0][0].bytes as f64),
        round_trip_ns: mean_ns,
        p50_ns: percentile(|p| p.p50_ns),
        p90_ns: percentile(|p| p.p90_ns),
        p99_ns: percentile(|p| p.p99_ns),
        p999_ns: percentile(|p| p.p999_ns),
        p9999_ns: percentile(|p| p.p9999_ns),
        sleeps_per_wait: (job.calls.one_by_one() && reports[0].len() > 1)
            .then(|| reports[0].iter().map(sleeps).fold(f64::INFINITY, f64::min)),
        ..run.figures
    };
    Run { figures, latency: longest(percentiles().map(|percentiles| &percentiles.ladder[..])), ..run }
}

/// The percentile ladders of several clients: at each quantile the longest time.
fn longest<'a>(ladders: impl Iterator<Item = &'a [(f64, u64)]>) -> Vec<(f64, u64)> {
    let mut all: Vec<(f64, u64)> = Vec::new();
    for &(quantile, ns) in ladders.flatten() {
        match all.iter_mut().find(|(at, _)| *at == quantile) {
            Some((_, most)) => *most = ns.max(*most),
            None => all.push((quantile, ns)),
        }
    }
    all.sort_by(|one, other| one.0.total_cmp(&other.0));
    all
}

/// The figures of a window in which no message was sent.
pub(crate) fn idle_run(usages: [Usage; 2], seconds: f64, receiver: &PassReport) -> Run {
    let switches: u64 = usages.iter().map(|usage| usage.voluntary_switches + usage.involuntary_switches).sum();
    let figures = Figures {
        seconds: Some(seconds),
        cpu_seconds: Some(usages[0].cpu_seconds + usages[1].cpu_seconds),
        wakeups_per_second: Some(switches as f64 / seconds),
        resident_bytes: receiver.resident_bytes.map(|bytes| bytes as f64),
        ..Figures::default()
    };
    let sides = usages.map(|usage| SideFigures { usage, ..SideFigures::default() });
    Run { figures, sides: by_role(Workload::Idle, sides), ..Run::default() }
}

/// Names the sides: senders of a fan-in have numbers, and so have clients.
pub(crate) fn by_role(
    workload: Workload,
    sides: impl IntoIterator<Item = SideFigures>,
) -> BTreeMap<String, SideFigures> {
    let sides: Vec<SideFigures> = sides.into_iter().collect();
    // A program that starts the other side itself.
    let alone = sides.len() == 1;
    let name = |index: usize| match workload.roles() {
        [_, _] if alone => "both".to_string(),
        [_, role] if matches!(workload, Workload::FanIn | Workload::Call) && index > 0 => {
            format!("{}-{index}", role.name())
        }
        roles => roles[index].name().to_string(),
    };
    sides.into_iter().enumerate().map(|(index, side)| (name(index), side)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        parameters::{Pass, Wait},
        run::{
            Plan, passes,
            tests::{job_of, plan},
        },
    };

    #[test]
    fn a_lopsided_channel_is_compared_with_the_slower_sides_work_and_the_cpu_time_of_both() {
        let passes = passes(&Plan { workload: Workload::Lopsided, delay_us: 0, ..plan() }, Wait::Block, false, false);
        assert_eq!(
            passes,
            [Pass { count: 1000, ..Pass::default() }, Pass { count: 1000, alone: true, ..Pass::default() }]
        );
        let job = job_of(Workload::Lopsided, passes);
        let part = |start_ns, end_ns, cpu_seconds| PassReport {
            start_ns,
            end_ns,
            usage: Usage { cpu_seconds, ..Usage::default() },
            ..PassReport::default()
        };
        let together = [part(900, 2000, 1.0), part(1000, 1950, 0.2)];
        let alone = [part(5000, 5900, 0.9), part(5000, 5090, 0.1)];
        let run = run_of(&job, &[together.to_vec(), alone.to_vec()]);
        assert_eq!((run.figures.share_of_own_speed, run.figures.cpu_to_own_work), (Some(0.9), Some(1.2)));
        assert_eq!(run.figures.round_trip_ns, None);
    }

    #[test]
    fn a_fan_in_lasts_from_the_first_that_sends_and_costs_what_all_cost() {
        let passes =
            vec![Pass { count: 10, ..Pass::default() }, Pass { count: 10, count_calls: true, ..Pass::default() }];
        let job = Job { senders: 3, ..job_of(Workload::FanIn, passes) };
        assert_eq!((0..3).map(|index| job.share(index, 10)).collect::<Vec<_>>(), [4, 3, 3]);
        let part = |start_ns, end_ns, calls| PassReport {
            start_ns,
            end_ns,
            calls,
            usage: Usage { cpu_seconds: 0.5, ..Usage::default() },
            ..PassReport::default()
        };
        let timed = vec![
            part(100, 1_000_001_000, None),
            part(1000, 1200, None),
            part(1100, 1300, None),
            part(1050, 1990, None),
        ];
        let counted = vec![part(0, 1, Some(5)), part(0, 1, Some(1)), part(0, 1, Some(3)), part(0, 1, Some(1))];
        let run = run_of(&job, &[timed, counted]);
        assert_eq!((run.figures.seconds, run.figures.messages_per_second), (Some(1.0), Some(10.0)));
        assert_eq!((run.figures.cpu_seconds, run.figures.syscalls_per_message), (Some(2.0), Some(1.0)));
        assert_eq!(run.sides.keys().collect::<Vec<_>>(), ["receiver", "sender-1", "sender-2", "sender-3"]);
    }

    #[test]
    fn calls_last_from_the_first_client_to_the_last_and_the_slowest_is_reported() {
        let percentiles = |p99_ns: u64, ladder: &[(f64, u64)]| {
            let ladder = ladder.to_vec();
            Some(Percentiles { p99_ns: Some(p99_ns), mean_ns: 50.0, ladder, ..Percentiles::default() })
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
        let job = Job { senders: 2, calls, delay_us: 0, ..job_of(Workload::Call, passes) };
        let reports = [
            vec![service(), part(1000, 900_001_000, None), part(1500, 1_000_001_000, None)],
            vec![
                service(),
                part(0, 1, percentiles(70, &[(0.5, 30), (1.0, 80)])),
                part(0, 1, percentiles(90, &[(0.5, 20), (0.9, 90), (1.0, 95)])),
            ],
        ];
        let run = run_of_calls(&job, &reports);
        assert_eq!((run.figures.seconds, run.figures.calls_per_second), (Some(1.0), Some(10.0)));
        assert_eq!((run.figures.messages_per_second, run.figures.bytes_per_second), (Some(20.0), Some(1280.0)));
        assert_eq!((run.figures.p99_ns, run.figures.round_trip_ns), (Some(90.0), None));
        assert_eq!(run.latency, [(0.5, 30), (0.9, 90), (1.0, 95)]);
        assert_eq!(run.sides.keys().collect::<Vec<_>>(), ["client-1", "client-2", "service"]);

        // Calls at a low rate: the time between them is no part of theirs.
        let calls = Calls { rate: Some(10), ..Calls::default() };
        let passes = vec![Pass { count: 10, time_each: true, ..Pass::default() }];
        let job = Job { calls, delay_us: 0, ..job_of(Workload::Call, passes) };
        let run = run_of_calls(&job, &[vec![service(), part(0, 1_000_000_000, percentiles(90, &[]))]]);
        assert_eq!((run.figures.round_trip_ns, run.figures.calls_per_second), (Some(50.0), None));
    }

    #[test]
    fn the_delays_are_subtracted() {
        let job = job_of(Workload::Roundtrip, vec![Pass { count: 10, time_each: true, ..Pass::default() }]);
        let usage = Usage { cpu_seconds: 0.25, voluntary_switches: 10, involuntary_switches: 0 };
        let asker = PassReport { start_ns: 1000, end_ns: 501_000, usage, ..PassReport::default() };
        let answerer = PassReport { usage: Usage { voluntary_switches: 9, ..usage }, ..PassReport::default() };
        let run = run_of(&job, &[vec![asker, answerer]]);
        assert_eq!(run.figures.round_trip_ns, Some(10_000.0));
        assert_eq!(run.figures.sleeps_per_wait, Some(0.9));
        assert_eq!(run.figures.cpu_seconds, Some(0.5));
        assert_eq!(run.figures.messages_per_second, None);
        assert_eq!(run.sides["asker"].sleeps_per_wait, Some(1.0));
    }
}
