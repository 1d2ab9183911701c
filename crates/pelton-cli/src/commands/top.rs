//! `pelton top`: all channels live, and one of them opened. This file has the numbers and what the keys do;
//! `top/keys.rs` reads those, `top/screen.rs` draws.
//!
//! The channels are found anew each second or so; in between, only their pages are read. Nothing of a channel changes,
//! and a kill of the tool changes nothing.

mod keys;
mod screen;

use crate::{
    failure::Failure,
    observed::{Where, is_detail, json_of, mean_delay, name_of, percent},
    output::{json, print},
    signals::Signals,
};
use clap::Args;
use pelton::observe::{Channel, Kind, Observer, Reading, State};
use ratatui::crossterm::event::KeyCode;
use serde_json::json;
use std::{
    collections::{BTreeMap, VecDeque},
    io::IsTerminal as _,
    time::{Duration, Instant, SystemTime},
};

/// The channels are found anew each second, or less often: so that the search takes at most this part of the time.
const FIND_INTERVAL: Duration = Duration::from_secs(1);
const FIND_PART: u32 = 400;
/// Rates are those of about this time.
const RATE_TIME: Duration = Duration::from_secs(1);
/// Updates in the history of a channel, which an opened one shows.
const HISTORY_MAX: usize = 400;

/// Options of `pelton top`.
#[derive(Args)]
pub struct TopArgs {
    /// Seconds between two updates
    #[arg(long, value_name = "SECONDS", value_parser = crate::seconds, default_value = "0.2")]
    interval: Duration,
    #[command(flatten)]
    place: Where,
    /// Print a JSON object for each update instead of a screen
    #[arg(long)]
    json: bool,
}

/// Runs `pelton top`.
pub fn run(args: &TopArgs) -> Result<(), Failure> {
    if args.interval < Duration::from_millis(50) {
        return Err(Failure::Input("--interval is below 0.05 s, more updates than a terminal shows".to_owned()));
    }
    // Those that it observes go first: on a busy machine it takes what they leave of the processors.
    let _ = rustix::process::nice(19);
    let mut top = Top::new(args.place.observer()?);
    if args.json {
        let signals = Signals::install()?;
        loop {
            top.update();
            print(json(&top.object()))?;
            signals.poll([], Some(args.interval))?;
        }
    }
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        let text = "`pelton top` needs a terminal: `pelton top --json` and `pelton ls` need none";
        return Err(Failure::Input(text.to_owned()));
    }
    let signals = Signals::install()?;
    let mut terminal = ratatui::try_init().map_err(|error| Failure::system("preparing the terminal", error))?;
    let done = live(&mut top, &mut terminal, args.interval, &signals);
    ratatui::restore();
    done
}

fn live(
    top: &mut Top,
    terminal: &mut ratatui::DefaultTerminal,
    interval: Duration,
    signals: &Signals,
) -> Result<(), Failure> {
    let failed = |error| Failure::system("the terminal", error);
    loop {
        let next = Instant::now() + interval;
        if !top.is_paused {
            top.update();
        }
        loop {
            // A new size of the terminal shows at the next drawing.
            terminal.draw(|frame| screen::draw(top, frame)).map_err(failed)?;
            let keys = keys::read(signals, next)?;
            if keys.is_empty() {
                break;
            }
            if keys.into_iter().any(|key| top.press(key)) {
                return Ok(());
            }
        }
    }
}

/// What makes a channel the same one at the next finding.
type Key = (String, Kind, Option<SystemTime>, Option<String>, u32);

fn key(channel: &Channel) -> Key {
    // A successor takes the channel over, but not in another process that serves the same name.
    let is_in_place = channel.kind == Kind::Path || channel.durable.is_some();
    let process = if is_in_place { 0 } else { channel.receiver.pid };
    (channel.name.clone(), channel.kind, channel.made, channel.durable.clone(), process)
}

/// Counters, of a lane or of all lanes of a channel.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    messages: u64,
    bytes: u64,
    sleeps: u64,
    wakes: u64,
    /// No counter: messages that wait now.
    waiting: u64,
}

impl Sums {
    fn of(reading: &Reading) -> Sums {
        let Reading { sent, received, .. } = reading;
        Sums {
            messages: received.messages,
            bytes: received.bytes,
            sleeps: sent.sleeps.wrapping_add(received.sleeps),
            wakes: sent.wakes_sent.wrapping_add(received.wakes_sent),
            waiting: reading.waiting_messages,
        }
    }
}

