// Tests the parts of the C++ interface without ranks: spans, timeouts, element types, errors, owners of handles, the doctor and log events.

#include <array>
#include <chrono>
#include <cstdio>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#if __cplusplus >= 202002L
#include <span>
#endif

#include <wholemem/wholemem.hpp>

#include "require.hpp"

namespace {

using namespace std::chrono_literals;
using wholemem::span;
using wholemem::Timeout;

std::size_t count(span<const int> elements) { return elements.size(); }
std::size_t count_mutable(span<int> elements) { return elements.size(); }

void spans_convert_from_containers_with_contiguous_elements()
{
    std::vector<int> vector(3);
    const std::vector<int> constant(4);
    std::array<int, 5> array{};
    int plain[6] = {};
    REQUIRE(count(vector) == 3 && count(constant) == 4 && count(array) == 5 && count(plain) == 6);
    REQUIRE(count_mutable(vector) == 3 && count_mutable(array) == 5 && count_mutable(plain) == 6);
    REQUIRE(count(std::vector<int>(7)) == 7);
    REQUIRE(count(span(vector)) == 3 && count(span(plain)) == 6);
    static_assert(std::is_same_v<decltype(span(constant)), span<const int>>);
    static_assert(!std::is_convertible_v<const std::vector<int> &, span<int>>, "const is not removed");
    static_assert(!std::is_convertible_v<std::vector<int>, span<int>>, "a temporary is not written to");
    static_assert(!std::is_convertible_v<std::vector<long> &, span<const int>>, "elements are not converted");
    static_assert(!std::is_convertible_v<span<const int>, span<int>>, "const is not removed");
    span<int> elements(vector);
    elements[1] = 8;
    REQUIRE(vector[1] == 8 && elements.subspan(1, 2)[0] == 8 && elements.size_bytes() == 3 * sizeof(int));
    REQUIRE(span<int>().empty() && elements.end() - elements.begin() == 3);
#if __cplusplus >= 202002L
    REQUIRE(count(std::span<int>(vector)) == 3 && count(std::span<const int, 4>(constant)) == 4);
    const std::span<int> standard(span<int>{vector});
    REQUIRE(standard.data() == vector.data() && standard.size() == 3);
#endif
}

void timeouts_are_nanoseconds()
{
    static_assert(Timeout(3ms).nanoseconds() == 3'000'000);
    static_assert(Timeout(0.5s).nanoseconds() == 500'000'000);
    static_assert(Timeout(-3ms).nanoseconds() == 0);
    static_assert(Timeout(std::chrono::nanoseconds::max()).nanoseconds() == static_cast<std::uint64_t>(INT64_MAX));
    static_assert(Timeout(std::chrono::hours::max()).nanoseconds() == WM_TIMEOUT_INFINITE);
    static_assert(Timeout::infinite().nanoseconds() == WM_TIMEOUT_INFINITE);
}

void element_types_are_those_of_the_types()
{
    using wholemem::Dtype;
    using wholemem::dtype_of;
    static_assert(dtype_of<float> == Dtype::F32 && dtype_of<const double> == Dtype::F64 && dtype_of<bool> == Dtype::Bool);
    static_assert(dtype_of<long> == dtype_of<long long> && dtype_of<long> == Dtype::I64);
    static_assert(dtype_of<unsigned char> == Dtype::U8 && dtype_of<short> == Dtype::I16);
    static_assert(dtype_of<std::complex<float>> == Dtype::Complex64);
    static_assert(dtype_of<wholemem::Bits16<Dtype::Bf16>> == Dtype::Bf16);
    REQUIRE(wholemem::len_of(Dtype::Complex64) == sizeof(std::complex<float>));
    REQUIRE(wholemem::name_of(Dtype::Bf16) == std::string("bfloat16"));
}

void errors_carry_what_the_library_knows()
{
    const auto backend = wholemem::Backend::open(wholemem::BackendKind::Host, 3);
    REQUIRE(backend.device_count() == 3 && backend.devices()[2].info().number == 2);
    REQUIRE(backend.device(1).available() > 0);
    try {
        static_cast<void>(backend.device(9));
        REQUIRE(false && "there is no device 9");
    } catch (const wholemem::Error &error) {
        const wholemem::Error copy = error;
        REQUIRE(copy.status() == WM_ERROR_NO_SUCH_DEVICE && copy.name() == std::string("WM_ERROR_NO_SUCH_DEVICE"));
        REQUIRE(copy.message().find("there is no device 9") != std::string::npos);
        REQUIRE(!copy.rank() && !copy.position() && copy.missing_ranks().empty());
    }
}

void owners_are_moved_and_free_their_handles()
{
    static_assert(!std::is_copy_constructible_v<wholemem::Device> && !std::is_copy_assignable_v<wholemem::Device>);
    static_assert(std::is_nothrow_move_constructible_v<wholemem::Device> && std::is_nothrow_move_assignable_v<wholemem::Device>);
    const auto backend = wholemem::Backend::open(wholemem::BackendKind::Host, 2);
    auto first = backend.device(0);
    const wm_device_t freed = first.get();
    auto second = std::move(first);
    REQUIRE(!first && second && second.get().value == freed.value);
    second = backend.device(1);
    REQUIRE(second.info().number == 1);
    std::uint64_t len = 0;
    REQUIRE(wm_device_available(freed, &len) == WM_ERROR_INVALID_HANDLE);
    const wm_device_t released = second.release();
    REQUIRE(!second && wm_device_destroy(released) == WM_OK);
    first.reset();
}

void the_doctor_reports_the_host_backend()
{
    REQUIRE(wholemem::doctor().find("\nhost: available\n") != std::string::npos);
    REQUIRE(wholemem::doctor(wholemem::ReportFormat::Json).front() == '{');
}

void log_events_are_passed_to_a_function()
{
    using wholemem::LogSubscription;
    // The thread of the subscription writes, which has ended when the subscription has.
    std::vector<std::string> targets;
    const auto record = [&](const wholemem::LogEvent &event) { targets.emplace_back(event.target); };
    const auto make_events = [] {
        const auto backend = wholemem::Backend::open(wholemem::BackendKind::Host, 2);
        wholemem::Communicator::local(backend.devices());
    };
    auto first = LogSubscription::subscribe("trace", record);
    try {
        static_cast<void>(LogSubscription::subscribe("trace", record));
        REQUIRE(false && "there is a subscription");
    } catch (const wholemem::Error &error) {
        REQUIRE(error.status() == WM_ERROR_BUSY);
    }
    auto second = std::move(first);
    REQUIRE(!first && second);
    make_events();
    second = LogSubscription();
    REQUIRE(!second && !targets.empty() && targets[0].rfind("wholemem", 0) == 0);
    const std::size_t seen = targets.size();
    make_events();
    REQUIRE(targets.size() == seen);
    const auto third = LogSubscription::subscribe("trace", record);
    REQUIRE(third);
    try {
        static_cast<void>(LogSubscription::subscribe("trace", nullptr));
        REQUIRE(false && "the function is empty");
    } catch (const wholemem::Error &error) {
        REQUIRE(error.status() == WM_ERROR_INVALID_ARGUMENT);
    }
}

} // namespace

int main()
{
    try {
        spans_convert_from_containers_with_contiguous_elements();
        timeouts_are_nanoseconds();
        element_types_are_those_of_the_types();
        errors_carry_what_the_library_knows();
        owners_are_moved_and_free_their_handles();
        the_doctor_reports_the_host_backend();
        log_events_are_passed_to_a_function();
    } catch (const std::exception &error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        return 1;
    }
    return 0;
}
