//! How a GPU divides the rows of a request into tiles: the second argument of the kernels of gather and scatter.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// How the rows of a request are divided into tiles, each of which one warp copies.
///
/// The units of all rows are numbered consecutively. A tile may begin and end within a row:
///
/// ```text
///   rows      ...  row 7  |     row 8     |     row 9     |   row 10  ...     a row has 5 units
///   units        2  3  4    0  1  2  3  4   0  1  2  3  4    0  1  2          a tile has 16
///   lanes        0  1  2    3  4  5  6 ...                        15          and begins at unit 2 of row 7
/// ```
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, IntoBytes, FromBytes, Immutable, KnownLayout)]
pub struct RowTiles {
    /// The number of tiles.
    pub tiles: u64,
    /// Units of a row.
    pub row_units: u64,
    /// The multiplier of the division by `row_units`, or by `parts` if rows are staged; unused if the divisor is one.
    pub magic: u64,
    /// The shift of that division.
    pub shift: u32,
    /// Units of a tile; if rows are staged, bytes of a part.
    pub units: u32,
    /// 2^31 divided by `row_units`, or by `units` if a row is longer than a tile; rounded up.
    pub unit_magic: u32,
    /// Parts of a row, if rows are staged.
    pub parts: u32,
    /// Bytes of a unit, of which all addresses are multiples; zero: units are bytes, and rows are staged.
    pub width: u32,
    /// One to fetch the sectors that a row shares with its neighbours before the row is written.
    pub edges: u32,
    /// Bytes of an index: four or eight.
    pub index_len: u32,
    /// Zero.
    pub reserved: u32,
}

layout!(RowTiles: 56 {
    tiles: 0, row_units: 8, magic: 16, shift: 24, units: 28, unit_magic: 32, parts: 36, width: 40, edges: 44,
    index_len: 48, reserved: 52,
});

/// Threads of a warp.
pub const WARP: u32 = 32;

/// Threads of a block.
pub const ROW_THREADS: u32 = 256;

/// Units of 16 bytes that each thread copies in a tile.
pub const ROW_TURNS_16: u32 = 3;
/// Units of 8 bytes that each thread copies in a tile.
pub const ROW_TURNS_8: u32 = 6;
/// Units of 4 bytes that each thread copies in a tile.
pub const ROW_TURNS_4: u32 = 8;
/// Units of 1 or 2 bytes that each thread copies in a tile.
pub const ROW_TURNS_1: u32 = 4;

/// Units of four elements that each thread converts in a tile.
pub const CONVERT_TURNS_4: u32 = 2;
/// Units of one element that each thread converts in a tile.
pub const CONVERT_TURNS_1: u32 = 4;

/// Units that each thread adds in a tile.
pub const ADD_TURNS: u32 = 8;

/// Vectors of 16 bytes that each thread stages.
pub const STAGE_TURNS: u32 = 4;

/// The maximum number of parts of rows that a warp stages in shared memory at a time.
pub const STAGE_PARTS: u32 = 64;

/// Bytes of shared memory in which a warp stages: its vectors and one on either side, two addresses and a length for each part.
pub const STAGE_LEN: u32 = (WARP * STAGE_TURNS + 2) * 16 + STAGE_PARTS * (8 + 8 + 4);
