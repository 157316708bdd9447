// The addresses of tables and windows as arguments of users' kernels: `ElementRef` for `PtrGen`, and others.
//
// Include it in programs that launch kernels. It includes the headers for kernels, whose macros and global names other headers for C++ do
// not have.

#pragma once

#include <cstdint>
#include <cstring>

#include <wholemem.h>
#include <wholemem/error.hpp>
#include <wholemem/symmetric.hpp>
#include <wholemem/tensor.hpp>

#include "wholemem/barrier.cuh"
#include "wholemem/ptr_gen.cuh"
#include "wholemem/window.cuh"

namespace wholemem {
namespace detail {

/// Converts a structure of the C interface to the same structure of the headers for kernels.
template <class To, class From> To same_bytes(const From &from)
{
    static_assert(sizeof(To) == sizeof(From), "the headers for kernels and the C interface are of different versions");
    To to = {};
    std::memcpy(&to, &from, sizeof to);
    return to;
}

} // namespace detail

/// The addresses of a table's elements on this rank, from which a kernel creates a `PtrGen`. Valid until the tensor is released.
inline ElementRef element_ref(const WholeTensor &tensor)
{
    wm_element_ref_t reference = {};
    check(wm_tensor_element_ref(tensor.get(), &reference));
    return detail::same_bytes<ElementRef>(reference);
}

/// The addresses of a memory's rows on this rank. Valid until the memory is released.
inline GlobalRef global_ref(const WholeMemory &memory)
{
    wm_global_ref_t reference = {};
    check(wm_memory_global_ref(memory.get(), &reference));
    return detail::same_bytes<GlobalRef>(reference);
}

/// The addresses of all parts of a window on this rank. Valid until the window is freed.
inline WindowRef window_ref(const Window &window)
{
    wm_window_ref_t reference = {};
    check(wm_window_ref(window.get(), &reference));
    return detail::same_bytes<WindowRef>(reference);
}

/// A lane, from which a kernel creates a `Call`. Valid while the symmetric memory exists.
inline LaneRef lane_ref(const SymmetricMemory &symmetric, std::uint32_t lane = 0)
{
    wm_lane_ref_t reference = {};
    check(wm_symmetric_memory_lane_ref(symmetric.get(), lane, &reference));
    return detail::same_bytes<LaneRef>(reference);
}

} // namespace wholemem
