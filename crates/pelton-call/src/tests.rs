//! `spec/vectors/calls.json`, replayed on a real link, one side of which breaks the rules; and other sides that do.

use super::frame::{Assembly, By, Header, Kind};
use super::inbox::{Inbox, StoredCompletion};
use super::placed::Storage;
use super::reply_lock::ReplyLock;
use super::{CallId, Client, Loss, Outcome, Service};
use crate::body::Flag;
use crate::outbox::FrameSender as _;
use pelton_channel::raw::{Budget, Share};
use pelton_channel::{Armed, Deadline, Error, Options, Result, Sent, Traceparent};
use pelton_testkit::{Random, Watchdog, deadline, readable, this_thread, wait_until_thread_polls};
use serde_json::Value;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::Waker;
use std::time::{Duration, Instant};

/// The largest message that either side takes, as the vectors assume.
const BYTES_MAX: u64 = 4096;

fn vectors(of: &str) -> Vec<Value> {
    let path = format!("{}/../../spec/vectors/calls.json", env!("CARGO_MANIFEST_DIR"));
    let vectors: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let vectors = vectors[of].as_array().unwrap().clone();
    assert!(!vectors.is_empty());
    vectors
}

fn bytes_of(vector: &Value) -> Vec<u8> {
    let hex = vector["hex"].as_str().unwrap();
    (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
}

fn words_of(vector: &Value) -> [u64; 3] {
    let bytes = bytes_of(vector);
    std::array::from_fn(|index| u64::from_le_bytes(bytes[index * 8..][..8].try_into().unwrap()))
}

fn number(value: &Value) -> u64 {
    u64::from_str_radix(&value.as_str().unwrap()[2..], 16).unwrap()
}

fn by(vector: &Value) -> By {
    match vector["by"].as_str().unwrap() {
        "client" => By::Client,
        "service" => By::Service,
        by => panic!("{by}"),
    }
}

fn name_of(kind: Kind) -> &'static str {
    match kind {
        Kind::Request => "REQUEST",
        Kind::Notify => "NOTIFY",
        Kind::Cancel => "CANCEL",
        Kind::Reply => "REPLY",
        Kind::Part => "PART",
        Kind::End => "END",
        Kind::Failed => "FAILED",
        Kind::Abandoned => "ABANDONED",
        Kind::Draining => "DRAINING",
        Kind::Returned => "RETURNED",
        Kind::Drained => "DRAINED",
    }
}

#[test]
fn headers_are_read_and_written_as_the_vectors_say() {
    for vector in vectors("headers") {
        let words = words_of(&vector);
        let header = Header::read(words, vector["payload_bytes"].as_u64().unwrap(), by(&vector)).expect("well made");
        assert_eq!(header.words(), words, "{vector}");
        assert_eq!(name_of(header.kind), vector["kind"], "{vector}");
        assert_eq!((header.id, header.deadline), (number(&vector["id"]), number(&vector["deadline"])), "{vector}");
        let (more, continued) = (vector["more"].as_bool().unwrap(), vector["continued"].as_bool().unwrap());
        assert_eq!((header.more, header.continued), (more, continued), "{vector}");
        assert_eq!(header.traced, vector.get("traced").is_some(), "{vector}");
        assert_eq!(u64::from(header.code), vector["code"].as_u64().unwrap(), "{vector}");
    }
}

#[test]
fn headers_that_break_the_rules_are_refused() {
    for vector in vectors("refused") {
        let read = Header::read(words_of(&vector), vector["payload_bytes"].as_u64().unwrap(), by(&vector));
        assert_eq!(read.expect_err(&vector.to_string()), vector["rule"], "{vector}");
    }
}

/// A service and its clients, in this process.
struct Link {
    service: Service,
    clients: Vec<Client>,
}

fn link(count: usize) -> Link {
    link_with(count, <Options>::new().capacity(1 << 16).call_bytes_max(BYTES_MAX))
}

fn link_with(count: usize, options: Options) -> Link {
    let directory = tempfile::tempdir_in("/tmp").unwrap();
    let name = format!("unix:{}/s", directory.path().display());
    let mut service = Service::listen_with(&name, &options.cast()).unwrap();
    let connecting = std::thread::spawn(move || {
        (0..count).map(|_| Client::connect_with(&name, &options.cast()).unwrap()).collect::<Vec<_>>()
    });
    while !connecting.is_finished() {
        assert!(service.receive_until(Instant::now() + Duration::from_millis(1)).unwrap().is_none());
    }
    let clients = connecting.join().unwrap();
    Link { service, clients }
}

