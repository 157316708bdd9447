// PtrGen computes the pointer to an element, so that one kernel template works for contiguous and for chunked memory.
//
//     PtrGen<int, int> gen(pointer);                                               // contiguous memory
//     PtrGen<const whole_memory::WholeChunkedMemoryHandle, int> gen(handle);       // chunked memory
//     *gen.At(offset)
//
// A second argument of the constructors, base_elt_offset, is a number of elements that At adds to every offset: the position of the
// first element that the kernel uses. Row does not add it.
//
// A handle is an ElementRef. It supports any number of chunks of any size, and views of some rows and columns. Untyped memory has
// rows of one byte. For a tensor, At counts the elements of all rows as if the rows were contiguous; Row needs no division.
//
// A GlobalRef has no row length, so a PtrGen over it has Row but no At.
#pragma once

#include "wholemem/global_ref.cuh"

namespace wholemem {

template <class T, class Handle> struct Like {
    typedef T Type;
};
template <class T, class Handle> struct Like<T, const Handle> {
    typedef const T Type;
};

// Computes pointers to elements of contiguous memory. Handle is the type of the memory: if it is const, so are the elements.
template <class Handle, class T> class PtrGen {
public:
    typedef typename Like<T, Handle>::Type Element;

    WHOLEMEM_HOST_DEVICE explicit PtrGen(Handle *pointer, u64 base_elt_offset = 0) : first((Element *)pointer + base_elt_offset) {}

    WHOLEMEM_HOST_DEVICE Element *At(u64 offset) const { return first + offset; }

private:
    Element *first;
};

// Computes pointers to elements of chunked memory.
template <class T> class PtrGen<ElementRef, T> {
public:
    typedef T Element;

    WHOLEMEM_HOST_DEVICE explicit PtrGen(const ElementRef &handle, u64 base_elt_offset = 0) : ref(handle), base(base_elt_offset) {}
    WHOLEMEM_HOST_DEVICE explicit PtrGen(const ElementRef *handle, u64 base_elt_offset = 0) : ref(*handle), base(base_elt_offset) {}

    // Returns the pointer to the element at an offset, which counts the elements of all rows.
    WHOLEMEM_HOST_DEVICE T *At(u64 offset) const { return (T *)ref.address((base + offset) * sizeof(T)); }

    // Returns the pointer to the first element of a row.
    WHOLEMEM_HOST_DEVICE T *Row(u64 row) const { return (T *)ref.rows.address(row); }

private:
    ElementRef ref;
    u64 base;
};

// Computes pointers to rows of chunked memory.
template <class T> class PtrGen<GlobalRef, T> {
public:
    typedef T Element;

    WHOLEMEM_HOST_DEVICE explicit PtrGen(const GlobalRef &handle) : ref(handle) {}
    WHOLEMEM_HOST_DEVICE explicit PtrGen(const GlobalRef *handle) : ref(*handle) {}

    // At is not available, because a GlobalRef has no row length: use an ElementRef.
    T *At(u64 offset) const = delete;

    // Returns the pointer to the first element of a row.
    WHOLEMEM_HOST_DEVICE T *Row(u64 row) const { return (T *)ref.address(row); }

private:
    GlobalRef ref;
};

// A const handle does not make the elements const, because kernels that were written for WholeMemory write through const
// handles.
template <class T> class PtrGen<const ElementRef, T> : public PtrGen<ElementRef, T> {
public:
    WHOLEMEM_HOST_DEVICE explicit PtrGen(const ElementRef &handle, u64 base_elt_offset = 0)
        : PtrGen<ElementRef, T>(handle, base_elt_offset)
    {
    }
    WHOLEMEM_HOST_DEVICE explicit PtrGen(const ElementRef *handle, u64 base_elt_offset = 0)
        : PtrGen<ElementRef, T>(handle, base_elt_offset)
    {
    }
};
template <class T> class PtrGen<const GlobalRef, T> : public PtrGen<GlobalRef, T> {
public:
    WHOLEMEM_HOST_DEVICE explicit PtrGen(const GlobalRef &handle) : PtrGen<GlobalRef, T>(handle) {}
    WHOLEMEM_HOST_DEVICE explicit PtrGen(const GlobalRef *handle) : PtrGen<GlobalRef, T>(handle) {}
};

} // namespace wholemem

// Type names that kernels written for WholeMemory use.
namespace whole_memory {
typedef wholemem::ElementRef WholeChunkedMemoryHandle;
using wholemem::PtrGen;
} // namespace whole_memory

namespace whole_graph {
typedef wholemem::ElementRef WholeChunkedMemoryHandle;
using wholemem::PtrGen;
} // namespace whole_graph

using wholemem::PtrGen;
