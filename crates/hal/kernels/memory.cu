// Kernels with which tests, the demo and benchmarks check memory on the device: one writes a pattern without repetitions, the other
// computes a checksum that depends on every bit.
//
// Word i of the pattern is mix(seed + i). The checksum is the sum of word i times (2i + 1), so that it changes if two words are
// swapped. Addition wraps and commutes, so the order in which blocks finish does not matter.

typedef unsigned long long u64;

__device__ inline u64 mix(u64 x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

extern "C" __global__ void fill_pattern(u64 *words, u64 count, u64 seed)
{
    const u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride)
        words[i] = mix(seed + i);
}

extern "C" __global__ void checksum(const u64 *words, u64 count, u64 *sum)
{
    const u64 stride = (u64)gridDim.x * blockDim.x;
    u64 own = 0;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride)
        own += words[i] * (2 * i + 1);
    for (int step = 16; step > 0; step /= 2)
        own += __shfl_down_sync(0xffffffffu, own, step);
    if (threadIdx.x % 32 == 0)
        atomicAdd(sum, own);
}
