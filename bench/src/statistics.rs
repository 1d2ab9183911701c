//! Medians, and ratios with their bootstrap intervals; and how many of their digits are shown.

use serde::Serialize;

/// The first system's figure by another's, run by run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ratio {
    /// Of all runs
    pub median: f64,
    /// The smallest
    pub min: f64,
    /// The largest
    pub max: f64,
    /// The interval that has the true median in 19 of 20 cases, by a bootstrap over the pairs of runs
    pub interval: (f64, f64),
    /// How many pairs there were
    pub runs: usize,
}

/// The middle one, or the mean of the two in the middle.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        n if n % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

/// The first's figure by the other's of the same run. Runs that lack one of the two, or divide by nothing, make no
/// pair.
pub fn paired_ratio(first: &[Option<f64>], other: &[Option<f64>]) -> Option<Ratio> {
    let ratios: Vec<f64> = first
        .iter()
        .zip(other)
        .filter_map(|(first, other)| Some((*first)? / (*other)?))
        .filter(|ratio| ratio.is_finite())
        .collect();
    let mut sorted = ratios.clone();
    sorted.sort_by(f64::total_cmp);
    Some(Ratio {
        median: median(ratios)?,
        min: *sorted.first()?,
        max: *sorted.last()?,
        interval: interval(&sorted)?,
        runs: sorted.len(),
    })
}

/// The resamples of an interval.
const RESAMPLES: usize = 2000;

/// 2.5 % of the medians of resampled values are below it, and 2.5 % above. The same values always have the same one.
fn interval(values: &[f64]) -> Option<(f64, f64)> {
    let mut state = 1u64;
    let mut draw = || {
        // A linear congruential generator; its upper bits are the good ones.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        values[(state >> 33) as usize % values.len()]
    };
    let resampled = (0..RESAMPLES).map(|_| median(values.iter().map(|_| draw()).collect()));
    let mut medians: Vec<f64> = resampled.collect::<Option<_>>()?;
    medians.sort_by(f64::total_cmp);
    let outside = RESAMPLES / 40;
    Some((medians[outside], medians[RESAMPLES - 1 - outside]))
}

/// Three significant digits, and all that are before the point.
pub fn digits(value: f64) -> String {
    let size = value.abs();
    let behind = match size {
        _ if size == 0.0 => return "0".to_string(),
        _ if size >= 100.0 => 0,
        _ if size >= 10.0 => 1,
        _ if size >= 1.0 => 2,
        _ if size >= 0.1 => 3,
        _ if size >= 0.01 => 4,
        _ => return format!("{value:.1e}"),
    };
    format!("{value:.behind$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0]), Some(3.0));
        assert_eq!(median(vec![9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![9.0, 1.0, 2.0, 4.0]), Some(3.0));
    }

    #[test]
    fn ratios_are_taken_run_by_run() {
        // The machine slows down; each pair still has the ratio 2, which the medians of each system alone would not
        // have.
        let first = [Some(8.0), Some(4.0), Some(2.0), Some(1.0)];
        let other = [Some(4.0), Some(2.0), Some(1.0)];
        let all_two = Ratio { median: 2.0, min: 2.0, max: 2.0, interval: (2.0, 2.0), runs: 3 };
        assert_eq!(paired_ratio(&first, &other), Some(all_two));
        let ones = [Some(1.0); 5];
        let spread = paired_ratio(&[1.0, 9.0, 2.0, 4.0, 3.0].map(Some), &ones).unwrap();
        assert!(spread.interval.0 <= 2.0 && spread.interval.1 >= 4.0, "{spread:?}");
        let mut agreed = [Some(2.0); 25];
        agreed[3] = Some(90.0);
        let narrow = paired_ratio(&agreed, &[Some(1.0); 25]).unwrap();
        assert_eq!((narrow.interval, narrow.max), ((2.0, 2.0), 90.0));
        assert_eq!((spread.min, spread.median, spread.max), (1.0, 3.0, 9.0));
    }

    #[test]
    fn without_pairs_there_is_no_ratio() {
        assert_eq!(paired_ratio(&[Some(1.0)], &[]), None);
        assert_eq!(paired_ratio(&[Some(1.0)], &[None]), None);
        assert_eq!(paired_ratio(&[Some(1.0), Some(3.0)], &[Some(0.0), Some(2.0)]).unwrap().median, 1.5);
    }
}
