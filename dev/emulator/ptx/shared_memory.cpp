#include "shared_memory.h"

#include <algorithm>

#include "../transactions.h"

namespace ptx {
namespace {

constexpr uint32_t rank_shift = 24;

template <class F> void each_cell(Block &block, uint32_t offset, uint32_t bytes, F f) {
    const uint32_t width = uint32_t(block.running->kernel->cell_bytes);
    for (uint32_t n = offset / width; n <= (offset + bytes - 1) / width; n++) f(block.cells[n], n);
}

// True if all that an agent did up to `time` has happened before the next instruction of `w`.
bool before(const Warp &w, size_t agent, uint32_t time) { return time <= w.view.known.of(agent); }

std::string name_of(const Warp &w, size_t agent) {
    const Cluster &cluster = *w.block->cluster;
    const bool group = agent >= cluster.warps;
    const size_t of_block = group ? ceil_div(w.block->warps.size(), size_t(4)) : w.block->warps.size();
    const size_t number = group ? agent - cluster.warps : agent, rank = number / of_block;
    return (group ? format("wgmma of warpgroup %zu", number % of_block) : format("warp %zu", number % of_block)) +
           (rank == w.block->rank ? "" : format(" of block %zu of the cluster", rank));
}
std::string writer_of(const Warp &w, const Cell &cell) {
    const Cluster &cluster = *w.block->cluster;
    const size_t agent = cell.thread / lanes, of_block = w.block->warps.size(), rank = agent / of_block;
    if (agent >= cluster.warps) return format("the copy of line %u", cell.line);
    return format("thread %zu", cell.thread - rank * of_block * lanes) +
           (rank == w.block->rank ? "" : format(" of block %zu of the cluster", rank));
}
// Returns the synchronisation that was missing between a write and an access by another agent.
const char *between(const Warp &w, const Cell &cell) {
    return cell.thread / lanes >= w.block->cluster->warps ? "with no wait for its mbarrier in between"
                                                          : "with no barrier in between";
}

// Checks the order of this access and the last write of the cell.
void check_order_after_write(Warp &w, int lane, uint32_t address, const Cell &cell, const char *does) {
    const size_t writer = cell.thread / lanes;
    if (!cell.written) return;
    if (writer != w.agent && !before(w, writer, cell.written))
        w.fail(lane, format("%s %s, which %s wrote, %s", does, shared_text(address).c_str(), writer_of(w, cell).c_str(),
                            between(w, cell)));
    const bool other_lane = writer == w.agent && int(cell.thread % lanes) != lane;
    if (other_lane && cell.written >= w.synced)
        w.fail(lane, format("%s %s, which lane %u wrote, with no __syncwarp in between", does, shared_text(address).c_str(),
                            cell.thread % lanes));
}

void check_here(Warp &w, int lane, uint32_t address, const Cell &cell, const char *does) {
    if (cell.mbarrier) w.fail(lane, format("%s %s, which is an mbarrier", does, shared_text(address).c_str()));
    if (cell.in_flight)
        w.fail(lane, format("%s %s before the copy to it has landed, which line %u started", does, shared_text(address).c_str(),
                            cell.line));
    if (!cell.written) w.fail(lane, format("%s %s, which nobody wrote", does, shared_text(address).c_str()));
    check_order_after_write(w, lane, address, cell, does);
}
void check_read(Warp &w, int lane, uint32_t address, Block &block, Cell &cell, uint32_t n, const char *does) {
    check_here(w, lane, address, cell, does);
    block.reads[n * w.block->cluster->readers + w.agent] = w.time();
}

void check_write(Warp &w, int lane, uint32_t address, Block &block, const Cell &cell, uint32_t n) {
    const size_t readers = w.block->cluster->readers;
    if (cell.mbarrier) w.fail(lane, "writes to " + shared_text(address) + ", which is an mbarrier");
    if (cell.in_flight)
        w.fail(lane, format("writes to %s while a copy to it is on its way, which line %u started", shared_text(address).c_str(),
                            cell.line));
    if (cell.reading)
        w.fail(lane, format("overwrites %s, which the operation of line %u still reads: it has not been waited for",
                            shared_text(address).c_str(), cell.line));
    if (cell.written && !before(w, cell.thread / lanes, cell.written))
        w.fail(lane, format("overwrites %s, which %s wrote, %s", shared_text(address).c_str(), writer_of(w, cell).c_str(),
                            between(w, cell)));
    for (size_t reader = 0; reader < readers; reader++)
        if (reader != w.agent && !before(w, reader, block.reads[n * readers + reader]))
            w.fail(lane, format("overwrites %s, which %s reads, with no barrier in between", shared_text(address).c_str(),
                                name_of(w, reader).c_str()));
    if (cell.updated >= w.synced && cell.updated && cell.updater / lanes == w.agent &&
        (cell.several || int(cell.updater % lanes) != lane))
        w.fail(lane, format("overwrites %s, which an atomic of another lane updates, with no __syncwarp in between",
                            shared_text(address).c_str()));
}

// The async proxy sees ordinary stores, which go through the generic proxy, only after a fence by the writing thread or by a thread that has since
// synchronised with it.
void check_proxy(Warp &w, int lane, uint32_t address, const Cell &cell, const char *does) {
    const size_t writer = cell.thread / lanes;
    if (cell.written && writer < w.block->cluster->warps && cell.written > w.view.proxied.of(writer))
        w.fail(lane, format("%s %s through the async proxy, which %s wrote through the generic one, with no fence.proxy.async in "
                            "between",
                            does, shared_text(address).c_str(), writer_of(w, cell).c_str()));
}

void mark_written(Warp &w, int lane, Cell &cell) {
    cell.written = w.time();
    cell.thread = uint32_t(w.agent) * lanes + uint32_t(lane);
}
}  // namespace

std::string shared_text(uint32_t address) {
    const uint32_t rank = address >> rank_shift, offset = (address & ((1u << rank_shift) - 1)) - shared_base;
    return format("shared memory + %d", int(offset)) + (rank ? format(" of block %u of the cluster", rank - 1) : "");
}

SharedPlace place_of(Warp &w, int lane, uint32_t address) {
    const uint32_t rank = address >> rank_shift, offset = (address & ((1u << rank_shift) - 1)) - shared_base;
    if (!rank) return {*w.block, offset};
    Cluster &cluster = *w.block->cluster;
    if (rank > cluster.blocks.size())
        w.fail(lane, format("%#x is an address in block %u of a cluster of %zu", address, rank - 1, cluster.blocks.size()));
    Block &block = cluster.blocks[rank - 1];
    if (block.ended) w.fail(lane, "accesses " + shared_text(address) + ", which has ended");
    return {block, offset};
}

uint8_t *shared_place(Warp &w, int lane, uint32_t address, uint32_t bytes) {
    const SharedPlace place = place_of(w, lane, address);
    std::vector<uint8_t> &shared = place.block.shared;
    if (place.offset >= shared.size() || place.offset + bytes > shared.size())
        w.fail(lane,
               format("%u bytes at %d of shared memory, of which the block has %zu", bytes, int(place.offset), shared.size()));
    if (address % bytes) w.fail(lane, format("%s is not aligned to %u", shared_text(address).c_str(), bytes));
    return shared.data() + place.offset;
}

void note_read(Warp &w, int lane, uint32_t address, uint32_t bytes) {
    const auto [block, offset] = place_of(w, lane, address);
    each_cell(block, offset, bytes,
              [&, &block = block](Cell &cell, uint32_t n) { check_read(w, lane, address, block, cell, n, "reads"); });
}
// Treated as a read: reads and other atomics may be concurrent, writes may not.
void note_update(Warp &w, int lane, uint32_t address, uint32_t bytes) {
    const auto [block, offset] = place_of(w, lane, address);
    each_cell(block, offset, bytes, [&, &block = block](Cell &cell, uint32_t n) {
        check_read(w, lane, address, block, cell, n, "updates");
        const uint32_t thread = uint32_t(w.agent) * lanes + uint32_t(lane);
        const bool again = cell.updated >= w.synced && cell.updated && cell.updater / lanes == w.agent;
        cell.several = again && (cell.several || cell.updater != thread);
        cell.updated = w.time(), cell.updater = thread;
    });
}
void note_write(Warp &w, int lane, uint32_t address, uint32_t bytes) {
    const auto [block, offset] = place_of(w, lane, address);
    each_cell(block, offset, bytes, [&, &block = block](Cell &cell, uint32_t n) {
        check_write(w, lane, address, block, cell, n);
        mark_written(w, lane, cell);
    });
}
void note_departure(Warp &w, int lane, uint32_t address, uint32_t bytes) {
    const auto [block, offset] = place_of(w, lane, address);
    each_cell(block, offset, bytes, [&, &block = block](Cell &cell, uint32_t n) {
        check_write(w, lane, address, block, cell, n);
        cell.in_flight++, cell.line = uint32_t(w.instruction->line);
    });
}
void note_landing(Warp &w, int lane, uint32_t address, uint32_t bytes) {
    const auto [block, offset] = place_of(w, lane, address);
    each_cell(block, offset, bytes, [&](Cell &cell, uint32_t) {
        cell.in_flight--;
        mark_written(w, lane, cell);
    });
}

void note_async_read(Warp &w, int lane, uint32_t address, uint32_t bytes) {
    const auto [block, offset] = place_of(w, lane, address);
    each_cell(block, offset, bytes, [&](Cell &cell, uint32_t) {
        check_here(w, lane, address, cell, "reads");
        check_proxy(w, lane, address, cell, "reads");
        cell.reading++, cell.line = uint32_t(w.instruction->line);
    });
}
void end_async_read(Warp &w, uint32_t address, uint32_t bytes, size_t reader, uint32_t time) {
    const auto [block, offset] = place_of(w, 0, address);
    each_cell(block, offset, bytes, [&, &block = block](Cell &cell, uint32_t n) {
        cell.reading--;
        block.reads[n * w.block->cluster->readers + reader] = time;
    });
}
void note_async_departure(Warp &w, int lane, uint32_t address, uint32_t bytes) {
    const auto [block, offset] = place_of(w, lane, address);
    each_cell(block, offset, bytes, [&, &block = block](Cell &cell, uint32_t n) {
        check_write(w, lane, address, block, cell, n);
        check_proxy(w, lane, address, cell, "overwrites");
        cell.in_flight++, cell.line = uint32_t(w.instruction->line);
    });
}
void note_async_landing(Block &block, uint32_t offset, uint32_t bytes, size_t mbarrier, uint32_t phase) {
    each_cell(block, offset, bytes, [&](Cell &cell, uint32_t) {
        cell.in_flight--;
        cell.written = phase, cell.thread = uint32_t(mbarrier) * lanes;
    });
}

void note_mbarrier(Warp &w, int lane, uint32_t address, bool exists) {
    const auto [block, offset] = place_of(w, lane, address);
    each_cell(block, offset, 8, [&](Cell &cell, uint32_t) { cell.mbarrier = exists, cell.written = 0; });
}

void check_end(Block &block) {
    if (block.cluster->blocks.size() == 1) return;
    View view;
    for (const Warp &w : block.warps) view.join(w.view);
    const size_t warps = block.cluster->warps, readers = block.cluster->readers;
    for (size_t n = 0; n < block.cells.size(); n++) {
        const Cell &cell = block.cells[n];
        const size_t writer = cell.thread / lanes;
        size_t late = readers;
        if (cell.written && writer < warps && cell.written > view.known.of(writer)) late = writer;
        for (size_t reader = 0; reader < readers; reader++)
            if (block.reads[n * readers + reader] > view.known.of(reader)) late = reader;
        Warp &last = block.warps[0];
        if (late < readers || cell.reading || cell.in_flight)
            last.fail(
                0, format("the block ends without a barrier behind the access of %s to its shared memory + %zu\n  fix: let the "
                          "cluster's blocks meet before they end",
                          late < readers ? name_of(last, late).c_str() : format("line %u", cell.line).c_str(),
                          n * size_t(block.running->kernel->cell_bytes)));
    }
}

void count_wavefronts(Warp &w, const uint32_t *addresses, uint32_t mask, uint32_t bytes) {
    const auto [all, least] = transactions::wavefronts(addresses, mask, bytes);
    Count &count = w.count();
    count.shared_requests++;
    count.wavefronts += all;
    count.least_wavefronts += least;
}

void count_joined(Warp &w, const uint32_t *addresses, uint32_t mask, uint32_t bytes, uint32_t words) {
    const uint32_t into = addresses[std::countr_zero(mask)] % 16;
    bool same = bytes == 4;
    Warp::each_lane(mask, [&](int l) { same = same && addresses[l] % 16 == into; });
    const auto load = [&](uint32_t from, uint32_t wide) {
        alignas(64) uint32_t at[lanes];
        for (int l = 0; l < lanes; l++) at[l] = addresses[l] + from;
        count_wavefronts(w, at, mask, wide);
    };
    if (same) each_wide_load(into / 4, words, [&](uint32_t from, uint32_t wide) { load(4 * from - into, 4 * wide); });
    else
        for (uint32_t n = 0; n < words; n++) load(n * bytes, bytes);
}

// ptxas unrolls a loop over a tile of shared memory, and merges loads of consecutive words into one load of 16 bytes.
void count_looped(Warp &w, LoopedLoad &load, const uint32_t *addresses, uint32_t mask, uint32_t words) {
    bool next = load.words % 4 && mask == load.mask, aligned = true;
    Warp::each_lane(mask, [&](int l) {
        next = next && addresses[l] == load.first[l] + 4 * load.words;
        aligned = aligned && addresses[l] % 16 == 0;
    });
    Count &count = w.count();
    if (!next) {
        load.words = 0, load.mask = mask, load.counted = {};
        std::copy_n(addresses, lanes, load.first);
        count.shared_requests++;
    }
    if (next || aligned) load.words += words;
    auto now = transactions::wavefronts(load.first, mask, 4 * std::bit_ceil(std::max(load.words, words)));
    now = {std::max(now.all, load.counted.all), std::max(now.least, load.counted.least)};
    count.wavefronts += now.all - load.counted.all;
    count.least_wavefronts += now.least - load.counted.least;
    load.counted = now;
}
}  // namespace ptx
