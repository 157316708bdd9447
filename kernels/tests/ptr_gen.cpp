// GlobalRef and PtrGen on the host: every row and every element is found where a plain loop says that it is.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "wholemem/ptr_gen.cuh"

namespace {

typedef wholemem::u64 u64;

void require(bool held, const char *what, u64 a, u64 b)
{
    if (held)
        return;
    std::fprintf(stderr, "%s: %llu, %llu\n", what, a, b);
    std::exit(1);
}

// Memory in chunks that do not follow each other, and its directory.
struct Chunks {
    std::vector<std::vector<unsigned char> > chunks;
    std::vector<u64> directory;

    Chunks(const std::vector<u64> &rows, u64 stride)
    {
        u64 start = 0;
        std::vector<u64> starts;
        for (std::size_t i = 0; i < rows.size(); ++i) {
            chunks.push_back(std::vector<unsigned char>(rows[i] * stride));
            starts.push_back(start);
            start += rows[i];
        }
        starts.push_back(start);
        for (std::size_t i = 0; i < rows.size(); ++i)
            directory.push_back((u64)(std::uintptr_t)chunks[i].data());
        directory.insert(directory.end(), starts.begin(), starts.end());
    }

    wholemem::GlobalRef ref(u64 stride, u64 chunk_rows) const
    {
        wholemem::GlobalRef ref = wholemem::GlobalRef();
        ref.base = (u64)(std::uintptr_t)directory.data();
        ref.rows = directory.back();
        ref.stride = stride;
        ref.chunks = (wholemem::u32)chunks.size();
        ref.chunk_rows = chunk_rows;
        if (chunk_rows != 0) {
            __extension__ typedef unsigned __int128 u128;
            wholemem::u32 log = 0;
            while (((u64)1 << log) < chunk_rows)
                ++log;
            const u128 quotient = (((u128)1 << (64 + log)) - 1) / chunk_rows + 1;
            ref.magic = (u64)(quotient - ((u128)1 << 64));
            ref.shift = log - 1;
        }
        return ref;
    }
};

// The address of a row, found by walking over the chunks.
u64 walk(const Chunks &memory, u64 row, u64 stride)
{
    std::size_t chunk = 0;
    for (; row * stride >= memory.chunks[chunk].size(); ++chunk)
        row -= memory.chunks[chunk].size() / stride;
    return (u64)(std::uintptr_t)memory.chunks[chunk].data() + row * stride;
}

void rows_are_found(const std::vector<u64> &rows, u64 stride, u64 chunk_rows)
{
    const Chunks memory(rows, stride);
    wholemem::GlobalRef ref = memory.ref(stride, chunk_rows);
    for (u64 row = 0; row < ref.rows; ++row)
        require(ref.address(row) == walk(memory, row, stride), "a row is elsewhere", row, chunk_rows);
    require(!ref.contains(-1) && !ref.contains((wholemem::i64)ref.rows), "there are too many rows", ref.rows, stride);
    if (ref.rows < 3)
        return;
    // A part of the rows, and of each row.
    ref.first_row = 2;
    ref.rows -= 2;
    ref.offset = stride / 2;
    for (u64 row = 0; row < ref.rows; ++row)
        require(ref.address(row) == walk(memory, row + 2, stride) + stride / 2, "a view is elsewhere", row, chunk_rows);
}

void elements_are_found(const std::vector<u64> &rows, u64 stride)
{
    const Chunks memory(rows, stride);
    const wholemem::GlobalRef ref = memory.ref(stride, 0);
    const u64 width = stride / sizeof(int);
    const PtrGen<const wholemem::GlobalRef, int> tensor(&ref);
    for (u64 i = 0; i < ref.rows * width; ++i) {
        const u64 there = walk(memory, i / width, stride) + i % width * sizeof(int);
        require((u64)(std::uintptr_t)tensor.At(i) == there, "an element is elsewhere", i, stride);
        require(tensor.At(i) == tensor.Row(i / width) + i % width, "At and Row differ", i, stride);
    }
}

// As WholeMemory's documentation writes it: the memory is bytes, chunked at multiples of four of them.
void as_it_is_written(const std::vector<u64> &lengths)
{
    const Chunks memory(lengths, 1);
    const whole_memory::WholeChunkedMemoryHandle chunked = memory.ref(1, 0);
    const whole_graph::WholeChunkedMemoryHandle *handle = &chunked;
    {
        PtrGen<const whole_graph::WholeChunkedMemoryHandle, int> ptr_gen(handle);
        for (u64 i = 0; i < chunked.rows / sizeof(int); ++i)
            *ptr_gen.At(i) = (int)(3 * i);
    }
    PtrGen<const whole_memory::WholeChunkedMemoryHandle, int> ptr_gen(handle);
    std::vector<int> plain(chunked.rows / sizeof(int));
    int *ptr = plain.data();
    PtrGen<int, int> plain_gen(ptr);
    for (u64 i = 0; i < plain.size(); ++i)
        *plain_gen.At(i) = *ptr_gen.At(i);
    for (u64 i = 0; i < plain.size(); ++i)
        require(plain[i] == (int)(3 * i), "another value was read", i, (u64)plain[i]);
    const PtrGen<const int, int> read_only(plain.data());
    const int *last = read_only.At(plain.size() - 1);
    require(*last == plain.back(), "the last element differs", plain.size(), 0);
}

std::vector<u64> list(u64 a, u64 b, u64 c, u64 d, u64 e)
{
    const u64 numbers[] = {a, b, c, d, e};
    return std::vector<u64>(numbers, numbers + 5);
}

} // namespace

int main()
{
    for (u64 chunk = 2; chunk < 40; ++chunk)
        for (u64 last = 0; last <= chunk; ++last)
            rows_are_found(list(chunk, chunk, chunk, last, 0), 12, chunk);
    const u64 few[] = {0, 1, 2, 7};
    for (u64 a = 0; a < 4; ++a)
        for (u64 b = 0; b < 4; ++b)
            for (u64 c = 0; c < 4; ++c)
                rows_are_found(list(few[a], few[b], few[c], few[(a + b) % 4], few[3 - c]), 100, 0);
    // More chunks than WholeMemory's sixteen.
    std::vector<u64> many;
    for (u64 i = 0; i < 37; ++i)
        many.push_back(i * i % 11);
    rows_are_found(many, 8, 0);
    elements_are_found(many, 24);
    elements_are_found(list(3, 0, 5, 1, 4), 4);
    as_it_is_written(list(64, 4, 0, 4096, 12));
    return 0;
}
