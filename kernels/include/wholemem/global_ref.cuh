// Where the rows of a whole tensor are: one small value, the same on the host and on every device.
//
// Rows are numbered through all ranks. They lie in one range of addresses, or in one chunk per rank, whose bases and first
// rows stand in a small table that the value points to:
//
//     rows    0         3         6    7         10        chunk_rows = 3, chunks = 4: row r is in chunk r / 3
//             |  chunk 0  |  chunk 1  |  chunk 2  |  3 |
//
//     rows    0  2                  7       10             chunk_rows = 0: binary search in the first rows
//             |c0|      chunk 1     |chunk 3|              chunk 2 is empty
//
// Compiles as C++11 under a host compiler, nvcc and NVRTC, and includes nothing.
#pragma once

#if defined(__CUDACC__)
#define WHOLEMEM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define WHOLEMEM_HOST_DEVICE inline
#endif

namespace wholemem {

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// The upper half of a product.
WHOLEMEM_HOST_DEVICE u64 multiply_high(u64 a, u64 b)
{
#if defined(__CUDA_ARCH__)
    return __umul64hi(a, b);
#else
    __extension__ typedef unsigned __int128 u128;
    return (u64)(((u128)a * b) >> 64);
#endif
}

// Divides by a number d from 2 to 2^63, exactly: with l the logarithm of d, rounded up, magic is 2^(64 + l) / d, rounded up,
// without its highest bit, and shift is l - 1.
WHOLEMEM_HOST_DEVICE u64 divide(u64 number, u64 magic, u32 shift)
{
    const u64 high = multiply_high(number, magic);
    return (high + ((number - high) >> 1)) >> shift;
}

struct GlobalRef {
    u64 base;       // one chunk: the address of row 0. Else: of u64 bases[chunks], then u64 starts[chunks + 1]
    u64 rows;       // valid indices are 0 .. rows
    u64 first_row;  // added to an index before its chunk is looked up; part of the base where there is one chunk
    u64 stride;     // bytes from one row to the next, in every chunk
    u64 offset;     // bytes added to the address of a row; part of the base where there is one chunk
    u64 chunk_rows; // rows of every chunk but the last that is not empty; 0: they differ, or are 1
    u64 magic;      // divides by chunk_rows
    u32 shift;
    u32 chunks;     // 0: there are no rows

    // Whether there is such a row.
    WHOLEMEM_HOST_DEVICE bool contains(i64 index) const { return (u64)index < rows; }

    // The address of a row that there is.
    WHOLEMEM_HOST_DEVICE u64 address(u64 index) const
    {
        if (chunks == 1)
            return base + index * stride;
        const u64 *const bases = (const u64 *)base;
        const u64 *const starts = bases + chunks;
        const u64 row = index + first_row;
        const u64 chunk = chunk_rows != 0 ? divide(row, magic, shift) : last_at_or_before(starts, row);
        const u64 first = chunk_rows != 0 ? chunk * chunk_rows : starts[chunk];
        return bases[chunk] + offset + (row - first) * stride;
    }

private:
    // The last chunk that starts at this row or before it: of those that start at one row, all but the last are empty.
    WHOLEMEM_HOST_DEVICE u64 last_at_or_before(const u64 *starts, u64 row) const
    {
        u32 low = 0;
        for (u32 count = chunks; count > 1;) {
            const u32 half = count / 2;
            low = starts[low + half] <= row ? low + half : low;
            count -= half;
        }
        return low;
    }
};

static_assert(sizeof(GlobalRef) == 64, "the layout is shared with Rust");

// Where the elements of a whole tensor are: its rows, and how long each of them is. A view of some columns has rows that are
// shorter than the stride:
//
//     columns 3 and 4 of 8, of elements of 4 bytes: stride = 32, row_len = 8
//
//     memory   . . . 0 1 . . .   . . . 2 3 . . .   . . . 4 5 . . .        elements by their number in the view
struct ElementRef {
    GlobalRef rows;
    u64 row_len; // bytes of a row that belong to the tensor

    // The address of a byte that there is, counted through all rows as if they were contiguous.
    WHOLEMEM_HOST_DEVICE u64 address(u64 byte) const
    {
        if (row_len == 1)
            return rows.address(byte);
        const u64 row = byte / row_len;
        return rows.address(row) + (byte - row * row_len);
    }
};

static_assert(sizeof(ElementRef) == 72, "the layout is shared with Rust");

} // namespace wholemem
