//! Receivers that attach, release, wait, flush and close.

use super::*;
use pelton::{LaneId, RecordReader};

/// A receiver's successor starts at the oldest unreleased message, and both sides continue.
#[track_caller]
fn received_by_another(run: &Run, sending: &mut Sending, released: u64) {
    let seen = shared().seen.load(SeqCst);
    let mut receiving = Receiving::new(opened().open_receiver(run.path()).unwrap(), sending.bytes);
    // Then a message waits.
    if sending.sender.unreleased() == 0 {
        sending.send(1);
    }
    receiving.begins(released, seen, sending.next);
    for _ in 0..3 {
        sending.send(1);
        receiving.read(1);
    }
    sending.drained();
    drop(receiving);
    run.only_the_channel_is_left(1);
}

impl Receiving {
    /// Takes everything up to `end`, starting at an unreleased message.
    #[track_caller]
    pub fn begins(&mut self, released: u64, seen: u64, end: u64) -> u64 {
        let mut first = None;
        loop {
            let mut message = self.receiver.receive_until(deadline()).unwrap().expect("a message was sent");
            take_descriptors(&mut message);
            let number = u64::from_le_bytes(message[..8].try_into().unwrap());
            check(number, Sizes::Fixed(self.bytes), &message, &mut Vec::new());
            let from = *first.get_or_insert_with(|| {
                assert!((released..=seen.max(released)).contains(&number), "{released}, {seen}: begins at {number}");
                self.next[0] = number;
                number
            });
            assert_eq!(number, self.next[0], "a message was lost");
            assert!(number >= seen || message.is_redelivered(), "message {number} came twice");
            self.next[0] += 1;
            if self.next[0] == end {
                return from;
            }
        }
    }
}

pub fn receiver_attaches(run: &Run, before: u64) {
    let path = run.path();
    let mut sending = Sending::new(with_capacity(SMALL).create_sender(&path).unwrap(), 100);
    sending.send(before);
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        opened().open_receiver(&path).unwrap()
    });
    run.finish(victim, || {
        sending.expect_no_death();
        if shared().claimed.load(SeqCst) {
            is_taken(opened().open_receiver(run.path()));
        }
    });
    sending.send(1);
    received_by_another(run, &mut sending, 0);
    assert!(sending.ends.len() <= 1, "reported once: {:?}", sending.ends);
}

/// A receiver that arms, wakes for a message, takes it, and arms again.
pub fn receiver_arms(run: &Run) {
    let path = run.path();
    let mut sending = Sending::new(with_capacity(SMALL).create_sender(&path).unwrap(), 100);
    let victim = fork(Last::Killed, |inside| {
        let mut receiver = opened().open_receiver(&path).unwrap();
        inside.synchronize();
        inside.count();
        while !receiver.arm().unwrap().is_waiting() {}
        readable(receiver.as_fd());
        take(&mut receiver);
        let _ = receiver.arm().unwrap().is_waiting();
        // The same calls as in a wait.
        take(&mut receiver);
        receiver
    });
    victim.wait_for_child();
    victim.go();
    for _ in 0..2 {
        victim.watch(true, &mut || {
            sending.expect_no_death();
            is_taken(opened().open_receiver(run.path()));
        });
        sending.send(1);
    }
    run.finish(victim, || {
        sending.expect_no_death();
        is_taken(opened().open_receiver(run.path()));
    });
    received_by_another(run, &mut sending, shared().released.load(SeqCst));
}

