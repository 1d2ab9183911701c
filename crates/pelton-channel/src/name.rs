//! Names and the sockets behind them: a short name is a directory of sockets, `unix:PATH` is one socket.

use crate::error::{Error, Result};
use crate::refusals;
use pelton_lane::failpoint;
use pelton_os::socket::{Socket, accept_at, listen_at};
use pelton_os::{Descriptor, Inherited, own_uid};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, fstat, open};
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A channel's name, parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    text: String,
    location: Location,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Location {
    /// A directory with a socket per listening process, inside a directory of this user.
    Directory {
        base: PathBuf,
        directory: PathBuf,
    },
    Socket(PathBuf),
}

impl Name {
    /// Reads a short name, or `unix:PATH`.
    ///
    /// # Errors
    /// [`Error::Name`].
    pub fn parse(text: &str) -> Result<Name> {
        let wrong = |problem: &str| Error::Name { name: text.to_owned(), problem: problem.to_owned() };
        let location = if let Some(path) = text.strip_prefix("unix:") {
            if path.is_empty() || path.contains('\0') {
                return Err(wrong("names no socket: write unix:PATH"));
            }
            Location::Socket(PathBuf::from(path))
        } else if let Some((scheme, _)) = text.split_once(':') {
            let instead = match scheme {
                "path" => {
                    "at a channel in a directory no side listens: open it as a sender or a receiver; a service needs a \
                     short name or unix:PATH"
                }
                _ => "write unix:PATH, or a short name without a colon",
            };
            return Err(wrong(&format!("begins with {scheme:?}: {instead}")));
        } else {
            let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
            if text.is_empty() || text.len() > 64 || text.starts_with('.') || !text.chars().all(fits) {
                return Err(wrong(
                    "is no short name: use 1 to 64 letters, digits, '.', '_' or '-', not beginning with '.', or unix:PATH; a channel in a directory is opened as path:DIR",
                ));
            }
            let base = match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| Path::new(dir).is_absolute()) {
                Some(dir) => Path::new(&dir).join("pelton"),
                None => std::env::temp_dir().join(format!("pelton-{}", own_uid())),
            };
            Location::Directory { directory: base.join(text), base }
        };
        Ok(Name { text: text.to_owned(), location })
    }

    /// The name, as given.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// The name; for a short one also its directory, which differs for another user or in a service's environment.
    pub fn with_place(&self) -> String {
        match &self.location {
            Location::Socket(_) => self.text.clone(),
            Location::Directory { directory, .. } => format!("{} (a socket in {})", self.text, directory.display()),
        }
    }

    fn wrong(&self, problem: String) -> Error {
        Error::Name { name: self.text.clone(), problem }
    }

    fn not_made(&self, path: &Path, error: std::io::Error) -> Error {
        self.wrong(format!("needs the directory {}, which cannot be made: {error}", path.display()))
    }

    fn no_socket(&self, path: &Path) -> Error {
        self.wrong(format!("is {}, which exists and is not a socket: choose another path", path.display()))
    }

    /// Adds a path to a system error.
    fn failed(&self, what: &str, path: &Path, error: std::io::Error) -> Error {
        if error.raw_os_error() == Some(libc::ENAMETOOLONG) {
            let (found, most) = (path.as_os_str().len(), 107);
            return self.wrong(format!(
                "is a socket path of {found} bytes, a Unix socket's has at most {most}: choose a shorter one"
            ));
        }
        if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) {
            return self.wrong(format!("needs the directory of {}, which is not there: make it first", path.display()));
        }
        let advice = match error.kind() {
            ErrorKind::PermissionDenied => " (this user needs access to the socket and its directory)",
            _ => "",
        };
        Error::System { what: format!("{what} {}{advice}", path.display()), error }
    }

    /// Paths at which a process may listen.
    pub fn sockets(&self) -> Result<Vec<PathBuf>> {
        match &self.location {
            Location::Socket(path) => Ok(vec![path.clone()]),
            Location::Directory { base, directory } => match own_directory(base) {
                Ok(true) => self.sockets_in(directory),
                Ok(false) => Ok(Vec::new()),
                Err(problem) => Err(self.wrong(problem)),
            },
        }
    }

    /// The sockets in a directory; none if the directory does not exist.
    fn sockets_in(&self, directory: &Path) -> Result<Vec<PathBuf>> {
        let entries = match std::fs::read_dir(directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(|error| self.failed("reading", directory, error))?,
        };
        let mut paths: Vec<PathBuf> = entries
            .filter_map(|entry| entry.ok())
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()))
            .map(|entry| entry.path())
            .collect();
        paths.sort();
        Ok(paths)
    }

    /// The sockets under the name with the pid of each listener; `None` for a socket that a dead process left.
    pub fn listeners(&self) -> Result<Vec<(PathBuf, Option<u32>)>> {
        let mut found = Vec::new();
        for path in self.sockets()? {
            // A listener ignores a connection that ends without a packet.
            match Socket::connect(&path) {
                Ok(socket) => {
                    let peer = socket.peer().map_err(|error| self.failed("asking who listens at", &path, error))?;
                    found.push((path, Some(peer.pid)));
                }
                Err(error) => match error.kind() {
                    ErrorKind::NotFound => {}
                    ErrorKind::ConnectionRefused => found.push((path, None)),
                    // Its backlog is full: it listens, but only a connection would return its pid.
                    ErrorKind::WouldBlock => found.push((path, Some(0))),
                    _ => return Err(self.failed("connecting to", &path, error)),
                },
            }
        }
        Ok(found)
    }

    /// Whether several processes may listen under the name.
    pub fn is_of_many(&self) -> bool {
        matches!(self.location, Location::Directory { .. })
    }

    /// Connects to a live listener; `None` when there is none.
    pub fn connect(&self) -> Result<Option<Socket>> {
        let mut why = None;
        for path in self.sockets()? {
            match self.connect_to(&path) {
                Ok(None) => {}
                Ok(socket) => return Ok(socket),
                // This path has another kind of socket. Another path may have a listener.
                Err(error) => why = Some(error),
            }
        }
        why.map_or(Ok(None), Err)
    }

    /// Connects to the listener at `path`; `None` when there is none.
    pub fn connect_to(&self, path: &Path) -> Result<Option<Socket>> {
        match Socket::connect(path) {
            Ok(socket) => Ok(Some(socket)),
            // The socket does not exist, or a dead process left it. A listener with a full backlog is too busy.
            Err(error) => match error.kind() {
                ErrorKind::ConnectionRefused if !is_socket(path) => Err(self.no_socket(path)),
                ErrorKind::ConnectionRefused | ErrorKind::NotFound | ErrorKind::WouldBlock => Ok(None),
                _ => Err(self.failed("connecting to", path, error)),
            },
        }
    }

    /// Listens under the name, and replaces sockets of dead listeners. If it `is_shared`, several processes may listen
    /// under a short name. With `permits_others`, the mode of a socket at a path lets other users connect; the
    /// directory of a short name never does. A socket of that name that this process has inherited comes first; its
    /// mode is the business of the process that created it.
    pub(crate) fn listen(&self, is_shared: bool, permits_others: bool) -> Result<Bound> {
        if let Some(bound) = self.listen_by_inherited()? {
            return Ok(bound);
        }
        match &self.location {
            Location::Socket(path) => {
                let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
                let _lock = lock(parent).map_err(|e| self.failed("opening", parent, e))?;
                self.clear(path)?;
                let socket = listen_at(path, permits_others).map_err(|e| self.failed("listening at", path, e))?;
                failpoint("name: listening");
                Bound::new(&self.text, socket, path.clone(), Vec::new()).map_err(|e| self.failed("looking at", path, e))
            }
            Location::Directory { base, directory } => loop {
                // A listener that closes removes the directories. If that happens now, the loop creates them again.
                let again = |error: &std::io::Error| error.kind() == ErrorKind::NotFound;
                make_directory(base).map_err(|error| self.not_made(base, error))?;
                own_directory(base).map_err(|problem| self.wrong(problem))?;
                match make_directory(directory) {
                    Err(error) if again(&error) => continue,
                    other => other.map_err(|error| self.not_made(directory, error))?,
                }
                own_directory(directory).map_err(|problem| self.wrong(problem))?;
                let lock = match lock(directory) {
                    Err(error) if again(&error) => continue,
                    other => other.map_err(|e| self.failed("opening", directory, e))?,
                };
                let sockets = self.sockets_in(directory)?;
                // Another process may have the lock of a recreated directory. It has bound a socket and does not listen
                // yet, so that socket seems to be of a dead process.
                if !is_at(&lock, directory).map_err(|e| self.failed("looking at", directory, e))? {
                    continue;
                }
                for path in sockets {
                    match self.clear(&path) {
                        Err(Error::InUse { .. }) if is_shared => {}
                        // Another kind of socket: it is not pelton's to remove.
                        Err(Error::System { .. }) => {}
                        cleared => cleared?,
                    }
                }
                static LISTENERS: AtomicU32 = AtomicU32::new(0);
                let number = LISTENERS.fetch_add(1, Ordering::Relaxed);
                let path = directory.join(format!("{}.{number}", std::process::id()));
                match listen_at(&path, false) {
                    Err(error) if again(&error) => continue,
                    // A process of the same number, in another pid namespace, listens there: the next number is free.
                    Err(error) if error.kind() == ErrorKind::AddrInUse => continue,
                    Err(error) => return Err(self.failed("listening at", &path, error)),
                    Ok(socket) => {
                        // Another process may have removed the directory meanwhile. While it contains a socket, it
                        // stays.
                        let stands = is_at(&lock, directory);
                        if let Ok(true) = stands {
                            let directories = vec![directory.clone(), base.clone()];
                            return Bound::new(&self.text, socket, path.clone(), directories)
                                .map_err(|e| self.failed("looking at", &path, e));
                        }
                        let _ = std::fs::remove_file(&path);
                        stands.map_err(|e| self.failed("looking at", directory, e))?;
                    }
                }
            },
        }
    }

    /// Listens by the socket of this name that this process has inherited, if there is one.
    fn listen_by_inherited(&self) -> Result<Option<Bound>> {
        let is_wanted = |bound: &Path| match &self.location {
            Location::Socket(path) => is_same(bound, path),
            Location::Directory { directory, .. } => bound.parent().is_some_and(|parent| is_same(parent, directory)),
        };
        let failed = |error: std::io::Error| match error.kind() {
            ErrorKind::AddrInUse => Error::InUse { name: self.text.clone(), pid: std::process::id() },
            _ => Error::System { what: format!("listening at {} by an inherited socket", self.text), error },
        };
        let Some(inherited) = Inherited::take(is_wanted).map_err(failed)? else { return Ok(None) };
        let socket = inherited.socket().map_err(failed)?;
        let owner = pelton_os::Owner::current().map_err(failed)?;
        let (name, path) = (self.text.clone(), inherited.path().to_owned());
        Ok(Some(Bound { name, socket, path, ownership: Ownership::Inherited(inherited), owner }))
    }

    /// Removes a socket without a listener. Fails for a live one.
    fn clear(&self, path: &Path) -> Result<()> {
        match std::fs::symlink_metadata(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(self.failed("looking at", path, error)),
            Ok(found) if !found.file_type().is_socket() => return Err(self.no_socket(path)),
            Ok(_) => {}
        }
        match Socket::connect(path) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                let removed = std::fs::remove_file(path);
                failpoint("name: stale socket removed");
                match removed {
                    Err(error) if error.kind() != ErrorKind::NotFound => {
                        Err(self.failed("removing the stale socket", path, error))
                    }
                    _ => Ok(()),
                }
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            // Connected, or its backlog is full.
            Ok(socket) => Err(Error::InUse { name: self.text.clone(), pid: socket.peer().map_or(0, |peer| peer.pid) }),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                Err(Error::InUse { name: self.text.clone(), pid: 0 })
            }
            Err(error) => Err(self.failed("connecting to", path, error)),
        }
    }
}