/// This number of services of one name, and a client that has discovered all of them.
fn services_of_one_name(count: usize) -> (Vec<Service>, Client) {
    services_with(count, <Options>::new().capacity(1 << 16).call_bytes_max(BYTES_MAX))
}

fn services_with(count: usize, options: Options) -> (Vec<Service>, Client) {
    static NAMES: AtomicU32 = AtomicU32::new(0);
    let name = format!("test-calls-{}-{}", std::process::id(), NAMES.fetch_add(1, Ordering::Relaxed));
    let mut services: Vec<Service> =
        (0..count).map(|_| Service::listen_with(&name, &options.cast()).unwrap()).collect();
    let connecting = std::thread::spawn(move || {
        let mut client = Client::connect_with(&name, &options.cast()).unwrap();
        while client.service_count() < count {
            let _ = client.arm().unwrap();
            client.disarm();
        }
        client
    });
    while !connecting.is_finished() {
        for service in &mut services {
            assert!(service.receive_until(Instant::now() + Duration::from_millis(1)).unwrap().is_none());
        }
    }
    (services, connecting.join().unwrap())
}

/// Makes the service's page say that it has released more than was ever sent.
fn damage(service: &Service) {
    let page = service.requests.consumer_page();
    // SAFETY: the service keeps the page mapped and writable. Its head is at offset 128: 8 bytes, which every reader
    // checks.
    unsafe { page.add(128).cast::<std::sync::atomic::AtomicU64>().as_ref() }.fetch_xor(1 << 62, Ordering::Release);
}

/// Writes the record of a vector.
fn write(sender: &mut pelton_channel::Sender, record: &Value) {
    let mut bytes = bytes_of(record);
    bytes.resize(bytes.len() + record["payload_bytes"].as_u64().unwrap() as usize, 7);
    sender.send(&bytes).unwrap();
}

#[test]
fn records_mean_what_the_vectors_say() {
    for vector in vectors("sequences") {
        println!("{vector}");
        let mut link = link(2);
        match by(&vector) {
            By::Client => replay_client(&vector, &mut link),
            By::Service => replay_service(&vector, &mut link),
        }
    }
}

fn replay_client(vector: &Value, Link { service, clients }: &mut Link) {
    let records = vector["records"].as_array().unwrap();
    records.iter().for_each(|record| write(&mut clients[0].balancer.connections[0].outbox.sender, record));
    // Received and not answered, so that their slots stay taken.
    let mut taken = Vec::new();
    for wanted in vector["messages"].as_array().unwrap() {
        let request = service.try_receive().unwrap().expect("a message");
        assert!(request.iter().all(|byte| *byte == 7));
        assert_eq!(request.len() as u64, wanted["bytes"].as_u64().unwrap());
        assert_eq!(request.is_notification(), wanted["kind"] == "NOTIFY");
        assert_eq!(request.contents().responder.id, number(&wanted["id"]));
        let traceparent = request.traceparent().map(|traceparent| traceparent.to_string());
        assert_eq!(traceparent.as_deref(), wanted.get("traceparent").and_then(Value::as_str));
        taken.push(request.into_responder());
    }
    assert!(service.try_receive().unwrap().is_none());
    let corrupt = vector["then"] != "well";
    assert_eq!(service.corrupt_clients(), u64::from(corrupt));
    // No other client is affected.
    let call = clients[1].submit(b"other").unwrap();
    service.receive().unwrap().reply(b"answer").unwrap();
    assert_eq!(&*clients[1].completion_of(call).unwrap(), b"answer");
    if corrupt {
        let until = Instant::now() + Duration::from_secs(60);
        let error = clients[0].balancer.connections[0]
            .outbox
            .sender
            .send_until(b"gone", until)
            .and_then(|_| clients[0].balancer.connections[0].outbox.sender.wait_released());
        assert!(error.unwrap_err().is_closed());
    }
}

