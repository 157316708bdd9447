// Log events of the library, which are passed to a function of the program.

#pragma once

#include <functional>
#include <memory>
#include <utility>

#include <wholemem.h>
#include <wholemem/error.hpp>
#include <wholemem/handle.hpp>

namespace wholemem {

/// A log event. The texts are valid until the function that gets the event returns.
struct LogEvent {
    /// One of the constants `WM_LOG_...`.
    wm_log_level_t level;
    /// The path of a module of the library, such as `wholemem_hal::cuda`.
    const char *target;
    const char *message;
};

/// A subscription to the log events of this process, which ends when this object is destroyed: the function gets all events so far, and is
/// not called afterwards.
class LogSubscription {
public:
    /// A function that gets log events. A thread of the library calls it, one event at a time and in their order. It must not end its
    /// subscription. If it throws, `std::terminate` is called.
    using Function = std::function<void(const LogEvent &)>;

    LogSubscription() noexcept = default;
    LogSubscription(LogSubscription &&) noexcept = default;

    // The old subscription ends before its function is destroyed.
    LogSubscription &operator=(LogSubscription &&other) noexcept
    {
        handle_ = std::move(other.handle_);
        function_ = std::move(other.function_);
        return *this;
    }

    /// Passes the log events of this process to a function. `filter` selects events, such as `"warn,wholemem::collective=debug"`; null is
    /// the value of `WHOLEMEM_LOG`. A process has at most one subscription at a time, and all of them have the filter of the first.
    [[nodiscard]] static LogSubscription subscribe(const char *filter, Function function)
    {
        check_version();
        if (!function)
            detail::reject("the function for log events is empty");
        LogSubscription subscription;
        subscription.function_ = std::make_unique<Function>(std::move(function));
        wm_log_subscription_t handle = {};
        check(wm_log_subscribe(filter, &deliver, subscription.function_.get(), &handle));
        subscription.handle_ = Owner(handle);
        return subscription;
    }

    /// Ends the subscription, if there is one.
    void reset() noexcept
    {
        handle_.reset();
        function_.reset();
    }

    /// Whether this object has a subscription.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

private:
    using Owner = detail::Handle<wm_log_subscription_t, wm_log_subscription_destroy>;

    // No exception may pass through the library.
    static void deliver(void *data, wm_log_level_t level, const char *target, const char *message) noexcept
    {
        (*static_cast<const Function *>(data))(LogEvent{level, target, message});
    }

    // A move keeps the address of the function. The handle is declared last, so that it is destroyed first.
    std::unique_ptr<Function> function_;
    Owner handle_;
};

} // namespace wholemem
