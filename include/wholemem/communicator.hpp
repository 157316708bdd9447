// Communicators: groups of ranks, each with a device.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include <wholemem.h>
#include <wholemem/device.hpp>
#include <wholemem/span.hpp>
#include <wholemem/timeout.hpp>

namespace wholemem {

/// A stream of the communicator's device: a `cudaStream_t`, or null for the default stream. The host backend ignores it.
using Stream = void *;

/// The id of a group, which one rank creates and the program sends to the others. It contains a secret.
class UniqueId {
public:
    /// Creates an id.
    static UniqueId create()
    {
        check_version();
        UniqueId id;
        check(wm_unique_id_create(&id.id_));
        return id;
    }

    /// Reads an id from the text that `text` returned.
    static UniqueId parse(const std::string &text)
    {
        if (text.size() >= sizeof(wm_unique_id_t))
            detail::reject("the text is too long for a unique id");
        UniqueId id;
        text.copy(id.id_.text, text.size());
        return id;
    }

    /// The id as text, which the program sends to the other ranks.
    std::string text() const { return id_.text; }

    /// The id as the C interface has it.
    const wm_unique_id_t &get() const noexcept { return id_; }

private:
    wm_unique_id_t id_ = {};
};

/// Options of communicators.
struct CommunicatorOptions {
    /// The time for which each call waits for the other ranks. Zero is the time in `WHOLEMEM_TIMEOUT`, or its default.
    Timeout timeout = std::chrono::nanoseconds(0);
    /// The device of this rank; null selects one: CUDA if it works, otherwise the host.
    const Device *device = nullptr;
};

/// A rank's membership in a group of ranks. When it is destroyed, the rank leaves the group.
class Communicator : public detail::Handle<wm_communicator_t, wm_communicator_destroy> {
public:
    using Handle::Handle;

    /// Joins the group of an id as rank `rank` of `size`, and waits until all ranks have joined. Collective.
    static Communicator create(const UniqueId &id, std::uint32_t rank, std::uint32_t size, const CommunicatorOptions &options = {})
    {
        check_version();
        const wm_communicator_options_t c_options = c_options_of(options);
        wm_communicator_t communicator = {};
        check(wm_communicator_create(&id.get(), rank, size, device_of(options), &c_options, &communicator));
        return Communicator(communicator);
    }

    /// Joins the group for which a launcher started this process: `wholemem launch`, torchrun, srun or mpirun. Collective.
    static Communicator from_env(const CommunicatorOptions &options = {})
    {
        check_version();
        const wm_communicator_options_t c_options = c_options_of(options);
        wm_communicator_t communicator = {};
        check(wm_communicator_create_from_env(device_of(options), &c_options, &communicator));
        return Communicator(communicator);
    }

    /// Creates a group within this process, in which rank `n` has device `n`. The program uses each communicator in a thread of its
    /// own. The device in `options` is ignored.
    static std::vector<Communicator> local(span<const Device> devices, const CommunicatorOptions &options = {})
    {
        check_version();
        const wm_communicator_options_t c_options = c_options_of(options);
        std::vector<wm_device_t> c_devices;
        for (const Device &device : devices)
            c_devices.push_back(device.get());
        std::vector<wm_communicator_t> created(devices.size());
        std::vector<Communicator> communicators;
        // Allocated first: an exception between the calls would lose the handles.
        communicators.reserve(devices.size());
        check(wm_communicator_create_local(c_devices.data(), static_cast<std::uint32_t>(c_devices.size()), &c_options, created.data()));
        for (const wm_communicator_t communicator : created)
            communicators.emplace_back(communicator);
        return communicators;
    }

    /// Divides the group: ranks with the same color form a new group, ordered by key. With `WM_NO_COLOR`, the result has no handle.
    /// Collective.
    Communicator split(std::uint32_t color, std::uint32_t key = 0) const
    {
        wm_communicator_t part = {};
        check(wm_communicator_split(get(), color, key, &part));
        return Communicator(part);
    }

