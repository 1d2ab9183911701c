//! Calls between threads and processes: any order and size, full lanes, slow readers, deaths and ends. This file has
//! the shared parts, sizes, order, notifications and pools; `call/` has the rest by claim.

mod cancels;
mod ends;
mod loops;
mod model;
mod rooms;
mod streams;

use crate::support::*;
use pelton::{CallId, Client, Completion, Error, Options, Outcome, Request, Responder, Sent, Service};
use rustix::process::Signal;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

/// Lanes so small that most messages of these tests do not fit.
const TINY: u64 = 1 << 16;

fn tiny<M>() -> Options<M> {
    <Options>::new().capacity(TINY).connect_deadline(deadline()).cast()
}

/// Replies with the request's own bytes, in place where space is free.
fn echo(mut request: Request<'_>) {
    if request.is_notification() {
        return;
    }
    let (bytes, responder) = request.split();
    if let Ok(Some(mut reservation)) = responder.try_reserve(bytes.len()) {
        reservation.copy_from_slice(bytes);
        reservation.reply().unwrap();
        return;
    }
    let (bytes, responder) = request.into_parts();
    // A client that has exited gets no reply.
    let _ = responder.reply(&bytes);
}

fn numbered(number: u64, bytes: usize) -> Vec<u8> {
    let mut payload_of = Vec::new();
    payload(number, bytes, &mut payload_of);
    payload_of
}

/// A service on a thread of its own, until the value is dropped.
struct Serving {
    stopper: pelton::Stopper,
    thread: Option<std::thread::JoinHandle<pelton::Result<()>>>,
}

impl Serving {
    fn start(
        options: &Options,
        name: &str,
        threads: usize,
        handler: impl Fn(Request<'_>) + Sync + Send + 'static,
    ) -> Serving {
        let mut service = Service::listen_with(name, &options.cast()).unwrap();
        let stopper = service.stopper();
        Serving { stopper, thread: Some(std::thread::spawn(move || service.run(threads, handler))) }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stopper.stop();
        let ended = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            ended.unwrap().unwrap();
        }
    }
}

/// A service, and a client of it that has sent that many requests.
fn service_with_calls(
    dir: &TestDir,
    calls: usize,
) -> (pelton::Service, pelton::Client, Vec<Responder>, Vec<pelton::CallId>) {
    let name = dir.name();
    let mut service = Service::listen_with(&name, &tiny()).unwrap();
    let asking = std::thread::spawn(move || {
        let mut client = Client::connect_with(&name, &tiny()).unwrap();
        let ids = (0..calls).map(|_| client.submit(b"asked").unwrap()).collect();
        (client, ids)
    });
    let responders = (0..calls).map(|_| service.receive_until(deadline()).unwrap().unwrap().into_responder()).collect();
    let (client, ids) = asking.join().unwrap();
    (service, client, responders, ids)
}

