//! Calls: asked and answered between threads and processes, in any order and size, by full lanes, slow readers, deaths and ends.

mod support;

use pelton::{CallId, Client, Completion, Error, Options, Outcome, Request, Responder, Sent, Service};
use rustix::process::Signal;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};
use support::*;

/// Lanes so small that most of what these tests send does not fit.
const TINY: u64 = 1 << 16;

fn tiny() -> Options {
    Options::new().capacity(TINY).connect_deadline(deadline())
}

/// Answers with the request's own bytes, in place where there is room.
fn echo(mut request: Request<'_>) {
    if request.is_notification() {
        return;
    }
    let (bytes, responder) = request.split();
    if let Ok(Some(mut room)) = responder.try_reserve(bytes.len()) {
        room.copy_from_slice(bytes);
        room.reply(bytes.len()).unwrap();
        return;
    }
    let (bytes, responder) = request.into_parts();
    // A client that has gone is not answered.
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
        let mut service = options.listen_service(name).unwrap();
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

#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    let options = options(&role);
    match role.get("role") {
        // Echoes, on so many threads.
        "echo" => {
            let mut service = options.listen_service(role.get("name")).unwrap();
            say("listening");
            service.run(role.number("threads").unwrap_or(1) as usize, echo).unwrap();
        }
        // Takes requests and answers none.
        "mute" => {
            let mut service = options.listen_service(role.get("name")).unwrap();
            say("listening");
            let mut kept = Vec::new();
            for _ in 0..role.number("count").unwrap() {
                kept.push(service.receive().unwrap().into_responder());
            }
            say("taken");
            hear();
        }
        // Asks so much and reads nothing, until it is killed.
        "deaf" => {
            let mut client = options.connect_client(role.get("name")).unwrap();
            let mut asked = 0;
            while asked < role.number("count").unwrap() && client.try_submit(&[7; 3000]).unwrap().is_some() {
                asked += 1;
            }
            say(asked);
            hear();
        }
        // Many clients, kept.
        "many" => {
            let clients: Vec<Client> = (0..role.number("count").unwrap())
                .map(|_| {
                    let mut client = options.connect_client(role.get("name")).unwrap();
                    assert_eq!(&*client.call_until(b"here", deadline()).unwrap().expect("no answer"), b"here");
                    client
                })
                .collect();
            say("connected");
            hear();
            drop(clients);
        }
        "caller" => {
            let mut client = options.connect_client(role.get("name")).unwrap();
            for number in 0..role.number("count").unwrap() {
                let request = numbered(number, (number % 3000) as usize);
                assert_eq!(*client.call(&request).unwrap(), *request, "call {number}");
            }
        }
        // Has no memory for the stacks of so many threads.
        "cramped" => {
            use rustix::process::{Resource, Rlimit, setrlimit};
            let mut service = options.listen_service(role.get("name")).unwrap();
            let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
            let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
            let most = Some(pages * 4096 + (40 << 20));
            setrlimit(Resource::As, Rlimit { current: most, maximum: most }).unwrap();
            let error = service.run(500, echo).unwrap_err();
            assert!(matches!(&error, Error::System { what, .. } if what.contains("thread")), "{error}");
            say("no thread");
        }
        role => panic!("{role}"),
    }
}

#[test]
fn replies_of_every_size_come_back_from_another_process_through_lanes_that_they_do_not_fit_into() {
    let place = Place::new("echo of every size");
    for threads in [1, 3] {
        for capacity in [TINY, 1 << 22] {
            let service = Child::start(
                Role::new("echo").with("name", place.name()).with("capacity", capacity).with("threads", threads),
            );
            service.expect("listening");
            let mut client = Options::new().capacity(capacity).connect_client(&place.name()).unwrap();
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
            assert_eq!((client.in_flight(), client.late()), (0, 0));
            service.kill();
        }
    }
}

