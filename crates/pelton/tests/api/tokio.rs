//! The Tokio adapter: a message is received once whatever is cancelled, and a sleeping task wakes; file operations of
//! many tasks.

use crate::support::TestDir;
use pelton::file::{EngineOptions, File, Open, Operation};
use pelton::tokio::{
    AsyncClient, AsyncEngine, AsyncPublisher, AsyncReceiver, AsyncSender, AsyncService, AsyncSubscriber,
};
use pelton::{Error, Options, Outcome, Traceparent};
use std::future::Future;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), test).await.expect("hangs") })
}

fn pair(capacity: u64) -> (AsyncSender, AsyncReceiver) {
    let (sender, receiver) = Options::new().capacity(capacity).threads().unwrap();
    (AsyncSender::new(sender).unwrap(), AsyncReceiver::new(receiver).unwrap())
}

#[test]
fn both_sides_sleep_and_wake_and_lose_nothing() {
    run(async {
        let (mut sender, mut receiver) = pair(64 * 1024);
        let sending = async {
            for n in 0..20_000u32 {
                sender.send(&[n.to_le_bytes(), [7; 4]].concat().repeat(n as usize % 60 + 1)).await.unwrap();
            }
            drop(sender);
        };
        let receiving = async {
            for n in 0..20_000u32 {
                let message = receiver.receive().await.unwrap();
                assert_eq!(message[..4], n.to_le_bytes());
                assert_eq!(message.len(), 8 * (n as usize % 60 + 1));
            }
            assert!(receiver.receive().await.unwrap_err().is_closed());
        };
        tokio::join!(sending, receiving);
    });
}

fn traceparent(n: u32) -> Traceparent {
    Traceparent::parse(format!("00-{:032x}-{:016x}-01", n + 1, n + 1)).unwrap()
}

#[test]
fn a_message_has_the_traceparent_with_which_a_task_sent_it() {
    run(async {
        let (sender, receiver) = Options::new().capacity(64 * 1024).traced(true).threads().unwrap();
        let (mut sender, mut receiver) = (AsyncSender::new(sender).unwrap(), AsyncReceiver::new(receiver).unwrap());
        let sending = async {
            for n in 0..10_000u32 {
                match n % 3 {
                    0 => sender.send(&n.to_le_bytes()).await.unwrap(),
                    _ => sender.send_traced(&n.to_le_bytes(), traceparent(n)).await.unwrap(),
                }
            }
        };
        let receiving = async {
            for n in 0..10_000u32 {
                let message = receiver.receive().await.unwrap();
                assert_eq!(*message, n.to_le_bytes());
                assert_eq!(message.traceparent(), (n % 3 != 0).then(|| traceparent(n)));
            }
        };
        tokio::join!(sending, receiving);
    });
}

#[test]
fn a_receive_dropped_at_any_await_takes_no_message() {
    run(async {
        let (mut sender, mut receiver) = pair(64 * 1024);
        for n in 0..1_000u32 {
            {
                let mut dropped = pin!(receiver.receive());
                let mut context = Context::from_waker(Waker::noop());
                assert!(matches!(dropped.as_mut().poll(&mut context), Poll::Pending));
                sender.send(&n.to_le_bytes()).await.unwrap();
                // Dropped after its message has arrived and before it was polled again.
            }
            assert_eq!(*receiver.receive().await.unwrap(), n.to_le_bytes());
        }
    });
}

#[test]
fn membership_events_do_not_block_the_runtime_thread() {
    run(async {
        let (senders, receiver) = Options::new().membership_events(true).gather().unwrap();
        let mut receiver = AsyncReceiver::new(receiver).unwrap();
        let mut sender = senders.sender().unwrap();
        // The join is pending, and no message: blocking would keep this thread from its timer for ever.
        let is_waiting = tokio::time::timeout(Duration::from_millis(20), receiver.receive()).await.is_err();
        assert!(is_waiting, "there is no message");
        sender.send(b"later").unwrap();
        assert_eq!(&*receiver.receive().await.unwrap(), b"later");
    });
}

