//! Arguments of exported functions: checks of pointers, structures that grow, and conversions of numbers and texts.

use std::ffi::{CStr, c_char};
use std::marker::PhantomData;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::time::Duration;
use std::{ptr, slice};

use wholemem_os::Deadline;

use crate::failure::{Failure, Result};
use crate::status::{WM_ERROR_INVALID_ARGUMENT, WM_ERROR_NULL_POINTER};

/// A timeout that never expires.
pub const WM_TIMEOUT_INFINITE: u64 = u64::MAX;

/// Creates the error for an argument with an invalid value.
#[cold]
pub(crate) fn invalid(message: impl Into<String>) -> Failure {
    Failure::new(WM_ERROR_INVALID_ARGUMENT, message)
}

/// Checks that a pointer is not null and is aligned to its type.
#[inline]
pub(crate) fn checked<T>(pointer: *mut T, argument: &str) -> Result<NonNull<T>> {
    match NonNull::new(pointer) {
        Some(checked) if pointer.is_aligned() => Ok(checked),
        _ => Err(invalid_pointer(pointer.is_null(), align_of::<T>(), argument)),
    }
}

#[cold]
fn invalid_pointer(is_null: bool, align: usize, argument: &str) -> Failure {
    let problem = if is_null { "null".to_owned() } else { format!("not aligned to {align} bytes") };
    Failure::new(WM_ERROR_NULL_POINTER, format!("the pointer `{argument}` is {problem}"))
}

/// A checked pointer through which a call returns a value. Values are written only if the call succeeds.
#[derive(Debug)]
pub(crate) struct Output<'a, T> {
    pointer: NonNull<T>,
    /// The number of bytes that may be written.
    len: usize,
    call: PhantomData<&'a mut T>,
}

impl<T> Output<'_, T> {
    /// Checks the pointer to an output.
    ///
    /// # Safety
    /// `pointer` is null, or valid for a write while the result exists.
    #[inline]
    pub(crate) unsafe fn new(pointer: *mut T, argument: &str) -> Result<Self> {
        Ok(Self { pointer: checked(pointer, argument)?, len: size_of::<T>(), call: PhantomData })
    }

    /// Writes the output.
    #[inline]
    pub(crate) fn write(self, value: T) {
        // SAFETY: the caller of `new` guarantees that the pointer is valid for a write; `new` has checked its alignment.
        unsafe { self.pointer.write(value) };
    }
}

/// A structure of the header that grows in later versions. Its first field is `struct_size`, which the caller sets to the size that it
/// was compiled with. Fields that a caller does not know are zero, which is their default.
///
/// # Safety
/// Every bit pattern is a valid value of the type, which is `repr(C)` and begins with a field of type `usize`.
pub(crate) unsafe trait Plain: Copy {
    /// The size of the first version of the structure.
    const FIRST_LEN: usize;
}

impl<T: Plain> Output<'_, T> {
    /// Checks the pointer to a structure that grows, through which a call returns values.
    ///
    /// # Safety
    /// `pointer` is null, or points to as many writable bytes as its first field says, while the result exists.
    pub(crate) unsafe fn versioned(pointer: *mut T, argument: &str) -> Result<Self> {
        const { assert!(T::FIRST_LEN > size_of::<usize>() && T::FIRST_LEN <= size_of::<T>()) };
        let pointer = checked(pointer, argument)?;
        // SAFETY: the structure begins with its size, which the caller has set.
        let len = unsafe { pointer.cast::<usize>().read() };
        check_len::<T>(len, argument)?;
        Ok(Self { pointer, len: len.min(size_of::<T>()), call: PhantomData })
    }

    /// Writes the fields that the caller knows, except the size.
    pub(crate) fn write_versioned(self, value: T) {
        let (from, to) = (ptr::from_ref(&value).cast::<u8>(), self.pointer.cast::<u8>().as_ptr());
        let (skipped, len) = (size_of::<usize>(), self.len);
        // SAFETY: `len`, and so the size of `T`, is at least the size of the first version, which is longer than the first field.
        let from = unsafe { from.add(skipped) };
        // SAFETY: `len` bytes of the structure of the caller are valid, and `skipped` is less.
        let to = unsafe { to.add(skipped) };
        // SAFETY: `from` has `size_of::<T>()` bytes, at least `len`; the caller of `versioned` guarantees that `len` bytes of `to` are
        // writable. They do not overlap, because `value` is a local variable.
        unsafe { ptr::copy_nonoverlapping(from, to, len - skipped) };
    }
}

