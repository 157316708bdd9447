// Two or more processes share a table; each fills its own rows and gathers rows of all of them.
//
//     wholemem launch -n 2 -- ./gather

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include <wholemem.h>

enum { ROWS = 1000000, WIDTH = 16 };

// Ends the program with the message of the last error, unless a call succeeded.
static void check(wm_status_t status, const char *call)
{
    if (status == WM_OK)
        return;
    fprintf(stderr, "error: %s: %s: %s\n", call, wm_status_name(status), wm_last_error());
    exit(1);
}

#define CHECK(call) check((call), #call)

int main(void)
{
    CHECK(wm_check_version(WM_ABI_VERSION));
    wm_device_t any_device = {0};
    wm_communicator_t communicator;
    CHECK(wm_communicator_create_from_env(any_device, NULL, &communicator));
    uint32_t rank = 0, size = 0;
    CHECK(wm_communicator_rank(communicator, &rank));
    CHECK(wm_communicator_size(communicator, &size));

    const uint64_t shape[] = {ROWS, WIDTH};
    wm_tensor_spec_t spec = {0};
    spec.struct_size = sizeof spec;
    spec.shape = shape;
    spec.dimensions = 2;
    spec.dtype = WM_DTYPE_F32;
    wm_tensor_t table;
    CHECK(wm_tensor_create(communicator, &spec, &table));

    // Every rank fills its own rows with its number.
    wm_rows_t mine = {0};
    mine.struct_size = sizeof mine;
    CHECK(wm_tensor_local(table, &mine));
    const size_t len = (size_t)mine.row_count * WIDTH * sizeof(float);
    float *const values = malloc(len);
    if (values == NULL) {
        fprintf(stderr, "error: no memory for %zu bytes\n", len);
        return 1;
    }
    for (uint64_t i = 0; i < mine.row_count * WIDTH; ++i)
        values[i] = (float)rank;
    CHECK(wm_tensor_write_rows(table, mine.first_row, values, len));
    free(values);
    CHECK(wm_communicator_barrier(communicator));

    // The first row is of the first rank, and the last row of the last rank.
    const int64_t indices[] = {ROWS - 1, 0};
    float rows[2 * WIDTH];
    CHECK(wm_tensor_gather(table, indices, 2, rows, sizeof rows));
    if (rows[0] != (float)(size - 1) || rows[WIDTH] != 0) {
        fprintf(stderr, "error: the rows are %g and %g\n", (double)rows[0], (double)rows[WIDTH]);
        return 1;
    }
    printf("rank %" PRIu32 " of %" PRIu32 ": row %d has %g, row 0 has %g\n", rank, size, ROWS - 1, (double)rows[0],
           (double)rows[WIDTH]);

    // Other ranks may still gather from the rows of this rank.
    CHECK(wm_communicator_barrier(communicator));
    CHECK(wm_tensor_destroy(table));
    CHECK(wm_communicator_destroy(communicator));
    return 0;
}
