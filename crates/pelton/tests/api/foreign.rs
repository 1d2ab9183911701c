//! Descriptors that a peer sends to block this side, and users with a false identity. Whatever a peer sends, others
//! are served.

use crate::support::raw::*;
use crate::support::*;
use pelton::{Error, Options, Receiver, Sender, Sent};
use std::io::{Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    match role.get("role") {
        "close slowly" => close_slowly(),
        "silent file server" => open_a_file_of_a_silent_server(),
        "alone in its namespace" => receiver_in_own_namespace(&role),
        "stranger" => {
            // SAFETY: no pointers.
            assert_eq!(unsafe { libc::setgid(65_533) | libc::setuid(65_533) }, 0);
            let sockets: Vec<_> = (0..role.number("count").unwrap())
                .map(|_| raw_connect(Path::new(role.get("name").trim_start_matches("unix:"))))
                .collect();
            report("connected");
            read_line_from_parent();
            drop(sockets);
        }
        "stranger with a doorbell" => {
            // SAFETY: no pointers.
            assert_eq!(unsafe { libc::setgid(65_533) | libc::setuid(65_533) }, 0);
            misuse_the_doorbell(Path::new(role.get("socket")));
        }
        "client that shuts doorbells down" => {
            // SAFETY: no pointers.
            assert_eq!(unsafe { libc::setgid(65_533) | libc::setuid(65_533) }, 0);
            let options = Options::new().allow_uids(&[0]).connect_deadline(deadline());
            let mut client = pelton::Client::connect_with(role.get("name"), &options).unwrap();
            client.submit(b"a stream").unwrap();
            report("asked");
            read_line_from_parent();
            assert!(shut_doorbells_down() > 0);
            report("done");
            read_line_from_parent();
        }
        other => panic!("{other}"),
    }
}

/// A TCP socket whose last close blocks until the other end has read everything written, which it does when it is
/// dropped.
struct SlowSocket {
    far: TcpStream,
}

impl SlowSocket {
    fn new() -> (OwnedFd, SlowSocket) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        rustix::net::sockopt::set_socket_linger(&near, Some(Duration::from_secs(10_000))).unwrap();
        near.set_nonblocking(true).unwrap();
        while near.write(&[0; 65536]).is_ok() {}
        (near.into(), SlowSocket { far })
    }
}

impl Drop for SlowSocket {
    fn drop(&mut self) {
        let _ = std::io::copy(&mut self.far, &mut std::io::sink());
    }
}

fn closing() -> usize {
    kernel::threads_named("pelton-close").len()
}

/// Sends more descriptors than the protocol has a use for.
fn send_many(socket: &OwnedFd, bytes: &[u8], fd: OwnedFd, count: usize) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut ancillary = rustix::net::SendAncillaryBuffer::new(&mut space);
    let fds = vec![fd.as_fd(); count];
    ancillary.push(rustix::net::SendAncillaryMessage::ScmRights(&fds));
    let (bytes, flags) = ([std::io::IoSlice::new(bytes)], rustix::net::SendFlags::NOSIGNAL);
    rustix::net::sendmsg(socket, &bytes, &mut ancillary, flags).is_ok()
}

/// Held by the sender of a descriptor, until it has closed its own, and by the receiver while it receives: the last
/// close must be the receiver's.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Runs an action while the receiver does nothing.
fn while_receiver_is_idle<T>(work: impl FnOnce() -> T) -> T {
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    work()
}

/// Receives for a moment.
fn receive_for_a_moment(receiver: &mut Receiver) -> Option<usize> {
    std::thread::yield_now();
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let message = receiver.receive_until(Instant::now() + Duration::from_millis(1)).unwrap();
    message.map(|message| message.descriptor_count())
}

/// Receives until the other thread has finished its part.
fn receive_while<T>(receiver: &mut Receiver, other: impl FnOnce() -> T + Send) -> T
where
    T: Send,
{
    std::thread::scope(|scope| {
        let other = scope.spawn(other);
        while !other.is_finished() {
            receive_for_a_moment(receiver);
        }
        other.join().unwrap()
    })
}