#[inline]
fn check_len<T: Plain>(len: usize, argument: &str) -> Result {
    if len >= T::FIRST_LEN {
        return Ok(());
    }
    let first = T::FIRST_LEN;
    Err(invalid(format!(
        "`{argument}->struct_size` is {len}, less than the {first} bytes of the first version"
    ))
    .hint("zero the structure, and set `struct_size` to its `sizeof`"))
}

/// Copies options from a structure that grows; `None` if the pointer is null. A caller that was compiled with a later header may pass
/// more fields than this library knows, if they are zero.
///
/// # Safety
/// `pointer` is null, or points to as many readable bytes as its first field says.
#[inline]
pub(crate) unsafe fn options<T: Plain>(pointer: *const T, argument: &str) -> Result<Option<T>> {
    const { assert!(T::FIRST_LEN > size_of::<usize>() && T::FIRST_LEN <= size_of::<T>()) };
    if pointer.is_null() {
        return Ok(None);
    }
    let pointer = checked(pointer.cast_mut(), argument)?;
    // SAFETY: the structure begins with its size, which the caller has set.
    let len = unsafe { pointer.cast::<usize>().read() };
    if len == size_of::<T>() {
        // SAFETY: the caller guarantees that as many bytes are readable; any bytes are a value of a `Plain` type.
        return Ok(Some(unsafe { pointer.read() }));
    }
    // SAFETY: the caller guarantees that as many bytes are readable as the first field says, which is `len`.
    unsafe { options_of_other_version(pointer, len, argument) }.map(Some)
}

/// Copies options from a structure of another version, which has `len` bytes.
///
/// # Safety
/// `pointer` points to `len` readable bytes.
#[cold]
unsafe fn options_of_other_version<T: Plain>(pointer: NonNull<T>, len: usize, argument: &str) -> Result<T> {
    check_len::<T>(len, argument)?;
    // SAFETY: the caller guarantees the bytes.
    let bytes = unsafe { slice::from_raw_parts(pointer.cast::<u8>().as_ptr(), len) };
    let known = len.min(size_of::<T>());
    if bytes[known..].iter().any(|byte| *byte != 0) {
        return Err(invalid(format!(
            "`{argument}` has options that this version of the library does not have"
        ))
        .hint("use the library of the version whose header the program was compiled with"));
    }
    // SAFETY: zeros are a value of a `Plain` type.
    let mut value: T = unsafe { std::mem::zeroed() };
    // SAFETY: `value` has at least `known` bytes, and any bytes are a value of a `Plain` type.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), ptr::from_mut(&mut value).cast(), known) };
    Ok(value)
}

/// Returns the elements at an address as a slice. The pointer may be null if there are none.
///
/// # Safety
/// `pointer` is null, or points to `count` elements that are readable and not written while the result exists.
pub(crate) unsafe fn slice<'a, T>(pointer: *const T, count: usize, argument: &str) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    let pointer = checked(pointer.cast_mut(), argument)?;
    check_count::<T>(count, argument)?;
    // SAFETY: the caller guarantees the elements; the pointer and the length in bytes were checked.
    Ok(unsafe { slice::from_raw_parts(pointer.as_ptr(), count) })
}

/// Returns the elements at an address as a slice that can be written. The pointer may be null if there are none.
///
/// # Safety
/// `pointer` is null, or points to `count` initialised elements that nothing else reads or writes while the result exists.
pub(crate) unsafe fn slice_mut<'a, T>(pointer: *mut T, count: usize, argument: &str) -> Result<&'a mut [T]> {
    if count == 0 {
        return Ok(&mut []);
    }
    let pointer = checked(pointer, argument)?;
    check_count::<T>(count, argument)?;
    // SAFETY: the caller guarantees the elements; the pointer and the length in bytes were checked.
    Ok(unsafe { slice::from_raw_parts_mut(pointer.as_ptr(), count) })
}

fn check_count<T>(count: usize, argument: &str) -> Result {
    match count.checked_mul(size_of::<T>()) {
        Some(len) if isize::try_from(len).is_ok() => Ok(()),
        _ => {
            Err(invalid(format!("`{argument}` cannot have {count} elements: they exceed the address space")))
        }
    }
}

