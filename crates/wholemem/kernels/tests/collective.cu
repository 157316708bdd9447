// Tests the collective kernels on a GPU without the library: ranks are streams of this process.
//
//     nvcc -O3 -std=c++17 -arch=sm_90 -DWHOLEMEM_TESTING -I include tests/collective.cu -o collective
//     ./collective correct mutants deadline together
//
// Every result is compared bit for bit with a plain loop on the host. Without -DWHOLEMEM_TESTING, the kernels are those that ship;
// then only `correct`, `deadline` and `time` are meaningful. With -DWHOLEMEM_ENDLESS, waits do not check for a timeout or an abort,
// to measure the cost of these checks; then only `time` is meaningful.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "../collective.cu"
#include "../sample_allreduce.cu"
#include "together.cu"

#include "collective_oracle.h"

using namespace wholemem;

#define CHECK(CALL)                                                                                                    \
    do {                                                                                                               \
        const cudaError_t error = (CALL);                                                                              \
        if (error != cudaSuccess) {                                                                                    \
            std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #CALL, cudaGetErrorString(error));                      \
            std::exit(2);                                                                                              \
        }                                                                                                              \
    } while (0)

namespace {

typedef void (*Kernel)(const CollectiveRequest);
typedef void (*Together)(const CollectiveRequest *, unsigned);

enum Algorithm { LL, ONE_SHOT, TWO_SHOT, GATHER_LL, GATHER, BROADCAST_LL, BROADCAST, BARRIER, ALGORITHMS };
const char *const NAMES[ALGORITHMS] = {"all_reduce_ll", "all_reduce_one_shot", "all_reduce_two_shot", "all_gather_ll",
                                       "all_gather",    "broadcast_ll",        "broadcast",           "barrier"};
const Kernel KERNELS[ALGORITHMS] = {all_reduce_ll, all_reduce_one_shot, all_reduce_two_shot, all_gather_ll,
                                    all_gather,    broadcast_ll,        broadcast,           barrier};
const Together TOGETHER[ALGORITHMS] = {all_reduce_ll_together,       all_reduce_one_shot_together,
                                       all_reduce_two_shot_together, all_gather_ll_together,
                                       all_gather_together,          broadcast_ll_together,
                                       broadcast_together,           barrier_together};

int failures = 0;

// The abort cause that the host stores if rank 2 was lost.
constexpr u64 LOST = (u64)CAUSE_LOST << CAUSE_SHIFT | 3;

u64 round_up(u64 value, u64 to) { return (value + to - 1) / to * to; }

// The ranks of this test, which are streams of this process, with their lanes and with memory of each rank for inputs and
// outputs.
struct World {
    u32 ranks;
    u64 arena_len;
    LaneRef lane;
    char *memory, *arena, *control, *debug;
    u64 *reports;
    u64 *table; // device memory: [2][ranks]
    std::vector<cudaStream_t> streams;

    World(u32 ranks, u64 ll_len, u64 staging_len, u64 arena_len, u64 deadline, bool with_debug)
        : ranks(ranks), arena_len(arena_len), debug(nullptr)
    {
        lane = LaneRef();
        lane.ranks = ranks;
        lane.near = ranks % 2 == 0; // either scope
        lane.notices_at = (u64)MAX_BLOCKS * ranks * SIGNAL_STRIDE;
        lane.terms_at = round_up(lane.notices_at + ranks * 8, 128);
        lane.ll_at = round_up(lane.terms_at + TERMS_WORDS * 8, 128);
        lane.ll_len = ll_len;
        lane.staging_at = round_up(lane.ll_at + 4 * ranks * ll_len, 4096);
        lane.staging_len = staging_len;
        lane.result_at = lane.staging_at + 2 * staging_len;
        lane.stride = lane.result_at + staging_len;
        CHECK(cudaMalloc(&memory, lane.stride * ranks));
        CHECK(cudaMemset(memory, 0, lane.stride * ranks));
        CHECK(cudaMalloc(&arena, arena_len * ranks));
        CHECK(cudaMalloc(&control, 4096 * ranks));
        CHECK(cudaMalloc(&table, 16 * ranks));
        CHECK(cudaHostAlloc(&reports, 4096 * ranks, cudaHostAllocMapped));
        std::memset(reports, 0, 4096 * ranks);
        if (with_debug) {
            CHECK(cudaMalloc(&debug, DEBUG_LEN * ranks));
            CHECK(cudaMemset(debug, 0, DEBUG_LEN * ranks));
        }
        lane.base = (u64)memory;
        preset(1, deadline);
        streams.resize(ranks);
        for (u32 rank = 0; rank < ranks; ++rank)
            CHECK(cudaStreamCreateWithFlags(&streams[rank], cudaStreamNonBlocking));
    }

