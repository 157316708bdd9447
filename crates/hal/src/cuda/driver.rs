//! The CUDA driver library and the table of its functions.
//!
//! The crate neither links to the driver nor uses a binding crate: the existing ones panic, or worse, if the library, a function
//! or a result code differs from what they were built for. Here each function is looked up by name and version with
//! `cuGetProcAddress`. If a required function is missing, the CUDA backend is unavailable; a missing optional function is `None`.

use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;

use super::bindings::{self, *};
use crate::BackendError;

/// The file name of the CUDA driver library.
const LIBRARY: &str = "libcuda.so.1";

/// The only driver function that is looked up as a symbol; it returns the addresses of the others.
const LOADER: &CStr = c"cuGetProcAddress_v2";

/// The oldest CUDA driver with all functions and the PTX version that this crate uses: CUDA 12.4, driver 550.
const MIN_VERSION: c_int = 12_040;

/// Names the type of a driver function without the `Option` in which bindgen wraps it.
pub(super) trait FunctionPointer {
    type Function;
}

impl<F> FunctionPointer for Option<F> {
    type Function = F;
}

type Loader = <PFN_cuGetProcAddress_v12000 as FunctionPointer>::Function;

macro_rules! entry_type {
    (required $pfn:ident) => {
        <$pfn as FunctionPointer>::Function
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
        /// The functions of the CUDA driver. Functions that a driver may lack are `Option`s.
        #[expect(non_snake_case, reason = "the names are the driver's")]
        pub(super) struct Driver {
            $(pub(super) $name: entry_type!($need $pfn),)*
        }

        impl Driver {
            fn look_up(loader: Loader) -> Result<Self, String> {
                Ok(Self {
                    $($name: {
                        let address = address(loader, stringify!($name), $version);
                        // SAFETY: the driver returned `address` for this name and version, and the type was generated from the
                        // declaration of that version; null becomes `None`.
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

/// Looks up a driver function with `cuGetProcAddress`. Returns null if the driver lacks the function.
fn address(loader: Loader, name: &str, version: c_int) -> *mut c_void {
    let Ok(name) = CString::new(name) else { return ptr::null_mut() };
    let mut address = ptr::null_mut();
    // SAFETY: `name` is a C string, `address` is writable, and the status pointer may be null.
    let answer = unsafe { loader(name.as_ptr(), &raw mut address, version, 0, ptr::null_mut()) };
    if answer == CUresult::CUDA_SUCCESS { address } else { ptr::null_mut() }
}

impl Driver {
    /// Returns the driver of this process, which the first call loads and initializes, or the reason why it is unavailable.
    pub(super) fn of_process() -> Result<&'static Self, &'static String> {
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        DRIVER.get_or_init(Self::open).as_ref()
    }

    fn open() -> Result<Self, String> {
        // SAFETY: loading the driver's library runs its initializers, as every CUDA program does.
        let library = unsafe { Library::new(LIBRARY) }.map_err(|error| {
            let source = std::error::Error::source(&error).map(ToString::to_string);
            format!("cannot load the NVIDIA driver ({})", source.unwrap_or_else(|| error.to_string()))
        })?;
        // SAFETY: the symbol `cuGetProcAddress_v2` has had this type since CUDA 12.0.
        let loader = unsafe { library.get::<PFN_cuGetProcAddress_v12000>(LOADER.to_bytes_with_nul()) };
        let loader = loader.ok().and_then(|loader| *loader).ok_or_else(|| missing("cuGetProcAddress_v2"))?;
        let driver = Self::look_up(loader)?;
        // The library is never unloaded, since its functions are used until the process exits.
        std::mem::forget(library);
        driver.initialize()?;
        Ok(driver)
    }

    fn initialize(&self) -> Result<(), String> {
        let failed = |cause: BackendError| cause.explained();
        // SAFETY: `cuInit` accepts only the flag 0, which is passed.
        unsafe { (self.cuInit)(0) }.ok("cuInit").map_err(failed)?;
        let version = self.version().map_err(failed)?;
        if version < MIN_VERSION {
            let (found, needed) = (name_of(version), name_of(MIN_VERSION));
            return Err(format!(
                "the driver supports CUDA {found}, but {needed} is required: install driver 550 or newer"
            ));
        }
        Ok(())
    }

    fn version(&self) -> Result<c_int, BackendError> {
        let mut version = 0;
        // SAFETY: the driver call writes only `version`, which is writable.
        unsafe { (self.cuDriverGetVersion)(&raw mut version) }.ok("cuDriverGetVersion")?;
        Ok(version)
    }

    /// Returns the CUDA version that the driver supports, as text.
    pub(super) fn version_name(&self) -> String {
        self.version().map_or_else(|cause| cause.to_string(), name_of)
    }
}

fn name_of(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}
