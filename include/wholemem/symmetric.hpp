// Symmetric memory: windows, of which every rank has a part, and collective calls over them.

#pragma once

#include <cstddef>
#include <cstdint>

#include <wholemem.h>
#include <wholemem/communicator.hpp>
#include <wholemem/dtype.hpp>

namespace wholemem {

/// Options of symmetric memory, equal on all ranks. Zero is the default of every number.
struct SymmetricOptions {
    /// The number of sequences of collective calls that can be in flight at once; 0 is one.
    std::uint32_t lanes = 0;
    /// Whether new windows on GPUs have memory of `cudaMalloc`.
    bool use_cuda_malloc = false;
    /// The number of bytes of addresses to reserve for windows, for all ranks together.
    std::uint64_t window_space = 0;
    /// The length of a staging buffer, through which calls copy memory that is not in a window.
    std::uint64_t staging_len = 0;
    /// The maximum number of bytes that a rank sends in packets in one call.
    std::uint64_t packets_len = 0;
    /// The time for which a collective call waits for other ranks. Zero is the timeout of the communicator.
    Timeout timeout = std::chrono::nanoseconds(0);
};

/// Memory of which every rank has a part, and which every rank has mapped.
class Window : public detail::Handle<wm_window_t, wm_window_destroy> {
public:
    using Handle::Handle;

    /// The bytes of a rank's part, at the addresses where this rank has mapped them. They are valid until the window is freed. The CPU
    /// can access them on the host backend, and in windows that were created on the host.
    span<std::byte> part(std::uint32_t rank) const
    {
        void *address = nullptr;
        std::uint64_t len = 0;
        check(wm_window_address_of(get(), rank, &address, &len));
        return {static_cast<std::byte *>(address), static_cast<std::size_t>(len)};
    }

    /// The address of a rank's part as elements of a type.
    template <class T> T *pointer(std::uint32_t rank) const
    {
        return static_cast<T *>(static_cast<void *>(part(rank).data()));
    }

    /// Frees the window on all ranks, and waits until all ranks have freed it. Collective. Afterwards registered memory of this rank
    /// may be freed. This object has no handle then, except if the call fails.
    void deregister()
    {
        check(wm_window_deregister(get()));
        static_cast<void>(release());
    }
};

/// The windows of a communicator, and the collective calls over them. The template parameters of calls are the element types.
class SymmetricMemory : public detail::Handle<wm_symmetric_memory_t, wm_symmetric_memory_destroy> {
public:
    using Handle::Handle;

    /// Creates the symmetric memory of a communicator. Collective. A communicator needs one, which its threads share.
    static SymmetricMemory create(const Communicator &communicator, const SymmetricOptions &options = {})
    {
        wm_symmetric_options_t c_options = {};
        c_options.struct_size = sizeof c_options;
        c_options.lanes = options.lanes;
        c_options.use_cuda_malloc = options.use_cuda_malloc;
        c_options.window_space = options.window_space;
        c_options.staging_len = options.staging_len;
        c_options.packets_len = options.packets_len;
        c_options.timeout_ns = options.timeout.nanoseconds();
        wm_symmetric_memory_t symmetric = {};
        check(wm_symmetric_memory_create(communicator.get(), &c_options, &symmetric));
        return SymmetricMemory(symmetric);
    }

    /// Creates a window of zeroed memory of the ranks' devices, with `len` bytes on this rank. Collective.
    Window window(std::uint64_t len) const
    {
        wm_window_t window = {};
        check(wm_window_create(get(), len, &window));
        return Window(window);
    }

    /// Creates a window of zeroed host memory, which the devices can access, with `len` bytes on this rank. Collective.
    Window window_on_host(std::uint64_t len) const
    {
        wm_window_t window = {};
        check(wm_window_create_on_host(get(), len, &window));
        return Window(window);
    }

