//! The channel of a bridge: its name, its endpoints in the Tokio runtime, and how they continue after their peer's
//! end.

use crate::{
    checked_name, report,
    status::{Problem, Status},
    stop::Stop,
};
use pelton::{Error, Listener, Options, Receiver, Sender, options::maker, tokio::AsyncReceiver};
use pelton_cli::failure::Failure;
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// A wait of the library that no signal ends, between two checks for one.
const SLICE: Duration = Duration::from_millis(100);
/// Between two such waits: the connection to NATS, which is served by the same thread, has its turn.
pub const TURN: Duration = Duration::from_millis(1);
/// A killed process keeps its role until the kernel has ended it. A guess, generous on a busy machine.
const ROLE_WAIT: Duration = Duration::from_secs(5);
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// The name of a channel.
pub enum Channel {
    /// A directory.
    Path(PathBuf),
    /// A short name or `unix:PATH`.
    Connect(String),
}

/// The names by connect that bridges of this process have abandoned.
fn abandoned() -> MutexGuard<'static, BTreeSet<String>> {
    static NAMES: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    NAMES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The name as `pelton ls` shows it, also before the channel is created: the same in all spellings.
pub fn whole_name(name: &str) -> String {
    match name.strip_prefix("path:").and_then(|directory| std::path::absolute(directory).ok()) {
        Some(path) => format!("path:{}", without_links(&path).display()),
        None => name.to_owned(),
    }
}

/// The path without symbolic links, as far as it is there.
fn without_links(path: &Path) -> PathBuf {
    std::fs::canonicalize(path).unwrap_or_else(|_| match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => without_links(parent).join(name),
        _ => path.to_owned(),
    })
}

impl Channel {
    /// Parses a name as the other commands of `pelton` do.
    pub fn parse(name: &str) -> Result<Channel, Failure> {
        match name.strip_prefix("path:") {
            Some("") => Err(Failure::Input("\"path:\" has no directory: write path:DIR".to_owned())),
            Some(directory) => {
                let path = std::path::absolute(directory)
                    .map_err(|error| Failure::system(format!("the path {directory:?}"), error))?;
                Ok(Channel::Path(path))
            }
            None => checked_name(name).map(|()| Channel::Connect(name.to_owned())),
        }
    }

    /// The name of a bridge of this channel on this host.
    pub fn default_id(&self) -> String {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        match self {
            Channel::Path(path) => format!("{}/{}", host.trim(), path.display().to_string().trim_start_matches('/')),
            Channel::Connect(name) => format!("{}/{name}", host.trim()),
        }
    }

    /// Keeps the role of the channel's receiver until this process ends, without closing the channel.
    pub fn abandon(&self, receiver: ReceiverEnd) {
        std::mem::forget(receiver);
        if let Channel::Connect(name) = self {
            abandoned().insert(name.clone());
        }
    }

    /// Whether [`Channel::abandon`] keeps it.
    pub fn is_abandoned(&self) -> bool {
        matches!(self, Channel::Connect(name) if abandoned().contains(name))
    }

    /// Becomes the channel's receiver. By connect it takes any number of senders, or with `once` the first.
    pub async fn open_receiver(
        &self,
        once: bool,
        standby: bool,
        traced: bool,
        stop: &Stop,
    ) -> Result<ReceiverEnd, Failure> {
        if self.is_abandoned() {
            return Err(Failure::Refused(
                "a bridge of this process has ended while it was undecided what of the channel is stored: restart the \
                 process, its senders wait for that"
                    .to_owned(),
            ));
        }
        let options = options(traced);
        let receiver = match self {
            Channel::Path(path) => claim(standby, stop, || options.cast().create_receiver(path)).await?,
            Channel::Connect(name) if once => {
                let listener: Listener = claim(standby, stop, || options.cast().listen(name)).await?;
                loop {
                    if let Some(receiver) = listener.accept_receiver_until(Instant::now() + SLICE)? {
                        break receiver;
                    }
                    stop.pause(TURN).await?;
                }
            }
            Channel::Connect(name) => claim(standby, stop, || options.cast().gather_at(name)).await?,
        };
        Ok(ReceiverEnd { receiver: AsyncReceiver::new(receiver)?, is_path: matches!(self, Channel::Path(_)) })
    }

