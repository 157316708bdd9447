// The reference for tests of collectives: plain loops on the host. Also generates inputs with special values.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

typedef unsigned long long u64_t;

inline u64_t mix(u64_t x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Returns the length of an element in bytes. The types are numbered from 0: U8 I8 U16 I16 U32 I32 U64 I64 F16 BF16 F32 F64.
// Below, the operations are numbered from 0 as well: SUM AVG MIN MAX PROD AND OR XOR.
inline u64_t host_len(uint32_t dtype) { return dtype < 8 ? 1u << dtype / 2 : dtype < 10 ? 2 : dtype == 10 ? 4 : 8; }

inline float float_of_bits(uint32_t bits)
{
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t bits_of_float(float value)
{
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float host_widen(uint32_t dtype, uint32_t bits)
{
    if (dtype == 9)
        return float_of_bits(bits << 16);
    const uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float sign = bits & 0x8000 ? -1.0f : 1.0f;
    if (exponent == 31)
        return float_of_bits((bits & 0x8000) << 16 | 0x7f800000 | fraction << 13);
    return sign * (exponent == 0 ? std::ldexp((float)fraction, -24) : std::ldexp((float)(fraction + 1024), (int)exponent - 25));
}

inline uint32_t host_narrow(uint32_t dtype, float value)
{
    const uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000;
    if (value != value)
        return dtype == 9 ? 0x7fc0 : 0x7e00;
    if (dtype == 9)
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const double size = std::fabs((double)value);
    if (size >= 65520)
        return sign | 0x7c00;
    // Round the value in units in the last place of the half-precision result: the division is exact, and nearbyint rounds ties
    // to even.
    int exponent = 0;
    std::frexp(size, &exponent);
    const int unit = size < 6.103515625e-5 ? -24 : exponent - 11;
    const double steps = std::nearbyint(std::ldexp(size, -unit));
    const double rounded = std::ldexp(steps, unit);
    if (rounded < 6.103515625e-5)
        return sign | (uint32_t)steps;
    std::frexp(rounded, &exponent);
    const uint32_t fraction = (uint32_t)std::ldexp(rounded, 11 - exponent);
    return sign | (uint32_t)(exponent + 14) << 10 | (fraction - 1024);
}

template <class Float> Float host_combine(Float a, Float b, uint32_t op)
{
    switch (op) {
    case 2: return a != a || b != b ? (Float)NAN : a < b ? a : b < a ? b : std::signbit(a) ? a : b;
    case 3: return a != a || b != b ? (Float)NAN : a > b ? a : b > a ? b : std::signbit(a) ? b : a;
    case 4: {
        volatile Float product = a * b;
        return product;
    }
    default: {
        volatile Float sum = a + b;
        return sum;
    }
    }
}

inline u64_t host_combine_integers(u64_t a, u64_t b, uint32_t op, bool is_signed)
{
    switch (op) {
    case 2: return (is_signed ? (int64_t)a < (int64_t)b : a < b) ? a : b;
    case 3: return (is_signed ? (int64_t)a > (int64_t)b : a > b) ? a : b;
    case 4: return a * b;
    case 5: return a & b;
    case 6: return a | b;
    case 7: return a ^ b;
    default: return a + b;
    }
}

inline u64_t host_extend(u64_t bits, uint32_t dtype)
{
    const int above = 64 - 8 * (int)host_len(dtype);
    return dtype % 2 != 0 ? (u64_t)((int64_t)(bits << above) >> above) : bits << above >> above;
}

inline void reduce_on_host(const std::vector<std::vector<unsigned char>> &inputs, uint32_t dtype, uint32_t op, u64_t count,
                           unsigned char *output)
{
    const u64_t size = host_len(dtype), ranks = inputs.size();
    for (u64_t i = 0; i < count; ++i) {
        u64_t result = 0;
        float narrow = 0;
        double wide = 0;
        for (u64_t rank = 0; rank < ranks; ++rank) {
            u64_t bits = 0;
            std::memcpy(&bits, inputs[rank].data() + i * size, size);
            if (dtype == 11) {
                double value;
                std::memcpy(&value, &bits, 8);
                wide = rank == 0 ? value : host_combine(wide, value, op);
            } else if (dtype >= 8) {
                const float value = dtype == 10 ? float_of_bits((uint32_t)bits) : host_widen(dtype, (uint32_t)bits);
                narrow = rank == 0 ? value : host_combine(narrow, value, op);
            } else {
                bits = host_extend(bits, dtype);
                result = host_extend(rank == 0 ? bits : host_combine_integers(result, bits, op, dtype % 2 != 0), dtype);
            }
        }
        if (dtype == 11) {
            wide = op == 1 ? wide / (double)ranks : wide;
            std::memcpy(&result, &wide, 8);
            result = wide != wide ? 0x7ff8000000000000ull : result;
        } else if (dtype >= 8) {
            narrow = op == 1 ? narrow / (float)ranks : narrow;
            result = dtype == 10 ? (narrow != narrow ? 0x7fc00000 : bits_of_float(narrow)) : host_narrow(dtype, narrow);
        } else if (op == 1) {
            result = dtype % 2 != 0 ? (u64_t)((int64_t)result / (int64_t)ranks) : result / ranks;
        }
        std::memcpy(output + i * size, &result, size);
    }
}

// Fills an input with random bits for integers. For floats the input also has values of similar size, NaNs with payloads,
// infinities, denormals, and zeros of both signs.
inline void fill(unsigned char *bytes, uint32_t dtype, u64_t count, u64_t &dice)
{
    const u64_t size = host_len(dtype);
    const int fraction = dtype == 8 ? 10 : dtype == 9 ? 7 : dtype == 10 ? 23 : 52;
    const int width = 8 * (int)size;
    for (u64_t i = 0; i < count; ++i) {
        const u64_t any = mix(++dice * 0x10001 + i), sign = any >> 40 & 1;
        u64_t bits = any;
        if (dtype >= 8) {
            const u64_t exponents = (1ull << (width - 1 - fraction)) - 1, bias = exponents / 2;
            const u64_t low = mix(any) & ((1ull << fraction) - 1);
            switch (any % 16) {
            case 0: bits = exponents << fraction | low; break;            // NaN, or rarely infinity
            case 1: bits = exponents << fraction; break;                  // infinity
            case 2: bits = low; break;                                    // a denormal
            case 3: bits = 0; break;                                      // zero
            case 4: bits = (exponents - 1) << fraction | low; break;      // the largest numbers
            case 5: bits = 1ull << fraction | low; break;                 // the smallest normal numbers
            case 6: case 7: bits = mix(any) & ((1ull << (width - 1)) - 1); break;
            default: bits = (bias + any / 16 % 6 - 2) << fraction | low;  // similar sizes
            }
            bits |= sign << (width - 1);
        }
        std::memcpy(bytes + i * size, &bits, size);
    }
}
