//! The C interface of wholemem: what `include/wholemem.h` declares.
//!
//! ```text
//!   version         the version of the library and of the interface
//!   device, communicator ...    the exported functions, by object
//!   argument        checks of pointers and structures that callers pass
//!   call            what every exported function runs in: catches panics, and records errors
//!   last_error      the error of the last call of each thread
//!   failure         the error of a call: converts the errors of the crates below
//!   status          the statuses
//!   handle          handles: 64-bit numbers that refer to objects, and are checked in every call
//! ```
//!
//! Guarantees: no panic unwinds into C; a handle that was freed, or is of another kind or of another process, is a status; an object
//! that one thread frees while another thread uses it lives until that call ends; outputs are written only by calls that succeed.
//!
//! cbindgen translates the public items of this crate to the header, with their documentation: `cargo xtask abi`. So they have the
//! names that they have in C. The documentation of an exported function is that for C programmers, and states who owns what, what
//! the function waits for, and which threads may call it.

#![allow(unsafe_code, reason = "C passes pointers")]
#![allow(non_camel_case_types, reason = "the types have their names of C")]
#![allow(
    clippy::missing_safety_doc,
    reason = "the documentation is that of the C header, whose first lines state what holds for all pointers"
)]

pub mod argument;
mod call;
pub mod collective;
pub mod communicator;
pub mod device;
pub mod dtype;
mod failure;
pub mod graph;
mod handle;
pub mod last_error;
pub mod memory;
pub mod rows;
pub mod status;
pub mod symmetric;
pub mod tensor;
pub mod version;
