//! Who is killed or stopped: a forked child, what it notes in a page that its parent reads, and how they meet.

use super::*;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize};
use support::{DEADLINE, kernel};

/// What children write and the parent reads, also after their death.
#[derive(Default)]
pub struct Shared {
    /// Taken by the victim since it began to count, and at which it is to end.
    pub steps: AtomicU64,
    pub target: AtomicU64,
    pub stops: AtomicBool,
    /// The name of the last step; a literal is at the same address in every process forked.
    name: AtomicPtr<u8>,
    name_bytes: AtomicUsize,
    /// Whether it has come to have a role.
    pub claimed: AtomicBool,
    pub panicked: AtomicU64,
    /// Messages before this number are sent, because `send` has returned.
    pub committed: AtomicU64,
    /// Messages before this number have been seen by the victim, and before that one released.
    pub seen: AtomicU64,
    pub released: AtomicU64,
    /// By the successor, where that is a process of its own: the first and the one after the last that it received.
    pub first: AtomicU64,
    pub next: AtomicU64,
}

pub fn shared() -> &'static Shared {
    static SHARED: std::sync::OnceLock<&'static Shared> = std::sync::OnceLock::new();
    SHARED.get_or_init(|| {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping, aligned and large enough, zero as every field may be, never unmapped.
        unsafe {
            let page = mmap_anonymous(std::ptr::null_mut(), 4096, protection, MapFlags::SHARED).unwrap();
            &*page.cast::<Shared>()
        }
    })
}

impl Shared {
    pub fn begin(&self, target: u64, stops: bool) {
        let zero = [&self.steps, &self.panicked, &self.committed, &self.seen, &self.released, &self.first, &self.next];
        zero.iter().for_each(|word| word.store(0, SeqCst));
        self.claimed.store(false, SeqCst);
        self.target.store(target, SeqCst);
        self.stops.store(stops, SeqCst);
    }

    /// The name of the last step.
    pub fn step(&self) -> &'static str {
        let (name, bytes) = (self.name.load(SeqCst), self.name_bytes.load(SeqCst));
        if name.is_null() {
            return "none";
        }
        // SAFETY: a literal's, in the victim and so here.
        unsafe { std::str::from_utf8_unchecked(std::slice::from_raw_parts(name, bytes)) }
    }
}

pub fn take_step(name: &'static str) {
    let shared = shared();
    let steps = shared.steps.fetch_add(1, SeqCst) + 1;
    shared.name.store(name.as_ptr().cast_mut(), SeqCst);
    shared.name_bytes.store(name.len(), SeqCst);
    if ["sender: claimed", "receiver: claimed"].contains(&name) {
        shared.claimed.store(true, SeqCst);
    }
    if steps == shared.target.load(SeqCst) {
        end_this_process(if shared.stops.load(SeqCst) { libc::SIGSTOP } else { libc::SIGKILL });
    }
}

/// So that nothing runs after it.
fn end_this_process(signal: libc::c_int) {
    // SAFETY: no pointers.
    unsafe { libc::kill(libc::getpid(), signal) };
}

/// A child's way to its parent.
pub struct Inside {
    to_peer: OwnedFd,
    from_peer: OwnedFd,
}

impl Inside {
    /// Waits for the parent to come to the same place.
    pub fn synchronize(&self) {
        rustix::io::write(&self.to_peer, b"x").unwrap();
        if rustix::io::read(&self.from_peer, &mut [0]) != Ok(1) {
            std::process::exit(3);
        }
    }

    /// From here on the steps count.
    pub fn count(&self) {
        pelton::failpoints::set(take_step);
    }

    pub fn count_if(&self, yes: bool) {
        if yes {
            self.count();
        }
    }
}

pub struct Child {
    pub pid: libc::pid_t,
    pub to_peer: OwnedFd,
    from_peer: OwnedFd,
}

/// How a child ends that has done everything.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Last {
    /// As at any step: killed, with what it has still in use.
    Killed,
    /// Well.
    Exit,
}

pub fn fork<R>(last: Last, body: impl FnOnce(&Inside) -> R) -> Child {
    let flags = rustix::pipe::PipeFlags::CLOEXEC;
    let ((from_peer, to_peer), (of_child, to_parent)) =
        (rustix::pipe::pipe_with(flags).unwrap(), rustix::pipe::pipe_with(flags).unwrap());
    // What is printed is not to be printed twice.
    std::io::Write::flush(&mut std::io::stdout()).unwrap();
    // SAFETY: this program has one thread, so the child may do everything.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid != 0 {
        drop((from_peer, to_parent));
        return Child { pid, to_peer, from_peer: of_child };
    }
    drop((to_peer, of_child));
    // SAFETY: no pointers. A child does not outlive the parent, nor a hang.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::alarm(DEADLINE.as_secs() as u32);
    }
    let done = catch_unwind(AssertUnwindSafe(|| {
        let kept = body(&Inside { to_peer: to_parent, from_peer });
        if last == Last::Killed {
            end_this_process(libc::SIGKILL);
        }
        drop(kept);
    }));
    if done.is_err() {
        shared().panicked.store(1, SeqCst);
    }
    // SAFETY: ends this process at once, with none of the parent's clean-up.
    unsafe { libc::_exit(done.is_err().into()) }
}

impl Child {
    /// Waits until the child meets here.
    #[track_caller]
    pub fn wait_for_child(&self) {
        readable(self.from_peer.as_fd());
        assert_eq!(rustix::io::read(&self.from_peer, &mut [0]), Ok(1), "the child ended before it met");
    }

    /// Lets it go on.
    pub fn go(&self) {
        rustix::io::write(&self.to_peer, b"x").unwrap();
    }

    pub fn state(&self) -> char {
        state_of(self.pid)
    }

    /// Until it has ended, or `asleep`; `look`s at a stopped one before it goes on.
    pub fn watch(&self, asleep: bool, look: &mut dyn FnMut()) {
        let until = deadline();
        loop {
            match self.state() {
                'Z' => return,
                'S' if asleep => return,
                'T' => {
                    look();
                    // SAFETY: no pointers.
                    unsafe { libc::kill(self.pid, libc::SIGCONT) };
                    while self.state() == 'T' {}
                }
                _ => std::thread::sleep(Duration::from_micros(50)),
            }
            assert!(Instant::now() < until, "the child hangs");
        }
    }

    /// Its end; how, by the system's word.
    pub fn wait(mut self) -> libc::c_int {
        self.watch(false, &mut || ());
        let mut status = 0;
        // SAFETY: the kernel writes one integer.
        assert_eq!(unsafe { libc::waitpid(self.pid, &mut status, 0) }, self.pid);
        self.pid = 0;
        status
    }

    #[track_caller]
    pub fn wait_well(self) {
        assert_eq!(self.wait(), 0, "a child did not end well");
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if self.pid != 0 {
            // SAFETY: a child of ours that has not been waited for; nothing is asked about it.
            unsafe {
                libc::kill(self.pid, libc::SIGKILL);
                libc::waitpid(self.pid, std::ptr::null_mut(), 0);
            }
        }
    }
}

/// The state of a process that has not been waited for.
pub fn state_of(pid: libc::pid_t) -> char {
    kernel::state_of(pid as u32).unwrap()
}
