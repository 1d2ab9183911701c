//! The services of one name: a client's links to those that it has found, and its way to the others.
//!
//! Nothing here waits: the directory of the name is looked at when a link has ended or drains, when there is no link to ask by, once
//! in so many submissions, and now and then while something waits for room; handshakes go on when their socket has something to say.

use super::frame::Assembly;
use super::frame::Header;
use super::outbox::Outbox;
use pelton_channel::Receiver;
use pelton_channel::raw::Doorbells;
use pelton_channel::raw::HANDSHAKE_TIMEOUT;
use pelton_channel::raw::Name;
use pelton_channel::raw::Settings;
use pelton_channel::raw::{Connecting, Duplex, start_duplex, start_duplex_later};
use pelton_channel::{Error, Result};
use pelton_os::Peer;
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// One service, as its client has it.
#[derive(Debug)]
pub(super) struct Link {
    /// Before the replies: when it is dropped, the service reads what was sent, and that it was closed.
    pub(super) outbox: Outbox,
    pub(super) replies: Receiver,
    pub(super) assembly: Option<Assembly>,
    /// Which of the client's links, never used again.
    pub(super) number: u32,
    /// Where it listens, or did.
    path: PathBuf,
    /// Most bytes of a request, as the service says.
    pub(super) request_bytes_max: u64,
    /// Calls submitted by it whose last answer has not come.
    pub(super) in_flight: usize,
    /// It gives requests back.
    pub(super) is_draining: bool,
    /// It has said that it takes nothing more.
    pub(super) is_drained: bool,
    /// Nobody reads requests there any more. The lane of replies tells it, after what was answered.
    pub(super) has_left: bool,
}

impl Link {
    pub(super) fn new(duplex: Duplex, path: PathBuf, number: u32) -> Link {
        let Duplex { sender, receiver, bytes_max } = duplex;
        Link {
            outbox: Outbox::new(sender),
            replies: receiver,
            assembly: None,
            number,
            path,
            request_bytes_max: bytes_max,
            in_flight: 0,
            is_draining: false,
            is_drained: false,
            has_left: false,
        }
    }

    /// Whether a request may be submitted by it.
    pub(super) fn is_open(&self) -> bool {
        // The lane of replies tells of the close, after what was answered.
        !self.is_draining && !self.has_left && !self.outbox.sender.has_receiver_closed()
    }

    /// Whether one of so many bytes may be.
    pub(super) fn takes(&self, bytes: usize) -> bool {
        self.is_open() && bytes as u64 <= self.request_bytes_max
    }

    pub(super) fn peer(&self) -> Option<Peer> {
        self.replies.peer()
    }

    /// Writes a message, or, of one that is cut into pieces, what there is room for; false if it has to wait for room.
    #[inline(always)]
    pub(super) fn write(&mut self, header: Header, payload: &[u8]) -> Result<bool> {
        if self.outbox.is_whole(payload.len()) {
            return match self.outbox.try_write(header, payload)? {
                true => Ok(true),
                false if self.outbox.is_empty() => Ok(false),
                false => Ok(self.outbox.flush()? && self.outbox.try_write(header, payload)?),
            };
        }
        if !self.outbox.is_empty() && !self.outbox.flush()? {
            return Ok(false);
        }
        self.outbox.push(header, payload);
        self.outbox.flush().map(|_| true)
    }
}

/// Submissions between two looks at the directory, which costs some microseconds; and at those on the way.
const SUBMISSIONS: u32 = 256;
const SUBMISSIONS_ON_THE_WAY: u32 = 16;
/// Time between two looks while something waits for room, or for a first word.
pub(super) const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Links and handshakes of a client at most, lest who may make sockets make it run out of descriptors.
const SERVICES_MAX: usize = 64;

/// The way to services that there is no link to yet.
#[derive(Debug)]
pub(super) struct Crowd {
    pub(super) name: Name,
    options: Settings,
    arriving: Vec<Arriving>,
    /// The number of the link, or of the visit, given last.
    number: u32,
    submissions: u32,
    /// When the directory was looked at last.
    looked: Instant,
    /// Those that said nothing, and until when they are passed over.
    silent: Vec<(PathBuf, Instant)>,
    /// The same of those that refused, until that is told.
    refusing: Vec<(PathBuf, Instant)>,
    /// Why the last one that was reached came to nothing, if that was not that it went.
    why: Option<Error>,
    /// Those that went while they were greeted.
    pub(super) hung_up: u32,
    /// It has had a link.
    has_met: bool,
}

/// A service in the middle of the handshake.
struct Arriving {
    path: PathBuf,
    began: Instant,
    /// None: nobody is there any more.
    shaking: Connecting,
}

impl std::fmt::Debug for Arriving {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a service at {}", self.path.display())
    }
}

impl Crowd {
    /// Of a name at which nobody has been found yet.
    pub(super) fn new(name: Name, options: &Settings) -> Crowd {
        Crowd {
            name,
            options: options.clone(),
            arriving: Vec::new(),
            number: 0,
            submissions: 0,
            looked: Instant::now(),
            silent: Vec::new(),
            refusing: Vec::new(),
            why: None,
            hung_up: 0,
            has_met: false,
        }
    }