/// Growth per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Rates {
    messages: f64,
    bytes: f64,
    sleeps: f64,
    wakes: f64,
}

impl Rates {
    fn between(before: Sums, now: Sums, time: Duration) -> Rates {
        // Counters of a successor begin anew.
        let per_second = |before: u64, now: u64| now.saturating_sub(before) as f64 / time.as_secs_f64().max(1e-9);
        Rates {
            messages: per_second(before.messages, now.messages),
            bytes: per_second(before.bytes, now.bytes),
            sleeps: per_second(before.sleeps, now.sleeps),
            wakes: per_second(before.wakes, now.wakes),
        }
    }

    fn add(&mut self, other: Rates) {
        self.messages += other.messages;
        self.bytes += other.bytes;
        self.sleeps += other.sleeps;
        self.wakes += other.wakes;
    }
}

/// A channel's past.
#[derive(Default)]
struct Past {
    /// The counters of each lane, in the last second or so.
    sums: VecDeque<(Instant, Vec<Sums>)>,
    rates: Rates,
    rates_of_lanes: Vec<Rates>,
    /// The mean delay of a message, in seconds, by what waited at the updates of this second or so.
    delay: Option<f64>,
    delays_of_lanes: Vec<Option<f64>>,
    /// Messages per second, the last update at the end.
    history: VecDeque<u64>,
}

impl Past {
    fn update(&mut self, now: Instant, channel: &Channel) {
        let sums: Vec<Sums> = channel.lanes.iter().map(|lane| Sums::of(&lane.reading)).collect();
        while self.sums.len() > 1 && self.sums[1].0 + RATE_TIME <= now {
            self.sums.pop_front();
        }
        let first = self.sums.front();
        self.rates = Rates::default();
        self.rates_of_lanes.clear();
        for (number, sums) in sums.iter().enumerate() {
            // A lane that is new has no rate yet.
            let before = first.and_then(|(at, before)| Some((*at, *before.get(number)?)));
            let rates = before.map_or(Rates::default(), |(at, before)| Rates::between(before, *sums, now - at));
            self.rates.add(rates);
            self.rates_of_lanes.push(rates);
        }
        self.sums.push_back((now, sums));
        let updates = self.sums.len() as f64;
        let waiting = |number: usize| {
            let sums = self.sums.iter().filter_map(|(_, sums)| sums.get(number));
            sums.map(|sums| sums.waiting).sum::<u64>() as f64 / updates
        };
        let waiting: Vec<f64> = (0..self.rates_of_lanes.len()).map(waiting).collect();
        self.delay = mean_delay(waiting.iter().sum(), self.rates.messages);
        let of_lanes = waiting.iter().zip(&self.rates_of_lanes);
        self.delays_of_lanes = of_lanes.map(|(waiting, rates)| mean_delay(*waiting, rates.messages)).collect();
        self.history.push_back(self.rates.messages.round() as u64);
        if self.history.len() > HISTORY_MAX {
            self.history.pop_front();
        }
    }
}

/// A channel and its past.
struct Shown {
    channel: Channel,
    past: Past,
}

/// A column by which the list is sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sort {
    Name,
    Rate,
    Bytes,
    Waits,
    Delay,
    Full,
    State,
}

impl Sort {
    const ALL: [Sort; 7] = [Sort::Name, Sort::Rate, Sort::Bytes, Sort::Waits, Sort::Delay, Sort::Full, Sort::State];

    fn word(self) -> &'static str {
        match self {
            Sort::Name => "name",
            Sort::Rate => "messages/s",
            Sort::Bytes => "bytes/s",
            Sort::Waits => "waiting",
            Sort::Delay => "delay",
            Sort::Full => "full",
            Sort::State => "state",
        }
    }
}

/// What is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum View {
    List,
    Help,
    Channel,
    /// The keys go to the filter.
    Filter,
}

struct Top {
    observer: Observer,
    /// When to find the channels anew.
    find_at: Option<Instant>,
    channels: Vec<Shown>,
    unreadable: usize,
    sort: Sort,
    is_reversed: bool,
    filter: String,
    is_paused: bool,
    view: View,
    /// The line of the list with the cursor.
    selected: usize,
    /// The opened channel.
    opened: Option<Key>,
    has_colour: bool,
}

