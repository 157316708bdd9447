// Packs of 16 bytes, the widest load and store of a thread, and how the packs of a call are divided among threads.
//
//     bytes     | tile 0 | tile 1 | tile 2 | tile 3 | tile 4 | til     a tile has one pack for each thread of a block
//     blocks    |   0    |   1    |   0    |   1    |   0    |   1     blocks = 2
//
// Memory of callers is aligned to its elements only, and differently on each rank. An unaligned pack is moved in the widest units
// that its address allows. These units are the same for all packs from one pointer on, so threads do not diverge. The last pack
// may be shorter, and is moved byte by byte.
#pragma once

#include "ops/abi.cuh"
#include "ops/units.cuh"
#include "wholemem/barrier.cuh"
#include "wholemem/window.cuh"

namespace wholemem {

constexpr u32 PACK = 16;
constexpr u32 HALF = 8; // payload of a packet
constexpr u32 TILE = COLLECTIVE_THREADS * PACK;

// Loads an aligned pack (16 bytes) if `there` is true, and returns zeros otherwise. The load is predicated instead of branched
// around, so that a thread's loads are issued back to back.
__device__ __forceinline__ uint4 load_if(bool there, u64 address)
{
    uint4 pack = {0, 0, 0, 0};
    asm volatile("{.reg .pred there; setp.ne.u32 there, %5, 0; @there ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "+r"(pack.x), "+r"(pack.y), "+r"(pack.z), "+r"(pack.w)
                 : "l"(address), "r"((u32)there)
                 : "memory");
    return pack;
}

__device__ __forceinline__ void store_if(bool there, u64 address, const uint4 &pack)
{
    asm volatile("{.reg .pred there; setp.ne.u32 there, %5, 0; @there st.global.v4.u32 [%4], {%0, %1, %2, %3};}" ::"r"(pack.x),
                 "r"(pack.y), "r"(pack.z), "r"(pack.w), "l"(address), "r"((u32)there)
                 : "memory");
}

// Loads `len` bytes, at most 8, as a 64-bit word. The remaining bytes of the word are zero.
__device__ __forceinline__ u64 load_half(u64 address, u32 len)
{
    if (len == HALF && address % 8 == 0)
        return load<u64>(address);
    u64 word = 0;
    if (len == HALF && address % 4 == 0) {
        const u32 lower = load<u32>(address), upper = load<u32>(address + 4);
        word = (u64)upper << 32 | lower;
    } else if (len == HALF && address % 2 == 0) {
        u16 parts[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            parts[i] = load<u16>(address + 2 * i);
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            word |= (u64)parts[i] << 16 * i;
    } else {
        u8 parts[8];
#pragma unroll
        for (u32 i = 0; i < 8; ++i)
            parts[i] = load<u8>(i < len ? address + i : 0);
#pragma unroll
        for (u32 i = 0; i < 8; ++i)
            word |= (u64)parts[i] << 8 * i;
    }
    return word;
}

// Stores the first `len` bytes, at most 8, of a 64-bit word.
__device__ __forceinline__ void store_half(u64 address, u64 word, u32 len)
{
    if (len == HALF && address % 8 == 0) {
        store(address, word);
    } else if (len == HALF && address % 4 == 0) {
        store(address, (u32)word);
        store(address + 4, (u32)(word >> 32));
    } else if (len == HALF && address % 2 == 0) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            store(address + 2 * i, (u16)(word >> 16 * i));
    } else {
#pragma unroll
        for (u32 i = 0; i < 8; ++i)
            store(i < len ? address + i : 0, (u8)(word >> 8 * i));
    }
}

__device__ __forceinline__ u64 lower_half(const uint4 &pack) { return (u64)pack.y << 32 | pack.x; }

__device__ __forceinline__ u64 upper_half(const uint4 &pack) { return (u64)pack.w << 32 | pack.z; }

__device__ __forceinline__ uint4 pack_of(u64 lower, u64 upper)
{
    return {(u32)lower, (u32)(lower >> 32), (u32)upper, (u32)(upper >> 32)};
}

// Loads `len` bytes, at most 16, as a pack. The remaining bytes of the pack are zero.
__device__ __forceinline__ uint4 load_pack(u64 address, u32 len)
{
    if (len == PACK && address % PACK == 0)
        return load<uint4>(address);
    u64 halves[2] = {0, 0};
    halves[0] = load_half(address, min(len, HALF));
    if (len > HALF)
        halves[1] = load_half(address + HALF, len - HALF);
    return pack_of(halves[0], halves[1]);
}

// Stores the first `len` bytes, at most 16, of a pack.
__device__ __forceinline__ void store_pack(u64 address, const uint4 &pack, u32 len)
{
    if (len == PACK && address % PACK == 0)
        return store(address, pack);
    store_half(address, lower_half(pack), min(len, HALF));
    if (len > HALF)
        store_half(address + HALF, upper_half(pack), len - HALF);
}

// The packs (16 bytes each) that this thread processes in a piece of the data, as byte offsets: first, first + step, ...
//
// A piece has at most 1 GiB, so 32-bit offsets are enough, which saves registers.
struct Share {
    u32 first;
    u32 step;

