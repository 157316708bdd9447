// Kernels of the collectives in which one kernel runs all ranks, each as a group of blocks. They are for tools that do not run
// kernels concurrently, under which ranks in separate kernels would deadlock.

#include "ops/all_reduce.cuh"
#include "ops/gather.cuh"

#define TOGETHER(NAME)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(wholemem::COLLECTIVE_THREADS, 1)                                                 \
        NAME##_together(const wholemem::CollectiveRequest *requests, unsigned count)                                   \
    {                                                                                                                  \
        __shared__ wholemem::CollectiveRequest request;                                                                \
        const unsigned blocks = gridDim.x / count, rank = blockIdx.x / blocks;                                         \
        if (threadIdx.x == 0)                                                                                          \
            request = requests[rank];                                                                                  \
        __syncthreads();                                                                                               \
        wholemem::NAME(request, blockIdx.x - rank * blocks, blocks);                                                   \
    }

TOGETHER(all_reduce_ll)
TOGETHER(all_reduce_one_shot)
TOGETHER(all_reduce_two_shot)
TOGETHER(all_gather_ll)
TOGETHER(all_gather)
TOGETHER(broadcast_ll)
TOGETHER(broadcast)
TOGETHER(barrier)
