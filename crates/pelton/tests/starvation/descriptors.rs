//! No free descriptors, at each number of them: for creation, opening, connecting and listening, and for descriptors
//! sent with messages.

use super::*;

/// Leaves this process that many free descriptors: it fills the gaps below the highest one. Dropping it frees all of
/// them.
pub struct Descriptors {
    _holes: Vec<OwnedFd>,
    pub before: Rlimit,
}

impl Descriptors {
    pub fn left(count: u64) -> Descriptors {
        let before = getrlimit(Resource::Nofile);
        let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let open = std::fs::read_dir("/proc/self/fd").unwrap();
        let highest = open.map(|fd| fd.unwrap().file_name().to_str().unwrap().parse::<i32>().unwrap()).max().unwrap();
        let mut holes = vec![null];
        while holes.last().unwrap().as_raw_fd() < highest {
            holes.push(holes[0].try_clone().unwrap());
        }
        let highest = holes.last().unwrap().as_raw_fd() as u64;
        setrlimit(Resource::Nofile, Rlimit { current: Some(highest + 1 + count), ..before }).unwrap();
        Descriptors { _holes: holes, before }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        setrlimit(Resource::Nofile, self.before).unwrap();
    }
}

/// Whether an error reports the lack of descriptors, and the remedy.
fn needs_descriptors(error: &Error) -> bool {
    match error {
        Error::System { error: source, .. } => {
            source.raw_os_error() == Some(libc::EMFILE) || source.to_string().contains("RLIMIT_NOFILE")
        }
        Error::DescriptorsLost { .. } => true,
        _ => false,
    }
}

/// Tries with each number of free descriptors, from none on, until the attempt succeeds. Each failure must report the
/// cause and leave nothing open.
#[track_caller]
fn with_each_number<T>(what: &str, attempt: impl FnMut() -> pelton::Result<T>) -> T {
    with_each_number_and(what, attempt, || ())
}

/// The same, with a `check` after each failed attempt.
#[track_caller]
fn with_each_number_and<T>(what: &str, mut attempt: impl FnMut() -> pelton::Result<T>, check: impl Fn()) -> T {
    for count in 0..100 {
        let before = descriptors();
        let few = Descriptors::left(count);
        let tried = attempt();
        drop(few);
        match tried {
            Ok(done) => return done,
            Err(error) => assert!(needs_descriptors(&error), "{what} with {count} descriptors: {error:?}"),
        }
        // Another thread closes the descriptors that a peer sent.
        eventually_is(before, &format!("open after {what} with {count} descriptors"), descriptors);
        check();
    }
    panic!("{what}: not with a hundred descriptors");
}

/// All files below a directory, recursively.
pub fn all_below(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(root).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(all_below(&path));
        }
        found.push(path);
    }
    found.sort();
    found
}

pub fn few_descriptors(role: &Role) {
    let (name, path) = (name_of(role), path_of(role));
    let root = Path::new(role.get("at"));
    let before = descriptors();
    match role.get("how") {
        "threads" => {
            let (mut sender, mut receiver) = with_each_number("threads", || Options::new().capacity(SMALL).threads());
            sender.send(b"one").unwrap();
            assert_eq!(&*receiver.receive().unwrap(), b"one");
        }
        // The other endpoint listens, connects, or has the directory.
        "connect" | "listen" | "path" => {
            let listener = (role.get("how") == "listen").then(|| small().listen(&name).unwrap());
            // A listener learns only of peers that connect, and no peer connects a second time before its error
            // arrives.
            if role.get("end") == "sender" {
                let mut sender = with_each_number("a sender", || match (&listener, role.get("how")) {
                    (Some(listener), _) => listener.accept_sender(),
                    (None, "path") => small_path().open_sender(&path),
                    (None, _) => Options::new().capacity(SMALL).connect_sender(&name),
                });
                sender.send(b"one").unwrap();
                sender.wait_released().unwrap();
            } else {
                let mut receiver = with_each_number("a receiver", || match (&listener, role.get("how")) {
                    (Some(listener), _) => listener.accept_receiver(),
                    (None, "path") => small_path().open_receiver(&path),
                    (None, _) => Options::new().connect_receiver(&name),
                });
                assert_eq!(&*receiver.receive_until(deadline()).unwrap().unwrap(), b"one");
            }
        }
        "create" => {
            for sends in [true, false] {
                // The complete directory, or nothing.
                let check = || match path.exists() {
                    true => assert_eq!(all_below(root).len(), 10),
                    false => assert_eq!(all_below(root), Vec::<PathBuf>::new()),
                };
                let create = || match sends {
                    true => small_path().create_sender(&path).map(|_| ()),
                    false => small_path().create_receiver(&path).map(|_| ()),
                };
                with_each_number_and("creation", create, check);
                let all = all_below(root);
                with_each_number("inspecting", || inspect::info(&path));
                with_each_number("checking", || inspect::check(&path, false));
                with_each_number("recovering", || inspect::recover(&path, false));
                assert_eq!(all_below(root), all);
                with_each_number_and("removing", || inspect::remove(&path), || assert_eq!(all_below(root), all));
                assert_eq!(all_below(root), Vec::<PathBuf>::new());
            }
        }
        "bind" => {
            // SAFETY: no other thread of this process reads its environment now.
            unsafe { std::env::set_var("XDG_RUNTIME_DIR", root) };
            for name in [&name, "short"] {
                let listener = with_each_number("listening", || Listener::bind(name));
                let found = with_each_number("listing listeners", || inspect::listeners(name));
                assert_eq!(found.len(), 1);
                // A process that cannot check the socket must not take it for a dead listener's.
                let mut tried = 0;
                let refused = with_each_number("listening besides another listener", || {
                    tried += 1;
                    match Listener::bind(name) {
                        Err(error @ Error::InUse { .. }) => Ok(Some(error)),
                        Ok(_) => Ok(None),
                        Err(error) => Err(error),
                    }
                });
                assert!(tried > 1 && (refused.is_some() || name == "short"), "{tried}: {refused:?}");
                drop((listener, refused));
                assert_eq!(all_below(root), Vec::<PathBuf>::new());
            }
        }
        other => panic!("{other}"),
    }
    eventually_is(before, "descriptors", descriptors);
    report("well");
}

