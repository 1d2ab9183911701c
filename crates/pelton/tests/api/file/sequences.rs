//! Random sequences of operations compared with `std::fs`; also at a file size limit, in a separate process.
//! `PROPTEST_CASES` is their number.

use super::*;
use proptest::prelude::*;

/// The elements of a random sequence. Names are numbers below 6, handles below 3.
#[derive(Clone, Debug)]
enum Step {
    Open { handle: usize, name: usize, create: bool, truncate: bool, append: bool },
    Write { handle: usize, offset: u64, bytes: usize },
    WritePieces { handle: usize, offset: u64, pieces: Vec<usize> },
    Append { handle: usize, bytes: usize },
    Read { handle: usize, offset: u64, bytes: usize },
    Truncate { handle: usize, bytes: u64 },
    Sync { handle: usize },
    Stat { name: usize, follows: bool },
    Unlink { name: usize },
    Rename { from: usize, to: usize },
    Link { from: usize, to: usize },
    Symlink { target: usize, name: usize },
    ReadLink { name: usize },
    MakeDirectory { name: usize },
    RemoveDirectory { name: usize },
    Copy { from: usize, to: usize, from_offset: u64, to_offset: u64, bytes: u64 },
    Close { handle: usize },
}

fn any_step() -> impl Strategy<Value = Step> {
    let (name, handle) = (0..6usize, 0..3usize);
    let offset = prop_oneof![4 => 0..20_000u64, 1 => 0..1_000_000u64];
    let bytes = prop_oneof![4 => 0..9000usize, 1 => 250_000..300_000usize];
    prop_oneof![
        6 => (handle.clone(), name.clone(), any::<bool>(), any::<bool>(), any::<bool>())
            .prop_map(|(handle, name, create, truncate, append)| Step::Open { handle, name, create, truncate: truncate && create, append }),
        6 => (handle.clone(), offset.clone(), bytes.clone()).prop_map(|(handle, offset, bytes)| Step::Write { handle, offset, bytes }),
        2 => (handle.clone(), offset.clone(), prop::collection::vec(0..5000usize, 0..6))
            .prop_map(|(handle, offset, pieces)| Step::WritePieces { handle, offset, pieces }),
        3 => (handle.clone(), bytes.clone()).prop_map(|(handle, bytes)| Step::Append { handle, bytes }),
        6 => (handle.clone(), offset.clone(), bytes).prop_map(|(handle, offset, bytes)| Step::Read { handle, offset, bytes }),
        2 => (handle.clone(), offset.clone()).prop_map(|(handle, bytes)| Step::Truncate { handle, bytes }),
        1 => handle.clone().prop_map(|handle| Step::Sync { handle }),
        3 => (name.clone(), any::<bool>()).prop_map(|(name, follows)| Step::Stat { name, follows }),
        2 => name.clone().prop_map(|name| Step::Unlink { name }),
        2 => (name.clone(), name.clone()).prop_map(|(from, to)| Step::Rename { from, to }),
        1 => (name.clone(), name.clone()).prop_map(|(from, to)| Step::Link { from, to }),
        1 => (name.clone(), name.clone()).prop_map(|(target, name)| Step::Symlink { target, name }),
        1 => name.clone().prop_map(|name| Step::ReadLink { name }),
        1 => name.clone().prop_map(|name| Step::MakeDirectory { name }),
        1 => name.prop_map(|name| Step::RemoveDirectory { name }),
        1 => (handle.clone(), handle.clone(), offset.clone(), offset.clone(), offset)
            .prop_map(|(from, to, from_offset, to_offset, bytes)| Step::Copy { from, to, from_offset, to_offset, bytes }),
        1 => handle.prop_map(|handle| Step::Close { handle }),
    ]
}

/// The outcome of a step, comparable between both sides.
#[derive(Debug, PartialEq)]
enum Outcome {
    Nothing,
    Count(usize),
    /// That many bytes, and then this error.
    Cut(usize, i32),
    Bytes(Vec<u8>),
    Is(Kind, u64, u64),
    Path(PathBuf),
    Errno(i32),
}

fn name(name: usize) -> String {
    // The last two are in a directory that may be missing.
    if name < 4 { format!("n{name}") } else { format!("n3/m{name}") }
}

type Handles<T> = [Option<T>; 3];

