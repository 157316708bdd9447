// Memory that every rank has a part of, and every rank reaches: one small value leads to the part of any rank.
//
//     flat      | rank 0 ...... | rank 1 ...... | rank 2 ...... |      base + rank * stride: no memory is read to find a part
//               ^ base          ^ base + stride
//
//     table     [ part 0, part 1, part 2 ]                            for memory whose address was not ours to choose
//                  + base  + base  + base
//
// Others write a window while kernels run, so it must not be read through the cache for data that never changes: no __ldg, and
// no pointer that is both const and __restrict__. Plain loads are right between a wait and the next arrival (barrier.cuh).
//
// Compiles as C++11 under a host compiler, nvcc and NVRTC.
#pragma once

#include "wholemem/global_ref.cuh"

namespace wholemem {

struct Window {
    u64 base;   // added to every part's address; of rank 0's part where there is no table
    u64 stride; // bytes from one rank's part to the next rank's
    u64 table;  // address of u64[ranks], the parts' addresses; 0: the window is flat

    // Whether there is one at all.
    WHOLEMEM_HOST_DEVICE bool exists() const { return (base | stride | table) != 0; }

    // Where a rank's part is.
    WHOLEMEM_HOST_DEVICE u64 address(u32 rank) const
    {
        return table != 0 ? ((const u64 *)table)[rank] + base : base + rank * stride;
    }

    template <class T> WHOLEMEM_HOST_DEVICE T *pointer(u32 rank) const { return (T *)address(rank); }

    // The same window from a byte of each part on.
    WHOLEMEM_HOST_DEVICE Window from(u64 offset) const
    {
        Window rest = *this;
        rest.base += offset;
        return rest;
    }
};

static_assert(sizeof(Window) == 24, "the layout is shared with Rust");

} // namespace wholemem
