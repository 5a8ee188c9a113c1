#include "prediction.h"

#include <algorithm>
#include <cmath>
#include <fstream>

namespace ptx {

// Rates from data sheets, the CUDA Programming Guide ("Arithmetic Instructions") and measurements; dev/emulator/gpu_model.md gives the source of each figure.
// ptxas merges some instructions, integer ones in particular, so the rates in PTX instructions are higher than the machine's 4 and 2. Tensor: a
// product of m16n8k16 is 4096 FLOP. On an H100 mma.sync reaches about 62 % of the data sheet's rate, which is wgmma's.
constexpr double issue = 4 / 0.8, integer = 2 / 0.75;
const std::array<Gpu, 4> gpus = {{
    // name, multiprocessors, clock, DRAM, L2, L2 by TMA, clock with wgmma, {issue, integer, FP32, FP64, special, convert, tensor, wgmma, load/store,
    // shared}, warps, blocks, shared memory
    {"H100", 132, 1.755e9, 2.98e12, 7.0e12, 10e12, 0.81, {issue, integer, 4, 2, 0.5, 2, 0.62, 1, 1, 1}, 64, 32, 228 * 1024},
    {"H200", 132, 1.755e9, 4.26e12, 7.0e12, 10e12, 0.81, {issue, integer, 4, 2, 0.5, 2, 0.62, 1, 1, 1}, 64, 32, 228 * 1024},
    {"A100", 108, 1.41e9, 1.81e12, 4.0e12, 4.0e12, 1, {issue, integer, 2, 1, 0.5, 0.5, 0.5, 1, 1, 1}, 64, 32, 164 * 1024},
    {"RTX 4090",
     128,
     2.52e9,
     0.90e12,
     4.0e12,
     4.0e12,
     1,
     {issue, integer, 4, 1.0 / 16, 0.5, 2, 0.125, 1, 0.5, 1},
     48,
     24,
     100 * 1024},
}};

namespace {
constexpr const char *unit_names[units] = {"issue",   "integer", "FP32",  "FP64",       "special",
                                           "convert", "tensor",  "wgmma", "load/store", "shared"};
constexpr double launch_seconds = 2.5e-6;
// Exponents of the p-norms that combine times: 1 would be the sum of the parts, infinity the maximum. Work and latency overlap; units that are busy
// at the same time, memory included, slow each other down. The latency of blocks with wgmma already contains the queues of tensor cores and TMA.
constexpr double overlap = 2, units_overlap = 5, asynchronous = 8;
constexpr double busy_memory = 1.3;  // latency under load, relative to microbenchmarks with nothing else in flight

double norm(double exponent, double a, double b) { return std::pow(std::pow(a, exponent) + std::pow(b, exponent), 1 / exponent); }

// A priority queue of places for blocks: the SMs, or all their slots for resident blocks. The next block goes to the place with the least work.
class Places {
  public:
    explicit Places(size_t count) {
        for (size_t n = 0; n < count; n++) heap_.emplace_back(0.0, n);
    }
    // f(place) returns the place's work including the block.
    template <class F> void take(F f) {
        std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
        heap_.back().first = f(heap_.back().second);
        std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
    }
    double longest() const { return std::max_element(heap_.begin(), heap_.end())->first; }

  private:
    std::vector<std::pair<double, size_t>> heap_;  // (work, number), the least first
};
}  // namespace

// Assigns blocks in order, each to the SM with the least work. The units of an SM work concurrently, so the busiest unit determines its time. A block
// also occupies a slot for its latency, and the fullest slot is another bound. The launch ends with the last SM.
Prediction predict(const LaunchWork &work, const Gpu &gpu) {
    const double dram = double(work.traffic.read + work.traffic.written) / gpu.dram,
                 l2 = double(work.traffic.l2 - work.traffic.bulk) / gpu.l2 + double(work.traffic.bulk) / gpu.bulk;
    Prediction most = {dram, "DRAM"};
    const auto limit = [&](double seconds, const char *bound) {
        if (seconds > most.seconds) most = {seconds, bound};
    };
    limit(l2, "L2");

    const auto busiest = [](const Demand &d) { return size_t(std::max_element(d.begin(), d.end()) - d.begin()); };
    const size_t grid = work.launch.grid.count(), n = size_t(gpu.multiprocessors);
    const int resident = resident_blocks(work.launch, work.registers, gpu);
    if (resident < 1) return {INFINITY, "too large"};
    std::vector<Demand> cycles(n, Demand{});  // of each unit
    std::vector<double> waited(n * size_t(resident), 0.0);
    Places multiprocessors(n), residents(waited.size());
    for (size_t b = 0; b < grid; b++) {
        const BlockWork &block = work.blocks[b * work.blocks.size() / grid];
        multiprocessors.take([&](size_t m) {
            for (size_t u = 0; u < units; u++) cycles[m][u] += block.demand[u] / gpu.rate[u];
            return cycles[m][busiest(cycles[m])];
        });
        residents.take([&](size_t r) { return waited[r] += block.latency; });
    }
    const bool wgmma = std::any_of(cycles.begin(), cycles.end(), [](const Demand &d) { return d[size_t(Unit::wgmma)] > 0; });
    const double clock = gpu.clock * (wgmma ? gpu.sustained : 1);
    double together = 0;
    for (const Demand &of_units : cycles) {
        limit(of_units[busiest(of_units)] / clock, unit_names[busiest(of_units)]);
        double seconds = norm(units_overlap, dram, l2);
        for (const double unit : of_units) seconds = norm(units_overlap, seconds, unit / clock);
        together = std::max(together, seconds);
    }
    const double latency = residents.longest() / clock * (wgmma ? 1 : busy_memory);
    const double both = wgmma ? norm(asynchronous, most.seconds, latency) : norm(overlap, together, latency);
    return {launch_seconds + both, latency > most.seconds ? "latency" : most.bound};
}

// "... Compiling entry function 'NAME' for 'sm_90'", then "... N bytes spill stores ...", then "... Used N registers ..."
std::map<std::string, MachineCode> read_ptxas(const std::string &path) {
    std::map<std::string, MachineCode> all;
    MachineCode *now = nullptr;
    std::ifstream in(path);
    for (std::string line; std::getline(in, line);) {
        const auto number_before = [&](const char *what) {
            const size_t end = line.find(what);
            return end == std::string::npos ? size_t(0) : std::stoul(line.substr(line.find_last_of(" ,", end - 1) + 1));
        };
        if (const size_t at = line.find("entry function '"); at != std::string::npos)
            now = &all[line.substr(at + 16, line.find('\'', at + 16) - at - 16)];
        if (!now) continue;
        now->spilled += number_before(" bytes spill stores");
        if (const size_t at = line.find("Used "); at != std::string::npos) now->registers = std::stoi(line.substr(at + 5));
    }
    return all;
}

// A warp gets registers in units of 256; the system takes 1 KB of shared memory per block.
int resident_blocks(const Launch &launch, int registers, const Gpu &gpu) {
    const int warps = int(ceil_div(launch.threads.count(), size_t(lanes))),
              of_warp = int(round_up(size_t(std::max(registers, 1)) * 32, 256));
    const int blocks = std::min({gpu.blocks, gpu.warps / warps, int(registers_of_multiprocessor) / (of_warp * warps)});
    return std::min(blocks, int(gpu.shared / (launch.shared + 1024)));
}
double occupancy(const Launch &launch, int registers, const Gpu &gpu) {
    return double(resident_blocks(launch, registers, gpu)) * double(ceil_div(launch.threads.count(), size_t(lanes))) / gpu.warps;
}
}  // namespace ptx
