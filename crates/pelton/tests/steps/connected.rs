//! Over a socket: connected endpoints, many senders to one receiver, and the handshake.

use super::*;
use crate::support::Kind;
use pelton::{Departure, Event, Listener};

fn listening(run: &Run) -> Listener {
    with_capacity(LARGE).listen(&run.name()).unwrap()
}

/// A pipe: a reader of one end gets the end of file when the process that holds the other exits.
pub fn liveness_pipe() -> (OwnedFd, OwnedFd) {
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap()
}

/// Starts when the victim has exited. Only the victim holds `liveness_pipe`.
pub fn successor<R>(gone: OwnedFd, liveness_pipe: &OwnedFd, body: impl FnOnce() -> R) -> Child {
    fork(Last::Exit, |_| {
        // SAFETY: nothing uses this process's copy any more: the child exits without dropping it.
        drop(unsafe { OwnedFd::from_raw_fd(liveness_pipe.as_raw_fd()) });
        assert_eq!(rustix::io::read(&gone, &mut [0]), Ok(0));
        body()
    })
}

pub fn connecting<M>() -> Options<M> {
    let options: Options = with_capacity(LARGE);
    options.connect_deadline(deadline()).cast()
}

/// Fills the lane, as a successor, and closes after the receiver has taken everything.
pub fn fill(sender: Sender, bytes: u64) {
    let mut sending = Sending::new(sender, bytes);
    shared().first.store(sending.next, SeqCst);
    while sending.try_send() {}
    shared().next.store(sending.next, SeqCst);
    assert!(sending.sender.wait_released_until(deadline()).unwrap());
}

/// Receives until the sender closes, as a successor.
fn receive_to_close(receiver: Receiver) {
    let (seen, released) = (shared().seen.load(SeqCst), shared().released.load(SeqCst));
    let mut receiving = Receiving::new(receiver, 100);
    let first = receiving.begins(released, seen, released.max(seen) + 1);
    shared().first.store(first, SeqCst);
    let end = receiving.until_end();
    assert!(end.is_closed(), "{end}");
    shared().next.store(receiving.next[0], SeqCst);
}

pub fn connected_sender_commits(run: &Run, with_descriptors: bool) {
    let (name, listener) = (run.name(), listening(run));
    let (gone, liveness_pipe) = liveness_pipe();
    let successor = successor(gone, &liveness_pipe, || fill(connecting().connect_sender(&name).unwrap(), 100));
    let victim = fork(Last::Killed, move |inside| {
        let mut sending = Sending::new(connecting().connect_sender(&name).unwrap(), 100);
        sending.commit(2);
        inside.synchronize();
        inside.count();
        match with_descriptors {
            false => sending.commit(2),
            true => sending.commit_with_descriptors(2),
        }
        sending.commit_batch(3);
        (sending, liveness_pipe)
    });
    let mut receiving = Receiving::new(listener.accept_receiver_until(deadline()).unwrap().unwrap(), 100);
    victim.wait_for_child();
    receiving.read(2);
    assert!(receiving.receiver.arm().unwrap().is_waiting());
    victim.go();
    run.finish(victim, || receiving.expect_no_death());
    readable(receiving.receiver.as_fd());
    let end = receiving.until_end();
    assert!(end.is_peer_died(), "{end}");
    all_committed_arrived(receiving.next[0], 3);
    assert!(receiving.receiver.resume_until(deadline()).unwrap());
    let end = receiving.until_end();
    assert!(end.is_closed(), "{end}");
    successor.wait_for_success();
    assert_eq!(receiving.next[0], shared().next.load(SeqCst));
    drop((receiving, listener));
    assert_eq!(run.left(), Vec::<String>::new());
}

