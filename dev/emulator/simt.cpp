// The emulator behind simt.h: fibers and who runs next, the race detector, warp operations, barriers, cp.async, launches.
#include "simt.h"

#include <dlfcn.h>
#include <omp.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <boost/context/detail/fcontext.hpp>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "counts.h"
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace CUDA_BACKEND::simt {
using boost::context::detail::fcontext_t;
using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;
using boost::context::detail::transfer_t;

constinit thread_local const ThreadInfo *self = nullptr;
constinit thread_local const BlockInfo *self_block = nullptr;

namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr size_t stack_bytes = 256 * 1024;
#else
constexpr size_t stack_bytes = 64 * 1024;
#endif
constexpr size_t guard_bytes = 4096;  // below each stack, not accessible
constexpr int max_threads = 1024, max_warps = max_threads / 32, barriers = 16;
constexpr size_t max_shared = 227 * 1024;  // of a block on sm_90

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

thread_local Block *block = nullptr;
thread_local Thread *current = nullptr;

// ---- messages -------------------------------------------------------------------------------------------------------------------

// What addr2line knows of an address of this program: pairs of function and FILE:LINE, innermost inlined function first.
// Answers are kept, as each takes it a good part of a second.
using Frames = std::vector<std::pair<std::string, std::string>>;
Frames frames(const void *pc) {
    static std::mutex lock;
    static std::map<const void *, Frames> known;
    const std::lock_guard guard(lock);
    if (const auto found = known.find(pc); found != known.end()) return found->second;
    Frames &out = known[pc];
    Dl_info info;
    if (!dladdr(pc, &info)) return out;
    const size_t offset = size_t(static_cast<const char *>(pc) - static_cast<char *>(info.dli_fbase));
    FILE *pipe = popen(format("addr2line -f -C -i -e /proc/%d/exe %#zx 2> /dev/null", int(getpid()), offset).c_str(), "r");
    if (!pipe) return out;
    char function[4096], line[4096];
    while (fgets(function, sizeof function, pipe) && fgets(line, sizeof line, pipe)) {
        function[strcspn(function, "\n")] = line[strcspn(line, "\n")] = 0;
        if (char *more = strstr(line, " (discriminator ")) *more = 0;
        out.emplace_back(function, line);
    }
    pclose(pipe);
    return out;
}

std::string base_name(const std::string &path) { return path.substr(path.rfind('/') + 1); }

// "warp.cuh:17 < rmsnorm.cuh:20": a line and the lines that inlined it, without the emulator's own.
std::string where(Place place) {
    std::string out;
    const auto call = reinterpret_cast<const void *>(uintptr_t(place.pc) - 1);  // pc is where it returns to
    for (const auto &[function, line] : frames(call))
        if (line[0] != '?' && base_name(line).rfind("simt.", 0) != 0) out += (out.empty() ? "" : " < ") + base_name(line);
    if (!out.empty() || !place.at.line()) return out.empty() ? "an unknown line" : out;
    return format("%s:%u", base_name(place.at.file_name()).c_str(), unsigned(place.at.line()));
}

std::string kernel_name(const void *kernel) {  // "void emulated::op_kernel<bf16>(bf16*, unsigned long)" -> "op_kernel<bf16>"
    const auto found = frames(kernel);
    if (found.empty() || found.back().first == "??") return "a kernel";
    std::string name = found.back().first;
    size_t end = name.size();
    if (name.ends_with(')')) {
        int open = 0;
        do {
            end--;
            open += (name[end] == ')') - (name[end] == '(');
        } while (open && end);
    }
    const size_t space = name.find(' '), begin = space < name.find_first_of("<(") ? space + 1 : 0;
    name = name.substr(begin, end - begin);
    return name.rfind("emulated::", 0) == 0 ? name.substr(strlen("emulated::")) : name;
}

std::string lanes(unsigned mask) { return format("%#010x", mask); }

void switch_to(Thread *to);

void keep(const std::string &cause, const char *fix) {  // of the lowest block that fails
    Launch &launch = *block->launch;
    const std::lock_guard guard(launch.lock);
    if (block->number >= launch.failed_block) return;
    launch.failed_block = block->number;
    const std::source_location at = launch.grid.at;
    launch.failure = format("%s of %s, launched at %s:%u\n  fix: %s", cause.c_str(), kernel_name(launch.kernel).c_str(),
                            base_name(at.file_name()).c_str(), unsigned(at.line()), fix);
}

void report(Place place, const std::string &cause, const char *fix) {
    const uint3 b = block->index, t = current->index;
    keep(format("%s\n  at %s, block (%u,%u,%u) thread (%u,%u,%u)", cause.c_str(), where(place).c_str(), b.x, b.y, b.z, t.x, t.y,
                t.z),
         fix);
}

[[noreturn]] void give_block_up() {
    block->failed = true;
    switch_to(&block->host);
    abort();
}

// A statement of its own after the report: this thread's stack is never unwound, so no string may be alive.
#define FAIL(...)            \
    do {                     \
        report(__VA_ARGS__); \
        give_block_up();     \
    } while (0)

// ---- fibers ---------------------------------------------------------------------------------------------------------------------

// The first thing to do after every jump: note where the fiber that jumped here has stopped.
void landed(transfer_t from) {
    Thread &before = *static_cast<Thread *>(from.data);
    before.context = from.fctx;
#ifdef __SANITIZE_ADDRESS__
    const void *bottom;
    size_t size;
    __sanitizer_finish_switch_fiber(current->fake_stack, &bottom, &size);
    if (&before == &block->host) block->host.stack_bottom = bottom, block->host.stack_size = size;
#endif
}

void switch_to(Thread *to) {
    Thread *from = current;
    if (to == from) return;
    current = to;
    self = to == &block->host ? nullptr : to;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&from->fake_stack, to->stack_bottom, to->stack_size);
#endif
    landed(jump_fcontext(to->context, from));
}

