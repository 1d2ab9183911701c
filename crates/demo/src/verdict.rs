//! The verdict: how the speed of the first transport compares with that of each other, in words that the runs support.
//!
//! The transports take turns, so a round has one run of each, and one ratio of two times. An order-statistics interval
//! needs no assumption about these ratios but that rounds are alike: it holds the true median in at least 95 of 100
//! demos.

use serde::Serialize;

/// An interval that holds 1 is narrow enough to call both equal if it ends within this factor of 1.
const LEVEL: f64 = 1.25;
/// From this part of all processors on, other programs make the machine busy. A guess.
const BUSY_PART: f64 = 0.1;

/// The speed of one transport as a multiple of that of another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Speedup {
    /// The ratio of the medians, which a table shows too.
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

impl Speedup {
    /// From the seconds of each round.
    pub fn of(own: &[f64], other: &[f64]) -> Speedup {
        let mut ratios: Vec<f64> = other.iter().zip(own).map(|(other, own)| other / own).collect();
        ratios.sort_by(f64::total_cmp);
        let (count, outside) = (ratios.len(), outside(ratios.len()));
        let median = median(other) / median(own);
        // Each round decides by itself, so the ratio of the medians may lie outside, which only widens the interval.
        Speedup { median, low: ratios[outside].min(median), high: ratios[count - 1 - outside].max(median) }
    }

    /// How the one compares with `other`, after the word `is`.
    fn words(&self, other: &str) -> String {
        // As printed, so that the numbers and the words agree.
        let [low, high] = [self.low, self.high].map(rounded);
        let range = format!("({} to {})", times(self.low), times(self.high));
        if low > 1.0 {
            format!("{} times as fast as {other} {range}", times(self.median))
        } else if high < 1.0 {
            format!("slower than {other}: {} of its speed {range}", times(self.median))
        } else if low >= 1.0 / LEVEL && high <= LEVEL {
            format!("level with {other} {range}")
        } else {
            format!("not clearly faster or slower than {other} {range}")
        }
    }
}

/// How many of `count` sorted ratios lie outside the interval at each end: the most for which the true median lies
/// outside it in at most 5 of 100 cases. Each ratio is below the median with a probability of one half, so the number
/// of those below is binomial.
fn outside(count: usize) -> usize {
    let mut probability = 0.5f64.powi(count as i32);
    let mut below = probability;
    let mut outside = 0;
    // With `outside` left out, the interval misses the median if at most `outside` ratios are on one side of it.
    for next in 1..=count / 2 {
        probability *= (count + 1 - next) as f64 / next as f64;
        below += probability;
        if 2.0 * below > 0.05 {
            break;
        }
        outside = next;
    }
    outside
}

/// The median.
pub fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

/// The verdict of one job: `first` beside each other transport. `others_busy`: the processors of the machine, and how
/// many of them other programs kept busy.
pub fn verdict(first: &str, others: &[(&str, Speedup)], others_busy: Option<(usize, f64)>) -> String {
    let parts: Vec<String> = others.iter().map(|(other, speedup)| speedup.words(other)).collect();
    let is_busy = others_busy.is_some_and(|(processors, busy)| busy >= BUSY_PART * processors as f64);
    format!("{first} is {}{}.", parts.join(", and "), if is_busy { ", on this busy machine" } else { "" })
}

/// A ratio with two or three digits.
fn times(ratio: f64) -> String {
    match ratio {
        10.0.. => format!("{ratio:.0}"),
        2.0.. => format!("{ratio:.1}"),
        _ => format!("{ratio:.2}"),
    }
}