/// One of two senders of a gathering receiver; a thread has the other, which notices nothing.
pub fn gathered_sender(run: &Run) {
    let name = run.name();
    let mut receiver = connecting().membership_events(true).gather_at(&name).unwrap();
    let mut other = receiver.senders().unwrap().sender().unwrap();
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        let mut sending = Sending::new(connecting().connect_sender(&name).unwrap(), 100);
        sending.commit(3);
        sending.commit_batch(3);
        let sender = sending.sender;
        sender.close().unwrap();
    });
    let (mut next, mut others, mut events) = (0, 0, Vec::new());
    let mut look = |receiver: &mut Receiver| {
        while let Some(event) = receiver.try_receive_event().unwrap() {
            match event {
                Event::Message(message) if message.len() == 100 => {
                    check(next, Sizes::Fixed(100), &message, &mut Vec::new());
                    next += 1;
                }
                Event::Message(_) => others += 1,
                event => events.push((Kind::of(&event), event.member().peer.unwrap().pid)),
            }
        }
        (next, others, events.clone())
    };
    loop {
        match victim.state() {
            'Z' => break,
            'T' => {
                let until = Instant::now() + MOMENT;
                while Instant::now() < until {
                    let (.., events) = look(&mut receiver);
                    assert!(events.iter().all(|(kind, _)| *kind != Kind::Left(Departure::PeerDied)), "{events:?}");
                }
                // SAFETY: no pointers.
                unsafe { libc::kill(victim.pid, libc::SIGCONT) };
                while victim.state() == 'T' {}
            }
            _ => _ = look(&mut receiver),
        }
    }
    let pid = victim.pid as u32;
    victim.wait();
    other.send(b"other").unwrap();
    let until = deadline();
    let (next, _, events) = loop {
        let seen = look(&mut receiver);
        let of_victim: Vec<Kind> = seen.2.iter().filter(|(_, of)| *of == pid).map(|(kind, _)| *kind).collect();
        // A sender that joined also leaves.
        if seen.1 == 1 && of_victim.len() != 1 {
            break (seen.0, seen.1, of_victim);
        }
        assert!(Instant::now() < until, "{seen:?}");
    };
    assert!(
        matches!(events[..], [] | [Kind::Joined, Kind::Left(Departure::PeerDied | Departure::Closed)]),
        "{events:?}"
    );
    all_committed_arrived(next, 3);
    assert_eq!(receiver.counters().messages, next + 1);
    drop((other, receiver));
    assert_eq!(run.left(), Vec::<String>::new());
}

/// A receiver of two senders, which both detect its death.
pub fn gathering_receiver(run: &Run) {
    let name = run.name();
    let victim = fork(Last::Killed, |inside| {
        let mut receiver = connecting().gather_at(&name).unwrap();
        inside.synchronize();
        inside.count();
        for _ in 0..8 {
            drop(receiver.receive().unwrap());
            shared().released.fetch_add(1, SeqCst);
        }
        receiver
    });
    victim.wait_for_child();
    victim.go();
    // Without a deadline: no successor follows the victim.
    let senders = (0..2).map_while(|_| with_capacity(LARGE).connect_sender(&name).ok());
    let mut sending: Vec<_> = senders.map(|sender| Sending::new(sender, 100)).collect();
    let mut message = Vec::new();
    for number in 0..4 {
        for sending in &mut sending {
            payload(number, 100, &mut message);
            // The victim may be dead by now.
            sending.next += u64::from(sending.sender.try_send(&message).is_ok_and(|sent| sent == Sent::Sent));
        }
    }
    run.finish(victim, || {});
    let mut left = 0;
    for one in &mut sending {
        match one.until_end() {
            Some(Error::PeerDied { unreleased }) => left += unreleased,
            None => {}
            Some(end) => panic!("{end}"),
        }
    }
    let (released, sent) = (shared().released.load(SeqCst), sending.iter().map(|sending| sending.next).sum::<u64>());
    // One may be released and not yet counted.
    assert!((released..=released + 1).contains(&(sent - left)), "{left} of {sent} are left, {released} were released");
    drop(sending);
    let stale = run.left();
    assert!(stale.len() <= 1, "the socket alone is left, for the next one to remove: {stale:?}");
    drop(connecting().gather_at(&name).unwrap());
    assert_eq!(run.left(), Vec::<String>::new());
}

