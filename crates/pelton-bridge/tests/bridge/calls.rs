//! Calls over NATS: a service here, a service of NATS, and a bridge that makes it a local service there.

use crate::{DEADLINE, Place, Running, bridge, eventually, refused};
use async_nats::HeaderMap;
use futures_util::StreamExt as _;
use pelton::{CallId, Client, Completion, Deadline, Error, Options, Outcome, Request, Service, Stopper, Traceparent};
use rustix::process::Signal;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// A service on threads of this process.
struct Serving {
    stopper: Stopper,
    thread: Option<JoinHandle<()>>,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    begun: AtomicU64,
    late: AtomicU64,
    cancelled: AtomicU64,
    /// Calls of "hold" may end.
    is_open: AtomicBool,
}

impl Serving {
    fn start(name: &str, host: &'static str) -> Serving {
        let mut service = Service::listen(name).unwrap();
        let (stopper, state) = (service.stopper(), Arc::new(State::default()));
        let shared = state.clone();
        let thread = std::thread::spawn(move || service.run(4, |request| answer(request, host, &shared)).unwrap());
        Serving { stopper, thread: Some(thread), state }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.state.is_open.store(true, SeqCst);
        self.stopper.stop();
        let _ = self.thread.take().unwrap().join();
    }
}

fn answer(request: Request<'_>, host: &str, state: &State) {
    state.begun.fetch_add(1, SeqCst);
    let (text, mut request) = request.into_parts();
    let text = String::from_utf8(text).unwrap();
    let _ = match text.split_once(' ').unwrap_or((&text, "")) {
        ("late", _) => {
            state.late.fetch_add(1, SeqCst);
            request.reply(b"")
        }
        ("echo", text) => request.reply(text.as_bytes()),
        ("host", _) => request.reply(host.as_bytes()),
        ("fail", text) => request.fail(70_000, text.as_bytes()),
        ("large", _) => request.reply(&[0; 100_000]),
        ("drop", _) => Ok(()),
        ("deadline", _) => {
            let left = request.deadline().map(|deadline| deadline.saturating_duration_since(Instant::now()));
            request.reply(format!("{}", left.map_or(0, |left| left.as_secs())).as_bytes())
        }
        ("parts", count) => {
            let count: u32 = count.parse().unwrap();
            for number in 0..count {
                if request.part(&number.to_le_bytes()).is_err() {
                    return;
                }
            }
            request.end()
        }
        ("blocks", count) => {
            let count: u32 = count.parse().unwrap();
            for number in 0..count {
                if request.part(&block(number)).is_err() {
                    return;
                }
            }
            request.end()
        }
        ("trace", _) => {
            let span = request.traceparent().map(|span| span.to_string());
            request.reply(span.unwrap_or_default().as_bytes())
        }
        ("hold", _) => {
            while !state.is_open.load(SeqCst) {
                if request.is_cancelled() {
                    state.cancelled.fetch_add(1, SeqCst);
                    return;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            request.reply(host.as_bytes())
        }
        (other, _) => panic!("{other}"),
    };
}

/// A part of 32 KiB.
fn block(number: u32) -> Vec<u8> {
    number.to_le_bytes().repeat(8 << 10)
}

impl Place {
    fn name(&self, name: &str) -> String {
        format!("unix:{}", self.path(name))
    }

    fn calling(&self, command: &'static str, words: &[&str]) -> Running {
        let running = Running::start(command, bridge(words).args(["--nats", &self.server.url()]));
        running.says(" as ");
        running
    }

    fn serve(&self, service: &str) -> Running {
        self.calling("serve", &["serve", &self.name(service), "--subject", "svc.test"])
    }

    fn call(&self, name: &str, more: &[&str]) -> (Running, Client) {
        let name = self.name(name);
        let running = self.calling("call", &[&["call", "svc.test", &name], more].concat());
        (running, Client::connect(&name).unwrap())
    }
}

fn completion(client: &mut Client, call: CallId) -> Completion<'_> {
    client.completion_of_until(call, Instant::now() + DEADLINE).unwrap().expect("in time")
}

fn text(client: &mut Client, request: &str) -> Result<String, Error> {
    let completion = client.call_until(request.as_bytes(), Instant::now() + DEADLINE)?.expect("in time");
    Ok(String::from_utf8(completion.ok()?.to_vec()).unwrap())
}

#[track_caller]
fn failed(client: &mut Client, request: &str, code: u32, words: &str) {
    match text(client, request) {
        Err(Error::CallFailed(failure)) => {
            let text = String::from_utf8_lossy(&failure.bytes).into_owned();
            assert!(failure.code == code && text.contains(words), "{} {text}", failure.code);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_service_of_another_machine_looks_like_a_local_one() {
    let Some(mut place) = Place::new(&[]) else { return };
    let (_call, mut client) = place.call("there", &[]);
    // Reported by the server, not by a time-out.
    failed(&mut client, "echo x", 503, "no service replies on svc.test");
    let serving = Serving::start(&place.name("here"), "here");
    let mut serve = place.serve("here");
    assert_eq!(text(&mut client, "echo hello").unwrap(), "hello");
    assert_eq!(text(&mut client, "echo ").unwrap(), "");
    failed(&mut client, "fail two\r\nlines", 70_000, "two\r\nlines");
    assert!(matches!(text(&mut client, "drop"), Err(Error::CallAbandoned)));
    failed(&mut client, "large", 413, "100000 bytes");
    failed(&mut client, &"x".repeat(70_000), 413, "70000 bytes");

    // A reply in parts, more than may be in flight.
    let call = client.submit(b"parts 1000").unwrap();
    for number in 0..1000u32 {
        let part = completion(&mut client, call);
        assert_eq!((part.outcome(), &*part), (Outcome::Part, &number.to_le_bytes()[..]));
    }
    assert_eq!(completion(&mut client, call).outcome(), Outcome::End);

    // A traceparent travels, with a deadline and without.
    let span = Traceparent::new([7; 16], [9; 8], 1).unwrap();
    for deadline in [Deadline::Never, Deadline::from(DEADLINE)] {
        let call = client.try_submit_traced_by(b"trace", span, deadline).unwrap().unwrap();
        assert_eq!(&*completion(&mut client, call), span.to_string().as_bytes());
    }
    assert_eq!(text(&mut client, "trace").unwrap(), "");

    // Deadlines travel; one that passes ends the call on both sides.
    let call = client.submit(b"deadline").unwrap();
    assert_eq!(&*completion(&mut client, call), b"0");
    let call = client.try_submit_by(b"deadline", Instant::now() + Duration::from_secs(100)).unwrap().unwrap();
    let left: u64 = String::from_utf8(completion(&mut client, call).to_vec()).unwrap().parse().unwrap();
    assert!((30..100).contains(&left), "{left}");
    let call = client.try_submit_by(b"hold", Instant::now() + Duration::from_millis(50)).unwrap().unwrap();
    assert_eq!(completion(&mut client, call).outcome(), Outcome::Failed(504));
    eventually("the call to be cancelled by its deadline", || serving.state.cancelled.load(SeqCst) == 1);
    let before = serving.state.begun.load(SeqCst);
    let call = client.submit(b"hold").unwrap();
    eventually("the call to begin", || serving.state.begun.load(SeqCst) > before);
    client.cancel(call).unwrap();
    eventually("the call to be cancelled", || serving.state.cancelled.load(SeqCst) == 2);

    // Any program of NATS can ask, and find the service.
    place.runtime.block_on(async {
        let nats = async_nats::connect(place.server.url()).await.unwrap();
        let reply = nats.request("svc.test", "echo plain".into()).await.unwrap();
        assert_eq!(&reply.payload[..], b"plain");
        let traced = headers("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
        let reply = nats.request_with_headers("svc.test", traced, "trace".into()).await.unwrap();
        assert_eq!(&reply.payload[..], b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
        let reply = nats.request("svc.test", "fail no".into()).await.unwrap();
        let code = reply.headers.unwrap().get("Nats-Service-Error-Code").unwrap().to_string();
        assert_eq!(code, "70000");
        for (verb, wanted) in [("PING", "svc-test"), ("INFO", "\"subject\":\"svc.test\""), ("STATS", "\"num_errors\":")]
        {
            let reply = nats.request(format!("$SRV.{verb}.svc-test"), "".into()).await.unwrap();
            let text = String::from_utf8_lossy(&reply.payload).into_owned();
            assert!(text.contains(wanted), "{text}");
        }
    });

    // A bridge that ends lets its calls end.
    let before = serving.state.begun.load(SeqCst);
    let call = client.submit(b"hold").unwrap();
    eventually("the call to begin", || serving.state.begun.load(SeqCst) > before);
    serve.signal(Signal::TERM);
    serve.says("1 are in flight");
    failed(&mut client, "echo x", 503, "no service replies");
    serving.state.is_open.store(true, SeqCst);
    assert_eq!(&*completion(&mut client, call), b"here");
    let (code, errors) = serve.wait();
    assert_eq!(code, Some(143), "{errors}");
    refused(place.calling_itself(), 2, &["call itself"]);

    // Without a connection nothing is sent, not even later.
    let (mut there, mut client) = place.call("again", &["--timeout", "0.2"]);
    let mut serve = place.serve("here");
    place.server.process.kill();
    serve.says("disconnected");
    there.says("disconnected");
    failed(&mut client, "late", 503, "no connection to NATS");
    let call = client.try_submit_by(b"late", Instant::now() + Duration::from_millis(50)).unwrap().unwrap();
    assert_eq!(completion(&mut client, call).outcome(), Outcome::Failed(504));
    place.server.start_again();
    eventually("the connection", || text(&mut client, "echo again").is_ok_and(|text| text == "again"));
    assert_eq!(serving.state.late.load(SeqCst), 0);

    // A bridge ends, whether or not there is a server.
    place.server.process.kill();
    eventually("the end of the connection", || serve.errors().matches("disconnected").count() == 2);
    for running in [&mut serve, &mut there] {
        running.signal(Signal::TERM);
        let (code, errors) = running.wait();
        assert_eq!(code, Some(143), "{errors}");
        // One for each time without a server.
        assert!(errors.matches("client error").count() <= 2, "{errors}");
    }
}

impl Place {
    fn calling_itself(&self) -> Running {
        let name = self.name("x");
        Running::start("call", &mut bridge(&["call", "svc.test", &name, "--prefer-local", &name]))
    }
}

#[test]
fn an_idempotent_call_is_repeated_elsewhere_and_another_never() {
    let Some(place) = Place::new(&[]) else { return };
    let first = Serving::start(&place.name("first"), "first");
    let second = Serving::start(&place.name("second"), "second");
    second.state.is_open.store(true, SeqCst);
    let mut lost = place.serve("first");
    let (_once, mut once) = place.call("once", &[]);
    let (_often, mut often) = place.call("often", &["--idempotent"]);
    let (one, other) = (once.submit(b"hold").unwrap(), often.submit(b"hold").unwrap());
    eventually("both calls to begin", || first.state.begun.load(SeqCst) == 2);
    let _serve = place.serve("second");
    lost.kill();
    assert_eq!(&*completion(&mut often, other), b"second");
    assert_eq!(completion(&mut once, one).outcome(), Outcome::Failed(502));
    assert_eq!(second.state.begun.load(SeqCst), 1);
}

#[test]
fn a_local_service_is_preferred_while_there_is_one() {
    let Some(place) = Place::new(&[]) else { return };
    let far = Serving::start(&place.name("far"), "far");
    let _serve = place.serve("far");
    let local = place.name("near");
    let (_call, mut client) = place.call("name", &["--prefer-local", &local]);
    assert_eq!(text(&mut client, "host").unwrap(), "far");
    let near = Serving::start(&local, "near");
    eventually("the local service to be found", || text(&mut client, "host").unwrap() == "near");
    let before = far.state.begun.load(SeqCst);
    assert_eq!(text(&mut client, "echo x").unwrap(), "x");
    failed(&mut client, "fail why", 70_000, "why");
    let call = client.submit(b"parts 100").unwrap();
    for _ in 0..100 {
        assert_eq!(completion(&mut client, call).outcome(), Outcome::Part);
    }
    assert_eq!(completion(&mut client, call).outcome(), Outcome::End);
    assert_eq!(far.state.begun.load(SeqCst), before);
    let call = client.try_submit_by(b"hold", Instant::now() + Duration::from_millis(50)).unwrap().unwrap();
    assert_eq!(completion(&mut client, call).outcome(), Outcome::Failed(504));
    eventually("the call to be cancelled", || near.state.cancelled.load(SeqCst) == 1);
    drop(near);
    assert_eq!(text(&mut client, "host").unwrap(), "far");
}

#[test]
fn a_call_whose_caller_is_gone_is_cancelled() {
    let Some(place) = Place::new(&[]) else { return };
    let serving = Serving::start(&place.name("here"), "here");
    let serve = place.serve("here");
    let (mut there, mut client) = place.call("there", &[]);
    let _call = client.submit(b"hold").unwrap();
    eventually("the call to begin", || serving.state.begun.load(SeqCst) == 1);
    there.kill();
    eventually("the call to be cancelled", || serving.state.cancelled.load(SeqCst) == 1);
    drop(serve);

    // A caller that has cancelled before the call began replies so to the bridge that begins it later.
    let (_there, mut client) = place.call("other", &[]);
    place.runtime.block_on(async {
        let nats = async_nats::connect(place.server.url()).await.unwrap();
        let mut calls = nats.subscribe("svc.test").await.unwrap();
        nats.flush().await.unwrap();
        let call = client.submit(b"x").unwrap();
        let request = within(calls.next()).await.unwrap();
        client.cancel(call).unwrap();
        let mut control = nats.subscribe("control").await.unwrap();
        let mut signs = tokio::time::interval(Duration::from_millis(20));
        loop {
            tokio::select! {
                said = within(control.next()) => {
                    break assert_eq!(&said.unwrap().payload[..], b"cancel");
                }
                _ = signs.tick() => {
                    let (to, header) = (request.reply.clone().unwrap(), headers("Pelton-Reply", "working"));
                    nats.publish_with_reply_and_headers(to, "control", header, "".into()).await.unwrap();
                }
            }
        }
    });
}

fn headers(name: &'static str, value: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(name, value);
    headers
}

async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, work).await.expect("in time")
}

/// The bridge of a slow reader says each second which parts it has. One that says nothing for 30 s is gone.
#[test]
fn a_slow_reader_gets_all_parts_and_a_bridge_that_acknowledges_none_is_given_up() {
    let Some(place) = Place::new(&["max_payload: 1048576"]) else { return };
    let _serving = Serving::start(&place.name("here"), "here");
    let _serve = place.serve("here");
    let name = place.name("there");
    let _call = place.calling("call", &["call", "svc.test", &name]);
    let mut client = Client::connect_with(&name, &Options::new().capacity(1 << 20)).unwrap();
    let call = client.submit(b"blocks 400").unwrap();
    place.runtime.block_on(async {
        let mut silent = Played::call(&place, b"blocks 400").await;
        silent.until("lost").await;
        assert_eq!(silent.parts, 64);
    });
    for number in 0..400 {
        let part = completion(&mut client, call);
        assert_eq!(part.outcome(), Outcome::Part, "{number}: {}", String::from_utf8_lossy(&part));
        assert!(*part == *block(number), "{number}");
    }
    assert_eq!(completion(&mut client, call).outcome(), Outcome::End);
}

/// A call of a bridge that the test plays.
struct Played {
    nats: async_nats::Client,
    replies: async_nats::Subscriber,
    parts: usize,
}

impl Played {
    async fn call(place: &Place, request: &'static [u8]) -> Played {
        let nats = async_nats::connect(place.server.url()).await.unwrap();
        let inbox = nats.new_inbox();
        let replies = nats.subscribe(inbox.clone()).await.unwrap();
        let headers = headers("Pelton-Call", "1");
        nats.publish_with_reply_and_headers("svc.test", inbox, headers, request.into()).await.unwrap();
        Played { nats, replies, parts: 0 }
    }

    /// Waits for the reply with this header.
    async fn until(&mut self, word: &str) -> async_nats::Message {
        loop {
            let message = within(self.replies.next()).await.unwrap();
            let said = message.headers.as_ref().and_then(|headers| headers.get("Pelton-Reply"));
            self.parts += usize::from(said.is_some_and(|said| said.as_str().starts_with("part ")));
            if said.is_some_and(|said| said.as_str() == word) {
                return message;
            }
        }
    }
}

#[test]
fn a_call_that_waits_for_a_busy_service_gives_signs_of_life_and_can_be_cancelled_or_returned() {
    let Some(place) = Place::new(&[]) else { return };
    // By a short name: then a returned call has another error.
    let name = format!("bridge-test-{}", std::process::id());
    let mut service = Service::listen(&name).unwrap();
    let stopper = service.stopper();
    let (send, receive) = std::sync::mpsc::channel::<()>();
    let served = std::thread::spawn(move || {
        let (_, first) = service.receive().unwrap().into_parts();
        // Busy: nothing takes what comes meanwhile.
        let _ = receive.recv_timeout(DEADLINE);
        service.stopper().drain();
        first.reply(b"first").unwrap();
        let mut texts = Vec::new();
        while let Ok(request) = service.receive() {
            texts.push(request.to_vec());
            request.reply(b"").unwrap();
        }
        texts
    });
    let _serve = place.calling("serve", &["serve", &name, "--subject", "svc.test"]);
    place.runtime.block_on(async {
        let mut first = Played::call(&place, b"first").await;
        first.until("working").await;
        static LARGE: [u8; 60_000] = [b'x'; 60_000];
        // More than the service's lane has space for.
        let mut waiting = Vec::new();
        for _ in 0..200 {
            waiting.push(Played::call(&place, &LARGE).await);
        }
        for call in &mut waiting {
            let sign = call.until("working").await;
            call.nats.publish(sign.reply.unwrap(), "cancel".into()).await.unwrap();
            call.nats.flush().await.unwrap();
        }
        let mut last = Played::call(&place, b"last").await;
        last.until("working").await;
        send.send(()).unwrap();
        last.until("returned").await;
    });
    let texts = served.join().unwrap();
    stopper.stop();
    assert!(texts.is_empty(), "{}", texts.len());
}

#[test]
fn a_bridge_that_waits_for_its_service_lets_its_calls_end() {
    let Some(place) = Place::new(&[]) else { return };
    let serving = Serving::start(&place.name("here"), "here");
    let mut serve = place.serve("here");
    let (_there, mut client) = place.call("there", &[]);
    let call = client.submit(b"hold").unwrap();
    eventually("the call to begin", || serving.state.begun.load(SeqCst) == 1);
    serving.stopper.drain();
    failed(&mut client, "echo x", 503, "");
    serve.says("waiting for the service");
    serve.signal(Signal::TERM);
    serve.says("1 are in flight");
    serving.state.is_open.store(true, SeqCst);
    assert_eq!(&*completion(&mut client, call), b"here");
    let (code, errors) = serve.wait();
    assert_eq!(code, Some(143), "{errors}");
}

#[test]
fn a_service_needs_no_rights_but_those_to_reply() {
    let replies = "allow_responses: { max: -1, expires: \"1h\" }";
    let rights =
        format!("{{ publish: {{ deny: \">\" }}, subscribe: [\"svc.>\", \"_INBOX.>\", \"$SRV.>\"], {replies} }}");
    let users = format!(
        "authorization {{ users: [{{ user: caller, password: p }}, {{ user: service, password: p, permissions: {rights} }}] }}"
    );
    let Some(place) = Place::new(&[&users]) else { return };
    let secret = |user: &str| {
        let path = place.path(user);
        std::fs::write(&path, format!("{user}\np\n")).unwrap();
        path
    };
    let _serving = Serving::start(&place.name("here"), "here");
    let (service, caller) = (secret("service"), secret("caller"));
    let words = ["serve", &place.name("here"), "--subject", "svc.test", "--user-file", &service];
    let serve = place.calling("serve", &words);
    let (_call, mut client) = place.call("there", &["--user-file", &caller]);
    assert_eq!(text(&mut client, "echo hello").unwrap(), "hello");
    let call = client.submit(b"parts 200").unwrap();
    for _ in 0..200 {
        assert_eq!(completion(&mut client, call).outcome(), Outcome::Part);
    }
    assert_eq!(completion(&mut client, call).outcome(), Outcome::End);
    assert!(!serve.errors().contains("ermissions"), "{}", serve.errors());
}

#[test]
fn calls_end_by_their_deadlines_while_the_server_takes_nothing() {
    let Some(place) = Place::new(&[]) else { return };
    let _serving = Serving::start(&place.name("here"), "here");
    let _serve = place.serve("here");
    let (_call, mut client) = place.call("there", &[]);
    assert_eq!(text(&mut client, "echo before").unwrap(), "before");
    place.stop_server();
    // More than the sockets and the queue of the connection take together.
    let request = format!("echo {}", "x".repeat(20_000));
    for _ in 0..25 {
        let until = Instant::now() + Duration::from_millis(100);
        let calls: Vec<CallId> =
            (0..100).map(|_| client.try_submit_by(request.as_bytes(), until).unwrap().expect("space")).collect();
        for call in calls {
            assert_eq!(completion(&mut client, call).outcome(), Outcome::Failed(504));
        }
    }
    place.server.process.signal(Signal::CONT);
    eventually("calls to succeed again", || text(&mut client, "echo after").is_ok_and(|text| text == "after"));
}
