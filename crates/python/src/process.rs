//! What stays in its process, and says so where it is pickled: workers that are spawned are given what travels.
//!
//! `copy` asks in the same way, and gets the same answer.

use pyo3::prelude::*;

use crate::array::Array;
use crate::communicator::Communicator;
use crate::error::Raised;
use crate::shortcut::ShortReduction;
use crate::store::{Client, Draft, Mirror, Pack, PackDraft, Watch};
use crate::tensor::WholeTensor;
use crate::window::Window;

/// What can be done where something was to travel.
const HINT: &str = "gather in the main process, or give a copy away: `array.numpy()`; what is in a store, a worker gets by its \
                    name, through a `store.Client` of its own";

fn stays(object: &Bound<'_, PyAny>) -> PyErr {
    let kind = object.get_type().name().map_or_else(|_| "object".to_owned(), |name| name.to_string());
    let message = format!("cannot pickle this `{kind}`: it stays in the process that made it");
    Raised::new("WrongType", message).hint(HINT).into()
}

macro_rules! stay {
    ($($class:ident),+ $(,)?) => {
        $(
            #[pymethods]
            impl $class {
                fn __reduce_ex__(slf: &Bound<'_, Self>, _protocol: &Bound<'_, PyAny>) -> PyResult<()> {
                    Err(stays(slf.as_any()))
                }
            }
        )+
    };
}

stay!(
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
