//! The conformance driver of Rust: one side of an exchange, by the public crate. conformance/README.md has the command
//! line, the messages and the report.

use super::messages::{Messages, Tally};
use pelton::{Appenders, Client, Error, Listener, Options, Outcome, Receiver, RecordFile, RecordReader, Sender};
use pelton::{Sent, Service, Traceparent};
use rustix::process::{Signal, getpid, kill_process};
use std::{io::Write as _, process::ExitCode, time::Instant};

#[derive(clap::Args)]
pub struct DriverArgs {
    /// COMMAND NAME COUNT SIZES [THEN]
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Why a driver ends without a report, by exit code.
enum Ended {
    /// 1.
    Failed(String),
    /// 2.
    Usage(String),
    /// 3.
    Unsupported(&'static str),
}

impl From<Error> for Ended {
    fn from(error: Error) -> Ended {
        Ended::Failed(error.to_string())
    }
}

fn failed<T>(text: impl Into<String>) -> Result<T, Ended> {
    Err(Ended::Failed(text.into()))
}

/// The value of a wait, unless its deadline passed.
fn in_time<T>(found: Option<T>) -> Result<T, Ended> {
    found.map_or_else(|| failed("the deadline passed"), Ok)
}

pub fn run(args: &DriverArgs) -> ExitCode {
    let arguments: Vec<&str> = args.arguments.iter().map(String::as_str).collect();
    let command = arguments.first().copied().unwrap_or("");
    match dispatch(command, arguments.get(1..).unwrap_or(&[])) {
        Ok(tally) => {
            println!("ok {command} {tally}");
            ExitCode::SUCCESS
        }
        Err(Ended::Failed(text)) => {
            eprintln!("driver {command}: {text}");
            ExitCode::from(1)
        }
        Err(Ended::Usage(text)) => {
            eprintln!("{text}: driver COMMAND NAME COUNT SIZES [THEN]");
            ExitCode::from(2)
        }
        Err(Ended::Unsupported(reason)) => {
            println!("unsupported {command}: {reason}");
            ExitCode::from(3)
        }
    }
}

fn dispatch(command: &str, arguments: &[&str]) -> Result<String, Ended> {
    let thens: &[&str] = match command {
        "send" => &["close", "die", "resume", "traced"],
        "recv" => &["close", "died", "die", "rest", "traced"],
        "call" | "serve" | "stream" | "serve-stream" | "gather" | "write-records" | "read-records" => &["close"],
        "vectors" => return Err(Ended::Unsupported("`cargo test` replays the vectors")),
        _ => return Err(Ended::Unsupported("this driver does not know the command")),
    };
    if command == "read-records" {
        let [file] = arguments else { return Err(Ended::Usage("wanted one FILE".to_owned())) };
        return read_records(file);
    }
    let (name, count, sizes, then) = match *arguments {
        [name, count, sizes] => (name, count, sizes, "close"),
        [name, count, sizes, then] if thens.contains(&then) => (name, count, sizes, then),
        _ => return Err(Ended::Usage(format!("found {} arguments for {command}", arguments.len()))),
    };
    let messages = &Messages::parse(count, sizes).map_err(Ended::Usage)?;
    let deadline = Instant::now() + super::wait_limit();
    let tally = match command {
        "send" => send(name, messages, then, deadline),
        "recv" => receive(name, messages, then, deadline),
        "call" => call(name, messages, deadline),
        "serve" => serve(name, messages, deadline),
        "stream" => stream(name, messages, deadline),
        "serve-stream" => serve_stream(name, messages, deadline),
        "gather" => gather(name, messages, deadline),
        _ => write_records(name, messages),
    };
    tally.map(|tally| tally.to_string())
}

/// Reports, then kills this process.
fn die(command: &str, tally: Tally) -> Result<Tally, Ended> {
    println!("ok {command} {tally}");
    let _ = std::io::stdout().flush();
    let _ = kill_process(getpid(), Signal::KILL);
    failed("SIGKILL did not end this process")
}

/// Counts a message that must be this one.
fn check(tally: &mut Tally, messages: &Messages, i: u64, found: &[u8]) -> Result<(), Ended> {
    if found != messages.get(i) {
        let wanted = messages.get(i).len();
        return failed(format!("message {i}: found {} bytes, wanted {wanted} by the contract's rule", found.len()));
    }
    tally.add(found);
    Ok(())
}

/// That of message `i`, with the `THEN` `traced`.
fn traceparent_of(i: u64) -> Option<Traceparent> {
    let traceparent = Traceparent::new(u128::from(i + 1).to_be_bytes(), (i + 1).to_be_bytes(), i as u8);
    traceparent.filter(|_| !i.is_multiple_of(3))
}

fn send(name: &str, messages: &Messages, then: &str, deadline: Instant) -> Result<Tally, Ended> {
    let mut sender = match name.strip_prefix("path:") {
        Some(directory) => Options::new().traced(then == "traced").create_sender(directory)?,
        None => Options::new().traced(then == "traced").connect_deadline(deadline).connect_sender(name)?,
    };
    // Whether the sender has done it; false after it resumed with the receiver's successor, and tries again.
    let done = |sender: &mut Sender, result| match result {
        Err(Error::PeerDied { .. }) if then == "resume" => {
            in_time(sender.resume_until(deadline)?.then_some(())).map(|()| false)
        }
        result => in_time(Some(result?).filter(|done| *done)),
    };
    let mut tally = Tally::default();
    for (message, i) in messages.iter().zip(0..) {
        tally.add(&message);
        loop {
            let sent = match traceparent_of(i).filter(|_| then == "traced") {
                Some(traceparent) => sender.send_traced(&message, traceparent, deadline),
                None => sender.send_until(&message, deadline),
            };
            let sent = sent.map(|sent| sent == Sent::Sent);
            if done(&mut sender, sent)? {
                break;
            }
        }
    }
    if then == "die" {
        return die("send", tally);
    }
    loop {
        let released = sender.wait_released_until(deadline);
        if done(&mut sender, released)? {
            break;
        }
    }
    sender.close()?;
    Ok(tally)
}

fn receive(name: &str, messages: &Messages, then: &str, deadline: Instant) -> Result<Tally, Ended> {
    let mut receiver: Receiver = match name.strip_prefix("path:") {
        Some(directory) => Options::new().traced(then == "traced").create_receiver(directory)?,
        None => in_time(Listener::bind(name)?.accept_receiver_until(deadline)?)?,
    };
    let mut tally = Tally::default();
    if then == "rest" {
        let mut rest = Vec::new();
        loop {
            match receiver.receive_until(deadline) {
                Ok(message) => rest.push(in_time(message)?.to_vec()),
                Err(Error::Closed { .. }) => break,
                Err(error) => return Err(error.into()),
            }
        }
        let count = rest.len() as u64;
        if count == 0 || count > messages.count {
            return failed(format!("found {count} messages, wanted 1 to {}", messages.count));
        }
        for (message, i) in rest.iter().zip(messages.count - count..) {
            check(&mut tally, messages, i, message)?;
        }
        return Ok(tally);
    }
    for i in 0..messages.count {
        // In place, and released at the end of the block.
        let message = in_time(receiver.receive_until(deadline)?)?;
        check(&mut tally, messages, i, &message)?;
        let (found, wanted) = (message.traceparent(), traceparent_of(i).filter(|_| then == "traced"));
        if found != wanted {
            return failed(format!("message {i}: found the traceparent {found:?}, wanted {wanted:?}"));
        }
    }
    if then == "die" {
        return die("recv", tally);
    }
    match (then, receiver.receive_until(deadline)) {
        ("close" | "traced", Err(Error::Closed { .. })) | ("died", Err(Error::PeerDied { .. })) => Ok(tally),
        (_, Ok(message)) => failed(format!("found a message of {} bytes, wanted none", in_time(message)?.len())),
        (wanted, Err(error)) => failed(format!("wanted the sender's `{wanted}`: {error}")),
    }
}

fn call(name: &str, messages: &Messages, deadline: Instant) -> Result<Tally, Ended> {
    let mut client = Client::connect_with(name, &Options::new().connect_deadline(deadline))?;
    let mut tally = Tally::default();
    for (i, request) in messages.iter().enumerate() {
        let reply = in_time(client.call_until(&request, deadline)?)?.ok()?;
        check(&mut tally, messages, i as u64, &reply)?;
    }
    Ok(tally)
}

fn serve(name: &str, messages: &Messages, deadline: Instant) -> Result<Tally, Ended> {
    let mut service = Service::listen(name)?;
    let mut tally = Tally::default();
    for _ in 0..messages.count {
        let request = in_time(service.receive_until(deadline)?)?;
        let reply = request.to_vec();
        tally.add(&reply);
        // An error means that this client has left.
        let _ = request.reply(&reply);
    }
    drain(service, deadline)?;
    Ok(tally)
}

/// Ends the service after its clients have their replies.
fn drain(mut service: Service, deadline: Instant) -> Result<(), Ended> {
    service.stopper().drain();
    loop {
        match service.receive_until(deadline) {
            // A notification.
            Ok(Some(_)) => {}
            Ok(None) => return in_time(None),
            Err(Error::Closed { .. }) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

fn stream(name: &str, messages: &Messages, deadline: Instant) -> Result<Tally, Ended> {
    let mut client = Client::connect_with(name, &Options::new().connect_deadline(deadline))?;
    let call = in_time(client.submit_until(&messages.get(0), deadline)?)?;
    let mut tally = Tally::default();
    loop {
        let part = in_time(client.completion_of_until(call, deadline)?)?.ok()?;
        let i = tally.messages;
        match part.outcome() {
            Outcome::Part => check(&mut tally, messages, i, &part)?,
            Outcome::End if i == messages.count => return Ok(tally),
            outcome => return failed(format!("found {outcome:?} after {i} parts, wanted {}", messages.count)),
        }
    }
}

fn serve_stream(name: &str, messages: &Messages, deadline: Instant) -> Result<Tally, Ended> {
    let mut service = Service::listen(name)?;
    let request = in_time(service.receive_until(deadline)?)?;
    let (bytes, mut responder) = request.into_parts();
    check(&mut Tally::default(), messages, 0, &bytes)?;
    let mut tally = Tally::default();
    for part in messages.iter() {
        let sent = responder.part_until(&part, deadline)? == Sent::Sent;
        in_time(sent.then_some(()))?;
        tally.add(&part);
    }
    responder.end()?;
    drain(service, deadline)?;
    Ok(tally)
}

fn gather(name: &str, messages: &Messages, deadline: Instant) -> Result<Tally, Ended> {
    let mut receiver = Options::new().gather_at(name)?;
    let mut tally = Tally::default();
    while tally.messages < messages.count {
        // A sender that broke the rules is disconnected in here, without an error.
        let message = in_time(receiver.receive_until(deadline)?)?;
        tally.add(&message);
        let mut line = message[..message.len().min(messages.sizes[0])].to_vec();
        line.push(b'\n');
        std::io::stdout().write_all(&line).or_else(|error| failed(error.to_string()))?;
    }
    Ok(tally)
}

fn write_records(file: &str, messages: &Messages) -> Result<Tally, Ended> {
    let appenders = Appenders::new(&Options::new(), RecordFile::open(file)?)?;
    let mut appender = appenders.appender()?;
    let mut tally = Tally::default();
    for message in messages.iter() {
        appender.append(&message)?;
        tally.add(&message);
    }
    drop(appender);
    appenders.sync()?;
    Ok(tally)
}

fn read_records(file: &str) -> Result<String, Ended> {
    let mut tally = Tally::default();
    let mut damaged = 0;
    let mut reader = match RecordReader::open(file) {
        Err(Error::NotARecordFile { .. }) => return Ok(format!("{tally} damaged {damaged} refused")),
        reader => reader?,
    };
    let end = loop {
        match reader.next_chunk() {
            Ok(Some(chunk)) => chunk.records().for_each(|record| tally.add(record.payload())),
            Ok(None) => break "end",
            Err(Error::Damaged { next: Some(_), .. }) => damaged += 1,
            Err(Error::Damaged { .. }) => break "torn",
            Err(Error::NotARecordFile { .. }) => break "later",
            Err(error) => return Err(error.into()),
        }
    };
    Ok(format!("{tally} damaged {damaged} {end}"))
}