#[test]
fn a_send_dropped_at_any_await_sends_nothing() {
    run(async {
        let (mut sender, mut receiver) = pair(64 * 1024);
        while sender.try_send(&[1; 1000]).unwrap() == pelton::Sent::Sent {}
        {
            let mut dropped = pin!(sender.send(&[2; 1000]));
            let mut context = Context::from_waker(Waker::noop());
            assert!(matches!(dropped.as_mut().poll(&mut context), Poll::Pending));
        }
        drop(sender);
        while let Ok(message) = receiver.receive().await {
            assert_eq!(*message, [1; 1000]);
        }
    });
}

#[test]
fn a_waiting_task_detects_the_peers_close() {
    run(async {
        let (sender, mut receiver) = pair(64 * 1024);
        let waiting = async { assert!(receiver.receive().await.unwrap_err().is_closed()) };
        let closing = async {
            tokio::task::yield_now().await;
            drop(sender);
        };
        tokio::join!(waiting, closing);
        let (mut sender, receiver) = pair(64 * 1024);
        while sender.try_send(&[1; 1000]).unwrap() == pelton::Sent::Sent {}
        let waiting = async { assert!(sender.send(&[1; 1000]).await.unwrap_err().is_closed()) };
        let closing = async {
            tokio::task::yield_now().await;
            drop(receiver);
        };
        tokio::join!(waiting, closing);
    });
}

/// A service in a thread of its own, and a client of it.
struct Calls {
    dir: tempfile::TempDir,
    stopper: pelton::Stopper,
    serving: Option<std::thread::JoinHandle<pelton::Result<()>>>,
}