/// The step by `std::fs`.
fn by_std(root: &Path, handles: &mut Handles<std::fs::File>, step: &Step, seed: u64) -> Option<Outcome> {
    let at = |number: &usize| root.join(name(*number));
    let nothing = |result: std::io::Result<()>| result.map(|()| Outcome::Nothing);
    let outcome = match step {
        Step::Open { handle, name, create, truncate, append } => {
            let mut how = std::fs::OpenOptions::new();
            how.read(true).write(true).create(*create).truncate(*truncate).mode(0o600);
            if *append {
                how.custom_flags(libc::O_APPEND);
            }
            how.open(at(name)).map(|file| {
                handles[*handle] = Some(file);
                Outcome::Nothing
            })
        }
        Step::Write { handle, offset, bytes } => put(handles[*handle].as_ref()?, &pattern(seed, *bytes), *offset),
        Step::WritePieces { handle, offset, pieces } => {
            put(handles[*handle].as_ref()?, &pattern(seed, pieces.iter().sum()), *offset)
        }
        Step::Append { handle, bytes } => {
            let file = handles[*handle].as_ref()?;
            file.metadata().and_then(|found| put(file, &pattern(seed, *bytes), found.len()))
        }
        Step::Read { handle, offset, bytes } => {
            let (file, mut buffer, mut done) = (handles[*handle].as_ref()?, vec![0; *bytes], 0);
            loop {
                match file.read_at(&mut buffer[done..], offset + done as u64) {
                    Ok(0) => break Ok(Outcome::Bytes(buffer[..done].to_vec())),
                    Ok(more) => done += more,
                    Err(error) => break Err(error),
                }
            }
        }
        Step::Truncate { handle, bytes } => nothing(handles[*handle].as_ref()?.set_len(*bytes)),
        Step::Sync { handle } => nothing(handles[*handle].as_ref()?.sync_all()),
        Step::Stat { name, follows } => {
            let found = if *follows { std::fs::metadata(at(name)) } else { std::fs::symlink_metadata(at(name)) };
            found.map(|found| {
                let kind = match found.file_type() {
                    kind if kind.is_dir() => Kind::Directory,
                    kind if kind.is_symlink() => Kind::Symlink,
                    _ => Kind::File,
                };
                Outcome::Is(kind, if kind == Kind::File { found.len() } else { 0 }, found.nlink())
            })
        }
        Step::Unlink { name } => nothing(std::fs::remove_file(at(name))),
        Step::Rename { from, to } => nothing(std::fs::rename(at(from), at(to))),
        Step::Link { from, to } => nothing(std::fs::hard_link(at(from), at(to))),
        Step::Symlink { target, name: link } => nothing(std::os::unix::fs::symlink(name(*target), at(link))),
        Step::ReadLink { name } => std::fs::read_link(at(name)).map(Outcome::Path),
        Step::MakeDirectory { name } => nothing(std::fs::create_dir(at(name))),
        Step::RemoveDirectory { name } => nothing(std::fs::remove_dir(at(name))),
        Step::Copy { from, to, from_offset, to_offset, bytes } => {
            let (from, to) = (handles[*from].as_ref()?, handles[*to].as_ref()?);
            if from.metadata().ok()?.ino() == to.metadata().ok()?.ino() || appends(to) {
                return None;
            }
            let mut buffer = vec![0; *bytes as usize];
            let mut done = 0;
            while let Ok(more @ 1..) = from.read_at(&mut buffer[done..], from_offset + done as u64) {
                done += more;
            }
            // The kernel reports no excessive offset for zero bytes, and `std::fs` does not call it.
            let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
            if done == 0 && limit.is_some_and(|limit| *to_offset >= limit) {
                return None;
            }
            put(to, &buffer[..done], *to_offset)
        }
        Step::Close { handle } => handles[*handle].take().map(|_| Ok(Outcome::Nothing))?,
    };
    Some(outcome.unwrap_or_else(|error| Outcome::Errno(error.raw_os_error().expect("of the system"))))
}

/// Like `write_all_at`, and counts the bytes before an error.
fn put(file: &std::fs::File, bytes: &[u8], offset: u64) -> std::io::Result<Outcome> {
    let mut done = 0;
    while done < bytes.len() {
        match file.write_at(&bytes[done..], offset + done as u64) {
            Ok(more) => done += more,
            Err(error) if done > 0 => return Ok(Outcome::Cut(done, error.raw_os_error().expect("of the system"))),
            Err(error) => return Err(error),
        }
    }
    Ok(Outcome::Count(done))
}

fn appends(file: &std::fs::File) -> bool {
    rustix::fs::fcntl_getfl(file).unwrap().contains(rustix::fs::OFlags::APPEND)
}

