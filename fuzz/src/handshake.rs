//! Hostile peers that connect to a listener.

use crate::program::Program;
use crate::raw::*;
use pelton::{Listener, Options};
use pelton_testkit::{TestDir, deadline, descriptors, eventually_is};
use rustix::fs::SealFlags;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

/// A hostile peer connects and acts by the program. Then a correct one connects, and must be served, unless the first
/// was accepted as a correct one. The listener is new, or has lost its peer and waits for a successor.
pub fn handshake(program: &[u8]) {
    let before = descriptors();
    let mut program = Program(program);
    let (receives, survives) = (program.byte() % 2 == 0, program.byte() % 2 == 1);
    let place = TestDir::unwatched();
    let listener = Options::new().capacity(CAPACITY).listen(&place.name()).unwrap();
    match receives {
        true => serve_receiver(listener, survives, &place, program),
        false => serve_sender(listener, survives, &place, program),
    }
    drop(place);
    eventually_is(before, "descriptors", descriptors);
}

fn serve_receiver(listener: Listener, survives: bool, place: &TestDir, program: Program) {
    std::thread::scope(|scope| {
        let survivor = survives.then(|| {
            let good = scope.spawn(|| {
                let peer = RawPeer::sender(&place.socket());
                peer.put(0, 1, 8);
            });
            let receiver = listener.accept_receiver_until(deadline()).unwrap().unwrap();
            good.join().unwrap();
            receiver
        });
        let peers = scope.spawn(|| {
            act_as_peer(&place.socket(), SENDER, program);
            Options::new().capacity(CAPACITY).connect_sender(&place.name()).and_then(|mut sender| {
                sender.send(b"a good one")?;
                sender.wait_released_until(deadline())
            })
        });
        let mut receiver = match survivor {
            None => listener.accept_receiver_until(deadline()).unwrap().unwrap(),
            Some(mut receiver) => {
                assert_eq!(receiver.receive_until(deadline()).unwrap().unwrap().len(), 8);
                assert!(receiver.receive_until(deadline()).is_err_and(|error| error.is_peer_died()));
                assert!(receiver.resume_until(deadline()).unwrap());
                receiver
            }
        };
        // A peer that was accepted has gone before the correct one connects, and the receiver gets its end.
        let good = receiver.receive_until(deadline()).is_ok_and(|got| got.is_some_and(|m| *m == *b"a good one"));
        use_receiver(&mut receiver, None, "after a handshake");
        drop((receiver, listener));
        let served = peers.join().unwrap();
        assert_eq!(served.is_ok(), good, "{served:?}");
    });
}

fn serve_sender(listener: Listener, survives: bool, place: &TestDir, program: Program) {
    std::thread::scope(|scope| {
        let survivor = survives.then(|| {
            let good = scope.spawn(|| drop(RawPeer::receiver(&place.socket())));
            let mut sender = listener.accept_sender_until(deadline()).unwrap().unwrap();
            good.join().unwrap();
            sender.try_send(b"a good one").map(|_| sender)
        });
        let peers = scope.spawn(|| {
            act_as_peer(&place.socket(), RECEIVER, program);
            Options::new().connect_receiver(&place.name()).and_then(|mut receiver| {
                Ok(receiver.receive_until(deadline())?.is_some_and(|message| *message == *b"a good one"))
            })
        });
        let mut sender = match survivor {
            None => {
                let mut sender = listener.accept_sender_until(deadline()).unwrap().unwrap();
                let _ = allowed(sender.try_send(b"a good one"), "after a handshake");
                sender
            }
            // The sender may have detected the end already.
            Some(Err(error)) => panic!("{error}"),
            Some(Ok(mut sender)) => {
                assert!(sender.wait_released_until(deadline()).is_err_and(|error| error.is_peer_died()));
                assert!(sender.resume_until(deadline()).unwrap());
                sender
            }
        };
        // As in `serve_receiver`: an accepted peer has gone first.
        let drained = sender.wait_released_until(deadline());
        use_sender(&mut sender, "after a handshake");
        drop((sender, listener));
        if let Ok(received) = peers.join().unwrap() {
            assert!(received && drained.is_ok_and(|drained| drained), "the correct peer is served");
        }
    });
}

