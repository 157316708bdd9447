//! The error of the last call of each thread.

use std::cell::{Cell, RefCell};
use std::ffi::{CString, c_char};
use std::ptr;

use wholemem_comm::Rank;

use crate::argument::{Output, Plain};
use crate::failure::{Failure, FailureDetails};
use crate::status::{WM_OK, wm_status_t};

/// The value of `wm_error_info_t.rank` if no rank caused the error.
pub const WM_NO_RANK: u32 = u32::MAX;
/// The value of `wm_error_info_t.position` if no index caused the error.
pub const WM_NO_POSITION: u64 = u64::MAX;

/// Everything that is known about the error of the last call of a thread.
///
/// The texts and the array belong to the library, and are valid until the next call of the thread.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct wm_error_info_t {
    /// The size of this structure in bytes, which the caller sets.
    pub struct_size: usize,
    /// The status that the last call returned; `WM_OK` if it succeeded.
    pub status: wm_status_t,
    /// The rank that caused the error, or `WM_NO_RANK`.
    pub rank: u32,
    /// The message, without the hint. Never null.
    pub message: *const c_char,
    /// What the caller can do about the error; null if there is no hint.
    pub hint: *const c_char,
    /// The ranks that did not take part in a call before its timeout, if some are known.
    pub missing_ranks: *const u32,
    /// The number of `missing_ranks`.
    pub missing_count: usize,
    /// The smallest position of an index that names no row, or `WM_NO_POSITION`.
    pub position: u64,
}

// SAFETY: all fields are integers and raw pointers, and every bit pattern of those is valid.
unsafe impl Plain for wm_error_info_t {
    const FIRST_LEN: usize = 56;
}

/// The error of the last call of a thread, as C strings.
#[derive(Debug, Default)]
struct LastError {
    status: wm_status_t,
    /// The message, and the hint on a line of its own.
    whole: CString,
    message: CString,
    hint: Option<CString>,
    rank: Option<Rank>,
    missing: Vec<u32>,
    position: Option<u64>,
}

thread_local! {
    /// True if the last call of this thread failed. It is separate, so that a call that succeeds after another one touches only this.
    static HAS_FAILED: Cell<bool> = const { Cell::new(false) };
    static LAST: RefCell<LastError> = RefCell::default();
}

/// Records that a call succeeded.
#[inline]
pub(crate) fn clear() {
    if HAS_FAILED.get() {
        forget();
    }
}

#[cold]
fn forget() {
    HAS_FAILED.set(false);
    // If the thread is ending, there is no record of an error any more.
    let _ = LAST.try_with(|last| last.take());
}

/// Records the error of a call, and returns its status.
#[cold]
pub(crate) fn set(failure: Failure) -> wm_status_t {
    let FailureDetails { status, message, hint, rank, missing, position } = *failure.0;
    let whole = match &hint {
        Some(hint) => format!("{message}\nhint: {hint}"),
        None => message.clone(),
    };
    let error = LastError {
        status,
        whole: c_string(whole),
        message: c_string(message),
        hint: hint.map(|hint| c_string(hint.into_owned())),
        rank,
        missing: missing.into_iter().map(|rank| rank.0).collect(),
        position,
    };
    HAS_FAILED.set(true);
    // If the thread is ending, the error cannot be recorded; the status is returned nevertheless.
    let _ = LAST.try_with(|last| last.replace(error));
    status
}

/// Returns the error of a function of the program that this thread has called, and that returned `status`: the last error, if the
/// function failed because of a call of the library with this status.
pub(crate) fn take_with(status: wm_status_t) -> Failure {
    let last = LAST.try_with(|last| last.take()).unwrap_or_default();
    HAS_FAILED.set(false);
    if last.status != status {
        return Failure::new(status, "a function of the program returned an error");
    }
    let text = |text: CString| text.to_string_lossy().into_owned();
    let mut failure = Failure::new(status, text(last.message));
    failure.0.hint = last.hint.map(|hint| text(hint).into());
    failure.0.rank = last.rank;
    failure.0.missing = last.missing.into_iter().map(Rank).collect();
    failure.0.position = last.position;
    failure
}

/// Returns a text as a C string. A NUL in it, such as one in a name that a caller passed, becomes a space.
fn c_string(text: String) -> CString {
    CString::new(text).unwrap_or_else(|error| {
        let bytes = error.into_vec().into_iter().map(|byte| if byte == 0 { b' ' } else { byte });
        CString::new(bytes.collect::<Vec<_>>()).unwrap_or_default()
    })
}

/// Returns the message of the error of this thread's last call, followed by its hint on a line of its own, if it has one. The text is
/// empty if the last call succeeded.
///
/// The text belongs to the library, and is valid until the next call of this thread. Functions that return no status, such as this one,
/// change nothing. Each thread has its own last error.
#[unsafe(no_mangle)]
pub extern "C" fn wm_last_error() -> *const c_char {
    if !HAS_FAILED.get() {
        return c"".as_ptr();
    }
    LAST.try_with(|last| last.borrow().whole.as_ptr()).unwrap_or(c"".as_ptr())
}

/// Writes what is known about the error of this thread's last call to `info`, whose `struct_size` the caller has set. The call does not
/// change the last error.
///
/// Returns `WM_OK`; `WM_ERROR_NULL_POINTER` or `WM_ERROR_INVALID_ARGUMENT` for an invalid `info`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_last_error_info(info: *mut wm_error_info_t) -> wm_status_t {
    // SAFETY: `info` is null or points to a structure with the size in its first field, as the header requires.
    let output = match unsafe { Output::versioned(info, "info") } {
        Ok(output) => output,
        Err(failure) => return failure.0.status,
    };
    let written = LAST.try_with(|last| {
        let last = last.borrow();
        output.write_versioned(wm_error_info_t {
            struct_size: size_of::<wm_error_info_t>(),
            status: last.status,
            rank: last.rank.map_or(WM_NO_RANK, |rank| rank.0),
            message: last.message.as_ptr(),
            hint: last.hint.as_ref().map_or(ptr::null(), |hint| hint.as_ptr()),
            missing_ranks: if last.missing.is_empty() { ptr::null() } else { last.missing.as_ptr() },
            missing_count: last.missing.len(),
            position: last.position.unwrap_or(WM_NO_POSITION),
        });
    });
    // Without thread-local values the thread is ending, and its last error is not known any more.
    written.map_or(crate::status::WM_ERROR_INVALID_ARGUMENT, |()| WM_OK)
}
