// Tests GlobalRef, ElementRef and PtrGen on the host: the address of every row and element equals that of a plain loop.

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

// Chunked memory whose chunks are not adjacent, and the directory of its chunks.
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

// Returns the address of a row, found by a linear search over the chunks.
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
    // Test a view of some rows and columns of the table.
    ref.first_row = 2;
    ref.rows -= 2;
    ref.offset = stride / 2;
    for (u64 row = 0; row < ref.rows; ++row)
        require(ref.address(row) == walk(memory, row + 2, stride) + stride / 2, "a view is elsewhere", row, chunk_rows);
}

wholemem::ElementRef elements_of(const wholemem::GlobalRef &rows, u64 row_len)
{
    wholemem::ElementRef ref = wholemem::ElementRef();
    ref.rows = rows;
    ref.row_len = row_len;
    return ref;
}

void elements_are_found(const std::vector<u64> &rows, u64 stride)
{
    const Chunks memory(rows, stride);
    const wholemem::ElementRef ref = elements_of(memory.ref(stride, 0), stride);
    const u64 width = stride / sizeof(int);
    const PtrGen<const wholemem::ElementRef, int> tensor(&ref);
    const PtrGen<const wholemem::ElementRef, int> shifted(&ref, width + 1);
    for (u64 i = width + 1; i < ref.rows.rows * width; ++i)
        require(shifted.At(i - width - 1) == tensor.At(i), "a base offset is not added", i, stride);
    for (u64 i = 0; i < ref.rows.rows * width; ++i) {
        const u64 there = walk(memory, i / width, stride) + i % width * sizeof(int);
        require((u64)(std::uintptr_t)tensor.At(i) == there, "an element is elsewhere", i, stride);
        require(tensor.At(i) == tensor.Row(i / width) + i % width, "At and Row differ", i, stride);
    }
}

// Tests that At enumerates the elements in order, for every view of some rows and columns of a chunked or contiguous tensor.
void elements_of_views_are_found(const std::vector<u64> &rows, u64 width)
{
    const u64 stride = width * sizeof(int);
    const Chunks memory(rows, stride);
    const wholemem::GlobalRef whole = memory.ref(stride, 0);
    for (u64 first = 0; first < whole.rows; ++first)
        for (u64 start = 0; start < width; ++start)
            for (u64 end = start + 1; end <= width; ++end) {
                wholemem::GlobalRef view = whole;
                view.offset = start * sizeof(int);
                view.first_row = first;
                view.rows -= first;
                if (rows.size() == 1) {
                    view.base = walk(memory, first, stride) + view.offset;
                    view.first_row = view.offset = 0;
                }
                const PtrGen<const wholemem::ElementRef, int> part(elements_of(view, (end - start) * sizeof(int)));
                u64 i = 0;
                for (u64 row = first; row < whole.rows; ++row)
                    for (u64 column = start; column < end; ++column, ++i) {
                        const u64 there = walk(memory, row, stride) + column * sizeof(int);
                        require((u64)(std::uintptr_t)part.At(i) == there, "an element of a view is elsewhere", i, start);
                    }
            }
}

// Tests a view of columns 3 and 4 of 8: its first elements are the elements 3, 4, 11 and 12 of the memory.
void columns_are_walked_as_written()
{
    std::vector<int> memory(80);
    for (int i = 0; i < 80; ++i)
        memory[(std::size_t)i] = i;
    wholemem::GlobalRef rows = wholemem::GlobalRef();
    rows.base = (u64)(std::uintptr_t)(memory.data() + 3);
    rows.rows = 10;
    rows.stride = 8 * sizeof(int);
    rows.chunks = 1;
    const whole_memory::WholeChunkedMemoryHandle handle = elements_of(rows, 2 * sizeof(int));
    PtrGen<const whole_memory::WholeChunkedMemoryHandle, int> ptr_gen(&handle);
    const int expected[] = {3, 4, 11, 12};
    for (u64 i = 0; i < 4; ++i)
        require(*ptr_gen.At(i) == expected[i], "another column was visited", i, (u64)*ptr_gen.At(i));
    const PtrGen<const wholemem::GlobalRef, int> of_rows(&handle.rows);
    require(*of_rows.Row(1) == 11, "a row is elsewhere", 1, (u64)*of_rows.Row(1));
}

// Tests the example of WholeMemory's documentation: memory of bytes in chunks whose lengths are multiples of four bytes.
void as_it_is_written(const std::vector<u64> &lengths)
{
    const Chunks memory(lengths, 1);
    const whole_memory::WholeChunkedMemoryHandle chunked = elements_of(memory.ref(1, 0), 1);
    const u64 len = chunked.rows.rows;
    const whole_graph::WholeChunkedMemoryHandle *handle = &chunked;
    {
        PtrGen<const whole_graph::WholeChunkedMemoryHandle, int> ptr_gen(handle);
        for (u64 i = 0; i < len / sizeof(int); ++i)
            *ptr_gen.At(i) = (int)(3 * i);
    }
    PtrGen<const whole_memory::WholeChunkedMemoryHandle, int> ptr_gen(handle);
    std::vector<int> plain(len / sizeof(int));
    int *ptr = plain.data();
    PtrGen<int, int> plain_gen(ptr);
    for (u64 i = 0; i < plain.size(); ++i)
        *plain_gen.At(i) = *ptr_gen.At(i);
    for (u64 i = 0; i < plain.size(); ++i)
        require(plain[i] == (int)(3 * i), "another value was read", i, (u64)plain[i]);
    const PtrGen<const int, int> read_only(plain.data());
    const int *last = read_only.At(plain.size() - 1);
    require(*PtrGen<const int, int>(plain.data(), plain.size() - 1).At(0) == *last, "a base offset is not added", plain.size(), 0);
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
    // Test more than 16 chunks, which is the limit of WholeMemory.
    std::vector<u64> many;
    for (u64 i = 0; i < 37; ++i)
        many.push_back(i * i % 11);
    rows_are_found(many, 8, 0);
    elements_are_found(many, 24);
    elements_are_found(list(3, 0, 5, 1, 4), 4);
    elements_of_views_are_found(list(3, 0, 5, 1, 4), 5);
    elements_of_views_are_found(std::vector<u64>(1, 7), 6);
    columns_are_walked_as_written();
    as_it_is_written(list(64, 4, 0, 4096, 12));
    return 0;
}