#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    let options = options(&role);
    match role.get("role") {
        // Echoes, on that many threads.
        "echo" => {
            let mut service = Service::listen_with(role.get("name"), &options).unwrap();
            report("listening");
            service.run(role.number("threads").unwrap_or(1) as usize, echo).unwrap();
        }
        // Takes requests and answers none.
        "mute" => {
            let mut service = Service::listen_with(role.get("name"), &options).unwrap();
            report("listening");
            let mut kept = Vec::new();
            for _ in 0..role.number("count").unwrap() {
                kept.push(service.receive().unwrap().into_responder());
            }
            report("taken");
            read_line_from_parent();
        }
        // Sends that many requests and reads nothing, until it is killed.
        "deaf" => {
            let mut client = Client::connect_with(role.get("name"), &options.cast()).unwrap();
            let mut requested = 0;
            while requested < role.number("count").unwrap() && client.try_submit(&[7; 3000]).unwrap().is_some() {
                requested += 1;
            }
            report(requested);
            read_line_from_parent();
        }
        // Many clients, all kept open.
        "many" => {
            let clients: Vec<Client> = (0..role.number("count").unwrap())
                .map(|_| {
                    let mut client = Client::connect_with(role.get("name"), &options.cast()).unwrap();
                    assert_eq!(&*client.call_until(b"here", deadline()).unwrap().expect("no answer"), b"here");
                    client
                })
                .collect();
            report("connected");
            read_line_from_parent();
            drop(clients);
        }
        "caller" => {
            let mut client = Client::connect_with(role.get("name"), &options.cast()).unwrap();
            for number in 0..role.number("count").unwrap() {
                let request = numbered(number, (number % 3000) as usize);
                assert_eq!(*client.call(&request).unwrap(), *request, "call {number}");
            }
        }
        // Has no memory for that many thread stacks.
        "cramped" => {
            use rustix::process::{Resource, Rlimit, setrlimit};
            let mut service = Service::listen_with(role.get("name"), &options).unwrap();
            let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
            let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
            let most = Some(pages * 4096 + (40 << 20));
            setrlimit(Resource::As, Rlimit { current: most, maximum: most }).unwrap();
            let error = service.run(500, echo).unwrap_err();
            assert!(matches!(&error, Error::System { what, .. } if what.contains("thread")), "{error}");
            report("no thread");
        }
        role => panic!("{role}"),
    }
}

#[test]
fn replies_of_every_size_pass_through_lanes_smaller_than_them() {
    let dir = TestDir::new("echo of every size");
    for threads in [1, 3] {
        for capacity in [TINY, 1 << 22] {
            let service = Child::start(
                Role::new(child, "echo").with("name", dir.name()).with("capacity", capacity).with("threads", threads),
            );
            service.expect("listening");
            let mut client = Client::connect_with(&dir.name(), &Options::new().capacity(capacity)).unwrap();
            assert_eq!(client.peer().unwrap().pid, service.pid());
            let limit = capacity as usize / 2 - 32;
            let near = |bytes: usize| bytes - 26..bytes + 3;
            let sizes = (0..200).chain(near(limit)).chain([limit * 2, limit * 3 + 1, 1_000_003]);
            for (number, bytes) in sizes.enumerate() {
                let request = numbered(number as u64, bytes);
                let reply = client.call_until(&request, deadline()).unwrap().expect("no answer");
                assert_eq!(reply.outcome(), Outcome::Reply);
                assert!(*reply == *request, "{bytes} bytes");
            }
            assert_eq!((client.in_flight(), client.completions_dropped()), (0, 0));
            service.kill();
        }
    }
}

#[test]
fn a_thousand_calls_in_flight_get_replies_in_any_order() {
    let dir = TestDir::new("a thousand in flight");
    let mut service = Service::listen_with(&dir.name(), &tiny()).unwrap();
    let mut client = {
        let name = dir.name();
        let connecting = std::thread::spawn(move || Client::connect_with(&name, &tiny()).unwrap());
        while !connecting.is_finished() {
            let _ = service.receive_until(Instant::now() + Duration::from_millis(1)).unwrap();
        }
        connecting.join().unwrap()
    };
    let mut requested = HashMap::new();
    let mut taken: Vec<(Vec<u8>, Responder)> = Vec::new();
    while requested.len() < 1024 {
        let number = requested.len() as u64;
        let request = numbered(number, 40);
        match client.try_submit(&request).unwrap() {
            Some(call) => assert!(requested.insert(call, request).is_none(), "{call:?} twice"),
            None => {
                while let Some(request) = service.try_receive().unwrap() {
                    taken.push(request.into_parts());
                }
            }
        }
    }
    assert!(client.try_submit(b"one more").unwrap().is_none(), "there is no place for it");
    while let Some(request) = service.try_receive().unwrap() {
        taken.push(request.into_parts());
    }
    assert_eq!(taken.len(), 1024);
    let mut random = Random::new(7);
    let mut answered = 0;
    while answered < 1024 {
        if !taken.is_empty() {
            let (bytes, responder) = taken.swap_remove(random.below(taken.len() as u64) as usize);
            responder.reply(&bytes).unwrap();
        }
        // Queued requests are also written as space becomes free.
        assert!(service.try_receive().unwrap().is_none());
        while taken.len() < 500
            && let Some(reply) = client.try_completion().unwrap()
        {
            assert_eq!(*reply, *requested.remove(&reply.call_id()).expect("one reply for each"));
            answered += 1;
        }
    }
    assert!(matches!(client.completion(), Err(Error::Refused(_))), "nothing to wait for");
}