fn replay_service(vector: &Value, Link { service, clients }: &mut Link) {
    let client = &mut clients[0];
    let calls: Vec<CallId> = (0..3).map(|_| client.submit(b"call").unwrap()).collect();
    // The ids in the vectors.
    assert_eq!(calls.iter().map(|call| call.0).collect::<Vec<_>>(), [1 << 32, 1 << 32 | 1, 1 << 32 | 2]);
    let taken: Vec<_> = (0..3).map(|_| service.receive().unwrap().into_responder()).collect();
    let mut out = taken[0].session.lock(0).unwrap();
    vector["records"].as_array().unwrap().iter().for_each(|record| write(&mut out.outbox.sender, record));
    drop(out);
    for wanted in vector["messages"].as_array().unwrap() {
        let answer = client.try_completion().unwrap().expect("a message");
        let outcome = match answer.outcome() {
            Outcome::Reply => ("REPLY", 0),
            Outcome::Part => ("PART", 0),
            Outcome::End => ("END", 0),
            Outcome::Failed(code) => ("FAILED", code.into()),
            Outcome::Abandoned => ("ABANDONED", 0),
            Outcome::Lost(Loss::Returned) => ("RETURNED", 0),
            Outcome::Lost(loss) => panic!("{loss:?}"),
        };
        assert!(answer.iter().all(|byte| *byte == 7));
        assert_eq!(outcome, (wanted["kind"].as_str().unwrap(), wanted["code"].as_u64().unwrap()));
        assert_eq!(
            (answer.call_id().0, answer.len() as u64),
            (number(&wanted["id"]), wanted["bytes"].as_u64().unwrap())
        );
    }
    let then = client.try_completion().map(|answer| answer.is_none());
    match vector["then"].as_str().unwrap() {
        "well" => assert!(then.unwrap()),
        "closed" => {
            let error = then.unwrap_err();
            assert!(error.is_closed() && client.submit(b"x").unwrap_err().is_closed(), "{error}");
        }
        rule => {
            let error = then.unwrap_err();
            assert!(matches!(&error, Error::Corrupt(why) if why.contains(&format!("{rule:?}"))), "{error}");
            let again = [client.submit(b"x").map(|_| ()), client.completion().map(|_| ()), client.arm().map(|_| ())];
            assert!(again.iter().all(|result| matches!(result, Err(Error::Corrupt(_)))), "{again:?}");
        }
    }
    taken.into_iter().for_each(|responder| drop(responder.reply(b"")));
}

#[test]
fn a_flood_of_parts_of_a_cancelled_call_does_not_block_a_poll() {
    let Link { mut service, clients } = link(1);
    let mut client = clients.into_iter().next().unwrap();
    let call = client.submit(b"stream").unwrap();
    let mut responder = service.receive().unwrap().into_responder();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let polls = std::thread::scope(|scope| -> Result<usize> {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) && responder.try_part(b"").is_ok() {
                std::hint::spin_loop();
            }
        });
        client.cancel(call)?;
        let mut polls = 0;
        while polls < 100 || client.completions_dropped() < 2000 {
            assert!(client.try_completion()?.is_none(), "it is cancelled");
            polls += 1;
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        Ok(polls)
    });
    assert!(polls.unwrap() >= 100);
}

#[test]
fn only_the_first_cancel_of_a_call_in_flight_is_counted() {
    let Link { mut service, mut clients } = link(1);
    let call = clients[0].submit(b"request").unwrap();
    let responder = service.receive().unwrap().into_responder();
    let cancel = |clients: &mut [Client], service: &mut Service, id: u64| {
        let bytes: Vec<u8> = Header::new(Kind::Cancel, id).words().iter().flat_map(|word| word.to_le_bytes()).collect();
        clients[0].balancer.connections[0].outbox.sender.send(&bytes).unwrap();
        assert!(service.try_receive().unwrap().is_none(), "a cancel is for no user");
        service.cancels()
    };
    for slot in 1..100 {
        assert_eq!(cancel(&mut clients, &mut service, call.0 | slot), 0, "no call has slot {slot}");
    }
    assert_eq!(cancel(&mut clients, &mut service, call.0 + (1 << 32)), 0, "the slot has another generation");
    for _ in 0..100 {
        assert_eq!(cancel(&mut clients, &mut service, call.0), 1);
    }
    assert!(responder.is_cancelled());
    responder.reply(b"").unwrap();
    assert_eq!(cancel(&mut clients, &mut service, call.0), 1, "the call has ended");
}