#[test]
fn a_thousand_calls_in_flight_are_answered_in_any_order() {
    let place = Place::new("a thousand in flight");
    let mut service = tiny().listen_service(&place.name()).unwrap();
    let mut client = {
        let name = place.name();
        let connecting = std::thread::spawn(move || tiny().connect_client(&name).unwrap());
        while !connecting.is_finished() {
            let _ = service.receive_until(Instant::now() + Duration::from_millis(1)).unwrap();
        }
        connecting.join().unwrap()
    };
    let mut asked = HashMap::new();
    let mut taken: Vec<(Vec<u8>, Responder)> = Vec::new();
    while asked.len() < 1024 {
        let number = asked.len() as u64;
        let request = numbered(number, 40);
        match client.try_submit(&request).unwrap() {
            Some(call) => assert!(asked.insert(call, request).is_none(), "{call:?} twice"),
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
        // Also what does not fit any more is written as room comes.
        assert!(service.try_receive().unwrap().is_none());
        while taken.len() < 500
            && let Some(reply) = client.try_completion().unwrap()
        {
            assert_eq!(*reply, *asked.remove(&reply.call()).expect("answered once"));
            answered += 1;
        }
    }
    assert!(matches!(client.completion(), Err(Error::Refused(_))), "nothing to wait for");
}

#[test]
fn full_lanes_never_wait_for_each_other() {
    let place = Place::new("deadlock");
    for threads in [1, 3] {
        let _serving = Serving::start(&tiny(), &place.name(), threads, |request| {
            // More than the lane holds, for less than a fifth of it.
            let reply = request.repeat(5);
            request.reply(&reply).unwrap();
        });
        let mut client = tiny().connect_client(&place.name()).unwrap();
        let mut random = Random::new(threads as u64);
        let asked: HashMap<CallId, Vec<u8>> = (0..300)
            .map(|number| {
                let request = numbered(number, random.below(40_000) as usize);
                // Never a completion taken between.
                (client.submit_until(&request, deadline()).unwrap().expect("deadlock"), request)
            })
            .collect();
        for _ in 0..asked.len() {
            let reply = client.completion_until(deadline()).unwrap().expect("deadlock");
            assert!(*reply == *asked[&reply.call()].repeat(5));
        }
    }
}

#[test]
fn who_awaits_one_call_finds_the_answers_to_others_later() {
    let place = Place::new("one of many");
    let _serving = Serving::start(&tiny(), &place.name(), 2, echo);
    let mut client = tiny().connect_client(&place.name()).unwrap();
    let calls: Vec<CallId> = (0..200).map(|number| client.submit(&numbered(number, 900)).unwrap()).collect();
    for number in (0..200u64).rev().step_by(2) {
        let reply = client.completion_of_until(calls[number as usize], deadline()).unwrap().expect("no answer");
        assert_eq!(*reply, *numbered(number, 900));
    }
    for _ in 0..100 {
        let reply = client.completion_until(deadline()).unwrap().expect("no answer");
        let number = calls.iter().position(|call| *call == reply.call()).unwrap() as u64;
        assert!(number.is_multiple_of(2) && *reply == *numbered(number, 900));
    }
    assert!(matches!(client.completion_of(calls[0]), Err(Error::Refused(_))));
}

#[test]
fn a_service_that_dies_fails_its_pending_calls_at_once() {
    let place = Place::new("dead service");
    for how in ["wait", "loop", "full"] {
        let service =
            Child::start(Role::new("mute").with("name", place.name()).with("count", 10).with("capacity", TINY));
        service.expect("listening");
        let mut client = tiny().connect_client(&place.name()).unwrap();
        let call = client.submit(b"first").unwrap();
        for _ in 1..10 {
            client.submit(b"more").unwrap();
        }
        service.expect("taken");
        let error = match how {
            "wait" => {
                let killing = std::thread::spawn({
                    let thread = this_thread();
                    move || {
                        wait_until_thread_polls(thread);
                        service.kill();
                    }
                });
                let error = client.completion_of(call).unwrap_err();
                killing.join().unwrap();
                error
            }
            "loop" => {
                assert!(client.arm().unwrap(), "nothing is answered");
                service.signal(Signal::KILL);
                readable(client.as_fd());
                service.kill();
                let until = deadline();
                loop {
                    assert!(Instant::now() < until);
                    match client.arm().and_then(|_| client.try_completion().map(|found| assert!(found.is_none()))) {
                        Ok(()) => {}
                        Err(error) => break error,
                    }
                }
            }
            // While it waits for room.
            _ => {
                while client.try_submit(&[1; 1000]).unwrap().is_some() {}
                let killing = std::thread::spawn({
                    let thread = this_thread();
                    move || {
                        wait_until_thread_polls(thread);
                        service.kill();
                    }
                });
                let error = client.submit(&[1; 1000]).unwrap_err();
                killing.join().unwrap();
                error
            }
        };
        assert!(error.is_peer_died(), "{how}: {error}");
        assert!(client.completion_until(deadline()).unwrap_err().is_peer_died());
        assert!(client.submit(b"again").is_err());
    }
}

#[test]
fn a_service_that_closes_says_so_after_what_it_answered() {
    let place = Place::new("closed service");
    let mut service = Service::listen(&place.name()).unwrap();
    let name = place.name();
    let asking = std::thread::spawn(move || {
        let mut client = tiny().connect_client(&name).unwrap();
        let (one, _) = (client.submit(b"one").unwrap(), client.submit(b"two").unwrap());
        assert_eq!(client.completion().unwrap().call(), one);
        client.completion().map(|reply| reply.into_vec())
    });
    let one = service.receive().unwrap();
    assert_eq!(&*one, b"one");
    one.reply(b"1").unwrap();
    let two = service.receive().unwrap().into_responder();
    drop(service);
    let error = asking.join().unwrap().unwrap_err();
    assert!(error.is_closed(), "{error}");
    assert!(two.reply(b"2").is_err(), "nobody is there");
}

#[test]
fn a_client_that_dies_leaves_the_others_untouched() {
    let place = Place::new("dead clients");
    let service = Child::start(Role::new("echo").with("name", place.name()).with("capacity", TINY).with("threads", 2));
    service.expect("listening");
    let mut client = tiny().connect_client(&place.name()).unwrap();
    let mut check = |numbers: std::ops::Range<u64>| {
        for number in numbers {
            let request = numbered(number, (number % 5000) as usize);
            let reply =
                client.call_until(&request, deadline()).unwrap().expect("a client's death keeps others waiting");
            assert!(*reply == *request);
        }
    };
    let deaf = || Child::start(Role::new("deaf").with("name", place.name()).with("capacity", TINY).with("count", 1000));
    for round in 0..5 {
        let dying: Vec<Child> = (0..3).map(|_| deaf()).collect();
        dying.iter().for_each(|child| assert!(child.line().parse::<u64>().unwrap() > 10));
        check(round * 1000..round * 1000 + 500);
        dying.into_iter().for_each(Child::kill);
        check(round * 1000 + 500..round * 1000 + 1000);
    }
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", service.pid())).unwrap().count();
    let until = deadline();
    // Nothing of the dead is kept, once it has looked.
    let few = 40;
    while descriptors() > few {
        check(0..10);
        assert!(Instant::now() < until, "{} descriptors are left", descriptors());
    }
}

#[test]
fn a_client_that_does_not_read_stalls_itself_alone_and_finds_all_later() {
    let place = Place::new("one does not read");
    let most = std::sync::Arc::new(AtomicUsize::new(0));
    let taken = most.clone();
    let _serving = Serving::start(&tiny(), &place.name(), 1, move |request| {
        if request.first() == Some(&1) {
            taken.fetch_add(1, Ordering::Relaxed);
        }
        let reply = request.repeat(100);
        request.reply(&reply).unwrap();
    });
    let (mut deaf, mut polite) =
        (tiny().connect_client(&place.name()).unwrap(), tiny().connect_client(&place.name()).unwrap());
    let mut asked = 0;
    let until = deadline();
    // Until nothing is taken of it any more, though it has asked.
    let mut before = usize::MAX;
    loop {
        while deaf.try_submit(&[1; 300]).unwrap().is_some() {
            asked += 1;
        }
        for _ in 0..50 {
            let reply = polite.call_until(&[2; 300], deadline()).unwrap().expect("stalled by another client");
            assert_eq!(*reply, [2; 30_000]);
        }
        let now = most.load(Ordering::Relaxed);
        if now == before && deaf.try_submit(&[1; 300]).unwrap().is_none() {
            break;
        }
        before = now;
        assert!(Instant::now() < until, "its requests are taken without end");
    }
    let taken = most.load(Ordering::Relaxed);
    assert!(taken < 10, "{taken} were taken, and their replies kept, of one who does not read");
    for _ in 0..asked {
        let reply = deaf.completion_until(deadline()).unwrap().expect("its replies are lost");
        assert_eq!(*reply, [1; 30_000]);
    }
}

#[test]
fn a_cancelled_call_is_told_to_the_service_and_its_late_reply_is_dropped() {
    let place = Place::new("cancel");
    let (told, telling) = mpsc::channel();
    let _serving = Serving::start(&tiny(), &place.name(), 2, move |request| {
        if *request != *b"slow" {
            return echo(request);
        }
        let (_, mut responder) = request.into_parts();
        told.send(()).unwrap();
        let until = deadline();
        while !responder.is_cancelled() && Instant::now() < until {
            let _ = responder.try_part(b"part").unwrap();
            std::thread::yield_now();
        }
        told.send(()).unwrap();
        responder.reply(b"late").unwrap();
    });
    let mut client = tiny().connect_client(&place.name()).unwrap();
    let slow = client.submit(b"slow").unwrap();
    telling.recv_timeout(DEADLINE).unwrap();
    assert_eq!(client.completion_of(slow).unwrap().outcome(), Outcome::Part);
    assert!(client.cancel(slow).unwrap());
    assert!(!client.cancel(slow).unwrap(), "once");
    telling.recv_timeout(DEADLINE).expect("the service is not told");
    assert!(matches!(client.completion_of(slow), Err(Error::Refused(_))), "nobody can wait for it");
    // Its place comes back once the service has let go of it.
    let until = deadline();
    while client.in_flight() > 0 {
        assert_eq!(&*client.call_until(b"other", until).unwrap().expect("no answer"), b"other");
    }
    assert!(client.late() > 0);
}

#[test]
fn a_cancel_reaches_a_stream_though_all_threads_are_in_streams_and_requests_wait_before_it() {
    let place = Place::new("all stream");
    for threads in [1, 3] {
        let serving = Serving::start(&tiny(), &place.name(), threads, |request| {
            if *request != *b"stream" {
                return echo(request);
            }
            let mut responder = request.into_responder();
            let until = deadline();
            // Also when it never hears of it, lest the test hang.
            while !responder.is_cancelled() && Instant::now() < until {
                assert_eq!(responder.part_until(b"more", until).unwrap(), Sent::Sent);
            }
            assert!(Instant::now() < until, "no cancel has come");
            responder.end().unwrap();
        });
        let mut client = tiny().connect_client(&place.name()).unwrap();
        let mut other = tiny().connect_client(&place.name()).unwrap();
        let mut silent: Vec<CallId> = (0..threads).map(|_| client.submit(b"stream").unwrap()).collect();
        let streams = silent.clone();
        while !silent.is_empty() {
            let part = client.completion_until(deadline()).unwrap().expect("no part");
            assert_eq!((part.outcome(), &*part), (Outcome::Part, &b"more"[..]));
            silent.retain(|call| *call != part.call());
        }
        // All threads are in streams, and nobody waits for requests.
        let mut asked: HashMap<CallId, Vec<u8>> = HashMap::new();
        for number in 0..200 {
            let request = numbered(number, 100);
            asked.insert(other.submit(&request).unwrap(), request);
        }
        let before = client.submit(b"asked before").unwrap();
        for stream in streams {
            assert!(client.cancel(stream).unwrap());
        }
        let answer = client.completion_of_until(before, deadline()).unwrap().expect("no thread is free");
        assert_eq!((answer.outcome(), &*answer), (Outcome::Reply, &b"asked before"[..]));
        drop(answer);
        while !asked.is_empty() {
            let answer = other.completion_until(deadline()).unwrap().expect("a request that waited is lost");
            assert_eq!(asked.remove(&answer.call()).as_deref(), Some(&*answer), "once, to its own");
        }
        drop(serving);
    }
}

#[test]
fn a_call_whose_deadline_passes_is_cancelled() {
    let place = Place::new("deadline");
    let (told, telling) = mpsc::channel();
    let _serving = Serving::start(&tiny(), &place.name(), 1, move |request| {
        told.send((request.deadline(), request.into_responder())).unwrap();
    });
    let mut client = tiny().connect_client(&place.name()).unwrap();
    let passes = Instant::now() + Duration::from_millis(20);
    assert!(client.call_until(b"anything", passes).unwrap().is_none());
    assert!(Instant::now() >= passes);
    let (deadline_told, responder) = telling.recv_timeout(DEADLINE).unwrap();
    let told = deadline_told.expect("the service is told of it");
    let apart = if told > passes { told - passes } else { passes - told };
    assert!(apart < Duration::from_millis(1), "told {apart:?} apart");
    let until = deadline();
    while !responder.is_cancelled() {
        assert!(Instant::now() < until);
        std::thread::yield_now();
    }
    responder.reply(b"late").unwrap();
    let other = client.submit(b"without").unwrap();
    let (without, responder) = telling.recv_timeout(DEADLINE).unwrap();
    assert_eq!(without, None);
    responder.reply(b"in time").unwrap();
    assert_eq!(&*client.completion_of(other).unwrap(), b"in time");
    assert_eq!((client.late(), client.in_flight()), (1, 0));
}

#[test]
fn streams_come_in_order_to_slow_readers_while_others_are_served() {
    let place = Place::new("streams");
    let ahead = std::sync::Arc::new(AtomicUsize::new(0));
    let (given, sizes) = (ahead.clone(), Sizes::Random(3, 50_000));
    let _serving = Serving::start(&tiny(), &place.name(), 3, move |request| {
        if request.len() != 8 {
            return echo(request);
        }
        let count = u64::from_le_bytes((*request).try_into().unwrap());
        let mut responder = request.into_responder();
        let mut bytes = Vec::new();
        for number in 0..count {
            payload(number, sizes.of(number), &mut bytes);
            match number % 3 {
                0 => responder.part(&bytes).unwrap(),
                1 => assert_eq!(responder.part_until(&bytes, deadline()).unwrap(), Sent::Sent),
                _ => {
                    while responder.try_part(&bytes).unwrap() == Sent::Full {
                        std::thread::yield_now();
                    }
                }
            }
            given.fetch_add(1, Ordering::Relaxed);
        }
        responder.end().unwrap();
    });
    let mut slow = tiny().connect_client(&place.name()).unwrap();
    let mut other = tiny().connect_client(&place.name()).unwrap();
    let (count, mut wanted) = (200u64, Vec::new());
    let streams = [(); 2].map(|()| slow.submit(&count.to_le_bytes()).unwrap());
    let mut next: HashMap<CallId, u64> = streams.into_iter().map(|call| (call, 0)).collect();
    let mut ended = 0;
    while ended < 2 {
        assert_eq!(&*other.call_until(b"other", deadline()).unwrap().expect("stalled by a slow reader"), b"other");
        let read: u64 = next.values().sum();
        assert!(ahead.load(Ordering::Relaxed) as u64 <= read + 1000, "parts are given without end");
        let part = slow.completion_until(deadline()).unwrap().expect("no part");
        let number = next.get_mut(&part.call()).unwrap();
        match part.outcome() {
            Outcome::Part => check(*number, sizes, &part, &mut wanted),
            Outcome::End => {
                assert_eq!((*number, part.len()), (count, 0));
                ended += 1;
                continue;
            }
            outcome => panic!("{outcome:?}"),
        }
        *number += 1;
    }
}

#[test]
fn parts_of_other_calls_are_kept_up_to_a_bound() {
    let place = Place::new("bounded");
    let stop = std::sync::Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let _serving = Serving::start(&tiny(), &place.name(), 2, move |request| {
        let is_quiet = *request == *b"quiet";
        let mut responder = request.into_responder();
        for number in 0.. {
            if stopped.load(Ordering::Relaxed) {
                break;
            }
            if is_quiet {
                std::thread::yield_now();
                continue;
            }
            let part = numbered(number, 10_000);
            while !stopped.load(Ordering::Relaxed)
                && responder.part_until(&part, Instant::now() + Duration::from_millis(1)).unwrap() != Sent::Sent
            {
            }
        }
    });
    let mut client = tiny().call_bytes_max(200_000).connect_client(&place.name()).unwrap();
    let (loud, quiet) = (client.submit(b"loud").unwrap(), client.submit(b"quiet").unwrap());
    let error = client.completion_of_until(quiet, deadline()).unwrap_err();
    assert!(matches!(&error, Error::Refused(why) if why.contains("bytes of parts")), "{error}");
    stop.store(true, Ordering::Relaxed);
    // Nothing of it is lost, and all is in order.
    for number in 0.. {
        let answer = client.completion_of_until(loud, deadline()).unwrap().expect("parts are lost");
        if answer.outcome() == Outcome::Abandoned {
            // What a part costs besides its bytes is counted too.
            assert!(number > 18, "{number}");
            break;
        }
        assert!(*answer == *numbered(number, 10_000), "part {number}");
    }
}

#[test]
fn failures_are_values_and_a_call_let_go_of_is_abandoned() {
    let place = Place::new("failures");
    let serving = Serving::start(&tiny(), &place.name(), 2, |request| match &*request {
        b"fail" => request.fail(42, b"why").unwrap(),
        b"forget" => {}
        b"panic" => panic!("of a handler, on purpose"),
        b"panic while it writes" => {
            let mut responder = request.into_responder();
            let _room = responder.try_reserve(10).unwrap().expect("an empty lane has room");
            panic!("of a handler that has room, on purpose");
        }
        b"end" => request.into_responder().end().unwrap(),
        b"large" => request.fail(u32::MAX, &[3; 100_000]).unwrap(),
        b"too large" => {
            let error = request.reply(&[0; 200_001]).unwrap_err();
            assert!(matches!(error, Error::TooLarge { bytes: 200_001, bytes_max: 200_000 }), "{error}");
        }
        _ => echo(request),
    });
    let mut client = tiny().call_bytes_max(200_000).connect_client(&place.name()).unwrap();
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
fn what_is_too_large_is_refused_with_both_numbers() {
    let place = Place::new("too large");
    let _serving = Serving::start(&tiny().call_bytes_max(100_000), &place.name(), 1, echo);
    let mut client = tiny().connect_client(&place.name()).unwrap();
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
fn notifications_come_in_order_and_are_not_answered() {
    let place = Place::new("notifications");
    let mut service = tiny().listen_service(&place.name()).unwrap();
    let name = place.name();
    let sizes = Sizes::Random(11, 100_000);
    let telling = std::thread::spawn(move || {
        let mut client = tiny().connect_client(&name).unwrap();
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
    telling.join().unwrap();
    assert!(service.try_receive().unwrap().is_none());
}

#[test]
fn both_sides_work_in_event_loops() {
    let place = Place::new("event loops");
    for how in [How::Poll, How::Epoll] {
        let mut service = tiny().listen_service(&place.name()).unwrap();
        let stopper = service.stopper();
        let serving = std::thread::spawn(move || {
            let turns = Loop::new(how, service.as_fd());
            let mut kept = VecDeque::new();
            loop {
                loop {
                    match service.try_receive() {
                        Ok(Some(request)) => kept.push_back(request.into_parts()),
                        Ok(None) => break,
                        Err(error) if error.is_closed() => return,
                        Err(error) => panic!("{error}"),
                    }
                }
                let armed = match service.arm() {
                    Err(error) if error.is_closed() => return,
                    armed => armed.unwrap(),
                };
                // Some later, when nothing else is to be done; and more than the lane has room for.
                let at_once = if armed { kept.len() } else { kept.len().saturating_sub(3) };
                for (bytes, responder) in kept.drain(..at_once) {
                    let _ = responder.reply(&bytes.repeat(4));
                }
                if armed && at_once == 0 {
                    turns.turn(service.as_fd());
                }
                service.disarm();
            }
        });
        for hold in [Duration::ZERO, Duration::from_micros(20)] {
            let mut client = tiny().hold(hold).connect_client(&place.name()).unwrap();
            let turns = Loop::new(how, client.as_fd());
            let mut random = Random::new(5);
            let (mut asked, mut answered) = (BTreeMap::new(), 0);
            let mut number = 0;
            while answered < 2000 {
                while asked.len() < 50 && number < 2000 {
                    let request = numbered(number, random.below(if number % 100 == 0 { 60_000 } else { 300 }) as usize);
                    let Some(call) = client.try_submit(&request).unwrap() else { break };
                    asked.insert(call, request);
                    number += 1;
                }
                while let Some(reply) = client.try_completion().unwrap() {
                    assert!(*reply == *asked.remove(&reply.call()).unwrap().repeat(4));
                    answered += 1;
                }
                if !asked.is_empty() && client.arm().unwrap() {
                    turns.turn(client.as_fd());
                    client.disarm();
                }
            }
        }
        stopper.stop();
        serving.join().unwrap();
    }
}

#[test]
fn requests_and_replies_are_written_in_place() {
    let place = Place::new("in place");
    let mut service = tiny().listen_service(&place.name()).unwrap();
    let name = place.name();
    let asking = std::thread::spawn(move || {
        let mut client = tiny().connect_client(&name).unwrap();
        let _ = client.reserve(100).unwrap();
        assert_eq!(client.in_flight(), 0, "nothing is asked with room given back");
        let mut room = client.reserve(100).unwrap();
        room[..7].copy_from_slice(b"request");
        let one = room.submit_bytes(7).unwrap();
        let two = client.reserve(0).unwrap().submit().unwrap();
        assert_eq!(&*client.completion_of(two).unwrap(), b"");
        let parts: Vec<_> = (0..2).map(|_| client.completion_of(one).map(Completion::into_vec).unwrap()).collect();
        assert_eq!(parts, [b"a part".to_vec(), b"the rest".to_vec()]);
    });
    let (bytes, mut one) = service.receive().unwrap().into_parts();
    assert_eq!(bytes, b"request");
    let (_, mut two) = service.receive().unwrap().into_parts();
    let mut room = one.try_reserve(10).unwrap().expect("an empty lane has room");
    room[..6].copy_from_slice(b"a part");
    // Another reply by this thread would wait for itself.
    assert!(matches!(two.try_reserve(1), Err(Error::Refused(_))));
    assert!(matches!(two.try_part(b"x"), Err(Error::Refused(_))));
    assert!(matches!(one_too_large(&mut two), Err(Error::Refused(_))));
    room.part(6).unwrap();
    drop(two.try_reserve(1).unwrap());
    two.try_reserve(1).unwrap().unwrap().reply(0).unwrap();
    assert!(!two.is_cancelled());
    one.reply(b"the rest").unwrap();
    drop(two);
    asking.join().unwrap();
}

fn one_too_large(responder: &mut Responder) -> pelton::Result<()> {
    responder.part(&[0; 100])
}

#[test]
fn only_a_client_and_a_service_make_a_link() {
    let place = Place::new("other roles");
    let mut service = Service::listen(&place.name()).unwrap();
    let refused =
        |error: Error| assert!(matches!(&error, Error::Refused(why) if why.contains("that one wants")), "{error}");
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| pelton::Sender::connect(&place.name()).map(|_| ()));
        let receiving = scope.spawn(|| pelton::Receiver::connect(&place.name()).map(|_| ()));
        let calling = scope.spawn(|| Client::connect(&place.name()).unwrap().call(b"me").unwrap().into_vec());
        service.receive_until(deadline()).unwrap().expect("the client came").reply(b"you").unwrap();
        assert_eq!(calling.join().unwrap(), b"you");
        while !sending.is_finished() || !receiving.is_finished() {
            assert!(service.receive_until(Instant::now() + Duration::from_millis(1)).unwrap().is_none());
        }
        refused(sending.join().unwrap().unwrap_err());
        refused(receiving.join().unwrap().unwrap_err());
    });
    drop(service);
    let mut receiver = Options::new().gather_at(&place.name()).unwrap();
    std::thread::scope(|scope| {
        let calling = scope.spawn(|| Client::connect(&place.name()).map(|_| ()));
        while !calling.is_finished() {
            assert!(receiver.receive_until(Instant::now() + Duration::from_millis(1)).unwrap().is_none());
        }
        refused(calling.join().unwrap().unwrap_err());
    });
}

#[test]
fn a_client_costs_a_service_few_descriptors() {
    let place = Place::new("many clients");
    let service = Child::start(Role::new("echo").with("name", place.name()));
    service.expect("listening");
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", service.pid())).unwrap().count();
    let mut first = Client::connect(&place.name()).unwrap();
    first.call(b"here").unwrap();
    let before = descriptors();
    let count = 60;
    let clients = Child::start(Role::new("many").with("name", place.name()).with("count", count));
    clients.expect("connected");
    let each = (descriptors() - before) / count;
    assert!(each <= 5, "{each} for each client: with 20,000 a thousand clients must be possible");
    clients.kill();
    let until = deadline();
    while descriptors() > before {
        first.call(b"here").unwrap();
        assert!(Instant::now() < until, "{} descriptors of dead clients are left", descriptors() - before);
    }
}

#[test]
fn processes_call_one_service_side_by_side() {
    let place = Place::new("side by side");
    let _serving = Serving::start(&tiny(), &place.name(), 3, echo);
    let callers: Vec<Child> = (0..4)
        .map(|_| {
            Child::start(Role::new("caller").with("name", place.name()).with("count", 3000).with("capacity", TINY))
        })
        .collect();
    callers.into_iter().for_each(Child::wait_well);
}

#[test]
fn a_pool_ends_when_it_is_stopped_and_its_handlers_are_done() {
    let place = Place::new("stopped");
    let mut service = tiny().listen_service(&place.name()).unwrap();
    let stopper = service.stopper();
    let done = Mutex::new(0);
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| {
            service.run(4, |request| {
                // From within.
                stopper.stop();
                *done.lock().unwrap() += 1;
                request.reply(b"the last").unwrap();
            })
        });
        let mut client = tiny().connect_client(&place.name()).unwrap();
        assert_eq!(&*client.call_until(b"stop", deadline()).unwrap().expect("no answer"), b"the last");
        serving.join().unwrap().unwrap();
    });
    assert_eq!(*done.lock().unwrap(), 1);
    assert!(service.receive().unwrap_err().is_closed(), "it stays stopped");
}

