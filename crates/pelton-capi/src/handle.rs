//! What a pointer from C leads to: a gate that tells what the handle is and whether the short way is open, and the object.
//!
//! A closed handle's memory is kept for a while, so that using it again finds the closed gate and not somebody else's memory.
//!
//! Synchronisation: a handle is one thread's at a time by the caller's promise. Where that is checked, `busy` is taken by an
//! exchange before anything else is touched, and by who closes kept for ever; the gate, which others may look at then, is an atomic
//! of its own and in that mode changes only when the handle is closed.

use crate::code::{self, Answer};
use std::any::Any;
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::LazyLock;
use std::sync::atomic::Ordering::{AcqRel, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize};

/// What stands behind a handle.
pub trait Object {
    /// `pelton_KIND` is the type in C: one of [`KINDS`].
    const KIND: &'static str;
    /// The gate of a free handle: different for each kind. The values after it are its other states.
    const FREE: u32 = gate_of(Self::KIND);

    fn is_forked(&self) -> bool;

    /// Whether nothing is reserved or received.
    fn is_free(&self) -> bool;

    /// Whether one message is received, or reserved: then [`ONE`] leads to its release, or to its commit.
    fn has_one(&self) -> bool {
        false
    }

    /// Whether the handle can be closed by this thread.
    fn before_closing(&mut self) -> Answer {
        Ok(())
    }
}

/// The gate of a free handle of each kind, and the kind's name.
const KINDS: [(u32, &str); 14] = [
    (0x636c_6900, "client"),
    (0x6669_6c00, "file"),
    (0x656e_6700, "engine"),
    (0x666c_7500, "flush"),
    (0x6170_7300, "appenders"),
    (0x6170_7000, "appender"),
    (0x6c69_7300, "listener"),
    (0x7265_6300, "receiver"),
    (0x6865_6c00, "held"),
    (0x7265_6400, "records"),
    (0x7365_6e00, "sender"),
    (0x7365_7300, "senders"),
    (0x7372_7600, "service"),
    (0x616e_7300, "responder"),
];

/// The gate of a free handle of that kind.
const fn gate_of(kind: &str) -> u32 {
    let mut index = 0;
    while index < KINDS.len() {
        let name = KINDS[index].1.as_bytes();
        let mut equal = 0;
        while equal < name.len() && equal < kind.len() && name[equal] == kind.as_bytes()[equal] {
            equal += 1;
        }
        if equal == name.len() && equal == kind.len() {
            return KINDS[index].0;
        }
        index += 1;
    }
    panic!("the kind is in the table")
}

/// Beyond FREE: one message is received, or reserved.
pub const ONE: u32 = 1;
/// Beyond FREE: alive, but look closer.
const CLOSER: u32 = 2;
/// Beyond FREE: closed.
const CLOSED: u32 = 3;
/// Beyond FREE: the object is lent to an operation, and comes back.
const LENT: u32 = 4;
/// All of these.
const STATES: u32 = 7;

#[repr(C)]
pub struct Handle<T> {
    head: Head,
    /// There until the handle is closed, and while it is not lent. Not an option: its tag would be looked at on the way of each message.
    object: UnsafeCell<MaybeUninit<T>>,
}

/// What all kinds begin with.
#[repr(C)]
struct Head {
    gate: AtomicU32,
    checks_threads: bool,
    busy: AtomicBool,
    /// The process that made it, if threads are checked.
    pid: u32,
    /// A panic was caught in a call: nothing but closing is safe.
    is_broken: AtomicBool,
    /// Frees the memory of a handle without an object.
    free: unsafe fn(*mut Head),
}

