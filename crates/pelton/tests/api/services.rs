//! Several services of one name: calls are spread over them, fail over, and are handed over, under load. A service
//! records each call in a journal before it replies. So a call done twice, or answered without being done, is
//! detected.

use crate::support::*;
use pelton::{CallId, Client, Error, Loss, Options, Outcome, Request, Service, Stopper};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A short name of the test, and the directory of its services' journals; both are removed at the end.
struct Name {
    name: String,
    dir: TestDir,
}

impl Name {
    fn new(claim: &'static str) -> Name {
        Name::at(TestDir::new(claim))
    }

    fn at(dir: TestDir) -> Name {
        static NAMES: AtomicU32 = AtomicU32::new(0);
        let number = NAMES.fetch_add(1, Ordering::Relaxed);
        Name { name: format!("test-services-{}-{number}", std::process::id()), dir }
    }

    fn directory(&self) -> PathBuf {
        match std::env::var_os("XDG_RUNTIME_DIR") {
            Some(runtime) => PathBuf::from(runtime).join("pelton").join(&self.name),
            None => {
                std::env::temp_dir().join(format!("pelton-{}", rustix::process::geteuid().as_raw())).join(&self.name)
            }
        }
    }

    /// Starts one more service, which listens when this returns.
    fn serve(&self, with: impl FnOnce(Role) -> Role) -> Child {
        let role = Role::new(child, "serve").with("name", &self.name).with("journals", self.dir.path().display());
        let service = Child::start(with(role));
        service.expect("listening");
        service
    }

    /// How often each call was carried out.
    fn carried_out(&self) -> BTreeMap<u64, u32> {
        let mut times = BTreeMap::new();
        for journal in self.dir.entries() {
            let bytes = std::fs::read(&journal).unwrap();
            for entry in bytes.chunks_exact(8) {
                *times.entry(u64::from_le_bytes(entry.try_into().unwrap())).or_insert(0) += 1;
            }
        }
        times
    }

    fn client(&self) -> Client {
        Client::connect_with(&self.name, &Options::new().capacity(1 << 16).connect_deadline(deadline())).unwrap()
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.directory());
        let _ = self.directory().parent().map(std::fs::remove_dir);
    }
}

#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    match role.get("role") {
        // Records the number at the start of a request, and replies with its process id and that number. Drains, or
        // stops, on command.
        "serve" => {
            let options = options(&role).capacity(1 << 16);
            let mut service = Service::listen_with(role.get("name"), &options).unwrap();
            let journal = (!role.get("journals").is_empty()).then(|| {
                let path = format!("{}/{}", role.get("journals"), std::process::id());
                std::fs::File::options().create(true).append(true).open(path).unwrap()
            });
            let stopper = service.stopper();
            std::thread::spawn(move || {
                loop {
                    match read_line_from_parent().as_str() {
                        "drain" => stopper.drain(),
                        "stop" => stopper.stop(),
                        word => panic!("{word}"),
                    }
                }
            });
            report("listening");
            if role.get("soaks") == "yes" {
                // Longer than a hang may last. SAFETY: no pointers.
                unsafe { libc::alarm(0) };
            }
            let work = Duration::from_micros(role.number("microseconds").unwrap_or(0));
            let answer = |request: Request<'_>| {
                let bytes: [u8; 8] = request[..8].try_into().unwrap();
                if let Some(mut journal) = journal.as_ref() {
                    // One write, whole: the system appends.
                    journal.write_all(&bytes).unwrap();
                }
                if !work.is_zero() {
                    std::thread::sleep(work);
                }
                if request.is_notification() {
                    return;
                }
                if request.ends_with(b"stream") {
                    let mut responder = request.into_responder();
                    // Until it is cancelled, or its client has exited.
                    while !responder.is_cancelled() && responder.part(&[7; 500]).is_ok() {}
                    return;
                }
                let answer = [&u64::from(std::process::id()).to_le_bytes()[..], &bytes].concat();
                // A client that has exited gets no reply.
                let _ = request.reply(&answer);
            };
            service.run(role.number("threads").unwrap_or(2) as usize, answer).unwrap();
            // A drop from here on is visible to clients.
        }
        role => panic!("{role}"),
    }
}

fn request(number: u64) -> Vec<u8> {
    // Some requests travel in pieces.
    let bytes = if number.is_multiple_of(97) { 70_000 } else { 8 + (number % 300) as usize };
    let mut request = number.to_le_bytes().to_vec();
    request.resize(bytes, number as u8);
    request
}

