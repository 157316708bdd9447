// Kernels that are launched only by tests.

typedef unsigned long long u64;

extern "C" __global__ void nothing() {}

// Sets `bytes[i]` to `i + add` for every `i` below `len`.
extern "C" __global__ void add_index(unsigned char *bytes, unsigned len, unsigned add)
{
    for (unsigned i = threadIdx.x; i < len; i += blockDim.x)
        bytes[i] = (unsigned char)(i + add);
}

// Waits until `*flag` is not zero or the given number of nanoseconds has passed, and then sets `*byte` to `value`.
extern "C" __global__ void wait_then_set(volatile unsigned *flag, u64 nanoseconds, unsigned char *byte, unsigned char value)
{
    u64 start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (*flag == 0 && now - start < nanoseconds);
    *byte = value;
}
