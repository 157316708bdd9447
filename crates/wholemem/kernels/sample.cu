// An example of a user's kernel: one template for continuous and for chunked tables.
//
// For each node of a graph, the kernel sums the table rows of the node's neighbours. The graph is in CSR form: a list of
// neighbours, and the position of each node's first neighbour in that list.

#include "wholemem/ptr_gen.cuh"

typedef unsigned long long u64;

namespace {

template <class Handle>
__device__ void sum_neighbours(const PtrGen<Handle, float> &table, u64 width, const u64 *starts, const u64 *neighbours,
                               u64 nodes, float *sums)
{
    for (u64 node = blockIdx.x; node < nodes; node += gridDim.x)
        for (u64 column = threadIdx.x; column < width; column += blockDim.x) {
            float sum = 0;
            for (u64 edge = starts[node]; edge < starts[node + 1]; ++edge)
                sum += *table.At(neighbours[edge] * width + column);
            sums[node * width + column] = sum;
        }
}

} // namespace

extern "C" __global__ void sum_neighbours_plain(float *table, u64 width, const u64 *starts, const u64 *neighbours, u64 nodes,
                                                float *sums)
{
    PtrGen<float, float> ptr_gen(table);
    sum_neighbours(ptr_gen, width, starts, neighbours, nodes, sums);
}

extern "C" __global__ void sum_neighbours_chunked(whole_memory::WholeChunkedMemoryHandle handle, u64 width,
                                                  const u64 *starts, const u64 *neighbours, u64 nodes, float *sums)
{
    PtrGen<const whole_memory::WholeChunkedMemoryHandle, float> ptr_gen(handle);
    sum_neighbours(ptr_gen, width, starts, neighbours, nodes, sums);
}
