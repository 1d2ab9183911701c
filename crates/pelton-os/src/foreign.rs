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
pub type ForeignFile = std::result::Result<File, NotOpened>;

/// Why a file is not open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotOpened {
    /// The reason.
    pub reason: String,
    /// Whether the file itself is the reason. Otherwise another try, or by another path, may open it.
    pub is_of_file: bool,
}

impl NotOpened {
    fn now(reason: String) -> NotOpened {
        NotOpened { reason, is_of_file: false }
    }
}

/// What the child reports for a file that it does not pass. Below [`RIGHTS`]: it did not get the rights.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
enum Problem {
    OtherKind = -1,
    Unsealed = -2,
    OtherMemory = -3,
}

/// This less an errno: the child could not take the rights of the file's process.
const RIGHTS: i32 = -1000;

impl Problem {
    fn of(code: i32) -> NotOpened {
        let text = match code {
            code if code == Problem::OtherKind as i32 => "it is not a memfd",
            code if code == Problem::Unsealed as i32 => "its size is not sealed",
            code if code == Problem::OtherMemory as i32 => "it is not in ordinary memory",
            errno => return NotOpened::now(format!("opening it: {}", std::io::Error::from_raw_os_error(errno))),
        };
        NotOpened { reason: text.to_owned(), is_of_file: true }
    }
}

/// Opens these paths for reading, in their order, and returns only sealed memfds. A path that does not open within
/// `timeout` is given up; after `deadline` all that are left. Where there are `credentials`, the child has the
/// rights of that user alone.
pub fn open_memfds(
    paths: &[CString],
    credentials: Option<Credentials>,
    timeout: Duration,
    deadline: Instant,
) -> Vec<ForeignFile> {
    let mut found = Vec::with_capacity(paths.len());
    while found.len() < paths.len() {
        let left = &paths[found.len()..];
        let over = match Instant::now() >= deadline {
            true => Err("no time was left for it: other files took too long to open".to_owned()),
            false => open_some(left, credentials, timeout, deadline, &mut found),
        };
        if let Err(reason) = over {
            found.resize_with(paths.len(), || Err(NotOpened::now(reason.clone())));
        }
    }
    found
}

/// A child that opens files. It is killed and waited for at the end, whatever happened.
struct Opener {
    pidfd: OwnedFd,
    /// How long to wait for its end: a child that hangs in a system call ends by the signal, but perhaps not at once.
    timeout: Duration,
}

impl Opener {
    /// Starts it. Its end sends no signal, so that no other part of the program waits for it; and its number belongs
    /// to it until then.
    fn start(
        paths: &[CString],
        credentials: Option<Credentials>,
        socket: RawFd,
        timeout: Duration,
    ) -> std::io::Result<Opener> {
        let mut pidfd: RawFd = -1;
        // SAFETY: as fork(2). The child calls only functions that are safe after a fork, allocates nothing, and does
        // not return.
        unsafe {
            match libc::syscall(libc::SYS_clone, libc::CLONE_PIDFD as libc::c_long, 0, &mut pidfd, 0, 0) {
                0 => in_child(paths, credentials, socket),
                -1 => Err(std::io::Error::last_os_error()),
                _ => Ok(Opener { pidfd: OwnedFd::from_raw_fd(pidfd), timeout }),
            }
        }
    }
}

impl Drop for Opener {
    fn drop(&mut self) {
        let pidfd = self.pidfd.as_raw_fd();
        // SAFETY: the descriptor is open, and the structure is a local variable.
        unsafe {
            libc::syscall(libc::SYS_pidfd_send_signal, pidfd, libc::SIGKILL, 0, 0);
            let _ = is_ready(&self.pidfd, self.timeout);
            let mut info: libc::siginfo_t = std::mem::zeroed();
            libc::waitid(libc::P_PIDFD, pidfd as _, &mut info, libc::WEXITED | libc::WNOHANG | libc::__WALL);
        }
    }
}

/// Whether a descriptor becomes readable in this time.
fn is_ready(fd: &OwnedFd, time: Duration) -> std::io::Result<bool> {
    let until = Instant::now() + time;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = rustix::event::Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&left)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// As [`open_memfds`], until the first path that does not open in time. The error holds for all that are left.
