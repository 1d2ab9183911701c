//! `./run bench limits-search`: what a ring of this machine can reach, and how much of it pelton has.
//!
//! limits.c has one ring with everything that may be varied. A coarse search runs every combination once. Then, for
//! each bound of memory, the best one is varied in one respect at a time. The best few of each bound then take turns
//! with pelton, and with one core that writes memory while another reads it: their medians are the figures.

use std::{
    collections::BTreeSet,
    fmt,
    io::Write,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use clap::Args;
use serde_json::{Value, json};

use pelton_bench::{
    results,
    statistics::{digits, median, paired_ratio},
    systems::limits,
};

use crate::regress::speed;

/// Searches the fastest ring of each message size, at bounds of resident memory, and compares pelton with it
#[derive(Args, Debug)]
pub struct Arguments {
    /// Bytes of a message; may be repeated [default: 16, 64, 256, 1024, 4096 and 65536]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(16..=65536))]
    size: Vec<u64>,

    /// The rounds in which the best ones and pelton take turns
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,

    /// Few and short runs, which show only that the search works
    #[arg(long)]
    short: bool,

    /// Writes the results to FILE, as JSON lines: the machine first, then a line for each size and bound
    #[arg(long, value_name = "FILE")]
    results: Option<PathBuf>,
}

const SIZES: [u64; 6] = [16, 64, 256, 1024, 4096, 65536];
const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;
/// The bounds of resident memory. pelton's own is `resident_max`, 16 MiB by default.
const BOUNDS: [u64; 6] = [128 * KIB, MIB, 2 * MIB, 8 * MIB, 16 * MIB, 64 * MIB];
const PELTON_BOUND: u64 = 16 * MIB;
const WINDOWS: [u64; 9] = [128 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 64 * MIB];
const COPIES: [&str; 4] = ["plain", "movsb", "avx", "stream"];
const BATCHES: [u64; 3] = [0, 4 * KIB, 64 * KIB];
const DISTANCES: [u64; 3] = [0, 64 * KIB, u64::MAX];
/// None, of the sender, of the receiver, of both.
const PREFETCHES: [u64; 4] = [0, 1, 2, 3];
/// Only the variations of the best ones have these too.
const MORE_BATCHES: [u64; 4] = [KIB, 16 * KIB, 256 * KIB, MIB];
const MORE_DISTANCES: [u64; 5] = [4 * KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB];
/// The best ones of each bound that are measured again.
const BEST: usize = 3;

/// One ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Ring {
    /// Bytes of its memory.
    window: u64,
    /// A side publishes its position each time it has moved by more than this.
    batch: u64,
    /// A waiting side waits for so many bytes, at most half of the window.
    distance: u64,
    prefetch: u64,
    copy: &'static str,
}

impl Ring {
    /// None if messages of that size do not fit.
    fn of_size(self, size: u64) -> Option<Ring> {
        let record = size.next_multiple_of(8) + 8;
        // With fewer than four records in the window, both sides could wait for each other's distance.
        let distance = if self.window < 4 * record { 0 } else { self.distance.min(self.window / 2) };
        let batch = self.batch.min(self.window / 2);
        // The processor prefetches large messages by itself.
        let fits = self.window >= 2 * size && (size <= 4 * KIB || self.prefetch == 0);
        fits.then_some(Ring { distance, batch, ..self })
    }

    fn arguments(&self, size: u64, seconds: f64) -> String {
        let Ring { window, batch, distance, prefetch, copy } = self;
        format!("ring {size} {seconds} {copy} {window} {batch} {distance} {prefetch}")
    }

    /// This one, and all that differ from it in one respect.
    fn variations(self) -> impl Iterator<Item = Ring> {
        let batches = BATCHES.into_iter().chain(MORE_BATCHES).map(move |batch| Ring { batch, ..self });
        let distances = DISTANCES.into_iter().chain(MORE_DISTANCES).map(move |distance| Ring { distance, ..self });
        let windows = WINDOWS.into_iter().filter(move |window| *window <= self.window);
        let windows = windows.map(move |window| Ring { window, ..self });
        let copies = COPIES.into_iter().map(move |copy| Ring { copy, ..self });
        batches.chain(distances).chain(windows).chain(copies)
    }
}

