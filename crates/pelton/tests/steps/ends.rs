//! The two ends as all scenarios use them, and what must hold of them whoever died: numbered messages, every one of them, and whole.

use super::*;
use support::readable_until;

pub const SMALL: u64 = 64 << 10;
/// Larger than the window, so that a lane wraps early and stretches.
pub const LARGE: u64 = 512 << 10;

pub fn with_capacity(capacity: u64) -> Options {
    Options::new().capacity(capacity)
}

pub fn opened() -> Options {
    Options::new()
}

/// A receiver, and the number that the next message of each lane must have.
pub struct Receiving {
    pub receiver: Receiver,
    pub next: [u64; 3],
    pub bytes: u64,
    /// An end that was told, and is still to be asked for.
    pub pending_end: Option<Error>,
}

impl Receiving {
    pub fn new(receiver: Receiver, bytes: u64) -> Receiving {
        Receiving { receiver, next: [0; 3], bytes, pending_end: None }
    }

    /// One message: whole, in order, and doubled only if it says so. `None`: the deadline.
    pub fn one(&mut self, deadline: Instant) -> pelton::Result<Option<u64>> {
        let Some(mut message) = self.receiver.receive_until(deadline)? else { return Ok(None) };
        take_descriptors(&mut message);
        let number = u64::from_le_bytes(message[..8].try_into().unwrap());
        check(number, Sizes::Fixed(self.bytes), &message, &mut Vec::new());
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

    /// Everything up to this number, whatever ends are told between.
    #[track_caller]
    pub fn read_to(&mut self, number: u64) {
        while self.next[0] < number {
            match self.one(deadline()) {
                Ok(read) => assert!(read.is_some(), "message {} did not arrive", self.next[0]),
                Err(error) => assert!(is_end(&error), "{error}"),
            }
        }
    }

    /// Until the senders' end is told.
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

    /// What is there until nothing comes for a moment, and whatever end is told. It goes by the descriptor: that has what was sent,
    /// and the lane of who is new, also when the machine lets the moment pass before the first look.
    #[track_caller]
    pub fn for_a_moment(&mut self) {
        loop {
            let is_armed = match self.one(Instant::now()) {
                Ok(None) => self.receiver.arm(),
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

    /// For a moment nobody is told dead.
    #[track_caller]
    pub fn nobody_is_dead(&mut self) {
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

/// Two come with each message, or none.
pub fn take_descriptors(message: &mut pelton::Message<'_>) {
    if message.descriptors() != 0 {
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
    /// Ends of receivers that it was told of.
    pub ends: Vec<Error>,
}

impl Sending {
    /// Goes on behind what is in the lane.
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

    /// As a victim: says what has been sent as soon as it is.
    pub fn commit(&mut self, count: u64) {
        for _ in 0..count {
            self.send(1);
            shared().committed.store(self.next, SeqCst);
        }
    }

    /// The payload by halves, with a step between.
    pub fn commit_by_halves(&mut self, count: u64) {
        let mut message = Vec::new();
        for _ in 0..count {
            payload(self.next, self.bytes as usize, &mut message);
            let mut room = self.sender.reserve(message.len()).unwrap();
            let half = message.len() / 2;
            room[..half].copy_from_slice(&message[..half]);
            take_step("payload: half");
            room[half..].copy_from_slice(&message[half..]);
            take_step("payload: whole");
            room.commit().unwrap();
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

    /// Waits until all is released, whatever ends are told meanwhile.
    #[track_caller]
    pub fn drained(&mut self) {
        loop {
            match self.sender.drain_until(deadline()) {
                Ok(drained) => return assert!(drained, "not drained"),
                Err(error) => {
                    assert!(is_end(&error), "{error}");
                    self.ends.push(error);
                }
            }
        }
    }

    /// Until the receiver's end is told; `None` if all is released.
    #[track_caller]
    pub fn until_end(&mut self) -> Option<Error> {
        if let Some(end) = self.ends.pop() {
            return Some(end);
        }
        match self.sender.drain_until(deadline()) {
            Ok(drained) => {
                assert!(drained, "neither free space nor an end was reported");
                None
            }
            Err(error) => Some(error),
        }
    }

    #[track_caller]
    pub fn nobody_is_dead(&mut self) {
        match self.sender.drain_until(Instant::now() + MOMENT) {
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

/// What a victim that sends has sent, by what has come: everything that it said, and nothing but whole messages behind.
#[track_caller]
pub fn all_committed_came(next: u64, in_flight: u64) {
    let committed = shared().committed.load(SeqCst);
    assert!(next >= committed, "{committed} were committed, {next} came");
    assert!(next <= committed + in_flight, "{committed} were committed, {in_flight} were on their way, {next} came");
}

/// A sender's successor and this receiver go on, through a lap of the lane.
#[track_caller]
pub fn go_on(sender: Sender, receiving: &mut Receiving) {
    let mut sending = Sending::new(sender, receiving.bytes);
    assert_eq!(sending.next, receiving.next[0], "the successor begins behind the last message");
    let lap = receiving.receiver.capacity().min(256 << 10) / receiving.bytes;
    for _ in 0..lap + 3 {
        sending.send(1);
        receiving.read_to(sending.next);
    }
    sending.drained();
}
