//! Calls: a client and a service, killed at every step, with empty lanes, full lanes, and messages in pieces in
//! flight. The survivor detects the death, finds nothing torn and nothing repeated, and continues with others; it
//! receives every reply that was sent.

use super::*;
use pelton::{CallId, Client, Loss, Outcome, Service};

/// The state of the lanes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Lanes {
    Empty,
    /// Both lanes full: the service replies, and the client takes, only when the other side is blocked.
    Full,
    Pieces,
}

impl Lanes {
    fn bytes(self) -> usize {
        match self {
            Lanes::Empty => 100,
            Lanes::Full => 5_000,
            // More than the lane holds.
            Lanes::Pieces => 90_000,
        }
    }

    fn calls(self) -> u64 {
        match self {
            Lanes::Empty => 3,
            Lanes::Full => 40,
            Lanes::Pieces => 2,
        }
    }
}

fn small<M>() -> Options<M> {
    let options: Options = connecting();
    options.capacity(1 << 16).cast()
}

fn numbered(number: u64, bytes: usize) -> Vec<u8> {
    let mut of = Vec::new();
    payload(number, bytes, &mut of);
    of
}

/// Answers every waiting request with its own bytes. Requests have the numbers from `next` on, each once and whole.
fn answer_all(service: &mut Service, lanes: Lanes, next: &mut u64) {
    while let Some(request) = service.try_receive().unwrap() {
        if *request == *b"other" {
            request.reply(b"other").unwrap();
            continue;
        }
        check(*next, Sizes::Fixed(lanes.bytes() as u64), &request, &mut Vec::new());
        *next += 1;
        let (bytes, responder) = request.into_parts();
        // A client that has exited gets no reply.
        let _ = responder.reply(&bytes);
    }
}

/// A client in this process, which also runs the service.
fn own_client(service: &mut Service, name: &str) -> Client {
    let connecting = {
        let name = name.to_owned();
        std::thread::spawn(move || Client::connect_with(&name, &small()).unwrap())
    };
    while !connecting.is_finished() {
        assert!(service.receive_until(Instant::now() + Duration::from_millis(1)).unwrap().is_none());
    }
    connecting.join().unwrap()
}

pub fn client_calls(run: &Run, lanes: Lanes) {
    let name = run.name();
    let mut service = Service::listen_with(&name, &small()).unwrap();
    let mut other = own_client(&mut service, &name);
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        let mut client = Client::connect_with(&name, &small()).unwrap();
        let calls: Vec<CallId> =
            (0..lanes.calls()).map(|number| client.submit(&numbered(number, lanes.bytes())).unwrap()).collect();
        client.cancel(calls[0]).unwrap();
        for _ in 1..calls.len() {
            let reply = client.completion_until(deadline()).unwrap().expect("no answer");
            let number = calls.iter().position(|call| *call == reply.call_id()).unwrap();
            assert!(number != 0 && *reply == *numbered(number as u64, lanes.bytes()));
        }
        shared().committed.store(lanes.calls(), SeqCst);
        drop(client);
    });
    let mut next = 0;
    let until = deadline();
    loop {
        assert!(Instant::now() < until, "the client hangs");
        match victim.state() {
            'Z' => break,
            'T' => {
                let until = Instant::now() + MOMENT;
                while Instant::now() < until {
                    answer_all(&mut service, lanes, &mut next);
                }
                // SAFETY: no pointers.
                unsafe { libc::kill(victim.pid, libc::SIGCONT) };
                while victim.state() == 'T' {}
            }
            // Connecting waits for this process.
            state if lanes != Lanes::Full || state == 'S' => answer_all(&mut service, lanes, &mut next),
            _ => {}
        }
    }
    victim.wait();
    assert_eq!(shared().panicked.load(SeqCst), 0, "the victim panicked");
    // The service continues to serve the other client, which gets all its replies. It receives each request of the
    // dead client whole or not at all.
    for _ in 0..3 {
        let call = other.submit(b"other").unwrap();
        let until = deadline();
        loop {
            answer_all(&mut service, lanes, &mut next);
            if let Some(reply) = other.try_completion().unwrap() {
                assert_eq!((reply.call_id(), &*reply), (call, &b"other"[..]));
                break;
            }
            assert!(Instant::now() < until);
        }
    }
    assert_eq!(service.corrupt_clients(), 0);
    let committed = shared().committed.load(SeqCst);
    assert!(next <= lanes.calls() && (committed == 0 || next == committed), "{next} of {committed} calls came");
    drop((other, service));
    assert_eq!(run.left(), Vec::<String>::new());
}

