//! Scenarios of a broadcast: a publisher, and subscribers of all policies, by connect or by path. They join, leave, are
//! stopped and are killed, and each victim has a successor. A subscriber itself checks that it receives each message of
//! its publisher once and in order, or learns how many it has missed. The test compares processes: what a dead
//! publisher has committed with the end that its subscribers found, where its successor in a directory goes on, and
//! where the next process of a durable subscription does.

use super::{
    CrashTest, DONE, Host, Side, Stop, Word,
    broadcast_side::LEAVE,
    ledger::{Fault, FaultKind, JournalEntries},
    message::{HEADER_BYTES, Random, Sizes, mix},
    plan::{BroadcastPlan, Plan, Role, StartAt, SubscriberPolicy, Transport, WaitMode},
    remove_channel,
    resources::{Resources, growth},
};
use pelton_cli::failure::Failure;
use rustix::process::Signal;
use std::{fs, time::Duration};

/// The choices of a seed for a scenario.
#[derive(Clone, Debug)]
pub struct Scenario {
    index: u64,
    seed: u64,
    transport: Transport,
    /// The publisher is among the victims. Otherwise it outlives all deaths.
    publisher_dies: bool,
    /// The number of subscribers at a time.
    subscribers: usize,
    publisher_wait_mode: WaitMode,
    subscriber_wait_mode: WaitMode,
    capacity: u64,
    bytes_max: u64,
    publisher_pause: (u64, u64),
    history: u64,
    /// No subscriber gates: the publisher passes each that pauses, again and again.
    passes_all: bool,
    kills: u64,
}

impl Scenario {
    /// Transport, victims and wait mode: each combination once per round.
    pub const COMBINATIONS: u64 = 8;

    pub fn of(seed: u64, index: u64, combination: u64, kills: u64) -> Scenario {
        let mut random = Random::new(seed ^ mix(!index));
        let capacity = random.one_of(&[64 << 10, 64 << 10, 256 << 10, 1 << 20]);
        let passes_all = random.one_in(3);
        // With few messages in the lane, the publisher is often about to overwrite what a subscriber copies.
        let bytes_max = match passes_all {
            true => random.one_of(&[300, capacity / 8, capacity / 8]),
            false => random.one_of(&[HEADER_BYTES as u64, 64, 300, 2000, capacity / 8]),
        };
        Scenario {
            index,
            seed,
            transport: [Transport::Connect, Transport::Path][(combination % 2) as usize],
            publisher_dies: (combination / 2).is_multiple_of(2),
            subscribers: random.one_of(&[2, 4, 8, 8, 30]),
            publisher_wait_mode: [WaitMode::Block, WaitMode::Poll][(combination / 4) as usize],
            subscriber_wait_mode: random.one_of(&[WaitMode::Block, WaitMode::Poll]),
            capacity,
            bytes_max: bytes_max.min(32 << 10),
            publisher_pause: random.one_of(&[(0, 0), (8, 200), (100, 2000)]),
            history: random.one_of(&[0, 1, 20, 1000]),
            passes_all,
            kills,
        }
    }
}

/// A subscriber's place in the scenario: its processes follow one another.
struct Seat {
    side: Side,
    is_stopped: bool,
    /// Of a durable subscription: up to where its dead processes have released messages, at least and at most.
    released: Option<(u64, u64)>,
}

impl Seat {
    fn part(&self) -> &BroadcastPlan {
        self.side.plan.broadcast.as_ref().expect("the scenario is a broadcast")
    }

    /// Whether it has received a message of the publisher with this number, and knows of no later death.
    fn is_connected_to(&self, publisher: u64) -> bool {
        let side = &self.side;
        side.is_ready() && side.get(Word::Connections) > side.get(Word::Detections) && side.get(Word::Peer) == publisher
    }
}

/// The live processes.
struct Processes {
    publisher: Side,
    seats: Vec<Seat>,
}

impl Processes {
    fn sides(&self) -> Vec<&Side> {
        self.seats.iter().map(|seat| &seat.side).chain([&self.publisher]).collect()
    }

    /// Those that are not stopped are connected to the publisher.
    fn are_connected(&self) -> bool {
        let publisher = number(&self.publisher);
        self.publisher.is_ready() && self.seats.iter().all(|seat| seat.is_stopped || seat.is_connected_to(publisher))
    }