    ~World()
    {
        for (cudaStream_t stream : streams)
            cudaStreamDestroy(stream);
        cudaFree(memory), cudaFree(arena), cudaFree(control), cudaFree(table), cudaFree(debug), cudaFreeHost(reports);
    }

    static constexpr u64 DEBUG_LEN = (DEBUG_WORD_DELAYS + DEBUG_POINTS * MAX_BLOCKS) * 8;

    void preset(u64 seq, u64 deadline)
    {
        std::vector<u64> words(512 * ranks, 0);
        for (u32 rank = 0; rank < ranks; ++rank) {
            words[512 * rank + CONTROL_WORD_TIMEOUT] = deadline;
            for (u32 block = 0; block < MAX_BLOCKS; ++block)
                words[512 * rank + CONTROL_WORD_SEQUENCE + block] = seq;
        }
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaMemcpy(control, words.data(), words.size() * 8, cudaMemcpyHostToDevice));
    }

    void set_debug(u32 rank, u32 word, u64 value)
    {
        CHECK(cudaMemcpy(debug + rank * DEBUG_LEN + word * 8, &value, 8, cudaMemcpyHostToDevice));
    }

    // Makes kernels delay all blocks of a rank at a point of each call.
    void set_delay(u32 rank, u32 point, u64 nanoseconds)
    {
        for (u32 block = 0; block < MAX_BLOCKS; ++block)
            set_debug(rank, DEBUG_WORD_DELAYS + point * MAX_BLOCKS + block, nanoseconds);
    }

    LaneRef lane_of(u32 rank) const
    {
        LaneRef own = lane;
        own.rank = rank;
        own.control = (u64)control + 4096 * rank;
        u64 *report;
        CHECK(cudaHostGetDevicePointer(&report, reports + 512 * rank, 0));
        own.report = (u64)report;
        own.debug = debug == nullptr ? 0 : (u64)debug + rank * DEBUG_LEN;
        return own;
    }

    u64 *report(u32 rank) { return reports + 512 * rank; }

    // Waits until the kernels of all ranks have finished. Returns true if no call was aborted.
    bool wait()
    {
        CHECK(cudaDeviceSynchronize());
        for (u32 rank = 0; rank < ranks; ++rank)
            if (report(rank)[REPORT_WORD_ABORTED] != 0)
                return false;
        return true;
    }
};

// Determines which of the inputs and outputs of a collective call are windows.
enum Mode { STAGED, INPUTS, OUTPUTS, BOTH };
const char *const MODES[] = {"staged", "inputs", "outputs", "both"};

struct Case {
    Algorithm algorithm;
    u32 dtype, op;
    u64 count;
    Mode mode;
    bool in_place, misaligned, tabled;
    u32 root, blocks;
};

void print(const char *what, const World &world, const Case &c)
{
    std::printf("FAIL %s: %s ranks=%u dtype=%u op=%u count=%llu %s%s%s%s root=%u blocks=%u\n", what, NAMES[c.algorithm],
                world.ranks, c.dtype, c.op, c.count, MODES[c.mode], c.in_place ? " in place" : "",
                c.misaligned ? " misaligned" : "", c.tabled ? " table" : "", c.root, c.blocks);
    std::fflush(stdout);
    if (++failures > 20)
        std::exit(1);
}