impl Top {
    fn new(observer: Observer) -> Top {
        Top {
            observer,
            find_at: None,
            channels: Vec::new(),
            unreadable: 0,
            sort: Sort::Rate,
            is_reversed: false,
            filter: String::new(),
            is_paused: false,
            view: View::List,
            selected: 0,
            opened: None,
            has_colour: std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
        }
    }

    /// Reads everything again.
    fn update(&mut self) {
        let now = Instant::now();
        if self.find_at.is_none_or(|at| now >= at) {
            let found = self.observer.channels();
            let mut past: BTreeMap<Key, Past> =
                self.channels.drain(..).map(|shown| (key(&shown.channel), shown.past)).collect();
            self.channels = (found.channels.into_iter())
                .map(|channel| Shown { past: past.remove(&key(&channel)).unwrap_or_default(), channel })
                .collect();
            self.unreadable = found.unreadable.len();
            self.find_at = Some(now + FIND_INTERVAL.max(now.elapsed() * FIND_PART));
        } else {
            for lane in self.channels.iter_mut().flat_map(|shown| &mut shown.channel.lanes) {
                // A lane that cannot be read keeps its last numbers until the next finding reports it.
                if let Ok(reading) = lane.read() {
                    lane.reading = reading;
                }
            }
        }
        for shown in &mut self.channels {
            shown.past.update(now, &shown.channel);
        }
        // Last, because the list is shorter or longer now.
        self.selected = self.selected.min(self.listed().len().saturating_sub(1));
    }

    /// The channels of the list, sorted and filtered.
    fn listed(&self) -> Vec<&Shown> {
        let mut listed: Vec<&Shown> = self.channels.iter().filter(|shown| !is_detail(&shown.channel)).collect();
        let wanted = self.filter.to_lowercase();
        if !wanted.is_empty() {
            listed.retain(|shown| name_of(&shown.channel).to_lowercase().contains(&wanted));
        }
        // Stable: those that compare equal stay in the order of the observer, by name.
        listed.sort_by(|one, other| {
            let ((first, of_first), (second, of_second)) =
                ((&one.channel, one.past.rates), (&other.channel, other.past.rates));
            let order = match self.sort {
                Sort::Name => first.name.cmp(&second.name),
                // The largest first.
                Sort::Rate => of_second.messages.total_cmp(&of_first.messages),
                Sort::Bytes => of_second.bytes.total_cmp(&of_first.bytes),
                Sort::Waits => second.waiting_messages().cmp(&first.waiting_messages()),
                // Unknown ones, which receive nothing, at the end.
                Sort::Delay => {
                    let of = |past: &Past| past.delay.unwrap_or(-1.0);
                    of(&other.past).total_cmp(&of(&one.past))
                }
                Sort::Full => percent(second).cmp(&percent(first)),
                Sort::State => (first.state() == State::Ok, first.state().words())
                    .cmp(&(second.state() == State::Ok, second.state().words())),
            };
            if self.is_reversed { order.reverse() } else { order }
        });
        listed
    }

    fn opened(&self) -> Option<&Shown> {
        let opened = self.opened.as_ref()?;
        self.channels.iter().find(|shown| key(&shown.channel) == *opened)
    }

    /// Handles a key. Returns true to quit.
    fn press(&mut self, code: KeyCode) -> bool {
        if self.view == View::Filter {
            match code {
                KeyCode::Enter => self.view = View::List,
                KeyCode::Esc => {
                    self.filter.clear();
                    self.view = View::List;
                }
                KeyCode::Backspace => _ = self.filter.pop(),
                KeyCode::Char(character) if self.filter.len() < 64 => self.filter.push(character),
                _ => {}
            }
            self.selected = 0;
            return false;
        }
        match code {
            KeyCode::Char('q') | KeyCode::F(10) => return true,
            // In the list, there is only the filter to leave.
            KeyCode::Esc if self.view == View::List => {
                self.filter.clear();
                self.selected = 0;
            }
            KeyCode::Esc => self.view = View::List,
            KeyCode::F(1) | KeyCode::Char('h' | '?') => self.view = View::Help,
            KeyCode::Char('Z' | ' ') => self.is_paused = !self.is_paused,
            _ if self.view != View::List => {}
            KeyCode::F(3 | 4) | KeyCode::Char('/' | '\\') => self.view = View::Filter,
            KeyCode::F(6) | KeyCode::Char('>') => self.sort_by_next(1),
            KeyCode::Char('<') => self.sort_by_next(Sort::ALL.len() - 1),
            KeyCode::Char('I') => self.is_reversed = !self.is_reversed,
            KeyCode::Enter => {
                self.opened = self.listed().get(self.selected).map(|shown| key(&shown.channel));
                if self.opened.is_some() {
                    self.view = View::Channel;
                }
            }
            KeyCode::Up | KeyCode::Char('k') => self.selected = self.selected.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => self.move_to(self.selected + 1),
            KeyCode::PageUp => self.selected = self.selected.saturating_sub(10),
            KeyCode::PageDown => self.move_to(self.selected + 10),
            KeyCode::Home => self.selected = 0,
            KeyCode::End => self.move_to(usize::MAX),
            _ => {}
        }
        false
    }

