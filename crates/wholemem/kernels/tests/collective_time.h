// Measures collective calls in a CUDA graph, and two lower bounds: the round trip of a flag, and a plain one-shot kernel.

// Sends a word to another kernel and back, `rounds` times. The words are consecutive numbers from `first` on.
__global__ void ping_pong(u64 *mine, u64 *theirs, u64 first, u32 rounds, bool begins, bool near)
{
    for (u64 round = first; round < first + rounds; ++round) {
        if (begins)
            store_release((u64)theirs, round, near);
        for (u32 spin = 0; spin < 1u << 24 && load_acquire((u64)mine, near) < round; ++spin) {
        }
        if (!begins)
            store_release((u64)theirs, round, near);
    }
}

// A kernel that performs many barriers between the ranks.
__global__ void __launch_bounds__(COLLECTIVE_THREADS) repeat_barrier(const __grid_constant__ LaneRef lane, u32 rounds)
{
    Call call(lane);
    for (u32 round = 0; round < rounds; ++round)
        if (!call.sync())
            return;
    call.finish();
}

struct Plain8 {
    const uint4 *inputs[8];
    u64 *signals[8];
};

// The simplest one-shot all-reduce: no staging, no final barrier and no timeout. The caller must not overwrite its input.
__global__ void __launch_bounds__(512) plain_one_shot(Plain8 all, uint4 *output, u64 *epochs, u32 rank, u32 ranks, u32 packs)
{
    const u64 epoch = epochs[blockIdx.x] + 1;
    __syncthreads();
    if (threadIdx.x < ranks) {
        store_release((u64)(all.signals[threadIdx.x] + (blockIdx.x * 8 + rank) * 16), epoch);
        for (u32 spin = 0; spin < 1u << 24; ++spin)
            if (load_acquire((u64)(all.signals[rank] + (blockIdx.x * 8 + threadIdx.x) * 16)) >= epoch)
                break;
    }
    __syncthreads();
    const Sum<BF16> sum;
    for (u32 i = blockIdx.x * 512 + threadIdx.x; i < packs; i += gridDim.x * 512) {
        Sum<BF16>::Held held;
        sum.first(held, load<uint4>((u64)(all.inputs[0] + i)));
        for (u32 from = 1; from < ranks; ++from)
            sum.next(held, load<uint4>((u64)(all.inputs[from] + i)));
        store((u64)(output + i), sum.result(held));
    }
    if (threadIdx.x == 0)
        epochs[blockIdx.x] = epoch;
}

// Prints the best and the median time of a call in microseconds. For each rank, a CUDA graph has `calls` calls, which `enqueue`
// adds.
template <class Enqueue> void measure(World &world, const char *name, u64 bytes, u32 calls, u32 blocks, Enqueue enqueue)
{
    std::vector<cudaGraphExec_t> graphs(world.ranks);
    for (u32 rank = 0; rank < world.ranks; ++rank) {
        cudaGraph_t graph;
        CHECK(cudaStreamBeginCapture(world.streams[rank], cudaStreamCaptureModeThreadLocal));
        for (u32 call = 0; call < calls; ++call)
            enqueue(rank);
        CHECK(cudaStreamEndCapture(world.streams[rank], &graph));
        CHECK(cudaGraphInstantiate(&graphs[rank], graph, 0));
        CHECK(cudaGraphDestroy(graph));
        CHECK(cudaGraphUpload(graphs[rank], world.streams[rank]));
    }
    cudaEvent_t start, end;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&end));
    std::vector<float> times;
    for (u32 run = 0; run < 12; ++run) {
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaEventRecord(start, world.streams[0]));
        for (u32 rank = 0; rank < world.ranks; ++rank)
            CHECK(cudaGraphLaunch(graphs[rank], world.streams[rank]));
        CHECK(cudaEventRecord(end, world.streams[0]));
        if (!world.wait())
            return expect(false, name, bytes);
        float milliseconds;
        CHECK(cudaEventElapsedTime(&milliseconds, start, end));
        if (run >= 2)
            times.push_back(milliseconds * 1000 / (float)calls);
    }
    std::sort(times.begin(), times.end());
    std::printf("%-22s ranks %u  %9llu bytes  blocks %3u  best %8.2f us  median %8.2f us\n", name, world.ranks, bytes, blocks,
                times[0], times[times.size() / 2]);
    std::fflush(stdout);
    for (u32 rank = 0; rank < world.ranks; ++rank)
        CHECK(cudaGraphExecDestroy(graphs[rank]));
    CHECK(cudaEventDestroy(start));
    CHECK(cudaEventDestroy(end));
}

// Runs two kernels that exchange signals for a thousand rounds, and returns the best total time in milliseconds, which equals
// the time of one round in microseconds.
template <class Enqueue> float best_round(World &world, Enqueue enqueue)
{
    cudaEvent_t start, end;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&end));
    float best = 1e9f;
    for (u32 run = 0; run < 8; ++run) {
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaEventRecord(start, world.streams[0]));
        enqueue(0, run);
        enqueue(1, run);
        CHECK(cudaEventRecord(end, world.streams[0]));
        CHECK(cudaDeviceSynchronize());
        float milliseconds;
        CHECK(cudaEventElapsedTime(&milliseconds, start, end));
        best = std::min(best, milliseconds);
    }
    CHECK(cudaEventDestroy(start));
    CHECK(cudaEventDestroy(end));
    return best;
}

