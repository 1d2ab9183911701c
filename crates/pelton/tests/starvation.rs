//! What becomes of a channel for which the system has nothing left: no descriptors, no address space, no disk, no file larger
//! than so much, no permission for some system call, one processor, a signal each millisecond. An error, or slower, and never
//! wrong: nothing is lost, nothing hangs, nothing is left behind, and a later try with more of it works.
//!
//! Each condition has a process of its own, so that it starves nobody else.

mod support;

use pelton::{Error, Listener, Options, Receiver, Sender, Sent, inspect};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};
use support::*;

const SMALL: u64 = 64 << 10;

/// Not a test: what a child does. Without a role it does nothing.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    match role.get("role") {
        "few descriptors" => few_descriptors(&role),
        "few descriptors come" => few_descriptors_come(&role),
        "little address space" => little_address_space(&role),
        "small files" => small_files(&role),
        "quota" => over_quota(&role),
        "nothing locked" => nothing_locked(&role),
        "full bells" => full_bells(&role),
        "interrupted" => interrupted(&role),
        "no wall clock" => no_wall_clock(&role),
        "refused" => refused_calls(&role),
        "cycles" => cycles(&role),
        "one message" => one_message(&role),
        "stream" => stream(&role),
        "contained" => contained(&role),
        "round trips" => round_trips(&role),
        other => panic!("{other}"),
    }
}

/// Runs one role to its end, which is good.
#[track_caller]
fn alone(role: Role) {
    let child = Child::start(role);
    child.expect("well");
    child.wait_well();
}

fn rounds(usual: u64) -> u64 {
    std::env::var("PELTON_ROUNDS").map_or(usual, |text| text.parse().unwrap())
}

/// A channel's place below the role's directory.
fn path_of(role: &Role) -> PathBuf {
    Path::new(role.get("at")).join("channel")
}

fn name_of(role: &Role) -> String {
    format!("unix:{}", Path::new(role.get("at")).join("s").display())
}

fn role_at(role: &str, place: &Place) -> Role {
    Role::new(role).with("at", place.path().display())
}

fn small() -> Options {
    Options::new().capacity(SMALL).connect_deadline(deadline())
}

/// A path channel's, which is not to wait for the other end.
fn small_path() -> Options {
    Options::new().capacity(SMALL)
}

/// What the other end is: it takes, or sends, one message under the name, again and again, until it is killed.
fn one_message(role: &Role) {
    let (name, path) = (name_of(role), path_of(role));
    let listener = (role.get("how") == "listen").then(|| small().listen(&name).unwrap());
    say("there");
    loop {
        // Whoever starves gives up now and then in the middle: what that looks like from here is not to be judged.
        if role.get("end") == "receiver" {
            let receiver = match role.get("how") {
                "listen" => listener.as_ref().unwrap().accept_receiver_until(deadline()).map(Option::unwrap),
                "connect" => small().connect_receiver(&name),
                _ => small_path().create_receiver(&path),
            };
            if let Ok(mut receiver) = receiver {
                while receiver.receive().is_ok() || role.get("how") == "path" {}
            }
        } else {
            let sender = match role.get("how") {
                "listen" => listener.as_ref().unwrap().accept_sender_until(deadline()).map(Option::unwrap),
                "connect" => small().connect_sender(&name),
                _ => small_path().create_sender(&path),
            };
            if let Ok(mut sender) = sender {
                while sender.send(b"one").is_ok() && sender.drain().is_ok() {}
            }
        }
    }
}

// Descriptors.

/// Leaves this process so many descriptors, by filling the holes below its highest; all of them when dropped.
struct Descriptors {
    _holes: Vec<OwnedFd>,
    before: Rlimit,
}

