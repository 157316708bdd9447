// Tests that the C++ interface works in a program without exceptions and without run-time type information.

#include <cstdio>
#include <vector>

#include <wholemem/kernel_arguments.hpp>
#include <wholemem/wholemem.hpp>

int main()
{
    const auto backend = wholemem::Backend::open(wholemem::BackendKind::Host, 1);
    const auto communicators = wholemem::Communicator::local(backend.devices());
    const auto table = wholemem::WholeTensor::create(communicators[0], wholemem::TensorSpec::of<float>({10, 2}));
    table.write_rows<float>(3, std::vector<float>{1.5F, 2.5F});
    const std::vector<std::int64_t> indices = {3, 0};
    if (table.gather<float>(indices) != std::vector<float>{1.5F, 2.5F, 0, 0}) {
        std::fprintf(stderr, "error: the rows differ\n");
        return 1;
    }
    return 0;
}
