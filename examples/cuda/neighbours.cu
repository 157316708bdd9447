// Gathers from a table of all ranks in a kernel of the user's: each rank sums the rows of its nodes' neighbours.
//
//     wholemem launch -n 2 -- ./neighbours
//
// nvcc compiles it for GPUs. Compiled as C++, a plain loop takes the place of the kernel, with the same header, on the host backend.

#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include <wholemem/kernel_arguments.hpp>
#include <wholemem/wholemem.hpp>

#include "neighbours.cuh"

namespace {

using wholemem::u64;

constexpr u64 NODES = 1000;
constexpr u64 WIDTH = 32;
constexpr u64 DEGREE = 8;

#if defined(__CUDACC__)

void check_cuda(cudaError_t error)
{
    if (error != cudaSuccess)
        throw std::runtime_error(cudaGetErrorString(error));
}

// Memory of the device, with the contents of a vector of the host.
template <class T> class DeviceVector {
public:
    explicit DeviceVector(const std::vector<T> &values) : len_(values.size() * sizeof(T))
    {
        check_cuda(cudaMalloc(&data_, len_));
        check_cuda(cudaMemcpy(data_, values.data(), len_, cudaMemcpyHostToDevice));
    }
    DeviceVector(const DeviceVector &) = delete;
    DeviceVector &operator=(const DeviceVector &) = delete;
    ~DeviceVector() { cudaFree(data_); }

    T *data() const { return data_; }
    void copy_to(std::vector<T> &values) const { check_cuda(cudaMemcpy(values.data(), data_, len_, cudaMemcpyDeviceToHost)); }

private:
    T *data_ = nullptr;
    std::size_t len_;
};

void sum(const wholemem::Communicator &communicator, const wholemem::WholeTensor &table, const std::vector<u64> &starts,
         const std::vector<u64> &targets, std::vector<float> &sums)
{
    check_cuda(cudaSetDevice(static_cast<int>(communicator.device().info().number)));
    const DeviceVector<u64> device_starts(starts), device_targets(targets);
    const DeviceVector<float> device_sums(sums);
    const neighbours::Graph graph = {device_starts.data(), device_targets.data(), NODES};
    neighbours::sum_neighbours<<<256, WIDTH>>>(wholemem::element_ref(table), WIDTH, graph, device_sums.data());
    check_cuda(cudaGetLastError());
    check_cuda(cudaDeviceSynchronize());
    device_sums.copy_to(sums);
}

wholemem::Communicator join() { return wholemem::Communicator::from_env(); }

#else

void sum(const wholemem::Communicator &, const wholemem::WholeTensor &table, const std::vector<u64> &starts,
         const std::vector<u64> &targets, std::vector<float> &sums)
{
    const wholemem::ElementRef handle = wholemem::element_ref(table);
    const PtrGen<const wholemem::ElementRef, float> elements(handle);
    const neighbours::Graph graph = {starts.data(), targets.data(), NODES};
    for (u64 node = 0; node < NODES; ++node)
        for (u64 column = 0; column < WIDTH; ++column)
            sums[node * WIDTH + column] = neighbours::sum_of(elements, WIDTH, graph, node, column);
}

wholemem::Communicator join()
{
    const auto backend = wholemem::Backend::open(wholemem::BackendKind::Host);
    const auto device = backend.device(0);
    wholemem::CommunicatorOptions options;
    options.device = &device;
    return wholemem::Communicator::from_env(options);
}

#endif

// The value of a row: small integers, so that all sums are exact.
float value(u64 row, u64 column) { return static_cast<float>(row % 64 + column); }

int run()
{
    const auto communicator = join();
    auto spec = wholemem::TensorSpec::of<float>({NODES, WIDTH});
    spec.kind = wholemem::Kind::Chunked;
    const auto table = wholemem::WholeTensor::create(communicator, spec);
    const auto mine = table.local<float>();
    std::vector<float> rows(mine.row_count * WIDTH);
    for (u64 i = 0; i < rows.size(); ++i)
        rows[i] = value(mine.first_row + i / WIDTH, i % WIDTH);
    table.write_rows<float>(mine.first_row, rows);
    communicator.barrier();

    std::vector<u64> starts, targets;
    for (u64 node = 0; node <= NODES; ++node)
        starts.push_back(node * DEGREE);
    for (u64 edge = 0; edge < NODES * DEGREE; ++edge)
        targets.push_back(edge * 7919 % NODES); // of all ranks
    std::vector<float> sums(NODES * WIDTH);
    sum(communicator, table, starts, targets, sums);

    for (u64 i = 0; i < sums.size(); ++i) {
        float expected = 0;
        for (u64 edge = i / WIDTH * DEGREE; edge < (i / WIDTH + 1) * DEGREE; ++edge)
            expected += value(targets[edge], i % WIDTH);
        if (sums[i] != expected)
            throw std::runtime_error("another sum for node " + std::to_string(i / WIDTH));
    }
    std::printf("rank %u of %u: the sums of %llu nodes are right\n", communicator.rank(), communicator.size(),
                static_cast<unsigned long long>(NODES));
    communicator.barrier();
    return 0;
}

} // namespace

int main()
{
    try {
        return run();
    } catch (const std::exception &error) {
        std::fprintf(stderr, "error: %s\n", error.what());
    }
    return 1;
}
