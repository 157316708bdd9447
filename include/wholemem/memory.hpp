// Whole memory: bytes that are divided among the ranks' devices, and that every rank has mapped.

#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <wholemem.h>
#include <wholemem/communicator.hpp>

namespace wholemem {

/// How a rank addresses a memory.
enum class Kind : wm_kind_t {
    /// One range of addresses over all ranks' rows.
    Continuous = WM_KIND_CONTINUOUS,
    /// One range of addresses for each rank's rows.
    Chunked = WM_KIND_CHUNKED,
};

/// Where a memory is.
enum class Location : wm_location_t {
    /// The memory of each rank's device.
    Device = WM_LOCATION_DEVICE,
    /// Host memory, which the devices access too.
    Host = WM_LOCATION_HOST,
};

/// The specification of a whole memory, equal on all ranks.
struct MemorySpec {
    /// The number of rows.
    std::uint64_t rows = 0;
    /// The length of a row in bytes. A row is never divided between ranks.
    std::uint64_t row_len = 0;
    Kind kind = Kind::Continuous;
    Location location = Location::Device;
    /// The number of rows of each rank; empty to divide the rows evenly.
    std::vector<std::uint64_t> rows_of_each = {};
    /// Whether the memory must have the same addresses on all ranks, so that ranks can exchange pointers.
    bool equal_addresses = false;
};

/// Bytes that are divided among the ranks of a communicator, and that every rank has mapped.
class WholeMemory : public detail::Handle<wm_memory_t, wm_memory_destroy> {
public:
    using Handle::Handle;

    /// Creates a memory filled with zeros. Collective.
    static WholeMemory create(const Communicator &communicator, const MemorySpec &spec)
    {
        wm_memory_spec_t c_spec = {};
        c_spec.struct_size = sizeof c_spec;
        c_spec.rows = spec.rows;
        c_spec.row_len = spec.row_len;
        c_spec.kind = static_cast<wm_kind_t>(spec.kind);
        c_spec.location = static_cast<wm_location_t>(spec.location);
        c_spec.equal_addresses = spec.equal_addresses;
        c_spec.rows_of_each = spec.rows_of_each.data();
        c_spec.rows_of_each_count = static_cast<std::uint32_t>(spec.rows_of_each.size());
        wm_memory_t memory = {};
        check(wm_memory_create(communicator.get(), &c_spec, &memory));
        return WholeMemory(memory);
    }

    /// The number of bytes of all rows.
    std::uint64_t len() const
    {
        std::uint64_t len = 0;
        check(wm_memory_len(get(), &len));
        return len;
    }

    /// The rows of a rank: the number of the first one, and how many they are.
    std::pair<std::uint64_t, std::uint64_t> rows_of(std::uint32_t rank) const
    {
        std::pair<std::uint64_t, std::uint64_t> rows;
        check(wm_memory_rows_of(get(), rank, &rows.first, &rows.second));
        return rows;
    }

    /// The bytes of a rank, at the addresses where this rank has mapped them. They are valid until the memory is released. The CPU can
    /// access them on the host backend and for `Location::Host`.
    span<std::byte> part(std::uint32_t rank) const
    {
        void *address = nullptr;
        std::uint64_t len = 0;
        check(wm_memory_address_of(get(), rank, &address, &len));
        return {static_cast<std::byte *>(address), static_cast<std::size_t>(len)};
    }

    /// Copies bytes of the host to the memory from byte `offset` on, and waits. Other ranks see them after the next barrier.
    void write(std::uint64_t offset, span<const std::byte> bytes) const
    {
        check(wm_memory_write(get(), offset, bytes.data(), bytes.size()));
    }

    /// Copies bytes from `offset` on to the host, and waits.
    void read(std::uint64_t offset, span<std::byte> bytes) const
    {
        check(wm_memory_read(get(), offset, bytes.data(), bytes.size()));
    }
};

} // namespace wholemem
