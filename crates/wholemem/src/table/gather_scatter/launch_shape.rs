//! Chooses the grid of a gather or scatter on a GPU: the request is divided into tiles of units, and each warp copies one tile at
//! a time.
//!
//! A unit is as wide as the alignment of all addresses allows; a tile has as many units as a warp keeps in flight. Rows
//! without common alignment are staged in shared memory: they are read in aligned vectors and written in others
//! (`kernels/rows.cu`). The sizes were fastest in measurements on an H200, for rows of 1 byte to 2 MiB.
//!
//! A CPU kernel processes the whole request in one call and uses only the type of the indices, so nothing else is computed for it
//! (`cpu_launch`).

use wholemem_hal::LaunchShape;

use super::RowOp;
use super::plan::KernelRequest;
use crate::abi::{
    ADD_TURNS, CONVERT_TURNS_1, CONVERT_TURNS_4, Division, ElementsRequest, IndexType, ROW_THREADS,
    ROW_TURNS_1, ROW_TURNS_4, ROW_TURNS_8, ROW_TURNS_16, RowTiles, RowsRequest, STAGE_LEN, STAGE_PARTS,
    STAGE_TURNS, WARP,
};

/// The number of warps in one block of a gather or scatter kernel.
const WARPS: u32 = ROW_THREADS / WARP;

/// The maximum number of blocks in one dimension of the grid.
const MAX_BLOCKS: u64 = (1 << 31) - 1;

/// The length in bytes of a vector with which rows are staged in shared memory, and the number of vectors that a warp stages at a
/// time.
const VECTOR_LEN: u64 = 16;
const STAGED_VECTORS: u64 = (WARP * STAGE_TURNS) as u64;

/// The maximum length in bytes of a part of a row that is staged in shared memory. A part of this length fits even if it begins
/// and ends within vectors.
const MAX_PART_LEN: u64 = 1984;

/// The minimum length in bytes of rows that are staged in shared memory if their addresses are multiples of four, but not of
/// eight, in a gather and in a scatter.
const MIN_STAGED_GATHER: u64 = 192;
const MIN_STAGED_SCATTER: u64 = 1024;

/// The lengths in bytes of rows whose first and last sectors are prefetched before they are written. For longer rows the prefetch
/// does not matter.
const PREFETCHED_LENS: std::ops::RangeInclusive<u64> = 32..=8192;

/// The length in bytes of a sector, the unit in which GPU memory is written.
const SECTOR_LEN: u64 = 32;

/// The grid and the tiles with which a gather or scatter kernel is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KernelLaunch {
    pub(crate) launch: LaunchShape,
    pub(crate) tiles: RowTiles,
}

/// Chooses the grid and the tiles with which a GPU runs a gather or scatter request.
pub(crate) fn gpu_launch(op: RowOp, request: &KernelRequest, index: IndexType) -> KernelLaunch {
    let (tiles, shared_len) = match (op, request) {
        (RowOp::ScatterAdd, KernelRequest::Elements(request)) => add(request),
        (_, KernelRequest::Elements(request)) => convert(request),
        (op, KernelRequest::Rows(request)) => rows(op, request),
    };
    let tiles = RowTiles { index_len: number(index.len() as u64), ..tiles };
    let blocks = tiles.tiles.div_ceil(WARPS.into()).max(1);
    let lines = blocks.div_ceil(MAX_BLOCKS);
    let grid = [number(blocks.div_ceil(lines)), number(lines), 1];
    KernelLaunch {
        launch: LaunchShape {
            grid,
            block: [ROW_THREADS, 1, 1],
            shared_len: number(shared_len),
            programmatic: false,
        },
        tiles,
    }
}

/// Returns the launch of any gather or scatter request on the CPU: one call for the whole request.
pub(crate) fn cpu_launch(index: IndexType) -> KernelLaunch {
    let tiles = RowTiles { index_len: number(index.len() as u64), ..RowTiles::default() };
    KernelLaunch { launch: LaunchShape::linear(1, 1), tiles }
}

/// Returns the tiles for rows that are copied as bytes, and the bytes of shared memory that a block needs.
fn rows(op: RowOp, request: &RowsRequest) -> (RowTiles, u64) {
    let RowsRequest { count, row_len, rows, rows_stride, .. } = *request;
    let bits = table_bits(request) | rows | rows_stride | row_len;
    let width = 1 << bits.trailing_zeros().min(4);
    let stages = match width {
        16 | 8 => false,
        4 => row_len >= if op == RowOp::Gather { MIN_STAGED_GATHER } else { MIN_STAGED_SCATTER },
        _ => row_len > 8,
    };
    let (tiles, shared_len) = if stages {
        (staged(count, row_len), u64::from(WARPS * STAGE_LEN))
    } else {
        let turns = match width {
            16 => ROW_TURNS_16,
            8 => ROW_TURNS_8,
            4 => ROW_TURNS_4,
            _ => ROW_TURNS_1,
        };
        flat(count, row_len / u64::from(width), turns, width)
    };
    let cut = !(table_bits(request) | row_len).is_multiple_of(SECTOR_LEN);
    let edges = u32::from(op == RowOp::Scatter && cut && PREFETCHED_LENS.contains(&row_len));
    (RowTiles { edges, ..tiles }, shared_len)
}

