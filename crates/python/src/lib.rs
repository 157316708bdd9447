//! The Python package `wholemem`: its native half, which Python loads as `wholemem._native`.
//!
//! | room | what it holds |
//! |---|---|
//! | `error` | every error of the layers below as an exception of `wholemem.errors` |
//! | `wait` | calls that may wait: without the interpreter's lock, and ended by Ctrl-C |
//! | `array` | memory with a shape, a type and an owner, in and out by DLPack and its like |
//! | `communicator`, `device`, `stream` | ranks that have devices, and where their work runs |
//! | `number` | ranks, rows, bytes and shapes, as Python gives them |
//! | `tensor`, `rows` | elements over many ranks, gathered and scattered |
//! | `framework` | the framework of an argument, and outputs of the same |
//! | `raw_tensor` | the one form in which gathers, scatters and collectives take a tensor |
//! | `operators`, `handle` | the kernels of torch's operators, and numbers for tables and communicators, which operators take |
//! | `shortcut` | calls from torch that bypass its dispatcher |
//! | `doctor` | what this machine can do |
//! | `pool` | memory for `torch.cuda.MemPool`, which can be published as it is |
//! | `store` | named objects that outlive their makers, as arrays |
//! | `process` | what stays in its process, and says so where it is pickled |
//! | `window`, `collective` | memory that every rank has, and what ranks do together through it |
//!
//! What it keeps true: importing it touches no driver and starts nothing. An object of Python holds what it needs below,
//! so that the order in which they are dropped, or collected, does not matter. Whatever may wait gives up the
//! interpreter's lock first. A forked child that uses what it inherited gets an exception.
//!
//! What it will not do: decide anything. It says in Python what the crates below say in Rust; documentation for users is
//! in `python/wholemem/`, beside the types. What Python sees of the rooms has the same words above it, for `help` to show.

#![allow(unsafe_code, reason = "Python and torch pass arrays by address")]

mod array;
mod collective;
mod communicator;
mod device;
mod doctor;
mod error;
mod framework;
mod handle;
mod number;
mod operators;
mod pool;
mod process;
mod raw_tensor;
mod rows;
mod shortcut;
mod store;
mod stream;
mod tensor;
mod wait;
mod window;

/// The native half of the package. Its parts are used by the names they have in ``wholemem``.
// With the lock: what is seen of a framework's tensors stays so while it is held.
#[pyo3::pymodule(gil_used = true)]
mod _native {
    #[pymodule_export]
    use crate::array::{Array, Exchange, asarray, element_types, zeros};
    #[pymodule_export]
    use crate::communicator::{Communicator, unique_id};

    #[pymodule_export]
    use crate::doctor::findings;

    #[pymodule_export]
    use crate::shortcut::{ShortGather, ShortReduction, Shortcut};

    #[pymodule_export]
    use crate::store::{Client, Draft, Entry, Event, Mirror, Pack, PackDraft, Status, Watch, collect_shared};

    #[pymodule_export]
    use crate::tensor::WholeTensor;

    #[pymodule_export]
    use crate::window::Window;

    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