/// What a call is to bring, by a model that knows no lanes.
#[derive(Default)]
struct Modelled {
    /// Answers given and not received yet.
    due: VecDeque<(Outcome, Vec<u8>)>,
    is_cancelled: bool,
}

#[test]
fn whatever_is_asked_and_answered_in_whatever_order_comes_as_a_model_says() {
    let place = Place::new("model");
    let rounds = std::env::var("PELTON_ROUNDS").map_or(20, |text| text.parse().unwrap());
    let first = std::env::var("PELTON_SEED").map_or(1, |text| text.parse().unwrap());
    for seed in first..first + rounds {
        println!("PELTON_SEED={seed}");
        one_by_the_model(&place.name(), &mut Random::new(seed));
    }
}

fn one_by_the_model(name: &str, random: &mut Random) {
    let mut service = tiny().listen_service(name).unwrap();
    let connecting = std::thread::spawn({
        let name = name.to_owned();
        move || tiny().connect_client(&name).unwrap()
    });
    while !connecting.is_finished() {
        assert!(service.receive_until(Instant::now() + Duration::from_millis(1)).unwrap().is_none());
    }
    let mut client = connecting.join().unwrap();
    let mut calls: BTreeMap<CallId, Modelled> = BTreeMap::new();
    let mut asked: VecDeque<(CallId, Vec<u8>)> = VecDeque::new();
    let mut taken: Vec<(CallId, Responder)> = Vec::new();
    let mut ids: Vec<CallId> = Vec::new();
    let mut steps = 0u64;
    while steps < 600 || !calls.is_empty() {
        steps += 1;
        assert!(steps < 100_000, "it does not come to an end");
        let bytes = match random.below(20) {
            0 => random.below(150_000),
            1..4 => random.below(30_000),
            _ => random.below(200),
        } as usize;
        let payload = numbered(steps, bytes);
        match random.below(10) {
            0..3 if steps < 600 => {
                if let Some(call) = client.try_submit(&payload).unwrap() {
                    assert!(calls.insert(call, Modelled::default()).is_none(), "{call:?} in use");
                    asked.push_back((call, payload));
                    ids.push(call);
                }
            }
            3 if !ids.is_empty() && steps < 600 => {
                let call = ids[random.below(ids.len() as u64) as usize];
                let is_open = calls.get(&call).is_some_and(|modelled| !modelled.is_cancelled);
                assert_eq!(client.cancel(call).unwrap(), is_open, "{call:?}");
                if let Some(modelled) = calls.get_mut(&call) {
                    modelled.is_cancelled = true;
                    // Nothing of it is received any more; that it has ended is not told.
                    modelled.due.clear();
                }
            }
            0..6 => {
                if let Some(request) = service.try_receive().unwrap() {
                    let (call, wanted) = asked.pop_front().expect("something was asked");
                    assert!(*request == *wanted, "{call:?}");
                    taken.push((call, request.into_responder()));
                }
            }
            6..8 if !taken.is_empty() => {
                let place = random.below(taken.len() as u64) as usize;
                let (call, responder) = &mut taken[place];
                let call = *call;
                let outcome = match random.below(6) {
                    0 | 1 => match responder.try_part(&payload).unwrap() {
                        Sent::Sent => Outcome::Part,
                        _ => continue,
                    },
                    2 => {
                        taken.swap_remove(place).1.end().unwrap();
                        Outcome::End
                    }
                    3 => {
                        drop(taken.swap_remove(place));
                        Outcome::Abandoned
                    }
                    4 => {
                        taken.swap_remove(place).1.fail(steps as u32, &payload).unwrap();
                        Outcome::Failed(steps as u32)
                    }
                    _ => {
                        taken.swap_remove(place).1.reply(&payload).unwrap();
                        Outcome::Reply
                    }
                };
                let empty = matches!(outcome, Outcome::End | Outcome::Abandoned);
                let modelled = calls.get_mut(&call).expect("it has not ended");
                match modelled.is_cancelled {
                    false => modelled.due.push_back((outcome, if empty { vec![] } else { payload })),
                    true if outcome.is_final() => _ = calls.remove(&call),
                    true => {}
                }
            }
            _ => {
                if let Some(answer) = client.try_completion().unwrap() {
                    let call = answer.call();
                    let modelled = calls.get_mut(&call).expect("a call in flight");
                    let (outcome, wanted) = modelled.due.pop_front().expect("it was answered");
                    assert!(answer.outcome() == outcome && *answer == *wanted, "{call:?} {outcome:?}");
                    if outcome.is_final() {
                        calls.remove(&call);
                    }
                }
                // Cancelled after its last answer was given: nothing comes of it.
                calls.retain(|call, modelled| {
                    !(modelled.is_cancelled
                        && !taken.iter().any(|(of, _)| of == call)
                        && !asked.iter().any(|(of, _)| of == call))
                });
            }
        }
    }
    // What is still on its way is of calls that were given up.
    let until = deadline();
    while client.in_flight() > 0 {
        assert!(client.try_completion().unwrap().is_none());
        if let Some(request) = service.try_receive().unwrap() {
            drop(request);
        }
        assert!(Instant::now() < until, "{} places do not come back", client.in_flight());
    }
}

