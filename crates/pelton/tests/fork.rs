//! After a fork, a child is not a second owner. A separate program, because it forks: it runs one case after another,
//! and has only the threads that a case creates.

mod support;

use pelton::{Error, Listener, Options, Receiver, Sender, Sent, SubscriberEvent, SubscriberSet, Wait};
use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use support::{TestDir, deadline, is_readable, readable, this_thread, wait_until_thread_polls};

fn main() {
    type Case<F> = (&'static str, F);
    let cases: [Case<fn(How)>; 13] = [
        ("inherited_handles_return_forked_and_the_parents_work_on", inherited_handles_return_forked),
        ("an_inherited_message_or_reservation_does_nothing", inherited_parts_do_nothing),
        ("a_held_message_that_a_child_drops_keeps_its_receivers_role", a_dropped_held_message_keeps_the_role),
        ("an_inherited_delivery_releases_nothing", an_inherited_delivery_releases_nothing),
        ("an_inherited_set_returns_forked_and_the_parents_works_on", an_inherited_set),
        ("inherited_handles_of_every_kind_return_forked_and_close_nothing", handles_of_every_kind),
        ("an_inherited_opening_returns_forked_and_the_parents_continues", an_inherited_opening),
        ("a_sender_that_waits_in_another_thread_is_not_disturbed", during_a_send_that_waits),
        ("a_child_creates_channels_of_its_own", a_child_creates_channels_of_its_own),
        ("dropping_inherited_handles_leaves_the_childs_own_descriptors_alone", dropping_closes_nothing),
        ("an_inherited_file_engine_returns_forked_and_the_parents_works_on", an_inherited_engine),
        ("a_death_is_detected_though_a_child_lives_on", a_death_is_detected_though_a_child_lives_on),
        ("a_child_forked_during_a_reply_reservation_answers_its_own_calls", a_child_answers_calls_of_its_own),
    ];
    let fork_cases: [Case<fn()>; 8] = [
        ("inherited_descriptors_are_closed_in_a_child", inherited_descriptors_are_closed),
        ("exec_leaves_no_descriptor", exec_leaves_no_descriptor),
        ("a_listener_does_not_stay_alive_in_a_child", a_listener_does_not_stay_alive_in_a_child),
        ("forking_while_threads_create_channels_does_not_hang", forking_while_threads_create_channels),
        ("forking_while_threads_share_senders_does_not_hang", forking_while_threads_share_senders),
        ("forking_while_threads_append_flushes_nothing_twice", forking_while_threads_append),
        ("an_inherited_flush_writes_and_releases_nothing", an_inherited_flush_writes_nothing),
        ("a_child_that_drops_a_reply_reservation_writes_nothing", a_dropped_reservation_writes_nothing_in_a_child),
    ];
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    let (mut passed, mut failed) = (0, 0);
    let mut run = |name: &str, case: &dyn Fn()| {
        if !name.contains(&filter) {
            return;
        }
        let well = catch_unwind(AssertUnwindSafe(case)).is_ok();
        println!("test {name} ... {}", if well { "ok" } else { "FAILED" });
        if well { passed += 1 } else { failed += 1 }
    };
    for (name, case) in cases {
        run(&format!("{name}::by_fork"), &|| case(How::Fork));
        run(&format!("{name}::by_raw_clone"), &|| case(How::Clone));
    }
    for (name, case) in fork_cases {
        run(name, &case);
    }
    println!("\ntest result: {}. {passed} passed; {failed} failed", if failed == 0 { "ok" } else { "FAILED" });
    std::process::exit((failed != 0).into());
}

/// By libc's fork, which runs the handlers of pthread_atfork, or by the system call alone.
#[derive(Clone, Copy)]
enum How {
    Fork,
    Clone,
}

/// A forked child; killed when dropped.
struct Forked(libc::pid_t);

impl Forked {
    fn new(how: How, does: impl FnOnce()) -> Forked {
        // SAFETY: the child continues alone with a copy of everything. No other thread of this program allocates or
        // holds a lock meanwhile, except in the one case about threads, where libc's fork handles that.
        let pid = unsafe {
            match how {
                How::Fork => libc::fork(),
                How::Clone => libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) as libc::pid_t,
            }
        };
        assert!(pid >= 0);
        if pid == 0 {
            // SAFETY: no pointers. The alarm ends a child that hangs.
            unsafe { libc::alarm(30) };
            let well = catch_unwind(AssertUnwindSafe(does)).is_ok();
            // SAFETY: ends this process at once, without the parent's clean-up.
            unsafe { libc::_exit(if well { 0 } else { 1 }) };
        }
        Forked(pid)
    }

    fn wait(self) {
        let mut status = 0;
        // SAFETY: the kernel writes one int.
        let waited = unsafe { libc::waitpid(self.0, &mut status, 0) };
        let pid = self.0;
        std::mem::forget(self);
        assert_eq!((waited, status), (pid, 0), "the child's end");
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        // SAFETY: the child is unreaped.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

/// A listener and both endpoints of a channel that it accepted.
struct Endpoints {
    sender: Sender,
    receiver: Receiver,
    listener: Listener,
}

fn endpoints(dir: &TestDir) -> Endpoints {
    let listener = Listener::bind(&dir.name()).unwrap();
    std::thread::scope(|scope| {
        let name = dir.name();
        let connecting = scope.spawn(move || Options::new().capacity(65536).connect_sender(&name).unwrap());
        let receiver = listener.accept_receiver_until(deadline()).unwrap().unwrap();
        Endpoints { sender: connecting.join().unwrap(), receiver, listener: listener.clone() }
    })
}

#[track_caller]
fn is_forked<T: std::fmt::Debug>(result: pelton::Result<T>) {
    assert!(matches!(result, Err(Error::Forked)), "{result:?}");
}

fn check_channel(endpoints: &mut Endpoints) {
    for number in 0..200u64 {
        endpoints.sender.send(&[number as u8; 1000]).unwrap();
        assert_eq!(*endpoints.receiver.receive_until(deadline()).unwrap().unwrap(), [number as u8; 1000]);
    }
    assert!(endpoints.sender.wait_released_until(deadline()).unwrap());
}

fn inherited_handles_return_forked(how: How) {
    let dir = TestDir::new("inherited_handles_return_forked");
    let mut made = endpoints(&dir);
    made.sender.send(b"before").unwrap();
    let mut inherited = Some(made);
    let child = Forked::new(how, || {
        let Endpoints { mut sender, mut receiver, listener } = inherited.take().unwrap();
        let pipe = std::fs::File::open("/dev/null").unwrap();
        let mut buffer = Vec::new();
        is_forked(sender.try_send(b"x"));
        is_forked(sender.send(b"x"));
        is_forked(sender.send_until(b"x", deadline()));
        is_forked(sender.try_reserve(8));
        is_forked(sender.reserve(8));
        is_forked(sender.try_reserve_batch([8]));
        is_forked(sender.send_with_descriptors(b"x", &[pipe.as_fd()]));
        is_forked(sender.wait_released());
        is_forked(sender.arm(8));
        is_forked(sender.resume());
        is_forked(sender.trim());
        assert_eq!(sender.unreleased(), 0);
        sender.disarm();
        sender.counters();
        is_forked(receiver.try_receive());
        is_forked(receiver.receive());
        is_forked(receiver.receive_until(deadline()));
        is_forked(receiver.receive_into(&mut buffer));
        is_forked(receiver.try_receive_into(&mut buffer));
        is_forked(receiver.try_receive_batch());
        is_forked(receiver.receive_batch());
        is_forked(receiver.arm());
        is_forked(receiver.resume());
        receiver.disarm();
        receiver.counters();
        is_forked(listener.accept_sender());
        is_forked(listener.accept_receiver_until(deadline()));
        is_forked(sender.close());
        is_forked(receiver.close());
        drop(listener);
    });
    child.wait();
    let mut made = inherited.unwrap();
    assert!(dir.socket().exists(), "the child removed its parent's socket");
    assert_eq!(&*made.receiver.try_receive().unwrap().unwrap(), b"before");
    check_channel(&mut made);
    let Endpoints { sender, mut receiver, listener } = made;
    sender.close().unwrap();
    assert!(receiver.receive().unwrap_err().is_closed());
    drop((receiver, listener));
    assert_eq!(dir.entries(), Vec::<PathBuf>::new());
}

/// Both endpoints of a channel of each kind.
fn every_kind(dir: &TestDir) -> [(&'static str, Sender, Receiver); 3] {
    let Endpoints { sender, receiver, listener: _ } = endpoints(dir);
    let path = dir.path().join("channel");
    let by_path = Options::new().capacity(65536).create_sender(&path).unwrap();
    let (first, second) = Options::new().capacity(65536).threads().unwrap();
    [
        ("connect", sender, receiver),
        ("path", by_path, Options::new().open_receiver(&path).unwrap()),
        ("threads", first, second),
    ]
}

fn handles_of_every_kind(how: How) {
    let dir = TestDir::new("handles_of_every_kind");
    for (kind, sender, receiver) in every_kind(&dir) {
        let mut inherited = Some((sender, receiver));
        inherited.as_mut().unwrap().0.send(b"before").unwrap();
        Forked::new(how, || {
            let (mut sender, mut receiver) = inherited.take().unwrap();
            is_forked(sender.send(b"x"));
            is_forked(sender.try_reserve(8));
            is_forked(sender.arm(8));
            is_forked(sender.wait_released());
            is_forked(sender.resume());
            is_forked(sender.sync());
            is_forked(sender.trim());
            is_forked(receiver.try_receive());
            is_forked(receiver.receive_into(&mut Vec::new()));
            is_forked(receiver.arm());
            is_forked(receiver.resume());
            is_forked(receiver.sync());
        })
        .wait();
        let (mut sender, mut receiver) = inherited.unwrap();
        assert_eq!(&*receiver.try_receive().unwrap().unwrap(), b"before", "{kind}");
        sender.send(b"after").unwrap();
        assert_eq!(&*receiver.receive_until(deadline()).unwrap().unwrap(), b"after", "{kind}");
        drop(sender);
        assert!(receiver.receive_until(deadline()).unwrap_err().is_closed(), "{kind}");
    }
}

/// An opening that the parent began.
fn an_inherited_opening(how: How) {
    let dir = TestDir::new("an_inherited_opening");
    let listener = Listener::bind(&dir.name()).unwrap();
    let mut inherited = Some(Options::new().start_connect_sender(&dir.name()).unwrap());
    assert!(inherited.as_mut().unwrap().try_finish().unwrap().is_none(), "nothing accepts it yet");
    Forked::new(how, || {
        let mut opening = inherited.take().unwrap();
        is_forked(opening.try_finish());
        drop(opening);
    })
    .wait();
    let mut opening = inherited.unwrap();
    let accepting = std::thread::spawn(move || listener.accept_receiver().unwrap());
    let mut sender = loop {
        support::readable(opening.as_fd());
        if let Some(sender) = opening.try_finish().unwrap() {
            break sender;
        }
    };
    sender.send(b"from the parent").unwrap();
    assert_eq!(&*accepting.join().unwrap().receive().unwrap(), b"from the parent");
}

/// Forks without exec and with it.
fn during_a_send_that_waits(how: How) {
    let dir = TestDir::new("during_a_send_that_waits");
    for (kind, mut sender, mut receiver) in every_kind(&dir) {
        let mut sent = 0u64;
        while sender.try_send(&[7; 10_000]).unwrap() == Sent::Sent {
            sent += 1;
        }
        std::thread::scope(|scope| {
            let (thread_sender, thread_receiver) = std::sync::mpsc::channel();
            let waiting = scope.spawn(move || {
                thread_sender.send(support::this_thread()).unwrap();
                sender.send(&[8; 10_000]).unwrap();
                sender.wait_released().unwrap();
                sender
            });
            support::wait_until_thread_polls(thread_receiver.recv().unwrap());
            for executes in [false, true] {
                Forked::new(how, || {
                    is_forked(receiver.try_receive());
                    if executes {
                        use std::os::unix::process::CommandExt;
                        panic!("{}", std::process::Command::new("true").exec());
                    }
                })
                .wait();
            }
            for _ in 0..sent {
                assert_eq!(*receiver.receive_until(deadline()).unwrap().unwrap(), [7; 10_000], "{kind}");
            }
            assert_eq!(*receiver.receive_until(deadline()).unwrap().unwrap(), [8; 10_000], "{kind}");
            let mut sender = waiting.join().unwrap();
            sender.send(b"after").unwrap();
            assert_eq!(&*receiver.receive_until(deadline()).unwrap().unwrap(), b"after", "{kind}");
        });
    }
}

fn inherited_parts_do_nothing(how: How) {
    let dir = TestDir::new("inherited_parts_do_nothing");
    for (_, sender, receiver) in every_kind(&dir) {
        parts_do_nothing(how, sender, receiver);
    }
}

fn a_dropped_held_message_keeps_the_role(how: How) {
    let dir = TestDir::new("a_dropped_held_message_keeps_the_role");
    let path = dir.path().join("channel");
    let mut sender = Options::new().create_sender(&path).unwrap();
    sender.send(b"held").unwrap();
    let mut receiver = Options::new().open_receiver(&path).unwrap();
    let mut held = Some(receiver.receive().unwrap().hold());
    receiver.close().unwrap();
    Forked::new(how, || drop(held.take())).wait();
    assert!(matches!(Options::new().open_receiver(&path), Err(Error::RoleTaken { .. })));
    assert_eq!(*held.take().unwrap(), *b"held");
    assert_eq!(*Options::new().open_receiver(&path).unwrap().receive().unwrap(), *b"held");
}

fn an_inherited_delivery_releases_nothing(how: How) {
    let mut publisher = Options::new().capacity(65536).publisher().unwrap();
    let mut subscriber = publisher.subscriber(&Options::new()).unwrap();
    publisher.send(&[1; 100]).unwrap();
    publisher.send(&[2; 100]).unwrap();
    {
        let mut delivery = Some(subscriber.receive().unwrap());
        Forked::new(how, || drop(delivery.take())).wait();
        assert_eq!(publisher.subscribers()[0].behind, 2, "the child released its parent's message");
        assert_eq!(*delivery.take().unwrap(), [1; 100]);
    }
    assert_eq!(publisher.subscribers()[0].behind, 1);
    assert_eq!(*subscriber.receive().unwrap(), [2; 100]);
    assert!(publisher.wait_released_until(deadline()).unwrap());
}

fn an_inherited_set(how: How) {
    let mut publishers = [0, 1].map(|_| Options::new().capacity(65536).publisher().unwrap());
    let mut set = SubscriberSet::new(Wait::Block).unwrap();
    for publisher in &mut publishers {
        set.add(publisher.subscriber(&Options::new()).unwrap()).unwrap();
    }
    while !set.arm().unwrap().is_waiting() {}
    let mut inherited = Some(set);
    Forked::new(how, || {
        let mut set = inherited.take().unwrap();
        is_forked(set.try_receive().map(drop));
        is_forked(set.receive().map(drop));
        is_forked(set.receive_until(deadline()).map(drop));
        is_forked(set.arm());
        set.disarm();
        let [first, second] = [0, 1].map(|key| set.remove(key).unwrap());
        is_forked(set.add(first));
        drop(set);
        let mut own = SubscriberSet::new(Wait::Block).unwrap();
        is_forked(own.add(second));
        let mut publisher = Options::new().capacity(65536).publisher().unwrap();
        own.add(publisher.subscriber(&Options::new()).unwrap()).unwrap();
        publisher.send(b"own").unwrap();
        is_message(own.receive_until(deadline()), 0, b"own");
    })
    .wait();
    let mut set = inherited.unwrap();
    assert_eq!(set.len(), 2);
    assert!(!is_readable(set.as_fd()), "the child rang");
    publishers[1].send(&[1; 100]).unwrap();
    readable(set.as_fd());
    set.disarm();
    publishers[1].send(&[2; 100]).unwrap();
    {
        let mut event = Some(set.receive_until(deadline()).unwrap());
        Forked::new(how, || drop(event.take())).wait();
        assert_eq!(publishers[1].subscribers()[0].behind, 2, "the child released its parent's message");
        is_message(Ok(event.take().unwrap()), 1, &[1; 100]);
    }
    is_message(set.receive_until(deadline()), 1, &[2; 100]);
    assert!(publishers[1].wait_released_until(deadline()).unwrap());
    // Both wake it, and end.
    for (key, mut publisher) in publishers.into_iter().enumerate() {
        let sending = std::thread::spawn(move || {
            publisher.send(&[3; 100]).unwrap();
            assert!(publisher.wait_released_until(deadline()).unwrap());
        });
        is_message(set.receive_until(deadline()), key, &[3; 100]);
        let end = set.receive_until(deadline());
        assert!(matches!(end, Ok(Some(SubscriberEvent::Left { error: Error::Closed { .. }, .. }))), "{end:?}");
        sending.join().unwrap();
    }
    assert!(set.receive().unwrap().is_none());
}

#[track_caller]
fn is_message(found: pelton::Result<Option<SubscriberEvent<'_>>>, of: usize, bytes: &[u8]) {
    match found.unwrap() {
        Some(SubscriberEvent::Message { key, message }) => assert_eq!((key, &*message), (of, bytes)),
        other => panic!("{other:?}"),
    }
}

fn parts_do_nothing(how: How, mut sender: Sender, mut receiver: Receiver) {
    for number in 0..4u8 {
        sender.send(&[number; 100]).unwrap();
    }
    let mut held = Some(receiver.receive().unwrap().hold());
    {
        let mut message = Some(receiver.receive().unwrap());
        let mut reservation = Some(sender.reserve(100).unwrap());
        Forked::new(how, || {
            drop(held.take());
            drop(message.take());
            let _ = reservation.take().unwrap().commit();
        })
        .wait();
        assert_eq!(*held.take().unwrap(), [0; 100]);
        assert_eq!(*message.take().unwrap(), [1; 100]);
        let mut reservation = reservation.take().unwrap();
        reservation.fill(4);
        reservation.commit().unwrap();
    }
    for number in 2..5u8 {
        assert_eq!(*receiver.receive().unwrap(), [number; 100]);
    }
    assert!(receiver.try_receive().unwrap().is_none());
    assert!(sender.wait_released_until(deadline()).unwrap());
}

fn a_child_creates_channels_of_its_own(how: How) {
    let dir = TestDir::new("a_child_creates_channels_of_its_own");
    let mut inherited = Some(endpoints(&dir));
    Forked::new(how, || {
        let own = tempfile::tempdir().unwrap();
        let name = format!("unix:{}/s", own.path().display());
        let listener = Listener::bind(&name).unwrap();
        let mut sender = std::thread::scope(|scope| {
            let accepting = scope.spawn(|| listener.accept_sender_until(deadline()));
            let mut receiver = Receiver::connect(&name).unwrap();
            let mut sender = accepting.join().unwrap().unwrap().unwrap();
            for number in 0..100u8 {
                sender.send(&[number; 50]).unwrap();
                assert_eq!(*receiver.receive().unwrap(), [number; 50]);
            }
            sender
        });
        assert!(sender.send(b"nobody").is_ok() || sender.unreleased() == 1);
        drop((inherited.take(), sender));
        let (mut sender, mut receiver) = pelton::Options::new().threads().unwrap();
        sender.send(b"between threads").unwrap();
        assert_eq!(&*receiver.receive().unwrap(), b"between threads");
        drop((listener, sender, receiver));
        assert!(!own.path().join("s").exists());
        own.close().unwrap();
    })
    .wait();
    check_channel(inherited.as_mut().unwrap());
}

/// A service, a client that has sent a request, and the responder of that call.
fn service_with_call(name: &str) -> (pelton::Service, pelton::Client, pelton::Responder) {
    let mut service = pelton::Service::listen(name).unwrap();
    let (client, responder) = std::thread::scope(|scope| {
        let connecting = scope.spawn(|| {
            let mut client = pelton::Client::connect(name).unwrap();
            client.submit(b"ask").unwrap();
            client
        });
        let responder = service.receive_until(deadline()).unwrap().expect("a request arrived").into_responder();
        (connecting.join().unwrap(), responder)
    });
    (service, client, responder)
}

fn a_child_answers_calls_of_its_own(how: How) {
    let dir = TestDir::new("a_child_answers_calls_of_its_own");
    let (_service, mut client, mut responder) = service_with_call(&dir.name());
    let reservation = responder.try_reserve(3).unwrap().expect("the lane is empty");
    Forked::new(how, || {
        let own = tempfile::tempdir().unwrap();
        let (_service, mut client, mut responder) = service_with_call(&format!("unix:{}/s", own.path().display()));
        let mut reservation = responder.try_reserve(3).unwrap().expect("the lane is empty");
        reservation.copy_from_slice(b"own");
        reservation.reply_bytes(3).unwrap();
        assert_eq!(*client.completion_until(deadline()).unwrap().expect("it was answered"), *b"own");
    })
    .wait();
    reservation.reply_bytes(3).unwrap();
    assert_eq!(client.completion_until(deadline()).unwrap().expect("it was answered").len(), 3);
}

/// Meanwhile a thread waits for free space. The thread that finds some rings a doorbell, which is closed in a child.
fn a_dropped_reservation_writes_nothing_in_a_child() {
    let dir = TestDir::new("a_dropped_reservation_writes_nothing_in_a_child");
    let name = dir.name();
    let mut service = pelton::Service::listen_with(&name, &Options::new().capacity(65536)).unwrap();
    let asking = std::thread::spawn(move || {
        let mut client = pelton::Client::connect_with(&name, &Options::new().capacity(65536)).unwrap();
        client.submit(b"one").unwrap();
        client.submit(b"two").unwrap();
        client
    });
    let mut next = || service.receive_until(deadline()).unwrap().expect("a request arrived").into_responder();
    let (mut streams, mut reserved) = (next(), next());
    let mut client = asking.join().unwrap();
    let mut parts = 0;
    while streams.try_part(&[0; 9000]).unwrap() == Sent::Sent {
        parts += 1;
    }
    std::thread::scope(|scope| {
        let (thread_sender, thread_receiver) = std::sync::mpsc::channel();
        let waiting = scope.spawn(move || {
            thread_sender.send(this_thread()).unwrap();
            (streams.part_until(&[0; 20000], deadline()).unwrap(), streams)
        });
        wait_until_thread_polls(thread_receiver.recv().unwrap());
        // Less than the waiting part needs.
        assert_eq!(client.completion_until(deadline()).unwrap().expect("it was sent").len(), 9000);
        let mut reservation = Some(reserved.try_reserve(5000).unwrap().expect("a part was read"));
        Forked::new(How::Fork, || {
            // They take the numbers that the inherited descriptors had.
            let files: Vec<std::fs::File> = (0..64).map(|_| tempfile::tempfile().unwrap()).collect();
            drop(reservation.take());
            for file in &files {
                assert_eq!(file.metadata().unwrap().len(), 0, "the bytes for a doorbell are in a file");
            }
        })
        .wait();
        drop(reservation.take());
        for _ in 0..parts {
            assert!(client.completion_until(deadline()).unwrap().is_some());
        }
        assert_eq!(waiting.join().unwrap().0, Sent::Sent);
    });
}

fn dropping_closes_nothing(how: How) {
    let dir = TestDir::new("dropping_closes_nothing");
    let mut inherited = Some(endpoints(&dir));
    Forked::new(how, || {
        // They take the numbers that the inherited descriptors had, if those were closed.
        let files: Vec<std::fs::File> = (0..64).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        drop(inherited.take());
        for file in &files {
            file.metadata().expect("a descriptor of the child's own was closed");
        }
    })
    .wait();
    check_channel(inherited.as_mut().unwrap());
}

/// The open descriptors of this process and their targets, except the one that lists them.
fn open_now() -> BTreeMap<i32, PathBuf> {
    let listed = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let named = listed.filter_map(|path| Some((path.file_name()?.to_str()?.parse().ok()?, path)));
    named
        .filter_map(|(number, path)| Some((number, std::fs::read_link(path).ok()?)))
        .collect::<BTreeMap<_, _>>()
        .into_iter()
        .filter(|(_, target)| !target.ends_with("fd"))
        .collect()
}

fn inherited_descriptors_are_closed() {
    let before = open_now();
    let dir = TestDir::new("inherited_descriptors_are_closed");
    let mut made = endpoints(&dir);
    let (mut sender, receiver) = Options::new().threads().unwrap();
    sender.send(b"x").unwrap();
    assert!(open_now().len() > before.len() + 10);
    Forked::new(How::Fork, || assert_eq!(open_now(), before)).wait();
    check_channel(&mut made);
    drop((made, sender, receiver));
    assert_eq!(open_now(), before);
}

fn exec_leaves_no_descriptor() {
    let list = || {
        let output = std::process::Command::new("ls").arg("/proc/self/fd").output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let before = list();
    let dir = TestDir::new("exec_leaves_no_descriptor");
    let made = endpoints(&dir);
    let (sender, receiver) = Options::new().threads().unwrap();
    assert_eq!(list(), before);
    // And by a plain exec, without a fork of this program in between.
    Forked::new(How::Clone, || {
        let script = "test $(ls -l /proc/$$/fd | grep -v -e ' [012] -> ' \
            | grep -c -e memfd -e eventfd -e eventpoll -e socket -e pidfd) = 0";
        use std::os::unix::process::CommandExt;
        panic!("{}", std::process::Command::new("sh").args(["-c", script]).exec());
    })
    .wait();
    drop((made, sender, receiver));
}

fn a_listener_does_not_stay_alive_in_a_child() {
    let dir = TestDir::new("a_listener_does_not_stay_alive_in_a_child");
    let (reading, writing) = std::io::pipe().unwrap();
    let (mut ready, lives) = std::io::pipe().unwrap();
    Forked::new(How::Fork, || {
        let listener = Listener::bind(&dir.name()).unwrap();
        // The grandchild lives until the test has closed its endpoint.
        std::mem::forget(Forked::new(How::Fork, || {
            // SAFETY: the descriptor is the test's, and this process has a copy of it.
            unsafe { libc::close(writing.as_raw_fd()) };
            (&lives).write_all(b"!").unwrap();
            let _ = (&reading).read(&mut [0]);
        }));
        std::mem::forget(listener);
    })
    .wait();
    ready.read_exact(&mut [0]).unwrap();
    assert!(dir.socket().exists());
    let listener = Listener::bind(&dir.name());
    drop(writing);
    listener.expect("a socket whose listener died is stale, even if a child lives");
}

fn a_death_is_detected_though_a_child_lives_on(how: How) {
    let dir = TestDir::new("a_death_is_detected_though_a_child_lives_on");
    let listener = Listener::bind(&dir.name()).unwrap();
    let (reading, writing) = std::io::pipe().unwrap();
    let name = dir.name();
    let parent = Forked::new(How::Fork, || {
        let mut sender = Options::new().connect_deadline(deadline()).connect_sender(&name).unwrap();
        sender.send(b"the last").unwrap();
        std::mem::forget(Forked::new(how, || {
            // SAFETY: the descriptor is the test's, and this process has a copy of it.
            unsafe { libc::close(writing.as_raw_fd()) };
            let _ = (&reading).read(&mut [0]);
        }));
        std::mem::forget(sender);
    });
    let mut receiver = listener.accept_receiver_until(deadline()).unwrap().unwrap();
    assert_eq!(&*receiver.receive_until(deadline()).unwrap().unwrap(), b"the last");
    parent.wait();
    match receiver.receive_until(deadline()) {
        Err(error) => assert!(error.is_peer_died(), "{error}"),
        Ok(message) => panic!("{message:?}"),
    }
    drop(writing);
}

fn forking_while_threads_create_channels() {
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let (mut sender, mut receiver) = Options::new().capacity(65536).threads().unwrap();
                    sender.send(b"x").unwrap();
                    assert_eq!(&*receiver.receive().unwrap(), b"x");
                }
            });
        }
        let all = catch_unwind(|| {
            for _ in 0..100 {
                Forked::new(How::Fork, || {
                    let (mut sender, mut receiver) = Options::new().capacity(65536).threads().unwrap();
                    sender.send(b"y").unwrap();
                    assert_eq!(&*receiver.receive().unwrap(), b"y");
                })
                .wait();
            }
        });
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        all.unwrap();
    });
}

