//! No free address space, and no lockable memory.

use super::*;

/// Limits the address space to that many more bytes; dropping it removes the limit.
pub struct Space(Rlimit);

impl Space {
    pub fn left(bytes: u64) -> Space {
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

/// The lines of this process's memory map that belong to lanes.
pub fn mapped(root: &Path) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("memfd:pelton") || line.contains(root.to_str().unwrap())).count()
}

pub fn little_address_space(role: &Role) {
    let (name, path, root) = (name_of(role), path_of(role), Path::new(role.get("at")));
    // Small allocations come from the allocator, which aborts a Rust program when it fails: the test reserves some
    // memory for it.
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
                Err(Error::System { error: source, .. }) if source.raw_os_error() == Some(libc::ENOMEM) => {}
                Err(error) => panic!("{what} with {pages} pages: {error:?}"),
            }
            eventually_is(before, &format!("after {what} with {pages} pages"), || (descriptors(), mapped(root)));
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
            sender.wait_released().unwrap();
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
    report("well");
}

/// Operations that need at most a page.
fn with_each_space_or_none<T>(mut attempt: impl FnMut() -> pelton::Result<T>) -> T {
    let none = Space::left(0);
    let first = attempt();
    drop(none);
    first.unwrap_or_else(|_| attempt().unwrap())
}

#[test]
fn without_address_space_opening_fails_and_leaves_nothing() {
    for (how, others) in [("threads", None), ("path", None), ("connect", Some("listen")), ("listen", Some("connect"))] {
        let dir = TestDir::new("without address space opening fails and leaves nothing");
        let end = if how == "connect" { "receiver" } else { "sender" };
        let peer = others.map(|how| Child::start(role_at("one message", &dir).with("how", how).with("end", end)));
        if let Some(peer) = peer.as_ref().filter(|_| how == "connect") {
            peer.expect("there");
        }
        alone(role_at("little address space", &dir).with("how", how));
    }
}

pub fn nothing_locked(role: &Role) {
    // The limit does not apply to a privileged user.
    if is_root() {
        become_nobody();
    }
    setrlimit(Resource::Memlock, Rlimit { current: Some(0), maximum: Some(0) }).unwrap();
    all_of_it(Path::new(role.get("at"))).into_iter().for_each(|(part, done)| {
        done.unwrap_or_else(|error| panic!("{part}: {error}"));
    });
    report("well");
}

#[test]
fn no_memory_need_be_locked() {
    let dir = TestDir::new("no memory need be locked");
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    alone(role_at("nothing locked", &dir));
}