/// Excludes other listeners of a directory until it is dropped.
fn lock(directory: &Path) -> std::io::Result<OwnedFd> {
    let fd = open(directory, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    // Any process that can open the directory can hold the lock, so the wait is bounded.
    for _ in 0..200 {
        match flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
            done => return Ok(done.map(|()| fd)?),
        }
    }
    let text = "another process has kept it locked for two seconds: see `lsof`, or choose another directory";
    Err(std::io::Error::new(ErrorKind::ResourceBusy, text))
}

/// Whether the path still leads to this directory. Returns an error if that cannot be read: otherwise the retries would
/// not end.
fn is_at(fd: &OwnedFd, directory: &Path) -> std::io::Result<bool> {
    let own = fstat(fd)?;
    match std::fs::symlink_metadata(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        there => there.map(|there| (there.dev(), there.ino()) == (own.st_dev, own.st_ino)),
    }
}

/// Creates a directory of mode 700, unless it exists.
fn make_directory(path: &Path) -> std::io::Result<()> {
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

/// Whether `path` is a directory that no other user can enter. Returns false if it does not exist.
fn own_directory(path: &Path) -> std::result::Result<bool, String> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(format!("needs the directory {}, which cannot be checked: {error}", path.display())),
        Ok(found) => {
            let (uid, mode) = (own_uid(), found.mode() & 0o7777);
            if !found.is_dir() || found.uid() != uid || mode & 0o077 != 0 {
                return Err(format!(
                    "needs {} to be a directory of uid {uid} with mode 700; found {} of uid {} with mode {mode:o}: `chmod 700` it, or set XDG_RUNTIME_DIR",
                    path.display(),
                    if found.is_dir() { "a directory" } else { "something else" },
                    found.uid(),
                ));
            }
            Ok(true)
        }
    }
}