fn open_some(
    paths: &[CString],
    credentials: Option<Credentials>,
    timeout: Duration,
    deadline: Instant,
    found: &mut Vec<ForeignFile>,
) -> std::result::Result<(), String> {
    let failed = |error: std::io::Error| format!("a process that opens it: {error}");
    let (here, there) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(|errno| failed(errno.into()))?;
    let _opener = Opener::start(paths, credentials, there.as_raw_fd(), timeout).map_err(failed)?;
    drop(there);
    for _ in paths {
        let time = timeout.min(deadline.saturating_duration_since(Instant::now()));
        if !is_ready(&here, time).map_err(failed)? {
            let reason = format!("it did not open within {} ms: its file server does not reply", time.as_millis());
            found.push(Err(NotOpened::now(reason)));
            break;
        }
        match receive(here.as_raw_fd()).map_err(failed)? {
            Reply::File(file) => found.push(file),
            Reply::NoRights(errno) => {
                let error = std::io::Error::from_raw_os_error(errno);
                return Err(format!("taking the rights of uid {}: {error}", credentials.map_or(0, |user| user.uid)));
            }
            Reply::Ended => {
                found.push(Err(NotOpened::now("the process that opens it ended".to_owned())));
                break;
            }
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
                send(socket, RIGHTS - *libc::__errno_location(), None);
                libc::_exit(1);
            }
            // No process of that user may trace it: its memory is that of this process.
            libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
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

/// A report of the child.
enum Reply {
    File(ForeignFile),
    NoRights(i32),
    Ended,
}

/// The next report of the child. What it says is not trusted: it had the rights of the file's user.
fn receive(socket: RawFd) -> std::io::Result<Reply> {
    let mut bytes = [0; 4];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = Control([0; 32]);
    // SAFETY: the message refers to the local variables; the kernel has just made the descriptor that is taken over.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&mut part, 1);
        // Space for one descriptor, not for more.
        (message.msg_control, message.msg_controllen) = (control.0.as_mut_ptr().cast(), libc::CMSG_LEN(4) as _);
        let received = loop {
            let received = libc::recvmsg(socket, &mut message, libc::MSG_CMSG_CLOEXEC);
            if received >= 0 {
                break received;
            }
            let error = std::io::Error::last_os_error();
            if error.kind() != std::io::ErrorKind::Interrupted {
                return Err(error);
            }
        };
        if received == 0 {
            return Ok(Reply::Ended);
        }
        let header = libc::CMSG_FIRSTHDR(&message);
        if header.is_null() {
            return Ok(match i32::from_ne_bytes(bytes) {
                // Without a code, the kernel dropped the descriptor.
                0 => Reply::File(Err(Problem::of(libc::EMFILE))),
                code if code < RIGHTS => Reply::NoRights(RIGHTS - code),
                code => Reply::File(Err(Problem::of(code))),
            });
        }
        let fd = OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned());
        Ok(Reply::File(match problem(fd.as_raw_fd()) {
            0 => Ok(fd.into()),
            code => Err(Problem::of(code)),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

    fn open(paths: &[String], credentials: Option<Credentials>, deadline: Instant) -> Vec<ForeignFile> {
        let paths: Vec<CString> = paths.iter().map(|path| CString::new(path.as_str()).unwrap()).collect();
        open_memfds(&paths, credentials, Duration::from_secs(5), deadline)
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn only_a_sealed_memfd_is_opened_and_the_reasons_say_whether_they_last() {
        let made = [0; 2].map(|_| memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap());
        fcntl_add_seals(&made[0], SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
        let path = |fd: &OwnedFd| format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd());
        let paths = [path(&made[0]), path(&made[1]), "/none".to_owned(), "/proc/self/status".to_owned()];
        let found = open(&paths, None, soon());
        assert!(found[0].is_ok(), "{found:?}");
        let lasts: Vec<bool> = found[1..].iter().map(|file| file.as_ref().unwrap_err().is_of_file).collect();
        assert_eq!(lasts, [true, false, true], "{found:?}");
        let found = open(&paths, None, Instant::now());
        assert!(found.len() == 4 && found.iter().all(|file| !file.as_ref().unwrap_err().is_of_file), "{found:?}");
    }

    /// The file system has no server, so to find a file in it blocks.
    #[test]
    fn a_file_that_does_not_open_is_given_up_and_the_others_are_opened() {
        if crate::own_uid() != 0 {
            println!("skipped: mounting wants root");
            return;
        }
        let directory = std::env::temp_dir().join(format!("pelton-silent-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        // SAFETY: only this thread has the new mounts; the strings end with 0.
        let device = unsafe {
            let private = libc::MS_PRIVATE | libc::MS_REC;
            assert_eq!(libc::unshare(libc::CLONE_NEWNS), 0);
            assert_eq!(libc::mount(c"none".as_ptr(), c"/".as_ptr(), std::ptr::null(), private, std::ptr::null()), 0);
            let device = File::options().read(true).write(true).open("/dev/fuse").unwrap();
            let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
            let [options, at] = [options, directory.display().to_string()].map(|text| CString::new(text).unwrap());
            assert_eq!(libc::mount(c"none".as_ptr(), at.as_ptr(), c"fuse".as_ptr(), 0, options.as_ptr().cast()), 0);
            device
        };
        let made = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        fcntl_add_seals(&made, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
        let sealed = format!("/proc/{}/fd/{}", std::process::id(), made.as_raw_fd());
        let silent = directory.join("file").display().to_string();
        let found = open(&[sealed.clone(), silent, sealed], None, soon());
        // Nothing blocks any more.
        drop(device);
        // SAFETY: the string ends with 0.
        unsafe {
            let at = CString::new(directory.display().to_string()).unwrap();
            libc::umount2(at.as_ptr(), libc::MNT_DETACH);
        }
        std::fs::remove_dir(&directory).unwrap();
        assert!(found[0].is_ok() && found[2].is_ok(), "{found:?}");
        assert!(!found[1].as_ref().unwrap_err().is_of_file, "{found:?}");
    }

    #[test]
    fn rights_that_are_refused_are_one_reason_for_all_paths() {
        if crate::own_uid() == 0 {
            println!("skipped: root may take all rights");
            return;
        }
        let found = open(&["/a".to_owned(), "/b".to_owned()], Some(Credentials { uid: 1, gid: 1 }), soon());
        assert_eq!(found.len(), 2);
        assert!(found.iter().all(|file| file.as_ref().unwrap_err().reason.contains("taking the rights of uid 1")));
    }
}