fn forking_while_threads_share_senders() {
    let (senders, mut receiver) = Options::new().capacity(65536).gather().unwrap();
    senders.send(b"own").unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                drop(senders.clone());
            }
        });
        let all = catch_unwind(AssertUnwindSafe(|| {
            for _ in 0..200 {
                Forked::new(How::Fork, || {
                    let inherited = senders.clone();
                    is_forked(inherited.sender().map(|_| ()));
                    is_forked(inherited.send(b"x"));
                    is_forked(receiver.senders().map(|_| ()));
                    let (senders, mut receiver) = Options::new().capacity(65536).gather().unwrap();
                    senders.send(b"y").unwrap();
                    assert_eq!(&*receiver.receive().unwrap(), b"y");
                })
                .wait();
            }
        }));
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        all.unwrap();
    });
    drop(senders);
    assert_eq!(&*receiver.receive_until(deadline()).unwrap().unwrap(), b"own");
    assert!(receiver.receive_until(deadline()).unwrap_err().is_closed());
}

fn forking_while_threads_append() {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
    use std::time::Duration;
    let flushed = std::sync::Arc::new(AtomicU64::new(0));
    let count = flushed.clone();
    let sink = move |runs: &[pelton::Chunk<'_>]| {
        count.fetch_add(runs.iter().map(|run| u64::from(run.message_count())).sum(), SeqCst);
        Ok(())
    };
    let options = Options::new().flush_bytes(1 << 16).flush_interval(Some(Duration::from_millis(1)));
    let appenders = pelton::Appenders::new(&options, sink).unwrap();
    let mut own = Some(appenders.appender().unwrap());
    let stop = AtomicBool::new(false);
    let mut appended = 0;
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let mut appender = appenders.appender().unwrap();
            let mut appended = 0;
            while !stop.load(SeqCst) {
                appender.append(&[7; 40]).unwrap();
                appended += 1;
            }
            appended
        });
        let all = catch_unwind(AssertUnwindSafe(|| {
            for _ in 0..200 {
                own.as_mut().unwrap().append(b"own").unwrap();
                appended += 1;
                Forked::new(How::Fork, || {
                    let mut own = own.take().unwrap();
                    is_forked(own.append(b"x"));
                    is_forked(own.reserve(1).map(|_| ()));
                    is_forked(own.flush());
                    is_forked(appenders.append(b"x"));
                    is_forked(appenders.sync());
                    drop((own, appenders.clone()));
                })
                .wait();
            }
        }));
        stop.store(true, SeqCst);
        appended += thread.join().unwrap();
        all.unwrap();
    });
    drop((own, appenders));
    assert_eq!(flushed.load(SeqCst), appended);
}