uint32_t next_random(uint32_t &state) {  // xorshift32 (Marsaglia, 2003)
    state ^= state << 13;
    state ^= state >> 17;
    return state ^= state << 5;
}

int choose(unsigned set) {  // one of its members, in the order of this launch
    const unsigned order = block->launch->order;
    if (order == 0) return std::countr_zero(set);
    if (order == 1) return 31 - std::countl_zero(set);
    const int start = next_random(block->random) & 31;
    return (std::countr_zero(std::rotr(set, start)) + start) & 31;
}

void set_ready(Warp &warp, unsigned set) {
    warp.ready |= set;
    if (warp.ready) block->ready_warps |= 1u << warp.number;
}

// Suspends this thread, whose state has its reason, and runs another one: of the same warp if possible.
void run_another(Warp *warp) {
    if (!warp || !warp->ready) {
        if (!block->ready_warps) return switch_to(&block->host);  // all have returned, or none can go on
        warp = &block->warp[choose(block->ready_warps)];
    }
    const int lane = choose(warp->ready);
    warp->ready &= ~(1u << lane);
    if (!warp->ready) block->ready_warps &= ~(1u << warp->number);
    switch_to(&block->thread[size_t(warp->number) * 32 + lane]);
}

void interrupt() {  // in random orders now and then a thread that could go on waits
    if (block->launch->order < 2 || next_random(block->random) % 4) return;
    set_ready(*current->warp, 1u << current->lane);
    run_another(nullptr);
}

void thread_main(transfer_t from) {
    landed(from);
    Warp &warp = *current->warp;
    bool threw = false;
    try {
        block->launch->body();
    } catch (const std::exception &error) {
        report({}, error.what(), "kernels must not throw");
        threw = true;
    }
    if (threw) give_block_up();
    if (!current->copies.empty())
        FAIL({{}, current->copies.back().pc}, "a thread returned before its cp.async landed",
             "cp_async_wait<0>() before the end");
    warp.returned |= 1u << current->lane;
    for (unsigned set = warp.waiting; set; set &= set - 1) {
        const Arrival &other = warp.arrival[std::countr_zero(set)];
        if (other.mask >> current->lane & 1)
            FAIL(other.place, format("%s waits for lane %d, which has returned", other.name, current->lane),
                 "let all lanes of the mask take part, or leave out those that return");
    }
    run_another(&warp);
    abort();  // a thread that has returned is never run
}

// ---- races ------------------------------------------------------------------------------------------------------------------------
//
// Vector clocks (Flanagan and Freund, FastTrack, 2009), one per warp: what warp v did up to its time clock[w][v] has happened before what
// warp w does now. Only barriers pass clocks on. A warp's own time advances at barriers and at __syncwarp, so lanes of one warp race
// if they touch the same two bytes (of device memory that is accessed by single bytes: the same byte) at the same time of their warp. (A
// __syncwarp of some lanes counts for the whole warp.)
// For device memory only the last reader is recorded, not one per warp: another order of threads finds the missed races. Between blocks
// nothing is ordered: none may touch what another one of the same launch writes.

bool detecting = false;  // set by __tsan_init, which files built with -fsanitize=thread call before main
std::mutex buffers_lock;
std::vector<Buffer> all_buffers;
uint64_t launches = 0;
std::vector<KernelCounts> *counting = nullptr;  // in place of looking for races

void advance(int warp) { block->clock[warp][warp]++; }

Touch touch(const void *pc, bool in_flight = false) {
    const int warp = current->warp->number;
    return {block->clock[warp][warp], uint8_t(warp), uint8_t(current->lane), in_flight, pc};
}

Touch read_again(const Touch &before, const void *pc) {
    Touch now = touch(pc);
    if (before.time == now.time && before.warp == now.warp && before.lane != now.lane) now.lane = 32;
    return now;
}

