//! The errors of this crate, with the operands of the failed operation.

mod file;

use wholemem_comm::Rank;

pub use file::{FileError, FileProblem};

use crate::dtype::{Dtype, ReduceOp};

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The error type of this crate.
///
/// If a collective call fails on one rank, it fails on all ranks with [`Error::OnRank`]. Nothing stays allocated, and the group
/// remains usable. After an [`Error::Comm`] that [poisons](wholemem_comm::Error::poisons) the group, it does not.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A device, its memory or its streams failed on this rank.
    #[error(transparent)]
    Hal(#[from] wholemem_hal::Error),

    /// The group failed, or a rank sent something malformed.
    #[error(transparent)]
    Comm(#[from] wholemem_comm::Error),

    /// A system call on this rank failed.
    #[error(transparent)]
    Os(#[from] wholemem_os::Error),

    /// A tensor file is invalid or cannot be accessed.
    #[error(transparent)]
    File(#[from] FileError),

    /// The progress callback ended the save, load, export or check of a tensor, for example after Ctrl-C.
    #[error("the save, load, export or check of a tensor was interrupted")]
    Interrupted,

    /// A collective call failed on a rank. Every rank returns the error of the lowest rank that failed.
    #[error("rank {rank} failed: {reason}")]
    OnRank {
        /// The lowest rank that failed.
        rank: Rank,
        /// The [code](Error::code) of that rank's error.
        code: u32,
        /// The message of that rank's error.
        reason: String,
        /// The [hint](Error::hint) of that rank's error.
        hint: Option<String>,
    },

    /// A rank made another collective call than rank 0, or with other arguments.
    #[error(
        "rank {rank} made another call than rank 0, or passed other arguments: collective calls must be equal on all ranks"
    )]
    RanksDisagree {
        /// The lowest rank that differs from rank 0.
        rank: Rank,
    },

    /// In a load, a rank opened a different saved tensor, or a different version of a file, than rank 0. Every rank returns this
    /// error.
    #[error(
        "cannot load: rank {rank} opened a different saved tensor, or a different version of the file, than rank 0"
    )]
    SavesDiffer {
        /// The lowest rank that opened something else than rank 0.
        rank: Rank,
    },

    /// A group or a partition of rows has no ranks.
    #[error("a group, or a partition of rows, must have at least one rank")]
    NoRanks,

    /// The numbers of rows in a specification are for another number of ranks than the group has.
    #[error("numbers of rows were given for {given} ranks, but the group has {ranks} ranks")]
    RanksDiffer {
        /// The number of ranks for which numbers of rows were given.
        given: usize,
        /// The number of ranks in the group.
        ranks: u32,
    },

    /// The numbers of rows that a specification gives to the ranks do not add up to the rows of the memory.
    #[error("{given} rows are assigned to the ranks, but the memory has {rows} rows")]
    RowsDiffer {
        /// The sum of the numbers of rows that were given to the ranks.
        given: u64,
        /// The number of rows of the memory.
        rows: u64,
    },

    /// A memory or partition has more rows than signed 64-bit indices can address.
    #[error("a table cannot have more than 2^63 - 1 rows")]
    TooManyRows,

    /// A memory or tensor has rows of no bytes.
    #[error("the length of a row is 0 bytes")]
    EmptyRow,

    /// Rows, or another array, are longer than an address space.
    #[error("{rows} rows of {row_len} bytes exceed the address space")]
    TooLong {
        /// The number of rows.
        rows: u64,
        /// The length of a row in bytes.
        row_len: usize,
    },

    /// The input of a collective call is too long to be staged (copied to buffers of a lane).
    #[error(
        "cannot stage {len} bytes of a collective call: the limit is {limit} bytes; use a window, or larger staging buffers"
    )]
    StagedTooLong {
        /// The length of the input in bytes.
        len: u64,
        /// The maximum length in bytes, which is proportional to the length of a staging buffer.
        limit: u64,
    },

    /// The shape of a tensor has no dimensions.
    #[error("a tensor has at least one dimension: its rows")]
    NoDimensions,

    /// A range of rows or columns is not within the tensor.
    #[error("cannot use {dimension} {start}..{end}: the tensor has {count} {dimension}")]
    OutOfRange {
        /// The word "rows" or "columns".
        dimension: &'static str,
        /// The start of the requested range of rows or columns.
        start: u64,
        /// The end of the requested range of rows or columns.
        end: u64,
        /// The number of rows or columns of the tensor.
        count: u64,
    },

    /// No range of addresses of the requested length was free on all ranks.
    #[error("no range of {len} bytes of addresses is free on all ranks: {tried} ranges were tried")]
    NoCommonAddress {
        /// The length of the address range in bytes.
        len: usize,
        /// The number of address ranges that were tried.
        tried: u32,
    },

    /// An index names no row of the table: it is negative, or not below the number of rows.
    #[error("{}", out_of_range(*position, *index, *rows))]
    BadIndex {
        /// The smallest position in the indices of an index that names no row.
        position: u64,
        /// The index at that position, which names no row; unknown after a GPU call that did not wait.
        index: Option<i64>,
        /// The number of rows of the table. Valid indices are smaller. Unknown if GPU calls that did not wait used views of
        /// different lengths.
        rows: Option<u64>,
    },

    /// The rows have another element type than the table, and no conversion was requested.
    #[error(
        "the table has elements of type {table} and the rows of type {rows}: request a conversion, or pass rows of {table}"
    )]
    TypesDiffer {
        /// The element type of the table.
        table: Dtype,
        /// The element type of the rows.
        rows: Dtype,
    },

    /// Elements cannot be converted, because only floats convert to floats, and integers to integers.
    #[error("cannot convert {from} to {to}: only floats to floats, and integers to integers")]
    NotConvertible {
        /// The element type of the source.
        from: Dtype,
        /// The element type of the destination.
        to: Dtype,
    },

    /// The memory of an operand, or a row of a memory, is shorter than its rows, indices or elements.
    #[error("{count} {items} need {needed} bytes, but only {len} bytes are available")]
    TooShort {
        /// The kind of items that need the memory: rows, indices or elements.
        items: &'static str,
        /// The number of rows, indices or elements.
        count: u64,
        /// The number of bytes that the rows, indices or elements need.
        needed: u128,
        /// The length of the operand's memory in bytes.
        len: usize,
    },

    /// A slice has more or fewer elements than the rows to read or write.
    #[error("{rows} rows have {expected} elements, but the slice has {given}")]
    CountDiffers {
        /// The number of rows to read or write.
        rows: u64,
        /// The number of elements in these rows.
        expected: u128,
        /// The number of elements in the slice.
        given: usize,
    },

    /// A slice ends within a row.
    #[error("{given} elements are not a whole number of rows of {row} elements")]
    PartialRow {
        /// The number of elements in the slice.
        given: usize,
        /// The number of elements in a row.
        row: u64,
    },

    /// The stride between rows is shorter than a row, so the rows overlap.
    #[error("rows of {row_len} bytes overlap at a stride of {stride} bytes")]
    StrideTooShort {
        /// The length of a row in bytes.
        row_len: usize,
        /// The distance between the starts of two consecutive rows in bytes.
        stride: usize,
    },

    /// An operand's address or stride is not aligned to its elements or indices.
    #[error("{items} at {address:#x} with a stride of {stride} bytes are not aligned to {align} bytes")]
    Misaligned {
        /// The kind of items that are misaligned: rows, indices or elements.
        items: &'static str,
        /// The address of the operand.
        address: u64,
        /// The distance in bytes between the starts of two consecutive rows or elements of the operand.
        stride: usize,
        /// The required alignment of address and stride in bytes.
        align: usize,
    },

    /// The element type does not support the reduction operation.
    #[error("cannot compute {op} of {dtype}: bitwise operations need integers, the others need numbers")]
    OpNotForType {
        /// The reduction operation.
        op: ReduceOp,
        /// The element type.
        dtype: Dtype,
    },

    /// The input and the output of a call overlap, but the call is not in place: the input is neither the output nor, in an
    /// all-gather, this rank's part of the output. The input of a gather is its indices.
    #[error(
        "{len} bytes of input at {input:#x} overlap the output at {output:#x}, but the call is not in place"
    )]
    Overlap {
        /// The address in memory of the input.
        input: u64,
        /// The address in memory of the output.
        output: u64,
        /// The length of the input in bytes.
        len: u64,
    },

    /// The requested lane (sequence of collective calls) does not exist.
    #[error("there is no lane {index} (sequence of collective calls): the number of lanes is {lanes}")]
    NoSuchLane {
        /// The index of the requested lane (sequence of collective calls).
        index: usize,
        /// The number of lanes of the symmetric memory.
        lanes: usize,
    },

    /// The collective kernels of the ranks on one device cannot be resident at the same time, so they would deadlock.
    #[error(
        "collective kernels would deadlock: {sharing} ranks share the device of rank {rank}, which can run only {fits} blocks at once"
    )]
    NotResident {
        /// A rank on the device that too many ranks share.
        rank: Rank,
        /// The number of ranks on the device of `rank`.
        sharing: usize,
        /// The number of blocks of collective kernels that the device can run at once.
        fits: u32,
    },

    /// The window (memory of all ranks) that was passed to a collective call belongs to another group of ranks.
    #[error("the window belongs to another group of ranks")]
    ForeignWindow,

    /// A window would have no bytes on any rank.
    #[error("the window has no bytes on any rank")]
    EmptyWindow,

    /// The requested bytes are not within a rank's part of a window.
    #[error(
        "cannot use {len} bytes at offset {offset} of rank {rank}'s part of the window: only {available} bytes are available"
    )]
    NoPart {
        /// The rank whose part of the window is too short.
        rank: Rank,
        /// The offset of the requested bytes in that rank's part.
        offset: usize,
        /// The number of requested bytes.
        len: usize,
        /// The number of bytes from that offset on that are available on that rank.
        available: usize,
    },

    /// The reserved addresses have no free range that is long enough for a window.
    #[error("cannot allocate addresses for a window of {len} bytes: the longest free range has {free} bytes")]
    NoWindowSpace {
        /// The length of the window in bytes.
        len: usize,
        /// The length of the longest free range of addresses in bytes.
        free: usize,
    },

    /// A recording of the memory of captured calls is active already.
    #[error("a recording of the memory of captured calls is active already")]
    Recording,

    /// An environment variable has an invalid value.
    #[error("the environment variable `{name}` has the invalid value `{value}`: {reason}")]
    Environment {
        /// The name of the environment variable.
        name: &'static str,
        /// The value of the environment variable.
        value: String,
        /// A phrase that describes the valid values of the environment variable.
        reason: &'static str,
    },
}