    /// Registers `len` bytes of existing memory of this rank as a window. Collective. The memory must stay valid until the window was
    /// deregistered: call `Window::deregister`.
    Window register_window(void *address, std::uint64_t len) const
    {
        wm_window_t window = {};
        check(wm_window_register(get(), address, len, &window));
        return Window(window);
    }

    /// Creates a window of memory that other code of this process has mapped. Collective. The window keeps the memory alive.
    Window adopt_window(void *address, std::uint64_t len) const
    {
        wm_window_t window = {};
        check(wm_window_adopt(get(), address, len, &window));
        return Window(window);
    }

    /// Reduces values of the host of all ranks in place, and waits. The result is bitwise the same on every rank. Collective.
    template <class T> void all_reduce(span<T> values, ReduceOp op = ReduceOp::Sum, std::uint32_t lane = 0) const
    {
        check(wm_all_reduce_host(get(), lane, values.data(), values.size(), number(dtype_of<T>), static_cast<wm_reduce_op_t>(op)));
    }

    /// Copies values of the host of rank `root` to those of all ranks, and waits. Collective.
    template <class T> void broadcast(std::uint32_t root, span<T> values, std::uint32_t lane = 0) const
    {
        check(wm_broadcast_host(get(), lane, root, values.data(), values.size(), number(dtype_of<T>)));
    }

    /// Gathers values of the host of every rank, and waits: those of rank `n` are written to `all` from element `n * values.size()`
    /// on. Collective.
    template <class T> void all_gather(span<const T> values, span<T> all, std::uint32_t ranks, std::uint32_t lane = 0) const
    {
        if (all.size() != values.size() * ranks)
            detail::reject("the output of an all-gather has another length than the inputs of all ranks");
        check(wm_all_gather_host(get(), lane, values.data(), all.data(), values.size(), number(dtype_of<T>)));
    }

    /// Enqueues an all-reduce of memory that the device can access. `input` and `output` are the same address, or do not overlap; they
    /// must stay valid until the work has run. Errors of the work are thrown by `check_lane` or the next call. Collective.
    template <class T>
    void all_reduce_on(Stream stream, const T *input, T *output, std::uint64_t count, ReduceOp op = ReduceOp::Sum,
                       std::uint32_t lane = 0) const
    {
        check(wm_all_reduce(get(), lane, stream, input, output, count, number(dtype_of<T>), static_cast<wm_reduce_op_t>(op)));
    }

    /// Enqueues an all-gather of `count` elements of every rank. Collective.
    template <class T>
    void all_gather_on(Stream stream, const T *input, T *output, std::uint64_t count, std::uint32_t lane = 0) const
    {
        check(wm_all_gather(get(), lane, stream, input, output, count, number(dtype_of<T>)));
    }

    /// Enqueues a broadcast of `count` elements of rank `root`. Collective.
    template <class T>
    void broadcast_on(Stream stream, std::uint32_t root, const T *input, T *output, std::uint64_t count, std::uint32_t lane = 0) const
    {
        check(wm_broadcast(get(), lane, stream, root, input, output, count, number(dtype_of<T>)));
    }

    /// Enqueues a barrier: work that any rank enqueues afterwards runs after the work that all ranks have enqueued before. Collective.
    void barrier_on(Stream stream, std::uint32_t lane = 0) const { check(wm_barrier(get(), lane, stream)); }

    /// Throws the error of a collective call of a lane that has failed, if any, without waiting. Wait for the stream first.
    void check_lane(std::uint32_t lane = 0) const { check(wm_symmetric_memory_check(get(), lane)); }

    /// The number of calls of a lane whose data were copied through a staging buffer.
    std::uint64_t staged_calls(std::uint32_t lane = 0) const
    {
        std::uint64_t count = 0;
        check(wm_symmetric_memory_staged_calls(get(), lane, &count));
        return count;
    }

private:
    static constexpr wm_dtype_t number(Dtype dtype) { return static_cast<wm_dtype_t>(dtype); }
};

} // namespace wholemem
