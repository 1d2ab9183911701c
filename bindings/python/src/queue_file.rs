//! The file of a `pelton.Queue`: one lane, whose two roles pass between threads and processes under two locks.
//!
//! A thread that puts takes the lock of the producer's role, and attaches a producer to the lane; a thread that gets
//! does the same on the other side. Both sides run at once. A producer or a consumer lives for one item, and everything
//! that the next one needs is in the file: so a role passes at no cost but that of its lock.
//!
//! Invariants:
//! - The locks are robust mutexes: when a thread dies with one, the kernel gives it to the next thread.
//! - A thread may be killed at any instruction. The lane guarantees that an item is published, or released, by one
//!   store. What this file adds is written so that each value is valid before and after that store.
//! - No code of Python runs under a lock, so no thread can wait for itself.
//!
//! Edges: the lane's own, `[publish]` and `[release]`, and those of `queue_edges.rs`. A lock orders everything between
//! two holders of a role.

use crate::bytes::copy_maybe_overlapping;
use crate::queue_claims;
use crate::queue_edges::Doorbell;
use pelton::{Error, Result};
use pelton_lane::{
    Consumer, ConsumerPage, Data, LaneError, Memory, Position, Producer, ProducerPage, ReceiverPage, Record,
    SEGMENT_BYTES, capacity_is_valid, find_end, fnv1a, message_bytes_limit,
};
use pelton_os::Owner;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use rustix::thread::futex;
use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::marker::PhantomData;
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Where the files are: memory, which does not outlive the machine's run.
const DIRECTORY: &str = "/dev/shm";

const MAGIC: u64 = u64::from_le_bytes(*b"pelton-Q");

/// The layout, and what else two processes must share to use the same locks.
fn layout() -> u64 {
    let text = format!(
        "{}; {}; pointers of {}; a mutex of {}",
        pelton_lane::LAYOUT_TEXT,
        env!("CARGO_PKG_VERSION"),
        size_of::<usize>(),
        size_of::<libc::pthread_mutex_t>()
    );
    fnv1a(text.as_bytes())
}

/// Offsets in the file. The header has a segment of its own, as each page of the lane.
const PRODUCER_AT: u64 = SEGMENT_BYTES;
const CONSUMER_AT: u64 = 2 * SEGMENT_BYTES;
const RECEIVER_AT: u64 = 3 * SEGMENT_BYTES;
const DATA_AT: u64 = 4 * SEGMENT_BYTES;

/// The data is allocated in steps of this size, by one system call each.
const STEP: u64 = 1 << 20;

/// How long a thread polls before it sleeps: about as long as a wake-up takes. A guess.
const SPIN: Duration = Duration::from_micros(20);

/// How often a thread tries a lock before it sleeps. A small item is copied in less time. A guess.
const TRIES: u32 = 100;

/// How long a thread that must not wait lets another one finish with its item: a stopped process must not stop it.
const BUSY_TIMEOUT: Duration = Duration::from_millis(100);

unsafe extern "C" {
    // POSIX 2008, in glibc and musl; the crate libc does not declare them.
    fn pthread_mutexattr_setrobust(attributes: *mut libc::pthread_mutexattr_t, robustness: c_int) -> c_int;
    fn pthread_mutex_consistent(mutex: *mut libc::pthread_mutex_t) -> c_int;
    fn pthread_mutex_timedlock(mutex: *mut libc::pthread_mutex_t, until: *const libc::timespec) -> c_int;
}
const PTHREAD_MUTEX_ROBUST: c_int = 1;

/// The lock of a role.
#[repr(C, align(128))]
pub struct Role(UnsafeCell<libc::pthread_mutex_t>);

/// A role that this thread has.
pub struct Held<'a> {
    role: &'a Role,
    /// Not `Send`: the thread that locks a mutex unlocks it.
    _thread: PhantomData<*mut ()>,
}