impl Descriptors {
    fn left(count: u64) -> Descriptors {
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

/// Whether an error says that there are no descriptors left, and so what to do.
fn wants_descriptors(error: &Error) -> bool {
    match error {
        Error::System { source, .. } => {
            source.raw_os_error() == Some(libc::EMFILE) || source.to_string().contains("RLIMIT_NOFILE")
        }
        Error::DescriptorsLost { .. } => true,
        _ => false,
    }
}

/// Tries with each number of descriptors, from none on, until it works; before that each is an error that says why, and leaves
/// nothing open.
#[track_caller]
fn with_each_number<T>(what: &str, attempt: impl FnMut() -> pelton::Result<T>) -> T {
    with_each_number_and(what, attempt, || ())
}

/// And `look`s after each that failed.
#[track_caller]
fn with_each_number_and<T>(what: &str, mut attempt: impl FnMut() -> pelton::Result<T>, look: impl Fn()) -> T {
    for count in 0..100 {
        let before = descriptors();
        let few = Descriptors::left(count);
        let tried = attempt();
        drop(few);
        match tried {
            Ok(done) => return done,
            Err(error) => assert!(wants_descriptors(&error), "{what} with {count} descriptors: {error:?}"),
        }
        assert_eq!(descriptors(), before, "{what} with {count} descriptors has left some open");
        look();
    }
    panic!("{what}: not with a hundred descriptors");
}

/// Files below a directory, and below those.
fn all_below(root: &Path) -> Vec<PathBuf> {
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

fn few_descriptors(role: &Role) {
    let (name, path) = (name_of(role), path_of(role));
    let root = Path::new(role.get("at"));
    let before = descriptors();
    match role.get("how") {
        "threads" => {
            let (mut sender, mut receiver) = with_each_number("threads", || Options::new().capacity(SMALL).threads());
            sender.send(b"one").unwrap();
            assert_eq!(&*receiver.receive().unwrap(), b"one");
        }
        // The other end listens, connects, or has the directory.
        "connect" | "listen" | "path" => {
            let listener = (role.get("how") == "listen").then(|| small().listen(&name).unwrap());
            // Who listens learns of nobody but who comes; and nobody comes a second time before it has been told.
            if role.get("end") == "sender" {
                let mut sender = with_each_number("a sender", || match (&listener, role.get("how")) {
                    (Some(listener), _) => listener.accept_sender(),
                    (None, "path") => small_path().open_sender(&path),
                    (None, _) => Options::new().capacity(SMALL).connect_sender(&name),
                });
                sender.send(b"one").unwrap();
                sender.drain().unwrap();
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
                // The whole of it, or nothing.
                let looks = || match path.exists() {
                    true => assert_eq!(all_below(root).len(), 10),
                    false => assert_eq!(all_below(root), Vec::<PathBuf>::new()),
                };
                let create = || match sends {
                    true => small_path().create_sender(&path).map(|_| ()),
                    false => small_path().create_receiver(&path).map(|_| ()),
                };
                with_each_number_and("creation", create, looks);
                let all = all_below(root);
                with_each_number("looking", || inspect::info(&path));
                with_each_number("checking", || inspect::check(&path, false));
                with_each_number("recovering", || inspect::recover(&path, false));
                assert_eq!(all_below(root), all);
                with_each_number_and("removing", || inspect::remove(&path), || assert_eq!(all_below(root), all));
                assert_eq!(all_below(root), Vec::<PathBuf>::new());
            }
        }
        "bind" => {
            // SAFETY: no other thread of this process looks at its environment now.
            unsafe { std::env::set_var("XDG_RUNTIME_DIR", root) };
            for name in [&name, "short"] {
                let listener = with_each_number("listening", || Listener::bind(name));
                let found = with_each_number("asking who listens", || inspect::listeners(name));
                assert_eq!(found.len(), 1);
                // Nor is it taken for a dead one's by who cannot look.
                let mut tried = 0;
                let refused = with_each_number("listening beside another", || {
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
    assert_eq!(descriptors(), before);
    say("well");
}

fn with_few_descriptors(claim: &'static str, how: &str, others: &str) {
    for end in ["sender", "receiver"] {
        let place = Place::new(claim);
        let other = if end == "sender" { "receiver" } else { "sender" };
        let peer = || {
            let role = role_at("one message", &place).with("how", others).with("end", other);
            let child = Child::start(role);
            child.expect("there");
            child
        };
        let starving = role_at("few descriptors", &place).with("how", how).with("end", end);
        if others == "connect" {
            let child = Child::start(starving);
            let peer = peer();
            child.expect("well");
            child.wait_well();
            peer.kill();
        } else {
            let peer = peer();
            if others == "path" {
                let until = deadline();
                while !place.path().join("channel").exists() {
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
fn a_channel_between_threads_wants_descriptors_and_says_so() {
    let place = Place::new("a channel between threads wants descriptors and says so");
    alone(role_at("few descriptors", &place).with("how", "threads"));
}

#[test]
fn who_connects_without_descriptors_is_told_so_at_each_number_of_them() {
    with_few_descriptors("who connects without descriptors is told so", "connect", "listen");
}

#[test]
fn who_listens_without_descriptors_is_told_so_at_each_number_of_them() {
    with_few_descriptors("who listens without descriptors is told so", "listen", "connect");
}

#[test]
fn who_opens_a_path_without_descriptors_is_told_so_at_each_number_of_them() {
    with_few_descriptors("who opens a path without descriptors is told so", "path", "path");
}

#[test]
fn making_looking_recovering_and_removing_want_descriptors_and_leave_no_part() {
    let place = Place::new("making, looking, recovering and removing want descriptors and leave no part");
    alone(role_at("few descriptors", &place).with("how", "create"));
}

#[test]
fn a_listener_wants_descriptors_and_leaves_nothing() {
    let place = Place::new("a listener wants descriptors and leaves nothing");
    alone(role_at("few descriptors", &place).with("how", "bind"));
}

/// What comes of descriptors for which this process has no room, and of survivors and receivers that have none left.
fn few_descriptors_come(role: &Role) {
    let name = name_of(role);
    match role.get("how") {
        // Three come with each message.
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
                assert_eq!(descriptors(), before, "some of {count} are left open");
            }
            // And dropped, without a look.
            let few = Descriptors::left(1);
            drop(receiver.receive().unwrap());
            drop(few);
            assert_eq!(receiver.receive().unwrap().take_descriptors().unwrap().len(), 3);
            assert_eq!(descriptors(), before);
        }
        // Three came with each of two messages; the sender is gone.
        "taken in" => {
            let listener = small().listen(&name).unwrap();
            let mut receiver = listener.accept_receiver().unwrap();
            say("have");
            hear();
            let few = Descriptors::left(4);
            let error = receiver.resume().unwrap_err();
            drop(few);
            assert!(wants_descriptors(&error), "{error:?}");
            say("tried");
            assert!(receiver.resume_until(deadline()).unwrap());
            assert_eq!(receiver.receive().unwrap().take_descriptors().unwrap().len(), 3);
            let error = receiver.receive().unwrap().take_descriptors().unwrap_err();
            assert!(matches!(error, Error::DescriptorsLost { sent: 3, received: 1, .. }), "{error:?}");
        }
        // A lane more, of a receiver that has no room for it.
        "lane" => {
            let mut receiver = small_path().lanes(2).create_receiver(path_of(role)).unwrap();
            say("have");
            assert_eq!(&*receiver.receive_until(deadline()).unwrap().unwrap(), b"the first lane's");
            // It watches the first lane's sender by now, which takes a descriptor.
            assert!(receiver.resume_until(deadline()).unwrap());
            say("received");
            hear();
            let before = descriptors();
            let mut errors = 0;
            let found = (0..100).find(|count| {
                let few = Descriptors::left(*count);
                let mut tried = || receiver.receive_until(Instant::now() + Duration::from_millis(200)).map(drop_some);
                // Told, and told again: nothing is forgotten.
                let tried = [tried(), tried()];
                drop(few);
                for tried in &tried {
                    match tried {
                        Ok(true) => {}
                        Ok(false) => panic!("with {count} descriptors it overlooks the new lane"),
                        Err(error) => assert!(wants_descriptors(error), "{count}: {error:?}"),
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
            // A bell, a life and a page.
            assert_eq!(descriptors(), before + 3);
            say(format!("left {left}"));
            hear();
        }
        // Its peer is killed; others come after it.
        "survivor" => {
            let listener = small().listen(&name).unwrap();
            // A successor may take one message and close.
            let is_end = |error: &Error| error.is_peer_died() || error.is_closed();
            if role.get("end") == "sender" {
                let mut sender = listener.accept_sender().unwrap();
                let before = descriptors();
                say("have");
                let send = |sender: &mut Sender| sender.send(b"one").and_then(|()| sender.drain());
                while send(&mut sender).inspect_err(|error| assert!(is_end(error), "{error}")).is_ok() {}
                assert!(with_each_number("a sender's successor", || sender.resume_until(deadline())));
                while send(&mut sender).inspect_err(|error| assert!(is_end(error), "{error}")).is_err() {
                    assert!(sender.resume_until(deadline()).unwrap());
                }
                assert_eq!(descriptors(), before);
            } else {
                let mut receiver = listener.accept_receiver().unwrap();
                let before = descriptors();
                say("have");
                let receive = |receiver: &mut Receiver| {
                    let received = receiver.receive().map(drop);
                    received.inspect_err(|error| assert!(is_end(error), "{error}")).is_ok()
                };
                while receive(&mut receiver) {}
                assert!(with_each_number("a receiver's successor", || receiver.resume_until(deadline())));
                while !receive(&mut receiver) {
                    assert!(receiver.resume_until(deadline()).unwrap());
                }
                assert_eq!(descriptors(), before);
            }
        }
        other => panic!("{other}"),
    }
    say("well");
}

/// Whether there was a message.
fn drop_some(message: Option<pelton::Message<'_>>) -> bool {
    message.is_some()
}

#[test]
fn descriptors_for_which_a_receiver_has_no_room_are_told_to_be_lost_and_the_next_come() {
    let place = Place::new("descriptors for which a receiver has no room are told to be lost, and the next come");
    let child = Child::start(role_at("few descriptors come", &place).with("how", "received"));
    let mut sender = small().connect_sender(&place_name(&place)).unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    for _ in 0..7 {
        sender.send_with_descriptors(b"three", &[null.as_fd(); 3]).unwrap();
    }
    child.expect("well");
    child.wait_well();
}

fn place_name(place: &Place) -> String {
    name_of(&role_at("", place))
}

#[test]
fn a_survivor_that_cannot_take_in_all_descriptors_says_which_are_lost() {
    let place = Place::new("a survivor that cannot take in all descriptors says which are lost");
    let mut child = Child::start(role_at("few descriptors come", &place).with("how", "taken in"));
    let mut sender = small().connect_sender(&place_name(&place)).unwrap();
    child.expect("have");
    let null = std::fs::File::open("/dev/null").unwrap();
    for _ in 0..2 {
        sender.send_with_descriptors(b"three", &[null.as_fd(); 3]).unwrap();
    }
    drop(sender);
    child.tell("gone");
    // It fails, and is told that the other has no descriptors.
    let refused = small().connect_sender(&place_name(&place)).map(|_| ());
    assert!(!matches!(refused, Err(Error::Corrupt(_))), "{refused:?}");
    child.expect("tried");
    let _sender = refused.err().map(|_| small().connect_sender(&place_name(&place)).unwrap());
    child.expect("well");
    child.wait_well();
}

#[test]
fn a_receiver_without_descriptors_for_a_new_lane_says_so_and_loses_nothing() {
    let place = Place::new("a receiver without descriptors for a new lane says so, and loses nothing");
    let role = role_at("few descriptors come", &place).with("how", "lane");
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
    child.tell("go");
    // It looks all the time who is there, until everything is released.
    while second.unreleased() > 0 {
        second.arm(8).unwrap();
        second.disarm();
        std::thread::yield_now();
    }
    let line = child.line();
    assert!(line.starts_with("left"), "{line}");
    // Nobody is told that a receiver died which was there all the time.
    for sender in [&mut first, &mut second] {
        assert!(sender.drain_until(deadline()).unwrap() && sender.resume_until(deadline()).unwrap());
        assert_eq!(sender.peer().map(|peer| peer.pid), Some(child.pid()));
    }
    child.kill();
}

#[test]
fn a_survivor_without_descriptors_is_told_so_and_keeps_its_lane() {
    for end in ["sender", "receiver"] {
        let place = Place::new("a survivor without descriptors is told so, and keeps its lane");
        let child = Child::start(role_at("few descriptors come", &place).with("how", "survivor").with("end", end));
        let other = if end == "sender" { "receiver" } else { "sender" };
        let peer = || Child::start(role_at("one message", &place).with("how", "connect").with("end", other));
        let first = peer();
        child.expect("have");
        let _next = peer();
        first.kill();
        child.expect("well");
        child.wait_well();
    }
}

// Address space.

/// Lets this process map so many bytes more; without a limit when dropped.
struct Space(Rlimit);

impl Space {
    fn left(bytes: u64) -> Space {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        let used = pages.split(' ').next().unwrap().parse::<u64>().unwrap() * rustix::param::page_size() as u64;
        let before = getrlimit(Resource::As);
        setrlimit(Resource::As, Rlimit { current: Some(used + bytes), ..before }).unwrap();
        Space(before)
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        setrlimit(Resource::As, self.0).unwrap();
    }
}

/// Lines of this process's map that are a lane's.
fn mapped(root: &Path) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("memfd:pelton") || line.contains(root.to_str().unwrap())).count()
}

fn little_address_space(role: &Role) {
    let (name, path, root) = (name_of(role), path_of(role), Path::new(role.get("at")));
    // Small things come from the allocator, which ends a Rust program that it has nothing for: it has some here.
    let heap: Vec<Vec<u8>> = (0..4000).map(|_| Vec::with_capacity(1000)).collect();
    drop(heap);
    fn with_each_space<T>(what: &str, root: &Path, mut attempt: impl FnMut() -> pelton::Result<T>) -> T {
        for pages in 0..2000 {
            let before = (descriptors(), mapped(root));
            let little = Space::left(pages * 4096);
            let tried = attempt();
            drop(little);
            match tried {
                Ok(done) => {
                    assert!(pages > 10, "{what} took {pages} pages: was there a limit?");
                    return done;
                }
                Err(Error::System { source, .. }) if source.raw_os_error() == Some(libc::ENOMEM) => {}
                Err(error) => panic!("{what} with {pages} pages: {error:?}"),
            }
            assert_eq!((descriptors(), mapped(root)), before, "{what} with {pages} pages");
        }
        panic!("{what}: not with 8 MB");
    }
    match role.get("how") {
        "threads" => {
            let (mut sender, mut receiver) =
                with_each_space("threads", root, || Options::new().capacity(SMALL).threads());
            sender.send(b"one").unwrap();
            assert_eq!(&*receiver.receive().unwrap(), b"one");
        }
        "listen" => {
            let listener = with_each_space_or_none(|| small().listen(&name));
            let mut receiver = with_each_space("a receiver", root, || listener.accept_receiver());
            assert_eq!(&*receiver.receive_until(deadline()).unwrap().unwrap(), b"one");
        }
        "connect" => {
            let mut sender = with_each_space("a sender", root, || Options::new().capacity(SMALL).connect_sender(&name));
            sender.send(b"one").unwrap();
            sender.drain().unwrap();
        }
        _ => {
            let mut sender = with_each_space("creation", root, || small_path().create_sender(&path));
            let mut receiver = with_each_space("opening", root, || small_path().open_receiver(&path));
            sender.send(b"one").unwrap();
            assert_eq!(&*receiver.receive().unwrap(), b"one");
            drop((sender, receiver));
            with_each_space("checking", root, || inspect::check(&path, false));
            inspect::remove(&path).unwrap();
            assert_eq!(all_below(root), Vec::<PathBuf>::new());
        }
    }
    assert_eq!(mapped(root), 0);
    say("well");
}

/// What wants no more than a page.
fn with_each_space_or_none<T>(mut attempt: impl FnMut() -> pelton::Result<T>) -> T {
    let none = Space::left(0);
    let first = attempt();
    drop(none);
    first.unwrap_or_else(|_| attempt().unwrap())
}

#[test]
fn without_address_space_opening_fails_and_leaves_nothing() {
    for (how, others) in [("threads", None), ("path", None), ("connect", Some("listen")), ("listen", Some("connect"))] {
        let place = Place::new("without address space opening fails and leaves nothing");
        let end = if how == "connect" { "receiver" } else { "sender" };
        let peer = others.map(|how| Child::start(role_at("one message", &place).with("how", how).with("end", end)));
        if let Some(peer) = peer.as_ref().filter(|_| how == "connect") {
            peer.expect("there");
        }
        alone(role_at("little address space", &place).with("how", how));
    }
}

// Disk and files.

fn small_files(role: &Role) {
    let (path, root) = (path_of(role), Path::new(role.get("at")));
    let before = getrlimit(Resource::Fsize);
    let limit = |bytes| setrlimit(Resource::Fsize, Rlimit { current: bytes, ..before }).unwrap();
    let too_large = |error: &Error| match error {
        Error::System { source, .. } => source.raw_os_error() == Some(libc::EFBIG),
        _ => false,
    };
    let options = || Options::new().capacity(1 << 20).lanes(2);
    for bytes in [0, 1, 4095, 4096, 65535, 65536, (1 << 20) - 1] {
        limit(Some(bytes));
        let error = options().threads().unwrap_err();
        assert!(too_large(&error), "{bytes}: {error:?}");
        for error in [options().create_sender(&path).unwrap_err(), options().create_receiver(&path).unwrap_err()] {
            assert!(too_large(&error) && error.to_string().contains("RLIMIT_FSIZE"), "{bytes}: {error}");
        }
        assert_eq!(all_below(root), Vec::<PathBuf>::new());
    }
    limit(Some(1 << 20));
    options().threads().unwrap();
    drop(options().create_sender(&path).unwrap());
    let all = all_below(root);
    // What is there can be used: nothing of it is written but by mappings. A lane more cannot be made, and recovery not noted.
    for bytes in [0, 4096, 65535, 65536, (1 << 20) - 1] {
        limit(Some(bytes));
        let mut sender = options().open_sender(&path).unwrap();
        let mut receiver = options().open_receiver(&path).unwrap();
        for number in 0..2000u64 {
            sender.send(&[number as u8; 2000]).unwrap();
            assert_eq!(*receiver.receive_until(deadline()).unwrap().unwrap(), [number as u8; 2000]);
        }
        let error = options().open_sender(&path).unwrap_err();
        assert!(too_large(&error), "{bytes}: {error:?}");
        assert_eq!(all_below(root), all);
        drop((sender, receiver));
        match inspect::recover(&path, false) {
            Ok(_) => assert!(bytes >= 4096),
            Err(error) => assert!(too_large(&error), "{bytes}: {error:?}"),
        }
    }
    limit(before.current);
    drop([options().open_sender(&path).unwrap(), options().open_sender(&path).unwrap()]);
    inspect::remove(&path).unwrap();
    say("well");
}

#[test]
fn a_limit_of_file_sizes_is_an_error_and_no_signal() {
    let place = Place::new("a limit of file sizes is an error and no signal");
    alone(role_at("small files", &place));
}

/// A file system of a test's own; nothing where that is not allowed, which is said.
struct Mounted(PathBuf);

impl Mounted {
    fn new(place: &Place, options: &str) -> Option<Mounted> {
        let point = place.path().join("mounted");
        let _ = std::fs::create_dir(&point);
        if is_root() && mount(&["-t", "tmpfs", "-o", options, "tmpfs"], &point) {
            return Some(Mounted(point));
        }
        eprintln!("SKIPPED: no permission to mount a tmpfs with {options}");
        None
    }

    /// Eight MiB, of ext4.
    fn disk(place: &Place) -> Option<Mounted> {
        let (point, image) = (place.path().join("mounted"), place.path().join("image"));
        std::fs::create_dir(&point).unwrap();
        std::fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
        let made = Command::new("mkfs.ext4").args(["-q", "-O", "^has_journal", "-m", "0"]).arg(&image).status();
        let made = is_root() && made.is_ok_and(|status| status.success());
        if made && mount(&["-o", "loop", image.to_str().unwrap()], &point) {
            return Some(Mounted(point));
        }
        eprintln!("SKIPPED: no permission, or no means, to mount an ext4");
        None
    }

    /// Takes all the space that there is.
    fn fill(&self) -> PathBuf {
        use std::io::Write as _;
        let filler = self.0.join("filler");
        let mut file = std::fs::File::create(&filler).unwrap();
        while file.write_all(&[1; 4096]).is_ok() {}
        file.sync_all().unwrap();
        filler
    }

    /// Gives it back, which the system does in its own time.
    fn make_room(&self, filler: &Path) {
        std::fs::remove_file(filler).unwrap();
        let until = deadline();
        while rustix::fs::statvfs(&self.0).unwrap().f_bavail < 1000 {
            assert!(Instant::now() < until, "the disk stays full");
            std::thread::yield_now();
        }
    }

    fn resize(&self, bytes: &str) {
        assert!(mount(&["-o", &format!("remount,size={bytes}")], &self.0));
    }
}

fn mount(arguments: &[&str], point: &Path) -> bool {
    let done = Command::new("mount").args(arguments).arg(point).stderr(std::process::Stdio::null()).status();
    done.is_ok_and(|status| status.success())
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[track_caller]
fn no_space<T: std::fmt::Debug>(found: pelton::Result<T>) {
    assert!(matches!(found, Err(Error::NoSpace { .. })), "{found:?}");
}

/// As many messages as the lane or the file system takes; whether it was the file system that was full.
fn send_until_full(sender: &mut Sender, next: &mut u64) -> Option<Error> {
    let mut bytes = Vec::new();
    loop {
        payload(*next, 3000, &mut bytes);
        match sender.try_send(&bytes) {
            Ok(Sent::Sent) => *next += 1,
            Ok(_) => return None,
            Err(error) => return Some(error),
        }
    }
}

fn receive_what_is_there(receiver: &mut Receiver, next: &mut u64) {
    let mut wanted = Vec::new();
    while let Some(message) = receiver.try_receive().unwrap() {
        check(*next, Sizes::Fixed(3000), &message, &mut wanted);
        *next += 1;
    }
}

#[test]
fn on_a_file_system_of_64_kib_nothing_can_be_made_and_nothing_is_left() {
    let place = Place::new("on a file system of 64 KiB nothing can be made and nothing is left");
    let Some(mounted) = Mounted::new(&place, "size=64k") else { return };
    let path = mounted.0.join("channel");
    for capacity in [4096, SMALL, 64 << 20] {
        no_space(Options::new().capacity(capacity).create_sender(&path));
        no_space(Options::new().capacity(capacity).create_receiver(&path));
        assert_eq!(all_below(&mounted.0), Vec::<PathBuf>::new());
    }
    // A channel by a socket has no need of it.
    let name = format!("unix:{}/s", mounted.0.display());
    let listener = small().listen(&name).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| Options::new().connect_sender(&name).unwrap().send(&[7; 1 << 20]).unwrap());
        assert_eq!(*listener.accept_receiver().unwrap().receive().unwrap(), [7; 1 << 20]);
    });
}

/// At each size of the file system, page by page, through creation, growth of the lane, and a lane more.
#[test]
fn at_each_size_of_a_file_system_no_space_is_an_error_and_nothing_is_lost() {
    let place = Place::new("at each size of a file system no space is an error, and nothing is lost");
    let Some(mounted) = Mounted::new(&place, "size=4k") else { return };
    let path = mounted.0.join("channel");
    let options = || Options::new().capacity(1 << 20).lanes(2);
    let (mut created, mut stretched, mut added) = (0, 0, 0);
    for pages in (1..100).chain((100..900).step_by(13)) {
        mounted.resize(&format!("{}k", 4 * pages));
        let mut sender = match options().create_sender(&path) {
            Ok(sender) => sender,
            error => {
                no_space(error);
                assert_eq!(all_below(&mounted.0), Vec::<PathBuf>::new(), "{pages} pages");
                continue;
            }
        };
        created += 1;
        let mut receiver = options().open_receiver(&path).unwrap();
        let (mut sent, mut received) = (0, 0);
        for _ in 0..3 {
            match send_until_full(&mut sender, &mut sent) {
                Some(error) => no_space(Err::<(), _>(error)),
                None => stretched += 1,
            }
            sender.sync().unwrap();
            receive_what_is_there(&mut receiver, &mut received);
            assert_eq!(sent, received, "{pages} pages");
        }
        match options().open_sender(&path) {
            Ok(mut second) => {
                added += 1;
                second.send(b"by the second lane").unwrap();
                assert_eq!(&*receiver.receive_until(deadline()).unwrap().unwrap(), b"by the second lane");
            }
            error => no_space(error),
        }
        drop((sender, receiver));
        inspect::remove(&path).unwrap();
        assert_eq!(all_below(&mounted.0), Vec::<PathBuf>::new());
    }
    assert!(created > 10 && stretched > 3 && added > 3, "{created} created, {stretched} stretched, {added} added");
}

#[test]
fn recovery_on_a_full_disk_is_an_error_and_works_with_more() {
    let place = Place::new("recovery on a full disk is an error, and works with more");
    let Some(mounted) = Mounted::disk(&place) else { return };
    let path = mounted.0.join("channel");
    let mut sender = small_path().create_sender(&path).unwrap();
    (0..10u64).for_each(|number| sender.send(&number.to_le_bytes()).unwrap());
    drop(sender);
    // What the disk may have lost, and somebody else taken.
    let data = std::fs::OpenOptions::new().write(true).open(path.join("0.data")).unwrap();
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&data, flags, 0, SMALL).unwrap();
    data.sync_all().unwrap();
    let filler = mounted.fill();
    no_space(inspect::recover(&path, false));
    mounted.make_room(&filler);
    let done = inspect::recover(&path, false).unwrap();
    assert_eq!((done[0].kept, done[0].dropped), (0, 10));
    let mut sender = small_path().open_sender(&path).unwrap();
    let mut receiver = small_path().open_receiver(&path).unwrap();
    sender.send(b"after").unwrap();
    assert_eq!(&*receiver.receive_until(deadline()).unwrap().unwrap(), b"after");
}

#[test]
fn a_full_disk_is_an_error_at_creation_growth_and_sync_and_loses_nothing() {
    let place = Place::new("a full disk is an error at creation, growth and sync, and loses nothing");
    let Some(mounted) = Mounted::disk(&place) else { return };
    let path = mounted.0.join("channel");
    let options = || Options::new().capacity(64 << 20).lanes(2);
    let before = all_below(&mounted.0);
    let filler = mounted.fill();
    no_space(options().create_sender(&path));
    mounted.make_room(&filler);
    assert_eq!(all_below(&mounted.0), before);
    let mut sender = options().create_sender(&path).unwrap();
    let mut receiver = options().open_receiver(&path).unwrap();
    let (mut sent, mut received) = (0, 0);
    for round in 0..4 {
        no_space(Err::<(), _>(send_until_full(&mut sender, &mut sent).expect("the disk is less than the lane")));
        sender.sync().unwrap();
        no_space(options().open_sender(&path));
        receive_what_is_there(&mut receiver, &mut received);
        receiver.sync().unwrap();
        assert_eq!(sent, received);
        if round == 2 {
            // Given back, and taken by somebody else: what is to be written is allocated again, or refused.
            sender.trim().unwrap();
            mounted.fill();
        }
    }
}

/// The system's number for a user of no rights, whom tests become.
const NOBODY: u32 = 65534;

fn become_nobody() {
    // SAFETY: no pointers.
    assert_eq!(unsafe { libc::setgid(NOBODY) | libc::setuid(NOBODY) }, 0);
}

/// What a quota says is said by a filter here, as not every system has quotas: of both calls that allocate, on whatever disk.
fn over_quota(role: &Role) {
    let mut sender = Options::new().capacity(1 << 20).create_sender(path_of(role)).unwrap();
    let mut receiver = Options::new().open_receiver(path_of(role)).unwrap();
    let all = all_below(Path::new(role.get("at")));
    let (mut sent, mut received) = (0, 0);
    std::thread::scope(|scope| {
        let limited = scope.spawn(|| {
            for (name, call) in [("fallocate", libc::SYS_fallocate), ("pwrite64", libc::SYS_pwrite64)] {
                refuse(&Refused { name, call, flags: None, works: NONE }, libc::EDQUOT);
            }
            for _ in 0..3 {
                let error = send_until_full(&mut sender, &mut sent).expect("the quota is less than the lane");
                let Error::NoSpace { source, .. } = &error else { panic!("{error:?}") };
                assert_eq!(source.raw_os_error(), Some(libc::EDQUOT));
                receive_what_is_there(&mut receiver, &mut received);
                assert_eq!(sent, received);
            }
            no_space(Options::new().create_sender(path_of(role).with_file_name("another")));
        });
        limited.join().unwrap();
    });
    assert_eq!(all_below(Path::new(role.get("at"))), all);
    // With more it goes on.
    assert!(send_until_full(&mut sender, &mut sent).is_none());
    receive_what_is_there(&mut receiver, &mut received);
    assert_eq!(sent, received);
    say("well");
}

#[test]
fn a_users_quota_is_an_error_of_the_sender_and_nothing_is_damaged() {
    let place = Place::new("a user's quota is an error of the sender, and nothing is damaged");
    alone(role_at("quota", &place));
}

fn nothing_locked(role: &Role) {
    // Who has rights is not limited.
    if is_root() {
        become_nobody();
    }
    setrlimit(Resource::Memlock, Rlimit { current: Some(0), maximum: Some(0) }).unwrap();
    all_of_it(Path::new(role.get("at"))).into_iter().for_each(|(part, done)| {
        done.unwrap_or_else(|error| panic!("{part}: {error}"));
    });
    say("well");
}

#[test]
fn no_memory_need_be_locked() {
    let place = Place::new("no memory need be locked");
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(place.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    alone(role_at("nothing locked", &place));
}

// Bells that are full.

/// Duplicates of this process's eventfds, and of FIFOs whose names end so.
fn bells(root: &Path) -> Vec<OwnedFd> {
    let open = std::fs::read_dir("/proc/self/fd").unwrap().map(|fd| fd.unwrap());
    let ours = open.filter(|fd| {
        let Ok(to) = std::fs::read_link(fd.path()) else { return false };
        to.as_os_str() == "anon_inode:[eventfd]"
            || (to.starts_with(root) && to.extension().is_some_and(|kind| kind == "bell"))
    });
    let numbers: Vec<i32> = ours.map(|fd| fd.file_name().to_str().unwrap().parse().unwrap()).collect();
    // SAFETY: this process's own, which nobody closes meanwhile.
    numbers.iter().map(|number| unsafe { BorrowedFd::borrow_raw(*number) }.try_clone_to_owned().unwrap()).collect()
}

/// Rings it as often as it can count.
fn fill_bell(bell: &OwnedFd) {
    // The most that an eventfd counts to; of a FIFO these are eight bytes.
    let most = (u64::MAX - 1).to_ne_bytes();
    while rustix::io::write(bell, &most).is_ok() {}
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}

fn full_bells(role: &Role) {
    let root = Path::new(role.get("at"));
    let (mut sender, mut receiver) = match role.get("how") {
        "threads" => Options::new().capacity(SMALL).threads().unwrap(),
        _ => {
            let sender = small_path().create_sender(path_of(role)).unwrap();
            (sender, small_path().open_receiver(path_of(role)).unwrap())
        }
    };
    let bells = bells(root);
    assert!(bells.len() >= 4, "{bells:?}");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let filling = scope.spawn(|| {
            while !stop.load(SeqCst) {
                bells.iter().for_each(fill_bell);
            }
        });
        // Both sides go to sleep again and again: the lane takes two of these messages.
        for round in 0..2 {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut bytes = Vec::new();
                    for number in 0..rounds(300) {
                        payload(number, 30_000, &mut bytes);
                        sender.send(&bytes).unwrap();
                    }
                    assert!(sender.drain_until(deadline()).unwrap());
                });
                let mut wanted = Vec::new();
                for number in 0..rounds(300) {
                    let message = receiver.receive_until(deadline()).unwrap().expect("a message is sent");
                    check(number, Sizes::Fixed(30_000), &message, &mut wanted);
                    if round == 1 && number % 8 == 0 {
                        std::thread::sleep(Duration::from_micros(300));
                    }
                }
            });
            // With nobody filling them they ring for what they are for; and not early.
            stop.store(true, SeqCst);
        }
        filling.join().unwrap();
        bells.iter().for_each(fill_bell);
        let until = Instant::now() + Duration::from_millis(30);
        assert!(receiver.receive_until(until).unwrap().is_none());
        assert!(Instant::now() >= until);
    });
    say("well");
}

#[test]
fn bells_that_cannot_count_further_neither_block_nor_lose_a_wake_up() {
    for how in ["threads", "path"] {
        let place = Place::new("bells that cannot count further neither block nor lose a wake-up");
        alone(role_at("full bells", &place).with("how", how));
    }
}

// Signals.

/// Interrupts whatever system call this thread is in, a thousand times a second, as long as it lives.
struct Storm(libc::timer_t);

impl Storm {
    fn begin() -> Storm {
        extern "C" fn nothing(_: libc::c_int) {}
        // SAFETY: a handler that does nothing, without SA_RESTART; the structs live across the calls.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as *const () as usize;
            assert_eq!(libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()), 0);
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = libc::SIGUSR1;
            event.sigev_notify_thread_id = this_thread();
            let mut timer = std::ptr::null_mut();
            assert_eq!(libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer), 0);
            let every = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
            let when = libc::itimerspec { it_interval: every, it_value: every };
            assert_eq!(libc::timer_settime(timer, 0, &when, std::ptr::null_mut()), 0);
            Storm(timer)
        }
    }
}

impl Drop for Storm {
    fn drop(&mut self) {
        // SAFETY: made in `begin`.
        unsafe { libc::timer_delete(self.0) };
    }
}

/// A wait that nothing ends but its deadline.
#[track_caller]
fn in_vain<T: std::fmt::Debug>(what: &str, wait: impl FnOnce(Instant) -> T, wanted: impl FnOnce(&T) -> bool) {
    let until = Instant::now() + Duration::from_millis(25);
    let found = wait(until);
    assert!(Instant::now() >= until, "{what} ended before its deadline: {found:?}");
    assert!(wanted(&found), "{what}: {found:?}");
}

/// Every call that waits, at both ends, under signals.
fn interrupted(role: &Role) {
    let _storm = Storm::begin();
    let (name, path) = (name_of(role), path_of(role));
    let by_path = role.get("how") == "path";
    let count = rounds(300);
    let message = |number: u64| {
        let mut bytes = Vec::new();
        payload(number, 30_000, &mut bytes);
        bytes
    };
    let null = std::fs::File::open("/dev/null").unwrap();
    if role.get("end") == "receiver" {
        let mut receiver = match by_path {
            true => {
                let early = |until| small_path().connect_deadline(until).open_receiver(&path).map(|_| ());
                in_vain("opening", early, |done| matches!(done, Err(Error::NoChannel { .. })));
                let early = |until| small_path().connect_deadline(until).create_receiver(&path).map(|_| ());
                in_vain("waiting for a sender", early, |done| matches!(done, Err(Error::TimedOut(_))));
                say("listening");
                small().create_receiver(&path).unwrap()
            }
            false => {
                let listener = small().listen(&name).unwrap();
                let accept = |until| listener.accept_receiver_until(until).map(|found| found.is_none());
                in_vain("accepting a sender", accept, |done| matches!(done, Ok(true)));
                let accept = |until| listener.accept_sender_until(until).map(|found| found.is_none());
                in_vain("accepting a receiver", accept, |done| matches!(done, Ok(true)));
                say("listening");
                listener.accept_receiver_until(deadline()).unwrap().unwrap()
            }
        };
        say("open");
        let mut buffer = Vec::new();
        in_vain("receiving", |until| receiver.receive_until(until).map(drop_some), |done| matches!(done, Ok(false)));
        in_vain("copying", |until| receiver.receive_into_until(&mut buffer, until), |done| matches!(done, Ok(None)));
        say("waited");
        for number in 0..count {
            match number % 4 {
                0 => assert_eq!(*receiver.receive().unwrap(), message(number)),
                1 => assert_eq!(*receiver.receive_until(deadline()).unwrap().unwrap(), message(number)),
                2 => {
                    receiver.receive_into(&mut buffer).unwrap();
                    assert_eq!(buffer, message(number));
                }
                _ => assert_eq!(*receiver.receive_batch().unwrap().next().unwrap().unwrap(), message(number)),
            }
        }
        if !by_path {
            for _ in 0..count {
                assert_eq!(receiver.receive().unwrap().take_descriptors().unwrap().len(), 2);
            }
        }
        say("received");
        // Nobody reads until the other's waits for room are over.
        hear();
        while !matches!(&*receiver.receive().unwrap(), b"the last") {}
        assert!(receiver.receive().unwrap_err().is_peer_died());
        in_vain("resuming", |until| receiver.resume_until(until), |done| matches!(done, Ok(false)));
        say("resuming");
        assert!(receiver.resume_until(deadline()).unwrap());
        assert_eq!(&*receiver.receive().unwrap(), b"of a successor");
        say("well");
    } else {
        let mut sender = match by_path {
            true => small().create_sender(&path).unwrap(),
            false => {
                if role.get("succeeds") != "yes" {
                    let early = |until| small().connect_deadline(until).connect_sender(&name).map(|_| ());
                    in_vain("connecting", early, |done| matches!(done, Err(Error::TimedOut(_))));
                    say("early");
                    hear();
                }
                small().connect_sender(&name).unwrap()
            }
        };
        if role.get("succeeds") == "yes" {
            sender.send(b"of a successor").unwrap();
            let _ = sender.drain();
            return;
        }
        say("open");
        hear();
        for number in 0..count {
            match number % 3 {
                0 => sender.send(&message(number)).unwrap(),
                1 => assert_eq!(sender.send_until(&message(number), deadline()).unwrap(), Sent::Sent),
                _ => {
                    let mut room = sender.reserve(30_000).unwrap();
                    room.copy_from_slice(&message(number));
                    room.commit().unwrap();
                }
            }
        }
        assert!(sender.drain_until(deadline()).unwrap());
        if !by_path {
            for _ in 0..count {
                sender.send_with_descriptors(b"", &[null.as_fd(); 2]).unwrap();
            }
        }
        sender.drain().unwrap();
        hear();
        while sender.try_send(&message(0)).unwrap() == Sent::Sent {}
        let full = message(0);
        in_vain("sending", |until| sender.send_until(&full, until), |done| matches!(done, Ok(Sent::TimedOut)));
        let reserve = |until| sender.reserve_until(full.len(), until).map(|room| room.is_none());
        in_vain("reserving", reserve, |done| matches!(done, Ok(true)));
        if !by_path {
            let send = |until| sender.send_with_descriptors_until(&full, &[null.as_fd()], until);
            in_vain("sending descriptors", send, |done| matches!(done, Ok(Sent::TimedOut)));
        }
        in_vain("draining", |until| sender.drain_until(until), |done| matches!(done, Ok(false)));
        say("waited");
        sender.send(b"the last").unwrap();
        sender.drain().unwrap();
        say("sent");
        hear();
    }
}

#[test]
fn a_signal_each_millisecond_at_both_ends_ends_no_wait_and_loses_nothing() {
    for how in ["connect", "path"] {
        let place = Place::new("a signal each millisecond at both ends ends no wait and loses nothing");
        let role = |end: &str| role_at("interrupted", &place).with("how", how).with("end", end);
        let (mut sender, mut receiver);
        if how == "connect" {
            sender = Child::start(role("sender"));
            sender.expect("early");
            receiver = Child::start(role("receiver"));
            receiver.expect("listening");
            sender.tell("go");
        } else {
            receiver = Child::start(role("receiver"));
            receiver.expect("listening");
            sender = Child::start(role("sender"));
        }
        sender.expect("open");
        receiver.expect("open");
        receiver.expect("waited");
        sender.tell("go");
        receiver.expect("received");
        sender.tell("go");
        sender.expect("waited");
        receiver.tell("go");
        sender.expect("sent");
        sender.kill();
        receiver.expect("resuming");
        let successor = Child::start(role("sender").with("succeeds", "yes"));
        receiver.expect("well");
        receiver.wait_well();
        drop(successor);
    }
}

/// Of a message for which allocating memory takes longer than from one signal to the next. Where the kernel has a signal interrupt
/// that, as those did that pelton began with: Linux 6.18 does not, and this shows nothing there.
#[test]
fn a_message_of_half_a_gigabyte_is_sent_under_signals() {
    let place = Place::new("a message of half a gigabyte is sent under signals");
    let Some(mounted) = Mounted::new(&place, "size=600m") else { return };
    let mut sender = Options::new().capacity(1 << 30).create_sender(mounted.0.join("channel")).unwrap();
    let storm = Storm::begin();
    // Not written to: that it is allocated is what takes its time.
    sender.reserve((1 << 29) - 100).unwrap().commit().unwrap();
    drop(storm);
    let allocated = inspect::info(mounted.0.join("channel")).unwrap().lanes[0].allocated_bytes;
    assert!(allocated >= (1 << 29) - 100, "{allocated}");
}

// The clock on the wall.

static WALL: AtomicU64 = AtomicU64::new(0);
static OTHER_CLOCKS: AtomicU64 = AtomicU64::new(0);

/// In place of the C library's, for the whole program, standard library included: it counts who asks which clock, and has the clock
/// on the wall jump by years, this way and that.
#[unsafe(no_mangle)]
extern "C" fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> libc::c_int {
    let wall = [libc::CLOCK_REALTIME, libc::CLOCK_REALTIME_COARSE, libc::CLOCK_TAI].contains(&clock);
    let count = if wall { &WALL } else { &OTHER_CLOCKS }.fetch_add(1, SeqCst);
    // SAFETY: the caller's pointer, as the caller has to see to.
    unsafe {
        let done = libc::syscall(libc::SYS_clock_gettime, clock, time) as libc::c_int;
        if wall && done == 0 {
            (*time).tv_sec += if count % 2 == 0 { 100_000_000 } else { -100_000_000 };
        }
        done
    }
}

/// Two more ways of asking for it, which nobody takes.
#[unsafe(no_mangle)]
extern "C" fn gettimeofday(_: *mut libc::timeval, _: *mut libc::c_void) -> libc::c_int {
    WALL.fetch_add(1, SeqCst);
    -1
}

#[unsafe(no_mangle)]
extern "C" fn time(_: *mut libc::time_t) -> libc::time_t {
    WALL.fetch_add(1, SeqCst) as libc::time_t
}

fn no_wall_clock(role: &Role) {
    let root = Path::new(role.get("at"));
    let _ = std::time::SystemTime::now();
    assert!(WALL.load(SeqCst) > 0, "it is not counted who asks for the time");
    let before = (WALL.load(SeqCst), OTHER_CLOCKS.load(SeqCst));
    for (part, done) in all_of_it(root) {
        done.unwrap_or_else(|error| panic!("{part}: {error}"));
    }
    assert!(OTHER_CLOCKS.load(SeqCst) > before.1 + 50, "deadlines ask for the time");
    assert_eq!(WALL.load(SeqCst), before.0, "somebody asked for the time on the wall");
    say("well");
}

/// Which is not to be set on a machine that others use: it is shown that nothing asks for it. The system calls that wait get
/// spans of time, which the system measures by the monotonic clock; a deadline is an `Instant`, which is of the same.
#[test]
fn no_wait_asks_for_the_time_on_the_wall() {
    let place = Place::new("no wait asks for the time on the wall");
    alone(role_at("no wall clock", &place));
}

// Calls that are refused.

/// A channel of each kind, and what can be done with it, waits and deadlines included; what came of each part.
fn all_of_it(root: &Path) -> Vec<(&'static str, pelton::Result<()>)> {
    // SAFETY: no other thread of this process looks at its environment now.
    unsafe { std::env::set_var("XDG_RUNTIME_DIR", root) };
    let soon = || Instant::now() + Duration::from_millis(3);
    let use_both = |mut sender: Sender, mut receiver: Receiver| -> pelton::Result<()> {
        assert_eq!(receiver.receive_until(soon())?.map(|message| message.len()), None);
        std::thread::scope(|scope| {
            let sending = scope.spawn(move || -> pelton::Result<Sender> {
                let mut bytes = Vec::new();
                for number in 0..50 {
                    payload(number, 20_000, &mut bytes);
                    sender.send(&bytes)?;
                }
                sender.drain()?;
                Ok(sender)
            });
            let mut wanted = Vec::new();
            for number in 0..50 {
                let received = receiver.receive_until(deadline()).map(|message| {
                    check(number, Sizes::Fixed(20_000), &message.expect("it is sent"), &mut wanted);
                });
                if let Err(error) = received {
                    // Then the other is not to wait for it.
                    drop(receiver);
                    let _ = sending.join().unwrap();
                    return Err(error);
                }
            }
            let mut sender = sending.join().unwrap()?;
            sender.trim()?;
            if receiver.arm()? {
                assert!(!is_readable(receiver.as_fd()), "nothing waits, and the descriptor is readable");
                sender.send(b"rings")?;
                readable(receiver.as_fd());
            }
            assert_eq!(receiver.try_receive()?.map(|message| message.len()), Some(5));
            while sender.try_send(&[0; 20_000])? == Sent::Sent {}
            assert_eq!(sender.send_until(&[0; 20_000], soon())?, Sent::TimedOut);
            assert!(sender.arm(20_000)? && !is_readable(sender.as_fd()));
            while receiver.try_receive()?.is_some() {}
            readable(sender.as_fd());
            sender.disarm();
            drop(sender);
            assert!(receiver.receive_until(deadline()).unwrap_err().is_closed());
            Ok(())
        })
    };
    let threads = || -> pelton::Result<()> {
        let (sender, receiver) = Options::new().capacity(SMALL).threads()?;
        use_both(sender, receiver)
    };
    let path = root.join("channel");
    let by_path = || -> pelton::Result<()> {
        let mut sender = small_path().create_sender(&path)?;
        let mut receiver = small_path().open_receiver(&path)?;
        sender.sync()?;
        receiver.sync()?;
        inspect::info(&path)?;
        use_both(sender, receiver)?;
        inspect::check(&path, false)?;
        inspect::remove(&path)
    };
    let connect = |name: &str| -> pelton::Result<()> {
        let listener = Options::new().capacity(SMALL).listen(name)?;
        let (sender, receiver) = std::thread::scope(|scope| {
            let connecting = scope.spawn(|| Options::new().capacity(SMALL).connect_sender(name));
            // Who fails at once need not be waited for.
            for _ in (0..20).take_while(|_| !connecting.is_finished()) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let mut found = Ok(None);
            while matches!(found, Ok(None)) && !connecting.is_finished() {
                found = listener.accept_receiver_until(Instant::now() + Duration::from_secs(1));
            }
            // Whoever waits for it is not to wait longer.
            drop(listener);
            (connecting.join().unwrap(), found)
        });
        let (mut sender, mut receiver) = (sender?, receiver?.expect("somebody has connected"));
        let null = std::fs::File::open("/dev/null").unwrap();
        sender.send_with_descriptors(b"", &[null.as_fd()])?;
        assert_eq!(receiver.receive_until(deadline())?.expect("sent").take_descriptors()?.len(), 1);
        use_both(sender, receiver)
    };
    let name = format!("unix:{}/s", root.display());
    let done = vec![
        ("threads", threads()),
        ("path", by_path()),
        ("connect", connect(&name)),
        ("connect by a short name", connect("short")),
    ];
    use std::os::unix::fs::FileTypeExt as _;
    let is_socket = |path: &PathBuf| std::fs::symlink_metadata(path).unwrap().file_type().is_socket();
    assert_eq!(all_below(root).into_iter().filter(is_socket).collect::<Vec<_>>(), Vec::<PathBuf>::new());
    if done.iter().all(|(_, done)| done.is_ok()) {
        assert_eq!(all_below(root), Vec::<PathBuf>::new());
    }
    done
}

/// What a filter refuses: one call, or it only with some bits in one argument.
struct Refused {
    name: &'static str,
    call: libc::c_long,
    /// Which argument, and the bits in it.
    flags: Option<(u32, u32)>,
    /// Which parts work all the same; of the others each is an error.
    works: &'static [&'static str],
}

const ALL: &[&str] = &["threads", "path", "connect", "connect by a short name"];
const BUT_PATH: &[&str] = &["threads", "connect", "connect by a short name"];
const BUT_CONNECT: &[&str] = &["threads", "path"];
const PATH: &[&str] = &["path"];
const BUT_SHORT: &[&str] = &["threads", "path", "connect"];
const NONE: &[&str] = &[];

/// Every call that the library makes and some system may refuse; but for those without which no program runs.
const REFUSED: &[Refused] = &{
    const fn call(name: &'static str, call: libc::c_long, works: &'static [&'static str]) -> Refused {
        Refused { name, call, flags: None, works }
    }
    const fn with(
        name: &'static str,
        call: libc::c_long,
        flags: (u32, u32),
        works: &'static [&'static str],
    ) -> Refused {
        Refused { name, call, flags: Some(flags), works }
    }
    [
        call("membarrier", libc::SYS_membarrier, ALL),
        call("pidfd_open", libc::SYS_pidfd_open, ALL),
        with("getsockopt(SO_PEERPIDFD)", libc::SYS_getsockopt, (2, 77), ALL),
        with("memfd_create(MFD_NOEXEC_SEAL)", libc::SYS_memfd_create, (1, libc::MFD_NOEXEC_SEAL), ALL),
        call("sched_getaffinity", libc::SYS_sched_getaffinity, ALL),
        call("sched_yield", libc::SYS_sched_yield, ALL),
        call("memfd_create", libc::SYS_memfd_create, PATH),
        call("eventfd2", libc::SYS_eventfd2, NONE),
        call("epoll_create1", libc::SYS_epoll_create1, NONE),
        call("epoll_ctl", libc::SYS_epoll_ctl, NONE),
        call("preadv2", libc::SYS_preadv2, NONE),
        call("madvise", libc::SYS_madvise, NONE),
        call("poll", libc::SYS_poll, ALL),
        call("ppoll", libc::SYS_ppoll, NONE),
        call("fallocate", libc::SYS_fallocate, NONE),
        call("renameat2", libc::SYS_renameat2, BUT_PATH),
        call("mknodat", libc::SYS_mknodat, BUT_PATH),
        call("fchmod", libc::SYS_fchmod, BUT_PATH),
        call("fdatasync", libc::SYS_fdatasync, BUT_PATH),
        call("fsync", libc::SYS_fsync, BUT_PATH),
        call("pwrite64", libc::SYS_pwrite64, BUT_PATH),
        call("pread64", libc::SYS_pread64, BUT_PATH),
        with("fcntl(F_OFD_SETLK)", libc::SYS_fcntl, (1, libc::F_OFD_SETLK as u32), BUT_PATH),
        with("fcntl(F_ADD_SEALS)", libc::SYS_fcntl, (1, libc::F_ADD_SEALS as u32), PATH),
        call("flock", libc::SYS_flock, BUT_CONNECT),
        call("socket", libc::SYS_socket, BUT_CONNECT),
        call("bind", libc::SYS_bind, BUT_CONNECT),
        call("listen", libc::SYS_listen, BUT_CONNECT),
        call("connect", libc::SYS_connect, BUT_CONNECT),
        call("accept4", libc::SYS_accept4, BUT_CONNECT),
        call("sendmsg", libc::SYS_sendmsg, BUT_CONNECT),
        call("recvmsg", libc::SYS_recvmsg, BUT_CONNECT),
        call("getsockopt", libc::SYS_getsockopt, BUT_CONNECT),
        call("fstatfs", libc::SYS_fstatfs, &["threads"]),
        call("ftruncate", libc::SYS_ftruncate, NONE),
        call("mkdir", libc::SYS_mkdir, BUT_SHORT),
    ]
};

/// Has the kernel refuse a call to this thread, and those that it makes, from now on.
fn refuse(refused: &Refused, errno: i32) {
    const fn op(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
        libc::sock_filter { code: code as u16, jt, jf, k }
    }
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let equals = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let answer = op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32);
    let allow = op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW);
    let mut program = match refused.flags {
        None => vec![op(load, 0, 0, 0), op(equals, 0, 1, refused.call as u32), answer, allow],
        // The number is the first word, the arguments begin at byte 16. A number is compared, flags are looked for.
        Some((argument, bits)) => {
            let any = bits.is_power_of_two() && refused.call == libc::SYS_memfd_create;
            let test = if any { libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K } else { equals };
            vec![
                op(load, 0, 0, 0),
                op(equals, 0, 3, refused.call as u32),
                op(load, 0, 0, 16 + 8 * argument),
                op(test, 0, 1, bits),
                answer,
                allow,
            ]
        }
    };
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the program lives across the calls, which copy it.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter), 0);
    }
}

