//! The errors of this crate, with the values of the failed operation.

mod file;

use wholemem_comm::Rank;

pub use file::{FileError, FileProblem};

use crate::dtype::{Dtype, ReduceOp};

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The error type of this crate.
///
/// If a collective call fails on one rank, it fails on all ranks with [`Error::OnRank`]. Nothing stays allocated, and the group
/// remains usable. After [`Error::Comm`] it does not.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A device, its memory or its streams failed on this rank.
    #[error(transparent)]
    Hal(#[from] wholemem_hal::Error),

    /// The group failed, or a rank sent something malformed.
    #[error(transparent)]
    Comm(#[from] wholemem_comm::Error),

    /// A system call failed.
    #[error(transparent)]
    Os(#[from] wholemem_os::Error),

    /// A tensor file is invalid or cannot be accessed.
    #[error(transparent)]
    File(#[from] FileError),

    /// The progress callback interrupted a long call.
    #[error("the call was interrupted")]
    Interrupted,

    /// The error of the lowest rank that failed in a collective call. The same on every rank.
    #[error("rank {rank} failed: {reason}")]
    OnRank {
        /// The rank.
        rank: Rank,
        /// The [code](Error::code) of its error.
        code: u32,
        /// The message of its error.
        reason: String,
        /// The [hint](Error::hint) of its error.
        hint: Option<String>,
    },

    /// A rank made another collective call than rank 0, or with other arguments.
    #[error(
        "rank {rank} made another call than rank 0, or passed other arguments: collective calls must be equal on all ranks"
    )]
    Differs {
        /// The lowest such rank.
        rank: Rank,
    },

    /// A rank opened another save, or another version of a file, than rank 0. The same on every rank.
    #[error("rank {rank} opened another save, or another version of the file, than rank 0")]
    SavesDiffer {
        /// The lowest such rank.
        rank: Rank,
    },

    /// A partition over no ranks.
    #[error("there must be at least one rank")]
    NoRanks,

    /// A partition for another number of ranks than the group has.
    #[error("rows were given for {given} ranks, but the group has {ranks} ranks")]
    RanksDiffer {
        /// The number of ranks of the partition.
        given: usize,
        /// The number of ranks of the group.
        ranks: u32,
    },

    /// A partition with another number of rows than the memory.
    #[error("{given} rows were given to the ranks, but the memory has {rows} rows")]
    RowsDiffer {
        /// The number of rows of the partition.
        given: u64,
        /// The number of rows of the memory.
        rows: u64,
    },

    /// More rows than signed 64-bit indices can address.
    #[error("there are more than 2^63 - 1 rows")]
    TooManyRows,

    /// Rows of no bytes.
    #[error("a row has no bytes")]
    EmptyRow,

    /// Memory longer than an address space.
    #[error("{rows} rows of {row_len} bytes exceed the address space")]
    TooLong {
        /// The number of rows.
        rows: u64,
        /// The length of a row.
        row_len: usize,
    },

    /// A shape without dimensions.
    #[error("a tensor has at least one dimension: its rows")]
    NoDimensions,

    /// Rows or columns outside a tensor.
    #[error("cannot use {dimension} {start}..{end}: there are {count}")]
    OutOfRange {
        /// Rows or columns.
        dimension: &'static str,
        /// The start of the range.
        start: u64,
        /// The end of the range.
        end: u64,
        /// The number of rows or columns of the tensor.
        count: u64,
    },

    /// No range of addresses is free on all ranks.
    #[error("no range of {len} bytes of addresses is free on all ranks: {tried} ranges were tried")]
    NoCommonAddress {
        /// The length of the range.
        len: usize,
        /// The number of ranges that were tried.
        tried: u32,
    },

    /// An index that names no row: it is negative, or not below the number of rows.
    #[error("{}", out_of_range(*position, *index, *rows))]
    BadIndex {
        /// The smallest position of such an index.
        position: u64,
        /// The index at the position; unknown after a GPU call that did not wait.
        index: Option<i64>,
        /// The number of rows: valid indices are smaller. Unknown if GPU calls that did not wait used views of different lengths.
        rows: Option<u64>,
    },

    /// Elements of different types without a requested conversion.
    #[error(
        "the table has elements of type {table} and the rows of type {rows}: request a conversion, or pass rows of {table}"
    )]
    TypesDiffer {
        /// The type of the table.
        table: Dtype,
        /// The type of the rows.
        rows: Dtype,
    },

    /// A conversion other than between two floats or two integers.
    #[error("cannot convert {from} to {to}: only floats to floats, and integers to integers")]
    NotConvertible {
        /// The type of the source.
        from: Dtype,
        /// The type of the destination.
        to: Dtype,
    },

    /// Less memory than the rows or indices need.
    #[error("{count} {items} need {needed} bytes, but the memory has {len}")]
    TooShort {
        /// Rows or indices.
        items: &'static str,
        /// The number of rows or indices.
        count: u64,
        /// The bytes that they need.
        needed: u128,
        /// The length of the memory in bytes.
        len: usize,
    },

    /// A slice with more or fewer elements than the rows have.
    #[error("{rows} rows have {expected} elements, but the slice has {given}")]
    CountDiffers {
        /// The number of rows.
        rows: u64,
        /// The number of their elements.
        expected: u128,
        /// The number of elements of the slice.
        given: usize,
    },

    /// A slice that ends within a row.
    #[error("{given} elements are not a whole number of rows of {row} elements")]
    PartialRow {
        /// The number of elements of the slice.
        given: usize,
        /// The number of elements of a row.
        row: u64,
    },

    /// Rows that would overlap.
    #[error("rows of {row_len} bytes overlap at a stride of {stride} bytes")]
    StrideTooShort {
        /// The length of a row.
        row_len: usize,
        /// The distance between the starts of two rows or elements.
        stride: usize,
    },

    /// Elements or indices at a misaligned address.
    #[error("{items} at {address:#x} with a stride of {stride} bytes are not aligned to {align} bytes")]
    Misaligned {
        /// Rows or indices.
        items: &'static str,
        /// Their address.
        address: u64,
        /// The distance between the starts of two rows or elements.
        stride: usize,
        /// The required alignment of address and stride.
        align: usize,
    },

    /// A reduction that the element type does not support.
    #[error("cannot compute {op} of {dtype}: bitwise operations need integers, the others need numbers")]
    OpNotForType {
        /// The operation.
        op: ReduceOp,
        /// The type.
        dtype: Dtype,
    },

    /// An input and an output that overlap without being the same buffer.
    #[error(
        "{len} bytes of input at {input:#x} overlap the output at {output:#x}, but are not the same buffer"
    )]
    Overlap {
        /// The address of the input.
        input: u64,
        /// The address of the output.
        output: u64,
        /// The length of the input.
        len: u64,
    },

    /// A lane that does not exist.
    #[error("there is no lane {index}: the number of lanes is {lanes}")]
    NoSuchLane {
        /// The requested lane.
        index: usize,
        /// The number of lanes.
        lanes: usize,
    },

    /// The kernels of the ranks on one device cannot be resident at the same time, so they would deadlock.
    #[error("{sharing} ranks share the device of rank {rank}, which can run only {fits} blocks at once")]
    NotResident {
        /// A rank on that device.
        rank: Rank,
        /// The number of ranks on it.
        sharing: usize,
        /// The number of blocks that the device can run at once.
        fits: u32,
    },

    /// A window of another group.
    #[error("the window belongs to another group")]
    ForeignWindow,

    /// A window that is empty on all ranks.
    #[error("the window has no bytes on any rank")]
    EmptyWindow,

    /// Bytes outside a rank's part of a window.
    #[error(
        "cannot use {len} bytes at {offset} of rank {rank}'s part of the window: only {available} bytes are available"
    )]
    NoPart {
        /// The rank.
        rank: Rank,
        /// The offset of the requested bytes.
        offset: usize,
        /// The number of requested bytes.
        len: usize,
        /// The number of bytes that are available on the rank.
        available: usize,
    },

    /// No addresses are left for a window.
    #[error("cannot allocate addresses for a window of {len} bytes: the longest free range has {free} bytes")]
    NoWindowSpace {
        /// The length of the window.
        len: usize,
        /// The longest free range.
        free: usize,
    },

    /// An environment variable with an invalid value.
    #[error("`{name}` is `{value}`: {reason}")]
    Environment {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: String,
        /// The values that are valid.
        reason: &'static str,
    },
}

