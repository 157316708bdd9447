// Measures Open MPI's all-reduce and barrier in the way of `wholemem bench`: ranks begin a round together, make several calls, and the
// slowest rank counts. Inputs differ in every round, and all results are checked.
//
//   allreduce ROUNDS BYTES:CALLS:SLOTS:PLACE ...    f32, sum; PLACE is out or in; no BYTES: a barrier
//
// Rank 0 prints a line of JSON for each case: the microseconds of a call, round by round.

#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// Warm-up rounds, and the period of the input values, as in `wholemem bench`.
enum { WARM_UP = 2, PERIOD = 1021 };

static int rank, ranks;

static void fail(const char *what)
{
    fprintf(stderr, "rank %d: %s\n", rank, what);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec * 1e-3;
}

// The input of a rank: a number from 1 to 8.
static float element(int round, int of, size_t at)
{
    unsigned long mixed = (at % PERIOD + 1) * 0x9e3779b97f4a7c15UL + round * 0xbf58476d1ce4e5b9UL + of * 0x94d049bb133111ebUL;
    return (float)((mixed ^ mixed >> 29) * 0xbf58476d1ce4e5b9UL >> 61) + 1;
}

struct course {
    size_t bytes, step;
    int calls, slots, in_place;
    char *input, *output;
};

static void *aligned(size_t len)
{
    void *memory = NULL;
    if (posix_memalign(&memory, 4096, len ? len : 1))
        fail("no memory");
    return memory;
}

static void prepare(const struct course *course, int round)
{
    float period[PERIOD];
    for (int at = 0; at < PERIOD; ++at)
        period[at] = element(round, rank, at);
    for (int slot = 0; slot < course->slots; ++slot) {
        char *input = course->input + slot * course->step;
        for (size_t at = 0; at < course->bytes; at += sizeof period) {
            size_t left = course->bytes - at;
            memcpy(input + at, period, left < sizeof period ? left : sizeof period);
        }
        if (!course->in_place)
            memset(course->output + slot * course->step, 0xEE, course->bytes);
    }
}

static void check(const struct course *course, int round)
{
    double sums[PERIOD] = {0};
    for (int at = 0; at < PERIOD; ++at)
        for (int of = 0; of < ranks; ++of)
            sums[at] += element(round, of, at);
    for (int slot = 0; slot < course->slots; ++slot) {
        int again = course->in_place ? (course->calls - slot + course->slots - 1) / course->slots - 1 : 0;
        double grown = pow(ranks, again);
        const float *seen = (const float *)((course->in_place ? course->input : course->output) + slot * course->step);
        for (size_t at = 0; at < course->bytes / sizeof(float); ++at) {
            double expected = sums[at % PERIOD] * grown;
            if (!(fabs(seen[at] - expected) <= 1e-5 * expected))
                fail("a sum is wrong");
        }
    }
}

static double timed(const struct course *course)
{
    int count = course->bytes / sizeof(float);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Barrier(MPI_COMM_WORLD);
    double start = now();
    for (int call = 0; call < course->calls; ++call) {
        if (!course->bytes) {
            MPI_Barrier(MPI_COMM_WORLD);
            continue;
        }
        size_t at = call % course->slots * course->step;
        if (course->in_place)
            MPI_Allreduce(MPI_IN_PLACE, course->input + at, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        else
            MPI_Allreduce(course->input + at, course->output + at, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    }
    double own = now() - start, slowest;
    MPI_Allreduce(&own, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return slowest / course->calls;
}

static void play(struct course *course, int rounds)
{
    course->step = (course->bytes + 63) / 64 * 64;
    course->input = aligned(course->step * course->slots);
    course->output = course->in_place ? NULL : aligned(course->step * course->slots);
    if (!rank)
        printf("{\"bytes\":%zu,\"place\":\"%s\",\"us\":[", course->bytes, course->in_place ? "in" : "out");
    for (int round = 0; round < WARM_UP + rounds; ++round) {
        prepare(course, round);
        double us = timed(course);
        check(course, round);
        if (!rank && round >= WARM_UP)
            printf("%s%.4f", round > WARM_UP ? "," : "", us);
    }
    if (!rank)
        printf("]}\n");
    fflush(stdout);
    free(course->input);
    free(course->output);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (int arg = 2; arg < argc; ++arg) {
        struct course course = {0};
        char place[4];
        if (sscanf(argv[arg], "%zu:%d:%d:%3s", &course.bytes, &course.calls, &course.slots, place) != 4)
            fail("a case is BYTES:CALLS:SLOTS:PLACE");
        course.in_place = !strcmp(place, "in");
        play(&course, atoi(argv[1]));
    }
    MPI_Finalize();
    return 0;
}
