//! Senders that attach, commit, close and wait for the other side.

use super::*;

pub fn sender_attaches(run: &Run, before: u64, read: u64) {
    let mut receiving = Receiving::new(with_capacity(SMALL).create_receiver(run.path()).unwrap(), 100);
    if before > 0 {
        Sending::new(opened().open_sender(run.path()).unwrap(), 100).send(before);
        receiving.read(read);
    }
    shared().committed.store(before, SeqCst);
    let path = run.path();
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 100);
        sending.commit(2);
        sending
    });
    run.finish(victim, || {
        // The predecessor closed, and the receiver may report that; it reports nothing of the attaching one.
        receiving.expect_no_death();
        if shared().claimed.load(SeqCst) {
            is_taken(opened().open_sender(run.path()));
        }
    });
    receiving.for_a_moment();
    all_committed_arrived(receiving.next[0], 1);
    resume_both(opened().open_sender(run.path()).unwrap(), &mut receiving);
    drop(receiving);
    run.only_the_channel_is_left(1);
}

/// After a sender dies while it attaches, its successor must not overwrite what a floor protects.
pub fn sender_attaches_behind_a_jump(run: &Run) {
    let path = run.path();
    let mut receiving = Receiving::new(with_capacity(LARGE).create_receiver(&path).unwrap(), 8000);
    {
        let mut first = Sending::new(opened().open_sender(&path).unwrap(), 8000);
        first.send(32);
        receiving.read(12);
        first.send(12);
    }
    shared().committed.store(44, SeqCst);
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 8000);
        sending.commit(2);
        sending
    });
    run.finish(victim, || ());
    let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 8000);
    all_committed_arrived(sending.next, 1);
    while sending.try_send() {}
    receiving.read_to(sending.next);
    resume_both(sending.sender, &mut receiving);
    drop(receiving);
    run.only_the_channel_is_left(1);
}

pub fn sender_adds_a_lane(run: &Run, leftovers: bool) {
    let path = run.path();
    let mut receiving = Receiving::new(with_capacity(SMALL).lanes(2).create_receiver(&path).unwrap(), 100);
    let mut other = Sending::new(opened().open_sender(&path).unwrap(), 100);
    if leftovers {
        ["1.producer", "1.data", "1.life"].iter().for_each(|name| std::fs::write(path.join(name), "").unwrap());
    }
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 100);
        sending.commit(2);
        sending
    });
    run.finish(victim, || {
        other.send(1);
        receiving.expect_no_death();
        assert_eq!(receiving.next[0], other.next);
        if shared().claimed.load(SeqCst) {
            is_taken(opened().open_sender(run.path()));
        }
    });
    // The other lane is unaffected.
    other.send(1);
    while receiving.next[0] < other.next {
        receiving.read(1);
    }
    receiving.for_a_moment();
    all_committed_arrived(receiving.next[1], 1);
    let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 100);
    assert_eq!(sending.next, receiving.next[1]);
    for _ in 0..3 {
        sending.send(1);
        other.send(1);
        receiving.read(2);
    }
    assert_eq!(receiving.next, [other.next, sending.next, 0]);
    is_taken(opened().open_sender(&path));
    drop((sending, other, receiving));
    run.only_the_channel_is_left(2);
}

/// A process that dies, or is stopped, while it adds a lane blocks another one only for that long.
pub fn two_senders_add_a_lane(run: &Run) {
    let path = run.path();
    let mut receiving = Receiving::new(with_capacity(SMALL).lanes(3).create_receiver(&path).unwrap(), 100);
    let mut other = Sending::new(opened().open_sender(&path).unwrap(), 100);
    let rival = fork(Last::Exit, |inside| {
        inside.synchronize();
        let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 100);
        sending.send(2);
        inside.synchronize();
        sending
    });
    rival.wait_for_child();
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 100);
        // By count: its first number may be the other sender's.
        sending.send(1);
        shared().committed.store(1, SeqCst);
        sending.send(1);
        shared().committed.store(2, SeqCst);
        sending
    });
    rival.go();
    run.finish(victim, || {
        other.send(1);
        receiving.expect_no_death();
        assert_eq!(receiving.next[0], other.next);
    });
    rival.wait_for_child();
    receiving.for_a_moment();
    // The two of the rival, and the victim's.
    all_committed_arrived(receiving.next[1] + receiving.next[2] - 2, 1);
    let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 100);
    is_taken(if inspect::info(&path).unwrap().lanes.len() == 3 {
        opened().open_sender(&path)
    } else {
        opened().open_receiver(&path).map(|_| unreachable!())
    });
    let before: u64 = receiving.next.iter().sum();
    sending.send(3);
    other.send(1);
    receiving.read(4);
    assert_eq!(receiving.next.iter().sum::<u64>(), before + 4);
    rival.go();
    rival.wait_for_success();
    let lanes = inspect::info(&path).unwrap().lanes.len() as u32;
    drop((sending, other, receiving));
    run.only_the_channel_is_left(lanes);
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum At {
    Empty,
    Alone,
    NearlyFull,
    Full,
    EarlyWrap,
    Jump,
    AfterJump,
    Payload,
    Batch,
    BatchAtWrap,
    Traced,
    TracedAtWrap,
    Successor,
    SuccessorAtWrap,
    Asleep,
    Waited,
    Sync,
}