/// Returns the message of the error for an index that names no row.
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
    /// Returns the stable numeric code of this error, which is equal in C, in Python and between processes. Codes below 1,000 are
    /// those of [devices and memory](wholemem_hal::Error::code), and codes from 1,100 on those of [ranks](wholemem_comm::Error::number).
    #[must_use]
    pub fn code(&self) -> u32 {
        match self {
            Self::Hal(error) => error.code(),
            Self::OnRank { code, .. } => *code,
            // The code 1000 was that of all errors of ranks in earlier versions, and is not reused.
            Self::Comm(error) => error.number(),
            Self::RanksDisagree { .. } => 1001,
            Self::NoRanks => 1002,
            Self::RanksDiffer { .. } => 1003,
            Self::TooManyRows => 1004,
            Self::EmptyRow => 1005,
            Self::TooLong { .. } | Self::StagedTooLong { .. } => 1006,
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
            // The code 1028 was used by an error of earlier versions, and is not reused.
            Self::SavesDiffer { .. } => 1029,
            Self::Os(_) => 1030,
            Self::CountDiffers { .. } => 1031,
            Self::PartialRow { .. } => 1032,
            Self::Recording => 1040,
        }
    }

    /// Returns a hint for the user on how to resolve the error, if there is one.
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
            Self::Recording => Some("finish the other recording first"),
            Self::NotResident { .. } => Some("use fewer ranks on one device, or fewer lanes"),
            _ => None,
        }
    }
}
