//! Gather and scatter: rows of a table moved by their indices.
//!
//! ```text
//!   indices     [ 3 | 0 | 3 | 7 ]
//!                 |   |   |   |          gather: a row of the table for each index, one after the other
//!   table    0 1 2 3 4 5 6 7 8 9         scatter: the way back; scatter_add: added to what is there
//!                 |   |   |   |
//!   dense       [ 3 | 0 | 3 | 7 ]
//! ```
//!
//! A call is checked and turned into one request (`plan`), which one kernel takes (`kernel`), on the host
//! as on a GPU. What has a [fixed order](Order::Fixed) goes to the rank that has the row first (`route`).

#[allow(unsafe_code, reason = "the one place where kernels are launched")]
mod kernel;
mod operand;
mod plan;
mod request;
mod route;
mod shape;
mod table;

pub(crate) use kernel::Kernels;
pub use operand::{Dense, IndexType, Indices, OnBadIndex, Order};
pub(crate) use plan::Table;
pub use request::{ElementsRequest, RowsRequest};
pub(crate) use shape::RowTiles;

/// What is done with rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Op {
    Gather,
    Scatter,
    ScatterAdd,
}
