//! The kernels on the CPU: the same requests as on a GPU, and bitwise the same results.
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
pub(crate) use collective::{
    COLLECTIVES, CollectiveFunction, barrier, copy_root, copy_root_packets, gather, gather_packets,
    reduce_one_shot, reduce_packets, reduce_two_shot,
};

use wholemem_hal::{Args, HostFunction, LaunchShape};

use crate::abi::{ElementsRequest, IndexType, RowTiles, RowsRequest};

/// Every kernel, by name.
pub(crate) const FUNCTIONS: &[(&str, HostFunction)] = &[
    ("gather_rows", gather_rows),
    ("scatter_rows", scatter_rows),
    ("gather_convert", gather_convert),
    ("scatter_convert", scatter_convert),
    ("scatter_add", scatter_add),
];

fn rows(args: &Args) -> RowsRequest {
    args.read(0).and_then(RowsRequest::from_bytes).expect("a request")
}

fn elements(args: &Args) -> ElementsRequest {
    args.read(0).and_then(ElementsRequest::from_bytes).expect("a request")
}

fn index_type(args: &Args) -> IndexType {
    args.read(1).and_then(RowTiles::index_type).expect("the tiles of a request")
}

unsafe fn gather_rows(_: &LaunchShape, args: &Args) {
    match index_type(args) {
        // SAFETY: a launch is unsafe, and its caller guarantees that the addresses of the request are valid.
        IndexType::I32 => unsafe { rows::gather::<i32>(&rows(args)) },
        // SAFETY: a launch is unsafe, and its caller guarantees that the addresses of the request are valid.
        IndexType::I64 => unsafe { rows::gather::<i64>(&rows(args)) },
    }
}

unsafe fn scatter_rows(_: &LaunchShape, args: &Args) {
    match index_type(args) {
        // SAFETY: a launch is unsafe, and its caller guarantees that the addresses of the request are valid.
        IndexType::I32 => unsafe { rows::scatter::<i32>(&rows(args)) },
        // SAFETY: a launch is unsafe, and its caller guarantees that the addresses of the request are valid.
        IndexType::I64 => unsafe { rows::scatter::<i64>(&rows(args)) },
    }
}

unsafe fn gather_convert(_: &LaunchShape, args: &Args) {
    match index_type(args) {
        // SAFETY: a launch is unsafe, and its caller guarantees that the addresses of the request are valid.
        IndexType::I32 => unsafe { elements::gather::<i32>(&elements(args)) },
        // SAFETY: a launch is unsafe, and its caller guarantees that the addresses of the request are valid.
        IndexType::I64 => unsafe { elements::gather::<i64>(&elements(args)) },
    }
}

unsafe fn scatter_convert(_: &LaunchShape, args: &Args) {
    match index_type(args) {
        // SAFETY: a launch is unsafe, and its caller guarantees that the addresses of the request are valid.
        IndexType::I32 => unsafe { elements::scatter::<i32>(&elements(args)) },
        // SAFETY: a launch is unsafe, and its caller guarantees that the addresses of the request are valid.
        IndexType::I64 => unsafe { elements::scatter::<i64>(&elements(args)) },
    }
}

unsafe fn scatter_add(_: &LaunchShape, args: &Args) {
    match index_type(args) {
        // SAFETY: a launch is unsafe, and its caller guarantees that the addresses of the request are valid.
        IndexType::I32 => unsafe { elements::add::<i32>(&elements(args)) },
        // SAFETY: a launch is unsafe, and its caller guarantees that the addresses of the request are valid.
        IndexType::I64 => unsafe { elements::add::<i64>(&elements(args)) },
    }
}
