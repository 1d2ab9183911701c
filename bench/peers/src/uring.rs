//! A connected Unix socket by io_uring, as its manual pages recommend for this use: a ring of one thread with deferred
//! task work (IORING_SETUP_SINGLE_ISSUER, IORING_SETUP_DEFER_TASKRUN), one multishot request that receives into
//! provided buffers, and one system call that sends several requests. No kernel thread polls (IORING_SETUP_SQPOLL):
//! there are two processors, and both are busy. Waiting is in the kernel.

use std::{
    cell::RefCell,
    collections::VecDeque,
    os::fd::{AsRawFd, OwnedFd},
    ptr::NonNull,
    rc::Rc,
    sync::atomic::{AtomicU16, Ordering},
};

use anyhow::{Context, Result, bail, ensure};
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use pelton_bench::parameters::{Job, Role, Wait};

/// The request of a completion.
const SEND: u64 = 1;
const RECEIVE: u64 = 2;
const GROUP: u16 = 0;
/// More entries than the code fills between two system calls.
const ENTRIES: u32 = 256;

/// A socket's two directions, by one ring: in a round trip one system call sends and waits for the answer.
pub type Shared = Rc<RefCell<Uring>>;

/// The ring, the socket, and the buffers it receives in.
pub struct Uring {
    ring: IoUring,
    fd: OwnedFd,
    buffers: Buffers,
    /// Received buffers, and the number of their bytes
    came: VecDeque<(u16, usize)>,
    receives: bool,
    is_over: bool,
    /// Send requests without a completion yet
    sending: usize,
    /// The bytes of their messages: a short send is an error
    wanted: i64,
}

/// The ring of a connected socket.
pub fn open(job: &Job, fd: OwnedFd, buffers: u16, buffer_bytes: usize) -> Result<Shared> {
    ensure!(job.wait == Wait::Block, "it waits in the kernel, as a ring of deferred task work does: write block");
    let ring = IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .build(ENTRIES)
        .context("making an io_uring: the kernel or its settings refuse it")?;
    let buffers = Buffers::new(&ring, buffers, buffer_bytes)?;
    Ok(Rc::new(RefCell::new(Uring {
        ring,
        fd,
        buffers,
        came: VecDeque::new(),
        receives: false,
        is_over: false,
        sending: 0,
        wanted: 0,
    })))
}

impl Uring {
    /// Prepares a request to send those bytes, which stay where they are until [`Uring::sent`]. The next system call
    /// submits it. `more`: another follows, which must not overtake this one.
    ///
    /// # Safety
    /// The bytes are neither changed nor freed before that.
    pub unsafe fn send(&mut self, bytes: &[u8], more: bool) -> Result<()> {
        let fd = types::Fd(self.fd.as_raw_fd());
        let flags = libc::MSG_WAITALL | libc::MSG_NOSIGNAL;
        let mut entry = opcode::Send::new(fd, bytes.as_ptr(), bytes.len() as u32).flags(flags).build().user_data(SEND);
        if more {
            entry = entry.flags(squeue::Flags::IO_LINK | squeue::Flags::SKIP_SUCCESS);
        } else {
            self.sending += 1;
            self.wanted = bytes.len() as i64;
        }
        // SAFETY: the caller keeps the bytes, and the descriptor is ours.
        unsafe { self.ring.submission().push(&entry) }.context("more requests than the ring has room for")
    }

    /// Waits until all requested bytes have been sent.
    pub fn sent(&mut self) -> Result<()> {
        while self.sending > 0 {
            self.enter(1)?;
        }
        Ok(())
    }

    /// Submits the requests to the kernel, without waiting.
    pub fn submit(&mut self) -> Result<()> {
        self.enter(0)
    }

    fn enter(&mut self, want: usize) -> Result<()> {
        match self.ring.submit_and_wait(want) {
            Ok(_) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            Err(error) => return Err(error).context("io_uring_enter"),
        }
        for done in self.ring.completion() {
            let result = done.result();
            match done.user_data() {
                SEND => {
                    if result < 0 {
                        return Err(std::io::Error::from_raw_os_error(-result)).context("sending");
                    }
                    ensure!(result as i64 == self.wanted, "{result} bytes went out, wanted {}", self.wanted);
                    self.sending -= 1;
                }
                _ => {
                    self.receives &= cqueue::more(done.flags());
                    match result {
                        0 => self.is_over = true,
                        1.. => {
                            let buffer = cqueue::buffer_select(done.flags()).context("it came in no buffer")?;
                            self.came.push_back((buffer, result as usize));
                        }
                        // All buffers are full: it continues when they are given back.
                        _ if result == -libc::ENOBUFS => {}
                        _ => return Err(std::io::Error::from_raw_os_error(-result)).context("receiving"),
                    }
                }
            }
        }
        Ok(())
    }

    /// The next received buffer, waiting for it; the caller returns it by [`Uring::give_back`].
    #[inline]
    pub fn receive(&mut self) -> Result<(u16, usize)> {
        loop {
            if let Some(came) = self.came.pop_front() {
                return Ok(came);
            }
            if self.is_over {
                bail!("the sender is gone before its last message");
            }
            if !self.receives {
                let entry = opcode::RecvMulti::new(types::Fd(self.fd.as_raw_fd()), GROUP).build().user_data(RECEIVE);
                // SAFETY: its buffers are the provided ones, which live as long as the ring.
                unsafe { self.ring.submission().push(&entry) }.context("no room for a request")?;
                self.receives = true;
            }
            self.enter(1)?;
        }
    }