/// The process that replied, and the number.
fn answer(bytes: &[u8]) -> (u64, u64) {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    assert_eq!(bytes.len(), 16);
    (word(0), word(8))
}

/// Sends requests continuously, that many at a time, until stopped, and takes all replies. Every other call is
/// idempotent if `idempotent` is set. Returns the outcome of each call.
fn call_continuously(
    client: &mut Client,
    in_flight: usize,
    idempotent: bool,
    stop: &AtomicBool,
    mut answered: impl FnMut(u64),
) -> Vec<Outcome> {
    let mut requested: HashMap<CallId, u64> = HashMap::new();
    let mut outcomes: Vec<Option<Outcome>> = Vec::new();
    while !stop.load(Ordering::Relaxed) || !requested.is_empty() {
        while requested.len() < in_flight && !stop.load(Ordering::Relaxed) {
            let number = outcomes.len() as u64;
            let Some(call) = client.try_submit(&request(number)).unwrap() else { break };
            if idempotent && number.is_multiple_of(2) {
                assert!(client.mark_idempotent(call).unwrap());
            }
            assert!(requested.insert(call, number).is_none());
            outcomes.push(None);
        }
        if requested.is_empty() {
            // There is no free space anywhere, or no service yet.
            std::thread::yield_now();
            continue;
        }
        let completion = client.completion_until(deadline()).unwrap().expect("a call hangs");
        let number = requested.remove(&completion.call_id()).expect("one reply for each");
        if completion.outcome() == Outcome::Reply {
            assert_eq!(answer(&completion).1, number);
        }
        outcomes[number as usize] = Some(completion.outcome());
        answered(number);
    }
    assert_eq!(client.in_flight(), 0);
    outcomes.into_iter().map(|outcome| outcome.expect("answered")).collect()
}

#[test]
fn calls_are_spread_over_the_services_of_a_name_including_new_ones() {
    let name = Name::new("spread");
    let mut services = vec![name.serve(|role| role)];
    let mut client = name.client();
    for wanted in 1..=4 {
        let until = deadline();
        let mut seen = BTreeSet::new();
        while seen.len() < wanted || client.service_count() < wanted {
            assert!(Instant::now() < until, "{seen:?} of {wanted}");
            let calls: HashSet<CallId> = (0..20).map(|number| client.submit(&request(number)).unwrap()).collect();
            for _ in 0..calls.len() {
                let answered = client.completion_until(deadline()).unwrap().expect("a call hangs");
                assert!(calls.contains(&answered.call_id()) && answered.outcome() == Outcome::Reply);
                seen.insert(answer(&answered).0);
            }
        }
        assert_eq!(seen, services.iter().map(|service| u64::from(service.pid())).collect());
        // With that many in flight each service has as many as the others.
        let calls: Vec<CallId> = (0..60).map(|number| client.submit(&request(number + 1)).unwrap()).collect();
        let mut by = BTreeMap::new();
        for _ in calls {
            let completion = client.completion_until(deadline()).unwrap().expect("a call hangs");
            *by.entry(answer(&completion).0).or_insert(0) += 1;
        }
        assert_eq!(by.len(), wanted, "{by:?}");
        services.push(name.serve(|role| role));
    }
}

