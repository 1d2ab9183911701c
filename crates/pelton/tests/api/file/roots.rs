//! Paths: roots, rules of resolution, trailing slashes.

use super::*;

#[test]
fn no_path_escapes_a_rooted_engine() {
    everywhere("no path escapes a rooted engine", |case| {
        let (inside, outside) = (case.path("inside"), case.path("outside"));
        std::fs::create_dir_all(inside.join("dir/sub")).unwrap();
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("secret"), b"secret").unwrap();
        std::fs::write(inside.join("dir/file"), b"file").unwrap();
        let link = |target: &str, name: &str| std::os::unix::fs::symlink(target, inside.join(name)).unwrap();
        link("../outside", "up");
        link(outside.to_str().unwrap(), "absolute");
        link("../outside/secret", "dir/../secret-link");
        link("dir", "good");
        link("/proc/self/root", "magic");
        let mut engine = case.options.clone().root(&inside).build().unwrap();
        let absolute = outside.join("secret");
        let ways = [
            "up/secret",
            "absolute/secret",
            "../outside/secret",
            "dir/../../outside/secret",
            "magic/etc/passwd",
            "good/../../outside/secret",
        ];
        for way in ways.iter().copied().chain([absolute.to_str().unwrap()]) {
            let attempts = [
                Operation::open(way, Open::for_reading()),
                Operation::open(way, Open::for_both().create(0o600)),
                Operation::open(format!("{way}-new"), Open::for_writing().create(0o600)),
                Operation::stat(way),
                Operation::stat_link(way),
                Operation::set_times(way, None, Some(SystemTime::UNIX_EPOCH)),
                Operation::unlink(way),
                Operation::remove_directory(way),
                Operation::rename(way, "taken"),
                Operation::rename("dir/file", way),
                Operation::link(way, "taken"),
                Operation::link("dir/file", format!("{way}-new")),
                Operation::symlink("dir", format!("{way}-new")),
                Operation::read_link(way),
                Operation::make_directory(format!("{way}-new"), 0o700),
            ];
            for attempt in attempts {
                let text = format!("{attempt:?}");
                let error = ran(&mut engine, attempt).expect_err(&text);
                assert!(["EXDEV", "ELOOP"].contains(&errno(&error)), "{text}: {error}");
            }
        }
        // A symbolic link as the last name does not escape either.
        for operation in [
            Operation::open("secret-link", Open::for_reading()),
            Operation::stat("secret-link"),
            Operation::stat("up/"),
            Operation::open("..", Open::for_reading()),
            Operation::stat("/"),
            Operation::stat(".."),
        ] {
            let text = format!("{operation:?}");
            assert_eq!(errno(&ran(&mut engine, operation).expect_err(&text)), "EXDEV", "{text}");
        }
        assert_eq!(std::fs::read(outside.join("secret")).unwrap(), b"secret");
        assert_ne!(std::fs::metadata(outside.join("secret")).unwrap().modified().unwrap(), SystemTime::UNIX_EPOCH);
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 1);
        assert_eq!(std::fs::read(inside.join("dir/file")).unwrap(), b"file");

        // Inside the root everything works, including links.
        let file = ran(&mut engine, Operation::open("good/file", Open::for_both())).unwrap().into_file().unwrap();
        assert_eq!(ran(&mut engine, Operation::read_at(&file, vec![0; 9], 0)).unwrap().bytes(), b"file");
        let Ok(Output::Path(target)) = ran(&mut engine, Operation::read_link("absolute")).unwrap().outcome else {
            panic!()
        };
        assert_eq!(target, outside);
        ran(&mut engine, Operation::make_directory("dir/new/", 0o700)).unwrap();
        ran(&mut engine, Operation::rename("dir/file", "dir/new/file")).unwrap();
        ran(&mut engine, Operation::link("dir/new/file", "dir/../second")).unwrap();
        ran(&mut engine, Operation::symlink("second", "third")).unwrap();
        ran(&mut engine, Operation::set_times("third", None, Some(SystemTime::UNIX_EPOCH))).unwrap();
        let Ok(Output::Stat(found)) = ran(&mut engine, Operation::stat("./third")).unwrap().outcome else { panic!() };
        assert_eq!((found.links, found.modified), (2, SystemTime::UNIX_EPOCH));
        ran(&mut engine, Operation::unlink("up")).unwrap();
        assert!(outside.exists());
        // A link created inside may contain any path, and leads nowhere outside.
        ran(&mut engine, Operation::symlink("/etc", "etc")).unwrap();
        assert_eq!(errno(&ran(&mut engine, Operation::open("etc/passwd", Open::for_reading())).unwrap_err()), "EXDEV");
    });
}