/// A lane's first message, of no bytes, arrives with that many copies of a descriptor.
fn send_with_message(peer: &RawPeer, fd: OwnedFd, count: usize) {
    let mut bytes = packet(DESCRIPTORS, 0);
    bytes[72..76].copy_from_slice(&1u32.to_le_bytes());
    while_receiver_is_idle(|| assert!(send_many(&peer.socket, &bytes, fd, count)));
    peer.put(8, 1, 0);
    peer.put(0, 1, 1 << 31 | 1 << 28 | count as u32);
    peer.ring();
}

/// Another sender joins and is served while `hostile` runs, which must not affect the thread of `receiver`.
fn others_are_served(what: &str, receiver: &mut Receiver, dir: &TestDir) {
    let name = dir.name();
    let other = std::thread::spawn(move || {
        let mut sender = Options::new().connect_deadline(deadline()).connect_sender(&name).unwrap();
        sender.send(b"served").unwrap();
        sender.wait_released().unwrap();
    });
    loop {
        let message = receiver.receive_until(deadline()).unwrap().unwrap_or_else(|| panic!("{what}: nobody is served"));
        if &*message == b"served" {
            break;
        }
    }
    other.join().unwrap();
}

/// The departures are recorded, and then there is nothing to do.
fn falls_asleep(what: &str, receiver: &mut Receiver) {
    eventually(&format!("{what}: the receiver sleeps"), || {
        assert!(receiver.try_receive().unwrap().is_none());
        receiver.arm().unwrap().is_waiting() && !is_readable(receiver.as_fd())
    });
}

/// A user's options at the far end of a doorbell that it received.
fn misuse_the_doorbell(socket: &Path) {
    use rustix::net::{AddressFamily, SendFlags, Shutdown, SocketFlags, SocketType, send, shutdown, socketpair};
    assert!(RawPeer::sender_with(socket, good_doorbell()).is_none(), "an eventfd of another user is taken");
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let (mine, given) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let peer = RawPeer::sender_with(socket, given).expect("a socket is a doorbell");
    report("connected");
    let quietly = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    for round in read_line_from_parent().split(' ') {
        match round {
            "rings" => (0..10_000).for_each(|_| _ = send(&peer.doorbell, b"x", quietly)),
            "sends-nothing" => _ = send(&peer.doorbell, b"", quietly),
            "sends-descriptors" => {
                // Where the kernel permits them.
                let _ = send_many(&peer.doorbell, b"x", good_doorbell(), 253);
            }
            "sends-by-its-own" => (0..10_000).for_each(|_| _ = send(&mine, b"x", quietly)),
            "shuts-down" => shutdown(&peer.doorbell, Shutdown::Both).unwrap(),
            other => panic!("{other}"),
        }
    }
    report("done");
    read_line_from_parent();
}

/// Shuts down all sockets of this process that were created as pairs, which are its own doorbells and the received
/// ones; returns their number.
fn shut_doorbells_down() -> usize {
    use rustix::net::{SocketType, getpeername, shutdown, sockopt};
    let open: Vec<_> = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().file_name()).collect();
    let numbers = open.iter().map(|name| name.to_str().unwrap().parse().unwrap());
    // SAFETY: only this thread opens and closes descriptors here; the calls fail for a descriptor already closed.
    let fds = numbers.map(|number| unsafe { std::os::fd::BorrowedFd::borrow_raw(number) });
    fds.filter(|fd| {
        sockopt::socket_type(fd) == Ok(SocketType::SEQPACKET)
            && getpeername(fd).is_ok_and(|of| of.is_none_or(|of| of.addr_len() <= 2))
            && shutdown(fd, rustix::net::Shutdown::Both).is_ok()
    })
    .count()
}

#[test]
fn a_client_that_shuts_its_doorbell_while_a_part_waits_for_space_is_lost() {
    let dir = TestDir::new("a_client_that_shuts_its_doorbell_while_a_part_waits");
    if !is_root() {
        eprintln!("SKIPPED: needs root to become another user");
        return;
    }
    let _watchdog = Watchdog::new("a thread waits for space without a notification");
    for waits in [true, false] {
        shutting_its_doorbell_loses_the_client(&dir, waits);
    }
}