#[test]
fn a_rolling_replacement_under_load_fails_and_repeats_no_call() {
    for (threads, microseconds, in_flight) in [(2, 0, 200), (1, 300, 30), (3, 1000, 700)] {
        let name = Name::new("rolling replacement");
        let serve = || name.serve(|role| role.with("threads", threads).with("microseconds", microseconds));
        let mut services: Vec<Child> = (0..3).map(|_| serve()).collect();
        let rounds = std::env::var("PELTON_ROUNDS").map_or(6, |rounds| rounds.parse().unwrap());
        let stop = AtomicBool::new(false);
        let outcomes = std::thread::scope(|scope| {
            let asking = scope.spawn(|| call_continuously(&mut name.client(), in_flight, false, &stop, |_| ()));
            let concurrent = scope.spawn(|| {
                // One call at a time, with pauses between.
                let (mut client, mut requested) = (name.client(), 1 << 40);
                while !stop.load(Ordering::Relaxed) {
                    assert_eq!(answer(&client.call(&request(requested)).unwrap()).1, requested);
                    requested += 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            for _ in 0..rounds {
                services.push(serve());
                let mut old = services.remove(0);
                old.write_line("drain");
                old.wait_for_success();
            }
            stop.store(true, Ordering::Relaxed);
            concurrent.join().unwrap();
            asking.join().unwrap()
        });
        let failed: Vec<_> = outcomes.iter().enumerate().filter(|(_, outcome)| **outcome != Outcome::Reply).collect();
        assert!(failed.is_empty(), "of {}: {failed:?}", outcomes.len());
        let carried_out = name.carried_out();
        assert!((0..outcomes.len() as u64).all(|number| carried_out.contains_key(&number)));
        let twice: Vec<_> = carried_out.iter().filter(|(_, times)| **times != 1).collect();
        assert!(twice.is_empty(), "{twice:?}");
    }
}

#[test]
fn kills_under_load_lose_only_calls_that_are_not_idempotent() {
    let name = Name::new("kills");
    let serve = || name.serve(|role| role.with("microseconds", 200));
    let mut services: Vec<Child> = (0..3).map(|_| serve()).collect();
    let stop = AtomicBool::new(false);
    let rounds = std::env::var("PELTON_ROUNDS").map_or(8, |rounds| rounds.parse().unwrap());
    let outcomes = std::thread::scope(|scope| {
        let asking = scope.spawn(|| call_continuously(&mut name.client(), 100, true, &stop, |_| ()));
        for _ in 0..rounds {
            services.push(serve());
            services.remove(0).kill();
        }
        stop.store(true, Ordering::Relaxed);
        asking.join().unwrap()
    });
    let carried_out = name.carried_out();
    let mut lost = 0;
    for (number, outcome) in outcomes.iter().enumerate() {
        let times = carried_out.get(&(number as u64)).copied().unwrap_or(0);
        match outcome {
            Outcome::Reply => assert!(times >= 1, "call {number} was answered and not carried out"),
            Outcome::Lost(Loss::PeerDied) if !number.is_multiple_of(2) => lost += 1,
            outcome => panic!("call {number}: {outcome:?}"),
        }
        assert!(number.is_multiple_of(2) || times <= 1, "call {number} was carried out {times} times");
    }
    println!("{lost} of {} calls were lost", outcomes.len());
}

/// Descriptors and resident bytes of a process.
fn resources(pid: u32) -> (usize, u64) {
    let descriptors = kernel::descriptors_of(pid);
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap();
    (descriptors, statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096)
}

/// Calls, streams, cancels and notifications, while one of three services after the other is drained or killed and
/// replaced. It lasts seconds, or as many as PELTON_SECONDS says. At the end the client and the remaining service use
/// as many resources as at the start.
#[test]
fn a_soak_leaks_no_descriptors_and_no_memory() {
    let seconds = std::env::var("PELTON_SECONDS").map_or(4, |seconds| seconds.parse().unwrap());
    // A soak of a day is no hang: each of its waits has a deadline.
    let name = Name::at(TestDir::unwatched());
    // More threads than streams in a round: if all of them streamed, none could read the cancel.
    let without_journals = |role: Role| role.with("journals", "").with("threads", 13).with("soaks", "yes");
    let stays = name.serve(without_journals);
    let mut replaced: Vec<Child> = (0..2).map(|_| name.serve(without_journals)).collect();
    let mut client = name.client();
    let (until, mut round, mut before, mut calls) = (Instant::now() + Duration::from_secs(seconds), 0u64, None, 0u64);
    while Instant::now() < until || round < 8 {
        round += 1;
        replaced.push(name.serve(without_journals));
        let mut old = replaced.remove(0);
        let mut requested = HashMap::new();
        for number in 0..600u64 {
            let is_stream = number.is_multiple_of(50);
            let wanted = if is_stream { [&number.to_le_bytes()[..], b"stream"].concat() } else { request(number) };
            let call = loop {
                match client.try_submit(&wanted).unwrap() {
                    Some(call) => break call,
                    None if requested.is_empty() => std::thread::yield_now(),
                    None => take_one(&mut client, &mut requested),
                }
            };
            client.mark_idempotent(call).unwrap();
            requested.insert(call, is_stream);
            if number.is_multiple_of(7) {
                client.notify(&number.to_le_bytes()).unwrap();
            }
            if number.is_multiple_of(11) && client.cancel(call).unwrap() {
                requested.remove(&call);
            }
            if number == 300 {
                match round.is_multiple_of(2) {
                    true => old.write_line("drain"),
                    false => old.signal(rustix::process::Signal::KILL),
                }
            }
            while requested.len() > 60 {
                take_one(&mut client, &mut requested);
            }
        }
        while !requested.is_empty() {
            take_one(&mut client, &mut requested);
        }
        calls += 600;
        // The cancelled ones are answered too, and the new one is found.
        let settled = deadline();
        while client.in_flight() > 0 || client.service_count() != 3 {
            assert!(
                Instant::now() < settled,
                "{} in flight at {} services",
                client.in_flight(),
                client.service_count()
            );
            let call = client.submit(&request(1)).unwrap();
            let _ = client.completion_of_until(call, deadline()).map(|reply| assert!(reply.is_some()));
        }
        // A client must read its replies to let the service drain.
        old.wait();
        let now = (resources(std::process::id()), resources(stays.pid()));
        match before {
            // The first rounds fill caches and arenas.
            None if round == 5 => before = Some(now),
            None => {}
            Some(before) => {
                let ((own, own_bytes), (its, its_bytes)) = now;
                let ((own_before, own_bytes_before), (its_before, its_bytes_before)) = before;
                assert_eq!(its, its_before, "descriptors of the service that stays, after {calls} calls");
                // Other tests of this process have descriptors of their own.
                assert!(own <= own_before + 100, "{own_before} descriptors became {own}");
                const SLACK: u64 = 48 << 20;
                assert!(own_bytes < own_bytes_before + SLACK, "{own_bytes_before} resident bytes became {own_bytes}");
                assert!(its_bytes < its_bytes_before + SLACK, "{its_bytes_before} resident bytes became {its_bytes}");
            }
        }
    }
    println!(
        "{calls} calls in {round} rounds: {before:?} became {:?}",
        (resources(std::process::id()), resources(stays.pid()))
    );
}

/// Takes one completion; a stream is cancelled after its first part.
fn take_one(client: &mut Client, requested: &mut HashMap<CallId, bool>) {
    let completion = client.completion_until(deadline()).unwrap().expect("a call hangs");
    let (call, outcome) = (completion.call_id(), completion.outcome());
    drop(completion);
    match outcome {
        Outcome::Part => assert!(client.cancel(call).unwrap()),
        // A stream whose service was killed after its first part was cancelled by then.
        outcome => assert!(requested[&call] || outcome == Outcome::Reply, "{outcome:?}"),
    }
    requested.remove(&call);
}

#[test]
fn a_name_without_a_service_is_an_error_until_one_serves_it_again() {
    let name = Name::new("nobody");
    let service = name.serve(|role| role.with("microseconds", 1_000_000_000).with("threads", 1));
    let mut client = name.client();
    let (one, two) = (client.submit(&request(1)).unwrap(), client.submit(&request(2)).unwrap());
    // It may be repeated, but no service is left to do it.
    assert!(client.mark_idempotent(two).unwrap());
    service.kill();
    let error = client.completion_of(one).unwrap_err();
    assert!(error.is_peer_died(), "{error}");
    let completion = client.completion_until(deadline()).unwrap().expect("it hangs");
    assert_eq!((completion.call_id(), completion.outcome()), (two, Outcome::Lost(Loss::PeerDied)));
    drop(completion);
    assert_eq!((client.in_flight(), client.service_count()), (0, 0));
    assert!(matches!(client.try_submit(&request(3)), Err(Error::NoListener { .. })));
    assert!(matches!(client.call(&request(3)), Err(Error::NoListener { .. })));
    assert!(matches!(client.reserve(8), Err(Error::NoListener { .. })));
    assert!(!client.mark_idempotent(two).unwrap(), "it is over");

    let service = name.serve(|role| role);
    let reply = client.call_until(&request(4), deadline()).unwrap().expect("it hangs");
    assert_eq!(answer(&reply), (u64::from(service.pid()), 4));
    drop(reply);
    let mut reservation = client.reserve(8).unwrap();
    reservation.copy_from_slice(&5u64.to_le_bytes());
    let call = reservation.submit().unwrap();
    assert_eq!(answer(&client.completion_of(call).unwrap()).1, 5);
}

#[test]
fn open_calls_of_a_stopped_service_are_repeated_only_if_idempotent() {
    let name = Name::new("stopped");
    // Long enough that some calls are open when the other has started and this one is stopped, on a busy machine too.
    let mut first = name.serve(|role| role.with("microseconds", 1_000_000).with("threads", 1));
    let mut client = name.client();
    let calls: Vec<CallId> = (0..4).map(|number| client.submit(&request(number + 1)).unwrap()).collect();
    client.mark_idempotent(calls[3]).unwrap();
    let second = name.serve(|role| role);
    first.write_line("stop");
    let mut outcomes = BTreeMap::new();
    for _ in 0..4 {
        let completion = client.completion_until(deadline()).unwrap().expect("it hangs");
        outcomes.insert(completion.call_id(), completion.outcome());
        if completion.call_id() == calls[3] && completion.outcome() == Outcome::Reply {
            assert!([first.pid(), second.pid()].map(u64::from).contains(&answer(&completion).0));
        }
    }
    assert_eq!(outcomes[&calls[3]], Outcome::Reply);
    assert!(
        calls[..3].iter().all(|call| [Outcome::Reply, Outcome::Lost(Loss::Closed)].contains(&outcomes[call])),
        "{outcomes:?}"
    );
    assert!(outcomes.values().any(|outcome| *outcome == Outcome::Lost(Loss::Closed)), "{outcomes:?}");
    first.wait_for_success();
}

#[test]
fn a_draining_service_answers_its_calls_and_returns_the_rest() {
    let dir = TestDir::new("drain");
    let mut service = Service::listen(&dir.name()).unwrap();
    let stopper = service.stopper();
    let name = dir.name();
    let mut client = {
        let connecting = std::thread::spawn(move || Client::connect_with(&name, &Options::new()).unwrap());
        while !connecting.is_finished() {
            assert!(service.receive_until(Instant::now() + Duration::from_millis(1)).unwrap().is_none());
        }
        connecting.join().unwrap()
    };
    let taken = client.submit(b"taken").unwrap();
    let responder = service.receive().unwrap().into_responder();
    stopper.drain();
    assert!(service.try_receive().unwrap().is_none(), "one call is open still");
    // No client can connect any more, and the name is free.
    assert!(matches!(Client::connect(&dir.name()), Err(Error::NoListener { .. })));
    let back = client.submit(b"too late").unwrap();
    client.notify(b"but this is taken").unwrap();
    let reported = service.try_receive().unwrap().expect("a notification");
    assert!(reported.is_notification() && *reported == *b"but this is taken");
    drop(reported);
    let returned = client.completion_until(deadline()).unwrap().expect("it hangs");
    assert_eq!((returned.call_id(), returned.outcome()), (back, Outcome::Lost(Loss::Returned)));
    drop(returned);
    let call = client.submit(b"too late too").unwrap();
    assert!(service.try_receive().unwrap().is_none());
    assert!(matches!(client.completion_of(call), Err(Error::Refused(_))));
    // The last reply ends it, also if the service sleeps.
    let waiting = std::thread::scope(|scope| {
        let thread = this_thread();
        scope.spawn(move || {
            wait_until_thread_polls(thread);
            responder.reply(b"answer").unwrap();
        });
        service.receive().map(|_| ())
    });
    assert!(waiting.unwrap_err().is_closed());
    assert_eq!(&*client.completion_of(taken).unwrap(), b"answer");
    // Before the service is dropped.
    assert!(client.completion().unwrap_err().is_closed());
    assert!(client.submit(b"more").unwrap_err().is_closed());
}

/// A service in this process, run by its own thread until it is dropped.
struct Serving {
    stopper: Stopper,
    thread: Option<JoinHandle<()>>,
}

impl Serving {
    fn new(mut service: Service, answer: impl Fn(Request<'_>) + Sync + Send + 'static) -> Serving {
        let stopper = service.stopper();
        Serving { stopper, thread: Some(std::thread::spawn(move || service.run(1, answer).unwrap())) }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stopper.stop();
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking());
    }
}

fn echo(request: Request<'_>) {
    let bytes = request.to_vec();
    // A client that has exited gets no reply.
    let _ = request.reply(&bytes);
}

fn small<M>() -> Options<M> {
    <Options>::new().capacity(1 << 16).cast()
}

/// Of a service that this thread runs: accepts the client that another thread connects.
fn accept_connecting<T>(service: &mut Service, connecting: JoinHandle<T>) -> T {
    while !connecting.is_finished() {
        assert!(service.receive_until(Instant::now() + Duration::from_millis(1)).unwrap().is_none());
    }
    connecting.join().unwrap()
}

#[test]
fn a_call_no_remaining_service_accepts_is_lost_and_delays_no_other() {
    let name = Name::new("too large for those left");
    let (keep, kept) = std::sync::mpsc::channel();
    let keep_call = move |request: Request<'_>| keep.send(request.into_responder()).unwrap();
    let first = Serving::new(Service::listen_with(&name.name, &small()).unwrap(), keep_call);
    let mut client = name.client();
    let large = client.submit(&[1; 100_000]).unwrap();
    let little = client.submit(b"little").unwrap();
    for call in [large, little] {
        assert!(client.mark_idempotent(call).unwrap());
    }
    let responders = [kept.recv().unwrap(), kept.recv().unwrap()];
    let _second = Serving::new(Service::listen_with(&name.name, &small().call_bytes_max(50_000)).unwrap(), echo);
    drop(first);
    let mut outcomes = HashMap::new();
    for _ in 0..2 {
        let completion = client.completion_until(deadline()).unwrap().expect("a call hangs");
        outcomes.insert(completion.call_id(), completion.outcome());
    }
    assert_eq!(outcomes, HashMap::from([(large, Outcome::Lost(Loss::Closed)), (little, Outcome::Reply)]));
    drop(responders);
}

#[test]
fn a_service_with_a_lower_limit_gets_the_calls_within_it() {
    let name = Name::new("one takes less");
    let _most = Serving::new(Service::listen_with(&name.name, &small()).unwrap(), echo);
    let mut client = name.client();
    let most = client.request_bytes_max();
    let _nothing = Serving::new(Service::listen_with(&name.name, &small().call_bytes_max(0)).unwrap(), |request| {
        assert!(request.is_empty());
        echo(request);
    });
    let until = deadline();
    while client.service_count() < 2 {
        assert!(Instant::now() < until);
        assert_eq!(*client.call(b"0123456789").unwrap(), *b"0123456789");
    }
    for _ in 0..20 {
        assert_eq!(*client.call(b"0123456789").unwrap(), *b"0123456789");
        assert_eq!(*client.call(b"").unwrap(), *b"");
        let mut reservation = client.reserve(3).unwrap();
        reservation.copy_from_slice(b"abc");
        let call = reservation.submit().unwrap();
        assert_eq!(*client.completion_of(call).unwrap(), *b"abc");
    }
    assert_eq!((client.request_bytes_max(), client.service_count()), (most, 2));
}

#[test]
fn a_call_returned_without_another_service_fails_in_the_next_poll() {
    let name = Name::new("given back");
    let mut service = Service::listen_with(&name.name, &small()).unwrap();
    let own = name.name.clone();
    let mut client =
        accept_connecting(&mut service, std::thread::spawn(move || Client::connect_with(&own, &small()).unwrap()));
    let taken = client.submit(b"taken").unwrap();
    let responder = service.receive().unwrap().into_responder();
    let back = client.submit(b"back").unwrap();
    service.stopper().drain();
    for _ in 0..2 {
        assert!(service.try_receive().unwrap().is_none());
    }
    let reported = client.try_completion().unwrap().expect("the loss was reported only by the poll");
    assert_eq!((reported.call_id(), reported.outcome()), (back, Outcome::Lost(Loss::Returned)));
    drop(reported);
    responder.reply(b"answer").unwrap();
    assert_eq!(*client.completion_of(taken).unwrap(), *b"answer");
}

#[test]
fn a_client_connects_to_another_service_if_one_is_silent() {
    let name = Name::new("is silent");
    // They listen, and discover no other service.
    let silent = [(); 2].map(|_| Service::listen_with(&name.name, &small()).unwrap());
    let _serving = Serving::new(Service::listen_with(&name.name, &small()).unwrap(), echo);
    for _ in 0..8 {
        let mut client = Client::connect(&name.name).unwrap();
        assert_eq!(*client.call(b"hello").unwrap(), *b"hello");
    }
    drop(silent);
}

#[test]
fn a_silent_service_keeps_no_client_from_a_later_one() {
    let name = Name::new("starts later");
    let first = Serving::new(Service::listen_with(&name.name, &small()).unwrap(), echo);
    let mut client = name.client();
    assert_eq!(*client.call(b"first").unwrap(), *b"first");
    let silent = Service::listen_with(&name.name, &small()).unwrap();
    drop(first);
    // It may have exited before, or after, the call was written.
    let _ = client.call_until(b"lost", Instant::now() + Duration::from_millis(20)).map(|_| ());
    let (own, calling) = (name.name.clone(), this_thread());
    let later = std::thread::spawn(move || {
        // The client waits for the silent service.
        wait_until_thread_polls(calling);
        Serving::new(Service::listen_with(&own, &small()).unwrap(), echo)
    });
    // A client that waited for the silent one alone would do so for five seconds.
    let soon = Instant::now() + Duration::from_secs(4);
    let reply = client.call_until(b"second", soon).unwrap().expect("it waits for the silent one");
    assert_eq!(*reply, *b"second");
    drop((reply, later.join().unwrap(), silent));
}

#[test]
fn clients_of_one_call_are_spread_too() {
    let name = Name::new("short lives");
    let calls: Arc<[AtomicU32; 3]> = Arc::default();
    let serve = |own: usize| {
        let calls = calls.clone();
        let answer = move |request: Request<'_>| {
            calls[own].fetch_add(1, Ordering::Relaxed);
            echo(request);
        };
        Serving::new(Service::listen_with(&name.name, &small()).unwrap(), answer)
    };
    let _services = [0, 1, 2].map(serve);
    let until = deadline();
    while calls.iter().any(|calls| calls.load(Ordering::Relaxed) < 5) {
        assert!(Instant::now() < until, "{calls:?}");
        drop(name.client().call(b"x").unwrap());
    }
}

#[test]
fn a_client_without_free_space_discovers_a_new_service() {
    for waits in [false, true] {
        let name = Name::new("no free space");
        let mut full = Service::listen_with(&name.name, &small()).unwrap();
        let own = name.name.clone();
        let mut client =
            accept_connecting(&mut full, std::thread::spawn(move || Client::connect_with(&own, &small()).unwrap()));
        while client.try_submit(&[0; 10_000]).unwrap().is_some() {}
        let _idle = Serving::new(Service::listen_with(&name.name, &small()).unwrap(), echo);
        let until = deadline();
        match waits {
            true => assert!(client.submit_until(&[0; 10_000], until).unwrap().is_some(), "it hangs"),
            false => {
                while client.try_submit(&[0; 10_000]).unwrap().is_none() {
                    assert!(Instant::now() < until, "it is never found");
                    assert!(client.try_completion().unwrap().is_none());
                    std::thread::yield_now();
                }
            }
        }
        assert_eq!(client.service_count(), 2);
    }
}

#[test]
fn notifications_go_to_the_successor_while_another_client_is_drained() {
    let name = Name::new("notifications");
    let (keep, kept) = std::sync::mpsc::channel();
    let keep_call = move |request: Request<'_>| {
        if !request.is_notification() {
            keep.send(request.into_responder()).unwrap();
        }
    };
    let first = Serving::new(Service::listen_with(&name.name, &small()).unwrap(), keep_call);
    let (mut client, mut other) = (name.client(), name.client());
    other.submit(b"held").unwrap();
    let responder = kept.recv().unwrap();
    let reported = Arc::new(AtomicU32::new(0));
    let count = reported.clone();
    let count_notification = move |request: Request<'_>| {
        assert!(request.is_notification());
        count.fetch_add(1, Ordering::Relaxed);
    };
    let _second = Serving::new(Service::listen_with(&name.name, &small()).unwrap(), count_notification);
    first.stopper.drain();
    let until = deadline();
    while reported.load(Ordering::Relaxed) < 100 {
        assert!(Instant::now() < until, "nobody takes them");
        assert_eq!(client.notify_until(b"hello", until).unwrap(), pelton::Sent::Sent);
        std::thread::yield_now();
    }
    // From now on all of them.
    let before = reported.load(Ordering::Relaxed);
    for _ in 0..1000 {
        assert_eq!(client.notify_until(b"hello", until).unwrap(), pelton::Sent::Sent);
    }
    while reported.load(Ordering::Relaxed) < before + 1000 {
        assert!(Instant::now() < until, "{} of 1000 were taken", reported.load(Ordering::Relaxed) - before);
        std::thread::yield_now();
    }
    responder.reply(b"").unwrap();
}

