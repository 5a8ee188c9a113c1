// Runs clusters of blocks. Their warps take turns, each until it waits; the lanes of a warp run in lockstep.
#include "execute.h"

#include <utility>

#include "bulk_copies.h"
#include "shared_memory.h"
#include "wgmma.h"

namespace ptx {

// x runs fastest, also over the lanes of a warp.
Extent Block::thread(int number) const {
    const Extent &all = running->launch->threads;
    const unsigned n = unsigned(number);
    return {n % all.x, n / all.x % all.y, n / all.x / all.y};
}

Count &Warp::count() const {
    const Running &r = *block->running;
    return r.counts->instructions[size_t(instruction - r.kernel->code.data())];
}

void Warp::fail(int lane, const std::string &what) const {
    const Running &r = *block->running;
    const Extent &grid = r.launch->grid, &threads = r.launch->threads, at = block->thread(number * lanes + lane);
    const std::string thread = threads.y * threads.z == 1 ? std::to_string(at.x) : format("(%u,%u,%u)", at.x, at.y, at.z);
    die("%s\n  line %d of the PTX: %s\n  block (%u,%u,%u), thread %s of %s, launched as %u x %u x %u blocks of %s threads",
        what.c_str(), instruction->line, r.kernel->text[size_t(instruction - r.kernel->code.data())].c_str(), block->index[0],
        block->index[1], block->index[2], thread.c_str(), r.kernel->name.c_str(), grid.x, grid.y, grid.z, threads.text().c_str());
}

void Warp::need_all_lanes() const {
    if (active != ~0u) fail(0, format("only the lanes %#x are here", active));
}

namespace {

// ---- a warp -----------------------------------------------------------------------------------------------------------------------

// The taken and the fall-through path run one after the other, up to the instruction where both join.
void branch(Warp &w, const Instruction &i, uint32_t taken) {
    Path &path = w.paths.back();
    if (taken == path.mask) path.at = i.target;
    else if (!taken) path.at++;
    else {
        w.block->running->counts->divergent_branches++;
        const Path jump{taken, i.target, i.join}, fall{path.mask & ~taken, path.at + 1, i.join};
        if (path.join == i.join && w.paths.size() > 1) w.paths.pop_back();  // lanes leave a loop one by one
        else path.at = i.join;
        w.paths.push_back(jump.at > fall.at ? jump : fall);
        w.paths.push_back(jump.at > fall.at ? fall : jump);
    }
}

void leave(Warp &w, uint32_t mask) {
    w.live &= ~mask;
    for (Path &path : w.paths) path.mask &= ~mask;
    for (const Copy &copy : w.copies)
        if (mask >> copy.lane & 1) w.fail(copy.lane, "returns before its cp.async has landed");
    check_bulk_copies(w, mask);
    if (!w.wgmmas.empty()) w.fail(std::countr_zero(mask), "returns before its wgmma has been waited for");
    w.block->cluster->events++;
}

int uniform(const Warp &w, int slot) {  // an operand that must be the same in all lanes
    const uint32_t *values = const_cast<Warp &>(w).values<uint32_t>(slot), first = values[std::countr_zero(w.active)];
    Warp::each_lane(w.active, [&](int l) {
        if (values[l] != first) w.fail(l, "the lanes differ");
    });
    return int(first);
}

// Writes the reduction of all threads' votes, the result of bar.red.
void write_reduction(Warp &w, const Barrier &barrier) {
    const Instruction &i = *w.instruction;
    if (i.reduction == Reduction::popc) {
        alignas(64) uint32_t result[lanes];
        std::fill(result, result + lanes, uint32_t(barrier.votes));
        w.write(i.operands[3], result);
    } else if (i.reduction != Reduction::none) {
        const bool holds = i.reduction == Reduction::all ? barrier.votes == barrier.voters : barrier.votes > 0;
        w.write_predicate(i.operands[3], holds ? ~0u : 0);
    }
}

// The warp arrives, and waits unless it is bar.arrive. The last arrival wakes the waiting warps.
void arrive(Warp &w, const Instruction &i) {
    Block &block = *w.block;
    if (w.active != w.live) w.fail(std::countr_zero(w.active), format("a barrier for the lanes %#x of %#x", w.active, w.live));
    const int id = uniform(w, i.operands[0]), all = int(block.warps.size()) * lanes;
    const int expected = i.reads > 1 ? uniform(w, i.operands[1]) : all;
    if (id < 0 || id > 15 || expected <= 0 || expected % lanes || expected > all)
        w.fail(0, format("barrier %d for %d threads of %d", id, expected, all));
    Barrier &barrier = block.barriers[id];
    if (!barrier.arrived) barrier = {0, expected, View(), 0, 0, 0};
    if (barrier.expected != expected) w.fail(0, format("barrier %d for %d threads and for %d", id, barrier.expected, expected));
    barrier.view.join(w.view);
    barrier.time = std::max(barrier.time, w.timing.begin);
    w.sync_lanes();
    block.cluster->events++;
    barrier.arrived += lanes;
    if (i.reduction != Reduction::none)
        barrier.voters += std::popcount(w.active), barrier.votes += std::popcount(w.active & w.predicate(i.operands[2]));
    if (i.control == Control::barrier) w.waits_at = id;
    if (barrier.arrived < expected) return;
    block.running->counts->barriers++;
    barrier.arrived = 0;
    for (Warp &other : block.warps)
        if (other.waits_at == id) {
            other.waits_at = -1;
            write_reduction(other, barrier);
            other.view.join(barrier.view);
            note_time(other, "wait", other.timing.begin, barrier.time + barrier_cycles);
            other.timing.begin = other.timing.issued = barrier.time + barrier_cycles;
        }
}

// Runs a warp until it waits or has returned. Returns true if it executed an instruction.
bool run_warp(Warp &w) {
    const Kernel &kernel = *w.block->running->kernel;
    Count *const counts = w.block->running->counts->instructions.data();
    const bool timed = w.block->running->launch->count_memory;
    bool ran = false;
    while (!w.paths.empty() && w.waits_at < 0) {
        Path &path = w.paths.back();
        if (!path.mask || (path.at == path.join && w.paths.size() > 1)) {
            w.paths.pop_back();
            continue;
        }
        const Instruction &i = kernel.code[size_t(path.at)];
        w.instruction = &i;
        w.active = path.mask;
        if (i.guard >= 0) w.active &= i.guard_negated ? ~w.predicate(i.guard) : w.predicate(i.guard);
        if (kernel.uses_wgmma && i.control == Control::none && w.active) note_registers(w, i);
        Count &count = counts[path.at];
        const Count before = count;
        if (i.control == Control::none && w.active) {
            i.run(w, i);
            if (std::exchange(w.stalled, false)) return ran;
        }
        ran = true;
        if (timed && w.active) time_instruction(w, i, before);
        if (timed && i.control != Control::none) time_control(w, i, w.active != 0);
        count.executed++, count.threads += uint64_t(std::popcount(i.control == Control::branch ? path.mask : w.active));
        if (i.control == Control::branch) {
            branch(w, i, w.active);
            continue;
        }
        path.at++;
        if (!w.active) continue;
        if (i.control == Control::leave) leave(w, w.active);
        else if (i.control != Control::none) arrive(w, i);
    }
    return ran;
}

// ---- a cluster --------------------------------------------------------------------------------------------------------------------

// Ends the launch with a message about all waiting warps. The message begins with a warp that waits for bytes of a copy or for registers, if there is
// one, because that wait is the cause of the deadlock and not a consequence.
[[noreturn]] void explain_deadlock(const std::vector<Warp *> &warps) {
    const auto why_of = [](const Warp &w) {
        return w.waits_at >= 0 ? format("waits at barrier %d for threads that do not come", w.waits_at) : w.why();
    };
    const Warp *first = nullptr;
    bool caused = false;
    std::string all, last;
    int lines = 0;
    for (const Warp *w : warps) {
        if (w->paths.empty()) continue;
        const std::string why = why_of(*w);
        const bool cause = why.find("bytes of") != std::string::npos || why.find("setmaxnreg") != std::string::npos;
        if (!first || (cause && !caused)) first = w, caused = cause;
        if (why != last && lines++ < 8)
            all += format("\n  block (%u,%u,%u), warp %d, line %d: ", w->block->index[0], w->block->index[1], w->block->index[2],
                          w->number, w->instruction->line) +
                   why;
        last = why;
    }
    first->fail(0, why_of(*first) + (lines > 1 ? ". No warp can go on:" + all : ""));
}

// Called after the last warp of a block has returned.
void end_blocks(Cluster &cluster) {
    for (Block &block : cluster.blocks)
        if (!block.ended && std::all_of(block.warps.begin(), block.warps.end(), [](const Warp &w) { return w.paths.empty(); })) {
            check_inward_copies(block);
            check_end(block);
            block.ended = true;
        }
}
}  // namespace

// Warps take turns in a random order, each until it waits. A copy in flight lands at a random time, at the latest when all warps wait.
bool run_cluster(Cluster &cluster, std::mt19937 &random, bool may_wait) {
    constexpr int patience = 64;  // rounds without progress, in which bounded waits give up; then the cluster is stuck
    std::vector<Warp *> order;
    for (Block &block : cluster.blocks)
        for (Warp &w : block.warps) order.push_back(&w);
    const std::vector<Warp *> warps = order;
    const auto ended = [](const Warp *w) { return w->paths.empty(); };
    for (int idle = 0; !std::all_of(order.begin(), order.end(), ended);) {
        std::shuffle(order.begin(), order.end(), random);
        const uint64_t before = cluster.events;
        bool progress = false;
        for (Warp *w : order) {
            if (w->paths.empty() || w->waits_at >= 0) continue;
            const bool gives_up = w->expired;
            progress |= run_warp(*w) && !gives_up;
            w->expired = false;
        }
        end_blocks(cluster);
        if (!cluster.inward.empty() && (random() % 4 == 0 || !progress)) {
            land(cluster, random() % cluster.inward.size());
            progress = true;
        }
        if (progress || cluster.events != before) idle = 0;
        else if (++idle < patience)
            for (Warp *w : order) w->expired = true;
        else if (may_wait) return false;
        else explain_deadlock(warps);
    }
    return true;
}
}  // namespace ptx