    fn continue_stopped(&mut self) {
        for seat in self.seats.iter_mut().filter(|seat| seat.is_stopped) {
            seat.side.signal(Signal::CONT);
            seat.is_stopped = false;
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        self.sides().iter().for_each(|side| side.kill());
        self.sides().iter().for_each(|side| side.await_death());
    }
}

/// The number of a publisher.
fn number(publisher: &Side) -> u64 {
    publisher.plan.broadcast.as_ref().expect("the scenario is a broadcast").publisher
}

/// A fault, if a number is not within its bounds: below them messages are lost, or come again above.
fn check_within(
    what: &str,
    found: u64,
    (least, most): (u64, u64),
    above: FaultKind,
    below: FaultKind,
) -> Option<Fault> {
    let text = format!("{what}: {found}, wanted {least} to {most}");
    match found {
        _ if found < least => Some(Fault::new(below, least - found, text)),
        _ if found > most => Some(Fault::new(above, found - most, text)),
        _ => None,
    }
}

/// A running scenario.
pub struct Run<'a> {
    test: &'a mut CrashTest,
    scenario: &'a Scenario,
    pub faults: Vec<Fault>,
    resources: Vec<Resources>,
    /// Number of processes started so far, and of publishers.
    started: u64,
    publishers: u64,
    /// In a directory: up to where dead publishers have committed messages, at least and at most.
    committed: Option<(u64, u64)>,
}