#[test]
fn a_socket_of_another_kind_under_the_name_is_ignored() {
    let name = Name::new("stray");
    let first = Serving::new(Service::listen_with(&name.name, &small()).unwrap(), echo);
    let _stray = std::os::unix::net::UnixListener::bind(name.directory().join("0")).unwrap();
    let _second = Serving::new(Service::listen_with(&name.name, &small()).unwrap(), echo);
    let mut client = Client::connect(&name.name).unwrap();
    let until = deadline();
    while client.service_count() < 2 {
        assert!(Instant::now() < until, "only one is found");
        drop(client.call(b"x").unwrap());
    }
    drop(first);
    assert_eq!(*client.call_until(b"y", until).unwrap().expect("it hangs"), *b"y");
}

/// A client that the service has answered once, and an address for another listener.
fn answered(name: &Name) -> (Client, Serving, PathBuf) {
    let serving = Serving::new(Service::listen_with(&name.name, &small()).unwrap(), echo);
    let mut client = name.client();
    assert_eq!(*client.call(b"hello").unwrap(), *b"hello");
    (client, serving, name.directory().join("another"))
}

#[test]
fn a_service_that_always_hangs_up_is_retried_with_a_pause() {
    use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType};
    use rustix::net::{accept, bind, listen, shutdown, socket_with};
    let name = Name::new("hangs up");
    let (mut client, serving, path) = answered(&name);
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    let (start, greeted) = (Instant::now(), AtomicU32::new(0));
    drop(serving);
    listen(&socket, 8).unwrap();
    std::thread::scope(|scope| {
        // Until it is shut down.
        scope.spawn(|| {
            while accept(&socket).is_ok() {
                greeted.fetch_add(1, Ordering::Relaxed);
            }
        });
        let until = Instant::now() + Duration::from_millis(500);
        // The first may detect that the service has exited.
        while Instant::now() < until {
            assert!(!matches!(client.call_until(b"anybody?", until), Ok(Some(_))));
        }
        // One in each ten milliseconds, and those that a scan of the directory starts.
        let most = start.elapsed().as_millis() / 10 + 20;
        let times = greeted.load(Ordering::Relaxed).into();
        assert!((2..=most).contains(&times), "{times} times, wanted at most {most}");
        // Nor does it keep the client from a service that starts.
        let _serving = Serving::new(Service::listen_with(&name.name, &small()).unwrap(), echo);
        assert_eq!(*client.call_until(b"again", deadline()).unwrap().expect("it hangs"), *b"again");
        shutdown(&socket, Shutdown::Both).unwrap();
    });
}