/// A service, and a client of it that has asked so many times.
fn asked(place: &Place, calls: usize) -> (pelton::Service, pelton::Client, Vec<Responder>, Vec<pelton::CallId>) {
    let name = place.name();
    let mut service = tiny().listen_service(&name).unwrap();
    let asking = std::thread::spawn(move || {
        let mut client = tiny().connect_client(&name).unwrap();
        let ids = (0..calls).map(|_| client.submit(b"asked").unwrap()).collect();
        (client, ids)
    });
    let responders = (0..calls).map(|_| service.receive_until(deadline()).unwrap().unwrap().into_responder()).collect();
    let (client, ids) = asking.join().unwrap();
    (service, client, responders, ids)
}

#[test]
fn a_thread_with_room_for_one_reply_answers_other_calls_too() {
    let place = Place::new("an answer beside reserved room arrives");
    let (_service, mut client, mut responders, ids) = asked(&place, 3);
    let (dropped, replied) = (responders.pop().unwrap(), responders.pop().unwrap());
    let mut reserved = responders.pop().unwrap();
    let room = reserved.try_reserve(4).unwrap().unwrap();
    replied.reply(b"two").unwrap();
    drop(dropped);
    room.reply(0).unwrap();
    for (id, wanted) in ids.into_iter().zip([Outcome::Reply, Outcome::Reply, Outcome::Abandoned]) {
        assert_eq!(client.completion_of_until(id, deadline()).unwrap().unwrap().outcome(), wanted);
    }
}

