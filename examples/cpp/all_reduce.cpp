// Two or more processes add their values: an all-reduce of values of the host, and one in a window, in place.
//
//     wholemem launch -n 2 -- ./all_reduce

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include <wholemem/wholemem.hpp>

namespace {

int run()
{
    using namespace std::chrono_literals;
    wholemem::CommunicatorOptions options;
    options.timeout = 30s;
    const auto communicator = wholemem::Communicator::from_env(options);
    const auto rank = communicator.rank(), size = communicator.size();
    const auto expected = static_cast<float>(size * (size + 1) / 2);
    const auto symmetric = wholemem::SymmetricMemory::create(communicator);

    std::vector<float> values(1000, static_cast<float>(rank + 1));
    symmetric.all_reduce<float>(values); // the same bits on every rank

    // Every rank has a part of a window, and all ranks access it: calls on it do not copy. This window is in host memory, which
    // the CPU fills; `window` creates one in the memory of the devices.
    const auto window = symmetric.window_on_host(values.size() * sizeof(float));
    float *const mine = window.pointer<float>(rank);
    std::fill(mine, mine + values.size(), static_cast<float>(rank + 1));
    symmetric.all_reduce_on<float>(nullptr, mine, mine, values.size());
    communicator.synchronize(nullptr, 30s);
    symmetric.check_lane();

    const auto is_sum = [&](float value) { return value == expected; };
    if (!std::all_of(values.begin(), values.end(), is_sum) || !std::all_of(mine, mine + values.size(), is_sum)) {
        std::fprintf(stderr, "error: rank %u has other sums\n", rank);
        return 1;
    }
    std::printf("rank %u of %u: the sum is %g\n", rank, size, static_cast<double>(values[0]));
    communicator.barrier();
    return 0;
}

} // namespace

int main()
{
    try {
        return run();
    } catch (const wholemem::Error &error) {
        std::fprintf(stderr, "error: %s: %s\n", error.name(), error.what());
    } catch (const std::exception &error) {
        std::fprintf(stderr, "error: %s\n", error.what());
    }
    return 1;
}