pub fn connected_receiver_releases(run: &Run, with_descriptors: bool) {
    let (name, listener) = (run.name(), listening(run));
    let (gone, liveness_pipe) = liveness_pipe();
    let successor = successor(gone, &liveness_pipe, || receive_to_close(connecting().connect_receiver(&name).unwrap()));
    let victim = fork(Last::Killed, move |inside| {
        let mut receiver = connecting().connect_receiver(&name).unwrap();
        inside.synchronize();
        inside.count();
        take_as(Take::Held, &mut receiver);
        take(&mut receiver);
        (receiver, liveness_pipe)
    });
    let mut sending = Sending::new(listener.accept_sender_until(deadline()).unwrap().unwrap(), 100);
    match with_descriptors {
        false => sending.send(8),
        true => sending.commit_with_descriptors(8),
    }
    victim.wait_for_child();
    victim.go();
    run.finish(victim, || sending.expect_no_death());
    let left = match sending.until_end() {
        Some(Error::PeerDied { unreleased }) => unreleased,
        end => panic!("{end:?}"),
    };
    let (seen, released) = (shared().seen.load(SeqCst), shared().released.load(SeqCst));
    assert!((8 - seen..=8 - released).contains(&left), "{left} are left: {released}, {seen}");
    assert!(sending.sender.resume_until(deadline()).unwrap());
    sending.send(3);
    drop(sending);
    successor.wait_for_success();
    assert_eq!((shared().first.load(SeqCst), shared().next.load(SeqCst)), (8 - left, 11));
    drop(listener);
    assert_eq!(run.left(), Vec::<String>::new());
}

/// The state before a handshake.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Before {
    Fresh,
    /// A lane whose other side died.
    Survives,
    /// The same, with a floor, which the handshake must pass to the next sender.
    Jumped,
}

pub fn by_short_name(run: &Run, sends: bool, listens: bool, before: Before) {
    // SAFETY: this program has one thread.
    unsafe { std::env::set_var("XDG_RUNTIME_DIR", &run.root) };
    handshake(&Run { root: run.root.clone(), has_short_name: true, ..*run }, sends, listens, before);
}

/// Continues a stopped process, after a moment, repeatedly until it exits: a process that waits for it cannot do
/// that.
pub fn continue_when_stopped(victim: &Child) -> Child {
    let pid = victim.pid;
    fork(Last::Exit, |_| {
        while let Some(state) = support::kernel::state_of(pid as u32) {
            match state {
                'Z' => return,
                'T' => {
                    std::thread::sleep(MOMENT);
                    // SAFETY: no pointers. It is still unreaped: its parent is stopped only within its handshake.
                    unsafe { libc::kill(pid, libc::SIGCONT) };
                }
                _ => std::thread::sleep(Duration::from_micros(50)),
            }
        }
    })
}

