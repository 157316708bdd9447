// Kernels for gather and scatter that copy rows as bytes, without conversion.
//
// If addresses, strides and lengths are multiples of a common width, rows are copied directly in units of that width. Otherwise
// they are staged: aligned 16-byte vectors of the source are loaded into shared memory, and aligned words are stored from
// there.

#include "ops/tiles.cuh"

using namespace wholemem;

namespace {

template <class Unit, u32 TURNS>
__device__ __forceinline__ void gather_units(const RowsRequest &request, const RowTiles &tiles, u64 *shared)
{
    u64 *const places = shared + warp() * (WARP * TURNS);
    const Tile tile = own_tile(tiles, request.count);
    const Units units(request, tiles, tile, places, sizeof(Unit), sizeof(Unit));
    look_up_all(request, tiles, tile, sizeof(Unit), places);
    Unit held[TURNS];
#pragma unroll
    for (u32 turn = 0; turn < TURNS; ++turn)
        held[turn] = load<Unit>(units.place(turn));
#pragma unroll
    for (u32 turn = 0; turn < TURNS; ++turn)
        store(units.dense(turn), held[turn]);
}

template <class Unit, u32 TURNS>
__device__ __forceinline__ void scatter_units(const RowsRequest &request, const RowTiles &tiles, u64 *shared)
{
    u64 *const places = shared + warp() * (WARP * TURNS);
    const Tile tile = own_tile(tiles, request.count);
    const Units units(request, tiles, tile, places, sizeof(Unit), sizeof(Unit));
    Unit held[TURNS];
#pragma unroll
    for (u32 turn = 0; turn < TURNS; ++turn)
        held[turn] = load<Unit>(units.dense(turn));
    look_up_all(request, tiles, tile, sizeof(Unit), places);
    if (tiles.edges)
        for (u32 row = lane(); row < tile.rows; row += WARP)
            if (places[row] != 0)
                fetch_edges(places[row] + (row * tiles.row_units - tile.before) * sizeof(Unit), request.row_len);
#pragma unroll
    for (u32 turn = 0; turn < TURNS; ++turn)
        store(units.place(turn), held[turn]);
}

// The shared memory in which a warp stages unaligned rows: vectors of the source, with one more at either end that may be read
// but is not used; and the source, destination and length of each part of a row.
struct Stage {
    static constexpr u32 TURNS = STAGE_TURNS;
    static constexpr u32 PARTS = STAGE_PARTS;

