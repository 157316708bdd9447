// A kernel that several ranks run together: how their blocks meet, and how they leave when somebody does not come.
//
//     Call call(lane);                      // every block of every rank, with equal grids
//     ... write what others will read ...
//     if (!call.sync()) return;             // block b of this rank has met block b of every rank
//     ... read what others wrote ...
//     call.finish();                        // the lane is ready for the next call
//
// A lane is a sequence of calls, one kernel of each rank after another; streams that share one are ordered by events. Every
// call has at least one meeting. So whoever hears from a rank in call k + 1 knows that it has finished call k: buffers that
// alternate with the parity of the call need no other acknowledgement. Memory that peers read directly is another matter:
// the kernel must not end, and let what follows on its stream overwrite it, before they have read it. A second sync says so.
//
// All blocks of all ranks that share a device have to be resident. Peers that never come end a wait: after the deadline, when
// the host stores into the abort word, or when another rank tells that it has given up. The kernel then notes who is missing
// for the host and ends normally, so that the context lives on, and later calls on the lane end at once.
//
// Signals are words that only grow: seq << PHASE_BITS | phase. Nothing is ever reset, so nothing races with a reset, and a peer that
// is already one phase ahead is no harm. Each (block, peer) has a line of its own:
//
//     rank 0's memory                      rank 1's memory
//     line(b, 0)                           line(b, 0)  <---- stored by block b of rank 0, polled by block b of rank 1
//     line(b, 1)  <---- and the other way  line(b, 1)
//
// Compiles as C++11 under a host compiler (the layout), nvcc and NVRTC (all of it).
#pragma once

#include "wholemem/ordered.cuh"

namespace wholemem {

WHOLEMEM_HOST_DEVICE u64 LaneRef::memory(u32 of) const { return base + of * stride; }

WHOLEMEM_HOST_DEVICE u64 LaneRef::signal(u32 of, u32 block, u32 peer) const
{
    return memory(of) + ((u64)block * ranks + peer) * SIGNAL_STRIDE;
}

WHOLEMEM_HOST_DEVICE u64 LaneRef::notice(u32 of, u32 peer) const { return memory(of) + notices_at + peer * sizeof(u64); }

WHOLEMEM_HOST_DEVICE u64 LaneRef::packets(u32 of, u32 parity, u32 source) const
{
    return memory(of) + ll_at + ((u64)parity * ranks + source) * (2 * ll_len);
}

WHOLEMEM_HOST_DEVICE u64 LaneRef::staging(u32 of, u32 parity) const
{
    return memory(of) + staging_at + parity * staging_len;
}

WHOLEMEM_HOST_DEVICE u64 LaneRef::result(u32 of) const { return memory(of) + result_at; }

#if defined(__CUDACC__)

// The cause of a call for which a rank did not arrive in time, without that rank.
constexpr u64 TIMED_OUT = (u64)CAUSE_TIMED_OUT << CAUSE_SHIFT;

// Words that a thread waits for, of some ranks: those of rank r are at address + r * stride. Signals grow to a flag; packets,
// of which there are some words, have it in their upper halves.
struct Awaited {
    u64 address;
    u64 stride;
    u64 flag;
    u32 packets; // words; 0: it is a signal
    u32 first;   // of the ranks
    u32 count;   // of them

