//! The end that a signal asks for.

use pelton_cli::failure::Failure;
use std::{
    io,
    time::{Duration, Instant},
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};

/// Whether a signal has arrived, and which. The second signal ends the process immediately.
#[derive(Clone)]
pub struct Stop {
    number: watch::Receiver<i32>,
    /// Whether it is of one bridge of many.
    is_of_one: bool,
}

/// Instead of a signal's number: a reload ends the bridge, and the process goes on.
pub const RELOAD: i32 = -1;
/// The same, and no successor publishes at the same place: the bridge decides what is undecided before it ends.
pub const RELOAD_ELSEWHERE: i32 = -2;

impl Stop {
    /// Catches SIGINT and SIGTERM from now on. Call this in a Tokio runtime.
    pub fn install() -> Result<Stop, Failure> {
        let (send, receive) = watch::channel(0);
        let catch = |kind| signal(kind).map_err(|error: io::Error| Failure::system("cannot catch signals", error));
        let (mut interrupt, mut terminate) = (catch(SignalKind::interrupt())?, catch(SignalKind::terminate())?);
        tokio::spawn(async move {
            loop {
                let number = tokio::select! {
                    _ = interrupt.recv() => 2,
                    _ = terminate.recv() => 15,
                };
                if *send.borrow() != 0 {
                    std::process::exit(128 + number);
                }
                send.send_replace(number);
            }
        });
        Ok(Stop { number: receive, is_of_one: false })
    }

    /// For a bridge that may end before its process: the sender takes the number of the signal, or [`RELOAD`].
    pub fn of_one_bridge() -> (watch::Sender<i32>, Stop) {
        let (send, receive) = watch::channel(0);
        (send, Stop { number: receive, is_of_one: true })
    }

    /// Fails once a signal has arrived.
    pub fn check(&self) -> Result<(), Failure> {
        match *self.number.borrow() {
            0 => Ok(()),
            number => Err(Failure::Signal(number)),
        }
    }

    /// Whether a reload ends this bridge.
    pub fn is_reload(&self) -> bool {
        *self.number.borrow() < 0
    }

    /// Whether a reload ends this bridge, and no successor publishes at the same place.
    pub fn has_no_successor(&self) -> bool {
        *self.number.borrow() == RELOAD_ELSEWHERE
    }

    /// Whether the process goes on after this bridge.
    pub fn is_outlived(&self) -> bool {
        self.is_of_one && *self.number.borrow() <= 0
    }

    /// Waits for a signal.
    pub async fn requested(&self) -> Failure {
        self.wait_for(|number| number != 0).await
    }

    /// Waits for a signal after which a successor decides what is undecided.
    pub async fn requested_with_successor(&self) -> Failure {
        self.wait_for(|number| !matches!(number, 0 | RELOAD_ELSEWHERE)).await
    }

    async fn wait_for(&self, mut is_wanted: impl FnMut(i32) -> bool) -> Failure {
        let mut receive = self.number.clone();
        match receive.wait_for(|number| is_wanted(*number)).await {
            Ok(number) => Failure::Signal(*number),
            // The sender lives as long as the bridge.
            Err(_) => std::future::pending().await,
        }
    }

    /// As [`Stop::pause`], without a runtime, and fails within a tenth of a second.
    pub fn sleep(&self, time: Duration) -> Result<(), Failure> {
        let until = Instant::now() + time;
        loop {
            self.check()?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(Duration::from_millis(100)));
        }
    }

    /// Waits for `time`; fails at once when a signal arrives.
    pub async fn pause(&self, time: Duration) -> Result<(), Failure> {
        tokio::select! {
            failure = self.requested() => Err(failure),
            () = tokio::time::sleep(time) => Ok(()),
        }
    }
}