// Ends in a message if the current access and the earlier one are not ordered.
void check_order(const Touch &then, const char *memory, size_t offset, bool write, const char *done, const void *pc) {
    const Touch now = touch(pc);
    const bool concurrent =
        then.warp == now.warp ? then.time == now.time && then.lane != now.lane : then.time > block->clock[now.warp][then.warp];
    if (!then.time || !concurrent) return;
    FAIL({{}, pc},
         format("race on %s memory +%zu: %s by lane %d of warp %d, %s by %s of warp %d at %s, and nothing orders the two", memory,
                offset, write ? "written" : "read", now.lane, now.warp, done,
                then.lane < 32 ? format("lane %d", then.lane).c_str() : "several lanes", then.warp, where({{}, then.pc}).c_str()),
         then.warp == now.warp ? "__syncwarp() in between" : "__syncthreads() in between");
}

void access_shared(size_t cell, bool write, const void *pc, bool in_flight, bool landing) {
    const Place here{{}, pc};
    Touch &last = block->writes[cell];
    Touch *reads = &block->reads[cell * size_t(block->warps_count)];
    check_order(last, "shared", cell * 2, write, "written", pc);
    if (last.in_flight && !landing)
        FAIL(here,
             format("shared memory +%zu is %s before the wait for its cp.async at %s", cell * 2, write ? "written" : "read",
                    where({{}, last.pc}).c_str()),
             "cp_async_wait for its group, then a barrier");
    if (write) {
        for (int w = 0; w < block->warps_count; w++) check_order(reads[w], "shared", cell * 2, true, "read", pc);
        last = touch(pc, in_flight);
    } else {
        if (!last.time)
            FAIL(here, format("shared memory +%zu is read before anything was written there", cell * 2),
                 "write it first, and then a barrier");
        Touch &mine = reads[current->warp->number];
        mine = read_again(mine, pc);
    }
}

void access_device(uintptr_t begin, size_t bytes, bool write, const void *pc) {
    const auto &buffers = block->launch->buffers;
    auto b = std::upper_bound(buffers.begin(), buffers.end(), begin, [](uintptr_t p, const Buffer &x) { return p < x.begin; });
    if (b == buffers.begin() || begin >= (--b)->end) return;
    const uint64_t launch = block->launch->number << 32, me = launch | (block->number + 1), several = launch | 0xffffffff;
    const auto other = [&](uint64_t who) { return who > launch && who != me; };
    const auto visit = [&](Buffer::Cell &cell, size_t offset) {
        std::atomic_ref<uint64_t> written(cell.written), read(cell.read);
        const uint64_t writer = written.load(std::memory_order_relaxed), reader = read.load(std::memory_order_relaxed);
        if (other(writer) || (write && other(reader)))
            FAIL({{}, pc},
                 format("two blocks race on device memory +%zu of %zu bytes: %s here, %s by another block of the same launch",
                        offset, b->end - b->begin, write ? "written" : "read", other(writer) ? "written" : "read"),
                 "one block writes it all, or one launch after the other");
        // The threads are looked at where no other block touches them.
        if (writer == me) check_order(cell.writer, "device", offset, write, "written", pc);
        if (write && reader == me) check_order(cell.reader, "device", offset, write, "read", pc);
        if (write) cell.writer = touch(pc);
        else cell.reader = reader == me ? read_again(cell.reader, pc) : touch(pc);
        if (write) written.store(me, std::memory_order_relaxed);
        else read.store(other(reader) ? several : me, std::memory_order_relaxed);
    };
    std::atomic_ref<bool> by_bytes(*b->by_bytes);
    if (bytes == 1) by_bytes.store(true, std::memory_order_relaxed);
    const size_t first = begin - b->begin, last = std::min(begin + bytes, b->end) - 1 - b->begin;
    for (size_t pair = first / 2; pair <= last / 2; pair++) {
        if (first <= pair * 2) visit(b->cells[pair], pair * 2);
        if (last > pair * 2 && by_bytes.load(std::memory_order_relaxed)) visit(b->second[pair], pair * 2 + 1);
    }
}

bool in_device_memory(const void *p) {
    const auto &buffers = block->launch->buffers;
    const auto after =
        std::upper_bound(buffers.begin(), buffers.end(), uintptr_t(p), [](uintptr_t p, const Buffer &x) { return p < x.begin; });
    return after != buffers.begin() && uintptr_t(p) < std::prev(after)->end;
}

void access(const void *p, size_t bytes, bool write, const void *pc, bool in_flight = false, bool landing = false) {
    if (!self || !detecting) return;
    const size_t offset = uintptr_t(p) - uintptr_t(block->shared);
    if (counting) {
        const bool shared = offset < block->shared_bytes;
        if (!landing && (shared || in_device_memory(p)))
            block->counts.access({pc, shared, write, shared ? offset : uintptr_t(p), uint32_t(bytes)}, current->warp->number,
                                 current->lane, current->warp->lanes);
        return;
    }
    if (offset < block->shared_bytes)
        for (size_t cell = offset / 2; cell <= (std::min(offset + bytes, block->shared_bytes) - 1) / 2; cell++)
            access_shared(cell, write, pc, in_flight, landing);
    else if (uintptr_t(p) - uintptr_t(block->stacks) >= max_threads * stack_bytes) access_device(uintptr_t(p), bytes, write, pc);
}

