// Packets: few bytes that bring their own signal, so that a call needs no barrier.
//
//     packet, 16 bytes:   | data 32 | flag 32 |   | data 32 | flag 32 |        8 bytes of payload
//                         '----- one u64 -----'   '----- one u64 -----'
//
// A u64 is stored and loaded as a whole, so data whose flag is this call's is this call's data, and no order among words is
// needed: all of it is relaxed. That costs twice the bytes, and saves the wait for the release and the way back.
//
// The flag is the low 32 bits of the call's number. Slots alternate with the call's parity and are never cleared: what a slot
// holds is two calls old. Where the 32 bits begin anew, an old flag could be taken for a new one; that call goes by a barrier
// and clears the slots first (`Call::wraps`).
//
// Packets of a source lie in the receiver's memory, so waiting reads no other device. Compiles as C++11 under a host compiler
// (the layout), nvcc and NVRTC (all of it).
#pragma once

#include "wholemem/barrier.cuh"

namespace wholemem {

WHOLEMEM_HOST_DEVICE u64 packet_word(u32 data, u32 flag) { return (u64)flag << 32 | data; }

WHOLEMEM_HOST_DEVICE u32 packet_data(u64 word) { return (u32)word; }

WHOLEMEM_HOST_DEVICE u32 packet_flag(u64 word) { return (u32)(word >> 32); }

#if defined(__CUDACC__)

// What a thread sends and receives in one call, 8 bytes of payload at a time.
class Packets {
public:
    __device__ __forceinline__ explicit Packets(Call &call)
        : call(call), flag((u32)call.number()), parity(call.parity()), any(call.has(MUTANT_ANY_FLAG))
    {
    }

    // Sends what is at `at` of the payload to every peer, each rank to another one first.
    __device__ __forceinline__ void send(u64 at, u64 data) const
    {
        const LaneRef &lane = call.lane;
#pragma unroll 1
        for (u32 step = 1; step < lane.ranks; ++step)
            send_to(lane.rank + step < lane.ranks ? lane.rank + step : lane.rank + step - lane.ranks, at, data);
    }

    __device__ __forceinline__ void send_to(u32 peer, u64 at, u64 data) const
    {
        if (call.alive())
            store_pair_relaxed(call.lane.packets(peer, parity, call.lane.rank) + 2 * at,
                               {packet_word((u32)data, flag), packet_word((u32)(data >> 32), flag)});
    }

    // Looks for what is at `at` of the payloads of ranks `first` on, but leaves alone what is this rank's own, or of a rank
    // that there is not. False: not all has come in many looks, and the block agrees whether to look `again`. All loads of a
    // look are under way together, and only for what has not come.
    template <u32 COUNT> __device__ __forceinline__ bool receive(u64 at, u32 first, u64 (&data)[COUNT]) const
    {
        const LaneRef &lane = call.lane;
        const u64 slots = lane.packets(lane.rank, parity, first) + 2 * at;
        WordPair pairs[COUNT];
        // Where there is nothing to wait for, what was waited for is there. What is not there has no flag, which none is 0.
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            const bool is = first + i < lane.ranks && first + i != lane.rank;
            pairs[i].low = pairs[i].high = is ? 0 : packet_word(0, flag);
        }
        bool all = false;
#pragma unroll 1
        for (u32 look = 0; look < Call::LOOKS && !all; ++look) {
            const u64 turn = unseen(slots);
#pragma unroll
            for (u32 i = 0; i < COUNT; ++i)
                load_pair_relaxed(fits(pairs[i]) ? 0 : turn + i * (2 * lane.ll_len), pairs[i]);
            all = true;
#pragma unroll
            for (u32 i = 0; i < COUNT; ++i)
                all &= fits(pairs[i]);
        }
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i)
            data[i] = (u64)packet_data(pairs[i].high) << 32 | packet_data(pairs[i].low);
        return all;
    }

    // What is at `at` of the payloads of some ranks, to be waited for.
    __device__ __forceinline__ Awaited awaited(u64 at, u32 first, u32 count) const
    {
        return {call.lane.packets(call.lane.rank, parity, 0) + 2 * at, 2 * call.lane.ll_len, flag, 2, first, count};
    }

private:
    Call &call;
    const u32 flag;
    const u32 parity;
    const bool any;

    __device__ __forceinline__ bool fits(const WordPair &pair) const { return fits(pair.low) & fits(pair.high); }

    __device__ __forceinline__ bool fits(u64 word) const
    {
        return packet_flag(word) == flag || (any && packet_flag(word) != 0);
    }
};

#endif

} // namespace wholemem