    /// Becomes a sender of the channel.
    pub async fn open_sender(&self, listen: bool, standby: bool, traced: bool, stop: &Stop) -> Result<Sender, Failure> {
        let options = options(traced);
        match self {
            Channel::Path(path) => claim(standby, stop, || options.cast().create_sender(path)).await,
            Channel::Connect(name) if listen => {
                let listener: Listener = claim(standby, stop, || options.cast().listen(name)).await?;
                loop {
                    if let Some(sender) = listener.accept_sender_until(Instant::now() + SLICE)? {
                        return Ok(sender);
                    }
                    stop.pause(TURN).await?;
                }
            }
            Channel::Connect(name) => loop {
                match options.cast().handshake(Duration::from_secs(1)).connect_sender(name) {
                    Err(Error::NoListener { .. } | Error::HungUp | Error::TimedOut(_)) => {}
                    done => return Ok(done?),
                }
                stop.pause(RETRY_INTERVAL).await?;
            },
        }
    }
}

fn options(traced: bool) -> Options<maker::Any> {
    Options::<maker::Any>::new().traced(traced)
}

/// Repeats `open` while another process has the role: a while, or with `standby` without limit.
pub async fn claim<T>(standby: bool, stop: &Stop, mut open: impl FnMut() -> pelton::Result<T>) -> Result<T, Failure> {
    let until = Instant::now() + ROLE_WAIT;
    let mut is_reported = false;
    loop {
        match open() {
            Err(error @ (Error::RoleTaken { .. } | Error::InUse { .. })) if standby || Instant::now() < until => {
                if standby && !is_reported {
                    report(format_args!("standing by: {error}"));
                    is_reported = true;
                }
                stop.pause(RETRY_INTERVAL).await?;
            }
            done => return Ok(done?),
        }
    }
}

/// After `error`: continues without a receiver, or by connect with its successor, for which this waits.
pub async fn continue_sender(
    sender: &mut Sender,
    error: Error,
    is_path: bool,
    stop: &Stop,
    status: &Arc<Status>,
) -> Result<(), Failure> {
    if is_path {
        // Does not wait: a path channel needs no receiver to send.
        sender.resume_until(Instant::now())?;
        return Ok(());
    }
    let text = format!("{error}; waiting for the next receiver");
    report(&text);
    let _problem = Problem::begin(status, text);
    while !sender.resume_until(Instant::now() + SLICE)? {
        stop.pause(TURN).await?;
    }
    Ok(())
}

/// What to do after the peer's end.
pub enum Next {
    Continue,
    Done,
}

/// A receiver, registered with the runtime.
pub struct ReceiverEnd {
    receiver: AsyncReceiver,
    is_path: bool,
}

impl ReceiverEnd {
    pub fn get(&self) -> &Receiver {
        self.receiver.get_ref()
    }

    pub fn get_mut(&mut self) -> &mut Receiver {
        self.receiver.get_mut()
    }

    pub fn is_path(&self) -> bool {
        self.is_path
    }

    /// Waits until a message is there, or returns the channel's end.
    pub async fn ready(&mut self, stop: &Stop) -> Result<pelton::Result<()>, Failure> {
        tokio::select! {
            ready = self.receiver.ready() => Ok(ready),
            failure = stop.requested() => Err(failure),
        }
    }

    /// After `error`: continues without its sender, or ends.
    pub fn continue_after(&mut self, error: Error, once: bool) -> Result<Next, Failure> {
        match error {
            Error::Closed { .. } if once => Ok(Next::Done),
            Error::Closed { .. } | Error::PeerDied { .. } if self.is_path => {
                // Does not wait: a path channel needs no sender to receive.
                self.get_mut().resume_until(Instant::now())?;
                Ok(Next::Continue)
            }
            error => Err(error.into()),
        }
    }
}