    fn move_to(&mut self, line: usize) {
        self.selected = line.min(self.listed().len().saturating_sub(1));
    }

    fn sort_by_next(&mut self, steps: usize) {
        let at = Sort::ALL.iter().position(|sort| *sort == self.sort).unwrap_or(0);
        self.sort = Sort::ALL[(at + steps) % Sort::ALL.len()];
    }

    fn object(&self) -> serde_json::Value {
        let channel = |shown: &Shown| {
            let Rates { messages, bytes, sleeps, wakes } = shown.past.rates;
            let mut object = json_of(&shown.channel);
            object["per_second"] = json!({ "messages": messages, "bytes": bytes, "sleeps": sleeps, "wakes": wakes });
            object["mean_delay_seconds"] = shown.past.delay.into();
            for (at, delay) in shown.past.delays_of_lanes.iter().enumerate() {
                object["lanes"][at]["mean_delay_seconds"] = (*delay).into();
            }
            object
        };
        json!({ "channels": self.channels.iter().map(channel).collect::<Vec<_>>() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A channel of one lane with messages that wait, and what reads it.
    fn channel(directory: &std::path::Path, messages: usize) -> (Channel, pelton::Receiver) {
        let mut sender = pelton::Options::new().capacity(1 << 16).create_sender(directory).unwrap();
        (0..messages).for_each(|_| sender.send(b"x").unwrap());
        let receiver = pelton::Options::new().create_receiver(directory).unwrap();
        let mut observer = Observer::new();
        observer.add_directory(directory);
        let name = format!("path:{}", directory.display());
        let found = observer.channels().channels.into_iter().find(|channel| channel.name == name);
        (found.unwrap(), receiver)
    }

    #[test]
    fn the_delay_is_what_waited_divided_by_what_is_received_per_second() {
        let directory = tempfile::tempdir().unwrap();
        let (mut channel, mut receiver) = channel(&directory.path().join("queue"), 10);
        let (mut past, start) = (Past::default(), Instant::now());
        past.update(start, &channel);
        assert_eq!((past.delay, &past.delays_of_lanes[..]), (None, &[None][..]));
        (0..5).for_each(|_| drop(receiver.receive().unwrap()));
        channel.lanes[0].reading = channel.lanes[0].read().unwrap();
        past.update(start + RATE_TIME, &channel);
        // 10 messages waited, and then 5; 5 were received in this second.
        assert_eq!((past.delay, &past.delays_of_lanes[..]), (Some(1.5), &[Some(1.5)][..]));
        assert_eq!(past.rates.messages, 5.0);
    }

    #[test]
    fn channels_that_receive_nothing_are_the_last_by_delay() {
        let directory = tempfile::tempdir().unwrap();
        let mut top = Top::new(Observer::new());
        for (name, delay) in [("a", None), ("b", Some(0.001)), ("c", Some(2.0)), ("d", None), ("e", Some(0.0))] {
            let (channel, _receiver) = channel(&directory.path().join(name), 1);
            top.channels.push(Shown { channel, past: Past { delay, ..Past::default() } });
        }
        top.press(KeyCode::Char('>'));
        while top.sort != Sort::Delay {
            top.press(KeyCode::Char('>'));
        }
        let order = |top: &Top| -> String {
            top.listed().iter().map(|shown| shown.channel.name.chars().last().unwrap()).collect()
        };
        assert_eq!(order(&top), "cbead");
        top.press(KeyCode::Char('I'));
        assert_eq!(order(&top), "adebc");
    }
}
