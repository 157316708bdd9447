// The owner of a handle of the C interface, from which all classes for objects are made.

#pragma once

#include <utility>

#include <wholemem.h>

namespace wholemem {
namespace detail {

/// Owns a handle: move-only, and frees the handle when it is destroyed.
template <class H, wm_status_t (*Destroy)(H)> class Handle {
public:
    Handle() noexcept = default;
    explicit Handle(H handle) noexcept : handle_(handle) {}
    Handle(Handle &&other) noexcept : handle_(other.release()) {}
    Handle(const Handle &) = delete;
    Handle &operator=(const Handle &) = delete;
    ~Handle() { reset(); }

    Handle &operator=(Handle &&other) noexcept
    {
        if (this != &other) {
            reset();
            handle_ = other.release();
        }
        return *this;
    }

    /// The handle, which this object still owns.
    H get() const noexcept { return handle_; }

    /// Returns the handle, which the caller then owns. This object has none afterwards.
    H release() noexcept { return std::exchange(handle_, H{}); }

    /// Frees the handle, if there is one. Its error is ignored: the only one is that the C interface freed the handle already.
    void reset() noexcept
    {
        if (handle_.value != 0)
            static_cast<void>(Destroy(release()));
    }

    /// Whether this object has a handle: it has none after `release`, `reset` and a move.
    explicit operator bool() const noexcept { return handle_.value != 0; }

private:
    H handle_ = {};
};

} // namespace detail
} // namespace wholemem
