//! pelton: a channel for each direction, connected by the name of a Unix socket.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use pelton::{Listener, Options, Sent};
use rustix::event::epoll::EventFlags;

use super::{Receiving, Sending, System, wire::Watch};
use crate::{
    measure,
    parameters::{Job, Role, Wait, Workload},
};

/// How long the sides wait for each other to connect.
const CONNECT: Duration = Duration::from_secs(20);

/// pelton, connected by the name of a Unix socket.
pub struct Pelton;

impl System for Pelton {
    type Sending = PeltonSending;
    type Receiving = PeltonReceiving;

    fn sending(job: &Job) -> Result<PeltonSending> {
        let sender = options(job).connect_sender(&name(job, "there")).context("connecting")?;
        PeltonSending::new(sender, job)
    }

    fn receiving(job: &Job) -> Result<PeltonReceiving> {
        let listener = options(job).listen(&name(job, "there")).context("listening")?;
        PeltonReceiving::new(accept_receiver(&listener)?, job)
    }

    fn both(job: &Job) -> Result<(PeltonSending, PeltonReceiving)> {
        let (there, back) = (name(job, "there"), name(job, "back"));
        let (sender, receiver) = if job.role == Role::Asker {
            let sender = options(job).connect_sender(&there).context("connecting")?;
            (sender, options(job).connect_receiver(&back).context("connecting back")?)
        } else {
            let listener = options(job).listen(&there).context("listening")?;
            let listener_back = options(job).listen(&back).context("listening for the way back")?;
            let receiver = accept_receiver(&listener)?;
            let sender = listener_back.accept_sender_until(Instant::now() + CONNECT).context("accepting")?;
            (sender.context("nobody connected for the way back")?, receiver)
        };
        Ok((PeltonSending::new(sender, job)?, PeltonReceiving::new(receiver, job)?))
    }
}

fn name(job: &Job, direction: &str) -> String {
    format!("unix:{}", job.directory.join(direction).display())
}

fn options(job: &Job) -> Options {
    // With epoll only try_* is called, and the value means nothing.
    let wait = if job.wait == Wait::Spin { pelton::Wait::Spin } else { pelton::Wait::Block };
    Options::new().capacity(job.capacity).wait(wait).connect_deadline(Instant::now() + CONNECT)
}

fn accept_receiver(listener: &Listener) -> Result<pelton::Receiver> {
    let receiver = listener.accept_receiver_until(Instant::now() + CONNECT).context("accepting")?;
    receiver.context("nobody connected")
}

/// The end that sends.
pub struct PeltonSending {
    sender: pelton::Sender,
    watch: Option<Watch>,
}

impl PeltonSending {
    fn new(sender: pelton::Sender, job: &Job) -> Result<PeltonSending> {
        let watch = if job.wait == Wait::Epoll { Some(Watch::new(&sender, EventFlags::IN)?) } else { None };
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
    /// With an event loop of the caller's own. Apart, so that the way without is as short as a user's.
    #[inline(never)]
    fn send_from_loop(&mut self, payload: &[u8]) -> Result<()> {
        let watch = self.watch.as_ref().context("there is no loop")?;
        loop {
            match self.sender.try_send(payload)? {
                Sent::Sent => return Ok(()),
                Sent::Full => {
                    if self.sender.arm(payload.len())? {
                        watch.sleep()?;
                        self.sender.disarm();
                    }
                }
                Sent::TimedOut => bail!("try_send timed out, which it never should"),
            }
        }
    }
}

/// How messages are taken.
enum Take {
    /// Copied into this buffer
    Copy(Vec<u8>),
    /// Looked at where they are
    InPlace,
}

/// The end that receives.
pub struct PeltonReceiving {
    receiver: pelton::Receiver,
    watch: Option<Watch>,
    take: Take,
}

impl PeltonReceiving {
    fn new(receiver: pelton::Receiver, job: &Job) -> Result<PeltonReceiving> {
        let watch = if job.wait == Wait::Epoll { Some(Watch::new(&receiver, EventFlags::IN)?) } else { None };
        let in_place = job.workload == Workload::Stream && !job.sizes.is_fixed();
        let take = if in_place { Take::InPlace } else { Take::Copy(Vec::with_capacity(job.sizes.max as usize)) };
        Ok(PeltonReceiving { receiver, watch, take })
    }
}

impl Receiving for PeltonReceiving {
    #[inline(always)]
    fn receive<R>(&mut self, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        if self.watch.is_some() {
            return self.receive_from_loop(look);
        }
        match &mut self.take {
            Take::Copy(buffer) => {
                self.receiver.receive_into(buffer)?;
                Ok(look(buffer))
            }
            Take::InPlace => Ok(look(&self.receiver.receive()?)),
        }
    }

    fn resident_bytes(&self) -> Result<Option<u64>> {
        measure::resident_bytes().map(Some)
    }
}

impl PeltonReceiving {
    /// As [`PeltonSending::send_from_loop`].
    #[inline(never)]
    fn receive_from_loop<R>(&mut self, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let watch = self.watch.as_ref().context("there is no loop")?;
        loop {
            match &mut self.take {
                Take::Copy(buffer) => {
                    if self.receiver.try_receive_into(buffer)?.is_some() {
                        return Ok(look(buffer));
                    }
                }
                Take::InPlace => {
                    if let Some(message) = self.receiver.try_receive()? {
                        return Ok(look(&message));
                    }
                }
            }
            if self.receiver.arm()? {
                watch.sleep()?;
                self.receiver.disarm();
            }
        }
    }
}