fn refused_calls(role: &Role) {
    let refused = REFUSED.iter().find(|refused| refused.name == role.get("call")).unwrap();
    refuse(refused, role.number("errno").unwrap() as i32);
    for (part, done) in all_of_it(Path::new(role.get("at"))) {
        let works = refused.works.contains(&part);
        say(format!("{part}: {}", done.as_ref().err().map_or("well".to_owned(), |error| error.to_string())));
        match done {
            Ok(()) => assert!(works, "{part} works without {}", refused.name),
            Err(error) => assert!(!works, "{part} does not work without {}: {error:?}", refused.name),
        }
    }
    say("end");
}

#[test]
fn each_call_that_the_system_refuses_is_done_without_or_an_error() {
    for refused in REFUSED {
        for errno in [libc::EPERM, libc::ENOSYS] {
            let place = Place::new("each call that the system refuses is done without, or an error");
            let role = role_at("refused", &place).with("call", refused.name).with("errno", errno);
            let child = Child::start(role);
            loop {
                let line = child.line();
                if line == "end" {
                    break;
                }
                if std::env::var_os("PELTON_SHOW").is_some() {
                    println!("{} ({errno}): {line}", refused.name);
                }
            }
            child.wait_well();
        }
    }
}

// One processor.

fn on_one_processor() {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let allowed = sched_getaffinity(None).unwrap();
    let mut one = CpuSet::new();
    one.set((0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)).unwrap());
    sched_setaffinity(None, &one).unwrap();
}