/// `waits`: a thread waits in `part`; otherwise an event loop does, by `try_part` and `arm`.
fn shutting_its_doorbell_loses_the_client(dir: &TestDir, waits: bool) {
    let options = Options::new().allow_uids(&[65_533]).capacity(1 << 16);
    let mut service = pelton::Service::listen_with(&dir.name(), &options).unwrap();
    // The socket's own mode lets other users connect, because of `allow_uids`.
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut client = Child::start(Role::new(child, "client that shuts doorbells down").with("name", dir.name()));
    let request = service.receive_until(deadline()).unwrap().expect("no request arrived");
    let mut responder = request.into_responder();
    client.expect("asked");
    while responder.try_part(&[7; 1000]).unwrap() == Sent::Sent {}
    let mut shut_down = || {
        client.write_line("shut down");
        client.expect("done");
    };
    if waits {
        let (thread_sender, is_waiting) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(move || {
                thread_sender.send(kernel::this_thread()).unwrap();
                responder.part_until(&[7; 1000], deadline())
            });
            kernel::wait_until_thread_polls(is_waiting.recv().unwrap());
            shut_down();
            let ended = waiting.join().unwrap();
            assert!(matches!(ended, Err(Error::PeerDied { .. })), "{ended:?}");
        });
    } else {
        shut_down();
        eventually("the client is lost", || {
            assert!(service.try_receive().unwrap().is_none());
            service.arm().unwrap().is_waiting();
            matches!(responder.try_part(&[7; 1000]), Err(Error::PeerDied { .. }))
        });
    }
    eventually("the service sleeps", || {
        assert!(service.try_receive().unwrap().is_none());
        service.arm().unwrap().is_waiting() && !is_readable(service.as_fd())
    });
    client.write_line("end");
    client.wait_for_success();
}

#[test]
fn another_users_access_to_a_doorbell_disturbs_nobody() {
    let dir = TestDir::new("another_users_access_to_a_doorbell_disturbs_nobody");
    if !is_root() {
        eprintln!("SKIPPED: needs root to become another user");
        return;
    }
    let _watchdog = Watchdog::new("a doorbell of another user blocks the receiver");
    let mut receiver = Options::new().allow_uids(&[65_533]).gather_at(&dir.name()).unwrap();
    // The socket's own mode lets other users connect, because of `allow_uids`.
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    for misuse in [
        "rings",
        "sends-nothing rings",
        "sends-descriptors rings",
        "sends-by-its-own",
        "shuts-down",
        "rings shuts-down",
    ] {
        let role = Role::new(child, "stranger with a doorbell").with("socket", dir.socket().display());
        let mut stranger = Child::start(role);
        let child = &mut stranger;
        receive_while(&mut receiver, move || child.expect("connected"));
        stranger.write_line(misuse);
        let child = &mut stranger;
        receive_while(&mut receiver, move || child.expect("done"));
        others_are_served(misuse, &mut receiver, &dir);
        falls_asleep(misuse, &mut receiver);
        stranger.write_line("end");
        receive_while(&mut receiver, move || stranger.wait_for_success());
    }
}

/// In a separate process, whose threads and descriptors no other test changes.
#[test]
fn descriptors_that_block_on_close_delay_only_their_sender() {
    Child::start(Role::new(child, "close slowly")).wait_for_success();
}

