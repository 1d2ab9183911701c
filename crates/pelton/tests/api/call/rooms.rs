//! Requests and replies written in place, and threads with a reserved reply while others wait for space.

use super::*;

#[test]
fn requests_and_replies_are_written_in_place() {
    let dir = TestDir::new("in place");
    let mut service = pelton::Service::listen_with(&dir.name(), &tiny()).unwrap();
    let name = dir.name();
    let asking = std::thread::spawn(move || {
        let mut client = pelton::Client::connect_with(&name, &tiny()).unwrap();
        let _ = client.reserve(100).unwrap();
        assert_eq!(client.in_flight(), 0, "an aborted reservation submits nothing");
        let mut reservation = client.reserve(100).unwrap();
        reservation[..7].copy_from_slice(b"request");
        let one = reservation.submit_bytes(7).unwrap();
        let two = client.reserve(0).unwrap().submit().unwrap();
        assert_eq!(&*client.completion_of(two).unwrap(), b"");
        let parts: Vec<_> = (0..2).map(|_| client.completion_of(one).map(Completion::into_vec).unwrap()).collect();
        assert_eq!(parts, [b"a part".to_vec(), b"the rest".to_vec()]);
    });
    let (bytes, mut one) = service.receive().unwrap().into_parts();
    assert_eq!(bytes, b"request");
    let (_, mut two) = service.receive().unwrap().into_parts();
    let mut reservation = one.try_reserve(10).unwrap().expect("an empty lane has free space");
    reservation[..6].copy_from_slice(b"a part");
    // Another reply by this thread would wait for itself.
    assert!(matches!(two.try_reserve(1), Err(Error::Refused(_))));
    assert!(matches!(two.try_part(b"x"), Err(Error::Refused(_))));
    assert!(matches!(one_too_large(&mut two), Err(Error::Refused(_))));
    reservation.part_bytes(6).unwrap();
    drop(two.try_reserve(1).unwrap());
    two.try_reserve(1).unwrap().unwrap().reply_bytes(0).unwrap();
    assert!(!two.is_cancelled());
    one.reply(b"the rest").unwrap();
    drop(two);
    asking.join().unwrap();
}

fn one_too_large(responder: &mut Responder) -> pelton::Result<()> {
    responder.part(&[0; 100])
}

#[test]
fn a_thread_with_a_reserved_reply_answers_other_calls_too() {
    let dir = TestDir::new("an answer during a reservation arrives");
    let (_service, mut client, mut responders, ids) = service_with_calls(&dir, 3);
    let (dropped, replied) = (responders.pop().unwrap(), responders.pop().unwrap());
    let mut reserved = responders.pop().unwrap();
    let reservation = reserved.try_reserve(4).unwrap().unwrap();
    replied.reply(b"two").unwrap();
    drop(dropped);
    reservation.reply_bytes(0).unwrap();
    for (id, wanted) in ids.into_iter().zip([Outcome::Reply, Outcome::Reply, Outcome::Abandoned]) {
        assert_eq!(client.completion_of_until(id, deadline()).unwrap().unwrap().outcome(), wanted);
    }
}

#[test]
fn a_leaked_reservation_ends_when_its_responder_is_used_or_dropped() {
    let dir = TestDir::new("a leaked reservation");
    let (service, mut client, mut responders, ids) = service_with_calls(&dir, 4);
    let last = responders.pop().unwrap();
    for (number, mut responder) in responders.into_iter().enumerate() {
        std::mem::forget(responder.try_reserve(4).unwrap().unwrap());
        match number {
            0 => drop(responder),
            1 => responder.reply(b"after").unwrap(),
            _ => {
                std::mem::forget(responder.try_reserve(4).unwrap().unwrap());
                responder.part(b"after").unwrap();
                responder.end().unwrap();
            }
        }
    }
    // Another thread gets the lock.
    std::thread::spawn(move || last.reply(b"last").unwrap()).join().unwrap();
    for (id, wanted) in ids.into_iter().zip([Outcome::Abandoned, Outcome::Reply, Outcome::Part, Outcome::Reply]) {
        assert_eq!(client.completion_of_until(id, deadline()).unwrap().unwrap().outcome(), wanted);
    }
    drop(service);
}

#[test]
fn two_threads_with_reserved_replies_answer_each_others_clients() {
    let dir = TestDir::new("two threads with reservations do not wait for each other");
    let other = TestDir::new("the other client's");
    let (mut first, mut client, mut ours, ids) = service_with_calls(&dir, 2);
    let (mut second, mut another, mut theirs, their_ids) = service_with_calls(&other, 2);
    let both = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        for (mut reserved, replied) in
            [(ours.pop().unwrap(), theirs.pop().unwrap()), (theirs.pop().unwrap(), ours.pop().unwrap())]
        {
            let both = &both;
            scope.spawn(move || {
                let reservation = reserved.try_reserve(0).unwrap().unwrap();
                both.wait();
                replied.reply(b"").unwrap();
                reservation.reply_bytes(0).unwrap();
            });
        }
    });
    // Replies that were left to the services' loops.
    assert!(first.try_receive().unwrap().is_none() && second.try_receive().unwrap().is_none());
    for id in ids {
        assert!(client.completion_of_until(id, deadline()).unwrap().is_some());
    }
    for id in their_ids {
        assert!(another.completion_of_until(id, deadline()).unwrap().is_some());
    }
}

#[test]
fn a_thread_with_a_reserved_reply_does_not_wait_to_reserve_another() {
    let (dir, other) = (TestDir::new("a reservation for one reply"), TestDir::new("no free space for another"));
    let (_first, _client, mut ours, _) = service_with_calls(&dir, 1);
    let (_second, mut another, mut theirs, ids) = service_with_calls(&other, 1);
    let (mut reserved, mut streams) = (ours.pop().unwrap(), theirs.pop().unwrap());
    let reservation = reserved.try_reserve(4).unwrap().unwrap();
    // Calls that need not wait are taken.
    while streams.try_part(&[0; 9000]).unwrap() == Sent::Sent {}
    let soon = Instant::now() + Duration::from_millis(1);
    assert!(matches!(streams.part_until(&[0; 9000], soon), Err(Error::Refused(_))));
    reservation.reply_bytes(4).unwrap();
    assert_eq!(streams.part_until(&[0; 9000], soon).unwrap(), Sent::TimedOut);
    streams.reply(b"").unwrap();
    while another.completion_of_until(ids[0], deadline()).unwrap().unwrap().outcome() != Outcome::Reply {}
}

#[test]
fn an_aborted_reservation_wakes_a_thread_that_waits_for_space() {
    let dir = TestDir::new("an aborted reservation wakes a waiting thread");
    let (_service, mut client, mut responders, _) = service_with_calls(&dir, 2);
    let (mut other, mut streams) = (responders.pop().unwrap(), responders.pop().unwrap());
    let mut parts = 0;
    while streams.try_part(&[0; 9000]).unwrap() == Sent::Sent {
        parts += 1;
    }
    std::thread::scope(|scope| {
        let waiting = scope.spawn(move || (streams.part_until(&[1; 20000], deadline()).unwrap(), streams));
        // Whenever space is free, it is reserved for a moment, and the reservation aborted.
        while !waiting.is_finished() {
            drop(other.try_reserve(100).unwrap());
            parts -= u64::from(client.try_completion().unwrap().is_some());
            std::thread::yield_now();
            if parts == 0 {
                break;
            }
        }
        // An empty lane has free space.
        assert_eq!(waiting.join().unwrap().0, Sent::Sent);
    });
}
