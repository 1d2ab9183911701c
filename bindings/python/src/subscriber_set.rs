//! `pelton.SubscriberSet`: one thread receives from the subscribers of many publishers.

use crate::broadcast::{Delivery, Found, Subscriber};
use crate::error::{is_end, named, raise, timed_out};
use crate::handle::{Handle, Using, deadline};
use crate::open::Info;
use pelton::{Deadline, SubscriberEvent, Wait};
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;

/// The subscribers of many publishers, for which one thread waits. One thread at a time.
///
/// The messages of a publisher arrive in order; between publishers there is no order. Those with messages take turns,
/// of 64 messages each. While the set has a subscriber, all other uses of that subscriber raise `Busy`. One that is
/// closed leaves the set, and its broadcast, when the set is next used to receive, or within 50 ms if it waits. After a
/// close of the set, also by `with`, its subscribers can be used again. Iteration is over pairs of a subscriber and a
/// delivery, until each publisher has closed, or each subscriber. An event loop needs no set.
///
/// Example:
///     with pelton.SubscriberSet() as topic:
///         topic.add(bids)
///         topic.add(offers)
///         for subscriber, delivery in topic:
///             print("bid" if subscriber is bids else "offer", delivery.data)
#[pyclass(frozen, module = "pelton", weakref)]
pub struct SubscriberSet(Handle<Set>);

struct Set {
    set: pelton::SubscriberSet,
    /// Whose subscribers those in the set are, by their keys.
    members: Vec<Option<Py<Subscriber>>>,
}

/// What a wait of a set ends with.
enum Event {
    Message(usize, Found),
    Left(usize, Box<pelton::Subscriber>, pelton::Error),
    /// Another thread has closed this member.
    Closed(usize),
}

impl Set {
    fn event(&mut self, until: Deadline) -> pelton::Result<Option<Event>> {
        let is_closing =
            |member: &Option<Py<Subscriber>>| member.as_ref().is_some_and(|member| member.get().0.is_closing());
        if let Some(key) = self.members.iter().position(is_closing) {
            return Ok(Some(Event::Closed(key)));
        }
        Ok(self.set.receive_until(until)?.and_then(|event| match event {
            SubscriberEvent::Message { key, message } => Some(Event::Message(key, Found::of(message))),
            SubscriberEvent::Left { key, subscriber, error } => Some(Event::Left(key, subscriber, error)),
            _ => None,
        }))
    }

    fn key_of(&self, subscriber: &Bound<'_, Subscriber>) -> PyResult<usize> {
        let is_it = |member: &Option<Py<Subscriber>>| member.as_ref().is_some_and(|member| member.is(subscriber));
        let key = self.members.iter().position(is_it);
        key.ok_or_else(|| PyKeyError::new_err("the subscriber is not in this set"))
    }

    fn remove(&mut self, key: usize) {
        if let (Some(member), Some(subscriber)) = (self.members[key].take(), self.set.remove(key)) {
            member.get().0.give_back(*subscriber);
        }
    }
}

/// Gives the members back.
impl Drop for Set {
    fn drop(&mut self) {
        (0..self.members.len()).for_each(|key| self.remove(key));
    }
}

impl SubscriberSet {
    /// `None`: the deadline, or the set is empty.
    fn recv_until(&self, py: Python<'_>, deadline: Deadline) -> PyResult<Option<(Py<Subscriber>, Delivery)>> {
        let mut using = self.0.take(py)?;
        let mut until = Deadline::Now;
        loop {
            match using.wait(py, until, Set::event)? {
                Some(Event::Message(key, found)) => return found_in(py, &mut using, key, found).map(Some),
                Some(Event::Left(key, subscriber, error)) => {
                    let error = raise(py, error);
                    if let Some(member) = using.members[key].take() {
                        member.get().0.give_back(*subscriber);
                        error.value(py).setattr("subscriber", member)?;
                    }
                    return Err(error);
                }
                Some(Event::Closed(key)) => {
                    using.remove(key);
                    // The set may be empty now.
                    until = Deadline::Now;
                }
                None if until == deadline || using.set.is_empty() => return Ok(None),
                None => until = deadline,
            }
        }
    }
}

