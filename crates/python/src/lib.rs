//! The native module of the Python package `wholemem`, which Python loads as `wholemem._native`.
//!
//! | module | content |
//! |---|---|
//! | `error` | converts errors of the crates below into exceptions of `wholemem.errors` |
//! | `wait` | runs blocking calls without the GIL; Ctrl-C interrupts them |
//! | `array` | memory with a shape, a type and an owner; import and export through DLPack and similar protocols |
//! | `communicator`, `device`, `stream` | ranks, their devices, and the streams of their work |
//! | `number` | conversion of ranks, rows, bytes and shapes from Python |
//! | `tensor`, `rows` | tables over many ranks; gathers and scatters |
//! | `framework` | the framework of an argument, and outputs of the same framework |
//! | `raw_tensor` | the common form of tensors in gathers, scatters and collectives |
//! | `operators`, `handle` | the kernels of torch operators, and the integer handles by which operators refer to objects |
//! | `shortcut` | fast path for calls from torch that bypasses its dispatcher |
//! | `doctor` | the capabilities of this machine |
//! | `log` | passes the log events that `WHOLEMEM_LOG` selects to Python's `logging` |
//! | `pool` | an allocator for `torch.cuda.MemPool` whose memory can be published without a copy |
//! | `process` | ties a rank that `wholemem.run` started to its parent |
//! | `store` | named objects that outlive the process that created them, as arrays |
//! | `pickling` | the error for objects that cannot be pickled |
//! | `window`, `collective` | memory that every rank has mapped, and collectives over it |
//!
//! Importing the module loads no driver, and starts no thread unless `WHOLEMEM_LOG` is set. A Python object owns the Rust objects it needs, so objects may
//! be dropped in any order. Calls that may block release the GIL first. Using an inherited object in a forked child raises an
//! exception.
//!
//! This crate converts arguments and results and contains no logic of its own. The documentation for users is in
//! `python/wholemem/`; the stubs there repeat the doc comments of the classes here, which `help` shows.

#![allow(unsafe_code, reason = "Python and torch pass arrays by address")]

mod array;
mod collective;
mod communicator;
mod device;
mod doctor;
mod error;
mod framework;
mod handle;
mod log;
mod number;
mod operators;
mod pickling;
mod pool;
mod process;
mod raw_tensor;
mod recording;
mod rows;
mod shortcut;
mod store;
mod stream;
mod tensor;
mod wait;
mod window;

/// The native module of the package ``wholemem``. The package re-exports the public names of this module.
// The module requires the GIL: while it is held, the shape and storage of a framework's tensor do not change.
#[pyo3::pymodule(gil_used = true)]
mod _native {
    #[pymodule_export]
    use crate::array::{Array, Exchange, asarray, element_types, zeros};
    #[pymodule_export]
    use crate::communicator::{Communicator, unique_id};

    #[pymodule_export]
    use crate::doctor::findings;

    #[pymodule_export]
    use crate::log::{start_logging, stop_logging};

    #[pymodule_export]
    use crate::process::die_with_parent;

    #[pymodule_export]
    use crate::recording::CaptureRecording;

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
