//! Calls over a Unix stream socket, as a competent program would make them: length and payload, and one connection for
//! each client, with as many calls in flight as the client likes.
//!
//! A client reads all bytes there are, up to 64 KiB, and with several calls in flight never waits for free space while
//! replies may arrive. A service does the same for each connection that epoll reports, and with one connection without
//! epoll. Unbatched, each request and each reply is one call to send; batched, all gathered ones are.

use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use rustix::{
    event::{PollFd, PollFlags, epoll::EventFlags, poll},
    io::{Errno, IoSlice},
    net::{RecvFlags, SendAncillaryBuffer, SendFlags, SocketType, recv, send, sendmsg},
};

use crate::{
    measure::delay,
    parameters::{Job, Wait},
    systems::{
        framed::{BATCH_BYTES, Frames, PREFIX_BYTES},
        many::EVENTS,
        socket::{accepted, connected},
        wire::Watch,
    },
    workloads::call::{Asking, Serving, Tally, part},
};

/// One side's part.
pub fn by_socket(job: &Job) -> Result<()> {
    part(job, SockClient::new, SockService::new)
}

/// A connection with messages in flight in both directions.
struct Connection {
    incoming: Frames,
    outgoing: Outgoing,
    /// A reply did not fit: requests wait until it does
    is_stuck: bool,
}

/// The bytes to send.
struct Outgoing {
    socket: OwnedFd,
    /// Gathered, or the rest of a message that was sent in part
    held: Vec<u8>,
    sent: usize,
    batched: bool,
    flags: SendFlags,
}

impl Connection {
    /// `blocks`: sending waits for free space.
    fn new(socket: OwnedFd, job: &Job, blocks: bool) -> Connection {
        let batched = job.system == "sock-stream-batched";
        let flags = SendFlags::NOSIGNAL | if blocks { SendFlags::empty() } else { SendFlags::DONTWAIT };
        Connection {
            incoming: Frames::new(job.sizes.max as usize, BATCH_BYTES),
            outgoing: Outgoing { socket, held: Vec::with_capacity(2 * BATCH_BYTES), sent: 0, batched, flags },
            is_stuck: false,
        }
    }

    /// Reads the bytes there are; false if there are none, and the read must not wait.
    fn read(&mut self, flags: RecvFlags) -> Result<bool> {
        let free_space = self.incoming.free_space();
        loop {
            match recv(&self.outgoing.socket, &mut *free_space, flags) {
                Ok((_, done)) => return self.incoming.received(done).map(|()| true),
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error).context("receiving"),
            }
        }
    }
}

impl Outgoing {
    fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Takes a message, whole; false if it does not fit.
    #[inline]
    fn put(&mut self, payload: &[u8]) -> Result<bool> {
        let prefix = (payload.len() as u32).to_le_bytes();
        let mut done = 0;
        if self.batched {
            if self.held.len() >= BATCH_BYTES && !self.flush()? {
                return Ok(false);
            }
        } else {
            if !self.is_empty() && !self.flush()? {
                return Ok(false);
            }
            let parts = [IoSlice::new(&prefix), IoSlice::new(payload)];
            done = match again(|| sendmsg(&self.socket, &parts, &mut SendAncillaryBuffer::default(), self.flags))? {
                Some(done) => done,
                None => return Ok(false),
            };
        }
        if done < PREFIX_BYTES {
            self.held.extend_from_slice(&prefix[done..]);
            done = PREFIX_BYTES;
        }
        self.held.extend_from_slice(&payload[done - PREFIX_BYTES..]);
        Ok(true)
    }

    /// Sends the held bytes; false if not all of them fit.
    fn flush(&mut self) -> Result<bool> {
        while self.sent < self.held.len() {
            match again(|| send(&self.socket, &self.held[self.sent..], self.flags))? {
                Some(done) => self.sent += done,
                None => return Ok(false),
            }
        }
        self.held.clear();
        self.sent = 0;
        Ok(true)
    }
}

/// Repeats an interrupted call; `None` if it would have to wait.
fn again(mut call: impl FnMut() -> rustix::io::Result<usize>) -> Result<Option<usize>> {
    loop {
        match call() {
            Ok(done) => return Ok(Some(done)),
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("sending"),
        }
    }
}

/// A client's connection, and how it waits.
struct SockClient {
    connection: Connection,
    wait: Wait,
    /// Of the caller's own event loop
    watch: Option<Watch>,
}

impl SockClient {
    /// Connects; waits for the service to listen.
    fn new(job: &Job) -> Result<SockClient> {
        let socket = connected(job, SocketType::STREAM)?;
        let watch = Watch::of(job.wait, &socket)?;
        // With one call at a time no reply can arrive while the client sends.
        let blocks = job.wait == Wait::Block && job.calls.one_by_one() && job.idle == 0;
        Ok(SockClient { connection: Connection::new(socket, job, blocks), wait: job.wait, watch })
    }

