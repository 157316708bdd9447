//! Gather and scatter: copies of rows between a table and a row buffer, by index.
//!
//! ```text
//!   indices     [ 3 | 0 | 3 | 7 ]
//!                 |   |   |   |          gather: table to row buffer, one row for each index
//!   table    0 1 2 3 4 5 6 7 8 9         scatter: row buffer to table; scatter_add: added to the table
//!                 |   |   |   |
//!   row buffer  [ 3 | 0 | 3 | 7 ]
//! ```
//!
//! `calls` holds the methods of [`WholeTensor`](crate::WholeTensor). A call is checked and turned into one request (`plan`),
//! divided into tiles (`launch_shape`) and launched (`launch`). A scatter in [fixed order](Order::Fixed) first sends every row
//! to the rank that stores it (`fixed_order`). `slices` has the typed calls on host memory, which use the same launches.

mod calls;
mod fixed_order;
mod launch;
mod launch_shape;
mod operands;
mod plan;
mod slices;

pub use operands::{Indices, OnBadIndex, Order, RowBuffer};
pub(crate) use plan::TableOperand;

/// The operation of a gather or scatter call on rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RowOp {
    Gather,
    Scatter,
    ScatterAdd,
}