fn with_few_descriptors(claim: &'static str, how: &str, others: &str) {
    for end in ["sender", "receiver"] {
        let dir = TestDir::new(claim);
        let other = if end == "sender" { "receiver" } else { "sender" };
        let peer = || {
            let role = role_at("one message", &dir).with("how", others).with("end", other);
            let child = Child::start(role);
            child.expect("there");
            child
        };
        let starving = role_at("few descriptors", &dir).with("how", how).with("end", end);
        if others == "connect" {
            let child = Child::start(starving);
            let peer = peer();
            child.expect("well");
            child.wait_for_success();
            peer.kill();
        } else {
            let peer = peer();
            if others == "path" {
                let until = deadline();
                while !dir.path().join("channel").exists() {
                    assert!(Instant::now() < until, "the other end has made no channel");
                    std::thread::yield_now();
                }
            }
            alone(starving);
            peer.kill();
        }
    }
}

#[test]
fn a_channel_between_threads_without_descriptors_is_an_error() {
    let dir = TestDir::new("a channel between threads without descriptors is an error");
    alone(role_at("few descriptors", &dir).with("how", "threads"));
}

#[test]
fn connecting_with_any_number_of_descriptors_works_or_names_the_lack() {
    with_few_descriptors("connecting with any number of descriptors works or names the lack", "connect", "listen");
}

#[test]
fn listening_with_any_number_of_descriptors_works_or_names_the_lack() {
    with_few_descriptors("listening with any number of descriptors works or names the lack", "listen", "connect");
}

#[test]
fn opening_a_path_with_any_number_of_descriptors_works_or_names_the_lack() {
    with_few_descriptors("opening a path with any number of descriptors works or names the lack", "path", "path");
}

#[test]
fn maintenance_calls_without_descriptors_fail_and_leave_no_part() {
    let dir = TestDir::new("maintenance calls without descriptors fail and leave no part");
    alone(role_at("few descriptors", &dir).with("how", "create"));
}

/// Sends parts of a reply without free space, and without a descriptor to wait with.
pub fn few_descriptors_for_parts(role: &Role) {
    let name = name_of(role);
    let mut service = pelton::Service::listen_with(&name, &small()).unwrap();
    let mut client = std::thread::scope(|scope| {
        let connecting =
            scope.spawn(|| pelton::Client::connect_with(&name, &small().connect_deadline(deadline())).unwrap());
        while !connecting.is_finished() {
            assert!(service.receive_until(Instant::now() + Duration::from_millis(1)).unwrap().is_none());
        }
        connecting.join().unwrap()
    });
    client.submit(b"a stream").unwrap();
    let mut responder = service.receive_until(deadline()).unwrap().expect("no request arrived").into_responder();
    let mut parts = 0;
    while responder.try_part(&[7; 1000]).unwrap() == Sent::Sent {
        parts += 1;
    }
    let before = descriptors();
    let few = Descriptors::left(0);
    assert_eq!(responder.part_until(&[7; 1000], Instant::now() + Duration::from_millis(20)).unwrap(), Sent::TimedOut);
    std::thread::scope(|scope| {
        let (ready, is_ready) = std::sync::mpsc::channel();
        let waiting = scope.spawn(move || {
            ready.send(()).unwrap();
            (0..200).for_each(|_| assert_eq!(responder.part_until(&[7; 1000], deadline()).unwrap(), Sent::Sent));
            responder.end().unwrap();
        });
        is_ready.recv().unwrap();
        let mut next = || client.completion_until(deadline()).unwrap().expect("it hangs").len();
        (0..parts + 200).for_each(|number| assert_eq!(next(), 1000, "part {number}"));
        assert_eq!(next(), 0);
        waiting.join().unwrap();
    });
    drop(few);
    assert_eq!(descriptors(), before);
    report("well");
}

