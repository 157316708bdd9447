// Writes an object to a store, and reads it without a copy.
//
//     wholemem serve &
//     ./store_client

#include <algorithm>
#include <chrono>
#include <cstdio>

#include <wholemem/wholemem.hpp>

int main()
try {
    const auto store = wholemem::StoreClient::connect();
    const auto draft = store.create("example", 1 << 20);
    const auto memory = draft.bytes();
    std::fill(memory.begin(), memory.end(), std::byte{7});
    const auto sealed = draft.seal(); // from now on immutable, and found by its name

    const auto object = store.get_object("example", std::chrono::seconds(5)); // mapped, not copied
    const auto bytes = object.bytes();
    const bool is_right = bytes.size() == (1 << 20) && std::count(bytes.begin(), bytes.end(), std::byte{7}) == (1 << 20);
    std::printf("object %s of %zu bytes, %s\n", object.entry().name, bytes.size(), is_right ? "as written" : "with other bytes");
    store.remove("example");
    return is_right && object.entry().id == sealed.id ? 0 : 1;
} catch (const wholemem::Error &error) {
    std::fprintf(stderr, "error: %s: %s\n", error.name(), error.what());
    return 1;
}
