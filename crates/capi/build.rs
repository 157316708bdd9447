//! Sets the soname of the shared library.
//!
//! cargo names the library after the crate, but programs load the file `libwholemem.so.0`, which `cargo xtask install` creates: the
//! number is the first part of the version of the interface. rustc itself passes a version script to the linker that exports the
//! functions with `#[unsafe(no_mangle)]` and no other symbol; linkers accept no second script.

use std::fs;

const VERSION: &str = "src/version.rs";

fn main() {
    println!("cargo::rerun-if-changed={VERSION}");
    let source = fs::read_to_string(VERSION);
    let source = source.unwrap_or_else(|error| panic!("cannot read {VERSION}: {error}"));
    let abi = source.split("pub const WM_ABI_MAJOR: u32 = ").nth(1).and_then(|rest| rest.split(';').next());
    let abi: u32 = abi
        .and_then(|number| number.parse().ok())
        .unwrap_or_else(|| panic!("{VERSION} has no constant `WM_ABI_MAJOR`"));
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libwholemem.so.{abi}");
}
