//! The CPU implementation of the kernels, which take the same requests as the GPU kernels and have bitwise the same results.
//!
//! ```text
//!   rows, elements   gather and scatter ── row_lookup: index to address ── parallel: division among threads
//!   collective       collective calls ── call: waiting for other ranks ── call_lock: one thread at a time
//!   copy             one row              combine: the elements of several ranks
//! ```
//!
//! Other ranks may write the same memory concurrently. Bytes are copied by assembly or volatile accesses (`copy`), elements
//! by volatile and atomic accesses: a race yields a mix of old and new bytes, and no undefined behaviour. Each index is read
//! once, and the value that was read is checked.

#![allow(unsafe_code, reason = "the loops access memory that other ranks write too")]

mod call;
mod call_lock;
mod collective;
mod combine;
mod copy;
mod elements;
mod parallel;
mod row_lookup;
mod rows;

pub(crate) use call::spins;
pub(crate) use collective::{COLLECTIVES, CollectiveFunction, collective_function};

use wholemem_hal::{Args, HostFunction};
use zerocopy::TryFromBytes;

use crate::abi::{IndexType, RowTiles};

macro_rules! row_kernels {
    ($($name:literal: $module:ident::$kernel:ident;)*) => {
        /// The CPU functions of the kernels of gather and scatter, by kernel name.
        pub(crate) const FUNCTIONS: &[(&str, HostFunction)] = &[$(($name, |_, args| {
            // SAFETY: a launch is unsafe, and its caller guarantees that the addresses in the request are valid for its lengths.
            unsafe { run(args, $module::$kernel::<i32>, $module::$kernel::<i64>) }
        })),*];
    };
}

row_kernels! {
    "gather_rows": rows::gather;
    "scatter_rows": rows::scatter;
    "gather_convert": elements::gather;
    "scatter_convert": elements::scatter;
    "scatter_add": elements::add;
}

/// Runs a CPU kernel of gather or scatter on the request of a launch: `i32` or `i64`, depending on the type of the indices.
///
/// # Safety
/// The addresses in the request are valid, as the kernel requires.
unsafe fn run<Request: TryFromBytes>(args: &Args, i32: unsafe fn(&Request), i64: unsafe fn(&Request)) {
    let request: Request = args.read_value(0).expect("a kernel is launched with a request");
    let tiles: RowTiles = args.read_value(1).expect("a kernel is launched with the tiles of its request");
    let kernel = match IndexType::of_len(tiles.index_len).expect("an index has four or eight bytes") {
        IndexType::I32 => i32,
        IndexType::I64 => i64,
    };
    // SAFETY: the caller of `run` guarantees that the addresses in the request are valid, as the kernel requires.
    unsafe { kernel(&request) };
}
