//! Metrics in the text format of OpenMetrics, and in the older one of Prometheus; `http` serves them.

pub mod http;

use clap::ValueEnum;
pub use prometheus_client::registry::Unit;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, text},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Registry,
};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Begins each name.
const PREFIX: &str = "pelton";

/// A text format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// OpenMetrics 1.0
    Openmetrics,
    /// The text format of Prometheus 0.0.4, for files of node_exporter's textfile collector
    Text,
}

/// The numbers of one scrape.
pub trait MetricSource: std::fmt::Debug + Send + Sync + 'static {
    /// All of them.
    fn metrics(&self) -> Vec<Metric<'_>>;
}

/// The text of all metrics.
pub fn text(source: impl MetricSource, format: Format) -> String {
    let mut registry = Registry::with_prefix(PREFIX);
    registry.register_collector(Box::new(Scrape(source)));
    let mut text = String::new();
    text::encode(&mut text, &registry).expect("a String takes any text");
    match format {
        Format::Openmetrics => text,
        Format::Text => as_prometheus(&text),
    }
}

#[derive(Debug)]
struct Scrape<S>(S);

impl<S: MetricSource> Collector for Scrape<S> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> std::fmt::Result {
        for Metric { name, help, unit, is_counter, samples } in self.0.metrics() {
            let kind = if is_counter { MetricType::Counter } else { MetricType::Gauge };
            let mut metric = encoder.encode_descriptor(name, help, unit.as_ref(), kind)?;
            match &samples[..] {
                [Sample { labels, value }] if labels.is_empty() => value.encode(is_counter, metric)?,
                samples => samples
                    .iter()
                    .try_for_each(|Sample { labels, value }| value.encode(is_counter, metric.encode_family(labels)?))?,
            }
        }
        Ok(())
    }
}

/// A number of a sample. Whole ones are printed without a point.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(untagged)]
pub enum Number {
    /// A count.
    Whole(u64),
    /// Any other number.
    Real(f64),
}

impl Number {
    fn encode(self, is_counter: bool, encoder: MetricEncoder<'_>) -> std::fmt::Result {
        match self {
            Number::Whole(count) if is_counter => ConstCounter::new(count).encode(encoder),
            Number::Whole(count) => ConstGauge::new(count).encode(encoder),
            Number::Real(number) => ConstGauge::new(number).encode(encoder),
        }
    }
}

/// One number of a metric, with its labels.
pub struct Sample<'a> {
    /// Names and values.
    pub labels: Vec<(&'static str, &'a str)>,
    /// The number.
    pub value: Number,
}

/// One metric, and its samples.
pub struct Metric<'a> {
    /// Without prefix and unit.
    pub name: &'static str,
    /// A sentence without its point.
    pub help: &'static str,
    /// Part of the name of its samples.
    pub unit: Option<Unit>,
    /// Whether it only grows; otherwise it is a gauge.
    pub is_counter: bool,
    /// One for each combination of labels.
    pub samples: Vec<Sample<'a>>,
}

impl Metric<'_> {
    /// The name of its samples, with prefix and unit.
    fn full_name(&self) -> String {
        let unit = self.unit.as_ref().map(|unit| format!("_{}", unit.as_str())).unwrap_or_default();
        format!("{PREFIX}_{}{unit}{}", self.name, if self.is_counter { "_total" } else { "" })
    }

    /// Its object of `--json`.
    pub fn object(&self) -> Value {
        let samples = self.samples.iter().map(|Sample { labels, value }| {
            let labels: BTreeMap<_, _> = labels.iter().copied().collect();
            json!({ "labels": labels, "value": value })
        });
        let samples: Vec<Value> = samples.collect();
        let kind = if self.is_counter { "counter" } else { "gauge" };
        json!({ "name": self.full_name(), "type": kind, "help": self.help, "samples": samples })
    }
}

/// The older format of Prometheus: there a counter's description has the name of its samples, and units and an end mark
/// are comments without a meaning.
fn as_prometheus(text: &str) -> String {
    let is_counter = |name: &str| text.contains(&format!("# TYPE {name} counter\n"));
    let mut lines = String::with_capacity(text.len());
    for line in text.lines() {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", word @ ("HELP" | "TYPE"), name, rest] if is_counter(name) => {
                lines += &format!("# {word} {name}_total {rest}\n");
            }
            ["#", "UNIT", ..] | ["#", "EOF"] => {}
            _ => lines += &format!("{line}\n"),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_older_format_names_counters_by_their_samples() {
        let text =
            "# HELP a Bytes.\n# TYPE a counter\n# UNIT a bytes\na_total 1\n# HELP b B.\n# TYPE b gauge\nb 2\n# EOF\n";
        let older = "# HELP a_total Bytes.\n# TYPE a_total counter\na_total 1\n# HELP b B.\n# TYPE b gauge\nb 2\n";
        assert_eq!(as_prometheus(text), older);
    }
}