/// One end of a stream, on a processor that both ends have.
fn stream(role: &Role) {
    on_one_processor();
    let (how, count, sizes) = (How::parse(role.get("how")), role.number("count").unwrap(), Sizes::Every(3000));
    if role.get("end") == "sender" {
        let mut sender = sender(role);
        send_all(&mut sender, 0..count, sizes, how).unwrap();
        assert!(sender.drain_until(deadline()).unwrap());
        say("well");
    } else {
        let mut receiver = receiver(role);
        let (number, end) = receive_all(&mut receiver, 0, count, sizes, how);
        assert!(end.is_none() && number == count, "{number}: {end:?}");
        assert!(receiver.receive_until(deadline()).unwrap_err().is_closed());
        say("well");
    }
}

#[test]
fn on_one_processor_streams_that_fill_and_empty_the_lane_get_through_however_they_wait() {
    for by_path in [false, true] {
        for how in [How::Block, How::Spin, How::Epoll, How::Try] {
            let place = Place::new("on one processor streams that fill and empty the lane get through");
            let name = if by_path { place.path_name() } else { place.name() };
            let role = Role::new("stream").with("name", name).with("capacity", SMALL).with("how", format!("{how:?}"));
            let role = role.with("count", rounds(2000));
            let receiver = Child::start(role.clone().with("end", "receiver").with("listen", "yes"));
            receiver.expect("listening");
            let sender = Child::start(role.with("end", "sender"));
            sender.expect("well");
            receiver.expect("well");
        }
    }
}