impl Role {
    /// # Safety
    /// `role` points to writable shared memory that nobody uses yet.
    unsafe fn create(role: *mut Role) -> Result<()> {
        let mut attributes = MaybeUninit::uninit();
        // SAFETY: the attributes are initialised first and destroyed last; the caller guarantees the mutex's memory.
        let failed = unsafe {
            let attributes = attributes.as_mut_ptr();
            let mut failed = libc::pthread_mutexattr_init(attributes);
            if failed == 0 {
                for error in [
                    libc::pthread_mutexattr_setpshared(attributes, libc::PTHREAD_PROCESS_SHARED),
                    pthread_mutexattr_setrobust(attributes, PTHREAD_MUTEX_ROBUST),
                    libc::pthread_mutex_init(UnsafeCell::raw_get(&raw const (*role).0), attributes),
                ] {
                    failed = if failed == 0 { error } else { failed };
                }
                libc::pthread_mutexattr_destroy(attributes);
            }
            failed
        };
        if failed == 0 { Ok(()) } else { Err(system("making a lock of the queue", Errno::from_raw_os_error(failed))) }
    }

    fn locked(&self, result: c_int) -> Result<Option<Held<'_>>> {
        match result {
            0 => {}
            // The holder died. What it changed is valid as it is: see the file's invariants.
            // SAFETY: this thread has the mutex.
            libc::EOWNERDEAD => match unsafe { pthread_mutex_consistent(self.0.get()) } {
                0 => {}
                error => return Err(system("taking over a lock of the queue", Errno::from_raw_os_error(error))),
            },
            libc::EBUSY | libc::ETIMEDOUT => return Ok(None),
            error => return Err(system("locking the queue", Errno::from_raw_os_error(error))),
        }
        Ok(Some(Held { role: self, _thread: PhantomData }))
    }

    /// Takes the role if no thread has it. Does not wait.
    #[inline]
    pub fn try_lock(&self) -> Result<Option<Held<'_>>> {
        // SAFETY: the mutex is initialised and mapped.
        self.locked(unsafe { libc::pthread_mutex_trylock(self.0.get()) })
    }

    /// Waits for the role until `until`.
    fn lock_until(&self, until: Instant) -> Result<Option<Held<'_>>> {
        for _ in 0..TRIES {
            if let Some(held) = self.try_lock()? {
                return Ok(Some(held));
            }
            std::hint::spin_loop();
        }
        // POSIX gives this wait the clock of the day. If that is set meanwhile, the wait ends with the holder's unlock.
        let until = SystemTime::now() + until.saturating_duration_since(Instant::now());
        let until = until.duration_since(UNIX_EPOCH).unwrap_or_default();
        let until = libc::timespec { tv_sec: until.as_secs() as _, tv_nsec: until.subsec_nanos() as _ };
        // SAFETY: the mutex is initialised and mapped.
        self.locked(unsafe { pthread_mutex_timedlock(self.0.get(), &until) })
    }

    /// Takes the role unless its holder waits at `doorbell`, for what this thread wants too.
    fn lock_unless_waiting(&self, doorbell: &Doorbell) -> Result<Option<Held<'_>>> {
        let end = Instant::now() + BUSY_TIMEOUT;
        loop {
            if let Some(held) = self.try_lock()? {
                return Ok(Some(held));
            }
            if doorbell.is_wanted() || Instant::now() >= end {
                return Ok(None);
            }
            std::thread::yield_now();
        }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // SAFETY: this thread has the mutex.
        unsafe { libc::pthread_mutex_unlock(self.role.0.get()) };
    }
}

/// Wakes the threads that sleep at a doorbell, after a change of their condition.
#[inline]
fn ring(doorbell: &Doorbell) {
    if doorbell.ring() {
        let _ = futex::wake(doorbell.word(), futex::Flags::empty(), i32::MAX as u32);
    }
}

/// Sleeps until a ring after the sleep was `announced`, a signal, or `until`.
fn sleep(doorbell: &Doorbell, announced: u32, until: Instant) {
    let left = until.saturating_duration_since(Instant::now());
    let left = futex::Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos() as _ };
    let _ = futex::wait(doorbell.word(), futex::Flags::empty(), announced, Some(&left));
}

