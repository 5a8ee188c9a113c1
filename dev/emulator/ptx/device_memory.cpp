#include "device_memory.h"

#include "memory.h"

namespace ptx {
namespace {

constexpr uint64_t word = 16;  // bytes, as TMA moves them
constexpr uint32_t on_its_way = UINT32_MAX;

constexpr char no_order[] =
    "and nothing orders these additions: sums of floats have other bits in another order\n  fix: st.release there, ld.acquire here";
constexpr char no_wait[] =
    "by a copy that may still have been running at that block's st.release\n  fix: cp.async.bulk.wait_group, without .read, before the st.release";
constexpr char no_fence[] = "through the async proxy, with no fence.proxy.async between the ld.acquire and this";

// The number of a cluster's first warp in the launch, counted from 1.
uint32_t first_warp(const Warp &w) { return (w.block->number - 1 - w.block->rank) * uint32_t(w.block->warps.size()) + 1; }

template <class F> void each_word(Warp &w, uint64_t address, uint32_t bytes, F f) {
    Running &r = *w.block->running;
    if (!r.last.holds(address, bytes)) r.last = r.memory->at_or_before(address);
    const uint64_t first = r.last.begin / word, end = ceil_div(r.last.begin + r.last.bytes, word);
    std::vector<LastWrite> &writes = r.writes[r.last.begin];
    writes.resize(end - first);
    for (uint64_t n = address / word; n <= (address + bytes - 1) / word; n++) f(writes[n - first]);
}

// Checks an access against the last write, which may have come from another cluster.
void check(Warp &w, int lane, uint64_t address, const LastWrite &last, const char *does, bool by_tma, bool in_order) {
    if (!last.warp || last.warp - first_warp(w) < w.block->cluster->warps) return;
    const auto fail = [&](const char *what) {
        const std::string place = describe(w, address);
        w.fail(lane, format("%s %s, which line %u of another block has written, %s", does, place.c_str(), last.line, what));
    };
    const uint32_t known = w.view.elsewhere.of(last.warp);
    const bool ordered = last.started <= known;
    if (!ordered && in_order) fail(no_order);
    if (ordered && last.completed > known) fail(no_wait);
    if (ordered && by_tma && last.completed > w.view.elsewhere_proxied.of(last.warp)) fail(no_fence);
}
}  // namespace

void note_release(Warp &w, uint64_t address) {
    Clock &released = w.block->running->released[address] = w.view.elsewhere;
    for (size_t agent = 0; agent < w.block->cluster->warps; agent++)
        if (const uint32_t time = w.view.known.of(agent)) released.set(first_warp(w) + agent, time);
    w.advance();
}
void note_acquire(Warp &w, uint64_t address) {
    const auto &released = w.block->running->released;
    if (const auto found = released.find(address); found != released.end()) w.view.elsewhere.join(found->second);
}

void note_device_access(Warp &w, int lane, uint64_t address, uint32_t bytes, bool writes) {
    each_word(w, address, bytes, [&](LastWrite &last) {
        check(w, lane, address, last, writes ? "writes to" : "reads", false, false);
        if (writes) last = {first_warp(w) + uint32_t(w.agent), w.time(), w.time(), uint32_t(w.instruction->line)};
    });
}
void note_bulk_access(Warp &w, int lane, uint64_t address, uint32_t bytes, BulkUse use) {
    const char *const does[] = {"reads", "overwrites", "adds to", "adds to"};
    each_word(w, address, bytes, [&](LastWrite &last) {
        const bool in_order = use == BulkUse::add_floats && w.block->running->launch->sums_in_order;
        check(w, lane, address, last, does[size_t(use)], true, in_order);
        if (use != BulkUse::read) last = {first_warp(w) + uint32_t(w.agent), w.time(), on_its_way, uint32_t(w.instruction->line)};
    });
}
void end_bulk_write(Warp &w, uint64_t address, uint32_t bytes) {
    each_word(w, address, bytes, [&](LastWrite &last) {
        if (last.warp == first_warp(w) + w.agent && last.completed == on_its_way) last.completed = w.time();
    });
}
}  // namespace ptx
