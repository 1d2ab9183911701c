//! The functions that JavaScript calls for each message. napi-rs's own wrappers take some 600 ns a call: they check a
//! tag, and register each borrow. Here Node gives a function its endpoint, so that no object is unwrapped.

use crate::error::named;
use napi::bindgen_prelude::*;
use napi::sys;
use pelton::Traceparent;
use std::ffi::{CStr, c_void};
use std::ptr;

/// The arguments of a call. Those that JavaScript leaves out are undefined.
pub struct Arguments<const N: usize> {
    env: sys::napi_env,
    values: [sys::napi_value; N],
    count: usize,
}

impl<const N: usize> Arguments<N> {
    fn array(&self, value: sys::napi_value, wanted: sys::napi_typedarray_type) -> Result<(*mut c_void, usize)> {
        let (mut kind, mut length, mut data) = (-1, 0, ptr::null_mut());
        // SAFETY: the value is of this environment, and Node calls on its thread.
        let status = unsafe {
            let (buffer, offset) = (ptr::null_mut(), ptr::null_mut());
            sys::napi_get_typedarray_info(self.env, value, &mut kind, &mut length, &mut data, buffer, offset)
        };
        match (status, kind == wanted) {
            (sys::Status::napi_ok, true) if length == 0 => Ok((ptr::dangling_mut::<u64>().cast(), 0)),
            (sys::Status::napi_ok, true) => Ok((data, length)),
            _ => Err(named("internal", "an argument is no typed array of the wanted kind: report this bug")),
        }
    }

    /// The bytes of a Uint8Array.
    #[inline]
    pub fn bytes(&self, index: usize) -> Result<&[u8]> {
        let (data, length) = self.array(self.values[index], sys::TypedarrayType::uint8_array)?;
        // SAFETY: Node has these bytes; no JavaScript of this thread runs until the function returns.
        Ok(unsafe { std::slice::from_raw_parts(data.cast(), length) })
    }

    /// The bytes of a Uint8Array, to be written.
    ///
    /// # Safety
    /// No other argument has these bytes.
    #[inline]
    #[allow(clippy::mut_from_ref)] // JavaScript's memory, not that of the arguments
    pub unsafe fn space(&self, index: usize) -> Result<&mut [u8]> {
        let (data, length) = self.array(self.values[index], sys::TypedarrayType::uint8_array)?;
        // SAFETY: as in `bytes`; the caller guarantees that nothing else has them.
        Ok(unsafe { std::slice::from_raw_parts_mut(data.cast(), length) })
    }

    /// The numbers of a Uint32Array, to be written.
    ///
    /// # Safety
    /// No other argument has these numbers.
    #[inline]
    #[allow(clippy::mut_from_ref)] // as `space`
    pub unsafe fn numbers(&self, index: usize) -> Result<&mut [u32]> {
        let (data, length) = self.array(self.values[index], sys::TypedarrayType::uint32_array)?;
        // SAFETY: as in `space`; JavaScript aligns the elements.
        Ok(unsafe { std::slice::from_raw_parts_mut(data.cast(), length) })
    }

    /// The numbers of a Float64Array, to be written.
    ///
    /// # Safety
    /// No other argument has these numbers.
    #[inline]
    #[allow(clippy::mut_from_ref)] // as `space`
    pub unsafe fn doubles(&self, index: usize) -> Result<&mut [f64]> {
        let (data, length) = self.array(self.values[index], sys::TypedarrayType::float64_array)?;
        // SAFETY: as in `numbers`.
        Ok(unsafe { std::slice::from_raw_parts_mut(data.cast(), length) })
    }

    /// How many arguments there are, of those that it takes.
    #[inline]
    pub fn count(&self) -> usize {
        self.count
    }

    /// A number; 0 for what is none.
    #[inline]
    pub fn number(&self, index: usize) -> u32 {
        let mut number = 0;
        // SAFETY: as in `array`.
        unsafe { sys::napi_get_value_uint32(self.env, self.values[index], &mut number) };
        number
    }

    /// A number with a fraction; `None` for what is none.
    #[inline]
    pub fn double(&self, index: usize) -> Option<f64> {
        let mut number = 0.0;
        // SAFETY: as in `array`.
        let status = unsafe { sys::napi_get_value_double(self.env, self.values[index], &mut number) };
        (status == sys::Status::napi_ok).then_some(number)
    }

    /// Whether it is true.
    #[inline]
    pub fn is_true(&self, index: usize) -> bool {
        let mut is_true = false;
        // SAFETY: as in `array`.
        unsafe { sys::napi_get_value_bool(self.env, self.values[index], &mut is_true) };
        is_true
    }

    /// A string that is a valid header `traceparent`; `None` for anything else.
    pub fn traceparent(&self, index: usize) -> Option<Traceparent> {
        // A valid one has 55 bytes; of a later version more may follow, which is of no use here.
        let (mut text, mut length) = ([0_u8; 256], 0);
        // SAFETY: as in `array`; so many bytes can be written.
        let status = unsafe {
            let target = text.as_mut_ptr().cast();
            sys::napi_get_value_string_utf8(self.env, self.values[index], target, text.len(), &mut length)
        };
        if status == sys::Status::napi_ok { Traceparent::parse(&text[..length]) } else { None }
    }

