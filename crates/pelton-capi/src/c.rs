//! What crosses from C: the types of the exported functions' parameters, which the macro `entries!` uses.
//!
//! The caller of an exported function guarantees what `pelton.h` states: each pointer is NULL, or valid for what the
//! function does with it during the call; a size states what is readable or writable there; a handle is NULL or was
//! created by pelton. Only that guarantee creates values of the types below. So their methods, and the bodies of the
//! entries, are safe code.

#[cfg(test)]
mod tests;

use crate::code::{self, Answer};
use crate::handle::{self, Handle, Object};
use pelton::Deadline;
use pelton::raw::Name;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// The type of a parameter, or of two: a pointer and a size.
pub trait Parameter {
    /// In C.
    type C;
    /// `(C,)` or `(C, usize)`.
    type Given: Copy;
    /// For the body.
    type Value<'a>;

    /// Checks it for NULL.
    ///
    /// # Safety
    /// The caller of an exported function passed it.
    unsafe fn checked<'a>(given: &'a Self::Given, name: &'static str) -> Answer<Self::Value<'a>>;
}

/// A reference to what a pointer from C points to; PELTON_NULL if it is NULL.
///
/// # Safety
/// As for [`Parameter::checked`].
unsafe fn reference<'a, T>(pointer: *const T, name: &str) -> Answer<&'a T> {
    // SAFETY: the C caller guarantees that it is NULL or valid during the call.
    unsafe { pointer.as_ref() }.ok_or_else(|| code::null(name))
}

/// As [`reference`], of what the function writes.
///
/// # Safety
/// As for [`Parameter::checked`].
unsafe fn place<'a, T>(pointer: *mut T, name: &str) -> Answer<&'a mut MaybeUninit<T>> {
    // SAFETY: the C caller guarantees that it is NULL, or writable and not accessed otherwise during the call.
    unsafe { pointer.cast::<MaybeUninit<T>>().as_mut() }.ok_or_else(|| code::null(name))
}

/// Checks an array that C passes by its address and number of elements. NULL is one of 0 elements.
fn check_array<T>(pointer: *const T, count: usize, name: &str) -> Answer {
    match count {
        0 => Ok(()),
        _ if pointer.is_null() => Err(code::null(name)),
        _ => check_size(count.saturating_mul(size_of::<T>())),
    }
}

/// Whether a size is possible at all.
pub fn check_size(size: usize) -> Answer {
    if isize::try_from(size).is_ok() {
        return Ok(());
    }
    Err(code::tell(code::TOO_LARGE, format!("a size of {size} bytes: less than 2 GiB is possible")))
}

/// Nanoseconds of CLOCK_MONOTONIC.
pub fn now() -> i64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it writes to this structure; Linux always has this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

/// A `deadline_ns`.
#[cold]
pub fn deadline(deadline_ns: i64) -> Deadline {
    match deadline_ns {
        ..=0 => Deadline::Now,
        i64::MAX => Deadline::Never,
        // An instant can be computed only from another one and a difference.
        _ => Deadline::At(Instant::now() + Duration::from_nanos((deadline_ns - now()).max(0) as u64)),
    }
}

/// A name that is no path, and valid.
pub fn text(name: &CStr) -> Answer<&str> {
    let not_utf8 = |_| code::tell(code::NAME, format!("{name:?} is not UTF-8: use a path that is"));
    let text = name.to_str().map_err(not_utf8)?;
    code::done(Name::parse(text)).map(|_| text)
}

/// The directory of "path:DIR"; `None`: it is another name.
pub fn directory(name: &CStr) -> Answer<Option<&Path>> {
    match name.to_bytes().strip_prefix(b"path:") {
        None => Ok(None),
        Some(b"") => Err(code::tell(code::NAME, "\"path:\" names no directory: write path:DIR")),
        Some(directory) => Ok(Some(Path::new(OsStr::from_bytes(directory)))),
    }
}

macro_rules! values {
    ($($type:ty)*) => {
        $(impl Parameter for $type {
            type C = $type;
            type Given = ($type,);
            type Value<'a> = $type;

            unsafe fn checked(given: &($type,), _: &'static str) -> Answer<$type> {
                Ok(given.0)
            }
        })*
    };
}
values!(u32 u64 usize c_int *mut c_void);

impl Parameter for Deadline {
    type C = i64;
    type Given = (i64,);
    type Value<'a> = Deadline;

    unsafe fn checked(given: &(i64,), _: &'static str) -> Answer<Deadline> {
        Ok(deadline(given.0))
    }
}