    __device__ __forceinline__ bool misses(u32 rank) const
    {
        if (rank - first >= count)
            return false;
        const u64 place = address + rank * stride;
        if (packets == 0)
            return (i64)(load_relaxed(place) - flag) < 0;
        for (u32 word = 0; word < packets; ++word)
            if (load_relaxed(place + word * sizeof(u64)) >> 32 != flag)
                return true;
        return false;
    }
};

// Why to leave: a cause, without the rank to blame where the time is over; 0, for no reason. That the lane has ended is not
// asked here.
__device__ __forceinline__ u64 cause_to_leave(const LaneRef &lane, u64 since, u64 now)
{
    const u64 abort = load_relaxed(lane.report + REPORT_WORD_ABORT * sizeof(u64));
    if (abort != 0)
        return abort;
#pragma unroll 1
    for (u32 peer = 0; peer < lane.ranks; ++peer) {
        const u64 notice = load_relaxed(lane.notice(lane.rank, peer));
        if (notice != 0)
            return notice;
    }
    const u64 deadline = load_relaxed(lane.control + CONTROL_WORD_TIMEOUT * sizeof(u64));
    return deadline != 0 && now - since >= deadline ? TIMED_OUT : 0;
}

// What a thread does that has waited for long: it looks whether it is to leave. If so the lane ends, the first to end it
// reports, and the answer is 0. If not, the answer is when the wait began, which is at the first look.
__device__ __forceinline__ u64 weigh(const LaneRef &lane, u64 seq, u32 phase, Awaited awaited, u64 since)
{
    const u64 now = nanoseconds();
    since = since == 0 ? now : since;
    // Who found the lane ended has nothing to say.
    if (load_relaxed(lane.control + CONTROL_WORD_POISON * sizeof(u64)) != 0)
        return 0;
    u64 cause = cause_to_leave(lane, since, now);
    if (cause == 0)
        return since;
    store_relaxed(lane.control + CONTROL_WORD_POISON * sizeof(u64), 1);
    if (!claim(lane.control + CONTROL_WORD_CLAIM * sizeof(u64)))
        return 0;
    u32 lowest = lane.ranks;
    u64 missing = 0;
#pragma unroll 1
    for (u32 rank = 0; rank < lane.ranks; ++rank) {
        if (rank != lane.rank && awaited.misses(rank)) {
            missing |= 1ull << rank % 64;
            lowest = rank < lowest ? rank : lowest;
        }
        if (rank % 64 == 63 || rank + 1 == lane.ranks) {
            store_relaxed(lane.report + (REPORT_WORD_MISSING + rank / 64) * sizeof(u64), missing);
            missing = 0;
        }
    }
    if (cause == TIMED_OUT)
        cause |= lowest + 1;
    store_relaxed(lane.report + REPORT_WORD_CALL * sizeof(u64), seq);
    store_relaxed(lane.report + REPORT_WORD_PHASE * sizeof(u64), phase);
    store_relaxed(lane.report + REPORT_WORD_CAUSE * sizeof(u64), cause);
    store_release(lane.report + REPORT_WORD_ABORTED * sizeof(u64), 1);
#pragma unroll 1
    for (u32 peer = 0; peer < lane.ranks; ++peer)
        store_relaxed(lane.notice(peer, lane.rank), cause);
    return 0;
}

#if defined(WHOLEMEM_TESTING)

// Stands still where a test asks for it, a second at most.
__device__ __forceinline__ void stand_still(const LaneRef &lane, u64 seq, u32 block, u32 point)
{
    const u32 place = point < DEBUG_POINTS ? point : DEBUG_POINTS - 1;
    u64 wanted = load_relaxed(lane.debug + (DEBUG_WORD_DELAYS + place * MAX_BLOCKS + block) * sizeof(u64));
    const u64 most = load_relaxed(lane.debug + DEBUG_WORD_MAX_DELAY * sizeof(u64));
    if (most != 0) {
        u64 dice = load_relaxed(lane.debug + DEBUG_WORD_SEED * sizeof(u64)) + seq * 0x9e3779b97f4a7c15ull;
        dice = (dice ^ (u64)lane.rank << 32 ^ block << 8 ^ point) * 0xbf58476d1ce4e5b9ull;
        dice = (dice ^ dice >> 31) * 0x94d049bb133111ebull;
        wanted += multiply_high(dice, most + 1);
    }
    const u64 second = 1000000000, start = nanoseconds();
    while (nanoseconds() - start < (wanted < second ? wanted : second)) {
    }
}

#endif

// One call of this rank, as one thread of it sees it. All threads of a block make the same steps.
class Call {
public:
    // A grid of its own.
    __device__ __forceinline__ explicit Call(const LaneRef &lane) : Call(lane, blockIdx.x, gridDim.x) {}

    // Block `block` of `blocks`. Both words are asked for here, and waited for where they are used.
    __device__ __forceinline__ Call(const LaneRef &lane, u32 block, u32 blocks)
        : lane(lane), block(block), blocks(blocks), phase(0), failed(false)
    {
        seq = load_relaxed(control_word(CONTROL_WORD_SEQUENCE + block));
        poison = load_relaxed(control_word(CONTROL_WORD_POISON));
        pause(0);
    }

    // The number of the call.
    __device__ __forceinline__ u64 number() const { return seq; }

    // Which of two buffers is this call's.
    __device__ __forceinline__ u32 parity() const { return has(MUTANT_ONE_BUFFER) ? 0 : (u32)seq & 1; }

    // Whether this thread knows of nothing that ends the call. Threads of a block may differ until they sync: who may not go
    // on writes nothing, and comes to the sync.
    __device__ __forceinline__ bool alive() const { return poison == 0 && !failed; }

    // Whether this is the call at which 32 bits of the number begin anew, and packets cannot tell it from an older one.
    __device__ __forceinline__ bool wraps() const { return __builtin_expect((u32)seq == 0, 0) != 0; }

    // Tells every rank that this block is here, and has written and read all that it did before.
    //
    // The sync before makes one thread's release speak for the whole block; that it also takes the vote whether all are alive
    // keeps a block whose threads disagree from telling a lie.
    __device__ __forceinline__ void arrive()
    {
        ++phase;
        if (wraps() && phase == 1)
            clear_packets();
        pause(2 * phase);
        vote();
        if (failed)
            return;
#pragma unroll 1
        for (u32 peer = threadIdx.x; peer < lane.ranks; peer += blockDim.x)
            if (peer != lane.rank)
                store_release(lane.signal(peer, block, lane.rank), flag(), lane.near != 0);
    }

