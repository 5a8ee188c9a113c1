// The emulator's state of a running block: threads, warps, barriers and clocks. Shared by simt.cpp (scheduling, warp operations, barriers, launches),
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

struct Place {  // a position in the source
    std::source_location at;
    const void *pc;
};

struct Copy {  // a cp.async in flight
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
    Thread *next;                // in the list of threads that wait at a barrier
    std::vector<Copy> copies;    // issued copies, in order
    std::vector<size_t> groups;  // for each committed group: the number of copies up to its end
    const void *stack_bottom;    // this and the following members are AddressSanitizer's
    size_t stack_size;
    void *fake_stack;
};

struct Arrival {  // the warp operation of a waiting lane
    const char *name;
    unsigned mask;
    Place place;
    void *data;
};

struct Warp {  // three bit sets hold the state of its lanes; a lane in none of them runs, or waits at a barrier
    int number;
    unsigned lanes;  // the lanes that exist
    unsigned ready, waiting, returned;
    Arrival arrival[32];
};

struct Barrier {
    int arrived, expected;
    Place place;                // of the first thread to arrive
    Thread *waiting;            // a list
    int arrived_of[max_warps];  // this and the following members are the race detector's; arrived threads of each warp
    unsigned waiting_warps;     //
    uint32_t clock[max_warps];  // joined clock of the arrived threads
};

struct Touch {           // the last write, or read by one warp, of two bytes
    uint32_t time;       // 0: never
    uint8_t warp, lane;  // lane 32: several
    bool in_flight;      // a cp.async that has not landed
    const void *pc;
};

// Device memory: for each two bytes, the last writer and the last reader, as launch, block and thread. After the first access of a single byte, the
// second byte of each pair has a cell of its own.
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
    std::string failure{};  // message of the lowest block that failed
};

struct Block : BlockInfo {
    Launch *launch;
    size_t number;
    int threads_count, warps_count;
    Thread host;  // runs outside the kernel and starts the block
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

    ~Block() {  // a block ends with its CPU thread; threads of ranks come and go
        if (!stacks) return;
#ifdef __SANITIZE_ADDRESS__  // abandoned fibers leave poisoned bytes, and this memory may be reused by another thread
        ASAN_UNPOISON_MEMORY_REGION(stacks, max_threads * stack_bytes);
#endif
        munmap(stacks, max_threads * stack_bytes);
    }
};

extern constinit thread_local Block *block;     // the block that this CPU thread runs
extern constinit thread_local Thread *current;  // the CUDA thread that runs now

// ---- messages.cpp -------------------------------------------------------------------------------------------------------------------

// "warp.cuh:17 < rmsnorm.cuh:20": a line and the lines that inlined it, without the emulator's own.
std::string where(Place place);
std::string call_site(void *const *pcs,
                      int n);  // the innermost line of a backtrace that is neither the emulator's nor a communicator's
std::string kernel_name(const void *kernel);  // "op_kernel<bf16>"
std::string lanes(unsigned mask);

// Records a failure of the block, or of the current thread at `place`. The end of the launch reports the failure of the lowest block.
void keep(const std::string &cause, const char *fix);
void report(Place place, const std::string &cause, const char *fix);

[[noreturn]] void give_block_up();  // switches to the host; no thread of this block runs again

// give_block_up() is a separate statement because this thread's stack is never unwound, so no string may be alive.
#define FAIL(...)            \
    do {                     \
        report(__VA_ARGS__); \
        give_block_up();     \
    } while (0)

// ---- races.cpp ----------------------------------------------------------------------------------------------------------------------

extern bool detecting;                       // loads and stores call access()
extern std::vector<KernelCounts> *counting;  // if set, accesses are counted and not checked for races

void watch(Launch &launch);  // starts looking for races with other blocks
void start_clocks(Block &b);
void advance(int warp);  // advances the warp's own time
// Records a load or store of the current thread. in_flight: it belongs to a cp.async; `landing` marks the end of that cp.async.
void access(const void *p, size_t bytes, bool write, const void *pc, bool in_flight = false, bool landing = false);
// Joins the clocks of all threads that waited at the barrier.
void pass_clocks_in(Barrier &b);
void pass_clocks_out(const Barrier &b);
}  // namespace CUDA_BACKEND::simt