/// Takes one message, as a victim.
pub fn take(receiver: &mut Receiver) {
    let message = receiver.receive().unwrap();
    let number = u64::from_le_bytes(message[..8].try_into().unwrap());
    shared().seen.store(number + 1, SeqCst);
    drop(message);
    shared().released.store(number + 1, SeqCst);
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Take {
    One,
    Copy,
    Batch,
    Held,
    Wake,
}

pub fn take_as(how: Take, receiver: &mut Receiver) {
    let (seen, released) = (&shared().seen, &shared().released);
    match how {
        Take::One => (0..3).for_each(|_| take(receiver)),
        Take::Wake => (0..15).for_each(|_| take(receiver)),
        Take::Copy => {
            let mut buffer = Vec::new();
            for number in 1..=3 {
                // A receiver that copies notes and releases in one call: one message that it has not noted yet may be
                // repeated.
                seen.store(number, SeqCst);
                receiver.receive_into(&mut buffer).unwrap();
                check(number - 1, Sizes::Fixed(buffer.len() as u64), &buffer, &mut Vec::new());
                released.store(number, SeqCst);
            }
        }
        Take::Batch => {
            let mut batch = receiver.receive_batch().unwrap();
            for number in 1..=4 {
                batch.next().unwrap().unwrap();
                seen.store(number, SeqCst);
            }
            drop(batch);
            released.store(4, SeqCst);
        }
        Take::Held => {
            let mut held: Vec<_> = Vec::new();
            for number in 1..=3 {
                held.push(receiver.receive().unwrap().hold());
                seen.store(number, SeqCst);
            }
            // Each receive releases the messages dropped before; its own release waits behind the held messages.
            let receive = |receiver: &mut Receiver, number| {
                let message = receiver.receive().unwrap();
                seen.store(number, SeqCst);
                drop(message);
            };
            drop(held.remove(1));
            receive(receiver, 4);
            drop(held.remove(0));
            receive(receiver, 5);
            // The first two, and no more: the receiver holds the third.
            released.store(2, SeqCst);
            drop(held);
            receive(receiver, 6);
            released.store(6, SeqCst);
        }
    }
}

pub fn receiver_releases(run: &Run, how: Take) {
    let bytes = if how == Take::Wake { 3000 } else { 100 };
    let path = run.path();
    let mut sending = Sending::new(with_capacity(SMALL).create_sender(&path).unwrap(), bytes);
    if how == Take::Wake {
        while sending.try_send() {}
    } else {
        sending.send(6);
    }
    let victim = fork(Last::Killed, |inside| {
        let mut receiver = opened().open_receiver(&path).unwrap();
        inside.synchronize();
        inside.count();
        take_as(how, &mut receiver);
        receiver
    });
    victim.wait_for_child();
    assert!(sending.sender.resume_until(deadline()).unwrap());
    if how == Take::Wake {
        assert!(sending.sender.arm(bytes as usize).unwrap().is_waiting());
    }
    victim.go();
    run.finish(victim, || {
        is_taken(opened().open_receiver(run.path()));
        if how != Take::Wake {
            sending.expect_no_death();
        }
    });
    if how == Take::Wake {
        // Free space or the end: the sender gets one of them.
        readable(sending.sender.as_fd());
    }
    let (released, sent) = (shared().released.load(SeqCst), sending.next);
    let end = sending.until_end();
    let left = match end {
        Some(Error::PeerDied { unreleased }) => unreleased,
        None => 0,
        Some(end) => panic!("{end}"),
    };
    // The victim has seen everything that is released.
    let seen = shared().seen.load(SeqCst);
    assert!((sent - seen..=sent - released).contains(&left), "{left} of {sent} are left: {released}, {seen}");
    received_by_another(run, &mut sending, sent - left);
}

pub fn receiver_releases_alone(run: &Run) {
    let path = run.path();
    Sending::new(with_capacity(SMALL).create_sender(&path).unwrap(), 100).send(6);
    let victim = fork(Last::Killed, |inside| {
        let mut receiver = opened().open_receiver(&path).unwrap();
        inside.count();
        take_as(Take::Held, &mut receiver);
        // Its sender has closed, which is reported after the messages.
        match receiver.try_receive() {
            Ok(message) => assert!(message.is_none()),
            Err(error) => assert!(error.is_closed(), "{error}"),
        }
        receiver
    });
    run.finish(victim, || {
        is_taken(opened().open_receiver(run.path()));
        // The other, absent sender causes no report.
        let mut sending = Sending::new(opened().open_sender(run.path()).unwrap(), 100);
        sending.expect_no_death();
        sending.sender.close().unwrap();
    });
    let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 100);
    assert_eq!(sending.next, 6);
    received_by_another(run, &mut sending, shared().released.load(SeqCst));
}