macro_rules! pointers {
    ($($(#[doc = $doc:literal])* $name:ident$(<$generic:ident>)?: ($($given:ty),*) => $value:ty, $checked:expr;)*) => {
        $(
            $(#[doc = $doc])*
            pub struct $name$(<$generic>(PhantomData<$generic>))?;

            impl$(<$generic: 'static>)? Parameter for $name$(<$generic>)? {
                type C = pointers!(@first $($given),*);
                type Given = ($($given,)*);
                type Value<'a> = $value;

                unsafe fn checked<'a>(given: &'a Self::Given, name: &'static str) -> Answer<$value> {
                    let check: fn(&'a Self::Given, &'static str) -> Answer<$value> = $checked;
                    check(given, name)
                }
            }
        )*
    };
    (@first $first:ty $(, $rest:ty)?) => { $first };
}

pointers! {
    /// Bytes that the function reads.
    Bytes: (*const c_void, usize) => &'a [u8], |(data, size), name| {
        check_array::<u8>(data.cast(), *size, name)?;
        // SAFETY: the C caller guarantees so many readable bytes; there are some, so it is not NULL.
        Ok(if *size == 0 { &[] } else { unsafe { std::slice::from_raw_parts(data.cast(), *size) } })
    };
    /// An array that the function reads.
    Array<T>: (*const T, usize) => &'a [T], |(first, count), name| {
        check_array(*first, *count, name)?;
        // SAFETY: the C caller guarantees so many elements; there are some, so it is not NULL.
        Ok(if *count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(*first, *count) } })
    };
    /// An array that the function writes.
    OutArray<T>: (*mut T, usize) => &'a mut [MaybeUninit<T>], |(first, count), name| {
        check_array(first.cast_const(), *count, name)?;
        // SAFETY: the C caller guarantees so many writable elements; there are some, so it is not NULL.
        Ok(if *count == 0 { &mut [] } else { unsafe { std::slice::from_raw_parts_mut(first.cast(), *count) } })
    };
    /// A structure that the function reads.
    In<T>: (*const T) => &'a T, |(pointer,), name| {
        // SAFETY: it is a parameter of an exported function.
        unsafe { reference(*pointer, name) }
    };
    /// A value that the function writes.
    Out<T>: (*mut T) => &'a mut MaybeUninit<T>, |(pointer,), name| {
        // SAFETY: it is a parameter of an exported function.
        unsafe { place(*pointer, name) }
    };
    /// As [`Out`]; it may be NULL.
    OptionalOut<T>: (*mut T) => Option<&'a mut MaybeUninit<T>>, |(pointer,), name| {
        // SAFETY: it is a parameter of an exported function.
        Ok(if pointer.is_null() { None } else { Some(unsafe { place(*pointer, name)? }) })
    };
}

/// A string, as a parameter or a field.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Text(*const c_char);

impl Text {
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }

    pub fn string(&self, name: &str) -> Answer<&CStr> {
        // SAFETY: it came from C, whose caller guarantees that it is NULL or a string during the call.
        if self.is_null() { Err(code::null(name)) } else { Ok(unsafe { CStr::from_ptr(self.0) }) }
    }

    pub fn path(&self, name: &str) -> Answer<&Path> {
        Ok(Path::new(OsStr::from_bytes(self.string(name)?.to_bytes())))
    }
}

impl Parameter for Text {
    type C = Text;
    type Given = (Text,);
    type Value<'a> = &'a CStr;

    unsafe fn checked<'a>(given: &'a (Text,), name: &'static str) -> Answer<&'a CStr> {
        given.0.string(name)
    }
}

/// A string that may be NULL.
impl Parameter for Option<Text> {
    type C = Text;
    type Given = (Text,);
    type Value<'a> = Option<&'a CStr>;

    unsafe fn checked<'a>(given: &'a (Text,), name: &'static str) -> Answer<Option<&'a CStr>> {
        if given.0.is_null() { Ok(None) } else { given.0.string(name).map(Some) }
    }
}

/// A path that is not one of a channel.
pub struct AnyPath;

impl Parameter for AnyPath {
    type C = Text;
    type Given = (Text,);
    type Value<'a> = &'a Path;

    unsafe fn checked<'a>(given: &'a (Text,), name: &'static str) -> Answer<&'a Path> {
        given.0.path(name)
    }
}

/// A handle, as a parameter or a field, that the body enters itself.
#[repr(transparent)]
pub struct Raw<T>(*mut Handle<T>);

impl<T> Clone for Raw<T> {
    fn clone(&self) -> Raw<T> {
        *self
    }
}

