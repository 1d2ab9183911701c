//! Calls over NATS: a service here, a service of NATS, and a bridge that makes it a local service there.

use crate::{DEADLINE, Place, Running, bridge, eventually, refused};
use pelton::{Client, Error, Outcome, Request, Service, Stopper};
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
        let part = client.completion_of(call).unwrap();
        assert_eq!((part.outcome(), &*part), (Outcome::Part, &number.to_le_bytes()[..]));
    }
    assert_eq!(client.completion_of(call).unwrap().outcome(), Outcome::End);

    // Deadlines travel; one that passes ends the call on both sides.
    assert_eq!(&*client.call(b"deadline").unwrap(), b"0");
    let call = client.try_submit_by(b"deadline", Instant::now() + Duration::from_secs(100)).unwrap().unwrap();
    let left: u64 = String::from_utf8(client.completion_of(call).unwrap().to_vec()).unwrap().parse().unwrap();
    assert!((30..100).contains(&left), "{left}");
    let call = client.try_submit_by(b"hold", Instant::now() + Duration::from_millis(50)).unwrap().unwrap();
    assert_eq!(client.completion_of(call).unwrap().outcome(), Outcome::Failed(504));
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
    assert_eq!(&*client.completion_of(call).unwrap(), b"here");
    let (code, errors) = serve.wait();
    assert_eq!(code, Some(143), "{errors}");
    refused(place.calling_itself(), 2, &["call itself"]);

    // A bridge ends, whether or not there is a server.
    let (mut there, _client) = place.call("again", &[]);
    let mut serve = place.serve("here");
    place.server.process.kill();
    serve.says("disconnected");
    for running in [&mut serve, &mut there] {
        running.signal(Signal::TERM);
        let (code, errors) = running.wait();
        assert_eq!(code, Some(143), "{errors}");
        assert!(errors.matches("client error").count() <= 1, "{errors}");
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
    assert_eq!(&*often.completion_of(other).unwrap(), b"second");
    assert_eq!(once.completion_of(one).unwrap().outcome(), Outcome::Failed(502));
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
        assert_eq!(client.completion_of(call).unwrap().outcome(), Outcome::Part);
    }
    assert_eq!(client.completion_of(call).unwrap().outcome(), Outcome::End);
    assert_eq!(far.state.begun.load(SeqCst), before);
    drop(near);
    assert_eq!(text(&mut client, "host").unwrap(), "far");
}
