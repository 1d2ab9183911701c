//! The two endpoints that all scenarios use, and their invariant after any death: numbered messages, each of them,
//! and whole.

use super::*;
use support::readable_until;

pub const SMALL: u64 = 64 << 10;
/// Larger than the window, so that a lane wraps early and grows.
pub const LARGE: u64 = 512 << 10;

pub fn with_capacity<M>(capacity: u64) -> Options<M> {
    <Options>::new().capacity(capacity).cast()
}

pub fn opened<M>() -> Options<M> {
    <Options>::new().cast()
}

/// A receiver, and the expected number of the next message of each lane.
pub struct Receiving {
    pub receiver: Receiver,
    pub next: [u64; 3],
    pub bytes: u64,
    /// An end that the receiver has reported, and that the scenario still has to check.
    pub pending_end: Option<Error>,
    /// How many messages had a traceparent.
    pub traced: u64,
}

/// A traceparent that belongs to this message alone.
fn traceparent_of(number: u64) -> Traceparent {
    Traceparent::new([7; 16], (number + 1).to_be_bytes(), 1).unwrap()
}

impl Receiving {
    pub fn new(receiver: Receiver, bytes: u64) -> Receiving {
        Receiving { receiver, next: [0; 3], bytes, pending_end: None, traced: 0 }
    }

    /// Takes one message: whole, in order, and repeated only if marked so. `None` means the deadline.
    pub fn one(&mut self, deadline: Instant) -> pelton::Result<Option<u64>> {
        let Some(mut message) = self.receiver.receive_until(deadline)? else { return Ok(None) };
        take_descriptors(&mut message);
        let number = u64::from_le_bytes(message[..8].try_into().unwrap());
        check(number, Sizes::Fixed(self.bytes), &message, &mut Vec::new());
        if let Some(traceparent) = message.traceparent() {
            assert_eq!(traceparent, traceparent_of(number));
            self.traced += 1;
        }
        let next = &mut self.next[message.lane() as usize];
        if number < *next {
            assert!(message.is_redelivered(), "message {number} came twice");
        } else {
            assert_eq!(number, *next, "a message was lost");
            *next += 1;
        }
        Ok(Some(number))
    }

    #[track_caller]
    pub fn read(&mut self, count: u64) {
        for _ in 0..count {
            self.one(deadline()).unwrap().expect("a message was sent");
        }
    }

    /// Takes everything up to this number, past any reported ends.
    #[track_caller]
    pub fn read_to(&mut self, number: u64) {
        while self.next[0] < number {
            match self.one(deadline()) {
                Ok(read) => assert!(read.is_some(), "message {} did not arrive", self.next[0]),
                Err(error) => assert!(is_end(&error), "{error}"),
            }
        }
    }

    /// Receives until the end of the senders is reported.
    #[track_caller]
    pub fn until_end(&mut self) -> Error {
        if let Some(end) = self.pending_end.take() {
            return end;
        }
        loop {
            match self.one(deadline()) {
                Ok(read) => assert!(read.is_some(), "neither a message nor an end came"),
                Err(error) => return error,
            }
        }
    }

    /// Receives, past any reported end, until nothing arrives for a moment. It waits on the descriptor, which covers
    /// sent messages and the lane of a new sender. It also works if the machine lets the moment pass before the first
    /// poll.
    #[track_caller]
    pub fn for_a_moment(&mut self) {
        loop {
            let is_armed = match self.one(Instant::now()) {
                Ok(None) => self.receiver.arm().map(pelton::Armed::is_waiting),
                read => read.map(|_| false),
            };
            match is_armed {
                Ok(false) => {}
                Ok(true) => {
                    let rings = readable_until(self.receiver.as_fd(), Instant::now() + MOMENT);
                    self.receiver.disarm();
                    if !rings {
                        return;
                    }
                }
                Err(error) => assert!(is_end(&error), "{error}"),
            }
        }
    }

    /// No death is reported for a moment.
    #[track_caller]
    pub fn expect_no_death(&mut self) {
        let until = Instant::now() + MOMENT;
        loop {
            match self.one(until) {
                Ok(None) => return,
                Ok(Some(_)) => {}
                Err(error) => assert!(error.is_closed(), "{error}"),
            }
        }
    }
}

/// Two descriptors arrive with each message, or none.
pub fn take_descriptors(message: &mut pelton::Message<'_>) {
    if message.descriptor_count() != 0 {
        assert_eq!(message.take_descriptors().unwrap().len(), 2);
    }
}

pub fn is_end(error: &Error) -> bool {
    error.is_closed() || error.is_peer_died()
}

/// A sender, and the number of its next message.
pub struct Sending {
    pub sender: Sender,
    pub next: u64,
    pub bytes: u64,
    /// The ends of receivers that it detected.
    pub ends: Vec<Error>,
}

impl Sending {
    /// Continues after the messages in the lane.
    pub fn new(sender: Sender, bytes: u64) -> Sending {
        let next = u64::from(sender.next_seq()) - 1;
        Sending { sender, next, bytes, ends: Vec::new() }
    }