#[test]
fn a_part_of_a_reply_waits_for_space_without_descriptors() {
    let dir = TestDir::new("a part of a reply waits for space without descriptors");
    alone(role_at("few descriptors for parts", &dir));
}

/// A set of three: its first publisher begins when no descriptor is left to watch it with, the second one is a thread,
/// and the third one is killed.
pub fn few_descriptors_for_a_set(role: &Role) {
    let path = path_of(role);
    let create = || Options::new().capacity(SMALL).create_publisher(&path).unwrap();
    drop(create());
    let wait = if role.get("how") == "spin" { Wait::Spin } else { Wait::Block };
    let mut set = SubscriberSet::new(wait).unwrap();
    set.add(Options::new().open_subscriber(&path).unwrap()).unwrap();
    let mut thread = Options::new().capacity(SMALL).publisher().unwrap();
    set.add(thread.subscriber(&Options::new()).unwrap()).unwrap();
    set.add(small().connect_subscriber(&name_of(role)).unwrap()).unwrap();
    let mut begun = create();
    let before = descriptors();
    let few = Descriptors::left(0);
    for number in 0..3u8 {
        // Messages arrive; a wait fails, and fails again: nothing is forgotten.
        for (key, publisher) in [&mut begun, &mut thread].into_iter().enumerate() {
            publisher.send(&[number]).unwrap();
            match set.receive_until(deadline()).unwrap() {
                Some(SubscriberEvent::Message { key: found, message }) => {
                    assert_eq!((found, &*message), (key, &[number][..]));
                }
                other => panic!("{other:?}"),
            }
        }
        let error = set.receive_until(deadline()).map(|found| format!("{found:?}")).unwrap_err();
        assert!(needs_descriptors(&error), "{error:?}");
    }
    report("starving");
    let until = deadline();
    let left = loop {
        assert!(Instant::now() < until, "the end of a publisher is not found while another one cannot be watched");
        match set.receive_until(until) {
            Ok(Some(SubscriberEvent::Left { key, error, .. })) => break (key, error),
            Ok(other) => panic!("{other:?}"),
            Err(error) => assert!(needs_descriptors(&error), "{error:?}"),
        }
    };
    assert!(left.0 == 2 && left.1.is_peer_died(), "{left:?}");
    drop(few);
    assert!(set.receive_until(Instant::now() + Duration::from_millis(20)).unwrap().is_none());
    // The first publisher's liveness instead of the third one's socket and process.
    assert!(descriptors() <= before, "{before}, now {}", descriptors());
    begun.send(b"the last").unwrap();
    drop(begun);
    assert!(matches!(set.receive_until(deadline()).unwrap(), Some(SubscriberEvent::Message { key: 0, .. })));
    let end = set.receive_until(deadline()).unwrap();
    assert!(matches!(end, Some(SubscriberEvent::Left { key: 0, error: Error::Closed { .. }, .. })), "{end:?}");
    report("well");
}

/// Publishes to one subscriber until it is killed.
pub fn publish(role: &Role) {
    let mut publisher = Options::new().capacity(SMALL).publish_at(&name_of(role)).unwrap();
    report("there");
    publisher.wait_subscribers_until(1, deadline()).unwrap();
    read_line_from_parent();
}

#[test]
fn a_set_of_subscribers_without_descriptors_returns_an_error_and_serves_the_others() {
    for how in ["block", "spin"] {
        let dir = TestDir::new("a set of subscribers without descriptors serves the others");
        let publisher = Child::start(role_at("publish", &dir));
        publisher.expect("there");
        let starving = Child::start(role_at("few descriptors for a set", &dir).with("how", how));
        starving.expect("starving");
        publisher.kill();
        starving.expect("well");
        starving.wait_for_success();
    }
}