    // Waits until this block of every rank has arrived. False: somebody will not, and the kernel is to return.
    //
    // The sync after makes what one thread acquired the whole block's, and its answer is the same for all threads.
    __device__ __forceinline__ bool wait()
    {
        if (failed)
            return false;
        bool waits;
        u64 since = 0;
        do {
            waits = false;
#pragma unroll 1
            for (u32 peer = threadIdx.x; peer < lane.ranks && !waits; peer += blockDim.x)
                waits = peer != lane.rank && !has_come(peer);
        } while (again(waits, {lane.signal(lane.rank, block, 0), SIGNAL_STRIDE, flag(), 0, 0, lane.ranks}, since));
        if (!failed)
            pause(2 * phase + 1);
        return !failed;
    }

    __device__ __forceinline__ bool sync()
    {
        arrive();
        return wait();
    }

    // The same, but for a test that leaves it out.
    __device__ __forceinline__ bool sync(Mutant without)
    {
        if (!has(without))
            return sync();
        ++phase;
        return settle();
    }

    // Ends a call in which all has gone well. All threads have synced since they made it, or do so now by `settle`.
    //
    // A block looks after the counters of the blocks that this call did not have, so that the next may have more.
    __device__ __forceinline__ void finish()
    {
        const u32 other = block + threadIdx.x * blocks;
        if (other < MAX_BLOCKS)
            store_relaxed(control_word(CONTROL_WORD_SEQUENCE + other), seq + 1);
    }

    // Agrees within the block, without a meeting of ranks, whether all has gone well.
    __device__ __forceinline__ bool settle()
    {
        vote();
        return !failed;
    }

    // How often a thread looks for what it waits for, before its block asks whether to go on.
    static constexpr u32 LOOKS = 1024;

    // Agrees within the block whether to look again, because some of its threads have looked in vain. If not, all threads are
    // alive and have what they waited for, or none is alive. `since` is 0 when a thread begins to wait for something.
    //
    // All that is needed by those who wait for long is behind the one branch that a block takes together: it is kept out of
    // the way of the others, for whom each jump over it would be a wait for instructions.
    __device__ __forceinline__ bool again(bool waits, const Awaited &awaited, u64 &since)
    {
        if (__builtin_expect(__syncthreads_or(waits || !alive()) == 0, 1))
            return false;
#if !defined(WHOLEMEM_ENDLESS)
        // The abort word is in the host's memory, and far.
        if (waits && alive()) {
            since = weigh(lane, seq, phase, awaited, since);
            failed = since == 0;
        }
#else
        (void)awaited, (void)since;
#endif
        vote();
        return !failed;
    }

    // Stands still at a point where a test asks for it: 0 at the start, 1 when packets are sent, 2p before the arrival at phase
    // p, 2p + 1 after the wait.
    __device__ __forceinline__ void pause(u32 point) const
    {
#if defined(WHOLEMEM_TESTING)
        if (lane.debug != 0)
            stand_still(lane, seq, block, point);
#else
        (void)point;
#endif
    }

    // Whether a test wants a mistake to be made. Kernels that are not for tests do not ask.
    __device__ __forceinline__ bool has(Mutant mutant) const
    {
#if defined(WHOLEMEM_TESTING)
        return lane.debug != 0 && (load_relaxed(debug_word(DEBUG_WORD_MUTANT)) & mutant) != 0;
#else
        (void)mutant;
        return false;
#endif
    }

    const LaneRef &lane;
    const u32 block;
    const u32 blocks;

private:
    u64 seq;
    u64 poison;
    u32 phase;
    bool failed;

    // All threads know then what one knew.
    __device__ __forceinline__ void vote()
    {
        failed = __syncthreads_or(!alive()) != 0;
        poison = 0;
    }

    __device__ __forceinline__ u64 control_word(u32 word) const { return lane.control + word * sizeof(u64); }

#if defined(WHOLEMEM_TESTING)
    __device__ __forceinline__ u64 debug_word(u32 word) const { return lane.debug + word * sizeof(u64); }
#endif

    __device__ __forceinline__ u64 flag() const { return seq << PHASE_BITS | phase; }

    // Looks for a peer's signal.
    __device__ __forceinline__ bool has_come(u32 peer) const
    {
        const u64 signal = lane.signal(lane.rank, block, peer);
        bool come = false;
#pragma unroll 1
        for (u32 look = 0; look < LOOKS && !come; ++look)
            come = (i64)(load_acquire(signal, lane.near != 0) - flag()) >= 0;
        return come;
    }

    // Makes this rank's packets none, each block a part. Peers send the next ones when this call is over for them, and it is
    // not before every block has arrived.
    __device__ __forceinline__ void clear_packets()
    {
        if (has(MUTANT_NO_CLEARING) || !alive())
            return;
        const u64 first = lane.packets(lane.rank, 0, 0), end = first + 4 * lane.ranks * lane.ll_len;
#pragma unroll 1
        for (u64 at = first + ((u64)block * blockDim.x + threadIdx.x) * sizeof(WordPair); at < end;
             at += (u64)blocks * blockDim.x * sizeof(WordPair))
            store_pair_relaxed(at, {0, 0});
    }
};

#endif

} // namespace wholemem
