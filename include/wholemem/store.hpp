// The store: named, immutable objects in shared memory, which outlive the processes that created them.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <wholemem.h>
#include <wholemem/error.hpp>
#include <wholemem/handle.hpp>
#include <wholemem/span.hpp>
#include <wholemem/timeout.hpp>

namespace wholemem {

/// A sealed object, which is mapped and not copied. Its memory is valid until this object is destroyed.
class StoreObject : public detail::Handle<wm_store_object_t, wm_store_object_destroy> {
public:
    using Handle::Handle;

    /// The bytes of the object. They must not be written, and are addresses of the device if the object is in device memory.
    span<const std::byte> bytes() const
    {
        const void *address = nullptr;
        std::uint64_t len = 0;
        check(wm_store_object_data(get(), &address, &len));
        return {static_cast<const std::byte *>(address), static_cast<std::size_t>(len)};
    }

    /// The description of the object: its id, version, name, metadata, and shape if it is an array.
    wm_store_entry_t entry() const
    {
        wm_store_entry_t entry = {};
        entry.struct_size = sizeof entry;
        check(wm_store_object_entry(get(), &entry));
        return entry;
    }
};

/// An object that is written and not sealed yet. If it is destroyed before it was sealed, the object does not exist.
class StoreDraft : public detail::Handle<wm_store_draft_t, wm_store_draft_destroy> {
public:
    using Handle::Handle;

    /// The memory to write, until the draft is sealed. `member` is the number of the object in a pack, otherwise 0.
    span<std::byte> bytes(std::uint32_t member = 0) const
    {
        void *address = nullptr;
        std::uint64_t len = 0;
        check(wm_store_draft_data(get(), member, &address, &len));
        return {static_cast<std::byte *>(address), static_cast<std::size_t>(len)};
    }

    /// Makes the object immutable, so that all clients find it by its name.
    wm_store_sealed_t seal() const
    {
        wm_store_sealed_t sealed = {};
        check(wm_store_draft_seal(get(), &sealed));
        return sealed;
    }
};

/// A subscription to the events of objects.
class StoreWatch : public detail::Handle<wm_store_watch_t, wm_store_watch_destroy> {
public:
    using Handle::Handle;

    /// Waits for the next event, such as `WM_STORE_EVENT_REPLACED`. Its `revision` is an argument of `StoreClient::watch_after`.
    wm_store_event_t next(Timeout timeout = Timeout::infinite()) const
    {
        wm_store_event_t event = {};
        event.struct_size = sizeof event;
        check(wm_store_watch_next(get(), timeout.nanoseconds(), &event));
        return event;
    }
};

/// A connection to a store.
class StoreClient : public detail::Handle<wm_store_t, wm_store_destroy> {
public:
    using Handle::Handle;

    /// Connects to the store at a socket. An empty path is that in `WHOLEMEM_SOCKET`, or else the default of this user.
    static StoreClient connect(const std::string &socket = {}, Timeout timeout = std::chrono::seconds(60))
    {
        check_version();
        wm_store_options_t options = {};
        options.struct_size = sizeof options;
        options.timeout_ns = timeout.nanoseconds();
        wm_store_t store = {};
        check(wm_store_connect(socket.empty() ? nullptr : socket.c_str(), &options, &store));
        return StoreClient(store);
    }

    /// Copies bytes to the store as an object with a name. If another object has the name, it is replaced.
    wm_store_sealed_t put(const std::string &name, span<const std::byte> bytes,
                          const wm_store_object_options_t *options = nullptr) const
    {
        wm_store_sealed_t sealed = {};
        check(wm_store_put(get(), name.c_str(), bytes.data(), bytes.size(), options, &sealed));
        return sealed;
    }

    /// Creates an object of `len` bytes, which the caller writes and seals.
    StoreDraft create(const std::string &name, std::uint64_t len, const wm_store_object_options_t *options = nullptr) const
    {
        wm_store_draft_t draft = {};
        check(wm_store_draft_create(get(), name.c_str(), len, options, &draft));
        return StoreDraft(draft);
    }

    /// Gets the object that has a name, without a copy. Waits up to the timeout for the object to exist.
    StoreObject get_object(const std::string &name, Timeout timeout = std::chrono::nanoseconds(0)) const
    {
        wm_store_object_t object = {};
        check(wm_store_get(get(), name.c_str(), timeout.nanoseconds(), &object));
        return StoreObject(object);
    }

    /// Deletes the object that has a name. Processes that hold it keep it.
    void remove(const std::string &name) const { check(wm_store_delete_name(get(), name.c_str())); }

    /// Subscribes to the events of objects whose names begin with `prefix`.
    StoreWatch watch(const std::string &prefix = {}) const
    {
        wm_store_watch_t watch = {};
        check(wm_store_watch(get(), prefix.c_str(), &watch));
        return StoreWatch(watch);
    }

    /// Subscribes as `watch`, and first returns the events after the one with this revision. If the store does not have all of them any
    /// more, the first call of `next` throws `WM_ERROR_STORE_EVENTS_MISSED`.
    StoreWatch watch_after(const std::string &prefix, std::uint64_t revision) const
    {
        wm_store_watch_t watch = {};
        check(wm_store_watch_after(get(), prefix.c_str(), revision, &watch));
        return StoreWatch(watch);
    }

    /// The numbers of objects and clients, and the memory that the store uses.
    wm_store_status_t status() const
    {
        wm_store_status_t status = {};
        status.struct_size = sizeof status;
        check(wm_store_status(get(), &status));
        return status;
    }
};

} // namespace wholemem
