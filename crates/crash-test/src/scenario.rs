//! A scenario: one channel, and the choices of a seed for it.

use super::{
    message::{self, Random, mix},
    plan::{Transport, WaitMode},
};

/// The combination of the scenario `index`: each one once per round, in an order from the seed.
pub fn in_turn(seed: u64, index: u64, combinations: u64) -> u64 {
    let mut order: Vec<u64> = (0..combinations).collect();
    let mut shuffle = Random::new(seed ^ mix(index / combinations + 1));
    for last in (1..order.len()).rev() {
        order.swap(last, shuffle.below(last as u64 + 1) as usize);
    }
    order[(index % combinations) as usize]
}

/// The victims of a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victims {
    Sender,
    Receiver,
    /// One of them at each kill.
    Either,
    /// Both together.
    Both,
}

/// One channel, and the choices of a seed for it.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub index: u64,
    pub seed: u64,
    pub transport: Transport,
    pub victims: Victims,
    /// By connect: whether the sender listens.
    pub sender_listens: bool,
    pub sender_wait_mode: WaitMode,
    pub receiver_wait_mode: WaitMode,
    pub capacity: u64,
    pub bytes_min: u64,
    pub bytes_max: u64,
    /// After this number of messages, a pause of this number of microseconds.
    pub sender_pause: (u64, u64),
    pub receiver_pause: (u64, u64),
    /// The number of kills; both sides together count as one.
    pub kills: u64,
    /// Whether the last victim has no successor.
    pub ends_without_successor: bool,
}

impl Scenario {
    /// Victims, transport, listening side and wait mode of the survivor: each combination once per round.
    pub const COMBINATIONS: u64 = 24;

    pub fn of(seed: u64, index: u64, combination: u64, kills: u64) -> Scenario {
        let mut random = Random::new(seed ^ mix(!index));
        let wait_mode = [WaitMode::Block, WaitMode::Spin, WaitMode::Poll];
        let survivor_wait_mode = wait_mode[(combination % 3) as usize];
        let victim_wait_mode = random.one_of(&wait_mode);
        let (transport, victims, sender_listens) = match combination / 3 {
            0 => (Transport::Connect, Victims::Sender, true),
            1 => (Transport::Connect, Victims::Sender, false),
            2 => (Transport::Connect, Victims::Receiver, true),
            3 => (Transport::Connect, Victims::Receiver, false),
            4 => (Transport::Path, Victims::Sender, false),
            5 => (Transport::Path, Victims::Receiver, false),
            6 => (Transport::Path, Victims::Either, false),
            _ => (Transport::Path, Victims::Both, false),
        };
        let (sender_wait_mode, receiver_wait_mode) = match victims {
            Victims::Receiver => (survivor_wait_mode, victim_wait_mode),
            _ => (victim_wait_mode, survivor_wait_mode),
        };
        // Small lanes are often full and wrap often; large ones have a growing window.
        let capacity = random.one_of(&[64 << 10, 64 << 10, 128 << 10, 1 << 20, 8 << 20]);
        let bytes_max = random.one_of(&[0, 15, 64, 1000, 5000, capacity / 2 - 32]).min(1 << 20);
        // Pauses of the sender and of the receiver. None; a receiver that sleeps often; a sender that finds the lane
        // full.
        let (sender_pause, receiver_pause) = random.one_of(&[
            ((0, 0), (0, 0)),
            ((8, 200), (0, 0)),
            ((100, 2000), (0, 0)),
            ((0, 0), (16, 300)),
            ((0, 0), (100, 2000)),
            ((50, 500), (50, 500)),
        ]);
        let ends_without_successor = transport == Transport::Connect && random.one_in(3);
        let kills = if victims == Victims::Both { (kills / 2).max(1) } else { kills };
        Scenario {
            index,
            seed,
            transport,
            victims,
            sender_listens,
            sender_wait_mode,
            receiver_wait_mode,
            capacity,
            bytes_min: 0,
            bytes_max,
            sender_pause,
            receiver_pause,
            kills,
            ends_without_successor,
        }
    }

    /// Restricts the scenario to the abilities of any channel: every message has space for its number, and none is very
    /// large. The transport is `Path` only: the sides restore their channel after a kill.
    pub fn restrict_to_any_channel(&mut self) {
        self.transport = Transport::Path;
        self.bytes_min = message::HEADER_BYTES as u64;
        self.bytes_max = self.bytes_max.clamp(self.bytes_min, 20_000);
        self.capacity = self.capacity.max(64 << 10);
        self.ends_without_successor = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_seed_determines_the_scenarios_and_each_round_has_every_combination() {
        let all = |seed| -> Vec<String> {
            let of = |index| Scenario::of(seed, index, in_turn(seed, index, Scenario::COMBINATIONS), 5);
            (0..Scenario::COMBINATIONS).map(|index| format!("{:?}", of(index))).collect()
        };
        assert_eq!(all(1), all(1));
        assert_ne!(all(1), all(2));
        let kinds: BTreeSet<String> = (0..Scenario::COMBINATIONS)
            .map(|index| {
                let Scenario { transport, victims, sender_listens, sender_wait_mode, receiver_wait_mode, .. } =
                    Scenario::of(3, index, in_turn(3, index, Scenario::COMBINATIONS), 5);
                let wait_mode = if victims == Victims::Receiver { sender_wait_mode } else { receiver_wait_mode };
                format!("{transport:?} {victims:?} {sender_listens} {wait_mode:?}")
            })
            .collect();
        assert_eq!(kinds.len() as u64, Scenario::COMBINATIONS);
    }
}