impl<T: Object> Handle<T> {
    pub fn boxed(object: T) -> *mut Handle<T> {
        static CHECKS: LazyLock<bool> =
            LazyLock::new(|| cfg!(debug_assertions) || std::env::var_os("PELTON_CHECK_THREADS").is_some());
        let checks_threads = *CHECKS;
        let head = Head {
            gate: AtomicU32::new(T::FREE + if checks_threads { CLOSER } else { 0 }),
            checks_threads,
            busy: AtomicBool::new(false),
            pid: if checks_threads { std::process::id() } else { 0 },
            is_broken: AtomicBool::new(false),
            // SAFETY: only ever called with what is made here.
            free: |head| unsafe { drop(Box::from_raw(head.cast::<Handle<T>>())) },
        };
        Box::into_raw(Box::new(Handle { head, object: UnsafeCell::new(MaybeUninit::new(object)) }))
    }

    /// The object, if the short way to it is open.
    ///
    /// # Safety
    /// `handle` is NULL, or from [`Handle::boxed`] and used by this thread alone.
    #[inline(always)]
    pub unsafe fn object_at<'a>(handle: *mut Handle<T>, gate: u32) -> Option<&'a mut T> {
        if handle.is_null() {
            return None;
        }
        // SAFETY: the caller's promise; a closed handle is kept, and its gate is closed.
        unsafe {
            // Relaxed: the caller orders one thread's use before another's.
            if (*handle).head.gate.load(Relaxed) != gate {
                return None;
            }
            // SAFETY: only closing takes the object, and it closes the gate.
            Some((*(*handle).object.get()).assume_init_mut())
        }
    }

    /// Runs the short way's action. A panic in it closes the handle for everything but closing.
    ///
    /// # Safety
    /// As for [`Handle::object_at`], which found it open.
    #[inline(always)]
    pub unsafe fn briefly<A>(handle: *mut Handle<T>, act: impl FnOnce() -> A) -> Answer<A> {
        catch(|| Ok(act())).inspect_err(|_| {
            // SAFETY: the caller's promise.
            let shared = unsafe { &*handle };
            shared.head.is_broken.store(true, Relaxed);
            shared.head.gate.store(T::FREE + CLOSER, Relaxed);
        })
    }

    /// Sets the gate of a handle whose short way was open.
    ///
    /// # Safety
    /// As for [`Handle::object_at`], which found it so.
    #[inline(always)]
    pub unsafe fn set_gate(handle: *mut Handle<T>, gate: u32) {
        // SAFETY: the caller's promise. Relaxed: as above.
        unsafe { (*handle).head.gate.store(gate, Relaxed) };
    }
}

/// Runs what a function does, after finding out whether it may.
///
/// # Safety
/// `handle` is NULL or from [`Handle::boxed`].
#[cold]
#[inline(never)]
pub unsafe fn enter<T: Object, A>(handle: *mut Handle<T>, act: impl FnOnce(&mut T) -> Answer<A>) -> Result<A, c_int> {
    // SAFETY: the caller's promise.
    unsafe { enter_and(handle, act, |_| false) }
}

/// As [`enter`]; who `closes` by that answer is not followed by any other thread.
///
/// # Safety
/// As for [`enter`].
unsafe fn enter_and<T: Object, A>(
    handle: *mut Handle<T>,
    act: impl FnOnce(&mut T) -> Answer<A>,
    closes: impl FnOnce(&Answer<A>) -> bool,
) -> Answer<A> {
    // SAFETY: the caller's promise.
    let shared = unsafe { opened(handle)? };
    // Acquire, release: calls that do not overlap are in order then, whatever the caller did. A forked child has none of its parent's
    // other threads, which may have been in a call.
    if shared.head.checks_threads && shared.head.busy.swap(true, AcqRel) && shared.head.pid == std::process::id() {
        return Err(code::tell(code::WRONG_THREAD, format!("another thread is in a call with this {}", T::KIND)));
    }
    let answer = if shared.head.is_broken.load(Relaxed) {
        Err(broken())
    } else {
        // SAFETY: this thread alone uses the object, by the caller's promise or the exchange above; an open gate has one.
        let object = unsafe { (*shared.object.get()).assume_init_mut() };
        let answer = catch(|| match object.is_forked() {
            true => Err(code::of(&pelton::Error::Forked)),
            false => act(object),
        });
        if answer.as_ref().is_err_and(|code| *code == code::INTERNAL) {
            shared.head.is_broken.store(true, Relaxed);
        }
        let gate = match shared.head.checks_threads || shared.head.is_broken.load(Relaxed) {
            true => CLOSER,
            false if object.is_free() => 0,
            false if object.has_one() => ONE,
            false => CLOSER,
        };
        shared.head.gate.store(T::FREE + gate, Relaxed);
        answer
    };
    if shared.head.checks_threads && !closes(&answer) {
        shared.head.busy.store(false, Release);
    }
    answer
}

