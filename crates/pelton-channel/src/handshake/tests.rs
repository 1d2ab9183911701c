//! The handshake against `spec/vectors/packets.json`, and against peers that do not follow the protocol.

/// Replays `spec/vectors/packets.json`.
mod vectors {
    use super::super::*;
    use crate::opening::in_call;
    use crate::packet::*;
    use pelton_os::socket::{accept_at, listen_at};

    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::Relaxed;
    use std::time::Duration;

    const DEADLINE_OF_TEST: Duration = Duration::from_secs(5);
    use serde_json::Value;

    fn vectors() -> Value {
        file("packets.json")
    }

    fn file(name: &str) -> Value {
        let path = format!("{}/../../spec/vectors/{name}", env!("CARGO_MANIFEST_DIR"));
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    fn packet_bytes(vector: &Value) -> Vec<u8> {
        let hex = vector["hex"].as_str().unwrap();
        (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
    }

    fn packet_of(fields: &Value) -> Packet {
        let number = |name: &str| match &fields[name] {
            Value::String(text) => u64::from_str_radix(&text[2..], 16).unwrap(),
            value => value.as_u64().unwrap(),
        };
        Packet {
            kind: number("kind") as u32,
            wire_version: number("wire_version") as u32,
            layout_signature: number("layout_signature"),
            role: number("role") as u32,
            holds: number("holds") as u32,
            capacity: number("capacity"),
            message_bytes_max: number("message_bytes_max"),
            generation: number("generation"),
            head: number("head"),
            tail: number("tail"),
            floor: number("floor"),
            seq: number("seq") as u32,
        }
    }

    #[test]
    fn packets_are_read_and_written_as_the_vectors_say() {
        for vector in vectors()["packets"].as_array().unwrap() {
            let (bytes, packet) = (packet_bytes(vector), packet_of(&vector["fields"]));
            let text = vector["text"].as_str().unwrap_or("");
            assert_eq!(Packet::decode(&bytes), Some(packet), "{vector}");
            assert_eq!([&packet.encode(), text.as_bytes()].concat(), bytes, "{vector}");
        }
    }

    #[test]
    fn packets_that_break_the_rules_are_refused() {
        vectors()["refused"].as_array().unwrap().iter().for_each(assert_refused);
    }

    #[test]
    fn greetings_are_accepted_or_refused_as_the_vectors_say() {
        for vector in vectors()["greetings"].as_array().unwrap() {
            let (handshake, peer) = handshake_with_peer();
            assert!(peer.try_send(&packet_bytes(vector), &[]).unwrap());
            let role = match vector["role"].as_u64().unwrap() {
                1 => Role::Receiver,
                2 => Role::Sender,
                3 => Role::Service,
                4 => Role::Client,
                5 => Role::Subscriber,
                _ => Role::Publisher,
            };
            let greeted = in_call(handshake.greet(role, false, true, || Ok(Limits::ALL)));
            match (&vector["is"], greeted) {
                (Value::String(is), Ok(_)) if is == "accepted" => {}
                (Value::Object(is), Err(Error::Refused(text))) => {
                    let words = is["refused"].as_array().unwrap().iter().map(|word| word.as_str().unwrap());
                    words.for_each(|word| assert!(text.contains(word), "{vector}: {text}"));
                    let mut bytes = [0; PACKET_BYTES];
                    let (len, ..) = peer.try_receive(&mut bytes).unwrap().unwrap();
                    assert_eq!(refusal(&bytes[..len]).unwrap().to_string(), format!("refused: {text}"));
                }
                (_, greeted) => panic!("{vector}: {greeted:?}"),
            }
        }
    }

    /// The other side of a broadcast's handshake, up to its page.
    fn result_of_page(vector: &Value, page: &Segment) -> Result<()> {
        let (handshake, peer) = handshake_with_peer();
        let doorbell = Doorbell::shared().unwrap();
        let doorbells = Doorbells::new().unwrap();
        let (capacity, limit) = (1 << 16, message_bytes_limit(1 << 16));
        let data = broadcast::make_broadcast_data(capacity, "test").unwrap();
        let send = |packet: Packet, fds: &[BorrowedFd<'_>]| assert!(peer.try_send(&packet.encode(), fds).unwrap());
        if vector["of"] == "broadcast" {
            send(Packet::hello(Role::Publisher, false, Limits::ALL), &[]);
            let start = Position::START;
            let packet = Packet { generation: 1, ..lane_packet(PRODUCER, capacity, limit, start, start) };
            send(packet, &[page.as_fd(), doorbell.as_fd(), data.as_fd()]);
            let ready = Packet { generation: 1, floor: 1, head: start.pack(), ..Packet::new(READY) };
            send(ready, &[]);
            in_call(broadcast::new_subscriber(handshake, &Settings::default(), &doorbells)).map(|_| ())
        } else {
            let own = broadcast::make_broadcast_page(capacity, limit, &data, "test").unwrap();
            let side = broadcast::PublisherSide {
                page: Arc::new(own),
                data: Arc::new(data),
                message_bytes_max: limit,
                doorbells,
                hold_max_ns: u64::MAX,
            };
            send(Packet::hello(Role::Subscriber, false, Limits::ALL), &[]);
            send(Packet::new(CONSUMER), &[page.as_fd(), doorbell.as_fd()]);
            in_call(broadcast::new_subscription(handshake, side, 0)).map(|_| ())
        }
    }

    #[test]
    fn the_pages_of_broadcasts_are_accepted_or_refused_as_the_vectors_say() {
        let vectors = file("broadcast.json");
        for vector in vectors["pages"].as_array().unwrap() {
            let bytes = vector["bytes"].as_u64().unwrap_or(SEGMENT_BYTES);
            let fresh = &vectors["fresh_pages"][vector["of"].as_str().unwrap()];
            let words = [fresh, &vector["words"]].map(|words| words.as_array().map_or(&[][..], Vec::as_slice));
            let page = Segment::create("test", Kind::Control, bytes, |base| {
                for word in words.concat() {
                    let digits = &word[1].as_str().unwrap()[2..];
                    let value = u64::from_str_radix(digits, 16).unwrap().to_le_bytes();
                    let at = word[0].as_u64().unwrap() as usize;
                    if at + 8 <= bytes as usize {
                        // SAFETY: inside the segment, which this side alone has.
                        unsafe { base.as_ptr().byte_add(at).copy_from(value.as_ptr(), digits.len() / 2) };
                    }
                }
            });
            let result = result_of_page(vector, &page.unwrap());
            match result {
                Ok(()) => assert_eq!(vector["is"], "accepted", "{vector}"),
                // The page alone decides, not a missing reply.
                Err(error) => {
                    let decides = !matches!(error, Error::TimedOut(_));
                    assert!(vector["is"] == "refused" && decides, "{vector}: {error:?}");
                }
            }
        }
    }

    #[test]
    fn a_sender_of_messages_with_traceparents_and_a_receiver_that_does_not_know_them_refuse_each_other() {
        let (handshake, peer) = handshake_with_peer();
        let hello = Packet { tail: TRACED_REQUESTS, ..Packet::hello(Role::Receiver, false, Limits::ALL) };
        let mut bytes = hello.encode().to_vec();
        bytes.extend(entry(ENTRY_VERSION, b"pelton 0.1.9"));
        assert!(peer.try_send(&bytes, &[]).unwrap());
        let error = in_call(handshake.greet_as_sender(true, false, true)).unwrap_err().to_string();
        for text in ["pelton 0.1.9", "feature 1", "`traced`", "or leave that option out"] {
            assert!(error.contains(text), "{error}");
        }
        let mut bytes = [0; PACKET_BYTES];
        let (len, ..) = peer.try_receive(&mut bytes).unwrap().unwrap();
        assert_eq!(format!("{}", refusal(&bytes[..len]).unwrap()), error);

        // A receiver that holds a lane with such messages refuses its next sender likewise.
        let (handshake, peer) = handshake_with_peer();
        let successor = Packet { tail: TRACED_REQUESTS, ..Packet::hello(Role::Sender, false, Limits::ALL) };
        assert!(peer.try_send(&successor.encode(), &[]).unwrap());
        let error = in_call(handshake.greet_as_survivor(true, true)).unwrap_err().to_string();
        assert!(error.contains("the lane that this receiver holds requires"), "{error}");

        // Without the option, the same receiver is accepted, and nothing is required of it.
        let (handshake, peer) = handshake_with_peer();
        assert!(peer.try_send(&hello.encode(), &[]).unwrap());
        in_call(handshake.greet_as_sender(false, false, true)).unwrap();
        let (len, ..) = peer.try_receive(&mut bytes).unwrap().unwrap();
        let said = Packet::decode(&bytes[..len]).unwrap();
        assert_eq!((said.required(), said.offered()), (0, TRACED_REQUESTS | TRACED_MESSAGES));
    }

    /// A handshake of this side, and the socket of its simulated peer.
    fn handshake_with_peer() -> (Handshake, Socket) {
        let thread = std::thread::current().id();
        let path = std::env::temp_dir().join(format!("pelton-vectors-{}-{thread:?}", std::process::id()));
        let listener = listen_at(&path, false).unwrap();
        let peer = Socket::connect(&path).unwrap();
        let socket = accept_at(&listener).unwrap().unwrap();
        peer.take_descriptors();
        std::fs::remove_file(&path).unwrap();
        (
            Handshake::new(socket, Pace::Until(Instant::now() + DEADLINE_OF_TEST), &Settings::default(), "test")
                .unwrap(),
            peer,
        )
    }

    #[test]
    fn candidates_whose_handshake_fails_get_one_copy_of_a_closed_receivers_messages() {
        let (mut sender, mut receiver) = crate::Options::new().capacity(1 << 16).threads().unwrap();
        sender.send(b"held").unwrap();
        let held = receiver.receive().unwrap().hold();
        receiver.close().unwrap();
        let parts = &mut sender.parts;
        let first = parts.memory.data.clone();
        let mut offered = Vec::new();
        for _ in 0..3 {
            let (handshake, peer) = handshake_with_peer();
            assert!(peer.try_send(&Packet::hello(Role::Receiver, false, Limits::ALL).encode(), &[]).unwrap());
            // Instead of CONSUMER.
            assert!(peer.try_send(&Packet::new(READY).encode(), &[]).unwrap());
            let refused = in_call(surviving_sender(handshake, parts, &sender.endpoint.doorbells, true)).unwrap_err();
            assert!(refused.to_string().contains("wanted 3"), "{refused}");
            offered.push(parts.memory.data.clone());
        }
        assert!(!Arc::ptr_eq(&offered[0], &first));
        assert!(offered.iter().all(|data| Arc::ptr_eq(data, &offered[0])));
        assert_eq!(*held, *b"held");
    }

    /// The head of a closed receiver says which part of the lane holds messages. This one says all of it.
    #[test]
    fn a_hostile_head_makes_the_sender_copy_only_what_was_written() {
        const CAPACITY: u64 = 64 << 20;
        let (mut sender, mut receiver) = crate::Options::new().capacity(CAPACITY).threads().unwrap();
        sender.send(&[1; 5000]).unwrap();
        sender.send(b"last").unwrap();
        let held = receiver.receive().unwrap().hold();
        receiver.close().unwrap();
        let parts = &mut sender.parts;
        let (old, tail) = (parts.memory.data.clone(), parts.lane.tail());
        // SAFETY: the page is mapped, and the head is the word at this offset (`ConsumerPage`). Nothing else stores it.
        let head = unsafe { parts.memory.consumer.base().cast::<AtomicU64>().byte_add(128).as_ref() };
        let seq = Position::unpack(head.load(Relaxed)).seq;
        head.store(Position { offset: tail.offset + 8, seq }.pack(), Relaxed);
        // A receiver can also allocate memory of the lane: by a load from its mapping.
        // SAFETY: the last word of the mapping.
        let last = unsafe { old.base().cast::<AtomicU64>().byte_add(CAPACITY as usize - 8).as_ref() };
        assert_eq!(last.load(Relaxed), 0);
        let allocated = old.allocated_bytes().unwrap();
        assert!(allocated < CAPACITY / 16, "{allocated}");
        let (handshake, peer) = handshake_with_peer();
        assert!(peer.try_send(&Packet::hello(Role::Receiver, false, Limits::ALL).encode(), &[]).unwrap());
        assert!(peer.try_send(&Packet::new(READY).encode(), &[]).unwrap());
        in_call(surviving_sender(handshake, parts, &sender.endpoint.doorbells, true)).unwrap_err();
        let new = &parts.memory.data;
        assert!(!Arc::ptr_eq(new, &old));
        assert_eq!(old.allocated_bytes().unwrap(), allocated);
        // Two pages: the messages take a little more than one.
        assert_eq!(new.allocated_bytes().unwrap(), 2 * 4096);
        // SAFETY: the first two pages of both mappings; nothing writes them now.
        let bytes = |of: &Segment| unsafe { std::slice::from_raw_parts(of.base().as_ptr(), 2 * 4096) }.to_vec();
        assert!(bytes(new) == bytes(&old));
        assert_eq!(*held, [1; 5000]);
    }

    /// Simulates a peer that follows the protocol up to the vector's packet.
    fn assert_refused(vector: &Value) {
        let (handshake, peer) = handshake_with_peer();
        let options = Settings::default();
        let (bytes, doorbell) = (packet_bytes(vector), Doorbell::shared().unwrap());
        let send = |bytes: &[u8], fds: &[BorrowedFd<'_>]| assert!(peer.try_send(bytes, fds).unwrap());
        let hello = |role, holds: u32| Packet::hello(role, holds != 0, Limits::ALL).encode();
        let data_of = |packet: &Packet| if capacity_is_valid(packet.capacity) { packet.capacity } else { 64 };
        let refused = match vector["expected"].as_str().unwrap() {
            "PRODUCER" => {
                let packet = Packet::decode(&bytes).unwrap();
                let data = make_data(data_of(&packet), 0, "test").unwrap();
                let (capacity, limit) = (packet.capacity, packet.message_bytes_max);
                let page = make_producer_page(capacity, limit, packet.generation, &data, "test").unwrap();
                send(&hello(Role::Sender, 0), &[]);
                send(&bytes, &[page.as_fd(), doorbell.as_fd(), data.as_fd()]);
                in_call(receiver_of_one(handshake, false)).map(|_| ())
            }
            "CONSUMER" => {
                let packet = Packet::decode(&bytes).unwrap();
                let receiver = make_receiver_page(crate::observe::Kind::Connect, "test").unwrap();
                let data = make_data(data_of(&packet), 0, "test").unwrap();
                let head = Position::unpack(packet.head);
                let consumer = make_consumer_page(head, &data, &receiver, "test").unwrap();
                send(&hello(Role::Receiver, 1), &[]);
                send(&bytes, &[consumer.as_fd(), receiver.as_fd(), doorbell.as_fd(), data.as_fd()]);
                in_call(new_sender(handshake, &options, false)).map(|_| ())
            }
            expected => {
                send(&bytes, &[]);
                in_call(handshake.receive::<0>(if expected == "HELLO" { HELLO } else { READY })).map(|_| ())
            }
        };
        let error = refused.expect_err(&vector.to_string());
        // The packet alone decides, not a missing reply.
        assert!(!matches!(error, Error::TimedOut(_) | Error::System { .. }), "{vector}: {error}");
    }
}

/// The rules of spec/protocol.md for a peer that does not complete the handshake.
mod peers {
    use super::super::*;
    use crate::opening::in_call;
    use crate::packet::*;
    use crate::{Listener, Sender};
    use pelton_os::socket::{accept_at, listen_at};

    use std::task::{Context, Waker};
    use std::time::Duration;

    const DEADLINE_OF_TEST: Duration = Duration::from_secs(5);

    fn pair(name: &str) -> (Socket, Socket) {
        let path = std::env::temp_dir().join(format!("pelton-handshakes-{}-{name}", std::process::id()));
        let listener = listen_at(&path, false).unwrap();
        let peer = Socket::connect(&path).unwrap();
        let socket = accept_at(&listener).unwrap().unwrap();
        peer.take_descriptors();
        std::fs::remove_file(&path).unwrap();
        (socket, peer)
    }

    fn handshake(socket: Socket) -> Handshake {
        Handshake::new(socket, Pace::Until(Instant::now() + DEADLINE_OF_TEST), &Settings::default(), "test").unwrap()
    }

    /// Runs a new sender's handshake against `this` end.
    fn with_new_sender<T>(name: &str, this: impl FnOnce(Handshake) -> Result<T>) -> (SenderParts, T) {
        let (socket, peer) = pair(name);
        let options = Settings { capacity: Some(1 << 20), ..Settings::default() };
        let sender = std::thread::spawn(move || in_call(new_sender(handshake(peer), &options, true)).unwrap());
        let this = this(handshake(socket)).unwrap();
        (sender.join().unwrap().0, this)
    }

    fn send(sender: &mut SenderParts, bytes: u64) -> bool {
        let space = sender.lane.try_reserve(bytes).unwrap();
        space.map(|space| sender.lane.commit(space, bytes)).is_some()
    }

    fn receive(receiver: &mut ReceiverParts) {
        let record = receiver.lane.consumer.peek().unwrap().unwrap();
        let _ = receiver.lane.consumer.release(&record);
    }

    /// A handshake with a successor that sends its page and then stops. Returns the successor's socket.
    fn unfinished_successor(name: &str, receiver: &mut ReceiverParts) -> Socket {
        let (socket, peer) = pair(name);
        let impatient = Handshake { pace: Pace::Until(Instant::now()), ..handshake(socket) };
        let limit = message_bytes_limit(1 << 20);
        let page = make_producer_page(1 << 20, limit, 2, &receiver.lane.memory.data, "test").unwrap();
        let doorbell = Doorbell::shared().unwrap();
        let hello = Packet::hello(Role::Sender, false, Limits::ALL);
        let packet = lane_packet(PRODUCER, 1 << 20, limit, Position::START, Position::START);
        assert!(peer.try_send(&hello.encode(), &[]).unwrap());
        assert!(peer.try_send(&packet.encode(), &[page.as_fd(), doorbell.as_fd()]).unwrap());
        assert!(in_call(surviving_receiver(impatient, &mut receiver.lane, &receiver.doorbells, false)).is_err());
        peer
    }

    #[test]
    fn a_successor_that_the_survivor_has_given_up_never_receives_ready() {
        let (sender, mut receiver) = with_new_sender("before", |handshake| in_call(receiver_of_one(handshake, false)));
        drop(sender);
        let peer = unfinished_successor("given-up", &mut receiver);
        let mut bytes = [0; PACKET_BYTES];
        while let Ok(Some((len @ 1.., ..))) = peer.try_receive(&mut bytes) {
            let kind = Packet::decode(&bytes[..len]).unwrap().kind;
            assert_ne!(kind, READY, "it would write data, and so would the next");
        }
    }

    #[test]
    fn a_successor_that_stops_in_the_handshake_leaves_the_floor_to_the_next() {
        let (mut sender, mut receiver) =
            with_new_sender("first", |handshake| in_call(receiver_of_one(handshake, false)));
        // As in the vector "a successor keeps the floor": the lane jumped behind the lap's end, the front holds
        // records.
        (0..3).for_each(|_| assert!(send(&mut sender, 65528)));
        (0..3).for_each(|_| receive(&mut receiver));
        while send(&mut sender, 65528) {}
        (0..2).for_each(|_| receive(&mut receiver));
        assert!(!send(&mut sender, 65528), "the head has not come past the floor");
        drop(sender);
        // One successor sends its page and then stops.
        let _peer = unfinished_successor("second", &mut receiver);
        // The next one must not overwrite unreleased messages.
        let (lane, doorbells) = (&mut receiver.lane, &receiver.doorbells);
        let (mut sender, ()) =
            with_new_sender("third", |handshake| in_call(surviving_receiver(handshake, lane, doorbells, false)));
        assert!(!send(&mut sender, 65528), "the head has not come past the floor");
    }

    #[test]
    fn a_cancelled_handshake_leaves_the_senders_lane_to_the_next_candidate() {
        let (mut sender, receiver) =
            with_new_sender("before-it", |handshake| in_call(receiver_of_one(handshake, false)));
        assert!(send(&mut sender, 8));
        drop(receiver);
        let (former, doorbells) = (sender.memory.consumer.clone(), Doorbells::new().unwrap());
        let (socket, peer) = pair("cancelled");
        let page = make_receiver_page(observe::Kind::Connect, "test").unwrap();
        let consumer = make_consumer_page(Position::START, &sender.memory.data, &page, "test").unwrap();
        let doorbell = Doorbell::shared().unwrap();
        let polled = Handshake { pace: Pace::Polled(None), ..handshake(socket) };
        assert!(peer.try_send(&Packet::hello(Role::Receiver, false, Limits::ALL).encode(), &[]).unwrap());
        let packet = lane_packet(CONSUMER, 1 << 20, message_bytes_limit(1 << 20), Position::START, Position::START);
        assert!(peer.try_send(&packet.encode(), &[consumer.as_fd(), page.as_fd(), doorbell.as_fd()]).unwrap());
        // The candidate has sent everything but READY.
        let mut steps = Box::pin(surviving_sender(polled, &mut sender, &doorbells, true));
        assert!(steps.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        drop(steps);
        assert!(Arc::ptr_eq(&sender.memory.consumer, &former), "nothing reads the candidate's page");
        let (socket, peer) = pair("after-it");
        let next = std::thread::spawn(move || in_call(receiver_of_one(handshake(peer), false)).unwrap());
        in_call(surviving_sender(handshake(socket), &mut sender, &doorbells, true)).unwrap();
        receive(&mut next.join().unwrap());
    }

    #[test]
    fn a_peer_that_hangs_up_after_its_greeting_does_not_end_the_wait() {
        let path = std::env::temp_dir().join(format!("pelton-handshakes-{}-hangs-up", std::process::id()));
        let listener = Listener::bind(&format!("unix:{}", path.display())).unwrap();
        let peer = Socket::connect(&path).unwrap();
        let hello = Packet::hello(Role::Sender, false, Limits::ALL);
        assert!(peer.try_send(&hello.encode(), &[]).unwrap());
        drop(peer);
        let waited = listener.accept_receiver_until(Instant::now() + Duration::from_millis(50));
        assert!(matches!(waited, Ok(None)), "{waited:?}");
    }

    #[test]
    fn messages_with_no_descriptors_at_all_do_not_fill_the_socket() {
        let path = std::env::temp_dir().join(format!("pelton-handshakes-{}-no-descriptors", std::process::id()));
        let name = format!("unix:{}", path.display());
        let listener = Listener::bind(&name).unwrap();
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut sender = Sender::connect(&name).unwrap();
            (0..10_000).for_each(|_| sender.send_with_descriptors(b"", &[]).unwrap());
            done.send(()).unwrap();
        });
        let mut receiver = listener.accept_receiver().unwrap();
        for number in 0..10_000 {
            let got = receiver.receive_until(Instant::now() + DEADLINE_OF_TEST).unwrap();
            assert!(got.is_some(), "the sender hangs after {number} messages");
        }
        is_done.recv_timeout(DEADLINE_OF_TEST).unwrap();
    }
}
