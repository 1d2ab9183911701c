//! A plot of the cost of file operations in Erlang against the messages in the process's mailbox, for
//! bindings/erlang/README.md.

use std::collections::BTreeMap;
use std::fmt::Write as _;

/// The drawing's left and right, top and bottom.
const LEFT: f64 = 70.0;
const RIGHT: f64 = 560.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 330.0;
const COLOURS: [&str; 5] = ["#c0392b", "#b5651d", "#8e44ad", "#0b6e4f", "#4aa3df"];

/// An SVG of each system's seconds at each size of the mailbox: the sizes side by side, the seconds on a logarithmic
/// axis.
pub fn plot(points: &[(usize, BTreeMap<&'static str, f64>)]) -> String {
    let seconds = || points.iter().flat_map(|(_, figures)| figures.values().copied());
    let least = seconds().fold(f64::MAX, f64::min).log10().floor();
    let most = seconds().fold(f64::MIN, f64::max).log10().ceil().max(least + 1.0);
    let x = |at: usize| LEFT + 20.0 + (RIGHT - LEFT - 40.0) * at as f64 / (points.len().max(2) - 1) as f64;
    let y = |seconds: f64| BOTTOM - (BOTTOM - TOP) * (seconds.log10() - least) / (most - least);
    let mut out = String::from(concat!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 390" font-family="sans-serif" font-size="13" role="img">"#,
        "\n<title>10 MiB written and read back in blocks of 4 KiB, by the messages in the mailbox</title>\n",
        r##"<rect width="760" height="390" fill="#ffffff"/>"##,
        "\n",
    ));
    let mut text = |x: f64, y: f64, anchor: &str, what: &str| {
        let _ = writeln!(out, r##"<text x="{x:.0}" y="{y:.0}" text-anchor="{anchor}" fill="#222222">{what}</text>"##);
    };
    text(LEFT, 26.0, "start", "seconds for 10 MiB written and read back in blocks of 4 KiB");
    text((LEFT + RIGHT) / 2.0, BOTTOM + 45.0, "middle", "messages in the process's mailbox");
    for (at, (messages, _)) in points.iter().enumerate() {
        text(x(at), BOTTOM + 20.0, "middle", &grouped(*messages));
    }
    let tens: Vec<f64> = (least as i32..=most as i32).map(|power| 10f64.powi(power)).collect();
    for ten in &tens {
        text(LEFT - 8.0, y(*ten) + 4.0, "end", &ten.to_string());
    }
    // Names beside the last points, moved apart where they would overlap.
    let last = points.last().map(|(_, figures)| figures.clone()).unwrap_or_default();
    let mut names: Vec<(&str, f64)> = last.iter().map(|(system, seconds)| (*system, y(*seconds) + 4.0)).collect();
    names.sort_by(|one, other| one.1.total_cmp(&other.1));
    for at in 1..names.len() {
        names[at].1 = names[at].1.max(names[at - 1].1 + 16.0);
    }
    for (system, height) in &names {
        text(RIGHT + 4.0, *height, "start", system);
    }
    for ten in &tens {
        let height = y(*ten);
        let _ = writeln!(out, r##"<path d="M{LEFT} {height:.1}H{RIGHT}" stroke="#dddddd"/>"##);
    }
    for (colour, system) in COLOURS.iter().zip(last.keys()) {
        let line: Vec<String> = points
            .iter()
            .enumerate()
            .filter_map(|(at, (_, figures))| Some(format!("{:.1},{:.1}", x(at), y(*figures.get(system)?))))
            .collect();
        let _ = writeln!(
            out,
            r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="2"><title>{system}</title></polyline>"#,
            line.join(" ")
        );
        for point in &line {
            let (x, y) = point.split_once(',').unwrap_or_default();
            let _ = writeln!(out, r#"<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>"#);
        }
    }
    out.push_str("</svg>\n");
    out
}

/// 1000000 as 1,000,000.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_is_a_point_and_every_size_is_named() {
        let figures = |one, other| BTreeMap::from([("pelton-erlang", one), ("erlang-raw", other)]);
        let svg = plot(&[(0, figures(0.02, 0.04)), (1000, figures(0.02, 0.05)), (1_000_000, figures(0.02, 4.0))]);
        assert_eq!(svg.matches("<circle").count(), 6);
        assert_eq!(svg.matches("<polyline").count(), 2);
        for text in [">0<", ">1,000<", ">1,000,000<", ">0.01<", ">10<", ">erlang-raw<"] {
            assert!(svg.contains(text), "{text} is missing in {svg}");
        }
    }
}