#[test]
fn full_lanes_never_deadlock() {
    let dir = TestDir::new("deadlock");
    for threads in [1, 3] {
        let _serving = Serving::start(&tiny(), &dir.name(), threads, |request| {
            // More than the lane holds, for less than a fifth of it.
            let reply = request.repeat(5);
            request.reply(&reply).unwrap();
        });
        let mut client = Client::connect_with(&dir.name(), &tiny()).unwrap();
        let mut random = Random::new(threads as u64);
        let requested: HashMap<CallId, Vec<u8>> = (0..300)
            .map(|number| {
                let request = numbered(number, random.below(40_000) as usize);
                // The client takes no completion between the calls.
                (client.submit_until(&request, deadline()).unwrap().expect("deadlock"), request)
            })
            .collect();
        for _ in 0..requested.len() {
            let reply = client.completion_until(deadline()).unwrap().expect("deadlock");
            assert!(*reply == *requested[&reply.call_id()].repeat(5));
        }
    }
}

#[test]
fn a_thread_that_awaits_one_call_takes_the_replies_to_others_later() {
    let dir = TestDir::new("one of many");
    let _serving = Serving::start(&tiny(), &dir.name(), 2, echo);
    let mut client = Client::connect_with(&dir.name(), &tiny()).unwrap();
    let calls: Vec<CallId> = (0..200).map(|number| client.submit(&numbered(number, 900)).unwrap()).collect();
    for number in (0..200u64).rev().step_by(2) {
        let reply = client.completion_of_until(calls[number as usize], deadline()).unwrap().expect("no answer");
        assert_eq!(*reply, *numbered(number, 900));
    }
    for _ in 0..100 {
        let reply = client.completion_until(deadline()).unwrap().expect("no answer");
        let number = calls.iter().position(|call| *call == reply.call_id()).unwrap() as u64;
        assert!(number.is_multiple_of(2) && *reply == *numbered(number, 900));
    }
    assert!(matches!(client.completion_of(calls[0]), Err(Error::Refused(_))));
}

#[test]
fn failures_are_values_and_a_dropped_responder_abandons_its_call() {
    let dir = TestDir::new("failures");
    let serving = Serving::start(&tiny(), &dir.name(), 2, |request| match &*request {
        b"fail" => request.fail(42, b"why").unwrap(),
        b"forget" => {}
        b"panic" => panic!("of a handler, on purpose"),
        b"panic while it writes" => {
            let mut responder = request.into_responder();
            let _reservation = responder.try_reserve(10).unwrap().expect("an empty lane has free space");
            panic!("a deliberate panic in a handler");
        }
        b"end" => request.into_responder().end().unwrap(),
        b"large" => request.fail(u32::MAX, &[3; 100_000]).unwrap(),
        b"too large" => {
            let error = request.reply(&[0; 200_001]).unwrap_err();
            assert!(matches!(error, Error::TooLarge { bytes: 200_001, bytes_max: 200_000 }), "{error}");
        }
        _ => echo(request),
    });
    let mut client = Client::connect_with(&dir.name(), &tiny().call_bytes_max(200_000)).unwrap();
    let mut ask = |request: &[u8]| {
        let answer = client.call_until(request, deadline()).unwrap().expect("no answer");
        (answer.outcome(), answer.into_vec())
    };
    assert_eq!(ask(b"fail"), (Outcome::Failed(42), b"why".to_vec()));
    assert_eq!(ask(b"forget"), (Outcome::Abandoned, vec![]));
    assert_eq!(ask(b"panic"), (Outcome::Abandoned, vec![]));
    assert_eq!(ask(b"panic while it writes"), (Outcome::Abandoned, vec![]));
    assert_eq!(ask(b"end"), (Outcome::End, vec![]));
    assert_eq!(ask(b"large"), (Outcome::Failed(u32::MAX), vec![3; 100_000]));
    assert_eq!(ask(b"too large"), (Outcome::Abandoned, vec![]));
    assert_eq!(ask(b"anything"), (Outcome::Reply, b"anything".to_vec()));
    drop(serving);
}

