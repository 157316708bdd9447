//! The version of the library, and the check that header and library belong together.

use crate::call::call;
use crate::failure::Failure;
use crate::status::{WM_ERROR_VERSION_MISMATCH, wm_status_t};

/// The first part of the version of the interface. It changes if a program has to be compiled again, as the `soname` of the library
/// does.
pub const WM_ABI_MAJOR: u32 = 0;
/// The second part of the version of the interface. It increases whenever the interface gets functions, constants or fields.
pub const WM_ABI_MINOR: u32 = 1;

/// Returns the version of the library as a number: major * 1000000 + minor * 1000 + patch, as `WM_VERSION` is that of the header.
/// Thread-safe. The call does not change the last error.
#[unsafe(no_mangle)]
pub extern "C" fn wm_version() -> u32 {
    const PARTS: [u32; 3] = [
        number(env!("CARGO_PKG_VERSION_MAJOR")),
        number(env!("CARGO_PKG_VERSION_MINOR")),
        number(env!("CARGO_PKG_VERSION_PATCH")),
    ];
    PARTS[0] * 1_000_000 + PARTS[1] * 1000 + PARTS[2]
}

/// Checks that this library supports programs that were compiled with a header: call `wm_check_version(WM_ABI_VERSION)` first.
///
/// Returns `WM_ERROR_VERSION_MISMATCH` if the program needs another library, or a later one. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn wm_check_version(abi_version: u32) -> wm_status_t {
    call(|| {
        let (major, minor) = (abi_version >> 16, abi_version & 0xffff);
        if major == WM_ABI_MAJOR && minor <= WM_ABI_MINOR {
            return Ok(());
        }
        let message = format!(
            "the program was compiled with version {major}.{minor} of the interface, but this library has {WM_ABI_MAJOR}.{WM_ABI_MINOR}"
        );
        let hint = "install the library and the header of the same version, and compile the program again";
        Err(Failure::new(WM_ERROR_VERSION_MISMATCH, message).hint(hint))
    })
}

/// Returns the number that decimal digits write.
const fn number(digits: &str) -> u32 {
    match u32::from_str_radix(digits, 10) {
        Ok(number) => number,
        Err(_) => panic!("a part of a version is a number"),
    }
}