// Runs one collective call on all ranks, and checks the output of every rank.
void run(World &world, const Case &c, bool together)
{
    static u64 dice = 1;
    const u64 chance = ++dice; // one for all ranks
    const u32 ranks = world.ranks;
    const bool reduces = c.algorithm <= TWO_SHOT, gathers = c.algorithm == GATHER_LL || c.algorithm == GATHER;
    const u64 size = host_len(c.dtype), bytes = c.count * size, out = gathers ? bytes * ranks : bytes;
    const u64 guard = 64, half = world.arena_len / 2;
    if (out + 2 * guard + 32 > half)
        return;
    std::vector<std::vector<unsigned char>> inputs(ranks), filled(ranks);
    std::vector<CollectiveRequest> requests(ranks);
    std::vector<u64> parts(2 * ranks);
    for (u32 rank = 0; rank < ranks; ++rank) {
        inputs[rank].resize(bytes);
        fill(inputs[rank].data(), c.dtype, c.count, dice);
        // A window that is described without a table of addresses has the same offset on every rank.
        const u64 apart = c.tabled || c.mode == STAGED ? rank : 0;
        const u64 shift = c.misaligned ? mix(chance * 7 + apart) % 16 / size * size : 0;
        const u64 other = c.misaligned ? mix(chance * 5 + apart + 99) % 16 / size * size : 0;
        CollectiveRequest &request = requests[rank];
        request = CollectiveRequest();
        request.lane = world.lane_of(rank);
        request.output = (u64)world.arena + rank * world.arena_len + half + guard + other;
        request.input = (u64)world.arena + rank * world.arena_len + guard + shift;
        if (c.in_place)
            request.input = request.output + (gathers ? rank * bytes : 0);
        request.count = c.count, request.dtype = (Dtype)c.dtype, request.op = (ReduceOp)c.op, request.root = c.root;
        parts[rank] = request.input, parts[ranks + rank] = request.output;
    }
    for (u32 rank = 0; rank < ranks; ++rank) {
        CollectiveRequest &request = requests[rank];
        const bool flat = !c.tabled && !(c.in_place && gathers);
        const WindowRef in = flat ? WindowRef{parts[0], world.arena_len, 0} : WindowRef{0, 0, (u64)world.table};
        const WindowRef outs = flat ? WindowRef{parts[ranks], world.arena_len, 0}
                                 : WindowRef{0, 0, (u64)(world.table + ranks)};
        if (c.mode == INPUTS || c.mode == BOTH)
            request.inputs = in;
        if (c.mode == OUTPUTS || c.mode == BOTH)
            request.outputs = outs;
        filled[rank].assign(out + 2 * guard, (unsigned char)0xa5);
        if (c.in_place)
            std::memcpy(filled[rank].data() + guard + (gathers ? rank * bytes : 0), inputs[rank].data(), bytes);
        CHECK(cudaMemcpyAsync((void *)(request.output - guard), filled[rank].data(), filled[rank].size(),
                              cudaMemcpyHostToDevice, world.streams[rank]));
        if (!c.in_place && bytes != 0)
            CHECK(cudaMemcpyAsync((void *)request.input, inputs[rank].data(), bytes, cudaMemcpyHostToDevice,
                                  world.streams[rank]));
    }
    CHECK(cudaMemcpyAsync(world.table, parts.data(), 16 * ranks, cudaMemcpyHostToDevice, world.streams[0]));
    CHECK(cudaDeviceSynchronize());
    if (together) {
        CollectiveRequest *device;
        CHECK(cudaMalloc(&device, sizeof(CollectiveRequest) * ranks));
        CHECK(cudaMemcpy(device, requests.data(), sizeof(CollectiveRequest) * ranks, cudaMemcpyHostToDevice));
        TOGETHER[c.algorithm]<<<c.blocks * ranks, COLLECTIVE_THREADS, 0, world.streams[0]>>>(device, ranks);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaFree(device));
    } else {
        for (u32 rank = 0; rank < ranks; ++rank)
            KERNELS[c.algorithm]<<<c.blocks, COLLECTIVE_THREADS, 0, world.streams[rank]>>>(requests[rank]);
        CHECK(cudaGetLastError());
    }
    if (!world.wait()) {
        print("aborted", world, c);
        std::exit(1);
    }
    if (c.algorithm == BARRIER)
        return;
    std::vector<unsigned char> expected(out), got;
    if (reduces)
        reduce_on_host(inputs, c.dtype, c.op, c.count, expected.data());
    else if (gathers)
        for (u32 rank = 0; rank < ranks; ++rank)
            std::memcpy(expected.data() + rank * bytes, inputs[rank].data(), bytes);
    else
        expected = inputs[c.root];
    for (u32 rank = 0; rank < ranks; ++rank) {
        got.resize(out + 2 * guard);
        CHECK(cudaMemcpy(got.data(), (void *)(requests[rank].output - guard), got.size(), cudaMemcpyDeviceToHost));
        for (u64 i = 0; i < guard; ++i)
            if (got[i] != 0xa5 || got[guard + out + i] != 0xa5)
                return print("wrote outside", world, c);
        for (u64 i = 0; i < out; ++i)
            if (got[guard + i] != expected[i]) {
                std::printf("rank %u byte %llu: %02x instead of %02x\n", rank, i, got[guard + i], expected[i]);
                return print("wrong", world, c);
            }
    }
}