fn an_inherited_flush_writes_nothing() {
    let (mut sender, receiver) = Options::new().capacity(65536).threads().unwrap();
    let (reads, writes) = rustix::pipe::pipe().unwrap();
    let sink = move |_: &[pelton::Chunk<'_>]| {
        rustix::io::write(&writes, b"x").unwrap();
        Ok(())
    };
    let hour = std::time::Duration::from_secs(3600);
    let mut flush = pelton::Flush::new(&Options::new().flush_interval(Some(hour)), receiver, sink).unwrap();
    sender.send(b"one").unwrap();
    assert!(!flush.run_until(std::time::Instant::now()).unwrap());
    Forked::new(How::Fork, || {
        is_forked(flush.flush());
        is_forked(flush.tick().map(|_| ()));
        is_forked(flush.sync());
    })
    .wait();
    assert_eq!(sender.unreleased(), 1);
    flush.flush().unwrap();
    drop(flush);
    assert_eq!(rustix::io::read(&reads, &mut [0; 8]), Ok(1));
}

fn an_inherited_engine(how: How) {
    use pelton::file::{EngineOptions, File, Open, Operation};
    let dir = TestDir::new("an inherited file engine returns forked");
    let path = dir.path().join("a");
    for options in [EngineOptions::new(), EngineOptions::new().without_io_uring()] {
        let mut engine = options.build().unwrap();
        let how_opened = Open::for_both().create(0o600);
        let file = engine.run(Operation::open(&path, how_opened)).unwrap().into_file().unwrap();
        let (read, write) = std::io::pipe().unwrap();
        let pipe = File::from_fd(read.into(), "a pipe").unwrap();
        // One operation started, one not, one finished.
        assert!(engine.try_submit(1, Operation::read(&pipe, vec![0; 5])).unwrap().is_submitted());
        engine.start().unwrap();
        assert!(engine.try_submit(2, Operation::write_at(&file, b"parent", 0)).unwrap().is_submitted());
        let mut engine = Some(engine);
        let mut files = Some((file, pipe));
        let child = Forked::new(how, || {
            let mut inherited = engine.take().unwrap();
            let (file, pipe) = files.take().unwrap();
            let forked = |result: Result<(), Error>| assert!(matches!(result, Err(Error::Forked)), "{result:?}");
            forked(inherited.run(Operation::stat("/")).map(drop));
            forked(inherited.try_submit(3, Operation::stat("/")).map(drop));
            forked(inherited.try_submit_chain([(3, Operation::stat("/"))]).map(drop));
            forked(inherited.try_completion().map(drop));
            forked(inherited.completion().map(drop));
            forked(inherited.cancel(1).map(drop));
            forked(inherited.arm().map(drop));
            forked(inherited.start());
            inherited.disarm();
            // Its own engine works, and takes no file of its parent's engine.
            let mut own = options.build().unwrap();
            forked(own.run(Operation::write_at(&file, b"child!", 0)).map(drop));
            let mine = own.run(Operation::open(&path, Open::for_reading())).unwrap().into_file().unwrap();
            assert!(own.run(Operation::read_at(&mine, vec![0; 6], 0)).unwrap().bytes() != b"child!");
            // Numbers that the child has opened itself, and that dropping must not close.
            let kept: Vec<std::fs::File> = (0..20).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
            drop((inherited, file, pipe));
            for file in &kept {
                rustix::fs::fstat(file).unwrap();
            }
            own.close().unwrap();
        });
        child.wait();
        let mut engine = engine.unwrap();
        let (_file, _pipe) = files.unwrap();
        (&write).write_all(b"later").unwrap();
        for _ in 0..2 {
            let done = engine.completion_until(deadline()).unwrap().unwrap();
            assert_eq!(done.count(), if done.token == 1 { 5 } else { 6 });
        }
        assert_eq!(std::fs::read(&path).unwrap(), b"parent");
        engine.close().unwrap();
    }
}