/// Returns the tiles for rows whose elements are converted, and the bytes of shared memory that a block needs. A unit is four
/// elements if their alignment allows it.
fn convert(request: &ElementsRequest) -> (RowTiles, u64) {
    let ElementsRequest { rows, elements, .. } = request;
    let [table_len, dense_len] = element_lens(request);
    let fours = |bits: u64, len: u64| bits.is_multiple_of((4 * len).min(VECTOR_LEN));
    let dense_bits = rows.rows | rows.rows_stride;
    if elements.is_multiple_of(4) && fours(table_bits(rows), table_len) && fours(dense_bits, dense_len) {
        flat(rows.count, elements / 4, CONVERT_TURNS_4, 4)
    } else {
        flat(rows.count, *elements, CONVERT_TURNS_1, 1)
    }
}

/// Returns the tiles for rows that are added, and the bytes of shared memory that a block needs. A unit is a word of several
/// elements if type and alignment allow it.
fn add(request: &ElementsRequest) -> (RowTiles, u64) {
    let ElementsRequest { rows, elements, table_dtype, rows_dtype } = request;
    let bits = table_bits(rows) | rows.rows | rows.rows_stride | rows.row_len;
    let width = match element_lens(request)[0] {
        _ if table_dtype != rows_dtype => 0,
        8 => 8,
        _ if bits.is_multiple_of(4) => 4,
        _ => 0,
    };
    let units = if width == 0 { *elements } else { rows.row_len / u64::from(width) };
    flat(rows.count, units, ADD_TURNS, width)
}

/// Returns tiles of units that are numbered through all rows, and the bytes of shared memory in which a block stores the address
/// of each unit.
fn flat(count: u64, row_units: u64, turns: u32, width: u32) -> (RowTiles, u64) {
    let units = WARP * turns;
    let row_units = row_units.max(1);
    let (magic, shift) = division(row_units);
    let shorter = number(row_units.min(units.into()));
    let tiles = RowTiles {
        tiles: count.saturating_mul(row_units).div_ceil(units.into()),
        row_units,
        magic,
        shift,
        units,
        unit_magic: (1_u32 << 31).div_ceil(shorter),
        parts: 1,
        width,
        ..RowTiles::default()
    };
    (tiles, u64::from(WARPS * units) * 8)
}

/// Returns tiles of parts of rows that are staged in shared memory, with a part length that uses most of a warp's shared memory.
fn staged(count: u64, row_len: u64) -> RowTiles {
    let fewest = row_len.div_ceil(MAX_PART_LEN);
    let candidates = (fewest..fewest + 6).map(|parts| part_len(row_len, parts));
    // Among part lengths that use about as much shared memory, choose the longest, because each part has unaligned ends.
    let (mut len, mut most) = (part_len(row_len, fewest), 0);
    for candidate in candidates {
        let held = parts_of_tile(candidate) * row_len / row_len.div_ceil(candidate);
        if held > most + most / 16 {
            (len, most) = (candidate, held);
        }
    }
    let parts = row_len.div_ceil(len);
    let (magic, shift) = division(parts);
    RowTiles {
        tiles: count.saturating_mul(parts).div_ceil(parts_of_tile(len)),
        row_units: row_len,
        magic,
        shift,
        units: number(len),
        parts: number(parts),
        ..RowTiles::default()
    }
}

/// Returns the length in bytes of each of `parts` parts of a row. Parts begin at a cache line if the row does.
fn part_len(row_len: u64, parts: u64) -> u64 {
    row_len.div_ceil(parts).next_multiple_of(64).min(row_len).min(MAX_PART_LEN)
}

/// Returns the number of row parts of `len` bytes that a warp stages at a time. Each part may begin and end within a vector.
fn parts_of_tile(len: u64) -> u64 {
    (STAGED_VECTORS / ((len + 2 * (VECTOR_LEN - 1)) / VECTOR_LEN)).min(STAGE_PARTS.into())
}

/// Returns the bitwise OR of all offsets of the table's rows, whose trailing zeros give the common alignment of the rows. Chunks
/// of a table begin at granules.
fn table_bits(request: &RowsRequest) -> u64 {
    let table = &request.table;
    table.stride | if table.chunks == 1 { table.base } else { table.offset }
}