/// One channel there and one back, a message at a time.
fn round_trips(role: &Role) {
    on_one_processor();
    let (how, count, sizes) = (How::parse(role.get("how")), role.number("count").unwrap(), Sizes::Every(3000));
    let back = role.clone().with("name", format!("{}-back", role.get("name")));
    let asks = role.get("end") == "sender";
    let (mut sender, mut receiver) = match asks {
        true => (sender(role), receiver(&back)),
        false => {
            let receiver = receiver(role);
            (sender(&back), receiver)
        }
    };
    for number in 0..count {
        if asks {
            send_all(&mut sender, number..number + 1, sizes, how).unwrap();
        }
        let (next, end) = receive_all(&mut receiver, number, 1, sizes, how);
        assert!(end.is_none() && next == number + 1, "{number}: {end:?}");
        if !asks {
            send_all(&mut sender, number..number + 1, sizes, how).unwrap();
        }
    }
    // Who has asked last closes first, or the other would be told of a death.
    if !asks {
        assert!(sender.drain_until(deadline()).unwrap());
    }
}

#[test]
fn on_one_processor_round_trips_come_back_however_they_wait() {
    for by_path in [false, true] {
        for how in [How::Block, How::Epoll] {
            let place = Place::new("on one processor round trips come back however they wait");
            let name = if by_path { place.path_name() } else { place.name() };
            let role = Role::new("round trips").with("name", name).with("how", format!("{how:?}"));
            let role = role.with("count", rounds(1000)).with("listen", "yes");
            let answers = Child::start(role.clone().with("end", "receiver"));
            answers.expect("listening");
            let asks = Child::start(role.with("end", "sender").with("listen", ""));
            answers.expect("listening");
            asks.wait_well();
            answers.wait_well();
        }
    }
}

