/* Sequences of random calls of every function of the C interface, from several threads, with valid, freed, foreign and zero handles.
 *
 *     fuzz FOLDER SOCKET SEED SEQUENCES THREADS
 *
 * The test generates fuzz_calls.h from the header: a function for each function of the interface. The program exits with 0 if all calls
 * returned known statuses, and all handles, descriptors and memory files were released. */

#define _GNU_SOURCE
#include <dirent.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <wholemem.h>

#define CALLS 12
#define BUFFER_LEN (1 << 20)
#define KEPT 24
#define MAX_LEN 2048

enum kind {
#define HANDLE(name) KIND_##name,
#include "fuzz_handles.h"
#undef HANDLE
    KINDS
};

struct fuzz {
    uint64_t random;
    /* True if this call passes null instead of all buffers, and may pass huge lengths. */
    int without_buffers;
    unsigned char *buffer;
    uint64_t scratch[64];
    int64_t indices[64];
    uint64_t shape[4];
};

static const char *folder, *socket_path;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t kept[KINDS][KEPT], freed[KINDS];
static atomic_ullong created[KINDS], destroyed[KINDS], succeeded, failed, events, last_id;

static uint64_t next_random(struct fuzz *fuzz) {
    uint64_t z = (fuzz->random += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint64_t below(struct fuzz *fuzz, uint64_t count) { return next_random(fuzz) % count; }

static uint64_t kept_handle(struct fuzz *fuzz, unsigned kind) {
    const uint64_t first = below(fuzz, KEPT);
    uint64_t handle = 0;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < KEPT && handle == 0; i++) {
        handle = kept[kind][(first + i) % KEPT];
    }
    pthread_mutex_unlock(&lock);
    return handle;
}

/* Returns a handle: mostly a valid one, sometimes one that is zero, freed, of another kind, or of no object. */
static uint64_t handle_of(struct fuzz *fuzz, unsigned kind) {
    switch (below(fuzz, 16)) {
    case 0: return 0;
    case 1: pthread_mutex_lock(&lock); {
        const uint64_t handle = freed[kind];
        pthread_mutex_unlock(&lock);
        return handle;
    }
    case 2: return kept_handle(fuzz, (unsigned)below(fuzz, KINDS));
    case 3: return next_random(fuzz);
    case 4: return kept_handle(fuzz, kind) ^ (UINT64_C(1) << below(fuzz, 64));
    default: return kept_handle(fuzz, kind);
    }
}

static void destroy(unsigned kind, uint64_t handle);

static void keep(struct fuzz *fuzz, unsigned kind, uint64_t handle) {
    if (handle == 0) {
        return;
    }
    atomic_fetch_add(&created[kind], 1);
    const uint64_t at = below(fuzz, KEPT);
    pthread_mutex_lock(&lock);
    const uint64_t replaced = kept[kind][at];
    kept[kind][at] = handle;
    pthread_mutex_unlock(&lock);
    if (replaced != 0) {
        destroy(kind, replaced);
    }
}

static void forget(unsigned kind, uint64_t handle) {
    atomic_fetch_add(&destroyed[kind], 1);
    pthread_mutex_lock(&lock);
    freed[kind] = handle;
    for (unsigned i = 0; i < KEPT; i++) {
        if (kept[kind][i] == handle) {
            kept[kind][i] = 0;
        }
    }
    pthread_mutex_unlock(&lock);
}

static uint64_t number(struct fuzz *fuzz) {
    static const uint64_t numbers[] = {0, 0, 0, 1, 1, 1, 2, 3, 5, 8, 16, 64, UINT64_C(1) << 61, UINT64_C(1) << 63, UINT64_MAX};
    return numbers[below(fuzz, sizeof numbers / sizeof *numbers)];
}

static uint32_t small(struct fuzz *fuzz) { return below(fuzz, 16) == 0 ? UINT32_MAX - (uint32_t)below(fuzz, 2) : (uint32_t)below(fuzz, 4); }

/* A number of an enumeration. */
static uint32_t choice(struct fuzz *fuzz) {
    const uint64_t kind = below(fuzz, 16);
    return kind == 0 ? (uint32_t)next_random(fuzz) : (uint32_t)below(fuzz, kind < 10 ? 2 : 20);
}

static wm_dtype_t dtype(struct fuzz *fuzz) { return below(fuzz, 2) == 0 ? WM_DTYPE_F32 : choice(fuzz); }

/* The id of an object of the store. */
static uint64_t id(struct fuzz *fuzz) { return below(fuzz, 4) == 0 ? number(fuzz) : (uint64_t)last_id; }

static uint64_t timeout(struct fuzz *fuzz) { return below(fuzz, 4) == 0 ? below(fuzz, 3000000) : below(fuzz, 2); }

/* The length or count of a buffer. */
static uint64_t extent(struct fuzz *fuzz, uint64_t max) {
    if (fuzz->without_buffers && below(fuzz, 2) == 0) {
        return UINT64_MAX >> below(fuzz, 20);
    }
    return below(fuzz, 3) == 0 ? below(fuzz, max + 1) : below(fuzz, 5);
}

static void *buffer(struct fuzz *fuzz) {
    const uint64_t kind = below(fuzz, 24);
    return fuzz->without_buffers || kind == 0 ? NULL : fuzz->buffer + (kind == 1 ? 1 : 0);
}

static const int64_t *indices(struct fuzz *fuzz) {
    for (unsigned i = 0; i < 64; i++) {
        fuzz->indices[i] = (int64_t)below(fuzz, 10) - (below(fuzz, 16) == 0);
    }
    return buffer(fuzz) == NULL ? NULL : fuzz->indices;
}

/* The lengths of dimensions, or the rows of ranks: so short, or so long, that no call allocates much memory. */
static const uint64_t *shape(struct fuzz *fuzz) {
    for (unsigned i = 0; i < 4; i++) {
        fuzz->shape[i] = below(fuzz, 32) == 0 ? UINT64_MAX >> below(fuzz, 4) : below(fuzz, 12);
    }
    return buffer(fuzz) == NULL ? NULL : fuzz->shape;
}

/* A pointer through which a call returns a value. */
static void *output(struct fuzz *fuzz, void *value) {
    const uint64_t kind = below(fuzz, 32);
    return kind == 0 ? NULL : kind == 1 ? (unsigned char *)value + 1 : value;
}

static const char *text(struct fuzz *fuzz) {
    static const char *const texts[] = {"a",    "b",          "a/b",  "",           "warn", "error",
                                        "\xff", "wholemem=1", "\n\t", "off,warn,x", "c"};
    const uint64_t kind = below(fuzz, 16);
    if (kind == 0) {
        return NULL;
    }
    if (kind == 1) {
        memset(fuzz->scratch, 'x', sizeof fuzz->scratch - 1);
        ((char *)fuzz->scratch)[sizeof fuzz->scratch - 1] = 0;
        return (const char *)fuzz->scratch;
    }
    return texts[below(fuzz, sizeof texts / sizeof *texts)];
}

static const char *path(struct fuzz *fuzz) {
    const uint64_t kind = below(fuzz, 8);
    if (kind < 2) {
        return kind == 0 ? NULL : "/nonexistent/file";
    }
    snprintf((char *)fuzz->scratch, sizeof fuzz->scratch, "%s/%c", folder, (char)('a' + below(fuzz, 3)));
    return (const char *)fuzz->scratch;
}

static const char *socket_of(struct fuzz *fuzz) { return below(fuzz, 8) == 0 ? path(fuzz) : socket_path; }

/* The size that a structure of `len` bytes says to have; more than that many bytes exist. */
static size_t struct_size(struct fuzz *fuzz, size_t len) {
    switch (below(fuzz, 24)) {
    case 0: return 0;
    case 1: return len - 8;
    case 2: return len + 8;
    case 3: return 1;
    default: return len;
    }
}

static int descriptor(struct fuzz *fuzz) { return below(fuzz, 3) == 0 ? (int)below(fuzz, 3) : below(fuzz, 2) == 0 ? 1000000 : -1; }

static wm_status_t work(void *data, void *stream) {
    (void)stream;
    return data == NULL ? WM_OK : WM_ERROR_BUSY;
}

static void log_event(void *data, wm_log_level_t level, const char *target, const char *message) {
    (void)data;
    atomic_fetch_add(&events, 1 + (target == NULL || message == NULL || level == 0));
}

/* Checks the status of a call. */
static int is_ok(const char *function, wm_status_t status) {
    if (status == WM_OK) {
        atomic_fetch_add(&succeeded, 1);
        return 1;
    }
    if (status == WM_ERROR_PANIC || strcmp(wm_status_name(status), "WM_ERROR_UNKNOWN") == 0 || *wm_last_error() == 0) {
        /* A function that changes no last error has none. */
        if (status == WM_ERROR_PANIC || strcmp(function, "wm_last_error_info") != 0) {
            fprintf(stderr, "%s: status %u: %s\n", function, status, wm_last_error());
            exit(1);
        }
    }
    atomic_fetch_add(&failed, 1);
    return 0;
}

/* The number of successful calls of each function. */
static atomic_ullong successes[512];

#include "fuzz_calls.h"

static void destroy(unsigned kind, uint64_t handle) {
    switch (kind) {
#include "fuzz_destroy.h"
    default: abort();
    }
}

/* Counts the open descriptors, and the mappings of memory files. */
static void count_resources(unsigned *descriptors, unsigned *maps) {
    *descriptors = 0;
    *maps = 0;
    DIR *open = opendir("/proc/self/fd");
    if (open == NULL) {
        abort();
    }
    while (readdir(open) != NULL) {
        *descriptors += 1;
    }
    closedir(open);
    FILE *file = fopen("/proc/self/maps", "r");
    if (file == NULL) {
        abort();
    }
    char line[4096];
    while (fgets(line, sizeof line, file) != NULL) {
        *maps += strstr(line, "memfd:") != NULL;
    }
    fclose(file);
}

static void destroy_all(void) {
    /* An object that others need may be freed first, so each order is valid. */
    for (unsigned kind = 0; kind < KINDS; kind++) {
        for (unsigned i = 0; i < KEPT; i++) {
            pthread_mutex_lock(&lock);
            const uint64_t handle = kept[kind][i];
            pthread_mutex_unlock(&lock);
            if (handle != 0) {
                destroy(kind, handle);
            }
        }
    }
}

static int is_missing(unsigned kind) {
    pthread_mutex_lock(&lock);
    int missing = 1;
    for (unsigned i = 0; i < KEPT; i++) {
        missing &= kept[kind][i] == 0;
    }
    pthread_mutex_unlock(&lock);
    return missing;
}

/* Creates one object of each kind that there is none of, with valid arguments. Other threads may free what it needs. */
static void prepare(struct fuzz *fuzz) {
    wm_backend_t backend;
    if (is_missing(KIND_wm_backend_t) && is_ok("wm_backend_open", wm_backend_open(WM_BACKEND_HOST, 2, &backend))) {
        keep(fuzz, KIND_wm_backend_t, backend.value);
    }
    wm_device_t device;
    backend.value = kept_handle(fuzz, KIND_wm_backend_t);
    if (is_missing(KIND_wm_device_t) && is_ok("wm_device_open", wm_device_open(backend, 0, &device))) {
        keep(fuzz, KIND_wm_device_t, device.value);
    }
    wm_communicator_t communicator;
    device.value = kept_handle(fuzz, KIND_wm_device_t);
    /* Calls that fail make communicators unusable, so new ones are needed. */
    const int is_new = below(fuzz, 4) == 0;
    communicator.value = kept_handle(fuzz, KIND_wm_communicator_t);
    if ((is_new || communicator.value == 0) &&
        is_ok("wm_communicator_create_local", wm_communicator_create_local(&device, 1, NULL, &communicator))) {
        keep(fuzz, KIND_wm_communicator_t, communicator.value);
    }
    const uint64_t dimensions[2] = {8, 4};
    wm_tensor_spec_t spec;
    memset(&spec, 0, sizeof spec);
    spec.struct_size = sizeof spec;
    spec.shape = dimensions;
    spec.dimensions = 2;
    spec.dtype = WM_DTYPE_F32;
    wm_tensor_t tensor;
    if ((is_new || is_missing(KIND_wm_tensor_t)) && is_ok("wm_tensor_create", wm_tensor_create(communicator, &spec, &tensor))) {
        keep(fuzz, KIND_wm_tensor_t, tensor.value);
    }
    wm_memory_spec_t memory_spec;
    memset(&memory_spec, 0, sizeof memory_spec);
    memory_spec.struct_size = sizeof memory_spec;
    memory_spec.rows = 16;
    memory_spec.row_len = 64;
    wm_memory_t memory;
    if (is_missing(KIND_wm_memory_t) && is_ok("wm_memory_create", wm_memory_create(communicator, &memory_spec, &memory))) {
        keep(fuzz, KIND_wm_memory_t, memory.value);
    }
    wm_symmetric_memory_t symmetric;
    if ((is_new || is_missing(KIND_wm_symmetric_memory_t)) &&
        is_ok("wm_symmetric_memory_create", wm_symmetric_memory_create(communicator, NULL, &symmetric))) {
        keep(fuzz, KIND_wm_symmetric_memory_t, symmetric.value);
    }
    wm_graph_t graph;
    if (is_missing(KIND_wm_graph_t) &&
        is_ok("wm_graph_capture", wm_graph_capture(communicator, NULL, work, NULL, &graph))) {
        keep(fuzz, KIND_wm_graph_t, graph.value);
    }
    wm_store_t store;
    if (is_missing(KIND_wm_store_t) && is_ok("wm_store_connect", wm_store_connect(socket_path, NULL, &store))) {
        keep(fuzz, KIND_wm_store_t, store.value);
    }
    store.value = kept_handle(fuzz, KIND_wm_store_t);
    wm_store_sealed_t sealed;
    if (is_new && is_ok("wm_store_put", wm_store_put(store, "a", "bytes", 5, NULL, &sealed))) {
        atomic_store(&last_id, sealed.id);
    }
    wm_store_pack_t pack;
    wm_store_draft_t draft;
    if (is_new && is_ok("wm_store_pack_create", wm_store_pack_create("b", NULL, &pack))) {
        (void)is_ok("wm_store_pack_add", wm_store_pack_add(pack, "a/b", 10, NULL));
        if (is_ok("wm_store_draft_create_pack", wm_store_draft_create_pack(store, pack, &draft))) {
            (void)is_ok("wm_store_draft_seal", wm_store_draft_seal(draft, NULL));
            keep(fuzz, KIND_wm_store_draft_t, draft.value);
        }
        keep(fuzz, KIND_wm_store_pack_t, pack.value);
    }
    wm_store_object_t object;
    if (is_new && is_ok("wm_store_get", wm_store_get(store, "b", 0, &object))) {
        keep(fuzz, KIND_wm_store_object_t, object.value);
    }
}

struct thread {
    pthread_t thread;
    uint64_t seed, sequences;
};

static void *run(void *data) {
    struct thread *thread = data;
    struct fuzz fuzz;
    memset(&fuzz, 0, sizeof fuzz);
    fuzz.random = thread->seed;
    /* The library may use the buffer as memory of windows until these are freed, so it is never freed. */
    static _Thread_local unsigned char *own;
    if (own == NULL && posix_memalign((void **)&own, 4096, BUFFER_LEN + 4096) != 0) {
        abort();
    }
    fuzz.buffer = own;
    memset(own, 0, BUFFER_LEN + 4096);
    for (uint64_t sequence = 0; sequence < thread->sequences; sequence++) {
        prepare(&fuzz);
        for (unsigned i = 0; i < CALLS; i++) {
            fuzz.without_buffers = below(&fuzz, 8) == 0;
            calls[below(&fuzz, sizeof calls / sizeof *calls)](&fuzz);
        }
    }
    return own;
}

static void run_threads(uint64_t seed, uint64_t sequences, unsigned count) {
    struct thread threads[16];
    void *buffers[16];
    for (unsigned i = 0; i < count; i++) {
        threads[i].seed = seed * 16 + i;
        threads[i].sequences = sequences / count;
        if (pthread_create(&threads[i].thread, NULL, run, &threads[i]) != 0) {
            abort();
        }
    }
    for (unsigned i = 0; i < count; i++) {
        pthread_join(threads[i].thread, &buffers[i]);
    }
    destroy_all();
    for (unsigned i = 0; i < count; i++) {
        free(buffers[i]);
    }
}

int main(int count, char **arguments) {
    if (count != 6) {
        return 2;
    }
    folder = arguments[1];
    socket_path = arguments[2];
    const uint64_t seed = strtoull(arguments[3], NULL, 10), sequences = strtoull(arguments[4], NULL, 10);
    const unsigned threads = (unsigned)atoi(arguments[5]);
    if (threads == 0 || threads > 16) {
        return 2;
    }
    unsigned before[2], after[2];
    /* The first calls open what a process keeps open. */
    run_threads(seed + 1, sequences / 4 + threads, threads);
    count_resources(&before[0], &before[1]);
    run_threads(seed, sequences, threads);
    /* Threads of the library may still be closing what was freed last. */
    for (unsigned attempt = 0; attempt < 3000; attempt++) {
        count_resources(&after[0], &after[1]);
        if (after[0] <= before[0] && after[1] <= before[1]) {
            break;
        }
        usleep(10000);
    }
    int result = 0;
    if (after[0] > before[0] || after[1] > before[1]) {
        fprintf(stderr, "%u descriptors and %u memory files; before: %u and %u\n", after[0], after[1], before[0], before[1]);
        result = 1;
    }
    for (unsigned kind = 0; kind < KINDS; kind++) {
        if (created[kind] != destroyed[kind] || created[kind] == 0) {
            fprintf(stderr, "%s: %llu handles created, %llu freed\n", kind_names[kind], created[kind], destroyed[kind]);
            result |= created[kind] != destroyed[kind];
        }
    }
    for (unsigned i = 0; i < sizeof calls / sizeof *calls; i++) {
        if (successes[i] == 0) {
            printf("never succeeded: %s\n", call_names[i]);
        }
    }
    printf("%llu calls succeeded, %llu failed\n", succeeded, failed);
    return result;
}
