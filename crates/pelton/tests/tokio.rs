//! The Tokio adapter: a message is received once whatever is cancelled, and a sleeping task is woken; operations on files of many tasks.
#![cfg(feature = "tokio")]

use pelton::Options;
use pelton::file::{EngineOptions, File, Open, Operation};
use pelton::tokio::{AsyncEngine, AsyncReceiver, AsyncSender};
use std::future::Future;
use std::io::Write as _;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), test).await.expect("hangs") })
}

fn pair(capacity: u64) -> (AsyncSender, AsyncReceiver) {
    let (sender, receiver) = Options::new().capacity(capacity).threads().unwrap();
    (AsyncSender::new(sender).unwrap(), AsyncReceiver::new(receiver).unwrap())
}

#[test]
fn both_sides_sleep_and_are_woken_and_nothing_is_lost() {
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
                // Dropped after its message has come and before it was polled again.
            }
            assert_eq!(*receiver.receive().await.unwrap(), n.to_le_bytes());
        }
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
fn a_waiting_task_hears_that_the_other_side_closed() {
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
fn many_tasks_share_an_engine_and_wait_for_room_in_it() {
    both_ways(async |options| {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let engine = Arc::new(AsyncEngine::new(options.in_flight_max(7).open().unwrap()).unwrap());
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
fn a_dropped_operation_leaves_the_others_to_be_woken() {
    both_ways(async |options| {
        let engine = Arc::new(AsyncEngine::new(options.in_flight_max(2).open().unwrap()).unwrap());
        for round in 0..50 {
            let ((first, mut write), (second, _kept)) = (pipe(), pipe());
            let waits = {
                let engine = engine.clone();
                tokio::spawn(
                    async move { engine.run(Operation::read(&first, vec![0; 9])).await.unwrap().bytes().to_vec() },
                )
            };
            tokio::task::yield_now().await;
            // Polled last, so that it is its waker that the reactor has; and another that finds no room.
            let mut second_read = pin!(engine.run(Operation::read(&second, vec![0; 9])));
            polled(second_read.as_mut()).await;
            if round % 2 == 1 {
                let mut no_room = pin!(engine.run(Operation::stat("/")));
                polled(no_room.as_mut()).await;
                no_room.set(engine.run(Operation::stat("/")));
            }
            second_read.set(engine.run(Operation::stat("/")));
            write.write_all(b"for first").unwrap();
            assert_eq!(waits.await.unwrap(), b"for first");
            // What was cancelled makes room.
            engine.run(Operation::stat("/")).await.unwrap();
        }
    });
}