#[test]
fn two_threads_with_room_for_two_clients_answer_each_others() {
    let place = Place::new("two threads with room do not wait for each other");
    let other = Place::new("the other client's");
    let (mut first, mut client, mut ours, ids) = asked(&place, 2);
    let (mut second, mut another, mut theirs, their_ids) = asked(&other, 2);
    let both = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        for (mut reserved, replied) in
            [(ours.pop().unwrap(), theirs.pop().unwrap()), (theirs.pop().unwrap(), ours.pop().unwrap())]
        {
            let both = &both;
            scope.spawn(move || {
                let room = reserved.try_reserve(0).unwrap().unwrap();
                both.wait();
                replied.reply(b"").unwrap();
                room.reply(0).unwrap();
            });
        }
    });
    // What was left to the services' loops.
    assert!(first.try_receive().unwrap().is_none() && second.try_receive().unwrap().is_none());
    for id in ids {
        assert!(client.completion_of_until(id, deadline()).unwrap().is_some());
    }
    for id in their_ids {
        assert!(another.completion_of_until(id, deadline()).unwrap().is_some());
    }
}

#[test]
fn who_has_room_for_one_reply_does_not_wait_for_room_for_another() {
    let (place, other) = (Place::new("room for one reply"), Place::new("no room for another"));
    let (_first, _client, mut ours, _) = asked(&place, 1);
    let (_second, mut another, mut theirs, ids) = asked(&other, 1);
    let (mut reserved, mut streams) = (ours.pop().unwrap(), theirs.pop().unwrap());
    let room = reserved.try_reserve(4).unwrap().unwrap();
    // What need not wait is taken.
    while streams.try_part(&[0; 9000]).unwrap() == Sent::Sent {}
    let soon = Instant::now() + Duration::from_millis(1);
    assert!(matches!(streams.part_until(&[0; 9000], soon), Err(Error::Refused(_))));
    room.reply(4).unwrap();
    assert_eq!(streams.part_until(&[0; 9000], soon).unwrap(), Sent::TimedOut);
    streams.reply(b"").unwrap();
    while another.completion_of_until(ids[0], deadline()).unwrap().unwrap().outcome() != Outcome::Reply {}
}