/// The same step as an engine's operation.
fn operation(root: &Path, handles: &mut Handles<File>, step: &Step, seed: u64) -> Operation {
    let at = |number: &usize| root.join(name(*number));
    let file = |handle: &usize| handles[*handle].clone().expect("as on the other side");
    match step {
        Step::Open { name, create, truncate, append, .. } => {
            let how = Open::for_both();
            let how = if *create { how.create(0o600) } else { how };
            let how = if *truncate { how.truncate() } else { how };
            Operation::open(at(name), if *append { how.append() } else { how })
        }
        Step::Write { handle, offset, bytes } => Operation::write_at(&file(handle), pattern(seed, *bytes), *offset),
        Step::WritePieces { handle, offset, pieces } => {
            let all = pattern(seed, pieces.iter().sum());
            let mut rest = &all[..];
            let pieces = pieces.iter().map(|bytes| rest.split_off(..*bytes).unwrap().into()).collect();
            Operation::write_vectored_at(&file(handle), pieces, *offset)
        }
        Step::Append { handle, bytes } => Operation::append(&file(handle), pattern(seed, *bytes)),
        Step::Read { handle, offset, bytes } => Operation::read_at(&file(handle), vec![0xaa; *bytes], *offset),
        Step::Truncate { handle, bytes } => Operation::truncate(&file(handle), *bytes),
        Step::Sync { handle } => Operation::sync(&file(handle)),
        Step::Stat { name, follows: true } => Operation::stat(at(name)),
        Step::Stat { name, follows: false } => Operation::stat_link(at(name)),
        Step::Unlink { name } => Operation::unlink(at(name)),
        Step::Rename { from, to } => Operation::rename(at(from), at(to)),
        Step::Link { from, to } => Operation::link(at(from), at(to)),
        Step::Symlink { target, name: link } => Operation::symlink(name(*target), at(link)),
        Step::ReadLink { name } => Operation::read_link(at(name)),
        Step::MakeDirectory { name } => Operation::make_directory(at(name), 0o777),
        Step::RemoveDirectory { name } => Operation::remove_directory(at(name)),
        Step::Copy { from, to, from_offset, to_offset, bytes } => {
            Operation::copy(&file(from), *from_offset, &file(to), *to_offset, *bytes)
        }
        Step::Close { handle } => Operation::close(handles[*handle].take().expect("as on the other side")),
    }
}

fn outcome(step: &Step, handles: &mut Handles<File>, completion: Completion) -> Outcome {
    let reads = matches!(step, Step::Read { .. }).then(|| completion.bytes().to_vec());
    if let Some(error) = &completion.cut_short_by {
        let Error::File { error: source, .. } = &**error else { panic!("{error}") };
        return Outcome::Cut(completion.count(), source.raw_os_error().unwrap());
    }
    match completion.outcome {
        Err(Error::File { error: source, .. }) => Outcome::Errno(source.raw_os_error().unwrap()),
        Err(other) => panic!("{other}"),
        Ok(Output::Count(count)) => reads.map_or(Outcome::Count(count), Outcome::Bytes),
        Ok(Output::Stat(found)) => {
            Outcome::Is(found.kind, if found.kind == Kind::File { found.bytes } else { 0 }, found.links)
        }
        Ok(Output::Path(path)) => Outcome::Path(path),
        Ok(Output::File(file)) => {
            let Step::Open { handle, .. } = step else { panic!("a file of {step:?}") };
            handles[*handle] = Some(file);
            Outcome::Nothing
        }
        Ok(_) => Outcome::Nothing,
    }
}

/// All names below a directory, and their content.
fn tree(root: &Path) -> std::collections::BTreeMap<PathBuf, Vec<u8>> {
    let mut found = std::collections::BTreeMap::new();
    let mut left = vec![root.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in std::fs::read_dir(&directory).unwrap().map(Result::unwrap) {
            let path = entry.path();
            let what = match entry.file_type().unwrap() {
                kind if kind.is_symlink() => std::fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes(),
                kind if kind.is_dir() => {
                    left.push(path.clone());
                    b"directory".to_vec()
                }
                _ => std::fs::read(&path).unwrap(),
            };
            found.insert(path.strip_prefix(root).unwrap().to_owned(), what);
        }
    }
    found
}

#[test]
fn any_sequence_of_operations_does_what_std_fs_does() {
    everywhere("any sequence of operations does what std::fs does", |case| sequences(case, 24, &[], &|| 0));
}

