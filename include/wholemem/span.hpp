// A view of contiguous elements: `std::span`, which C++17 does not have.
//
// A span does not own its elements. It converts from arrays, from every container with `data()` and `size()`, among them `std::vector`,
// `std::array` and `std::span`, and from a span of non-const elements to one of const elements.

#pragma once

#include <cstddef>
#include <iterator>
#include <type_traits>
#include <utility>

#if __cplusplus >= 202002L
#include <span>
#endif

namespace wholemem {

template <class T> class span;

namespace detail {

/// Whether a pointer to `From` converts to a pointer to `To` without a conversion of the elements: at most `const` is added.
template <class From, class To> using is_qualification = std::is_convertible<From (*)[], To (*)[]>;

/// The type of the elements of a container with contiguous elements.
template <class Container>
using element_of = std::remove_pointer_t<decltype(std::data(std::declval<Container &>()))>;

template <class Container> struct is_span : std::false_type {};
template <class T> struct is_span<span<T>> : std::true_type {};

} // namespace detail

/// A view of `size()` elements from `data()` on.
template <class T> class span {
public:
    using element_type = T;
    using value_type = std::remove_cv_t<T>;
    using size_type = std::size_t;
    using pointer = T *;
    using reference = T &;
    using iterator = T *;

    /// A view of no elements.
    constexpr span() noexcept = default;

    /// A view of `size` elements from `data` on.
    constexpr span(T *data, std::size_t size) noexcept : data_(data), size_(size) {}

    /// A view of the elements of an array.
    template <std::size_t N> constexpr span(T (&array)[N]) noexcept : data_(array), size_(N) {}

    /// A view of the elements of a container. A temporary container converts only to a view of const elements.
    template <class Container, class Element = detail::element_of<Container>, class = decltype(std::size(std::declval<Container &>())),
              class = std::enable_if_t<!std::is_array_v<std::remove_reference_t<Container>> &&
                                       !detail::is_span<std::remove_cv_t<std::remove_reference_t<Container>>>::value &&
                                       detail::is_qualification<Element, T>::value &&
                                       (std::is_lvalue_reference_v<Container> || std::is_const_v<T>)>>
    constexpr span(Container &&container) : data_(std::data(container)), size_(std::size(container))
    {
    }

    /// A view of the same elements, to which `const` is added.
    template <class Other, class = std::enable_if_t<detail::is_qualification<Other, T>::value>>
    constexpr span(const span<Other> &other) noexcept : data_(other.data()), size_(other.size())
    {
    }

    constexpr T *data() const noexcept { return data_; }
    constexpr std::size_t size() const noexcept { return size_; }
    constexpr std::size_t size_bytes() const noexcept { return size_ * sizeof(T); }
    constexpr bool empty() const noexcept { return size_ == 0; }
    constexpr T *begin() const noexcept { return data_; }
    constexpr T *end() const noexcept { return data_ + size_; }

    /// The element at a position, which must be less than `size()`: it is not checked.
    constexpr T &operator[](std::size_t position) const { return data_[position]; }

    /// The `count` elements from `first` on, which must be in the view: they are not checked.
    constexpr span subspan(std::size_t first, std::size_t count) const { return span(data_ + first, count); }

private:
    T *data_ = nullptr;
    std::size_t size_ = 0;
};

template <class T, std::size_t N> span(T (&)[N]) -> span<T>;
template <class Container> span(Container &&) -> span<detail::element_of<std::remove_reference_t<Container>>>;

} // namespace wholemem

#if __cplusplus >= 202002L
/// A span does not own its elements, so `std::span` converts from a temporary one.
template <class T> inline constexpr bool std::ranges::enable_borrowed_range<wholemem::span<T>> = true;
#endif
