/* Tables, windows and collective calls of ranks that are threads or processes, through the C interface.
 *
 *     ranks threads COUNT    COUNT ranks that are threads of this process
 *     ranks process          one rank, whose group the environment describes
 *
 * Every rank checks its results. The program prints `ok` for each rank, and exits with 0 if all results are right. */

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <wholemem.h>

#define ROWS 1000
#define COLUMNS 8
#define INDICES 64

#define CHECK(call)                                                                                           \
    do {                                                                                                      \
        wm_status_t status_ = (call);                                                                         \
        if (status_ != WM_OK) {                                                                               \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, wm_status_name(status_), wm_last_error()); \
            exit(1);                                                                                          \
        }                                                                                                     \
    } while (0)

#define EXPECT(condition)                                                           \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                                \
        }                                                                           \
    } while (0)

static void check_table(wm_communicator_t communicator, wm_kind_t kind, wm_location_t location) {
    const uint64_t shape[2] = {ROWS, COLUMNS};
    wm_tensor_spec_t spec;
    memset(&spec, 0, sizeof spec);
    spec.struct_size = sizeof spec;
    spec.shape = shape;
    spec.dimensions = 2;
    spec.dtype = WM_DTYPE_F32;
    spec.kind = kind;
    spec.location = location;
    wm_tensor_t table;
    CHECK(wm_tensor_create(communicator, &spec, &table));

    wm_rows_t own;
    memset(&own, 0, sizeof own);
    own.struct_size = sizeof own;
    CHECK(wm_tensor_local(table, &own));
    for (uint64_t row = 0; row < own.row_count; row++) {
        float *elements = (float *)((char *)own.address + row * own.stride);
        for (int column = 0; column < COLUMNS; column++) {
            elements[column] = (float)((own.first_row + row) * 10 + (uint64_t)column);
        }
    }
    CHECK(wm_communicator_barrier(communicator));

    int64_t indices[INDICES];
    float rows[INDICES][COLUMNS];
    for (int n = 0; n < INDICES; n++) {
        indices[n] = (int64_t)n * 7919 % ROWS;
    }
    CHECK(wm_tensor_gather(table, indices, INDICES, rows, sizeof rows));
    for (int n = 0; n < INDICES; n++) {
        for (int column = 0; column < COLUMNS; column++) {
            EXPECT(rows[n][column] == (float)(indices[n] * 10 + column));
        }
    }
    CHECK(wm_communicator_barrier(communicator));

    /* Every rank adds 1 to the same two rows. */
    uint32_t size = 0;
    CHECK(wm_communicator_size(communicator, &size));
    const int64_t added[2] = {ROWS - 1, 0};
    float ones[2][COLUMNS];
    for (int column = 0; column < COLUMNS; column++) {
        ones[0][column] = ones[1][column] = 1.0f;
    }
    CHECK(wm_tensor_scatter_add(table, added, 2, ones, sizeof ones));
    CHECK(wm_communicator_barrier(communicator));
    CHECK(wm_tensor_gather(table, added, 2, rows, 2 * sizeof rows[0]));
    for (int column = 0; column < COLUMNS; column++) {
        EXPECT(rows[0][column] == (float)((ROWS - 1) * 10 + column) + (float)size);
        EXPECT(rows[1][column] == (float)column + (float)size);
    }

    const int64_t bad[2] = {0, ROWS};
    EXPECT(wm_tensor_gather(table, bad, 2, rows, 2 * sizeof rows[0]) == WM_ERROR_BAD_INDEX);
    wm_error_info_t info;
    memset(&info, 0, sizeof info);
    info.struct_size = sizeof info;
    CHECK(wm_last_error_info(&info));
    EXPECT(info.position == 1);
    CHECK(wm_tensor_destroy(table));
    EXPECT(wm_tensor_destroy(table) == WM_ERROR_INVALID_HANDLE);
}

