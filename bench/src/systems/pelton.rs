//! pelton: a channel for each direction, connected by the name of a Unix socket, or kept by a directory.

use std::{
    marker::PhantomData,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result, bail};
use pelton::{Options, Receiver, Sender, Sent};

use super::wire::Watch;
use crate::{
    endpoints::{CONNECT, Receiving, Sending, THERE, Transport},
    measure,
    parameters::{Job, Wait},
};

/// pelton, whose two sides connect by `M`.
pub struct Pelton<M>(PhantomData<M>);

/// How the two endpoints of a channel connect. Each waits for the other, at most until the options' deadline.
pub trait Rendezvous {
    /// The sending endpoint. `first`: creates what the other side opens.
    fn sender(options: &Options, place: &Path, first: bool) -> Result<Sender>;

    fn receiver(options: &Options, place: &Path, first: bool) -> Result<Receiver>;
}

/// By the name of a Unix socket.
pub struct BySocket;

impl Rendezvous for BySocket {
    fn sender(options: &Options, place: &Path, first: bool) -> Result<Sender> {
        let name = format!("unix:{}", place.display());
        if !first {
            return options.cast().connect_sender(&name).context("connecting");
        }
        let listener = options.cast().listen(&name).context("listening")?;
        let sender = listener.accept_sender_until(Instant::now() + CONNECT).context("accepting")?;
        sender.context("nobody connected")
    }

    fn receiver(options: &Options, place: &Path, first: bool) -> Result<Receiver> {
        let name = format!("unix:{}", place.display());
        if !first {
            return options.cast().connect_receiver(&name).context("connecting");
        }
        let listener = options.cast().listen(&name).context("listening")?;
        let receiver = listener.accept_receiver_until(Instant::now() + CONNECT).context("accepting")?;
        receiver.context("nobody connected")
    }
}

/// In a directory that keeps the channel.
pub struct ByDirectory;

impl Rendezvous for ByDirectory {
    fn sender(options: &Options, place: &Path, first: bool) -> Result<Sender> {
        if first { options.cast().create_sender(place) } else { options.cast().open_sender(place) }
            .context("opening a sender")
    }

    fn receiver(options: &Options, place: &Path, first: bool) -> Result<Receiver> {
        if first { options.cast().create_receiver(place) } else { options.cast().open_receiver(place) }
            .context("opening a receiver")
    }
}

impl<M: Rendezvous> Transport for Pelton<M> {
    type Sending = PeltonSending;
    type Receiving = PeltonReceiving;

    fn sending(job: &Job, direction: &str) -> Result<PeltonSending> {
        PeltonSending::new(M::sender(&options(job), &job.directory.join(direction), job.role.listens())?, job)
    }

    fn receiving(job: &Job, direction: &str) -> Result<PeltonReceiving> {
        PeltonReceiving::new(M::receiver(&options(job), &job.directory.join(direction), job.role.listens())?, job)
    }
}

impl Pelton<BySocket> {
    /// The receiver of one sender.
    pub fn one_sender(job: &Job) -> Result<PeltonReceiving> {
        <Self as Transport>::receiving(job, THERE)
    }

    /// The receiver of many senders, which connect while it receives.
    pub fn gathering(job: &Job) -> Result<PeltonReceiving> {
        let name = format!("unix:{}", job.directory.join("there").display());
        PeltonReceiving::new(lasting(job).gather_at(&name).context("listening")?, job)
    }
}

/// Options with which opening waits for the other side, up to a deadline.
pub fn options<M>(job: &Job) -> Options<M> {
    let options: Options = lasting(job);
    options.connect_deadline(Instant::now() + CONNECT).cast()
}

/// Options with which opening does not wait for the other side.
pub fn lasting<M>(job: &Job) -> Options<M> {
    <Options>::new().capacity(job.capacity).wait(wait(job)).cast()
}

/// How the library waits.
pub fn wait(job: &Job) -> pelton::Wait {
    // With epoll the benchmark calls only try_*, and the value has no effect.
    if job.wait == Wait::Spin { pelton::Wait::Spin } else { pelton::Wait::Block }
}

pub struct PeltonSending {
    sender: pelton::Sender,
    watch: Option<Watch>,
}

impl PeltonSending {
    fn new(sender: pelton::Sender, job: &Job) -> Result<PeltonSending> {
        let watch = Watch::of(job.wait, &sender)?;
        Ok(PeltonSending { sender, watch })
    }
}

impl Sending for PeltonSending {
    #[inline(always)]
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        match self.watch {
            None => Ok(self.sender.send(payload)?),
            Some(_) => self.send_from_loop(payload),
        }
    }
}

impl PeltonSending {
    /// With an event loop of the caller's own. Not inlined, so that the path without one is as short as a user's.
    #[inline(never)]
    fn send_from_loop(&mut self, payload: &[u8]) -> Result<()> {
        let watch = self.watch.as_ref().context("there is no loop")?;
        loop {
            match self.sender.try_send(payload)? {
                Sent::Sent => return Ok(()),
                Sent::Full => {
                    if self.sender.arm(payload.len())?.is_waiting() {
                        watch.sleep()?;
                        self.sender.disarm();
                    }
                }
                Sent::TimedOut => bail!("try_send timed out, which it never should"),
            }
        }
    }
}

/// How messages are received.
enum Take {
    /// Copied into this buffer
    Copy(Vec<u8>),
    /// Read in place
    InPlace,
}

pub struct PeltonReceiving {
    receiver: pelton::Receiver,
    watch: Option<Watch>,
    take: Take,
    directory: PathBuf,
}

impl PeltonReceiving {
    pub fn new(receiver: pelton::Receiver, job: &Job) -> Result<PeltonReceiving> {
        let watch = Watch::of(job.wait, &receiver)?;
        let take = if job.in_place() { Take::InPlace } else { Take::Copy(Vec::with_capacity(job.sizes.max as usize)) };
        Ok(PeltonReceiving { receiver, watch, take, directory: job.directory.clone() })
    }
}

impl Receiving for PeltonReceiving {
    #[inline(always)]
    fn receive<R>(&mut self, inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        if self.watch.is_some() {
            return self.receive_from_loop(inspect);
        }
        match &mut self.take {
            Take::Copy(buffer) => {
                self.receiver.receive_into(buffer)?;
                Ok(inspect(buffer))
            }
            Take::InPlace => Ok(inspect(&self.receiver.receive()?)),
        }
    }

    fn resident_bytes(&self) -> Result<Option<u64>> {
        measure::resident_bytes(&self.directory).map(Some)
    }
}

impl PeltonReceiving {
    /// As [`PeltonSending::send_from_loop`].
    #[inline(never)]
    fn receive_from_loop<R>(&mut self, inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let watch = self.watch.as_ref().context("there is no loop")?;
        loop {
            match &mut self.take {
                Take::Copy(buffer) => {
                    if self.receiver.try_receive_into(buffer)?.is_some() {
                        return Ok(inspect(buffer));
                    }
                }
                Take::InPlace => {
                    if let Some(message) = self.receiver.try_receive()? {
                        return Ok(inspect(&message));
                    }
                }
            }
            if self.receiver.arm()?.is_waiting() {
                watch.sleep()?;
                self.receiver.disarm();
            }
        }
    }
}
