// Errors: the exception that every call throws, and the check that header and library belong together.
//
// With `-fno-exceptions`, a failing call prints its error to standard error and calls `std::abort`. Programs that handle errors without
// exceptions use the C interface.

#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <wholemem.h>

namespace wholemem {

/// The error of a call.
class Error : public std::runtime_error {
public:
    /// The error with which the last call of this thread failed.
    static Error last()
    {
        wm_error_info_t info = {};
        info.struct_size = sizeof info;
        if (wm_last_error_info(&info) != WM_OK)
            info.status = WM_ERROR_PANIC;
        Details details;
        details.status = info.status;
        details.message = info.message != nullptr ? info.message : "";
        details.hint = info.hint != nullptr ? info.hint : "";
        if (info.rank != WM_NO_RANK)
            details.rank = info.rank;
        if (info.position != WM_NO_POSITION)
            details.position = info.position;
        details.missing_ranks.assign(info.missing_ranks, info.missing_ranks + info.missing_count);
        return Error(std::move(details));
    }

    /// An error with a status and a message.
    Error(wm_status_t status, std::string message) : Error(details_of(status, std::move(message))) {}

    /// The status, such as `WM_ERROR_TIMEOUT`.
    wm_status_t status() const noexcept { return details_->status; }
    /// The name of the status, such as `"WM_ERROR_TIMEOUT"`.
    const char *name() const noexcept { return wm_status_name(status()); }
    /// The message without the hint; `what()` returns both.
    const std::string &message() const noexcept { return details_->message; }
    /// What the caller can do about the error; empty if there is no hint.
    const std::string &hint() const noexcept { return details_->hint; }
    /// The rank that caused the error, if one did.
    std::optional<std::uint32_t> rank() const noexcept { return details_->rank; }
    /// The smallest position of an index that names no row, if one does.
    std::optional<std::uint64_t> position() const noexcept { return details_->position; }
    /// The ranks that did not take part in a call before its timeout, if some are known.
    const std::vector<std::uint32_t> &missing_ranks() const noexcept { return details_->missing_ranks; }

private:
    struct Details {
        wm_status_t status = WM_OK;
        std::string message;
        std::string hint;
        std::optional<std::uint32_t> rank;
        std::optional<std::uint64_t> position;
        std::vector<std::uint32_t> missing_ranks;
    };

    static Details details_of(wm_status_t status, std::string message)
    {
        Details details;
        details.status = status;
        details.message = std::move(message);
        return details;
    }

    explicit Error(Details details)
        : std::runtime_error(details.hint.empty() ? details.message : details.message + "\nhint: " + details.hint),
          details_(std::make_shared<const Details>(std::move(details)))
    {
    }

    // Shared, because copies of an exception must not throw.
    std::shared_ptr<const Details> details_;
};

namespace detail {

/// Throws an error; without exceptions, prints it and ends the process.
[[noreturn]] inline void raise(const Error &error)
{
#if defined(__cpp_exceptions)
    throw error;
#else
    std::fprintf(stderr, "wholemem: %s: %s\n", error.name(), error.what());
    std::abort();
#endif
}

/// Throws an error for an argument that the C++ interface rejects.
[[noreturn]] inline void reject(std::string message) { raise(Error(WM_ERROR_INVALID_ARGUMENT, std::move(message))); }

} // namespace detail

/// Throws the error of a C function that has returned `status`, unless it succeeded.
inline void check(wm_status_t status)
{
    if (status != WM_OK)
        detail::raise(Error::last());
}

/// Throws an error unless the loaded library supports programs that were compiled with this header. The functions that create a
/// backend, a communicator or a store client call it.
inline void check_version() { check(wm_check_version(WM_ABI_VERSION)); }

} // namespace wholemem
