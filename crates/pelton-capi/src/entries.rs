//! The macro that defines the exported functions.

/// Defines exported functions. Each one checks its handle, and enters it with `&mut Object`, or shares it with
/// `&Object`; checks its other parameters for NULL; catches panics; and returns the body's
/// [`Answer`](crate::code::Answer) as a number.
///
/// `data[size]: Bytes` are two parameters in C, and one slice in the body. With `fast { .. }`, which has the parameters
/// as C passed them, the body runs only if that is `None`. With `short { .. }` before it, that runs first: on its usual
/// path it calls no function, so the exported one need not save registers.
macro_rules! entries {
    ($(fn $name:ident($($parameters:tt)*) $(short $short:block)? $(fast $fast:block)? $body:block)*) => {
        $(crate::entries::entries!(@one $name [$($short)?] [$($fast)?] $body $($parameters)*);)*
    };
    (@one $name:ident [] [] $body:block $handle:ident: &mut $object:ty
        $(, $parameter:ident $([$size:ident])?: $type:ty)* $(,)?) => {
        /// See `pelton.h`.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            $handle: *mut crate::handle::Handle<$object>,
            $($parameter: <$type as crate::c::Parameter>::C, $($size: usize,)?)*
        ) -> std::ffi::c_int {
            crate::entries::entries!(@run enter $handle: &mut $object, $($parameter $([$size])?: $type,)* => $body)
        }
    };
    (@one $name:ident [] [$fast:block] $body:block $handle:ident: &mut $object:ty
        $(, $parameter:ident $([$size:ident])?: $type:ty)* $(,)?) => {
        /// See `pelton.h`.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            $handle: *mut crate::handle::Handle<$object>,
            $($parameter: <$type as crate::c::Parameter>::C, $($size: usize,)?)*
        ) -> std::ffi::c_int {
            crate::entries::entries!(@slow slow $handle: &mut $object, $($parameter $([$size])?: $type,)* => $body);
            // SAFETY: the C caller guarantees the handle, its use by one thread, and the other parameters.
            unsafe { $fast.unwrap_or_else(|| slow($handle, $($parameter, $($size,)?)*)) }
        }
    };
    (@one $name:ident [$short:block] [$fast:block] $body:block $handle:ident: &mut $object:ty
        $(, $parameter:ident $([$size:ident])?: $type:ty)* $(,)?) => {
        /// See `pelton.h`.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            $handle: *mut crate::handle::Handle<$object>,
            $($parameter: <$type as crate::c::Parameter>::C, $($size: usize,)?)*
        ) -> std::ffi::c_int {
            #[inline(never)]
            unsafe extern "C" fn longer(
                $handle: *mut crate::handle::Handle<$object>,
                $($parameter: <$type as crate::c::Parameter>::C, $($size: usize,)?)*
            ) -> std::ffi::c_int {
                crate::entries::entries!(@slow slow $handle: &mut $object, $($parameter $([$size])?: $type,)* => $body);
                // SAFETY: as below.
                unsafe { $fast.unwrap_or_else(|| slow($handle, $($parameter, $($size,)?)*)) }
            }
            // SAFETY: the C caller guarantees the handle, its use by one thread, and the other parameters.
            unsafe { $short.unwrap_or_else(|| longer($handle, $($parameter, $($size,)?)*)) }
        }
    };
    (@slow $slow:ident $handle:ident: &mut $object:ty, $($parameter:ident $([$size:ident])?: $type:ty,)* => $body:block) => {
        #[cold]
        #[inline(never)]
        unsafe extern "C" fn $slow(
            $handle: *mut crate::handle::Handle<$object>,
            $($parameter: <$type as crate::c::Parameter>::C, $($size: usize,)?)*
        ) -> std::ffi::c_int {
            crate::entries::entries!(@run enter $handle: &mut $object, $($parameter $([$size])?: $type,)* => $body)
        }
    };
    (@one $name:ident [] [] $body:block $handle:ident: & $object:ty
        $(, $parameter:ident $([$size:ident])?: $type:ty)* $(,)?) => {
        /// See `pelton.h`.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            $handle: *const crate::handle::Handle<$object>,
            $($parameter: <$type as crate::c::Parameter>::C, $($size: usize,)?)*
        ) -> std::ffi::c_int {
            crate::entries::entries!(@run share $handle: &$object, $($parameter $([$size])?: $type,)* => $body)
        }
    };
    (@one $name:ident [] [] $body:block $($parameter:ident $([$size:ident])?: $type:ty),* $(,)?) => {
        /// See `pelton.h`.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            $($parameter: <$type as crate::c::Parameter>::C, $($size: usize,)?)*
        ) -> std::ffi::c_int {
            crate::code::number(crate::handle::catch(|| {
                crate::entries::entries!(@check $($parameter $([$size])?: $type,)*);
                $body
            }))
        }
    };
    (@run $enter:ident $handle:ident: $reference:ty, $($parameter:ident $([$size:ident])?: $type:ty,)* => $body:block) => {{
        let body = |$handle: $reference| {
            crate::entries::entries!(@check $($parameter $([$size])?: $type,)*);
            $body
        };
        // SAFETY: the C caller guarantees the handle; that one thread uses it, or, with `share`, that none closes it.
        crate::code::number(unsafe { crate::handle::$enter($handle, body) })
    }};
    (@check $($parameter:ident $([$size:ident])?: $type:ty,)*) => {
        $(
            let given = ($parameter, $($size,)?);
            // SAFETY: it is a parameter of an exported function, whose caller guarantees what `pelton.h` states.
            let $parameter = unsafe { <$type as crate::c::Parameter>::checked(&given, stringify!($parameter)) }?;
        )*
    };
}
pub(crate) use entries;