    uint4 vectors[1 + WARP * TURNS + 1];
    u64 from[PARTS];
    u64 to[PARTS];
    u32 len[PARTS];
};

static_assert(sizeof(Stage) == STAGE_LEN, "a launch has as much shared memory for each warp");

// Extracts 16 bytes from two adjacent vectors of 16 bytes, starting at a byte of the first vector.
__device__ __forceinline__ uint4 join(uint4 a, uint4 b, u32 byte)
{
    if (byte & 8)
        a = {a.z, a.w, b.x, b.y}, b = {b.z, b.w, 0, 0};
    if (byte & 4)
        a = {a.y, a.z, a.w, b.x}, b.x = b.y;
    const u32 bits = byte % 4 * 8;
    return {__funnelshift_r(a.x, a.y, bits), __funnelshift_r(a.y, a.z, bits), __funnelshift_r(a.z, a.w, bits),
            __funnelshift_r(a.w, b.x, bits)};
}

// Loads those bytes of a 16-byte vector that are between the addresses `low` and `high`. The other bytes are zero.
__device__ __forceinline__ uint4 load_part(u64 vector, u64 low, u64 high)
{
    u64 halves[2] = {0, 0};
#pragma unroll
    for (u32 half = 0; half < 2; ++half)
#pragma unroll 1
        for (u32 byte = 0; byte < 8; ++byte) {
            const u64 at = vector + 8 * half + byte;
            halves[half] |= (u64)load<u8>(low <= at && at < high ? at : 0) << 8 * byte;
        }
    return {(u32)halves[0], (u32)(halves[0] >> 32), (u32)halves[1], (u32)(halves[1] >> 32)};
}

// Copies unaligned rows through shared memory. A tile consists of parts of rows; all parts of a row but the last have equal
// lengths; units are bytes. The source is read in aligned vectors that contain at least one byte of the part. Vectors of a
// table are always mapped, since a table consists of whole granules. The row buffer belongs to the caller and may begin and end
// at any address.
template <bool SCATTER>
__device__ __forceinline__ void move_staged(const RowsRequest &request, const RowTiles &tiles, Stage *stages)
{
    constexpr u32 VECTOR = sizeof(uint4);
    const u64 number = own_number();
    if (number >= tiles.tiles)
        return;
    Stage &stage = stages[warp()];
    uint4 *const vectors = stage.vectors + 1;
    const u32 vectors_of_part = (tiles.units + 2 * (VECTOR - 1)) / VECTOR;
    const u32 parts_of_tile = min(WARP * Stage::TURNS / vectors_of_part, Stage::PARTS);
    const u64 first_part = number * parts_of_tile;
    const u32 parts = (u32)min((u64)parts_of_tile, request.count * tiles.parts - first_part);
#pragma unroll 1
    for (u32 first = 0; first < parts; first += WARP) {
        const u32 part = first + lane();
        const u64 row = tiles.parts == 1 ? first_part + part : divide(first_part + part, tiles.magic, tiles.shift);
        const u64 byte = (first_part + part - row * tiles.parts) * tiles.units;
        const u64 place = look_up(request, tiles, part < parts, row);
        if (part < parts) {
            const u64 dense = request.rows + row * request.rows_stride + byte;
            stage.from[part] = SCATTER ? dense : place == 0 ? 0 : place + byte;
            stage.to[part] = !SCATTER ? dense : place == 0 ? 0 : place + byte;
            stage.len[part] = (u32)min((u64)tiles.units, request.row_len - byte);
            if (SCATTER && tiles.edges && place != 0)
                fetch_edges(place + byte, stage.len[part]);
        }
    }
    __syncwarp();

    const u32 magic = (0x7fffffffu + vectors_of_part) / vectors_of_part;
    const u64 rows_end = request.rows + (request.count - 1) * request.rows_stride + request.row_len;
    uint4 held[Stage::TURNS];
#pragma unroll
    for (u32 turn = 0; turn < Stage::TURNS; ++turn) {
        const u32 vector = turn * WARP + lane(), part = divide_small(vector, magic);
        const u64 from = part < parts ? stage.from[part] : 0;
        const u64 end = part < parts ? from + stage.len[part] : 0;
        const u64 aligned = from / VECTOR * VECTOR + (vector - part * vectors_of_part) * VECTOR;
        const bool needed = from != 0 && aligned < end;
        const bool there = !SCATTER || (request.rows <= aligned && aligned + VECTOR <= rows_end);
        held[turn] = load<uint4>(needed && there ? aligned : 0);
        if (needed && !there)
            held[turn] = load_part(aligned, request.rows, rows_end);
    }
#pragma unroll
    for (u32 turn = 0; turn < Stage::TURNS; ++turn)
        vectors[turn * WARP + lane()] = held[turn];
    __syncwarp();

    // Store the aligned vectors that are entirely inside a part of a row.
#pragma unroll 1
    for (u32 vector = lane(); vector < parts * vectors_of_part; vector += WARP) {
        const u32 part = divide_small(vector, magic);
        const u64 to = stage.to[part];
        const int start = (int)((vector - part * vectors_of_part) * VECTOR) - (int)(to % VECTOR);
        const int byte = (int)(part * vectors_of_part * VECTOR + (u32)stage.from[part] % VECTOR) + start;
        const uint4 *const source = vectors + (byte >> 4);
        if (to != 0 && start >= 0 && start + (int)VECTOR <= (int)stage.len[part])
            store(to + start, join(source[0], source[1], (u32)byte % VECTOR));
    }
    // Store the remaining bytes at both ends of each part: up to four words of its first vector and four of its last vector.
    const u32 *const words = (const u32 *)vectors;
#pragma unroll 1
    for (u32 edge = lane(); edge < parts * 8; edge += WARP) {
        const u32 part = edge / 8;
        const int len = (int)stage.len[part];
        const u64 to = stage.to[part], end = to + len, first = to / VECTOR * VECTOR, last = end / VECTOR * VECTOR;
        const bool head = edge % 8 < 4, needed = head ? to != first : end != last && (last != first || to == first);
        const int start = (int)((head ? first : last) - to) + (int)(edge % 4 * 4);
        if (to == 0 || !needed || start <= -4 || start >= len)
            continue;
        const int byte = (int)(part * vectors_of_part * VECTOR + (u32)stage.from[part] % VECTOR) + start;
        const u32 value = __funnelshift_r(words[byte >> 2], words[(byte >> 2) + 1], (u32)byte % 4 * 8);
        if (start >= 0 && start + 4 <= len) {
            store<u32>(to + start, value);
        } else {
#pragma unroll
            for (int k = 0; k < 4; ++k)
                store<u8>(start + k >= 0 && start + k < len ? to + start + k : 0, (u8)(value >> 8 * k));
        }
    }
}

} // namespace

extern __shared__ uint4 memory[];

#define ROWS(NAME, MOVE_UNITS, SCATTER, BLOCKS)                                                                        \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS, BLOCKS)                                                      \
        NAME(const __grid_constant__ RowsRequest request, const __grid_constant__ RowTiles tiles)                      \
    {                                                                                                                  \
        switch (tiles.width) {                                                                                         \
        case 16: return MOVE_UNITS<uint4, ROW_TURNS_16>(request, tiles, (u64 *)memory);                                \
        case 8: return MOVE_UNITS<u64, ROW_TURNS_8>(request, tiles, (u64 *)memory);                                    \
        case 4: return MOVE_UNITS<u32, ROW_TURNS_4>(request, tiles, (u64 *)memory);                                    \
        case 2: return MOVE_UNITS<u16, ROW_TURNS_1>(request, tiles, (u64 *)memory);                                    \
        case 1: return MOVE_UNITS<u8, ROW_TURNS_1>(request, tiles, (u64 *)memory);                                     \
        default: return move_staged<SCATTER>(request, tiles, (Stage *)memory);                                         \
        }                                                                                                              \
    }

// The number of resident blocks in the launch bounds leaves each thread enough registers for its units in flight: 40 for
// gather, 48 for scatter.
ROWS(gather_rows, gather_units, false, 6)
ROWS(scatter_rows, scatter_units, true, 5)