impl Calls {
    fn start(threads: usize, handler: impl Fn(pelton::Request<'_>) + Sync + Send + 'static) -> Calls {
        let dir = tempfile::Builder::new().prefix("pt").tempdir_in("/tmp").unwrap();
        let mut service = pelton::Service::listen_with(&name(&dir), &small()).unwrap();
        let stopper = service.stopper();
        let serving = Some(std::thread::spawn(move || service.run(threads, handler)));
        Calls { dir, stopper, serving }
    }

    fn client(&self) -> AsyncClient {
        AsyncClient::new(pelton::Client::connect_with(&name(&self.dir), &small().call_bytes_max(300_000)).unwrap())
            .unwrap()
    }

    fn stop(&mut self) {
        self.stopper.stop();
        if let Some(serving) = self.serving.take() {
            serving.join().unwrap().unwrap();
        }
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        self.stop();
    }
}

fn small<M>() -> Options<M> {
    <Options>::new().capacity(64 * 1024).cast()
}

fn name(dir: &tempfile::TempDir) -> String {
    format!("unix:{}", dir.path().join("s").display())
}

fn echo(request: pelton::Request<'_>) {
    if !request.is_notification() {
        let (bytes, responder) = request.into_parts();
        let _ = responder.reply(&bytes);
    }
}

#[test]
fn many_tasks_share_one_client_in_one_thread_and_in_several() {
    for threads in [1, 4] {
        let calls = Calls::start(2, echo);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build().unwrap();
        runtime.block_on(async {
            let client = calls.client();
            // More than may be in flight, and more than fits.
            let tasks: Vec<_> = (0..1500u32)
                .map(|number| {
                    let client = client.clone();
                    tokio::spawn(async move {
                        for round in 0..3 {
                            let size = (number as usize * 7 + round) % 2000;
                            let request = [&number.to_le_bytes()[..], &vec![round as u8; size]].concat();
                            client.notify(b"beside").await.unwrap();
                            let answer = client.call(&request).await.unwrap();
                            assert_eq!((answer.outcome, answer.bytes), (Outcome::Reply, request));
                        }
                    })
                })
                .collect();
            let all = async {
                for task in tasks {
                    task.await.unwrap();
                }
            };
            tokio::time::timeout(Duration::from_secs(60), all).await.expect("hangs");
            assert_eq!(client.in_flight(), 0);
        });
    }
}

#[test]
fn a_driver_with_many_replies_lets_other_tasks_run() {
    const TASKS: usize = 500;
    let (give, given) = std::sync::mpsc::sync_channel(TASKS);
    let calls = Calls::start(1, move |request| give.send(request.into_responder()).unwrap());
    run(async {
        let client = calls.client();
        let tasks: Vec<_> = (0..TASKS)
            .map(|_| {
                let client = client.clone();
                tokio::spawn(async move { client.call(b"").await.unwrap().outcome })
            })
            .collect();
        while client.in_flight() < TASKS {
            tokio::task::yield_now().await;
        }
        // All replies come before the driver runs again: it has this thread.
        given.iter().take(TASKS).for_each(|responder| responder.reply(b"").unwrap());
        let mut in_flight = TASKS;
        while in_flight == TASKS {
            tokio::task::yield_now().await;
            in_flight = client.in_flight();
        }
        assert!(in_flight > 0, "the driver took all replies at once");
        for task in tasks {
            assert_eq!(task.await.unwrap(), Outcome::Reply);
        }
    });
}

#[test]
fn a_deadline_goes_to_the_service_and_a_failed_call_is_an_error_by_ok() {
    let deadline = Instant::now() + Duration::from_secs(3600);
    let calls = Calls::start(1, move |request| match request.deadline() {
        // The clock of the calls counts nanoseconds.
        Some(found) if found.max(deadline) - found.min(deadline) < Duration::from_millis(1) => {
            request.reply(b"secret").unwrap();
        }
        Some(found) => panic!("{found:?} is not {deadline:?}"),
        None => request.fail(7, b"secret").unwrap(),
    });
    run(async {
        let client = calls.client();
        let reply = client.submit_by(b"", deadline).await.unwrap().next().await.unwrap().unwrap();
        assert!(!format!("{reply:?}").contains("115"), "{reply:?}");
        assert_eq!(reply.ok().unwrap().as_ref(), b"secret");
        match client.call(b"").await.unwrap().ok().unwrap_err() {
            pelton::Error::CallFailed(failure) => assert_eq!((failure.code, &*failure.bytes), (7, &b"secret"[..])),
            other => panic!("{other}"),
        }
    });
}

#[test]
fn queued_requests_are_written_while_no_task_uses_the_client() {
    let calls = Calls::start(1, echo);
    run(async {
        let client = calls.client();
        let request: Vec<u8> = (0..250_000u32).map(|byte| byte as u8).collect();
        client.notify(&request).await.unwrap();
        let (one, two) = tokio::join!(client.call(&request), client.call(&request));
        assert!(one.unwrap().bytes == request && two.unwrap().bytes == request);
    });
}

#[test]
fn open_calls_of_a_service_that_ends_are_repeated_only_if_idempotent() {
    let name = format!("test-tokio-{}", std::process::id());
    let (started, has_started) = std::sync::mpsc::channel();
    let (release, released) = std::sync::mpsc::channel();
    let (started, released) = (std::sync::Mutex::new(started), std::sync::Mutex::new(released));
    let mut first = pelton::Service::listen_with(&name, &small()).unwrap();
    let stopper = first.stopper();
    let serving = std::thread::spawn(move || {
        first.run(1, |request| {
            started.lock().unwrap().send(()).unwrap();
            released.lock().unwrap().recv().unwrap();
            echo(request);
        })
    });
    run(async {
        let client = AsyncClient::new(pelton::Client::connect_with(&name, &small()).unwrap()).unwrap();
        let mut held = client.submit(b"held").await.unwrap();
        has_started.recv().unwrap();
        let mut once = client.submit(b"once").await.unwrap();
        let mut again = client.submit_idempotent(b"again").await.unwrap();
        let mut second = pelton::Service::listen_with(&name, &small()).unwrap();
        let second_stopper = second.stopper();
        let second = std::thread::spawn(move || second.run(1, echo));
        stopper.stop();
        release.send(()).unwrap();
        assert_eq!(held.next().await.unwrap().unwrap().bytes, b"held");
        assert!(once.next().await.is_err());
        assert_eq!(again.next().await.unwrap().unwrap().bytes, b"again");
        second_stopper.stop();
        second.join().unwrap().unwrap();
    });
    serving.join().unwrap().unwrap();
}

#[test]
fn a_call_dropped_at_any_await_is_cancelled_and_the_others_complete() {
    let (notifier, cancelled) = std::sync::mpsc::channel();
    let notifier = std::sync::Mutex::new(notifier);
    let calls = Calls::start(3, move |request| {
        if *request == *b"forever" {
            let responder = request.into_responder();
            while !responder.is_cancelled() {
                std::thread::yield_now();
            }
            notifier.lock().unwrap().send(()).unwrap();
            return;
        }
        echo(request);
    });
    run(async {
        let client = calls.client();
        for round in 0..50 {
            let mut context = Context::from_waker(Waker::noop());
            let mut forever = Box::pin(client.call(b"forever"));
            // This task has the descriptor's waker, or not.
            let mut before = Box::pin(client.call(b"before"));
            if round % 2 == 0 {
                let _ = before.as_mut().poll(&mut context);
            }
            assert!(matches!(forever.as_mut().poll(&mut context), Poll::Pending));
            let concurrent = client.clone();
            let concurrent = tokio::spawn(async move { concurrent.call(b"beside").await });
            for _ in 0..round % 5 {
                tokio::task::yield_now().await;
                assert!(matches!(forever.as_mut().poll(&mut context), Poll::Pending));
            }
            drop(forever);
            assert_eq!(concurrent.await.unwrap().unwrap().bytes, b"beside");
            if round % 3 != 0 {
                assert_eq!(before.await.unwrap().bytes, b"before");
            }
            // The service got the cancel.
            while cancelled.try_recv().is_err() {
                tokio::task::yield_now().await;
            }
        }
        // A slot becomes free when its last reply has arrived.
        while client.in_flight() > 0 {
            assert_eq!(client.call(b"once more").await.unwrap().bytes, b"once more");
        }
    });
}

#[test]
fn a_stream_arrives_in_order_and_a_dropped_one_ends_for_the_service() {
    let (notifier, ended) = std::sync::mpsc::channel();
    let notifier = std::sync::Mutex::new(notifier);
    let calls = Calls::start(2, move |request| {
        let most: u32 = String::from_utf8_lossy(&request).parse().unwrap();
        let mut responder = request.into_responder();
        for number in 0..most {
            let part = number.to_le_bytes().repeat(100);
            loop {
                let until = std::time::Instant::now() + Duration::from_millis(1);
                let sent = responder.part_until(&part, until).unwrap();
                // Whether or not space was free: on one processor the client, which drops the parts that now arrive,
                // always frees some.
                if responder.is_cancelled() {
                    return notifier.lock().unwrap().send(number).unwrap();
                }
                if sent == pelton::Sent::Sent {
                    break;
                }
            }
        }
        responder.end().unwrap();
    });
    run(async {
        let client = calls.client();
        let mut stream = client.submit(b"5000").await.unwrap();
        for number in 0..5000u32 {
            let answer = stream.next().await.unwrap().unwrap();
            assert_eq!((answer.outcome, answer.bytes), (Outcome::Part, number.to_le_bytes().repeat(100)));
        }
        assert_eq!(stream.next().await.unwrap().unwrap().outcome, Outcome::End);
        assert_eq!(stream.next().await.unwrap(), None);
        // No task reads it: it blocks the others, until it is dropped.
        let endless = client.submit(b"4000000000").await.unwrap();
        let concurrent = client.clone();
        let concurrent = tokio::spawn(async move { concurrent.call(b"0").await });
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        drop(endless);
        assert_eq!(concurrent.await.unwrap().unwrap().outcome, Outcome::End);
        while ended.try_recv().is_err() {
            assert_eq!(client.call(b"0").await.unwrap().outcome, Outcome::End);
        }
    });
}

#[test]
fn every_waiting_task_detects_the_end() {
    let mut calls = Calls::start(2, |request| std::mem::forget(request.into_responder()));
    run(async {
        let client = calls.client();
        let tasks: Vec<_> = (0..10)
            .map(|_| {
                let client = client.clone();
                tokio::spawn(async move { client.call(b"never").await })
            })
            .collect();
        while client.in_flight() < 10 {
            tokio::task::yield_now().await;
        }
        calls.stop();
        for task in tasks {
            let error = task.await.unwrap().unwrap_err();
            assert!(error.is_closed(), "{error}");
        }
        assert!(client.call(b"again").await.is_err());
    });
}

#[test]
fn an_error_of_the_wait_alone_reaches_every_waiting_task() {
    // One more than may be in flight.
    const TASKS: usize = 1025;
    let (give, given) = std::sync::mpsc::sync_channel(TASKS);
    let calls = Calls::start(1, move |request| give.send(request.into_responder()).unwrap());
    run(async {
        let client = pelton::Client::connect_with(&name(&calls.dir), &small()).unwrap();
        let descriptor = client.as_raw_fd();
        let client = AsyncClient::new(client).unwrap();
        let tasks: Vec<_> = (0..TASKS)
            .map(|_| {
                let client = client.clone();
                tokio::spawn(async move { client.call(b"asked").await })
            })
            .collect();
        while client.in_flight() < TASKS - 1 {
            tokio::task::yield_now().await;
        }
        // Arming polls this descriptor, and receiving does not.
        let null = std::fs::File::open("/dev/null").unwrap();
        // SAFETY: no pointers. The client closes its number later, whatever it refers to.
        assert_eq!(unsafe { libc::dup2(null.as_raw_fd(), descriptor) }, descriptor);
        // The reply wakes the task that arms.
        given.recv().unwrap().reply(b"").unwrap();
        let mut replies = 0;
        for task in tasks {
            match tokio::time::timeout(Duration::from_secs(20), task).await.expect("sleeps").unwrap() {
                Ok(_) => replies += 1,
                Err(error) => assert!(matches!(error, Error::System { .. }), "{error}"),
            }
        }
        assert_eq!(replies, 1);
    });
}

fn both_ways(test: impl AsyncFn(EngineOptions)) {
    for options in [EngineOptions::new(), EngineOptions::new().without_io_uring()] {
        run(test(options));
    }
}

fn pipe() -> (File, std::io::PipeWriter) {
    let (read, write) = std::io::pipe().unwrap();
    (File::from_fd(read.into(), "a pipe").unwrap(), write)
}

#[test]
fn many_tasks_share_an_engine_and_wait_for_its_bound() {
    both_ways(async |options| {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let engine = Arc::new(AsyncEngine::new(options.in_flight_max(7).build().unwrap()).unwrap());
        let tasks: Vec<_> = (0..100u32)
            .map(|task| {
                let (engine, path) = (engine.clone(), directory.path().join(task.to_string()));
                tokio::spawn(async move {
                    let open = Operation::open(&path, Open::for_both().create(0o600));
                    let file = engine.run(open).await.unwrap().into_file().unwrap();
                    for round in 0..5u32 {
                        let wanted = (task * 10 + round).to_le_bytes().repeat(1000);
                        assert_eq!(
                            engine.run(Operation::write_at(&file, wanted.clone(), 0)).await.unwrap().count(),
                            4000
                        );
                        engine.run(Operation::sync_data(&file)).await.unwrap();
                        let read = engine.run(Operation::read_at(&file, vec![0; 5000], 0)).await.unwrap();
                        assert_eq!(read.bytes(), wanted);
                    }
                    engine.run(Operation::unlink(&path)).await.unwrap();
                    assert!(engine.run(Operation::unlink(&path)).await.is_err());
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        let engine = Arc::into_inner(engine).unwrap().into_inner();
        assert_eq!(engine.in_flight(), 0);
        engine.close().unwrap();
    });
}

async fn polled(mut future: std::pin::Pin<&mut impl Future<Output: std::fmt::Debug>>) {
    std::future::poll_fn(|context| {
        assert!(future.as_mut().poll(context).is_pending());
        Poll::Ready(())
    })
    .await;
}

#[test]
fn dropping_one_operation_still_wakes_the_others() {
    both_ways(async |options| {
        let engine = Arc::new(AsyncEngine::new(options.in_flight_max(2).build().unwrap()).unwrap());
        for round in 0..50 {
            let ((first, mut write), (second, _kept)) = (pipe(), pipe());
            let waits = {
                let engine = engine.clone();
                tokio::spawn(
                    async move { engine.run(Operation::read(&first, vec![0; 9])).await.unwrap().bytes().to_vec() },
                )
            };
            tokio::task::yield_now().await;
            // Polled last, so that the reactor has its waker; and another one that exceeds the bound.
            let mut second_read = pin!(engine.run(Operation::read(&second, vec![0; 9])));
            polled(second_read.as_mut()).await;
            if round % 2 == 1 {
                let mut no_space = pin!(engine.run(Operation::stat("/")));
                polled(no_space.as_mut()).await;
                no_space.set(engine.run(Operation::stat("/")));
            }
            second_read.set(engine.run(Operation::stat("/")));
            write.write_all(b"for first").unwrap();
            assert_eq!(waits.await.unwrap(), b"for first");
            // The cancelled operations free their slots.
            engine.run(Operation::stat("/")).await.unwrap();
        }
    });
}

#[test]
fn endpoints_and_a_client_connect_to_peers_in_the_same_thread() {
    let dir = TestDir::new("endpoints_and_a_client_connect_to_peers_in_the_same_thread");
    run(async {
        let mut receiver = AsyncReceiver::new(Options::new().gather_at(&dir.name()).unwrap()).unwrap();
        let name = dir.name();
        let sending = async {
            AsyncSender::connect(&name).await.unwrap().send(b"hello").await.unwrap();
        };
        let receiving = async { assert_eq!(&*receiver.receive().await.unwrap(), b"hello") };
        tokio::join!(sending, receiving);
        drop(receiver);

        let mut service = AsyncService::new(pelton::Service::listen(&name).unwrap()).unwrap();
        let stopper = service.stopper();
        let serving = service.run(8, |request| async move { request.reply(b"answer").unwrap() });
        let calling = async {
            let client = AsyncClient::connect(&name).await.unwrap();
            assert_eq!(client.call(b"question").await.unwrap().bytes, b"answer");
            stopper.stop();
        };
        let (served, ()) = tokio::join!(serving, calling);
        served.unwrap();
    });
}

#[test]
fn a_connect_that_waits_keeps_no_other_task_waiting() {
    let dir = TestDir::new("a_connect_that_waits_keeps_no_other_task_waiting");
    let path = dir.path().join("c");
    run(async {
        let error = AsyncReceiver::connect(&dir.name()).await.unwrap_err();
        assert!(matches!(error, pelton::Error::NoListener { .. }), "{error:?}");
        let options = <Options>::new().connect_deadline(Duration::from_secs(60));
        // They wait for each other, in one thread.
        let opening = AsyncReceiver::open(options.cast().start_open_receiver(&path).unwrap());
        let making = AsyncSender::open(options.cast().start_create_sender(&path).unwrap());
        let (receiver, sender) = tokio::join!(opening, making);
        sender.unwrap().send(b"hello").await.unwrap();
        assert_eq!(&*receiver.unwrap().receive().await.unwrap(), b"hello");
    });
}

#[test]
fn a_publisher_and_its_subscribers_sleep_and_wake_and_lose_nothing() {
    const COUNT: u32 = 5000;
    let directory = TestDir::new("subscribers are admitted while the task waits");
    run(async {
        let name = directory.name();
        let mut publisher = AsyncPublisher::new(Options::new().capacity(1 << 16).publish_at(&name).unwrap()).unwrap();
        let subscribe = || {
            let name = name.clone();
            tokio::spawn(async move {
                let mut subscriber = AsyncSubscriber::connect(&name).await.unwrap();
                let mut next = 0u32;
                loop {
                    let error = match subscriber.receive().await {
                        Ok(message) => {
                            assert_eq!(message[..4], next.to_le_bytes());
                            next += 1;
                            continue;
                        }
                        Err(error) => error,
                    };
                    assert!(error.is_closed() && next == COUNT, "{error}: {next}");
                    return;
                }
            })
        };
        let subscribers = [subscribe(), subscribe()];
        while publisher.subscribers_changed().await.unwrap() < 2 {}
        for number in 0..COUNT {
            let mut message = [0; 300];
            message[..4].copy_from_slice(&number.to_le_bytes());
            publisher.send(&message).await.unwrap();
        }
        drop(publisher);
        for subscriber in subscribers {
            subscriber.await.unwrap();
        }
    });
}
