//! The kernels as the processor runs them: the same requests, the same answers, byte for byte.
//!
//! Other ranks may write the same memory at any moment. Bytes are moved by instructions that the compiler does not see
//! into (`copy`), elements by volatile and atomic accesses: a race shows as old bytes among new ones, never as anything
//! else. Indices are read once and checked after that.

mod copy;
mod elements;
mod find;
mod rows;
mod walk;

use wholemem_hal::{Args, HostFunction, LaunchShape};

use crate::{ElementsRequest, RowsRequest};

/// Every kernel, by name.
pub(crate) const FUNCTIONS: &[(&str, HostFunction)] = &[
    ("gather_rows_i32", gather_rows::<i32>),
    ("gather_rows_i64", gather_rows::<i64>),
    ("scatter_rows_i32", scatter_rows::<i32>),
    ("scatter_rows_i64", scatter_rows::<i64>),
    ("gather_convert_i32", gather_convert::<i32>),
    ("gather_convert_i64", gather_convert::<i64>),
    ("scatter_convert_i32", scatter_convert::<i32>),
    ("scatter_convert_i64", scatter_convert::<i64>),
    ("scatter_add_i32", scatter_add::<i32>),
    ("scatter_add_i64", scatter_add::<i64>),
];

fn rows(args: &Args) -> RowsRequest {
    args.read(0).and_then(RowsRequest::from_bytes).expect("one request")
}

fn elements(args: &Args) -> ElementsRequest {
    args.read(0).and_then(ElementsRequest::from_bytes).expect("one request")
}

unsafe fn gather_rows<I: find::Index>(_: &LaunchShape, args: &Args) {
    // SAFETY: whoever launches a kernel answers for what its request names.
    unsafe { rows::gather::<I>(&rows(args)) }
}

unsafe fn scatter_rows<I: find::Index>(_: &LaunchShape, args: &Args) {
    // SAFETY: as above.
    unsafe { rows::scatter::<I>(&rows(args)) }
}

unsafe fn gather_convert<I: find::Index>(_: &LaunchShape, args: &Args) {
    // SAFETY: as above.
    unsafe { elements::gather::<I>(&elements(args)) }
}

unsafe fn scatter_convert<I: find::Index>(_: &LaunchShape, args: &Args) {
    // SAFETY: as above.
    unsafe { elements::scatter::<I>(&elements(args)) }
}

unsafe fn scatter_add<I: find::Index>(_: &LaunchShape, args: &Args) {
    // SAFETY: as above.
    unsafe { elements::add::<I>(&elements(args)) }
}
