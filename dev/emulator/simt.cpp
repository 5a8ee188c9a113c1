// Implements simt.h: fibers and their scheduling, warp operations, barriers, cp.async, launches.
#include <omp.h>

#include <atomic>
#include <exception>

#include "block.h"
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

namespace CUDA_BACKEND::simt {
using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;
using boost::context::detail::transfer_t;

constinit thread_local const ThreadInfo *self = nullptr;
constinit thread_local const BlockInfo *self_block = nullptr;
constinit thread_local Block *block = nullptr;
constinit thread_local Thread *current = nullptr;

namespace {
constexpr size_t guard_bytes = 4096;       // inaccessible bytes below each stack
constexpr size_t max_shared = 227 * 1024;  // bytes per block on sm_90

// ---- fibers ---------------------------------------------------------------------------------------------------------------------

// Called first after every jump: records where the fiber that jumped here has stopped.
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

}  // namespace

void give_block_up() {
    block->failed = true;
    switch_to(&block->host);
    abort();
}

namespace {
uint32_t next_random(uint32_t &state) {  // xorshift32 (Marsaglia, 2003)
    state ^= state << 13;
    state ^= state >> 17;
    return state ^= state << 5;
}

int choose(unsigned set) {  // returns a member of the set, in this launch's order
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

// Suspends this thread, whose state already contains the reason, and runs another one, of the same warp if possible.
void run_another(Warp *warp) {
    if (!warp || !warp->ready) {
        if (!block->ready_warps) return switch_to(&block->host);  // all threads have returned, or none can proceed
        warp = &block->warp[choose(block->ready_warps)];
    }
    const int lane = choose(warp->ready);
    warp->ready &= ~(1u << lane);
    if (!warp->ready) block->ready_warps &= ~(1u << warp->number);
    switch_to(&block->thread[size_t(warp->number) * 32 + lane]);
}

void interrupt() {  // in random orders, sometimes suspends a thread that could proceed
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
    abort();  // a thread that has returned never runs again
}

// ---- warp operations ----------------------------------------------------------------------------------------------------------------

// All lanes of the mask must arrive. Each passes `data`, and the last one calls work(mask, data of each lane) for all.
template <class Work> void warp_operation(const char *name, unsigned mask, void *data, Place place, Work work) {
    Warp &warp = *current->warp;
    const int lane = current->lane;
    if (!(mask >> lane & 1))
        FAIL(place, format("%s by lane %d, which is not in its mask %s", name, lane, lanes(mask).c_str()), "add it to the mask");
    mask &= warp.lanes;  // in a block of 48 threads the second warp has 16 lanes
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
    void *memory;  // of the exact size, so AddressSanitizer knows its end
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
    const size_t colour = size_t(t.lane) * 576;  // otherwise all stacks share the same sets of the L1 cache
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

// Returns the counts of this kernel; each CPU thread adds the counts of its blocks.
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
    watch(launch);
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
    if (!detecting) die("this program cannot count loads and stores\n  fix: use make try, which builds an instrumented program");
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
        // AddressSanitizer reports a bad access here,
        [[maybe_unused]] volatile unsigned char byte = static_cast<const unsigned char *>(from)[0];
        byte = static_cast<const unsigned char *>(from)[15];  // rather than at the wait
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
