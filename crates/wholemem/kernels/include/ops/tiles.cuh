// A tile: the units of rows that a warp copies (see RowTiles).
//
// The warp first looks up the rows of its tile, one row per lane, and stores their addresses in shared memory. Then consecutive
// lanes copy consecutive units. So each row is checked and looked up once, and the loads of a warp are wide and independent.
#pragma once

#include "ops/abi.cuh"
#include "ops/units.cuh"
#include "wholemem/global_ref.cuh"

namespace wholemem {

struct Tile {
    u64 row;    // first row
    u64 before; // units of the first row that precede the tile
    u32 units;  // units of the tile; 0 if this warp has no tile
    u32 skew;   // `before`, if rows were at most as long as a tile
    u32 rows;   // rows that the tile overlaps
};

__device__ __forceinline__ u32 lane() { return threadIdx.x % WARP; }

__device__ __forceinline__ u32 warp() { return threadIdx.x / WARP; }

__device__ __forceinline__ u64 own_number() { return ((u64)blockIdx.y * gridDim.x + blockIdx.x) * (ROW_THREADS / WARP) + warp(); }

// Divides a small number by multiplication: magic is ceil(2^31 / divisor). The result is exact if number * divisor is below
// 2^31.
__device__ __forceinline__ u32 divide_small(u32 number, u32 magic) { return __umulhi(number * 2, magic); }

// The row that contains a unit of the tile, counted from the first row of the tile.
__device__ __forceinline__ u32 row_of(const RowTiles &tiles, const Tile &tile, u32 unit)
{
    return divide_small(unit + tile.skew, tiles.unit_magic);
}

// The tile of rows that this warp copies. The tile has no units if there are more warps than tiles.
__device__ __forceinline__ Tile own_tile(const RowTiles &tiles, u64 count)
{
    const u64 number = own_number();
    if (number >= tiles.tiles)
        return {0, 0, 0, 0, 0};
    const u64 start = number * tiles.units;
    const u64 row = tiles.row_units == 1 ? start : divide(start, tiles.magic, tiles.shift);
    const u64 before = start - row * tiles.row_units;
    const u64 most = min(tiles.row_units, (u64)tiles.units);
    const u32 skew = (u32)(most - min(most, tiles.row_units - before));
    Tile tile = {row, before, (u32)min((u64)tiles.units, count * tiles.row_units - start), skew, 0};
    tile.rows = row_of(tiles, tile, tile.units - 1) + 1;
    return tile;
}

__device__ __forceinline__ i64 index_at(const RowsRequest &request, const RowTiles &tiles, u64 position)
{
    const u64 address = request.indices + position * tiles.index_len;
    return tiles.index_len == sizeof(i64) ? load<i64>(address) : load<int>(address);
}

// Returns the address of the table row whose index is at a position of the list of indices. If the index is bad, records the
// position and returns 0. All lanes of the warp must make the call; lanes whose `there` is false only take part in the vote.
__device__ __forceinline__ u64 look_up(const RowsRequest &request, const RowTiles &tiles, bool there, u64 position)
{
    const i64 index = there ? index_at(request, tiles, position) : 0;
    const bool valid = request.table.contains(index);
    const u32 bad = __ballot_sync(~0u, there && !valid);
    // The bad-index record is in host memory, but only this device writes it, so device scope is enough.
    if (bad != 0 && request.bad != 0 && lane() == (u32)__ffs((int)bad) - 1)
        atomicMin((u64 *)request.bad + BAD_INDEX_WORD_POSITION, position);
    return there && valid ? request.table.address((u64)index) : 0;
}

// Looks up the table rows of a tile. The address stored for a row is where the tile's first unit would be if the whole tile
// were in that row. So adding the offset of a unit of the row gives the unit's address. The stored address is 0 for a bad
// index.
__device__ __forceinline__ void look_up_all(const RowsRequest &request, const RowTiles &tiles, const Tile &tile,
                                            u32 unit_len, u64 *places)
{
#pragma unroll 1
    for (u32 first = 0; first < tile.rows; first += WARP) {
        const u32 row = first + lane();
        const u64 address = look_up(request, tiles, row < tile.rows, tile.row + row);
        if (row < tile.rows)
            places[row] = address == 0 ? 0 : address + (tile.before - row * tiles.row_units) * unit_len;
    }
    __syncwarp();
}

// The addresses, in the table and in the row buffer, of the units that a lane copies, one unit per turn. The address is 0 if
// there is no unit.
struct Units {
    const RowTiles &tiles;
    const Tile &tile;
    const u64 *places;
    u32 table_len; // length of a unit in the table
    u32 dense_len; // length of a unit in the row buffer
    u64 rows;      // address of the tile's first unit in the row buffer
    u64 gap;       // bytes between two rows there

    __device__ __forceinline__ Units(const RowsRequest &request, const RowTiles &tiles, const Tile &tile,
                                     const u64 *places, u32 table_len, u32 dense_len)
        : tiles(tiles), tile(tile), places(places), table_len(table_len), dense_len(dense_len)
    {
        rows = request.rows + tile.row * request.rows_stride + tile.before * dense_len;
        gap = request.rows_stride - tiles.row_units * dense_len;
    }

    __device__ __forceinline__ u64 dense(u32 turn) const
    {
        const u32 unit = turn * WARP + lane();
        const u64 dense = rows + row_of(tiles, tile, unit) * gap + unit * dense_len;
        return unit < tile.units ? dense : 0;
    }

    __device__ __forceinline__ u64 place(u32 turn) const
    {
        const u32 unit = turn * WARP + lane();
        // The read of `places` is in bounds, because `places` has an entry for every row that a unit of a full tile can be in.
        const u64 place = places[row_of(tiles, tile, unit)];
        return unit < tile.units && place != 0 ? place + unit * table_len : 0;
    }
};

// Prefetches the memory sectors (32 bytes each) that a row shares with its neighbours. A sector that is only partly written is
// read first; prefetching reads all of these sectors at once.
__device__ __forceinline__ void fetch_edges(u64 row, u64 len)
{
    constexpr u64 SECTOR = 32;
    if (row % SECTOR != 0)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row));
    if ((row + len) % SECTOR != 0)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row + len - 1));
}

} // namespace wholemem
