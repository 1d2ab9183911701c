//! A hostile peer of calls, after a correct handshake.

use crate::program::Program;
use crate::raw::*;
use pelton::{Client, Error, Options, Responder, Service};
use pelton_testkit::{TestDir, deadline, descriptors, eventually_is};
use rustix::net::{RecvFlags, Shutdown, SocketAddrUnix, bind, listen, shutdown};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The message limit of both sides.
const BYTES_MAX: u64 = 4096;
const CLIENT: u32 = 3;
const SERVICE: u32 = 4;

/// A hostile client of a service, or a hostile service of a client, makes calls and replies by the program, while the
/// other side continues to call, or to serve. Another client of that service must get its replies as ever.
pub fn calls(program: &[u8]) {
    let before = descriptors();
    let mut program = Program(program);
    let place = TestDir::unwatched();
    match program.byte() % 2 {
        0 => to_a_service(&place, program),
        _ => to_a_client(&place, program),
    }
    drop(place);
    eventually_is(before, "descriptors", descriptors);
}

/// A side of a link, by hand: its sending lane and its receiving lane.
struct RawLink {
    socket: OwnedFd,
    /// The producer's page and the data; the consumer's page, the receiver's, and the other side's data.
    shown: Vec<Shown>,
    own_doorbells: [OwnedFd; 2],
    doorbells: [OwnedFd; 2],
    /// The offset of the next record, and its number.
    at: usize,
    seq: u32,
}

fn hello(role: u32) -> Vec<u8> {
    let mut hello = packet(HELLO, role);
    hello[32..40].copy_from_slice(&BYTES_MAX.to_le_bytes());
    hello
}

/// Offers a lane: the page, the data, and the doorbell that signals free space.
fn offer_lane(socket: &OwnedFd) -> (Shown, Shown, OwnedFd) {
    let mut page = producer_page();
    page.resize(512, 0);
    page[384..388].copy_from_slice(&1u32.to_le_bytes());
    let page = Shown::new(65536, &page, control_seals());
    let (data, doorbell) = (Shown::new(CAPACITY, &[], size_seals()), good_doorbell());
    raw_send(socket, &producer_packet(), &[page.fd.as_fd(), doorbell.as_fd(), data.fd.as_fd()]);
    (page, data, doorbell)
}

fn expect_packet(socket: &OwnedFd, kind: u32, fds: usize) -> (Vec<u8>, Vec<OwnedFd>) {
    let (bytes, found) = raw_receive(socket);
    assert_eq!((kind_of(&bytes), found.len()), (kind, fds));
    (bytes, found)
}

/// Accepts the offered lane: its two pages, the data, the doorbell that signals messages, and the other side's.
fn accept_lane(socket: &OwnedFd) -> ([Shown; 3], OwnedFd, OwnedFd) {
    let (offered, mut fds) = expect_packet(socket, PRODUCER, 3);
    let (data, doorbell) = (Shown::of(fds.remove(2)), fds.remove(1));
    let mut page = preamble(pelton_lane::MAGIC_CONSUMER);
    page.resize(384, 0);
    page[128..136].copy_from_slice(&offered[48..56]);
    (page[176], page[256]) = (1, 1);
    let consumer = Shown::new(65536, &page, control_seals());
    let receiver = Shown::new(65536, &preamble(pelton_lane::MAGIC_RECEIVER), control_seals());
    let own_doorbell = good_doorbell();
    raw_send(socket, &packet(CONSUMER, 0), &[consumer.fd.as_fd(), receiver.fd.as_fd(), own_doorbell.as_fd()]);
    ([consumer, receiver, data], own_doorbell, doorbell)
}

impl RawLink {
    fn client(path: &std::path::Path) -> RawLink {
        let socket = raw_connect(path);
        raw_send(&socket, &hello(CLIENT), &[]);
        expect_packet(&socket, HELLO, 0);
        let (page, data, own_doorbell) = offer_lane(&socket);
        let doorbell = expect_packet(&socket, CONSUMER, 3).1.remove(2);
        let ([consumer, receiver, replies], own, other) = accept_lane(&socket);
        raw_send(&socket, &packet(READY, 0), &[]);
        expect_packet(&socket, READY, 0);
        let shown = vec![page, data, consumer, receiver, replies];
        RawLink { socket, shown, own_doorbells: [own_doorbell, own], doorbells: [doorbell, other], at: 0, seq: 1 }
    }

