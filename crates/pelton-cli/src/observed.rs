//! The channels of a running system, as `ls`, `stat`, `top` and `doctor` show them: what to observe, how numbers and
//! texts are written, and the objects of `--json`.

use crate::{
    channel::directory,
    descriptors,
    failure::{Failure, printable},
};
use clap::Args;
use pelton::Policy;
use pelton::observe::{Activity, Channel, Kind, Lane, Observer, Reading, Side, Unreadable, age};
use serde_json::{Value, json};
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

/// The options that say where to look.
#[derive(Args)]
pub struct Where {
    /// Search for channels in directories below DIR too; may be repeated
    #[arg(long, value_name = "DIR")]
    root: Vec<PathBuf>,
}

impl Where {
    /// An observer of these places. It keeps three descriptors of each lane: as many as the hard limit allows.
    ///
    /// Fails for a root that is no directory of this user.
    pub fn observer(&self) -> Result<Observer, Failure> {
        descriptors::raise_quietly();
        let mut observer = Observer::new();
        for root in &self.root {
            if let Err(error) = std::fs::read_dir(root) {
                let root = root.display();
                return Err(Failure::Input(format!("--root {root}: {error}: want a directory to search")));
            }
            observer.add_root(root);
        }
        Ok(observer)
    }
}

/// A path as the observer names it, so that a channel that it finds twice is one.
pub fn whole_path(path: &Path) -> PathBuf {
    std::fs::canonicalize(path).or_else(|_| std::path::absolute(path)).unwrap_or_else(|_| path.to_owned())
}

/// The channels of this name: a short name, unix:PATH, path:DIR, or a DIR with a slash.
pub fn named(observer: &mut Observer, name: &str) -> Vec<Channel> {
    let is_directory = name.starts_with("path:") || (name.contains('/') && !name.starts_with("unix:"));
    let name = match is_directory {
        true => {
            let path = whole_path(directory(name));
            observer.add_directory(&path);
            format!("path:{}", path.display())
        }
        false => name.to_owned(),
    };
    observer.channels().channels.into_iter().filter(|channel| channel.name == name).collect()
}

/// Whether a list leaves it out: the replies of a service, while nothing is wrong with them. The service's own line
/// shows the clients.
pub fn is_detail(channel: &Channel) -> bool {
    use pelton::observe::State;
    channel.kind == Kind::Replies && matches!(channel.state(), State::Ok | State::Idle)
}

/// The channel's name, safe for a terminal.
pub fn name_of(channel: &Channel) -> String {
    match channel.name.as_str() {
        "" => "(threads)".to_owned(),
        name => one_line(name),
    }
}

/// A text of another process, as one line that is safe for a terminal.
pub fn one_line(text: &str) -> String {
    printable(&text.replace('\n', "\\n").replace('\t', "\\t"))
}

/// A number in at most five characters: 999, 1.2k, 31M.
pub fn short(number: u64) -> String {
    scaled(number as f64, 1000.0, &["", "k", "M", "G", "T", "P", "E"])
}

/// Bytes in at most six characters: 999, 1.2K, 64M; powers of 1024, as the options take them.
pub fn short_bytes(bytes: u64) -> String {
    scaled(bytes as f64, 1024.0, &["", "K", "M", "G", "T", "P", "E"])
}

/// A rate, as [`short`]; below 10 with a digit behind the point.
pub fn rate(per_second: f64) -> String {
    match per_second {
        rate if rate > 0.0 && rate < 9.95 => format!("{rate:.1}"),
        rate => short(rate.round() as u64),
    }
}

fn scaled(number: f64, base: f64, units: &[&str]) -> String {
    let mut value = number;
    let mut units = units.iter();
    let mut unit = units.next().expect("the first");
    while value >= 999.5
        && let Some(next) = units.next()
    {
        (value, unit) = (value / base, next);
    }
    match matches!(*unit, "" | "ns") || value >= 9.95 {
        true => format!("{value:.0}{unit}"),
        false => format!("{value:.1}{unit}"),
    }
}