/// Whether `path` is a socket, or does not exist any more.
fn is_socket(path: &Path) -> bool {
    std::fs::metadata(path).map_or(true, |found| found.file_type().is_socket())
}

/// Whether two paths lead to the same file. Equal ones also do if it does not exist here.
fn is_same(one: &Path, other: &Path) -> bool {
    let inode = |path: &Path| std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    one == other || inode(one).is_some_and(|found| inode(other) == Some(found))
}

/// A listening socket, and the files to remove with it.
#[derive(Debug)]
pub(crate) struct Bound {
    name: String,
    socket: Descriptor,
    path: PathBuf,
    ownership: Ownership,
    owner: pelton_os::Owner,
}

#[derive(Debug)]
enum Ownership {
    /// This process has created it.
    Created { inode: (u64, u64), directories: Vec<PathBuf> },
    /// The process that has created it removes it; connections that wait are for the next process that listens by it.
    Inherited(#[expect(dead_code, reason = "its drop lets this process take it again")] Inherited),
}

impl Bound {
    fn new(name: &str, socket: Descriptor, path: PathBuf, directories: Vec<PathBuf>) -> std::io::Result<Bound> {
        let found = std::fs::symlink_metadata(&path)?;
        let owner = pelton_os::Owner::current()?;
        let ownership = Ownership::Created { inode: (found.dev(), found.ino()), directories };
        Ok(Bound { name: name.to_owned(), socket, path, ownership, owner })
    }

