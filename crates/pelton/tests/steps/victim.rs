//! The killed or stopped process: a forked child, its notes in a page that its parent reads, and the synchronisation
//! of the two.

use super::*;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize};
use support::{DEADLINE, kernel, readable_until};

/// Notes that children write and the parent reads, also after their death.
#[derive(Default)]
pub struct Shared {
    /// The steps of the victim since it began to count, and the step at which it kills itself.
    pub steps: AtomicU64,
    pub target: AtomicU64,
    pub stops: AtomicBool,
    /// The name of the last step; a literal is at the same address in every process forked.
    name: AtomicPtr<u8>,
    name_bytes: AtomicUsize,
    /// Whether it has obtained a role.
    pub claimed: AtomicBool,
    pub panicked: AtomicU64,
    /// Messages before this number are sent: `send` has returned.
    pub committed: AtomicU64,
    /// The victim has seen the messages before this number, and released those before the other.
    pub seen: AtomicU64,
    pub released: AtomicU64,
    /// Written by a successor in its own process: the first number that it received, and the one after the last.
    pub first: AtomicU64,
    pub next: AtomicU64,
}

pub fn shared() -> &'static Shared {
    static SHARED: std::sync::OnceLock<&'static Shared> = std::sync::OnceLock::new();
    SHARED.get_or_init(|| {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the mapping is new, aligned and large enough, every field may be zero, and nothing unmaps it.
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
        // SAFETY: the pointer and length are of a literal, at the same address in the victim and here.
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

/// So that no code runs after it.
fn end_this_process(signal: libc::c_int) {
    // SAFETY: no pointers.
    unsafe { libc::kill(libc::getpid(), signal) };
}

/// A child's connection to its parent.
pub struct Inside {
    to_peer: OwnedFd,
    from_peer: OwnedFd,
}

impl Inside {
    /// Waits until the parent reaches the same point.
    pub fn synchronize(&self) {
        rustix::io::write(&self.to_peer, b"x").unwrap();
        if rustix::io::read(&self.from_peer, &mut [0]) != Ok(1) {
            std::process::exit(3);
        }
    }

    /// Steps count from here on.
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

/// The exit of a child that has finished.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Last {
    /// As at any step: killed, with everything still in use.
    Killed,
    /// Success.
    Exit,
}

pub fn fork<R>(last: Last, body: impl FnOnce(&Inside) -> R) -> Child {
    let flags = rustix::pipe::PipeFlags::CLOEXEC;
    let ((from_peer, to_peer), (of_child, to_parent)) =
        (rustix::pipe::pipe_with(flags).unwrap(), rustix::pipe::pipe_with(flags).unwrap());
    // The child must not print buffered output twice.
    std::io::Write::flush(&mut std::io::stdout()).unwrap();
    // SAFETY: this program has one thread, so the child may call anything.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid != 0 {
        drop((from_peer, to_parent));
        return Child { pid, to_peer, from_peer: of_child };
    }
    drop((to_peer, of_child));
    // SAFETY: no pointers. A child must outlive neither the parent nor a hang.
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
    // SAFETY: ends this process at once, without the parent's clean-up.
    unsafe { libc::_exit(done.is_err().into()) }
}

impl Child {
    /// Waits until the child reaches this point.
    #[track_caller]
    pub fn wait_for_child(&self) {
        readable(self.from_peer.as_fd());
        assert_eq!(rustix::io::read(&self.from_peer, &mut [0]), Ok(1), "the child ended before it met");
    }

    /// As [`Child::wait_for_child`], of one that stops on the way: calls `look` at each stop before it continues.
    #[track_caller]
    pub fn watch_until_met(&self, look: &mut dyn FnMut()) {
        while !readable_until(self.from_peer.as_fd(), Instant::now() + Duration::from_micros(50)) {
            self.watch_once(look);
        }
        self.wait_for_child();
    }

    /// Lets it continue.
    pub fn go(&self) {
        rustix::io::write(&self.to_peer, b"x").unwrap();
    }

    pub fn state(&self) -> char {
        state_of(self.pid)
    }

    /// Waits until it has exited, or is `asleep`; calls `look` at each stop before it continues the child.
    pub fn watch(&self, asleep: bool, look: &mut dyn FnMut()) {
        let until = deadline();
        loop {
            match self.state() {
                'Z' => return,
                'S' if asleep => return,
                'T' => self.watch_once(look),
                _ => std::thread::sleep(Duration::from_micros(50)),
            }
            assert!(Instant::now() < until, "the child hangs");
        }
    }

    /// Calls `look` if it is stopped, and continues it then.
    pub fn watch_once(&self, look: &mut dyn FnMut()) {
        if self.state() == 'T' {
            look();
            // SAFETY: no pointers.
            unsafe { libc::kill(self.pid, libc::SIGCONT) };
            while self.state() == 'T' {}
        }
    }

    /// Reaps it; returns the system's status word.
    pub fn wait(mut self) -> libc::c_int {
        self.watch(false, &mut || ());
        let mut status = 0;
        // SAFETY: the kernel writes one integer.
        assert_eq!(unsafe { libc::waitpid(self.pid, &mut status, 0) }, self.pid);
        self.pid = 0;
        status
    }

    #[track_caller]
    pub fn wait_for_success(self) {
        assert_eq!(self.wait(), 0, "a child did not end well");
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if self.pid != 0 {
            // SAFETY: the child is unreaped; no output is requested.
            unsafe {
                libc::kill(self.pid, libc::SIGKILL);
                libc::waitpid(self.pid, std::ptr::null_mut(), 0);
            }
        }
    }
}

/// The state of an unreaped process.
pub fn state_of(pid: libc::pid_t) -> char {
    kernel::state_of(pid as u32).unwrap()
}
