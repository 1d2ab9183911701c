//! What a handle points to: a gate, which has the kind and the state, and the object.
//!
//! A closed handle's memory stays allocated for a while: a later use finds the closed gate, not another object.
//!
//! Synchronisation: one thread at a time uses a handle; the caller guarantees that. If threads are checked, `busy` is
//! taken by an exchange before anything else is accessed, and never released by a thread that closes; the gate, which
//! other threads may load then, changes only when the handle is closed.

#[cfg(test)]
mod tests;

use crate::code::{self, Answer};
use std::any::Any;
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::LazyLock;
use std::sync::atomic::Ordering::{AcqRel, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize};

macro_rules! kinds {
    ($($(#[$attribute:meta])* $kind:ident $name:literal $gate:literal,)*) => {
        /// The kind of a handle. Its number is the gate of a free handle; the numbers after it are the other states.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kind { $($(#[$attribute])* $kind = $gate,)* }

        impl Kind {
            const ALL: &[Kind] = &[$($(#[$attribute])* Kind::$kind,)*];

            /// `pelton_NAME` is the type in C.
            fn name(self) -> &'static str {
                match self { $($(#[$attribute])* Kind::$kind => $name,)* }
            }
        }
    };
}

// Letters of the names, so that memory that is no handle hardly looks like one.
kinds! {
    Sender "sender" 0x7365_6e00,
    Receiver "receiver" 0x7265_6300,
    Listener "listener" 0x6c69_7300,
    Senders "senders" 0x7365_7300,
    Held "held" 0x6865_6c00,
    SenderOpening "sender_opening" 0x736f_7000,
    ReceiverOpening "receiver_opening" 0x726f_7000,
    SubscriberOpening "subscriber_opening" 0x736f_7300,
    ClientOpening "client_opening" 0x636f_7000,
    Publisher "publisher" 0x7075_6200,
    Subscriber "subscriber" 0x7375_6200,
    SubscriberSet "subscriber_set" 0x7373_6500,
    Client "client" 0x636c_6900,
    Service "service" 0x7372_7600,
    Responder "responder" 0x7265_7300,
    Flush "flush" 0x666c_7500,
    Appenders "appenders" 0x6170_7300,
    Appender "appender" 0x6170_7000,
    Records "records" 0x7265_6400,
    Engine "engine" 0x656e_6700,
    File "file" 0x6669_6c00,
    #[cfg(test)] Test "test" 0x7465_7300,
}

/// What a handle can be used for at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// Nothing is reserved or received, and the fast paths may be taken.
    Free = 0,
    /// One message is received, or space reserved: the fast path of its release, or its commit, may be taken.
    One = 1,
    /// Usable, but only by the slow paths.
    Slow = 2,
    Closed = 3,
    /// An operation on a file, or a set of subscribers, has the object.
    Detached = 4,
}

/// The bits of the gate that hold the state.
const STATES: u32 = 7;

impl State {
    fn of_gate(gate: u32) -> State {
        match gate & STATES {
            0 => State::Free,
            1 => State::One,
            3 => State::Closed,
            4 => State::Detached,
            _ => State::Slow,
        }
    }
}

/// What a handle leads to.
pub trait Object: 'static {
    const KIND: Kind;

    fn is_forked(&self) -> bool;

    /// Free, One or Slow.
    fn state(&self) -> State {
        State::Free
    }

    /// Whether this thread can close the handle.
    fn before_closing(&mut self) -> Answer {
        Ok(())
    }
}

#[repr(C)]
pub struct Handle<T> {
    head: Head,
    /// Initialised until the handle is closed, unless it is detached. Not an `Option`, whose tag each message would
    /// have to check.
    object: UnsafeCell<MaybeUninit<T>>,
}

/// The beginning of each handle, of any kind.
#[repr(C)]
struct Head {
    gate: AtomicU32,
    checks_threads: bool,
    busy: AtomicBool,
    /// The process that created it, if threads are checked.
    pid: u32,
    /// A panic was caught in a call: only closing is safe.
    is_broken: AtomicBool,
    methods: &'static Methods,
}

/// What can be done with a handle of any kind.
struct Methods {
    close: unsafe fn(*mut Head) -> c_int,
    /// Frees the memory of a handle without an object.
    free: unsafe fn(*mut Head),
}

impl<T: Object> Handle<T> {
    const METHODS: &Methods = &Methods {
        // SAFETY: called only by `close_any`, for a gate of this kind.
        close: |head| unsafe { close(head.cast::<Handle<T>>()) },
        // SAFETY: called only by `retire`, whose handles are from `boxed`.
        free: |head| unsafe { drop(Box::from_raw(head.cast::<Handle<T>>())) },
    };

    /// The gate in that state.
    pub const fn gate(state: State) -> u32 {
        T::KIND as u32 + state as u32
    }

    pub fn boxed(object: T) -> *mut Handle<T> {
        static CHECKS: LazyLock<bool> =
            LazyLock::new(|| cfg!(debug_assertions) || std::env::var_os("PELTON_CHECK_THREADS").is_some());
        let checks_threads = *CHECKS;
        let head = Head {
            gate: AtomicU32::new(Self::gate(if checks_threads { State::Slow } else { State::Free })),
            checks_threads,
            busy: AtomicBool::new(false),
            pid: if checks_threads { std::process::id() } else { 0 },
            is_broken: AtomicBool::new(false),
            methods: Self::METHODS,
        };
        Box::into_raw(Box::new(Handle { head, object: UnsafeCell::new(MaybeUninit::new(object)) }))
    }

    /// The object, if the gate has that state.
    ///
    /// # Safety
    /// `handle` is NULL, or from [`Handle::boxed`] and used by this thread alone; `state` is one with an object.
    #[inline(always)]
    pub unsafe fn object_in<'a>(handle: *mut Handle<T>, state: State) -> Option<&'a mut T> {
        if handle.is_null() {
            return None;
        }
        // SAFETY: the caller guarantees the handle. A closed one stays allocated, and only closing or detaching takes
        // the object, which changes the gate. Relaxed: the caller orders one thread's use before another's.
        unsafe {
            if (*handle).head.gate.load(Relaxed) != Self::gate(state) {
                return None;
            }
            Some((*(*handle).object.get()).assume_init_mut())
        }
    }

    /// Runs what a fast path does. After a panic in it, the handle can only be closed.
    ///
    /// # Safety
    /// [`Handle::object_in`] has found the object.
    #[inline(always)]
    pub unsafe fn run_fast<A>(handle: *mut Handle<T>, act: impl FnOnce() -> A) -> Answer<A> {
        catch(|| Ok(act())).inspect_err(|_| {
            // SAFETY: the caller guarantees that the handle is open.
            let head = unsafe { &(*handle).head };
            head.is_broken.store(true, Relaxed);
            head.gate.store(Self::gate(State::Slow), Relaxed);
        })
    }

    /// Sets the state at the end of a fast path.
    ///
    /// # Safety
    /// [`Handle::object_in`] has found the object.
    #[inline(always)]
    pub unsafe fn set_state(handle: *mut Handle<T>, state: State) {
        // SAFETY: the caller guarantees that the handle is open. Relaxed: as in `object_in`.
        unsafe { (*handle).head.gate.store(Self::gate(state), Relaxed) };
    }
}

/// Runs what a function does with the object, if the handle can be used.
///
/// # Safety
/// `handle` is NULL or from [`Handle::boxed`]; one thread at a time uses it.
#[cold]
#[inline(never)]
pub unsafe fn enter<T: Object, A>(handle: *mut Handle<T>, act: impl FnOnce(&mut T) -> Answer<A>) -> Answer<A> {
    // SAFETY: the caller guarantees it.
    unsafe { enter_and(handle, act, |_| false) }
}

/// As [`enter`]. If `closes` says so of the answer, no other thread can enter afterwards.
///
/// # Safety
/// As for [`enter`].
unsafe fn enter_and<T: Object, A>(
    handle: *mut Handle<T>,
    act: impl FnOnce(&mut T) -> Answer<A>,
    closes: impl FnOnce(&Answer<A>) -> bool,
) -> Answer<A> {
    // SAFETY: the caller guarantees the handle.
    let shared = unsafe { opened(handle)? };
    let head = &shared.head;
    // Acquire, release: calls that do not overlap are ordered, whatever the caller did. A forked child has none of its
    // parent's other threads, which may have been in a call.
    if head.checks_threads && head.busy.swap(true, AcqRel) && head.pid == std::process::id() {
        let detail = format!("another thread is in a call with this pelton_{}", T::KIND.name());
        return Err(code::tell(code::WRONG_THREAD, detail));
    }
    let answer = if head.is_broken.load(Relaxed) {
        Err(broken())
    } else {
        // SAFETY: the gate says that the object is there; by the caller's guarantee, or the exchange above, no other
        // thread uses it.
        let object = unsafe { (*shared.object.get()).assume_init_mut() };
        let answer = catch(|| match object.is_forked() {
            true => Err(code::of(&pelton::Error::Forked)),
            false => act(object),
        });
        if answer.as_ref().is_err_and(|code| *code == code::INTERNAL) {
            head.is_broken.store(true, Relaxed);
        }
        let only_slow = head.checks_threads || head.is_broken.load(Relaxed);
        head.gate.store(Handle::<T>::gate(if only_slow { State::Slow } else { object.state() }), Relaxed);
        answer
    };
    if head.checks_threads && !closes(&answer) {
        head.busy.store(false, Release);
    }
    answer
}

/// As [`enter`], for functions that several threads may call at the same time.
///
/// # Safety
/// `handle` is NULL or from [`Handle::boxed`]; no thread closes it meanwhile.
pub unsafe fn share<T: Object + Sync, A>(handle: *const Handle<T>, act: impl FnOnce(&T) -> Answer<A>) -> Answer<A> {
    // SAFETY: the caller guarantees the handle.
    let shared = unsafe { opened(handle)? };
    if shared.head.is_broken.load(Relaxed) {
        return Err(broken());
    }
    // SAFETY: the gate says that the object is there. All functions of such a kind only share it until it is closed,
    // which the caller excludes.
    let object = unsafe { (*shared.object.get()).assume_init_ref() };
    let answer = catch(|| match object.is_forked() {
        true => Err(code::of(&pelton::Error::Forked)),
        false => act(object),
    });
    if answer.as_ref().is_err_and(|code| *code == code::INTERNAL) {
        // Relaxed: calls that are in progress in other threads are as if they had come before.
        shared.head.is_broken.store(true, Relaxed);
    }
    answer
}

/// Uses a part of the object that nothing writes, whatever other threads do with the handle meanwhile.
///
/// # Safety
/// As for [`share`]; `part` returns the address of a field that nothing writes until the handle is closed.
pub unsafe fn share_part<T: Object, P: Sync>(
    handle: *const Handle<T>,
    part: impl FnOnce(*const T) -> *const P,
    act: impl FnOnce(&P),
) -> Answer {
    // SAFETY: the caller guarantees the handle.
    let shared = unsafe { opened(handle)? };
    catch(|| {
        // SAFETY: the gate says that the object is there; the caller guarantees that nothing writes this part.
        act(unsafe { &*part((*shared.object.get()).as_ptr()) });
        Ok(())
    })
}

/// The handle, if it is of this kind, open, and not detached.
///
/// # Safety
/// `handle` is NULL or from [`Handle::boxed`], of any kind.
unsafe fn opened<'a, T: Object>(handle: *const Handle<T>) -> Answer<&'a Handle<T>> {
    if handle.is_null() {
        return Err(code::null(T::KIND.name()));
    }
    // SAFETY: each kind begins with a head, and a closed handle stays allocated. Relaxed: the caller orders creating,
    // closing, and one thread's use before another's.
    let gate = unsafe { (*handle.cast::<Head>()).gate.load(Relaxed) };
    // Free, One or Slow.
    if !(Handle::<T>::gate(State::Free)..=Handle::<T>::gate(State::Slow)).contains(&gate) {
        return Err(unusable(gate, Some(T::KIND)));
    }
    // SAFETY: the gate says that it is of this kind.
    Ok(unsafe { &*handle })
}

/// The kind that the gate names.
fn kind_of(gate: u32) -> Option<Kind> {
    Kind::ALL.iter().copied().find(|kind| *kind as u32 == gate & !STATES)
}

/// The error for a handle of another kind or state than a function needs.
#[cold]
fn unusable(gate: u32, wanted: Option<Kind>) -> c_int {
    let wanted_name = wanted.map_or("open handle", Kind::name);
    let found = match (kind_of(gate), State::of_gate(gate)) {
        (None, _) => "no handle of pelton, or was closed long ago".to_owned(),
        (Some(kind), State::Detached) if wanted.is_none_or(|wanted| wanted == kind) => {
            let detail = match kind {
                Kind::Subscriber => {
                    "a pelton_subscriber_set has the pelton_subscriber: remove it there first".to_owned()
                }
                kind => {
                    let kind = kind.name();
                    format!("an operation on a file uses the pelton_{kind}: take its completion, or cancel it")
                }
            };
            return code::tell(code::WRONG_THREAD, detail);
        }
        (Some(kind), State::Closed) => format!("a closed pelton_{}", kind.name()),
        (Some(kind), _) => format!("a pelton_{}", kind.name()),
    };
    code::tell(code::CLOSED_HANDLE, format!("the handle is {found}, wanted an open pelton_{wanted_name}"))
}

#[cold]
fn broken() -> c_int {
    code::tell(code::INTERNAL, "a bug was caught in a call with this handle: close it")
}

/// Closes a handle of any kind; NULL is none.
///
/// # Safety
/// `handle` is NULL or from [`Handle::boxed`], and no other thread uses it.
pub unsafe fn close_any(handle: *mut c_void) -> c_int {
    let head: *mut Head = handle.cast();
    if head.is_null() {
        return 0;
    }
    // SAFETY: the caller guarantees the handle: each begins with a head, whose methods are those of its kind. Relaxed:
    // as in `opened`.
    unsafe {
        match (*head).gate.load(Relaxed) {
            gate if kind_of(gate).is_none() => unusable(gate, None),
            _ => ((*head).methods.close)(head),
        }
    }
}

/// # Safety
/// As for [`enter`].
unsafe fn close<T: Object>(handle: *mut Handle<T>) -> c_int {
    // A broken or forked one is closed too.
    let closes = |entered: &Answer| !matches!(entered, Err(code::CLOSED_HANDLE | code::WRONG_THREAD));
    // SAFETY: the caller guarantees it.
    let entered = unsafe { enter_and(handle, T::before_closing, closes) };
    if !closes(&entered) {
        return code::number(entered);
    }
    let forked = entered.or_else(|code| if code == code::FORKED { Err(code) } else { Ok(()) });
    // SAFETY: it was entered, so it has an object, and no other thread enters after `closes`.
    let object = unsafe { emptied(handle) };
    let dropped = catch(|| {
        drop(object);
        Ok(())
    });
    code::number(forked.and(dropped))
}

/// Closes a handle whose object continues elsewhere, if `check` permits.
///
/// # Safety
/// As for [`enter`].
pub unsafe fn take<T: Object, A>(handle: *mut Handle<T>, check: impl FnOnce(&mut T) -> Answer<A>) -> Answer<(T, A)> {
    // SAFETY: the caller guarantees the handle; what was entered has an object, and no other thread enters after that.
    unsafe {
        let answer = enter_and(handle, check, Result::is_ok)?;
        Ok((emptied(handle), answer))
    }
}

/// Takes the object of a handle that stays open, if `check` permits, until [`reattach`]. Meanwhile every use of the
/// handle, and closing it, returns `PELTON_WRONG_THREAD`.
///
/// # Safety
/// As for [`enter`].
pub unsafe fn detach<T: Object>(handle: *mut Handle<T>, check: impl FnOnce(&mut T) -> Answer) -> Answer<T> {
    // SAFETY: as in `take`; the gate says that the object is gone.
    unsafe {
        enter_and(handle, check, Result::is_ok)?;
        (*handle).head.gate.store(Handle::<T>::gate(State::Detached), Relaxed);
        Ok((*(*handle).object.get()).assume_init_read())
    }
}

/// Ends a [`detach`].
///
/// # Safety
/// The handle is detached, and no other thread uses it except to be refused.
pub unsafe fn reattach<T: Object>(handle: *mut Handle<T>, object: T) {
    // SAFETY: a detached handle is not closed, so it is allocated, and only this thread writes to it.
    unsafe {
        (*(*handle).object.get()).write(object);
        let head = &(*handle).head;
        head.gate.store(Handle::<T>::gate(if head.checks_threads { State::Slow } else { State::Free }), Relaxed);
        head.busy.store(false, Release);
    }
}

/// Closes the handle, and takes the object out of it.
///
/// # Safety
/// The handle has an object, and no other thread uses it.
unsafe fn emptied<T: Object>(handle: *mut Handle<T>) -> T {
    // SAFETY: the caller guarantees it. The gate says that the object is gone.
    unsafe {
        (*handle).head.gate.store(Handle::<T>::gate(State::Closed), Relaxed);
        let object = (*(*handle).object.get()).assume_init_read();
        retire(handle.cast());
        object
    }
}

/// Keeps a closed handle's memory for a while. Without a lock, which in a forked child might be taken for ever.
///
/// # Safety
/// The handle is from [`Handle::boxed`], and has no object.
unsafe fn retire(handle: *mut Head) {
    /// Those that the header promises, and this one.
    const KEPT: usize = 65;
    static RETIRED: [AtomicPtr<Head>; KEPT] = [const { AtomicPtr::new(std::ptr::null_mut()) }; KEPT];
    static CLOSINGS: AtomicUsize = AtomicUsize::new(0);
    // Relaxed: a number for each.
    let index = CLOSINGS.fetch_add(1, Relaxed) % KEPT;
    // Acquire, release: the thread that closed the oldest has finished with it.
    let oldest = RETIRED[index].swap(handle, AcqRel);
    if !oldest.is_null() {
        // SAFETY: this function stored it, and has just taken it out.
        unsafe { ((*oldest).methods.free)(oldest) };
    }
}

/// Runs what must not panic into C. If it does not, that costs a landing pad, for which a function saves registers.
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
