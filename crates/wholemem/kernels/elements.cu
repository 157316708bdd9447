// Kernels for gather and scatter with conversion of elements, and for scatter-add.

#include "ops/numbers.cuh"
#include "ops/tiles.cuh"

using namespace wholemem;

namespace {

template <u32 COUNT> __device__ __forceinline__ Elements<COUNT> convert_all(Elements<COUNT> elements, u32 from, u32 to)
{
#pragma unroll
    for (u32 at = 0; at < COUNT; ++at)
        elements.bits[at] = convert(elements.bits[at], from, to);
    return elements;
}

template <bool SCATTER, u32 COUNT, u32 TURNS>
__device__ __forceinline__ void move_elements(const ElementsRequest &request, const RowTiles &tiles, u64 *shared)
{
    u64 *const places = shared + warp() * (WARP * TURNS);
    const Tile tile = own_tile(tiles, request.rows.count);
    const u32 table = request.table_dtype, dense = request.rows_dtype;
    const Units units(request.rows, tiles, tile, places, element_len(table) * COUNT, element_len(dense) * COUNT);
    look_up_all(request.rows, tiles, tile, units.table_len, places);
    Elements<COUNT> held[TURNS];
#pragma unroll
    for (u32 turn = 0; turn < TURNS; ++turn)
        held[turn] = SCATTER ? load_elements<COUNT>(units.dense(turn), dense)
                             : load_elements<COUNT>(units.place(turn), table);
#pragma unroll
    for (u32 turn = 0; turn < TURNS; ++turn)
        if (SCATTER)
            store_elements(units.place(turn), table, convert_all(held[turn], dense, table));
        else
            store_elements(units.dense(turn), dense, convert_all(held[turn], table, dense));
}

// Adds `bits` to a table element of four or eight bytes, at system scope, since the table may be on another device.
__device__ __forceinline__ void add_element(u64 address, u32 dtype, u64 bits)
{
    if (dtype == F32)
        asm volatile("red.relaxed.sys.global.add.f32 [%0], %1;" ::"l"(address), "f"(__uint_as_float((u32)bits))
                     : "memory");
    else if (dtype == F64)
        asm volatile("red.relaxed.sys.global.add.f64 [%0], %1;" ::"l"(address), "d"(__longlong_as_double((i64)bits))
                     : "memory");
    else if (dtype < U64)
        asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(address), "r"((u32)bits) : "memory");
    else
        asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(address), "l"(bits) : "memory");
}

// Adds two 32-bit words of packed one- or two-byte elements, element by element.
__device__ __forceinline__ u32 add_packed(u32 a, u32 b, u32 dtype)
{
    if (dtype == BF16) {
        const u64 low = float_bits(float_of(a & 0xffff, BF16) + float_of(b & 0xffff, BF16), BF16);
        const u64 high = float_bits(float_of(a >> 16, BF16) + float_of(b >> 16, BF16), BF16);
        return (u32)(high << 16 | low);
    }
    return dtype < U16 ? __vadd4(a, b) : __vadd2(a, b);
}

// Adds to one- or two-byte elements of a table: to those in an aligned 32-bit word that `mask` selects.
__device__ __forceinline__ void add_word(u64 address, u32 dtype, u32 bits, u32 mask)
{
    if (dtype == F16) {
        if (mask == ~0u)
            asm volatile("red.relaxed.sys.global.add.noftz.f16x2 [%0], %1;" ::"l"(address), "r"(bits) : "memory");
        else
            asm volatile("red.relaxed.sys.global.add.noftz.f16 [%0], %1;" ::"l"(address + (mask == 0xffff ? 0 : 2)),
                         "h"((u16)(mask == 0xffff ? bits : bits >> 16))
                         : "memory");
        return;
    }
    u32 old = load<u32>(address), seen;
    do {
        seen = old;
        const u32 sum = add_packed(seen, bits, dtype);
        old = atomicCAS_system((u32 *)address, seen, (sum & mask) | (seen & ~mask));
    } while (old != seen);
}