#[test]
fn a_waiting_client_gets_the_reason_of_a_refusal() {
    let name = Name::new("refuses");
    let (mut client, serving, path) = answered(&name);
    let listener = Options::new().listen(&format!("unix:{}", path.display())).unwrap();
    drop(serving);
    let over = Arc::new(AtomicBool::new(false));
    let is_over = over.clone();
    let refusing = std::thread::spawn(move || {
        let mut times = 0;
        while !is_over.load(Ordering::Relaxed) {
            let soon = Instant::now() + Duration::from_millis(20);
            match listener.accept_receiver_until(soon) {
                Ok(None) => {}
                // Each is refused: this is no service.
                refused => times += u32::from(refused.is_err()),
            }
        }
        times
    });
    for _ in 0..20 {
        let until = deadline();
        let error = loop {
            match client.call_until(b"hello", until) {
                // It may have been lost with the service.
                Err(error) if error.is_closed() => assert!(Instant::now() < until),
                Err(error) => break error,
                Ok(reply) => panic!("{reply:?}"),
            }
        };
        assert!(matches!(error, Error::Refused(_)), "{error}");
    }
    over.store(true, Ordering::Relaxed);
    // As often as it was returned, and once or twice more: no service gets a second request before.
    let times = refusing.join().unwrap();
    assert!(times <= 22, "refused {times} times");
}

