//! Small file systems, full disks, limits of file sizes, quotas.

use super::*;

pub fn small_files(role: &Role) {
    let (path, root) = (path_of(role), Path::new(role.get("at")));
    let before = getrlimit(Resource::Fsize);
    let limit = |bytes| setrlimit(Resource::Fsize, Rlimit { current: bytes, ..before }).unwrap();
    let too_large = |error: &Error| match error {
        Error::System { error: source, .. } => source.raw_os_error() == Some(libc::EFBIG),
        _ => false,
    };
    let options = || <Options>::new().capacity(1 << 20).lanes(2);
    for bytes in [0, 1, 4095, 4096, 65535, 65536, (1 << 20) - 1] {
        limit(Some(bytes));
        let error = options().cast().threads().unwrap_err();
        assert!(too_large(&error), "{bytes}: {error:?}");
        for error in
            [options().cast().create_sender(&path).unwrap_err(), options().cast().create_receiver(&path).unwrap_err()]
        {
            assert!(too_large(&error) && error.to_string().contains("RLIMIT_FSIZE"), "{bytes}: {error}");
        }
        assert_eq!(all_below(root), Vec::<PathBuf>::new());
    }
    limit(Some(1 << 20));
    options().cast().threads().unwrap();
    drop(options().cast().create_sender(&path).unwrap());
    let all = all_below(root);
    // The existing channel remains usable: it is written only by mappings. Creating another lane fails, and so does
    // recording a recovery.
    for bytes in [0, 4096, 65535, 65536, (1 << 20) - 1] {
        limit(Some(bytes));
        let mut sender = options().cast().open_sender(&path).unwrap();
        let mut receiver = options().cast().open_receiver(&path).unwrap();
        for number in 0..2000u64 {
            sender.send(&[number as u8; 2000]).unwrap();
            assert_eq!(*receiver.receive_until(deadline()).unwrap().unwrap(), [number as u8; 2000]);
        }
        let error = options().cast().open_sender(&path).unwrap_err();
        assert!(too_large(&error), "{bytes}: {error:?}");
        assert_eq!(all_below(root), all);
        drop((sender, receiver));
        match inspect::recover(&path, false) {
            Ok(_) => assert!(bytes >= 4096),
            Err(error) => assert!(too_large(&error), "{bytes}: {error:?}"),
        }
    }
    limit(before.current);
    drop([options().cast().open_sender(&path).unwrap(), options().cast().open_sender(&path).unwrap()]);
    inspect::remove(&path).unwrap();
    report("well");
}

#[test]
fn a_file_size_limit_is_an_error_and_no_signal() {
    let dir = TestDir::new("a file size limit is an error and no signal");
    alone(role_at("small files", &dir));
}

/// An ext4 file system of eight MiB.
fn disk(dir: &TestDir) -> Option<Mounted> {
    let (point, image) = (dir.path().join("mounted"), dir.path().join("image"));
    std::fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
    let made = Command::new("mkfs.ext4").args(["-q", "-O", "^has_journal", "-m", "0"]).arg(&image).status();
    let made = made.is_ok_and(|status| status.success());
    let mounted = made.then(|| Mounted::by(&point, &["-o", "loop", image.to_str().unwrap()])).flatten();
    if mounted.is_none() {
        eprintln!("SKIPPED: no permission, or no means, to mount an ext4");
    }
    mounted
}

/// Fills a file system.
fn fill(mounted: &Mounted) -> PathBuf {
    use std::io::Write as _;
    let filler = mounted.0.join("filler");
    let mut file = std::fs::File::create(&filler).unwrap();
    while file.write_all(&[1; 4096]).is_ok() {}
    file.sync_all().unwrap();
    filler
}

/// Frees the space; the system needs some time for that.
fn free_space(mounted: &Mounted, filler: &Path) {
    std::fs::remove_file(filler).unwrap();
    eventually("the disk has free space again", || rustix::fs::statvfs(&mounted.0).unwrap().f_bavail >= 1000);
}

#[track_caller]
pub fn no_space<T: std::fmt::Debug>(found: pelton::Result<T>) {
    assert!(matches!(found, Err(Error::NoSpace { .. })), "{found:?}");
}

/// Sends as many messages as the lane or the file system takes; returns whether the file system was full.
pub fn send_until_full(sender: &mut Sender, next: &mut u64) -> Option<Error> {
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

pub fn receive_available(receiver: &mut Receiver, next: &mut u64) {
    let mut wanted = Vec::new();
    while let Some(message) = receiver.try_receive().unwrap() {
        check(*next, Sizes::Fixed(3000), &message, &mut wanted);
        *next += 1;
    }
}

#[test]
fn on_a_file_system_of_64_kib_creation_fails_and_leaves_nothing() {
    let dir = TestDir::new("on a file system of 64 KiB creation fails and leaves nothing");
    let Some(mounted) = Mounted::tmpfs(&dir.path().join("mounted"), "size=64k") else { return };
    let path = mounted.0.join("channel");
    for capacity in [4096, SMALL, 64 << 20] {
        no_space(Options::new().capacity(capacity).create_sender(&path));
        no_space(Options::new().capacity(capacity).create_receiver(&path));
        assert_eq!(all_below(&mounted.0), Vec::<PathBuf>::new());
    }
    // A channel by a socket needs no disk space.
    let name = format!("unix:{}/s", mounted.0.display());
    let listener = Options::new().listen(&name).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| Options::new().connect_sender(&name).unwrap().send(&[7; 1 << 20]).unwrap());
        assert_eq!(*listener.accept_receiver().unwrap().receive().unwrap(), [7; 1 << 20]);
    });
}