fn rounded(ratio: f64) -> f64 {
    times(ratio).parse().expect("a number")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(ratios: &[f64]) -> String {
        verdict("pelton", &[("a socket", Speedup::of(&vec![1.0; ratios.len()], ratios))], Some((2, 0.1)))
    }

    #[test]
    fn the_interval_holds_the_median_with_at_least_95_percent() {
        // Tables of the sign test.
        let table = [(6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (15, 3), (20, 5), (100, 39)];
        assert_eq!(table.map(|(count, _)| (count, outside(count))), table);
        let speedup = Speedup::of(&[0.5; 9], &[4.5, 1.0, 0.5, 2.0, 1.5, 4.0, 2.5, 3.5, 3.0]);
        assert_eq!(speedup, Speedup { median: 5.0, low: 2.0, high: 8.0 });
        assert_eq!(Speedup::of(&[1.0, 1.0], &[4.0, 1.0]), Speedup { median: 2.5, low: 1.0, high: 4.0 });
    }

    #[test]
    fn the_interval_pairs_the_runs_of_a_round_and_holds_the_ratio_of_the_medians() {
        // A machine that is slower in some rounds slows both.
        let own = [1.0, 9.0, 1.0, 9.0, 1.0, 9.0];
        assert_eq!(Speedup::of(&own, &own.map(|time| 2.0 * time)), Speedup { median: 2.0, low: 2.0, high: 2.0 });
        let speedup = Speedup::of(&[1.0, 2.0, 3.0], &[6.0, 4.0, 3.0]);
        assert_eq!(speedup, Speedup { median: 2.0, low: 1.0, high: 6.0 });
        // The ratios are 1 five times, 2 three times, and 8 once; that of the medians is 4.
        let own = [1.0, 1.0, 1.0, 8.0, 4.0, 1.0, 4.0, 1.0, 2.0];
        let other = [1.0, 8.0, 2.0, 8.0, 8.0, 1.0, 4.0, 1.0, 4.0];
        assert_eq!(Speedup::of(&own, &other), Speedup { median: 4.0, low: 1.0, high: 4.0 });
    }

    #[test]
    fn a_faster_one_is_called_faster_only_if_the_whole_interval_is_above_1() {
        assert_eq!(of(&[11.0, 10.4, 12.2, 9.8, 11.0, 11.4]), "pelton is 11 times as fast as a socket (9.8 to 12).");
        assert_eq!(of(&[1.2, 1.1, 1.3, 1.2, 1.2, 1.01]), "pelton is 1.20 times as fast as a socket (1.01 to 1.30).");
        // 1.004 is printed as 1.00, which is not faster.
        assert_eq!(of(&[1.2, 1.1, 1.2, 1.1, 1.1, 1.004]), "pelton is level with a socket (1.00 to 1.20).");
    }

    #[test]
    fn a_slower_one_is_called_slower() {
        assert_eq!(
            of(&[0.5, 0.6, 0.7, 0.99, 0.6, 0.5]),
            "pelton is slower than a socket: 0.60 of its speed (0.50 to 0.99)."
        );
        assert_eq!(
            of(&[0.04, 0.05, 0.05, 0.05, 0.05, 0.06]),
            "pelton is slower than a socket: 0.05 of its speed (0.04 to 0.06)."
        );
    }

    #[test]
    fn an_interval_with_1_is_level_if_narrow_and_undecided_if_wide() {
        assert_eq!(of(&[0.9, 1.1, 1.0, 1.0, 1.2, 0.85]), "pelton is level with a socket (0.85 to 1.20).");
        assert_eq!(
            of(&[0.6, 3.4, 1.0, 2.0, 1.2, 0.9]),
            "pelton is not clearly faster or slower than a socket (0.60 to 3.4)."
        );
        // One run of nine, however far off, decides nothing.
        assert_eq!(
            of(&[3.0, 3.1, 2.9, 3.0, 0.1, 3.0, 3.2, 3.1, 3.0]),
            "pelton is 3.0 times as fast as a socket (2.9 to 3.1)."
        );
    }

    #[test]
    fn a_verdict_names_each_other_transport_and_a_busy_machine() {
        let speedup = |ratio: f64| Speedup { median: ratio, low: ratio, high: ratio };
        let others = [("a write per line", speedup(11.0)), ("64 KiB batches", speedup(1.0))];
        let words =
            "pelton is 11 times as fast as a write per line (11 to 11), and level with 64 KiB batches (1.00 to 1.00)";
        assert_eq!(verdict("pelton", &others, Some((2, 1.0))), format!("{words}, on this busy machine."));
        assert_eq!(verdict("pelton", &others, Some((2, 0.05))), format!("{words}."));
        assert_eq!(verdict("pelton", &others, None), format!("{words}."));
    }
}