fn element_lens(request: &ElementsRequest) -> [u64; 2] {
    [request.table_dtype, request.rows_dtype].map(|dtype| dtype.len() as u64)
}

fn division(by: u64) -> (u64, u32) {
    Division::by(by).map_or((0, 0), |division| (division.magic, division.shift))
}

/// Converts a number of blocks, units, parts or bytes of a launch to 32 bits. It is below 2^32 for all rows that fit in device
/// memory.
fn number(small: u64) -> u32 {
    u32::try_from(small).expect("the number is below 2^32 for all rows that fit in device memory")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Dtype, GlobalRef};

    /// Returns the units of a tile as `own_tile` and `row_of` of the kernels compute them: the row of each unit, and the number
    /// of the unit in that row.
    fn units_of(tiles: &RowTiles, count: u64, tile: u64) -> Vec<(u64, u64)> {
        let quotient = |n: u64| Division::by(tiles.row_units).map_or(n, |division| division.quotient(n));
        let start = tile * u64::from(tiles.units);
        let row = quotient(start);
        let before = start - row * tiles.row_units;
        let most = tiles.row_units.min(tiles.units.into());
        let skew = most - most.min(tiles.row_units - before);
        let units = u64::from(tiles.units).min(count * tiles.row_units - start);
        let small = |n: u64| (2 * n * u64::from(tiles.unit_magic)) >> 32;
        (0..units)
            .map(|unit| (small(unit + skew), unit))
            .map(|(of, unit)| (row + of, before + unit - of * tiles.row_units))
            .collect()
    }

    /// Returns the row parts of a tile as `move_staged` in the kernels computes them: the row, the first byte and the length of
    /// each part.
    fn parts_of(tiles: &RowTiles, count: u64, tile: u64) -> Vec<(u64, u64, u64)> {
        let quotient = |n: u64| Division::by(tiles.parts.into()).map_or(n, |division| division.quotient(n));
        let (len, parts) = (u64::from(tiles.units), u64::from(tiles.parts));
        let first = tile * parts_of_tile(len);
        (first..(first + parts_of_tile(len)).min(count * parts))
            .map(|part| (quotient(part), (part - quotient(part) * parts) * len))
            .map(|(row, byte)| (row, byte, len.min(tiles.row_units - byte)))
            .collect()
    }

    fn request(count: u64, row_len: u64, address: u64) -> RowsRequest {
        let table = GlobalRef::continuous(4096, 10, row_len);
        RowsRequest { table, indices: 0, count, rows: address, rows_stride: row_len, row_len, bad: 0 }
    }

    fn rows_shape(op: RowOp, count: u64, row_len: u64, address: u64) -> KernelLaunch {
        gpu_launch(op, &KernelRequest::Rows(request(count, row_len, address)), IndexType::I64)
    }

    proptest! {
        #[test]
        fn every_unit_is_in_one_tile(count in 1_u64..300, row_units in 1_u64..700, turns in 2_u32..=8) {
            let (tiles, _) = flat(count, row_units, turns, 16);
            let all: Vec<_> = (0..tiles.tiles).flat_map(|tile| units_of(&tiles, count, tile)).collect();
            let naive: Vec<_> = (0..count).flat_map(|row| (0..row_units).map(move |unit| (row, unit))).collect();
            prop_assert_eq!(all, naive);
        }

        #[test]
        fn the_start_of_tiles_is_exact_for_large_numbers(row_units in 1_u64..1 << 40, far in any::<u64>()) {
            let count = (1 << 62) / row_units;
            let (tiles, _) = flat(count, row_units, 3, 16);
            let tile = far % tiles.tiles;
            let start = tile * 96;
            prop_assert_eq!(units_of(&tiles, count, tile)[0], (start / row_units, start % row_units));
        }

        #[test]
        fn every_byte_of_a_staged_row_is_in_one_part(count in 1_u64..40, row_len in 9_u64..20_000) {
            let tiles = staged(count, row_len);
            prop_assert!(u64::from(tiles.units) <= MAX_PART_LEN);
            let mut next = (0, 0);
            for (row, byte, len) in (0..tiles.tiles).flat_map(|tile| parts_of(&tiles, count, tile)) {
                prop_assert_eq!((row, byte), next);
                prop_assert!(len > 0);
                next = if byte + len == row_len { (row + 1, 0) } else { (row, byte + len) };
            }
            prop_assert_eq!(next, (count, 0));
        }

        #[test]
        fn staged_parts_fit_in_the_shared_memory_of_a_warp(row_len in 1_u64..1 << 40) {
            let len = u64::from(staged(1, row_len).units);
            let vectors = parts_of_tile(len) * ((len + 2 * (VECTOR_LEN - 1)) / VECTOR_LEN);
            prop_assert!((1..=STAGED_VECTORS).contains(&vectors), "{} bytes: {} vectors", len, vectors);
        }
    }

    #[test]
    fn units_have_the_common_alignment_of_all_addresses() {
        let width = |row_len, address| rows_shape(RowOp::Gather, 10, row_len, address).tiles.width;
        assert_eq!([width(64, 4096), width(64, 4104), width(64, 4100), width(64, 4098)], [16, 8, 4, 0]);
        assert_eq!([width(24, 4096), width(12, 4096), width(6, 4096), width(3, 4096)], [8, 4, 2, 1]);
        let mut view = request(10, 64, 4096);
        view.table = GlobalRef { chunks: 3, ..view.table }.part(1, 5, 8);
        assert_eq!(gpu_launch(RowOp::Gather, &KernelRequest::Rows(view), IndexType::I64).tiles.width, 8);
    }

    #[test]
    fn long_rows_without_common_alignment_are_staged() {
        assert_eq!(rows_shape(RowOp::Gather, 10, 100, 4096).tiles.width, 4);
        assert_eq!(rows_shape(RowOp::Gather, 10, 1500, 4096).tiles.width, 0);
        assert_eq!(rows_shape(RowOp::Scatter, 10, 500, 4096).tiles.width, 4);
        assert_eq!(rows_shape(RowOp::Gather, 10, 130, 4096).tiles.width, 0);
    }

    #[test]
    fn ends_are_prefetched_if_rows_share_sectors() {
        let edges = |op, row_len| rows_shape(op, 10, row_len, 4096).tiles.edges;
        assert_eq!(
            [edges(RowOp::Scatter, 100), edges(RowOp::Scatter, 96), edges(RowOp::Gather, 100)],
            [1, 0, 0]
        );
        assert_eq!([edges(RowOp::Scatter, 16), edges(RowOp::Scatter, 1 << 20)], [0, 0]);
    }

    #[test]
    fn large_grids_use_two_dimensions() {
        let gpu_launch = rows_shape(RowOp::Gather, 1 << 43, 16, 4096);
        let [x, y, z] = gpu_launch.launch.grid.map(u64::from);
        assert!(x <= MAX_BLOCKS && y <= 65_535 && z == 1);
        assert!(x * y * u64::from(WARPS) >= gpu_launch.tiles.tiles, "{x} times {y} blocks");
        assert_eq!(rows_shape(RowOp::Gather, 1, 16, 4096).launch.grid, [1, 1, 1]);
    }

    #[test]
    fn shared_memory_is_within_48_kib() {
        for row_len in [1, 8, 16, 100, 130, 1500] {
            let len = rows_shape(RowOp::Gather, 10, row_len, 4096).launch.shared_len;
            assert!((8 * 96 * 8..=48 << 10).contains(&len), "{row_len}: {len}");
        }
    }

    #[test]
    fn conversions_use_four_elements_and_additions_words_if_aligned() {
        let elements = |op, elements, table: Dtype, dense: Dtype| {
            let mut rows = request(10, elements * table.len() as u64, 4096);
            rows.rows_stride = elements * dense.len() as u64;
            let request = ElementsRequest { rows, elements, table_dtype: table, rows_dtype: dense };
            let tiles = gpu_launch(op, &KernelRequest::Elements(request), IndexType::I32).tiles;
            (tiles.width, tiles.row_units)
        };
        assert_eq!(elements(RowOp::Gather, 64, Dtype::F16, Dtype::F32), (4, 16));
        assert_eq!(elements(RowOp::Gather, 62, Dtype::F16, Dtype::F32), (1, 62));
        assert_eq!(elements(RowOp::ScatterAdd, 6, Dtype::F16, Dtype::F16), (4, 3));
        assert_eq!(elements(RowOp::ScatterAdd, 7, Dtype::F16, Dtype::F16), (0, 7));
        assert_eq!(elements(RowOp::ScatterAdd, 7, Dtype::F64, Dtype::F64), (8, 7));
        assert_eq!(elements(RowOp::ScatterAdd, 7, Dtype::F64, Dtype::F32), (0, 7));
    }

    #[test]
    fn the_tiles_have_the_length_of_an_index() {
        for index in [IndexType::I32, IndexType::I64] {
            let gpu_launch = gpu_launch(RowOp::Gather, &KernelRequest::Rows(request(1, 8, 4096)), index);
            for tiles in [gpu_launch.tiles, cpu_launch(index).tiles] {
                assert_eq!(IndexType::of_len(tiles.index_len), Some(index));
            }
        }
    }
}