/// The victim, which `sends` or receives, and `listens` or connects; the parent does the opposite. The lane is fresh,
/// or survived another peer. The successor of a sender fills the lane before the receiver takes anything.
pub fn handshake(run: &Run, sends: bool, listens: bool, before: Before) {
    let name = run.name();
    let survives = before != Before::Fresh;
    let bytes = if before == Before::Jumped { 8000 } else { 100 };
    let as_sender = |name: &str| match listens {
        false => connecting().connect_sender(name).unwrap(),
        true => connecting().listen(name).unwrap().accept_sender_until(deadline()).unwrap().expect("a peer connects"),
    };
    let as_receiver = |name: &str| match listens {
        false => connecting().connect_receiver(name).unwrap(),
        true => connecting().listen(name).unwrap().accept_receiver_until(deadline()).unwrap().expect("a peer connects"),
    };
    let listener = (!listens).then(|| listening(run));
    let (gone, liveness_pipe) = liveness_pipe();
    let successor = successor(gone, &liveness_pipe, || match sends {
        true => fill(as_sender(&name), bytes),
        false => receive_to_close(as_receiver(&name)),
    });
    let (sent, read): (&[u64], u64) = match before {
        Before::Fresh => (&[], 0),
        Before::Survives => (&[3, 2], 1),
        // The same as in `sender_commits`.
        Before::Jumped => (&[32, 12], 12),
    };
    // The first peer, if the lane must have lost one.
    let first = survives.then(|| {
        // SAFETY: nothing uses this process's copy any more: the child exits without dropping it.
        let close = || drop(unsafe { OwnedFd::from_raw_fd(liveness_pipe.as_raw_fd()) });
        fork(Last::Killed, |inside| -> Box<dyn Any> {
            close();
            if sends {
                let mut sending = Sending::new(as_sender(&name), bytes);
                for count in sent {
                    sending.send(*count);
                    inside.synchronize();
                }
                Box::new(sending)
            } else {
                let mut receiver = as_receiver(&name);
                inside.synchronize();
                (0..2).for_each(|_| take(&mut receiver));
                inside.synchronize();
                Box::new(receiver)
            }
        })
    });
    if sends {
        shared().committed.store(sent.iter().sum(), SeqCst);
    }
    let names = name.clone();
    let start = move || {
        fork(Last::Killed, move |inside| -> Box<dyn Any> {
            inside.count();
            if sends {
                let mut sending = Sending::new(as_sender(&names), bytes);
                sending.commit(1);
                Box::new((sending, liveness_pipe))
            } else {
                Box::new((as_receiver(&names), liveness_pipe))
            }
        })
    };
    let waker;
    if sends {
        let receiver = || match &listener {
            Some(listener) => listener.accept_receiver_until(deadline()).unwrap().expect("a peer connects"),
            None => connecting().connect_receiver(&name).unwrap(),
        };
        let (mut receiving, victim) = match first {
            None => {
                let victim = start();
                waker = run.stops.then(|| continue_when_stopped(&victim));
                (Receiving::new(receiver(), bytes), victim)
            }
            Some(first) => {
                let mut receiving = Receiving::new(receiver(), bytes);
                first.wait_for_child();
                receiving.read(read);
                first.go();
                first.wait_for_child();
                first.go();
                first.wait();
                let victim = start();
                waker = run.stops.then(|| continue_when_stopped(&victim));
                // Closes before it has read the rest: the successor must find its end.
                assert!(receiving.receiver.resume_until(deadline()).unwrap());
                (receiving, victim)
            }
        };
        run.finish(victim, || ());
        // The successor connects next, unless it already has.
        let _ = receiving.receiver.resume_until(deadline());
        let until = deadline();
        while shared().next.load(SeqCst) == 0 {
            assert!(Instant::now() < until, "the successor hangs");
            std::thread::sleep(Duration::from_micros(50));
        }
        let end = receiving.until_end();
        assert!(end.is_closed(), "{end}");
        successor.wait_for_success();
        assert_eq!(receiving.next[0], shared().next.load(SeqCst));
        // Messages of the victim and of the peer before; those of the successor start there.
        let first = shared().first.load(SeqCst);
        let sent: u64 = sent.iter().sum();
        assert!((sent..=sent + 1).contains(&first), "the successor begins at {first}");
    } else {
        let sender = || match &listener {
            Some(listener) => listener.accept_sender_until(deadline()).unwrap().expect("a peer connects"),
            None => connecting().connect_sender(&name).unwrap(),
        };
        let (mut sending, victim) = match first {
            None => {
                let victim = start();
                waker = run.stops.then(|| continue_when_stopped(&victim));
                (Sending::new(sender(), 100), victim)
            }
            Some(first) => {
                let mut sending = Sending::new(sender(), 100);
                first.wait_for_child();
                sending.send(6);
                first.go();
                first.wait_for_child();
                first.go();
                first.wait();
                let victim = start();
                waker = run.stops.then(|| continue_when_stopped(&victim));
                assert!(sending.sender.resume_until(deadline()).unwrap());
                (sending, victim)
            }
        };
        let mut message = Vec::new();
        while sending.next < 9 {
            payload(sending.next, 100, &mut message);
            match sending.sender.send_until(&message, deadline()) {
                Ok(sent) => {
                    assert_eq!(sent, Sent::Sent);
                    sending.next += 1;
                }
                Err(error) => {
                    assert!(error.is_peer_died(), "{error}");
                    assert!(sending.sender.resume_until(deadline()).unwrap());
                }
            }
        }
        // The victim takes nothing, so the sender reports its death if the handshake got that far.
        while let Err(error) = sending.sender.wait_released_until(deadline()) {
            assert!(error.is_peer_died(), "{error}");
            assert!(sending.sender.resume_until(deadline()).unwrap());
        }
        drop(sending);
        run.finish(victim, || ());
        successor.wait_for_success();
        assert_eq!((shared().first.load(SeqCst), shared().next.load(SeqCst)), (if survives { 2 } else { 0 }, 9));
    }
    if let Some(waker) = waker {
        waker.wait_for_success();
    }
    drop(listener);
    assert_eq!(run.left(), Vec::<String>::new());
}