#[test]
fn random_headers_are_refused_or_survive_a_round_trip() {
    let mut generator = Random::new(1);
    let mut random = || generator.word();
    let mut read = 0;
    for _ in 0..200_000 {
        // Mostly close to a valid header.
        let id = if random() % 4 == 0 { random() } else { ((random() % 3) << 32) | (random() % 1030) };
        let word =
            (random() % 24) | ((random() % 5) << 8) | ((random() % 8 / 7) << 40) | ((random() % 16 / 15) * random());
        let deadline = (random() % 3 / 2) * random();
        let words = [id, word, deadline];
        for by in [By::Client, By::Service] {
            if let Ok(header) = Header::read(words, random() % 3, by) {
                assert_eq!(header.words(), words);
                read += 1;
            }
        }
    }
    assert!(read > 1000, "{read}");
}

#[test]
fn a_damaged_lane_of_requests_makes_its_service_corrupt_for_good() {
    let Link { mut service, clients } = link(1);
    let mut client = clients.into_iter().next().unwrap();
    client.submit(b"call").unwrap();
    service.receive().unwrap().reply(b"").unwrap();
    drop(client.completion().unwrap());
    damage(&service);
    let until = Instant::now() + Duration::from_secs(60);
    let error = loop {
        assert!(Instant::now() < until, "it is never detected");
        if let Err(error) = client.try_submit(&[7; 3000]) {
            break error;
        }
    };
    assert!(matches!(error, Error::Corrupt(_)), "{error}");
    let again = [client.submit(b"x").map(|_| ()), client.completion().map(|_| ()), client.arm().map(|_| ())];
    assert!(again.iter().all(|result| matches!(result, Err(Error::Corrupt(_)))), "{again:?}");
}

#[test]
fn a_lane_found_damaged_during_a_write_loses_only_its_own_calls() {
    let (mut services, mut client) = services_of_one_name(2);
    let mut asked = HashMap::new();
    let mut ask = |client: &mut Client| {
        let number = asked.len() as u32;
        let call = client.try_submit(&number.to_le_bytes().repeat(750)).unwrap()?;
        assert!(asked.insert(call, number).is_none(), "call {call:?} is in flight already");
        Some(())
    };
    // Both lanes are full. Then one service takes all requests, and the other damages its lane.
    while ask(&mut client).is_some() {}
    let mut healthy = services.pop().unwrap();
    let mut taken = Vec::new();
    let mut take = |healthy: &mut Service| {
        while let Some(request) = healthy.try_receive().unwrap() {
            taken.push((request.to_vec(), request.into_responder()));
        }
    };
    take(&mut healthy);
    damage(&services[0]);
    // More requests than were lost.
    for _ in 0..3 {
        while ask(&mut client).is_some() {}
        assert_eq!(client.service_count(), 1);
        take(&mut healthy);
    }
    let answered = taken.len();
    taken.into_iter().for_each(|(request, responder)| responder.reply(&request[..4]).unwrap());
    let until = Instant::now() + Duration::from_secs(60);
    let mut replies = 0;
    while !asked.is_empty() {
        let completion = client.completion_until(until).unwrap().expect("a call hangs");
        let number = asked.remove(&completion.call_id()).expect("it was answered before");
        match completion.outcome() {
            Outcome::Reply => {
                assert_eq!(*completion, number.to_le_bytes());
                replies += 1;
            }
            outcome => assert_eq!(outcome, Outcome::Lost(Loss::Corrupt)),
        }
    }
    assert_eq!((replies, client.in_flight()), (answered, 0));
}

#[test]
fn a_notification_waits_for_its_own_lane_only() {
    let (mut services, mut client) = services_of_one_name(2);
    let mut calls = Vec::new();
    for bytes in [3000, 0] {
        while let Some(call) = client.try_submit(&[1; 3000][..bytes]).unwrap() {
            calls.push(call);
        }
    }
    // One lane then has space. In the other, whose service is stopped, the cancels wait for space.
    while let Some(request) = services[1].try_receive().unwrap() {
        drop(request);
    }
    for call in calls {
        client.cancel(call).unwrap();
    }
    assert!(client.balancer.connections.iter().any(|connection| !connection.outbox.is_empty()));
    let until = Instant::now() + Duration::from_secs(20);
    assert_eq!(client.notify_until(b"note", until).unwrap(), Sent::Sent);
    assert!(Instant::now() < until, "it waited for the stopped service");
    assert_eq!(*services[1].try_receive().unwrap().unwrap(), *b"note");
}

#[test]
fn a_closed_service_gets_no_requests_while_others_serve() {
    let (mut services, mut client) = services_of_one_name(2);
    drop(services.remove(0));
    for _ in 0..4 {
        client.submit(b"x").unwrap();
    }
    for _ in 0..4 {
        services[0].try_receive().unwrap().expect("no service got it").reply(b"").unwrap();
    }
}