// What has happened before the barrier is known to those who waited at it.
void pass_clocks_in(Barrier &b) {
    const int warp = current->warp->number;
    if (++b.arrived_of[warp] < std::popcount(current->warp->lanes)) return;
    for (int w = 0; w < block->warps_count; w++) b.clock[w] = std::max(b.clock[w], block->clock[warp][w]);
    advance(warp);
}
void pass_clocks_out(const Barrier &b) {
    for (unsigned set = b.waiting_warps; set; set &= set - 1) {
        const int warp = std::countr_zero(set);
        for (int w = 0; w < block->warps_count; w++)
            if (w != warp) block->clock[warp][w] = std::max(block->clock[warp][w], b.clock[w]);
    }
}

void start_clocks(Block &b) {  // everyone's time 1; nothing has happened before
    for (int w = 0; w < b.warps_count; w++)
        for (int v = 0; v < b.warps_count; v++) b.clock[w][v] = w == v;
    if (!detecting) return;
    b.writes.assign(b.shared_bytes / 2 + 1, {});
    b.reads.assign((b.shared_bytes / 2 + 1) * size_t(b.warps_count), {});
}

// ---- warp operations ----------------------------------------------------------------------------------------------------------------

// All lanes of the mask must come; each leaves `data`, and the last does the work(mask, data of each lane) of all.
template <class Work> void warp_operation(const char *name, unsigned mask, void *data, Place place, Work work) {
    Warp &warp = *current->warp;
    const int lane = current->lane;
    if (!(mask >> lane & 1))
        FAIL(place, format("%s by lane %d, which is not in its mask %s", name, lane, lanes(mask).c_str()), "add it to the mask");
    mask &= warp.lanes;  // a block of 48 threads: the second warp has 16
    if (mask & warp.returned)
        FAIL(place, format("%s waits for lanes %s, which have returned", name, lanes(mask & warp.returned).c_str()),
             "let all lanes of the mask take part, or leave out those that return");
    warp.arrival[lane] = {name, mask, place, data};
    warp.waiting |= 1u << lane;
    if ((warp.waiting & mask) != mask) return run_another(&warp);

    void *all[32] = {};
    for (unsigned set = mask; set; set &= set - 1) {
        const int i = std::countr_zero(set);
        const Arrival &other = warp.arrival[i];
        if (other.mask != mask || strcmp(other.name, name) || other.place.at.line() != place.at.line())
            FAIL(place,
                 format("lane %d is at %s with mask %s, lane %d at %s with mask %s (%s)", lane, name, lanes(mask).c_str(), i,
                        other.name, lanes(other.mask).c_str(), where(other.place).c_str()),
                 "lanes of one mask must meet at one operation");
        all[i] = other.data;
    }
    work(mask, all);
    if (counting) block->counts.operation(name, std::popcount(mask));
    warp.waiting &= ~mask;
    set_ready(warp, mask & ~(1u << lane));
    interrupt();
}

// ---- cp.async -----------------------------------------------------------------------------------------------------------------------

void check_shared(const char *name, const void *p, Place place) {
    const size_t offset = size_t(static_cast<const unsigned char *>(p) - block->shared);
    if (offset >= block->shared_bytes || offset + 16 > block->shared_bytes)
        FAIL(place, format("%s: the address is not in the block's shared memory", name), "an address inside shared_mem<T>()");
    if (offset % 16)
        FAIL(place, format("%s: shared memory +%zu is not 16-byte aligned", name, offset), "alignas(16), whole rows");
}

// ---- blocks ---------------------------------------------------------------------------------------------------------------------------

void prepare(Block &b, Launch &launch) {  // once per launch and CPU thread
    b.launch = &launch;
    b.threads = {launch.threads};
    b.grid = {unsigned(launch.grid.x), unsigned(launch.grid.y), unsigned(launch.grid.z)};
    b.threads_count = int(launch.threads);
    b.warps_count = int(ceil_div(launch.threads, 32));
    b.shared_bytes = launch.shared;
    void *memory;  // of the exact size, so that AddressSanitizer knows its end
    if (posix_memalign(&memory, 1024, std::max<size_t>(launch.shared, 1)))
        die("no memory for %zu bytes of shared memory", launch.shared);
    b.shared = static_cast<unsigned char *>(memory);
    b.memory.reset(b.shared);
    if (!b.stacks) {
        void *p =
            mmap(nullptr, max_threads * stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) die("no address space for the stacks of %d CUDA threads", max_threads);
        b.stacks = static_cast<char *>(p);
        b.thread.resize(max_threads);
        for (int i = 0; i < max_threads; i++) mprotect(b.stacks + i * stack_bytes, guard_bytes, PROT_NONE);
    }
}