// Returns true if a kernel supports a mode. If the output is in the place of the input, both or neither must be windows, except
// for two-shot.
bool allowed(Algorithm algorithm, Mode mode, bool in_place)
{
    switch (algorithm) {
    case ONE_SHOT: return mode == STAGED || (mode == INPUTS && !in_place);
    case TWO_SHOT: return mode == STAGED || mode == OUTPUTS || !in_place || mode == BOTH;
    case GATHER: return true;
    case BROADCAST: return mode != INPUTS || !in_place;
    default: return mode == STAGED;
    }
}

void sweep(World &world, bool together, u64 most_count)
{
    u64 dice = 12345;
    const u32 most_blocks = together ? 2 : 5;
    u64 cases = 0;
    for (int a = 0; a < BARRIER; ++a) {
        const Algorithm algorithm = (Algorithm)a;
        const bool reduces = algorithm <= TWO_SHOT;
        for (u32 dtype = U8; dtype <= F64; ++dtype)
            for (u32 op = SUM; op <= (reduces ? (dtype >= F16 ? (u32)PROD : (u32)XOR) : (u32)SUM); ++op) {
                if (!reduces && dtype != U8 && dtype != BF16 && dtype != F32 && dtype != F64)
                    continue;
                for (u64 count = 0; count <= most_count; ++count) {
                    const u64 roll = mix(++dice);
                    Case c = {algorithm, dtype, op, count, (Mode)(roll % 4), (roll >> 8) % 3 == 0, (roll >> 16) % 3 != 0,
                              (roll >> 24) % 2 == 0, (u32)(roll >> 32) % world.ranks, 1 + (u32)(roll >> 40) % most_blocks};
                    if (!allowed(algorithm, c.mode, c.in_place))
                        c.mode = STAGED;
                    run(world, c, together);
                    ++cases;
                }
                // Test lengths just below, at and above the limits of packets, tiles and pieces.
                const u64 size = host_len(dtype);
                const u64 lens[] = {world.lane.ll_len, TILE, 2 * TILE, world.lane.staging_len, 2 * world.lane.staging_len,
                                    3 * world.lane.staging_len};
                if (together || op > AVG)
                    continue;
                for (u64 len : lens)
                    for (int off = -1; off <= 1; ++off)
                        for (int mode = STAGED; mode <= BOTH; ++mode) {
                            const u64 roll = mix(++dice);
                            Case c = {algorithm, dtype, op, len / size + off, (Mode)mode, roll % 3 == 0, (roll >> 8 & 1) != 0,
                                      (roll >> 16 & 1) != 0, (u32)(roll >> 32) % world.ranks,
                                      1 + (u32)(roll >> 40) % 5};
                            const bool small = algorithm == LL || algorithm == GATHER_LL || algorithm == BROADCAST_LL;
                            if (!allowed(algorithm, c.mode, c.in_place) || (small && c.count * size > world.lane.ll_len))
                                continue;
                            run(world, c, together);
                            ++cases;
                        }
            }
        run(world, {BARRIER, U8, SUM, 0, STAGED, false, false, false, 0, 1}, together);
    }
    std::printf("%s: ranks=%u, %llu cases\n", together ? "together" : "correct", world.ranks, cases);
    std::fflush(stdout);
}