static void check_collectives(wm_communicator_t communicator, uint32_t rank, uint32_t size) {
    wm_symmetric_memory_t symmetric;
    CHECK(wm_symmetric_memory_create(communicator, NULL, &symmetric));
    wm_window_t window;
    CHECK(wm_window_create(symmetric, 4096 * sizeof(float), &window));
    void *own = NULL;
    uint64_t len = 0;
    CHECK(wm_window_address_of(window, rank, &own, &len));
    EXPECT(own != NULL && len >= 4096 * sizeof(float));

    float *values = (float *)own;
    for (int n = 0; n < 4096; n++) {
        values[n] = (float)(n % 100) + (float)rank;
    }
    CHECK(wm_all_reduce(symmetric, 0, NULL, own, own, 4096, WM_DTYPE_F32, WM_REDUCE_SUM));
    CHECK(wm_stream_synchronize(communicator, NULL, WM_TIMEOUT_INFINITE));
    CHECK(wm_symmetric_memory_check(symmetric, 0));
    for (int n = 0; n < 4096; n++) {
        EXPECT(values[n] == (float)((uint32_t)(n % 100) * size + size * (size - 1) / 2));
    }

    uint64_t sum = rank + 1;
    CHECK(wm_all_reduce_host(symmetric, 0, &sum, 1, WM_DTYPE_U64, WM_REDUCE_SUM));
    EXPECT(sum == (uint64_t)size * (size + 1) / 2);
    uint32_t *ranks = calloc(size, sizeof *ranks);
    EXPECT(ranks != NULL);
    CHECK(wm_all_gather_host(symmetric, 0, &rank, ranks, 1, WM_DTYPE_U32));
    for (uint32_t n = 0; n < size; n++) {
        EXPECT(ranks[n] == n);
    }
    free(ranks);
    CHECK(wm_window_deregister(window));
    CHECK(wm_symmetric_memory_destroy(symmetric));
}

static void *work(void *data) {
    const wm_communicator_t communicator = *(const wm_communicator_t *)data;
    uint32_t rank = 0, size = 0;
    CHECK(wm_communicator_rank(communicator, &rank));
    CHECK(wm_communicator_size(communicator, &size));
    check_table(communicator, WM_KIND_CONTINUOUS, WM_LOCATION_DEVICE);
    check_table(communicator, WM_KIND_CHUNKED, WM_LOCATION_DEVICE);
    check_table(communicator, WM_KIND_CONTINUOUS, WM_LOCATION_HOST);
    check_collectives(communicator, rank, size);
    CHECK(wm_communicator_barrier(communicator));
    printf("rank %" PRIu32 " of %" PRIu32 ": ok\n", rank, size);
    return NULL;
}

static void run_threads(uint32_t count) {
    wm_backend_t backend;
    CHECK(wm_backend_open(WM_BACKEND_HOST, count, &backend));
    wm_device_t *devices = calloc(count, sizeof *devices);
    wm_communicator_t *communicators = calloc(count, sizeof *communicators);
    pthread_t *threads = calloc(count, sizeof *threads);
    EXPECT(devices != NULL && communicators != NULL && threads != NULL);
    for (uint32_t n = 0; n < count; n++) {
        CHECK(wm_device_open(backend, n, &devices[n]));
    }
    CHECK(wm_communicator_create_local(devices, count, NULL, communicators));
    for (uint32_t n = 0; n < count; n++) {
        EXPECT(pthread_create(&threads[n], NULL, work, &communicators[n]) == 0);
    }
    for (uint32_t n = 0; n < count; n++) {
        EXPECT(pthread_join(threads[n], NULL) == 0);
        CHECK(wm_communicator_destroy(communicators[n]));
        CHECK(wm_device_destroy(devices[n]));
    }
    CHECK(wm_backend_destroy(backend));
    free(threads);
    free(communicators);
    free(devices);
}

static void run_process(void) {
    wm_backend_t backend;
    wm_device_t device;
    CHECK(wm_backend_open(WM_BACKEND_HOST, 0, &backend));
    CHECK(wm_device_open(backend, 0, &device));
    wm_communicator_t communicator;
    CHECK(wm_communicator_create_from_env(device, NULL, &communicator));
    CHECK(wm_device_destroy(device));
    CHECK(wm_backend_destroy(backend));
    work(&communicator);
    CHECK(wm_communicator_destroy(communicator));
}

int main(int argc, char **argv) {
    CHECK(wm_check_version(WM_ABI_VERSION));
    EXPECT(wm_version() == WM_VERSION);
    if (argc == 3 && strcmp(argv[1], "threads") == 0) {
        run_threads((uint32_t)strtoul(argv[2], NULL, 10));
    } else if (argc == 2 && strcmp(argv[1], "process") == 0) {
        run_process();
    } else {
        fprintf(stderr, "usage: ranks threads COUNT | ranks process\n");
        return 2;
    }
    return 0;
}