void start_thread(Block &b, int i) {
    Thread &t = b.thread[size_t(i)];
    t.index = {unsigned(i), 0, 0};
    t.number = i;
    t.lane = i % 32;
    t.warp = &b.warp[i / 32];
    t.copies.clear();
    t.groups.clear();
    t.fake_stack = nullptr;
    char *bottom = b.stacks + i * stack_bytes + guard_bytes;
    t.stack_bottom = bottom;
    t.stack_size = stack_bytes - guard_bytes;
#ifdef __SANITIZE_ADDRESS__
    ASAN_UNPOISON_MEMORY_REGION(bottom, t.stack_size);
#endif
    const size_t colour = size_t(t.lane) * 576;  // else all stacks fall into the same sets of the L1 cache
    t.context = make_fcontext(bottom + t.stack_size - colour, t.stack_size - colour, thread_main);
}

std::string who_waits(Block &b) {
    std::string out;
    for (int i = 0; i < barriers; i++)
        if (b.barrier[i].arrived)
            out += format("; %d of %d threads are at %s (%s)", b.barrier[i].arrived, b.barrier[i].expected,
                          i ? format("barrier %d", i).c_str() : "__syncthreads", where(b.barrier[i].place).c_str());
    for (int w = 0; w < b.warps_count; w++)
        if (const unsigned set = b.warp[w].waiting) {
            const Arrival &first = b.warp[w].arrival[std::countr_zero(set)];
            return out + format("; lanes %s of warp %d are at %s with mask %s (%s)", lanes(set).c_str(), w, first.name,
                                lanes(first.mask).c_str(), where(first.place).c_str());
        }
    return out;
}

void run(Block &b, size_t number) {
    const Grid &grid = b.launch->grid;
    b.number = number;
    b.index = {unsigned(number % grid.x), unsigned(number / grid.x % grid.y), unsigned(number / (grid.x * grid.y))};
    b.failed = false;
    b.random = b.launch->order * 2654435761u + uint32_t(number) * 97 + 1;
    b.random += b.random == 0;
    b.ready_warps = 0;
    memset(b.shared, 0xff, b.shared_bytes);  // NaN
    for (Barrier &barrier : b.barrier) barrier = {};
    block = &b;
    self_block = &b;
    current = &b.host;
    for (int w = 0; w < b.warps_count; w++) {
        const int lanes = std::min(32, b.threads_count - w * 32);
        b.warp[w] = {};
        b.warp[w].number = w;
        b.warp[w].lanes = lanes == 32 ? ~0u : (1u << lanes) - 1;
        set_ready(b.warp[w], b.warp[w].lanes);
    }
    for (int i = 0; i < b.threads_count; i++) start_thread(b, i);
    start_clocks(b);
    b.counts.start(size_t(b.warps_count));
    run_another(nullptr);
    if (counting) b.counts.end_block();

    int returned = 0;
    for (int w = 0; w < b.warps_count; w++) returned += std::popcount(b.warp[w].returned);
    if (!b.failed && returned < b.threads_count)
        keep(format("deadlock: %d of %d threads have returned%s\n  in block (%u,%u,%u)", returned, b.threads_count,
                    who_waits(b).c_str(), b.index.x, b.index.y, b.index.z),
             "every thread that is waited for must come, or must return only afterwards");
    current = nullptr;
    self_block = nullptr;
}

// The counts of this kernel, to which each CPU thread adds its blocks'.
KernelCounts &count_launch(Launch &launch) {
    const std::string name = kernel_name(launch.kernel);
    const auto is_it = [&](const KernelCounts &k) { return k.name == name; };
    auto found = std::find_if(counting->begin(), counting->end(), is_it);
    if (found == counting->end()) found = counting->emplace(found), found->name = name;
    if (!std::exchange(launch.counted, true)) found->launches++;
    found->blocks = launch.grid.x * launch.grid.y * launch.grid.z, found->threads = launch.threads, found->shared = launch.shared;
    return *found;
}
}  // namespace

// ---- the interface ------------------------------------------------------------------------------------------------------------------

void launch(unsigned order, const void *kernel, Grid grid, unsigned threads, size_t shared, const std::function<void()> &body) {
    const size_t blocks = grid.x * grid.y * grid.z;
    if (blocks == 0) return;
    if (threads == 0 || threads > max_threads || shared > max_shared || grid.x > 0x7fffffff || grid.y > 0xffff || grid.z > 0xffff)
        die("%s at %s:%u does not start; grid %zu x %zu x %zu, %u threads, %zu bytes of shared memory\n"
            "  fix: at most 2147483647 x 65535 x 65535 blocks, %d threads and %zu bytes",
            kernel_name(kernel).c_str(), grid.at.file_name(), unsigned(grid.at.line()), grid.x, grid.y, grid.z, threads, shared,
            max_threads, max_shared);
    Launch launch{kernel, grid, threads, order, shared, body};
    if (detecting) {
        const std::lock_guard guard(buffers_lock);
        launch.buffers = all_buffers;
        launch.number = ++launches;
    }
#pragma omp parallel num_threads(int(std::min(blocks, size_t(omp_get_max_threads()))))
    {
        static thread_local Block mine;
        prepare(mine, launch);
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < blocks; i++)
            if (i < launch.failed_block) run(mine, i);
        if (counting) {
            const KernelCounts counts = mine.counts.take();
            const std::lock_guard guard(launch.lock);
            count_launch(launch) += counts;
        }
    }
    if (!launch.failure.empty()) die("%s", launch.failure.c_str());
}