    #[track_caller]
    pub fn send(&mut self, count: u64) {
        let mut message = Vec::new();
        for _ in 0..count {
            payload(self.next, self.bytes as usize, &mut message);
            loop {
                match self.sender.send_until(&message, deadline()) {
                    Ok(sent) => break assert_eq!(sent, Sent::Sent),
                    Err(error) => {
                        assert!(is_end(&error), "{error}");
                        self.ends.push(error);
                    }
                }
            }
            self.next += 1;
        }
    }

    pub fn try_send(&mut self) -> bool {
        let mut message = Vec::new();
        payload(self.next, self.bytes as usize, &mut message);
        let sent = self.sender.try_send(&message).unwrap() == Sent::Sent;
        self.next += u64::from(sent);
        if sent {
            shared().committed.store(self.next, SeqCst);
        }
        sent
    }

    /// As a victim: notes each sent message immediately.
    pub fn commit(&mut self, count: u64) {
        for _ in 0..count {
            self.send(1);
            shared().committed.store(self.next, SeqCst);
        }
    }

    /// Writes the payload in halves, with a step between them.
    pub fn commit_by_halves(&mut self, count: u64) {
        let mut message = Vec::new();
        for _ in 0..count {
            payload(self.next, self.bytes as usize, &mut message);
            let mut reservation = self.sender.reserve(message.len()).unwrap();
            let half = message.len() / 2;
            reservation[..half].copy_from_slice(&message[..half]);
            take_step("payload: half");
            reservation[half..].copy_from_slice(&message[half..]);
            take_step("payload: whole");
            reservation.commit().unwrap();
            self.next += 1;
            shared().committed.store(self.next, SeqCst);
        }
    }

    pub fn commit_traced(&mut self, count: u64) {
        let mut message = Vec::new();
        for _ in 0..count {
            payload(self.next, self.bytes as usize, &mut message);
            let sent = self.sender.send_traced(&message, traceparent_of(self.next), deadline()).unwrap();
            assert_eq!(sent, Sent::Sent);
            self.next += 1;
            shared().committed.store(self.next, SeqCst);
        }
    }

    pub fn commit_with_descriptors(&mut self, count: u64) {
        let null = std::fs::File::open("/dev/null").unwrap();
        let mut message = Vec::new();
        for _ in 0..count {
            payload(self.next, self.bytes as usize, &mut message);
            self.sender.send_with_descriptors(&message, &[null.as_fd(); 2]).unwrap();
            self.next += 1;
            shared().committed.store(self.next, SeqCst);
        }
    }

    pub fn commit_batch(&mut self, count: u64) {
        let mut message = Vec::new();
        let lens = std::iter::repeat_n(self.bytes as usize, count as usize);
        let mut batch = self.sender.try_reserve_batch(lens).unwrap().expect("there is free space");
        for number in self.next..self.next + count {
            payload(number, self.bytes as usize, &mut message);
            assert!(batch.push(&message));
        }
        batch.commit().unwrap();
        self.next += count;
        shared().committed.store(self.next, SeqCst);
    }

    /// Waits until all is released, past any reported ends.
    #[track_caller]
    pub fn drained(&mut self) {
        loop {
            match self.sender.wait_released_until(deadline()) {
                Ok(drained) => return assert!(drained, "not drained"),
                Err(error) => {
                    assert!(is_end(&error), "{error}");
                    self.ends.push(error);
                }
            }
        }
    }

    /// Waits until the receiver's end is reported; `None` if all is released.
    #[track_caller]
    pub fn until_end(&mut self) -> Option<Error> {
        if let Some(end) = self.ends.pop() {
            return Some(end);
        }
        match self.sender.wait_released_until(deadline()) {
            Ok(drained) => {
                assert!(drained, "neither free space nor an end was reported");
                None
            }
            Err(error) => Some(error),
        }
    }

    #[track_caller]
    pub fn expect_no_death(&mut self) {
        match self.sender.wait_released_until(Instant::now() + MOMENT) {
            Ok(_) => {}
            Err(error) => assert!(error.is_closed(), "{error}"),
        }
        assert!(self.ends.iter().all(Error::is_closed));
    }
}

#[track_caller]
pub fn is_taken<T: std::fmt::Debug>(role: pelton::Result<T>) {
    assert!(matches!(role, Err(Error::RoleTaken { .. })), "{role:?}");
}

/// Checks the messages of a victim that sends: each one that it noted, and after them only whole ones.
#[track_caller]
pub fn all_committed_arrived(next: u64, in_flight: u64) {
    let committed = shared().committed.load(SeqCst);
    assert!(next >= committed, "{committed} were committed, {next} came");
    assert!(next <= committed + in_flight, "{committed} were committed, {in_flight} were on their way, {next} came");
}

/// A sender's successor and this receiver continue, through a lap of the lane.
#[track_caller]
pub fn resume_both(sender: Sender, receiving: &mut Receiving) {
    let mut sending = Sending::new(sender, receiving.bytes);
    assert_eq!(sending.next, receiving.next[0], "the successor begins behind the last message");
    let lap = receiving.receiver.capacity().min(256 << 10) / receiving.bytes;
    for _ in 0..lap + 3 {
        sending.send(1);
        receiving.read_to(sending.next);
    }
    sending.drained();
}
