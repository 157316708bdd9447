// Barrier between the blocks of a kernel that all ranks run at the same time, with timeout and abort.
//
//     Call call(lane);                      // every block of every rank, with equal grids
//     ... write data for other ranks ...
//     if (!call.sync()) return;             // block b of every rank has arrived
//     ... read data of other ranks ...
//     call.finish();                        // the lane is ready for the next call
//
// A lane is a sequence of collective calls. Each rank runs one kernel per call, in the same order; streams that share a lane
// are ordered by events. Every call has at least one barrier. So a signal of call k + 1 from a rank proves that the rank has
// finished call k, and buffers that alternate with the parity of the call need no acknowledgement. If peers read this rank's
// memory directly, the kernel must not end before they have read it, because the next work on the stream may overwrite it: a
// second sync orders that.
//
// All blocks of all ranks that share a device must be resident. A wait for a missing peer ends at the timeout, when the host
// stores a cause into the abort word, or when another rank has aborted. The kernel then reports the missing ranks to the host and
// returns normally, so that the CUDA context stays usable. Later calls on the lane return at once.
//
// Signals are pairs of words that only grow:
//
//     low     seq << PHASE_BITS | phase       the call and the phase that the rank has reached
//     high    seq << DIGEST_BITS | digest     the mark: the call, and the digest of its terms
//
// They are never reset, so no store races with a reset, and a signal of a later phase is accepted for an earlier one. Each word is
// atomic, but the pair is not, so both have the number of the call. Each (block, peer) has a cache line of its own:
//
//     rank 0's memory                      rank 1's memory
//     line(b, 0)                           line(b, 0)  <---- stored by block b of rank 0, polled by block b of rank 1
//     line(b, 1)  <---- and the other way  line(b, 1)
//
// The terms of a call are its arguments that must be equal on all ranks. A signal has arrived only if its mark is that of the
// waiting rank's call, or of a later call. So if the digests of two ranks differ in a call, neither completes it: the rank that
// first sees all signals would have to accept the mark of a peer that is still in this call. A rank that waits long publishes
// its terms, and compares those that its peers have published. If they differ, it aborts the call. It repeats this with every
// check for an abort, so of two ranks, at least one sees the terms of the other.
//
// A host compiler compiles the layout of a lane as C++11; nvcc and NVRTC compile the whole header.
#pragma once

#include "wholemem/ordered.cuh"

namespace wholemem {

WHOLEMEM_HOST_DEVICE u64 LaneRef::memory(u32 of) const { return base + of * stride; }

WHOLEMEM_HOST_DEVICE u64 LaneRef::signal(u32 of, u32 block, u32 peer) const
{
    return memory(of) + ((u64)block * ranks + peer) * SIGNAL_STRIDE;
}

WHOLEMEM_HOST_DEVICE u64 LaneRef::notice(u32 of, u32 peer) const { return memory(of) + notices_at + peer * sizeof(u64); }

WHOLEMEM_HOST_DEVICE u64 LaneRef::term(u32 of, u32 word) const
{
    return memory(of) + terms_at + word * sizeof(u64);
}

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

// The abort cause of a call that timed out, without the number of the missing rank.
constexpr u64 TIMED_OUT = (u64)CAUSE_TIMED_OUT << CAUSE_SHIFT;

// The pairs of words from several ranks that a thread waits for. The pair of rank r is at address + r * stride. A signal has
// arrived if its low word is at least `flag`. A packet has arrived if the upper halves of its words are the halves of `flag`, the
// lower half first.
struct Awaited {
    u64 address;
    u64 stride;
    u64 flag;
    bool packets;
    u32 first; // first rank
    u32 count; // number of ranks