/// The number of notifications is not bounded, and a user may leak the responder of each.
#[test]
fn leaked_references_never_free_a_session() {
    let detached = super::edges::DetachedCount::new();
    detached.0.fetch_add(1 << 31, Ordering::Relaxed);
    detached.add();
    assert!(!detached.remove(), "the service has not released it");
    assert!(!detached.is_zero() && !detached.release());
}

#[test]
fn a_placed_value_is_dropped_once_and_not_after_it_was_moved_out() {
    let mut storage = Storage::<Rc<()>>::new();
    let counted = Rc::new(());
    drop(storage.put(Rc::clone(&counted)));
    assert_eq!(Rc::strong_count(&counted), 1);
    let moved = storage.put(Rc::clone(&counted)).into_inner();
    assert_eq!(Rc::strong_count(&counted), 2);
    drop(moved);
    // A leaked value is overwritten, not dropped.
    std::mem::forget(storage.put(Rc::clone(&counted)));
    assert!(Rc::ptr_eq(&storage.put(Rc::clone(&counted)), &counted));
    assert_eq!(Rc::strong_count(&counted), 2);
}

#[test]
fn a_kept_guard_excludes_others_until_it_is_taken() {
    let lock = ReplyLock::new(1);
    lock.lock().keep();
    assert!(lock.try_lock().is_none());
    // SAFETY: this thread kept the guard, and has no other reference to the contents.
    let kept = unsafe { &mut *lock.kept() };
    assert!(kept.is_kept());
    **kept += 1;
    drop(kept.take_kept());
    assert_eq!(*lock.try_lock().expect("it is free"), 2);
    // SAFETY: no other thread has this lock.
    let guard = unsafe { lock.unlocked() };
    assert!(!guard.is_locked());
    guard.keep();
    // SAFETY: as above.
    assert!(!unsafe { &*lock.kept() }.is_kept() && lock.try_lock().is_some());
}

#[test]
fn an_inbox_keeps_the_order_of_all_completions_and_of_each_call() {
    let mut inbox = Inbox::default();
    let stored = |call, outcome, byte| StoredCompletion { call: CallId(call), outcome, bytes: vec![byte] };
    let byte = |completion: Option<StoredCompletion>| completion.map(|completion| completion.bytes[0]);
    inbox.wait_for(CallId(2), Waker::noop());
    assert!(inbox.store(stored(1, Outcome::Part, 1)).is_none());
    assert!(inbox.store(stored(2, Outcome::Part, 2)).is_some());
    inbox.store(stored(1, Outcome::Reply, 3));
    inbox.store(stored(2, Outcome::End, 4));
    inbox.store_first(stored(3, Outcome::Reply, 0));
    assert_eq!((inbox.len(), inbox.finals()), (5, 3));
    assert_eq!(inbox.part_bytes() * 5, inbox.bytes() * 2);
    assert_eq!(byte(inbox.take_of(CallId(2))), Some(2));
    assert_eq!([byte(inbox.take_first()), byte(inbox.take_first()), byte(inbox.take_first())], [0, 1, 3].map(Some));
    assert_eq!(byte(inbox.take_of(CallId(1))), None);
    assert_eq!(inbox.forget(CallId(2)), 1);
    assert!(inbox.is_empty() && inbox.bytes() == 0 && inbox.part_bytes() == 0 && inbox.finals() == 0);
    assert!(inbox.store(stored(2, Outcome::Part, 5)).is_none(), "its task was forgotten");
}

#[test]
fn a_service_that_takes_no_traceparent_gets_the_request_without_it() {
    let mut link = link(1);
    let client = &mut link.clients[0];
    assert!(client.balancer.connections[0].takes_traced);
    let span = Traceparent::new([1; 16], [2; 8], 0).unwrap();
    for (takes_traced, wanted) in [(true, Some(span)), (false, None)] {
        client.balancer.connections[0].takes_traced = takes_traced;
        for bytes in [0, 5, BYTES_MAX as usize] {
            let request = vec![3; bytes];
            client.submit_traced(&request, span, Deadline::Now).unwrap().unwrap();
            let found = link.service.receive().unwrap();
            assert_eq!((&*found, found.traceparent()), (&request[..], wanted));
            assert_eq!(found.deadline(), None, "not to wait for space is no deadline of the call");
        }
    }
    let error = client.submit_traced(&[0; BYTES_MAX as usize + 1], span, Deadline::Now).unwrap_err();
    assert!(matches!(error, Error::TooLarge { bytes, .. } if bytes == BYTES_MAX + 1));
}