    fn service(listening: &OwnedFd) -> RawLink {
        let socket = rustix::net::accept(listening).unwrap();
        expect_packet(&socket, HELLO, 0);
        raw_send(&socket, &hello(SERVICE), &[]);
        let ([consumer, receiver, requests], own, other) = accept_lane(&socket);
        let (page, data, own_doorbell) = offer_lane(&socket);
        let doorbell = expect_packet(&socket, CONSUMER, 3).1.remove(2);
        expect_packet(&socket, READY, 0);
        raw_send(&socket, &packet(READY, 0), &[]);
        let shown = vec![page, data, consumer, receiver, requests];
        RawLink { socket, shown, own_doorbells: [own_doorbell, own], doorbells: [doorbell, other], at: 0, seq: 1 }
    }

    /// A record of these three words and so many payload bytes.
    fn write(&mut self, words: &[u64], payload: usize) {
        let (bytes, data) = (8 * words.len() + payload, &self.shown[1]);
        let next = self.at + 8 + bytes.next_multiple_of(8);
        if next + 8 > CAPACITY as usize {
            return;
        }
        data.word(next).store(0, Ordering::Relaxed);
        for (place, word) in words.iter().enumerate() {
            data.word(self.at + 8 + 8 * place).store(*word, Ordering::Relaxed);
        }
        data.word(self.at).store(u64::from(self.seq) << 32 | bytes as u64, Ordering::Release);
        (self.at, self.seq) = (next, self.seq + 1);
        self.ring();
    }

    fn ring(&self) {
        for doorbell in &self.doorbells {
            let _ = rustix::io::write(doorbell, &1u64.to_ne_bytes());
        }
    }

    /// One random action; records are mostly of these kinds.
    fn act(&mut self, kinds: &[u64], program: &mut Program) {
        match program.byte() % 16 {
            0..=9 => {
                let call = (1 + program.below(3) as u64) << 32 | program.below(5) as u64;
                let kind = program.of(kinds);
                let flags = if program.byte() % 4 == 0 { program.below(4) as u64 } else { 0 };
                let mut words = [if kind == 2 { 0 } else { call }, kind | flags << 8, 0];
                if program.byte() % 8 == 0 {
                    let place = program.below(3);
                    words[place] = program.lie(words[place]);
                }
                let payload = program.of(&[0, 0, 1, 8, 100, 4096, 4097, 9000]);
                let length = if program.byte() % 32 == 0 { program.below(3) } else { 3 };
                self.write(&words[..length], payload);
            }
            // Releases as far as the other side has written: its own numbers have that position.
            10 | 11 => {
                let place = program.of(&[128, 136, 256, 264]);
                let lie = program.lie(self.shown[2].word(place).load(Ordering::Relaxed));
                self.shown[2].word(place).store(lie, Ordering::Release);
            }
            12 => {
                let (segment, place) = (program.below(5), 8 * program.below(64));
                let word = self.shown[segment].word(place);
                word.store(program.lie(word.load(Ordering::Relaxed)), Ordering::Release);
            }
            13 => self.ring(),
            14 => {
                raw_try_send(&self.socket, program.bytes(100), &[self.own_doorbells[0].as_fd()]);
            }
            _ if program.byte() % 4 == 0 => {
                let _ = shutdown(&self.socket, Shutdown::Both);
            }
            // Receives, so that the socket never fills.
            _ => {
                let _ = rustix::net::recv(&self.socket, &mut [0; 256], RecvFlags::DONTWAIT);
            }
        }
    }
}

fn options<M>() -> Options<M> {
    <Options>::new().capacity(CAPACITY).call_bytes_max(BYTES_MAX).cast()
}

fn to_a_service(place: &TestDir, mut program: Program) {
    let mut service = Service::listen_with(&place.name(), &options()).unwrap();
    let (socket, name) = (place.socket(), place.name());
    let connecting =
        std::thread::spawn(move || (RawLink::client(&socket), Client::connect_with(&name, &options()).unwrap()));
    while !connecting.is_finished() {
        assert!(service.receive_until(Instant::now() + Duration::from_millis(1)).unwrap().is_none());
    }
    let (mut link, mut other) = connecting.join().unwrap();
    let mut kept = Vec::new();
    while !program.is_over() {
        link.act(&[1, 1, 1, 2, 3, 3, 16, 17], &mut program);
        serve(&mut service, &mut kept, &mut program);
    }
    let call = other.submit(b"another's").unwrap();
    let until = deadline();
    while other.try_completion().unwrap().is_none_or(|answer| {
        assert!(answer.call_id() == call && *answer == *b"answer");
        false
    }) {
        assert!(Instant::now() < until, "another client gets no reply");
        let soon = Instant::now() + Duration::from_millis(1);
        if let Some(request) = service.receive_until(soon).unwrap() {
            match *request == *b"another's" {
                true => request.reply(b"answer").unwrap(),
                false => drop(request),
            }
        }
    }
    kept.into_iter().for_each(|responder| allow_lost_client(responder.reply(b"late")));
    assert!(service.corrupt_clients() <= 1);
    drop((link, other, service));
}

