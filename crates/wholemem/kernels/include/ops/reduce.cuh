// Reductions of packs for every element type and operation, with the same bits as the CPU.
//
// Ranks are reduced in order, starting with rank 0. 16-bit floats are accumulated in 32 bits and rounded once. Operations are not
// fused: each one rounds. Integers wrap. A mean is the sum divided in the accumulator's type. min and max return NaN if an input is
// NaN; of two zeros, min returns the negative and max the positive one. Every NaN is stored as the positive quiet NaN without
// payload.
#pragma once

#include "ops/numbers.cuh"

namespace wholemem {

// Converts the upper or lower 16-bit float in a 32-bit word to a 32-bit float.
template <u32 DTYPE> __device__ __forceinline__ float widen(u32 word, bool upper)
{
    if (DTYPE == BF16)
        return __uint_as_float(upper ? word & 0xffff0000u : word << 16);
    return float_of_half((u16)(upper ? word >> 16 : word));
}

// Rounds two 32-bit floats to 16-bit floats, and packs them into one word.
template <u32 DTYPE> __device__ __forceinline__ u32 narrow(float lower, float upper)
{
    return (u32)float_bits(upper, DTYPE) << 16 | (u32)float_bits(lower, DTYPE);
}

// A sum of packs (16 bytes each) of floats whose type is known at compile time.
template <u32 DTYPE> struct Sum {
    static constexpr u32 COUNT = DTYPE == F32 ? 4 : 8;

    struct Held {
        float sums[COUNT];
    };

    __device__ __forceinline__ static float element(const uint4 &pack, u32 i)
    {
        if (DTYPE == F32)
            return __uint_as_float(i == 0 ? pack.x : i == 1 ? pack.y : i == 2 ? pack.z : pack.w);
        return widen<DTYPE>(i < 2 ? pack.x : i < 4 ? pack.y : i < 6 ? pack.z : pack.w, i % 2 != 0);
    }

    __device__ __forceinline__ void first(Held &held, const uint4 &pack) const
    {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i)
            held.sums[i] = element(pack, i);
    }

    __device__ __forceinline__ void next(Held &held, const uint4 &pack) const
    {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i)
            held.sums[i] = __fadd_rn(held.sums[i], element(pack, i));
    }

    __device__ __forceinline__ uint4 result(const Held &held) const
    {
        return {word(held, 0), word(held, 1), word(held, 2), word(held, 3)};
    }

private:
    __device__ __forceinline__ static u32 word(const Held &held, u32 i)
    {
        if (DTYPE == F32)
            return (u32)float_bits(held.sums[i % COUNT], F32);
        return narrow<DTYPE>(held.sums[2 * i % COUNT], held.sums[(2 * i + 1) % COUNT]);
    }
};

template <class Float> __device__ __forceinline__ bool is_nan(Float value) { return value != value; }

__device__ __forceinline__ bool negative(float value) { return (int)__float_as_uint(value) < 0; }

__device__ __forceinline__ bool negative(double value) { return __double_as_longlong(value) < 0; }

// The minimum and the maximum of two floats. The result is NaN if one of them is NaN; zeros are compared by sign.
template <class Float> __device__ __forceinline__ Float lesser(Float a, Float b)
{
    return is_nan(a) || a < b || (a == b && negative(a)) ? a : b;
}

template <class Float> __device__ __forceinline__ Float greater(Float a, Float b)
{
    return is_nan(a) || a > b || (a == b && !negative(a)) ? a : b;
}

// A reduction of packs whose type and operation are known only at run time. Floats of up to 32 bits are accumulated as 32-bit
// floats, one in each of eight words; all other types stay in the four words of a pack. `count` is the number of ranks, for the
// mean.
struct Any {

    u32 dtype, op, count;

    struct Held {
        u32 words[8];
    };

    __device__ __forceinline__ void first(Held &held, const uint4 &pack) const { held = opened(pack); }

    __device__ __forceinline__ void next(Held &held, const uint4 &pack) const
    {
        const Held given = opened(pack);
        u32 *const a = held.words;
        const u32 *const b = given.words;
        if (is_float()) {
            switch (op) {
            case PROD: return each(a, b, [](float x, float y) { return __fmul_rn(x, y); });
            case MIN: return each(a, b, [](float x, float y) { return lesser(x, y); });
            case MAX: return each(a, b, [](float x, float y) { return greater(x, y); });
            default: return each(a, b, [](float x, float y) { return __fadd_rn(x, y); });
            }
        }
#pragma unroll
        for (u32 i = 0; i < 4; i += 2)
            if (op >= AND) {
                a[i] = bitwise(a[i], b[i]);
                a[i + 1] = bitwise(a[i + 1], b[i + 1]);
            } else if (dtype == F64) {
                put(a, i, combine(__longlong_as_double((i64)long_at(a, i)), __longlong_as_double((i64)long_at(b, i))));
            } else if (element_len(dtype) == 8) {
                put(a, i, combine<u64, i64>(long_at(a, i), long_at(b, i)));
            } else {
                a[i] = combine_parts(a[i], b[i]);
                a[i + 1] = combine_parts(a[i + 1], b[i + 1]);
            }
    }