// A container.

/// In a root that cannot be written, with 64 MiB of /dev/shm.
fn contained(_: &Role) {
    assert!(std::fs::write("/tmp/pelton-may-not-be-written", "").is_err(), "the root can be written");
    let shm = Path::new("/dev/shm");
    let space = rustix::fs::statvfs(shm).unwrap();
    assert_eq!(space.f_blocks * space.f_frsize, 64 << 20);
    // A lane of 64 MiB, full, takes nothing of it.
    let name = "unix:/dev/shm/s";
    let listener = Listener::bind(name).unwrap();
    let (mut sender, mut receiver) = std::thread::scope(|scope| {
        let connecting = scope.spawn(|| Sender::connect(name).unwrap());
        let receiver = listener.accept_receiver_until(deadline()).unwrap().unwrap();
        (connecting.join().unwrap(), receiver)
    });
    let (mut sent, mut received) = (0, 0);
    assert!(send_until_full(&mut sender, &mut sent).is_none());
    assert!(sent > 20_000, "{sent} messages fill 64 MiB");
    receive_what_is_there(&mut receiver, &mut received);
    assert_eq!(sent, received);
    drop((sender, receiver, listener));
    assert_eq!(all_below(shm), Vec::<PathBuf>::new());
    // A path channel of the same size does not fit: it is full a little earlier, which is said, and goes on.
    let path = shm.join("channel");
    let mut sender = Options::new().create_sender(&path).unwrap();
    let mut receiver = Options::new().open_receiver(&path).unwrap();
    (sent, received) = (0, 0);
    for _ in 0..2 {
        let error = send_until_full(&mut sender, &mut sent).expect("there is not so much space");
        assert!(error.to_string().contains("/dev/shm/channel: free some"), "{error}");
        no_space(Err::<(), _>(error));
        receive_what_is_there(&mut receiver, &mut received);
        assert_eq!(sent, received);
    }
    assert!(sent > 2 * 20_000, "{sent} messages fill it twice");
    // Others find no space for a channel of their own, until it is given back.
    no_space(Options::new().create_sender(shm.join("another")));
    sender.trim().unwrap();
    drop(Options::new().create_sender(shm.join("another")).unwrap());
    say("well");
}

