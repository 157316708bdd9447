// Loads and stores of one unit of global memory at an integer address. With address 0, no memory is accessed.
//
// The instructions name the global state space, which the compiler cannot infer from an integer. They are predicated instead of
// branched around, so that a thread's loads are issued back to back. Loads are plain, neither non-coherent nor streaming: other
// ranks may write the table between calls, and on an H200 loads that allocate in L1 are the fastest.
#pragma once

namespace wholemem {

typedef unsigned char u8;
typedef unsigned short u16;

// Loads a value of type Unit from global memory, or returns zero if the address is 0.
template <class Unit> __device__ Unit load(unsigned long long address);

// Stores a value of type Unit to global memory, unless the address is 0.
template <class Unit> __device__ void store(unsigned long long address, Unit value);

#define WHOLEMEM_UNIT(UNIT, TYPE, REGISTER, HOLD)                                                                      \
    template <> __device__ __forceinline__ UNIT load<UNIT>(unsigned long long address)                                 \
    {                                                                                                                  \
        HOLD value = 0;                                                                                                \
        asm volatile("{.reg .pred there; setp.ne.u64 there, %1, 0; @there ld.global." TYPE " %0, [%1];}"               \
                     : "+" REGISTER(value)                                                                             \
                     : "l"(address)                                                                                    \
                     : "memory");                                                                                      \
        return (UNIT)value;                                                                                            \
    }                                                                                                                  \
    template <> __device__ __forceinline__ void store<UNIT>(unsigned long long address, UNIT value)                    \
    {                                                                                                                  \
        asm volatile("{.reg .pred there; setp.ne.u64 there, %0, 0; @there st.global." TYPE " [%0], %1;}" ::"l"(        \
                         address),                                                                                     \
                     REGISTER((HOLD)value)                                                                             \
                     : "memory");                                                                                      \
    }

WHOLEMEM_UNIT(u8, "u8", "r", unsigned)
WHOLEMEM_UNIT(u16, "u16", "h", u16)
WHOLEMEM_UNIT(unsigned, "u32", "r", unsigned)
WHOLEMEM_UNIT(int, "u32", "r", int)
WHOLEMEM_UNIT(unsigned long long, "u64", "l", unsigned long long)
WHOLEMEM_UNIT(long long, "u64", "l", long long)

#undef WHOLEMEM_UNIT

template <> __device__ __forceinline__ uint4 load<uint4>(unsigned long long address)
{
    uint4 value = {0, 0, 0, 0};
    asm volatile("{.reg .pred there; setp.ne.u64 there, %4, 0; @there ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w)
                 : "l"(address)
                 : "memory");
    return value;
}

template <> __device__ __forceinline__ void store<uint4>(unsigned long long address, uint4 value)
{
    asm volatile("{.reg .pred there; setp.ne.u64 there, %0, 0; @there st.global.v4.u32 [%0], {%1, %2, %3, %4};}" ::"l"(
                     address),
                 "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

} // namespace wholemem