    __device__ __forceinline__ uint4 result(Held &held) const
    {
        u32 *const words = held.words;
        if (is_float()) {
            if (op == AVG)
                each(words, words, [this](float sum, float) { return __fdiv_rn(sum, (float)count); });
            if (dtype == F32)
                return {float_word(words[0]), float_word(words[1]), float_word(words[2]), float_word(words[3])};
            return {closed(words, 0), closed(words, 2), closed(words, 4), closed(words, 6)};
        }
#pragma unroll
        for (u32 i = 0; i < 4; i += 2)
            if (dtype == F64) {
                const double sum = __longlong_as_double((i64)long_at(words, i));
                put(words, i, float_bits(op == AVG ? __ddiv_rn(sum, (double)count) : sum, F64));
            } else if (op == AVG && element_len(dtype) == 8) {
                const u64 sum = long_at(words, i);
                put(words, i, is_signed() ? (u64)((i64)sum / (i64)count) : sum / count);
            } else if (op == AVG) {
                words[i] = mean_parts(words[i]);
                words[i + 1] = mean_parts(words[i + 1]);
            }
        return {words[0], words[1], words[2], words[3]};
    }

private:
    __device__ __forceinline__ bool is_float() const { return dtype >= F16 && dtype <= F32; }

    __device__ __forceinline__ bool is_signed() const { return dtype % 2 != 0; }

    __device__ __forceinline__ Held opened(const uint4 &pack) const
    {
        const u32 given[4] = {pack.x, pack.y, pack.z, pack.w};
        Held held = {};
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            const u32 word = given[i / 2];
            const float wide = dtype == BF16 ? widen<BF16>(word, i % 2 != 0) : widen<F16>(word, i % 2 != 0);
            held.words[i] = dtype == F16 || dtype == BF16 ? __float_as_uint(wide) : given[i % 4];
        }
        return held;
    }

    __device__ __forceinline__ u32 closed(const u32 *words, u32 i) const
    {
        const float lower = __uint_as_float(words[i]), upper = __uint_as_float(words[i + 1]);
        return dtype == BF16 ? narrow<BF16>(lower, upper) : narrow<F16>(lower, upper);
    }

    __device__ __forceinline__ static u32 float_word(u32 bits) { return (u32)float_bits(__uint_as_float(bits), F32); }

    template <class Combine> __device__ __forceinline__ static void each(u32 *a, const u32 *b, Combine combine)
    {
#pragma unroll
        for (u32 i = 0; i < 8; ++i)
            a[i] = __float_as_uint(combine(__uint_as_float(a[i]), __uint_as_float(b[i])));
    }

    __device__ __forceinline__ static u64 long_at(const u32 *words, u32 i) { return (u64)words[i + 1] << 32 | words[i]; }

    __device__ __forceinline__ static void put(u32 *words, u32 i, u64 bits)
    {
        words[i] = (u32)bits;
        words[i + 1] = (u32)(bits >> 32);
    }

    __device__ __forceinline__ u32 bitwise(u32 a, u32 b) const { return op == AND ? a & b : op == OR ? a | b : a ^ b; }

    __device__ __forceinline__ u64 combine(double a, double b) const
    {
        const double c = op == PROD  ? __dmul_rn(a, b)
                         : op == MIN ? lesser(a, b)
                         : op == MAX ? greater(a, b)
                                     : __dadd_rn(a, b);
        return (u64)__double_as_longlong(c);
    }

    template <class Unsigned, class Signed> __device__ __forceinline__ Unsigned combine(Unsigned a, Unsigned b) const
    {
        if (op == MIN || op == MAX) {
            const bool less = is_signed() ? (Signed)a < (Signed)b : a < b;
            return less == (op == MIN) ? a : b;
        }
        return op == PROD ? a * b : a + b;
    }

    // Sign- or zero-extends the integer of `bits` bits at position `bit` of a word.
    __device__ __forceinline__ u32 extended(u32 word, u32 bit, u32 bits) const
    {
        const u32 above = 32 - bits, shifted = word >> bit << above;
        return is_signed() ? (u32)((int)shifted >> above) : shifted >> above;
    }

    __device__ __forceinline__ u32 combine_parts(u32 a, u32 b) const
    {
        const u32 bits = 8 * element_len(dtype), mask = ~0u >> (32 - bits);
        u32 word = 0;
#pragma unroll 1
        for (u32 bit = 0; bit < 32; bit += bits)
            word |= (combine<u32, int>(extended(a, bit, bits), extended(b, bit, bits)) & mask) << bit;
        return word;
    }

    __device__ __forceinline__ u32 mean_parts(u32 sums) const
    {
        const u32 bits = 8 * element_len(dtype), mask = ~0u >> (32 - bits);
        u32 word = 0;
#pragma unroll 1
        for (u32 bit = 0; bit < 32; bit += bits) {
            const u32 sum = extended(sums, bit, bits);
            word |= ((is_signed() ? (u32)((int)sum / (int)count) : sum / count) & mask) << bit;
        }
        return word;
    }
};

} // namespace wholemem
