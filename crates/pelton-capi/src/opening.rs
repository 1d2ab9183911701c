//! Opening endpoints, with and without waiting; listening and accepting.

use crate::broadcast::Subscriber;
use crate::c::{New, Options, Text, directory, text};
use crate::code::{self, Answer, done, found};
use crate::entries::entries;
use crate::handle::{Kind, Object};
use crate::options::{self, ChannelOptions, SubscriberOptions};
use crate::receiver::Receiver;
use crate::sender::Sender;
use pelton::{Deadline, Listener};
use std::ffi::CStr;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// What a name leads to, and how to open it there.
enum Place<'a> {
    Name(&'a str),
    /// A path channel to be created if there is none.
    Created(&'a Path),
    /// A path channel that exists, or is waited for.
    Existing(&'a Path),
}

impl Place<'_> {
    fn of<'a>(name: &'a CStr, options: &ChannelOptions) -> Answer<Place<'a>> {
        Ok(match directory(name)? {
            None => Place::Name(text(name)?),
            Some(directory) if options.creates()? => Place::Created(directory),
            Some(directory) => Place::Existing(directory),
        })
    }
}

entries! {
    fn pelton_sender_open(name: Text, options: Options<ChannelOptions>, out: New<Sender>) {
        out.give(Sender::new(done(match Place::of(name, &options)? {
            Place::Name(name) => options.build(&options::SENDER_BY_NAME)?.connect_sender(name),
            Place::Created(path) => options.build(&options::CREATED_SENDER)?.create_sender(path),
            Place::Existing(path) => options.build(&options::OPENED_SENDER)?.open_sender(path),
        })?))
    }

    fn pelton_receiver_open(name: Text, options: Options<ChannelOptions>, out: New<Receiver>) {
        out.give(Receiver::new(done(match Place::of(name, &options)? {
            Place::Name(name) => options.build(&options::RECEIVER_BY_NAME)?.connect_receiver(name),
            Place::Created(path) => options.build(&options::CREATED_RECEIVER)?.create_receiver(path),
            Place::Existing(path) => options.build(&options::OPENED_RECEIVER)?.open_receiver(path),
        })?))
    }

    fn pelton_sender_open_start(name: Text, options: Options<ChannelOptions>, out: New<Opening<Sender>>) {
        out.give(Opening::new(done(match Place::of(name, &options)? {
            Place::Name(name) => options.build(&options::SENDER_BY_NAME)?.start_connect_sender(name),
            Place::Created(path) => options.build(&options::CREATED_SENDER)?.start_create_sender(path),
            Place::Existing(path) => options.build(&options::OPENED_SENDER)?.start_open_sender(path),
        })?))
    }

    fn pelton_receiver_open_start(name: Text, options: Options<ChannelOptions>, out: New<Opening<Receiver>>) {
        out.give(Opening::new(done(match Place::of(name, &options)? {
            Place::Name(name) => options.build(&options::RECEIVER_BY_NAME)?.start_connect_receiver(name),
            Place::Created(path) => options.build(&options::CREATED_RECEIVER)?.start_create_receiver(path),
            Place::Existing(path) => options.build(&options::OPENED_RECEIVER)?.start_open_receiver(path),
        })?))
    }
}

/// What can be opened without waiting.
pub trait Opened: Object {
    /// Behind the handle.
    type Inner: 'static;
    const OPENING: Kind;
}

impl Opened for Sender {
    type Inner = pelton::Sender;
    const OPENING: Kind = Kind::SenderOpening;
}

impl Opened for Receiver {
    type Inner = pelton::Receiver;
    const OPENING: Kind = Kind::ReceiverOpening;
}

impl Opened for Subscriber {
    type Inner = pelton::Subscriber;
    const OPENING: Kind = Kind::SubscriberOpening;
}

/// An open in progress.
pub struct Opening<T: Opened> {
    inner: pelton::Opening<T::Inner>,
    opened: PhantomData<fn() -> T>,
}

impl<T: Opened> Opening<T> {
    pub fn new(inner: pelton::Opening<T::Inner>) -> Opening<T> {
        Opening { inner, opened: PhantomData }
    }

    /// The descriptor to poll.
    pub fn fd(&self) -> i32 {
        self.inner.as_raw_fd()
    }

    /// Continues; `PELTON_AGAIN`: it is not open yet.
    pub fn finish(&mut self) -> Answer<T::Inner> {
        found(self.inner.try_finish())
    }
}

impl<T: Opened> Object for Opening<T> {
    const KIND: Kind = T::OPENING;

