// The kernels of the collectives. All ranks that take part in a call launch the same kernel with equal grids.

#include "ops/all_reduce.cuh"
#include "ops/gather.cuh"

#define COLLECTIVE(NAME, BLOCKS)                                                                                       \
    extern "C" __global__ void __launch_bounds__(wholemem::COLLECTIVE_THREADS, BLOCKS)                                            \
        NAME(const __grid_constant__ wholemem::CollectiveRequest request)                                              \
    {                                                                                                                  \
        wholemem::begin(request);                                                                                      \
        wholemem::NAME(request, blockIdx.x, gridDim.x);                                                                \
    }

// The minimum number of resident blocks per multiprocessor for the all-reduce by packets. With two, 64 registers per thread
// remain. On devices before compute capability 9.0 and in kernels for tests, the kernel would spill registers with so few.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && !defined(WHOLEMEM_TESTING)
#define BLOCKS_OF_PACKETS 2
#else
#define BLOCKS_OF_PACKETS 1
#endif
COLLECTIVE(all_reduce_ll, BLOCKS_OF_PACKETS)
COLLECTIVE(all_reduce_one_shot, 2)
COLLECTIVE(all_reduce_two_shot, 2)
COLLECTIVE(all_gather_ll, 2)
COLLECTIVE(all_gather, 2)
COLLECTIVE(broadcast_ll, 2)
COLLECTIVE(broadcast, 2)
COLLECTIVE(barrier, 2)
