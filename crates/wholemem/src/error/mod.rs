//! The errors of this crate, with the values of the failed operation.

mod file;

use wholemem_comm::Rank;

pub use file::{FileError, FileProblem};

use crate::dtype::{Dtype, ReduceOp};

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong with memory over many ranks.
///
/// A collective call that fails because of one rank fails on all of them with [`Error::OnRank`]; nothing is left
/// behind, and the group still stands. [`Error::Comm`] is a group that does not.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A device, its memory or its streams, on this rank alone.
    #[error(transparent)]
    Hal(#[from] wholemem_hal::Error),

    /// The group.
    #[error(transparent)]
    Comm(#[from] wholemem_comm::Error),

    /// A file of rows.
    #[error(transparent)]
    File(#[from] FileError),

    /// Whoever watched a long call ended it.
    #[error("it was interrupted")]
    Interrupted,

    /// What the lowest failing rank met with in a collective call. The same on every rank.
    #[error("rank {rank} failed: {why}")]
    OnRank {
        /// Which rank.
        rank: Rank,
        /// The [code](Error::code) of its error.
        code: u32,
        /// Its error, in words.
        why: String,
        /// The [hint](Error::hint) of its error.
        hint: Option<String>,
    },

    /// A collective call in which a rank asks for something else than rank 0.
    #[error(
        "rank {rank} makes another call than rank 0, or means other memory: a collective call is the same on all ranks"
    )]
    Differs {
        /// The lowest such rank.
        rank: Rank,
    },

    /// A load in which a rank opened another save, or another version of a file, than rank 0. The same on every rank.
    #[error("rank {rank} opened another save, or another version of the file, than rank 0")]
    SavesDiffer {
        /// The lowest such rank.
        rank: Rank,
    },

    /// A partition over no ranks.
    #[error("there must be at least one rank")]
    NoRanks,

    /// A partition given for another number of ranks than there are.
    #[error("rows were given for {given} ranks, and there are {ranks}")]
    RanksDiffer {
        /// For how many ranks rows were given.
        given: usize,
        /// How many there are.
        ranks: u32,
    },

    /// A partition whose rows are not as many as the memory's.
    #[error("the ranks were given {given} rows, and there are {rows}")]
    RowsDiffer {
        /// How many the ranks were given.
        given: u64,
        /// How many there are.
        rows: u64,
    },

    /// More rows than signed indices can number.
    #[error("there are more than 2^63 - 1 rows")]
    TooManyRows,

    /// Rows of no bytes.
    #[error("a row has no bytes")]
    EmptyRow,

    /// Memory that is longer than an address space.
    #[error("{rows} rows of {row_len} bytes are longer than the address space")]
    TooLong {
        /// How many rows.
        rows: u64,
        /// How many bytes each.
        row_len: usize,
    },

    /// A shape without dimensions.
    #[error("a tensor has at least one dimension: its rows")]
    NoDimensions,

    /// Rows or columns that a tensor does not have.
    #[error("cannot use {what} {start}..{end}: there are {count}")]
    OutOfRange {
        /// Rows or columns.
        what: &'static str,
        /// The first one asked for.
        start: u64,
        /// The one behind the last.
        end: u64,
        /// How many there are.
        count: u64,
    },

    /// No range of addresses that is free on all ranks was found.
    #[error("no {len} bytes of addresses are free on all ranks: {tried} places were tried")]
    NoCommonAddress {
        /// How long it must be.
        len: usize,
        /// How many places were tried.
        tried: u32,
    },

    /// An index that names no row: it is negative, or not below the number of rows.
    #[error("{}", out_of_range(*position, *index, *rows))]
    BadIndex {
        /// The first position among the indices that holds such a one.
        position: u64,
        /// The index there. A call on a GPU that did not wait has left none.
        index: Option<i64>,
        /// How many rows there are: valid indices are below. Not known if calls on a GPU that did not wait had views of
        /// different lengths.
        rows: Option<u64>,
    },

    /// Elements of different types, where no conversion was asked for.
    #[error("the table holds {table} and the rows {rows}: ask for a conversion, or give rows of {table}")]
    TypesDiffer {
        /// What the table holds.
        table: Dtype,
        /// What the rows hold.
        rows: Dtype,
    },

    /// A conversion between a float and an integer.
    #[error("cannot convert {from} to {to}: only floats to floats, and integers to integers")]
    NotConvertible {
        /// The type there is.
        from: Dtype,
        /// The type wanted.
        to: Dtype,
    },

    /// Rows or indices in less memory than they take.
    #[error("{count} {what} take {needed} bytes, and there are {len}")]
    TooShort {
        /// Rows or indices.
        what: &'static str,
        /// How many.
        count: u64,
        /// What they take.
        needed: u128,
        /// What there is.
        len: usize,
    },

    /// Rows that would overlap.
    #[error("rows of {row_len} bytes cannot follow each other every {stride} bytes")]
    StrideTooShort {
        /// How long a row is.
        row_len: usize,
        /// From one to the next.
        stride: usize,
    },

    /// Elements or indices at an address that their type does not allow.
    #[error("{what} at {address:#x}, {stride} bytes apart, are not aligned to {align} bytes")]
    Misaligned {
        /// Rows or indices.
        what: &'static str,
        /// Where they are.
        address: u64,
        /// From one to the next.
        stride: usize,
        /// What the address and the stride must be multiples of.
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

    /// An input and an output that overlap without being the same.
    #[error("{len} bytes of input at {input:#x} overlap the output at {output:#x}, and are not the same")]
    Overlap {
        /// Where the input is.
        input: u64,
        /// Where the output is.
        output: u64,
        /// How long the input is.
        len: u64,
    },

    /// A lane that there is not.
    #[error("there is no lane {index}: there are {lanes}")]
    NoSuchLane {
        /// The lane asked for.
        index: usize,
        /// How many there are.
        lanes: usize,
    },

    /// Ranks on one device whose kernels cannot run at the same time, and would wait for each other for ever.
    #[error("{sharing} ranks share the device of rank {rank}, which runs {fits} blocks at once")]
    NotResident {
        /// A rank on that device.
        rank: Rank,
        /// How many ranks it has.
        sharing: usize,
        /// How many blocks it runs at once.
        fits: u32,
    },

    /// A window of another group.
    #[error("the window belongs to another group")]
    ForeignWindow,

    /// A window without a byte on any rank.
    #[error("no rank has a byte of the window")]
    EmptyWindow,

    /// Bytes of a window that a rank has not.
    #[error("cannot use {len} bytes at {offset} of rank {rank}'s part of the window: it has {has} there")]
    NoPart {
        /// The rank.
        rank: Rank,
        /// Where they would begin.
        offset: usize,
        /// How many.
        len: usize,
        /// How many there are.
        has: usize,
    },

    /// No addresses left for windows.
    #[error("cannot place a window of {len} bytes: {free} bytes of addresses are free on each rank")]
    NoWindowSpace {
        /// How long it is.
        len: usize,
        /// The longest free range.
        free: usize,
    },

    /// A variable of the environment that makes no sense.
    #[error("`{name}` is `{value}`: {why}")]
    Environment {
        /// Its name.
        name: &'static str,
        /// What it says.
        value: String,
        /// What it should say.
        why: &'static str,
    },
}

/// The words for an index that names no row, with what is known of it.
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
    /// A number for this error that never changes: the same in C, in Python and between processes. Errors of devices and
    /// memory have [numbers of their own](wholemem_hal::Error::code), below 1,000.
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
        }
    }

    /// What a person can do about it, where something can be done.
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