impl fmt::Display for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let batch = if self.batch == 0 { "each message".to_string() } else { bytes(self.batch) };
        let prefetch = ["none", "sender", "receiver", "both"][self.prefetch as usize];
        let (window, distance) = (bytes(self.window), bytes(self.distance));
        write!(f, "{window:>7} {batch:>12} {distance:>8} {prefetch:>8} {:>6}", self.copy)
    }
}

fn bytes(bytes: u64) -> String {
    match bytes {
        0 => "0".to_string(),
        n if n % MIB == 0 => format!("{} MiB", n / MIB),
        n if n % KIB == 0 => format!("{} KiB", n / KIB),
        n => format!("{n} B"),
    }
}

/// A ring, or another system, and its rates in millions of messages a second, one a round.
struct Measured<T> {
    what: T,
    rates: Vec<f64>,
}

impl<T> Measured<T> {
    fn new(what: T) -> Measured<T> {
        Measured { what, rates: Vec::new() }
    }

    fn median(&self) -> f64 {
        median(self.rates.clone()).unwrap_or_default()
    }
}

/// The runs of one size.
struct Search<'a> {
    limits: &'a Path,
    size: u64,
    seconds: f64,
}

impl Search<'_> {
    /// Millions of messages a second.
    fn rate(&self, arguments: &str) -> Result<f64> {
        let report: Value = serde_json::from_str(&limits::print(self.limits, arguments)?).context("reading a rate")?;
        Ok(report["messages_per_second"].as_f64().context("limits.c printed no rate")? / 1e6)
    }

    fn ring(&self, ring: &Ring) -> Result<f64> {
        self.rate(&ring.arguments(self.size, self.seconds))
    }

    fn memory(&self, (window, copy): (u64, &str)) -> Result<f64> {
        self.rate(&format!("memory {} {} {copy} {window}", self.size, self.seconds))
    }

    /// Nanoseconds of a cache line there and back: near, far or very far.
    fn line(&self) -> Result<f64> {
        let rounds = (self.seconds * 1e7) as u64;
        let report: Value = serde_json::from_str(&limits::print(self.limits, &format!("line {rounds}"))?)?;
        report["round_trip_ns"].as_f64().context("limits.c printed no time")
    }

    /// The best rings by a single run of each, for each bound: of all, and of those that publish each message.
    fn best_rings(&self, windows: &[u64], varies: bool) -> Result<BTreeSet<Ring>> {
        let mut tried: Vec<(f64, Ring)> = Vec::new();
        let attempt = |ring: Ring, tried: &mut Vec<(f64, Ring)>| -> Result<()> {
            if let Some(ring) = ring.of_size(self.size)
                && tried.iter().all(|(_, other)| *other != ring)
            {
                tried.push((self.ring(&ring)?, ring));
            }
            Ok(())
        };
        for &window in windows {
            for copy in COPIES {
                for batch in BATCHES {
                    for distance in DISTANCES {
                        for prefetch in PREFETCHES {
                            attempt(Ring { window, batch, distance, prefetch, copy }, &mut tried)?;
                        }
                    }
                }
            }
        }
        let mut best = BTreeSet::new();
        let bounds = BOUNDS.into_iter().filter(|bound| windows.iter().any(|window| window <= bound));
        for (bound, each) in bounds.map(|bound| (bound, false)).chain([(PELTON_BOUND, true)]) {
            let fits = |ring: &Ring| ring.window <= bound && (!each || ring.batch == 0);
            let top = |tried: &[(f64, Ring)]| {
                let mut fitting: Vec<_> = tried.iter().filter(|(_, ring)| fits(ring)).copied().collect();
                fitting.sort_by(|a, b| b.0.total_cmp(&a.0));
                fitting
            };
            if let Some((_, first)) = top(&tried).first().filter(|_| varies) {
                for ring in first.variations().filter(fits) {
                    attempt(ring, &mut tried)?;
                }
            }
            best.extend(top(&tried).into_iter().take(BEST).map(|(_, ring)| ring));
        }
        Ok(best)
    }
}