#[test]
fn a_request_too_large_is_refused_with_its_size_and_the_limit() {
    let dir = TestDir::new("too large");
    let _serving = Serving::start(&tiny().call_bytes_max(100_000), &dir.name(), 1, echo);
    let mut client = Client::connect_with(&dir.name(), &tiny()).unwrap();
    assert_eq!(client.request_bytes_max(), 100_000);
    for error in [
        client.submit(&[0; 100_001]).unwrap_err(),
        client.notify(&[0; 100_001]).unwrap_err(),
        client.try_reserve(100_001).unwrap_err(),
    ] {
        assert!(matches!(error, Error::TooLarge { bytes: 100_001, bytes_max: 100_000 }), "{error}");
    }
    assert!(matches!(client.try_reserve(90_000), Err(Error::TooLarge { .. })), "it does not fit in place");
    assert_eq!(client.call(&[1; 100_000]).unwrap().len(), 100_000);
}

#[test]
fn notifications_arrive_in_order_and_get_no_reply() {
    let dir = TestDir::new("notifications");
    let mut service = Service::listen_with(&dir.name(), &tiny()).unwrap();
    let name = dir.name();
    let sizes = Sizes::Random(11, 100_000);
    let notifying = std::thread::spawn(move || {
        let mut client = Client::connect_with(&name, &tiny()).unwrap();
        for number in 0..300 {
            client.notify(&numbered(number, sizes.of(number))).unwrap();
        }
    });
    let mut wanted = Vec::new();
    for number in 0..300 {
        let request = service.receive_until(deadline()).unwrap().expect("a notification is lost");
        assert!(request.is_notification() && !request.is_cancelled() && request.deadline().is_none());
        check(number, sizes, &request, &mut wanted);
        assert!(matches!(request.reply(b"no"), Err(Error::Refused(_))));
    }
    notifying.join().unwrap();
    assert!(service.try_receive().unwrap().is_none());
}

#[test]
fn only_a_client_and_a_service_make_a_link() {
    let dir = TestDir::new("other roles");
    let mut service = Service::listen(&dir.name()).unwrap();
    let refused =
        |error: Error| assert!(matches!(&error, Error::Refused(why) if why.contains("that one wants")), "{error}");
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| pelton::Sender::connect(&dir.name()).map(|_| ()));
        let receiving = scope.spawn(|| pelton::Receiver::connect(&dir.name()).map(|_| ()));
        let calling = scope.spawn(|| Client::connect(&dir.name()).unwrap().call(b"me").unwrap().into_vec());
        service.receive_until(deadline()).unwrap().expect("the client came").reply(b"you").unwrap();
        assert_eq!(calling.join().unwrap(), b"you");
        while !sending.is_finished() || !receiving.is_finished() {
            assert!(service.receive_until(Instant::now() + Duration::from_millis(1)).unwrap().is_none());
        }
        refused(sending.join().unwrap().unwrap_err());
        refused(receiving.join().unwrap().unwrap_err());
    });
    drop(service);
    let mut receiver = Options::new().gather_at(&dir.name()).unwrap();
    std::thread::scope(|scope| {
        let calling = scope.spawn(|| Client::connect(&dir.name()).map(|_| ()));
        while !calling.is_finished() {
            assert!(receiver.receive_until(Instant::now() + Duration::from_millis(1)).unwrap().is_none());
        }
        refused(calling.join().unwrap().unwrap_err());
    });
}

