//! Deaths and ends: of a service, its sent and unsent replies; of a client, the effects on others.

use super::*;

#[test]
fn a_services_death_fails_its_pending_calls_at_once() {
    let dir = TestDir::new("dead service");
    for how in ["wait", "loop", "full"] {
        let service =
            Child::start(Role::new(child, "mute").with("name", dir.name()).with("count", 10).with("capacity", TINY));
        service.expect("listening");
        let mut client = pelton::Client::connect_with(&dir.name(), &tiny()).unwrap();
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
                assert!(client.arm().unwrap().is_waiting(), "nothing is answered");
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
            // While it waits for free space.
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
fn a_service_delivers_its_replies_before_its_close() {
    let dir = TestDir::new("closed service");
    let mut service = Service::listen(&dir.name()).unwrap();
    let name = dir.name();
    let asking = std::thread::spawn(move || {
        let mut client = pelton::Client::connect_with(&name, &tiny()).unwrap();
        let (one, _) = (client.submit(b"one").unwrap(), client.submit(b"two").unwrap());
        assert_eq!(client.completion().unwrap().call_id(), one);
        client.completion().map(|reply| reply.into_vec())
    });
    let one = service.receive().unwrap();
    assert_eq!(&*one, b"one");
    one.reply(b"1").unwrap();
    let two = service.receive().unwrap().into_responder();
    drop(service);
    let error = asking.join().unwrap().unwrap_err();
    assert!(error.is_closed(), "{error}");
    assert!(two.reply(b"2").is_err(), "no peer is there");
}

#[test]
fn a_clients_death_does_not_affect_the_others() {
    let dir = TestDir::new("dead clients");
    let service =
        Child::start(Role::new(child, "echo").with("name", dir.name()).with("capacity", TINY).with("threads", 2));
    service.expect("listening");
    let mut client = pelton::Client::connect_with(&dir.name(), &tiny()).unwrap();
    let mut check = |numbers: std::ops::Range<u64>| {
        for number in numbers {
            let request = numbered(number, (number % 5000) as usize);
            let reply =
                client.call_until(&request, deadline()).unwrap().expect("a client's death keeps others waiting");
            assert!(*reply == *request);
        }
    };
    let deaf =
        || Child::start(Role::new(child, "deaf").with("name", dir.name()).with("capacity", TINY).with("count", 1000));
    for round in 0..5 {
        let dying: Vec<Child> = (0..3).map(|_| deaf()).collect();
        dying.iter().for_each(|child| assert!(child.line().parse::<u64>().unwrap() > 10));
        check(round * 1000..round * 1000 + 500);
        dying.into_iter().for_each(Child::kill);
        check(round * 1000 + 500..round * 1000 + 1000);
    }
    let descriptors = || kernel::descriptors_of(service.pid());
    let until = deadline();
    // The service keeps nothing of the dead client, after its next poll.
    let few = 40;
    while descriptors() > few {
        check(0..10);
        assert!(Instant::now() < until, "{} descriptors are left", descriptors());
    }
}
