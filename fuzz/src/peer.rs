//! A hostile peer of a channel, after a correct handshake.

use crate::program::{Over, Program};
use crate::raw::{CAPACITY, DESCRIPTORS, RawPeer, good_doorbell, packet, raw_try_send, use_receiver, use_sender};
use pelton::{Error, Options};
use pelton_testkit::{TestDir, deadline, descriptors, eventually_is};
use rustix::net::{Shutdown, shutdown};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// The peer acts by the program, repeatedly, while the other side makes every call that it has.
pub fn connected(program: &[u8]) {
    let before = descriptors();
    let mut program = Program(program);
    let (receives, turns) = (program.byte() % 2 == 0, 1 + program.below(4));
    let place = TestDir::unwatched();
    let is_over = AtomicBool::new(false);
    let misbehave = |peer: RawPeer| {
        rustix::io::ioctl_fionbio(&peer.socket, true).unwrap();
        rustix::io::ioctl_fionbio(&peer.doorbell, true).unwrap();
        let mut progress = 0;
        loop {
            let mut again = Program(program.0);
            while !again.is_over() {
                let is_connected = act(&peer, receives, &mut progress, &mut again);
                if !is_connected || is_over.load(Ordering::Relaxed) {
                    return;
                }
            }
            if program.is_over() {
                return;
            }
        }
    };
    std::thread::scope(|scope| {
        let listener = Options::new().capacity(CAPACITY).listen(&place.name()).unwrap();
        let socket = place.socket();
        let peer = move || misbehave(if receives { RawPeer::sender(&socket) } else { RawPeer::receiver(&socket) });
        let peer = scope.spawn(peer);
        let over = Over(&is_over);
        if receives {
            let mut receiver = listener.accept_receiver_until(deadline()).unwrap().unwrap();
            let held = receiver.receive_until(Instant::now()).ok().flatten().map(|message| message.hold());
            (0..turns).for_each(|_| use_receiver(&mut receiver, None, "scribbled"));
            use_receiver(&mut receiver, held, "scribbled");
        } else {
            let mut sender = listener.accept_sender_until(deadline()).unwrap().unwrap();
            let doorbell = good_doorbell();
            for _ in 0..turns {
                use_sender(&mut sender, "scribbled");
                let sent = sender.send_with_descriptors_until(b"x", &[doorbell.as_fd()], Instant::now());
                assert!(!matches!(sent, Err(Error::System { .. })), "{sent:?}");
            }
        }
        drop(over);
        // The scope waits for the closure only; this waits for the thread's exit: see `lane`.
        peer.join().unwrap();
    });
    drop(place);
    eventually_is(before, "descriptors", descriptors);
}

/// One random action; false when the peer has gone. `progress`: how many messages it has put into the lane.
fn act(peer: &RawPeer, sends: bool, progress: &mut u32, program: &mut Program) -> bool {
    // Fields with a meaning, of the pages; of the data, the offsets near records.
    const FIELDS: [usize; 16] = [0, 64, 72, 80, 128, 136, 144, 152, 160, 176, 200, 256, 264, 384, 392, 400];
    match program.byte() % 12 {
        0..=4 => {
            let segment = program.below(peer.shown.len());
            let is_data = segment + 1 == peer.shown.len();
            let words = if program.byte() % 4 == 0 { peer.shown[segment].words() } else { 32 };
            let at = if is_data { 8 * program.below(words) } else { program.of(&FIELDS) };
            let word = peer.shown[segment].word(at);
            word.store(program.lie(word.load(Ordering::Relaxed)), Ordering::Release);
        }
        // A correct message of 8 bytes, as a base for lies.
        5..=7 if sends => {
            peer.put(*progress as usize * 16 % CAPACITY as usize, *progress + 1, 8);
            *progress += 1;
            peer.ring();
        }
        5..=7 | 8 => peer.ring(),
        9 => {
            // A message that will arrive, has arrived, or never will.
            let mut bytes = packet(DESCRIPTORS, 0);
            bytes[72..76].copy_from_slice(&(program.lie((*progress).into()) as u32).to_le_bytes());
            let fds = vec![peer.own_doorbell.as_fd(); program.below(65)];
            raw_try_send(&peer.socket, &bytes, &fds);
        }
        10 => {
            raw_try_send(&peer.socket, program.bytes(100), &[]);
        }
        _ => match program.byte() {
            0..8 => return shutdown(&peer.socket, Shutdown::Both).is_err(),
            8..12 => {
                let _ = shutdown(&peer.socket, Shutdown::Read);
            }
            // Until the socket is full.
            12..32 => {
                let _ = rustix::io::write(&peer.doorbell, &(u64::MAX - 1).to_ne_bytes());
            }
            // Its own doorbell.
            32..48 => rustix::io::ioctl_fionbio(&peer.own_doorbell, false).unwrap(),
            _ => {}
        },
    }
    true
}