/// At each size of the file system, page by page, through creation, growth of the lane, and one more lane.
#[test]
fn at_each_size_of_a_file_system_no_space_is_an_error_and_nothing_is_lost() {
    let dir = TestDir::new("at each size of a file system no space is an error, and nothing is lost");
    let Some(mounted) = Mounted::tmpfs(&dir.path().join("mounted"), "size=4k") else { return };
    let path = mounted.0.join("channel");
    let options = || Options::new().capacity(1 << 20).lanes(2);
    let (mut created, mut enlarged, mut added) = (0, 0, 0);
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
        let mut receiver = options().cast().open_receiver(&path).unwrap();
        let (mut sent, mut received) = (0, 0);
        for _ in 0..3 {
            match send_until_full(&mut sender, &mut sent) {
                Some(error) => no_space(Err::<(), _>(error)),
                None => enlarged += 1,
            }
            sender.sync().unwrap();
            receive_available(&mut receiver, &mut received);
            assert_eq!(sent, received, "{pages} pages");
        }
        match options().cast().open_sender(&path) {
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
    assert!(created > 10 && enlarged > 3 && added > 3, "{created} created, {enlarged} stretched, {added} added");
}

#[test]
fn recovery_on_a_full_disk_is_an_error_and_works_with_more_space() {
    let dir = TestDir::new("recovery on a full disk is an error and works with more space");
    let Some(mounted) = disk(&dir) else { return };
    let path = mounted.0.join("channel");
    let mut sender = small_path().create_sender(&path).unwrap();
    (0..10u64).for_each(|number| sender.send(&number.to_le_bytes()).unwrap());
    drop(sender);
    // Memory that the disk may have lost, and another file may have taken.
    let data = std::fs::OpenOptions::new().write(true).open(path.join("0.data")).unwrap();
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&data, flags, 0, SMALL).unwrap();
    data.sync_all().unwrap();
    let filler = fill(&mounted);
    no_space(inspect::recover(&path, false));
    free_space(&mounted, &filler);
    let done = inspect::recover(&path, false).unwrap();
    assert_eq!((done[0].kept, done[0].dropped), (0, 10));
    let mut sender = small_path().open_sender(&path).unwrap();
    let mut receiver = small_path().open_receiver(&path).unwrap();
    sender.send(b"after").unwrap();
    assert_eq!(&*receiver.receive_until(deadline()).unwrap().unwrap(), b"after");
}

#[test]
fn a_full_disk_is_an_error_at_creation_growth_and_sync_and_loses_nothing() {
    let dir = TestDir::new("a full disk is an error at creation, growth and sync, and loses nothing");
    let Some(mounted) = disk(&dir) else { return };
    let path = mounted.0.join("channel");
    let options = || Options::new().capacity(64 << 20).lanes(2);
    let before = all_below(&mounted.0);
    let filler = fill(&mounted);
    no_space(options().create_sender(&path));
    free_space(&mounted, &filler);
    assert_eq!(all_below(&mounted.0), before);
    let mut sender = options().create_sender(&path).unwrap();
    let mut receiver = options().cast().open_receiver(&path).unwrap();
    let (mut sent, mut received) = (0, 0);
    for round in 0..4 {
        no_space(Err::<(), _>(send_until_full(&mut sender, &mut sent).expect("the disk is less than the lane")));
        sender.sync().unwrap();
        no_space(options().cast().open_sender(&path));
        receive_available(&mut receiver, &mut received);
        receiver.sync().unwrap();
        assert_eq!(sent, received);
        if round == 2 {
            // The lane returns the space and another file takes it: before a write it is allocated again, or refused.
            sender.trim().unwrap();
            fill(&mounted);
        }
    }
}

/// The user id of an unprivileged user, which tests switch to.
const NOBODY: u32 = 65534;

pub fn become_nobody() {
    // SAFETY: no pointers.
    assert_eq!(unsafe { libc::setgid(NOBODY) | libc::setuid(NOBODY) }, 0);
}

/// A seccomp filter stands in for a quota, since not every system has quotas. It refuses both calls that allocate, on
/// any disk.
pub fn over_quota(role: &Role) {
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
                let Error::NoSpace { error: source, .. } = &error else { panic!("{error:?}") };
                assert_eq!(source.raw_os_error(), Some(libc::EDQUOT));
                receive_available(&mut receiver, &mut received);
                assert_eq!(sent, received);
            }
            no_space(Options::new().create_sender(path_of(role).with_file_name("another")));
        });
        limited.join().unwrap();
    });
    assert_eq!(all_below(Path::new(role.get("at"))), all);
    // With more space the sender continues.
    assert!(send_until_full(&mut sender, &mut sent).is_none());
    receive_available(&mut receiver, &mut received);
    assert_eq!(sent, received);
    report("well");
}

#[test]
fn a_users_quota_is_an_error_of_the_sender_and_nothing_is_damaged() {
    let dir = TestDir::new("a user's quota is an error of the sender, and nothing is damaged");
    alone(role_at("quota", &dir));
}