    /// The bytes in that buffer: valid until the buffer is given back, also while an answerer sends them by this ring.
    #[inline]
    pub fn bytes(&self, buffer: u16, bytes: usize) -> *const [u8] {
        &raw const self.buffers.memory[buffer as usize * self.buffers.bytes..][..bytes]
    }

    /// Provides the buffer to the kernel again.
    #[inline]
    pub fn give_back(&mut self, buffer: u16) {
        self.buffers.provide(buffer);
    }
}

/// The sending endpoint's buffer: one half gathers messages while the kernel sends the other.
pub struct Halves {
    socket: Shared,
    halves: [Vec<u8>; 2],
    enter: usize,
    /// The ring receives nothing, so no later system call submits the requests
    submits: bool,
}

impl Halves {
    /// Of so many bytes each.
    pub fn new(socket: Shared, bytes: usize, job: &Job) -> Halves {
        let half = || Vec::with_capacity(bytes);
        Halves { socket, halves: [half(), half()], enter: 0, submits: job.role == Role::Sender }
    }

    /// The half that gathers; its capacity is not exceeded.
    #[inline]
    pub fn held(&mut self) -> &mut Vec<u8> {
        &mut self.halves[self.enter]
    }

    /// Sends the gathered bytes by one system call: cut into pieces of these sizes, of which none overtakes another.
    pub fn pass_on(&mut self, pieces: impl ExactSizeIterator<Item = usize>) -> Result<()> {
        self.send(pieces, true)
    }

    /// The same; the next receive submits it if there is one, else this call waits for all of it.
    pub fn flush(&mut self, pieces: impl ExactSizeIterator<Item = usize>) -> Result<()> {
        if !self.held().is_empty() {
            self.send(pieces, self.submits)?;
        }
        // A send into a full socket continues only while this thread is in the ring: its work is deferred until then.
        if self.submits { self.settle() } else { Ok(()) }
    }

    /// Waits until all is sent.
    pub fn settle(&mut self) -> Result<()> {
        self.socket.borrow_mut().sent()
    }

    fn send(&mut self, pieces: impl ExactSizeIterator<Item = usize>, submits: bool) -> Result<()> {
        let mut socket = self.socket.borrow_mut();
        socket.sent()?;
        let (mut rest, last) = (&self.halves[self.enter][..], pieces.len() - 1);
        for (index, bytes) in pieces.enumerate() {
            let (piece, behind) = rest.split_at(bytes);
            // SAFETY: this half is next touched after the wait for the other half, which was sent later.
            unsafe { socket.send(piece, index < last) }?;
            rest = behind;
        }
        if submits {
            socket.submit()?;
        }
        self.enter ^= 1;
        self.halves[self.enter].clear();
        Ok(())
    }
}

impl Drop for Halves {
    fn drop(&mut self) {
        // Their memory must outlive the requests.
        let _ = self.settle();
    }
}

/// Buffers that the kernel chooses from, and the ring that provides them.
struct Buffers {
    entries: NonNull<types::BufRingEntry>,
    memory: Vec<u8>,
    bytes: usize,
    count: u16,
    tail: u16,
}

impl Buffers {
    fn new(ring: &IoUring, count: u16, bytes: usize) -> Result<Buffers> {
        assert!(count.is_power_of_two());
        let layout = std::alloc::Layout::from_size_align(count as usize * 16, 4096)?;
        // SAFETY: the layout is not of size zero.
        let entries = unsafe { std::alloc::alloc_zeroed(layout) }.cast::<types::BufRingEntry>();
        let entries = NonNull::new(entries).context("no memory")?;
        // SAFETY: so many entries are there, aligned to a page, and never freed: the kernel may use them as long as
        // the ring lives.
        unsafe { ring.submitter().register_buf_ring_with_flags(entries.as_ptr() as u64, count, GROUP, 0) }
            .context("registering buffers: it takes Linux 5.19")?;
        let mut buffers = Buffers { entries, memory: vec![0; count as usize * bytes], bytes, count, tail: 0 };
        (0..count).for_each(|buffer| buffers.provide(buffer));
        Ok(buffers)
    }

    fn provide(&mut self, buffer: u16) {
        let at = self.memory[buffer as usize * self.bytes..].as_mut_ptr();
        let slot = (self.tail & (self.count - 1)) as usize;
        // SAFETY: the slot is one of `count`, and the kernel does not read it before the tail is past it.
        let entry = unsafe { &mut *self.entries.as_ptr().add(slot) };
        entry.set_addr(at as u64);
        entry.set_len(self.bytes as u32);
        entry.set_bid(buffer);
        self.tail = self.tail.wrapping_add(1);
        // SAFETY: the tail lies in the first entry, and is aligned; the kernel loads it with acquire.
        let tail = unsafe { &*types::BufRingEntry::tail(self.entries.as_ptr()).cast::<AtomicU16>() };
        tail.store(self.tail, Ordering::Release);
    }
}
