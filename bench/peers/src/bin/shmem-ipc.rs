//! shmem-ipc: a ring of equal items in sealed memory, and two eventfds.
//!
//! Its ring carries items of one type: here arrays of as many bytes as the job's messages have, so messages are of one
//! size. As its documentation recommends for performance: `send_raw` and `receive_raw`, which write and read in place.
//!
//! In a stream a call writes 64 messages, or as many as fit. A receiving call takes as many as there are, up to 64,
//! and copies each out. A call costs a read-modify-write of the count that both sides share, and one system call on
//! the eventfd when the ring was empty or full. In all other workloads a call has one message. The sides wait by
//! `block_until_writable` and `block_until_readable` (`--wait block`), or poll (`--wait spin`). The descriptors go
//! over a Unix socket, as its documentation proposes.
//!
//! It uses all of its ring in turn, which is of 512 KiB, the best of the tested sizes (messages of 256 bytes, one way,
//! on two busy processors, medians of 3 to 8 runs): 128 KiB 4.5 M/s, 256 KiB 4.8, 512 KiB 7.8, 1 MiB 4.7, 4 MiB 3.4,
//! 16 MiB 2.7, 64 MiB 0.8.

use std::{
    fs::File,
    io::{IoSlice, IoSliceMut},
    os::fd::{AsFd, OwnedFd},
    process::ExitCode,
};

use anyhow::{Context, Result, anyhow};
use pelton_bench::{
    endpoints::{Receiving, Sending, THERE, Transport},
    parameters::Job,
    workloads::{
        self,
        batches::{self, ReceivingBatches, SendingBatches},
    },
};
use pelton_bench_peers::{open_when_there, program, ring_bytes, spins, with_size};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketType, accept, bind, connect, listen, recvmsg, sendmsg, socket,
};
use shmem_ipc::sharedring;

fn main() -> ExitCode {
    program(|job| with_size!(job, part))
}

fn part<const SIZE: usize>(job: &Job) -> Result<()> {
    if job.workload != "stream" {
        return workloads::part::<Shmem<SIZE>>(job);
    }
    batches::part(job, |job| Shmem::<SIZE>::sending(job, THERE), |job| Shmem::<SIZE>::receiving(job, THERE))
}

struct Shmem<const SIZE: usize>;

/// Bytes of a ring, see above.
const RING: u64 = 512 << 10;

fn address(job: &Job, direction: &str) -> Result<SocketAddrUnix> {
    SocketAddrUnix::new(job.directory.join(direction)).context("an address")
}

impl<const SIZE: usize> Transport for Shmem<SIZE> {
    type Sending = Writer<SIZE>;
    type Receiving = Reader<SIZE>;

    /// The receiver creates the ring, and hands out its memory and the two eventfds.
    fn receiving(job: &Job, direction: &str) -> Result<Reader<SIZE>> {
        let items = ring_bytes(job, RING) as usize / SIZE;
        let ring = sharedring::Receiver::<[u8; SIZE]>::new(items).map_err(|e| anyhow!("making the ring: {e}"))?;
        let listener = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None)?;
        bind(&listener, &address(job, direction)?)?;
        listen(&listener, 1)?;
        let peer = accept(&listener)?;
        let fds = [ring.memfd().as_file().as_fd(), ring.empty_signal().as_fd(), ring.full_signal().as_fd()];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        sendmsg(&peer, &[IoSlice::new(b"r")], &mut control, SendFlags::empty())?;
        Ok(Reader { ring, spins: spins(job)? })
    }

    fn sending(job: &Job, direction: &str) -> Result<Writer<SIZE>> {
        let address = address(job, direction)?;
        let peer = open_when_there("the ring", || {
            let peer = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None)?;
            connect(&peer, &address).map(|()| peer)
        })?;
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        recvmsg(&peer, &mut [IoSliceMut::new(&mut [0])], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        let rights = |message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds.collect::<Vec<OwnedFd>>()),
            _ => None,
        };
        let fds: Vec<OwnedFd> = control.drain().filter_map(rights).flatten().collect();
        let [memory, empty, full] = <[OwnedFd; 3]>::try_from(fds).map_err(|_| anyhow!("not three descriptors came"))?;
        let items = ring_bytes(job, RING) as usize / SIZE;
        let ring = sharedring::Sender::open(items, File::from(memory), File::from(empty), File::from(full))
            .map_err(|e| anyhow!("opening the ring: {e}"))?;
        Ok(Writer { ring, spins: spins(job)? })
    }
}

struct Writer<const SIZE: usize> {
    ring: sharedring::Sender<[u8; SIZE]>,
    spins: bool,
}

impl<const SIZE: usize> SendingBatches for Writer<SIZE> {
    #[inline(always)]
    fn send_batch(&mut self, most: usize, mut write: impl FnMut(usize, &mut [u8])) -> Result<usize> {
        loop {
            let mut sent = 0;
            self.ring
                .send_raw(|room, count| {
                    sent = count.min(most);
                    for index in 0..sent {
                        // SAFETY: the ring has space for `count` items, of any bytes, which no other code touches
                        // until they are sent.
                        write(index, unsafe { &mut *room.add(index) });
                    }
                    sent
                })
                .map_err(|e| anyhow!("sending: {e}"))?;
            if sent > 0 {
                return Ok(sent);
            }
            if self.spins {
                std::hint::spin_loop();
            } else {
                self.ring.block_until_writable().map_err(|e| anyhow!("waiting for room: {e}"))?;
            }
        }
    }
}

impl<const SIZE: usize> Sending for Writer<SIZE> {
    #[inline]
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        self.send_batch(1, |_, room| room.copy_from_slice(payload)).map(drop)
    }
}

struct Reader<const SIZE: usize> {
    ring: sharedring::Receiver<[u8; SIZE]>,
    spins: bool,
}

impl<const SIZE: usize> ReceivingBatches for Reader<SIZE> {
    #[inline(always)]
    fn receive_batch(&mut self, most: usize, mut look: impl FnMut(&[u8])) -> Result<usize> {
        loop {
            let mut taken = 0;
            self.ring
                .receive_raw(|items, count| {
                    taken = count.min(most);
                    for index in 0..taken {
                        // SAFETY: `count` items are there, of any bytes, which the sender does not touch until they
                        // are given back.
                        look(unsafe { &*items.add(index) });
                    }
                    taken
                })
                .map_err(|e| anyhow!("receiving: {e}"))?;
            if taken > 0 {
                return Ok(taken);
            }
            if self.spins {
                std::hint::spin_loop();
            } else {
                self.ring.block_until_readable().map_err(|e| anyhow!("waiting for messages: {e}"))?;
            }
        }
    }
}

impl<const SIZE: usize> Receiving for Reader<SIZE> {
    #[inline]
    fn receive<R>(&mut self, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let mut copy = [0; SIZE];
        self.receive_batch(1, |message| copy.copy_from_slice(message))?;
        Ok(look(&copy))
    }
}
