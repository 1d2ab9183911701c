//! Messages that are values: in place, and refused with figures where they are not.

use pelton::values::{SendValue as _, View as _};
use pelton::{Error, Options, Sent};
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

#[derive(FromBytes, Immutable, IntoBytes, KnownLayout, Clone, Copy, Debug, PartialEq)]
#[repr(C)]
struct Point {
    x: u64,
    y: u64,
}

fn problem<T: std::fmt::Debug>(found: pelton::Result<T>) -> String {
    match found {
        Err(error @ Error::Value { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_value_is_read_in_place_from_messages_batches_and_held_messages() {
    let (mut sender, mut receiver) = Options::new().threads().unwrap();
    for x in 0..100 {
        sender.send_value(&Point { x, y: 7 }).unwrap();
        // Others in between, so that values begin at every multiple of 8.
        sender.send(&vec![1; x as usize]).unwrap();
        let message = receiver.receive().unwrap();
        let point: &Point = message.view().unwrap();
        assert_eq!(*point, Point { x, y: 7 });
        assert_eq!(std::ptr::from_ref(point).addr(), message.as_ptr().addr(), "it is a copy");
        drop(message);
        drop(receiver.receive().unwrap());
    }
    sender.send_value(&Point { x: 1, y: 2 }).unwrap();
    let held = receiver.receive().unwrap().hold();
    assert_eq!(held.view::<Point>().unwrap().y, 2);
    assert_eq!(sender.try_send_value(&[Point { x: 1, y: 2 }; 3]).unwrap(), Sent::Sent);
    let mut batch = receiver.try_receive_batch().unwrap().unwrap();
    let points = batch.next().unwrap().unwrap().view_slice::<Point>().unwrap();
    assert_eq!(points, [Point { x: 1, y: 2 }; 3]);
}

#[test]
fn a_slice_of_values_is_a_message_without_a_copy_of_its_own() {
    let (mut sender, mut receiver) = Options::new().threads().unwrap();
    let points: Vec<Point> = (0..10).map(|x| Point { x, y: 0 }).collect();
    sender.send_value(&points[..]).unwrap();
    assert_eq!(receiver.receive().unwrap().view_slice::<Point>().unwrap(), points);
    sender.send_value(&points[..0]).unwrap();
    assert_eq!(receiver.receive().unwrap().view_slice::<Point>().unwrap(), []);
}

#[test]
fn another_size_is_refused_with_the_size_found_and_wanted() {
    let (mut sender, mut receiver) = Options::new().threads().unwrap();
    for bytes in [0, 8, 15, 17, 32] {
        sender.send(&vec![0; bytes]).unwrap();
        let message = receiver.receive().unwrap();
        for text in [problem(message.view::<Point>()), problem(message.read::<Point>())] {
            assert!(text.contains("Point") && text.contains(&format!("{bytes} bytes, wanted 16")), "{text}");
        }
        if bytes % 16 != 0 {
            assert!(problem(message.view_slice::<Point>()).contains(&format!("{bytes} bytes, wanted 16")));
        }
    }
}

#[test]
fn a_buffer_that_is_not_aligned_is_refused_by_view_and_copied_by_read() {
    let bytes: [u64; 4] = [0, u64::from_ne_bytes([0, 0, 0, 0, 9, 0, 0, 0]).rotate_right(32), 0, 0];
    let odd = &bytes.as_bytes()[4..20];
    let text = problem(odd.view::<Point>());
    assert!(text.contains("multiple of 4, wanted 8") && text.contains("`read`"), "{text}");
    assert!(problem(odd.view_slice::<Point>()).contains("wanted 8"));
    odd.read::<Point>().unwrap();
}

#[test]
fn sending_a_value_fails_as_sending_its_bytes_does() {
    let (mut sender, receiver) = Options::new().capacity(1 << 16).threads().unwrap();
    assert!(matches!(sender.send_value(&[0u64; 8000]), Err(Error::TooLarge { bytes: 64_000, .. })));
    while sender.try_send_value(&[0u64; 100]).unwrap() == Sent::Sent {}
    let soon = Instant::now() + Duration::from_millis(1);
    assert_eq!(sender.send_value_until(&[0u64; 100], soon).unwrap(), Sent::TimedOut);
    drop(receiver);
    assert!(sender.send_value(&[0u64; 100]).unwrap_err().is_closed());
}
