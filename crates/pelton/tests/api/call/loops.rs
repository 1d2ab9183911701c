//! Event loops: arming for requests, replies, free space and the end.

use super::*;

#[test]
fn both_sides_work_in_event_loops() {
    let dir = TestDir::new("event loops");
    for how in [How::Poll, How::Epoll] {
        let mut service = pelton::Service::listen_with(&dir.name(), &tiny()).unwrap();
        let stopper = service.stopper();
        let serving = std::thread::spawn(move || {
            let event_loop = Loop::new(how, service.as_fd());
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
                // Some later, when the loop is otherwise idle; and more than the lane holds.
                let at_once = if armed.is_waiting() { kept.len() } else { kept.len().saturating_sub(3) };
                for (bytes, responder) in kept.drain(..at_once) {
                    let _ = responder.reply(&bytes.repeat(4));
                }
                if armed.is_waiting() && at_once == 0 {
                    event_loop.tick(service.as_fd());
                }
                service.disarm();
            }
        });
        for busy_poll in [Duration::ZERO, Duration::from_micros(20)] {
            let mut client = pelton::Client::connect_with(&dir.name(), &tiny().busy_poll(busy_poll)).unwrap();
            let event_loop = Loop::new(how, client.as_fd());
            let mut random = Random::new(5);
            let (mut requested, mut answered) = (BTreeMap::new(), 0);
            let mut number = 0;
            while answered < 2000 {
                while requested.len() < 50 && number < 2000 {
                    let request = numbered(number, random.below(if number % 100 == 0 { 60_000 } else { 300 }) as usize);
                    let Some(call) = client.try_submit(&request).unwrap() else { break };
                    requested.insert(call, request);
                    number += 1;
                }
                while let Some(reply) = client.try_completion().unwrap() {
                    assert!(*reply == *requested.remove(&reply.call_id()).unwrap().repeat(4));
                    answered += 1;
                }
                if !requested.is_empty() && client.arm().unwrap().is_waiting() {
                    event_loop.tick(client.as_fd());
                    client.disarm();
                }
            }
        }
        stopper.stop();
        serving.join().unwrap();
    }
}