constexpr u64 SECOND = 1000000000ull;

void correct()
{
    for (u32 ranks : {2u, 1u, 3u, 4u, 8u}) {
        World world(ranks, 4096, 16384, 1 << 20, 5 * SECOND, false);
        sweep(world, false, 67);
        // Test calls during which the low 32 bits of the call number wrap to 0.
        world.preset((1ull << 32) - 20, 5 * SECOND);
        for (u32 k = 0; k < 40; ++k)
            for (Algorithm algorithm : {LL, GATHER_LL, BROADCAST_LL})
                run(world, {algorithm, F32, SUM, 1 + k * 20, STAGED, false, k % 2 == 0, false, k % ranks, 1 + k % 3}, false);
    }
}

void together()
{
    for (u32 ranks : {1u, 2u, 3u, 4u}) {
        World world(ranks, 1024, 16384, 1 << 18, 20 * SECOND, false);
        sweep(world, true, 5);
        for (Algorithm algorithm : {ONE_SHOT, TWO_SHOT, GATHER, BROADCAST})
            for (int mode = STAGED; mode <= BOTH; ++mode)
                if (allowed(algorithm, (Mode)mode, false))
                    run(world, {algorithm, BF16, SUM, 20003, (Mode)mode, false, mode % 2 == 0, false, 0, 3}, true);
    }
}

// Returns an input word that differs for each call, rank and position.
__device__ u32 word_of(u64 call, u32 rank, u64 i) { return (u32)((call * 64 + rank) * 2654435761u + i * 40503u + 17); }

__global__ void write_input(u32 *input, u64 count, const u64 *calls, u32 rank)
{
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x)
        input[i] = word_of(*calls, rank, i);
}

// Checks the sums of an all-reduce, and overwrites the input right after it.
__global__ void check_output(u32 *input, const u32 *output, u64 count, const u64 *calls, u32 ranks, u64 *errors)
{
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) {
        u32 sum = 0;
        for (u32 rank = 0; rank < ranks; ++rank)
            sum += word_of(*calls, rank, i);
        if (output[i] != sum)
            atomicAdd(errors, 1ull);
        input[i] = 0xdeadbeef;
    }
}

__global__ void next_call(u64 *calls) { ++*calls; }

