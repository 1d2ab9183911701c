//! One channel and what happens to it: all that a seed decides.

use super::{
    message::{self, Dice, mix},
    side::{By, Waits},
};

/// Which of so many combinations the scenario of this index has: each once before any comes again, in an order that the seed gives.
pub fn in_turn(seed: u64, index: u64, combinations: u64) -> u64 {
    let mut order: Vec<u64> = (0..combinations).collect();
    let mut shuffle = Dice::new(seed ^ mix(index / combinations + 1));
    for place in (1..order.len()).rev() {
        order.swap(place, shuffle.below(place as u64 + 1) as usize);
    }
    order[(index % combinations) as usize]
}

/// Who is killed in a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victims {
    Sender,
    Receiver,
    /// Now one, now the other.
    Either,
    /// Both at once.
    Both,
}

/// One channel and what happens to it: all that a seed decides.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub index: u64,
    pub seed: u64,
    pub by: By,
    pub victims: Victims,
    /// By connect: the sender listens.
    pub sender_listens: bool,
    pub sender_waits: Waits,
    pub receiver_waits: Waits,
    pub capacity: u64,
    pub bytes_min: u64,
    pub bytes_max: u64,
    /// After so many messages, a pause of so many microseconds.
    pub sender_pause: (u64, u64),
    pub receiver_pause: (u64, u64),
    /// How often somebody is killed; both at once count as one here.
    pub kills: u64,
    /// The last victim has no successor.
    pub ends_alone: bool,
}

impl Scenario {
    /// Who is killed, by what, who listens, how the survivor waits: each once before any comes again.
    pub const COMBINATIONS: u64 = 24;

    pub fn of(seed: u64, index: u64, combination: u64, kills: u64) -> Scenario {
        let mut dice = Dice::new(seed ^ mix(!index));
        let waits = [Waits::Block, Waits::Spin, Waits::Poll];
        let waits_here = waits[(combination % 3) as usize];
        let waits_there = dice.one_of(&waits);
        let (by, victims, sender_listens) = match combination / 3 {
            0 => (By::Connect, Victims::Sender, true),
            1 => (By::Connect, Victims::Sender, false),
            2 => (By::Connect, Victims::Receiver, true),
            3 => (By::Connect, Victims::Receiver, false),
            4 => (By::Path, Victims::Sender, false),
            5 => (By::Path, Victims::Receiver, false),
            6 => (By::Path, Victims::Either, false),
            _ => (By::Path, Victims::Both, false),
        };
        let (sender_waits, receiver_waits) = match victims {
            Victims::Receiver => (waits_here, waits_there),
            _ => (waits_there, waits_here),
        };
        // Small ones are full at once and wrap all the time; large ones stretch.
        let capacity = dice.one_of(&[64 << 10, 64 << 10, 128 << 10, 1 << 20, 8 << 20]);
        let bytes_max = dice.one_of(&[0, 15, 64, 1000, 5000, capacity / 2 - 32]).min(1 << 20);
        // As fast as it goes; a receiver that sleeps often; a sender that finds the lane full.
        let (sender_pause, receiver_pause) = dice.one_of(&[
            ((0, 0), (0, 0)),
            ((8, 200), (0, 0)),
            ((100, 2000), (0, 0)),
            ((0, 0), (16, 300)),
            ((0, 0), (100, 2000)),
            ((50, 500), (50, 500)),
        ]);
        let ends_alone = by == By::Connect && dice.one_in(3);
        let kills = if victims == Victims::Both { (kills / 2).max(1) } else { kills };
        Scenario {
            index,
            seed,
            by,
            victims,
            sender_listens,
            sender_waits,
            receiver_waits,
            capacity,
            bytes_min: 0,
            bytes_max,
            sender_pause,
            receiver_pause,
            kills,
            ends_alone,
        }
    }

    /// What any channel can do: every message has room for its number, and none is very large; a channel is not restored by more
    /// than the program itself does, so that both kinds of channel are one.
    pub fn against(&mut self) {
        self.by = By::Path;
        self.bytes_min = message::HEADER_BYTES as u64;
        self.bytes_max = self.bytes_max.clamp(self.bytes_min, 20_000);
        self.capacity = self.capacity.max(64 << 10);
        self.ends_alone = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_seed_decides_the_scenarios_and_each_combination_comes_once_a_round() {
        let all = |seed| -> Vec<String> {
            let of = |index| Scenario::of(seed, index, in_turn(seed, index, Scenario::COMBINATIONS), 5);
            (0..Scenario::COMBINATIONS).map(|index| format!("{:?}", of(index))).collect()
        };
        assert_eq!(all(1), all(1));
        assert_ne!(all(1), all(2));
        let kinds: BTreeSet<String> = (0..Scenario::COMBINATIONS)
            .map(|index| {
                let Scenario { by, victims, sender_listens, sender_waits, receiver_waits, .. } =
                    Scenario::of(3, index, in_turn(3, index, Scenario::COMBINATIONS), 5);
                let waits = if victims == Victims::Receiver { sender_waits } else { receiver_waits };
                format!("{by:?} {victims:?} {sender_listens} {waits:?}")
            })
            .collect();
        assert_eq!(kinds.len() as u64, Scenario::COMBINATIONS);
    }
}