#[test]
fn path_resolution_follows_its_rules() {
    everywhere("path resolution follows its rules", |case| {
        let mut engine = case.engine();
        std::fs::create_dir(case.path("dir")).unwrap();
        std::fs::write(case.path("dir/file"), b"").unwrap();
        std::os::unix::fs::symlink("dir", case.path("link")).unwrap();
        std::os::unix::fs::symlink("dir/file", case.path("file-link")).unwrap();
        let mut found = |path: PathBuf, how: Open| {
            ran(&mut engine, Operation::open(path, how)).map(drop).map_err(|error| errno(&error))
        };
        assert_eq!(found(case.path("link/file"), Open::for_reading()), Ok(()));
        assert_eq!(found(case.path("link/file"), Open::for_reading().no_symlinks()), Err("ELOOP"));
        assert_eq!(found(case.path("link/file"), Open::for_reading().no_follow()), Ok(()));
        assert_eq!(found(case.path("file-link"), Open::for_reading().no_follow()), Err("ELOOP"));
        assert_eq!(found("/proc/self/status".into(), Open::for_reading().one_mount()), Err("EXDEV"));
        let made = case.path("made");
        assert_eq!(found(made.clone(), Open::for_writing().create(0o600).no_symlinks()), Ok(()));
        std::fs::write(&made, b"1234").unwrap();
        assert_eq!(found(made.clone(), Open::for_writing().truncate()), Ok(()));
        assert_eq!(std::fs::metadata(&made).unwrap().len(), 0);
    });
}

#[test]
fn a_trailing_slash_requires_a_directory_below_a_root_too() {
    everywhere("a trailing slash requires a directory", |case| {
        let inside = case.path("inside");
        let mut rooted = {
            std::fs::create_dir_all(inside.join("dir")).unwrap();
            std::fs::write(inside.join("file"), b"").unwrap();
            std::os::unix::fs::symlink("..", inside.join("out")).unwrap();
            std::os::unix::fs::symlink("dir", inside.join("in")).unwrap();
            case.options.clone().root(&inside).build().unwrap()
        };
        let mut plain = case.engine();
        let at = |name: &str, is_rooted: bool| if is_rooted { PathBuf::from(name) } else { inside.join(name) };
        for name in ["file/", "file//", "dir/", "in/", "missing/"] {
            let operations: [fn(PathBuf, PathBuf) -> Operation; 8] = [
                |name, _| Operation::unlink(name),
                |name, other| Operation::rename(name, other),
                |name, other| Operation::link(name, other),
                |name, other| Operation::link(other.with_file_name("file"), name),
                |name, _| Operation::symlink("x", name),
                |name, _| Operation::read_link(name),
                |name, _| Operation::stat_link(name),
                |name, _| Operation::open(name, Open::for_reading()),
            ];
            for (number, make) in operations.iter().enumerate() {
                let mut results = [true, false].map(|is_rooted| {
                    let engine = if is_rooted { &mut rooted } else { &mut plain };
                    let results = ran(engine, make(at(name, is_rooted), at("other", is_rooted)));
                    // Restores the previous state.
                    if inside.join("other").exists() {
                        std::fs::rename(inside.join("other"), inside.join(name.trim_end_matches('/'))).unwrap();
                    }
                    results.map(drop).map_err(|error| errno(&error))
                });
                // If two errors apply, either may be reported.
                if results[0] == Err("EEXIST") && results[1] == Err("ENOENT") {
                    results[0] = results[1];
                }
                assert_eq!(results[0], results[1], "operation {number} of {name}: below a root, and without");
            }
        }
        // An escaping path reveals nothing about its target.
        for operation in [Operation::read_link("out/"), Operation::link("out/", "x")] {
            assert_eq!(errno(&ran(&mut rooted, operation).unwrap_err()), "EXDEV");
        }
        assert!(inside.join("file").exists() && inside.join("dir").exists());
    });
}