impl<T> Copy for Raw<T> {}

impl<T> PartialEq for Raw<T> {
    fn eq(&self, other: &Raw<T>) -> bool {
        self.0 == other.0
    }
}

impl<T: Object> Raw<T> {
    pub const NULL: Raw<T> = Raw(std::ptr::null_mut());

    pub fn new(object: T) -> Raw<T> {
        Raw(Handle::boxed(object))
    }

    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    pub fn address(self) -> usize {
        self.0.addr()
    }

    pub fn enter<A>(self, act: impl FnOnce(&mut T) -> Answer<A>) -> Answer<A> {
        // SAFETY: it came from C, whose caller guarantees the handle and its use by one thread.
        unsafe { handle::enter(self.0, act) }
    }

    pub fn share<A>(self, act: impl FnOnce(&T) -> Answer<A>) -> Answer<A>
    where
        T: Sync,
    {
        // SAFETY: it came from C, whose caller guarantees the handle, and that no thread closes it meanwhile.
        unsafe { handle::share(self.0, act) }
    }

    /// See [`handle::share_part`].
    ///
    /// # Safety
    /// As there about `part`.
    pub unsafe fn share_part<P: Sync>(self, part: impl FnOnce(*const T) -> *const P, act: impl FnOnce(&P)) -> Answer {
        // SAFETY: it came from C, whose caller guarantees the handle; this function's caller guarantees `part`.
        unsafe { handle::share_part(self.0, part, act) }
    }

    pub fn take<A>(self, check: impl FnOnce(&mut T) -> Answer<A>) -> Answer<(T, A)> {
        // SAFETY: it came from C, whose caller guarantees the handle and its use by one thread.
        unsafe { handle::take(self.0, check) }
    }

    pub fn detach(self, check: impl FnOnce(&mut T) -> Answer) -> Answer<T> {
        // SAFETY: it came from C, whose caller guarantees the handle and its use by one thread.
        unsafe { handle::detach(self.0, check) }
    }

    /// Ends a [`Raw::detach`] of this handle.
    ///
    /// # Safety
    /// The handle is detached, and no other thread uses it except to be refused.
    pub unsafe fn reattach(self, object: T) {
        // SAFETY: the caller guarantees it.
        unsafe { handle::reattach(self.0, object) };
    }
}

impl<T: 'static> Parameter for Raw<T> {
    type C = Raw<T>;
    type Given = (Raw<T>,);
    type Value<'a> = Raw<T>;

    unsafe fn checked(given: &(Raw<T>,), _: &'static str) -> Answer<Raw<T>> {
        Ok(given.0)
    }
}

/// Where the function writes a handle that it creates.
pub struct New<T>(PhantomData<T>);

pub struct NewPlace<'a, T>(&'a mut MaybeUninit<Raw<T>>);

impl<T: Object> NewPlace<'_, T> {
    pub fn give(self, object: T) -> Answer {
        self.0.write(Raw::new(object));
        Ok(())
    }
}

impl<T: Object> Parameter for New<T> {
    type C = *mut Raw<T>;
    type Given = (*mut Raw<T>,);
    type Value<'a> = NewPlace<'a, T>;

    unsafe fn checked<'a>(given: &'a (*mut Raw<T>,), name: &'static str) -> Answer<NewPlace<'a, T>> {
        // SAFETY: it is a parameter of an exported function.
        Ok(NewPlace(unsafe { place(given.0, name)? }))
    }
}

/// A structure of the headers.
pub trait Structure {
    /// Its type in C.
    const NAME: &'static str;
    /// Name, offset and size of each field, for a test that compares them with `pelton.abi`.
    #[cfg(test)]
    const FIELDS: &'static [(&'static str, usize, usize)];
}

/// Defines structures of the headers: the name in C, the name here, and the fields.
macro_rules! structures {
    ($($(#[$attribute:meta])* $c_name:literal $name:ident {
        $($visibility:vis $field:ident: $type:ty,)*
    })*) => {
        $(
            #[doc = concat!("`", $c_name, "`.")]
            $(#[$attribute])*
            #[repr(C)]
            pub struct $name {
                $($visibility $field: $type,)*
            }

            impl $crate::c::Structure for $name {
                const NAME: &'static str = $c_name;
                #[cfg(test)]
                const FIELDS: &'static [(&'static str, usize, usize)] =
                    &[$((stringify!($field), std::mem::offset_of!($name, $field), size_of::<$type>()),)*];
            }
        )*
    };
}
pub(crate) use structures;