// Replays a CUDA graph of collective calls whose inputs are overwritten right after each call. Returns the number of wrong
// words, or ~0 if a call was aborted.
u64 replay(World &world, Algorithm algorithm, Mode mode, u64 count, u32 blocks, u32 calls, u32 replays,
           u64 first_call = 0)
{
    const u32 ranks = world.ranks;
    u64 *state; // calls and errors of every rank
    CHECK(cudaMalloc(&state, 16 * ranks));
    std::vector<u64> words(2 * ranks, 0);
    for (u32 rank = 0; rank < ranks; ++rank)
        words[2 * rank] = first_call;
    CHECK(cudaMemcpy(state, words.data(), 16 * ranks, cudaMemcpyHostToDevice));
    std::vector<cudaGraphExec_t> graphs(ranks);
    for (u32 rank = 0; rank < ranks; ++rank) {
        CollectiveRequest request = CollectiveRequest();
        request.lane = world.lane_of(rank);
        request.input = (u64)world.arena + rank * world.arena_len;
        request.output = request.input + world.arena_len / 2;
        request.count = count, request.dtype = U32, request.op = SUM;
        if (mode == INPUTS || mode == BOTH)
            request.inputs = {(u64)world.arena, world.arena_len, 0};
        if (mode == OUTPUTS || mode == BOTH)
            request.outputs = {(u64)world.arena + world.arena_len / 2, world.arena_len, 0};
        cudaGraph_t graph;
        CHECK(cudaStreamBeginCapture(world.streams[rank], cudaStreamCaptureModeThreadLocal));
        for (u32 call = 0; call < calls; ++call) {
            write_input<<<4, 256, 0, world.streams[rank]>>>((u32 *)request.input, count, state + 2 * rank, rank);
            KERNELS[algorithm]<<<blocks, COLLECTIVE_THREADS, 0, world.streams[rank]>>>(request);
            check_output<<<4, 256, 0, world.streams[rank]>>>((u32 *)request.input, (u32 *)request.output, count,
                                                             state + 2 * rank, ranks, state + 2 * rank + 1);
            next_call<<<1, 1, 0, world.streams[rank]>>>(state + 2 * rank);
        }
        CHECK(cudaStreamEndCapture(world.streams[rank], &graph));
        CHECK(cudaGraphInstantiate(&graphs[rank], graph, 0));
        CHECK(cudaGraphDestroy(graph));
    }
    bool fine = true;
    for (u32 i = 0; i < replays && fine; ++i) {
        for (u32 rank = 0; rank < ranks; ++rank)
            CHECK(cudaGraphLaunch(graphs[rank], world.streams[rank]));
        fine = world.wait();
    }
    CHECK(cudaMemcpy(words.data(), state, 16 * ranks, cudaMemcpyDeviceToHost));
    u64 errors = 0;
    for (u32 rank = 0; rank < ranks; ++rank) {
        errors += words[2 * rank + 1];
        CHECK(cudaGraphExecDestroy(graphs[rank]));
    }
    CHECK(cudaFree(state));
    return fine ? errors : ~0ull;
}

void expect(bool held, const char *what, u64 value)
{
    std::printf("%s %s (%llu)\n", held ? "ok  " : "FAIL", what, value);
    std::fflush(stdout);
    failures += !held;
}

// Tests that many calls with random delays have correct results.
void stress()
{
    for (u32 ranks : {2u, 3u, 4u}) {
        const struct {
            Algorithm algorithm;
            Mode mode;
            u64 count;
        } ways[] = {{LL, STAGED, 1000},          {ONE_SHOT, STAGED, 4000},  {ONE_SHOT, STAGED, 9000},
                    {ONE_SHOT, INPUTS, 9000},    {TWO_SHOT, STAGED, 9000},  {TWO_SHOT, INPUTS, 9000},
                    {TWO_SHOT, OUTPUTS, 9000},   {TWO_SHOT, BOTH, 9000}};
        for (const auto &way : ways) {
            World world(ranks, 4096, 16384, 1 << 20, 5 * SECOND, true);
            for (u32 rank = 0; rank < ranks; ++rank) {
                world.set_debug(rank, DEBUG_WORD_SEED, 1000 + rank);
                world.set_debug(rank, DEBUG_WORD_MAX_DELAY, 8000);
            }
            const u64 errors = replay(world, way.algorithm, way.mode, way.count, 3, 50, 20);
            const std::string name = std::string(NAMES[way.algorithm]) + " " + MODES[way.mode] + ", delays, ranks " +
                                     std::to_string(ranks) + ", words " + std::to_string(way.count);
            expect(errors == 0, name.c_str(), errors);
        }
    }
}

