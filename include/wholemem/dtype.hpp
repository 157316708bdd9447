// Element types and reduction operations, and the element types of C++ types.

#pragma once

#include <complex>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <wholemem.h>
#include <wholemem/error.hpp>

namespace wholemem {

/// The type of elements.
enum class Dtype : wm_dtype_t {
    U8 = WM_DTYPE_U8,
    I8 = WM_DTYPE_I8,
    U16 = WM_DTYPE_U16,
    I16 = WM_DTYPE_I16,
    U32 = WM_DTYPE_U32,
    I32 = WM_DTYPE_I32,
    U64 = WM_DTYPE_U64,
    I64 = WM_DTYPE_I64,
    F16 = WM_DTYPE_F16,
    Bf16 = WM_DTYPE_BF16,
    F32 = WM_DTYPE_F32,
    F64 = WM_DTYPE_F64,
    Bool = WM_DTYPE_BOOL,
    Complex64 = WM_DTYPE_COMPLEX64,
    Float8E4m3fn = WM_DTYPE_FLOAT8_E4M3FN,
    Float8E4m3fnuz = WM_DTYPE_FLOAT8_E4M3FNUZ,
    Float8E5m2 = WM_DTYPE_FLOAT8_E5M2,
    Float8E5m2fnuz = WM_DTYPE_FLOAT8_E5M2FNUZ,
    Float8E8m0fnu = WM_DTYPE_FLOAT8_E8M0FNU,
};

/// How the elements of all ranks are combined.
enum class ReduceOp : wm_reduce_op_t {
    Sum = WM_REDUCE_SUM,
    Avg = WM_REDUCE_AVG,
    Min = WM_REDUCE_MIN,
    Max = WM_REDUCE_MAX,
    Prod = WM_REDUCE_PROD,
    And = WM_REDUCE_AND,
    Or = WM_REDUCE_OR,
    Xor = WM_REDUCE_XOR,
};

/// The bits of an element of 16 bits, for programs without a type for them. `Type` is `Dtype::F16` or `Dtype::Bf16`.
template <Dtype Type> struct Bits16 {
    std::uint16_t bits;
};

/// The element type of a C++ type: `dtype_traits<T>::value`. Programs specialize it for their own types, such as `__half`.
template <class T, class = void> struct dtype_traits;

namespace detail {
template <Dtype Type> using dtype_constant = std::integral_constant<Dtype, Type>;

/// The element type of an integer with a size and a sign, so that `long` and `long long` are the same.
template <class T> constexpr Dtype integer_dtype()
{
    static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "there is no element type of this size");
    constexpr bool is_signed = std::is_signed_v<T>;
    switch (sizeof(T)) {
    case 1:
        return is_signed ? Dtype::I8 : Dtype::U8;
    case 2:
        return is_signed ? Dtype::I16 : Dtype::U16;
    case 4:
        return is_signed ? Dtype::I32 : Dtype::U32;
    default:
        return is_signed ? Dtype::I64 : Dtype::U64;
    }
}
} // namespace detail

template <class T>
struct dtype_traits<T, std::enable_if_t<std::is_integral_v<T> && !std::is_same_v<T, bool>>>
    : detail::dtype_constant<detail::integer_dtype<T>()> {};
template <> struct dtype_traits<bool> : detail::dtype_constant<Dtype::Bool> {};
template <> struct dtype_traits<std::byte> : detail::dtype_constant<Dtype::U8> {};
template <> struct dtype_traits<float> : detail::dtype_constant<Dtype::F32> {};
template <> struct dtype_traits<double> : detail::dtype_constant<Dtype::F64> {};
template <> struct dtype_traits<std::complex<float>> : detail::dtype_constant<Dtype::Complex64> {};
template <> struct dtype_traits<Bits16<Dtype::F16>> : detail::dtype_constant<Dtype::F16> {};
template <> struct dtype_traits<Bits16<Dtype::Bf16>> : detail::dtype_constant<Dtype::Bf16> {};

/// The element type of a C++ type.
template <class T> inline constexpr Dtype dtype_of = dtype_traits<std::remove_cv_t<T>>::value;

/// The length of an element in bytes.
inline std::size_t len_of(Dtype dtype)
{
    std::size_t len = 0;
    check(wm_dtype_len(static_cast<wm_dtype_t>(dtype), &len));
    return len;
}

/// The name of an element type as in numpy, such as `float32`.
inline const char *name_of(Dtype dtype) noexcept { return wm_dtype_name(static_cast<wm_dtype_t>(dtype)); }

namespace detail {

/// Throws an error unless the elements of C++ type `T` are those of a tensor.
template <class T> void require_dtype(Dtype found)
{
    if (found == dtype_of<T>)
        return;
    std::string message = "the elements of the tensor are ";
    message.append(name_of(found)).append(", but those of the C++ type are ").append(name_of(dtype_of<T>));
    raise(Error(WM_ERROR_TYPES_DIFFER, std::move(message)));
}

} // namespace detail
} // namespace wholemem
