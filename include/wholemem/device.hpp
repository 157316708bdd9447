// Backends and devices.

#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include <wholemem.h>
#include <wholemem/error.hpp>
#include <wholemem/handle.hpp>

namespace wholemem {

/// The kind of a backend.
enum class BackendKind : wm_backend_kind_t {
    /// CUDA if it works on this machine, otherwise the host backend.
    Auto = WM_BACKEND_AUTO,
    /// Linux shared memory: devices are NUMA nodes.
    Host = WM_BACKEND_HOST,
    /// GPUs.
    Cuda = WM_BACKEND_CUDA,
};

/// Properties of a device.
struct DeviceInfo {
    /// The kind of the device's backend: `Host` or `Cuda`.
    BackendKind backend = BackendKind::Host;
    /// The number of the device on its backend.
    std::uint32_t number = 0;
    /// The total memory in bytes.
    std::uint64_t memory_len = 0;
    /// The compute capability of a GPU times ten; 0 for other devices.
    std::uint32_t compute = 0;
    /// The NUMA node that is nearest to the device; -1 if it is not known.
    std::int32_t numa_node = -1;
    /// An identifier that is the same in every process.
    std::array<std::uint8_t, 16> uuid = {};
    /// The name of the device.
    std::string name;
};

/// A GPU or a NUMA node.
class Device : public detail::Handle<wm_device_t, wm_device_destroy> {
public:
    using Handle::Handle;

    /// The properties of the device.
    DeviceInfo info() const
    {
        wm_device_info_t info = {};
        info.struct_size = sizeof info;
        check(wm_device_info(get(), &info));
        DeviceInfo result;
        result.backend = static_cast<BackendKind>(info.backend);
        result.number = info.number;
        result.memory_len = info.memory_len;
        result.compute = info.compute;
        result.numa_node = info.numa_node;
        for (std::size_t i = 0; i < result.uuid.size(); ++i)
            result.uuid[i] = info.uuid[i];
        result.name = info.name;
        return result;
    }

    /// The number of bytes that can currently be allocated.
    std::uint64_t available() const
    {
        std::uint64_t len = 0;
        check(wm_device_available(get(), &len));
        return len;
    }
};

/// An open backend. Devices of two open backends cannot be mixed.
class Backend : public detail::Handle<wm_backend_t, wm_backend_destroy> {
public:
    using Handle::Handle;

    /// Opens a backend. `virtual_devices` is 0, or the number of devices that the host backend has instead of one for each NUMA node.
    static Backend open(BackendKind kind = BackendKind::Auto, std::uint32_t virtual_devices = 0)
    {
        check_version();
        wm_backend_t backend = {};
        check(wm_backend_open(static_cast<wm_backend_kind_t>(kind), virtual_devices, &backend));
        return Backend(backend);
    }

    /// The number of devices.
    std::uint32_t device_count() const
    {
        std::uint32_t count = 0;
        check(wm_backend_device_count(get(), &count));
        return count;
    }

    /// The device with a number.
    Device device(std::uint32_t number) const
    {
        wm_device_t device = {};
        check(wm_device_open(get(), number, &device));
        return Device(device);
    }

    /// All devices.
    std::vector<Device> devices() const
    {
        std::vector<Device> devices;
        const std::uint32_t count = device_count();
        devices.reserve(count);
        for (std::uint32_t number = 0; number < count; ++number)
            devices.push_back(device(number));
        return devices;
    }
};

} // namespace wholemem