#[test]
fn in_a_container_with_64_mib_and_a_root_that_cannot_be_written_channels_work() {
    let place = Place::new("in a container with 64 MiB and a root that cannot be written channels work");
    let with_user = ["--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"];
    let unshares = |arguments: &[&str]| {
        let done = Command::new("unshare").args(arguments).arg("true").stderr(std::process::Stdio::null()).status();
        done.is_ok_and(|status| status.success())
    };
    let Some(arguments) = [&with_user[..], &with_user[2..]].into_iter().find(|arguments| unshares(arguments)) else {
        eprintln!("SKIPPED: no permission to make namespaces");
        return;
    };
    let child = Child::start_as(role_at("contained", &place), |command| {
        let script = "mount -t tmpfs -o size=64m tmpfs /dev/shm && mount -o remount,bind,ro / && exec \"$0\" \"$@\"";
        let mut unshare = Command::new("unshare");
        unshare.args(arguments).args(["sh", "-c", script]).arg(command.get_program()).args(command.get_args());
        for (key, value) in command.get_envs() {
            unshare.env(key, value.unwrap());
        }
        unshare.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
        *command = unshare;
    });
    child.expect("well");
    child.wait_well();
}

// Again and again.

fn cycles(role: &Role) {
    let (name, path, root) = (name_of(role), path_of(role), Path::new(role.get("at")));
    let count = role.number("count").unwrap();
    let by = role.get("how");
    let listener = (by == "connect").then(|| small().listen(&name).unwrap());
    let one = |number: u64| {
        let (mut sender, mut receiver) = match &listener {
            None if by == "threads" => Options::new().capacity(SMALL).threads().unwrap(),
            None => {
                let sender = small_path().create_sender(&path).unwrap();
                (sender, small_path().create_receiver(&path).unwrap())
            }
            // Now this end listens, now the other.
            Some(listener) => std::thread::scope(|scope| {
                if number.is_multiple_of(2) {
                    let connecting = scope.spawn(|| small().connect_sender(&name).unwrap());
                    let receiver = listener.accept_receiver_until(deadline()).unwrap().unwrap();
                    (connecting.join().unwrap(), receiver)
                } else {
                    let connecting = scope.spawn(|| small().connect_receiver(&name).unwrap());
                    let sender = listener.accept_sender_until(deadline()).unwrap().unwrap();
                    (sender, connecting.join().unwrap())
                }
            }),
        };
        sender.send(&number.to_le_bytes()).unwrap();
        assert_eq!(*receiver.receive_until(deadline()).unwrap().unwrap(), number.to_le_bytes());
        if number.is_multiple_of(3) {
            drop((sender, receiver));
        } else {
            drop((receiver, sender));
        }
        if number.is_multiple_of(500) {
            say("goes on");
            // SAFETY: no pointers. A hang is a hang of so many, not of all.
            unsafe { libc::alarm(DEADLINE.as_secs() as u32) };
        }
    };
    (0..10).for_each(one);
    let before = (descriptors(), mappings());
    (0..count).for_each(one);
    let after = (descriptors(), mappings());
    assert_eq!((after.0, mapped(root)), (before.0, 0), "descriptors, and mappings of lanes");
    // The allocator may take a mapping or give one back.
    assert!(after.1 <= before.1 + 3, "mappings: {} before, {} after", before.1, after.1);
    say("well");
}