    /// The number of this rank, counted from 0.
    std::uint32_t rank() const
    {
        std::uint32_t rank = 0;
        check(wm_communicator_rank(get(), &rank));
        return rank;
    }

    /// The number of ranks.
    std::uint32_t size() const
    {
        std::uint32_t size = 0;
        check(wm_communicator_size(get(), &size));
        return size;
    }

    /// The device of this rank.
    Device device() const
    {
        wm_device_t device = {};
        check(wm_communicator_device(get(), &device));
        return Device(device);
    }

    /// Waits until all ranks have called this function. Collective. It does not wait for work on streams.
    void barrier() const { check(wm_communicator_barrier(get())); }

    /// Waits until the work of a stream has ended and all ranks have called this function. Collective.
    void barrier_on(Stream stream) const { check(wm_communicator_barrier_on(get(), stream)); }

    /// Throws the error with which the group has failed, if it has failed, without waiting.
    void check_group() const { check(wm_communicator_check(get())); }

    /// Aborts the group: current and later calls of all ranks fail with `WM_ERROR_ABORTED`. Any thread may call it at any time.
    void abort() const { check(wm_communicator_abort(get())); }

    /// Gathers one value of every rank, in the order of ranks. Collective. This is for small data of the program.
    template <class T> std::vector<T> all_gather(const T &value) const
    {
        static_assert(std::is_trivially_copyable_v<T>, "the bytes of a value are sent");
        std::vector<T> all(size());
        check(wm_communicator_all_gather(get(), &value, sizeof value, all.data()));
        return all;
    }

    /// Sends `sent[n]` to rank `n`, and returns the values from all ranks, in their order. Collective. `sent` has a value for each rank.
    template <class T> std::vector<T> all_to_all(span<const T> sent) const
    {
        static_assert(std::is_trivially_copyable_v<T>, "the bytes of a value are sent");
        std::vector<T> received(size());
        if (sent.size() != received.size())
            detail::reject("an all-to-all has another number of values than the group has ranks");
        check(wm_communicator_all_to_all(get(), sent.data(), sizeof(T), received.data()));
        return received;
    }

    /// Sends a file descriptor of every rank to all ranks, and returns them in the order of ranks. The caller closes them. Collective. A
    /// rank with -1 sends none.
    std::vector<int> all_gather_fd(int descriptor) const
    {
        std::vector<int> all(size());
        check(wm_communicator_all_gather_fd(get(), descriptor, all.data()));
        return all;
    }

    /// The time for which calls wait for other ranks; `nanoseconds::max()` if they wait without end.
    std::chrono::nanoseconds timeout() const
    {
        std::uint64_t timeout = 0;
        check(wm_communicator_timeout(get(), &timeout));
        const auto max = static_cast<std::uint64_t>(std::chrono::nanoseconds::max().count());
        return std::chrono::nanoseconds(timeout < max ? timeout : max);
    }

    /// Copies the values of rank `root` to those of all ranks. Collective. This is for small data of the program.
    template <class T> void broadcast(std::uint32_t root, span<T> values) const
    {
        static_assert(std::is_trivially_copyable_v<T>, "the bytes of the values are sent");
        check(wm_communicator_broadcast(get(), root, values.data(), values.size_bytes()));
    }

    /// Waits until the work that is enqueued on a stream has run.
    void synchronize(Stream stream = nullptr, Timeout timeout = Timeout::infinite()) const
    {
        check(wm_stream_synchronize(get(), stream, timeout.nanoseconds()));
    }

    /// Forgets a stream that was passed to calls on the communicator or on its objects. Call it before you destroy such a stream.
    void forget_stream(Stream stream) const { check(wm_stream_forget(get(), stream)); }

private:
    static wm_communicator_options_t c_options_of(const CommunicatorOptions &options)
    {
        wm_communicator_options_t c_options = {};
        c_options.struct_size = sizeof c_options;
        c_options.timeout_ns = options.timeout.nanoseconds();
        return c_options;
    }

    static wm_device_t device_of(const CommunicatorOptions &options)
    {
        return options.device != nullptr ? options.device->get() : wm_device_t{};
    }
};

} // namespace wholemem
