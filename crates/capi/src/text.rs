//! Texts that the library returns, and the caller frees.

use std::ffi::{CString, c_char};

use crate::argument::Output;
use crate::call::call;
use crate::handle::handle_type;
use crate::status::wm_status_t;

/// A text that the library has created.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct wm_text_t {
    /// The number of the handle; 0 is no handle.
    pub value: u64,
}

handle_type!(wm_text_t, CString, Text);

/// Returns the characters of a text, which end with a NUL, and their number of bytes without it. They are valid until the text is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_text_data(
    text: wm_text_t,
    characters: *mut *const c_char,
    len: *mut u64,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let characters = unsafe { Output::new(characters, "characters") }?;
        // SAFETY: the pointer is null or valid, as the header requires.
        let len = unsafe { Output::new(len, "len") }?;
        let text = text.get()?;
        characters.write(text.as_ptr());
        len.write(text.as_bytes().len() as u64);
        Ok(())
    })
}

/// Frees a text.
#[unsafe(no_mangle)]
pub extern "C" fn wm_text_destroy(text: wm_text_t) -> wm_status_t {
    call(|| Ok(text.free()?))
}
