// Packets: 8 bytes of payload with flags that show their arrival, so that a collective call needs no barrier (NCCL's LL protocol).
//
//     packet, 16 bytes:   | data 32 | flag 32 |   | data 32 | flag 32 |        8 bytes of payload
//                         '----- one u64 -----'   '----- one u64 -----'
//
// A u64 is stored and loaded atomically, so data with the flag of this call is data of this call. No order among words is
// needed, and all accesses are relaxed. Packets take twice the bytes of their payload, and save a release store and a barrier with
// its round trip.
//
// The flag of the first word is the low 32 bits of the call number. That of the second word is the low 16 bits of the call number,
// and below them the digest of the call's terms, so packets of a rank with other terms are not accepted. The slots in memory for
// packets alternate with the parity of the call and are not cleared: a slot holds a packet of an earlier call. When 16 bits of the
// call number wrap, an old flag could match; the call with number 0 in these bits uses a barrier, and clears the slots first
// (`Call::wraps`).
//
// A sender stores packets into the receiver's memory, so a waiting rank polls its own memory only.
//
// A host compiler compiles the layout of packets as C++11; nvcc and NVRTC compile the whole header.
#pragma once

#include "wholemem/barrier.cuh"

namespace wholemem {

WHOLEMEM_HOST_DEVICE u64 packet_word(u32 data, u32 flag) { return (u64)flag << 32 | data; }

WHOLEMEM_HOST_DEVICE u32 packet_data(u64 word) { return (u32)word; }

WHOLEMEM_HOST_DEVICE u32 packet_flag(u64 word) { return (u32)(word >> 32); }

#if defined(__CUDACC__)

// Sends and receives the packets of one thread in one collective call. Each packet has 8 bytes of payload.
class Packets {
public:
    __device__ __forceinline__ explicit Packets(Call &call)
        : call(call), first_flag((u32)call.number()), second_flag((u32)call.mark()), parity(call.parity())
    {
    }

    // Sends 8 bytes of payload, which are at offset `at` of the data, to every peer. Each rank starts with another peer, to
    // spread the traffic.
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
                               {packet_word((u32)data, first_flag), packet_word((u32)(data >> 32), second_flag)});
    }

    // Polls for the packets with the 8 bytes at offset `at` of the data of COUNT ranks, from rank `first` on. Entries of this
    // rank and of ranks that do not exist stay zero. Returns false if some packets have not arrived after many polls: the block
    // then calls `Call::keep_waiting`. The loads of one poll are in flight together, and only missing packets are loaded again.
    template <u32 COUNT> __device__ __forceinline__ bool receive(u64 at, u32 first, u64 (&data)[COUNT]) const
    {
        const LaneRef &lane = call.lane;
        const u64 slots = lane.packets(lane.rank, parity, first) + 2 * at;
        WordPair pairs[COUNT];
        // Entries for which no packet is expected get this call's flags at once. Missing packets start with flag 0, which no
        // call that sends packets has in a first word.
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            const bool is_peer = first + i < lane.ranks && first + i != lane.rank;
            pairs[i].low = is_peer ? 0 : packet_word(0, first_flag);
            pairs[i].high = is_peer ? 0 : packet_word(0, second_flag);
        }
        bool all = false;
#pragma unroll 1
        for (u32 poll = 0; poll < Call::POLLS && !all; ++poll) {
            const u64 base = opaque(slots);
#pragma unroll
            for (u32 i = 0; i < COUNT; ++i)
                load_pair_relaxed(has_flags(pairs[i]) ? 0 : base + i * (2 * lane.ll_len), pairs[i]);
            all = true;
#pragma unroll
            for (u32 i = 0; i < COUNT; ++i)
                all &= has_flags(pairs[i]);
        }
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i)
            data[i] = (u64)packet_data(pairs[i].high) << 32 | packet_data(pairs[i].low);
        return all;
    }

    // Describes the packets at offset `at` of the data of `count` ranks, for the report if the wait for them is aborted.
    __device__ __forceinline__ Awaited awaited(u64 at, u32 first, u32 count) const
    {
        return {call.lane.packets(call.lane.rank, parity, 0) + 2 * at, 2 * call.lane.ll_len, (u64)second_flag << 32 | first_flag, true,
                first, count};
    }

private:
    Call &call;
    const u32 first_flag;
    const u32 second_flag;
    const u32 parity;

    // Returns true if both words have the flags of this call.
    __device__ __forceinline__ bool has_flags(const WordPair &pair) const
    {
        const u32 low = packet_flag(pair.low), high = packet_flag(pair.high);
        if (call.has(MUTANT_ANY_FLAG))
            return low != 0 && high != 0;
        if (call.has(MUTANT_ANY_DIGEST))
            return low == first_flag && high >> DIGEST_BITS == second_flag >> DIGEST_BITS;
        return low == first_flag & high == second_flag;
    }
};

#endif

} // namespace wholemem