/// Searches and prints. Fails if a ring could not run.
pub fn search(arguments: &Arguments) -> Result<()> {
    limits::check_cpus()?;
    let limits = limits::compile()?;
    let own = std::env::current_exe().context("finding this program")?;
    let sizes = if arguments.size.is_empty() { SIZES.to_vec() } else { arguments.size.clone() };
    let (seconds, windows, rounds) = match arguments.short {
        true => (0.001, &WINDOWS[..1], 1),
        false => (0.01, &WINDOWS[..], arguments.rounds),
    };
    let command = std::iter::once("./run bench".to_string()).chain(std::env::args().skip(1)).collect::<Vec<_>>();
    let mut lines = vec![results::machine(&command.join(" "), false)];
    let mut out = std::io::stdout().lock();
    for size in sizes {
        let quick = Search { limits: &limits, size, seconds };
        let first_line = quick.line()?;
        let mut rings: Vec<_> = quick.best_rings(windows, !arguments.short)?.into_iter().map(Measured::new).collect();
        let mut memory: Vec<_> = windows
            .iter()
            .filter(|window| **window >= 2 * size)
            .flat_map(|window| COPIES.map(|copy| Measured::new((*window, copy))))
            .collect();
        // About a third of a second at 10 GB a second; or what 4 bytes of sequence number and --short allow.
        let count = if arguments.short { 1000 } else { (3 << 30) / size.max(256) };
        let stream = format!("stream --size {size} --count {count}");
        let mut pelton = ["pelton", "pelton-batches"].map(Measured::new);
        let slow = Search { seconds: seconds * 5.0, ..quick };
        for round in 0..rounds as usize {
            // Each begins in turn.
            let many = rings.len();
            for at in 0..many {
                let ring = &mut rings[(round + at) % many];
                ring.rates.push(slow.ring(&ring.what)?);
            }
            for way in &mut memory {
                way.rates.push(quick.memory(way.what)?);
            }
            for system in &mut pelton {
                system.rates.push(speed(&own, &stream, system.what)? / 1e6);
            }
        }
        let state = [first_line, quick.line()?];
        writeln!(out, "{} messages, a line there and back in {:.0} and {:.0} ns", bytes(size), state[0], state[1])?;
        writeln!(
            out,
            "{:>9} {:>9}  {:>7} {:>12} {:>8} {:>8} {:>6} {:>9} {:>21} {:>21}",
            "bound", "M/s", "window", "published by", "waits for", "prefetch", "copy", "memory", "pelton", "batches"
        )?;
        let bounds = BOUNDS.into_iter().filter(|bound| windows.iter().any(|window| window <= bound));
        for (bound, each) in bounds.map(|bound| (bound, false)).chain([(PELTON_BOUND, true)]) {
            let fits = |ring: &&Measured<Ring>| ring.what.window <= bound && (!each || ring.what.batch == 0);
            let Some(ring) = rings.iter().filter(fits).max_by(|a, b| a.median().total_cmp(&b.median())) else {
                continue;
            };
            let alone = memory.iter().filter(|way| way.what.0 <= bound).map(Measured::median).fold(0.0, f64::max);
            let some = |rates: &[f64]| rates.iter().copied().map(Some).collect::<Vec<_>>();
            let ratios = [&pelton[0], &pelton[1]].map(|system| paired_ratio(&some(&system.rates), &some(&ring.rates)));
            let [by_one, by_batch] = ratios;
            let (by_one, by_batch) = (by_one.context("no rounds")?, by_batch.context("no rounds")?);
            let shown = |r: &pelton_bench::statistics::Ratio| {
                format!("{:.2} ({:.2} to {:.2})", r.median, r.interval.0, r.interval.1)
            };
            writeln!(
                out,
                "{:>9} {:>9}  {} {:>9} {:>21} {:>21}",
                bytes(bound),
                digits(ring.median()),
                ring.what,
                digits(alone),
                shown(&by_one),
                shown(&by_batch)
            )?;
            let Ring { window, batch, distance, prefetch, copy } = ring.what;
            lines.push(json!({
                "search": "limits", "size": size, "line_ns": state, "bound": bound, "each_message_published": each,
                "ring": { "window": window, "batch": batch, "distance": distance, "prefetch": prefetch, "copy": copy },
                "million_messages_per_second": ring.rates, "memory_alone": alone,
                "pelton": pelton[0].rates, "pelton_batches": pelton[1].rates,
                "pelton_by_ring": by_one, "pelton_batches_by_ring": by_batch,
            }));
        }
        writeln!(out, "pelton {}, in batches {}\n", digits(pelton[0].median()), digits(pelton[1].median()))?;
    }
    if let Some(place) = &arguments.results {
        results::write(place, &lines)?;
    }
    Ok(())
}