    __device__ __forceinline__ bool misses(u32 rank) const
    {
        if (rank - first >= count)
            return false;
        const u64 place = address + rank * stride, low = load_relaxed(place);
        if (!packets)
            return (i64)(low - flag) < 0;
        return low >> 32 != (u32)flag || load_relaxed(place + sizeof(u64)) >> 32 != flag >> 32;
    }
};

// Returns true if a test has enabled a mutant, which breaks one synchronization rule. The result is always false in kernels that
// are not built for tests.
__device__ __forceinline__ bool has_mutant(const LaneRef &lane, Mutant mutant)
{
#if defined(WHOLEMEM_TESTING)
    return lane.debug != 0 && (load_relaxed(lane.debug + DEBUG_WORD_MUTANT * sizeof(u64)) & mutant) != 0;
#else
    (void)lane, (void)mutant;
    return false;
#endif
}

// The terms of this rank's call. The terms of a user's kernel are zero.
struct OwnTerms {
    const CallTerms *terms; // null for a user's kernel

    __device__ __forceinline__ u32 word(u32 index) const { return terms == nullptr ? 0 : terms->words[index]; }

    // The form in which a word is published: below the tag of the call, so that no order among words is needed.
    __device__ __forceinline__ u64 published(u32 index, u64 seq) const { return (u64)(opaque((u32)seq) | TAG_BIT) << 32 | word(index); }

    // Publishes these terms in this rank's memory.
    __device__ __forceinline__ void publish(const LaneRef &lane, u64 seq) const
    {
#pragma unroll 1
        for (u32 index = 0; index < TERMS_WORDS; ++index)
            store_relaxed(lane.term(lane.rank, index), published(index, seq));
    }

    // Returns 1 plus the number of a rank that has published other terms for this call, or 0.
    __device__ __forceinline__ u32 find_other(const LaneRef &lane, u64 seq) const
    {
#pragma unroll 1
        for (u32 peer = 0; peer < lane.ranks && !has_mutant(lane, MUTANT_ANY_DIGEST); ++peer) {
            bool current = peer != lane.rank, differs = false;
#pragma unroll 1
            for (u32 index = 0; index < TERMS_WORDS && current; ++index) {
                const u64 other = load_relaxed(lane.term(peer, index)), own = published(index, seq);
                current = other >> 32 == own >> 32 || has_mutant(lane, MUTANT_OLD_TERMS);
                differs |= (u32)other != (u32)own;
            }
            if (current && differs)
                return peer + 1;
        }
        return 0;
    }

