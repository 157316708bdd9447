//! Controls the fake driver that this process has loaded: fails a call, and counts its resources.

#![allow(unsafe_code, reason = "the fake driver is called as a C library")]

use std::ffi::{CStr, c_char};

use libloading::Library;
use wholemem_fake_cuda::control::{ARM, FIRED, RESOURCES, ResourceCounts};

/// The result code of an injected failure. No code treats it specially, so it must be returned unchanged.
pub const INJECTED: u32 = 987;

/// The fake driver of this process.
#[derive(Debug)]
pub struct FakeDriver {
    arm: extern "C" fn(u64, u32),
    fired: extern "C" fn() -> *const c_char,
    resources: extern "C" fn() -> ResourceCounts,
}

impl FakeDriver {
    /// Finds the driver of this process, which must be the fake one.
    ///
    /// # Panics
    /// If it is not the fake driver.
    #[must_use]
    pub fn of_process() -> Self {
        // SAFETY: the backend has loaded this library already, so its initializers have run.
        let library = unsafe { Library::new("libcuda.so.1") }.expect("cannot load the driver");
        // SAFETY: the fake driver defines the symbol with this type; the constant is its name.
        let arm = *unsafe { library.get(ARM.as_bytes()) }.expect("not the fake driver");
        // SAFETY: the fake driver defines the symbol with the type of the field `fired`; the constant is its name.
        let fired = *unsafe { library.get(FIRED.as_bytes()) }.expect("not the fake driver");
        // SAFETY: the fake driver defines the symbol with the type of the field `resources`; the constant is its name.
        let resources = *unsafe { library.get(RESOURCES.as_bytes()) }.expect("not the fake driver");
        // The functions are used until the process exits.
        std::mem::forget(library);
        Self { arm, fired, resources }
    }

    /// Makes the `nth` call from now on (counted from 1) fail once; zero disarms.
    pub fn arm(&self, nth: u64) {
        (self.arm)(nth, INJECTED);
    }

    /// The function that was made to fail since the last `arm`.
    #[must_use]
    pub fn fired(&self) -> Option<&'static str> {
        let name = (self.fired)();
        // SAFETY: the pointer is null or a string constant of a library that is never unloaded.
        (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_str().unwrap_or_default())
    }

    /// The number of resources that the driver holds for this process.
    #[must_use]
    pub fn resources(&self) -> ResourceCounts {
        (self.resources)()
    }
}