std::vector<KernelCounts> counted(const std::function<void()> &work) {
    if (!detecting) die("this program does not see loads and stores\n  fix: make try builds one that counts them");
    std::vector<KernelCounts> counts;
    counting = &counts;
    work();
    counting = nullptr;
    return counts;
}

void *shared_bytes(size_t bytes) {
    if (bytes > block->shared_bytes)
        FAIL({{}, __builtin_return_address(0)},
             format("shared_mem of %zu bytes, but the launch gave %zu", bytes, block->shared_bytes),
             "launch(..., sizeof(T), ...)");
    return block->shared;
}

void sync_warp(unsigned mask, std::source_location at) {
    warp_operation("__syncwarp", mask, nullptr, {at, __builtin_return_address(0)},
                   [](unsigned, void **) { advance(current->warp->number); });
}

void shuffle(const char *name, unsigned mask, void *value, size_t bytes, int source_lane, std::source_location at) {
    struct Request {
        void *value;
        int source;
    } request{value, source_lane};
    const Place place{at, __builtin_return_address(0)};
    warp_operation(name, mask, &request, place, [&](unsigned lanes_here, void **data) {
        unsigned char before[32][16];
        for (int i = 0; i < 32; i++)
            if (data[i]) memcpy(before[i], static_cast<Request *>(data[i])->value, bytes);
        for (int i = 0; i < 32; i++)
            if (data[i]) {
                const Request &r = *static_cast<Request *>(data[i]);
                if (!(lanes_here >> r.source & 1))
                    FAIL(place,
                         format("%s: lane %d reads lane %d, which is not in the mask %s", name, i, r.source, lanes(mask).c_str()),
                         "read only lanes of the mask");
                memcpy(r.value, before[r.source], bytes);
            }
    });
}

unsigned ballot(const char *name, unsigned mask, bool vote, std::source_location at) {
    struct Request {
        bool vote;
        unsigned result;
    } request{vote, 0};
    warp_operation(name, mask, &request, {at, __builtin_return_address(0)}, [](unsigned, void **data) {
        unsigned votes = 0;
        for (int i = 0; i < 32; i++)
            if (data[i] && static_cast<Request *>(data[i])->vote) votes |= 1u << i;
        for (int i = 0; i < 32; i++)
            if (data[i]) static_cast<Request *>(data[i])->result = votes;
    });
    return request.result;
}

void barrier(int id, int threads, bool wait, std::source_location at) {
    const Place place{at, __builtin_return_address(0)};
    Barrier &b = block->barrier[id];
    if (id == 0) threads = block->threads_count;
    else if (threads % 32 || threads > block->threads_count)
        FAIL(place, format("barrier %d for %d threads of %d", id, threads, block->threads_count),
             "a multiple of 32 of the block's threads");
    if (b.arrived == 0) b = {0, threads, place, nullptr, {}, 0, {}};
    else if (id == 0 && b.place.at.line() != at.line())
        FAIL(place, format("__syncthreads while other threads of the block wait at another one (%s)", where(b.place).c_str()),
             "all threads of the block must meet at the same __syncthreads");
    else if (b.expected != threads)
        FAIL(place, format("barrier %d for %d threads, but for %d at %s", id, threads, b.expected, where(b.place).c_str()),
             "the same number at both places");
    if (wait) current->next = b.waiting, b.waiting = current, b.waiting_warps |= 1u << current->warp->number;
    pass_clocks_in(b);
    if (++b.arrived == b.expected) {
        pass_clocks_out(b);
        for (Thread *t = b.waiting; t; t = t->next) set_ready(*t->warp, 1u << t->lane);
        b.arrived = 0;
        if (counting) block->counts.barrier();
    }
    if (wait) run_another(current->warp);
}

