//! Redis's publish-subscribe over a Unix socket, by Debian's redis-server. The sender's process starts the server, and
//! ends it.
//!
//! The sender writes up to 64 KiB of commands at once and has at most 64 without a reply, as a client that pipelines
//! does. A reply says to how many subscribers the server has passed the message, not that they have it: the server
//! keeps for each subscriber what its socket does not take, and disconnects one for which it keeps too much. So that
//! nothing is lost, the sender asks each 16 MiB how much that is, and waits while it is more than 16 MiB for any; the
//! limit is 64 MiB instead of 32. It saves nothing to a disk. Its processor time is no part of the sender's.

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    compiled::output,
    endpoints::{CONNECT, Receiving, Sending, Transport},
    parameters::Job,
    sides::ends_with_this,
};

/// Commands without a reply, and bytes of commands that are written together.
const IN_FLIGHT: usize = 64;
const WRITTEN_BYTES: usize = 64 << 10;
/// Bytes that the server may send to one subscriber, or keep for it, before the sender asks again: a quarter of the
/// server's limit. In between it keeps at most twice as much, and its own overhead.
const PACE_BYTES: usize = 16 << 20;
/// Between two questions, and two attempts to connect.
const INTERVAL: Duration = Duration::from_millis(1);
/// What precedes the length of a message in what a subscriber receives.
const MESSAGE: &[u8] = b"*3\r\n$7\r\nmessage\r\n$1\r\nb\r\n$";

pub struct Redis;

/// The installed server's version.
pub fn version() -> Result<String> {
    let version = output(Command::new("redis-server").arg("--version"))
        .context("it needs redis-server (is it installed?): on Debian, install redis-server")?;
    let number = version.split_once("v=").and_then(|(_, rest)| rest.split(' ').next());
    Ok(format!("Redis {}", number.unwrap_or_default()))
}

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn serve(job: &Job) -> Result<Server> {
    let mut server = Command::new("redis-server");
    server.args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"]).arg(job.directory.join("redis"));
    server.args(["--client-output-buffer-limit", "pubsub", "64mb", "0", "0", "--dir"]).arg(&job.directory);
    ends_with_this(&mut server);
    Ok(Server(server.stdin(Stdio::null()).stdout(Stdio::null()).spawn().context("starting redis-server")?))
}

fn connect(job: &Job) -> Result<UnixStream> {
    let until = Instant::now() + CONNECT;
    loop {
        match UnixStream::connect(job.directory.join("redis")) {
            Err(_) if Instant::now() < until => sleep(INTERVAL),
            done => return done.context("connecting to redis-server"),
        }
    }
}

/// The next line, without its end.
fn line(from: &mut impl BufRead, into: &mut Vec<u8>) -> Result<()> {
    into.clear();
    from.read_until(b'\n', into).context("reading from redis-server")?;
    ensure!(into.ends_with(b"\r\n"), "redis-server has closed the connection");
    into.truncate(into.len() - 2);
    Ok(())
}

impl Transport for Redis {
    type Sending = Publishing;
    type Receiving = Subscribing;

    fn sending(job: &Job, _: &str) -> Result<Publishing> {
        let server = serve(job)?;
        let stream = connect(job)?;
        let replies = BufReader::new(stream.try_clone()?);
        let reply = format!(":{}", job.receivers).into_bytes();
        let mut publishing = Publishing {
            stream,
            replies,
            reply,
            commands: Vec::new(),
            unanswered: 0,
            unpaced: 0,
            line: Vec::new(),
            _server: server,
        };
        let until = Instant::now() + CONNECT;
        while publishing.subscribers()? != publishing.reply {
            ensure!(Instant::now() < until, "not all of {} subscribers came", job.receivers);
            sleep(INTERVAL);
        }
        Ok(publishing)
    }

    fn receiving(job: &Job, _: &str) -> Result<Subscribing> {
        let mut stream = connect(job)?;
        stream.write_all(b"SUBSCRIBE b\r\n").context("subscribing")?;
        let mut from = BufReader::with_capacity(WRITTEN_BYTES, stream);
        let mut text = Vec::new();
        for _ in ["*3", "$9", "subscribe", "$1", "b", ":1"] {
            line(&mut from, &mut text)?;
        }
        ensure!(text == b":1", "redis-server did not subscribe this side");
        Ok(Subscribing { from, line: text, message: vec![0; job.sizes.max as usize + 2] })
    }
}

