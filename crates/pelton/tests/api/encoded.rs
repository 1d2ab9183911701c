//! Messages with serde: what arrives is what was sent, and what is not decodable is refused.

use crate::support::*;
use pelton::encoded::{CallEncoded as _, Decode as _, ReplyEncoded as _, SendEncoded as _};
use pelton::{Client, Error, Options, Sent, Service};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
enum Order {
    Buy { buyer: String, amounts: Vec<u32> },
    Cancel(u64),
    All(BTreeMap<String, Option<bool>>),
}

fn orders() -> Vec<Order> {
    let all = |count: u32| (0..count).map(|n| (n.to_string(), (n % 3 != 0).then_some(n % 2 == 0))).collect();
    vec![
        Order::Buy { buyer: "Ada".to_owned(), amounts: (0..500).collect() },
        Order::Cancel(u64::MAX),
        Order::Cancel(0),
        Order::All(all(0)),
        Order::All(all(100)),
    ]
}

struct Refuses;

impl Serialize for Refuses {
    fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom("never"))
    }
}

#[test]
fn a_value_arrives_as_it_was_sent() {
    let (mut sender, mut receiver) = Options::new().threads().unwrap();
    for order in orders() {
        sender.send_encoded(&order).unwrap();
        assert_eq!(receiver.receive().unwrap().decode::<Order>().unwrap(), order);
        assert_eq!(sender.try_send_encoded(&order).unwrap(), Sent::Sent);
        assert_eq!(receiver.receive_vec().unwrap().decode::<Order>().unwrap(), order);
    }
    // Borrowed from the message.
    sender.send_encoded("in place").unwrap();
    assert_eq!(receiver.receive().unwrap().decode::<&str>().unwrap(), "in place");
}

#[test]
fn what_is_no_such_value_is_refused() {
    let (mut sender, mut receiver) = Options::new().threads().unwrap();
    sender.send_encoded(&(1u8, 2u8)).unwrap();
    match receiver.receive().unwrap().decode::<u8>() {
        Err(Error::Value { type_name: "u8", problem }) => assert!(problem.contains("1 of 2 bytes"), "{problem}"),
        other => panic!("{other:?}"),
    }
    sender.send(&[200]).unwrap();
    let error = receiver.receive().unwrap().decode::<Order>().unwrap_err();
    assert!(matches!(error, Error::Value { .. }) && error.to_string().contains("Order"), "{error}");
    sender.send(&[]).unwrap();
    assert!(matches!(receiver.receive().unwrap().decode::<Order>(), Err(Error::Value { .. })));
}

#[test]
fn a_value_that_cannot_be_encoded_sends_nothing() {
    let (mut sender, mut receiver) = Options::new().threads().unwrap();
    assert!(matches!(sender.send_encoded(&Refuses), Err(Error::Value { .. })));
    assert!(receiver.try_receive().unwrap().is_none());
}

#[test]
fn a_full_lane_and_a_limit_are_those_of_sending() {
    let (mut sender, _receiver) = Options::new().capacity(1 << 16).threads().unwrap();
    let large = vec![1u8; 40_000];
    assert!(matches!(sender.send_encoded(&large), Err(Error::TooLarge { bytes: 40_003, .. })));
    while sender.try_send_encoded("some text").unwrap() == Sent::Sent {}
    let soon = Instant::now() + Duration::from_millis(1);
    assert_eq!(sender.send_encoded_until("some text", soon).unwrap(), Sent::TimedOut);
}

#[test]
fn calls_take_and_reply_values_small_and_larger_than_the_lane() {
    let place = TestDir::new("encoded calls");
    let name = place.name();
    let options = <Options>::new().capacity(1 << 16).connect_deadline(deadline());
    let mut service = Service::listen_with(&name, &options.cast()).unwrap();
    let stopper = service.stopper();
    let serving = std::thread::spawn(move || {
        service.run(2, |request| {
            let Ok((times, text)) = request.decode::<(u32, String)>() else {
                return request.fail(1, b"no such request").unwrap();
            };
            let reply = text.repeat(times as usize);
            match times % 2 {
                0 => request.reply_encoded(&reply).unwrap(),
                _ => request.into_responder().reply_encoded(&reply).unwrap(),
            }
        })
    });
    let mut client = Client::connect_with(&name, &options.cast()).unwrap();
    for times in (0..30).chain([20_000, 20_001]) {
        let reply = client.call_encoded(&(times, "words ")).unwrap();
        assert_eq!(reply.decode::<String>().unwrap(), "words ".repeat(times));
    }
    assert_eq!(client.call_encoded(&()).unwrap().outcome(), pelton::Outcome::Failed(1));
    assert!(matches!(client.call_encoded(&Refuses), Err(Error::Value { .. })));
    stopper.stop();
    serving.join().unwrap().unwrap();
}