#[test]
fn a_listener_without_descriptors_fails_and_leaves_nothing() {
    let dir = TestDir::new("a listener without descriptors fails and leaves nothing");
    alone(role_at("few descriptors", &dir).with("how", "bind"));
}

/// Descriptors beyond this process's limit, and survivors and receivers that have no descriptor left.
pub fn few_descriptors_on_receive(role: &Role) {
    let name = name_of(role);
    match role.get("how") {
        // Three descriptors arrive with each message.
        "received" => {
            let mut receiver = small().listen(&name).unwrap().accept_receiver().unwrap();
            let before = descriptors();
            for count in 0..5 {
                let mut message = receiver.receive().unwrap();
                let few = Descriptors::left(count);
                let taken = message.take_descriptors();
                drop((message, few));
                match taken {
                    Ok(taken) => assert_eq!((count >= 3, taken.len()), (true, 3)),
                    Err(Error::DescriptorsLost { sent: 3, received, .. }) => assert_eq!(received as u64, count),
                    Err(error) => panic!("{count}: {error:?}"),
                }
                eventually_is(before, &format!("open of {count}"), descriptors);
            }
            // The receiver drops them without reading them.
            let few = Descriptors::left(1);
            drop(receiver.receive().unwrap());
            drop(few);
            assert_eq!(receiver.receive().unwrap().take_descriptors().unwrap().len(), 3);
            eventually_is(before, "descriptors", descriptors);
        }
        // Three arrived with each of two messages; the sender has exited.
        "taken in" => {
            let listener = small().listen(&name).unwrap();
            let mut receiver = listener.accept_receiver().unwrap();
            report("have");
            read_line_from_parent();
            let few = Descriptors::left(4);
            let error = receiver.resume().unwrap_err();
            drop(few);
            assert!(needs_descriptors(&error), "{error:?}");
            report("tried");
            assert!(receiver.resume_until(deadline()).unwrap());
            assert_eq!(receiver.receive().unwrap().take_descriptors().unwrap().len(), 3);
            let error = receiver.receive().unwrap().take_descriptors().unwrap_err();
            assert!(matches!(error, Error::DescriptorsLost { sent: 3, received: 1, .. }), "{error:?}");
        }
        // One more lane, of a receiver that has no descriptor for it.
        "lane" => {
            let mut receiver = small_path().lanes(2).create_receiver(path_of(role)).unwrap();
            report("have");
            assert_eq!(&*receiver.receive_until(deadline()).unwrap().unwrap(), b"the first lane's");
            // By now the receiver watches the first lane's sender, which needs a descriptor.
            assert!(receiver.resume_until(deadline()).unwrap());
            report("received");
            read_line_from_parent();
            let before = descriptors();
            let mut errors = 0;
            let found = (0..100).find(|count| {
                let few = Descriptors::left(*count);
                let mut tried = || receiver.receive_until(Instant::now() + Duration::from_millis(200)).map(drop_some);
                // The receiver reports it, and reports it again: nothing is forgotten.
                let tried = [tried(), tried()];
                drop(few);
                for tried in &tried {
                    match tried {
                        Ok(true) => {}
                        Ok(false) => panic!("with {count} descriptors it overlooks the new lane"),
                        Err(error) => assert!(needs_descriptors(error), "{count}: {error:?}"),
                    }
                }
                errors += tried.iter().filter(|tried| tried.is_err()).count();
                tried[1].is_ok()
            });
            assert!(found.is_some() && errors > 2, "{found:?}, {errors} errors");
            let mut left = 0;
            while receiver.receive_until(Instant::now() + Duration::from_millis(50)).unwrap().is_some() {
                left += 1;
            }
            // A doorbell, a liveness handle and a page.
            eventually_is(before + 3, "descriptors", descriptors);
            report(format!("left {left}"));
            read_line_from_parent();
        }
        // The test kills the peer; others connect after it.
        "survivor" => {
            let listener = small().listen(&name).unwrap();
            // A successor may take one message and close.
            let is_end = |error: &Error| error.is_peer_died() || error.is_closed();
            if role.get("end") == "sender" {
                let mut sender = listener.accept_sender().unwrap();
                let before = descriptors();
                report("have");
                let send = |sender: &mut Sender| sender.send(b"one").and_then(|()| sender.wait_released());
                while send(&mut sender).inspect_err(|error| assert!(is_end(error), "{error}")).is_ok() {}
                assert!(with_each_number("a sender's successor", || sender.resume_until(deadline())));
                while send(&mut sender).inspect_err(|error| assert!(is_end(error), "{error}")).is_err() {
                    assert!(sender.resume_until(deadline()).unwrap());
                }
                eventually_is(before, "descriptors", descriptors);
            } else {
                let mut receiver = listener.accept_receiver().unwrap();
                let before = descriptors();
                report("have");
                let receive = |receiver: &mut Receiver| {
                    let received = receiver.receive().map(drop);
                    received.inspect_err(|error| assert!(is_end(error), "{error}")).is_ok()
                };
                while receive(&mut receiver) {}
                assert!(with_each_number("a receiver's successor", || receiver.resume_until(deadline())));
                while !receive(&mut receiver) {
                    assert!(receiver.resume_until(deadline()).unwrap());
                }
                eventually_is(before, "descriptors", descriptors);
            }
        }
        other => panic!("{other}"),
    }
    report("well");
}

