/* A client of a store, a report of the doctor, and log events, through the C interface.
 *
 *     store SOCKET
 *
 * The program prints `ok`, and exits with 0 if all results are right. */

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <wholemem.h>

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

/* Only the thread of the library writes it, until the subscription is freed. */
static unsigned events;

static void count_event(void *data, wm_log_level_t level, const char *target, const char *message) {
    EXPECT(data == &events && level >= WM_LOG_ERROR && level <= WM_LOG_TRACE);
    EXPECT(strncmp(target, "wholemem", 8) == 0 && *message != 0);
    events += 1;
}

static void check_array(wm_store_t store) {
    const uint64_t shape[2] = {100, 3};
    wm_store_object_options_t options;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.is_array = 1;
    options.dtype = WM_DTYPE_F32;
    options.shape = shape;
    options.dimensions = 2;
    wm_store_draft_t draft;
    CHECK(wm_store_draft_create(store, "array", 100 * 3 * sizeof(float), &options, &draft));
    void *memory;
    uint64_t len;
    CHECK(wm_store_draft_data(draft, 0, &memory, &len));
    EXPECT(len == 100 * 3 * sizeof(float));
    for (int i = 0; i < 300; i++) {
        ((float *)memory)[i] = (float)i;
    }
    wm_store_sealed_t sealed;
    CHECK(wm_store_draft_seal(draft, &sealed));
    CHECK(wm_store_draft_destroy(draft));

    wm_store_object_t object;
    CHECK(wm_store_get(store, "array", 0, &object));
    wm_store_entry_t entry;
    memset(&entry, 0, sizeof entry);
    entry.struct_size = sizeof entry;
    CHECK(wm_store_object_entry(object, &entry));
    EXPECT(entry.id == sealed.id && strcmp(entry.name, "array") == 0 && entry.is_array == 1);
    EXPECT(entry.dtype == WM_DTYPE_F32 && entry.dimensions == 2 && entry.shape[0] == 100 && entry.shape[1] == 3);
    const void *bytes;
    CHECK(wm_store_object_data(object, &bytes, &len));
    EXPECT(len == 1200 && ((const float *)bytes)[299] == 299.0f);
    CHECK(wm_store_object_destroy(object));
    EXPECT(wm_store_object_destroy(object) == WM_ERROR_INVALID_HANDLE);
}

static void check_events(wm_store_t store) {
    wm_store_watch_t watch;
    CHECK(wm_store_watch(store, "seen/", &watch));
    CHECK(wm_store_put(store, "seen/this", "bytes", 5, NULL, NULL));
    CHECK(wm_store_delete_name(store, "seen/this"));
    wm_store_event_t event;
    memset(&event, 0, sizeof event);
    event.struct_size = sizeof event;
    CHECK(wm_store_watch_next(watch, UINT64_C(60000000000), &event));
    EXPECT(event.kind == WM_STORE_EVENT_PUBLISHED && event.version == 1 && strcmp(event.name, "seen/this") == 0);
    CHECK(wm_store_watch_next(watch, UINT64_C(60000000000), &event));
    EXPECT(event.kind == WM_STORE_EVENT_DELETED);
    EXPECT(wm_store_watch_next(watch, 0, &event) == WM_ERROR_STORE_TIMED_OUT);
    CHECK(wm_store_watch_destroy(watch));
}

static void check_report(void) {
    wm_text_t report;
    CHECK(wm_doctor(WM_REPORT_TEXT, &report));
    const char *characters;
    uint64_t len;
    CHECK(wm_text_data(report, &characters, &len));
    EXPECT(strlen(characters) == len && strstr(characters, "\nhost: available\n") != NULL);
    CHECK(wm_text_destroy(report));
}

int main(int count, char **arguments) {
    EXPECT(count == 2);
    CHECK(wm_check_version(WM_ABI_VERSION));
    wm_log_subscription_t log;
    CHECK(wm_log_subscribe("trace", count_event, &events, &log));
    wm_store_t store;
    CHECK(wm_store_connect(arguments[1], NULL, &store));
    check_array(store);
    check_events(store);
    check_report();
    CHECK(wm_store_destroy(store));
    CHECK(wm_log_subscription_destroy(log));
    printf("ok\n");
    return 0;
}
