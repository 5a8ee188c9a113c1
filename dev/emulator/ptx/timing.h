// The issue time of each instruction of a warp that has an SM sub-partition to itself. dev/emulator/gpu_model.md calls the time of the last instruction the
// block's latency. Within a basic block an instruction issues as soon as its operands are ready, with two exceptions: a load never issues before an
// earlier store, and an instruction issues at most 16 instructions early, because ptxas moves none further. A basic block begins when the last
// instruction of the previous one has issued. A barrier ends when the last warp has arrived. Asynchronous work goes through a queue of the SM, and a
// warp that waits for such work resumes in the cycle in which the work ends.
#pragma once
#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <vector>

#include "interpreter.h"

namespace ptx {

// Cycles until the data of an access arrive, by the level of memory that holds them.
constexpr float l1_cycles = 42, l2_cycles = 280, dram_cycles = 600;

constexpr float barrier_cycles = 20;   // from the last arrival to the first instruction after the barrier
constexpr float cluster_cycles = 200;  // from one block of a cluster to another
constexpr float bulk_bytes = 64;       // per cycle, between TMA and shared memory

// A unit that several warps share. The interpreter does not run warps in the order of their clocks, so new work fills the gaps between busy
// intervals, from the cycle in which the work is issued.
class Queue {
  public:
    float add(float from, float cycles) {  // returns the cycle in which the work ends
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
struct Queues {                   // of a block that has an SM to itself
    std::array<Queue, 4> tensor;  // one per SM sub-partition
    Queue copies;                 // TMA
};

struct WarpTiming {
    std::vector<float> ready;          // (slots) the cycle from which a register's value can be used
    float begin = 0;                   // the cycle in which the basic block begins
    float issued = 0;                  // the last cycle in which an instruction was issued
    std::array<float, units> work{};   // cycles of each unit (Unit) since then
    float memory = 0;                  // cycles until the last data of the current instruction arrive
    std::array<float, 16> order = {};  // for each of the last 16 instructions: the latest issue cycle so far
    size_t instructions = 0;
    float stored = 0;           // the cycle of the last store to device memory
    int iterations = 0;         // of the unrolled loop that the warp is in
    float copied = 0;           // the cycle in which all cp.async since the last commit have landed
    std::vector<float> groups;  // for each committed group: the cycle in which its cp.async have landed

    float now() const { return std::max({begin, issued, begin + *std::max_element(work.begin(), work.end())}); }
    void end_basic_block() { begin = issued = now(), work = {}; }
    void commit() { groups.push_back(copied), copied = 0; }
    void wait(size_t most) {  // until at most the `most` latest groups are in flight
        for (size_t n = 0; n + most < groups.size(); n++) begin = std::max(begin, groups[n]);
        if (groups.size() > most) groups.erase(groups.begin(), groups.end() - std::ptrdiff_t(most));
    }
};

struct Warp;
struct Instruction;
struct Count;
// Each starts a warp's part of a wgmma, or a copy by TMA, and returns the cycle in which it ends.
float time_wgmma(Warp &w, const Instruction &i);
float time_bulk_copy(Warp &w, size_t bytes, float latency);

// Advances the warp's clock to `cycle`, the end of a copy, a product or another warp's work for which this warp waits.
void wait_until(Warp &w, float cycle);
// With PTX_TIMELINE=FILE in the environment, appends a line to the file: kernel, block, warp, activity, first and last cycle.
void note_time(const Warp &w, const char *what, float from, float to);

// Called after each instruction. `before` is its count before the instruction ran.
void time_instruction(Warp &w, const Instruction &i, const Count &before);
void time_control(Warp &w, const Instruction &i, bool taken);
}  // namespace ptx