// The race detector treats an atomic as a read: reads and other atomics may be concurrent, writes may not. Blocks run on several CPU cores.
template <class T> T atomic(Atomic operation, T *p, T value, T expected, std::source_location at) {
    const Place place{at, __builtin_return_address(0)};
    if (uintptr_t(p) % sizeof(T))
        FAIL(place, format("an atomic at an address that is not aligned to %zu bytes", sizeof(T)),
             "a pointer to the type itself");
    interrupt();
    access(p, sizeof(T), false, place.pc);
    const std::atomic_ref<T> target(*p);
    for (T old = target.load();;) {
        T next = value;
        if (operation == Atomic::add) next = T(old + value);
        if (operation == Atomic::min) next = std::min(old, value);
        if (operation == Atomic::max) next = std::max(old, value);
        if constexpr (std::is_integral_v<T>) {
            if (operation == Atomic::bit_and) next = old & value;
            if (operation == Atomic::bit_or) next = old | value;
            if (operation == Atomic::bit_xor) next = old ^ value;
            if (operation == Atomic::compare_and_swap && old != expected) return old;
        }
        if (target.compare_exchange_weak(old, next)) return old;
    }
}
template int atomic(Atomic, int *, int, int, std::source_location);
template unsigned atomic(Atomic, unsigned *, unsigned, unsigned, std::source_location);
template unsigned long long atomic(Atomic, unsigned long long *, unsigned long long, unsigned long long, std::source_location);
template float atomic(Atomic, float *, float, float, std::source_location);
template double atomic(Atomic, double *, double, double, std::source_location);

void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], std::source_location at) {
    struct Fragments {
        float *d;
        const uint32_t *a, *b;
    } mine{d, a, b};
    warp_operation("mma", ~0u, &mine, {at, __builtin_return_address(0)}, [](unsigned, void **data) {
        float A[16][16], B[16][8], D[16][8];
        const auto low = [](uint32_t pair) { return std::bit_cast<float>(pair << 16); };
        const auto high = [](uint32_t pair) { return std::bit_cast<float>(pair & 0xffff0000); };
        for (int lane = 0; lane < 32; lane++) {
            const Fragments &f = *static_cast<Fragments *>(data[lane]);
            const int g = lane / 4, t = lane % 4 * 2;
            for (int i = 0; i < 4; i++) {
                const int row = g + i % 2 * 8, column = t + i / 2 * 8;
                A[row][column] = low(f.a[i]), A[row][column + 1] = high(f.a[i]);
            }
            for (int i = 0; i < 2; i++) B[t + i * 8][g] = low(f.b[i]), B[t + i * 8 + 1][g] = high(f.b[i]);
            for (int i = 0; i < 4; i++) D[g + i / 2 * 8][t + i % 2] = f.d[i];
        }
        for (int i = 0; i < 16; i++)
            for (int k = 0; k < 16; k++)
                for (int j = 0; j < 8; j++) D[i][j] += A[i][k] * B[k][j];
        for (int lane = 0; lane < 32; lane++) {
            const Fragments &f = *static_cast<Fragments *>(data[lane]);
            for (int i = 0; i < 4; i++) f.d[i] = D[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
        }
    });
}

void ldmatrix(uint32_t (&r)[4], const void *row, bool transposed, std::source_location at) {
    struct Request {
        uint32_t *r;
        const uint16_t *row;
    } mine{r, static_cast<const uint16_t *>(row)};
    const char *name = transposed ? "ldmatrix.trans" : "ldmatrix";
    const Place place{at, __builtin_return_address(0)};
    check_shared(name, row, place);
    access(row, 16, false, place.pc);
    warp_operation(name, ~0u, &mine, place, [transposed](unsigned, void **data) {
        const uint16_t *rows[32];
        for (int lane = 0; lane < 32; lane++) rows[lane] = static_cast<Request *>(data[lane])->row;
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                const uint16_t *const *matrix = rows + i * 8;
                const int g = lane / 4, t = lane % 4 * 2;
                const uint32_t first = transposed ? matrix[t][g] : matrix[g][t];
                const uint32_t second = transposed ? matrix[t + 1][g] : matrix[g][t + 1];
                static_cast<Request *>(data[lane])->r[i] = first | second << 16;
            }
    });
}

void cp_async_16(void *to, const void *from, bool valid, std::source_location at) {
    const Place place{at, __builtin_return_address(0)};
    check_shared("cp.async", to, place);
    if (valid && uintptr_t(from) % 16)
        FAIL(place, "cp.async: the source is not 16-byte aligned", "rows that are multiples of 16 bytes");
    if (valid) {
        access(from, 16, false, place.pc);
        [[maybe_unused]] volatile unsigned char byte =
            static_cast<const unsigned char *>(from)[0];      // AddressSanitizer should speak here
        byte = static_cast<const unsigned char *>(from)[15];  // and not at the wait
    }
    access(to, 16, true, place.pc, true);
    memset(to, 0xff, 16);
    current->copies.push_back({to, from, valid, place.pc});
}

void cp_async_commit() { current->groups.push_back(current->copies.size()); }