// Tests calls that find stale packets with the flag that they expect: the call number has wrapped in its low 32 bits, and one
// rank sends late.
u64 wrap(u32 mutant)
{
    World world(2, 4096, 16384, 1 << 20, 2 * SECOND, true);
    u64 errors = replay(world, LL, STAGED, 1000, 1, 2, 1); // calls 1 and 2 leave their packets, one in each slot
    world.preset((1ull << 32) - 1, 2 * SECOND);
    world.set_debug(0, DEBUG_WORD_MUTANT, mutant);
    world.set_debug(1, DEBUG_WORD_MUTANT, mutant);
    world.set_delay(1, 0, 100000);
    errors |= replay(world, LL, STAGED, 2, 1, 2, 1, 20);    // 2^32 - 1, and the call that wraps
    errors |= replay(world, LL, STAGED, 1000, 1, 4, 1, 40); // 2^32 + 1 and 2^32 + 2 have the flags of 1 and 2
    return errors;
}

void mutants()
{
    stress();
    const struct {
        const char *name;
        u32 mutant;
        Algorithm algorithm;
        Mode mode;
        u64 count;
        u32 point;
    } tests[] = {
        {"one parity of staging memory", MUTANT_ONE_BUFFER, ONE_SHOT, STAGED, 2000, 3},
        {"one parity of packets", MUTANT_ONE_BUFFER, LL, STAGED, 1000, 1},
        {"one parity of pieces", MUTANT_ONE_BUFFER, ONE_SHOT, STAGED, 8000, 3},
        {"no first barrier, staged", MUTANT_NO_FIRST_BARRIER, ONE_SHOT, STAGED, 2000, 0},
        {"no first barrier, two shots", MUTANT_NO_FIRST_BARRIER, TWO_SHOT, STAGED, 2000, 0},
        {"no second barrier, zero copy", MUTANT_NO_SECOND_BARRIER, ONE_SHOT, INPUTS, 2000, 3},
        {"no second barrier, two shots", MUTANT_NO_SECOND_BARRIER, TWO_SHOT, STAGED, 8000, 3},
        {"no second barrier, two shots, outputs", MUTANT_NO_SECOND_BARRIER, TWO_SHOT, BOTH, 8000, 3},
        {"no final barrier", MUTANT_NO_LAST_BARRIER, ONE_SHOT, STAGED, 8000, 5},
        {"any flag", MUTANT_ANY_FLAG, LL, STAGED, 1000, 0},
    };
    for (const auto &test : tests)
        for (u32 mutant : {0u, test.mutant}) {
            World world(2, 4096, 16384, 1 << 20, SECOND / 5, true);
            for (u32 rank = 0; rank < 2; ++rank)
                world.set_debug(rank, DEBUG_WORD_MUTANT, mutant);
            world.set_delay(1, test.point, 60000);
            const u64 errors = replay(world, test.algorithm, test.mode, test.count, 1, 10, 3);
            const std::string name = std::string(test.name) + (mutant == 0 ? ", unchanged" : ", changed");
            expect(mutant == 0 ? errors == 0 : errors != 0, name.c_str(), errors);
        }
    expect(wrap(0) == 0, "packets over the end of 32 bits, unchanged", wrap(0));
    expect(wrap(MUTANT_NO_CLEARING) != 0, "packets over the end of 32 bits, not cleared", wrap(MUTANT_NO_CLEARING));
}