    // Writes these terms and those of a peer to the report.
    __device__ __forceinline__ void report(const LaneRef &lane, u64 seq, u32 peer) const
    {
#pragma unroll 1
        for (u32 index = 0; index < TERMS_WORDS; ++index) {
            store_relaxed(lane.report + (REPORT_WORD_OWN_TERMS + index) * sizeof(u64), published(index, seq));
            store_relaxed(lane.report + (REPORT_WORD_PEER_TERMS + index) * sizeof(u64), load_relaxed(lane.term(peer, index)));
        }
    }
};

// Returns the cause for which a call of the lane must be aborted, or 0. The cause of a timeout contains no rank. The poison
// word is not read.
__device__ __forceinline__ u64 abort_cause(const LaneRef &lane, u64 since, u64 now)
{
    const u64 abort = load_relaxed(lane.report + REPORT_WORD_ABORT * sizeof(u64));
    if (abort != 0)
        return abort;
#pragma unroll 1
    for (u32 peer = 0; peer < lane.ranks; ++peer) {
        const u64 notice = load_relaxed(lane.notice(lane.rank, peer));
        // The peer has reported a disagreement with this rank, so this rank reports a disagreement with the peer.
        if (notice == ((u64)CAUSE_DISAGREED << CAUSE_SHIFT | (lane.rank + 1)))
            return (u64)CAUSE_DISAGREED << CAUSE_SHIFT | (peer + 1);
        if (notice != 0)
            return notice;
    }
    const u64 deadline = load_relaxed(lane.control + CONTROL_WORD_TIMEOUT * sizeof(u64));
    return deadline != 0 && now - since >= deadline ? TIMED_OUT : 0;
}

// The slow path of a wait: checks for other terms, a timeout or an abort. Returns 0 if the call must end. In that case the lane is poisoned,
// and the first thread to poison it writes the report. Otherwise returns the start time of the wait, which is the time of the
// first check.
__device__ __forceinline__ u64 check_abort(const LaneRef &lane, u64 seq, u32 phase, const OwnTerms &terms, Awaited awaited,
                                           u64 since)
{
    const u64 now = nanoseconds();
    since = since == 0 ? now : since;
    // If the lane is poisoned already, another thread writes the report of the abort.
    if (load_relaxed(lane.control + CONTROL_WORD_POISON * sizeof(u64)) != 0)
        return 0;
    terms.publish(lane, seq);
    const u32 other = terms.find_other(lane, seq);
    u64 cause = other != 0 ? (u64)CAUSE_DISAGREED << CAUSE_SHIFT | other : abort_cause(lane, since, now);
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
    if (cause >> CAUSE_SHIFT == CAUSE_DISAGREED)
        terms.report(lane, seq, (u32)cause - 1);
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

// Delays a block at a point of a call for as long as a test requests, but at most one second.
__device__ __forceinline__ void delay(const LaneRef &lane, u64 seq, u32 block, u32 point)
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

// One thread's state of a collective call of this rank. All threads of a block call the same member functions in the same
// order.
class Call {
public:
    // Begins a call in a user's kernel, whose whole grid belongs to one rank.
    __device__ __forceinline__ explicit Call(const LaneRef &lane) : Call(lane, blockIdx.x, gridDim.x, nullptr, 0) {}

    // Begins a call in block `block` of the `blocks` blocks of this rank. `digest` is that of the terms, which stay valid during
    // the call. Both control words are loaded here, and the latency of the loads is hidden until their first use.
    __device__ __forceinline__ Call(const LaneRef &lane, u32 block, u32 blocks, const CallTerms *terms, u32 digest)
        : lane(lane), block(block), blocks(blocks), terms(terms), digest(digest), phase(0), failed(false)
    {
        seq = load_relaxed(control_word(CONTROL_WORD_SEQUENCE + block));
        poison = load_relaxed(control_word(CONTROL_WORD_POISON));
        pause(0);
    }

    // The sequence number of the call.
    __device__ __forceinline__ u64 number() const { return seq; }

    // The number, 0 or 1, of the alternating buffer that belongs to this call.
    __device__ __forceinline__ u32 parity() const { return has(MUTANT_ONE_BUFFER) ? 0 : (u32)seq & 1; }

    // Returns true if this thread has seen no reason to end the call. The threads of a block may differ until the next sync: a
    // thread that is not alive writes nothing and proceeds to the sync.
    __device__ __forceinline__ bool alive() const { return poison == 0 && !failed; }

    // Returns true if the low 16 bits of the call number wrap to 0 in this call, so that packets of older calls could be
    // mistaken for new ones.
    __device__ __forceinline__ bool wraps() const { return __builtin_expect((seq & 0xffff) == 0, 0) != 0; }

    // The mark of this rank in this call: the number of the call, and the digest of its terms. It is computed at each use, to save
    // registers.
    __device__ __forceinline__ u64 mark() const { return opaque(seq) << DIGEST_BITS | digest; }

    // Signals to every rank that this block has arrived at the barrier, and that its earlier loads and stores are done.
    //
    // The __syncthreads in `vote` orders the accesses of the whole block before the release stores of the signals. It also
    // combines the failures of the threads, so that a block with a failed thread does not signal arrival.
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
                store_pair_release(lane.signal(peer, block, lane.rank), {flag(), mark()}, lane.near != 0);
    }

    // Waits until the same block of every rank has arrived at the barrier. Returns false if the call was aborted: the kernel
    // must then return.
    //
    // The __syncthreads at the end extends the acquire of each polling thread to the whole block, and all threads get the same
    // result.
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
                waits = peer != lane.rank && !poll(peer);
        } while (keep_waiting(waits, {lane.signal(lane.rank, block, 0), SIGNAL_STRIDE, flag(), false, 0, lane.ranks}, since));
        if (!failed)
            pause(2 * phase + 1);
        return !failed;
    }

    __device__ __forceinline__ bool sync()
    {
        arrive();
        return wait();
    }

    // Runs the barrier, unless a test has enabled the mutant `without`: the ranks then do not wait for one another.
    __device__ __forceinline__ bool sync(Mutant without)
    {
        if (!has(without))
            return sync();
        ++phase;
        return settle();
    }

    // Ends a successful call. All threads must have passed a `sync` or `settle` in this call.
    //
    // Each block also advances the sequence numbers of blocks that this call did not have, so that the next call may have more
    // blocks.
    __device__ __forceinline__ void finish()
    {
        const u32 other = block + threadIdx.x * blocks;
        if (other < MAX_BLOCKS)
            store_relaxed(control_word(CONTROL_WORD_SEQUENCE + other), seq + 1);
    }

    // Combines the failures of the block's threads, without a barrier between ranks. Returns true if no thread has failed.
    __device__ __forceinline__ bool settle()
    {
        vote();
        return !failed;
    }

    // The number of times that a thread polls before its block checks for a timeout or an abort.
    static constexpr u32 POLLS = 1024;

    // Returns true if any thread of the block still waits, so that the block must poll again; all threads get the same result. If
    // the result is false, either the waits of all threads are over, or the call has failed for all of them. A thread that starts
    // to wait passes 0 in `since`.
    //
    // The slow path is behind one branch that the whole block takes. The branch is marked as unlikely, so that the compiler
    // places the slow path behind the fast path: a jump over it would stall the fast path on an instruction fetch.
    __device__ __forceinline__ bool keep_waiting(bool waits, const Awaited &awaited, u64 &since)
    {
        if (__builtin_expect(__syncthreads_or(waits || !alive()) == 0, 1))
            return false;
#if !defined(WHOLEMEM_ENDLESS)
        // Only threads that still wait check for an abort, because the abort word is in host memory and slow to read.
        if (waits && alive()) {
            since = check_abort(lane, seq, phase, {terms}, awaited, since);
            failed = since == 0;
        }
#else
        (void)awaited, (void)since;
#endif
        vote();
        return !failed;
    }

    // Delays this block at a point of the call, if a test requests it. The points are: 0 at the start, 1 after packets are
    // sent, 2p before the arrival at barrier p (from 1), and 2p + 1 after the wait at barrier p.
    __device__ __forceinline__ void pause(u32 point) const
    {
#if defined(WHOLEMEM_TESTING)
        if (lane.debug != 0)
            delay(lane, seq, block, point);
#else
        (void)point;
#endif
    }

    __device__ __forceinline__ bool has(Mutant mutant) const { return has_mutant(lane, mutant); }

    const LaneRef &lane;
    const u32 block;
    const u32 blocks;

