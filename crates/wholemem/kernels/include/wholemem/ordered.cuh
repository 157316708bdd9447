// Loads and stores that order what other ranks see, of whole words in global memory.
//
// The scope is the system: a peer may be another device, and an observer the processor. Where all ranks are on this device,
// `near`, releases and acquires of their signals reach only as far, which costs less. Each is volatile and
// clobbers memory, so that the compiler moves nothing across it either.
//
// release: what this thread did before, and what other threads did before a __syncthreads that it passed, is seen by whoever
//          acquires the word. A fence would order the same and cost microseconds.
// acquire: what the releasing thread had seen or done is there for this thread's later loads, and after a __syncthreads for
//          the whole block's: the first-level cache is emptied.
// relaxed: the word itself is never stale, and nothing else is promised.
#pragma once

#include "wholemem/global_ref.cuh"

#if defined(__CUDACC__)

namespace wholemem {

__device__ __forceinline__ u64 load_acquire(u64 address)
{
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(u64 address, u64 value)
{
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ u64 load_acquire(u64 address, bool near)
{
    if (!near)
        return load_acquire(address);
    u64 value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(u64 address, u64 value, bool near)
{
    if (near)
        asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
    else
        store_release(address, value);
}

__device__ __forceinline__ u64 load_relaxed(u64 address)
{
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void store_relaxed(u64 address, u64 value)
{
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// Two words next to each other, aligned to both. Neither is torn, but one may be seen before the other.
struct WordPair {
    u64 low, high;
};

// From address 0 nothing is loaded, and the pair stays as it is.
__device__ __forceinline__ void load_pair_relaxed(u64 address, WordPair &pair)
{
    asm volatile("{.reg .pred there; setp.ne.u64 there, %2, 0; @there ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];}"
                 : "+l"(pair.low), "+l"(pair.high)
                 : "l"(address)
                 : "memory");
}

__device__ __forceinline__ void store_pair_relaxed(u64 address, WordPair pair)
{
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(pair.low), "l"(pair.high)
                 : "memory");
}

// Turns 0 into 1, and says whether it was 0. Among blocks of this device.
__device__ __forceinline__ bool claim(u64 address)
{
    u64 old;
    asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], 0, 1;" : "=l"(old) : "l"(address) : "memory");
    return old == 0;
}

// A value that the compiler knows nothing of. It would else compute whatever does not change in a loop before it, and keep
// all of that in registers that are needed for data.
__device__ __forceinline__ u64 unseen(u64 value)
{
    asm volatile("" : "+l"(value));
    return value;
}

__device__ __forceinline__ u32 unseen(u32 value)
{
    asm volatile("" : "+r"(value));
    return value;
}

// Nanoseconds of a clock that all of the device shares.
__device__ __forceinline__ u64 nanoseconds()
{
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
    return now;
}

} // namespace wholemem

#endif