// Tests calls that rank 2 of 3 never makes: the other ranks time out or are aborted, and report that rank 2 is missing.
void deadline()
{
    for (Algorithm algorithm : {LL, ONE_SHOT, TWO_SHOT, GATHER_LL, BROADCAST_LL, BARRIER})
        for (bool abort : {false, true}) {
            World world(3, 4096, 16384, 1 << 20, abort ? 5 * SECOND : SECOND / 50, false);
            CHECK(cudaMemset(world.arena, 0xa5, world.arena_len * 3));
            std::vector<CollectiveRequest> requests(3);
            for (u32 rank = 0; rank < 3; ++rank) {
                CollectiveRequest request = CollectiveRequest();
                request.lane = world.lane_of(rank);
                request.input = (u64)world.arena + rank * world.arena_len;
                request.output = request.input + world.arena_len / 2;
                request.count = 100, request.dtype = F32;
                requests[rank] = request;
            }
            const u32 blocks = algorithm == BARRIER ? 1 : 2;
            for (u32 rank = 0; rank < 2; ++rank)
                KERNELS[algorithm]<<<blocks, COLLECTIVE_THREADS, 0, world.streams[rank]>>>(requests[rank]);
            CHECK(cudaGetLastError());
            if (abort)
                for (u32 rank = 0; rank < 2; ++rank)
                    *(volatile u64 *)(world.report(rank) + REPORT_WORD_ABORT) = LOST;
            CHECK(cudaDeviceSynchronize());
            for (u32 rank = 0; rank < 2; ++rank) {
                const u64 *report = world.report(rank);
                const std::string name = std::string(NAMES[algorithm]) + (abort ? ", aborted" : ", late") + ", rank " +
                                         std::to_string(rank);
                expect(report[REPORT_WORD_CAUSE] == (abort ? LOST : TIMED_OUT | 3), (name + ": cause").c_str(),
                       report[REPORT_WORD_CAUSE]);
                expect(report[REPORT_WORD_CALL] == 1 && report[REPORT_WORD_MISSING] == 4, (name + ": missing").c_str(),
                       report[REPORT_WORD_MISSING]);
            }
            // Later calls on the poisoned lane must return at once and write nothing, and the device must still work.
            CHECK(cudaMemset(world.arena, 0xa5, world.arena_len * 3));
            std::vector<unsigned char> before(world.lane.stride * 3), after(before.size());
            CHECK(cudaMemcpy(before.data(), world.memory, before.size(), cudaMemcpyDeviceToHost));
            for (u32 rank = 0; rank < 2; ++rank)
                KERNELS[algorithm]<<<blocks, COLLECTIVE_THREADS, 0, world.streams[rank]>>>(requests[rank]);
            CHECK(cudaDeviceSynchronize());
            CHECK(cudaMemcpy(after.data(), world.memory, after.size(), cudaMemcpyDeviceToHost));
            std::vector<unsigned char> arena(world.arena_len * 3);
            CHECK(cudaMemcpy(arena.data(), world.arena, arena.size(), cudaMemcpyDeviceToHost));
            const bool untouched = before == after && std::count(arena.begin(), arena.end(), 0xa5) == (long)arena.size();
            expect(untouched, (std::string(NAMES[algorithm]) + ": a poisoned lane is left alone").c_str(), untouched);
        }
    World fresh(3, 4096, 16384, 1 << 20, SECOND, false);
    run(fresh, {ONE_SHOT, F32, SUM, 1000, STAGED, false, false, false, 0, 2}, false);
}

#include "collective_time.h"

} // namespace

int main(int count, char **words)
{
    for (int i = 1; i < count; ++i) {
        const std::string word = words[i];
        std::printf("== %s\n", word.c_str());
        std::fflush(stdout);
        if (word == "correct")
            correct();
        else if (word == "mutants")
            mutants();
        else if (word == "deadline")
            deadline();
        else if (word == "together" || word == "--together")
            together();
        else if (word == "time")
            time_all();
        else
            return std::printf("there is no part `%s`\n", words[i]), 1;
    }
    std::printf(failures == 0 ? "all fine\n" : "%d failures\n", failures);
    return failures != 0;
}
