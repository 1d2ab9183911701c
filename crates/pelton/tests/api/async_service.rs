//! A service in a Tokio runtime: handlers side by side, parts with backpressure, and its ends.

use crate::support::{TestDir, deadline};
use pelton::tokio::{AsyncClient, AsyncService};
use pelton::{Client, Deadline, Error, Options, Outcome, Sent, Service, Traceparent};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), test).await.expect("hangs") })
}

fn options() -> Options {
    <Options>::new().capacity(1 << 16).connect_deadline(deadline())
}

fn service(place: &TestDir) -> AsyncService {
    AsyncService::new(Service::listen_with(&place.name(), &options().cast()).unwrap()).unwrap()
}

/// Connecting blocks, and the service's task has to run meanwhile.
async fn client(place: &TestDir) -> AsyncClient {
    let name = place.name();
    let connecting = tokio::task::spawn_blocking(move || Client::connect_with(&name, &options().cast()).unwrap());
    AsyncClient::new(connecting.await.unwrap()).unwrap()
}

#[test]
fn requests_of_several_clients_are_answered_by_tasks_of_which_no_more_run_than_allowed() {
    run(async {
        let place = TestDir::new("async service");
        let mut service = service(&place);
        let stopper = service.stopper();
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let counted = (now.clone(), most.clone());
        let serving = tokio::spawn(async move {
            let handler = |request: pelton::tokio::AsyncRequest| {
                let (now, most) = counted.clone();
                async move {
                    most.fetch_max(now.fetch_add(1, SeqCst) + 1, SeqCst);
                    tokio::task::yield_now().await;
                    now.fetch_sub(1, SeqCst);
                    let (bytes, responder) = request.into_parts();
                    responder.reply(&bytes.repeat(2)).unwrap();
                }
            };
            let done = service.run(5, handler).await;
            (service, done)
        });
        let tasks: Vec<_> = (0..3)
            .map(|number| {
                let name = place.name();
                tokio::task::spawn_blocking(move || {
                    let mut client = Client::connect_with(&name, &options().cast()).unwrap();
                    let mut calls = Vec::new();
                    for call in 0..1000u32 {
                        calls.push((client.submit(&[number, call as u8]).unwrap(), [number, call as u8].repeat(2)));
                    }
                    for (call, wanted) in calls {
                        assert_eq!(&*client.completion_of(call).unwrap(), &wanted[..]);
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        assert!((1..=5).contains(&most.load(SeqCst)), "{most:?}");
        stopper.stop();
        let (service, done) = serving.await.unwrap();
        done.unwrap();
        assert!(matches!(service.into_inner().try_receive(), Err(Error::Closed { .. })));
    });
}

#[test]
fn calls_of_many_tasks_arrive_with_their_own_traceparent_and_deadline_or_none() {
    run(async {
        let place = TestDir::new("async service, traced");
        let mut service = service(&place);
        let stopper = service.stopper();
        let serving = tokio::spawn(async move {
            let handler = |request: pelton::tokio::AsyncRequest| async move {
                let responder = request.responder();
                let (span, has_deadline) = (responder.traceparent(), responder.deadline().is_some());
                let text = format!("{} {has_deadline}", span.map_or(String::new(), |span| span.to_string()));
                request.reply(text.as_bytes()).unwrap();
            };
            service.run(5, handler).await
        });
        let client = client(&place).await;
        // More bytes than the lane has.
        let call = |n: u128, deadline: Deadline| {
            let client = client.clone();
            tokio::spawn(async move {
                let text = format!("00-{:032x}-{:016x}-01 {}", n + 1, n + 1, deadline != Deadline::Never);
                let span = Traceparent::parse(&text[..55]).unwrap();
                let mut call = client.submit_traced(&[7; 1000], span, deadline).await.unwrap();
                let reply = call.next().await.unwrap().unwrap().ok().unwrap();
                assert_eq!(str::from_utf8(reply.as_ref()), Ok(&*text));
            })
        };
        let later = Deadline::from(Instant::now() + Duration::from_secs(3600));
        let tasks: Vec<_> = (0..300).map(|n| call(n, if n % 2 == 0 { Deadline::Never } else { later })).collect();
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(client.call(b"").await.unwrap().as_ref(), b" false");
        stopper.stop();
        serving.await.unwrap().unwrap();
    });
}

#[test]
fn parts_wait_for_a_client_that_reads_slowly_also_while_requests_wait() {
    run(async {
        let place = TestDir::new("async parts");
        let mut service = service(&place);
        let stopper = service.stopper();
        // One handler at a time: the others wait, and the space of the first has to be found all the same.
        let serving = tokio::spawn(async move {
            service
                .run(1, async |mut request| {
                    for number in 0..2000u32 {
                        request.part(&number.to_le_bytes().repeat(100)).await.unwrap();
                    }
                    request.end().unwrap();
                })
                .await
        });
        let client = client(&place).await;
        let mut calls = Vec::new();
        for _ in 0..5 {
            calls.push(client.submit(b"stream").await.unwrap());
        }
        for call in &mut calls {
            for number in 0..2000u32 {
                let part = call.next().await.unwrap().unwrap();
                assert_eq!((part.outcome, part.bytes), (Outcome::Part, number.to_le_bytes().repeat(100)));
            }
            assert_eq!(call.next().await.unwrap().unwrap().outcome, Outcome::End);
        }
        stopper.stop();
        serving.await.unwrap().unwrap();
    });
}

#[test]
fn parts_find_space_while_more_requests_wait_than_are_taken_ahead() {
    run(async {
        let place = TestDir::new("async parts under load");
        let mut service = service(&place);
        let stopper = service.stopper();
        let serving = tokio::spawn(async move {
            service
                .run(1, async |mut request| {
                    if *request == *b"stream" {
                        for _ in 0..500 {
                            request.part(&[5; 1000]).await.unwrap();
                        }
                    }
                    request.end().unwrap();
                })
                .await
        });
        let reader = client(&place).await;
        let mut stream = reader.submit(b"stream").await.unwrap();
        assert_eq!(stream.next().await.unwrap().unwrap().outcome, Outcome::Part);
        // 3,000 requests of others, of which 1,024 are taken ahead.
        let name = place.name();
        let (filled, is_filled) = tokio::sync::oneshot::channel();
        let others = tokio::task::spawn_blocking(move || {
            let mut clients: Vec<_> = (0..3).map(|_| Client::connect_with(&name, &options().cast()).unwrap()).collect();
            let mut calls = Vec::new();
            for client in &mut clients {
                let submitted = (0..1000).map_while(|_| client.try_submit(b"other").unwrap());
                calls.push(submitted.collect::<Vec<_>>());
            }
            filled.send(()).unwrap();
            for (client, calls) in clients.iter_mut().zip(calls) {
                assert!(!calls.is_empty());
                for call in calls {
                    assert_eq!(client.completion_of(call).unwrap().outcome(), Outcome::End);
                }
            }
        });
        is_filled.await.unwrap();
        for _ in 1..500 {
            assert_eq!(stream.next().await.unwrap().unwrap().outcome, Outcome::Part);
        }
        assert_eq!(stream.next().await.unwrap().unwrap().outcome, Outcome::End);
        others.await.unwrap();
        stopper.stop();
        serving.await.unwrap().unwrap();
    });
}

#[test]
fn a_drained_service_answers_everything_it_took_and_then_ends() {
    run(async {
        let place = TestDir::new("async drain");
        let mut service = service(&place);
        let stopper = service.stopper();
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let (release, mut released) = (Arc::new(tokio::sync::Notify::new()), Some(begun));
        let waiting = release.clone();
        let serving = tokio::spawn(async move {
            service
                .run(10, |request| {
                    let (waiting, begun) = (waiting.clone(), released.take());
                    async move {
                        if let Some(begun) = begun {
                            begun.send(()).unwrap();
                        }
                        waiting.notified().await;
                        request.reply(b"done").unwrap();
                    }
                })
                .await
        });
        let client = client(&place).await;
        let mut call = client.submit(b"work").await.unwrap();
        has_begun.await.unwrap();
        stopper.drain();
        tokio::task::yield_now().await;
        assert!(!serving.is_finished(), "a call is open");
        release.notify_one();
        assert_eq!(call.next().await.unwrap().unwrap().bytes, b"done");
        serving.await.unwrap().unwrap();
    });
}

#[test]
fn a_stopped_service_ends_the_handlers_that_wait_for_space() {
    run(async {
        let place = TestDir::new("async stop");
        let mut service = service(&place);
        let stopper = service.stopper();
        let full = Arc::new(tokio::sync::Notify::new());
        let is_full = full.clone();
        let serving = tokio::spawn(async move {
            service
                .run(10, |mut request| {
                    let full = full.clone();
                    async move {
                        while std::future::poll_fn(|context| {
                            Poll::Ready(pin!(request.part(&[1; 1000])).poll(context).is_ready())
                        })
                        .await
                        {}
                        full.notify_one();
                        // The client reads nothing.
                        let error = loop {
                            if let Err(error) = request.part(&[1; 1000]).await {
                                break error;
                            }
                        };
                        assert!(error.is_closed(), "{error}");
                    }
                })
                .await
        });
        let name = place.name();
        let mut client = tokio::task::spawn_blocking(move || {
            let mut client = Client::connect_with(&name, &options().cast()).unwrap();
            client.submit(b"endless").unwrap();
            client
        })
        .await
        .unwrap();
        is_full.notified().await;
        stopper.stop();
        serving.await.unwrap().unwrap();
        assert!(client.try_completion().unwrap().is_some());
    });
}

#[test]
fn a_handler_that_panics_has_its_call_abandoned_and_others_go_on() {
    run(async {
        let place = TestDir::new("async panic");
        let mut service = service(&place);
        let stopper = service.stopper();
        let serving = tokio::spawn(async move {
            service
                .run(2, async |request| {
                    assert!(*request != *b"panic", "as requested");
                    request.reply(b"fine").unwrap();
                })
                .await
        });
        let client = client(&place).await;
        for _ in 0..10 {
            assert!(client.call(b"panic").await.is_ok_and(|answer| answer.outcome == Outcome::Abandoned));
            assert_eq!(client.call(b"hello").await.unwrap().bytes, b"fine");
        }
        stopper.stop();
        serving.await.unwrap().unwrap();
    });
}

#[test]
fn a_receive_dropped_at_any_await_takes_no_request() {
    run(async {
        let place = TestDir::new("async receive");
        let mut service = service(&place);
        let name = place.name();
        let asking = tokio::task::spawn_blocking(move || {
            let mut client = Client::connect_with(&name, &options().cast()).unwrap();
            (0..200u32)
                .for_each(|number| assert_eq!(*client.call(&number.to_le_bytes()).unwrap(), number.to_le_bytes()));
        });
        for number in 0..200u32 {
            // A `ready` that completes takes nothing either.
            let _ = pin!(service.ready()).poll(&mut Context::from_waker(Waker::noop()));
            tokio::select! {
                biased;
                () = std::future::ready(()) => {}
                _ = service.receive() => {}
            }
            let request = service.receive().await.unwrap();
            assert_eq!(*request, number.to_le_bytes());
            // In another task.
            let (bytes, responder) = request.into_parts();
            let responder = service.responder(responder);
            tokio::spawn(async move { responder.reply(&bytes).unwrap() });
        }
        asking.await.unwrap();
        assert!(service.try_receive().unwrap().is_none());
    });
}

#[test]
fn a_run_that_is_dropped_abandons_its_calls_and_the_service_goes_on() {
    run(async {
        let place = TestDir::new("async dropped run");
        let mut service = service(&place);
        let name = place.name();
        let asking = tokio::task::spawn_blocking(move || {
            let mut client = Client::connect_with(&name, &options().cast()).unwrap();
            assert_eq!(client.call(b"first").unwrap().outcome(), Outcome::Abandoned);
            assert_eq!(&*client.call(b"second").unwrap(), b"reply");
        });
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let mut begun = Some(begun);
        {
            let serving = service.run(1, |request| {
                begun.take().unwrap().send(()).unwrap();
                async move {
                    std::future::pending::<()>().await;
                    drop(request);
                }
            });
            tokio::select! {
                done = serving => panic!("{done:?}"),
                _ = has_begun => {}
            }
        }
        let request = service.receive().await.unwrap();
        assert_eq!(*request, *b"second");
        request.reply(b"reply").unwrap();
        asking.await.unwrap();
    });
}

#[test]
fn a_loop_that_receives_wakes_the_tasks_that_stream() {
    run(async {
        let place = TestDir::new("async loop");
        let mut service = service(&place);
        let stopper = service.stopper();
        let serving = tokio::spawn(async move {
            loop {
                let responder = match service.receive().await {
                    Ok(request) => request.into_responder(),
                    Err(error) if error.is_closed() => return,
                    Err(error) => panic!("{error}"),
                };
                let mut responder = service.responder(responder);
                tokio::spawn(async move {
                    for _ in 0..1000 {
                        responder.part(&[3; 500]).await.unwrap();
                    }
                    assert_ne!(responder.try_part(b"may not fit").unwrap(), Sent::TimedOut);
                    responder.end().unwrap();
                });
            }
        });
        let client = client(&place).await;
        let mut streams = Vec::new();
        for _ in 0..3 {
            streams.push(client.submit(b"stream").await.unwrap());
        }
        for stream in &mut streams {
            let mut parts = 0;
            while stream.next().await.unwrap().unwrap().outcome == Outcome::Part {
                parts += 1;
            }
            assert!((1000..=1001).contains(&parts), "{parts}");
        }
        stopper.stop();
        serving.await.unwrap();
    });
}

#[test]
fn a_stop_ends_handlers_that_wait_for_space_also_while_more_requests_wait_than_are_taken() {
    run(async {
        let place = TestDir::new("async stop under load");
        let mut service = service(&place);
        let stopper = service.stopper();
        let serving = tokio::spawn(async move {
            service.run(1, async |mut request| while request.part(&[1; 1000]).await.is_ok() {}).await
        });
        let name = place.name();
        tokio::task::spawn_blocking(move || {
            // Nobody reads. A thousand requests of each are more than are taken, and some fit no lane.
            let mut clients: Vec<_> = (0..3).map(|_| Client::connect_with(&name, &options().cast()).unwrap()).collect();
            for client in &mut clients {
                (0..1000).for_each(|_| _ = client.try_submit(b"endless").unwrap());
            }
            stopper.stop();
            clients
        })
        .await
        .unwrap();
        serving.await.unwrap().unwrap();
    });
}

#[test]
fn while_handlers_are_busy_and_more_requests_wait_than_are_taken_all_else_is_served_without_polling() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let test = async {
        let place = TestDir::new("async full");
        let mut service = service(&place);
        let stopper = service.stopper();
        let [polls, replies, streams, cancelled] = std::array::from_fn(|_| Arc::new(AtomicUsize::new(0)));
        let release = Arc::new(tokio::sync::Notify::new());
        let counts = (replies.clone(), streams.clone(), cancelled.clone(), release.clone());
        let handler = move |mut request: pelton::tokio::AsyncRequest| {
            let (replies, streams, cancelled, release) = counts.clone();
            async move {
                match &*request {
                    b"large" => {
                        request.reply(&[7; 50_000]).unwrap();
                        replies.fetch_add(1, SeqCst);
                    }
                    b"stream" => {
                        while request.part(&[1; 1000]).await.is_ok() {
                            streams.fetch_add(1, SeqCst);
                        }
                    }
                    b"cancel" => {
                        while !request.responder().is_cancelled() {
                            tokio::task::yield_now().await;
                        }
                        cancelled.fetch_add(1, SeqCst);
                    }
                    _ => release.notified().await,
                }
            }
        };
        let counted = polls.clone();
        let serving = tokio::spawn(async move {
            let mut running = pin!(service.run(3, handler));
            std::future::poll_fn(|context| {
                counted.fetch_add(1, SeqCst);
                running.as_mut().poll(context)
            })
            .await
        });
        let mut clients = Vec::new();
        for _ in 0..5 {
            let name = place.name();
            let connect = move || Client::connect_with(&name, &options().cast()).unwrap();
            clients.push(tokio::task::spawn_blocking(connect).await.unwrap());
        }
        let yields = async |count| {
            for _ in 0..count {
                tokio::task::yield_now().await;
            }
        };
        let [reader, streamer, canceller, others @ ..] = &mut clients[..] else { unreachable!() };
        // More than the lane of replies takes.
        (0..3).for_each(|_| _ = reader.submit(b"large").unwrap());
        while replies.load(SeqCst) < 3 {
            yields(1).await;
        }
        streamer.submit(b"stream").unwrap();
        let call = canceller.submit(b"cancel").unwrap();
        while streams.load(SeqCst) < 10 {
            yields(1).await;
        }
        for other in others {
            (0..700).for_each(|_| _ = other.submit(b"wait").unwrap());
        }
        yields(5000).await;
        let before = polls.load(SeqCst);
        yields(1000).await;
        let polled = polls.load(SeqCst) - before;
        assert!(polled < 50, "{polled} polls, with nothing to do");
        for _ in 0..3 {
            while reader.try_completion().unwrap().is_none() {
                yields(1).await;
            }
        }
        canceller.cancel(call).unwrap();
        while cancelled.load(SeqCst) == 0 {
            yields(1).await;
        }
        // The stream's part finds space.
        let before = streams.load(SeqCst);
        while streams.load(SeqCst) < before + 200 {
            let _ = streamer.try_completion().unwrap();
            yields(1).await;
        }
        stopper.stop();
        while !serving.is_finished() {
            release.notify_waiters();
            yields(1).await;
        }
        serving.await.unwrap().unwrap();
    };
    runtime.block_on(async { tokio::time::timeout(Duration::from_secs(20), test).await.expect("hangs") });
}