/// The receiver reads the victim's messages before the successor connects, or, if `late`, after the successor has
/// filled the lane.
pub fn sender_commits(run: &Run, at: At, late: bool) {
    // Messages that the victim sends, and the receiver takes, before the steps count. 32 messages of 8000 bytes use
    // up the window.
    let (capacity, bytes, before): (u64, u64, &[(u64, u64)]) = match at {
        At::NearlyFull => (SMALL, 3000, &[(20, 0)]),
        At::Full => (SMALL, 3000, &[(21, 0)]),
        At::EarlyWrap | At::BatchAtWrap | At::TracedAtWrap => (LARGE, 8000, &[(32, 32)]),
        At::Jump => (LARGE, 8000, &[(32, 12), (11, 0)]),
        At::AfterJump => (LARGE, 8000, &[(32, 12), (12, 32)]),
        At::SuccessorAtWrap => (LARGE, 8000, &[]),
        _ => (SMALL, 100, &[]),
    };
    let path = run.path();
    let is_traced = matches!(at, At::Traced | At::TracedAtWrap);
    let receiver = (at != At::Alone).then(|| with_capacity(capacity).traced(is_traced).create_receiver(&path).unwrap());
    let mut receiving = receiver.map(|receiver| Receiving::new(receiver, bytes));
    let sent = match at {
        At::Successor => 2,
        At::SuccessorAtWrap => 32,
        _ => 0,
    };
    if sent > 0 {
        Sending::new(opened().open_sender(&path).unwrap(), bytes).send(sent);
        assert!(receiving.as_mut().unwrap().until_end().is_closed());
    }
    let parent = std::process::id() as libc::pid_t;
    let victim = fork(Last::Killed, |inside| {
        let mut sending = Sending::new(with_capacity(capacity).traced(is_traced).create_sender(&path).unwrap(), bytes);
        shared().committed.store(sending.next, SeqCst);
        for (send, _) in before {
            sending.commit(*send);
            inside.synchronize();
        }
        inside.synchronize();
        while at == At::Waited && state_of(parent) != 'S' {}
        inside.count();
        match at {
            At::Batch | At::BatchAtWrap => sending.commit_batch(3),
            At::Traced | At::TracedAtWrap => sending.commit_traced(2),
            At::Payload => sending.commit_by_halves(2),
            At::NearlyFull => sending.commit(1),
            _ => sending.commit(2),
        }
        match at {
            // Full, unless the parent has received meanwhile.
            At::NearlyFull => _ = sending.try_send(),
            At::Full => {}
            At::Sync => sending.sender.sync().unwrap(),
            _ => sending.commit(1),
        }
        sending
    });
    for (_, read) in before {
        victim.wait_for_child();
        receiving.as_mut().unwrap().read(*read);
        victim.go();
    }
    victim.wait_for_child();
    if at == At::Asleep {
        assert!(receiving.as_mut().unwrap().receiver.arm().unwrap().is_waiting());
    }
    victim.go();
    if at == At::Waited {
        receiving.as_mut().unwrap().for_long();
    }
    let is_there = |receiving: &mut Option<Receiving>| {
        is_taken(opened().open_sender(run.path()));
        if let Some(receiving) = receiving {
            receiving.expect_no_death();
        }
    };
    if at == At::Full {
        // It waits for free space, unless it exits before.
        victim.watch(true, &mut || {
            is_taken(opened().open_sender(run.path()));
            assert!(!receiving.as_mut().unwrap().receiver.arm().unwrap().is_waiting(), "the lane is full");
        });
        receiving.as_mut().unwrap().read(12);
    }
    run.finish(victim, || is_there(&mut receiving));
    if at == At::Asleep {
        readable(receiving.as_ref().unwrap().receiver.as_fd());
    }
    let in_flight = if matches!(at, At::Batch | At::BatchAtWrap) { 3 } else { 1 };
    let sender = match &mut receiving {
        Some(receiving) if late => {
            let mut sending = Sending::new(opened().open_sender(run.path()).unwrap(), bytes);
            all_committed_arrived(sending.next, in_flight);
            while sending.try_send() {}
            receiving.read_to(sending.next);
            sending.sender
        }
        Some(receiving) => {
            let end = receiving.until_end();
            assert!(end.is_peer_died(), "{end}");
            opened().open_sender(run.path()).unwrap()
        }
        None => {
            let sender = opened().open_sender(run.path()).unwrap();
            let mut late = Receiving::new(opened().open_receiver(run.path()).unwrap(), bytes);
            late.read(u64::from(sender.next_seq()) - 1);
            receiving = Some(late);
            sender
        }
    };
    let mut receiving = receiving.unwrap();
    if is_traced {
        // Of the victim's three messages the first two.
        let (before, received) = (before.iter().map(|(sent, _)| sent).sum::<u64>(), receiving.next[0]);
        assert_eq!(receiving.traced, (received - before).min(2));
    }
    if !late {
        all_committed_arrived(receiving.next[0], in_flight);
    }
    resume_both(sender, &mut receiving);
    assert!(receiving.until_end().is_closed());
    drop(receiving);
    run.only_the_channel_is_left(1);
}

