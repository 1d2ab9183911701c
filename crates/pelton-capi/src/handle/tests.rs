//! Panics, closing, and the thread check, by handles of a kind of their own.

use super::*;

/// One test at a time, as each closes handles, and closings are counted.
fn alone() -> std::sync::MutexGuard<'static, ()> {
    static TESTS: std::sync::Mutex<()> = std::sync::Mutex::new(());
    TESTS.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

struct Fragile;

impl Object for Fragile {
    const KIND: Kind = Kind::Test;

    fn is_forked(&self) -> bool {
        false
    }
}

fn detail() -> String {
    // SAFETY: it is a string until this thread's next call.
    unsafe { std::ffi::CStr::from_ptr(code::detail()) }.to_string_lossy().into_owned()
}

#[test]
fn after_a_panic_a_handle_can_only_be_closed() {
    let _alone = alone();
    std::panic::set_hook(Box::new(|_| {}));
    for is_fast in [false, true] {
        let handle = Handle::boxed(Fragile);
        // SAFETY: the handle is from `boxed`, and only this thread uses it.
        unsafe {
            match is_fast {
                true => {
                    assert_eq!(Handle::run_fast(handle, || panic!("number {}", 7)), Err::<(), _>(code::INTERNAL))
                }
                false => assert_eq!(enter(handle, |_| panic!("number {}", 7)), Err::<(), _>(code::INTERNAL)),
            }
            assert_eq!(detail(), "a bug in pelton: number 7");
            assert!(Handle::object_in(handle, State::Free).is_none());
            assert_eq!(enter(handle, |_| Ok(())), Err(code::INTERNAL));
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
    // SAFETY: the handle is from `boxed`, and only this thread uses it.
    unsafe {
        assert_eq!(share(handle, |_| panic!("number {}", 7)), Err::<(), _>(code::INTERNAL));
        assert_eq!(detail(), "a bug in pelton: number 7");
        assert_eq!(share(handle, |_| Ok(())), Err(code::INTERNAL));
        assert!(detail().contains("close it"));
        assert_eq!(close(handle), 0);
    }
}

/// Records whether another thread could be in a call while it is dropped.
struct Closing(*mut Handle<Closing>);

thread_local! {
    static WAS_BUSY: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

impl Object for Closing {
    const KIND: Kind = Kind::Test;

    fn is_forked(&self) -> bool {
        false
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        // SAFETY: a closed handle stays allocated for 64 closings.
        WAS_BUSY.set(unsafe { (*self.0).head.busy.load(Relaxed) });
    }
}

#[test]
fn where_threads_are_checked_none_comes_between_the_last_call_and_the_end() {
    let _alone = alone();
    for taken in [false, true] {
        let handle = Handle::boxed(Closing(std::ptr::null_mut()));
        WAS_BUSY.set(false);
        // SAFETY: the handle is from `boxed`, and only this thread uses it.
        unsafe {
            (*handle).head.checks_threads = true;
            (*(*handle).object.get()).assume_init_mut().0 = handle;
            assert_eq!(take(handle, |_| Err::<(), _>(code::TOO_LARGE)).err(), Some(code::TOO_LARGE));
            assert_eq!(enter(handle, |_| Ok(())), Ok(()), "it was not closed, and is usable");
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
    // SAFETY: the handles are from `boxed`, and a closed one stays allocated for 64 closings.
    unsafe {
        assert_eq!(close(first), 0);
        for _ in 0..64 {
            assert_eq!(enter(first, |_| Ok(())), Err(code::CLOSED_HANDLE));
            assert_eq!(close(Handle::boxed(Fragile)), 0);
        }
    }
}

#[test]
fn kinds_have_gates_of_their_own() {
    let gates: std::collections::HashSet<u32> = Kind::ALL.iter().map(|kind| *kind as u32 & !STATES).collect();
    assert_eq!(gates.len(), Kind::ALL.len());
    for kind in Kind::ALL {
        assert_eq!(*kind as u32 & STATES, State::Free as u32, "{kind:?}");
    }
}

#[test]
fn a_handle_of_another_kind_is_refused_with_both_kinds() {
    let _alone = alone();
    let handle = Handle::boxed(Fragile);
    // SAFETY: the handle is from `boxed`, and only this thread uses it.
    unsafe {
        let foreign: *mut Handle<crate::receiver::Receiver> = handle.cast();
        assert_eq!(enter(foreign, |_| Ok(())), Err(code::CLOSED_HANDLE));
        assert_eq!(detail(), "the handle is a pelton_test, wanted an open pelton_receiver");
        assert_eq!(close_any(handle.cast()), 0);
        assert_eq!(enter(foreign, |_| Ok(())), Err(code::CLOSED_HANDLE));
        assert_eq!(detail(), "the handle is a closed pelton_test, wanted an open pelton_receiver");
        assert_eq!(close_any(handle.cast()), code::CLOSED_HANDLE);
    }
}

#[test]
fn memory_that_is_no_handle_is_not_closed() {
    let mut memory = [0u64; 16];
    // SAFETY: it is as large as a handle's beginning, and no gate has the value 0.
    unsafe {
        assert_eq!(close_any(memory.as_mut_ptr().cast()), code::CLOSED_HANDLE);
        assert!(detail().contains("no handle of pelton"));
        assert_eq!(close_any(std::ptr::null_mut()), 0);
    }
}

#[test]
fn a_detached_handle_is_refused_until_it_is_attached_again() {
    let _alone = alone();
    let handle = Handle::boxed(Fragile);
    // SAFETY: the handle is from `boxed`, and only this thread uses it.
    unsafe {
        let object = detach(handle, |_| Ok(())).expect("nothing else uses it");
        for _ in 0..2 {
            assert_eq!(enter(handle, |_| Ok(())), Err(code::WRONG_THREAD));
            assert_eq!(close_any(handle.cast()), code::WRONG_THREAD);
            assert!(detail().contains("take its completion"));
        }
        reattach(handle, object);
        assert_eq!(enter(handle, |_| Ok(())), Ok(()));
        assert_eq!(close_any(handle.cast()), 0);
    }
}
