//! The screens of `pelton top`. They fit 80 columns and 24 lines, and use what there is of more. Without colour, the
//! words say all.

use super::{Rates, Shown, Top, View};
use crate::observed::{
    counted, name_cell, name_of, one_line, percent, percent_of, policy_words, rate, receiver, short, short_age,
    short_bytes, short_delay, short_time, side,
};
use pelton::observe::{Activity, Channel, Kind, Reading, State};
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Paragraph, Row, Sparkline, Table, TableState},
};

const KEYS: &str = "F1 Help  F4 Filter  F6 Sort  I Invert  Z Pause  Enter Open  F10 Quit";
const KEYS_OF_CHANNEL: &str = "F1 Help  Z Pause  Esc Back  F10 Quit";
/// Characters of a bar.
const BAR: usize = 6;
/// Characters that a name, or a sender, has before columns are left out for it.
const NAME_MIN: u16 = 12;

/// A column beside the name or the sender: its head and its width.
struct Column(&'static str, u16);

/// Their order, and the order in which a narrow window leaves them out. The name and the state always stay.
const COLUMNS: [Column; 9] = [
    Column("KIND", 8),
    Column("MSG/S", 5),
    Column("   B/S", 6),
    Column("WAITS", 5),
    Column(" DELAY", 6),
    Column("FULL", BAR as u16 + 4),
    Column("SLP/S", 5),
    Column("WAK/S", 5),
    Column("STATE", 16),
];
const LEFT_OUT: [usize; 8] = [6, 7, 2, 4, 0, 5, 3, 1];

/// Which columns fit `width` beside the name, and how many characters they leave for it.
fn fitting(width: u16, first: Option<usize>) -> ([bool; COLUMNS.len()], u16) {
    let mut shown = [true; COLUMNS.len()];
    if let Some(first) = first {
        shown[first] = false;
    }
    let used = |shown: &[bool; COLUMNS.len()]| {
        COLUMNS.iter().zip(shown).filter(|(_, shown)| **shown).map(|(Column(_, width), _)| width + 1).sum::<u16>()
    };
    for column in LEFT_OUT {
        if used(&shown) + NAME_MIN <= width {
            break;
        }
        shown[column] = false;
    }
    (shown, width.saturating_sub(used(&shown)))
}

const HELP: [&str; 18] = [
    "MSG/S, B/S   messages and bytes that the receiver releases per second",
    "WAITS        messages that are sent and not released",
    "DELAY        mean time from sending to release, by Little's law: what waited at the",
    "             updates of the last second, divided by what is received per second; -: none is",
    "FULL         the fullest lane, as a bar and in percent",
    "SLP/S WAK/S  sleeps of both sides, and rings that wake the other, per second",
    "",
    "Up Down PgUp PgDn Home End j k   move the cursor",
    "Enter        open the channel: its lanes and its history; Esc closes it",
    "F4 \\ F3 /    filter by a part of the name; Enter keeps it, Esc clears it (also later)",
    "F6 > <       sort by the next, or the previous, column",
    "I            invert the order",
    "Z Space      pause, and go on",
    "F1 h ?       this text",
    "F10 q        quit",
    "",
    "Nothing of a channel changes, and none is slower for being shown: the numbers",
    "are read from its pages. Replies of a service appear only if they are stuck.",
];

/// Draws the current view.
pub fn draw(top: &Top, frame: &mut Frame<'_>) {
    let [header, body, footer] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(0), Constraint::Length(1)]).areas(frame.area());
    frame.render_widget(Paragraph::new(headline(top)), header);
    let keys = match top.view {
        View::Help => {
            frame.render_widget(Paragraph::new(HELP.map(Line::raw).to_vec()), body);
            "Esc Back  F10 Quit".to_owned()
        }
        View::Channel => {
            match top.opened() {
                Some(shown) => draw_channel(top, shown, frame, body),
                None => frame.render_widget(Paragraph::new("The channel is gone."), body),
            }
            KEYS_OF_CHANNEL.to_owned()
        }
        View::List => {
            draw_list(top, frame, body);
            KEYS.to_owned()
        }
        View::Filter => {
            draw_list(top, frame, body);
            format!("Filter: {}_   Enter Keep  Esc Clear", one_line(&top.filter))
        }
    };
    frame.render_widget(Paragraph::new(keys).style(Style::new().add_modifier(Modifier::REVERSED)), footer);
}