#[test]
fn an_invalid_traceparent_is_as_if_there_were_none() {
    let mut link = link(1);
    let sender = &mut link.clients[0].balancer.connections[0].outbox.sender;
    let valid = Traceparent::new([1; 16], [2; 8], 1).unwrap().encode();
    let mut wanted = Vec::new();
    for (slot, at, value) in [(0, 0, vec![0]), (1, 0, vec![255]), (2, 8, vec![0; 8]), (3, 16, vec![0; 16])] {
        let mut bytes = valid;
        bytes[at..at + value.len()].copy_from_slice(&value);
        let header = Header { traced: true, ..Header::new(Kind::Request, 1 << 32 | slot) };
        assert!(sender.try_write(header.words(), &[&bytes, &b"hello"[..]].concat()).unwrap());
        wanted.push(slot == 0);
    }
    for wanted in wanted {
        let request = link.service.receive().unwrap();
        assert_eq!((&*request, request.traceparent().is_some()), (&b"hello"[..], wanted));
    }
    assert_eq!(link.service.corrupt_clients(), 0);
}

#[test]
fn a_call_that_another_service_carries_out_keeps_its_traceparent() {
    let (mut services, mut client) = services_of_one_name(2);
    let span = Traceparent::new([1; 16], [2; 8], 1).unwrap();
    let calls = [0, 1].map(|_| client.submit_traced(b"hello", span, Deadline::Never).unwrap().unwrap());
    calls.iter().for_each(|call| assert!(client.mark_idempotent(*call).unwrap()));
    // Each service has one of the two calls. The second dies with its own.
    let survivor = services.pop().unwrap();
    drop(std::mem::replace(&mut services[0], survivor));
    let until = Instant::now() + Duration::from_secs(60);
    for _ in calls {
        let request = loop {
            // Moves the calls of a service that has ended.
            let _ = client.arm();
            client.disarm();
            if let Some(request) = services[0].try_receive().unwrap() {
                break request;
            }
            assert!(Instant::now() < until, "both calls come to the survivor");
        };
        assert_eq!((&*request, request.traceparent()), (&b"hello"[..], Some(span)));
        request.reply(b"").unwrap();
    }
    calls.iter().for_each(|call| assert_eq!(client.completion_of(*call).unwrap().outcome(), Outcome::Reply));
}

/// A request of the largest size, which the traceparent before it does not change.
const LARGEST: [u8; BYTES_MAX as usize] = [3; BYTES_MAX as usize];

fn span() -> Traceparent {
    Traceparent::new([1; 16], [2; 8], 1).unwrap()
}

/// Fills the lanes of requests, so that none has space for a message of `bytes`.
fn fill(client: &mut Client, bytes: usize) {
    while client.try_notify(&LARGEST[..bytes]).unwrap() == Sent::Sent {}
    // What found no space is not tried again.
    client.cancel_wanted_space();
}

/// Releases all requests. Returns those that are no notifications.
fn take_calls(service: &mut Service) -> Vec<(Vec<u8>, Option<Traceparent>, crate::Responder)> {
    let mut calls = Vec::new();
    while let Some(request) = service.try_receive().unwrap() {
        if !request.is_notification() {
            calls.push((request.to_vec(), request.traceparent(), request.into_responder()));
        }
    }
    calls
}

#[test]
fn an_event_loop_is_woken_for_the_space_of_a_traced_request_of_the_largest_size() {
    let (mut services, mut client) = services_of_one_name(1);
    fill(&mut client, LARGEST.len());
    assert!(client.submit_traced(&LARGEST, span(), Deadline::Now).unwrap().is_none());
    assert_eq!(client.arm().unwrap(), Armed::Waiting);
    assert!(take_calls(&mut services[0]).is_empty());
    readable(&client);
    client.disarm();
    client.submit_traced(&LARGEST, span(), Deadline::Now).unwrap().expect("the lane is empty");
    assert_eq!(take_calls(&mut services[0])[0].1, Some(span()));
}

