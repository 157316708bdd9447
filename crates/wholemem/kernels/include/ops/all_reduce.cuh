// All-reduce, three ways: packets, one shot, two shots. All give the same bits.
//
//     packets     every rank sends its input to every rank                      no barrier, twice the bytes: short ones
//     one shot    every rank reads every rank's input, and reduces all of it    one barrier
//     two shots   every rank reduces a part, and all collect the parts          two barriers, and no byte is reduced twice
#pragma once

#include "ops/collective.cuh"
#include "ops/reduce.cuh"

namespace wholemem {

// A type that is neither const nor a reference.
template <class T> struct Plain;
template <class T> struct Plain<const T &> {
    typedef T Type;
};

// Runs a body that is compiled for what is most often asked; false: it is something else.
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

// Where results go: one place of this rank's own.
struct Output {
    u64 output;

    __device__ __forceinline__ u32 places() const { return 1; }
    __device__ __forceinline__ u64 address(u32) const { return output; }
};

// Every rank's output, or, where there is no window of them, this rank's result memory and its output. It is found anew each
// time: what it is found from takes no register.
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

// What of every rank's part is reduced, and where it goes: every result to all places.
template <class To> struct Reduction {
    WindowRef from;
    To to;
    u32 bytes;
    bool fits; // all addresses are multiples of a pack
    Share share;
};

// Reduces whole packs, and says where it stopped. The loads of GROUP ranks and TURNS packs are under way together. With more
// than one pack, there are no more ranks than that.
template <u32 GROUP, u32 TURNS, class To, class Recipe>
__device__ __forceinline__ u32 reduce_whole(const Reduction<To> &reduction, const Recipe &recipe, u32 ranks)
{
    constexpr bool ONCE = TURNS > 1;
    const u32 step = reduction.share.step, whole = whole_packs(reduction.bytes);
    u64 bases[GROUP];
#pragma unroll
    for (u32 i = 0; i < GROUP; ++i)
        bases[i] = ONCE ? unseen(reduction.from.address(i < ranks ? i : 0)) : 0;
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

// Reduces what is left from an offset on: any type and operation, what is not aligned to packs, and the last pack if it is
// shorter.
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
    const Any recipe = {unseen(request.dtype), unseen(request.op), unseen(request.lane.ranks)};
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
    Call call(request.lane, block, blocks);
    const bool fits = request.output % PACK == 0 &&
                      (!request.inputs.exists() || aligned(request.inputs, request.lane.ranks));
    with_inputs(request, call, true, [&](const WindowRef &from, u64 start, u32 len) {
        reduce<Output>(request, {from, {request.output + start}, len, fits, Share(call)});
    });
}

// Collects what the other ranks have reduced: the j-th tile of a block is in the memory of rank j % ranks.
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
            bool is[TURNS];
#pragma unroll
            for (u32 turn = 0; turn < TURNS; ++turn) {
                is[turn] = source != lane.rank && at + turn * share.step < whole;
                packs[turn] = load_if(is[turn], lane.result(source) + (at + turn * share.step));
                source = source + 1 < lane.ranks ? source + 1 : 0;
            }
#pragma unroll
            for (u32 turn = 0; turn < TURNS; ++turn)
                store_if(is[turn], output + (at + turn * share.step), packs[turn]);
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

// In pieces where staging or result memory is needed, as long as that is. No buffer needs to alternate: staging memory is
// read before the second barrier of a piece, and result memory is written after the first of the next.
__device__ __forceinline__ void all_reduce_two_shot(const CollectiveRequest &request, u32 block, u32 blocks)
{
    Call call(request.lane, block, blocks);
    const LaneRef &lane = request.lane;
    const bool fits = (!request.inputs.exists() || aligned(request.inputs, lane.ranks)) &&
                      (request.outputs.exists() ? aligned(request.outputs, lane.ranks) : request.output % PACK == 0);
    u32 piece = 0;
    u64 bytes, most;
    do {
        const bool staged = unseen(request.inputs.base | request.inputs.table) == 0;
        const bool collected = unseen(request.outputs.base | request.outputs.table) == 0;
        bytes = unseen(request.count) * element_len(request.dtype);
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

// Sums up what COUNT ranks at most have sent, if it has come.
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
    with_sum(unseen(request.dtype), SUM, [&](const auto &recipe) {
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

// The same for any type, operation and number of ranks, one after another.
__device__ __forceinline__ bool reduce_packets(const CollectiveRequest &request, const Packets &packets, u64 at, u64 own,
                                               u64 &result)
{
    const Any recipe = {unseen(request.dtype), unseen(request.op), unseen(request.lane.ranks)};
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

// Sends are the first thing that happens, and all of them come before the first wait. A call without a byte sends and
// receives all the same: who heard nothing could be a call ahead.
__device__ __forceinline__ void all_reduce_ll(const CollectiveRequest &request, u32 block, u32 blocks)
{
    Call call(request.lane, block, blocks);
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
    } while (call.again(at < span, packets.awaited(at, 0, ranks), since));
    if (call.alive())
        call.finish();
}

} // namespace wholemem
