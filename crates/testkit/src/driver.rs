//! The fake driver that this process has loaded: failing a call of it, and asking what it holds.

#![allow(unsafe_code, reason = "the fake driver is called as a C library")]

use std::ffi::{CStr, c_char};

use libloading::Library;
use wholemem_fake_cuda::control::{ARM, FIRED, HOLDINGS, Holdings};

/// What an injected failure answers. No code treats it specially, so it has to come through as it is.
pub const INJECTED: u32 = 987;

/// The fake driver in this process.
#[derive(Debug)]
pub struct FakeDriver {
    arm: extern "C" fn(u64, u32),
    fired: extern "C" fn() -> *const c_char,
    holdings: extern "C" fn() -> Holdings,
}

impl FakeDriver {
    /// The driver of this process, which must be the fake one.
    ///
    /// # Panics
    /// When it is not.
    #[must_use]
    pub fn of_process() -> Self {
        // SAFETY: its initializers have run already: it is what the backend uses.
        let library = unsafe { Library::new("libcuda.so.1") }.expect("a driver is loaded");
        // SAFETY: the symbol has this type in the crate of the fake driver, from where its name comes.
        let arm = *unsafe { library.get(ARM.as_bytes()) }.expect("the fake driver");
        // SAFETY: the symbol has the type of the field `fired` in the crate of the fake driver, from where its name
        // comes.
        let fired = *unsafe { library.get(FIRED.as_bytes()) }.expect("the fake driver");
        // SAFETY: the symbol has the type of the field `holdings` in the crate of the fake driver, from where its name
        // comes.
        let holdings = *unsafe { library.get(HOLDINGS.as_bytes()) }.expect("the fake driver");
        // The functions are used for as long as the process lives.
        std::mem::forget(library);
        Self { arm, fired, holdings }
    }

    /// Makes the `nth` call from now on (counted from 1) fail, once; zero ends the plan.
    pub fn arm(&self, nth: u64) {
        (self.arm)(nth, INJECTED);
    }

    /// The function that was made to fail.
    #[must_use]
    pub fn fired(&self) -> Option<&'static str> {
        let name = (self.fired)();
        // SAFETY: it is null, or a string constant of a library that stays.
        (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_str().unwrap_or_default())
    }

    /// What the driver holds for this process.
    #[must_use]
    pub fn holdings(&self) -> Holdings {
        (self.holdings)()
    }
}