/// An event loop may arm more than once before it polls its descriptor, as that of libuv did.
#[test]
fn arming_twice_reports_space_twice_until_the_loop_has_found_no_completion() {
    let (mut services, mut client) = services_of_one_name(1);
    fill(&mut client, LARGEST.len());
    assert!(client.try_submit(&LARGEST).unwrap().is_none());
    assert!(take_calls(&mut services[0]).is_empty());
    for _ in 0..3 {
        assert_eq!(client.arm().unwrap(), Armed::Ready);
        readable(&client);
    }
    // Nor does it act if it takes completions, and arms before it has found none.
    let call = client.submit_traced(b"hello", span(), Deadline::Now).unwrap().expect("the lane is empty");
    fill(&mut client, LARGEST.len());
    assert!(client.try_submit(&LARGEST).unwrap().is_none());
    take_calls(&mut services[0]).into_iter().for_each(|(_, _, responder)| responder.reply(b"hello").unwrap());
    assert_eq!(client.arm().unwrap(), Armed::Ready);
    assert_eq!(client.try_completion().unwrap().map(|found| found.call_id()), Some(call));
    assert_eq!(client.arm().unwrap(), Armed::Ready);
    // One that drops its request sleeps.
    assert!(client.try_completion().unwrap().is_none());
    assert_eq!(client.arm().unwrap(), Armed::Waiting);
    client.disarm();
    // One that tries again, and finds no space, is woken again.
    fill(&mut client, LARGEST.len());
    assert!(client.try_submit(&LARGEST).unwrap().is_none());
    assert!(take_calls(&mut services[0]).is_empty());
    assert_eq!(client.arm().unwrap(), Armed::Ready);
    fill(&mut client, LARGEST.len());
    assert!(client.try_submit(&LARGEST).unwrap().is_none());
    assert!(client.try_completion().unwrap().is_none());
    assert_eq!(client.arm().unwrap(), Armed::Waiting);
    assert!(take_calls(&mut services[0]).is_empty());
    readable(&client);
    client.disarm();
}

/// A request of the largest size; and one that is a record without the traceparent and would be two with it.
#[test]
fn a_traced_request_in_a_full_lane_sleeps_until_there_is_space() {
    let options = || <Options>::new().capacity(1 << 16).call_bytes_max(BYTES_MAX);
    for (options, takes_traced, bytes) in [(options(), true, 4096), (options().message_bytes_max(1024), false, 1000)] {
        let (mut services, mut client) = services_with(1, options);
        client.balancer.connections[0].takes_traced = takes_traced;
        fill(&mut client, bytes);
        let (send_thread, thread) = std::sync::mpsc::channel();
        let calling = std::thread::spawn(move || {
            send_thread.send(this_thread()).unwrap();
            let call = client.submit_traced(&LARGEST[..bytes], span(), deadline()).unwrap();
            (call, client)
        });
        wait_until_thread_polls(thread.recv().unwrap());
        // It may come while the service still takes what fills the lane.
        let mut taken = take_calls(&mut services[0]);
        let (call, _client) = calling.join().unwrap();
        assert!(call.is_some(), "there was space");
        taken.extend(take_calls(&mut services[0]));
        assert_eq!((taken.len(), taken[0].1), (1, takes_traced.then(span)));
    }
}

#[test]
fn a_traced_request_in_a_full_lane_ends_at_its_deadline() {
    let (mut services, mut client) = services_of_one_name(1);
    fill(&mut client, LARGEST.len());
    // Its end is the claim.
    let _watchdog = Watchdog::new("the request does not end at its deadline");
    let deadline = Instant::now() + Duration::from_millis(20);
    assert!(client.submit_traced(&LARGEST, span(), deadline).unwrap().is_none());
    assert!(take_calls(&mut services[0]).is_empty());
}

#[test]
fn an_event_loop_is_woken_for_the_space_of_a_traced_call_that_another_service_is_to_carry_out() {
    let (mut services, mut client) = services_of_one_name(2);
    let calls = [0, 1].map(|_| client.submit_traced(&LARGEST, span(), Deadline::Now).unwrap().unwrap());
    calls.iter().for_each(|call| assert!(client.mark_idempotent(*call).unwrap()));
    fill(&mut client, LARGEST.len());
    // Each service has one of the two calls. The first dies with its own.
    let mut survivor = services.pop().unwrap();
    drop(services);
    let until = deadline();
    while client.arm().unwrap() == Armed::Ready || client.service_count() == 2 {
        client.disarm();
        assert!(Instant::now() < until, "the lane of the survivor stays full");
    }
    let own = take_calls(&mut survivor);
    readable(&client);
    // Moves the other call.
    let _ = client.arm().unwrap();
    client.disarm();
    let moved = take_calls(&mut survivor);
    assert_eq!((own.len(), moved.len()), (1, 1));
    assert_eq!((&moved[0].0[..], moved[0].1), (&LARGEST[..], Some(span())));
}

