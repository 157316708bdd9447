// One template for kernels over memory of any kind: PtrGen makes the pointer to an element.
//
//     PtrGen<int, int> gen(pointer);                                               // memory in one piece
//     PtrGen<const whole_memory::WholeChunkedMemoryHandle, int> gen(handle);       // memory in chunks
//     *gen.At(offset)
//
// A handle is an ElementRef, which is exact for any number of chunks of any size, and for views of some rows and columns. Memory
// that is bytes has rows of one byte; for a tensor, At counts the elements of all rows as if the rows were contiguous, and Row
// makes no division.
//
// A GlobalRef finds rows only: it does not say how long they are, so that a PtrGen over it has no At.
#pragma once

#include "wholemem/global_ref.cuh"

namespace wholemem {

template <class T, class Handle> struct Like {
    typedef T Type;
};
template <class T, class Handle> struct Like<T, const Handle> {
    typedef const T Type;
};

// Memory in one piece: the handle is its type, and what is const stays const.
template <class Handle, class T> class PtrGen {
public:
    typedef typename Like<T, Handle>::Type Element;

    WHOLEMEM_HOST_DEVICE explicit PtrGen(Handle *pointer) : first((Element *)pointer) {}

    WHOLEMEM_HOST_DEVICE Element *At(u64 offset) const { return first + offset; }

private:
    Element *first;
};

// Memory in chunks.
template <class T> class PtrGen<ElementRef, T> {
public:
    typedef T Element;

    WHOLEMEM_HOST_DEVICE explicit PtrGen(const ElementRef &handle) : ref(handle) {}
    WHOLEMEM_HOST_DEVICE explicit PtrGen(const ElementRef *handle) : ref(*handle) {}

    // An element, counted through all rows.
    WHOLEMEM_HOST_DEVICE T *At(u64 offset) const { return (T *)ref.address(offset * sizeof(T)); }

    // The first element of a row.
    WHOLEMEM_HOST_DEVICE T *Row(u64 row) const { return (T *)ref.rows.address(row); }

private:
    ElementRef ref;
};

// The rows of memory in chunks.
template <class T> class PtrGen<GlobalRef, T> {
public:
    typedef T Element;

    WHOLEMEM_HOST_DEVICE explicit PtrGen(const GlobalRef &handle) : ref(handle) {}
    WHOLEMEM_HOST_DEVICE explicit PtrGen(const GlobalRef *handle) : ref(*handle) {}

    // A GlobalRef does not say how long a row is: use an ElementRef.
    T *At(u64 offset) const = delete;

    // The first element of a row.
    WHOLEMEM_HOST_DEVICE T *Row(u64 row) const { return (T *)ref.address(row); }

private:
    GlobalRef ref;
};

// A handle that is const says nothing about the memory: WholeMemory's kernels write through it.
template <class T> class PtrGen<const ElementRef, T> : public PtrGen<ElementRef, T> {
public:
    WHOLEMEM_HOST_DEVICE explicit PtrGen(const ElementRef &handle) : PtrGen<ElementRef, T>(handle) {}
    WHOLEMEM_HOST_DEVICE explicit PtrGen(const ElementRef *handle) : PtrGen<ElementRef, T>(handle) {}
};
template <class T> class PtrGen<const GlobalRef, T> : public PtrGen<GlobalRef, T> {
public:
    WHOLEMEM_HOST_DEVICE explicit PtrGen(const GlobalRef &handle) : PtrGen<GlobalRef, T>(handle) {}
    WHOLEMEM_HOST_DEVICE explicit PtrGen(const GlobalRef *handle) : PtrGen<GlobalRef, T>(handle) {}
};

} // namespace wholemem

// The names that kernels written for WholeMemory use.
namespace whole_memory {
typedef wholemem::ElementRef WholeChunkedMemoryHandle;
using wholemem::PtrGen;
} // namespace whole_memory

namespace whole_graph {
typedef wholemem::ElementRef WholeChunkedMemoryHandle;
using wholemem::PtrGen;
} // namespace whole_graph

using wholemem::PtrGen;
