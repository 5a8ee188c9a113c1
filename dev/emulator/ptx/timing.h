// When the instructions of a warp could be issued if it had its quarter of a multiprocessor to itself: what docs/gpu_model.md calls the
// block's latency. Within a basic block an instruction is issued as soon as its operands are there, but for loads that follow a store and for
// what comes more than 16 instructions later, as far as ptxas moves it; a basic block
// begins when the last instruction of the one before it has been issued, and a barrier ends when the last warp has arrived. What is asynchronous
// goes through a queue of the multiprocessor, and whoever waits for it goes on in the cycle in which it has ended.
#pragma once
#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <vector>

#include "interpreter.h"

namespace ptx {

// Cycles until the data of an access are there, by where they were.
constexpr float l1_cycles = 42, l2_cycles = 280, dram_cycles = 600;

constexpr float barrier_cycles = 20;   // from the last arrival to the first instruction behind it
constexpr float cluster_cycles = 200;  // from one block of a cluster to another
constexpr float bulk_bytes = 64;       // a cycle, that TMA moves to or from shared memory

// A unit that works for several warps. They run here in another order than by their clocks, so work takes all the time that is free from a
// cycle on.
class Queue {
  public:
    float add(float from, float cycles) {  // returns the cycle in which it is done
        float begin = from, end = from;
        auto next = busy_.upper_bound(from);
        if (next != busy_.begin() && std::prev(next)->second >= from) {
            begin = std::prev(next)->first, end = std::prev(next)->second;
            busy_.erase(std::prev(next));
        }
        for (; next != busy_.end() && end + cycles >= next->first; next = busy_.erase(next))
            cycles -= next->first - end, end = next->second;
        return busy_[begin] = end + cycles;
    }

  private:
    std::map<float, float> busy_;  // intervals: from, to
};
struct Queues {                   // of a block, as if it had a multiprocessor to itself
    std::array<Queue, 4> tensor;  // of each quarter
    Queue copies;                 // TMA
};

struct WarpTiming {
    std::vector<float> ready;          // (slots) the cycle in which a register's value is there
    float begin = 0;                   // the cycle in which the basic block begins
    float issued = 0;                  // the last cycle in which an instruction was issued
    std::array<float, units> work{};   // cycles of each unit (Unit) since then
    float memory = 0;                  // of the instruction that runs: the cycles of its farthest data
    std::array<float, 16> order = {};  // the last cycle of an issue, up to each of the last instructions
    size_t instructions = 0;
    float stored = 0;           // the cycle of the last store to device memory
    int iterations = 0;         // of the unrolled loop that the warp is in
    float copied = 0;           // when the cp.async of the group that is not committed yet have landed
    std::vector<float> groups;  // when those of committed groups have

    float now() const { return std::max({begin, issued, begin + *std::max_element(work.begin(), work.end())}); }
    void end_basic_block() { begin = issued = now(), work = {}; }
    void commit() { groups.push_back(copied), copied = 0; }
    void wait(size_t most) {  // until at most this number of the most recent groups is in flight
        for (size_t n = 0; n + most < groups.size(); n++) begin = std::max(begin, groups[n]);
        if (groups.size() > most) groups.erase(groups.begin(), groups.end() - std::ptrdiff_t(most));
    }
};

struct Warp;
struct Instruction;
struct Count;
// The cycles in which a warp's part of a wgmma, or a copy by TMA, has ended that starts now.
float time_wgmma(Warp &w, const Instruction &i);
float time_bulk_copy(Warp &w, size_t bytes, float latency);

// Waits until a cycle, for what copies, products or other warps do.
void wait_until(Warp &w, float cycle);
// With PTX_TIMELINE=FILE in the environment: appends a line with kernel, block, warp, what it does, and the cycles from and to which.
void note_time(const Warp &w, const char *what, float from, float to);

// After an instruction has run; `before`: its count before it.
void time_instruction(Warp &w, const Instruction &i, const Count &before);
void time_control(Warp &w, const Instruction &i, bool taken);
}  // namespace ptx
