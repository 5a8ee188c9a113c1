// The race detector, the device memory that it watches, and the hooks that instrumented code calls at each load and store.
//
// One vector clock per warp (Flanagan and Freund, FastTrack, 2009): all actions of warp v up to its time clock[w][v] have happened before the next
// action of warp w. Only barriers pass clocks on. A warp's own time advances at barriers and at __syncwarp, so lanes of one warp race if they access
// the same two bytes at the same time of their warp (the same byte, if the device memory is accessed by single bytes). A __syncwarp of some lanes
// counts for the whole warp.
// For device memory only the last reader is recorded, not one per warp: another order of threads finds the missed races. Blocks of one launch are
// not ordered, so a block must not access bytes that another block of the same launch writes.
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "block.h"

namespace CUDA_BACKEND::simt {
bool detecting = false;  // set by __tsan_init, which files built with -fsanitize=thread call before main
std::vector<KernelCounts> *counting = nullptr;

namespace {
std::mutex buffers_lock;
std::vector<Buffer> all_buffers;
uint64_t launches = 0;
}  // namespace

void watch(Launch &launch) {
    if (!detecting) return;
    const std::lock_guard guard(buffers_lock);
    launch.buffers = all_buffers;
    launch.number = ++launches;
}

void advance(int warp) { block->clock[warp][warp]++; }

namespace {
Touch touch(const void *pc, bool in_flight = false) {
    const int warp = current->warp->number;
    return {block->clock[warp][warp], uint8_t(warp), uint8_t(current->lane), in_flight, pc};
}

Touch read_again(const Touch &before, const void *pc) {
    Touch now = touch(pc);
    if (before.time == now.time && before.warp == now.warp && before.lane != now.lane) now.lane = 32;
    return now;
}

// Fails if the current access and the earlier one are not ordered.
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
        // cell.writer and cell.reader are only read if this block has set them, so no CPU thread writes them meanwhile.
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
}  // namespace

void access(const void *p, size_t bytes, bool write, const void *pc, bool in_flight, bool landing) {
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

void start_clocks(Block &b) {  // all times are 1; nothing has happened before
    for (int w = 0; w < b.warps_count; w++)
        for (int v = 0; v < b.warps_count; v++) b.clock[w][v] = w == v;
    if (!detecting) return;
    b.writes.assign(b.shared_bytes / 2 + 1, {});
    b.reads.assign((b.shared_bytes / 2 + 1) * size_t(b.warps_count), {});
}
}  // namespace CUDA_BACKEND::simt

// ---- device memory --------------------------------------------------------------------------------------------------------------------

namespace CUDA_BACKEND {
using namespace simt;

cudaError_t cudaMalloc(void **p, size_t bytes) {
    size_t unused, total;
    cudaMemGetInfo(&unused, &total);
    if (bytes > total) return cudaErrorMemoryAllocation;
    if (posix_memalign(p, 256, std::max<size_t>(bytes, 1))) return cudaErrorMemoryAllocation;
    memset(*p, 0xff, bytes);
    add_known(uintptr_t(*p), bytes);
    if (detecting) {
        const std::lock_guard guard(buffers_lock);
        const uintptr_t begin = uintptr_t(*p);
        const auto at = std::find_if(all_buffers.begin(), all_buffers.end(), [&](const Buffer &b) { return b.begin > begin; });
        const size_t pairs = bytes / 2 + 1;
        auto *cells = static_cast<Buffer::Cell *>(
            calloc(2 * pairs + 1, sizeof(Buffer::Cell)));  // pages that are never accessed take no memory
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
// The test program's own atomics, in headers of the standard library and GoogleTest, behave as if not instrumented.
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
