//! Controls the fake CUDA driver that this process has loaded: makes a call fail, records calls, and counts resources.

#![allow(unsafe_code, reason = "the fake driver is called as a C library")]

use std::ffi::{CStr, c_char};

use libloading::Library;
use wholemem_fake_cuda::control::{ARM, FIRED, RECORD, RECORDED, RESOURCES, ResourceCounts};

/// The result code of an injected failure. No code treats this value specially, so it must be returned unchanged.
pub const INJECTED: u32 = 987;

/// The fake CUDA driver that this process has loaded.
#[derive(Debug)]
pub struct FakeDriver {
    arm: extern "C" fn(u64, u32),
    fired: extern "C" fn() -> *const c_char,
    resources: extern "C" fn() -> ResourceCounts,
    record: extern "C" fn(bool),
    recorded: extern "C" fn(usize) -> *const c_char,
}

impl FakeDriver {
    /// Returns the control functions of the CUDA driver that this process has loaded, which must be the fake driver.
    ///
    /// # Panics
    /// If it is not the fake driver.
    #[must_use]
    pub fn of_process() -> Self {
        // SAFETY: loading the library runs no initializers, because the backend has loaded it already.
        let library = unsafe { Library::new("libcuda.so.1") }.expect("cannot load the driver");
        // SAFETY: the fake driver defines the symbol with the type of the field `arm`; the constant is its name.
        let arm = *unsafe { library.get(ARM.as_bytes()) }.expect("not the fake driver");
        // SAFETY: the fake driver defines the symbol with the type of the field `fired`; the constant is its name.
        let fired = *unsafe { library.get(FIRED.as_bytes()) }.expect("not the fake driver");
        // SAFETY: the fake driver defines the symbol with the type of the field `resources`; the constant is its name.
        let resources = *unsafe { library.get(RESOURCES.as_bytes()) }.expect("not the fake driver");
        // SAFETY: the fake driver defines the symbol with the type of the field `record`; the constant is its name.
        let record = *unsafe { library.get(RECORD.as_bytes()) }.expect("not the fake driver");
        // SAFETY: the fake driver defines the symbol with the type of the field `recorded`; the constant is its name.
        let recorded = *unsafe { library.get(RECORDED.as_bytes()) }.expect("not the fake driver");
        // The library stays loaded, because its functions are used until the process exits.
        std::mem::forget(library);
        Self { arm, fired, resources, record, recorded }
    }

    /// Makes the `nth` call of a driver function from now on (counted from 1) fail once. With zero, no call fails.
    pub fn arm(&self, nth: u64) {
        (self.arm)(nth, INJECTED);
    }

    /// Returns the name of the driver function that was made to fail since the last call of `arm`.
    #[must_use]
    pub fn fired(&self) -> Option<&'static str> {
        name_of((self.fired)())
    }

    /// Runs `body`, and returns the names of the driver functions that this thread called in it, in order.
    pub fn calls_of(&self, body: impl FnOnce()) -> Vec<&'static str> {
        (self.record)(true);
        body();
        (self.record)(false);
        (0..).map_while(|index| name_of((self.recorded)(index))).collect()
    }

    /// Returns the numbers of resources that the fake driver holds for this process.
    #[must_use]
    pub fn resources(&self) -> ResourceCounts {
        (self.resources)()
    }
}

/// Returns a name that the fake driver has returned, or `None` for null.
fn name_of(name: *const c_char) -> Option<&'static str> {
    // SAFETY: `name` is not null, so it is a string constant of the driver library, which is never unloaded.
    (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_str().unwrap_or_default())
}