#[test]
fn a_call_is_answered_once() {
    let place = Place::new("a call is answered once");
    let name = place.name();
    let mut service = tiny().announce(true).listen_service(&name).unwrap();
    let asking = std::thread::spawn(move || {
        let mut client = tiny().connect_client(&name).unwrap();
        assert!(client.call_until(b"one", deadline()).unwrap().is_some());
        assert!(client.call_until(b"two", deadline()).unwrap().is_some());
    });
    let mut request = service.receive_until(deadline()).unwrap().unwrap();
    let (_, responder) = request.split();
    responder.try_reserve(1).unwrap().unwrap().reply(1).unwrap();
    assert!(matches!(request.reply(b"again"), Err(Error::Refused(_))));
    service.receive_until(deadline()).unwrap().unwrap().reply(b"").unwrap();
    asking.join().unwrap();
}

#[test]
fn room_given_back_leaves_who_waits_for_room_to_be_woken() {
    let place = Place::new("who waits for room is woken");
    let (_service, mut client, mut responders, _) = asked(&place, 2);
    let (mut other, mut streams) = (responders.pop().unwrap(), responders.pop().unwrap());
    let mut parts = 0;
    while streams.try_part(&[0; 9000]).unwrap() == Sent::Sent {
        parts += 1;
    }
    std::thread::scope(|scope| {
        let waiting = scope.spawn(move || (streams.part_until(&[1; 20000], deadline()).unwrap(), streams));
        // Whenever there is some room, it is had for a moment, and given back.
        while !waiting.is_finished() {
            drop(other.try_reserve(100).unwrap());
            parts -= u64::from(client.try_completion().unwrap().is_some());
            std::thread::yield_now();
            if parts == 0 {
                break;
            }
        }
        // An empty lane has room.
        assert_eq!(waiting.join().unwrap().0, Sent::Sent);
    });
}