#[test]
fn an_event_loop_that_only_notifies_wakes_for_free_space() {
    let dir = TestDir::new("a notifying loop");
    let (mut service, mut client, _responders, _) = service_with_calls(&dir, 1);
    let mut notified = 0;
    for _ in 0..20 {
        let before = notified;
        while client.try_notify(&[5; 3000]).unwrap() == Sent::Sent {
            notified += 1;
        }
        assert_eq!(client.notify_until(&[5; 3000], Duration::from_micros(100)).unwrap(), Sent::TimedOut);
        assert_eq!(client.notify_until(&[5; 3000], pelton::Deadline::Now).unwrap(), Sent::Full);
        assert!(notified > before && client.arm().unwrap().is_waiting(), "there is no free space");
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
fn an_event_loop_that_streams_wakes_for_free_space_and_for_other_requests() {
    let dir = TestDir::new("a streaming loop");
    let (mut service, mut client, mut responders, ids) = service_with_calls(&dir, 1);
    let mut responder = responders.pop().unwrap();
    let (mut given, mut taken) = (0, 0);
    for round in 0..20 {
        let before = given;
        // Also on a thread other than the loop's, and while that sleeps.
        std::thread::scope(|scope| {
            let armed = round % 2 == 0 && service.arm().unwrap().is_waiting();
            let fill = || while responder.try_part(&[5; 3000]).unwrap() == Sent::Sent {};
            scope.spawn(fill).join().unwrap();
            if armed {
                readable(service.as_fd());
                service.disarm();
            }
        });
        assert!(service.arm().unwrap().is_waiting(), "there is no free space");
        // Events of the round before may be reported once more.
        for _ in 0..3 {
            if is_readable(service.as_fd()) {
                service.disarm();
                assert!(service.arm().unwrap().is_waiting(), "there is no free space");
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
    // There is no free space, and the loop takes requests and other messages about the call.
    while responder.try_part(&[5; 3000]).unwrap() == Sent::Sent {}
    assert!(service.arm().unwrap().is_waiting());
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
    // A wait for space that nobody needs any more keeps no service awake for long.
    client.submit(b"the last").unwrap();
    assert!(serving.join().unwrap());
}

#[test]
fn an_event_loop_gets_the_end_after_the_last_replies() {
    let dir = TestDir::new("the end arrives last");
    let (service, mut client, mut responders, ids) = service_with_calls(&dir, 2);
    // Something waits to be written.
    while client.try_submit(&[6; 20_000]).unwrap().is_some() {}
    assert_eq!(client.try_notify(&[7; 300_000]).unwrap(), Sent::Sent);
    responders.pop().unwrap().reply(b"answer").unwrap();
    responders.pop().unwrap().reply(b"answer").unwrap();
    drop(service);
    for _ in 0..ids.len() {
        assert!(!client.arm().unwrap().is_waiting(), "an answer is there");
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
fn an_event_loop_waits_for_no_thread_that_writes_a_reply() {
    let dir = TestDir::new("the loop and a reservation");
    let other = TestDir::new("another client");
    let (mut service, mut client, mut responders, ids) = service_with_calls(&dir, 2);
    let (_second, _another, mut theirs, _) = service_with_calls(&other, 1);
    let (late, mut reserved) = (responders.pop().unwrap(), responders.pop().unwrap());
    let (have, has_space) = mpsc::channel();
    let (go_on, may_go_on) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let reservation = reserved.try_reserve(6).unwrap().unwrap();
            have.send(()).unwrap();
            may_go_on.recv_timeout(DEADLINE).unwrap();
            reservation.reply_bytes(6).unwrap();
        });
        has_space.recv_timeout(DEADLINE).unwrap();
        scope
            .spawn(move || {
                // A thread with a reserved reply leaves another reply to the loop, when a second thread has that
                // client.
                let mut theirs = theirs.pop().unwrap();
                let held = theirs.try_reserve(1).unwrap().unwrap();
                late.reply(b"later").unwrap();
                drop(held);
            })
            .join()
            .unwrap();
        for _ in 0..10 {
            assert!(!service.arm().unwrap().is_waiting(), "an answer is to be written still");
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
fn a_busy_poll_finds_requests_and_completions_and_reports_the_end() {
    let dir = TestDir::new("a_busy_poll_finds_requests_and_completions_and_reports_the_end");
    let mut service = pelton::Service::listen(&dir.name()).unwrap();
    let mut opening = pelton::Client::start_connect(&dir.name(), &pelton::Options::new()).unwrap();
    let mut client = loop {
        assert!(!service.busy_poll().unwrap());
        if let Some(client) = opening.try_finish().unwrap() {
            break client;
        }
    };
    assert!(!client.busy_poll().unwrap(), "no call is in flight");
    // The mean size of the requests bounds the time, and nothing else.
    for bytes in [0, 100, 1_000_000, 10] {
        let call = client.try_submit(&vec![1; bytes]).unwrap().unwrap();
        assert!(!client.busy_poll().unwrap());
        assert!(service.busy_poll().unwrap());
        service.try_receive().unwrap().expect("the busy poll has found it").reply(b"answer").unwrap();
        assert!(client.busy_poll().unwrap());
        let completion = client.try_completion().unwrap().expect("the busy poll has found it");
        assert_eq!((completion.call_id(), &*completion), (call, &b"answer"[..]));
    }
    service.stopper().stop();
    assert!(service.busy_poll().unwrap_err().is_closed());
    let _ = client.try_submit(b"never answered").unwrap().unwrap();
    drop(service);
    while !client.arm().is_err_and(|error| error.is_closed()) {}
    assert!(client.busy_poll().unwrap_err().is_closed());
}
