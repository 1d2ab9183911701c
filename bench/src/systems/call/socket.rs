//! Calls over a Unix stream socket, as a competent program would make them: length and payload, and one connection for
//! each client, with as many calls in flight as the client likes.
//!
//! With one call at a time the two sides do the same as in a round trip. Else a client reads all bytes there are, up
//! to 64 KiB, and never waits for free space while replies may arrive. A service does the same for each connection
//! that epoll reports, and with one connection without epoll. Unbatched, each request and each reply is one call to
//! send; batched, all gathered ones are.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result, bail};
use rustix::{
    buffer::spare_capacity,
    event::{PollFd, PollFlags, Timespec, epoll, poll},
    io::{Errno, IoSlice},
    net::{RecvFlags, SendAncillaryBuffer, SendFlags, SocketType, recv, send, sendmsg},
};

use crate::{
    endpoints::{Receiving, Sending, Transport},
    measure::delay,
    parameters::{Job, Role, Wait},
    systems::{
        framed::{BATCH_BYTES, FramedReceiving, FramedSending, Frames, PREFIX_BYTES},
        socket::{SockStream, accepted, connected},
        wire::Watch,
    },
    workloads::call::{Asking, Serving, Tally, ask, is_simple, serve},
};

/// One side's part.
pub fn by_socket(job: &Job) -> Result<()> {
    match job.role {
        Role::Service if is_simple(job) => serve(job, SockServing::new(job)?),
        Role::Service => serve(job, SockStreamService::new(job)?),
        _ => ask(job, Sock::new(job)?),
    }
}

/// Connections that one call of epoll reports.
const EVENTS: usize = 64;

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

pub enum Sock {
    /// One call at a time.
    Simple(FramedSending, FramedReceiving),
    /// Many.
    Pipelined(Pipeline),
}

/// A client's connection with many calls in flight, and how it waits.
pub struct Pipeline {
    connection: Connection,
    wait: Wait,
    /// Of the caller's own event loop
    watch: Option<Watch>,
}

impl Sock {
    /// Connects; waits for the service to listen.
    pub fn new(job: &Job) -> Result<Sock> {
        if is_simple(job) {
            let (sending, receiving) = SockStream::both(job)?;
            return Ok(Sock::Simple(sending, receiving));
        }
        let socket = connected(job, SocketType::STREAM)?;
        let watch = match job.wait {
            Wait::Epoll => Some(Watch::new(&socket, epoll::EventFlags::IN)?),
            _ => None,
        };
        Ok(Sock::Pipelined(Pipeline { connection: Connection::new(socket, job, false), wait: job.wait, watch }))
    }
}

impl Pipeline {
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

    /// Sends the held bytes, and waits for more to arrive.
    fn read_on(&mut self) -> Result<()> {
        let Pipeline { connection, wait, watch } = self;
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

impl Asking for Sock {
    #[inline]
    fn call<R>(&mut self, request: &[u8], inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        match self {
            Sock::Simple(sending, receiving) => {
                sending.send(request)?;
                sending.flush()?;
                receiving.receive(inspect)
            }
            Sock::Pipelined(pipeline) => {
                while !pipeline.connection.outgoing.put(request)? {
                    pipeline.read_on()?;
                }
                pipeline.reply(inspect)
            }
        }
    }

    #[inline]
    fn try_ask(&mut self, request: &[u8]) -> Result<bool> {
        match self {
            Sock::Simple(..) => bail!("there is one call at a time"),
            Sock::Pipelined(pipeline) => pipeline.connection.outgoing.put(request),
        }
    }

    #[inline]
    fn reply<R>(&mut self, inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        match self {
            Sock::Simple(..) => bail!("there is one call at a time"),
            Sock::Pipelined(pipeline) => pipeline.reply(inspect),
        }
    }
}

/// The service of a client that makes one call at a time.
pub struct SockServing<'a> {
    sending: FramedSending,
    receiving: FramedReceiving,
    job: &'a Job,
}

impl SockServing<'_> {
    /// Listens, and waits for the client.
    pub fn new(job: &Job) -> Result<SockServing<'_>> {
        let (sending, receiving) = SockStream::both(job)?;
        Ok(SockServing { sending, receiving, job })
    }
}

