//! The Tokio adapter: a message is received once whatever is cancelled, and a sleeping task is woken.
#![cfg(feature = "tokio")]

use pelton::Options;
use pelton::tokio::{AsyncReceiver, AsyncSender};
use std::future::Future;
use std::pin::pin;
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
