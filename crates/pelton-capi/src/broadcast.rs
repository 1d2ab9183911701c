//! The publisher of a broadcast, and its subscribers.

use crate::c::{
    Bytes, Info, New, Options, Out, OutArray, Text, check_size, directory, sized_structures, structures, text,
};
use crate::code::{self, Answer, armed, done, found, is_done, sent};
use crate::entries::entries;
use crate::handle::{Handle, Kind, Object, State};
use crate::options::{self, PublisherOptions, SubscriberOptions};
use crate::receiver::numbers;
use pelton::{Deadline, Delivery, Policy, Sent, SubscriberState};
use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;
use std::time::Duration;

pub struct Publisher(pelton::Publisher);

impl Object for Publisher {
    const KIND: Kind = Kind::Publisher;

    fn is_forked(&self) -> bool {
        self.0.is_forked()
    }
}

pub struct Subscriber {
    broadcast: pelton::Subscriber,
    /// It keeps a delivery. Until that is released, it is used for nothing else.
    received: bool,
}

impl Subscriber {
    pub fn new(broadcast: pelton::Subscriber) -> Subscriber {
        Subscriber { broadcast, received: false }
    }

    pub fn into_broadcast(self) -> pelton::Subscriber {
        self.broadcast
    }

    /// The endpoint, for calls that would move what is received.
    pub fn released(&mut self) -> Answer<&mut pelton::Subscriber> {
        if self.received { Err(code::plain(code::NOT_RELEASED)) } else { Ok(&mut self.broadcast) }
    }
}

impl Object for Subscriber {
    const KIND: Kind = Kind::Subscriber;

    fn is_forked(&self) -> bool {
        self.broadcast.is_forked()
    }

    fn state(&self) -> State {
        if self.received { State::One } else { State::Free }
    }
}

structures! {
    "pelton_delivery" CDelivery {
        data: *const c_void,
        size: usize,
        number: u64,
        missed: u64,
    }
    "pelton_subscriber_state" CSubscriberState {
        pid: u32,
        uid: u32,
        durable: [u8; 72],
        policy: u32,
        lags: u32,
        lag_after_ns: i64,
        holds_ns: i64,
        behind: u64,
        messages: u64,
        missed: u64,
    }
}

/// Makes a delivery the received message.
#[inline(always)]
pub fn show(delivery: Delivery<'_>) -> CDelivery {
    let shown = CDelivery {
        data: delivery.as_ptr().cast(),
        size: delivery.len(),
        number: delivery.number(),
        missed: delivery.missed(),
    };
    delivery.keep();
    shown
}

impl CSubscriberState {
    fn of(state: &SubscriberState) -> CSubscriberState {
        /// At least 1: 0 is none.
        fn ns(time: Option<Duration>) -> i64 {
            time.map_or(0, |time| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX).max(1))
        }
        let (pid, uid) = numbers(Some(state.peer));
        let mut durable = [0; 72];
        let name = state.durable.as_deref().unwrap_or_default().as_bytes();
        // With a NUL: the library's names have at most 64 bytes.
        durable[..name.len()].copy_from_slice(name);
        CSubscriberState {
            pid,
            uid,
            durable,
            policy: match state.policy {
                Policy::Gate => 0,
                Policy::Lag => 1,
                Policy::Latest => 2,
            },
            lags: state.lags.into(),
            lag_after_ns: ns(state.lag_after),
            holds_ns: ns(state.holds),
            behind: state.behind,
            messages: state.messages,
            missed: state.missed,
        }
    }
}

sized_structures! {
    "pelton_publisher_info" PublisherInfo {
        subscribers: u32,
        next_number: u64,
        capacity: u64,
        message_bytes_max: u64,
        corrupt: u64,
        messages: u64,
        bytes: u64,
        waits: u64,
        sleeps: u64,
        wakes_sent: u64,
    }
    "pelton_subscriber_info" SubscriberInfo {
        peer_pid: u32,
        peer_uid: u32,
        continues: u32,
        next_number: u64,
        capacity: u64,
        message_bytes_max: u64,
        messages: u64,
        bytes: u64,
        missed: u64,
        waits: u64,
        sleeps: u64,
        wakes_sent: u64,
    }
}