/// The handle, if it is of this kind and open.
///
/// # Safety
/// As for [`enter`].
unsafe fn opened<'a, T: Object>(handle: *const Handle<T>) -> Answer<&'a Handle<T>> {
    // SAFETY: the caller's promise; of another kind there may be less than of this one, so nothing but what all begin with is looked at.
    unsafe {
        if handle.is_null() {
            return Err(code::null(T::KIND));
        }
        // Relaxed: the caller orders one thread's use before another's, and making and closing.
        if !(T::FREE..=T::FREE + CLOSER).contains(&(*handle.cast::<Head>()).gate.load(Relaxed)) {
            return Err(stray(handle.cast(), &[T::KIND]));
        }
        Ok(&*handle)
    }
}

#[cold]
fn broken() -> c_int {
    code::tell(code::INTERNAL, "the handle is not usable since a bug was caught: close it")
}

/// Where the object of a handle is that is not open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whereabouts {
    Here,
    Lent,
    Closed,
}

/// The kind, by its free gate, of what may be any handle, and where its object is; of NULL no kind's.
///
/// # Safety
/// `handle` is NULL or from [`Handle::boxed`].
pub unsafe fn kind(handle: *const c_void) -> (u32, Whereabouts) {
    if handle.is_null() {
        return (0, Whereabouts::Here);
    }
    // SAFETY: the caller's promise; all begin alike. Relaxed: the caller orders making and closing.
    let gate = unsafe { (*handle.cast::<Head>()).gate.load(Relaxed) };
    let whereabouts = match gate & STATES {
        CLOSED => Whereabouts::Closed,
        LENT => Whereabouts::Lent,
        _ => Whereabouts::Here,
    };
    (gate & !STATES, whereabouts)
}

/// The mistake of a handle that is closed, or of another kind than these.
///
/// # Safety
/// As for [`kind`].
#[cold]
pub unsafe fn stray(handle: *const c_void, wanted: &[&str]) -> c_int {
    if handle.is_null() {
        return code::null("handle");
    }
    // SAFETY: the caller's promise.
    let (gate, whereabouts) = unsafe { kind(handle) };
    let name = KINDS.iter().find(|(of, _)| *of == gate).map(|(_, name)| *name);
    let found = match (name, whereabouts) {
        (Some(kind), Whereabouts::Closed) if wanted.is_empty() || wanted.contains(&kind) => {
            return code::tell(code::CLOSED_HANDLE, format!("the pelton_{kind} is closed"));
        }
        (Some(kind), Whereabouts::Lent) if wanted.is_empty() || wanted.contains(&kind) => {
            let detail = format!(
                "an operation on a file has the pelton_{kind} until its completion is taken: wait, or cancel it"
            );
            return code::tell(code::WRONG_THREAD, detail);
        }
        (Some(kind), Whereabouts::Closed) => format!("a pelton_{kind} that is closed"),
        (Some(kind), _) => format!("a pelton_{kind}"),
        (None, _) => "none of pelton's, or was closed long ago".to_owned(),
    };
    let wanted = match wanted {
        [] => "one that is open".to_owned(),
        [one] => format!("a pelton_{one}"),
        [first @ .., last] => format!("a pelton_{} or pelton_{last}", first.join(", pelton_")),
    };
    code::tell(code::CLOSED_HANDLE, format!("the handle is {found}, wanted {wanted}"))
}

