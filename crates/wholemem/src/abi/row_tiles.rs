//! The tiles into which a GPU divides the rows of a gather or scatter: the second argument of its kernels.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The tiles into which the rows of a gather or scatter are divided. One warp copies one tile.
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
    /// The number of tiles in the gather or scatter.
    pub tiles: u64,
    /// The number of units (of `width` bytes each) in a row.
    pub row_units: u64,
    /// The multiplier with which kernels divide by `row_units`, or by `parts` if rows are staged in shared memory; unused if the
    /// divisor is one.
    pub magic: u64,
    /// The shift of the division by `row_units` or `parts` that uses `magic`.
    pub shift: u32,
    /// The number of units in a tile; if rows are staged in shared memory, the number of bytes in a part of a row.
    pub units: u32,
    /// 2^31 divided by `row_units`, or by `units` if a row is longer than a tile, rounded up. With this factor kernels find the
    /// row of a unit in a tile.
    pub unit_magic: u32,
    /// The number of parts into which each row is divided, if rows are staged in shared memory.
    pub parts: u32,
    /// The number of bytes in a unit, to which all addresses of rows are aligned. Zero means that units are bytes and rows are
    /// staged in shared memory.
    pub width: u32,
    /// One if kernels fetch the sectors that a row shares with its neighbour rows before they write the row; otherwise zero.
    pub edges: u32,
    /// The number of bytes in an index of the gather or scatter: four or eight.
    pub index_len: u32,
    /// Padding, which must be zero.
    pub reserved: u32,
}

layout!(RowTiles: 56 {
    tiles: 0, row_units: 8, magic: 16, shift: 24, units: 28, unit_magic: 32, parts: 36, width: 40, edges: 44,
    index_len: 48, reserved: 52,
});

/// The number of threads in a warp.
pub const WARP: u32 = 32;

/// The number of threads in one block of a gather or scatter kernel.
pub const ROW_THREADS: u32 = 256;

/// The number of 16-byte units that each thread copies in one tile of a gather or scatter.
pub const ROW_TURNS_16: u32 = 3;
/// The number of 8-byte units that each thread copies in one tile of a gather or scatter.
pub const ROW_TURNS_8: u32 = 6;
/// The number of 4-byte units that each thread copies in one tile of a gather or scatter.
pub const ROW_TURNS_4: u32 = 8;
/// The number of units of 1 or 2 bytes that each thread copies in one tile of a gather or scatter.
pub const ROW_TURNS_1: u32 = 4;

/// The number of four-element units that each thread converts in one tile of a gather or scatter with type conversion.
pub const CONVERT_TURNS_4: u32 = 2;
/// The number of single elements that each thread converts in one tile of a gather or scatter with type conversion.
pub const CONVERT_TURNS_1: u32 = 4;

/// The number of units that each thread adds in one tile of a scatter-add.
pub const ADD_TURNS: u32 = 8;

/// The number of 16-byte vectors that each thread stages in shared memory at a time in a gather or scatter.
pub const STAGE_TURNS: u32 = 4;

/// The maximum number of row parts that a warp stages in shared memory at a time in a gather or scatter.
pub const STAGE_PARTS: u32 = 64;

/// The number of bytes of shared memory in which a warp stages rows: its vectors and one on either side, and two addresses and a
/// length for each row part.
pub const STAGE_LEN: u32 = (WARP * STAGE_TURNS + 2) * 16 + STAGE_PARTS * (8 + 8 + 4);
