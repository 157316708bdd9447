// Measures kernel launches of processes that share a GPU: the lower bound of every eager collective.
//
//     nvcc -O3 -std=c++17 -arch=sm_90 tests/launch.cu -o launch
//     ./launch 1 2 4 8              processes; under an MPS server, if more than one
//
// Launches empty kernels of 1 and 32 blocks, with an argument as long as a collective's, and kernels with one barrier between the
// processes; eagerly and in a graph; with normal and with programmatic launches, where a kernel starts while the previous one runs,
// and waits for it on the device. The processes start each round together and make 100 launches each, on one stream each; the
// slowest process counts. `host` is the time of the enqueuing calls, `gpu` the time between the events around them; both are
// divided by the number of launches.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <new>
#include <vector>

#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(CALL)                                                                                                    \
    do {                                                                                                               \
        const cudaError_t error = (CALL);                                                                              \
        if (error != cudaSuccess) {                                                                                    \
            std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #CALL, cudaGetErrorString(error));                      \
            std::_Exit(2);                                                                                             \
        }                                                                                                              \
    } while (0)

namespace {

constexpr int MOST = 8, ROUNDS = 25, LAUNCHES = 100;

struct Long {
    unsigned long long words[30];
};

// Waits for the previous kernel of the stream, and allows the next kernel to start.
__device__ void begin()
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__global__ void nothing(const Long) { begin(); }

// Performs a barrier between processes. `words[0]` is the number of finished barriers; `flags` has one word for each ordered
// pair of ranks, 128 bytes apart.
__global__ void synchronize(const Long argument)
{
    begin();
    typedef unsigned long long Word;
    Word *const words = (Word *)argument.words[0], *const flags = (Word *)argument.words[1];
    const unsigned rank = (unsigned)argument.words[2], ranks = (unsigned)argument.words[3];
    const Word call = words[0] + 1;
    __syncthreads();
    if (threadIdx.x < ranks) {
        Word *const theirs = flags + (threadIdx.x * MOST + rank) * 16;
        Word *const mine = flags + (rank * MOST + threadIdx.x) * 16;
        asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(theirs), "l"(call) : "memory");
        Word seen = 0;
        for (unsigned turn = 0; turn < 1u << 22 && seen < call; ++turn)
            asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(mine) : "memory");
    }
    __syncthreads();
    if (threadIdx.x == 0)
        words[0] = call;
}

// Memory that the measuring processes share: a barrier, the IPC handle of the flags, and measurements.
struct Shared {
    pthread_barrier_t barrier;
    cudaIpcMemHandle_t flags;
    double host[MOST], gpu[MOST];
};

double now()
{
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec * 1e-3;
}

void launch(cudaStream_t stream, bool synchronizes, int blocks, bool programmatic, const Long &argument)
{
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks, config.blockDim = 512, config.stream = stream;
    config.attrs = &attribute, config.numAttrs = programmatic;
    CHECK(cudaLaunchKernelEx(&config, synchronizes ? synchronize : nothing, argument));
}

double median(std::vector<double> &values)
{
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

void one(Shared *shared, int rank, int ranks)
{
    cudaStream_t stream;
    cudaEvent_t begin, end;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    void *words, *flags;
    CHECK(cudaMalloc(&words, 4096));
    CHECK(cudaMemset(words, 0, 4096));
    if (rank == 0) {
        CHECK(cudaMalloc(&flags, 1 << 20));
        CHECK(cudaMemset(flags, 0, 1 << 20));
        CHECK(cudaIpcGetMemHandle(&shared->flags, flags));
        CHECK(cudaDeviceSynchronize());
    }
    pthread_barrier_wait(&shared->barrier);
    if (rank != 0)
        CHECK(cudaIpcOpenMemHandle(&flags, shared->flags, cudaIpcMemLazyEnablePeerAccess));
    Long argument = {};
    argument.words[0] = (unsigned long long)words, argument.words[1] = (unsigned long long)flags;
    argument.words[2] = rank, argument.words[3] = ranks;
    for (int kind = 0; kind < 6; ++kind) {
        const bool synchronizes = kind / 2 == 2, programmatic = kind % 2;
        const int blocks = kind / 2 == 1 ? 32 : 1;
        for (int mode = 0; mode < 2; ++mode) {
            cudaGraphExec_t ready = nullptr;
            if (mode) {
                cudaGraph_t graph;
                CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
                for (int call = 0; call < LAUNCHES; ++call)
                    launch(stream, synchronizes, blocks, programmatic, argument);
                CHECK(cudaStreamEndCapture(stream, &graph));
                CHECK(cudaGraphInstantiate(&ready, graph, 0));
                CHECK(cudaGraphDestroy(graph));
            }
            std::vector<double> hosts, gpus;
            for (int round = -3; round < ROUNDS; ++round) {
                CHECK(cudaStreamSynchronize(stream));
                pthread_barrier_wait(&shared->barrier);
                CHECK(cudaEventRecord(begin, stream));
                const double start = now();
                if (mode)
                    CHECK(cudaGraphLaunch(ready, stream));
                else
                    for (int call = 0; call < LAUNCHES; ++call)
                        launch(stream, synchronizes, blocks, programmatic, argument);
                shared->host[rank] = (now() - start) / LAUNCHES;
                CHECK(cudaEventRecord(end, stream));
                CHECK(cudaStreamSynchronize(stream));
                float took;
                CHECK(cudaEventElapsedTime(&took, begin, end));
                shared->gpu[rank] = took * 1e3 / LAUNCHES;
                pthread_barrier_wait(&shared->barrier);
                if (round >= 0) {
                    hosts.push_back(*std::max_element(shared->host, shared->host + ranks));
                    gpus.push_back(*std::max_element(shared->gpu, shared->gpu + ranks));
                }
                pthread_barrier_wait(&shared->barrier);
            }
            if (rank == 0)
                std::printf("%d processes, %2d blocks, %s, %s, %s: host %5.2f us, gpu %5.2f us\n", ranks, blocks,
                            synchronizes ? "barrier" : "empty  ", mode ? "graph" : "eager", programmatic ? "programmatic" : "normal      ",
                            median(hosts), median(gpus));
            if (ready)
                CHECK(cudaGraphExecDestroy(ready));
        }
    }
    std::fflush(stdout);
    pthread_barrier_wait(&shared->barrier);
    if (rank != 0)
        CHECK(cudaIpcCloseMemHandle(flags));
    pthread_barrier_wait(&shared->barrier);
}

} // namespace

int main(int count, char **words)
{
    for (int i = 1; i < count; ++i) {
        const int ranks = std::min(std::max(std::atoi(words[i]), 1), MOST);
        void *memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED)
            return 2;
        Shared *shared = new (memory) Shared();
        pthread_barrierattr_t kind;
        pthread_barrierattr_init(&kind);
        pthread_barrierattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
        pthread_barrier_init(&shared->barrier, &kind, ranks);
        for (int rank = 0; rank < ranks; ++rank)
            if (fork() == 0) {
                one(shared, rank, ranks);
                std::_Exit(0);
            }
        for (int rank = 0, status; rank < ranks; ++rank)
            if (wait(&status) < 0 || status != 0)
                return 2;
        munmap(memory, sizeof(Shared));
    }
    return 0;
}
