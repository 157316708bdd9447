//! A fake CUDA driver without a GPU, for tests: a shared library that the loader finds as `libcuda.so.1`.
//!
//! | module | contents |
//! |---|---|
//! | [`config`] | environment variables that configure its faults |
//! | [`control`] | functions with which a test in the same process controls it |
//! | [`calls`] | checks and fault injection that every call goes through |
//! | [`devices`] | GPUs and their contexts |
//! | [`ranges`] | address ranges and their access rights |
//! | [`vmm`], [`buffers`] | virtual memory management; `cuMemAlloc` and host memory |
//! | [`gpu`] | the thread that runs the work of all streams |
//! | [`streams`], [`events`], [`modules`] | streams and graphs, events, kernels |
//!
//! Memory is memfds, and a device address is a CPU address, so an access after an unmap, or a write by a kernel through a
//! read-only mapping, kills the process: a test cannot miss it. Work runs on a separate thread, after the call that enqueued it.
//! Calls that a real driver refuses fail with the same code; codes that were observed are from an H200 with driver 580. PTX is
//! not executed: the kernels of `kernels/` are emulated by name.
//!
//! The function types are those of the table that `wholemem-hal` is built with, so a missing function or a different signature
//! does not compile.

#![allow(unsafe_code, reason = "the driver's functions are unsafe C functions")]
#![allow(non_snake_case, reason = "the names are the driver's")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap,
    reason = "addresses and lengths go through the driver's types; this is 64-bit Linux"
)]

#[rustfmt::skip]
#[path = "../../../hal/src/generated/bindings.rs"]
#[allow(
    dead_code, missing_docs, non_camel_case_types, unreachable_pub, unused_imports, unused_qualifications,
    clippy::all, clippy::pedantic, clippy::ptr_as_ptr, clippy::undocumented_unsafe_blocks,
    reason = "generated from NVIDIA's headers, with their names"
)]
mod bindings;

mod buffers;
mod calls;
mod config;
pub mod control;
mod devices;
mod events;
mod gpu;
mod modules;
mod ranges;
mod streams;
mod vmm;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use bindings::*;

/// Collects the driver functions of all modules, so that they can be looked up by name.
mod api {
    pub(crate) use crate::buffers::*;
    pub(crate) use crate::devices::*;
    pub(crate) use crate::events::*;
    pub(crate) use crate::modules::*;
    pub(crate) use crate::streams::*;
    pub(crate) use crate::vmm::*;
}

macro_rules! define_table {
    ($($need:ident $name:ident: $pfn:ident, $version:literal;)*) => {
        /// Finds a driver function by name. Returns its address and the driver version that introduced it.
        fn find(name: &str) -> Option<(*mut c_void, c_int)> {
            match name {
                $(stringify!($name) => {
                    let function: $pfn = Some(api::$name);
                    function.map(|function| (function as *mut c_void, $version))
                })*
                _ => None,
            }
        }
    };
}

bindings::for_each_entry!(define_table);

/// Returns a function of the fake driver by name. This is the only CUDA symbol that programs look up in the library
/// itself.
///
/// # Safety
/// As the driver's: `symbol` is a C string, `address` is writable, and `status` is writable or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    address: *mut *mut c_void,
    version: c_int,
    _flags: u64,
    status: *mut c_int,
) -> u32 {
    // SAFETY: the caller guarantees that `symbol` is a C string.
    let name = unsafe { CStr::from_ptr(symbol) }.to_str().unwrap_or_default();
    let config = config::get();
    let is_hidden = config.no_loader || config.missing.iter().any(|missing| missing == name);
    let known = find(name).filter(|_| !is_hidden);
    let found = known.filter(|&(_, since)| since <= version.min(config.version));
    let query_result = match (known, found) {
        (_, Some(_)) => CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SUCCESS,
        (Some(_), None) => CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT,
        (None, None) => CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND,
    };
    let written = calls::write_output(address, found.map_or(ptr::null_mut(), |(function, _)| function));
    if !status.is_null() && calls::write_output(status, query_result.0 as c_int).is_err() {
        return CUresult::CUDA_ERROR_INVALID_VALUE.0;
    }
    match (written, found) {
        (Err(code), _) => code.0,
        (Ok(()), None) => CUresult::CUDA_ERROR_NOT_FOUND.0,
        (Ok(()), Some(_)) => CUresult::CUDA_SUCCESS.0,
    }
}
