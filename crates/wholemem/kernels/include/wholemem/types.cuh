// The integer types and macros that all headers for kernels use.
//
// Compiles as C++11 under a host compiler, nvcc and NVRTC, and includes nothing: NVRTC has no <cstdint>.
#pragma once

#if defined(__CUDACC__)
#define WHOLEMEM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define WHOLEMEM_HOST_DEVICE inline
#endif

// A replacement of offsetof, because NVRTC provides only __INTADDR__.
#if defined(__CUDACC_RTC__)
#define WHOLEMEM_OFFSET_OF(TYPE, FIELD) __INTADDR__(&((TYPE *)0)->FIELD)
#else
#define WHOLEMEM_OFFSET_OF(TYPE, FIELD) __builtin_offsetof(TYPE, FIELD)
#endif

namespace wholemem {

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

} // namespace wholemem
