// What a collective is asked: one value for one kernel of each rank.
#pragma once

#include "ops/numbers.cuh"
#include "ops/packs.cuh"
#include "wholemem/ll.cuh"

namespace wholemem {

struct CollectiveRequest {
    Lane lane;
    u64 input;  // this rank's own, aligned to its elements, as is the output
    u64 output; // may be the input; of an all-gather, its own part may be
    u64 count;  // elements of the input
    Window inputs;  // every rank's, to be read where they are; none: they are staged
    Window outputs; // every rank's, to be written by all; none: each rank writes its own
    u32 dtype;
    u32 op;
    u32 root;
    u32 early; // not zero: this kernel is set up while the one before it runs, and lets the next be

    __device__ __forceinline__ u64 bytes() const { return count * element_len(dtype); }
};

static_assert(sizeof(CollectiveRequest) == 192, "the layout is shared with Rust");

// What every kernel does first.
//
// One that was set up early has waited for nothing yet: not for what wrote its input, nor for the call before it. From here on
// it may be waiting for other ranks, and the next is set up meanwhile.
__device__ __forceinline__ void begin(const CollectiveRequest &request)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (request.early != 0) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    }
#else
    (void)request;
#endif
}

// The parts of all ranks' staging memory that have a parity, as a window.
__device__ __forceinline__ Window staging(const Lane &lane, u32 parity)
{
    return {lane.staging(0, parity), lane.stride, 0};
}

// How long the next piece of some bytes is.
__device__ __forceinline__ u32 piece_len(u64 start, u64 bytes, u64 most) { return (u32)min(bytes - start, most); }

// Puts a piece of this rank's input where the others find it.
__device__ __forceinline__ void stage(const CollectiveRequest &request, const Call &call, u64 start, u32 len, u32 parity)
{
    copy(request.input + start, request.lane.staging(request.lane.rank, parity), len, Share(call),
         request.input % PACK == 0, call.alive());
}

// Runs `read` when the inputs can be read: where they are, or in staging memory, piece by piece. `stages`: this rank's is
// read by others.
//
//     zero copy    | barrier 1 | read | barrier 2 |          what follows on the stream may overwrite the input
//     staged       | copy | barrier 1 | read |               the next call copies to the other buffer
//     in pieces    | copy | barrier 1 | read | copy | barrier 2 | read | ... | barrier |
//
// The buffers alternate from piece to piece. The third piece is copied to where the first one was: barrier 2 says that all
// have read it. The last barrier lets the next call begin with either.
template <class Read>
__device__ __forceinline__ void with_inputs(const CollectiveRequest &request, Call &call, bool stages, Read read)
{
    const bool direct = request.inputs.exists();
    const u64 bytes = request.bytes(), most = direct ? PIECE : min(request.lane.staging_len, PIECE);
    u64 start = 0;
    u32 pieces = 0;
    do {
        const u32 len = piece_len(start, bytes, most);
        const u32 parity = call.parity() ^ (call.has(ONE_PARITY) ? 0 : pieces & 1);
        if (!direct && stages)
            stage(request, call, start, len, parity);
        if (!call.sync(NO_FIRST))
            return;
        read(direct ? request.inputs.from(start) : staging(request.lane, parity), start, len);
        start += most;
        ++pieces;
    } while (start < bytes);
    if ((direct || pieces > 1) && !call.sync(direct ? NO_SECOND : NO_FINAL))
        return;
    call.finish();
}

} // namespace wholemem