/// A structure that begins with its size, `struct_bytes`: an older or newer program may have fewer fields or more.
/// All zeros are one, and NULL is that.
///
/// # Safety
/// All zeros are a value of it, it begins with its size in an `u32`, and it has no padding.
pub unsafe trait Sized32: Structure + Copy + 'static {}

/// As [`structures`], for those that begin with `struct_bytes`, which is not listed.
macro_rules! sized_structures {
    ($($(#[$attribute:meta])* $c_name:literal $name:ident { $($field:ident: $type:ty,)* })*) => {
        $(
            $crate::c::structures! {
                $(#[$attribute])*
                #[derive(Clone, Copy)]
                $c_name $name {
                    struct_bytes: u32,
                    $($field: $type,)*
                }
            }

            // SAFETY: it has only numbers and pointers, which may be 0, and the assertion below finds padding.
            unsafe impl $crate::c::Sized32 for $name {}

            const _: () = assert!(4 $(+ size_of::<$type>())* == size_of::<$name>(), "it has no padding");
        )*
    };
}
pub(crate) use sized_structures;

/// More than any structure will have.
const STRUCT_BYTES_MAX: u32 = 4096;

/// Options, copied. The fields that the caller does not have are 0; those that the library does not have must be 0.
pub struct Options<T>(PhantomData<T>);

impl<T: Sized32> Parameter for Options<T> {
    type C = *const T;
    type Given = (*const T,);
    type Value<'a> = T;

    unsafe fn checked(given: &(*const T,), _: &'static str) -> Answer<T> {
        let mut copy = MaybeUninit::<T>::zeroed();
        if given.0.is_null() {
            // SAFETY: all zeros are one.
            return Ok(unsafe { copy.assume_init() });
        }
        // SAFETY: the C caller guarantees that it points to a structure, which begins with its size.
        let bytes = unsafe { given.0.cast::<u32>().read() };
        if bytes == 0 || bytes % 8 != 0 || bytes > STRUCT_BYTES_MAX {
            let wanted = format!("sizeof({}): begin with its _INIT macro", T::NAME);
            return Err(code::wrong("struct_bytes", bytes, &wanted));
        }
        // SAFETY: the C caller guarantees that the structure has that size.
        let all = unsafe { std::slice::from_raw_parts(given.0.cast::<u8>(), bytes as usize) };
        if all.iter().skip(size_of::<T>()).any(|byte| *byte != 0) {
            let detail =
                "an option is set that this libpelton does not know: install one as new as the program's pelton.h";
            return Err(code::tell(code::OPTION, detail));
        }
        // SAFETY: no more bytes than both have; without padding each of them is initialised, and zeros are a value.
        unsafe {
            let bytes = all.len().min(size_of::<T>());
            std::ptr::copy_nonoverlapping(all.as_ptr(), copy.as_mut_ptr().cast(), bytes);
            Ok(copy.assume_init())
        }
    }
}

/// Figures that the function writes, as many as the caller's structure has.
pub struct Info<T>(PhantomData<T>);

pub struct InfoPlace<'a, T>(&'a mut [u8], PhantomData<T>);

impl<T: Sized32> InfoPlace<'_, T> {
    /// Writes the figures, except the size. What the library does not have is 0.
    pub fn write(self, info: T) -> Answer {
        let known = self.0.len().min(size_of::<T>());
        // SAFETY: a structure without padding is initialised bytes.
        let bytes = unsafe { std::slice::from_raw_parts((&raw const info).cast::<u8>(), size_of::<T>()) };
        self.0[4..known].copy_from_slice(&bytes[4..known]);
        self.0[known..].fill(0);
        Ok(())
    }
}

impl<T: Sized32> Parameter for Info<T> {
    type C = *mut T;
    type Given = (*mut T,);
    type Value<'a> = InfoPlace<'a, T>;

    unsafe fn checked<'a>(given: &'a (*mut T,), name: &'static str) -> Answer<InfoPlace<'a, T>> {
        // SAFETY: it is a parameter of an exported function, and the structure begins with its size.
        let bytes = *unsafe { reference(given.0.cast_const().cast::<u32>(), name)? };
        // Without the caller's size it could be anything.
        if bytes == 0 || bytes % 8 != 0 || bytes > STRUCT_BYTES_MAX {
            return Err(code::wrong("struct_bytes", bytes, &format!("sizeof({})", T::NAME)));
        }
        // SAFETY: the C caller guarantees that the structure has that size, and is writable.
        Ok(InfoPlace(unsafe { std::slice::from_raw_parts_mut(given.0.cast(), bytes as usize) }, PhantomData))
    }
}
