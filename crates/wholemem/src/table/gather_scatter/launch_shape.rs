//! How a GPU runs a request: divided into tiles of units, one tile for a warp at a time.
//!
//! A unit is as wide as the alignment of all addresses allows; a tile has as many units as a warp keeps in flight. Rows
//! without common alignment are staged in shared memory: they are read in aligned vectors and written in others
//! (`kernels/rows.cu`). The sizes are those that measured best on an H200, over rows of 1 byte to 2 MiB.
//!
//! CPU kernels take the whole request in one call and use only the type of the indices, so nothing else is computed for them
//! (`whole`).

use wholemem_hal::LaunchShape;

use super::Op;
use super::plan::Request;
use crate::abi::{
    ADD_TURNS, CONVERT_TURNS_1, CONVERT_TURNS_4, Division, ElementsRequest, IndexType, ROW_THREADS,
    ROW_TURNS_1, ROW_TURNS_4, ROW_TURNS_8, ROW_TURNS_16, RowTiles, RowsRequest, STAGE_LEN, STAGE_PARTS,
    STAGE_TURNS, WARP,
};

/// Warps of a block.
const WARPS: u32 = ROW_THREADS / WARP;

/// The most blocks in a direction of the grid.
const MOST_BLOCKS: u64 = (1 << 31) - 1;

/// Bytes of a vector, and the vectors that a warp stages at a time.
const VECTOR: u64 = 16;
const VECTORS: u64 = (WARP * STAGE_TURNS) as u64;

/// The longest part of a row that is staged: with an end in other vectors at either side it still fits.
const LONGEST_PART: u64 = 1984;

/// Rows of this many bytes and more are staged where their addresses are multiples of four alone.
const STAGED_GATHER: u64 = 192;
const STAGED_SCATTER: u64 = 1024;

/// Rows from this many bytes on have their ends fetched before they are written, and those that are too long for it to
/// matter have not.
const FETCHED: std::ops::RangeInclusive<u64> = 32..=8192;

/// Bytes in which memory is written.
const SECTOR: u64 = 32;

/// What a kernel is launched with besides its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) launch: LaunchShape,
    pub(crate) tiles: RowTiles,
}

/// How a GPU runs a request.
pub(crate) fn shape(op: Op, request: &Request, index: IndexType) -> Shape {
    let (tiles, shared_len) = match (op, request) {
        (Op::ScatterAdd, Request::Elements(request)) => add(request),
        (_, Request::Elements(request)) => convert(request),
        (op, Request::Rows(request)) => rows(op, request),
    };
    let tiles = RowTiles { index_len: number(index.len() as u64), ..tiles };
    let blocks = tiles.tiles.div_ceil(WARPS.into()).max(1);
    let lines = blocks.div_ceil(MOST_BLOCKS);
    let grid = [number(blocks.div_ceil(lines)), number(lines), 1];
    Shape {
        launch: LaunchShape {
            grid,
            block: [ROW_THREADS, 1, 1],
            shared_len: number(shared_len),
            programmatic: false,
        },
        tiles,
    }
}

/// How a host runs any request: whole, in one call.
pub(crate) fn whole(index: IndexType) -> Shape {
    let tiles = RowTiles { index_len: number(index.len() as u64), ..RowTiles::default() };
    Shape { launch: LaunchShape::linear(1, 1), tiles }
}