/// The first segment of the file.
#[repr(C)]
struct Header {
    magic: u64,
    layout: u64,
    capacity: u64,
    /// The most items; 0: as many as the data holds.
    items_max: u64,
    putting: Role,
    /// Where the lane's previous lap ended. Only the producer uses it, and only after the jump that it precedes.
    lap_end: AtomicU64,
    /// Bytes of the data, from its start, with memory behind them. Only the producer uses it.
    backed: AtomicU64,
    getting: Role,
    /// The number of the item that a consumer has begun to take. Only the consumer uses it. It is the number of the
    /// next item only if that consumer died.
    taking: AtomicU32,
    items: Doorbell,
    room: Doorbell,
    joined: Doorbell,
}

const _: () = assert!(size_of::<Header>() as u64 <= SEGMENT_BYTES && offset_of!(Header, putting) == 128);

/// An item as it is put: the parts of its message, each at its offset.
pub struct Outgoing<'a> {
    pub parts: Vec<(usize, &'a [u8])>,
    pub bytes: usize,
}

/// An item in the lane, as it is taken.
pub struct Offered<'a> {
    pub message: &'a [u8],
    /// Its number in the lane.
    pub seq: u32,
    /// Whether a consumer that was killed had begun to take it.
    pub is_redelivered: bool,
}

/// A queue that this process has open.
pub struct File {
    path: PathBuf,
    fd: OwnedFd,
    base: NonNull<u8>,
    capacity: u64,
    owner: Owner,
    has_left: AtomicBool,
    can_spin: bool,
}

// SAFETY: the mapping belongs to no thread. Every access is atomic, or under the lock of a role.
unsafe impl Send for File {}
// SAFETY: as above.
unsafe impl Sync for File {}

fn system(what: &str, errno: Errno) -> Error {
    Error::System { what: what.to_owned(), error: errno.into() }
}

fn failed<'a>(what: &'a str, path: &'a Path) -> impl Fn(Errno) -> Error + 'a {
    move |errno| match errno {
        Errno::NOENT => Error::NoChannel { path: path.display().to_string() },
        Errno::NOSPC | Errno::DQUOT => {
            Error::NoSpace { path: path.display().to_string(), bytes: DATA_AT, error: errno.into() }
        }
        errno => system(&format!("{what} {}", path.display()), errno),
    }
}

fn prefix() -> String {
    format!("pelton-queue.{}.", rustix::process::geteuid().as_raw())
}

const OPEN: OFlags = OFlags::RDWR.union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK);

/// Removes the files of queues that no process has open any more, as after a kill of all.
pub fn sweep() {
    let Ok(entries) = std::fs::read_dir(DIRECTORY) else { return };
    let prefix = prefix();
    for path in entries.flatten().map(|entry| entry.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some(rest) = name.strip_prefix(&prefix) else { continue };
        match rest.split_once('.') {
            None => {
                if let Ok(fd) = rustix::fs::open(&path, OPEN, Mode::empty()) {
                    remove_if_unused(&fd, &path);
                }
            }
            // Claims, without the queue's file.
            Some((queue, _)) if !path.with_file_name(format!("{prefix}{queue}")).exists() => {
                let _ = rustix::fs::unlink(&path);
            }
            Some(_) => {}
        }
    }
}

/// Removes the file if no other description has its lock. The caller's own has not.
fn remove_if_unused(fd: &OwnedFd, path: &Path) {
    if rustix::fs::flock(fd, FlockOperation::NonBlockingLockExclusive).is_ok() {
        if is_linked(fd) {
            let _ = rustix::fs::unlink(path);
            for claims in queue_claims::files_of(path).unwrap_or_default() {
                let _ = rustix::fs::unlink(claims);
            }
        }
        // Not by the close: a child before exec may have the description for a moment longer.
        let _ = rustix::fs::flock(fd, FlockOperation::Unlock);
    }
}