#[test]
fn a_client_that_does_not_read_a_stream_leaves_the_other_threads_to_others() {
    let place = Place::new("a stalled stream and the pool");
    let (waits, is_waiting) = mpsc::channel();
    let waits = Mutex::new(waits);
    let _serving = Serving::start(&tiny(), &place.name(), 2, move |request| {
        if *request != *b"stream" {
            return echo(request);
        }
        let mut responder = request.into_responder();
        while responder.try_part(&[1; 5000]).unwrap() == Sent::Sent {}
        let thread = this_thread();
        waits.lock().unwrap().send(thread).unwrap();
        // The client goes in the end.
        while responder.part(&[1; 5000]).is_ok() {}
    });
    let mut slow = tiny().connect_client(&place.name()).unwrap();
    slow.submit(b"stream").unwrap();
    wait_until_thread_polls(is_waiting.recv_timeout(DEADLINE).unwrap());
    slow.submit(b"stream").unwrap();
    slow.submit(b"stream").unwrap();
    let mut other = tiny().connect_client(&place.name()).unwrap();
    for _ in 0..100 {
        assert!(other.call_until(b"here", deadline()).unwrap().is_some(), "the pool is taken");
    }
    assert!(is_waiting.try_recv().is_err(), "a second thread waits for the same client");
    // Once it reads, it is served again.
    while is_waiting.try_recv().is_err() {
        assert!(slow.completion_until(deadline()).unwrap().is_some());
    }
}

#[test]
fn who_only_asks_and_takes_no_answer_is_told_so_before_they_fill_the_memory() {
    let place = Place::new("bounded answers");
    for bytes in [0, 3000] {
        let _serving = Serving::start(&tiny(), &place.name(), 1, echo);
        let mut client = tiny().call_bytes_max(1 << 20).connect_client(&place.name()).unwrap();
        let mut asked = 0u64;
        let error = loop {
            match client.submit(&numbered(asked, bytes)) {
                Ok(_) => asked += 1,
                Err(error) => break error,
            }
            assert!(asked < 4000, "{asked} answers of {bytes} bytes are kept");
        };
        assert!(matches!(&error, Error::Refused(why) if why.contains("answers")), "{error}");
        assert!(client.try_submit(b"one more").unwrap().is_none());
        // All that was asked is answered, and then it goes on.
        for _ in 0..asked {
            assert_eq!(client.completion_until(deadline()).unwrap().expect("an answer is lost").len(), bytes);
        }
        assert!(client.call_until(b"one more", deadline()).unwrap().is_some());
    }
}

#[test]
fn parts_of_no_bytes_are_counted_too() {
    let place = Place::new("empty parts");
    let stop = std::sync::Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let _serving = Serving::start(&tiny(), &place.name(), 2, move |request| {
        let is_quiet = *request == *b"quiet";
        let mut responder = request.into_responder();
        while !stopped.load(Ordering::Relaxed) {
            if is_quiet || responder.try_part(b"").unwrap() != Sent::Sent {
                std::thread::yield_now();
            }
        }
    });
    let mut client = tiny().call_bytes_max(50_000).connect_client(&place.name()).unwrap();
    let quiet = client.submit(b"quiet").unwrap();
    let loud = client.submit(b"loud").unwrap();
    let error = client.completion_of_until(quiet, deadline()).unwrap_err();
    assert!(matches!(&error, Error::Refused(why) if why.contains("of parts")), "{error}");
    // What is to end that is not refused itself.
    assert!(client.cancel(loud).unwrap());
    // Nor is what comes next, which nobody knows if it is not answered.
    stop.store(true, Ordering::Relaxed);
    assert_eq!(
        client.completion_of_until(quiet, deadline()).unwrap().expect("no answer").outcome(),
        Outcome::Abandoned
    );
}

#[test]
fn a_cancel_is_not_refused_because_parts_wait_and_a_refused_call_does_not_stay_in_flight() {
    let place = Place::new("a cancel beside parts");
    let (service, mut client, mut responders, ids) = {
        let name = place.name();
        let mut service = tiny().listen_service(&name).unwrap();
        let asking = std::thread::spawn(move || {
            let mut client = tiny().call_bytes_max(30_000).connect_client(&name).unwrap();
            let ids: Vec<_> = (0..2).map(|_| client.submit(b"asked").unwrap()).collect();
            (client, ids)
        });
        let responders: Vec<_> =
            (0..2).map(|_| service.receive_until(deadline()).unwrap().unwrap().into_responder()).collect();
        let (client, ids) = asking.join().unwrap();
        (service, client, responders, ids)
    };
    for _ in 0..5 {
        assert_eq!(responders[0].try_part(&[3; 8000]).unwrap(), Sent::Sent);
    }
    // Nobody answers it: before it could be, the parts are too many.
    let error = client.call(b"one more").unwrap_err();
    assert!(matches!(&error, Error::Refused(why) if why.contains("of parts")), "{error}");
    assert!(client.cancel(ids[1]).unwrap());
    let mut service = service;
    let request = service.receive_until(deadline()).unwrap().expect("it was asked");
    assert_eq!(&*request, b"one more");
    let responder = request.into_responder();
    // It was given up: the service hears of it as it looks on.
    assert!(service.try_receive().unwrap().is_none());
    assert!(responder.is_cancelled());
    assert!(client.cancel(ids[0]).unwrap());
    drop((responder, responders));
    assert!(client.completion_until(deadline()).is_err(), "nothing is awaited");
    while client.in_flight() > 0 {
        assert!(client.try_completion().unwrap().is_none());
    }
}

