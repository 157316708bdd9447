// All-reduce by three algorithms with bitwise equal results: packets, one-shot and two-shot.
//
//     packets     every rank sends its input to every rank                       no barrier, twice the bytes; for short inputs
//     one-shot    every rank reads all inputs and reduces all elements           one barrier
//     two-shot    every rank reduces one part, then all ranks gather the parts   two barriers; each element is reduced once
#pragma once

#include "ops/collective.cuh"
#include "ops/reduce.cuh"

namespace wholemem {

// Removes const and the reference from a type: `Plain<const T &>::Type` is T.
template <class T> struct Plain;
template <class T> struct Plain<const T &> {
    typedef T Type;
};

// Calls `body` with a sum that is specialized at compile time, if the reduction is a sum of bfloat16, half or float. Returns
// false for all other reductions.
template <class Body> __device__ __forceinline__ bool with_sum(u32 dtype, u32 op, Body body)
{
    if (op != SUM)
        return false;
    switch (dtype) {
    case BF16: body(Sum<BF16>()); return true;
    case F16: body(Sum<F16>()); return true;
    case F32: body(Sum<F32>()); return true;
    default: return false;
    }
}

// The destination of the results of a reduction: the output of this rank.
struct Output {
    u64 output;

    __device__ __forceinline__ u32 places() const { return 1; }
    __device__ __forceinline__ u64 address(u32) const { return output; }
};

// The destinations of the results in the two-shot all-reduce: the outputs of all ranks if the output is a window, otherwise
// this rank's result buffer and its output. Addresses are computed at each use, to save registers.
struct Outputs {
    const CollectiveRequest &request;
    u64 start;

