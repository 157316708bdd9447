// The checks that every rank makes: results are compared with those of plain loops.

#include "checks.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <unistd.h>

#include <wholemem/kernel_arguments.hpp>

#include "require.hpp"

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_acquire(void *address);
extern "C" void __tsan_release(void *address);
#endif

namespace {

using wholemem::Communicator;
using wholemem::Kind;
using wholemem::Location;
using wholemem::ReduceOp;
using wholemem::SymmetricMemory;
using wholemem::TensorSpec;
using wholemem::WholeTensor;

constexpr std::uint64_t ROWS = 1003;
constexpr std::uint64_t WIDTH = 6;

/// Waits for all ranks, and tells the thread sanitizer about it: it does not see the synchronization in the library.
void barrier(const Communicator &communicator)
{
#if defined(__SANITIZE_THREAD__)
    static char order;
    __tsan_release(&order);
    communicator.barrier();
    __tsan_acquire(&order);
#else
    communicator.barrier();
#endif
}

/// The value that an element has first. All sums in the tests are exact as floats.
float initial(std::uint64_t row, std::uint64_t column) { return static_cast<float>(row * 8 + column); }

/// Writes this rank's rows, each rank its own.
void fill(const WholeTensor &table)
{
    const auto mine = table.local<float>();
    std::vector<float> rows(mine.row_count * WIDTH);
    for (std::uint64_t i = 0; i < rows.size(); ++i)
        rows[i] = initial(mine.first_row + i / WIDTH, i % WIDTH);
    table.write_rows<float>(mine.first_row, rows);
}

std::vector<std::int64_t> random_rows(std::size_t count, std::uint32_t seed)
{
    std::mt19937 random(seed);
    std::uniform_int_distribution<std::int64_t> row(0, ROWS - 1);
    std::vector<std::int64_t> rows(count);
    std::generate(rows.begin(), rows.end(), [&] { return row(random); });
    return rows;
}

void rows_are_gathered(const Communicator &communicator, const WholeTensor &table)
{
    const auto indices = random_rows(500, communicator.rank());
    const auto rows = table.gather<float>(indices);
    REQUIRE(rows.size() == indices.size() * WIDTH);
    for (std::size_t i = 0; i < rows.size(); ++i)
        REQUIRE(rows[i] == initial(static_cast<std::uint64_t>(indices[i / WIDTH]), i % WIDTH));
    std::vector<float> again(rows.size());
    table.gather_into<float>(indices, again);
    REQUIRE(again == rows);
    // The last row of the table is in the chunk of the last rank with rows.
    REQUIRE(table.gather<float>(std::vector<std::int64_t>{ROWS - 1})[1] == initial(ROWS - 1, 1));
    const auto view = table.rows(10, 20).columns(2, 4);
    REQUIRE((view.shape() == std::vector<std::uint64_t>{10, 2}));
    REQUIRE((view.gather<float>(std::vector<std::int64_t>{9}) == std::vector<float>{initial(19, 2), initial(19, 3)}));
}

void wrong_arguments_are_errors(const WholeTensor &table)
{
    try {
        table.gather<float>(std::vector<std::int64_t>{1, 2, ROWS});
        REQUIRE(false && "an index names no row");
    } catch (const wholemem::Error &error) {
        REQUIRE(error.status() == WM_ERROR_BAD_INDEX && error.position() == std::uint64_t{2});
    }
    try {
        table.gather<double>(std::vector<std::int64_t>{1});
        REQUIRE(false && "the element types differ");
    } catch (const wholemem::Error &error) {
        REQUIRE(error.status() == WM_ERROR_TYPES_DIFFER);
        REQUIRE(error.message() == "the elements of the tensor are float32, but those of the C++ type are float64");
    }
}

/// Every rank replaces the rows whose number has its rank as remainder, wherever they are.
void rows_are_scattered(const Communicator &communicator, const WholeTensor &table)
{
    const std::uint32_t rank = communicator.rank(), size = communicator.size();
    std::vector<std::int64_t> indices;
    std::vector<float> rows;
    for (std::uint64_t row = rank; row < ROWS; row += size) {
        indices.push_back(static_cast<std::int64_t>(row));
        for (std::uint64_t column = 0; column < WIDTH; ++column)
            rows.push_back(initial(row, column) + 1);
    }
    table.scatter<float>(indices, rows);
    barrier(communicator);
    std::vector<float> all(ROWS * WIDTH);
    table.read_rows<float>(0, all);
    for (std::uint64_t i = 0; i < all.size(); ++i)
        REQUIRE(all[i] == initial(i / WIDTH, i % WIDTH) + 1);
    barrier(communicator);
}

/// All ranks add to the same rows at the same time, also several times in one call.
void rows_are_added(const Communicator &communicator, const WholeTensor &table)
{
    const std::uint32_t size = communicator.size();
    std::vector<float> expected(ROWS * WIDTH);
    for (std::uint64_t i = 0; i < expected.size(); ++i)
        expected[i] = initial(i / WIDTH, i % WIDTH) + 1;
    std::vector<std::int64_t> mine;
    for (std::uint32_t rank = 0; rank < size; ++rank) {
        auto indices = random_rows(300, 100 + rank);
        indices.insert(indices.end(), {7, 7, 7});
        for (const std::int64_t index : indices)
            for (std::uint64_t column = 0; column < WIDTH; ++column)
                expected[static_cast<std::size_t>(index) * WIDTH + column] += static_cast<float>(rank + 1);
        if (rank == communicator.rank())
            mine = indices;
    }
    table.scatter_add<float>(mine, std::vector<float>(mine.size() * WIDTH, static_cast<float>(communicator.rank() + 1)));
    barrier(communicator);
    std::vector<float> all(ROWS * WIDTH);
    table.read_rows<float>(0, all);
    REQUIRE(all == expected);
    barrier(communicator);
}

/// Every rank creates an object, and reads that of the next rank without a copy.
///
/// Sealing a draft unmaps its memory, and another rank of the process may map a draft or an object at the same address then. The thread
/// sanitizer does not see either in the library, and would report that two threads access the address. So the barriers, which it sees, are
/// between the writes and the first seal, and between the last reads and the end of the objects.
void objects_are_shared(const Communicator &communicator)
{
    const std::uint32_t rank = communicator.rank(), next = (rank + 1) % communicator.size();
    const auto store = wholemem::StoreClient::connect();
    const auto name = [](std::uint32_t of) { return "object-" + std::to_string(of); };
    const auto draft = store.create(name(rank), 1 << 20);
    const auto memory = draft.bytes();
    std::fill(memory.begin(), memory.end(), static_cast<std::byte>(rank + 1));
    barrier(communicator);
    REQUIRE(draft.seal().version == 1);
    const auto object = store.get_object(name(next), std::chrono::seconds(60));
    const auto bytes = object.bytes();
    REQUIRE(bytes.size() == 1 << 20 && object.entry().name == name(next));
    REQUIRE(std::count(bytes.begin(), bytes.end(), static_cast<std::byte>(next + 1)) == 1 << 20);
    barrier(communicator);
    store.remove(name(rank));
    // The object lives while a client holds it.
    barrier(communicator);
    REQUIRE(bytes[0] == static_cast<std::byte>(next + 1));
    const std::vector<std::byte> small(10, static_cast<std::byte>(rank));
    store.put(name(rank), small);
    REQUIRE(store.get_object(name(rank)).bytes().size() == 10 && store.status().objects >= 1);
    store.remove(name(rank));
    try {
        static_cast<void>(store.get_object(name(rank)));
        REQUIRE(false && "the object was deleted");
    } catch (const wholemem::Error &error) {
        REQUIRE(error.status() == WM_ERROR_STORE_NO_SUCH_NAME);
    }
    barrier(communicator);
}

/// Each rank watches its own names.
void changes_are_watched(const Communicator &communicator)
{
    const std::string prefix = "watched-" + std::to_string(communicator.rank()) + "/", name = prefix + "a";
    const auto store = wholemem::StoreClient::connect();
    const auto watch = store.watch(prefix);
    const std::vector<std::byte> bytes(10);
    const auto first = store.put(name, bytes);
    const auto second = store.put(name, bytes);
    store.remove(name);
    const auto published = watch.next(), replaced = watch.next();
    REQUIRE(published.kind == WM_STORE_EVENT_PUBLISHED && published.id == first.id && published.previous == 0);
    REQUIRE(replaced.kind == WM_STORE_EVENT_REPLACED && replaced.id == second.id && replaced.name == name);
    REQUIRE(replaced.version == 2 && replaced.previous == 1 && replaced.objects == 1);
    REQUIRE(replaced.revision > published.revision);
    REQUIRE(watch.next().kind == WM_STORE_EVENT_DELETED);
    REQUIRE(store.watch_after(prefix, published.revision).next().revision == replaced.revision);
    try {
        static_cast<void>(watch.next(std::chrono::milliseconds(1)));
        REQUIRE(false && "there are no more events");
    } catch (const wholemem::Error &error) {
        REQUIRE(error.status() == WM_ERROR_STORE_TIMED_OUT);
    }
}

/// The header for kernels finds the elements, on the host.
void elements_are_found_by_the_header_for_kernels(const WholeTensor &table)
{
    const wholemem::ElementRef handle = wholemem::element_ref(table);
    const PtrGen<const wholemem::ElementRef, float> elements(handle, WIDTH);
    for (std::uint64_t i = 0; i < (ROWS - 1) * WIDTH; ++i)
        REQUIRE(*elements.At(i) == initial(1 + i / WIDTH, i % WIDTH));
}

void tables(const Communicator &communicator, bool cpu_reaches_devices)
{
    for (const Kind kind : {Kind::Continuous, Kind::Chunked})
        for (const Location location : {Location::Device, Location::Host}) {
            auto spec = TensorSpec::of<float>({ROWS, WIDTH});
            spec.kind = kind;
            spec.location = location;
            const auto table = WholeTensor::create(communicator, spec);
            REQUIRE(table.row_count() == ROWS && table.dtype() == wholemem::Dtype::F32);
            fill(table);
            barrier(communicator);
            rows_are_gathered(communicator, table);
            wrong_arguments_are_errors(table);
            if (cpu_reaches_devices || location == Location::Host)
                elements_are_found_by_the_header_for_kernels(table);
            barrier(communicator);
            rows_are_scattered(communicator, table);
            rows_are_added(communicator, table);
        }
}

/// Memory of bytes, in uneven parts.
void bytes_are_shared(const Communicator &communicator)
{
    const std::uint32_t size = communicator.size();
    wholemem::MemorySpec spec;
    spec.row_len = 16;
    spec.kind = Kind::Chunked;
    spec.location = Location::Host;
    for (std::uint32_t rank = 0; rank < size; ++rank) {
        spec.rows_of_each.push_back(rank + 1);
        spec.rows += rank + 1;
    }
    const auto memory = wholemem::WholeMemory::create(communicator, spec);
    REQUIRE((memory.rows_of(1) == std::pair<std::uint64_t, std::uint64_t>{1, 2}));
    REQUIRE(memory.len() == spec.rows * 16 && memory.part(size - 1).size() == 16 * size);
    const auto mine = memory.part(communicator.rank());
    std::fill(mine.begin(), mine.end(), static_cast<std::byte>(communicator.rank() + 1));
    barrier(communicator);
    std::vector<std::byte> all(memory.len());
    memory.read(0, all);
    std::size_t at = 0;
    for (std::uint32_t rank = 0; rank < size; ++rank)
        for (std::size_t i = 0; i < 16 * (rank + 1); ++i, ++at)
            REQUIRE(all[at] == static_cast<std::byte>(rank + 1));
    barrier(communicator);
}

void host_values_are_reduced(const Communicator &communicator, const SymmetricMemory &symmetric)
{
    const std::uint32_t rank = communicator.rank(), size = communicator.size();
    for (const std::size_t count : {std::size_t{1}, std::size_t{1000}, std::size_t{100'000}}) {
        std::vector<float> values(count, static_cast<float>(rank + 1));
        symmetric.all_reduce<float>(values);
        REQUIRE(values == std::vector<float>(count, static_cast<float>(size * (size + 1) / 2)));
    }
    std::vector<std::int64_t> extremes = {static_cast<std::int64_t>(rank), -static_cast<std::int64_t>(rank)};
    symmetric.all_reduce<std::int64_t>(extremes, ReduceOp::Max);
    REQUIRE((extremes == std::vector<std::int64_t>{size - 1, 0}));
    std::vector<int> sent(3, static_cast<int>(rank));
    symmetric.broadcast<int>(size - 1, sent);
    REQUIRE((sent == std::vector<int>(3, static_cast<int>(size - 1))));
    std::vector<int> all(2 * size);
    symmetric.all_gather<int>(std::vector<int>(2, static_cast<int>(rank)), all, size);
    for (std::uint32_t of = 0; of < size; ++of)
        REQUIRE(all[2 * of] == static_cast<int>(of) && all[2 * of + 1] == static_cast<int>(of));
}

void windows_are_reduced_in_place(const Communicator &communicator, const SymmetricMemory &symmetric)
{
    constexpr std::size_t COUNT = 5000;
    const std::uint32_t rank = communicator.rank(), size = communicator.size();
    const auto window = symmetric.window_on_host(COUNT * sizeof(float));
    float *const mine = window.pointer<float>(rank);
    for (std::size_t i = 0; i < COUNT; ++i)
        mine[i] = static_cast<float>(i * (rank + 1));
    const std::uint64_t staged = symmetric.staged_calls();
    symmetric.all_reduce_on<float>(nullptr, mine, mine, COUNT);
    communicator.synchronize();
    symmetric.check_lane();
    REQUIRE(symmetric.staged_calls() == staged);
    const std::uint64_t sum = size * (size + 1) / 2;
    for (std::size_t i = 0; i < COUNT; ++i)
        REQUIRE(mine[i] == static_cast<float>(i * sum));
    barrier(communicator);
    // Every rank reads the part of every rank.
    const wholemem::WindowRef parts = wholemem::window_ref(window);
    for (std::uint32_t of = 0; of < size; ++of)
        REQUIRE(window.part(of).size() == COUNT * sizeof(float) && window.pointer<float>(of)[2] == static_cast<float>(2 * sum));
    REQUIRE(parts.exists());
    barrier(communicator);
}

void small_data_is_exchanged(const Communicator &communicator)
{
    const std::uint32_t rank = communicator.rank(), size = communicator.size();
    const auto all = communicator.all_gather<std::uint64_t>(rank * 7);
    for (std::uint32_t of = 0; of < size; ++of)
        REQUIRE(all[of] == of * 7);
    std::vector<char> text = rank == 0 ? std::vector<char>{'a', 'b'} : std::vector<char>(2);
    communicator.broadcast<char>(0, text);
    REQUIRE((text == std::vector<char>{'a', 'b'}));
    std::vector<std::uint32_t> sent;
    for (std::uint32_t to = 0; to < size; ++to)
        sent.push_back(100 * rank + to);
    const auto received = communicator.all_to_all<std::uint32_t>(sent);
    for (std::uint32_t from = 0; from < size; ++from)
        REQUIRE(received[from] == 100 * from + rank);
    REQUIRE(communicator.timeout() > std::chrono::seconds(1));
    const int own = rank == 1 ? -1 : fileno(stderr);
    const auto descriptors = communicator.all_gather_fd(own);
    for (std::uint32_t of = 0; of < size; ++of) {
        REQUIRE((descriptors[of] == -1) == (of == 1));
        REQUIRE(of == 1 || close(descriptors[of]) == 0);
    }
    const auto half = communicator.split(rank % 2);
    REQUIRE(half.size() == (size + 1 - rank % 2) / 2 && half.rank() == rank / 2);
    half.barrier();
}

void graphs_repeat_captured_calls(const Communicator &communicator, const SymmetricMemory &symmetric)
{
    const std::uint32_t rank = communicator.rank(), size = communicator.size();
    const auto window = symmetric.window_on_host(64 * sizeof(float));
    float *const mine = window.pointer<float>(rank);
    std::fill(mine, mine + 64, 1.0F);
    try {
        wholemem::Graph::capture(communicator, nullptr, [](wholemem::Stream) { throw std::range_error("of the program"); });
        REQUIRE(false && "the exception is lost");
    } catch (const std::range_error &error) {
        REQUIRE(std::strcmp(error.what(), "of the program") == 0);
    }
    const auto graph = wholemem::Graph::capture(
        communicator, nullptr, [&](wholemem::Stream stream) { symmetric.all_reduce_on<float>(stream, mine, mine, 64); });
    barrier(communicator);
    graph.launch(nullptr);
    graph.launch(nullptr);
    communicator.synchronize();
    symmetric.check_lane();
    REQUIRE(mine[63] == static_cast<float>(size) * static_cast<float>(size));
    barrier(communicator);
}

} // namespace

void check_rank(const Communicator &communicator)
{
    const bool is_host = communicator.device().info().backend == wholemem::BackendKind::Host;
    small_data_is_exchanged(communicator);
    tables(communicator, is_host);
    bytes_are_shared(communicator);
    const auto symmetric = SymmetricMemory::create(communicator);
    host_values_are_reduced(communicator, symmetric);
    windows_are_reduced_in_place(communicator, symmetric);
    // The step runs the tests with a store; the GPU bundle runs them without one.
    if (std::getenv("WHOLEMEM_SOCKET") != nullptr) {
        objects_are_shared(communicator);
        changes_are_watched(communicator);
    }
    // The default stream of CUDA cannot be captured.
    if (is_host)
        graphs_repeat_captured_calls(communicator, symmetric);
    barrier(communicator);
}