/// The results that a service may get from a client that goes, or lies.
#[track_caller]
fn allow_lost_client(answer: pelton::Result<()>) {
    match answer {
        Ok(()) | Err(Error::PeerDied { .. } | Error::Closed { .. } | Error::Corrupt(_) | Error::TooLarge { .. }) => {}
        Err(error) => panic!("{error}"),
    }
}

fn serve(service: &mut Service, kept: &mut Vec<Responder>, program: &mut Program) {
    // No client can make it fail.
    let Some(request) = service.try_receive().unwrap() else {
        if service.arm().unwrap().is_waiting() {
            service.disarm();
        }
        return;
    };
    assert!(request.len() as u64 <= BYTES_MAX);
    std::hint::black_box(request.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)));
    let _ = (request.peer(), request.deadline(), request.is_cancelled());
    if request.is_notification() {
        return;
    }
    match program.byte() % 6 {
        0 | 1 => allow_lost_client(request.reply(&[1; 200])),
        2 => allow_lost_client(request.fail(9, b"why")),
        3 => drop(request),
        4 => {
            let mut responder = request.into_responder();
            allow_lost_client(responder.try_part(&[2; 3000]).map(drop));
            allow_lost_client(responder.end());
        }
        _ => kept.push(request.into_responder()),
    }
}

fn to_a_client(place: &TestDir, mut program: Program) {
    let listening = seqpacket();
    bind(&listening, &SocketAddrUnix::new(place.socket()).unwrap()).unwrap();
    listen(&listening, 4).unwrap();
    let name = place.name();
    let connecting = std::thread::spawn(move || Client::connect_with(&name, &options()).unwrap());
    let mut link = RawLink::service(&listening);
    let mut client = connecting.join().unwrap();
    let mut calls = Vec::new();
    while !program.is_over() {
        if !call(&mut client, &mut calls, &mut program) {
            break;
        }
        link.act(&[16, 16, 17, 17, 18, 19, 20, 1], &mut program);
    }
    drop((link, client, listening));
}

/// The results that a client may get from a service that goes, or lies; None: the link is over.
#[track_caller]
fn unless_over<T>(answer: pelton::Result<T>) -> Option<T> {
    match answer {
        Ok(answer) => Some(answer),
        Err(Error::Corrupt(_) | Error::PeerDied { .. } | Error::Closed { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

/// One action of the client; false after an error that ends the link.
fn call(client: &mut Client, calls: &mut Vec<pelton::CallId>, program: &mut Program) -> bool {
    let done = match program.byte() % 8 {
        0..=2 => {
            let size = program.of(&[0, 10, 1000, 4000]);
            match client.try_submit(&vec![3; size]) {
                Ok(submitted) => {
                    calls.extend(submitted);
                    Some(())
                }
                failed => unless_over(failed).map(drop),
            }
        }
        3 => unless_over(client.try_notify(b"a notification")).map(drop),
        4 if !calls.is_empty() => {
            let call = calls.swap_remove(program.below(calls.len()));
            unless_over(client.cancel(call)).map(drop)
        }
        5 => unless_over(client.arm()).map(|_| client.disarm()),
        // Without a call in flight the client would refuse to wait.
        6 if !calls.is_empty() => {
            unless_over(client.completion_until(Instant::now())).map(|answer| check_completion(answer, calls))
        }
        _ => unless_over(client.try_completion()).map(|answer| check_completion(answer, calls)),
    };
    done.is_some()
}

fn check_completion(answer: Option<pelton::Completion<'_>>, calls: &mut Vec<pelton::CallId>) {
    let Some(answer) = answer else { return };
    assert!(answer.len() as u64 <= BYTES_MAX);
    std::hint::black_box(answer.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)));
    if answer.outcome().is_final() {
        calls.retain(|other| *other != answer.call_id());
    }
}
