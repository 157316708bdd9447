// The member functions of WindowRef, by which kernels get the addresses of all ranks' parts of a window (memory that every rank
// has mapped).
//
// Other ranks write to a window while kernels run, so it must not be read through the read-only data cache: no __ldg, and no
// pointer that is both const and __restrict__. Plain loads are correct between a wait and the next arrival (barrier.cuh).
//
// Compiles as C++11 under a host compiler, nvcc and NVRTC.
#pragma once

#include "wholemem/abi.cuh"

namespace wholemem {

WHOLEMEM_HOST_DEVICE bool WindowRef::exists() const { return (base | stride | table) != 0; }

WHOLEMEM_HOST_DEVICE u64 WindowRef::address(u32 rank) const
{
    return table != 0 ? ((const u64 *)table)[rank] + base : base + rank * stride;
}

template <class T> WHOLEMEM_HOST_DEVICE T *WindowRef::pointer(u32 rank) const { return (T *)address(rank); }

WHOLEMEM_HOST_DEVICE WindowRef WindowRef::from(u64 offset) const
{
    WindowRef rest = *this;
    rest.base += offset;
    return rest;
}

} // namespace wholemem