#[test]
fn the_memory_for_a_message_in_pieces_is_counted_before_they_come() {
    const MIB: u64 = 1 << 20;
    let budget = Budget::new(8 * MIB);
    let share = Share::new(&budget);
    let header = Header { more: true, ..Header::new(Kind::Request, 1 << 32) };
    let mut expected = Assembly::new(header, share.take(0), MIB as usize);
    assert_eq!(budget.left(), 7 * MIB);
    assert!(expected.bytes.capacity() as u64 >= MIB);
    assert!(expected.grow(MIB) && budget.left() == 7 * MIB);
    assert!(expected.grow(2) && budget.left() == 7 * MIB - 2, "what is more is counted too");
    drop(expected);

    let mut unexpected = Assembly::new(header, share.take(0), MIB as usize + 1);
    assert_eq!((budget.left(), unexpected.bytes.capacity()), (8 * MIB, 0), "a client may have four times 1 MiB");
    assert!(unexpected.grow(3 * MIB) && budget.left() == 5 * MIB);
    assert!(!unexpected.grow(3 * MIB) && budget.left() == 8 * MIB);
    assert!(!unexpected.grow(1), "of a message without memory nothing more is stored");

    let mut huge = Assembly::new(header, None, usize::MAX);
    assert!((16 * MIB..32 * MIB).contains(&(huge.bytes.capacity() as u64)));
    huge.bytes.extend_from_slice(b"few bytes");
    let bytes = huge.into_bytes();
    assert!(bytes == b"few bytes" && bytes.capacity() < 1024, "a user that keeps it keeps no more");
}

#[test]
fn the_rest_of_a_reply_that_waits_counts_as_memory_until_it_is_written() {
    let _watchdog = Watchdog::new("the reply does not come");
    let options = <Options>::new().capacity(1 << 16).call_bytes_max(1 << 20);
    let Link { mut service, mut clients } = link_with(1, options);
    let client = &mut clients[0];
    let reply: Vec<u8> = (0..1_000_000_u32).map(|at| (at.wrapping_mul(at) >> 8) as u8).collect();
    // The size of the second reply is expected.
    for _ in 0..2 {
        let call = client.submit(b"").unwrap();
        let request = service.receive_until(deadline()).unwrap().unwrap();
        let memory = Arc::clone(&request.contents().responder.session.memory);
        let before = memory.left();
        request.reply(&reply).unwrap();
        assert!(memory.left() <= before - 1_000_000, "the client may have {}, had {before}", memory.left());
        let completion = loop {
            assert!(service.try_receive().unwrap().is_none());
            if let Some(completion) = client.completion_of_until(call, Duration::from_millis(1)).unwrap() {
                break completion.into_vec();
            }
        };
        assert!(completion == reply, "{} bytes", completion.len());
        assert!(service.try_receive().unwrap().is_none());
        assert_eq!(memory.left(), before);
    }
}

#[test]
fn a_reply_that_is_deferred_during_a_flush_is_not_dropped_by_it() {
    let _watchdog = Watchdog::new("a deferred reply is not dropped");
    let Link { mut service, mut clients } = link(1);
    let client = &mut clients[0];
    for _ in 0..20 {
        let mut ids = Vec::new();
        for _ in 0..500 {
            client.submit(b"").unwrap();
            let mut responder = service.receive().unwrap().into_responder();
            responder.is_answered = Flag::Yes;
            ids.push(responder.id);
        }
        let session = Arc::clone(&service.sessions.get(0).unwrap().session);
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    if let Some(mut path) = session.try_lock().unwrap() {
                        session.flush(&mut path).unwrap();
                    }
                }
            });
            ids.iter().for_each(|id| session.defer(Header::new(Kind::Reply, *id), b"").unwrap());
            is_done.store(true, Ordering::Relaxed);
        });
        assert!(service.try_receive().unwrap().is_none());
        for number in 0..500 {
            let reply = client.completion_until(Duration::from_secs(10)).unwrap();
            assert!(reply.is_some(), "{number} of 500 replies came");
        }
    }
}