__device__ __forceinline__ void add_unit(u64 address, u32 dtype, u32 bits)
{
    if (element_len(dtype) == sizeof(u32))
        add_element(address, dtype, bits);
    else
        add_word(address, dtype, bits, ~0u);
}

__device__ __forceinline__ void add_unit(u64 address, u32 dtype, u64 bits) { add_element(address, dtype, bits); }

// Scatter-add of elements that have the table's type, in aligned units of four or eight bytes. Consecutive lanes add to
// consecutive units, so that the atomics of a warp are coalesced.
template <class Unit, u32 TURNS>
__device__ __forceinline__ void add_units(const ElementsRequest &request, const RowTiles &tiles, u64 *shared)
{
    u64 *const places = shared + warp() * (WARP * TURNS);
    const Tile tile = own_tile(tiles, request.rows.count);
    const Units units(request.rows, tiles, tile, places, sizeof(Unit), sizeof(Unit));
    Unit held[TURNS];
#pragma unroll
    for (u32 turn = 0; turn < TURNS; ++turn)
        held[turn] = load<Unit>(units.dense(turn));
    look_up_all(request.rows, tiles, tile, sizeof(Unit), places);
#pragma unroll
    for (u32 turn = 0; turn < TURNS; ++turn) {
        const u64 place = units.place(turn);
        if (place != 0)
            add_unit(place, request.table_dtype, held[turn]);
    }
}

// Scatter-add with conversion of elements, or of unaligned elements. Each lane adds one element per turn.
template <u32 TURNS>
__device__ __forceinline__ void add_elements(const ElementsRequest &request, const RowTiles &tiles, u64 *shared)
{
    u64 *const places = shared + warp() * (WARP * TURNS);
    const Tile tile = own_tile(tiles, request.rows.count);
    const u32 table = request.table_dtype, dense = request.rows_dtype, table_len = element_len(table);
    const Units units(request.rows, tiles, tile, places, table_len, element_len(dense));
    look_up_all(request.rows, tiles, tile, table_len, places);
#pragma unroll 2
    for (u32 turn = 0; turn < TURNS; ++turn) {
        const u64 bits = convert(load_elements<1>(units.dense(turn), dense).bits[0], dense, table);
        const u64 place = units.place(turn);
        if (place == 0)
            continue;
        const u32 at = 8 * (u32)(place % sizeof(u32));
        if (table_len >= sizeof(u32))
            add_element(place, table, bits);
        else if (table_len == 2)
            add_word(place & ~3ull, table, (u32)bits << at, 0xffffu << at);
        else
            add_word(place & ~3ull, table, (u32)bits << at, 0xffu << at);
    }
}

} // namespace

extern __shared__ u64 memory[];

#define MOVE(NAME, SCATTER)                                                                                            \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS, 5)                                                           \
        NAME(const __grid_constant__ ElementsRequest request, const __grid_constant__ RowTiles tiles)                  \
    {                                                                                                                  \
        if (tiles.width == 4)                                                                                          \
            move_elements<SCATTER, 4, CONVERT_TURNS_4>(request, tiles, memory);                                        \
        else                                                                                                           \
            move_elements<SCATTER, 1, CONVERT_TURNS_1>(request, tiles, memory);                                        \
    }

// Gather and scatter with conversion copy units of four elements if `width` is 4, and single elements otherwise.
MOVE(gather_convert, false)
MOVE(scatter_convert, true)

// Scatter-add adds units of `width` bytes, or single elements if `width` is 0.
extern "C" __global__ void __launch_bounds__(ROW_THREADS, 5)
    scatter_add(const __grid_constant__ ElementsRequest request, const __grid_constant__ RowTiles tiles)
{
    switch (tiles.width) {
    case 8: return add_units<u64, ADD_TURNS>(request, tiles, memory);
    case 4: return add_units<u32, ADD_TURNS>(request, tiles, memory);
    default: return add_elements<ADD_TURNS>(request, tiles, memory);
    }
}