fn close_slowly() {
    let dir = TestDir::new("descriptors that block on close");
    let _watchdog = Watchdog::new("descriptors that block on close delay the receiver");
    let mut receiver = Options::new().gather_at(&dir.name()).unwrap();
    others_are_served("at first", &mut receiver, &dir);
    falls_asleep("at first", &mut receiver);
    let before = descriptors();
    let exchange_hellos = |socket: &OwnedFd| {
        raw_send(socket, &packet(HELLO, SENDER), &[]);
        assert_eq!(kind_of(&raw_receive(socket).0), HELLO);
    };
    // Its sender closes it at once, so that the last close is this side's.
    type HostilePeer<'a> = &'a (dyn Fn(OwnedFd) + Sync);
    let show = |fds: Vec<OwnedFd>| {
        let socket = raw_connect(&dir.socket());
        exchange_hellos(&socket);
        while_receiver_is_idle(|| {
            raw_send(&socket, &producer_packet(), &fds.iter().map(AsFd::as_fd).collect::<Vec<_>>());
            drop(fds);
        });
        assert_eq!(kind_of(&raw_receive(&socket).0), REFUSED);
    };
    let hostile_peers: [(&str, HostilePeer<'_>); 11] = [
        ("in a silent socket", &|fd| {
            let socket = raw_connect(&dir.socket());
            exchange_hellos(&socket);
            while_receiver_is_idle(|| assert!(send_many(&socket, b"", fd, 1)));
        }),
        ("behind a packet of nothing", &|fd| {
            let socket = raw_connect(&dir.socket());
            exchange_hellos(&socket);
            while_receiver_is_idle(|| {
                raw_send(&socket, b"", &[]);
                assert!(send_many(&socket, b"x", fd, 1));
            });
        }),
        ("as a page", &|fd| show(vec![fd, good_doorbell(), good_data()])),
        ("as a doorbell", &|fd| show(vec![good_page(), fd, good_data()])),
        ("as data", &|fd| show(vec![good_page(), good_doorbell(), fd])),
        ("one too many", &|fd| show(vec![good_page(), good_doorbell(), good_data(), fd])),
        ("too many, and a packet behind them", &|fd| {
            let socket = raw_connect(&dir.socket());
            exchange_hellos(&socket);
            while_receiver_is_idle(|| {
                assert!(send_many(&socket, &producer_packet(), fd, 4));
                raw_send(&socket, b"x", &[]);
            });
            assert_eq!(kind_of(&raw_receive(&socket).0), REFUSED);
        }),
        ("many too many", &|fd| {
            let socket = raw_connect(&dir.socket());
            exchange_hellos(&socket);
            while_receiver_is_idle(|| assert!(send_many(&socket, &producer_packet(), fd, 253)));
            assert_eq!(kind_of(&raw_receive(&socket).0), REFUSED);
        }),
        ("with an unread message", &|fd| send_with_message(&RawPeer::sender(&dir.socket()), fd, 1)),
        ("in the queue of its doorbell", &|fd| {
            use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
            let (mine, given) =
                socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
            assert!(send_many(&mine, b"x", fd, 1));
            let peer = RawPeer::sender_with(&dir.socket(), given).expect("a socket is a doorbell");
            while_receiver_is_idle(|| drop((mine, peer)));
        }),
        ("for a message that never arrives", &|fd| {
            let peer = RawPeer::sender(&dir.socket());
            while_receiver_is_idle(|| assert!(send_many(&peer.socket, &packet(DESCRIPTORS, 0), fd, 1)));
        }),
    ];
    for (what, evil) in hostile_peers {
        let (fd, far) = SlowSocket::new();
        receive_while(&mut receiver, || evil(fd));
        others_are_served(what, &mut receiver, &dir);
        eventually(&format!("{what}: a thread waits for the close"), || closing() == 1);
        falls_asleep(what, &mut receiver);
        drop(far);
        eventually_is(0, &format!("{what}: threads that close"), closing);
        eventually_is(before, what, descriptors);
    }

    // A peer with too many blocking descriptors is refused, and may return when they are closed.
    let (fd, far) = SlowSocket::new();
    for (fd, count) in [(fd, 1), (good_doorbell(), 64)] {
        let peer = receive_while(&mut receiver, || RawPeer::sender(&dir.socket()));
        send_with_message(&peer, fd, count);
        eventually("the message arrives", || receive_for_a_moment(&mut receiver) == Some(count));
    }
    let refused = loop {
        if let Err(error) = receive_while(&mut receiver, || Sender::connect(&dir.name()).map(drop)) {
            break error;
        }
    };
    assert!(matches!(&refused, Error::Refused(why) if why.contains("wait to be closed")), "{refused}");
    drop(far);
    eventually_is(0, "threads that close", closing);
    others_are_served("at last", &mut receiver, &dir);
}

/// In a separate process, with its own mounts.
#[test]
fn a_file_on_an_unresponsive_server_gets_no_stat() {
    Child::start(Role::new(child, "silent file server")).wait_for_success();
}

/// A file of a FUSE server in this process, which opens the file and then stops answering. Its mount ends with this
/// process.
pub fn file_of_a_silent_server(at: &Path, name: &str) -> OwnedFd {
    // SAFETY: the threads of the test harness share only the file system's root.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }
        .expect("mounts of its own want root");
    let (root, none) = (c"/".as_ptr(), std::ptr::null());
    // SAFETY: the strings end with 0, and there is no data.
    assert_eq!(unsafe { libc::mount(none, root, none, libc::MS_PRIVATE | libc::MS_REC, none.cast()) }, 0);
    let mut device = std::fs::File::options().read(true).write(true).open("/dev/fuse").unwrap();
    let data = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
    let [data, target] = [data, at.display().to_string()].map(|text| std::ffi::CString::new(text).unwrap());
    // SAFETY: the strings end with 0.
    let mounted =
        unsafe { libc::mount(c"silent".as_ptr(), target.as_ptr(), c"fuse".as_ptr(), 0, data.as_ptr().cast()) };
    assert_eq!(mounted, 0, "{}", std::io::Error::last_os_error());
    let file = at.join(name);
    let opening = std::thread::spawn(move || {
        let file = std::fs::File::options().read(true).write(true).open(file)?;
        // The first close asks whether the server wants flush requests. The answer is no; otherwise the end of this
        // process would wait for a reply.
        drop(file.try_clone()?);
        std::io::Result::Ok(file)
    });
    let mut request = vec![0; 1 << 20];
    while !opening.is_finished() {
        let bytes = device.read(&mut request).unwrap();
        let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
        assert!(bytes >= 40);
        let (operation, unique) = (word(4), &request[8..16]);
        let mut answer = vec![0; 16];
        answer[8..16].copy_from_slice(unique);
        const LOOKUP: u32 = 1;
        const OPEN: u32 = 14;
        const FLUSH: u32 = 25;
        const INIT: u32 = 26;
        match operation {
            INIT => {
                answer.resize(16 + 64, 0);
                answer[16..20].copy_from_slice(&7u32.to_ne_bytes());
                answer[20..24].copy_from_slice(&31u32.to_ne_bytes());
                answer[36..40].copy_from_slice(&4096u32.to_ne_bytes());
            }
            LOOKUP => {
                answer.resize(16 + 128, 0);
                answer[16..24].copy_from_slice(&2u64.to_ne_bytes());
                // Attributes with no validity time: number, mode, links.
                answer[56..64].copy_from_slice(&2u64.to_ne_bytes());
                answer[116..120].copy_from_slice(&(libc::S_IFREG | 0o600).to_ne_bytes());
                answer[120..124].copy_from_slice(&1u32.to_ne_bytes());
            }
            OPEN => answer.resize(16 + 16, 0),
            FLUSH => answer[4..8].copy_from_slice(&(-libc::ENOSYS).to_ne_bytes()),
            other => panic!("FUSE operation {other}"),
        }
        let bytes = answer.len() as u32;
        answer[..4].copy_from_slice(&bytes.to_ne_bytes());
        device.write_all(&answer).unwrap();
        if operation == FLUSH {
            break;
        }
    }
    // No test should traverse it. It lives as long as this process. SAFETY: the string ends with 0.
    assert_eq!(unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) }, 0);
    std::mem::forget(device);
    opening.join().unwrap().unwrap().into()
}