impl SubscriberInfo {
    pub fn of(subscriber: &pelton::Subscriber) -> SubscriberInfo {
        let (counters, (peer_pid, peer_uid)) = (subscriber.counters(), numbers(subscriber.peer()));
        SubscriberInfo {
            struct_bytes: 0,
            peer_pid,
            peer_uid,
            continues: subscriber.continues().into(),
            next_number: subscriber.next_number(),
            capacity: subscriber.capacity(),
            message_bytes_max: subscriber.message_bytes_max(),
            messages: counters.messages,
            bytes: counters.bytes,
            missed: subscriber.missed(),
            waits: counters.waits,
            sleeps: counters.sleeps,
            wakes_sent: counters.wakes_sent,
        }
    }
}

/// Sends, if there is space and the handle is free.
///
/// # Safety
/// As for [`Handle::object_in`]; `size` bytes can be read at `data`, unless it is NULL.
#[inline(always)]
unsafe fn send_fast(handle: *mut Handle<Publisher>, data: *const c_void, size: usize) -> Option<c_int> {
    // SAFETY: the caller guarantees the handle.
    let publisher = unsafe { Handle::object_in(handle, State::Free) }?;
    if data.is_null() || size > u32::MAX as usize {
        return None;
    }
    // SAFETY: the caller guarantees the bytes; so few are no longer than a slice may be.
    let payload = unsafe { std::slice::from_raw_parts(data.cast(), size) };
    // SAFETY: the object was found.
    match unsafe { Handle::run_fast(handle, || publisher.0.try_send(payload)) } {
        Ok(Ok(Sent::Sent)) => Some(0),
        // The slow path finds an error again.
        Ok(_) => None,
        Err(code) => Some(code),
    }
}

/// Receives, if a message is there.
///
/// # Safety
/// As for [`Handle::object_in`]; `out` is NULL or writable.
#[inline(always)]
unsafe fn receive_fast(handle: *mut Handle<Subscriber>, out: *mut CDelivery) -> Option<c_int> {
    // SAFETY: the caller guarantees the handle.
    let subscriber = unsafe { Handle::object_in(handle, State::Free) }?;
    if out.is_null() {
        return None;
    }
    let receive = || subscriber.broadcast.try_receive().map(|delivery| delivery.map(show));
    // SAFETY: the object was found.
    match unsafe { Handle::run_fast(handle, receive) } {
        Ok(Ok(Some(shown))) => {
            subscriber.received = true;
            // SAFETY: the caller guarantees `out`; the object was found.
            unsafe {
                out.write(shown);
                Handle::set_state(handle, State::One);
            }
            Some(0)
        }
        // The slow path waits, and finds an error again.
        Ok(_) => None,
        Err(code) => Some(code),
    }
}

/// Releases the received message.
///
/// # Safety
/// As for [`Handle::object_in`].
#[inline(always)]
unsafe fn release_fast(handle: *mut Handle<Subscriber>) -> Option<c_int> {
    // SAFETY: the caller guarantees the handle.
    let subscriber = unsafe { Handle::object_in(handle, State::One) }?;
    if subscriber.is_forked() {
        return None;
    }
    if !std::mem::take(&mut subscriber.received) {
        return None;
    }
    // SAFETY: the object was found.
    let released = unsafe { Handle::run_fast(handle, || drop(subscriber.broadcast.kept_delivery())) };
    Some(match released {
        Ok(()) => {
            // SAFETY: the object was found.
            unsafe { Handle::set_state(handle, State::Free) };
            0
        }
        Err(code) => code,
    })
}