/// The mean time from the sending of a message to its release, by Little's law: the mean number that waits, divided by
/// the number that is released per second. `None` if nothing was released.
///
/// It needs no time in a message, and nothing of the two sides. It is exact over a long time, and includes what the
/// receiver does with a message before it releases that.
pub fn mean_delay(waiting: f64, released_per_second: f64) -> Option<f64> {
    (released_per_second > 0.0).then(|| waiting / released_per_second)
}

/// A delay in seconds, in at most six characters: 1.2ms, 350us, 12s.
pub fn short_delay(seconds: f64) -> String {
    match seconds {
        seconds if seconds >= 0.9995 => scaled(seconds, 1000.0, &["s", "ks", "Ms"]),
        seconds => scaled(seconds * 1e9, 1000.0, &["ns", "us", "ms"]),
    }
}

/// A time in at most four characters: 12s, 3m, 5h, 200d.
pub fn short_time(time: Duration) -> String {
    match time.as_secs() {
        seconds @ ..=99 => format!("{seconds}s"),
        seconds @ ..=5999 => format!("{}m", seconds / 60),
        seconds @ ..=359_999 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86400),
    }
}

/// How long ago it was made; `-` if that is not known.
pub fn short_age(channel: &Channel) -> String {
    age(channel.made).map_or("-".to_owned(), short_time)
}

/// How full the fullest lane is, in percent.
pub fn percent(channel: &Channel) -> u64 {
    let of = |lane: &Lane| percent_of(&lane.reading);
    channel.lanes.iter().map(of).max().unwrap_or(0)
}

/// How full a lane is, in percent.
pub fn percent_of(reading: &Reading) -> u64 {
    u128::from(reading.waiting_bytes).saturating_mul(100).div_ceil(u128::from(reading.capacity.max(1))).min(100) as u64
}

/// The process of a side: its number and name, or why there is none.
pub fn side(side: &Side) -> String {
    match side.activity {
        Activity::Absent => "-".to_owned(),
        Activity::Died => format!("{} died", side.pid),
        Activity::Closed => format!("{} closed", side.pid),
        _ if side.command.is_empty() => format!("{}", side.pid),
        _ => format!("{} {}", side.pid, one_line(&side.command)),
    }
}

/// The receiver of a channel; of a durable subscription with its name.
pub fn receiver(channel: &Channel) -> String {
    match &channel.durable {
        None => side(&channel.receiver),
        Some(name) if channel.receiver.activity == Activity::Absent => format!("{} away", one_line(name)),
        Some(name) => format!("{} {}", one_line(name), side(&channel.receiver)),
    }
}

/// A subscriber's policy, in one or two words.
pub fn policy_words(policy: Policy, lag_after: Option<Duration>) -> &'static str {
    match (policy, lag_after) {
        (Policy::Gate, None) => "gate",
        (Policy::Gate, Some(_)) => "gate until",
        (Policy::Lag, _) => "lag",
        (Policy::Latest, _) => "latest",
    }
}

/// The senders of a channel: one, or their number.
pub fn senders(channel: &Channel) -> String {
    match &channel.lanes[..] {
        [] => "-".to_owned(),
        [lane] => side(&lane.sender),
        lanes if channel.kind == Kind::Service => format!("{} clients", lanes.len()),
        lanes => format!("{} senders", lanes.len()),
    }
}