#[test]
fn a_service_needs_few_descriptors_for_a_client() {
    let dir = TestDir::new("many clients");
    let service = Child::start(Role::new(child, "echo").with("name", dir.name()));
    service.expect("listening");
    let descriptors = || kernel::descriptors_of(service.pid());
    let mut first = Client::connect(&dir.name()).unwrap();
    let _ = first.call(b"here").unwrap();
    let before = descriptors();
    let count = 60;
    let clients = Child::start(Role::new(child, "many").with("name", dir.name()).with("count", count));
    clients.expect("connected");
    let each = (descriptors() - before) / count;
    assert!(each <= 5, "{each} for each client: with 20,000 a thousand clients must be possible");
    clients.kill();
    let until = deadline();
    while descriptors() > before {
        let _ = first.call(b"here").unwrap();
        assert!(Instant::now() < until, "{} descriptors of dead clients are left", descriptors() - before);
    }
}

#[test]
fn processes_call_one_service_concurrently() {
    let dir = TestDir::new("side by side");
    let _serving = Serving::start(&tiny(), &dir.name(), 3, echo);
    let callers: Vec<Child> = (0..4)
        .map(|_| {
            Child::start(Role::new(child, "caller").with("name", dir.name()).with("count", 3000).with("capacity", TINY))
        })
        .collect();
    callers.into_iter().for_each(Child::wait_for_success);
}

#[test]
fn a_stopped_pool_ends_after_its_handlers_return() {
    let dir = TestDir::new("stopped");
    let mut service = Service::listen_with(&dir.name(), &tiny()).unwrap();
    let stopper = service.stopper();
    let done = Mutex::new(0);
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| {
            service.run(4, |request| {
                // From within a handler.
                stopper.stop();
                *done.lock().unwrap() += 1;
                request.reply(b"the last").unwrap();
            })
        });
        let mut client = Client::connect_with(&dir.name(), &tiny()).unwrap();
        assert_eq!(&*client.call_until(b"stop", deadline()).unwrap().expect("no answer"), b"the last");
        serving.join().unwrap().unwrap();
    });
    assert_eq!(*done.lock().unwrap(), 1);
    assert!(service.receive().unwrap_err().is_closed(), "it stays stopped");
}

#[test]
fn a_call_gets_one_reply() {
    let dir = TestDir::new("a call gets one reply");
    let name = dir.name();
    let mut service =
        Service::listen_with(&name, &<Options>::new().capacity(TINY).membership_events(true).cast()).unwrap();
    let asking = std::thread::spawn(move || {
        let mut client = Client::connect_with(&name, &tiny()).unwrap();
        assert!(client.call_until(b"one", deadline()).unwrap().is_some());
        assert!(client.call_until(b"two", deadline()).unwrap().is_some());
    });
    let mut request = service.receive_until(deadline()).unwrap().unwrap();
    let (_, responder) = request.split();
    responder.try_reserve(1).unwrap().unwrap().reply().unwrap();
    assert!(matches!(request.reply(b"again"), Err(Error::Refused(_))));
    service.receive_until(deadline()).unwrap().unwrap().reply(b"").unwrap();
    asking.join().unwrap();
}

#[test]
fn a_pool_that_cannot_start_all_its_threads_takes_no_call_and_fails() {
    let dir = TestDir::new("threads that cannot be started");
    let pool = Child::start(Role::new(child, "cramped").with("name", dir.name()));
    pool.expect("no thread");
    pool.wait_for_success();
}

#[test]
fn the_error_of_a_call_too_large_names_more_than_the_capacity() {
    let dir = TestDir::new("words about size");
    let (_service, mut client, _responders, _) = service_with_calls(&dir, 1);
    let error = client.submit(&vec![0; (64 << 20) + 1]).unwrap_err();
    assert!(error.to_string().contains("call_bytes_max"), "{error}");
}