    /// Whether the last look at the directory was some time ago.
    pub(super) fn is_look_due(&self) -> bool {
        self.looked.elapsed() >= LOOK_AGAIN
    }

    /// Whether a handshake is under way.
    pub(super) fn is_reaching(&self) -> bool {
        !self.arriving.is_empty()
    }

    /// Why the last handshake failed, once.
    pub(super) fn take_why(&mut self) -> Option<Error> {
        self.refusing.clear();
        self.why.take()
    }

    /// A request was submitted. Now and then others are looked for.
    #[inline(always)]
    pub(super) fn count(&mut self, links: &mut Vec<Link>, doorbells: &Doorbells) {
        self.submissions = self.submissions.wrapping_add(1);
        let is_due = self.submissions.is_multiple_of(SUBMISSIONS);
        if is_due || (!self.arriving.is_empty() && self.submissions.is_multiple_of(SUBMISSIONS_ON_THE_WAY)) {
            if is_due {
                // There is one to ask by: what goes wrong is found again when there is none.
                let _ = self.look(links, doorbells, SERVICES_MAX);
            } else {
                self.attend(links, doorbells);
            }
        }
    }

    /// Begins a handshake with whoever listens and is not known, with so many at most.
    #[cold]
    pub(super) fn look(&mut self, links: &mut Vec<Link>, doorbells: &Doorbells, most: usize) -> Result<()> {
        self.looked = Instant::now();
        self.silent.retain(|(_, until)| self.looked < *until);
        self.refusing.retain(|(_, until)| self.looked < *until);
        let mut paths = self.name.sockets()?;
        // Clients that come for a call or two are to be spread too.
        let start = RandomState::new().hash_one(self.number) as usize % paths.len().max(1);
        paths.rotate_left(start);
        let mut begun = 0;
        for path in paths {
            if begun == most || links.len() + self.arriving.len() >= SERVICES_MAX {
                break;
            }
            let is_known = |of: &Path| of == path;
            // Who drains listens no more: in another pid namespace a process of the same number may.
            if links.iter().any(|link| link.is_open() && is_known(&link.path))
                || self.arriving.iter().any(|on| is_known(&on.path))
                || self.silent.iter().chain(&self.refusing).any(|(path, _)| is_known(path))
            {
                continue;
            }
            match self.greet(path, doorbells) {
                Ok(true) => begun += 1,
                Ok(false) => {}
                // There may be others.
                Err(error) => self.why = Some(error),
            }
        }
        self.attend(links, doorbells);
        Ok(())
    }

    /// Begins a handshake. False: nobody is there.
    fn greet(&mut self, path: PathBuf, doorbells: &Doorbells) -> Result<bool> {
        let number = self.number + 1;
        let Some(shaking) = start_duplex(&self.name, &path, &self.options, doorbells, number)? else {
            return Ok(false);
        };
        self.number = number;
        self.arriving.push(Arriving { path, began: self.looked, shaking });
        Ok(true)
    }

    /// Greets who has hung up once more, but not at once: one that hangs up on everybody is not to be asked without a pause. Until then it
    /// is one on the way.
    fn greet_later(&mut self, path: PathBuf, doorbells: &Doorbells) -> Result<()> {
        self.number += 1;
        let shaking = start_duplex_later(&self.name, &path, &self.options, doorbells, self.number)?;
        self.arriving.push(Arriving { path, began: Instant::now(), shaking });
        Ok(())
    }

    fn note(&mut self, failed: Error) {
        match failed {
            // Who went, went: another look finds whoever is there now.
            Error::HungUp => self.hung_up += 1,
            failed => self.why = Some(failed),
        }
    }

    /// Goes on with handshakes.
    pub(super) fn attend(&mut self, links: &mut Vec<Link>, doorbells: &Doorbells) {
        let mut place = 0;
        while place < self.arriving.len() {
            let Arriving { shaking, began, .. } = &mut self.arriving[place];
            let Poll::Ready(shaken) = shaking.as_mut().poll(&mut Context::from_waker(Waker::noop())) else {
                if began.elapsed() < HANDSHAKE_TIMEOUT {
                    place += 1;
                    continue;
                }
                // It may live, but it does not serve.
                let Arriving { path, .. } = self.arriving.swap_remove(place);
                self.note(Error::TimedOut(format!(
                    "greeting the service at {}, which does not answer",
                    path.display()
                )));
                self.silent.push((path, Instant::now() + HANDSHAKE_TIMEOUT));
                continue;
            };
            let Arriving { path, .. } = self.arriving.swap_remove(place);
            self.number += 1;
            match shaken {
                Ok(None) => {}
                Ok(Some(duplex)) => {
                    links.push(Link::new(duplex, path, self.number));
                    self.why = None;
                    self.has_met = true;
                }
                // Until it has met somebody the client has a deadline of its own.
                Err(Error::HungUp) if self.has_met => {
                    self.greet_later(path, doorbells).unwrap_or_else(|error| self.note(error));
                }
                Err(error) => {
                    self.note(error);
                    // What it says is to be told before it is asked again.
                    self.refusing.push((path, Instant::now() + LOOK_AGAIN));
                }
            }
        }
    }
}