/// Connects as `role`, mostly, acts by the program, and closes.
fn act_as_peer(path: &std::path::Path, role: u32, mut program: Program) {
    let socket = raw_connect(path);
    let mut offered = None;
    let mut doorbells: Vec<OwnedFd> = Vec::new();
    let mut shown: Vec<Shown> = Vec::new();
    while !program.is_over() {
        match program.byte() % 8 {
            // The next correct packet, with some words altered.
            0..=2 => {
                raw_send(&socket, &altered(packet(HELLO, role), &mut program), &[]);
                if !receive_offer(&socket, &mut offered) {
                    return;
                }
            }
            3 | 4 if role == SENDER => {
                // Answers a survivor with its own offer, others with a lane.
                let mut answer = offered.clone().unwrap_or_else(producer_packet);
                answer[..4].copy_from_slice(&PRODUCER.to_le_bytes());
                let mut page = producer_page();
                page[64..80].copy_from_slice(&answer[24..40]);
                let page = Shown::new(65536, &altered(page, &mut program), control_seals());
                let data = any_descriptor(&mut program, good_data);
                let mut fds = vec![page.fd.try_clone().unwrap(), any_descriptor(&mut program, good_doorbell)];
                fds.extend(offered.is_none().then_some(data));
                send_packet(&socket, altered(answer, &mut program), fds, &mut program);
                shown.push(page);
                if !receive_offer(&socket, &mut offered) {
                    return;
                }
            }
            3 | 4 => {
                if offered.is_none() && !receive_offer(&socket, &mut offered) {
                    return;
                }
                let Some(offered) = &offered else { continue };
                let mut page = preamble(pelton_lane::MAGIC_CONSUMER);
                page.resize(384, 0);
                page[128..136].copy_from_slice(&offered[48..56]);
                let consumer = Shown::new(65536, &altered(page, &mut program), control_seals());
                let page = altered(preamble(pelton_lane::MAGIC_RECEIVER), &mut program);
                let receiver = any_descriptor(&mut program, || memfd(65536, &page, control_seals()));
                let fds = vec![consumer.fd.try_clone().unwrap(), receiver, any_descriptor(&mut program, good_doorbell)];
                send_packet(&socket, altered(packet(CONSUMER, 0), &mut program), fds, &mut program);
                shown.push(consumer);
            }
            5 => {
                raw_send(&socket, &altered(packet(READY, 0), &mut program), &[]);
                if !receive_offer(&socket, &mut offered) {
                    return;
                }
            }
            6 => {
                let doorbell = good_doorbell();
                let kind = program.byte().into();
                raw_send(
                    &socket,
                    &altered(packet(kind, role), &mut program),
                    &vec![doorbell.as_fd(); program.below(65)],
                );
                doorbells.push(doorbell);
            }
            _ => {
                let any = program.bytes(120);
                raw_send(&socket, any, &[]);
            }
        }
        // It continues to write to all that it has shared.
        for shown in &shown {
            let word = shown.word(8 * program.below(64));
            word.store(
                program.lie(word.load(std::sync::atomic::Ordering::Relaxed)),
                std::sync::atomic::Ordering::Release,
            );
        }
    }
}

/// A copy, altered in the minority of the cases.
fn altered(mut bytes: Vec<u8>, program: &mut Program) -> Vec<u8> {
    for _ in 0..program.byte().saturating_sub(200) / 16 {
        let at = program.below(bytes.len() / 8) * 8;
        let word = u64::from_le_bytes(*bytes[at..].first_chunk().unwrap());
        bytes[at..at + 8].copy_from_slice(&program.lie(word).to_le_bytes());
    }
    bytes
}

fn any_descriptor(program: &mut Program, good: impl FnOnce() -> OwnedFd) -> OwnedFd {
    let sizes = [0, 8, 4096, 65536, 1 << 20];
    match program.byte() {
        240.. => {
            memfd(program.of(&sizes), &producer_page(), SealFlags::from_bits_truncate((program.byte() & 0x1f).into()))
        }
        235.. => a_file(),
        230.. => a_pipe(),
        225.. => seqpacket(),
        220.. => an_o_path(),
        215.. => good_doorbell(),
        210.. => good_data(),
        205.. => good_page(),
        _ => good(),
    }
}

/// Sends them, or more or fewer.
fn send_packet(socket: &OwnedFd, bytes: Vec<u8>, mut fds: Vec<OwnedFd>, program: &mut Program) {
    match program.byte() {
        250.. => fds.clear(),
        245.. => fds.truncate(1),
        240.. => fds.extend((0..60).map(|_| good_doorbell())),
        _ => {}
    }
    let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    raw_send(socket, &bytes, &fds);
}

/// Receives an offer, if there is one; false when the other side has refused.
fn receive_offer(socket: &OwnedFd, offered: &mut Option<Vec<u8>>) -> bool {
    // The other side may wait for another packet than this one expects: then there is none.
    if !pelton_testkit::readable_until(socket.as_fd(), Instant::now() + std::time::Duration::from_millis(20)) {
        return true;
    }
    let (bytes, fds) = raw_receive(socket);
    if [PRODUCER, CONSUMER].contains(&kind_of(&bytes)) && !fds.is_empty() && bytes.len() >= 80 {
        *offered = Some(bytes.clone());
    }
    !bytes.is_empty() && kind_of(&bytes) != REFUSED
}