/// Returns whether there was a message.
pub fn drop_some(message: Option<pelton::Message<'_>>) -> bool {
    message.is_some()
}

#[test]
fn a_receiver_reports_descriptors_beyond_its_limit_as_lost_and_takes_the_next() {
    let dir = TestDir::new("a receiver reports descriptors beyond its limit as lost and takes the next");
    let child = Child::start(role_at("few descriptors arrive", &dir).with("how", "received"));
    let mut sender = small().connect_sender(&dir_name(&dir)).unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    for _ in 0..7 {
        sender.send_with_descriptors(b"three", &[null.as_fd(); 3]).unwrap();
    }
    child.expect("well");
    child.wait_for_success();
}

pub fn dir_name(dir: &TestDir) -> String {
    name_of(&role_at("", dir))
}

#[test]
fn a_survivor_that_cannot_receive_all_descriptors_reports_the_lost_ones() {
    let dir = TestDir::new("a survivor that cannot receive all descriptors reports the lost ones");
    let mut child = Child::start(role_at("few descriptors arrive", &dir).with("how", "taken in"));
    let mut sender = small().connect_sender(&dir_name(&dir)).unwrap();
    child.expect("have");
    let null = std::fs::File::open("/dev/null").unwrap();
    for _ in 0..2 {
        sender.send_with_descriptors(b"three", &[null.as_fd(); 3]).unwrap();
    }
    drop(sender);
    child.write_line("gone");
    // The attempt fails, with the reason that the other side has no descriptors.
    let refused = small().connect_sender(&dir_name(&dir)).map(|_| ());
    assert!(!matches!(refused, Err(Error::Corrupt(_))), "{refused:?}");
    child.expect("tried");
    let _sender = refused.err().map(|_| small().connect_sender(&dir_name(&dir)).unwrap());
    child.expect("well");
    child.wait_for_success();
}

#[test]
fn a_receiver_without_descriptors_for_a_new_lane_fails_and_loses_nothing() {
    let dir = TestDir::new("a receiver without descriptors for a new lane fails and loses nothing");
    let role = role_at("few descriptors arrive", &dir).with("how", "lane");
    let mut child = Child::start(role.clone());
    child.expect("have");
    let path = path_of(&role);
    let mut first = small_path().open_sender(&path).unwrap();
    first.send(b"the first lane's").unwrap();
    child.expect("received");
    let mut second = small_path().open_sender(&path).unwrap();
    for _ in 0..5 {
        second.send(b"the second lane's").unwrap();
    }
    child.write_line("go");
    // The child lists the channel's endpoints continuously, until everything is released.
    while second.unreleased() > 0 {
        second.arm(8).unwrap().is_waiting();
        second.disarm();
        std::thread::yield_now();
    }
    let line = child.line();
    assert!(line.starts_with("left"), "{line}");
    // No endpoint reports the death of a receiver that was alive all the time.
    for sender in [&mut first, &mut second] {
        assert!(sender.wait_released_until(deadline()).unwrap() && sender.resume_until(deadline()).unwrap());
        assert_eq!(sender.peer().map(|peer| peer.pid), Some(child.pid()));
    }
    child.kill();
}

#[test]
fn a_survivor_without_descriptors_gets_an_error_and_keeps_its_lane() {
    for end in ["sender", "receiver"] {
        let dir = TestDir::new("a survivor without descriptors gets an error and keeps its lane");
        let child = Child::start(role_at("few descriptors arrive", &dir).with("how", "survivor").with("end", end));
        let other = if end == "sender" { "receiver" } else { "sender" };
        let peer = || Child::start(role_at("one message", &dir).with("how", "connect").with("end", other));
        let first = peer();
        child.expect("have");
        let _next = peer();
        first.kill();
        child.expect("well");
        child.wait_for_success();
    }
}
