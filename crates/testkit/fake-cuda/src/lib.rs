//! A CUDA driver without a GPU, for tests: built as a shared library, and found by the loader as `libcuda.so.1`.
//!
//! | room | what it holds |
//! |---|---|
//! | [`config`] | how it is told to misbehave |
//! | [`control`] | what a test in the same process can ask of it |
//! | [`calls`] | what every call goes through |
//! | [`devices`] | GPUs and their contexts |
//! | [`ranges`] | who may do what at which addresses |
//! | [`vmm`], [`buffers`] | memory of the newer and of the older kind, and of the host |
//! | [`gpu`] | the thread that does the work of all streams |
//! | [`streams`], [`events`], [`modules`] | streams and graphs, events, kernels |
//!
//! Memory is memfds and a device's address is the processor's own, so an access after an unmap, or a write through a
//! read-only map by a kernel, ends the process: a test cannot miss it. Work runs on a thread of its own, later than the
//! call that enqueued it. What a real driver refuses is refused with its code; the codes are those of an H200 with driver
//! 580 where they were seen there. What it will not do: run PTX. It knows the kernels of `kernels/` by name.
//!
//! The types are those of the table that `wholemem-hal` is built with, so that a function that is missing here, or has
//! other parameters, does not compile.

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

/// All functions, in one place.
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
        /// A function and the driver's version that brought it.
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

/// The one symbol that is looked up in the library: it hands out all functions, by name.
///
/// # Safety
/// As the driver's: `symbol` is a string, `address` is writable, and `status` is writable or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    address: *mut *mut c_void,
    version: c_int,
    _flags: u64,
    status: *mut c_int,
) -> u32 {
    // SAFETY: a string, as the caller promises.
    let name = unsafe { CStr::from_ptr(symbol) }.to_str().unwrap_or_default();
    let config = config::get();
    let hidden = config.no_loader || config.missing.iter().any(|missing| missing == name);
    let known = find(name).filter(|_| !hidden);
    let found = known.filter(|&(_, since)| since <= version.min(config.version));
    let said = match (known, found) {
        (_, Some(_)) => CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SUCCESS,
        (Some(_), None) => CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT,
        (None, None) => CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND,
    };
    let answered = calls::put(address, found.map_or(ptr::null_mut(), |(function, _)| function));
    if !status.is_null() && calls::put(status, said.0 as c_int).is_err() {
        return CUresult::CUDA_ERROR_INVALID_VALUE.0;
    }
    match (answered, found) {
        (Err(code), _) => code.0,
        (Ok(()), None) => CUresult::CUDA_ERROR_NOT_FOUND.0,
        (Ok(()), Some(_)) => CUresult::CUDA_SUCCESS.0,
    }
}
