//! `call`: what every exported function runs in.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::failure::{Failure, Result};
use crate::last_error;
use crate::status::{WM_OK, wm_status_t};

/// Runs the code of an exported function, records its error as the last error of the thread, and returns its status.
///
/// A panic becomes the status `WM_ERROR_PANIC`: it must not unwind into C. Objects that the code was changing may be unusable
/// afterwards, but their locks detect that, as in any Rust program that catches a panic.
#[inline]
pub(crate) fn call(code: impl FnOnce() -> Result) -> wm_status_t {
    match catch_unwind(AssertUnwindSafe(code)) {
        Ok(Ok(())) => {
            last_error::clear();
            WM_OK
        }
        Ok(Err(failure)) => last_error::set(failure),
        Err(payload) => last_error::set(Failure::of_panic(payload)),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;
    use crate::last_error::wm_last_error;
    use crate::status::{WM_ERROR_BUSY, WM_ERROR_PANIC};

    fn last_error() -> String {
        // SAFETY: the text is valid until the next call of this thread.
        unsafe { CStr::from_ptr(wm_last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_is_a_status_with_its_message() {
        let _ = call(|| panic!("broken at {}", 7));
        assert_eq!(call(|| panic!("broken at {}", 7)), WM_ERROR_PANIC);
        assert_eq!(
            last_error(),
            "the library panicked: broken at 7\nhint: this is a defect of the library: please report it"
        );
        assert_eq!(call(|| std::panic::panic_any(7)), WM_ERROR_PANIC);
        assert!(last_error().starts_with("the library panicked\n"), "{}", last_error());
    }

    #[test]
    fn each_thread_has_the_error_of_its_last_call() {
        let failing = || call(|| Err(Failure::new(WM_ERROR_BUSY, "with a \0 NUL")));
        assert_eq!(failing(), WM_ERROR_BUSY);
        std::thread::spawn(|| assert_eq!(last_error(), "")).join().unwrap();
        assert_eq!(last_error(), "with a   NUL");
        assert_eq!(call(|| Ok(())), WM_OK);
        assert_eq!(last_error(), "");
    }
}