private:
    const CallTerms *const terms;
    const u32 digest;
    u64 seq;
    u64 poison;
    u32 phase;
    bool failed;

    // Combines the failures of all threads of the block: if one thread has failed, all have.
    __device__ __forceinline__ void vote()
    {
        failed = __syncthreads_or(!alive()) != 0;
        poison = 0;
    }

    __device__ __forceinline__ u64 control_word(u32 word) const { return lane.control + word * sizeof(u64); }

    __device__ __forceinline__ u64 flag() const { return seq << PHASE_BITS | phase; }

    // Polls for the signal of a peer, a limited number of times. Returns true if the signal has arrived.
    __device__ __forceinline__ bool poll(u32 peer) const
    {
        const u64 signal = lane.signal(lane.rank, block, peer);
        bool arrived = false;
#pragma unroll 1
        for (u32 count = 0; count < POLLS && !arrived; ++count)
            arrived = accepts(load_pair_acquire(signal, lane.near != 0));
        return arrived;
    }

    // Returns true if a signal is at least of this phase, and its mark is that of this call or of a later one.
    __device__ __forceinline__ bool accepts(const WordPair &signal) const
    {
        const u64 any = (1ull << DIGEST_BITS) - 1, own = mark();
        const bool agrees = signal.high == own || (i64)((signal.high | any) - (own | any)) > 0 || has(MUTANT_ANY_DIGEST);
        return agrees && (i64)(signal.low - flag()) >= 0;
    }

    // Clears the packet slots of this rank. Each block clears a part of them. Peers send new packets only after this call,
    // which ends after every block has arrived.
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
