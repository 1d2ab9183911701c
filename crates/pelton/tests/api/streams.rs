//! A receiver as a `Stream`, a sender as a `Sink`: nothing is lost, and the end of the one is the end of the other.

use futures_util::{Sink, SinkExt as _, Stream, StreamExt as _, TryStreamExt as _};
use pelton::tokio::{AsyncReceiver, AsyncSender, MessageSink, MessageStream};
use pelton::{Error, Options};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), test).await.expect("hangs") })
}

fn pair(capacity: u64) -> (MessageSink, MessageStream) {
    let (sender, receiver) = Options::new().capacity(capacity).threads().unwrap();
    (AsyncSender::new(sender).unwrap().into_sink(), AsyncReceiver::new(receiver).unwrap().into_stream())
}

fn message(number: u32) -> Vec<u8> {
    number.to_le_bytes().repeat(number as usize % 500 + 1)
}

fn poll<T>(mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
    poll(&mut Context::from_waker(Waker::noop()))
}

fn as_bytes(sink: &mut MessageSink) -> Pin<&mut (dyn Sink<&'static [u8], Error = Error> + Unpin)> {
    Pin::new(sink)
}

#[test]
fn a_sink_fed_by_a_stream_loses_nothing_and_its_close_ends_the_receivers_stream() {
    run(async {
        let (mut sink, stream) = pair(64 * 1024);
        let sending = async {
            let mut messages = futures_util::stream::iter((0..20_000).map(message).map(Ok));
            sink.send_all(&mut messages).await.unwrap();
            sink.close().await.unwrap();
            assert!(matches!(sink.send(vec![1]).await, Err(Error::Refused(_))));
        };
        let receiving = async {
            let received: Vec<Vec<u8>> = stream.try_collect().await.unwrap();
            assert_eq!(received.len(), 20_000);
            assert!((0..).map(message).zip(received).all(|(wanted, found)| wanted == found));
        };
        tokio::join!(sending, receiving);
    });
}

#[test]
fn a_sink_accepts_one_message_more_than_the_lane_and_then_waits() {
    run(async {
        let (mut sink, mut stream) = pair(64 * 1024);
        let mut accepted = 0u32;
        while poll(|context| as_bytes(&mut sink).poll_ready(context)).is_ready() {
            as_bytes(&mut sink).start_send(&[7; 1000]).unwrap();
            accepted += 1;
        }
        assert!(matches!(as_bytes(&mut sink).start_send(&[8; 1000]), Err(Error::Refused(_))));
        assert!(poll(|context| as_bytes(&mut sink).poll_flush(context)).is_pending());
        // A flush that is dropped loses nothing either.
        drop(sink.flush());
        for received in 0..accepted {
            assert_eq!(stream.next().await.unwrap().unwrap(), [7; 1000], "{received}");
            if received == 100.min(accepted - 2) {
                sink.flush().await.unwrap();
            }
        }
        assert!(poll(|context| Pin::new(&mut stream).poll_next(context)).is_pending());
        assert!(poll(|context| as_bytes(&mut sink).poll_ready(context)).is_ready());
        let (sender, pending) = sink.into_inner();
        assert!(sender.is_some() && pending.is_none());
    });
}

#[test]
fn a_next_dropped_at_any_await_takes_no_message() {
    run(async {
        let (mut sink, mut stream) = pair(64 * 1024);
        for number in 0..1_000 {
            assert!(poll(|context| stream.next().poll_unpin_by(context)).is_pending());
            sink.send(message(number)).await.unwrap();
            assert_eq!(stream.next().await.unwrap().unwrap(), message(number));
        }
        let mut buffer = Vec::new();
        let mut receiver = stream.into_inner();
        {
            let mut dropped = std::pin::pin!(receiver.receive_into(&mut buffer));
            assert!(poll(|context| dropped.as_mut().poll(context)).is_pending());
            sink.send(b"last").await.unwrap();
        }
        assert_eq!(receiver.receive_into(&mut buffer).await.unwrap(), 4);
        assert_eq!(buffer, b"last");
    });
}

/// Polls a future once, and drops it.
trait PollOnce: Future + Sized {
    fn poll_unpin_by(self, context: &mut Context<'_>) -> Poll<Self::Output> {
        std::pin::pin!(self).poll(context)
    }
}

impl<F: Future> PollOnce for F {}

#[test]
fn a_stream_of_a_path_channel_ends_with_a_sender_and_a_second_one_has_the_next() {
    run(async {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("c");
        let mut receiver = AsyncReceiver::new(Options::new().create_receiver(&path).unwrap()).unwrap();
        for round in 0..3u8 {
            let mut sender = Options::new().open_sender(&path).unwrap();
            sender.send(&[round]).unwrap();
            sender.close().unwrap();
            let messages: Vec<Vec<u8>> = receiver.stream().try_collect().await.unwrap();
            assert_eq!(messages, [[round]]);
        }
    });
}

#[test]
fn a_sink_keeps_the_accepted_message_when_the_receiver_goes() {
    run(async {
        let (mut sink, stream) = pair(64 * 1024);
        while poll(|context| as_bytes(&mut sink).poll_ready(context)).is_ready() {
            as_bytes(&mut sink).start_send(&[7; 1000]).unwrap();
        }
        drop(stream);
        assert!(sink.flush().await.unwrap_err().is_closed());
        assert_eq!(sink.into_inner().1.unwrap(), [7; 1000]);
        let (mut sink, _stream) = pair(64 * 1024);
        assert!(matches!(sink.send(vec![0; 1 << 20]).await, Err(Error::TooLarge { .. })));
        assert!(sink.into_inner().1.is_none());
    });
}

#[test]
fn a_stream_that_is_always_ready_lets_other_tasks_run() {
    run(async {
        let (mut sink, mut stream) = pair(64 * 1024);
        let relaying = tokio::spawn(async move {
            // Both sides in one task: neither ever has to wait.
            loop {
                sink.send(b"round").await.unwrap();
                stream.next().await.unwrap().unwrap();
            }
        });
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        relaying.abort();
    });
}