impl Receiving {
    /// Takes one message, or one end, in a wait.
    fn for_long(&mut self) {
        match self.one(deadline()) {
            Ok(read) => assert!(read.is_some(), "neither a message nor an end came"),
            // There was no other end to report.
            Err(error) => self.pending_end = Some(error),
        }
    }
}

pub fn sender_closes(run: &Run) {
    let path = run.path();
    let mut receiving = Receiving::new(with_capacity(SMALL).create_receiver(&path).unwrap(), 100);
    let victim = fork(Last::Killed, |inside| {
        let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 100);
        sending.commit(3);
        inside.synchronize();
        inside.count();
        sending.sender.close().unwrap();
    });
    victim.wait_for_child();
    victim.go();
    let given_back = || shared().step() == "lock: given back";
    run.finish(victim, || {
        receiving.expect_no_death();
        if !given_back() {
            is_taken(opened().open_sender(run.path()));
        }
    });
    if receiving.next[0] < 3 || !run.stops {
        let end = receiving.until_end();
        let closed = given_back() || run.stops;
        assert!(if closed { end.is_closed() } else { is_end(&end) }, "{end}");
    }
    receiving.for_a_moment();
    all_committed_arrived(receiving.next[0], 0);
    resume_both(opened().open_sender(&path).unwrap(), &mut receiving);
    drop(receiving);
    run.only_the_channel_is_left(1);
}

/// A sender that waits for a receiver to connect.
pub fn sender_resumes(run: &Run) {
    let path = run.path();
    let victim = fork(Last::Killed, |inside| {
        let mut sending = Sending::new(with_capacity(SMALL).create_sender(&path).unwrap(), 100);
        sending.commit(1);
        inside.synchronize();
        inside.count();
        assert!(sending.sender.resume_until(deadline()).unwrap());
        sending.commit(1);
        sending
    });
    victim.wait_for_child();
    victim.go();
    victim.watch(true, &mut || is_taken(opened().open_sender(run.path())));
    let mut receiving = Receiving::new(opened().open_receiver(&path).unwrap(), 100);
    run.finish(victim, || {
        receiving.expect_no_death();
        is_taken(opened().open_sender(run.path()));
    });
    receiving.for_a_moment();
    all_committed_arrived(receiving.next[0], 1);
    resume_both(opened().open_sender(&path).unwrap(), &mut receiving);
    drop(receiving);
    run.only_the_channel_is_left(1);
}

/// Successive senders, each killed at another step, while a lane grows, jumps and wraps; the receiver stops and
/// continues.
pub fn successors_die(run: &Run) {
    let path = run.path();
    let mut receiving = Receiving::new(with_capacity(LARGE).create_receiver(&path).unwrap(), 8000);
    let target = shared().target.load(SeqCst);
    for round in 0..12 {
        let before = u64::from(round == 0) * 30;
        // Only the steps of the last one count; the ones before die at a different step for each n.
        let last = round == 11;
        let this = if last { target } else { 1 + (target * 17 + round * 29) % 60 };
        shared().steps.store(0, SeqCst);
        shared().target.store(this, SeqCst);
        let victim = fork(Last::Killed, |inside| {
            inside.count_if(before == 0);
            let mut sending = Sending::new(opened().open_sender(&path).unwrap(), 8000);
            shared().committed.fetch_max(sending.next, SeqCst);
            sending.commit(before);
            inside.count_if(true);
            sending.commit(2);
            sending.commit_batch(3);
            sending
        });
        run.finish(victim, || ());
        let committed = shared().committed.load(SeqCst);
        // Sometimes everything, otherwise some, so that the lane does not fill up, and jumps.
        match round % 4 {
            3 => receiving.read_to(committed),
            _ => receiving.read_to(receiving.next[0] + (committed - receiving.next[0]) * 2 / 5),
        }
    }
    shared().target.store(target, SeqCst);
    receiving.for_a_moment();
    all_committed_arrived(receiving.next[0], 3);
    resume_both(opened().open_sender(&path).unwrap(), &mut receiving);
    drop(receiving);
    run.only_the_channel_is_left(1);
}