// Measures a barrier between ranks inside a kernel, and the round trip of a flag for comparison.
void time_barriers()
{
    constexpr u32 ROUNDS = 1000;
    World world(2, 4096, 16384, 4096, 5 * SECOND, false);
    u64 *words;
    CHECK(cudaMalloc(&words, 4096));
    for (bool near : {true, false}) {
        world.lane.near = near;
        CHECK(cudaMemset(words, 0, 4096));
        const float flag = best_round(world, [&](u32 rank, u32 run) {
            u64 *mine = words + 256 * rank, *theirs = words + 256 * (1 - rank);
            ping_pong<<<1, 1, 0, world.streams[rank]>>>(mine, theirs, 1 + run * ROUNDS, ROUNDS, rank == 0, near);
        });
        std::printf("round trip of a flag, %s: %.3f us\n", near ? "one GPU" : "any GPU", flag);
        for (u32 threads : {32u, COLLECTIVE_THREADS}) {
            const float barrier = best_round(world, [&](u32 rank, u32) {
                repeat_barrier<<<1, threads, 0, world.streams[rank]>>>(world.lane_of(rank), ROUNDS);
            });
            std::printf("barrier in a kernel, %3u threads, %s: %.3f us, %.2f of the flag's\n", threads,
                        near ? "one GPU" : "any GPU", barrier, barrier / flag);
        }
    }
    CHECK(cudaFree(words));
}

void time_all()
{
#if defined(WHOLEMEM_ENDLESS)
    std::printf("waits do not check for a timeout or an abort\n");
#endif
    time_barriers();
    for (u32 ranks : {2u, 4u}) {
        World world(ranks, 256 << 10, 16 << 20, 160 << 20, 5 * SECOND, false);
        const u32 most = std::min(128u, 2 * 132 / ranks), ll_most = std::min(128u, 128 / ranks);
        Plain8 plain = {};
        u64 *signals, *epochs;
        CHECK(cudaMalloc(&signals, ranks * 128 * 8 * 128));
        CHECK(cudaMemset(signals, 0, ranks * 128 * 8 * 128));
        CHECK(cudaMalloc(&epochs, ranks * 1024));
        CHECK(cudaMemset(epochs, 0, ranks * 1024));
        CHECK(cudaMemset(world.arena, 0, world.arena_len * ranks));
        for (u32 rank = 0; rank < ranks; ++rank) {
            plain.inputs[rank] = (const uint4 *)(world.arena + rank * world.arena_len);
            plain.signals[rank] = signals + rank * 128 * 8 * 16;
        }
        measure(world, "barrier", 0, 100, 1, [&](u32 rank) {
            CollectiveRequest request = CollectiveRequest();
            request.lane = world.lane_of(rank);
            barrier<<<1, COLLECTIVE_THREADS, 0, world.streams[rank]>>>(request);
        });
        for (u64 bytes : {1ull << 10, 8ull << 10, 64ull << 10, 256ull << 10, 1ull << 20, 8ull << 20, 64ull << 20}) {
            const u32 calls = bytes >= 8 << 20 ? 20 : 100;
            const u32 tiles = (u32)((bytes + TILE - 1) / TILE);
            const auto time = [&](const char *name, Algorithm algorithm, Mode mode, u32 blocks) {
                measure(world, name, bytes, calls, blocks, [&](u32 rank) {
                    CollectiveRequest request = CollectiveRequest();
                    request.lane = world.lane_of(rank);
                    request.input = (u64)world.arena + rank * world.arena_len;
                    request.output = request.input + world.arena_len / 2;
                    request.count = bytes / 2, request.dtype = BF16, request.op = SUM;
                    if (mode == INPUTS || mode == BOTH)
                        request.inputs = {(u64)world.arena, world.arena_len, 0};
                    if (mode == OUTPUTS || mode == BOTH)
                        request.outputs = {(u64)world.arena + world.arena_len / 2, world.arena_len, 0};
                    KERNELS[algorithm]<<<blocks, COLLECTIVE_THREADS, 0, world.streams[rank]>>>(request);
                    CHECK(cudaGetLastError());
                });
            };
            const u32 plain_blocks = std::min(tiles, 32u);
            measure(world, "plain one-shot", bytes, calls, plain_blocks, [&](u32 rank) {
                uint4 *output = (uint4 *)(world.arena + rank * world.arena_len + world.arena_len / 2);
                plain_one_shot<<<plain_blocks, 512, 0, world.streams[rank]>>>(plain, output, epochs + rank * 128, rank, ranks,
                                                                             (u32)(bytes / 16));
            });
            if (bytes <= world.lane.ll_len) {
                time("LL", LL, STAGED, std::min(ll_most, 2 * tiles));
                time("LL, half the blocks", LL, STAGED, std::min(ll_most, tiles));
            }
            time("one-shot staged", ONE_SHOT, STAGED, std::min(most, tiles));
            time("one-shot zero copy", ONE_SHOT, INPUTS, std::min(most, tiles));
            time("two-shot staged", TWO_SHOT, STAGED, std::min(most, std::max(1u, tiles / ranks)));
            time("two-shot zero copy", TWO_SHOT, BOTH, std::min(most, std::max(1u, tiles / ranks)));
        }
        CHECK(cudaFree(signals));
        CHECK(cudaFree(epochs));
    }
}