/// Two lanes, whose messages a receiver writes to a file, a few at a time.
pub fn receiver_flushes(run: &Run, options: &RecordFileOptions) {
    let path = run.path();
    let file = run.root.join("file");
    let mut sending = [0, 1].map(|lane| {
        let lanes = with_capacity(SMALL).lanes(2);
        let sender = if lane == 0 { lanes.create_sender(&path) } else { lanes.cast().open_sender(&path) };
        let mut sending = Sending::new(sender.unwrap(), 100);
        sending.send(5);
        sending
    });
    let flush = || -> pelton::Result<()> {
        let receiver = opened().open_receiver(&path)?;
        let sink = options.open(&file)?;
        let mut flush = pelton::Flush::new(&Options::new().flush_bytes(300).flush_interval(None), receiver, sink)?;
        flush.flush()
    };
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        flush().unwrap();
    });
    run.finish(victim, || is_taken(flush()));
    // Its successor, and then one more whose only work is this.
    flush().unwrap();
    sending.iter_mut().for_each(|sending| sending.send(1));
    flush().unwrap();
    assert_eq!(sending.each_mut().map(|sending| sending.sender.unreleased()), [0, 0]);
    let mut names: Vec<_> = names(&run.root).into_iter().filter(|name| name.starts_with("file")).collect();
    // The one without a number is the last.
    names.sort_by_key(|name| (!name.contains('.'), name.clone()));
    let mut next: BTreeMap<LaneId, u64> = BTreeMap::new();
    for name in names {
        let mut reader = RecordReader::open(run.root.join(name)).unwrap();
        while let Some(chunk) = reader.next_chunk().unwrap() {
            let next = next.entry(chunk.lane()).or_default();
            for record in chunk.records() {
                check(*next, Sizes::Fixed(100), record.payload(), &mut Vec::new());
                assert_eq!(u64::from(record.seq()), *next + 1);
                *next += 1;
            }
        }
    }
    assert_eq!(next.into_values().collect::<Vec<_>>(), [6, 6], "each message once");
}

/// A receiver that waits for a sender to connect.
pub fn receiver_resumes(run: &Run) {
    let path = run.path();
    let victim = fork(Last::Killed, |inside| {
        let mut receiver = with_capacity(SMALL).create_receiver(&path).unwrap();
        inside.synchronize();
        inside.count();
        assert!(receiver.resume_until(deadline()).unwrap());
        take(&mut receiver);
        receiver
    });
    victim.wait_for_child();
    victim.go();
    victim.watch(true, &mut || is_taken(opened().open_receiver(run.path())));
    let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 100);
    sending.send(1);
    run.finish(victim, || {
        sending.expect_no_death();
        is_taken(opened().open_receiver(run.path()));
    });
    received_by_another(run, &mut sending, shared().released.load(SeqCst));
}

pub fn receiver_closes(run: &Run) {
    let path = run.path();
    let mut sending = Sending::new(with_capacity(SMALL).create_sender(&path).unwrap(), 100);
    sending.send(6);
    let victim = fork(Last::Killed, |inside| {
        let mut receiver = opened().open_receiver(&path).unwrap();
        (0..2).for_each(|_| take(&mut receiver));
        inside.synchronize();
        inside.count();
        receiver.close().unwrap();
    });
    victim.wait_for_child();
    assert!(sending.sender.resume_until(deadline()).unwrap());
    victim.go();
    let given_back = || shared().step() == "lock: given back";
    let mut error = None;
    run.finish(victim, || {
        match sending.sender.wait_released_until(Instant::now() + MOMENT) {
            Ok(drained) => assert!(!drained),
            Err(found) => error = Some(found),
        }
        if !given_back() {
            is_taken(opened().open_receiver(run.path()));
        }
    });
    let end = error.or_else(|| sending.until_end()).expect("four are not released");
    match end {
        Error::Closed { unreleased: 4 } => {}
        Error::PeerDied { unreleased: 4 } if !run.stops && !given_back() => {}
        end => panic!("{end}"),
    }
    received_by_another(run, &mut sending, 2);
}