/// Puts a new handle where the caller wants it.
///
/// # Safety
/// `out` is NULL, or may be written.
pub unsafe fn give<T: Object>(out: *mut *mut Handle<T>, make: impl FnOnce() -> Answer<T>) -> Answer {
    if out.is_null() {
        return Err(code::null("out"));
    }
    let object = make()?;
    // SAFETY: the caller's promise.
    unsafe { out.write(Handle::boxed(object)) };
    Ok(())
}

/// As [`enter`], for what any threads may do at once.
///
/// # Safety
/// As for [`enter`].
pub unsafe fn share<T: Object + Sync, A>(handle: *const Handle<T>, act: impl FnOnce(&T) -> Answer<A>) -> Answer<A> {
    // SAFETY: the caller's promise.
    let shared = unsafe { opened(handle)? };
    if shared.head.is_broken.load(Relaxed) {
        return Err(broken());
    }
    // SAFETY: only shared references are made of it until it is closed, when no call uses it, by the caller's promise.
    let object = unsafe { (*shared.object.get()).assume_init_ref() };
    let answer = catch(|| match object.is_forked() {
        true => Err(code::of(&pelton::Error::Forked)),
        false => act(object),
    });
    if answer.as_ref().is_err_and(|code| *code == code::INTERNAL) {
        // Relaxed: other threads' calls that go on meanwhile are as if they had come first.
        shared.head.is_broken.store(true, Relaxed);
    }
    answer
}

/// Uses a part of the object that never changes, whatever other threads do with the handle meanwhile.
///
/// # Safety
/// As for [`enter`]; `part` answers the place of a field that nothing writes to until the handle is closed, which nobody does meanwhile.
pub unsafe fn beside<T: Object, P: Sync>(
    handle: *const Handle<T>,
    part: unsafe fn(*const T) -> *const P,
    act: impl FnOnce(&P),
) -> c_int {
    // SAFETY: the caller's promise.
    number(unsafe { opened(handle) }.and_then(|shared| {
        catch(|| {
            // SAFETY: the object is there, as the gate says; of it only this field is looked at, by the caller's promise.
            act(unsafe { &*part((*shared.object.get()).as_ptr()) });
            Ok(())
        })
    }))
}

/// As [`enter`], for what answers nothing but a code.
///
/// # Safety
/// As for [`enter`].
pub unsafe fn call<T: Object>(handle: *mut Handle<T>, act: impl FnOnce(&mut T) -> Answer) -> c_int {
    // SAFETY: the caller's promise.
    number(unsafe { enter(handle, act) })
}

/// Closes a handle; NULL is none.
///
/// # Safety
/// As for [`enter`].
pub unsafe fn close<T: Object>(handle: *mut Handle<T>) -> c_int {
    if handle.is_null() {
        return 0;
    }
    // A broken or forked one is closed too.
    let closes = |entered: &Answer| !matches!(entered, Err(code::CLOSED_HANDLE | code::WRONG_THREAD));
    // SAFETY: the caller's promise.
    let entered = unsafe { enter_and(handle, T::before_closing, closes) };
    if !closes(&entered) {
        return number(entered);
    }
    let forked = entered.or_else(|code| if code == code::FORKED { Err(code) } else { Ok(()) });
    // SAFETY: this thread alone uses the object.
    let object = unsafe { emptied(handle) };
    let dropped = catch(|| {
        drop(object);
        Ok(())
    });
    number(forked.and(dropped))
}

/// Closes a handle whose object goes on elsewhere, once it is sure that it can.
///
/// # Safety
/// As for [`enter`].
pub unsafe fn take<T: Object, A>(handle: *mut Handle<T>, sure: impl FnOnce(&mut T) -> Answer<A>) -> Answer<(T, A)> {
    // SAFETY: the caller's promise; what could be entered has an object, which this thread alone uses.
    unsafe {
        let answer = enter_and(handle, sure, Result::is_ok)?;
        Ok((emptied(handle), answer))
    }
}

