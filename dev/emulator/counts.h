// Counts of memory requests and warp operations, taken by the emulator without nvcc. The addresses of all lanes of a warp at their n-th execution of
// a load or store form one request. Kernel files must be built with -fsanitize=thread, which reports each load and store (simt.cpp).
//
// The counts cover accesses to device memory and shared memory, and the operations of simt.h: shuffles, votes, mma, ldmatrix, barriers. They do not
// cover arithmetic, which g++ compiles for the CPU. If lanes take a branch in different iterations of a loop, their accesses are counted as one
// request.
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
    uint64_t launches = 0;
    uint64_t blocks = 0, threads = 0, shared = 0;  // in the last launch; threads and bytes of shared memory per block
    Executed loads, stores, shared_loads, shared_stores;
    uint64_t sectors = 0;                           // of device memory, in `loads` and `stores`
    uint64_t wavefronts = 0, least_wavefronts = 0;  // of shared memory (transactions.h)
    uint64_t barriers = 0;                          // __syncthreads() of blocks
    std::map<std::string, Executed> operations;     // shuffles and similar, by name

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
// Returns the counts of each kernel that work() launches, in the order of first launches. The race detector is off during work().
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
    void end_block();  // completes requests in which some lanes took no part
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