    __device__ __forceinline__ bool collected() const { return !request.outputs.exists(); }
    __device__ __forceinline__ u32 places() const { return collected() ? 2 : request.lane.ranks; }
    __device__ __forceinline__ u64 address(u32 place) const
    {
        if (!collected())
            return request.outputs.address(place) + start;
        return place == 0 ? request.lane.result(request.lane.rank) : request.output + start;
    }
};

// The inputs of a reduction and the destinations of its results. Each result is stored to all destinations.
template <class To> struct Reduction {
    WindowRef from;
    To to;
    u32 bytes;
    bool fits; // all addresses are aligned to packs
    Share share;
};

// Reduces this thread's whole packs (16 bytes each), and returns the offset of the first one that is left. The loads of TURNS
// packs from GROUP ranks are in flight together. If TURNS > 1, there must be at most GROUP ranks.
template <u32 GROUP, u32 TURNS, class To, class Recipe>
__device__ __forceinline__ u32 reduce_whole(const Reduction<To> &reduction, const Recipe &recipe, u32 ranks)
{
    constexpr bool ONCE = TURNS > 1;
    const u32 step = reduction.share.step, whole = whole_packs(reduction.bytes);
    u64 bases[GROUP];
#pragma unroll
    for (u32 i = 0; i < GROUP; ++i)
        bases[i] = ONCE ? opaque(reduction.from.address(i < ranks ? i : 0)) : 0;
    u32 at = reduction.share.first;
#pragma unroll 1
    for (; at < whole; at += TURNS * step) {
        typename Recipe::Held held = {};
        uint4 packs[TURNS][GROUP];
#pragma unroll 1
        for (u32 first = 0; first < (ONCE ? 1 : ranks); first += GROUP) {
#pragma unroll
            for (u32 i = 0; i < GROUP; ++i) {
                if (!ONCE)
                    bases[i] = reduction.from.address(first + i < ranks ? first + i : 0);
#pragma unroll
                for (u32 turn = 0; turn < TURNS; ++turn)
                    packs[turn][i] = load_if(first + i < ranks && at + turn * step < whole, bases[i] + (at + turn * step));
            }
#pragma unroll
            for (u32 turn = 0; turn < TURNS; ++turn) {
#pragma unroll
                for (u32 i = 0; i < GROUP; ++i)
                    if (i == 0 && first == 0)
                        recipe.first(held, packs[turn][i]);
                    else if (first + i < ranks)
                        recipe.next(held, packs[turn][i]);
                if (ONCE)
                    packs[turn][0] = recipe.result(held);
            }
        }
        if (!ONCE)
            packs[0][0] = recipe.result(held);
#pragma unroll 1
        for (u32 place = 0; place < reduction.to.places(); ++place) {
            const u64 base = reduction.to.address(place);
#pragma unroll
            for (u32 turn = 0; turn < TURNS; ++turn)
                store_if(at + turn * step < whole, base + (at + turn * step), packs[turn][0]);
        }
    }
    return reduction.share.back(at, whole, TURNS);
}

// Reduces the packs (16 bytes each) from offset `at` on, for any type, operation and alignment, including a shorter last pack.
template <class To>
__device__ __forceinline__ void reduce_rest(const Reduction<To> &reduction, const Any &recipe, u32 at)
{
#pragma unroll 1
    for (; at < reduction.bytes; at += reduction.share.step) {
        const u32 len = pack_len(at, reduction.bytes);
        Any::Held held = {};
#pragma unroll 1
        for (u32 rank = 0; rank < recipe.count; ++rank) {
            const uint4 pack = load_pack(reduction.from.address(rank) + at, len);
            if (rank == 0)
                recipe.first(held, pack);
            else
                recipe.next(held, pack);
        }
        const uint4 result = recipe.result(held);
#pragma unroll 1
        for (u32 place = 0; place < reduction.to.places(); ++place)
            store_pack(reduction.to.address(place) + at, result, len);
    }
}

template <class To>
__device__ __forceinline__ void reduce(const CollectiveRequest &request, const Reduction<To> &reduction)
{
    const Any recipe = {opaque(request.dtype), opaque(request.op), opaque(request.lane.ranks)};
    const u32 ranks = recipe.count;
    u32 at = reduction.share.first;
    if (reduction.fits)
        with_sum(recipe.dtype, recipe.op, [&](const auto &sum) {
            at = ranks <= 2 ? reduce_whole<2, 2>(reduction, sum, ranks) : reduce_whole<4, 1>(reduction, sum, ranks);
        });
    reduce_rest(reduction, recipe, at);
}

__device__ __forceinline__ void all_reduce_one_shot(const CollectiveRequest &request, u32 block, u32 blocks)
{
    Call call = begin_call(request, block, blocks);
    const bool fits = request.output % PACK == 0 &&
                      (!request.inputs.exists() || aligned(request.inputs, request.lane.ranks));
    with_inputs(request, call, true, [&](const WindowRef &from, u64 start, u32 len) {
        reduce<Output>(request, {from, {request.output + start}, len, fits, Share(call)});
    });
}

// Copies the parts that other ranks have reduced from their result buffers to this rank's output. Tile j of a block is in the
// result buffer of rank j % ranks.
__device__ __forceinline__ void collect(const LaneRef &lane, const Call &call, u64 output, u32 bytes, bool fits)
{
    constexpr u32 TURNS = 4;
    const Share share(call);
    const u32 whole = whole_packs(bytes);
    u32 at = share.first, source = 0;
    if (fits) {
#pragma unroll 1
        for (; at < whole; at += TURNS * share.step) {
            uint4 packs[TURNS];
            bool copied[TURNS];
#pragma unroll
            for (u32 turn = 0; turn < TURNS; ++turn) {
                copied[turn] = source != lane.rank && at + turn * share.step < whole;
                packs[turn] = load_if(copied[turn], lane.result(source) + (at + turn * share.step));
                source = source + 1 < lane.ranks ? source + 1 : 0;
            }
#pragma unroll
            for (u32 turn = 0; turn < TURNS; ++turn)
                store_if(copied[turn], output + (at + turn * share.step), packs[turn]);
        }
        at = share.back(at, whole, TURNS);
        source = at < bytes ? (at - share.first) / TILE / call.blocks % lane.ranks : 0;
    }
#pragma unroll 1
    for (; at < bytes; at += share.step) {
        if (source != lane.rank)
            store_pack(output + at, load_pack(lane.result(source) + at, pack_len(at, bytes)), pack_len(at, bytes));
        source = source + 1 < lane.ranks ? source + 1 : 0;
    }
}

// Performs a two-shot all-reduce. If the staging or result buffer is used, the data is divided into pieces of at most the
// length of these buffers. The buffers need not alternate: the staging buffer is read before the second barrier of a piece, and
// the result buffer is written after the first barrier of the next piece.
__device__ __forceinline__ void all_reduce_two_shot(const CollectiveRequest &request, u32 block, u32 blocks)
{
    Call call = begin_call(request, block, blocks);
    const LaneRef &lane = request.lane;
    const bool fits = (!request.inputs.exists() || aligned(request.inputs, lane.ranks)) &&
                      (request.outputs.exists() ? aligned(request.outputs, lane.ranks) : request.output % PACK == 0);
    u32 piece = 0;
    u64 bytes, most;
    do {
        const bool staged = opaque(request.inputs.base | request.inputs.table) == 0;
        const bool collected = opaque(request.outputs.base | request.outputs.table) == 0;
        bytes = opaque(request.count) * element_len(request.dtype);
        most = staged || collected ? min(lane.staging_len, PIECE) : PIECE;
        const u64 start = piece * most;
        const u32 len = piece_len(start, bytes, most);
        if (staged)
            stage(request, call, start, len, call.parity());
        if (!call.sync(MUTANT_NO_FIRST_BARRIER))
            return;
        reduce<Outputs>(request, {staged ? staging(lane, call.parity()) : request.inputs.from(start), {request, start}, len,
                                  fits, Share(call, lane.rank, lane.ranks)});
        if (!call.sync(MUTANT_NO_SECOND_BARRIER))
            return;
        if (collected)
            collect(lane, call, request.output + start, len, fits);
    } while (++piece * most < bytes);
    call.finish();
}

// Sums the packets of at most COUNT ranks at one offset. Returns false if some packets have not arrived.
template <u32 COUNT>
__device__ __forceinline__ bool sum_packets(const CollectiveRequest &request, const Packets &packets, u64 at, u64 own,
                                            u64 &sum)
{
    constexpr u32 GROUP = COUNT < 4 ? COUNT : 4;
    u64 data[COUNT / GROUP][GROUP] = {};
#pragma unroll
    for (u32 group = 0; group < COUNT / GROUP; ++group)
        if (!packets.receive(at, group * GROUP, data[group]))
            return false;
    with_sum(opaque(request.dtype), SUM, [&](const auto &recipe) {
        typename Plain<decltype(recipe)>::Type::Held held = {};
#pragma unroll
        for (u32 rank = 0; rank < COUNT; ++rank) {
            const uint4 pack = pack_of(rank == request.lane.rank ? own : data[rank / GROUP][rank % GROUP], 0);
            if (rank == 0)
                recipe.first(held, pack);
            else if (rank < request.lane.ranks)
                recipe.next(held, pack);
        }
        sum = lower_half(recipe.result(held));
    });
    return true;
}

// Reduces the packets of all ranks at one offset, one after another, for any type, operation and number of ranks. Returns false
// if a packet has not arrived.
__device__ __forceinline__ bool reduce_packets(const CollectiveRequest &request, const Packets &packets, u64 at, u64 own,
                                               u64 &result)
{
    const Any recipe = {opaque(request.dtype), opaque(request.op), opaque(request.lane.ranks)};
    Any::Held held = {};
#pragma unroll 1
    for (u32 rank = 0; rank < request.lane.ranks; ++rank) {
        u64 data[1] = {own};
        if (rank != request.lane.rank && !packets.receive(at, rank, data))
            return false;
        if (rank == 0)
            recipe.first(held, pack_of(data[0], 0));
        else
            recipe.next(held, pack_of(data[0], 0));
    }
    result = lower_half(recipe.result(held));
    return true;
}

// All-reduce by packets: each packet carries a flag, so no barrier is needed. All packets are sent before the first wait. A
// call without data also sends and receives a packet: otherwise a rank could run ahead of the others by more than one call.
__device__ __forceinline__ void all_reduce_ll(const CollectiveRequest &request, u32 block, u32 blocks)
{
    Call call = begin_call(request, block, blocks);
    const Share share = Share::of_halves(call);
    const u32 bytes = (u32)input_len(request), span = max(bytes, 1u), ranks = request.lane.ranks;
    u64 own = 0;
    if (share.first < span)
        own = load_half(request.input + share.first, half_len(share.first, bytes));
    if (call.wraps())
        return with_inputs(request, call, true, [&](const WindowRef &from, u64 start, u32 len) {
            reduce_rest<Output>({from, {request.output + start}, len, false, Share(call)},
                                {request.dtype, request.op, ranks}, Share(call).first);
        });
    const Packets packets(call);
#pragma unroll 1
    for (u32 at = share.first; at < span; at += share.step)
        packets.send(at, at == share.first ? own : load_half(request.input + at, half_len(at, bytes)));
    call.pause(1);
    const bool sums = request.op == SUM && request.dtype >= F16 && request.dtype <= F32;
    u32 at = share.first;
    u64 since = 0;
    do {
#pragma unroll 1
        for (; at < span && call.alive(); at += share.step) {
            if (at != share.first)
                own = load_half(request.input + at, half_len(at, bytes));
            u64 result = 0;
            const bool received = !sums || ranks > 8 ? reduce_packets(request, packets, at, own, result)
                                  : ranks <= 2       ? sum_packets<2>(request, packets, at, own, result)
                                  : ranks <= 4       ? sum_packets<4>(request, packets, at, own, result)
                                                     : sum_packets<8>(request, packets, at, own, result);
            if (!received)
                break;
            store_half(request.output + at, result, half_len(at, bytes));
            since = 0;
        }
    } while (call.keep_waiting(at < span, packets.awaited(at, 0, ranks), since));
    if (call.alive())
        call.finish();
}

} // namespace wholemem