impl Serving for SockServing<'_> {
    fn serve(&mut self, count: u64) -> Result<Tally> {
        let SockServing { sending, receiving, job } = self;
        let mut tally = Tally::new(job);
        let delay_ns = job.delay_us * 1000;
        for _ in 0..count {
            receiving.receive(|request| {
                tally.note(request);
                delay(delay_ns);
                sending.send(request)?;
                sending.flush()
            })??;
        }
        Ok(tally)
    }
}

/// The service of many clients, or of clients that make many calls at a time.
pub struct SockStreamService<'a> {
    connections: Vec<Connection>,
    /// Of several connections, or of the caller's own loop: the epoll for reading, and the one for free space.
    epoll: Option<OwnedFd>,
    job: &'a Job,
}

impl SockStreamService<'_> {
    /// Listens, and waits for all clients.
    pub fn new(job: &Job) -> Result<SockStreamService<'_>> {
        let sockets = accepted(job, SocketType::STREAM)?;
        let alone = sockets.len() == 1 && job.wait != Wait::Epoll;
        // A client receives replies whatever it has to send, so a wait for free space is a wait for the client.
        let blocks = alone && job.wait == Wait::Block;
        let connections: Vec<_> = sockets.into_iter().map(|socket| Connection::new(socket, job, blocks)).collect();
        let epoll = match alone {
            true => None,
            false => {
                let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).context("making an epoll instance")?;
                for (index, connection) in connections.iter().enumerate() {
                    let data = epoll::EventData::new_u64(index as u64);
                    epoll::add(&epoll, &connection.outgoing.socket, data, epoll::EventFlags::IN)
                        .context("adding to the epoll instance")?;
                }
                Some(epoll)
            }
        };
        Ok(SockStreamService { connections, epoll, job })
    }

    /// Serves a connection once: sends the replies that did not fit before, or reads once, and replies to all complete
    /// requests.
    fn serve_once(&mut self, index: usize, tally: &mut Tally) -> Result<()> {
        let SockStreamService { connections, epoll, job } = self;
        let connection = &mut connections[index];
        let was_stuck = connection.is_stuck;
        if !was_stuck {
            let waits = epoll.is_none() && job.wait == Wait::Block;
            if !connection.read(if waits { RecvFlags::empty() } else { RecvFlags::DONTWAIT })? {
                return Ok(());
            }
        }
        connection.is_stuck = !reply_to_all(connection, job.delay_us * 1000, tally)?;
        let is_stuck = connection.is_stuck;
        if let Some(epoll) = epoll.as_ref().filter(|_| was_stuck != is_stuck) {
            let flags = if is_stuck { epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
            epoll::modify(epoll, &connection.outgoing.socket, epoll::EventData::new_u64(index as u64), flags)
                .context("changing what is waited for")?;
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

impl Serving for SockStreamService<'_> {
    fn serve(&mut self, count: u64) -> Result<Tally> {
        let mut tally = Tally::new(self.job);
        let mut events = Vec::with_capacity(EVENTS);
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let measured = self.job.senders as usize;
        // A flooding client always has more requests. The measured clients connect after it, so they are the last
        // ones.
        let first = self.connections.len() - measured;
        while tally.count < count || self.connections[first..].iter().any(|one| one.is_stuck) {
            let Some(epoll) = &self.epoll else {
                self.serve_once(0, &mut tally)?;
                continue;
            };
            events.clear();
            let timeout = (self.job.wait == Wait::Spin).then_some(&at_once);
            match epoll::wait(epoll.as_fd(), spare_capacity(&mut events), timeout) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error).context("waiting in epoll"),
            }
            for event in &events {
                self.serve_once(event.data.u64() as usize, &mut tally)?;
            }
        }
        Ok(tally)
    }
}
