//! The driver's library and its table of functions.
//!
//! We do not link to the driver and use no binding crate: the ones there are panic, or worse, when the library, a
//! function or a result code is not what they were built for. Here each function is looked up by name and version through
//! the driver's own loader; a missing required one is a reason why there is no CUDA, a missing optional one is `None`.

use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;

use super::bindings::{self, *};
use crate::Cause;

/// The library of the driver, as the dynamic loader knows it.
const LIBRARY: &str = "libcuda.so.1";

/// The one function looked up by its symbol.
const LOADER: &CStr = c"cuGetProcAddress_v2";

/// The oldest driver whose functions and PTX we rely on: CUDA 12.4, driver 550.
const OLDEST: c_int = 12_040;

/// A function's type without the `Option` that bindgen wraps it in.
pub(super) trait Entry {
    type Function;
}

impl<F> Entry for Option<F> {
    type Function = F;
}

type Loader = <PFN_cuGetProcAddress_v12000 as Entry>::Function;

macro_rules! entry_type {
    (required $pfn:ident) => {
        <$pfn as Entry>::Function
    };
    (optional $pfn:ident) => {
        $pfn
    };
}

macro_rules! entry_value {
    (required $name:ident $found:expr) => {
        $found.ok_or_else(|| missing(stringify!($name)))?
    };
    (optional $name:ident $found:expr) => {
        $found
    };
}

macro_rules! define_driver {
    ($($need:ident $name:ident: $pfn:ident, $version:literal;)*) => {
        /// The functions of the driver. Those that it may lack are `Option`s.
        #[expect(non_snake_case, reason = "the names are the driver's")]
        pub(super) struct Driver {
            $(pub(super) $name: entry_type!($need $pfn),)*
        }

        impl Driver {
            fn look_up(loader: Loader) -> Result<Self, String> {
                Ok(Self {
                    $($name: {
                        let address = address(loader, stringify!($name), $version);
                        // SAFETY: the driver says that a function of this name and version lies there, and the type
                        // was generated from that version's declaration; null becomes `None`.
                        let found = unsafe { std::mem::transmute::<*mut c_void, $pfn>(address) };
                        entry_value!($need $name found)
                    },)*
                })
            }
        }
    };
}

bindings::for_each_entry!(define_driver);

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(LIBRARY)
    }
}

fn missing(function: &str) -> String {
    format!("`{LIBRARY}` has no `{function}`: the driver is older than 550")
}

/// Asks the driver for a function; null where it has none.
fn address(loader: Loader, name: &str, version: c_int) -> *mut c_void {
    let Ok(name) = CString::new(name) else { return ptr::null_mut() };
    let mut address = ptr::null_mut();
    // SAFETY: the name is a string, `address` is writable, and the status is not asked for.
    let answer = unsafe { loader(name.as_ptr(), &raw mut address, version, 0, ptr::null_mut()) };
    if answer == CUresult::CUDA_SUCCESS { address } else { ptr::null_mut() }
}

impl Driver {
    /// The driver of this process, loaded and initialized at the first call; or why there is none.
    pub(super) fn of_process() -> Result<&'static Self, &'static String> {
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        DRIVER.get_or_init(Self::open).as_ref()
    }

    fn open() -> Result<Self, String> {
        // SAFETY: loading the driver's library runs its initializers, as every CUDA program does.
        let library = unsafe { Library::new(LIBRARY) }.map_err(|error| {
            let source = std::error::Error::source(&error).map(ToString::to_string);
            format!("no NVIDIA driver was found ({})", source.unwrap_or_else(|| error.to_string()))
        })?;
        // SAFETY: the symbol of this name has had this type since CUDA 12.0.
        let loader = unsafe { library.get::<PFN_cuGetProcAddress_v12000>(LOADER.to_bytes_with_nul()) };
        let loader = loader.ok().and_then(|loader| *loader).ok_or_else(|| missing("cuGetProcAddress_v2"))?;
        let driver = Self::look_up(loader)?;
        // The functions are used for as long as the process lives.
        std::mem::forget(library);
        driver.start()?;
        Ok(driver)
    }

    fn start(&self) -> Result<(), String> {
        let failed = |cause: Cause| cause.explained();
        // SAFETY: the one flag there is, is zero.
        unsafe { (self.cuInit)(0) }.ok("cuInit").map_err(failed)?;
        let version = self.version().map_err(failed)?;
        if version < OLDEST {
            let (found, needed) = (name_of(version), name_of(OLDEST));
            return Err(format!(
                "the driver is for CUDA {found}, and {needed} is needed: driver 550 or newer"
            ));
        }
        Ok(())
    }

    fn version(&self) -> Result<c_int, Cause> {
        let mut version = 0;
        // SAFETY: `version` is writable.
        unsafe { (self.cuDriverGetVersion)(&raw mut version) }.ok("cuDriverGetVersion")?;
        Ok(version)
    }

    /// The version of CUDA that the driver is for.
    pub(super) fn version_name(&self) -> String {
        self.version().map_or_else(|cause| cause.to_string(), name_of)
    }
}

fn name_of(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}