#[test]
fn a_client_counts_its_rings_of_a_sleeping_service() {
    let dir = TestDir::new("rings");
    let (mut service, mut client, _responders, _) = service_with_calls(&dir, 1);
    for rung in 1..4 {
        let before = client.wakes_sent();
        assert!(service.arm().unwrap().is_waiting());
        client.submit(b"wakes it").unwrap();
        client.submit(b"finds it awake").unwrap();
        assert_eq!(client.wakes_sent(), before + 1, "{rung}");
        for _ in 0..2 {
            drop(service.try_receive().unwrap().unwrap().into_responder());
        }
        service.disarm();
    }
}

#[test]
fn a_call_that_did_not_succeed_is_an_error_by_ok() {
    let dir = TestDir::new("a call that did not succeed is an error by ok");
    let serving = Serving::start(&tiny(), &dir.name(), 1, |request| match &*request {
        b"secret" => request.reply(b"secret").unwrap(),
        b"fail" => request.fail(7, b"secret").unwrap(),
        b"parts" => {
            let mut responder = request.into_responder();
            responder.part(b"secret").unwrap();
            responder.end().unwrap();
        }
        _ => drop(request),
    });
    let mut client = Client::connect_with(&dir.name(), &tiny()).unwrap();
    assert_eq!(client.call(b"secret").unwrap().ok().unwrap().as_ref(), b"secret");
    match client.call(b"fail").unwrap().ok().unwrap_err() {
        Error::CallFailed(failure) => assert_eq!((failure.code, &*failure.bytes), (7, &b"secret"[..])),
        other => panic!("{other}"),
    }
    assert!(matches!(client.call(b"forget").unwrap().ok(), Err(Error::CallAbandoned)));
    let parts = client.submit(b"parts").unwrap();
    assert_eq!(client.completion_of(parts).unwrap().ok().unwrap().outcome(), Outcome::Part);
    assert_eq!(client.completion_of(parts).unwrap().ok().unwrap().outcome(), Outcome::End);
    drop(serving);
}

#[test]
fn no_debug_output_has_the_bytes_of_a_call() {
    let dir = TestDir::new("no debug output has the bytes of a call");
    let hides = |what: &dyn std::fmt::Debug| {
        let text = format!("{what:?} {what:#?}");
        assert!(!["secret", "115, 101", "115,\n"].iter().any(|secret| text.contains(secret)), "{text}");
    };
    let name = dir.name();
    std::thread::scope(|scope| {
        let mut service = Service::listen_with(&name, &tiny()).unwrap();
        let asking = scope.spawn(|| {
            let mut client = Client::connect_with(&name, &tiny()).unwrap();
            let mut reservation = client.reserve(6).unwrap();
            reservation.copy_from_slice(b"secret");
            hides(&reservation);
            assert_eq!(reservation.as_ref(), b"secret");
            let first = reservation.submit().unwrap();
            let second = client.submit(b"secret").unwrap();
            // The first is stored meanwhile.
            let completion = client.completion_of(second).unwrap();
            hides(&completion);
            assert_eq!(completion.as_ref(), b"secret");
            drop(completion);
            hides(&client);
            let completion = client.completion_of(first).unwrap();
            hides(&completion);
            assert_eq!(completion.as_ref(), b"secret");
        });
        for _ in 0..2 {
            let mut request = service.receive_until(deadline()).unwrap().unwrap();
            hides(&request);
            assert_eq!(request.as_ref(), b"secret");
            let (_, responder) = request.split();
            let mut reservation = responder.try_reserve(6).unwrap().unwrap();
            reservation.copy_from_slice(b"secret");
            hides(&reservation);
            assert_eq!(reservation.as_ref(), b"secret");
            reservation.reply().unwrap();
            hides(&request);
        }
        hides(&service);
        asking.join().unwrap();
    });
}
