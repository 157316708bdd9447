// Loads, stores and conversions of elements of every type. Floats are converted to floats, and integers to integers.
//
// An element is held in 64 bits. Integers are sign- or zero-extended, and truncated when they are stored. Floats keep their
// format until they are converted. A conversion rounds once, to nearest, ties to even, and every NaN becomes the positive quiet
// NaN without payload, so that the CPU computes the same bits.
#pragma once

#include "ops/abi.cuh"
#include "ops/units.cuh"

namespace wholemem {

__device__ __forceinline__ u32 element_len(u32 dtype)
{
    return dtype < F16 ? 1u << dtype / 2 : dtype < F32 ? 2 : dtype == F32 ? 4 : 8;
}

__device__ __forceinline__ u64 extend(u64 bits, u32 dtype)
{
    switch (dtype) {
    case I8: return (u64)(i64)(signed char)bits;
    case I16: return (u64)(i64)(short)bits;
    case I32: return (u64)(i64)(int)bits;
    default: return bits;
    }
}

// COUNT consecutive elements of a row, each held in 64 bits.
template <u32 COUNT> struct Elements {
    u64 bits[COUNT];
};

// Loads COUNT elements, or zeros if the address is 0. The address of four elements must be aligned to their total length, but
// to at most 16 bytes.
template <u32 COUNT> __device__ Elements<COUNT> load_elements(u64 address, u32 dtype);

template <u32 COUNT> __device__ void store_elements(u64 address, u32 dtype, Elements<COUNT> elements);

template <> __device__ __forceinline__ Elements<1> load_elements<1>(u64 address, u32 dtype)
{
    switch (element_len(dtype)) {
    case 1: return {{extend(load<u8>(address), dtype)}};
    case 2: return {{extend(load<u16>(address), dtype)}};
    case 4: return {{extend(load<u32>(address), dtype)}};
    default: return {{load<u64>(address)}};
    }
}

template <> __device__ __forceinline__ void store_elements<1>(u64 address, u32 dtype, Elements<1> elements)
{
    switch (element_len(dtype)) {
    case 1: return store<u8>(address, (u8)elements.bits[0]);
    case 2: return store<u16>(address, (u16)elements.bits[0]);
    case 4: return store<u32>(address, (u32)elements.bits[0]);
    default: return store<u64>(address, elements.bits[0]);
    }
}

template <> __device__ __forceinline__ Elements<4> load_elements<4>(u64 address, u32 dtype)
{
    switch (element_len(dtype)) {
    case 1: {
        const u32 four = load<u32>(address);
        return {{extend(four & 0xff, dtype), extend(four >> 8 & 0xff, dtype), extend(four >> 16 & 0xff, dtype),
                 extend(four >> 24, dtype)}};
    }
    case 2: {
        const u64 four = load<u64>(address);
        return {{extend(four & 0xffff, dtype), extend(four >> 16 & 0xffff, dtype), extend(four >> 32 & 0xffff, dtype),
                 extend(four >> 48, dtype)}};
    }
    case 4: {
        const uint4 four = load<uint4>(address);
        return {{extend(four.x, dtype), extend(four.y, dtype), extend(four.z, dtype), extend(four.w, dtype)}};
    }
    default: {
        const uint4 low = load<uint4>(address), high = load<uint4>(address == 0 ? 0 : address + sizeof(uint4));
        return {{(u64)low.y << 32 | low.x, (u64)low.w << 32 | low.z, (u64)high.y << 32 | high.x,
                 (u64)high.w << 32 | high.z}};
    }
    }
}

template <> __device__ __forceinline__ void store_elements<4>(u64 address, u32 dtype, Elements<4> elements)
{
    const u64 a = elements.bits[0], b = elements.bits[1], c = elements.bits[2], d = elements.bits[3];
    switch (element_len(dtype)) {
    case 1: return store<u32>(address, (u32)(d << 24 | (c & 0xff) << 16 | (b & 0xff) << 8 | (a & 0xff)));
    case 2: return store<u64>(address, d << 48 | (c & 0xffff) << 32 | (b & 0xffff) << 16 | (a & 0xffff));
    case 4: return store<uint4>(address, {(u32)a, (u32)b, (u32)c, (u32)d});
    default:
        store<uint4>(address, {(u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32)});
        store<uint4>(address == 0 ? 0 : address + sizeof(uint4), {(u32)c, (u32)(c >> 32), (u32)d, (u32)(d >> 32)});
    }
}

__device__ __forceinline__ float float_of_half(u16 bits)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ u16 half_of(float value)
{
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ u16 half_of(double value)
{
    u16 bits;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(value));
    return bits;
}

// Converts a float to bfloat16, rounding to nearest even. The value must not be NaN.
__device__ __forceinline__ u16 bfloat_of(float value)
{
    const u32 bits = __float_as_uint(value);
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Converts a double to bfloat16. The value is rounded to odd to a float first, so that the second rounding breaks ties
// correctly. The value must not be NaN.
__device__ __forceinline__ u16 bfloat_of(double value)
{
    const float toward_zero = __double2float_rz(value);
    const u32 inexact = (double)toward_zero != value;
    return bfloat_of(__uint_as_float(__float_as_uint(toward_zero) | inexact));
}

template <class Float> __device__ __forceinline__ u64 float_bits(Float value, u32 dtype)
{
    const bool nan = value != value;
    switch (dtype) {
    case F16: return nan ? 0x7e00 : half_of(value);
    case BF16: return nan ? 0x7fc0 : bfloat_of(value);
    case F32: return nan ? 0x7fc00000 : __float_as_uint((float)value);
    default: return nan ? 0x7ff8000000000000 : (u64)__double_as_longlong((double)value);
    }
}

__device__ __forceinline__ float float_of(u64 bits, u32 dtype)
{
    switch (dtype) {
    case F16: return float_of_half((u16)bits);
    case BF16: return __uint_as_float((u32)bits << 16);
    default: return __uint_as_float((u32)bits);
    }
}

// Converts an element from one type to another. Both types are floats, or both are integers.
__device__ __forceinline__ u64 convert(u64 bits, u32 from, u32 to)
{
    if (from == to || from < F16)
        return bits;
    return from == F64 ? float_bits(__longlong_as_double((i64)bits), to) : float_bits(float_of(bits, from), to);
}

} // namespace wholemem
