//! Rejects pickling of objects that belong to one process, with a hint for worker processes.
//!
//! `copy.copy` uses the same protocol and raises the same exception.

use pyo3::prelude::*;

use crate::array::Array;
use crate::communicator::Communicator;
use crate::error::Exception;
use crate::shortcut::ShortReduction;
use crate::store::{Client, Draft, Mirror, Pack, PackDraft, Watch};
use crate::tensor::WholeTensor;
use crate::window::Window;

/// The hint of the error for an object that cannot be pickled: how to send data to another process.
const HINT: &str = "gather in the main process, or send a copy: `array.numpy()`; a worker gets objects of a store by name, \
                    through its own `store.Client`";

fn not_picklable(object: &Bound<'_, PyAny>) -> PyErr {
    let kind = object.get_type().name().map_or_else(|_| "object".to_owned(), |name| name.to_string());
    let message = format!("cannot pickle this `{kind}`: it belongs to the process that created it");
    Exception::new("WrongType", message).hint(HINT).into()
}

macro_rules! reject_pickling {
    ($($class:ident),+ $(,)?) => {
        $(
            #[pymethods]
            impl $class {
                fn __reduce_ex__(slf: &Bound<'_, Self>, _protocol: &Bound<'_, PyAny>) -> PyResult<()> {
                    Err(not_picklable(slf.as_any()))
                }
            }
        )+
    };
}

reject_pickling!(
    Array,
    Client,
    Communicator,
    Draft,
    Mirror,
    Pack,
    PackDraft,
    ShortReduction,
    Watch,
    WholeTensor,
    Window,
);
