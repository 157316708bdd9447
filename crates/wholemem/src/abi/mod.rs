//! The device ABI: every structure, word and constant that kernels and the host both know.
//!
//! ```text
//!   rows          RowsRequest ── GlobalRef          collectives   CollectiveRequest ── LaneRef, WindowRef
//!                 ElementsRequest ── RowsRequest                  LaneLayout: offsets in the memory of a lane
//!                 RowTiles: how a GPU divides it                  lane words: control, report, debug
//!                 BadIndexRecord: what goes wrong   user kernels  GlobalRef, ElementRef, LaneRef, WindowRef
//! ```
//!
//! The CUDA side is in `kernels/include`. The CPU implementation of the kernels (`cpu`) reads the same bytes. This module
//! encodes and decodes; it accesses no memory and launches nothing.

mod bad_index;
mod collective_request;
mod element_ref;
mod global_ref;
mod lane_layout;
mod lane_words;
mod row_tiles;
mod rows_request;

pub(crate) use bad_index::{BadIndex, BadIndexRecord, NO_BAD_INDEX, RECORD_WORDS, names_a_row};
pub use collective_request::{CollectiveRequest, LaneRef, WindowRef};
pub use element_ref::ElementRef;
pub(crate) use global_ref::Division;
pub use global_ref::GlobalRef;
pub(crate) use lane_layout::{BLOCKS, LINE, LaneLayout, THREADS, slot_at};
pub use lane_words::Mutants;
pub(crate) use lane_words::{
    ABORT, ABORTED, ASLEEP, CALL_LOCK, CAUSE, DELAYS, FIRST_COUNTER, GIVEN_UP, LEFT, LOST, MISSED, MISSING,
    PHASE, POINTS, POISON, SEQUENCE, SPINS, TIMEOUT, cause,
};
pub(crate) use row_tiles::RowTiles;
pub use rows_request::{ElementsRequest, IndexType, RowsRequest};
