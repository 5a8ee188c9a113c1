#include "shared_memory.h"

#include <algorithm>

namespace ptx {
namespace {

template <class F> void each_cell(Block &block, uint32_t address, uint32_t bytes, F f) {
    const uint32_t width = uint32_t(block.running->kernel->cell_bytes), first = (address - shared_base) / width;
    for (uint32_t n = first; n <= (address - shared_base + bytes - 1) / width; n++) f(n);
}

// Whether all that warp `other` did up to a time has happened before what `w` does now.
bool before(const Warp &w, size_t other, uint32_t time) { return time <= w.block->clocks[size_t(w.number)][other]; }

std::string at(uint32_t address) { return format("shared memory + %u", address - shared_base); }

// Two accesses of one cell, this one and what `thread` wrote, with nothing that orders them.
void check_order_after_write(Warp &w, int lane, uint32_t address, const Cell &cell, const char *does) {
    const size_t own = size_t(w.number), writer = cell.thread / lanes;
    if (!cell.written) return;
    if (writer != own && !before(w, writer, cell.written))
        w.fail(lane, format("%s %s, which thread %u wrote, with no barrier in between", does, at(address).c_str(), cell.thread));
    const bool other_lane = writer == own && int(cell.thread % lanes) != lane;
    if (other_lane && cell.written == w.block->clocks[own][own])
        w.fail(lane, format("%s %s, which lane %u wrote, with no __syncwarp in between", does, at(address).c_str(),
                            cell.thread % lanes));
}

void check_read(Warp &w, int lane, uint32_t address, uint32_t n, const char *does) {
    Block &block = *w.block;
    const size_t own = size_t(w.number);
    const Cell &cell = block.cells[n];
    if (cell.in_flight) w.fail(lane, does + (" " + at(address)) + " before the cp.async to it has landed");
    if (!cell.written) w.fail(lane, does + (" " + at(address)) + ", which nobody wrote");
    check_order_after_write(w, lane, address, cell, does);
    block.reads[n * block.warps.size() + own] = block.clocks[own][own];
}

void check_write(Warp &w, int lane, uint32_t address, uint32_t n) {
    Block &block = *w.block;
    const Cell &cell = block.cells[n];
    const size_t warps = block.warps.size();
    if (cell.in_flight) w.fail(lane, "writes to " + at(address) + " while a cp.async to it is on its way");
    if (cell.written && !before(w, cell.thread / lanes, cell.written))
        w.fail(lane,
               format("overwrites %s, which thread %u wrote, with no barrier in between", at(address).c_str(), cell.thread));
    for (size_t reader = 0; reader < warps; reader++)
        if (reader != size_t(w.number) && !before(w, reader, block.reads[n * warps + reader]))
            w.fail(lane, format("overwrites %s, which warp %zu reads, with no barrier in between", at(address).c_str(), reader));
    const bool now = cell.updated && cell.updated == block.clocks[size_t(w.number)][size_t(w.number)];
    if (now && cell.updater / lanes == w.number && (cell.several || cell.updater % lanes != lane))
        w.fail(lane, format("overwrites %s, which an atomic of another lane updates, with no __syncwarp in between",
                            at(address).c_str()));
}

void mark_written(Warp &w, int lane, Cell &cell) {
    cell.written = w.block->clocks[size_t(w.number)][size_t(w.number)];
    cell.thread = uint16_t(w.number * lanes + lane);
}
}  // namespace

uint8_t *shared_place(Warp &w, int lane, uint32_t address, uint32_t bytes) {
    std::vector<uint8_t> &shared = w.block->shared;
    const uint32_t offset = address - shared_base;
    if (offset >= shared.size() || offset + bytes > shared.size())
        w.fail(lane, format("%u bytes at %d of shared memory, of which the block has %zu", bytes, int(offset), shared.size()));
    if (address % bytes) w.fail(lane, format("%s is not aligned to %u", at(address).c_str(), bytes));
    return shared.data() + offset;
}

void note_read(Warp &w, int lane, uint32_t address, uint32_t bytes) {
    each_cell(*w.block, address, bytes, [&](uint32_t n) { check_read(w, lane, address, n, "reads"); });
}
// As a read: reads and other atomics may happen beside it, and no write.
void note_update(Warp &w, int lane, uint32_t address, uint32_t bytes) {
    each_cell(*w.block, address, bytes, [&](uint32_t n) {
        check_read(w, lane, address, n, "updates");
        Cell &cell = w.block->cells[n];
        const uint16_t thread = uint16_t(w.number * lanes + lane);
        const uint32_t now = w.block->clocks[size_t(w.number)][size_t(w.number)];
        const bool again = cell.updated == now && cell.updater / lanes == w.number;
        cell.several = again && (cell.several || cell.updater != thread);
        cell.updated = now, cell.updater = thread;
    });
}
void note_write(Warp &w, int lane, uint32_t address, uint32_t bytes) {
    each_cell(*w.block, address, bytes, [&](uint32_t n) {
        check_write(w, lane, address, n);
        mark_written(w, lane, w.block->cells[n]);
    });
}
void note_departure(Warp &w, int lane, uint32_t address, uint32_t bytes) {
    each_cell(*w.block, address, bytes, [&](uint32_t n) {
        check_write(w, lane, address, n);
        w.block->cells[n].in_flight++;
    });
}
void note_landing(Warp &w, int lane, uint32_t address, uint32_t bytes) {
    each_cell(*w.block, address, bytes, [&](uint32_t n) {
        w.block->cells[n].in_flight--;
        mark_written(w, lane, w.block->cells[n]);
    });
}

void count_wavefronts(Warp &w, const uint32_t *addresses, uint32_t mask, uint32_t bytes) {
    const int lanes_at_once = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
    std::vector<uint32_t> all;
    size_t wavefronts = 0;
    for (int first = 0; first < lanes; first += lanes_at_once) {
        std::vector<uint32_t> words;
        for (int l = first; l < first + lanes_at_once; l++)
            for (uint32_t k = 0; mask >> l & 1 && k < std::max(bytes / 4, 1u); k++) words.push_back(addresses[l] / 4 + k);
        std::sort(words.begin(), words.end());
        words.erase(std::unique(words.begin(), words.end()), words.end());
        size_t of_bank[32] = {};
        for (uint32_t word : words) of_bank[word % 32]++;
        wavefronts += *std::max_element(of_bank, of_bank + 32);
        all.insert(all.end(), words.begin(), words.end());
    }
    std::sort(all.begin(), all.end());
    const size_t different = size_t(std::unique(all.begin(), all.end()) - all.begin());
    Count &count = w.count();
    count.wavefronts += wavefronts;
    count.least_wavefronts += std::min(wavefronts, ceil_div(different, 32));
}
}  // namespace ptx
