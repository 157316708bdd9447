// Loads and stores of 64-bit words in global memory with memory ordering between ranks.
//
// The scope is the system (.sys), since a peer may be on another device or the CPU. If all ranks are on this device (`near`),
// signals use device scope (.gpu), which is faster. Each access is volatile and clobbers memory, so that the compiler does not
// move other accesses across it.
//
// release: earlier accesses of this thread, and of other threads before a __syncthreads that this thread has passed, are visible
//          to a thread that acquires the word. A fence would order the same, and takes microseconds.
// acquire: accesses before the release are visible to later loads of this thread, and after a __syncthreads to the whole block.
//          The L1 cache is invalidated.
// relaxed: atomic, without any order among other accesses.
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

// Two adjacent words, aligned to 16 bytes. Each word is atomic; the pair is not.
struct WordPair {
    u64 low, high;
};

// Loads two adjacent words. If the address is 0, nothing is loaded and `pair` is unchanged.
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

// Loads two adjacent words, each with acquire order.
__device__ __forceinline__ WordPair load_pair_acquire(u64 address, bool near)
{
    WordPair pair;
    if (near)
        asm volatile("ld.acquire.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(pair.low), "=l"(pair.high) : "l"(address) : "memory");
    else
        asm volatile("ld.acquire.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(pair.low), "=l"(pair.high) : "l"(address) : "memory");
    return pair;
}

// Stores two adjacent words, each with release order.
__device__ __forceinline__ void store_pair_release(u64 address, WordPair pair, bool near)
{
    if (near)
        asm volatile("st.release.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(pair.low), "l"(pair.high) : "memory");
    else
        asm volatile("st.release.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(pair.low), "l"(pair.high) : "memory");
}

// Atomically changes a word from 0 to 1 at device scope. Returns true if this thread changed it.
__device__ __forceinline__ bool claim(u64 address)
{
    u64 old;
    asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], 0, 1;" : "=l"(old) : "l"(address) : "memory");
    return old == 0;
}

// Hides the origin of a value from the compiler. Otherwise the compiler hoists loop-invariant addresses out of loops, and keeps
// them in registers that are needed for data.
__device__ __forceinline__ u64 opaque(u64 value)
{
    asm volatile("" : "+l"(value));
    return value;
}

__device__ __forceinline__ u32 opaque(u32 value)
{
    asm volatile("" : "+r"(value));
    return value;
}

// Returns the time of the device's global timer in nanoseconds.
__device__ __forceinline__ u64 nanoseconds()
{
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
    return now;
}

} // namespace wholemem

#endif