fn open_a_file_of_a_silent_server() {
    let dir = TestDir::new("a file on an unresponsive server");
    let at = dir.path().join("mount");
    std::fs::create_dir(&at).unwrap();
    let file = file_of_a_silent_server(&at, "file");
    let _watchdog = Watchdog::new("a file on an unresponsive server delays the receiver");
    let mut receiver = Options::new().gather_at(&dir.name()).unwrap();
    for position in 0..3 {
        let mut fds = [good_page(), good_doorbell(), good_data()];
        fds[position] = file.try_clone().unwrap();
        let socket = raw_connect(&dir.socket());
        raw_send(&socket, &packet(HELLO, SENDER), &[]);
        let _ = receiver.receive_until(Instant::now() + Duration::from_millis(1)).unwrap();
        assert_eq!(kind_of(&raw_receive(&socket).0), HELLO);
        raw_send(&socket, &producer_packet(), &fds.each_ref().map(AsFd::as_fd));
        others_are_served("a file", &mut receiver, &dir);
        assert_eq!(kind_of(&raw_receive(&socket).0), REFUSED);
    }
}

/// A receiver in a user namespace that maps only its own user, and sees it as 65534, like all others.
fn receiver_in_own_namespace(role: &Role) {
    // SAFETY: no pointers.
    unsafe {
        assert_eq!(libc::setgid(65_534) | libc::setuid(65_534), 0);
        // So that `/proc/self/uid_map` belongs to it.
        assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 1), 0);
        // The kernel requires a process of one thread for this.
        let forked = libc::fork();
        assert!(forked >= 0);
        if forked > 0 {
            let mut status = 0;
            assert_eq!(libc::waitpid(forked, &mut status, 0), forked);
            assert_eq!(status, 0);
            return;
        }
        assert_eq!(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL), 0);
        assert_eq!(libc::unshare(libc::CLONE_NEWUSER), 0);
    }
    std::fs::write("/proc/self/uid_map", "65534 65534 1").unwrap();
    let path = Path::new(role.get("at")).join("channel");
    for allowed in [&[][..], &[65_534]] {
        let options = Options::new().mode(0o777).allow_uids(allowed);
        let error = options.open_receiver(&path).unwrap_err().to_string();
        assert!(error.contains("uid 65534 is that of every user"), "{error}");
        let listener = options.cast().listen(role.get("name")).unwrap();
        std::fs::set_permissions(
            role.get("name").trim_start_matches("unix:"),
            std::os::unix::fs::PermissionsExt::from_mode(0o777),
        )
        .unwrap();
        report("listening");
        assert!(listener.accept_receiver_until(Instant::now() + Duration::from_millis(200)).unwrap().is_none());
        drop(listener);
        report("alone");
    }
    // SAFETY: ends a forked child, which needs no clean-up.
    unsafe { libc::_exit(0) }
}