#[test]
fn a_service_whose_socket_name_is_taken_listens_at_the_next() {
    let name = Name::new("same number");
    let _first = Serving::new(Service::listen_with(&name.name, &small()).unwrap(), echo);
    // As if processes with this process id in other pid namespaces had taken the next numbers.
    let own = std::fs::read_dir(name.directory()).unwrap().next().unwrap().unwrap().file_name();
    let own = own.to_str().unwrap().rsplit_once('.').unwrap().1.parse::<u32>().unwrap();
    let _others: Vec<_> = (own + 1..own + 40)
        .filter_map(|number| {
            let path = name.directory().join(format!("{}.{number}", std::process::id()));
            std::os::unix::net::UnixListener::bind(path).ok()
        })
        .collect();
    let _second = Service::listen_with(&name.name, &small()).unwrap();
}

#[test]
fn an_idempotent_call_that_ends_each_service_is_lost_after_three_repeats() {
    let name = Name::new("ends each");
    let mut service = Service::listen_with(&name.name, &small()).unwrap();
    let own = name.name.clone();
    let mut client =
        accept_connecting(&mut service, std::thread::spawn(move || Client::connect_with(&own, &small()).unwrap()));
    let call = client.submit(b"x").unwrap();
    assert!(client.mark_idempotent(call).unwrap());
    let asking = std::thread::spawn(move || {
        let completion = client.completion_until(deadline()).unwrap().expect("it is repeated for ever");
        completion.outcome()
    });
    let mut started = 0;
    while !asking.is_finished() {
        let Some(request) = service.receive_until(Instant::now() + Duration::from_millis(10)).unwrap() else {
            continue;
        };
        let responder = request.into_responder();
        started += 1;
        // Its successor listens before it exits.
        let next = Service::listen_with(&name.name, &small()).unwrap();
        drop((std::mem::replace(&mut service, next), responder));
    }
    assert_eq!((asking.join().unwrap(), started), (Outcome::Lost(Loss::Closed), 4));
}