#[test]
fn channels_opened_and_closed_again_and_again_leave_no_descriptor_and_no_mapping() {
    for (how, count) in [("threads", 3000), ("connect", 2000), ("path", 2000)] {
        let place = Place::unwatched();
        let role = role_at("cycles", &place).with("how", how).with("count", rounds(count));
        let child = Child::start(role);
        while child.line() == "goes on" {}
        child.wait_well();
        let left = if how == "path" { 10 } else { 0 };
        assert_eq!(all_below(place.path()).len(), left);
    }
}

/// As above, when the other end is killed each time.
#[test]
fn peers_killed_again_and_again_leave_no_descriptor_and_no_mapping() {
    let place = Place::unwatched();
    let listener = small().listen(&place_name(&place)).unwrap();
    let ours = || {
        let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let open = links.filter_map(|fd| std::fs::read_link(fd.path()).ok()).filter(|to| to.starts_with(place.path()));
        (mapped(place.path()), open.count())
    };
    for number in 0..rounds(100) {
        let (how, end) = [("connect", "sender"), ("connect", "receiver"), ("path", "sender"), ("path", "receiver")]
            [number as usize % 4];
        let child = Child::start(role_at("one message", &place).with("how", how).with("end", end));
        let path = place.path().join("channel");
        let died = |error: Error| assert!(error.is_peer_died(), "{error}");
        if end == "sender" {
            let mut receiver = match how {
                "connect" => listener.accept_receiver_until(deadline()).unwrap().unwrap(),
                _ => small_path().create_receiver(&path).unwrap(),
            };
            assert_eq!(&*receiver.receive_until(deadline()).unwrap().unwrap(), b"one");
            child.kill();
            while receiver.receive_until(deadline()).map(drop_some).map_err(died).is_ok() {}
        } else {
            let mut sender = match how {
                "connect" => listener.accept_sender_until(deadline()).unwrap().unwrap(),
                _ => small_path().create_sender(&path).unwrap(),
            };
            sender.send(b"one").unwrap();
            assert!(sender.drain_until(deadline()).unwrap());
            assert!(how == "connect" || sender.resume_until(deadline()).unwrap());
            child.kill();
            sender.send(b"nobody takes this").map_err(died).unwrap_or_default();
            while sender.drain_until(deadline()).map_err(died).is_ok() {}
            if how == "path" {
                drop(sender);
                let mut receiver = small_path().open_receiver(&path).unwrap();
                while receiver.receive_until(deadline()).is_ok() {}
            }
        }
        assert_eq!(ours(), (0, 0), "after {number} of {how}, {end}");
    }
}
