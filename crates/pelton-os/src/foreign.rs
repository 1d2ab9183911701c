//! Opening the files of other processes by /proc/PID/fd. To open a file may block for ever (a file server that does not
//! reply), so a child does it, with a deadline; and as root the child first takes the rights of the file's process.

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd as _, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// The type of the file systems in memory, memfds' too.
const TMPFS_MAGIC: i64 = 0x0102_1994;
/// The seals of each segment (spec/layout.md): its size cannot change.
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// The user and the group with whose rights to open files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Credentials {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// A sealed memfd, open for reading, or why it is not.
pub type ForeignFile = std::result::Result<File, String>;

/// What the child reports for a file that it does not pass.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
enum Problem {
    OtherKind = -1,
    Unsealed = -2,
    OtherMemory = -3,
}

impl Problem {
    fn text(code: i32) -> String {
        match code {
            code if code == Problem::OtherKind as i32 => "it is not a memfd".to_owned(),
            code if code == Problem::Unsealed as i32 => "its size is not sealed".to_owned(),
            code if code == Problem::OtherMemory as i32 => "it is not in ordinary memory".to_owned(),
            errno => format!("opening it: {}", std::io::Error::from_raw_os_error(errno)),
        }
    }
}

/// Opens these paths for reading, in their order, and returns only sealed memfds. A path that does not open within
/// `timeout` is given up. Where there are `credentials`, the child has the rights of that user alone.
pub fn open_memfds(paths: &[CString], credentials: Option<Credentials>, timeout: Duration) -> Vec<ForeignFile> {
    let mut found = Vec::with_capacity(paths.len());
    while found.len() < paths.len() {
        let before = found.len();
        if let Err(error) = open_some(&paths[before..], credentials, timeout, &mut found) {
            found.push(Err(format!("starting a process that opens it: {error}")));
        }
    }
    found
}

/// As [`open_memfds`], until the first path that does not open in time.
fn open_some(
    paths: &[CString],
    credentials: Option<Credentials>,
    timeout: Duration,
    found: &mut Vec<ForeignFile>,
) -> std::io::Result<()> {
    let (here, there) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    // SAFETY: the child calls only functions that are safe after a fork, allocates nothing, and does not return.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: as above.
        unsafe { in_child(paths, credentials, there.as_raw_fd()) }
    }
    if pid < 0 {
        return Err(std::io::Error::last_os_error());
    }
    drop(there);
    let mut deadline = Instant::now() + timeout;
    for _ in paths {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = rustix::event::Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let ready = rustix::io::retry_on_intr(|| poll(&mut [PollFd::new(&here, PollFlags::IN)], Some(&left)))?;
        if ready == 0 {
            found.push(Err(format!(
                "it did not open within {} ms: its file server does not reply",
                timeout.as_millis()
            )));
            break;
        }
        match receive(here.as_raw_fd())? {
            Some(file) => found.push(file),
            None => {
                found.push(Err("the process that opens it ended".to_owned()));
                break;
            }
        }
        deadline = Instant::now() + timeout;
    }
    // SAFETY: the child of this process, which nothing else waits for. A child that hangs in a system call ends by the
    // signal, but perhaps not at once: only an ended child is waited for here.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        let until = Instant::now() + timeout;
        while libc::waitpid(pid, std::ptr::null_mut(), libc::WNOHANG) == 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
    Ok(())
}

/// # Safety
/// In a forked child. `socket` is open.
unsafe fn in_child(paths: &[CString], credentials: Option<Credentials>, socket: RawFd) -> ! {
    // SAFETY: system calls alone, with arguments that the parent made.
    unsafe {
        // The child of a parent that was killed ends too.
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        if let Some(Credentials { uid, gid }) = credentials {
            // By number: the functions of the C library would signal threads, which a child does not have.
            let failed = libc::syscall(libc::SYS_setgroups, 0, 0) != 0
                || libc::syscall(libc::SYS_setresgid, gid, gid, gid) != 0
                || libc::syscall(libc::SYS_setresuid, uid, uid, uid) != 0;
            if failed {
                libc::_exit(1);
            }
            // The change of the user cleared it.
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        }
        for path in paths {
            let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY;
            let fd = libc::open(path.as_ptr(), flags);
            let code = if fd < 0 { *libc::__errno_location() } else { problem(fd) };
            if !send(socket, code, (code == 0).then_some(fd)) {
                break;
            }
            if fd >= 0 {
                libc::close(fd);
            }
        }
        libc::_exit(0)
    }
}

/// What is wrong with the file; 0: it is a sealed memfd. F_GET_SEALS first, because it makes no request to a file
/// server.
///
/// # Safety
/// `fd` is open.
unsafe fn problem(fd: RawFd) -> i32 {
    // SAFETY: the descriptor is open, and the structure is a local variable.
    unsafe {
        let seals = libc::fcntl(fd, libc::F_GET_SEALS);
        if seals < 0 {
            return Problem::OtherKind as i32;
        }
        if seals & SEALS != SEALS {
            return Problem::Unsealed as i32;
        }
        let mut system: libc::statfs = std::mem::zeroed();
        if libc::fstatfs(fd, &mut system) != 0 || system.f_type as i64 != TMPFS_MAGIC {
            return Problem::OtherMemory as i32;
        }
    }
    0
}

/// Space for one descriptor in a message.
#[repr(align(8))]
struct Control([u8; 32]);

/// # Safety
/// Both descriptors are open.
unsafe fn send(socket: RawFd, code: i32, fd: Option<RawFd>) -> bool {
    let mut bytes = code.to_ne_bytes();
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = Control([0; 32]);
    // SAFETY: the message refers to the local variables, and the control bytes have the size that CMSG_SPACE states.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&mut part, 1);
        if let Some(fd) = fd {
            message.msg_control = control.0.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(4) as _;
            let header = libc::CMSG_FIRSTHDR(&message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(4) as _;
            libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(fd);
        }
        libc::sendmsg(socket, &message, libc::MSG_NOSIGNAL) == bytes.len() as isize
    }
}

/// The next report of the child; `None` once it has ended.
fn receive(socket: RawFd) -> std::io::Result<Option<ForeignFile>> {
    let mut bytes = [0; 4];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = Control([0; 32]);
    // SAFETY: the message refers to the local variables; the kernel has just made the descriptor that is taken over.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&mut part, 1);
        (message.msg_control, message.msg_controllen) = (control.0.as_mut_ptr().cast(), control.0.len() as _);
        let received = libc::recvmsg(socket, &mut message, libc::MSG_CMSG_CLOEXEC);
        match received {
            0 => return Ok(None),
            -1 => return Err(std::io::Error::last_os_error()),
            _ => {}
        }
        let header = libc::CMSG_FIRSTHDR(&message);
        if header.is_null() {
            let code = i32::from_ne_bytes(bytes);
            // Without a code, the kernel dropped the descriptor.
            let code = if code == 0 { libc::EMFILE } else { code };
            return Ok(Some(Err(Problem::text(code))));
        }
        let fd = OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned());
        Ok(Some(Ok(fd.into())))
    }
}