    pub fn socket(&self) -> &Descriptor {
        &self.socket
    }

    /// The name under which it listens.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub fn is_forked(&self) -> bool {
        self.owner.is_forked()
    }
}

impl AsFd for Bound {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if self.is_forked() {
            return;
        }
        refusals::log_left_out();
        let Ownership::Created { inode, directories } = &self.ownership else { return };
        // Only if the path still leads to this socket.
        let ours = std::fs::symlink_metadata(&self.path).is_ok_and(|found| (found.dev(), found.ino()) == *inode);
        if ours {
            let _ = std::fs::remove_file(&self.path);
        }
        // Connections that were not accepted are closed one by one: closed with the listener, their descriptors would
        // be closed here, which may block. No process connects any more.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        while let Ok(Some(_)) = accept_at(&self.socket) {}
        for directory in directories {
            // Fails while the directory contains other sockets, as intended.
            let _ = std::fs::remove_dir(directory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concurrent_listeners_of_a_directory_do_not_disturb_each_other() {
        let base = std::env::temp_dir().join(format!("pelton-listeners-{}", std::process::id()));
        std::thread::scope(|scope| {
            // Two threads use one name, two use others. Their directory is sometimes empty, and is then removed.
            for text in ["one", "one", "two", "three"] {
                let location = Location::Directory { base: base.clone(), directory: base.join(text) };
                scope.spawn(move || {
                    let name = Name { text: text.to_owned(), location };
                    for _ in 0..500 {
                        let bound = name.listen(true, false).unwrap();
                        assert!(Socket::connect(&bound.path).is_ok(), "no listener at {}", bound.path.display());
                    }
                });
            }
        });
        assert!(!base.exists(), "{} is left", base.display());
    }

    #[test]
    fn a_bad_name_is_refused_with_advice() {
        for (name, says) in [
            ("", "1 to 64"),
            (".hidden", "not beginning with '.'"),
            ("a/b", "letters, digits"),
            ("tcp:1", "write unix:PATH"),
            ("unix:", "write unix:PATH"),
            (&"x".repeat(65), "1 to 64"),
        ] {
            let error = Name::parse(name).unwrap_err().to_string();
            assert!(error.contains(says), "{name:?}: {error}");
        }
        for name in ["a", "log.events-2_x", "unix:relative", "unix:/tmp/x"] {
            assert!(Name::parse(name).is_ok(), "{name}");
        }
    }
}