pub struct Publishing {
    stream: UnixStream,
    replies: BufReader<UnixStream>,
    /// What follows each command.
    reply: Vec<u8>,
    commands: Vec<u8>,
    unanswered: usize,
    /// Bytes for each subscriber since the last question.
    unpaced: usize,
    line: Vec<u8>,
    /// Dropped last: it ends the server.
    _server: Server,
}

impl Publishing {
    /// How many there are, as a reply has it.
    fn subscribers(&mut self) -> Result<Vec<u8>> {
        self.stream.write_all(b"PUBSUB NUMSUB b\r\n").context("asking for the subscribers")?;
        for _ in ["*2", "$1", "b", ":N"] {
            line(&mut self.replies, &mut self.line)?;
        }
        Ok(self.line.clone())
    }

    /// Writes the commands, and waits until at most `most` have no reply.
    fn exchange(&mut self, most: usize) -> Result<()> {
        self.stream.write_all(&self.commands).context("writing to redis-server")?;
        self.commands.clear();
        while self.unanswered > most {
            line(&mut self.replies, &mut self.line)?;
            let found = String::from_utf8_lossy(&self.line);
            ensure!(self.line == self.reply, "redis-server replied {found}: it may have disconnected a subscriber");
            self.unanswered -= 1;
        }
        Ok(())
    }

    /// Waits while the server keeps too much for a subscriber.
    fn keep_pace(&mut self) -> Result<()> {
        self.exchange(0)?;
        self.unpaced = 0;
        let until = Instant::now() + CONNECT;
        loop {
            self.stream.write_all(b"CLIENT LIST TYPE pubsub\r\n").context("asking for the subscribers' backlogs")?;
            line(&mut self.replies, &mut self.line)?;
            let len = std::str::from_utf8(&self.line)?.trim_start_matches('$').parse::<usize>();
            let mut clients = vec![0; len.context("the length of the list of clients")? + 2];
            self.replies.read_exact(&mut clients).context("redis-server has closed the connection")?;
            if kept_most(std::str::from_utf8(&clients)?) <= PACE_BYTES {
                return Ok(());
            }
            ensure!(Instant::now() < until, "a subscriber has received too little for {CONNECT:?}");
            sleep(INTERVAL);
        }
    }
}

/// The largest backlog in a list of clients, whose lines have the field `omem=BYTES`.
fn kept_most(clients: &str) -> usize {
    clients.split(' ').filter_map(|field| field.strip_prefix("omem=")?.parse().ok()).max().unwrap_or(0)
}

impl Sending for Publishing {
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        write!(self.commands, "*3\r\n$7\r\nPUBLISH\r\n$1\r\nb\r\n${}\r\n", payload.len())?;
        self.commands.extend_from_slice(payload);
        self.commands.extend_from_slice(b"\r\n");
        self.unanswered += 1;
        self.unpaced += MESSAGE.len() + payload.len();
        if self.unpaced >= PACE_BYTES {
            return self.keep_pace();
        }
        match self.commands.len() >= WRITTEN_BYTES || self.unanswered == 2 * IN_FLIGHT {
            true => self.exchange(IN_FLIGHT),
            false => Ok(()),
        }
    }

    fn flush(&mut self) -> Result<()> {
        self.exchange(0)
    }
}

pub struct Subscribing {
    from: BufReader<UnixStream>,
    line: Vec<u8>,
    message: Vec<u8>,
}

impl Receiving for Subscribing {
    fn receive<R>(&mut self, inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let mut start = [0; MESSAGE.len()];
        self.from.read_exact(&mut start).context("redis-server has closed the connection")?;
        ensure!(start == MESSAGE, "redis-server sent no message");
        line(&mut self.from, &mut self.line)?;
        let len = std::str::from_utf8(&self.line)?.parse::<usize>().context("a message's length")?;
        let Some(message) = self.message.get_mut(..len + 2) else { bail!("a message has {len} bytes") };
        self.from.read_exact(message).context("redis-server has closed the connection")?;
        Ok(inspect(&message[..len]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_backlog_counts() {
        let clients = "id=7 obl=0 oll=3 omem=49224 tot-mem=71720 events=r\nid=8 oll=0 omem=70000 tot-mem=1\n\r\n";
        assert_eq!(kept_most(clients), 70000);
        assert_eq!(kept_most("\r\n"), 0);
    }
}