/// Returns a C string as text.
///
/// # Safety
/// `pointer` is null, or points to a string that ends with a NUL and is not written while the result exists.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, argument: &str) -> Result<&'a str> {
    let pointer = checked(pointer.cast_mut(), argument)?;
    // SAFETY: the caller guarantees that the string ends with a NUL and is not written.
    let text = unsafe { CStr::from_ptr(pointer.as_ptr()) };
    text.to_str().map_err(|_| invalid(format!("`{argument}` is not UTF-8")))
}

/// Returns a C string as a path, which may have any bytes.
///
/// # Safety
/// As [`text`].
pub(crate) unsafe fn path(pointer: *const c_char, argument: &str) -> Result<PathBuf> {
    use std::os::unix::ffi::OsStrExt;

    let pointer = checked(pointer.cast_mut(), argument)?;
    // SAFETY: the caller guarantees that the string ends with a NUL and is not written.
    let bytes = unsafe { CStr::from_ptr(pointer.as_ptr()) }.to_bytes();
    Ok(std::ffi::OsStr::from_bytes(bytes).into())
}

/// Copies bytes to a buffer of the caller, which must have space for all of them.
///
/// # Safety
/// `buffer` is null, or points to `capacity` writable bytes.
pub(crate) unsafe fn copy_out<T: Copy>(
    items: &[T],
    buffer: *mut T,
    capacity: usize,
    argument: &str,
) -> Result {
    if items.len() > capacity {
        let needed = items.len();
        return Err(invalid(format!(
            "`{argument}` has space for {capacity} elements, but {needed} are needed"
        )));
    }
    if items.is_empty() {
        return Ok(());
    }
    let buffer = checked(buffer, argument)?;
    // SAFETY: the caller guarantees that the buffer has space for `capacity` elements, which is enough; it cannot overlap `items`,
    // which belong to the library.
    unsafe { ptr::copy_nonoverlapping(items.as_ptr(), buffer.as_ptr(), items.len()) };
    Ok(())
}

/// Returns a flag of a structure: 0 or 1.
pub(crate) fn flag(value: u32, argument: &str) -> Result<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(invalid(format!("`{argument}` is {value}, but must be 0 or 1"))),
    }
}

/// The longest time for which ranks wait for each other: ten years. The protocols between ranks compute with timeouts, so they need a
/// number.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Returns the duration of a timeout of waits for other ranks.
pub(crate) fn duration(timeout_ns: u64) -> Duration {
    Duration::from_nanos(timeout_ns).min(LONGEST_WAIT)
}

/// Returns the deadline of a wait that begins now.
pub(crate) fn deadline(timeout_ns: u64) -> Deadline {
    if timeout_ns == WM_TIMEOUT_INFINITE {
        Deadline::NEVER
    } else {
        Deadline::after(Duration::from_nanos(timeout_ns))
    }
}

/// Copies a text to an array that ends with a NUL. A longer text is cut off, between characters.
pub(crate) fn copy_text(text: &str, to: &mut [c_char]) {
    let mut len = text.len().min(to.len().saturating_sub(1));
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    to.fill(0);
    for (to, byte) in to.iter_mut().zip(&text.as_bytes()[..len]) {
        *to = c_char::from_ne_bytes([*byte]);
    }
}

/// Copies a structure that grows, which the caller must pass.
///
/// # Safety
/// As [`options`].
#[inline]
pub(crate) unsafe fn required<T: Plain>(pointer: *const T, argument: &str) -> Result<T> {
    checked(pointer.cast_mut(), argument)?;
    // SAFETY: the caller guarantees what `options` requires.
    let passed = unsafe { options(pointer, argument) }?;
    passed.ok_or_else(|| unreachable!("the pointer is not null"))
}

/// Returns a length or an offset as a size of this machine.
pub(crate) fn size(value: u64, argument: &str) -> Result<usize> {
    usize::try_from(value).map_err(|_| invalid(format!("`{argument}` exceeds the address space")))
}

/// Returns an address of memory that is mapped in this process as a pointer for C.
pub(crate) fn pointer(address: u64) -> *mut std::ffi::c_void {
    ptr::with_exposed_provenance_mut(wholemem_os::width::to_usize(address))
}