#[test]
fn a_loop_that_only_notifies_hears_of_room() {
    let place = Place::new("a notifying loop");
    let (mut service, mut client, _responders, _) = asked(&place, 1);
    let mut told = 0;
    for _ in 0..20 {
        let before = told;
        while client.try_notify(&[5; 3000]).unwrap() {
            told += 1;
        }
        assert!(told > before && client.arm().unwrap(), "there is no room");
        assert!(!is_readable(client.as_fd()));
        let mut taken = 0;
        while service.try_receive().unwrap().is_some() {
            taken += 1;
        }
        assert!(taken > 0);
        readable(client.as_fd());
        client.disarm();
    }
}

#[test]
fn a_loop_that_streams_hears_of_room_and_of_what_else_the_client_says() {
    let place = Place::new("a streaming loop");
    let (mut service, mut client, mut responders, ids) = asked(&place, 1);
    let mut responder = responders.pop().unwrap();
    let (mut given, mut taken) = (0, 0);
    for round in 0..20 {
        let before = given;
        // Also on another thread than the loop's, and while that sleeps.
        std::thread::scope(|scope| {
            let armed = round % 2 == 0 && service.arm().unwrap();
            let fill = || while responder.try_part(&[5; 3000]).unwrap() == Sent::Sent {};
            scope.spawn(fill).join().unwrap();
            if armed {
                readable(service.as_fd());
                service.disarm();
            }
        });
        assert!(service.arm().unwrap(), "there is no room");
        // What was heard of the round before may be told once more.
        for _ in 0..3 {
            if is_readable(service.as_fd()) {
                service.disarm();
                assert!(service.arm().unwrap(), "there is no room");
            }
        }
        assert!(!is_readable(service.as_fd()));
        while let Some(part) = client.try_completion().unwrap() {
            assert_eq!((part.outcome(), &*part), (Outcome::Part, &[5; 3000][..]));
            taken += 1;
        }
        readable(service.as_fd());
        service.disarm();
        given = taken;
        assert!(given > before, "round {round}");
    }
    // There is no room, and requests, and what is said of the call, are taken.
    while responder.try_part(&[5; 3000]).unwrap() == Sent::Sent {}
    assert!(service.arm().unwrap());
    let another = client.submit(b"another").unwrap();
    client.cancel(ids[0]).unwrap();
    readable(service.as_fd());
    service.disarm();
    let (bytes, answer) = service.receive_until(deadline()).unwrap().unwrap().into_parts();
    assert_eq!(bytes, b"another");
    assert!(service.try_receive().unwrap().is_none());
    assert!(responder.is_cancelled());
    drop(responder);
    answer.reply(b"this too").unwrap();
    let serving = std::thread::spawn(move || service.receive_until(deadline()).unwrap().is_some());
    assert_eq!(&*client.completion_of_until(another, deadline()).unwrap().unwrap(), b"this too");
    // Room that nobody wants any more keeps no service awake for long.
    client.submit(b"the last").unwrap();
    assert!(serving.join().unwrap());
}

#[test]
fn a_loop_hears_of_the_end_after_the_last_answers() {
    let place = Place::new("the end comes last");
    let (service, mut client, mut responders, ids) = asked(&place, 2);
    // Something waits to be written.
    while client.try_submit(&[6; 20_000]).unwrap().is_some() {}
    client.try_notify(&[7; 300_000]).unwrap();
    responders.pop().unwrap().reply(b"answer").unwrap();
    responders.pop().unwrap().reply(b"answer").unwrap();
    drop(service);
    for _ in 0..ids.len() {
        assert!(!client.arm().unwrap(), "an answer is there");
        assert_eq!(&*client.try_completion().unwrap().expect("an answer is there"), b"answer");
    }
    let error = loop {
        match client.arm().and_then(|_| client.try_completion().map(|found| assert!(found.is_none()))) {
            Ok(()) => {}
            Err(error) => break error,
        }
    };
    assert!(error.is_closed(), "{error}");
}

#[test]
fn a_loop_waits_for_no_thread_that_writes_a_reply() {
    let place = Place::new("the loop and reserved room");
    let other = Place::new("another client");
    let (mut service, mut client, mut responders, ids) = asked(&place, 2);
    let (_second, _another, mut theirs, _) = asked(&other, 1);
    let (late, mut reserved) = (responders.pop().unwrap(), responders.pop().unwrap());
    let (have, has_room) = mpsc::channel();
    let (go_on, may_go_on) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let room = reserved.try_reserve(6).unwrap().unwrap();
            have.send(()).unwrap();
            may_go_on.recv_timeout(DEADLINE).unwrap();
            room.reply(6).unwrap();
        });
        has_room.recv_timeout(DEADLINE).unwrap();
        scope
            .spawn(move || {
                // Who has room for one reply leaves another to the loop, when a second thread has that client's.
                let mut theirs = theirs.pop().unwrap();
                let held = theirs.try_reserve(1).unwrap().unwrap();
                late.reply(b"later").unwrap();
                drop(held);
            })
            .join()
            .unwrap();
        for _ in 0..10 {
            assert!(!service.arm().unwrap(), "an answer is to be written still");
            assert!(service.try_receive().unwrap().is_none());
            service.disarm();
        }
        go_on.send(()).unwrap();
    });
    assert!(service.try_receive().unwrap().is_none());
    for id in ids {
        assert!(client.completion_of_until(id, deadline()).unwrap().is_some());
    }
}

#[test]
fn a_pool_whose_threads_cannot_all_be_started_takes_nothing_and_says_so() {
    let place = Place::new("threads that cannot be started");
    let pool = Child::start(Role::new("cramped").with("name", place.name()));
    pool.expect("no thread");
    pool.wait_well();
}

#[test]
fn too_large_a_call_is_not_said_to_need_more_capacity_alone() {
    let place = Place::new("words about size");
    let (_service, mut client, _responders, _) = asked(&place, 1);
    let error = client.submit(&vec![0; (64 << 20) + 1]).unwrap_err();
    assert!(error.to_string().contains("call_bytes_max"), "{error}");
}

#[test]
fn a_client_says_how_often_it_has_rung_a_service_that_slept() {
    let place = Place::new("rings");
    let (mut service, mut client, _responders, _) = asked(&place, 1);
    for rung in 1..4 {
        let before = client.wakes_sent();
        assert!(service.arm().unwrap());
        client.submit(b"wakes it").unwrap();
        client.submit(b"finds it awake").unwrap();
        assert_eq!(client.wakes_sent(), before + 1, "{rung}");
        for _ in 0..2 {
            drop(service.try_receive().unwrap().unwrap().into_responder());
        }
        service.disarm();
    }
}