fn lock_shared(fd: &OwnedFd) -> rustix::io::Result<()> {
    rustix::io::retry_on_intr(|| rustix::fs::flock(fd, FlockOperation::LockShared))
}

fn is_linked(fd: &OwnedFd) -> bool {
    rustix::fs::fstat(fd).is_ok_and(|found| found.st_nlink > 0)
}

impl File {
    /// Creates a queue of at most `items_max` items (0: any number) in at most `capacity` bytes.
    pub fn create(items_max: u32, capacity: u64) -> Result<File> {
        if !capacity_is_valid(capacity) {
            let (least, most) = (pelton_lane::CAPACITY_MIN, pelton_lane::CAPACITY_MAX);
            let wanted = format!("a multiple of 64 between {least} and {most}");
            return Err(Error::Option { option: "capacity", found: capacity, wanted });
        }
        sweep();
        loop {
            let mut random = [0; 8];
            rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
                .map_err(|errno| system("reading random bytes", errno))?;
            let path = Path::new(DIRECTORY).join(format!("{}{:016x}", prefix(), u64::from_le_bytes(random)));
            let flags = OPEN | OFlags::CREATE | OFlags::EXCL;
            let fd = match rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR) {
                Err(Errno::EXIST) => continue,
                opened => opened.map_err(|errno| system(&format!("creating {}", path.display()), errno))?,
            };
            if let Some(file) = File::fill(path.clone(), fd, items_max, capacity).inspect_err(|_| {
                let _ = rustix::fs::unlink(&path);
            })? {
                return Ok(file);
            }
        }
    }

    /// Writes a new file. `None`: a process that sweeps has removed it.
    fn fill(path: PathBuf, fd: OwnedFd, items_max: u32, capacity: u64) -> Result<Option<File>> {
        let failed = failed("making the queue", &path);
        lock_shared(&fd).map_err(&failed)?;
        if !is_linked(&fd) {
            return Ok(None);
        }
        rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR).map_err(&failed)?;
        rustix::fs::ftruncate(&fd, DATA_AT + capacity).map_err(&failed)?;
        // With the place of the first item, which a consumer reads before a producer has allocated anything.
        pelton_os::allocate(&fd, 0, DATA_AT + pelton_os::PIECE.min(capacity))
            .map_err(|error| failed(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
        let file = File::map(path.clone(), fd, capacity)?;
        let base = file.base;
        let pid = std::process::id();
        // SAFETY: the mapping is new, writable, zeroed, large enough for each struct at its offset, and aligned to a
        // page. Nobody else knows the file.
        unsafe {
            let header = base.cast::<Header>().as_ptr();
            (&raw mut (*header).layout).write(layout());
            (&raw mut (*header).capacity).write(capacity);
            (&raw mut (*header).items_max).write(items_max.into());
            (*header).lap_end.store(capacity, Ordering::Relaxed);
            let producer = ProducerPage::new(capacity, message_bytes_limit(capacity), 1, pid);
            base.byte_add(PRODUCER_AT as usize).cast().write(producer);
            base.byte_add(CONSUMER_AT as usize).cast().write(ConsumerPage::new(Position::START, 1, pid));
            base.byte_add(RECEIVER_AT as usize).cast().write(ReceiverPage::new());
            Role::create(&raw mut (*header).putting)?;
            Role::create(&raw mut (*header).getting)?;
            (&raw mut (*header).magic).write(MAGIC);
            Ok(Some(file))
        }
    }

    /// Maps the file.
    fn map(path: PathBuf, fd: OwnedFd, capacity: u64) -> Result<File> {
        let bytes = (DATA_AT + capacity) as usize;
        let shown = path.clone();
        let errors = failed("mapping the queue", &shown);
        let owner = Owner::current().map_err(|error| errors(Errno::from_io_error(&error).unwrap_or(Errno::NOMEM)))?;
        // SAFETY: the kernel chooses the place, where nothing is mapped.
        let base =
            unsafe { mmap(ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &fd, 0) };
        let base = NonNull::new(base.map_err(&errors)?.cast::<u8>()).ok_or_else(|| errors(Errno::NOMEM))?;
        let can_spin = pelton_os::has_two_processors(std::process::id());
        let file = File { path, fd, base, capacity, owner, has_left: AtomicBool::new(false), can_spin };
        // The items are in no core dump.
        // SAFETY: the range is the mapping's.
        let _ = unsafe {
            madvise(base.byte_add(DATA_AT as usize).as_ptr().cast(), capacity as usize, Advice::LinuxDontDump)
        };
        Ok(file)
    }

    /// Opens a queue by its name.
    pub fn open(name: &str) -> Result<File> {
        let path = Path::new(DIRECTORY).join(name);
        if !name.starts_with(&prefix()) || name.contains('/') {
            let problem = format!("it is no name of a queue of this user, wanted {}...", prefix());
            return Err(Error::NotAChannel { path: path.display().to_string(), problem });
        }
        let fd = rustix::fs::open(&path, OPEN, Mode::empty()).map_err(failed("opening", &path))?;
        File::check(path, fd, true)
    }

    /// Opens the queue for a forked child, also after its file was removed.
    pub fn reopen(&self) -> Result<File> {
        File::check(self.path.clone(), self.open_again()?, false)
    }

    /// A new description: the inherited one has the parent's lock.
    fn open_again(&self) -> Result<OwnedFd> {
        let own = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        rustix::fs::open(own.as_str(), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(failed("opening", &self.path))
    }

    /// Keeps the file for a child that is about to be forked, until that has opened it: the parent may leave before.
    pub fn keep_for_child(&self) -> Result<OwnedFd> {
        let fd = self.open_again()?;
        lock_shared(&fd).map_err(failed("keeping", &self.path))?;
        Ok(fd)
    }

    fn check(path: PathBuf, fd: OwnedFd, must_be_linked: bool) -> Result<File> {
        let refuse = |problem: String| Err(Error::NotAChannel { path: path.display().to_string(), problem });
        let errors = failed("opening", &path);
        let found = rustix::fs::fstat(&fd).map_err(&errors)?;
        let is_own = found.st_uid == rustix::process::geteuid().as_raw();
        if !rustix::fs::FileType::from_raw_mode(found.st_mode).is_file() || !is_own || found.st_mode & 0o077 != 0 {
            let (user, mode) = (found.st_uid, found.st_mode);
            return refuse(format!("it is of user {user} with mode {mode:o}, wanted a file of this user alone"));
        }
        lock_shared(&fd).map_err(&errors)?;
        if must_be_linked && !is_linked(&fd) {
            return Err(Error::NoChannel { path: path.display().to_string() });
        }
        let bytes = found.st_size as u64;
        if bytes <= DATA_AT || !capacity_is_valid(bytes - DATA_AT) {
            return refuse(format!("it has {bytes} bytes, wanted {DATA_AT} and a capacity"));
        }
        let file = File::map(path.clone(), fd, bytes - DATA_AT)?;
        let header = file.header();
        if (header.magic, header.layout, header.capacity) != (MAGIC, layout(), file.capacity) {
            return refuse("another version of pelton made it: use one version in all processes".to_owned());
        }
        Ok(file)
    }

    /// Ends the use of the queue by this process. The last process that does so removes the file.
    pub fn leave(&self) {
        // In a forked child the description is the parent's.
        if self.has_left.swap(true, Ordering::AcqRel) || self.is_forked() {
            return;
        }
        let _ = rustix::fs::flock(&self.fd, FlockOperation::Unlock);
        remove_if_unused(&self.fd, &self.path);
    }

    /// Whether this is a child of the process that opened it.
    pub fn is_forked(&self) -> bool {
        self.owner.is_forked()
    }

    /// Whether this process has ended its use of the queue.
    #[inline]
    pub fn has_left(&self) -> bool {
        self.has_left.load(Ordering::Relaxed)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn name(&self) -> String {
        self.path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The most items; 0: as many as the data holds.
    pub fn items_max(&self) -> u64 {
        self.header().items_max
    }

    #[inline]
    fn header(&self) -> &Header {
        // SAFETY: the file is mapped, and its size was checked. Its plain fields are not written after its creation.
        unsafe { self.base.cast().as_ref() }
    }

    #[inline]
    fn memory(&self) -> Memory {
        // SAFETY: the mapping has `DATA_AT` and `capacity` bytes, and each offset is that of a page.
        unsafe {
            Memory {
                producer: self.base.byte_add(PRODUCER_AT as usize).cast(),
                consumer: self.base.byte_add(CONSUMER_AT as usize).cast(),
                receiver: self.base.byte_add(RECEIVER_AT as usize).cast(),
                data: Data::new(self.base.byte_add(DATA_AT as usize), self.capacity),
            }
        }
    }

    fn pages(&self) -> (&ProducerPage, &ConsumerPage) {
        let memory = self.memory();
        // SAFETY: both pages are mapped as long as this lives.
        unsafe { (memory.producer.as_ref(), memory.consumer.as_ref()) }
    }

    /// The producer of the lane.
    fn producer(&self, _role: &Held<'_>) -> Result<Producer> {
        let memory = self.memory();
        let (page, consumer) = self.pages();
        let (stored, floor) = page.tail_and_floor();
        let head = consumer.head();
        // A producer that was killed may have published one item more than it counted.
        let (tail, _) = find_end(&memory.data, message_bytes_limit(self.capacity), stored)?;
        // SAFETY: the memory is mapped as long as this lives, and the role has one holder. The creator wrote the page's
        // sizes, which are the file's.
        let mut producer = unsafe { Producer::attach(memory, tail, head, floor, false)? };
        producer.set_lap_end(self.header().lap_end.load(Ordering::Relaxed));
        producer.set_backed(self.header().backed.load(Ordering::Relaxed));
        Ok(producer)
    }

    /// The consumer of the lane.
    fn consumer(&self, _role: &Held<'_>) -> Result<Consumer> {
        // SAFETY: as for the producer.
        Ok(unsafe { Consumer::attach(self.memory(), message_bytes_limit(self.capacity), false)? })
    }

    /// The producer's role, if it is free.
    #[inline]
    pub fn try_lock_to_put(&self) -> Result<Option<Held<'_>>> {
        self.header().putting.try_lock()
    }

    /// The consumer's role, if it is free.
    #[inline]
    pub fn try_lock_to_get(&self) -> Result<Option<Held<'_>>> {
        self.header().getting.try_lock()
    }

    /// Puts an item, if there is room. The caller then gives the role up, and calls `after_put`.
    pub fn try_put(&self, role: &Held<'_>, item: &Outgoing<'_>) -> Result<bool> {
        let header = self.header();
        let mut producer = self.producer(role)?;
        if header.items_max != 0 && producer.unreleased() >= header.items_max {
            return Ok(false);
        }
        let space = loop {
            match producer.try_reserve(item.bytes as u64) {
                Ok(Some(space)) => break space,
                Ok(None) => return Ok(false),
                Err(LaneError::Unbacked { bytes }) => self.back(&mut producer, bytes)?,
                Err(error) => return Err(error.into()),
            }
        };
        let start = producer.payload(space);
        for (at, part) in &item.parts {
            assert!(at + part.len() <= item.bytes, "the parts of an item lie in its message");
            // SAFETY: the space has `item.bytes` bytes, which nobody reads before the commit.
            unsafe { copy_maybe_overlapping(part, start.as_ptr().byte_add(*at)) };
        }
        let tail = producer.tail().offset;
        // SAFETY: the space is in the data.
        if unsafe { start.byte_offset_from(self.base) } < (DATA_AT + tail) as isize {
            // A jump to the front. Stored before it is published: a successor must not take the records of this lap for
            // free space.
            header.lap_end.store(tail, Ordering::Relaxed);
        }
        // The file has doorbells of its own.
        let _ = producer.commit(space, item.bytes as u64);
        Ok(true)
    }

    /// Wakes a consumer that waits for an item.
    #[inline]
    pub fn after_put(&self) {
        ring(&self.header().items);
    }

    /// Puts an item. Waits for room until `until`; returns false then.
    pub fn put_until(&self, item: &Outgoing<'_>, until: Instant) -> Result<bool> {
        let (putting, room) = (&self.header().putting, &self.header().room);
        let Some(role) = putting.lock_until(until)? else { return Ok(false) };
        let mut put = self.try_put(&role, item)?;
        while !put && Instant::now() < until {
            let announced = room.want();
            put = self.try_put(&role, item)?;
            if !put {
                sleep(room, announced, until);
            }
        }
        drop(role);
        if put {
            self.after_put();
        }
        Ok(put)
    }

    /// Puts an item, if there is room.
    pub fn put_now(&self, item: &Outgoing<'_>) -> Result<bool> {
        let Some(role) = self.header().putting.lock_unless_waiting(&self.header().room)? else { return Ok(false) };
        let put = self.try_put(&role, item)?;
        drop(role);
        if put {
            self.after_put();
        }
        Ok(put)
    }

    /// Takes the next item by `take`, and returns also whether a consumer that was killed had begun to take it. `take`
    /// returns `None` to leave it. The caller then gives the role up, and calls `after_get`.
    pub fn try_get<T>(
        &self,
        role: &Held<'_>,
        take: impl FnOnce(Offered<'_>) -> Result<Option<T>>,
    ) -> Result<Option<(T, bool)>> {
        let mut consumer = self.consumer(role)?;
        let Some(record) = consumer.peek()? else { return Ok(None) };
        self.take(&mut consumer, &record, take)
    }

    fn take<T>(
        &self,
        consumer: &mut Consumer,
        record: &Record,
        take: impl FnOnce(Offered<'_>) -> Result<Option<T>>,
    ) -> Result<Option<(T, bool)>> {
        let taking = &self.header().taking;
        // Relaxed: the lock orders it.
        let is_redelivered = taking.load(Ordering::Relaxed) == record.seq;
        taking.store(record.seq, Ordering::Relaxed);
        // SAFETY: the consumer has checked that the record lies in the data. No producer writes there before the
        // release.
        let message = unsafe { std::slice::from_raw_parts(consumer.payload(record).as_ptr(), record.bytes as usize) };
        match take(Offered { message, seq: record.seq, is_redelivered }) {
            Ok(Some(taken)) => {
                // The file has doorbells of its own.
                let _ = consumer.release(record);
                Ok(Some((taken, is_redelivered)))
            }
            left => {
                if !is_redelivered {
                    taking.store(0, Ordering::Relaxed);
                }
                left.map(|_| None)
            }
        }
    }

    /// Calls `adopt` as the consumer, if that role is free within `until`, with the number of the item that a consumer
    /// which was killed had begun to take.
    pub fn adopt<T>(&self, until: Instant, adopt: impl FnOnce(Option<u32>) -> Result<Option<T>>) -> Result<Option<T>> {
        let Some(role) = self.header().getting.lock_until(until)? else { return Ok(None) };
        let next = self.consumer(&role)?.head().seq;
        let is_interrupted = self.header().taking.load(Ordering::Relaxed) == next;
        adopt(is_interrupted.then_some(next))
    }

    /// Wakes a producer that waits for room.
    #[inline]
    pub fn after_get(&self) {
        ring(&self.header().room);
    }

    /// Takes the next item by `take`. Waits for one until `until`; returns `None` then.
    pub fn get_until<T>(
        &self,
        until: Instant,
        take: impl Fn(Offered<'_>) -> Result<Option<T>>,
    ) -> Result<Option<(T, bool)>> {
        let (getting, items) = (&self.header().getting, &self.header().items);
        let Some(role) = getting.lock_until(until)? else { return Ok(None) };
        let mut consumer = self.consumer(&role)?;
        let mut found = consumer.peek()?;
        if found.is_none() && self.can_spin {
            let end = until.min(Instant::now() + SPIN);
            while !consumer.may_be_ready() && Instant::now() < end {
                std::hint::spin_loop();
            }
            found = consumer.peek()?;
        }
        while found.is_none() && Instant::now() < until {
            let announced = items.want();
            found = consumer.peek()?;
            if found.is_none() {
                sleep(items, announced, until);
            }
        }
        let Some(record) = found else { return Ok(None) };
        let taken = self.take(&mut consumer, &record, take)?;
        drop(role);
        self.after_get();
        Ok(taken)
    }

    /// Takes the next item by `take`, if there is one.
    pub fn get_now<T>(&self, take: impl FnOnce(Offered<'_>) -> Result<Option<T>>) -> Result<Option<(T, bool)>> {
        let Some(role) = self.header().getting.lock_unless_waiting(&self.header().items)? else { return Ok(None) };
        let taken = self.try_get(&role, take)?;
        drop(role);
        self.after_get();
        Ok(taken)
    }

    /// Allocates memory for the first `bytes` of the data, so that a store there cannot fail.
    #[cold]
    fn back(&self, producer: &mut Producer, bytes: u64) -> Result<()> {
        let from = producer.backed();
        let mut refused = None;
        // If a whole step fails, only the required bytes.
        for to in [bytes.next_multiple_of(STEP), bytes.next_multiple_of(pelton_os::PIECE)] {
            let to = to.min(self.capacity);
            match pelton_os::allocate(&self.fd, DATA_AT + from, DATA_AT + to) {
                Ok(()) => {
                    self.header().backed.store(to, Ordering::Relaxed);
                    producer.set_backed(to);
                    return Ok(());
                }
                Err(error) => refused = Some(error),
            }
        }
        let error = refused.expect("an attempt failed");
        match Errno::from_io_error(&error) {
            Some(Errno::NOSPC | Errno::DQUOT) => {
                Err(Error::NoSpace { path: self.path.display().to_string(), bytes: DATA_AT + bytes, error })
            }
            _ => Err(Error::System { what: "allocating memory for the queue".to_owned(), error }),
        }
    }

    /// The number of items. Another thread may have changed it by now.
    pub fn items(&self) -> u64 {
        let (producer, consumer) = self.pages();
        // In this order, so that the tail is not before the head.
        let head = consumer.head();
        self.since(producer.tail_and_floor().0, head)
    }

    /// Wakes the threads that wait in `join_until`.
    pub fn after_done(&self) {
        ring(&self.header().joined);
    }

    /// Waits until no item is in the queue or claimed, or until `until`; returns false then.
    pub fn join_until(&self, until: Instant) -> Result<bool> {
        let joined = &self.header().joined;
        loop {
            let announced = joined.want();
            if let Some(role) = self.try_lock_to_put()? {
                // Counts the item of a producer that was killed.
                self.producer(&role)?;
            }
            // In this order: an item is claimed before it leaves the lane. Nothing was put or taken meanwhile:
            // otherwise an item that was done may have been followed by another one, in a file that was read before.
            let head = self.pages().1.head();
            if self.items() == 0
                && !queue_claims::is_any_left(&self.path)?
                && self.items() == 0
                && self.pages().1.head() == head
            {
                return Ok(true);
            }
            if Instant::now() >= until {
                return Ok(false);
            }
            sleep(joined, announced, until);
        }
    }

    /// The number of items between two positions. None, if the tail is that of a producer which was killed before it
    /// counted the item that was taken since.
    fn since(&self, tail: Position, earlier: Position) -> u64 {
        let items = tail.since(earlier);
        if items > self.capacity / 8 { 0 } else { items }
    }
}

impl Drop for File {
    fn drop(&mut self) {
        self.leave();
        // SAFETY: mapped in `File::map`, unmapped once, here. No producer or consumer outlives a method.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), (DATA_AT + self.capacity) as usize) };
    }
}
