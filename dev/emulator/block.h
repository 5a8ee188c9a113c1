// A block that the emulator runs: its threads, warps, barriers and clocks. Shared by simt.cpp (who runs next, warp operations, barriers, launches),
// races.cpp (the race detector, device memory) and messages.cpp.
#pragma once
#include <sys/mman.h>

#include <boost/context/detail/fcontext.hpp>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "counts.h"
#include "simt.h"
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace CUDA_BACKEND::simt {
using boost::context::detail::fcontext_t;

#ifdef __SANITIZE_ADDRESS__
constexpr size_t stack_bytes = 256 * 1024;
#else
constexpr size_t stack_bytes = 64 * 1024;
#endif
constexpr int max_threads = 1024, max_warps = max_threads / 32, barriers = 16;

struct Place {  // where in the source
    std::source_location at;
    const void *pc;
};

struct Copy {  // a cp.async on its way
    void *to;
    const void *from;
    bool valid;
    const void *pc;
};

struct Warp;

struct Thread : ThreadInfo {
    int number;
    Warp *warp;
    fcontext_t context;
    char *stack;
    Thread *next;                // in the list of those who wait at a barrier
    std::vector<Copy> copies;    // issued, in order
    std::vector<size_t> groups;  // and committed: how many of them each group ends with
    const void *stack_bottom;    // the rest is AddressSanitizer's
    size_t stack_size;
    void *fake_stack;
};

struct Arrival {  // the warp operation that a waiting lane asked for
    const char *name;
    unsigned mask;
    Place place;
    void *data;
};

struct Warp {  // the state of its lanes is three sets of bits; a lane in none of them runs, or waits at a barrier
    int number;
    unsigned lanes;  // that exist
    unsigned ready, waiting, returned;
    Arrival arrival[32];
};

struct Barrier {
    int arrived, expected;
    Place place;                // of the first to arrive
    Thread *waiting;            // a list
    int arrived_of[max_warps];  // the rest is the race detector's: threads of each warp
    unsigned waiting_warps;     //
    uint32_t clock[max_warps];  // joined clock of the arrived threads
};

struct Touch {           // the last write, or read by one warp, of two bytes
    uint32_t time;       // 0: never
    uint8_t warp, lane;  // lane 32: several
    bool in_flight;      // a cp.async that has not landed
    const void *pc;
};

// Device memory: which block of which launch last wrote and read each two bytes, and which thread of that block. Once a single byte has been
// accessed, the second byte of each two has a cell of its own.
struct Buffer {
    uintptr_t begin, end;
    struct Cell {
        uint64_t written, read;  // launch << 32 | block + 1, or `several` blocks
        Touch writer, reader;
    } * cells, *second;
    bool *by_bytes;
};

struct Launch {
    const void *kernel;
    Grid grid;
    unsigned threads, order;
    size_t shared;
    const std::function<void()> &body;
    std::mutex lock{};
    std::vector<Buffer> buffers{};  // sorted by address
    uint64_t number = 0;
    bool counted = false;
    size_t failed_block = SIZE_MAX;
    std::string failure{};  // of the lowest block that failed
};

struct Block : BlockInfo {
    Launch *launch;
    size_t number;
    int threads_count, warps_count;
    Thread host;  // what runs outside the kernel and starts the block
    std::vector<Thread> thread;
    Warp warp[max_warps];
    unsigned ready_warps;
    Barrier barrier[barriers];
    uint32_t random;
    bool failed;
    uint32_t clock[max_warps][max_warps];
    std::vector<Touch> writes;  // (shared_bytes / 2)
    std::vector<Touch> reads;   // (shared_bytes / 2, warps)
    BlockCounts counts;
    char *stacks = nullptr;
    std::unique_ptr<unsigned char, decltype(&free)> memory{nullptr, free};

    ~Block() {  // with its CPU thread: ranks that are threads come and go
        if (!stacks) return;
#ifdef __SANITIZE_ADDRESS__  // fibers that were given up have left their marks, and another thread's memory may come here
        ASAN_UNPOISON_MEMORY_REGION(stacks, max_threads * stack_bytes);
#endif
        munmap(stacks, max_threads * stack_bytes);
    }
};

extern constinit thread_local Block *block;     // that this CPU thread runs
extern constinit thread_local Thread *current;  // and the thread of it

// ---- messages.cpp -------------------------------------------------------------------------------------------------------------------

// "warp.cuh:17 < rmsnorm.cuh:20": a line and the lines that inlined it, without the emulator's own.
std::string where(Place place);
std::string kernel_name(const void *kernel);  // "op_kernel<bf16>"
std::string lanes(unsigned mask);

// Keep a failure for the end of the launch, if no lower block has one: of the block, or of the current thread at `place`.
void keep(const std::string &cause, const char *fix);
void report(Place place, const std::string &cause, const char *fix);

[[noreturn]] void give_block_up();  // runs the host, and no thread of this block any more

// A statement of its own after the report: this thread's stack is never unwound, so no string may be alive.
#define FAIL(...)            \
    do {                     \
        report(__VA_ARGS__); \
        give_block_up();     \
    } while (0)

// ---- races.cpp ----------------------------------------------------------------------------------------------------------------------

extern bool detecting;                       // loads and stores call access()
extern std::vector<KernelCounts> *counting;  // in place of looking for races

void watch(Launch &launch);  // from here on, for races with what other launches and blocks do
void start_clocks(Block &b);
void advance(int warp);  // its own time
// A load or store of the current thread. in_flight: by a cp.async, which `landing` ends.
void access(const void *p, size_t bytes, bool write, const void *pc, bool in_flight = false, bool landing = false);
// What has happened before the barrier is known to those who waited at it.
void pass_clocks_in(Barrier &b);
void pass_clocks_out(const Barrier &b);
}  // namespace CUDA_BACKEND::simt