entries! {
    fn pelton_publisher_open(name: Option<Text>, options: Options<PublisherOptions>, out: New<Publisher>) {
        let Some(name) = name else {
            return out.give(Publisher(done(options.build(&options::PUBLISHING_THREAD)?.publisher())?));
        };
        out.give(Publisher(done(match directory(name)? {
            None => options.build(&options::PUBLISHER_BY_NAME)?.publish_at(text(name)?),
            Some(path) => options.build(&options::CREATED_PUBLISHER)?.create_publisher(path),
        })?))
    }

    fn pelton_subscription_remove(name: Text, durable: Text) {
        let Some(path) = directory(name)? else {
            return Err(code::tell(code::NAME, format!("{name:?} is no path:DIR: only there subscriptions are durable")));
        };
        let durable = options::durable(durable)?;
        match done(pelton::inspect::remove_durable(path, durable))? {
            true => Ok(()),
            false => Err(code::tell(
                code::REFUSED,
                format!("{} has no durable subscription {durable:?}", path.display()),
            )),
        }
    }

    fn pelton_publisher_subscriber(
        publisher: &mut Publisher,
        options: Options<SubscriberOptions>,
        out: New<Subscriber>,
    ) {
        let options = options.build(&options::SUBSCRIBING_THREAD)?;
        out.give(Subscriber::new(done(publisher.0.subscriber(&options))?))
    }

    fn pelton_publisher_send(publisher: &mut Publisher, data[size]: Bytes, deadline_ns: Deadline)
    fast { send_fast(publisher, data, size) }
    {
        sent(publisher.0.send_until(data, deadline_ns))
    }

    fn pelton_publisher_wait_subscribers(publisher: &mut Publisher, count: usize, deadline_ns: Deadline) {
        is_done(publisher.0.wait_subscribers_until(count, deadline_ns))
    }

    fn pelton_publisher_wait_released(publisher: &mut Publisher, deadline_ns: Deadline) {
        is_done(publisher.0.wait_released_until(deadline_ns))
    }

    fn pelton_publisher_subscribers(
        publisher: &mut Publisher,
        out[capacity]: OutArray<CSubscriberState>,
        out_count: Out<usize>,
    ) {
        let subscribers = publisher.0.subscribers();
        out_count.write(subscribers.len());
        if subscribers.len() > out.len() {
            let detail = format!("there are {} subscribers, and space for {}", subscribers.len(), out.len());
            return Err(code::tell(code::TOO_SMALL, detail));
        }
        for (place, state) in out.iter_mut().zip(&subscribers) {
            place.write(CSubscriberState::of(state));
        }
        Ok(())
    }

    fn pelton_publisher_fd(publisher: &mut Publisher) {
        Ok(publisher.0.as_raw_fd())
    }

    fn pelton_publisher_poll(publisher: &mut Publisher, size: usize) {
        check_size(size)?;
        is_done(publisher.0.busy_poll(size))
    }

    fn pelton_publisher_arm(publisher: &mut Publisher, size: usize) {
        check_size(size)?;
        armed(publisher.0.arm(size))
    }

    fn pelton_publisher_disarm(publisher: &mut Publisher) {
        publisher.0.disarm();
        Ok(())
    }

    fn pelton_publisher_get_info(publisher: &mut Publisher, out: Info<PublisherInfo>) {
        let (publisher, counters) = (&publisher.0, publisher.0.counters());
        out.write(PublisherInfo {
            struct_bytes: 0,
            subscribers: publisher.subscriber_count() as u32,
            next_number: publisher.next_number(),
            capacity: publisher.capacity(),
            message_bytes_max: publisher.message_bytes_max(),
            corrupt: publisher.corrupt_subscribers(),
            messages: counters.messages,
            bytes: counters.bytes,
            waits: counters.waits,
            sleeps: counters.sleeps,
            wakes_sent: counters.wakes_sent,
        })
    }
}

entries! {
    fn pelton_subscriber_receive(subscriber: &mut Subscriber, deadline_ns: Deadline, out: Out<CDelivery>)
    fast { receive_fast(subscriber, out) }
    {
        out.write(show(found(subscriber.released()?.receive_until(deadline_ns))?));
        subscriber.received = true;
        Ok(())
    }

    fn pelton_subscriber_release(subscriber: &mut Subscriber)
    fast { release_fast(subscriber) }
    {
        if !std::mem::take(&mut subscriber.received) {
            return Err(code::plain(code::NOT_RECEIVED));
        }
        drop(subscriber.broadcast.kept_delivery());
        Ok(())
    }

    fn pelton_subscriber_resume(subscriber: &mut Subscriber, deadline_ns: Deadline) {
        is_done(subscriber.released()?.resume_until(deadline_ns))
    }

    fn pelton_subscriber_fd(subscriber: &mut Subscriber) {
        Ok(subscriber.broadcast.as_raw_fd())
    }

    fn pelton_subscriber_poll(subscriber: &mut Subscriber) {
        is_done(subscriber.released()?.busy_poll())
    }

    fn pelton_subscriber_arm(subscriber: &mut Subscriber) {
        armed(subscriber.released()?.arm())
    }

    fn pelton_subscriber_disarm(subscriber: &mut Subscriber) {
        subscriber.broadcast.disarm();
        Ok(())
    }

    fn pelton_subscriber_get_info(subscriber: &mut Subscriber, out: Info<SubscriberInfo>) {
        out.write(SubscriberInfo::of(&subscriber.broadcast))
    }
}
