//! The errors of this crate, with the values of the failed operation.

mod file;

use wholemem_comm::Rank;

pub use file::{FileError, FileProblem};

use crate::dtype::{Dtype, ReduceOp};

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The errors of memory over all ranks.
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

    /// The operating system refused something.
    #[error(transparent)]
    Os(#[from] wholemem_os::Error),

    /// A file of rows is invalid or cannot be accessed.
    #[error(transparent)]
    File(#[from] FileError),

    /// The watch callback ended a long call.
    #[error("it was interrupted")]
    Interrupted,

    /// The error of the lowest rank that failed in a collective call. The same on every rank.
    #[error("rank {rank} failed: {why}")]
    OnRank {
        /// The rank.
        rank: Rank,
        /// The [code](Error::code) of its error.
        code: u32,
        /// The message of its error.
        why: String,
        /// The [hint](Error::hint) of its error.
        hint: Option<String>,
    },

    /// A rank made another collective call than rank 0, or with other arguments.
    #[error(
        "rank {rank} makes another call than rank 0, or means other memory: a collective call is the same on all ranks"
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
    #[error("rows were given for {given} ranks, and there are {ranks}")]
    RanksDiffer {
        /// The number of ranks of the partition.
        given: usize,
        /// The number of ranks of the group.
        ranks: u32,
    },

    /// A partition with another number of rows than the memory.
    #[error("the ranks were given {given} rows, and there are {rows}")]
    RowsDiffer {
        /// The number of rows of the partition.
        given: u64,
        /// The number of rows of the memory.
        rows: u64,
    },

    /// Signed indices cannot number as many rows.
    #[error("there are more than 2^63 - 1 rows")]
    TooManyRows,

    /// Rows of no bytes.
    #[error("a row has no bytes")]
    EmptyRow,

    /// Memory longer than an address space.
    #[error("{rows} rows of {row_len} bytes are longer than the address space")]
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
    #[error("cannot use {what} {start}..{end}: there are {count}")]
    OutOfRange {
        /// Rows or columns.
        what: &'static str,
        /// The first of them.
        start: u64,
        /// The end of the range.
        end: u64,
        /// The number of rows or columns of the tensor.
        count: u64,
    },

    /// No range of addresses is free on all ranks.
    #[error("no {len} bytes of addresses are free on all ranks: {tried} places were tried")]
    NoCommonAddress {
        /// The length of the range.
        len: usize,
        /// The number of places that were tried.
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
    #[error("the table holds {table} and the rows {rows}: ask for a conversion, or give rows of {table}")]
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
    #[error("{count} {what} take {needed} bytes, and there are {len}")]
    TooShort {
        /// Rows or indices.
        what: &'static str,
        /// The number of rows or indices.
        count: u64,
        /// The bytes that they need.
        needed: u128,
        /// The bytes that there are.
        len: usize,
    },

    /// A slice with more or fewer elements than the rows have.
    #[error("{rows} rows have {expected} elements, and the slice has {given}")]
    CountDiffers {
        /// The number of rows.
        rows: u64,
        /// The number of their elements.
        expected: u128,
        /// The number of elements of the slice.
        given: usize,
    },

    /// A slice that ends within a row.
    #[error("{given} elements are not whole rows of {row}")]
    PartialRow {
        /// The number of elements of the slice.
        given: usize,
        /// The number of elements of a row.
        row: u64,
    },

    /// Rows that would overlap.
    #[error("rows of {row_len} bytes cannot follow each other every {stride} bytes")]
    StrideTooShort {
        /// The length of a row.
        row_len: usize,
        /// The distance of rows or elements.
        stride: usize,
    },

    /// Elements or indices at a misaligned address.
    #[error("{what} at {address:#x}, {stride} bytes apart, are not aligned to {align} bytes")]
    Misaligned {
        /// Rows or indices.
        what: &'static str,
        /// Their address.
        address: u64,
        /// The distance of rows or elements.
        stride: usize,
        /// The required alignment of address and stride.
        align: usize,
    },

    /// An operation that elements of a type do not have.
    #[error("cannot take the {op} of {dtype}: operations on bits are for integers, the others for numbers")]
    OpNotForType {
        /// The operation.
        op: ReduceOp,
        /// The type.
        dtype: Dtype,
    },

    /// An input and an output that overlap but are not the same.
    #[error("{len} bytes of input at {input:#x} overlap the output at {output:#x}, and are not the same")]
    Overlap {
        /// The address of the input.
        input: u64,
        /// The address of the output.
        output: u64,
        /// The length of the input.
        len: u64,
    },

    /// A lane that does not exist.
    #[error("there is no lane {index}: there are {lanes}")]
    NoSuchLane {
        /// The requested lane.
        index: usize,
        /// The number of lanes.
        lanes: usize,
    },

    /// The kernels of the ranks on one device cannot run at the same time, and would wait for each other for ever.
    #[error("{sharing} ranks share the device of rank {rank}, which runs {fits} blocks at once")]
    NotResident {
        /// A rank on that device.
        rank: Rank,
        /// The number of ranks on it.
        sharing: usize,
        /// The number of blocks that it runs at once.
        fits: u32,
    },

    /// A window of another group.
    #[error("the window belongs to another group")]
    ForeignWindow,

    /// A window without bytes on any rank.
    #[error("no rank has a byte of the window")]
    EmptyWindow,

    /// Bytes outside a rank's part of a window.
    #[error("cannot use {len} bytes at {offset} of rank {rank}'s part of the window: it has {has} there")]
    NoPart {
        /// The rank.
        rank: Rank,
        /// Their offset.
        offset: usize,
        /// Their number.
        len: usize,
        /// The number of bytes that the rank has there.
        has: usize,
    },

    /// No addresses are left for a window.
    #[error("cannot place a window of {len} bytes: {free} bytes of addresses are free on each rank")]
    NoWindowSpace {
        /// The length of the window.
        len: usize,
        /// The longest free range.
        free: usize,
    },

    /// An environment variable with an invalid value.
    #[error("`{name}` is `{value}`: {why}")]
    Environment {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is valid.
        why: &'static str,
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
        None => format!("{which} names no row"),
    }
}

impl Error {
    /// The code of this error, which never changes: the same in C, in Python and between processes. Errors of devices and memory
    /// have [codes of their own](wholemem_hal::Error::code), below 1,000.
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
            // 1028 was that of an element type stored as another than its own.
            Self::SavesDiffer { .. } => 1029,
            Self::Os(_) => 1030,
            Self::CountDiffers { .. } => 1031,
            Self::PartialRow { .. } => 1032,
        }
    }

    /// What the user can do about it, if something can be done.
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::OnRank { hint, .. } => hint.as_deref(),
            Self::Hal(error) => error.hint(),
            Self::File(error) => error.hint(),
            Self::NotConvertible { .. } => {
                Some("move rows of the tensor's own type, and convert them before or afterwards")
            }
            Self::NoCommonAddress { .. } => Some(
                "ranks find memory by its offset too: ask for equal addresses only where pointers are shared",
            ),
            Self::SavesDiffer { .. } => Some(
                "it was replaced while the ranks opened it, or they were given different paths: load it again",
            ),
            Self::Overlap { .. } => Some("give an output of its own"),
            Self::NoWindowSpace { .. } => Some("set `WHOLEMEM_WINDOW_SPACE` to more bytes, or drop windows"),
            Self::NotResident { .. } => Some("put fewer ranks on one device, or ask for fewer lanes"),
            _ => None,
        }
    }
}