#[test]
fn any_sequence_does_what_std_fs_does_also_at_a_limit_of_file_sizes() {
    let _hang = Watchdog::new("any sequence does what std::fs does, also at a limit of file sizes");
    for way in ["ring", "threads", "run"] {
        for dir in ["/var/tmp", "/dev/shm"] {
            let dir = tempfile::Builder::new().prefix("pelton-file").tempdir_in(dir).unwrap();
            let role = Role::new(child, "limited sequences").with("path", dir.path().display()).with("way", way);
            Child::start(role).expect("limited");
        }
    }
}

/// The number of signals for an exceeded limit.
static PASSED: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

pub(super) fn limited_sequences(path: &Path, way: &str) {
    extern "C" fn passed(_: libc::c_int) {
        PASSED.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
    let handler = passed as extern "C" fn(libc::c_int);
    // SAFETY: the handler only counts; the structure lives as long as the call.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        libc::sigaction(libc::SIGXFSZ, &raw const action, std::ptr::null_mut());
    }
    let limit = rustix::process::Rlimit { current: Some(60_000), maximum: Some(60_000) };
    rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).unwrap();
    RUNS.set(way == "run");
    let way = if way == "threads" { "threads" } else { "ring" };
    let case = Case { way, options: options(way), root: tempfile::tempdir_in(path).unwrap() };
    // Each sequence reaches the limit first. `std::fs` raises the signal, the engine never does.
    let first = [
        Step::Open { handle: 0, name: 0, create: true, truncate: false, append: false },
        Step::Write { handle: 0, offset: 59_000, bytes: 5000 },
    ];
    sequences(&case, 12, &first, &|| PASSED.load(std::sync::atomic::Ordering::Relaxed));
    assert!(PASSED.load(std::sync::atomic::Ordering::Relaxed) > 0, "no sequence reached the limit");
    report("limited");
}

/// Random sequences, as many as `PROPTEST_CASES` says, each after the `first` steps. The count of `signals` stays
/// constant during an operation.
fn sequences(case: &Case, cases: u32, first: &[Step], signals: &dyn Fn() -> usize) {
    let cases = std::env::var("PROPTEST_CASES").map_or(cases, |text| text.parse().unwrap());
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(steps in prop::collection::vec((any_step(), 0..3u8), 1..60))| {
        let wanted_root = tempfile::tempdir_in(case.root.path()).unwrap();
        let found_root = tempfile::tempdir_in(case.root.path()).unwrap();
        let mut engine = case.engine();
        let (mut theirs, mut ours) = (Handles::default(), Handles::default());
        let first = first.iter().map(|step| (step, &0));
        for (number, (step, way)) in first.chain(steps.iter().map(|(step, way)| (step, way))).enumerate() {
            let Some(wanted) = by_std(wanted_root.path(), &mut theirs, step, number as u64) else { continue };
            let operation = operation(found_root.path(), &mut ours, step, number as u64);
            let signals_before = signals();
            // Run; submitted and polled; submitted and waited for; or in a chain after another one.
            let completion = match way {
                1 if RUNS.get() => {
                    let found = match engine.run(operation) {
                        Ok(completion) => outcome(step, &mut ours, completion),
                        Err(Error::File { error: source, .. }) => Outcome::Errno(source.raw_os_error().unwrap()),
                        Err(other) => panic!("{other}"),
                    };
                    prop_assert_eq!(signals(), signals_before, "step {} {:?} raised a signal", number, step);
                    prop_assert!(found == wanted, "step {} {:?}: found {:.200}, wanted {:.200}", number, step, format!("{found:?}"), format!("{wanted:?}"));
                    continue;
                }
                0 => {
                    submit(&mut engine, number as u64, operation);
                    if engine.arm().unwrap().is_waiting() {
                        readable(&engine);
                    }
                    engine.disarm();
                    done(&mut engine)
                }
                1 => {
                    submit(&mut engine, number as u64, operation);
                    done(&mut engine)
                }
                _ => {
                    let chain = [(u64::MAX, Operation::stat("/")), (number as u64, operation)];
                    prop_assert!(engine.try_submit_chain(chain).unwrap().is_submitted());
                    assert_eq!(done(&mut engine).token, u64::MAX);
                    done(&mut engine)
                }
            };
            prop_assert_eq!(completion.token, number as u64);
            prop_assert_eq!(signals(), signals_before, "step {} {:?} raised a signal", number, step);
            let found = outcome(step, &mut ours, completion);
            prop_assert!(found == wanted, "step {} {:?}: found {:.200}, wanted {:.200}", number, step, format!("{found:?}"), format!("{wanted:?}"));
        }
        prop_assert!(tree(found_root.path()) == tree(wanted_root.path()));
    });
}
