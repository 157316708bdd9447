//! The device ABI: the only definition of each structure, word and constant that both kernels and the host use.
//!
//! ```text
//!   rows          RowsRequest ── GlobalRef          collectives   CollectiveRequest ── LaneRef, WindowRef, CallTerms
//!                 ElementsRequest ── RowsRequest                  LaneLayout: offsets in the memory of a lane
//!                 RowTiles: how a GPU divides it                  lane words: control, report, debug
//!                 BadIndexRecord: what goes wrong   user kernels  GlobalRef, ElementRef, LaneRef, WindowRef
//! ```
//!
//! `cargo xtask abi` generates the C++ definitions from these files: `kernels/include/wholemem/abi.cuh`, which user kernels
//! include, and `kernels/include/ops/abi.cuh` for the requests. `layout!` pins sizes and offsets at compile time in both
//! languages.
//!
//! A structure is passed to a kernel as it is in memory ([`IntoBytes`](zerocopy::IntoBytes)). A CPU kernel (`cpu`) copies it
//! out of its arguments ([`TryFromBytes`](zerocopy::TryFromBytes)), which fails for codes that name nothing. This module
//! launches nothing.

/// Checks at compile time that a structure has the given size, and its fields the given offsets.
///
/// `cargo xtask abi` reads the same numbers, and writes a `static_assert` for each.
macro_rules! layout {
    ($type:ident: $len:literal { $($field:ident: $offset:literal),+ $(,)? }) => {
        const _: () = {
            assert!(size_of::<$type>() == $len);
            $(assert!(std::mem::offset_of!($type, $field) == $offset);)+
            // A field that is not listed is a compile error.
            let _ = |$type { $($field: _),+ }: $type| {};
        };
    };
}

mod bad_index;
mod call_terms;
mod collective_request;
mod element_ref;
mod global_ref;
mod lane_layout;
mod lane_ref;
#[cfg_attr(
    not(feature = "test-hooks"),
    allow(dead_code, reason = "debug words and mutants, which kernels for tests know")
)]
mod lane_words;
mod row_tiles;
mod rows_request;
mod window_ref;

pub(crate) use bad_index::{BadIndex, BadIndexRecord, BadIndexWord, NO_BAD_INDEX, RECORD_WORDS, names_a_row};
pub use call_terms::CallTerms;
pub(crate) use call_terms::{DIGEST_BITS, TERMS_WORDS, tag_of};
pub(crate) use collective_request::COLLECTIVE_THREADS;
pub use collective_request::CollectiveRequest;
pub use element_ref::ElementRef;
pub(crate) use global_ref::Division;
pub use global_ref::GlobalRef;
pub(crate) use lane_layout::{LaneLayout, slot_at};
pub use lane_ref::LaneRef;
pub(crate) use lane_ref::{MAX_BLOCKS, PHASE_BITS, SIGNAL_STRIDE};
#[cfg(feature = "test-hooks")]
pub use lane_words::Mutant;
pub(crate) use lane_words::{Cause, ControlWord, ReportWord};
#[cfg(feature = "test-hooks")]
pub(crate) use lane_words::{DEBUG_POINTS, DebugWord};
pub(crate) use row_tiles::{
    ADD_TURNS, CONVERT_TURNS_1, CONVERT_TURNS_4, ROW_THREADS, ROW_TURNS_1, ROW_TURNS_4, ROW_TURNS_8,
    ROW_TURNS_16, RowTiles, STAGE_LEN, STAGE_PARTS, STAGE_TURNS, WARP,
};
pub use rows_request::{ElementsRequest, IndexType, RowsRequest};
pub use window_ref::WindowRef;
