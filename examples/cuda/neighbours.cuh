// Sums the table rows of each node's neighbours, as graph networks do: a kernel of the user's that reads a table of all ranks.
//
// It is a template over the memory: a pointer, or the handle of a table in several chunks. It compiles under nvcc, NVRTC and, without the
// kernel, a C++ compiler.

#pragma once

#include "wholemem/ptr_gen.cuh"

namespace neighbours {

using wholemem::u64;

// A graph in CSR form: the neighbours of node `n` are `targets[starts[n]]` to before `targets[starts[n + 1]]`.
struct Graph {
    const u64 *starts;
    const u64 *targets;
    u64 nodes;
};

// The sum of one column over the neighbours of a node.
template <class Handle>
WHOLEMEM_HOST_DEVICE float sum_of(const PtrGen<Handle, float> &table, u64 width, const Graph &graph, u64 node, u64 column)
{
    float sum = 0;
    for (u64 edge = graph.starts[node]; edge < graph.starts[node + 1]; ++edge)
        sum += *table.At(graph.targets[edge] * width + column);
    return sum;
}

#if defined(__CUDACC__)

// A block for each node, and a thread for each column.
__global__ void sum_neighbours(wholemem::ElementRef handle, u64 width, Graph graph, float *sums)
{
    const PtrGen<const wholemem::ElementRef, float> table(handle);
    for (u64 node = blockIdx.x; node < graph.nodes; node += gridDim.x)
        for (u64 column = threadIdx.x; column < width; column += blockDim.x)
            sums[node * width + column] = sum_of(table, width, graph, node, column);
}

#endif

} // namespace neighbours
