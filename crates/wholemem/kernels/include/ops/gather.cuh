// Collectives without arithmetic: all-gather, broadcast and barrier.
#pragma once

#include "ops/collective.cuh"

namespace wholemem {

// Copies this thread's packs (16 bytes each) of every rank's input to the output, in which the inputs follow each other.
__device__ __forceinline__ void gather(const CollectiveRequest &request, const WindowRef &from, u64 start, u32 len,
                                       Share share, bool fits)
{
    constexpr u32 GROUP = 2, TURNS = 2;
    const u32 ranks = request.lane.ranks, whole = whole_packs(len);
    const u64 part = input_len(request), output = request.output + start;
    u32 at = share.first;
    if (fits) {
#pragma unroll 1
        for (; at < whole; at += TURNS * share.step)
#pragma unroll 1
            for (u32 first = 0; first < ranks; first += GROUP) {
                uint4 packs[GROUP][TURNS];
                bool copied[GROUP];
#pragma unroll
                for (u32 i = 0; i < GROUP; ++i) {
                    const u64 base = from.address(first + i < ranks ? first + i : 0);
                    // An input that is already in its place in the output is not copied, since peers may be reading it.
                    copied[i] = first + i < ranks && base != output + (first + i) * part;
#pragma unroll
                    for (u32 turn = 0; turn < TURNS; ++turn)
                        packs[i][turn] = load_if(copied[i] && at + turn * share.step < whole, base + (at + turn * share.step));
                }
#pragma unroll
                for (u32 i = 0; i < GROUP; ++i)
#pragma unroll
                    for (u32 turn = 0; turn < TURNS; ++turn)
                        store_if(copied[i] && at + turn * share.step < whole,
                                 output + (first + i) * part + (at + turn * share.step), packs[i][turn]);
            }
        at = share.back(at, whole, TURNS);
    }
#pragma unroll 1
    for (; at < len; at += share.step)
#pragma unroll 1
        for (u32 rank = 0; rank < ranks; ++rank) {
            const u64 base = from.address(rank), to = output + rank * part;
            if (base != to)
                store_pack(to + at, load_pack(base + at, pack_len(at, len)), pack_len(at, len));
        }
}

// Stores this rank's input into every rank's output. The first barrier allows writing the outputs; after the second barrier,
// the outputs are complete.
__device__ __forceinline__ void push(const CollectiveRequest &request, Call &call, u64 offset, bool pushes)
{
    const u32 ranks = request.lane.ranks;
    const u64 bytes = input_len(request);
    const bool fits = request.input % PACK == 0 && aligned(request.outputs.from(offset), ranks);
    if (!call.sync(MUTANT_NO_FIRST_BARRIER))
        return;
#pragma unroll 1
    for (u64 start = 0; pushes && start < bytes; start += PIECE)
        copy_to_each(request.input + start, request.outputs.from(offset + start), ranks, piece_len(start, bytes, PIECE),
               Share(call), fits, true);
    if (!call.sync(MUTANT_NO_SECOND_BARRIER))
        return;
    call.finish();
}

__device__ __forceinline__ void all_gather(const CollectiveRequest &request, u32 block, u32 blocks)
{
    Call call = begin_call(request, block, blocks);
    const u64 part = input_len(request);
    if (request.outputs.exists())
        return push(request, call, request.lane.rank * part, true);
    const bool fits = (request.output | part) % PACK == 0 &&
                      (!request.inputs.exists() || aligned(request.inputs, request.lane.ranks));
    with_inputs(request, call, true, [&](const WindowRef &from, u64 start, u32 len) {
        gather(request, from, start, len, Share(call), fits);
    });
}

__device__ __forceinline__ void all_gather_ll(const CollectiveRequest &request, u32 block, u32 blocks)
{
    constexpr u32 GROUP = 4;
    Call call = begin_call(request, block, blocks);
    const Share share = Share::of_halves(call);
    const u32 ranks = request.lane.ranks, rank = request.lane.rank;
    const u32 bytes = (u32)input_len(request), span = max(bytes, 1u);
    u64 own = 0;
    if (share.first < span)
        own = load_half(request.input + share.first, half_len(share.first, bytes));
    if (call.wraps())
        return with_inputs(request, call, true, [&](const WindowRef &from, u64 start, u32 len) {
            gather(request, from, start, len, Share(call), false);
        });
    const Packets packets(call);
#pragma unroll 1
    for (u32 at = share.first; at < span; at += share.step) {
        const u32 len = half_len(at, bytes);
        if (at != share.first)
            own = load_half(request.input + at, len);
        packets.send(at, own);
        if (call.alive())
            store_half(request.output + rank * (u64)bytes + at, own, len);
    }
    call.pause(1);
    u32 at = share.first, first = 0;
    u64 since = 0;
    do {
#pragma unroll 1
        while (at < span && call.alive()) {
            u64 data[GROUP] = {};
            if (!packets.receive(at, first, data))
                break;
#pragma unroll
            for (u32 i = 0; i < GROUP; ++i)
                if (first + i < ranks && first + i != rank)
                    store_half(request.output + (first + i) * (u64)bytes + at, data[i], half_len(at, bytes));
            since = 0;
            first += GROUP;
            if (first >= ranks)
                first = 0, at += share.step;
        }
    } while (call.keep_waiting(at < span, packets.awaited(at, first, GROUP), since));
    if (call.alive())
        call.finish();
}

// Copies a piece of the broadcast root's input to this rank's output.
__device__ __forceinline__ void fetch(const CollectiveRequest &request, const Call &call, const WindowRef &from, u64 start,
                                      u32 len, bool may_fit)
{
    const u64 output = request.output + start;
    const u64 source = request.lane.rank == request.root ? request.input + start : from.address(request.root);
    if (source != output)
        copy(source, output, len, Share(call), may_fit && (source | output) % PACK == 0, true);
}

__device__ __forceinline__ void broadcast(const CollectiveRequest &request, u32 block, u32 blocks)
{
    Call call = begin_call(request, block, blocks);
    const bool is_root = request.lane.rank == request.root;
    if (request.outputs.exists() && !request.inputs.exists())
        return push(request, call, 0, is_root);
    with_inputs(request, call, is_root, [&](const WindowRef &from, u64 start, u32 len) {
        fetch(request, call, from, start, len, true);
    });
}

// Broadcast by packets: each packet carries a flag, so no barrier is needed. The root sends its data. Every other rank sends
// one packet without data, so that every rank receives a packet from every rank, and no rank runs ahead by two calls.
__device__ __forceinline__ void broadcast_ll(const CollectiveRequest &request, u32 block, u32 blocks)
{
    Call call = begin_call(request, block, blocks);
    const LaneRef &lane = request.lane;
    const Share share = Share::of_halves(call);
    const bool is_root = lane.rank == request.root;
    const u32 bytes = (u32)input_len(request), span = max(bytes, 1u);
    if (call.wraps())
        return with_inputs(request, call, is_root, [&](const WindowRef &from, u64 start, u32 len) {
            fetch(request, call, from, start, len, false);
        });
    const Packets packets(call);
    if (!is_root)
#pragma unroll 1
        for (u32 peer = threadIdx.x; block == 0 && peer < lane.ranks; peer += COLLECTIVE_THREADS)
            if (peer != lane.rank)
                packets.send_to(peer, 0, 0);
    call.pause(1);
    // Receive the packets of the root first, and the empty packets of the other ranks after them.
    u32 at = share.first, peer = block == 0 ? threadIdx.x : lane.ranks;
    u64 since = 0;
    do {
        u64 data[1] = {};
#pragma unroll 1
        for (; at < span && call.alive(); at += share.step) {
            if (is_root) {
                data[0] = load_half(request.input + at, half_len(at, bytes));
                packets.send(at, data[0]);
            } else if (!packets.receive(at, request.root, data)) {
                break;
            }
            if (!(is_root && request.input == request.output))
                store_half(request.output + at, data[0], half_len(at, bytes));
            since = 0;
        }
#pragma unroll 1
        for (; at >= span && peer < lane.ranks && call.alive(); peer += COLLECTIVE_THREADS) {
            if (peer != request.root && !packets.receive(0, peer, data))
                break;
            since = 0;
        }
    } while (call.keep_waiting(at < span || peer < lane.ranks,
                        at < span ? packets.awaited(at, request.root, 1) : packets.awaited(0, peer, 1), since));
    if (call.alive())
        call.finish();
}

__device__ __forceinline__ void barrier(const CollectiveRequest &request, u32 block, u32 blocks)
{
    Call call = begin_call(request, block, blocks);
    if (call.sync())
        call.finish();
}

} // namespace wholemem
