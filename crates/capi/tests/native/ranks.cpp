// Runs the checks as ranks: `ranks threads N` in N threads of this process, `ranks process` as one rank of a launcher.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include <wholemem/wholemem.hpp>

#include "checks.hpp"

namespace {

bool passes(const wholemem::Communicator &communicator)
{
    try {
        check_rank(communicator);
        return true;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        // The other ranks end at once instead of at the timeout.
        static_cast<void>(wm_communicator_abort(communicator.get()));
        return false;
    }
}

/// Returns a device for each rank: a GPU if there is one, otherwise virtual devices of the host.
std::vector<wholemem::Device> devices_for(std::uint32_t ranks)
{
    auto backend = wholemem::Backend::open();
    if (backend.device(0).info().backend == wholemem::BackendKind::Host)
        backend = wholemem::Backend::open(wholemem::BackendKind::Host, ranks);
    std::vector<wholemem::Device> devices;
    for (std::uint32_t rank = 0; rank < ranks; ++rank)
        devices.push_back(backend.device(rank % backend.device_count()));
    return devices;
}

bool threads_pass(std::uint32_t ranks)
{
    const auto communicators = wholemem::Communicator::local(devices_for(ranks));
    std::atomic<bool> passed{true};
    std::vector<std::thread> threads;
    for (const auto &communicator : communicators)
        threads.emplace_back([&] {
            if (!passes(communicator))
                passed = false;
        });
    for (auto &thread : threads)
        thread.join();
    return passed;
}

} // namespace

int main(int argc, char **argv)
{
    try {
        if (argc == 3 && std::strcmp(argv[1], "threads") == 0)
            return threads_pass(static_cast<std::uint32_t>(std::strtoul(argv[2], nullptr, 10))) ? 0 : 1;
        if (argc == 2 && std::strcmp(argv[1], "process") == 0)
            return passes(wholemem::Communicator::from_env()) ? 0 : 1;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        return 1;
    }
    std::fprintf(stderr, "usage: ranks threads N | ranks process\n");
    return 2;
}
