// Addresses of the rows and elements of a table, for kernels: the member functions of GlobalRef and ElementRef.
//
// Rows are numbered over all ranks. They are in one range of addresses, or in one chunk per rank. The base addresses and first
// rows of the chunks are in a directory in memory:
//
//     rows    0         3         6    7         10        chunk_rows = 3, chunks = 4: row r is in chunk r / 3
//             |  chunk 0  |  chunk 1  |  chunk 2  |  3 |
//
//     rows    0  2                  7       10             chunk_rows = 0: binary search in the first rows
//             |c0|      chunk 1     |chunk 3|              chunk 2 is empty
//
// Compiles as C++11 under a host compiler, nvcc and NVRTC, without system headers.
#pragma once

#include "wholemem/abi.cuh"

namespace wholemem {

// Returns the upper 64 bits of the 128-bit product of two numbers.
WHOLEMEM_HOST_DEVICE u64 multiply_high(u64 a, u64 b)
{
#if defined(__CUDA_ARCH__)
    return __umul64hi(a, b);
#else
    __extension__ typedef unsigned __int128 u128;
    return (u64)(((u128)a * b) >> 64);
#endif
}

// Divides exactly by a constant d from 2 to 2^63, by multiplication. With l = ceil(log2 d), magic is the low 64 bits of
// ceil(2^(64 + l) / d), and shift is l - 1.
WHOLEMEM_HOST_DEVICE u64 divide(u64 number, u64 magic, u32 shift)
{
    const u64 high = multiply_high(number, magic);
    return (high + ((number - high) >> 1)) >> shift;
}

// Finds the last chunk of a table whose first row is at most `row`, by binary search. Of several chunks with the same first
// row, all but the last are empty.
WHOLEMEM_HOST_DEVICE u64 last_at_or_before(const u64 *starts, u32 chunks, u64 row)
{
    u32 low = 0;
    for (u32 count = chunks; count > 1;) {
        const u32 half = count / 2;
        low = starts[low + half] <= row ? low + half : low;
        count -= half;
    }
    return low;
}

WHOLEMEM_HOST_DEVICE bool GlobalRef::contains(i64 index) const { return (u64)index < rows; }

WHOLEMEM_HOST_DEVICE u64 GlobalRef::address(u64 index) const
{
    if (chunks == 1)
        return base + index * stride;
    const u64 *const bases = (const u64 *)base;
    const u64 *const starts = bases + chunks;
    const u64 row = index + first_row;
    const u64 chunk = chunk_rows != 0 ? divide(row, magic, shift) : last_at_or_before(starts, chunks, row);
    const u64 first = chunk_rows != 0 ? chunk * chunk_rows : starts[chunk];
    return bases[chunk] + offset + (row - first) * stride;
}

WHOLEMEM_HOST_DEVICE u64 ElementRef::address(u64 byte) const
{
    if (row_len == 1)
        return rows.address(byte);
    const u64 row = byte / row_len;
    return rows.address(row) + (byte - row * row_len);
}

} // namespace wholemem