/// The message for an index that names no row.
fn out_of_range(position: u64, index: Option<i64>, rows: Option<u64>) -> String {
    let which = match index {
        Some(index) => format!("index {index} at position {position}"),
        None => format!("the index at position {position}"),
    };
    match rows {
        Some(0) => format!("{which} is out of range: there are no rows"),
        Some(rows) => format!("{which} is out of range: valid indices are 0..{rows}"),
        None => format!("{which} is out of range"),
    }
}

impl Error {
    /// The stable numeric code of this error, equal in C, in Python and between processes. Codes below 1,000 are those of
    /// [devices and memory](wholemem_hal::Error::code).
    #[must_use]
    pub fn code(&self) -> u32 {
        match self {
            Self::Hal(error) => error.code(),
            Self::OnRank { code, .. } => *code,
            Self::Comm(_) => 1000,
            Self::Differs { .. } => 1001,
            Self::NoRanks => 1002,
            Self::RanksDiffer { .. } => 1003,
            Self::TooManyRows => 1004,
            Self::EmptyRow => 1005,
            Self::TooLong { .. } => 1006,
            Self::NoDimensions => 1007,
            Self::OutOfRange { .. } => 1008,
            Self::NoCommonAddress { .. } => 1009,
            Self::BadIndex { .. } => 1010,
            Self::TypesDiffer { .. } => 1011,
            Self::NotConvertible { .. } => 1012,
            Self::TooShort { .. } => 1013,
            Self::StrideTooShort { .. } => 1014,
            Self::Misaligned { .. } => 1015,
            Self::RowsDiffer { .. } => 1016,
            Self::File(_) => 1017,
            Self::Interrupted => 1018,
            Self::OpNotForType { .. } => 1019,
            Self::Overlap { .. } => 1020,
            Self::NoSuchLane { .. } => 1021,
            Self::NotResident { .. } => 1022,
            Self::ForeignWindow => 1023,
            Self::EmptyWindow => 1024,
            Self::NoPart { .. } => 1025,
            Self::NoWindowSpace { .. } => 1026,
            Self::Environment { .. } => 1027,
            // 1028 was used by an error of earlier versions, and is not reused.
            Self::SavesDiffer { .. } => 1029,
            Self::Os(_) => 1030,
            Self::CountDiffers { .. } => 1031,
            Self::PartialRow { .. } => 1032,
        }
    }

    /// A hint for the user on how to resolve the error, if there is one.
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::OnRank { hint, .. } => hint.as_deref(),
            Self::Hal(error) => error.hint(),
            Self::File(error) => error.hint(),
            Self::NotConvertible { .. } => {
                Some("use rows of the tensor's element type, and convert them separately")
            }
            Self::NoCommonAddress { .. } => Some(
                "request equal addresses only if ranks exchange pointers; offsets need no equal addresses",
            ),
            Self::SavesDiffer { .. } => Some(
                "the files were replaced while the ranks opened them, or the ranks passed different paths: load again",
            ),
            Self::Overlap { .. } => Some("use a separate output buffer"),
            Self::NoWindowSpace { .. } => Some("set `WHOLEMEM_WINDOW_SPACE` to more bytes, or drop windows"),
            Self::NotResident { .. } => Some("use fewer ranks on one device, or fewer lanes"),
            _ => None,
        }
    }
}