    // Selects one pack in every tile of this thread's block.
    __device__ __forceinline__ explicit Share(const Call &call) : Share(call, 0, 1) {}

    // Selects one pack in every tile of this thread's block whose number modulo `turns` is `turn`.
    __device__ __forceinline__ Share(const Call &call, u32 turn, u32 turns)
        : first((call.block + turn * call.blocks) * TILE + threadIdx.x * PACK), step(turns * call.blocks * TILE)
    {
    }

    // Selects this thread's share in units of half packs (8 bytes each) instead of packs.
    __device__ __forceinline__ static Share of_halves(const Call &call)
    {
        Share share(call);
        share.first /= 2;
        share.step /= 2;
        return share;
    }

    // Returns the first offset that an unrolled loop over whole packs, `turns` at a time, has not processed. The loop ended at
    // `at`, which may be beyond the shorter last pack.
    __device__ __forceinline__ u32 back(u32 at, u32 whole, u32 turns) const
    {
        if (at != first)
#pragma unroll
            for (u32 turn = 1; turn < turns; ++turn)
                at -= at - step >= whole ? step : 0;
        return at;
    }
};

constexpr u64 PIECE = 1 << 30; // longest piece in bytes

// The total length of the whole packs (16 bytes each) in `bytes` bytes.
__device__ __forceinline__ u32 whole_packs(u32 bytes) { return bytes / PACK * PACK; }

// The length of the pack, or of the half pack, at offset `at` of `bytes` bytes.
__device__ __forceinline__ u32 pack_len(u32 at, u32 bytes) { return min(bytes - at, PACK); }

__device__ __forceinline__ u32 half_len(u32 at, u32 bytes) { return min(bytes - at, HALF); }

// Returns true if the parts of all ranks in a window are aligned to packs (16 bytes).
__device__ __forceinline__ bool aligned(const WindowRef &window, u32 ranks)
{
    u64 all = 0;
#pragma unroll 1
    for (u32 rank = 0; rank < ranks; ++rank)
        all |= window.address(rank);
    return all % PACK == 0;
}

// Copies this thread's packs to `count` destinations. `fits` says that all addresses are aligned to packs. If `wanted` is
// false, nothing is stored; the loads do not wait for that condition.
__device__ __forceinline__ void copy_to_each(u64 from, const WindowRef &to, u32 count, u32 bytes, Share share, bool fits,
                                       bool wanted)
{
    constexpr u32 TURNS = 4;
    const u32 whole = whole_packs(bytes);
    u32 at = share.first;
    if (fits) {
#pragma unroll 1
        for (; at < whole; at += TURNS * share.step) {
            uint4 packs[TURNS];
#pragma unroll
            for (u32 turn = 0; turn < TURNS; ++turn)
                packs[turn] = load_if(at + turn * share.step < whole, from + (at + turn * share.step));
#pragma unroll 1
            for (u32 place = 0; place < count; ++place) {
                const u64 base = to.address(place);
#pragma unroll
                for (u32 turn = 0; turn < TURNS; ++turn)
                    store_if(wanted && at + turn * share.step < whole, base + (at + turn * share.step), packs[turn]);
            }
        }
        at = share.back(at, whole, TURNS);
    }
#pragma unroll 1
    for (; at < bytes; at += share.step) {
        const uint4 pack = load_pack(from + at, pack_len(at, bytes));
#pragma unroll 1
        for (u32 place = 0; place < count && wanted; ++place)
            store_pack(to.address(place) + at, pack, pack_len(at, bytes));
    }
}

__device__ __forceinline__ void copy(u64 from, u64 to, u32 bytes, Share share, bool fits, bool wanted)
{
    copy_to_each(from, {to, 0, 0}, 1, bytes, share, fits, wanted);
}

} // namespace wholemem