#[test]
fn a_user_outside_the_namespaces_map_is_not_taken_for_the_overflow_user() {
    let dir = TestDir::new("a user outside the namespace's map");
    let public = |path: &Path| {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    };
    public(dir.path());
    let path = dir.path().join("channel");
    drop(Options::new().mode(0o777).create_sender(&path).unwrap());
    let role = Role::new(child, "alone in its namespace").with("name", dir.name()).with("at", dir.path().display());
    let host = Child::start(role);
    for _ in 0..2 {
        host.expect("listening");
        let error = Options::new().allow_uids(&[65_534]).connect_sender(&dir.name()).unwrap_err();
        assert!(matches!(&error, Error::Refused(why) if why.contains("uid 65534 is that of every user")), "{error}");
        host.expect("alone");
    }
    host.wait_for_success();
}

#[test]
fn the_next_call_serves_a_peer_that_connected_before_a_faster_one() {
    let dir = TestDir::new("one peer connected before a faster one");
    let listener = Options::new().listen(&dir.name()).unwrap();
    let slow = raw_connect(&dir.socket());
    let name = dir.name();
    let faster = std::thread::spawn(move || Sender::connect(&name).unwrap());
    let accepted = listener.accept_receiver_until(deadline()).unwrap().expect("no connection arrived");
    drop((accepted, faster.join().unwrap()));
    assert!(!is_readable(listener.as_fd()), "the slow one has said nothing");
    raw_send(&slow, &packet(HELLO, SENDER), &[]);
    readable(&listener);
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| listener.accept_receiver_until(deadline()));
        assert_eq!(kind_of(&raw_receive(&slow).0), HELLO);
        drop(slow);
        let name = dir.name();
        drop(Sender::connect(&name).unwrap());
        drop(accepting.join().unwrap().unwrap().expect("no connection arrived"));
    });
}

#[test]
fn silent_connections_of_a_refused_user_delay_nobody() {
    let dir = TestDir::new("silent connections of a refused user");
    let public = |path: &Path| {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    };
    public(dir.path());
    let listener = Options::new().listen(&dir.name()).unwrap();
    public(&dir.socket());
    let mut stranger = Child::start(Role::new(child, "stranger").with("name", dir.name()).with("count", 100));
    stranger.expect("connected");
    // All connected before this one, and each has half a second for its hello.
    let name = dir.name();
    let innocent = std::thread::spawn(move || {
        let mut sender = Options::new().connect_deadline(deadline()).connect_sender(&name).unwrap();
        sender.send(b"served").unwrap();
        sender.wait_released().unwrap();
    });
    let mut receiver = listener.accept_receiver_until(deadline()).unwrap().expect("no connection arrived");
    assert_eq!(&*receiver.receive_until(deadline()).unwrap().unwrap(), b"served");
    innocent.join().unwrap();
    // They are all refused, and not just unserved so far.
    stranger.write_line("go");
    stranger.wait_for_success();
}