pub fn service_answers(run: &Run, lanes: Lanes) {
    let name = run.name();
    let victim = fork(Last::Killed, |inside| {
        let mut service = Service::listen_with(&name, &small()).unwrap();
        // The client connects with it.
        let first = service.receive_until(deadline()).unwrap().expect("no connection arrived");
        assert_eq!(&*first, b"first");
        first.reply(b"first").unwrap();
        inside.synchronize();
        inside.count();
        let mut next = 0;
        while next < lanes.calls() {
            let request = service.receive_until(deadline()).unwrap().expect("no request arrives");
            check(next, Sizes::Fixed(lanes.bytes() as u64), &request, &mut Vec::new());
            next += 1;
            let (bytes, mut responder) = request.into_parts();
            if next.is_multiple_of(2)
                && let Some(mut reservation) = responder.try_reserve(bytes.len().min(8_000)).unwrap()
                && reservation.len() == bytes.len()
            {
                reservation.copy_from_slice(&bytes);
                reservation.reply().unwrap();
                continue;
            }
            responder.reply(&bytes).unwrap();
            // The requests whose reply is published, or queued in memory.
            shared().committed.store(next, SeqCst);
        }
        // The queued replies are written as space becomes free.
        let _ = service.receive_until(Instant::now() + Duration::from_millis(20));
        drop(service);
    });
    let mut client = Client::connect_with(&name, &small()).unwrap();
    assert_eq!(&*client.call_until(b"first", deadline()).unwrap().expect("no answer"), b"first");
    victim.wait_for_child();
    let waker = run.stops.then(|| continue_when_stopped(&victim));
    victim.go();
    let mut requested: Vec<CallId> = Vec::new();
    let mut ended = None;
    while ended.is_none() && (requested.len() as u64) < lanes.calls() {
        match client.submit_until(&numbered(requested.len() as u64, lanes.bytes()), deadline()) {
            Ok(call) => requested.push(call.expect("the service hangs")),
            Err(error) => ended = Some(error),
        }
    }
    let mut answered = 0;
    while ended.is_none() || answered < requested.len() {
        match client.completion_until(deadline()) {
            Ok(reply) => {
                let reply = reply.expect("the service hangs");
                let number =
                    requested.iter().position(|call| *call == reply.call_id()).expect("a request arrived") as u64;
                assert_eq!(reply.outcome(), Outcome::Reply);
                assert!(*reply == *numbered(number, lanes.bytes()), "reply {number} is torn");
                answered += 1;
            }
            // Nothing waits for a reply any more.
            Err(Error::Refused(_)) => break,
            Err(error) => {
                ended = Some(error);
                break;
            }
        }
    }
    run.finish(victim, || ());
    waker.into_iter().for_each(|waker| waker.wait_for_success());
    if lanes == Lanes::Empty {
        // One call at a time: the client has every reply from before the death, except possibly the last.
        assert!(answered as u64 + 1 >= shared().committed.load(SeqCst), "{answered} answers");
    }
    let error = loop {
        match ended.take().map_or_else(|| client.try_completion().map(|found| found.is_none()), Err) {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(error.is_peer_died() || error.is_closed(), "{error}");
    drop(client);
    // A successor takes the name.
    let mut service = Service::listen_with(&name, &small()).unwrap();
    let mut client = own_client(&mut service, &name);
    let call = client.submit(b"other").unwrap();
    answer_all(&mut service, lanes, &mut 0);
    assert_eq!(client.completion_of(call).unwrap().outcome(), Outcome::Reply);
    drop((client, service));
    assert_eq!(run.left(), Vec::<String>::new());
}

/// A service that hands its calls over to another one of the same name is killed at every step of that. No call is
/// done twice, and each lost call is reported as lost.
pub fn service_drains(run: &Run, lanes: Lanes) {
    let run = &Run { stops: run.stops, root: run.root.clone(), has_short_name: true };
    // SAFETY: this program has one thread.
    unsafe { std::env::set_var("XDG_RUNTIME_DIR", &run.root) };
    let name = run.name();
    let victim = fork(Last::Killed, |inside| {
        let mut service = Service::listen_with(&name, &small()).unwrap();
        let first = service.receive_until(deadline()).unwrap().expect("no connection arrived");
        first.reply(b"first").unwrap();
        // A call that the service has taken, and answers while it drains.
        let (bytes, taken) = service.receive_until(deadline()).unwrap().expect("no request arrives").into_parts();
        shared().seen.store(1, SeqCst);
        inside.synchronize();
        inside.count();
        service.stopper().drain();
        let _ =
            service.receive_until(Instant::now() + Duration::from_millis(1)).map(|request| assert!(request.is_none()));
        shared().committed.store(1, SeqCst);
        taken.reply(&bytes).unwrap();
        while service.receive_until(deadline()).map(|request| assert!(request.is_none())).is_ok() {}
        drop(service);
    });
    let mut client = Client::connect_with(&name, &small()).unwrap();
    assert_eq!(&*client.call_until(b"first", deadline()).unwrap().expect("no answer"), b"first");
    let mut requested: Vec<(u64, CallId)> = vec![(0, client.submit(&numbered(0, 100)).unwrap())];
    victim.wait_for_child();
    let mut successor = Service::listen_with(&name, &small()).unwrap();
    victim.go();
    for number in 1..lanes.calls() {
        if let Some(call) = client.try_submit(&numbered(number, lanes.bytes())).unwrap() {
            requested.push((number, call));
        }
    }
    let (mut outcomes, mut done) = (BTreeMap::new(), Vec::new());
    let until = deadline();
    while outcomes.len() < requested.len() {
        assert!(Instant::now() < until, "{} of {} calls are answered", outcomes.len(), requested.len());
        if let Some(completion) = client.try_completion().unwrap() {
            let (number, _) =
                requested.iter().find(|(_, call)| *call == completion.call_id()).expect("a request arrived");
            assert!(outcomes.insert(*number, completion.outcome()).is_none());
        }
        // The client continues its handshake when it reserves space, or waits.
        let _ = client.arm().unwrap().is_waiting();
        while let Some(request) = successor.try_receive().unwrap() {
            done.push(request.to_vec());
            request.reply(b"done").unwrap();
        }
        if victim.state() == 'T' {
            // SAFETY: no pointers.
            unsafe { libc::kill(victim.pid, libc::SIGCONT) };
        }
    }
    run.finish(victim, || ());
    for (number, outcome) in &outcomes {
        let request = if *number == 0 { numbered(0, 100) } else { numbered(*number, lanes.bytes()) };
        let times = done.iter().filter(|of| **of == request).count();
        match outcome {
            // By the draining service, or the other one.
            Outcome::Reply => assert_eq!(times, usize::from(*number != 0), "call {number}"),
            Outcome::Lost(Loss::PeerDied) => assert_eq!(times, 0, "call {number}"),
            outcome => panic!("call {number}: {outcome:?}"),
        }
    }
    drop((client, successor));
    assert_eq!(run.left(), Vec::<String>::new());
}