/// A number of things: `1 lane`, `2 lanes`.
pub fn counted(number: u64, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// The text in exactly `width` characters: cut, with an ellipsis, or filled.
pub fn cell(text: &str, width: usize) -> String {
    match text.chars().count() > width {
        true => text.chars().take(width.saturating_sub(1)).chain(['…']).collect(),
        false => format!("{text:width$}"),
    }
}

/// A name in exactly `width` characters. Of a long one the end says more than the beginning: it is a path.
pub fn name_cell(name: &str, width: usize) -> String {
    let characters = name.chars().count();
    match characters > width {
        true => ['…'].into_iter().chain(name.chars().skip(characters - width.saturating_sub(1))).collect(),
        false => format!("{name:width$}"),
    }
}

fn json_of_side(side: &Side) -> Value {
    let activity = match side.activity {
        Activity::Alive => "alive",
        Activity::Stopped => "stopped",
        Activity::Closed => "closed",
        Activity::Died => "died",
        Activity::Absent => "absent",
        _ => "unknown",
    };
    let stopped_seconds = side.stopped_for.map(|time| time.as_secs_f64());
    json!({ "pid": side.pid, "command": side.command, "activity": activity, "stopped_seconds": stopped_seconds })
}

fn json_of_lane(lane: &Lane) -> Value {
    let Reading { capacity, message_bytes_max, waiting_messages, waiting_bytes, sent, received, missed, .. } =
        lane.reading;
    let Reading { policy, lag_after, .. } = lane.reading;
    json!({
        "number": lane.number,
        "sender": json_of_side(&lane.sender),
        "capacity": capacity,
        "message_bytes_max": message_bytes_max,
        "waiting_messages": waiting_messages,
        "waiting_bytes": waiting_bytes,
        "is_full": lane.is_full(),
        "age_seconds": age(lane.made).map(|age| age.as_secs_f64()),
        "sent": crate::report::Counters::from(sent),
        "received": crate::report::Counters::from(received),
        "missed": missed,
        "policy": policy.map(|policy| policy_words(policy, lag_after)),
        "lag_after_seconds": lag_after.map(|time| time.as_secs_f64()),
    })
}

/// The object of a channel.
pub fn json_of(channel: &Channel) -> Value {
    json!({
        "name": channel.name,
        "kind": channel.kind.word(),
        "state": channel.state().words(),
        "receiver": json_of_side(&channel.receiver),
        "capacity": channel.capacity(),
        "waiting_messages": channel.waiting_messages(),
        "waiting_bytes": channel.waiting_bytes(),
        "messages": channel.messages(),
        "bytes": channel.bytes(),
        "age_seconds": age(channel.made).map(|age| age.as_secs_f64()),
        "note": channel.note,
        "durable": channel.durable,
        "lanes": channel.lanes.iter().map(json_of_lane).collect::<Vec<_>>(),
    })
}

/// The object of what cannot be read.
pub fn json_of_unreadable(unreadable: &Unreadable) -> Value {
    json!({ "what": unreadable.what, "reason": unreadable.reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_rounded() {
        for (number, text) in [(0, "0"), (999, "999"), (1000, "1.0k"), (9_960, "10k"), (3_100_000, "3.1M")] {
            assert_eq!(short(number), text);
        }
        for (seconds, text) in [(0.0, "0ns"), (3.4e-8, "34ns"), (0.0012, "1.2ms"), (0.35, "350ms"), (1.5, "1.5s")] {
            assert_eq!(short_delay(seconds), text);
        }
        assert_eq!((mean_delay(30.0, 10.0), mean_delay(0.0, 10.0), mean_delay(3.0, 0.0)), (Some(3.0), Some(0.0), None));
        for (bytes, text) in [(4096, "4.0K"), (64 << 20, "64M"), (1023, "1.0K"), (u64::MAX, "16E")] {
            assert_eq!(short_bytes(bytes), text);
        }
    }

    #[test]
    fn a_cell_has_its_width_whatever_the_text() {
        for text in [
            "",
            "short",
            "exactly 10",
            "longer than ten",
            "\u{e4}\u{e4}\u{e4}\u{e4}\u{e4}\u{e4}\u{e4}\u{e4}\u{e4}\u{e4}\u{e4}",
        ] {
            assert_eq!(cell(text, 10).chars().count(), 10, "{text}");
            assert_eq!(name_cell(text, 10).chars().count(), 10, "{text}");
        }
    }

    #[test]
    fn a_text_of_another_process_stays_one_line_without_control_characters() {
        assert_eq!(one_line("a\x1b[2Jb\nc\td"), "a\\u{1b}[2Jb\\nc\\td");
    }
}