    /// Sends the held bytes, and waits for more to arrive.
    fn read_on(&mut self) -> Result<()> {
        let SockClient { connection, wait, watch } = self;
        let all_sent = connection.outgoing.flush()?;
        // The side waits only for a reply: the one call that reads can do that.
        if all_sent && *wait == Wait::Block {
            return connection.read(RecvFlags::empty()).map(drop);
        }
        if connection.read(RecvFlags::DONTWAIT)? {
            return Ok(());
        }
        match (wait, watch) {
            (Wait::Spin, _) => std::hint::spin_loop(),
            (_, Some(watch)) if all_sent => watch.sleep()?,
            _ => {
                let mut fds = [PollFd::new(&connection.outgoing.socket, PollFlags::IN | PollFlags::OUT)];
                match poll(&mut fds, None) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(error) => return Err(error).context("waiting for the service"),
                }
            }
        }
        Ok(())
    }
}

impl Asking for SockClient {
    #[inline]
    fn call<R>(&mut self, request: &[u8], inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        while !self.try_ask(request)? {
            self.read_on()?;
        }
        self.reply(inspect)
    }

    #[inline]
    fn try_ask(&mut self, request: &[u8]) -> Result<bool> {
        self.connection.outgoing.put(request)
    }

    #[inline]
    fn reply<R>(&mut self, inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        loop {
            let incoming = &mut self.connection.incoming;
            if let Some(len) = incoming.whole()? {
                let looked = inspect(incoming.message(len));
                incoming.take(len);
                return Ok(looked);
            }
            self.read_on()?;
        }
    }
}

/// The service of all clients.
struct SockService<'a> {
    connections: Vec<Connection>,
    /// Of several connections, or of the caller's own loop: for reading, or for free space
    watch: Option<Watch>,
    job: &'a Job,
}

impl SockService<'_> {
    /// Listens, and waits for all clients.
    fn new(job: &Job) -> Result<SockService<'_>> {
        let sockets = accepted(job, SocketType::STREAM)?;
        let alone = sockets.len() == 1 && job.wait != Wait::Epoll;
        // A client receives replies whatever it has to send, so a wait for free space is a wait for the client.
        let blocks = alone && job.wait == Wait::Block;
        let connections: Vec<_> = sockets.into_iter().map(|socket| Connection::new(socket, job, blocks)).collect();
        let all = connections.iter().map(|connection| &connection.outgoing.socket);
        let watch = (!alone).then(|| Watch::new(all, EventFlags::IN)).transpose()?;
        Ok(SockService { connections, watch, job })
    }

    /// Serves a connection once: sends the replies that did not fit before, or reads once, and replies to all complete
    /// requests.
    fn serve_once(&mut self, index: usize, tally: &mut Tally) -> Result<()> {
        let SockService { connections, watch, job } = self;
        let connection = &mut connections[index];
        let was_stuck = connection.is_stuck;
        if !was_stuck {
            let waits = watch.is_none() && job.wait == Wait::Block;
            if !connection.read(if waits { RecvFlags::empty() } else { RecvFlags::DONTWAIT })? {
                return Ok(());
            }
        }
        connection.is_stuck = !reply_to_all(connection, job.delay_us * 1000, tally)?;
        let is_stuck = connection.is_stuck;
        if let Some(watch) = watch.as_ref().filter(|_| was_stuck != is_stuck) {
            let flags = if is_stuck { EventFlags::OUT } else { EventFlags::IN };
            watch.change(index, &connection.outgoing.socket, flags)?;
        }
        Ok(())
    }
}

/// Replies to the complete requests, as far as the replies fit. Returns whether all replies were sent.
fn reply_to_all(connection: &mut Connection, delay_ns: u64, tally: &mut Tally) -> Result<bool> {
    let Connection { incoming, outgoing, .. } = connection;
    while let Some(len) = incoming.whole()? {
        let request = incoming.message(len);
        delay(delay_ns);
        if !outgoing.put(request)? {
            return Ok(false);
        }
        tally.note(request);
        incoming.take(len);
    }
    outgoing.flush()
}

impl Serving for SockService<'_> {
    fn serve(&mut self, count: u64) -> Result<Tally> {
        let mut tally = Tally::new(self.job);
        let mut events = Vec::with_capacity(EVENTS);
        let measured = self.job.senders as usize;
        // A flooding client always has more requests. The measured clients connect after it, so they are the last
        // ones.
        let first = self.connections.len() - measured;
        while tally.count < count || self.connections[first..].iter().any(|one| one.is_stuck) {
            let Some(watch) = &self.watch else {
                self.serve_once(0, &mut tally)?;
                continue;
            };
            events.clear();
            watch.poll(&mut events, self.job.wait == Wait::Spin)?;
            for event in &events {
                self.serve_once(event.data.u64() as usize, &mut tally)?;
            }
        }
        Ok(tally)
    }
}
