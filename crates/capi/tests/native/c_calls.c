// Tests the C header in C11: statuses, the last error, handles that are freed or of another kind, and calls on a table of one rank.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <wholemem.h>

static void require(int held, const char *what, int line)
{
    if (held)
        return;
    fprintf(stderr, "line %d: %s\n%s\n", line, what, wm_last_error());
    exit(1);
}

#define REQUIRE(condition) require((condition) != 0, #condition, __LINE__)

static void errors_have_a_status_a_name_and_a_message(wm_backend_t backend)
{
    wm_device_t device = {0};
    REQUIRE(wm_device_open(backend, 9, &device) == WM_ERROR_NO_SUCH_DEVICE);
    REQUIRE(device.value == 0);
    REQUIRE(strcmp(wm_status_name(WM_ERROR_NO_SUCH_DEVICE), "WM_ERROR_NO_SUCH_DEVICE") == 0);
    REQUIRE(strstr(wm_last_error(), "there is no device 9") != NULL);
    wm_error_info_t info;
    memset(&info, 0, sizeof info);
    info.struct_size = sizeof info;
    REQUIRE(wm_last_error_info(&info) == WM_OK);
    REQUIRE(info.status == WM_ERROR_NO_SUCH_DEVICE && info.rank == WM_NO_RANK && info.position == WM_NO_POSITION);
}

static void freed_and_foreign_handles_are_statuses(wm_backend_t backend)
{
    wm_device_t device = {0};
    REQUIRE(wm_device_open(backend, 0, &device) == WM_OK);
    wm_tensor_t foreign = {device.value};
    uint64_t shape[1];
    REQUIRE(wm_tensor_shape(foreign, shape, 1) == WM_ERROR_INVALID_HANDLE);
    REQUIRE(wm_device_destroy(device) == WM_OK);
    uint64_t len = 7;
    REQUIRE(wm_device_available(device, &len) == WM_ERROR_INVALID_HANDLE && len == 7);
    REQUIRE(wm_device_destroy(device) == WM_ERROR_INVALID_HANDLE);
    REQUIRE(wm_device_open(backend, 0, NULL) == WM_ERROR_NULL_POINTER);
}

static void a_table_of_one_rank_is_gathered(wm_backend_t backend)
{
    wm_device_t device = {0};
    wm_communicator_t communicator = {0};
    REQUIRE(wm_device_open(backend, 0, &device) == WM_OK);
    REQUIRE(wm_communicator_create_local(&device, 1, NULL, &communicator) == WM_OK);
    const uint64_t shape[2] = {100, 3};
    wm_tensor_spec_t spec = {0};
    spec.struct_size = sizeof spec;
    spec.shape = shape;
    spec.dimensions = 2;
    spec.dtype = WM_DTYPE_I32;
    wm_tensor_t table = {0};
    REQUIRE(wm_tensor_create(communicator, &spec, &table) == WM_OK);
    int32_t rows[300];
    for (int32_t i = 0; i < 300; ++i)
        rows[i] = i;
    REQUIRE(wm_tensor_write_rows(table, 0, rows, sizeof rows) == WM_OK);
    const int64_t indices[2] = {99, 4};
    int32_t gathered[6] = {0};
    REQUIRE(wm_tensor_gather(table, indices, 2, gathered, sizeof gathered) == WM_OK);
    REQUIRE(gathered[0] == 297 && gathered[2] == 299 && gathered[3] == 12 && gathered[5] == 14);
    const int64_t bad[2] = {1, 100};
    REQUIRE(wm_tensor_gather(table, bad, 2, gathered, sizeof gathered) == WM_ERROR_BAD_INDEX);
    REQUIRE(wm_tensor_gather(table, indices, 2, gathered, sizeof gathered - 1) != WM_OK);
    REQUIRE(wm_tensor_destroy(table) == WM_OK);
    REQUIRE(wm_communicator_destroy(communicator) == WM_OK);
    REQUIRE(wm_device_destroy(device) == WM_OK);
}

int main(void)
{
    wm_backend_t backend = {0};
    REQUIRE(wm_version() == WM_VERSION);
    REQUIRE(wm_check_version(WM_ABI_VERSION) == WM_OK);
    REQUIRE(wm_check_version(WM_ABI_VERSION + 1) == WM_ERROR_VERSION_MISMATCH);
    REQUIRE(wm_backend_open(WM_BACKEND_HOST, 2, &backend) == WM_OK);
    errors_have_a_status_a_name_and_a_message(backend);
    freed_and_foreign_handles_are_statuses(backend);
    a_table_of_one_rank_is_gathered(backend);
    REQUIRE(wm_backend_destroy(backend) == WM_OK);
    return 0;
}