void cp_async_wait_group(int still_open) {
    auto &copies = current->copies;
    auto &groups = current->groups;
    if (groups.size() <= size_t(still_open)) return;
    const size_t landed_groups = groups.size() - size_t(still_open), end = groups[landed_groups - 1];
    for (size_t i = 0; i < end; i++) {
        access(copies[i].to, 16, true, copies[i].pc, false, true);
        if (copies[i].valid) memcpy(copies[i].to, copies[i].from, 16);
        else memset(copies[i].to, 0, 16);
    }
    copies.erase(copies.begin(), copies.begin() + ptrdiff_t(end));
    groups.erase(groups.begin(), groups.begin() + ptrdiff_t(landed_groups));
    for (size_t &g : groups) g -= end;
}
}  // namespace CUDA_BACKEND::simt

// ---- device memory --------------------------------------------------------------------------------------------------------------------

namespace CUDA_BACKEND {
using namespace simt;

cudaError_t cudaMalloc(void **p, size_t bytes) {
    if (posix_memalign(p, 256, std::max<size_t>(bytes, 1))) return cudaErrorMemoryAllocation;
    memset(*p, 0xff, bytes);
    add_known(uintptr_t(*p), bytes);
    if (detecting) {
        const std::lock_guard guard(buffers_lock);
        const uintptr_t begin = uintptr_t(*p);
        const auto at = std::find_if(all_buffers.begin(), all_buffers.end(), [&](const Buffer &b) { return b.begin > begin; });
        const size_t pairs = bytes / 2 + 1;
        auto *cells = static_cast<Buffer::Cell *>(calloc(2 * pairs + 1, sizeof(Buffer::Cell)));  // untouched pages take no memory
        if (!cells) return cudaErrorMemoryAllocation;
        all_buffers.insert(at, {begin, begin + bytes, cells, cells + pairs, reinterpret_cast<bool *>(cells + 2 * pairs)});
    }
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    *free = size_t(sysconf(_SC_AVPHYS_PAGES)) * page;
    *total = size_t(sysconf(_SC_PHYS_PAGES)) * page;
    return cudaSuccess;
}

cudaError_t cudaFree(void *p) {
    remove_known(uintptr_t(p));
    const std::lock_guard guard(buffers_lock);
    const auto is_it = [&](const Buffer &b) { return b.begin == uintptr_t(p); };
    if (const auto at = std::find_if(all_buffers.begin(), all_buffers.end(), is_it); at != all_buffers.end()) {
        free(at->cells);
        all_buffers.erase(at);
    }
    free(p);
    return cudaSuccess;
}
}  // namespace CUDA_BACKEND

// ---- what g++ -fsanitize=thread calls; this file itself must be built without it -----------------------------------------------------

#define HERE __builtin_return_address(0)
#define READ_AND_WRITE(name, bytes)                                                              \
    void __tsan_read##name(void *p) { emulated::simt::access(p, bytes, false, HERE); }           \
    void __tsan_write##name(void *p) { emulated::simt::access(p, bytes, true, HERE); }           \
    void __tsan_unaligned_read##name(void *p) { emulated::simt::access(p, bytes, false, HERE); } \
    void __tsan_unaligned_write##name(void *p) { emulated::simt::access(p, bytes, true, HERE); }
// The test program's own atomics, in headers of the standard library and GoogleTest: as if not instrumented.
#define ATOMICS(bits)                                                                                              \
    using A##bits = std::atomic<uint##bits##_t>;                                                                   \
    uint##bits##_t __tsan_atomic##bits##_load(const A##bits *p, int) { return p->load(); }                         \
    void __tsan_atomic##bits##_store(A##bits *p, uint##bits##_t v, int) { p->store(v); }                           \
    uint##bits##_t __tsan_atomic##bits##_exchange(A##bits *p, uint##bits##_t v, int) { return p->exchange(v); }    \
    uint##bits##_t __tsan_atomic##bits##_fetch_add(A##bits *p, uint##bits##_t v, int) { return p->fetch_add(v); }  \
    uint##bits##_t __tsan_atomic##bits##_fetch_sub(A##bits *p, uint##bits##_t v, int) { return p->fetch_sub(v); }  \
    int __tsan_atomic##bits##_compare_exchange_strong(A##bits *p, uint##bits##_t *e, uint##bits##_t v, int, int) { \
        return p->compare_exchange_strong(*e, v);                                                                  \
    }                                                                                                              \
    int __tsan_atomic##bits##_compare_exchange_weak(A##bits *p, uint##bits##_t *e, uint##bits##_t v, int, int) {   \
        return p->compare_exchange_strong(*e, v);                                                                  \
    }

extern "C" {
READ_AND_WRITE(1, 1)
READ_AND_WRITE(2, 2)
READ_AND_WRITE(4, 4)
READ_AND_WRITE(8, 8)
READ_AND_WRITE(16, 16)
void __tsan_read_range(void *p, size_t bytes) { emulated::simt::access(p, bytes, false, HERE); }
void __tsan_write_range(void *p, size_t bytes) { emulated::simt::access(p, bytes, true, HERE); }
void __tsan_init() { emulated::simt::detecting = true; }
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void *, void *) {}
void __tsan_vptr_read(void *) {}
ATOMICS(8)
ATOMICS(32)
ATOMICS(64)
}
