//! Cancelled calls: by clients, by deadlines, and the cancels that streaming handlers detect.

use super::*;

#[test]
fn a_cancel_reaches_the_service_and_a_late_reply_is_dropped() {
    let dir = TestDir::new("cancel");
    let (sender, receiver) = mpsc::channel();
    let _serving = Serving::start(&tiny(), &dir.name(), 2, move |request| {
        if *request != *b"slow" {
            return echo(request);
        }
        let (_, mut responder) = request.into_parts();
        sender.send(()).unwrap();
        let until = deadline();
        while !responder.is_cancelled() && Instant::now() < until {
            let _ = responder.try_part(b"part").unwrap();
            std::thread::yield_now();
        }
        sender.send(()).unwrap();
        responder.reply(b"late").unwrap();
    });
    let mut client = pelton::Client::connect_with(&dir.name(), &tiny()).unwrap();
    let slow = client.submit(b"slow").unwrap();
    receiver.recv_timeout(DEADLINE).unwrap();
    assert_eq!(client.completion_of(slow).unwrap().outcome(), Outcome::Part);
    assert!(client.cancel(slow).unwrap());
    assert!(!client.cancel(slow).unwrap(), "once");
    receiver.recv_timeout(DEADLINE).expect("the service gets no cancel");
    assert!(matches!(client.completion_of(slow), Err(Error::Refused(_))), "no thread can wait for it");
    // Its slot becomes free once the service has released it.
    let until = deadline();
    while client.in_flight() > 0 {
        assert_eq!(&*client.call_until(b"other", until).unwrap().expect("no answer"), b"other");
    }
    assert!(client.completions_dropped() > 0);
}

#[test]
fn a_cancel_overtakes_queued_requests_while_all_threads_stream() {
    let dir = TestDir::new("all stream");
    for threads in [1, 3] {
        let serving = Serving::start(&tiny(), &dir.name(), threads, |request| {
            if *request != *b"stream" {
                return echo(request);
            }
            let mut responder = request.into_responder();
            let until = deadline();
            // Also if the cancel never arrives, so that the test does not hang.
            while !responder.is_cancelled() && Instant::now() < until {
                assert_eq!(responder.part_until(b"more", until).unwrap(), Sent::Sent);
            }
            assert!(Instant::now() < until, "no cancel arrives");
            responder.end().unwrap();
        });
        let mut client = pelton::Client::connect_with(&dir.name(), &tiny()).unwrap();
        let mut other = pelton::Client::connect_with(&dir.name(), &tiny()).unwrap();
        let mut silent: Vec<CallId> = (0..threads).map(|_| client.submit(b"stream").unwrap()).collect();
        let streams = silent.clone();
        while !silent.is_empty() {
            let part = client.completion_until(deadline()).unwrap().expect("no part");
            assert_eq!((part.outcome(), &*part), (Outcome::Part, &b"more"[..]));
            silent.retain(|call| *call != part.call_id());
        }
        // All threads stream, and none waits for requests.
        let mut requested: HashMap<CallId, Vec<u8>> = HashMap::new();
        for number in 0..200 {
            let request = numbered(number, 100);
            requested.insert(other.submit(&request).unwrap(), request);
        }
        let before = client.submit(b"asked before").unwrap();
        for stream in streams {
            assert!(client.cancel(stream).unwrap());
        }
        let answer = client.completion_of_until(before, deadline()).unwrap().expect("no thread is free");
        assert_eq!((answer.outcome(), &*answer), (Outcome::Reply, &b"asked before"[..]));
        drop(answer);
        while !requested.is_empty() {
            let answer = other.completion_until(deadline()).unwrap().expect("a request that waited is lost");
            assert_eq!(requested.remove(&answer.call_id()).as_deref(), Some(&*answer), "once, to its own");
        }
        drop(serving);
    }
}

#[test]
fn a_call_whose_deadline_passes_is_cancelled() {
    let dir = TestDir::new("deadline");
    let (sender, receiver) = mpsc::channel();
    let _serving = Serving::start(&tiny(), &dir.name(), 1, move |request| {
        sender.send((request.deadline(), request.into_responder())).unwrap();
    });
    let mut client = pelton::Client::connect_with(&dir.name(), &tiny()).unwrap();
    let passes = Instant::now() + Duration::from_millis(20);
    assert!(client.call_until(b"anything", passes).unwrap().is_none());
    assert!(Instant::now() >= passes);
    let (deadline_received, responder) = receiver.recv_timeout(DEADLINE).unwrap();
    let sender = deadline_received.expect("the deadline reaches the service");
    let apart = if sender > passes { sender - passes } else { passes - sender };
    assert!(apart < Duration::from_millis(1), "the deadlines differ by {apart:?}");
    let until = deadline();
    while !responder.is_cancelled() {
        assert!(Instant::now() < until);
        std::thread::yield_now();
    }
    responder.reply(b"late").unwrap();
    let other = client.submit(b"without").unwrap();
    let (without, responder) = receiver.recv_timeout(DEADLINE).unwrap();
    assert_eq!(without, None);
    responder.reply(b"in time").unwrap();
    assert_eq!(&*client.completion_of(other).unwrap(), b"in time");
    assert_eq!((client.completions_dropped(), client.in_flight()), (1, 0));
}

#[test]
fn waiting_parts_refuse_no_cancel_and_a_refused_call_is_not_in_flight() {
    let dir = TestDir::new("a cancel beside parts");
    let (service, mut client, mut responders, ids) = {
        let name = dir.name();
        let mut service = pelton::Service::listen_with(&name, &tiny()).unwrap();
        let asking = std::thread::spawn(move || {
            let mut client = pelton::Client::connect_with(&name, &tiny().call_bytes_max(30_000)).unwrap();
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
    // It gets no reply: the parts exceed the limit before it could.
    let error = client.call(b"one more").unwrap_err();
    assert!(matches!(&error, Error::Refused(why) if why.contains("of parts")), "{error}");
    assert!(client.cancel(ids[1]).unwrap());
    let mut service = service;
    let request = service.receive_until(deadline()).unwrap().expect("a request arrived");
    assert_eq!(&*request, b"one more");
    let responder = request.into_responder();
    // It was abandoned: the service detects that when it continues.
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
fn a_service_counts_cancels_and_departures() {
    let dir = TestDir::new("count cancels");
    let mut service = pelton::Service::listen_with(&dir.name(), &tiny()).unwrap();
    let (name, (sender, receiver)) = (dir.name(), mpsc::channel());
    let asking = std::thread::spawn(move || {
        let mut client = pelton::Client::connect_with(&name, &tiny()).unwrap();
        let call = client.submit(b"request").unwrap();
        assert!(client.cancel(call).unwrap());
        receiver.recv_timeout(DEADLINE).expect("the service has counted");
    });
    let responder = service.receive_until(deadline()).unwrap().expect("the request comes").into_responder();
    assert_eq!(service.cancels(), 0, "the cancel comes after the request");
    let until = deadline();
    for count in 1..=2 {
        while service.cancels() < count && Instant::now() < until {
            let next = service.receive_until(Instant::now() + Duration::from_millis(1)).unwrap();
            assert!(next.is_none(), "there is one request");
        }
        assert_eq!(service.cancels(), count);
        assert!(responder.is_cancelled());
        let _ = sender.send(());
    }
    asking.join().unwrap();
}