impl<'a> Run<'a> {
    pub fn new(test: &'a mut CrashTest, scenario: &'a Scenario) -> Run<'a> {
        let (faults, resources) = (Vec::new(), Vec::new());
        Run { test, scenario, faults, resources, started: 0, publishers: 0, committed: None }
    }

    pub fn run(&mut self, host: &mut Host) -> Result<(), Stop> {
        let scenario = self.scenario;
        let mut random = Random::new(scenario.seed ^ mix(scenario.index ^ 0x7075));
        let mut processes = Processes { publisher: self.start_publisher(host)?, seats: Vec::new() };
        for number in 0..scenario.subscribers {
            let part = self.part(number, &mut random);
            let side = self.start(host, Role::Receive, part)?;
            processes.seats.push(Seat { side, is_stopped: false, released: None });
        }
        for _ in 0..scenario.kills {
            self.test.signals.check()?;
            if random.one_in(2) {
                processes.continue_stopped();
            }
            let at = random.below(scenario.subscribers as u64) as usize;
            // Some victims die while they start, most while they work.
            if random.one_in(4) {
                std::thread::sleep(Duration::from_micros(random.below(3000)));
            } else {
                processes.continue_stopped();
                self.wait(&processes, "all sides to connect", Processes::are_connected)?;
                if random.one_in(3) {
                    let seat = &mut processes.seats[random.below(scenario.subscribers as u64) as usize];
                    seat.side.signal(Signal::STOP);
                    seat.is_stopped = true;
                }
                std::thread::sleep(
                    Duration::from_micros(20 << random.below(10)) + Duration::from_micros(random.below(100)),
                );
                processes.sides().iter().for_each(|side| self.test.side_files.extend(side.files()));
                if !scenario.publisher_dies {
                    self.resources.push(processes.publisher.resources());
                    let most = self.resources.len().saturating_sub(1) as u64;
                    self.test.report.deaths_outlived_most = self.test.report.deaths_outlived_most.max(most);
                }
            }
            if scenario.publisher_dies && random.one_in(3) {
                self.kill_publisher(&processes, random.one_in(2))?;
                processes.publisher = self.start_publisher(host)?;
                continue;
            }
            if random.one_in(6) {
                // Each message must reach it, so nobody may hold the publisher up.
                processes.continue_stopped();
                self.leave(&processes, at)?;
            } else {
                let victim = &processes.seats[at].side;
                self.test.check_side(victim)?;
                victim.kill();
                victim.await_death();
                self.test.count(victim);
            }
            self.end_of_subscriber(&mut processes.seats[at]);
            let part = match processes.seats[at].part() {
                part if part.durable.is_some() => part.clone(),
                _ => self.part(at, &mut random),
            };
            processes.seats[at].side = self.start(host, Role::Receive, part)?;
            processes.seats[at].is_stopped = false;
        }
        self.end(&mut processes)
    }

    /// A subscriber at this seat. In a directory, every second seat is a durable subscription.
    fn part(&self, number: usize, random: &mut Random) -> BroadcastPlan {
        let durable = self.scenario.transport == Transport::Path && number.is_multiple_of(2);
        let (gate, until, lag) = (SubscriberPolicy::Gate, SubscriberPolicy::GateUntil, SubscriberPolicy::Lag);
        let latest = if durable { lag } else { SubscriberPolicy::Latest };
        let policy = match self.scenario.passes_all {
            true => random.one_of(&[lag, lag, latest]),
            false => random.one_of(&[gate, gate, until, lag, latest]),
        };
        let last = StartAt::Last(random.below(40));
        BroadcastPlan {
            publisher: self.publishers,
            history: self.scenario.history,
            policy,
            start: random.one_of(&[StartAt::Now, StartAt::Oldest, last]),
            durable: durable.then(|| format!("seat{number}")),
        }
    }

    fn start_publisher(&mut self, host: &mut Host) -> Result<Side, Failure> {
        self.publishers += 1;
        // Of a subscriber's choices it needs none.
        let part = BroadcastPlan {
            publisher: self.publishers,
            history: self.scenario.history,
            policy: SubscriberPolicy::Gate,
            start: StartAt::Now,
            durable: None,
        };
        self.start(host, Role::Send, part)
    }

    fn start(&mut self, host: &mut Host, role: Role, part: BroadcastPlan) -> Result<Side, Failure> {
        let scenario = self.scenario;
        self.started += 1;
        let choices_seed = mix(scenario.seed ^ scenario.index ^ self.started << 32) >> 1;
        let pauses = [(0, 0), (16, 300), (100, 2000), (1, 100)];
        let (pause_every, pause_us) = match role {
            Role::Send => scenario.publisher_pause,
            Role::Receive => Random::new(choices_seed).one_of(&pauses),
        };
        host.side(Plan {
            role,
            directory: self.test.directory(),
            journal: self.test.root.path().join("journals").join(self.started.to_string()),
            sizes: Sizes {
                seed: mix(scenario.seed ^ scenario.index) >> 1,
                bytes_min: HEADER_BYTES as u64,
                bytes_max: scenario.bytes_max,
            },
            capacity: scenario.capacity,
            pause_every,
            pause_us,
            next: 1,
            choices_seed,
            transport: scenario.transport,
            listens: role == Role::Send,
            wait_mode: match role {
                Role::Send => scenario.publisher_wait_mode,
                Role::Receive => scenario.subscriber_wait_mode,
            },
            delivered: 0,
            many_senders: None,
            broadcast: Some(part),
        })
    }

    fn wait(&self, processes: &Processes, what: &str, is_so: impl Fn(&Processes) -> bool) -> Result<(), Stop> {
        let mut watch = self.test.watch_progress(&processes.sides());
        while !is_so(processes) {
            self.test.wait_step(&mut watch, &processes.sides(), what, self.scenario.transport)?;
        }
        Ok(())
    }

    /// `await_detection`: waits until the subscribers have found its last message, and checks which one that was.
    fn kill_publisher(&mut self, processes: &Processes, await_detection: bool) -> Result<(), Stop> {
        let victim = &processes.publisher;
        self.test.check_side(victim)?;
        // Before the kill: these detect the death.
        let is_connected = |seat: &&Seat| !seat.is_stopped && seat.is_connected_to(number(victim));
        let survivors: Vec<(&Side, u64)> = (processes.seats.iter().filter(is_connected))
            .map(|seat| (&seat.side, seat.side.get(Word::Detections)))
            .collect();
        victim.kill();
        victim.await_death();
        self.test.count(victim);
        let committed = (victim.get(Word::Done), victim.get(Word::Pending));
        if await_detection {
            self.wait(processes, "the subscribers to detect the death", |_| {
                survivors.iter().all(|(side, before)| side.get(Word::Detections) > *before)
            })?;
            for (side, _) in survivors {
                let (what, last) = ("the last message of a dead publisher", side.get(Word::CountAtDetection));
                self.faults.extend(check_within(what, last, committed, FaultKind::Garbage, FaultKind::Lost));
            }
        }
        self.end_of_publisher(victim);
        Ok(())
    }

    /// Ends a subscriber in order.
    fn leave(&mut self, processes: &Processes, at: usize) -> Result<(), Stop> {
        processes.seats[at].side.journal.set(Word::Stop, LEAVE);
        self.wait(processes, "a subscriber to leave", |processes| processes.seats[at].side.get(Word::State) == DONE)?;
        processes.seats[at].side.await_death();
        self.test.tally(&processes.seats[at].side);
        Ok(())
    }

    fn end_of_publisher(&mut self, side: &Side) {
        let first = side.get(Word::First);
        if first > 0 {
            let before = if self.scenario.transport == Transport::Path { self.committed } else { None };
            let before = before.unwrap_or((0, 0));
            let what = "a publisher continues after the message";
            self.faults.extend(check_within(what, first - 1, before, FaultKind::Garbage, FaultKind::Lost));
            self.committed = Some((side.get(Word::Done), side.get(Word::Pending)));
        }
        self.end_of_side(side);
    }

    fn end_of_subscriber(&mut self, seat: &mut Seat) {
        let (side, part) = (&seat.side, seat.part());
        let first = side.get(Word::First);
        if first > 0
            && let Some(name) = &part.durable
        {
            if let Some(before) = seat.released {
                let what = format!("{name}, {:?}, continues after the message", part.policy);
                self.faults.extend(check_within(&what, first - 1, before, FaultKind::Lost, FaultKind::Duplicate));
            }
            seat.released = Some((side.get(Word::Done), side.get(Word::Pending)));
        }
        self.end_of_side(side);
    }

    /// Adds the faults in the journal of a side that is dead or done.
    fn end_of_side(&mut self, side: &Side) {
        let entries = JournalEntries::of(&side.journal);
        for (kind, count, text) in [
            (FaultKind::Garbage, entries.garbage, entries.text.clone()),
            (FaultKind::Lost, entries.jumps_count, format!("expected and received: {:?}", entries.jumps)),
        ] {
            if count > 0 {
                let text = format!("{text}; {:?}", side.plan.broadcast);
                self.faults.push(Fault::new(kind, count, text));
            }
        }
        // Still mapped where needed.
        let _ = fs::remove_file(&side.plan.journal);
    }

    /// Ends all processes in order, the subscribers after the last message.
    fn end(&mut self, processes: &mut Processes) -> Result<(), Stop> {
        processes.continue_stopped();
        self.wait(processes, "all sides to connect", |processes| {
            processes.are_connected() && processes.publisher.get(Word::Done) > 0
        })?;
        processes.publisher.journal.set(Word::Stop, 1);
        self.wait(processes, "the publisher to end", |processes| processes.publisher.get(Word::State) == DONE)?;
        let end = processes.publisher.get(Word::Done) + 1;
        processes.seats.iter().for_each(|seat| seat.side.journal.set(Word::Stop, end));
        self.wait(processes, "the subscribers to end", |processes| {
            processes.seats.iter().all(|seat| seat.side.get(Word::State) == DONE)
        })?;
        for seat in &mut processes.seats {
            seat.side.await_death();
            self.test.tally(&seat.side);
            self.end_of_subscriber(seat);
        }
        processes.publisher.await_death();
        self.end_of_publisher(&processes.publisher);
        self.faults.extend(growth(&self.resources));
        if self.scenario.transport == Transport::Path {
            self.remove();
        }
        Ok(())
    }

    /// Removes the directory, in which no durable subscription has anything left to receive.
    fn remove(&mut self) {
        let channel = self.test.directory().join("c");
        match pelton::inspect::broadcast(&channel) {
            Ok(info) if info.subscriptions.iter().all(|one| one.behind == 0 && !one.is_alive) => {}
            found => self.faults.push(Fault::new(FaultKind::Miscounted, 1, format_args!("at the end: {found:?}"))),
        }
        self.faults.extend(remove_channel(&channel));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_outside_its_bounds_is_a_fault() {
        let check = |found| {
            let fault = check_within("it", found, (10, 14), FaultKind::Garbage, FaultKind::Lost);
            fault.map(|fault| (fault.kind, fault.count))
        };
        assert_eq!([check(10), check(14)], [None, None]);
        assert_eq!((check(7), check(15)), (Some((FaultKind::Lost, 3)), Some((FaultKind::Garbage, 1))));
    }
}
