//! shmem-ipc: a ring of equal items in sealed memory, and two eventfds.
//!
//! Its ring carries items of one type: here arrays of as many bytes as the job's messages have, so messages are of one size. As its
//! documentation has it for performance: `send_raw` and `receive_raw`, which write and read in place, with as many items in a call as there
//! are, up to 64; a call costs a read-modify-write of the count that both sides share, and one of eventfd when the ring was empty or full.
//! `block_until_writable` and `block_until_readable` otherwise (`--wait block`), or look again (`--wait spin`). What is sent
//! gathers until 64 are there, or a flush, and is copied into the ring together: a message is copied three times, in all, for one call of 64; alone each
//! would cost a call. The descriptors go over a Unix socket, as its documentation proposes.
//!
//! It goes round all of its ring, which is of 512 KiB, the best of those tried (messages of 256 bytes, one way, on two processors with much else to do, medians of 3 to 8 runs): of 128 KiB 4.5
//! M/s, 256 KiB 4.8, 512 KiB 7.8, 1 MiB 4.7, 4 MiB 3.4, 16 MiB 2.7, 64 MiB 0.8.

use std::{
    fs::File,
    io::{IoSlice, IoSliceMut},
    os::fd::{AsFd, OwnedFd},
    process::ExitCode,
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use pelton_bench::{
    parameters::{Job, Role, Wait},
    side,
    systems::{Receiving, Sending, System},
    workload,
};
use pelton_bench_rivals::{ring_bytes, until_there};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketType, accept, bind, connect, listen, recvmsg, sendmsg, socket,
};
use shmem_ipc::sharedring;

fn main() -> ExitCode {
    side::if_asked(|job| match (job.sizes.min, job.sizes.max) {
        (16, 16) => workload::part::<Shmem<16>>(job),
        (64, 64) => workload::part::<Shmem<64>>(job),
        (256, 256) => workload::part::<Shmem<256>>(job),
        (1024, 1024) => workload::part::<Shmem<1024>>(job),
        (4096, 4096) => workload::part::<Shmem<4096>>(job),
        (65536, 65536) => workload::part::<Shmem<65536>>(job),
        _ => bail!(
            "its items are of one size; it was compiled for 16, 64, 256, 1024, 4096 and 65536 bytes, wanted {}",
            job.sizes
        ),
    })
    .unwrap_or(ExitCode::from(2))
}

struct Shmem<const SIZE: usize>;

/// Bytes of a ring, see above.
const RING: u64 = 512 << 10;
/// Messages that are given in one call.
const BATCH: usize = 64;

fn address(job: &Job, direction: &str) -> Result<SocketAddrUnix> {
    SocketAddrUnix::new(job.directory.join(direction)).context("an address")
}

/// The receiver makes the ring, and hands out its memory and the two signals.
fn receiver<const SIZE: usize>(job: &Job, direction: &str) -> Result<Reader<SIZE>> {
    ensure!(job.wait != Wait::Epoll, "it is not measured with an event loop here: write spin or block");
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
    Ok(Reader { ring, spins: job.wait == Wait::Spin, there: Box::new([[0; SIZE]; BATCH]), next: 0, end: 0 })
}

fn sender<const SIZE: usize>(job: &Job, direction: &str) -> Result<Writer<SIZE>> {
    ensure!(job.wait != Wait::Epoll, "it is not measured with an event loop here: write spin or block");
    let address = address(job, direction)?;
    let peer = until_there("the ring", || {
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
    Ok(Writer { ring, spins: job.wait == Wait::Spin, held: Box::new([[0; SIZE]; BATCH]), count: 0 })
}

impl<const SIZE: usize> System for Shmem<SIZE> {
    type Sending = Writer<SIZE>;
    type Receiving = Reader<SIZE>;

    fn sending(job: &Job) -> Result<Writer<SIZE>> {
        sender(job, "there")
    }

    fn receiving(job: &Job) -> Result<Reader<SIZE>> {
        receiver(job, "there")
    }

    fn both(job: &Job) -> Result<(Writer<SIZE>, Reader<SIZE>)> {
        Ok(match job.role {
            Role::Asker => (sender(job, "there")?, receiver(job, "back")?),
            _ => {
                let reader = receiver(job, "there")?;
                (sender(job, "back")?, reader)
            }
        })
    }
}

struct Writer<const SIZE: usize> {
    ring: sharedring::Sender<[u8; SIZE]>,
    spins: bool,
    held: Box<[[u8; SIZE]; BATCH]>,
    count: usize,
}

impl<const SIZE: usize> Sending for Writer<SIZE> {
    #[inline]
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        self.held[self.count].copy_from_slice(payload);
        self.count += 1;
        if self.count == BATCH { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<()> {
        let mut done = 0;
        while done < self.count {
            let mut sent = 0;
            let held = &self.held[done..self.count];
            self.ring
                .send_raw(|room, count| {
                    sent = held.len().min(count);
                    // SAFETY: there is room for `count` items, which nobody else writes until they are sent.
                    unsafe { std::ptr::copy_nonoverlapping(held.as_ptr(), room, sent) };
                    sent
                })
                .map_err(|e| anyhow!("sending: {e}"))?;
            done += sent;
            if sent == 0 {
                if self.spins {
                    std::hint::spin_loop();
                } else {
                    self.ring.block_until_writable().map_err(|e| anyhow!("waiting for room: {e}"))?;
                }
            }
        }
        self.count = 0;
        Ok(())
    }
}

struct Reader<const SIZE: usize> {
    ring: sharedring::Receiver<[u8; SIZE]>,
    spins: bool,
    there: Box<[[u8; SIZE]; BATCH]>,
    next: usize,
    end: usize,
}

impl<const SIZE: usize> Receiving for Reader<SIZE> {
    #[inline]
    fn receive<R>(&mut self, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        while self.next == self.end {
            (self.next, self.end) = (0, 0);
            let (there, mut taken) = (&mut self.there, 0);
            self.ring
                .receive_raw(|items, count| {
                    taken = count.min(BATCH);
                    // SAFETY: `count` items are there, which nobody writes until they are given back.
                    unsafe { std::ptr::copy_nonoverlapping(items, there.as_mut_ptr(), taken) };
                    taken
                })
                .map_err(|e| anyhow!("receiving: {e}"))?;
            self.end = taken;
            if taken == 0 {
                if self.spins {
                    std::hint::spin_loop();
                } else {
                    self.ring.block_until_readable().map_err(|e| anyhow!("waiting for messages: {e}"))?;
                }
            }
        }
        self.next += 1;
        Ok(look(&self.there[self.next - 1]))
    }
}
