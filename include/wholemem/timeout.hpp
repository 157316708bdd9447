// Timeouts as durations of `std::chrono`.

#pragma once

#include <chrono>
#include <cstdint>

#include <wholemem.h>

namespace wholemem {

/// The time for which a call waits. It converts from every duration of `std::chrono`; a negative duration is zero.
class Timeout {
public:
    /// A timeout after a duration. A duration of more than 584 years never expires.
    template <class Rep, class Period>
    constexpr Timeout(std::chrono::duration<Rep, Period> duration) : nanoseconds_(of(duration))
    {
    }

    /// A timeout that never expires.
    static constexpr Timeout infinite() noexcept { return Timeout(WM_TIMEOUT_INFINITE); }

    /// The timeout as the C interface has it.
    constexpr std::uint64_t nanoseconds() const noexcept { return nanoseconds_; }

private:
    explicit constexpr Timeout(std::uint64_t nanoseconds) noexcept : nanoseconds_(nanoseconds) {}

    template <class Rep, class Period> static constexpr std::uint64_t of(std::chrono::duration<Rep, Period> duration)
    {
        using Unsigned = std::chrono::duration<std::uint64_t, std::nano>;
        using Real = std::chrono::duration<long double, std::nano>;
        if (!(duration > duration.zero()))
            return 0;
        // 2^64, which is exact as a `long double`.
        if (std::chrono::duration_cast<Real>(duration).count() >= 18446744073709551616.0L)
            return WM_TIMEOUT_INFINITE;
        return std::chrono::duration_cast<Unsigned>(duration).count();
    }

    std::uint64_t nanoseconds_;
};

} // namespace wholemem