fn headline(top: &Top) -> String {
    let listed = top.listed();
    let mut all = Rates::default();
    top.channels.iter().for_each(|shown| all.add(shown.past.rates));
    let mut text = format!(
        "pelton: {}, {}/s, {}B/s; by {}{}",
        counted(listed.len() as u64, "channel"),
        rate(all.messages),
        short_bytes(all.bytes as u64),
        top.sort.word(),
        if top.is_reversed { ", inverted" } else { "" }
    );
    if !top.filter.is_empty() && top.view != View::Filter {
        text += &format!("; only *{}*", one_line(&top.filter));
    }
    if top.unreadable > 0 {
        text += &format!("; {} unreadable, see `pelton ls`", top.unreadable);
    }
    if top.is_paused {
        text += "; PAUSED";
    }
    text
}

fn draw_list(top: &Top, frame: &mut Frame<'_>, area: Rect) {
    let (shown, width) = fitting(area.width, None);
    let rows = top.listed().into_iter().map(|Shown { channel, past }| {
        let rates = past.rates;
        let cells = [
            Line::raw(channel.kind.word()),
            right(rate(rates.messages)),
            right(short_bytes(rates.bytes as u64)),
            right(short(channel.waiting_messages())),
            right(delay(past.delay)),
            Line::raw(bar(percent(channel))),
            right(rate(rates.sleeps)),
            right(rate(rates.wakes)),
            Line::from(Span::styled(channel.state().words(), colour(top, channel.state()))),
        ];
        // Of a broadcast there are several, for which the subscribers are the difference.
        let name = match channel.kind {
            Kind::Broadcast => format!("{} {}", name_of(channel), receiver(channel)),
            _ => name_of(channel),
        };
        (Line::raw(name_cell(&name, width.into())), cells)
    });
    let table = table("NAME", width, shown, rows).row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut state = TableState::new().with_selected(Some(top.selected));
    frame.render_stateful_widget(table, area, &mut state);
}

/// A table of the columns that are shown.
fn table<'a>(
    first: &'static str,
    width: u16,
    shown: [bool; COLUMNS.len()],
    rows: impl Iterator<Item = (Line<'a>, [Line<'a>; COLUMNS.len()])>,
) -> Table<'a> {
    let columns = || COLUMNS.iter().zip(shown).filter(|(_, shown)| *shown).map(|(column, _)| column);
    let rows = rows.map(|(first, cells)| {
        let cells = cells.into_iter().zip(shown).filter(|(_, shown)| *shown).map(|(cell, _)| cell);
        Row::new([first].into_iter().chain(cells))
    });
    let widths = [width].into_iter().chain(columns().map(|Column(_, width)| *width)).map(Constraint::Length);
    let head = [first].into_iter().chain(columns().map(|Column(head, _)| *head));
    Table::new(rows, widths).header(Row::new(head).style(Style::new().add_modifier(Modifier::REVERSED)))
}

