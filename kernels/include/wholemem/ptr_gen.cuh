// One template for kernels over memory of any kind: PtrGen makes the pointer to an element.
//
//     PtrGen<int, int> gen(pointer);                                               // memory in one piece
//     PtrGen<const whole_memory::WholeChunkedMemoryHandle, int> gen(handle);       // memory in chunks
//     *gen.At(offset)
//
// A handle is a GlobalRef, which is exact for any number of chunks of any size. Memory that is bytes has rows of one byte;
// for a tensor, At counts elements as if the rows lay one after another, and Row makes no division.
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
template <class T> class PtrGen<GlobalRef, T> {
public:
    typedef T Element;

    WHOLEMEM_HOST_DEVICE explicit PtrGen(const GlobalRef &handle) : ref(handle) {}
    WHOLEMEM_HOST_DEVICE explicit PtrGen(const GlobalRef *handle) : ref(*handle) {}

    // An element, counted through all rows.
    WHOLEMEM_HOST_DEVICE T *At(u64 offset) const
    {
        const u64 byte = offset * sizeof(T);
        if (ref.stride == 1)
            return (T *)ref.address(byte);
        const u64 row = byte / ref.stride;
        return (T *)(ref.address(row) + (byte - row * ref.stride));
    }

    // The first element of a row.
    WHOLEMEM_HOST_DEVICE T *Row(u64 row) const { return (T *)ref.address(row); }

private:
    GlobalRef ref;
};

// A handle that is const says nothing about the memory: WholeMemory's kernels write through it.
template <class T> class PtrGen<const GlobalRef, T> : public PtrGen<GlobalRef, T> {
public:
    WHOLEMEM_HOST_DEVICE explicit PtrGen(const GlobalRef &handle) : PtrGen<GlobalRef, T>(handle) {}
    WHOLEMEM_HOST_DEVICE explicit PtrGen(const GlobalRef *handle) : PtrGen<GlobalRef, T>(handle) {}
};

} // namespace wholemem

// The names that kernels written for WholeMemory use.
namespace whole_memory {
typedef wholemem::GlobalRef WholeChunkedMemoryHandle;
using wholemem::PtrGen;
} // namespace whole_memory

namespace whole_graph {
typedef wholemem::GlobalRef WholeChunkedMemoryHandle;
using wholemem::PtrGen;
} // namespace whole_graph

using wholemem::PtrGen;