/// Lends the object of a handle that stays open, once it is sure that it can: until it is given back, whoever uses the handle, or closes it, is told
/// that it is lent.
///
/// # Safety
/// As for [`enter`]; the object is given back by [`give_back`], or leaked.
pub unsafe fn lend<T: Object>(handle: *mut Handle<T>, sure: impl FnOnce(&mut T) -> Answer) -> Answer<T> {
    // SAFETY: the caller's promise; what could be entered has an object, which this thread alone uses.
    unsafe {
        enter_and(handle, sure, Result::is_ok)?;
        (*handle).head.gate.store(T::FREE + LENT, Relaxed);
        Ok((*(*handle).object.get()).assume_init_read())
    }
}

/// Ends a [`lend`].
///
/// # Safety
/// The handle's object is lent, and this is it. Nobody but this thread uses the handle, but to be told so.
pub unsafe fn give_back<T: Object>(handle: *mut Handle<T>, object: T) {
    // SAFETY: a lent handle is not closed, so it is there; by the caller's promise this thread alone writes to it.
    unsafe {
        (*(*handle).object.get()).write(object);
        let head = &(*handle).head;
        head.gate.store(T::FREE + if head.checks_threads { CLOSER } else { 0 }, Relaxed);
        head.busy.store(false, Release);
    }
}

/// Closes the handle, and takes the object out of it.
///
/// # Safety
/// The handle has an object, and nobody else uses it.
unsafe fn emptied<T: Object>(handle: *mut Handle<T>) -> T {
    // SAFETY: the caller's promise. Made by `boxed`, and without an object in the end.
    unsafe {
        (*handle).head.gate.store(T::FREE + CLOSED, Relaxed);
        let object = (*(*handle).object.get()).assume_init_read();
        retire(handle.cast());
        object
    }
}

/// Keeps a closed handle's memory for a while. Without a lock, which in a forked child might be held for ever.
///
/// # Safety
/// The handle is from [`Handle::boxed`], and its object is taken.
unsafe fn retire(handle: *mut Head) {
    /// How many: those that the header promises, and itself.
    const KEPT: usize = 65;
    static RETIRED: [AtomicPtr<Head>; KEPT] = [const { AtomicPtr::new(std::ptr::null_mut()) }; KEPT];
    static CLOSINGS: AtomicUsize = AtomicUsize::new(0);
    // Relaxed: a number for each.
    let place = CLOSINGS.fetch_add(1, Relaxed) % KEPT;
    // Acquire, release: whoever closed the old one was done with it.
    let oldest = RETIRED[place].swap(handle, AcqRel);
    if !oldest.is_null() {
        // SAFETY: it was put there by this function, and taken out just now.
        unsafe { ((*oldest).free)(oldest) };
    }
}

/// Runs what must not panic into C. Costs nothing when it does not: a landing pad.
#[inline(always)]
pub fn catch<A>(act: impl FnOnce() -> Answer<A>) -> Answer<A> {
    catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(|panic| Err(caught(panic)))
}

#[cold]
#[inline(never)]
fn caught(panic: Box<dyn Any + Send>) -> c_int {
    let what = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    code::tell(code::INTERNAL, format!("a bug in pelton: {}", what.unwrap_or("it panicked")))
}