    fn is_forked(&self) -> bool {
        self.inner.is_forked()
    }
}

entries! {
    fn pelton_sender_opening_fd(opening: &mut Opening<Sender>) {
        Ok(opening.fd())
    }

    fn pelton_receiver_opening_fd(opening: &mut Opening<Receiver>) {
        Ok(opening.fd())
    }

    fn pelton_sender_opening_finish(opening: &mut Opening<Sender>, out: New<Sender>) {
        out.give(Sender::new(opening.finish()?))
    }

    fn pelton_receiver_opening_finish(opening: &mut Opening<Receiver>, out: New<Receiver>) {
        out.give(Receiver::new(opening.finish()?))
    }

    fn pelton_threads(options: Options<ChannelOptions>, out_sender: New<Sender>, out_receiver: New<Receiver>) {
        let (sender, receiver) = done(options.build(&options::THREADS)?.threads())?;
        out_sender.give(Sender::new(sender))?;
        out_receiver.give(Receiver::new(receiver))
    }
}

entries! {
    fn pelton_subscriber_open(name: Text, options: Options<SubscriberOptions>, out: New<Subscriber>) {
        out.give(Subscriber::new(done(match directory(name)? {
            None => options.build(&options::SUBSCRIBER)?.connect_subscriber(text(name)?),
            Some(path) => options.build_in_directory()?.open_subscriber(path),
        })?))
    }

    fn pelton_subscriber_open_start(
        name: Text,
        options: Options<SubscriberOptions>,
        out: New<Opening<Subscriber>>,
    ) {
        out.give(Opening::new(done(match directory(name)? {
            None => options.build(&options::SUBSCRIBER)?.start_connect_subscriber(text(name)?),
            Some(path) => options.build_in_directory()?.start_open_subscriber(path),
        })?))
    }

    fn pelton_subscriber_opening_fd(opening: &mut Opening<Subscriber>) {
        Ok(opening.fd())
    }

    fn pelton_subscriber_opening_finish(opening: &mut Opening<Subscriber>, out: New<Subscriber>) {
        out.give(Subscriber::new(opening.finish()?))
    }
}

/// A listener.
pub struct Listening(Listener);

impl Object for Listening {
    const KIND: Kind = Kind::Listener;

    fn is_forked(&self) -> bool {
        self.0.is_forked()
    }
}

entries! {
    fn pelton_listener_open(name: Text, options: Options<ChannelOptions>, out: New<Listening>) {
        out.give(Listening(done(options.build(&options::LISTENER)?.listen(text(name)?))?))
    }

    fn pelton_listener_fd(listener: &mut Listening) {
        Ok(listener.0.as_fd().as_raw_fd())
    }

    fn pelton_listener_accept_sender(listener: &mut Listening, deadline_ns: Deadline, out: New<Sender>) {
        out.give(Sender::new(accept(&listener.0, deadline_ns, Listener::accept_sender_until)?))
    }

    fn pelton_listener_accept_receiver(listener: &mut Listening, deadline_ns: Deadline, out: New<Receiver>) {
        out.give(Receiver::new(accept(&listener.0, deadline_ns, Listener::accept_receiver_until)?))
    }
}

/// Accepts a peer. One that has connected before the deadline is accepted, even if its handshake ends later.
fn accept<T>(
    listener: &Listener,
    deadline: Deadline,
    accept: impl Fn(&Listener, Instant) -> pelton::Result<Option<T>>,
) -> Answer<T> {
    /// The limit of a handshake that begins at the deadline.
    const HANDSHAKE: Duration = Duration::from_millis(500);
    /// A wait without a deadline is many of these.
    const DAY: Duration = Duration::from_secs(86_400);
    let deadline = match deadline {
        Deadline::At(instant) if instant <= Instant::now() => Deadline::Now,
        deadline => deadline,
    };
    loop {
        let until = match deadline {
            Deadline::Now => {
                let mut poll = libc::pollfd { fd: listener.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
                // SAFETY: it reads and writes this one structure.
                if unsafe { libc::poll(&mut poll, 1, 0) } != 1 {
                    return Err(code::AGAIN);
                }
                Instant::now() + HANDSHAKE
            }
            Deadline::At(instant) => instant,
            Deadline::Never => Instant::now() + DAY,
        };
        match done(accept(listener, until))? {
            Some(accepted) => return Ok(accepted),
            None if deadline == Deadline::Never => {}
            None => return Err(code::AGAIN),
        }
    }
}
