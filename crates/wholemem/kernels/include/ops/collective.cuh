// What the kernels of all collectives have in common: how they begin, and how they read the inputs.
#pragma once

#include "ops/numbers.cuh"
#include "ops/packs.cuh"
#include "wholemem/ll.cuh"

namespace wholemem {

// Bytes of this rank's input.
__device__ __forceinline__ u64 input_len(const CollectiveRequest &request) { return request.count * element_len(request.dtype); }

// What every kernel does first.
//
// One that was set up early has waited for nothing yet: not for what wrote its input, nor for the call before it. From here on
// it may be waiting for other ranks, and the next is set up meanwhile.
__device__ __forceinline__ void begin(const CollectiveRequest &request)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (request.programmatic != 0) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    }
#else
    (void)request;
#endif
}

// The parts of all ranks' staging memory that have a parity, as a window.
__device__ __forceinline__ WindowRef staging(const LaneRef &lane, u32 parity)
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
    const u64 bytes = input_len(request), most = direct ? PIECE : min(request.lane.staging_len, PIECE);
    u64 start = 0;
    u32 pieces = 0;
    do {
        const u32 len = piece_len(start, bytes, most);
        const u32 parity = call.parity() ^ (call.has(MUTANT_ONE_BUFFER) ? 0 : pieces & 1);
        if (!direct && stages)
            stage(request, call, start, len, parity);
        if (!call.sync(MUTANT_NO_FIRST_BARRIER))
            return;
        read(direct ? request.inputs.from(start) : staging(request.lane, parity), start, len);
        start += most;
        ++pieces;
    } while (start < bytes);
    if ((direct || pieces > 1) && !call.sync(direct ? MUTANT_NO_SECOND_BARRIER : MUTANT_NO_LAST_BARRIER))
        return;
    call.finish();
}

} // namespace wholemem
