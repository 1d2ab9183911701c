//! Replies in parts, and clients that do not read: the threads that wait for them, and the amount of stashed data.

use super::*;

#[test]
fn backpressure_of_a_client_affects_it_alone_and_loses_no_reply() {
    let dir = TestDir::new("one does not read");
    let most = std::sync::Arc::new(AtomicUsize::new(0));
    let taken = most.clone();
    let _serving = Serving::start(&tiny(), &dir.name(), 1, move |request| {
        if request.first() == Some(&1) {
            taken.fetch_add(1, Ordering::Relaxed);
        }
        let reply = request.repeat(100);
        request.reply(&reply).unwrap();
    });
    let (mut deaf, mut slow_sender) = (
        pelton::Client::connect_with(&dir.name(), &tiny()).unwrap(),
        pelton::Client::connect_with(&dir.name(), &tiny()).unwrap(),
    );
    let mut requested = 0;
    let until = deadline();
    // Until the service takes nothing more of it, despite its requests.
    let mut before = usize::MAX;
    loop {
        while deaf.try_submit(&[1; 300]).unwrap().is_some() {
            requested += 1;
        }
        for _ in 0..50 {
            let reply = slow_sender.call_until(&[2; 300], deadline()).unwrap().expect("stalled by another client");
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
    assert!(taken < 10, "the service took {taken} calls of a client that does not read");
    for _ in 0..requested {
        let reply = deaf.completion_until(deadline()).unwrap().expect("its replies are lost");
        assert_eq!(*reply, [1; 30_000]);
    }
}

#[test]
fn slow_readers_get_streams_in_order_while_others_are_served() {
    let dir = TestDir::new("streams");
    let ahead = std::sync::Arc::new(AtomicUsize::new(0));
    let (given, sizes) = (ahead.clone(), Sizes::Random(3, 50_000));
    let _serving = Serving::start(&tiny(), &dir.name(), 3, move |request| {
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
    let mut slow = pelton::Client::connect_with(&dir.name(), &tiny()).unwrap();
    let mut other = pelton::Client::connect_with(&dir.name(), &tiny()).unwrap();
    let (count, mut wanted) = (200u64, Vec::new());
    let streams = [(); 2].map(|()| slow.submit(&count.to_le_bytes()).unwrap());
    let mut next: HashMap<CallId, u64> = streams.into_iter().map(|call| (call, 0)).collect();
    let mut ended = 0;
    while ended < 2 {
        assert_eq!(&*other.call_until(b"other", deadline()).unwrap().expect("stalled by a slow reader"), b"other");
        let read: u64 = next.values().sum();
        assert!(ahead.load(Ordering::Relaxed) as u64 <= read + 1000, "parts are given without end");
        let part = slow.completion_until(deadline()).unwrap().expect("no part");
        let number = next.get_mut(&part.call_id()).unwrap();
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
fn a_client_stashes_parts_of_other_calls_up_to_a_bound() {
    let dir = TestDir::new("bounded");
    let stop = std::sync::Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let _serving = Serving::start(&tiny(), &dir.name(), 2, move |request| {
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
    let mut client = pelton::Client::connect_with(&dir.name(), &tiny().call_bytes_max(200_000)).unwrap();
    let (loud, quiet) = (client.submit(b"loud").unwrap(), client.submit(b"quiet").unwrap());
    let error = client.completion_of_until(quiet, deadline()).unwrap_err();
    assert!(matches!(&error, Error::Refused(why) if why.contains("bytes of parts")), "{error}");
    stop.store(true, Ordering::Relaxed);
    // Nothing of it is lost, and all is in order.
    for number in 0.. {
        let answer = client.completion_of_until(loud, deadline()).unwrap().expect("parts are lost");
        if answer.outcome() == Outcome::Abandoned {
            // The overhead of a part counts, too.
            assert!(number > 18, "{number}");
            break;
        }
        assert!(*answer == *numbered(number, 10_000), "part {number}");
    }
}

#[test]
fn an_unread_stream_blocks_one_thread_and_the_others_serve_others() {
    let dir = TestDir::new("a stalled stream and the pool");
    let (waits, is_waiting) = mpsc::channel();
    let waits = Mutex::new(waits);
    let _serving = Serving::start(&tiny(), &dir.name(), 2, move |request| {
        if *request != *b"stream" {
            return echo(request);
        }
        let mut responder = request.into_responder();
        while responder.try_part(&[1; 5000]).unwrap() == Sent::Sent {}
        let thread = this_thread();
        waits.lock().unwrap().send(thread).unwrap();
        // The client exits in the end.
        while responder.part(&[1; 5000]).is_ok() {}
    });
    let mut slow = pelton::Client::connect_with(&dir.name(), &tiny()).unwrap();
    slow.submit(b"stream").unwrap();
    wait_until_thread_polls(is_waiting.recv_timeout(DEADLINE).unwrap());
    slow.submit(b"stream").unwrap();
    slow.submit(b"stream").unwrap();
    let mut other = pelton::Client::connect_with(&dir.name(), &tiny()).unwrap();
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
fn a_client_that_takes_no_reply_gets_an_error_before_replies_fill_the_memory() {
    let dir = TestDir::new("bounded answers");
    for bytes in [0, 3000] {
        let _serving = Serving::start(&tiny(), &dir.name(), 1, echo);
        let mut client = pelton::Client::connect_with(&dir.name(), &tiny().call_bytes_max(1 << 20)).unwrap();
        let mut requested = 0u64;
        let error = loop {
            match client.submit(&numbered(requested, bytes)) {
                Ok(_) => requested += 1,
                Err(error) => break error,
            }
            assert!(requested < 4000, "{requested} answers of {bytes} bytes are kept");
        };
        assert!(matches!(&error, Error::Refused(why) if why.contains("answers")), "{error}");
        assert!(client.try_submit(b"one more").unwrap().is_none());
        // Every request is answered, and then the client continues.
        for _ in 0..requested {
            assert_eq!(client.completion_until(deadline()).unwrap().expect("an answer is lost").len(), bytes);
        }
        assert!(client.call_until(b"one more", deadline()).unwrap().is_some());
    }
}

#[test]
fn empty_parts_count_too() {
    let dir = TestDir::new("empty parts");
    let stop = std::sync::Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let _serving = Serving::start(&tiny(), &dir.name(), 2, move |request| {
        let is_quiet = *request == *b"quiet";
        let mut responder = request.into_responder();
        while !stopped.load(Ordering::Relaxed) {
            if is_quiet || responder.try_part(b"").unwrap() != Sent::Sent {
                std::thread::yield_now();
            }
        }
    });
    let mut client = pelton::Client::connect_with(&dir.name(), &tiny().call_bytes_max(50_000)).unwrap();
    let quiet = client.submit(b"quiet").unwrap();
    let loud = client.submit(b"loud").unwrap();
    let error = client.completion_of_until(quiet, deadline()).unwrap_err();
    assert!(matches!(&error, Error::Refused(why) if why.contains("of parts")), "{error}");
    // The message that ends it must not be refused itself.
    assert!(client.cancel(loud).unwrap());
    // Nor is the next one, whose outcome is unknown without a reply.
    stop.store(true, Ordering::Relaxed);
    assert_eq!(
        client.completion_of_until(quiet, deadline()).unwrap().expect("no answer").outcome(),
        Outcome::Abandoned
    );
}