fn draw_channel(top: &Top, Shown { channel, past }: &Shown, frame: &mut Frame<'_>, area: Rect) {
    let rates = past.rates;
    let [facts, history, lanes] =
        Layout::vertical([Constraint::Length(6), Constraint::Length(5), Constraint::Min(0)]).areas(area);
    let stopped = match channel.receiver.stopped_for {
        Some(time) => format!(", stopped for {}", short_time(time)),
        None if channel.receiver.activity == Activity::Stopped => ", stopped".to_owned(),
        None => String::new(),
    };
    let text = vec![
        Line::from(vec![
            Span::styled(name_of(channel), Style::new().add_modifier(Modifier::BOLD)),
            Span::raw(format!(", {}, {} old: ", channel.kind.word(), short_age(channel))),
            Span::styled(channel.state().words(), colour(top, channel.state())),
        ]),
        Line::raw(format!("receiver {}{stopped}{}", receiver(channel), subscription(channel))),
        Line::raw(format!(
            "waiting  {} messages, {} of {}; a message waits about {}",
            short(channel.waiting_messages()),
            short_bytes(channel.waiting_bytes()),
            short_bytes(channel.capacity()),
            past.delay.map_or("? (none is received)".to_owned(), short_delay)
        )),
        Line::raw(format!("so far   {} messages, {} bytes", short(channel.messages()), short_bytes(channel.bytes()))),
        Line::raw(format!(
            "now      {} messages/s, {}B/s, {} sleeps/s, {} wakes/s",
            rate(rates.messages),
            short_bytes(rates.bytes as u64),
            rate(rates.sleeps),
            rate(rates.wakes)
        )),
    ];
    frame.render_widget(Paragraph::new(text), facts);
    let all: Vec<u64> = past.history.iter().copied().collect();
    let shown = &all[all.len().saturating_sub(history.width.into())..];
    let [title, line] = Layout::vertical([Constraint::Length(1), Constraint::Length(4)]).areas(history);
    let most = shown.iter().max().copied().unwrap_or(0);
    frame.render_widget(Paragraph::new(format!("messages/s, at most {} here", short(most))), title);
    frame.render_widget(Sparkline::default().data(shown.iter().copied()), line);
    // All lanes are of the channel's kind.
    let (shown, width) = fitting(lanes.width, Some(0));
    let rows = channel.lanes.iter().map(|lane| {
        let rates = past.rates_of_lanes.get(lane.number as usize).copied().unwrap_or_default();
        let state = match lane.sender.activity {
            _ if lane.is_full() => State::Full.words(),
            Activity::Stopped => State::SenderStopped.words(),
            Activity::Died => State::SenderDied.words(),
            Activity::Alive => State::Ok.words(),
            _ => "",
        };
        let cells = [
            Line::default(),
            right(rate(rates.messages)),
            right(short_bytes(rates.bytes as u64)),
            right(short(lane.reading.waiting_messages)),
            right(delay(past.delays_of_lanes.get(lane.number as usize).copied().flatten())),
            Line::raw(bar(percent_of(&lane.reading))),
            right(rate(rates.sleeps)),
            right(rate(rates.wakes)),
            Line::raw(state),
        ];
        (Line::raw(format!("{:>4} {}", lane.number, side(&lane.sender))), cells)
    });
    frame.render_widget(table("LANE SENDER", width, shown, rows), lanes);
}

/// The policy of a subscriber, what it has missed, and whether the publisher waits for it.
fn subscription(channel: &Channel) -> String {
    let Some(Reading { policy: Some(policy), lag_after, missed, is_sender_waiting, .. }) =
        channel.lanes.first().map(|lane| &lane.reading)
    else {
        return String::new();
    };
    let holds = if *is_sender_waiting { "; it holds the publisher up" } else { "" };
    format!("; {}, missed {}{holds}", policy_words(*policy, *lag_after), short(*missed))
}

fn delay(seconds: Option<f64>) -> String {
    seconds.map_or("-".to_owned(), short_delay)
}

fn right(text: String) -> Line<'static> {
    Line::raw(text).right_aligned()
}

/// A bar and the number, which says the same.
fn bar(percent: u64) -> String {
    let full = (percent as usize * BAR).div_ceil(100).min(BAR);
    format!("{}{}{percent:>3}%", "|".repeat(full), " ".repeat(BAR - full))
}

fn colour(top: &Top, state: State) -> Style {
    match state {
        _ if !top.has_colour => Style::new(),
        State::Ok | State::Idle => Style::new(),
        State::Full | State::SenderStopped => Style::new().fg(Color::Yellow),
        _ => Style::new().fg(Color::Red),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_narrow_window_keeps_the_name_and_the_state() {
        let heads = |width| {
            let (shown, left) = fitting(width, None);
            let heads = COLUMNS.iter().zip(shown).filter(|(_, shown)| *shown).map(|(Column(head, _), _)| head.trim());
            (heads.collect::<Vec<_>>(), left)
        };
        assert_eq!(heads(87).0.len(), COLUMNS.len(), "87 columns are enough for all");
        assert_eq!(heads(80), (vec!["KIND", "MSG/S", "B/S", "WAITS", "DELAY", "FULL", "STATE"], 17));
        assert_eq!(heads(70).0, ["KIND", "MSG/S", "WAITS", "DELAY", "FULL", "STATE"]);
        assert_eq!(heads(52).0, ["MSG/S", "WAITS", "FULL", "STATE"]);
        assert_eq!(heads(29), (vec!["STATE"], 12));
        // Never wider than the window.
        for width in 0..200 {
            let (heads, left) = heads(width);
            assert_eq!(heads.last(), Some(&"STATE"));
            assert!(width < 17 || left >= 1.min(width - 17), "{width}: {left}");
        }
    }
}
