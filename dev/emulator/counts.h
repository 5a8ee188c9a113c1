// What kernels ask of a GPU's memory and of their warps, counted in the emulator without nvcc: the n-th time that the lanes of a warp execute one
// load or store, their addresses are one request. Kernel files must be built with -fsanitize=thread, which reports each load and store (simt.cpp).
//
// Counted are accesses to device memory and to shared memory, and what simt.h defines: shuffles, votes, mma, ldmatrix, barriers. Arithmetic is
// not: g++ compiles it for the CPU. Where lanes go through a branch in different iterations of a loop, their accesses are counted
// as if they met.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "../../llmc/core/device.h"

struct KernelCounts {
    struct Executed {
        uint64_t warps = 0, lanes = 0;
        void operator+=(const Executed &other) { warps += other.warps, lanes += other.lanes; }
    };
    std::string name;
    // Of the last launch: blocks, their threads, their shared memory in bytes.
    uint64_t launches = 0, blocks = 0, threads = 0, shared = 0;
    Executed loads, stores, shared_loads, shared_stores;
    uint64_t sectors = 0;                           // of device memory, in `loads` and `stores`
    uint64_t wavefronts = 0, least_wavefronts = 0;  // of shared memory (transactions.h)
    uint64_t barriers = 0;                          // times that a block has met
    std::map<std::string, Executed> operations;     // shuffles and their like, by name

    uint64_t conflicts() const { return wavefronts - least_wavefronts; }
    Executed all() const {  // accesses and operations
        Executed sum;
        for (const Executed &x : {loads, stores, shared_loads, shared_stores}) sum += x;
        for (const auto &[name, x] : operations) sum += x;
        return sum;
    }
    void operator+=(const KernelCounts &other);
};

inline namespace CUDA_BACKEND {
namespace simt {
// Counts the launches made during work(), in order of their first launch. Races are not looked for meanwhile.
std::vector<KernelCounts> counted(const std::function<void()> &work);

class BlockCounts {  // of the blocks that one CPU thread runs
  public:
    struct Access {
        const void *pc;
        bool shared, write;
        uint64_t address;  // in shared memory from its first byte
        uint32_t bytes;
    };
    void start(size_t warps);
    void access(const Access &access, int warp, int lane, unsigned lanes_of_warp);
    void operation(const char *name, int lanes);
    void barrier() { counts_.barriers++; }
    void end_block();  // requests in which some lanes took no part are complete
    KernelCounts take();

  private:
    struct Request {
        unsigned lanes = 0;
        uint32_t bytes = 0;
        std::array<uint64_t, 32> address;
    };
    struct OfWarp {
        std::array<size_t, 32> executed{};  // by lane
        size_t first = 0;                   // number of the oldest open request
        std::deque<Request> open;
    };
    struct Site {  // a load or store in the program
        bool shared, write;
        std::vector<OfWarp> warps;
    };
    std::unordered_map<const void *, Site> sites_[2];  // in device memory, in shared memory
    size_t warps_ = 0;
    KernelCounts counts_;

    void complete(const Site &site, const Request &request);
};
}  // namespace simt
}  // namespace CUDA_BACKEND