/// The number that C sees.
pub fn number(answer: Answer) -> c_int {
    answer.err().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test at a time, as each closes handles, and closings are counted.
    fn alone() -> std::sync::MutexGuard<'static, ()> {
        static TESTS: std::sync::Mutex<()> = std::sync::Mutex::new(());
        TESTS.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    struct Fragile;

    impl Object for Fragile {
        const FREE: u32 = 0x6672_6100;
        const KIND: &'static str = "fragile";

        fn is_forked(&self) -> bool {
            false
        }

        fn is_free(&self) -> bool {
            true
        }
    }

    fn detail() -> String {
        // SAFETY: a string of this thread's.
        unsafe { std::ffi::CStr::from_ptr(code::detail()) }.to_string_lossy().into_owned()
    }

    #[test]
    fn after_a_panic_a_handle_can_only_be_closed() {
        let _alone = alone();
        std::panic::set_hook(Box::new(|_| {}));
        for short in [false, true] {
            let handle = Handle::boxed(Fragile);
            // SAFETY: a live handle of this thread's.
            unsafe {
                match short {
                    true => {
                        assert_eq!(Handle::briefly(handle, || panic!("number {}", 7)), Err::<(), _>(code::INTERNAL))
                    }
                    false => assert_eq!(call(handle, |_| panic!("number {}", 7)), code::INTERNAL),
                }
                assert_eq!(detail(), "a bug in pelton: number 7");
                assert!(Handle::object_at(handle, Fragile::FREE).is_none());
                assert_eq!(call(handle, |_| Ok(())), code::INTERNAL);
                assert!(detail().contains("close it"));
                assert_eq!(close(handle), 0);
                assert_eq!(close(handle), code::CLOSED_HANDLE);
            }
        }
    }

    #[test]
    fn after_a_panic_a_shared_handle_too_can_only_be_closed() {
        let _alone = alone();
        std::panic::set_hook(Box::new(|_| {}));
        let handle = Handle::boxed(Fragile);
        // SAFETY: a live handle of this thread's.
        unsafe {
            assert_eq!(share(handle, |_| panic!("number {}", 7)), Err::<(), _>(code::INTERNAL));
            assert_eq!(detail(), "a bug in pelton: number 7");
            assert_eq!(share(handle, |_| Ok(())), Err(code::INTERNAL));
            assert!(detail().contains("close it"));
            assert_eq!(close(handle), 0);
        }
    }

    /// Says whether another thread could be in a call while it goes.
    struct Going(*mut Handle<Going>);

    thread_local! {
        static WAS_BUSY: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    }

    impl Object for Going {
        const FREE: u32 = 0x676f_6900;
        const KIND: &'static str = "going";

        fn is_forked(&self) -> bool {
            false
        }

        fn is_free(&self) -> bool {
            true
        }
    }

    impl Drop for Going {
        fn drop(&mut self) {
            // SAFETY: a closed handle is kept for a while.
            WAS_BUSY.set(unsafe { (*self.0).head.busy.load(Relaxed) });
        }
    }

    #[test]
    fn where_threads_are_checked_none_comes_between_the_last_call_and_the_end() {
        let _alone = alone();
        for taken in [false, true] {
            let handle = Handle::boxed(Going(std::ptr::null_mut()));
            WAS_BUSY.set(false);
            // SAFETY: a live handle of this thread's.
            unsafe {
                (*handle).head.checks_threads = true;
                (*(*handle).object.get()).assume_init_mut().0 = handle;
                assert_eq!(take(handle, |_| Err::<(), _>(code::TOO_LARGE)).err(), Some(code::TOO_LARGE));
                assert_eq!(call(handle, |_| Ok(())), 0, "it was not closed, and is used on");
                match taken {
                    true => drop(take(handle, |_| Ok(())).expect("nobody else is in a call")),
                    false => assert_eq!(close(handle), 0),
                }
                assert!(WAS_BUSY.get());
                assert_eq!(close(handle), code::CLOSED_HANDLE);
            }
        }
    }

    #[test]
    fn a_closed_handle_is_recognised_for_64_closings() {
        let _alone = alone();
        let first = Handle::boxed(Fragile);
        // SAFETY: live, or closed and kept.
        unsafe {
            assert_eq!(close(first), 0);
            for _ in 0..64 {
                assert_eq!(call(first, |_| Ok(())), code::CLOSED_HANDLE);
                assert_eq!(close(Handle::boxed(Fragile)), 0);
            }
        }
    }
}