/// Rows as bytes: how they are cut, and how much shared memory that takes.
fn rows(op: Op, request: &RowsRequest) -> (RowTiles, u64) {
    let RowsRequest { count, row_len, rows, rows_stride, .. } = *request;
    let bits = table_bits(request) | rows | rows_stride | row_len;
    let width = 1 << bits.trailing_zeros().min(4);
    let stages = match width {
        16 | 8 => false,
        4 => row_len >= if op == Op::Gather { STAGED_GATHER } else { STAGED_SCATTER },
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
    let cut = !(table_bits(request) | row_len).is_multiple_of(SECTOR);
    let edges = u32::from(op == Op::Scatter && cut && FETCHED.contains(&row_len));
    (RowTiles { edges, ..tiles }, shared_len)
}

/// Rows whose elements change their type: four of them are a unit where they are aligned together.
fn convert(request: &ElementsRequest) -> (RowTiles, u64) {
    let ElementsRequest { rows, elements, .. } = request;
    let [table_len, dense_len] = element_lens(request);
    let fours = |bits: u64, len: u64| bits.is_multiple_of((4 * len).min(VECTOR));
    let dense_bits = rows.rows | rows.rows_stride;
    if elements.is_multiple_of(4) && fours(table_bits(rows), table_len) && fours(dense_bits, dense_len) {
        flat(rows.count, elements / 4, CONVERT_TURNS_4, 4)
    } else {
        flat(rows.count, *elements, CONVERT_TURNS_1, 1)
    }
}

/// Rows that are added: in words of one or two elements or in words of several, where types and alignment allow it.
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

/// Tiles of units, counted through all rows, and the shared memory with an address for each.
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

/// Tiles of parts of rows, so long that little of a warp's shared memory stays empty.
fn staged(count: u64, row_len: u64) -> RowTiles {
    let fewest = row_len.div_ceil(LONGEST_PART);
    let candidates = (fewest..fewest + 6).map(|parts| part_len(row_len, parts));
    // The longest of about the best: each part has ends of its own.
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

/// How long each of that many parts is. They begin on lines of the cache, if the row does.
fn part_len(row_len: u64, parts: u64) -> u64 {
    row_len.div_ceil(parts).next_multiple_of(64).min(row_len).min(LONGEST_PART)
}

/// How many parts a warp stages at a time: each may begin and end within vectors.
fn parts_of_tile(len: u64) -> u64 {
    (VECTORS / ((len + 2 * (VECTOR - 1)) / VECTOR)).min(STAGE_PARTS.into())
}

/// What the addresses of the table's rows are multiples of. Chunks begin on granules.
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

/// A number that is below 2^32 for all rows that fit in the memory of a device.
fn number(small: u64) -> u32 {
    u32::try_from(small).expect("below 2^32 for all rows that fit in the memory of a device")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Dtype, GlobalRef};

    /// What `own_tile` and `row_of` of the kernels make of a tile: the row and the number in it of each unit.
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

    /// What `move_staged` makes of a tile: the row, the first byte and the length of each part.
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

    fn rows_shape(op: Op, count: u64, row_len: u64, address: u64) -> Shape {
        shape(op, &Request::Rows(request(count, row_len, address)), IndexType::I64)
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
        fn tiles_far_out_begin_where_they_should(row_units in 1_u64..1 << 40, far in any::<u64>()) {
            let count = (1 << 62) / row_units;
            let (tiles, _) = flat(count, row_units, 3, 16);
            let tile = far % tiles.tiles;
            let start = tile * 96;
            prop_assert_eq!(units_of(&tiles, count, tile)[0], (start / row_units, start % row_units));
        }

        #[test]
        fn every_byte_of_a_staged_row_is_in_one_part(count in 1_u64..40, row_len in 9_u64..20_000) {
            let tiles = staged(count, row_len);
            prop_assert!(u64::from(tiles.units) <= LONGEST_PART);
            let mut next = (0, 0);
            for (row, byte, len) in (0..tiles.tiles).flat_map(|tile| parts_of(&tiles, count, tile)) {
                prop_assert_eq!((row, byte), next);
                prop_assert!(len > 0);
                next = if byte + len == row_len { (row + 1, 0) } else { (row, byte + len) };
            }
            prop_assert_eq!(next, (count, 0));
        }

        #[test]
        fn a_warp_stages_no_more_than_its_memory_holds(row_len in 1_u64..1 << 40) {
            let len = u64::from(staged(1, row_len).units);
            let vectors = parts_of_tile(len) * ((len + 2 * (VECTOR - 1)) / VECTOR);
            prop_assert!((1..=VECTORS).contains(&vectors), "{} bytes: {} vectors", len, vectors);
        }
    }

    #[test]
    fn units_are_as_wide_as_all_addresses_allow() {
        let width = |row_len, address| rows_shape(Op::Gather, 10, row_len, address).tiles.width;
        assert_eq!([width(64, 4096), width(64, 4104), width(64, 4100), width(64, 4098)], [16, 8, 4, 0]);
        assert_eq!([width(24, 4096), width(12, 4096), width(6, 4096), width(3, 4096)], [8, 4, 2, 1]);
        let mut view = request(10, 64, 4096);
        view.table = GlobalRef { chunks: 3, ..view.table }.part(1, 5, 8);
        assert_eq!(shape(Op::Gather, &Request::Rows(view), IndexType::I64).tiles.width, 8);
    }

    #[test]
    fn long_rows_with_little_in_common_are_staged() {
        assert_eq!(rows_shape(Op::Gather, 10, 100, 4096).tiles.width, 4);
        assert_eq!(rows_shape(Op::Gather, 10, 1500, 4096).tiles.width, 0);
        assert_eq!(rows_shape(Op::Scatter, 10, 500, 4096).tiles.width, 4);
        assert_eq!(rows_shape(Op::Gather, 10, 130, 4096).tiles.width, 0);
    }

    #[test]
    fn ends_are_fetched_where_rows_share_sectors() {
        let edges = |op, row_len| rows_shape(op, 10, row_len, 4096).tiles.edges;
        assert_eq!([edges(Op::Scatter, 100), edges(Op::Scatter, 96), edges(Op::Gather, 100)], [1, 0, 0]);
        assert_eq!([edges(Op::Scatter, 16), edges(Op::Scatter, 1 << 20)], [0, 0]);
    }

    #[test]
    fn grids_have_no_cap() {
        let shape = rows_shape(Op::Gather, 1 << 43, 16, 4096);
        let [x, y, z] = shape.launch.grid.map(u64::from);
        assert!(x <= MOST_BLOCKS && y <= 65_535 && z == 1);
        assert!(x * y * u64::from(WARPS) >= shape.tiles.tiles, "{x} times {y} blocks");
        assert_eq!(rows_shape(Op::Gather, 1, 16, 4096).launch.grid, [1, 1, 1]);
    }

    #[test]
    fn shared_memory_is_what_any_device_has() {
        for row_len in [1, 8, 16, 100, 130, 1500] {
            let len = rows_shape(Op::Gather, 10, row_len, 4096).launch.shared_len;
            assert!((8 * 96 * 8..=48 << 10).contains(&len), "{row_len}: {len}");
        }
    }

    #[test]
    fn elements_go_in_fours_and_sums_in_words_where_they_can() {
        let elements = |op, elements, table: Dtype, dense: Dtype| {
            let mut rows = request(10, elements * table.len() as u64, 4096);
            rows.rows_stride = elements * dense.len() as u64;
            let request = ElementsRequest { rows, elements, table_dtype: table, rows_dtype: dense };
            let tiles = shape(op, &Request::Elements(request), IndexType::I32).tiles;
            (tiles.width, tiles.row_units)
        };
        assert_eq!(elements(Op::Gather, 64, Dtype::F16, Dtype::F32), (4, 16));
        assert_eq!(elements(Op::Gather, 62, Dtype::F16, Dtype::F32), (1, 62));
        assert_eq!(elements(Op::ScatterAdd, 6, Dtype::F16, Dtype::F16), (4, 3));
        assert_eq!(elements(Op::ScatterAdd, 7, Dtype::F16, Dtype::F16), (0, 7));
        assert_eq!(elements(Op::ScatterAdd, 7, Dtype::F64, Dtype::F64), (8, 7));
        assert_eq!(elements(Op::ScatterAdd, 7, Dtype::F64, Dtype::F32), (0, 7));
    }

    #[test]
    fn the_length_of_the_indices_is_passed_on() {
        for index in [IndexType::I32, IndexType::I64] {
            let shape = shape(Op::Gather, &Request::Rows(request(1, 8, 4096)), index);
            for tiles in [shape.tiles, whole(index).tiles] {
                assert_eq!(IndexType::of_len(tiles.index_len), Some(index));
            }
        }
    }
}