fn found_in(
    py: Python<'_>,
    using: &mut Using<'_, Set>,
    key: usize,
    found: Found,
) -> PyResult<(Py<Subscriber>, Delivery)> {
    let Set { set, members } = &mut **using;
    let (Some(member), Some(delivery)) = (&members[key], set.kept_delivery(key)) else {
        return Err(crate::error::internal(py, "a set has received from a subscriber that it does not have"));
    };
    Ok((member.clone_ref(py), found.taken(py, delivery)?))
}

#[pymethods]
impl SubscriberSet {
    /// An empty set. Whether it spins instead of sleeping is its own option, not that of the subscribers.
    #[new]
    #[pyo3(signature = (*, spin=false))]
    fn new(py: Python<'_>, spin: bool) -> PyResult<SubscriberSet> {
        let set = pelton::SubscriberSet::new(if spin { Wait::Spin } else { Wait::Block });
        let set = set.map_err(|error| raise(py, error))?;
        Ok(SubscriberSet(Handle::new("set", Set { set, members: Vec::new() })))
    }

    /// Adds a subscriber. Does not wait. Raises `Busy` if another thread uses it, or a set has it already.
    fn add(&self, subscriber: &Bound<'_, Subscriber>) -> PyResult<()> {
        let py = subscriber.py();
        let mut using = self.0.take(py)?;
        let Set { set, members } = &mut *using;
        let handle = &subscriber.get().0;
        let key = set.add_or_return(Box::new(handle.lend(py)?)).map_err(|(returned, error)| {
            handle.give_back(*returned);
            raise(py, error)
        })?;
        if key == members.len() {
            members.push(None);
        }
        members[key] = Some(subscriber.clone().unbind());
        Ok(())
    }

    /// Removes a subscriber, which keeps its place. Does not wait. Raises `KeyError` if the set does not have it.
    fn remove(&self, subscriber: &Bound<'_, Subscriber>) -> PyResult<()> {
        let mut using = self.0.take(subscriber.py())?;
        let key = using.key_of(subscriber)?;
        using.remove(key);
        Ok(())
    }

    /// A subscriber and its next message, copied. Waits up to `timeout` seconds; raises `TimedOut` after that.
    ///
    /// If a publisher has left, raises what `Subscriber.recv` would, as `Closed` or `PeerDied`. The error's
    /// `subscriber` is then out of the set. Close it, or `resume` it and add it again: by `resume(0)` between receives,
    /// since nothing else is received while it waits. Raises `Refused` if the set is empty.
    #[pyo3(signature = (timeout=None))]
    fn recv(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<(Py<Subscriber>, Delivery)> {
        match self.recv_until(py, deadline(timeout)?)? {
            Some(received) => Ok(received),
            None if self.__len__(py)? == 0 => {
                Err(named(py, "Refused", "the set is empty, so nothing can arrive: add a subscriber"))
            }
            None => Err(timed_out(py, "waiting for a message")),
        }
    }

    /// As `recv`, but does not wait: None if there is no message.
    fn try_recv(&self, py: Python<'_>) -> PyResult<Option<(Py<Subscriber>, Delivery)>> {
        self.recv_until(py, Deadline::Now)
    }

    /// As `Subscriber.info`, of one in the set. Raises `KeyError` if the set does not have it.
    fn info(&self, subscriber: &Bound<'_, Subscriber>) -> PyResult<Info> {
        let py = subscriber.py();
        let using = self.0.take(py)?;
        if using.set.is_forked() {
            return Err(raise(py, pelton::Error::Forked));
        }
        let member = using.set.get(using.key_of(subscriber)?);
        let member = member.ok_or_else(|| crate::error::internal(py, "a set does not have its subscriber"))?;
        Ok(Info::new(member.capacity(), member.message_bytes_max(), member.peer(), member.counters()))
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.0.take(py)?.set.len())
    }

    /// Gives the subscribers back. A thread that waits in this set gets `ClosedHandle` within 50 ms.
    fn close(&self) {
        self.0.close();
    }

    /// Whether this handle is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.0.is_closed()
    }

    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<(Py<Subscriber>, Delivery)>> {
        loop {
            match self.recv_until(py, Deadline::Never) {
                Err(error) if is_end(py, &error) => {}
                found => return found,
            }
        }
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __exit__(&self, _type: &Bound<'_, PyAny>, _value: &Bound<'_, PyAny>, _traceback: &Bound<'_, PyAny>) {
        self.0.close();
    }
}