    /// Puts an error at a place of an array.
    pub fn set_error(&self, index: usize, place: u32, error: Error) -> Result<()> {
        // SAFETY: this is the environment's thread, and the values are of it.
        let status = unsafe {
            let error = JsError::from(error).into_value(self.env);
            sys::napi_set_element(self.env, self.values[index], place, error)
        };
        match status {
            sys::Status::napi_ok => Ok(()),
            _ => Err(named("internal", "an argument is no array: report this bug")),
        }
    }
}

/// Copies bytes to `space` from `used` on. Returns where the next ones begin, at a multiple of 8; `None` if they do not
/// fit.
#[inline]
pub fn copy(bytes: &[u8], space: &mut [u8], used: usize) -> Option<usize> {
    let target = space.get_mut(used..)?.get_mut(..bytes.len())?;
    // SAFETY: of the same length, and an exclusive slice overlaps no other.
    unsafe { pelton::raw::copy(bytes.as_ptr(), target.as_mut_ptr(), bytes.len()) };
    Some((used + bytes.len()).next_multiple_of(8))
}

/// What a function returns.
pub trait Returned {
    /// As JavaScript's value; null if Node can make none.
    fn value(self, env: sys::napi_env) -> sys::napi_value;
}

impl Returned for bool {
    #[inline]
    fn value(self, env: sys::napi_env) -> sys::napi_value {
        let mut value = ptr::null_mut();
        // SAFETY: this is the environment's thread.
        unsafe { sys::napi_get_boolean(env, self, &mut value) };
        value
    }
}

impl Returned for i32 {
    #[inline]
    fn value(self, env: sys::napi_env) -> sys::napi_value {
        let mut value = ptr::null_mut();
        // SAFETY: this is the environment's thread.
        unsafe { sys::napi_create_int32(env, self, &mut value) };
        value
    }
}

impl Returned for i64 {
    #[inline]
    fn value(self, env: sys::napi_env) -> sys::napi_value {
        let mut value = ptr::null_mut();
        // SAFETY: this is the environment's thread.
        unsafe { sys::napi_create_int64(env, self, &mut value) };
        value
    }
}

/// The body of a function that [`function`] has made.
///
/// # Safety
/// Node calls, with `env` and `info` of the call, and the function's data is a box of a `T`.
#[inline]
pub unsafe fn call<T, R: Returned, const N: usize>(
    env: sys::napi_env,
    info: sys::napi_callback_info,
    body: impl FnOnce(&T, &Arguments<N>) -> Result<R>,
) -> sys::napi_value {
    let mut values = [ptr::null_mut(); N];
    let (mut count, mut data) = (N, ptr::null_mut());
    // SAFETY: the array has `count` places; Node fills those without an argument with undefined. The function lives
    // during its call, and with it the box of its data.
    let owned = unsafe {
        sys::napi_get_cb_info(env, info, &mut count, values.as_mut_ptr(), ptr::null_mut(), &mut data);
        &*data.cast::<T>()
    };
    match body(owned, &Arguments { env, values, count: count.min(N) }) {
        Ok(returned) => returned.value(env),
        Err(error) => {
            // SAFETY: this is the environment's thread, and the call returns at once.
            unsafe { JsError::from(error).throw_into(env) };
            ptr::null_mut()
        }
    }
}

/// Makes a function with an endpoint's handle, or whatever it works on, of which it keeps a clone.
///
/// # Safety
/// `callback` is a [`call`] of the same `T`.
pub unsafe fn function<'env, T: Clone + 'static>(
    env: &'env Env,
    name: &CStr,
    owned: &T,
    callback: sys::napi_callback,
) -> Result<Unknown<'env>> {
    unsafe extern "C" fn collected<T>(_env: sys::napi_env, data: *mut c_void, _hint: *mut c_void) {
        // SAFETY: the function is gone, and had the box for itself.
        drop(unsafe { Box::from_raw(data.cast::<T>()) });
    }
    let data = Box::into_raw(Box::new(owned.clone())).cast::<c_void>();
    let (mut value, length) = (ptr::null_mut(), name.count_bytes() as isize);
    // SAFETY: this is the environment's thread. The function's finalizer drops the box.
    unsafe {
        let made = sys::napi_create_function(env.raw(), name.as_ptr(), length, callback, data, &mut value);
        let finalizer = Some(collected::<T> as unsafe extern "C" fn(_, _, _));
        if made != sys::Status::napi_ok
            || sys::napi_add_finalizer(env.raw(), value, data, finalizer, ptr::null_mut(), ptr::null_mut())
                != sys::Status::napi_ok
        {
            drop(Box::from_raw(data.cast::<T>()));
            return Err(named("internal", "Node makes no function: report this bug"));
        }
        Ok(Unknown::from_raw_unchecked(env.raw(), value))
    }
}
