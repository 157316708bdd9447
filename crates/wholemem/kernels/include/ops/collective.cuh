// Functions that all collective kernels use: the start of a kernel, and access to the inputs of the ranks.
#pragma once

#include "ops/numbers.cuh"
#include "ops/packs.cuh"
#include "wholemem/ll.cuh"

namespace wholemem {

// The length of this rank's input in bytes.
__device__ __forceinline__ u64 input_len(const CollectiveRequest &request) { return request.count * element_len(request.dtype); }

// The first step of every collective kernel.
//
// A kernel with a programmatic launch may start before earlier work on its stream has finished. Such a kernel waits here for
// that work, and allows the next kernel to be launched while this kernel waits for other ranks.
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

// Begins this rank's call in one block of the kernel.
__device__ __forceinline__ Call begin_call(const CollectiveRequest &request, u32 block, u32 blocks)
{
    return Call(request.lane, block, blocks, &request.terms, request.digest);
}

// The staging buffers of all ranks as a window. `parity` selects one of the two buffers of each rank.
__device__ __forceinline__ WindowRef staging(const LaneRef &lane, u32 parity)
{
    return {lane.staging(0, parity), lane.stride, 0};
}

// The length of the piece of a call's data that begins at `start`. A piece has at most `most` bytes.
__device__ __forceinline__ u32 piece_len(u64 start, u64 bytes, u64 most) { return (u32)min(bytes - start, most); }

// Copies a piece of this rank's input to the rank's staging buffer, from which the other ranks read it.
__device__ __forceinline__ void stage(const CollectiveRequest &request, const Call &call, u64 start, u32 len, u32 parity)
{
    copy(request.input + start, request.lane.staging(request.lane.rank, parity), len, Share(call),
         request.input % PACK == 0, call.alive());
}

// Calls `read` when the inputs of all ranks can be read: in the window, or piece by piece in the staging buffers. `stages` says
// whether other ranks read this rank's input.
//
//     window       | barrier 1 | read | barrier 2 |          then the next work on the stream may overwrite the input
//     staged       | copy | barrier 1 | read |               the next call copies to the other buffer
//     in pieces    | copy | barrier 1 | read | copy | barrier 2 | read | ... | barrier |
//
// The two staging buffers alternate from piece to piece. Barrier 2 proves that all ranks have read the first piece, so the third
// piece may overwrite it. After the last barrier, the next call may begin with either buffer.
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
