// When the instructions of a warp could be issued if it had its quarter of a multiprocessor to itself: what docs/gpu_model.md calls the
// block's latency. Within a basic block an instruction is issued as soon as its operands are there, as ptxas schedules it; a basic block
// begins when the last instruction of the one before it has been issued, and a barrier ends when the last warp has arrived.
//
// Waits at mbarriers and for wgmma are not timed.
#pragma once
#include <algorithm>
#include <array>
#include <vector>

namespace ptx {

// Cycles until the data of an access are there, by where they were.
constexpr float l1_cycles = 42, l2_cycles = 280, dram_cycles = 600;

constexpr float barrier_cycles = 20;  // from the last arrival to the first instruction behind it

struct WarpTiming {
    std::vector<float> ready;        // (slots) the cycle in which a register's value is there
    float begin = 0;                 // the cycle in which the basic block begins
    float issued = 0;                // the last cycle in which an instruction was issued
    std::array<float, 8> work = {};  // cycles of each unit (Unit) since then
    float memory = 0;                // of the instruction that runs: the cycles of its farthest data
    float copied = 0;                // when the cp.async of the group that is not committed yet have landed
    std::vector<float> groups;       // when those of committed groups have

    void end_basic_block() {
        begin = std::max({begin, issued, begin + *std::max_element(work.begin(), work.end())});
        issued = begin, work = {};
    }
    void commit() { groups.push_back(copied), copied = 0; }
    void wait(size_t most) {  // until at most this number of the most recent groups is in flight
        for (size_t n = 0; n + most < groups.size(); n++) begin = std::max(begin, groups[n]);
        if (groups.size() > most) groups.erase(groups.begin(), groups.end() - std::ptrdiff_t(most));
    }
};

struct Warp;
struct Instruction;
struct Count;
// After an instruction has run; `before`: its count before it.
void time_instruction(Warp &w, const Instruction &i, const Count &before);
}  // namespace ptx
