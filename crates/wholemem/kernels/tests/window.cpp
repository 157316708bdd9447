// Tests on the host how windows, lanes and packets are laid out in memory. The requests of wholemem's own kernels are only
// compiled: the header asserts their layout.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "ops/abi.cuh"
#include "wholemem/ll.cuh"
#include "wholemem/window.cuh"

namespace {

using wholemem::LaneRef;
using wholemem::WindowRef;
using wholemem::u32;
using wholemem::u64;

void require(bool held, const char *what, u64 a, u64 b)
{
    if (held)
        return;
    std::fprintf(stderr, "%s: %llu, %llu\n", what, a, b);
    std::exit(1);
}

void windows_find_every_part()
{
    const WindowRef none = WindowRef();
    require(!none.exists(), "there is a window", 0, 0);
    std::vector<std::vector<int> > parts(5, std::vector<int>(8));
    std::vector<u64> table;
    for (std::size_t rank = 0; rank < parts.size(); ++rank)
        table.push_back((u64)(std::uintptr_t)parts[rank].data());
    WindowRef tabled = WindowRef();
    tabled.table = (u64)(std::uintptr_t)table.data();
    WindowRef flat = WindowRef();
    flat.base = 4096;
    flat.stride = 1 << 20;
    require(tabled.exists() && flat.exists(), "there is no window", 0, 0);
    for (u32 rank = 0; rank < parts.size(); ++rank) {
        require(tabled.pointer<int>(rank) == parts[rank].data(), "a part is elsewhere", rank, 0);
        require(tabled.from(8).pointer<int>(rank) == parts[rank].data() + 2, "a part of one is elsewhere", rank, 8);
        require(flat.address(rank) == 4096 + ((u64)rank << 20), "a flat part is elsewhere", rank, flat.address(rank));
        require(flat.from(24).address(rank) == flat.address(rank) + 24, "a flat part of one is elsewhere", rank, 24);
    }
}

// Tests that the signals and buffers in the memory of a lane (a sequence of collective calls) do not overlap and are
// inside that memory, by marking every byte of each.
void lanes_keep_things_apart(u32 ranks)
{
    LaneRef lane = LaneRef();
    lane.ranks = ranks;
    lane.notices_at = (u64)wholemem::MAX_BLOCKS * ranks * wholemem::SIGNAL_STRIDE;
    lane.terms_at = lane.notices_at + 8 * ranks;
    lane.ll_at = lane.terms_at + 8 * (wholemem::TERMS_WORDS + wholemem::TERMS_WORDS % 2);
    lane.ll_len = 64;
    lane.staging_at = (lane.ll_at + 4 * ranks * lane.ll_len + 4095) / 4096 * 4096;
    lane.staging_len = 4096;
    lane.result_at = lane.staging_at + 2 * lane.staging_len;
    lane.stride = lane.result_at + lane.staging_len;
    lane.base = 1 << 12;
    std::vector<bool> marked(lane.stride * ranks);
    u64 bytes = 0;
    const auto mark = [&](u32 rank, u64 address, u64 len) {
        for (u64 at = address - lane.base; at < address - lane.base + len; ++at, ++bytes) {
            require(at / lane.stride == rank, "it is in another rank's memory", rank, at);
            require(!marked[at], "two things are at one place", rank, at);
            marked[at] = true;
        }
    };
    for (u32 rank = 0; rank < ranks; ++rank) {
        for (u32 peer = 0; peer < ranks; ++peer) {
            for (u32 block = 0; block < wholemem::MAX_BLOCKS; ++block)
                mark(rank, lane.signal(rank, block, peer), wholemem::SIGNAL_STRIDE);
            mark(rank, lane.notice(rank, peer), sizeof(u64));
            for (u32 parity = 0; parity < 2; ++parity)
                mark(rank, lane.packets(rank, parity, peer), 2 * lane.ll_len);
        }
        for (u32 parity = 0; parity < 2; ++parity)
            mark(rank, lane.staging(rank, parity), lane.staging_len);
        for (u32 word = 0; word < wholemem::TERMS_WORDS; ++word)
            mark(rank, lane.term(rank, word), sizeof(u64));
        mark(rank, lane.result(rank), lane.staging_len);
    }
    require(lane.result(ranks - 1) + lane.staging_len == lane.base + lane.stride * ranks, "the end is elsewhere", ranks, bytes);
}

void packets_carry_data_and_flag()
{
    const u32 words[] = {0, 1, 0x80000000u, 0xffffffffu, 0x12345678u};
    for (u32 data : words)
        for (u32 flag : words) {
            const u64 word = wholemem::packet_word(data, flag);
            require(wholemem::packet_data(word) == data && wholemem::packet_flag(word) == flag, "a packet differs", data, flag);
            require(word == (u64)flag * 0x100000000ull + data, "the flag is not above the data", data, flag);
        }
}

} // namespace

int main()
{
    windows_find_every_part();
    for (u32 ranks = 1; ranks < 10; ++ranks)
        lanes_keep_things_apart(ranks);
    packets_carry_data_and_flag();
    return 0;
}
