#include "prediction.h"

#include <algorithm>
#include <fstream>

namespace ptx {

// Data sheets and the CUDA Programming Guide, "Arithmetic Instructions"; docs/gpu_model.md says which figure is from where. Tensor: an mma does
// 4096 FLOP. On H100 mma.sync reaches about 62 % of the data sheet's rate for wgmma.
const std::array<Gpu, 3> gpus = {{
    // name, multiprocessors, clock, DRAM, L2, {issue, integer, FP32, FP64, special, convert, tensor, shared}, warps, blocks, shared memory
    {"H100", 132, 1.755e9, 3.35e12, 5.5e12, {4, 2, 4, 2, 0.5, 2, 0.62, 1}, 64, 32, 228 * 1024},
    {"A100", 108, 1.41e9, 2.039e12, 4.0e12, {4, 2, 2, 1, 0.5, 0.5, 0.5, 1}, 64, 32, 164 * 1024},
    {"RTX 4090", 128, 2.52e9, 1.008e12, 4.0e12, {4, 2, 4, 1.0 / 16, 0.5, 2, 0.125, 1}, 48, 24, 100 * 1024},
}};

namespace {
constexpr const char *unit_names[units] = {"issue", "integer", "FP32", "FP64", "special", "convert", "tensor", "shared"};
}

// Blocks go in order, each to the multiprocessor that has least to do; a multiprocessor is done when its busiest unit is.
Prediction predict(const std::vector<Demand> &demands, const Traffic &traffic, const Gpu &gpu) {
    Prediction most = {double(traffic.read + traffic.written) / gpu.dram, "DRAM"};
    const auto limit = [&](double seconds, const char *bound) {
        if (seconds > most.seconds) most = {seconds, bound};
    };
    limit(double(traffic.l2) / gpu.l2, "L2");
    std::vector<Demand> load(size_t(gpu.multiprocessors));
    const auto busiest = [](const Demand &d) { return size_t(std::max_element(d.begin(), d.end()) - d.begin()); };
    std::vector<std::pair<double, size_t>> heap;  // cycles, multiprocessor: the least first
    for (size_t n = 0; n < load.size(); n++) load[n] = {}, heap.emplace_back(0.0, n);
    for (const Demand &demand : demands) {
        std::pop_heap(heap.begin(), heap.end(), std::greater<>());
        auto &[cycles, n] = heap.back();
        for (size_t u = 0; u < units; u++) load[n][u] += demand[u] / gpu.rate[u];
        cycles = load[n][busiest(load[n])];
        std::push_heap(heap.begin(), heap.end(), std::greater<>());
    }
    for (const Demand &cycles : load) limit(cycles[busiest(cycles)] / gpu.clock, unit_names[busiest(cycles)]);
    return most;
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

namespace {
constexpr size_t of_system = 1024;  // bytes of shared memory that each block takes besides its own
}
bool holds(const Gpu &gpu, const Launch &launch) { return launch.shared + of_system <= gpu.shared; }

// Registers are given to a warp 256 at a time, out of 65536.
double occupancy(const Launch &launch, int registers, const Gpu &gpu) {
    const int warps = int(ceil_div(launch.threads.count(), size_t(lanes))),
              of_warp = int(round_up(size_t(std::max(registers, 1)) * 32, 256));
    int blocks = std::min({gpu.blocks, gpu.warps / warps, 65536 / (of_warp * warps)});
    blocks = std::min(blocks, int(gpu.shared / (launch.shared + of_system)));
    return double(blocks * warps) / gpu.warps;
}
}  // namespace ptx
