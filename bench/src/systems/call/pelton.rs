//! pelton's calls. The service reads a request in place and writes the reply in place if it fits now; else it copies
//! both.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use pelton::{Client, Completion, Outcome, Request, Service};

use crate::{
    endpoints::CONNECT,
    measure::{self, delay},
    parameters::Job,
    systems::{pelton::lasting, wire::Watch},
    workloads::call::{Asking, Serving, Tally},
};

fn name(job: &Job) -> String {
    format!("unix:{}", job.directory.join("service").display())
}

pub struct Pelton {
    client: Client,
    watch: Option<Watch>,
    reply: Vec<u8>,
}

impl Pelton {
    /// Connects; waits for the service to listen.
    pub fn new(job: &Job) -> Result<Pelton> {
        let options = lasting(job).connect_deadline(Instant::now() + CONNECT);
        let client = Client::connect_with(&name(job), &options).context("connecting")?;
        let watch = Watch::of(job.wait, &client)?;
        Ok(Pelton { client, watch, reply: Vec::with_capacity(job.sizes.max as usize) })
    }

    /// With an event loop of the caller's own. Not inlined, so that the path without one is as short as a user's.
    #[inline(never)]
    fn reply_from_loop(&mut self) -> Result<()> {
        let watch = self.watch.as_ref().context("there is no loop")?;
        loop {
            if let Some(completion) = self.client.try_completion()? {
                return copy(&completion, &mut self.reply);
            }
            if !self.client.busy_poll()? && self.client.arm()?.is_waiting() {
                watch.sleep()?;
                self.client.disarm();
            }
        }
    }
}

#[inline(always)]
fn copy(completion: &Completion<'_>, reply: &mut Vec<u8>) -> Result<()> {
    ensure!(completion.outcome() == Outcome::Reply, "a call ended with {:?}, wanted a reply", completion.outcome());
    completion.copy_into(reply);
    Ok(())
}

impl Asking for Pelton {
    #[inline(always)]
    fn call<R>(&mut self, request: &[u8], inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        if self.watch.is_some() {
            ensure!(self.try_ask(request)?, "there was no room for the only call");
            return self.reply(inspect);
        }
        copy(&self.client.call(request)?, &mut self.reply)?;
        Ok(inspect(&self.reply))
    }

    #[inline(always)]
    fn try_ask(&mut self, request: &[u8]) -> Result<bool> {
        if self.client.try_submit(request)?.is_some() {
            return Ok(true);
        }
        // All replies may have arrived since a lane was found full: then no reply would come to signal the free space.
        let must_wait = self.client.in_flight() == 0;
        if must_wait {
            self.client.submit(request)?;
        }
        Ok(must_wait)
    }

    #[inline(always)]
    fn reply<R>(&mut self, inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        match self.watch {
            None => copy(&self.client.completion()?, &mut self.reply)?,
            Some(_) => self.reply_from_loop()?,
        }
        Ok(inspect(&self.reply))
    }

    fn end_pass(&mut self) -> Result<()> {
        Ok(self.client.notify(&[])?)
    }
}

/// The service.
pub struct PeltonServing<'a> {
    service: Service,
    watch: Option<Watch>,
    job: &'a Job,
}

impl PeltonServing<'_> {
    /// Listens. Clients connect while it serves.
    pub fn new(job: &Job) -> Result<PeltonServing<'_>> {
        let service = Service::listen_with(&name(job), &lasting(job)).context("listening")?;
        let watch = Watch::of(job.wait, &service)?;
        Ok(PeltonServing { service, watch, job })
    }

    /// Waits in an event loop of the caller's own, until there may be a request.
    #[inline(never)]
    fn wait_in_loop(&mut self) -> Result<()> {
        let watch = self.watch.as_ref().context("there is no loop")?;
        if self.service.arm()?.is_waiting() {
            watch.sleep()?;
            self.service.disarm();
        }
        Ok(())
    }
}

impl Serving for PeltonServing<'_> {
    /// Each client signals when it has all its replies. Polling for requests also writes the replies that did not fit
    /// into a client's lane.
    fn serve(&mut self, _count: u64) -> Result<Tally> {
        let (mut tally, mut ended) = (Tally::new(self.job), 0);
        let delay_ns = self.job.delay_us * 1000;
        while ended < self.job.senders {
            let Some(request) = (match self.watch {
                None => Some(self.service.receive()?),
                Some(_) => self.service.try_receive()?,
            }) else {
                self.wait_in_loop()?;
                continue;
            };
            if request.is_notification() {
                ended += 1;
                continue;
            }
            tally.note(&request);
            delay(delay_ns);
            answer(request)?;
        }
        Ok(tally)
    }

    fn resident_bytes(&self) -> Result<Option<u64>> {
        measure::resident_bytes(&self.job.directory).map(Some)
    }
}

#[inline(always)]
fn answer(mut request: Request<'_>) -> Result<()> {
    let (bytes, responder) = request.split();
    // A reply above the lane's message limit never fits in place.
    if let Ok(Some(mut room)) = responder.try_reserve(bytes.len()) {
        room.copy_from_slice(bytes);
        return Ok(room.reply_bytes(bytes.len())?);
    }
    let (bytes, responder) = request.into_parts();
    Ok(responder.reply(&bytes)?)
}
